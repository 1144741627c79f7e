"""The command line: the commands by their names, and what happens when one fails. `powertrain --help` loads no torch.

A file of commands only parses: each command is one call into the rooms, which are imported within it.
"""

import inspect
import io
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

import powertrain.cli.watching as watching
from powertrain.cli import (
    auditing,
    checkpoints,
    claiming,
    curating,
    data,
    exporting,
    launching,
    page,
    proving,
    pushing,
    reporting,
    serving,
    tracking,
    training,
    using,
)
from powertrain.cli.output import FAILED, OutputGone, Stream, explain

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
    from powertrain.records.version import VERSION

    if asked:
        typer.echo(f"powertrain {VERSION}")
        raise typer.Exit


def first_options(version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True,
                                                        help="Show the version and exit.")] = False) -> None:
    """Take the options that stand before a command."""


app = group(
    "Train language models as fast as this machine allows. Every gain is explained and measured.",
    {"train": training.train, "plan": training.plan, "facts": training.facts, "generate": using.generate,
     "chat": using.chat, "serve": serving.serve, "evaluate": using.evaluate, "export": exporting.export,
     "push": pushing.push, "ablate": proving.ablate, "tune": proving.tune, "bench": proving.bench,
     "diagnose": proving.diagnose, "report": reporting.report, "audit": auditing.audit, "launch": launching.launch,
     "monitor": watching.monitor, "track": tracking.track, "ui": page.ui},
    pretty_exceptions_enable=False, context_settings={"max_content_width": 100},
    callback=first_options, result_callback=exit_with)
app.command("page", hidden=True)(page.page)
app.command("answer", hidden=True)(page.answering(app))          # asked by the page
app.add_typer(name="runs", typer_instance=group("List, show and compare runs.", {
    "list": reporting.list_runs, "show": reporting.show, "compare": reporting.compare}))
app.add_typer(name="checkpoints", typer_instance=group("List, check, move and delete checkpoints.", {
    "list": checkpoints.list_all, "show": checkpoints.show, "verify": checkpoints.verify, "compare": checkpoints.compare,
    "plot": checkpoints.plot, "upload": checkpoints.upload, "fetch": checkpoints.fetch, "prune": checkpoints.prune}))
app.add_typer(name="data", typer_instance=group("Check, show, clean, convert, mix and prepare data.", {
    "check": data.check, "show": data.show, "clean": curating.clean, "convert": curating.convert, "mix": curating.mix,
    "prepare": data.prepare, "join": data.join}))
app.add_typer(name="claims", typer_instance=group("List and measure the speed claims of five training systems.", {
    "list": claiming.show_list, "run": claiming.run, "report": claiming.report}))


def main() -> None:
    """Run a command. An error that the user can correct is one sentence on stderr and an exit code, never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")         # a character that a terminal does not have is no failure
        sys.stdout, sys.stderr = Stream(sys.stdout, silent=False), Stream(sys.stderr, silent=True)
    try:
        app(prog_name="powertrain")
    except OutputGone as error:              # `powertrain plan | head`: nobody reads on, and that is no failure
        if not error.by_reader:
            print(f"powertrain: {error}", file=sys.stderr)
        sys.exit(FAILED if not error.by_reader else 0)
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:           # a panic of a library's Rust code is no Exception
        code = explain(error, as_json="--json" in sys.argv)
        if code is None:
            raise
        sys.exit(code)
