"""Triton's kernels give what the plain functions give: compared by Triton's interpreter, on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from powertrain.facts.model import model_facts
from powertrain.models.config import FAMILIES, make_config
from powertrain.planner import make_plan
from powertrain.recipe import Recipe
from powertrain.records import Facts
from powertrain.records.plan import PinRefused, Why
from powertrain.techniques.fused_blocks import WIDEST_ROW, FusedBlocks

CASES = Path(__file__).with_name("triton_cases.py")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                  reason="Triton is not installed, whose interpreter runs the kernels: pip install triton")
KERNELS = ("normalise", "join", "normalise_back", "swiglu", "swiglu_back", "turn", "turn_back", "loss", "loss with terms")
PINNED = Recipe.model_validate({"max_steps": 100, "techniques": {"fused_blocks": {"kernels": "triton"}}})


@pytest.fixture(scope="module")
def differences() -> Mapping[str, float]:
    """Kernel, rows and type -> how far apart; in a process of its own, where Triton interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(CASES)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Mapping[str, float] = json.loads(done.stdout)
    return found


@needs_triton
@pytest.mark.parametrize("rows", [1, 5, 123])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_gives_what_it_stands_for_in_fp32(differences: Mapping[str, float], kernel: str, rows: int) -> None:
    most = 4e-6 if kernel.startswith("loss") else 1e-6       # the exponential of a logit near 20 has its rounding, 1e-6
    assert differences[f"{kernel} {rows} fp32"] < most


@needs_triton
@pytest.mark.parametrize("rows", [1, 5, 123])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_rounds_once_in_bf16(differences: Mapping[str, float], kernel: str, rows: int) -> None:
    """Equal but for the last of bf16's eight bits: the interpreter cuts it off where a GPU rounds to the nearest."""
    assert differences[f"{kernel} {rows} bf16"] <= 2 ** -7


@needs_triton
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_a_family_have_the_same_gradients(differences: Mapping[str, float], family: str, method: str) -> None:
    assert differences[f"blocks of {family}, {method}"] < 1e-5


def test_a_pin_on_triton_is_refused_where_it_cannot_run(facts: Facts) -> None:
    here = replace(facts, hardware=replace(facts.hardware, device="cpu"))
    with pytest.raises(PinRefused, match="need a GPU") as raised:
        make_plan(here, PINNED, 100)
    assert (raised.value.refusal.why, raised.value.refusal.possible) == (Why.HARDWARE_LACKS, None)


def test_a_pin_on_triton_is_refused_without_triton(facts: Facts) -> None:
    software = replace(facts.software, missing={"triton": "not installed"})
    gpu = replace(facts, hardware=replace(facts.hardware, device="cuda", compute_capability=(9, 0)), software=software)
    with pytest.raises(PinRefused, match="triton: not installed") as raised:
        make_plan(gpu, PINNED, 100)
    assert (raised.value.refusal.why, raised.value.refusal.part) == (Why.PART_MISSING, "triton")


def test_a_pin_on_triton_is_refused_for_rows_that_would_spill(gpu_facts: Callable[..., Facts]) -> None:
    """Llama 3.1 405B has rows of 16,384; test_triton_compiled.py compiles the widest that are taken."""
    def facts_of(width: int) -> Facts:
        config = make_config("llama", vocabulary=50, layers=1, width=width, heads=8, context=16)[0]
        return replace(gpu_facts(), model=model_facts(config))

    assert FusedBlocks("triton") in [step.technique for step in make_plan(facts_of(WIDEST_ROW), PINNED, 100).steps]
    with pytest.raises(PinRefused, match="16,384 numbers in registers, where at most 8,192 fit"):
        make_plan(facts_of(2 * WIDEST_ROW), PINNED, 100)


def test_there_are_no_other_kernels() -> None:
    with pytest.raises(ValueError, match="is none of compiled, cpp, one_call, triton"):
        FusedBlocks("numpy")
