"""The kinds of adapters: what is trained beside a frozen matrix W (out, in), whose rows they change.

  lora     W x + s B A x, with A (r, in) and B (out, r), s = alpha / r           Hu et al. 2021
           use_rslora: s = alpha / sqrt(r), so that a larger r learns faster     Kalajdzievski 2023
           use_dora: the rows of W + s B A are scaled to trained magnitudes      Liu et al. 2024
  lslora   W x + s B phi(tanh(A x / sigma)), phi(x) = a0 + a1 x + a2 sin(pi x) + a3 cos(pi x): a learned function
           between the two matrices, one for each adapted module, which starts as the identity. `regularisation` x
           |a - identity|^2 of each module is added to the loss of a step. Not a matrix any more, so it cannot be merged.

A kind is a class, a line in `CLASSES` and a name in targets.KINDS. B starts at zero, so a new adapter changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.linear import FrozenLinear, frozen_product
from powertrain.records import WrongUse

IDENTITY = (0.0, 1.0, 0.0, 0.0)


@dataclass(frozen=True)
class Rows:
    """The rows of a frozen linear that one adapter changes."""

    linear: FrozenLinear
    first: int
    last: int

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """(out, in) of these rows."""
        return self.linear.matrix(dtype)[self.first:self.last]


class Change(NamedTuple):
    """What becomes of a frozen product y = W x + b: factor * (y - b) + b + added. A factor of None is 1."""

    added: Tensor                        # (T, out)
    factor: Tensor | None = None         # (out,) fp32


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
        """x (T, in), in the dtype to compute in."""
        raise NotImplementedError

    def merge(self, weight: Tensor) -> Tensor:
        """The matrix (out, in) fp32 that does what `weight` and the adapter do. Raises WrongUse where there is none."""
        raise NotImplementedError

    def tensors(self) -> dict[str, nn.Parameter]:
        """What is stored, by the end of its name in a PEFT file."""
        return {"lora_A.weight": self.A, "lora_B.weight": self.B}

    def penalty(self) -> Tensor | None:
        """() what is added to the loss of a step."""
        return None

    def diagnose(self) -> dict[str, float]:
        """What one would look at while it trains, by name."""
        return {}

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def up(self, inner: Tensor) -> Tensor:
        """(T, r) -> (T, out), scaled."""
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
        """(out,) fp32: what the turned rows of `weight` (out, in) are multiplied by."""
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
        """The function of A x, element by element."""
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
                       "single matrix does what they do; keep base and adapter apart, or train with lora.kind=lora")

    def tensors(self) -> dict[str, nn.Parameter]:
        return super().tensors() | {"lora_fourier": self.a, "lora_log_sigma": self.log_sigma}

    def penalty(self) -> Tensor | None:
        if not self.regularisation:
            return None
        return self.regularisation * (self.a - torch.tensor(IDENTITY, device=self.a.device)).square().sum()

    def diagnose(self) -> dict[str, float]:
        """`deviation`: |a - identity|. `non_linearity`: the amplitude of the two waves. `sigma`: small ones saturate."""
        a = self.a.detach().double().cpu()
        identity = torch.tensor(IDENTITY, dtype=a.dtype)
        return {"deviation": float((a - identity).norm()), "non_linearity": float(a[2:].norm()),
                "sigma": float(self.log_sigma.detach().exp())}


CLASSES: dict[str, type[Adapter]] = {kind.kind: kind for kind in (Lora, LsLora)}       # for each of targets.KINDS


def make_adapter(rows: Rows, config: AdapterConfig) -> Adapter:
    """A new adapter, on the CPU; A is drawn with torch's global generator."""
    kind = Dora if config.use_dora else CLASSES[config.kind]
    return kind(rows, config)
