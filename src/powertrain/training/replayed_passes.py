"""Forward and backward pass as one recording: made once, then replayed with other numbers in the same memory.

A GPU that waits for Python between kernels is idle most of a small model's step. A CUDA graph is the list of kernels with
their arguments, and replaying it costs one call. A recording needs tensors of constant shapes that stay where they are. So a
batch is copied into the recording's own tensors, the step's units are a number on the device, and gradients are added to
buffers that outlive the step. Weights stay in place too: the optimizer and a checkpoint's loading change them in place, and
the next replay reads the new values. If weights ever move, the pass is recorded again. Evaluation runs without the recording.

Shapes: three things differ from pass to pass, the tokens, the ends of the documents, and the rows with a target. Packing
fills the tokens up to a constant number. The others become tensors of a constant size on the host, where the batch is made
(`lay_out`): missing documents are empty and end where the last one ends, and missing rows are rows without a target, which
weigh nothing. A pass that does not fit the shape runs eagerly into the same gradients, and is counted.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from powertrain.models.kernels.attention import OverEnds, kernel_over_ends
from powertrain.models.kernels.losses import Terms, loss_of_all_rows
from powertrain.models.model import Model
from powertrain.records import IGNORE, Batch, Layout
from powertrain.training.loop import zero_means
from powertrain.training.objective import Sums
from powertrain.training.setup import Lap, RunPass, Setup, run_eagerly

WARM_UPS = 3                 # torch's advice for what libraries set up at their first calls
ROOM = 1.2                   # over what the passes looked at need of documents, of their length, and of rows
MULTIPLE = 64                # of rows and of lengths: what kernels work in


@dataclass(frozen=True)
class PassShape:
    """What all passes that are replayed have in common."""

    tokens: int
    documents: int                           # at most; the others are empty
    longest: int                             # tokens of a document, at most
    rows: int                                # that reach the head: those with a target, at most
    lengths: tuple[int, ...] | None = None   # where they are the same in every pass, so that any kernel will do


def shape_of(passes: Sequence[Batch], context: int | None = None) -> PassShape:
    """Return the shape that most of these passes fit, with room for others. `context`: the longest a document may be."""
    tokens = Counter(len(batch.tokens) for batch in passes).most_common(1)[0][0]
    alike = [batch for batch in passes if len(batch.tokens) == tokens]
    rows = _roomy(max(batch.trained_tokens for batch in alike), tokens)
    lengths, longest = alike[0].lengths, max(max(batch.lengths) for batch in alike)
    if all(batch.lengths == lengths for batch in alike):
        return PassShape(tokens, len(lengths), longest, rows, lengths)
    documents = math.ceil(ROOM * max(len(batch.lengths) for batch in alike))
    return PassShape(tokens, documents, max(longest, min(_roomy(longest, tokens), context or tokens)), rows)


def _roomy(most: int, limit: int) -> int:
    return min(limit, MULTIPLE * math.ceil(ROOM * most / MULTIPLE))


def lay_out(batch: Batch, shape: PassShape) -> Batch:
    """Return the batch with its layout, where it fits the shape and so can be replayed; else the batch as it is."""
    if shape.lengths not in (None, batch.lengths) or not len(batch.tokens) == len(batch.targets) == shape.tokens:
        return batch
    if len(batch.lengths) > shape.documents or max(batch.lengths) > shape.longest or batch.trained_tokens > shape.rows:
        return batch
    ends = torch.full((shape.documents + 1,), shape.tokens, dtype=torch.int32)
    ends[:len(batch.lengths) + 1] = torch.tensor((0, *batch.lengths), dtype=torch.int32).cumsum(0)
    without = batch.targets == IGNORE
    rows = torch.argsort(without.to(torch.uint8), stable=True)[:shape.rows]      # those with a target first, in order
    return replace(batch, layout=Layout(ends, rows))


def static_sums(setup: Setup, batch: Batch, shape: PassShape) -> Sums:
    """Return `Setup.sums` of a batch with a layout, by work whose shapes and numbers do not depend on the batch's content.

    The batch's `lengths` are read by nothing that makes numbers; they may be those of another pass.
    """
    assert batch.layout is not None
    attention, rows, all_rows = setup.attention, batch.layout.rows, loss_of_all_rows(setup.loss)
    if shape.lengths is None:
        attention = OverEnds(kernel_over_ends(attention), batch.layout.ends, shape.longest)

    def loss(model: Model, hidden: Tensor, targets: Tensor, trained: int | None = None, terms: Terms | None = None) -> Tensor:
        more = () if terms is None else (None, terms)
        return all_rows(model, hidden.index_select(0, rows), targets.index_select(0, rows), *more)

    return replace(setup, attention=attention, loss=loss).sums(batch)


class GraphRecorder:
    """Records work on the current CUDA device as a CUDA graph."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do the work, where it will be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        """Return a function that does the work again. The work is not done now."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            work()
        return graph.replay


