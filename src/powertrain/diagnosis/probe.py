"""The probe: the real setup with its plan applied and confirmed, watched for about twenty optimizer steps.

Then the work between steps is done once each and timed: an evaluation with its sample, a checkpoint on the run's disk, the log.
A step in which torch compiles again is not comparable with the others, so the compiler is watched too. Nothing is kept.
"""

import gc
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from powertrain import planner
from powertrain.data.example import Example
from powertrain.diagnosis.checks.machine import run_disk
from powertrain.diagnosis.observed import Between, Observed, step_work
from powertrain.facts.machine_watch import MachineWatch, Meanwhile
from powertrain.facts.measure import seconds_of, wait_for
from powertrain.recipe import in_steps
from powertrain.records import Batch, RunFailed
from powertrain.records.event_log import EventLog
from powertrain.records.events import Step
from powertrain.run.fits import checkpoint_bytes, needed_bytes, room_bytes
from powertrain.run.prepare import Prepared, build_setup, schedule_of
from powertrain.training.checkpoint import save_checkpoint
from powertrain.training.loop import State, StepResult, evaluate, new_state, spread, train
from powertrain.training.setup import Setup, no_lap
from powertrain.use.generation import write_sample

STEPS = 20                   # that are watched, if there is time
LEAST_STEPS = 3              # that are watched in any case
UNWATCHED = 2                # first steps, which allocate, and compile what the plan did not
TIMED_PASSES = 3             # of each of two sizes; the fastest counts, because the first may prepare products
WAIT_EVERY = 5               # steps between waits for a device that works behind the host
MOST_EVALUATION_S = 4.0      # a longer evaluation is done in part and extrapolated
SAMPLE_TOKENS = 16           # generated to time one token
COMPILE_IN = ("forward", "backward")         # the parts of a step in which torch may compile


@dataclass(frozen=True)
class Probed:
    """The figures of a probe, with the time before and after its steps."""

    observed: Observed                       # without remedies
    start_s: float                           # from the plan until the first step: weights, applying, compiling
    first_steps_s: float                     # by which the first steps took longer than the later ones
    last_s: float                            # after the last step: evaluation on all held-out text, checkpoint
    losses: tuple[float, ...]
    watts: float | None = None               # of the processors; None where it cannot be read


@dataclass(frozen=True)
class Compilation:
    part: str                                # of the step: "forward", or "backward" where compiling was delayed
    seconds: float


@dataclass(frozen=True)
class Watched:
    """The watched steps of the probe, in order, without the first ones."""

    results: tuple[StepResult, ...]
    parts: tuple[Mapping[str, float], ...]   # seconds of each, without compiling
    compilations: list[tuple[Compilation, ...]]
    first_s: float                           # of those before
    compiled_first: tuple[Compilation, ...]  # in those before
    pass_s: float | None                     # the fixed time of a pass
    meanwhile: Meanwhile

    @property
    def step_s(self) -> tuple[float, ...]:
        return tuple(sum(parts.values()) for parts in self.parts)


def probe(prepared: Prepared, seconds: float) -> Probed:
    """Watch the run's first steps for about `seconds`, without building and the very first steps.

    Raises RunFailed where a step's loss is not finite, and all errors with which a run fails to start.
    """
    began = time.perf_counter()
    with CompileWatch() as compiling:
        setup = build_setup(prepared)
        at_setup = compiling.take()
        state = new_state(setup, prepared.recipe.weight_decay)
        gc.collect()
        gc.freeze()                          # as a run does
        start_s = time.perf_counter() - began
        watched = _watch(prepared, setup, state, compiling, seconds)
    losses = _losses(watched.results)        # before an evaluation or a checkpoint of weights that are none any more
    usual_s, meanwhile = statistics.median(watched.step_s), watched.meanwhile
    pauses, last_s = _pauses(prepared, setup, state, usual_s)
    observed = _observed(prepared, setup, watched, pauses, at_setup)
    watts = None if meanwhile.energy_j is None else meanwhile.energy_j / meanwhile.wall_s
    return Probed(observed, start_s, max(0.0, watched.first_s - UNWATCHED * usual_s), last_s, losses, watts)


