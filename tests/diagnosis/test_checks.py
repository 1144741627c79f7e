"""Every check: where it has something to say, and the near miss where it must not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from observations import STEP_S

from powertrain.diagnosis.checks import CHECKS
from powertrain.diagnosis.checks.machine import Situation
from powertrain.diagnosis.observed import Between
from powertrain.records import IdleGpu, Refusal
from powertrain.records.findings import Finding
from powertrain.records.plan import PinRefused

Make = Callable[..., Situation]
CHECK = {check.name: check for check in CHECKS}
GIB = 1 << 30
ROWS = {"kind": "conversation", "max_length": 200, "length_quantiles": {"min": 5, "p10": 10, "p50": 60, "p90": 150, "max": 200}}

IDLE = IdleGpu("NVIDIA L4", "old_driver", "the driver is too old", "install another")

# check -> (severity, words, what of the situation) where it fires, and where it must not say more than "good"
FIRES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "accelerator": ("critical", [], {"hardware": {"idle_gpu": IDLE}}),
    "busy": ("moderate", [], {"machine": {"load": 1.9}}),
    "battery": ("moderate", [], {"machine": {"on_battery": True}}),
    "threads": ("moderate", ["techniques.threads.threads=1"], {}),
    "memory": ("critical", [], {"hardware": {"free_memory_bytes": 128 << 20}}),
    "disk": ("moderate", ["save_total_limit=50"], {"machine": {"disk_free_bytes": 10 << 20}}),
    "output_folder": ("critical", ["output_dir={tmp}"], {}),
    "software": ("low", [], {"missing": {"c++ compiler": "none of g++, clang++ is on the PATH"}}),
    "data_limits": ("low", ["data.max_chars=5000"], {}),
    "data_size": ("critical", ["train_batch_size=50000"], {}),
    "truncation": ("critical", [], {"data": {**ROWS, "cut_examples": 2000}}),
    "held_out": ("moderate", ["data.validation_share=0"], {}),
    "redundancy": ("moderate", ["data.stride=1", "max_steps=null", "num_train_epochs=1"], {}),
    "batch": ("low", ["techniques.micro_batch.examples=4"], {}),
    "schedule": ("critical", ["warmup_steps=100"], {}),
    "stability": ("low", ["max_grad_norm=0"], {}),
    "precision": ("moderate", ["techniques.bf16=off"], {}),
    "pins": ("moderate", ["techniques.activation_checkpointing=on"], {}),
    "intervals": ("low", ["eval_steps=101"], {}),
    "no_effect": ("low", ["lora.r=8"], {}),
    "quantisation": ("moderate", [], {"model": {"method": "qlora", "frozen_dtype": "nf4", "unquantised_dtype": "bf16"}}),
    "provider": ("low", [], {"model": {"provider": "transformers"}}),
    "run_length": ("critical", ["save_steps=0", "max_steps=900000000"], {}),
}
NEAR_MISSES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "accelerator": ([], {}),
    "busy": ([], {"machine": {"load": 0.4}}),
    "battery": ([], {}),
    "threads": (["techniques.threads.threads=2"], {}),
    "memory": ([], {"hardware": {"free_memory_bytes": 200 << 20}}),
    "disk": (["save_total_limit=2"], {"machine": {"disk_free_bytes": 10 << 20}}),
    "output_folder": (["output_dir={tmp}/other"], {}),
    "software": ([], {"missing": {"flash_attn": "needs a CUDA GPU; torch sees none here"}}),
    "data_limits": ([], {}),
    "data_size": (["train_batch_size=50"], {}),
    "truncation": ([], {"data": {**ROWS, "cut_examples": 0}}),
    "held_out": (["data.validation_share=0.2"], {}),
    "redundancy": (["data.stride=16"], {}),
    "batch": (["techniques.micro_batch.examples=5"], {}),
    "schedule": (["warmup_steps=20"], {}),
    "stability": (["max_grad_norm=1.0"], {}),
    "precision": (["techniques.bf16=off"], {"hardware": {"peak_flops_per_s": {"fp32": 1e11, "bf16": 1.1e11}}}),
    "pins": (["techniques.bf16=on"], {}),
    "intervals": (["eval_steps=100"], {}),
    "no_effect": (["data.block=16"], {}),
    "quantisation": ([], {"model": {"method": "lora", "frozen_dtype": "bf16"}}),
    "provider": ([], {}),
    "run_length": (["save_steps=1000", "max_steps=900000000"], {}),
}


def findings(make: Make, name: str, words: list[str], given: dict[str, Any], folder: Path) -> list[Finding]:
    (folder / "recipe.yaml").write_text("name: another\n", encoding="utf-8")
    given, missing = dict(given), given.get("missing")
    given.pop("missing", None)
    where = make(*(word.replace("{tmp}", str(folder)) for word in words), **given)
    if missing is not None:
        where = _without_software(where, missing)
    return list(CHECK[name].find(where))


def _without_software(where: Situation, missing: dict[str, str]) -> Situation:
    """The situation where these parts are not installed, planned anew."""
    from dataclasses import replace

    from powertrain import planner

    prepared = where.prepared
    facts = replace(prepared.facts, software=replace(prepared.facts.software, missing=missing))
    recipe = prepared.recipe.model_copy(update={"techniques": {}})
    return replace(where, prepared=replace(prepared, facts=facts, plan=planner.make_plan(facts, recipe, prepared.total_steps)))


@pytest.mark.parametrize("name", CHECK)
def test_a_check_fires(name: str, situation: Make, tmp_path: Path) -> None:
    severity, words, given = FIRES[name]
    found = findings(situation, name, words, given, tmp_path)
    assert severity in {finding.severity for finding in found}
    for finding in found:
        assert finding.rule == name
        assert finding.evidence
        assert all((finding.title, finding.why, finding.rests_on, finding.cure.says))


@pytest.mark.parametrize("name", CHECK)
def test_a_check_is_silent_or_content_with_a_near_miss(name: str, situation: Make, tmp_path: Path) -> None:
    words, given = NEAR_MISSES[name]
    assert {finding.severity for finding in findings(situation, name, words, given, tmp_path)} <= {"good"}


def test_every_check_has_a_case_and_a_near_miss() -> None:
    assert set(FIRES) == set(NEAR_MISSES) == set(CHECK)


def test_a_well_tuned_run_gives_nothing_to_do(situation: Make) -> None:
    said = [finding for check in CHECKS for finding in check.find(situation(observed={})) if finding.severity != "good"]
    assert not said


def test_an_interval_that_costs_more_than_two_percent_is_found_in_the_probe(situation: Make) -> None:
    dear = situation(observed={"evaluation": Between("eval_steps", 5 * STEP_S, 10)})
    found, = CHECK["intervals"].find(dear)
    assert found.severity == "critical"
    assert found.cure.words == ("eval_steps=500",)
    cheap = situation(observed={"evaluation": Between("eval_steps", 0.1 * STEP_S, 10)})
    assert not list(CHECK["intervals"].find(cheap))


def test_what_is_not_installed_here_is_no_finding_about_a_machine_that_is_not_here(situation: Make, tmp_path: Path) -> None:
    _, words, given = FIRES["software"]
    assert findings(situation, "software", words, given, tmp_path)
    assert not findings(situation, "software", words, {**given, "hardware": {"basis": "published"}}, tmp_path)


def test_a_pin_that_cannot_be_is_critical(situation: Make) -> None:
    found, *_ = CHECK["pins"].find(situation(refused=(PinRefused(Refusal("tf32", "no GPU")),)))
    assert (found.severity, found.evidence[0].what) == ("critical", "techniques.tf32")


def test_a_technique_pinned_off_is_named_with_what_its_claim_expects(situation: Make) -> None:
    found, = CHECK["pins"].find(situation("techniques.bf16=off"))
    assert found.cure.words == ("techniques.bf16=on",)
    assert found.expected.basis.startswith("formula")
    assert found.expected.speed is not None
    assert found.expected.speed[1] == pytest.approx(4.0)


def test_the_last_pass_of_a_step_is_made_even_by_the_cure(situation: Make) -> None:
    found, *_ = CHECK["batch"].find(situation("techniques.micro_batch.examples=4"))
    assert found.cure.words == ("techniques.micro_batch.examples=2",)


IDLE = {
    "data.max_length": ["data.max_length=9"], "lora.sigma": ["lora.sigma=2.0"],
    "quantisation.double": ["quantisation.double=false"],
    "min_lr_rate": ["lr_scheduler_type=constant", "min_lr_rate=0.1"],
    "warmup_ratio": ["warmup_steps=3", "warmup_ratio=0.1"], "sample.prompt": ["sample.tokens=0", "sample.prompt=line"],
    "eval_steps": ["data.validation_share=0", "eval_steps=3"], "max_eval_samples": ["max_eval_samples=100000"],
    "techniques.loader": ["techniques.loader.pinned=true"], "techniques.micro_batch": ["techniques.micro_batch.examples=99"],
    "techniques.activation_checkpointing": ["techniques.activation_checkpointing.keep_attention=true", "model.dropout=0.1"],
    "techniques.fp16": ["techniques.fp16=off"],
}


@pytest.mark.parametrize("key", IDLE)
def test_a_key_that_changes_nothing_is_named(key: str, situation: Make) -> None:
    titles = {finding.title for finding in CHECK["no_effect"].find(situation(*IDLE[key]))}
    assert f"{key} has no effect here" in titles


def test_a_key_that_has_its_default_is_not_named(situation: Make) -> None:
    assert not [finding for finding in CHECK["no_effect"].find(situation()) if "techniques" not in finding.title]


def test_a_step_that_does_not_fit_is_told_what_would_help(situation: Make) -> None:
    found, *_ = CHECK["memory"].find(situation("train_batch_size=4000", hardware={"free_memory_bytes": 135 << 20}))
    assert found.severity == "critical"
    assert found.cure.words


def test_several_gpus_are_no_reason_to_split_a_model(situation: Make) -> None:
    found, = CHECK["accelerator"].find(situation(hardware={"device": "cuda", "devices": 4, "compute_capability": (9, 0)}))
    assert (found.severity, found.title) == ("low", "one of 4 GPUs trains")
