"""Processes that each have some blocks make the same updates as one with all blocks: real processes, joined by gloo."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from driver import run_processes
from powertrain.cost.collectives import sends_of
from powertrain.cost.memory import replay_stage
from powertrain.cost.workload import Workload
from powertrain.data.example import Example, collate_padded
from powertrain.facts.model import model_facts
from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.files import save_model
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.records import IGNORE, NotApplied, PeerLink, WrongUse
from powertrain.records.checkpoints import newest_checkpoint
from powertrain.techniques import (
    activation_checkpointing,
    bf16,
    chunked_cross_entropy,
    fused_adamw,
    micro_batch,
    packing,
    pipeline_parallel,
)
from powertrain.training.checkpoint import load_checkpoint, save_checkpoint
from powertrain.training.loop import State, evaluate, measured_step_bytes, new_state, train
from powertrain.training.optimizers import plain_adamw
from powertrain.training.pipeline import levelled, stages_gathered
from powertrain.training.ranks import ALONE, Ranks, joined
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup, plain_setup
from powertrain.use.generation import DecoderFeed

STEPS, RATE = 3, 1e-3
SIZES: Mapping[str, Any] = {"vocabulary": 53, "layers": 4, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 46,
                            "context": 48}
WORST = 0.01                                 # of predicted memory; the promise is 5 %
WIDE: Mapping[str, Any] = {"vocabulary": 301, "layers": 4, "width": 128, "mlp_width": 301}


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


def wide() -> Decoder:
    return full(**WIDE)


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


def refuted(spoil: Callable[[Setup], object] | None = None, processes: int = 2, *, divides: bool = True) -> str:
    """Put the technique in force beside others, as a plan does, and spoil it; return why it is then not in force."""
    technique, others = pipeline_parallel.PipelineParallel(processes), (bf16.Bf16(), PACKED)
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


def halved(schedule: type[Any]) -> Callable[..., Any]:
    """A schedule that begins its backward passes at half the loss."""
    return lambda *given, **settings: schedule(*given, **{**settings, "loss_fn": lambda loss, _: loss / 2})


def hold_another(setup: Setup) -> None:
    rank = torch.distributed.get_rank()
    setup.model.set_submodule(f"blocks.{3 * (1 - rank)}", full().blocks[0])


def what_confirm_says() -> dict[str, str]:
    said = {"in force": refuted(), "other world": refuted(processes=4), "whole": refuted(divides=False),
            "another's block": refuted(hold_another)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelining, "Schedule1F1B", halved(pipelining.Schedule1F1B))
        said["halved"] = refuted()
    return said


def memory_of() -> dict[str, Any]:
    """What this process holds between two steps, at the fullest moment of one, and what it sends in one."""
    setup = Case(wide).setup(joined())
    state = new_state(setup, 0.1)
    sent: list[int] = []

    def counted(send: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def ops(stage: Any, number: int) -> list[Any]:
            found = send(stage, number)
            sent.extend(op.tensor.nbytes for op in found)
            return found
        return ops

    fullest = measured_step_bytes(setup, state)
    documents = tuple(tuple(batch.lengths) for batch in levelled(setup.prepare(1), 2))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
            patch.setattr(PipelineStage, name, counted(getattr(PipelineStage, name)))
        list(train(setup, state, Schedule("constant", RATE, 3), 1.0))
    moments = [value for found in state.optimizer.state.values() for name, value in found.items() if name != "step"]
    return {"fullest": fullest, "documents": documents, "sent": sent, "shape": [(len(batch.tokens)) for batch in
                                                                              levelled(setup.prepare(2), 2)],
            "weights": sum(weight.nbytes for weight in setup.model.parameters()),
            "optimizer": sum(value.nbytes for value in moments)}


SAVED_AT, GOES_ON = 2, 2
SAVED = {"full": Case(), "lora": Case(adapted), "one process": Case()}
SAVED_BY = {"one process": 1}                # else: 4


def whole_state(state: State) -> dict[str, Tensor]:
    """The weights and moments that this process has."""
    weights = {name: weight.detach().clone() for name, weight in state.model.named_parameters() if weight.requires_grad}
    return {**weights, **{name: value.clone() for name, value in moments_of(state).items()}}


def saved(name: str, folder: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Take steps and save after each; return the state of the checkpoint that is resumed, and the losses of the steps after."""
    setup = SAVED[name].setup(ranks)
    state = new_state(setup, 0.1)
    found: dict[str, Any] = {"losses": []}
    for result in train(setup, state, Schedule("constant", RATE, SAVED_AT + GOES_ON), 1.0):
        if result.step == SAVED_AT:
            found |= whole_state(state)
        if result.step > SAVED_AT:
            found["losses"].append(float(result.loss))
        save_checkpoint(folder / (name if result.step <= SAVED_AT else f"{name}, later"), state, setup.ranks)
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
    own = list(setup.model.state_dict())
    with stages_gathered(setup.model, keep=ranks.is_writer):
        if ranks.is_writer:
            save_model(setup.model, folder / f"{name}, model of {ranks.world}")
    assert list(setup.model.state_dict()) == own
    return {**found, "losses": losses}


