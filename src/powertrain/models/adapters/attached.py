"""Adapters on the decoder: their kinds, and how those of a linear take part in its product.

What is trained beside a frozen matrix W (out, in), whose rows it changes:

  lora     W x + s B A x, with A (r, in) and B (out, r), s = alpha / r           Hu et al. 2021
           use_rslora: s = alpha / sqrt(r), so that a larger r learns faster     Kalajdzievski 2023
           use_dora: the rows of W + s B A are scaled to trained magnitudes      Liu et al. 2024
  lslora   W x + s B phi(tanh(A x / sigma)), phi(x) = a0 + a1 x + a2 sin(pi x) + a3 cos(pi x): a learned function
           between the two matrices, one for each adapted module, which starts as the identity. `regularisation` x
           |a - identity|^2 of each module is added to the loss of a step. Not a matrix any more, so it cannot be merged.

A kind is a class, a line in `CLASSES` and a name in targets.KINDS. B starts at zero, so a new adapter changes nothing.

Whatever an adapter can compute comes before the frozen product, whose output no gradient needs: activation checkpointing
recomputes a block only up to the last thing that is needed, and so never computes the product again.
"""

import math
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.models.adapters.targets import AdapterConfig, Slot, find_targets
from powertrain.models.decoder import Decoder
from powertrain.models.kernels.frozen import FrozenLinear, compute_dtype, frozen_product
from powertrain.records import WrongUse

IDENTITY = (0.0, 1.0, 0.0, 0.0)


class Rows(NamedTuple):
    """The rows of a frozen linear that one adapter changes."""

    linear: FrozenLinear
    first: int
    last: int

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the weights of these rows, (out, in), in `dtype`."""
        return self.linear.matrix(dtype)[self.first:self.last]


class Change(NamedTuple):
    """What becomes of a frozen product y = W x + b: factor * (y - b) + b + added. A factor of None is 1."""

    added: Tensor                        # (T, out)
    factor: Tensor | None = None         # (out,) fp32

    def apply(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product `y` with this change applied, in the dtype of `y`."""
        if self.factor is None:
            return (y + self.added).to(y.dtype)
        product = y if bias is None else y - bias
        return (y + (self.factor - 1) * product + self.added).to(y.dtype)


class Adapter(nn.Module):
    """What every kind has: A and B, dropout on its own copy of the input, and a scale."""

    kind: ClassVar[str]

    def __init__(self, rows: Rows, config: AdapterConfig) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(config.r, rows.linear.in_features))
        self.B = nn.Parameter(torch.zeros(rows.last - rows.first, config.r))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.dropout = config.dropout
        self.scale = config.alpha / (math.sqrt(config.r) if config.use_rslora else config.r)

    def forward(self, x: Tensor, rows: Rows) -> Change:
        """Return the change for the input x (T, in), which is in the dtype to compute in."""
        raise NotImplementedError

    def merge(self, weight: Tensor) -> Tensor:
        """Return the matrix (out, in) fp32 that replaces `weight` and the adapter. Raises WrongUse where there is none."""
        raise NotImplementedError

    def tensors(self) -> dict[str, nn.Parameter]:
        """Return the parameters to store, by the end of their names in a PEFT file."""
        return {"lora_A.weight": self.A, "lora_B.weight": self.B}

    def penalty(self) -> Tensor | None:
        """Return the () penalty that is added to the loss of a step; None where there is none."""
        return None

    def diagnose(self) -> dict[str, float]:
        """Return the measurements worth watching while the adapter trains, by name."""
        return {}

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def up(self, inner: Tensor) -> Tensor:
        """Return the product of `inner` (T, r) and B, scaled: (T, out)."""
        return F.linear(inner * self.scale, self.B.to(inner.dtype))


class Lora(Adapter):
    """A product of two small matrices."""

    kind = "lora"

    def forward(self, x: Tensor, rows: Rows) -> Change:
        del rows
        return Change(self.up(F.linear(self.dropped(x), self.A.to(x.dtype))))

    def merge(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.B @ self.A)


