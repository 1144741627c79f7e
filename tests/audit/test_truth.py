"""Findings rest on code that training runs, and on nothing else: each case beside the near miss that differs in that only."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from powertrain.audit.audit import audit, read_subject
from powertrain.audit.convert import convert
from powertrain.audit.edits import make_patch
from powertrain.audit.subject import Circumstances
from powertrain.records import Software, UserError
from powertrain.records.findings import Finding

TODAY = Circumstances(software=Software({"torch": "2.13.0", "transformers": "5.23.0", "trl": "1.16.0"}, {}))
IMPORTS = """import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DataCollatorForLanguageModeling, Trainer,
                          TrainingArguments)
"""
MODEL = "model = AutoModelForCausalLM.from_pretrained('some/model')\n"
TRAINED = """tokenizer = AutoTokenizer.from_pretrained(NAME)
PAD
rows = load_dataset('a/b', split='train').map(lambda row: tokenizer(row['text'] + tokenizer.eos_token))
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(model=model, args=TrainingArguments('out'), train_dataset=rows, data_collator=collator).train()
"""
GUARD = "if tokenizer.pad_token is None:\n    tokenizer.pad_token = tokenizer.eos_token"
STEP = """optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for batch in loader:
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ACCELERATED = """import torch
from accelerate import Accelerator
from transformers import get_cosine_schedule_with_warmup
accelerator = Accelerator()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
LENGTH
scheduler = get_cosine_schedule_with_warmup(optimizer, 10, args.steps)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
"""


ACCUMULATED = ACCELERATED.replace("Accelerator()", "Accelerator(gradient_accumulation_steps=4)").replace("LENGTH\n", "")
WITHIN = "    with accelerator.accumulate(model):\n"


def found(text: str, folder: Path, where: Circumstances = TODAY) -> dict[str, Finding]:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return {finding.rule: finding for finding in audit(path, where).findings}


def severity(rule: str, text: str, folder: Path) -> str | None:
    finding = found(text, folder).get(rule)
    return finding.severity if finding is not None else None


def padded(name: str, pad: str) -> str:
    return IMPORTS + MODEL + TRAINED.replace("NAME", repr(name)).replace("PAD", pad)


# ------------------------------------------------------------------------------------------------ what is evidence


@pytest.mark.parametrize(("stands", "is_found"), [
    ("def save():\n    torch.load('old.pt', weights_only=False)\n", False),
    ("torch.load('old.pt', weights_only=False)\n", True),
    ('"""torch.load(\'old.pt\', weights_only=False)"""\n', False),
    ("# torch.load('old.pt', weights_only=False)\n", False)])
def test_a_helper_that_training_does_not_call_a_docstring_and_a_comment_are_no_evidence(
        stands: str, is_found: bool, tmp_path: Path) -> None:
    assert ("pickle_loaded" in found("import torch\nmodel = torch.nn.Linear(8, 8)\n" + stands + STEP, tmp_path)) is is_found


def test_a_word_in_a_docstring_excuses_nothing(tmp_path: Path) -> None:
    text = "import torch\nmodel = torch.nn.Linear(8, 8)\n" + STEP.replace("    optimizer.zero_grad()\n", "")
    assert severity("gradients_not_zeroed", '"""It calls zero_grad."""\n' + text, tmp_path) == "critical"
    assert severity("gradients_not_zeroed", text + "    model.zero_grad()\n", tmp_path) is None


def test_a_setting_of_a_helper_that_training_does_not_call_is_none_of_the_run(tmp_path: Path) -> None:
    helper = "def answer():\n    return AutoModelForCausalLM.from_pretrained('x', attn_implementation='eager')\n"
    text = IMPORTS + MODEL + helper + "Trainer(model=model, args=TrainingArguments('out'), train_dataset=rows).train()\n"
    assert "attention_eager" not in found(text, tmp_path)
    assert "attention_eager" in found(text.replace(MODEL, "").replace("model=model", "model=answer()"), tmp_path)


