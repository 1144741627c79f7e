"""Case `saving`: what saves and uploads cost a training that uses all cores: all of 115.6 M weights, 1.4 GB a checkpoint.

One run of equal, short steps saves every 100 s and uploads checkpoints to a folder, which at the pace of an upload beside such
a training takes longer. So there is always something to upload, and the uploader is stopped (SIGSTOP) in every second window:
each pair of windows is one comparison of steps beside an upload with steps without. What the uploader missed while it was
stopped it takes afterwards: beside an upload that nobody stops, a step loses half of what is found. A save is compared with the
nearest steps that have neither. A machine that others share drifts less within seconds than between two runs.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "mirror"))
from watched_runs import uploaders

BETWEEN_S = 100.0                            # two saves
PAIRS, WINDOW_S = 150, 3.0
NEAR_S = 60.0                                # before and after a save, to compare it with
LEAST = 3                                    # steps of a window that counts


def measure(materials: Materials, python: Path) -> None:
    """Measures one run, prints what saves and uploads cost, and stores the study."""
    folder, began = studies.new_folder("bench-saving"), time.monotonic()
    run, store = materials.folder / "saved", materials.folder / "mirror"
    words = ["method=full", f"model.path={materials.llama}", f"data={materials.gsm8k}", "train_batch_size=1",
             "data.max_length=32", "data.long_examples=cut", "data.validation_share=0", "eval_steps=0", "logging_steps=1",
             "save_steps=auto", f"save_every_s={BETWEEN_S:g}", "max_steps=1000000", f"mirror=file://{store}", "mirror_keep=1",
             "mirror_material=false", "memory_check=off"]
    with MachineWatch() as watch, subprocess.Popen(
            [sys.executable, "-m", "powertrain", "train", *words, "--output", str(run), "--quiet"]) as trainer:
        try:
            windows, used_s = by_turns(run, trainer)
        finally:
            trainer.kill()
    found = {**costs(read_events(run / "events.jsonl"), windows),
             "upload_share": used_s / (2 * PAIRS * WINDOW_S)}        # of one core's time
    shutil.rmtree(store)
    hardware, software = read_hardware(materials.cache), read_software()
    described = studies.circumstances(hardware, software)
    study = Study(name=folder.name, kind="saving", what="what saves and uploads of 1.4 GB cost a training that uses all cores",
                  seconds=time.monotonic() - began, **{**described, "machine": marked(described["machine"], watch.seen)},
                  findings=found)
    studies.save(folder, study, {"hardware": to_plain(hardware), "software": to_plain(software)})
    print(f"saving: {found} ({folder})")


Window = tuple[bool, float, float]           # whether the uploader went on, and the times between which


def by_turns(run: Path, trainer: subprocess.Popen[bytes]) -> tuple[list[Window], float]:
    """Stop the run's uploader in every second window, from the first save on; return what processor time it took, too."""
    log, windows = run / "events.jsonl", list[Window]()
    while not (log.exists() and any(isinstance(event, Saved) for event in read_events(log))):
        if trainer.poll() is not None:
            raise SystemExit("the training ended before its first save")
        time.sleep(1.0)
    [uploader] = uploaders(run)
    before = uploader.cpu_times()
    for number in range(2 * PAIRS):
        goes_on = number % 4 in (0, 3)       # A B B A: what drifts evenly falls out
        (uploader.resume if goes_on else uploader.suspend)()
        began = time.time()
        time.sleep(WINDOW_S)
        windows.append((goes_on, began, time.time()))
    after = uploader.cpu_times()
    uploader.kill()
    return windows, after.user + after.system - before.user - before.system


def costs(events: Sequence[Event], windows: Sequence[Window]) -> dict[str, object]:
    """What saves cost, as seconds and as shares of the time, and how much slower steps are beside an upload."""
    saves = [event for event in events if isinstance(event, Saved) and event.beside]
    saving = [(event.time - (event.written_s or 0.0), event.time) for event in saves]
    steps = [event for event in events if isinstance(event, Step) and event.time > saving[0][0]]

    def met(step: Step, spans: Sequence[tuple[float, float]]) -> bool:
        return any(step.time > begin and step.time - step.seconds < end for begin, end in spans)

    quiet = [step for step in steps if not met(step, saving)]
    within = [[step for step in quiet if began < step.time - step.seconds and step.time < ended] for _, began, ended in windows]
    ratios, alone = [], [step for (goes_on, _, _), some in zip(windows, within, strict=True) if not goes_on for step in some]
    for number in range(0, len(windows), 2):
        pair = {windows[place][0]: within[place] for place in (number, number + 1)}
        if min(map(len, pair.values())) >= LEAST:
            beside_s, alone_s = (statistics.fmean(step.seconds for step in pair[goes_on]) for goes_on in (True, False))
            ratios.append(beside_s / alone_s)
    saves_cost_s = []
    for save, (begin, end) in zip(saves, saving, strict=True):
        near_s = [step.seconds for step in alone if begin - NEAR_S < step.time < end + NEAR_S]
        if len(near_s) >= LEAST:
            beside_s = [step.seconds for step in steps if met(step, [(begin, end)])]
            saves_cost_s.append(save.seconds + sum(beside_s) - statistics.fmean(near_s) * len(beside_s))
    waited_s, lost = [event.seconds for event in saves], interval([cost_s / BETWEEN_S for cost_s in saves_cost_s])
    return {"step_s": plain(interval([step.seconds for step in alone])), "bytes": saves[0].bytes, "saves": len(saves_cost_s),
            "between_s": BETWEEN_S, "lost_share": lost.median, "lost_to_saves": plain(lost),
            "waited_share": statistics.median(waited_s) / BETWEEN_S, "beside_an_upload": plain(interval(ratios)),
            "ratios": ratios, "save_costs_s": saves_cost_s, "waited_s": waited_s,
            "upload_s": [event.seconds for event in events if isinstance(event, Uploaded) and event.name.startswith("step-")],
            "written_s": [event.written_s for event in saves]}
