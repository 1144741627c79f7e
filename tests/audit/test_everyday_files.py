"""Scripts and configs as people have them: what they are told, and what they are not told because it is not so."""

from __future__ import annotations

from pathlib import Path

import pytest

from powertrain.audit.audit import audit, read_subject
from powertrain.audit.configs import read_config
from powertrain.audit.conversion import Accounted
from powertrain.audit.convert import convert
from powertrain.audit.edits import make_patch
from powertrain.audit.parsing import LARGEST_BYTES
from powertrain.audit.rules import RULES
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records import WrongUse
from powertrain.records.findings import Finding

EVERYDAY = Path(__file__).parent / "everyday"
BY_NAME = {rule.name: rule for rule in RULES}
EXPECTED: dict[str, dict[str, str]] = {
    "trainer.py": {"device_map_auto": "low", "device_map_in_processes": "critical",
                   "pad_is_end": "critical", "half_weights_trained": "moderate",
                   "padding_to_max_length": "moderate", "prompts_trained": "moderate", "removed_names": "moderate"},
    "qlora_sft.py": {"removed_names": "moderate", "device_map_in_processes": "critical",
                     "adapters_with_spilled_optimizer": "low", "double_quantisation_off": "low",
                     "lora_dropout_cost": "low", "lora_on_attention_only": "low", "lora_scaling": "low",
                     "remote_code_unpinned": "low", "warmup_without_effect": "moderate"},
    "accelerate_loop.py": {"checkpoint_cannot_resume": "moderate", "documents_concatenated": "low", "owner_missing": "moderate",
                           "optimizer_not_fused": "low"},
    "nano_train.py": {"modules_missing": "critical", "compiled_names_saved": "low",
                      "logging_each_step": "low", "pickle_loaded": "low"},
    "plain_loop.py": {"checkpoint_cannot_resume": "moderate", "item_each_step": "low", "padding_to_max_length": "moderate",
                      "loop_in_fp32": "moderate",
                      "padding_trained": "critical", "optimizer_not_fused": "low", "tokenised_each_epoch": "low"},
    "axolotl.yml": {"adapters_with_spilled_optimizer": "low", "logging_each_step": "low", "lora_dropout_cost": "low"},
    "llama_factory.yaml": {"remote_code_unpinned": "low", "micro_batch_small": "low", "workers_start_each_epoch": "low"},
    "ds_z3.json": {},
}


def found_in(text: str, rule: str, folder: Path) -> list[Finding]:
    return list(BY_NAME[rule].find(subject(text, folder), Circumstances()))


def subject(text: str, folder: Path, name: str = "train.py") -> Subject:
    (folder / name).write_text(text, encoding="utf-8")
    return read_subject(folder / name)


def everyday(name: str) -> str:
    return (EVERYDAY / name).read_text(encoding="utf-8")


def accounted(of: Subject) -> dict[str, Accounted]:
    return {account.key: account for account in reversed(convert(of).accounts)}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_as_people_have_it_gives_the_findings_that_one_expects(name: str) -> None:
    found = audit(EVERYDAY / name).findings
    assert {finding.rule: finding.severity for finding in found if finding.severity != "good"} == EXPECTED[name]
    first = [finding.evidence[0] for finding in found if finding.severity in ("critical", "moderate")]
    assert len(first) == len(set(first)), "one cause is named twice"


def test_every_file_is_a_case() -> None:
    assert set(EXPECTED) == {path.name for path in EVERYDAY.iterdir() if path.is_file()}


# ------------------------------------------------------------------------------------------------ what is read


def test_a_function_that_only_map_calls_sees_the_names_around_it() -> None:
    assert read_subject(EVERYDAY / "trainer.py").value("training.max_length") == 512


def test_getattr_of_a_module_is_its_name() -> None:
    assert read_subject(EVERYDAY / "qlora_sft.py").value("quantisation.bnb_4bit_compute_dtype") == "float16"


def test_a_pad_token_taken_from_another_special_token_is_known() -> None:
    assert read_subject(EVERYDAY / "qlora_sft.py").value("tokenizer.pad_token") == "unk_token"


def test_code_that_is_executed_from_a_text_is_said_to_change_values() -> None:
    assert any("exec(open('configurator.py').read())" in line for line in audit(EVERYDAY / "nano_train.py").undetermined)


@pytest.mark.parametrize(("loop", "epochs"), [
    ("for epoch in range(EPOCHS):", 5), ("for epoch in tqdm(range(1, EPOCHS + 1)):", 5), ("while True:", None),
    ("for epoch in epochs:", None)])
