"""Tables that a section of the recipe chooses a row from, such as the optimizers; each row has settings of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from powertrain.records import WrongUse
from powertrain.records.errors import did_you_mean


@dataclass(frozen=True)
class Setting:
    """One setting: its default, and which values it takes."""

    default: float | bool | str
    least: float | None = None
    below: float | None = None               # the value stays under this number
    choices: tuple[str, ...] = ()

    def problem(self, value: Any) -> str | None:
        """Return why `value` cannot be used, or None."""
        if isinstance(self.default, bool) or isinstance(value, bool):
            return None if isinstance(value, bool) and isinstance(self.default, bool) else "use true or false" \
                if isinstance(self.default, bool) else "use a number"
        if isinstance(self.default, str):
            return None if value in self.choices else f"use one of {', '.join(self.choices)}"
        whole = isinstance(self.default, int)
        if not isinstance(value, int if whole else (int, float)):
            return "use a whole number" if whole else "use a number"
        if self.least is not None and value < self.least:
            return f"use {self.least:g} or more"
        return f"use a number below {self.below:g}" if self.below is not None and value >= self.below else None


@dataclass(frozen=True)
class Table:
    """The rows that a section of the recipe chooses from, such as the optimizers."""

    section: str                             # of the recipe: "optimizer" or "objective"
    rows: Mapping[str, Any]                  # name -> row, which has `settings`

    def named(self, name: str) -> Any:
        """Return the row of that name. Raises WrongUse with the names that there are."""
        if name not in self.rows:
            raise WrongUse(f"there is no {self.section} {name!r}; use one of {', '.join(self.rows)}"
                           f"{did_you_mean(name, self.rows, likeness=0.5)}", keys=(f"{self.section}.name",))
        return self.rows[name]

    def settings(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return every setting of the row: as given, or its default. Raises WrongUse for unknown ones and wrong values."""
        known: Mapping[str, Setting] = self.named(name).settings
        for key, value in given.items():
            where = f"{self.section}.{key}"
            if key not in known:
                have = f"its settings are {', '.join(known)}" if known else "it has no settings"
                raise WrongUse(f"{self.section} {name} has no setting {key!r}; {have}{did_you_mean(key, known, likeness=0.5)}",
                               keys=(where,))
            if (problem := known[key].problem(value)) is not None:
                raise WrongUse(f"{where}={value!r} cannot be used with {self.section} {name}; {problem}", keys=(where,))
        return {key: given.get(key, setting.default) for key, setting in known.items()}
