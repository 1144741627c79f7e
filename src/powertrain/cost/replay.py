"""A training step without its numbers: blocks of memory, and the graph that autograd would keep of them.

The step is run as torch runs it, with sizes in place of tensors. A block of memory is taken when an operator makes its
result and given back when the last reference to it goes, which here as there is Python's own counting of references; what
a function holds in a variable, or autograd for the backward pass, is therefore held exactly as long. `Memory` is the
allocator: a running sum by component, and what it was where it was largest.

The rules of autograd that decide about memory, and that `Tape` keeps:
  a result whose inputs need no gradient is not recorded, and nothing is saved for it
  the backward pass takes the most recently recorded of the operators whose gradients are all there
  gradients and what was saved are let go when the operator is done, before its results are added to what they meet
  gradients that meet are added in place, unless what is there is a view; a weight takes its first gradient as it is
  under a checkpoint nothing is saved until the backward pass asks, which then runs the forward pass again, up to the last
    thing that was saved
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

ACTIVATIONS, LOSS, WORKSPACE, GRADIENTS, COPIES = "activations", "loss", "workspace", "gradients", "low-precision copies"
ROUNDING = "allocator rounding"
INFINITE = 1 << 62                           # order of a weight: its gradient is taken as soon as it is there

Saved = tuple["Block | None", ...]           # what an operator keeps for its backward pass; None: a weight
Gradients = list["Block | None"]             # of an operator's results, or of what it read; None: not needed
Back = Callable[[Saved, Gradients], Gradients]
Result = TypeVar("Result")


class Memory:
    """An allocator that hands out nothing but numbers. Blocks are rounded up to multiples of `rounding` bytes."""

    def __init__(self, standing: Mapping[str, int], rounding: int = 1) -> None:
        self.held, self.rounding = dict(standing), rounding
        self.total = sum(self.held.values())
        self.peak, self.fullest = self.total, dict(self.held)
        self.full = False                    # the running sum has passed the peak, and `fullest` is not written down yet

    def take(self, nbytes: int, component: str) -> None:
        self.held[component] = self.held.get(component, 0) + nbytes
        self.total += nbytes
        if self.rounding > 1:
            self._round(nbytes, 1)
        if self.total > self.peak:
            self.peak, self.full = self.total, True

    def give(self, nbytes: int, component: str) -> None:
        if self.full:                        # going down from the highest point so far
            self.fullest, self.full = dict(self.held), False
        self.held[component] -= nbytes
        self.total -= nbytes
        if self.rounding > 1:
            self._round(nbytes, -1)

    def change(self, bytes_by_component: Mapping[str, int]) -> None:
        """What blocks that are not replayed would take and give; first what they give, since the sum is what counts."""
        for component, nbytes in sorted(bytes_by_component.items(), key=lambda item: item[1]):
            (self.take if nbytes > 0 else self.give)(abs(nbytes), component)

    def at_the_peak(self) -> Mapping[str, int]:
        return dict(self.held) if self.full else self.fullest

    def _round(self, nbytes: int, sign: int) -> None:
        more = sign * (-nbytes % self.rounding)
        self.held[ROUNDING] = self.held.get(ROUNDING, 0) + more
        self.total += more


class Block:
    """Bytes in one piece: a tensor's storage. Views share it. `is_viewed`: as a gradient it is another tensor's view."""

    __slots__ = ("away", "component", "is_viewed", "memory", "nbytes")

    def __init__(self, memory: Memory, nbytes: int, component: str) -> None:
        self.memory, self.nbytes, self.component, self.is_viewed, self.away = memory, nbytes, component, False, 0
        memory.take(nbytes, component)

    def __del__(self) -> None:
        self.memory.give(self.nbytes, self.component)

    def put_away(self) -> None:
        """Its bytes are given back, whoever still refers to it."""
        self.memory.give(self.nbytes, self.component)
        self.away, self.nbytes = self.nbytes, 0

    def bring_back(self) -> None:
        """They are taken again, if they were put away."""
        if self.away:
            self.memory.take(self.away, self.component)
            self.nbytes, self.away = self.away, 0

    def becomes(self, component: str) -> None:
        self.memory.give(self.nbytes, self.component)
        self.component = component
        self.memory.take(self.nbytes, component)


class Node:
    """One recorded operator: what it saved, and how it makes gradients for what it read out of those of its results."""

    __slots__ = ("back", "component", "inputs", "order", "saved", "slots", "waiting")

    def __init__(self, order: int, inputs: tuple[tuple[Node, int] | None, ...], saved: Saved | Later, back: Back,
                 component: str) -> None:
        self.order, self.inputs, self.saved, self.back, self.component = order, inputs, saved, back, component
        self.slots: dict[int, Block] = {}    # result -> its gradient so far
        self.waiting = 0                     # operators that still have a gradient to give

    def run(self, tape: Tape) -> Gradients:
        saved = self.saved if isinstance(self.saved, tuple) else tape.unpack(self.saved)
        self.saved = ()
        results = max(self.slots, default=0) + 1
        gradients: Gradients = [self.slots.pop(slot, None) for slot in range(results)]
        return self.back(saved, gradients)


class Leaf(Node):
    """A weight that is trained, or what else a gradient is asked for; `gradient` is its `.grad`, counted as `component`.

    Where it `stands` there is a place for the gradient from the beginning, to which what comes is added.
    """

    __slots__ = ("gradient", "stands")

    def __init__(self, component: str = GRADIENTS, *, stands: bool = False) -> None:
        super().__init__(INFINITE, (), (), _nothing, component)
        self.gradient: Block | None = None
        self.stands = stands

    def run(self, tape: Tape) -> Gradients:
        new = self.slots.pop(0, None)
        if new is not None and self.gradient is None and not self.stands:
            new.becomes(self.component)
            self.gradient = new
        return []


def _nothing(saved: Saved, gradients: Gradients) -> Gradients:
    return []


class Value:
    """A tensor: `count` elements of `item` bytes in a block (None: a weight, which stands anyway)."""

    __slots__ = ("block", "count", "item", "node", "slot")

    def __init__(self, block: Block | None, count: int, item: int, node: Node | None = None, slot: int = 0) -> None:
        self.block, self.count, self.item, self.node, self.slot = block, count, item, node, slot

    @property
    def nbytes(self) -> int:
        return self.count * self.item


class Stop(Exception):
    """Everything that the backward pass asked for is there again."""


class Frame:
    """One block under a checkpoint: its input, what it would have saved, and what is kept all the same."""

    def __init__(self, run: Callable[[Value], Value], x: Value, keeps: bool) -> None:
        self.run, self.x, self.keeps = run, x, keeps
        self.count = 0                       # of the things that it would have saved
        self.kept: list[object] = []         # results that are not computed again
        self.made: list[Block | None] | None = None


@dataclass(frozen=True)
class Later:
    """What an operator under a checkpoint saved: the things `first:last` of what the frame's second run makes."""

    frame: Frame
    first: int
    last: int


