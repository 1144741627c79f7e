"""Two, three or four processes that share a run make the updates of one: real processes, joined by gloo on this machine."""

from __future__ import annotations

import dataclasses
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from driver import run_processes
from powertrain.data.example import Example, collate
from powertrain.data.order import pack, step_examples
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.records import IGNORE
from powertrain.records.checkpoints import newest_checkpoint
from powertrain.techniques.packing import Packing
from powertrain.training.checkpoint import load_checkpoint, save_checkpoint
from powertrain.training.loop import State, evaluate, new_state, train
from powertrain.training.optimizers import plain_adamw
from powertrain.training.ranks import ALONE, GroupRanks, Ranks, joined
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup, plain_setup

STEPS, MOST = 4, 4
WORLDS = (2, 3, 4)
SAME = 1e-6                  # of losses: the same terms in another order, in fp32
MakeSetup = Callable[..., Setup]


class Penalised(Decoder):
    """A decoder with a penalty on its embedding, as regularised adapters have on their weights."""

    def penalty(self) -> Tensor:
        return 0.1 * self.embedding.weight.square().sum()


class Unused(Decoder):
    """A decoder with a weight that no pass uses: the optimizer must not let it decay."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.unused = nn.Parameter(torch.ones(3, 5))


class Dropping(Decoder):
    """A decoder with dropout, whose masks must not depend on which process draws them."""


class MeanOfMeans(GroupRanks):
    """The fault that this house must not have: each process divides by its own tokens, and the results are averaged."""

    def total(self, *numbers: Any) -> tuple[Any, ...]:
        return numbers

    def sum(self, tensors: Iterable[Tensor]) -> None:
        found = list(tensors)
        super().sum(found)
        for tensor in found:
            tensor.detach().div_(self.world)


def uneven_examples(count: int, longest: int = 12) -> list[Example]:
    """Random examples of 3 tokens and more, of which an uneven share of the targets trains nothing."""
    drawn = np.random.default_rng(3).integers(0, 50, (count, longest + 1))
    lengths = [3 + 5 * i % (longest - 2) for i in range(count)]
    return [Example(drawn[i, :length], np.where(np.arange(length) < i % length, IGNORE, drawn[i, 1:length + 1]))
            for i, length in enumerate(lengths)]


def setup_of(kind: type[Decoder], micro_batch: int, ranks: Ranks) -> Setup:
    torch.manual_seed(1)
    config, _ = make_config("llama", vocabulary=50, layers=2, width=32, heads=2, context=16,
                            dropout=0.2 if kind is Dropping else 0.0)
    setup = plain_setup(kind(config), uneven_examples(28), collate, train_batch_size=14, seed=5,
                        optimizer=plain_adamw(1e-2, (0.9, 0.95), 1e-8))
    setup = replace(setup, micro_batch=micro_batch, ranks=ranks)
    return Packing(tokens=20, multiple=1).apply(setup) if micro_batch == PACKED else setup


def trained(kind: type[Decoder], micro_batch: int, max_grad_norm: float, ranks: Ranks = ALONE) -> dict[str, Any]:
    setup = setup_of(kind, micro_batch, ranks)
    state = new_state(setup, 0.1)
    steps = list(train(setup, state, Schedule("constant", 1e-2, STEPS), max_grad_norm))
    held_out = evaluate(setup, setup.examples, tokens_per_byte=None)
    return {"loss": torch.stack([step.loss for step in steps]), "norm": torch.stack([step.grad_norm for step in steps]),
            "trained": [step.trained_tokens for step in steps], "real": [step.real_tokens for step in steps],
            "clipped": int(state.clipped_steps), "held out": (held_out.loss, held_out.tokens),
            "weights": {name: weight.detach() for name, weight in setup.model.named_parameters()}}


PACKED = 0                   # as a micro-batch: passes of up to 20 tokens
CASES = {"even passes": (Decoder, 7, 1.0), "uneven passes": (Decoder, 3, 1.0), "clipped": (Decoder, 5, 0.05),
         "a process without a pass": (Decoder, 14, 1.0), "penalty": (Penalised, 2, 1.0), "unused weight": (Unused, 7, 1.0),
         "packed": (Decoder, PACKED, 1.0), "packed, with dropout": (Dropping, PACKED, 1.0)}


def _process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=MOST)
    found: dict[str, Any] = {"sums": _summed(joined(), rank)}
    for world in WORLDS:
        group: Any = torch.distributed.new_group(list(range(world)))
        if rank < world:
            ranks = GroupRanks(rank, world, devices=group, hosts=group)
            found |= {(name, world): trained(*case, ranks) for name, case in CASES.items()}
            wrong = MeanOfMeans(rank, world, devices=group, hosts=group)
            found["mean of means", world] = trained(*CASES["uneven passes"], wrong)
    found["saved"] = saved(joined(), Path(folder, "checkpoints"))
    for world in WORLDS:
        group = torch.distributed.new_group(list(range(world)))
        if rank < world:
            found["resumed", world] = resumed(GroupRanks(rank, world, devices=group, hosts=group), Path(folder, "checkpoints"))
    torch.distributed.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


SAVED_BY, SAVED_AT = MOST, 2


def saved(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Save in the midst of the steps; return what was saved, and the losses of the steps after it."""
    setup = setup_of(Dropping, PACKED, ranks)
    state = new_state(setup, 0.1)
    found: dict[str, Any] = {"losses": []}
    for step in train(setup, state, Schedule("constant", 1e-2, STEPS), 1.0):
        if step.step == SAVED_AT:
            save_checkpoint(folder, state, ranks)
            found |= tensors_of(state)
        elif step.step > SAVED_AT:
            found["losses"].append(float(step.loss))
    return found


