"""FLOPs and bytes of a step, against a count of single multiplications and against torch's own counter."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from powertrain.cost.gradients import checkpointed_layers
from powertrain.cost.work import (
    evaluation_work,
    forward_flops,
    mean_keys,
    recomputed_flops,
    step_work,
    training_flops,
)
from powertrain.facts.model import model_facts
from powertrain.models.attention import math_attention
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.records import Batch
from powertrain.training.setup import token_loss

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


@pytest.mark.parametrize("family", SMALL)
def test_torch_counts_the_same_flops_for_training(family):
    config = small_config(family)
    model, facts = Decoder(config), model_facts(config)
    with FlopCounterMode(display=False) as counter:
        batch = batch_of(LENGTHS)
        token_loss(model, model.hidden(batch, attention=math_attention), batch.targets).backward()
    # math attention computes the hidden half of the scores too
    full_pairs = sum(length * length for length in LENGTHS)
    hidden = 12 * facts.layers * facts.heads * facts.head_width * (full_pairs - pairs_one_by_one(LENGTHS))
    assert counter.get_total_flops() == pytest.approx(training_flops(facts, LENGTHS) + hidden)


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


def test_recomputation_is_counted_apart_and_is_one_forward_pass_of_the_blocks():
    model = model_facts(small_config())
    plain, all_blocks = (step_work(model, [LENGTHS], "fp32", checkpointed_layers=layers) for layers in (0, 3))
    head = 2 * sum(LENGTHS) * model.head_parameters
    assert plain.flops == all_blocks.flops == training_flops(model, LENGTHS)
    assert plain.recompute_flops == 0
    assert all_blocks.recompute_flops == pytest.approx(forward_flops(model, LENGTHS) - head)
    assert recomputed_flops(model, LENGTHS, 1) == pytest.approx(all_blocks.recompute_flops / 3)
    assert all_blocks.hardware_flops == all_blocks.flops + all_blocks.recompute_flops
    assert all_blocks.elementwise_bytes > plain.elementwise_bytes


def test_every_nth_block_is_checkpointed_from_the_first():
    model = dataclasses.replace(model_facts(small_config()), layers=5)
    for every in (1, 2, 3, 5, 7):
        assert checkpointed_layers(model, every) == sum(1 for index in range(5) if index % every == 0)
    assert checkpointed_layers(model, 0) == 0


def test_evaluation_is_a_forward_pass_and_nothing_else():
    model = model_facts(small_config(dropout=0.1))
    work = evaluation_work(model, [LENGTHS, LENGTHS], "fp32")
    assert work.flops == pytest.approx(2 * forward_flops(model, LENGTHS))
    assert (work.recompute_flops, work.optimizer_bytes, work.dropout_elements) == (0, 0, 0)
    assert work.flops_per_token == pytest.approx(forward_flops(model, LENGTHS) / sum(LENGTHS))


def test_dropout_draws_numbers_only_where_there_is_dropout():
    assert step_work(model_facts(small_config()), [LENGTHS], "fp32").dropout_elements == 0
    model = model_facts(small_config(dropout=0.1))
    drawn = 23 * 64 * (1 + 2 * 3) + 3 * 4 * (1 + 25 + 289)     # embedding and residuals; attention weights
    assert step_work(model, [LENGTHS], "fp32").dropout_elements == drawn