class Recording:
    """One recorded pass, with its own copy of the batch that it reads and the buffers of the gradients that it adds to."""

    def __init__(self, setup: Setup, batch: Batch, shape: PassShape, scaler: torch.amp.GradScaler, recorder: GraphRecorder):
        """Record the pass; leave the gradients as they were."""
        tokens, targets, positions, ends, rows = (tensor.clone() for tensor in _tensors(batch))
        self.batch = replace(batch, tokens=tokens, targets=targets, positions=positions, layout=Layout(ends, rows))
        self.units = torch.ones((), device=setup.device)     # fp32, of the step
        self.scaler = scaler                 # whose scale, a tensor on the device, is in the recording
        self.means, self.places = zero_means(setup), _places(setup)
        trained = [parameter for parameter in setup.model.parameters() if parameter.requires_grad]

        def work() -> None:
            found = {name: value / self.units for name, value in static_sums(setup, self.batch, shape).items()}
            scaler.scale(found["loss"]).backward()  # type: ignore[no-untyped-call]
            for name, value in found.items():
                self.means[name].copy_(value.detach())

        before = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        recorder.warm_up(work)
        # a weight that gets no gradient must not have a buffer: the optimizer would let it decay
        self.parameters = [parameter for parameter in trained if parameter.grad is not None]
        self.gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
        for parameter, buffer in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = buffer          # recorded is the adding to these
        for _ in range(WARM_UPS - 1):
            recorder.warm_up(work)
        self.replay = recorder.record(work)
        for parameter, gradient in zip(trained, before, strict=True):
            parameter.grad = gradient

    def run(self, batch: Batch, units: float) -> Sums:
        """Add the gradients of the batch's loss over `units`; return that loss and the metrics.

        The recording's buffers become the gradients, with what eager passes of this step have added so far.
        """
        fresh = []
        for parameter, buffer in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is None:
                fresh.append(buffer)
            elif parameter.grad is not buffer:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer
        if fresh:
            torch._foreach_zero_(fresh)
        for own, given in zip(_tensors(self.batch), _tensors(batch), strict=True):
            own.copy_(given, non_blocking=True)
        self.units.fill_(units)
        self.replay()
        return {name: value.clone() for name, value in self.means.items()}


@dataclass
class ReplayedPass:
    """Runs passes that have a layout from a recording, which the first of them makes, and all others by `eager`."""

    shape: PassShape
    make_recorder: Callable[[], GraphRecorder] = GraphRecorder
    eager: RunPass = run_eagerly
    counts: dict[str, int] = field(default_factory=lambda: {"recorded": 0, "replayed": 0, "eager": 0})
    _recording: Recording | None = None

    def __call__(self, setup: Setup, batch: Batch, units: float, scaler: torch.amp.GradScaler, lap: Lap) -> Sums:
        if batch.layout is None:
            self.counts["eager"] += 1
            return self.eager(setup, batch, units, scaler, lap)
        if self._recording is None or self._recording.places != _places(setup) or not _same(self._recording.scaler, scaler):
            self._recording = None           # its memory goes back before more is taken
            self._recording = Recording(setup, batch, self.shape, scaler, self.make_recorder())
            self.counts["recorded"] += 1
        means = self._recording.run(batch, units)
        self.counts["replayed"] += 1
        lap("backward")                      # and forward: the device does not say where one ends
        return means


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    """Return what a recording reads of a batch."""
    assert batch.layout is not None
    return batch.tokens, batch.targets, batch.positions, batch.layout.ends, batch.layout.rows


def _same(one: torch.amp.GradScaler, other: torch.amp.GradScaler) -> bool:
    """Return whether both multiply losses by the same tensor, or by nothing."""
    return one is other or not (one.is_enabled() or other.is_enabled())


def _places(setup: Setup) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in setup.model.parameters())
