"""Rules on what is handed on to files, models and adapters: each fires where it is so, and not in its near miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF, MADE, PARALLEL, PLAIN, TOKENIZER, loop
from handing_cases import HANDING_CASES
from meaning_cases import ASKED, LOGGED, SHARDED
from refusal_cases import DECODED
from test_library_rules import BY_NAME, WITH_RELEASES, said

from powertrain.audit.audit import read_subject
from powertrain.audit.project import root_of

CHANCES = "def chances(scores, tokens):\n    return scores.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)\n"
READ = ("ids = batch['ids']", "told = model(ids)", "loss = -chances(told.logits{cut}, {tokens}).mean()", *PLAIN[1:])
TWICE = ("def measure(row):\n    return tokenizer(row['text'], padding=False)\nrows.map(measure)\ndef tokenise(row):\n"
         "    told = tokenizer(row['text'], padding={padding})\n    told['labels'] = told['input_ids'].copy()\n"
         "    return told\n"
         + ARGUMENTS + "Trainer(model, args, train_dataset=rows.map(tokenise)).train()\n")
UNWRAPPED = "model.{method}()\ninner = model.module\n"
OPTION = ("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--write', action='store_true')\n"
          "told_by = parser.parse_args()\n")
TWO_TOKENIZERS = ("def main():\n    other = AutoTokenizer.from_pretrained('gpt2')\n    {name}.pad_token = {name}.eos_token\n"
                  "def tokenise(row):\n    return tokenizer(row['a'], padding='max_length')\nmain()\nrows.map(tokenise)\n")
MAPPED = ("def tokenise(row, taken):\n    return taken(row['a'], padding='max_length')\ndef main():\n    " + TOKENIZER
          + "    rows.map(tokenise, fn_kwargs={{'taken': {given}}})\nmain()\n")
PADS = "batch = tokenizer(['a', 'b'], padding=True)\n"
GROUPED = SHARDED + ("if {off}args.shard:\n    dist.init_process_group('nccl')\nmodel = DistributedDataParallel(model)\n")


@pytest.mark.parametrize("name", HANDING_CASES)
def test_it_fires_in_its_case_and_not_in_its_near_miss(name: str, tmp_path: Path) -> None:
    assert len(said(name, HANDING_CASES[name][0], tmp_path)) == 1
    assert said(name, HANDING_CASES[name][1], tmp_path) == []


@pytest.mark.parametrize(("rule", "defect", "none"), [
    ("chances_of_next_token", loop(*(line.format(cut="", tokens="ids") for line in READ), before=CHANCES),
     loop(*(line.format(cut="[:, :-1]", tokens="ids[:, 1:]") for line in READ), before=CHANCES)),
    ("padding_trained", HEAD + HF + TOKENIZER + TWICE.format(padding="'max_length'"),
     HEAD + HF + TOKENIZER + TWICE.format(padding="'do_not_pad'")),
    ("method_of_wrapped_model", HEAD + MADE + PARALLEL + UNWRAPPED.format(method="configure_optimizers"),
     HEAD + MADE + PARALLEL + UNWRAPPED.format(method="train")),
    ("method_of_wrapped_model", HEAD + MADE + PARALLEL + "model.tie_weights()\n",
     HEAD + MADE + PARALLEL + "if accelerator.distributed_type == 'TPU':\n    model.tie_weights()\n"),
    ("pad_token_missing", HEAD + TOKENIZER + TWO_TOKENIZERS.format(name="other"),
     HEAD + TOKENIZER + TWO_TOKENIZERS.format(name="tokenizer")),
    ("pad_token_missing", HEAD + TOKENIZER + "print(tokenizer.pad_token_id)\n" + PADS,
     HEAD + TOKENIZER + "prepare(tokenizer)\n" + PADS),
    ("pad_token_missing", HEAD + TOKENIZER + PADS, HEAD + TOKENIZER + "try:\n    " + PADS + "except ValueError:\n    pass\n"),
    ("pad_token_missing", HEAD + TOKENIZER + PADS,
     HEAD + TOKENIZER + "from trl import SFTTrainer\nSFTTrainer(model, processing_class=tokenizer)\n" + PADS),
    ("pad_token_missing", HEAD + TOKENIZER + PADS, HEAD + TOKENIZER + "if rows.uneven:\n    " + PADS),
    ("pad_token_missing", HEAD + MAPPED.format(given="tokenizer"), HEAD + MAPPED.format(given="rows.tokenizer")),
    ("chat_template_missing", HEAD + HF + ASKED.format(path="gpt2", then=""),
     HEAD + HF + ASKED.format(path="gpt2", then="tokenizer.chat_template = open('t.jinja').read()\n")),
    ("chat_template_missing", HEAD + HF + ASKED.format(path="gpt2", then=""),
     HEAD + HF + ASKED.format(path="gpt2", then="model, tokenizer = with_format(model, tokenizer)\n")),
    ("group_never_begun", loop(*PLAIN, "wandb.log({'loss': loss})", before=LOGGED),
     loop(*PLAIN, "if args.shard:", "    wandb.log({'loss': loss})", before=LOGGED)),
    ("group_never_begun", loop(*PLAIN, before=GROUPED.format(off="")), loop(*PLAIN, before=GROUPED.format(off="not "))),
])
def test_a_value_is_followed_to_where_the_defect_shows(rule: str, defect: str, none: str, tmp_path: Path) -> None:
    assert len(said(rule, defect, tmp_path)) == 1
    assert said(rule, none, tmp_path) == []


@pytest.mark.parametrize(("other", "severity"), [
    ("model = Net()\nmodel.load_state_dict(torch.load('net.pt'))\n", "critical"),
    ("model = torch.compile(Net())\nmodel.load_state_dict(torch.load('net.pt'))\n", "low"),
    ("model = Net()\nmodel.load_state_dict(torch.load('net.pt'), strict=False)\n", "low"),
    ("model = Net()\nmodel.load_state_dict(torch.load('net.pt'))\nloss.backward()\n", "low"),
    ("model = Net()\ntold = torch.load('net.pt')\nmodel.load_state_dict({key[len('_orig_mod.'):]: told[key]"
     " for key in told})\n",
     "low"),
    ("model = Other()\nmodel.load_state_dict(torch.load('net.pt'))\n", "low")])
def test_names_of_a_compiled_model_that_another_file_does_not_know_lose_the_weights(
        other: str, severity: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch\n", encoding="utf-8")
    (tmp_path / "sample.py").write_text(other, encoding="utf-8")
    net = "class Net(nn.Module):\n    pass\nmodel = Net()\nmodel = torch.compile(model)\n"
    text = loop(*PLAIN, before=net, after="\ntorch.save(model.state_dict(), 'net.pt')\n")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    told = BY_NAME["compiled_names_saved"].find(read_subject(tmp_path / "train.py"), WITH_RELEASES)
    assert [one.severity for one in told] == [severity]


def test_what_a_command_turns_on_is_looked_at_too(tmp_path: Path) -> None:
    text = HEAD + TOKENIZER + OPTION + DECODED.format(changed="pass").replace("generate=True", "generate=told_by.write")
    (tmp_path / "README.md").write_text("```\npython train.py --write\n```\n", encoding="utf-8")
    assert said("ignored_labels_decoded", text, tmp_path) == []
    told = read_subject(tmp_path / "train.py").others[-1]
    assert [one.severity for one in BY_NAME["ignored_labels_decoded"].find(told, WITH_RELEASES)] == ["critical"]


def test_a_folder_that_merely_has_a_readme_is_no_root_within_a_project(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "README.md").write_text("a part\n", encoding="utf-8")
    assert root_of(tmp_path / "inner" / "train.py") == tmp_path / "inner"
    (tmp_path / "requirements.txt").write_text("torch\n", encoding="utf-8")
    assert root_of(tmp_path / "inner" / "train.py") == tmp_path
