"""The recipes that ship, prepared and trained as far as a test may."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.facts.model import model_facts
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.recipe import resolve, shipped_recipes
from powertrain.records import ModelFacts
from powertrain.records.event_log import read_events
from powertrain.records.events import Evaluated, Step

Cli = Callable[..., tuple[int, str, str]]
SHRINK = ["model.layers=1", "model.width=32", "model.heads=2", "data.block=32", "model.context=32", "train_batch_size=4",
          "max_steps=3", "warmup_steps=1", "sample.tokens=3", "techniques.threads=off"]


SCRATCH = [name for name in shipped_recipes() if resolve(name).recipe.method == "scratch"]


@pytest.mark.parametrize("name", SCRATCH)
def test_it_trains_at_a_small_size(cli: Cli, source: Path, tmp_path: Path, name: str) -> None:
    vocabulary = ["model.vocabulary=null", "data.vocabulary=300"] if name.startswith("pretrain") else []
    prompt = ["sample.prompt="] if name != "default" else []
    code, _, err = cli("train", name, f"data={source}", *SHRINK, *vocabulary, *prompt, "--output", "run")
    assert code == 0, err
    assert [e.step for e in read_events(tmp_path / "run" / "events.jsonl") if isinstance(e, Step)] == [1, 2, 3]


def test_production_is_the_documents_size(cli: Cli, source: Path) -> None:
    """1.41 billion parameters, counted without building them; on this data, so with a smaller tokenizer."""
    code, out, err = cli("plan", "pretrain-production", f"data={source}", "data.vocabulary=300", "data.block=64",
                         "techniques.threads=off", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["facts"]["model"]["parameters"] == pytest.approx(1.41e9, rel=0.01)
    assert plan["plan"]["estimate"]["memory_bytes"]["weights"] == 4 * plan["facts"]["model"]["parameters"]
    assert plan["recipe"]["train_batch_size"] == 4 * 8


@pytest.mark.parametrize(("name", "batch"), [("char-12gb", 96), ("char-16gb", 128), ("char-24gb", 192)])
def test_document_003s_batches(cli: Cli, shakespeare: Path, name: str, batch: int) -> None:
    code, out, err = cli("plan", name, f"data={shakespeare}", "--json")
    assert code == 0, err
    facts = json.loads(out)["facts"]
    assert (facts["data"]["train_batch_size"], facts["data"]["characters"]) == (batch, 1_000_000)
    assert facts["model"]["parameters"] == pytest.approx(10.7e6, rel=0.02)


def test_the_small_character_model_learns_what_nanogpt_does(cli: Cli, shakespeare: Path, tmp_path: Path) -> None:
    """After a quarter of its 2000 steps; nanoGPT's validation loss is then 2.20, with the settings of its README and this rate.

    train.py config/train_shakespeare_char.py --device=cpu --compile=False --block_size=64 --batch_size=12 --n_layer=4
    --n_head=4 --n_embd=128 --dropout=0.0 --max_iters=500 --lr_decay_iters=500 --learning_rate=3e-3 --min_lr=3e-4
    --eval_iters=200
    """
    code, _, err = cli("train", "char-shakespeare-cpu", f"data={shakespeare}", "max_steps=500", "eval_steps=0", "save_steps=0",
                       "techniques.threads=off", "sample.tokens=0", "--quiet", "--output", "run")
    assert code == 0, err
    evaluations = [e for e in read_events(tmp_path / "run" / "events.jsonl") if isinstance(e, Evaluated)]
    assert evaluations[-1].tokens == 111_539
    assert evaluations[-1].loss <= 2.20


# ------------------------------------------------------------------------------------------------ the documents' fine-tuning

# recipe -> (document's batch, its accumulation, tokens of an example, method)
TUNING = {
    "tinyllama-lora": (4, 2, 2048, "lora"),
    "low-end": (1, 8, 512, "qlora"), "mid-range": (2, 4, 1024, "qlora"), "high-end": (4, 2, 2048, "qlora"),
    "rtx-30-40": (4, 2, 2048, "qlora"), "rtx-20": (2, 4, 2048, "qlora"), "gtx-16-10": (1, 8, 512, "qlora"),
    "llama-qlora": (1, 4, 2048, "qlora"), "qwen-qlora": (1, 4, 2048, "qlora"), "t5-bart": (1, 4, 1024, "lora"),
    "phi3-lslora": (16, 4, 2048, "qlora"),
}
# recipe -> what its corrections have to say, by the numbers that tests/audit/document_cases.py gives the statements
CORRECTED = {
    "tinyllama-lora": {"F12": "3 x 3, is 9", "X10": "4 bits became method lora", "F18": "no bf16 units", "F7": "needs Ampere",
                       "X4": "gradient checkpointing", "X3": "CUDA cache", "F13": "low_cpu_mem_usage", "F1": "use_cpu_offload",
                       "X1": "grouping by length", "X8": "pinned memory", "X11": "checkpoint every 100 steps", "F29": "padding",
                       "F28": "a mean of means"},
    "mid-range": {"cannot fit": "24 billion", "F2": "several GPUs", "F20": "memory formula", "F21": "OMP_NUM_THREADS"},
    "high-end": {"cannot fit": "400 billion", "fp16 on for all": "bf16 from Ampere on"},
    "low-end": {"X10": "no speed-up", "F11": "packing"},
    "rtx-30-40": {"X6": "same speed", "F3": "TF32", "F23": "on Windows"},
    "rtx-20": {"F18": "emulated", "F7": "does not run on Turing"},
    "gtx-16-10": {"F22": "a fraction of their fp32 speed", "bitsandbytes": "compute capability 6.0"},
    "llama-qlora": {"provider": "model.provider=unsloth"}, "qwen-qlora": {"provider": "model.provider=unsloth"},
    "t5-bart": {"causal text": "as seq2seq models do", "columns": "document and summary", "fp16": "overflow in fp16"},
    "phi3-lslora": {"F6": "at most 1.7 times", "F5": "every pair", "F9": "refuses to compile", "F10": "longest of their batch",
                    "X7": "accumulation fills no GPU", "F26": "utilisation", "device_map": "device_map=auto",
                    "lost adapters": "lost them at every save", "cannot merge": "cannot be merged"},
}


@pytest.mark.parametrize("name", TUNING)
def test_a_documents_batch_is_its_micro_batch_times_its_accumulation(name: str) -> None:
    micro, accumulation, length, method = TUNING[name]
    recipe = resolve(name).recipe
    assert recipe.train_batch_size == micro * accumulation
    assert any(f"batch {micro} x accumulation {accumulation}" in text or f"{micro} x accumulation {accumulation}" in text
               for text in recipe.corrections)
    assert (recipe.data.max_length, recipe.method) == (length, method)
    assert recipe.model.path
    assert (recipe.lora.r, recipe.lora.alpha, recipe.learning_rate) == (16, 32.0, 2e-4)


@pytest.mark.parametrize("name", TUNING)
def test_what_the_plan_decides_is_left_to_it_and_the_data_to_the_user(name: str) -> None:
    recipe = resolve(name).recipe
    assert recipe.techniques == ({"fp16": "off"} if name == "t5-bart" else {})
    assert recipe.model.provider is None
    assert not recipe.model.trust_remote_code
    assert recipe.data.source == "data.jsonl"
    assert "data=PATH" in recipe.description


@pytest.mark.parametrize(("name", "mistake", "says"),
                         [(name, mistake, says) for name, mistakes in CORRECTED.items() for mistake, says in mistakes.items()])
def test_each_mistake_of_a_document_is_corrected_in_words(name: str, mistake: str, says: str) -> None:
    assert any(says in text for text in resolve(name).recipe.corrections), mistake


def test_document_000s_run_saves_before_it_ends() -> None:
    """Its 171 examples, 5 % of them held out, for 4 epochs at a batch of 8: about 80 steps, and it saved every 100."""
    steps = 4 * math.floor(0.95 * 171) / resolve("tinyllama-lora").recipe.train_batch_size
    assert 75 < steps < 85
    assert resolve("tinyllama-lora").recipe.save_steps == "1 epochs"


def test_document_002s_adapters_are_fourier_functions() -> None:
    lora = resolve("phi3-lslora").recipe.lora
    assert (lora.kind, lora.sigma, lora.regularisation, lora.target_modules) == ("lslora", 1.0, 0.01, "all-linear")


@dataclass(frozen=True)
class FourBitFacts(ModelFacts):
    """Of a model whose files hold 16 bits, with the recipes' dropout."""

    unquantised_dtype: str = "bf16"
    adapter_dropout: float = 0.1