def another_model(folder: Path) -> str:
    """Resume a checkpoint of another model; return what is said."""
    setup = Case(lambda: full(layers=8)).setup(joined())
    newest, _ = newest_checkpoint(folder / "full")
    assert newest is not None
    with pytest.raises(WrongUse) as error:
        load_checkpoint(newest, new_state(setup, 0.1))
    return str(error.value)


def sampled(ranks: Ranks = ALONE) -> list[int]:
    """The likeliest tokens after a prompt, fed one by one."""
    model = Case().setup(ranks).model
    assert isinstance(model, Decoder)
    feed, chosen = DecoderFeed(model), [1, 2, 3]
    for _ in range(6):
        chosen.append(int(feed(chosen[len(feed.ids):]).argmax()))
    return chosen


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for world, cases in RUNS.items():
        if rank < world:
            torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
            results: dict[str, Any] = {name: case.run(joined()) for name, case in cases.items()}
            if world == 4:
                results["saved"] = {name: saved(name, Path(folder), joined()) for name in SAVED if name not in SAVED_BY}
            if world != 3:                   # which does not divide four blocks
                results["resumed"] = {name: resumed(name, Path(folder), joined()) for name in SAVED}
                results["sample"] = sampled(joined())
            if world == 2:
                results |= {"confirm": what_confirm_says(), "memory": memory_of(), "another": another_model(Path(folder))}
            torch.save(results, Path(folder) / f"{world}-{rank}.pt")
            gc.collect()                     # what holds the group, before it goes
            torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """(processes, rank) -> case -> what that process found."""
    folder = tmp_path_factory.mktemp("pipeline")
    alone = {name: saved(name, folder) for name in SAVED_BY}
    run_processes(_process, max(RUNS), str(folder))
    processes: dict[Any, Any] = {(world, rank): torch.load(folder / f"{world}-{rank}.pt")
                                 for world in RUNS for rank in range(world)}
    kept = {name: joined_state([processes[4, rank]["saved"][name] for rank in range(4)]) for name in processes[4, 0]["saved"]}
    return {**processes, "folder": folder, "saved": {**kept, **alone}}


