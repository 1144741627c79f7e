"""A run whose blocks two processes compute together: from the command to the model, and on alone. gloo."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from driver import TINY, run_cli
from powertrain.records.event_log import read_events
from powertrain.records.events import Evaluated, Sample, Step
from powertrain.records.json_files import read_json


def test_a_run_whose_blocks_processes_divide_is_the_run_of_one_and_goes_on_alone(cache: Path, source: Path, tmp_path: Path
                                                                                ) -> None:
    words = ["train", f"data={source}", *TINY, "model.dropout=0.0", "techniques.bf16=off"]
    for run, more in (("one", []), ("two", ["techniques.tensor_parallel=on", "--processes", "2"])):
        code, _, err = run_cli([*words, *more, "--output", str(tmp_path / run)], cache, tmp_path)
        assert code == 0, err
    shutil.rmtree(tmp_path / "two" / "model")
    newest = max((tmp_path / "two" / "checkpoints").glob("step-*"))
    assert read_json(newest / "MANIFEST.json")["shards"] == 2
    shutil.rmtree(newest)
    code, _, err = run_cli(["train", "--resume", str(tmp_path / "two")], cache, tmp_path)
    assert code == 0, err

    one, two = (list(read_events(tmp_path / run / "events.jsonl")) for run in ("one", "two"))
    # losses are those of the same steps, of the one process that went on too
    for kind in (Step, Evaluated):
        ours, theirs = ({event.step: event.loss for event in events if isinstance(event, kind)} for events in (one, two))
        assert ours == pytest.approx(theirs, rel=1e-5)
    samples = [{event.step: event.text for event in events if isinstance(event, Sample)} for events in (one, two)]
    assert samples[0] == samples[1] != {}
    files = [sorted(file.name for file in (tmp_path / run / "model").iterdir()) for run in ("one", "two")]
    assert files[0] == files[1]
