"""Processes that divide each block's matrices make the same updates as one: real processes, joined by gloo on this machine."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from driver import run_processes
from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.data.example import Example, collate_padded
from powertrain.facts.model import model_facts
from powertrain.models.adapters.files import save_model
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.records import IGNORE, NotApplied
from powertrain.records.checkpoints import newest_checkpoint
from powertrain.techniques import (
    activation_checkpointing,
    bf16,
    chunked_cross_entropy,
    fused_adamw,
    micro_batch,
    packing,
    tensor_parallel,
)
from powertrain.training.checkpoint import load_checkpoint, save_checkpoint
from powertrain.training.loop import State, evaluate, measured_step_bytes, new_state, train
from powertrain.training.optimizers import plain_adamw
from powertrain.training.ranks import ALONE, Ranks, joined
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup, plain_setup
from powertrain.training.sharded import Sharding, gathered, is_divided, whole_of
from powertrain.training.tensor_parallel import TensorParallel

STEPS, RATE = 4, 1e-3
SIZES: Mapping[str, Any] = {"vocabulary": 53, "layers": 2, "width": 32, "heads": 4, "mlp_width": 44, "context": 48}
# the gradient of a key's bias is zero but for rounding, so Adam steps at random in it, and other gradients round otherwise
KEY_BIAS = 5e-5
GROUPED: Mapping[str, Any] = MappingProxyType({"kv_heads": 2})


def uneven_examples(count: int = 28) -> list[Example]:
    """Random examples of 2 to 40 tokens, of which an uneven share trains nothing, so that a mean of means would differ."""
    draw = np.random.default_rng(3)
    examples = []
    for length in draw.integers(2, 41, count):
        tokens = draw.integers(0, SIZES["vocabulary"], length + 1).astype(np.int64)
        examples.append(Example(tokens[:-1], np.where(np.arange(length) < draw.integers(0, length), IGNORE, tokens[1:])))
    return examples


@dataclass(frozen=True)
class Case:
    """A run of a few steps of a small model, whose blocks `degree` processes divide (0: all)."""

    family: str = "llama"
    model: Mapping[str, Any] = field(default_factory=lambda: GROUPED)
    degree: int = 0
    techniques: tuple[Any, ...] = (packing.Packing(tokens=80),)
    clip: float = 1.0
    tolerance: float = 1e-6
    of_moments: float = 4e-6                 # each block's products are rounded otherwise, and squares are twice as far apart

    def setup(self, ranks: Ranks = ALONE, *, sharded: bool = False) -> Setup:
        torch.manual_seed(1)
        model = Decoder(make_config(self.family, **{**SIZES, **self.model})[0])
        for name, weight in model.named_parameters():
            if weight.dim() == 1:            # biases and norms would be zeros and ones
                torch.nn.init.normal_(weight, mean=float("norm.weight" in name), std=0.1)
        setup = plain_setup(model, uneven_examples(), collate_padded, train_batch_size=14, seed=5,
                            optimizer=plain_adamw(RATE, (0.9, 0.95), 1e-8))
        for technique in self.techniques:
            setup = technique.apply(setup)
        if ranks is not ALONE:
            setup = replace(setup, sharding=Sharding() if sharded else TensorParallel(self.degree or ranks.world))
            setup.sharding.divide(model)  # type: ignore[union-attr]
        return setup.shared_by(ranks)

    def run(self, ranks: Ranks = ALONE) -> dict[str, Any]:
        setup = self.setup(ranks)
        state = new_state(setup, 0.1)
        steps = list(train(setup, state, Schedule("constant", RATE, STEPS), self.clip))
        held_out = evaluate(setup, setup.examples[:9], tokens_per_byte=None)
        return {"loss": torch.stack([step.loss for step in steps]), "norm": torch.stack([step.grad_norm for step in steps]),
                "tokens": [(step.trained_tokens, step.real_tokens, step.padding_tokens) for step in steps],
                "clipped": int(state.clipped_steps), "held out": held_out.loss, "held out tokens": held_out.tokens,
                "weights": {name: whole_of(weight).detach() for name, weight in setup.model.named_parameters()},
                **moments_of(state), "held": {name: weight.numel() for name, weight in setup.model.named_parameters()}}


def moments_of(state: State) -> dict[str, dict[str, Tensor]]:
    """Moment -> weight -> its value, whole."""
    by_weight, names = state.optimizer.moments(), dict(state.model.named_parameters())
    return {key: {name: whole(by_weight[weight][key], weight) for name, weight in names.items()}
            for key in ("exp_avg", "exp_avg_sq")}


def whole(moment: Tensor, weight: Any) -> Tensor:
    joined_moment: Tensor = weight.part.join(moment) if hasattr(weight, "part") else whole_of(moment)
    return joined_moment


CASES = {
    "llama with grouped heads": Case(), "gpt2": Case("gpt2", {}, of_moments=KEY_BIAS),
    "qwen3": Case("qwen3", {**GROUPED, "head_width": 8}),
    "gemma": Case("gemma", GROUPED), "gpt_neox": Case("gpt_neox", {}, of_moments=KEY_BIAS),
    "clipped, tied": Case(model={**GROUPED, "tied_head": True}, clip=0.05),
    "recomputed": Case(techniques=(packing.Packing(tokens=80), activation_checkpointing.ActivationCheckpointing())),
    "padded, head in chunks, fused": Case(techniques=(
        chunked_cross_entropy.ChunkedCrossEntropy(rows=16), fused_adamw.FusedAdamW(), micro_batch.MicroBatch(3))),
    "bf16": Case(techniques=(packing.Packing(tokens=80), bf16.Bf16()), tolerance=5e-3, of_moments=3e-2)}
FOURS = {"llama, all heads apart": Case(model={"kv_heads": 4}), "gpt2": Case("gpt2", {}, of_moments=KEY_BIAS),
         "two groups": Case(degree=2), "qwen3, two groups": Case("qwen3", {**GROUPED, "head_width": 8}, degree=2),
         "two groups, fewer passes than groups": Case(degree=2, techniques=(packing.Packing(tokens=2000),))}
RUNS: dict[int, dict[str, Case]] = {2: CASES, 4: FOURS}


WIDE = Case(model={"vocabulary": 301, "layers": 4, "width": 128, "kv_heads": 2, "mlp_width": 300})


def memory_of() -> dict[str, Any]:
    """What this process holds between two steps, and at the fullest moment of one."""
    setup = WIDE.setup(joined())
    state = new_state(setup, 0.1)
    fullest = measured_step_bytes(setup, state)
    moments = [value for found in state.optimizer.state.values() for name, value in found.items() if name != "step"]
    return {"fullest": fullest, "documents": tuple(tuple(batch.lengths) for batch in setup.prepare(1)),
            "weights": sum(weight.nbytes for weight in setup.model.parameters()),
            "optimizer": sum(moment.nbytes for moment in moments)}


def refuted(technique: tensor_parallel.TensorParallel, spoil: Callable[[Setup], object] | None = None, *,
            divides: bool = True) -> str:
    """Put a technique in force beside others, as a plan does, and spoil it; return why it is then not in force."""
    others = (bf16.Bf16(), packing.Packing(tokens=80), activation_checkpointing.ActivationCheckpointing())
    setup = technique.apply(Case(techniques=others).setup())
    for enter_setting in setup.runtime if divides else ():
        enter_setting()
    if spoil is not None:
        spoil(setup)
    try:
        for one in (*others, technique):
            one.confirm(setup)
    except NotApplied as error:
        return str(error)
    assert all(weight.grad is None and weight.requires_grad for weight in setup.model.parameters())
    return ""


@torch.no_grad()
def scale_up(setup: Setup) -> None:
    setup.model.get_submodule("blocks.1.mlp_out").weight.mul_(10)


def make_whole(setup: Setup) -> None:
    setup.model.get_submodule("blocks.0.qkv").weight = torch.nn.Parameter(torch.ones(64, 32))


def what_confirm_says(world: int) -> dict[str, str]:
    technique = tensor_parallel.TensorParallel(world, 2)
    return {"in force": refuted(technique), "scaled": refuted(technique, scale_up), "whole": refuted(technique, divides=False),
            "one whole": refuted(technique, make_whole),
            "other world": refuted(tensor_parallel.TensorParallel(6, 2), divides=False)}


SAVED_AT, GOES_ON = 2, 2
SAVED = Case("qwen3", {**GROUPED, "head_width": 8})
# name -> processes, and how they divide the model: None, "tensor" or "sharded"
WAYS = {"alone": (1, None), "2 tensor": (2, "tensor"), "2 sharded": (2, "sharded"), "4 tensor": (4, "tensor")}


def setup_of(way: str, ranks: Ranks) -> Setup:
    return replace(SAVED, degree=2).setup(ranks, sharded=WAYS[way][1] == "sharded")


def whole_state(state: State) -> dict[str, Tensor]:
    weights = {name: whole_of(weight).detach().clone() for name, weight in state.model.named_parameters()}
    return {**weights, **{f"{name}.{key}": value.clone() for key, found in moments_of(state).items()
                          for name, value in found.items()}}


def saved(way: str, folder: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Take steps and save after each; return the state of the checkpoint that is resumed, and the losses of the steps after."""
    setup = setup_of(way, ranks)
    state = new_state(setup, 0.1)
    found: dict[str, Any] = {"losses": []}
    for result in train(setup, state, Schedule("constant", RATE, SAVED_AT + GOES_ON), 1.0):
        if result.step == SAVED_AT:
            found |= whole_state(state)
        if result.step > SAVED_AT:
            found["losses"].append(float(result.loss))
        save_checkpoint(folder / (way if result.step <= SAVED_AT else f"{way}, later"), state, setup.ranks)
    return found


