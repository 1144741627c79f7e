"""A subject whose data and model lie on this machine: the facts of both, and its recipe measured beside the original.

Nothing is fetched and nothing of the subject is run. It is read as the recipe that it is equivalent to. `verify` measures that
recipe with its plan beside a plain arm that computes its steps as the original does (rendering.py): same model, data, batch
and seed. Whether both arms learn the same is looked at before how fast they are.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.audit.conversion import Conversion, recipe_yaml
from powertrain.audit.convert import convert
from powertrain.audit.rendering import Rendering, differences, render
from powertrain.audit.subject import Subject
from powertrain.evidence.clock import Arena, CannotRun
from powertrain.evidence.notebook import Notebook, key_of
from powertrain.recipe import resolve
from powertrain.records import Facts, Plan, RunFailed, UserError, WrongUse
from powertrain.records.evidence import Comparison, Parity
from powertrain.run.prepare import Prepared, prepare

Say = Callable[[str], None]
ORIGINAL, OURS = "as the file has it", "the recipe with its plan"


def facts_beside(subject: Subject, cache: Path, say: Callable[[str], None]) -> Facts | str:
    """Its facts here, or in one sentence why there are none."""
    try:
        conversion = convert(subject)
        if conversion.missing:
            return conversion.missing[0]
        sources = conversion.values.get("data.source")
        for name in (*(sources if isinstance(sources, list) else [sources]), conversion.values.get("model.path")):
            if name is not None and not Path(str(name)).expanduser().exists():
                return f"{name} is not on this machine"
        with tempfile.TemporaryDirectory(prefix="powertrain-") as folder:
            recipe = Path(folder) / f"{subject.path.stem}.yaml"
            recipe.write_text(recipe_yaml(conversion), encoding="utf-8")
            return prepare(resolve(str(recipe)), cache, say).facts
    except UserError as error:
        return str(error)


@dataclass(frozen=True)
class Verified:
    """What was measured. `comparison` compares the recipe with its plan against the original's settings."""

    recipe: str                              # its YAML
    rendering: Rendering
    plan: Plan
    apart: tuple[str, ...]                   # how the plain arm differs from the original
    comparison: Comparison | None            # None: both do the same, and there is nothing to compare
    parity: Parity | None
    why_no_parity: str = ""

    def sentence(self) -> str:
        if self.comparison is None:
            return "the plan does what the original does: there is no difference to measure"
        if self.comparison.speed is None:
            return f"no speed: {self.comparison.because}"
        speed = self.comparison.speed
        return f"{speed.median:.2f} times as fast as the original's way ({speed.low:.2f} to {speed.high:.2f})"


def verify(conversion: Conversion, folder: Path, cache: Path, budget_s: float, say: Say) -> Verified:
    """Measure both arms for about `budget_s` and return the result; the recipe is written to `folder`.

    Raises WrongUse if the model or the data are not on this machine.
    """
    began = time.monotonic()
    refuse_what_is_missing(conversion)
    text = recipe_yaml(conversion)
    file = folder / f"{conversion.subject.path.stem}.powertrain.yaml"
    file.write_text(text, encoding="utf-8")
    prepared = prepare(resolve(str(file)), cache, say)
    rendering = render(conversion.subject, prepared.facts, prepared.recipe, prepared.total_steps)
    apart = (*differences(conversion.subject), *(f"{one}; the arm goes without" for one in rendering.left_out))
    if key_of(rendering.plan) == key_of(prepared.plan):
        return Verified(text, rendering, prepared.plan, apart, None, None)
    with Arena(cache) as arena:
        notebook = Notebook(arena, (str(file),), say, began + budget_s)
        return _measured(notebook, prepared, rendering, text, apart)


def refuse_what_is_missing(conversion: Conversion) -> None:
    """Raise WrongUse with the first thing that the file does not say, or that is not on this machine."""
    subject = conversion.subject
    if conversion.missing:
        raise WrongUse(f"{subject.path} cannot be verified: {conversion.missing[0]}")
    sources = conversion.values.get("data.source")
    for name in sources if isinstance(sources, list) else [sources]:
        if _is_a_path(name) and not Path(str(name)).expanduser().exists():
            raise WrongUse(f"{subject.path} cannot be verified: its data {name} are not here; run it beside them, or put them "
                           "there")
    model = conversion.values.get("model.path")
    if _is_a_path(model) and not Path(str(model)).expanduser().exists():
        raise WrongUse(f"{subject.path} cannot be verified: its model {model} is not here; run it beside it, or put it there")


def _is_a_path(name: Any) -> bool:
    """Return whether a name is surely that of a file: a hub id has one slash and no such beginning."""
    text = str(name or "")
    if any(sign in text for sign in "*?["):
        return False
    known = text.endswith((".jsonl", ".json", ".csv", ".parquet", ".txt", ".arrow"))
    return known or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1


def _measured(notebook: Notebook, prepared: Prepared, rendering: Rendering, text: str, apart: tuple[str, ...]) -> Verified:
    original, ours = notebook.arm(rendering.plan, ORIGINAL), notebook.arm(prepared.plan, OURS)
    notebook.say("whether both learn the same")
    parity, why = notebook.parity("ROUNDING", _attempts(rendering.plan, prepared.plan), prepared.facts, prepared.recipe.seed)
    notebook.say("both side by side, in turns")
    try:
        index = notebook.compare(original, ours, max(1.0, notebook.left_s()))
    except CannotRun as error:
        raise RunFailed(f"the two arms could not be measured: {error}") from None
    return Verified(text, rendering, prepared.plan, apart, notebook.comparisons[index], parity, why)


def _attempts(original: Plan, ours: Plan) -> list[tuple[Plan, Plan, str | None]]:
    """Return the pairs of plans to compare: in fp32 first, where only the order of sums differs, unless the precision does."""
    as_they_are: tuple[Plan, Plan, str | None] = (original, ours, None)
    precision = [[step.technique for step in plan.steps if "precision" in step.technique.slots] for plan in (original, ours)]
    return [as_they_are] if precision[0] != precision[1] else [(original, ours, "fp32"), as_they_are]
