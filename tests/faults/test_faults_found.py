"""What /shared's list of faults found by breaking it names and no other test holds: rows.py says which line is where."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bad_texts import M
from runs import ROWS, RUN, Count, World, check_ended, check_recovered, contents, of_run, stop

from example_folders import chat_folder
from powertrain.data.examples import trial
from powertrain.data.examples.templates import find_template
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.data.tokenizers import BytePairTokenizer
from powertrain.models.huggingface.folder import save_tensors
from powertrain.recipe import resolve
from powertrain.records import WrongUse
from powertrain.records.errors import LossNotFinite
from powertrain.run.folder import FREE_ON_RESUME, create

TUNED = ("train", "model.path=base", "data=../world/rows.jsonl", "data.max_length=64", "lora.r=2", "train_batch_size=4",
         "max_steps=2", "sample.tokens=0", "techniques.threads=off", "--output", "run")


def flip(path: Path, place: int, bits: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= bits
    path.write_bytes(content)


# ------------------------------------------------------------------------------------------------ silent ones


def test_a_run_does_not_go_on_beside_another_base(world: World, count: Count) -> None:
    folder = world.folder("other-base")
    shutil.copytree(world.root / "world" / "chat", folder / "base")
    world.whole(TUNED, folder)
    world.whole(("train", "--resume", "run"), folder)
    weights = folder / "base" / "model.safetensors"
    flip(weights, weights.stat().st_size // 2)           # the same shapes, other values
    ended = world.run(("train", "--resume", "run"), folder)
    assert ended.code == 2, ended.said[-2000:]
    assert f"was begun beside another base: {folder / 'base'} has changed since" in ended.said
    count("base changed under a run", 1)


@pytest.mark.parametrize("words", [RUN, ROWS], ids=["tokens", "examples"])
@pytest.mark.parametrize("damage", ["zeros", "one bit", "meta"])
def test_a_store_of_equal_size_with_other_content_is_made_again(world: World, count: Count, words: tuple[str, ...],
                                                                damage: str) -> None:
    cache, part = world.folder("damaged-store", world.cache), "tokens" if words == RUN else "examples"
    shutil.rmtree(cache / part, ignore_errors=True)      # other tests have left stores of other data
    world.whole(words, world.folder("store"), cache=str(cache))
    before = contents(cache / part)
    (meta,) = (cache / part).rglob("meta.json")
    for path in (meta.parent.glob("*.bin") if damage != "meta" else [meta]):
        size_bytes = path.stat().st_size
        if damage == "zeros":
            path.write_bytes(bytes(size_bytes))
        elif damage == "one bit" and size_bytes:
            flip(path, size_bytes // 2)
        elif damage == "meta":               # a digit: it is whole JSON still
            path.write_text(path.read_text().replace('"vocabulary": ', '"vocabulary": 1', 1))
    folder = world.folder("store")
    world.whole(words, folder, cache=str(cache))
    assert contents(cache / part) == before
    assert words != RUN or of_run(folder / "run") == world.unbroken
    count("stores of equal size with other content", 1)


# ------------------------------------------------------------------------------------------------ output


@pytest.mark.parametrize("way", ["closed", "full"])
@pytest.mark.parametrize("gone", [(1,), (2,), (1, 2)], ids=["stdout", "stderr", "both"])
def test_a_run_goes_on_where_nobody_takes_its_output(world: World, count: Count, way: str, gone: tuple[int, ...]) -> None:
    for more in ((), ("--json",)):
        folder = world.folder("unread")
        ended = world.run((*RUN, *more), folder, **{way: gone})
        assert (ended.code, "Traceback" in ended.said) == (0, False), ended.said[-2000:]
        check_recovered(world, folder)
    ended = world.run(("train", "--resume", "run"), folder, **{way: gone})       # which has nothing to say but the result
    assert ended.code == 0, ended.said
    folder, stopped = stop(world, "unread", **{way: gone})
    check_ended(stopped, folder / "run", (75,))          # the run's own code, though nobody takes its result
    count("output that nobody takes", 4)


def test_a_command_whose_answer_nobody_takes_says_so_and_a_closed_pipe_is_no_failure(world: World, count: Count) -> None:
    folder, words = world.folder("unread"), ("plan", *RUN[1:-2])
    ended = world.run(words, folder, closed=(1,))
    assert (ended.code, "powertrain: " in ended.said) == (0, False), ended.said
    for more in ((), ("--json",)):
        ended = world.run((*words, *more), folder, full=(1,))
        assert ended.code == 1
        assert "powertrain: standard output cannot be written (No space left on device)" in ended.said
        assert "Traceback" not in ended.said
    count("output that nobody takes", 3)


@pytest.mark.parametrize("option", ["--sarif", "--markdown"])
def test_a_report_of_an_audit_takes_the_place_of_nothing_but_such_a_report(world: World, count: Count, option: str) -> None:
    folder = world.folder("audited")
    (folder / "train.py").write_text("from transformers import Trainer\nTrainer()\n")
    (folder / "thesis").write_text("years of work")
    ended = world.run(("audit", "train.py", option, "thesis"), folder)
    assert (ended.code, (folder / "thesis").read_text()) == (2, "years of work")
    assert "thesis is there already and no report of an audit" in ended.said
    for _ in range(2):                       # its own it writes again
        assert world.run(("audit", "train.py", option, "report"), folder).code in (0, 4, 5)
    count("files in the way of a report", 1)


def test_evaluating_weights_that_are_not_finite_fails(world: World, count: Count) -> None:
    folder = world.folder("nan", world.root / "whole")
    path = folder / "run" / "model" / "model.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:header] + b"\xff" * (len(content) - header))
    for more in ((), ("--json",), ("--data", "../world/text.txt")):
        ended = world.run(("evaluate", "run", *more), folder)
        assert ended.code == 1, ended.said[-1000:]
        assert "powertrain: the loss is nan" in ended.said
    count("weights that are not finite", 3)


# ------------------------------------------------------------------------------------------------ folders and files


def test_a_folder_as_data_leaves_out_the_runs_that_are_written_in_it(world: World, count: Count) -> None:
    folder = world.folder("here")
    shutil.copy(world.root / "world" / "text.txt", folder)
    words = ("train", "data=.", *(word for word in RUN[2:-2]))
    for _ in range(2):
        world.whole(words, folder)
    runs = sorted((folder / "runs").iterdir())
    assert len(runs) == 2
    assert of_run(runs[0]) == of_run(runs[1])
    world.whole(("train", "--resume", str(runs[0])), folder)
    count("runs in the folder of their data", 3)


@pytest.mark.parametrize("name", [".lock", "plan.json", "facts.json", "checkpoints"])
def test_a_new_run_writes_through_no_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "thesis").write_text("years of work")
    (tmp_path / "run" / name).symlink_to(tmp_path / ("nothing" if name == ".lock" else "thesis"))
    with pytest.raises(WrongUse, match=f"has links for {name}"):
        create(resolve("char-shakespeare", [f"output_dir={tmp_path / 'run'}"]).recipe)
    assert (tmp_path / "thesis").read_text() == "years of work"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".x", "/x", "a\0b"])
def test_a_name_leads_nowhere_but_into_runs(name: str) -> None:
    with pytest.raises(WrongUse, match="name"):
        resolve("char-shakespeare", [f"name={json.dumps(name)}"])


def test_weights_have_the_permissions_of_the_files_beside_them(tmp_path: Path) -> None:
    for mask in (0o022, 0o027, 0o077):
        before = os.umask(mask)
        try:
            save_tensors({"a": torch.ones(2)}, tmp_path / f"{mask}.safetensors")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / f"{mask}.safetensors").stat().st_mode) == 0o666 & ~mask


def test_a_disk_that_is_full_for_a_tokenizers_file_is_an_oserror(tmp_path: Path) -> None:
    of_folder = open_example_tokenizer(chat_folder(tmp_path / "chat"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "tokenizer.json").symlink_to("/dev/full")
    for tokenizer in (of_folder, replace(of_folder, changed=True, files=()), BytePairTokenizer.trained(["aa bb"] * 9, 260)):
        with pytest.raises(OSError, match="No space left"):
            tokenizer.save(tmp_path / "full")


# ------------------------------------------------------------------------------------------------ words


@pytest.mark.parametrize("text", ["seed: 1\nseed: 2\n", "model:\n  layers: 1\n  layers: 1\n", "data: {block: 1, block: 2}"])
def test_a_key_that_stands_twice_in_a_recipe_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(WrongUse, match="stands there twice"):
        resolve(str(tmp_path / "recipe.yaml"), [])


def test_what_is_advised_after_a_bad_loss_can_be_done() -> None:
    """A run cannot be resumed with a lower learning_rate: so that is advised for a new run, and on_nan for a resumed one."""
    said = str(LossNotFinite(3, float("nan")))
    assert "Start a new run with a lower learning_rate" in said
    assert "or resume with on_nan=skip" in said
    assert "on_nan" in FREE_ON_RESUME
    assert "learning_rate" not in FREE_ON_RESUME


def test_a_template_that_writes_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_S", 0.5)
    for text in ("{{ lipsum(n=10**9) }}", M + "{{ lipsum(n=10**5) }}{% endfor %}"):
        folder = chat_folder(tmp_path / str(len(text)), text)
        with pytest.raises(WrongUse):
            find_template(open_example_tokenizer(folder), None)
