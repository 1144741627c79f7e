"""Findings of an audit, a diagnosis or a check of examples, and the rules that yield them: plain values, ready for JSON.

A rule is a function in a topic file: it takes the facts that it needs, and yields a `finding(...)` for each cause that it
sees. `@rule("what it rests on")` makes a `Rule` of the function, under the function's name; `rules_of(module, ...)` collects
them. A check of a diagnosis, a symptom of a run and a rule of an audit are such rules, and differ in what they are given.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Generic, Literal, ParamSpec, Protocol

P = ParamSpec("P")                           # what a rule is given: (situation), (run), (subject, circumstances)

Severity = Literal["critical", "moderate", "low", "good"]
Degree = Literal["none", "low", "medium", "high"]
SEVERITIES: tuple[Severity, ...] = ("critical", "moderate", "low", "good")      # the worst first


@dataclass(frozen=True)
class Place:
    """Where something stands: a file, and the line from 1, or 0 for the file as a whole."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Evidence:
    """What was seen, in the words of the file or with the figures of a measurement."""

    what: str                                # "gradient_checkpointing=True", "the step waited 61 % of its time for data"
    place: Place | None = None


@dataclass(frozen=True)
class Expected:
    """What curing it changes, and on what that rests."""

    says: str                                # "at most 1.4 times as fast", "the model learns to stop"
    basis: str                               # "formula: ...", "study: <folder in studies/>", "measured: ..." or "none"
    speed: tuple[float, float] | None = None     # times as fast, low..high; None where it is not about speed or is unknown


# of findings that no figure can be given for, and of those whose cure changes no speed
UNMEASURED = Expected("no figure: it was not measured here, and no formula gives it", "none")
NO_SPEED = Expected("not about speed", "none")


@dataclass(frozen=True)
class Risk:
    """What the cure may cost: quality, time, work."""

    breaking: Degree = "none"
    accuracy: Degree = "none"
    difficulty: Degree = "low"


@dataclass(frozen=True)
class Edit:
    """Lines `first`..`last` (from 1, both included) of `file` become `text`; `last` = `first` - 1 inserts before `first`."""

    file: str
    first: int
    last: int
    text: str                                # whole lines, each ended; "" deletes


@dataclass(frozen=True)
class Cure:
    says: str                                # one sentence in the imperative
    edits: tuple[Edit, ...] = ()             # of the subject's own files
    words: tuple[str, ...] = ()              # of a Powertrain recipe: "techniques.packing=on"

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the recipe keys that the cure's words set."""
        return tuple(word.partition("=")[0] for word in self.words)


@dataclass(frozen=True)
class Finding:
    """One cause, found once."""

    rule: str                                # the rule's or check's name
    severity: Severity
    title: str
    why: str                                 # why it matters here, with the numbers
    rests_on: str                            # "technique: packing", "fact: ...", "documentation: ..."
    evidence: tuple[Evidence, ...]
    expected: Expected
    cure: Cure
    risk: Risk = Risk()
    keys: tuple[str, ...] = ()               # of the recipe or of the subject's settings, that the finding is about
    numbers: Mapping[str, float] = field(default_factory=dict)   # the figures of its sentences, by name with unit
    when: str = ""                           # the only way to start the subject in which it holds: "started with torchrun"


