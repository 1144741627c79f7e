"""Weights in flat buffers: the same steps as one by one, whatever is trained and however a step is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from not_compiled import NotCompiled
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.files import save_model
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.records import WrongUse
from powertrain.records.checkpoints import FILES
from powertrain.techniques.activation_checkpointing import ActivationCheckpointing
from powertrain.techniques.flat_parameters import FlatParameters
from powertrain.techniques.fp16 import Fp16
from powertrain.techniques.frozen_backward import FrozenBackward
from powertrain.techniques.fused_adamw import FusedAdamW
from powertrain.techniques.micro_batch import MicroBatch
from powertrain.training.checkpoint import load_checkpoint, save_checkpoint
from powertrain.training.loop import State, backward, evaluate, new_state, train, update
from powertrain.training.memory import standing_bytes
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup
from powertrain.training.updates import ALIGNED, ROW, FlatOptimizer, buffer_of, flattened, for_runs, parameter_groups, views_of

MakeSetup = Callable[..., Setup]
FlatAdamW = for_runs(torch.optim.AdamW, None, FlatOptimizer)
STEPS = 4
UNCLIPPED, CLIPPED = 0.0, 0.1


def with_adapters(setup: Setup) -> Setup:
    torch.manual_seed(2)
    add_adapters(setup.model, AdapterConfig(r=4, alpha=8.0))
    for name, parameter in setup.model.named_parameters():
        if name.endswith(".B"):
            nn.init.normal_(parameter, std=0.1)
    return setup


def flat(setup: Setup) -> Setup:
    changed = FlatParameters().apply(setup)
    for enter_setting in changed.runtime:
        enter_setting()
    return changed


def go_on(setup: Setup, state: State, to: int, max_grad_norm: float = CLIPPED) -> list[tuple[float, float]]:
    steps = train(setup, state, Schedule("constant", 1e-2, to), max_grad_norm)
    return [(float(step.loss), float(step.grad_norm)) for step in steps]


def weights_of(setup: Setup) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in setup.model.parameters() if weight.requires_grad]


def gradients_of(setup: Setup) -> list[torch.Tensor]:
    return [weight.grad for weight in setup.model.parameters() if weight.grad is not None]


KINDS: dict[str, tuple[Callable[[Setup], Setup], dict[str, object]]] = {
    "all weights": (lambda setup: setup, {}),
    "a tied head": (lambda setup: setup, {"family": "gpt2", "tied_head": True}),
    "norms with biases": (lambda setup: setup, {"family": "gpt_neox"}),
    "adapters": (with_adapters, {}),
    "several passes a step": (MicroBatch(4).apply, {}),
    "activations computed again": (ActivationCheckpointing(1).apply, {}),
    "adapters with a frozen backward pass": (lambda setup: FrozenBackward().apply(with_adapters(setup)), {}),
    "loss scaling": (Fp16().apply, {}),
}


@pytest.mark.parametrize("max_grad_norm", [UNCLIPPED, CLIPPED])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_are_those_of_the_plain_optimizer(make_setup: MakeSetup, kind: str, fused: bool,
                                                    max_grad_norm: float) -> None:
    change, model = KINDS[kind]

    def make() -> Setup:
        made = change(make_setup(**model))
        return FusedAdamW().apply(made) if fused else made

    plain, changed = make(), flat(make())
    expected = go_on(plain, new_state(plain, 0.1), STEPS, max_grad_norm)
    found = go_on(changed, new_state(changed, 0.1), STEPS, max_grad_norm)
    # clipping moves weights by their last bit, which fp16 products then round otherwise now and then
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3 if "scaling" in kind else 1e-5, atol=1e-7)
    for one, other in zip(weights_of(changed), weights_of(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3 if "scaling" in kind else 1e-5)


@pytest.mark.parametrize("kind", ["all weights", "adapters", "several passes a step"])
def test_unclipped_every_bit_is_the_same(make_setup: MakeSetup, kind: str) -> None:
    """AdamW has no sum across weights, so only clipping rounds otherwise."""
    change, model = KINDS[kind]
    plain, changed = (FusedAdamW().apply(change(make_setup(**model))) for _ in range(2))
    changed = flat(changed)
    go_on(plain, new_state(plain, 0.1), STEPS, UNCLIPPED)
    go_on(changed, new_state(changed, 0.1), STEPS, UNCLIPPED)
    assert all(torch.equal(one, other) for one, other in zip(weights_of(changed), weights_of(plain), strict=True))


def test_by_hand_too_weights_are_read_where_they_are(make_setup: MakeSetup) -> None:
    def make() -> Setup:
        return NotCompiled().apply(FusedAdamW().apply(with_adapters(make_setup())))

    plain, changed = make(), flat(make())
    expected, found = (go_on(setup, new_state(setup, 0.1), STEPS) for setup in (plain, changed))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-7)


def test_gradients_look_clipped_after_the_update_has_read_them(make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlatOptimizer, "zero_grad", lambda self, set_to_none=True: None)
    setup = flat(FusedAdamW().apply(make_setup()))
    state = new_state(setup, 0.1)
    (_, norm), = go_on(setup, state, 1)
    assert norm > CLIPPED
    assert int(state.clipped_steps) == 1
    clipped = torch.cat([gradient.flatten() for gradient in gradients_of(setup)])
    assert float(clipped.norm()) == pytest.approx(CLIPPED, rel=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_without_clipping_does_not_divide_by_the_last_ones_norm(make_setup: MakeSetup, tmp_path: Path, fused: bool
                                                                       ) -> None:
    """The clipped step rounds otherwise than the plain optimizer's; from its state on, every bit is the same."""
    plain, changed = (FusedAdamW().apply(make_setup()) if fused else make_setup() for _ in range(2))
    changed = flat(changed)
    state, other = new_state(changed, 0.1), new_state(plain, 0.1)
    go_on(changed, state, 1, CLIPPED)
    assert int(state.clipped_steps) == 1
    load_checkpoint(save_checkpoint(tmp_path, state), other)
    go_on(changed, state, 3, UNCLIPPED)
    go_on(plain, other, 3, UNCLIPPED)
    assert all(torch.equal(one, two) for one, two in zip(weights_of(changed), weights_of(plain), strict=True))


