"""The 4-bit base: the right numbers, the right gradients, half a byte a weight, and nothing kept in between."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powertrain.models.adapters.attached import add_adapters, merge_into, merged
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.models.kernels.frozen import FrozenLinear
from powertrain.models.kernels.quantised import QuantisedLinear, is_quantised, quantise_base
from powertrain.records import Batch, WrongUse

MakeModel, MakeBatch = Callable[..., Decoder], Callable[..., Batch]
TYPES = pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False)])
LENGTHS = (5, 1, 33)

# the 16 values of NF4 between -1 and 1: Dettmers et al. 2023, appendix E
NF4 = torch.tensor([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                    0.7229568362236023, 1.0])


def disturb(model: nn.Module) -> None:
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.05)


def quantised(model: Decoder, kind: str = "nf4", double: bool = True) -> Decoder:
    quantise_base(model, type=kind, double=double)
    return model


def dequantised(model: Decoder) -> Decoder:
    """The plain decoder whose weights are those that the quantised one stands for."""
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            state[f"{name}.weight"] = module.matrix(torch.float32)
    plain = Decoder(model.config)
    plain.load_state_dict(state)
    return plain


@pytest.mark.parametrize("shape", [(144, 48), (7, 13), (96, 96), (10, 64), (5, 127)])
def test_each_weight_becomes_the_nearest_of_sixteen_multiples_of_its_blocks_largest(shape: tuple[int, int]) -> None:
    """By NF4's definition, for widths that are and are not whole blocks."""
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0])
    found = QuantisedLinear(linear, [shape[0]], "nf4", double=False).matrix(torch.float32).flatten()
    for block, given in zip(found.split(64), linear.weight.detach().flatten().split(64), strict=True):
        largest = given.abs().max()
        nearest = NF4[((given / largest)[:, None] - NF4).abs().argmin(1)] * largest
        torch.testing.assert_close(block, nearest, atol=1e-6, rtol=1e-6)


@TYPES
def test_parts_are_quantised_as_the_separate_modules_of_transformers_are(kind: str, double: bool) -> None:
    import bitsandbytes as bnb

    torch.manual_seed(0)
    linear = nn.Linear(64, 192)
    ours = QuantisedLinear(linear, [128, 32, 32], kind, double)
    x = torch.randn(3, 64)
    outputs = []
    for weight, bias in zip(linear.weight.split([128, 32, 32]), linear.bias.split([128, 32, 32]), strict=True):
        theirs = bnb.nn.Linear4bit(64, len(weight), quant_type=kind, compress_statistics=double, compute_dtype=torch.float32)
        theirs.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
        theirs.to("cpu")
        outputs.append(theirs(x.requires_grad_()))
    torch.testing.assert_close(ours(x), torch.cat(outputs, -1), atol=1e-6, rtol=1e-6)


