"""The documents' claims as data: what is claimed, and the experiment that decides it. claims.yaml holds them.

    documents:                    # id -> the machine and the task that its figures are said to come from
    experiments:                  # name -> what is done; claims that share an experiment share one measurement
      fused-adamw-lora: {kind: arms, words: [RECIPE, KEY=VALUE], a: [KEY=VALUE], b: [KEY=VALUE], ...}
      gzip-checkpoint: {kind: probe, probe: NAME, with: {...}}     # measure(context, **with) of claims/probes
      fix-times: {kind: reasoned, because: "...", verdict: not applicable here}   # or value: 1.15, or value: [105, 147]
    claims:
      - {id: 000-03, document: "000", what: ..., claimed: "+10 % speed", range: [1.05, 1.15], unit: times as fast,
         better: higher, experiment: fused-adamw-lora, prior: ...}

Arms are two runs of `train`: `words` in both, then `a` in the one and `b` in the other. They differ in one thing: where the
planner would answer a pin with another choice, that is pinned too, and `conditions` says so. `exactness` (BITWISE, ROUNDING)
is given where both arms are the same training, and then parity is checked. `technique` names the one that differs: by
profiles of the arms and what the technique acts on, a bound is computed before anything is timed.

Of a claim: `metric` names what is read off the experiment (METRICS; of a probe: its value, or an entry of its detail that is
a number or {median, low, high}). `inverse` turns a ratio round: A over B. A unit that begins with "times" is a ratio of B to
A, where 1 is no effect; a memory is "times the memory" and a loss "times the loss". `range` is what would confirm the claim;
null says "any gain". A document that gives one figure is granted half of the gain either way, at most 5 points, and 0.25
from a factor of 2 on. A row with several figures is several claims, named by a suffix. `needs` are words of claims/needs.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from powertrain.records.evidence import (
    BETTER,
    CONFIRMED,
    HARMFUL,
    INCONCLUSIVE,
    NO_EFFECT,
    NOT_HERE,
    SMALLER,
)

VERDICTS = (CONFIRMED, BETTER, SMALLER, NO_EFFECT, HARMFUL, INCONCLUSIVE, NOT_HERE)
METRICS = {  # of two arms: what is read off them
    "speed": "real tokens per second, B over A",
    "peak_memory": "allocated peak of a step, B over A",
    "first_steps": "speed over the first `steps` steps, with what B compiles",
    "loss": "loss of the compared steps, B over A",
    "data_wait": "share of its time that A waits for data",
    "busy": "share of its time that B does not wait for data or copies",
    "busy_ratio": "the same, B over A",
    "steps_per_s": "optimizer steps per second of B",
}
KINDS = {"arms": {"words", "a", "b", "exactness", "technique", "conditions"}, "probe": {"probe", "with", "conditions"},
         "reasoned": {"because", "verdict", "value"}}
SECONDS = {"arms": 60, "probe": 20, "reasoned": 0}       # guesses, for a budget; the experiment may say its own


@dataclass(frozen=True)
class Experiment:
    """What is done to decide one or more claims. Which fields are filled depends on its kind."""

    name: str
    kind: str                                # "arms", "probe" or "reasoned"
    words: tuple[str, ...] = ()              # of both arms
    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()
    exactness: str | None = None             # of what differs; None: the arms are not the same training
    technique: str | None = None             # that differs between the arms, if one does
    probe: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    because: str = ""                        # why nothing has to be measured
    verdict: str | None = None
    value: tuple[float, float] | None = None  # that arithmetic gives
    conditions: str = ""                     # what else holds in it
    seconds: float = 0.0                     # that it takes on a small CPU, as a guess


@dataclass(frozen=True)
class Claim:
    id: str
    document: str
    what: str                                # the optimisation
    claimed: str                             # in the document's words
    range: tuple[float, float] | None        # that confirms it; None: any gain
    unit: str
    better: str                              # "higher" or "lower"
    experiment: str
    prior: str                               # what one would expect, and why
    metric: str = ""                         # what is read off the experiment; "" = speed, or a probe's value
    steps: int | None = None                 # of metric first_steps
    inverse: bool = False
    needs: tuple[str, ...] = ()
    conditions: str = ""                     # in which this differs from the document's

    @property
    def is_ratio(self) -> bool:
        return self.unit.startswith("times")


@dataclass(frozen=True)
class Catalogue:
    documents: Mapping[str, str]
    experiments: Mapping[str, Experiment]
    claims: tuple[Claim, ...]

    def experiment_of(self, claim: Claim) -> Experiment:
        return self.experiments[claim.experiment]

    def find(self, ids: Sequence[str]) -> tuple[Claim, ...]:
        """The claims of these ids; 000-02 means all its parts. Raises KeyError with the first id that is none."""
        found: dict[str, Claim] = {}
        for wanted in ids:
            parts = [claim for claim in self.claims if claim.id == wanted or claim.id.startswith(f"{wanted}-")]
            if not parts:
                raise KeyError(wanted)
            found.update((claim.id, claim) for claim in parts)
        return tuple(found.values())


@cache
def catalogue() -> Catalogue:
    """What ships."""
    text = (resources.files("powertrain") / "claims" / "claims.yaml").read_text(encoding="utf-8")
    return read_catalogue(text)


def read_catalogue(text: str) -> Catalogue:
    """Raises ValueError with the claim or experiment, and what is wrong with it."""
    data = yaml.safe_load(text)
    _only("claims.yaml", data, {"documents", "experiments", "claims"})
    experiments = {name: _experiment(name, plain) for name, plain in data["experiments"].items()}
    claims = tuple(_claim(plain, experiments, data["documents"]) for plain in data["claims"])
    ids = [claim.id for claim in claims]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"claims.yaml has {', '.join(twice)} twice")
    if unused := sorted(set(experiments) - {claim.experiment for claim in claims}):
        raise ValueError(f"claims.yaml: no claim uses {', '.join(unused)}")
    return Catalogue(data["documents"], experiments, claims)


def _experiment(name: str, plain: Mapping[str, Any]) -> Experiment:
    where, kind = f"experiment {name}", plain.get("kind")
    if kind not in KINDS:
        raise ValueError(f"{where} is of kind {kind!r}, none of {', '.join(KINDS)}")
    _only(where, plain, {"kind", "seconds"} | KINDS[kind])
    values: dict[str, Any] = {**plain, "name": name, "seconds": float(plain.get("seconds", SECONDS[kind]))}
    if "with" in values:
        values["settings"] = values.pop("with")
    for key in ("words", "a", "b"):
        if key in values:
            values[key] = _texts(f"{where}: {key}", values[key])
    if "value" in values:
        values["value"] = _ordered(where, values["value"] if isinstance(values["value"], list) else 2 * [values["value"]])
    experiment = Experiment(**values)
    _check_kind(where, experiment)
    return experiment


def _check_kind(where: str, experiment: Experiment) -> None:
    if experiment.kind == "arms" and experiment.a == experiment.b:
        raise ValueError(f"{where} has two arms that do not differ")
    if experiment.exactness not in (None, "BITWISE", "ROUNDING"):
        raise ValueError(f"{where}: exactness={experiment.exactness!r} is neither BITWISE nor ROUNDING")
    if experiment.kind == "probe" and not experiment.probe:
        raise ValueError(f"{where} names no probe")
    if experiment.kind == "reasoned" and (not experiment.because
                                          or (experiment.verdict is None) == (experiment.value is None)):
        raise ValueError(f"{where} is reasoned: it has `because`, and either `verdict` or `value`")
    if experiment.verdict not in (None, *VERDICTS):
        raise ValueError(f"{where}: verdict={experiment.verdict!r} is none of {', '.join(VERDICTS)}")


def _claim(plain: Mapping[str, Any], experiments: Mapping[str, Experiment], documents: Mapping[str, str]) -> Claim:
    where = f"claim {plain.get('id')}"
    known = {item.name: item for item in dataclasses.fields(Claim)}
    _only(where, plain, set(known))
    if lacking := [name for name, item in known.items() if name not in plain and item.default is dataclasses.MISSING]:
        raise ValueError(f"{where} lacks {', '.join(lacking)}")
    for name in ("id", "document", "what", "claimed", "unit", "better", "experiment", "prior", "metric", "conditions"):
        if not isinstance(plain.get(name, ""), str):
            raise ValueError(f"{where}: {name}={plain[name]!r} is no text; put it in quotes")
    span = None if plain["range"] is None else _ordered(where, plain["range"])
    claim = Claim(**{**plain, "range": span, "needs": _texts(f"{where}: needs", plain.get("needs", []))})
    if claim.document not in documents or not claim.id.startswith(f"{claim.document}-"):
        raise ValueError(f"{where} is of document {claim.document!r}, and the documents are {', '.join(documents)}")
    if claim.better not in ("higher", "lower"):
        raise ValueError(f"{where}: better={claim.better!r} is neither higher nor lower")
    if claim.experiment not in experiments:
        raise ValueError(f"{where}: there is no experiment {claim.experiment!r}")
    _check_reading(where, claim, experiments[claim.experiment])
    return claim


def _check_reading(where: str, claim: Claim, experiment: Experiment) -> None:
    if experiment.kind == "arms" and claim.metric not in ("", *METRICS):
        raise ValueError(f"{where}: metric={claim.metric!r} is none of {', '.join(METRICS)}")
    if (claim.metric == "first_steps") != (claim.steps is not None):
        raise ValueError(f"{where}: `steps` belongs to metric first_steps, and that needs it")
    if claim.inverse and not claim.is_ratio:
        raise ValueError(f"{where}: only a ratio can be turned round, and its unit is {claim.unit!r}")
    if claim.range is None and not claim.is_ratio and experiment.verdict is None:
        raise ValueError(f"{where} needs a range: {claim.unit!r} has no value that is no effect")


def _only(where: str, plain: Any, known: set[str]) -> None:
    if not isinstance(plain, Mapping):
        raise ValueError(f"{where} is a {type(plain).__name__}, not keys with values")
    if unknown := sorted(set(plain) - known):
        raise ValueError(f"{where} has {', '.join(map(repr, unknown))}; it may have {', '.join(sorted(known))}")


def _texts(where: str, plain: Any) -> tuple[str, ...]:
    if not isinstance(plain, list) or not all(isinstance(word, str) for word in plain):
        raise ValueError(f"{where}={plain!r} is no list of words")
    return tuple(plain)


def _ordered(where: str, plain: Any) -> tuple[float, float]:
    if not (isinstance(plain, list) and len(plain) == 2 and all(isinstance(end, (int, float)) for end in plain)
            and plain[0] <= plain[1]):
        raise ValueError(f"{where}: {plain!r} is no range [low, high]")
    return float(plain[0]), float(plain[1])
