"""A block whose pass is one call of our own kernel gives what the plain one and autograd give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_fused_blocks import distance, gradients, make_batch, make_model
from torch import Tensor

from adapted_models import make_base, with_adapter
from powertrain.models.config import FAMILIES
from powertrain.models.decoder import Block, Decoder
from powertrain.models.kernels.attention import math_attention, ragged_attention
from powertrain.models.kernels.block.whole import OneCall
from powertrain.records import WrongUse

REFUSED = {"qwen3": "norms of queries and keys", "gpt_neox": "its residual is parallel"}
TAKEN = tuple(family for family in FAMILIES if family not in REFUSED)


class InOneCall:
    """As a technique runs the blocks."""

    def __init__(self, model: Decoder) -> None:
        self.blocks = [OneCall(block) for block in model.blocks if isinstance(block, Block)]

    def __call__(self, block: Block, index: int, *arguments: Any) -> Tensor:
        return self.blocks[index](*arguments)


@pytest.mark.parametrize("family", TAKEN)
def test_every_family_has_the_gradients_that_autograd_finds(family: str) -> None:
    model = make_model(family, "full")
    apart = distance(gradients(model, InOneCall(model), attention=ragged_attention), gradients(model, None))
    assert len(apart) > 8
    assert not {name: far for name, far in apart.items() if not far < 1e-5}         # a NaN is not below anything


@pytest.mark.parametrize("family", TAKEN)
def test_bf16_is_no_further_from_fp32_than_autograd_in_bf16(family: str) -> None:
    model = make_model(family, "full")
    exact = gradients(model, None)
    ours = distance(gradients(model, InOneCall(model), attention=ragged_attention, dtype=torch.bfloat16), exact)
    theirs = distance(gradients(model, None, attention=ragged_attention, dtype=torch.bfloat16), exact)
    assert sum(ours.values()) <= 1.1 * sum(theirs.values())
    assert 0 < max(ours.values()) < 0.1


# more than a tile of rows, columns, sums and tokens each, and none of them full; one token; a window shorter than a document
@pytest.mark.parametrize(("lengths", "asked"), [
    ((200, 61, 3), {"width": 172, "heads": 2, "mlp_width": 530, "layers": 1}), ((1,), {}), ((90, 2), {"window": 16}),
    ((33, 31), {"kv_heads": 1})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_that_fill_no_tile(lengths: tuple[int, ...], asked: dict[str, Any], dtype: torch.dtype) -> None:
    model = make_model("mistral", "full", **asked)
    found = gradients(model, InOneCall(model), attention=ragged_attention, dtype=dtype, batch=make_batch(lengths))
    apart = distance(found, gradients(model, None, batch=make_batch(lengths)))
    limit = 1e-5 if dtype is torch.float32 else 0.1
    assert not {name: far for name, far in apart.items() if not far < limit}


def test_the_same_pass_gives_the_same_bits_whatever_was_computed_before() -> None:
    model = make_model("gpt2", "full")
    run_block = InOneCall(model)
    first = gradients(model, run_block, attention=ragged_attention, dtype=torch.bfloat16)
    gradients(model, run_block, attention=ragged_attention, dtype=torch.bfloat16, batch=make_batch((60, 9)))
    again = gradients(model, run_block, attention=ragged_attention, dtype=torch.bfloat16)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_with_another_kernel_of_attention_a_block_runs_as_it_is() -> None:
    model = make_model("llama", "full")
    found = gradients(model, InOneCall(model), attention=math_attention)
    plain = gradients(model, None)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_a_pass_runs_backward_once() -> None:
    model = make_model("llama", "full")
    out = model(make_batch(), attention=ragged_attention, run_block=InOneCall(model)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs only once"):
        out.backward()


@pytest.mark.parametrize("family", REFUSED)
def test_blocks_that_the_kernel_does_not_have_are_refused(family: str) -> None:
    with pytest.raises(WrongUse, match=REFUSED[family]):
        InOneCall(make_model(family, "full"))


def test_blocks_with_dropout_are_refused() -> None:
    with pytest.raises(WrongUse, match="it has dropout"):
        InOneCall(make_model("gpt2", "full", dropout=0.1))


def test_biases_norms_and_empty_documents_over_more_than_one_tile() -> None:
    model = make_model("gpt2", "full", width=160, heads=2, context=128, layers=1)
    batch = make_batch((100, 0, 41))
    apart = distance(gradients(model, InOneCall(model), attention=ragged_attention, batch=batch),
                     gradients(model, None, batch=batch))
    assert not {name: far for name, far in apart.items() if not far < 1e-5}


def test_blocks_with_frozen_weights_are_refused() -> None:
    with pytest.raises(WrongUse, match="not all of its weights are trained"):
        InOneCall(with_adapter(make_base("llama")))