class Dora(Lora):
    """LoRA that turns the rows of W, with their lengths trained apart.

    The lengths of the turned rows count as constants in the backward pass, as in the paper's section 4.3 and in PEFT.
    """

    def __init__(self, rows: Rows, config: AdapterConfig) -> None:
        super().__init__(rows, config)
        self.magnitude = nn.Parameter(torch.linalg.vector_norm(rows.matrix(torch.float32), dim=1).to(self.A.device))

    def factor(self, weight: Tensor) -> Tensor:
        """Return the factors (out,) fp32 by which the turned rows of `weight` (out, in) are multiplied."""
        with torch.no_grad():
            lengths = torch.linalg.vector_norm(super().merge(weight.float()), dim=1)
        factor: Tensor = self.magnitude / lengths
        return factor

    def forward(self, x: Tensor, rows: Rows) -> Change:
        with torch.autocast(x.device.type, enabled=False):
            factor = self.factor(rows.matrix(torch.float32))
        x_dropped = self.dropped(x)
        added = factor * self.up(F.linear(x_dropped, self.A.to(x.dtype)))
        if not self.dropout or not self.training:
            return Change(added, factor)
        # PEFT lets dropout act on the whole change, also on that of W's rows: they meet another x than the base does
        return Change(added + (factor - 1) * frozen_product(x_dropped, None, rows.matrix))

    def merge(self, weight: Tensor) -> Tensor:
        return self.factor(weight)[:, None] * super().merge(weight)

    def tensors(self) -> dict[str, nn.Parameter]:
        return super().tensors() | {"lora_magnitude_vector": self.magnitude}


class LsLora(Adapter):
    """LoRA with a learned Fourier function between A and B, computed in fp32."""

    kind = "lslora"

    def __init__(self, rows: Rows, config: AdapterConfig) -> None:
        super().__init__(rows, config)
        self.a = nn.Parameter(torch.tensor(IDENTITY))
        # its logarithm is what is trained, so that no step can carry sigma through zero
        self.log_sigma = nn.Parameter(torch.tensor(math.log(config.sigma)))
        self.regularisation = config.regularisation

    def phi(self, inner: Tensor) -> Tensor:
        """Apply the learned function to each element of A x."""
        x = torch.tanh(inner / self.log_sigma.exp())
        a0, a1, a2, a3 = self.a
        out: Tensor = a0 + a1 * x + a2 * torch.sin(math.pi * x) + a3 * torch.cos(math.pi * x)
        return out

    def forward(self, x: Tensor, rows: Rows) -> Change:
        del rows
        inner = F.linear(self.dropped(x), self.A.to(x.dtype))
        return Change(self.up(self.phi(inner.float()).to(x.dtype)))

    def merge(self, weight: Tensor) -> Tensor:
        raise WrongUse("an LS-LoRA adapter cannot be merged: it puts a non-linear function between its matrices, and no "
                       "single matrix computes that; keep base and adapter apart, or train with lora.kind=lora")

    def tensors(self) -> dict[str, nn.Parameter]:
        return super().tensors() | {"lora_fourier": self.a, "lora_log_sigma": self.log_sigma}

    def penalty(self) -> Tensor | None:
        if not self.regularisation:
            return None
        return self.regularisation * (self.a - torch.tensor(IDENTITY, device=self.a.device)).square().sum()

    def diagnose(self) -> dict[str, float]:
        """Return `deviation` (|a - identity|), `non_linearity` (the two waves' amplitude) and `sigma` (small ones saturate)."""
        a = self.a.detach().cpu().double()   # in this order: MPS has no float64
        identity = torch.tensor(IDENTITY, dtype=a.dtype)
        return {"deviation": float((a - identity).norm()), "non_linearity": float(a[2:].norm()),
                "sigma": float(self.log_sigma.detach().exp())}


CLASSES: dict[str, type[Adapter]] = {kind.kind: kind for kind in (Lora, LsLora)}       # for each of targets.KINDS


# ------------------------------------------------------------------------------------------------ a linear and its adapters


