"""Runs of several kinds for the techniques: blocks of one length, examples of many, with adapters, in bf16, in 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from powertrain.data.example import Compared, Example, collate_padded
from powertrain.facts.model import model_facts
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.models.decoder import Block, Decoder
from powertrain.models.kernels.fused.block import Functions, HandWritten
from powertrain.models.kernels.fused.parts import Parts
from powertrain.models.kernels.quantised import quantise_base
from powertrain.recipe import Recipe
from powertrain.records import IGNORE, Facts
from powertrain.techniques.fused_blocks import ByHand
from powertrain.training.optimizers import plain_adamw
from powertrain.training.preferences import Dpo
from powertrain.training.setup import Precision, Setup, plain_setup

MakeSetup = Callable[..., Setup]
SIZES = {"vocabulary": 50, "layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "mlp_width": 96, "context": 64}
BATCH = 14


@dataclass(frozen=True)
class Case:
    """A kind of run, as a technique meets it."""

    name: str
    facts: Facts
    make_setup: MakeSetup
    recipe: Recipe = field(default_factory=Recipe)
    make_without: MakeSetup | None = None    # where the technique is part of the model: one without it


def ragged_examples(count: int = 28, seed: int = 3) -> list[Example]:
    """Random examples of 2 to 40 tokens, of which the first third trains nothing, as a prompt."""
    draw = np.random.default_rng(seed)
    examples = []
    for length in draw.integers(2, 41, count):
        tokens = draw.integers(0, SIZES["vocabulary"], length + 1).astype(np.int64)
        targets = tokens[1:].copy()
        targets[:length // 3] = IGNORE
        examples.append(Example(tokens[:-1].copy(), targets))
    return examples


def make_ragged(adapters: AdapterConfig | None = None, *, precision: torch.dtype = torch.float32, four_bit: bool = False,
                family: str = "llama", **model: object) -> Setup:
    """A setup as for fine-tuning: padded batches, and adapters whose B is no longer zero, so that A has a gradient."""
    torch.manual_seed(1)
    decoder = Decoder(make_config(family, **(SIZES | model))[0])  # type: ignore[arg-type]
    if four_bit:
        quantise_base(decoder, type="nf4", double=True)
    if adapters is not None:
        add_adapters(decoder, adapters)
        for name, parameter in decoder.named_parameters():
            if name.endswith(".B"):
                torch.nn.init.normal_(parameter, std=0.1)
    setup = plain_setup(decoder, ragged_examples(), collate_padded, train_batch_size=BATCH, seed=5,
                        optimizer=plain_adamw(1e-2, (0.9, 0.95), 1e-8))
    return replace(setup, precision=Precision(precision))


LORA = AdapterConfig(r=4, alpha=8.0)


def ragged_facts(facts: Facts, adapters: AdapterConfig | None, **model: object) -> Facts:
    """The facts of `make_ragged`."""
    lengths = sorted(len(example.inputs) for example in ragged_examples())
    quantiles = {"min": lengths[0], "p10": lengths[2], "p50": lengths[14], "p90": lengths[25], "max": lengths[-1]}
    data = replace(facts.data, kind="conversation", block=-(-sum(lengths) // len(lengths)), max_length=lengths[-1],
                   length_quantiles=quantiles, trained_share=0.7, train_batch_size=BATCH)
    found = model_facts(make_config("llama", **SIZES)[0], method="lora" if adapters else "full", adapters=adapters)  # type: ignore[arg-type]
    return replace(facts, data=data, model=replace(found, **model))


def in_passes_of_4(adapters: AdapterConfig, **model: object) -> Setup:
    return replace(make_ragged(adapters, **model), micro_batch=4)  # type: ignore[arg-type]


def make_compared(adapters: AdapterConfig = LORA) -> Setup:
    """A setup of DPO over pairs that begin with the same prompts; the reference's scores come with them."""
    draw = np.random.default_rng(9)
    plain = make_ragged(adapters)

    def document(prompt: np.ndarray[Any, Any]) -> Example:
        ids = np.concatenate([prompt, draw.integers(0, SIZES["vocabulary"], int(draw.integers(2, 5)))])
        return Example(ids[:-1], np.where(np.arange(1, len(ids)) < len(prompt), IGNORE, ids[1:]))

    def pair() -> Compared:
        prompt = draw.integers(0, SIZES["vocabulary"], int(draw.integers(2, 6)))
        first, second = document(prompt), document(prompt)
        return Compared(np.concatenate([first.inputs, second.inputs]), np.concatenate([first.targets, second.targets]),
                        documents=(first, second), shared=len(prompt) - 1, reference=(-9.0, -8.5))

    return replace(plain, examples=[pair() for _ in range(2 * BATCH)], objective=Dpo().for_model(plain.model))


def compared_facts(facts: Facts) -> Facts:
    """The facts of `make_compared`."""
    ragged = ragged_facts(facts, LORA)
    return replace(ragged, data=replace(ragged.data, kind="preference", shared_share=0.3), has_reference=True)


def run_by_hand(setup: Setup) -> Setup:
    """With blocks written by hand, as the technique has them but for the compiler."""
    assert isinstance(setup.model, Decoder)
    functions = Functions.of(Parts(setup.model.config))
    blocks = tuple(HandWritten(block, functions) for block in setup.model.blocks if isinstance(block, Block))
    return replace(setup, run_block=ByHand(blocks))


def lora_by_hand() -> Setup:
    return run_by_hand(make_ragged(LORA))
