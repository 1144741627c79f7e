"""The help of every command: short lines, every option explained, no torch needed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
import typer
from typer.testing import CliRunner

from powertrain.cli import app

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
