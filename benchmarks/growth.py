"""Cases `growth`, `growth-rows` and `growth-runs`: how time and memory grow with models, data, and the length of a run.

Each width, length and batch is a run of `powertrain train` on characters of Shakespeare, on its own, of which the steps after
the first are timed. Examples are rows of text: a run prepares them, and others start with warm caches. A thousand million
examples are not written: of that many only the order of an epoch is made, as each step asks for it. Memory is what the process
had resident at its most (VmHWM), torch, Python and what it has mapped of files included; its own is what no file holds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cases import Materials
from conditions import marked
from prepare_once import resident_kib
from preparing import plain, write_rows
from starting import start

from powertrain.cli.options import say
from powertrain.data.order import step_examples
from powertrain.evidence import studies
from powertrain.evidence.stats import interval
from powertrain.facts.hardware import read_hardware
from powertrain.facts.machine_watch import MachineWatch
from powertrain.facts.software import read_software
from powertrain.records import to_plain
from powertrain.records.checkpoints import checkpoints_in, newest_checkpoint
from powertrain.records.event_log import EventLog
from powertrain.records.events import Step
from powertrain.records.evidence import Study
from powertrain.run.checkpoints import found_in

MODELS = ((4, 128), (6, 384), (12, 768), (20, 2048))     # layers and width: 0.8 M to 1,000 M parameters
BLOCK, BLOCKS = 512, 4
SMALL = MODELS[1]            # of the lengths and batches
LENGTHS, TOKENS = (128, 512, 2048, 8192, 32_768), 32_768             # of a step
BATCHES, BATCH_BLOCK = (1, 4, 16, 64, 256), 256
WARMED = 10**3               # rows of a run before: it measures the machine and compiles the kernels
EXAMPLES = (10**4, 10**5, 10**6, 2 * 10**7)             # the last are more than 10 GB
SCRATCH = ("data.tokenizer=byte", "model.layers=4", "model.width=128", "model.heads=2", "data.block=256")
ORDERED = tuple(10**power for power in range(3, 10))
EVENTS = (10**4, 10**5, 10**6)
CHECKPOINTS = (1, 10, 100, 1000, 10**4)
LEAST_STEPS, LEAST_S = 4, 4.0                # that are timed
ORDER_STEPS, ORDER_BATCH = 1000, 32
READ = """
import sys, time
from pathlib import Path
from powertrain.web.series import Index
began = time.perf_counter()
series = Index(Path(sys.argv[2])).series(Path(sys.argv[1]))
print(time.perf_counter() - began, len(series.steps))
"""


def measure_models(materials: Materials, python: Path) -> None:
    """Measures models, lengths and batches, prints the rows and stores the study."""
    del python
    store(materials, "growth", lambda: {
        "width of a model": [width(materials, *model) for model in MODELS],
        "tokens of an example": [length(materials, tokens) for tokens in LENGTHS],
        "blocks of 256 tokens in a step": [batch(materials, blocks) for blocks in BATCHES]})


def measure_rows(materials: Materials, python: Path) -> None:
    """Measures files of more and more rows, each of which tunes a model and, up to a million, trains one from scratch."""
    del python
    store(materials, "growth-rows", lambda: {
        "rows of text": [examples(materials, tuned(materials), count) for count in (WARMED, *EXAMPLES)][1:],
        "rows of text, from scratch": [examples(materials, SCRATCH, count) for count in (WARMED, *EXAMPLES[:-1])][1:]})


def measure_runs(materials: Materials, python: Path) -> None:
    """Measures longer and longer runs."""
    del python
    store(materials, "growth-runs", lambda: {
        "examples of an epoch": [order(count) for count in ORDERED],
        "steps of a log": [events(materials.folder, count) for count in EVENTS],
        "checkpoints of a run": checkpoints(materials)})


def store(materials: Materials, name: str, measured: Callable[[], Mapping[str, Sequence[Mapping[str, Any]]]]) -> None:
    folder, began = studies.new_folder(f"bench-{name}"), time.monotonic()
    with MachineWatch() as watch:
        axes = measured()
    hardware, software = read_hardware(materials.cache), read_software()
    described = studies.circumstances(hardware, software)
    study = Study(name=folder.name, kind="growth", what="how time and memory grow with the model, the data and the run",
                  seconds=time.monotonic() - began, findings={"axes": axes},
                  **{**described, "machine": marked(described["machine"], watch.seen)})
    studies.save(folder, study, {"hardware": to_plain(hardware), "software": to_plain(software)})
    print(f"{name}: {folder}")


def width(materials: Materials, layers: int, width: int) -> dict[str, Any]:
    return told("width", width, trained(materials, (layers, width), BLOCK, BLOCKS))


def length(materials: Materials, tokens: int) -> dict[str, Any]:
    return told("length", tokens, trained(materials, SMALL, tokens, TOKENS // tokens))


def batch(materials: Materials, blocks: int) -> dict[str, Any]:
    return told("batch", blocks, trained(materials, SMALL, BATCH_BLOCK, blocks))


def trained(materials: Materials, model: tuple[int, int], block: int, blocks: int) -> dict[str, Any]:
    """Tokens a second of the steps after the first, and the most memory, of a run on all weights of a model."""
    layers, wide = model
    words = [f"data={materials.shakespeare}", "data.tokenizer=char", "model.family=llama", f"model.layers={layers}",
             f"model.width={wide}", f"model.heads={wide // 64}", f"data.block={block}", f"train_batch_size={blocks}",
             "max_eval_samples=8", "save_steps=0", "eval_steps=0", "sample.tokens=0", "logging_steps=1", "max_steps=1000000"]
    output = materials.folder / f"grown-{time.time_ns()}"
    command = [sys.executable, "-m", "powertrain", "train", *words, "--output", str(output), "--json"]
    seconds, tokens, began = list[float](), 0, dict[str, Any]()
    with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as run:
        assert run.stdout is not None
        try:
            for line in run.stdout:
                event = json.loads(line)
                if event["event"] == "start":
                    began = event
                if event["event"] == "step":
                    seconds.append(event["seconds"])
                    tokens = event["tokens"]
                    if len(seconds) > LEAST_STEPS and sum(seconds[1:]) >= LEAST_S:
                        resident_bytes = resident_kib(run.pid) * 1024
                        break
            else:
                said.seek(0)
                why = said.read().strip().splitlines() or [f"it ended after {len(seconds)} steps without a word"]
                return {"refused": why[-1]}
        finally:
            run.kill()
    speed, plan = interval([tokens / one for one in seconds[1:]]), began["estimate"]
    return {"parameters": began["parameters"], "tokens_per_s": plain(speed), "resident_bytes": resident_bytes,
            "predicted_bytes": sum(plan["memory_bytes"].values()),
            "share_of_products": speed.median * plan["flops_per_token"] / plan["peak_flops_per_s"]}


def tuned(materials: Materials) -> list[str]:
    return ["method=lora", f"model.path={materials.llama}", "data.max_length=256", "data.long_examples=cut"]


def examples(materials: Materials, of_model: Sequence[str], count: int) -> dict[str, Any]:
    """The start of a run on so many new rows, which prepares them, and of others on the same; memory of both."""
    rows, held = write_rows(materials, "text", count), list[tuple[int, int]]()
    words = [*of_model, f"data={rows}", "train_batch_size=4", "save_steps=0", "eval_steps=0", "sample.tokens=0", "max_steps=50",
             "logging_steps=1"]

    def look(pid: int) -> None:
        held.append((resident_kib(pid) * 1024, resident_kib(pid, "RssAnon") * 1024))

    first, *starts = (start(words, materials.folder / "grown", materials.folder, most_s, look) for most_s in (3000, 240, 240))
    preparing_s = first["planned"] - min(one["planned"] for one in starts)
    return told("rows", count, {
        "rows_per_s": count / preparing_s, "bytes_per_s": rows.stat().st_size / preparing_s,
        "resident_bytes": held[0][0], "reopened_bytes": held[-1][0], "own_bytes": held[-1][1],
        "start_s": min(one["first step done"] for one in starts), "first_start_s": first["first step done"]})


def order(count: int) -> dict[str, Any]:
    """Seconds and memory of the order that the steps of an epoch ask for."""
    def steps(numbers: range) -> float:
        began = time.perf_counter()
        for step in numbers:
            step_examples(0, step, ORDER_BATCH, count, "keyed")
        return (time.perf_counter() - began) / len(numbers)

    first_s = steps(range(1))
    step_s = steps(range(ORDER_STEPS))
    tracemalloc.start()
    steps(range(count // ORDER_BATCH - 1, count // ORDER_BATCH + 9))         # across the end of the first epoch
    allocated_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return told("order", count, {"first_s": first_s, "step_s": step_s, "allocated_bytes": allocated_bytes})


def events(folder: Path, count: int) -> dict[str, Any]:
    """Seconds to read the log of so many steps, as the page and the reports read it: the first time, and again."""
    run = folder / f"logged-{count}"
    run.mkdir()
    log = EventLog(run / "events.jsonl")
    drawn = np.random.default_rng(0).random((count, 3))
    for step, (loss, norm, seconds) in enumerate(drawn.tolist(), start=1):
        log.write(Step(step=step, loss=loss, learning_rate=1e-3, grad_norm=norm, seconds=seconds, tokens=4096, real_tokens=4000,
                       parts={"data": 1e-4, "copy": 1e-4, "forward": seconds / 2, "backward": seconds / 2, "optimizer": 1e-3}))
    log.flush()
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", READ, str(run), str(folder / f"index-{count}")], check=True,
                              capture_output=True, text=True)
        seconds, steps = done.stdout.split()
        assert int(steps) == count
        found.append(float(seconds))
    return told("events", count, {"bytes": log.path.stat().st_size, "first_s": found[0], "again_s": found[1]})


def checkpoints(materials: Materials) -> list[dict[str, Any]]:
    """Seconds to find and check the newest of so many checkpoints, as a run that resumes does, and to list them all."""
    output, found = materials.folder / "kept", list[dict[str, Any]]()
    words = [f"data={materials.shakespeare}", "data.tokenizer=char", "model.layers=1", "model.width=64", "model.heads=1",
             "data.block=64", "train_batch_size=4", "eval_steps=0", "sample.tokens=0", "save_steps=1", "max_steps=1"]
    command = [sys.executable, "-m", "powertrain", "train", *words, "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    (first,) = checkpoints_in(output / "checkpoints").values()
    for count in CHECKPOINTS:
        for step in range(len(list(first.parent.iterdir())) + 1, count + 1):
            shutil.copytree(first, first.with_name(f"step-{step:06d}"), copy_function=os.link)
        began = time.perf_counter()
        newest = newest_checkpoint(first.parent)[0]
        newest_s, began = time.perf_counter() - began, time.perf_counter()
        listed = found_in(output)
        listed_s = time.perf_counter() - began
        assert len(listed) == count
        assert newest == listed[-1].path
        found.append(told("checkpoints", count, {"newest_s": newest_s, "listed_s": listed_s}))
    return found


def told(axis: str, at: int, found: Mapping[str, Any]) -> dict[str, Any]:
    say(f"growth, {axis} {at:,}: {found}")
    return {"at": at, **found}
