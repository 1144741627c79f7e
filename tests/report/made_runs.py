"""Runs as their files hold them, made up and small."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powertrain.records import timeline
from powertrain.records.event_log import from_line
from powertrain.records.events import Event
from powertrain.records.origins import COMMAND_LINE, DEFAULT
from powertrain.report.run_page import RunFiles

BEGAN = 1_795_268_000.0
ESTIMATE = {"step_s": [0.05, 0.2], "floor_s": 0.02, "bound_by": "compute", "flops_per_step": 2.0e9, "flops_per_token": 1.0e6,
            "dtype": "bf16", "peak_flops_per_s": 4.0e11, "tokens_per_step": 2000, "steps": 40,
            "memory_bytes": {"weights": 4 << 20, "optimizer": 8 << 20, "activations": 20 << 20}, "basis": "formula"}
PLAN = {"steps": [{"technique": "bf16", "settings": {}, "because": "the CPU has avx512_bf16", "exactness": "ROUNDING",
                   "claim": {"step_time": [0.3, 0.6], "peak_memory_bytes": 0, "basis": "guess: not measured yet"}}],
        "refused": [{"technique": "tf32", "because": "no TF32 units"}], "estimate": ESTIMATE}
FACTS = {"hardware": {"name": "AMD EPYC", "device": "cpu", "cores": 2, "memory_bytes": 16 << 30, "devices": 1,
                      "peak_flops_per_s": {"fp32": 1.0e11, "bf16": 4.0e11}, "datasheet_flops_per_s": {"bf16": 6.0e11},
                      "bandwidth_bytes_per_s": 3.3e10},
         "software": {"versions": {"torch": "2.13.0"}, "missing": {}}, "model": {"family": "llama", "layers": 2, "width": 64},
         "data": {"source": "stdlib", "digest": "d461d7f0056031ba", "examples": 299}}


def start(time: float, kind: str = "start", **more: Any) -> dict[str, Any]:
    return {"event": kind, "time": time, "name": "default", "method": "scratch", "task": "causal", "total_steps": 40,
            "train_batch_size": 8, "device": "cpu", "estimate": ESTIMATE} | more


def step(number: int, time: float, seconds: float = 0.1, **more: Any) -> dict[str, Any]:
    parts = {"data": 0.01, "copy": 0.001, "forward": 0.3 * seconds, "optimizer": 0.004}
    parts["backward"] = seconds - sum(parts.values())
    return {"event": "step", "time": time, "step": number, "loss": 5.0 - 0.05 * number, "tokens": 1500, "real_tokens": 1900,
            "seconds": seconds, "learning_rate": 1e-3, "grad_norm": 0.5 + 0.03 * number, "parts": parts,
            "padding_tokens": 100} | more


def whole_run(steps: int = 40, step_s: float = 0.1) -> list[dict[str, Any]]:
    """A run that finished: evaluations every 20 steps, one checkpoint, and 0.25 s that nothing claims."""
    events, now = [start(BEGAN)], 0.0
    for number in range(1, steps + 1):
        seconds = step_s + 0.5 if number == 1 else step_s
        now += seconds
        events.append(step(number, BEGAN + now, seconds))
        if number % 20 == 0 or number == steps:
            now += 0.5
            events.append({"event": "evaluation", "time": BEGAN + now, "step": number, "final": number == steps,
                           "loss": 4.5 - 0.02 * number, "tokens": 4062, "bits_per_byte": 1.5, "seconds": 0.5})
            now += 0.2
            events.append({"event": "sample", "time": BEGAN + now, "step": number, "text": f"sample {number}", "seconds": 0.2})
    now += 0.3
    events.append({"event": "checkpoint", "time": BEGAN + now, "step": steps, "path": "p", "bytes": 1000, "seconds": 0.3})
    events.append({"event": "memory", "time": BEGAN + now, "step": 2, "allocated_bytes": 33 << 20,
                   "predicted": ESTIMATE["memory_bytes"], "fullest_bytes": 96 << 20})
    now += 0.25
    events.append({"event": "end", "time": BEGAN + now, "reason": "finished", "step": steps, "seconds": now, "clipped_steps": 3,
                   "peak_memory_bytes": 700 << 20})
    return events


def shared_run() -> list[dict[str, Any]]:
    """The same by two processes, which need 12 % of the time for the exchange and 6 % for waiting."""
    shares = {"communication_share": 0.12, "waiting_share": 0.06, "token_imbalance": 1.25}

    def shared(event: dict[str, Any]) -> dict[str, Any]:
        parts, waits_s = event["parts"], 0.18 * event["seconds"]
        return event | shares | {"parts": parts | {"communication": waits_s, "backward": parts["backward"] - waits_s}}

    return [shared(event) if event["event"] == "step" else event | ({"processes": 2} if event["event"] == "start" else {})
            for event in whole_run()]


def typed(events: Sequence[dict[str, Any]]) -> list[Event]:
    return [from_line(event) for event in events]


def files(events: list[dict[str, Any]], **more: Any) -> RunFiles:
    recipe = {"max_grad_norm": (1.0, DEFAULT), "name": ("default", COMMAND_LINE)}
    return RunFiles(**({"folder": "runs/a", "recipe": recipe, "facts": FACTS, "plan": PLAN,
                        "history": timeline.read(typed(events), typed(events)), "made": "made by a test"} | more))


def on_disk(folder: Path, events: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text('name: "default"  # recipe default\nmax_grad_norm: 1.0\n', encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(PLAN), encoding="utf-8")
    (folder / "facts.json").write_text(json.dumps(FACTS), encoding="utf-8")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return folder
