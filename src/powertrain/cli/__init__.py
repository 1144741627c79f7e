"""The command line: the commands by their names, and what happens when one fails. `powertrain --help` loads no torch.

A file of commands only parses: each command is one call into the rooms, which are imported within it.
"""

import io
import sys
from typing import Annotated, ClassVar

import typer

from powertrain.cli.grouping import Unread
from powertrain.cli.streams import FAILED, OutputGone, Stream


class Commands(Unread):
    """The commands."""

    places: ClassVar = {
        "train": ("training:train", "Train a model."),
        "plan": ("training:plan", "Show the recipe, the plan, and the expected time and memory."),
        "facts": ("training:facts", "Show what is known about machine, software, model and data."),
        "generate": ("using:generate", "Write text with a trained model."),
        "chat": ("using:chat", "Chat with a trained model in the terminal."),
        "serve": ("serving:serve", "Serve a trained model to programs that speak the OpenAI API."),
        "evaluate": ("using:evaluate", "Measure a model's loss, its answers, or its results on tasks."),
        "export": ("exporting:export", "Export a trained model for other programs."),
        "push": ("pushing:push", "Upload a model to the Hugging Face hub, with a model card."),
        "ablate": ("proving:ablate", "Measure the effect of each technique of the plan."),
        "tune": ("proving:tune", "Find the fastest plan at the same batch by short runs."),
        "bench": ("proving:bench", "Measure memory, loader settings, precision and accumulation."),
        "diagnose": ("proving:diagnose", "Find what makes a run slow or keeps it from learning."),
        "report": ("reporting:report", "Write an HTML report of a run or a study."),
        "audit": ("auditing:audit", "Report what to change in any trainer's script or config."),
        "launch": ("launching:launch", "Write a file that starts a run on a cluster."),
        "monitor": ("watching:monitor", "Watch running and finished runs."),
        "track": ("tracking:track", "Send a run or a study to trackers."),
        "ui": ("page:ui", "Show the page: start, watch and use runs in a browser."),
        "page": ("page:page", ""),
        "answer": ("page:answer", ""),
        "runs": ("reporting:runs", "List, show and compare runs."),
        "checkpoints": ("checkpoints:commands", "List, check, move and delete checkpoints."),
        "data": ("data:commands", "Check, show, clean, convert, mix and prepare data."),
        "claims": ("claiming:commands", "List and measure the speed claims of five training systems.")}


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


app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  context_settings={"max_content_width": 100}, callback=first_options, result_callback=exit_with,
                  help="Train language models as fast as this machine allows. Every gain is explained and measured.")


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
    except SystemExit:                       # how every command ends
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:           # a panic of a library's Rust code is no Exception
        from powertrain.cli.output import explain

        code = explain(error, as_json="--json" in sys.argv)
        if code is None:
            raise
        sys.exit(code)
