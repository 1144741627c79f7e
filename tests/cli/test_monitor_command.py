"""`powertrain monitor`: any terminal, any state of a run, and whatever happens to the run meanwhile."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from driver import TINY
from powertrain.cli.watching import WatchedRun
from powertrain.records.readings import GpuReading, Readings
from powertrain.report.monitor import Seen, detail, overview
from powertrain.run.folder import RunFolder, locked
from report.made_runs import BEGAN, start, step, whole_run

fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
WITHIN_S = 300
GPU = GpuReading("NVIDIA H100", 30 << 30, 80 << 30, 0.97, 71.0, 612.0, "heat")


def write(folder: Path, lines: list[dict[str, Any]], recipe: str = "save_total_limit: 2\n") -> Path:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def running(steps: int = 30) -> list[dict[str, Any]]:
    now = time.time() - steps
    return [start(now), *(step(number, now + number) for number in range(1, steps + 1)),
            {"event": "evaluation", "time": now + steps, "step": steps, "loss": 3.25, "tokens": 4062},
            {"event": "warning", "about": "later", "time": now + steps, "step": 7, "message": "the \x1b[2Jdisk is slow"},
            {"event": "sample", "time": now + steps, "step": 7, "text": "\x1b]0;evil\x07text"}]


def shown(view: Any, width: int, height: int) -> list[str]:
    """The lines of a view on a terminal of this size."""
    out = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None, emoji=False,
                  markup=False)
    lines = out.render_lines(view(width, height), out.options.update(width=width), pad=False)
    return ["".join(segment.text for segment in line if not segment.control).rstrip() for line in lines]


def of_run(path: Path, **changes: Any) -> Callable[[int, int], Any]:
    from dataclasses import replace

    seen = replace(WatchedRun(path).look(), **changes)
    return lambda width, height: detail(seen, width, height, plain=False)


class TestOneRun:
    def test_a_wide_terminal_shows_three_curves_and_all_figures(self, tmp_path: Path) -> None:
        with locked(RunFolder(write(tmp_path / "one", running()))):
            lines = shown(of_run(tmp_path / "one", readings=Readings(3 << 30, 1.5, 62.0, 45.0, (GPU,))), 130, 50)
        text = "\n".join(lines)
        assert max(map(len, lines)) <= 130
        assert lines[0] == f"{tmp_path}/one  running"
        assert lines[2] == "step 30/40 | loss 3.725 | 19,000 tokens/s | 5% of the peak | 3 GiB | 1 s left | not saved yet"
        assert all(title in text for title in ("loss, held out in yellow", "tokens/s  ", "learning rate"))
        assert "Machine   1.5 cores busy, 62 °C, 45 W" in text
        assert "NVIDIA H100, 97% busy, 30 GiB of 80 GiB, 71 °C, 612 W, slowed down by heat" in text
        assert "Disk" in text
        assert "Uploads" not in text
        assert any(0x2800 < ord(character) < 0x2900 for character in text)

    @pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (20, 5)])
    def test_a_small_terminal_loses_curves_and_rows_but_not_the_state(self, tmp_path: Path, width: int, height: int) -> None:
        with locked(RunFolder(write(tmp_path, running()))):
            lines = shown(of_run(tmp_path), width, height)
        assert max(map(len, lines)) <= width
        assert "30/40" in " ".join(lines)
        assert any(0x2800 < ord(character) < 0x2900 for line in lines for character in line) is (height >= 16)

    def test_text_of_a_run_steers_no_terminal(self, tmp_path: Path) -> None:
        with locked(RunFolder(write(tmp_path / "a\x1b[31mb", running()))):
            text = "\n".join(shown(of_run(tmp_path / "a\x1b[31mb"), 130, 50))
        assert "disk is slow" in text
        assert "evil" in text
        assert "\x1b" not in text
        assert "\x07" not in text
        failed = {"event": "end", "time": time.time(), "reason": "failed", "message": "no \x1b[2Jroom"}
        text = "\n".join(shown(of_run(write(tmp_path / "two", [*running(), failed])), 130, 50))
        assert "no ?[2Jroom" in text
        assert "\x1b" not in text

    def test_a_terminal_without_unicode_gets_stars(self, tmp_path: Path) -> None:
        seen = WatchedRun(write(tmp_path, whole_run())).look()
        text = "\n".join(shown(lambda width, height: detail(seen, width, height, plain=True), 80, 40))
        assert "*" in text
        assert text.isascii()

    def test_a_loss_that_is_not_finite_is_a_gap(self, tmp_path: Path) -> None:
        lines = [start(BEGAN), step(1, BEGAN + 1), step(2, BEGAN + 2, loss="nan"), step(3, BEGAN + 3)]
        assert "step 3" in "\n".join(shown(of_run(write(tmp_path, lines)), 80, 40))
        only = [start(BEGAN), step(1, BEGAN + 1, loss="nan")]
        assert "loss" in "\n".join(shown(of_run(write(tmp_path, only)), 80, 40))

    def test_the_disk_lasts_as_long_as_the_saves_to_come_leave_room(self, tmp_path: Path) -> None:
        free = shutil.disk_usage(tmp_path).free
        saves = [{"event": "checkpoint", "time": BEGAN + 100 * number, "step": number, "path": "p", "bytes": free // 2}
                 for number in (1, 2)]
        run = write(tmp_path / "full", [start(BEGAN), step(1, BEGAN + 1), *saves])
        assert "full in about 3 min 20 s at the rate of the saves so far" in "\n".join(shown(of_run(run), 130, 50))
        for number in range(3):              # as many as are kept, beside the best
            (run / "checkpoints" / f"step-{number}").mkdir()
        (run / "checkpoints" / "step-3").mkdir()
        assert "full in about" not in "\n".join(shown(of_run(run), 130, 50))

    def test_uploads_are_shown(self, tmp_path: Path) -> None:
        upload = {"event": "uploaded", "time": BEGAN + 9, "step": 1, "name": "step-000001", "bytes": 9}
        assert "1 upload, each verified: 9 bytes" in "\n".join(shown(of_run(write(tmp_path, [*whole_run(), upload])), 130, 50))


class TestStates:
    def test_a_killed_run_says_where_it_stopped_and_how_it_goes_on(self, tmp_path: Path) -> None:
        (write(tmp_path, running()) / ".lock").write_text(f"4711 {os.uname().nodename} 1")
        seen = WatchedRun(tmp_path).look()
        assert seen.state == "killed"
        assert seen.attention == (f"process 4711 is gone; {tmp_path} stopped at step 30 of 40; continue with: powertrain train "
                                  f"--resume {tmp_path}")

    def test_a_stalled_run_is_one_that_is_silent_for_clearly_longer(self, tmp_path: Path) -> None:
        with locked(RunFolder(write(tmp_path, [start(BEGAN), step(1, BEGAN + 1), step(2, BEGAN + 2)]))):
            seen = WatchedRun(tmp_path).look()
        assert seen.state == "stalled"
        assert "nothing was written for" in seen.attention

    def test_a_torn_line_waits_and_a_damaged_one_is_said(self, tmp_path: Path) -> None:
        run = WatchedRun(write(tmp_path, running()))
        with locked(RunFolder(tmp_path)), open(tmp_path / "events.jsonl", "a") as file:
            whole = json.dumps(step(31, time.time()))
            print('{"event": "step"}', file=file)
            file.write(whole[:20])
            file.flush()
            seen = run.look()
            assert "events.jsonl:35 is no event of a run" in seen.attention
            assert seen.live.steps[-1].step == 30
            print(whole[20:], file=file, flush=True)
            assert run.look().live.steps[-1].step == 31

    def test_a_run_that_is_deleted_while_it_is_watched(self, tmp_path: Path) -> None:
        run = WatchedRun(write(tmp_path / "one", whole_run()))
        assert run.look().state == "finished"
        shutil.rmtree(tmp_path / "one")
        assert run.look().state == "deleted"
        write(tmp_path / "one", running(200))            # larger than what was read
        seen = run.look()
        assert seen.live.steps[-1].step == 200
        assert "is no event" not in seen.attention

    def test_a_run_that_ended_and_goes_on_is_read_again(self, tmp_path: Path) -> None:
        run = WatchedRun(write(tmp_path, whole_run()), keep=False)
        assert len(run.look().live.steps) == 40
        assert run.look() is run.look()
        with open(tmp_path / "events.jsonl", "a") as file:
            print(json.dumps(start(time.time(), "resume", step=20)), json.dumps(step(21, time.time())), sep="\n", file=file)
        with locked(RunFolder(tmp_path)):
            assert run.look().tokens_per_s_overall == pytest.approx(1900 * 21 / 2.6)


class TestAllRuns:
    def rows(self, width: int, height: int, *runs: Seen) -> list[str]:
        return shown(lambda width, height: overview(runs, width, height), width, height)

    @pytest.fixture
    def runs(self, tmp_path: Path) -> list[Seen]:
        later_s = 600 + time.time() - BEGAN
        write(tmp_path / "done", [line | {"time": line["time"] + later_s} for line in whole_run()])
        write(tmp_path / "a-name-that-is-much-too-long-for-a-small-terminal", running())
        with locked(RunFolder(tmp_path / "a-name-that-is-much-too-long-for-a-small-terminal")):
            return [WatchedRun(tmp_path / "done").look(),
                    WatchedRun(tmp_path / "a-name-that-is-much-too-long-for-a-small-terminal").look()]

    def test_those_that_train_come_first_with_all_columns_on_a_wide_terminal(self, runs: list[Seen]) -> None:
        lines = self.rows(130, 30, *runs)
        assert lines[0] == "1 training, 2 in all"
        assert lines[2].split() == ["run", "state", "step", "loss", "held", "out", "tokens/s", "left", "memory", "saved",
                                    "warnings"]
        assert lines[3].split()[1:] == ["running", "30/40", "3.7250", "3.2500", "19,000", "1", "s", "1"]
        assert lines[4].split()[:3] == ["done", "finished", "40/40"]

    def test_a_small_terminal_has_fewer_columns_and_rows(self, runs: list[Seen]) -> None:
        lines = self.rows(40, 10, *runs * 20)
        assert len(lines) <= 10
        assert max(map(len, lines)) <= 40
        assert lines[2].split() == ["run", "state", "step", "loss"]
        assert "…" in lines[3]
        assert "running" in lines[3]
        assert lines[-1] == "and 34 more"


class TestCommand:
    @pytest.fixture
    def runs(self, tmp_path: Path) -> Path:
        write(tmp_path / "runs" / "one", whole_run())
        return tmp_path

    def test_without_a_terminal_it_prints_one_view_and_ends(self, runs: Path, cli: Any) -> None:
        assert "1 training" not in cli("monitor")[1]
        assert "finished" in cli("monitor", "--once")[1]
        code, out, _ = cli("monitor", "runs/one")
        assert code == 0
        assert "finished at step 40" in out

    def test_as_json_it_is_one_object_a_run(self, runs: Path, cli: Any) -> None:
        write(runs / "runs" / "two", [start(BEGAN), step(1, BEGAN, loss="nan")])
        found = [json.loads(line, parse_constant=pytest.fail) for line in cli("monitor", "--json")[1].splitlines()]
        assert [(run["run"], run["state"], run["step"]) for run in found] == [("runs/one", "finished", 40),
                                                                              ("runs/two", "killed", 1)]
        assert found[1]["loss"] is None
        alone = json.loads(cli("monitor", "runs/one", "--json")[1])
        assert alone | {"disk_free_bytes": 0} == found[0] | {"disk_free_bytes": 0}

    @pytest.mark.parametrize(("words", "says"), [
        (["nowhere"], "does not exist"), (["--runs", "nowhere"], "there are no runs in nowhere/"),
        (["--alert", "true"], "--alert needs one run"), (["runs/one", "--once", "--alert", "true"], "a monitor that stays"),
        (["runs/one", "--alert", "ftp://x"], "--alert needs an address")])
    def test_what_cannot_be_watched_is_one_sentence(self, runs: Path, cli: Any, words: list[str], says: str) -> None:
        code, _, err = cli("monitor", *words)
        assert code == 2
        assert says in err
        assert "Traceback" not in err


# ------------------------------------------------------------------------------------------------ a live run


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < until
        time.sleep(0.1)


class Terminal:
    """The monitor on a terminal of its own."""

    def __init__(self, folder: Path, width: int, height: int, *words: str):
        self.all = b""
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ["TERM"] = "xterm-256color"
            os.execv(sys.executable, [sys.executable, "-m", "powertrain", "monitor", *words])
        self.resize(width, height)
        os.set_blocking(self.file, False)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def text(self) -> str:
        """Return all that it wrote until now."""
        try:
            while found := os.read(self.file, 65536):
                self.all += found
        except OSError:
            pass
        return self.all.decode(errors="replace")

    def ends_quietly(self) -> bool:
        os.kill(self.pid, signal.SIGINT)
        wait_for(lambda: self.text().endswith("\x1b[?1049l") or "Traceback" in self.text())
        _, status = os.waitpid(self.pid, 0)
        os.close(self.file)
        return status == 0 and "Traceback" not in self.all.decode(errors="replace")


def test_a_run_is_seen_while_it_trains_and_after_its_trainer_was_killed(cache: Path, tmp_path: Path, source: Path) -> None:
    words = [*TINY, f"data={source}", "max_steps=1000000", "eval_steps=0", "logging_steps=1", "--output", "runs/one", "--quiet"]
    trainer = subprocess.Popen([sys.executable, "-m", "powertrain", "train", *words], cwd=tmp_path,
                               env=os.environ | {"POWERTRAIN_CACHE": str(cache)}, stderr=subprocess.DEVNULL)
    events = tmp_path / "runs" / "one" / "events.jsonl"
    try:
        wait_for(lambda: events.is_file() and '"checkpoint"' in events.read_text())
        one, all_runs = Terminal(tmp_path, 100, 30, "runs/one"), Terminal(tmp_path, 60, 12)
        wait_for(lambda: f"process {trainer.pid}" in one.text() and "1 training" in all_runs.text())
        wait_for(lambda: "cores busy" in one.text())
        one.resize(40, 10)
        seen = len(one.text())
        wait_for(lambda: "running" in one.text()[seen:])
        trainer.kill()
        trainer.wait()
        wait_for(lambda: "is gone; runs/one" in " ".join(one.text().split()) and "killed" in all_runs.text())
    finally:
        trainer.kill()
    assert one.ends_quietly()
    assert all_runs.ends_quietly()
