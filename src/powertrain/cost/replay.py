"""A training step without its numbers: blocks of memory, and the graph that autograd would keep of them.

The step runs as torch runs it, with sizes in place of tensors. An operator takes a block of memory for its result. The block is
given back when the last reference to it goes, by Python's own reference counts, as in torch. So whatever a function holds in
a variable, or autograd holds for the backward pass, counts for exactly as long as it is held. `Memory` is the allocator: it
keeps a running sum by component, and the sums at the fullest moment.

`Tape` keeps the rules of autograd that decide about memory:
  a result whose inputs need no gradient is not recorded, and nothing is saved for it
  the backward pass takes the operator that was recorded last among those whose gradients are all there
  gradients and saved tensors are freed when the operator is done, before its results are added to other gradients
  gradients that meet are added in place, unless the one that is there is a view; a weight takes its first gradient as it is
  under a checkpoint nothing is saved; the backward pass runs the forward pass again, up to the last tensor that it would save
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

ACTIVATIONS, LOSS, WORKSPACE, GRADIENTS, COPIES = "activations", "loss", "workspace", "gradients", "low-precision copies"
ROUNDING = "allocator rounding"
INFINITE = 1 << 62                           # order of a weight: its gradient is taken as soon as it is there

Saved = tuple["Block | None", ...]           # what an operator keeps for its backward pass; None: a weight
Gradients = list["Block | None"]             # of an operator's results, or of what it read; None: not needed
Back = Callable[[Saved, Gradients], Gradients]
Result = TypeVar("Result")


class Memory:
    """An allocator that only counts. Blocks are rounded up to multiples of `rounding` bytes."""

    def __init__(self, standing: Mapping[str, int], rounding: int = 1) -> None:
        self.held, self.rounding = dict(standing), rounding
        self.total = sum(self.held.values())
        self.peak, self.fullest = self.total, dict(self.held)
        self.full = False                    # the running sum has passed the peak, and `fullest` is not written down yet

    def change(self, nbytes: int, component: str) -> None:
        """Take so many bytes, or give them back where `nbytes` is negative."""
        if self.full and nbytes < 0:         # going down from the highest point so far
            self.fullest, self.full = dict(self.held), False
        self.held[component] = self.held.get(component, 0) + nbytes
        self.total += nbytes
        if self.rounding > 1:
            rounded = -abs(nbytes) % self.rounding * (1 if nbytes > 0 else -1)
            self.held[ROUNDING] = self.held.get(ROUNDING, 0) + rounded
            self.total += rounded
        if self.total > self.peak:
            self.peak, self.full = self.total, True

    def repeat(self, before: Mapping[str, int], times: int) -> None:
        """Change every component `times` more by as much as since `before`: as blocks would that are not replayed.

        Components that shrink come first, since only the sum counts.
        """
        changes = {name: times * (nbytes - before.get(name, 0)) for name, nbytes in self.held.items()}
        for component, nbytes in sorted(changes.items(), key=lambda item: item[1]):
            if nbytes:
                self.change(nbytes, component)

    def at_the_peak(self) -> Mapping[str, int]:
        return dict(self.held) if self.full else self.fullest


class Block:
    """A tensor's storage, which views share. `is_viewed`: as a gradient it is a view of another tensor."""

    __slots__ = ("away", "component", "is_viewed", "memory", "nbytes")

    def __init__(self, memory: Memory, nbytes: int, component: str) -> None:
        self.memory, self.nbytes, self.component, self.is_viewed, self.away = memory, nbytes, component, False, 0
        memory.change(nbytes, component)

    def __del__(self) -> None:
        self.memory.change(-self.nbytes, self.component)

    def put_away(self) -> None:
        """Give the bytes back, whoever still refers to the block."""
        self.memory.change(-self.nbytes, self.component)
        self.away, self.nbytes = self.nbytes, 0

    def bring_back(self) -> None:
        """Take the bytes again, if they were put away."""
        if self.away:
            self.memory.change(self.away, self.component)
            self.nbytes, self.away = self.away, 0

    def becomes(self, component: str) -> None:
        self.memory.change(-self.nbytes, self.component)
        self.component = component
        self.memory.change(self.nbytes, component)


class Node:
    """One recorded operator: what it saved, and `back`, which turns the gradients of its results into those of its inputs."""

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
    """A trained weight, or another tensor whose gradient is asked for; `gradient` is its `.grad`, counted as `component`.

    With `stands`, the gradient has a buffer from the beginning, and new gradients are added to that.
    """

    __slots__ = ("gradient", "stands")

    def __init__(self, component: str = GRADIENTS, *, stands: bool = False) -> None:
        super().__init__(INFINITE, (), (), lambda saved, gradients: [], component)
        self.gradient: Block | None = None
        self.stands = stands

    def run(self, tape: Tape) -> Gradients:
        new = self.slots.pop(0, None)
        if new is not None and self.gradient is None and not self.stands:
            new.becomes(self.component)
            self.gradient = new
        return []