def test_gradients_stay_views_of_one_buffer_and_are_cleared_by_the_step(make_setup: MakeSetup) -> None:
    setup = flat(make_setup())
    state = new_state(setup, 0.1)
    go_on(setup, state, 2)
    assert isinstance(state.optimizer, FlatOptimizer)
    kept = [group.flat.grad for group in state.optimizer.flat_groups]
    buffers = {gradient.untyped_storage().data_ptr() for gradient in kept if gradient is not None}
    assert len(buffers) == 2
    found = gradients_of(setup)
    assert {gradient.untyped_storage().data_ptr() for gradient in found} == buffers
    assert not any(bool(gradient.any()) for gradient in found)


def test_gradients_that_were_dropped_in_between_are_not_lost(make_setup: MakeSetup) -> None:
    setups = [make_setup(), flat(make_setup())]
    for setup in setups:
        state = new_state(setup, 0.1)
        go_on(setup, state, 1, UNCLIPPED)
        setup.model.zero_grad(set_to_none=True)          # as whatever tries a pass out may do
        go_on(setup, state, 3, UNCLIPPED)
    assert all(torch.equal(one, other) for one, other in zip(*map(weights_of, setups), strict=True))


def test_what_a_broken_off_first_step_left_is_cleared(make_setup: MakeSetup) -> None:
    setups = [make_setup(), flat(make_setup())]
    for setup in setups:
        state = new_state(setup, 0.1)
        micro_batches = setup.prepare(5)
        backward(setup, state.scaler, micro_batches, 7)
        state.optimizer.zero_grad(set_to_none=True)      # as after running out of memory
        go_on(setup, state, 2, UNCLIPPED)
    assert all(torch.equal(one, other) for one, other in zip(*map(weights_of, setups), strict=True))


def test_the_norm_of_many_gradients_keeps_its_digits() -> None:
    """One fp32 sum over as many would be off by a part in thousands."""
    weight = nn.Parameter(torch.zeros(3_000_000))
    optimizer = FlatAdamW([{"params": [weight], "weight_decay": 0.0}], fused=True)
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer.gather()
    assert float(optimizer.clip(0.0)) == pytest.approx(1e-3 * 3_000_000**0.5, rel=1e-6)


def test_a_gradient_that_is_not_finite_is_seen_in_the_norm(make_setup: MakeSetup) -> None:
    setup = flat(FusedAdamW().apply(make_setup()))
    state = new_state(setup, 0.1)
    for value in (float("nan"), float("inf")):
        backward(setup, state.scaler, setup.prepare(0), 1)
        gradients_of(setup)[3].view(-1)[1] = value
        assert not torch.isfinite(update(state, 1.0))


def test_fp16_skips_a_step_that_overflows(make_setup: MakeSetup) -> None:
    setup = flat(FusedAdamW().apply(Fp16().apply(make_setup())))
    state, before = new_state(setup, 0.1), weights_of(setup)
    broken = replace(setup, loss=lambda *arguments: setup.loss(*arguments) * 1e38)
    go_on(broken, state, 1)
    assert all(torch.equal(one, other) for one, other in zip(weights_of(setup), before, strict=True))
    assert state.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("first", "second"), [(flat, flat), (flat, lambda setup: setup), (lambda setup: setup, flat)],
                         ids=["flat and flat", "flat, then not", "then flat"])
