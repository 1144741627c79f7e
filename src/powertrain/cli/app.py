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
data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="A recipe's data, before any training.")
app.add_typer(data, name="data")
claims = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What five systems' documents claim, against what is "
                                                                       "measured here.")
app.add_typer(claims, name="claims")

# `--learning_rate=3e-4` is taken like `learning_rate=3e-4`; a mistyped option is refused by the recipe, with a hint
WORDS = {"ignore_unknown_options": True}
Words = Annotated[list[str] | None, typer.Argument(
    metavar="[RECIPE] [KEY=VALUE ...]", help="A recipe file or name, then values that override it.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on stdout.")]
Model = Annotated[str, typer.Argument(help="A run, a model's folder or hub id, or an adapter's folder.", show_default=False)]
Base = Annotated[str | None, typer.Option(help="Of an adapter: where its base is now.")]
Provider = Annotated[str | None, typer.Option(help="Who computes it: native or transformers (default: native if it can).")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Only among the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Only among the likeliest, up to p.")]
Seed = Annotated[int, typer.Option(min=0)]
Budget = Annotated[str, typer.Option(help="Time to spend: 90s, 10m, 1h.")]
StudyName = Annotated[str | None, typer.Option("--study", help="Name of the study's folder in studies/ (default: DATE_WHAT).")]
System = Annotated[str | None, typer.Option(help="The system text of the conversation.")]


@app.command(context_settings=WORDS)
def train(words: Words = None,
          output: Annotated[Path | None, typer.Option(help="Folder for this run (default: runs/NAME-DATE).")] = None,
          resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
          dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
          json: Json = False,
          quiet: Annotated[bool, typer.Option("--quiet", help="Only the result.")] = False) -> None:
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
          measure: Annotated[bool, typer.Option("--measure", help="Measure the machine again.")] = False) -> None:
    """Show what is known of machine, software, model and data, with sources."""
    from powertrain.cli import looking

    looking.show_facts(words or [], as_json=json, measure=measure)


@app.command()
def generate(model: Model, prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
             tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 200,
             temperature: Temperature = 0.8, top_k: TopK = None, top_p: TopP = None, seed: Seed = 0,
             template: Annotated[bool, typer.Option("--template", help="The prompt is a user's message, for the chat "
                                                    "template; only the answer is printed.")] = False,
             system: System = None,
             show_prompt: Annotated[bool, typer.Option("--show-prompt", help="Print the exact prompt first.")] = False,
             base: Base = None, provider: Provider = None, json: Json = False) -> None:
    """Write text with a trained model: a run, a base, an adapter or a merged model."""
    from powertrain.cli import using

    using.generate_text(model, prompt, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
                        as_json=json, base=base, provider=provider, template=template, system=system, show_prompt=show_prompt)


@app.command()
def chat(model: Model,
         message: Annotated[str | None, typer.Option(help="Answer this one message and end.")] = None,
         system: System = None,
         tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
         temperature: Temperature = 0.7, top_k: TopK = None, top_p: TopP = None, seed: Seed = 0,
         show_prompt: Annotated[bool, typer.Option("--show-prompt", help="Show the exact prompt of each answer.")] = False,
         base: Base = None, provider: Provider = None, json: Json = False) -> None:
    """Talk with a trained model; /help names what else can be written."""
    from powertrain.cli import chatting

    chatting.chat(model, base=base, provider=provider, system=system, message=message, tokens=tokens, temperature=temperature,
                  top_k=top_k, top_p=top_p, seed=seed, show_prompt=show_prompt, as_json=json)


