"""Several processes share one run: one of them writes, and all agree on its end and on smaller passes. Real processes, gloo."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from driver import TINY, run_processes
from powertrain.recipe import resolve
from powertrain.records import WrongUse
from powertrain.records.checkpoints import newest_checkpoint, what_is_wrong
from powertrain.records.errors import LossNotFinite
from powertrain.records.event_log import read_events
from powertrain.records.events import End, Evaluated, Event, ModelSaved, OutOfMemory, Rewound, Saved, Start, Step, UpdateSkipped
from powertrain.run.part import Part, new_run
from powertrain.run.prepare import Prepared, agreed, prepare
from powertrain.run.session import exit_code, run
from powertrain.training.ranks import GroupRanks, Ranks, joined

WORLD, STEPS = 2, 11
CASES = ("whole", "signal", "memory", "room", "skip", "rewind")
WORDS_OF = {"skip": ["on_nan=skip"], "rewind": ["on_nan=rewind", "max_skipped_steps=0"]}
REFUSED = {"data": "data", "recipe": "learning_rate", "version": "version of torch"}     # what differs -> its name
WORDS = [*TINY, "model.dropout=0", "sample.tokens=0", "techniques.bf16=off"]


def prepared_in(folder: Path, cache: Path, source: Path) -> Prepared:
    words = [*WORDS, *WORDS_OF.get(folder.name, ())]
    return prepare(resolve(None, [f"data={source}", *words, f"output_dir={folder}"]), cache, lambda text: None)


def _write_sample(*_: Any) -> str:
    raise AssertionError("the recipe asks for no sample")


def _signalled(part: Part) -> Iterator[Any]:
    for result in steps_of(part):
        if result.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        yield result


steps_of = Part.steps


NO_MEMORY = "DefaultCPUAllocator: not enough memory: you tried to allocate 7 bytes"


@dataclass(frozen=True)
class Short(GroupRanks):
    """Ranks that once find no memory for the exchange of gradients, in step 3."""

    steps: list[None] = field(default_factory=list)

    def check_room(self, parameters: Any) -> None:
        self.steps.append(None)
        if len(self.steps) == 3:
            raise RuntimeError(NO_MEMORY)


def _plant(part: Part, case: str, rank: int) -> None:
    """In the second process only: a signal after step 3, or a step 3 that runs out of memory or has no finite loss.

    With "skip" and "rewind" the third batch never has a finite loss.
    """
    if rank == 0 or case == "whole":
        return
    if case == "room":
        part.setup = replace(part.setup, ranks=Short(**vars(part.ranks)))
        return
    if case == "signal":
        part.steps = lambda: _signalled(part)  # type: ignore[method-assign]
        return
    run_pass, failed = part.setup.run_pass, []

    def once(*arguments: Any) -> Any:
        if part.state.batch == 2 and (case in WORDS_OF or not failed):
            failed.append(True)
            if case == "memory":
                raise RuntimeError(NO_MEMORY)
            return {name: value * math.nan for name, value in run_pass(*arguments).items()}
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
    found["nan"] = _ends(ranks, prepared_in(Path(folder, "nan"), Path(cache), Path(source)))
    found["refused"] = {what: _refused(ranks, replace(prepared, **changed) if rank else prepared)
                        for what, changed in _differences(prepared).items()}
    ranks.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def _ends(ranks: Ranks, prepared: Prepared) -> str:
    """Return what ends a run in which a pass of the second process has no finite loss."""
    try:
        with new_run(prepared, lambda event: None, _write_sample, ranks) as part:
            _plant(part, "nan", ranks.rank)
            run(part)
    except LossNotFinite as error:
        return f"at step {part.state.step}: {error}"
    raise AssertionError("a loss that is not finite ends a run")


def _differences(prepared: Prepared) -> dict[str, dict[str, Any]]:
    """Return what a process may have that the first one has not."""
    facts, material = prepared.facts, prepared.material
    other = resolve(None, ["learning_rate=1"]).recipe.learning_rate
    recipe = material.resolved.recipe.model_copy(update={"learning_rate": other})
    versions = {**facts.software.versions, "torch": "1.13"}
    return {"data": {"facts": replace(facts, data=replace(facts.data, digest="0"))},
            "recipe": {"material": replace(material, resolved=replace(material.resolved, recipe=recipe))},
            "version": {"facts": replace(facts, software=replace(facts.software, versions=versions))}}


def _refused(ranks: Ranks, prepared: Prepared) -> str:
    with pytest.raises(WrongUse) as refused:
        agreed(ranks, prepared)
    return str(refused.value)


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
    run_processes(_process, WORLD, port, str(folder), str(cache), str(source))
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
    assert together == pytest.approx(alone, rel=1e-6)    # the same terms in another order, over eleven updates
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


@pytest.mark.parametrize("case", ["memory", "room"])
def test_memory_that_runs_out_in_one_process_makes_the_passes_of_both_smaller(
        shared: tuple[Path, list[dict[str, Any]]], case: str) -> None:
    folder, found = shared
    (warning,) = [event for event in events_of(folder, case) if isinstance(event, OutOfMemory)]
    assert (warning.step, warning.before_tokens > warning.after_tokens) == (2, True)
    assert warning.said == NO_MEMORY
    assert found[0][case]["largest"] == found[1][case]["largest"] < found[0]["whole"]["largest"]
    assert [event.step for event in events_of(folder, case) if isinstance(event, Step)] == list(range(1, STEPS + 1))
    losses = {name: [event.loss for event in events_of(folder, name) if isinstance(event, Step)] for name in (case, "whole")}
    assert losses[case] == pytest.approx(losses["whole"], rel=1e-4)
    for name, weight in found[0][case]["weights"].items():
        assert torch.equal(weight, found[1][case]["weights"][name])


def test_both_pass_over_the_same_update_and_name_the_examples_of_its_bad_passes(
        shared: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = shared
    (told,) = [event for event in events_of(folder, "skip") if isinstance(event, UpdateSkipped)]
    assert (told.step, told.in_row, len(told.examples)) == (3, 1, 5)         # those of one micro-batch
    _same_and_finite(found, "skip")


def test_both_go_back_to_the_same_checkpoint_and_on_with_the_same_data(shared: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = shared
    (told,) = [event for event in events_of(folder, "rewind") if isinstance(event, Rewound)]
    assert (told.step, told.bad_step, told.passed_over) == (0, 3, 3)
    assert [event.step for event in events_of(folder, "rewind") if isinstance(event, Step)] == list(range(1, STEPS + 1))
    _same_and_finite(found, "rewind")


def _same_and_finite(found: list[dict[str, Any]], case: str) -> None:
    for name, weight in found[0][case]["weights"].items():
        assert torch.equal(weight, found[1][case]["weights"][name])
        assert bool(torch.isfinite(weight).all())
        assert not torch.equal(weight, found[0]["whole"]["weights"][name])


def test_a_loss_that_is_not_finite_stops_both_at_the_same_step_and_names_process_and_examples(
        shared: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = shared
    assert found[0]["nan"] == found[1]["nan"]
    told = re.fullmatch(r"at step 3: the loss of step 3 is not finite \(nan\); it comes from a pass of process 1 with the "
                        r"training examples ([0-9, ]+); .*", found[0]["nan"])
    assert told is not None, found[0]["nan"]
    assert len(told.group(1).split(", ")) == 5           # a micro-batch
    end = events_of(folder, "nan")[-1]
    assert isinstance(end, End)
    assert (end.reason, end.error["kind"], end.error["process"]) == ("failed", "loss_not_finite", 1)


@pytest.mark.parametrize("what", REFUSED)
def test_processes_that_have_not_the_same_are_refused_in_one_sentence(shared: tuple[Path, list[dict[str, Any]]], what: str
                                                                      ) -> None:
    said = [process["refused"][what] for process in shared[1]]
    assert said[0] == said[1]
    assert said[0].startswith(f"process 0 and process 1 of this run do not have the same {REFUSED[what]}: ")
