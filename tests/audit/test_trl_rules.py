"""The rules on what TRL's trainers are given, on how a project starts its script, and on configs of other tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF, PLAIN, TOKENIZER, loop
from trl_cases import ASKED, BARE, FORMATTED, GRPO, SFT, TAKEN, TRL_CASES

from powertrain.audit.audit import read_subject
from powertrain.audit.reading_script import read_script
from powertrain.audit.rules import RULES
from powertrain.audit.rules.columns import columns_of
from powertrain.audit.subject import Circumstances
from powertrain.records import Software
from powertrain.records.findings import Finding

BY_NAME = {rule.name: rule for rule in RULES}
TODAY = Circumstances(software=Software({"transformers": "5.23.0", "trl": "1.16.0"}, {}))
YEARS_AGO = Circumstances(software=Software({"transformers": "4.40.0", "trl": "0.9.0"}, {}))


def found(name: str, text: str, folder: Path, where: Circumstances = TODAY) -> list[Finding]:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return list(BY_NAME[name].find(read_script(path), where))


@pytest.mark.parametrize("name", TRL_CASES)
def test_a_rule_fires_where_its_cause_is_and_not_in_its_near_miss(name: str, tmp_path: Path) -> None:
    assert [each.rule for each in found(name, TRL_CASES[name][0], tmp_path)] == [name]
    assert found(name, TRL_CASES[name][1], tmp_path) == []


@pytest.mark.parametrize("name", ["rewards_refuse_arguments", "plain_arguments"])
def test_what_the_present_release_of_trl_refuses_an_older_one_may_take(name: str, tmp_path: Path) -> None:
    assert found(name, TRL_CASES[name][0], tmp_path, YEARS_AGO) == []


def test_a_reward_of_a_library_or_behind_a_decorator_is_not_judged(tmp_path: Path) -> None:
    of_library = GRPO.replace("reward_funcs=[near]", "reward_funcs=[other]").format(more="")
    assert found("rewards_refuse_arguments", HEAD + "from rewards import other\n" + of_library, tmp_path) == []
    behind = GRPO.format(more="").replace("def near", "@told\ndef near")
    assert found("rewards_refuse_arguments", HEAD + behind, tmp_path) == []


@pytest.mark.parametrize(("lines", "fires"), [
    ("from transformers import AutoModel\nmodel = AutoModel.from_pretrained('gpt2')\nprint(model.generate(batch))\n", True),
    ("from transformers import AutoModel\nbase = AutoModel.from_pretrained('gpt2')\nmodel = Headed(base)\n" + ARGUMENTS
     + "Trainer(model, args, train_dataset=rows).train()\n", False),
    ("from transformers import AutoModel\nmodel = AutoModel.from_pretrained('gpt2')\nmodel = Headed(model)\n" + ARGUMENTS
     + "Trainer(model, args, train_dataset=rows).train()\n", False),
    ("class Own(Trainer):\n    def compute_loss(self, model, inputs, **kwargs):\n        return head(model(**inputs)[0])\n"
     + BARE.format(more="").replace("Trainer(model", "Own(model"), False)])
def test_a_bare_model_is_wrong_only_where_its_head_is_asked_for(lines: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD + lines + ("" if "Trainer(model" in lines or "Own(" in lines else ARGUMENTS + "Trainer(other, args).train()\n")
    assert bool(found("model_without_head", text, tmp_path)) == fires


def test_a_folder_of_a_data_sets_name_is_read_from_the_disk(tmp_path: Path) -> None:
    assert found("owner_missing", HEAD + TAKEN.format(name="imdb", split="train"), tmp_path)[0].severity == "critical"
    assert found("owner_missing", HEAD + TAKEN.format(name="mine", split="train"), tmp_path) == []
    (tmp_path / "imdb").mkdir()
    assert found("owner_missing", HEAD + TAKEN.format(name="imdb", split="train"), tmp_path) == []


@pytest.mark.parametrize(("rows", "fires"), [
    ("rows.select(range(100))", True), ("rows.shuffle(seed=0).select(range(100))", False),
    ("rows.select(range(12400, 12600))", False)])
def test_the_first_rows_of_sorted_data_are_of_one_class(rows: str, fires: bool, tmp_path: Path) -> None:
    text = TAKEN.format(name="stanfordnlp/imdb", split="train").replace("train_dataset=rows", f"train_dataset={rows}")
    assert bool(found("one_class_taken", HEAD + text, tmp_path)) == fires


@pytest.mark.parametrize(("after", "fires"), [
    ("def told(words):\n    inputs = tokenizer(words, return_tensors='pt')\n    return model.generate(**inputs)\n"
     "told('Once')\n", True),
    ("model = AutoModelForCausalLM.from_pretrained('out')\n" + ASKED.partition("trainer.train()\n")[2].format(moved=""), False),
    ("model.to('cpu')\nmodel.cpu()\n" + ASKED.partition("trainer.train()\n")[2].format(moved=""), False)])
def test_tokens_have_to_go_where_the_trainer_put_the_model(after: str, fires: bool, tmp_path: Path) -> None:
    before = HF + TOKENIZER + ARGUMENTS + "trainer = Trainer(model, args, train_dataset=rows)\ntrainer.train()\n"
    assert bool(found("inputs_left_on_cpu", HEAD + before + after, tmp_path)) == fires


PARSED = ("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--train_batch_size', type=int)\n"
          "parser.add_argument('--rate', type=float)\nargs = parser.parse_args()\n" + HF + ARGUMENTS.replace("args =", "told =")
          + "Trainer(model, told, train_dataset=rows).train()\n")
OF_CLASSES = ("from dataclasses import dataclass\nfrom transformers import HfArgumentParser\n@dataclass\n"
              "class Told(TrainingArguments):\n    own: int = 1\n"
              "args, = HfArgumentParser((Told,)).parse_args_into_dataclasses()\n" + HF
              + "Trainer(model, args, train_dataset=rows).train()\n")


@pytest.mark.parametrize(("text", "command", "names"), [
    (PARSED, "python train.py --rate 1e-3 --batch_size 8", "--batch_size"),
    (PARSED, "torchrun --nproc_per_node 2 train.py \\\n  --rate 1e-3 \\\n  --epochs=3", "--epochs"),
    (PARSED, "python train.py --rate 1e-3 --epochs 3 \\", "--epochs"),
    (PARSED, "python train.py --rate 1e-3 --train_batch 8 > log --other", None),
    (PARSED, "python other.py --batch_size 8\n# python train.py --batch_size 8", None),
    (PARSED.replace("parse_args()", "parse_known_args()"), "python train.py --batch_size 8", None),
    (OF_CLASSES, "accelerate launch --num_processes 2 train.py --own 2 --evaluation_strategy steps", "--evaluation_strategy"),
    (OF_CLASSES.replace("Told", "TrainingArguments").replace("(TrainingArguments):", "(transformers.TrainingArguments):")
     .replace("from dataclasses", "import transformers\nfrom dataclasses"), "python train.py --own 2 --learning_rate 1", None),
    (OF_CLASSES.replace("Told", "TrainingArguments"), "python train.py --own 2 --use quant", "--use"),
    (OF_CLASSES, "python train.py --own 2 --eval_strategy steps --output-dir out --no_bf16", None)])
def test_the_projects_own_commands_have_options_that_the_script_takes(
        text: str, command: str, names: str | None, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
    made = found("command_refused", HEAD + text, tmp_path)
    assert [each.why.partition(": ")[0] for each in made] == ([f"The script does not take {names}"] if names else [])
    assert not made or str(made[0].evidence[0].place).endswith("run.sh:2")


OWN_PARSER = OF_CLASSES.replace("args, = Hf", "class Own(HfArgumentParser):\n    pass\nargs, = Hf").replace(
    "HfArgumentParser((", "Own((")


@pytest.mark.parametrize("text", [OF_CLASSES, OWN_PARSER])
@pytest.mark.parametrize(("key", "fires"), [("warmup_ratio: 0.1", True), ("warmup_steps: 10", False)])
def test_the_configs_that_start_a_script_have_keys_of_its_classes(key: str, fires: bool, text: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python train.py sft.yaml\n", encoding="utf-8")
    (tmp_path / "sft.yaml").write_text(f"own: 2\noutput_dir: out\n{key}\n", encoding="utf-8")
    made = found("config_refused", HEAD + text, tmp_path)
    assert bool(made) == fires
    assert not made or str(made[0].evidence[0].place).endswith("sft.yaml:3")
    (tmp_path / "run.sh").write_text("python train.py --deepspeed sft.yaml\n", encoding="utf-8")
    assert found("config_refused", HEAD + OF_CLASSES, tmp_path) == []


def test_configs_that_no_command_names_are_those_that_mostly_fit(tmp_path: Path) -> None:
    text = HEAD + OF_CLASSES.replace("parse_args_into_dataclasses()", "parse_yaml_file(sys.argv[1])")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "README.md").write_text("A project.\n", encoding="utf-8")
    config = tmp_path / "recipes" / "one.yaml"
    config.write_text("own: 2\noutput_dir: out\nlearning_rate: 1.0e-4\nseed: 1\nwarmup_ratio: 0.1\n", encoding="utf-8")
    assert [each.why.partition("has ")[2][:12] for each in found("config_refused", text, tmp_path)] == ["warmup_ratio"]
    config.write_text("own: 2\nother: 1\nwarmup_ratio: 0.1\n", encoding="utf-8")              # of something else
    assert found("config_refused", text, tmp_path) == []


@pytest.mark.parametrize(("command", "others", "fires"), [
    ("accelerate launch --config_file zero3.yaml train.py", {}, True),
    ("accelerate launch --config_file=zero3.yaml train.py", {}, True),
    ("deepspeed train.py --deepspeed configs/two.json", {}, True),
    ("accelerate launch --config_file zero3.yaml train.py", {"configs/zero3.yaml": ""}, False),
    ("accelerate launch --config_file zero3.yaml train.py", {"make.py": "open('zero3.yaml', 'w')"}, False),
    ("accelerate launch --config_file $HERE/zero3.yaml train.py", {}, False),
    ("accelerate launch --config_file path/to/zero3.yaml train.py", {}, False),
    ("accelerate launch --config_file /etc/zero3.yaml train.py", {}, False),
    ("python train.py --data rows.json", {}, False)])
def test_a_command_names_configs_that_are_there(command: str, others: dict[str, str], fires: bool, tmp_path: Path) -> None:
    for name, text in {"run.sh": f"{command}\n", "README.md": "", **others}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    made = found("file_missing", HEAD + HF + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n", tmp_path)
    assert bool(made) == fires


@pytest.mark.parametrize(("command", "flag", "fires"), [
    ("python -m torch.distributed.launch --nproc_per_node 2 train.py", "'--local_rank'", True),
    ("python -m torch.distributed.launch --use_env train.py", "'--local_rank'", False),
    ("python -m torch.distributed.launch train.py", "'--local_rank', '--local-rank'", False),
    ("torchrun train.py", "'--local_rank'", False)])
def test_the_launcher_gives_the_rank_by_a_name_that_the_script_knows(
        command: str, flag: str, fires: bool, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{command}\n", encoding="utf-8")
    text = HEAD + PARSED.replace("'--rate'", flag)
    assert bool(found("rank_under_other_name", text, tmp_path)) == fires


def test_a_module_beside_the_script_comes_before_a_package_of_its_name(tmp_path: Path) -> None:
    text = HEAD + "from evaluate import LABELS\n" + HF + ARGUMENTS
    (tmp_path / "requirements.txt").write_text("trl\ntransformers\n", encoding="utf-8")
    assert all(found(rule, text, tmp_path) for rule in ("removed_imports", "packages_unlisted"))
    (tmp_path / "evaluate.py").write_text("LABELS = []\n", encoding="utf-8")
    assert not any(found(rule, text, tmp_path) for rule in ("removed_imports", "packages_unlisted"))


@pytest.mark.parametrize(("rule", "before", "text", "fires"), [
    ("removed_names", "from trl import DPOTrainer", "DPOTrainer(model=model, args=args, tokenizer=tokenizer).train()", True),
    ("removed_names", "from trl import PPOTrainer", "PPOTrainer(model=model, args=args, tokenizer=tokenizer).train()", False),
    ("removed_call_arguments", "from trl import DPOTrainer",
     "trainer = DPOTrainer(model=model, args=args)\ntrainer.train()\ntrainer.create_model_card(dataset_tags='a')", True),
    ("removed_call_arguments", "", "trainer = Trainer(model=model, args=args)\ntrainer.train()\n"
     "trainer.create_model_card(dataset_tags='a')", False),
    ("labels_by_old_name", "", "print(model(ids, masked_lm_labels=ids))\nTrainer(model=model, args=args).train()", True),
    ("labels_by_old_name", "def told(masked_lm_labels):\n    pass",
     "print(model(ids, masked_lm_labels=ids))\nTrainer(model=model, args=args).train()", False),
    ("attributes_missing", "", "print(AutoTokenizer.from_pretrained('x'))\ntokenizer = made()\nprint(tokenizer.max_len)", True),
    ("option_always_true", "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--a', type=bool)\n"
     "told = parser.parse_args()", "", True),
    ("option_always_true", "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--a', type=bool)\n"
     "told = parser.parse_args('')", "", False)])
def test_near_misses_of_what_is_gone(rule: str, before: str, text: str, fires: bool, tmp_path: Path) -> None:
    assert bool(found(rule, HEAD + before + "\n" + HF + ARGUMENTS + text + "\n", tmp_path)) == fires


def test_an_object_that_is_made_in_two_ways_has_what_both_have(tmp_path: Path) -> None:
    made = "LOGS = False\naccelerator = Accelerator(log_with='x') if LOGS else Accelerator()\nprint(accelerator.use_fp16)\n"
    assert found("attributes_missing", HEAD + made + HF + ARGUMENTS, tmp_path)


@pytest.mark.parametrize(("rule", "fires", "silent"), [
    ("cache_emptied_in_loop", loop(*PLAIN, "torch.cuda.empty_cache()"),
     loop(*PLAIN, "if stop:", "    torch.cuda.empty_cache()", "    break")),
    ("losses_kept_with_graph", loop("loss = model(batch).mean()", *PLAIN[1:], "total += loss", before="total = 0\n"),
     loop("count = (batch > 0).sum().item()", "loss = model(batch).mean()", "(loss / count).backward()", *PLAIN[2:],
          "total += count", before="total = 0\n")),
    ("sampler_missing", loop(*PLAIN, before="model = DistributedDataParallel(model)\n"),
     loop(*PLAIN, before="model = DistributedDataParallel(model)\n").replace("batch_size=8, shuffle=True", "batch_size=None")),
    ("one_process_waits", "rank = dist.get_rank()\nmaster = rank == 0\nif master:\n    dist.barrier()\n", (
        "rank = dist.get_rank()\nmaster = rank != 1\nif master:\n    dist.barrier()\n"))])
def test_what_was_wrong_in_public_code_is_not_said_again(rule: str, fires: str, silent: str, tmp_path: Path) -> None:
    texts = [text if text.startswith("import gc") else loop(*PLAIN, before=text) for text in (fires, silent)]
    assert [bool(found(rule, text, tmp_path)) for text in texts] == [True, False]


@pytest.mark.parametrize(("line", "listed", "fires"), [
    ("import wandb", "transformers\n", True), ("import wandb", "transformers\nwandb==0.17\n", False),
    ("if use_wandb:\n    import wandb", "transformers\n", False),
    ("try:\n    import wandb\nexcept ImportError:\n    wandb = None", "transformers\n", False),
    ("from peft import LoraConfig", "unsloth\n", False), ("from peft import LoraConfig", "transformers\n", True),
    ("import wandb", None, False)])
def test_what_is_imported_is_listed(line: str, listed: str | None, fires: bool, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("pip install -r requirements.txt\n", encoding="utf-8")
    if listed is not None:
        (tmp_path / "requirements.txt").write_text(f"{listed}trl\naccelerate\n".replace("trl\n", ""), encoding="utf-8")
    text = HEAD.replace("from trl import SFTConfig, SFTTrainer\n", "") + f"{line}\n" + HF + ARGUMENTS
    made = found("packages_unlisted", text + "Trainer(model, args, train_dataset=rows).train()\n", tmp_path)
    assert [each.severity for each in made] == (["critical"] if fires else [])


@pytest.mark.parametrize(("command", "fires"), [
    ("accelerate launch --config_file zero3.yaml train.py", True), ("python train.py", False)])
def test_a_trainer_gathers_sharded_weights_from_all_processes(command: str, fires: bool, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{command}\n", encoding="utf-8")
    text = HEAD + HF + ARGUMENTS + ("trainer = Trainer(model, args, train_dataset=rows)\ntrainer.train()\n"
                                    "if trainer.accelerator.is_main_process:\n    trainer.save_model('last')\n")
    assert bool(found("one_process_waits", text, tmp_path)) == fires


@pytest.mark.parametrize(("wrapped", "fires"), [("", True), ("model = torch.nn.DataParallel(model)\n", False)])
def test_a_model_without_a_wrapper_has_no_module(wrapped: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD + HF + wrapped + ARGUMENTS + ("Trainer(model, args, train_dataset=rows).train()\n"
                                              "model.module.save_pretrained('x')\n")
    assert bool(found("attributes_missing", text, tmp_path)) == fires
    asked = text.replace("\nmodel.module", "\nif hasattr(model, 'module'):\n    model.module")
    assert found("attributes_missing", asked, tmp_path) == []


def test_what_the_options_are_given_later_does_not_hide_those_that_are_missing(tmp_path: Path) -> None:
    text = HEAD + PARSED + "args.steps = 10\nprint(args.steps, args.rate{more})\n"
    assert found("options_missing", text.format(more=", args.size"), tmp_path)
    assert found("options_missing", text.format(more=""), tmp_path) == []


def test_a_function_that_nobody_calls_has_the_defaults_of_the_dataclass_that_it_is_given(tmp_path: Path) -> None:
    text = HEAD + HF + ("from dataclasses import dataclass\n@dataclass\nclass Told:\n    each: int = 200\n"
                        "    kept: int = {kept}\ndef train(told: Told):\n"
                        "    args = TrainingArguments('out', eval_strategy='steps', save_strategy='steps', "
                        "eval_steps=told.each, save_steps=told.kept, load_best_model_at_end=True)\n"
                        "    Trainer(model, args, train_dataset=rows, eval_dataset=rows).train()\n")
    assert found("best_checkpoint_intervals", text.format(kept=500), tmp_path)
    assert found("best_checkpoint_intervals", text.format(kept=400), tmp_path) == []


OF_ROWS = ("from datasets import load_dataset\nrows = load_dataset('json', data_files='rows.jsonl')['train']\n"
           "rows = rows.map(lambda row: {{'text': {text}}})\n" + HF + SFT.format(args="", more=""))


@pytest.mark.parametrize(("rule", "text", "rows", "fires"), [
    ("column_not_there", "row['question']", '{"instruction": "a", "output": "b"}', True),
    ("column_not_there", "row['instruction']", '{"instruction": "a", "output": "b"}', False),
    ("column_not_there", "row['question'] if 'question' in row else ''", '{"instruction": "a"}', False),
    ("column_not_there", "row['question']", "not json", False),
    ("column_not_there", "row['text']", '{"instruction": "a"}', False),
    ("column_left_out", "row['instruction'] + row['output']", '{"instruction": "a", "input": "c", "output": "b"}', True),
    ("column_left_out", "row['instruction'] + row['output']", '{"instruction": "a", "input": "", "output": "b"}', False),
    ("column_left_out", "row['instruction'] + row['input']", '{"instruction": "a", "input": "c", "output": "b"}', False),
    ("answers_alone", "row['output']", '{"instruction": "a", "output": "b"}', True),
    ("answers_alone", "row['text']", '{"text": "a"}', False)])
def test_the_columns_of_the_projects_own_data_are_read(rule: str, text: str, rows: str, fires: bool, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{rows}\n", encoding="utf-8")
    assert bool(found(rule, HEAD + OF_ROWS.format(text=text), tmp_path)) == fires
    renamed = OF_ROWS.format(text=text).replace("['train']", "['train'].rename_column('a', 'b')")
    assert rule == "answers_alone" or found(rule, HEAD + renamed, tmp_path) == []


@pytest.mark.parametrize(("name", "text"), [("rows.json", '[{"ask": 1, "say": 2}]'), ("rows.jsonl", '{"ask": 1, "say": 2}\n'),
                                            ("rows.csv", "ask,say\n1,2\n")])
def test_columns_of_a_file(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert columns_of(tmp_path / name) == {"ask": 1.0, "say": 1.0}


@pytest.mark.parametrize(("rule", "text", "fires"), [
    ("formatting_gives_many", FORMATTED.replace("return", "return list(texts) if row else").format(given="texts"), False),
    ("formatting_gives_many", FORMATTED.format(given="list(texts)"), True),
    ("never_saved", "np.save('rows.npy', rows)\n", True), ("never_saved", "open('w.bin', 'wb').write(b'')\n", False),
    ("rows_not_tokenised", "from transformers import BertForSequenceClassification\n", True)])
def test_near_misses_of_new_rules(rule: str, text: str, fires: bool, tmp_path: Path) -> None:
    ends = {"formatting_gives_many": HF + SFT.format(args="", more=", formatting_func=told"), "never_saved": "",
            "rows_not_tokenised": "model = BertForSequenceClassification.from_pretrained('bert-base-uncased')\n" + ARGUMENTS
            + "from datasets import load_dataset\nrows = load_dataset('a/b', split='train')\n"
            + "Trainer(model, args, train_dataset=rows).train()\n"}
    trained = loop(*PLAIN, before="import numpy as np\n", after=text) if rule == "never_saved" else HEAD + text + ends[rule]
    assert bool(found(rule, trained, tmp_path)) == fires


AXOLOTL = "base_model: x\nmicro_batch_size: 1\ndatasets:\n  - path: rows.jsonl\n    type: {type}\n{more}"
FACTORY = ("model_name_or_path: {model}\nstage: sft\nfinetuning_type: lora\ndataset: {data}\ntemplate: {template}\n"
           "cutoff_len: 512\n")
TORCHTUNE = ("model:\n  _component_: torchtune.models.llama3.llama3_8b\noptimizer:\n  _component_: torch.optim.AdamW\n"
             "  lr: 2e-5\ncheckpointer:\n  _component_: torchtune.{room}.FullModelHFCheckpointer\n  checkpoint_dir: x\n"
             "batch_size: 2\n")


@pytest.mark.parametrize(("rule", "fires", "silent"), [
    ("template_of_other_model", FACTORY.format(model="Qwen/Qwen2.5-7B", data="a", template="llama3"),
     FACTORY.format(model="meta-llama/Llama-3.1-8B", data="a", template="llama3")),
    ("template_of_other_model", FACTORY.format(model="mistralai/Mistral-7B-v0.3", data="a", template="qwen"),
     FACTORY.format(model="mine", data="a", template="qwen")),
    ("data_given_twice", FACTORY.format(model="x", data="a,b,a", template="qwen"),
     FACTORY.format(model="x", data="a,b", template="qwen")),
    ("placeholder_left", FACTORY.format(model="path/to/your/model", data="a", template="qwen"),
     FACTORY.format(model="paths/mine", data="a", template="qwen")),
    ("components_moved", TORCHTUNE.format(room="utils"), TORCHTUNE.format(room="training")),
    ("evaluation_never", AXOLOTL.format(type="alpaca", more="eval_steps: 100\nval_set_size: 0\n"),
     AXOLOTL.format(type="alpaca", more="eval_steps: 100\nval_set_size: 0.05\n")),
    ("evaluation_never", AXOLOTL.format(type="alpaca", more="evals_per_epoch: 4\n"),
     AXOLOTL.format(type="alpaca", more="evals_per_epoch: 4\ntest_datasets:\n  - path: other.jsonl\n")),
    ("format_gone", AXOLOTL.format(type="sharegpt", more=""), AXOLOTL.format(type="chat_template", more=""))])
def test_configs_of_other_tools_say_what_the_tools_can_do(rule: str, fires: str, silent: str, tmp_path: Path) -> None:
    said = []
    for text in (fires, silent):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        said.append([each.rule for each in BY_NAME[rule].find(read_subject(path), TODAY)])
    assert said == [[rule], []]


def test_weights_that_deepspeed_keeps_in_fp32_are_not_trained_in_half_precision(tmp_path: Path) -> None:
    text = HEAD + HF.replace("'gpt2'", "'gpt2', dtype=torch.bfloat16") + ARGUMENTS + "Trainer(model, args).train()\n"
    assert found("half_weights_trained", text, tmp_path)
    (tmp_path / "run.sh").write_text("accelerate launch --config_file zero3.yaml train.py\n", encoding="utf-8")
    assert not found("half_weights_trained", text, tmp_path)


def test_code_behind_a_false_that_is_written_out_is_never_reached(tmp_path: Path) -> None:
    loads = "{test}:\n    other = AutoModelForCausalLM.from_pretrained('x', use_flash_attention_2=True)\n" + HF + ARGUMENTS
    assert found("removed_call_arguments", HEAD + loads.format(test="if True"), tmp_path)
    assert not found("removed_call_arguments", HEAD + loads.format(test="if False"), tmp_path)


@pytest.mark.parametrize(("loads", "fires"), [("AutoModelForCausalLM", True), ("AutoTokenizer", False)])
def test_a_model_is_not_loaded_with_the_token_of_old(loads: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD + f"other = {loads}.from_pretrained('x', use_auth_token=None)\n" + HF + ARGUMENTS
    assert bool(found("removed_call_arguments", text, tmp_path)) == fires


def test_unsloth_takes_what_trl_no_longer_does(tmp_path: Path) -> None:
    text = ("from trl import SFTConfig, SFTTrainer\n" + HF + "args = SFTConfig('out', warmup_ratio=0.1)\n"
            "SFTTrainer(model=model, args=args, train_dataset=rows, infinite=True).train()\n")
    used = "FastLanguageModel.from_pretrained('x')\n" + text
    for rule in ("removed_names", "arguments_not_taken"):
        assert found(rule, HEAD + text, tmp_path)
        assert not found(rule, "from unsloth import FastLanguageModel\n" + HEAD + used, tmp_path)
        assert found(rule, HEAD + "from unsloth import FastLanguageModel\n" + used, tmp_path)


def test_a_class_that_is_put_beside_another_has_what_that_one_has(tmp_path: Path) -> None:
    mixin = "class Mixin:\n    def told(self):\n        return self.accelerator\n"
    text = (HF + ARGUMENTS + mixin + "class Own({bases}):\n    pass\ntrainer = Own(model, args)\ntrainer.train()\n"
            "print(trainer.told())\n")
    assert found("attributes_missing", HEAD + text.format(bases="Mixin"), tmp_path)
    assert not found("attributes_missing", HEAD + text.format(bases="Mixin, Trainer"), tmp_path)


def test_adapters_are_there_where_their_model_is_moved_at_once(tmp_path: Path) -> None:
    text = ("import sys\nfrom peft import LoraConfig, get_peft_model\n" + HF + "if len(sys.argv) > 1:\n"
            "    model = get_peft_model(model, LoraConfig()){moved}\n    model.print_trainable_parameters()\n{after}"
            + ARGUMENTS + "Trainer(model, args).train()\n")
    for moved in ("", ".to('cuda')", ".cuda()"):
        assert not found("adapters_asked_of_base", HEAD + text.format(moved=moved, after=""), tmp_path)
    assert found("adapters_asked_of_base", HEAD + text.format(moved="", after="model.print_trainable_parameters()\n"), tmp_path)


@pytest.mark.parametrize(("gives", "fires"), [("Told(parser.parse_args())", False), ("parser.parse_args()", True)])
def test_what_a_function_makes_of_the_command_line_has_its_own_names(gives: str, fires: bool, tmp_path: Path) -> None:
    text = ("import argparse\nclass Told:\n    def __init__(self, args):\n        for name in ('own',):\n"
            "            setattr(self, name, 1)\ndef parse_args():\n    parser = argparse.ArgumentParser()\n"
            f"    parser.add_argument('--rate')\n    return {gives}\nargs = parse_args()\nprint(args.other)\n" + HF
            + ARGUMENTS.replace("args =", "told =") + "Trainer(model, told).train()\n")
    assert bool(found("options_missing", HEAD + text, tmp_path)) == fires
