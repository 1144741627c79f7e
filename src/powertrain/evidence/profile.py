"""The profile of a step by class of work, and the largest possible effect of a technique on some classes.

torch's profiler says what each operator took itself. Its class is that of the region it ran in (the loss, attention, the
update), else of its kind. An operator of the backward pass belongs where the forward operator belongs whose gradient it
computes: both carry the same sequence number. The profiler slows a step, so its figures are shares only; the seconds are
those of steps without it.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from powertrain.facts.measure import wait_for
from powertrain.models.kernels.losses import Loss, Scores, scores_of
from powertrain.records.evidence import Window
from powertrain.training.loop import State, backward, update
from powertrain.training.setup import Setup

CLASSES = ("products", "attention", "loss", "elementwise", "optimizer", "data", "copy")
LOSS = "powertrain: loss"
REGIONS = {LOSS: "loss", "powertrain: attention": "attention", "powertrain: update": "optimizer",
           "powertrain: products": "products"}           # our own kernels in C++ say so where they hold more than one class
# batched products are attention's: linear layers multiply all of a pass's tokens at once
ATTENTION = re.compile(r"bmm|softmax|scaled_dot_product|attention|attn|flash")
PRODUCTS = re.compile(r"aten::(mm|addmm_?|_addmm_activation|mv|_scaled_mm|mkldnn_linear)\b|linear_pointwise|gemm|4bit")
BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Profile:
    """The seconds of an optimizer step and of its classes, which sum to the step."""

    step_s: float
    classes: Mapping[str, float]


@dataclass(frozen=True)
class _MarkedLoss:
    """A loss that the profile tells apart, with the scores of targets that objectives of compared answers ask it for."""

    loss: Loss

    def terms(self, *arguments: Any, **named: Any) -> Tensor:
        with record_function(LOSS):
            return self.loss(*arguments, **named)

    @property
    def scores(self) -> Scores:
        marked: Scores = record_function(LOSS)(scores_of(self.loss))
        return marked


def bound(plain: Profile, full: Profile, acts_on: frozenset[str]) -> float:
    """Return how many times as fast or slow a technique on these classes of work can make a step at most.

    What the technique does not touch takes T_rest: the full plan's step less the classes it acts on. What it touches
    takes between nothing and the most that it was seen to take, in the plain step (without any technique) or in the full
    one. So the step lies between T_rest and T_rest + most, with the technique and without it, and the ratio of the two is
    at most (T_rest + most) / T_rest, either way. 1 where it acts on nothing, infinite where nothing is left untouched.
    Source: Amdahl 1967.
    """
    if not acts_on:
        return 1.0
    acted_s = sum(full.classes.get(name, 0.0) for name in acts_on)
    most_s = sum(max(plain.classes.get(name, 0.0), full.classes.get(name, 0.0)) for name in acts_on)
    rest_s = full.step_s - acted_s
    return (rest_s + most_s) / rest_s if rest_s > 1e-9 * full.step_s else math.inf


def profile_steps(setup: Setup, state: State, first_step: int, steps: int, max_grad_norm: float, *,
                  marks_attention: bool) -> Mapping[str, float]:
    """Return the shares of each class in some optimizer steps, from `first_step` (from 0).

    With a marked attention compiled blocks would be compiled anew, and blocks in one call would run as they are: there the
    kernels of attention are known by their names.
    """
    marked = replace(setup, loss=_MarkedLoss(setup.loss).terms)
    if marks_attention:
        marked = replace(marked, attention=record_function("powertrain: attention")(setup.attention))
    on_gpu = setup.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    batches = [[batch.to(setup.device) for batch in setup.prepare(first_step + number)] for number in range(steps)]
    with profile(activities=activities) as found:
        for micro_batches in batches:
            backward(marked, state.scaler, micro_batches, sum(batch.trained_tokens for batch in micro_batches))
            with record_function("powertrain: update"):
                update(state, max_grad_norm)
        wait_for(setup.device.type)
    return shares(found.events() or (), on_gpu=on_gpu)


def from_shares(found: Mapping[str, float], window: Window) -> Profile:
    """Return the shares as seconds of a step in `window`, which ran without the profiler.

    The update and what comes before the forward pass are known by the clock; forward and backward are shared out.
    """
    parts = {name: seconds / window.steps for name, seconds in window.parts.items()}
    compute = {name: found.get(name, 0.0) for name in ("products", "attention", "loss", "elementwise")}
    whole = sum(compute.values())
    step_s = window.seconds / window.steps
    known = {name: parts.get(name, 0.0) for name in ("data", "copy", "optimizer")}
    rest_s = max(0.0, step_s - sum(known.values()))
    classes = {name: rest_s * share / whole if whole else rest_s * (name == "elementwise") for name, share in compute.items()}
    return Profile(step_s, {name: (classes | known)[name] for name in CLASSES})


def shares(events: Iterable[FunctionEvent], *, on_gpu: bool) -> Mapping[str, float]:
    """Return the time of each class in the profiler's unit: the device's time on a GPU, else the processor's."""
    known = sorted((event for event in events if event.device_type.name == "CPU"), key=lambda event: event.time_range.start)
    owners: dict[int, str] = {}              # sequence number -> region of the last forward operator with it: it made the node
    for event in known:
        outer = [one.name for one in _around(event)]
        if event.sequence_nr >= 0 and not any(name.startswith(BACKWARD) for name in outer):
            owners[event.sequence_nr] = next((REGIONS[name] for name in outer if name in REGIONS), "")
    found = dict.fromkeys(CLASSES, 0.0)
    for root in (event for event in known if event.cpu_parent is None):
        _add(root, "", owners, found, on_gpu=on_gpu)
    return found


def _add(event: FunctionEvent, region: str, owners: Mapping[int, str], found: dict[str, float], *, on_gpu: bool) -> None:
    if not region:
        of_the_forward_pass = owners.get(event.sequence_nr, "") if event.name.startswith(BACKWARD) else ""
        region = REGIONS.get(event.name) or of_the_forward_pass or ("attention" if ATTENTION.search(event.name) else "")
    taken = event.self_device_time_total if on_gpu else event.self_cpu_time_total
    found[region or ("products" if PRODUCTS.search(event.name) else "elementwise")] += taken
    for child in event.cpu_children:
        _add(child, region, owners, found, on_gpu=on_gpu)


def _around(event: FunctionEvent | None) -> Iterator[FunctionEvent]:
    """Yield the event and those that it ran in, the innermost first."""
    while event is not None:
        yield event
        event = event.cpu_parent
