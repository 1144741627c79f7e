"""What present releases took out, where it stands in another file, under another name, or behind what looks like a switch."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF, TOKENIZER
from library_cases import LIBRARY_CASES, MADE, TIED, TRAINED
from test_projects import project
from trl_cases import FORMATTED, SFT, TAKEN

from powertrain.audit.audit import audit, read_subject
from powertrain.audit.rules import RULES
from powertrain.audit.subject import Circumstances
from powertrain.records import Software

BY_NAME = {rule.name: rule for rule in RULES}
TODAY = Circumstances(software=Software({"torch": "2.13.0", "transformers": "5.23.0", "trl": "1.16.0"}, {}))
TEMPLATED = HEAD + TOKENIZER + ("inputs = tokenizer.apply_chat_template(talk, return_tensors='pt')\n{use}\n"
                                + HF + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n")
PATCHED = "from unsloth import FastLanguageModel\n" + TEMPLATED
ORDERED = HEAD + HF + ARGUMENTS + (
    "class Own(Trainer):\n    def __init__(self, model, args, collator, rows, held_out, tokenizer, model_init,\n"
    "                 compute_metrics, callbacks, optimizers):\n"
    "        super().__init__(model, args, collator, rows, held_out,\n"
    "                         tokenizer, model_init, {order})\n"
    "Own(model, args, one, rows, rows, two, None, None, [], (None, None)).train()\n")
SAVING = HEAD + HF + ARGUMENTS + (
    "class Own(Trainer):\n    def _save(self, output_dir=None, state_dict=None):\n        if {test}:\n"
    "            self.tokenizer.save_pretrained(output_dir)\n"
    "Own(model, args, train_dataset=rows).train()\n")
HANDED_ON = HEAD + HF + ("from transformers import HfArgumentParser\ndef asked():\n"
                         "    return HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()\n"
                         "(training_args,) = asked()\nif training_args.{field}:\n    print('so')\n"
                         "Trainer(model, training_args, train_dataset=rows).train()\n")
PADDED = "collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)\nprint({said})\n" + HF + SFT.format(
    args="", more=", data_collator=collator")
CAST = HEAD + ("model = nn.Linear(2, 2)\noptimizer = torch.optim.AdamW(model.parameters())\nfor batch in loader:\n"
               "    with torch.autocast('cuda', dtype=torch.{dtype}):\n        loss = model(batch).mean()\n"
               "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n")
UNPATCHED = "from unsloth import FastLanguageModel\nimport trl\n" + HEAD + HF + TOKENIZER + ARGUMENTS


@pytest.mark.parametrize(("name", "text", "fires"), [
    ("chat_template_gives_a_dictionary", TEMPLATED.format(use="mask = inputs.ne(0)"), True),
    ("chat_template_gives_a_dictionary", PATCHED.format(use="mask = inputs.ne(0)\nprint(model.generate(inputs))"), True),
    ("chat_template_gives_a_dictionary", PATCHED.format(use="print(model.generate(inputs))"), False),
    ("chat_template_gives_a_dictionary", TEMPLATED.format(use="mask = inputs.attention_mask"), False),
    ("arguments_not_taken", ORDERED.format(order="compute_metrics, callbacks, optimizers"), True),
    ("arguments_not_taken", ORDERED.format(order="None, compute_metrics, callbacks, optimizers"), False),
    ("attributes_missing", SAVING.format(test="self.tokenizer is not None"), True),
    ("attributes_missing", SAVING.format(test="self.is_fsdp_enabled"), False),
    ("attributes_missing", HANDED_ON.format(field="overwrite_output_dir"), True),
    ("attributes_missing", HANDED_ON.format(field="do_train"), False),
    ("attributes_missing", HANDED_ON.format(field="overwrite_output_dir").replace("training_args", "args"), False),
    ("collator_leaves_labels", HEAD + PADDED.format(said="boft_block_size"), True),
    ("collator_leaves_labels", HEAD + PADDED.format(said="block_size"), False),
    ("data_with_script", HEAD + TAKEN.format(name="rows.py", split="train"), True),
    ("data_with_script", HEAD + TAKEN.format(name="rows", split="train"), False),
    ("fp16_without_scaler", CAST.format(dtype="float16"), True),
    ("fp16_without_scaler", CAST.format(dtype="float32"), False),
    ("removed_names", UNPATCHED + "Trainer(model, args, train_dataset=rows, tokenizer=tokenizer).train()\n", True),
    ("removed_names", UNPATCHED + "trl.SFTTrainer(model, args, train_dataset=rows, tokenizer=tokenizer).train()\n", False),
    ("model_never_finished", MADE.format(last="pass", made="Own.from_pretrained('bert-base-uncased')"), True),
    ("model_never_finished", MADE.format(last="pass", made="Own(config)"), False),
    ("model_never_finished", MADE.format(last="self.init_weights()", made="other"), False),
    ("model_never_finished", MADE.format(last="if config.fresh: self.init_weights()", made="Own(config)"), False),
    ("model_never_finished", MADE.format(last="self.init_weights()\n    def init_weights(self):\n        pass",
                                         made="Own(config)"), False),
    ("tied_weights_undeclared", TIED.format(more="pass", use="model.save_pretrained('out')"), True),
    ("tied_weights_undeclared", TIED.format(more="pass", use="torch.save(model.state_dict(), 'out.pt')"), False),
    ("tied_weights_undeclared", TIED.format(more="pass", use=TRAINED.replace("'out'", "'out', save_strategy='no'")), False),
])
def test_what_a_release_took_out_is_found_there_and_in_no_near_miss(name: str, text: str, fires: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    assert bool([*BY_NAME[name].find(read_subject(path), TODAY)]) is fires


def test_a_class_that_auto_model_is_told_of_is_what_it_loads(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    told = ("from transformers import AutoModel, AutoConfig\nAutoConfig.register('own', Config)\n"
            "AutoModel.register(Config, Own)\n")
    for last, fires in (("pass", True), ("self.post_init()", False)):
        path.write_text(MADE.format(last=last, made="AutoModel.from_pretrained('saved')").replace("model =", told + "model ="))
        assert bool([*BY_NAME["model_never_finished"].find(read_subject(path), TODAY)]) is fires


def test_a_formatting_function_may_be_imported_under_another_name(tmp_path: Path) -> None:
    path = project(tmp_path, rows=FORMATTED.format(given="texts"), train=HEAD + "from rows import told as tell\n" + HF
                   + SFT.format(args="", more=", formatting_func=tell"))
    assert [*BY_NAME["formatting_gives_many"].find(read_subject(path), TODAY)]


SHARDED = HEAD + HF + ARGUMENTS.replace("args =", "training_args =") + (
    "{asks}:\n    print('FSDP')\nTrainer(model, training_args, train_dataset=rows).train()\n")


@pytest.mark.parametrize(("asks", "when"), [
    ("if len(training_args.fsdp) > 0", [""]), ("if training_args.fsdp", []),
    ("if training_args.fsdp is not None and len(training_args.fsdp) > 0", []),
    ("if model.quantised:\n    if len(training_args.fsdp) > 0:\n        print(1)\nif model.quantised",
     ["model.quantised holds"])])
def test_fsdp_of_the_arguments_has_no_length(asks: str, when: list[str], tmp_path: Path) -> None:
    path = project(tmp_path, train=SHARDED.format(asks=asks))
    assert [each.when for each in BY_NAME["fields_changed"].find(read_subject(path), TODAY)] == when


def test_a_launcher_that_gives_the_rank_as_an_option_fills_it(tmp_path: Path) -> None:
    text = LIBRARY_CASES["fields_changed"][0]
    for command, said in (("torchrun", 1), ("deepspeed", 0)):
        path = project(tmp_path, train=text)
        (tmp_path / "run.sh").write_text(f"{command} train.py\n")
        assert len([*BY_NAME["fields_changed"].find(read_subject(path), TODAY)]) == said


IN_FUNCTIONS = HEAD + "def fit(model):\n    " + ARGUMENTS + "    Trainer(model, args, train_dataset=rows).train()\n"
STARTING = "from training import fit\nfrom model import load\nfit(load())\n"
LOADING = ("from transformers import AutoModelForCausalLM\ndef load():\n"
           "    return AutoModelForCausalLM.from_pretrained('gpt2', use_auth_token='me')\n")


def rules_of(folder: Path, **files: str) -> dict[str, str]:
    project(folder, **files)
    return {finding.rule: finding.when for finding in audit(folder / "training.py", TODAY).findings}


def test_a_script_that_starts_nothing_is_read_with_the_one_that_uses_it(tmp_path: Path) -> None:
    found = rules_of(tmp_path, training=IN_FUNCTIONS, model=LOADING, main=STARTING)
    assert found["removed_call_arguments"] == "used by main.py"


@pytest.mark.parametrize(("other", "started", "user"), [
    ("other.py", "", ""), ("other.py", "python main.py\n", "main.py"), ("other.py", "python main.py\npython other.py\n", ""),
    ("train_it.py", "python train_it.py\npython main.py\n", "train_it.py"),
    ("train_it.py", "python main.py\n", "main.py"), ("other/it.py", "", "main.py")])
def test_of_several_users_it_is_the_one_that_is_started(other: str, started: str, user: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(started)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "training.py").write_text("def fit(model):\n    pass\n")
    (tmp_path / other).write_text(STARTING)
    found = rules_of(tmp_path, training=IN_FUNCTIONS, model=LOADING, main=STARTING)
    assert found.get("removed_call_arguments", "") == (f"used by {user}" if user else "")


ASKED = "import torch\nused = {value}\n" + HEAD + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n"


@pytest.mark.parametrize(("value", "fires"), [
    ("torch.cuda.memory_utilization()", True),
    ("torch.cuda.memory_utilization() if hasattr(torch.cuda, 'memory_utilization') else 0", False),
    ("torch.cuda.memory_utilization() if hasattr(torch.cuda, 'utilization') else 0", True)])
def test_who_asks_for_a_name_first_does_not_fail_for_it(value: str, fires: bool, tmp_path: Path) -> None:
    found = BY_NAME["removed_imports"].find(read_subject(project(tmp_path, train=ASKED.format(value=value))), TODAY)
    assert bool([*found]) == fires


@pytest.mark.parametrize("files", [
    {"training": IN_FUNCTIONS, "model": LOADING, "main": STARTING, "other": STARTING},      # which of the two?
    {"training": IN_FUNCTIONS + "fit(None)\n", "model": LOADING, "main": STARTING},
    {"training": IN_FUNCTIONS, "model": LOADING, "test_main": STARTING},
    {"training": IN_FUNCTIONS, "model": LOADING, "main": STARTING.replace("training", "other")},
])
def test_a_script_that_starts_itself_or_is_used_by_several_is_read_alone(files: dict[str, str], tmp_path: Path) -> None:
    assert "removed_call_arguments" not in rules_of(tmp_path, **files)


def test_a_trainer_may_end_in_another_word(tmp_path: Path) -> None:
    own = "from transformers import AdamW, Seq2SeqTrainer\nclass TrainerForChat(Seq2SeqTrainer):\n    pass\n"
    using = "from own import {name}\ndef main():\n    trainer = {name}(model)\n    trainer.train()\nmain()\n"
    assert "removed_imports" in rules_of(tmp_path, own=own, training=using.format(name="TrainerForChat"))
    callback = own.replace("TrainerForChat(Seq2SeqTrainer)", "TrainerCallback(object)")
    assert "removed_imports" not in rules_of(tmp_path, own=callback, training=using.format(name="TrainerCallback"))
