"""A checkpoint from somebody else: whatever it holds, it is refused with a reason; nothing outside it is read or deleted."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from powertrain.records import WrongUse
from powertrain.records.checkpoints import FILES, MANIFEST, clear_leftovers, keep_only, newest_checkpoint, what_is_wrong
from powertrain.training.checkpoint import load_checkpoint, save_checkpoint
from powertrain.training.loop import State, new_state
from powertrain.training.setup import Setup

WEIGHTS, _, COUNTERS = FILES
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def saved(setup: Setup, tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "checkpoints", new_state(setup, 0.1))


@pytest.fixture
def state(setup: Setup) -> State:
    return new_state(setup, 0.1)


def with_sum(saved: Path, name: str, content: bytes) -> None:
    """Write a file of the checkpoint, and its right sum into the manifest, as an attacker can."""
    (saved / name).write_bytes(content)
    manifest = json.loads((saved / MANIFEST).read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (saved / MANIFEST).write_text(json.dumps(manifest))


def safetensors(header: object, values: bytes = bytes(64), header_bytes: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + values


def a_tensor(first: int, end: int, *, shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape or [4], "data_offsets": [first, end]}


MANIFESTS: dict[str, Change] = {
    "files in a list": lambda m: m.update(files=list(m["files"])),
    "files is a text": lambda m: m.update(files="x"),
    "an entry is a number": lambda m: m["files"].update({WEIGHTS: 5}),
    "an entry is nothing": lambda m: m["files"].update({WEIGHTS: None}),
    "10**12 shards": lambda m: m.update(shards=10**12),
    "no shards": lambda m: m.update(shards=0),
    "-1 shards": lambda m: m.update(shards=-1),
    "true shards": lambda m: m.update(shards=True),
    "endless shards": lambda m: m.update(shards=float("inf")),
    "shards in a list": lambda m: m.update(shards=[1]),
    "no format": lambda m: m.pop("format"),
    "a format that is a list": lambda m: m.update(format=[1]),
    "an absolute path": lambda m: m["files"].update({"/etc/passwd": m["files"].pop(COUNTERS)}),
    "a path outside": lambda m: m["files"].update({"../x": m["files"][COUNTERS]}),
    "a folder": lambda m: m["files"].update({"": m["files"].pop(COUNTERS)}),
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_a_crafted_manifest_is_refused(saved: Path, change: Change) -> None:
    manifest = json.loads((saved / MANIFEST).read_text())
    change(manifest)
    (saved / MANIFEST).write_text(json.dumps(manifest))
    assert what_is_wrong(saved)
    assert newest_checkpoint(saved.parent)[0] is None


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b"\xff\xfe", b"null", b"{" + b" " * (201 * 10**6)],
                         ids=["deep", "a list", "no text", "null", "200 MB"])
def test_a_manifest_that_is_no_manifest_is_refused(saved: Path, content: bytes) -> None:
    (saved / MANIFEST).write_bytes(content)
    assert "cannot be read" in str(what_is_wrong(saved))


def test_a_pipe_by_the_name_of_the_manifest_is_not_opened(saved: Path) -> None:
    (saved / MANIFEST).unlink()
    os.mkfifo(saved / MANIFEST)
    assert "a pipe" in str(what_is_wrong(saved))


def test_a_link_by_the_name_of_a_file_is_not_followed(saved: Path, tmp_path: Path) -> None:
    """Even where its content is right: it could change between the look and the reading."""
    (saved / WEIGHTS).rename(tmp_path / "elsewhere")
    (saved / WEIGHTS).symlink_to(tmp_path / "elsewhere")
    assert "is a link" in str(what_is_wrong(saved))


HOSTILE_WEIGHTS = {
    "a pickle": b"\x80\x04\x95cposix\nsystem\n",
    "a header of 2**63 bytes": safetensors({}, header_bytes=2**63),
    "a header of 200 MB": safetensors({}, header_bytes=200 * 10**6),
    "a header beyond the end": safetensors({}, b"", header_bytes=100),
    "negative offsets": safetensors({"w": a_tensor(-16, 0)}),
    "offsets beyond the end": safetensors({"w": a_tensor(0, 16)}, bytes(8)),
    "overlapping tensors": safetensors({"a": a_tensor(0, 16), "b": a_tensor(8, 24)}, bytes(24)),
    "tensors with a gap": safetensors({"a": a_tensor(0, 16), "b": a_tensor(48, 64)}),
    "a shape of 2**62": safetensors({"w": a_tensor(0, 16, shape=[2**62, 2**62])}, bytes(16)),
    "deep": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "places in a list": safetensors({"__metadata__": {"places": "[1]"}, "w": a_tensor(0, 16)}, bytes(16)),
    "a place of a text": safetensors({"__metadata__": {"places": '{"w": ["w", "x", 0]}'}, "w": a_tensor(0, 16)}, bytes(16)),
    "a place in dimension 9": safetensors({"__metadata__": {"places": '{"w": ["w", 9, 0]}'}, "w": a_tensor(0, 16)}, bytes(16)),
    "a place before the first": safetensors({"__metadata__": {"places": '{"w": ["w", 0, -4]}'}, "w": a_tensor(0, 16)},
                                            bytes(16)),
    "deep places": safetensors({"__metadata__": {"places": "[" * 100_000}, "w": a_tensor(0, 16)}, bytes(16)),
    "empty": b"",
}


@pytest.mark.parametrize("content", HOSTILE_WEIGHTS.values(), ids=HOSTILE_WEIGHTS)
def test_hostile_weights_with_a_right_sum_are_refused(saved: Path, content: bytes) -> None:
    with_sum(saved, WEIGHTS, content)
    assert f"{WEIGHTS} cannot be read" in str(what_is_wrong(saved))


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[]", b"", b'{"step": 1e999}x'], ids=["deep", "list", "empty", "more"])
def test_counters_that_are_no_json_object_are_refused(saved: Path, content: bytes) -> None:
    with_sum(saved, COUNTERS, content)
    assert f"{COUNTERS} cannot be read" in str(what_is_wrong(saved))


@pytest.mark.parametrize("change", [{"step": []}, {"step": float("inf")}, {"evaluations": 5}, {"evaluations": {"x": 1}},
                                    {"clipped_steps": 10**30}, {"trained_tokens": None}])
def test_counters_of_another_kind_are_a_sentence(saved: Path, state: State, change: dict[str, Any]) -> None:
    counters = json.loads((saved / COUNTERS).read_text()) | change
    with_sum(saved, COUNTERS, json.dumps(counters).encode())
    assert what_is_wrong(saved) is None
    with pytest.raises(WrongUse, match="does not hold a run's counters"):
        load_checkpoint(saved, state)


def test_deleting_checkpoints_and_leftovers_follows_no_link(saved: Path, tmp_path: Path) -> None:
    """A link for a checkpoint, in a checkpoint, for its manifest, and for the leftovers of a killed save."""
    precious = tmp_path / "precious"
    precious.mkdir()
    for name in ("thesis.txt", MANIFEST):
        (precious / name).write_text("years of work")
    folder = saved.parent
    (folder / "step-000001").symlink_to(precious)
    (folder / ".tmp-000001-1").symlink_to(precious)
    (saved / "inside").symlink_to(precious)
    (folder / ".tmp-000002-1").mkdir()
    (folder / ".tmp-000002-1" / "inside").symlink_to(precious)
    for step in (2, 3):
        (folder / f"step-{step:06d}").mkdir()
    (folder / "step-000002" / MANIFEST).symlink_to(precious / MANIFEST)
    (folder / "step-000002" / "inside").symlink_to(precious)
    keep_only(folder, newest=1, evaluations={})
    clear_leftovers(folder)
    assert [path.name for path in sorted(precious.iterdir())] == [MANIFEST, "thesis.txt"]
    assert not saved.exists()
    assert not (folder / "step-000002").exists()
    assert not (folder / ".tmp-000002-1").exists()