def test_a_run_goes_on_from_either_kind_of_checkpoint(make_setup: MakeSetup, tmp_path: Path, first: Callable[[Setup], Setup],
                                                      second: Callable[[Setup], Setup], fused: bool) -> None:
    def make(kind: Callable[[Setup], Setup]) -> Setup:
        return kind(FusedAdamW().apply(make_setup()) if fused else make_setup())

    whole = make(first)
    state = new_state(whole, 0.1)
    go_on(whole, state, 2, UNCLIPPED)
    saved = save_checkpoint(tmp_path, state)
    go_on(whole, state, STEPS, UNCLIPPED)
    resumed = make(second)
    other = new_state(resumed, 0.1)
    load_checkpoint(saved, other)
    go_on(resumed, other, STEPS, UNCLIPPED)
    assert other.step == STEPS
    assert all(torch.equal(one, two) for one, two in zip(weights_of(resumed), weights_of(whole), strict=True))


def test_a_checkpoint_has_the_same_bytes_either_way(make_setup: MakeSetup, tmp_path: Path) -> None:
    for name, kind in (("plain", lambda setup: setup), ("flat", flat)):
        setup = kind(FusedAdamW().apply(make_setup()))
        state = new_state(setup, 0.1)
        go_on(setup, state, 2, UNCLIPPED)
        save_checkpoint(tmp_path / name, state)
    for file in FILES[:2]:
        plain, found = (load_file(tmp_path / name / "step-000002" / file) for name in ("plain", "flat"))
        assert set(plain) == set(found)
        assert all(torch.equal(plain[key], found[key]) for key in plain)


def test_a_checkpoint_before_the_first_step_has_no_moments(make_setup: MakeSetup, tmp_path: Path) -> None:
    setup = flat(make_setup())
    saved = save_checkpoint(tmp_path, new_state(setup, 0.1))
    other = new_state(setup, 0.1)
    load_checkpoint(saved, other)
    assert not other.optimizer.state


def test_weights_that_took_different_steps_are_refused() -> None:
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = FlatAdamW([{"params": weights, "weight_decay": 0.0}])
    moments = [{"step": torch.tensor(float(step)), "exp_avg": torch.zeros(3)} for step in (3, 5)]
    with pytest.raises(WrongUse, match="between 3 and 5 steps"):
        optimizer.restore(dict(zip(weights, moments, strict=True)))


def test_half_precision_weights_are_refused() -> None:
    with pytest.raises(WrongUse, match=r"torch\.bfloat16"):
        flattened([nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))])


@pytest.mark.parametrize("shapes", [[(1,)], [(5,), (123, 1), (16,)], [(64, 65)], [(3, 1, 7), (0,), (2,)]])
def test_a_buffer_holds_each_weight_at_64_bytes_and_nothing_else(shapes: list[tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    before = [weight.detach().clone() for weight in weights]
    assert buffer_of(weights) is None
    found = flattened(weights)
    assert len(found) % ROW == 0
    assert [weight.storage_offset() % ALIGNED for weight in weights] == [0] * len(weights)
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))
    assert float(found.abs().sum()) == pytest.approx(sum(float(old.abs().sum()) for old in before))
    found.fill_(7.0)
    assert all(bool((weight == 7).all()) for weight in weights)
    again = flattened(weights)
    assert again.data_ptr() == found.data_ptr()
    assert [view.shape for view in views_of(again, weights)] == [weight.shape for weight in weights]


def test_a_weight_that_has_left_its_buffer_is_noticed(make_setup: MakeSetup) -> None:
    setup = flat(make_setup())
    group = parameter_groups(setup.model, 0.0)[0]["params"]
    assert buffer_of(group) is not None
    assert buffer_of(group[::-1]) is None
    assert buffer_of(group[:-1]) is None or len(group) == 1
    group[1].data = group[1].data.clone()
    assert buffer_of(group) is None


def test_buffers_survive_a_new_optimizer_so_that_a_setup_can_be_trained_anew(make_setup: MakeSetup) -> None:
    setup = flat(make_setup())
    places = [weight.data_ptr() for weight in setup.model.parameters()]
    first, second = new_state(setup, 0.1), new_state(setup, 0.1)
    assert [weight.data_ptr() for weight in setup.model.parameters()] == places
    assert standing_bytes(setup.model, first.optimizer) == standing_bytes(setup.model, second.optimizer)


def test_evaluation_and_export_are_those_of_the_weights(make_setup: MakeSetup, tmp_path: Path) -> None:
    plain, changed = make_setup(), flat(make_setup())
    losses = [evaluate(setup, setup.examples, tokens_per_byte=None).loss for setup in (plain, changed)]
    assert losses[0] == losses[1]
    for name, setup in (("plain", plain), ("flat", changed)):
        save_model(setup.model, tmp_path / name)
    for file in (tmp_path / "plain").glob("*.safetensors"):
        assert (tmp_path / "flat" / file.name).read_bytes() == file.read_bytes()
