"""The fast way through a model has the gradients of transformers' own: equal in fp32, and no worse rounded in bf16.

The whole fast path of a CPU at once: blocks written by hand, our attention kernel, the loss in chunks, all documents in one
pass. Beside it runs transformers (with peft, where there are adapters) on one document after the other, as autograd finds it.
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_fused_blocks import ByHand, distance, make_batch, make_model
from torch import Tensor

from powertrain.models.adapters.attached import has_adapters, plain_state
from powertrain.models.adapters.files import save_adapter
from powertrain.models.config import FAMILIES
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.folder import save_folder, to_hf_weights
from powertrain.models.kernels.attention import Attention, bmm_attention, ragged_attention
from powertrain.records import IGNORE, Batch
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy

# asks of every family what its decoder can be: heads shared, tied or not as it is not usual, a window shorter than a document
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(family, {}) for family in FAMILIES],
    ("llama", {"kv_heads": 1, "tied_head": True}), ("mistral", {"window": 6, "kv_heads": 2}), ("phi3", {"window": 4}),
    ("gemma", {"kv_heads": 1, "head_width": 8, "tied_head": False}), ("gpt2", {"activation": "gelu"})]
METHODS = ("full", "lora")
CHANCE = 1.05                                # two roundings of the same numbers: over batches the ratio varies by about that
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")      # peft asks it


def half_trained(batch: Batch) -> Batch:
    """Every third token trains nothing, as a prompt."""
    targets = batch.targets.clone()
    targets[::3] = IGNORE
    return replace(batch, targets=targets, trained_tokens=int((targets != IGNORE).sum()))


def their_gradients(model: Any, batch: Batch, dtype: torch.dtype) -> dict[str, Tensor]:
    """By transformers' names; autocast, as its Trainer turns it on for bf16."""
    model.zero_grad(set_to_none=True)
    for tokens, targets in zip(batch.tokens.split(batch.lengths), batch.targets.split(batch.lengths), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = model(tokens[None], use_cache=False).logits[0]
        (F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum") / batch.trained_tokens).backward()
    return {name.replace(".default.", "."): p.grad for name, p in model.named_parameters() if p.grad is not None}


def our_gradients(model: Decoder, batch: Batch, dtype: torch.dtype, scratch: Path, *,
                  attention: Attention = ragged_attention) -> dict[str, Tensor]:
    """The same, on the fast path, under transformers' names and in its layouts, as our files have them."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        hidden = model.hidden(batch, attention=attention, run_block=ByHand(model))
        loss = ChunkedCrossEntropy(16).loss(model, hidden, batch.targets) / batch.trained_tokens
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    if not has_adapters(model):
        return {name.replace("embed_out.", "lm_head."): gradient.clone()
                for name, gradient in to_hf_weights(model.config, gradients).items()}
    found = copy.deepcopy(model)
    for name, parameter in found.named_parameters():
        if name in gradients:
            parameter.data = gradients[name]
    save_adapter(found, scratch, base="")
    return load_file(scratch / "adapter_model.safetensors")


def in_transformers(model: Decoder, folder: Path) -> Any:
    """The same weights in transformers' own class, with peft's adapters if ours has some."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = Decoder(model.config)
    base.load_state_dict(plain_state(model))
    save_folder(base, folder / "base")
    found = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    if not has_adapters(model):
        return found
    save_adapter(model, folder / "adapter", base=str(folder / "base"))
    return PeftModel.from_pretrained(found, str(folder / "adapter"), is_trainable=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("family", "asked"), VARIANTS)
def test_in_fp32_the_fast_path_has_transformers_gradients(family: str, asked: dict[str, Any], method: str,
                                                          tmp_path: Path) -> None:
    model, batch = make_model(family, method, **asked), half_trained(make_batch())
    apart = distance(our_gradients(model, batch, torch.float32, tmp_path / "ours"),
                     their_gradients(in_transformers(model, tmp_path), batch, torch.float32))
    assert len(apart) > 8
    assert max(apart.values()) < 1e-5, max(apart.items(), key=lambda item: item[1])


def further_from_fp32(model: Decoder, attention: Attention, scratch: Path) -> float:
    """How far our bf16 gradients are from fp32's over how far transformers' are: sums of relative distances, three batches."""
    theirs, totals = in_transformers(model, scratch), [0.0, 0.0]
    for seed, lengths in enumerate(((5, 17, 1, 30), (40, 12), (9, 9, 33, 2))):
        batch = half_trained(make_batch(lengths, seed))
        exact = {name: gradient.clone() for name, gradient in their_gradients(theirs, batch, torch.float32).items()}
        totals[0] += sum(distance(our_gradients(model, batch, torch.bfloat16, scratch, attention=attention), exact).values())
        totals[1] += sum(distance(their_gradients(theirs, batch, torch.bfloat16), exact).values())
    assert min(totals) > 0
    return totals[0] / totals[1]


@pytest.mark.parametrize("method", METHODS)
def test_in_bf16_the_fast_path_is_no_further_from_fp32_than_transformers_is(method: str, tmp_path: Path) -> None:
    found = {family: further_from_fp32(make_model(family, method), ragged_attention, tmp_path / family) for family in FAMILIES}
    assert max(found.values()) < CHANCE, found
    assert statistics.mean(found.values()) <= 1, found       # in which chance has no say


def test_batched_products_round_their_scores_and_are_a_little_further(tmp_path: Path) -> None:
    """torch's batched product gives its sums in bf16, and a softmax of rounded scores is further off."""
    found = further_from_fp32(make_model("llama", "full"), bmm_attention, tmp_path)
    assert CHANCE < found < 1.15
