"""Objectives that compare answers: losses and gradients against the papers' formulas, pair by pair, and what a pass sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.data.example import Compared, Example, collate
from powertrain.evidence.profile import profile_steps
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.decoder import Decoder
from powertrain.models.kernels.attention import sdpa_attention
from powertrain.models.kernels.losses import token_scores
from powertrain.recipe import resolve
from powertrain.records import IGNORE, WrongUse
from powertrain.run.material import check_shape
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from powertrain.techniques.packing import Packing
from powertrain.training.checkpoint import load_checkpoint, save_checkpoint
from powertrain.training.comparing import Comparing, StartingWeights
from powertrain.training.loop import State, StepResult, evaluate, new_state, train
from powertrain.training.objectives import objective_of
from powertrain.training.preferences import Dpo, Kto, Orpo, Simpo
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

MakeSetup = Callable[..., Setup]
MakePairs = Callable[..., Setup]
DPO_LOSSES = list(Dpo.settings["loss_type"].choices)
PAIRS = [*(Dpo(beta=0.3, loss_type=name) for name in DPO_LOSSES), Dpo(label_smoothing=0.1),
         Dpo(loss_type="robust", label_smoothing=0.2),
         Dpo(rpo_alpha=0.7), Orpo(beta=0.2), Simpo(beta=2.0), Simpo(beta=1.5, label_smoothing=0.1, cpo_alpha=0.5)]
RATED = [Kto(beta=0.4), Kto(desirable_weight=1.3, undesirable_weight=0.7), Kto(loss_type="apo_zero_unpaired")]


def document(draw: np.random.Generator, prompt: np.ndarray[Any, Any]) -> Example:
    ids = np.concatenate([prompt, draw.integers(0, 50, int(draw.integers(2, 7)))])
    targets = ids[1:].copy()
    targets[:len(prompt) - 1] = IGNORE
    return Example(ids[:-1], targets)


def compared(draw: np.random.Generator, rated: bool) -> Compared:
    prompt = draw.integers(0, 50, int(draw.integers(1, 6)))
    first, second = document(draw, prompt), document(draw, prompt)
    if rated:
        return Compared(first.inputs, first.targets, documents=(first, second), desirable=bool(draw.integers(0, 2)))
    return Compared(np.concatenate([first.inputs, second.inputs]), np.concatenate([first.targets, second.targets]),
                    documents=(first, second), shared=len(prompt) - 1)


@pytest.fixture
def make_pairs(make_setup: MakeSetup) -> MakePairs:
    """A run of 7 pairs, or rated answers, a step; its weights have moved away from the reference's."""

    def make(objective: Comparing, *, adapters: bool = False, moved: bool = True, **changes: Any) -> Setup:
        plain, draw = make_setup(), np.random.default_rng(5)
        examples = [compared(draw, objective.rows == "rating") for _ in range(21)]
        assert isinstance(plain.model, Decoder)
        if adapters:
            add_adapters(plain.model, AdapterConfig(r=4, alpha=8.0))
        setup = replace(plain, examples=examples, train_batch_size=7, micro_batch=7, attention=sdpa_attention,
                        objective=objective.for_model(plain.model), **changes)
        if moved:
            draws = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for weight in plain.model.parameters():
                    if weight.requires_grad:
                        weight.add_(torch.randn(weight.shape, generator=draws), alpha=0.05)
        return setup

    return make


def score(model: Decoder, one: Example, *, prompt_too: bool = False) -> tuple[Tensor, int]:
    """The log-probability of a document's targets, computed on its own; with `prompt_too` of all of its tokens."""
    logits = model(collate([one])).log_softmax(-1)
    targets = np.append(one.inputs[1:], one.targets[-1])
    kept = np.full(len(targets), True) if prompt_too else one.targets != IGNORE
    return logits[np.arange(len(kept))[kept], targets[kept]].sum(), int(kept.sum())


