"""Every row of the table of optimizers: its update is its source's, its state is what the row says, and a run resumes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from powertrain.cost.weights import state_bytes
from powertrain.facts.model import model_facts
from powertrain.models.adapters.attached import AdapterConfig, add_adapters
from powertrain.recipe import Recipe, resolve
from powertrain.records import Facts, Software, WrongUse
from powertrain.records.checkpoints import FILES
from powertrain.run.prepare import with_optimizer
from powertrain.techniques.flat_parameters import FlatParameters
from powertrain.techniques.fp16 import Fp16
from powertrain.training.checkpoint import load_checkpoint, save_checkpoint
from powertrain.training.loop import State, new_state, train
from powertrain.training.optimizers import OPTIMIZERS, ROWS, Optimizer, Row, optimizer_of
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup
from powertrain.training.updates import hidden_matrices

MakeSetup = Callable[..., Setup]
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
SHAPES = ((1,), (5,), (123,), (1, 1), (5, 3), (1, 123), (64, 65), (130, 32))
RATE, DECAY, STEPS = 1e-2, 0.1, 5
NAMES = [row.name for row in ROWS]
FLAT = [row.name for row in ROWS if row.can_be_flat]
FUSED = [row.name for row in ROWS if row.can_fuse]


def chosen(name: str, **changes: Any) -> Optimizer:
    """The optimizer of a recipe that names it."""
    given = {key: value for key, value in changes.items() if key in OPTIMIZERS.named(name).settings}
    recipe = Recipe.model_validate({"optimizer": {"name": name, **given}, "learning_rate": RATE})
    return replace(optimizer_of(recipe), **{key: value for key, value in changes.items() if key not in given})


class Weights(nn.Module):
    """Weights of awkward shapes: those with an even place are in a list of blocks, the others outside."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.blocks = nn.ModuleList(nn.ParameterList([weight]) for weight in weights[::2])
        self.outside = nn.ParameterList(weights[1::2])

    def take(self, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[Tensor]:
        """The weights after so many updates with random gradients. One weight has a gradient in every second step only."""
        generator = torch.Generator().manual_seed(4)
        for step in range(steps):
            for place, weight in enumerate(self.parameters()):
                weight.grad = torch.randn(weight.shape, generator=generator)
                if place == 1 and step % 2:
                    weight.grad = None
            optimizer.step()
        return [weight.detach().clone() for weight in self.parameters()]


def reference(model: Weights, kind: Callable[..., torch.optim.Optimizer], **settings: Any) -> list[Tensor]:
    """The same updates by another implementation, matrices decaying."""
    weights = list(model.parameters())
    groups = [{"params": [w for w in weights if (w.dim() == 2) is decays], "weight_decay": DECAY * decays}
              for decays in (True, False)]
    return model.take(kind(groups, lr=RATE, **settings))


def assert_equal(found: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize(("name", "settings", "kind", "theirs"), [
    ("adamw", {}, torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-8}),
    ("sgd", {}, torch.optim.SGD, {"momentum": 0.9}),
    ("sgd", {"momentum": 0.5, "nesterov": True}, torch.optim.SGD, {"momentum": 0.5, "nesterov": True}),
    ("sgd", {"momentum": 0.0}, torch.optim.SGD, {}),
    ("adafactor", {}, torch.optim.Adafactor, {}),
    ("adafactor", {"beta2_decay": -0.5, "clip_threshold": 1.5, "least_rms": 0.1}, torch.optim.Adafactor,
     {"beta2_decay": -0.5, "d": 1.5, "eps": (None, 0.1)}),
], ids=str)
def test_updates_are_those_of_torch(name: str, settings: dict[str, Any], kind: Any, theirs: dict[str, Any]) -> None:
    model = Weights()
    found = model.take(chosen(name, **settings)(model, DECAY))
    assert_equal(found, reference(Weights(), kind, **theirs), rtol=1e-6, atol=1e-7)


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    model, other = Weights(), Weights()
    found = model.take(chosen("muon", adjust_lr_fn="original", momentum=0.8, ns_steps=4)(model, DECAY))
    hidden = [w for block in other.blocks for w in block.parameters() if w.dim() == 2]
    assert [w.shape for w in hidden] == [(5, 3), (64, 65)]
    plain = [w for w in other.parameters() if not any(w is one for one in hidden)]
    theirs = [torch.optim.Muon(hidden, lr=RATE, weight_decay=DECAY, momentum=0.8, ns_steps=4),
              torch.optim.AdamW([{"params": [w for w in plain if (w.dim() == 2) is decays], "weight_decay": DECAY * decays}
                                 for decays in (True, False)], lr=RATE, betas=(0.9, 0.95))]

    class Both:
        def step(self) -> None:
            for part in theirs:
                part.step()

    assert_equal(found, other.take(Both()), rtol=1e-6, atol=1e-7)  # type: ignore[arg-type]


def test_muons_update_is_orthogonal_up_to_its_five_rounds() -> None:
    model = Weights()
    before = [weight.detach().clone() for weight in model.parameters()]
    found = model.take(chosen("muon", adjust_lr_fn="original")(model, 0.0), steps=1)
    (update,) = [(old - new) / RATE for old, new in zip(before, found, strict=True) if old.shape == (64, 65)]
    values = torch.linalg.svdvals(update)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3        # the range that its polynomial leaves


def test_lion_is_the_papers_algorithm() -> None:
    """Chen et al. 2023, algorithm 2, written out: the sign of an interpolation, and another interpolation is kept."""
    model, other = Weights(), Weights()
    found = model.take(chosen("lion", betas=(0.9, 0.99))(model, DECAY))
    means = {weight: torch.zeros_like(weight) for weight in other.parameters()}

    class Paper:
        @torch.no_grad()
        def step(self) -> None:
            for weight, mean in means.items():
                if weight.grad is None:
                    continue
                c = 0.9 * mean + (1 - 0.9) * weight.grad
                weight -= RATE * (torch.sign(c) + DECAY * (weight.dim() == 2) * weight)
                means[weight] = 0.99 * mean + (1 - 0.99) * weight.grad

    assert_equal(found, other.take(Paper()), rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


def test_least_rms_of_one_is_hugging_faces_adafactor() -> None:
    """Its Trainer neither scales the rate by a weight's size nor uses relative steps. Weights here stay smaller than 1."""
    transformers = pytest.importorskip("transformers.optimization")
    small, other = Weights(), Weights()
    for weight in (*small.parameters(), *other.parameters()):
        weight.data.mul_(0.1)
    found = small.take(chosen("adafactor", least_rms=1.0)(small, DECAY))
    expected = reference(other, transformers.Adafactor, scale_parameter=False, relative_step=False, warmup_init=False)
    assert_equal(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "library"), [("adamw_8bit", "AdamW8bit"), ("lion_8bit", "Lion8bit"),
                                               ("paged_adamw", "PagedAdamW32bit"), ("paged_adamw_8bit", "PagedAdamW8bit")])
def test_library_updates_are_bitsandbytes_own(name: str, library: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = Weights()
    found = model.take(chosen(name)(model, DECAY))
    assert_equal(found, reference(Weights(), getattr(bitsandbytes.optim, library), betas=(0.9, 0.95)))


@pytest.mark.parametrize(("small", "plain"), [("adamw_8bit", "adamw"), ("lion_8bit", "lion"), ("paged_adamw", "adamw")])
def test_states_kept_another_way_train_nearly_alike(make_setup: MakeSetup, small: str, plain: str) -> None:
    found, expected = ([step[0] for step in go_on(setup, new_state(setup, DECAY), 6)]
                       for setup in (setup_with(make_setup, name, learning_rate=1e-3) for name in (small, plain)))
    assert found == pytest.approx(expected, rel=1e-2)


# ------------------------------------------------------------------------------------------------ in a run


def setup_with(make_setup: MakeSetup, name: str, adapters: bool = False, **changes: Any) -> Setup:
    setup = make_setup()
    if adapters:
        torch.manual_seed(2)
        add_adapters(setup.model, AdapterConfig(r=4, alpha=8.0))
    return replace(setup, optimizer=chosen(name, **changes))


def go_on(setup: Setup, state: State, to: int) -> list[tuple[float, float]]:
    steps = train(setup, state, Schedule("cosine", RATE, 8), 0.5)
    return [(float(step.loss), float(step.grad_norm)) for step in (next(steps) for _ in range(to - state.step))]


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(make_setup: MakeSetup, name: str) -> None:
    setup = setup_with(make_setup, name, learning_rate=RATE)
    rate = {"sgd": 0.3, "lion": 2e-3, "lion_8bit": 2e-3, "adafactor": 0.1}.get(name, RATE)
    steps = list(train(setup, new_state(setup, DECAY), Schedule("constant", rate, 50), 1.0))
    assert steps[-1].loss < 0.6 * steps[0].loss


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(make_setup: MakeSetup, tmp_path: Path, name: str, adapters: bool) -> None:
    whole = setup_with(make_setup, name, adapters)
    state = new_state(whole, DECAY)
    go_on(whole, state, 2)
    saved = save_checkpoint(tmp_path / "first", state)
    expected, last = go_on(whole, state, 5), save_checkpoint(tmp_path / "whole", state)
    other = setup_with(make_setup, name, adapters)
    resumed = new_state(other, DECAY)
    load_checkpoint(saved, resumed)
    assert go_on(other, resumed, 5) == expected
    again = save_checkpoint(tmp_path / "resumed", resumed)
    for file in FILES[:2]:
        assert (again / file).read_bytes() == (last / file).read_bytes(), file


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", FLAT)
def test_flat_buffers_and_fused_kernels_change_no_step(make_setup: MakeSetup, name: str, fused: bool) -> None:
    if fused and name not in FUSED:
        pytest.skip(f"{name} has no fused kernel: test_what_an_optimizer_cannot_do_is_refused")
    plain = setup_with(make_setup, name)
    changed = FlatParameters().apply(setup_with(make_setup, name, fused=fused))
    for enter_setting in changed.runtime:
        enter_setting()
    expected, found = (go_on(setup, new_state(setup, DECAY), 4) for setup in (plain, changed))
    # the sign of a gradient that is nothing but rounding may differ, and lion takes a whole step for it
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3 if name == "lion" else 1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_fp16_skips_a_step_that_overflows(make_setup: MakeSetup, name: str) -> None:
    setup = Fp16().apply(setup_with(make_setup, name))
    before = [weight.detach().clone() for weight in setup.model.parameters()]
    state = new_state(setup, DECAY)
    go_on(replace(setup, loss=lambda *arguments: setup.loss(*arguments) * 1e38), state, 1)
    assert_equal([weight.detach() for weight in setup.model.parameters()], before)
    assert state.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_what_the_row_says(make_setup: MakeSetup, name: str, family: str) -> None:
    sizes = {"width": 64, "vocabulary": 256} if "8bit" in name else {}
    setup = replace(make_setup(family, **sizes), optimizer=chosen(name))
    state, row = new_state(setup, DECAY), OPTIMIZERS.named(name)
    go_on(setup, state, 1)
    moments = state.optimizer.moments()
    names = {key for found in moments.values() for key in found} - {"step"}
    said = {*row.state, *row.of_lines, *(row.of_vectors or {}), *(row.of_outside or {})}
    assert names == said
    held = sum(value.nbytes for found in moments.values() for key, value in found.items() if key in said)
    predicted = state_bytes(model_facts(setup.model.config), row.facts_on("cpu"))
    if "8bit" in name:                       # tensors under 4,096 elements stay fp32, and this model has many
        small = [p for p in setup.model.parameters() if p.numel() < 4096]
        per_weight = sum(row.state.values())
        predicted += sum(round(p.numel() * (4 * len([key for key in row.state if key.startswith("state")]) - per_weight))
                         for p in small)
    assert held == pytest.approx(predicted, rel=0.005 if "8bit" in name else 0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_without_momentum_keeps_no_state(momentum: float) -> None:
    optimizer = optimizer_of(Recipe.model_validate({"optimizer": {"name": "sgd", "momentum": momentum}}))
    assert optimizer.row.facts_on("cpu", optimizer.settings).hidden_bytes == (4 if momentum else 0)


def test_hidden_matrices_are_neither_embeddings_nor_the_head(make_setup: MakeSetup) -> None:
    model = make_setup("gpt2").model
    names = {name for name, weight in model.named_parameters() if weight in hidden_matrices(model)}
    assert names == {f"blocks.{i}.{part}.weight" for i in range(2) for part in ("qkv", "attention_out", "mlp_in", "mlp_out")}


# ------------------------------------------------------------------------------------------------ in a recipe


def resolved(*words: str) -> Recipe:
    return with_optimizer(resolve("default", [*words])).recipe


def test_a_recipe_names_it_in_short_and_its_open_settings_are_written_down() -> None:
    written = with_optimizer(resolve("default", ["optimizer=muon", "optimizer.momentum=0.9"]))
    assert written.recipe.optimizer.settings == {"momentum": 0.9, "nesterov": True, "ns_steps": 5,
                                                 "adjust_lr_fn": "match_rms_adamw"}
    assert with_optimizer(resolve("default")).recipe.optimizer.model_dump() == {"name": "adamw"}


def test_lions_own_beta_holds_where_the_recipe_gives_none() -> None:
    assert resolved("optimizer=lion", "learning_rate=1e-4").adam_beta2 == 0.99
    assert resolved("optimizer=lion", "adam_beta2=0.98").adam_beta2 == 0.98
    assert resolved().adam_beta2 == Recipe().adam_beta2


@pytest.mark.parametrize(("words", "said"), [
    (["optimizer=lyon"], "did you mean lion"), (["optimizer=sgd", "optimizer.momentun=0.5"], "did you mean momentum"),
    (["optimizer=sgd", "optimizer.momentum=1.5"], "below 1"), (["optimizer.momentum=0.5"], "no settings"),
    (["optimizer=muon", "optimizer.nesterov=3"], "true or false"),
    (["optimizer=muon", "optimizer.ns_steps=2.5"], "whole number"),
    (["optimizer=muon", "optimizer.adjust_lr_fn=none"], "match_rms_adamw, original"),
    (["optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"], "momentum above 0")])
def test_wrong_settings_say_what_to_use(words: list[str], said: str) -> None:
    with pytest.raises(WrongUse, match=said) as caught:
        optimizer_of(resolved(*words))
    assert caught.value.keys[0].startswith("optimizer.")


def test_what_an_optimizer_cannot_do_is_refused(facts: Facts, gpu_facts: Callable[..., Facts]) -> None:
    from powertrain.planner import make_plan

    for name in NAMES:
        row: Row = OPTIMIZERS.named(name)
        recipe = Recipe.model_validate({"optimizer": {"name": name}})
        plan = make_plan(replace(facts, optimizer=row.facts_on("cpu")), recipe, 100)
        chosen = {step.technique.name: step.technique for step in plan.steps}
        assert ("fused_adamw" in chosen) is row.can_fuse
        possible = chosen | {refusal.technique: refusal.possible for refusal in plan.refused}
        assert (possible["flat_parameters"] is not None) is row.can_be_flat
        assert (possible["eight_bit_adamw"] is not None) is (row.in_eight_bits is not None)


def test_paging_needs_an_nvidia_gpu_and_libraries_must_be_there(facts: Facts, gpu_facts: Callable[..., Facts]) -> None:
    row: Row = OPTIMIZERS.named("paged_adamw")
    assert "runs on cuda" in (row.why_not(replace(facts.hardware, device="cpu"), facts.software) or "")
    assert row.why_not(gpu_facts().hardware, gpu_facts().software) is None
    missing = Software({}, {"bitsandbytes": "not installed"})
    assert "not installed" in (OPTIMIZERS.named("adamw_8bit").why_not(gpu_facts().hardware, missing) or "")
    assert all(OPTIMIZERS.named(name).why_not(facts.hardware, missing) is None for name in ("adamw", "muon", "lion"))


def test_rows_name_each_other_rightly() -> None:
    for row in ROWS:
        for other in (row.in_eight_bits, row.paged):
            assert other is None or OPTIMIZERS.named(other).part == "bitsandbytes"
        assert math.isfinite(sum(row.state.values()))


def test_the_manual_and_the_plan_name_each_of_them(facts: Facts) -> None:
    from powertrain.report.plan import run_row

    manual = (Path(__file__).parents[2] / "docs" / "usage.md").read_text(encoding="utf-8")
    for row in ROWS:
        assert f"`{row.name}`" in manual
        assert all(f"`{key}`" in manual for key in row.settings)
        recipe = Recipe.model_validate({"optimizer": {"name": row.name}, "objective": {"name": "next_token", "z_loss": 1e-4}})
        shown = run_row(recipe.model_dump(), facts.data, 3)[1]
        assert ("AdamW" if row.name == "adamw" else row.name) in shown
        assert "with z loss 0.0001" in shown