def test_the_epochs_of_a_loop_are_read(loop: str, epochs: int | None, tmp_path: Path) -> None:
    text = everyday("plain_loop.py").replace("for epoch in range(EPOCHS):", loop)
    assert subject(text, tmp_path).value("training.num_train_epochs") == epochs


def test_a_loop_over_steps_is_not_taken_for_epochs(tmp_path: Path) -> None:
    text = "import torch\nfor step in range(1000):\n    for micro in range(4):\n        model(batch()).backward()\n"
    assert subject(text, tmp_path).value("training.num_train_epochs") is None


TRAINED, STEPPED = "model(batch()).backward()\n", "optimizer.step()\n"


@pytest.mark.parametrize(("loop", "steps"), [
    (f"for step in range(STEPS):\n    {TRAINED}    {STEPPED}", 1000),
    (f"for step in range(STEPS):\n    for micro in range(4):\n        {TRAINED}    {STEPPED}", 1000),
    (f"for step in range(STEPS):\n    {TRAINED}    if step % 4 == 0:\n        {STEPPED}", None),
    (f"for epoch in range(3):\n    for step in range(STEPS):\n        {TRAINED}        {STEPPED}", None),
    (f"for epoch in range(STEPS):\n    for batch in loader:\n        {TRAINED}        {STEPPED}", None),
    (f"for step in range(STEPS):\n    {TRAINED}    if step % 4:\n        continue\n    {STEPPED}", None)])
def test_the_steps_of_a_loop_that_draws_its_batches_are_read(loop: str, steps: int | None, tmp_path: Path) -> None:
    text = f"import torch\nSTEPS = 1000\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n{loop}"
    assert subject(text, tmp_path).value("training.max_steps") == steps


COUNT, EITHER = "step += 1\n", "if step >= STEPS:\n        break\n"
PASSES = f"{TRAINED}        {STEPPED}"


@pytest.mark.parametrize(("loop", "steps"), [
    (f"while step < STEPS:\n    {TRAINED}    {STEPPED}    {COUNT}", 1000),
    (f"while STEPS > step and not done:\n    {TRAINED}    {STEPPED}    {COUNT}", 1000),
    (f"while step <= STEPS:\n    {TRAINED}    {STEPPED}    {COUNT}", 1001),
    (f"while step != STEPS:\n    {TRAINED}    {STEPPED}    {COUNT}", 1000),
    (f"while True:\n    {TRAINED}    {STEPPED}    {COUNT}    if step > STEPS:\n        break\n", 1001),
    (f"while True:\n    {TRAINED}    {STEPPED}    {COUNT}    if STEPS <= step or done:\n        break\n", 1000),
    (f"while True:\n    {EITHER}    {TRAINED}    {STEPPED}    {COUNT}", 1000),
    (f"while True:\n    {TRAINED}    {STEPPED}    {EITHER}    {COUNT}", 1001),
    (f"while True:\n    {COUNT}    {EITHER}    {TRAINED}    {STEPPED}", 999),
    (f"step = 400\nwhile step < STEPS:\n    {TRAINED}    {STEPPED}    {COUNT}", 600),
    (f"while step < STEPS:\n    for micro in range(4):\n        {TRAINED}    {STEPPED}    {COUNT}", 1000),
    (f"while step < STEPS:\n    for batch in loader:\n        {PASSES}        {COUNT}        if step == STEPS:\n"
     "            break\n", 1000),
    (f"while True:\n    for batch in loader:\n        {PASSES}        {COUNT}        if step == STEPS:\n"
     "            return\n", 1000)])
def test_the_steps_until_a_counter_ends_its_loop_are_read(loop: str, steps: int, tmp_path: Path) -> None:
    text = f"import torch\nSTEPS = 1000\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\nstep = 0\n{loop}"
    if "return" in loop:
        text = text.replace("step = 0\n", "def train():\n  step = 0\n  ") + "train()\n"
        text = text.replace("\n    ", "\n      ")
    assert subject(text, tmp_path).value("training.max_steps") == steps


def test_a_loop_that_its_data_may_end_or_that_begins_at_several_steps_has_no_number_of_steps(tmp_path: Path) -> None:
    text = ("import torch\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\ndef train(step):\n    LOOP\n"
            f"        for batch in loader:\n            {TRAINED}            {STEPPED}            step += 1\n"
            "            if step >= 1000:\n                return\ntrain(0)\n")
    again = text + "train(400)\n"
    assert subject(text.replace("LOOP", "while True:"), tmp_path).value("training.max_steps") == 1000
    assert subject(text.replace("LOOP", "for epoch in range(9):"), tmp_path).value("training.max_steps") is None
    assert "training.max_steps" in subject(again.replace("LOOP", "while True:"), tmp_path).unread