def by_definition(setup: Setup) -> Tensor:
    """The mean loss of the first 7 examples in the words of the papers, each document in a pass of its own."""
    objective, model = setup.objective, setup.model
    assert isinstance(model, Decoder)
    assert isinstance(objective, Comparing)
    examples = [one for one in setup.examples[:7] if isinstance(one, Compared)]
    own = [[score(model, side) for side in one.documents] for one in examples]
    base = own
    if isinstance(objective.reference, StartingWeights):
        with torch.no_grad(), objective.reference.in_place(model):
            base = [[score(model, side) for side in one.documents] for one in examples]
    whole = [score(model, one.documents[0], prompt_too=isinstance(objective, Orpo)) for one in examples]
    nll = -sum(logp for logp, _ in whole) / sum(count for _, count in whole)
    ratios = [[logp - ref.detach() for (logp, _), (ref, _) in zip(*sides, strict=True)]
              for sides in zip(own, base, strict=True)]
    if isinstance(objective, Kto):
        kl = 0.0 if objective.loss_type != "kto" else max(0.0, float(sum(other.detach() for _, other in ratios)) / 7)
        return torch.stack([
            objective.desirable_weight * (1 - torch.sigmoid(objective.beta * (ratio - kl))) if one.desirable else
            objective.undesirable_weight * (1 - torch.sigmoid(objective.beta * (kl - ratio)))
            for one, (ratio, _) in zip(examples, ratios, strict=True)]).mean()
    means = [[logp / count for logp, count in sides] for sides in own]
    if isinstance(objective, Orpo):
        odds = [torch.log(torch.exp(c) / (1 - torch.exp(c)) / (torch.exp(r) / (1 - torch.exp(r)))) for c, r in means]
        return nll - objective.beta * torch.stack([torch.log(torch.sigmoid(one)) for one in odds]).mean()
    if isinstance(objective, Simpo):
        margins = [objective.beta * c - objective.beta * r - objective.simpo_gamma for c, r in means]
        smooth = objective.label_smoothing
        losses = [-(1 - smooth) * torch.log(torch.sigmoid(m)) - smooth * torch.log(torch.sigmoid(-m)) for m in margins]
        return torch.stack(losses).mean() + objective.cpo_alpha * nll
    assert isinstance(objective, Dpo)
    lengths = [[count for _, count in sides] for sides in own]
    return torch.stack([dpo(objective, c, r, *count) for (c, r), count in zip(ratios, lengths, strict=True)]).mean() + \
        objective.rpo_alpha * nll