def test_of_two_models_that_are_loaded_the_trained_one_counts(tmp_path: Path) -> None:
    text = (IMPORTS + MODEL + "teacher = AutoModelForCausalLM.from_pretrained('y', attn_implementation='eager')\n"
            "Trainer(model=MODEL, args=TrainingArguments('out'), train_dataset=rows).train()\n")
    assert "attention_eager" not in found(text.replace("=MODEL", "=model"), tmp_path)
    assert "attention_eager" in found(text.replace("=MODEL", "=teacher"), tmp_path)


# ------------------------------------------------------------------------------------------------ conditions


@pytest.mark.parametrize(("name", "pad", "expected"), [
    ("some/model", "tokenizer.pad_token = tokenizer.eos_token", "critical"),
    ("gpt2", GUARD, "critical"),                         # its tokenizer is known to have no padding token
    ("some/model", GUARD, None)])
def test_a_guard_around_the_padding_token_is_seen(name: str, pad: str, expected: str | None, tmp_path: Path) -> None:
    assert severity("pad_is_end", padded(name, pad), tmp_path) == expected


def test_an_end_that_the_examples_do_not_show_is_not_proved_to_be_hidden(tmp_path: Path) -> None:
    text = padded("some/model", "tokenizer.pad_token = tokenizer.eos_token")
    assert severity("pad_is_end", text.replace(" + tokenizer.eos_token", ""), tmp_path) == "low"


def test_a_run_that_refuses_its_defaults_is_read_behind_the_refusal(tmp_path: Path) -> None:
    text = (IMPORTS + "import argparse\nparser = argparse.ArgumentParser()\n"
            "parser.add_argument('--mixed', action='store_true')\nargs = parser.parse_args()\n"
            "if not args.mixed:\n    raise ValueError('use --mixed')\n" + MODEL
            + "Trainer(model=model, args=TrainingArguments('out', warmup_ratio=0.1), train_dataset=rows).train()\n")
    assert severity("removed_names", text, tmp_path) == "critical"


def test_what_stands_under_a_condition_is_undetermined(tmp_path: Path) -> None:
    text = IMPORTS + MODEL + "COMPILE\nTrainer(model=model, args=TrainingArguments('out'), train_dataset=rows).train()\n"
    certain = read(text.replace("COMPILE", "model = torch.compile(model)"), tmp_path)
    maybe = read(text.replace("COMPILE", "if torch.cuda.is_available():\n    model = torch.compile(model)"), tmp_path)
    assert certain.value("training.torch_compile") is True
    assert maybe.value("training.torch_compile") is None
    assert "only if torch.cuda.is_available()" in maybe.unread["training.torch_compile"].spelled


def read(text: str, folder: Path):  # type: ignore[no-untyped-def]
    (folder / "train.py").write_text(text, encoding="utf-8")
    return read_subject(folder / "train.py")


def test_a_model_compiled_after_its_trainer_was_made_is_no_error(tmp_path: Path) -> None:
    lines = ["config = BitsAndBytesConfig(load_in_4bit=True)\n",
             "model = AutoModelForCausalLM.from_pretrained('x', quantization_config=config)\n",
             "model = get_peft_model(model, LoraConfig(r=8))\n",
             "trainer = Trainer(model=model, args=TrainingArguments('out'), train_dataset=rows)\n",
             "model = torch.compile(model)\n"]
    assert severity("compile_quantised", IMPORTS + "".join(lines) + "trainer.train()\n", tmp_path) != "critical"


# ------------------------------------------------------------------------------------------------ names of others


OWN = """from dataclasses import dataclass
from transformers import AutoModelForCausalLM, HfArgumentParser
BASE
@dataclass
class TrainingArguments(PARENT):
    evaluation_strategy: str = 'epoch'
    load_best_model_at_end: bool = True
args, = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
"""


def test_an_own_dataclass_named_like_a_trainer_s_arguments_is_not_theirs(tmp_path: Path) -> None:
    own = OWN.replace("(PARENT)", "").replace("BASE", "")
    theirs = OWN.replace("PARENT", "transformers.TrainingArguments").replace("BASE", "import transformers")
    assert not read(own, tmp_path).settings
    assert read(theirs, tmp_path).value("training.load_best_model_at_end") is True
    assert "removed_names" not in found(theirs, tmp_path), "a field of an own subclass is no argument that transformers refuses"


