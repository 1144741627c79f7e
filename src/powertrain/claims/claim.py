"""The claims of the source documents, and the experiments that decide them. claims.yaml holds both.

    documents:                    # id -> the machine and the task of its figures, as the document says
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

`metric` of a claim names the figure that is read from the experiment: one of METRICS, or of a probe its value or an entry of
its detail that is a number or {median, low, high}. `inverse` reads A over B. A unit that begins with "times" is a ratio of B to
A, where 1 is no effect; memory is "times the memory" and a loss "times the loss". `range` confirms the claim; null means any
gain. A document that gives one figure is granted half of the gain either way, at most 5 points, and 0.25 from a factor of 2 on.
A row with several figures is several claims, named by a suffix. `needs` are words that `why_not` knows.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from powertrain.cost.estimate import COMPILER_PARTS
from powertrain.records import Hardware, Software
from powertrain.records.evidence import BETTER, CONFIRMED, HARMFUL, INCONCLUSIVE, NO_EFFECT, NOT_HERE, SMALLER

VERDICTS = (CONFIRMED, BETTER, SMALLER, NO_EFFECT, HARMFUL, INCONCLUSIVE, NOT_HERE)
METRICS = {  # figures that are read from two arms
    "speed": "real tokens per second, B over A",
    "peak_memory": "allocated peak of a step, B over A",
    "first_steps": "speed over the first `steps` steps, with the compilation of B",
    "loss": "loss of the compared steps, B over A",
    "data_wait": "share of its time that A waits for data",
    "busy": "share of its time that B does not wait for data or copies",
    "busy_ratio": "busy of B over busy of A",
    "steps_per_s": "optimizer steps per second of B",
}
KINDS = {"arms": {"words", "a", "b", "exactness", "technique", "conditions"}, "probe": {"probe", "with", "conditions"},
         "reasoned": {"because", "verdict", "value"}}
SECONDS = {"arms": 60, "probe": 20, "reasoned": 0}       # guesses, for a budget; the experiment may say its own
CAPABILITY = re.compile(r"cuda(>=|<)(\d+)\.(\d+)")
CLOSED = ConfigDict(extra="forbid", populate_by_name=True)     # an unknown key in claims.yaml is an error


def _ordered(span: tuple[float, float]) -> tuple[float, float]:
    if span[0] > span[1]:
        raise ValueError(f"{list(span)} is no range [low, high]")
    return span


Span = Annotated[tuple[float, float], BeforeValidator(lambda found: found if isinstance(found, (list, tuple)) else [found] * 2),
                 AfterValidator(_ordered)]


@dataclass(frozen=True, config=CLOSED)
class Experiment:
    """What is done to decide one or more claims. Which fields are filled depends on its kind."""

    name: str
    kind: Literal["arms", "probe", "reasoned"]
    words: tuple[str, ...] = ()              # of both arms
    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()
    exactness: Literal["BITWISE", "ROUNDING"] | None = None      # of the difference; None: the arms are not the same training
    technique: str | None = None             # that differs between the arms, if one does
    probe: str = ""
    settings: Annotated[Mapping[str, Any], Field(validation_alias="with")] = field(default_factory=dict)
    because: str = ""                        # why nothing has to be measured
    verdict: str | None = None
    value: Span | None = None                # that arithmetic gives
    conditions: str = ""                     # of the experiment, besides its words
    seconds: float = 0.0                     # that it takes on a small CPU, as a guess

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.kind == "arms" and self.a == self.b:
            raise ValueError("its two arms do not differ")
        if self.kind == "probe" and not self.probe:
            raise ValueError("it names no probe")
        if self.kind == "reasoned" and (not self.because or (self.verdict is None) == (self.value is None)):
            raise ValueError("a reasoned experiment has `because`, and either `verdict` or `value`")
        if self.verdict not in (None, *VERDICTS):
            raise ValueError(f"verdict={self.verdict!r} is none of {', '.join(VERDICTS)}")
        return self


@dataclass(frozen=True, config=CLOSED)
class Claim:
    id: str
    document: str
    what: str                                # the optimisation
    claimed: str                             # in the document's words
    range: Span | None                       # that confirms it; None: any gain
    unit: str
    better: Literal["higher", "lower"]
    experiment: str
    prior: str                               # the expected result, and why
    metric: str = ""                         # the figure that is read from the experiment; "" = speed, or a probe's value
    steps: int | None = None                 # of metric first_steps
    inverse: bool = False
    needs: tuple[str, ...] = ()
    conditions: str = ""                     # in which this differs from the document's

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        if (self.metric == "first_steps") != (self.steps is not None):
            raise ValueError("`steps` belongs to metric first_steps, and that metric needs it")
        if self.inverse and not self.is_ratio:
            raise ValueError(f"only a ratio can be inverse, and the unit is {self.unit!r}")
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the claim as plain JSON, where the end of a range without end is null."""
        span = None if self.range is None else [end if math.isfinite(end) else None for end in self.range]
        copied = ("id", "document", "what", "claimed", "unit", "better", "prior", "experiment", "metric")
        return {**{name: getattr(self, name) for name in copied}, "range": span}

    @property
    def is_ratio(self) -> bool:
        return self.unit.startswith("times")

    @property
    def claims_gain(self) -> bool:
        """Return whether the claim is a ratio above 1, so that "no effect" contradicts it."""
        return self.is_ratio and not self.inverse and (self.range is None or self.range[0] > 1)


