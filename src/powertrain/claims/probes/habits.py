"""Probes of training loops: habits, dropped batches, unused columns, utilisation."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from powertrain.claims.probes.probe import (
    REPEATS,
    Context,
    Measured,
    Rounds,
    Training,
    apart,
    by_turns,
    medians,
    one_of,
    open_training,
    ratio,
    seconds_of,
)
from powertrain.data.order import epoch_order
from powertrain.evidence.stats import interval
from powertrain.evidence.worker import wait_for
from powertrain.records import WrongUse
from powertrain.training.ledger import peak_memory_bytes
from powertrain.training.loop import backward

# ------------------------------------------------------------------------------------------------ loop_habit
# Habits of training loops: what each costs, by turns within one training.
#
# One training goes on, and its windows of steps differ in the habit alone: the arms share model, data and memory. Each
# habit has a setting that is its arm: how often something is done (0: never), or whether (0 or 1).

Habit = Callable[[Training, int, float], None]           # (training, steps to take, the arm's setting)
HABIT_METRICS = ("speed", "peak_memory")


def loop_habit(context: Context, *, habit: str, a: float, b: float, words: Sequence[str], steps: int = 10,
               repeats: int = REPEATS, metric: str = "speed") -> Measured:
    """Return the speed (or on a GPU the peak memory) of setting b over setting a; a window has `steps` steps."""
    one_of("habit", habit, tuple(HABITS))
    one_of("metric", metric, HABIT_METRICS)
    rounds = apart(_habit_rounds, words, context.cache, context.deadline, habit, (a, b), steps, repeats, metric)
    names = (_habit_name(habit, a), _habit_name(habit, b))
    if metric == "peak_memory":
        return Measured(ratio(rounds, 1, 0), "of the peak memory", *names, {"peak_bytes": medians(rounds, names)})
    return Measured(ratio(rounds, 0, 1), "times as fast", *names, {"step_s": medians(rounds, names), "steps": steps})


def _habit_rounds(words: Sequence[str], cache: Path, deadline: float, habit: str, arms: tuple[float, float], steps: int,
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
        wait_for(device)
        return float(torch.cuda.max_memory_allocated(device))

    for setting in arms:                     # each once, for what it allocates or compiles
        window(setting)
    return by_turns([lambda s=setting: window(s) for setting in arms], deadline, repeats)  # type: ignore[misc]


def _housekeeping(training: Training, steps: int, every: float) -> None:
    """Call gc.collect and torch's empty_cache, as trainers do that run short of memory."""
    for number, _ in enumerate(training.steps(steps), 1):
        if every and number % every == 0:
            gc.collect()
            if training.setup.device.type == "cuda":
                torch.cuda.empty_cache()


def _reading_losses(training: Training, steps: int, every: float) -> None:
    """Read the loss, which waits for the device."""
    for number, result in enumerate(training.steps(steps), 1):
        if every and number % every == 0:
            result.loss.item()


def _clipping(training: Training, steps: int, max_grad_norm: float) -> None:
    """Clip gradients; 0 does not. The norm is computed either way, because it is shown."""
    for _ in training.steps(steps, max_grad_norm):
        pass


def _dropping_gradients(training: Training, steps: int, on: float) -> None:
    """Drop the gradients (set_to_none=True), or fill them with zeros."""
    optimizer: Any = training.state.optimizer
    clear = type(optimizer).zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        clear(optimizer, set_to_none=set_to_none and bool(on))

    optimizer.zero_grad = zero_grad
    training.advance(steps)


def _cudnn_benchmark(training: Training, steps: int, on: float) -> None:
    """Let cuDNN search for convolution algorithms; a transformer has no convolution."""
    torch.backends.cudnn.benchmark = bool(on)
    training.advance(steps)


def _tf32_products(training: Training, steps: int, on: float) -> None:
    """Allow TF32 in fp32 products; mixed precision leaves no fp32 products."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"
    training.advance(steps)


def _offloading(training: Training, steps: int, on: float) -> None:
    """Keep the activations in the host's memory until the backward pass."""
    saved: contextlib.AbstractContextManager[Any] = torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()) \
        if on else contextlib.nullcontext()
    with saved:
        training.advance(steps)


