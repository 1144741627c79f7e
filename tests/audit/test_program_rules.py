"""The rules on whole programs and launches: each fires where its cause is, and is silent in a near miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ACCELERATED, HEAD, MADE, PARALLEL, PLAIN, loop
from program_cases import PROGRAM_CASES, SHARDED

from powertrain.audit.reading_script import read_script
from powertrain.audit.rules import RULES
from powertrain.audit.subject import Circumstances
from powertrain.records import Software

BY_NAME = {rule.name: rule for rule in RULES}


def found(name: str, text: str, folder: Path) -> list[str]:
    """Return the rule's name for each finding, of both ways to start the script."""
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    subject = read_script(path)
    subjects = [subject, *subject.others]
    return [finding.rule for each in subjects for finding in BY_NAME[name].find(each, Circumstances())]


@pytest.mark.parametrize("name", PROGRAM_CASES)
def test_a_rule_fires_where_its_cause_is(name: str, tmp_path: Path) -> None:
    assert set(found(name, PROGRAM_CASES[name][0], tmp_path)) == {name}


@pytest.mark.parametrize("name", PROGRAM_CASES)
def test_a_rule_is_silent_in_its_near_miss(name: str, tmp_path: Path) -> None:
    assert found(name, PROGRAM_CASES[name][1], tmp_path) == []


OF_A_HUB = (HEAD + "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
            "model = AutoModelForCausalLM.from_pretrained('{name}'{dtype})\n"
            "Trainer(model, TrainingArguments('out', {half}=True), train_dataset=rows).train()\n")
RELEASES = {release: Circumstances(software=Software({"transformers": release}, {})) for release in ("4.57.0", "5.23.0")}


