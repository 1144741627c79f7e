"""A run killed while its folder is begun leaves each file whole or absent, and the next command says what to do."""

from __future__ import annotations

import builtins
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from powertrain.recipe import resolve
from powertrain.records import WrongUse
from powertrain.records.json_files import read_json, replace_file, write_json
from powertrain.run.folder import RunFolder, check_free, check_whole, create, existing, stored_recipe, write_beginning

FILES = ("facts.json", "plan.json", "origins.json", "recipe.yaml")


def begin(path: Path) -> RunFolder:
    resolved = resolve("char-shakespeare", [f"output_dir={path}"])
    folder = create(resolved.recipe)
    write_beginning(folder, {"hardware": "x" * 5000}, {"steps": []}, resolved)
    return folder


def kill_at(number: int) -> None:
    """Kill this process at the `number`-th call that writes, before it takes effect; of a write, half has taken effect."""
    left = itertools.count(1)

    def due() -> bool:
        return next(left) == number

    def killing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if due():
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)
        return wrapped

    def opening(path: Any, mode: str = "r", *rest: Any, open: Callable[..., Any] = builtins.open, **named: Any) -> Any:
        file = open(path, mode, *rest, **named)
        if "w" not in mode:
            return file
        write = file.write

        def half(content: bytes) -> int:
            if due():
                write(content[:len(content) // 2])
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return int(write(content))

        file.write = half
        return file

    os.fsync, os.replace, os.mkdir = killing(os.fsync), killing(os.replace), killing(os.mkdir)
    builtins.open = opening                  # type: ignore[assignment]


def killed(number: int, do: Callable[[], object]) -> bool:
    """Do something in a process that is killed at its `number`-th call; return False where it ended before."""
    child = os.fork()
    if not child:
        try:
            kill_at(number)
            do()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def folders(root: Path) -> Iterator[RunFolder]:
    for number in itertools.count(1):
        path = root / f"{number:02}"
        if not killed(number, partial(begin, path)):
            return
        yield RunFolder(path)


def test_a_kill_at_any_write_of_the_start_leaves_each_file_whole_or_absent(tmp_path: Path) -> None:
    whole = begin(tmp_path / "00")
    contents = {name: (whole.path / name).read_bytes() for name in FILES}
    tried = 0
    for tried, folder in enumerate(folders(tmp_path), 1):
        for name in FILES:
            if (file := folder.path / name).exists():
                found = file.read_bytes().replace(str(folder.path).encode(), str(whole.path).encode())
                assert found == contents[name], f"kill {tried}: {name}"
        if folder.recipe.exists():           # with it there is a run, and nothing of it is missing
            check_whole(existing(folder.path))
        else:                                # and before it there is none: another may begin here
            check_free(folder.path)
            begin(folder.path)
    assert tried >= 4 * len(FILES)           # a write, two syncs and a rename of each


def test_a_kill_while_the_plan_is_written_again_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """As after a step that ran out of memory: the run then goes on, and its folder is whole."""
    folder = begin(tmp_path / "run")
    new = {"steps": [], "made": "again" * 500}
    for number in itertools.count(1):
        write_json(folder.plan, {"steps": []})
        ended = not killed(number, partial(write_json, folder.plan, new))
        assert read_json(folder.plan) in ([new] if ended else [{"steps": []}, new])
        check_whole(folder)
        if ended:
            break
    assert number > 3


@pytest.mark.parametrize("name", ["facts.json", "plan.json"])
def test_a_folder_without_its_facts_or_plan_is_not_continued(tmp_path: Path, name: str) -> None:
    folder = begin(tmp_path / "run")
    (folder.path / name).unlink()
    with pytest.raises(WrongUse, match=f"has no {name}, which a run writes before its first step"):
        check_whole(folder)


def test_a_recipe_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run")
    text = folder.recipe.read_text()
    for lines in range(1, text.count("\n")):
        folder.recipe.write_text("".join(text.splitlines(keepends=True)[:lines]))
        with pytest.raises(WrongUse):
            stored_recipe(folder)


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append("content" if "tmp" in os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2] else "folder")
        fsync(descriptor)

    def renamed(*paths: Any) -> None:
        done.append("name")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    replace_file(tmp_path / "a.json", json.dumps({}).encode())
    assert done == ["content", "name", "folder"]
