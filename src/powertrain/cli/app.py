"""The commands and their options. Rooms are imported inside a command, so that --help loads none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"max_content_width": 100},
    help="Train language models as fast as this machine allows. Every gain is explained and measured.")
runs = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show and compare runs.")
app.add_typer(runs, name="runs")
data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check, show and prepare data before training.")
app.add_typer(data, name="data")
claims = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, measure and report five systems' claims.")
app.add_typer(claims, name="claims")

# `--learning_rate=3e-4` is taken like `learning_rate=3e-4`; a mistyped option is refused by the recipe, with a hint
WORDS = {"ignore_unknown_options": True}
Words = Annotated[list[str] | None, typer.Argument(
    metavar="[RECIPE] [KEY=VALUE ...]", show_default=False,
    help="A recipe (file or name; default: the embedded recipe), then values that replace the recipe's values.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
Model = Annotated[str, typer.Argument(show_default=False, help="Folder of a run, a model or an adapter, or a hub id.")]
Base = Annotated[str | None, typer.Option(help="For an adapter: the folder or hub id of its base model.")]
Provider = Annotated[str | None, typer.Option(help="Library that computes the model: native or transformers (default: native "
                                                   "if possible).")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Randomness of the text; 0 always takes the most likely token.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Draw from the K most likely tokens only.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Draw from the most likely tokens, up to this total "
                                                                  "probability.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random draws; the same seed gives the same text.")]
Budget = Annotated[str, typer.Option(help="Time to spend, such as 90s, 10m or 1h.")]
StudyName = Annotated[str | None, typer.Option("--study", help="Name of the folder in studies/ (default: DATE_COMMAND).")]
System = Annotated[str | None, typer.Option(help="System text of the conversation.")]


@app.command(context_settings=WORDS)
def train(words: Words = None,
          output: Annotated[Path | None, typer.Option(help="Folder of this run (default: runs/NAME-DATE).")] = None,
          resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder.")] = None,
          dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and train nothing.")] = False,
          json: Json = False,
          quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result.")] = False) -> None:
    """Train a model. Without a recipe, train the embedded recipe.

    Exit code: 0 done, 1 failed, 2 unusable recipe, 3 trained but not all saved, 75 stopped and saved.
    """
    from powertrain.cli import training

    raise typer.Exit(training.train(words or [], output=output, resume=resume, dry_run=dry_run, as_json=json, quiet=quiet))


@app.command(context_settings=WORDS)
def plan(words: Words = None, json: Json = False) -> None:
    """Show all values, the plan with its reasons, time and memory.

    Nothing is trained. Every technique is listed as on or off, with the reason.
    """
    from powertrain.cli import training

    training.show_plan(words or [], as_json=json)


@app.command(context_settings=WORDS)
def facts(words: Words = None, json: Json = False,
          measure: Annotated[bool, typer.Option("--measure", help="Measure the machine's speed again.")] = False) -> None:
    """Show what is known about machine, software, model and data.

    Each fact is shown with its source.
    """
    from powertrain.cli import training

    training.show_facts(words or [], as_json=json, measure=measure)


@app.command()
def generate(model: Model, prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
             tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to write.")] = 200,
             temperature: Temperature = 0.8, top_k: TopK = None, top_p: TopP = None, seed: Seed = 0,
             template: Annotated[bool, typer.Option("--template", help="Treat the prompt as a user's message: apply the "
                                                    "chat template and print only the answer.")] = False,
             system: System = None,
             show_prompt: Annotated[bool, typer.Option("--show-prompt", help="Print the exact prompt first.")] = False,
             base: Base = None, provider: Provider = None, json: Json = False) -> None:
    """Write text with a trained model."""
    from powertrain.cli import using

    using.generate_text(model, prompt, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
                        as_json=json, base=base, provider=provider, template=template, system=system, show_prompt=show_prompt)


@app.command()
def chat(model: Model,
         message: Annotated[str | None, typer.Option(help="Answer this message and exit.")] = None,
         system: System = None,
         tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 512,
         temperature: Temperature = 0.7, top_k: TopK = None, top_p: TopP = None, seed: Seed = 0,
         show_prompt: Annotated[bool, typer.Option("--show-prompt", help="Print the exact prompt of each answer.")] = False,
         base: Base = None, provider: Provider = None, json: Json = False) -> None:
    """Chat with a trained model in the terminal. Type /help for more."""
    from powertrain.cli import chatting

    chatting.chat(model, base=base, provider=provider, system=system, message=message, tokens=tokens, temperature=temperature,
                  top_k=top_k, top_p=top_p, seed=seed, show_prompt=show_prompt, as_json=json)


@app.command()
def evaluate(model: Model,
             data: Annotated[str | None, typer.Option(help="File of text or rows to evaluate on (default: the "
                                                      "run's held-out data).")] = None,
             metric: Annotated[str | None, typer.Option(help="Ask the questions in the data and score the answers by exact, "
                                                        "f1, rouge, gsm8k or auto.")] = None,
             limit: Annotated[int, typer.Option(min=1, help="With --metric: maximum number of questions.")] = 200,
             tokens: Annotated[int, typer.Option(min=1, help="With --metric: maximum number of tokens of an answer.")] = 256,
             base: Base = None, provider: Provider = None, json: Json = False) -> None:
    """Measure a model's loss, or the quality of its answers.

    For text the result includes bits per byte. --metric asks questions and scores the answers.
    """
    from powertrain.cli import using

    using.evaluate_model(model, data, as_json=json, base=base, provider=provider, metric=metric, limit=limit, tokens=tokens)


@app.command()
def export(model: Model,
           to: Annotated[str, typer.Option(help="Format: adapter (PEFT), merged (a Hugging Face folder) or gguf (llama.cpp).")],
           output: Annotated[Path, typer.Option(help="New folder for the files.")],
           dtype: Annotated[str | None, typer.Option(help="Number type: float32, bfloat16, float16, or for gguf q8_0 "
                                                     "(default: the dtype of the base).")] = None,
           base: Base = None, provider: Provider = None, json: Json = False) -> None:
    """Export a trained model for other programs.

    The files are checked against the model before they are kept.
    """
    from powertrain.cli import exporting

    exporting.export(model, to=to, folder=output, dtype=dtype, base=base, provider=provider, as_json=json)


@data.command("check", context_settings=WORDS)
def data_check(words: Words = None, json: Json = False) -> None:
    """Report bad rows, duplicates, cut rows and padding."""
    from powertrain.cli import data as bodies

    bodies.check(words or [], as_json=json)


@data.command("show", context_settings=WORDS)
def data_show(words: Words = None, index: Annotated[int, typer.Option(min=0, help="Number of the example, from 0.")] = 0,
              json: Json = False) -> None:
    """Show one example as the model sees it, trained tokens marked."""
    from powertrain.cli import data as bodies

    bodies.show(words or [], index=index, as_json=json)


@data.command("prepare", context_settings=WORDS)
def data_prepare(words: Words = None, json: Json = False) -> None:
    """Tokenise the data once into the cache."""
    from powertrain.cli import data as bodies

    bodies.prepare(words or [], as_json=json)


@runs.command("list")
def runs_list(folder: Annotated[Path, typer.Argument(help="Folder with the runs.")] = Path("runs"),
              json: Json = False) -> None:
    """List the runs in a folder with their state and result."""
    from powertrain.cli import runs as bodies

    bodies.list_runs(folder, as_json=json)


@runs.command("show")
def runs_show(run: Annotated[Path, typer.Argument(help="Folder of the run.")], json: Json = False) -> None:
    """Show one run: recipe, plan, sample, result."""
    from powertrain.cli import runs as bodies

    bodies.show_run(run, as_json=json)


@runs.command("compare")
def runs_compare(a: Annotated[Path, typer.Argument(help="Folder of the first run.")],
                 b: Annotated[Path, typer.Argument(help="Folder of the second run.")], json: Json = False) -> None:
    """Show how two runs differ in recipe, plan, facts and result."""
    from powertrain.cli import runs as bodies

    bodies.compare_runs(a, b, as_json=json)


@app.command(context_settings=WORDS)
def ablate(words: Words = None,
           technique: Annotated[list[str] | None, typer.Option("--technique", help="Measure only this technique (may "
                                                                     "be repeated).")] = None,
           budget: Budget = "15m", study: StudyName = None, json: Json = False) -> None:
    """Measure the effect of each technique of the plan.

    The effect on speed, memory and losses, in runs with and without the technique.
    """
    from powertrain.cli import proving

    proving.ablate(words or [], techniques=technique or [], budget=budget, study=study, as_json=json)


@app.command(context_settings=WORDS)
def tune(words: Words = None, budget: Budget = "10m", study: StudyName = None, json: Json = False) -> None:
    """Find the fastest plan at the same batch by short runs.

    Later runs of the same kind on this machine use this plan.
    """
    from powertrain.cli import proving

    proving.tune(words or [], budget=budget, study=study, as_json=json)


@app.command(context_settings=WORDS)
def bench(words: Words = None, budget: Budget = "10m", study: StudyName = None, json: Json = False) -> None:
    """Measure memory, loader settings, precision and accumulation.

    Assertions about the results must hold; otherwise the exit code is 1.
    """
    from powertrain.cli import benching

    raise typer.Exit(benching.bench(words or [], budget=budget, study=study, as_json=json))


@app.command(context_settings=WORDS)
def diagnose(words: Annotated[list[str] | None, typer.Argument(
                 metavar="[RECIPE | RUN] [KEY=VALUE ...]", show_default=False,
                 help="A recipe, whose first steps are run, or a run's folder, whose events are read.")] = None,
             budget: Budget = "60s",
             probe: Annotated[bool, typer.Option(help="Run the first steps and try cures; --no-probe only checks.")] = True,
             price_per_hour: Annotated[float | None, typer.Option(help="Price of an hour of this machine, to report the "
                                                                   "cost of the run.")] = None,
             json: Json = False) -> None:
    """Find what makes a run slow or keeps it from learning.

    Each finding comes with its cure.

    Exit code: 0 no finding worse than low, 4 moderate findings, 5 critical findings.
    """
    from powertrain.cli import diagnosing

    raise typer.Exit(diagnosing.diagnose(words or [], budget=budget, probe=probe, price_per_hour=price_per_hour, as_json=json))


@app.command()
def report(target: Annotated[Path, typer.Argument(help="Folder of a run or a study.")],
           output: Annotated[Path | None, typer.Option(help="Folder for report.html, report.md and report.json "
                                                          "(default: TARGET).")] = None,
           json: Json = False) -> None:
    """Write an HTML report of a run or a study.

    Markdown and JSON are written beside the HTML file.
    """
    from powertrain.cli import reporting

    reporting.report(target, output=output, as_json=json)


@claims.command("list")
def claims_list(json: Json = False) -> None:
    """List the claims, and whether this machine can decide them."""
    from powertrain.cli import claiming

    claiming.show_list(as_json=json)


@claims.command("run")
def claims_run(ids: Annotated[list[str] | None, typer.Argument(metavar="[ID ...]", help="Claims to measure (default: all "
                                                               "that this machine can decide).", show_default=False)] = None,
               budget: Budget = "1h", study: StudyName = None, json: Json = False) -> None:
    """Measure claims on this machine, each with its own experiment."""
    from powertrain.cli import claiming

    claiming.run(ids or [], budget=budget, study=study, as_json=json)


@claims.command("report")
def claims_report(json: Json = False) -> None:
    """Show each claim with its measurement and verdict."""
    from powertrain.cli import claiming

    claiming.report(as_json=json)


def version(value: bool) -> None:
    if value:
        from powertrain import __version__

        typer.echo(f"powertrain {__version__}")
        raise typer.Exit


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=version, is_eager=True,
                                                  help="Show the version and exit.")] = False) -> None:
    pass


@app.command()
def audit(path: Annotated[Path, typer.Argument(help="A training script or config of any trainer, or a folder of such files.",
                                               show_default=False)],
          json: Json = False,
          sarif: Annotated[Path | None, typer.Option(help="Also write SARIF 2.1.0 to this file (- for stdout).")] = None,
          markdown: Annotated[Path | None, typer.Option(help="Also write Markdown to this file (- for stdout).")] = None,
          apply: Annotated[bool, typer.Option("--apply", help="Write a patched copy: NAME.patched.py, or --output.")] = False,
          convert: Annotated[bool, typer.Option("--convert", help="Instead, write the equivalent recipe to stdout or "
                                                                  "to --output.")] = False,
          verify: Annotated[bool, typer.Option("--verify", help="Instead, run that recipe beside the original's settings "
                                                                "and print the difference.")] = False,
          output: Annotated[Path | None, typer.Option(help="File for --apply or --convert.")] = None,
          budget: Annotated[str, typer.Option(help="Time for --verify, such as 90s or 2m.")] = "2m",
          elsewhere: Annotated[bool, typer.Option("--elsewhere", help="The training runs on another machine: do not "
                                                                      "judge it by this machine.")] = False) -> None:
    """Report what to change in any trainer's script or config.

    The file is read, not run.

    Exit code: 0 no finding worse than low, 4 moderate findings, 5 critical findings.
    """
    from powertrain.cli import auditing

    raise typer.Exit(auditing.run(path, auditing.Reports(json, sarif, markdown), apply=apply, to_recipe=convert, verify=verify,
                                  destination=output, budget=budget, elsewhere=elsewhere))
