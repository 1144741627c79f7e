"""What a page hears of a run while it looks: its numbers, every six seconds, and what happened, line by line, at once.

One stream of server-sent events for each tab that is visible. The id of a message is the place in events.jsonl up to which the
run was read, so that a tab that connects again hears what it has missed, and nothing twice.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from powertrain.records import WrongUse, several
from powertrain.records.event_log import from_line
from powertrain.records.events import End, Evaluated, Event, Memory, Phase, Sample, Saved
from powertrain.records.timeline import last_of
from powertrain.report.result import printable, said
from powertrain.report.words import count, duration, memory
from powertrain.run.folder import RunFolder
from powertrain.web.log_lines import STEP
from powertrain.web.series import Index, Series
from powertrain.web.site import Streams

LOOK_S = 0.8                 # between two looks at the log
TOLD_S = 6.0                 # between two messages in which only numbers are new: a browser has more work than a look
BEAT_S = 7.0                 # a word is heard at least this often
DRAWN_EVERY_S = 10.0         # while only steps are new, curves are fetched again so often ...
DRAWN_SHARE = 1000.0         # ... and at most for one part in so many of the time: a training may need every core
MOST_STREAMS = 8
RECENT = 50                  # steps that the speed is of
UNKNOWN = "-"
SHOWN = (Evaluated, Saved, Sample, End, Memory)          # what a page shows besides numbers


def numbers(series: Series, folder: RunFolder, state: str) -> dict[str, str]:
    """Return the numbers of a run as they are shown."""
    start, last = series.start, series.steps[-RECENT:]
    held, saved, used = last_of(Evaluated, series.others), last_of(Saved, series.others), last_of(Memory, series.others)
    ended = last_of(End, series.others)
    taken = int(series["step"][-1]) if len(last) else start.step
    seconds = float(last[:, 5].sum()) if len(last) else 0.0
    step_s = seconds / len(last) if len(last) else 0.0
    left = (start.total_steps - taken) * step_s
    peak = ended.peak_memory_bytes if ended and ended.peak_memory_bytes else used.allocated_bytes if used else 0
    return {
        "state": state, "step": f"{taken:,}", "total": f"{start.total_steps:,}",
        "progress": f"{taken / start.total_steps if start.total_steps else 0:.4f}",
        "loss": f"{series['loss'][-1]:.4f}" if len(last) else UNKNOWN,
        "held": f"{held.loss:.4f} at step {held.step:,}" if held else UNKNOWN,
        "speed": f"{count(float(last[:, 7].sum()) / seconds)} tokens/s" if seconds else UNKNOWN,
        "rate": f"{series['learning_rate'][-1]:.3g}" if len(last) else UNKNOWN,
        "gradient": f"{series['grad_norm'][-1]:.3g}" if len(last) else UNKNOWN,
        "elapsed": duration(float(series["seconds"].sum())) if len(last) else UNKNOWN,
        "left": duration(left) if state == "running" and step_s else UNKNOWN,
        "memory": memory(peak) if peak else UNKNOWN,
        "saved": f"step {saved.step:,}" if saved else "not yet",
        "phase": phase(series, state)}


def phase(series: Series, state: str) -> str:
    """Return what a run does that has taken no step yet."""
    if len(series.steps) or state != "running":
        return ""
    last = last_of(Phase, series.others)
    return printable(last.sentence) if last else "preparing"


def lines_of(events: tuple[Event, ...]) -> list[str]:
    """Return what is said of each event, without what could steer a terminal."""
    found = []
    for event in events:
        text = said(event) or (f"step {event.step:,}: saved in {duration(event.seconds)}" if isinstance(event, Saved) else
                               f"{event.state} after {several(event.step, 'step')}" if isinstance(event, End) else None)
        if text is not None:
            found.append(f"{time.strftime('%H:%M:%S', time.localtime(event.time))}  {printable(text.strip())}")
    return found


def stream(request: Request, run: Path, index: Index, streams: Streams, is_awaited: Callable[[], bool]) -> Response:
    """Return the stream of a run; `is_awaited`: a job is to go on with it. Raises HTTPException where too many are open."""
    if streams.open >= MOST_STREAMS:
        raise HTTPException(503, f"{MOST_STREAMS} tabs watch runs already; close one of them")
    since = request.headers.get("last-event-id", request.query_params.get("since", ""))
    begin = int(since) if since.isdecimal() and len(since) < 16 else 0

    async def counted() -> AsyncIterator[str]:
        streams.open += 1
        try:
            async for message in _messages(run, index, streams, begin, is_awaited):
                yield message
        finally:
            streams.open -= 1

    return StreamingResponse(counted(), media_type="text/event-stream")


async def _messages(run: Path, index: Index, streams: Streams, begin: int,
                    is_awaited: Callable[[], bool]) -> AsyncIterator[str]:
    folder, told, beat, drawn = RunFolder(run), dict[str, str](), time.monotonic(), time.monotonic()
    before: Series | None = None
    yield "retry: 1000\n\n"
    while True:
        series, state = await run_in_threadpool(_look, index, run, folder)
        first = before is None
        fresh = await run_in_threadpool(_since, run, begin, series, index.open_log) if first else _new(before, series)
        now, shown = time.monotonic(), numbers(series, folder, state)
        happened = not first and (any(isinstance(event, SHOWN) for event in fresh) or shown["state"] != told.get("state"))
        due = not first and before is not None and len(series.steps) > len(before.steps) and \
            now - drawn > max(DRAWN_EVERY_S, DRAWN_SHARE * streams.drawing_s)
        if fresh or shown["state"] != told.get("state") or (shown != told and now - beat >= TOLD_S):
            drawn = now if happened or due else drawn
            ended = state not in ("running", "running or killed") and not is_awaited()
            value = {"fields": {name: text for name, text in shown.items() if told.get(name) != text},
                     "lines": lines_of(fresh), "changed": happened or due, "ended": ended}
            yield f"id: {series.end}\ndata: {json.dumps(value)}\n\n"
            told, beat = shown, now
        elif now - beat > BEAT_S:
            yield f"event: beat\nid: {series.end}\ndata: {{}}\n\n"
            beat = now
        before = series
        await asyncio.sleep(LOOK_S)


def _look(index: Index, run: Path, folder: RunFolder) -> tuple[Series, str]:
    series = index.series(run)
    return series, series.state(folder)


def _new(before: Series | None, series: Series) -> tuple[Event, ...]:
    """Return the events that are new. After a continuation went back, those from it on."""
    old = before.others if before else ()
    same = next((number for number, (one, two) in enumerate(zip(old, series.others, strict=False)) if one is not two),
                min(len(old), len(series.others)))
    return series.others[same:]


def _since(run: Path, begin: int, series: Series, open_log: Callable[[Path], BinaryIO]) -> tuple[Event, ...]:
    """Return the events that lie behind a place of the log; the page itself has shown those before it."""
    try:
        with open_log(run / "events.jsonl") as log:
            log.seek(begin)
            lines = log.read(max(0, series.end - begin)).split(b"\n")       # what came since is in the next message
    except (OSError, WrongUse):
        return ()
    found = list[Event]()
    for line in lines:
        if line and not line.startswith(STEP):
            with suppress(ValueError, TypeError, LookupError, RecursionError):       # damaged: the page says so
                found.append(from_line(json.loads(line)))
    return tuple(found)
