"""A performance suite: memory by micro-batch, loader, precision and accumulation.

Each setting runs a few untimed steps in a fresh process, which gives its losses and the allocated peak of a step; assertions.py
asserts those. Then each setting is timed against the first of its table, in turns over the same steps. Speed is reported with
its interval, and no assertion depends on it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from powertrain import planner
from powertrain.evidence import assertions
from powertrain.evidence.assertions import MIB, Assertion, Tried
from powertrain.evidence.loading import Rounds, loader_rates, predicted_bytes
from powertrain.evidence.notebook import Notebook, shares
from powertrain.evidence.stats import interval
from powertrain.recipe import Recipe
from powertrain.records import Effect, Plan, Proposal, RunFailed, to_plain
from powertrain.records.evidence import NOT_HERE, Arm, ArmRun, Parity
from powertrain.records.plan import PinError, PinRefused
from powertrain.run.prepare import Prepared

TABLES = ("micro-batch", "loader", "precision", "accumulation")
WORKERS = (0, 1, 2, 4)
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
MOST_SIZES, MOST_PASSES = 5, 8
STEPS = 4                                    # of a probe; memory is that of the step after them
LEADING = {"micro-batch": "examples", "loader": "workers", "precision": "precision", "accumulation": "passes"}
LOADING = ("batches/s", "times as many", "waiting for data %")
COLUMNS = ("peak MiB", "predicted MiB", "prediction off by %", "loss apart", "tokens/s", "times as fast", "from", "to",
           "verdict", "why")
GUESS = Effect((0.5, 2.0), 0, basis="guess: it is what this bench measures", guessed=True)
CONTROL_WEIGHT = 1.5                         # of the time of a comparison: every verdict rests on it


@dataclass(frozen=True)
class Setting:
    """One row of a table: a recipe with a complete plan."""

    amount: int | str                        # what is varied
    arm: Arm
    prepared: Prepared                       # of its batch
    plan: Plan

    @property
    def dtype(self) -> str:
        return planner.workload_of(self.prepared.facts, self.plan).dtype


@dataclass(frozen=True)
class Suite:
    """The tables with their settings; the first setting of a table is its baseline."""

    base: Setting                            # the recipe's own plan
    tables: Mapping[str, Sequence[Setting]]
    not_here: Mapping[str, Mapping[str, str]]    # table -> setting -> why it cannot be tried on this machine
    notes: tuple[str, ...]


@dataclass
class Found:
    """The results of a suite so far."""

    tried: dict[str, list[Tried]] = field(default_factory=dict)
    parities: dict[str, Parity] = field(default_factory=dict)    # by the arm's name
    assertions: list[Assertion] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)       # arm's name -> index of its comparison
    failed: dict[str, str] = field(default_factory=dict)         # arm's name -> why it has no speed
    rates: Rounds = field(default_factory=list)                  # batches a second of the loaders, by turns
    not_reached: list[str] = field(default_factory=list)
    noise_floor: float | None = None
    control: int | None = None


# ------------------------------------------------------------------------------------------------ what is tried


def without_dropout(words: Sequence[str], prepared: Prepared) -> tuple[str, ...]:
    """Return the words with dropout off, because dropout differs with the split of a batch, and so would the losses."""
    model = prepared.facts.model
    return (*words, *(["model.dropout=0"] if model.dropout else []), *(["lora.dropout=0"] if model.adapter_dropout else []))


def make_suite(words: Sequence[str], prepared: Prepared) -> Suite:
    """Return the settings to try, from the recipe's own plan without torch_compile."""
    notes, plan = [], prepared.plan
    if _is_on(plan, "torch_compile") and "torch_compile" not in prepared.recipe.techniques:
        plan = plan.without("torch_compile")
        notes.append("torch_compile is off in all settings, since each would be compiled anew; "
                     "`powertrain ablate --technique torch_compile` measures it")
    if any(word.endswith("dropout=0") for word in words):
        notes.append("dropout is off in all settings, so that their losses can be compared")
    base = Setting("", Arm("the plan", tuple(words), planner.to_json(plan)), prepared, plan)
    not_here: dict[str, dict[str, str]] = {table: {} for table in TABLES}
    tables = {"micro-batch": _micro_batches(base), "loader": _loaders(base),
              "precision": _precisions(base, not_here["precision"]), "accumulation": _accumulations(base)}
    for table in ("micro-batch", "accumulation"):
        tables[table] = _fitting(tables[table], not_here[table])
    return Suite(base, tables, not_here, tuple(notes))