@app.command()
def evaluate(model: Model,
             data: Annotated[str | None, typer.Option(help="Text or rows to measure on (default: what the run held "
                                                      "out).")] = None,
             metric: Annotated[str | None, typer.Option(help="Ask the questions in the data and score the answers: exact, f1, "
                                                        "rouge, gsm8k, or auto.")] = None,
             limit: Annotated[int, typer.Option(min=1, help="With --metric: questions at most.")] = 200,
             tokens: Annotated[int, typer.Option(min=1, help="With --metric: tokens of an answer at most.")] = 256,
             base: Base = None, provider: Provider = None, json: Json = False) -> None:
    """Measure a trained model: loss and perplexity, of text also bits per byte; with --metric its answers."""
    from powertrain.cli import using

    using.evaluate_model(model, data, as_json=json, base=base, provider=provider, metric=metric, limit=limit, tokens=tokens)


@app.command()
def export(model: Model,
           to: Annotated[str, typer.Option(help="adapter (PEFT), merged (a Hugging Face folder) or gguf (llama.cpp).")],
           output: Annotated[Path, typer.Option(help="A new folder.")],
           dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; gguf also q8_0 (default: as the base is "
                                                     "stored).")] = None,
           base: Base = None, provider: Provider = None, json: Json = False) -> None:
    """Write a trained model as files for other programs; nothing that differs from it is written."""
    from powertrain.cli import exporting

    exporting.export(model, to=to, folder=output, dtype=dtype, base=base, provider=provider, as_json=json)


@data.command("check", context_settings=WORDS)
def data_check(words: Words = None, json: Json = False) -> None:
    """Report bad rows, duplicates, truncation, lengths and padding, with file and line."""
    from powertrain.cli import data as bodies

    bodies.check(words or [], as_json=json)


@data.command("show", context_settings=WORDS)
def data_show(words: Words = None, index: Annotated[int, typer.Option(min=0, help="Which example, from 0.")] = 0,
              json: Json = False) -> None:
    """Show one example as the model sees it, its trained tokens marked."""
    from powertrain.cli import data as bodies

    bodies.show(words or [], index=index, as_json=json)


@data.command("prepare", context_settings=WORDS)
def data_prepare(words: Words = None, json: Json = False) -> None:
    """Tokenise the data into the cache; training uses it again."""
    from powertrain.cli import data as bodies

    bodies.prepare(words or [], as_json=json)


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


@runs.command("compare")
def runs_compare(a: Annotated[Path, typer.Argument(help="A run's folder.")],
                 b: Annotated[Path, typer.Argument(help="Another one's.")], json: Json = False) -> None:
    """Show how two runs differ: recipes, plans, results."""
    from powertrain.cli import comparing

    comparing.compare_runs(a, b, as_json=json)


@app.command(context_settings=WORDS)
def ablate(words: Words = None,
           technique: Annotated[list[str] | None, typer.Option("--technique", help="Only this one (may be repeated).")] = None,
           budget: Budget = "15m", study: StudyName = None, json: Json = False) -> None:
    """Measure what each technique of the plan does here: speed, memory, and whether the losses stay the same."""
    from powertrain.cli import proving

    proving.ablate(words or [], techniques=technique or [], budget=budget, study=study, as_json=json)


@app.command(context_settings=WORDS)
def tune(words: Words = None, budget: Budget = "10m", study: StudyName = None, json: Json = False) -> None:
    """Find the fastest plan at the same batch by short runs; later runs of the same kind use it."""
    from powertrain.cli import proving

    proving.tune(words or [], budget=budget, study=study, as_json=json)


@app.command(context_settings=WORDS)
def bench(words: Words = None, budget: Budget = "10m", study: StudyName = None, json: Json = False) -> None:
    """Measure memory by micro-batch, loader settings, precision and accumulation, and check what has to hold."""
    from powertrain.cli import benching

    raise typer.Exit(benching.bench(words or [], budget=budget, study=study, as_json=json))


