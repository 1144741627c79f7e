"""A subject as the equivalent Powertrain recipe, with every one of its keys accounted for.

What decides what is trained is translated, by the same spellings that recipes accept (recipe/spellings.py). What only decides
how fast is left to the plan, and the account says which pin would keep it as it was. What has no effect here, cannot be had
here, or is no key of its trainer at all says why. Where a trainer's own default differs from a recipe's it is written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import ValidationError

from powertrain.audit.conversion_data import data_of
from powertrain.audit.conversion_keys import ASIDE, Answer, is_ours, of_section, spelled, why_not_here
from powertrain.audit.subject import Setting, Subject
from powertrain.audit.trainer_defaults import METHODS, OF_FOUR_BITS, OF_LORA, SEMANTIC, in_force, trainer_default
from powertrain.recipe import Recipe, spellings
from powertrain.recipe.spelling_tables import OFF
from powertrain.records import WrongUse

Fate = Literal["translated", "planned", "no effect", "not supported", "unknown", "unread", "default"]
FATES: tuple[Fate, ...] = ("translated", "default", "planned", "no effect", "not supported", "unknown", "unread")
NO_MODEL = "NAME-THE-MODEL"                  # a hub id that there is not: the run says so before it does anything
BATCH = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")


@dataclass(frozen=True)
class Accounted:
    """What became of one key."""

    key: str                                 # of the shared vocabulary; of `unknown` keys the file's own
    setting: Setting | None                  # None: a default of the trainer, which the file does not say
    fate: Fate
    why: str
    ours: Mapping[str, Any] = field(default_factory=dict)        # dotted keys of the recipe
    pins: Mapping[str, Any] = field(default_factory=dict)        # that would keep it, of what is left to the plan


@dataclass(frozen=True)
class Conversion:
    subject: Subject
    accounts: tuple[Accounted, ...]
    missing: tuple[str, ...]                 # what the file does not say and a run needs, each with the cure

    @property
    def values(self) -> dict[str, Any]:
        """The recipe: dotted key -> value."""
        return {key: value for account in self.accounts for key, value in account.ours.items()}

    @property
    def pins(self) -> dict[str, Any]:
        """techniques.* that would keep what is left to the plan as the original has it."""
        return {key: value for account in self.accounts for key, value in account.pins.items()}


def convert(subject: Subject) -> Conversion:
    """The equivalent recipe. Raises WrongUse for a file that says how to launch, and nothing of a training."""
    if subject.framework == "deepspeed" or (subject.settings and all(key.startswith("accelerate.") for key in
                                                                     subject.settings)):
        raise WrongUse(f"{subject.path} says how a training is launched and spread, and not what is trained; convert the "
                       "script or config that it is used with")
    tunes = is_fine_tuning(subject)
    said = {key: setting for key, setting in subject.settings.items() if key not in BATCH}
    data, missing = data_of(subject)
    accounts = [*_model(subject, tunes), *_method(subject, tunes), *data, *_batch(subject)]
    done = {account.key for account in accounts}
    accounts += [_one(subject, key, setting, tunes) for key, setting in said.items() if key not in done]
    accounts += _defaults(subject, tunes, accounts)
    accounts += [Accounted(key, setting, "unknown", f"{subject.framework} has no such key, and does nothing with it")
                 for key, setting in subject.unknown.items()]
    accounts += [Accounted(key, setting, "unread", "only running the file would tell; look it up and write it yourself")
                 for key, setting in subject.unread.items()]
    if tunes and subject.value("model.path") is None and trainer_default(subject, "model.path") is None:
        missing = ("the file names no model: write model.path, a folder or a hub id", *missing)
    return Conversion(subject, tuple(_agreed(accounts)), tuple(missing))


def is_fine_tuning(subject: Subject) -> bool:
    """Whether a pretrained model is trained further: all that the trainers of such models do."""
    if subject.framework == "powertrain":
        return subject.value("model.path") is not None or subject.value("training.method") not in (None, "scratch")
    named = any(subject.value(key) is not None or key in subject.unread for key in ("model.path", "lora.r"))
    return named or subject.framework in METHODS


# ------------------------------------------------------------------------------------------------ together


def _model(subject: Subject, tunes: bool) -> list[Accounted]:
    """The name, which a pretrained model always needs."""
    found = subject.settings.get("model.path")
    if found is not None and found.value is not None:
        return [Accounted("model.path", found, "translated", "", {"model.path": str(found.value)})]
    usual = trainer_default(subject, "model.path")
    if not tunes:
        return []
    why = "the trainer's default" if usual else "the file does not say; name it"
    return [Accounted("model.path", found, "default", why, {"model.path": usual or NO_MODEL})]


def _method(subject: Subject, tunes: bool) -> list[Accounted]:
    """Adapters or all weights, and whether the base has 4 bits: what several keys say together."""
    keys = ("training.method", "training.use_peft", "quantisation.load_in_4bit")
    said = {key: subject.settings[key] for key in keys if key in subject.settings}
    if not tunes:
        return [Accounted(key, setting, "no effect", "the model is drawn here, and trained as a whole") for key, setting in
                said.items() if key != "training.method"]
    adapters = subject.value("training.use_peft")
    if adapters is None:
        adapters = METHODS.get(subject.framework) == "lora" or any(key.startswith("lora.") for key in subject.settings)
    four = bool(in_force(subject, "quantisation.load_in_4bit"))
    method = subject.value("training.method") or ("qlora" if adapters and four else "lora" if adapters else "full")
    accounts = [Accounted(key, setting, "translated", "", {"method": method}) for key, setting in said.items()]
    if four and not adapters:
        accounts = [replace(account, fate="not supported", ours={}, why="4-bit weights cannot be trained without adapters")
                    if account.key == "quantisation.load_in_4bit" else account for account in accounts]
    if not any(account.ours for account in accounts):
        accounts.append(Accounted("training.method", None, "default", f"{subject.framework} trains so if nothing is said",
                                  {"method": method}))
    return accounts


def _batch(subject: Subject) -> list[Accounted]:
    """Micro-batch x accumulation x processes is what an optimizer step learns from; how it is split is the plan's business."""
    micro_key, steps_key = BATCH
    whole = subject.settings.get("training.train_batch_size")
    micro, steps = in_force(subject, micro_key) or subject.value("loader.batch_size"), in_force(subject, steps_key) or 1
    said = {key: subject.settings[key] for key in (*BATCH, "loader.batch_size") if key in subject.settings}
    if whole is not None and isinstance(whole.value, int):
        return [Accounted("training.train_batch_size", whole, "translated", "", {"train_batch_size": whole.value}),
                *(Accounted(key, setting, "planned", "the plan splits the batch",
                            pins=_split(micro) if key == micro_key else {}) for key, setting in said.items())]
    if not isinstance(micro, int) or not isinstance(steps, int) or min(micro, steps) < 1:
        return [Accounted(key, setting, "not supported", f"{setting.value!r} is no number of examples; write train_batch_size, "
                          "the examples of an optimizer step") for key, setting in said.items()]
    processes = subject.value("accelerate.num_processes") or 1
    times = f" x {processes} processes" if processes != 1 else ""
    why = f"{micro} x {steps} accumulated{times}, on each device; the plan splits it"
    ours = {"train_batch_size": micro * steps * processes}
    accounts = [Accounted(key, setting, "translated", "" if number else why, ours, pins=_split(micro))
                for number, (key, setting) in enumerate(said.items())]
    return accounts or [Accounted(micro_key, None, "default", why, ours, pins=_split(micro))]


