"""Adapters: their formulas, what trains and what does not, where they sit, what they cost, and merging."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from adapted_models import adapted, disturb
from powertrain.models.adapters import files, targets
from powertrain.models.adapters.attached import (
    CLASSES,
    AdaptedLinear,
    Adapter,
    Change,
    LsLora,
    Rows,
    adapters_of,
    add_adapters,
    has_adapters,
    measure_adapters,
    merge_into,
    merged,
    penalty_of,
)
from powertrain.models.adapters.files import load_adapter, save_model
from powertrain.models.adapters.targets import AdapterConfig, adapted_layers, count_adapter_parameters, find_slots, find_targets
from powertrain.models.config import FAMILIES
from powertrain.models.decoder import Decoder
from powertrain.models.kernels.frozen import FrozenLinear
from powertrain.records import Batch, WrongUse

MakeModel, MakeBatch = Callable[..., Decoder], Callable[..., Batch]
LORA = AdapterConfig(r=4, alpha=8)
CONFIGS = {"lora": LORA, "rslora": replace(LORA, use_rslora=True), "dora": replace(LORA, use_dora=True),
           "lslora": replace(LORA, kind="lslora", sigma=0.7)}
ALL_KINDS = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
MATRICES = pytest.mark.parametrize("config", [CONFIGS[name] for name in ("lora", "rslora", "dora")],
                                   ids=["lora", "rslora", "dora"])
LENGTHS = (5, 1, 33)


@pytest.mark.parametrize("family", FAMILIES)
@ALL_KINDS
def test_a_new_adapter_changes_nothing(config: AdapterConfig, family: str, tiny_model: MakeModel,
                                       flat_batch: MakeBatch) -> None:
    model, batch = tiny_model(family), flat_batch(LENGTHS)
    before = model(batch)
    add_adapters(model, config)
    torch.testing.assert_close(model(batch), before, atol=1e-5, rtol=1e-5)       # DoRA divides by the length it multiplies by
    disturb(model)
    assert (model(batch) - before).abs().max() > 0.01


@ALL_KINDS
def test_only_the_adapters_train(config: AdapterConfig, tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    model = adapted(tiny_model("llama"), config)
    model(flat_batch(LENGTHS)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".adapters." in name)
        assert (parameter.grad is not None and bool(parameter.grad.any())) == (".adapters." in name), name
        assert ".adapters." not in name or parameter.dtype == torch.float32


def test_the_trained_parameters_are_called_after_the_modules(tiny_model: MakeModel) -> None:
    model = tiny_model("llama", layers=1)
    add_adapters(model, replace(CONFIGS["dora"], target_modules=("q_proj", "down_proj")))
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [
        "blocks.0.qkv.adapters.q_proj.A", "blocks.0.qkv.adapters.q_proj.B", "blocks.0.qkv.adapters.q_proj.magnitude",
        "blocks.0.mlp_out.adapters.down_proj.A", "blocks.0.mlp_out.adapters.down_proj.B",
        "blocks.0.mlp_out.adapters.down_proj.magnitude"]


def linear_with(config: AdapterConfig, names: tuple[str, ...], tiny_model: MakeModel, family: str = "qwen2") -> AdaptedLinear:
    """The first qkv of a model, with adapters on some of its parts; qwen2's has a bias."""
    model = adapted(tiny_model(family, kv_heads=2), replace(config, target_modules=names))
    linear = model.get_submodule("blocks.0.qkv")
    assert isinstance(linear, AdaptedLinear)
    return linear


