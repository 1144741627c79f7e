"""Small tasks with checkable answers on held-out questions: each method has learned its task, not only lowered a loss."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForQuestionAnswering, T5Config, T5ForConditionalGeneration

from powertrain.cli.surroundings import say
from powertrain.data.tokenizers import ByteTokenizer
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.recipe import resolve
from powertrain.run.folder import RunFolder
from powertrain.run.prepare import prepare
from powertrain.run.session import start_run

ENOUGH = 0.9                 # of the held-out answers; guessing gives a half at most
EVERY = ["eval_steps=0", "save_steps=0", "logging_steps=1000", "train_batch_size=16", "lr_scheduler_type=linear",
         "data.validation_share=0.1", "techniques.threads=off"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny random llama with a byte tokenizer."""
    torch.manual_seed(0)
    config, _ = make_config("llama", vocabulary=257, layers=2, width=64, heads=4, context=64, end_of_text=256)
    Decoder(config).save(tmp_path / "base", ByteTokenizer())
    return tmp_path / "base"


@pytest.fixture
def parity(tmp_path: Path) -> Path:
    """Is this number odd or even?: the last digit decides, whatever stands before it."""
    draw = random.Random(0)
    rows = [{"question": f"{draw.randrange(10_000)}?", "answer": None} for _ in range(400)]
    for row in rows:
        row["answer"] = "odd" if int(row["question"][:-1]) % 2 else "even"
    path = tmp_path / "parity.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(words: list[str], cache: Path, output: Path) -> Path:
    prepared = prepare(resolve(None, [*words, *EVERY, f"output_dir={output}"]), cache, say)
    folder, code = start_run(prepared, lambda event: None)
    assert code == 0
    return folder.path
