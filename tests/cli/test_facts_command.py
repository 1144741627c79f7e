"""`powertrain facts`: where it writes, and what it shows of a machine that is not here."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from powertrain.diagnosis.diagnose import environment_of
from powertrain.facts.clusters import machine_and_software, machine_of
from powertrain.facts.hardware import read_hardware
from powertrain.facts.software import read_software
from powertrain.recipe import resolve_words
from powertrain.records import Facts, WrongUse
from powertrain.report.plan import facts_rows
from powertrain.run.prepare import prepare

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(("output", "says"), [
    ("there", "powertrain: --output there is a folder; name a file, such as there/facts.json\n"),
    ("pipe", "powertrain: --output pipe is a pipe, a socket or a device; name a file, such as facts.json\n"),
    ("new/deep/f.json", "powertrain: --output new/deep/f.json: there is no folder new/deep; make it first\n")])
def test_facts_are_written_to_a_file_in_a_folder_that_is_there(cli: Cli, tiny: list[str], tmp_path: Path, output: str,
                                                              says: str) -> None:
    (tmp_path / "there").mkdir()
    os.mkfifo(tmp_path / "pipe")
    code, out, err = cli("facts", *tiny, "--output", output)
    assert (code, out, err) == (2, "", says)
    assert not (tmp_path / "new").exists()
    assert [*(tmp_path / "there").iterdir()] == []


def shown(machine: str, facts: Facts, cache: Path) -> dict[str, str]:
    rows = facts_rows(replace(facts, hardware=machine_of(machine, cache)))
    names = [name for name, _, _ in rows]
    assert len(names) == len(set(names))
    return {name: value for name, value, _ in rows}


def test_facts_of_a_machine_that_is_not_here_count_its_devices_and_leave_out_what_is_not_known(facts: Facts,
                                                                                             tmp_path: Path) -> None:
    eight = shown("8xh100", facts, tmp_path)
    assert (eight["devices"], shown("2x8xh100", facts, tmp_path)["devices"]) == ("8", "16, 8 in each of 2 nodes")
    assert {"cores", "instructions", "free memory", "datasheet bf16"}.isdisjoint(eight)
    assert (eight["published bf16"], eight["published bandwidth"]) == ("990 TFLOP/s", "3,350 GB/s")
    assert "devices" not in shown("h100", facts, tmp_path)
    mac = read_software(machine_of("m4-max", tmp_path)).missing
    assert mac["flash_attn"].startswith("needs a CUDA GPU; Apple M4 Max is none"), "this machine is not spoken of"
    here = {name: (value, source) for name, value, source in facts_rows(facts)}
    assert {"cores", "free memory"} <= set(here)
    assert here["python"][1] == "installed"
    there = facts_rows(replace(facts, hardware=machine_of("h100", tmp_path)))
    assert {source for name, _, source in there if name == "python"} == {"installed here; not known of that machine"}


@pytest.mark.parametrize(("machine", "says"), [
    ("t4", "fp16 65 TFLOP/s, fp32 8.1 TFLOP/s, 300 GB/s"),
    ("m4-max", "546 GB/s; rates of products: not published"),
    ("h100", "bf16 990 TFLOP/s, fp16 990 TFLOP/s, fp32 67 TFLOP/s, tf32 494 TFLOP/s, 3,350 GB/s")])
def test_a_diagnosis_says_which_rates_are_published(machine: str, says: str, tiny: list[str], cache: Path) -> None:
    prepared = prepare(resolve_words(tiny), cache, lambda text: None, machine=machine)
    assert environment_of(prepared)["published"] == says
    unmeasured = replace(prepared.facts.hardware, basis="measured", peak_flops_per_s={}, bandwidth_bytes_per_s=None)
    unmeasured_too = replace(prepared, facts=replace(prepared.facts, hardware=unmeasured))
    assert environment_of(unmeasured_too)["measured"] == "rates of products and bandwidth: not measured"


def test_facts_of_many_devices_need_no_batch_for_them(cli: Cli, tiny: list[str]) -> None:
    words = [word for word in tiny if not word.startswith("train_batch_size")]
    code, out, err = cli("facts", *words, "--machine", "2x8xh100")
    assert code == 0, err
    assert "16, 8 in each of 2 nodes" in out


def test_more_processes_than_cores_are_refused_in_the_words_of_machine(tmp_path: Path) -> None:
    cores = read_hardware(tmp_path).cores
    with pytest.raises(WrongUse) as refused:
        machine_of("999xcpu", tmp_path)
    assert str(refused.value) == (f"--machine 999xcpu: 999 processes are more than the {cores} cores of this machine; use at "
                                  f"most --machine {cores}xcpu")


@pytest.mark.parametrize("words", ["a" * 5000, "8x" + "a" * 5000, "a" * 5000 + ".json", "?" * 5000])
def test_long_words_are_not_echoed_whole(words: str, tmp_path: Path) -> None:
    with pytest.raises(WrongUse) as refused:
        machine_and_software(words, tmp_path)
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize(("name", "says"), [
    ("folder.json", "is a folder; `powertrain facts --output facts.json`"),
    ("pipe.json", "is a pipe, a socket or a device; `powertrain facts --output facts.json`"),
    ("nowhere.json", "cannot be read: No such file or directory; `powertrain facts --output facts.json`")])
def test_what_is_no_file_of_facts_is_named_as_what_it_is(name: str, says: str, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.json").mkdir()
    os.mkfifo("pipe.json")
    with pytest.raises(WrongUse, match=f"--machine {name} {says}"):
        machine_and_software(name, tmp_path)
