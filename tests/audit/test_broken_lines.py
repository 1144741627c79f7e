"""A script with lines that Python cannot parse is read without them, and what they may say is not held against it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, PLAIN, loop
from program_cases import PROGRAM_CASES
from running_cases import RUNNING_CASES
from test_projects import MODEL, TRAINING, command, project
from test_trl_rules import found

from powertrain.audit.parsing import MOST_UNPARSED, parsed_in_part
from powertrain.audit.rules import program

STARTED = TRAINING + MODEL + "args = TrainingArguments('out')\nTrainer(model, args).train()\n"


@pytest.mark.parametrize(("text", "read", "left_out"), [
    ("a = 1\nelse :\n    b = 2\n", "a = 1\nif True:\n    b = 2", "else :\n"),
    ("a = 1\n    b = 2\nc = 3\n", "a = 1\nb = 2\nc = 3", ""), ("for a in b\n    c()\n", "for a in b:\n    c()", ""),
    ("if a:\n    b()\n\n        c()\n", "if a:\n    b()\n    c()", ""),
    ("a(1))\nb()\n", "a(1)\nb()", ""), ("a = [1\nb()\n", "a = [1]\nb()", ""), ("a(\n  b=1,\n", "b = (1,)", "a(\n"),
    ("def a():\nb()\n", "b()", "def a():\n"), ("if a:\n\tb()\n        c()\n", "if a:\n    b()", "        c()\n"),
    ("a b\nreturn = 3\nc()\n", "c()", "a b\nreturn = 3\n")])
def test_broken_lines_are_mended_or_left_out(text: str, read: str, left_out: str) -> None:
    tree, unparsed = parsed_in_part(text)
    assert (ast.unparse(tree), unparsed) == (read, left_out)


@pytest.mark.parametrize("line", ["           total += loss.item()", "        total += (1)) * loss.item()"])
def test_a_line_that_is_mended_keeps_its_columns(line: str, tmp_path: Path) -> None:
    broken = loop(*PLAIN, "total += loss.item()").replace("        total += loss.item()", line)
    assert [item.what for each in found("item_each_step", broken, tmp_path) for item in each.evidence] == ["loss.item()"]


@pytest.mark.parametrize("text", ["a b\n" * MOST_UNPARSED, "a = 1\rdef (\r"])
def test_what_has_too_many_broken_lines_is_refused_at_the_first(text: str) -> None:
    with pytest.raises(SyntaxError) as refused:
        parsed_in_part(text)
    assert refused.value.lineno == (1 if "a b" in text else 2)


def test_a_long_script_is_not_parsed_many_times() -> None:
    parsed_in_part("x = = 3\n" * 4 + "y = 1\n" * 200_000)
    with pytest.raises(SyntaxError):
        parsed_in_part("x = = 3\n" * 5 + "y = 1\n" * 200_000)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python takes them")
@pytest.mark.parametrize("line", [
    "def first[T](x: list[T]) -> T:\n    return x[0]", "type X = int", 'print(f"{\n    data[0]}")'])
def test_a_newer_python_takes_more(line: str, tmp_path: Path) -> None:
    assert not found("refused_by_python", f"{HEAD}{line}\n", tmp_path)
    assert found("refused_by_python", f"{HEAD}x = = 3\n", tmp_path)


def test_a_few_broken_lines_are_not_too_many() -> None:
    assert parsed_in_part("a b\n" * (MOST_UNPARSED - 1))[0].body == []


@pytest.mark.parametrize(("rule", "text", "line", "broken"), [
    ("undefined_names", HEAD + "width = 8\nprint(width)\n" + ARGUMENTS, "width = 8", "width = 8 8"),
    ("names_out_of_reach", RUNNING_CASES["names_out_of_reach"][0].replace("def second", "width = 8\ndef second"),
     "width = 8\nd", "width = 8 8\nd"),
    ("used_before_given", HEAD + "width = 8\nprint(width)\nwidth = 2\n" + ARGUMENTS, "width = 8", "width = 8 8"),
    ("never_stepped", loop(*PLAIN), "optimizer.step()", "optimizer.step( 8 8"),
    ("never_saved", loop(*PLAIN, after="torch.save(model, 'x')\n"), "torch.save(model, 'x')", "torch.save(model 8, 'x')")])
def test_what_a_broken_line_says_is_not_missed(rule: str, text: str, line: str, broken: str, tmp_path: Path) -> None:
    assert found(rule, text.replace(line, "d" if "\n" in line else "pass"), tmp_path)
    assert not found(rule, text.replace(line, broken), tmp_path)
    assert found("refused_by_python", text.replace(line, broken), tmp_path)


def test_rules_go_on_behind_a_broken_line(tmp_path: Path) -> None:
    fires = PROGRAM_CASES["reports_to_none"][0]
    assert found("reports_to_none", fires.replace(HEAD, HEAD + "print 'begins'\n"), tmp_path)


def test_a_module_with_a_broken_line_is_read(tmp_path: Path) -> None:
    path = project(tmp_path, rows="RATE = 1\ndef made(:\n    return 8\n", train="from rows import RATE, made\n" + STARTED)
    assert not found("names_not_in_module", path.read_text(), tmp_path)
    assert found("names_not_in_module", path.read_text().replace("made", "lost"), tmp_path)
    assert [str(item.place) for each in found("refused_by_python", path.read_text(), tmp_path) for item in each.evidence] == [
        f"{tmp_path / 'rows.py'}:2"]


@pytest.mark.parametrize(("version", "fires"), [((3, 11), False), ((3, 12), True)])
def test_what_newer_releases_of_python_take_is_not_refused(
        version: tuple[int, int], fires: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise SyntaxError("f-string: expecting '}'")

    monkeypatch.setattr(program.sys, "version_info", version)
    monkeypatch.setattr(program, "compile", refuses, raising=False)
    assert bool(found("refused_by_python", HEAD + ARGUMENTS, tmp_path)) == fires


@pytest.mark.parametrize(("module", "line", "says"), [
    ("", "for row in rows\n    pass\n", "train.py:5 is not Python"), ("", "print 'begins'\n", "train.py:5 is not Python"),
    ("x = 1\nprint 'more'\n", "", "a module that"), ("x = 1\n", "", "")])
def test_a_script_that_is_read_in_part_is_not_converted(module: str, line: str, says: str, tmp_path: Path) -> None:
    path = project(tmp_path, rows=module, train=STARTED + line + "import rows\n")
    code, _, complaint = command(tmp_path, str(path), "--convert")
    said = " ".join(complaint.split())
    assert (code == 2, says in said, "correct the syntax first" in said) == (bool(says), True, bool(says))
