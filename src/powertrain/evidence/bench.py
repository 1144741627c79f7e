"""A performance suite: memory by micro-batch, loader, precision and accumulation.

Each setting runs a few untimed steps in a fresh process, which gives its losses and the allocated peak of a step; assertions.py
asserts those. Then each setting is timed against the first of its table, in turns over the same steps. Speed is reported with
its interval, and no assertion depends on it.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from powertrain import planner
from powertrain.evidence import assertions
from powertrain.evidence.assertions import MIB, Assertion, Setting
from powertrain.evidence.loading import loader_rates, predicted_bytes
from powertrain.evidence.notebook import Notebook
from powertrain.evidence.stats import interval
from powertrain.evidence.worker import Probe
from powertrain.recipe import Recipe
from powertrain.records import Effect, Plan, Proposal, RunFailed, several, to_plain
from powertrain.records.evidence import NOT_HERE, Arm, ArmRun
from powertrain.records.plan import PinError, PinRefused
from powertrain.run.prepare import Prepared

TABLES = {"micro-batch": "examples", "loader": "workers", "precision": "precision", "accumulation": "passes"}  # -> first column
WORKERS = (0, 1, 2, 4)
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
MOST_SIZES, MOST_PASSES = 5, 8
STEPS = 4                                    # of a probe; memory is that of the step after them
LOADING = ("batches/s", "times as many", "waiting for data %")
COLUMNS = ("peak MiB", "predicted MiB", "prediction off by %", "loss apart", "tokens/s", "times as fast", "from", "to",
           "verdict", "why")
GUESS = Effect((0.5, 2.0), 0, basis="guess: it is what this bench measures", guessed=True)
CONTROL_WEIGHT = 1.5                         # of the time of a comparison: every verdict rests on it


@dataclass
class Suite:
    """The tables with their settings, and the results so far; the first setting of a table is its baseline."""

    base: Setting                            # the recipe's own plan
    tables: Mapping[str, Sequence[Setting]]
    not_here: Mapping[str, Mapping[str, str]]    # table -> setting -> why it cannot be tried on this machine
    notes: list[str]
    assertions: list[Assertion] = field(default_factory=list)
    not_reached: list[str] = field(default_factory=list)
    control: int | None = None               # index of the plan's comparison with itself

    def reached(self, table: str) -> list[Setting]:
        """Return the settings whose first steps were watched."""
        return [setting for setting in self.tables[table] if setting.probe is not None]


# ------------------------------------------------------------------------------------------------ what is tried


def without_dropout(words: Sequence[str], prepared: Prepared) -> tuple[str, ...]:
    """Return the words with dropout off, because dropout differs with the split of a batch, and so would the losses."""
    model = prepared.facts.model
    return (*words, *(["model.dropout=0"] if model.dropout else []), *(["lora.dropout=0"] if model.adapter_dropout else []))


def make_suite(words: Sequence[str], prepared: Prepared) -> Suite:
    """Return the settings to try, from the recipe's own plan without torch_compile."""
    notes, plan = list[str](), prepared.plan
    if "torch_compile" in plan.names and "torch_compile" not in prepared.recipe.techniques:
        plan = plan.without("torch_compile")
        notes.append("torch_compile is off in all settings, since each would be compiled anew; "
                     "`powertrain ablate --technique torch_compile` measures it")
    if any(word.endswith("dropout=0") for word in words):
        notes.append("dropout is off in all settings, so that their losses can be compared")
    base = _setting(words, prepared, "the plan", "", plan)
    not_here: dict[str, dict[str, str]] = {table: {} for table in TABLES}
    tables = {"micro-batch": _micro_batches(base), "loader": _loaders(base),
              "precision": _precisions(base, not_here["precision"]), "accumulation": _accumulations(base)}
    for table in ("micro-batch", "accumulation"):
        tables[table] = _fitting(tables[table], not_here[table])
    return Suite(base, tables, not_here, notes)


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
    found, prepared = [], base.prepared
    for size in micro_batch_sizes(prepared.recipe.train_batch_size):
        resolved = prepared.resolved.with_planned({"train_batch_size": (size, "what this bench varies")})
        facts = replace(prepared.facts, data=replace(prepared.facts.data, train_batch_size=size))
        smaller = replace(prepared, facts=facts, material=replace(prepared.material, resolved=resolved))
        found.append(_setting((*base.arm.words, f"train_batch_size={size}"), smaller, several(size, "example"), size,
                              _with(base.plan, "micro_batch", examples=size)))
    return found


