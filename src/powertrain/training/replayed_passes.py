"""Forward and backward pass as one recording: made once, then replayed with other numbers in the same memory.

A GPU that waits for Python between kernels is idle most of a small model's step. A CUDA graph is the list of kernels with
their arguments; replaying it costs one call. What it asks for: constant shapes (static_passes.py), and tensors that stay
where they are. So a batch is copied into the recording's own, the step's units are a number on the device, and
gradients are added to buffers that outlive the step.

Weights stay where they are too: the optimizer and a checkpoint's loading change them in place, and the next replay reads
what they hold. Should they ever move, the pass is recorded again. Evaluation runs outside, with the same weights. What has
another shape runs eagerly into the same gradients, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from powertrain.records import Batch, Layout
from powertrain.training.laps import Lap
from powertrain.training.objective import Sums
from powertrain.training.setup import RunPass, Setup, run_eagerly
from powertrain.training.static_passes import PassShape, static_sums

WARM_UPS = 3                 # torch's advice for what libraries set up at their first calls


class Recorder(Protocol):
    """How work is recorded."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Does it, where it will be recorded."""

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        """What does it again. Whether it is done now, too, is not said."""


class GraphRecorder:
    """Work on the current CUDA device, as a CUDA graph."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def warm_up(self, work: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            work()
        return graph.replay


@dataclass
class Recording:
    """One recorded pass: what it reads, where it writes."""

    replay: Callable[[], object]
    batch: Batch                             # its own copy
    units: Tensor                            # () fp32, of the step
    means: Sums                              # loss and metrics, () fp32 each
    parameters: list[nn.Parameter]           # those that get a gradient
    gradients: list[Tensor]                  # one for each, fp32
    places: tuple[int, ...]                  # where the weights lay

    def attach(self) -> None:
        """Makes the recording's buffers the gradients, with what eager passes of this step have put there so far."""
        fresh = []
        for parameter, buffer in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is None:
                fresh.append(buffer)
            elif parameter.grad is not buffer:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer
        if fresh:
            torch._foreach_zero_(fresh)

    def run(self, batch: Batch, units: int) -> Sums:
        """Add the gradients of the batch's loss over `units`; return that loss and the metrics."""
        assert batch.layout is not None
        assert self.batch.layout is not None
        self.attach()
        for own, given in ((self.batch.tokens, batch.tokens), (self.batch.targets, batch.targets),
                           (self.batch.positions, batch.positions), (self.batch.layout.ends, batch.layout.ends),
                           (self.batch.layout.rows, batch.layout.rows)):
            own.copy_(given, non_blocking=True)
        self.units.fill_(units)
        self.replay()
        return {name: value.clone() for name, value in self.means.items()}


@dataclass
class ReplayedPass:
    """Runs passes that have a layout from a recording, which the first of them makes, and all others by `eager`."""

    shape: PassShape
    make_recorder: Callable[[], Recorder] = GraphRecorder
    eager: RunPass = run_eagerly
    counts: dict[str, int] = field(default_factory=lambda: {"recorded": 0, "replayed": 0, "eager": 0})
    _recording: Recording | None = None

    def __call__(self, setup: Setup, batch: Batch, units: int, scaler: torch.amp.GradScaler, lap: Lap) -> Sums:
        if batch.layout is None:
            self.counts["eager"] += 1
            return self.eager(setup, batch, units, scaler, lap)
        if self._recording is None or self._recording.places != _places(setup):
            self._recording = None           # its memory goes back before more is taken
            self._recording = record(setup, batch, self.shape, scaler, self.make_recorder())
            self.counts["recorded"] += 1
        means = self._recording.run(batch, units)
        self.counts["replayed"] += 1
        lap("backward")                      # and forward: the device does not say where one ends
        return means


def record(setup: Setup, batch: Batch, shape: PassShape, scaler: torch.amp.GradScaler, recorder: Recorder) -> Recording:
    """A recording of the pass; gradients are left as they were."""
    own, trained = _copy(batch), [parameter for parameter in setup.model.parameters() if parameter.requires_grad]
    units = torch.ones((), device=setup.device)
    means = {name: torch.zeros((), device=setup.device) for name in ("loss", *setup.objective.metrics)}

    def work() -> None:
        found = {name: value / units for name, value in static_sums(setup, own, shape).items()}
        scaler.scale(found["loss"]).backward()  # type: ignore[no-untyped-call]
        for name, value in found.items():
            means[name].copy_(value.detach())

    before = [parameter.grad for parameter in trained]
    for parameter in trained:
        parameter.grad = None
    recorder.warm_up(work)
    # a weight that gets no gradient must not have a buffer: the optimizer would let it decay
    with_gradient = [parameter for parameter in trained if parameter.grad is not None]
    gradients = [torch.zeros_like(parameter) for parameter in with_gradient]
    for parameter, buffer in zip(with_gradient, gradients, strict=True):
        parameter.grad = buffer              # recorded is the adding to these
    for _ in range(WARM_UPS - 1):
        recorder.warm_up(work)
    replay = recorder.record(work)
    for parameter, gradient in zip(trained, before, strict=True):
        parameter.grad = gradient
    return Recording(replay, own, units, means, with_gradient, gradients, _places(setup))


def _copy(batch: Batch) -> Batch:
    assert batch.layout is not None
    layout = Layout(batch.layout.ends.clone(), batch.layout.rows.clone())
    return replace(batch, tokens=batch.tokens.clone(), targets=batch.targets.clone(), positions=batch.positions.clone(),
                   layout=layout)


def _places(setup: Setup) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in setup.model.parameters())
