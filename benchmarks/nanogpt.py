"""Powertrain against nanoGPT as shipped, on the character models of nanoGPT's README, in one interleaved run.

    python benchmarks/nanogpt.py --nanogpt CHECKOUT --data tinyshakespeare.txt --model large --steps 25 --study NAME

CHECKOUT is a checkout of github.com/karpathy/nanoGPT, which is not part of this project and is only run. Each arm is a
fresh process of its own trainer; the order is A B B A. nanoGPT's figures are read from what it prints, ours from
events.jsonl. The first steps of each run are left out of the timing. The result goes to studies/NAME/evidence.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import re
import shutil
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
ITERATION = re.compile(r"iter (\d+): loss ([\d.]+), time ([\d.]+)ms")
EVALUATION = re.compile(r"step (\d+): train loss [\d.]+, val loss ([\d.]+)")
# recipe here, and what nanoGPT's README gives for a CPU; dropout and length come from this script's own options
MODELS = {
    "large": ("char-shakespeare", []),
    "small": ("char-shakespeare-cpu", ["--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128"]),
}


def main() -> None:
    options = parse()
    arms: dict[str, list[dict[str, Any]]] = {"nanogpt": [], "powertrain": []}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        prepare_nanogpt(options.nanogpt, options.data, options.nanogpt_python, scratch / "nanogpt")
        for number, arm in enumerate(["nanogpt", "powertrain", "powertrain", "nanogpt"] * options.rounds):
            if arm == "nanogpt":
                arms[arm].append(run_nanogpt(options, scratch / "nanogpt"))
            else:
                steps = None if options.whole else options.steps
                arms[arm].append(run_powertrain(our_words(options), steps, scratch / f"run{number}"))
            print(f"{arm}: median step {statistics.median(arms[arm][-1]['step_s'][WARM_UP_STEPS:]):.4f} s, "
                  f"last loss {arms[arm][-1]['losses'][-1]:.4f}", flush=True)
    store(options.study, compare(options, arms))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of nanoGPT")
    parser.add_argument("--nanogpt-python", default=sys.executable, help="an interpreter with torch, numpy and requests")
    parser.add_argument("--data", type=Path, required=True, help="tinyshakespeare.txt")
    parser.add_argument("--model", choices=MODELS, default="large")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=1, help="of A B B A")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--whole", action="store_true", help="the steps are the whole run: schedule and evaluation end there")
    parser.add_argument("--study", required=True, help="folder in studies/")
    parser.add_argument("words", nargs="*", help="key=value words for powertrain's arm")
    return parser.parse_args()


def prepare_nanogpt(checkout: Path, text: Path, python: str, folder: Path) -> Path:
    """A copy with the data in the place where nanoGPT's own preparation looks before it downloads."""
    shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git"))
    data = folder / "data" / "shakespeare_char"
    shutil.copy(text, data / "input.txt")
    subprocess.run([python, "prepare.py"], cwd=data, check=True, capture_output=True)
    return folder


def run_nanogpt(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Its own script with its own settings: fp32 and no compilation on a CPU, as its README says."""
    _, flags = MODELS[options.model]
    length = [f"--max_iters={options.steps}"]
    if options.whole:
        length += [f"--lr_decay_iters={options.steps}", f"--eval_interval={options.steps}", "--eval_iters=200"]
    else:
        length += ["--eval_interval=1000000", "--eval_iters=1"]
    words = ["train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--log_interval=1",
             f"--dropout={options.dropout}", *flags, *length]
    found = subprocess.run([options.nanogpt_python, *words], cwd=folder, check=True, capture_output=True, text=True).stdout
    steps = [(int(step), float(loss), float(ms) / 1e3) for step, loss, ms in ITERATION.findall(found)]
    steps = [step for step in steps if step[0] < options.steps]      # it runs one iteration more than it is asked for
    evaluations = {int(step): float(loss) for step, loss in EVALUATION.findall(found)}
    return {"words": words, "losses": [loss for _, loss, _ in steps], "step_s": [seconds for _, _, seconds in steps],
            "final": evaluations.get(options.steps) if options.whole else None}


def our_words(options: argparse.Namespace) -> list[str]:
    """nanoGPT's learning rate and length, whatever the recipe learns best with."""
    recipe, _ = MODELS[options.model]
    steps = options.steps if options.whole else 5000
    return [recipe, f"data={options.data}", f"model.dropout={options.dropout}", "learning_rate=1e-3", f"max_steps={steps}",
            *options.words]


def compare(options: argparse.Namespace, arms: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    times = {arm: [s for run in runs for s in run["step_s"][WARM_UP_STEPS:]] for arm, runs in arms.items()}
    theirs, ours = (mean_curve([run["losses"] for run in arms[arm]]) for arm in ("nanogpt", "powertrain"))
    apart = [b - a for a, b in zip(theirs, ours, strict=True)]
    return {
        "what": "one optimizer step, nanoGPT as shipped (fp32 on a CPU, no compilation) against powertrain's plan",
        "model": options.model, "dropout": options.dropout, "machine": machine(), "warm_up_steps": WARM_UP_STEPS,
        "step_s": {arm: summary(found) for arm, found in times.items()},
        "speedup": ratio(times["nanogpt"], times["powertrain"]),
        "loss_difference": {"mean": statistics.mean(apart), "mean_absolute": statistics.mean(map(abs, apart)),
                            "last_tenth": statistics.mean(apart[-max(1, len(apart) // 10):])},
        "final": {arm: [run["final"] for run in runs] for arm, runs in arms.items()}, "arms": arms}


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.mean(at) for at in zip(*curves, strict=True)]


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
