"""Runs with a mirror: the same bytes as without one, here and on a machine that has nothing but the mirror."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_sets import SECRET
from watched_runs import Started, happened, until, uploaders, weights

from driver import TINY
from faulty_proxy import Fault as StoreFault
from faulty_proxy import Proxy
from powertrain.mirror.shelf import Shelf
from powertrain.mirror.store import Store
from powertrain.records.events import End, MirrorReady, Uploaded, UploaderGone, UploadFailed
from powertrain.run.mirroring import LOOK_EVERY_S


def test_a_mirrored_run_makes_the_same_bytes_and_its_commands_work_on_the_address(
        powertrain: Started, words: list[str], unbroken: bytes, bucket: str, tmp_path: Path) -> None:
    run, address = tmp_path / "run", f"{bucket}/runs/run"
    code, _, err = powertrain(*words, f"mirror={bucket}/runs")
    assert code == 0, err
    assert weights(run) == unbroken
    assert [event.address for event in happened(run, MirrorReady)] == [address]
    assert {"model", "material", "step-000011"} <= {event.name for event in happened(run, Uploaded)}
    assert uploaders(run) == []
    assert list((run / "mirror" / "waiting").iterdir()) == []
    assert not [path for path in tmp_path.rglob("*.tmp*") if "cache" not in path.parts]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]

    code, out, err = powertrain("checkpoints", "list", address, "--json")
    assert code == 0, err
    steps = [json.loads(line)["step"] for line in out.splitlines()]
    assert steps[-1] == 11
    for asked in (["list"], ["show"], ["verify"], ["plot", "--output", "losses.svg"]):
        code, out, err = powertrain("checkpoints", asked[0], address, *asked[1:])
        assert code == 0, err
    if len(steps) > 1:
        assert powertrain("checkpoints", "compare", address, str(steps[0]), "11")[0] == 0
    assert powertrain("checkpoints", "fetch", address, "--output", "back")[0] == 0
    assert weights(tmp_path / "back") == unbroken
    assert powertrain("checkpoints", "prune", address, "--keep", "1")[0] == 0
    assert any(path.startswith("step-000011/") for path in Store(address).sizes())
    code, _, err = powertrain("checkpoints", "show", f"{bucket}/runs")
    assert code == 2
    assert f"it holds the runs run, such as {address}" in err


def test_a_run_whose_machine_is_gone_goes_on_elsewhere_to_the_same_bytes(
        powertrain: Started, text: Path, unbroken: bytes, bucket: str, tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data" / "text.txt", tmp_path / "elsewhere"
    data.parent.mkdir()
    elsewhere.mkdir()
    shutil.copy(text, data)
    code, _, err = powertrain("train", f"data={data}", *TINY, "--output", "run", f"mirror={bucket}/runs", fault=("step", 6))
    assert code == -signal.SIGKILL, err
    _wait_for_the_upload_in_hand(tmp_path / "run", f"{bucket}/runs/run", "step-000004", powertrain)
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(data.parent)
    code, _, err = powertrain("train", "--resume", f"{bucket}/runs/run", folder=elsewhere)
    assert code == 0, err
    assert weights(elsewhere / "runs" / "run") == unbroken
    assert Shelf(Store(f"{bucket}/runs/run")).sets()["model"].step == 11


def test_a_fine_tuning_run_goes_on_elsewhere_with_its_base_model_and_data(
        powertrain: Started, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    tiny_llama(old / "base")
    rows = [{"question": f"what is {i}" + "?" * (i % 5), "answer": f"it is {i * i}"} for i in range(60)]
    (old / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = ["train", "method=lora", f"model.path={old}/base", f"data={old}/data.jsonl", "train_batch_size=6", "max_steps=5",
             "learning_rate=1e-2", "save_steps=2", "eval_steps=3", "lora.r=4", "lora.dropout=0.1", "techniques.threads=off"]
    assert powertrain(*train, "--output", "whole")[0] == 0
    mirror = f"file://{tmp_path}/store"
    assert powertrain(*train, "--output", "old/run", f"mirror={mirror}", fault=("step", 3))[0] == -signal.SIGKILL
    _wait_for_the_upload_in_hand(old / "run", f"{mirror}/run", "step-000002", powertrain)
    shutil.rmtree(old)
    code, _, err = powertrain("train", "--resume", f"{mirror}/run", "--output", "new")
    assert code == 0, err
    assert weights(tmp_path / "new") == weights(tmp_path / "whole") != b""


def tiny_llama(folder: Path) -> None:
    import torch

    from powertrain.data.table_tokenizers import ByteTokenizer
    from powertrain.models.adapters.files import save_model
    from powertrain.models.config import make_config
    from powertrain.models.decoder import Decoder

    torch.manual_seed(0)
    config, _ = make_config("llama", vocabulary=257, layers=2, width=64, heads=2, context=128, end_of_text=256, tied_head=True)
    save_model(Decoder(config), folder, ByteTokenizer())


def _wait_for_the_upload_in_hand(run: Path, address: str, name: str, powertrain: Started) -> None:
    """The process that uploads ends by itself when its training is killed; what it did not get to is uploaded now."""
    until(lambda: not uploaders(run))
    code, _, err = powertrain("checkpoints", "upload", str(run))
    assert code == 0, err
    assert name in Shelf(Store(address)).sets()
    assert not list((run / "mirror" / "waiting").glob("[!.]*"))


def test_changed_data_is_refused_on_another_machine(powertrain: Started, words: list[str], tmp_path: Path) -> None:
    assert powertrain(*words, f"mirror=file://{tmp_path}/store", fault=("signal", 5))[0] == 75
    assert powertrain("checkpoints", "fetch", f"file://{tmp_path}/store/run", "--output", "back")[0] == 0
    (data,) = (tmp_path / "back" / "material").rglob("text.txt")
    data.write_text("one more line\n" + data.read_text())
    code, _, err = powertrain("train", "--resume", "back")
    assert code == 2, err
    assert "data" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("fault", "cure"), [
    (StoreFault("status", 403, "PUT"), "the right to read, write and delete"),
    (StoreFault("status", 404, "PUT"), "make the bucket or folder")], ids=["403", "404"])
def test_a_mirror_that_cannot_be_used_is_told_before_the_first_step(
        powertrain: Started, words: list[str], bucket: str, proxy: Proxy, tmp_path: Path, fault: StoreFault, cure: str) -> None:
    proxy.faults = [fault]
    code, _, err = powertrain(*words, f"mirror={bucket}/runs")
    assert code == 1
    assert cure in err.replace("\n", " ").lower() or cure in " ".join(err.split())
    assert "Traceback" not in err
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    until(lambda: not uploaders(tmp_path / "run"))


def test_a_store_that_refuses_later_costs_no_step_and_code_3_until_it_is_uploaded(
        powertrain: Started, words: list[str], unbroken: bytes, bucket: str, proxy: Proxy, tmp_path: Path) -> None:
    proxy.faults = [StoreFault("status", 403, "PUT", "/run/step-"), StoreFault("status", 403, "PUT", "/run/m")]
    code, out, err = powertrain(*words, f"mirror={bucket}/runs")
    assert code == 3, err
    assert "powertrain checkpoints upload" in " ".join((out + err).split())
    run = tmp_path / "run"
    assert weights(run) == unbroken
    (end,) = happened(run, End)
    assert "step-000011" in end.not_mirrored
    assert "model" in end.not_mirrored
    assert any(event.cure for event in happened(run, UploadFailed))
    assert powertrain("checkpoints", "upload", "run")[0] == 3
    proxy.faults = []
    code, _, err = powertrain("checkpoints", "upload", "run")
    assert code == 0, err
    assert {"model", "material", "step-000011"} <= set(Shelf(Store(f"{bucket}/runs/run")).sets())


def test_another_run_of_that_name_is_refused(powertrain: Started, words: list[str], tmp_path: Path) -> None:
    mirror = f"mirror=file://{tmp_path}/store"
    assert powertrain(*words, mirror)[0] == 0
    shutil.move(tmp_path / "run", tmp_path / "first")
    code, _, err = powertrain(*words, mirror)
    assert code == 1
    assert "already holds another run" in " ".join(err.split())


def test_a_killed_uploading_process_is_told_and_started_again(
        start: Callable[..., Any], text: Path, proxy: Proxy, bucket: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps = [word for word in TINY if not word.startswith("max_steps")]
    process, _, err = start("train", f"data={text}", *steps, "max_steps=4000", "--output", "run", f"mirror={bucket}/runs")
    until(lambda: run.exists() and (run / "events.jsonl").exists() and happened(run, Uploaded))
    (first,) = uploaders(run)
    assert SECRET not in " ".join(first.cmdline())
    first.terminate()                        # as a system does that stops: it goes on while the training does
    time.sleep(0.3)
    assert first.is_running()
    killed_s = time.monotonic()
    first.kill()
    until(lambda: happened(run, UploaderGone), 5 + LOOK_EVERY_S)
    assert time.monotonic() - killed_s < 5 + LOOK_EVERY_S
    (gone,) = happened(run, UploaderGone)
    assert (gone.code, gone.again) == (-signal.SIGKILL, True)
    until(lambda: uploaders(run))
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == 75, err.read_text()
    until(lambda: not uploaders(run))
    newest = max(path.name for path in (run / "checkpoints").glob("step-*"))
    assert newest in Shelf(Store(f"{bucket}/runs/run")).sets()


def test_mirror_frees_disk_keeps_the_newest_here(powertrain: Started, words: list[str], tmp_path: Path) -> None:
    code, _, err = powertrain(*words, f"mirror=file://{tmp_path}/store", "mirror_frees_disk=true", "mirror_keep_every=4")
    assert code == 0, err
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-000011"]
    assert {"step-000004", "step-000008", "step-000011"} <= set(Shelf(Store(f"file://{tmp_path}/store/run")).sets())


def test_a_run_that_goes_on_with_another_mirror_brings_all_of_it_there(
        powertrain: Started, words: list[str], tmp_path: Path) -> None:
    assert powertrain(*words, f"mirror=file://{tmp_path}/one", fault=("signal", 5))[0] == 75
    code, _, err = powertrain("train", "--resume", "run", f"mirror=file://{tmp_path}/two")
    assert code == 0, err
    assert {"material", "model", "step-000011"} <= set(Shelf(Store(f"file://{tmp_path}/two/run")).sets())
