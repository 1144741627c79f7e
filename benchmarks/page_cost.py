"""Case `page`: how long pages take to open, what the server holds, and what an open page costs a training.

A training that uses all cores goes on the whole time. A browser on the same machine, which is the worst place for it, shows the
run's page for a while and then an empty one, in turns: each pair of such windows gives one ratio of step times. What the page's
server and the browser take of the processor is counted too, once the page stands: it varies less than the steps, which lose
about a second for each second that others take of one core (see the study of saves).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from conditions import LOOK_S, marked
from preparing import plain

from powertrain.evidence import studies
from powertrain.evidence.stats import interval
from powertrain.facts.hardware import read_hardware
from powertrain.facts.machine_watch import MachineWatch
from powertrain.facts.software import read_software
from powertrain.records import to_plain
from powertrain.records.event_log import read_events
from powertrain.records.events import Step
from powertrain.records.evidence import Study

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "web"))
from browser import Served, Visitor, chromium, wait_until
from runs_written import write_run

STEPS, RUNS = 100_000, 1_000
PAIRS, WINDOW_S, SETTLE_S = 16, 12.0, 8.0
OPENED = 5                                   # times, of which the median counts


def measure(scratch: Path, cache: Path) -> None:
    """Measures pages and a training beside one, prints the figures and stores the study."""
    folder, began = studies.new_folder("bench-page"), time.monotonic()
    with MachineWatch() as watch:            # before: processes of a browser that have ended would count as others
        time.sleep(LOOK_S)
    with chromium() as browser:
        found = opening(browser, scratch / "opening") | beside(browser, scratch / "beside")
    hardware, software = read_hardware(cache), read_software()
    described = studies.circumstances(hardware, software)
    study = Study(name=folder.name, kind="page", what="how fast pages open, and what an open page costs a training",
                  seconds=time.monotonic() - began, **{**described, "machine": marked(described["machine"], watch.seen)},
                  findings=found)
    studies.save(folder, study, {"hardware": to_plain(hardware), "software": to_plain(software)})
    print(f"page: {json.dumps(found)} ({folder})")


def opening(browser: Any, folder: Path) -> dict[str, Any]:
    """Open a run of many steps and a list of many runs, for the first time and again."""
    write_run(folder / "runs" / "long", STEPS, spike=STEPS // 2 + 3)
    served = Served(folder, folder.parent / "page-cache")
    try:
        visitor = Visitor(browser, served)
        server = psutil.Process(served.process.pid)

        def opened(path: str, is_there: Callable[[], bool] = lambda: True) -> float:
            at = time.perf_counter()
            visitor.page.goto(served.address + path, wait_until="domcontentloaded")
            wait_until(is_there)
            return time.perf_counter() - at

        found = {"steps": STEPS, "run_cold_s": opened("/runs/long"),
                 "run_warm_s": statistics.median(opened("/runs/long") for _ in range(OPENED))}
        for number in range(RUNS - 1):
            write_run(folder / "runs" / f"run-{number:04d}", 200)
        found |= {"runs": RUNS, "list_first_s": opened("/runs"),
                  "list_cold_s": opened("/runs", lambda: visitor.page.locator("#runs[data-live]").count() == 0),
                  "list_warm_s": statistics.median(opened("/runs") for _ in range(OPENED)),
                  "server_bytes": server.memory_info().rss}
        found["list_cold_s"] += found["list_first_s"]
        visitor.context.close()
        return found
    finally:
        served.end()


def beside(browser: Any, folder: Path) -> dict[str, Any]:
    """Train, with the run's page open in every second window."""
    folder.mkdir()
    served = Served(folder, folder.parent / "page-cache")
    try:
        visitor = Visitor(browser, served)
        page = visitor.go("/new?recipe=default")
        page.get_by_label("Time, seconds").fill("")
        page.get_by_label("More settings").fill("train_time_s=null\nmax_steps=100000\neval_steps=0\nsave_steps=0")
        page.get_by_role("button", name="Start").click()
        log = wait_until(lambda: next(iter(folder.glob("runs/*/events.jsonl")), None), 600.0)
        wait_until(lambda: len(read_events(log)) > 30, 600.0)
        windows, used = [], {True: [0.0, 0.0], False: [0.0, 0.0]}
        for number in range(2 * PAIRS):
            is_open = number % 4 in (0, 3)   # A B B A: what drifts evenly falls out
            visitor.page.goto(f"{served.address}/runs/{log.parent.name}" if is_open else "about:blank")
            time.sleep(SETTLE_S)
            first, before = time.time(), processor_s(served.process.pid)
            time.sleep(WINDOW_S)
            windows.append((is_open, first, time.time()))
            for place, (began_s, ended_s) in enumerate(zip(before, processor_s(served.process.pid), strict=True)):
                used[is_open][place] += ended_s - began_s
        steps = [event for event in read_events(log) if isinstance(event, Step)]
        medians = [(is_open, statistics.median(
            step.seconds for step in steps if first < step.time - step.seconds and step.time < last))
            for is_open, first, last in windows]
        ratios = [dict(pair)[True] / dict(pair)[False] for pair in zip(medians[::2], medians[1::2], strict=True)]
        visitor.context.close()
        server, others = ((opened_s - closed_s) / (PAIRS * WINDOW_S)
                          for opened_s, closed_s in zip(used[True], used[False], strict=True))
        return {"beside_a_page": plain(interval(ratios)), "ratios": ratios, "step_s": statistics.median(
            median for is_open, median in medians if not is_open),
            "server_cpu_share": server, "browser_cpu_share": others}         # of one core
    finally:
        served.end()


def processor_s(server: int) -> tuple[float, float]:
    """Return what the page's server with its helpers, and the browser, have taken of the processor until now."""
    here, browser = 0.0, 0.0
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline", "cpu_times"]):
        words, times = process.info["cmdline"] or [], process.info["cpu_times"]
        if times is None:
            continue
        if process.info["name"].startswith("chrom"):
            browser += times.user + times.system
        elif process.info["pid"] == server or (process.info["ppid"] == server and "train" not in words):
            here += times.user + times.system
    return here, browser
