"""Documents that are packed together know nothing of each other, whichever kernel computes attention.

Document A is replaced by another; then neither a logit of document B nor a gradient of its loss may move by one bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from kinds_of_runs import LORA, make_ragged

from powertrain.data.example import Example
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.kernels.attention import (
    Attention,
    bmm_attention,
    find_varlen,
    math_attention,
    ragged_attention,
    sdpa_attention,
    varlen_attention,
)
from powertrain.records import Batch
from powertrain.techniques.bf16 import Bf16
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from powertrain.techniques.packing import Packing
from powertrain.training.setup import Setup
from powertrain.use.generation import CachedAttention

KERNELS: dict[str, Callable[[], Attention]] = {
    "math": lambda: math_attention, "bmm": lambda: bmm_attention, "ragged": lambda: ragged_attention,
    "sdpa": lambda: sdpa_attention, "cached": CachedAttention,
    "varlen": lambda: varlen_attention}
LENGTHS = (23, 37, 5)                        # A, B and a third; B lies in the middle
B = slice(23, 60)


@dataclass(frozen=True)
class Windowed:
    """The kernel, with the window that a model may have."""

    kernel: Attention
    window: int | None

    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        return self.kernel(*inputs, **(named | {"window": self.window}))


def packed(first_token: int) -> list[Example]:
    """Three documents, of which the first begins with another token and goes on differently."""
    draw = np.random.default_rng(9)
    documents = [draw.integers(0, 50, length + 1).astype(np.int64) for length in LENGTHS]
    documents[0] = (documents[0] + first_token) % 50
    return [Example(tokens[:-1].copy(), tokens[1:].copy()) for tokens in documents]


def look(setup: Setup, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """B's logits, the gradients of B's loss in all that is trained, and in what the blocks read."""
    setup.model.zero_grad()
    read: list[torch.Tensor] = []
    hook = setup.model.get_submodule("embedding").register_forward_hook(
        lambda module, inputs, output: read.append(output.detach().requires_grad_()) or read[0])
    with setup.precision.context(setup.device):
        hidden = setup.model.hidden(batch, attention=setup.attention, run_block=setup.run_block)
        logits = setup.model.logits(hidden)
        targets = torch.full_like(batch.targets, -100)
        targets[B] = batch.targets[B]
        setup.loss(setup.model, hidden, targets).backward()
    hook.remove()
    gradients = [p.grad.clone() for p in setup.model.parameters() if p.requires_grad and p.grad is not None]
    assert gradients
    assert read[0].grad is not None
    return logits[B].detach().clone(), gradients, read[0].grad


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("adapters", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("kernel", KERNELS)
def test_another_document_moves_no_logit_and_no_gradient(kernel: str, window: int | None, adapters: AdapterConfig | None,
                                                         half: bool) -> None:
    if kernel == "varlen" and not (torch.cuda.is_available() and find_varlen() and half):
        pytest.skip("varlen attention needs a CUDA GPU and half precision: not tried here")
    setup = ChunkedCrossEntropy(16).apply(Packing(tokens=100).apply(make_ragged(adapters, family="llama")))
    setup = Bf16().apply(setup) if half else setup
    if kernel == "varlen":
        setup = replace(setup, model=setup.model.cuda(), device=torch.device("cuda"))
    looks = []
    for first_token in (0, 17):
        batch = setup.collate(packed(first_token)).to(setup.device)
        assert batch.lengths == LENGTHS
        looks.append(look(replace(setup, attention=Windowed(KERNELS[kernel](), window)), batch))
    (logits, gradients, read), (other_logits, other_gradients, other_read) = looks
    assert torch.equal(logits, other_logits)
    for one, other in zip(gradients, other_gradients, strict=True):
        assert torch.equal(one, other)
    for gradient in (read, other_read):
        assert not gradient[:B.start].any()                              # A and the third have no part in B's loss
        assert not gradient[B.stop:].any()
        assert gradient[B].any()
    assert torch.equal(read, other_read)


def test_what_a_cache_held_of_another_document_is_not_seen() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 20, 4, 16).unbind(0)
    outputs = []
    for stale in (1.0, -50.0):
        cache = CachedAttention()
        options = {"layer": 0, "dropout": 0.0, "window": None, "scale": 0.25}
        cache(*(torch.full((60, 4, 16), stale) for _ in range(3)), (60,), **options)  # type: ignore[arg-type]
        cache.tokens = 0                     # another document begins
        pieces = []
        for first, last in ((0, 12), (12, 13), (13, 20)):
            pieces.append(cache(q[first:last], k[first:last], v[first:last], (last - first,), **options))  # type: ignore[arg-type]
            cache.tokens = last
        outputs.append(torch.cat(pieces))
    assert torch.equal(*outputs)
    torch.testing.assert_close(outputs[0], math_attention(q, k, v, (20,), layer=0, dropout=0.0, window=None, scale=0.25),
                               atol=1e-5, rtol=1e-5)
