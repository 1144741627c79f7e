"""Probes of training loops: habits, loaders, batches that are dropped, columns that are kept, and utilisation."""

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from powertrain.claims.probes import probe
from powertrain.claims.probes.probe import Context, Measured, Training
from powertrain.data.example import Example
from powertrain.data.order import epoch_order
from powertrain.evidence.stats import by_turns, interval
from powertrain.facts.measure import seconds_of, wait_for
from powertrain.records import Batch, WrongUse
from powertrain.training.loop import StepResult, backward, update
from powertrain.training.memory import peak_memory_bytes
from powertrain.training.setup import Arrange, MicroBatches, Setup

# ------------------------------------------------------------------------------------------------ loop_habit
# The cost of a habit of training loops, by turns within one training.
#
# The training continues throughout, and its windows of steps differ only in the habit: the arms share model, data and memory.
# Each habit has a setting, which is its arm: after how many steps an action is repeated (0: never), or on and off (1 and 0).

Habit = Callable[[Training, int, float], None]           # (training, steps to take, the arm's setting)


def loop_habit(context: Context, *, habit: str, a: float, b: float, words: Sequence[str], steps: int = 10,
               metric: str = "speed") -> Measured:
    """Return the speed (or on a GPU the peak memory) of setting b over setting a; a window has `steps` steps."""
    probe.one_of("habit", habit, tuple(HABITS))
    probe.one_of("metric", metric, ("speed", "peak_memory"))
    training = probe.open_training(words, context.cache)
    device = training.setup.device
    if metric == "peak_memory" and device.type != "cuda":
        raise WrongUse(f"the peak of a window of steps is counted by CUDA's allocator, and this machine trains on {device}")

    def step_s(setting: float) -> float:
        return seconds_of(lambda: HABITS[habit](training, steps, setting), device.type) / steps

    def peak_bytes(setting: float) -> float:
        torch.cuda.reset_peak_memory_stats(device)
        HABITS[habit](training, steps, setting)
        wait_for(device.type)
        return float(torch.cuda.max_memory_allocated(device))

    one, other = _habit_name(habit, a), _habit_name(habit, b)
    window = step_s if metric == "speed" else peak_bytes
    arms = {one: partial(window, a), other: partial(window, b)}
    for arm in arms.values():                # the first windows allocate and compile
        arm()
    rounds = by_turns(arms, context.deadline)
    if metric == "peak_memory":
        peaks = probe.medians(rounds)
        return Measured(probe.ratio(rounds, other, one), "of the peak memory", one, other, {"peak_bytes": peaks})
    return probe.faster(rounds, "step_s", steps=steps)


def _every(action: Callable[[Training, StepResult], object]) -> Habit:
    """Return the habit of an action after every so many steps; 0 is never."""
    def form(training: Training, steps: int, every: float) -> None:
        for number, result in enumerate(training.steps(steps), 1):
            if every and number % every == 0:
                action(training, result)

    return form


def _collect(training: Training, _: StepResult) -> None:
    """Call gc.collect and torch's empty_cache, as trainers do that run short of memory."""
    gc.collect()
    if training.setup.device.type == "cuda":
        torch.cuda.empty_cache()


def _dropping_gradients(training: Training, steps: int, on: float) -> None:
    """Drop the gradients (set_to_none=True), or fill them with zeros."""
    optimizer: Any = training.state.optimizer
    clear = type(optimizer).zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        clear(optimizer, set_to_none=set_to_none and bool(on))

    optimizer.zero_grad = zero_grad
    training.advance(steps)


def _cudnn_benchmark(training: Training, steps: int, on: float) -> None:
    torch.backends.cudnn.benchmark = bool(on)
    training.advance(steps)


def _tf32_products(training: Training, steps: int, on: float) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"
    training.advance(steps)


def _offloading(training: Training, steps: int, on: float) -> None:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()) if on else contextlib.nullcontext():
        training.advance(steps)


HABITS: Mapping[str, Habit] = {
    "housekeeping": _every(_collect),
    "reading_losses": _every(lambda _, result: result.loss.item()),      # waits for the device
    "clipping": lambda training, steps, norm: training.advance(steps, norm),     # 0: never; the norm is computed either way
    "dropping_gradients": _dropping_gradients,
    "cudnn_benchmark": _cudnn_benchmark,     # searches for convolution algorithms; a transformer has no convolution
    "offloading": _offloading,               # keeps the activations in the host's memory until the backward pass
    "tf32_products": _tf32_products,         # of fp32 products, of which mixed precision leaves none
}


def _habit_name(habit: str, setting: float) -> str:
    what = habit.replace("_", " ")
    if habit in ("housekeeping", "reading_losses"):
        return f"{what} every {setting:g} steps" if setting else f"no {what}"
    return f"{what} at {setting:g}" if habit == "clipping" and setting else f"{what} {'on' if setting else 'off'}"