@pytest.mark.parametrize(("release", "name", "dtype", "half", "says"), [
    ("5.23.0", "Qwen/Qwen2.5-0.5B", "", "fp16", ["fp16_weights_unscaled", "half_weights_trained"]),
    ("5.23.0", "Qwen/Qwen2.5-0.5B", "", "bf16", ["half_weights_trained"]),
    ("5.23.0", "facebook/opt-125m", ", dtype='auto'", "fp16", ["fp16_weights_unscaled", "half_weights_trained"]),
    ("5.23.0", "Qwen/Qwen2.5-0.5B", ", dtype=torch.float32", "fp16", []),
    ("5.23.0", "gpt2", "", "fp16", []),
    ("5.23.0", "gpt2", ", dtype=torch.bfloat16", "bf16", ["half_weights_trained"]),
    ("5.23.0", "gpt2", ", dtype=torch.bfloat16", "deepspeed='zero.json', bf16", []),
    ("4.57.0", "Qwen/Qwen2.5-0.5B", "", "fp16", []),
])
def test_weights_keep_the_dtype_of_their_checkpoint_since_transformers_5(
        release: str, name: str, dtype: str, half: str, says: list[str], tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(OF_A_HUB.format(name=name, dtype=dtype, half=half), encoding="utf-8")
    subject = read_script(path)
    asked = ("fp16_weights_unscaled", "half_weights_trained")
    assert [each for each in asked if list(BY_NAME[each].find(subject, RELEASES[release]))] == says


def test_weights_that_are_widened_at_once_are_not_half(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = OF_A_HUB.format(name="Qwen/Qwen2.5-0.5B", dtype="", half="fp16")
    path.write_text(text.replace("Trainer(model", "model = model.float()\nTrainer(model"), encoding="utf-8")
    assert not list(BY_NAME["fp16_weights_unscaled"].find(read_script(path), RELEASES["5.23.0"]))


def test_autocast_that_is_off_computes_in_no_half_precision(tmp_path: Path) -> None:
    body = ("with torch.autocast('cuda', dtype=torch.float16, enabled={on}):", f"    {PLAIN[0]}", *PLAIN[1:])
    for on, says in (("True", ["fp16_without_scaler"]), ("False", [])):
        assert found("fp16_without_scaler", loop(*(line.format(on=on) for line in body)), tmp_path) == says


def test_a_wait_for_many_passes_costs_little(tmp_path: Path) -> None:
    body, wait = ("loss = model(batch).mean()", "loss.backward()"), "torch.cuda.synchronize()"
    many = ("for micro in range(8):", *(f"    {line}" for line in body))
    said = []
    for passes in (body, many):
        path = tmp_path / "train.py"
        path.write_text(loop(*passes, "optimizer.step()", wait, before="model = model.to('cuda')\n"), encoding="utf-8")
        said += [each.severity for each in BY_NAME["synchronised_each_step"].find(read_script(path), Circumstances())]
    assert said == ["moderate", "low"]


WHERE_ASKED = (HEAD + "import sys\nfrom peft import LoraConfig, get_peft_model\nfrom trl import SFTConfig, SFTTrainer\n"
               "config = None\nif len(sys.argv) > 1:\n    config = LoraConfig(r=8)\n{first}"
               "    model = get_peft_model(model, config)\n"
               "SFTTrainer(model=model, args=SFTConfig('out'), peft_config=config, train_dataset=rows).train()\n")


def test_adapters_that_are_asked_for_by_a_condition_are_added_twice_where_it_holds(tmp_path: Path) -> None:
    assert found("adapters_twice", WHERE_ASKED.format(first=""), tmp_path)
    assert not found("adapters_twice", WHERE_ASKED.format(first="if len(sys.argv) > 2:\n    config = None\n"), tmp_path)


PREPARED = ("accelerator = Accelerator()\nmodel, optimizer = accelerator.prepare(model, optimizer)\n"
            "for batch in loader:\n    accelerator.backward(model(batch).mean())\n    optimizer.step()\n"
            "    optimizer.zero_grad()\n")


@pytest.mark.parametrize(("asks", "says"), [("model.generate(batch)\n", ["method_of_wrapped_model"]), ("model.eval()\n", []),
                                            ("accelerator.unwrap_model(model).generate(batch)\n", []),
                                            ("model = accelerator.unwrap_model(model)\nmodel.generate(batch)\n", [])])
def test_a_model_that_accelerate_prepared_has_no_methods_of_its_own(asks: str, says: list[str], tmp_path: Path) -> None:
    assert found("method_of_wrapped_model", HEAD + MADE + PREPARED + asks, tmp_path) == says


def test_a_schedule_that_counts_the_data_before_it_is_prepared_counts_all_processes(tmp_path: Path) -> None:
    of_the_data = HEAD + ACCELERATED.format(steps="len(data) // 8").replace(
        "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)",
        "loader = DataLoader(data, batch_size=8)\n"
        "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)")
    assert found("scheduler_each_process", HEAD + ACCELERATED.format(steps="1000"), tmp_path)
    assert not found("scheduler_each_process", of_the_data, tmp_path)


def test_a_sampler_of_one_epoch_needs_no_second_order(tmp_path: Path) -> None:
    sampled = loop(*PLAIN, before=PARALLEL + "sampler = DistributedSampler(data)\nloader = DataLoader(data, sampler=sampler)\n")
    assert found("sampler_without_epoch", sampled, tmp_path)
    assert not found("sampler_without_epoch", sampled.replace("range(3)", "range(1)"), tmp_path)


def test_a_step_does_not_call_the_function_that_it_stands_in(tmp_path: Path) -> None:
    own = (HEAD + MADE + "class Own:\n    def train(self):\n        for i, batch in enumerate(loader):\n"
           "            optimizer.zero_grad()\n            model(batch).mean().backward()\n            optimizer.step()\n"
           "            if i % 10 == 0:\n                self.train()\nOwn().train()\n")
    assert not found("gradients_cleared_early", own, tmp_path)


def test_an_option_that_the_command_line_does_not_have_is_never_on(tmp_path: Path) -> None:
    wrapped = SHARDED.replace("model = FSDP", "if getattr(args, 'fsdp', False):\n    model = FSDP")
    body = (*PLAIN[:2], "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", *PLAIN[2:])
    asked = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--{name}', action='store_true')\n"
    assert found("sharded_clipping", loop(*body, before=asked.format(name="fsdp") + wrapped), tmp_path)
    assert not found("sharded_clipping", loop(*body, before=asked.format(name="other") + wrapped), tmp_path)


def test_an_accumulation_of_one_by_default_exchanges_nothing_too_often(tmp_path: Path) -> None:
    text = loop("loss = model(batch).mean()", "loss.backward()", "if (i + 1) % args.passes == 0:", "    optimizer.step()",
                "    optimizer.zero_grad()", before=PARALLEL + "import argparse\nparser = argparse.ArgumentParser()\n"
                "parser.add_argument('--passes', type=int, default={default})\nargs = parser.parse_args()\n")
    assert found("micro_batches_synchronised", text.replace("{default}", "4"), tmp_path)
    assert not found("micro_batches_synchronised", text.replace("{default}", "1"), tmp_path)


@pytest.mark.parametrize(("batch", "alone"), [("batch", True), ("batch.to('cuda')", False)])
def test_a_loop_that_never_moves_to_a_device_waits_for_none(batch: str, alone: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(loop(f"loss = model({batch}).mean()", *PLAIN[1:], "total += loss.item()"), encoding="utf-8")
    findings = BY_NAME["item_each_step"].find(read_script(path), Circumstances())
    assert ["a CPU has no queue" in finding.why for finding in findings] == [alone]
