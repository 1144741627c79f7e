"""The commands and their options. Rooms are imported inside a command, so that --help loads none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Train language models as fast as this machine allows, with every gain explained and confirmed.")
runs = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The runs in a folder, and what one came to.")
app.add_typer(runs, name="runs")

# `--learning_rate=3e-4` is taken like `learning_rate=3e-4`; a mistyped option is refused by the recipe, with a hint
WORDS = {"ignore_unknown_options": True}
Words = Annotated[list[str] | None, typer.Argument(
    metavar="[RECIPE] [KEY=VALUE ...]", help="A recipe file or name, then values that override it.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]


@app.command(context_settings=WORDS)
def train(words: Words = None,
          output: Annotated[Path | None, typer.Option(help="Folder for this run (default: runs/NAME-DATE).")] = None,
          resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
          dry_run: Annotated[bool, typer.Option(help="Only say what would be done.")] = False,
          json: Json = False,
          quiet: Annotated[bool, typer.Option(help="Only the result.")] = False) -> None:
    """Train a model; without a recipe, the embedded one."""
    from powertrain.cli import training

    raise typer.Exit(training.train(words or [], output=output, resume=resume, dry_run=dry_run, as_json=json, quiet=quiet))


@app.command(context_settings=WORDS)
def plan(words: Words = None, json: Json = False) -> None:
    """Say which techniques would be in force and why, and what time and memory to expect."""
    from powertrain.cli import training

    training.show_plan(words or [], as_json=json)


@app.command(context_settings=WORDS)
def facts(words: Words = None, json: Json = False,
          measure: Annotated[bool, typer.Option(help="Measure the machine again.")] = False) -> None:
    """Show what is known of machine, software, model and data, with sources."""
    from powertrain.cli import looking

    looking.show_facts(words or [], as_json=json, measure=measure)


@app.command()
def generate(model: Annotated[str, typer.Argument(help="A run, or a model folder.")],
             prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
             tokens: Annotated[int, typer.Option(min=1, help="Tokens to write.")] = 200,
             temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
             top_k: Annotated[int | None, typer.Option(min=1, help="Only among the k likeliest tokens.")] = None,
             top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Only among the likeliest, up to p.")] = None,
             seed: Annotated[int, typer.Option(min=0)] = 0, json: Json = False) -> None:
    """Write text with a trained model."""
    from powertrain.cli import using

    using.generate_text(Path(model), prompt, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
                        as_json=json)


@app.command()
def evaluate(model: Annotated[str, typer.Argument(help="A run, or a model folder.")],
             data: Annotated[str | None, typer.Option(help="Text to measure on (default: the run's held-out text).")] = None,
             json: Json = False) -> None:
    """Measure a trained model on held-out text: loss, perplexity, bits per byte."""
    from powertrain.cli import using

    using.evaluate_model(Path(model), data, as_json=json)


@runs.command("list")
def runs_list(folder: Annotated[Path, typer.Argument(help="Where the runs are.")] = Path("runs"), json: Json = False) -> None:
    """List runs with their state and result."""
    from powertrain.cli import looking

    looking.list_runs(folder, as_json=json)


@runs.command("show")
def runs_show(run: Annotated[Path, typer.Argument(help="The run's folder.")], json: Json = False) -> None:
    """Show one run: plan, result, sample."""
    from powertrain.cli import looking

    looking.show_run(run, as_json=json)


def version(value: bool) -> None:
    if value:
        from powertrain import __version__

        typer.echo(f"powertrain {__version__}")
        raise typer.Exit


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=version, is_eager=True,
                                                  help="Show the version.")] = False) -> None:
    pass
