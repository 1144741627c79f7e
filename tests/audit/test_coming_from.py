"""The examples of docs/coming-from/ convert by the commands that stand there, and the recipes train."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from adapted_models import make_base
from example_folders import chat_folder
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.models.huggingface.folder import save_folder
from powertrain.records.event_log import read_events
from powertrain.records.events import Step

Cli = Callable[..., tuple[int, str, str]]
PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "coming-from").glob("*.md"))
FILES = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = ("max_steps=2", "train_batch_size=4", "data.validation_share=0", "eval_steps=0",
         "techniques.threads=off", "sample.tokens=0", "model.layers=1", "model.width=32", "model.heads=2", "data.block=16")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples name: a tiny model, rows, and a text."""
    folder = tmp_path_factory.mktemp("material")
    tokenizer = open_example_tokenizer(chat_folder(folder / "tokenizer"))
    save_folder(make_base("llama", vocabulary=330, context=1024), folder / "base", tokenizer)
    rows = [{"messages": [{"role": "user", "content": f"what is {i} and one ?"},
                          {"role": "assistant", "content": f"it is {i + 1}"}]} for i in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"what is {i} and one ?", "chosen": f"it is {i + 1}", "rejected": f"it is {i}"} for i in range(24)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (folder / "input.txt").write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)))
    return folder


def test_there_is_a_page_for_each_peer() -> None:
    assert [page.stem for page in PAGES] == ["axolotl", "llama-factory", "nanogpt", "torchtune", "trl", "unsloth"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_converts_and_trains(page: Path, material: Path, tmp_path: Path, cli: Cli) -> None:
    text = page.read_text(encoding="utf-8")
    for file in material.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for name, content in FILES.findall(text):
        (tmp_path / name).write_text(content)
    assert COMMANDS.findall(text)
    for number, commands in enumerate(COMMANDS.findall(text)):
        convert, train = (line.split()[1:] for line in commands.splitlines())
        code, _, err = cli(*convert, "--elsewhere", folder=tmp_path)
        assert code == 0, err
        small = [word for word in SMALL if page.stem == "nanogpt" or not word.startswith(("model.", "data.block"))]
        code, _, err = cli(*train, *small, f"output_dir=run-{number}", folder=tmp_path)
        assert code == 0, err
        steps = [event.step for event in read_events(tmp_path / f"run-{number}/events.jsonl") if isinstance(event, Step)]
        assert steps[-1] == 2