def _watch(prepared: Prepared, setup: Setup, state: State, compiling: "CompileWatch", seconds: float) -> Watched:
    # as many steps as the run has are all there is to see; of a shorter one all but the first count
    total, began = prepared.total_steps, time.perf_counter()
    unwatched = min(UNWATCHED, total - 1)
    steps = train(setup, state, schedule_of(prepared.recipe, total), prepared.recipe.max_grad_norm)
    for _ in range(unwatched):
        next(steps)
    wait_for(setup.device.type)
    first_s, compiled_first = time.perf_counter() - began, compiling.take()
    results, compilations = list[StepResult](), list[tuple[Compilation, ...]]()
    with MachineWatch() as machine:
        for result in steps:
            results.append(result)
            compilations.append(compiling.take())
            if len(results) % WAIT_EVERY == 0:
                wait_for(setup.device.type)
            late = time.perf_counter() - began - first_s > seconds and len(results) >= LEAST_STEPS
            if len(results) == STEPS or late:
                break
        wait_for(setup.device.type)
    steps.close()  # type: ignore[attr-defined]
    parts, compilations = told_apart([result.laps.parts() for result in results], compilations)
    return Watched(tuple(results), parts, compilations, first_s, compiled_first, pass_seconds(setup), machine.seen)


def pass_seconds(setup: Setup) -> float | None:
    """Return the fixed seconds of a pass, from passes of two sizes; None for one example.

    The time is assumed to be linear in the slots: the line through both passes meets zero slots at the fixed time.
    """
    batch = [setup.examples[i] for i in range(min(setup.train_batch_size, len(setup.examples)))]
    found = sorted((setup.batch_of(batch[:count]) for count in {max(1, setup.micro_batch), 2 * setup.micro_batch}
                    if count <= len(batch)), key=lambda one: sum(one.lengths))
    if len(found) < 2 or sum(found[0].lengths) == sum(found[1].lengths):
        return None
    few, many = (one.to(setup.device) for one in found)
    few_s, many_s = (min(_pass_s(setup, one) for _ in range(TIMED_PASSES)) for one in (few, many))
    each_s = (many_s - few_s) / (sum(many.lengths) - sum(few.lengths))
    return min(few_s, max(0.0, few_s - each_s * sum(few.lengths)))


def _pass_s(setup: Setup, batch: Batch) -> float:
    scaler = torch.amp.GradScaler(setup.device.type, enabled=False)
    taken_s = seconds_of(lambda: setup.run_pass(setup, batch, batch.trained_tokens, scaler, no_lap), setup.device.type)
    setup.model.zero_grad(set_to_none=True)
    return taken_s


def _observed(prepared: Prepared, setup: Setup, watched: Watched, pauses: Mapping[str, Any],
              at_setup: tuple[Compilation, ...]) -> Observed:
    hardware, steps, results = prepared.facts.hardware, prepared.total_steps, watched.results
    if prepared.recipe.train_time_s is not None:             # a run of a given time gets its steps by such a probe, too
        steps = max(1, round(prepared.recipe.train_time_s / statistics.median(watched.step_s)))
    on_cpu, seen = setup.device.type == "cpu", watched.meanwhile
    threads = torch.get_num_threads() if on_cpu else None
    throttled_share, throttled_by = seen.throttled(hardware.cores) if on_cpu else (0.0, "")
    compiled = [one for step in watched.compilations for one in step]
    still_to_come = still_to_come_s(watched.compilations, steps - len(results), (at_setup, watched.compiled_first))
    real, padding = (statistics.mean(getattr(result, kind) for result in results) for kind in ("real_tokens", "padding_tokens"))
    return Observed(
        step_s=watched.step_s, steps=steps,
        step_slots=tuple(float(result.real_tokens + result.padding_tokens) for result in results),
        parts={part: statistics.mean(parts[part] for parts in watched.parts) for part in watched.parts[0]},
        **step_work(prepared.facts, prepared.plan, float(real), float(padding)),
        passes=float(len(setup.prepare(0))), pass_s=watched.pass_s, peak_flops_per_s=hardware.peak_flops_per_s,
        bandwidth_bytes_per_s=hardware.bandwidth_bytes_per_s,
        recomputing_is_needed=recomputing_is_needed(prepared), threads=threads, cores=hardware.cores,
        stolen_share=seen.stolen_share(threads, hardware.cores) if threads else 0.0, others_cores=seen.others_cores,
        throttled_share=throttled_share, throttled_by=throttled_by if throttled_share else "",
        split_over=len({parameter.device for parameter in setup.model.parameters()}), **pauses,
        recompilations=len(compiled), recompile_s=sum(one.seconds for one in compiled) + still_to_come)


