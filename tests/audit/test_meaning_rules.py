"""What code means and what processes do together: further causes, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF, PARALLEL, PLAIN, loop
from test_running_rules import said

BUFFERED = ("class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.head = nn.Linear(8, 8)\n"
            "        self.{registered}\n\nclass Run:\n    def __init__(self):\n"
            "        self.model = DistributedDataParallel(Net())\n\n    def go(self):\n        for step in range(9):\n"
            "            if dist.get_rank() == 0:\n                self.model({told})\n"
            "            self.model(step).backward()\nRun().go()\n")
NUMBERS = ("import numpy as np\ndef score():\n    return {score}\nbest = score()\n"
           "torch.save({{'model': model.state_dict(), 'best': best}}, 'last.pt')\nstate = torch.load('last.pt')\n"
           "print(state['best'])\n")
NEXT = ("class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2)\n\n"
        "    def forward(self, x):\n        return self.layers(x{more})\nmodel = Net()\n"
        "x, y = rows[:, :-1], rows[:, {first}:]\n")
ASKED = "class Words:\n    first = 'a'\nprint(Words.{name})\n"
SAVED = ("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--push', action='store_true')\n"
         "told = parser.parse_args()\nargs = TrainingArguments('out', save_strategy='no')\n"
         "trainer = Trainer(model, args, train_dataset=rows)\ntrainer.train()\n"
         "def push():\n    model.push_to_hub('me/own')\n{tested}push()\n")
DROPPED = ("from sklearn.model_selection import train_test_split\nfirst, held = train_test_split(rows)\n" + ARGUMENTS
           + "trainer = Trainer(model, args, train_dataset=first)\nif __name__ == '__main__':\n    {last}\n")
SWITCHED = ("class Own(Trainer):\n    def compute_loss(self, model, inputs, num_items_in_batch=None):\n"
            "        {test}return self.own_scale * model(**inputs).loss\n" + ARGUMENTS
            + "Own(model, args, train_dataset=rows).train()\n")
WRITTEN = ("def write(name, state):\n    torch.save({{'state': state}}, name)\n")
FREED = ("def free():\n    torch.cuda.empty_cache()\n")
STOPPED = ("if stop:", "    try:", "        free()", "    except ValueError:", "        pass", "    break")


@pytest.mark.parametrize(("rule", "defect", "none"), [
    ("processes_leave_alone", loop(*PLAIN, "if i > 9 and dist.get_rank() == 0:", "    break", before=PARALLEL),
     loop(*PLAIN, "if i > 9:", "    break", before=PARALLEL)),
    ("one_process_waits", HEAD + BUFFERED.format(registered="register_buffer('mask', torch.ones(8))", told="step"),
     HEAD + BUFFERED.format(registered="mask = torch.ones(8)", told="step")),
    ("own_objects_refused", loop(*PLAIN, after=NUMBERS.format(score="np.mean([1.0]) * 100")),
     loop(*PLAIN, after=NUMBERS.format(score="float(np.mean([1.0]) * 100)"))),
    ("attention_unmasked", loop(*PLAIN, before=NEXT.format(more="", first=1)),
     loop(*PLAIN, before=NEXT.format(more=", mask=ahead", first=1))),
    ("attention_unmasked", loop(*PLAIN, before=NEXT.format(more="", first=1)),
     loop(*PLAIN, before=NEXT.format(more="", first=0))),
    ("attributes_missing", loop(*PLAIN, before=ASKED.format(name="second")), loop(*PLAIN, before=ASKED.format(name="first"))),
    ("attributes_missing", HEAD + HF + SWITCHED.format(test=""),
     HEAD + HF + SWITCHED.format(test="if self.args.remove_unused_columns:\n            ")),
    ("adapter_never_saved", HEAD + HF + SAVED.format(tested="if told.push:\n    "), HEAD + HF + SAVED.format(tested="")),
    ("trainer_never_trains", HEAD + HF + DROPPED.format(last="del trainer"),
     HEAD + HF + DROPPED.format(last="trainer.train()")),
    ("left_unwritten", HEAD + HF + "def own():\n    raise NotImplementedError\n" + ARGUMENTS
     + "Trainer(model, args, train_dataset=own()).train()\n", HEAD + HF + "def own():\n    return 1\n" + ARGUMENTS
     + "Trainer(model, args, train_dataset=own()).train()\n"),
    ("checkpoint_cannot_resume", loop(*PLAIN, "write('a.pt', model.state_dict())", before=WRITTEN.format()),
     loop(*PLAIN, "write('a.pt', model.state_dict())", "write('b.pt', optimizer.state_dict())", before=WRITTEN.format())),
    ("cache_emptied_in_loop", loop(*PLAIN, *STOPPED[:-1], before=FREED), loop(*PLAIN, *STOPPED, before=FREED)),
    ("never_saved", loop(*PLAIN, before="store = []\nstore.append(1)\n"), loop(*PLAIN, "store(model)")),
    ("undefined_names", loop("if kept():", "    names_of_nobody(batch)", *PLAIN),
     loop("if is_torch_xla_available():", "    names_of_nobody(batch)", *PLAIN, before="is_torch_xla_available = len\n"))])
def test_a_cause_is_seen_and_what_is_like_it_is_not(rule: str, defect: str, none: str, tmp_path: Path) -> None:
    first, second = said(rule, defect, tmp_path), said(rule, none, tmp_path)
    assert first
    assert first[0] not in second


def test_a_training_that_another_file_calls_is_called(tmp_path: Path) -> None:
    text = HEAD + HF + "def main():\n    Trainer(model, TrainingArguments('out'), train_dataset=rows).train()\n"
    (tmp_path / "README.md").write_text("python train.py", encoding="utf-8")
    assert len(said("training_never_called", text, tmp_path)) == 1
    (tmp_path / "start.py").write_text("from train import main\nmain()\n", encoding="utf-8")
    assert said("training_never_called", text, tmp_path) == []


def test_a_measurement_need_not_keep_its_model(tmp_path: Path) -> None:
    (folder := tmp_path / "benchmarks").mkdir()
    assert said("never_saved", loop(*PLAIN), tmp_path)
    assert said("never_saved", loop(*PLAIN), folder) == []