# ------------------------------------------------------------------------------------------------ data_loading
# Loading as other trainers do it, one item at a time through torch's DataLoader, with and without worker processes.
#
# Each arm has a loader of its own that lasts, and trains the same model in its turn. Before a window is timed its workers'
# batches that were fetched ahead during the other arms' turns are used up.

AHEAD = 2                                    # batches that a worker fetches ahead: torch's default
OURS = -1                                    # in place of a number of workers: Powertrain's own loader
ENDLESS = 1 << 30                            # steps, or examples


def data_loading(context: Context, *, words: Sequence[str], a: int, b: int, also: Sequence[int] = (), steps: int = 12,
                 metric: str = "step") -> Measured:
    """Return the speed of a loader with `b` worker processes over one with `a`; -1 = batches as Powertrain makes them.

    With metric "loading" nothing is trained. Detail: the seconds of all arms, the share of its time that each waits for
    data, and that share of both arms with its interval as `wait_a` and `wait_b`.
    """
    probe.one_of("metric", metric, ("step", "loading"))
    training = probe.open_training(words, context.cache)
    window = partial(_window, training, steps, metric == "step")
    arms = {_workers_name(workers): partial(window, workers, _loader(training.setup, workers))
            for workers in dict.fromkeys((a, b, *also))}
    found = by_turns(arms, context.deadline)
    rounds, waits = ({name: [pair[part] for pair in pairs] for name, pairs in found.items()} for part in (0, 1))
    return probe.faster(rounds, "step_s", waiting_share=probe.medians(waits), wait_a=interval(waits[_workers_name(a)]),
                        wait_b=interval(waits[_workers_name(b)]))


def _window(training: Training, steps: int, train: bool, workers: int, batches: Iterator[MicroBatches]) -> tuple[float, float]:
    """Return the seconds of a step of a window, and the share of the window's time that was spent waiting for data."""
    for _ in range(AHEAD * max(0, workers) + 1):
        next(batches)
    device, waited = training.setup.device, 0.0
    wait_for(device.type)
    began = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        found = next(batches)
        waited += time.perf_counter() - asked
        if train:
            micro_batches = [batch.to(device) for batch in found]
            tokens = sum(batch.trained_tokens for batch in micro_batches)
            backward(training.setup, training.state.scaler, micro_batches, tokens)
            update(training.state, training.prepared.recipe.max_grad_norm)
    wait_for(device.type)
    seconds = time.perf_counter() - began
    return seconds / steps, waited / seconds


def _loader(setup: Setup, workers: int) -> Iterator[MicroBatches]:
    """Return an endless iterator of a step's batches, made by `workers` processes."""
    if workers == OURS:
        return setup.loader(setup.prepare, range(ENDLESS), setup.device)
    items: Any = setup.examples              # read one at a time; a sequence is a map-style data set
    several: Mapping[str, Any] = {"persistent_workers": True, "prefetch_factor": AHEAD} if workers else {}
    return iter(DataLoader(items, setup.train_batch_size, sampler=RandomSampler(items, replacement=True, num_samples=ENDLESS),
                           num_workers=workers, collate_fn=partial(_stack, setup.arrange, setup.collate, setup.micro_batch),
                           **several))


def _stack(arrange: Arrange, collate: Callable[[Sequence[Example]], Batch], micro_batch: int,
           examples: Sequence[Example]) -> MicroBatches:
    """Arrange and collate a step's examples, in the worker process."""
    return [collate(part) for part in arrange(examples, micro_batch)]


def _workers_name(workers: int) -> str:
    return "batches as Powertrain makes them" if workers == OURS else f"{workers} workers"


# ------------------------------------------------------------------------------------------------ dropped_examples

def dropped_examples(context: Context, *, words: Sequence[str], steps: int = 10) -> Measured:
    """Return the spread of the gradient's norm over an epoch without its short last batch, over the spread with that batch.

    This is what drop_last changes. An epoch has `steps` whole batches and one of half as many examples, drawn anew. Detail:
    `dropped` and `dropped_share`, the examples of the recipe's own data that drop_last leaves out of an epoch. (Powertrain's
    epochs run end to end: no batch is short, and no example is left out.)
    """
    training = probe.open_training(words, context.cache, warm_up=20)
    examples, batch = len(training.setup.examples), training.setup.train_batch_size
    numbers, dropped = itertools.count(), examples % batch
    norms = by_turns({"epoch": lambda: _norms(training, next(numbers), steps)}, context.deadline)["epoch"]
    return Measured(interval([spread(of_epoch[:-1]) / spread(of_epoch) for of_epoch in norms]), "times the spread",
                    "short batch kept", "drop_last", {"dropped": dropped, "dropped_share": dropped / examples,
                                                      "spread_kept": statistics.median(map(spread, norms))})


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

