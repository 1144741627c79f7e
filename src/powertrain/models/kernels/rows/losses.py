"""The loss of rows by our own kernel; see rows.h."""

import ctypes

import torch
from torch import Tensor

from powertrain.models.kernels.losses import Terms
from powertrain.models.kernels.rows.parts import call


class TermsOf(ctypes.Structure):
    """As rows.h declares it."""

    _fields_ = [("label_smoothing", ctypes.c_float), ("z_loss", ctypes.c_float)]


def cpp_rows(logits: Tensor, targets: Tensor, terms: Terms | None, *, gradient: bool,
             every: bool) -> tuple[Tensor, Tensor | None]:
    """Compute what losses.plain_rows does, of logits in fp32 or bf16, whose place their gradient takes."""
    del every                                # a negative target is seen as it is read
    logits, targets = logits.contiguous(), targets.contiguous()
    losses = torch.empty(len(logits) if terms is None else (3, len(logits)))
    if not call("score", logits.dtype, *logits.shape, targets, None if terms is None else TermsOf(*terms),
                ctypes.c_float(gradient), logits, losses):
        raise IndexError(f"a target is beyond the {logits.shape[1]} tokens that there are logits of")
    return losses, logits if gradient else None
