"""Case `start`: seconds from the command to the first step of case 1, with warm caches and empty ones, and of a small recipe.

Warm: POWERTRAIN_CACHE holds this machine's measured peaks and the tokenised rows, TORCHINDUCTOR_CACHE_DIR what was compiled.
Cold: both are new folders, and so is HOME, where our own kernels lie, so that peaks are measured, rows tokenised and all is
compiled. Files that the system itself keeps in memory, such as Python's modules, are there in both, as they are after any
other run. The peer compiles nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cases import CASES, Materials, PeerArm
from conditions import marked
from preparing import plain

from powertrain.cli.options import say
from powertrain.evidence import studies
from powertrain.evidence.stats import interval
from powertrain.facts.hardware import read_hardware
from powertrain.facts.machine_watch import MachineWatch
from powertrain.facts.software import read_software
from powertrain.records import to_plain
from powertrain.records.evidence import Study

WARM, COLD, THEIRS = 5, 3, 3                 # runs
RECIPE = "docstrings"                        # comes with Powertrain; started with warm caches
LONGEST_S = 240.0                            # of a start: what takes longer is ended
HERE = Path(__file__).resolve().parent


def measure(materials: Materials, python: Path) -> None:
    """Measures warm, cold and peer's starts, prints the medians and stores the study."""
    folder, began = studies.new_folder("bench-start"), time.monotonic()
    case = next(case for case in CASES if case.name == "lora")
    words = [*(word for word in case.words(materials) if not word.startswith("logging_steps")), "logging_steps=1"]
    warm_folder = materials.folder / "warm"
    small = [RECIPE, "logging_steps=1"]
    for filling_caches in (words, small):
        start(filling_caches, warm_folder, materials.folder)
    with MachineWatch() as watch:
        found = {"warm": [start(words, warm_folder, materials.folder) for _ in range(WARM)],
                 "cold": [cold_start(words, materials.folder) for _ in range(COLD)],
                 RECIPE: [start(small, warm_folder, materials.folder) for _ in range(WARM)]}
        theirs = [peer_start(case.peers(materials)[0], python) for _ in range(THEIRS)]
    medians = {kind: {name: interval([run[name] for run in runs]).median for name in runs[0]} for kind, runs in found.items()}
    hardware, software = read_hardware(materials.cache), read_software()
    described = studies.circumstances(hardware, software)
    study = Study(name=folder.name, kind="start", seconds=time.monotonic() - began,
                  what="seconds from the command to the first step of case 1, warm and cold, and of a small recipe",
                  **{**described, "machine": marked(described["machine"], watch.seen)},
                  findings={"medians": medians, "runs": found, "peer_runs": theirs,
                            "to_first_step": {kind: plain(interval([run["first step done"] for run in runs]))
                                              for kind, runs in {**found, "peer": theirs}.items()}})
    studies.save(folder, study, {"hardware": to_plain(hardware), "software": to_plain(software)})
    for kind, one in medians.items():
        print(f"start, {kind}: {one['first step done']:.1f} s to the end of the first step ("
              + ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts(one).items()) + f") ({folder})")
    print(f"start, TRL: {interval([run['first step done'] for run in theirs]).median:.1f} s")


def parts(stamps: Mapping[str, float]) -> dict[str, float]:
    """Seconds between each two stamps, by the later one."""
    return {name: seconds - before for (name, seconds), before in zip(stamps.items(), [0.0, *stamps.values()], strict=False)}


def cold_start(words: Sequence[str], folder: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=folder) as empty:
        return start(words, Path(empty), folder)


def start(words: Sequence[str], caches: Path, folder: Path, most_s: float = LONGEST_S,
          look: Callable[[int], None] = lambda pid: None) -> dict[str, float]:
    """Seconds after the command at which each thing was there, in order. `look` gets the process's number before its end."""
    output = folder / "started"
    shutil.rmtree(output, ignore_errors=True)
    environment = {**os.environ, "POWERTRAIN_CACHE": str(caches / "powertrain"),
                   "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "HOME": str(caches)}
    began = time.perf_counter()
    stamps: dict[str, float] = {}
    command = [sys.executable, "-m", "powertrain", "train", *words, "--output", str(output), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as run:
        assert run.stdout is not None
        ending = threading.Timer(most_s, run.kill)
        ending.start()
        try:
            for line in run.stdout:
                event = json.loads(line)["event"]
                if event in EVENTS:
                    stamps[EVENTS[event]] = time.perf_counter() - began
                if event == "step":
                    look(run.pid)
                    break
        finally:
            ending.cancel()
            run.kill()
    if len(stamps) != len(EVENTS):
        raise SystemExit(f"{' '.join(command)} came no further than: {', '.join(stamps) or 'nothing'}")
    say(f"start: {', '.join(f'{name} {seconds:.1f} s' for name, seconds in stamps.items())}")
    return stamps


# what a run tells when it is there: imports, machine and rows; the model with the plan in force, compiled; and the step itself
EVENTS = {"folder": "planned", "start": "in force", "step": "first step done"}


def peer_start(peer: PeerArm, python: Path) -> dict[str, float]:
    began = time.perf_counter()
    command = [str(python), str(HERE / "peers" / peer.script), json.dumps(dict(peer.options))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        ending = threading.Timer(LONGEST_S, run.kill)
        ending.start()
        ready = run.stdout.readline()
        planned = time.perf_counter() - began
        run.stdin.write(json.dumps({"untimed": 0, "steps": 1}) + "\n")
        run.stdin.flush()
        answer = run.stdout.readline()
        done = time.perf_counter() - began
        ending.cancel()
        run.kill()
    if not ready or not answer:
        raise SystemExit(f"{peer.name} came to no step in {LONGEST_S:g} s")
    say(f"start: {peer.name} {done:.1f} s")
    return {"in force": planned, "first step done": done}