def micro_batch_sizes(batch: int) -> list[int]:
    """Return 1, 2, 4, ... and the batch itself, thinned evenly where there are many."""
    sizes = [1 << power for power in range(batch.bit_length()) if 1 << power < batch] + [batch]
    places = range(MOST_SIZES) if len(sizes) > MOST_SIZES else ()
    return [sizes[round(place * (len(sizes) - 1) / (MOST_SIZES - 1))] for place in places] or sizes


def numbers_of_passes(batch: int) -> list[int]:
    """Return 1, 2, 4, ... passes with at least one example each."""
    return [1 << power for power in range(batch.bit_length()) if 1 << power <= min(batch, MOST_PASSES)]


def _micro_batches(base: Setting) -> list[Setting]:
    """Return settings with batches of different sizes, each in one pass."""
    return [_setting(base, counted(size, "example"), size, _with(base.plan, "micro_batch", examples=size), size)
            for size in micro_batch_sizes(base.prepared.recipe.train_batch_size)]


def _accumulations(base: Setting) -> list[Setting]:
    """Return settings with the recipe's batch in different numbers of passes."""
    batch = base.prepared.recipe.train_batch_size
    return [_setting(base, "one pass" if passes == 1 else f"{passes} passes", passes,
                     _with(base.plan, "micro_batch", examples=-(-batch // passes))) for passes in numbers_of_passes(batch)]


def _loaders(base: Setting) -> list[Setting]:
    pinned = base.prepared.facts.hardware.device == "cuda"
    bare = base.plan.without("loader") if _is_on(base.plan, "loader") else base.plan
    return [_setting(base, counted(workers, "worker"), workers,
                     _with(bare, "loader", workers=workers, pinned=pinned) if workers else bare) for workers in WORKERS]


def _precisions(base: Setting, not_here: dict[str, str]) -> list[Setting]:
    """Return the planner's plan for each dtype of products, fp32 first."""
    found = []
    for name in PRECISIONS:
        pins: dict[str, Any] = {other: "on" if other == name else "off" for other in PRECISIONS if other != "fp32"}
        if not _is_on(base.plan, "torch_compile"):
            pins["torch_compile"] = "off"
        recipe: Recipe = base.prepared.recipe
        recipe = recipe.model_copy(update={"techniques": {**recipe.techniques, **pins}})
        try:
            plan = planner.make_plan(base.prepared.facts, recipe, base.prepared.total_steps)
        except PinError as error:
            not_here[name] = error.refusal.because if isinstance(error, PinRefused) else str(error)
            continue
        found.append(_setting(base, name, name, plan))
    return found


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _setting(base: Setting, name: str, amount: int | str, plan: Plan, batch: int | None = None) -> Setting:
    words, prepared = base.arm.words, base.prepared
    if batch is not None:
        words, resolved = (*words, f"train_batch_size={batch}"), prepared.resolved.with_planned(
            {"train_batch_size": (batch, "what this bench varies")})
        facts = replace(prepared.facts, data=replace(prepared.facts.data, train_batch_size=batch))
        prepared = replace(prepared, facts=facts, material=replace(prepared.material, resolved=resolved))
    return Setting(amount, Arm(name, words, planner.to_json(plan)), prepared, plan)


def _with(plan: Plan, technique: str, **settings: Any) -> Plan:
    return planner.with_steps(plan, [Proposal(planner.BY_NAME[technique](**settings), "set by this bench", GUESS)])


def _is_on(plan: Plan, technique: str) -> bool:
    return any(step.technique.name == technique for step in plan.steps)


def _fitting(settings: Sequence[Setting], not_here: dict[str, str]) -> list[Setting]:
    """Return the settings whose predicted peak fits this machine; the others are reported and not tried."""
    found = []
    for setting in settings:
        needed, free = predicted_bytes(setting.prepared, setting.plan, STEPS), setting.prepared.facts.hardware.free_memory_bytes
        if needed is None or needed <= free:
            found.append(setting)
        else:
            not_here[setting.arm.name] = f"it would take {needed / MIB:,.0f} MiB, and {free / MIB:,.0f} are free"
    return found


# ------------------------------------------------------------------------------------------------ trying and timing


def bench(suite: Suite, notebook: Notebook) -> Found:
    """Measure all tables until the notebook's time is up: first the assertions, then the speeds."""
    found = Found()
    for table in TABLES:
        notebook.say(f"{table}: memory and losses of {len(suite.tables[table])} settings")
        found.tried[table] = [tried for setting in suite.tables[table] if (tried := _try(table, setting, notebook, found))]
    _assert(suite, notebook, found)
    _load(suite, notebook, found)
    _time(suite, notebook, found)
    return found


def _try(table: str, setting: Setting, notebook: Notebook, found: Found) -> Tried | None:
    if notebook.left_s() <= 0:
        found.not_reached.append(f"{table}: {setting.arm.name}")
        return None
    probe = notebook.probe(setting.arm, steps=STEPS)
    predicted = predicted_bytes(setting.prepared, setting.plan, STEPS)
    return Tried(setting.arm.name, setting.amount, probe.losses, probe.grad_norms, probe.allocated_bytes, predicted,
                 setting.dtype, probe.error)


def _assert(suite: Suite, notebook: Notebook, found: Found) -> None:
    tables = found.tried
    made: list[Assertion | None] = [assertions.trains(table, tried) for table, tried in tables.items() if tried]
    made.append(assertions.memory_grows(tables["micro-batch"]))
    made += [assertions.memory_is_as_predicted(table, tried) for table, tried in tables.items() if table != "loader"]
    made.append(assertions.accumulation_takes_no_more(tables["accumulation"]))
    for what, exactness, tried in (
            ("loader: it does not change the losses", "BITWISE", tables["loader"]),
            ("precision: losses stay within rounding of fp32", "ROUNDING", tables["precision"]),
            ("accumulation: losses stay within rounding of one pass", "ROUNDING", _in_fp32(suite, notebook, found))):
        if len(tried) > 1 and (agreed := assertions.losses_agree(what, exactness, tried[0], tried[1:])) is not None:
            made.append(agreed[0])
            found.parities |= agreed[1]
    found.assertions = [assertion for assertion in made if assertion is not None]


def _in_fp32(suite: Suite, notebook: Notebook, found: Found) -> list[Tried]:
    """Return the accumulating settings in the fp32 plan, which rounds least; unchanged where fp32 is not possible."""
    own = found.tried["accumulation"]
    if not own or own[0].dtype == "fp32" or notebook.left_s() <= 0 or not suite.tables["precision"]:
        return own
    exact = suite.tables["precision"][0].plan
    passes = {setting.arm.name: [step for step in setting.plan.steps if step.technique.name == "micro_batch"]
              for setting in suite.tables["accumulation"]}
    arms = [Arm(f"{tried.name} in fp32", suite.base.arm.words, planner.to_json(planner.with_steps(exact, passes[tried.name])))
            for tried in own]
    probes = [notebook.probe(arm, steps=STEPS) for arm in arms]
    if any(probe.error for probe in probes):
        return own
    return [replace(tried, losses=probe.losses, grad_norms=probe.grad_norms, dtype="fp32")
            for tried, probe in zip(own, probes, strict=True)]


def _load(suite: Suite, notebook: Notebook, found: Found) -> None:
    """Measure the loaders' batches per second without training."""
    if len(found.tried["loader"]) < len(suite.tables["loader"]):
        return
    notebook.say("loader: batches without training")
    try:
        found.rates = loader_rates(suite.base.prepared, [setting.plan for setting in suite.tables["loader"]], notebook.ends_at)
    except RunFailed as error:
        found.not_reached.append(f"loader: batches without training ({error})")


def _time(suite: Suite, notebook: Notebook, found: Found) -> None:
    """Time each setting against the first of its table, the tables in turn, after the plan against itself."""
    jobs, base = _jobs(suite, found), suite.base.arm
    if jobs and not notebook.reaches():
        found.not_reached.append("the plan against itself, for the noise of this machine")
    elif jobs:
        try:
            found.control, found.noise_floor = notebook.noise(base.name, base, shares(notebook.left_s(), [
                CONTROL_WEIGHT, *[1.0] * len(jobs)]))
        except RunFailed as error:
            found.failed[base.name] = str(error)
    for number, (table, first, other) in enumerate(jobs):
        if not notebook.reaches():
            found.not_reached += [f"{left}: speed of {setting.arm.name}" for left, _, setting in jobs[number:]]
            return
        name = other.arm.name
        notebook.say(f"{table}: {name} against {first.arm.name}")
        index, why = notebook.attempt(f"{table}: {name}", first.arm, other.arm,
                                      shares(notebook.left_s(), [1.0] * (len(jobs) - number)))
        if index is None:
            found.failed[name] = why
        else:
            found.compared[name] = index


def _jobs(suite: Suite, found: Found) -> list[tuple[str, Setting, Setting]]:
    """Return (table, A, B) from each table in turn, so that a short budget reaches every table."""
    rows: list[list[tuple[str, Setting, Setting]]] = []
    for table in TABLES:
        runs = {tried.name for tried in found.tried[table] if tried.error is None}
        settings = [setting for setting in suite.tables[table] if setting.arm.name in runs]
        rows.append([(table, settings[0], other) for other in settings[1:]])
    return [job for turn in itertools.zip_longest(*rows) for job in turn if job is not None]


# ------------------------------------------------------------------------------------------------ as a study holds it


def findings(suite: Suite, notebook: Notebook, found: Found) -> dict[str, Any]:
    """Return the findings of a study of kind `bench`: tables with units in their columns, and the assertions."""
    return {"recipe": list(suite.base.arm.words), "tables": {table: _table(table, suite, notebook, found) for table in TABLES},
            "assertions": [to_plain(assertion) for assertion in found.assertions], "control": found.control,
            "notes": [*suite.notes, *_about_memory(suite, found)], "not_reached": list(found.not_reached)}


def _about_memory(suite: Suite, found: Found) -> list[str]:
    """Return why no memory is asserted, where that is so."""
    ran = [tried for table in found.tried.values() for tried in table if tried.error is None]
    model, device = suite.base.prepared.facts.model, suite.base.prepared.facts.hardware.device
    notes = []
    if ran and all(tried.measured_bytes is None for tried in ran):
        notes.append(f"memory is not counted on {device}, so no memory is asserted")
    if ran and all(tried.predicted_bytes is None for tried in ran):
        notes.append(f"{model.provider} computes the model, and its memory is not predicted, so no prediction is asserted")
    return notes


def _table(table: str, suite: Suite, notebook: Notebook, found: Found) -> dict[str, Any]:
    """Return a table whose rows are compared with the first; settings that cannot run here come last, with the reason."""
    more = LOADING if table == "loader" else ()
    places = {setting.arm.name: place for place, setting in enumerate(suite.tables[table])}
    rows = [[tried.amount, *(_loading(places[tried.name], tried, notebook, found) if more else ()),
             *_cells(tried, number == 0, notebook, found)] for number, tried in enumerate(found.tried[table])]
    empty = [None] * (len(more) + len(COLUMNS) - 2)
    rows += [[name, *empty, NOT_HERE, why] for name, why in suite.not_here[table].items()]
    return {"columns": [LEADING[table], *more, *COLUMNS], "rows": rows}


def _cell(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _cells(tried: Tried, is_first: bool, notebook: Notebook, found: Found) -> list[Any]:
    """Return the cells of COLUMNS."""
    share, parity, run = tried.error_share, found.parities.get(tried.name), run_of(tried.name, notebook)
    sizes = [_cell(None if size is None else size / MIB, 2) for size in (tried.measured_bytes, tried.predicted_bytes)]
    head = [*sizes, _cell(None if share is None else 100 * share, 2), parity and parity.loss_difference,
            run and _cell(statistics.median(window.tokens_per_s for window in run.windows), 1)]
    index = found.compared.get(tried.name)
    if index is None:
        why = "the baseline of this table" if is_first else "not timed within the budget"
        return [*head, None, None, None, None, tried.error or found.failed.get(tried.name) or why]
    comparison = notebook.comparisons[index]
    speed = comparison.speed and (comparison.speed.median, comparison.speed.low, comparison.speed.high)
    return [*head, *(round(value, 4) for value in speed or ()), *[None] * (0 if speed else 3), comparison.verdict,
            comparison.because]


def run_of(name: str, notebook: Notebook) -> ArmRun | None:
    """Return the last run of an arm with windows."""
    return next((run for run in reversed(notebook.runs) if run.arm == name and run.windows), None)


def _loading(place: int, tried: Tried, notebook: Notebook, found: Found) -> list[Any]:
    """Return batches per second, their ratio to no workers, and the share of a step that waits for data."""
    rates, run = found.rates, run_of(tried.name, notebook)
    waits = None if run is None else sum(window.parts.get("data", 0.0) for window in run.windows) / sum(
        window.seconds for window in run.windows)
    return [_cell(statistics.median(each[place] for each in rates) if rates else None, 1),
            _cell(interval([each[place] / each[0] for each in rates]).median if rates else None, 3),
            _cell(None if waits is None else 100 * waits, 2)]