TINY_LLAMA: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
                              "vocab_size": 2048}
UNCOUNTED = 3                                  # steps of each repeat that are not counted
ROW_TOKENS = 128


def unused_columns(context: Context, *, steps: int = 12) -> Measured:
    """Return the speed of transformers' own Trainer with remove_unused_columns=False over its speed with True.

    The data has only the columns that the model reads, as after tokenising; a small Llama learns from it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    model = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA))
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randint(TINY_LLAMA["vocab_size"], (ROW_TOKENS,), generator=drawn) for _ in range(8 * (steps + UNCOUNTED))]
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    def step_s(flag: bool) -> float:
        clock, arguments = Clock(), TrainingArguments(
            output_dir=str(context.folder), max_steps=steps + UNCOUNTED, per_device_train_batch_size=8, report_to=[],
            disable_tqdm=True, save_strategy="no", logging_strategy="no", remove_unused_columns=flag,
            dataloader_pin_memory=False)
        Trainer(model, arguments, train_dataset=data, callbacks=[clock]).train()
        return (clock.ends[-1] - clock.ends[UNCOUNTED - 1]) / steps

    arms = {f"remove_unused_columns={flag}": partial(step_s, flag) for flag in (True, False)}
    return probe.faster(by_turns(arms, context.deadline), "step_s", steps=steps)


# ------------------------------------------------------------------------------------------------ utilisation

def utilisation(context: Context, *, words: Sequence[str], steps: int = 10) -> Measured:
    """Return the efficiency of a training: the model's FLOPs per second over the measured GEMM peak.

    Detail: `busy`, the share of the time in which the cores worked, or on a GPU in which any kernel ran (nvidia-smi calls that
    utilisation). A device can be busy all the time and use little of its arithmetic.
    """
    training = probe.open_training(words, context.cache)
    device, estimate = training.setup.device, training.prepared.plan.estimate
    if estimate is None:
        raise WrongUse("the peak speed of this machine is not measured, so its utilisation is unknown; `powertrain facts "
                       "--measure` measures the peak")

    def window() -> tuple[float, float]:
        before = time.process_time()
        seconds = seconds_of(lambda: training.advance(steps), device.type)
        cores_s = time.process_time() - before
        return seconds / steps, (torch.cuda.utilization(device) / 100 if device.type == "cuda"      # over about the last second
                                 else cores_s / (seconds * torch.get_num_threads()))

    step_s, busy = zip(*by_turns({"step": window}, context.deadline)["step"], strict=True)
    efficiency = interval([estimate.flops_per_step / seconds / estimate.peak_flops_per_s for seconds in step_s])
    median_s = statistics.median(step_s)
    return Measured(efficiency, "of the peak", "busy", "efficient",
                    {"busy": vars(interval(busy)), "efficiency": vars(efficiency), "steps_per_s": 1 / median_s,
                     "examples_per_s": training.setup.train_batch_size / median_s, "flops_per_step": estimate.flops_per_step,
                     "peak_flops_per_s": estimate.peak_flops_per_s, "peak_gb": peak_memory_bytes(device) / 1e9})


# ------------------------------------------------------------------------------------------------ unlike_runs

def unlike_runs(context: Context, *, words: Sequence[str], a: Sequence[str], b: Sequence[str], per: str = "tokens",
                steps: int = 8) -> Measured:
    """Return the speed of arm b over arm a in real `tokens` or in `examples` a second, where the arms' steps differ.

    Arms that are the same training are compared step by step (evidence/clock.py); here each arm takes steps of its own, such as
    of another batch or length. Detail: the share of arm a's text that arm b does not read, because its examples are shorter.
    """
    probe.one_of("per", per, ("tokens", "examples"))
    names = probe.arm_name(a), probe.arm_name(b)
    trainings = [probe.open_training([*words, *arm], context.cache) for arm in (a, b)]

    def rate(training: Training) -> float:
        examples = training.setup.train_batch_size
        done: list[StepResult] = []
        seconds = seconds_of(lambda: done.extend(training.steps(steps)), training.setup.device.type)
        return sum(result.real_tokens if per == "tokens" else examples for result in done) / seconds

    arms = {name: partial(rate, training) for name, training in zip(names, trainings, strict=True)}
    rounds = by_turns(arms, context.deadline)
    one, other = (training.prepared.facts.data for training in trainings)
    return Measured(probe.ratio(rounds, names[1], names[0]), "times as fast", *names, {
        f"{per}_per_s": probe.medians(rounds), "cut_share": other.cut_examples / other.examples if other.examples else 0.0,
        "tokens_lost_share": 1 - other.train_tokens / one.train_tokens,
        "examples_per_step": {name: training.setup.train_batch_size for name, training in zip("ab", trainings, strict=True)}})
