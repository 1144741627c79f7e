"""Adapters on the decoder: which of its linears have them, and how they take part.

Users name modules as Hugging Face does (`q_proj`), while our q, k and v are one linear. So an adapter sits on a slot: some
rows of the output of a linear of ours, with its own A and B in Hugging Face's shapes. Whatever the adapter can compute comes
before the frozen product, whose output no gradient needs: activation checkpointing recomputes a block only up to the
last thing that is needed, and so never makes the product again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.models.adapters.kinds import KINDS, Adapter, Change, Rows, make_adapter
from powertrain.models.config import ModelConfig
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.weights import map_weights
from powertrain.models.linear import FrozenLinear, compute_dtype
from powertrain.records import WrongUse

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class AdapterConfig:
    """What is trained beside frozen weights; adapter_kinds.py says what the numbers do. Raises WrongUse for impossible ones."""

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
            raise WrongUse(f"DoRA scales the rows of a matrix, and a {self.kind} adapter is none; use lora.use_dora=false or "
                           f"lora.kind=lora")


@dataclass(frozen=True)
class Slot:
    """Rows of one of our linears, and the module that Hugging Face has for them."""

    linear: str              # "blocks.0.qkv"
    theirs: str              # "model.layers.0.self_attn.q_proj"
    first: int
    last: int
    in_features: int
    layout: str              # of their rows, as in weights.py

    @property
    def name(self) -> str:
        """Their short name: "q_proj"."""
        return self.theirs.rpartition(".")[2]

    @property
    def layer(self) -> int:
        return int(self.linear.split(".")[1])

    def is_called(self, name: str) -> bool:
        """Whether PEFT would find it by this name: the whole name, or the end of it."""
        return self.theirs == name or self.theirs.endswith("." + name)


def find_slots(config: ModelConfig) -> tuple[Slot, ...]:
    """Every place for an adapter: all linears of the blocks, and not the head, as PEFT has it for `all-linear`."""
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    inner = config.mlp_width * (2 if config.gated_mlp else 1)
    shapes = {"qkv": (queries + 2 * keys, config.width), "attention_out": (config.width, queries),
              "mlp_in": (inner, config.width), "mlp_out": (config.width, config.mlp_width)}
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
    """The slots that `target_modules` names. Raises WrongUse for a name that no module has."""
    slots = find_slots(config)
    if targets == ALL_LINEAR:
        return slots
    patterns = [targets] if isinstance(targets, str) else targets
    if not patterns:
        raise WrongUse(f"lora.target_modules names nothing, so there is nothing to train; use {ALL_LINEAR}, or some of "
                       f"{', '.join(dict.fromkeys(slot.name for slot in slots))}")
    chosen = []
    for pattern in patterns:
        found = [slot for slot in slots if slot.is_called(pattern)]
        if not found and isinstance(targets, str):
            found = [slot for slot in slots if matches(pattern, slot.theirs)]
        if not found:
            names = ", ".join(dict.fromkeys(slot.name for slot in slots))
            raise WrongUse(f"{config.family} has no module {pattern!r} that an adapter could sit on; its modules are {names}, "
                           f"and {ALL_LINEAR} is all of them")
        chosen += found
    return tuple(slot for slot in slots if slot in chosen)


def matches(pattern: str, name: str) -> bool:
    """Whether the regular expression is the whole name. Raises WrongUse if it is not a regular expression."""
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise WrongUse(f"lora.target_modules={pattern!r} is neither a module's name nor a regular expression "
                       f"({error})") from None


def count_adapter_parameters(config: ModelConfig, adapters: AdapterConfig) -> int:
    """Trained numbers, counted without building anything."""
    total = 0
    for slot in find_targets(config, adapters.target_modules):
        rows = slot.last - slot.first
        total += adapters.r * (slot.in_features + rows) + (rows if adapters.use_dora else 0)
        total += 5 if adapters.kind == "lslora" else 0          # four coefficients and sigma
    return total


def adapted_layers(config: ModelConfig, adapters: AdapterConfig) -> tuple[int, ...]:
    """Blocks that have adapters, in order."""
    return tuple(sorted({slot.layer for slot in find_targets(config, adapters.target_modules)}))


class AdaptedLinear(nn.Module):
    """A frozen linear and the adapters of its slots: (T, in) -> (T, out)."""

    def __init__(self, base: FrozenLinear, slots: tuple[Slot, ...], config: AdapterConfig) -> None:
        super().__init__()
        self.base, self.slots, self.config = base, slots, config
        self.adapters = nn.ModuleDict({slot.name: make_adapter(self.rows(slot), config) for slot in slots}).to(base.device)

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    def rows(self, slot: Slot) -> Rows:
        return Rows(self.base, slot.first, slot.last)

    def adapter(self, slot: Slot) -> Adapter:
        adapter = self.adapters[slot.name]
        assert isinstance(adapter, Adapter)
        return adapter

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x))           # once, and not once for each adapter
        changes: list[Change] = [self.adapters[slot.name](x, self.rows(slot)) for slot in self.slots]
        y: Tensor = self.base(x)
        pieces, done = [], 0
        for slot, change in zip(self.slots, changes, strict=True):
            pieces += [y[..., done:slot.first]] if slot.first > done else []
            pieces.append(self.changed(y[..., slot.first:slot.last], change, slot))
            done = slot.last
        pieces += [y[..., done:]] if done < self.base.out_features else []
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def changed(self, y: Tensor, change: Change, slot: Slot) -> Tensor:
        """The slot's part of the output, in the dtype of its part `y` of the frozen product."""
        if change.factor is None:
            return (y + change.added).to(y.dtype)
        bias = self.base.bias
        product = y if bias is None else y - bias[slot.first:slot.last]
        return (y + (change.factor - 1) * product + change.added).to(y.dtype)


