"""`--resume RUN --from-step N`: a run goes back to the checkpoint that is named, and ends with the bytes of an unbroken one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from powertrain.records.checkpoints import checkpoints_in, newest_checkpoint, what_is_wrong
from powertrain.records.event_log import read_all_events, read_events
from powertrain.records.events import Resume, Step

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def killed(cli: Cli, words: list[str], tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 4 and 8, killed after step 10."""
    assert cli(*words, fault=("step", 10))[0] == -9
    assert list(checkpoints_in(tmp_path / "run" / "checkpoints")) == [4, 8]
    return tmp_path / "run"


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*")
            if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("step", [0, 4, 8])
def test_a_run_goes_on_from_the_named_step_to_the_same_bytes(cli: Cli, killed: Path, unbroken: Path, step: int) -> None:
    code, _, err = cli("train", "--resume", "run", "--from-step", str(step))
    assert code == 0, err
    assert [event.step for event in read_all_events(killed / "events.jsonl") if isinstance(event, Resume)] == [step]
    assert (killed / "model" / "model.safetensors").read_bytes() == (unbroken / "model" / "model.safetensors").read_bytes()
    steps = [[(event.step, event.loss) for event in read_events(run / "events.jsonl") if isinstance(event, Step)]
             for run in (killed, unbroken)]
    assert steps[0] == steps[1]
    aside = sorted((killed / "checkpoints").glob("rejected-*"))
    assert [path.name.split("-")[2] for path in aside] == {0: ["000004", "000008"], 4: ["000008"], 8: []}[step]
    assert all(what_is_wrong(path) is None for path in aside)            # whole, for whoever wants one back
    assert ("set aside, not deleted: the checkpoints of the steps" in err) == bool(aside)
    for name in ("model.safetensors", "optimizer.safetensors"):
        newest = [newest_checkpoint(run / "checkpoints")[0] for run in (killed, unbroken)]
        assert len({(path / name).read_bytes() for path in newest if path}) == 1


def test_two_processes_go_on_from_the_named_step(cli: Cli, killed: Path, unbroken: Path) -> None:
    code, _, err = cli("train", "--resume", "run", "--from-step", "4", "--processes", "2")
    assert code == 0, err
    assert [event.step for event in read_all_events(killed / "events.jsonl") if isinstance(event, Resume)] == [4]
    assert [event.step for event in read_events(killed / "events.jsonl") if isinstance(event, Step)] == [*range(1, 12)]


@pytest.mark.parametrize(("options", "said"), [
    (["--resume", "run", "--from-step", "5"], "has no checkpoint of step 5; it has those of the steps 4, 8, and 0 is the"),
    (["--from-step", "4"], "--from-step 4 needs the run that it is a step of; name it with --resume"),
    (["--output", "run", "--continue", "--from-step", "4"], "name it with --resume"),
    (["--resume", "run", "--from-step", "4", "learning_rate=1"], "cannot continue with another recipe")])
def test_what_cannot_be_gone_back_to_changes_nothing(cli: Cli, killed: Path, options: list[str], said: str) -> None:
    before = contents(killed)
    code, _, err = cli("train", *options)
    assert (code, said in err, "Traceback" in err) == (2, True, False), err
    assert contents(killed) == before


def test_a_damaged_checkpoint_is_not_gone_back_to(cli: Cli, killed: Path) -> None:
    victim = killed / "checkpoints" / "step-000004" / "model.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1])
    before = contents(killed)
    code, _, err = cli("train", "--resume", "run", "--from-step", "4")
    assert code == 2
    assert "step-000004 is not whole: model.safetensors is damaged" in err
    assert contents(killed) == before


def test_a_finished_run_keeps_its_model(cli: Cli, unbroken: Path, tmp_path: Path) -> None:
    shutil.copytree(unbroken, tmp_path / "run")
    code, _, err = cli("train", "--resume", "run", "--from-step", "8")
    assert code == 2
    assert "run has its final model" in err
    assert list(checkpoints_in(tmp_path / "run" / "checkpoints")) == [8, 11]
    (tmp_path / "run" / "model").rename(tmp_path / "model-before")
    code, _, err = cli("train", "--resume", "run", "--from-step", "8")
    assert code == 0, err
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == (
        tmp_path / "model-before" / "model.safetensors").read_bytes()


def test_processes_that_others_start_are_told_how(cli: Cli, killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"),
                        ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    from powertrain.cli import continuing
    from powertrain.records import WrongUse

    with pytest.raises(WrongUse, match="--from-step 4 is for one start"):
        continuing.existing_run(killed, [], None, 4)