def _split(micro: Any) -> dict[str, Any]:
    return {"techniques.micro_batch": {"examples": micro}} if isinstance(micro, int) else {}


# ------------------------------------------------------------------------------------------------ one by one


def _one(subject: Subject, key: str, setting: Setting, tunes: bool) -> Accounted:
    """What becomes of one key that says something by itself."""
    if setting.value is None:
        return Accounted(key, setting, "no effect", "it sets nothing")
    aside = ASIDE.get(key)
    known = aside(subject, setting.value) if aside is not None else of_section(subject, key, setting.value)
    answer = known or _as_recipes_read_it(key, setting.value, tunes)
    if isinstance(answer, Answer):
        return _checked(Accounted(key, setting, answer.fate, answer.why, answer.ours, answer.pins))
    ours, why = answer
    pins = {name: value for name, value in ours.items() if name.startswith("techniques.")}
    if pins and len(pins) == len(ours):
        return Accounted(key, setting, "planned", "how fast is the plan's business, and learning is the same", pins=pins)
    return _checked(Accounted(key, setting, "translated", why, ours))


def _as_recipes_read_it(key: str, value: Any, tunes: bool) -> Answer | tuple[dict[str, Any], str]:
    name = spelled(key)
    try:
        ours, notes = spellings.translate({name: value}, tunes)
    except (ValueError, TypeError) as error:
        return Answer("not supported", str(error))
    if ours == {name: value} and not is_ours(name):
        return Answer("no effect", "it is off anyway") if value in OFF else Answer("not supported", why_not_here(key))
    if not ours:
        because = notes[0].partition(" has no effect here: ")[2] if notes else ""
        return Answer("no effect", because or "it is a recipe's default")
    return ours, ""


