"""The rules on what ends a run or keeps it from learning: each fires where its cause is, and is silent in a near miss."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from audit_subjects import software
from code_cases import ARGUMENTS, HEAD, HF, MADE, PARALLEL, PLAIN, TOKENIZER, loop
from meaning_cases import MEANING_CASES
from network_cases import NETWORK_CASES
from running_cases import CALLED, FIRST, HELPER, LOADED, NETWORK, OF_ONE_LAYER, PARSED, RUNNING_CASES

from powertrain.audit.audit import read_subject
from powertrain.audit.installed import LIBRARIES, defined, is_missing, lacks, parameters, release
from powertrain.audit.rules import RULES
from powertrain.audit.subject import Circumstances

BY_NAME = {rule.name: rule for rule in RULES}
WITH_RELEASES = Circumstances(software=software())


def said(name: str, text: str, folder: Path, where: Circumstances = WITH_RELEASES) -> list[str]:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return [finding.why for finding in BY_NAME[name].find(read_subject(path), where)]


ENDING = RUNNING_CASES | NETWORK_CASES | MEANING_CASES


@pytest.mark.parametrize("name", ENDING)
def test_a_rule_fires_where_its_cause_is(name: str, tmp_path: Path) -> None:
    assert len(said(name, ENDING[name][0], tmp_path)) == 1


@pytest.mark.parametrize("name", ENDING)
def test_a_rule_is_silent_in_its_near_miss(name: str, tmp_path: Path) -> None:
    assert said(name, ENDING[name][1], tmp_path) == []


@pytest.mark.parametrize("line", ["from transformers import AdamW", "from trl import PPOTrainer",
                                  "from transformers import BloomTokenizerFast", "from transformers import JukeboxTokenizer",
                                  "from trl.core import LengthSampler", "from trl.trainer.utils import SIMPLE_CHAT_TEMPLATE",
                                  "import transformers.deepspeed",
                                  "from datasets import load_metric", "import transformers\nprint(transformers.TextDataset)"])
def test_names_that_the_release_in_force_does_not_have_are_said(line: str, tmp_path: Path) -> None:
    assert len(said("removed_imports", f"{line}\n{HEAD}{ARGUMENTS}", tmp_path)) == 1
    guarded = "try:\n    " + line.replace("\n", "\n    ") + "\nexcept (ImportError, AttributeError):\n    pass\n"
    assert said("removed_imports", guarded + HEAD + ARGUMENTS, tmp_path) == []


@pytest.mark.parametrize("line", ["from transformers import LlamaForCausalLM, Trainer, set_seed", "from trl import SFTTrainer",
                                  "from trl.trainer.utils import get_peft_config",
                                  "from trl.experimental.ppo import PPOTrainer",
                                  "from transformers import T5TokenizerFast, ElectraTokenizer, LEDTokenizerFast",
                                  "from datasets import Features, load_dataset", "from torch.utils.data import DataLoader",
                                  "from transformers.trainer_utils import get_last_checkpoint",
                                  "from torch.cuda.amp import autocast"])
def test_names_that_it_has_are_not(line: str, tmp_path: Path) -> None:
    assert said("removed_imports", f"{line}\n{HEAD}{ARGUMENTS}", tmp_path) == []


TRAINED = HEAD + ARGUMENTS + "trainer = Trainer(model, args)\nresult = trainer.train()\nprint({asked})\n"
ON_ONE = HEAD + "{first}model = AutoModelForCausalLM.from_pretrained('gpt2', device_map='cuda')\n" + ARGUMENTS + (
    "Trainer(model, args, train_dataset=rows).train()\n")
IN_HALF = HEAD + "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype=torch.bfloat16)\n{then}" + ARGUMENTS + (
    "Trainer(model, args, train_dataset=rows).train()\n")
OWN_STEPS = HEAD + ("class Own:\n    def __init__(self, network):\n"
                    "        self.optimizer = torch.optim.AdamW(network.parameters(), lr={rate})\n"
                    "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype=torch.{type}).to('cuda')\n{then}"
                    "own = Own(model)\n"
                    "for batch in rows:\n    loss = model(**batch).loss\n    loss.backward()\n    own.optimizer.step()\n")
JUDGED = loop("model.eval()", *PLAIN, before="class Network(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
              "        self.layer = nn.{layer}\nmodel = Network()\n")
RESUMED = HEAD + ("import argparse\ndef options():\n    return {options}\nargs = options()\n"
                  "torch.save({{'model': model.state_dict(), 'args': args}}, 'last.pt')\n"
                  "state = torch.load('last.pt')\nprint(state['model'])\n")


@pytest.mark.parametrize(("rule", "text", "defect", "none"), [
    ("attributes_missing", TRAINED, {"asked": "trainer.training_loss"}, {"asked": "result.training_loss"}),
    ("arguments_lacking", TRAINED, {"asked": "nn.Linear(4)"}, {"asked": "nn.Linear(4, 8)(rows)"}),
    ("arguments_lacking", TRAINED, {"asked": "torch.softmax(rows)"}, {"asked": "torch.softmax(rows, -1)"}),
    ("device_map_in_processes", ON_ONE, {"first": ""},
     {"first": "from transformers import HfArgumentParser\n"
               "asked, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"}),
    ("half_weights_trained", IN_HALF, {"then": ""},
     {"then": "from peft import PeftModel\n"
              "model = PeftModel.from_pretrained(model, 'adapter', is_trainable=True)\n"}),
    ("half_weights_trained", OWN_STEPS, {"rate": "1e-6", "type": "bfloat16", "then": ""},
     {"rate": "1e-6", "type": "float32", "then": ""}),
    ("half_weights_trained", OWN_STEPS, {"rate": "1e-3", "type": "float16", "then": ""},
     {"rate": "1e-3", "type": "float16", "then": "model = model.float()\n"}),
    ("evaluation_mode_left_on", JUDGED, {"layer": "Dropout(0.1)"}, {"layer": "Linear(8, 8)"}),
    ("own_objects_refused", RESUMED, {"options": "argparse.ArgumentParser().parse_args()"}, {"options": "dict(width=8)"})])
def test_what_readers_of_public_code_called_no_defect_is_none(rule: str, text: str, defect: dict[str, str],
                                                              none: dict[str, str], tmp_path: Path) -> None:
    assert len(said(rule, text.format(**defect), tmp_path)) == 1
    assert said(rule, text.format(**none), tmp_path) == []


@pytest.mark.parametrize(("rate", "severity"), [("1e-6", "critical"), ("1e-5", "moderate")])
def test_bf16_weights_stand_still_at_a_small_rate(rate: str, severity: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(OWN_STEPS.format(rate=rate, type="bfloat16", then=""), encoding="utf-8")
    made = BY_NAME["half_weights_trained"].find(read_subject(path), WITH_RELEASES)
    assert [each.severity for each in made] == [severity]


@pytest.mark.parametrize(("lines", "fires"), [
    ("settings = {'r': 8}\nsettings['ranks'] = 8\nLoraConfig(**settings)\n", True),
    ("settings = {'r': 8}\nsettings.pop('r')\nLoraConfig(**settings)\n", False),
    ("settings = dict(r=8, ranks=8)\nLoraConfig(**settings)\n", True), ("LoraConfig(**told)\n", False),
    ("tokenizer = AutoTokenizer.from_pretrained('gpt2')\ntokenizer.push_to_hub('x', use_temp_dir=False)\n", True),
    ("class Own(Trainer):\n    def __init__(self, tokenizer):\n        super().__init__(tokenizer=tokenizer)\nOwn(1)\n", True),
    ("class Base(Trainer):\n    pass\nclass Own(Base):\n    pass\nOwn(tokeniser=1)\n", True),
    ("class Own(Trainer):\n    def __init__(self, tokenizer):\n        super().__init__()\nOwn(tokenizer=1)\n", False)])
def test_arguments_are_looked_up_wherever_a_library_takes_them(lines: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD + "from peft import LoraConfig\n" + lines + ARGUMENTS
    assert bool(said("arguments_not_taken", text, tmp_path)) == fires


@pytest.mark.parametrize(("line", "fires"), [
    ("from accelerate import DistributedType\nprint(DistributedType.TPU)\n", True),
    ("from accelerate import DistributedType\nprint(DistributedType.MULTI_GPU.value)\n", False),
    ("from huggingface_hub import Repository\n", True), ("from huggingface_hub import HfApi, create_repo\n", False),
    ("print(AutoTokenizer.from_pretrained)\n", False)])
def test_a_class_and_the_hub_are_asked_for_what_they_have(line: str, fires: bool, tmp_path: Path) -> None:
    assert bool(said("removed_imports", HEAD + line + ARGUMENTS, tmp_path)) == fires


@pytest.mark.parametrize(("name", "fires"), [("overwrite_output_dir", True), ("output_dir", False), ("own", False)])
def test_the_arguments_of_the_command_line_have_their_attributes(name: str, fires: bool, tmp_path: Path) -> None:
    text = ("from dataclasses import dataclass\nfrom transformers import HfArgumentParser\n"
            "@dataclass\nclass Own:\n    own: int = 1\ndef told(args):\n    return args.{name}\n"
            "parser = HfArgumentParser((Own, TrainingArguments))\n"
            "own, args = parser.parse_args_into_dataclasses()\nTrainer(None, args).train()\nprint(told(args))\n")
    assert bool(said("attributes_missing", HEAD + text.format(name=name), tmp_path)) == fires


@pytest.mark.parametrize(("lines", "fires"), [
    ("def told(asked: ModelConfig):\n    return asked.torch_dtype\ntold(given)\n", True),
    ("def told(asked: ModelConfig):\n    return asked.dtype\ntold(given)\n", False),
    ("def told(asked: ModelConfig):\n    asked = other(asked)\n    return asked.torch_dtype\ntold(given)\n", False),
    ("def told(asked: Model):\n    return asked.torch_dtype\ntold(given)\n", False)])
def test_settings_that_a_function_says_it_takes_have_their_attributes(lines: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD + "from trl import ModelConfig\n" + lines + ARGUMENTS
    assert bool(said("attributes_missing", text, tmp_path)) == fires


def test_fp16_wherever_there_is_a_gpu_is_fp16(tmp_path: Path) -> None:
    text = RUNNING_CASES["scaler_refuses_bf16"][0]
    assert said("scaler_refuses_bf16", text.replace("fp16=True", "fp16=torch.cuda.is_available()"), tmp_path)
    assert not said("scaler_refuses_bf16", text.replace("fp16=True", "fp16=not torch.cuda.is_bf16_supported()"), tmp_path)


@pytest.mark.parametrize(("lines", "fires"), [
    ("def rows(tokenizer):\n    return tokenizer.batch_encode_plus(['x'])\nrows(None)\n", True),
    ("def rows(tokenizer):\n    return tokenizer(['x'])\nrows(None)\n", False),
    ("class Tokenizer:\n    pass\ndef rows(tokenizer):\n    return tokenizer.batch_encode_plus(['x'])\nrows(None)\n", False)])
def test_tokenizers_have_lost_methods(lines: str, fires: bool, tmp_path: Path) -> None:
    assert bool(said("attributes_missing", HEAD + lines + ARGUMENTS, tmp_path)) == fires


def test_a_module_that_the_project_has_is_not_missing(tmp_path: Path) -> None:
    text = "from utils.prompter import Prompter\n" + HEAD + ARGUMENTS
    (tmp_path / "utils").mkdir()
    assert said("modules_missing", text, tmp_path)
    (tmp_path / "utils" / "prompter.py").write_text("class Prompter:\n    pass\n")
    assert said("modules_missing", text, tmp_path) == []
    assert said("modules_missing", "import sys\nsys.path.insert(0, 'lib')\nimport helpers\n" + HEAD + ARGUMENTS, tmp_path) == []


def test_an_older_release_is_not_judged_by_this_one(tmp_path: Path) -> None:
    older = Circumstances(software=software("4.30.0"))
    assert said("arguments_not_taken", RUNNING_CASES["arguments_not_taken"][0], tmp_path, older) == []
    assert not any("(gone)" in why for why in said("removed_imports", f"from transformers import Nothing\n{HEAD}{ARGUMENTS}",
                                                   tmp_path, older))


def test_what_is_read_of_the_libraries_is_what_they_have() -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    asked = [name for name in dir(transformers) if not name.startswith("_")][::25]
    assert asked
    assert not [name for name in asked if lacks("transformers", name)]
    assert not [name for name in dir(peft) if not name.startswith("__") and lacks("peft", name)]
    fields = parameters(defined("transformers", "TrainingArguments"))
    assert fields is not None
    assert set(transformers.TrainingArguments.__dataclass_fields__) <= fields


def test_trl_is_known_without_being_installed() -> None:
    fields = parameters(defined("trl", "GRPOConfig"))
    assert fields is not None
    assert {"num_generations", "learning_rate", "bf16"} <= fields - {"max_prompt_length"} == fields
    assert release("trl") == (1, 16) or importlib.metadata.version("trl")
    assert is_missing("torch._six")
    assert "trl" in LIBRARIES


def test_a_trainer_is_asked_for_what_it_has(tmp_path: Path) -> None:
    own = "class Own(Trainer):\n    def compute_loss(self, model, inputs, **kwargs):\n        return self.{name}\n" + ARGUMENTS
    own += "Own(model, args).train()\n"
    assert len(said("attributes_missing", HEAD + own.format(name="tokenizer"), tmp_path)) == 1
    assert said("attributes_missing", HEAD + own.format(name="processing_class"), tmp_path) == []
    unknown = "class Unknown(Missing):\n    def train(self):\n        self.other()\n"
    assert said("attributes_missing", HEAD + unknown + ARGUMENTS, tmp_path) == []


@pytest.mark.parametrize("more", ["parser.add_argument(f'--{NAME}')\n", "deepspeed.add_config_arguments(parser)\n",
                                  "parser.set_defaults(batchsize=3)\n"])
def test_a_command_line_that_cannot_be_read_is_not_judged(more: str, tmp_path: Path) -> None:
    assert said("options_missing", HEAD + PARSED.format(name="batchsize", more=""), tmp_path)
    assert said("options_missing", HEAD + PARSED.format(name="batchsize", more=more), tmp_path) == []


@pytest.mark.parametrize(("call", "fires"), [("train()", False), ("train(1, 2, 3)", True), ("train(*rows)", False),
                                             ("train(1, **told)", False), ("train = other\ntrain(1, step=3)", False)])
def test_only_a_call_that_is_surely_the_projects_own_is_judged(call: str, fires: bool, tmp_path: Path) -> None:
    assert bool(said("arguments_refused", HEAD + MADE + CALLED + call + "\n", tmp_path)) == fires


def test_a_class_is_made_with_the_arguments_of_its_init(tmp_path: Path) -> None:
    text = HEAD + NETWORK.format(name="head").replace("__init__(self)", "__init__(self, width)")
    assert said("arguments_refused", loop(*PLAIN).replace(HEAD, text), tmp_path) == [
        "Net needs width: the call ends the run in a TypeError"]
    assert said("arguments_refused", loop(*PLAIN).replace(HEAD, text.replace("Net()", "Net(8)")), tmp_path) == []


def test_a_function_that_may_give_something_else_is_not_judged(tmp_path: Path) -> None:
    text = HEAD + ARGUMENTS + HELPER.format(returned="steps, 8, 9").replace("steps = 8", "if rows:\n        return rows")
    assert said("unpacked_wrongly", text + "one, two = sizes()\n", tmp_path) == []


def test_the_first_barrier_of_a_pair_is_met_by_the_second(tmp_path: Path) -> None:
    pair = "if dist.get_rank() != 0:\n    dist.barrier()\nif dist.get_rank() == 0:\n    dist.barrier()\n"
    assert said("one_process_waits", loop(*PLAIN, before=PARALLEL + pair), tmp_path) == []
    assert said("one_process_waits", loop(*PLAIN, before=PARALLEL, after=FIRST.format(waits="        ")), tmp_path)


SHARDED = ("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\ndist.init_process_group('nccl')\n{early}"
           "model = FSDP(model)\n")
SAVED = "def save():\n    if {test}:\n        return\n    torch.save({what}, 'x.pt')\nsave()\n"


@pytest.mark.parametrize(("test", "what", "waits"), [
    ("dist.get_rank() != 0", "model.state_dict()", True), ("not is_main(0)", "model.state_dict()", True),
    ("rank > 0", "model(data)", True), ("rank > 0", "head.state_dict()", False), ("rank > 1", "model.state_dict()", False)])
def test_what_follows_the_return_of_the_others_is_done_by_one(test: str, what: str, waits: bool, tmp_path: Path) -> None:
    text = loop(*PLAIN, before=SHARDED.format(early=""), after=SAVED.format(test=test, what=what))
    assert bool(said("one_process_waits", text, tmp_path)) is waits


def test_the_weights_of_a_sharded_model_are_gathered_by_all_processes(tmp_path: Path) -> None:
    sample = "def sample(model):\n    with FSDP.summon_full_params(model):\n        print(model.generate(data))\n"
    called = loop(*PLAIN, before=SHARDED.format(early="") + sample, after="if dist.get_rank() == 0:\n    sample(model)\n")
    assert said("one_process_waits", called, tmp_path)
    assert said("one_process_waits", called.replace("if dist.get_rank() == 0", "if True"), tmp_path) == []
    early = "if dist.get_rank() == 0:\n    print(model(data))\n"          # before it is sharded
    assert said("one_process_waits", loop(*PLAIN, before=SHARDED.format(early=early)), tmp_path) == []


@pytest.mark.parametrize("right", [
    "def describe(model):\n    print(model(data))\nnet = nn.Linear(8, 8)\nif dist.get_rank() == 0:\n    describe(net)\n",
    "def export():\n    model = nn.Linear(8, 8)\n    print(model(data))\nif dist.get_rank() == 0:\n    export()\n",
    "def save():\n    if lora_rank > 0:\n        return\n    print(model.state_dict())\nsave()\n",
    "def wait():\n    if dist.get_rank(group) != 0:\n        return\n    dist.barrier()\nwait()\n",
    "if dist.get_rank() == 0:\n    dist.barrier(group=pair)\n",
    "teachers['a'] = FSDP(data)\nif dist.get_rank() == 0:\n    teachers[0].generate(data)\n",
    "if not accelerator.is_main_process:\n    dist.barrier()\nif accelerator.is_main_process:\n    dist.barrier()\n",
    "def wait():\n    dist.barrier()\nif rank != 0:\n    wait()\nif rank == 0:\n    wait()\n",
    "() = FSDP(data)\n"])
def test_what_only_looks_like_a_call_of_all_processes_is_left(right: str, tmp_path: Path) -> None:
    assert said("one_process_waits", loop(*PLAIN, before=SHARDED.format(early=""), after=right), tmp_path) == []


def test_an_engine_of_deepspeed_saves_with_all_processes(tmp_path: Path) -> None:
    engine = "import deepspeed\nengine, _, _, _ = deepspeed.initialize(model=model)\n"
    text = loop(*PLAIN, before=engine, after="if dist.get_rank() == 0:\n    engine.save_checkpoint('out')\n")
    assert said("one_process_waits", text, tmp_path)
    assert said("one_process_waits", text.replace("engine.save_checkpoint('out')", "tokenizer.save_pretrained('out')"),
                tmp_path) == []


@pytest.mark.parametrize(("first", "lost"), [
    ("sggtep = 0", True), ("step = 0", False), ("global step", False), ("def step(): return 1", False)])
def test_a_name_that_is_only_added_to_has_no_value(first: str, lost: bool, tmp_path: Path) -> None:
    text = f"data, step = [], 1\ndef train():\n    {first}\n    for batch in loader:\n        step += 1\ntrain()\n"
    assert bool(said("undefined_names", HEAD + text + MADE, tmp_path)) is lost


@pytest.mark.parametrize("right", ["model = model.float().cuda()\n", "model = model.to(dtype=torch.float32)\n"])
def test_weights_that_are_made_wide_before_the_optimizer_may_be_loaded_in_fp16(right: str, tmp_path: Path) -> None:
    loaded = loop(*PLAIN).replace(OF_ONE_LAYER, LOADED.format(dtype="torch.float16") + "{right}")
    assert said("adam_in_fp16", loaded.replace("{right}", ""), tmp_path)
    assert said("adam_in_fp16", loaded.replace("{right}", right), tmp_path) == []
    head = loaded.replace("{right}", "head = nn.Linear(8, 2)\n").replace("AdamW(model.", "AdamW(head.")
    assert said("adam_in_fp16", head, tmp_path) == []


def test_what_another_module_gives_is_no_local_name(tmp_path: Path) -> None:
    text = HEAD + "from unknown import *\ndef train():\n    for batch in loader:\n        step += 1\ntrain()\n" + MADE
    assert said("undefined_names", text, tmp_path)


@pytest.mark.parametrize("right", [
    "def setup():\n    global step\n    step = 0\nsetup()\nstep += 1\n", "__doc__ += 'more'\n",
    "from settings import *\nstep += 1\n"])
def test_a_name_that_is_given_elsewhere_may_be_added_to(right: str, tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("step = 8\n", encoding="utf-8")
    assert said("undefined_names", right + HEAD + "data = []\n" + MADE + ARGUMENTS, tmp_path) == []


@pytest.mark.parametrize(("asks", "fires"), [("print(model.vocab)", True), ("print(model.training)", False),
                                             ("print(model.module.vocab)", False), ("print(model.device_ids)", False)])
def test_an_attribute_of_the_model_is_not_one_of_its_wrapper(asks: str, fires: bool, tmp_path: Path) -> None:
    assert bool(said("method_of_wrapped_model", loop(*PLAIN, before=PARALLEL, after=f"{asks}\n"), tmp_path)) == fires


@pytest.mark.parametrize(("trainer", "fires"), [("Trainer", True), ("SFTTrainer", True), ("GRPOTrainer", False),
                                                ("DPOTrainer", False)])
def test_a_low_rate_is_usual_only_where_answers_are_compared_or_rewarded(trainer: str, fires: bool, tmp_path: Path) -> None:
    made = "from trl import DPOTrainer, GRPOTrainer\nfrom peft import LoraConfig, get_peft_model\n"
    made += "model = get_peft_model(AutoModelForCausalLM.from_pretrained('gpt2'), LoraConfig(r=8))\n"
    made += f"{trainer}(model, args=TrainingArguments('out', learning_rate=5e-6), train_dataset=rows).train()\n"
    assert bool(said("learning_rate_unfit", HEAD + made, tmp_path)) == fires


MADE_REWARD = ("from trl import GRPOConfig, GRPOTrainer\ndef make(runner):\n    def scored(completions, **kwargs):\n"
               "        return [runner(text) for text in completions]\n    return scored\n"
               "GRPOTrainer(model='gpt2', reward_funcs=[make(len)], args=GRPOConfig('out'), train_dataset=rows).train()\n")
ASKED_FIRST = (HF + ARGUMENTS + "import inspect\nmore = {'model': model, 'args': args}\n"
               "if 'processing_class' in inspect.signature(Trainer).parameters:\n    more['processing_class'] = 1\nelse:\n"
               "    more['another'] = 1\nTrainer(**more).train()\n")
STEPPED = ("from trl import PPOTrainer\nif __name__ == '__main__':\n    trainer = PPOTrainer(None)\n"
           "    for batch in rows:\n        trainer.step(batch)\n")
ONE_EPOCH = (HEAD + MADE + PARALLEL + "sampler = DistributedSampler(data)\nloader = DataLoader(data, sampler=sampler)\n"
             "for batch in loader:\n    model(batch).mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n")


HEADS = ("from peft import LoraConfig, TaskType\nfrom transformers import AutoModelForSequenceClassification\n{first}"
         "model = AutoModelForSequenceClassification.from_pretrained('bert-base-uncased')\nlora = LoraConfig(r=8{more})\n{then}"
         + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n")


@pytest.mark.parametrize(("name", "text"), [
    ("best_weights_shared", loop(*PLAIN, after="\n    if loss < 1:\n        best = copy.deepcopy(model).state_dict()\n"
                                 "model.load_state_dict(best)\n")),
    ("best_weights_shared", loop(*PLAIN, after="\n    state = model.state_dict()\n    torch.save(state, 'last.pt')\n"
                                 "state = torch.load('last.pt')\nmodel.load_state_dict(state)\n")),
    ("resumes_from_nothing", HEAD + HF + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\nmodel.train(True)\n"),
    ("adapters_never_applied", HEAD + HF + "from peft import LoraConfig\nclass Config:\n    lora = LoraConfig(r=8)\n"
     + ARGUMENTS + "SFTTrainer(model, args=args, train_dataset=rows, peft_config=Config.lora).train()\n"),
    ("new_head_frozen", HEAD + HEADS.format(first="TASK_TYPE = TaskType.SEQ_CLS\n", more=", task_type=TASK_TYPE", then="")),
    ("new_head_frozen", HEAD + HEADS.format(first="", more="", then="lora.task_type = 'SEQ_CLS'\n")),
    ("never_saved", loop(*PLAIN, after="\nmlflow.pytorch.log_model(model, 'model')\n"))])
def test_common_code_that_is_right_is_not_found(name: str, text: str, tmp_path: Path) -> None:
    assert said(name, text, tmp_path) == []


@pytest.mark.parametrize(("name", "text"), [
    ("reward_without_answers", HEAD + MADE_REWARD), ("arguments_not_taken", HEAD + ASKED_FIRST),
    ("trainer_never_trains", HEAD + STEPPED), ("sampler_without_epoch", ONE_EPOCH)])
def test_what_public_code_showed_to_be_right_is_not_found(name: str, text: str, tmp_path: Path) -> None:
    assert said(name, text, tmp_path) == []


def test_names_of_a_module_that_is_taken_whole_are_known_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a project")
    (tmp_path / "sizes.py").write_text("width = 8\n")
    text = HEAD + "from sizes import *\nprint({name})\n" + ARGUMENTS
    assert said("undefined_names", text.format(name="width"), tmp_path) == []
    assert said("undefined_names", text.format(name="depth"), tmp_path)
    assert said("undefined_names", text.format(name="depth").replace("from sizes", "from math"), tmp_path) == []


def test_modules_of_a_package_that_its_list_names_are_known(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a project")
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("__all__ = ['losses']\n")
    (package / "losses.py").write_text("width = 8\n")
    assert said("undefined_names", HEAD + "from pkg import *\nprint(losses.width)\n" + ARGUMENTS, tmp_path) == []


def test_code_behind_a_lambda_is_read(tmp_path: Path) -> None:
    text = HEAD + HF + ARGUMENTS + ("def main():\n    rows.map(lambda row: told(row))\n    Trainer(model, args).train()\n"
                                    "def told(row):\n    return lost\nmain()\n")
    assert any("lost" in why for why in said("undefined_names", text, tmp_path))


def test_a_training_argument_that_is_gone_is_found_by_the_installed_source(tmp_path: Path) -> None:
    made = HEAD + HF + "Trainer(model, TrainingArguments('out', include_inputs_for_metrics=True)).train()\n"
    assert said("arguments_not_taken", made, tmp_path)


@pytest.mark.parametrize(("labels", "fires"), [("batch[0]", True), ("batch[1]", False)])
def test_labels_of_the_same_source_as_the_tokens_are_a_copy(labels: str, fires: bool, tmp_path: Path) -> None:
    text = loop("ids = batch[0]", f"labels = {labels}", "loss = model(ids, labels=labels).loss", *PLAIN[1:],
                before=HF + TOKENIZER + "tokens = tokenizer(texts, padding='max_length')\n")
    assert bool(said("padding_trained", text, tmp_path)) == fires
