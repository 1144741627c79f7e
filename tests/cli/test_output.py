"""What reaches a person: in any character set, in one sentence, and with commands that there are."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import powertrain
from powertrain.cli import app, main
from powertrain.cli.output import explain, print_json
from powertrain.cli.streams import FAILED

SOURCE = Path(powertrain.__file__).parent
COMMAND = re.compile(r"`powertrain ((?:[a-z]+ ?)+)")


def test_a_character_that_the_terminal_does_not_have_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "é" / "b").mkdir(parents=True)
    (tmp_path / "é" / "b" / "recipe.yaml").touch()
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["powertrain", "runs", "list", str(tmp_path / "é")])
    with pytest.raises(SystemExit) as ended:
        main()
    sys.stdout.flush()
    assert ended.value.code == 0
    assert b"?/b" in written.getvalue()


def test_an_interrupt_leaves_no_line_without_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            if self.getvalue():
                raise KeyboardInterrupt
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", written := Interrupted())
    with contextlib.suppress(KeyboardInterrupt):
        print_json({"event": "piece"})
    assert written.getvalue() == '{"event": "piece"}\n'


@pytest.mark.parametrize("error", [
    MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("could not create a memory object"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried")])
def test_a_failed_allocation_is_a_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(error, as_json=False) == FAILED
    assert capsys.readouterr().err.startswith("powertrain: out of memory; ")


def test_a_panic_of_a_library_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    class PanicException(BaseException):     # as pyo3 makes its own
        pass

    assert explain(PanicException("range end index 9 out of range"), as_json=False) == 2
    assert "a library broke off at what a file says (range end index 9" in capsys.readouterr().err


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    assert explain(RuntimeError("shapes cannot be multiplied"), as_json=False) is None


def texts() -> Iterator[tuple[Path, str]]:
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield file, node.value


def test_every_command_that_is_named_exists() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    known = {(name,) for name in commands} | {
        (name, inner) for name, group in commands.items() for inner in getattr(group, "commands", {})}
    named = [(file.name, tuple(words.split()[:2])) for file, text in texts() for words in COMMAND.findall(text)]
    assert len(named) > 50
    groups = {name for name, group in commands.items() if hasattr(group, "commands")}
    wrong = [(file, words) for file, words in named
             if words[:1] not in known or (words[0] in groups and len(words) > 1 and words not in known)]
    assert not wrong