def _checked(account: Accounted) -> Accounted:
    """The account, unless a recipe cannot have that value."""
    if not account.ours:
        return account
    nested: dict[str, Any] = {"method": "lora", "model": {"path": "any"}}
    for dotted, value in account.ours.items():
        section, _, leaf = dotted.partition(".")
        if section == "techniques":
            continue
        if leaf:
            nested[section] = {**nested.get(section, {}), leaf: value}
        else:
            nested[section] = value
    try:
        Recipe.model_validate(nested)
    except ValidationError as error:
        problem = error.errors()[0]
        message = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ")
        return replace(account, fate="not supported", ours={}, why=f"{problem['input']!r} cannot be had here: it {message}")
    return account


def _defaults(subject: Subject, tunes: bool, accounts: Iterable[Accounted]) -> list[Accounted]:
    """The trainer's own defaults for what the file leaves open, where they decide what is trained."""
    accounts = list(accounts)
    written = {key for account in accounts for key in account.ours}
    done = {account.key for account in accounts if account.ours} | {BATCH[0]}
    method = next((account.ours["method"] for account in accounts if "method" in account.ours), "scratch")
    wanted = [*SEMANTIC, *(OF_LORA if method in ("lora", "qlora") else ()), *(OF_FOUR_BITS if method == "qlora" else ())]
    found = []
    for key in wanted:
        value = None if key in done or key in subject.unread else trainer_default(subject, key)
        if value is None:
            continue
        answer = _one(subject, key, Setting(value, next(iter(subject.settings.values())).place, ""), tunes)
        # of warmup_ratio and warmup_steps one is enough
        ours = {name: item for name, item in answer.ours.items()
                if name not in written and not (name.startswith("warmup") and written & {"warmup_steps", "warmup_ratio"})}
        if ours:
            why = f"{subject.framework} does so where the file does not say" if key not in subject.settings else \
                f"what the file says cannot be had here, and this is what {subject.framework} does without it"
            found.append(Accounted(key, None, "default", why, ours))
    return found


def _agreed(accounts: Iterable[Accounted]) -> list[Accounted]:
    """The accounts, less what two of them say differently of one key: the first stands, and the other says so."""
    values: dict[str, Any] = {}
    agreed = []
    for account in accounts:
        rival = next((key for key, value in account.ours.items() if key in values and values[key] != value), None)
        if rival is not None:
            account = replace(account, fate="not supported", ours={}, why=f"another key says {rival}: {values[rival]!r}, and "
                              "both cannot be")
        values.update(account.ours)
        agreed.append(account)
    return agreed
