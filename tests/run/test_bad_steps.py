"""Bad numbers: updates that are not made, runs that go back, and what they say; each ends with the bytes that it should."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from driver import TINY
from powertrain.recipe import resolve
from powertrain.records.checkpoints import FILES, checkpoints_in, newest_checkpoint
from powertrain.records.errors import GradientNotFinite, LossNotFinite, TooManyBadSteps, WeightsNotFinite
from powertrain.records.event_log import read_all_events, read_events
from powertrain.records.events import End, Evaluated, Event, Rewound, Saved, Step, UpdateSkipped
from powertrain.run.folder import RunFolder, continued
from powertrain.run.part import Part, continued_run, new_run
from powertrain.run.prepare import prepare
from powertrain.run.session import run, write_model
from powertrain.training import guard
from powertrain.training.setup import Setup

STEPS = 11
Poison = Callable[[Part, dict[str, torch.Tensor]], None]


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved."""


def nan_loss(part: Part, means: dict[str, torch.Tensor]) -> None:
    means["loss"] *= math.nan
    inf_gradient(part, means)


def inf_gradient(part: Part, means: dict[str, torch.Tensor]) -> None:
    gradient = next(weight.grad for weight in part.setup.model.parameters() if weight.grad is not None)
    gradient.view(-1)[0] = math.inf


def large(part: Part, means: dict[str, torch.Tensor]) -> None:
    means["loss"] *= 1e3
    for weight in part.setup.model.parameters():
        assert weight.grad is not None
        weight.grad *= 1e3


def plant(part: Part, batches: Collection[int], poison: Poison, killed_at: int | None = None) -> None:
    """Let the passes of these batches (from 0) have bad numbers; kill the run in the midst of the batch `killed_at`."""
    run_pass = part.setup.run_pass

    def poisoned(setup: Setup, *arguments: Any) -> Any:
        means = dict(run_pass(setup, *arguments))
        if part.state.batch == killed_at:
            raise Killed
        if part.state.batch in batches:
            poison(part, means)
        return means

    part.setup = replace(part.setup, run_pass=poisoned)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)), encoding="utf-8")
    return path


@pytest.fixture
def train(text: Path, cache: Path, tmp_path: Path) -> Callable[..., RunFolder]:
    def start(name: str, *words: str, bad: Collection[int] = (), poison: Poison = nan_loss, killed_at: int | None = None,
              ) -> RunFolder:
        resolved = resolve(None, [f"data={text}", *TINY, "sample.tokens=0", f"output_dir={tmp_path / name}", *words])
        with new_run(prepare(resolved, cache, lambda said: None), lambda event: None, lambda *_: "") as part:
            plant(part, bad, poison, killed_at)
            run(part)
        return part.folder

    return start


@pytest.fixture
def resume(cache: Path, tmp_path: Path) -> Callable[..., RunFolder]:
    def go_on(name: str, *words: str, bad: Collection[int] = (), poison: Poison = nan_loss) -> RunFolder:
        folder = RunFolder(tmp_path / name)
        prepared = prepare(continued(folder, list(words)), cache, lambda said: None)
        with continued_run(folder, prepared, lambda event: None, lambda *_: "") as part:
            plant(part, bad, poison)
            run(part)
        return folder

    return go_on


Start = Callable[..., RunFolder]


def state_files(folder: RunFolder) -> list[bytes]:
    newest, rejected = newest_checkpoint(folder.checkpoints)
    assert newest is not None
    assert not rejected
    return [(newest / name).read_bytes() for name in FILES[:2]] + [(folder.model / "model.safetensors").read_bytes()]


def happened(folder: RunFolder, kind: type[Any], *, all_of_them: bool = False) -> list[Any]:
    events: Sequence[Event] = (read_all_events if all_of_them else read_events)(folder.events)
    return [event for event in events if isinstance(event, kind)]


def guard_in(folder: RunFolder) -> dict[str, Any]:
    newest, _ = newest_checkpoint(folder.checkpoints)
    assert newest is not None
    found: dict[str, Any] = json.loads((newest / "state.json").read_text())["guard"]
    return found


# ------------------------------------------------------------------------------------------------ nothing is bad


@pytest.mark.parametrize("words", [["on_nan=skip"], ["on_nan=rewind", "on_spike=rewind"]], ids=" ".join)
@pytest.mark.parametrize("more", [[], ["techniques.bf16=on"], ["optimizer=sgd"]], ids=["plain", "bf16", "sgd"])
def test_without_bad_numbers_a_guard_changes_no_byte(train: Start, words: list[str], more: list[str]) -> None:
    assert state_files(train("guarded", *words, *more)) == state_files(train("plain", *more))


