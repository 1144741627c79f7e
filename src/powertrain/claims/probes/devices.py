"""Probes of several devices: DataParallel, and optimizer states sharded over processes."""

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
    apart,
    by_turns,
    fastest_device,
    medians,
    ratio,
    seconds_of,
)
from powertrain.records import WrongUse

# ------------------------------------------------------------------------------------------------ data_parallel
# torch.nn.DataParallel over two GPUs against one of them: rows a second of a small transformer. It needs two GPUs.

GPU_NAMES = ("one GPU", "DataParallel over two")
GPU_WIDTH, GPU_LAYERS, GPU_HEADS, GPU_ROWS, GPU_TOKENS = 1024, 8, 16, 32, 512


def data_parallel(context: Context, *, steps: int = 10, repeats: int = REPEATS) -> Measured:
    """Return how many times as fast two GPUs train the same batch as one."""
    if torch.cuda.device_count() < 2:
        raise WrongUse(f"two GPUs are compared with one, and torch sees {torch.cuda.device_count()} here")
    rounds = apart(_gpu_rounds, context.deadline, steps, repeats)
    return Measured(ratio(rounds, 0, 1), "times as fast", *GPU_NAMES, {"step_s": medians(rounds, GPU_NAMES)})


def _gpu_rounds(deadline: float, steps: int, repeats: int) -> Rounds:
    device = torch.device("cuda:0")
    arms = [_gpu_trainer(device, gpus) for gpus in ([0], [0, 1])]
    for advance in arms:
        advance(3)
    windows = [lambda go=go: seconds_of(lambda: go(steps), device) / steps for go in arms]
    return by_turns(windows, deadline, repeats)


def _gpu_trainer(device: torch.device, gpus: list[int]) -> Callable[[int], None]:
    layer = nn.TransformerEncoderLayer(GPU_WIDTH, GPU_HEADS, 4 * GPU_WIDTH, dropout=0.0, batch_first=True)
    model = nn.DataParallel(nn.TransformerEncoder(layer, GPU_LAYERS, enable_nested_tensor=False).to(device), gpus)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = torch.randn(GPU_ROWS, GPU_TOKENS, GPU_WIDTH, device=device)

    def advance(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(rows).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return advance


# ------------------------------------------------------------------------------------------------ sharding
# Optimizer states sharded over processes, as DeepSpeed's ZeRO does, against plain data-parallel training: on one device.
#
# With one process there is nobody to give a shard to. torch's ZeroRedundancyOptimizer shards the states (ZeRO stage 1); stage 2
# shards gradients too, and of one process keeps all of them just the same.

SHARD_WIDTH, SHARD_LAYERS, SHARD_ROWS = 512, 6, 256
SHARD_NAMES = ("data-parallel", "data-parallel with sharded states")


def sharding(context: Context, *, steps: int = 10, repeats: int = REPEATS) -> Measured:
    """Return the speed of sharded over plain training on one device. Detail: `held_ratio`, the same of the bytes held."""
    rounds, held_bytes = apart(_shard_rounds, context.folder, context.deadline, steps, repeats)
    detail = {"step_s": medians(rounds, SHARD_NAMES), "held_bytes": dict(zip(SHARD_NAMES, held_bytes, strict=True)),
              "held_ratio": held_bytes[1] / held_bytes[0]}
    return Measured(ratio(rounds, 0, 1), "times as fast", *SHARD_NAMES, detail)


def _shard_rounds(folder: Path, deadline: float, steps: int, repeats: int) -> tuple[Rounds, list[int]]:
    device = fastest_device()
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder / 'group'}",
                                   rank=0, world_size=1)
    try:
        arms = [_shard_trainer(device, sharded) for sharded in (False, True)]
        for advance, _ in arms:
            advance(2)
        rounds = by_turns([lambda go=go: seconds_of(lambda: go(steps), device) / steps for go, _ in arms],  # type: ignore[misc]
                          deadline, repeats)
        return rounds, [held() for _, held in arms]
    finally:
        distributed.destroy_process_group()


def _shard_trainer(device: torch.device, sharded: bool) -> tuple[Callable[[int], None], Callable[[], int]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own deprecated parts when it is loaded

    torch.manual_seed(0)
    layers = [layer for _ in range(SHARD_LAYERS) for layer in (nn.Linear(SHARD_WIDTH, SHARD_WIDTH), nn.GELU())]
    plain = nn.Sequential(*layers).to(device)
    model = DistributedDataParallel(plain)
    optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3) if sharded \
        else torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randn(SHARD_ROWS, SHARD_WIDTH, device=device)

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
