"""Which linears of a decoder have adapters, and how many numbers these train. Loads no torch.

Users name modules as Hugging Face does (`q_proj`), while our q, k and v are one linear. So an adapter sits on a slot: some
rows of the output of one of our linears, with its own A and B in Hugging Face's shapes.
"""

import re
from dataclasses import dataclass

from powertrain.models.config import ModelConfig
from powertrain.models.huggingface.families import map_weights
from powertrain.records import WrongUse
from powertrain.shapes import linear_shapes

ALL_LINEAR = "all-linear"
KINDS = ("lora", "lslora")                    # see attached.py


@dataclass(frozen=True)
class AdapterConfig:
    """What is trained beside frozen weights; attached.py says what the numbers do. Raises WrongUse for impossible ones."""

    kind: str = "lora"
    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0                         # of each adapter's input
    target_modules: str | tuple[str, ...] = ALL_LINEAR     # Hugging Face's names, or as in PEFT one regular expression
    use_rslora: bool = False
    use_dora: bool = False
    sigma: float = 1.0                           # lslora
    regularisation: float = 0.01                 # lslora

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise WrongUse(f"there is no adapter of kind {self.kind!r}; the kinds are {', '.join(KINDS)}")
        if self.r < 1 or self.alpha <= 0 or not 0 <= self.dropout < 1 or self.sigma <= 0 or self.regularisation < 0:
            raise WrongUse(f"an adapter cannot have r={self.r}, alpha={self.alpha:g}, dropout={self.dropout:g}, "
                           f"sigma={self.sigma:g} and regularisation={self.regularisation:g}; r is at least 1, alpha and sigma "
                           f"are above 0, dropout is from 0 to below 1 and regularisation is not negative")
        if self.use_dora and self.kind != "lora":
            raise WrongUse(f"DoRA scales the rows of a matrix, and a {self.kind} adapter is no matrix; use lora.use_dora=false "
                           f"or lora.kind=lora")


@dataclass(frozen=True)
class Slot:
    """Rows of one of our linears, and the module that Hugging Face has for them."""

    linear: str              # "blocks.0.qkv"
    theirs: str              # "model.layers.0.self_attn.q_proj"
    first: int
    last: int
    in_features: int
    layout: str              # of their rows, as in families.yaml

    @property
    def name(self) -> str:
        """Return Hugging Face's short name of the module, such as "q_proj"."""
        return self.theirs.rpartition(".")[2]

    @property
    def layer(self) -> int:
        return int(self.linear.split(".")[1])


def find_slots(config: ModelConfig) -> tuple[Slot, ...]:
    """Return every place for an adapter: all linears of the blocks, and not the head, as PEFT has it for `all-linear`."""
    shapes = linear_shapes(config)
    slots = []
    for row in map_weights(config):
        linear, _, kind = row.ours.rpartition(".")
        shape = shapes.get(linear.rpartition(".")[2])
        if shape is None or kind != "weight":
            continue
        first = 0
        for theirs, rows in zip(row.theirs, row.sizes or (shape[0],), strict=True):
            slots.append(Slot(linear, theirs.removesuffix(".weight"), first, first + rows, shape[1], row.layout))
            first += rows
    return tuple(slots)


def find_targets(config: ModelConfig, targets: str | tuple[str, ...]) -> tuple[Slot, ...]:
    """Return the slots that `target_modules` names. Raises WrongUse for a name that no module has."""
    slots = find_slots(config)
    if targets == ALL_LINEAR:
        return slots
    patterns = [targets] if isinstance(targets, str) else targets
    if not patterns:
        raise WrongUse(f"lora.target_modules names nothing, so there is nothing to train; use {ALL_LINEAR}, or some of "
                       f"{', '.join(dict.fromkeys(slot.name for slot in slots))}")
    chosen = []
    for pattern in patterns:
        found = [slot for slot in slots if f".{slot.theirs}".endswith(f".{pattern}")]        # as PEFT does
        try:
            if not found and isinstance(targets, str):
                found = [slot for slot in slots if re.fullmatch(pattern, slot.theirs)]
        except re.error as error:
            raise WrongUse(f"lora.target_modules={pattern!r} is neither a module's name nor a regular expression "
                           f"({error})") from None
        if not found:
            names = ", ".join(dict.fromkeys(slot.name for slot in slots))
            raise WrongUse(f"{config.family} has no module {pattern!r} that can have an adapter; its modules are {names}, "
                           f"and {ALL_LINEAR} is all of them")
        chosen += found
    return tuple(slot for slot in slots if slot in chosen)


def count_adapter_parameters(config: ModelConfig, adapters: AdapterConfig) -> int:
    """Return how many numbers the adapters train, counted without building anything."""
    total = 0
    for slot in find_targets(config, adapters.target_modules):
        rows = slot.last - slot.first
        total += adapters.r * (slot.in_features + rows) + (rows if adapters.use_dora else 0)
        total += 5 if adapters.kind == "lslora" else 0          # four coefficients and sigma
    return total


def adapted_layers(config: ModelConfig, adapters: AdapterConfig) -> tuple[int, ...]:
    """Return the indices of the blocks that have adapters, in order."""
    return tuple(sorted({slot.layer for slot in find_targets(config, adapters.target_modules)}))
