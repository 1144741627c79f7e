"""A CPU without AMX, without bf16, without AVX-512: nothing breaks, and the plan says what is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from kinds_of_runs import LORA, make_ragged, ragged_facts

from powertrain.planner import ask_anew, make_plan
from powertrain.recipe import Recipe
from powertrain.records import Facts, Plan, Refusal
from powertrain.records.plan import Why
from powertrain.report.plan import plan_rows
from powertrain.techniques import CATALOGUE
from powertrain.techniques.bf16 import Bf16
from powertrain.training.loop import apply_plan, evaluate, new_state, train
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup

# as /proc/cpuinfo would list them, from the richest to none that is known
CPUS = {
    "no amx": ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni"),
    "no bf16": ("avx2", "fma", "avx512f", "avx512_vnni"),
    "no avx512": ("avx2", "fma"),
    "nothing known": (),
}
EMULATED = {"fp32": 1.6e11, "bf16": 2e10}    # FLOP/s, where bf16 has no unit
NEVER_ON_A_CPU = {"fp16", "tf32", "fp8_base", "eight_bit_adamw", "paged_adamw", "allocator"}
pytestmark = pytest.mark.usefixtures("restored_process")


@dataclass(frozen=True)
class Kind:
    """A kind of run: its facts but for the machine's, and what makes its setup."""

    facts: Facts
    make_setup: Callable[[], Setup]


KINDS = ("lora", "full", "pre-training")


@pytest.fixture
def kinds(facts: Facts, make_setup: Callable[..., Setup]) -> Mapping[str, Kind]:
    return {"lora": Kind(ragged_facts(facts, LORA), partial(make_ragged, LORA)),
            "full": Kind(ragged_facts(facts, None), partial(make_ragged, None)), "pre-training": Kind(facts, make_setup)}


def on(cpu: str, kind: Kind) -> Facts:
    peaks = {"fp32": 1.6e11, "bf16": 3e11} if "avx512_bf16" in CPUS[cpu] else EMULATED
    hardware = replace(kind.facts.hardware, name="a CPU", device="cpu", cores=1, instructions=CPUS[cpu],
                       compute_capability=None, peak_flops_per_s=peaks, bandwidth_bytes_per_s=2e10)
    return replace(kind.facts, hardware=hardware)


def trained(plan: Plan, kind: Kind) -> list[float]:
    setup = apply_plan(kind.make_setup(), plan)
    losses = [float(step.loss) for step in train(setup, new_state(setup, 0.1), Schedule("constant", 1e-2, 4), 1.0)]
    return [*losses, evaluate(setup, [setup.examples[i] for i in range(5)], tokens_per_byte=None).loss]


def refusal_of(name: str, plan: Plan) -> Refusal:
    return next(refusal for refusal in plan.refused if refusal.technique == name)


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("name", KINDS)
def test_the_plan_of_any_cpu_trains_the_same(kinds: Mapping[str, Kind], cpu: str, name: str) -> None:
    plan = make_plan(on(cpu, kinds[name]), Recipe(), 100)
    assert plan.estimate is not None
    tolerance = 1e-2 if "bf16" in [step.technique.name for step in plan.steps] else 1e-4
    assert trained(plan, kinds[name]) == pytest.approx(trained(Plan((), ()), kinds[name]), rel=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [technique.name for technique in CATALOGUE if technique.name not in NEVER_ON_A_CPU])
def test_every_technique_that_a_cpu_may_have_trains_without_any_instruction(kinds: Mapping[str, Kind], name: str,
                                                                            kind: str) -> None:
    """Asked for by name; what cannot be is refused with its reason, and not begun."""
    there = on("nothing known", kinds[kind])
    technique = next(technique for technique in CATALOGUE if technique.name == name)
    answer = ask_anew(technique.name, there, Recipe())
    if isinstance(answer, Refusal) and answer.possible is None:
        assert len(answer.because) > 10
        return
    pinned = Recipe(max_steps=100).model_copy(update={"techniques": {name: "on"}})
    plan = make_plan(there, pinned, 100)
    assert name in [step.technique.name for step in plan.steps]
    rounding = 1e-2 if name == "bf16" else 1e-4
    assert trained(plan, kinds[kind]) == pytest.approx(trained(Plan((), ()), kinds[kind]), rel=rounding)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cpu", ["no bf16", "no avx512", "nothing known"])
def test_the_plan_says_what_is_lost_without_bf16(kinds: Mapping[str, Kind], cpu: str, kind: str) -> None:
    there = on(cpu, kinds[kind])
    plan = make_plan(there, Recipe(), 100)
    refused = refusal_of("bf16", plan)
    assert refused.why is Why.HARDWARE_LACKS
    assert "a CPU has none of amx_bf16" in refused.because
    assert "measured at 0.12 times the speed of fp32" in refused.because
    assert any(row[:2] == ("off", "bf16") and refused.because in row[2] for row in plan_rows(plan))
    assert plan.estimate is not None
    assert plan.estimate.dtype == "fp32"
    unmeasured = ask_anew(Bf16.name, replace(there, hardware=replace(there.hardware, peak_flops_per_s={})), Recipe())
    assert "measured at" not in unmeasured.because


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_says_what_is_missed_without_amx(kinds: Mapping[str, Kind], kind: str) -> None:
    there = on("no amx", kinds[kind])
    chosen = next(step for step in make_plan(there, Recipe(), 100).steps if step.technique.name == "bf16")
    assert "avx512_bf16, but not the faster amx_bf16" in chosen.because
    with_it = replace(there, hardware=replace(there.hardware, instructions=(*CPUS["no amx"], "amx_bf16", "amx_int8")))
    assert "but not" not in ask_anew(Bf16.name, with_it, Recipe()).because


def test_the_plan_says_what_is_lost_without_int8(kinds: Mapping[str, Kind]) -> None:
    without, emulated = (make_plan(on(cpu, kinds["lora"]), Recipe(), 100) for cpu in ("no avx512", "no bf16"))
    assert "VNNI or AMX" in refusal_of("int8_base", without).because
    assert "the CPU has avx512_vnni, but not the faster amx_int8" in refusal_of("int8_base", emulated).because


def test_a_base_stored_in_bf16_is_made_fp32_once_where_bf16_is_emulated(kinds: Mapping[str, Kind]) -> None:
    there = on("no avx512", kinds["lora"])
    stored = replace(there, model=replace(there.model, frozen_dtype="bf16"))
    found = next(step for step in make_plan(stored, Recipe(), 100).steps if step.technique.name == "frozen_base")
    assert found.technique.dtype == "fp32"  # type: ignore[attr-defined]
    assert "from bf16 to fp32 once" in found.because


def test_a_run_ends_well_where_torch_itself_has_no_wide_instructions(tmp_path: Path, source: Path) -> None:
    """torch's kernels and oneDNN's are held to what every x86 CPU has."""
    words = [f"data={source}", "model.layers=2", "model.width=32", "model.heads=2", "data.tokenizer=char", "data.block=16",
             "train_batch_size=8", "max_steps=4", "sample.tokens=0", "sample.prompt=", "save_steps=0",
             "techniques.bf16=off"]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "1",
                                "POWERTRAIN_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-m", "powertrain", "train", *words], cwd=tmp_path, env=environment, check=False,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
