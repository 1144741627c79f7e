"""torch.nn.DataParallel over two GPUs against one of them: rows a second of a small transformer. It needs two GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from powertrain.claims.probes.probe import REPEATS, Context, Measured, Rounds, by_turns, medians, ratio, seconds_of
from powertrain.claims.probes.process import apart
from powertrain.records import WrongUse

NAMES = ("one GPU", "DataParallel over two")
WIDTH, LAYERS, HEADS, ROWS, TOKENS = 1024, 8, 16, 32, 512


def measure(context: Context, *, steps: int = 10, repeats: int = REPEATS) -> Measured:
    """Two over one, the same batch: times as fast."""
    if torch.cuda.device_count() < 2:
        raise WrongUse(f"two GPUs are compared with one, and torch sees {torch.cuda.device_count()} here")
    rounds = apart(_rounds, context.deadline, steps, repeats)
    return Measured(ratio(rounds, 0, 1), "times as fast", *NAMES, {"step_s": medians(rounds, NAMES)})


def _rounds(deadline: float, steps: int, repeats: int) -> Rounds:
    device = torch.device("cuda:0")
    arms = [_trainer(device, gpus) for gpus in ([0], [0, 1])]
    for advance in arms:
        advance(3)
    return by_turns([lambda go=go: seconds_of(lambda: go(steps), device) / steps for go in arms], deadline,  # type: ignore[misc]
                    repeats)


def _trainer(device: torch.device, gpus: list[int]) -> Callable[[int], None]:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.DataParallel(nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(device), gpus)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = torch.randn(ROWS, TOKENS, WIDTH, device=device)

    def advance(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(rows).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return advance
