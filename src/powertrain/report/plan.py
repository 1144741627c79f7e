"""What will be done and why, before the first step: machine, data, model, recipe, plan, expectations.

`overview_rows` is the beginning of `powertrain train`, in a few short lines; `powertrain plan` shows all of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from powertrain.records import REACHED, DataFacts, Effect, Estimate, Facts, Hardware, ModelFacts, OnMachine, Plan
from powertrain.report.words import count, counted, digits, duration, flops, interval, labelled, memory, with_settings

Row = tuple[str, str]
SHOWN_PADDING = 0.005        # share of the slots: less is not worth a word
MOST_ROWS = 16               # of the overview: with progress before and the folder behind, `train` begins with at most 20 lines
SPENT_ON = {"compute": "matrix products", "memory bandwidth": "reading and writing memory"}
LONGEST = 100                # characters of a remark or a reason in the overview


def machine_row(hardware: Hardware) -> Row:
    peaks = ", ".join(f"{dtype} {flops(peak)}" for dtype, peak in sorted(hardware.peak_flops_per_s.items()))
    bandwidth = f", {digits(hardware.bandwidth_bytes_per_s / 1e9)} GB/s" if hardware.bandwidth_bytes_per_s else ""
    by = "measured" if hardware.basis == "measured" else f"{hardware.basis}, not measured:"
    measured = f"; {by} {peaks}{bandwidth}" if peaks else "; speed not measured"
    return "Machine", f"{_machine(hardware)}{measured}"


def _machine(hardware: Hardware) -> str:
    nodes = f"{hardware.nodes} nodes of " if hardware.nodes > 1 else ""
    devices = f"{hardware.devices} x " if hardware.devices > 1 else ""
    name = f"{nodes}{devices}{hardware.name} ({hardware.device})"
    if not hardware.cores:                   # a machine that is not here
        return f"{name}, {memory(hardware.memory_bytes)}{' each' if hardware.processes > 1 else ''}"
    return (f"{name}, {counted(hardware.cores, 'core')}, {memory(hardware.free_memory_bytes)} of "
            f"{memory(hardware.memory_bytes)} free")


def data_row(data: DataFacts) -> Row:
    if data.kind != "blocks":
        return _examples_row(data)
    again = f", each token {data.redundancy:.3g} times an epoch" if data.stride != data.block else ""
    return "Data", (f"{data.source}: {counted(data.documents, 'document')}, {count(data.characters)} characters; "
                    f"{count(data.train_tokens)} tokens to train on and {count(data.validation_tokens)} held out "
                    f"({data.tokenizer}, vocabulary {data.vocabulary:,}); "
                    f"{counted(data.examples, 'block')} of {data.block}{again}")


def _examples_row(data: DataFacts) -> Row:
    truncated = f"; {count(data.cut_examples)} cut at the length limit" if data.cut_examples else ""
    return "Data", (f"{data.source}: {counted(data.documents, 'row')}; {counted(data.examples, data.kind)} to train on, "
                    f"{count(data.train_tokens / data.examples)} tokens on average and {count(data.max_length)} at most, "
                    f"{data.trained_share:.0%} of them trained on{truncated}; {count(data.validation_tokens)} tokens held out "
                    f"(vocabulary {data.vocabulary:,})")


def model_row(model: ModelFacts, because: str = "") -> Row:
    """Return the model's shape and training. `because`: why this provider computes the model."""
    shape = f"{model.family}, {counted(model.layers, 'layer')} x {model.width}"
    if model.provider == "native":
        grouped = f" ({model.kv_heads} for keys and values)" if model.kv_heads != model.heads else ""
        shape += f", {counted(model.heads, 'head')}{grouped}, MLP {model.mlp_width}, context {model.context}"
    return "Model", f"{shape}: {count(model.parameters)} parameters{_training(model, because)}"