HABITS: Mapping[str, Habit] = {
    "housekeeping": _housekeeping, "reading_losses": _reading_losses, "clipping": _clipping,
    "dropping_gradients": _dropping_gradients, "cudnn_benchmark": _cudnn_benchmark, "offloading": _offloading,
    "tf32_products": _tf32_products}
INTERVALS = ("housekeeping", "reading_losses")


def _habit_name(habit: str, setting: float) -> str:
    what = habit.replace("_", " ")
    if habit in INTERVALS:
        return f"{what} every {setting:g} steps" if setting else f"no {what}"
    return f"{what} at {setting:g}" if habit == "clipping" and setting else f"{what} {'on' if setting else 'off'}"


# ------------------------------------------------------------------------------------------------ dropped_examples
# drop_last: whether an epoch's last, shorter batch makes training less steady, and what leaving it out costs.

def dropped_examples(context: Context, *, words: Sequence[str], steps: int = 10, repeats: int = REPEATS) -> Measured:
    """Return the spread of the gradient's norm over an epoch without its short last batch, over the spread with that batch.

    Epochs of `steps` whole batches and one of half as many examples, each drawn anew. Detail: `dropped_share`, what drop_last
    leaves out of an epoch of the recipe's own data, and `dropped` examples of it. (Powertrain's epochs run end to end: no
    batch is short, and nothing is left out.)
    """
    spreads, dropped, examples = apart(_spreads, words, context.cache, context.deadline, steps, repeats)
    return Measured(interval([without / kept for kept, without in spreads]), "times the spread", "short batch kept",
                    "drop_last", {"dropped": dropped, "dropped_share": dropped / examples,
                                  "spread_kept": statistics.median(kept for kept, _ in spreads)})


def _spreads(words: Sequence[str], cache: Path, deadline: float, steps: int,
             repeats: int) -> tuple[list[tuple[float, float]], int, int]:
    training = open_training(words, cache, warm_up=20)
    examples, batch = len(training.setup.examples), training.setup.train_batch_size
    found: list[tuple[float, float]] = []

    def epoch() -> float:
        norms = _norms(training, len(found), steps)
        found.append((spread(norms), spread(norms[:-1])))
        return 0.0

    by_turns([epoch], deadline, repeats)
    return found, examples % batch, examples


def _norms(training: Training, epoch: int, steps: int) -> list[float]:
    """Return the gradient's norm of each batch of an epoch, the last batch half as large; no weight changes."""
    setup = training.setup
    order = epoch_order(setup.seed, epoch, len(setup.examples))
    batch, norms = setup.train_batch_size, []
    for step in range(steps + 1):
        chosen = [int(i) for i in order[step * batch:(step + 1) * batch]][:batch if step < steps else max(1, batch // 2)]
        passes = [part.to(setup.device) for part in setup.passes([setup.examples[i] for i in chosen or [0]])]
        backward(setup, training.state.scaler, passes, sum(part.trained_tokens for part in passes))
        gradients = [weight.grad for weight in setup.model.parameters() if weight.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        training.state.optimizer.zero_grad(set_to_none=True)
    return norms


def spread(norms: Sequence[float]) -> float:
    """Return the standard deviation over the mean."""
    return statistics.pstdev(norms) / statistics.fmean(norms)


# ------------------------------------------------------------------------------------------------ unused_columns
# transformers' own Trainer with and without `remove_unused_columns`: seconds of a step.
#
# The data has the columns that the model reads and no others, as after tokenising; a small Llama learns from it.

TINY_LLAMA: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
                         "vocab_size": 2048}
UNCOUNTED = 3                                  # steps of each repeat that are not counted
ROW_TOKENS = 128


def unused_columns(context: Context, *, steps: int = 12, repeats: int = REPEATS) -> Measured:
    """Return the speed with remove_unused_columns=False over the speed with True."""
    rounds = apart(_column_rounds, context.folder, context.deadline, steps, repeats)
    names = ("remove_unused_columns=True", "remove_unused_columns=False")
    return Measured(ratio(rounds, 0, 1), "times as fast", *names, {"step_s": medians(rounds, names), "steps": steps})


def _column_rounds(folder: Path, deadline: float, steps: int, repeats: int) -> Rounds:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA))
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randint(TINY_LLAMA["vocab_size"], (ROW_TOKENS,), generator=drawn) for _ in range(8 * (steps + UNCOUNTED))]
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]
    return by_turns([lambda flag=flag: _trainer_step_s(model, data, folder, steps, flag)  # type: ignore[misc]
                     for flag in (True, False)], deadline, repeats)


