"""The figures of a run: what it learned, where its time went, how fast it was, and how its machine was used."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from powertrain.records import several, timeline
from powertrain.records.events import End, Evaluated, Event, Memory, ModelSaved, Resume, RunWarning, Sample, Saved
from powertrain.records.timeline import NOT_SPLIT, OTHER, History, is_finite, spread, steady_speeds
from powertrain.report import chart
from powertrain.report.chart import COMPONENT_COLOURS, Axis, Moments, Plot, Point, Row, Rows, Segment, Series, stacked
from powertrain.report.page import Cell, Figure, Missing, Table
from powertrain.report.words import ACCURACY, count, duration, flops, memory

SMOOTHED_SHARE = 1 / 40      # of the steps: over so many the faint line is smoothed
LEAST_SMOOTHED = 5
COLOUR_OF: Mapping[str, str] = {
    "data wait": "orange", "copy": "ink", "forward": "blue", "backward": "sky", "communication": "quiet",
    "optimizer": "green", NOT_SPLIT: "blue", "evaluation": "purple", "samples": "yellow", "checkpoint": "red", OTHER: "grey"}
MARKED: tuple[tuple[type[Event], str], ...] = ((Evaluated, "purple"), (Saved, "red"), (RunWarning, "orange"))
LISTED = (Evaluated, Saved, RunWarning, Resume, Sample, ModelSaved, End)
MOST_BINS = 60
ROLLING_SHARE = 1 / 30
PEAK_COLOURS = {"fp32": "green", "tf32": "orange", "bf16": "blue", "fp16": "purple"}
GIB = 2**30


# ------------------------------------------------------------------------------------------------ what it learned


def loss(history: History) -> Figure | Missing:
    steps, evaluations = history.steps, history.of(Evaluated)
    if not steps:
        return Missing("loss", "No step was done.")
    tokens = list(itertools.accumulate(step.tokens for step in steps))
    raw = [step.loss for step in steps]
    over = max(LEAST_SMOOTHED, round(len(steps) * SMOOTHED_SHARE)) | 1
    mean = timeline.rolling_mean(raw, over)
    tokens_at = dict(zip((step.step for step in steps), tokens, strict=True))
    held_out = [(tokens_at.get(one.after_step, 0), one.at_s, one.event.loss) for one in evaluations]
    wall_s = history.wall_s
    unit, scale = ("hours", 3600.0) if wall_s > 3 * 3600 else ("minutes", 60.0) if wall_s > 180 else ("seconds", 1.0)
    loss_unit = "nats a pair or answer" if ACCURACY in steps[0].metrics else "nats a token"
    plots = tuple(_loss_plot(title, axis, xs, raw, mean, evaluated, over, loss_unit) for title, axis, xs, evaluated in (
        ("Over trained tokens", "trained tokens", tokens, [(at, value) for at, _, value in held_out]),
        ("Over time", f"time since the first step began, {unit}", [end / scale for end in history.ends_s],
         [(at / scale, value) for _, at, value in held_out])))
    table = Table(("step", "trained tokens", "time (s)", f"training loss ({loss_unit})", "smoothed"),
                  tuple((step.step, seen, round(end, 4), value, average) for step, seen, end, value, average
                        in zip(steps, tokens, history.ends_s, raw, mean, strict=True)), "training loss")
    evaluated = Table(("step", "trained tokens", "time (s)", f"held-out loss ({loss_unit})", "held-out tokens or pairs",
                       "bits per byte"),
                      tuple((one.after_step, seen, round(at, 4), value, one.event.tokens, one.event.bits_per_byte)
                            for one, (seen, at, value) in zip(evaluations, held_out, strict=True)), "held-out loss")
    return Figure(
        "loss", _loss_title(mean, held_out, tokens[-1]), plots,
        f"Faint line: the loss of each step, in {loss_unit}. Line: the mean of {over} neighbouring steps. Points: "
        "the loss on held-out text, which is never trained on"
        + (". The last point covers all held-out text, the earlier points cover max_eval_samples of it"
           if len(held_out) > 1 and evaluations[-1].event.final else "")
        + (f". The last point is that of the weights of step {best:,}"
           if evaluations and (best := evaluations[-1].event.weights_step) is not None else "")
        + ". Time includes evaluations and checkpoints.", (table, evaluated) if held_out else (table,), beside=True)


def _loss_title(mean: list[float | None], held_out: list[tuple[int, float, float]], tokens: int) -> str:
    if len(held_out) > 1:
        return f"Held-out loss went from {held_out[0][2]:.3f} to {held_out[-1][2]:.3f} over {count(tokens)} trained tokens"
    known = [value for value in mean if value is not None]
    if not known:
        return "No step has a finite loss"
    at_the_end = f"; held out it is {held_out[0][2]:.3f}" if held_out else "; nothing was held out and evaluated"
    return f"Training loss went from {known[0]:.3f} to {known[-1]:.3f} over {count(tokens)} trained tokens{at_the_end}"


def _loss_plot(title: str, axis: str, xs: Sequence[float], raw: list[float], mean: list[float | None],
               evaluated: Sequence[tuple[float, float]], over: int, unit: str) -> Plot:
    marks = (Series("each step", tuple(zip(xs, raw, strict=True)), "blue", "faint"),
             Series(f"mean of {over} steps", tuple(zip(xs, mean, strict=True)), "blue"),
             *((Series("held out", tuple(evaluated), "red", "circle"),) if evaluated else ()),
             *_gaps(xs, raw))
    return Plot(Axis(axis, low=0.0), Axis(f"loss, {unit}"), marks, title)


def _gaps(xs: Sequence[float], raw: list[float]) -> tuple[Moments, ...]:
    broken = tuple(float(x) for x, value in zip(xs, raw, strict=True) if not is_finite(value))
    return (Moments("not finite", broken, "orange"),) if broken else ()


def signals(history: History, limit: float | None) -> Figure | Missing:
    """Plot gradient norm and learning rate. `limit`: the norm above which gradients are scaled down; 0 or None: no limit."""
    steps = history.steps
    if not steps:
        return Missing("gradient norm and learning rate", "No step was done.")
    numbers = [step.step for step in steps]
    norms = [step.grad_norm for step in steps]
    finite = [norm for norm in norms if is_finite(norm)]
    log = bool(finite) and min(finite) > 0 and max(finite) / min(finite) > 30
    norm_plot = Plot(Axis("step"), Axis("gradient norm before clipping", log=log),
                     (Series("each step", tuple(zip(numbers, norms, strict=True)), "purple"),
                      *((chart.Level(f"clipped above {limit:g}", float(limit), "red"),) if limit else ()),
                      *_gaps(numbers, norms)), "Gradient norm", height=170)
    rates = Series("each step", tuple((step.step, step.learning_rate) for step in steps), "green")
    rate_plot = Plot(Axis("step"), Axis("learning rate", low=0.0), (rates,), "Learning rate", height=170)
    clipped = sum(norm > limit for norm in finite) if limit else 0
    title = (f"{clipped:,} of {len(steps):,} steps had a gradient norm above {limit:g}, and were clipped" if limit and clipped
             else f"No gradient norm was above {limit:g}, so none was clipped" if limit else
             f"The gradient norm lay between {min(finite, default=0):.3g} and {max(finite, default=0):.3g}, not clipped")
    table = Table(("step", "gradient norm", "learning rate"),
                  tuple((step.step, step.grad_norm, step.learning_rate) for step in steps))
    return Figure("signals", title, (norm_plot, rate_plot),
                  "The norm of all gradients before clipping, and the learning rate, of each step."
                  + (" The axis of the norm is logarithmic." if log else ""), (table,), beside=True)


# ------------------------------------------------------------------------------------------------ time and speed


def breakdown(history: History) -> Figure | Missing:
    """Plot the wall time by part, as one bar and over the run. The parts sum to the wall time."""
    if not history.wall_s or not history.steps:
        return Missing("step-time breakdown", "No step was done.")
    parts, wall_s, steps = history.parts, history.wall_s, len(history.steps)
    whole = Row("all of the run", stacked(parts, wall_s / 100, COLOUR_OF, OTHER))
    bar = Rows(Axis("% of the wall time", low=0.0, high=100.0), (whole,))
    table = Table(("part", "seconds", "% of the wall time", "ms a step"),
                  (*((part, seconds, 100 * seconds / wall_s, 1e3 * seconds / steps) for part, seconds in parts.items()),
                   ("all (the wall time)", wall_s, 100.0, 1e3 * wall_s / steps)), "time by part")
    area, over_run = _over_run(history, list(parts))
    largest = max(parts, key=lambda part: parts[part])
    model = sum(parts.get(part, 0.0) for part in ("forward", "backward", "optimizer", NOT_SPLIT))
    title = (f"{model / wall_s:.0%} of the {duration(wall_s)} went into the model and its optimizer; the largest part is "
             f"{largest} ({parts[largest] / wall_s:.0%})")
    return Figure(
        "step-time", title, (bar, area),
        "The parts add up to the wall time, from the start of the first step to the last event. data wait: waiting for the "
        "examples of a step; copy: copying them to the device; forward, backward, optimizer: "
        + ("time between two events on the device's stream, without the work that the host does meanwhile"
           if history.start.device == "cuda" else "time of the computation on the CPU")
        + ("; communication: the sums over the processes and the wait for them, in the first process"
           if history.start.processes > 1 else "")
        + "; checkpoint: saving, with the final model; other: everything else (logging, freeing memory, waiting). "
          f"Below: the same over the run, in {len(over_run.rows)} groups of steps.",
        (table, over_run), f"A stacked bar and stacked areas of the wall time by part. {title}.")


def _over_run(history: History, parts: list[str]) -> tuple[Plot, Table]:
    groups = timeline.bins(len(history.spent), MOST_BINS)
    first = history.steps[0].step
    sums = [{part: sum(spent.get(part, 0.0) for spent in history.spent[low:high]) for part in parts} for low, high in groups]
    totals = [sum(found.values()) or 1.0 for found in sums]
    edges = tuple(float(first + low) for low, _ in groups) + (float(first + groups[-1][1]),)
    layers = tuple((part, COLOUR_OF[part], tuple(100 * found[part] / total for found, total in zip(sums, totals, strict=True)))
                   for part in parts)
    plot = Plot(Axis("step"), Axis("% of the time", low=0.0, high=100.0), (chart.Stack(edges, layers),), "Over the run",
                height=190, legend=False)
    table = Table(("from step", "to step", *(f"{part} (ms a step)" for part in parts)),
                  tuple((first + low, first + high - 1, *(1e3 * found[part] / (high - low) for part in parts))
                        for (low, high), found in zip(groups, sums, strict=True)), "time by part over the run")
    return plot, table


def shared_steps(history: History) -> Figure | None:
    """Plot communication, waiting and the balance of tokens among the processes of a run; None for one process."""
    shared = timeline.sharing(history.steps)
    steps = [step for step in history.steps if step.communication_share is not None]
    if shared is None:
        return None
    shares = Plot(Axis("step"), Axis("% of the step", low=0.0), (
        Series("communication", tuple((step.step, 100 * (step.communication_share or 0.0)) for step in steps), "blue"),
        Series("waiting", tuple((step.step, 100 * (step.waiting_share or 0.0)) for step in steps), "orange")),
        "Communication and waiting", height=170)
    tokens = Plot(Axis("step"), Axis("times the mean process's tokens", low=0.9), (
        Series("process with the most tokens", tuple((step.step, step.token_imbalance) for step in steps), "green"),),
        "Imbalance", height=170)
    table = Table(("step", "communication (share of the step)", "waiting (share of the step)", "most tokens over the mean"),
                  tuple((step.step, step.communication_share, step.waiting_share, step.token_imbalance) for step in steps))
    return Figure(
        "processes", f"Communication took {shared.communication_share:.0%} of the steps' time, and waiting for the slowest "
        f"process {shared.waiting_share:.0%}; the process with the most tokens had {shared.token_imbalance:.2f} times the mean",
        (shares, tokens),
        f"{history.start.processes} processes shared each step. Communication: the sums of gradients, loss and counts, in the "
        "process that waits least. Waiting: what the processes wait longer than that one, on average.", (table,), beside=True)


def throughput(history: History) -> Figure | Missing:
    """Plot tokens per second of each step, with evaluations, checkpoints and warnings."""
    found = steady_speeds(history)
    if not found:
        return Missing("throughput", "No step has a time.")
    speeds, xs = history.speeds, [step.step for step in history.steps]
    low, middle, high = spread(found)
    over = max(5, round(len(speeds) * ROLLING_SHARE)) | 1
    warm = timeline.warm_ups(history)
    rolling = timeline.rolling_median(speeds, over)
    happened = [(kind.kind, colour, tuple(float(one.after_step) for one in history.of(kind))) for kind, colour in MARKED]
    happened.append(("continued", "green", tuple(float(step) for step in history.sessions[1:])))
    marks: tuple[chart.Mark, ...] = (
        chart.Band("10 to 90% of the steps", low, high, "blue"),
        *(chart.Band("warm-up", xs[places[0]] - 0.5, xs[places[-1]] + 0.5, upright=True) for places in warm),
        Series("each step", tuple(zip(xs, speeds, strict=True)), "blue", "faint"),
        Series(f"median of {over} steps", tuple(zip(xs, rolling, strict=True)), "blue"),
        chart.Level(f"median {count(middle)}", middle),
        *(Moments(kind, at, colour) for kind, colour, at in happened if at))
    plot = Plot(Axis("step"), Axis("real tokens per second", low=0.0), marks)
    warm_count = sum(map(len, warm))
    together = sum(step.real_tokens for step in history.steps) / sum(step.seconds for step in history.steps)
    title = (f"{count(middle)} tokens/s in the median step, {count(together)} over all steps together"
             if len(found) > 1 else f"{count(middle)} tokens/s in the one step that counts")
    table = Table(("step", "ends at (s)", "seconds", "real tokens", "real tokens/s", "warm-up"),
                  tuple((step.step, round(end, 4), step.seconds, step.real_tokens, speed,
                         "yes" if any(place in places for places in warm) else "no")
                        for place, (step, end, speed) in enumerate(zip(history.steps, history.ends_s, speeds, strict=True))),
                  "speed of each step")
    events = Table(("after step", "at (s)", "event", "seconds", "message"),
                   tuple((one.after_step, round(one.at_s, 4), one.event.kind, getattr(one.event, "seconds", None),
                          getattr(one.event, "sentence", "") or getattr(one.event, "message", ""))
                         for one in history.happened if isinstance(one.event, LISTED)),
                   "events between the steps")
    return Figure(
        "throughput", title, (plot,),
        "Real tokens (no padding) per second of each step, without evaluations and checkpoints. "
        + (f"Warm-up ({several(warm_count, 'step')}: from the start of a session until a step reaches 80% of the "
           "median speed) is drawn, but not in the median or the band" if warm_count else "No step was left out as warm-up")
        + ". Vertical marks: an event after that step, such as an evaluation.", (table, events),
        f"Tokens per second over the steps. {title}.")


def tokens(history: History) -> Figure | Missing:
    """Plot the computed tokens: trained, read without being trained, padding."""
    steps = history.steps
    if not steps:
        return Missing("padding", "No step was done.")
    trained, real = sum(step.tokens for step in steps), sum(step.real_tokens for step in steps)
    if steps[0].padding_tokens is None:
        return Missing("padding", "The run was written before steps recorded their padding.")
    padding = sum(step.padding_tokens or 0 for step in steps)
    computed = real + padding
    shares = {"trained": trained, "read, not trained": real - trained, "padding": padding}
    bar = stacked(shares, computed / 100, {"trained": "green", "read, not trained": "sky", "padding": "grey"}, "padding")
    seconds = sum(step.seconds for step in steps)
    title = (f"{padding / computed:.1%} of the computed tokens were padding" if padding else "No token was padding") + (
        f"; {trained / computed:.0%} were trained" if trained != computed else ", and every token was trained")
    table = Table(("tokens", "number", "% of the computed tokens", "per second of training"),
                  tuple((name, number, 100 * number / computed, number / seconds if seconds else None)
                        for name, number in shares.items()), "tokens of all steps")
    return Figure("tokens", title, (Rows(Axis("% of the computed tokens", low=0.0, high=100.0),
                                         (Row("all steps", bar),)),),
                  "Counted in each step. Trained: tokens that count in the loss. Read, not trained: prompts and templates. "
                  "Padding: empty slots that make documents equally long. Tokens per second count trained and read tokens.",
                  (table,))


def prediction(history: History, estimate: Mapping[str, Any] | None) -> Figure | Missing:
    """Plot the speed that the plan expected beside the measured speed."""
    found = steady_speeds(history)
    if not estimate or not found:
        return Missing("expected against measured speed", "The plan expected no speed, because a fact it needs was unknown."
                       if not estimate else "No step has a time.")
    slow, fast = (estimate["tokens_per_step"] / seconds for seconds in reversed(estimate["step_s"]))
    ceiling = estimate["tokens_per_step"] / estimate["floor_s"]
    low, middle, high = spread(found)
    verdict = "inside" if slow <= middle <= fast else "faster than expected" if middle > fast else "slower than expected"
    row = Row("tokens per second", (Segment(slow, fast, "grey", "expected", thin=True),),
              (Point(middle, "blue", low, high, "measured, median and 10 to 90%"),
               Point(ceiling, "red", label=f"ceiling: {estimate['bound_by']} at the measured peak", shape="bar")), verdict,
              "good" if verdict == "inside" else "open")
    table = Table(("", "low", "median", "high"), (("expected (tokens/s)", slow, None, fast),
                                                  ("measured (tokens/s)", low, middle, high),
                                                  ("ceiling (tokens/s)", None, ceiling, None)))
    title = (f"The measured {count(middle)} tokens/s lie inside the plan's {count(slow)} to {count(fast)}"
             if verdict == "inside" else
             f"At {count(middle)} tokens/s the run was {verdict}: the plan said {count(slow)} to {count(fast)}")
    return Figure("prediction", title, (Rows(Axis("real tokens per second", log=True), (row,)),),
                  f"Expected before the first step, by {estimate.get('basis', 'an unknown basis')}. The ceiling is the speed "
                  f"at which {estimate['bound_by']} reaches the peak measured on this machine.", (table,))


# ------------------------------------------------------------------------------------------------ the machine


def roofline(history: History, estimate: Mapping[str, Any] | None, hardware: Mapping[str, Any]) -> Figure | Missing:
    """Plot achieved FLOP/s against arithmetic intensity, under the limits that were measured on this machine."""
    processes = hardware.get("processes", 1)             # the figures of the hardware are those of one of them
    peaks, datasheet = ({dtype: processes * peak for dtype, peak in (hardware.get(f"{source}_flops_per_s") or {}).items()}
                        for source in ("peak", "datasheet"))
    bandwidth = processes * (hardware.get("bandwidth_bytes_per_s") or 0.0)
    if not peaks or not bandwidth:
        return Missing("roofline", "This machine's peaks were not measured (`powertrain facts --measure`).")
    if not estimate or not (speeds := steady_speeds(history)):
        return Missing("roofline", "The FLOPs of a step are not known for this run.")
    slow, reached, fast = (speed * estimate["flops_per_token"] for speed in spread(speeds))
    peak, ridge = estimate["peak_flops_per_s"], estimate["peak_flops_per_s"] / bandwidth
    intensity, known = _intensity(estimate, bandwidth)
    low, high = min(ridge, intensity) / 30, max(max(peaks.values()) / bandwidth, intensity) * 30
    marks: list[Any] = []
    for dtype, limit in sorted(peaks.items(), key=lambda found: found[1]):
        roof = ((low, low * bandwidth), (limit / bandwidth, limit), (high, limit))
        marks.append(Series(f"{dtype}, measured {flops(limit)}", roof, PEAK_COLOURS.get(dtype, "grey")))
    marks += [Series(f"{dtype}, datasheet {flops(limit)}", ((limit / bandwidth, limit), (high, limit)),
                     PEAK_COLOURS.get(dtype, "grey"), "dashed") for dtype, limit in datasheet.items()]
    share = reached / peak
    marks.append(Series(f"this run, {flops(reached)}", ((intensity, reached),), "red", "circle" if known else "ring",
                        note=f"{share:.0%} of the {estimate['dtype']} peak"))
    title = (f"The run reached {flops(reached)}: {share:.0%} of the {estimate['dtype']} peak measured on this machine")
    rows: tuple[tuple[Cell, ...], ...] = (
        *((f"{dtype} GEMM peak, measured", limit, limit / bandwidth) for dtype, limit in peaks.items()),
        *((f"{dtype}, datasheet (dense)", limit, limit / bandwidth) for dtype, limit in datasheet.items()),
        ("this run, median step", reached, intensity), ("this run, 10% of the steps are below", slow, intensity),
        ("this run, 10% of the steps are above", fast, intensity))
    return Figure(
        "roofline", title, (Plot(Axis("arithmetic intensity, FLOP per byte moved", log=True),
                                 Axis("FLOP per second", log=True), tuple(marks)),),
        f"Lines: the measured limits of this machine, for matrix products and for a copy ({bandwidth / 1e9:.3g} GB/s, "
        "the slope). Dashed lines: the vendor's datasheet. The run's speed is the FLOPs that the mathematics needs (causal "
        "attention counted exactly, recomputation not counted) per second of its steps. "
        + ("The bytes are the operands and results of the matrix products and the optimizer's state, each moved once."
           if known else "Ring: the bytes were not recorded. The plan expected compute to be the limit, so the true point lies "
                         "here or further right; only its height is measured."),
        (Table(("", "FLOP/s", "FLOP per byte (of a limit: its ridge)"), rows),))


def _intensity(estimate: Mapping[str, Any], bandwidth: float) -> tuple[float, bool]:
    """Return the FLOP per byte of a step, and whether the value is exact or only a lower bound."""
    if estimate.get("bytes_per_step"):
        return estimate["flops_per_step"] / estimate["bytes_per_step"], True
    if estimate["bound_by"] != "compute":    # then the floor is the time that its bytes take
        return estimate["flops_per_step"] / (estimate["floor_s"] * bandwidth), True
    return estimate["peak_flops_per_s"] / bandwidth, False


def memory_by_component(history: History, estimate: Mapping[str, Any] | None, device: str) -> Figure | Missing:
    """Plot predicted memory by component, allocated memory, and the memory of the process."""
    event = history.last(Memory) or Memory()
    predicted = dict(event.predicted or (estimate or {}).get("memory_bytes") or {})
    allocated = event.allocated_bytes
    resident = history.ends.peak_memory_bytes if history.ends else None
    if not predicted and not allocated and not resident:
        return Missing("memory", "Neither a prediction nor a measurement was recorded.")
    process = {"cuda": "allocated by torch, at the run's end", "mps": "handed out by Metal, at the run's end"}.get(
        device, "resident memory of the whole process")
    rows = [Row("predicted", stacked(predicted, GIB, COMPONENT_COLOURS), says=memory(sum(predicted.values())))
            ] if predicted else []
    rows += [Row("measured, allocated", (Segment(0.0, allocated / GIB, "grey", "allocated"),), says=memory(allocated))
             ] if allocated else []
    rows += [Row("process peak", (), (Point(resident / GIB, "red", label=process, shape="bar"),), memory(resident))
             ] if resident else []
    return Figure(
        "memory", _memory_title(sum(predicted.values()), allocated, resident),
        (Rows(Axis("GiB", low=0.0), tuple(rows)),),
        "Predicted: the memory that is allocated at the peak of a step, by formula"
        + (f", for step {event.step:,}, whose memory was measured. "
           f"The fullest possible passes take {memory(event.fullest_bytes)}. "
           if event.fullest_bytes else ", before the run. ")
        + ("Allocated: the most that torch held during that step. " if allocated else
           "The allocated memory was not measured in this run. ")
        + (f"Process peak: {process}." if resident else ""), (_memory_table(predicted, event, resident, process),))


def _memory_title(predicted: float, allocated: float | None, resident: float | None) -> str:
    if predicted and allocated:
        error = predicted / allocated - 1
        off = "the same" if abs(error) < 0.0005 else f"{abs(error):.1%} too {'high' if error > 0 else 'low'}"
        return f"{memory(allocated)} were allocated at the peak; the prediction of {memory(predicted)} is {off}"
    if predicted:
        held = f"; the process held {memory(resident)} with its libraries" if resident else ""
        return f"{memory(predicted)} were predicted to be allocated at the peak{held}"
    return f"The most memory in use was {memory(allocated or resident or 0)}"


def _memory_table(predicted: Mapping[str, float], event: Memory, resident: float | None, process: str) -> Table:
    rows = {f"predicted: {name.replace('_', ' ')}": size for name, size in predicted.items()}
    rows |= {"predicted: all": sum(predicted.values())} if predicted else {}
    measured = {"allocated": event.allocated_bytes, "reserved": event.reserved_bytes, process: resident}
    rows |= {f"measured: {name}": size for name, size in measured.items() if size}
    return Table(("", "bytes", "MiB"), tuple((name, size, size / 2**20) for name, size in rows.items()))
