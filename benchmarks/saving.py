"""Case `saving`: what saves and uploads cost a training that uses all cores: all of 115.6 M weights, 1.4 GB a checkpoint.

One run saves every 100 s and uploads each checkpoint to a folder. Its own events say what each step met: a checkpoint that is
copied and written, one that is uploaded, or neither. Each interval between two saves gives one ratio, of its steps beside an
upload to its quiet ones: the machine drifts less within 100 s than between two runs.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cases import Materials
from conditions import marked
from preparing import plain

from powertrain.evidence import studies
from powertrain.evidence.stats import interval
from powertrain.facts.hardware import read_hardware
from powertrain.facts.machine_watch import MachineWatch
from powertrain.facts.software import read_software
from powertrain.records import to_plain
from powertrain.records.event_log import read_events
from powertrain.records.events import Event, Saved, Step, Uploaded
from powertrain.records.evidence import Study

SAVES, BETWEEN_S = 7, 100.0
FIRST = 3                                    # steps, which warm up
LEAST = 3                                    # steps of each kind, for a ratio


def measure(materials: Materials, python: Path) -> None:
    """Measures one run, prints what saves and uploads cost, and stores the study."""
    folder, began = studies.new_folder("bench-saving"), time.monotonic()
    run, store = materials.folder / "saved", materials.folder / "mirror"
    words = ["method=full", f"model.path={materials.llama}", f"data={materials.gsm8k}", "train_batch_size=4", "eval_steps=0",
             "logging_steps=1", "save_steps=auto", f"save_every_s={BETWEEN_S:g}", f"train_time_s={SAVES * BETWEEN_S:g}",
             f"mirror=file://{store}", "mirror_keep=1", "mirror_material=false", "memory_check=off"]
    with MachineWatch() as watch:
        subprocess.run([sys.executable, "-m", "powertrain", "train", *words, "--output", str(run), "--quiet"], check=True)
    found = costs(read_events(run / "events.jsonl"))
    shutil.rmtree(store)
    hardware, software = read_hardware(materials.cache), read_software()
    described = studies.circumstances(hardware, software)
    study = Study(name=folder.name, kind="saving", what="what saves and uploads of 1.4 GB cost a training that uses all cores",
                  seconds=time.monotonic() - began, **{**described, "machine": marked(described["machine"], watch.seen)},
                  findings=found)
    studies.save(folder, study, {"hardware": to_plain(hardware), "software": to_plain(software)})
    print(f"saving: {found} ({folder})")


def costs(events: Sequence[Event]) -> dict[str, object]:
    """What steps took that met nothing, a save or an upload, and the ratios of the intervals."""
    steps = [event for event in events if isinstance(event, Step)][FIRST:]
    saves = [event for event in events if isinstance(event, Saved) and event.beside]
    uploads = [event for event in events if isinstance(event, Uploaded) and event.name.startswith("step-")]
    saving = [(event.time - (event.written_s or 0.0), event.time) for event in saves]
    uploading = [(event.time - event.seconds, event.time) for event in uploads]

    def met(step: Step, spans: Sequence[tuple[float, float]]) -> bool:
        return any(step.time > begin and step.time - step.seconds < end for begin, end in spans)

    ratios, edges = [], [0.0, *(event.time for event in saves), float("inf")]
    for begin, end in itertools.pairwise(edges):
        here = [step for step in steps if begin < step.time <= end and not met(step, saving)]
        beside = [step.seconds for step in here if met(step, uploading)]
        quiet = [step.seconds for step in here if not met(step, uploading)]
        if min(len(beside), len(quiet)) >= LEAST:
            ratios.append(interval(beside).median / interval(quiet).median)
    waited_s, trained_s = sum(event.seconds for event in saves), sum(step.seconds for step in steps)
    slowed = [step.seconds for step in steps if met(step, saving)]
    quiet = [step.seconds for step in steps if not met(step, saving) and not met(step, uploading)]
    return {"step_s": plain(interval(quiet)), "beside_a_save": plain(interval(slowed)) if slowed else None,
            "beside_an_upload": plain(interval(ratios)) if ratios else None, "ratios": ratios,
            "saves": len(saves), "bytes": saves[0].bytes if saves else 0, "waited_share": waited_s / trained_s,
            "lost_share": (waited_s + sum(max(0.0, one - interval(quiet).median) for one in slowed)) / trained_s,
            "upload_s": [event.seconds for event in uploads], "written_s": [event.written_s for event in saves]}