@dataclass(frozen=True)
class Rule(Generic[P]):
    """One question, asked by a function that yields findings; the answers carry its name and what it rests on."""

    name: str                                # the function's
    rests_on: str                            # "technique: packing", "fact: ...", "documentation: ..."
    ask: Callable[P, Iterable[Finding]]
    gives_way_to: frozenset[str] = frozenset()   # names of rules: where one of them finds something, it explains this too

    @property
    def about(self) -> str:
        """Return the first line of the function's docstring: what the rule looks for, as a sentence."""
        return (inspect.getdoc(self.ask) or "").partition("\n")[0]

    def find(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
        """Yield the findings, signed with this rule's name, titled by its docstring where they have no title of their own."""
        for found in self.ask(*args, **kwargs):
            title = found.title or self.about.removesuffix(".")
            yield replace(found, rule=self.name, rests_on=self.rests_on, title=title)


def rule(rests_on: str, *, gives_way_to: Iterable[str] = ()) -> Callable[[Callable[P, Iterable[Finding]]], Rule[P]]:
    """Return a decorator that makes a rule of a function."""
    return lambda ask: Rule(ask.__name__, rests_on, ask, frozenset(gives_way_to))


def rules_of(*modules: ModuleType) -> tuple[Rule[Any], ...]:
    """Return the rules that these modules define, in the order of their lines."""
    return tuple(value for module in modules for value in vars(module).values()
                 if isinstance(value, Rule) and value.ask.__module__ == module.__name__)


class Seen(Protocol):
    """Something that knows where it stands in a file, such as a setting that an audit has read."""

    @property
    def evidence(self) -> Evidence: ...


def finding(severity: Severity, title: str, why: str, *seen: Seen | Evidence | str | None, cure: Cure | str = "nothing to do",
            words: tuple[str, ...] = (), expected: Expected = UNMEASURED, risk: Risk = Risk(),
            keys: tuple[str, ...] = (), numbers: Mapping[str, float] | None = None) -> Finding:
    """Return a finding that its rule will sign. What is None in `seen` is left out; `words` are the cure's recipe words."""
    evidence = tuple(Evidence(one) if isinstance(one, str) else one if isinstance(one, Evidence) else one.evidence
                     for one in seen if one is not None)
    cure = Cure(cure, words=words) if isinstance(cure, str) else cure
    return Finding("", severity, title, why, "", evidence, expected, cure, risk, keys or cure.keys, numbers or {})


def worst_first(found: Iterable[Finding], rules: Iterable[Rule[Any]] = ()) -> tuple[Finding, ...]:
    """Return the findings by severity, then by the speed they promise, each once, without causes that another rule explains."""
    found = list(found)
    there, gives_way = {one.rule for one in found}, {one.name: one.gives_way_to for one in rules}
    kept = [one for at, one in enumerate(found) if not gives_way.get(one.rule, frozenset()) & there and one not in found[:at]]
    return tuple(sorted(kept, key=lambda one: (SEVERITIES.index(one.severity), -(one.expected.speed or (0.0, 0.0))[1])))


@dataclass(frozen=True)
class Audit:
    """What an audit found in one script or config."""

    subject: str                             # the path
    kind: str                                # "script: trl", "script: pytorch", "config: axolotl", ...
    environment: Mapping[str, str]
    findings: tuple[Finding, ...]            # the worst first
    undetermined: tuple[str, ...] = ()       # what could not be read without running it, and what depends on it
    detail: Mapping[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------ of examples before they train


@dataclass(frozen=True)
class Problem:
    kind: str                                # "bad", "tie", "untrained", "cut", "dropped", "boundary", "rewritten"
    origin: str
    reason: str


@dataclass(frozen=True)
class Piece:
    reader: str                              # "model", "encoder" or "decoder"; of a pair "chosen" or "rejected"
    text: str
    trained: bool                            # these tokens are targets; of a span: they are the answer


@dataclass(frozen=True)
class Bar:
    first: int                               # tokens of the shortest example counted here
    last: int                                # and of the longest that could be
    examples: int


@dataclass(frozen=True)
class ExampleCheck:
    sources: tuple[str, ...]
    kind: str
    said: tuple[str, ...]                    # what was found by looking
    counts: Mapping[str, int]                # of rows: ExampleStore.counts
    problems: tuple[Problem, ...]            # the first rows of each kind
    duplicates: int                          # that repeat an earlier row
    shared_prompts: int                      # prompts that both sides have: possible with data.validation_source only
    training_examples: int                   # of an epoch, with weights
    validation_examples: int
    max_length: int
    length_quantiles: Mapping[str, int]      # tokens per training example
    histogram: tuple[Bar, ...]               # of training examples
    train_batch_size: int
    padding_shares: Mapping[str, float]      # batching -> the share of what is computed that is padding
    epoch_tokens: int                        # that the model reads, padding not counted
    epoch_trained_tokens: int

    @property
    def trained_share(self) -> float:
        return self.epoch_trained_tokens / max(1, self.epoch_tokens)
