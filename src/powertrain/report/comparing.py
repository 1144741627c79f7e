"""How two runs differ: recipes, plans, machine, data and results; and whether the two runs can be compared at all."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from powertrain.records.events import Evaluated, Step
from powertrain.records.origins import Stored
from powertrain.report.run_page import RunFiles
from powertrain.report.words import count, duration, listed, memory, with_settings

ABSENT = "(no such key)"
UNPINNED = ("(not pinned)", "the plan decides")
UNTRAINED = ("description", "corrections", "output_dir", "techniques")      # keys that say nothing of what is trained
# keys that change nothing that is learned
UNLEARNED = ("name", "logging_steps", "save_", "eval_steps", "max_eval_samples", "sample.", "techniques.")
RECENT_STEPS = 10            # a training loss is the mean of so many steps: one step's is mostly its examples
PLACES = 4                   # of the shorter run, evenly spaced, at which losses are compared
ARMS_OF_ONE_RUN = "one run of each is no proof: two runs of the same plan differ in speed too"

# facts that must agree, with how they are called: what they decide
SAME_DATA = {"digest": "text or rows", "tokenizer": "tokenizer", "vocabulary": "vocabulary", "train_tokens": "training tokens",
             "block": "tokens of an example", "stride": "stride", "examples": "examples", "max_length": "longest example",
             "trained_share": "share that is learned"}
SAME_MODEL = ("family", "layers", "width", "heads", "kv_heads", "mlp_width", "gated_mlp", "vocabulary", "context", "dropout",
              "tied_head", "parameters", "trainable", "path", "method", "task", "adapter_dropout", "frozen_dtype",
              "unquantised_dtype", "window")
SAME_MACHINE = ("name", "device", "cores", "devices", "memory_bytes", "instructions", "compute_capability", "architecture",
                "fingerprint")
SHOWN_FACTS = {"hardware": SAME_MACHINE, "data": ("source", *SAME_DATA), "model": ("provider", *SAME_MODEL)}
Reasoned = Mapping[str, tuple[Any, Any]]     # name -> (value, why it has that value)


@dataclass(frozen=True)
class Changed:
    """Something that differs: a key of the recipe, a technique, a fact."""

    name: str
    a: Any
    b: Any
    why_a: str = ""                          # where the value comes from, or why the technique is on or off
    why_b: str = ""


@dataclass(frozen=True)
class LossAt:
    """Training losses, each the mean of the last few steps, after the same steps or the same trained tokens."""

    steps: int | None
    tokens: int | None
    a: float
    b: float


@dataclass(frozen=True)
class RunResult:
    state: str                               # "finished", "stopped (SIGINT)", "failed", "running or killed"
    step: int
    total_steps: int
    trained_tokens: int
    tokens_per_s: float | None               # real tokens over the time of the steps
    wall_s: float | None                     # from the first step to the last event; None without any
    peak_memory_bytes: int | None
    evaluation: Evaluated | None             # the last one
    parts: Mapping[str, float]               # seconds by part


@dataclass(frozen=True)
class Difference:
    """Run B beside run A."""

    a: str
    b: str
    recipe: tuple[Changed, ...]
    plan: tuple[Changed, ...]
    facts: tuple[Changed, ...]
    results: tuple[RunResult, RunResult]
    losses: tuple[LossAt, ...]
    comparable: bool                         # same data, batch and model
    because: str                             # one sentence
    speed: str                               # what the two speeds do and do not show, and the command that measures
    missing: tuple[str, ...] = ()


def difference(a: RunFiles, b: RunFiles) -> Difference:
    """Return all differences that `powertrain runs compare A B` shows."""
    recipe, facts = tuple(changed_keys(a.recipe, b.recipe)), tuple(changed_facts(a.facts, b.facts))
    plan, results = tuple(changed_techniques(a.plan, b.plan)), (result_of(a), result_of(b))
    comparable, because = can_be_compared(a, b, recipe)
    return Difference(a.folder, b.folder, recipe, plan, facts, results, tuple(equal_losses(a.history.steps, b.history.steps)),
                      comparable, because, about_speed(a, b, plan, facts, results, comparable), (*a.missing, *b.missing))


# ---------------------------------------------------------------------------------------- what differs


def _changed(a: Reasoned, b: Reasoned, gone: Callable[[str], tuple[Any, str]]) -> Iterator[Changed]:
    """Yield the names with different values. `gone` returns value and reason of a name that one side does not have."""
    for name in dict.fromkeys((*a, *b)):
        (value_a, why_a), (value_b, why_b) = a.get(name) or gone(name), b.get(name) or gone(name)
        if value_a != value_b:
            yield Changed(name, value_a, value_b, str(why_a), str(why_b))


def changed_keys(a: Stored, b: Stored) -> Iterator[Changed]:
    """Yield the recipe's keys with different values; a key that one version does not have is ABSENT there."""
    trained_a, trained_b = ({key: found for key, found in recipe.items() if key not in UNTRAINED} for recipe in (a, b))
    absent = (ABSENT, "another version")
    return _changed(trained_a, trained_b, lambda key: UNPINNED if key.startswith("techniques.") else absent)