@pytest.mark.parametrize("loop", [
    f"while step < STEPS:\n    {TRAINED}    if step % 4 == 0:\n        {STEPPED}    {COUNT}",
    f"while step < STEPS:\n    {TRAINED}    if step % 4:\n        step += 1\n        continue\n    {STEPPED}    {COUNT}",
    f"while step < STEPS:\n    {TRAINED}    {STEPPED}    if good:\n        {COUNT}",
    f"while step < STEPS:\n    {TRAINED}    {STEPPED}    step += 2\n",
    f"while step < STEPS:\n    {TRAINED}    {STEPPED}    {COUNT}    if bad:\n        step = 0\n",
    f"while step < STEPS:\n    for batch in loader:\n        {PASSES}    {COUNT}",
    f"while step < STEPS:\n    for batch in loader:\n        {PASSES}        {COUNT}",
    f"for epoch in range(9):\n    for batch in loader:\n        {PASSES}        {COUNT}        if step >= STEPS:\n"
    "            break\n",
    f"while True:\n    for batch in loader:\n        {PASSES}        {COUNT}        if step >= STEPS:\n            break\n",
    f"while loss > 1.0:\n    {TRAINED}    {STEPPED}    {COUNT}"])
def test_a_loop_that_something_else_ends_has_no_number_of_steps(loop: str, tmp_path: Path) -> None:
    text = f"import torch\nSTEPS = 1000\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\nstep = 0\n{loop}"
    found = subject(text, tmp_path)
    assert found.value("training.max_steps") is None
    assert "training.max_steps" not in found.unread


@pytest.mark.parametrize("change", [
    ("STEPS = 1000", "STEPS = int(os.environ['STEPS'])"), ("step = 0", "step = torch.load('last.pt')['step']"),
    ("step < STEPS:", "step < STEPS:\n    STEPS = STEPS - 1")])
def test_a_limit_that_only_running_it_would_tell_is_unread(change: tuple[str, str], tmp_path: Path) -> None:
    text = ("import os\nimport torch\nSTEPS = 1000\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\nstep = 0\n"
            f"while step < STEPS:\n    {TRAINED}    {STEPPED}    {COUNT}")
    assert "training.max_steps" in subject(text.replace(*change), tmp_path).unread


def test_nanogpt_s_loop_takes_one_step_more_than_its_name_says() -> None:
    found = read_subject(EVERYDAY / "nano_train.py")
    assert found.value("training.max_steps") == 600_001
    assert found.settings["training.max_steps"].spelled == "iter_num > max_iters (is 600001)"


LOGGED = "loss = model(batch()).mean()\n    loss.backward()\n    optimizer.step()\n    "


@pytest.mark.parametrize(("reading", "steps"), [
    ("if step % EVERY == 0:\n        print(loss.item())\n", 50),
    ("if (step + 1) % EVERY == 0 and is_main:\n        print(float(loss))\n", 50),
    ("if is_main:\n        if step % EVERY == 0:\n            print(loss.item())\n", 50),
    ("if step % EVERY == 0:\n        print(step)\n", None),
    ("if step % EVERY == 0:\n        loss = evaluate(model)\n        print(loss.item())\n", None),
    ("if step % EVERY == 0:\n        print(accuracy.item())\n", None),
    ("if step % EVERY == 0:\n        pass\n    else:\n        print(loss.item())\n", None),
    ("if epoch % EVERY == 0:\n        print(loss.item())\n", None),
    ("if step % EVERY == 0 and step % 7 == 0:\n        print(loss.item())\n", None),
    ("if step % every() == 0:\n        print(loss.item())\n", None),
    ("for again in range(2):\n        if step % EVERY == 0:\n            print(loss.item())\n", None)])
def test_how_often_a_loop_reads_its_loss_is_known_where_it_is_certain(reading: str, steps: int | None, tmp_path: Path) -> None:
    text = ("import torch\nEVERY = 50\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
            f"for step, batch in enumerate(loader):\n    {LOGGED}{reading}")
    assert subject(text, tmp_path).value("training.logging_steps") == steps


def test_a_loss_read_every_few_micro_batches_is_no_interval_of_steps(tmp_path: Path) -> None:
    text = ("import torch\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\nfor i, batch in enumerate(loader):\n"
            "    loss = model(batch).mean()\n    loss.backward()\n    if i % 4 == 0:\n        optimizer.step()\n"
            "    if i % 8 == 0:\n        print(loss.item())\n")
    assert subject(text, tmp_path).value("training.logging_steps") is None
    accelerated = ("import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
                   "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\nfor i, batch in enumerate(loader):\n"
                   "    with accelerator.accumulate(model):\n        loss = model(batch).mean()\n"
                   "        accelerator.backward(loss)\n        optimizer.step()\n    if i % 8 == 0:\n"
                   "        print(loss.item())\n")
    assert subject(accelerated, tmp_path).value("training.logging_steps") is None