def recomputing_is_needed(prepared: Prepared) -> bool:
    """Return whether a step without recomputation does not fit the memory."""
    facts = prepared.facts
    if facts.model.provider != "native":
        return False
    blank = planner.workload_of(facts, replace(prepared.plan, steps=()))
    plain = tuple(step for step in prepared.plan.steps if not step.technique.reckon(blank).checkpoint_every)
    return needed_bytes(facts, replace(prepared.plan, steps=plain)) > room_bytes(facts)


def _losses(results: Sequence[StepResult]) -> tuple[float, ...]:
    losses = tuple(torch.stack([result.loss for result in results]).float().tolist())
    if not all(map(math.isfinite, losses)):
        raise RunFailed(f"the loss is not finite within the first {UNWATCHED + len(results)} steps; use a lower learning_rate, "
                        "or max_grad_norm=1")
    return losses


# ------------------------------------------------------------------------------------------------ the work between steps


def _pauses(prepared: Prepared, setup: Setup, state: State, step_s: float) -> tuple[dict[str, Between], float]:
    """Return fields of Observed, and the seconds after the last step: evaluation on all held-out text, and a checkpoint."""
    recipe, held_out = prepared.recipe, prepared.material.held_out
    found, last_s = {"logging": Between("logging_steps", _log_s(recipe.logging_steps), recipe.logging_steps)}, 0.0
    if len(held_out):
        some = spread(held_out, recipe.max_eval_samples)
        some_s, written_s = _evaluation_s(setup, some, step_s), _sample_s(prepared, setup)
        last_s = some_s * len(held_out) / len(some) + written_s
        found["evaluation"] = Between("eval_steps", some_s + written_s, in_steps(recipe.eval_steps, prepared.steps_per_epoch))
    if (save_s := _save_s(prepared, state)) is not None:
        last_s += save_s
        found["checkpoint"] = Between("save_steps", save_s, in_steps(recipe.save_steps, prepared.steps_per_epoch))
    return found, last_s


def _evaluation_s(setup: Setup, examples: Sequence[Example], step_s: float) -> float:
    """Return the seconds of an evaluation on these examples, extrapolated from as many batches as there is time for."""
    batch = setup.train_batch_size
    evaluate(setup, examples[:batch], tokens_per_byte=None)
    first = evaluate(setup, examples[:batch], tokens_per_byte=None)
    if len(examples) <= batch:
        return first.seconds
    chosen = spread(examples, max(1, int(MOST_EVALUATION_S / max(first.seconds, 1e-6, step_s / 100))) * batch)
    return evaluate(setup, chosen, tokens_per_byte=None).seconds * len(examples) / len(chosen)


def _sample_s(prepared: Prepared, setup: Setup) -> float:
    wanted = prepared.recipe.sample.tokens
    tokens = min(wanted, SAMPLE_TOKENS)
    if not tokens:
        return 0.0
    return seconds_of(lambda: write_sample(prepared, setup, tokens), setup.device.type) * wanted / tokens


def _save_s(prepared: Prepared, state: State) -> float | None:
    """Return the seconds of a checkpoint, or None where the disk has no room for one, which a check reports."""
    disk = run_disk(prepared.recipe.output_dir)
    if shutil.disk_usage(disk).free < 2 * checkpoint_bytes(prepared):
        return None
    try:
        with tempfile.TemporaryDirectory(dir=disk, prefix=".powertrain-diagnose-") as folder:
            began = time.perf_counter()
            save_checkpoint(Path(folder), state)
            return time.perf_counter() - began
    except OSError:
        return None


