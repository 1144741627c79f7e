"""A run in a terminal: the live line and its events, then the result: speed against the plan, quality, what to do next."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from powertrain.records import events as kinds
from powertrain.records import several, timeline
from powertrain.records.events import Adapters, End, Evaluated, Event, Memory, Sample, Start, Step
from powertrain.records.timeline import last_of
from powertrain.report.plan import Row
from powertrain.report.words import ACCURACY, answers_said, count, digits, duration, flops, labelled, memory, perplexity

BUSY = 0.75                  # load of the machine, of the minute before, from which something else was at work
FULLER = 1.1                 # times the memory of the watched step: the fullest step's is named beside it
BETWEEN = ("evaluation", "samples", "checkpoint", timeline.OTHER)        # parts that lie between the steps
RECENT_STEPS = 50            # the speed shown is that of the last steps, so that a slow start does not linger


@dataclass
class Live:
    """Takes events and gives the live line. `memory_bytes` returns the memory that the process uses now."""

    memory_bytes: Callable[[], int]
    start: Start = field(default_factory=Start)
    saved_step: int | None = None
    steps: list[Step] = field(default_factory=list)

    def take(self, event: Event) -> None:
        if isinstance(event, Start):
            self.start = event
        elif isinstance(event, Step):
            self.steps = [*self.steps[-RECENT_STEPS + 1:], event]
        elif isinstance(event, kinds.Saved):
            self.saved_step = event.step

    @property
    def recent_loss(self) -> float:
        return sum(step.loss for step in self.steps[-10:]) / len(self.steps[-10:])

    @property
    def recent_metrics(self) -> Mapping[str, float]:
        """Return the means of the objective's metrics over the last steps."""
        recent = self.steps[-10:]
        return {name: sum(step.metrics.get(name, 0.0) for step in recent) / len(recent) for name in recent[-1].metrics} \
            if recent else {}

    @property
    def tokens_per_s(self) -> float:
        return sum(step.real_tokens for step in self.steps) / (sum(step.seconds for step in self.steps) or 1e-9)

    @property
    def left_s(self) -> float:
        return (self.start.total_steps - self.steps[-1].step) * sum(step.seconds for step in self.steps) / len(self.steps)

    @property
    def peak_share(self) -> float | None:
        """Return the share of the machine's peak that the last steps reach; None without an estimate."""
        found = self.start.estimate
        return self.tokens_per_s * found["flops_per_token"] / found["peak_flops_per_s"] if found else None

    def line(self) -> str:
        if not self.steps:
            return "first step ..."
        metrics = self.recent_metrics
        accuracy = [f"accuracy {metrics[ACCURACY]:.0%}"] if ACCURACY in metrics else []
        parts = [f"step {self.steps[-1].step:,}/{self.start.total_steps:,}", f"loss {self.recent_loss:.3f}", *accuracy,
                 f"{count(self.tokens_per_s)} tokens/s"]
        if self.peak_share is not None:
            parts.append(f"{self.peak_share:.0%} of the peak")
        if shared := timeline.sharing(self.steps):
            parts.append(f"{shared.communication_share:.0%} communication, imbalance {shared.token_imbalance:.2f}")
        parts += [memory(self.memory_bytes()), f"{duration(self.left_s)} left",
                  "not saved yet" if self.saved_step is None else f"saved at {self.saved_step:,}"]
        return " | ".join(parts)


def said(event: Event) -> str | None:
    """Return what a person is told of an event beside the live line; None for the kinds that only the line shows."""
    if isinstance(event, kinds.RunWarning):
        return f"warning: {event.sentence}"
    if isinstance(event, kinds.Building | kinds.Compiling):
        return None                          # for programs: people see the plan here, and nothing is to be done
    if isinstance(event, kinds.Phase):
        return f"... {event.sentence}"
    if isinstance(event, kinds.Note):
        return f"({event.sentence})"
    if isinstance(event, kinds.Folder):
        return f"Files     {event.path}/; Ctrl-C stops and saves; {kinds.continuing(event.path, event.processes)} continues"
    if isinstance(event, kinds.Resume):
        return f"going on after step {event.step:,}"
    if isinstance(event, Evaluated):
        bits = f", {event.bits_per_byte:.3f} bits per byte" if event.bits_per_byte is not None else ""
        if found := answers_said(event.metrics):
            return f"step {event.step:,}: held-out loss {event.loss:.4f} ({event.tokens:,} answers or pairs, {found})"
        return f"step {event.step:,}: held-out loss {event.loss:.4f}{bits} ({event.tokens:,} tokens)"
    if isinstance(event, kinds.MirrorReady):
        return f"mirror {event.address}: can be written, read and cleared ({duration(event.seconds)})"
    if isinstance(event, kinds.TrackerReady):
        return f"{event.tracker}: {event.place}"
    if isinstance(event, kinds.UploadSkipped):
        return f"{event.name} was not uploaded: {event.newer} was there before its turn came"
    if isinstance(event, kinds.MirrorWaited):
        return (f"waiting for the upload of {', '.join(event.waiting)} to {event.address}; Ctrl-C ends the wait and loses "
                "nothing")
    if isinstance(event, Sample):
        return "\n".join(f"    {line}" for line in printable(event.text).splitlines())
    return None