def test_a_config_of_the_script_s_own_package_is_no_config_of_trl(tmp_path: Path) -> None:
    text = "from PACKAGE import SFTConfig, SFTTrainer\nSFTTrainer(model, args=SFTConfig('out', warmup_ratio=0.1)).train()\n"
    assert "removed_names" not in found(text.replace("PACKAGE", "mine.training"), tmp_path)
    assert "removed_names" in found(text.replace("PACKAGE", "trl"), tmp_path)


def test_a_value_of_another_package_is_not_known(tmp_path: Path) -> None:
    text = ("from settings import Config\nfrom transformers import Trainer, TrainingArguments\n"
            "args = TrainingArguments('out', eval_strategy=Config.strategy, load_best_model_at_end=True)\n")
    assert "best_checkpoint_intervals" not in found(text, tmp_path)
    assert "best_checkpoint_intervals" in found(text.replace("Config.strategy", "'epoch'"), tmp_path)


@pytest.mark.parametrize(("rank", "how"), [("lora_r:", "full"), ("lora_r: 16\nuse_peft: true", "lora")])
def test_an_empty_rank_makes_no_adapters(rank: str, how: str, tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(f"model_name_or_path: some/model\nper_device_train_batch_size: 4\nnum_train_epochs: 1\n{rank}\n"
                    "dataset_name: a/b\nlr_scheduler_type: cosine\n", encoding="utf-8")
    assert read_subject(path).method == how


# ------------------------------------------------------------------------------------------------ loops


@pytest.mark.parametrize(("length", "expected"), [
    ("args.steps = 3 * len(loader)", None),              # before prepare: the batches of all processes
    ("args.steps = 1000", "moderate"), ("args.steps = 1000 * accelerator.num_processes", None)])
def test_a_schedule_that_counts_processes_is_right(length: str, expected: str | None, tmp_path: Path) -> None:
    assert severity("scheduler_each_process", ACCELERATED.replace("LENGTH", length), tmp_path) == expected


MICRO = """import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler('cuda')
for step in range(1000):
    for micro in range(4):
        INSIDE
        with torch.autocast('cuda', dtype=torch.float16):
            loss = model(next(batches)) / 4
        scaler.scale(loss).backward()
    BEFORE
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def test_a_step_of_a_loop_over_micro_batches_is_read_as_one_step(tmp_path: Path) -> None:
    right = MICRO.replace("BEFORE", "scaler.unscale_(optimizer)")
    assert not {"gradients_cleared_early", "clip_before_unscale"} & set(found(right.replace("INSIDE", "pass"), tmp_path))
    assert severity("gradients_cleared_early", right.replace("INSIDE", "optimizer.zero_grad()"), tmp_path) == "critical"
    assert severity("clip_before_unscale", MICRO.replace("INSIDE", "pass").replace("BEFORE", "pass"), tmp_path) == "critical"


def test_fp16_of_an_evaluation_asks_for_no_scaler(tmp_path: Path) -> None:
    text = ("import torch\nmodel = torch.nn.Linear(8, 8)\ndef evaluate():\n    for batch in held_out:\n"
            "        with torch.no_grad(), torch.autocast('cuda', dtype=torch.float16):\n            model(batch)\n" + STEP)
    assert "fp16_without_scaler" not in found(text + "    evaluate()\n", tmp_path)
    inside = STEP.replace("    loss = model(batch)\n",
                          "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = model(batch)\n")
    assert severity("fp16_without_scaler", text.replace(STEP, inside), tmp_path) == "critical"


# ------------------------------------------------------------------------------------------------ odd files and patches


def test_a_notebook_s_magics_do_nothing_and_lines_stay(tmp_path: Path) -> None:
    text = ("!pip install trl\n%matplotlib inline\nif True:\n    !nvidia-smi\nfrom trl import SFTConfig\n"
            "SFTConfig('out', warmup_ratio=0.1)\n")
    finding = found(text, tmp_path)["removed_names"]
    assert str(finding.evidence[0].place).endswith("train.py:6")
    assert "!pip install trl" in next(iter(make_patch([finding]).after.values()))


def test_a_patch_after_which_the_script_is_no_better_is_not_offered(tmp_path: Path) -> None:
    text = "import torch\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4MORE)\n"
    assert found(text.replace("MORE", ""), tmp_path)["optimizer_not_fused"].cure.edits
    offered = found(text.replace("MORE", ", **fast"), tmp_path).get("optimizer_not_fused")
    assert offered is None or not offered.cure.edits, "fused may be in it already"


@pytest.mark.parametrize("cut", range(0, 700, 61))
def test_no_cut_of_a_script_ends_in_a_traceback(cut: int, tmp_path: Path) -> None:
    text = padded("gpt2", GUARD)
    for odd in (text[:cut], text[cut:], text[:cut] + "\0" + text[cut:], text[:cut] + "lambda *a, **b: (yield)" + text[cut:]):
        with suppress(UserError):
            found(odd, tmp_path)


# ------------------------------------------------------------------------------------------------ accelerate's accumulation


def loop_of(*lines: str) -> str:
    """The accelerated script with these lines as its loop."""
    return ACCUMULATED.partition("for batch")[0] + "for i, batch in enumerate(loader):\n" + "".join(
        f"    {line}\n" for line in ("loss = model(batch).mean()", *lines))


STEPPED = ("optimizer.step()", "scheduler.step()", "optimizer.zero_grad()")


@pytest.mark.parametrize(("text", "fires"), [
    (ACCUMULATED, True), (ACCUMULATED.replace("steps=4", "steps=1"), False),
    (ACCUMULATED.replace("steps=4", "steps=args.n"), False),
    (loop_of("accelerator.backward(loss)", "if accelerator.sync_gradients:", *(f"    {line}" for line in STEPPED)), True),
    (loop_of("accelerator.backward(loss)", "if (i + 1) % 4 == 0:", *(f"    {line}" for line in STEPPED)), False),
    (loop_of("accelerator.backward(loss)", "if ready(i):", *(f"    {line}" for line in STEPPED)), False),
    (loop_of("for part in range(4):", "    accelerator.backward(loss)", *STEPPED), False),
    (ACCUMULATED.replace("for batch", "held = stack.enter_context(accelerator.accumulate(model))\nfor batch"), False),
    (ACCUMULATED.replace("steps=4", "steps=4, deepspeed_plugin=DeepSpeedPlugin()"), False)])
def test_accelerate_accumulates_only_within_accumulate(text: str, fires: bool, tmp_path: Path) -> None:
    finding = found(text, tmp_path).get("accumulation_never_begun")
    assert (finding is not None) == fires
    assert finding is None or (finding.severity, "divides each loss by 4" in finding.why) == ("moderate", True)
    assert "accumulation_not_divided" not in found(text, tmp_path), "accelerator.backward divides by itself"


def test_a_batch_that_is_never_accumulated_is_not_multiplied(tmp_path: Path) -> None:
    loader = "loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)\noptimizer ="
    whole, path = ACCUMULATED.replace("optimizer =", loader, 1), tmp_path / "train.py"
    patch, batches = make_patch([found(whole, tmp_path)["accumulation_never_begun"]]), {}
    for text in (whole, patch.after[str(path)]):
        path.write_text(text, encoding="utf-8")
        subject = read_subject(path)
        batches[WITHIN in text] = subject.examples_per_step, convert(subject).values["train_batch_size"]
        why = {account.key: account.why for account in convert(subject).accounts}
        assert ("no `with accelerator.accumulate" in why["accelerate.gradient_accumulation_steps"]) == (WITHIN not in text)
    assert batches == {False: (8, 8), True: (32, 32)}
    assert "8 examples in place of 32" in found(whole, tmp_path)["accumulation_never_begun"].why
    assert "accumulation_never_begun" not in found(text, tmp_path)
