"""The objective of a reward model: its loss and gradients against the formula, each document in a pass of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from powertrain.data.example import Compared, Example, collate
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.decoder import Decoder, give_reward_head
from powertrain.models.kernels.attention import sdpa_attention
from powertrain.records import IGNORE
from powertrain.techniques.packing import Packing
from powertrain.training.loop import evaluate, new_state, train
from powertrain.training.rewards import Reward
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

MakeSetup, MakePairs = Callable[..., Setup], Callable[..., Setup]
PAIRS = 7


def whole(ids: np.ndarray[Any, Any]) -> Example:
    return Example(ids, np.append(np.full(len(ids) - 1, IGNORE), ids[-1]))


def pair(draw: np.random.Generator) -> Compared:
    prompt = draw.integers(0, 50, int(draw.integers(1, 6)))
    first, second = (whole(np.concatenate([prompt, draw.integers(0, 50, int(draw.integers(2, 7)))])) for _ in range(2))
    return Compared(np.concatenate([first.inputs, second.inputs]), np.concatenate([first.targets, second.targets]),
                    documents=(first, second), shared=len(prompt), margin=float(draw.uniform(-1, 2)))


@pytest.fixture
def make_pairs(make_setup: MakeSetup) -> MakePairs:
    """A run of 7 pairs a step."""

    def make(objective: Reward, *, adapters: bool = False, micro_batch: int = PAIRS) -> Setup:
        plain, draw = make_setup(), np.random.default_rng(5)
        assert isinstance(plain.model, Decoder)
        give_reward_head(plain.model)
        with torch.no_grad():
            plain.model.head_weight.mul_(20)
        if adapters:
            add_adapters(plain.model, AdapterConfig(r=4, alpha=8.0))
        return replace(plain, examples=[pair(draw) for _ in range(3 * PAIRS)], train_batch_size=PAIRS,
                       micro_batch=micro_batch, attention=sdpa_attention, objective=objective)

    return make


def by_definition(setup: Setup, coefficient: float) -> Tensor:
    """The mean loss of the first 7 pairs, from the score of each document's last token."""
    losses = []
    for one in setup.examples[:PAIRS]:
        assert isinstance(one, Compared)
        chosen, rejected = (setup.model.logits(setup.model.hidden(collate([side])))[-1, 0] for side in one.documents)
        losses.append(-torch.log(torch.sigmoid(chosen - rejected - one.margin)) + coefficient * (chosen + rejected) ** 2)
    return torch.stack(losses).mean()


def gradients(setup: Setup, loss: Tensor) -> dict[str, Tensor]:
    trained = {name: weight for name, weight in setup.model.named_parameters() if weight.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


@pytest.mark.parametrize("shares", [False, True], ids=["each prompt twice", "each prompt once"])
@pytest.mark.parametrize("coefficient", [0.0, 0.3])
@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
def test_loss_and_gradients_are_the_formula_s(make_pairs: MakePairs, coefficient: float, shares: bool, adapters: bool) -> None:
    setup = make_pairs(Reward(center_rewards_coefficient=coefficient, shares_prompts=shares), adapters=adapters, micro_batch=3)
    loss = torch.stack([setup.batch_loss(batch) for batch in setup.passes(setup.examples[:PAIRS])]).sum() / PAIRS
    expected = by_definition(setup, coefficient)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    found, wanted = gradients(setup, loss), gradients(setup, expected)
    assert "head.weight" in found
    largest = max(float(value.abs().max()) for value in wanted.values())
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5 * largest, msg=name)


def test_the_documents_of_a_pair_do_not_see_each_other(make_pairs: MakePairs) -> None:
    setup = make_pairs(Reward())
    [batch] = setup.passes(setup.examples[:2])
    rows = setup.model.hidden(batch, **setup.kernels)
    rows.retain_grad()
    embedded = setup.model.embed(batch)
    assert embedded.shape[0] == sum(batch.lengths)
    setup.model.logits(rows)[sum(batch.lengths[:2]) - 1, 0].backward()       # the score of the first rejected document
    used = setup.model.embedding.weight.grad.abs().sum(1) > 0
    first, second = (set(tokens.tolist()) for tokens in batch.tokens.split(batch.lengths)[:2])
    assert set(used.nonzero().flatten().tolist()) <= second
    assert first - second, "the first document has tokens of its own, which have no gradient"


def test_every_split_gives_the_same_update_and_figures(make_pairs: MakePairs) -> None:
    found = []
    for micro_batch, change in ((PAIRS, None), (2, None), (PAIRS, Packing(tokens=40, multiple=1))):
        setup = make_pairs(Reward(), micro_batch=micro_batch)
        setup = setup if change is None else change.apply(setup)
        step = next(iter(train(setup, new_state(setup, 0.0), Schedule("constant", 1e-3, 1), 1.0)))
        found.append(([float(step.loss), float(step.grad_norm), *map(float, step.metrics.values())],
                      {name: weight.detach().clone() for name, weight in setup.model.named_parameters()}))
    for figures, weights in found[1:]:
        assert figures == pytest.approx(found[0][0], rel=1e-5)
        for name, weight in found[0][1].items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


def test_training_makes_the_chosen_answers_win(make_pairs: MakePairs) -> None:
    setup = make_pairs(Reward())
    before = evaluate(setup, setup.examples, tokens_per_byte=None)
    for _ in train(setup, new_state(setup, 0.0), Schedule("constant", 1e-2, 30), 1.0):
        pass
    after = evaluate(setup, setup.examples, tokens_per_byte=None)
    assert after.loss < 0.5 * before.loss
    assert (after.metrics["rewards_accuracies"], after.tokens) == (1.0, len(setup.examples))
    assert after.metrics["rewards_margins"] == pytest.approx(
        after.metrics["rewards_chosen"] - after.metrics["rewards_rejected"], rel=1e-4)
