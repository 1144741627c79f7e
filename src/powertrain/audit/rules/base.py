"""How an audit rule says what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps

from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Setting, Subject
from powertrain.records.findings import NO_SPEED, Cure, Degree, Edit, Evidence, Expected, Finding, Risk, Severity, finding

Findings = Iterator[Finding]
STARTS = Expected("the run starts", "none")              # of cures for what ends a run before its first step
UNCHANGED = Expected("nothing changes", "none")          # of cures for settings that do nothing


def found(severity: Severity, why: str, *seen: Setting | Evidence | None, cure: str, edits: tuple[Edit, ...] = (),
          words: tuple[str, ...] = (), expected: Expected = NO_SPEED, breaking: Degree = "none", accuracy: Degree = "none",
          difficulty: Degree = "low", title: str = "") -> Finding:
    """Return a finding with its cure: a sentence, edits of the file where they are safe, and words of a recipe.

    Without a `title` it has its rule's: the first line of the function's docstring.
    """
    return finding(severity, title, why, *seen, cure=Cure(cure, edits, words), expected=expected,
                   risk=Risk(breaking, accuracy, difficulty))


def of_script(ask: Callable[[Script, Subject, Circumstances], Findings]) -> Callable[[Subject, Circumstances], Findings]:
    """Return a rule's function that asks only scripts, not configs, and is given their code."""
    @wraps(ask)
    def asked(subject: Subject, where: Circumstances) -> Findings:
        if subject.script is not None:
            yield from ask(subject.script, subject, where)

    return asked