def resumed(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Go on from the checkpoint; return what it brought back, and the losses of the next steps."""
    setup = setup_of(Dropping, PACKED, ranks)
    state = new_state(setup, 0.1)
    newest, _ = newest_checkpoint(folder)
    assert newest is not None
    load_checkpoint(newest, state)
    found = tensors_of(state)
    steps = train(setup, state, Schedule("constant", 1e-2, STEPS), 1.0)
    return {**found, "losses": [float(step.loss) for step in steps]}


def tensors_of(state: State) -> dict[str, Tensor]:
    """The weights and the optimizer's moments."""
    moments = state.optimizer.moments()
    return {f"{name}.{key}": value.clone() for name, weight in state.model.named_parameters()
            for key, value in {"weight": weight.detach(), **moments[weight]}.items()}


def _summed(ranks: Ranks, rank: int) -> dict[str, Any]:
    tensors = [torch.full((3, 1), 1.0 + rank), torch.full((2,), 10 + rank), torch.full((5,), 0.5)]
    ranks.sum(tensors)
    return {"tensors": tensors, "total": ranks.total(rank, 7), "mean": ranks.total(0.25 * rank),
            "first": ranks.first("x" if rank == 1 else None), "none": ranks.first(None),
            "agreed": ranks.agree({"step": 10 * rank}), "writer": ranks.is_writer,
            "kind": type(ranks).__name__}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_processes(_process, MOST, port, str(folder))
    alone = {("resumed", 1): resumed(ALONE, folder / "checkpoints")}
    return [torch.load(folder / f"{rank}.pt") | alone for rank in range(MOST)]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {name: trained(*case) for name, case in CASES.items()}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_processes_that_share_a_step_make_the_update_of_one(processes: list[dict[Any, Any]], alone: dict[str, dict[str, Any]],
                                                            case: str, world: int) -> None:
    one = alone[case]
    for found in (process[case, world] for process in processes[:world]):
        torch.testing.assert_close(found["loss"], one["loss"], rtol=SAME, atol=0)
        torch.testing.assert_close(found["norm"], one["norm"], rtol=1e-5, atol=0)
        assert found["held out"] == (pytest.approx(one["held out"][0], rel=SAME), one["held out"][1])
        assert all(found[name] == one[name] for name in ("trained", "real", "clipped"))
        for name, weight in one["weights"].items():
            # AdamW takes a step of the whole rate even where a gradient is nothing but rounding: 1 % of it here
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-4, msg=name)
            assert torch.equal(found["weights"][name], processes[0][case, world]["weights"][name]), f"{name} differs"
    assert case != "clipped" or one["clipped"] == STEPS
    assert case != "unused weight" or torch.equal(one["weights"]["unused"], torch.ones(3, 5))


