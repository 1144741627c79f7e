"""Work and memory beside frozen weights: against torch's own counters, on the decoder with real adapters."""

import contextlib
import dataclasses
import json
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from powertrain.cost.activations import saved_bytes
from powertrain.cost.estimate import estimate, workload_work
from powertrain.cost.gradients import backward_of, checkpointed_layers, lowest_layer
from powertrain.cost.memory import peak_memory
from powertrain.cost.stored import FOUR_BIT_BYTES, frozen_bytes
from powertrain.cost.work import forward_flops, recomputed_flops, step_work, training_flops
from powertrain.cost.workload import Workload
from powertrain.facts.model import model_facts
from powertrain.models.adapters import AdapterConfig, add_adapters
from powertrain.models.attention import math_attention, sdpa_attention
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder, run_plainly
from powertrain.models.quantised import QuantisedLinear, quantise_base
from powertrain.records import Batch, Hardware, ModelFacts, UnknownFact
from powertrain.training.setup import token_loss

DOCUMENTS, LENGTH, VOCABULARY, LAYERS = 3, 40, 300, 3
KERNELS = {"math": math_attention, "sdpa": sdpa_attention}
# all linears; some of them; those of the two upper blocks; one in the middle of the middle block
TARGETS = ["all-linear", ("q_proj", "v_proj"), r"model\.layers\.[12]\..*", r"model\.layers\.1\.mlp\.down_proj"]


def config_of(family="llama", **changes):
    return make_config(family, **({"vocabulary": VOCABULARY, "layers": LAYERS, "width": 64, "heads": 4, "context": LENGTH}
                                  | changes))[0]


def adapted(config, adapters, dtype=torch.float32, four_bits=False):
    model = Decoder(config).to(dtype)
    if four_bits:
        quantise_base(model, type="nf4", double=True)
    add_adapters(model, adapters)
    return model


@dataclasses.dataclass(frozen=True)
class TunedFacts(ModelFacts):
    """With what the records do not hold yet."""

    adapter_dropout: float = 0.0
    unquantised_dtype: str = ""


def facts_of(config, adapters, stored="fp32", others=""):
    plain = model_facts(config, method="lora", path="here", adapters=adapters, frozen_dtype=stored)
    return TunedFacts(**(vars(plain) | {"adapter_dropout": adapters.dropout, "unquantised_dtype": others}))


def batch(documents=DOCUMENTS, length=LENGTH):
    tokens = torch.randint(VOCABULARY, (documents * length,))
    positions = torch.arange(length).repeat(documents)
    return Batch(tokens, tokens.roll(-1), positions, (length,) * documents, len(tokens))


def workload(dtype="fp32", kernel="sdpa", every=0, **changes):
    return Workload(examples=DOCUMENTS, block=LENGTH, micro_batch=DOCUMENTS, dtype=dtype, checkpoint_every=every,
                    attention_saves_scores=kernel == "math", **changes)


def autocast(dtype):
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()


def checkpointed(every, block, index, *rest):
    if index % every:
        return run_plainly(block, index, *rest)
    return checkpoint(run_plainly, block, index, *rest, use_reentrant=False)


# ------------------------------------------------------------------------------------------------ work


def counted_flops(model, every=0):
    with FlopCounterMode(display=False) as counter:
        one = batch()
        run_block = partial(checkpointed, every) if every else run_plainly
        token_loss(model, model.hidden(one, attention=math_attention, run_block=run_block), one.targets).backward()
    return counter.get_total_flops()


def hidden_scores_flops(facts, passes):
    """What plain attention computes of pairs that causality hides; `passes`: 1 forward, 2 more where it is differentiated."""
    hidden_pairs = DOCUMENTS * LENGTH * (LENGTH - 1) / 2
    return 4 * facts.heads * facts.head_width * hidden_pairs * passes


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("changes", [{}, {"kv_heads": 2, "tied_head": True}])
def test_torch_counts_the_same_flops_beside_frozen_weights(targets, changes):
    config, adapters = config_of(**changes), AdapterConfig(r=4, target_modules=targets)
    facts = facts_of(config, adapters)
    passes = LAYERS + 2 * sum(backward_of(facts, layer).attention for layer in range(LAYERS))
    expected = training_flops(facts, [LENGTH] * DOCUMENTS) + hidden_scores_flops(facts, passes)
    assert counted_flops(adapted(config, adapters)) == pytest.approx(expected)


def test_a_frozen_base_needs_two_thirds_of_the_work():
    config = config_of(width=512, heads=8, layers=12)
    tuned, full = (facts_of(config, AdapterConfig(r=1)), model_facts(config))
    assert training_flops(tuned, [LENGTH]) / training_flops(full, [LENGTH]) == pytest.approx(2 / 3, rel=0.02)