@dataclass(eq=False, slots=True)
class Value:
    """A tensor: `count` elements of `item` bytes in a block (None: a weight, whose memory is counted elsewhere)."""

    block: Block | None
    count: int
    item: int
    node: Node | None = None
    slot: int = 0                            # which result of the node this is

    @property
    def nbytes(self) -> int:
        return self.count * self.item


class Stop(Exception):
    """Raised when a checkpoint's second run has made everything that the backward pass needs."""


@dataclass(eq=False)
class Frame:
    """One block under a checkpoint: its input, how many tensors it would save, and the results that are kept all the same."""

    run: Callable[[Value], Value]
    x: Value
    keeps: bool
    count: int = 0                           # of the tensors that it would save
    kept: list[object] = field(default_factory=list)         # results that are not computed again
    made: list[Block | None] | None = None


@dataclass(frozen=True)
class Later:
    """The saved tensors of an operator under a checkpoint: `first:last` of those that the frame's second run makes."""

    frame: Frame
    first: int
    last: int


class Tape:
    """The recorded operators of a step; the module docstring has the rules."""

    def __init__(self, memory: Memory, *, is_cuda: bool = False, keeps_casts: bool = True) -> None:
        self.memory, self.is_cuda, self.keeps_casts = memory, is_cuda, keeps_casts
        self.component = ACTIVATIONS         # what new blocks count as
        self.order = 0
        self.frame: Frame | None = None
        self.again = False                   # the frame's forward pass is running for the second time
        self.shared: dict[str, Block] = {}   # frozen matrices made in that second run, for the gradients that follow
        self.casts: dict[int, Value] = {}    # weights in autocast's type, kept until its context ends if `keeps_casts`

    def new(self, nbytes: int) -> Block:
        return Block(self.memory, nbytes, self.component)

    def scratch(self, nbytes: int) -> None:
        """Take bytes and give them back at once."""
        Block(self.memory, nbytes, self.component)

    def node(self, inputs: tuple[Value, ...], saved: Saved, back: Back) -> Node | None:
        """Record an operator before its result is made; None if no input needs a gradient. `saved` has None for weights."""
        if all(value.node is None for value in inputs):
            return None
        self.order += 1
        return Node(self.order, tuple(None if value.node is None else (value.node, value.slot) for value in inputs),
                    self._pack(saved), back, LOSS if self.component == LOSS else WORKSPACE)

    @contextmanager
    def having(self, **values: object) -> Iterator[None]:
        """Set attributes for a while, such as `component`."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        yield
        vars(self).update(before)

    # -------------------------------------------------------------------------------------------- checkpoints

    def checkpoint(self, run: Callable[[Value], Value], x: Value, *, keeps: bool) -> Value:
        """Return run(x), to be run again in the backward pass. With `keeps`, results made under `keep` are not made again."""
        with self.having(frame=Frame(run, x, keeps)):
            return run(x)

    def keep(self, make: Callable[[], Result]) -> Result:
        """Return make(); under a checkpoint that keeps it, the first run's result serves the second run too."""
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
        """Return an operator's saved tensors, once; the frame lets them go."""
        frame = later.frame
        if frame.made is None:
            frame.made = []
            self._run_again(frame)
        found = tuple(frame.made[later.first:later.last])
        frame.made[later.first:later.last] = [None] * len(found)
        return found

    def _run_again(self, frame: Frame) -> None:
        """Run the frame's forward pass again. Copies of weights that autocast makes in it are its own."""
        x = frame.x
        with self.having(frame=frame, again=True, casts={}, component=ACTIVATIONS), suppress(Stop):
            frame.run(Value(x.block, x.count, x.item, None if x.node is None else Leaf()))

    # -------------------------------------------------------------------------------------------- backward

    def backward(self, loss: Value, gradient: Block | None = None) -> None:
        """Make the gradients of all leaves that `loss` depends on, from its own `gradient`; None: a new tensor of ones."""
        assert loss.node is not None
        for node in _reached(loss.node):
            for edge in node.inputs:
                if edge is not None:
                    edge[0].waiting += 1
        loss.node.slots[0] = self.new(loss.nbytes) if gradient is None else gradient
        ready = [(-loss.node.order, 0, loss.node)]
        while ready:
            node = heapq.heappop(ready)[-1]
            with self.having(component=node.component):
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
    """Return every operator that the root's gradient reaches, once."""
    found, open_nodes = {id(root): root}, [root]
    while open_nodes:
        for edge in open_nodes.pop().inputs:
            if edge is not None and id(edge[0]) not in found:
                found[id(edge[0])] = edge[0]
                open_nodes.append(edge[0])
    return list(found.values())
