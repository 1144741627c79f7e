"""Blocks written by hand give what the plain ones and autograd give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from adapted_models import make_base, with_adapter
from powertrain.models import decoder
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import FAMILIES
from powertrain.models.decoder import Block, Decoder
from powertrain.models.kernels.attention import bmm_attention, math_attention, ragged_attention, sdpa_attention
from powertrain.models.kernels.fused import parts
from powertrain.models.kernels.fused.block import Functions, HandWritten
from powertrain.models.kernels.fused.compiled import CompiledPart
from powertrain.models.kernels.fused.parts import Parts
from powertrain.models.kernels.rows.parts import RowParts
from powertrain.records import Batch, WrongUse

LENGTHS = (5, 17, 1, 30)
METHODS = ("full", "lora")
KINDS = (Parts, RowParts)


class ByHand:
    """As a technique runs the blocks."""

    def __init__(self, model: Decoder, *change: Any, kind: type[Parts] = Parts) -> None:
        functions = Functions.of(kind(model.config), *change)
        self.blocks = [HandWritten(block, functions) for block in model.blocks if isinstance(block, Block)]

    def __call__(self, block: Block, index: int, *arguments: Any) -> Tensor:
        return self.blocks[index](*arguments)


def make_batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, vocabulary: int = 300) -> Batch:
    draws = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocabulary, (sum(lengths),), generator=draws)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(tokens, tokens.roll(-1), positions, lengths, sum(lengths))


def make_model(family: str, method: str, **asked: Any) -> Decoder:
    model = make_base(family, **asked)
    return (with_adapter(model) if method == "lora" else model.requires_grad_(True)).train()


def gradients(model: Decoder, run_block: Any, *, attention: Any = math_attention, dtype: torch.dtype = torch.float32,
              batch: Batch | None = None) -> dict[str, Tensor]:
    """Of everything that is trained, and the loss."""
    model.zero_grad(set_to_none=True)
    batch = batch or make_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        logits = model(batch, attention=attention, run_block=run_block)
        loss = F.cross_entropy(logits.float(), batch.targets)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative, of each."""
    assert found.keys() == expected.keys()
    return {name: float((found[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)) for name in expected}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_family_has_the_gradients_that_autograd_finds(family: str, method: str, kind: type[Parts]) -> None:
    model = make_model(family, method)
    apart = distance(gradients(model, ByHand(model, kind=kind)), gradients(model, None))
    assert len(apart) > 8
    assert max(apart.values()) < 1e-5, max(apart.items(), key=lambda item: item[1])


@pytest.mark.parametrize("kernel", [bmm_attention, ragged_attention, sdpa_attention])
def test_any_attention_kernel_can_be_inside(kernel: Any) -> None:
    model = make_model("llama", "full", kv_heads=2)
    apart = distance(gradients(model, ByHand(model), attention=kernel), gradients(model, None))
    assert max(apart.values()) < 1e-5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_no_further_from_fp32_than_autograd_in_bf16(family: str, method: str, kind: type[Parts]) -> None:
    model = make_model(family, method)
    exact = gradients(model, None)
    ours = distance(gradients(model, ByHand(model, kind=kind), attention=bmm_attention, dtype=torch.bfloat16), exact)
    theirs = distance(gradients(model, None, attention=bmm_attention, dtype=torch.bfloat16), exact)
    assert sum(ours.values()) <= 1.1 * sum(theirs.values())
    assert 0 < max(ours.values()) < 0.1


def test_adapters_on_some_modules_and_some_layers() -> None:
    model = make_base("llama", layers=3)
    add_adapters(model, AdapterConfig(r=4, target_modules=r"model\.layers\.[12]\.(self_attn\.[kv]_proj|mlp\.down_proj)"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".B"):
                parameter.normal_(std=0.1)
    model.train()
    found, expected = gradients(model, ByHand(model)), gradients(model, None)
    assert max(distance(found, expected).values()) < 1e-5
    assert not any("blocks.0" in name for name in found)


def test_the_first_block_makes_no_gradient_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", "lora")
    seen: list[bool] = []
    plain = Parts.enter_back

    def watched(self: Parts, *arguments: Any) -> Any:
        out = plain(self, *arguments)
        seen.append(out.x is not None)
        return out

    monkeypatch.setattr(Parts, "enter_back", watched)
    gradients(model, ByHand(model))
    assert seen == [True, False]             # the last block first


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_dropout_scales_and_drops_the_same_places_in_both_passes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(family, "full", dropout=0.3)
    masks: dict[int, Tensor] = {}            # by seed, in the order in which they are first asked for
    is_kept = parts.is_kept
    monkeypatch.setattr(parts, "is_kept", lambda seed, x, dropout: masks.setdefault(int(seed), is_kept(seed, x, dropout)))

    def replay(x: Tensor, dropout: float, training: bool = True) -> Tensor:
        if next(embedded, None):
            return x
        return x * list(masks.values())[next(places)] / (1 - dropout)

    def without_dropout(*arguments: Any, dropout: float, **named: Any) -> Tensor:
        assert dropout == 0.3
        return math_attention(*arguments, dropout=0.0, **named)

    embedded: Iterator[bool] = iter([True])
    places = iter(range(100))
    monkeypatch.setattr(decoder.F, "dropout", lambda x, p, training=True: x)
    found = gradients(model, ByHand(model), attention=without_dropout)
    monkeypatch.setattr(decoder.F, "dropout", replay)
    expected = gradients(model, None, attention=without_dropout)
    assert len(masks) == 4
    assert len({mask.numpy().tobytes() for mask in masks.values()}) == 4
    assert max(distance(found, expected).values()) < 1e-5


def test_what_dropout_keeps_is_the_share_asked_for_wherever_one_looks() -> None:
    first, second = (parts.is_kept(torch.tensor(seed, dtype=torch.int32), torch.empty(600, 384), 0.2) for seed in (7, -2**31))
    for part in (first, first[0::2], first[:, 0::16], first[:, :-1] ^ ~first[:, 1:], first[:-1] ^ ~first[1:], first ^ ~second):
        share = 0.8 if part.data_ptr() == first.data_ptr() else 0.8 ** 2 + 0.2 ** 2      # alone; equal to a neighbour
        assert abs(part.float().mean() - share) < 5 * (share * (1 - share) / part.numel()) ** 0.5    # five standard errors


def test_evaluation_drops_nothing_and_records_nothing() -> None:
    model = make_model("gpt2", "full", dropout=0.3).eval()
    with torch.no_grad():
        found, expected = model(make_batch(), run_block=ByHand(model)), model(make_batch())
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_changed_weight_is_seen_at_once() -> None:
    model = make_model("llama", "lora")
    run = ByHand(model)
    gradients(model, run)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    assert max(distance(gradients(model, run), gradients(model, None)).values()) < 1e-5


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False)], ids=["fused", "foreach", "plain"])
def test_an_optimizers_step_is_seen(make: Any) -> None:
    """In bf16, of which the blocks have copies. torch's fused optimizers change weights without counting it."""
    model = make_model("llama", "full")
    run, optimizer = ByHand(model), make(model.parameters())
    before = gradients(model, run, dtype=torch.bfloat16)
    optimizer.step()
    after, expected = (gradients(model, blocks, dtype=torch.bfloat16) for blocks in (run, None))
    name = "blocks.0.mlp_in.weight"
    assert distance(before, expected)[name] > 0.3
    assert distance(after, expected)[name] < 0.05


