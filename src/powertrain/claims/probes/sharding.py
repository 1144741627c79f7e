"""Optimizer states sharded over processes, as DeepSpeed's ZeRO does, against plain data-parallel training: on one device.

With one process there is nobody to give a shard to. torch's ZeroRedundancyOptimizer shards the states (ZeRO stage 1); stage 2
shards gradients too, and of one process keeps all of them just the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from powertrain.claims.probes.probe import (
    REPEATS,
    Context,
    Measured,
    Rounds,
    by_turns,
    fastest_device,
    medians,
    ratio,
    seconds_of,
)
from powertrain.claims.probes.process import apart

WIDTH, LAYERS, ROWS = 512, 6, 256
NAMES = ("data-parallel", "data-parallel with sharded states")


def measure(context: Context, *, steps: int = 10, repeats: int = REPEATS) -> Measured:
    """Sharded over plain, on one device: times as fast. Detail: `held_ratio`, the same of weights, gradients and states."""
    rounds, held_bytes = apart(_rounds, context.folder, context.deadline, steps, repeats)
    detail = {"step_s": medians(rounds, NAMES), "held_bytes": dict(zip(NAMES, held_bytes, strict=True)),
              "held_ratio": held_bytes[1] / held_bytes[0]}
    return Measured(ratio(rounds, 0, 1), "times as fast", *NAMES, detail)


def _rounds(folder: Path, deadline: float, steps: int, repeats: int) -> tuple[Rounds, list[int]]:
    device = fastest_device()
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder / 'group'}",
                                   rank=0, world_size=1)
    try:
        arms = [_trainer(device, sharded) for sharded in (False, True)]
        for advance, _ in arms:
            advance(2)
        rounds = by_turns([lambda go=go: seconds_of(lambda: go(steps), device) / steps for go, _ in arms],  # type: ignore[misc]
                          deadline, repeats)
        return rounds, [held() for _, held in arms]
    finally:
        distributed.destroy_process_group()


def _trainer(device: torch.device, sharded: bool) -> tuple[Callable[[int], None], Callable[[], int]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own deprecated parts when it is loaded

    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))).to(device)
    model = DistributedDataParallel(plain)
    optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3) if sharded \
        else torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randn(ROWS, WIDTH, device=device)

    def advance(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=False)
            model(rows).square().mean().backward()
            optimizer.step()

    def held() -> int:
        inner: Any = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        states = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        kept = [*plain.parameters(), *(value.grad for value in plain.parameters() if value.grad is not None), *states]
        return sum(value.numel() * value.element_size() for value in kept)

    return advance, held