@app.command(context_settings=WORDS)
def diagnose(words: Annotated[list[str] | None, typer.Argument(
                 metavar="[RECIPE | RUN] [KEY=VALUE ...]", show_default=False,
                 help="A recipe, probed by its first steps, or a run's folder, read from its events.")] = None,
             budget: Budget = "60s",
             probe: Annotated[bool, typer.Option(help="Watch first steps and try cures; without, only checks.")] = True,
             price_per_hour: Annotated[float | None, typer.Option(help="Of this machine: what the whole run costs.")] = None,
             json: Json = False) -> None:
    """Say what holds a run back, with the cure. Exit code: 0 nothing above low, 4 moderate, 5 critical findings."""
    from powertrain.cli import diagnosing

    raise typer.Exit(diagnosing.diagnose(words or [], budget=budget, probe=probe, price_per_hour=price_per_hour, as_json=json))


@app.command()
def report(target: Annotated[Path, typer.Argument(help="A run's or a study's folder.")],
           output: Annotated[Path | None, typer.Option(help="Where report.html, .md and .json go (default: TARGET).")] = None,
           json: Json = False) -> None:
    """Write what a run or a study came to as one HTML file, with Markdown and JSON beside it."""
    from powertrain.cli import reporting

    reporting.report(target, output=output, as_json=json)


@claims.command("list")
def claims_list(json: Json = False) -> None:
    """List the claims: what is claimed, on which conditions, and whether it can be decided here."""
    from powertrain.cli import claiming

    claiming.show_list(as_json=json)


@claims.command("run")
def claims_run(ids: Annotated[list[str] | None, typer.Argument(metavar="[ID ...]", help="Which (default: all that can be "
                                                               "decided here).", show_default=False)] = None,
               budget: Budget = "1h", study: StudyName = None, json: Json = False) -> None:
    """Measure claims here, each by its own experiment."""
    from powertrain.cli import claiming

    claiming.run(ids or [], budget=budget, study=study, as_json=json)


@claims.command("report")
def claims_report(json: Json = False) -> None:
    """Show for every claim what is claimed, what was measured here, and the verdict."""
    from powertrain.cli import claiming

    claiming.report(as_json=json)


def version(value: bool) -> None:
    if value:
        from powertrain import __version__

        typer.echo(f"powertrain {__version__}")
        raise typer.Exit


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=version, is_eager=True,
                                                  help="Show the version.")] = False) -> None:
    pass


@app.command()
def audit(path: Annotated[Path, typer.Argument(help="A training script or config of any trainer, or a folder of them.",
                                               show_default=False)],
          json: Json = False,
          sarif: Annotated[Path | None, typer.Option(help="Also as SARIF 2.1.0 into this file (- for stdout).")] = None,
          markdown: Annotated[Path | None, typer.Option(help="Also as Markdown into this file (- for stdout).")] = None,
          apply: Annotated[bool, typer.Option("--apply", help="Write the patched copy: NAME.patched.py, or --output.")] = False,
          convert: Annotated[bool, typer.Option("--convert", help="Instead: the equivalent recipe, on stdout or into "
                                                                  "--output.")] = False,
          verify: Annotated[bool, typer.Option("--verify", help="Instead: run that recipe beside the original's way, and "
                                                                "print the difference.")] = False,
          output: Annotated[Path | None, typer.Option(help="Where --apply or --convert writes.")] = None,
          budget: Annotated[str, typer.Option(help="Time for --verify: 90s, 2m.")] = "2m",
          elsewhere: Annotated[bool, typer.Option("--elsewhere", help="It runs on another machine: do not look at "
                                                                      "this one.")] = False) -> None:
    """Say what to change in a training script or config of any trainer, without running it.

    Exit code: 0 nothing above low, 4 moderate, 5 critical findings.
    """
    if convert or verify:
        from powertrain.cli import auditing_recipe

        auditing_recipe.refuse_together(convert=convert, verify=verify, apply=apply, sarif=sarif, markdown=markdown,
                                        output=output)
        if verify:
            auditing_recipe.verify_recipe(path, budget=budget, as_json=json)
        else:
            auditing_recipe.convert_to_recipe(path, out=output, as_json=json)
        return
    from powertrain.cli import auditing

    raise typer.Exit(auditing.audit(path, auditing.Reports(json, sarif, markdown), apply=apply, destination=output,
                                    elsewhere=elsewhere))
