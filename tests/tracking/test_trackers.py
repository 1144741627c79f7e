"""Trackers: the real libraries, writing to local files and to servers of this machine, in processes that are killed or hang."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from powertrain.recipe.schema import TRACKERS as IN_RECIPES
from powertrain.records import WrongUse, events
from powertrain.records.event_log import EventLog, read_all_events
from powertrain.records.priority import LOWER
from powertrain.run.part import Part, Record
from powertrain.tracking import beside, table
from powertrain.tracking.beside import Followers
from powertrain.tracking.curves import values_of
from powertrain.tracking.material import followed
from powertrain.tracking.table import TRACKERS, check_installed
from powertrain.training.ranks import ALONE
from powertrain.training.setup import Setup

READ_BACK = Path(__file__).with_name("read_back.py")
WITHIN_S = 600               # against what hangs; a follower beside a training yields to the other tests
SECRET = "hf_" + "a1" * 15
HOME = "/home/somebody/secret-project/rows.jsonl"
SETTINGS = {"learning_rate": 0.001, "data.source": "rows.jsonl", "report_to": ["mlflow"], "model.path": None}
# where a follower is killed at its second note of a position, when its tracker has the rows already
KILLED = """
import os, sys
from powertrain.tracking import process
write, notes = process.write_json, []
def killed(*position):
    notes.append(write(*position) if not notes else os.kill(os.getpid(), 9))
