"""Limits on what others give: each is said in one sentence, and what keeps to it passes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import yaml

from example_folders import chat_folder, examples_of, json_lines
from powertrain.data import tokenizers
from powertrain.data.examples import tokenizer as example_tokenizer
from powertrain.data.examples import trial
from powertrain.data.examples.templates import find_template
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.data.rows import formats
from powertrain.data.rows.row import BadRow, Message
from powertrain.data.tokenizers import BytePairTokenizer
from powertrain.models.huggingface.hub import find_model, read_adapter_json, read_config, read_model_json
from powertrain.recipe.plain_yaml import MOST_VALUES, Yaml
from powertrain.records import WrongUse
from powertrain.records.json_files import read_json, write_json

# ------------------------------------------------------------------------------------------------ YAML


def read(text: str) -> object:
    return yaml.load(text, Yaml)


def bomb(levels: int) -> str:
    return "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10) if n else '1'}]\n" for n in range(levels))


def test_aliases_are_counted_as_often_as_they_stand_there() -> None:
    assert read(bomb(4))["a3"][9][9][9] == [1]  # type: ignore[index]
    with pytest.raises(yaml.YAMLError, match=f"more than {MOST_VALUES:,} values"):
        read(bomb(12))


@pytest.mark.parametrize("text", ["a: &a [*a]", "&a {b: *a}", "a: &a {<<: *a}"])
def test_a_value_within_itself_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="stands within the value that it names"):
        read(text)


def test_only_json_values_are_made() -> None:
    assert read("a: 2001-12-14\nb: 1e-3\nc: on\nd: ~\ne: '1'") == {"a": "2001-12-14", "b": 1e-3, "c": True, "d": None, "e": "1"}
    for tag in ("binary", "set", "omap", "timestamp", "python/name:os.system"):
        with pytest.raises(yaml.YAMLError):
            read(f"a: !!{tag} x")
    with pytest.raises(yaml.YAMLError, match="a number of 5,000 characters"):
        read("a: " + "9" * 5000)


# ------------------------------------------------------------------------------------------------ templates


def test_a_template_that_loops_is_ended_and_one_that_fails_is_not_its_fault(tmp_path: Path,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_S", 1.0)

    def for_ever() -> None:
        while True:
            pass

    def large() -> bytes:
        return bytes(2 * trial.MOST_BYTES)

    def failing() -> None:
        raise ValueError

    before = time.process_time()
    assert [trial.ends(render) for render in (for_ever, large, failing, dict)] == [False, False, True, True]
    assert time.process_time() - before < 0.8            # of this process: it only waits


def test_loops_within_loops_over_the_messages_are_found_before_any_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_S", 0.3)
    folder = chat_folder(tmp_path / "chat", "{% for m in messages %}" * 12 + "x" + "{% endfor %}" * 12)
    with pytest.raises(WrongUse, match="does not write 9 short messages within"):
        find_template(open_example_tokenizer(folder), None)


@pytest.mark.parametrize("template", ["{{ nothing.at.all }}", "{{ messages[99].content }}", "{{ 1 + messages[0].role }}"])
def test_what_a_template_raises_is_the_rows_refusal(tmp_path: Path, template: str) -> None:
    found = find_template(open_example_tokenizer(chat_folder(tmp_path / "chat", template)), None)
    with pytest.raises(BadRow, match="refuses the conversation"):
        found.render([Message("user", "x")])


# ------------------------------------------------------------------------------------------------ long texts


def test_a_text_that_is_too_long_for_the_tokenizer_is_refused_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = BytePairTokenizer.trained(["aa bb"] * 9, 260)
    monkeypatch.setattr(tokenizers, "LONGEST_PIECE_CHARS", 100_000)
    assert len(library.encode("a " * 50_000)) > 0
    assert len(library.encode("a\n" * 500_000)) > 0      # it is cut at its lines
    with pytest.raises(WrongUse, match="a text has more than 100,000 characters without a place to cut it"):
        library.encode("a " * 100_000)
    with pytest.raises(WrongUse, match="more than 100,000 characters"):
        BytePairTokenizer.trained(["a " * 100_000], 260)


def test_an_example_that_is_too_long_is_counted_as_bad_and_the_others_are_kept(tmp_path: Path,
                                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_tokenizer, "LONGEST_PIECE_CHARS", 1000)
    rows = [{"prompt": f"{i}" * (2000 if i == 3 else 10), "completion": "y"} for i in range(9)]
    source = json_lines(tmp_path / "rows.jsonl", list(rows))
    store = examples_of(source, tokenizer_folder=chat_folder(tmp_path / "chat"), max_length=64,
                        cache=tmp_path / "cache", long_examples="cut")
    assert len(store) == 8
    assert store.counts["bad"] == 1


def test_a_conversation_of_too_many_turns_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [Message(("user", "assistant")[number % 2], "x") for number in range(10)]
    assert len(formats.conversation(turns).messages) == 10
    monkeypatch.setattr(formats, "MOST_TURNS", 9)
    with pytest.raises(BadRow, match="10 turns; a conversation has at most 9"):
        formats.conversation(turns)


# ------------------------------------------------------------------------------------------------ model folders


def test_a_pipe_by_the_name_of_a_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(WrongUse, match="is a pipe, a socket or a device"):
        read_json(tmp_path / "config.json")
    with pytest.raises(WrongUse, match="is a pipe, a socket or a device"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(("fields", "says"), [
    ({"num_hidden_layers": 10**9}, "layers is 1000000000; use a whole number, 4,096 or less"),
    ({"hidden_size": 10**20}, "width is 100000000000000000000"), ({"hidden_size": "x"}, "'hidden_size' = 'x'"),
    ({"architectures": [3]}, "should be a list of texts"), ({"rope_scaling": True}, "should be a table"),
    ({"rms_norm_eps": float("inf")}, "should be a finite number"), ({"eos_token_id": {}}, "should be a token's number")])
def test_a_config_has_the_kinds_and_sizes_of_a_models(tmp_path: Path, fields: dict[str, object], says: str) -> None:
    write_json(tmp_path / "config.json", {"model_type": "llama", **fields})
    with pytest.raises(WrongUse, match=says):
        read_model_json(tmp_path / "config.json")


@pytest.mark.parametrize("fields", [{}, {"peft_type": 3}, {"peft_type": "LORA", "r": 10**9},
                                    {"peft_type": "LORA", "target_modules": "("}])
def test_an_adapters_config_has_the_kinds_of_an_adapters(tmp_path: Path, fields: dict[str, object]) -> None:
    write_json(tmp_path / "adapter_config.json", fields)
    with pytest.raises(WrongUse, match=r"adapter_config\.json"):
        read_adapter_json(tmp_path)


@pytest.mark.parametrize(("fields", "says"), [
    ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "should be a finite number"),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": 3}}, "should be a list of finite numbers"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}}, "cannot be"),
    ({"rope_theta": -1.0}, "cannot be computed"), ({"rms_norm_eps": -1.0}, "cannot be computed")])
def test_rotary_positions_and_norms_have_numbers_that_can_be_used(tmp_path: Path, fields: dict[str, object], says: str) -> None:
    write_json(tmp_path / "config.json", {
        "model_type": "llama", "vocab_size": 9, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 64, **fields})
    with pytest.raises(WrongUse, match=says):
        read_config(tmp_path)


DOTS = {"type": "Replace", "pattern": {"Regex": "."}, "content": "." * 99}


@pytest.mark.parametrize(("file", "fields", "says"), [
    ("tokenizer.json", {"normalizer": {"type": "Sequence", "normalizers": [DOTS] * 9}}, "takes seconds or a GiB"),
    ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"<|im_end|>": 2**31}, "merges": []}}, "2,147,483,649 tokens"),
    ("tokenizer_config.json", {"eos_token": 3}, "names the eos_token '3', which is no text"),
    ("tokenizer_config.json", {"eos_token": {"lstrip": True}}, "which is no text"),
    ("tokenizer_config.json", {"bos_token": "\ud800"}, r"the bos_token '\\ud800', which is no text")])
def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path, file: str, fields: dict[str, object], says: str) -> None:
    folder = chat_folder(tmp_path / "chat")
    (folder / file).write_text(json.dumps(read_json(folder / file) | fields))
    with pytest.raises(WrongUse, match=says):
        open_example_tokenizer(folder)