def _trainer_step_s(model: Any, data: list[dict[str, Any]], folder: Path, steps: int, flag: bool) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps + UNCOUNTED, per_device_train_batch_size=8, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_strategy="no", remove_unused_columns=flag, dataloader_pin_memory=False)
    Trainer(model, arguments, train_dataset=data, callbacks=[Clock()]).train()
    return (ends[-1] - ends[UNCOUNTED - 1]) / steps


# ------------------------------------------------------------------------------------------------ utilisation
# Busy is not the same as efficient: how busy the device looks while training, and what share of its arithmetic is used.

USE_METRICS = ("efficiency", "busy")


def utilisation(context: Context, *, words: Sequence[str], steps: int = 10, repeats: int = REPEATS,
                metric: str = "efficiency") -> Measured:
    """Return the "efficiency" or the "busy" share of a training; the detail has both.

    Efficiency is the model's FLOPs per second over the measured GEMM peak. Busy is the share of the time in which the cores
    worked, or on a GPU in which any kernel ran (nvidia-smi calls that utilisation).
    """
    one_of("metric", metric, USE_METRICS)
    flops, peak, examples, memory, rounds = apart(_busy_rounds, words, context.cache, context.deadline, steps, repeats)
    busy = interval([values[1] for values in rounds])
    efficiency = interval([flops / values[0] / peak for values in rounds])
    step_s = statistics.median(values[0] for values in rounds)
    detail = {"busy": vars(busy), "efficiency": vars(efficiency), "steps_per_s": 1 / step_s,
              "examples_per_s": examples / step_s, "flops_per_step": flops, "peak_flops_per_s": peak,
              "peak_gb": memory / 1e9}
    return Measured(efficiency if metric == "efficiency" else busy, "of the time" if metric == "busy" else "of the peak",
                    "busy", "efficient", detail)


def _busy_rounds(words: Sequence[str], cache: Path, deadline: float, steps: int,
                 repeats: int) -> tuple[float, float, int, int, Rounds]:
    """Return FLOPs of a step, peak FLOP/s, examples of a step, peak memory, and seconds of a step with the busy share."""
    training = open_training(words, cache)
    estimate = training.prepared.plan.estimate
    if estimate is None:
        raise WrongUse("this machine's peak is not measured, so nobody can say what share of it is used; `powertrain facts "
                       "--utilisation` measures it")
    shares: list[float] = []

    def window() -> float:
        seconds, busy = _busy_window(training, steps)
        shares.append(busy)
        return seconds

    rounds = by_turns([window], deadline, repeats)
    both: Rounds = [(seconds, busy) for (seconds,), busy in zip(rounds, shares, strict=True)]
    memory = peak_memory_bytes(training.setup.device)
    return estimate.flops_per_step, estimate.peak_flops_per_s, training.examples_per_step, memory, both


def _busy_window(training: Training, steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and the share of the time in which the device looked busy."""
    device, before = training.setup.device, time.process_time()
    seconds = seconds_of(lambda: training.advance(steps), device)
    if device.type == "cuda":
        return seconds / steps, torch.cuda.utilization(device) / 100     # over about the last second
    return seconds / steps, (time.process_time() - before) / (seconds * torch.get_num_threads())
