"""What fits the memory: the size of a pass, and what a fused block keeps for its backward pass."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from powertrain.cost.memory import peak_memory
from powertrain.cost.weights import linears, lowest_layer
from powertrain.cost.work import PRODUCTS, forward_flops, recompute_flops, training_flops
from powertrain.cost.workload import Workload, longest_of
from powertrain.records import DataFacts, Hardware, ModelFacts
from powertrain.shapes import DTYPE_BYTES

# guess: what a process takes besides the tensors of a step, once torch is loaded: scratch of kernels, rounding, threads
PROCESS_BYTES = {"cpu": 128 << 20, "cuda": 256 << 20}


def total_bytes(model: ModelFacts, workload: Workload) -> int:
    """Return the peak memory of a step."""
    return sum(peak_memory(model, workload).values())


def own_bytes(device: str) -> int:
    """Return what the process takes besides the tensors that peak memory counts."""
    return PROCESS_BYTES.get(device, PROCESS_BYTES["cuda"])


def largest_micro_batch(model: ModelFacts, workload: Workload, memory_bytes: int) -> int:
    """Return the most examples of a pass with which a step takes at most `memory_bytes`; 0 if not even one fits."""
    def fits(examples: int) -> bool:
        return total_bytes(model, with_passes_of(workload, examples)) <= memory_bytes

    if fits(workload.examples):              # in one pass no gradients of earlier ones lie about
        return workload.examples
    return bisect_left(range(1, workload.examples), True, key=lambda examples: not fits(examples))


def largest_pass(model: ModelFacts, workload: Workload, memory_bytes: int) -> Mapping[str, int]:
    """Return `examples`, `tokens` and peak `bytes` of the largest pass that fits; no tokens and bytes if none fits."""
    examples = largest_micro_batch(model, workload, memory_bytes)
    if not examples:
        return {"examples": 0}
    largest = with_passes_of(workload, examples)
    return {"examples": examples, "tokens": largest.fullest_pass_tokens, "bytes": total_bytes(model, largest)}


def with_passes_of(workload: Workload, examples: int) -> Workload:
    """Return the workload with so many examples in a pass, packed or padded as it is."""
    packed = None if workload.packed_tokens is None else examples * workload.block
    return replace(workload, micro_batch=examples, packed_tokens=packed, documents=())


# ------------------------------------------------------------------------------------------------ the size of a pass

CPU_TOKENS = 4096            # 2048 to 4096 were fastest on the CPUs measured
GPU_TOKENS = 32768           # large enough for full-speed products; memory usually decides first
ROOM = 0.5                   # share of the free memory that a pass may count on; what is free may be taken by others
PLANNED_SHARE = 0.8          # of the free memory: what a plan may count on for a whole step
COMPARED = 9                 # examples of the larger pass that memory is compared with


def planned_room_bytes(hardware: Hardware) -> int:
    """Return the memory of the device that a plan may count on for a whole step."""
    return int(PLANNED_SHARE * hardware.free_memory_bytes)


def wanted_tokens(hardware: Hardware) -> int:
    """Return the tokens of a pass that this kind of device runs fastest."""
    return CPU_TOKENS if hardware.device == "cpu" else GPU_TOKENS


def longest_example(data: DataFacts) -> int:
    """Return the tokens of the longest example."""
    return max(data.max_length, data.block)


def memory_of_examples(model: ModelFacts, decided: Workload, tokens: int) -> tuple[int, int]:
    """Return the peak bytes of a step whose passes have one example of `tokens`, and what each further example of a pass adds.

    `decided` is the step so far, whatever it says of its passes.
    """
    # a batch of several passes either way, so that the difference is that of the passes alone
    step = in_passes_of_one(replace(decided, examples=2 * COMPARED), tokens)
    first_bytes, several_bytes = (total_bytes(model, replace(step, micro_batch=examples)) for examples in (1, COMPARED))
    return first_bytes, max(1, (several_bytes - first_bytes) // (COMPARED - 1))


def in_passes_of_one(decided: Workload, tokens: int) -> Workload:
    """Return the step as it is decided so far, in passes of one example of so many tokens."""
    return replace(decided, block=tokens, micro_batch=1, packed_tokens=None, fill_multiple=1, lengths={}, documents=(),
                   grouped=False)


def fitting_tokens(model: ModelFacts, decided: Workload, hardware: Hardware, example_tokens: int) -> int:
    """Return how many tokens fit in one pass of examples that have `example_tokens` each.

    Where one example takes ROOM already, as the weights of a large model do, a pass may use what a plan may count on.
    """
    first_bytes, example_bytes = memory_of_examples(model, decided, example_tokens)
    room_bytes = int(ROOM * hardware.free_memory_bytes)
    if first_bytes >= room_bytes:
        room_bytes = planned_room_bytes(hardware)
    return max(0, room_bytes - first_bytes) // example_bytes * example_tokens


def padded_examples(model: ModelFacts, decided: Workload, data: DataFacts, hardware: Hardware) -> int:
    """Return how many examples suit a padded pass: by memory if each is the longest; by time for a usual pass."""
    longest, target = longest_example(data), wanted_tokens(hardware)
    fit = fitting_tokens(model, decided, hardware, longest) // longest
    if data.kind == "blocks" or not data.length_quantiles:
        return max(1, min(target // data.block, fit))
    padded = [count * longest_of(data.length_quantiles, count) for count in range(1, data.train_batch_size + 1)]
    suit = bisect_right(padded, target)
    return max(1, min(suit, fit))


# ------------------------------------------------------------------------------------------------ what a fused block keeps

# A tensor that a block keeps for its backward pass costs memory. Computing it again costs its contraction length in FLOPs per
# number, if it is the result of a product. So the tensor with the shortest contraction goes first, of equal ones the larger.
# The result of attention is never computed again, nor the inputs of the others: those can only wait in the host's memory.
# Beside a GPU with a known link to its host, every mix of the two is weighed by the time that it adds; the quickest is taken.
# As few blocks as possible put tensors away: the lowest ones, whose tensors wait longest for their use.
#
# Copies to the host run beside the computation: out while the next block's forward pass computes, back while a block's
# backward pass does. Copies that take no longer than that cost nothing. With P FLOP/s and a link of B bytes/s each way:
#     hidden     bytes of a block <= B / P x FLOPs of the block's shorter pass
#     exposed    a number of i bytes takes i / B seconds a way, and 2k / P seconds to be computed again from k others:
#                waiting one way is shorter from a contraction length of k = i P / 2B on, waiting both ways from twice that
# An RTX 4090 (130 TFLOP/s, 25 GB/s) hides all that an 8B model's blocks keep under LoRA, an H200 (700 TFLOP/s, 50 GB/s) about
# two fifths of it. Peak rates stand for the computation: the most that a copy can be asked to keep up with.

HOST_ROOM = 0.5              # share of the host's free memory: pinned, it is lost to everybody else
NEVER = float("inf")


@dataclass(frozen=True)
class Link:
    """The link between a GPU and its host, and the rates on both sides of it."""

    bytes_per_s: float                       # each way
    flops_per_s: float                       # of the GPU, at most
    room_bytes: int                          # of the host's memory
    item: int                                # bytes of a number


@dataclass(frozen=True)
class Kind:
    """One kind of tensor that a block keeps."""

    name: str
    columns: int                             # numbers a token
    contraction: float                       # multiplications and additions per number, to compute it again


def link_of(hardware: Hardware, dtype: str) -> Link | str:
    """Return the link as it is known, for products in `dtype`; else why nothing can be planned with it."""
    if hardware.device != "cuda":
        return f"a {hardware.device} has no host beside it"
    if hardware.host_link_bytes_per_s is None or hardware.host_free_memory_bytes is None:
        return "the copy speed between this GPU and its host is unknown (`powertrain facts --measure` measures it)"
    flops_per_s = hardware.peak_flops_per_s.get(dtype) or hardware.datasheet_flops_per_s.get(dtype)
    if flops_per_s is None:
        return f"how fast this GPU computes in {dtype} is not known, and so what would hide a copy"
    room_bytes = int(HOST_ROOM * hardware.host_free_memory_bytes)
    return Link(hardware.host_link_bytes_per_s, flops_per_s, room_bytes, DTYPE_BYTES[dtype])


def block_flops(model: ModelFacts, lengths: Sequence[int]) -> tuple[float, float]:
    """Return the FLOPs of one block, forward and backward, on a pass of documents of these lengths."""
    forward = forward_flops(model, lengths, head_share=0.0)
    backward = training_flops(model, lengths, head_share=0.0) - forward
    return forward / model.layers, backward / (model.layers - lowest_layer(model))


def hidden_bytes(model: ModelFacts, tokens: int, link: Link) -> float:
    """Return the bytes that a block may send without a wait, of one document."""
    return link.bytes_per_s * min(block_flops(model, [tokens])) / link.flops_per_s


def sent_bytes(model: ModelFacts, saved: Mapping[str, str], tokens: int, link: Link) -> int:
    """Return the bytes that one block sends to the host."""
    return tokens * link.item * sum(kind.columns for kind in kinds_by_worth(model) if saved.get(kind.name) == "offload")


def waited_s(model: ModelFacts, saved: Mapping[str, str], lengths: Sequence[int], link: Link) -> float:
    """Return the seconds that a block waits for its copies, out and back, beyond what its computation hides."""
    copy_s = sent_bytes(model, saved, sum(lengths), link) / link.bytes_per_s
    return sum(max(0.0, copy_s - flops / link.flops_per_s) for flops in block_flops(model, lengths))


def added_s(model: ModelFacts, saved: Mapping[str, str], tokens: int, link: Link) -> float:
    """Return the seconds that a block takes longer on one document: for computing again, and for waiting."""
    return recompute_flops(model, tokens, saved, blocks=1) / link.flops_per_s + waited_s(model, saved, [tokens], link)


def kinds_by_worth(model: ModelFacts) -> list[Kind]:
    """Return the kinds of tensors that a block keeps; those to put away first come first."""
    parts = {linear.name: linear for linear in linears(model)}
    found = [Kind(name, parts[linear].outputs, parts[linear].inputs) for name, linear in PRODUCTS.items()]
    found += [Kind("mixed", model.heads * model.head_width, NEVER), Kind("normalised", 2 * model.width, NEVER)]
    return sorted(found, key=lambda kind: (kind.contraction, -kind.columns))


def lightest_that_fits(model: ModelFacts, workload: Workload, room_bytes: int, link: Link | None = None) -> Workload | None:
    """Return `workload` with as little put away as fits the room, with a `link` in the least time; None if nothing fits."""
    if link is None:
        return next((light for saved in _ladder(model) if (light := _fewest_blocks(model, workload, room_bytes, saved))), None)
    best, best_s = None, NEVER
    for block_s, saved in _ways(model, workload.block, link):
        if block_s >= best_s:
            break                            # one block of it takes as long as all of the best
        light = _fewest_blocks(model, workload, room_bytes, saved)
        if light is None or sent_bytes(model, saved, workload.block, link) * light.saved_blocks > link.room_bytes:
            continue
        if block_s * light.saved_blocks < best_s:
            best, best_s = light, block_s * light.saved_blocks
    return best


def _fewest_blocks(model: ModelFacts, workload: Workload, room_bytes: int, saved: Mapping[str, str]) -> Workload | None:
    """Return the workload with `saved` in as few blocks as fit; None if all of them are not enough."""
    def fits(count: int) -> bool:
        return total_bytes(model, replace(workload, saved=saved, saved_blocks=count)) <= room_bytes

    most = model.layers - lowest_layer(model)
    if not fits(most):
        return None
    return replace(workload, saved=saved, saved_blocks=1 + bisect_left(range(1, most), True, key=fits))


def _ladder(model: ModelFacts) -> Iterator[Mapping[str, str]]:
    """Yield more and more of the kinds that can be computed again."""
    saved: dict[str, str] = {}
    for kind in kinds_by_worth(model):
        if kind.contraction != NEVER:
            saved[kind.name] = "recompute"
            yield dict(saved)


def _ways(model: ModelFacts, tokens: int, link: Link) -> list[tuple[float, Mapping[str, str]]]:
    """Return (seconds that a block takes longer, what it does not keep), the shortest first; of equal ones what frees most."""
    kinds = kinds_by_worth(model)
    choices = [("keep", "offload") if kind.contraction == NEVER else ("keep", "offload", "recompute") for kind in kinds]
    found = []
    for actions in itertools.product(*choices):
        saved = {kind.name: action for kind, action in zip(kinds, actions, strict=True) if action != "keep"}
        freed = sum(kind.columns for kind in kinds if kind.name in saved)
        if saved:
            found.append((added_s(model, saved, tokens, link), -freed, saved))
    return [(block_s, saved) for block_s, _, saved in sorted(found, key=lambda way: way[:2])]
