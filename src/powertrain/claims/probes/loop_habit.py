"""Habits of training loops: what each costs, by turns within one training.

One training goes on, and its windows of steps differ in the habit alone: the arms share model, data and memory. Each
habit has a setting that is its arm: how often something is done (0: never), or whether (0 or 1).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from powertrain.claims.probes.probe import (
    REPEATS,
    Context,
    Measured,
    Rounds,
    by_turns,
    medians,
    one_of,
    ratio,
    seconds_of,
    wait,
)
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import Training, open_training
from powertrain.records import WrongUse

Habit = Callable[[Training, int, float], None]           # (training, steps to take, the arm's setting)
METRICS = ("speed", "peak_memory")


def measure(context: Context, *, habit: str, a: float, b: float, words: Sequence[str], steps: int = 10,
            repeats: int = REPEATS, metric: str = "speed") -> Measured:
    """Arm b over arm a: times as fast, or of the peak memory (on a GPU). `steps` are those of a window."""
    one_of("habit", habit, tuple(HABITS))
    one_of("metric", metric, METRICS)
    rounds = apart(_rounds, words, context.cache, context.deadline, habit, (a, b), steps, repeats, metric)
    names = (_named(habit, a), _named(habit, b))
    if metric == "peak_memory":
        return Measured(ratio(rounds, 1, 0), "of the peak memory", *names, {"peak_bytes": medians(rounds, names)})
    return Measured(ratio(rounds, 0, 1), "times as fast", *names, {"step_s": medians(rounds, names), "steps": steps})


def _rounds(words: Sequence[str], cache: Path, deadline: float, habit: str, arms: tuple[float, float], steps: int,
            repeats: int, metric: str) -> Rounds:
    training, form = open_training(words, cache), HABITS[habit]
    device = training.setup.device
    if metric == "peak_memory" and device.type != "cuda":
        raise WrongUse(f"the peak of a window of steps is counted by CUDA's allocator, and this machine trains on {device}")

    def window(setting: float) -> float:
        def take() -> None:
            form(training, steps, setting)

        if metric == "speed":
            return seconds_of(take, device) / steps
        torch.cuda.reset_peak_memory_stats(device)
        take()
        wait(device)
        return float(torch.cuda.max_memory_allocated(device))

    for setting in arms:                     # each once, for what it allocates or compiles
        window(setting)
    return by_turns([lambda s=setting: window(s) for setting in arms], deadline, repeats)  # type: ignore[misc]


def _housekeeping(training: Training, steps: int, every: float) -> None:
    """gc.collect and torch's empty_cache, as trainers that run short of memory call them."""
    for number, _ in enumerate(training.steps(steps), 1):
        if every and number % every == 0:
            gc.collect()
            if training.setup.device.type == "cuda":
                torch.cuda.empty_cache()


def _reading_losses(training: Training, steps: int, every: float) -> None:
    """Each reading waits for the device."""
    for number, result in enumerate(training.steps(steps), 1):
        if every and number % every == 0:
            result.loss.item()


def _clipping(training: Training, steps: int, max_grad_norm: float) -> None:
    """0 = none. The norm is computed either way, as it is shown."""
    for _ in training.steps(steps, max_grad_norm):
        pass


def _dropping_gradients(training: Training, steps: int, on: float) -> None:
    """zero_grad(set_to_none=True) against filling the gradients with zeros."""
    optimizer: Any = training.state.optimizer
    clear = type(optimizer).zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        clear(optimizer, set_to_none=set_to_none and bool(on))

    optimizer.zero_grad = zero_grad
    training.advance(steps)


def _cudnn_benchmark(training: Training, steps: int, on: float) -> None:
    """Tries convolution algorithms, of which a transformer has none."""
    torch.backends.cudnn.benchmark = bool(on)
    training.advance(steps)


def _tf32_products(training: Training, steps: int, on: float) -> None:
    """Allows TF32 in fp32 products, of which mixed precision leaves none."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"
    training.advance(steps)


def _offloading(training: Training, steps: int, on: float) -> None:
    """Activations wait for the backward pass in the host's memory."""
    saved: contextlib.AbstractContextManager[Any] = torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()) \
        if on else contextlib.nullcontext()
    with saved:
        training.advance(steps)


HABITS: Mapping[str, Habit] = {
    "housekeeping": _housekeeping, "reading_losses": _reading_losses, "clipping": _clipping,
    "dropping_gradients": _dropping_gradients, "cudnn_benchmark": _cudnn_benchmark, "offloading": _offloading,
    "tf32_products": _tf32_products}
INTERVALS = ("housekeeping", "reading_losses")


def _named(habit: str, setting: float) -> str:
    what = habit.replace("_", " ")
    if habit in INTERVALS:
        return f"{what} every {setting:g} steps" if setting else f"no {what}"
    return f"{what} at {setting:g}" if habit == "clipping" and setting else f"{what} {'on' if setting else 'off'}"
