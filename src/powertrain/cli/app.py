"""The commands by their names. `powertrain --help` imports their files, so those import the rooms within a command."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from powertrain.cli import auditing, claiming, data, diagnosing, exporting, proving, reporting, training, using

# `--learning_rate=3e-4` is taken like `learning_rate=3e-4`; a mistyped option is refused by the recipe, with a hint
WORDS = {"ignore_unknown_options": True}


def group(about: str, commands: Mapping[str, Callable[..., int | None]], **settings: Any) -> typer.Typer:
    """Return commands as one: the name of each, and the function that carries it out and returns its exit code or None."""
    found = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=about, **settings)
    for name, command in commands.items():
        takes_words = "words" in inspect.signature(command).parameters
        found.command(name, context_settings=WORDS if takes_words else None)(command)
    return found


def exit_with(code: int | None, **_: object) -> None:
    """End with the exit code that a command returned."""
    raise typer.Exit(code or 0)


def show_version(asked: bool) -> None:
    from powertrain import __version__

    if asked:
        typer.echo(f"powertrain {__version__}")
        raise typer.Exit


def options(version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True,
                                                  help="Show the version and exit.")] = False) -> None:
    """Take the options that stand before a command."""


app = group(
    "Train language models as fast as this machine allows. Every gain is explained and measured.",
    {"train": training.train, "plan": training.plan, "facts": training.facts, "generate": using.generate,
     "chat": using.chat, "evaluate": using.evaluate, "export": exporting.export, "ablate": proving.ablate,
     "tune": proving.tune, "bench": proving.bench, "diagnose": diagnosing.diagnose, "report": reporting.report,
     "audit": auditing.audit},
    add_completion=False, pretty_exceptions_enable=False, context_settings={"max_content_width": 100}, callback=options,
    result_callback=exit_with)
app.add_typer(name="runs", typer_instance=group("List, show and compare runs.", {
    "list": reporting.list_runs, "show": reporting.show, "compare": reporting.compare}))
app.add_typer(name="data", typer_instance=group("Check, show and prepare data before training.", {
    "check": data.check, "show": data.show, "prepare": data.prepare}))
app.add_typer(name="claims", typer_instance=group("List, measure and report five systems' claims.", {
    "list": claiming.show_list, "run": claiming.run, "report": claiming.report}))
