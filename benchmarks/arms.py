"""Two plans of Powertrain against each other: the same recipe with different `key=value` words, in one interleaved run.

    python benchmarks/arms.py RECIPE --a techniques.torch_compile=off --b techniques.torch_compile=on --steps 12 --study NAME

Each run is a fresh process; the order is A B B A. Words after RECIPE go to both arms. The result goes to
studies/NAME/evidence.json: both arms' words, step times and losses, and the ratio of median step times B / A with a
bootstrap interval. The first steps of each run are left out of the timing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_STEPS = 3
LONG_RUN_STEPS = 300


def main() -> None:
    options = parse()
    arms: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
    with tempfile.TemporaryDirectory() as scratch:
        for number, arm in enumerate(["a", "b", "b", "a"] * options.rounds):
            words = [options.recipe, *options.words, *getattr(options, arm)]
            arms[arm].append(run_powertrain(words, options.steps, Path(scratch) / f"run{number}"))
            median_s = statistics.median(arms[arm][-1]["step_s"][WARM_UP_STEPS:])
            print(f"{arm} {getattr(options, arm)}: {median_s:.4f} s", flush=True)
    times = {arm: [s for run in runs for s in run["step_s"][WARM_UP_STEPS:]] for arm, runs in arms.items()}
    losses = [[statistics.mean(at) for at in zip(*(run["losses"] for run in arms[arm]), strict=True)] for arm in "ab"]
    store(options.study, {
        "what": "seconds of one optimizer step, B against A", "recipe": options.recipe, "machine": machine(),
        "warm_up_steps": WARM_UP_STEPS, "a": options.a, "b": options.b,
        "step_s": {arm: summary(found) for arm, found in times.items()}, "step_time_b_over_a": ratio(times["b"], times["a"]),
        "largest_loss_difference": max((b - a for a, b in zip(*losses, strict=True)), key=abs), "arms": arms})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--a", nargs="+", required=True)
    parser.add_argument("--b", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1, help="of A B B A")
    parser.add_argument("--study", required=True, help="folder in studies/")
    return parser.parse_args()


def run_powertrain(words: Sequence[str], steps: int | None, folder: Path) -> dict[str, Any]:
    """The first `steps` steps of a run that would be longer (a shorter one has another schedule); None = the whole run."""
    quiet = ["logging_steps=1", "save_steps=0", "sample.tokens=0", "eval_steps=0"]
    command = [sys.executable, "-m", "powertrain", "train", *words, *quiet, "--output", str(folder), "--quiet"]
    events: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while steps is None or sum(event["event"] == "step" for event in events) < steps:
            try:
                process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                pass
            else:
                events = read(folder)
                if process.returncode:
                    assert process.stderr
                    raise RuntimeError(f"powertrain {' '.join(words)}: {process.stderr.read()}")
                break
            events = read(folder)
        process.kill()
    taken = [event for event in events if event["event"] == "step"][:steps]
    shown = [f"data={Path(word).name}" if word.startswith("data=") else word for word in words]   # no path of this machine
    return {"words": shown, "losses": [event["loss"] for event in taken], "step_s": [event["seconds"] for event in taken],
            "techniques": next(event["techniques"] for event in events if event["event"] == "start"),
            "final": next((event["loss"] for event in reversed(events) if event["event"] == "evaluation"), None)}


def read(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def summary(times: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "lowest": min(times), "highest": max(times), "steps": len(times)}


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, float]:
    """Ratio of medians with a bootstrap 95 % interval."""
    draw = random.Random(0)

    def drawn(times: Sequence[float]) -> float:
        return statistics.median(draw.choices(times, k=len(times)))

    found = sorted(drawn(numerator) / drawn(denominator) for _ in range(2000))
    return {"ratio": statistics.median(numerator) / statistics.median(denominator), "low": found[50], "high": found[-50]}


def machine() -> dict[str, Any]:
    import torch

    with open("/proc/cpuinfo") as file:
        name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), platform.processor())
    return {"name": name, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}


def thinned(run: dict[str, Any]) -> dict[str, Any]:
    """A run's curves as they are stored: rounded, and of a long run every tenth step. Medians are of all steps."""
    every = 10 if len(run["losses"]) > LONG_RUN_STEPS else 1
    curves = {key: [round(value, 5) for value in run[key][::every]] for key in ("losses", "step_s")}
    return {**run, **curves, "curves_every_steps": every}


def store(study: str, evidence: dict[str, Any]) -> None:
    folder = ROOT / "studies" / study
    folder.mkdir(parents=True, exist_ok=True)
    arms = {arm: [thinned(run) for run in runs] for arm, runs in evidence["arms"].items()}
    text = json.dumps({"study": study, "date": f"{datetime.date.today()}", **evidence, "arms": arms}, indent=1)
    text = re.sub(r"(-?[\d.e-]+),\n\s+(?=-?\d)", r"\1, ", text)      # numbers of a curve side by side
    (folder / "evidence.json").write_text(text + "\n")
    print(json.dumps({key: value for key, value in evidence.items() if key != "arms"}, indent=1))


if __name__ == "__main__":
    main()