process.write_json, process.BATCH = killed, 5
process.main(sys.stdin)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The variables that keep every tracker in this test's folder."""
    return {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
            "TRACKIO_DIR": f"{tmp_path}/trackio", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 12 steps, up to its 9th; `went_on` writes the rest."""
    folder = tmp_path / "made-run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text('name: "made"\nlearning_rate: 0.001\n')
    (folder / "plan.json").write_text('{"steps": []}\n')
    facts = {"name": "A CPU", "host": socket.gethostname(), "file": HOME}
    (folder / "facts.json").write_text(json.dumps({"hardware": facts}) + "\n")
    write(folder, events.Start(name="made", total_steps=12, time=1000.0), *map(step, range(1, 6)),
          events.Evaluated(step=5, loss=2.5, tokens=7, bits_per_byte=1.5, time=1005.5),
          events.Sample(step=5, text=f"a <b> and {SECRET}\nc", time=1005.7), *map(step, range(6, 10)))
    return folder


def step(number: int, **changes: Any) -> events.Step:
    loss = float("nan") if number == 7 else 3.0 / number
    return events.Step(**{"step": number, "loss": loss, "tokens": 10, "real_tokens": 12, "seconds": 0.1,
                          "time": 1000.0 + number, "learning_rate": 1e-3, "grad_norm": 1.0, "parts": {"data": 0.01}, **changes})


def write(folder: Path, *written: events.Event) -> None:
    log = EventLog(folder / "events.jsonl")
    for event in written:
        log.write(event)
    log.flush()


def went_on(folder: Path) -> None:
    write(folder, *map(step, range(10, 13)), events.Evaluated(step=12, loss=2.0, tokens=7, time=1012.5),
          events.End(step=12, reason="finished", time=1013.0))


def follow(folder: Path, name: str, env: dict[str, str], **more: Any) -> Followers:
    """Follow a run that nobody writes; return when the process has ended."""
    followers = Followers(followed(folder, None, SETTINGS), [name], env, most_starts=1, **more)
    followers.finish(WITHIN_S)
    return followers


def killed_following(folder: Path, name: str, env: dict[str, str]) -> None:
    known = followed(folder, "powertrain", SETTINGS)
    known.folder.mkdir(exist_ok=True)
    asked = {"path": str(folder), "id": known.id, "kind": "run", "settings": known.settings, "tracker": name,
             "project": "powertrain", "asker": os.getpid()}
    done = subprocess.run([sys.executable, "-c", KILLED], input=json.dumps(asked) + "\n", text=True, env=env, check=False,
                          capture_output=True)
    assert done.returncode == -9, done.stderr


def read_back(folder: Path, name: str, env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-W", "ignore", str(READ_BACK), name, str(folder)], env=env, check=False,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def expected(folder: Path) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in read_all_events(folder / "events.jsonl"):
        for name, value in values_of(event).items():
            curves.setdefault(name, []).append((event.step, value))
    return curves


def as_held(curves: dict[str, list[list[Any]]]) -> dict[str, list[tuple[int, Any]]]:
    """float32 is what TensorBoard holds."""
    return {name: [(found[0], pytest.approx(float(found[1]), rel=1e-6, nan_ok=True)) for found in points]
            for name, points in curves.items()}


# ------------------------------------------------------------------------------------------------ points


@pytest.mark.parametrize("name", TRACKERS)
def test_a_run_that_is_followed_late_and_again_gives_the_same_points_once(name: str, run: Path, env: dict[str, str]) -> None:
    killed_following(run, name, env)         # when the tracker had rows that were not noted
    went_on(run)
    followers = follow(run, name, env)
    assert followers.missing() == {}
    assert follow(run, name, env).missing() == {}
    found = read_back(run, name, env)
    assert as_held(found["curves"]) == expected(run)
    assert [time for _, _, time in found["curves"]["train/loss"]] == [1000.0 + number for number in range(1, 13)]
    assert sorted(set(found["kinds"])) == ["facts", "plan", "recipe"]
    assert len(found["samples"]) == 1
    assert name == "mlflow" or "secret removed" in found["samples"][0]
    assert followers.places()[name]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_no_name_of_this_machine_and_no_secret_goes_out(name: str, run: Path, env: dict[str, str]) -> None:
    went_on(run)
    follow(run, name, env)
    sent = b"".join(file.read_bytes() for file in (run / "tracking" / name).rglob("*") if file.is_file()
                    and file.suffix != ".log")
    assert b"A CPU" in sent
    assert b'"host": "[left out]"' in sent
    assert HOME.encode() not in sent
    assert SECRET.encode() not in sent
    named = {file.name for file in (run / "tracking" / name).rglob("*")}
    assert not named & {"wandb-metadata.json", "requirements.txt", "diff.patch", "conda-environment.yaml"}


def test_what_was_noted_may_be_lost_and_the_points_are_there_once(run: Path, env: dict[str, str]) -> None:
    went_on(run)
    follow(run, "mlflow", env)
    (run / "tracking" / "mlflow.json").unlink()
    assert follow(run, "mlflow", env).missing() == {}
    found = read_back(run, "mlflow", env)
    assert as_held(found["curves"]) == expected(run)
    assert (found["status"], found["parameters"]["learning_rate"]) == ("FINISHED", "0.001")
    assert "model.path" not in found["parameters"]


def test_a_run_that_goes_on_is_followed_as_it_grows_and_steps_taken_again_replace_the_others_in_tensorboard(
        run: Path, env: dict[str, str]) -> None:
    followers = Followers(followed(run, None, SETTINGS), ["tensorboard"], env)
    until(lambda: _noted(run)["rows"] == 11)
    write(run, events.Resume(step=6, total_steps=12, time=1100.0), *(step(number, time=1100.0 + number, loss=0.5)
                                                                     for number in range(7, 13)),
          events.End(step=12, reason="stopped", signal="SIGTERM", time=1113.0))
    until(followers.is_over)                 # by the end alone: nobody has said that the run is over
    assert followers.missing() == {}
    assert _noted(run)["ended"] == "stopped"
    losses = read_back(run, "tensorboard", env)["curves"]["train/loss"]
    assert [one[0] for one in losses] == list(range(1, 13))
    assert {one[1] for one in losses[6:]} == {0.5}
    followers.finish(1)


def test_a_study_is_sent_as_a_kind_of_its_own(tmp_path: Path, env: dict[str, str]) -> None:
    study = tmp_path / "2026-11-20_tuning"
    study.mkdir()
    (study / "evidence.json").write_text('{"name": "x", "kind": "tuning"}\n')
    (study / "plans.json").write_text("{}\n")
    assert follow(study, "trackio", env).missing() == {}
    assert follow(study, "trackio", env).missing() == {}
    assert sorted(read_back(study, "trackio", env)["kinds"]) == ["plan", "study"]


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="this system has no priorities of processes")
def test_a_follower_beside_a_training_lets_it_go_first(run: Path, env: dict[str, str]) -> None:
    followers = Followers(followed(run, None, SETTINGS), ["tensorboard"], env, beside=True)
    (process,) = (one.process for one in followers._all)
    assert process is not None
    lowered = os.getpriority(os.PRIO_PROCESS, 0) + LOWER
    until(lambda: os.getpriority(os.PRIO_PROCESS, process.pid) == lowered or _noted(run)["rows"] > 0)    # sooner than its work
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == lowered
    autogroup = Path(f"/proc/{process.pid}/autogroup")
    assert not autogroup.exists() or autogroup.read_text().strip().endswith(f"nice {LOWER}")
    process.kill()
    followers.finish(WITHIN_S)


# ------------------------------------------------------------------------------------------------ servers


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Starts MLflow's own server at a port, on a file of SQLite."""
    started: list[subprocess.Popen[bytes]] = []

    def start(port: int) -> None:
        env = {**os.environ, "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{tmp_path}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true",
               "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/", "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
               "_MLFLOW_SERVER_ARTIFACT_DESTINATION": f"{tmp_path}/artifacts"}
        code = f"from mlflow.server import app; app.run(host='127.0.0.1', port={port}, threaded=True)"
        started.append(subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=env, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL))
        until(lambda: _answers(port))

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_server_that_cannot_be_reached_is_a_sentence_and_gets_everything_later(
        run: Path, env: dict[str, str], server: Callable[[int], None]) -> None:
    went_on(run)
    port = _free_port()
    env["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{port}"
    missing = follow(run, "mlflow", env).missing()
    assert f"port={port}" in missing["mlflow"] or "refused" in missing["mlflow"]
    (told,) = read_all_events(run / "tracking" / "mlflow.jsonl")         # once, though it was tried twice
    assert isinstance(told, events.TrackerFailed)
    assert "training is not touched, and `powertrain track RUN --to mlflow` sends later" in told.sentence
    server(port)
    assert follow(run, "mlflow", env).missing() == {}
    found = read_back(run, "mlflow", env)
    assert as_held(found["curves"]) == expected(run)
    assert sorted(found["kinds"]) == ["facts", "plan", "recipe"]


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes requests and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held = []

        def take() -> None:
            while True:
                try:
                    held.append(listening.accept())
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        for connection, _ in held:
            connection.close()
        listening.shutdown(socket.SHUT_RDWR)


def test_a_library_that_hangs_ends_with_its_process(run: Path, env: dict[str, str], silent: str) -> None:
    env["MLFLOW_TRACKING_URI"] = silent
    followers = follow(run, "mlflow", env, hangs_s=1.0)
    assert followers.is_over()
    assert followers.missing() == {"mlflow": "it did not answer within 1 s"}


def test_a_tracker_that_hangs_does_not_touch_the_run(cli: Callable[..., tuple[int, str, str]], words: list[str],
                                                     silent: str, tmp_path: Path) -> None:
    assert cli(*words[:-1], "plain")[0] == 0
    code, out, err = cli(*words, "report_to=[mlflow]", env={"MLFLOW_TRACKING_URI": silent})
    assert code == 0, err
    assert "mlflow  not everything is there yet (it is not done yet, and goes on by itself)" in out
    assert "`powertrain track run --to mlflow` sends what is missing" in out
    left = [one for one in psutil.process_iter(["cmdline", "cwd", "environ"])
            if one.info["cwd"] == str(tmp_path.resolve()) and "powertrain.tracking.process" in (one.info["cmdline"] or ())]
    assert [one.info["environ"]["MLFLOW_TRACKING_URI"] for one in left] == [silent]          # else another one would be asked
    for one in left:
        one.kill()
    runs = [[event for event in read_all_events(tmp_path / name / "events.jsonl") if isinstance(event, events.Step)]
            for name in ("plain", "run")]
    assert [one.loss for one in runs[0]] == [one.loss for one in runs[1]]
    assert len(runs[0]) == 11


# ------------------------------------------------------------------------------------------------ from the command line


def test_a_run_reports_while_it_trains_and_a_finished_one_can_be_sent(
        cli: Callable[..., tuple[int, str, str]], words: list[str], tmp_path: Path, env: dict[str, str]) -> None:
    assert cli(*words, "report_to=tensorboard")[0] == 0
    until(lambda: _noted(tmp_path / "run").get("ended") == "finished")       # beside the training, or soon after it
    code, out, _ = cli("track", "run")       # to what the recipe names
    assert code == 0
    assert "tensorboard  everything is there: " in out
    found = read_back(tmp_path / "run", "tensorboard", env)
    assert as_held(found["curves"]) == expected(tmp_path / "run")
    assert cli("track", "run", "--json")[0] == 0


def test_what_followers_say_becomes_an_event_of_the_run(setup: Setup, tmp_path: Path) -> None:
    followers = SimpleNamespace(look=lambda: [events.TrackerFailed(tracker="wandb", why="no answer"),
                                              events.TrackerReady(tracker="mlflow", place="here", step=1)])
    record, state = Record(EventLog(tmp_path / "events.jsonl"), lambda event: None, ALONE), SimpleNamespace(step=5)
    Part(None, setup, state, None, record, None, None, beside=followers).tell_beside()     # type: ignore[arg-type]
    failed, ready = read_all_events(tmp_path / "events.jsonl")
    assert (failed.step, ready.step) == (5, 1)
    assert isinstance(failed, events.TrackerFailed)


def test_a_process_that_ends_by_itself_is_told_once_and_started_again(run: Path, env: dict[str, str],
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(beside, "AGAIN_S", 0.0)
    monkeypatch.setattr(beside.sys, "executable", "/bin/false")
    followers, told = Followers(followed(run, None, SETTINGS), ["tensorboard"], env, most_starts=2), list[events.Event]()
    until(lambda: told.extend(followers.look()) or bool(told))
    (failed,) = told
    assert isinstance(failed, events.TrackerFailed)
    assert failed.why == "its process ended with code 1"
    monkeypatch.undo()
    until(lambda: bool(followers.look()))    # the second one is at work
    assert followers.finish(WITHIN_S) == {}


@pytest.mark.parametrize(("words", "says"), [
    (("track", "run"), "no tracker is named; use for example --to tensorboard"),
    (("track", "run", "--to", "tensorbord"), "did you mean tensorboard?"),
    (("track", "nowhere", "--to", "wandb"), "does not exist"),
    (("train", "report_to=[tensorboard, x]", "--dry-run"), "there is no tracker 'x'"),
    (("train", "report_to=wanb", "--dry-run"), "did you mean wandb?"),
])
def test_wrong_words_are_a_sentence(cli: Callable[..., tuple[int, str, str]], run: Path, words: tuple[str, ...], says: str,
                                    tmp_path: Path) -> None:
    run.rename(tmp_path / "run")
    code, _, err = cli(*words)
    assert (code, says in err) == (2, True), err


def test_a_tracker_that_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WrongUse, match=r"`pip install 'powertrain\[wandb\]'` installs it"):
        check_installed(["wandb"])


def test_recipes_and_the_table_name_the_same_trackers() -> None:
    assert tuple(TRACKERS) == IN_RECIPES


def test_errors_that_a_person_has_to_mend_have_a_cure() -> None:
    class AuthenticationError(Exception):
        pass

    class Expired(AuthenticationError):
        pass

    cure = TRACKERS["wandb"].cure_of(Expired())
    assert cure is not None
    assert "wandb login" in cure
    assert "Run `wandb login`" in events.TrackerFailed(tracker="wandb", why="the token expired", cure=cure).sentence
    assert TRACKERS["wandb"].cure_of(OSError()) is None


def _noted(run: Path) -> dict[str, Any]:
    file = run / "tracking" / "tensorboard.json"
    return dict(json.loads(file.read_text())) if file.is_file() else {"rows": 0}


def until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    except OSError:
        return False
