"""The recipes that ship, prepared and trained as far as a test may."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from powertrain.recipe import shipped_recipes
from powertrain.training.events import read_events

Cli = Callable[..., tuple[int, str, str]]
SHRINK = ["model.layers=1", "model.width=32", "model.heads=2", "data.block=32", "model.context=32", "train_batch_size=4",
          "max_steps=3", "warmup_steps=1", "sample.tokens=3", "techniques.threads=off"]


@pytest.mark.parametrize("name", shipped_recipes())
def test_it_trains_at_a_small_size(cli: Cli, source: Path, tmp_path: Path, name: str) -> None:
    vocabulary = ["model.vocabulary=null", "data.vocabulary=300"] if name.startswith("pretrain") else []
    prompt = ["sample.prompt="] if name != "default" else []
    code, _, err = cli("train", name, f"data={source}", *SHRINK, *vocabulary, *prompt, "--output", "run")
    assert code == 0, err
    assert [e["step"] for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "step"] == [1, 2, 3]


def test_production_is_the_documents_size(cli: Cli, source: Path) -> None:
    """1.41 billion parameters, counted without building them; on this data, so with a smaller tokenizer."""
    code, out, err = cli("plan", "pretrain-production", f"data={source}", "data.vocabulary=300", "data.block=64",
                         "techniques.threads=off", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["facts"]["model"]["parameters"] == pytest.approx(1.41e9, rel=0.01)
    assert plan["plan"]["estimate"]["memory_bytes"]["weights"] == 4 * plan["facts"]["model"]["parameters"]
    assert plan["recipe"]["train_batch_size"] == 4 * 8


@pytest.mark.parametrize(("name", "batch"), [("char-12gb", 96), ("char-16gb", 128), ("char-24gb", 192)])
def test_document_003s_batches(cli: Cli, shakespeare: Path, name: str, batch: int) -> None:
    code, out, err = cli("plan", name, f"data={shakespeare}", "--json")
    assert code == 0, err
    facts = json.loads(out)["facts"]
    assert (facts["data"]["train_batch_size"], facts["data"]["characters"]) == (batch, 1_000_000)
    assert facts["model"]["parameters"] == pytest.approx(10.7e6, rel=0.02)


def test_the_small_character_model_learns_what_nanogpts_readme_says(cli: Cli, shakespeare: Path, tmp_path: Path) -> None:
    """nanoGPT's README gives a validation loss of 1.88 for this model after these 2000 steps."""
    code, _, err = cli("train", "char-shakespeare-cpu", f"data={shakespeare}", "eval_steps=0", "save_steps=0",
                       "sample.tokens=0", "--quiet", "--output", "run")
    assert code == 0, err
    evaluations = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "evaluation"]
    assert evaluations[-1]["tokens"] == 111_539
    assert evaluations[-1]["loss"] <= 1.88
