"""What the plan's report says of fine-tuning: one line on the data, one on the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from powertrain.facts.model import model_facts
from powertrain.models.adapters import AdapterConfig
from powertrain.models.config import make_config
from powertrain.records import DataFacts, Facts, ModelFacts
from powertrain.report.plan import data_row, expected_rows, facts_rows, model_row, run_row

EXAMPLES = DataFacts(
    "a.jsonl", "0" * 64, documents=60, characters=0, text_bytes=0, tokenizer="folder", vocabulary=32000, train_tokens=5000,
    validation_tokens=300, validation_bytes=0, block=100, stride=100, examples=50, train_batch_size=8,
    length_quantiles={"min": 20, "p50": 90, "max": 400}, kind="conversation", max_length=400, trained_share=0.25)


def tuned(**changes: object) -> ModelFacts:
    config, _ = make_config("llama", vocabulary=500, layers=2, width=64, heads=4, context=128)
    adapters = None if changes.get("method") == "full" else AdapterConfig(r=2)
    given: dict[str, Any] = {"method": "lora", "frozen_dtype": "bf16", "path": "org/model"} | changes
    return model_facts(config, adapters=adapters, **given)


def test_examples_are_told_by_their_lengths_and_what_is_learned_of_them() -> None:
    title, text = data_row(EXAMPLES)
    assert title == "Data"
    for part in ("60 rows", "50 conversations", "100 tokens on average and 400 at most", "25% of them learned",
                 "300 tokens held out"):
        assert part in text
    assert "characters" not in text


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
    assert "is not measured" in expected_rows(None, facts.hardware, facts.model)[0][1]
    assert "what transformers does" in expected_rows(None, facts.hardware, replace(tuned(), provider="transformers"))[0][1]


def test_facts_of_fine_tuning_are_listed_with_their_sources(facts: Facts) -> None:
    rows = {name: (value, source) for name, value, source in facts_rows(replace(facts, model=tuned(), data=EXAMPLES))}
    assert rows["provider"] == ("native", "method lora, task causal")
    assert rows["blocks with adapters"] == ("2 of 2", "0, 1")
    assert rows["blocks.0.qkv.adapters.q_proj.A"][0] == "2 x 64"
    assert rows["training tokens"] == ("5,000", "50 examples, 25.0% are learned")
