"""Processes that divide the weights make the same updates as one: real processes, joined by gloo on this machine."""

from __future__ import annotations

import errno
import gc
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from driver import run_processes
from powertrain.cost.memory import peak_memory
from powertrain.cost.workload import Workload
from powertrain.data.example import Example, collate_padded
from powertrain.facts.model import model_facts
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.files import save_model
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.records import IGNORE, NotApplied
from powertrain.records.checkpoints import MANIFEST, newest_checkpoint, what_is_wrong
from powertrain.records.json_files import read_json, write_json
from powertrain.techniques import (
    activation_checkpointing,
    bf16,
    chunked_cross_entropy,
    fused_adamw,
    micro_batch,
    packing,
    sharding,
)
from powertrain.training import checkpoint
from powertrain.training.checkpoint import Save, load_checkpoint, save_checkpoint
from powertrain.training.loop import State, evaluate, measured_step_bytes, new_state, train
from powertrain.training.optimizers import plain_adamw
from powertrain.training.ranks import ALONE, Ranks, joined
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup, plain_setup
from powertrain.training.sharded import Sharding, gathered, is_divided, own_part, parts_of, summed

STEPS, RATE = 3, 1e-3
SIZES: Mapping[str, Any] = {"vocabulary": 53, "layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 46,
                            "context": 48}
WORST = 0.01                                 # of predicted memory, which is below 0.05 % off here; the promise is 5 %
WIDE: Mapping[str, Any] = {"vocabulary": 301, "layers": 4, "width": 128, "mlp_width": 301}


def uneven_examples(count: int = 28) -> list[Example]:
    """Random examples of 2 to 40 tokens, of which an uneven share trains nothing, so that a mean of means would differ."""
    draw = np.random.default_rng(3)
    examples = []
    for length in draw.integers(2, 41, count):
        tokens = draw.integers(0, SIZES["vocabulary"], length + 1).astype(np.int64)
        examples.append(Example(tokens[:-1], np.where(np.arange(length) < draw.integers(0, length), IGNORE, tokens[1:])))
    return examples


ADAPTERS = AdapterConfig(r=3, alpha=8.0, dropout=0.1)


def full(**model: Any) -> Decoder:
    torch.manual_seed(1)
    return Decoder(make_config("llama", **{**SIZES, **model})[0])


def wide() -> Decoder:
    return full(**WIDE)