class AdaptedLinear(nn.Module):
    """A frozen linear and the adapters of its slots: (T, in) -> (T, out)."""

    def __init__(self, base: FrozenLinear, slots: tuple[Slot, ...], config: AdapterConfig) -> None:
        super().__init__()
        self.base, self.slots, self.config = base, slots, config
        kind = Dora if config.use_dora else CLASSES[config.kind]     # A is drawn on the CPU with torch's global generator
        self.adapters = nn.ModuleDict({slot.name: kind(self.rows(slot), config) for slot in slots})
        if base.device.type != "cpu":        # where they are drawn, so that they are the same on any device
            self.adapters.to(base.device)

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
            bias = self.base.bias[slot.first:slot.last] if change.factor is not None and self.base.bias is not None else None
            pieces.append(change.apply(y[..., slot.first:slot.last], bias))
            done = slot.last
        pieces += [y[..., done:]] if done < self.base.out_features else []
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def adapted_linears(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Return each adapted linear by its name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def has_adapters(model: nn.Module) -> bool:
    return bool(adapted_linears(model))


def adapter_config(model: nn.Module) -> AdapterConfig:
    """Return the config that the model's adapters were made with. Raises WrongUse if it has none."""
    for module in adapted_linears(model).values():
        return module.config
    raise WrongUse("the model has no adapters; train it with method=lora or qlora, or load some with model.adapter=FOLDER")


def add_adapters(model: Decoder, config: AdapterConfig) -> None:
    """Freeze the model and put adapters on it, in place; only they train. A is drawn with torch's global generator.

    Raises WrongUse for targets that the model does not have, and if it has adapters already.
    """
    if has_adapters(model):
        raise WrongUse("the model has adapters already, and cannot take more; merge them first, or train them further with "
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
    """Freeze all weights, and make every linear a FrozenLinear, which may be stored in any dtype.

    The head of a reward model stays as it is and is trained, in fp32: a new one has learned nothing yet.
    """
    model.requires_grad_(False)
    trained = model.head if model.config.rewards else None
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not isinstance(module, FrozenLinear) and module is not trained:
            model.set_submodule(name, FrozenLinear.of(module))
    if trained is not None:
        trained.float().requires_grad_(True)


def adapters_of(model: nn.Module) -> Iterator[tuple[Slot, Adapter]]:
    """Return each adapter with its slot, in the model's order."""
    return ((slot, module.adapter(slot)) for module in adapted_linears(model).values() for slot in module.slots)


def penalty_of(model: nn.Module) -> Tensor | None:
    """Return the () sum of what regularised adapters add to the loss of an optimizer step, or None."""
    penalties = [penalty for _, adapter in adapters_of(model) if (penalty := adapter.penalty()) is not None]
    return torch.stack(penalties).sum() if penalties else None


def measure_adapters(model: nn.Module) -> dict[str, dict[str, float]]:
    """Return the measurements of adapters with a learned function, by Hugging Face's module name and then by measurement."""
    return {slot.theirs: told for slot, adapter in adapters_of(model) if (told := adapter.diagnose())}


def merged(model: Decoder) -> Decoder:
    """Return a plain decoder with the adapters in its weights, computed in fp32 and kept in the base's dtype.

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
    """Return a plain decoder: `base`, the unquantised twin of `adapted`, with the adapters in its weights; see `merged`.

    Raises WrongUse if the two do not have the same linears.
    """
    adapter_config(adapted)
    state = plain_state(base)
    for name, module in adapted_linears(adapted).items():
        key = f"{name}.weight"
        rows, columns = module.base.out_features, module.base.in_features
        if key not in state or state[key].shape != (rows, columns):
            raise WrongUse(f"the adapters sit on a {name} of {rows} x {columns}, which this base does not have; merge into the "
                           f"base that they were trained on")
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
    """Return the state of the model as if it had no adapters. The tensors are the model's own."""
    state: dict[str, Any] = model.state_dict()
    return {name.replace(".base.", "."): tensor for name, tensor in state.items() if ".adapters." not in name}