def joined_state(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all stages, which have no tensor in common, as one."""
    assert all(part["losses"] == parts[0]["losses"] for part in parts)
    assert sum(len(part) - 1 for part in parts) == len({name for part in parts for name in part}) - 1
    return {name: value for part in parts for name, value in part.items()}


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


def test_confirm_looks_at_what_is_held_and_at_what_a_step_gives(found: Any) -> None:
    for rank in range(2):
        said = found[2, rank]["confirm"]
        assert said["in force"] == ""
        assert "the norm of the first block's gradients" in said["halved"]
        assert said["other world"] == "pipeline_parallel: the plan is for 4 processes, and this run has 2"
        assert said["whole"] == "pipeline_parallel: the blocks are not divided"
        assert f"this process holds blocks.{3 * (1 - rank)}." in said["another's block"]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_stage_holds_is_predicted(found: Any, rank: int) -> None:
    facts, real = model_facts(make_config("llama", **{**SIZES, **WIDE})[0]), found[2, rank]["memory"]
    workload = Workload(14, 20, 14, packed_tokens=80, stages=2, documents=real["documents"])
    predicted = replay_stage(facts, workload, rank).at_the_peak()
    assert (predicted["weights"], predicted["optimizer"]) == (real["weights"], real["optimizer"])
    assert real["fullest"] == pytest.approx(sum(predicted.values()), rel=WORST)


def test_what_stages_send_is_predicted(found: Any) -> None:
    facts = model_facts(make_config("llama", **{**SIZES, **WIDE})[0])
    first, last = (found[2, rank]["memory"] for rank in range(2))
    predicted = sends_of(facts, len(first["shape"]), max(first["shape"]))
    assert set(first["shape"]) == {max(first["shape"])}
    assert len(first["sent"]) + len(last["sent"]) == predicted.count
    assert sum(first["sent"]) + sum(last["sent"]) == predicted.total_bytes
    link = PeerLink(1e-3, 1e6)
    assert predicted.seconds(link) == pytest.approx(predicted.count * 1e-3 + predicted.total_bytes / 1e6)


@pytest.mark.parametrize("world", [4, 2, 1])
@pytest.mark.parametrize("name", SAVED)
def test_any_number_of_stages_resumes_what_any_number_has_saved(found: Any, name: str, world: int) -> None:
    expected = found["saved"][name]
    one = joined_state([found[world, rank]["resumed"][name] for rank in range(world)]) if world > 1 else \
        resumed(name, found["folder"])
    assert one.keys() == expected.keys()
    assert all(torch.equal(one[tensor], expected[tensor]) for tensor in expected if tensor != "losses")
    assert one["losses"] == pytest.approx(expected["losses"], rel=1e-6)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", ["full", "lora"])
def test_as_many_stages_resume_to_the_same_bytes(found: Any, name: str) -> None:
    again, unbroken = (files_in(found["folder"] / f"{name}, {kind}") for kind in ("resumed by 4", "later"))
    assert len(unbroken) == GOES_ON * (2 + 2 * 4)
    assert again == unbroken


@pytest.mark.parametrize("name", ["full", "lora"])
def test_the_model_of_stages_is_the_same_folder_as_ever(found: Any, name: str) -> None:
    resumed(name, found["folder"])           # alone
    alone = files_in(found["folder"] / f"{name}, model of 1")
    for world in (2, 4):
        folder = files_in(found["folder"] / f"{name}, model of {world}")
        assert {file: len(folder[file]) for file in folder} == {file: len(alone[file]) for file in alone}
        ours, theirs = (load_file(found["folder"] / f"{name}, model of {count}" / next(
            file for file in alone if file.endswith(".safetensors"))) for count in (world, 1))
        for weight, value in theirs.items():
            torch.testing.assert_close(ours[weight], value, rtol=0, atol=1e-5)


def test_a_checkpoint_of_another_model_is_refused_by_each_stage(found: Any) -> None:
    assert all("another model than the recipe describes" in found[2, rank]["another"] for rank in range(2))


def test_all_stages_draw_the_same_sample_as_a_whole_model(found: Any) -> None:
    alone = sampled()
    assert all(found[world, rank]["sample"] == alone for world in (2, 4) for rank in range(world))


def test_passes_are_filled_up_with_tokens_that_train_nothing() -> None:
    batches = Case().setup().prepare(0)
    passes = levelled(batches, 9)
    assert len(batches) < len(passes) == 9
    assert {len(batch.tokens) for batch in passes} == {max(len(batch.tokens) for batch in batches)}
    assert [batch.place for batch in passes] == list(range(9))
    for field in ("trained_tokens", "real_tokens"):
        assert sum(getattr(batch, field) for batch in passes) == sum(getattr(batch, field) for batch in batches)
    for batch in passes:
        assert sum(batch.lengths) == len(batch.tokens) == len(batch.targets) == len(batch.positions)
        assert int((batch.targets != IGNORE).sum()) == batch.trained_tokens
        assert int(batch.positions.max()) < 40           # no position that no token has
    assert levelled(passes, 9) == passes