@dataclass(frozen=True)
class Catalogue:
    documents: Mapping[str, str]
    experiments: Mapping[str, Experiment]
    claims: tuple[Claim, ...]

    def experiment_of(self, claim: Claim) -> Experiment:
        return self.experiments[claim.experiment]

    def conditions_of(self, claim: Claim) -> str:
        """Return the conditions of a claim and its experiment, with the words of both arms."""
        experiment = self.experiment_of(claim)
        words = f"powertrain train {' '.join(experiment.words)}" if experiment.kind == "arms" else ""
        return "; ".join(part for part in (claim.conditions, experiment.conditions, words) if part)

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


def _experiment(name: str, plain: Mapping[str, Any]) -> Experiment:
    where, kind = f"experiment {name}", str(plain.get("kind"))
    if foreign := sorted(set(plain) - {"kind", "seconds"} - KINDS.get(kind, set(plain))):
        raise ValueError(f"{where}: {', '.join(foreign)} does not belong to kind {kind}")
    found: Experiment = _validated(Experiment, where, {"seconds": SECONDS.get(kind, 0), **plain, "name": name})
    return found


def _claim(plain: Mapping[str, Any], experiments: Mapping[str, Experiment], documents: Mapping[str, str]) -> Claim:
    where = f"claim {plain.get('id')}"
    claim: Claim = _validated(Claim, where, plain)
    if claim.document not in documents or not claim.id.startswith(f"{claim.document}-"):
        raise ValueError(f"{where} is of document {claim.document!r}, and the documents are {', '.join(documents)}")
    experiment = experiments.get(claim.experiment)
    if experiment is None:
        raise ValueError(f"{where}: there is no experiment {claim.experiment!r}")
    if experiment.kind == "arms" and claim.metric not in ("", *METRICS):
        raise ValueError(f"{where}: metric={claim.metric!r} is none of {', '.join(METRICS)}")
    if claim.range is None and not claim.is_ratio and experiment.verdict is None:
        raise ValueError(f"{where}: it needs a range: {claim.unit!r} has no value that means no effect")
    return claim


def _validated(kind: type, where: str, plain: Mapping[str, Any]) -> Any:
    try:
        return TypeAdapter(kind).validate_python(plain)
    except ValidationError as error:
        faults = (": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"]))) for fault in error.errors())
        raise ValueError(f"{where}: {'; '.join(faults)}") from None


# ------------------------------------------------------------------------------------------------ needs


def why_not(needs: Sequence[str], hardware: Hardware, software: Software) -> str | None:
    """Return the reason why the first missing one of `needs` is missing; None where all are there.

    cuda, cuda>=8.0, cuda<8.0 (compute capability), two_gpus, two_processes (a GPU or a core for each), compiler (for
    torch.compile), gpu:NAME (a figure of one machine), or a part of facts/software.py.
    """
    return next((reason for need in needs if (reason := _missing(need, hardware, software)) is not None), None)


def _missing(need: str, hardware: Hardware, software: Software) -> str | None:
    has_gpu = hardware.device == "cuda"
    seen = f"there is one {hardware.name}" if has_gpu else "torch sees no GPU here"
    if need == "cuda" or (bound := CAPABILITY.fullmatch(need)):
        here = hardware.compute_capability
        if not has_gpu or here is None:
            return f"the claim needs an NVIDIA GPU, and {seen}"
        if need == "cuda" or bound is None or (here >= (int(bound[2]), int(bound[3]))) == (bound[1] == ">="):
            return None
        wanted = f"{'at least' if bound[1] == '>=' else 'below'} {bound[2]}.{bound[3]}"
        return f"the claim is for compute capability {wanted}, and {hardware.name} has {here[0]}.{here[1]}"
    if need == "two_gpus":
        return None if has_gpu and hardware.devices > 1 else f"the claim needs two GPUs, and {seen}"
    if need == "two_processes":
        most, what = (hardware.devices, "GPU") if has_gpu else (hardware.cores, "core")
        return None if most > 1 else f"the claim needs two processes, and there is one {what}"
    if need == "compiler":
        parts = [part for part in COMPILER_PARTS.get(hardware.device, ()) if part in software.missing]
        return f"torch.compile cannot work here ({parts[0]}: {software.missing[parts[0]]})" if parts else None
    if need.startswith("gpu:"):
        name = need.removeprefix("gpu:")
        return None if name in hardware.name else f"the figure was measured on {name}, and this machine is {hardware.name}"
    if need in software.missing:
        return f"the claim needs {need}: {software.missing[need]}"
    if need not in software.versions:
        raise ValueError(f"claims.yaml: needs={need!r} is neither a word of claims/claim.py nor a part of facts/software.py")
    return None