def weights_of(linear: AdaptedLinear, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
    """W and b of a slot's rows, A and B of its adapter, and the adapter."""
    slot = linear.slots[index]
    adapter = linear.adapter(slot)
    rows = slice(slot.first, slot.last)
    return linear.base.weight[rows], linear.base.bias[rows], adapter.A, adapter.B, adapter


def test_lora_is_its_formula_on_its_rows_alone(tiny_model: MakeModel) -> None:
    linear = linear_with(LORA, ("q_proj", "v_proj"), tiny_model)
    x = torch.randn(7, 48)
    out, base = linear(x), F.linear(x, linear.base.weight, linear.base.bias)
    assert [(slot.first, slot.last) for slot in linear.slots] == [(0, 48), (64, 80)]
    for index, rows in enumerate((slice(0, 48), slice(64, 80))):
        w, b, down, up, _ = weights_of(linear, index)
        torch.testing.assert_close(out[:, rows], F.linear(x, w + 8 / 4 * up @ down, b), atol=1e-5, rtol=1e-5)
    assert torch.equal(out[:, 48:64], base[:, 48:64])


def test_rslora_scales_by_the_root_of_r(tiny_model: MakeModel) -> None:
    linear = linear_with(CONFIGS["rslora"], ("k_proj",), tiny_model)
    w, b, down, up, _ = weights_of(linear, 0)
    x = torch.randn(7, 48)
    torch.testing.assert_close(linear(x)[:, 48:64], F.linear(x, w + 8 / 2 * up @ down, b), atol=1e-5, rtol=1e-5)


def test_dora_turns_the_rows_and_trains_their_lengths_apart(tiny_model: MakeModel) -> None:
    linear = linear_with(CONFIGS["dora"], ("q_proj",), tiny_model)
    w, b, down, up, adapter = weights_of(linear, 0)
    turned = w + 2 * up @ down
    x = torch.randn(7, 48)
    expected = F.linear(x, adapter.magnitude[:, None] * turned / turned.norm(dim=1, keepdim=True).detach(), b)
    out = linear(x)[:, :48]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    given, wanted = (torch.autograd.grad(y.square().sum(), [down, up, adapter.magnitude]) for y in (out, expected))
    torch.testing.assert_close(given, wanted, atol=1e-3, rtol=1e-4)


def test_lslora_puts_its_function_between_the_matrices(tiny_model: MakeModel) -> None:
    linear = linear_with(CONFIGS["lslora"], ("v_proj",), tiny_model)
    w, b, down, up, adapter = weights_of(linear, 0)
    x = torch.randn(7, 48)
    z = torch.tanh(x @ down.T / adapter.log_sigma.exp())
    a = adapter.a
    phi = a[0] + a[1] * z + a[2] * torch.sin(math.pi * z) + a[3] * torch.cos(math.pi * z)
    torch.testing.assert_close(linear(x)[:, 64:], F.linear(x, w, b) + 2 * phi @ up.T, atol=1e-5, rtol=1e-5)


class WithoutFloat64(Tensor):
    """A tensor on a device that has no float64, as MPS."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        if function is Tensor.double:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_lslora_is_measured_on_a_device_without_float64(tiny_model: MakeModel) -> None:
    model = adapted(tiny_model("llama"), CONFIGS["lslora"])
    expected = measure_adapters(model)
    for module in model.modules():
        if isinstance(module, LsLora):
            module.a = nn.Parameter(module.a.detach().as_subclass(WithoutFloat64))
    assert measure_adapters(model) == expected


def test_lslora_starts_at_the_identity_and_the_given_sigma(tiny_model: MakeModel) -> None:
    model = tiny_model("llama")
    add_adapters(model, CONFIGS["lslora"])
    told = measure_adapters(model)
    assert told.keys() == {slot.theirs for slot in find_slots(model.config)}
    for one in told.values():
        assert one == {"deviation": 0, "non_linearity": 0, "sigma": pytest.approx(0.7)}
    adapter = next(adapter for _, adapter in adapters_of(model))
    assert isinstance(adapter, LsLora)
    with torch.no_grad():
        adapter.a.copy_(torch.tensor([0.5, 1.0, 0.3, 0.4]))
    first = next(iter(measure_adapters(model).values()))
    assert first["deviation"] == pytest.approx(0.5 ** 0.5)
    assert first["non_linearity"] == pytest.approx(0.5)
    penalty = penalty_of(model)
    assert penalty is not None
    assert penalty.item() == pytest.approx(0.01 * 0.5)


def test_the_penalty_pulls_the_function_to_the_identity_and_nothing_else(tiny_model: MakeModel) -> None:
    model = adapted(tiny_model("llama"), CONFIGS["lslora"])
    penalty = penalty_of(model)
    assert penalty is not None
    penalty.backward()                                                           # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if not name.endswith(".a"):
            assert parameter.grad is None
            continue
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 0.02 * (parameter.detach() - torch.tensor([0.0, 1, 0, 0])))


def test_there_is_no_penalty_without_something_to_pull(tiny_model: MakeModel) -> None:
    assert penalty_of(tiny_model("llama")) is None
    for config in (LORA, replace(CONFIGS["lslora"], regularisation=0)):
        assert penalty_of(adapted(tiny_model("llama"), config)) is None


@ALL_KINDS
def test_adapters_learn_and_the_base_stays(config: AdapterConfig, tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    model, batch = tiny_model("gpt2"), flat_batch((20, 30))
    add_adapters(model, config)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(batch), batch.targets)
        optimizer.zero_grad()
        loss.backward()                                                          # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(torch.equal(frozen[name], p) for name, p in model.named_parameters() if name in frozen)


@ALL_KINDS
def test_dropout_acts_on_each_adapters_input_in_training_only(config: AdapterConfig, tiny_model: MakeModel) -> None:
    linear = linear_with(replace(config, dropout=0.5), ("k_proj", "v_proj"), tiny_model)
    x = torch.randn(7, 48)
    assert torch.equal(linear(x)[:, :48], linear(x)[:, :48])                     # q has no adapter
    assert not torch.equal(linear(x)[:, 48:], linear(x)[:, 48:])
    linear.eval()
    assert torch.equal(linear(x), linear(x))
    linear.train()
    with torch.no_grad():        # the same matrices in both: what differs is what was dropped
        linear.base.weight[64:].copy_(linear.base.weight[48:64])
        linear.base.bias[64:].copy_(linear.base.bias[48:64])
        for mine, other in zip(linear.adapter(linear.slots[1]).parameters(), linear.adapter(linear.slots[0]).parameters(),
                               strict=True):
            mine.copy_(other)
    out = linear(x)
    assert not torch.equal(out[:, 48:64], out[:, 64:])


@MATRICES
def test_dropout_drops_what_peft_drops(config: AdapterConfig, tiny_model: MakeModel) -> None:
    import peft

    linear = linear_with(replace(config, dropout=0.3), ("q_proj",), tiny_model)
    w, b, down, up, adapter = weights_of(linear, 0)
    plain = nn.ModuleDict({"q_proj": nn.Linear(48, 48)})
    plain.load_state_dict({"q_proj.weight": w, "q_proj.bias": b})
    theirs = peft.get_peft_model(plain, peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.3, target_modules=["q_proj"], use_rslora=config.use_rslora, use_dora=config.use_dora))
    for name, parameter in theirs.named_parameters():
        for end, tensor in (("lora_A.default.weight", down), ("lora_B.default.weight", up)):
            parameter.data.copy_(tensor) if name.endswith(end) else None
        if "magnitude" in name:
            parameter.data.copy_(adapter.magnitude)
    x, outputs = torch.randn(7, 48), []
    for module in (linear, theirs.base_model.model["q_proj"]):
        torch.manual_seed(3)
        outputs.append(module(x)[:, :48])
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(outputs[0], linear.eval()(x)[:, :48], atol=0.01)


@pytest.mark.parametrize("config", [LORA, CONFIGS["dora"]], ids=["lora", "dora"])
def test_what_dropout_gives_is_right_on_average(config: AdapterConfig, tiny_model: MakeModel) -> None:
    linear = linear_with(replace(config, dropout=0.3), ("q_proj",), tiny_model)
    x = torch.randn(1, 48)
    with torch.no_grad():
        mean = linear(x.expand(20_000, -1)).mean(0)
        exact = linear.eval()(x)[0]
    torch.testing.assert_close(mean, exact, atol=0.05, rtol=0)


NAMES = {"gpt2": ["c_attn", "c_proj", "c_fc"], "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
         "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
         "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}


@pytest.mark.parametrize("family", NAMES)
def test_all_linear_is_all_that_the_blocks_have(family: str, tiny_model: MakeModel) -> None:
    config = tiny_model(family).config
    slots = find_targets(config, "all-linear")
    assert list(dict.fromkeys(slot.name for slot in slots)) == NAMES[family]
    assert find_targets(config, tuple(NAMES[family])) == slots
    assert {slot.layer for slot in slots} == {0, 1}


@pytest.mark.parametrize(("targets", "found"), [
    (("q_proj",), ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
    ("o_proj", ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]),
    (("layers.1.mlp.up_proj", "model.layers.0.self_attn.v_proj"),
     ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj"]),
    (r".*\.1\..*[qk]_proj", ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"]),
])
def test_targets_are_found_as_peft_finds_them(targets: str | tuple[str, ...], found: list[str], tiny_model: MakeModel) -> None:
    config = tiny_model("llama").config
    assert [slot.theirs for slot in find_targets(config, targets)] == found
    assert adapted_layers(config, replace(LORA, target_modules=targets)) == tuple(sorted({int(name[13]) for name in found}))


def test_an_unknown_target_names_those_that_exist(tiny_model: MakeModel) -> None:
    model = tiny_model("phi3")
    with pytest.raises(WrongUse, match=r"phi3 has no module 'q_proj'.*qkv_proj, o_proj, gate_up_proj, down_proj, and all-"):
        add_adapters(model, replace(LORA, target_modules=("o_proj", "q_proj")))
    assert not has_adapters(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(WrongUse, match="names nothing, so there is nothing to train; use all-linear, or some of qkv_proj"):
        add_adapters(model, replace(LORA, target_modules=()))
    with pytest.raises(WrongUse, match="no module '_proj'"):
        add_adapters(model, replace(LORA, target_modules=("_proj",)))
    with pytest.raises(WrongUse, match="no module 'lm_head'"):
        add_adapters(model, replace(LORA, target_modules="lm_head"))
    with pytest.raises(WrongUse, match="neither a module's name nor a regular expression"):
        add_adapters(model, replace(LORA, target_modules="(q_proj"))


@pytest.mark.parametrize(("changes", "message"), [
    ({"kind": "sinc"}, "no adapter of kind 'sinc'; the kinds are lora, lslora"), ({"r": 0}, "r=0"), ({"alpha": 0.0}, "alpha=0"),
    ({"dropout": 1.0}, "dropout=1"), ({"sigma": 0.0}, "sigma=0"), ({"regularisation": -1.0}, "regularisation=-1"),
    ({"kind": "lslora", "use_dora": True}, "DoRA scales the rows of a matrix, and a lslora adapter is no matrix"),
])
def test_impossible_adapters_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        AdapterConfig(**changes)


def test_adapters_do_not_stack(tiny_model: MakeModel) -> None:
    model = tiny_model("llama")
    add_adapters(model, LORA)
    with pytest.raises(WrongUse, match="has adapters already"):
        add_adapters(model, LORA)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@ALL_KINDS
def test_the_count_is_what_is_built(config: AdapterConfig, family: str, tiny_model: MakeModel) -> None:
    model = tiny_model(family)
    config = replace(config, target_modules=("v_proj", "down_proj") if family == "llama" else "all-linear")
    add_adapters(model, config)
    assert count_adapter_parameters(model.config, config) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_half_precision_base_computes_in_the_dtype_of_its_input(tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    """Frozen bf16 weights under an fp32 residual give what the same weights give in fp32."""
    stored, batch = tiny_model("llama").bfloat16(), flat_batch(LENGTHS)
    exact = tiny_model("llama")
    exact.load_state_dict({name: tensor.float() for name, tensor in stored.state_dict().items()})
    models = [adapted(model, CONFIGS["dora"]) for model in (stored, exact)]
    for parameter, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        if parameter.requires_grad:
            parameter.data.copy_(other.data)
    results = []
    for model in models:
        logits = model(batch)
        logits.square().mean().backward()
        results.append((logits, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
    assert models[0].get_submodule("blocks.0.qkv.base").weight.dtype == torch.bfloat16
    assert results[0][0].dtype == torch.float32
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


@ALL_KINDS
def test_mixed_precision_stays_near_and_gives_fp32_gradients(config: AdapterConfig, tiny_model: MakeModel,
                                                             flat_batch: MakeBatch) -> None:
    model, batch = adapted(tiny_model("qwen2"), config), flat_batch(LENGTHS)
    exact = model(batch).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch)
    logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all()
               for p in model.parameters() if p.requires_grad)
    # two layers of products rounded to 8 bits: a few per cent of the logits' deviation
    assert (logits.float() - exact).std() < 0.05 * exact.std()


class SavedBytes:
    """What autograd keeps for the backward pass, beside the tensors that are there anyway."""

    def __init__(self, *known: Tensor) -> None:
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.total = 0

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self.known:
            self.known.add(tensor.untyped_storage().data_ptr())
            self.total += tensor.nbytes
        return tensor

    def of(self, run: Callable[[], Tensor]) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            return run()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_frozen_linear_keeps_no_copy_of_its_weight(stored: torch.dtype) -> None:
    linear = FrozenLinear.of(nn.Linear(48, 96)).to(stored)
    x = torch.randn(7, 48, requires_grad=True)
    saved = SavedBytes(*linear.parameters(), x)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = saved.of(lambda: linear(x))
        assert out.dtype == (torch.bfloat16 if autocast else torch.float32)
        gradient, = torch.autograd.grad(out.float().sum(), x)
        torch.testing.assert_close(gradient, linear.weight.float().sum(0).expand(7, -1), atol=0.1 if autocast else 1e-5, rtol=0)
    assert saved.total == 0


class Products(TorchDispatchMode):
    """The matrix products that are made, by the shape of their matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes.append(tuple(args[-1].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [LORA, CONFIGS["lslora"]], ids=["lora", "lslora"])
def test_checkpointing_does_not_make_the_last_frozen_product_again(config: AdapterConfig, stored: torch.dtype,
                                                                   tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    model = adapted(tiny_model("llama", layers=1).to(stored), config)

    def run_twice(block: Any, index: int, *rest: Any) -> Tensor:
        out: Tensor = checkpoint(block, *rest, use_reentrant=False)
        return out

    logits = model(flat_batch(LENGTHS), run_block=run_twice)
    with Products() as products:
        logits.square().mean().backward()
    down, qkv = (128, 48), (48, 144)
    assert products.shapes.count(qkv) == 1              # recomputed: attention needs it; that it is seen at all
    assert down not in products.shapes                  # (in, out) forward; the backward product has (out, in)
    assert products.shapes.count((48, 128)) == 1


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@ALL_KINDS
@pytest.mark.filterwarnings("ignore")              # of torch's compiler about itself
def test_an_adapted_linear_compiles_whole(config: AdapterConfig, stored: torch.dtype, tiny_model: MakeModel) -> None:
    model = adapted(tiny_model("qwen2", kv_heads=2).to(stored), config)
    linear = model.get_submodule("blocks.0.qkv")
    x = torch.randn(7, 48)
    results = []
    for run in (linear, torch.compile(linear, dynamic=False, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(x)
        out.float().square().mean().backward()
        results.append((out, [p.grad for p in linear.parameters() if p.requires_grad]))
    torch.testing.assert_close(results[1], results[0], atol=0.05, rtol=0.02)     # bf16, rounded at other places


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "phi3", "qwen2"])
@MATRICES
def test_a_merged_model_gives_equal_logits_without_adapters(config: AdapterConfig, family: str, tiny_model: MakeModel,
                                                            flat_batch: MakeBatch) -> None:
    model, batch = adapted(tiny_model(family), config), flat_batch(LENGTHS)
    plain = merged(model)
    assert not has_adapters(plain)
    assert plain.state_dict().keys() == tiny_model(family).state_dict().keys()
    assert not any(isinstance(module, FrozenLinear) for module in plain.modules())
    assert all(parameter.requires_grad for parameter in plain.parameters())
    torch.testing.assert_close(plain(batch), model(batch), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(merge_into(tiny_model(family), model)(batch), plain(batch), atol=0, rtol=0)


def test_merging_leaves_the_adapted_model_alone_and_keeps_the_dtype(tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    model, batch = adapted(tiny_model("llama").bfloat16(), LORA), flat_batch(LENGTHS)
    before = model(batch)
    plain = merged(model)
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.bfloat16}
    assert torch.equal(model(batch), before)
    out = model.blocks[0].attention_out
    down, up = out.adapters.o_proj.parameters()
    assert torch.equal(plain.blocks[0].attention_out.weight, (out.base.weight.float() + 2 * up @ down).bfloat16())


def test_what_cannot_be_merged_says_why(tiny_model: MakeModel) -> None:
    with pytest.raises(WrongUse, match="LS-LoRA adapter cannot be merged: it puts a non-linear function"):
        merged(adapted(tiny_model("llama"), CONFIGS["lslora"]))
    with pytest.raises(WrongUse, match="no adapters"):
        merged(tiny_model("llama"))
    with pytest.raises(WrongUse, match=r"blocks.0.mlp_in of 256 x 48, which this base does not have"):
        merge_into(tiny_model("llama", mlp_width=64), adapted(tiny_model("llama"), LORA))


class Bias(Adapter):
    """Adds a trained vector."""

    kind = "bias"

    def forward(self, x: Tensor, rows: Rows) -> Change:
        return Change(self.B[:, 0].expand(len(x), -1))


def test_another_kind_is_a_class_a_line_and_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: MakeModel,
                                            flat_batch: MakeBatch) -> None:
    monkeypatch.setitem(CLASSES, "bias", Bias)
    for module in (targets, files):
        monkeypatch.setattr(module, "KINDS", ("lora", "lslora", "bias"))
    model, batch = tiny_model("llama"), flat_batch(LENGTHS)
    before = model(batch)
    add_adapters(model, AdapterConfig(kind="bias", r=1, target_modules=("down_proj",)))
    torch.testing.assert_close(model(batch), before)
    disturb(model)
    assert not torch.equal(model(batch), before)
    save_model(model, tmp_path)
    loaded = tiny_model("llama")
    assert load_adapter(loaded, tmp_path).kind == "bias"
    assert torch.equal(loaded(batch), model(batch))
