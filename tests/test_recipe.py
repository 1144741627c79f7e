from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from powertrain.recipe import Recipe, in_steps, quoted, read_yaml, resolve, resolve_words, shipped_recipes
from powertrain.recipe.resolve import known_keys
from powertrain.records import WrongUse
from powertrain.records.origins import COMMAND_LINE, DEFAULT, Origin


def written(path: Path, text: str) -> str:
    file = path / "recipe.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    name = written(tmp_path, "learning_rate: 1e-4\nweight_decay: 0.3\nmodel:\n  layers: 3\n")
    resolved = resolve(name, ["learning_rate=5e-4", "model.width=128"])
    recipe = resolved.recipe
    assert (recipe.learning_rate, recipe.weight_decay, recipe.model.layers, recipe.model.width) == (5e-4, 0.3, 3, 128)
    assert resolved.origins["learning_rate"] == COMMAND_LINE
    assert resolved.origins["weight_decay"] == Origin("file", name)
    assert resolved.origins["model.layers"] == Origin("file", name)
    assert resolved.origins["model.width"] == COMMAND_LINE
    assert resolved.origins["seed"] == DEFAULT


@pytest.mark.parametrize(("word", "key", "value"), [
    ("max_grad_norm=0", "max_grad_norm", 0.0), ("weight_decay=0.0", "weight_decay", 0.0), ("seed=0", "seed", 0),
    ("model.bias=false", "model.bias", False), ("sample.prompt=", "sample.prompt", ""),
    ("data.validation_share=0", "data.validation_share", 0.0), ("eval_steps=0", "eval_steps", 0),
    ("--learning_rate=1e-3", "learning_rate", 1e-3), ("adam_epsilon=1e-12", "adam_epsilon", 1e-12),
    ("max_eval_samples=null", "max_eval_samples", None), ("data=some.txt", "data.source", "some.txt"),
    ("techniques.bf16=off", "techniques", {"bf16": "off"}), ("save_steps=auto", "save_steps", "auto"),
    ("techniques.loader.workers=0", "techniques", {"loader": {"workers": 0}}),
])
def test_zero_false_and_empty_count(word: str, key: str, value: object) -> None:
    plain: object = resolve(None, [word]).recipe.model_dump()
    for part in key.split("."):
        plain = plain[part]  # type: ignore[index]
    assert plain == value
    assert type(plain) is type(value)


@pytest.mark.parametrize(("words", "says"), [
    (["learnin_rate=1"], "did you mean learning_rate?"), (["model.layer=3"], "did you mean model.layers?"),
    (["layers=3"], "did you mean model.layers?"), (["learning_rate=fast"], "learning_rate is \"fast\"; use a number"),
    (["seed=true"], "seed is true; use a whole number"), (["max_steps=0"], "use 1 or more"),
    (["max_steps=2.5"], "whole number"),
    (["nosuch"], "not key=value"), (["model=3"], "model is a table"), (["eval_steps=often"], "'5 epochs'"),
    (["eval_steps=auto"], "'auto' is not an interval"), (["save_steps=often"], "'5 epochs', or auto"),
    (["on_disk_full=go"], "'wait' or 'stop'"), (["save_every_s=0"], "greater than 0"),
    (["max_steps=3", "train_time_s=4"], "both set the length"), (["lr_scheduler_type=cos"], "'cosine', 'linear' or 'constant'"),
    (["optim=rmsprop"], "muon"), (["gradient_accumulation_steps=3"], "per_device_train_batch_size"),
    (["per_device_train_batch_size=3", "gradient_accumulation_steps=4", "train_batch_size=5"], "same setting"),
    (["data="], "data.source: the value is empty"), (["data.source=['', a.txt]"], "the value is empty"),
    (["techniques.bf16=maybe"], "'on' or 'off'"), (["learning_rate=.nan"], "finite"), (["data.block=-1"], "use 1 or more"),
])
def test_what_cannot_be_meant_is_refused_in_one_sentence(words: list[str], says: str) -> None:
    with pytest.raises(WrongUse) as error:
        resolve(None, words)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "says"), [
    ("learning_rate: [1\n", "is not YAML"),
    ("- 1\n- 2\n", "not a recipe"), ("lerning_rate: 1\n", "did you mean learning_rate?"),
    ("model:\n  widht: 3\n", "did you mean model.width?"), ("model: 3\n", "model is a table"),
    ("!!python/object/apply:os.getcwd []\n", "is not YAML"),
])
def test_a_broken_recipe_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    name = written(tmp_path, text)
    with pytest.raises(WrongUse) as error:
        resolve(name)
    assert says in str(error.value)
    assert name in str(error.value)