def resumed(way: str, source: str, folder: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Go on from the newest checkpoint; return the state that it brought back, and the losses of the next steps."""
    setup = setup_of(way, ranks)
    state = new_state(setup, 0.1)
    newest, _ = newest_checkpoint(folder / source)
    assert newest is not None
    load_checkpoint(newest, state)
    found = whole_state(state)
    losses = []
    for result in train(setup, state, Schedule("constant", RATE, SAVED_AT + GOES_ON), 1.0):
        losses.append(float(result.loss))
        save_checkpoint(folder / f"{source}, resumed by {way}", state, setup.ranks)
    with gathered(setup.model, keep=ranks.is_writer):
        if ranks.is_writer:
            save_model(setup.model, folder / f"{source}, model of {way}")
    assert any(map(is_divided, setup.model.parameters())) == (ranks is not ALONE)
    return {**found, "losses": losses}


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for world, cases in RUNS.items():
        if rank < world:
            torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
            results: dict[str, Any] = {name: case.run(joined()) for name, case in cases.items()}
            results["confirm"] = what_confirm_says(world)
            if world == 2:
                results["memory"] = memory_of()
            for way in (way for way, (processes, _) in WAYS.items() if processes == world):
                results[f"saved by {way}"] = saved(way, Path(folder), joined())
            for way in (way for way, (processes, _) in WAYS.items() if processes == world):
                for source in WAYS:
                    if WAYS[source][0] in (1, world) or world == 4:
                        results[f"{source} resumed by {way}"] = resumed(way, source, Path(folder), joined())
            torch.save(results, Path(folder) / f"{world}-{rank}.pt")
            gc.collect()                     # what holds the group, before it goes
            torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """(processes, rank) -> case -> what that process found."""
    folder = tmp_path_factory.mktemp("divided")
    alone = saved("alone", folder)
    run_processes(_process, max(RUNS), str(folder))
    processes: dict[Any, Any] = {(world, rank): torch.load(folder / f"{world}-{rank}.pt")
                                 for world in RUNS for rank in range(world)}
    states = {f"saved by {way}": processes[world, 0][f"saved by {way}"] for way, (world, _) in WAYS.items() if world > 1}
    return {**processes, "folder": folder, **states, "saved by alone": alone}


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in RUNS.items() for name in cases])
def test_divided_blocks_take_the_steps_of_whole_ones(found: Any, world: int, name: str) -> None:
    case = RUNS[world][name]
    alone = case.run()
    for one in (found[world, rank][name] for rank in range(world)):
        for figure in ("loss", "norm"):
            torch.testing.assert_close(one[figure], alone[figure], rtol=case.tolerance, atol=0)
        assert one["held out"] == pytest.approx(alone["held out"], rel=case.tolerance)
        assert all(one[figure] == alone[figure] for figure in ("tokens", "clipped", "held out tokens"))
        for key in ("exp_avg", "exp_avg_sq"):
            for weight, moment in alone[key].items():
                # relative to the weight's largest: the small ones are sums of what nearly cancels
                torch.testing.assert_close(one[key][weight], moment, rtol=0, atol=case.of_moments * float(moment.abs().max()))
    assert case.clip != 0.05 or alone["clipped"] == STEPS


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in RUNS.items() for name in cases])
def test_a_process_holds_its_part_of_each_matrix_and_equal_copies_of_all_else(found: Any, world: int, name: str) -> None:
    degree, whole_ones = RUNS[world][name].degree or world, dict(RUNS[world][name].setup().model.named_parameters())
    processes = [found[world, rank][name] for rank in range(world)]
    divided = ("qkv", "mlp_in", "attention_out.weight", "mlp_out.weight")
    for weight, whole_one in whole_ones.items():
        share = degree if any(part in weight for part in divided) else 1
        assert all(share * one["held"][weight] == whole_one.numel() for one in processes)
        assert all(torch.equal(one["weights"][weight], processes[0]["weights"][weight]) for one in processes)
        assert not torch.equal(processes[0]["weights"][weight], whole_one)


@pytest.mark.parametrize("world", [2, 4])
def test_confirm_looks_at_what_is_held_and_computed(found: Any, world: int) -> None:
    for rank in range(world):
        said = found[world, rank]["confirm"]
        assert said["in force"] == ""
        assert "the norm of a block's gradients" in said["scaled"]
        assert said["other world"] == f"tensor_parallel: the plan is for 6 processes, and this run has {world}"
        assert "does not hold 1 / 2 of 0.qkv.weight, 0.attention_out.weight, 0.mlp_in.weight" in said["whole"]
        assert said["one whole"].endswith("does not hold 1 / 2 of 0.qkv.weight")


def test_what_a_process_holds_and_its_peak_are_predicted(found: Any) -> None:
    facts = model_facts(make_config("llama", **{**SIZES, **WIDE.model})[0])
    for real in (found[2, rank]["memory"] for rank in range(2)):
        predicted = peak_memory(facts, Workload(14, 20, 14, packed_tokens=80, tensor_degree=2, documents=real["documents"]))
        assert (predicted["weights"], predicted["optimizer"]) == (real["weights"], real["optimizer"])
        assert sum(predicted.values()) == pytest.approx(real["fullest"], rel=0.05)


PAIRS = [(source, way) for source in WAYS for way in WAYS if WAYS[source][0] in (1, WAYS[way][0]) or WAYS[way][0] in (1, 4)]


@pytest.mark.parametrize(("source", "way"), PAIRS)
def test_however_processes_divide_the_model_they_resume_what_others_have_saved(found: Any, source: str, way: str) -> None:
    expected, world = found[f"saved by {source}"], WAYS[way][0]
    processes = [found[world, rank][f"{source} resumed by {way}"] for rank in range(world)] if world > 1 else []
    for one in processes or [resumed(way, source, found["folder"])]:
        assert one.keys() == expected.keys()
        assert all(torch.equal(one[tensor], expected[tensor]) for tensor in expected if tensor != "losses")
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-6)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("way", ["2 tensor", "4 tensor"])
def test_as_many_processes_resume_to_the_same_bytes(found: Any, way: str) -> None:
    assert files_in(found["folder"] / f"{way}, resumed by {way}") == files_in(found["folder"] / f"{way}, later")


def test_a_shard_has_the_rows_of_q_k_and_v_and_of_gate_and_up_apart(found: Any) -> None:
    newest, _ = newest_checkpoint(found["folder"] / "2 tensor")
    assert newest is not None
    with safe_open(newest / "model-00002-of-00002.safetensors", framework="pt") as shard:
        places = json.loads(shard.metadata()["places"])
        assert shard.keys() == sorted(places)
        assert {key: (*places[key], shard.get_slice(key).get_shape()) for key in places if ".0." in key} == {
            "blocks.0.qkv.weight.0": ("blocks.0.qkv.weight", 0, 16, [16, 32]),
            "blocks.0.qkv.weight.1": ("blocks.0.qkv.weight", 0, 40, [8, 32]),
            "blocks.0.qkv.weight.2": ("blocks.0.qkv.weight", 0, 56, [8, 32]),
            "blocks.0.attention_out.weight": ("blocks.0.attention_out.weight", 1, 16, [32, 16]),
            "blocks.0.mlp_in.weight.0": ("blocks.0.mlp_in.weight", 0, 22, [22, 32]),
            "blocks.0.mlp_in.weight.1": ("blocks.0.mlp_in.weight", 0, 66, [22, 32]),
            "blocks.0.mlp_out.weight": ("blocks.0.mlp_out.weight", 1, 22, [32, 22])}


@pytest.mark.parametrize("way", ["2 tensor", "4 tensor"])
def test_the_model_of_divided_blocks_is_the_same_folder_as_ever(found: Any, way: str) -> None:
    resumed("alone", "alone", found["folder"])
    alone, divided = (files_in(found["folder"] / f"alone, model of {one}") for one in ("alone", way))
    assert divided.keys() == alone.keys()
    ours, theirs = (load_file(found["folder"] / f"alone, model of {one}" / "model.safetensors") for one in (way, "alone"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-5)
