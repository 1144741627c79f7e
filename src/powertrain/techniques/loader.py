"""Loader: prepare the next batches on other threads, and copy them to the device while it computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from powertrain.records import Batch, Effect, Layout, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import Exactness, PlannedRun, Technique, name_of

if TYPE_CHECKING:
    import torch

    from powertrain.training.setup import MicroBatches, Prepare, Setup

PREPARE_BYTES_PER_S = 2e9    # reading a memory-mapped store and stacking blocks, on one thread
BATCH_BYTES_PER_TOKEN = 24   # tokens, targets and positions, int64


@dataclass(frozen=True)
class Loader(Technique):
    """Batches are a pure function of the step, so threads can make them ahead and the order never changes.

    Threads, not processes: preparing is numpy and torch copying, which releases the interpreter's lock, and a thread
    needs no shared memory and no start-up. Pinned memory lets the copy to a GPU overlap with its work.
    """

    workers: int = 1
    ahead: int = 2                           # optimizer steps prepared ahead
    pinned: bool = False

    name = "loader"
    does = "prepares the next batches on other threads"
    may_be_zero = frozenset({"workers"})
    exactness = Exactness.BITWISE
    touches = frozenset({"loader"})
    acts_on = frozenset({"data", "copy"})
    source = "PyTorch notes on pinned memory and asynchronous copies"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        tokens = run.data.train_batch_size * run.data.block
        prepare_s = tokens * BATCH_BYTES_PER_TOKEN / PREPARE_BYTES_PER_S
        if run.hardware.device == "cuda":
            return cls(workers=1, ahead=2, pinned=True).on(
                f"{tokens:,} tokens a step are prepared and copied from pinned memory while the GPU computes",
                Effect((0.95, 1.0), 0, basis="guess: not measured yet", guessed=True), numbers={"tokens": tokens})
        return cls.refuse(Why.WOULD_NOT_PAY, f"a batch of {tokens:,} tokens is ready in about {prepare_s * 1e3:.2g} ms, and a "
                          "second thread would take a core from the computation", cls(), numbers={"prepare_s": prepare_s})

    @classmethod
    def variants(cls, run: PlannedRun) -> Sequence[Technique | None]:
        pinned = run.hardware.device == "cuda"
        return None, cls(1, 2, pinned), cls(2, 4, pinned)

    def apply(self, setup: Setup) -> Setup:
        return setup if self.workers == 0 else replace(setup, loader=self.load)

    def confirm(self, setup: Setup) -> None:
        if self.workers and getattr(setup.loader, "__self__", None) != self:
            raise NotApplied(f"loader: batches come from {name_of(setup.loader)}")
        if self.pinned and _has_gpu() and not self._on_host(setup.prepare, 0)[0].tokens.is_pinned():
            raise NotApplied("loader: batches are not in pinned memory")

    def load(self, prepare: Prepare, steps: range, device: torch.device) -> Iterator[MicroBatches]:
        """Yield batches in the order of `steps`, at most `ahead` of them waiting."""
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="loader")
        waiting: deque[Future[MicroBatches]] = deque()
        try:
            for step in steps:
                waiting.append(pool.submit(self._on_host, prepare, step))
                if len(waiting) > self.ahead:
                    yield self._on_device(waiting.popleft(), device)
            while waiting:
                yield self._on_device(waiting.popleft(), device)
        finally:
            pool.shutdown(cancel_futures=True)

    def _on_host(self, prepare: Prepare, step: int) -> MicroBatches:
        batches = prepare(step)
        return [_pinned(batch) for batch in batches] if self.pinned and _has_gpu() else batches

    def _on_device(self, ready: Future[MicroBatches], device: torch.device) -> MicroBatches:
        return [batch.to(device, non_blocking=self.pinned) for batch in ready.result()]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _pinned(batch: Batch) -> Batch:
    """Return the batch in pinned memory, which a GPU can read by itself."""
    source = batch.source and replace(batch.source, tokens=batch.source.tokens.pin_memory())
    layout = batch.layout and Layout(batch.layout.ends.pin_memory(), batch.layout.rows.pin_memory())
    return replace(batch, tokens=batch.tokens.pin_memory(), targets=batch.targets.pin_memory(),
                   positions=batch.positions.pin_memory(), source=source, layout=layout,
                   segments=None if batch.segments is None else batch.segments.pin_memory())
