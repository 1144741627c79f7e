"""The probes that documents 000 and 001 need, on their form: what they count, and that what they run runs."""

import mmap
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

from driver import TINY
from powertrain.claims.probes import Context, files, kernels, memory, processes, runs
from powertrain.claims.probes.memory import stands_from, step_peak
from powertrain.claims.probes.probe import apart, open_training
from powertrain.evidence.worker import Probe
from powertrain.machine import usable_cores
from powertrain.records import WrongUse


@pytest.mark.parametrize(("peaks", "step"), [
    ([100, 100, 100], 1), ([100, 130, 131, 130], 2), ([100, 50, 101, 103], 3), ([100, 101, 102, 103, 104], 3), ([5, 6, 7], 3)])
def test_a_memory_stands_from_the_first_peak_that_is_about_the_highest(peaks, step):
    assert stands_from(peaks) == step


def test_a_step_is_counted_with_and_without_what_stands(tiny, cache):
    training = open_training([*tiny, "techniques.allocator=off"], cache, warm_up=1)
    over, whole = step_peak(training)
    weights = sum(4 * value.numel() for value in training.setup.model.parameters())
    assert over > weights                                # its gradients alone are as large
    assert whole - over == pytest.approx(3 * weights, rel=0.01)      # weights and two moments


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of resident memory is read off /proc")
def test_a_peak_that_is_gone_again_is_seen():
    held = 64 << 20

    def work():                              # fresh pages: what an allocator keeps is resident already
        with mmap.mmap(-1, held) as pages:
            for _ in range(held >> 20):
                pages.write(b"x" * (1 << 20))

    assert 0.95 * held < files.peak_bytes(work) < 2 * held        # the kernel counts in batches


def test_a_whole_run_says_what_lies_between_its_steps(source, cache, tmp_path):
    found = apart(runs.whole_run, [f"data={source}", *TINY], cache, tmp_path / "run")
    assert found["evaluation"] > 0
    assert found["checkpoint"] > 0
    assert found["evaluation"] + found["checkpoint"] < found["run"]


def test_the_rule_of_thumb_is_held_against_the_real_peak(tiny, cache, tmp_path):
    class Arena:
        def probe(self, arm):
            return Probe((), (), 1_000_000)

    measured = memory.memory_rule(Context(cache, 0.0, Arena(), tmp_path), words=tiny)
    assert measured.value.median == pytest.approx(100 * abs(measured.detail["rule_bytes"] - 1e6) / 1e6)
    assert measured.detail["powertrain_bytes"] > measured.detail["rule_bytes"]


def test_tokenising_runs_to_a_value(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHARACTERS", 20_000)
    measured = files.tokenising(Context(cache, float("inf"), None, tmp_path))
    assert measured.value.median > 0
    assert measured.detail["characters"] == 20_000


@pytest.mark.skipif(usable_cores()[0] < 2 and torch.cuda.device_count() < 2, reason="there is one core and no two GPUs")
def test_two_processes_share_the_steps_of_one(tiny, cache, tmp_path):
    measured = processes.shared_steps(Context(cache, float("inf"), None, tmp_path), words=tiny, steps=2)
    assert measured.value.median > 0
    assert (measured.a, measured.b) == ("one process", "2 processes")
    assert all(seconds > 0 for seconds in measured.detail["step_s"].values())
    alone, together = measured.detail["first_steps"].values()
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)    # of the same step, with the same dropout
    assert 0 < together["tokens"] < alone["tokens"]
    of_one, of_two = measured.detail["exchange_s"].values()
    assert of_one == 0 < of_two < measured.detail["step_s"]["2 processes"]
    assert not multiprocessing.active_children()


@pytest.mark.skipif(usable_cores()[0] < 2 and torch.cuda.device_count() < 2, reason="there is one core and no two GPUs")
def test_processes_that_divide_the_weights_are_held_against_those_that_do_not(tiny, cache, tmp_path):
    measured = processes.shared_steps(Context(cache, float("inf"), None, tmp_path), words=tiny, a=[],
                                      b=["techniques.sharding={stage: 2}"], steps=2)
    whole, divided = measured.detail["first_steps"].values()
    assert divided["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert measured.detail["memory_ratio"] == divided["memory_bytes"] / whole["memory_bytes"] < 1


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two GPUs here")
def test_two_gpus_are_asked_for_where_there_are_none(tmp_path):
    with pytest.raises(WrongUse, match="two GPUs"):
        kernels.data_parallel(Context(Path(), 0.0, None, tmp_path))
