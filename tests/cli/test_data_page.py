"""docs/data.md: its commands in their order, as a reader would run them, and what they refuse."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from adapted_models import make_base
from driver import run_cli
from example_folders import chat_folder, json_lines
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.models.huggingface.folder import save_folder

Cli = Callable[..., tuple[int, str, str]]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
QUICK = ["max_steps=2", "train_batch_size=4", "data.max_length=64", "techniques.threads=off", "sample.tokens=0",
         "--output", "runs/cpt"]
CALLS = {"messages": [{"role": "user", "content": "what is it?"},
                      {"role": "assistant", "tool_calls": [
                          {"function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]},
                      {"role": "tool", "content": "hot"}, {"role": "assistant", "content": "it is hot"}],
         "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader")
    tokenizer = open_example_tokenizer(chat_folder(path / "tokenizer"))
    save_folder(make_base("llama", vocabulary=330, context=512), path / "base", tokenizer)
    asked = [{"question": f"what is the sum of {n} and two?", "answer": f"the sum of {n} and two is {n + 2}."}
             for n in range(12)]
    json_lines(path / "chats.jsonl", [*asked, asked[0], {"question": "and?", "answer": " "}])
    questions = [{"role": "user", "content": f"what is it, {n}?"} for n in range(3)]
    json_lines(path / "calls.jsonl", [{**CALLS, "messages": [question, *CALLS["messages"][1:]]} for question in questions])
    for name in ("docs", "general"):
        json_lines(path / f"{name}.jsonl", [{"text": f"{name} says: the cat {n} sat on the mat {n * n}. " * 3}
                                            for n in range(40)])
    json_lines(path / "prompts.jsonl", [{"prompt": "the cat"}, {"prompt": "what is"}])
    return path


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_command_of_the_page_works_in_its_order(cache: Path, folder: Path) -> None:
    commands = [line for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
                for line in block.splitlines()]
    assert len(commands) == 8
    for line in commands:
        words = shlex.split(line)[1:]
        code, out, err = run_cli([*words, *(QUICK if words[0] == "train" else [])], cache, folder)
        assert code == 0, f"{line}\n{err}"
        assert out, line
    assert len(lines_of(folder / "clean.jsonl")) < 14
    assert {entry["kind"] for entry in lines_of(folder / "clean.jsonl.removed.jsonl")[1:]} >= {"duplicate", "empty"}
    assert "messages" in lines_of(folder / "turns.jsonl")[0]
    mixed = [row["text"] for row in lines_of(folder / "mixed.jsonl")]
    assert sum("docs" in str(text) for text in mixed) == pytest.approx(0.8 * len(mixed), abs=2)
    assert [answer["row"] for answer in lines_of(folder / "answers.jsonl")] == [1, 2]
    trained = (folder / "runs" / "cpt" / "events.jsonl").read_text(encoding="utf-8")
    assert '"event": "end"' in trained


@pytest.mark.parametrize(("words", "says"), [
    ("data clean chats.jsonl chats.jsonl", "is a source itself"),
    ("data clean chats.jsonl new.jsonl --language english", "the language 'english' is not known"),
    ("data clean chats.jsonl new.jsonl --column body", "has no column 'body'; there are question, answer"),
    ("data convert chats.jsonl new.csv --format alpaca", "add --shape"),
    ("data convert calls.jsonl new.csv", "calls.jsonl:1: the column 'messages' holds a list, and CSV holds only text"),
    ("data mix new.jsonl docs.jsonl=0.5 general.jsonl --tokenizer base", "general.jsonl has no weight; write SOURCE=WEIGHT"),
    ("data mix new.jsonl docs.jsonl=0.5 general.jsonl=0.2 --tokenizer base", "weights sum to 0.7"),
    ("data mix new.jsonl docs.jsonl=-1 general.jsonl=2 --tokenizer base", "a share of the tokens is above 0"),
    ("generate base --batch prompts.jsonl", "needs both --batch FILE and --output FILE")])
def test_bad_input_is_one_sentence_and_exit_code_2(cache: Path, folder: Path, words: str, says: str) -> None:
    code, _, err = run_cli(shlex.split(words), cache, folder)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert not list(folder.glob("new*"))
