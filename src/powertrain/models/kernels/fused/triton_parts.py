"""The halves of a block with their elementwise stretches as Triton kernels; what has no kernel runs as `Parts` has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from powertrain.models.kernels.fused import triton_kernels as kernels
from powertrain.models.kernels.fused.parts import Parts
from powertrain.models.kernels.fused.values import Normalised, NormWeights


@dataclass(frozen=True)
class TritonParts(Parts):
    """RMS norms with the residual, SwiGLU and rotary positions, forward and backward. Not to be compiled on top."""

    def _join_normalise(self, x: Tensor, branch: Tensor, seed: Tensor | None, norm: NormWeights,
                        dtype: torch.dtype) -> tuple[Tensor, Normalised, Tensor]:
        if self._is_rms(norm) and seed is None and not self.config.parallel_residual:
            joined, n, rates, h = kernels.normalise(x, branch, norm.weight, self.config.norm_epsilon, dtype)
            return joined, Normalised(n, rates), h
        return super()._join_normalise(x, branch, seed, norm, dtype)

    def _normalise(self, x: Tensor, norm: NormWeights, dtype: torch.dtype) -> tuple[Normalised, Tensor]:
        if not self._is_rms(norm):
            return super()._normalise(x, norm, dtype)
        _, n, rates, h = kernels.normalise(x, None, norm.weight, self.config.norm_epsilon, dtype)
        return Normalised(n, rates), h

    def _normalise_back(self, dx: Tensor, dh: Tensor, normalised: Normalised, norm: NormWeights) -> Tensor:
        if not self._is_rms(norm):
            return super()._normalise_back(dx, dh, normalised, norm)
        return kernels.normalise_back(dh, normalised.n, normalised.rate, norm.weight, dx)

    def _act(self, inner: Tensor) -> Tensor:
        return kernels.swiglu(inner) if self._is_swiglu else super()._act(inner)

    def _act_back(self, inner: Tensor, dact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return kernels.swiglu_back(inner, dact, dtype) if self._is_swiglu else super()._act_back(inner, dact, dtype)

    def _turn(self, x: Tensor, cosines: Tensor, sines: Tensor, dtype: torch.dtype) -> Tensor:
        return kernels.turn(x, cosines, sines, dtype)

    def _is_rms(self, norm: NormWeights) -> bool:
        return self.config.norm == "rms" and norm.bias is None

    @property
    def _is_swiglu(self) -> bool:
        return self.config.gated_mlp and self.config.activation == "silu"
