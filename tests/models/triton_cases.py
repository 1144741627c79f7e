"""Triton's kernels beside what they stand for, in a process where Triton interprets them: prints one JSON object.

Run by test_triton_kernels.py with TRITON_INTERPRET=1, which has to be there before Triton is loaded.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import FAMILIES, make_config
from powertrain.models.decoder import Block, Decoder
from powertrain.models.kernels.attention import math_attention
from powertrain.models.kernels.fused.block import Functions, HandWritten
from powertrain.models.kernels.fused.parts import NormWeights, Parts
from powertrain.models.kernels.fused.triton_kernels import TritonParts
from powertrain.models.kernels.losses import Terms, plain_rows
from powertrain.models.kernels.triton_losses import triton_rows
from powertrain.records import IGNORE, Batch

ROWS = (1, 5, 123)
VOCABULARY = 10_007          # more than the loss's kernel has at a time, and no multiple of it
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def apart(found: object, expected: object) -> float:
    """The largest difference of any tensor, over its largest number."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert found.shape == expected.shape, (found.shape, expected.shape)
        assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
        return float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-30))
    if expected is None:
        assert found is None
        return 0.0
    assert isinstance(expected, tuple)
    assert isinstance(found, tuple)
    return max((apart(one, other) for one, other in zip(found, expected, strict=True)), default=0.0)


def kernels(rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Widths that are no power of two; a head of which only a part is turned."""
    config = make_config("llama", vocabulary=50, layers=1, width=72, heads=3, context=256)[0]
    plain, ours = Parts(config), TritonParts(config)
    x, added, dx = (torch.randn(rows, 72) for _ in range(3))
    norm, dh = NormWeights(torch.randn(72)), torch.randn(rows, 72).to(dtype)
    inner, dact = torch.randn(rows, 2 * 1100).to(dtype), torch.randn(rows, 1100).to(dtype)
    heads = torch.randn(rows, 5, 24).to(dtype)[:, 1:4]       # a view, as queries among queries, keys and values
    angles = torch.randn(rows, 1, 8).repeat(1, 1, 2)
    tables = angles.cos(), angles.sin()
    normalised, _ = plain._normalise(x, norm, dtype)
    return {
        "normalise": apart(ours._normalise(x, norm, dtype), plain._normalise(x, norm, dtype)),
        "join": apart(ours._join_normalise(x, added.to(dtype), None, norm, dtype),
                      plain._join_normalise(x, added.to(dtype), None, norm, dtype)),
        "normalise_back": apart(ours._normalise_back(dx, dh, normalised, norm),
                                plain._normalise_back(dx, dh, normalised, norm)),
        "swiglu": apart(ours._act(inner), plain._act(inner).to(dtype)),
        "swiglu_back": apart(ours._act_back(inner, dact, dtype), plain._act_back(inner, dact, dtype)),
        "turn": apart(ours._turn(heads, *tables, dtype), plain._turn(heads, *tables, dtype)),
        "turn_back": apart(ours._turn(heads, tables[0], -tables[1], torch.float32),
                           plain._turn(heads, tables[0], -tables[1], torch.float32)),
    }


def losses(rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Rows of more logits than a program has at a time, one of them without a target; with the loss's terms and without."""
    targets = torch.randint(0, VOCABULARY, (rows,))
    targets[0] = VOCABULARY - 1
    targets[-1] = IGNORE if rows > 1 else 0
    logits, found = (4 * torch.randn(rows, VOCABULARY)).to(dtype), {}
    for name, terms in (("loss", None), ("loss with terms", Terms(0.1, 1e-3))):
        expected = plain_rows(logits.clone(), targets, terms, gradient=True, every=False)
        found[name] = apart(triton_rows(logits.clone(), targets, terms, gradient=True, every=False), expected)
        alone = triton_rows(logits.clone(), targets, terms, gradient=False, every=False)
        assert alone[1] is None
        found[name] = max(found[name], apart(alone[0], expected[0]))
    return found


def blocks(family: str, method: str) -> float:
    """The gradients of a whole model in fp32, each kind of block, beside the plain parts'."""
    torch.manual_seed(0)
    heads = {} if family in ("gpt2", "gpt_neox") else {"kv_heads": 1}
    model = Decoder(make_config(family, vocabulary=50, layers=2, width=48, heads=2, context=64, dropout=0.0, **heads)[0])
    for parameter in model.parameters():                     # norms at identity would hide what is left out of them
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    if method == "lora":
        add_adapters(model, AdapterConfig(r=4))
        for name, parameter in model.named_parameters():
            if name.endswith(".B"):
                torch.nn.init.normal_(parameter, std=0.1)
    lengths = (5, 1, 17)
    tokens = torch.randint(0, 50, (23,))
    batch = Batch(tokens, tokens, torch.cat([torch.arange(length) for length in lengths]), lengths, 23)
    found = []
    for parts in (TritonParts(model.config), Parts(model.config)):
        hand = [HandWritten(block, Functions.of(parts)) for block in model.blocks if isinstance(block, Block)]
        model.zero_grad(set_to_none=True)
        logits = model(batch, attention=math_attention, run_block=lambda _, index, *rest, hand=hand: hand[index](*rest))
        logits.square().mean().backward()
        found.append(tuple(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None))
    return apart(*found)


def main() -> None:
    torch.manual_seed(0)
    found = {f"{name} {rows} {kind}": value for kind, dtype in DTYPES.items() for rows in ROWS
             for name, value in (kernels(rows, dtype) | losses(rows, dtype)).items()}
    found |= {f"blocks of {family}, {method}": blocks(family, method) for family in FAMILIES for method in ("full", "lora")}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
