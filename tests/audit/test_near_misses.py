"""What keeps a rule silent: each case is a script in which the rule fires, and one change after which it does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, MADE, PLAIN, loop
from network_cases import TURNED
from program_cases import FROM_CHECKPOINTS, MAPPED_EARLY
from running_cases import CHOSEN, ENGINE
from test_trl_rules import OF_ROWS, PARSED, TODAY, YEARS_AGO, found
from trl_cases import ASKED_FOR, FORMATTED, HF, KTO, SFT, TAKEN

from powertrain.audit.subject import Circumstances
from powertrain.records import Software

UNSLOTH = "from unsloth import FastLanguageModel\n"
GIVES_MANY = FORMATTED.format(given="texts") + HF + SFT.format(args="", more=", formatting_func=told")
COLLATED = HF + SFT.format(args="", more=", data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)")
STOPPED = loop(*PLAIN, before=TURNED.format(product="x"))
EARLY, SAVED = HEAD + MAPPED_EARLY.format(first=""), HEAD + FROM_CHECKPOINTS.format(saved="")
MODULE = HEAD + HF + "loss = model(ids).loss\nloss.backward()\nmodel.module.eval()\n"
AGAIN = "again = AutoModelForCausalLM.from_pretrained('out')\n"
TASK = HEAD + ASKED_FOR.format(task="translation_en_to_fr")
SCRIPTED = HEAD + TAKEN.format(name="bookcorpus", split="train")
ANSWERS = HEAD + OF_ROWS.format(text="row['output']")
DRIVE = "from google.colab import drive\n"
COLAB = DRIVE + HEAD + HF + SFT.format(args="", more="")
UNCALLED = ("from dataclasses import dataclass\n@dataclass\nclass Told:\n    each: int = 200\ndef train(told: Told):\n"
            "    args = TrainingArguments('out', eval_strategy='steps', save_strategy='steps', eval_steps=told.each,\n"
            "                             save_steps=500, load_best_model_at_end=True)\n"
            "    Trainer(model, args, train_dataset=rows, eval_dataset=rows).train()\n")
OLD_NAME = HEAD + HF + "loss = model(ids, lm_labels=ids)[0]\nloss.backward()\n"

CASES = {
    "unsloth asks for lists": ("formatting_gives_many", HEAD + GIVES_MANY,
                               UNSLOTH + HEAD + GIVES_MANY + "FastLanguageModel.from_pretrained('x')\n"),
    "one of two results": ("formatting_gives_many", HEAD + GIVES_MANY, HEAD + GIVES_MANY.replace(
        "    return texts", "    if len(texts) > 1:\n        return ' '.join(texts)\n    return texts")),
    "rows are packed": ("collator_leaves_labels", HEAD + COLLATED, HEAD + COLLATED.replace("'out'", "'out', packing=True")),
    "rows have one length": ("collator_leaves_labels", HEAD + COLLATED,
                             HEAD + "rows = rows.map(lambda row: tokenizer(row['a'], padding='max_length'))\n" + COLLATED),
    "unsloth has its own collator": ("collator_leaves_labels", HEAD + COLLATED,
                                     UNSLOTH + HEAD + COLLATED + "FastLanguageModel.from_pretrained('x')\n"),
    "a loss without the divergence": ("kto_of_one_example", HEAD + KTO.format(size=1),
                                      HEAD + KTO.format(size=1).replace("'out',", "'out', loss_type='apo_zero_unpaired',")),
    "a task that is tried": ("task_gone", TASK, TASK.replace("\nprint(pipeline(", "\ntry:\n    print(pipeline(").rstrip()
                             + "\nexcept KeyError:\n    pass\n"),
    "data that is tried": ("data_with_script", SCRIPTED, SCRIPTED.replace(
        "rows = load", "try:\n    rows = load").replace("='train')\n", "='train')\nexcept RuntimeError:\n    rows = None\n")),
    "prompts too": ("answers_alone", ANSWERS, ANSWERS + "rows = rows.map(lambda each: each['prompt'])\n"),
    "in Colab": ("colab_only", COLAB, COLAB.replace(DRIVE, "import sys\nif 'google.colab' in sys.modules:\n    " + DRIVE)),
    "a notebook": ("colab_only", COLAB, "# In[1]:\n" + COLAB),
    "a layer that is no rotation": ("gradient_stopped", STOPPED, STOPPED.replace("Rotary", "Scaled")),
    "with gradients": ("gradient_stopped", STOPPED, STOPPED.replace("    @torch.no_grad()\n", "")),
    "loaded from elsewhere": ("loaded_but_never_saved", SAVED, SAVED.replace(AGAIN, AGAIN.replace("'out'", "'other'"))),
    "a checkpoint's own folder": ("loaded_but_never_saved", SAVED, SAVED.replace(AGAIN, AGAIN.replace(
        "'out'", "'out', subfolder='checkpoint-500'"))),
    "copied there": ("loaded_but_never_saved", SAVED, SAVED.replace("again =", "shutil.copytree(best, 'out')\nagain =")),
    "preparation is skipped": ("formatting_gives_many", HEAD + GIVES_MANY,
                               HEAD + GIVES_MANY.replace("'out'", "'out', dataset_kwargs={'skip_prepare_dataset': True}")),
    "another name of the text": ("formatting_gives_many", HEAD + GIVES_MANY,
                                 HEAD + GIVES_MANY.replace("'out'", "'out', dataset_text_field='said'")),
    "a copy without the script": ("data_with_script", SCRIPTED,
                                  SCRIPTED.replace("split=", "revision='refs/convert/parquet', split=")),
    "wrapped by DeepSpeed": ("attributes_missing", MODULE, MODULE.replace(
        "loss = model", "model, optimizer, _, _ = deepspeed.initialize(model=model)\nloss = model", 1)),
    "asked in one expression": ("attributes_missing", MODULE, MODULE.replace(
        "model.module.eval()", "(hasattr(model, 'module') and model.module or model).eval()")),
    "rows as they come": ("run_before_given", EARLY, EARLY.replace("rows.map(told)", "(told(row) for row in rows)")),
    "a function that may stop": ("run_before_given", EARLY, EARLY.replace(
        "def told(row):\n", "def told(row):\n    if not row:\n        return None\n")),
    "a required field": ("best_checkpoint_intervals", HEAD + HF + UNCALLED, HEAD + HF + UNCALLED.replace(
        "    each: int", "    other: int\n    each: int")),
    "made elsewhere": ("best_checkpoint_intervals", HEAD + HF + UNCALLED,
                       HEAD + HF + UNCALLED + "pool.submit(train, Told(each=250))\n"),
    "started by a library": ("best_checkpoint_intervals", HEAD + HF + UNCALLED, HEAD + HF + UNCALLED + "tyro.cli(train)\n"),
    "only a table": ("gradient_stopped", STOPPED, STOPPED.replace("x * self.table", "self.table[x.shape[1]]")),
    "bytes are written": ("never_saved", loop(*PLAIN), loop(*PLAIN, after="open('last.bin', 'wb').write(told)\n")),
    "in a loop": ("run_before_given", EARLY, EARLY.replace("rows = rows.map(told)\n", (
        "for rows in parts:\n    if rows is not parts[0]:\n        rows = rows.map(told)\n"))),
    "read under a condition": ("run_before_given", EARLY, EARLY.replace(
        "    return {'text': name + row['text']}", "    if later:\n        return name\n    return row")),
    "an argument of a function": ("attributes_missing", MODULE,
                                  MODULE.replace("model.module.eval()\n", (
                                      "def told(model):\n    model.module.eval()\ntold(model)\n"))),
    "pushed at the end": ("loaded_but_never_saved", SAVED,
                          SAVED.replace("TrainingArguments(", "TrainingArguments(push_to_hub=True, ")),
    "loaded before": ("loaded_but_never_saved", SAVED, SAVED.replace(AGAIN, "").replace("args =", AGAIN + "args =")),
    "saved by hand": ("loaded_but_never_saved", SAVED, SAVED.replace("again", "trainer.model.save_pretrained('out')\nagain")),
    "a class that is no dataclass": ("best_checkpoint_intervals", HEAD + HF + UNCALLED, HEAD + HF + UNCALLED.replace(
        "@dataclass\n", "")),
    "a model of the project's own": ("labels_by_old_name", OLD_NAME, "class Own:\n    def forward(self, ids, lm_labels):\n"
                                     "        return ids\n" + OLD_NAME),
}


@pytest.mark.parametrize("case", CASES)
def test_one_change_and_the_rule_is_silent(case: str, tmp_path: Path) -> None:
    rule, fires, silent = CASES[case]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "output": "b"}\n', encoding="utf-8")
    assert fires != silent
    assert [bool(found(rule, text, tmp_path)) for text in (fires, silent)] == [True, False]


def test_older_releases_ask_formatting_functions_for_lists(tmp_path: Path) -> None:
    made = [found("formatting_gives_many", HEAD + GIVES_MANY, tmp_path, where) for where in (TODAY, YEARS_AGO)]
    assert list(map(bool, made)) == [True, False]


def test_a_parser_that_leaves_what_it_does_not_know_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("python -m torch.distributed.launch train.py\n", encoding="utf-8")
    text = HEAD + PARSED.replace("'--rate'", "'--local_rank'")
    assert found("rank_under_other_name", text, tmp_path)
    assert not found("rank_under_other_name", text.replace("parse_args()", "parse_known_args()[0]"), tmp_path)


def test_data_outside_the_project_and_large_data_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "README.md").write_text("", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a"}\n', encoding="utf-8")
    text = HEAD + OF_ROWS.format(text="row['question']")
    assert not found("column_not_there", text.replace("rows.jsonl", "../rows.jsonl"), tmp_path / "project")
    inside = tmp_path / "project" / "rows.jsonl"
    inside.write_text('{"instruction": "a"}\n', encoding="utf-8")
    assert found("column_not_there", text, tmp_path / "project")
    inside.write_text('{"instruction": "a"}\n' + " " * (1 << 24), encoding="utf-8")
    assert not found("column_not_there", text, tmp_path / "project")


def test_a_list_of_packages_of_another_folder_is_not_the_scripts(tmp_path: Path) -> None:
    text = HEAD + "import wandb\n" + HF + SFT.format(args="", more="")
    (tmp_path / "README.md").write_text("", encoding="utf-8")
    for folder, fires in (("other", False), ("requirements", True)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "requirements.txt").write_text("transformers\n", encoding="utf-8")
        assert bool(found("packages_unlisted", text, tmp_path)) == fires


def test_a_column_that_is_read_only_where_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a"}\n', encoding="utf-8")
    text = HEAD + OF_ROWS.replace("lambda row: {{'text': {text}}}", "told").replace(
        "rows = rows", "def told(row):\n    if 'question' in row:\n        return {{'text': row['question']}}\nrows = rows")
    assert not found("column_not_there", text.format(), tmp_path)
    assert found("column_not_there", text.replace("if 'question' in row", "with told").format(), tmp_path)


def test_a_layer_of_a_module_that_the_script_does_not_use_is_not_judged(tmp_path: Path) -> None:
    layers = HEAD + TURNED.format(product="x").partition("model =")[0] + "class Other(nn.Module):\n    pass\n"
    (tmp_path / "layers.py").write_text(layers, encoding="utf-8")
    for name, fires in (("Rotary", True), ("Other", False)):
        text = loop(*PLAIN, before=f"from layers import {name}\nmodel = {name}()\n")
        assert bool(found("gradient_stopped", text, tmp_path)) == fires


@pytest.mark.parametrize(("rows", "name"), [
    ("rows.map(lambda row: tokenizer(row['instruction']))\nrows = rows.filter(lambda row: row['input_ids'])", "rows.jsonl"),
    ("rows.map(lambda row: row.update(prompt=1) or row['prompt'])", "rows.jsonl"),
    ("rows.flatten().map(lambda row: row['a.b'])", "rows.jsonl"),
    ("rows.map(lambda told: told['a'], input_columns='instruction')", "rows.jsonl"),
    ("parts\npool.map(lambda part: part['a'], parts)", "rows.jsonl"),
    ("rows.map(lambda row: row['instruction'])", "rows.csv")])
def test_columns_of_working_code_are_there(rows: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a"}\n', encoding="utf-8")
    (tmp_path / "rows.csv").write_text("instruction\na\n", encoding="utf-8-sig")
    loads = ("from datasets import load_dataset\nrows = load_dataset('json', data_files='{name}')\nrows = {rows}\n"
             + HF + SFT.format(args="", more=""))
    assert not found("column_not_there", HEAD + loads.format(rows=rows, name=name), tmp_path)
    assert found("column_not_there", HEAD + loads.format(rows="rows.map(lambda row: row['said'])", name=name), tmp_path)


@pytest.mark.parametrize("made", [
    "cat > zero3.yaml <<EOF", "cp other.yaml zero3.yaml", "wget -O zero3.yaml x", "accelerate config --config_file zero3.yaml",
    "cd /workspace/other"])
def test_a_config_may_be_made_by_the_commands_themselves(made: str, tmp_path: Path) -> None:
    command = "accelerate launch --config_file zero3.yaml train.py\n"
    text = HEAD + HF + SFT.format(args="", more="")
    (tmp_path / "README.md").write_text("", encoding="utf-8")
    for before, fires in (("", True), (f"{made}\n", False)):
        (tmp_path / "run.sh").write_text(before + command, encoding="utf-8")
        assert bool(found("file_missing", text, tmp_path)) == fires


@pytest.mark.parametrize(("option", "fires"), [
    ("--config_file a.yaml", True), ("--save_config_to a.yaml", False), ("--config_name org/model/config.json", False),
    ("--config https://x.org/a.yaml", False), ("--config %s.yaml", False)])
def test_only_configs_that_are_read_have_to_be_there(option: str, fires: bool, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"python train.py {option}\n", encoding="utf-8")
    assert bool(found("file_missing", HEAD + HF + SFT.format(args="", more=""), tmp_path)) == fires


@pytest.mark.parametrize(("word", "fires"), [
    ("--config_file zero3.yaml", True), ("--output_dir out/stage3", False), ("--no_fsdp", False)])
def test_weights_are_sharded_where_a_config_says_so(word: str, fires: bool, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"accelerate launch train.py {word}\n", encoding="utf-8")
    text = HEAD + HF + ("args = TrainingArguments('out')\ntrainer = Trainer(model, args, train_dataset=rows)\ntrainer.train()\n"
                        "if trainer.is_world_process_zero():\n    trainer.save_model('last')\n")
    assert bool(found("one_process_waits", text, tmp_path)) == fires


@pytest.mark.parametrize(("name", "said"), [("Pipfile", "wandb"), ("README.rst", "pip install wandb"), ("pixi.lock", "wandb"),
                                            ("Dockerfile.gpu", "RUN pip install wandb"), ("setup.py", "'wandb'")])
def test_a_package_may_be_listed_in_any_file_that_says_what_to_install(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers\ntrl\n", encoding="utf-8")
    text = HEAD + "import wandb\n" + HF + SFT.format(args="", more="")
    assert found("packages_unlisted", text, tmp_path)
    (tmp_path / name).write_text(said, encoding="utf-8")
    assert not found("packages_unlisted", text, tmp_path)


def test_lists_that_bring_more_or_are_of_something_else(tmp_path: Path) -> None:
    text = HEAD + "import evaluate\n" + HF + SFT.format(args="", more="")
    for listed, fires in (("transformers\ntrl\n", True), ("axolotl\ntransformers\n", False), ("pytest\nruff\n", False)):
        (tmp_path / "requirements.txt").write_text(listed, encoding="utf-8")
        assert bool(found("packages_unlisted", text, tmp_path)) == fires
    (tmp_path / "requirements.txt").write_text("transformers\ntrl\n", encoding="utf-8")
    (tmp_path / "evaluate").mkdir()
    assert not found("packages_unlisted", text, tmp_path)


def test_links_and_pipes_of_a_project_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers\ntrl\n", encoding="utf-8")
    (tmp_path / "run.sh").write_text("accelerate launch --config_file zero3.yaml train.py\n", encoding="utf-8")
    links = {"lost.md": "nowhere.md", "self.md": "self.md", "zero.md": "/dev/zero", "out.txt": "/etc/hostname"}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    os.mkfifo(tmp_path / "pipe.txt")
    text = HEAD + "import wandb\n" + HF + SFT.format(args="", more="")
    assert all(found(rule, text, tmp_path) for rule in ("packages_unlisted", "file_missing"))


def test_data_that_nests_too_deep_has_no_columns(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("[" * 200_000, encoding="utf-8")
    assert not found("column_not_there", HEAD + OF_ROWS.format(text="row['question']"), tmp_path)


def test_places_in_commands_are_shown_as_the_scripts_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "run.sh").write_text("accelerate launch --config_file zero3.yaml train.py\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    made = found("file_missing", HEAD + HF + SFT.format(args="", more=""), Path("work"))
    assert str(made[0].evidence[0].place) == "work/run.sh:1"


KIND = HEAD + CHOSEN.format(other="print('kind?')")
OPTION, FIRST, LAST = "'--kind'", "if told.kind == 'a'", "print(width)\n"
IN_FUNCTION = KIND.replace(FIRST, "def made(kind):\n  if kind == 'a'").replace("    width", "      width").replace(
    "elif told.", "  elif ").replace("else:\n    print", "  else:\n      print").replace(
        LAST, "  print(width)\nmade(told.kind)\n")
METHOD = KIND.partition(FIRST)[0] + "class Own:\n  def made(self, kind):\n    if kind == 'a':\n      width = 8\n    else:\n" \
    "      print(kind)\n    print(width)\nown = Own()\nown.made(told.kind)\n" + ARGUMENTS
IN_LOOP = METHOD.partition("class")[0] + "for kind in kinds:\n  if kind not in 'ab':\n    pass\n  if kind == 'a':\n" \
    "    width = 8\n  else:\n    print(kind)\n  print(width)\n" + ARGUMENTS
DASHED = KIND.replace("kind", "the_kind").replace("'--the_kind'", "'--the-kind'")
HALF = HEAD + CHOSEN.partition("if told")[0].replace(OPTION, "'--half', action='store_true'") + (
    "if told.half:\n    scale = 2\nprint(scale)\n" + ARGUMENTS)
GPUS = HEAD + "if torch.cuda.is_available():\n    place = 'cuda'\nprint(place)\n" + ARGUMENTS


@pytest.mark.parametrize(("text", "old", "new"), [
    (KIND, "print('kind?')", "parser.error('kind?')"), (KIND, "print('kind?')", "print('kind?')\n    raise SystemExit"),
    (KIND, OPTION, "'--kind', choices=['a', 'b']"), (KIND, FIRST, f"assert told.kind in 'ab'\n{FIRST}"),
    (KIND, FIRST, f"if told.kind not in 'ab':\n    raise ValueError\n{FIRST}"),
    (KIND, LAST, f"if told.kind not in 'ab':\n    exit(2)\n{LAST}"),
    (KIND, FIRST, f"told.kind = 'a'\n{FIRST}"), (KIND, FIRST, f"width = 4\n{FIRST}"),
    (KIND, FIRST, f"def early():\n    global width\n    width = 4\nearly()\n{FIRST}"),
    (KIND, FIRST, f"from sizes import width\n{FIRST}"), (KIND, FIRST, f"def width():\n    pass\n{FIRST}"),
    (KIND, LAST, "try:\n    print(width)\nexcept NameError:\n    pass\n"), (KIND, LAST, "if told.rate:\n    print(width)\n"),
    (KIND, LAST, "print(width if told.rate else 8)\n"), (KIND, LAST, "print(told.rate and width)\n"),
    (KIND, LAST, ""), (KIND, "width = 16", "other = 16"), (KIND, HEAD, f"# In[1]:\n{HEAD}"),
    (KIND, "else:\n    print('kind?')", "else:\n    pass"),
    (IN_FUNCTION, "made(told.kind)", "made('a')"), (IN_FUNCTION, "made(kind):", "made(kind, width=8):"),
    (IN_FUNCTION, "  if kind", "  if kind == 'c':\n    return\n  if kind"), (METHOD, "own.made(told.kind)", "own.made('a')"),
    (IN_FUNCTION, "made(kind)", "made(kind: Literal['a', 'b'])"), (DASHED, "-kind'", "-kind', choices=['a', 'b']"),
    (IN_LOOP, "pass", "continue"), (IN_LOOP, "pass", "break"), (IN_LOOP, "in kinds", "in ('a', 'b')"),
    (IN_LOOP, "in kinds", "in ['a', 'b']"), (KIND, FIRST, f"class Told:\n    kind: Literal['a', 'b']\n{FIRST}"),
    (KIND, FIRST, f"class Told:\n    kind = 'a'\n{FIRST}"), (KIND, "print('kind?')", "stop('kind?')"),
    (KIND, KIND, KIND.replace(LAST, "").replace(FIRST, LAST + FIRST)), (HALF, "told.half:", "half:"),
    (HALF, ", action='store_true'", ""), (HALF, ", action='store_true'", ", action='store_true', default=True"),
    (HALF, "print(scale)", "if told.half:\n    print(scale)"),
    (HALF, "print(scale)", "asked = told.half\nif asked:\n    print(scale)"), (HALF, "if told", "told.half = True\nif told"),
    (HALF, "if told.half:\n    scale = 2\n", "more = 0\nif told.half:\n    scale = 2\n    more = 1\nif more:\n    "),
    (HALF, "if told", "parser.set_defaults(half=True)\nif told"), (HALF, "\nprint", "\nelse:\n    raise SystemExit\nprint"),
    (GPUS, "available()", "available() or told"), (GPUS, "\nprint", "\nelse:\n    raise SystemExit\nprint"),
    (KIND, FIRST, f"def check(told):\n    if told.kind not in 'ab':\n        raise ValueError\ncheck(told)\n{FIRST}"),
    (KIND, "width = 8", "width = 8\n    raise SystemExit"),
    (GPUS, "if torch", "assert torch.cuda.device_count()\nif torch"), (GPUS, "torch.cuda.is_available()", "ready()")])
def test_a_name_may_have_a_value_in_all_cases_that_come(text: str, old: str, new: str, tmp_path: Path) -> None:
    assert old in text
    assert [bool(found("given_in_some_cases", each, tmp_path)) for each in (text, text.replace(old, new))] == [True, False]


@pytest.mark.parametrize(("text", "old", "new"), [
    (HALF, "print(scale)", "if told.rate:\n    print(scale)"), (GPUS, "is_available()", "device_count() > 1"),
    (KIND, FIRST, f"import sizes\n{FIRST}"), (KIND, "width = 8", "width = 8\n    if told.kind:\n        raise ValueError"),
    (GPUS, GPUS, GPUS.replace("if torch", "if ready:\n  if torch").replace("print", "  print")),
    (KIND, FIRST, f"if told.rate > 3:\n    raise ValueError\n{FIRST}"), (HALF.replace("told.half", "told.half_way"), "'--half'",
                                                                          "'--half-way'"),
    (KIND, FIRST, f"one, two = 1, 2\n{FIRST}"), (KIND, FIRST, f"parser.add_argument('--rate', choices=[1, 2])\n{FIRST}")])
def test_other_conditions_and_other_modules_change_nothing(text: str, old: str, new: str, tmp_path: Path) -> None:
    (tmp_path / "sizes.py").write_text("width = 4\n", encoding="utf-8")
    assert found("given_in_some_cases", text.replace(old, new), tmp_path)


TWO = HEAD + MADE + ENGINE.format(stage=2)
AUTO = TWO.replace("'train_batch_size': 8", "'bf16': {'enabled': 'auto'}").replace("'stage': 2", "'stage': 3")
CALL = "engine, *_"


@pytest.mark.parametrize(("text", "old", "new"), [
    (TWO, "config=", "optimizer=optimizer, config="), (TWO, "initialize(model=model", "initialize(None, model, optimizer"),
    (TWO, "config=", "**more, config="), (TWO, "'train_batch_size': 8", "'optimizer': {'type': 'AdamW'}"),
    (TWO, "'train_batch_size': 8", "**more"), (TWO, CALL, f"settings = settings_of(model)\n{CALL}"),
    (TWO, "'stage': 2", "'stage': int(stage)"), (TWO, "config=settings", "config=other"), (TWO, "{'stage': 2}", "None"),
    (AUTO, CALL, f"settings['bf16']['enabled'] = True\n{CALL}"), (AUTO, CALL, f"settings.update(bf16={{}})\n{CALL}"),
    (AUTO, CALL, f"def fill(told):\n    told['bf16'] = {{}}\nfill(settings)\n{CALL}"),
    (AUTO, "{'bf16'", "{'autotuning': {'enabled': True}, 'bf16'"), (AUTO, "'bf16': {'enabled'", "'pipeline': {'stages'")])
def test_what_the_engine_of_deepspeed_takes(text: str, old: str, new: str, tmp_path: Path) -> None:
    assert old in text
    assert [bool(found("engine_refused", each, tmp_path)) for each in (text, text.replace(old, new))] == [True, False]


def test_changes_of_other_tables_do_not_count(tmp_path: Path) -> None:
    for more in ("others['bf16'] = {}", "def told(rows):\n    return rows\ntold(data)"):
        assert found("engine_refused", AUTO.replace(CALL, f"{more}\n{CALL}"), tmp_path)


WHOLE = loop(*PLAIN, before="class Net(nn.Module):\n    pass\nnet = Net()\n",
             after="torch.save(net, 'model.pt')\nagain = torch.load('model.pt')\n")
LISTED = loop(*PLAIN, before="class Row:\n    pass\ndef told():\n    made = []\n    made.append(Row())\n    return made\n"
              "rows = told()\n", after="torch.save(rows, 'rows.pt')\nagain = torch.load('rows.pt')\n")
BY_FUNCTIONS = WHOLE.replace("torch.save(net, 'model.pt')\nagain = torch.load('model.pt')", (
    "{first}def save({more}path):\n    torch.save(net, {name})\ndef load(path):\n    return torch.load({name})\n"
    "save(*'a')\nload('b')"))


@pytest.mark.parametrize(("text", "old", "new"), [
    (WHOLE, "load('model.pt'", "load('model.pt', weights_only=False"), (WHOLE, "load('model.pt'", "load('model.pt', **more"),
    (WHOLE, "load('model.pt'", "load('other.pt'"), (WHOLE, "save(net", "save(net.state_dict()"),
    (WHOLE, "torch.save", "torch.load = told\ntorch.save"),
    (WHOLE, "torch.save", "torch.serialization.add_safe_globals([Net])\ntorch.save"),
    (WHOLE, "torch.save", "os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'\ntorch.save"),
    (WHOLE, "again = torch.load('model.pt')", "try:\n    torch.load('model.pt')\nexcept OSError:\n    pass"),
    (WHOLE, "torch.save", "net = net.state_dict()\ntorch.save"), (WHOLE, "torch.save(net, ", "torch.save(obj, "),
    (LISTED, "append(Row())", "append(vars(Row()))"), (LISTED, "append(Row())", "append(1)"),
    (LISTED, "made.append(Row())", "made.append(Row())\n    made = len(made)"), (LISTED, "return made", "return str(made)"),
    (LISTED, "torch.save", "rows = [vars(row) for row in rows]\ntorch.save"), (LISTED, "made.append", "made.remove"),
    (LISTED, "made.append", "kept.append"), (LISTED, "    return made", "    if data:\n        return\n    return made"),
    (BY_FUNCTIONS.format(first="", more="", name="'model.pt'"), "'model.pt'", "path"),
    (BY_FUNCTIONS.format(first="where = 'x.pt'\n", more="", name="where"), "def save(", "def save(net, ")])
def test_what_is_saved_whole_may_be_loaded(text: str, old: str, new: str, tmp_path: Path) -> None:
    assert old in text
    assert [bool(found("own_objects_refused", each, tmp_path)) for each in (text, text.replace(old, new))] == [True, False]
    older = Circumstances(software=Software({"torch": "2.5.0"}, {}))
    assert not found("own_objects_refused", text, tmp_path, older)


def test_rows_that_are_kept_for_the_next_run_are_refused_there(tmp_path: Path) -> None:
    cached = LISTED.replace("rows = told()\n", "def rows_of(path):\n    if path:\n        rows = torch.load(path)\n"
                            "    else:\n        rows = told()\n        torch.save(rows, path)\n    return rows\nrows_of('a')\n"
                            "def other():\n    rows = 1\n    return rows\n").partition("torch.save(rows, 'rows.pt')")[0]
    assert found("own_objects_refused", cached, tmp_path)
    assert not found("own_objects_refused", cached.replace("rows = told()", "rows = other()"), tmp_path)


def test_loaded_and_saved_in_one_function_is_one_file(tmp_path: Path) -> None:
    text = WHOLE.replace("torch.save(net, 'model.pt')\nagain = torch.load('model.pt')", (
        "def again(path):\n    torch.save(net, path)\n    return torch.load(path)\nagain('x.pt')"))
    assert found("own_objects_refused", text, tmp_path)
    assert found("own_objects_refused", text.replace("= Net()", "= AutoTokenizer.from_pretrained('gpt2')"), tmp_path)
