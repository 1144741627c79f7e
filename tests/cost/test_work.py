"""FLOPs and bytes of a step, against a count of single multiplications and against torch's own counter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from powertrain.cost.weights import backward_of, linears
from powertrain.cost.work import (
    Traffic,
    forward_flops,
    mean_keys,
    recomputed_flops,
    recomputed_of,
    step_work,
    training_flops,
)
from powertrain.facts.model import model_facts
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import FAMILIES, make_config
from powertrain.models.decoder import Decoder, run_plainly
from powertrain.models.kernels.attention import bmm_attention, math_attention
from powertrain.models.kernels.losses import token_loss
from powertrain.models.kernels.quantised import quantise_base
from powertrain.records import IGNORE, Batch, ModelFacts
from powertrain.shapes import FOUR_BIT_BYTES
from powertrain.techniques.activation_checkpointing import CheckpointedBlocks
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy

SMALL = {"gpt2": {}, "llama": {"kv_heads": 2}, "qwen3": {"kv_heads": 1, "head_width": 24}, "gpt_neox": {}}
LENGTHS = (1, 5, 17)


def small_config(family="llama", **changes):
    return make_config(family, vocabulary=50, layers=3, width=64, heads=4, context=32, **(SMALL[family] | changes))[0]


def batch_of(lengths):
    tokens = torch.randint(50, (sum(lengths),))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(tokens, tokens.roll(-1), positions, lengths, sum(lengths))


def pairs_one_by_one(lengths):
    return sum(1 for length in lengths for query in range(length) for key in range(length) if key <= query)


def test_a_query_sees_itself_and_what_came_before_in_its_document():
    for lengths in ([1], [5], [1, 5, 123], [7, 7]):
        assert mean_keys(lengths) * sum(lengths) == pytest.approx(pairs_one_by_one(lengths))


def test_forward_flops_are_those_of_each_product_counted_by_itself():
    model = model_facts(small_config())
    width, queries, keys, mlp = model.width, 4 * 16, 2 * 16, model.mlp_width
    per_token = 2 * model.layers * (width * (queries + 2 * keys) + queries * width + 3 * width * mlp) + 2 * 50 * width
    attention = model.layers * pairs_one_by_one(LENGTHS) * 4 * queries
    assert forward_flops(model, LENGTHS) == pytest.approx(sum(LENGTHS) * per_token + attention)


ADAPTERS = {
    "full": None, "all-linear": AdapterConfig(r=4), "q_proj": AdapterConfig(r=4, target_modules=("q_proj",)),
    "o_proj": AdapterConfig(r=4, target_modules=("o_proj",)),
    "v_proj, down_proj": AdapterConfig(r=4, target_modules=("v_proj", "down_proj")),
    "upper layers": AdapterConfig(r=4, target_modules=r".*layers\.[12]\..*proj"),
    "one layer's MLP": AdapterConfig(r=4, target_modules=r".*layers\.1\.mlp\.up_proj"),
    "dropout": AdapterConfig(r=4, dropout=0.1), "dora": AdapterConfig(r=4, use_dora=True),
    "dora, dropout": AdapterConfig(r=4, use_dora=True, dropout=0.1), "lslora": AdapterConfig(r=4, kind="lslora"),
}


def counted(config, adapters=None, *, four_bit=False, every=0, chunk=None, share=1.0, dtype="fp32") -> tuple[int, ModelFacts]:
    """What torch counts for a forward and a backward pass with math attention, and the facts of the model."""
    torch.manual_seed(0)
    model, batch = Decoder(config), batch_of(LENGTHS)
    if four_bit:
        quantise_base(model, type="nf4", double=True)
    if adapters is not None:
        add_adapters(model, adapters)
    facts = model_facts(config, method="lora" if adapters else "full", adapters=adapters,
                        frozen_dtype="nf4" if four_bit else "fp32")
    batch.targets[: round((1 - share) * len(batch.targets))] = IGNORE
    blocks = CheckpointedBlocks(run_plainly, every, True) if every else run_plainly
    loss = ChunkedCrossEntropy(chunk).loss if chunk else token_loss
    with FlopCounterMode(display=False) as counter:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            total = loss(model, model.hidden(batch, attention=math_attention, run_block=blocks), batch.targets)
        total.backward()
    return counter.get_total_flops(), facts


def hidden_flops(facts, every=0):
    """Math attention computes the hidden half of the scores too: forward, again where it is recomputed, and backward."""
    pairs = sum(length * length for length in LENGTHS) - pairs_one_by_one(LENGTHS)
    passes = sum(1 + 2 * backward_of(facts, layer).attention for layer in range(facts.layers))
    return 4 * pairs * facts.heads * facts.head_width * (passes + len(recomputed_of(facts, every, "fp32")))


@pytest.mark.parametrize("adapters", [None, AdapterConfig(r=4)], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_torch_counts_the_same_flops_for_training(family, adapters):
    config = make_config(family, vocabulary=50, layers=3, width=64, heads=4, context=32, **SMALL.get(family, {}))[0]
    found, facts = counted(config, adapters)
    assert found == pytest.approx(training_flops(facts, LENGTHS) + hidden_flops(facts), rel=1e-12)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "nf4"])
@pytest.mark.parametrize("adapters", [name for name in ADAPTERS if name != "full"])
def test_torch_counts_the_same_flops_for_every_kind_of_adapter(adapters, dtype):
    found, facts = counted(small_config(), ADAPTERS[adapters], four_bit=dtype == "nf4", dtype=dtype)
    assert found == pytest.approx(training_flops(facts, LENGTHS) + hidden_flops(facts), rel=1e-12)


@pytest.mark.parametrize("adapters", ["full", "all-linear", "upper layers"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_rows_without_a_target_reach_the_head_only_where_the_loss_is_not_chunked(adapters, chunk):
    share = 14 / sum(LENGTHS)
    found, facts = counted(small_config(), ADAPTERS[adapters], chunk=chunk, share=share)
    assert found == pytest.approx(training_flops(facts, LENGTHS, share if chunk else 1.0) + hidden_flops(facts))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize(("adapters", "dropout", "dtype"), [
    *((adapters, dropout, "fp32") for adapters in ("full", "all-linear") for dropout in (0.0, 0.1)),
    ("all-linear", 0.0, "bf16"), ("all-linear", 0.0, "nf4")])
@pytest.mark.parametrize("every", [1, 2])
def test_torch_counts_the_same_flops_where_blocks_are_computed_again(family, adapters, dropout, dtype, every):
    found, facts = counted(small_config(family, dropout=dropout), ADAPTERS[adapters], every=every, dtype=dtype,
                           four_bit=dtype == "nf4")
    again = recomputed_flops(facts, LENGTHS, every, dtype="fp32" if dtype == "nf4" else dtype)
    assert found == pytest.approx(training_flops(facts, LENGTHS) + again + hidden_flops(facts, every), rel=1e-12)


@pytest.mark.parametrize("adapters", ["q_proj", "v_proj, down_proj", "upper layers", "one layer's MLP", "dora", "dora, dropout",
                                      "lslora"])
def test_torch_counts_the_same_flops_where_adapted_blocks_are_computed_again(adapters):
    for dtype in ("fp32", "bf16"):
        found, facts = counted(small_config(), ADAPTERS[adapters], every=1, dtype=dtype)
        again = recomputed_flops(facts, LENGTHS, 1, dtype=dtype)
        assert found == pytest.approx(training_flops(facts, LENGTHS) + again + hidden_flops(facts, 1), rel=1e-12)


class AttentionCalls(TorchDispatchMode):
    """Counts how often the kernel runs."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += "bmm_attention" in function.name() and "backward" not in function.name()
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize(("keeps", "calls"), [(True, 3), (False, 6)])
def test_attention_that_is_kept_is_not_computed_again(keeps, calls):
    config = small_config()
    model, facts, batch = Decoder(config), model_facts(config), batch_of(LENGTHS)
    with AttentionCalls() as seen:
        blocks = CheckpointedBlocks(run_plainly, 1, keeps)
        token_loss(model, model.hidden(batch, attention=bmm_attention, run_block=blocks), batch.targets).backward()
    assert seen.count == calls
    per_layer = 4 * pairs_one_by_one(LENGTHS) * facts.heads * facts.head_width
    without = recomputed_flops(facts, LENGTHS, 1, keeps_attention=True)
    assert recomputed_flops(facts, LENGTHS, 1, keeps_attention=keeps) - without == pytest.approx((calls - 3) * per_layer)


