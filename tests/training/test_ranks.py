"""Two processes that share a run make the same updates as one: real processes, joined by gloo on this machine."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from powertrain.data.example import Example, collate
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.records import IGNORE
from powertrain.training.loop import evaluate, new_state, train
from powertrain.training.optimizers import plain_adamw
from powertrain.training.ranks import ALONE, GroupRanks, Ranks, joined
from powertrain.training.schedule import Schedule
from powertrain.training.setup import Setup, plain_setup

STEPS, WORLD = 3, 2
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


def uneven_examples(count: int, tokens: int = 12) -> list[Example]:
    """Random examples of which an uneven share of the targets trains nothing, so that a mean of means would differ."""
    drawn = np.random.default_rng(3).integers(0, 50, (count, tokens + 1))
    targets = [np.where(np.arange(tokens) < i % tokens, IGNORE, drawn[i, 1:]) for i in range(count)]
    return [Example(drawn[i, :-1], targets[i]) for i in range(count)]


def setup_of(kind: type[Decoder], micro_batch: int, ranks: Ranks) -> Setup:
    torch.manual_seed(1)
    config, _ = make_config("llama", vocabulary=50, layers=2, width=32, heads=2, context=16,
                            dropout=0.2 if kind is Dropping else 0.0)
    setup = plain_setup(kind(config), uneven_examples(28), collate, train_batch_size=14, seed=5,
                        optimizer=plain_adamw(1e-2, (0.9, 0.95), 1e-8))
    return replace(setup, micro_batch=micro_batch, ranks=ranks)


def trained(kind: type[Decoder], micro_batch: int, max_grad_norm: float, ranks: Ranks = ALONE) -> dict[str, Any]:
    setup = setup_of(kind, micro_batch, ranks)
    state = new_state(setup, 0.1)
    steps = list(train(setup, state, Schedule("constant", 1e-2, STEPS), max_grad_norm))
    held_out = evaluate(setup, setup.examples, tokens_per_byte=None)
    return {"loss": torch.stack([step.loss for step in steps]), "norm": torch.stack([step.grad_norm for step in steps]),
            "trained": [step.trained_tokens for step in steps], "real": [step.real_tokens for step in steps],
            "clipped": int(state.clipped_steps), "held out": (held_out.loss, held_out.tokens),
            "weights": {name: weight.detach() for name, weight in setup.model.named_parameters()}}


CASES = {"even passes": (Decoder, 7, 1.0), "uneven passes": (Decoder, 3, 1.0), "clipped": (Decoder, 5, 0.05),
         "a process without a pass": (Decoder, 14, 1.0), "penalty": (Penalised, 2, 1.0), "unused weight": (Unused, 7, 1.0),
         "dropout": (Dropping, 3, 1.0)}


def _process(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    ranks = joined()
    found: dict[str, Any] = {name: trained(*case, ranks) for name, case in CASES.items()}
    found["share"] = [len(setup_of(Decoder, 3, ranks).prepare(step)) for step in range(STEPS)]
    found["sums"] = _summed(ranks, rank)
    ranks.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


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
    torch.multiprocessing.spawn(_process, (port, str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES)
def test_processes_that_share_a_step_make_the_update_of_one(processes: list[dict[str, Any]], case: str) -> None:
    alone = trained(*CASES[case])
    for found in (one[case] for one in processes):
        # losses and norms are sums of the same terms in another order
        torch.testing.assert_close(found["loss"], alone["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(found["norm"], alone["norm"], rtol=1e-5, atol=0)
        assert found["held out"] == (pytest.approx(alone["held out"][0], rel=1e-5), alone["held out"][1])
        assert [found[name] for name in ("trained", "real", "clipped")] == [alone[name] for name in
                                                                            ("trained", "real", "clipped")]
        for name, weight in alone["weights"].items():
            # AdamW takes a step of the whole rate even where a gradient is nothing but rounding: 0.1 % of it here
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5, msg=name)
    for name, weight in processes[0][case]["weights"].items():
        assert torch.equal(weight, processes[1][case]["weights"][name]), f"{name} differs between the processes"
    assert case != "clipped" or alone["clipped"] == STEPS
    assert case != "unused weight" or torch.equal(alone["weights"]["unused"], torch.ones(3, 5))


def test_the_passes_of_a_step_are_shared_out_whole(processes: list[dict[str, Any]]) -> None:
    assert [sum(counts) for counts in zip(*(one["share"] for one in processes), strict=True)] == [5] * STEPS
    assert all(min(one["share"]) >= 2 for one in processes)


def test_tensors_numbers_and_decisions_are_those_of_all_processes(processes: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(one["sums"] for one in processes):
        assert [tensor.tolist() for tensor in found["tensors"]] == [[[3.0]] * 3, [21, 21], [1.0] * 5]
        assert (found["total"], found["mean"], found["first"], found["none"]) == ((1, 14), (0.25,), "x", None)
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
