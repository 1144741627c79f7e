"""The decoder under training's conditions: mixed precision, compiling, checkpointing, dropout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.files import save_model
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import FAMILIES
from powertrain.models.decoder import Decoder, Norm, decay_groups, rotary_tables, run_plainly
from powertrain.models.huggingface.folder import load_folder
from powertrain.models.kernels.attention import Attention, bmm_attention, math_attention, ragged_attention, sdpa_attention
from powertrain.records import Batch, WrongUse

MakeModel, MakeBatch = Callable[..., Decoder], Callable[..., Batch]
KERNELS = [math_attention, bmm_attention, ragged_attention, sdpa_attention]


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_packed_together_get_the_logits_they_get_alone(family: str, tiny_model: MakeModel,
                                                                 flat_batch: MakeBatch) -> None:
    model, batch = tiny_model(family), flat_batch((5, 1, 123))
    alone = [model(replace(batch, tokens=tokens, positions=torch.arange(len(tokens)), lengths=(len(tokens),)))
             for tokens in batch.tokens.split(batch.lengths)]
    torch.testing.assert_close(model(batch), torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_another_document_moves_no_logit_and_no_gradient(kernel: Attention, tiny_model: MakeModel,
                                                         flat_batch: MakeBatch) -> None:
    model, batch = tiny_model("qwen3", kv_heads=2), flat_batch((20, 30, 7))
    other = replace(batch, tokens=torch.cat((batch.tokens[:20].flip(0), batch.tokens[20:50], batch.tokens[50:] * 0)))
    logits, inputs = [], []
    for one in (batch, other):
        embedded = model.embed(one).detach().requires_grad_()
        model.embed = lambda _, embedded=embedded: embedded            # type: ignore[method-assign,misc]
        out = model(one, attention=kernel)[20:50]
        logits.append(out)
        inputs.append(torch.autograd.grad(out.square().sum(), embedded)[0])
        del model.embed
    assert torch.equal(*logits)
    assert torch.equal(*inputs)
    assert not inputs[0][:20].any()
    assert not inputs[0][50:].any()


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_logits_do_not_depend_on_later_tokens(family: str, tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    model, batch = tiny_model(family), flat_batch((9,))
    embedded = model.embed(batch).detach().requires_grad_()
    model.embed = lambda _: embedded                                   # type: ignore[method-assign]
    gradient, = torch.autograd.grad(model(batch)[4].sum(), embedded)
    assert not gradient[5:].any()
    assert gradient[:5].any(1).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_mixed_precision_keeps_the_residual_in_fp32_and_stays_near(family: str, kernel: Attention,
                                                                   tiny_model: MakeModel,
                                                                   flat_batch: MakeBatch) -> None:
    model, batch = tiny_model(family, seed=1), flat_batch((5, 1, 33))
    exact = model(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.hidden(batch, attention=kernel)
        logits = model.logits(hidden)
    assert hidden.dtype == torch.float32
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    # two layers of products rounded to 8 bits: a few per cent of the logits' deviation
    assert (logits.float() - exact).std() < 0.05 * exact.std()


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_use_fp32_statistics_on_half_precision(kind: str, tiny_model: MakeModel) -> None:
    config = replace(tiny_model("gpt2").config, norm=kind)
    norm = Norm(48, config)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.fill_(0.5)
    x = (100 + torch.randn(7, 48)).bfloat16()
    assert torch.equal(norm(x), norm(x.float()).bfloat16())


@pytest.mark.parametrize("kernel", [bmm_attention, sdpa_attention])
@pytest.mark.filterwarnings("ignore")              # of torch's compiler about itself
def test_a_compiled_block_gives_what_the_block_gives(kernel: Attention, tiny_model: MakeModel,
                                                     flat_batch: MakeBatch) -> None:
    model, batch = tiny_model("llama", layers=1, kv_heads=2), flat_batch((8, 8))
    compiled = torch.compile(model.blocks[0], dynamic=False, fullgraph=True)     # fullgraph: a graph break is an error

    calls = []

    def run_compiled(block: Any, index: int, x: Tensor, *rest: Any) -> Tensor:
        calls.append(index)
        return compiled(x, *rest)

    results = []
    for run_block in (run_plainly, run_compiled):
        model.zero_grad()
        logits = model(batch, attention=kernel, run_block=run_block)
        logits.square().mean().backward()
        results.append((logits, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    assert calls == [0]
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)      # fused kernels round elsewhere


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_checkpointed_block_gives_the_same_gradients(kernel: Attention, tiny_model: MakeModel,
                                                       flat_batch: MakeBatch) -> None:
    model, batch = tiny_model("gpt2", dropout=0.2), flat_batch((5, 1, 33))

    calls = []

    def run_twice(block: Any, index: int, *rest: Any) -> Tensor:
        calls.append(index)
        out: Tensor = checkpoint(block, *rest, use_reentrant=False)
        return out

    results = []
    for run_block in (run_plainly, run_twice):
        torch.manual_seed(3)
        model.zero_grad()
        model(batch, attention=kernel, run_block=run_block).square().mean().backward()
        results.append([p.grad for p in model.parameters()])
    assert calls == [0, 1]
    assert all(torch.equal(plain, twice) for plain, twice in zip(*results, strict=True))


def test_rotation_starts_anew_with_each_document(tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    rotary = rotary_tables(tiny_model("llama").config, flat_batch((3, 4)))
    assert rotary is not None
    for table, start in zip(rotary, (1, 0), strict=True):
        assert torch.equal(table[:3], table[3:6])
        assert (table[3] == start).all()


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
def test_weights_stored_in_half_precision_leave_the_residual_and_the_logits_in_fp32(family: str, tiny_model: MakeModel,
                                                                                    flat_batch: MakeBatch) -> None:
    model, batch = tiny_model(family), flat_batch((5, 3))
    for tied in (True, False):
        model = Decoder(replace(model.config, tied_head=tied)).requires_grad_(False)
        rounded = Decoder(model.config).requires_grad_(False)
        rounded.load_state_dict({name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()})
        model.bfloat16()
        assert torch.equal(model.embed(batch), rounded.embed(batch))
        hidden = rounded.hidden(batch)
        assert torch.equal(model.logits(hidden), rounded.logits(hidden))
        assert torch.equal(model.norm(hidden), rounded.norm(hidden))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model.hidden(batch).dtype == torch.float32
            assert model.logits(hidden).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_without_adapters_is_saved_whole(family: str, tmp_path: Path, tiny_model: MakeModel,
                                                 flat_batch: MakeBatch) -> None:
    model, batch = tiny_model(family), flat_batch((5, 3))
    save_model(model, tmp_path / "new" / "folder")
    assert torch.equal(load_folder(tmp_path / "new" / "folder")(batch), model(batch))


def test_a_model_with_adapters_is_saved_as_those_and_names_its_base(tmp_path: Path, tiny_model: MakeModel) -> None:
    model = tiny_model("llama")
    model.base = "org/name"
    add_adapters(model, AdapterConfig(r=2))
    save_model(model, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/name"


def test_dropout_acts_in_training_only(tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    model, batch = tiny_model("gpt2", dropout=0.5), flat_batch((5, 3))
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_a_document_beyond_learned_positions_is_refused(tiny_model: MakeModel, flat_batch: MakeBatch) -> None:
    with pytest.raises(WrongUse, match="129 tokens is longer than the context of 128"):
        tiny_model("gpt2")(flat_batch((3, 129)))
    assert tiny_model("llama")(flat_batch((129,))).shape == (129, 61)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_model_predicts_evenly_and_depends_on_the_seed_alone(family: str, tiny_model: MakeModel,
                                                                   flat_batch: MakeBatch) -> None:
    batch, config = flat_batch((5, 33)), tiny_model(family).config
    torch.manual_seed(7)
    model = Decoder(config)
    torch.manual_seed(7)
    again = Decoder(config)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    loss = torch.nn.functional.cross_entropy(model(batch), batch.targets)
    assert abs(loss.item() - 4.11) < 0.2         # ln 61


def test_the_matrices_that_write_to_the_residual_start_smaller(tiny_model: MakeModel) -> None:
    model = Decoder(replace(tiny_model("gpt2").config, layers=8))
    block = model.blocks[3]
    assert abs(block.qkv.weight.std().item() - 0.02) < 1e-3
    assert abs(block.mlp_out.weight.std().item() - 0.005) < 3e-4         # 0.02 / sqrt(2 x 8)
    assert not block.qkv.bias.any()


def test_matrices_decay_and_norms_and_biases_do_not(tiny_model: MakeModel) -> None:
    model = tiny_model("gpt2")
    decayed, kept = decay_groups(model)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(decayed) + len(kept) == len(named)
    assert all(named[id(p)].endswith("bias") or "norm" in named[id(p)] for p in kept)
    assert all("norm" not in named[id(p)] and named[id(p)].endswith("weight") for p in decayed)
