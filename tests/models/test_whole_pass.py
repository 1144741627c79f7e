"""A whole pass as two calls of our own kernel gives the loss and the gradients of the plain one and autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_fused_blocks import distance, make_batch, make_model
from test_one_call import TAKEN
from torch import Tensor

from adapted_models import make_base, with_adapter
from powertrain.models.decoder import Decoder, give_reward_head
from powertrain.models.kernels.attention import ragged_attention
from powertrain.models.kernels.block.model import Forward, WholePass
from powertrain.models.kernels.losses import token_loss
from powertrain.records import IGNORE, Batch, WrongUse

SCALE = 0.01


def with_ignored(batch: Batch) -> Batch:
    targets = batch.targets.clone()
    targets[::3] = IGNORE
    return replace(batch, targets=targets, trained_tokens=int((targets != IGNORE).sum()))


def plainly(model: Decoder, batch: Batch, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
        loss = token_loss(model, model.hidden(batch, attention=ragged_attention), batch.targets)
    (SCALE * loss).backward()
    return loss.item(), gradients_of(model)


def at_once(model: Decoder, batch: Batch, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    begun = Forward(WholePass(model), batch, dtype, SCALE)
    begun.backward()
    return begun.loss, gradients_of(model)


def gradients_of(model: Decoder) -> dict[str, Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def far(apart: dict[str, float], limit: float) -> dict[str, float]:
    return {name: distance for name, distance in apart.items() if not distance < limit}         # a NaN is not below anything


@pytest.mark.parametrize("family", TAKEN)
@pytest.mark.parametrize("vocabulary", [320, 65])                # 65: filled up to 66 for products in bf16
def test_every_family_has_the_loss_and_the_gradients_that_autograd_finds(family: str, vocabulary: int) -> None:
    model, batch = make_model(family, "full", vocabulary=vocabulary), with_ignored(make_batch(vocabulary=vocabulary))
    (loss, found), (expected, plain) = (run(model, batch, torch.float32) for run in (at_once, plainly))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert found.keys() == plain.keys() == dict(model.named_parameters()).keys()
    assert not far(distance(found, plain), 1e-5)


@pytest.mark.parametrize("family", TAKEN)
@pytest.mark.parametrize("vocabulary", [320, 65])
def test_bf16_is_no_further_from_fp32_than_autograd_in_bf16(family: str, vocabulary: int) -> None:
    model, batch = make_model(family, "full", vocabulary=vocabulary), with_ignored(make_batch(vocabulary=vocabulary))
    exact = plainly(model, batch, torch.float32)[1]
    ours, theirs = (distance(run(model, batch, torch.bfloat16)[1], exact) for run in (at_once, plainly))
    assert sum(ours.values()) <= 1.1 * sum(theirs.values())
    assert 0 < max(ours.values()) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lengths", "asked"), [((200, 61, 3), {"width": 172, "heads": 2, "vocabulary": 333}), ((1,), {}),
                                                ((100, 0, 41), {"tied_head": True, "vocabulary": 131})])
def test_sizes_that_fill_no_tile(lengths: tuple[int, ...], asked: dict[str, Any], dtype: torch.dtype) -> None:
    model = make_model("qwen2", "full", **asked)
    batch = make_batch(lengths, vocabulary=model.config.vocabulary)
    (loss, found), (expected, plain) = at_once(model, batch, dtype), plainly(model, batch, torch.float32)
    limit = 1e-5 if dtype is torch.float32 else 0.1
    assert loss == pytest.approx(expected, rel=limit)
    assert not far(distance(found, plain), limit)


@pytest.mark.parametrize("vocabulary", [320, 65])
def test_a_second_pass_adds_its_gradients_and_the_weights_keep_theirs_where_they_lie(vocabulary: int) -> None:
    model, batch = make_model("gpt2", "full", vocabulary=vocabulary), make_batch(vocabulary=vocabulary)
    _, once = at_once(model, batch, torch.bfloat16)
    places = []
    for _ in range(2):
        Forward(WholePass(model), batch, torch.bfloat16, SCALE).backward()
        places.append([parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None])
    assert places[0] == places[1]
    assert not far(distance(gradients_of(model), {name: 2 * value for name, value in once.items()}), 1e-6)


def test_the_same_pass_gives_the_same_bits() -> None:
    model, batch = make_model("llama", "full"), make_batch()
    (first, one), (second, two) = (at_once(model, batch, torch.bfloat16) for _ in range(2))
    assert first == second
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_without_a_target_loss_and_gradients_are_zero() -> None:
    model, batch = make_model("llama", "full"), make_batch()
    loss, found = at_once(model, replace(batch, targets=torch.full_like(batch.targets, IGNORE)), torch.bfloat16)
    assert loss == 0
    assert not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_what_has_no_row_is_refused(name: str) -> None:
    model, batch = make_model("llama", "full"), make_batch()
    with pytest.raises(IndexError, match="has no row"):
        Forward(WholePass(model), replace(batch, **{name: getattr(batch, name) + model.config.vocabulary}), torch.float32, 1.0)


def test_documents_beyond_learned_positions_are_refused() -> None:
    model = make_model("gpt2", "full", context=32)
    with pytest.raises(WrongUse, match="longer than the context"):
        Forward(WholePass(model), make_batch((33,)), torch.float32, 1.0)


def test_models_that_the_kernel_does_not_have_are_refused() -> None:
    rewards = make_model("llama", "full")
    give_reward_head(rewards)
    for model in (rewards, with_adapter(make_base("llama"))):
        with pytest.raises(WrongUse, match="cannot be one call"):
            WholePass(model)
