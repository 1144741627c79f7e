"""What projects were seen to do: operands that Python refuses, adapters that stay frozen, gradients zeroed too seldom."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF, loop
from test_once_wrong import severities as said

FIRST = "epochs, name = 3, 'model-'\n"
IN_A_CLASS = ("class Told(dict):\n    __getattr__ = dict.get\ntold = Told({{'name': 'model-', 'epochs': 3}})\n"
              "class Run:\n    def train(self):\n        model(rows).backward()\n"
              "        return told.name + {last}\n")
ADAPTED = ("from peft import PeftModel, get_peft_model\nmodel = PeftModel.from_pretrained(model, 'out'{more})\n{between}"
           "trainer = Trainer(model=model, args=args, train_dataset=rows)\n{runs}\n")
INNER = "{outer}    for batch in rows:\n        for again in range(4):\n{inner}" \
        "            model(batch).mean().backward()\n{steps}"
ZEROED, STEPPED = "optimizer.zero_grad()\n", "optimizer.step()\n"
COLLATED = ("from datasets import load_dataset\ntokenizer = AutoTokenizer.from_pretrained('gpt2')\n{given}"
            "rows = load_dataset('text', data_files='a.txt')['train'].map(lambda row: tokenizer(row['text']), batched=True)\n"
            "from transformers import DataCollatorForLanguageModeling\n{rows}collator = DataCollatorForLanguageModeling("
            "tokenizer, mlm=False)\nTrainer(model, args, train_dataset=rows, data_collator=collator).train()\n")
PARTS = "from datasets import load_dataset\nrows = load_dataset('text', data_files={files}{more})\nprint(rows[0])\n"


@pytest.mark.parametrize(("text", "severities"), [
    (FIRST + "print(name + epochs)\n", ["critical"]), (FIRST + "print(name * epochs)\n", []),
    (FIRST + "print(name < epochs)\n", ["critical"]), (FIRST + "print(name == epochs)\n", []),
    (FIRST + "name += epochs\n", ["critical"]), (FIRST + "name += f'{epochs}'\n", []),
    ("from pathlib import Path\nprint(Path('out') / 'a')\n", []), (FIRST + "print('%d' % epochs)\n", []),
    (FIRST + "try:\n    print(name + epochs)\nexcept TypeError:\n    pass\n", []),
    (FIRST + "if model:\n    print(name + epochs)\n", []),
    (FIRST + "print(name + epochs if model else name)\n", []), (FIRST + "print(model and name + epochs)\n", []),
    ("def run(name='model-', epochs=3):\n    return name + epochs\n", []),
    ("def run(name='model-', epochs=3):\n    return name + epochs\nrun()\n", ["critical"]),
    (IN_A_CLASS.format(last="told.epochs"), ["critical"]), (IN_A_CLASS.format(last="str(told.epochs)"), []),
    ("import time\nprint(time.strftime('%S') - time.strftime('%S'))\n", ["critical"]),
    ("import time\nprint(int(time.strftime('%S')) - int(time.strftime('%S')))\n", [])])
def test_a_text_and_a_number_are_not_added_or_compared(text: str, severities: list[str], tmp_path: Path) -> None:
    assert said("operands_refused", HEAD + ARGUMENTS + text, tmp_path) == severities


@pytest.mark.parametrize(("more", "between", "runs", "severities"), [
    ("", "", "trainer.train()", ["critical"]), (", is_trainable=True", "", "trainer.train()", []),
    (", **told", "", "trainer.train()", []), ("", "model.print_trainable_parameters()\n", "trainer.train()", ["critical"]),
    ("", "for each in model.parameters():\n    each.requires_grad = True\n", "trainer.train()", []),
    ("", "model = get_peft_model(model, told)\n", "trainer.train()", []), ("", "prepared(model)\n", "trainer.train()", []),
    ("", "model = model.merge_and_unload()\n", "trainer.train()", []), ("", "", "trainer.evaluate()", [])])
def test_adapters_that_a_trainer_trains_are_frozen(more: str, between: str, runs: str, severities: list[str],
                                                   tmp_path: Path) -> None:
    text = HEAD + HF + ARGUMENTS + ADAPTED.format(more=more, between=between, runs=runs)
    assert said("adapters_frozen", text, tmp_path) == severities


def test_adapters_of_a_model_beside_the_trained_one_may_be_frozen(tmp_path: Path) -> None:
    text = "from peft import PeftModel\nreference = PeftModel.from_pretrained(model, 'out')\n"
    made = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
    assert said("adapters_frozen", loop("loss = model(batch).mean()", "loss.backward()", before=text + made), tmp_path) == []


@pytest.mark.parametrize(("outer", "inner", "steps", "severities"), [
    (ZEROED, "", STEPPED, ["critical"]), ("", ZEROED, STEPPED, []), (ZEROED, "", "", []),
    (ZEROED, "", "if again == 3:\n                optimizer.step()\n", []),
    (ZEROED, "", STEPPED + "            zero(optimizer)\ndef zero(optimizer):\n    optimizer.zero_grad()\n", [])])
def test_gradients_are_zeroed_in_an_outer_loop_alone(outer: str, inner: str, steps: str, severities: list[str],
                                                     tmp_path: Path) -> None:
    text = INNER.format(outer=f"    {outer}" * bool(outer), inner=f"            {inner}" * bool(inner),
                        steps=f"            {steps}" * bool(steps))
    made = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\nfor epoch in range(3):\n"
    assert said("gradients_not_zeroed", HEAD + "model = nn.Linear(8, 8)\n" + made + text, tmp_path) == severities


@pytest.mark.parametrize(("made", "more", "severities"), [
    (HF, "", ["critical"]), (HF, ", lr=2e-5", []), (HF, ", 2e-5", []), (HF, ", **told", []),
    ("model = nn.Linear(8, 8)\n", "", []),
    (HF + "for each in model.base.parameters():\n    each.requires_grad = False\n", "", [])])
def test_a_pretrained_model_needs_a_rate(made: str, more: str, severities: list[str], tmp_path: Path) -> None:
    made += f"optimizer = torch.optim.AdamW(model.parameters(){more})\n"
    text = HEAD + made + "model(rows).loss.backward()\noptimizer.step()\n"
    assert said("rate_left_out", text, tmp_path) == severities


@pytest.mark.parametrize(("given", "rows", "severities"), [
    ("", "", ["critical"]), ("tokenizer.pad_token = tokenizer.eos_token\n", "", []),
    ("", "from transformers import TextDataset\nrows = TextDataset(tokenizer, 'a.txt', 128)\n", [])])
def test_a_collator_pads_whatever_it_gets(given: str, rows: str, severities: list[str], tmp_path: Path) -> None:
    text = HEAD + HF + ARGUMENTS + COLLATED.format(given=given, rows=rows)
    assert said("pad_token_missing", text, tmp_path) == severities


@pytest.mark.parametrize(("files", "more", "severities"), [
    ("{'train': 'a.txt', 'validation': 'b.txt'}", "", ["critical"]), ("'a.txt'", ", split='train'", [])])
def test_rows_are_not_in_a_dictionary_of_parts(files: str, more: str, severities: list[str], tmp_path: Path) -> None:
    assert said("split_not_there", HEAD + ARGUMENTS + PARTS.format(files=files, more=more), tmp_path) == severities
