"""The help of every command: short lines, every option explained, no torch needed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
import typer
from typer.testing import CliRunner

from powertrain.cli import Commands, app

WIDTH = 100


def commands(group: click.Command, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield names, group
    for name, command in sorted(getattr(group, "commands", {}).items()):
        yield from commands(command, (*names, name))


ALL = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("names", ALL, ids=" ".join)
class TestHelp:
    def test_its_lines_fit_and_it_begins_with_a_sentence(self, names: tuple[str, ...]) -> None:
        found = CliRunner().invoke(app, [*names, "--help"], prog_name="powertrain", terminal_width=WIDTH)
        assert found.exit_code == 0
        assert max(map(len, found.output.splitlines())) <= WIDTH
        about = (ALL[names].help or "").splitlines()[0]
        assert re.match(r"[A-Z][a-z]+,? .+\.$", about), about

    def test_every_option_and_argument_is_explained_in_a_sentence(self, names: tuple[str, ...]) -> None:
        for parameter in ALL[names].params:
            if parameter.name != "help":
                text = getattr(parameter, "help", None) or ""
                assert re.match(r"[A-Z].{8,}\.$", text), (parameter.name, text)


def test_every_command_is_described_in_the_list_without_being_cut() -> None:
    for names, group in ALL.items():
        for name in getattr(group, "commands", {}):
            listed = CliRunner().invoke(app, [*names, "--help"], prog_name="powertrain", terminal_width=80).output
            assert not re.search(rf"^  {name} .*\.\.\.$", listed, re.MULTILINE), listed


@pytest.mark.parametrize("name", Commands.places)
def test_the_list_says_what_the_command_says_first(name: str) -> None:
    about = Commands.places[name][1]
    assert (ALL[(name,)].help or "").startswith(about)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["trian"]])
def test_what_needs_no_command_reads_no_commands_file(words: list[str]) -> None:
    code = ("import sys\nfrom powertrain.cli import main\ntry: main()\nexcept SystemExit: pass\n"
            "print(*(name for name in sys.modules if name.startswith('powertrain.cli.')), file=sys.stderr)")
    found = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert found.stderr.splitlines()[-1].split() == ["powertrain.cli.grouping", "powertrain.cli.streams"]
