"""What trainers refuse: every condition of the tables holds in a script, and not in its near miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import HEAD, HF, loop
from refusal_cases import REFUSAL_CASES, REFUSED, Case, trained

from powertrain.audit.audit import read_subject
from powertrain.audit.rules import RULES
from powertrain.audit.rules.refusals import TABLES
from powertrain.audit.subject import Circumstances
from powertrain.records import Software

TODAY = Circumstances(software=Software({"transformers": "5.23.0", "trl": "1.16.0"}, {}))
BY_NAME = {rule.name: rule for rule in RULES}


def said(text: str, folder: Path, rule: str = "arguments_clash", where: Circumstances = TODAY) -> list[str]:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return [each.why for each in BY_NAME[rule].find(read_subject(path), where)]


@pytest.mark.parametrize(("refused", "taken"), REFUSED, ids=[f"{case[0]} {case[1]} {case[2][:30]}" for case, _ in REFUSED])
def test_a_condition_holds_in_its_case_alone(refused: Case, taken: Case, tmp_path: Path) -> None:
    clashes, others = said(trained(*refused), tmp_path), said(trained(*taken), tmp_path)
    assert len(clashes) == len(others) + 1
    assert not set(clashes) <= set(others)


def test_every_condition_has_a_case(tmp_path: Path) -> None:
    texts = [why for refused, _ in REFUSED for why in said(trained(*refused), tmp_path)]
    told = {says for tables in TABLES.values() for conditions in tables.values() for says in conditions.values()}
    assert [says for says in sorted(told) if not any(text.endswith(says) for text in texts)] == []


@pytest.mark.parametrize("rule", REFUSAL_CASES)
def test_a_rule_fires_in_its_case_and_not_in_the_near_miss(rule: str, tmp_path: Path) -> None:
    assert len(said(REFUSAL_CASES[rule][0], tmp_path, rule)) == 1
    assert said(REFUSAL_CASES[rule][1], tmp_path, rule) == []


@pytest.mark.parametrize("change", [
    ("args = SFTConfig('out', packing=True)", "args = SFTConfig('out', **read())"),          # what it says is not known
    ("data_collator=lambda rows: rows", "data_collator=made()"),                             # which may give none
    ("args = SFTConfig", "try:\n    args = None\nexcept ValueError:\n    pass\nargs = SFTConfig")])
def test_what_is_not_known_is_not_refused(change: tuple[str, str], tmp_path: Path) -> None:
    text = trained("SFT", "packing=True", "data_collator=lambda rows: rows").replace("True, )", "True)")
    assert len(said(text, tmp_path)) == 1
    assert len(said(text.replace(*change), tmp_path)) == ("try" in change[1])


def test_an_older_release_and_unsloth_are_not_asked(tmp_path: Path) -> None:
    text = trained("SFT", "packing=True", "data_collator=lambda rows: rows")
    older = Circumstances(software=Software({"transformers": "4.46.0", "trl": "0.12.0"}, {}))
    assert said(text, tmp_path, where=older) == []
    assert said("from unsloth import FastLanguageModel\n" + text + "FastLanguageModel.from_pretrained('x')\n", tmp_path) == []


def test_a_table_of_a_config_that_is_not_here_may_hold_anything(tmp_path: Path) -> None:
    text = HEAD + HF + ("import json\nimport sys\ntold = json.load(open(sys.argv[1])).get('train', {})\n"
                        "args = TrainingArguments('out', lr_scheduler_type='greedy', **told)\nTrainer(model, args).train()\n")
    assert said(text, tmp_path) == []
    assert len(said(text.replace(", **told", ""), tmp_path)) == 1


def test_groups_are_whole_with_enough_processes(tmp_path: Path) -> None:
    text = trained("GRPO", "eval_strategy='epoch', num_generations=6", "reward_funcs='x/y'")
    assert len(said(text, tmp_path)) == 1
    (tmp_path / "run.sh").write_text("accelerate launch --num_processes 3 train.py\n", encoding="utf-8")
    assert said(text, tmp_path) == []


@pytest.mark.parametrize(("optim", "fp16", "finds"), [
    ("adamw_torch", "fp16=False", 1), ("adamw_torch_fused", "fp16=False", 0), ("adamw_torch", "fp16=True", 0)])
def test_a_trainer_in_pure_fp16_trains_by_adam(optim: str, fp16: str, finds: int, tmp_path: Path) -> None:
    text = trained("", f"optim='{optim}', {fp16}").replace("('gpt2')", "('gpt2', dtype=torch.float16)")
    assert len(said(text, tmp_path, "adam_in_fp16")) == finds


def test_a_scaler_takes_no_fp16_gradients(tmp_path: Path) -> None:
    text = loop("scaler.scale(model(batch).mean()).backward()", "scaler.step(optimizer)", "scaler.update()", before=(
        "scaler = torch.amp.GradScaler('cuda')\nmodel = AutoModelForCausalLM.from_pretrained('gpt2', dtype=torch.float16)\n"))
    assert len(said(text, tmp_path, "fp16_weights_unscaled")) == 1
    assert said(text.replace("\nfor epoch", "\nmodel = model.float()\nfor epoch"), tmp_path, "fp16_weights_unscaled") == []


def test_seq2seq_trainer_needs_arguments_of_its_own(tmp_path: Path) -> None:
    text = trained("Seq2Seq")
    assert said(text, tmp_path, "plain_arguments") == []
    assert len(said(text.replace("args = Seq2SeqTraining", "args = Training"), tmp_path, "plain_arguments")) == 1


def test_a_warmup_of_a_share_has_at_least_one_step(tmp_path: Path) -> None:
    assert len(said(trained("", "max_steps=1, warmup_steps=0.1"), tmp_path, "warmup_beyond_run")) == 1
    assert said(trained("", "max_steps=20, warmup_steps=0.1"), tmp_path, "warmup_beyond_run") == []


def test_the_notebook_launcher_needs_a_number_of_processes(tmp_path: Path) -> None:
    text = HEAD + HF + "from accelerate import notebook_launcher\nnotebook_launcher(told, ()) \n"
    assert len(said(text, tmp_path, "arguments_lacking")) == 1
    assert said(text.replace("())", "(), 2)"), tmp_path, "arguments_lacking") == []


@pytest.mark.parametrize(("kind", "keys", "lost"), [
    ("GRPO", "'question': row['q']", 1), ("GRPO", "'prompt': row['q']", 0), ("SFT", "'formatted': row['q']", 1),
    ("SFT", "'text': row['q']", 0), ("SFT", "'prompt': row['q'], 'response': row['a']", 1),
    ("SFT", "'prompt': row['q'], 'completion': row['a']", 0), ("DPO", "'chosen': row['a'], 'refused': row['b']", 1),
    ("DPO", "'chosen': row['a'], 'rejected': row['b']", 0), ("KTO", "'prompt': row['q'], 'chosen': '', 'rejected': ''", 0)])
def test_rows_have_the_columns_that_the_trainer_reads(kind: str, keys: str, lost: int, tmp_path: Path) -> None:
    before = f"rows = rows.map(lambda row: {{{keys}}}, remove_columns=rows.column_names)\n"
    assert len(said(trained(kind, before=before), tmp_path, "columns_unfit")) == lost


def test_a_collator_that_derives_pads_as_the_one_above(tmp_path: Path) -> None:
    own = ("class Own(DataCollatorForLanguageModeling):\n    def torch_call(self, examples):\n"
           "        batch = super().torch_call(examples)\n        return batch\n")
    text = trained("SFT", "", "data_collator=Own(tokenizer, mlm=False)", own)
    assert len(said(text, tmp_path, "collator_leaves_labels")) == 1
    popped = text.replace("        batch =", "        [each.pop('labels') for each in examples]\n        batch =")
    assert said(popped, tmp_path, "collator_leaves_labels") == []


def test_a_variable_or_a_text_is_not_known(tmp_path: Path) -> None:
    text = trained("", "max_steps=steps, warmup_steps=5", before="steps = int(os.environ.get('STEPS') or '0')\n")
    assert said(text, tmp_path, "warmup_beyond_run") == []
    assert len(said(text.replace("os.environ.get('STEPS') or '0'", "'1'"), tmp_path, "warmup_beyond_run")) == 1
