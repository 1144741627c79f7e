"""The beginning of `powertrain train`: what will run, in a few short lines. `powertrain plan` shows all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from powertrain.records import DataFacts, Estimate, Facts, ModelFacts, Plan
from powertrain.report.figures import count, counted, duration, interval, memory
from powertrain.report.plan import Row, run_row

MOST_ROWS = 16               # with progress before and the folder behind, `train` begins with at most 20 lines
LONGEST = 100                # characters of a remark or a reason


def overview_rows(recipe: Mapping[str, Any], facts: Facts, plan: Plan, total_steps: int, *, asked: str,
                  remarks: Sequence[str] = ()) -> list[Row]:
    """Return the rows: machine, data, model, run, techniques that are on with their reason, time and memory.

    `asked`: the recipe's name with the user's changes. `remarks`: translated keys, corrections, what was recognised.
    """
    hardware = facts.hardware
    devices = f"{hardware.devices} x " if hardware.devices > 1 else ""
    rows = [("Machine", f"{devices}{hardware.name} ({hardware.device}), {counted(hardware.cores, 'core')}, "
                        f"{memory(hardware.free_memory_bytes)} of {memory(hardware.memory_bytes)} free"),
            ("Data", _data(facts.data)), ("Model", _model(facts.model)), run_row(recipe, facts.data, total_steps)]
    last = [("Off", f"{counted(len(plan.refused), 'technique')}; `powertrain plan` shows why"), _expected(plan.estimate, facts)]
    room = MOST_ROWS - 1 - len(rows) - len(last)
    techniques = _techniques(plan, room - bool(remarks))
    return [("Recipe", asked), *_remarks(remarks, room - len(techniques)), *rows, *techniques, *last]


def _remarks(remarks: Sequence[str], most: int) -> list[Row]:
    """Return the first remarks; the last row says how many others there are."""
    shown = [_shortened(remark) for remark in (remarks if len(remarks) <= most else remarks[:most - 1])]
    if len(shown) < len(remarks):
        shown.append(f"{len(remarks) - len(shown)}{' more' * bool(shown)}: `powertrain plan` shows them")
    return [("" if number else "Notes", text) for number, text in enumerate(shown)]


def _data(data: DataFacts) -> str:
    held_out = f"{count(data.validation_tokens)} held out"
    if data.kind == "blocks":
        return (f"{data.source}: {count(data.train_tokens)} tokens to train on, {held_out}; "
                f"{counted(data.examples, 'block')} of {data.block} tokens ({data.tokenizer})")
    each = count(data.train_tokens / data.examples)
    return (f"{data.source}: {counted(data.examples, data.kind)} to train on, {each} tokens on average, "
            f"{data.trained_share:.0%} of them trained on; {held_out}")


def _model(model: ModelFacts) -> str:
    shape = f"{model.family}, {count(model.parameters)} parameters, {counted(model.layers, 'layer')} x {model.width}"
    if not model.path:
        return shape
    part = "all trained" if model.trainable == model.parameters else \
        f"{count(model.trainable)} trained ({model.trainable / model.parameters:.2%})"
    by = "" if model.provider == "native" else f", computed by {model.provider}"
    return f"{shape}; from {model.path}{by}; {model.method}: {part}"


def _techniques(plan: Plan, most: int) -> list[Row]:
    """Return one row for each technique that is on; the last row names those that have no room."""
    shown = plan.steps if len(plan.steps) <= most else plan.steps[:most - 1]
    width = max((len(step.technique.name) for step in shown), default=0)
    rows = [f"{step.technique.name:<{width}}  {_shortened(f'{step.technique.does}: {step.because}')}" for step in shown]
    if rest := plan.steps[len(shown):]:
        rows.append(f"and {', '.join(step.technique.name for step in rest)}")
    return [("" if number else "On", text) for number, text in enumerate(rows)]


def _shortened(text: str) -> str:
    """Return the text up to the last clause that fits; where no clause ends in time, whole words and dots."""
    if len(text) <= LONGEST:
        return text
    clause = max(text.rfind(mark, LONGEST // 2, LONGEST) for mark in (";", ",", " ("))
    return text[:clause] if clause > 0 else f"{text[:LONGEST].rpartition(' ')[0].rstrip(',;:')} ..."


def _expected(estimate: Estimate | None, facts: Facts) -> Row:
    if estimate is None:
        return "Expected", "time and memory are not known before the run; `powertrain plan` shows why"
    total = interval(*(duration(seconds * estimate.steps) for seconds in estimate.step_s))
    slow, fast = estimate.tokens_per_s
    return "Expected", (f"{total}, {count(slow)} to {count(fast)} tokens/s; {memory(estimate.total_memory_bytes)} of the "
                        f"{memory(facts.hardware.free_memory_bytes)} free memory")
