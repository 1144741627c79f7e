"""Small steps to hold the arithmetic against: a case, its facts and workload, and the very setup that they describe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from fake_group import Copying, shared

from powertrain.cost.collectives import Division
from powertrain.cost.workload import Workload
from powertrain.data.example import Example, collate
from powertrain.facts.model import model_facts
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import ModelConfig, make_config
from powertrain.models.decoder import Decoder
from powertrain.models.kernels.attention import bmm_attention, math_attention, ragged_attention, sdpa_attention
from powertrain.models.kernels.frozen import FP8, INT8, scale_base
from powertrain.models.kernels.quantised import keep_whole, quantise_base
from powertrain.recipe import Recipe
from powertrain.records import IGNORE, ModelFacts
from powertrain.run.rehearsal import fake_group
from powertrain.techniques.activation_checkpointing import CheckpointedBlocks
from powertrain.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from powertrain.techniques.flat_parameters import FlatParameters
from powertrain.techniques.fused_blocks import FusedBlocks
from powertrain.techniques.saved_activations import KINDS, SavedActivations
from powertrain.techniques.whole_pass import WholePass
from powertrain.training.loop import measured_step_bytes, new_state
from powertrain.training.objectives import NEXT_TOKEN, NextToken
from powertrain.training.optimizers import OPTIMIZERS, optimizer_of
from powertrain.training.setup import Precision, Setup, plain_setup

KERNELS = {"math": math_attention, "bmm": bmm_attention, "ragged": ragged_attention, "sdpa": sdpa_attention}
SCALED = {"int8": INT8, "fp8": FP8}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


ONE_PROCESS = Division(1)


@dataclass(frozen=True)
class Case:
    """One step: of which model, trained how, in which passes."""

    family: str = "llama"
    kernel: str = "sdpa"
    dtype: str = "fp32"
    passes: tuple[tuple[int, ...], ...] = ((40, 40, 40),)     # the lengths of the documents of each
    adapters: AdapterConfig | None = None
    stored: str = "fp32"                     # what frozen weights are held in
    held: str | None = None                  # what a technique holds the frozen matrices in instead
    whole: int = 0                           # blocks of a 4-bit base that are kept whole
    every: int = 0                           # of the blocks that are checkpointed
    keeps_attention: bool = False
    chunk_rows: int | None = None
    fused: bool = False                      # the optimizer
    optimizer: str = "adamw"
    by_hand: bool = False                    # the blocks
    one_call: bool = False                   # each, by hand
    whole_pass: bool = False                 # in two calls
    saved: dict[str, str] = field(default_factory=dict)      # what such blocks do not keep
    saved_blocks: int = 0
    flat: bool = False                       # weights and gradients in one buffer for each decay group
    ignored: float = 0.0                     # share of the targets that train nothing
    objective: NextToken = NEXT_TOKEN
    model: dict[str, Any] = field(default_factory=dict)
    division: Division = ONE_PROCESS         # of the step's processes; each of them computes all passes

    @property
    def config(self) -> ModelConfig:
        sizes = {"vocabulary": 300, "layers": 3, "width": 64, "heads": 4, "context": max(map(max, self.passes)), "dropout": 0.0}
        return make_config(self.family, **(sizes | self.model))[0]

    @property
    def facts(self) -> ModelFacts:
        if self.adapters is None:
            return model_facts(self.config)
        return model_facts(self.config, method="lora", path="here", adapters=self.adapters, frozen_dtype=self.stored,
                           unquantised_dtype="fp32" if self.stored == "nf4" else "")

    @property
    def workload(self) -> Workload:
        examples = sum(map(len, self.passes))
        return Workload(examples, max(map(max, self.passes)), micro_batch=len(self.passes[0]), dtype=self.dtype,
                        checkpoint_every=self.every, checkpoint_keeps_attention=self.keeps_attention,
                        loss_chunk_rows=self.chunk_rows, loss_has_terms=self.objective.has_terms, kernel=self.kernel,
                        fused_optimizer=self.fused,
                        optimizer=OPTIMIZERS.named(self.optimizer).facts_on("cpu"),
                        fused_blocks=self.by_hand or self.one_call, one_call=self.one_call,
                        whole_pass=self.whole_pass,
                        saved=self.saved, saved_blocks=self.saved_blocks,
                        base_dtype=self.held, whole_blocks=self.whole, flat_parameters=self.flat,
                        shards=self.division.shards if self.division.stage else 1, sharded_stage=self.division.stage,
                        replicas=self.division.replicas if self.division.stage else self.division.processes,
                        documents=self.passes, trained_share=1 - self.ignored, threads=torch.get_num_threads())

    def make_model(self) -> Decoder:
        torch.manual_seed(0)
        model = Decoder(self.config)
        if self.adapters is None:
            return model
        if self.stored == "nf4":
            quantise_base(model, type="nf4", double=True)
        else:
            model = model.to(DTYPES[self.stored])
        add_adapters(model, self.adapters)
        return model

    def setup(self) -> Setup:
        lengths = [length for one in self.passes for length in one]
        optimizer = optimizer_of(Recipe.model_validate({"optimizer": {"name": self.optimizer}}))
        plain = plain_setup(self.make_model(), [self._example(length) for length in lengths], collate,
                            train_batch_size=len(lengths), seed=0, objective=self.objective,
                            optimizer=dataclasses.replace(optimizer, fused=self.fused))
        changed = dataclasses.replace(plain, arrange=self._arranged, attention=KERNELS[self.kernel],
                                      precision=Precision(DTYPES[self.dtype]))
        if self.every:
            changed = dataclasses.replace(
                changed, run_block=CheckpointedBlocks(changed.run_block, self.every, self.keeps_attention))
        if self.whole:
            keep_whole(changed.model, self.whole, DTYPES[self.dtype])
        if self.held:
            scale_base(changed.model, SCALED[self.held], partial(changed.try_out, 1), otherwise=DTYPES[self.dtype])
        if self.flat:
            changed = FlatParameters().apply(changed)
            for enter_setting in changed.runtime:
                enter_setting()
        if self.by_hand:
            changed = FusedBlocks().apply(changed)
        if self.one_call:
            changed = FusedBlocks("one_call").apply(changed)
        if self.whole_pass:
            changed = WholePass().apply(changed)
        if self.saved:
            kinds = dict.fromkeys(KINDS, "keep") | self.saved
            changed = SavedActivations(**kinds, blocks=self.saved_blocks).apply(changed)
        return dataclasses.replace(changed, loss=ChunkedCrossEntropy(self.chunk_rows).loss) if self.chunk_rows else changed

    def measured_bytes(self) -> int:
        """What torch really allocates at the fullest moment of the second step, with all that stands."""
        torch._dynamo.reset()                # a function is compiled for so many kinds of calls and no more
        if self.division.processes == 1:
            setup = self.setup()
            return measured_step_bytes(setup, new_state(setup, weight_decay=0.1))
        with fake_group(self.division.processes), Copying():
            setup = shared(self.setup(), self.division)
            return measured_step_bytes(setup, new_state(setup, weight_decay=0.1))

    def _example(self, length: int) -> Example:
        tokens = np.arange(length, dtype=np.int64) % self.config.vocabulary
        return Example(tokens, np.where(np.arange(length) < round(self.ignored * length), IGNORE, tokens))

    def _arranged(self, examples: Any, micro_batch: int) -> list[list[Example]]:
        """The examples, which come in any order, as the case's passes have them."""
        left = list(examples)

        def next_of(length: int) -> Example:
            return left.pop(next(i for i, example in enumerate(left) if example.tokens == length))

        return [[next_of(length) for length in one] for one in self.passes]
