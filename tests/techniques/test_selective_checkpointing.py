"""Checkpointing computes again what a gradient needs, and nothing else: counted in the operators that run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from kinds_of_runs import LORA, SIZES, make_ragged
from torch.utils._python_dispatch import TorchDispatchMode

from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.kernels.attention import Attention, bmm_attention, ragged_attention, sdpa_attention
from powertrain.techniques.activation_checkpointing import ActivationCheckpointing
from powertrain.techniques.packing import Packing
from powertrain.training.setup import Setup

DOWN = (SIZES["mlp_width"], SIZES["width"])  # mlp_out's matrix as a product sees it: (in, out)
UP = (SIZES["width"], 2 * SIZES["mlp_width"])
QKV = (SIZES["width"], 2 * SIZES["width"])
KINDS = {"full": None, "lora": LORA, "lslora": AdapterConfig(kind="lslora", r=4)}


class Counted(TorchDispatchMode):
    """Counts matrix products by the shape of their right factor, and attention by the name of its operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function.name().partition("::")[2]
        if name == "mm":
            self.counts[tuple(arguments[1].shape)] += 1
        if "attention" in name:
            self.counts["attention, backward" if "backward" in name else "attention"] += 1
        return function(*arguments, **(named or {}))


def counted_backward(setup: Setup) -> tuple[Counter[Any], list[torch.Tensor]]:
    """What runs in the backward pass of the first pass of a step, and the gradients."""
    torch.manual_seed(3)
    loss = setup.batch_loss(setup.prepare(0)[0])
    with Counted() as counted:
        loss.backward()  # type: ignore[no-untyped-call]
    return counted.counts, [p.grad for p in setup.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kernel", [bmm_attention, ragged_attention, sdpa_attention], ids=["bmm", "ragged", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_the_down_projection_are_never_computed_again(kind: str, kernel: Attention) -> None:
    def make() -> Setup:
        return replace(Packing(4096).apply(make_ragged(KINDS[kind])), attention=kernel)

    plain, expected = counted_backward(make())
    again, found = counted_backward(ActivationCheckpointing().apply(make()))
    assert plain["attention"] == again["attention"] == 0
    assert again["attention, backward"] == plain["attention, backward"] >= 2
    assert plain[DOWN] == again[DOWN] == 0
    assert again[UP] - plain[UP] == again[QKV] - plain[QKV] == 2         # each of the two blocks' once, and no product twice
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_attention_is_computed_again_where_that_is_asked_for() -> None:
    setup = replace(make_ragged(LORA), attention=bmm_attention)
    counts, _ = counted_backward(ActivationCheckpointing(keep_attention=False).apply(setup))
    assert counts["attention"] == 2


def test_dropout_draws_the_same_masks_again() -> None:
    """Attention that is kept would draw none, and all masks after it would be others; so with dropout it is computed again."""
    def make() -> Setup:
        return replace(make_ragged(family="gpt2", dropout=0.3, kv_heads=2), attention=bmm_attention)

    plain, expected = counted_backward(make())
    again, found = counted_backward(ActivationCheckpointing().apply(make()))
    assert plain["attention"] == 0
    assert again["attention"] == 2
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_an_adapters_dropout_is_drawn_again_beside_kept_attention() -> None:
    def make() -> Setup:
        return replace(make_ragged(replace(LORA, dropout=0.3)), attention=bmm_attention)

    _, expected = counted_backward(make())
    again, found = counted_backward(ActivationCheckpointing().apply(make()))
    assert again["attention"] == 0
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_blocks_below_the_lowest_trained_weight_are_not_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointed: list[int] = []
    original = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr("torch.utils.checkpoint.checkpoint",
                        lambda inner, block, index, *rest, **named: checkpointed.append(index) or original(
                            inner, block, index, *rest, **named))
    upper = replace(LORA, target_modules=r".*layers\.1\..*(q_proj|down_proj)")
    setup = replace(make_ragged(upper), attention=bmm_attention)
    runs: list[int] = []
    for index, block in enumerate(setup.model.get_submodule("blocks").children()):
        block.register_forward_pre_hook(lambda *_, index=index: runs.append(index))
    counted_backward(ActivationCheckpointing().apply(setup))
    assert runs == [0, 1, 1]
    assert checkpointed == [1]


def test_evaluation_checkpoints_nothing() -> None:
    setup = ActivationCheckpointing().apply(make_ragged(LORA))
    with torch.no_grad():
        assert not setup.batch_loss(setup.prepare(0)[0]).requires_grad