def _training(model: ModelFacts, because: str) -> str:
    """Return a pretrained model's source, provider with its reason, trained weights, and dtype of the frozen weights."""
    if not model.path:
        return ""
    text = f"; from {model.path}, {because or f'computed by {model.provider}'}; {model.method}: "
    if model.trainable == model.parameters:
        return f"{text}all of them trained"
    share = model.trainable / model.parameters
    return f"{text}{count(model.trainable)} trained ({share:.2%}), the others frozen in {model.frozen_dtype}"


def run_row(recipe: Mapping[str, Any], data: DataFacts, steps: int) -> Row:
    epochs = steps * data.train_batch_size / data.examples
    much = f"{epochs:.3g}" if epochs < 999.5 else count(epochs)
    kind = "block" if data.kind == "blocks" else data.kind
    about = "" if data.kind == "blocks" else "about "
    times = data.train_batch_size / data.examples
    again = f", which repeats the {count(data.examples)} examples {digits(times)} times in each step" if times > 1 else ""
    return "Run", (f"{steps:,} step{'s' * (steps != 1)} of {counted(data.train_batch_size, kind)} "
                   f"({about}{count(data.train_batch_size * data.block)} tokens){again}, {much} epoch{'s' * (much != '1')}; "
                   f"{_minimised(recipe)}, {recipe['lr_scheduler_type']} from {recipe['learning_rate']:g}")


def _minimised(recipe: Mapping[str, Any]) -> str:
    """Return the optimizer, and the objective's settings that are on."""
    name = recipe.get("optimizer", {}).get("name", "adamw")      # older runs have neither key
    settings = {key: value for key, value in recipe.get("objective", {}).items() if value and key != "name"}
    on = "".join(f" with {key.replace('_', ' ')} {value}" for key, value in settings.items())
    return ("AdamW" if name == "adamw" else str(name)) + on