def test_dora_makes_its_row_lengths_once_a_pass():
    facts = model_facts(small_config(), method="lora", adapters=ADAPTERS["dora"])
    pieces = sum(2 * a.rank * a.inputs * a.outputs for linear in linears(facts) for a in linear.adapters)
    assert training_flops(facts, LENGTHS, passes=3) - training_flops(facts, LENGTHS) == pytest.approx(2 * 3 * pieces)


def test_weights_in_4_bits_are_made_wide_for_every_product_and_fused_ones_twice():
    config = small_config()
    facts = model_facts(config, method="qlora", adapters=ADAPTERS["all-linear"], frozen_dtype="nf4", unquantised_dtype="fp32")
    plain, again = (Traffic(facts, 23, 1, "fp32", every).conversion_bytes() for every in (0, 1))
    weights = {linear.name: linear.weights for linear in linears(facts)}
    each = FOUR_BIT_BYTES + 4
    forward = sum(weights.values()) * each + weights["qkv"] * 8
    first_block = forward - weights["qkv"] * (each + 8)      # nothing below it needs its gradient
    assert plain == pytest.approx(3 * forward + 2 * forward + first_block)
    assert again - plain == pytest.approx(3 * (forward - weights["mlp_out"] * each))


def test_weights_that_are_stored_as_they_are_used_are_not_converted():
    facts = model_facts(small_config(), method="lora", adapters=ADAPTERS["all-linear"], frozen_dtype="bf16")
    assert Traffic(facts, 23, 1, "bf16").conversion_bytes() == 0
    assert Traffic(model_facts(small_config()), 23, 1, "fp32").conversion_bytes() == 0
    whole = model_facts(small_config())
    matrices = whole.matmul_parameters + whole.head_parameters
    assert Traffic(whole, 23, 1, "bf16").conversion_bytes() == 2 * (4 + 2) * matrices        # and the gradients back


