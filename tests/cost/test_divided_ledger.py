"""Predicted memory of one of several processes against the ledger of torch's own allocations, on torch's fake back end."""

from __future__ import annotations

import pytest
from small_steps import Case

from powertrain.cost.collectives import Division
from powertrain.cost.memory import peak_memory, replay
from powertrain.cost.replay import COPIES
from powertrain.models.adapters.targets import AdapterConfig

RAGGED = ((13, 40, 40, 7, 33), (64, 20, 11))
SHORT = ((4,),)
MANY_WEIGHTS = {"layers": 6, "width": 128}
UNEVEN = {"layers": 5, "width": 124, "heads": 2, "vocabulary": 301, "mlp_width": 301}
UPPER = r"model\.layers\.[45]\..*"
WORST = 0.01                                 # of all cases below 0.5 %; the promise is 5 %

OF_STAGES = {
    "weights are all there is": lambda stage: Case(passes=SHORT * 3, model=MANY_WEIGHTS, division=Division(4, stage)),
    "one pass": lambda stage: Case(passes=((10, 10),), model=MANY_WEIGHTS, division=Division(2, stage)),
    "rows that do not come out even": lambda stage: Case(passes=((7,), (7,)), model=UNEVEN, division=Division(4, stage)),
    "the loss is most": lambda stage: Case(passes=SHORT * 3, model={"vocabulary": 3000, "layers": 2},
                                           division=Division(2, stage)),
    "gpt2, tied head, bf16, ragged": lambda stage: Case(
        "gpt2", "bmm", "bf16", RAGGED, model={"layers": 5, "width": 96, "vocabulary": 1001}, division=Division(2, stage)),
    "lora on bf16": lambda stage: Case("llama", "bmm", "bf16", RAGGED, AdapterConfig(r=4), "bf16",
                                       model={"layers": 5, "width": 128}, division=Division(2, stage)),
    "lora, upper blocks": lambda stage: Case(
        "llama", "bmm", "bf16", RAGGED, AdapterConfig(r=4, target_modules=UPPER), "bf16", model={"layers": 7, "width": 128},
        division=Division(4, stage)),
    "blocks again": lambda stage: Case("llama", "bmm", "bf16", ((64,) * 6,) * 2, every=1, keeps_attention=True,
                                       model={"layers": 6}, division=Division(2, stage)),
    "bf16, weights are all there is": lambda stage: Case(dtype="bf16", passes=SHORT * 3, model=MANY_WEIGHTS,
                                                         division=Division(4, stage)),
    "bf16, blocks again, weights are all there is": lambda stage: Case(
        dtype="bf16", passes=SHORT * 3, every=1, model=MANY_WEIGHTS, division=Division(4, stage)),
    "every second block again": lambda stage: Case("llama", passes=((64,) * 2,) * 2, every=2,
                                                   model={"layers": 9, "width": 128}, division=Division(2, stage)),
    "loss in chunks, fused update": lambda stage: Case("llama", "bmm", "bf16", RAGGED, chunk_rows=32, fused=True,
                                                       model=MANY_WEIGHTS, division=Division(2, stage)),
    "hybrid": lambda stage: Case(passes=SHORT * 3, model=MANY_WEIGHTS, division=Division(8, stage, replicas=4)),
}
CASES = {f"{name}, stage {stage}": of_stage(stage) for name, of_stage in OF_STAGES.items() for stage in (1, 2, 3)} | {
    "data parallel, weights are all there is": Case(passes=SHORT * 2, model=MANY_WEIGHTS, division=Division(2)),
    "data parallel, several buckets": Case(passes=SHORT * 2, model={"layers": 1, "width": 768}, division=Division(4)),
    "data parallel, lora": Case("llama", "bmm", "bf16", RAGGED, AdapterConfig(r=4), "bf16", model={"layers": 5, "width": 128},
                                division=Division(2)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_process_is_predicted(name):
    case = CASES[name]
    assert sum(peak_memory(case.facts, case.workload).values()) == pytest.approx(case.measured_bytes(), rel=WORST)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_copy_of_a_weight_outlasts_its_use_where_blocks_are_run_again(stage):
    small, large = (Case(dtype="bf16", passes=SHORT * 2, every=1, model={**MANY_WEIGHTS, "layers": layers},
                         division=Division(4, stage)) for layers in (6, 18))
    found = [peak_memory(case.facts, case.workload).get(COPIES, 0) for case in (small, large)]
    assert found[0] == found[1] < 2 * small.facts.matmul_parameters / small.facts.layers


@pytest.mark.parametrize("name", CASES)
def test_blocks_that_are_left_out_of_the_replay_change_nothing(name):
    case = CASES[name]
    some, all_blocks = (sum(replay(case.facts, case.workload, leaves_out=leaves_out).at_the_peak().values())
                        for leaves_out in (True, False))
    assert some == all_blocks