def test_without_a_guard_a_checkpoint_is_as_it_was(train: Start) -> None:
    newest, _ = newest_checkpoint(train("plain").checkpoints)
    assert newest is not None
    assert set(json.loads((newest / "state.json").read_text())) == {"step", "trained_tokens", "clipped_steps", "evaluations",
                                                                  "scaler"}


# ------------------------------------------------------------------------------------------------ skip


def test_an_update_with_a_loss_that_is_not_finite_is_not_made_and_names_its_examples(train: Start) -> None:
    folder = train("run", "on_nan=skip", bad={4})
    (told,) = happened(folder, UpdateSkipped)
    assert (told.step, told.spike, told.in_row, told.most, len(told.examples)) == (5, False, 1, 5, 14)
    assert math.isnan(told.loss)
    assert [event.step for event in happened(folder, Step) if not math.isfinite(event.loss)] == [5]
    assert happened(folder, End)[-1].reason == "finished"


def test_an_update_that_is_not_made_leaves_weights_moments_and_step_counts(train: Start) -> None:
    seen: list[list[torch.Tensor]] = []

    def watched(part: Part, means: dict[str, torch.Tensor]) -> None:
        moments = [value for found in part.state.optimizer.moments().values() for value in found.values()]
        seen.append([value.detach().clone() for value in (*part.setup.model.parameters(), *moments)])
        if len(seen) <= 3:                   # the three passes of the first bad step
            inf_gradient(part, means)

    train("run", "on_nan=skip", "model.dropout=0", bad={4, 5}, poison=watched)
    before, after = seen[0], seen[3]
    assert len(before) == len(after) > 20
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "adafactor", "muon"])
@pytest.mark.parametrize("bad", [{0}, {4}], ids=["first", "later"])
def test_every_optimizer_passes_over_an_update(train: Start, optimizer: str, bad: set[int]) -> None:
    folder = train("run", "on_nan=skip", f"optimizer={optimizer}", bad=bad, poison=inf_gradient)
    assert [event.step for event in happened(folder, UpdateSkipped)] == [min(bad) + 1]
    assert all(math.isfinite(event.loss) for event in happened(folder, Step))
    assert happened(folder, Step)[-1].loss < happened(folder, Step)[0].loss or optimizer == "sgd"


@pytest.mark.parametrize("killed_at", [6, 9])
def test_a_resume_after_a_skip_ends_with_the_same_bytes(train: Start, resume: Start, killed_at: int) -> None:
    whole = train("whole", "on_nan=skip", bad={4, 6, 7})
    with pytest.raises(Killed):
        train("broken", "on_nan=skip", bad={4, 6, 7}, killed_at=killed_at)
    assert state_files(resume("broken", bad={4, 6, 7})) == state_files(whole)


@pytest.mark.parametrize("logging", [1, 2, 11])
def test_too_many_bad_steps_in_a_row_end_the_run_and_leave_the_checkpoints(train: Start, tmp_path: Path, logging: int) -> None:
    with pytest.raises(TooManyBadSteps, match=r"updates of 3 steps in a row, up to step 8, .*max_skipped_steps=2") as error:
        train("run", "on_nan=skip", "max_skipped_steps=2", f"logging_steps={logging}", "eval_steps=0", bad=range(5, 99))
    assert len(error.value.examples) == 14
    folder = RunFolder(tmp_path / "run")
    assert list(checkpoints_in(folder.checkpoints)) == [4]
    assert not folder.model.exists()
    assert happened(folder, End)[-1].error["kind"] == "too_many_bad_steps"


def test_a_resume_amid_bad_steps_goes_on_counting_them(train: Start, resume: Start) -> None:
    words = ("on_nan=skip", "max_skipped_steps=2")
    with pytest.raises(Killed):              # the checkpoint of step 4 is made after the first of them
        train("run", *words, bad={3, 4, 5}, killed_at=4)
    with pytest.raises(TooManyBadSteps, match="updates of 3 steps in a row, up to step 6,"):
        resume("run", bad={3, 4, 5})


def test_bad_steps_that_are_not_in_a_row_never_end_a_run(train: Start) -> None:
    folder = train("run", "on_nan=skip", "max_skipped_steps=1", bad={1, 3, 5, 7, 9})
    assert [event.in_row for event in happened(folder, UpdateSkipped)] == [1] * 5


# ------------------------------------------------------------------------------------------------ stop, as ever


def test_by_default_a_loss_that_is_not_finite_ends_the_run(train: Start) -> None:
    with pytest.raises(LossNotFinite, match="the loss of step 5 is not finite"):
        train("run", bad={4})


def test_by_default_a_gradient_that_is_not_finite_ends_the_run_at_its_own_step(train: Start) -> None:
    with pytest.raises(GradientNotFinite, match="the gradient norm of step 5 is not finite") as error:
        train("run", bad={4}, poison=inf_gradient)
    assert len(error.value.examples) == 14


