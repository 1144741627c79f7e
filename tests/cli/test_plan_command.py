"""`powertrain plan` in a process of its own: what it loads, and that asking changes nothing on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from powertrain.facts.clusters import machine_of
from powertrain.records import OnMachine, Software, to_plain
from powertrain.records.json_files import write_json
from powertrain.report.plan import on_machine_row

LOADED = ("torch", "transformers")
RUN = f"""
import json, runpy, socket, sys

from powertrain.facts.machine_watch import Meanwhile

def refuse(*_, **__):
    raise OSError("no network in this test")

socket.socket.connect = socket.getaddrinfo = refuse
Meanwhile.disturbed_by = ""                  # however busy the machine is while this test runs, its peaks are kept
try:
    runpy.run_module("powertrain", run_name="__main__")
finally:
    print(json.dumps([name for name in {LOADED} if name in sys.modules]), file=sys.stderr)
"""
SMALL = ("model.layers=2", "model.width=32", "model.heads=2", "data.block=64", "train_batch_size=8", "max_steps=5")


def plan_in_a_process(words: Sequence[str], folder: Path, code: int = 0, **variables: str) -> tuple[str, list[str]]:
    """Run the command in `folder`, whose caches are its own; return its output and what of LOADED is loaded at its end."""
    environment = os.environ | {"POWERTRAIN_CACHE": str(folder / "cache"), "HOME": str(folder / "home")} | variables
    done = subprocess.run([sys.executable, "-c", RUN, "plan", *words], cwd=folder, env=environment, check=False,
                          capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout, json.loads(done.stderr.splitlines()[-1])


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": "one two " * (1 + i % 3), "completion": "three " * (1 + i % 5)}) for i in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "pairs.jsonl"


@pytest.mark.parametrize("kind", ["scratch", "lora"])
def test_a_prepared_recipe_is_planned_without_torch(
        kind: str, cli: Callable[..., tuple[int, str, str]], tmp_path: Path, source: Path, pairs: Path) -> None:
    words = ["default", f"data={source}", "data.tokenizer=byte", "sample.prompt=", *SMALL]
    if kind == "lora":
        base = tmp_path / "base"
        made, _, err = cli("train", *words, "data.tokenizer=bpe", "data.vocabulary=280", "train_time_s=null", "sample.tokens=0",
                           "save_steps=0", "--output", str(base), "--quiet")
        assert made == 0, err
        words = ["docstrings", f"model.path={base}", f"data={pairs}", "data.long_examples=cut", "max_steps=5"]
    plan_in_a_process(words, tmp_path)                       # measures the machine and tokenises the data
    out, loaded = plan_in_a_process(words, tmp_path)
    assert loaded == []
    assert "attention_kernel" in out


def test_asking_for_a_plan_builds_and_fetches_nothing(tmp_path: Path, source: Path) -> None:
    """With a compiler that always fails and no network the plan is the same, and says what will be built."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("g++", "clang++", "gcc", "cc", "c++"):
        (tools / name).write_text("#!/bin/sh\necho called >> \"$(dirname \"$0\")/calls\"\nexit 1\n", encoding="utf-8")
        (tools / name).chmod(0o755)
    words = ["default", f"data={source}", "data.tokenizer=byte", "sample.prompt=", "train_time_s=null", "max_steps=1000000",
             "model.layers=6", "model.width=384", "data.block=128", "techniques.bf16=off"]
    out, _ = plan_in_a_process(words, tmp_path, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}",
                               TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
    assert "kernel=ragged" in out
    assert "will be compiled as the run starts, in about 6 s" in out
    assert not (tools / "calls").exists()
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".so", ".o", ".cpp", ".safetensors")]


@pytest.mark.parametrize(("words", "key"), [(["char-shakespeare-cpu"], "data.source"),
                                            (["tinyllama-lora"], "model.path"),
                                            (["docstrings", "model.path=nobody/has-this"], "model.path")])
def test_what_is_not_on_this_machine_is_named_and_not_fetched(words: list[str], key: str, tmp_path: Path) -> None:
    out, loaded = plan_in_a_process([*words, "--json"], tmp_path, code=2)
    error = json.loads(out.splitlines()[-1])
    assert (error["kind"], error["keys"][0]) == ("not_fetched", key)
    assert loaded == []


def test_a_plan_for_a_machine_that_is_not_here(cli: Callable[..., tuple[int, str, str]], source: Path) -> None:
    words = ("default", f"data={source}", "data.tokenizer=byte", *SMALL)
    code, out, err = cli("plan", *words, "train_batch_size=64", "--machine", "4x8xh100")
    assert code == 0, err
    rows = {line.split(maxsplit=1)[0]: line for line in out.splitlines()}
    assert "4 nodes of 8 x NVIDIA H100 80GB HBM3" in rows["Machine"]
    assert "published, not measured" in rows["Machine"]
    assert "32 processes on 4 nodes" in rows["Efficiency"]
    assert "1 all-reduce" in rows["Exchanged"]
    assert "makes just these exchanges in a group of 32 processes" in rows["Checked"]
    assert "is not here" in rows["Note"]
    code, _, err = cli("plan", *words, "--machine", "4x8xh100")
    assert (code, "train_batch_size=8 cannot be shared by 32 processes" in err) == (2, True)
    code, _, err = cli("plan", *words, "--machine", "8xh100", "--processes", "2")
    assert (code, "leave --processes out" in err) == (2, True)