class Tape:
    """What is recorded of a step as it runs; see the module docstring for the rules."""

    def __init__(self, memory: Memory, *, is_cuda: bool = False) -> None:
        self.memory, self.is_cuda = memory, is_cuda
        self.component = ACTIVATIONS         # what new blocks count as
        self.recording = True
        self.order = 0
        self.frame: Frame | None = None
        self.again = False                   # the frame's forward pass is running for the second time
        self.shared: dict[str, Block] = {}   # frozen matrices made in that second run, for the gradients that follow
        self.casts: dict[int, Value] = {}    # weights in autocast's type, kept until its context ends

    def new(self, nbytes: int) -> Block:
        return Block(self.memory, nbytes, self.component)

    def node(self, inputs: tuple[Value, ...], saved: Saved, back: Back) -> Node | None:
        """None where no input needs a gradient. `saved` has None for weights. Call it before the result is made."""
        if not self.recording or all(value.node is None for value in inputs):
            return None
        self.order += 1
        return Node(self.order, tuple(None if value.node is None else (value.node, value.slot) for value in inputs),
                    self._pack(saved), back, LOSS if self.component == LOSS else WORKSPACE)

    @contextmanager
    def counting_as(self, component: str) -> Iterator[None]:
        before, self.component = self.component, component
        yield
        self.component = before

    @contextmanager
    def without_gradient(self) -> Iterator[None]:
        before, self.recording = self.recording, False
        yield
        self.recording = before

    # -------------------------------------------------------------------------------------------- checkpoints

    def checkpoint(self, run: Callable[[Value], Value], x: Value, *, keeps: bool) -> Value:
        """What `run` makes of x, to be run again in the backward pass. `keeps`: not what `keep` was asked for."""
        self.frame = Frame(run, x, keeps)
        out = run(x)
        self.frame = None
        return out

    def keep(self, make: Callable[[], Result]) -> Result:
        """What `make` gives; under a checkpoint it is kept from the first run for the second."""
        if self.frame is None or not self.frame.keeps:
            return make()
        if self.again:
            kept: Result = self.frame.kept.pop(0)  # type: ignore[assignment]
            return kept
        self.frame.kept.append(made := make())
        return made

    def _pack(self, saved: Saved) -> Saved | Later:
        frame = self.frame
        if frame is None or not saved:
            return saved
        if not self.again:
            frame.count += len(saved)
            return Later(frame, frame.count - len(saved), frame.count)
        assert frame.made is not None
        frame.made += saved
        if len(frame.made) == frame.count:
            raise Stop
        return saved

    def unpack(self, later: Later) -> Saved:
        """Each thing is handed out once, and held no longer."""
        frame = later.frame
        if frame.made is None:
            frame.made = []
            self._run_again(frame)
        found = tuple(frame.made[later.first:later.last])
        frame.made[later.first:later.last] = [None] * len(found)
        return found

    def _run_again(self, frame: Frame) -> None:
        """The frame's forward pass, with a type of its own in force as autocast has it."""
        casts, component = self.casts, self.component
        self.frame, self.again, self.casts, self.component = frame, True, {}, ACTIVATIONS
        x = frame.x
        with suppress(Stop):
            frame.run(Value(x.block, x.count, x.item, None if x.node is None else Leaf()))
        self.frame, self.again, self.casts, self.component = None, False, casts, component

    # -------------------------------------------------------------------------------------------- backward

    def backward(self, loss: Value, gradient: Block | None = None) -> None:
        """The gradients of all weights that the loss depends on, from its own, which of a loss is a new tensor of ones."""
        assert loss.node is not None
        for node in _reached(loss.node):
            for edge in node.inputs:
                if edge is not None:
                    edge[0].waiting += 1
        loss.node.slots[0] = self.new(loss.nbytes) if gradient is None else gradient
        ready = [(-loss.node.order, 0, loss.node)]
        while ready:
            node = heapq.heappop(ready)[-1]
            with self.counting_as(node.component):
                gradients = node.run(self)
            for edge in reversed(node.inputs):
                gradient = gradients.pop() if gradients else None
                if edge is None:
                    continue
                target, slot = edge
                if gradient is not None and (old := target.slots.get(slot)) is not None and old.is_viewed:
                    target.slots[slot] = self.new(old.nbytes)
                elif gradient is not None and old is None:
                    target.slots[slot] = gradient
                old = None
                target.waiting -= 1
                del gradient
                if not target.waiting:
                    heapq.heappush(ready, (-target.order, id(target), target))
            node.inputs = ()


def _reached(root: Node) -> list[Node]:
    """Every operator that the root's gradient reaches, once."""
    found, open_nodes = {id(root): root}, [root]
    while open_nodes:
        for edge in open_nodes.pop().inputs:
            if edge is not None and id(edge[0]) not in found:
                found[id(edge[0])] = edge[0]
                open_nodes.append(edge[0])
    return list(found.values())