@pytest.mark.parametrize("world", WORLDS)
def test_a_mean_of_means_would_be_seen(processes: list[dict[Any, Any]], alone: dict[str, dict[str, Any]], world: int) -> None:
    found, one = processes[0]["mean of means", world]["loss"], alone["uneven passes"]["loss"]
    assert float((found / one - 1).abs().max()) > 1000 * SAME


@pytest.mark.parametrize("world", [1, *WORLDS])
def test_what_four_processes_have_saved_any_number_resumes(processes: list[dict[Any, Any]], world: int) -> None:
    expected = processes[0]["saved"]
    assert len(expected["losses"]) == STEPS - SAVED_AT
    for found in (process["resumed", world] for process in processes[:world]):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected if name != "losses")
        assert found["losses"] == pytest.approx(expected["losses"], rel=0 if world == SAVED_BY else SAME)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), batch=st.integers(1, 30), budget=st.integers(1, 90),
       worlds=st.lists(st.integers(1, 9), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_an_epoch_has_each_example_once_at_any_number_of_processes_that_may_change_at_each_step(
        lengths: list[int], batch: int, budget: int, worlds: list[int], seed: int) -> None:
    """No process is needed to deal passes. After any number of examples, each was met as often as any other, or once more."""
    met = Counter(dict.fromkeys(range(len(lengths)), 0))
    for step, world in enumerate(worlds):
        numbers = step_examples(seed, step, batch, len(lengths)).tolist()
        passes = [[numbers[place] for place in one] for one in pack([lengths[n] for n in numbers], budget, crossover=100.0)]
        costs = [sum(lengths[n] for n in one) for one in passes]
        shares = [GroupRanks(rank, world).share(passes, costs) for rank in range(world)]
        loads = [sum(lengths[n] for one in share for n in one) for share in shares]
        assert max(loads) - min(loads) <= max(costs)     # about the same work for each
        met.update(n for share in shares for one in share for n in one)
        epochs, begun = divmod((step + 1) * batch, len(lengths))
        assert sorted(met.values()) == [epochs] * (len(lengths) - begun) + [epochs + 1] * begun


def test_an_epoch_has_each_example_once_however_many_processes_share_which_step() -> None:
    """28 examples, 14 a step: two steps are an epoch. The number of processes changes within each."""
    for worlds in ((1, 4), (3, 2), (4, 1), (2, 3)):
        met: list[bytes] = []
        for step, world in enumerate(worlds):
            for rank in range(world):
                share = setup_of(Decoder, PACKED, GroupRanks(rank, world))
                passes = share.prepare(step)
                ends = [np.cumsum(batch.lengths)[:-1] for batch in passes]
                met += [document.numpy().tobytes() for batch, at in zip(passes, ends, strict=True)
                        for document in batch.tokens.tensor_split(at.tolist())]
        examples = setup_of(Decoder, PACKED, ALONE).examples
        assert sorted(met) == sorted(example.inputs.tobytes() for example in examples)


def test_tensors_numbers_and_decisions_are_those_of_all_processes(processes: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(one["sums"] for one in processes):
        assert [tensor.tolist() for tensor in found["tensors"]] == [[[10.0]] * 3, [46, 46], [2.0] * 5]
        assert (found["total"], found["mean"], found["first"], found["none"]) == ((6, 28), (1.5,), "x", None)
        assert found["agreed"] == {"step": 0}
        assert found["writer"] is (rank == 0)
        assert found["kind"] == "GroupRanks"


def test_a_run_of_one_process_exchanges_nothing(make_setup: MakeSetup) -> None:
    assert joined() is ALONE is make_setup().ranks
    loss = torch.tensor(2.0)
    ALONE.sum_step(make_setup().model.parameters(), [loss])
    assert (float(loss), ALONE.total(3, 4), ALONE.agree("x"), ALONE.first(None)) == (2.0, (3, 4), "x", None)
    assert ALONE.is_writer
    assert ALONE.share([1, 2, 3], [5, 9, 1]) == [1, 2, 3]


def test_shares_have_about_the_same_tokens_and_leave_none_out() -> None:
    costs = [100, 90, 30, 30, 20, 10, 5]
    shares = [dataclasses.replace(GroupRanks(), rank=rank, world=3).share(costs, costs) for rank in range(3)]
    assert sorted(cost for share in shares for cost in share) == sorted(costs)
    assert max(map(sum, shares)) - min(map(sum, shares)) <= 10
