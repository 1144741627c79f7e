from __future__ import annotations

import _thread
import builtins
import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from powertrain.models.kernels.slabs import Slabs
from powertrain.records import RunFailed, WrongUse
from powertrain.records.checkpoints import FILES, MANIFEST, clear_leftovers, keep_only, newest_checkpoint, what_is_wrong
from powertrain.records.priority import LOWER
from powertrain.training import stored
from powertrain.training.checkpoint import Save, load_checkpoint, save_checkpoint, slabs_for
from powertrain.training.loop import State, new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup
from powertrain.training.stored import Held, as_safetensors, write_file

MakeSetup = Callable[..., Setup]


@pytest.fixture
def state(setup: Setup) -> State:
    state = new_state(setup, 0.1)
    for _ in train(setup, state, Schedule("constant", 1e-3, 3), 1.0):
        pass
    return state


def publish(folder: Path, state: State, *steps: int) -> list[Path]:
    paths = []
    for step in steps:
        state.step = step
        paths.append(save_checkpoint(folder, state))
    return paths


def wait_until_written(save: Save) -> None:
    ends_s = time.monotonic() + 60
    while not save.is_written():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def bytes_of(state: State) -> list[bytes]:
    moments = [value for p in state.model.parameters() for _, value in sorted(state.optimizer.state[p].items())]
    return [t.detach().numpy().tobytes() for t in (*state.model.parameters(), *moments)]


def test_a_checkpoint_brings_everything_back(make_setup: MakeSetup, state: State, tmp_path: Path) -> None:
    state.evaluations = {2: 1.5}
    saved = save_checkpoint(tmp_path, state)
    other = new_state(make_setup(), 0.1)
    load_checkpoint(saved, other)
    assert bytes_of(other) == bytes_of(state)
    assert (other.step, other.trained_tokens, other.evaluations) == (3, state.trained_tokens, {2: 1.5})
    assert int(other.clipped_steps) == int(state.clipped_steps)


def test_a_checkpoint_of_an_earlier_version_holds_random_generators_that_are_not_needed(
        make_setup: MakeSetup, state: State, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, state)
    old = saved / "random.safetensors"
    save_file({"cpu": torch.get_rng_state()}, old)
    manifest = json.loads((saved / MANIFEST).read_text())
    manifest["files"][old.name] = {"bytes": old.stat().st_size, "sha256": hashlib.sha256(old.read_bytes()).hexdigest()}
    (saved / MANIFEST).write_text(json.dumps(manifest))
    assert what_is_wrong(saved) is None
    load_checkpoint(saved, other := new_state(make_setup(), 0.1))
    assert bytes_of(other) == bytes_of(state)
    old.write_bytes(b"")
    assert "random.safetensors is damaged" in str(what_is_wrong(saved))


def test_it_holds_no_pickle(state: State, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, state)
    assert {path.name for path in saved.iterdir()} == {*FILES, MANIFEST}
    assert {path.suffix for path in saved.iterdir()} == {".safetensors", ".json"}


