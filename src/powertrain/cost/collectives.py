"""The collectives of one optimizer step: how many there are, of how many bytes, and how long they take over a known link.

Data parallel processes sum their gradients once a step, in buckets. Where processes divide weights, gradients and optimizer
state (ZeRO, as FSDP2 does it), each block is one group of weights, and all weights outside the blocks are another:

    stage  all-gathers of weights                          reduce-scatters of gradients
    1      each group, once a step                         each trained group, in the last pass
    2      each group, once a step                         each trained group, in each pass
    3      each group in each pass; blocks again backward  each trained group, in each pass

Where processes divide the matrices of each block (tensor parallelism), they sum the residual of each token four times a block:
after attention and after the MLP, and in the backward pass in front of each. With a norm of queries and keys, its gradients
come on top. Of several such groups, the processes with the same parts sum their gradients once a step.

A group that is exchanged has its rows filled up to a multiple of the processes that divide it. With replicas (hybrid), the
processes of one replica divide the weights, and each reduce-scatter is followed by an all-reduce over the replicas.
Counts, flags and norms, a few bytes each, are not in it. Counts hold for passes without recomputing.
Source: Rajbhandari et al. 2020, arXiv:1910.02054; tests/cost/test_collectives.py holds all of it against torch.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from powertrain.cost.weights import as_decoder, frozen_in, has_frozen_base, lowest_layer, matrix_bytes, other_bytes, tensor_part
from powertrain.records import NETWORK, NODE, Hardware, ModelFacts, PeerLink, UnknownFact
from powertrain.shapes import BUCKET_BYTES, FP32

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND = "all_reduce", "all_gather", "reduce_scatter", "send"
WHOLE, SHARDS, REPLICAS, PARTS = "processes", "shards", "replicas", "parts"    # among which processes something is exchanged
SUMS_OF_A_BLOCK = 4                          # of divided blocks: two forward, two backward
GATHERED_AGAIN, SUMMED_EACH_PASS = 3, 2      # from this stage on
FIRST = ("embedding.weight", "position_embedding.weight")    # of the weights outside the blocks, before the blocks
PUBLISHED_SHARE = 0.5                        # guess: of a published bandwidth that an exchange reaches, at least
SUM_COPIES = 8                               # guess: of the gradients, by which processes of one machine sum them


@dataclass(frozen=True)
class Division:
    """How processes share a step: each with the whole model (stage 0), or with parts of it as ZeRO's stages 1 to 3 say."""

    processes: int
    stage: int = 0
    replicas: int = 1                        # groups of processes, each of which holds the whole model
    tensor: int = 1                          # processes that divide the matrices of each block

    @property
    def shards(self) -> int:
        """Return the processes that each weight is divided among."""
        return self.processes // self.replicas


@dataclass(frozen=True)
class Collectives:
    """Collectives of one kind in one step. Their bytes are those of the whole tensors, as sent to or had from all."""

    kind: str
    count: int
    total_bytes: int
    among: str
    processes: int                           # that take part in each of them

    def seconds(self, link: PeerLink) -> float:
        """Return the time of all of them, one after the other, around a ring of equal links.

        Source: Patarasu & Yuan 2009, "Bandwidth optimal all-reduce algorithms": n - 1 messages of 1 / n, an all-reduce twice.
        """
        if self.kind == SEND:
            return self.count * link.latency_s + self.total_bytes / link.bandwidth_bytes_per_s
        messages = (self.processes - 1) * (2 if self.kind == ALL_REDUCE else 1)
        return messages * (self.count * link.latency_s + self.total_bytes / self.processes / link.bandwidth_bytes_per_s)