def dpo(objective: Dpo, c: Tensor, r: Tensor, chosen: int, rejected: int) -> Tensor:
    """One pair's loss from the log ratios of its answers, which have so many tokens."""
    beta, smooth, sigmoid, log = objective.beta, objective.label_smoothing, torch.sigmoid, torch.log
    right, wrong = sigmoid(beta * (c - r)), sigmoid(beta * (r - c))
    flipped = smooth or 1e-3
    blend = sigmoid(beta * (c - r) / 0.05)
    return {
        "sigmoid": lambda: -(1 - smooth) * log(right) - smooth * log(wrong),
        "hinge": lambda: F.relu(1 - beta * (c - r)),
        "ipo": lambda: (c / chosen - r / rejected - 1 / (2 * beta)) ** 2,
        "robust": lambda: ((1 - smooth) * -log(right) - smooth * -log(wrong)) / (1 - 2 * smooth),
        "exo_pair": lambda: right * log(right / (1 - flipped)) + wrong * log(wrong / flipped),
        "nca_pair": lambda: -log(sigmoid(beta * c)) - log(sigmoid(-beta * c)) / 2 - log(sigmoid(-beta * r)) / 2,
        "bco_pair": lambda: -log(sigmoid(beta * c)) - log(sigmoid(-beta * r)),
        "sppo_hard": lambda: (c - 1 / (2 * beta)) ** 2 + (r + 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: 1 - sigmoid(beta * c) + sigmoid(beta * r),
        "apo_down": lambda: sigmoid(beta * c) + 1 - right,
        "discopop": lambda: (1 - blend) * -log(right) + blend * torch.exp(-beta * (c - r)),
        "sigmoid_norm": lambda: -log(sigmoid(beta * (c / chosen - r / rejected))),
    }[objective.loss_type]()


def gradients(setup: Setup, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, weight in setup.model.named_parameters() if weight.requires_grad]
    found = torch.autograd.grad(loss, [setup.model.get_parameter(name) for name in names])
    return dict(zip(names, found, strict=True))


def batch_mean(setup: Setup) -> Tensor:
    """The mean loss of the first 7 examples as the loop computes it."""
    batches = setup.settled(setup.passes(setup.examples[:7]))
    return torch.stack([setup.batch_loss(batch) for batch in batches]).sum() / 7


# ------------------------------------------------------------------------------------------------ the papers' formulas


@pytest.mark.parametrize("chunks", [None, 5])
@pytest.mark.parametrize("objective", PAIRS + RATED, ids=repr)
def test_loss_and_gradients_are_the_papers(make_pairs: MakePairs, objective: Comparing, chunks: int | None) -> None:
    setup = make_pairs(objective)
    if chunks:
        setup = ChunkedCrossEntropy(chunks).apply(setup)
    found, expected = batch_mean(setup), by_definition(setup)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    ours, theirs = gradients(setup, found), gradients(setup, expected)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("frozen", [False, True])
def test_scores_in_chunks_are_those_of_all_logits(make_pairs: MakePairs, rows: int, frozen: bool) -> None:
    setup = make_pairs(Dpo(), adapters=frozen)
    batch = setup.batch_of(setup.examples[:7])
    factors = torch.randn(batch.trained_tokens, generator=torch.Generator().manual_seed(0))
    found = []
    for scores in (token_scores, ChunkedCrossEntropy(rows).scores, ChunkedCrossEntropy(rows, "cpp").scores):
        hidden = setup.model.hidden(batch, **setup.kernels)
        of_targets = scores(setup.model, hidden, batch.targets, batch.trained_tokens)
        found.append((of_targets, gradients(setup, (of_targets * factors).sum())))
    for chunked in found[1:]:
        torch.testing.assert_close(chunked[0], found[0][0], rtol=1e-5, atol=1e-5)
        for name, gradient in found[0][1].items():
            torch.testing.assert_close(chunked[1][name], gradient, rtol=1e-4, atol=1e-5)


def test_before_the_first_step_the_model_is_its_reference(make_pairs: MakePairs) -> None:
    setup = make_pairs(Dpo(), moved=False)
    assert batch_mean(setup).item() == pytest.approx(math.log(2), rel=1e-6)
    sums = setup.sums(setup.prepare(0)[0])
    assert sums["rewards_margins"].item() == pytest.approx(0, abs=1e-5)
    assert set(sums) == {"loss", *setup.objective.metrics}


# ------------------------------------------------------------------------------------------------ what a pass sees


def hidden_gradient(setup: Setup, batch: Any, rows: slice) -> Tensor:
    """The size of the gradient that these rows' scores have at each token's embedding."""
    assert isinstance(setup.model, Decoder)
    found: list[Tensor] = []
    handle = setup.model.embedding.register_forward_hook(lambda module, inputs, out: found.append(out.requires_grad_()) or out)
    from powertrain.training.comparing import target_scores

    targets, _ = target_scores(setup.model, batch, setup.kernels, setup.loss)
    handle.remove()
    (gradient,) = torch.autograd.grad(targets[rows].sum(), found[0])
    return gradient.abs().sum(-1)


@pytest.mark.parametrize("shares", [False, True])
def test_the_documents_of_a_pair_do_not_see_each_other(make_pairs: MakePairs, shares: bool) -> None:
    setup = make_pairs(Dpo(shares_prompts=shares))
    pair = next(one for one in setup.examples if isinstance(one, Compared) and one.shared > 1)
    batch = setup.batch_of([setup.examples[0], pair, setup.examples[1]])
    first, second = batch.lengths[2:4]
    start = sum(batch.lengths[:2])
    document = batch.comparison.document
    of_chosen, of_rejected = (torch.nonzero(document == number).flatten() for number in (2, 3))
    for rows, own in ((of_chosen, range(start, start + first)), (of_rejected, range(start + first, start + first + second))):
        sizes = hidden_gradient(setup, batch, slice(int(rows[0]), int(rows[-1]) + 1))
        prompt = range(start, start + pair.shared) if shares else ()
        outside = [place for place in range(len(sizes)) if place not in own and place not in prompt]
        assert float(sizes[outside].abs().max()) == 0.0          # exactly
        assert bool((sizes[list(own)][:-1] > 0).any())
        assert all(float(sizes[place]) > 0 for place in prompt)


@pytest.mark.parametrize("objective", [Dpo(beta=0.3), Dpo(rpo_alpha=0.5), Orpo(), Simpo(beta=2.0)], ids=repr)
def test_a_shared_prompt_changes_nothing_but_the_work(make_pairs: MakePairs, objective: Comparing) -> None:
    plain, shares = make_pairs(objective), make_pairs(replace(objective, shares_prompts=True))
    expected, found = batch_mean(plain), batch_mean(shares)
    tokens = [sum(setup.batch_of(setup.examples[:7]).lengths) for setup in (plain, shares)]
    assert tokens[0] - tokens[1] == sum(one.shared for one in plain.examples[:7])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    ours = gradients(shares, found)
    for name, gradient in gradients(plain, expected).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("objective", [Dpo(rpo_alpha=0.5), Orpo(), Simpo(cpo_alpha=1.0), Kto()], ids=repr)
@pytest.mark.parametrize("change", [lambda setup: replace(setup, micro_batch=2), Packing(30).apply,
                                    Packing(32, multiple=32).apply], ids=["micro-batches", "packing", "filled"])
def test_every_split_gives_the_same_update(
        make_pairs: MakePairs, objective: Comparing, change: Callable[[Setup], Setup]) -> None:
    whole, split = make_pairs(objective), change(make_pairs(objective))
    assert len(split.prepare(0)) > 1
    expected, found = (go_on(setup, new_state(setup, 0.0), 3) for setup in (whole, split))
    losses = [torch.stack([step.loss for step in steps]) for steps in (found, expected)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)
    for name in expected[0].metrics:
        torch.testing.assert_close(found[-1].metrics[name], expected[-1].metrics[name], rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------ the reference


def go_on(setup: Setup, state: State, to: int) -> list[StepResult]:
    steps = train(setup, state, Schedule("constant", 1e-2, 30), 1.0)
    return [next(steps) for _ in range(to - state.step)]


def test_with_new_adapters_the_reference_is_the_base(make_pairs: MakePairs, make_setup: MakeSetup) -> None:
    setup, base = make_pairs(Dpo(), adapters=True), make_setup().model
    assert isinstance(setup.objective, Dpo)
    assert isinstance(setup.objective.reference, StartingWeights)
    batch = collate([setup.examples[0].documents[0]])
    assert not torch.allclose(setup.model(batch), base(batch))
    before = {name: weight.clone() for name, weight in setup.model.named_parameters()}
    with torch.no_grad(), setup.objective.reference.in_place(setup.model):
        torch.testing.assert_close(setup.model(batch), base(batch), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(weight, before[name]) for name, weight in setup.model.named_parameters())
    copied = sum(copy.numel() for copy in setup.objective.reference.copies.values())
    assert copied < 0.5 * sum(map(torch.numel, before.values()))


@pytest.mark.parametrize("objective", [Dpo(), Orpo(), Simpo(beta=2.0), Kto()], ids=repr)
def test_training_makes_the_chosen_answers_win(make_pairs: MakePairs, objective: Comparing) -> None:
    setup = make_pairs(objective, moved=False)
    results = go_on(setup, new_state(setup, 0.0), 30)
    assert float(results[-1].loss) < float(results[0].loss)
    assert float(results[-1].metrics["rewards_accuracies"]) > 0.9
    assert float(results[-1].metrics["rewards_margins"]) > float(results[0].metrics["rewards_margins"])


def test_runs_resume_bit_for_bit_and_evaluate(make_pairs: MakePairs, tmp_path: Path) -> None:
    whole = make_pairs(Dpo(), moved=False)
    state = new_state(whole, 0.0)
    go_on(whole, state, 2)
    saved = save_checkpoint(tmp_path, state)
    expected = [float(step.loss) for step in go_on(whole, state, 5)]
    other = make_pairs(Dpo(), moved=False)
    resumed = new_state(other, 0.0)
    load_checkpoint(saved, resumed)
    assert [float(step.loss) for step in go_on(other, resumed, 5)] == expected
    found = evaluate(whole, whole.examples, tokens_per_byte=None)
    assert found.tokens == 21
    assert found.loss < math.log(2)
    assert found.metrics["rewards_accuracies"] > 0.5
    assert set(found.metrics) == set(whole.objective.metrics)


def test_stored_scores_take_the_place_of_the_reference(make_pairs: MakePairs) -> None:
    setup = make_pairs(Dpo(beta=0.3))
    expected = batch_mean(setup).item()
    assert isinstance(setup.objective, Dpo)
    assert isinstance(setup.objective.reference, StartingWeights)
    with torch.no_grad(), setup.objective.reference.in_place(setup.model):
        stored = [replace(one, reference=tuple(float(score(setup.model, side)[0]) for side in one.documents))
                  for one in setup.examples]
    with_stored = replace(setup, examples=stored, objective=Dpo(beta=0.3))
    assert batch_mean(with_stored).item() == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------------------------------------------------ in a recipe


def test_a_recipe_names_them_by_trls_names() -> None:
    assert objective_of(resolve("default", ["objective=dpo", "objective.loss_type=ipo", "objective.beta=0.5"]).recipe) == \
        Dpo(beta=0.5, loss_type="ipo")
    assert objective_of(resolve("default", ["objective=kto", "objective.desirable_weight=1.5"]).recipe) == \
        Kto(desirable_weight=1.5)
    assert objective_of(resolve("default", ["objective=simpo", "objective.simpo_gamma=1.0"]).recipe) == Simpo(simpo_gamma=1.0)


@pytest.mark.parametrize(("words", "said"), [
    (["objective=dpo", "objective.beta=0"], "1e-06 or more"),
    (["objective=dpo", "objective.loss_type=sigmod"], "use one of sigmoid"),
    (["objective=dpo", "objective.loss_type=hinge", "objective.label_smoothing=0.1"], "no place in the hinge loss"),
    (["objective=dpo", "objective.gamma=1"], "no setting 'gamma'"),
    (["objective=simpo", "objective.gamma=1"], "did you mean simpo_gamma")])
def test_wrong_settings_say_what_to_use(words: list[str], said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        objective_of(resolve("default", words).recipe)


def test_training_from_scratch_and_other_models_than_decoders_are_refused(facts: Any) -> None:
    with pytest.raises(WrongUse, match="dpo compares answers of a trained model; name one"):
        check_shape(resolve(None, ["objective=dpo"]).recipe)         # before any data is read
    assert "decoders" in (Dpo().why_not(replace(facts.model, method="full", task="seq2seq")) or "")
    assert Dpo().why_not(replace(facts.model, method="full")) is None


@pytest.mark.parametrize("chunks", [0, 3])
def test_a_step_of_compared_answers_is_profiled(make_pairs: MakePairs, chunks: int) -> None:
    setup = ChunkedCrossEntropy(chunks).apply(make_pairs(Dpo())) if chunks else make_pairs(Dpo())
    found = profile_steps(setup, new_state(setup, 0.1), 0, 1, 1.0, marks_attention=True)
    assert found["loss"] > 0
    assert found["products"] > 0
