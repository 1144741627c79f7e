from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from powertrain.training.loop import evaluate, spread
from powertrain.training.setup import Precision, Setup


def test_it_is_deterministic_with_dropout_and_leaves_training_as_it_was(make_setup: Callable[..., Setup]) -> None:
    setup = make_setup("gpt2", dropout=0.5)
    setup.model.train()
    random = torch.get_rng_state()
    losses = {evaluate(setup, setup.examples, tokens_per_byte=None).loss for _ in range(3)}
    assert len(losses) == 1
    assert setup.model.training
    assert torch.equal(torch.get_rng_state(), random)


def test_the_loss_is_the_mean_over_the_trained_tokens(setup: Setup) -> None:
    batch = setup.collate(setup.examples)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(setup.model(batch), batch.targets)      # of what is not ignored
    found = evaluate(setup, setup.examples, tokens_per_byte=None)
    assert found.loss == pytest.approx(float(expected), rel=1e-6)
    assert found.tokens == int((batch.targets != -100).sum())


@pytest.mark.parametrize("micro_batch", [1, 5, 28])
def test_the_split_into_passes_does_not_matter(setup: Setup, micro_batch: int) -> None:
    expected = evaluate(setup, setup.examples, tokens_per_byte=None)
    found = evaluate(replace(setup, micro_batch=micro_batch), setup.examples, tokens_per_byte=None)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.tokens == expected.tokens


def test_it_runs_in_the_precision_of_training(setup: Setup) -> None:
    seen = []
    setup.model.blocks[0].qkv.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    evaluate(replace(setup, precision=Precision(torch.bfloat16)), setup.examples[:2], tokens_per_byte=None)
    assert set(seen) == {torch.bfloat16}


def test_bits_per_byte_counts_every_byte(setup: Setup) -> None:
    found = evaluate(setup, setup.examples, tokens_per_byte=0.25)
    assert found.bits_per_byte == pytest.approx(found.loss * 0.25 / math.log(2))


def test_a_few_examples_are_spread_over_the_text(setup: Setup) -> None:
    assert list(spread(setup.examples, None)) == list(setup.examples)
    assert list(spread(setup.examples, 99)) == list(setup.examples)
    chosen = spread(setup.examples, 4)
    assert [setup.examples.index(example) for example in chosen] == [0, 7, 14, 21]
