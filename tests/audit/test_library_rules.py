"""Names, arguments and methods that present releases do not have: each is said, and its near miss is not."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from audit_subjects import software
from code_cases import ARGUMENTS, HEAD, HF
from library_cases import LIBRARY_CASES
from test_tool_configs import FACTORY, TORCHTUNE

from powertrain.audit.audit import read_subject
from powertrain.audit.installed import defined, lacks, members
from powertrain.audit.rules import RULES
from powertrain.audit.rules.base import known
from powertrain.audit.rules.elsewhere import gone
from powertrain.audit.subject import Circumstances

BY_NAME = {rule.name: rule for rule in RULES}
WITH_RELEASES = Circumstances(software=software())
CALLBACK = HEAD + HF + ARGUMENTS + ("from transformers import TrainerCallback\nclass Own(TrainerCallback):\n"
                                    "    def {method}:\n        {body}\n"
                                    "Trainer(model, args, train_dataset=rows, callbacks=[Own()]).train()\n")
CLASS = HEAD + HF + ARGUMENTS + ("{more}class Own({base}):\n    def {method}:\n        {body}\n"
                                 "Own(model, args=args, train_dataset=rows).train()\n")
LIGHTNING = HEAD + ("import pytorch_lightning as pl\nclass Own(pl.LightningModule):\n    def {method}:\n        pass\n"
                    "trainer = pl.Trainer({given})\ntrainer.fit(Own())\n{more}") + ARGUMENTS


def said(name: str, text: str, folder: Path) -> list[str]:
    path = folder / ("config.yaml" if "_component_" in text or "stage:" in text else "train.py")
    path.write_text(text, encoding="utf-8")
    return [finding.why for finding in BY_NAME[name].find(read_subject(path), WITH_RELEASES)]


@pytest.mark.parametrize("name", LIBRARY_CASES)
def test_a_rule_fires_and_is_silent_in_its_near_miss(name: str, tmp_path: Path) -> None:
    assert len(said(name, LIBRARY_CASES[name][0], tmp_path)) == 1
    assert said(name, LIBRARY_CASES[name][1], tmp_path) == []


@pytest.mark.parametrize(("text", "fires"), [
    (CALLBACK.format(method="on_log(self, args, state, control, logs=None)", body="pass"), True),
    (CALLBACK.format(method="on_log(self, args, state, control, logs=None, **more)", body="pass"), False),
    (CALLBACK.format(method="on_save(self, args, state, control, **more)", body="more['tokenizer'].save('x')"), True),
    (CALLBACK.format(method="on_save(self, args, state, control, **more)", body="more['model'].save('x')"), False),
    (CALLBACK.format(method="on_save(self, args, state, control, tokenizer=None, **more)", body="tokenizer.save('x')"), True),
    (CALLBACK.format(method="on_save(self, args, state, control, tokenizer=None, **more)",
                     body="tokenizer and tokenizer.save('x')"), False),
    (CLASS.format(more="", base="Trainer", method="_get_train_sampler(self)", body="return None"), True),
    (CLASS.format(more="", base="Trainer", method="_get_train_sampler(self, rows=None)", body="return None"), False),
    (CLASS.format(more="", base="Trainer", method="save_model(self, output_dir)", body="pass"), True),
    (CLASS.format(more="", base="Trainer", method="save_model(self, folder=None, _internal_call=False)", body="pass"), False),
    (CLASS.format(more="", base="Trainer", method="prediction_step(self, model)", body="pass"), False),       # never evaluates
    (CLASS.format(more="from trl import DPOTrainer\n", base="DPOTrainer", method="dpo_loss(self, chosen)", body="pass"), True),
    (CLASS.format(more="from trl import DPOTrainer\n", base="DPOTrainer", method="own_loss(self, chosen)", body="pass"), False),
    (LIGHTNING.format(method="validation_epoch_end(self, outputs)", given="", more=""), True),
    (LIGHTNING.format(method="on_validation_epoch_end(self)", given="", more=""), False),
    (LIGHTNING.format(method="test_epoch_end(self, outputs)", given="", more="trainer.test(model)\n"), True),
    (LIGHTNING.format(method="test_epoch_end(self, outputs)", given="", more=""), False),      # only test() asks for it
    (LIGHTNING.format(method="lr_scheduler_step(self, scheduler, optimizer_idx, metric)", given="", more=""), True),
    (LIGHTNING.format(method="lr_scheduler_step(self, scheduler, metric)", given="", more=""), False),
    (LIGHTNING.format(method="setup(self)", given="", more="").replace("LightningModule", "LightningDataModule"), True),
    (LIGHTNING.format(method="setup(self, stage)", given="", more=""), False)])
def test_methods_are_as_the_present_class_calls_them(text: str, fires: bool, tmp_path: Path) -> None:
    assert bool(said("method_of_older_release", text, tmp_path)) == fires


def test_a_class_that_nothing_makes_is_not_judged(tmp_path: Path) -> None:
    text = LIBRARY_CASES["method_of_older_release"][0].replace("\nOwn(", "\nTrainer(")
    assert said("method_of_older_release", text, tmp_path) == []


def test_trainer_calls_its_methods_as_the_table_says() -> None:
    trainer = pytest.importorskip("transformers").Trainer
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(trainer)))) if isinstance(node, ast.Call)]
    shapes = {(ast.unparse(call.func).removeprefix("self."), len(call.args), *(str(item.arg) for item in call.keywords))
              for call in calls}
    table = {**known("called_by_trainer"), **known("called_to_save"), **known("called_to_evaluate")}
    for name, call in table.items():
        asked = ast.parse(f"f({call})", mode="eval").body
        assert isinstance(asked, ast.Call)
        shape = (len(asked.args), *(str(item.arg) for item in asked.keywords))
        assert (name, *shape) in shapes or (name.endswith("_sampler") and ("sampler_fn", *shape) in shapes), name


@pytest.mark.parametrize(("line", "fires"), [
    ("import numpy as np\nprint(np.float)\n", True), ("import numpy as np\nprint(np.float32, np.bool)\n", False),
    ("from numpy.lib.function_base import average\n", True), ("import sklearn.grid_search\n", True),
    ("import transformers\nprint(transformers.optimization.AdamW)\n", True),
    ("import transformers\nprint(transformers.optimization.Adafactor)\n", False),
    ("import transformers\nprint(transformers.modeling_gpt2.GPT2LMHeadModel)\n", True),
    ("from lightning.pytorch.loggers.base import rank_zero_only\n", True),
    ("from pytorch_lightning.loggers import WandbLogger\n", False)])
def test_names_that_other_libraries_have_lost_are_said(line: str, fires: bool, tmp_path: Path) -> None:
    assert bool(said("removed_imports", HEAD + line + ARGUMENTS, tmp_path)) == fires


def test_a_project_that_holds_numpy_to_an_older_release_has_its_names(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("numpy==1.23\n")
    assert said("removed_imports", HEAD + "import numpy as np\nprint(np.float)\n" + ARGUMENTS, tmp_path) == []


@pytest.mark.parametrize("module", known("gone_elsewhere"))
def test_what_the_table_says_is_gone_is_gone(module: str) -> None:
    if module.partition(".")[0] not in ("numpy", "pandas", "sklearn"):
        pytest.skip("not installed here")
    names = known("gone_elsewhere")[module].split()
    try:
        there = __import__(module, fromlist=["x"])
    except ImportError:
        return
    assert not [name for name in names if name != "*" and name in dir(there)]


def test_modules_and_names_are_looked_up() -> None:
    assert gone("numpy", "float") == "numpy.float"
    assert gone("sklearn.externals.joblib", "") == "sklearn.externals.joblib"
    assert gone("torchtune.modules.rlhf.loss", "DPOLoss") == "torchtune.modules.rlhf"
    assert gone("numpy", "floating") == gone("floats", "float") == ""
    assert lacks("transformers.optimization", "AdamW")


@pytest.mark.parametrize(("given", "more", "fires"), [
    ("gpus=1", "", True), ("devices=1", "", False), ("", "trainer.tuner.lr_find(1)\n", True), ("", "trainer.test()\n", False)])
def test_lightning_has_lost_arguments_and_attributes(given: str, more: str, fires: bool, tmp_path: Path) -> None:
    text = LIGHTNING.format(method="forward(self)", given=given, more=more)
    assert bool(said("arguments_not_taken", text, tmp_path) + said("attributes_missing", text, tmp_path)) == fires


@pytest.mark.parametrize(("lines", "fires"), [
    ("class Own(Trainer):\n    def train(self):\n        super()._save_checkpoint(1, 2, metrics=3)\nOwn(1)\n", True),
    ("class Own(Trainer):\n    def train(self):\n        super()._save_checkpoint(1, 2, 3)\nOwn(1)\n", True),
    ("class Own(Trainer):\n    def train(self):\n        self.log({}, 2)\nOwn(1)\n", False),
    ("class Own(Trainer):\n    def log(self, one, two, three):\n        pass\n    def train(self):\n"
     "        self.log({}, 2, 3)\nOwn(1)\n", False),
    ("from a import FSDP\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nFSDP(1, other=2)\n", False),
    ("settings = told()\nsettings['logging_dir'] = 'x'\nSFTConfig(**settings)\n", True),
    ("settings = told()\nif settings:\n    settings['logging_dir'] = 'x'\nSFTConfig(**settings)\n", False)])
def test_calls_of_inherited_methods_are_looked_up(lines: str, fires: bool, tmp_path: Path) -> None:
    assert bool(said("arguments_not_taken", HEAD + lines + ARGUMENTS, tmp_path)) == fires


@pytest.mark.parametrize(("lines", "only"), [
    ("more = {}\nif big:\n    more = {'load_in_4bit': True}\n", "big holds"),
    ("more = {}\nif big:\n    more = {'revision': 'x'}\n", None)])
def test_a_dictionary_of_several_branches_is_looked_into(lines: str, only: str | None, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + "from peft import LoraConfig\nbig = told()\n" + lines + HF.replace("')", "', **more)") + ARGUMENTS
                    + "Trainer(model, args, train_dataset=rows).train()\n")
    made = list(BY_NAME["removed_call_arguments"].find(read_subject(path), WITH_RELEASES))
    assert [each.when for each in made] == ([only] if only else [])


@pytest.mark.parametrize(("name", "fires"), [("masked_lm_labels", True), ("labels", False)])
def test_a_model_takes_no_labels_under_their_old_name(name: str, fires: bool, tmp_path: Path) -> None:
    text = HEAD + HF + f"print(model(ids, {name}=ids))\n" + ARGUMENTS
    assert bool(said("removed_call_arguments", text, tmp_path)) == fires
    own = "class Net:\n    def forward(self, ids, masked_lm_labels):\n        pass\n"
    assert said("removed_call_arguments", own + text, tmp_path) == []


@pytest.mark.parametrize(("base", "asked", "fires"), [
    ("SFTTrainer", "self.tokenizer", True), ("SFTTrainer", "self.processing_class", False),
    ("Trainer", "self.args.use_legacy_prediction_loop", True), ("SFTTrainer", "self.args.overwrite_output_dir", True),
    ("Trainer", "self.args.own_field", False)])
def test_trainers_of_trl_are_asked_for_what_they_have(base: str, asked: str, fires: bool, tmp_path: Path) -> None:
    other = "class Other:\n    def __init__(self):\n        self.tokenizer = 1\nOther()\n"
    text = CLASS.format(more=other, base=base, method="compute_loss(self, model, inputs, **more)", body=f"return {asked}")
    assert bool(said("attributes_missing", text, tmp_path)) == fires
    if asked == "self.tokenizer":
        assert said("attributes_missing", "import unsloth\nprint(unsloth.FastModel)\n" + text, tmp_path) == []


@pytest.mark.parametrize(("method", "body", "fires"), [
    ("compute_loss(self, model, inputs, **more)", "return self.tokenizer if model else 1", False),
    ("compute_loss(self, model, inputs, **more)", "return 2 if self.tokenizer else 1", True),
    ("compute_loss(self, model, inputs, **more)", "def own(self):\n            return self.tokenizer\n        own(2)", False),
    ("dpo_loss(self)", "return self.tokenizer", False)])
def test_what_is_not_read_or_of_another_object_is_not_missed(method: str, body: str, fires: bool, tmp_path: Path) -> None:
    text = CLASS.format(more="from trl import DPOTrainer\n", base="DPOTrainer", method=method, body=body)
    assert bool(said("attributes_missing", text, tmp_path)) == fires


def test_the_stub_lists_what_trainers_of_trl_have() -> None:
    has = members(defined("trl", "GRPOTrainer"))
    assert has is not None
    assert {"processing_class", "num_generations", "_calculate_rewards", "train"} <= has - {"tokenizer"} == has


@pytest.mark.parametrize(("line", "fires"), [
    ("print(own.tokenizer.additional_special_tokens)\n", True), ("print(src_tokenizer.prepare_for_model([1]))\n", True),
    ("print(own.tokenizer.extra_special_tokens)\n", False),
    ("trust_remote_code = True\nprint(tokenizer.prepare_for_model([1]))\n", False),
    ("from tokenizers import Tokenizer\nprint(tokenizer.encode_plus)\n", False)])
def test_tokenizers_are_found_by_their_names(line: str, fires: bool, tmp_path: Path) -> None:
    assert bool(said("attributes_missing", HEAD + line + ARGUMENTS, tmp_path)) == fires


def test_arguments_of_a_class_that_comes_without_an_import_are_read(tmp_path: Path) -> None:
    text = ("from settings import *\nargs = TrainingArguments('out', evaluation_strategy='no')\n"
            "Trainer(model, args, tokenizer=1).train()\n")
    assert "evaluation_strategy" in said("removed_names", text, tmp_path)[0]
    own = "class TrainingArguments:\n    pass\nclass Trainer:\n    pass\n"
    assert said("removed_names", own + text, tmp_path) == []


@pytest.mark.parametrize(("source", "target", "fires"), [
    ("/tmp/model", "/tmp/model/", True), ("/tmp/model", "/tmp/model/out", True), ("/tmp/model", "/tmp/model-out", False),
    ("/tmp/model", "${place}/out", False), ("", "", False), ("${place}", "${place}/out", False)])
def test_torchtune_does_not_write_where_it_reads(source: str, target: str, fires: bool, tmp_path: Path) -> None:
    more = f"checkpointer:\n  checkpoint_dir: {source}\n  output_dir: {target}\n"
    assert bool(said("checkpoints_into_source", TORCHTUNE.format(data="", more=more), tmp_path)) == fires
    inner = more.replace(target, "${{place}}/out") + "place: " + source + "\n"
    inner = inner.replace("{{", "{").replace("}}", "}")
    assert "$" in source or not source or said("checkpoints_into_source", TORCHTUNE.format(data="", more=inner), tmp_path)


def test_what_a_config_of_torchtune_runs_is_read(tmp_path: Path) -> None:
    text = TORCHTUNE.format(data="", more="").replace("torchtune.datasets.alpaca_dataset", "rows.made")
    (tmp_path / "rows.py").write_text("from torchtune.data import InstructTemplate\n")
    assert "torchtune.data.InstructTemplate (gone)" in said("components_moved", text, tmp_path)[0]
    (tmp_path / "rows.py").write_text("from torchtune.data import Message\n")
    assert said("components_moved", text, tmp_path) == []
    (tmp_path / "README.md").write_text("tune run recipes/mine.py --config config.yaml\n")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.py").write_text("from torchtune import utils\nfrom torchtune.utils import get_dtype\n")
    assert "torchtune.utils.get_dtype (gone)" in said("components_moved", text, tmp_path)[0]


def test_older_releases_of_llama_factory_have_their_keys_and_templates(tmp_path: Path) -> None:
    text = FACTORY.replace("qwen", "own_one") + "save_safetensors: false\n"
    (tmp_path / "README.md").write_text("pip install llamafactory\n")
    assert said("settings_refused", text, tmp_path)
    assert said("template_unknown", text, tmp_path)
    for pinned in ("pip install llamafactory==0.9.3", "git clone -b v0.9.2 x\nFROM hiyouga/llamafactory:0.9.2"):
        (tmp_path / "README.md").write_text(f"{pinned}\n")
        assert said("settings_refused", text, tmp_path) == said("template_unknown", text, tmp_path) == []
