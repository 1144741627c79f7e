"""A frozen base in 8 bits: who may have one, that it learns beside it, and what the run says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kinds_of_runs import LORA, make_ragged, ragged_facts

from not_compiled import NotCompiled
from powertrain.cost.memory import replay
from powertrain.cost.weights import as_held, eight_bit_saving, is_scaled, linears
from powertrain.cost.workload import Workload
from powertrain.evidence.parity import compare_losses
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.kernels.frozen import FP8, INT8, Coarse, quantise, scaled_product, scaled_product_back
from powertrain.planner import ask_anew, make_plan
from powertrain.recipe import Recipe
from powertrain.records import Effect, Facts, NotApplied, Plan, Proposal, Refusal, WrongUse
from powertrain.techniques.activation_checkpointing import ActivationCheckpointing
from powertrain.techniques.attention_kernel import AttentionKernel
from powertrain.techniques.base import Technique
from powertrain.techniques.bf16 import Bf16
from powertrain.techniques.fp8_base import Fp8Base
from powertrain.techniques.frozen_backward import FrozenBackward
from powertrain.techniques.fused_blocks import FusedBlocks
from powertrain.techniques.int8_base import Int8Base
from powertrain.techniques.packing import Packing
from powertrain.training.loop import apply_plan, backward, evaluate, new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

BY_HAND = (AttentionKernel("bmm"), Packing(100), NotCompiled(), FrozenBackward())
COMPILED = (AttentionKernel("bmm"), Packing(100), FusedBlocks(), FrozenBackward())
AGAIN = (AttentionKernel("bmm"), Packing(100), ActivationCheckpointing())


@pytest.fixture(autouse=True)
def forgotten_compilations() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def on_cpu(facts: Facts, *instructions: str, **model: object) -> Facts:
    hardware = replace(facts.hardware, device="cpu", instructions=instructions, compute_capability=None)
    return replace(ragged_facts(facts, LORA, **model), hardware=hardware)


def in_force(setup: Setup, *techniques: Technique) -> Setup:
    steps = tuple(Proposal(technique, "test", Effect((1.0, 1.0), 0, "guess: test")) for technique in techniques)
    return apply_plan(setup, Plan(steps, ()))


def losses_of(setup: Setup, steps: int = 8) -> list[float]:
    return [float(step.loss) for step in train(setup, new_state(setup, 0.1), Schedule("constant", 1e-2, steps), 1.0)]


def gradients_of(setup: Setup) -> torch.Tensor:
    micro_batches = setup.prepare(0)
    backward(setup, new_state(setup, 0.1).scaler, micro_batches, sum(batch.trained_tokens for batch in micro_batches))
    return torch.cat([parameter.grad.flatten() for parameter in setup.model.parameters() if parameter.grad is not None])


# ------------------------------------------------------------------------------------------------ who may have one


@pytest.mark.parametrize("unit", ["amx_int8", "avx512_vnni", "avx_vnni"])
def test_int8_is_off_until_it_is_asked_for(facts: Facts, unit: str) -> None:
    there = on_cpu(facts, unit)
    answer = ask_anew(Int8Base.name, there, Recipe())
    assert isinstance(answer, Refusal)
    assert unit in answer.because
    assert answer.possible == Int8Base()
    assert "int8_base" not in [step.technique.name for step in make_plan(there, Recipe(), 100).steps]
    plan = make_plan(there, Recipe.model_validate({"techniques": {"int8_base": "on"}}), 100)
    names = [step.technique.name for step in plan.steps]
    assert "int8_base" in names
    assert "frozen_base" not in names        # the same weights, held otherwise


@pytest.mark.parametrize(("capability", "possible"), [((7, 0), False), ((7, 5), True), ((9, 0), True)])
def test_int8_is_for_gpus_from_turing_on(gpu_facts: Callable[..., Facts], capability: tuple[int, int], possible: bool) -> None:
    answer = ask_anew(Int8Base.name, ragged_facts(gpu_facts(capability), LORA), Recipe())
    assert isinstance(answer, Refusal)
    assert (answer.possible is not None) is possible


@pytest.mark.parametrize(("technique", "says"), [(Fp8Base, "another format than torch.float8_e4m3fn"),
                                                 (Int8Base, "no one has tried 8-bit products on an AMD GPU")])
def test_amds_units_are_not_nvidias(technique: type[Technique], says: str, gpu_facts: Callable[..., Facts]) -> None:
    amd = ragged_facts(gpu_facts(capability=None, architecture="gfx942"), LORA)
    answer = ask_anew(technique.name, amd, Recipe())
    assert isinstance(answer, Refusal)
    assert says in answer.because


@pytest.mark.parametrize(("stored", "wide"), [("int8", ("mlp_out",)), ("fp8", ("mlp_in", "mlp_out"))])
def test_matrices_whose_sizes_a_gpu_does_not_take_count_as_what_they_stay(facts: Facts, stored: str,
                                                                         wide: tuple[str, ...]) -> None:
    """An MLP 100 wide: its second matrix reads 100 numbers, no multiple of 8; its first makes 200, one of 8 and not of 16."""
    model = ragged_facts(facts, LORA, width=64, heads=4, kv_heads=4, mlp_width=100).model
    held = as_held(model, stored)
    parts = {part.name: part for part in linears(model)}
    for name in parts:
        assert is_scaled(held, name, "cuda") is (name not in wide)
        assert is_scaled(held, name, "cpu")

    def weight_bytes(device: str) -> int:
        workload = Workload(4, 32, 4, "bf16", attention_saves_scores=False, base_dtype=stored, device=device)
        return replay(model, workload).at_the_peak()["weights"]

    more = model.layers * sum((2 - 1) * part.weights - 4 * part.outputs for name, part in parts.items() if name in wide)
    assert weight_bytes("cuda") - weight_bytes("cpu") == more > 0
    weights, saved_bytes = eight_bit_saving(model, stored, "cuda")
    assert weights == model.layers * sum(part.weights for name, part in parts.items() if name not in wide)
    assert saved_bytes == 3 * weights - 4 * model.layers * sum(part.outputs for name, part in parts.items() if name not in wide)


@pytest.mark.parametrize(("change", "why"), [
    ({"frozen_dtype": "nf4"}, "already stored in nf4"), ({"adapter_parameters": 0}, "small steps"),
    ({"provider": "transformers"}, "transformers computes")])
def test_int8_is_not_for_every_model(facts: Facts, change: dict[str, Any], why: str) -> None:
    answer = ask_anew(Int8Base.name, on_cpu(facts, "avx512_vnni", **change), Recipe())
    assert isinstance(answer, Refusal)
    assert answer.possible is None
    assert why in answer.because


def test_a_pin_where_nothing_multiplies_int8_says_so(facts: Facts) -> None:
    pinned = Recipe.model_validate({"techniques": {"int8_base": "on"}})
    with pytest.raises(WrongUse, match="VNNI or AMX"):
        make_plan(on_cpu(facts, "avx2", "avx512f"), pinned, 100)


@pytest.mark.parametrize(("capability", "possible"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True),
                                                      ((12, 0), False)])
def test_fp8_is_for_gpus_from_ada_on_and_off_until_it_is_asked_for(gpu_facts: Callable[..., Facts],
                                                                   capability: tuple[int, int], possible: bool) -> None:
    there = ragged_facts(gpu_facts(capability), LORA)
    answer = ask_anew(Fp8Base.name, there, Recipe())
    assert isinstance(answer, Refusal)
    assert (answer.possible is not None) is possible
    in_fp32 = ask_anew(Fp8Base.name, there, Recipe.model_validate({"techniques": {"bf16": "off", "tf32": "off"}}))
    assert isinstance(in_fp32, Refusal)
    assert in_fp32.possible is None


def test_there_is_one_base(gpu_facts: Callable[..., Facts]) -> None:
    both = Recipe.model_validate({"techniques": {"int8_base": "on", "fp8_base": "on"}})
    with pytest.raises(WrongUse, match="only one of them"):
        make_plan(ragged_facts(gpu_facts(), LORA), both, 100)


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
def test_on_a_gpu_both_operands_are_read_along_the_sum(dtype: torch.dtype, back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def product(x: torch.Tensor, matrix: torch.Tensor, *scales: torch.Tensor, out_dtype: torch.dtype = torch.int32
                ) -> torch.Tensor:
        seen.append((x.stride(1), matrix.stride(0)))
        return torch.empty(len(x), matrix.shape[1], dtype=out_dtype, device=x.device)

    for name in ("_int_mm", "_scaled_mm"):
        monkeypatch.setattr(torch, name, product)
    codes, scales = torch.ones(64, 32, device="meta", dtype=dtype), torch.ones(64, device="meta")
    made = (scaled_product_back if back else scaled_product)(torch.ones(9, 64 if back else 32, device="meta"), codes, scales)
    assert (seen, made.shape) == ([(1, 1)], (9, 32 if back else 64))


# ------------------------------------------------------------------------------------------------ that it learns


@pytest.mark.parametrize(("precision", "others"), [
    ((), ()), ((), BY_HAND), ((), AGAIN), ((Bf16(),), ()), ((Bf16(),), COMPILED), ((Bf16(),), AGAIN)],
    ids=["fp32-plainly", "fp32-by hand", "fp32-computed again", "bf16-plainly", "bf16-compiled", "bf16-computed again"])
def test_a_run_learns_about_the_same(precision: tuple[Technique, ...], others: tuple[Technique, ...]) -> None:
    coarse = in_force(make_ragged(LORA), *precision, Int8Base(), *others)
    expected = losses_of(in_force(make_ragged(LORA), *precision, *others))
    found = losses_of(coarse)
    assert found == pytest.approx(expected, rel=4e-3)
    assert found != expected
    assert found[-1] < found[0] - 0.03       # twice as much as that
    held_out = [coarse.examples[i] for i in range(8)]
    assert evaluate(coarse, held_out, tokens_per_byte=None).loss < found[0] + 1


@pytest.mark.parametrize("others", [(), BY_HAND], ids=["plainly", "by hand"])
def test_gradients_are_those_of_the_plain_run_within_the_rounding_of_8_bits(others: tuple[Technique, ...]) -> None:
    expected = gradients_of(make_ragged(LORA))
    found = gradients_of(in_force(make_ragged(LORA), Int8Base(), *others))
    assert float((found - expected).norm() / expected.norm()) < 0.1


def test_by_hand_and_plainly_the_rounding_is_the_same() -> None:
    plainly = gradients_of(in_force(make_ragged(LORA), Int8Base()))
    by_hand = gradients_of(in_force(make_ragged(LORA), Int8Base(), *BY_HAND))
    # a number that lies between two codes may fall to either side, as sums before it are ordered otherwise
    assert float((by_hand - plainly).norm() / plainly.norm()) < 1e-2


@pytest.mark.parametrize("others", [(), COMPILED], ids=["plainly", "compiled"])
def test_a_run_learns_about_the_same_in_fp8(others: tuple[Technique, ...]) -> None:
    """Computed by torch without the units: the numbers are those of a GPU, the speed is not."""
    expected = losses_of(in_force(make_ragged(LORA), Bf16(), *others))
    found = losses_of(in_force(make_ragged(LORA), Bf16(), Fp8Base(), *others))
    assert found == pytest.approx(expected, rel=1e-2)
    assert found != expected


@dataclass(frozen=True)
class Traced:
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]

    @classmethod
    def of(cls, setup: Setup, seed: int) -> Traced:
        setup = replace(setup, seed=seed)
        steps = list(train(setup, new_state(setup, 0.1), Schedule("constant", 1e-2, 12), 1.0))
        return cls(tuple(float(step.loss) for step in steps), tuple(float(step.grad_norm) for step in steps))


@pytest.mark.parametrize("technique", [Int8Base(), Fp8Base()], ids=["int8", "fp8"])
def test_over_several_seeds_the_final_loss_is_no_worse(technique: Technique) -> None:
    """What other mathematics owes, judged as an ablation judges it."""
    without = [Traced.of(in_force(make_ragged(LORA), Bf16()), seed) for seed in range(3)]
    with_it = [Traced.of(in_force(make_ragged(LORA), Bf16(), technique), seed) for seed in range(3)]
    found = compare_losses("LOSSY", without, with_it, dtype="bf16")
    assert found.holds, found.because
    assert found.loss_difference < 1e-2


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (7, 5),
                    reason="needs an NVIDIA GPU from Turing on")
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 16, 17, 123, 2048])
def test_a_gpus_units_make_the_same_products(dtype: torch.dtype, rows: int) -> None:
    if dtype is FP8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 is multiplied from Ada on")
    draw = torch.Generator().manual_seed(0)
    x, dy = torch.randn(rows, 64, generator=draw), torch.randn(rows, 96, generator=draw)
    codes, scales = quantise(torch.randn(96, 64, generator=draw), dtype)
    for product, given in ((scaled_product, x), (scaled_product_back, dy)):
        expected = product(given, codes, scales.flatten())
        found = product(given.cuda(), codes.cuda(), scales.flatten().cuda()).cpu()
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_passes_add_up_to_the_same_step() -> None:
    """Each token has a scale of its own, so how a step is cut into passes changes nothing but the order of sums."""
    whole = gradients_of(in_force(make_ragged(LORA), Int8Base()))
    parts = gradients_of(replace(in_force(make_ragged(LORA), Int8Base()), micro_batch=3))
    assert float((parts - whole).norm() / whole.norm()) < 1e-2


def test_other_kinds_of_adapters_learn_beside_it() -> None:
    for adapters in (AdapterConfig(r=4, use_dora=True), AdapterConfig(r=4, kind="lslora"), AdapterConfig(r=4, dropout=0.1)):
        found = losses_of(in_force(make_ragged(adapters), Int8Base()), 3)
        assert found == pytest.approx(losses_of(make_ragged(adapters), 3), rel=3e-2 if not adapters.dropout else 0.2)


# ------------------------------------------------------------------------------------------------ what it says


def outlying() -> Setup:
    """One column of what a block's MLP reads is ten thousand times the others, and its weights are small."""
    setup = make_ragged(LORA)
    with torch.no_grad():
        setup.model.get_submodule("blocks.1.mlp_norm").weight[5] = 1e4
        setup.model.get_submodule("blocks.1.mlp_in").base.weight[:, 5] *= 1e-4  # type: ignore[union-attr]
        for adapter in setup.model.get_submodule("blocks.1.mlp_in.adapters").children():
            adapter.A[:, 5] = 0.0
    return setup


@pytest.mark.parametrize("others", [(), BY_HAND], ids=["plainly", "by hand"])
def test_what_would_lose_too_much_stays_and_is_said(others: tuple[Technique, ...]) -> None:
    setup = in_force(outlying(), Bf16(), Int8Base(), *others)
    found = Coarse.of(setup.model, INT8)
    assert list(found.left) == ["blocks.1.mlp_in.base"]
    assert setup.model.get_submodule("blocks.1.mlp_in.base").weight.dtype is torch.bfloat16
    assert "7 frozen matrices are in 8 bits, and 1 stay" in Int8Base().found(setup)
    losses = losses_of(setup, 3)
    assert losses == pytest.approx(losses_of(in_force(outlying(), Bf16(), *others), 3), rel=2e-2)


def test_a_base_of_which_nothing_could_be_rounded_is_not_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.models.kernels.frozen.WORST_ERROR", {INT8: 1e-6})
    with pytest.raises(NotApplied, match="would be off by"):
        in_force(make_ragged(LORA), Int8Base())