@TYPES
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_quantised_model_is_the_plain_one_with_the_weights_it_stands_for(family: str, kind: str, double: bool,
                                                                          tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    model, batch = tiny_model(family), flat_batch(LENGTHS)
    before = model(batch)
    after = quantised(model, kind, double)(batch)
    torch.testing.assert_close(after, dequantised(model)(batch), atol=2e-5, rtol=1e-5)
    assert 0.01 * before.std() < (after - before).std() < before.std()
    assert [name for name, module in model.named_modules() if isinstance(module, QuantisedLinear)] == [
        f"blocks.{i}.{linear}" for i in range(2) for linear in ("qkv", "attention_out", "mlp_in", "mlp_out")]


@TYPES
@pytest.mark.parametrize("config", [AdapterConfig(r=4), AdapterConfig(r=4, use_dora=True), AdapterConfig(r=4, kind="lslora"),
                                    AdapterConfig(r=4, target_modules=("v_proj",))], ids=["lora", "dora", "lslora", "v_proj"])
def test_gradients_of_adapters_and_input_are_those_on_the_dequantised_base(config: AdapterConfig, kind: str, double: bool,
                                                                          tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    model, batch = quantised(tiny_model("qwen2", kv_heads=2), kind, double), flat_batch(LENGTHS)
    results = []
    for one in (dequantised(model), model):
        torch.manual_seed(5)
        add_adapters(one, config)
        disturb(one)
        embedded = one.embed(batch).detach().requires_grad_()
        one.embed = lambda _, embedded=embedded: embedded                        # type: ignore[method-assign,misc]
        logits = one(batch)
        F.cross_entropy(logits, batch.targets).backward()                        # type: ignore[no-untyped-call]
        results.append((logits, embedded.grad, {name: p.grad for name, p in one.named_parameters() if p.requires_grad}))
    assert results[0][2]
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_the_product_is_made_in_autocasts_dtype_forward_and_backward(compute: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 96)
    packed = QuantisedLinear(linear, [96], "nf4", double=True)
    x, gradient = torch.randn(7, 48, requires_grad=True), torch.randn(7, 96).to(compute)
    with torch.autocast("cpu", dtype=compute):
        out = packed(x)
    weight = packed.matrix(compute)
    assert out.dtype == weight.dtype == compute
    assert torch.equal(weight, packed.matrix(torch.float32).to(compute))
    assert torch.equal(out, F.linear(x.to(compute), weight, linear.bias.to(compute)))
    given, = torch.autograd.grad(out, x, gradient)
    assert given.dtype == torch.float32
    assert torch.equal(given, (gradient @ weight).float())
    assert packed(x.detach().to(compute)).dtype == compute           # and without autocast in that of the input


def test_nothing_dequantised_is_kept_for_the_backward_pass(tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    kept: dict[bool, list[tuple[int, ...]]] = {}
    for packs in (False, True):
        model = tiny_model("llama")
        model = quantised(model) if packs else model
        add_adapters(model, AdapterConfig(r=4, use_dora=True, dropout=0.1))
        saved: list[tuple[int, ...]] = []

        def pack(tensor: Tensor, saved: list[tuple[int, ...]] = saved) -> Tensor:
            saved.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(flat_batch(LENGTHS))
        kept[packs] = saved
    weights = {(144, 48), (48, 48), (256, 48), (48, 128), (128, 48), (48, 144), (48, 256)}
    assert any(shape in weights for shape in kept[False])            # plain linears keep their weight, which is there anyway
    assert not any(shape in weights for shape in kept[True])
    assert len(kept[True]) < len(kept[False])


@pytest.mark.parametrize(("double", "bits"), [(True, 4 + 8 / 64 + 32 / 256 / 64), (False, 4 + 32 / 64)])
def test_a_weight_takes_little_more_than_half_a_byte(double: bool, bits: float) -> None:
    model = Decoder(make_config("llama", vocabulary=61, layers=1, width=256, heads=4, kv_heads=2)[0])
    weights = sum(module.weight.numel() for module in model.blocks.modules() if isinstance(module, nn.Linear))
    quantise_base(model, type="nf4", double=double)
    packed = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert sum(module.memory_bytes for module in packed) == pytest.approx(weights * bits / 8, rel=1e-3)
    for module in packed:
        assert not list(module.parameters())
        assert not module.state_dict()


def test_the_bias_stays_as_it_is_and_a_model_without_a_plain_linear_still_tells_its_dtype(tiny_model: MakeModel) -> None:
    model = tiny_model("gpt2")
    biases = {name: p.clone() for name, p in model.named_parameters() if name.endswith("bias")}
    quantised(model)
    add_adapters(model, AdapterConfig(r=4))
    named = {name.replace(".base.", "."): p for name, p in model.named_parameters()}
    assert all(torch.equal(named[name], bias) for name, bias in biases.items())
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))     # as Setup.product_dtype asks
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(torch.zeros(1, linear.in_features)).dtype == torch.bfloat16


def test_moving_and_casting_a_model_keep_its_packed_weights(tiny_model: MakeModel) -> None:
    model = quantised(tiny_model("llama"))
    linear = model.get_submodule("blocks.0.qkv")
    assert isinstance(linear, QuantisedLinear)
    before = linear.matrix(torch.float32)
    for moved in (model.to(torch.bfloat16), model.double(), model.to("cpu"), copy.deepcopy(model)):
        other = moved.get_submodule("blocks.0.qkv")
        assert isinstance(other, QuantisedLinear)
        assert torch.equal(other.matrix(torch.float32), before)
    assert model.norm.weight.dtype == torch.float64


def test_adapters_of_a_quantised_base_merge_into_the_unquantised_one(tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    """The merged weights differ from the plain base's by the adapter exactly, and not by what quantising did."""
    model, batch = quantised(tiny_model("llama")), flat_batch(LENGTHS)
    add_adapters(model, AdapterConfig(r=4, alpha=8))
    disturb(model)
    with pytest.raises(WrongUse, match=r"the base is quantised .*load the unquantised base"):
        merged(model)
    whole = merge_into(tiny_model("llama"), model)
    other = tiny_model("llama")
    add_adapters(other, AdapterConfig(r=4, alpha=8))
    other.load_state_dict({**other.state_dict(), **{name: p for name, p in model.named_parameters() if p.requires_grad}})
    torch.testing.assert_close(whole(batch), other(batch), atol=2e-5, rtol=1e-5)
    assert not is_quantised(whole)


def test_a_quantised_base_learns_through_its_adapters(tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    model, batch = quantised(tiny_model("llama")), flat_batch((20, 30))
    add_adapters(model, AdapterConfig(r=4))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(batch), batch.targets)
        optimizer.zero_grad()
        loss.backward()                                                          # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_nothing_of_a_quantised_base_is_trained(tiny_model: MakeModel) -> None:
    model = tiny_model("llama")
    assert not is_quantised(model)
    quantise_base(model, type="fp4", double=False)
    assert is_quantised(model)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_quantising_twice_and_unknown_types_are_refused(tiny_model: MakeModel) -> None:
    with pytest.raises(WrongUse, match="no 4-bit type 'int4'; use nf4 or fp4"):
        quantised(tiny_model("llama"), "int4")
    with pytest.raises(WrongUse, match="is quantised already"):
        quantised(quantised(tiny_model("llama")))
    model = tiny_model("llama")
    add_adapters(model, AdapterConfig())
    with pytest.raises(WrongUse, match="has adapters"):
        quantised(model)


def test_without_bitsandbytes_the_cure_is_named(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    model = tiny_model("llama")
    with pytest.raises(WrongUse, match="pip install bitsandbytes, or use method=lora"):
        quantise_base(model, type="nf4", double=True)
    assert not is_quantised(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_adding_adapters_keeps_the_packed_linears(tiny_model: MakeModel) -> None:
    model = quantised(tiny_model("llama"))
    add_adapters(model, AdapterConfig(target_modules=("q_proj",)))
    assert isinstance(model.get_submodule("blocks.0.qkv.base"), QuantisedLinear)
    assert isinstance(model.get_submodule("blocks.0.mlp_in"), QuantisedLinear)
    assert type(model.get_submodule("head")) is FrozenLinear