def test_the_loss_scale_survives(make_setup: MakeSetup, tmp_path: Path) -> None:
    from dataclasses import replace

    from powertrain.training.setup import Precision

    def scaled() -> State:
        return new_state(replace(make_setup(), precision=Precision(torch.float16, loss_scaling=True)), 0.1)

    state = scaled()
    state.scaler.load_state_dict(state.scaler.state_dict() | {"scale": 1024.0, "_growth_tracker": 7})
    other = scaled()
    load_checkpoint(save_checkpoint(tmp_path, state), other)
    assert other.scaler.state_dict() == state.scaler.state_dict()


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", [flip_a_bit, halve, Path.unlink], ids=["bit", "truncated", "missing"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
        state: State, tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    older, newer = publish(tmp_path, state, 3, 4)
    damage(newer / name)
    checkpoint, rejected = newest_checkpoint(tmp_path)
    assert checkpoint == older
    assert len(rejected) == 1
    assert newer.name in rejected[0][0]
    assert name in rejected[0][1] or name == MANIFEST   # a changed manifest speaks of the file it no longer fits


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("call", ["stat", "open"])
def test_a_checkpoint_that_cannot_be_read_is_passed_over(state: State, tmp_path: Path, name: str, call: str,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = publish(tmp_path, state, 3, 4)
    place, real = (os, os.stat) if call == "stat" else (builtins, builtins.open)

    def refused(path: Any, *rest: Any, **named: Any) -> Any:
        if str(path) == str(newer / name):
            raise OSError(errno.EACCES if call == "stat" else errno.EIO, "refused", str(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(place, call, refused)
    monkeypatch.setattr("io.open", refused if call == "open" else builtins.open)
    checkpoint, rejected = newest_checkpoint(tmp_path)
    assert checkpoint == older
    assert [(newer.name, True)] == [(which, "cannot be read" in why) for which, why in rejected]


def test_a_copied_checkpoint_is_as_good(state: State, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path / "here", state)
    shutil.copytree(saved, tmp_path / "there" / saved.name)
    assert newest_checkpoint(tmp_path / "there") == (tmp_path / "there" / saved.name, [])


def test_odd_names_are_not_checkpoints(state: State, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, state)
    shutil.copytree(saved, tmp_path / "old-step-000009")
    shutil.copytree(saved, tmp_path / ".tmp-000009-1")
    (tmp_path / "step-000010").touch()
    assert newest_checkpoint(tmp_path) == (saved, [])


def test_a_newer_format_is_refused_with_the_cure(state: State, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, state)
    manifest = json.loads((saved / MANIFEST).read_text()) | {"format": 99}
    (saved / MANIFEST).write_text(json.dumps(manifest))
    assert "upgrade" in str(what_is_wrong(saved))


def test_a_manifest_that_points_outside_is_refused(state: State, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, state)
    manifest = json.loads((saved / MANIFEST).read_text())
    manifest["files"]["../../etc/passwd"] = manifest["files"].pop("state.json")
    (saved / MANIFEST).write_text(json.dumps(manifest))
    assert "lists" in str(what_is_wrong(saved))


def test_the_newest_and_the_best_are_kept(state: State, tmp_path: Path) -> None:
    publish(tmp_path, state, 1, 2, 3, 4, 5)
    keep_only(tmp_path, newest=2, evaluations={1: 3.0, 2: 1.0, 4: 2.0, 9: 0.1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000004", "step-000005"]
    keep_only(tmp_path, newest=1, evaluations={})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_a_held_out_loss_that_is_not_finite_is_never_the_best(state: State, tmp_path: Path) -> None:
    publish(tmp_path, state, 1, 2, 3, 4)
    keep_only(tmp_path, newest=1, evaluations={1: float("nan"), 2: 2.0, 3: float("-inf")})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000004"]


def test_a_failed_save_leaves_nothing_behind_and_the_one_before_whole(
        state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, = publish(tmp_path, state, 3)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("powertrain.training.checkpoint.sync", full)
    state.step = 4
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(tmp_path, state)
    assert list(tmp_path.iterdir()) == [older]
    assert newest_checkpoint(tmp_path)[0] == older


def test_leftovers_of_a_killed_save_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".tmp-000004-77").mkdir()
    (tmp_path / ".tmp-000004-77" / "model.safetensors").write_bytes(b"half")
    clear_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_never_published(state: State, tmp_path: Path) -> None:
    with torch.no_grad():
        next(iter(state.model.parameters())).fill_(float("nan"))
    with pytest.raises(RunFailed, match="not finite"):
        save_checkpoint(tmp_path, state)
    assert not list(tmp_path.iterdir())


def test_another_models_checkpoint_is_refused(make_setup: MakeSetup, state: State, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, state)
    with pytest.raises(WrongUse, match="another model"):
        load_checkpoint(saved, new_state(make_setup(width=64), 0.1))


def test_saving_does_not_change_what_is_trained(make_setup: MakeSetup, tmp_path: Path) -> None:
    results = []
    for folder in (None, tmp_path):
        setup = make_setup("gpt2", dropout=0.3)
        torch.manual_seed(7)
        state = new_state(setup, 0.1)
        for _ in train(setup, state, Schedule("constant", 1e-2, 4), 1.0):
            if folder:
                save_checkpoint(folder, state)
        results.append(bytes_of(state))
    assert results[0] == results[1]


def test_the_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5), "a\u00e9": torch.randn(700, 900).bfloat16(), "step": torch.tensor(3.0),
               "none": torch.zeros(0, 4), "wide": torch.arange(7, dtype=torch.int64), "half": torch.randn(3).half(),
               "bytes": torch.arange(9, dtype=torch.uint8)}
    for metadata in (None, {"places": '{"b": ["x", 0, 3]}'}):
        save_file(tensors, tmp_path / "theirs", metadata)
        content = (tmp_path / "theirs").read_bytes()
        slabs = Slabs(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), slab_bytes=1000)
        for cut in (lambda tensor: [tensor], slabs.copy):
            held = {name: Held(tensor.dtype, tensor.shape, cut(tensor)) for name, tensor in tensors.items()}
            entry = write_file(tmp_path / "ours", as_safetensors(held, metadata))
            assert (tmp_path / "ours").read_bytes() == content
            assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """A file is written in pieces of two blocks."""
    monkeypatch.setattr(stored, "WRITTEN_BYTES", 8192)
    return 8192


def check_written(path: Path, sizes: Iterable[int]) -> None:
    parts = [random.Random(size).randbytes(size) for size in sizes]
    entry, content = write_file(path, iter(parts)), b"".join(parts)
    assert path.read_bytes() == content
    assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("sizes", [[], [0], [1], [4095, 1], [4096], [8192], [8191, 2], [8, 0, 5, 3 * 8192, 4097],
                                   [16384, 8192]])
def test_files_of_any_size_are_written_whole(tmp_path: Path, small_pieces: int, sizes: list[int]) -> None:
    (tmp_path / "file").write_bytes(b"x" * 99_999)       # what was there is gone
    check_written(tmp_path / "file", sizes)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no unbuffered writes")
@pytest.mark.parametrize("refusing", ["open", "write"])
def test_a_file_system_without_unbuffered_writes_takes_buffered_ones(
        tmp_path: Path, small_pieces: int, monkeypatch: pytest.MonkeyPatch, refusing: str) -> None:
    real_open, real_write, refused = os.open, os.write, []

    def is_direct(flags: int) -> bool:
        return bool(flags & os.O_DIRECT)

    def opened(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if refusing == "open" and is_direct(flags):
            refused.append(path)
            raise OSError(errno.EINVAL, "invalid")
        return real_open(path, flags, *more, **named)

    def written(descriptor: int, data: memoryview) -> int:
        if refusing == "write" and is_direct(fcntl.fcntl(descriptor, fcntl.F_GETFL)):
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "invalid")
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "write", written)
    check_written(tmp_path / "file", [5 * small_pieces + 7])
    assert len(refused) == 1


def test_a_disk_that_takes_a_part_of_a_write_gets_the_rest(
        tmp_path: Path, small_pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[:max(1, len(data) // 2)]))
    check_written(tmp_path / "file", [3 * small_pieces + 7])


def test_a_disk_that_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    with pytest.raises(OSError, match="no space left"):
        write_file(tmp_path / "file", [b"content"])
    assert before is None or len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The files of a checkpoint are written when this event is set."""
    event = threading.Event()

    def write_later(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
        assert event.wait(60)
        return write_file(path, parts)

    monkeypatch.setattr("powertrain.training.checkpoint.write_file", write_later)
    return event


def test_what_changes_while_a_checkpoint_is_written_beside_is_not_in_it(
        make_setup: MakeSetup, state: State, tmp_path: Path, held_back: threading.Event) -> None:
    before, counters = bytes_of(state), (state.step, state.trained_tokens)
    save = Save(tmp_path, state)
    with torch.no_grad():
        for parameter in state.model.parameters():
            for tensor in (parameter, *state.optimizer.state[parameter].values()):
                tensor.fill_(7.0)
    state.step, state.trained_tokens = 9, 0
    assert not save.is_written()
    held_back.set()
    load_checkpoint(save.finish(), other := new_state(make_setup(), 0.1))
    assert bytes_of(other) == before
    assert (other.step, other.trained_tokens) == counters


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no priority for each thread")
def test_only_the_thread_that_writes_beside_the_training_has_a_lower_priority(
        state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def write(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return write_file(path, parts)

    monkeypatch.setattr("powertrain.training.checkpoint.write_file", write)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    save_checkpoint(tmp_path / "at once", state)
    assert set(seen) == {own}
    seen.clear()
    save = Save(tmp_path, state)
    wait_until_written(save)
    save.finish()
    assert set(seen) == {max(own, LOWER)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_write_beside_the_training_that_fails_is_raised_and_leaves_nothing(
        state: State, tmp_path: Path, held_back: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    held_back.set()
    older, = publish(tmp_path, state, 3)
    held_back.clear()
    state.step = 4
    save = Save(tmp_path, state)
    shutil.rmtree(next(tmp_path.glob(".tmp-*")))         # as a disk that is taken away
    held_back.set()
    with pytest.raises(FileNotFoundError):
        save.finish()
    assert list(tmp_path.iterdir()) == [older]
    monkeypatch.setattr("powertrain.training.checkpoint.write_file", lambda path, parts: 1 / 0)
    save = Save(tmp_path, state)
    with pytest.raises(ZeroDivisionError):               # no error of the thread is swallowed
        save.finish()
    assert list(tmp_path.iterdir()) == [older]


def test_a_checkpoint_written_beside_is_published_without_any_further_call(state: State, tmp_path: Path) -> None:
    save = Save(tmp_path, state)
    wait_until_written(save)
    assert newest_checkpoint(tmp_path) == (save.path, [])
    assert save.is_written()
    assert save.finish() == save.path


def test_without_memory_for_a_thread_the_copy_is_written_by_the_training(
        make_setup: MakeSetup, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", no_room)
    before = bytes_of(state)
    save = Save(tmp_path, state)
    assert save.is_written()                 # so that the run calls `finish` after the next step
    load_checkpoint(save.finish(), other := new_state(make_setup(), 0.1))
    assert bytes_of(other) == before


def test_a_thread_that_dies_before_it_writes_holds_nothing_up(
        make_setup: MakeSetup, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died = threading.Event()

    def no_memory() -> None:
        died.set()
        raise MemoryError

    monkeypatch.setattr("powertrain.training.in_thread.lower_thread", no_memory)
    before = bytes_of(state)
    save = Save(tmp_path, state)
    assert died.wait(60)
    wait_until_written(save)            # so that the run calls `finish` after the next step
    load_checkpoint(save.finish(), other := new_state(make_setup(), 0.1))
    assert bytes_of(other) == before


def test_slabs_for_a_copy_are_at_most_as_large_as_the_weights_or_a_mebibyte(state: State) -> None:
    assert slabs_for(state).slab_bytes == 1 << 20
    state.model.register_parameter("large", torch.nn.Parameter(torch.zeros(3 << 20)))
    held = sum(parameter.nbytes for parameter in state.model.parameters())
    assert held / 2 < slabs_for(state).slab_bytes <= held