def test_a_stopped_run_goes_on_with_skip(train: Start, resume: Start) -> None:
    with pytest.raises(LossNotFinite):
        train("run", bad={5})
    whole = train("whole", "on_nan=skip", bad={5})
    assert state_files(resume("run", "on_nan=skip", bad={5})) == state_files(whole)


# ------------------------------------------------------------------------------------------------ rewind


def test_a_rewind_goes_on_from_the_checkpoint_with_the_data_after_the_bad_step(train: Start) -> None:
    folder = train("run", "on_nan=rewind", "max_skipped_steps=1", bad={5, 6})
    (told,) = happened(folder, Rewound)
    # steps 6 and 7 are bad; the checkpoint of step 4 goes on with the batch (from 0) 7: 3 further than that of step 5
    assert (told.step, told.bad_step, told.in_row, told.passed_over, told.rewinds, len(told.examples)) == (4, 7, 2, 3, 1, 14)
    assert [event.step for event in happened(folder, Step)] == list(range(1, STEPS + 1))
    assert all(math.isfinite(event.loss) for event in happened(folder, Step))
    assert [event.step for event in happened(folder, UpdateSkipped, all_of_them=True)] == [6, 7]
    assert guard_in(folder) == {"window": None, "in_row": 0, "rewinds": 1, "passed_over": 3}


def test_a_rewound_run_is_one_that_never_met_the_bad_batches(train: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    rewound = train("run", "on_nan=rewind", "max_skipped_steps=1", bad={5, 6})
    numbers = Setup.numbers_of
    monkeypatch.setattr(Setup, "numbers_of", lambda setup, batch: numbers(setup, batch + 3 if batch >= 4 else batch))
    assert state_files(train("other")) == state_files(rewound)


@pytest.mark.parametrize("killed_at", [9, 12])           # before the first checkpoint after the rewind, and after it
def test_a_resume_after_a_rewind_ends_with_the_same_bytes(train: Start, resume: Start, killed_at: int) -> None:
    words = ("on_nan=rewind", "max_skipped_steps=1")
    whole = train("whole", *words, bad={5, 6})
    with pytest.raises(Killed):
        train("broken", *words, bad={5, 6}, killed_at=killed_at)
    folder = resume("broken", bad={5, 6})
    assert state_files(folder) == state_files(whole)
    assert guard_in(folder) == guard_in(whole)
    assert [event.step for event in happened(folder, Step)] == list(range(1, STEPS + 1))


def test_a_rewound_run_that_is_to_stop_from_now_on_keeps_its_data(train: Start, resume: Start) -> None:
    words = ("on_nan=rewind", "max_skipped_steps=1")
    whole = train("whole", *words, bad={5, 6})
    with pytest.raises(Killed):
        train("broken", *words, bad={5, 6}, killed_at=12)
    assert state_files(resume("broken", "on_nan=stop")) == state_files(whole)


def test_without_another_checkpoint_a_rewind_goes_back_to_the_beginning(train: Start) -> None:
    folder = train("run", "on_nan=rewind", "max_skipped_steps=0", "save_steps=0", bad={2})
    (told,) = happened(folder, Rewound)
    assert (told.step, told.bad_step, told.passed_over) == (0, 3, 3)
    assert happened(folder, End)[-1].reason == "finished"


def test_a_checkpoint_from_amid_bad_steps_is_not_gone_back_to(train: Start) -> None:
    """That of step 8 is made between the bad steps 7 to 9, and goes with its steps."""
    folder = train("run", "on_nan=rewind", "max_skipped_steps=2", bad={6, 7, 8})
    (told,) = happened(folder, Rewound)
    assert (told.step, told.bad_step, told.passed_over) == (4, 9, 5)
    assert [event.step for event in happened(folder, Saved, all_of_them=True)] == [4, 8, 8, 11]
    assert [event.step for event in happened(folder, Saved)] == [4, 8, 11]


@pytest.mark.parametrize("bad", [7, 10])                 # at a save, and at the end
def test_nothing_is_evaluated_or_saved_after_the_step_that_makes_the_run_go_back(train: Start, bad: int) -> None:
    folder = train("run", "on_nan=rewind", "max_skipped_steps=0", bad={bad})
    assert len(happened(folder, Rewound)) == 1
    assert not list(folder.checkpoints.glob("rejected-*"))
    assert [event.step for event in happened(folder, Saved, all_of_them=True)] == [4, 8, 11]
    assert [event.final for event in happened(folder, Evaluated, all_of_them=True)].count(True) == 1


def test_after_the_last_rewind_the_run_stops(train: Start, tmp_path: Path) -> None:
    with pytest.raises(TooManyBadSteps, match="max_rewinds=2 allows no further way back"):
        train("run", "on_nan=rewind", "max_skipped_steps=0", "max_rewinds=2", bad=range(5, 99))
    folder = RunFolder(tmp_path / "run")
    assert [event.rewinds for event in happened(folder, Rewound, all_of_them=True)] == [1, 2]
    assert list(checkpoints_in(folder.checkpoints)) == [0, 4]


def test_checkpoints_of_steps_that_come_again_are_set_aside_and_what_links_lead_to_stays(train: Start, tmp_path: Path) -> None:
    def linked(part: Part, means: dict[str, torch.Tensor]) -> None:
        place = part.folder.checkpoints / "step-000005"
        if not place.is_symlink():
            (tmp_path / "elsewhere").mkdir()
            place.symlink_to(tmp_path / "elsewhere")
        nan_loss(part, means)

    folder = train("run", "on_nan=rewind", "max_skipped_steps=0", bad={5}, poison=linked)
    assert (tmp_path / "elsewhere").is_dir()
    assert [path.name[:20] for path in folder.checkpoints.glob("rejected-*")] == ["rejected-step-000005"]


# ------------------------------------------------------------------------------------------------ spikes

SPIKY = ("on_spike=skip", "max_steps=11", "num_train_epochs=9")


@pytest.fixture
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "WINDOW", 4)


