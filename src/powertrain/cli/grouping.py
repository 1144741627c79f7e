"""Groups of commands. The file of a command is read when the command is used, so that `powertrain --help` is quick."""

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, ClassVar, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

# `--learning_rate=3e-4` is taken like `learning_rate=3e-4`; a mistyped option is refused by the recipe, with a hint
WORDS = {"ignore_unknown_options": True}


def group(about: str, commands: Mapping[str, Callable[..., int | None]]) -> typer.Typer:
    """Return commands as one: the name of each, and the function that carries it out and returns its exit code or None."""
    found = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False, help=about)
    for name, command in commands.items():
        takes_words = "words" in inspect.signature(command).parameters
        found.command(name, context_settings=WORDS if takes_words else None)(command)
    return found


class Unread(TyperGroup):
    """Commands by their names: the place of each, and its first sentence; without a sentence it is hidden."""

    places: ClassVar[Mapping[str, tuple[str, str]]]      # such as "training:train", of its file and function

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast(MutableMapping[str, Any], Reading(self.places))

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, (_, about) in self.places.items() if about]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.places[name][1]) for name in self.list_commands(ctx)])


class Reading(Mapping[str, Any]):
    """Commands by their names; asking for one reads its file."""

    def __init__(self, places: Mapping[str, tuple[str, str]]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = self._places[name][0].partition(":")
        found = getattr(import_module(f"powertrain.cli.{module}"), attribute)
        return get_command(found if isinstance(found, typer.Typer) else group("", {name: found}))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
