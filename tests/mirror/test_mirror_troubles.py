"""A mirrored run in trouble: a store that fails at first, another mirror, deaths at the end, and what they leave."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from watched_runs import Started, happened, until, uploaders, weights

from driver import PRELOADED, TINY
from faulty_proxy import Fault as StoreFault
from faulty_proxy import Proxy
from powertrain.mirror.returning import bring_back
from powertrain.mirror.shelf import Shelf
from powertrain.mirror.store import Store
from powertrain.records.events import End, MirrorWaited, Uploaded, UploadFailed, WaitingRebuilt

STEP_11 = "step-000011"


def sets_at(address: str) -> set[str]:
    return set(Shelf(Store(address)).sets())


def stored_once(proxy: Proxy) -> list[str]:
    """The weights that were sent, each by the name of its set."""
    return sorted(path.split("?")[0].split("/")[-2] for method, path in proxy.seen
                  if method == "PUT" and path.split("?")[0].endswith("/model.safetensors"))


def many_steps(text: Path) -> list[str]:
    """A run that does not end by itself."""
    steps = [word for word in TINY if not word.startswith("max_steps")]
    return ["train", f"data={text}", *steps, "max_steps=100000", "--output", "run"]


# ------------------------------------------------------------------------------------------------ before the first step


def test_a_fault_that_passes_before_the_first_step_costs_no_run(
        powertrain: Started, words: list[str], unbroken: bytes, bucket: str, proxy: Proxy, tmp_path: Path) -> None:
    proxy.faults = [StoreFault("status", 500, "PUT", ".probe-", times=2)]
    code, _, err = powertrain(*words, f"mirror={bucket}/runs")
    assert code == 0, err
    assert proxy.faults[0].times == 0
    assert weights(tmp_path / "run") == unbroken
    assert sets_at(f"{bucket}/runs/run") >= {STEP_11, "model", "material"}
    (failed,) = happened(tmp_path / "run", UploadFailed)
    assert "the first step waits for it, up to 30 s" in failed.sentence
    assert failed.sentence in " ".join(err.split())


def test_a_fault_that_does_not_pass_in_time_is_refused_in_one_sentence(
        powertrain: Started, words: list[str], bucket: str, proxy: Proxy, tmp_path: Path) -> None:
    proxy.faults = [StoreFault("cut_request", 0, "PUT", ".probe-")]
    began_s = time.monotonic()
    code, _, err = powertrain(*words, f"mirror={bucket}/runs", fault=("grace", 1000))
    assert code == 1
    assert time.monotonic() - began_s < 60
    assert "cannot be used" in " ".join(err.split())
    assert "Look whether it can be reached, or leave mirror out" in " ".join(err.split())
    assert "Traceback" not in err
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    until(lambda: not uploaders(tmp_path / "run"))


def test_a_signal_ends_the_wait_for_a_mirror(start: Callable[..., Any], text: Path, bucket: str, proxy: Proxy, tmp_path: Path
                                             ) -> None:
    proxy.faults = [StoreFault("status", 500, "PUT", ".probe-")]
    process, _, err = start(*many_steps(text), f"mirror={bucket}/runs", fault=("grace", 20_000))
    until(lambda: (tmp_path / "run" / "events.jsonl").exists() and happened(tmp_path / "run", UploadFailed))
    proxy.faults = []
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 75, err.read_text()
    assert len(sets_at(f"{bucket}/runs/run")) == 2       # the checkpoint of its only step, and the data


# ------------------------------------------------------------------------------------------------ the queue


def test_a_run_goes_on_with_a_damaged_queue_and_uploads_all_of_it(
        powertrain: Started, words: list[str], bucket: str, proxy: Proxy, tmp_path: Path) -> None:
    run, waiting = tmp_path / "run", tmp_path / "run" / "mirror" / "waiting"
    proxy.faults = [StoreFault("status", 403, "PUT", "/run/step-"), StoreFault("status", 403, "PUT", "/run/m")]
    assert powertrain(*words, f"mirror={bucket}/runs", fault=("signal", 5))[0] == 3
    names = {path.name for path in waiting.iterdir()}
    assert names == {"material", "step-000005"}
    for name in names:
        (waiting / name / "waiting.json").write_text('{"name": ')
    log = tmp_path / "run" / "mirror" / "events.jsonl"
    log.write_bytes(b"\x00\xff garbled\n" + log.read_bytes())
    assert powertrain("checkpoints", "list", "run")[0] == 0
    proxy.faults = []
    code, _, err = powertrain("train", "--resume", "run")
    assert code == 0, err
    assert "step-000005 waits for its upload as before" in " ".join(err.split())
    assert {event.name for event in happened(run, WaitingRebuilt)} >= {"step-000005"}
    assert sets_at(f"{bucket}/runs/run") >= {"material", "model", STEP_11}
    assert list(waiting.iterdir()) == []


# ------------------------------------------------------------------------------------------------ another mirror


@pytest.mark.parametrize("way", ["--resume", "upload --to"])
def test_a_fetched_run_takes_its_data_along_to_another_mirror(
        powertrain: Started, text: Path, unbroken: bytes, tmp_path: Path, way: str) -> None:
    data, one, two = tmp_path / "data" / "text.txt", f"file://{tmp_path}/one", f"file://{tmp_path}/two"
    data.parent.mkdir()
    shutil.copy(text, data)
    assert powertrain("train", f"data={data}", *TINY, "--output", "run", f"mirror={one}", fault=("signal", 5))[0] == 75
    for gone in (tmp_path / "run", data.parent):
        shutil.rmtree(gone)
    assert powertrain("checkpoints", "fetch", f"{one}/run", "--output", "back")[0] == 0
    if way == "--resume":
        code, _, err = powertrain("train", "--resume", "back", f"mirror={two}", fault=("signal", 8))
        assert code == 75, err
    else:
        code, _, err = powertrain("checkpoints", "upload", "back", "--to", two)
        assert code == 0, err
    assert "material" in sets_at(f"{two}/back")
    for gone in (tmp_path / "back", tmp_path / "one"):
        shutil.rmtree(gone)
    code, _, err = powertrain("train", "--resume", f"{two}/back", "--output", "third")
    assert code == 0, err
    assert weights(tmp_path / "third") == unbroken


def test_an_upload_of_a_run_without_a_mirror_takes_its_data_along(
        powertrain: Started, words: list[str], tmp_path: Path) -> None:
    assert powertrain(*words)[0] == 0
    assert powertrain("checkpoints", "upload", "run", "--to", f"file://{tmp_path}/store")[0] == 0
    assert sets_at(f"file://{tmp_path}/store/run") == {"material", "model", STEP_11} | (
        sets_at(f"file://{tmp_path}/store/run") & {"step-000004", "step-000008"})


# ------------------------------------------------------------------------------------------------ fetches


def test_after_a_fetch_the_list_tells_what_is_in_the_mirror(powertrain: Started, words: list[str], tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store/run"
    assert powertrain(*words, f"mirror=file://{tmp_path}/store", fault=("signal", 5))[0] == 75
    assert powertrain("checkpoints", "fetch", address, "--output", "back")[0] == 0
    code, out, err = powertrain("checkpoints", "list", "back")
    assert code == 0, err
    (line,) = (line for line in out.splitlines() if line.split()[:1] == ["5"])
    assert "in the mirror" in line
    assert powertrain("train", "--resume", "back", "mirror_keep=1")[0] == 0
    assert not happened(tmp_path / "back", UploadFailed)
    assert {event.name for event in happened(tmp_path / "back", Uploaded)} & {"material", "step-000005"} == set()
    code, out, err = powertrain("checkpoints", "list", "back")           # what the mirror has deleted is not told to be there
    told = {line.split()[0] for line in out.splitlines() if "in the mirror" in line}
    assert told == {str(int(name[5:])) for name in sets_at(address) if name.startswith("step-")} & {
        str(int(path.name[5:])) for path in (tmp_path / "back" / "checkpoints").iterdir()}


def killed_fetching(address: str, to: str) -> None:
    def say(text: str) -> None:
        if text.startswith("fetching data"):             # the checkpoint is there by then
            os.kill(os.getpid(), signal.SIGKILL)

    bring_back(address, Path(to), say)


def test_what_a_killed_fetch_has_left_is_cleared_by_the_next_one_and_by_the_list(
        powertrain: Started, words: list[str], tmp_path: Path) -> None:
    address, runs = f"file://{tmp_path}/store/run", tmp_path / "runs"
    assert powertrain(*words, f"mirror=file://{tmp_path}/store", fault=("signal", 5))[0] == 75
    runs.mkdir()
    shutil.move(tmp_path / "run", runs / "first")

    def left() -> list[Path]:
        return list(runs.glob(".*.tmp"))

    def kill_one() -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        process = context.Process(target=killed_fetching, args=(address, str(runs / "run")))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert len(left()) == 1
        assert (left()[0] / "recipe.yaml").is_file()

    kill_one()
    code, out, err = powertrain("runs", "list")
    assert code == 0, err
    assert left() == []
    assert ".tmp" not in out
    kill_one()
    others: list[list[Path]] = []

    def say(text: str) -> None:
        others.append(left())
        assert powertrain("runs", "list")[0] == 0        # a fetch that is at work keeps its own
        assert left() == others[-1]

    bring_back(address, runs / "other", say)
    assert [len(found) for found in others] == [1, 1]
    assert left() == []
    assert (runs / "other" / "checkpoints" / "step-000005").is_dir()


# ------------------------------------------------------------------------------------------------ deaths


def test_an_uploader_hears_of_the_trainers_death_although_a_forked_process_lives_on(
        powertrain: Started, words: list[str], tmp_path: Path) -> None:
    assert powertrain(*words, f"mirror=file://{tmp_path}/store", fault=("fork", 6))[0] == -signal.SIGKILL
    until(lambda: not uploaders(tmp_path / "run"), 10)


def test_a_run_that_is_asked_to_stop_does_not_wait_for_a_slow_upload_which_goes_on_alone(
        start: Callable[..., Any], powertrain: Started, text: Path, bucket: str, proxy: Proxy, tmp_path: Path) -> None:
    run, address = tmp_path / "run", f"{bucket}/runs/run"
    proxy.faults = [StoreFault("delay", 5000, "PUT", "/run/step-", times=1)]
    process, _, err = start(*many_steps(text), "save_steps=50000", f"mirror={bucket}/runs", fault=("grace", 300))
    until(lambda: (run / "events.jsonl").exists() and any(event.name == "material" for event in happened(run, Uploaded)))
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 3, err.read_text()
    (end,) = happened(run, End)
    (newest,) = (path.name for path in (run / "checkpoints").glob("step-*"))
    assert newest in end.not_mirrored
    assert newest not in sets_at(address)
    assert uploaders(run)
    code, _, error = powertrain("checkpoints", "upload", "run")          # waits for the one that is at work
    assert code == 0, error
    until(lambda: not uploaders(run))
    assert sets_at(address) == {"material", newest}
    assert stored_once(proxy) == [newest]


def test_a_trainer_that_is_killed_in_the_last_wait_leaves_an_uploader_that_goes_on(
        start: Callable[..., Any], powertrain: Started, words: list[str], unbroken: bytes, bucket: str, proxy: Proxy,
        tmp_path: Path) -> None:
    run, address = tmp_path / "run", f"{bucket}/runs/run"
    proxy.faults = [StoreFault("delay", 2000, "PUT", f"/run/{STEP_11}", times=1)]
    process, _, _ = start(*words, f"mirror={bucket}/runs")
    until(lambda: (run / "events.jsonl").exists() and happened(run, MirrorWaited))
    process.kill()
    process.join(60)
    assert STEP_11 not in sets_at(address)
    until(lambda: not uploaders(run))
    assert sets_at(address) >= {"material", "model", STEP_11}
    assert list((run / "mirror" / "waiting").iterdir()) == []
    before = stored_once(proxy)
    assert len(set(before)) == len(before)
    assert {"model", STEP_11} <= set(before)
    code, _, err = powertrain("checkpoints", "upload", "run")
    assert code == 0, err
    assert stored_once(proxy) == before
    bring_back(address, tmp_path / "back", lambda text: None)
    assert weights(tmp_path / "back") == unbroken