def test_json_recipes_are_read(tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps({"learning_rate": 1e-5, "model": {"layers": 2}}))
    assert resolve(str(file)).recipe.model.layers == 2


def test_an_unknown_recipe_names_the_nearest_one() -> None:
    with pytest.raises(WrongUse, match="did you mean char-shakespeare"):
        resolve("char-shakspeare")


@pytest.mark.parametrize("name", ["rows.jsonl", "book.TXT"])
def test_data_in_a_recipes_place_is_told_its_own(name: str) -> None:
    with pytest.raises(WrongUse, match=f"^{re.escape(name)} is no recipe; write data={re.escape(name)} to train on it$"):
        resolve(name)


def test_a_stored_recipe_reads_back_to_itself_with_origins(tmp_path: Path) -> None:
    resolved = resolve("char-shakespeare", ["sample.prompt=\"a: 'b' # c\\n\"", "techniques.loader={workers: 2}"])
    resolved = resolved.with_planned({"model.kv_heads": (6, "one for each head")})
    text = resolved.to_yaml()
    again = resolve(written(tmp_path, text))
    assert again.recipe == resolved.recipe
    assert "# planner: one for each head" in text
    assert "# command line" in text
    assert "# recipe char-shakespeare" in text
    assert "# default" in text


SPELLINGS = [
    ("lr=1e-5", "learning_rate", 1e-5), ("training.batch_size=96", "train_batch_size", 96),
    ("training.gradient_clip=0", "max_grad_norm", 0.0), ("training.log_interval=100", "logging_steps", 100),
    ("training.epochs=3", "num_train_epochs", 3.0), ("val_split=0.2", "data.validation_share", 0.2),
    ("training.save_interval=5", "save_steps", "5 epochs"), ("eval_interval=2", "eval_steps", "2 epochs"),
    ("model.n_layer=2", "model.layers", 2),
    ("n_embd=64", "model.width", 64), ("model.context_length=256", "model.context", 256),
    ("sequence_length=1024", "data.block", 1024), ("max_chars=1000", "data.max_chars", 1000),
    ("training.use_compile=false", "techniques", {"torch_compile": "off"}),
    ("gradient_checkpointing=true", "techniques", {"activation_checkpointing": "on"}),
    ("mixed_precision=no", "techniques", {"bf16": "off", "fp16": "off"}), ("fp16=true", "techniques", {"fp16": "on"}),
    ("dataloader_num_workers=4", "techniques", {"loader": {"workers": 4}}),
    ("optim=adamw_torch_fused", "techniques", {"fused_adamw": "on"}), ("max_steps=-1", "max_steps", None),
]


@pytest.mark.parametrize(("word", "key", "value"), SPELLINGS)
def test_the_documents_spellings_are_translated_and_noted(word: str, key: str, value: object, tmp_path: Path) -> None:
    resolved = resolve(written(tmp_path, "name: empty\n"), [word])
    plain: object = resolved.recipe.model_dump()
    for part in key.split("."):
        plain = plain[part]  # type: ignore[index]
    assert plain == value
    assert resolved.notes or word == "max_steps=-1"


def test_accumulation_is_multiplied_into_the_batch(tmp_path: Path) -> None:
    resolved = resolve(written(tmp_path, "per_device_train_batch_size: 4\ngradient_accumulation_steps: 8\n"))
    assert resolved.recipe.train_batch_size == 32
    assert "4 x 8" in resolved.notes[0]


@pytest.mark.parametrize("key", ["drop_last", "cudnn_benchmark", "group_by_length", "torch_empty_cache_steps"])
def test_a_key_without_effect_says_so(key: str, tmp_path: Path) -> None:
    resolved = resolve(written(tmp_path, f"{key}: true\n"))
    assert f"{key} has no effect here" in resolved.notes[0]
    assert resolved.recipe == Recipe()


def test_one_length_given_by_hand_replaces_the_other_of_the_file(tmp_path: Path) -> None:
    name = written(tmp_path, "train_time_s: 100\n")
    assert resolve(name, ["max_steps=3"]).recipe.train_time_s is None
    assert resolve(name, ["num_train_epochs=2"]).recipe.train_time_s is None


def test_another_tokenizer_drops_the_vocabulary_that_the_file_gave_its_own(tmp_path: Path) -> None:
    name = written(tmp_path, "data: {tokenizer: bpe, vocabulary: 2048}\n")
    assert resolve(name, ["data.tokenizer=byte"]).recipe.data.vocabulary is None
    assert resolve(name, ["data.source=x"]).recipe.data.vocabulary == 2048


