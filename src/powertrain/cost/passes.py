"""How much goes into one forward pass: what suits the device, and what fits its memory."""

from __future__ import annotations

from collections.abc import Mapping

from powertrain.cost.memory import peak_memory
from powertrain.cost.padding import longest_of
from powertrain.cost.workload import Workload
from powertrain.records import DataFacts, Hardware, ModelFacts

CPU_TOKENS = 4096            # 2048 to 4096 were fastest on the CPUs measured
GPU_TOKENS = 32768           # large enough for full-speed products; memory usually decides first
ROOM = 0.5                   # share of the free memory that a pass may count on; what is free may be taken by others
PLANNED_SHARE = 0.8          # of the free memory: what a plan may count on for a whole step
COMPARED = 9                 # examples of the larger pass that memory is compared with


def planned_room_bytes(hardware: Hardware) -> int:
    """Memory of the device that a plan may count on for a whole step."""
    return int(PLANNED_SHARE * hardware.free_memory_bytes)


def wanted_tokens(hardware: Hardware) -> int:
    """The tokens of a pass that this kind of device likes best."""
    return CPU_TOKENS if hardware.device == "cpu" else GPU_TOKENS


def longest_example(data: DataFacts) -> int:
    """Tokens of the longest example."""
    return max(data.max_length, data.block)


def memory_of_examples(model: ModelFacts, tokens: int) -> tuple[int, int]:
    """Peak bytes of a step whose passes have one example of `tokens`, and what each further example of a pass adds.

    In fp32, with attention that keeps no scores.
    """
    # a batch of several passes either way, so that the difference is that of the passes alone
    one = Workload(2 * COMPARED, tokens, micro_batch=1, attention_saves_scores=False)
    several = Workload(2 * COMPARED, tokens, micro_batch=COMPARED, attention_saves_scores=False)
    first_bytes, several_bytes = (sum(peak_memory(model, workload).values()) for workload in (one, several))
    return first_bytes, max(1, (several_bytes - first_bytes) // (COMPARED - 1))


def fitting_tokens(model: ModelFacts, hardware: Hardware, example_tokens: int) -> int:
    """How many tokens of examples that have `example_tokens` each fit in one pass."""
    first_bytes, example_bytes = memory_of_examples(model, example_tokens)
    return max(0, int(ROOM * hardware.free_memory_bytes) - first_bytes) // example_bytes * example_tokens


def padded_examples(model: ModelFacts, data: DataFacts, hardware: Hardware) -> int:
    """How many examples suit a padded pass: in memory each may be the longest there is; in time, as a pass usually comes."""
    longest, target = longest_example(data), wanted_tokens(hardware)
    fit = fitting_tokens(model, hardware, longest) // longest
    if data.kind == "blocks" or not data.length_quantiles:
        return max(1, min(target // data.block, fit))
    suit = max((count for count in range(1, data.train_batch_size + 1)
                if count * longest_of(data.length_quantiles, count) <= target), default=1)
    return max(1, min(suit, fit))


def will_pack(model: ModelFacts, data: DataFacts, pins: Mapping[str, object]) -> bool:
    """Whether examples are packed without padding, so that nothing else decides what goes into a pass."""
    return can_pack(model, data) and pins.get("packing") != "off" and pins.get("micro_batch", "off") == "off"


def can_pack(model: ModelFacts, data: DataFacts) -> bool:
    """Whether there are examples of unequal lengths, and a model that reads them without padding."""
    return model.provider == "native" and data.kind != "blocks"
