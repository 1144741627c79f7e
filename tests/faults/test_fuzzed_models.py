"""config.json, tokenizer.json and their siblings, mutated: each command does its work or says one sentence, in time and memory.

A part of the seeds is tried by default; `--faults` or `--bad-inputs` tries all. What a command writes stays in its folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Commands
from fuzz import FILES, mutated
from runs import Count

from adapted_models import make_base
from example_folders import chat_folder, json_lines
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.models.config import FAMILIES
from powertrain.models.huggingface.folder import save_folder

SEEDS, FEW = 60, 1           # of each file of each family
ENDS_WITHIN_S = 30.0         # on a busy machine: alone each takes a fraction of a second
TUNED = ("model.path=model", "data=../rows.jsonl", "data.max_length=64", "lora.r=2", "train_batch_size=4", "max_steps=1",
         "sample.tokens=2", "techniques.threads=off")
USES: tuple[tuple[str, ...], ...] = (
    ("plan", *TUNED), ("train", *TUNED, "--output", "run"), ("generate", "model", "--tokens", "2", "--prompt", "aaaa the cat"),
    ("facts", *TUNED), ("data", "check", "model.path=model", "data=../rows.jsonl"),
    ("chat", "model", "--tokens", "2", "--message", "the cat " + "a" * 60))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of each family, and rows."""
    root = tmp_path_factory.mktemp("fuzzed")
    json_lines(root / "rows.jsonl", [{"messages": [{"role": "user", "content": f"what is {i} {'a' * 40}!"},
                                                   {"role": "assistant", "content": f"it is {i * i}"}]} for i in range(20)])
    tokenizer = open_example_tokenizer(chat_folder(root / "tokenizer"))
    for family in FAMILIES:
        save_folder(make_base(family, vocabulary=330, context=96), root / family, tokenizer)
    return root


@pytest.fixture(scope="module")
def commands(models: Path) -> Iterator[Commands]:
    (models / "cache").mkdir()
    with Commands(models / "cache") as commands:
        yield commands


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FILES)
def test_a_mutated_file_of_a_model_ends_in_a_run_or_a_sentence(models: Path, commands: Commands, count: Count, name: str,
                                                               family: str, request: pytest.FixtureRequest) -> None:
    whole = request.config.getoption("--faults") is not None or request.config.getoption("--bad-inputs")
    content, ended_well = (models / family / name).read_bytes(), 0
    seeds = range(0, SEEDS, request.config.getoption("--every")) if whole else range(FEW)
    for seed in seeds:
        number = seed + 7 * [*FAMILIES].index(family) + 3 * FILES.index(name)       # so that few seeds meet all uses
        shutil.rmtree(case := models / "case", ignore_errors=True)
        shutil.copytree(models / family, case / "model")
        (case / "model" / name).write_bytes(mutated(name, content, number))
        outside = {path.name for path in models.iterdir()}
        words = USES[number % len(USES)]
        ended = commands.run(words, case, within_s=ENDS_WITHIN_S)
        told = f"{family} {name} {number} {words[:1]}: {ended.code} {ended.seconds:.1f} s {ended.said[-1500:]}"
        assert ended.code in (0, 1, 2, 4, 5), told
        assert "Traceback" not in ended.said, told
        if ended.code in (1, 2):
            assert len([line for line in ended.said.splitlines() if line.startswith("powertrain: ")]) == 1, told
            assert ended.code == 2 or words[0] in ("train", "generate", "chat"), told
        assert {path.name for path in models.iterdir()} == outside, told
        ended_well += 1
    count("mutated files of models", ended_well)