def _log_s(steps: int) -> float:
    """Return the seconds of writing so many steps to the log."""
    with tempfile.TemporaryDirectory(prefix="powertrain-") as folder:
        log = EventLog(Path(folder, "events.jsonl"))
        began = time.perf_counter()
        for step in range(steps):
            log.write(Step(step=step, loss=1.0, tokens=1, real_tokens=1, seconds=1.0, learning_rate=1e-3, grad_norm=1.0,
                           parts=dict.fromkeys("abcde", 0.123456), padding_tokens=0))
        log.flush()
        return time.perf_counter() - began


# ------------------------------------------------------------------------------------------------ torch's compiler


class CompileWatch:
    """`with CompileWatch() as watch:`; `watch.take()` returns the compilations since the last call."""

    def __enter__(self) -> Self:
        self._found: list[Compilation] = []
        self._began = 0.0
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        callback_handler.remove_start_callback(self._start)
        callback_handler.remove_end_callback(self._end)

    def take(self) -> tuple[Compilation, ...]:
        found = tuple(self._found)
        self._found.clear()
        return found

    def _start(self, arguments: CallbackArgs) -> None:
        self._began = time.perf_counter()

    def _end(self, arguments: CallbackArgs) -> None:
        part = "backward" if arguments.callback_trigger is CallbackTrigger.LAZY_BACKWARD else "forward"
        self._found.append(Compilation(part, time.perf_counter() - self._began))


def told_apart(steps: Sequence[Mapping[str, float]], compilations: Sequence[tuple[Compilation, ...]]
               ) -> tuple[tuple[Mapping[str, float], ...], list[tuple[Compilation, ...]]]:
    """Return the steps' parts without compiling, and the compilations with their whole time.

    torch's own figure leaves out guards, the first call of a new graph and garbage collection. So a compiling step is taken to
    need the usual time of the steps that compiled nothing, and the rest is compiling.
    """
    plain = [parts for parts, found in zip(steps, compilations, strict=True) if not found]
    left, taken = [], []
    for parts, found in zip(steps, compilations, strict=True):
        rest = dict(parts)
        for one in found:
            rest[one.part] = max(0.0, rest[one.part] - one.seconds)
        if found and plain:
            rest |= {name: min(rest[name], statistics.median(each[name] for each in plain)) for name in COMPILE_IN}
        told_s, whole_s = sum(one.seconds for one in found), sum(parts.values()) - sum(rest.values())
        left.append(rest)
        taken.append(tuple(replace(one, seconds=one.seconds * whole_s / told_s) for one in found) if told_s else found)
    return tuple(left), taken


def still_to_come_s(per_step: Sequence[tuple[Compilation, ...]], steps_left: int,
                    before: Sequence[tuple[Compilation, ...]] = ()) -> float:
    """Return the seconds of compiling in the remaining steps, at the rate of the later half of the watched steps.

    `before`: the earlier compilations, one entry for the set-up and one for each step.
    """
    lately = per_step[len(per_step) // 2:]
    if not any(lately):
        return 0.0
    every = [one for step in (*before, *per_step) for one in step]
    rate = sum(map(len, lately)) / len(lately)
    left = max(0, most_compilations([*before, *per_step]) - len(every))
    return min(rate * steps_left, float(left)) * statistics.mean(one.seconds for step in per_step for one in step)


def most_compilations(per_step: Sequence[tuple[Compilation, ...]]) -> int:
    """Return how many compilations torch makes at most: after `recompile_limit` kinds of input it runs a function uncompiled.

    The number of functions is the most that were compiled in one step, for one kind of input.
    """
    import torch._dynamo.config

    limit: Any = torch._dynamo.config.recompile_limit
    by_part = [max((sum(one.part == part for one in step) for step in per_step), default=0) for part in COMPILE_IN]
    return int(limit) * sum(by_part)
