"""Several processes share one run: one of them writes, and all agree on its end and on smaller passes. Real processes, gloo."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from driver import TINY
from powertrain.recipe import resolve
from powertrain.records.event_log import read_events
from powertrain.records.events import End, Evaluated, Event, ModelSaved, OutOfMemory, Saved, Start, Step
from powertrain.run.part import Part, new_run
from powertrain.run.prepare import Prepared, prepare
from powertrain.run.session import exit_code, run
from powertrain.training.checkpoint import newest_checkpoint, what_is_wrong
from powertrain.training.ranks import joined

WORLD, STEPS = 2, 11
CASES = ("whole", "signal", "memory")
WORDS = [*TINY, "model.dropout=0", "sample.tokens=0"]


def prepared_in(folder: Path, cache: Path, source: Path) -> Prepared:
    return prepare(resolve(None, [f"data={source}", *WORDS, f"output_dir={folder}"]), cache, lambda text: None)


def _write_sample(*_: Any) -> str:
    raise AssertionError("the recipe asks for no sample")


def _signalled(part: Part) -> Iterator[Any]:
    for result in steps_of(part):
        if result.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        yield result


steps_of = Part.steps


def _plant(part: Part, case: str, rank: int) -> None:
    """In the second process only: a signal after step 3, or a pass of step 3 that runs out of memory."""
    if rank == 0 or case == "whole":
        return
    if case == "signal":
        part.steps = lambda: _signalled(part)  # type: ignore[method-assign]
        return
    run_pass, failed = part.setup.run_pass, []

    def once(*arguments: Any) -> Any:
        if part.state.step == 2 and not failed:
            failed.append(True)
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 7 bytes")
        return run_pass(*arguments)

    part.setup = replace(part.setup, run_pass=once)


def _process(rank: int, port: int, folder: str, cache: str, source: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    ranks, found = joined(), {}
    for case in CASES:
        told: list[Event] = []
        prepared = prepared_in(Path(folder, case), Path(cache), Path(source))
        with new_run(prepared, told.append, _write_sample, ranks) as part:
            _plant(part, case, rank)
            run(part)
        found[case] = {"code": exit_code(part), "stopped by": part.stopped_by, "step": part.state.step, "told": len(told),
                       "folder": str(part.folder.path), "largest": part.setup.micro_batch,
                       "weights": {name: weight.detach() for name, weight in part.setup.model.named_parameters()}}
    ranks.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of the runs, and what each process found."""
    folder = tmp_path_factory.mktemp("shared")
    source = folder / "text.txt"
    source.write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)), encoding="utf-8")
    prepared_in(folder / "none", cache, source)          # the tokens are cached before both look for them
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_process, (port, str(folder), str(cache), str(source)), nprocs=WORLD)
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def events_of(folder: Path, case: str) -> list[Event]:
    return read_events(folder / case / "events.jsonl")


def test_only_the_writer_writes_events_checkpoints_and_the_model(shared: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (writer, other) = shared
    events = events_of(folder, "whole")
    assert [event.step for event in events if isinstance(event, Step)] == list(range(1, STEPS + 1))
    assert [event.processes for event in events if isinstance(event, Start)] == [WORLD]
    assert [event.step for event in events if isinstance(event, Saved)] == [4, 8, 11]
    assert len([event for event in events if isinstance(event, (ModelSaved, End))]) == 2
    assert writer["whole"]["told"] > 0
    assert other["whole"]["told"] == 0
    assert writer["whole"]["folder"] == other["whole"]["folder"] == str(folder / "whole")
    assert (folder / "whole" / "model" / "model.safetensors").is_file()
    assert {what_is_wrong(path) for path in (folder / "whole" / "checkpoints").iterdir()} == {None}


def test_processes_that_share_a_run_learn_what_one_learns(shared: tuple[Path, list[dict[str, Any]]], cache: Path) -> None:
    folder, found = shared
    with new_run(prepared_in(folder / "alone", cache, folder / "text.txt"), lambda event: None, _write_sample) as part:
        run(part)
    alone, together = ([event.loss for event in events_of(folder, case) if isinstance(event, (Step, Evaluated))]
                       for case in ("alone", "whole"))
    assert together == pytest.approx(alone, rel=1e-4)    # the same terms in another order, over eleven updates
    for name, weight in found[0]["whole"]["weights"].items():
        assert torch.equal(weight, found[1]["whole"]["weights"][name])


def test_a_signal_to_one_process_stops_both_after_the_same_step_and_saves_it(
        shared: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = shared
    for one in found:
        assert (one["signal"]["code"], one["signal"]["stopped by"], one["signal"]["step"]) == (75, "SIGTERM", 3)
    end = events_of(folder, "signal")[-1]
    assert isinstance(end, End)
    assert (end.state, end.step) == ("stopped (SIGTERM)", 3)
    checkpoint, _ = newest_checkpoint(folder / "signal" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.name == "step-000003"


def test_memory_that_runs_out_in_one_process_makes_the_passes_of_both_smaller(
        shared: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = shared
    (warning,) = [event for event in events_of(folder, "memory") if isinstance(event, OutOfMemory)]
    assert (warning.step, warning.before_tokens > warning.after_tokens) == (2, True)
    assert warning.said == "DefaultCPUAllocator: not enough memory: you tried to allocate 7 bytes"
    assert found[0]["memory"]["largest"] == found[1]["memory"]["largest"] < found[0]["whole"]["largest"]
    assert [event.step for event in events_of(folder, "memory") if isinstance(event, Step)] == list(range(1, STEPS + 1))
    losses = {case: [event.loss for event in events_of(folder, case) if isinstance(event, Step)] for case in CASES}
    assert losses["memory"] == pytest.approx(losses["whole"], rel=1e-4)
    for name, weight in found[0]["memory"]["weights"].items():
        assert torch.equal(weight, found[1]["memory"]["weights"][name])
