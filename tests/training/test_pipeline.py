"""Processes that each have some blocks make the same updates as one with all blocks: real processes, joined by gloo."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from powertrain.data.example import Example, collate_padded
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.records import IGNORE
from powertrain.techniques import (
    activation_checkpointing,
    bf16,
    chunked_cross_entropy,
    fused_adamw,
    micro_batch,
    packing,
    pipeline_parallel,
)
from powertrain.training.loop import State, evaluate, new_state, train
from powertrain.training.optimizers import plain_adamw
from powertrain.training.ranks import ALONE, Ranks, joined
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup, plain_setup

STEPS, RATE = 3, 1e-3
SIZES: Mapping[str, Any] = {"vocabulary": 53, "layers": 4, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 46,
                            "context": 48}


def uneven_examples(count: int = 28) -> list[Example]:
    """Random examples of 2 to 40 tokens, of which an uneven share trains nothing, so that a mean of means would differ."""
    draw = np.random.default_rng(3)
    examples = []
    for length in draw.integers(2, 41, count):
        tokens = draw.integers(0, SIZES["vocabulary"], length + 1).astype(np.int64)
        examples.append(Example(tokens[:-1], np.where(np.arange(length) < draw.integers(0, length), IGNORE, tokens[1:])))
    return examples


def full(family: str = "llama", **model: Any) -> Decoder:
    torch.manual_seed(1)
    return Decoder(make_config(family, **{**SIZES, **model})[0])


def learned_positions() -> Decoder:
    return full("gpt2", tied_head=False, kv_heads=None, mlp_width=None, dropout=0.0)


def adapted() -> Decoder:
    """A decoder with LoRA on frozen weights in bf16. B is not zero, so that A has a gradient."""
    model = full()
    model.to(torch.bfloat16)
    add_adapters(model, AdapterConfig(r=3, alpha=8.0, dropout=0.0))
    for name, parameter in model.named_parameters():
        if name.endswith(".B"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


PACKED = packing.Packing(tokens=80)


@dataclass(frozen=True)
class Case:
    """A run of a few steps, in stages or not."""

    model: Callable[[], Decoder] = full
    techniques: tuple[Any, ...] = (PACKED,)
    clip: float = 1.0
    batch: int = 14
    tolerance: float = 1e-6

    def setup(self, ranks: Ranks = ALONE) -> Setup:
        setup = plain_setup(self.model(), uneven_examples(), collate_padded, train_batch_size=self.batch, seed=5,
                            optimizer=plain_adamw(RATE, (0.9, 0.95), 1e-8))
        for technique in self.techniques:
            setup = technique.apply(setup)
        if ranks is not ALONE:
            setup = pipeline_parallel.PipelineParallel(ranks.world).apply(setup)
            for enter_setting in setup.runtime:
                enter_setting()
        return setup.shared_by(ranks)

    def run(self, ranks: Ranks = ALONE) -> dict[str, Any]:
        setup = self.setup(ranks)
        state = new_state(setup, 0.1)
        steps = list(train(setup, state, Schedule("constant", RATE, STEPS), self.clip))
        held_out = evaluate(setup, setup.examples[:9], tokens_per_byte=None)
        return {"loss": torch.stack([step.loss for step in steps]), "norm": torch.stack([step.grad_norm for step in steps]),
                "tokens": [(step.trained_tokens, step.real_tokens) for step in steps],
                "clipped": int(state.clipped_steps), "held out": held_out.loss, "held out tokens": held_out.tokens,
                "moments": moments_of(state)}


def moments_of(state: State) -> dict[str, Tensor]:
    """The moments of the weights that this process has."""
    by_weight = state.optimizer.moments()
    return {f"{name}.{key}": by_weight[weight][key] for name, weight in state.model.named_parameters() if weight.requires_grad
            for key in ("exp_avg", "exp_avg_sq")}


CASES = {
    "packed": Case(), "clipped": Case(clip=0.05), "lora": Case(adapted), "learned positions": Case(learned_positions),
    "fewer passes than stages": Case(techniques=(packing.Packing(tokens=2000),)),
    "recomputed": Case(techniques=(PACKED, activation_checkpointing.ActivationCheckpointing())),
    "padded, head in chunks, fused": Case(techniques=(
        chunked_cross_entropy.ChunkedCrossEntropy(rows=16), fused_adamw.FusedAdamW(), micro_batch.MicroBatch(3))),
    "bf16": Case(techniques=(PACKED, bf16.Bf16()), tolerance=5e-3)}
RUNS: dict[int, dict[str, Case]] = {4: {"packed": Case()}, 2: CASES, 3: {"six blocks": Case(lambda: full(layers=6))}}


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for world, cases in RUNS.items():
        if rank < world:
            torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
            results: dict[str, Any] = {name: case.run(joined()) for name, case in cases.items()}
            torch.save(results, Path(folder) / f"{world}-{rank}.pt")
            gc.collect()                     # what holds the group, before it goes
            torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """(processes, rank) -> case -> what that process found."""
    folder = tmp_path_factory.mktemp("pipeline")
    torch.multiprocessing.spawn(_process, (str(folder),), nprocs=max(RUNS))
    return {(world, rank): torch.load(folder / f"{world}-{rank}.pt") for world in RUNS for rank in range(world)}


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in RUNS.items() for name in cases])
def test_stages_take_the_steps_of_a_whole_model(found: Any, world: int, name: str) -> None:
    case = RUNS[world][name]
    alone = case.run()
    held: dict[str, Tensor] = {}
    for one in (found[world, rank][name] for rank in range(world)):
        for figure in ("loss", "norm"):
            torch.testing.assert_close(one[figure], alone[figure], rtol=case.tolerance, atol=0)
        assert one["held out"] == pytest.approx(alone["held out"], rel=case.tolerance)
        assert all(one[figure] == alone[figure] for figure in ("tokens", "clipped", "held out tokens"))
        assert not held.keys() & one["moments"].keys()
        held |= one["moments"]
    assert held.keys() == alone["moments"].keys()
    for weight, moment in alone["moments"].items():
        # relative to the weight's largest: the small ones are sums of what nearly cancels
        torch.testing.assert_close(held[weight], moment, rtol=0, atol=case.tolerance * float(moment.abs().max()))
    assert case.clip != 0.05 or alone["clipped"] == STEPS