def changed_techniques(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Changed]:
    """Yield the techniques that are on in one plan only, with both reasons, and the techniques with different settings."""
    answers_a, answers_b = ({step["technique"]: (step.get("settings", "off"), step["because"])
                             for step in (*plan.get("steps", ()), *plan.get("refused", ()))} for plan in (a, b))
    for change in _changed(answers_a, answers_b, lambda _: ("off", "not a technique of that version")):
        yield change if "off" in (change.a, change.b) else Changed(change.name, change.a, change.b)


def changed_facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Changed]:
    """Return different facts of machine, software, data and model. Measured speeds and free memory always differ: left out."""
    return _changed(_facts(a), _facts(b), lambda _: ("not usable", "")) if a and b else iter(())


def _facts(facts: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    found = {f"{part}: {name}": (facts[part].get(name), "") for part, names in SHOWN_FACTS.items() for name in names}
    return found | {f"software: {name}": (version, "") for name, version in facts["software"]["versions"].items()}


# ---------------------------------------------------------------------------------------- results


def result_of(run: RunFiles) -> RunResult:
    history, steps = run.history, run.history.steps
    seconds = sum(step.seconds for step in steps)
    no_end = "without events: killed before its first step" if history.first_time is None else "running or killed"
    return RunResult(history.state or no_end, steps[-1].step if steps else 0, history.start.total_steps,
                     sum(step.tokens for step in steps), sum(step.real_tokens for step in steps) / seconds if seconds else None,
                     history.wall_s or None, history.ends.peak_memory_bytes if history.ends else None, history.last(Evaluated),
                     history.parts)


def equal_losses(a: Sequence[Step], b: Sequence[Step]) -> Iterator[LossAt]:
    """Yield losses after the same steps and after the same trained tokens, at a few places of the shorter run."""
    if not a or not b:
        return
    shorter = min(len(a), len(b))
    for place in _places(shorter):
        yield LossAt(place, None, _recent(a, place), _recent(b, place))
    counts_a, counts_b = (list(accumulate(step.tokens for step in steps)) for steps in (a, b))
    if counts_a[:shorter] == counts_b[:shorter]:
        return                               # the same tokens at the same steps: it would be said twice
    for tokens in _places(min(counts_a[-1], counts_b[-1])):
        at_a, at_b = (sum(1 for count in counts if count <= tokens) for counts in (counts_a, counts_b))
        if at_a and at_b:
            yield LossAt(None, tokens, _recent(a, at_a), _recent(b, at_b))


def _places(last: int) -> list[int]:
    return sorted({max(1, round(last * place / PLACES)) for place in range(1, PLACES + 1)})


def _recent(steps: Sequence[Step], end: int) -> float:
    recent = [float(step.loss) for step in steps[max(0, end - RECENT_STEPS):end]]
    return sum(recent) / len(recent)


# ---------------------------------------------------------------------------------------- what it shows


def can_be_compared(a: RunFiles, b: RunFiles, recipe: Sequence[Changed]) -> tuple[bool, str]:
    """Return whether data, batch and model are the same, and one sentence that names the differences."""
    if not a.facts or not b.facts:
        return False, "whether the runs can be compared is unknown: facts.json of a run is missing"
    data = [called for name, called in SAME_DATA.items() if a.facts["data"].get(name) != b.facts["data"].get(name)]
    batches = tuple(run.facts["data"]["train_batch_size"] for run in (a, b))
    model = [name for name in SAME_MODEL if a.facts["model"].get(name) != b.facts["model"].get(name)]
    different = [f"the data ({', '.join(data)})"] if data else []
    different += [f"the batch ({batches[0]:,} and {batches[1]:,} examples a step)"] if batches[0] != batches[1] else []
    different += [f"the model ({', '.join(name.replace('_', ' ') for name in model)})"] if model else []
    if different:
        return False, f"the runs cannot be compared one to one: they differ in {listed(different)}"
    seeds = {run.recipe.get("seed", (None, ""))[0] for run in (a, b)}
    order = "the same examples in the same order" if len(seeds) == 1 else "the same examples in another order (other seeds)"
    learned = [change.name for change in recipe if change.name != "seed" and not change.name.startswith(UNLEARNED)]
    shown = f"; the recipes differ in {listed(learned)}, and the losses show what that does" if learned else ""
    return True, f"the runs can be compared: same data, same batch, same model, {order}{shown}"


def about_speed(a: RunFiles, b: RunFiles, plan: Sequence[Changed], facts: Sequence[Changed],
                results: tuple[RunResult, RunResult], comparable: bool) -> str:
    """Return what the two speeds show, and the command that measures the difference."""
    machines = [change.name for change in facts if change.name.startswith(("hardware", "software"))]
    where = f" and the runs were made under different conditions ({', '.join(machines)})" if machines else ""
    one, other = (result.tokens_per_s for result in results)
    said = f"B's steps were {other / one:.2f} times as fast as A's, but " if one and other else ""
    what = "" if comparable else ", and the two runs did not do the same work"
    switched = [change for change in plan if "off" in (change.a, change.b)]
    on = b if switched and switched[0].a == "off" else a         # a technique can be left out only where it is on
    named = "".join(f" --technique {change.name}" for change in switched if (change.a == "off") == (on is b))
    return (f"{said}{ARMS_OF_ONE_RUN}{where}{what}; `powertrain ablate {on.folder}/recipe.yaml{named}` compares "
            "the speeds in interleaved runs")


# ---------------------------------------------------------------------------------------- as text


def comparison_rows(found: Difference) -> list[tuple[str, str, str, str]]:
    """Return (title, what, A, B), the columns of `powertrain runs compare`. Its sentences follow, see `sentences`."""
    rows = [("", "", f"A  {found.a}", f"B  {found.b}")]
    rows += [("Recipe", change.name, f"{_value(change.a)}  ({change.why_a})", f"{_value(change.b)}  ({change.why_b})")
             for change in found.recipe]
    rows += [("Plan", change.name, _answer(change.a), _answer(change.b)) for change in found.plan]
    rows += [("Facts", change.name, _value(change.a), _value(change.b)) for change in found.facts]
    rows += [("Loss", f"after {at.steps:,} steps" if at.steps is not None else f"after {count(at.tokens or 0)} tokens",
              f"{at.a:.4f}", f"{at.b:.4f}  ({at.b - at.a:+.4f})") for at in found.losses]
    for title, texts_of, absent in (("Result", _result_texts, "unknown"), ("Time", _part_texts, "")):
        a, b = map(texts_of, found.results)
        rows += [(title, name, a.get(name, absent), b.get(name, absent)) for name in dict.fromkeys((*a, *b))]
    titles = ["", *[row[0] for row in rows]]
    return [("" if before == title else title, what, a, b) for before, (title, what, a, b) in zip(titles, rows, strict=False)]


def sentences(found: Difference) -> list[tuple[str, str]]:
    """Return (title, sentence) rows: what the comparison shows and does not show."""
    same = [(title, f"no difference in {what}") for title, changes, what in
            (("Recipe", found.recipe, "any key"), ("Plan", found.plan, "any technique or setting"),
             ("Facts", found.facts, "machine, versions, data or model")) if not changes]
    whys = [("Why", f"{change.name} is {_answer(change.a)} in A: {change.why_a}; {_answer(change.b)} in B: {change.why_b}")
            for change in found.plan if change.why_a or change.why_b]
    return [*same, *whys, *[("Missing", text) for text in found.missing], ("Compared", found.because), ("Speed", found.speed)]


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value[:16] if len(value) == 64 and value.isalnum() else value    # a sha256: its beginning tells it apart
    return json.dumps(value, ensure_ascii=False)


def _answer(settings: Any) -> str:
    return "off" if settings == "off" else with_settings("on", settings)


def _part_texts(result: RunResult) -> dict[str, str]:
    total_s = sum(result.parts.values())
    return {part: f"{duration(seconds)}, {seconds / total_s:.1%}" for part, seconds in result.parts.items() if total_s}


def _result_texts(result: RunResult) -> dict[str, str]:
    evaluation, speed, wall_s = result.evaluation, result.tokens_per_s, result.wall_s
    bits = f", {evaluation.bits_per_byte:.3f} bits per byte" if evaluation and evaluation.bits_per_byte is not None else ""
    texts = {"state": f"{result.state} at step {result.step:,} of {result.total_steps:,}",
             "trained tokens": count(result.trained_tokens),
             "last evaluation": f"loss {evaluation.loss:.4f} at step {evaluation.step:,}{bits}" if evaluation else None,
             "tokens/s": count(speed) if speed else None, "time": duration(wall_s) if wall_s is not None else None,
             "peak memory": memory(result.peak_memory_bytes) if result.peak_memory_bytes else None}
    return {name: text for name, text in texts.items() if text is not None}
