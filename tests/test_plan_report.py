"""What the plan's report says of fine-tuning: one line on the data, one on the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from powertrain.facts.model import model_facts
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.records import DataFacts, Estimate, Facts, ModelFacts, OnMachine, to_plain
from powertrain.records.event_log import from_line
from powertrain.report.plan import data_row, expected_rows, facts_rows, fitting_rows, model_row, on_machine_row, run_row
from powertrain.report.result import result_rows

EXAMPLES = DataFacts(
    "a.jsonl", "0" * 64, documents=60, characters=0, text_bytes=0, tokenizer="folder", vocabulary=32000, train_tokens=5000,
    validation_tokens=300, validation_bytes=0, block=100, stride=100, examples=50, train_batch_size=8,
    length_quantiles={"min": 20, "p50": 90, "max": 400}, kind="conversation", max_length=400, trained_share=0.25)


SCHEDULE = {"lr_scheduler_type": "cosine", "learning_rate": 3e-4}


def tuned(**changes: object) -> ModelFacts:
    config, _ = make_config("llama", vocabulary=500, layers=2, width=64, heads=4, context=128)
    adapters = None if changes.get("method") == "full" else AdapterConfig(r=2)
    given: dict[str, Any] = {"method": "lora", "frozen_dtype": "bf16", "path": "org/model"} | changes
    return model_facts(config, adapters=adapters, **given)


def test_examples_are_told_by_their_lengths_and_what_is_learned_of_them() -> None:
    title, text = data_row(EXAMPLES)
    assert title == "Data"
    for part in ("60 rows", "50 conversations", "100 tokens on average and 400 at most", "25% of them trained on",
                 "300 tokens held out"):
        assert part in text
    assert "characters" not in text


def test_one_is_no_plural() -> None:
    text = data_row(replace(EXAMPLES, kind="blocks", documents=1, examples=1))[1]
    assert "1 document, " in text
    assert "1 block of 100" in text
    assert "1 step of 1 conversation (about 100 tokens), 1 epoch; " in run_row(
        SCHEDULE, replace(EXAMPLES, examples=1, train_batch_size=1), 1)[1]
    assert "1 head, " in model_row(replace(tuned(), heads=1, kv_heads=1))[1]


def test_many_epochs_are_written_out() -> None:
    assert "2,400 epochs; " in run_row(SCHEDULE, replace(EXAMPLES, examples=1, train_batch_size=8), 300)[1]


def test_a_batch_beyond_the_data_is_said() -> None:
    assert "tokens), which repeats the 200 examples 500 times in each step, 1,500 epochs; " in run_row(
        SCHEDULE, replace(EXAMPLES, examples=200, train_batch_size=100_000), 3)[1]
    assert "over the" not in run_row(SCHEDULE, replace(EXAMPLES, examples=8, train_batch_size=8), 3)[1]


def test_a_pretrained_model_is_told_with_its_path_its_provider_and_what_is_trained() -> None:
    model = tuned()
    text = model_row(model, "the decoder knows llama")[1]
    assert "from org/model, the decoder knows llama; lora" in text
    assert f"lora: {model.trainable:,} trained ({model.trainable / model.parameters:.2%}), the others frozen in bf16" in text
    assert "full: all of them trained" in model_row(tuned(method="full"))[1]
    assert "; from" not in model_row(tuned(method="full", path=""))[1]
    assert "computed by transformers" in model_row(replace(model, provider="transformers"))[1]


def test_a_run_over_examples_counts_examples() -> None:
    text = run_row({"lr_scheduler_type": "cosine", "learning_rate": 1e-4}, EXAMPLES, 25)[1]
    assert "25 steps of 8 conversations (about 800 tokens), 4 epochs" in text


def test_an_absent_estimate_says_why(facts: Facts) -> None:
    bridged = replace(tuned(), provider="transformers")
    assert "cannot count the work of llama in transformers" in expected_rows(None, facts.hardware, bridged)[0][1]
    unmeasured = replace(facts.hardware, peak_flops_per_s={})
    for model in (facts.model, replace(tuned(), provider="transformers")):
        assert "is not measured" in expected_rows(None, unmeasured, model)[0][1]


def test_a_machine_that_is_not_here_says_which_figure_is_not_published(facts: Facts) -> None:
    there = replace(facts.hardware, basis="published", peak_flops_per_s={"fp32": 8e12, "fp16": 65e12})
    for changes, missing in (({"bandwidth_bytes_per_s": None}, "memory bandwidth"), ({"peak_flops_per_s": {}}, "rates"),
                             ({"bandwidth_bytes_per_s": 3e11}, "rate for this dtype")):
        hardware = replace(there, **changes)
        assert f"does not publish its {missing};" in expected_rows(None, hardware)[0][1]
        assert on_machine_row(OnMachine("t4", hardware, "", None, 1))[3] == f"{missing} not published"


def test_facts_of_fine_tuning_are_listed_with_their_sources(facts: Facts) -> None:
    rows = {name: (value, source) for name, value, source in facts_rows(replace(facts, model=tuned(), data=EXAMPLES))}
    assert rows["provider"] == ("native", "method lora, task causal")
    assert rows["blocks with adapters"] == ("2 of 2", "0, 1")
    assert rows["blocks.0.qkv.adapters.q_proj.A"][0] == "2 x 64"
    assert rows["training tokens"] == ("5,000", "50 examples, 25.0% trained on")


ESTIMATE = Estimate(
    step_s=(0.5, 2.0), floor_s=0.25, bound_by="compute", flops_per_step=1e9, flops_per_token=1e6, dtype="fp32",
    peak_flops_per_s=4e9, tokens_per_step=1000, steps=100,
    memory_bytes={"weights": 1 << 30, "activations": 2 << 30, "loss": 0},
    basis="expected time: 3 runs on this machine; floor: formulas with the measured peaks; memory: formulas",
    step_basis="3 runs on this machine", padding_share=0.125,
    largest_pass={"examples": 24, "tokens": 6144, "bytes": 5 << 30})


def test_a_plan_shows_speed_floor_memory_by_component_and_the_largest_pass(facts: Facts) -> None:
    hardware = replace(facts.hardware, free_memory_bytes=6 << 30, memory_bytes=8 << 30)
    rows = dict(expected_rows(ESTIMATE, hardware, facts.model))
    assert rows["Expected"] == ("50 s to 3 min 20 s for 100 steps, 500 to 2,000 tokens/s: 12% to 50% of the measured fp32 "
                                "limit; 12.5% of what is computed is padding")
    assert rows["Floor"] == "a step takes at least 250 ms, limited by compute: 1.0 MFLOP a token at 0.004 TFLOP/s"
    assert rows["Memory"] == "3 GiB at the peak: weights 1 GiB, activations 2 GiB"
    assert rows["Largest pass"] == "24 examples, 6,144 tokens: needs 5 GiB of the 6 GiB free"
    assert rows["Known from"].startswith("expected time: 3 runs on this machine; ")
    full = dict(expected_rows(replace(ESTIMATE, largest_pass={"examples": 0}), replace(hardware, free_memory_bytes=1 << 30)))
    assert "MORE than the 1 GiB free" in full["Memory"]
    saving = dict(expected_rows(replace(ESTIMATE, copied_bytes=3 << 29), hardware))
    assert saving["Memory"].endswith("activations 2 GiB; while a checkpoint is written, a copy of 1.5 GiB of the host's "
                                     "memory, if it is free")


def test_what_does_not_fit_is_shown_with_what_would_help() -> None:
    assert fitting_rows(100, 100, [("never=said", 1, True)]) == []
    rows = fitting_rows(3 << 30, 1 << 30, [("a=1", 5 << 29, True), ("b=2", 1 << 30, False)])
    assert rows[0][0] == "Too large"
    assert "a step needs 3 GiB, and 1 GiB are free" in rows[0][1]
    assert rows[1:] == [("Would help", "a=1: saves 2.5 GiB, which is enough"), ("Would help", "b=2: saves 1 GiB")]


def rows_of(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return result_rows([from_line(event) for event in events], "run", None)


def test_a_result_shows_what_was_expected_beside_what_was_measured() -> None:
    step = {"event": "step", "step": 1, "seconds": 1.0, "real_tokens": 1000, "tokens": 1000, "loss": 2.0, "learning_rate": 1e-3,
            "grad_norm": 1.0}
    start = {"event": "start", "estimate": to_plain(ESTIMATE), "method": "scratch", "task": "causal"}
    measured = {"event": "memory", "step": 2, "allocated_bytes": 3 << 30, "predicted": {"weights": 3 << 29, "loss": 3 << 29}}
    end = {"event": "end", "reason": "finished", "step": 2, "peak_memory_bytes": 4 << 30}
    rows = dict(rows_of([start, step, measured, step, end])[:4])
    assert rows["Speed"].endswith("the plan expected 500 to 2,000 (3 runs on this machine)")
    assert rows["Memory"] == ("3 GiB of tensors at the peak of step 2; the plan expected 3 GiB (+0.0%); the process: 4 GiB at "
                              "the peak")
    busy = {**start, "load": 3.2}
    slow = dict(rows_of([busy, {**step, "seconds": 10.0}, end]))["Speed"]
    assert slow.endswith("; the machine was not idle: its load was 3.2 when the run began")
    assert dict(rows_of([busy, step, step, end]))["Speed"] == rows["Speed"]
    fuller = dict(rows_of([start, step, {**measured, "fullest_bytes": 7 << 30}, step, end])[:4])
    assert "the plan expected 3 GiB (+0.0%), and 7 GiB for the fullest possible passes; the process" in fuller["Memory"]
    assert dict(rows_of([start, step, {**measured, "fullest_bytes": 3 << 30}, step, end])[:4]) == rows
    without = dict(rows_of([start, step, end])[:4])
    assert without["Memory"] == "the process: 4 GiB at the peak"


def test_the_command_that_continues_a_run_names_its_processes() -> None:
    begun = {"event": "start", "time": 0.0, "method": "scratch", "total_steps": 9, "processes": 4}
    stopped = {"event": "end", "time": 1.0, "state": "stopped", "step": 3, "reason": "stopped"}
    assert ("Continue", "powertrain train --resume run --processes 4") in rows_of([begun, stopped])
    assert ("Continue", "powertrain train --resume run") in rows_of([{**begun, "processes": 1}, stopped])


def test_a_tiny_share_of_the_limit_is_less_than_a_percent_and_equal_ends_are_said_once(facts: Facts) -> None:
    def said(low: float, high: float) -> str:
        estimate = Estimate((1 / high, 1 / low), 0.1, "compute", 1.0, 1.0, "bf16", 1.0, 64, 10, {}, "test")
        return expected_rows(estimate, facts.hardware)[0][1]

    assert said(0.001, 0.004).endswith(": less than 1% of the measured bf16 limit")
    assert said(0.051, 0.053).endswith(": 5% of the measured bf16 limit")
    assert said(0.001, 0.02).endswith(": less than 1% to 2% of the measured bf16 limit")
