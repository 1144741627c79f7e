"""What Powertrain is compared with: each case is a recipe of ours and the peers that do the same work.

Both sides of a case have the same model (the same weights, and the same first adapter), data, examples of a step in the same
order where the peer lets us, optimizer and learning rate; a step has about 4,096 tokens in cases 1 and 3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH, ACCUMULATION = 8, 3                   # 24 examples of GSM8K: about 3,800 tokens
PACKED_ROWS, PACKED_LENGTH = 4, 1024
STEPS_WRITTEN = 600                          # of which the peers' files hold the examples
PAIRS = 4                                    # of a step, about 1,300 tokens
PAIR_STEPS = 40                              # whose reference both sides score before the first step
BLOCK, BLOCKS = 512, 8                       # of pre-training
OPTIMIZER = ["learning_rate=2e-4", "weight_decay=0", "adam_beta2=0.999", "max_grad_norm=1.0"]
QUIET = ["logging_steps=1000000", "save_steps=0", "eval_steps=0", "sample.tokens=0", "max_steps=2000"]


@dataclass(frozen=True)
class Materials:
    """Files that a run of the benchmarks has made, and where the peers are."""

    folder: Path                             # to write in
    llama: Path                              # 115.6 M parameters, Llama-shaped, with its tokenizer
    gsm8k: Path
    shakespeare: Path
    nanogpt: Path | None                     # a prepared checkout
    cache: Path


@dataclass(frozen=True)
class PeerArm:
    """One way of running a peer."""

    name: str
    script: str                              # in peers/
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    name: str
    what: str                                # one sentence, for README's table
    words: Callable[[Materials], Sequence[str]]          # of `powertrain train`
    peers: Callable[[Materials], Sequence[PeerArm]]


# ------------------------------------------------------------------------------------------------ fine-tuning


def fine_tuning_words(materials: Materials, method: str) -> list[str]:
    # the adapter's options live in its own files
    start = [f"model.adapter={adapter_of(materials)}"] if method == "lora" else []
    return [f"method={method}", f"model.path={materials.llama}", *start, f"data.source={conversations_of(materials)}",
            "data.train_on=all", "data.validation_share=0", f"data.max_length={PACKED_LENGTH}",
            f"train_batch_size={BATCH * ACCUMULATION}", *OPTIMIZER, *QUIET]


def sft_peers(materials: Materials, method: str) -> list[PeerArm]:
    shared = {"model": str(materials.llama), "data": str(in_our_order(materials, method)), "learning_rate": 2e-4,
              "weight_decay": 0.0, "adam_beta2": 0.999, "max_length": PACKED_LENGTH,
              "adapter": str(adapter_of(materials)) if method == "lora" else None}
    return [PeerArm("TRL packed, no checkpointing", "sft_trl.py", shared | {"arm": "packed", "batch": 1,
                                                                            "accumulation": PACKED_ROWS}),
            PeerArm("TRL defaults", "sft_trl.py", shared | {"arm": "default", "batch": BATCH, "accumulation": ACCUMULATION})]


def preference_words(materials: Materials) -> list[str]:
    return ["method=lora", f"model.path={materials.llama}", f"model.adapter={adapter_of(materials)}",
            f"data.source={pairs_of(materials)}", "objective=dpo", "data.validation_share=0",
            f"data.max_length={PACKED_LENGTH}", f"train_batch_size={PAIRS}", *OPTIMIZER, *QUIET]


def preference_peers(materials: Materials) -> list[PeerArm]:
    data = in_our_order(materials, f"dpo-{PAIRS}", pairs_of(materials), PAIRS, PAIR_STEPS)
    shared = {"model": str(materials.llama), "data": str(data),
              "learning_rate": 2e-4, "weight_decay": 0.0, "adam_beta2": 0.999, "max_length": PACKED_LENGTH,
              "adapter": str(adapter_of(materials)), "batch": PAIRS, "accumulation": 1}
    return [PeerArm("TRL, reference precomputed, no checkpointing, fp32", "dpo_trl.py", shared | {"arm": "best"}),
            PeerArm("TRL defaults", "dpo_trl.py", shared | {"arm": "default"})]


def pairs_of(materials: Materials) -> Path:
    """GSM8K as pairs: each answer before the answer of the next question. The scores of few pairs are soon computed."""
    path = materials.folder / f"pairs-{PAIRS * PAIR_STEPS}.jsonl"
    if not path.exists():
        rows = [json.loads(line) for line in materials.gsm8k.read_text(encoding="utf-8").splitlines()[:PAIRS * PAIR_STEPS]]
        path.write_text("".join(json.dumps({
            "prompt": [{"role": "user", "content": row["question"]}],
            "chosen": [{"role": "assistant", "content": row["answer"]}],
            "rejected": [{"role": "assistant", "content": other["answer"]}]}) + "\n"
            for row, other in zip(rows, rows[1:] + rows[:1], strict=True)), encoding="utf-8")
    return path


def conversations_of(materials: Materials) -> Path:
    """GSM8K as conversations."""
    path = materials.folder / "conversations.jsonl"
    if not path.exists():
        rows = [json.loads(line) for line in materials.gsm8k.read_text(encoding="utf-8").splitlines()]
        path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": row["question"]},
                                                         {"role": "assistant", "content": row["answer"]}]}) + "\n"
                                for row in rows), encoding="utf-8")
    return path


def in_our_order(materials: Materials, method: str, source: Path | None = None, batch: int = BATCH * ACCUMULATION,
                 steps: int = STEPS_WRITTEN) -> Path:
    """The conversations, or rows of another source, of the first steps as our arm reads them, one step after the other."""
    from powertrain.data.order import step_examples

    path = materials.folder / f"in-order-{method}.jsonl"
    if not path.exists():
        rows = (source or conversations_of(materials)).read_text(encoding="utf-8").splitlines(keepends=True)
        order = [int(i) for step in range(steps) for i in step_examples(seed(), step, batch, len(rows))]
        path.write_text("".join(rows[i] for i in order), encoding="utf-8")
    return path


def seed() -> int:
    from powertrain.recipe import Recipe

    return Recipe().seed


def adapter_of(materials: Materials) -> Path:
    """A new adapter on all linears, r 16, from which both sides begin."""
    path = materials.folder / "adapter"
    if not path.exists():
        import torch

        from powertrain.models.adapters.attached import add_adapters
        from powertrain.models.adapters.files import save_adapter
        from powertrain.models.adapters.targets import AdapterConfig
        from powertrain.models.huggingface.folder import load_folder

        torch.manual_seed(0)
        model = load_folder(materials.llama)
        add_adapters(model, AdapterConfig(r=16, alpha=32.0))
        save_adapter(model, path, base=str(materials.llama))
    return path


# ------------------------------------------------------------------------------------------------ pre-training


def pretraining_words(materials: Materials) -> list[str]:
    return ["model.family=llama", "model.layers=8", "model.width=448", "model.heads=7", f"data={materials.shakespeare}",
            "data.tokenizer=bpe", "data.vocabulary=8192", f"data.block={BLOCK}", "data.validation_share=0",
            f"train_batch_size={BLOCKS}", "lr_scheduler_type=constant", "warmup_steps=0", *OPTIMIZER, *QUIET]


def trainer_peers(materials: Materials) -> list[PeerArm]:
    model, blocks = first_weights_and_blocks(materials, pretraining_words(materials), "pre-training")
    options = {"model": str(model), "blocks": str(blocks), "batch": BLOCKS, "learning_rate": 2e-4, "weight_decay": 0.0,
               "adam_beta2": 0.999}
    return [PeerArm(f"transformers Trainer, {shown}", "pretrain_trainer.py", options | {"arm": arm})
            for shown, arm in (("bf16", "bf16"), ("defaults", "default"))]


def first_weights_and_blocks(materials: Materials, words: Sequence[str], name: str) -> tuple[Path, Path]:
    """What our arm begins with, as a Hugging Face folder, and what its first steps read: (steps, batch, block + 1) of ids."""
    import numpy as np

    from powertrain.data.order import step_examples
    from powertrain.recipe import resolve_words
    from powertrain.run.prepare import build_setup, prepare

    model, blocks = materials.folder / f"{name}-weights", materials.folder / f"{name}-blocks.npy"
    if not blocks.exists():
        prepared = prepare(resolve_words(words), materials.cache, lambda text: None)
        setup = build_setup(prepared)
        from powertrain.models.adapters.files import save_model

        save_model(setup.model, model)
        rows = [[np.append(setup.examples[i].inputs, setup.examples[i].targets[-1])
                 for i in step_examples(setup.seed, step, setup.train_batch_size, len(setup.examples))]
                for step in range(STEPS_WRITTEN)]
        np.save(blocks, np.array(rows, dtype=np.int32))
    return model, blocks


# ------------------------------------------------------------------------------------------------ character models


def character_words(materials: Materials, recipe: str, dropout: float) -> list[str]:
    return [recipe, f"data={materials.shakespeare}", f"model.dropout={dropout}", "learning_rate=1e-3",
            "lr_scheduler_type=constant", "warmup_steps=0", *QUIET[:-1], "max_steps=5000"]


def nanogpt_peers(materials: Materials, dropout: float, *, small: bool) -> list[PeerArm]:
    if materials.nanogpt is None:
        return []
    sizes = ["--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128"] if small else []
    words = character_words(materials, "char-shakespeare-cpu" if small else "char-shakespeare", dropout)
    model, blocks = first_weights_and_blocks(materials, words, f"char-{'small' if small else 'large'}-{dropout:g}")
    options = {"checkout": str(materials.nanogpt), "weights": str(model), "blocks": str(blocks),
               "words": [f"--dropout={dropout}", "--learning_rate=1e-3", *sizes]}
    return [PeerArm("nanoGPT with bf16", "train_nanogpt.py", options | {"arm": "bf16"}),
            PeerArm("nanoGPT as shipped", "train_nanogpt.py", options | {"arm": "shipped"})]


CASES: tuple[Case, ...] = (
    Case("lora", "LoRA r 16 on all linears, Llama of 115.6 M parameters, GSM8K, about 4,000 tokens a step",
         lambda m: fine_tuning_words(m, "lora"), lambda m: sft_peers(m, "lora")),
    Case("full", "all weights trained, Llama of 115.6 M parameters, GSM8K, about 4,000 tokens a step",
         lambda m: fine_tuning_words(m, "full"), lambda m: sft_peers(m, "full")),
    Case("dpo", "DPO, LoRA r 16 on all linears, Llama of 115.6 M parameters, pairs of GSM8K answers, about 1,300 tokens a step",
         preference_words, preference_peers),
    Case("pre-training", "Llama of 25 M parameters from scratch, blocks of 512 tokens, 8 a step",
         pretraining_words, trainer_peers),
    *(Case(f"char-large-dropout-{dropout:g}", f"character model, 6 layers x 384, block 256, batch 64, dropout {dropout:g}",
           lambda m, dropout=dropout: character_words(m, "char-shakespeare", dropout),
           lambda m, dropout=dropout: nanogpt_peers(m, dropout, small=False)) for dropout in (0.0, 0.2)),
    Case("char-small", "character model, 4 layers x 128, block 64, batch 12",
         lambda m: character_words(m, "char-shakespeare-cpu", 0.0), lambda m: nanogpt_peers(m, 0.0, small=True)),
)
