"""Runs as their events tell them, made up: a loss curve, step times and what happened between the steps."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powertrain.diagnosis.run_record import RunRecord
from powertrain.recipe import Recipe, Resolved
from powertrain.records.event_log import from_line
from powertrain.records.timeline import read

BEGAN = 1_795_268_000.0
STEPS, STEP_S = 200, 0.1
ESTIMATE = {"step_s": [0.05, 0.2], "floor_s": 0.02, "bound_by": "compute", "flops_per_step": 2.0e9, "flops_per_token": 1.0e6,
            "dtype": "fp32", "peak_flops_per_s": 1.0e11, "tokens_per_step": 2000, "steps": STEPS,
            "memory_bytes": {"weights": 40 << 20, "activations": 60 << 20}, "basis": "formula", "bytes_per_step": 1.0e8}
FACTS = {"hardware": {"memory_bytes": 16 << 30, "free_memory_bytes": 8 << 30, "device": "cpu"},
         "model": {"vocabulary": 2048}, "data": {"examples": 8000}}
RECIPE = {"train_batch_size": 8, "eval_steps": 50, "save_steps": 100, "logging_steps": 10, "warmup_ratio": 0.05}

Event = dict[str, Any]


def falling(steps: int = STEPS, first: float = 7.6, last: float = 3.0, rate: float = 5.0, noise: float = 0.03) -> list[float]:
    """An ordinary loss curve, with noise that is the same every time."""
    draw = random.Random(1)
    return [last + (first - last) * math.exp(-rate * step / steps) + draw.gauss(0, noise) for step in range(steps)]


def level(steps: int, at: float, noise: float = 0.03) -> list[float]:
    return falling(steps, at, at, noise=noise)


def norms(steps: int = STEPS, usual: float = 0.5) -> list[float]:
    draw = random.Random(2)
    return [usual * math.exp(draw.gauss(0, 0.1)) for _ in range(steps)]


def step(number: int, time: float, loss: float, norm: float, seconds: float, rate: float, **more: Any) -> Event:
    parts = {"data": 0.01 * seconds, "copy": 0.0, "forward": 0.3 * seconds, "optimizer": 0.1 * seconds}
    return {"event": "step", "time": time, "step": number, "loss": loss, "tokens": 1500, "real_tokens": 1900,
            "seconds": seconds, "learning_rate": rate, "grad_norm": norm,
            "parts": {**parts, "backward": seconds - sum(parts.values())},
            "padding_tokens": 100} | more


def start(**more: Any) -> Event:
    return {"event": "start", "time": BEGAN, "name": "made", "method": "scratch", "task": "causal", "total_steps": STEPS,
            "train_batch_size": 8, "device": "cpu", "estimate": ESTIMATE, "load": 0.1} | more


def events(losses: Sequence[float] | None = None, grad_norms: Sequence[float] | None = None, *,
           seconds: Sequence[float] | None = None, parts: dict[int, dict[str, float]] | None = None,
           held_out: dict[int, float] | None = None, between: Sequence[Event] = (), end: Event | None = None,
           ended: bool = True, **started: Any) -> list[Event]:
    """A run of these losses, norms and times, with what happens `between` after the step that it names."""
    losses = falling() if losses is None else losses
    grad_norms = norms(len(losses)) if grad_norms is None else grad_norms
    seconds = [STEP_S] * len(losses) if seconds is None else seconds
    held_out = {at: losses[at - 1] + 0.1 for at in range(50, len(losses) + 1, 50)} if held_out is None else held_out
    total, found, now = started.get("total_steps", len(losses)), [start(**{"total_steps": len(losses)} | started)], BEGAN
    for number, (loss, norm, taken) in enumerate(zip(losses, grad_norms, seconds, strict=True), 1):
        now += taken
        rate = 1e-3 * (0.5 + 0.5 * math.cos(math.pi * number / max(total, len(losses))))
        more = {"parts": parts[number]} if parts and number in parts else {}
        found.append(step(number, now, loss, norm, taken, rate, **more))
        if number in held_out:
            now += 0.02
            found.append({"event": "evaluation", "time": now, "step": number, "final": number == len(losses),
                          "loss": held_out[number], "tokens": 4000, "seconds": 0.02})
        found += [{"time": now, **event} for event in between if event["step"] == number]
    if ended:
        found.append({"event": "end", "time": now, "reason": "finished", "step": len(losses), "seconds": now - BEGAN,
                      "peak_memory_bytes": 700 << 20} | (end or {}))
    return found


def record(happened: Sequence[Event], *, all_events: Sequence[Event] = (), recipe: dict[str, Any] | None = None,
           facts: dict[str, Any] | None = None, techniques: dict[str, dict[str, Any]] | None = None,
           being_written: bool | None = False, silent_s: float = 1.0) -> RunRecord:
    history = read([*map(from_line, happened)], [*map(from_line, all_events or happened)])
    return RunRecord(Path("runs/made"), Recipe(**RECIPE | (recipe or {})), {**FACTS, **(facts or {})}, plan(techniques or {}),
                     history, being_written, happened[-1]["time"] + silent_s)


def plan(techniques: dict[str, dict[str, Any]]) -> dict[str, Any]:
    steps = [{"technique": name, "settings": settings, "because": "a test says so", "exactness": "ROUNDING",
              "claim": {"step_time": [1.0, 1.0], "peak_memory_bytes": 0, "basis": "guess: a test"}}
             for name, settings in techniques.items()]
    return {"steps": steps, "refused": [], "estimate": ESTIMATE}


def on_disk(folder: Path, happened: Sequence[Event], **recipe: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(Resolved(Recipe(**RECIPE | recipe), {}).to_yaml(), encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(plan({})), encoding="utf-8")
    (folder / "facts.json").write_text(json.dumps(FACTS), encoding="utf-8")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in happened), encoding="utf-8")
    return folder
