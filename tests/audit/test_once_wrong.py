"""What the audit once said of public code and was not so: a rule fires in the plain case, and not in that one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from code_cases import ARGUMENTS, CASES, HEAD, HF, MAPPED, PLAIN, TOKENIZER, loop
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


OLD_SFT = (HEAD + HF + "from trl import SFTTrainer\n{before}SFTTrainer(model, args=TrainingArguments('out'), "
           "train_dataset=rows, {argument}=x).train()\n")
PADDED = HEAD + TOKENIZER + ("{before}def told(row):\n    return tokenizer(row, padding='max_length', max_length=512)\n"
                             + HF + ARGUMENTS + "Trainer(model, args, train_dataset=rows.map(told)).train()\n")
EMPTYING = "torch.cuda.empty_cache()"
TRAINED = ARGUMENTS + "Trainer(model, args).train()\n"
RENAMED = PROGRAM_CASES["adapter_file_renamed"][0]
OWN_TRAINER = ("class Tuned:\n    def train(self, rows):\n        trainer = {kind}(model)\n        trainer.train()\n"
               "trainer = Tuned()\ntrainer.train(rows)\n")
WRAPPED = PROGRAM_CASES["method_of_wrapped_model"][0]
LISTED = HEAD + "{said}import wandb\n" + HF + TRAINED
STARTED = "accelerate launch --config_file {config} train.py\n"
FAST = HEAD + HF + ("{before}args = TrainingArguments('out', learning_rate=3e-3)\n"
                    "Trainer(model, args, train_dataset=rows).train()\n")
PREFIXES = ("from peft import PrefixTuningConfig, get_peft_model\n"
            "model = get_peft_model(model, PrefixTuningConfig(task_type='CAUSAL_LM'))\n")
LOADED = "\nfrom transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained('{path}')\n"
IN_FP32 = PROGRAM_CASES["loop_in_fp32"][0]
BY_KIND = ("def length(text):\n    if {asks}:\n        found = 1\n    else:\n        print('of no kind')\n    return found\n"
           "print(length(read()))\n") + TRAINED
SNAPSHOT = loop(*PLAIN, before="from dataclasses import asdict, dataclass\n@dataclass\nclass State:\n    weights: dict\n"
                "    rest: tuple\n", after=(
                    "    state = State(model.state_dict(), (optimizer.state_dict(), scheduler.state_dict(), epoch))\n"
                    "    {then}\n"
                "    torch.save(kept, 'last.pt')\n"))
OF_HYDRA = ("import hydra\nfrom own import register\nregister()\n@hydra.main(config_path='conf', config_name='base')\n"
            "def main(config):\n    hydra.utils.instantiate(config.trainer).fit(1)\nmain()\n")
EAGER = HEAD + ("model = AutoModelForCausalLM.from_pretrained('{name}', attn_implementation='eager')\n") + TRAINED
SAMPLED = CASES["sampler_without_epoch"][0]
COMPILED = HEAD + ("from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('x')\n"
                   "model = torch.compile(model{how})\nrows = tokenizer(texts, padding='longest')\n") + TRAINED
CACHED = HEAD + HF + ("from transformers.cache_utils import DynamicCache\nclass Own(nn.Module):\n"
                      "    def forward(self, x, use_cache):\n        if {asks}:\n"
                      "            x = DynamicCache.from_legacy_cache(x)\n        return x\nmodel = Own()\n") + TRAINED
WRITTEN = HEAD + HF + TRAINED + "with open('outputs/told.txt', 'w') as file:\n    file.write('a')\n"
SCALED = HEAD + ("from accelerate import Accelerator\naccelerator = Accelerator(mixed_precision='bf16')\n"
                 "with {how}:\n    loss = model(batch)\nloss.backward()\n")
GENERATING = HEAD + ("class Own(nn.Module):\n    def generate(self, ids, mask=None, **more):\n"
                     "        return self.model.generate(ids, mask=mask, **more)\n"
                     "own = Own()\ndef draw(ids):\n    more = {{'mask': 1, 'top_k': 5}}\n"
                     "    return own.generate(ids, {mask}**more)\ndraw(1)\n") + TRAINED
IMPORTING = "from model.loader import load\nload()\n" + HEAD + TRAINED
IN_HALF = HEAD + ("from transformers import AutoModelForCausalLM\n"
                       "model = AutoModelForCausalLM.from_pretrained('x', dtype=torch.float16)\n{then}"
                       "args = TrainingArguments('out', fp16=True)\nTrainer(model, args).train()\n")
ONCE_WRONG = {
    "products in TF32": (
        "loop_in_fp32", IN_FP32, IN_FP32 + "torch.backends.cuda.matmul.allow_tf32 = True\n", {}),
    "a checkpoint that is bf16": (
        "loop_in_fp32", HEAD + LOADED.format(path="gpt2") + IN_FP32.removeprefix(HEAD),
        HEAD + LOADED.format(path="Qwen/Qwen3-0.6B") + IN_FP32.removeprefix(HEAD), {}),
    "a checkpoint of a dtype that is not known": (
        "loop_in_fp32", HEAD + LOADED.format(path="gpt2") + IN_FP32.removeprefix(HEAD),
        HEAD + LOADED.format(path="own/model") + IN_FP32.removeprefix(HEAD), {}),
    "a model that comes from elsewhere": (
        "loop_in_fp32", IN_FP32, IN_FP32.replace("nn.Linear(8, 8)", "given()"), {}),
    "norms in bf16, where a decay rounds away": (
        "norms_decayed", PROGRAM_CASES["norms_decayed"][0],
        PROGRAM_CASES["norms_decayed"][0] + "model = model.bfloat16()\n", {}),
    "documents that end in a token": (
        "documents_concatenated", CASES["documents_concatenated"][0],
        CASES["documents_concatenated"][0].replace("sum(examples[k]", "sum(with_eos(examples[k])"), {}),
    "a function compiled for any length": (
        "compile_changing_lengths", COMPILED.format(how=""), COMPILED.format(how=", dynamic=True"), {}),
    "code behind an exit": (
        "names_out_of_reach", RUNNING_CASES["names_out_of_reach"][0],
        "raise SystemExit\n" + RUNNING_CASES["names_out_of_reach"][0], {}),
    "autocast of accelerate, which follows its precision": (
        "both_half_precisions", SCALED.format(how="torch.autocast('cuda')"), SCALED.format(how="accelerator.autocast()"), {}),
    "an argument that the own method takes out of a dictionary": (
        "keyword_twice", GENERATING.format(mask="mask=1, "), GENERATING.format(mask=""), {}),
    "fp16 weights that are frozen below adapters": (
        "fp16_weights_unscaled", IN_HALF.format(then=""),
        IN_HALF.format(then="from peft import PeftModel\nmodel = PeftModel.from_pretrained(model, 'x')\n"), {}),
    "an absolute import from a package": (
        "names_not_in_module", IMPORTING, IMPORTING, {
            "model/loader.py": "from config import Size\ndef load():\n    return Size()\n", "model/__init__.py": "",
            "model/config.py": "class Other:\n    pass\n", "config.py": "class {Other|Size}:\n    pass\n"}),
    "prefixes that are learned": (
        "learning_rate_unfit", FAST.format(before=""), FAST.format(before=PREFIXES), {}),
    "a notebook of Databricks": (
        "undefined_names", HEAD + HF + "print(told)\n" + TRAINED,
        "# Databricks notebook source\n" + HEAD + HF + "print(told)\n" + TRAINED, {}),
    "Unsloth is imported whole": (
        "removed_names", OLD_SFT.format(before="", argument="tokenizer"),
        "import unsloth\n" + OLD_SFT.format(before=UNSLOTH, argument="tokenizer"), {}),
    "a trainer of Unsloth's own": (
        "removed_names", OLD_SFT.format(before="", argument="tokenizer"),
        UNSLOTH + OLD_SFT.format(before="", argument="tokenizer").replace("from trl import SFTTrainer", (
            "from unsloth.trainer import SFTTrainer")).replace("from trl import SFTConfig, SFTTrainer\n", ""), {}),
    "an argument of Unsloth's model": (
        "removed_names", OLD_SFT.format(before="", argument="max_seq_length"),
        OLD_SFT.format(before=UNSLOTH.replace("Fast", "model, tokenizer = Fast").replace(
            "import model, tokenizer = ", "import ").replace("('x')", "('x', max_seq_length=512)"), argument="formatting_func"),
        {}),
    "a text that is scored": (
        "padding_to_max_length", PADDED.format(before=""), PADDED.format(before="@torch.no_grad()\n"), {}),
    "memory that has run out": ("cache_emptied_in_loop", loop(*PLAIN, EMPTYING), loop(
        *PLAIN, f"try:\n            pass\n        except torch.cuda.OutOfMemoryError:\n            {EMPTYING}"), {}),
    "a file that the project writes": ("adapter_file_renamed", RENAMED, RENAMED + "torch.save(model.state_dict(), name)\n", {}),
    "a trainer within a trainer": (
        "missing_arguments", HEAD + HF + OWN_TRAINER.format(kind="Tuned"), HEAD + HF + OWN_TRAINER.format(kind="Trainer"), {}),
    "names of Python 2": ("undefined_names", HEAD + HF + "text = unicode('a')\n" + TRAINED, HEAD + HF + (
        "import sys\nif sys.version_info[0] == 2:\n    text = unicode('a')\n") + TRAINED, {}),
    "a folder of the project": (
        "remote_code_unpinned", HEAD + REMOTE.format(kind="AutoModelForCausalLM", path="someone/tuned"),
        HEAD + REMOTE.format(kind="AutoModelForCausalLM", path="checkpoints/tuned"), {}),
    "packages that the script says": (
        "packages_unlisted", LISTED.format(said=""), LISTED.format(said="# pip install -U \\\n#   transformers wandb\n"),
        {"requirements.txt": "transformers\ntorch\naccelerate\ntrl\n"}),
    "kinds of values that all callers give": (
        "given_in_some_cases", HEAD + HF + BY_KIND.format(asks="text == 'short'"),
        HEAD + HF + BY_KIND.format(asks="isinstance(text, str)"), {}),
    "a snapshot of a dataclass": (
        "checkpoint_cannot_resume", SNAPSHOT.format(then="kept = state.weights"), SNAPSHOT.format(then="kept = asdict(state)"),
        {}),
    "configs that code registers": (
        "command_refused", OF_HYDRA, OF_HYDRA, {
            "run.sh": "python train.py rate=1 model=gpt2\n", "conf/base.yaml": "rate: 1\n", "own.py": (
                "def register():\n    from hydra.core.config_store import {OtherStore|ConfigStore}\n")}),
    "groups of configs that lie deeper": (
        "command_refused", OF_HYDRA.replace("'conf'", "'conf/all'"), OF_HYDRA.replace("'conf'", "'conf/all'"), {
            "run.sh": "python train.py rate=1 {other|model}=gpt2\n", "conf/a.yaml": "", "conf/all/base.yaml": (
                "defaults:\n  - _self_\n  - model: ???\nrate: 1\n"), "conf/all/model/gpt2.yaml": "layers: 2\n"}),
    "garbage that is collected": ("cache_emptied_in_loop", loop(*PLAIN, EMPTYING), loop(*PLAIN, "gc.collect()"), {}),
    "a model that knows no other attention": (
        "attention_eager", EAGER.format(name="Qwen/Qwen3-4B"), EAGER.format(name="google/gemma-2-9b"), {}),
    "a sampler of the evaluation": (
        "sampler_without_epoch", SAMPLED, SAMPLED.replace("sampler =", "val_sampler ="), {}),
    "a sampler of a validation set": (
        "sampler_without_epoch", SAMPLED.replace("(data)", "(data, rank=device_of_interval)"),
        SAMPLED.replace("(data)", "(validation_data)"), {}),
    "what generates alone": (
        "removed_imports", CACHED.format(asks="model.training"), CACHED.format(asks="use_cache"), {}),
    "the folder that Hydra makes": (
        "folder_never_made", WRITTEN, "import hydra\n@hydra.main(config_path='conf')\ndef start(config):\n    pass\n" + WRITTEN,
        {}),
    "DeepSpeed's engine passes methods on": (
        "method_of_wrapped_model", WRAPPED, WRAPPED, {"run.sh": STARTED.format(config="a.yaml"),
                                                      "a.yaml": "distributed_type: {NO|DEEPSPEED}\n"}),
}


@pytest.mark.parametrize("case", ONCE_WRONG)
def test_what_was_wrong_of_public_code_is_not_said_again(case: str, tmp_path: Path) -> None:
    rule, fires, silent, files = ONCE_WRONG[case]
    said = []
    for place, text in enumerate((fires, silent)):
        folder = tmp_path / str(place)
        (folder / ".git").mkdir(parents=True)
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(re.sub(r"\{(\w+)\|(\w+)\}", rf"\{place + 1}", content), encoding="utf-8")
        said.append(bool(severities(rule, text, folder)))
    assert said == [True, False]


def test_a_config_is_looked_for_from_a_root_without_files(tmp_path: Path) -> None:
    for folder in (".git", "scripts", "src"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / "a.yaml").write_text("x: 1\n", encoding="utf-8")
    for name, says in (("b", ["critical"]), ("a", [])):
        command = STARTED.format(config=f"./scripts/{name}.yaml").replace("train.py", "src/train.py")
        (tmp_path / "scripts" / "run.sh").write_text(command, encoding="utf-8")
        assert severities("file_missing", HEAD + HF + ARGUMENTS, tmp_path / "src") == says


@pytest.mark.parametrize(("steps", "says"), [(1, "moderate"), (49, "moderate"), (50, "low")])
def test_a_cache_that_is_seldom_emptied_costs_little(steps: int, says: str, tmp_path: Path) -> None:
    text = HEAD + HF + f"args = TrainingArguments('out', torch_empty_cache_steps={steps})\nTrainer(model, args).train()\n"
    assert severities("cache_emptied", text, tmp_path) == [says]


@pytest.mark.parametrize(("release", "says"), [("4.57.0", "moderate"), ("5.23.0", "low")])
def test_transformers_5_evaluates_when_a_run_ends(release: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + HF + "args = TrainingArguments('out', max_steps=50, logging_steps=5, eval_strategy='steps',"
                    " eval_steps=100)\nTrainer(model, args).train()\n", encoding="utf-8")
    where = Circumstances(software=Software({"transformers": release}, {}))
    assert [each.severity for each in BY_NAME["intervals_never_fire"].find(read_subject(path), where)] == [says]


ENDED = "import sys\n{ends}\n" + RUNNING_CASES["names_out_of_reach"][0]
SEVERITY_OF = {
    "an end of something else": ("names_out_of_reach", ENDED.format(ends="driver.quit()"), ["critical"]),
    "an end of the run": ("names_out_of_reach", ENDED.format(ends="sys.exit()"), []),
    "a cache emptied beside generation": (
        "cache_emptied_in_loop", loop(*PLAIN, EMPTYING, "model.generate(batch)"), ["low"]),
    "a cache emptied at each step": ("cache_emptied_in_loop", loop(*PLAIN, EMPTYING), ["moderate"]),
    "eager attention below Unsloth": ("attention_eager", UNSLOTH + EAGER.format(name="x"), ["low"]),
    "eager attention": ("attention_eager", EAGER.format(name="x"), ["moderate"]),
    "a rate below the usual one": ("learning_rate_unfit", FAST.format(before="").replace("3e-3", "1e-9"), ["low"]),
    "a rate above the usual one": ("learning_rate_unfit", FAST.format(before=""), ["moderate"]),
}


@pytest.mark.parametrize("case", SEVERITY_OF)
def test_a_finding_is_as_severe_as_judges_found_it(case: str, tmp_path: Path) -> None:
    rule, text, says = SEVERITY_OF[case]
    assert severities(rule, text, tmp_path) == says
