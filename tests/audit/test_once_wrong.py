"""What the audit once said of public code and was not so: a rule fires in the plain case, and not in that one."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF, MAPPED, TOKENIZER
from program_cases import PROGRAM_CASES
from running_cases import RUNNING_CASES

from powertrain.audit.audit import read_subject
from powertrain.audit.rules import RULES
from powertrain.audit.subject import Circumstances
from powertrain.records import Software

BY_NAME = {rule.name: rule for rule in RULES}
TODAY = Circumstances(software=Software({"transformers": "5.23.0", "trl": "1.16.0"}, {}))
UNSLOTH = "from unsloth import FastLanguageModel\nFastLanguageModel.from_pretrained('x')\n"
REMOTE = ("model = {kind}.from_pretrained('{path}', trust_remote_code=True)\n" + ARGUMENTS + "Trainer(model, args).train()\n")
AXOLOTL = ("base_model: x\nmicro_batch_size: 1\npad_to_sequence_len: true\nsequence_len: 512\n"
           "datasets:\n  - path: rows.jsonl\n{more}")


def severities(rule: str, text: str, folder: Path, name: str = "train.py") -> list[str]:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return [each.severity for each in BY_NAME[rule].find(read_subject(path), TODAY)]


@pytest.mark.parametrize(("kind", "path", "says"), [
    ("AutoModelForCausalLM", "someone/model", ["moderate"]), ("AutoModelForCausalLM", "./model", []),
    ("AutoModelForCausalLM", "/data/models/x", []), ("GPT2LMHeadModel", "someone/model", []),
    ("AutoModelForCausalLM", "Qwen/Qwen2.5-0.5B", ["low"])])
def test_code_of_others_runs_only_where_there_is_some(kind: str, path: str, says: list[str], tmp_path: Path) -> None:
    text = HEAD + "from transformers import GPT2LMHeadModel\n" + REMOTE.format(kind=kind, path=path)
    assert severities("remote_code_unpinned", text, tmp_path) == says


def test_a_package_that_the_project_installs_is_there(tmp_path: Path) -> None:
    text = "from utils.prompter import Prompter\n" + HEAD + ARGUMENTS
    assert severities("modules_missing", text, tmp_path)
    (tmp_path / "inner" / "utils").mkdir(parents=True)
    (tmp_path / "inner" / "utils" / "prompter.py").write_text("class Prompter:\n    pass\n")
    assert severities("modules_missing", text, tmp_path)
    (tmp_path / "inner" / "setup.py").write_text("")
    assert severities("modules_missing", text, tmp_path) == []


def test_axolotl_pads_pairs_to_the_longest_of_a_batch(tmp_path: Path) -> None:
    assert severities("padding_to_max_length", AXOLOTL.format(more=""), tmp_path, "config.yaml")
    assert severities("padding_to_max_length", AXOLOTL.format(more="rl: dpo\n"), tmp_path, "config.yaml") == []


def test_a_collator_for_two_texts_makes_no_labels(tmp_path: Path) -> None:
    text = HEAD + HF + TOKENIZER + ARGUMENTS + MAPPED + (
        "Trainer(model=model, args=args, train_dataset=rows, data_collator={collator}).train()\n")
    assert severities("labels_missing", "from transformers import DataCollatorForSeq2Seq\n" + text.format(
        collator="DataCollatorForSeq2Seq(tokenizer)"), tmp_path)
    assert severities("labels_missing", text.format(collator="DataCollatorForLanguageModeling(tokenizer, mlm=False)"),
                      tmp_path) == []


@pytest.mark.parametrize("rule", ["groups_of_completions", "device_map_in_processes", "chat_template_gives_a_dictionary"])
def test_unsloth_does_otherwise(rule: str, tmp_path: Path) -> None:
    text = {**PROGRAM_CASES, **RUNNING_CASES}[rule][0]
    assert severities(rule, text, tmp_path)
    assert severities(rule, UNSLOTH + text, tmp_path) == []