def printable(text: str) -> str:
    """Return model output without the control characters that could steer a terminal."""
    return "".join(c if c == "\n" or c == "\t" or c.isprintable() else "?" for c in text)


# ------------------------------------------------------------------------------------------------ the result


def result_rows(events: Sequence[Event], folder: str, gzip_bits_per_byte: float | None) -> list[Row]:
    """Return (title, text) rows from a run's events. The speed is that of the steps, without evaluation and saving."""
    end = last_of(End, events)
    if end is None:
        return []
    missing = "".join(f", but {why}" for why in (end.not_saved, end.not_mirrored) if why)
    return [("Result", f"{end.state} at step {end.step:,}{missing}"), *progress_rows(events, gzip_bits_per_byte),
            *_next_rows(end.reason, folder, last_of(Start, events) or Start())]


def progress_rows(events: Sequence[Event], gzip_bits_per_byte: float | None = None) -> list[Row]:
    """Return the rows of a result that a run has before its end, too."""
    start, end = last_of(Start, events) or Start(), last_of(End, events)
    steps = [event for event in events if isinstance(event, Step)]
    answers = answers_said(Live(lambda: 0, start, steps=steps).recent_metrics)
    evaluation, adapters = last_of(Evaluated, events), last_of(Adapters, events)
    early, best = last_of(kinds.StoppedEarly, events), last_of(kinds.BestModel, events)
    clipped = f"{end.clipped_steps:,} of {end.step:,} steps had a gradient norm above max_grad_norm" \
        if end and end.clipped_steps else ""
    texts = {"Speed": _speed(steps, start) if steps else "", "Processes": _sharing(steps, start),
             "Answers": f"last steps: {answers}" if answers else "",
             "Held-out": quality(evaluation, gzip_bits_per_byte) if evaluation else "",
             "Early end": early.sentence if early else "", "Best": best.sentence if best else "",
             "Adapters": _adapters(adapters.modules) if adapters else "", "Clipped": clipped,
             "Checkpoints": _saving([event for event in events if isinstance(event, kinds.Saved)], steps),
             "Mirror": _mirror([event for event in events if isinstance(event, kinds.Uploaded)]),
             "Memory": _memory(last_of(Memory, events), end.peak_memory_bytes if end else None)}
    return [(title, text) for title, text in texts.items() if text]


def sample_rows(events: Sequence[Event]) -> list[Row]:
    """Return the last text that the model wrote."""
    sample = last_of(Sample, events)
    return labelled("Sample", printable(sample.text).splitlines() if sample else [])


def quality(evaluation: Evaluated, gzip_bits_per_byte: float | None) -> str:
    """Return the loss on held-out text, as perplexity and bits per byte too, beside gzip's bits per byte."""
    if found := answers_said(evaluation.metrics):
        return f"loss {evaluation.loss:.4f} on {count(evaluation.tokens)} pairs or answers, {found}"
    text = (f"loss {evaluation.loss:.4f} nats a token (perplexity {digits(perplexity(evaluation.loss))}) on "
            f"{count(evaluation.tokens)} tokens")
    if evaluation.bits_per_byte is not None:
        text += f"; {evaluation.bits_per_byte:.3f} bits per byte"
        if gzip_bits_per_byte is not None:
            text += f", where gzip -9 needs {gzip_bits_per_byte:.3f} for the same text"
    return text


def _adapters(modules: Mapping[str, Mapping[str, float]]) -> str:
    """Return the mean of each figure over the adapted modules, and the module where the figure is largest."""
    names = next(iter(modules.values()))
    parts = []
    for name in names:
        most = max(modules, key=lambda module: modules[module][name])
        mean = sum(told[name] for told in modules.values()) / len(modules)
        parts.append(f"{name.replace('_', ' ')} {mean:.3g} on average, at most {modules[most][name]:.3g} ({most})")
    return "; ".join(parts)


