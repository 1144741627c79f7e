"""The claims of the source documents, and the experiments that decide them. claims.yaml holds both.

    documents:                    # id -> the machine and the task that its figures are said to come from
    experiments:                  # name -> what is done; claims that share an experiment share one measurement
      fused-adamw-lora: {kind: arms, words: [RECIPE, KEY=VALUE], a: [KEY=VALUE], b: [KEY=VALUE], ...}
      gzip-checkpoint: {kind: probe, probe: NAME, with: {...}}     # measure(context, **with) of claims/probes
      fix-times: {kind: reasoned, because: "...", verdict: not applicable here}   # or value: 1.15, or value: [105, 147]
    claims:
      - {id: 000-03, document: "000", what: ..., claimed: "+10 % speed", range: [1.05, 1.15], unit: times as fast,
         better: higher, experiment: fused-adamw-lora, prior: ...}

Arms are two runs of `train`: `words` in both, then `a` in one and `b` in the other. They differ in one thing: where the
planner would answer a pin with another choice, that choice is pinned too, and `conditions` says so. `exactness` (BITWISE,
ROUNDING) is set where both arms are the same training; then parity is checked. `technique` names the technique that differs:
profiles of the arms give a bound on its effect before anything is timed.

`metric` of a claim names the figure that is read off the experiment (METRICS; of a probe: its value, or an entry of its detail
that is a number or {median, low, high}). `inverse` reads A over B. A unit that begins with "times" is a ratio of B to A, where
1 is no effect; memory is "times the memory" and a loss "times the loss". `range` confirms the claim; null means any gain. A
document that gives one figure is granted half of the gain either way, at most 5 points, and 0.25 from a factor of 2 on. A row
with several figures is several claims, named by a suffix. `needs` are words of claims/needs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from powertrain.records.evidence import BETTER, CONFIRMED, HARMFUL, INCONCLUSIVE, NO_EFFECT, NOT_HERE, SMALLER

VERDICTS = (CONFIRMED, BETTER, SMALLER, NO_EFFECT, HARMFUL, INCONCLUSIVE, NOT_HERE)
METRICS = {  # figures that are read off two arms
    "speed": "real tokens per second, B over A",
    "peak_memory": "allocated peak of a step, B over A",
    "first_steps": "speed over the first `steps` steps, with what B compiles",
    "loss": "loss of the compared steps, B over A",
    "data_wait": "share of its time that A waits for data",
    "busy": "share of its time that B does not wait for data or copies",
    "busy_ratio": "busy of B over busy of A",
    "steps_per_s": "optimizer steps per second of B",
}
KINDS = {"arms": {"words", "a", "b", "exactness", "technique", "conditions"}, "probe": {"probe", "with", "conditions"},
         "reasoned": {"because", "verdict", "value"}}
SECONDS = {"arms": 60, "probe": 20, "reasoned": 0}       # guesses, for a budget; the experiment may say its own




def _ordered(span: tuple[float, float]) -> tuple[float, float]:
    if span[0] > span[1]:
        raise ValueError(f"{list(span)} is no range [low, high]")
    return span


Span = Annotated[tuple[float, float], BeforeValidator(lambda found: found if isinstance(found, list) else [found, found]),
                 AfterValidator(_ordered)]


@dataclass(frozen=True)
class Experiment:
    """What is done to decide one or more claims. Which fields are filled depends on its kind."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    name: str
    kind: Literal["arms", "probe", "reasoned"]
    words: tuple[str, ...] = ()              # of both arms
    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()
    exactness: Literal["BITWISE", "ROUNDING"] | None = None      # of the difference; None: the arms are not the same training
    technique: str | None = None             # that differs between the arms, if one does
    probe: str = ""
    settings: Annotated[Mapping[str, Any], Field(alias="with")] = field(default_factory=dict)
    because: str = ""                        # why nothing has to be measured
    verdict: str | None = None
    value: Span | None = None                # that arithmetic gives
    conditions: str = ""                     # of the experiment, besides its words
    seconds: float = 0.0                     # that it takes on a small CPU, as a guess

    def check(self) -> None:
        """Raise ValueError where the fields do not fit the kind."""
        if self.kind == "arms" and self.a == self.b:
            raise ValueError("its two arms do not differ")
        if self.kind == "probe" and not self.probe:
            raise ValueError("it names no probe")
        if self.kind == "reasoned" and (not self.because or (self.verdict is None) == (self.value is None)):
            raise ValueError("a reasoned experiment has `because`, and either `verdict` or `value`")
        if self.verdict not in (None, *VERDICTS):
            raise ValueError(f"verdict={self.verdict!r} is none of {', '.join(VERDICTS)}")