def test_products_move_their_operands_and_results_once():
    config = small_config()
    facts = model_facts(config)
    moved = 3 * (sum(23 * (linear.inputs + linear.outputs) + linear.weights for linear in linears(facts)) * 3
                 + 23 * (64 + 50) + 64 * 50)
    assert Traffic(facts, 23, 1, "fp32").gemm_bytes() == 4 * moved


def test_an_encoder_sees_its_whole_document():
    assert mean_keys([3, 5], causal=False) == pytest.approx((9 + 25) / 8)


def test_a_tied_head_is_multiplied_by_all_the_same():
    tied, free = (model_facts(small_config(tied_head=tied)) for tied in (True, False))
    assert tied.parameters < free.parameters
    assert forward_flops(tied, LENGTHS) == forward_flops(free, LENGTHS)


def test_a_larger_embedding_table_of_positions_costs_nothing():
    short, long = (dataclasses.replace(model_facts(small_config("gpt2")), context=context) for context in (32, 4096))
    assert forward_flops(short, LENGTHS) == forward_flops(long, LENGTHS)


def test_splitting_a_step_leaves_its_flops_and_moves_the_weights_more_often():
    model = model_facts(small_config())
    whole, split = (step_work(model, batches, "fp32") for batches in ([[8] * 4], [[8] * 2] * 2))
    assert whole.flops == split.flops
    assert whole.tokens == split.tokens == 32
    weights = model.matmul_parameters + model.head_parameters
    assert split.gemm_bytes - whole.gemm_bytes == 3 * 4 * weights
    assert split.elementwise_bytes > whole.elementwise_bytes
    assert split.operators > whole.operators
    assert split.optimizer_bytes == whole.optimizer_bytes


def test_half_the_bytes_per_number_halve_the_traffic_of_the_products():
    model = model_facts(small_config())
    assert step_work(model, [[8]], "bf16").gemm_bytes == step_work(model, [[8]], "fp32").gemm_bytes / 2


def test_recomputation_is_counted_apart_and_leaves_out_the_last_product():
    model = model_facts(small_config())
    plain, all_blocks = (step_work(model, [LENGTHS], "fp32", checkpoint_every=every) for every in (0, 1))
    head, down = (2 * sum(LENGTHS) * weights for weights in (model.head_parameters, 3 * model.mlp_width * model.width))
    assert plain.flops == all_blocks.flops == training_flops(model, LENGTHS)
    assert plain.recompute_flops == 0
    assert all_blocks.recompute_flops == pytest.approx(forward_flops(model, LENGTHS) - head - down)
    assert recomputed_flops(model, LENGTHS, 3) == pytest.approx(all_blocks.recompute_flops / 3)
    assert all_blocks.hardware_flops == all_blocks.flops + all_blocks.recompute_flops
    assert all_blocks.elementwise_bytes > plain.elementwise_bytes
    assert all_blocks.gemm_bytes > plain.gemm_bytes


def test_every_nth_block_is_checkpointed_from_the_first():
    model = dataclasses.replace(model_facts(small_config()), layers=5)
    for every in (1, 2, 3, 5, 7):
        assert [block.layer for block in recomputed_of(model, every, "fp32")] == list(range(0, 5, every))
    assert recomputed_of(model, 0, "fp32") == ()


def test_dropout_draws_numbers_only_where_there_is_dropout():
    assert step_work(model_facts(small_config()), [LENGTHS], "fp32").dropout_elements == 0
    model = model_facts(small_config(dropout=0.1))
    drawn = 23 * 64 * (1 + 2 * 3) + 3 * 4 * (1 + 25 + 289)     # embedding and residuals; attention weights
    assert step_work(model, [LENGTHS], "fp32").dropout_elements == drawn