def _speed(steps: Sequence[Step], start: Start) -> str:
    estimate, load = start.estimate, start.load or 0.0
    seconds, tokens = sum(step.seconds for step in steps), sum(step.real_tokens for step in steps)
    trained = sum(step.tokens for step in steps)
    learned = "" if trained == tokens else f" ({count(trained)} of them trained on)"
    text = f"{count(tokens)} tokens{learned} in {duration(seconds)} of training: {count(tokens / seconds)} tokens/s"
    if estimate:
        share = tokens / seconds * estimate["flops_per_token"] / estimate["peak_flops_per_s"]
        low_s, high_s = estimate["step_s"]
        basis = estimate.get("step_basis")
        text += (f", {share:.0%} of the measured {flops(estimate['peak_flops_per_s'])} in {estimate['dtype']}; the plan "
                 f"expected {count(estimate['tokens_per_step'] / high_s)} to {count(estimate['tokens_per_step'] / low_s)}"
                 + (f" ({basis})" if basis else ""))
        if load > BUSY and tokens / seconds < estimate["tokens_per_step"] / high_s:
            text += f"; the machine was not idle: its load was {load:.2g} when the run began"
    return text


def _sharing(steps: Sequence[Step], start: Start) -> str:
    shared = timeline.sharing(steps)
    return "" if shared is None else (
        f"{start.processes}: communication took {shared.communication_share:.0%} of the steps' time, waiting for the slowest "
        f"process {shared.waiting_share:.0%}; the one with the most tokens had {shared.token_imbalance:.2f} times the mean")


def _saving(saved: Sequence[kinds.Saved], steps: Sequence[Step]) -> str:
    steps_s = sum(step.seconds for step in steps)
    if not saved or not steps_s:
        return ""
    waited_s, most_s = sum(event.seconds for event in saved), max(event.seconds for event in saved)
    return (f"{len(saved)} saved, the last one of {memory(saved[-1].bytes)}; the training waited {duration(waited_s)} for them "
            f"({waited_s / steps_s:.1%} of its time), at most {duration(most_s)} for one")


def _mirror(uploaded: Sequence[kinds.Uploaded]) -> str:
    if not uploaded:
        return ""
    sent, stored = sum(event.bytes for event in uploaded), sum(event.stored_bytes for event in uploaded)
    packed_s = sum(event.packing_s for event in uploaded)
    packed = f", as {memory(stored)} by compression, which took {duration(packed_s)}" if stored < sent else ""
    return (f"{several(len(uploaded), 'upload')}, each verified: {memory(sent)}{packed}, in "
            f"{duration(sum(event.seconds for event in uploaded))} beside the training")


def _memory(measured: Memory | None, peak_bytes: int | None) -> str:
    process = f"the process: {memory(peak_bytes)} at the peak" if peak_bytes else ""
    if measured is None:
        return process
    allocated, predicted = measured.allocated_bytes, sum(measured.predicted.values())
    text = f"{memory(allocated)} of tensors at the peak of step {measured.step:,}; the plan expected {memory(predicted)}"
    text += f" ({predicted / allocated - 1:+.1%})" if allocated else ""
    if measured.fullest_bytes > FULLER * predicted:
        text += f", and {memory(measured.fullest_bytes)} for the fullest possible passes"
    if measured.reserved_bytes:
        text += f"; {memory(measured.reserved_bytes)} reserved"
    return f"{text}; {process}" if process else text


def _next_rows(reason: str, folder: str, start: Start) -> list[Row]:
    if reason != "finished":
        return [("Continue", start.command(folder))]
    has_adapter, task = start.method in ("lora", "qlora"), start.task
    what, opens = ("Adapter", start.opens_in) if has_adapter else ("Model", "transformers")
    use = {"causal": f"powertrain generate {folder} --prompt TEXT" if start.method == "scratch"
           else f"powertrain chat {folder}", "seq2seq": f"powertrain generate {folder} --prompt TEXT"}
    commands = [use[task]] if task in use else []
    commands += [f"powertrain evaluate {folder}", f"powertrain runs show {folder}", f"powertrain report {folder}"]
    commands += [f"powertrain export {folder} --to merged --output FOLDER"] if has_adapter and opens else []
    return [(what, f"{folder}/model opens in powertrain" + (f" and {opens}" if opens else "")), *labelled("Next", commands)]


def step_time_row(events: Sequence[Event]) -> tuple[str, str]:
    """Return the row with each part's share of the steps' time."""
    parts = {name: seconds for name, seconds in timeline.read(events).parts.items() if name not in BETWEEN}
    total_s = sum(parts.values())
    if not total_s:
        return "Step time", "no step was recorded"
    if timeline.NOT_SPLIT in parts:
        return "Step time", "not recorded by the older version that made this run"
    return "Step time", ", ".join(f"{name} {seconds / total_s:.1%}" for name, seconds in parts.items())
