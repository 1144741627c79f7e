"""The plan for a model that transformers computes: what acts around it is in force, and the step stays the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from powertrain.data.example import Example, collate
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.bridge.loading import bridged_facts, load_bridged
from powertrain.planner import make_plan
from powertrain.recipe import Recipe
from powertrain.records import IGNORE, Facts
from powertrain.techniques.bf16 import Bf16
from powertrain.techniques.four_bit_base import FourBitBase
from powertrain.training.loop import apply_plan, new_state, train
from powertrain.training.objectives import NextToken
from powertrain.training.optimizers import plain_adamw
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup, plain_setup

AROUND = {"fused_adamw", "micro_batch", "length_grouping"}
LORA = AdapterConfig(r=4)
PINS = {"threads": "off", "allocator": "off", "bf16": "off", "micro_batch": {"examples": 4}}


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("t5")
    config = T5Config(vocab_size=50, d_model=64, d_kv=32, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
                      decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture
def make_bridged(t5: Path) -> Callable[..., Setup]:
    def make(method: str = "lora") -> Setup:
        torch.manual_seed(1)
        model = load_bridged(t5, task="seq2seq", method=method, adapters=LORA,
                             quantisation=("nf4", True) if method == "qlora" else None, dropout=0.0)
        return plain_setup(model, pairs(), collate, train_batch_size=14, seed=5, optimizer=plain_adamw(1e-2, (0.9, 0.95), 1e-8))

    return make


def pairs() -> list[Example]:
    draw = np.random.default_rng(4)
    lengths = draw.integers(3, 30, (28, 2))
    parts = [(draw.integers(2, 50, 2 * target).astype(np.int64), draw.integers(2, 50, source).astype(np.int64))
             for target, source in lengths]
    return [Example(both[: len(both) // 2].copy(), both[len(both) // 2:].copy(), source=source) for both, source in parts]


@pytest.fixture
def asked(lora_facts: Facts, t5: Path) -> Facts:
    model = bridged_facts(t5, task="seq2seq", method="lora", adapters=LORA)
    return replace(lora_facts, model=model, data=replace(lora_facts.data, kind="pair"))


def losses_of(setup: Setup) -> list[float]:
    torch.manual_seed(11)
    return [float(step.loss) for step in train(setup, new_state(setup, 0.0), Schedule("constant", 1e-3, 3), 1.0)]


def test_the_plan_for_another_librarys_model_keeps_its_losses(asked: Facts, make_bridged: Callable[..., Setup]) -> None:
    plan = make_plan(asked, Recipe.model_validate({"techniques": PINS}), 100)
    assert {step.technique.name for step in plan.steps} == AROUND
    changed = apply_plan(make_bridged(), plan)
    assert [len(batch.lengths) for batch in changed.prepare(0)] == [4, 4, 4, 2]
    assert losses_of(changed) == pytest.approx(losses_of(make_bridged()), rel=1e-4)


def test_half_precision_is_confirmed_in_another_librarys_model(make_bridged: Callable[..., Setup]) -> None:
    setup = Bf16().apply(make_bridged())
    Bf16().confirm(setup)
    assert losses_of(setup) == pytest.approx(losses_of(make_bridged()), rel=1e-2)


def test_four_bits_are_confirmed_in_another_librarys_model(make_bridged: Callable[..., Setup]) -> None:
    setup = make_bridged("qlora")
    FourBitBase().confirm(setup)
    assert losses_of(Bf16().apply(setup)) == pytest.approx(losses_of(make_bridged("qlora")), rel=1e-2)


def test_every_refusal_inside_it_names_the_library(asked: Facts) -> None:
    plan = make_plan(asked, Recipe(), 100)
    inside = {"attention_kernel", "chunked_cross_entropy", "packing", "frozen_backward", "frozen_base", "fused_blocks",
              "torch_compile", "activation_checkpointing"}
    reasons = {refusal.technique: refusal.because for refusal in plan.refused}
    assert all("transformers" in reasons[name] for name in inside)
    assert dataclasses.replace(plan).estimate is None


@pytest.mark.parametrize("objective", [NextToken(label_smoothing=0.1), NextToken(z_loss=1e-2)], ids=str)
def test_an_objectives_terms_hold_in_another_librarys_model(make_bridged: Callable[..., Setup], objective: NextToken) -> None:
    setup = replace(make_bridged(), objective=objective)
    batch = setup.prepare(0)[0]
    with torch.no_grad():
        sums, logits = setup.sums(batch), setup.model.logits(setup.model.hidden(batch)).float()
    kept = batch.targets != IGNORE
    logits, targets, smoothing = logits[kept], batch.targets[kept], objective.label_smoothing
    expected = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")
    expected = expected + objective.z_loss * logits.logsumexp(-1).square().sum()
    torch.testing.assert_close(sums["loss"], expected, rtol=1e-5, atol=1e-5)
    assert losses_of(setup) != losses_of(make_bridged())


def test_noise_on_the_embeddings_of_another_librarys_model_is_neftunes(make_bridged: Callable[..., Setup]) -> None:
    """transformers' own hook on the modules that are called, an encoder's and a decoder's, draws the same noise."""
    neftune = pytest.importorskip("transformers.integrations.neftune")
    setup = make_bridged()
    setup.model.train()
    batch = setup.prepare(0)[0]

    def loss_of(setup: Setup) -> float:
        torch.manual_seed(3)
        with torch.no_grad():
            return float(setup.batch_loss(batch))

    found = loss_of(replace(setup, objective=NextToken(embedding_noise=5.0)))
    embeddings = list(setup.model.input_embeddings)
    assert len(embeddings) > 1
    handles = []
    for embedding in embeddings:
        embedding.neftune_noise_alpha = 5.0
        handles.append(embedding.register_forward_hook(neftune.neftune_post_forward_hook))
    assert found == pytest.approx(loss_of(setup), rel=1e-5)
    for handle in handles:
        handle.remove()
    assert found != pytest.approx(loss_of(setup), rel=1e-5)
