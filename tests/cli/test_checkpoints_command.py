"""`powertrain checkpoints`: what is listed, shown, verified, compared and deleted."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from driver import TINY, run_cli
from powertrain.records.event_log import read_events
from powertrain.records.events import Step
from powertrain.run.folder import RunFolder, locked

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 4, 8 and 11, and an evaluation of each."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    text.write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)), encoding="utf-8")
    words = ["train", f"data={text}", *TINY, "eval_steps=4", "save_total_limit=3", "--output", "run"]
    code, _, err = run_cli(words, cache, folder)
    assert code == 0, err
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def told(cli: Cli, *words: str, code: int = 0) -> list[dict[str, Any]]:
    found, out, err = cli("checkpoints", *words, "--json")
    assert found == code, err
    return [json.loads(line) for line in out.splitlines()]


def test_each_checkpoint_tells_its_losses_speed_and_recipe(cli: Cli, run: Path) -> None:
    found = told(cli, "list", "run")
    assert [one["step"] for one in found] == [4, 8, 11]
    steps = {event.step: event for event in read_events(run / "events.jsonl") if isinstance(event, Step)}
    for one, first in zip(found, (1, 5, 9), strict=True):
        about, since = one["about"], [steps[step] for step in range(first, one["step"] + 1)]
        seconds = sum(step.seconds for step in since)
        assert about == json.loads((Path(run.parent, one["path"]) / "metadata.json").read_text())
        assert about["loss"] == since[-1].loss
        assert about["held_out_loss"] == about["evaluations"][str(one["step"])]
        assert about["tokens_per_s"] == pytest.approx(sum(step.tokens for step in since) / seconds)
        assert sum(about["share_of_time"].values()) == pytest.approx(1, abs=1e-3)
        assert about["recipe_sha256"] == hashlib.sha256((run / "recipe.yaml").read_bytes()).hexdigest()
        assert one["bytes"] == sum(file.stat().st_size for file in Path(run.parent, one["path"]).iterdir())
    code, out, err = cli("checkpoints", "list", "run")
    assert code == 0, err
    assert len(out.splitlines()) == 4
    assert out.count("lowest held-out loss") == 1


def test_one_checkpoint_is_shown_with_its_files(cli: Cli, run: Path) -> None:
    (newest,) = told(cli, "show", "run")
    assert newest["step"] == 11
    assert set(newest["files"]) == {"MANIFEST.json", "metadata.json", "model.safetensors", "optimizer.safetensors",
                                    "state.json"}
    assert told(cli, "show", "run", "--step", "4")[0]["step"] == 4
    assert "share_of_time" in cli("checkpoints", "show", "run")[1]
    code, _, err = cli("checkpoints", "show", "run", "--step", "5")
    assert (code, "it has 4, 8, 11" in err) == (2, True)


@pytest.mark.parametrize("name", ["metadata.json", "model.safetensors", "state.json"])
def test_a_flipped_bit_is_found(cli: Cli, run: Path, name: str) -> None:
    assert [one["whole"] for one in told(cli, "verify", "run")] == [True] * 3
    file = run / "checkpoints" / "step-000008" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    found = told(cli, "verify", "run", code=1)
    assert [one["whole"] for one in found] == [True, False, True]
    assert name in found[1]["why_not"]
    if name == "model.safetensors":
        code, _, err = cli("checkpoints", "compare", "run", "4", "8")
        assert (code, "is not whole" in err) == (2, True)


def test_two_checkpoints_are_compared_weight_by_weight(cli: Cli, run: Path) -> None:
    (found,) = told(cli, "compare", "run", "4", "11")
    before, after = (load_file(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors") for step in (4, 11))
    squares = {name: (float((after[name] - old).square().sum()), float(old.square().sum())) for name, old in before.items()}
    for name, (moved, size) in squares.items():
        assert found["moved"][name] == pytest.approx(math.sqrt(moved / size), rel=1e-4)
    all_moved, all_size = (sum(pair[part] for pair in squares.values()) for part in (0, 1))
    assert found["moved"]["all"] == pytest.approx(math.sqrt(all_moved / all_size), rel=1e-4)
    assert "of their norm" in cli("checkpoints", "compare", "run", "4", "11")[1]


def test_pruning_keeps_the_newest_and_the_best_and_refuses_a_run_that_trains(cli: Cli, run: Path) -> None:
    with locked(RunFolder(run)):
        code, _, err = cli("checkpoints", "prune", "run", "--keep", "1")
    assert (code, "another process is training" in err) == (2, True)
    losses = {one["step"]: one["about"]["held_out_loss"] for one in told(cli, "list", "run")}
    best = min(losses, key=lambda step: losses[step])
    (pruned,) = told(cli, "prune", "run", "--keep", "1")
    kept = {11, best}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step-{step:06d}" for step in kept}
    assert len(pruned["deleted"]) == 3 - len(kept)
    code, _, err = cli("checkpoints", "list", "nowhere")
    assert (code, "holds no checkpoints" in err) == (2, True)


def test_checkpoints_of_earlier_versions_have_no_metadata_and_are_listed(cli: Cli, run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        (path / "metadata.json").unlink()
        manifest = json.loads((path / "MANIFEST.json").read_text())
        del manifest["files"]["metadata.json"]
        (path / "MANIFEST.json").write_text(json.dumps(manifest))
    assert [one["whole"] for one in told(cli, "verify", "run")] == [True] * 3
    found = told(cli, "list", "run")
    assert [one["about"]["held_out_loss"] for one in found] == [one["about"]["evaluations"][str(one["step"])] for one in found]
    assert cli("checkpoints", "compare", "run", "4", "8")[0] == 0


@pytest.mark.parametrize("content", ["", "[]", "null", '{"loss": "x", "held_out_loss": "y", "tokens_per_s": [1], "saved": 3}',
                                     '{"loss": NaN, "held_out_loss": NaN}', '{"evaluations": 3, "share_of_time": {"a": {}}}'])
def test_damaged_metadata_is_listed_and_found(cli: Cli, run: Path, content: str) -> None:
    (run / "checkpoints" / "step-000008" / "metadata.json").write_text(content)
    for words in (("list", "run"), ("show", "run", "--step", "8"), ("list", "run", "--json")):
        code, _, err = cli("checkpoints", *words)
        assert code == 0, err
    assert "metadata.json is damaged" in told(cli, "verify", "run", code=1)[1]["why_not"]


def test_pruning_deletes_nothing_beside_a_damaged_checkpoint_and_nothing_behind_a_link(cli: Cli, run: Path) -> None:
    checkpoints = run / "checkpoints"
    shutil.move(checkpoints / "step-000008", run.parent / "elsewhere")
    (checkpoints / "step-000008").symlink_to(run.parent / "elsewhere")
    assert cli("checkpoints", "prune", "run", "--keep", "1")[0] == 0
    assert (run.parent / "elsewhere" / "MANIFEST.json").is_file()
    (checkpoints / "step-000011" / "model.safetensors").unlink()
    before = sorted(path.name for path in checkpoints.iterdir())
    code, _, err = cli("checkpoints", "prune", "run", "--keep", "1")
    assert (code, "nothing was deleted" in err) == (2, True)
    assert sorted(path.name for path in checkpoints.iterdir()) == before


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("manifest", "says"), [
    ('{"format": 1', "step-000008  not whole: MANIFEST.json cannot be read: it was cut off or changed"),
    ('{"format": 1, "files": ["model.safetensors"]}',
     "step-000008  not whole: MANIFEST.json cannot be read: it lists no files"),
    ('{"format": 1, "files": {"model.safetensors": 1, "x": 2}}',
     "step-000008  not whole: MANIFEST.json lists model.safetensors, x where model.safetensors, optimizer.safetensors, "
     "state.json belong"),
    ('{"format": 1, "files": {"model.safetensors": 1, "optimizer.safetensors": [], "state.json": null}}',
     "step-000008  not whole: model.safetensors is damaged"),
])
def test_verify_says_in_words_what_is_wrong_and_what_to_do(cli: Cli, run: Path, manifest: str, says: str) -> None:
    (run / "checkpoints" / "step-000008" / "MANIFEST.json").write_text(manifest)
    code, out, err = cli("checkpoints", "verify", "run")
    assert (code, err, says in out) == (1, "", True), out
    assert not any(mark in out for mark in ("Error", "[", "char 1")), out
    assert "`powertrain train --resume run` goes on from step-000011" in out
    for step in (4, 11):
        flip_a_bit(run / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
    assert "start a new run" in cli("checkpoints", "verify", "run")[1]


def test_a_damaged_checkpoint_is_not_named_as_the_best_one(cli: Cli, run: Path) -> None:
    losses = {one["step"]: one["about"]["held_out_loss"] for one in told(cli, "list", "run")}
    best, second, _ = sorted(losses, key=lambda step: losses[step])
    flip_a_bit(run / "checkpoints" / f"step-{best:06d}" / "optimizer.safetensors")
    rows = {line.split()[0]: line for line in cli("checkpoints", "list", "run")[1].splitlines()}
    assert rows[str(best)].endswith("not whole: `powertrain checkpoints verify run`")
    assert rows[str(second)].endswith("lowest held-out loss")


def test_two_different_checkpoints_are_compared_in_numbers_of_one_form(cli: Cli, run: Path) -> None:
    code, _, err = cli("checkpoints", "compare", "run", "11", "11")
    assert (code, err) == (2, "powertrain: step 11 is named twice; name two checkpoints of run, of the steps 4, 8, 11\n")
    about = run / "checkpoints" / "step-000004" / "metadata.json"
    metadata = json.loads(about.read_text()) | {"loss": 2.5, "tokens_per_s": 13890.7, "trained_tokens": 1234567}
    manifest = json.loads((about.parent / "MANIFEST.json").read_text())
    about.write_text(json.dumps(metadata))
    del manifest["files"]["metadata.json"]
    (about.parent / "MANIFEST.json").write_text(json.dumps(manifest))
    _, out, _ = cli("checkpoints", "compare", "run", "4", "8")
    rows = {line[:16].strip(): line[16:].split("  ")[0] for line in out.splitlines()}
    assert (rows["loss"], rows["tokens/s"], rows["trained tokens"]) == ("2.500", "13,891", "1.23 M")


def test_control_codes_of_metadata_do_not_reach_the_terminal(cli: Cli, run: Path) -> None:
    about = run / "checkpoints" / "step-000011" / "metadata.json"
    about.write_text(json.dumps({"saved": "\x1b[31mred\x1b]0;title\x07", "na\x1bme": "\x9b2J", "evaluations": {"\x1b[2J": 1}}))
    for words in (("list", "run"), ("show", "run"), ("compare", "run", "4", "11"), ("verify", "run")):
        _, out, err = cli("checkpoints", *words)
        assert "checkpoints" not in err or "is not whole" in err
        assert all(c.isprintable() or c == "\n" for c in out + err), (words, out)
