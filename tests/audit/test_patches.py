"""Patches: edits that contradict each other are left out, what is written parses, and the original stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from powertrain.audit.edits import copy_beside, make_patch, write_copy
from powertrain.records import WrongUse
from powertrain.records.findings import Cure, Edit, Expected, Finding


def finding(name: str, *edits: Edit) -> Finding:
    return Finding(name, "low", name, "", "fact", (), Expected("", "none"), Cure("", edits))


def made(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_bytes(text.encode())
    return path


def test_two_arguments_of_one_line_are_both_changed(tmp_path: Path) -> None:
    path = made(tmp_path, "f(a=1, b=2)\n")
    patch = make_patch([finding("a", Edit(str(path), 1, 1, "f(a=3, b=2)\n")),
                        finding("b", Edit(str(path), 1, 1, "f(a=1, b=4)\n"))])
    assert patch.after[str(path)] == "f(a=3, b=4)\n"


def test_of_two_changes_of_one_place_the_first_is_made(tmp_path: Path) -> None:
    path = made(tmp_path, "f(a=1)\n")
    patch = make_patch([finding("a", Edit(str(path), 1, 1, "f(a=3)\n")), finding("b", Edit(str(path), 1, 1, "f(a=4)\n"))])
    assert (patch.after[str(path)], [(left.rule, why) for left, why in patch.left_out]) == (
        "f(a=3)\n", [("b", "another fix changes the same place")])


def test_a_fix_that_breaks_the_file_is_left_out(tmp_path: Path) -> None:
    path = made(tmp_path, "f(a=1)\n")
    patch = make_patch([finding("x", Edit(str(path), 1, 1, "f(a=1, a=2)\n"))])
    assert (patch.applied, len(patch.left_out), patch.after[str(path)]) == ((), 1, "f(a=1)\n")


def test_an_import_that_two_fixes_need_is_added_once(tmp_path: Path) -> None:
    path = made(tmp_path, "x = 1\ny = 2\n")
    insert = Edit(str(path), 1, 0, "import os\n")
    patch = make_patch([finding("a", insert, Edit(str(path), 1, 1, "x = os\n")),
                        finding("b", insert, Edit(str(path), 2, 2, ""))])
    assert patch.after[str(path)] == "import os\nx = os\n"


def test_line_ends_stay_as_they_are(tmp_path: Path) -> None:
    path = made(tmp_path, "a = 1\r\nb = 2")
    patch = make_patch([finding("a", Edit(str(path), 1, 1, "a = 3\n")), finding("b", Edit(str(path), 2, 2, "b = 4\n"))])
    assert patch.after[str(path)] == "a = 3\r\nb = 4"


def test_the_patched_copy_is_beside_the_original_which_is_untouched(tmp_path: Path) -> None:
    path = made(tmp_path, "a = 1\n")
    patch = make_patch([finding("a", Edit(str(path), 1, 1, "a = 2\n"))])
    text = patch.after[str(path)]
    assert write_copy(str(path), text, copy_beside(path)) == tmp_path / "train.patched.py"
    assert (path.read_text(), (tmp_path / "train.patched.py").read_text()) == ("a = 1\n", "a = 2\n")
    with pytest.raises(WrongUse, match="another path"):
        write_copy(str(path), text, path)
