"""The memory of a process that divides the weights with others, moment by moment, as torch's FSDP2 has it.

Each tensor is divided by its rows, and filled up to parts of equal rows. The weights of a block are gathered together, and so
are all weights outside the blocks:

    before its forward pass   all processes fill a buffer, which is copied into whole weights, and stays till the next is copied
    after it                  stage 3 frees the weights of a block
    before its backward pass  they are gathered again where they are not whole; then the buffer of the block below is filled
    after it                  gradients are copied into a buffer, which stays until the next one is filled, and are freed; the
                              process keeps its part of their sum, or adds it to that of the passes before

On a CPU gloo copies a buffer once more for the time of the exchange (seen in the allocations of real processes).
Stages 1 and 2 free whole weights in the last pass of a step. Stage 1 sums gradients in the last pass alone. With replicas, what
is summed over them stays until the pass is over. Source: torch/distributed/fsdp/_fully_shard; Zhao et al. 2023,
arXiv:2304.11277.
"""

from collections.abc import Iterable

from powertrain.cost.collectives import GATHERED_AGAIN, SUMMED_EACH_PASS, Weight, weights_of_block, weights_outside
from powertrain.cost.replay import GRADIENTS, Block, Leaf, Memory, Value
from powertrain.cost.weights import frozen_in, state_bytes
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts, OptimizerFacts
from powertrain.shapes import FP32

GATHERED, BUFFERS = "gathered weights", "exchange buffers"
SUMMED = "sums over replicas"


def standing_bytes(model: ModelFacts, optimizer: OptimizerFacts, shards: int = 1) -> int:
    """Return the bytes of weights, gradients and optimizer state that one of `shards` processes keeps."""
    return parts_bytes(model, shards) + FP32 * _trained(model, shards) + divided_state_bytes(model, optimizer, shards)


def parts_bytes(model: ModelFacts, shards: int) -> int:
    """Return the bytes of the weights that the process with the most of them keeps."""
    return round(sum(one.part(shards) * one.item_bytes for one in all_weights(model)))


def divided_state_bytes(model: ModelFacts, optimizer: OptimizerFacts, shards: int) -> int:
    """Return the bytes of the optimizer's state for the trained weights that the process keeps."""
    return round(state_bytes(model, optimizer) * _trained(model, shards) / max(1, _trained(model, 1)))


def _trained(model: ModelFacts, shards: int) -> int:
    return sum(one.part(shards) for one in all_weights(model) if one.is_trained)


def all_weights(model: ModelFacts) -> list[Weight]:
    """Return the weights of a model, those of each block apart."""
    blocks = (weights_of_block(model, adapted=layer in model.adapted_layers, frozen=frozen_in(model, layer))
              for layer in range(model.layers))
    return [*weights_outside(model), *(weight for block in blocks for weight in block)]


class Group:
    """Weights that are gathered together, those of a block or all outside the blocks, and what is there of them."""

    def __init__(self, weights: Iterable[Weight], values: Iterable[Value], shards: int) -> None:
        self.weights, self.shards = tuple(weights), shards
        self.leaves = tuple(value.node for value in values)
        self.arriving: Block | None = None   # the buffer that all processes have filled, before it is copied
        self.whole: list[Block] = []         # the gathered weights
        self.part: Block | None = None       # this process's part of the summed gradients
        self.is_over = False                 # the backward pass

    def whole_bytes(self) -> list[int]:
        """Return the bytes of each weight, filled up to parts of equal rows."""
        return [round(self.shards * one.part(self.shards) * one.item_bytes) for one in self.weights]


class Exchanges:
    """The exchanges of a replayed step; each method is a moment of the passes."""

    def __init__(self, memory: Memory, workload: Workload, outside: Group) -> None:
        self.memory, self.outside = memory, outside
        self.stage, self.has_replicas, self.is_cpu = workload.sharded_stage, workload.replicas > 1, workload.device == "cpu"
        self.is_last = False                 # the pass is the last of its step
        self.passed: list[Group] = []        # in the forward pass, in this order
        self.copied: Block | None = None     # the buffer of the weights gathered last
        self.sent: Block | None = None       # the buffer of the gradients summed last
        self.summed: list[Block] = []        # over the replicas, in this pass

    @property
    def frees(self) -> bool:
        """Return whether this pass frees whole weights after their backward pass."""
        return self.is_last or self.stage >= GATHERED_AGAIN

    def before_forward(self, group: Group) -> None:
        group.is_over = False
        self._fill(group)
        if group.arriving is not None:
            self._copy(group)
            self.copied, group.arriving = group.arriving, None

    def after_forward(self, group: Group) -> None:
        self.passed.append(group)
        if group is self.outside:
            self.copied = None
        elif self.stage >= GATHERED_AGAIN:
            group.whole.clear()

    def before_backward(self, group: Group) -> None:
        self._fill(group)
        if group.arriving is not None:
            self._copy(group)
            group.arriving = None
        if (place := self.passed.index(group)):
            self._fill(self.passed[place - 1])

    def after_backward(self, group: Group) -> None:
        group.is_over = True
        if self.frees:
            group.whole.clear()
        if self.stage < SUMMED_EACH_PASS and not self.is_last:
            return
        self.sent = None
        having = [(weight, leaf) for weight, leaf in zip(group.weights, group.leaves, strict=True)
                  if isinstance(leaf, Leaf) and leaf.gradient is not None]
        if having:
            self._sum(group, having)

    def after_pass(self) -> None:
        """End the backward pass of the groups whose inputs need no gradient; let go of the buffers."""
        for group in (self.outside, *self.passed):
            if not group.is_over:
                self.after_backward(group)
            group.arriving = None
        self.sent = None
        self.summed.clear()
        self.passed.clear()
        # blocks that are not run have left theirs
        for component in (SUMMED, GATHERED) if self.frees else (SUMMED,):
            self.memory.change(-self.memory.held.get(component, 0), component)

    def _fill(self, group: Group) -> None:
        if group.arriving is None and not group.whole:
            group.arriving = Block(self.memory, sum(group.whole_bytes()), BUFFERS)
            self._exchange(group.arriving)

    def _exchange(self, buffer: Block) -> None:
        if self.is_cpu:                      # gloo's copy
            Block(self.memory, buffer.nbytes, BUFFERS)

    def _copy(self, group: Group) -> None:
        group.whole = [Block(self.memory, nbytes, GATHERED) for nbytes in group.whole_bytes()]

    def _sum(self, group: Group, having: list[tuple[Weight, Leaf]]) -> None:
        filled = [(weight.rows % group.shards, FP32 * group.shards * weight.part(group.shards)) for weight, _ in having]
        filled_bytes = sum(nbytes for _, nbytes in filled)
        self.sent = Block(self.memory, filled_bytes, BUFFERS)
        if self.is_cpu:                      # torch copies those whose rows do not come out even once more, all at once
            Block(self.memory, sum(nbytes for left_over, nbytes in filled if left_over), BUFFERS)
        _last = having[-1][1].gradient       # a variable of foreach_reduce refers to it until that returns
        for _, leaf in having:
            leaf.gradient = None
        part = Block(self.memory, filled_bytes // group.shards, GRADIENTS)
        self._exchange(self.sent)
        if group.part is None:
            group.part = part
        elif self.has_replicas:
            part.becomes(SUMMED)
            self.summed.append(part)