@pytest.mark.usefixtures("short_window")
def test_a_spike_is_passed_over_once_the_window_is_full(train: Start, resume: Start) -> None:
    folder = train("run", *SPIKY, bad={2, 8}, poison=large)
    (told,) = happened(folder, UpdateSkipped)            # in step 3 nothing was known yet
    assert (told.step, told.spike) == (9, True)
    assert len(guard_in(folder)["window"][0]) == 4
    with pytest.raises(Killed):
        train("broken", *SPIKY, bad={2, 8}, poison=large, killed_at=7)
    broken = resume("broken", bad={2, 8}, poison=large)
    assert state_files(broken) == state_files(folder)
    assert guard_in(broken) == guard_in(folder)


@pytest.mark.usefixtures("short_window")
def test_spikes_in_a_row_rewind(train: Start) -> None:
    folder = train("run", "on_spike=rewind", "max_skipped_steps=1", bad={6, 7}, poison=large)
    (told,) = happened(folder, Rewound)
    assert (told.step, told.bad_step) == (4, 8)


def test_a_spike_is_a_rise_beyond_six_deviations_and_a_tenth_of_the_mean() -> None:
    judged = guard.Guard.on(torch.device("cpu"), spikes=True)
    draws = torch.Generator().manual_seed(1)

    def judge(loss: float, norm: float = 1.0, *, scaling: bool = False) -> tuple[bool, bool]:
        out = judged.judge(torch.tensor(loss), torch.tensor(norm), loss_scaling=scaling)
        return bool(judged.bad), bool(out)

    for place in range(guard.WINDOW):
        assert judge(2.0 + 0.1 * float(torch.randn((), generator=draws)) if place else 5.0) == (False, False)
    for _ in range(guard.WINDOW):            # the first one, of 5, goes
        assert judge(2.0 + 0.1 * float(torch.randn((), generator=draws))) == (False, False)
    before = judged.stored()
    assert judge(2.9) == (True, True)
    assert judge(1.0, 1.2) == (True, True)   # norms have no deviation at all, and a tenth of their mean is 0.1
    assert judge(1.0, math.nan) == (True, True)
    assert judge(1.0, math.inf, scaling=True) == (False, True)
    assert judged.stored() == before
    assert judge(1.0, 1.05) == (False, False)
    assert judge(0.0, 0.0) == (False, False)             # a fall is none


# ------------------------------------------------------------------------------------------------ nothing broken is published


def test_weights_that_are_not_finite_are_neither_saved_nor_published(train: Start, tmp_path: Path) -> None:
    def broken(part: Part, means: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            next(part.setup.model.parameters()).view(-1)[0] = math.nan

    with pytest.raises(WeightsNotFinite, match=r"nothing was saved, and the checkpoints before it are whole"):
        train("run", "on_nan=skip", "eval_steps=0", bad={7}, poison=broken)      # after its forward pass, before the save
    folder = RunFolder(tmp_path / "run")
    assert list(checkpoints_in(folder.checkpoints)) == [4]
    assert not folder.model.exists()


def test_a_model_with_a_weight_that_is_not_finite_is_not_written(text: Path, cache: Path, tmp_path: Path) -> None:
    """Not even where no checkpoint was made before: each writing looks for itself."""
    resolved = resolve(None, [f"data={text}", *TINY, f"output_dir={tmp_path / 'run'}"])
    with new_run(prepare(resolved, cache, lambda said: None), lambda event: None, lambda *_: "") as part:
        with torch.no_grad():
            next(part.setup.model.parameters()).view(-1)[0] = math.inf
        with pytest.raises(WeightsNotFinite):
            write_model(part)
    assert not (tmp_path / "run" / "model").exists()
