"""Runs that start from trained weights: what they write, that they resume exactly, and what they refuse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration

from driver import run_cli
from powertrain.cost.precision import unit_of
from powertrain.data.table_tokenizers import ByteTokenizer
from powertrain.facts.hardware import read_hardware
from powertrain.models.adapters.files import save_model
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.planner import workload_of
from powertrain.recipe import resolve
from powertrain.records import WrongUse
from powertrain.records.event_log import read_events
from powertrain.records.events import Memory, Note, Start, Step
from powertrain.records.origins import Origin
from powertrain.run.fits import workload_of_step
from powertrain.run.prepare import build_setup, prepare

Cli = Callable[..., tuple[int, str, str]]
QUICK = ["train_batch_size=6", "max_steps=5", "learning_rate=1e-2", "save_steps=2", "eval_steps=3", "logging_steps=2",
         "lora.r=4", "lora.dropout=0.1", "techniques.threads=off"]


def tiny_llama(folder: Path, *, vocabulary: int = 257, width: int = 64, layers: int = 2) -> Path:
    torch.manual_seed(0)
    config, _ = make_config("llama", vocabulary=vocabulary, layers=layers, width=width, heads=2, context=128, end_of_text=256,
                            tied_head=True)
    save_model(Decoder(config), folder, ByteTokenizer())
    return folder


def tiny_t5(folder: Path) -> Path:
    T5ForConditionalGeneration(T5Config(vocab_size=257, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
                                        eos_token_id=256)).save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


def rows_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "base")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return rows_file(tmp_path / "data.jsonl",
                     [{"question": f"what is {i}" + "?" * (i % 5), "answer": f"it is {i * i}"} for i in range(60)])


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(e.step, e.loss, e.grad_norm) for e in read_events(run / "events.jsonl") if isinstance(e, Step)]


@pytest.mark.parametrize("words", ["method=lora", "method=lora lora.dropout=0 techniques.fused_blocks.kernels=cpp",
                                   "method=full", "method=full optimizer=muon"])
def test_a_run_that_compiles_nothing_imports_neither_the_compiler_nor_transformers(
        words: str, base: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    code = ("import sys\nfrom powertrain.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n"
            "    assert not end.code\n    assert not {'torch._dynamo', 'sympy', 'transformers'} & set(sys.modules)")
    train = ["train", f"model.path={base}", f"data={data}", *QUICK, *words.split(), "--output", "run"]
    done = subprocess.run([sys.executable, "-c", code, *train], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={**os.environ, "POWERTRAIN_CACHE": str(cache)})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["method=lora"], ["method=qlora"], ["method=full"],
                                   ["lora.kind=lslora", "lora.target_modules=[q_proj, down_proj]"]], ids=" ".join)
def test_a_killed_run_resumes_to_the_very_bytes_of_one_that_was_not(
        words: list[str], cli: Cli, base: Path, data: Path, tmp_path: Path) -> None:
    train = ["train", f"model.path={base}", f"data={data}", *QUICK, *words]
    assert cli(*train, "--output", "whole")[0] == 0
    assert cli(*train, "--output", "killed", fault=("step", 3))[0] == -9
    code, _, err = cli("train", "--resume", "killed")
    assert code == 0, err
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert losses(whole) == losses(killed)
    written = sorted((whole / "model").glob("*.safetensors"))
    assert [(killed / "model" / file.name).read_bytes() for file in written] == [file.read_bytes() for file in written]


@pytest.mark.skipif(unit_of(read_hardware(Path("nowhere"), measure=False), "int8") is None, reason="no int8 products here")
def test_a_run_on_an_int8_base_resumes_exactly_says_what_it_did_and_leaves_the_base_alone(
        cli: Cli, base: Path, data: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    train = ["train", f"model.path={base}", f"data={data}", *QUICK, "techniques.int8_base=on"]
    assert cli(*train, "--output", "whole")[0] == 0
    assert cli(*train, "--output", "killed", fault=("step", 3))[0] == -9
    code, _, err = cli("train", "--resume", "killed")
    assert code == 0, err
    assert "8 frozen matrices are in 8 bits" in err
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert losses(whole) == losses(killed)
    notes = [event.sentence for event in read_events(whole / "events.jsonl") if isinstance(event, Note)]
    assert notes == ["int8_base: 8 frozen matrices are in 8 bits"]
    code, _, err = cli("export", "whole", "--to", "merged", "--output", "merged")
    assert code == 0, err
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before


def test_checkpoints_of_an_adapter_hold_no_frozen_weight(cli: Cli, base: Path, data: Path, tmp_path: Path) -> None:
    assert cli("train", f"model.path={base}", f"data={data}", *QUICK, "--output", "run")[0] == 0
    saved = load_file(next((tmp_path / "run" / "checkpoints").iterdir()) / "model.safetensors")
    assert saved
    assert all(".adapters." in name for name in saved)


def test_an_adapter_is_trained_further(cli: Cli, base: Path, data: Path, tmp_path: Path) -> None:
    train = ["train", f"model.path={base}", f"data={data}", *QUICK]
    assert cli(*train, "--output", "first")[0] == 0
    code, _, err = cli(*train, "model.adapter=first/model", "lora.r=8", "--output", "second")
    assert code == 0, err
    assert losses(tmp_path / "second")[0][1] < losses(tmp_path / "first")[0][1]
    described = json.loads((tmp_path / "second" / "model" / "adapter_config.json").read_text())
    assert described["r"] == 4                           # the folder's, whatever the recipe asks of new ones


def test_a_run_is_a_base_for_the_next_one(cli: Cli, base: Path, data: Path, tmp_path: Path) -> None:
    assert cli("train", f"model.path={base}", f"data={data}", *QUICK, "method=full", "--output", "full")[0] == 0
    code, _, err = cli("train", "model.path=full", f"data={data}", *QUICK, "--output", "next")
    assert code == 0, err
    described = json.loads((tmp_path / "next" / "model" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str((tmp_path / "full" / "model").resolve())


def test_words_without_a_recipe_start_from_no_recipe(base: Path, data: Path) -> None:
    resolved = resolve(None, [f"model.path={base}", f"data={data}"])
    assert resolved.recipe.method == "lora"
    assert resolved.origins["method"] == Origin("method default", "lora")
    assert resolved.recipe.name == "run"


def test_a_tiny_time_is_turned_into_steps_and_leaves_the_model_as_it_was(base: Path, data: Path, cache: Path) -> None:
    from powertrain.run.prepare import with_measured_length

    prepared = prepare(resolve(None, [f"model.path={base}", f"data={data}", "train_time_s=0.01"]), cache, lambda text: None)
    setup = build_setup(prepared)
    before = {name: value.clone() for name, value in setup.model.state_dict().items()}
    assert with_measured_length(prepared, setup, lambda text: None).total_steps >= 1
    assert all(torch.equal(value, before[name]) for name, value in setup.model.state_dict().items())


def test_the_watched_step_is_held_against_what_its_own_passes_take(cli: Cli, base: Path, tmp_path: Path) -> None:
    """One example in sixty fills the context; the others are a fifth of that."""
    rows = [{"question": f"{i}", "answer": "yes" * (33 if i == 50 else 1)} for i in range(60)]
    words = [f"model.path={base}", f"data={rows_file(tmp_path / 'data.jsonl', rows)}", *QUICK, "train_batch_size=16",
             "max_steps=20", "eval_steps=0", "save_steps=0"]
    code, out, err = cli("train", *words, "--output", "run")
    assert code == 0, err
    (memory,) = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, Memory)]
    expected = sum(memory.predicted.values())
    assert memory.allocated_bytes == pytest.approx(expected, rel=0.1)
    (start,) = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, Start)]
    assert memory.fullest_bytes == sum((start.estimate or {})["memory_bytes"].values()) > 1.5 * expected
    assert "for the fullest possible passes" in out


def test_the_memory_of_a_step_counts_what_an_encoder_reads(cache: Path, tmp_path: Path) -> None:
    rows = [{"document": "long " * 9 + str(i % 5), "summary": "no" * (1 + i % 3)} for i in range(30)]
    words = [f"model.path={tiny_t5(tmp_path / 't5')}", f"data={rows_file(tmp_path / 'pairs.jsonl', rows)}", "method=full"]
    prepared = prepare(resolve(None, [*words, *QUICK]), cache, lambda text: None)
    setup = build_setup(prepared)
    workload = workload_of_step(workload_of(prepared.facts, prepared.plan), setup, 3)
    batches = setup.prepare(3)
    assert sum(map(sum, workload.documents)) == sum(len(batch.tokens) + len(batch.source.tokens) for batch in batches)
    assert [len(documents) for documents in workload.documents] == [len(batch.lengths) for batch in batches]
    assert workload.trained_share < 0.2      # the encoder's tokens reach no head


# ------------------------------------------------------------------------------------------------ what cannot be


def refused(words: list[str], cache: Path, match: str) -> None:
    """One sentence with the cure, before anything is trained."""
    with pytest.raises(WrongUse, match=match) as error:
        build_setup(prepare(resolve(None, [*words, "techniques.threads=off"]), cache, lambda text: None))
    assert "\n" not in str(error.value)


def test_an_adapter_for_another_base_says_what_differs(cli: Cli, base: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    assert cli("train", f"model.path={base}", f"data={data}", *QUICK, "--output", "run")[0] == 0
    other = tiny_llama(tmp_path / "other", width=32)
    refused([f"model.path={other}", f"model.adapter={tmp_path / 'run' / 'model'}", f"data={data}"], cache,
            r"another base.*q_proj.*64.*32")


def test_columns_that_match_nothing_are_shown_with_what_would(base: Path, cache: Path, tmp_path: Path) -> None:
    data = rows_file(tmp_path / "odd.jsonl", [{"frage": "a", "antwort": "b"}] * 3)
    refused([f"model.path={base}", f"data={data}"], cache, r"frage.*antwort.*messages.*question")


def test_rows_in_which_nothing_is_trained_are_refused(base: Path, data: Path, cache: Path) -> None:
    refused([f"model.path={base}", f"data={data}", "data.max_length=8", "data.long_examples=cut"], cache, r"max_length")


def test_a_tokenizer_without_an_end_is_refused(base: Path, data: Path, cache: Path) -> None:
    config = base / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "eos_token"}))
    refused([f"model.path={base}", f"data={data}"], cache, r"no end token.*data\.end_token=")


def test_a_vocabulary_larger_than_the_embedding_is_refused(data: Path, cache: Path, tmp_path: Path) -> None:
    config, _ = make_config("llama", vocabulary=200, layers=1, width=32, heads=2)
    save_model(Decoder(config), tmp_path / "small", ByteTokenizer())
    refused([f"model.path={tmp_path / 'small'}", f"data={data}"], cache, r"257 tokens.*200 rows.*data\.tokenizer=")


def test_weights_that_are_missing_or_left_over_are_named(base: Path, data: Path, cache: Path) -> None:
    path = base / "model.safetensors"
    weights = load_file(path)
    save_file({name: tensor for name, tensor in weights.items() if "layers.1" not in name}, path)
    refused([f"model.path={base}", f"data={data}"], cache, r"lacks .*model\.layers\.1")
    save_file({**weights, "model.layers.9.extra": torch.zeros(2)}, path)
    refused([f"model.path={base}", f"data={data}"], cache, r"model\.layers\.9\.extra")


def test_a_hub_id_that_is_nowhere_is_refused(data: Path, cache: Path) -> None:
    refused(["model.path=nobody/no-such-model", f"data={data}"], cache, r"nobody/no-such-model")


def test_a_quantised_base_is_not_trained_in_full(base: Path, data: Path, cache: Path) -> None:
    config = base / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "bitsandbytes"}}))
    refused([f"model.path={base}", f"data={data}", "method=full"], cache, r"quanti")


def test_sequence_to_sequence_data_is_no_conversation_and_the_reverse(base: Path, cache: Path, tmp_path: Path) -> None:
    pairs = rows_file(tmp_path / "pairs.jsonl", [{"document": f"long {i}", "summary": "short"} for i in range(30)])
    refused([f"model.path={base}", f"data={pairs}"], cache, r"decoder.*data\.format=")
    tiny_t5(tmp_path / "t5")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    chats = rows_file(tmp_path / "chats.jsonl", [{"messages": talk}] * 30)
    refused([f"model.path={tmp_path / 't5'}", f"data={chats}", "method=full"], cache, r"seq|turn")


def test_a_shape_that_the_model_has_not_is_refused(base: Path, data: Path, cache: Path) -> None:
    refused([f"model.path={base}", f"data={data}", "model.layers=7"], cache, r"model\.layers=7.*has 2")


def test_method_and_path_must_agree(base: Path) -> None:
    with pytest.raises(WrongUse, match=r"method=scratch draws new weights"):
        resolve(None, [f"model.path={base}", "method=scratch"])
    with pytest.raises(WrongUse, match=r"method=lora needs trained weights"):
        resolve(None, ["method=lora"])


def test_a_model_folder_that_runs_code_needs_the_flag_and_a_commit(base: Path, data: Path, cache: Path) -> None:
    config = base / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "strange",
                                  "auto_map": {"AutoModelForCausalLM": "modeling.Strange"}}))
    refused([f"model.path={base}", f"data={data}"], cache, r"trust_remote_code")
    refused([f"model.path={base}", f"data={data}", "model.trust_remote_code=true", "model.revision=main"], cache, r"commit")


def test_the_same_words_run_twice_give_the_same_bytes(base: Path, data: Path, cache: Path, tmp_path: Path) -> None:
    for name in "ab":
        code, _, err = run_cli(["train", f"model.path={base}", f"data={data}", *QUICK, "--output", name], cache, tmp_path)
        assert code == 0, err
    first, second = (tmp_path / name / "model" / "adapter_model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    shutil.rmtree(tmp_path / "a")
