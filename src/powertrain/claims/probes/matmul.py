"""One square matrix product in two number formats: what the hardware's units give, without any model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from powertrain.claims.probes.probe import (
    REPEATS,
    Context,
    Measured,
    Rounds,
    by_turns,
    enough_times,
    fastest_device,
    medians,
    one_of,
    ratio,
    seconds_of,
)
from powertrain.claims.probes.process import apart
from powertrain.records import WrongUse

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure(context: Context, *, a: str = "fp32", b: str = "tf32", edge: int = 4096, repeats: int = REPEATS) -> Measured:
    """Arm b over arm a, of fp32, tf32 (CUDA), bf16 and fp16. Detail: TFLOP/s of both."""
    for name, dtype in (("a", a), ("b", b)):
        one_of(name, dtype, tuple(DTYPES))
    rounds = apart(_rounds, context.deadline, (a, b), edge, repeats)
    speeds = {name: 2e-12 * edge**3 / seconds for name, seconds in medians(rounds, (a, b)).items()}
    return Measured(ratio(rounds, 0, 1), "times as fast", a, b, {"tflops_per_s": speeds, "edge": edge})


def _rounds(deadline: float, dtypes: tuple[str, str], edge: int, repeats: int) -> Rounds:
    device = fastest_device()
    if "tf32" in dtypes and device.type != "cuda":
        raise WrongUse(f"tf32 products are made by NVIDIA's tensor cores, and this machine trains on {device.type}")
    arms = [_product(dtype, edge, device) for dtype in dtypes]
    times = [enough_times(work, device) for work in arms]
    return by_turns([lambda w=work, n=count: seconds_of(w, device, n)     # type: ignore[misc]
                     for work, count in zip(arms, times, strict=True)], deadline, repeats)


def _product(dtype: str, edge: int, device: torch.device) -> Callable[[], object]:
    x, w = (torch.randn(edge, edge, device=device).to(DTYPES[dtype]) for _ in range(2))

    def work() -> torch.Tensor:
        if device.type == "cuda":
            torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
        return x @ w

    return work
