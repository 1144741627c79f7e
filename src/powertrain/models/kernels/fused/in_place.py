"""A product that is added to a tensor in its place, in compiled code too."""

import torch
from torch import Tensor

OPERATORS = torch.library.Library("powertrain", "FRAGMENT")  # type: ignore[no-untyped-call]
OPERATORS.define("add_product_(Tensor(a!) y, Tensor a, Tensor b) -> ()")  # type: ignore[no-untyped-call]


@torch.library.impl(OPERATORS, "add_product_", "CUDA")
def _add_product(y: Tensor, a: Tensor, b: Tensor) -> None:
    y.addmm_(a, b)


@torch.library.register_fake("powertrain::add_product_", lib=OPERATORS)  # type: ignore[untyped-decorator]
def _add_no_product(y: Tensor, a: Tensor, b: Tensor) -> None:
    """Tell the compiler that only y changes."""


def plus_product(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return y (T, out) + a (T, R) b (R, out), in y where that spares the copy of y that torch.addmm makes.

    torch's compiler makes addmm of addmm_, so compiled code calls an operator that it does not know, which is there on a GPU.
    """
    if not torch.compiler.is_compiling():
        return y.addmm_(a, b)
    if not y.is_cuda:
        return torch.addmm(y, a, b)
    torch.ops.powertrain.add_product_(y, a, b)
    return y
