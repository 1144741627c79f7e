"""Work and memory beside frozen weights: against torch's own counters, on the decoder with real adapters."""

import contextlib
from functools import partial

import pytest
import torch
from small_steps import Case
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from powertrain.cost.estimate import workload_work
from powertrain.cost.memory import peak_memory
from powertrain.cost.weights import backward_of, frozen_bytes, lowest_layer
from powertrain.cost.work import forward_flops, recomputed_flops, recomputed_of, step_work, training_flops
from powertrain.cost.workload import Workload
from powertrain.facts.model import model_facts
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder, run_plainly
from powertrain.models.kernels.attention import math_attention, sdpa_attention
from powertrain.models.kernels.losses import token_loss
from powertrain.models.kernels.quantised import QuantisedLinear, quantise_base
from powertrain.records import Batch, OptimizerFacts
from powertrain.shapes import FOUR_BIT_BYTES

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


def facts_of(config, adapters, stored="fp32", others=""):
    return model_facts(config, method="lora", path="here", adapters=adapters, frozen_dtype=stored, unquantised_dtype=others)


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
    assert again == pytest.approx(recomputed_flops(facts, [LENGTH] * DOCUMENTS, 1) + hidden_scores_flops(facts, LAYERS))


def test_blocks_below_the_lowest_adapter_are_never_computed_again():
    facts = facts_of(config_of(layers=5), AdapterConfig(r=4, target_modules=r"model\.layers\.[34]\..*"))
    assert lowest_layer(facts) == 3
    assert [len(recomputed_of(facts, every, "fp32")) for every in (1, 2, 3, 4, 5)] == [2, 1, 1, 1, 0]


def test_the_optimizer_and_the_gradients_move_only_what_is_trained():
    config = config_of(width=512, heads=8)
    facts, full = facts_of(config, AdapterConfig(r=4)), model_facts(config)
    tuned, whole = (step_work(model, [[LENGTH]], "fp32") for model in (facts, full))
    assert tuned.optimizer_bytes / whole.optimizer_bytes == pytest.approx(facts.trainable / full.trainable)
    assert tuned.gemm_bytes < whole.gemm_bytes
    assert tuned.flops > forward_flops(facts, [LENGTH])


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("width", [128, 512])                # fullest at the loss, and in the last block
@pytest.mark.parametrize(("stored", "dtype", "every"), [
    ("fp32", "fp32", 0), ("fp32", "bf16", 0), ("bf16", "bf16", 0), ("bf16", "fp32", 0), ("fp32", "bf16", 1), ("nf4", "bf16", 0),
])
def test_the_peak_of_a_lora_step_is_within_1_percent_of_what_torch_allocates(stored, dtype, every, width):
    case = Case(dtype=dtype, adapters=AdapterConfig(r=8), stored=stored, every=every,
                model={"width": width, "vocabulary": 1000 if width == 128 else VOCABULARY})
    assert sum(peak_memory(case.facts, case.workload).values()) == pytest.approx(case.measured_bytes(), rel=0.01)


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
        {}, {"base_dtype": "bf16"}, {"optimizer": OptimizerFacts(hidden_bytes=2, outside_bytes=2, vector_bytes=2)}))
    assert plain["weights"] - held["weights"] == 2 * facts.matmul_parameters
    assert small["optimizer"] == 2 * facts.trainable
    again, once, less = (workload_work(facts, workload("bf16", **change)) for change in (
        {}, {"base_dtype": "bf16"}, {"optimizer": OptimizerFacts(hidden_bytes=2, outside_bytes=2, vector_bytes=2)}))
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
