"""Studies of each kind, as evidence.json holds them, with numbers that are made up but hang together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from powertrain.records import to_plain
from powertrain.records.evidence import Arm, ArmRun, Comparison, Interval, Parity, Study, Window

PAIRS = 6
STEP_S = 0.1


def wobble(number: int) -> float:
    """Between 0.98 and 1.02, the same each time."""
    return 1 + 0.02 * math.sin(2.4 * number)


def run(arm: str, speed: float, seed: int = 0, rounding: float = 0.0) -> ArmRun:
    windows = tuple(Window(10 * i + 1, 10, 10 * STEP_S / speed * wobble(i + seed), 9000, 10000, 500, {"forward": 0.3})
                    for i in range(PAIRS))
    losses = tuple(5 * math.exp(-i / 30) * (1 + rounding * i) for i in range(60))
    return ArmRun(arm, 2.0, 0.5, 5, windows, losses, tuple(1 + 0.1 * wobble(i) for i in range(60)), 700 << 20, ("bf16",))


def compared(a: str, b: str, ratio: float, verdict: str, *, rounding: float = 0.0, width: float = 0.02) -> tuple[Any, ...]:
    speed = Interval(ratio, ratio * (1 - width), ratio * (1 + width))
    comparison = Comparison(a, b, speed, PAIRS, verdict, f"{ratio:.3f} times as fast", (1000.0, 1000.0 * ratio),
                            (700 << 20, 650 << 20), 1.5, 40 if ratio > 1 else None)
    return comparison, run(a, 1.0), run(b, ratio, 3, rounding)


def study(kind: str, found: Sequence[tuple[Any, ...]], findings: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    comparisons, runs = tuple(one[0] for one in found), tuple(run for one in found for run in one[1:])
    arms = tuple(Arm(name, ("default", "max_steps=60")) for name in dict.fromkeys(run.arm for run in runs))
    made = Study(f"2026-11-21_{kind}", kind, f"a made-up {kind}", "2026-11-21", f"powertrain {kind} default", "43bc34a120a1",
                 {"name": "AMD EPYC", "device": "cpu", "cores": 2, "memory_bytes": 16 << 30, "fingerprint": "f", "load": 0.2},
                 {"torch": "2.13.0", "python": "3.11.7"}, arms, runs, comparisons, 0.012, findings, 431.0)
    plain: dict[str, Any] = to_plain(made) | more
    return plain


CONTROL = compared("full plan", "full plan again", 1.002, "no effect", width=0.01)


def technique(name: str, verdict: str, ladder: int | None, left_out: int | None, ratio: float | None,
              **more: Any) -> dict[str, Any]:
    speed = None if ratio is None else to_plain(Interval(ratio, ratio * 0.98, ratio * 1.02))
    parity = to_plain(Parity("ROUNDING", True, "losses differ by 1e-5 at most", 4, 1e-5, 2e-4))
    return {"name": name, "settings": {"threads": 2} if name == "threads" else {}, "exactness": "ROUNDING",
            "because": f"the facts speak for {name}", "claim": {"step_time": [0.5, 0.9], "peak_memory_bytes": 0,
                                                                "basis": "guess: not measured yet"},
            "acts_on": ["products"], "bound": 1.8, "ladder": ladder, "left_out": left_out, "speed": speed,
            "memory_bytes": -(32 << 20), "parity": parity, "verdict": verdict, "why": f"{name} was measured"} | more


def ablation() -> dict[str, Any]:
    found = [CONTROL, compared("no technique", "full plan", 1.83, "faster", rounding=1e-5),
             compared("without threads", "full plan", 1.21, "faster"), compared("without bf16", "full plan", 1.46, "faster"),
             compared("without slowing", "full plan", 0.91, "harmful"),
             compared("no technique", "ladder up to threads", 1.25, "faster"),
             compared("ladder up to threads", "ladder up to bf16", 1.6, "faster"),
             compared("ladder up to bf16", "ladder up to slowing", 0.92, "harmful")]
    profile = {"plain": {"step_s": 0.1, "classes": {"products": 0.06, "attention": 0.02, "loss": 0.01, "optimizer": 0.01}},
               "plan": {"step_s": 0.055, "classes": {"products": 0.03, "attention": 0.012, "loss": 0.007, "optimizer": 0.006}}}
    return study("ablation", found, {
        "recipe": ["default"], "profile": profile, "control": 0, "total": 1, "techniques": [
            technique("threads", "faster", 5, 2, 1.21), technique("bf16", "faster", 6, 3, 1.46),
            technique("slowing", "harmful", 7, 4, 0.91, memory_bytes=8 << 20),
            technique("fused_adamw", "no effect", 6, None, None, bound=1.004),
            technique("four_bit_base", "not applicable here", None, None, None, bound=None, memory_bytes=None, parity=None)]})


def tuning() -> dict[str, Any]:
    found = [CONTROL, compared("untuned plan", "micro_batch (examples=4)", 1.12, "faster")]
    rounds = [to_plain(Interval(ratio, ratio * 0.97, ratio * 1.03)) for ratio in (1.09, 1.13)]
    return study("tuning", found, {
        "recipe": ["default"], "chosen": {"micro_batch": {"examples": 4}}, "total": 1, "control": 0, "key": "k", "candidates": [
            {"name": "micro_batch (examples=4)", "pins": {"micro_batch": {"examples": 4}}, "rounds": rounds, "kept": True,
             "why": "the fastest", "compile_s": 0.1, "break_even_steps": None},
            {"name": "with torch_compile", "pins": {"torch_compile": {}}, "rounds": rounds[:1], "kept": False,
             "why": "the slower half", "compile_s": 12.0, "break_even_steps": 900},
            {"name": "without threads", "pins": {"threads": "off"}, "rounds": [], "kept": False,
             "why": "not reached within the budget", "compile_s": 0.0, "break_even_steps": None}]})


def comparison() -> dict[str, Any]:
    return study("comparison", [compared("packing off", "packing on", 1.31, "faster", rounding=1e-4)], {})


def claim(name: str, verdict: str, measured: tuple[float, float, float] | None, **more: Any) -> dict[str, Any]:
    return {"id": name, "document": name[:3], "what": f"what {name} does", "claimed": "+10 % speed", "range": [1.05, 1.15],
            "unit": "times as fast", "better": "higher", "measured": to_plain(Interval(*measured)) if measured else None,
            "verdict": verdict, "because": f"{name} was looked at", "prior": "about nothing", "experiment": "e",
            "metric": "speed", "conditions": "powertrain train default", "parity": None} | more


def claims() -> dict[str, Any]:
    found = [compared("e, A", "e, A again", 1.001, "no effect"), compared("off", "on", 1.11, "faster")]
    return study("claims", found, {"experiments": {}, "claims": [
        claim("000-03", "confirmed", (1.11, 1.08, 1.14)), claim("000-04", "no effect", (1.0, 0.99, 1.01)),
        claim("000-05", "not applicable here", None, because="this machine has no CUDA device"),
        claim("001-01", "better", (2.4, 2.2, 2.6), range=[1.5, None]),
        claim("001-06", "smaller than claimed", (62.0, 61.0, 63.0), unit="% less", range=[70, 80]),
        claim("002-02", "harmful", (0.8, 0.78, 0.82)), claim("002-03", "inconclusive", (1.2, 0.7, 1.9))]})


def bench() -> dict[str, Any]:
    columns = ["examples", "peak MiB", "predicted MiB", "prediction off by %", "loss apart", "tokens/s", "times as fast",
               "from", "to", "verdict", "why"]
    return study("bench", [CONTROL], {
        "recipe": ["default"], "control": 0, "notes": ["memory is of a CPU"], "not_reached": ["4 workers"],
        "tables": {"micro-batch": {"columns": columns, "rows": [
            [1, 101.5, 100.25, -1.23, None, 900.5, None, None, None, None, "what the others are held against"],
            [2, 150.75, 151.5, 0.5, 1e-6, 1200.25, 1.33, 1.3, 1.36, "faster", "faster"],
            ["8-bit", None, None, None, None, None, None, None, None, "not applicable here", "no CUDA device"]]}},
        "assertions": [{"what": "micro-batch: every setting trains", "holds": True, "because": "losses finite"},
                       {"what": "memory grows with the examples", "holds": False, "because": "101 MiB, then 99 MiB"}]})


def speed() -> dict[str, Any]:
    return study("speed", [], {"rows": [
        {"recipe": ["default"], "expected_s": [0.02, 0.09], "measured_s": {"median": 0.035, "low": 0.03, "high": 0.04},
         "floor_s": 0.01},
        {"recipe": ["docstrings"], "expected_s": [0.2, 0.3], "measured_s": {"median": 0.5, "low": 0.45, "high": 0.55},
         "floor_s": 0.1}]})


def memory() -> dict[str, Any]:
    return study("memory", [], {"rows": [
        {"what": f"llama, {length} tokens", "predicted": {"weights": 10 << 20, "activations": length << 12, "loss": 1 << 20},
         "measured_bytes": (11 << 20) + (length << 12) + 4000 * length % 70000, "error": 0.001 * (length % 7)}
        for length in (16, 64, 257, 1023)]})


def crippled(name: str, planted: str, named: str, predicted: float, measured: float | None, **more: Any) -> dict[str, Any]:
    holds = measured is not None and measured - 1 >= 0.5 * (predicted - 1)
    return {"name": name, "planted": planted, "words": ["default", "eval_steps=1"], "named": named, "share": 0.4, "bound": 1.67,
            "predicted": predicted, "basis": "formula: of a test", "cure": ["techniques.loader=on"], "evidence": ["it waits"],
            "measured": measured, "interval": None if measured is None else [0.9 * measured, 1.1 * measured],
            "ratio": None if measured is None else (measured - 1) / (predicted - 1), "by_runs": False,
            "others": [{"name": "compute", "share": 0.3, "predicted": 1.0}], "holds": holds} | more


def diagnosis() -> dict[str, Any]:
    return study("diagnosis", [compared("starved: crippled", "starved: cured", 1.5, "faster")], {"cases": [
        crippled("starved", "data", "data", 1.6, 1.5), crippled("one-thread", "too few threads", "too few threads", 1.9, 1.2),
        crippled("evaluating", "evaluation", "evaluation", 1.5, 1.45, by_runs=True),
        crippled("padded", "padding", "host overhead", 2.0, None),
        {"name": "wild", "planted": "compute", "words": ["default"], "failed": "the loss is not finite", "holds": False}]})


def peers() -> dict[str, Any]:
    losses = [{"peer": "a peer", "steps": 8, "first": 1e-3, "mean": -2e-4, "mean_absolute": 4e-4, "largest": 2e-3}]
    return study("peers", [compared("a peer", "powertrain", 2.5, "faster", rounding=1e-4)], {
        "case": "lora", "losses": losses, "products_share": 0.54, "profile": {"products": 0.8, "attention": 0.2}})


def prepare() -> dict[str, Any]:
    one = {"rows": 40000, "ratio": {"median": 2.5, "low": 2.4, "high": 2.6}, "rows_per_s": 20000.0, "peer_rows_per_s": 8000.0,
           "ratio_to_map_alone": {"median": 2.25, "low": 2.2, "high": 2.3}, "processes": 2, "peer_processes": 2,
           "resident_bytes": 120 << 20, "resident_bytes_of_fewer": 119 << 20, "peer_resident_bytes": 500 << 20,
           "seconds": [2.0], "peer_seconds": [5.0], "trained_tokens": 3_800_000, "digest": "f"}
    return study("prepare", [], {"conversation": one, "text": {**one, "ratio": {"median": 3.5, "low": 3.4, "high": 3.6}}})


def start() -> dict[str, Any]:
    warm, cold = ({"planned": 2.0 * times, "in force": 5.0 * times, "first step done": 7.0 * times} for times in (1, 3))
    theirs = {"in force": 11.0, "first step done": 19.0}
    return study("start", [], {"medians": {"warm": warm, "cold": cold}, "runs": {"warm": [warm] * 3, "cold": [cold] * 2},
                               "peer_runs": [theirs], "to_first_step": {
                                   "warm": {"median": 7.0, "low": 6.5, "high": 7.5},
                                   "cold": {"median": 21.0, "low": 20.0, "high": 22.0},
                                   "peer": {"median": 19.0, "low": 19.0, "high": 19.0}}})


def writing() -> dict[str, Any]:
    def writer(speed: float, ratio: float) -> dict[str, Any]:
        return {"tokens_per_s": {"median": speed, "low": 0.9 * speed, "high": 1.1 * speed}, "same_tokens": 1.0,
                "first_s": {"median": 0.05, "low": 0.04, "high": 0.06},
                "ratio": {"median": ratio, "low": 0.9 * ratio, "high": 1.1 * ratio}}

    return study("writing", [], {
        "writers": {"ours": writer(120.0, 1.0), "transformers": writer(40.0, 3.0), "llama.cpp": writer(100.0, 1.2)},
        "answers": {"questions": 48, "tokens": 96, "answers_per_s": 4.0, "ratio": {"median": 12.0, "low": 11.0, "high": 13.0},
                    "same_answers": 47}})


def growth() -> dict[str, Any]:
    speed = {"median": 5000.0, "low": 4900.0, "high": 5100.0}
    return study("growth", [], {"axes": {
        "width of a model": [{"at": 128, "parameters": 800_000, "tokens_per_s": speed, "resident_bytes": 600 << 20,
                              "predicted_bytes": 100 << 20, "share_of_products": 0.5}, {"at": 9999, "refused": "too large"}],
        "rows of text": [{"at": 1000, "rows_per_s": 9000.0, "bytes_per_s": 4e6, "resident_bytes": 200 << 20, "start_s": 3.0}],
        "examples of an epoch": [{"at": 10**9, "first_s": 2e-4, "step_s": 2e-4, "allocated_bytes": 400_000}],
        "steps of a log": [{"at": 10**6, "bytes": 300 << 20, "first_s": 1.9, "again_s": 0.4}]}})


def audit() -> dict[str, Any]:
    some = {"expected": 10, "expected_found": 7, "of_code": 6, "of_code_found": 3, "findings": 20, "right": 20}
    halves = {half: {"files": 5, "critical": some, "moderate": {**some, "right": 18}} for half in ("development", "held-out")}
    return study("audit", [], {"halves": halves, "subjects": []})


KINDS = {"audit": audit, "growth": growth, "prepare": prepare, "start": start, "writing": writing, "peers": peers,
         "ablation": ablation, "tuning": tuning, "comparison": comparison, "claims": claims, "bench": bench, "speed": speed,
         "memory": memory, "diagnosis": diagnosis}