def plan_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Return (on or off, technique with its settings, what it does and the reason) for every technique of the catalogue."""
    return [*(("on", with_settings(step.technique.name, vars(step.technique)),
               f"{step.technique.does}; {step.because} [{claim(step.claim)}]") for step in plan.steps),
            *(("off", refusal.technique, "; ".join(filter(None, (refusal.does, refusal.because)))) for refusal in plan.refused)]


def claim(effect: Effect) -> str:
    """Return 'step time x 0.5 to 0.8, saves 1.2 GiB; formula: ...'."""
    low, high = (f"{ratio:.2g}" for ratio in effect.step_time)
    text = f"step time x {low} to {high}" if low != high else f"step time x {low}"
    if effect.peak_memory_bytes:
        verb = "saves" if effect.peak_memory_bytes < 0 else "takes"
        text += f", {verb} {memory(abs(effect.peak_memory_bytes))}"
    return f"{text}; {effect.basis}"


def stored_claim(effect: Mapping[str, Any]) -> str:
    """Return the same of an effect as plan.json holds it."""
    return claim(Effect(**{**effect, "step_time": tuple(effect["step_time"])}))


def memory_row(needed_bytes: int, hardware: Hardware) -> Row:
    """Return the memory of a run whose time is not known."""
    return "Memory", f"{memory(needed_bytes)} at the peak, of {memory(hardware.free_memory_bytes)} free; formulas"


def expected_rows(estimate: Estimate | None, hardware: Hardware, model: ModelFacts | None = None) -> list[Row]:
    if estimate is None and hardware.peak_flops_per_s and model is not None and model.provider != "native":
        return [("Expected", f"unknown: powertrain cannot count the work of {model.family} in {model.provider}; the run shows "
                             "its own speed")]
    if estimate is None and hardware.basis != "measured":
        return [("Expected", f"unknown: its maker does not publish its {_unpublished(hardware)}; measure that machine with "
                             "`powertrain facts --output facts.json`, then use --machine facts.json")]
    if estimate is None:
        return [("Expected", "unknown: the speed of this machine is not measured (`powertrain facts --measure`)")]
    low_s, high_s = estimate.step_s
    slow, fast = estimate.tokens_per_s
    share, limit = estimate.flops_per_step / estimate.peak_flops_per_s, f"{estimate.peak_basis} {estimate.dtype} limit"
    parts = ", ".join(f"{name.replace('_', ' ')} {memory(size)}" for name, size in estimate.memory_bytes.items() if size)
    padded = f"; {estimate.padding_share:.1%} of what is computed is padding" if estimate.padding_share >= SHOWN_PADDING else ""
    fits = "" if estimate.total_memory_bytes <= hardware.free_memory_bytes else \
        f"; MORE than the {memory(hardware.free_memory_bytes)} free"
    copied = f"; while a checkpoint is written, a copy of {memory(estimate.copied_bytes)} of the host's memory, if it is free" \
        if estimate.copied_bytes else ""
    total = interval(duration(low_s * estimate.steps), duration(high_s * estimate.steps))
    return [
        ("Expected", f"{total} for {counted(estimate.steps, 'step')}, {count(slow)} to {count(fast)} tokens/s: "
                     f"{_shares(share / high_s, share / low_s)} of the {limit}{padded}"),
        ("Floor", f"a step takes at least {duration(estimate.floor_s)}, limited by {estimate.bound_by}: "
                  f"{estimate.flops_per_token / 1e6:,.1f} MFLOP a token at {flops(estimate.peak_flops_per_s)}"),
        ("Memory", f"{memory(estimate.total_memory_bytes)} at the peak: {parts}{fits}{copied}"),
        *_largest_pass_rows(estimate, hardware),
        *_shared_rows(estimate, hardware),
        ("Known from", estimate.basis)]


def _shares(low: float, high: float) -> str:
    """Return two shares as '5% to 9%', or once where they read the same."""
    texts = (f"{share:.0%}" if share >= 0.005 else "less than 1%" for share in (low, high))
    return " to ".join(dict.fromkeys(texts))


def _shared_rows(estimate: Estimate, hardware: Hardware) -> list[Row]:
    """Return what several processes gain and what they exchange; no row for one process."""
    if not estimate.exchanges:
        return []
    where = f" on {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    if estimate.efficiency is None:
        gain = "faster or slower than one does: the time of exchanges is not known"
    else:
        factors, spent = [hardware.speed_up(share) for share in estimate.efficiency], estimate.held_back_by
        one, use = ("one with all cores of a machine", "process") if hardware.device == "cpu" else ("one", "device")
        no_gain = "" if max(factors) > 1 else f", so they do not pay: use one {use}"
        gain = (f"{interval(*(f'{factor:.3g}' for factor in factors))} times as fast as {one} does{no_gain}; "
                f"{_shares(*estimate.efficiency)} of the ideal; most of its time goes into "
                f"{SPENT_ON.get(spent, spent)}")
    return [("Efficiency", f"{hardware.processes:,} processes{where} make a step {gain}"),
            ("Exchanged", f"{estimate.exchanges} in a step, by formulas")]


def checked_row(differences: Sequence[str], why_not: str | None, processes: int) -> Row:
    """Return what came of counting the exchanges while torch makes them."""
    if why_not is not None:
        return "Checked", f"not: torch's fake back end could not make the exchanges of this plan, because {why_not}"
    if differences:
        return "Checked", f"torch makes other exchanges in a group of {processes:,} processes ({'; '.join(differences)}); " \
                          "please report this"
    return "Checked", f"torch's fake back end makes just these exchanges in a group of {processes:,} processes"


def _largest_pass_rows(estimate: Estimate, hardware: Hardware) -> list[Row]:
    largest, free = estimate.largest_pass, memory(hardware.free_memory_bytes)
    if not largest:
        return []
    if not largest["examples"]:
        return [("Largest pass", f"one example does not fit in the {free} free")]
    return [("Largest pass", f"{counted(largest['examples'], 'example')}, {largest['tokens']:,} tokens: needs "
                             f"{memory(largest['bytes'])} of the {free} free")]


def fitting_rows(needed_bytes: int, room_bytes: int, savings: Sequence[tuple[str, int, bool]]) -> list[Row]:
    """Return what does not fit, and the changes that help: (recipe words, bytes that they save, whether that is enough)."""
    if needed_bytes <= room_bytes:
        return []
    rows = [("Too large", f"a step needs {memory(needed_bytes)}, and {memory(room_bytes)} are free; `powertrain train` refuses "
                          "this run (memory_check=off trains anyway)")]
    return rows + [("Would help", f"{words}: saves {memory(size)}{', which is enough' if enough else ''}")
                   for words, size, enough in savings]


# ------------------------------------------------------------------------------------------------ machines that are not here


WITHOUT, TIGHT = "without exchanges", "tight"
MACHINE_COLUMNS = ("Machine", "Fits", "Memory of a device", "Time", "Tokens/s", "Cost")
FROM_PUBLISHED = ("published figures; nothing was measured there, and the software counts as what is installed here. Times are "
                  f"guesses: {REACHED}, less with small products. `powertrain plan --machine "
                  "KIND` shows one machine's plan")
FROM_TIGHT = (f'"{TIGHT}": the tensors of a step take more of the memory than a plan counts on. Gaps between tensors, and CUDA '
              "itself, take memory too, so the run may not fit")
FROM_UNLINKED = (f'"{WITHOUT}": the links between these devices are not published, so time and cost leave out what the devices '
                 "exchange in each step. The run takes longer there, and these machines stand after the others")


def known_from(found: Sequence[OnMachine]) -> list[str]:
    """Return what the figures of the table rest on."""
    unlinked = any(one.estimate is not None and one.estimate.leaves_out_exchanges for one in found)
    return [FROM_PUBLISHED, *[FROM_TIGHT] * any(one.is_tight for one in found), *[FROM_UNLINKED] * unlinked]


def _unpublished(hardware: Hardware) -> str:
    """Return what a maker does not publish of a machine whose time is not known."""
    if not hardware.peak_flops_per_s:
        return "rates"
    return "memory bandwidth" if hardware.bandwidth_bytes_per_s is None else "rate for this dtype"


def on_machine_row(one: OnMachine) -> tuple[str, ...]:
    """Return the cells of MACHINE_COLUMNS."""
    if one.needed_bytes is None:
        return one.kind, f"no: {one.why_not}", "", "", "", ""
    fits = "no" if one.words is None else f"with {one.words}" if one.words else "yes"
    fits += f", {TIGHT}" if one.is_tight else ""
    held = f"{memory(one.needed_bytes)} of {memory(one.hardware.memory_bytes)}"
    if one.estimate is None:
        return one.kind, fits, held, "" if one.words is None else f"{_unpublished(one.hardware)} not published", "", ""
    steps, without = one.estimate.steps, f", {WITHOUT}" if one.estimate.leaves_out_exchanges else ""
    return (one.kind, fits, held, interval(*(duration(step_s * steps) for step_s in one.estimate.step_s)) + without,
            interval(*map(count, one.estimate.tokens_per_s)), interval(*map(digits, one.cost)) if one.cost else "")


# ------------------------------------------------------------------------------------------------ an overview


def overview_rows(recipe: Mapping[str, Any], facts: Facts, plan: Plan, total_steps: int, *, asked: str,
                  remarks: Sequence[str] = ()) -> list[Row]:
    """Return the rows: machine, data, model, run, techniques that are on with their reason, time and memory.

    `asked`: the recipe's name with the user's changes. `remarks`: translated keys, corrections, what was recognised.
    """
    rows = [("Machine", _machine(facts.hardware)), ("Data", _short_data(facts.data)),
            ("Model", _short_model(facts.model)), run_row(recipe, facts.data, total_steps)]
    last = [("Off", f"{counted(len(plan.refused), 'technique')}; `powertrain plan` shows why"), _expected(plan.estimate, facts)]
    room = MOST_ROWS - 1 - len(rows) - len(last)
    techniques = _techniques(plan, room - bool(remarks))
    return [("Recipe", asked), *_remarks(remarks, room - len(techniques)), *rows, *techniques, *last]


def _remarks(remarks: Sequence[str], most: int) -> list[Row]:
    """Return the first remarks; the last row says how many others there are."""
    shown = [_shortened(remark) for remark in (remarks if len(remarks) <= most else remarks[:most - 1])]
    if len(shown) < len(remarks):
        shown.append(f"{len(remarks) - len(shown)}{' more' * bool(shown)}: `powertrain plan` shows them")
    return labelled("Notes", shown)


def _short_data(data: DataFacts) -> str:
    held_out = f"{count(data.validation_tokens)} held out"
    if data.kind == "blocks":
        return (f"{data.source}: {count(data.train_tokens)} tokens to train on, {held_out}; "
                f"{counted(data.examples, 'block')} of {data.block} tokens ({data.tokenizer})")
    each = count(data.train_tokens / data.examples)
    return (f"{data.source}: {counted(data.examples, data.kind)} to train on, {each} tokens on average, "
            f"{data.trained_share:.0%} of them trained on; {held_out}")


def _short_model(model: ModelFacts) -> str:
    shape = f"{model.family}, {count(model.parameters)} parameters, {counted(model.layers, 'layer')} x {model.width}"
    if not model.path:
        return shape
    part = "all trained" if model.trainable == model.parameters else \
        f"{count(model.trainable)} trained ({model.trainable / model.parameters:.2%})"
    by = "" if model.provider == "native" else f", computed by {model.provider}"
    return f"{shape}; from {model.path}{by}; {model.method}: {part}"


def _techniques(plan: Plan, most: int) -> list[Row]:
    """Return one row for each technique that is on; the last row names those that have no room."""
    shown = plan.steps if len(plan.steps) <= most else plan.steps[:most - 1]
    width = max((len(step.technique.name) for step in shown), default=0)
    rows = [f"{step.technique.name:<{width}}  {_shortened(f'{step.technique.does}: {step.because}')}" for step in shown]
    if rest := plan.steps[len(shown):]:
        rows.append(f"and {', '.join(step.technique.name for step in rest)}")
    return labelled("On", rows)


def _shortened(text: str) -> str:
    """Return the text up to the last clause that fits; where no clause ends in time, whole words and dots."""
    if len(text) <= LONGEST:
        return text
    clause = max(text.rfind(mark, LONGEST // 2, LONGEST) for mark in (";", ",", " ("))
    return text[:clause] if clause > 0 else f"{text[:LONGEST].rpartition(' ')[0].rstrip(',;:')} ..."


def _expected(estimate: Estimate | None, facts: Facts) -> Row:
    if estimate is None:
        return "Expected", "time and memory are not known before the run; `powertrain plan` shows why"
    total = interval(*(duration(seconds * estimate.steps) for seconds in estimate.step_s))
    slow, fast = estimate.tokens_per_s
    return "Expected", (f"{total}, {count(slow)} to {count(fast)} tokens/s; {memory(estimate.total_memory_bytes)} of the "
                        f"{memory(facts.hardware.free_memory_bytes)} free memory")


# ------------------------------------------------------------------------------------------------ facts


def facts_rows(facts: Facts) -> list[tuple[str, str, str]]:
    """Return (fact, value, source) of all facts, and of software that is missing."""
    return [*machine_rows(facts), *_model_rows(facts.model), *_data_rows(facts.data)]


def machine_rows(facts: Facts) -> list[tuple[str, str, str]]:
    """Return (fact, value, source) of the machine and its software."""
    where = "" if facts.hardware.basis == "measured" else " here; not known of that machine"
    software = [*((part, version, f"installed{where}") for part, version in facts.software.versions.items()),
                *((part, "not usable", reason) for part, reason in facts.software.missing.items())]
    return [*_hardware_rows(facts.hardware), *software]


def _hardware_rows(hardware: Hardware) -> Iterable[tuple[str, str, str]]:
    capability = hardware.compute_capability
    basis, several = hardware.basis, hardware.devices * hardware.nodes
    divided = f", {hardware.devices} in each of {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    known = [("device", "device", hardware.device), ("name", "name", hardware.name),
             ("devices", "devices", f"{several}{divided}" if several > 1 else ""),
             ("cores", "cores", str(hardware.cores or "")),
             ("GPU that is not used", "idle_gpu", f"{idle.because}; {idle.cure}" if (idle := hardware.idle_gpu) else ""),
             ("memory", "memory_bytes", memory(hardware.memory_bytes)),
             ("free memory", "free_memory_bytes", memory(hardware.free_memory_bytes) if basis == "measured" else ""),
             ("instructions", "instructions", ", ".join(hardware.instructions)),
             ("compute capability", "compute_capability", "{}.{}".format(*capability) if capability else ""),
             ("architecture", "architecture", hardware.architecture),
             *((f"{basis} {dtype}", "peak_flops_per_s", flops(peak)) for dtype, peak in hardware.peak_flops_per_s.items()),
             *((f"datasheet {dtype}", "datasheet_flops_per_s", flops(peak))
               for dtype, peak in hardware.datasheet_flops_per_s.items() if basis == "measured"),
             *((name, field, f"{digits(speed / 1e9)} GB/s") for name, field, speed in (
                 (f"{basis} bandwidth", "bandwidth_bytes_per_s", hardware.bandwidth_bytes_per_s),
                 (f"{basis} copy to and from the host", "host_link_bytes_per_s", hardware.host_link_bytes_per_s)) if speed)]
    yield from ((name, value, hardware.sources.get(field, "")) for name, field, value in known if value)
    if basis != "measured" and hardware.peak_flops_per_s:
        yield "in use", REACHED, "guess"


def _model_rows(model: ModelFacts) -> Iterable[tuple[str, str, str]]:
    yield "parameters", f"{model.parameters:,}", "counted from the recipe's shapes" if not model.path else model.path
    if model.path:
        yield "provider", model.provider, f"method {model.method}, task {model.task}"
        yield "trained parameters", f"{model.trainable:,}", f"{model.trainable / model.parameters:.2%} of all"
    if model.adapter_parameters:
        yield "frozen in", model.frozen_dtype, "as stored"
        blocks = ", ".join(map(str, model.adapted_layers))
        yield "blocks with adapters", f"{len(model.adapted_layers)} of {model.layers}", blocks
    yield "in linear layers", f"{model.matmul_parameters:,}", "each takes 2 FLOPs a token, forward"
    yield "in the head", f"{model.head_parameters:,}", "tied to the embedding" if model.tied_head else "a separate weight"
    for name, shape in model.shapes.items():
        yield name, " x ".join(map(str, shape)) or "1", "shape"


def _data_rows(data: DataFacts) -> Iterable[tuple[str, str, str]]:
    yield "data", data.source, f"sha256 {data.digest[:16]}"
    tokens = f"{data.train_tokens + data.validation_tokens:,}"
    quantiles = ", ".join(f"{key} {value:,}" for key, value in data.length_quantiles.items())
    if data.kind != "blocks":
        yield "rows", f"{data.documents:,}", f"a {data.kind} each"
        yield "tokens", tokens, f"tokenizer {data.tokenizer}, vocabulary {data.vocabulary:,}"
        yield "training tokens", f"{data.train_tokens:,}", f"{data.examples:,} examples, {data.trained_share:.1%} trained on"
        yield "validation tokens", f"{data.validation_tokens:,}", "held out"
        yield "tokens per example", quantiles, f"quantiles; {data.block} on average"
        return
    yield "documents", f"{data.documents:,}", f"{data.characters:,} characters, {data.text_bytes:,} bytes"
    yield "tokens", tokens, f"{data.tokenizer}, vocabulary {data.vocabulary:,}"
    yield "training tokens", f"{data.train_tokens:,}", f"{data.examples:,} blocks of {data.block} at stride {data.stride}"
    yield "validation tokens", f"{data.validation_tokens:,}", f"{data.validation_bytes:,} bytes of text"
    yield "tokens per document", quantiles, "quantiles"
