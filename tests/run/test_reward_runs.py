"""Runs that train a reward model: resuming, memory, evaluating, exports, what others open, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_finetuning import rows_file, tiny_llama

from driver import run_ranks
from powertrain.records.event_log import read_events
from powertrain.records.events import Evaluated, Memory, Step

Cli = Callable[..., tuple[int, str, str]]
QUICK = ["objective=reward", "train_batch_size=6", "max_steps=8", "save_steps=2", "eval_steps=4", "logging_steps=2", "lora.r=4",
         "techniques.threads=off", "learning_rate=1e-2"]
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")      # peft asks it


def steps_of(run: Path) -> list[Step]:
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, Step)]


def scores_by_others(run: Path, texts: list[list[int]]) -> list[float]:
    """What transformers, or PEFT for an adapter, makes of each text."""
    from peft import AutoPeftModelForSequenceClassification
    from transformers import AutoModelForSequenceClassification

    opens = AutoPeftModelForSequenceClassification if (run / "model" / "adapter_config.json").is_file() else \
        AutoModelForSequenceClassification
    model: Any = opens.from_pretrained(run / "model", num_labels=1)
    with torch.no_grad():
        return [float(model(torch.tensor([ids])).logits) for ids in texts]


@pytest.mark.parametrize("words", [["method=lora"], ["method=qlora"], ["method=full", "learning_rate=1e-3"]], ids=" ".join)
def test_a_killed_run_resumes_and_others_score_as_evaluate_does(cli: Cli, base: Path, pairs: Path, tmp_path: Path,
                                                                words: list[str]) -> None:
    train = ["train", f"model.path={base}", f"data={pairs}", *QUICK, "data.validation_share=0.2", *words]
    assert cli(*train, "--output", "whole")[0] == 0
    assert cli(*train, "--output", "killed", fault=("step", 3))[0] == -9
    code, _, err = cli("train", "--resume", "killed")
    assert code == 0, err
    whole, killed = (steps_of(tmp_path / name) for name in ("whole", "killed"))
    assert [(step.loss, step.metrics) for step in whole] == [(step.loss, step.metrics) for step in killed]
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    texts = [[*(row["prompt"] + row[side]).encode(), 256] for row in rows for side in ("chosen", "rejected")]
    scores = torch.tensor(scores_by_others(tmp_path / "killed", texts)).view(-1, 2)
    code, out, err = cli("evaluate", "killed", "--data", str(pairs), "--json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["tokens"] == 60
    assert found["metrics"]["rewards_margins"] == pytest.approx(float((scores[:, 0] - scores[:, 1]).mean()), rel=1e-4)
    assert found["metrics"]["rewards_accuracies"] == pytest.approx(float((scores[:, 0] > scores[:, 1]).float().mean()))
    last = [event for event in read_events(tmp_path / "killed" / "events.jsonl") if isinstance(event, Evaluated)][-1]
    code, out, err = cli("evaluate", "killed", "--json")
    assert code == 0, err
    if "qlora" not in words[0]:              # which opens on its unquantised base
        assert json.loads(out.splitlines()[-1])["loss"] == pytest.approx(last.loss, rel=1e-3)


@pytest.mark.parametrize("words", [["method=lora"], ["method=full"], ["method=lora", "techniques.shared_prompt=off"]],
                         ids=" ".join)
def test_memory_is_predicted(cli: Cli, tmp_path: Path, pairs: Path, words: list[str]) -> None:
    base = tiny_llama(tmp_path / "wide", width=256, layers=3)
    code, _, err = cli("train", f"model.path={base}", f"data={pairs}", *QUICK, "max_steps=20", *words, "--output", "run")
    assert code == 0, err
    memory = next(event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, Memory))
    assert sum(memory.predicted.values()) == pytest.approx(memory.allocated_bytes, rel=0.1)


@pytest.mark.parametrize("words", [["method=lora"], ["method=full", "learning_rate=1e-3", "techniques.sharding=on"],
                                   ["method=full", "learning_rate=1e-3", "techniques.tensor_parallel.degree=2"]], ids=" ".join)
def test_processes_that_share_a_run_make_the_updates_of_one(cli: Cli, base: Path, pairs: Path, cache: Path, tmp_path: Path,
                                                            words: list[str]) -> None:
    train = ["train", f"model.path={base}", f"data={pairs}", *QUICK, "techniques.bf16=off", "techniques.packing=off",
             "techniques.micro_batch.examples=2", "max_steps=4"]
    alone = [word for word in words if not word.startswith("techniques")]
    assert cli(*train, *alone, "--output", "one")[0] == 0
    for code, err in run_ranks([*train, *words, "--output", "two"], cache, tmp_path, [None, None]):
        assert code == 0, err
    one, two = (steps_of(tmp_path / name) for name in ("one", "two"))
    assert [step.loss for step in two] == pytest.approx([step.loss for step in one], rel=1e-4)
    code, out, err = cli("evaluate", "two", "--data", str(pairs), "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["tokens"] == 60


def test_a_reward_model_is_merged_trained_further_and_refused_where_text_is_wanted(cli: Cli, base: Path, pairs: Path,
                                                                                   tmp_path: Path) -> None:
    train = ["train", f"data={pairs}", *QUICK, "max_steps=2"]
    assert cli(*train, f"model.path={base}", "--output", "run")[0] == 0
    code, out, err = cli("export", "run", "--to", "merged", "--output", "merged")
    assert code == 0, err
    assert "AutoModelForSequenceClassification" in out
    code, out, err = cli("evaluate", "merged", "--data", str(pairs), "--json")
    assert code == 0, err
    merged = json.loads(out.splitlines()[-1])["metrics"]
    of_run = json.loads(cli("evaluate", "run", "--data", str(pairs), "--json")[1].splitlines()[-1])["metrics"]
    assert merged["rewards_margins"] == pytest.approx(of_run["rewards_margins"], rel=1e-3, abs=1e-5)
    code, _, err = cli(*train, "model.path=merged", "--output", "further")
    assert code == 0, err
    assert steps_of(tmp_path / "further")[0].metrics["rewards_margins"] == pytest.approx(merged["rewards_margins"], abs=0.5)
    for words, said in ((("generate", "run", "--prompt", "a"), "is a reward model, which scores answers and writes none"),
                        (("chat", "merged", "--message", "a"), "measure it with `powertrain evaluate merged --data PAIRS`"),
                        (("serve", "run"), "is a reward model"),
                        (("export", "run", "--to", "gguf", "--output", "g"), "use --to merged or --to adapter"),
                        (("export", "run", "--to", "onnx", "--output", "o"), "use --to merged or --to adapter"),
                        (("train", f"data={pairs}", "model.path=merged"), "use objective=reward, or name its base"),
                        (("train", f"data={pairs}", "model.path=merged", "objective=dpo"), "use objective=reward"),
                        (("plan", f"data={pairs}", f"model.path={base}", "objective=reward", "model.provider=transformers"),
                         "native decoder only"),
                        (("plan", f"data={pairs}", f"model.path={base}", "objective=reward", "model.task=causal"),
                         "leave model.task out")):
        code, out, err = cli(*words)
        assert code == 2, (words, out, err)
        assert "Traceback" not in out + err
        assert re.search(re.escape(said), out + err), (words, err)


@pytest.mark.parametrize(("rows", "said"), [
    ([{"question": "a", "answer": "b"}], "needs rows with prompt, chosen and rejected"),
    ([{"prompt": "a", "chosen": " b", "rejected": " b"}] * 3, "equal"),
    ([{"prompt": "a", "chosen": " b", "rejected": " c", "margin": "much"}] * 3, "a number says by how much")])
def test_bad_rows_end_in_one_sentence(cli: Cli, base: Path, tmp_path: Path, rows: list[dict[str, Any]], said: str) -> None:
    data = rows_file(tmp_path / "rows.jsonl", rows)
    code, out, err = cli("train", f"model.path={base}", f"data={data}", *QUICK, "--output", "run")
    assert code == 2, out
    assert "Traceback" not in err + out
    assert said in err + out