def test_a_loss_read_at_every_step_is_found_once_however_it_is_read(tmp_path: Path) -> None:
    text = ("import torch\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\nfor i, batch in enumerate(loader):\n"
            f"    {LOGGED}total += loss.item()\n    if i % 1 == 0:\n        print(loss.item())\n")
    (tmp_path / "train.py").write_text(text)
    assert {"item_each_step", "logging_each_step"} & {finding.rule for finding in audit(tmp_path / "train.py").findings} == {
        "item_each_step"}


def test_a_trainer_s_epochs_are_its_own(tmp_path: Path) -> None:
    text = everyday("trainer.py") + "\nfor trial in range(7):\n    for batch in loader:\n        model(batch).backward()\n"
    assert subject(text, tmp_path).value("training.num_train_epochs") == 3


# ------------------------------------------------------------------------------------------------ what is converted


def test_the_held_out_share_and_the_epochs_of_a_script_go_into_the_recipe() -> None:
    trainer, plain = (convert(read_subject(EVERYDAY / name)) for name in ("trainer.py", "plain_loop.py"))
    assert trainer.values["data.validation_share"] == 0.1
    assert accounted(trainer.subject)["data.validation_seed"].fate == "no effect"
    assert plain.values["num_train_epochs"] == 5


def test_the_schedule_and_the_part_of_a_dataset_go_into_the_recipe_however_they_are_named() -> None:
    values = convert(read_subject(EVERYDAY / "accelerate_loop.py")).values
    assert (values["lr_scheduler_type"], values["warmup_steps"]) == ("linear", 100)
    assert values["data.source"] == "wikitext"
    config = accounted(read_subject(EVERYDAY / "accelerate_loop.py"))["data.config"]
    assert config.fate == "not supported"
    assert "OWNER/wikitext:wikitext-2-raw-v1" in config.why


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "ds_z3.json"])
def test_every_key_of_them_is_accounted_for(name: str) -> None:
    of = read_subject(EVERYDAY / name)
    assert set(accounted(of)) >= {*of.settings, *of.unread, *of.unknown}


@pytest.mark.parametrize(("call", "share", "fate"), [
    ("rows.train_test_split(0.2)", 0.2, "translated"), ("rows.train_test_split(train_size=0.75)", 0.25, "translated"),
    ("rows.train_test_split()", 0.25, "translated"), ("rows.train_test_split(test_size=500)", 500, "not supported"),
    ("train_test_split(texts, test_size=0.2, random_state=1)", 0.2, "translated")])
def test_however_train_test_split_is_called_its_share_is_read(call: str, share: float, fate: str, tmp_path: Path) -> None:
    of = subject("from datasets import load_dataset\nfrom sklearn.model_selection import train_test_split\n"
                 "from transformers import TrainingArguments\nrows = load_dataset('a/b')\n"
                 f"parts = {call}\nargs = TrainingArguments('out')\n", tmp_path)
    assert of.value("data.validation_share") == share
    assert accounted(of)["data.validation_share"].fate == fate


def test_examples_held_out_from_the_end_are_said_to_be_others(tmp_path: Path) -> None:
    of = subject(everyday("trainer.py").replace("test_size=0.1, seed=args.seed", "test_size=0.1, shuffle=False"), tmp_path)
    assert accounted(of)["data.validation_shuffle"].fate == "not supported"


# ------------------------------------------------------------------------------------------------ what is found


def test_a_schedule_as_long_as_a_loader_before_it_is_prepared_is_right(tmp_path: Path) -> None:
    text = everyday("accelerate_loop.py")
    assert found_in(text, "scheduler_each_process", tmp_path) == []
    fixed = text.replace("max_train_steps = args.num_train_epochs * num_update_steps_per_epoch", "max_train_steps = 1000")
    assert len(found_in(fixed, "scheduler_each_process", tmp_path)) == 1


def test_a_model_saved_in_each_epoch_is_no_checkpoint_and_a_tokenizer_none_at_all(tmp_path: Path) -> None:
    text = everyday("accelerate_loop.py")
    assert len(found_in(text, "checkpoint_cannot_resume", tmp_path)) == 1
    assert found_in(text.replace("unwrapped.save", "tokenizer.save"), "checkpoint_cannot_resume", tmp_path) == []
    assert found_in(text.replace("accelerator.print(", "accelerator.save_state('out'); print("), "checkpoint_cannot_resume",
                    tmp_path) == []


