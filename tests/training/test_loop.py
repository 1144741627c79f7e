from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from powertrain.models.decoder import Decoder
from powertrain.records import Plan
from powertrain.training.loop import State, StepResult, apply_plan, new_state, train
from powertrain.training.optimizers import OPTIMIZERS, Optimizer
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup
from powertrain.training.updates import parameter_groups

MakeSetup = Callable[..., Setup]


def sgd_of(learning_rate: float) -> Optimizer:
    return Optimizer(OPTIMIZERS.named("sgd"), learning_rate, settings={"momentum": 0.0, "nesterov": False})


def run(setup: Setup, steps: int = 4, max_grad_norm: float = 1.0) -> tuple[list[StepResult], State]:
    state = new_state(setup, 0.1)
    return list(train(setup, state, Schedule("cosine", 1e-2, steps), max_grad_norm)), state


@pytest.mark.parametrize(("micro_batch", "splits"), [(14, 1), (7, 2), (3, 5), (2, 7)])
def test_every_split_of_the_batch_gives_the_same_update(make_setup: MakeSetup, micro_batch: int, splits: int) -> None:
    whole, split = make_setup(), replace(make_setup(), micro_batch=micro_batch)
    assert len(split.prepare(0)) == splits
    # SGD first: AdamW divides by the gradient's size and so hides an error of scale
    sgd = [replace(setup, optimizer=sgd_of(0.1)) for setup in (whole, split)]
    for one, other in (sgd, (make_setup(), replace(make_setup(), micro_batch=micro_batch))):
        (expected, _), (found, _) = run(one), run(other)
        torch.testing.assert_close(torch.stack([s.loss for s in found]), torch.stack([s.loss for s in expected]),
                                   rtol=1e-5, atol=0)
        for left, right in zip(one.model.parameters(), other.model.parameters(), strict=True):
            # AdamW takes a step of the whole rate even where a gradient is nothing but rounding: 0.1 % of it here
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_mean_over_the_trained_tokens_of_the_step(setup: Setup) -> None:
    with torch.no_grad():
        batches = setup.prepare(0)
        logits = torch.cat([setup.model(batch) for batch in batches])
        targets = torch.cat([batch.targets for batch in batches])
        expected = torch.nn.functional.cross_entropy(logits, targets)     # mean over what is not ignored
    results, _ = run(setup, steps=1)
    torch.testing.assert_close(results[0].loss, expected)
    assert results[0].trained_tokens == int((targets != -100).sum()) < results[0].real_tokens == len(targets)


def test_the_rate_steps_once_per_optimizer_step_however_the_batch_is_split(setup: Setup) -> None:
    results, _ = run(replace(setup, micro_batch=2), steps=5)
    schedule = Schedule("cosine", 1e-2, 5)
    assert [result.learning_rate for result in results] == [schedule.at(step) for step in range(5)]


def test_clipping_scales_the_gradient_and_is_counted_and_zero_turns_it_off(make_setup: MakeSetup) -> None:
    def change(max_grad_norm: float) -> tuple[float, int]:
        setup = replace(make_setup(), optimizer=sgd_of(1.0))
        before = [p.detach().clone() for p in setup.model.parameters()]
        state = new_state(setup, 0.0)
        next(iter(train(setup, state, Schedule("constant", 1.0, 1), max_grad_norm)))
        moved = torch.cat([(p.detach() - old).flatten() for p, old in zip(setup.model.parameters(), before, strict=True)])
        return float(moved.norm()), int(state.clipped_steps)

    assert change(0.01) == (pytest.approx(0.01, rel=1e-3), 1)
    unclipped, count = change(0.0)
    assert unclipped > 0.1
    assert count == 0
    assert change(1e6) == (pytest.approx(unclipped), 0)


def test_weights_decay_and_norms_and_biases_do_not() -> None:
    from powertrain.models.config import make_config

    config, _ = make_config("gpt2", vocabulary=11, layers=1, width=16, heads=2, context=8)
    model = Decoder(config)
    decaying, plain = parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() >= 2 for p in decaying["params"])
    assert all(p.dim() == 1 for p in plain["params"])
    assert len(decaying["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_training_goes_on_from_a_state_as_if_it_had_never_stopped(make_setup: MakeSetup) -> None:
    setup = make_setup()
    whole, _ = run(setup, steps=6)
    setup = make_setup()
    state, schedule = new_state(setup, 0.1), Schedule("cosine", 1e-2, 6)
    first = [result for _, result in zip(range(2), train(setup, state, schedule, 1.0), strict=False)]
    rest = list(train(setup, state, schedule, 1.0))
    assert [float(r.loss) for r in first + rest] == [float(r.loss) for r in whole]


def test_a_technique_that_changes_more_than_it_says_is_a_mistake(setup: Setup) -> None:
    from powertrain.records import Effect, Proposal
    from powertrain.techniques.micro_batch import MicroBatch

    class Sly(MicroBatch):
        def apply(self, setup: Setup) -> Setup:
            return replace(setup, micro_batch=1, seed=99)

    plan = Plan((Proposal(Sly(1), "", Effect((1, 1), 0, "guess: none")),), ())
    with pytest.raises(AssertionError, match="seed"):
        apply_plan(setup, plan)


def test_a_small_model_learns(setup: Setup) -> None:
    results, _ = run(setup, steps=60)
    assert results[-1].loss < 0.3 * results[0].loss
