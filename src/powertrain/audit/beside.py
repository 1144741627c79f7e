"""What is known of a subject's own data and model, where both lie on this machine: lengths, padding, sizes, what fits.

Nothing is fetched and nothing of the subject is run: it is read as the recipe that it is equivalent to, and that recipe's facts
are gathered as for any run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from powertrain.audit.convert import convert
from powertrain.audit.recipe_text import recipe_yaml
from powertrain.audit.subject import Subject
from powertrain.recipe import resolve
from powertrain.records import Facts, UserError
from powertrain.run.prepare import prepare


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