def test_a_trainer_is_told_that_its_tokenizer_has_another_name_now(tmp_path: Path) -> None:
    (finding,) = found_in(everyday("trainer.py"), "removed_names", tmp_path)
    assert "tokenizer (now processing_class)" in finding.why
    assert "        processing_class=tokenizer,\n" in next(iter(make_patch([finding]).after.values()))


def test_padding_that_another_place_has_to_do_is_not_patched_away(tmp_path: Path) -> None:
    (alone,) = found_in(everyday("plain_loop.py"), "padding_to_max_length", tmp_path)
    assert not alone.cure.edits, "rows of unequal lengths would not make a batch"
    collated = ("from torch.utils.data import DataLoader\nfrom transformers import AutoTokenizer\n"
                "tokenizer = AutoTokenizer.from_pretrained('gpt2')\n\n\ndef collate(rows):\n"
                "    return tokenizer(rows, padding='max_length', max_length=64)\n\n\n"
                "loader = DataLoader(rows, batch_size=8, collate_fn=collate)\n")
    (together,) = found_in(collated, "padding_to_max_length", tmp_path)
    assert together.cure.edits


@pytest.mark.parametrize(("replaced", "by"), [
    ('padding="max_length"', "padding=False"), ("labels=input_ids)", "labels=input_ids.masked_fill(mask == 0, -100))"),
    ("labels=input_ids)", "labels=answers)")])
def test_padding_that_is_no_label_is_not_trained(replaced: str, by: str, tmp_path: Path) -> None:
    text = everyday("plain_loop.py")
    assert replaced in text
    assert found_in(text.replace(replaced, by), "padding_trained", tmp_path) == []


def test_padding_that_is_trained_is_not_also_said_to_hide_the_end(tmp_path: Path) -> None:
    text = everyday("plain_loop.py").replace('tokenizer.add_special_tokens({"pad_token": "[PAD]"})',
                                             "tokenizer.pad_token = tokenizer.eos_token")
    assert found_in(text, "pad_is_end", tmp_path) == []
    (finding,) = found_in(text, "padding_trained", tmp_path)
    assert "the end of text here" in finding.why


def test_a_key_without_a_value_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yml"
    path.write_text(everyday("axolotl.yml").replace("debug:", "debug: true"), encoding="utf-8")
    assert [finding.rule for finding in BY_NAME["unknown_keys"].find(read_config(path), Circumstances())] == ["unknown_keys"]
    assert list(BY_NAME["unknown_keys"].find(read_config(EVERYDAY / "axolotl.yml"), Circumstances())) == []


def test_an_unknown_key_of_a_trainers_config_is_low_for_a_script_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "arguments.yaml"
    path.write_text("output_dir: out\nper_device_train_batch_size: 4\nnum_train_epochs: 1\nmy_own_key: 7\n", encoding="utf-8")
    (finding,) = BY_NAME["unknown_keys"].find(read_config(path), Circumstances())
    assert (finding.severity, "my_own_key" in finding.why) == ("low", True)


def test_the_cure_has_the_spelling_of_the_file() -> None:
    found = audit(EVERYDAY / "llama_factory.yaml").findings
    assert next(finding.cure.says for finding in found if finding.rule == "workers_start_each_epoch") == \
        "Keep the workers between epochs: dataloader_persistent_workers: true"


# ------------------------------------------------------------------------------------------------ what cannot be read


@pytest.mark.parametrize(("name", "text", "words"), [
    ("a.py", "x = " + "-" * 20_000 + "1\n", "too deep for Python to parse"),
    ("a.py", "x = " + " + ".join("1" for _ in range(3000)) + "\n", "too deep"),
    ("a.py", "x = 1\n" * (LARGEST_BYTES // 6 + 1), "bytes; a script has at most"),
    ("a.json", "[" * 100_000, "too deep"), ("a.yaml", "[" * 5000, "too deep"),
    ("a.yaml", "- a\n- b\n", "holds a list, and not keys"), ("a.json", "3\n", "holds the value 3, and not keys"),
    ("a.ipynb", "{}", "is no notebook"), ("a.txt", "", "neither a script")])
def test_what_cannot_be_read_is_said_in_one_sentence(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(WrongUse, match=words) as refused:
        read_subject(tmp_path / name)
    assert "\n" not in str(refused.value)
    assert name in str(refused.value)


def test_a_script_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(everyday("trainer.py"), encoding="utf-8-sig")
    assert read_subject(tmp_path / "a.py").framework == "transformers"
