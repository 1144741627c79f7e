"""A run's folder read back: what it was bound by, its state, and what cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_histories import STEP_S, STEPS, events, falling, on_disk, record

from powertrain.diagnosis.diagnose import causes_of, description_of, observe
from powertrain.diagnosis.run_record import read_run
from powertrain.diagnosis.symptoms import symptoms_of
from powertrain.records import WrongUse
from powertrain.records.json_files import read_json, write_json
from powertrain.run.folder import RunFolder, locked


def bound_by(**planted: object) -> str:
    return causes_of(record(events(**planted)))[0].name  # type: ignore[arg-type]


class TestBoundBy:
    def test_a_starved_run_is_bound_by_its_data(self):
        waiting = {"data": 0.07, "copy": 0.0, "forward": 0.01, "backward": 0.015, "optimizer": 0.005}
        assert bound_by(parts=dict.fromkeys(range(1, STEPS + 1), waiting)) == "data"

    def test_a_run_that_evaluates_too_often_is_bound_by_that(self):
        evaluations = [{"event": "evaluation", "step": number, "final": False, "loss": 3.5, "tokens": 4000, "seconds": 0.3}
                       for number in range(2, STEPS, 2)]
        samples = [{"event": "sample", "step": number, "text": "x", "seconds": 0.1} for number in range(2, STEPS, 2)]
        run = record(events(between=[*evaluations, *samples], held_out={}), recipe={"eval_steps": 2})
        first = causes_of(run)[0]
        assert first.name == "evaluation"
        assert first.share == pytest.approx(0.4 / 2 / (0.4 / 2 + STEP_S), rel=0.02)
        assert first.cure.words[0].startswith("eval_steps=")

    def test_a_run_that_saves_too_often_is_bound_by_that(self):
        saves = [{"event": "checkpoint", "step": at, "path": "p", "bytes": 1, "seconds": 0.5} for at in range(2, STEPS, 2)]
        assert causes_of(record(events(between=saves), recipe={"save_steps": 2}))[0].name == "checkpointing"

    def test_the_last_evaluation_is_every_runs(self):
        assert observe(record(events(held_out={STEPS: 3.1}))).evaluation is None  # type: ignore[union-attr]

    def test_long_steps_of_compiled_blocks_are_recompilations(self):
        seconds = [2.0 if at in (50, 90, 130) else STEP_S for at in range(STEPS)]
        observed = observe(record(events(seconds=seconds), techniques={"torch_compile": {}}))
        assert observed is not None
        assert (observed.recompilations, observed.recompile_s) == (3, pytest.approx(3 * 1.9))
        assert observed.step_s == (pytest.approx(STEP_S),)

    def test_too_few_steps_have_no_verdict(self):
        assert causes_of(record(events(falling(3), held_out={}))) == []

    def test_what_is_saved_of_a_killed_run_is_reckoned_for_the_whole_of_it(self):
        observed = observe(record(events(falling(80), ended=False, total_steps=800)))
        assert observed is not None
        assert observed.steps == 800


class TestFolders:
    def test_a_run_is_explained_from_its_folder(self, tmp_path: Path):
        run = read_run(on_disk(tmp_path / "run", events()))
        causes, findings = causes_of(run), symptoms_of(run)
        assert causes
        assert [finding.severity for finding in findings] == ["good"]

    def test_a_line_that_is_still_being_written_is_passed_over(self, tmp_path: Path):
        folder = on_disk(tmp_path / "run", events(falling(100), ended=False, total_steps=STEPS))
        with open(folder / "events.jsonl", "a", encoding="utf-8") as file:
            file.write('{"event": "step", "time": 17952')
        assert read_run(folder).last_step == 100

    def test_a_run_that_trains_now_is_running(self, tmp_path: Path):
        happened = events(falling(100), ended=False, total_steps=STEPS)
        folder = on_disk(tmp_path / "run", happened)
        with locked(RunFolder(folder)):
            run = read_run(folder, now=happened[-1]["time"] + 1)
            assert run.state == "running"
            assert "ended_early" not in [finding.rule for finding in symptoms_of(run)]
        assert read_run(folder).state == "killed"

    def test_looking_at_a_run_does_not_stop_its_continuation(self, tmp_path: Path):
        folder = on_disk(tmp_path / "run", events())
        (folder / ".lock").touch()
        read_run(folder)
        with locked(RunFolder(folder)):
            pass

    def test_what_it_was_is_told_in_a_few_lines(self, tmp_path: Path):
        folder = on_disk(tmp_path / "run", events())
        found = description_of(read_run(folder))
        assert "finished, 200 of 200 steps" in found["run"]
        facts = read_json(folder / "facts.json")
        shared = {**facts["hardware"], "name": "AMD", "cores": 1, "processes": 2}
        write_json(folder / "facts.json", {**facts, "hardware": shared})
        assert description_of(read_run(folder))["machine"] == "AMD (cpu), 1 core for each of 2 processes"

    @pytest.mark.parametrize("name", ["facts.json", "plan.json"])
    def test_what_is_not_there_is_done_without(self, tmp_path: Path, name: str):
        folder = on_disk(tmp_path / "run", events())
        (folder / name).unlink()
        assert causes_of(read_run(folder))


class TestBadInput:
    def refused(self, folder: Path) -> str:
        with pytest.raises(WrongUse) as error:
            read_run(folder)
        assert "\n" not in str(error.value)
        return str(error.value)

    def test_no_folder(self, tmp_path: Path):
        assert "does not exist" in self.refused(tmp_path / "none")

    def test_no_run(self, tmp_path: Path):
        assert "recipe.yaml is missing" in self.refused(tmp_path)

    def test_no_event(self, tmp_path: Path):
        assert "without a single event" in self.refused(on_disk(tmp_path / "run", []))

    def test_events_that_begin_nowhere(self, tmp_path: Path):
        assert "without a single event" in self.refused(on_disk(tmp_path / "run", events()[-1:]))

    @pytest.mark.parametrize("line", ["{torn: \n", "[]\n", '{"time": 3}\n', '{"event": "step", "step": 1}\n'])
    def test_a_line_that_is_no_event(self, tmp_path: Path, line: str):
        folder = on_disk(tmp_path / "run", events())
        first, rest = (folder / "events.jsonl").read_text(encoding="utf-8").split("\n", 1)
        (folder / "events.jsonl").write_text(f"{first}\n{line}{rest}", encoding="utf-8")     # at the end it is passed over
        assert "no event of a run" in self.refused(folder)

    def test_a_plan_that_was_cut_off(self, tmp_path: Path):
        folder = on_disk(tmp_path / "run", events())
        (folder / "plan.json").write_text(json.dumps({"steps": []})[:-3], encoding="utf-8")
        assert "not whole JSON" in self.refused(folder)
