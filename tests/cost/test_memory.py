"""The memory formulas against what torch really saves and allocates, on the decoder in eager PyTorch."""

import contextlib
import json
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from powertrain.cost.activations import saved_bytes
from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.facts.model import model_facts
from powertrain.models.attention import bmm_attention, math_attention, sdpa_attention
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder, run_plainly
from powertrain.records import Batch
from powertrain.training.setup import token_loss

DOCUMENTS, LENGTH, VOCABULARY, LAYERS, WIDTH = 3, 40, 300, 3, 64
KERNELS = {"math": math_attention, "bmm": bmm_attention, "sdpa": sdpa_attention}


def config_of(family, dropout=0.0, vocabulary=VOCABULARY):
    return make_config(family, vocabulary=vocabulary, layers=LAYERS, width=WIDTH, heads=4, context=LENGTH,
                       dropout=dropout)[0]


def batch():
    tokens = torch.randint(VOCABULARY, (DOCUMENTS * LENGTH,))
    positions = torch.arange(LENGTH).repeat(DOCUMENTS)
    return Batch(tokens, tokens.roll(-1), positions, (LENGTH,) * DOCUMENTS, len(tokens))


def checkpointed(every, block, index, *rest):
    if index % every:
        return run_plainly(block, index, *rest)
    return checkpoint(run_plainly, block, index, *rest, use_reentrant=False)


def workload(dtype, kernel, every=0, dropout=0.0):
    saves_scores = kernel == "math" or (kernel == "sdpa" and dropout > 0)
    return Workload(examples=DOCUMENTS, block=LENGTH, micro_batch=DOCUMENTS, dtype=dtype, checkpoint_every=every,
                    attention_saves_scores=saves_scores)


def autocast(dtype):
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()


def really_saved_bytes(model, dtype, kernel, every):
    """Bytes of the distinct storages kept for the backward pass of the logits, weights and their copies apart."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    shapes = {tuple(weight.t().shape) for weight in model.parameters() if weight.dim() == 2}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        copy = tensor.dtype is torch.bfloat16 and tuple(tensor.shape) in shapes
        if storage.data_ptr() not in weights and not copy:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    def run_block(block, index, x, rotary, *rest):
        for tensor in rotary or ():
            pack(tensor)                                     # a checkpoint holds it without autograd's knowledge
        run = partial(checkpointed, every) if every else run_plainly
        return run(block, index, x, rotary, *rest)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(dtype):
        hidden = model.hidden(batch(), attention=KERNELS[kernel], run_block=run_block)
        logits = model.logits(hidden)
    assert logits.requires_grad
    return sum(nbytes for nbytes, _ in kept.values())


@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_saved_activations_are_those_that_torch_saves(family, kernel, dtype, every):
    config = config_of(family)
    expected = saved_bytes(model_facts(config), workload(dtype, kernel, every))
    assert expected == pytest.approx(really_saved_bytes(Decoder(config), dtype, kernel, every), rel=0.03)


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout_masks_are_counted(kernel):
    config = config_of("gpt2", dropout=0.1)
    expected = saved_bytes(model_facts(config), workload("fp32", kernel, dropout=0.1))
    assert expected == pytest.approx(really_saved_bytes(Decoder(config), "fp32", kernel, 0), rel=0.1)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_large_vocabulary_makes_the_loss_the_peak(dtype, tmp_path):
    config, planned = config_of("llama", vocabulary=5000), workload(dtype, "sdpa")
    expected = peak_memory(model_facts(config), planned)
    assert expected["loss"] > expected["activations"]
    real = real_peak_bytes(Decoder(config), dtype, "sdpa", 0, tmp_path)
    assert sum(expected.values()) == pytest.approx(real, rel=0.03)


def real_peak_bytes(model, dtype, kernel, every, folder):
    """The largest sum of allocations during a second step, as torch's profiler logs them, over weights and moments."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
    run_block = partial(checkpointed, every) if every else run_plainly

    def step():
        optimizer.zero_grad()
        one = batch()
        with autocast(dtype):
            loss = token_loss(model, model.hidden(one, attention=KERNELS[kernel], run_block=run_block), one.targets)
        loss.backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    totals = [(e["ts"], e["args"]["Total Allocated"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
    _, first, change = min(totals)
    standing = 3 * 4 * sum(weight.numel() for weight in model.parameters())
    return standing + max(total for _, total, _ in totals) - (first - change)


@pytest.mark.parametrize(("family", "kernel", "dtype", "every"), [
    ("gpt2", "math", "fp32", 0), ("gpt2", "sdpa", "bf16", 1), ("llama", "bmm", "bf16", 0), ("llama", "math", "bf16", 2),
    ("llama", "sdpa", "fp32", 1),
])
def test_the_peak_is_within_a_fifth_of_what_torch_allocates(family, kernel, dtype, every, tmp_path):
    config = config_of(family)
    expected = sum(peak_memory(model_facts(config), workload(dtype, kernel, every)).values())
    assert expected == pytest.approx(real_peak_bytes(Decoder(config), dtype, kernel, every, tmp_path), rel=0.2)


def test_each_way_to_save_memory_saves_memory():
    model = model_facts(make_config("llama", vocabulary=5000, layers=8, width=256)[0])
    plain = Workload(examples=16, block=256, micro_batch=16)
    whole = sum(peak_memory(model, plain).values())
    for change in ({"micro_batch": 4}, {"checkpoint_every": 1}, {"checkpoint_every": 2}, {"loss_chunk_rows": 256},
                   {"attention_saves_scores": False}, {"dtype": "bf16"}):
        assert sum(peak_memory(model, Workload(**{**vars(plain), **change})).values()) < whole, change


def test_weights_gradients_and_moments_take_sixteen_bytes_each_where_weights_are_all_there_is():
    model = model_facts(make_config("llama", vocabulary=50, layers=8, width=256)[0])
    memory = peak_memory(model, Workload(examples=1, block=1, micro_batch=1))
    sixteen = memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert sixteen == 16 * model.parameters
    assert sum(memory.values()) == pytest.approx(sixteen, rel=0.01)
