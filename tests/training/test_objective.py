"""Objectives: settings of next-token prediction against plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from powertrain.data.example import Example, collate, collate_padded
from powertrain.data.order import pass_seed
from powertrain.models.decoder import Decoder
from powertrain.models.kernels.losses import token_loss
from powertrain.recipe import Recipe, resolve
from powertrain.records import IGNORE, Batch, Facts, NotApplied, Proposal, Refusal, WrongUse
from powertrain.techniques.activation_checkpointing import ActivationCheckpointing
from powertrain.techniques.bf16 import Bf16
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from powertrain.techniques.cuda_graph import CudaGraph
from powertrain.techniques.micro_batch import MicroBatch
from powertrain.training.checkpoint import load_checkpoint, save_checkpoint
from powertrain.training.loop import State, StepResult, evaluate, new_state, train
from powertrain.training.objective import Objective
from powertrain.training.objectives import NEXT_TOKEN, NextToken, embedding_noise, objective_of
from powertrain.training.replayed_passes import lay_out, shape_of, static_sums
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

MakeSetup = Callable[..., Setup]
BOTH = NextToken(label_smoothing=0.1, z_loss=1e-2)
ON = [NextToken(label_smoothing=0.1), NextToken(z_loss=1e-2), BOTH]


def go_on(setup: Setup, state: State, to: int) -> list[StepResult]:
    steps = train(setup, state, Schedule("constant", 1e-2, 8), 1.0)
    return [next(steps) for _ in range(to - state.step)]


def plain_formula(logits: Tensor, targets: Tensor, objective: NextToken) -> dict[str, Tensor]:
    """Means over the targets that train, from all logits, in the words of the definitions."""
    logits, targets = logits[targets != IGNORE], targets[targets != IGNORE]
    log_probabilities = logits.log_softmax(-1)
    plain = -log_probabilities[torch.arange(len(targets)), targets].mean()
    uniform = -log_probabilities.mean(-1).mean()
    z = objective.z_loss * logits.exp().sum(-1).log().pow(2).mean()
    s = objective.label_smoothing
    return {"loss": (1 - s) * plain + s * uniform + z, "cross_entropy": plain, "z_loss": z}


@pytest.mark.parametrize("rows", [None, 1, 5, 1000])
@pytest.mark.parametrize("objective", ON, ids=str)
def test_terms_of_the_loss_are_their_definitions(make_setup: MakeSetup, objective: NextToken, rows: int | None) -> None:
    """All logits at once, and in chunks of awkward sizes: loss, metrics and every gradient."""
    setup, other = replace(make_setup(), objective=objective), make_setup()
    setup = setup if rows is None else ChunkedCrossEntropy(rows).apply(setup)
    batch = setup.prepare(0)[0]
    sums = setup.sums(batch)
    expected = plain_formula(other.model(batch), batch.targets, objective)
    assert set(sums) == {"loss", *objective.metrics}
    for name, value in sums.items():
        torch.testing.assert_close(value / batch.trained_tokens, expected[name], rtol=1e-5, atol=1e-6)
    (sums["loss"] / batch.trained_tokens).backward()
    expected["loss"].backward()
    for one, two in zip(setup.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)


def test_label_smoothing_is_that_of_transformers(setup: Setup) -> None:
    smoother = pytest.importorskip("transformers.trainer_pt_utils").LabelSmoother(epsilon=0.1)
    batch = setup.prepare(0)[0]
    expected = smoother({"logits": setup.model(batch)[None]}, batch.targets[None])
    found = replace(setup, objective=NextToken(label_smoothing=0.1)).batch_loss(batch) / batch.trained_tokens
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [None, 7])
def test_recorded_passes_have_the_same_terms(make_setup: MakeSetup, rows: int | None) -> None:
    setup = replace(make_setup(), objective=BOTH, micro_batch=5)
    setup = setup if rows is None else ChunkedCrossEntropy(rows).apply(setup)
    batches = setup.prepare(0)
    shape = shape_of(batches)
    found, expected = static_sums(setup, lay_out(batches[0], shape), shape), setup.sums(batches[0])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", [Bf16().apply, ActivationCheckpointing(1).apply, MicroBatch(3).apply],
                         ids=["bf16", "checkpointing", "several passes"])
def test_techniques_leave_the_objective_as_it_is(make_setup: MakeSetup, change: Callable[[Setup], Setup]) -> None:
    plain, changed = (replace(make_setup(), objective=BOTH) for _ in range(2))
    expected, found = (go_on(setup, new_state(setup, 0.1), 3) for setup in (plain, change(changed)))
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one.loss, two.loss, rtol=1e-2, atol=0)
        assert set(one.metrics) == {"cross_entropy", "z_loss"}
        for name, value in two.metrics.items():
            torch.testing.assert_close(one.metrics[name], value, rtol=1e-2, atol=0)


def test_metrics_are_means_over_the_step_and_off_there_are_none(make_setup: MakeSetup) -> None:
    (step,) = go_on(replace(make_setup(), objective=BOTH, micro_batch=3), new_state(make_setup(), 0.1), 1)
    whole = make_setup()
    batch = whole.prepare(0)[0]
    with torch.no_grad():
        expected = plain_formula(whole.model(batch), batch.targets, BOTH)
    assert float(step.metrics["cross_entropy"]) == pytest.approx(float(expected["cross_entropy"]), rel=1e-5)
    assert float(step.metrics["z_loss"]) == pytest.approx(float(expected["z_loss"]), rel=1e-4)
    (plain,) = go_on(make_setup(), new_state(make_setup(), 0.1), 1)
    assert plain.metrics == {}


def test_off_is_plain_cross_entropy_bit_for_bit(make_setup: MakeSetup) -> None:
    setup = make_setup()
    assert setup.objective is NEXT_TOKEN == NextToken(0.0, 0.0, 0.0)
    batch = setup.prepare(0)[0]
    logits = setup.model(batch).float()
    assert torch.equal(setup.batch_loss(batch), nn.functional.cross_entropy(logits, batch.targets, reduction="sum"))
    torch.manual_seed(pass_seed(setup.seed, 0, batch.place))
    random = torch.get_rng_state()           # as the step's one pass begins: it draws nothing
    go_on(setup, new_state(setup, 0.1), 1)
    assert torch.equal(torch.get_rng_state(), random)


def test_evaluation_is_plain_cross_entropy_whatever_is_trained(make_setup: MakeSetup) -> None:
    setup = make_setup()
    expected = evaluate(setup, setup.examples, tokens_per_byte=None).loss
    noisy = replace(setup, objective=NextToken(0.2, 0.1, 5.0))
    assert evaluate(noisy, setup.examples, tokens_per_byte=None).loss == expected


# ------------------------------------------------------------------------------------------------ noise on embeddings


@torch.no_grad()
def embedded(model: Decoder, batch: Batch, alpha: float) -> Tensor:
    """The noise alone."""
    with embedding_noise(model, batch, alpha):
        found: Tensor = model.embedding(batch.tokens)
    return found - model.embedding(batch.tokens)


def test_noise_is_uniform_within_alpha_over_the_root_of_length_and_width(make_setup: MakeSetup) -> None:
    model = make_setup(width=128).model
    lengths = (400, 25, 3)
    examples = [Example(np.zeros(length, np.int64), np.zeros(length, np.int64)) for length in lengths]
    noise = embedded(model, collate(examples), alpha=5.0)
    for part, length in zip(noise.split(lengths), lengths, strict=True):
        largest = 5.0 / (length * 128) ** 0.5
        assert 0.9 * largest < float(part.abs().max()) <= largest * (1 + 1e-5)
        assert float(part.std()) == pytest.approx(largest / 3**0.5, rel=0.1)     # of a uniform distribution
    assert not torch.equal(model.embedding(collate(examples).tokens), noise + 1)
    assert not model.embedding._forward_hooks


def test_noise_is_that_of_transformers_where_documents_are_padded(make_setup: MakeSetup) -> None:
    """Its hook draws within alpha / sqrt(padded length x width) too: the same distribution from another draw."""
    model = make_setup(width=64).model
    examples = [Example(np.zeros(length, np.int64), np.zeros(length, np.int64)) for length in (9, 30)]
    noise = embedded(model, collate_padded(examples), alpha=10.0)
    assert float(noise.abs().max()) <= 10.0 / (30 * 64) ** 0.5 * (1 + 1e-5)
    assert float(noise.std()) == pytest.approx(10.0 / (30 * 64) ** 0.5 / 3**0.5, rel=0.05)


def test_noise_that_a_model_would_not_get_is_an_error(make_setup: MakeSetup) -> None:
    model = make_setup().model
    with pytest.raises(WrongUse, match="does not call its input embedding"), \
            embedding_noise(model, collate([Example(np.zeros(3, np.int64), np.zeros(3, np.int64))]), 5.0):
        pass


def test_noise_is_for_training_alone_and_follows_the_seed(make_setup: MakeSetup) -> None:
    def losses(objective: Objective) -> list[float]:
        setup = replace(make_setup(), objective=objective)
        torch.manual_seed(9)
        return [float(step.loss) for step in go_on(setup, new_state(setup, 0.1), 3)]

    assert losses(NextToken(embedding_noise=5.0)) == losses(NextToken(embedding_noise=5.0)) != losses(NEXT_TOKEN)
    setup = replace(make_setup(), objective=NextToken(embedding_noise=5.0))
    setup.model.eval()
    batch = setup.prepare(0)[0]
    assert torch.equal(setup.batch_loss(batch), setup.batch_loss(batch))
    setup.model.train()
    assert not torch.equal(setup.batch_loss(batch), setup.batch_loss(batch))


def test_with_noise_a_run_goes_on_bit_for_bit(make_setup: MakeSetup, tmp_path: Path) -> None:
    def make() -> Setup:
        return replace(make_setup(), objective=NextToken(0.1, 1e-3, 5.0))

    torch.manual_seed(9)
    whole = make()
    state = new_state(whole, 0.1)
    go_on(whole, state, 2)
    saved = save_checkpoint(tmp_path, state)
    expected = [float(step.loss) for step in go_on(whole, state, 5)]
    torch.manual_seed(1)
    other = make()
    resumed = new_state(other, 0.1)
    load_checkpoint(saved, resumed)
    assert [float(step.loss) for step in go_on(other, resumed, 5)] == expected


def test_a_recording_is_refused_with_noise(gpu_facts: Callable[..., Facts]) -> None:
    from powertrain.cost.workload import Workload
    from powertrain.techniques.base import PlannedRun

    facts = gpu_facts()
    workload = Workload(14, 12, 14, device="cuda")
    noisy = Recipe.model_validate({"objective": {"name": "next_token", "embedding_noise": 5}})
    refused, plain = (CudaGraph.propose(PlannedRun.of(facts, recipe, workload)) for recipe in (noisy, Recipe()))
    assert isinstance(refused, Refusal)
    assert refused.possible is None
    assert isinstance(plain, Proposal) or plain.possible is not None


# ------------------------------------------------------------------------------------------------ in a recipe


def test_a_recipe_sets_it_by_our_names_and_by_others() -> None:
    ours = resolve("default", ["objective.label_smoothing=0.1", "objective.embedding_noise=5", "objective.z_loss=1e-4"]).recipe
    assert objective_of(ours) == NextToken(0.1, 1e-4, 5)
    theirs = resolve("default", ["label_smoothing_factor=0.1", "neftune_noise_alpha=5"]).recipe
    assert objective_of(theirs) == NextToken(0.1, 0.0, 5)
    assert objective_of(resolve("default", ["label_smoothing_factor=0"]).recipe) == NEXT_TOKEN


@pytest.mark.parametrize(("words", "said"), [
    (["objective=next_tokn"], "did you mean next_token"), (["objective.label_smothing=0.1"], "did you mean label_smoothing"),
    (["objective.label_smoothing=1.5"], "below 1"), (["objective.z_loss=-1"], "0 or more")])
def test_wrong_settings_say_what_to_use(words: list[str], said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        objective_of(resolve("default", words).recipe)


def test_spans_have_no_classes_to_smooth_over(facts: Facts) -> None:
    span = replace(facts.model, task="span")
    assert "places of its own document" in (BOTH.why_not(span) or "")
    assert BOTH.why_not(facts.model) is None is NextToken(z_loss=1e-4).why_not(span)


class OfItsOwn(NextToken):
    uses_loss = False


def test_a_technique_for_the_loss_says_when_an_objective_does_not_use_it(make_setup: MakeSetup) -> None:
    setup = ChunkedCrossEntropy(4).apply(replace(make_setup(), objective=OfItsOwn()))
    with pytest.raises(NotApplied, match="next_token"):
        ChunkedCrossEntropy(4).confirm(setup)
    assert token_loss is not setup.loss