LLAMA_8B = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336, "vocabulary": 128256}
QWEN_3B = {"layers": 36, "width": 2048, "heads": 16, "kv_heads": 2, "mlp_width": 11008, "vocabulary": 151936, "tied_head": True}
QWEN_14B = {"layers": 48, "width": 5120, "heads": 40, "kv_heads": 8, "mlp_width": 13824, "vocabulary": 152064}


@pytest.mark.parametrize(("name", "family", "shape", "card_gb"), [
    ("low-end", "qwen2", QWEN_3B, 6), ("mid-range", "llama", LLAMA_8B, 12), ("high-end", "qwen2", QWEN_14B, 16),
    ("gtx-16-10", "qwen2", QWEN_3B, 6), ("rtx-20", "qwen2", QWEN_3B, 8), ("rtx-30-40", "llama", LLAMA_8B, 12),
])
def test_the_models_that_profiles_recommend_fit_the_cards_they_are_for(name: str, family: str, shape: dict[str, int],
                                                                       card_gb: int) -> None:
    """By formula, an example a pass, blocks computed again, the loss in chunks; an eighth of the card is left for CUDA."""
    recipe = resolve(name).recipe
    config, _ = make_config(family, context=2048, **shape)  # type: ignore[arg-type]
    facts = model_facts(config, method="qlora", path="hub", adapters=AdapterConfig(), frozen_dtype="nf4")
    values = {key: value for key, value in vars(facts).items() if key not in ("unquantised_dtype", "adapter_dropout")}
    step = Workload(recipe.train_batch_size, recipe.data.max_length or 0, micro_batch=1, dtype="fp16", checkpoint_every=1,
                    loss_chunk_rows=64, attention_saves_scores=False)
    assert sum(peak_memory(FourBitFacts(**values), step).values()) < 7 / 8 * card_gb * 2**30
