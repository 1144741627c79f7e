"""A frozen base in 8 bits: what its products lose, that one copy serves both passes, and what is left as it was."""

from __future__ import annotations

import copy

import pytest
import torch

from adapted_models import adapted, make_base
from powertrain.models.adapters.attached import freeze, merge_into, merged
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.kernels.frozen import (
    FP8,
    INT8,
    LARGEST,
    WORST_ERROR,
    Coarse,
    FrozenLinear,
    LeftLinear,
    ScaledLinear,
    frozen_linears,
    product_error,
    quantise,
    scale_base,
    scaled_product,
    scaled_product_back,
)
from powertrain.records import Batch, WrongUse

DTYPES = pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])
OUTPUT_ROUNDING = {INT8: 1e-6, FP8: 2**-8}   # int8 sums come out in fp32; torch gives fp8 ones in bf16
UNKNOWN_TO_CUDA = 40                         # tokens


def made_wide(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    codes, scales = quantise(x, dtype)
    return codes.double() * scales


def drawn(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, over all numbers."""
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).norm() / expected.norm())


def linear_of(outputs: int = 48, inputs: int = 32) -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(inputs, outputs)


def tokens_of(count: int = UNKNOWN_TO_CUDA) -> Batch:
    tokens = torch.arange(count) % 300
    return Batch(tokens, tokens, torch.arange(count), (count,), count)


# ------------------------------------------------------------------------------------------------ products


@DTYPES
@pytest.mark.parametrize("rows", [1, 5, 123])
def test_a_product_is_that_of_the_rounded_numbers(dtype: torch.dtype, rows: int) -> None:
    """Emulated: quantise, make wide, multiply exactly."""
    x, weight = drawn(rows, 32), drawn(48, 32, 1)
    codes, scales = quantise(weight, dtype)
    expected = made_wide(x, dtype) @ made_wide(weight, dtype).t()
    found = scaled_product(x, codes, scales.flatten()).double()
    torch.testing.assert_close(found, expected, rtol=OUTPUT_ROUNDING[dtype], atol=1e-5)


@DTYPES
def test_the_same_codes_serve_the_backward_pass(dtype: torch.dtype) -> None:
    """The scales of the rows of W go into dY, exactly; only then is it rounded."""
    dy, weight = drawn(37, 48), drawn(48, 32, 1) * torch.logspace(-3, 3, 48)[:, None]
    codes, scales = quantise(weight, dtype)
    expected = made_wide(dy * scales.flatten(), dtype) @ codes.double()
    found = scaled_product_back(dy, codes, scales.flatten()).double()
    torch.testing.assert_close(found, expected, rtol=OUTPUT_ROUNDING[dtype], atol=OUTPUT_ROUNDING[dtype] * 10)


@DTYPES
def test_codes_reach_the_largest_number_and_are_symmetric(dtype: torch.dtype) -> None:
    x = drawn(9, 64) * torch.logspace(-20, 20, 9)[:, None]
    codes, scales = quantise(torch.cat((x, -x)), dtype)
    assert (codes.float().abs().amax(-1) == LARGEST[dtype]).all()
    assert torch.equal(codes[:9].float(), -codes[9:].float())
    assert scales.dtype is torch.float32


@DTYPES
def test_a_row_of_zeros_stays_one_and_what_is_not_finite_shows(dtype: torch.dtype) -> None:
    """A loss has to become NaN where it would have; int8 itself knows no such number."""
    weight = drawn(8, 32, 1)
    codes, scales = quantise(weight, dtype)
    x = torch.zeros(3, 32)
    x[1, 4], x[2, 4] = torch.nan, torch.inf
    y = scaled_product(x, codes, scales.flatten())
    assert (y[0] == 0).all()
    assert not torch.isfinite(y[1:]).any()


@pytest.mark.parametrize(("dtype", "expected"), [(INT8, 0.012), (FP8, 0.037)])
def test_normal_numbers_lose_about_a_percent_in_int8_and_four_in_fp8(dtype: torch.dtype, expected: float) -> None:
    assert product_error(drawn(64, 512), drawn(96, 512, 1), dtype) == pytest.approx(expected, rel=0.25)


def test_an_outlier_takes_the_values_from_the_others_in_int8_and_not_in_fp8() -> None:
    x = drawn(64, 512)
    x[:, 7] = 300.0
    weight = drawn(96, 512, 1)
    weight[:, 7] *= 0.01                     # as in trained models: the column counts no more than others in the result
    assert product_error(x, weight, INT8) > WORST_ERROR[INT8]
    assert product_error(x, weight, FP8) < WORST_ERROR[FP8]


# ------------------------------------------------------------------------------------------------ a linear


@DTYPES
@pytest.mark.parametrize("autocast", [False, True])
def test_a_linear_is_near_the_one_that_it_was_made_of_forward_and_backward(dtype: torch.dtype, autocast: bool) -> None:
    plain = linear_of()
    scaled = ScaledLinear.of(plain, dtype)
    assert scaled.weight is None
    inputs = [drawn(50, 32).requires_grad_() for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = [linear(x) for linear, x in zip((plain, scaled), inputs, strict=True)]
    assert outputs[1].dtype is (torch.bfloat16 if autocast else torch.float32)
    for output in outputs:
        output.float().square().sum().backward()
    for expected, found in ((outputs[0], outputs[1]), (inputs[0].grad, inputs[1].grad)):
        assert expected is not None
        assert found is not None
        assert apart(found, expected) < WORST_ERROR[dtype]
    assert inputs[1].grad is not None
    assert inputs[1].grad.dtype is torch.float32


@DTYPES
def test_codes_and_scales_keep_their_types_whatever_a_model_is_converted_to(dtype: torch.dtype) -> None:
    scaled = ScaledLinear.of(linear_of(), dtype)
    before = scaled.matrix(torch.float32)
    scaled.to(torch.bfloat16)
    assert (scaled.codes.dtype, scaled.scales.dtype) == (dtype, torch.float32)
    assert scaled.bias.dtype is torch.bfloat16
    assert torch.equal(scaled.matrix(torch.float32), before)
    assert not scaled.state_dict().keys() & {"codes", "scales", "weight"}    # checkpoints hold what is trained, and no more


# ------------------------------------------------------------------------------------------------ a whole base


@DTYPES
def test_a_base_is_rounded_linear_by_linear_and_nothing_else(dtype: torch.dtype) -> None:
    model = adapted(make_base("llama"), AdapterConfig(r=4, target_modules=("q_proj", "down_proj")))
    others = {name: tensor.clone() for name, tensor in model.state_dict().items() if not name.endswith(
        tuple(f"{linear}{base}.weight" for linear in ("qkv", "attention_out", "mlp_in", "mlp_out") for base in ("", ".base")))}
    plain = copy.deepcopy(model)
    scale_base(model, dtype, lambda: model(tokens_of()), otherwise=torch.float32)
    assert Coarse.of(model, dtype) == Coarse(tuple(frozen_linears(model)), {})
    assert all(isinstance(linear, ScaledLinear) for linear in frozen_linears(model).values())
    assert model.state_dict().keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in model.state_dict().items())
    assert 0 < apart(model(tokens_of()), plain(tokens_of())) < 2 * WORST_ERROR[dtype]


def test_products_that_would_lose_too_much_stay_as_they_were_and_are_named() -> None:
    model = make_base("llama")
    freeze(model)
    with torch.no_grad():                    # the norm of one block makes one column large, which nothing reads much
        model.get_submodule("blocks.1.mlp_norm").weight[5] = 1e4
        model.get_submodule("blocks.1.mlp_in").weight[:, 5] *= 1e-4
    expected = model.get_submodule("blocks.1.mlp_in").weight.to(torch.bfloat16)
    scale_base(model, INT8, lambda: model(tokens_of()), otherwise=torch.bfloat16)
    found = Coarse.of(model, INT8)
    assert list(found.left) == ["blocks.1.mlp_in"]
    assert len(found.scaled) == 7
    left = model.get_submodule("blocks.1.mlp_in")
    assert isinstance(left, LeftLinear)
    assert torch.equal(left.weight, expected)
    assert "7 frozen matrices are in 8 bits, and 1 stay as they were: their products would be off by up to" in str(found)
    assert "blocks.1.mlp_in the most" in str(found)


def test_there_are_few_kinds_of_blocks_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too many linears are odd, each in its own way, the blocks that they are in stay whole."""
    from powertrain.models.kernels import frozen

    model = make_base("llama", layers=5)
    freeze(model)
    odd = {"blocks.0.qkv", "blocks.1.mlp_in", "blocks.2.mlp_out", "blocks.2.mlp_in"}
    monkeypatch.setattr(frozen, "product_error", lambda x, weight, dtype: float(any(
        model.get_submodule(name).weight is weight for name in odd)))
    scale_base(model, INT8, lambda: model(tokens_of()), otherwise=torch.float32)
    assert {name.split(".")[1] for name in Coarse.of(model, INT8).left} == {"0", "1", "2"}
    assert len(Coarse.of(model, INT8).left) == 12
    assert len(Coarse.of(model, INT8).scaled) == 8


def test_adapters_are_merged_into_the_base_as_it_was() -> None:
    base = make_base("llama")
    model = adapted(copy.deepcopy(base), AdapterConfig(r=4))
    expected = merged(model).state_dict()
    scale_base(model, INT8, lambda: model(tokens_of()), otherwise=torch.float32)
    with pytest.raises(WrongUse, match="unquantised base"):
        merged(model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merge_into(base, model).state_dict().items())


def test_dora_reads_the_lengths_of_the_rounded_rows() -> None:
    model = adapted(make_base("llama"), AdapterConfig(r=4, use_dora=True))
    expected = model(tokens_of())
    scale_base(model, INT8, lambda: model(tokens_of()), otherwise=torch.float32)
    assert apart(model(tokens_of()), expected) < 2 * WORST_ERROR[INT8]


def test_a_left_linear_is_a_frozen_one() -> None:
    left = LeftLinear.of(linear_of())
    assert isinstance(left, FrozenLinear)
    assert left.error is None
    assert not left.weight.requires_grad
