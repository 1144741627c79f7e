"""What the prediction of memory is made of; test_ledger.py holds its sums against real steps."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from small_steps import Case

from powertrain.cost.memory import peak_memory, replay
from powertrain.cost.replay import Block, Memory
from powertrain.cost.workload import Workload
from powertrain.facts.model import model_facts
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.training.optimizers import ROWS


def test_a_large_vocabulary_makes_the_loss_the_peak():
    case = Case(model={"vocabulary": 5000})
    expected = peak_memory(case.facts, case.workload)
    assert expected["loss"] > expected["activations"]
    assert sum(expected.values()) == pytest.approx(case.measured_bytes(), rel=0.001)


@pytest.mark.parametrize("change", [
    {"micro_batch": 4}, {"checkpoint_every": 1}, {"checkpoint_every": 2}, {"loss_chunk_rows": 256},
    {"attention_saves_scores": False}, {"kernel": "bmm"}, {"dtype": "bf16"}])
def test_each_way_to_save_memory_saves_memory(change):
    model = model_facts(make_config("llama", vocabulary=5000, layers=8, width=256)[0])
    plain = Workload(examples=16, block=256, micro_batch=16)
    whole, smaller = (sum(peak_memory(model, one).values()) for one in (plain, dataclasses.replace(plain, **change)))
    assert smaller < whole


def test_the_fullest_moment_moves_when_attention_is_kept():
    again = Case("llama", "bmm", every=1, passes=((64,) * 8,), chunk_rows=16, model={"layers": 6})
    kept = dataclasses.replace(again, keeps_attention=True)
    before, after = (peak_memory(case.facts, case.workload) for case in (again, kept))
    assert after["gradients"] < before["gradients"]          # in the last block, and not in the first
    assert after["activations"] > before["activations"]
    for case, predicted in ((again, before), (kept, after)):
        assert sum(predicted.values()) == pytest.approx(case.measured_bytes(), rel=0.005)


def test_weights_gradients_and_moments_take_sixteen_bytes_each_where_weights_are_all_there_is():
    model = model_facts(make_config("llama", vocabulary=50, layers=8, width=256)[0])
    memory = peak_memory(model, Workload(examples=1, block=1, micro_batch=1, fused_optimizer=True))
    sixteen = memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert sixteen == pytest.approx(16 * model.parameters, rel=0.001)      # the last gradient is not there yet
    assert sum(memory.values()) == pytest.approx(sixteen, rel=0.01)


def test_an_unfused_update_holds_two_tensors_of_a_weight_and_one_of_the_last():
    model = model_facts(make_config("llama", vocabulary=50, layers=8, width=256)[0])
    memory = peak_memory(model, Workload(examples=1, block=1, micro_batch=1))
    up, down = (4 * 2 * model.mlp_width * model.width, 4 * model.mlp_width * model.width)
    assert memory["workspace"] == 2 * up + 4 * model.width * model.width
    assert down < up


@pytest.mark.parametrize("adapters", [None, AdapterConfig(r=8)], ids=["all weights", "adapters"])
@pytest.mark.parametrize("name", [row.name for row in ROWS if "cpu" in row.devices])
def test_each_optimizers_step_takes_what_is_predicted(name: str, adapters: AdapterConfig | None):
    """Where the update is the fullest moment: few tokens, and weights of many sizes."""
    case = Case(optimizer=name, passes=((3,),), adapters=adapters, model={"width": 256, "vocabulary": 700, "layers": 2})
    predicted, measured = peak_memory(case.facts, case.workload), case.measured_bytes()
    # muon's products are of bf16 matrices and their squares, which count as three fp32 tensors; small tensors have fp32
    # states in bitsandbytes
    tolerance = 0.06 if name == "muon" or "8bit" in name else 0.03
    assert sum(predicted.values()) == pytest.approx(measured, rel=tolerance)


def test_a_step_that_is_asked_for_again_is_not_replayed_again(monkeypatch: pytest.MonkeyPatch):
    replayed = []
    monkeypatch.setattr("powertrain.cost.memory.replay", lambda *step: replayed.append(step) or replay(*step))
    model = model_facts(make_config("llama", vocabulary=53, layers=2, width=64)[0])
    step = Workload(examples=3, block=7, micro_batch=3, lengths={"max": 7})
    expected = dict(peak_memory(model, step))
    peak_memory(model, step).clear()         # what a caller does with its answer is nobody else's matter
    assert peak_memory(dataclasses.replace(model), dataclasses.replace(step, lengths={"max": 7})) == expected
    assert len(replayed) == 1
    peak_memory(model, dataclasses.replace(step, lengths={"max": 8}))
    peak_memory(dataclasses.replace(model, dropout=0.1), step)
    assert len(replayed) == 3


ADAPTERS = (None, AdapterConfig(r=4), AdapterConfig(r=4, target_modules=r"model\.layers\.[3-6]\..*"))


@pytest.mark.parametrize("adapters", ADAPTERS, ids=["full", "lora", "lora on four blocks"])
@pytest.mark.parametrize("every", [0, 1, 2, 3])
def test_blocks_that_are_left_out_change_nothing(every, adapters):
    for dtype, kernel, micro_batch in itertools.product(("fp32", "bf16"), ("bmm", "math"), (4, 8)):
        case = Case("llama", kernel, dtype, adapters=adapters, every=every, model={"layers": 9})
        workload = Workload(8, 40, micro_batch, dtype=dtype, checkpoint_every=every, kernel=kernel)
        some, all_of_them = (replay(case.facts, workload, leaves_out=leaves_out) for leaves_out in (True, False))
        assert some.peak == all_of_them.peak
        assert some.at_the_peak() == all_of_them.at_the_peak()


def test_a_step_of_several_passes_finds_the_gradients_of_the_first():
    case = Case(passes=((40,) * 4,) * 2)
    one, two = (sum(peak_memory(case.facts, dataclasses.replace(case.workload, documents=case.passes[:count])).values())
                for count in (1, 2))
    assert two - one > 2 * case.facts.parameters             # bytes: most of four each, for what the first pass does not have


def test_the_largest_pass_is_predicted_wherever_it_comes():
    model, workload = Case().facts, Case().workload
    first, last, alone = (sum(peak_memory(model, dataclasses.replace(workload, documents=documents)).values())
                          for documents in (((80,), (5,), (7,)), ((5,), (7,), (80,)), ((80,),)))
    assert last >= first >= alone


def test_examples_of_many_lengths_are_predicted_at_the_longest():
    plain = Workload(8, 20, 4, lengths={"min": 5, "p50": 18, "max": 60})
    assert plain.passes == ((60,) * 4,) * 2
    packed = dataclasses.replace(plain, packed_tokens=100, fill_multiple=16)
    assert packed.passes[0] == (60, 52)                      # 100, filled up to 112


def test_memory_knows_its_fullest_moment_by_component():
    memory = Memory({"weights": 10})
    first = Block(memory, 5, "loss")
    second = Block(memory, 7, "workspace")
    del second
    third = Block(memory, 6, "loss")
    assert (memory.peak, memory.total) == (22, 21)
    assert memory.at_the_peak() == {"weights": 10, "loss": 5, "workspace": 7}
    del first, third
    assert memory.total == 10


def test_a_gpu_rounds_every_block_up():
    memory = Memory({}, rounding=512)
    blocks = [Block(memory, 513, "loss"), Block(memory, 512, "loss")]
    assert memory.at_the_peak() == {"loss": 1025, "allocator rounding": 511}
    del blocks
    assert memory.total == 0


def test_nothing_of_torch_is_needed(monkeypatch):
    case = Case()
    model, workload = case.facts, case.workload
    monkeypatch.setattr(torch, "empty", None)
    assert sum(peak_memory(model, workload).values()) > 0
