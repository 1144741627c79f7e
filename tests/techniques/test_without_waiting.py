"""What keeps a GPU's queue full: a loop that does not read the device, and blocks written by hand in passes of one shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kinds_of_runs import LORA, make_ragged, run_by_hand
from test_cuda_graph import PACKED, WAITS, Operators, gradients_of, replayed

from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import FAMILIES
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from powertrain.techniques.fused_adamw import FusedAdamW
from powertrain.training.loop import new_state, train
from powertrain.training.replayed_passes import static_sums
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup


def waits_of(setup: Setup, steps: int) -> list[str]:
    """Operators of some steps whose results Python reads, and so has to wait for where the device is another."""
    setup = FusedAdamW().apply(setup)
    state = new_state(setup, 0.1)
    with Operators() as operators:
        for _ in train(setup, state, Schedule("cosine", 1e-2, steps), 1.0):
            pass
    assert len(operators.seen) > 100
    return [name for name, _ in operators.seen if name in WAITS]


@pytest.mark.parametrize("micro_batch", [14, 5])
@pytest.mark.parametrize("adapters", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole loss", "loss in chunks"])
def test_no_step_reads_the_device(chunked: bool, adapters: AdapterConfig | None, micro_batch: int) -> None:
    setup = replace(make_ragged(adapters), micro_batch=micro_batch)
    assert waits_of(ChunkedCrossEntropy(rows=16).apply(setup) if chunked else setup, 3) == []


@pytest.mark.parametrize("adapters", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_by_hand_have_the_plain_gradients_in_a_pass_of_one_shape(family: str, adapters: AdapterConfig | None) -> None:
    def make() -> Setup:
        heads = {} if FAMILIES[family].grouped_heads else {"kv_heads": 2}
        return make_ragged(adapters, family=family, **heads)

    plain, static = PACKED.apply(make()), run_by_hand(replayed(make(), ChunkedCrossEntropy(rows=13)))
    for ours, theirs in zip(static.prepare(0), plain.prepare(0), strict=True):
        found, expected = static_sums(static, ours, static.run_pass.shape)["loss"], plain.batch_loss(theirs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        for gradient, wanted in zip(gradients_of(static, found), gradients_of(plain, expected), strict=True):
            assert float((gradient - wanted).norm() / wanted.norm()) < 1e-5
