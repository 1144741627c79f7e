"""Case `saving`: what saves and uploads cost a training that uses all cores: all of 115.6 M weights, 1.4 GB a checkpoint.

One run of equal steps saves every 150 s and uploads each checkpoint to a folder. Its own events say what each step met: a
checkpoint that is copied and written, one that is uploaded, or neither. Each interval between two saves is a pair: its steps
beside a save or an upload, and its quiet ones. The machine drifts less within a minute than between two runs.
"""

from __future__ import annotations

import shutil
import statistics
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

SAVES, BETWEEN_S = 4, 150.0             # an upload beside a training that uses all cores takes more than a minute
ASKED_S = 100.0                              # between two saves, for the shares of the time
FIRST = 3                                    # steps, which warm up
LEAST = 3                                    # quiet steps of an interval that counts


def measure(materials: Materials, python: Path) -> None:
    """Measures one run, prints what saves and uploads cost, and stores the study."""
    folder, began = studies.new_folder("bench-saving"), time.monotonic()
    run, store = materials.folder / "saved", materials.folder / "mirror"
    words = ["method=full", f"model.path={materials.llama}", f"data={materials.gsm8k}", "train_batch_size=2",
             "data.max_length=96", "data.long_examples=cut", "data.validation_share=0", "eval_steps=0", "logging_steps=1",
             "save_steps=auto", f"save_every_s={BETWEEN_S:g}", f"train_time_s={SAVES * BETWEEN_S:g}",
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
    """What each save and each upload cost: seconds, and the share of the time with a save every ASKED_S."""
    steps = [event for event in events if isinstance(event, Step)][FIRST:]
    saves = [event for event in events if isinstance(event, Saved) and event.beside]
    uploads = [event for event in events if isinstance(event, Uploaded) and event.name.startswith("step-")]
    saving = [(event.time - (event.written_s or 0.0), event.time) for event in saves]
    uploading = [(event.time - event.seconds, event.time) for event in uploads]

    def met(step: Step, spans: Sequence[tuple[float, float]]) -> bool:
        return any(step.time > begin and step.time - step.seconds < end for begin, end in spans)

    quiet_s, slower, by_save_s, by_upload_s = [], [], [], []
    for (begin, _), (end, _), save in zip(saving, [*saving[1:], (float("inf"), 0.0)], saves, strict=True):
        here = [step for step in steps if begin < step.time <= end]
        beside_save = [step.seconds for step in here if met(step, saving)]
        beside_upload = [step.seconds for step in here if met(step, uploading) and not met(step, saving)]
        quiet = [step.seconds for step in here if not met(step, saving) and not met(step, uploading)]
        if len(quiet) < LEAST or not beside_upload:
            continue
        typical_s = statistics.median(quiet)
        quiet_s.append(typical_s)
        by_save_s.append(save.seconds + sum(beside_save) - typical_s * len(beside_save))
        by_upload_s.append(sum(beside_upload) - typical_s * len(beside_upload))
        slower.append(statistics.fmean(beside_upload) / typical_s)
    if not quiet_s:
        raise SystemExit(f"no interval of {BETWEEN_S:g} s between two saves has {LEAST} quiet steps: writing took "
                         f"{[event.written_s for event in saves]} s and uploading {[event.seconds for event in uploads]} s")
    waited_s = [event.seconds for event in saves]
    lost, uploading_lost = (interval([cost_s / ASKED_S for cost_s in costs_s]) for costs_s in (by_save_s, by_upload_s))
    return {"step_s": plain(interval(quiet_s)), "bytes": saves[0].bytes, "saves": len(saves), "between_s": ASKED_S,
            "lost_share": lost.median, "lost_to_saves": plain(lost), "waited_share": statistics.median(waited_s) / ASKED_S,
            "lost_to_uploads": plain(uploading_lost), "beside_an_upload": plain(interval(slower)), "ratios": slower,
            "save_costs_s": by_save_s, "upload_costs_s": by_upload_s, "waited_s": waited_s,
            "upload_s": [event.seconds for event in uploads], "written_s": [event.written_s for event in saves]}