@pytest.mark.parametrize("recipe", ["default", "char-shakespeare-cpu", "char-12gb"])
def test_the_prompt_of_a_shipped_recipe_is_not_used_with_other_data(recipe: str) -> None:
    shipped = resolve(recipe, []).recipe
    assert shipped.sample.prompt
    assert resolve(recipe, [f"data={shipped.data.source}"]).recipe.sample.prompt == shipped.sample.prompt
    other = resolve(recipe, ["data=mine.txt"])
    assert other.recipe.sample.prompt == ""
    assert other.origins["sample.prompt"] == DEFAULT
    assert resolve(recipe, ["data=mine.txt", "sample.prompt=Once"]).recipe.sample.prompt == "Once"


def test_the_prompt_of_a_users_recipe_file_is_kept_with_other_data(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {source: one.txt}\nsample: {prompt: Once}\n")
    assert resolve(str(tmp_path / "mine.yaml"), ["data=other.txt"]).recipe.sample.prompt == "Once"


def test_a_pin_on_the_command_line_replaces_the_settings_of_the_file(tmp_path: Path) -> None:
    name = written(tmp_path, "techniques:\n  loader: {workers: 3, ahead: 4}\n  bf16: on\n")
    assert resolve(name).recipe.techniques == {"loader": {"workers": 3, "ahead": 4}, "bf16": "on"}
    assert resolve(name, ["techniques.loader=off"]).recipe.techniques["loader"] == "off"
    assert resolve(name, ["techniques.loader.workers=1"]).recipe.techniques["loader"] == {"workers": 1, "ahead": 4}


def test_intervals_in_epochs_become_steps() -> None:
    assert in_steps(250, 10.0) == 250
    assert in_steps("5 epochs", 10.4) == 52
    assert in_steps("0.5 epochs", 1.0) == 1
    assert in_steps(0, 10.0) == 0
    assert in_steps("0 epochs", 10.0) == 0


@pytest.mark.parametrize("key", ["output_dir", "model.adapter", "model.path"])
def test_a_place_below_the_home_folder_may_be_written_with_a_tilde(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    plain: object = resolve(None, [f"{key}=~/a/b"] + ["model.path=x"] * (key == "model.adapter")).recipe.model_dump()
    for part in key.split("."):
        plain = plain[part]  # type: ignore[index]
    assert plain == "/home/someone/a/b"


def test_a_written_recipe_reads_back_whatever_characters_are_in_it() -> None:
    every = "".join(map(chr, [*range(0x300), 0x2028, 0x2029, 0xd83d, 0xfeff, 0xfffe, 0xffff, 0x1f600]))
    written_out = resolve(None, []).with_planned({"sample.prompt": (every, "the test")}).to_yaml()
    assert read_yaml(written_out, "the test")["sample"]["prompt"] == every
    assert len(written_out.splitlines()) == written_out.count("\n")


@pytest.mark.parametrize("text", ["!", "#", "Hello #1", "# a heading"])
def test_a_word_has_neither_tags_nor_comments(text: str) -> None:
    assert resolve_words([f"sample.prompt={text}"]).recipe.sample.prompt == text
    assert resolve_words(["data.end_token=!"]).recipe.data.end_token == "!"


def test_a_word_of_any_characters_is_the_value_that_was_meant() -> None:
    folder = "runs/a b: {c} # 😀é"
    assert resolve_words([f"output_dir={quoted(folder)}"]).recipe.output_dir == folder


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_say_what_they_are_and_what_was_corrected(name: str) -> None:
    recipe = resolve(name).recipe
    assert recipe.name == name
    assert recipe.description
    assert recipe.corrections or name in ("default", "docstrings", "continued-pretraining")     # these come from no document


def test_the_recipes_of_the_issue_ship() -> None:
    assert {"default", "char-shakespeare", "char-shakespeare-cpu", "char-12gb", "char-16gb", "char-24gb", "pretrain-test",
            "pretrain-production"} <= set(shipped_recipes())


def test_every_key_can_be_set_on_the_command_line(tmp_path: Path) -> None:
    name = written(tmp_path, "name: empty\n")
    plain = resolve(name).recipe.model_dump()
    for key in known_keys():
        value: object = plain
        for part in key.split("."):
            value = value[part]  # type: ignore[index]
        assert resolve(name, [f"{key}={json.dumps(value)}"]).recipe == resolve(name).recipe
