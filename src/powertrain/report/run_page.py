"""The page of a run: what it came to, what to distrust, and every figure that its files allow."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.records import WrongUse, several, timeline
from powertrain.records.events import Evaluated, Memory, RunWarning, Sample
from powertrain.records.findings import Finding
from powertrain.records.origins import Stored, asked_lines
from powertrain.records.plan import is_guess
from powertrain.records.timeline import OTHER, History, is_finite, quantile, spread, steady, steady_speeds
from powertrain.report import answer_figures, run_figures
from powertrain.report.page import Block, Cell, Code, Number, Page, Section, Table, Text, facts
from powertrain.report.plan import stored_claim
from powertrain.report.result import BUSY
from powertrain.report.words import ACCURACY, count, duration, flops, interval, memory, with_settings

MOST_SAMPLES = 6
SYMPTOMS = "What the events say"
MOST_CAUTIONS = 5
UNSTEADY = 0.3               # spread of eight steps in ten over the median, where all steps have as many tokens
LARGE_SHARE = 0.1            # of the wall time, for what is not training


@dataclass(frozen=True)
class RunFiles:
    """A run as its folder tells it. What the folder lacks is empty, and `missing` says so."""

    folder: str
    recipe: Stored
    facts: Mapping[str, Any]
    plan: Mapping[str, Any]
    history: History                         # its events, on one clock
    missing: tuple[str, ...] = ()            # sentences
    made: str = ""
    symptoms: Sequence[Finding] = ()         # what `powertrain diagnose RUN` finds in the events, the worst first
    not_diagnosed: str = ""                  # why it finds nothing out, where it cannot


def page(files: RunFiles) -> Page:
    """Return the page of a run. Raises WrongUse for a run without a single event."""
    history = files.history
    if history.first_time is None:
        raise WrongUse(f"{files.folder} holds a run that ended before its first event, so there is nothing to report; "
                       f"`powertrain train --resume {files.folder}` continues the run")
    estimate = timeline.estimate_of(history, files.plan)
    hardware = files.facts.get("hardware") or {}
    device, (limit, _) = history.start.device, files.recipe.get("max_grad_norm", (None, None))
    sections = (
        *_symptoms(files),
        Section("Loss", (run_figures.loss(history), run_figures.signals(history, limit))),
        *(Section("Compared answers", (figure,)) for figure in [answer_figures.rewards(history)] if figure is not None),
        Section("Where the time went", (run_figures.breakdown(history),)),
        *(Section("Processes", (figure,)) for figure in [run_figures.shared_steps(history)] if figure is not None),
        Section("Speed", (run_figures.throughput(history), run_figures.prediction(history, estimate),
                          run_figures.roofline(history, estimate, hardware), run_figures.tokens(history))),
        Section("Memory", (run_figures.memory_by_component(history, estimate, device),)),
        Section("The plan", tuple(_plan(files.plan))),
        Section("Predicted and measured", (_predictions(history, estimate),)),
        Section("What the model writes", tuple(_samples(history))),
        Section("Environment, and how to repeat this", tuple(_environment(files, history))))
    cautions = (*_broken(history), *_time(history), *_learning(history), *_speed(history, files.plan), *_general(files.plan))
    title = f"{history.start.name or 'run'}: {files.folder}"
    tone = {"finished": "good", "failed": "bad"}.get(history.state, "open")
    return Page(_verdict(history, estimate), tone, tuple(_numbers(history, device)), cautions[:MOST_CAUTIONS],
                sections, what="run", title=title, about="", made=files.made)


def _verdict(history: History, estimate: Mapping[str, Any] | None) -> str:
    done, total = (history.steps[-1].step if history.steps else 0), history.start.total_steps
    reason, ends = history.state, history.ends
    state = (f"Finished {several(done, 'step')} in {duration(history.wall_s)}" if reason == "finished" else
             f"Failed at step {ends.step:,} of {total:,}: {ends.message or 'no reason was written'}"
             if reason == "failed" and ends else
             f"{reason[:1].upper() + reason[1:] or 'Running or killed (no end was written)'}, at step {done:,} of {total:,}")
    evaluated = history.of(Evaluated)
    said = f"held-out loss {evaluated[-1].event.loss:.4f} at step {evaluated[-1].after_step:,}" if evaluated else ""
    speed = ""
    if found := steady_speeds(history):
        middle = quantile(found, 0.5)
        share = f" ({middle * estimate['flops_per_token'] / estimate['peak_flops_per_s']:.0%} of the measured " \
                f"{estimate['dtype']} peak)" if estimate else ""
        speed = f" at {count(middle)} tokens/s in the median step{share}"
    return f"{state}{', ' + said if said else ''}{',' if said and speed else ''}{speed}."


def _numbers(history: History, device: str) -> Iterator[Number]:
    if evaluated := history.last(Evaluated):
        bits = f"; {evaluated.bits_per_byte:.3f} bits per byte" if evaluated.bits_per_byte is not None else ""
        if ACCURACY in evaluated.metrics:
            yield Number(f"{evaluated.metrics[ACCURACY]:.1%}", "of held-out answers judged right",
                         f"{count(evaluated.tokens)} pairs or answers, loss {evaluated.loss:.4f}; one run, one seed")
        else:
            yield Number(f"{evaluated.loss:.4f}", "held-out loss, nats a token",
                         f"{count(evaluated.tokens)} tokens; one run, one seed{bits}")
    elif history.steps:
        yield Number(f"{history.steps[-1].loss:.4f}", "training loss of the last step", "no held-out text was evaluated")
    if found := steady_speeds(history):
        low, middle, high = spread(found)
        together = sum(step.real_tokens for step in history.steps) / sum(step.seconds for step in history.steps)
        yield Number(f"{count(middle)} tokens/s", "speed of the median step",
                     f"{count(low)} to {count(high)} in 80% of the steps, n = {len(found):,}; "
                     f"{count(together)} over all steps together")
    measured = history.last(Memory)
    if measured and measured.allocated_bytes:
        yield Number(memory(measured.allocated_bytes), "allocated at the peak", "measured in a step")
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
        rows.append(("on", with_settings(step["technique"], step["settings"]), step.get("exactness", "").lower(),
                     step["because"], stored_claim(step["claim"])))
    rows += [("off", refusal["technique"], "", refusal["because"], "") for refusal in plan["refused"]]
    yield Text(f"{several(len(plan['steps']), 'technique')} on, each confirmed before the first step; "
               f"{len(plan['refused'])} off. Each claimed gain names its basis; `powertrain ablate` measures the gain here.")
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
    """Return a table of predicted and measured time, speed and memory."""
    places = steady(history)
    if not estimate or not places:
        return Text("The plan predicted nothing, because a fact was unknown; there is nothing to compare."
                    if not estimate else "No step has a time; there is nothing to compare.")
    seconds = [history.steps[place].seconds for place in places]
    low_s, high_s = estimate["step_s"]
    number, total_s = len(history.steps), sum(step.seconds for step in history.steps)
    slow, fast = (estimate["tokens_per_step"] / one for one in (high_s, low_s))
    middle, measured = quantile(steady_speeds(history), 0.5), history.last(Memory) or Memory()
    predicted = sum(measured.predicted.values()) or sum(estimate["memory_bytes"].values())
    allocated = measured.allocated_bytes
    rows: tuple[tuple[Cell, ...], ...] = (
        ("a step", interval(duration(low_s), duration(high_s)), duration(quantile(seconds, 0.5)),
         _within(quantile(seconds, 0.5), low_s, high_s)),
        (f"all {number:,} steps", interval(duration(low_s * number), duration(high_s * number)),
         f"{duration(total_s)} in steps, {duration(history.wall_s)} in all",
         _within(total_s, low_s * number, high_s * number)),
        ("tokens/s", interval(count(slow), count(fast)), count(middle), _within(middle, slow, fast)),
        ("of the measured peak", f"at most 100% of {flops(estimate['peak_flops_per_s'])} ({estimate['dtype']})",
         f"{middle * estimate['flops_per_token'] / estimate['peak_flops_per_s']:.1%}", ""),
        ("allocated at the peak", memory(predicted), memory(allocated) if allocated else "not measured in this run",
         f"prediction {predicted / allocated - 1:+.1%}" if allocated else ""))
    return Table(("", "predicted before the run", "measured", ""), rows, "Prediction against result")


def _within(value: float, low: float, high: float) -> str:
    return "inside" if low <= value <= high else f"{1 - value / low:.0%} below the low end" if value < low else \
        f"{value / high - 1:.0%} above the high end"


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


# ------------------------------------------------------------------------------------------------ what to distrust


def _broken(history: History) -> Iterator[str]:
    """Yield what went wrong: no end, values that are not finite, warnings, repeated steps, pauses."""
    if history.ends and history.ends.reason == "failed":
        yield f"The run failed: {history.ends.message or 'no reason was written'}."
    elif history.state != "finished":
        done = history.steps[-1].step if history.steps else 0
        why = history.state or "no end was written: the run is still going, or was killed"
        yield (f"The run is not finished: {done:,} of {history.start.total_steps:,} steps; {why}. "
               "The learning-rate schedule is not finished either.")
    if broken := [step.step for step in history.steps if not (is_finite(step.loss) and is_finite(step.grad_norm))]:
        yield (f"A loss or gradient norm is not finite in {several(len(broken), 'step')}, first in step {broken[0]:,}; the "
               "curves have gaps there.")
    if warnings := history.of(RunWarning):
        more = f", and {len(warnings) - 1} more" if len(warnings) > 1 else ""
        yield f"The run warned: {warnings[0].event.sentence}{more}."
    if history.repeated_steps:
        yield (f"{several(history.repeated_steps, 'step')} ({duration(history.repeated_s)}) were lost when the run was "
               "killed or rewound, and repeated from the checkpoint; times and curves here count them once.")
    if len(history.sessions) > 1:
        yield (f"The run was continued {several(len(history.sessions) - 1, 'time')}; times "
               "here do not include the pauses and the start-up.")


def _time(history: History) -> Iterator[str]:
    parts, wall_s = history.parts, history.wall_s
    if not wall_s:
        return
    for names, where in (((OTHER,), "belongs to no part of a step (other)."),
                         (("data wait",), "went into waiting for data."),
                         (("evaluation", "samples", "checkpoint"),
                          "went into evaluating, sampling and saving; tokens/s count the steps only.")):
        if (share := sum(parts.get(name, 0.0) for name in names) / wall_s) > LARGE_SHARE:
            yield f"{share:.0%} of the wall time {where}"
    if history.overrun_s > 0.01 * wall_s:
        yield (f"The parts add up to {duration(history.overrun_s)} more than the measured wall time; the report shows "
               "their sum.")


def _learning(history: History) -> Iterator[str]:
    found = timeline.held_out_trend(history)
    if found is not None and found.trend != "level":
        (best_step, best), (before_step, before), (last_step, last) = found.best, found.all[-2], found.all[-1]
        yield (f"The held-out loss was lowest at step {best_step:,} ({best:.4f}) and rose to {last:.4f}: "
               "longer training made the model worse." if found.trend == "risen" else
               f"The held-out loss was still falling when the run ended ({before:.3f} at step {before_step:,}, "
               f"{last:.3f} at step {last_step:,}): with more steps the model would learn more.")
    if history.steps and not history.of(Evaluated):
        yield "No held-out text was evaluated, so the report cannot say how well the model does on new text."


def _speed(history: History, plan: Mapping[str, Any]) -> Iterator[str]:
    load, places = history.start.load, steady(history)
    if load is not None and load > BUSY:
        yield f"The machine was not idle when the run began: its load over the last minute was {load:.2g}."
    if len(places) < 10:
        yield f"Only {several(len(places), 'step')} could be timed: too few to give a speed."
        return
    low, middle, high = spread(steady_speeds(history))
    even = len({history.steps[place].real_tokens for place in places}) == 1
    if (high - low) / middle > UNSTEADY:
        why = "other processes were busy, or the clock rate changed" if even else \
            "steps have different numbers of tokens, and other processes may have been busy"
        yield f"The speed varied: 80% of the steps lie between {count(low)} and {count(high)} tokens/s ({why})."
    estimate = timeline.estimate_of(history, plan)
    if estimate and not estimate["step_s"][0] <= quantile([history.steps[place].seconds for place in places], 0.5) \
            <= estimate["step_s"][1]:
        yield "The measured step time lies outside the interval that the plan expected."


def _general(plan: Mapping[str, Any]) -> Iterator[str]:
    steps = plan.get("steps") or []
    if guessed := [step["technique"] for step in steps if is_guess(step["claim"])]:
        yield (f"{len(guessed)} of the {len(steps)} techniques {'have' if len(guessed) > 1 else 'has'} a guessed gain "
               f"({', '.join(guessed)}); `powertrain ablate` measures the gain.")
    yield "This is one run with one seed; another seed gives other losses."
    yield "Speed was measured once, on this machine; compare only runs from the same machine."
