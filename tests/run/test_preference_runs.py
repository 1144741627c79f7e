"""Runs that learn which answer is better: the documented commands, the reference's cache, resuming, evaluating, the plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_finetuning import rows_file, tiny_llama

from driver import run_ranks
from powertrain.recipe import resolve
from powertrain.recipe.schema import COMPARING
from powertrain.records.event_log import read_events
from powertrain.records.events import Evaluated, Memory, Step
from powertrain.records.timeline import read
from powertrain.report.answer_figures import rewards
from powertrain.report.result import quality
from powertrain.training.objectives import OBJECTIVES

Cli = Callable[..., tuple[int, str, str]]
PAGE = Path(__file__).parents[2] / "docs" / "fine-tuning.md"
QUICK = ["train_batch_size=6", "max_steps=12", "save_steps=2", "eval_steps=6", "logging_steps=2", "lora.r=4",
         "techniques.threads=off"]
FAST = ["learning_rate=1e-2"]
LONG = [word.replace("max_steps=12", "max_steps=20") for word in QUICK]       # enough for its memory to be measured


@pytest.fixture
def rated(tmp_path: Path) -> Path:
    return rows_file(tmp_path / "rated.jsonl", [
        {"prompt": f"what is {i}", "completion": f" it is {i * i}" if i % 2 else " no idea", "label": bool(i % 2)}
        for i in range(60)])


def steps_of(run: Path) -> list[Step]:
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, Step)]


def test_the_documented_commands_run(cli: Cli, base: Path, pairs: Path, rated: Path, tmp_path: Path) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Preferences\n")[2]
    commands = section.partition("```sh\n")[2].partition("```")[0].splitlines()
    assert len(commands) == 9
    for line in commands:
        words = line.replace("FOLDER", str(base)).split()[1:]
        code, out, err = cli(*words, *([*QUICK, *FAST] if words[0] == "train" else QUICK[:1] if words[0] == "plan" else []))
        assert code == 0, err
        assert out
    for name in ("dpo", "orpo", "simpo", "kto", "reward"):
        steps = steps_of(tmp_path / f"run-{name}")
        assert len(steps) == 12
        assert steps[-1].loss < steps[0].loss
        assert {"rewards_chosen", "rewards_margins", "rewards_accuracies"} <= set(steps[-1].metrics)
    assert "right in" in out                                     # of `evaluate`, the last


def test_the_reference_is_scored_once_for_the_same_examples_and_model(
        cli: Cli, base: Path, pairs: Path, tmp_path: Path) -> None:
    train = ["train", f"model.path={base}", f"data={pairs}", "objective=dpo", *QUICK, *FAST]
    told = [cli(*train, "--output", name)[2] for name in ("first", "second")]
    assert "scoring 60 examples" in told[0]
    assert "scoring" not in told[1]
    assert [step.loss for step in steps_of(tmp_path / "first")] == [step.loss for step in steps_of(tmp_path / "second")]
    in_step = cli(*train, "techniques.stored_reference=off", "--output", "third")
    assert in_step[0] == 0, in_step[2]
    assert "scoring" not in in_step[2]
    losses = [[step.loss for step in steps_of(tmp_path / name)] for name in ("first", "third")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("words", [["method=lora"], ["method=qlora"], ["method=full", "learning_rate=1e-3"],
                                   ["techniques.stored_reference=off"]], ids=" ".join)
def test_a_killed_run_resumes_to_the_very_losses(cli: Cli, base: Path, pairs: Path, tmp_path: Path, words: list[str]) -> None:
    train = ["train", f"model.path={base}", f"data={pairs}", "objective=dpo", *QUICK, *FAST, *words]
    assert cli(*train, "--output", "whole")[0] == 0
    assert cli(*train, "--output", "killed", fault=("step", 3))[0] == -9
    code, _, err = cli("train", "--resume", "killed")
    assert code == 0, err
    whole, killed = (steps_of(tmp_path / name) for name in ("whole", "killed"))
    assert [(step.step, step.loss, step.metrics) for step in whole] == [(step.step, step.loss, step.metrics) for step in killed]


def test_evaluation_and_report_have_the_accuracy(cli: Cli, base: Path, pairs: Path, tmp_path: Path) -> None:
    code, _, err = cli("train", f"model.path={base}", f"data={pairs}", "objective=dpo", *QUICK, *FAST,
                       "data.validation_share=0.2", "--output", "run")
    assert code == 0, err
    events = read_events(tmp_path / "run" / "events.jsonl")
    last = [event for event in events if isinstance(event, Evaluated)][-1]
    assert last.tokens == 12
    assert last.metrics["rewards_accuracies"] > 0.9
    assert "right in" in quality(last, None)
    figure = rewards(read(events))
    assert figure is not None
    assert "held-out answers are judged right" in figure.title
    code, out, err = cli("evaluate", "run", "--json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["perplexity"] is None
    assert found["loss"] == pytest.approx(last.loss, rel=1e-3)
    assert found["metrics"]["rewards_accuracies"] == pytest.approx(last.metrics["rewards_accuracies"])
    code, out, err = cli("evaluate", "run", "--data", str(pairs), "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["tokens"] == 60
    code, out, err = cli("monitor", "run")
    assert code == 0, err
    assert "Answers" in out
    code, out, err = cli("report", "run")
    assert code == 0, err


def test_the_plan_decides_about_reference_and_prompt_with_numbers(cli: Cli, base: Path, pairs: Path) -> None:
    plan = ["plan", f"model.path={base}", f"data={pairs}", "objective=dpo", "train_batch_size=6", "--json"]
    def plan_of(*words: str) -> dict[str, Any]:
        code, out, err = cli(*plan, *words)
        assert code == 0, err
        return next(found["plan"] for line in out.splitlines() if "plan" in (found := json.loads(line)))

    found = plan_of("num_train_epochs=3")
    steps = {step["technique"]: step for step in found["steps"]}
    assert steps["stored_reference"]["numbers"]["stored_examples"] == 60
    assert steps["shared_prompt"]["numbers"]["shared_share"] > 0.1
    few = plan_of("max_steps=2")
    refused = {refusal["technique"]: refusal for refusal in few["refused"]}
    assert refused["stored_reference"]["numbers"]["read_examples"] == 12
    assert "stored_reference" in {step["technique"] for step in plan_of("max_steps=2", "method=full")["steps"]}


@pytest.mark.parametrize("words", [["method=lora"], ["method=full"], ["method=full", "techniques.stored_reference=off"],
                                   ["method=lora", "techniques.shared_prompt=off"]], ids=" ".join)
def test_memory_is_predicted(cli: Cli, tmp_path: Path, pairs: Path, words: list[str]) -> None:
    base = tiny_llama(tmp_path / "wide", width=256, layers=3)
    code, _, err = cli("train", f"model.path={base}", f"data={pairs}", "objective=dpo", *LONG, *words,
                       "--output", "run")
    assert code == 0, err
    memory = next(event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, Memory))
    assert sum(memory.predicted.values()) == pytest.approx(memory.allocated_bytes, rel=0.1)


@pytest.mark.parametrize(("rows", "words", "said"), [
    ([{"question": "a", "answer": "b"}], ["objective=dpo"], "needs rows with prompt, chosen and rejected"),
    ([{"prompt": "a", "chosen": " b", "rejected": " b"}] * 3, ["objective=dpo"], "equal"),
    ([{"prompt": "a", "chosen": " b", "rejected": " c"}] * 3, [], "objective=dpo"),
    ([{"prompt": f"a{i}", "chosen": " b", "rejected": " c"} for i in range(9)], ["objective=dpo", "objective.beta=0"], "beta")])
def test_bad_input_ends_in_one_sentence(cli: Cli, base: Path, tmp_path: Path, rows: list[dict[str, Any]], words: list[str],
                                        said: str) -> None:
    data = rows_file(tmp_path / "rows.jsonl", rows)
    code, out, err = cli("train", f"model.path={base}", f"data={data}", *QUICK, *words, "--output", "run")
    assert code == 2
    assert "Traceback" not in err + out
    assert re.search(said, err + out)


@pytest.mark.parametrize("words", [["method=lora"], ["method=lora", "techniques.stored_reference=off"],
                                   ["method=full", "learning_rate=1e-3", "techniques.sharding=on"]], ids=" ".join)
def test_processes_that_share_a_run_of_kto_estimate_one_divergence(
        cli: Cli, base: Path, rated: Path, cache: Path, tmp_path: Path, words: list[str]) -> None:
    """Passes of one and of two examples: one of the two processes has fewer, and a mean of means would weight these more."""
    train = ["train", f"model.path={base}", f"data={rated}", "objective=kto", *QUICK, *FAST, "max_steps=6",
             "train_batch_size=5", "data.validation_share=0.1", "techniques.bf16=off", "techniques.packing=off",
             "techniques.micro_batch.examples=2", "techniques.fused_blocks=off", *words]
    alone = [word for word in train if "sharding" not in word]
    assert cli(*alone, "--output", "one")[0] == 0
    for code, err in run_ranks([*train, "--output", "two"], cache, tmp_path, [None, None]):
        assert code == 0, err
    one, two = (steps_of(tmp_path / name) for name in ("one", "two"))
    assert any(step.metrics["kl"] > 1e-3 for step in one)
    for kind in ("kl", "rewards_margins"):
        assert [step.metrics[kind] for step in two] == pytest.approx([step.metrics[kind] for step in one], rel=1e-3, abs=1e-6)
    assert [step.loss for step in two] == pytest.approx([step.loss for step in one], rel=1e-5)
    held = [[event.loss for event in read_events(tmp_path / name / "events.jsonl") if isinstance(event, Evaluated)]
            for name in ("one", "two")]
    assert held[1] == pytest.approx(held[0], rel=1e-5)


def test_adapters_and_all_weights_get_trls_rates() -> None:
    rates = [resolve(None, ["model.path=x", "objective=dpo", *words]).recipe.learning_rate
             for words in ([], ["method=full"], ["learning_rate=3e-4"])]
    assert rates == [1e-5, 1e-6, 3e-4]
    assert set(COMPARING) == {name for name, kind in OBJECTIVES.rows.items() if kind.rows != "answers" and not kind.task}