def test_rows_that_train_nothing_do_not_reach_a_head_whose_loss_is_chunked():
    facts = facts_of(config_of(), AdapterConfig(r=4))
    whole, chunked, plain = (workload_work(facts, workload(trained_share=share, loss_chunk_rows=rows)).flops
                             for share, rows in ((1.0, 8), (0.25, 8), (0.25, None)))
    head = 4 * facts.head_parameters * DOCUMENTS * LENGTH      # forward, and the gradient of the rows; none of the weight
    assert whole == plain
    assert whole - chunked == pytest.approx(0.75 * head)


def test_a_recomputed_block_makes_all_but_its_last_frozen_product_again():
    config, adapters = config_of(), AdapterConfig(r=4)
    facts = facts_of(config, adapters)
    model = adapted(config, adapters)
    again = counted_flops(model, every=1) - counted_flops(model)
    # of the last block's attention the hidden half is computed again too
    assert again == pytest.approx(recomputed_flops(facts, [LENGTH] * DOCUMENTS, LAYERS) + hidden_scores_flops(facts, LAYERS))


def test_blocks_below_the_lowest_adapter_are_never_computed_again():
    facts = facts_of(config_of(layers=5), AdapterConfig(r=4, target_modules=r"model\.layers\.[34]\..*"))
    assert lowest_layer(facts) == 3
    assert [checkpointed_layers(facts, every) for every in (1, 2, 3, 4, 5)] == [2, 1, 1, 1, 0]


def test_the_optimizer_and_the_gradients_move_only_what_is_trained():
    config = config_of(width=512, heads=8)
    facts, full = facts_of(config, AdapterConfig(r=4)), model_facts(config)
    tuned, whole = (step_work(model, [[LENGTH]], "fp32") for model in (facts, full))
    assert tuned.optimizer_bytes / whole.optimizer_bytes == pytest.approx(facts.trainable / full.trainable)
    assert tuned.gemm_bytes < whole.gemm_bytes
    assert tuned.flops > forward_flops(facts, [LENGTH])


# ------------------------------------------------------------------------------------------------ memory


def really_saved_bytes(model, dtype, kernel, every):
    """Bytes of the distinct storages kept for the backward pass of the hidden rows, weights and their copies apart."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    shapes = {tuple(shape) for weight in model.parameters() if weight.dim() == 2 for shape in (weight.shape, weight.t().shape)}
    seen = []                                                # weakly: a checkpoint without a backward pass lets go again

    def pack(tensor):
        copy = tensor.dtype is torch.bfloat16 and tuple(tensor.shape) in shapes
        if tensor.untyped_storage().data_ptr() not in weights and not copy:
            seen.append(weakref.ref(tensor))
        return tensor

    one = batch()
    for tensor in (one.tokens, one.positions, one.targets):
        pack(tensor)                                         # the batch holds them, frozen embedding or not
    tables = []

    def run_block(block, index, x, rotary, *rest):
        tables[:] = [pack(tensor) for tensor in rotary or ()]    # a checkpoint holds them without autograd's knowledge
        return (partial(checkpointed, every) if every else run_plainly)(block, index, x, rotary, *rest)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast(dtype):
        hidden = model.hidden(one, attention=KERNELS[kernel], run_block=run_block)
    assert hidden.requires_grad
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for reference in seen if (tensor := reference()) is not None}
    return sum(storages.values())


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("targets", TARGETS)
def test_saved_activations_beside_frozen_weights_are_those_that_torch_saves(targets, kernel, dtype, every):
    config, adapters = config_of(), AdapterConfig(r=4, target_modules=targets)
    facts = facts_of(config, adapters)
    real = really_saved_bytes(adapted(config, adapters), dtype, kernel, every)
    assert saved_bytes(facts, workload(dtype, kernel, every)) == pytest.approx(real, rel=0.03)


@pytest.mark.parametrize(("family", "change"), [
    ("gpt2", {}), ("qwen3", {}), ("llama", {"use_dora": True}), ("llama", {"kind": "lslora"}), ("gemma", {"r": 16}),
    ("llama", {"dropout": 0.1}), ("gpt2", {"dropout": 0.1, "target_modules": ("c_fc",)}),
])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_other_families_and_kinds_of_adapters_save_what_torch_saves(family, change, dtype):
    config, adapters = config_of(family), AdapterConfig(**({"r": 4} | change))
    expected = saved_bytes(facts_of(config, adapters), workload(dtype))
    assert expected == pytest.approx(really_saved_bytes(adapted(config, adapters), dtype, "sdpa", 0), rel=0.05)


def real_peak_bytes(model, dtype, every, folder):
    """The largest sum of allocations during a second step, as torch's profiler logs them, over weights and moments."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False, fused=False)
    run_block = partial(checkpointed, every) if every else run_plainly

    def step():
        optimizer.zero_grad()
        one = batch()
        with autocast(dtype):
            loss = token_loss(model, model.hidden(one, attention=sdpa_attention, run_block=run_block), one.targets)
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
    standing = sum(weight.nbytes for weight in model.parameters()) + 8 * sum(weight.numel() for weight in trained)
    packed = sum(module.memory_bytes for module in model.modules() if isinstance(module, QuantisedLinear))
    return standing + packed + max(total for _, total, _ in totals) - (first - change)