def collectives_of(model: ModelFacts, division: Division, passes: int, *, tokens: int = 0, item_bytes: int = FP32
                   ) -> tuple[Collectives, ...]:
    """Return the collectives of one step in which each process makes `passes` passes. None for one process.

    `tokens` of these passes together, and the bytes of a number in products, count where processes divide the blocks.
    """
    if division.processes == 1:
        return ()
    model = as_decoder(model)
    if division.tensor > 1:
        return _of_tensor_parts(model, division, passes, tokens * item_bytes)
    if not division.stage:
        return _summed(model, division)
    shards = division.shards
    groups = [weights_outside(model), *_blocks(model)]
    lowest = max(0, lowest_layer(model) - 1)  # a block below those with a backward pass is fetched ahead, and not used
    gathered = groups if division.stage < GATHERED_AGAIN else (groups + groups[1 + lowest:]) * passes
    scattered = [trained for group in groups if (trained := [weight for weight in group if weight.is_trained])]
    scattered *= passes if division.stage >= SUMMED_EACH_PASS else 1
    scattered_bytes = sum(_exchanged_bytes(group, shards) for group in scattered)
    found = [Collectives(ALL_GATHER, len(gathered), sum(_exchanged_bytes(group, shards) for group in gathered), SHARDS, shards),
             Collectives(REDUCE_SCATTER, len(scattered), scattered_bytes, SHARDS, shards)]
    if division.replicas > 1:
        found.append(Collectives(ALL_REDUCE, len(scattered), scattered_bytes // shards, REPLICAS, division.replicas))
    return tuple(found)


def sends_of(model: ModelFacts, passes: int, tokens: int) -> Collectives:
    """Return what two neighbouring stages of a pipeline send each other in a step: each pass's rows, and their gradients back.

    `tokens` are those of a pass, padding included; its rows are fp32.
    """
    count = 2 * passes
    return Collectives(SEND, count, count * tokens * model.width * FP32, WHOLE, 2)


def exchanged_s(found: Iterable[Collectives], hardware: Hardware) -> tuple[tuple[float, float], str]:
    """Return the seconds that collectives add to a step, low and high, and the basis of the two.

    On one CPU machine whose links were not measured the seconds are guessed. Raises UnknownFact elsewhere.
    """
    found = tuple(found)
    links = [link_among(one, hardware) for one in found]
    known = [(one, link) for one, link in zip(found, links, strict=True) if link is not None]
    if len(known) == len(found) and hardware.basis == "measured":
        seconds = sum(one.seconds(link) for one, link in known)
        return (seconds, seconds), "exchanges between processes: formulas with the measured links"
    if len(known) == len(found):
        low_s = sum(one.seconds(link) for one, link in known)
        high_s = sum(one.seconds(replace(link, bandwidth_bytes_per_s=PUBLISHED_SHARE * link.bandwidth_bytes_per_s))
                     for one, link in known)
        return (low_s, high_s), (f"exchanges between processes: formulas with the {hardware.basis} links (guess: "
                                 f"{PUBLISHED_SHARE:.0%} to 100% of their bandwidth), without the latency of messages, which "
                                 "nobody publishes")
    missing = found[links.index(None)]
    if hardware.basis != "measured":
        where = "within a node" if is_within_node(missing, hardware) else "between nodes"
        raise UnknownFact(f"no bandwidth {where} is {hardware.basis} for {hardware.name}")
    if hardware.device != "cpu" or hardware.nodes > 1 or hardware.bandwidth_bytes_per_s is None:
        raise UnknownFact(f"latency and bandwidth between the {missing.among} of this run are not measured")
    copied_s = sum(one.total_bytes for one in found) / hardware.bandwidth_bytes_per_s
    return (SUM_COPIES / 2 * copied_s, SUM_COPIES * copied_s), \
        f"guess: to exchange tensors takes as long as {SUM_COPIES // 2} to {SUM_COPIES} copies of them"


def is_within_node(one: Collectives, hardware: Hardware) -> bool:
    """Return whether the processes that exchange something share a node; those of different replicas are on different nodes."""
    return hardware.nodes == 1 or (one.among != REPLICAS and one.processes <= hardware.processes // hardware.nodes)


def link_among(one: Collectives, hardware: Hardware) -> PeerLink | None:
    """Return the link of those processes: as measured among them, else as that of a device in its node and to others says."""
    node, network = hardware.links.get(NODE), hardware.links.get(NETWORK)
    measured = hardware.links.get(one.among) or (hardware.links.get(WHOLE) if hardware.nodes == 1 else None)
    if measured is not None:
        return measured
    if is_within_node(one, hardware):
        return node
    if one.among == REPLICAS or node is None or network is None:
        return network
    # a ring through all devices of a node leaves it through all of its network cards
    ring_bytes_per_s = hardware.processes // hardware.nodes * network.bandwidth_bytes_per_s
    return PeerLink(network.latency_s, min(node.bandwidth_bytes_per_s, ring_bytes_per_s))


# ------------------------------------------------------------------------------------------------ weights


@dataclass(frozen=True)
class Weight:
    shape: tuple[int, ...]
    item_bytes: float                        # of one number, as it is stored
    is_trained: bool

    @property
    def rows(self) -> int:
        return (self.shape or (1,))[0]

    def part(self, shards: int) -> int:
        """Return the numbers of one part, where `shards` processes divide the weight by its rows."""
        return -(-self.rows // shards) * math.prod(self.shape[1:])


def _summed(model: ModelFacts, division: Division) -> tuple[Collectives, ...]:
    """Return the all-reduces of gradients."""
    buckets = buckets_of(model)
    return (Collectives(ALL_REDUCE, len(buckets), sum(buckets), WHOLE, division.processes),)


def _of_tensor_parts(model: ModelFacts, division: Division, passes: int, column_bytes: int) -> tuple[Collectives, ...]:
    """Return the all-reduces of the residual, and of gradients over the groups of processes. `column_bytes`: of all tokens."""
    norms = [shape for name, shape in model.shapes.items() if name.endswith((".q_norm.weight", ".k_norm.weight"))]
    found = (Collectives(ALL_REDUCE, model.layers * passes * (SUMS_OF_A_BLOCK + len(norms)),
                         model.layers * (SUMS_OF_A_BLOCK * model.width * column_bytes
                                         + passes * FP32 * sum(map(math.prod, norms))), PARTS, division.tensor),)
    replicas = division.processes // division.tensor
    if replicas == 1:
        return found
    (summed,) = _summed(tensor_part(model, division.tensor), Division(replicas))
    return (*found, replace(summed, among=REPLICAS))


def buckets_of(model: ModelFacts) -> list[int]:
    """Return the bytes of each bucket in which gradients are summed: the loss, and gradients in the order of the weights."""
    order = [*weights_outside(model, first=True), *itertools.chain.from_iterable(_blocks(model)),
             *weights_outside(model, first=False)]
    buckets = [FP32]
    for nbytes in (FP32 * weight.part(1) for weight in order if weight.is_trained):
        if buckets[-1] + nbytes > BUCKET_BYTES:
            buckets.append(0)
        buckets[-1] += nbytes
    return buckets


def _blocks(model: ModelFacts) -> list[list[Weight]]:
    return [weights_of_block(model, adapted=layer in model.adapted_layers, frozen=frozen_in(model, layer))
            for layer in range(model.layers)]


def weights_outside(model: ModelFacts, first: bool | None = None) -> list[Weight]:
    """Return the weights outside the blocks: all, or those before or after the blocks in the order of the model."""
    return [_weight(model, name, shape, frozen=name in model.frozen) for name, shape in model.shapes.items()
            if not name.startswith("blocks.") and first in (None, name in FIRST)]


def weights_of_block(model: ModelFacts, *, adapted: bool, frozen: frozenset[str] = frozenset()) -> list[Weight]:
    """Return the weights of one block, in the order of the model. `frozen`: see weights.frozen_in."""
    return [_weight(model, name, shape, frozen=name.split(".", 2)[2] in frozen) for name, shape in model.shapes.items()
            if name.startswith("blocks.") and (adapted or ".adapters." not in name)]


def _weight(model: ModelFacts, name: str, shape: tuple[int, ...], *, frozen: bool) -> Weight:
    is_trained = not (has_frozen_base(model) or frozen) or ".adapters." in name
    is_matrix = name.startswith("blocks.") and len(shape) == 2
    return Weight(shape, FP32 if is_trained or frozen else matrix_bytes(model) if is_matrix else other_bytes(model), is_trained)


def _exchanged_bytes(group: Sequence[Weight], shards: int) -> int:
    """Return the bytes of a group of weights, or of their gradients, filled up to parts of equal rows."""
    return round(sum(shards * weight.part(shards) * weight.item_bytes for weight in group))