@dataclass(frozen=True)
class Claim:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    id: str
    document: str
    what: str                                # the optimisation
    claimed: str                             # in the document's words
    range: Span | None                       # that confirms it; None: any gain
    unit: str
    better: Literal["higher", "lower"]
    experiment: str
    prior: str                               # the expected result, and why
    metric: str = ""                         # the figure that is read off the experiment; "" = speed, or a probe's value
    steps: int | None = None                 # of metric first_steps
    inverse: bool = False
    needs: tuple[str, ...] = ()
    conditions: str = ""                     # in which this differs from the document's

    @property
    def is_ratio(self) -> bool:
        return self.unit.startswith("times")

    def check(self, experiment: Experiment) -> None:
        """Raise ValueError where the claim cannot be read off its experiment."""
        if experiment.kind == "arms" and self.metric not in ("", *METRICS):
            raise ValueError(f"metric={self.metric!r} is none of {', '.join(METRICS)}")
        if (self.metric == "first_steps") != (self.steps is not None):
            raise ValueError("`steps` belongs to metric first_steps, and that metric needs it")
        if self.inverse and not self.is_ratio:
            raise ValueError(f"only a ratio can be inverse, and the unit is {self.unit!r}")
        if self.range is None and not self.is_ratio and experiment.verdict is None:
            raise ValueError(f"it needs a range: {self.unit!r} has no value that means no effect")


@dataclass(frozen=True)
class Catalogue:
    documents: Mapping[str, str]
    experiments: Mapping[str, Experiment]
    claims: tuple[Claim, ...]

    def experiment_of(self, claim: Claim) -> Experiment:
        return self.experiments[claim.experiment]

    def find(self, ids: Sequence[str]) -> tuple[Claim, ...]:
        """Return the claims of these ids; 000-02 means all its parts. Raises KeyError with the first unknown id."""
        found: dict[str, Claim] = {}
        for wanted in ids:
            parts = [claim for claim in self.claims if claim.id == wanted or claim.id.startswith(f"{wanted}-")]
            if not parts:
                raise KeyError(wanted)
            found.update((claim.id, claim) for claim in parts)
        return tuple(found.values())


@cache
def catalogue() -> Catalogue:
    """Return the claims that ship."""
    text = (resources.files("powertrain") / "claims" / "claims.yaml").read_text(encoding="utf-8")
    return read_catalogue(text)


def read_catalogue(text: str) -> Catalogue:
    """Return the catalogue of a file's text. Raises ValueError that names the claim or experiment and its fault."""
    data = yaml.safe_load(text)
    experiments = {name: _experiment(name, plain) for name, plain in data["experiments"].items()}
    claims = tuple(_claim(plain, experiments, data["documents"]) for plain in data["claims"])
    ids = [claim.id for claim in claims]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"claims.yaml has {', '.join(twice)} twice")
    if unused := sorted(set(experiments) - {claim.experiment for claim in claims}):
        raise ValueError(f"claims.yaml: no claim uses {', '.join(unused)}")
    return Catalogue(data["documents"], experiments, claims)


READ_EXPERIMENT, READ_CLAIM = TypeAdapter(Experiment), TypeAdapter(Claim)
T = TypeVar("T")


def _validated(read: TypeAdapter[T], where: str, plain: Mapping[str, Any]) -> T:
    try:
        return read.validate_python(plain)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ValueError(f"{where}: {'; '.join(faults)}") from None


def _experiment(name: str, plain: Mapping[str, Any]) -> Experiment:
    where, kind = f"experiment {name}", str(plain.get("kind"))
    if foreign := sorted(set(plain) - {"kind", "seconds"} - KINDS.get(kind, set(plain))):
        raise ValueError(f"{where}: {', '.join(foreign)} does not belong to kind {kind}")
    found = _validated(READ_EXPERIMENT, where, {"seconds": SECONDS.get(kind, 0), **plain, "name": name})
    _checked(where, found.check)
    return found


def _claim(plain: Mapping[str, Any], experiments: Mapping[str, Experiment], documents: Mapping[str, str]) -> Claim:
    where = f"claim {plain.get('id')}"
    claim = _validated(READ_CLAIM, where, plain)
    if claim.document not in documents or not claim.id.startswith(f"{claim.document}-"):
        raise ValueError(f"{where} is of document {claim.document!r}, and the documents are {', '.join(documents)}")
    if claim.experiment not in experiments:
        raise ValueError(f"{where}: there is no experiment {claim.experiment!r}")
    _checked(where, claim.check, experiments[claim.experiment])
    return claim


def _checked(where: str, check: Callable[..., None], *arguments: Any) -> None:
    try:
        check(*arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