def adapted(**model_sizes: Any) -> Decoder:
    """A decoder with LoRA on frozen weights in bf16. B is not zero, so that A has a gradient."""
    model = full(**model_sizes)
    model.to(torch.bfloat16)
    add_adapters(model, ADAPTERS)
    for name, parameter in model.named_parameters():
        if name.endswith(".B"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def wide_adapted() -> Decoder:
    return adapted(**WIDE)


# by method, where memory is measured: the model, and what its facts say besides
MEASURED: Mapping[str, tuple[Callable[[], Decoder], dict[str, Any]]] = {
    "full": (wide, {}),
    "lora": (wide_adapted, {"method": "lora", "path": "here", "adapters": ADAPTERS, "frozen_dtype": "bf16"})}


@dataclass(frozen=True)
class Case:
    """A run of a few steps, divided one way."""

    model: Callable[[], Decoder] = full
    stage: int = 3
    replicas: int = 1
    techniques: tuple[Any, ...] = (packing.Packing(tokens=80),)
    clip: float = 1.0
    batch: int = 14
    tolerance: float = 1e-6

    def setup(self, ranks: Ranks = ALONE) -> Setup:
        setup = plain_setup(self.model(), uneven_examples(), collate_padded, train_batch_size=self.batch, seed=5,
                            optimizer=plain_adamw(RATE, (0.9, 0.95), 1e-8))
        for technique in self.techniques:
            setup = technique.apply(setup)
        if ranks is not ALONE:
            setup = replace(setup, sharding=Sharding(self.stage, self.replicas))
            setup.sharding.divide(setup.model)
        return setup.shared_by(ranks)

    def run(self, ranks: Ranks = ALONE) -> dict[str, Any]:
        setup = self.setup(ranks)
        state = new_state(setup, 0.1)
        steps = list(train(setup, state, Schedule("constant", RATE, STEPS), self.clip))
        held_out = evaluate(setup, setup.examples[:9], tokens_per_byte=None)
        return {"loss": torch.stack([step.loss for step in steps]), "norm": torch.stack([step.grad_norm for step in steps]),
                "tokens": [(step.trained_tokens, step.real_tokens, step.padding_tokens) for step in steps],
                "clipped": int(state.clipped_steps), "held out": held_out.loss, "held out tokens": held_out.tokens,
                **moments_of(state), "local": [len(getattr(p, "_local_tensor", p)) for p in setup.model.parameters()]}


def moments_of(state: State) -> dict[str, dict[str, Tensor]]:
    """Moment -> weight -> its value, whole."""
    by_weight = state.optimizer.moments()
    return {key: {name: summed(by_weight[parameter][key]) for name, parameter in state.model.named_parameters()
                  if parameter.requires_grad} for key in ("exp_avg", "exp_avg_sq")}


CHECKPOINTED = (packing.Packing(tokens=80), activation_checkpointing.ActivationCheckpointing())
CASES = {
    "zero 3": Case(), "zero 2": Case(stage=2), "zero 1": Case(stage=1),
    "clipped, tied": Case(lambda: full(tied_head=True), clip=0.05),
    "dropout": Case(lambda: full(dropout=0.2)), "dropout, zero 1": Case(lambda: full(dropout=0.2), stage=1),
    "fewer passes than processes": Case(techniques=(packing.Packing(tokens=2000),)),
    "recomputed": Case(lambda: full(dropout=0.2), techniques=CHECKPOINTED),
    "recomputed, zero 2": Case(stage=2, techniques=CHECKPOINTED),
    "padded, head in chunks, fused": Case(techniques=(
        chunked_cross_entropy.ChunkedCrossEntropy(rows=16), fused_adamw.FusedAdamW(), micro_batch.MicroBatch(3))),
    "lora": Case(adapted), "bf16": Case(techniques=(packing.Packing(tokens=80), bf16.Bf16()), tolerance=5e-3),
    "bf16, recomputed, tied": Case(lambda: full(tied_head=True), stage=2, techniques=(*CHECKPOINTED, bf16.Bf16()),
                                   tolerance=5e-3)}
HYBRID = {"hybrid": Case(replicas=2), "hybrid, zero 1": Case(lambda: full(dropout=0.2), stage=1, replicas=2)}
REPLICAS = {2: 1, 4: 2}                      # by processes, where memory is measured
RUNS: dict[int, dict[str, Case]] = {4: {"zero 3": CASES["zero 3"], **HYBRID}, 2: CASES, 3: {}}


def refuted(technique: sharding.Sharding, spoil: Callable[[Setup], object] | None = None, *, divides: bool = True) -> str:
    """Put a technique in force beside others, as a plan does, and spoil it; return why it is then not in force."""
    others = (bf16.Bf16(), packing.Packing(tokens=80))
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
    assert all(weight.grad is None for weight in setup.model.parameters())
    return ""


def take_means(setup: Setup) -> None:
    for part in parts_of(setup.model):
        part.set_gradient_divide_factor(2.0)


def what_confirm_says() -> dict[str, str]:
    two = sharding.Sharding(2, 3)
    return {"in force": refuted(two), "in force at stage 1": refuted(sharding.Sharding(2, 1)),
            "means": refuted(two, take_means), "other world": refuted(sharding.Sharding(4, 3)),
            "whole": refuted(two, divides=False),
            "one whole": refuted(two, lambda setup: setattr(setup.model.norm, "weight", torch.nn.Parameter(torch.ones(32))))}


def settled(exchange: Callable[..., Any]) -> Callable[..., None]:
    """Return the exchange such that this thread is the last to let go of its tensors: the ledger does not see gloo's do it."""
    def exchange_and_wait(*args: Any, **kwargs: Any) -> None:
        work = exchange(*args, **{**kwargs, "async_op": True})
        work.wait()
        time.sleep(0.01)                     # gloo's thread holds them a moment longer than it says

    return exchange_and_wait


def memory_of(model: Callable[[], Decoder], stage: int, replicas: int) -> dict[str, Any]:
    """What this process holds between two steps, and at the fullest moment of one."""
    setup = Case(model, stage, replicas).setup(joined())
    state = new_state(setup, 0.1)
    with pytest.MonkeyPatch.context() as patch:
        for exchange in ("all_gather_single", "reduce_scatter_single") if hasattr(torch.distributed, "all_gather_single") else \
                ("all_gather_into_tensor", "reduce_scatter_tensor"):         # as torch 2.11 calls them
            patch.setattr(torch.distributed, exchange, settled(getattr(torch.distributed, exchange)))
        fullest = measured_step_bytes(setup, state)
    moments = [value for found in state.optimizer.state.values() for name, value in found.items() if name != "step"]
    return {"fullest": fullest, "documents": tuple(tuple(batch.lengths) for batch in setup.prepare(1)),
            "weights": sum(own_part(p).nbytes for p in setup.model.parameters()),
            "optimizer": sum(own_part(value).nbytes for value in moments)}


SAVED_AT, GOES_ON = 2, 2
SAVED = {"full": Case(lambda: full(dropout=0.2)), "lora": Case(adapted), "one process": Case(lambda: full(dropout=0.2)),
         "hybrid": Case(replicas=2)}
SAVED_BY, RESUMED_BY = {"one process": 1}, {"hybrid": (4, 1)}         # else: 4, and 4, 2, 1 and 3


def whole_state(state: State) -> dict[str, Tensor]:
    """The weights and moments, whole."""
    weights = {name: summed(weight.detach()).clone() for name, weight in state.model.named_parameters() if weight.requires_grad}
    return {**weights, **{f"{name}.{key}": value.clone() for key, found in moments_of(state).items()
                          for name, value in found.items()}}


def saved(name: str, folder: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Take steps and save after each; return the state of the checkpoint that is resumed, and the losses of the steps after.

    A checkpoint is written beside the next step.
    """
    setup = SAVED[name].setup(ranks)
    state = new_state(setup, 0.1)
    found: dict[str, Any] = {"losses": []}
    save: Save | None = None
    for result in train(setup, state, Schedule("constant", RATE, SAVED_AT + GOES_ON), 1.0):
        if save is not None:
            save.finish()
        if result.step == SAVED_AT:
            found |= whole_state(state)
        if result.step > SAVED_AT:
            found["losses"].append(float(result.loss))
        save = Save(folder / (name if result.step <= SAVED_AT else f"{name}, later"), state, setup.ranks)
    assert save is not None
    save.finish()
    return found


def resumed(name: str, folder: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Go on from the newest checkpoint; return the state that it brought back, and the losses of the next steps."""
    setup = SAVED[name].setup(ranks)
    state = new_state(setup, 0.1)
    newest, _ = newest_checkpoint(folder / name)
    assert newest is not None
    load_checkpoint(newest, state)
    found = whole_state(state)
    losses = []
    for result in train(setup, state, Schedule("constant", RATE, SAVED_AT + GOES_ON), 1.0):
        losses.append(float(result.loss))
        save_checkpoint(folder / f"{name}, resumed by {ranks.world}", state, setup.ranks)
    with gathered(setup.model, keep=ranks.is_writer):
        if ranks.is_writer:
            save_model(setup.model, folder / f"{name}, model of {ranks.world}")
    assert all(is_divided(weight) == (ranks is not ALONE) for weight in setup.model.parameters())
    return {**found, "losses": losses}


def full_disk(rank: int, folder: Path) -> list[Any]:
    """Save where the disk of one process is full; return what each process is told, and what is left of the save."""
    setup = SAVED["full"].setup(joined())
    state = new_state(setup, 0.1)
    said = None
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(checkpoint, "write_file", Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
        try:
            Save(folder, state, setup.ranks).finish()
        except OSError as error:
            said = error.errno
    setup.ranks.barrier()
    return [said, list(folder.iterdir())]


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for world, cases in RUNS.items():
        if rank < world:
            torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
            results: dict[str, Any] = {name: case.run(joined()) for name, case in cases.items()}
            if world == 2:
                results["confirm"] = what_confirm_says()
            if world in REPLICAS:
                results["memory"] = {(method, stage): memory_of(model, stage, REPLICAS[world])
                                     for method, (model, _) in MEASURED.items() for stage in sharding.STAGES}
            if world == 4:
                results["full disk"] = full_disk(rank, Path(folder) / "full disk")
                results["saved"] = {name: saved(name, Path(folder), joined()) for name in SAVED if name not in SAVED_BY}
            results["resumed"] = {name: resumed(name, Path(folder), joined()) for name in SAVED
                                  if world in RESUMED_BY.get(name, (world,))}
            torch.save(results, Path(folder) / f"{world}-{rank}.pt")
            gc.collect()                     # what holds the group, before it goes
            torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """(processes, rank) -> case -> what that process found."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "full disk").mkdir()
    alone = {name: saved(name, folder) for name in SAVED_BY}
    run_processes(_process, max(RUNS), str(folder))
    processes: dict[Any, Any] = {(world, rank): torch.load(folder / f"{world}-{rank}.pt")
                                 for world in RUNS for rank in range(world)}
    return {**processes, "folder": folder, "saved": {**processes[4, 0]["saved"], **alone}}


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, cases in RUNS.items() for name in cases])
def test_divided_weights_take_the_steps_of_whole_ones(found: Any, world: int, name: str) -> None:
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
                torch.testing.assert_close(one[key][weight], moment, rtol=0, atol=case.tolerance * float(moment.abs().max()))
    assert case.clip != 0.05 or alone["clipped"] == STEPS
    shards = world // case.replicas
    for whole, rows in zip(alone["local"], zip(*(found[world, rank][name]["local"] for rank in range(world)), strict=True),
                           strict=True):
        assert sum(rows) == case.replicas * whole
        assert max(rows) == -(-whole // shards)


def test_confirm_looks_at_what_is_held_and_summed(found: Any) -> None:
    for rank in range(2):
        said = found[2, rank]["confirm"]
        assert (said["in force"], said["in force at stage 1"]) == ("", "")
        assert "the norm of a block's gradients" in said["means"]
        assert said["other world"] == "sharding: the plan is for 4 processes, and this run has 2"
        assert "weights are not divided (embedding.weight, " in said["whole"]
        assert said["one whole"] == "sharding: 1 weights are not divided (norm.weight)"


@pytest.mark.parametrize("stage", sharding.STAGES)
@pytest.mark.parametrize("world", REPLICAS)
@pytest.mark.parametrize("method", MEASURED)
def test_what_a_process_holds_is_predicted_and_its_peak(found: Any, method: str, world: int, stage: int) -> None:
    facts, replicas = model_facts(make_config("llama", **{**SIZES, **WIDE})[0], **MEASURED[method][1]), REPLICAS[world]
    for rank in range(world):
        real = found[world, rank]["memory"][method, stage]
        predicted = peak_memory(facts, Workload(14, 20, 14, packed_tokens=80, shards=world // replicas, replicas=replicas,
                                                sharded_stage=stage, documents=real["documents"]))
        if rank % (world // replicas) == 0:  # it has the odd rows
            assert (predicted["weights"], predicted["optimizer"]) == (real["weights"], real["optimizer"])
        assert real["fullest"] / sum(predicted.values()) == pytest.approx(1, abs=WORST)


@pytest.mark.parametrize("world", [4, 2, 1, 3])
@pytest.mark.parametrize("name", SAVED)
def test_any_number_of_processes_resumes_what_any_number_has_saved(found: Any, name: str, world: int) -> None:
    if world not in RESUMED_BY.get(name, (world,)):
        return                               # two replicas of two processes each
    expected = found["saved"][name]
    processes = [found[world, rank]["resumed"][name] for rank in range(world)] if world > 1 else []
    for one in processes or [resumed(name, found["folder"])]:
        assert one.keys() == expected.keys()
        assert all(torch.equal(one[tensor], expected[tensor]) for tensor in expected if tensor != "losses")
        # other processes add up the same terms in another order
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-6)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", ["full", "lora", "hybrid"])
def test_as_many_processes_resume_to_the_same_bytes(found: Any, name: str) -> None:
    resumed_files, unbroken = (files_in(found["folder"] / f"{name}, {kind}") for kind in ("resumed by 4", "later"))
    assert len(unbroken) == GOES_ON * (2 + 2 * (4 // SAVED[name].replicas))
    assert resumed_files == unbroken


def test_the_model_of_divided_weights_is_the_same_folder_as_ever(found: Any) -> None:
    for name in ("full", "lora"):
        folders = [files_in(found["folder"] / f"{name}, model of {world}") for world in (2, 3, 4)]
        resumed(name, found["folder"])       # alone
        alone = files_in(found["folder"] / f"{name}, model of 1")
        assert all(folder.keys() == alone.keys() for folder in folders)
        assert all(len(folder[file]) == len(alone[file]) for folder in folders for file in alone)


def damage(path: Path, how: str) -> None:
    if how == "deleted":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["deleted", "flipped"])
def test_each_damaged_shard_rejects_the_checkpoint_and_the_one_before_is_used(found: Any, tmp_path: Path, how: str) -> None:
    shutil.copytree(found["folder"] / "full", tmp_path / "whole")
    shards = [path.name for path in (tmp_path / "whole" / f"step-{SAVED_AT:06d}").glob("*-of-00004.safetensors")]
    assert len(shards) == 8
    for shard in shards:
        folder = tmp_path / f"{how} {shard}"
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder / f"step-{SAVED_AT:06d}" / shard, how)
        newest, [(rejected, why)] = newest_checkpoint(folder)
        assert newest == folder / f"step-{SAVED_AT - 1:06d}"
        assert rejected == f"step-{SAVED_AT:06d}"
        assert why.startswith(f"{shard} is {'missing' if how == 'deleted' else 'damaged'}")


def test_a_full_disk_of_one_process_is_told_to_all_and_leaves_nothing(found: Any) -> None:
    assert [found[4, rank]["full disk"] for rank in range(4)] == [[errno.ENOSPC, []]] * 4


def test_a_manifest_that_leaves_out_a_shard_is_rejected(found: Any, tmp_path: Path) -> None:
    shutil.copytree(found["folder"] / "full" / f"step-{SAVED_AT:06d}", tmp_path / "checkpoint")
    manifest = read_json(tmp_path / "checkpoint" / MANIFEST)
    assert (manifest["format"], manifest["shards"]) == (2, 4)
    del manifest["files"]["model-00002-of-00004.safetensors"]
    write_json(tmp_path / "checkpoint" / MANIFEST, manifest)
    assert "belong" in str(what_is_wrong(tmp_path / "checkpoint"))