def test_less_is_kept_than_autograd_keeps() -> None:
    """Of the pass's own tensors: not the residual, not what a norm or an activation gave."""
    model = make_model("llama", "full", mlp_width=128)
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.hidden(make_batch(), attention=bmm_attention)
    plain = sum(kept.values())
    call = ByHand(model).blocks[0]
    x = torch.randn(sum(LENGTHS), model.config.width)
    _, saved = call.forward(x, None, LENGTHS, bmm_attention, record=True)
    c, tokens = model.config, sum(LENGTHS)
    elements = 2 * c.width + (2 * c.heads + 2 * c.kv_heads) * c.head_width + 2 * c.mlp_width + 2
    assert storages(saved) == 4 * tokens * elements
    assert c.layers * storages(saved) < 0.7 * plain


def storages(value: Any) -> int:
    """Bytes of the tensors in a nested value, each storage once."""
    found: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, tuple):
            for part in value:
                walk(part)
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                walk(getattr(value, name))

    walk(value)
    return sum(found.values())


def test_a_second_backward_pass_of_the_same_graph_is_refused() -> None:
    model = make_model("llama", "full")
    loss = model(make_batch(), run_block=ByHand(model)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


@pytest.mark.parametrize("asked", [{"use_dora": True}, {"kind": "lslora"}, {"dropout": 0.1}])
def test_what_is_not_written_by_hand_is_refused(asked: dict[str, Any]) -> None:
    model = with_adapter(make_base("llama"), **asked)
    with pytest.raises(WrongUse):
        ByHand(model)


def test_partly_trained_blocks_are_refused() -> None:
    model = make_base("llama").requires_grad_(True)
    model.blocks[0].mlp_out.weight.requires_grad_(False)  # type: ignore[union-attr]
    with pytest.raises(WrongUse, match="some of a block's weights"):
        ByHand(model)


@pytest.mark.skipif(not torch._inductor.cpp_builder.get_cpp_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("method", METHODS)
def test_compiled_parts_serve_every_length_with_one_compilation(method: str) -> None:
    model = make_model("llama", method)
    torch._dynamo.reset()
    run = ByHand(model, CompiledPart)
    counts = []
    for lengths in ((5, 17), (30, 2, 9), (64,), (3, 3, 3)):
        batch = make_batch(lengths)
        found, expected = gradients(model, run, batch=batch), gradients(model, None, batch=batch)
        assert max(distance(found, expected).values()) < 1e-5
        counts.append(sum(torch._dynamo.utils.counters["stats"].values()))
    assert counts[1:] == counts[:1] * 3
    assert counts[0] > 0
    assert run.blocks[0].functions.leave_back.is_compiled  # type: ignore[attr-defined]


@pytest.mark.skipif(not torch._inductor.cpp_builder.get_cpp_compiler(), reason="no C++ compiler")
def test_a_compiled_block_of_the_other_kind_drops_what_it_drops_uncompiled() -> None:
    """With biases, a norm that takes the mean off, and no gate."""
    model, found = make_model("gpt2", "full", dropout=0.2), []
    torch._dynamo.reset()
    for run in (ByHand(model), ByHand(model, CompiledPart)):
        torch.manual_seed(1)
        found.append(gradients(model, run))
    assert max(distance(*found).values()) < 1e-5


@pytest.mark.skipif(not torch._inductor.cpp_builder.get_cpp_compiler(), reason="no C++ compiler")
def test_compiled_code_adds_a_product_in_place() -> None:
    """The operator is CUDA's alone; here a CPU has it too, so that the code around it can be looked at."""
    def add(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        y.addmm_(a, b)

    def adapted(x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        torch.ops.powertrain.add_product_(y, a, b)
        return y

    given = [torch.randn(*sizes) for sizes in ((8, 6), (6, 10), (8, 2), (2, 10))]
    with torch.library._scoped_library("powertrain", "IMPL") as library:
        library.impl("add_product_", add, "CPU")
        found, (code,) = run_and_get_code(torch.compile(adapted), *given)
    torch.testing.assert_close(found, torch.addmm(given[0] @ given[1], *given[2:]))
    assert (code.count("add_product_.default("), code.count("= empty_strided_cpu(")) == (1, 1)
