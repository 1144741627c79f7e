"""The page of a run: what it came to, what to distrust, and every figure that its files allow."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from powertrain.records import Effect, WrongUse, timeline
from powertrain.records.events import Evaluated, Event, Memory, Sample
from powertrain.records.findings import Finding
from powertrain.records.origins import Stored, asked_lines
from powertrain.records.timeline import History, quantile, steady
from powertrain.report import run_figures
from powertrain.report.cautions import of_run
from powertrain.report.figures import count, duration, flops, interval, memory
from powertrain.report.page import Block, Cell, Code, Number, Page, Section, Table, Text, facts, several
from powertrain.report.plan import claim

MOST_SAMPLES = 6
SYMPTOMS = "What the events say"


@dataclass(frozen=True)
class RunFiles:
    """A run as its folder tells it. What the folder lacks is empty, and `missing` says so."""

    folder: str
    recipe: Stored
    facts: Mapping[str, Any]
    plan: Mapping[str, Any]
    events: Sequence[Event]                  # the history as it counts
    missing: tuple[str, ...] = ()            # sentences
    all_events: Sequence[Event] = field(default=())
    made: str = ""
    symptoms: Sequence[Finding] = ()         # what `powertrain diagnose RUN` finds in the events, the worst first
    not_diagnosed: str = ""                  # why it finds nothing out, where it cannot


def page(files: RunFiles) -> Page:
    """Return the page of a run. Raises WrongUse for a run without a single event."""
    if not files.events:
        raise WrongUse(f"{files.folder} holds a run that ended before its first event, so there is nothing to report; "
                       f"`powertrain train --resume {files.folder}` continues the run")
    history = timeline.read(files.events, files.all_events)
    estimate = timeline.estimate_of(history, files.plan)
    hardware = files.facts.get("hardware") or {}
    device, (limit, _) = history.start.device, files.recipe.get("max_grad_norm", (None, None))
    sections = (
        *_symptoms(files),
        Section("Loss", (run_figures.loss(history), run_figures.signals(history, limit))),
        Section("Where the time went", (run_figures.breakdown(history),)),
        Section("Speed", (run_figures.throughput(history), run_figures.prediction(history, estimate),
                          run_figures.roofline(history, estimate, hardware), run_figures.tokens(history))),
        Section("Memory", (run_figures.memory_by_component(history, estimate, device),)),
        Section("The plan", tuple(_plan(files.plan))),
        Section("Predicted and measured", (_predictions(history, estimate),)),
        Section("What the model writes", tuple(_samples(history))),
        Section("Environment, and how to repeat this", tuple(_environment(files, history))))
    title = f"{history.start.name or 'run'}: {files.folder}"
    return Page("run", title, "", _verdict(history, estimate), _tone(history), tuple(_numbers(history, device)),
                tuple(of_run(history, files.plan)), sections, files.made)


def _tone(history: History) -> str:
    return {"finished": "good", "failed": "bad"}.get(history.state, "open")


def _verdict(history: History, estimate: Mapping[str, Any] | None) -> str:
    done, total = (history.steps[-1].step if history.steps else 0), history.start.total_steps
    reason, ends = history.state, history.ends
    state = (f"Finished {several(done, 'step')} in {duration(history.wall_s)}" if reason == "finished" else
             f"Failed at step {ends.step:,} of {total:,}: {ends.message or 'no reason was written'}"
             if reason == "failed" and ends else
             f"{reason[:1].upper() + reason[1:] or 'Running or killed (no end was written)'}, at step {done:,} of {total:,}")
    said = run_figures.evaluations_say(history)
    speed = ""
    places = steady(history)
    if places:
        middle = quantile([history.speeds[place] or 0.0 for place in places], 0.5)
        share = f" ({middle * estimate['flops_per_token'] / estimate['peak_flops_per_s']:.0%} of the measured " \
                f"{estimate['dtype']} peak)" if estimate else ""
        speed = f" at {count(middle)} tokens/s in the median step{share}"
    return f"{state}{', ' + said if said else ''}{',' if said and speed else ''}{speed}."


def _numbers(history: History, device: str) -> Iterator[Number]:
    evaluated = history.of(Evaluated)
    if evaluated:
        bits = evaluated[-1].event.bits_per_byte
        yield Number(f"{evaluated[-1].event.loss:.4f}", "held-out loss, nats a token",
                     f"{count(evaluated[-1].event.tokens)} tokens; one run, one seed"
                     + (f"; {bits:.3f} bits per byte" if bits is not None else ""))
    elif history.steps:
        yield Number(f"{history.steps[-1].loss:.4f}", "training loss of the last step", "no held-out text was evaluated")
    if places := steady(history):
        found = [history.speeds[place] or 0.0 for place in places]
        together = sum(step.real_tokens for step in history.steps) / sum(step.seconds for step in history.steps)
        yield Number(f"{count(quantile(found, 0.5))} tokens/s", "speed of the median step",
                     f"{count(quantile(found, 0.1))} to {count(quantile(found, 0.9))} in 80% of the steps, n = {len(found):,}; "
                     f"{count(together)} over all steps together")
    memory_events = history.of(Memory)
    if memory_events and memory_events[-1].event.allocated_bytes:
        yield Number(memory(memory_events[-1].event.allocated_bytes), "allocated at the peak", "measured in a step")
    elif history.ends and history.ends.peak_memory_bytes:
        held = "allocated on the device" if device == "cuda" else "resident, the process with its libraries"
        yield Number(memory(history.ends.peak_memory_bytes), "memory at the peak", held)
    else:
        yield Number(duration(history.wall_s), "time", "from the first step to the last event")


def _plan(plan: Mapping[str, Any]) -> Iterator[Block]:
    if not plan:
        yield Text("plan.json is missing.")
        return
    rows: list[tuple[Cell, ...]] = []
    for step in plan["steps"]:
        settings = ", ".join(f"{key}={value}" for key, value in step["settings"].items())
        effect = Effect(**{**step["claim"], "step_time": tuple(step["claim"]["step_time"])})
        rows.append(("on", step["technique"] + (f" ({settings})" if settings else ""), step.get("exactness", "").lower(),
                     step["because"], claim(effect)))
    rows += [("off", refusal["technique"], "", refusal["because"], "") for refusal in plan["refused"]]
    yield Text(f"{several(len(plan['steps']), 'technique')} on, each confirmed before the first step; "
               f"{len(plan['refused'])} off. Each claim names its basis; `powertrain ablate` measures the gain here.")
    yield Table(("", "technique", "exactness", "because", "claimed"), tuple(rows), "Every technique, and why")


def _symptoms(files: RunFiles) -> Iterator[Section]:
    """Yield a section with the findings of a diagnosis of the events, if there are any."""
    if files.not_diagnosed:
        yield Section(SYMPTOMS, (Text(f"The events could not be diagnosed: {files.not_diagnosed}."),))
    elif files.symptoms:
        rows = [(finding.severity, f"{finding.title}: {'; '.join(seen.what for seen in finding.evidence)}", finding.why,
                 " ".join([finding.cure.says, *(f"`{words}`" for words in finding.cure.words)]))
                for finding in files.symptoms]
        yield Section(SYMPTOMS, (Table(("", "seen", "why it matters", "what to do"), tuple(rows),
                                       f"`powertrain diagnose {files.folder}`"),))


def _predictions(history: History, estimate: Mapping[str, Any] | None) -> Block:
    """Time, speed and memory: what was expected and what came."""
    places = steady(history)
    if not estimate or not places:
        return Text("The plan predicted nothing, because a fact was unknown; there is nothing to compare."
                    if not estimate else "No step has a time; there is nothing to compare.")
    seconds = [history.steps[place].seconds for place in places]
    low_s, high_s = estimate["step_s"]
    number, total_s = len(history.steps), sum(step.seconds for step in history.steps)
    rows: list[tuple[Cell, ...]] = [
        ("a step", interval(duration(low_s), duration(high_s)), duration(quantile(seconds, 0.5)),
         _within(quantile(seconds, 0.5), low_s, high_s)),
        (f"all {number:,} steps", interval(duration(low_s * number), duration(high_s * number)),
         f"{duration(total_s)} in steps, {duration(history.wall_s)} in all",
         _within(total_s, low_s * number, high_s * number))]
    slow, fast = (estimate["tokens_per_step"] / one for one in (high_s, low_s))
    middle = quantile([history.speeds[place] or 0.0 for place in places], 0.5)
    rows.append(("tokens/s", interval(count(slow), count(fast)), count(middle), _within(middle, slow, fast)))
    rows.append(("of the measured peak", f"at most 100% of {flops(estimate['peak_flops_per_s'])} ({estimate['dtype']})",
                 f"{middle * estimate['flops_per_token'] / estimate['peak_flops_per_s']:.1%}", ""))
    predicted = sum(estimate["memory_bytes"].values())
    events = history.of(Memory)
    allocated = events[-1].event.allocated_bytes if events else None
    predicted = sum(events[-1].event.predicted.values()) or predicted if events else predicted
    rows.append(("allocated at the peak", memory(predicted), memory(allocated) if allocated else "not measured in this run",
                 f"prediction {predicted / allocated - 1:+.1%}" if allocated else ""))
    return Table(("", "predicted before the run", "measured", ""), tuple(rows), "Prediction against result")


def _within(value: float, low: float, high: float) -> str:
    return "inside" if low <= value <= high else f"{value / low - 1:+.0%} of the low end" if value < low else \
        f"{value / high - 1:+.0%} of the high end"


def _samples(history: History) -> Iterator[Block]:
    samples = history.of(Sample)
    if not samples:
        yield Text("No sample was written in this run.")
        return
    yield Text("The last samples of the run, with the recipe's sample settings.")
    for one in samples[-MOST_SAMPLES:]:
        yield Code(one.event.text, f"After step {one.after_step:,}")


def _environment(files: RunFiles, history: History) -> Iterator[Block]:
    hardware, software = files.facts.get("hardware") or {}, files.facts.get("software") or {}
    began = datetime.datetime.fromtimestamp(history.first_time).strftime("%Y-%m-%d %H:%M") if history.first_time else ""
    peaks = ", ".join(f"{dtype} {flops(peak)}" for dtype, peak in (hardware.get("peak_flops_per_s") or {}).items())
    model, data = files.facts.get("model") or {}, files.facts.get("data") or {}
    yield facts("Method", (
        ("began", began), ("sessions", len(history.sessions)),
        ("machine", hardware.get("name")), ("device", f"{hardware.get('devices', 1)} x {hardware.get('device', '')}"),
        ("cores", hardware.get("cores")), ("memory", memory(hardware["memory_bytes"]) if hardware else ""),
        ("peaks, measured", peaks),
        ("bandwidth, measured", f"{hardware['bandwidth_bytes_per_s'] / 1e9:.3g} GB/s"
         if hardware.get("bandwidth_bytes_per_s") else ""),
        ("model", f"{model.get('family')}, {model.get('layers')} layers x {model.get('width')}, "
                  f"{count(model.get('parameters', 0))} parameters, {count(model.get('trainable', 0))} trained"
         if model else ""),
        ("data", f"{data.get('source')}, sha256 {data.get('digest', '')[:16]}, {count(data.get('examples', 0))} examples"
         if data else ""),
        ("batch", f"{history.start.train_batch_size} examples a step"),
        ("statistics", "medians, and 10% to 90% of the steps after warm-up; one run with one seed")))
    yield facts("Versions", software.get("versions") or {})
    yield Code(f"powertrain train {files.folder}/recipe.yaml --output NEW-FOLDER",
               "To repeat the run with the same version of powertrain:")
    if asked := asked_lines(files.recipe, planned=False):
        yield Code("\n".join(asked), "The values of the recipe that are not defaults (recipe.yaml has all values)")
