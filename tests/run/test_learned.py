"""Small tasks with answers that can be checked, asked of held-out questions: each method has learned its task."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForQuestionAnswering, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from powertrain.data.table_tokenizers import ByteTokenizer
from powertrain.models.adapters.files import save_model
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.recipe import resolve
from powertrain.run.prepare import prepare
from powertrain.run.session import start_run
from powertrain.use.generation import write_sample
from powertrain.use.opening import open_model
from powertrain.use.questions import ask_all, held_out_questions
from powertrain.use.scoring import held_out_examples

ENOUGH = 0.9                 # of the held-out answers; guessing is right half the time at most
ASKED = 20
EVERY = ["train_batch_size=16", "lr_scheduler_type=linear", "data.validation_share=0.1", "eval_steps=0", "save_steps=0",
         "logging_steps=1000", "techniques.threads=off"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def train_run(words: list[str], cache: Path, output: Path) -> Path:
    resolved = resolve(None, [*EVERY, *words, f"output_dir={json.dumps(str(output))}"])
    folder, code = start_run(prepare(resolved, cache, lambda text: None), lambda event: None, write_sample)
    assert code == 0
    return folder.path


def share_right(run: Path, cache: Path, metric: str = "exact") -> float:
    """Of the run's held-out questions, those that its saved model answers exactly."""
    opened = open_model(str(run))
    assert opened.found.recipe is not None
    store = held_out_examples(opened, opened.found.recipe, cache, lambda text: None)
    questions = held_out_questions(opened, store, most=ASKED)
    assert len(questions.items) == ASKED
    return ask_all(opened, questions, metric, tokens=6).figures["exact_match"]


@pytest.fixture(scope="module")
def parity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Is this number odd or even? The last digit decides, whatever stands before it."""
    draw = random.Random(0)
    numbers = draw.sample(range(10_000), 400)
    return write_rows(tmp_path_factory.mktemp("parity") / "parity.jsonl",
                      [{"question": f"{number}?", "answer": "odd" if number % 2 else "even"} for number in numbers])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A tiny llama that can say the words: fine-tuned in full, from random weights, to repeat what it is told."""
    folder, draw = tmp_path_factory.mktemp("base"), random.Random(1)
    torch.manual_seed(0)
    config, _ = make_config("llama", vocabulary=257, layers=2, width=64, heads=4, context=64, end_of_text=256)
    save_model(Decoder(config), folder / "random", ByteTokenizer())
    said = [draw.choice(["odd", "even", str(draw.randrange(10_000))]) for _ in range(400)]
    rows = write_rows(folder / "echo.jsonl", [{"question": f"{word}!", "answer": word} for word in said])
    run = train_run([f"model.path={folder / 'random'}", f"data={rows}", "method=full", "learning_rate=3e-3", "max_steps=150"],
                    cache, folder / "run")
    return run / "model"


@pytest.mark.parametrize("words", [
    ["method=full", "learning_rate=1e-3"],
    ["method=lora", "learning_rate=5e-3"],
    ["method=qlora", "learning_rate=5e-3"],
    ["method=lora", "learning_rate=5e-3", "lora.kind=lslora"],
    ["method=lora", "learning_rate=5e-3", "lora.use_dora=true", "lora.use_rslora=true"],
], ids=["full", "lora", "qlora", "lslora", "dora"])
def test_a_decoder_learns_which_numbers_are_odd(
        words: list[str], base: Path, parity: Path, cache: Path, tmp_path: Path) -> None:
    run = train_run([f"model.path={base}", f"data={parity}", "max_steps=150", *words], cache, tmp_path / "run")
    assert share_right(run, cache) >= ENOUGH


def test_what_the_base_says_before_is_wrong(base: Path, parity: Path, cache: Path, tmp_path: Path) -> None:
    run = train_run([f"model.path={base}", f"data={parity}", "max_steps=1", "learning_rate=1e-9"], cache, tmp_path / "run")
    assert share_right(run, cache) <= 0.6


def test_t5_learns_which_numbers_are_odd(parity: Path, cache: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    T5ForConditionalGeneration(T5Config(
        vocab_size=257, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=256, initializer_factor=0.2)).save_pretrained(tmp_path / "t5")
    ByteTokenizer().save(tmp_path / "t5")
    run = train_run([f"model.path={tmp_path / 't5'}", f"data={parity}", "method=full", "learning_rate=1e-2", "max_steps=250"],
                    cache, tmp_path / "run")
    assert share_right(run, cache) >= ENOUGH


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A tiny random BERT with a question-answering head, and a tokenizer of words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "the", "key", "?", "door", "red", "and", "blue", "big", "old",
             "house", "tree", "sea", *map(str, range(100))]
    library = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    PreTrainedTokenizerFast(tokenizer_object=library, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
                            unk_token="[UNK]").save_pretrained(tmp_path / "bert")
    torch.manual_seed(0)
    BertForQuestionAnswering(BertConfig(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_a_question_answering_head_learns_to_find_the_key(bert: Path, cache: Path, tmp_path: Path) -> None:
    draw, rows = random.Random(0), []
    filler = ["the door is red", "and the sea is blue", "the old house", "and the big tree"]
    for _ in range(400):
        before, after = (" ".join(draw.sample(filler, draw.randrange(1, 4))) for _ in "ab")
        number = str(draw.randrange(100))
        context = f"{before} the key is {number} {after}"
        rows.append({"context": context, "question": "what is the key?",
                     "answers": {"text": [number], "answer_start": [context.index(f"key is {number}") + 7]}})
    data = write_rows(tmp_path / "spans.jsonl", rows)
    run = train_run([f"model.path={bert}", f"data={data}", "method=full", "learning_rate=3e-3", "max_steps=120"],
                    cache, tmp_path / "run")
    assert share_right(run, cache) >= ENOUGH
