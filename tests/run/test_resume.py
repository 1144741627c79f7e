"""A run that is killed, at any place, and resumed ends with the very bytes of one that was not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from powertrain.records.checkpoints import FILES, newest_checkpoint, what_is_wrong
from powertrain.records.event_log import read_events
from powertrain.records.events import (
    CheckpointFailed,
    CheckpointNotDeleted,
    CheckpointRejected,
    Evaluated,
    Event,
    Step,
    TechniqueNote,
)
from powertrain.run.folder import RunFolder, list_runs, locked

Cli = Callable[..., tuple[int, str, str]]
STEPS = 11
AnEvent = TypeVar("AnEvent", bound=Event)


def happened(run: Path, kind: type[AnEvent]) -> list[AnEvent]:
    return [event for event in read_events(run / "events.jsonl") if isinstance(event, kind)]


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def history(run: Path) -> list[tuple[int, float, float]]:
    return [(e.step, e.loss, e.grad_norm) for e in read_events(run / "events.jsonl") if isinstance(e, Step)]


def without_its_end(run: Path) -> None:
    """As a kill before its last event leaves it."""
    events = run / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:-1]))


def assert_same(run: Path, unbroken: Path) -> None:
    assert weights(run) == weights(unbroken)
    assert history(run) == history(unbroken)
    newest, rejected = newest_checkpoint(run / "checkpoints")
    expected, _ = newest_checkpoint(unbroken / "checkpoints")
    assert newest is not None
    assert expected is not None
    assert not rejected
    for name in FILES[:2]:                   # weights and optimizer
        assert (newest / name).read_bytes() == (expected / name).read_bytes()


def test_a_run_with_our_own_kernels_goes_on_where_there_is_no_compiler(cli: Cli, words: list[str], tmp_path: Path) -> None:
    assert cli(*words, "techniques.chunked_cross_entropy=on", fault=("step", 6))[0] == -9
    plan = tmp_path / "run" / "plan.json"
    found = json.loads(plan.read_text())
    (step,) = (step for step in found["steps"] if step["technique"] == "chunked_cross_entropy")
    step["settings"]["kernels"], step["pinned"] = "cpp", False       # as where the planner chose it
    plan.write_text(json.dumps(found))
    code, _, err = cli("train", "--resume", "run", env={"PATH": "/nowhere", "HOME": str(tmp_path / "home")})
    assert code == 0, err
    (step,) = (step for step in json.loads(plan.read_text())["steps"] if step["technique"] == "chunked_cross_entropy")
    assert step["settings"]["kernels"] == "torch"
    assert any("chunked_cross_entropy" in note.message for note in happened(tmp_path / "run", TechniqueNote))


@pytest.mark.parametrize("more", [(), ("load_best_model_at_end=true", "save_steps=3", "eval_steps=3")])
def test_a_signal_ends_the_last_evaluation_and_the_continuation_makes_it(more: tuple[str, ...], cli: Cli, words: list[str],
                                                                         tmp_path: Path) -> None:
    assert cli(*words, *more)[0] == 0
    run, whole = tmp_path / "run", tmp_path / "whole"
    run.rename(whole)
    assert cli(*words, *more, fault=("evaluating", len(happened(whole, Evaluated))))[0] == 75
    assert not (run / "model").exists()
    assert not any(event.final for event in happened(run, Evaluated))
    code, _, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert weights(run) == weights(whole)
    (last,), (expected,) = ([event for event in happened(one, Evaluated) if event.final] for one in (run, whole))
    assert (last.step, last.loss, last.tokens) == (expected.step, expected.loss, expected.tokens)


@pytest.mark.parametrize("step", [1, 4, 6, 10, 11])
def test_killed_after_a_step(cli: Cli, words: list[str], unbroken: Path, tmp_path: Path, step: int) -> None:
    assert cli(*words, fault=("step", step))[0] == -9
    code, _, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert_same(tmp_path / "run", unbroken)


@pytest.mark.parametrize(("number", "saved"), [*((number, 0) for number in range(1, 16)), (16, 4), (19, 4), (22, 4)])
def test_killed_at_every_call_that_a_save_makes_to_the_disk(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path, number: int, saved: int) -> None:
    """The first save whole, and some of the second one."""
    code, _, err = cli(*words, fault=("save", number))
    assert code == -9, err
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.glob("step-*")] == [f"step-{saved:06d}"] * bool(saved)
    code, _, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert_same(tmp_path / "run", unbroken)
    assert not list(checkpoints.glob(".tmp*"))


def test_killed_twice(cli: Cli, words: list[str], unbroken: Path, tmp_path: Path) -> None:
    assert cli(*words, fault=("step", 6))[0] == -9
    assert cli("train", "--resume", "run", fault=("step", 9))[0] == -9
    code, _, err = cli("train", "--resume", "run")
    assert code == 0
    assert "going on after step 8" in err
    assert_same(tmp_path / "run", unbroken)


@pytest.mark.parametrize("step", [2, 5, 10])
def test_sigterm_finishes_the_step_saves_and_exits_75(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path, step: int) -> None:
    code, out, err = cli(*words, fault=("signal", step))
    assert code == 75, err
    assert "--resume run" in out
    newest, _ = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{step:06d}"
    assert not (tmp_path / "run" / "model").exists()
    assert cli("train", "--resume", "run")[0] == 0
    assert weights(tmp_path / "run") == weights(unbroken)
    assert history(tmp_path / "run") == history(unbroken)


def test_resuming_a_finished_run_changes_nothing(cli: Cli, unbroken: Path, tmp_path: Path) -> None:
    shutil.copytree(unbroken, tmp_path / "run")
    code, out, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert "run is finished: there is nothing left to train" in err
    assert "finished at step 11" in out
    assert_same(tmp_path / "run", unbroken)
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == (unbroken / "events.jsonl").read_bytes()


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path) -> None:
    assert cli(*words, fault=("step", 10))[0] == -9
    victim = tmp_path / "run" / "checkpoints" / "step-000008" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    code, _, err = cli("train", "--resume", "run")
    assert code == 0
    (rejected,) = happened(tmp_path / "run", CheckpointRejected)
    assert (rejected.name, rejected.why.partition(":")[0]) == ("step-000008", "model.safetensors is damaged")
    assert "going on after step 4" in err
    assert what_is_wrong(victim.parent) is None      # the continuation wrote it anew
    assert_same(tmp_path / "run", unbroken)


def test_when_no_checkpoint_is_whole_nothing_is_touched(cli: Cli, words: list[str], tmp_path: Path) -> None:
    assert cli(*words, fault=("step", 6))[0] == -9
    victim = tmp_path / "run" / "checkpoints" / "step-000004" / "optimizer.safetensors"
    victim.write_bytes(victim.read_bytes()[:100])
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    code, _, err = cli("train", "--resume", "run")
    assert code == 1
    assert "optimizer.safetensors is damaged" in err
    assert "Traceback" not in err
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


def test_a_changed_recipe_is_refused_with_every_difference(cli: Cli, words: list[str], tmp_path: Path) -> None:
    assert cli(*words, fault=("step", 6))[0] == -9
    code, _, err = cli("train", "--resume", "run", "learning_rate=1e-4", "model.layers=3", "logging_steps=5")
    assert code == 2
    assert "learning_rate=0.0001 (the run has 0.003)" in err
    assert "model.layers=3 (the run has 2)" in err
    assert "logging_steps" not in err
    assert cli("train", "--resume", "run", "logging_steps=5")[0] == 0


def test_a_recipe_that_was_changed_on_the_disk_is_refused(cli: Cli, words: list[str], tmp_path: Path) -> None:
    assert cli(*words, fault=("step", 6))[0] == -9
    recipe = tmp_path / "run" / "recipe.yaml"
    written = recipe.read_text()
    assert "learning_rate: 0.003" in written
    recipe.write_text(written.replace("learning_rate: 0.003", "learning_rate: 0.007"))
    code, _, err = cli("train", "--resume", "run")
    assert code == 2
    assert "is not the recipe of step 4: it was changed by hand or by a bad disk" in err
    recipe.write_text(written)
    assert cli("train", "--resume", "run")[0] == 0


def test_two_processes_do_not_train_in_one_folder(cli: Cli, words: list[str], tmp_path: Path) -> None:
    import fcntl

    assert cli(*words, fault=("step", 6))[0] == -9
    with open(tmp_path / "run" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, _, err = cli("train", "--resume", "run")
    assert code == 2
    assert "another process is training" in err


def test_a_full_disk_stops_no_training_and_loses_no_checkpoint(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path) -> None:
    code, out, err = cli(*words, "save_total_limit=5", fault=("full", 3))   # two files make the first checkpoint
    assert code == 3, err
    assert [(event.step, event.why, event.last) for event in happened(tmp_path / "run", CheckpointFailed)] == [
        (8, "File too large", False), (11, "File too large", True)]
    assert "finished at step 11, but step 11 could not be saved: File too large" in out
    assert newest_checkpoint(tmp_path / "run" / "checkpoints")[0] == tmp_path / "run" / "checkpoints" / "step-000004"
    assert weights(tmp_path / "run") == weights(unbroken)
    assert cli("train", "--resume", "run")[0] == 0       # there is room again
    assert newest_checkpoint(tmp_path / "run" / "checkpoints")[0] == tmp_path / "run" / "checkpoints" / "step-000011"


def test_a_disk_too_full_for_the_final_model_fails_with_the_cure_and_resuming_writes_it(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path) -> None:
    code, _, err = cli(*words, fault=("model", 0))
    assert code == 3
    assert "the model is trained, but could not be written" in err
    assert "--resume run" in err
    assert "Traceback" not in err
    assert cli("train", "--resume", "run")[0] == 0
    assert_same(tmp_path / "run", unbroken)


def test_an_old_checkpoint_that_cannot_be_deleted_is_no_failed_save(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path) -> None:
    code, out, err = cli(*words, "save_total_limit=1", "eval_steps=0", "save_steps=2", fault=("delete", 1))
    assert code == 0, err
    assert {(event.step, event.why) for event in happened(tmp_path / "run", CheckpointNotDeleted)} >= {
        (4, "No space left on device")}
    assert "could not be saved" not in err + out
    assert newest_checkpoint(tmp_path / "run" / "checkpoints")[0] == tmp_path / "run" / "checkpoints" / "step-000011"
    assert weights(tmp_path / "run") == weights(unbroken)


def test_events_that_cannot_be_written_stop_no_training_and_are_said(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path) -> None:
    code, _, err = cli(*words, fault=("events", 3))
    assert code == 3
    assert "warning: events.jsonl cannot be written (No space left on device)" in err
    assert "its last events could not be written to events.jsonl: No space left on device" in err
    assert "Traceback" not in err
    assert weights(tmp_path / "run") == weights(unbroken)


def test_a_run_that_ended_before_it_began_leaves_its_folder_usable(cli: Cli, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / ".lock").touch()
    assert cli(*words, "max_steps=1")[0] == 0


def test_the_best_and_the_newest_checkpoints_stay(cli: Cli, words: list[str], tmp_path: Path) -> None:
    code, _, err = cli(*words, "save_steps=1", "eval_steps=1", "save_total_limit=2", "learning_rate=0.5", "warmup_steps=5")
    assert code == 0, err
    run = tmp_path / "run"
    evaluations = {e.step: e.loss for e in read_events(run / "events.jsonl") if isinstance(e, Evaluated)}
    best = min(evaluations, key=lambda step: evaluations[step])
    kept = {int(path.name[5:]) for path in (run / "checkpoints").iterdir()}
    assert kept == {10, 11, best}


def test_events_hold_one_step_each_with_all_fields(unbroken: Path) -> None:
    lines = [json.loads(line) for line in (unbroken / "events.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all({"loss", "tokens", "real_tokens", "seconds", "learning_rate", "grad_norm"} <= set(step) for step in steps)
    assert {step["tokens"] for step in steps} == {14 * 16}
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    assert [e["step"] for e in evaluations] == [3, 6, 9, 11]
    assert all(e["bits_per_byte"] > 0 for e in evaluations)
    assert [line["step"] for line in lines if line["event"] == "checkpoint"] == [4, 8, 11]
    assert lines[-1]["event"] == "end"
    assert lines[-1]["reason"] == "finished"


def test_a_run_describes_itself(unbroken: Path) -> None:
    assert {path.name for path in unbroken.iterdir()} >= {"recipe.yaml", "facts.json", "plan.json", "events.jsonl",
                                                          "checkpoints", "model"}
    plan = json.loads((unbroken / "plan.json").read_text())
    assert any(step["technique"] == "micro_batch" for step in plan["steps"])
    assert all(refusal["because"] for refusal in plan["refused"])


def test_a_damaged_event_is_said_before_the_training_goes_on(cli: Cli, unbroken: Path, tmp_path: Path) -> None:
    shutil.copytree(unbroken, tmp_path / "run")
    events = tmp_path / "run" / "events.jsonl"
    events.write_text("{torn\n" + events.read_text())
    code, out, err = cli("train", "--resume", "run")
    assert (code, out) == (2, "")
    assert err.startswith(f"powertrain: run/{events.name}:1 is no event")


def test_a_plan_that_was_changed_by_hand_is_a_sentence(cli: Cli, unbroken: Path, tmp_path: Path) -> None:
    shutil.copytree(unbroken, tmp_path / "run")
    plan = tmp_path / "run" / "plan.json"
    plan.write_text(plan.read_text().replace('"examples": 5', '"examples": "five"'))
    code, _, err = cli("train", "--resume", "run")
    assert code == 2, err
    assert "micro_batch.examples='five' should be of type int" in err
    plan.write_text("{torn")
    code, _, err = cli("train", "--resume", "run")
    assert code == 2, err
    assert "plan.json is not whole JSON" in err


def test_a_continuation_says_where_its_values_were_from_and_what_is_other_now(
        cli: Cli, words: list[str], unbroken: Path, tmp_path: Path) -> None:
    shutil.copytree(unbroken, tmp_path / "run")
    without_its_end(tmp_path / "run")
    code, _, err = cli("train", "--resume", "run", "logging_steps=5")
    assert code == 0, err
    recipe = next(line for line in err.splitlines() if line.startswith("Recipe"))
    assert "default with " in recipe
    assert recipe.endswith("; now logging_steps=5")


def test_the_list_tells_a_run_that_trains_from_one_that_was_killed_and_one_that_is_damaged(
        unbroken: Path, tmp_path: Path) -> None:
    for name in ("finished", "killed", "running", "damaged"):
        shutil.copytree(unbroken, tmp_path / name)
    for name in ("killed", "running"):
        without_its_end(tmp_path / name)
    events = tmp_path / "damaged" / "events.jsonl"
    events.write_text("{torn\n" + events.read_text())    # before events that were synced: no power failure does that
    with locked(RunFolder(tmp_path / "running")):
        found = {run.name if run.state == "damaged" else run.folder.name: run.state for run in list_runs(tmp_path)}
    assert found == {name: name for name in ("finished", "killed", "running", "damaged")}


@pytest.mark.parametrize("settings", [("optimizer=muon",), ("optimizer=adafactor", "objective.embedding_noise=5"),
                                      ("optimizer=lion", "learning_rate=1e-3", "objective.z_loss=1e-4"),
                                      ("optimizer=sgd", "optimizer.nesterov=true", "objective.label_smoothing=0.1")],
                         ids=["muon", "adafactor with noise", "lion with a z-loss", "sgd with smoothing"])
def test_any_optimizer_and_objective_killed_and_resumed(cli: Cli, words: list[str], tmp_path: Path,
                                                        settings: tuple[str, ...]) -> None:
    code, _, err = cli(*[word if word != "run" else "whole" for word in words], *settings)
    assert code == 0, err
    assert cli(*words, *settings, fault=("step", 7))[0] == -9
    code, _, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert_same(tmp_path / "run", tmp_path / "whole")
    steps = [event for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, Step)]
    names = {"objective.z_loss=1e-4": {"cross_entropy", "z_loss"}, "objective.label_smoothing=0.1": {"cross_entropy"}}
    assert all(set(step.metrics) == names.get(settings[-1], set()) for step in steps)