def _accumulations(base: Setting) -> list[Setting]:
    """Return settings with the recipe's batch in different numbers of passes."""
    batch = base.prepared.recipe.train_batch_size
    return [_setting(base.arm.words, base.prepared, "one pass" if passes == 1 else f"{passes} passes", passes,
                     _with(base.plan, "micro_batch", examples=-(-batch // passes))) for passes in numbers_of_passes(batch)]


def _loaders(base: Setting) -> list[Setting]:
    pinned = base.prepared.facts.hardware.device == "cuda"
    bare = base.plan.without("loader") if "loader" in base.plan.names else base.plan
    return [_setting(base.arm.words, base.prepared, several(workers, "worker"), workers,
                     _with(bare, "loader", workers=workers, pinned=pinned) if workers else bare) for workers in WORKERS]


def _precisions(base: Setting, not_here: dict[str, str]) -> list[Setting]:
    """Return the planner's plan for each dtype of products, fp32 first."""
    found = []
    for name in PRECISIONS:
        pins: dict[str, Any] = {other: "on" if other == name else "off" for other in PRECISIONS if other != "fp32"}
        if "torch_compile" not in base.plan.names:
            pins["torch_compile"] = "off"
        recipe: Recipe = base.prepared.recipe
        recipe = recipe.model_copy(update={"techniques": {**recipe.techniques, **pins}})
        try:
            plan = planner.make_plan(base.prepared.facts, recipe, base.prepared.total_steps)
        except PinError as error:
            not_here[name] = error.refusal.because if isinstance(error, PinRefused) else str(error)
            continue
        found.append(_setting(base.arm.words, base.prepared, name, name, plan))
    return found


def _setting(words: Sequence[str], prepared: Prepared, name: str, amount: int | str, plan: Plan) -> Setting:
    return Setting(amount, Arm(name, tuple(words), planner.to_json(plan)), prepared, plan,
                   planner.workload_of(prepared.facts, plan).dtype, predicted_bytes(prepared, plan, STEPS))


def _with(plan: Plan, technique: str, **settings: Any) -> Plan:
    return planner.with_steps(plan, [Proposal(planner.BY_NAME[technique](**settings), "set by this bench", GUESS)])


def _fitting(settings: Sequence[Setting], not_here: dict[str, str]) -> list[Setting]:
    """Return the settings whose predicted peak fits this machine; the others are reported and not tried."""
    found = []
    for setting in settings:
        needed, free = setting.predicted_bytes, setting.prepared.facts.hardware.free_memory_bytes
        if needed is None or needed <= free:
            found.append(setting)
        else:
            not_here[setting.name] = f"it would take {needed / MIB:,.0f} MiB, and {free / MIB:,.0f} are free"
    return found


# ------------------------------------------------------------------------------------------------ trying and timing


def bench(suite: Suite, notebook: Notebook) -> None:
    """Measure all tables until the notebook's time is up: first the assertions, then the speeds."""
    for table in TABLES:
        notebook.say(f"{table}: memory and losses of {len(suite.tables[table])} settings")
        for setting in suite.tables[table]:
            if notebook.left_s() > 0:
                setting.probe = notebook.probe(setting.arm, steps=STEPS)
            else:
                suite.not_reached.append(f"{table}: {setting.name}")
    _assert(suite, notebook)
    _load(suite, notebook)
    _time(suite, notebook)


def _assert(suite: Suite, notebook: Notebook) -> None:
    tables = {table: suite.reached(table) for table in TABLES}
    made: list[Assertion | None] = [assertions.trains(table, tried) for table, tried in tables.items() if tried]
    made.append(assertions.memory_grows(tables["micro-batch"]))
    made += [assertions.memory_is_as_predicted(table, tried) for table, tried in tables.items() if table != "loader"]
    made.append(assertions.accumulation_takes_no_more(tables["accumulation"]))
    for what, exactness, tried, in_fp32 in (
            ("loader: it does not change the losses", "BITWISE", tables["loader"], ()),
            ("precision: losses stay within rounding of fp32", "ROUNDING", tables["precision"], ()),
            ("accumulation: losses stay within rounding of one pass", "ROUNDING", tables["accumulation"],
             _in_fp32(suite, notebook))):
        if tried:
            made.append(assertions.losses_agree(what, exactness, tried, in_fp32))
    suite.assertions = [assertion for assertion in made if assertion is not None]


def _in_fp32(suite: Suite, notebook: Notebook) -> Sequence[Probe]:
    """Return the first steps of the accumulating settings in the fp32 plan, which rounds least; () where it cannot run."""
    own, precisions = suite.reached("accumulation"), suite.tables["precision"]
    if not own or own[0].dtype == "fp32" or notebook.left_s() <= 0 or not precisions:
        return ()
    probes = []
    for setting in own:
        passes = [step for step in setting.plan.steps if step.technique.name == "micro_batch"]
        plan = planner.to_json(planner.with_steps(precisions[0].plan, passes))
        probes.append(notebook.probe(Arm(f"{setting.name} in fp32", suite.base.arm.words, plan), steps=STEPS))
    return () if any(probe.error for probe in probes) else probes


def _load(suite: Suite, notebook: Notebook) -> None:
    """Measure the loaders' batches per second without training."""
    settings = suite.tables["loader"]
    if len(suite.reached("loader")) < len(settings):
        return
    notebook.say("loader: batches without training")
    try:
        found = loader_rates(suite.base.prepared, [setting.plan for setting in settings], notebook.ends_at)
    except RunFailed as error:
        suite.not_reached.append(f"loader: batches without training ({error})")
        return
    for setting, rates in zip(settings, found, strict=True):
        setting.rates = rates


def _time(suite: Suite, notebook: Notebook) -> None:
    """Time each setting against the first of its table, the tables in turn, after the plan against itself."""
    jobs, base = _jobs(suite), suite.base
    if jobs and not notebook.reaches():
        suite.not_reached.append("the plan against itself, for the noise of this machine")
    elif jobs:
        try:
            suite.control = notebook.noise(base.name, base.arm, notebook.share_s([CONTROL_WEIGHT, *[1.0] * len(jobs)]))
        except RunFailed as error:
            base.why = str(error)
    for number, (table, first, other) in enumerate(jobs):
        if not notebook.reaches():
            suite.not_reached += [f"{left}: speed of {setting.name}" for left, _, setting in jobs[number:]]
            return
        notebook.say(f"{table}: {other.name} against {first.name}")
        other.comparison, why = notebook.attempt(f"{table}: {other.name}", first.arm, other.arm,
                                                 notebook.share_s([1.0] * (len(jobs) - number)))
        other.why = why if other.comparison is None else ""


def _jobs(suite: Suite) -> list[tuple[str, Setting, Setting]]:
    """Return (table, A, B) from each table in turn, so that a short budget reaches every table."""
    rows: list[list[tuple[str, Setting, Setting]]] = []
    for table in TABLES:
        settings = [setting for setting in suite.tables[table] if setting.runs]
        rows.append([(table, settings[0], other) for other in settings[1:]])
    return [job for turn in itertools.zip_longest(*rows) for job in turn if job is not None]


# ------------------------------------------------------------------------------------------------ as a study holds it


def findings(suite: Suite, notebook: Notebook) -> dict[str, Any]:
    """Return the findings of a study of kind `bench`: tables with units in their columns, and the assertions."""
    return {"recipe": list(suite.base.arm.words), "tables": {table: _table(table, suite, notebook) for table in TABLES},
            "assertions": [to_plain(assertion) for assertion in suite.assertions], "control": suite.control,
            "notes": [*suite.notes, *_about_memory(suite)], "not_reached": list(suite.not_reached)}


def _about_memory(suite: Suite) -> list[str]:
    """Return why no memory is asserted, where that is so."""
    ran = [setting for table in TABLES for setting in suite.tables[table] if setting.runs]
    model, device = suite.base.prepared.facts.model, suite.base.prepared.facts.hardware.device
    notes = []
    if ran and all(setting.measured_bytes is None for setting in ran):
        notes.append(f"memory is not counted on {device}, so no memory is asserted")
    if ran and all(setting.predicted_bytes is None for setting in ran):
        notes.append(f"{model.provider} computes the model, and its memory is not predicted, so no prediction is asserted")
    return notes


def _table(table: str, suite: Suite, notebook: Notebook) -> dict[str, Any]:
    """Return a table whose rows are compared with the first; settings that cannot run here come last, with the reason."""
    more, tried = LOADING if table == "loader" else (), suite.reached(table)
    rows = [[setting.amount, *(_loading(setting, tried[0], notebook) if more else ()),
             *_cells(setting, setting is tried[0], notebook)] for setting in tried]
    empty = [None] * (len(more) + len(COLUMNS) - 2)
    rows += [[name, *empty, NOT_HERE, why] for name, why in suite.not_here[table].items()]
    return {"columns": [TABLES[table], *more, *COLUMNS], "rows": rows}


def _cell(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _cells(setting: Setting, is_first: bool, notebook: Notebook) -> list[Any]:
    """Return the cells of COLUMNS."""
    share, parity, run = setting.error_share, setting.parity, run_of(setting, notebook)
    sizes = [_cell(None if size is None else size / MIB, 2) for size in (setting.measured_bytes, setting.predicted_bytes)]
    head = [*sizes, _cell(None if share is None else 100 * share, 2), parity and parity.loss_difference,
            run and _cell(statistics.median(window.tokens_per_s for window in run.windows), 1)]
    if setting.comparison is None:
        why = "the baseline of this table" if is_first else "not timed within the budget"
        return [*head, None, None, None, None, (setting.probe and setting.probe.error) or setting.why or why]
    comparison = notebook.comparisons[setting.comparison]
    speed = comparison.speed and (comparison.speed.median, comparison.speed.low, comparison.speed.high)
    return [*head, *(round(value, 4) for value in speed or ()), *[None] * (0 if speed else 3), comparison.verdict,
            comparison.because]


def run_of(setting: Setting, notebook: Notebook) -> ArmRun | None:
    """Return the last run of the setting's arm with windows."""
    return next((run for run in reversed(notebook.runs) if run.arm == setting.name and run.windows), None)


def _loading(setting: Setting, first: Setting, notebook: Notebook) -> list[Any]:
    """Return batches per second, their ratio to no workers, and the share of a step that waits for data."""
    rates, run = setting.rates, run_of(setting, notebook)
    waits = None if run is None else sum(window.parts.get("data", 0.0) for window in run.windows) / sum(
        window.seconds for window in run.windows)
    ratios = [rate / plain for rate, plain in zip(rates, first.rates, strict=True)]
    return [_cell(statistics.median(rates) if rates else None, 1), _cell(interval(ratios).median if rates else None, 3),
            _cell(None if waits is None else 100 * waits, 2)]