@pytest.mark.parametrize("width", [128, 512])                # fullest at the loss, and in the last block
@pytest.mark.parametrize(("stored", "dtype", "every"), [
    ("fp32", "fp32", 0), ("fp32", "bf16", 0), ("bf16", "bf16", 0), ("bf16", "fp32", 0), ("fp32", "bf16", 1), ("nf4", "bf16", 0),
])
def test_the_peak_of_a_lora_step_is_within_6_percent_of_what_torch_allocates(stored, dtype, every, width, tmp_path):
    config, adapters = config_of(width=width, vocabulary=1000 if width == 128 else VOCABULARY), AdapterConfig(r=8)
    model = adapted(config, adapters, torch.bfloat16 if stored == "bf16" else torch.float32, four_bits=stored == "nf4")
    expected = sum(peak_memory(facts_of(config, adapters, stored), workload(dtype, every=every)).values())
    assert expected == pytest.approx(real_peak_bytes(model, dtype, every, tmp_path), rel=0.06)


def test_dropout_on_the_inputs_of_adapters_is_drawn_for_each_of_them():
    facts = facts_of(config_of(), AdapterConfig(r=4, dropout=0.1))
    inputs = 6 * 64 + facts.mlp_width                        # q, k, v, o, gate and up; down
    assert step_work(facts, [[LENGTH]], "fp32").dropout_elements == LENGTH * LAYERS * inputs


def test_frozen_weights_have_neither_gradients_nor_moments():
    facts = facts_of(config_of(), AdapterConfig(r=4), stored="bf16")
    memory = peak_memory(facts, Workload(examples=2, block=1, micro_batch=1))
    assert memory["optimizer"] == 8 * facts.adapter_parameters
    assert memory["gradients"] == 4 * facts.adapter_parameters
    assert memory["weights"] == 4 * facts.adapter_parameters + 2 * (facts.parameters - facts.adapter_parameters)


def test_techniques_may_hold_the_base_and_the_moments_otherwise():
    facts = facts_of(config_of(), AdapterConfig(r=4), stored="fp32")
    plain, held, small = (peak_memory(facts, workload("bf16", **change)) for change in (
        {}, {"base_dtype": "bf16"}, {"moment_bytes": 2.0}))
    assert plain["weights"] - held["weights"] == 2 * facts.matmul_parameters
    assert small["optimizer"] == 2 * facts.trainable
    again, once, less = (workload_work(facts, workload("bf16", **change)) for change in (
        {}, {"base_dtype": "bf16"}, {"moment_bytes": 2.0}))
    assert again.elementwise_bytes > once.elementwise_bytes  # the weights are not converted for each product
    assert again.operators > once.operators
    assert again.optimizer_bytes - less.optimizer_bytes == 2 * 6 * facts.trainable


def test_four_bits_and_their_scales_are_what_bitsandbytes_stores():
    config = config_of(width=256)
    model = Decoder(config)
    quantise_base(model, type="nf4", double=True)
    packed = sum(module.memory_bytes for module in model.modules() if isinstance(module, QuantisedLinear))
    facts = facts_of(config, AdapterConfig(), stored="nf4")
    assert packed == pytest.approx(FOUR_BIT_BYTES * facts.matmul_parameters, rel=0.005)
    others = sum(weight.nbytes for weight in model.parameters())
    assert frozen_bytes(facts) == pytest.approx(packed + others, rel=0.005)
    half = facts_of(config, AdapterConfig(), stored="nf4", others="bf16")
    assert frozen_bytes(half) == pytest.approx(packed + others / 2, rel=0.005)


def test_what_another_library_computes_has_no_estimate():
    machine = Hardware(name="a CPU", device="cpu", cores=2, memory_bytes=2**34, free_memory_bytes=2**34,
                       peak_flops_per_s={"fp32": 2e11}, bandwidth_bytes_per_s=3e10)
    facts = facts_of(config_of(), AdapterConfig())
    assert estimate(facts, workload(), machine, 10).flops_per_step > 0
    with pytest.raises(UnknownFact, match="transformers"):
        estimate(dataclasses.replace(facts, provider="transformers"), workload(), machine, 10)