def adapted_linears(model: nn.Module) -> Iterator[tuple[str, AdaptedLinear]]:
    """Each adapted linear with its name, in the model's order."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLinear))


def has_adapters(model: nn.Module) -> bool:
    return next(adapted_linears(model), None) is not None


def adapter_config(model: nn.Module) -> AdapterConfig:
    """What the model's adapters were made with. Raises WrongUse if it has none."""
    for _, module in adapted_linears(model):
        return module.config
    raise WrongUse("the model has no adapters; train it with method=lora or qlora, or load some with model.adapter=FOLDER")


def add_adapters(model: Decoder, config: AdapterConfig) -> None:
    """Freezes the model and puts adapters on it, in place; only they train. A is drawn with torch's global generator.

    Raises WrongUse for targets that the model does not have, and if it has adapters already.
    """
    if has_adapters(model):
        raise WrongUse("the model has adapters already, and they do not stack; merge them first, or train them further with "
                       "model.adapter=FOLDER")
    by_linear: dict[str, tuple[Slot, ...]] = {}
    for slot in find_targets(model.config, config.target_modules):
        by_linear[slot.linear] = (*by_linear.get(slot.linear, ()), slot)
    freeze(model)
    for name, slots in by_linear.items():
        base = model.get_submodule(name)
        assert isinstance(base, FrozenLinear)
        model.set_submodule(name, AdaptedLinear(base, slots, config))


def freeze(model: Decoder) -> None:
    """Nothing trains any more, and every linear may be stored in any dtype."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not isinstance(module, FrozenLinear):
            model.set_submodule(name, FrozenLinear.of(module))


def adapters_of(model: nn.Module) -> Iterator[tuple[Slot, Adapter]]:
    """Each adapter with its slot, in the model's order."""
    return ((slot, module.adapter(slot)) for _, module in adapted_linears(model) for slot in module.slots)


def adapter_penalty(model: nn.Module) -> Tensor | None:
    """() the sum of what the adapters add to the loss of a step, or None."""
    penalties = [penalty for _, adapter in adapters_of(model) if (penalty := adapter.penalty()) is not None]
    return torch.stack(penalties).sum() if penalties else None


def diagnose_adapters(model: nn.Module) -> dict[str, dict[str, float]]:
    """What each adapter has to say of itself, by Hugging Face's module name; nothing for linear ones."""
    return {slot.theirs: told for slot, adapter in adapters_of(model) if (told := adapter.diagnose())}


def merged(model: Decoder) -> Decoder:
    """A plain decoder with the adapters in its weights, computed in fp32 and kept in the base's dtype.

    Weights without adapters are shared with `model`, not copied.
    Raises WrongUse if there are no adapters, they are not matrices, or the base is quantised.
    """
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear) and module.weight is None:
            raise WrongUse(f"the base is quantised ({name} is), and merging into rounded weights would round "
                           f"the adapters away; load the unquantised base and merge into that (merge_into)")
    return merge_into(model, model)


@torch.no_grad()
def merge_into(base: Decoder, adapted: Decoder) -> Decoder:
    """The adapters of `adapted` in the weights of `base`, its unquantised twin, as a plain decoder; see `merged`.

    Raises WrongUse if the two do not have the same linears.
    """
    adapter_config(adapted)
    state = plain_state(base)
    for name, module in adapted_linears(adapted):
        key = f"{name}.weight"
        if key not in state or state[key].shape != (module.out_features, module.in_features):
            raise WrongUse(f"the adapters sit on a {name} of {module.out_features} x {module.in_features}, which this base "
                           f"does not have; merge into the base that they were trained on")
        weight = state[key].float().clone()
        for slot in module.slots:
            adapter = module.adapter(slot)
            weight[slot.first:slot.last] = adapter.merge(weight[slot.first:slot.last].to(adapter.A.device)).to(weight.device)
        state[key] = weight.to(state[key].dtype)
    with torch.device("meta"):
        plain = Decoder(base.config)
    plain.load_state_dict(state, assign=True)
    plain.base = base.base
    return plain.requires_grad_(True).train(base.training)


def plain_state(model: Decoder) -> dict[str, Tensor]:
    """The state of the model as if it had no adapters. The tensors are the model's own."""
    state: dict[str, Any] = model.state_dict()
    return {name.replace(".base.", "."): tensor for name, tensor in state.items() if ".adapters." not in name}
