"""`powertrain audit PATH --convert` and `--verify` as a user runs them: what is written and measured, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from adapted_models import make_base
from example_folders import chat_folder
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.models.huggingface.folder import save_folder
from powertrain.recipe import resolve

Cli = Callable[..., tuple[int, str, str]]
# document 000's trainer: adapters on a base in this folder, three passes of two examples a step
CONFIG = """lora:
  model_id: base
  dataset_path: data.jsonl
  use_4bit: false
  batch_size: 2
  gradient_accumulation_steps: 3
  eval_steps: 20
  max_seq_length: 64
  temperature: 0.85
"""


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder with a config, and the base and the data that it names."""
    tokenizer = open_example_tokenizer(chat_folder(tmp_path / "tokenizer"))
    save_folder(make_base("llama", vocabulary=330, context=96), tmp_path / "base", tokenizer)
    rows = [{"instruction": "what is " + "one and " * (i % 3) + "two ?", "output": f"it is {i}"} for i in range(24)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_a_recipe_is_printed_with_an_account_of_every_key(beside: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = cli("audit", "config.yaml", "--convert", folder=beside)
    assert code == 0, err
    assert yaml.safe_load(out)["train_batch_size"] == 6
    assert [key for key in yaml.safe_load(CONFIG)["lora"] if f"{key}:" not in out] == []
    (beside / "mine.yaml").write_text(out)
    monkeypatch.chdir(beside)
    assert resolve("mine.yaml").recipe.model.path == "base"


def test_a_recipe_is_written_once_and_summed_up(beside: Path, cli: Cli) -> None:
    code, out, _ = cli("audit", "config.yaml", "--convert", "--output", "mine.yaml", folder=beside)
    assert code == 0
    assert "train it with `powertrain train mine.yaml`" in out
    assert " translated, " in out
    before = (beside / "mine.yaml").read_text()
    code, out, err = cli("audit", "config.yaml", "--convert", "--output", "mine.yaml", folder=beside)
    assert (code, out) == (2, "")
    assert "mine.yaml already exists" in err
    assert (beside / "mine.yaml").read_text() == before


STARTED = ("import argparse\nfrom transformers import Trainer, TrainingArguments\nparser = argparse.ArgumentParser()\n"
           "parser.add_argument('--lr', type=float, default=1e-3)\n"
           "Trainer('base', TrainingArguments('out', learning_rate=parser.parse_args().lr)).train()\n")


def test_a_shell_script_is_converted_with_the_options_that_it_gives(beside: Path, cli: Cli) -> None:
    (beside / "train.py").write_text(STARTED)
    (beside / "run.sh").write_text("python train.py --lr 3e-4\n")
    (beside / "tool.sh").write_text("llamafactory-cli train told.yaml\n")
    (beside / "told.yaml").write_text("stage: sft\nfinetuning_type: lora\nmodel_name_or_path: x\ndataset: a\ntemplate: qwen\n")
    for name, rate in (("train.py", "0.001"), ("run.sh", "0.0003")):
        out = cli("audit", name, "--convert", folder=beside)[1]
        assert f"learning_rate: {rate}" in out
        assert "(a training script)" in out
    assert "told.yaml (a LLaMA-Factory YAML" in cli("audit", "tool.sh", "--convert", folder=beside)[1]


def test_both_arms_run_and_learn_the_same(beside: Path, cli: Cli) -> None:
    code, out, err = cli("audit", "config.yaml", "--verify", "--budget", "1s", "--json", folder=beside, fault=("cores", 1))
    assert code == 0, err
    found = json.loads(out)
    assert found["parity"]["holds"], found["parity"]
    assert found["comparison"]["pairs"] >= 5
    assert min(found["comparison"]["peak_memory_bytes"]) > 0
    assert found["original"]["micro_batch"] == {"examples": 2}
    assert "times as fast" in found["says"]


@pytest.mark.parametrize(("words", "says"), [
    (("config.yaml", "--verify", "--output", "x.yaml"), "--verify writes no file"),
    (("config.yaml", "--verify", "--convert"), "use one at a time"),
    (("config.yaml", "--convert", "--apply"), "use one at a time"),
    (("config.yaml", "--output", "x.yaml"), "add one of these options"),
    ((".", "--convert"), "is a folder"),
    (("notes.txt", "--convert"), "neither a script"),
    (("other.json", "--verify"), "no config that is known"),
    (("no_data.yaml", "--verify"), "its data ./no.jsonl are not here"),
    (("no_model.yaml", "--verify"), "its model ./no-base is not here"),
    (("config.yaml", "--verify", "--machine", "h100"), "--verify measures on this machine; leave --machine h100 out, or run"),
    (("config.yaml", "--convert", "--machine", "h100"), "look at no machine; leave --machine h100 out"),
    (("config.yaml", "--elsewhere", "--machine", "h100"), "look at no machine; leave --machine h100 out"),
    (("config.yaml", "--machine", "x100"), "known kinds are b200, h200"),
    (("config.yaml", "--machine", "facts.json"), "No such file or directory; `powertrain facts --output")])
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(words: tuple[str, ...], says: str, beside: Path, cli: Cli) -> None:
    (beside / "notes.txt").write_text("hello\n")
    (beside / "other.json").write_text('{"compilerOptions": {"strict": true}, "include": ["src"]}')
    (beside / "no_data.yaml").write_text(CONFIG.replace("data.jsonl", "./no.jsonl"))
    (beside / "no_model.yaml").write_text(CONFIG.replace("model_id: base", "model_id: ./no-base"))
    code, out, err = cli("audit", *words, folder=beside)
    assert (code, out) == (2, "")
    assert says in err
    assert err.startswith("powertrain: ")
    assert err.count("\n") == 1
    assert not (beside / "x.yaml").exists()


def test_an_audit_looks_at_the_data_and_the_model_that_lie_beside_a_file(beside: Path, cli: Cli) -> None:
    _, out, err = cli("audit", "config.yaml", "--json", folder=beside)
    found = json.loads(out.splitlines()[0])
    assert found["environment"]["its data"].startswith("16 examples"), err
    (beside / "data.jsonl").unlink()
    _, out, _ = cli("audit", "config.yaml", "--json", folder=beside)
    assert "data.jsonl is not on this machine" in json.loads(out.splitlines()[0])["environment"]["its data"]
    _, out, _ = cli("audit", "config.yaml", "--json", "--elsewhere", folder=beside)
    assert "its data" not in json.loads(out.splitlines()[0])["environment"]


def test_the_data_are_read_for_another_machine_and_this_one_is_not_measured(beside: Path, cli: Cli) -> None:
    (beside / "config.yaml").write_text(CONFIG.replace("max_seq_length: 64", "max_seq_length: 64\n  fp16: true"))
    for words in ((), ("--machine", "h100")):
        _, out, err = cli("audit", "config.yaml", "--json", *words, folder=beside)
        found = json.loads(out.splitlines()[0])["environment"]
        assert found["its data"].startswith("16 examples"), err
        assert found["machine"].startswith("1 x NVIDIA H100" if words else "assumed elsewhere")
        assert "measured once" not in err