def test_known_machines_are_compared_by_fit_time_and_cost(cli: Callable[..., tuple[int, str, str]], source: Path) -> None:
    words = ["default", f"data={source}", "data.tokenizer=byte", *SMALL, "--machine", "all"]
    code, out, err = cli("plan", *words, "--price-per-hour", "2", "--price-per-hour", "h100=3.6", "--json")
    assert code == 0, err
    found = {one["kind"]: one for one in map(json.loads, out.splitlines())}
    h100, a100, mac = found["h100"], found["a100"], found["m4-max"]
    assert (h100["words"], h100["price_per_hour"], a100["price_per_hour"]) == ("", 3.6, 2)
    assert (mac["estimate"], mac["cost"]) == (None, None)
    estimate = h100["estimate"]
    assert h100["cost"] == pytest.approx([step_s * estimate["steps"] * 1e-3 for step_s in estimate["step_s"]])
    code, alone, err = cli("plan", *words[:-1], "h100", "--json")
    assert code == 0, err
    assert json.loads(alone)["plan"]["estimate"]["step_s"] == estimate["step_s"]
    # 1.2 G weights of a GPT-2 with AdamW in fp32: too much for 16 GB, not for 80
    large = ["model.layers=24", "model.width=2048", "model.heads=16"]
    code, out, err = cli("plan", *words, *large)
    assert code == 0, err
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert rows["h100"].split()[1] == "yes"
    assert "with " in rows["t4"]
    for kind, row in rows.items():
        if row.count(" GiB") == 2 and kind in found:
            needed, free = (float(part.split()[-1]) for part in row.split(" GiB")[:2])
            assert ("tight" in row) is (needed > 0.8 * free), row
    assert any("tight" in row for row in rows.values())
    assert "rates not published" in rows["m4-max"]
    assert out.index("\nh100 ") < out.index("\nrtx-4080 ")
    for prices, kind in (("h100=2 H100-80GB=3", "h100"), ("2 3", "every kind")):
        code, _, err = cli("plan", *words, *(word for price in prices.split() for word in ("--price-per-hour", price)))
        assert (code, f"two prices for {kind}: 2 and 3" in err) == (2, True)
    for price in ("h100=", "x=1", "h100=-1", "cpu=nan"):
        code, _, err = cli("plan", *words, "--price-per-hour", price)
        assert (code, "is not KIND=PRICE" in err) == (2, True)
    code, _, err = cli("plan", *words[:-2], "--price-per-hour", "2")
    assert (code, "--machine all" in err) == (2, True)


def test_machines_whose_links_are_not_published_are_marked_and_stand_after_the_others(
        cli: Callable[..., tuple[int, str, str]], source: Path) -> None:
    code, out, err = cli("plan", "default", f"data={source}", "data.tokenizer=byte", *SMALL, "--machine", "8xall")
    assert code == 0, err
    kinds = [line.split()[0] for line in out.splitlines()]
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert "without exchanges" in rows["rtx-4090"]
    assert "without exchanges" not in rows["h100"]
    assert max(map(kinds.index, ("b200", "h100", "a100-40gb", "l4"))) < min(map(kinds.index, ("rtx-4090", "mi300x", "a10")))
    assert '"without exchanges": the links between these devices are not published' in out
    code, out, err = cli("plan", "default", f"data={source}", "data.tokenizer=byte", *SMALL, "--machine", "all")
    assert (code, "without exchanges" in out) == (0, False)


def test_memory_is_shown_of_a_machine_whose_time_is_not_known(cli: Callable[..., tuple[int, str, str]], source: Path) -> None:
    code, out, err = cli("plan", "default", f"data={source}", "data.tokenizer=byte", *SMALL, "--machine", "m4-max")
    assert code == 0, err
    rows = {line.split(maxsplit=1)[0]: line for line in out.splitlines()}
    assert "MiB at the peak, of 96 GiB free" in rows["Memory"]
    assert "(mps), 96 GiB;" in rows["Machine"]       # a single device is not "each"


def test_the_file_of_a_machine_with_several_devices_is_planned_for_as_many_as_are_asked_for(
        cli: Callable[..., tuple[int, str, str]], source: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    words = ("default", f"data={source}", "data.tokenizer=byte", *SMALL)
    found = replace(machine_of("4xa100", tmp_path), processes=1, basis="measured", cores=8)
    write_json(there, {"hardware": to_plain(found), "software": to_plain(Software({"torch": "2.13.0+cu130"}, {}))})
    code, out, err = cli("plan", *words, "--machine", str(there), "--processes", "4", "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[0])["facts"]["hardware"]["processes"] == 4
    code, _, err = cli("plan", *words, "--machine", str(there), "--processes", "5")
    assert (code, "5 processes are more than the 4 GPUs" in err) == (2, True)


def test_a_step_that_takes_more_than_a_plan_counts_on_is_tight(tmp_path: Path) -> None:
    hardware = machine_of("t4", tmp_path)
    tight, roomy = (on_machine_row(OnMachine("t4", hardware, words, None, 14 << 30, is_tight=is_tight))[1]
                    for words, is_tight in (("method=lora", True), ("", False)))
    assert (tight, roomy) == ("with method=lora, tight", "yes")
