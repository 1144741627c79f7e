"""A subject as the equivalent Powertrain recipe, with every one of its keys accounted for.

The vocabulary (recipe/vocabulary.md) says what becomes of a key: what decides what is trained is translated as in a recipe,
what decides how fast is left to the plan with the pin that would keep it, and everything else says why. Here is what needs
more than a key's own value. Where a trainer's default differs from a recipe's it is written out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from powertrain.audit.configs import shown
from powertrain.audit.conversion import NO_DATA, NO_MODEL, Accounted, Conversion, data_of
from powertrain.audit.subject import METHODS, Setting, Subject
from powertrain.recipe import Recipe
from powertrain.recipe.conversions import GROUPS, NotSupported, is_count
from powertrain.recipe.resolve import put
from powertrain.recipe.spellings import OFF, is_ours, translate_row
from powertrain.recipe.vocabulary import Row, by_audit_name, find
from powertrain.records import WrongUse
from powertrain.records.findings import Place

# why a key has no effect; or the recipe's keys, with a reason; None: the vocabulary alone decides
Aside = str | tuple[dict[str, Any], str] | None
BATCH = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")
MASKS = ("training.assistant_only_loss", "training.completion_only_loss")
LAUNCHERS = ("deepspeed", "accelerate", "fsdp")
LEARNED = ("stage", "rl", "pref_loss", "reward_model", "center_rewards_coefficient")     # they say what is learned
DROPOUT = ("lora.dropout", "model.dropout")
METHODS_HERE = ("scratch", "full", "lora", "qlora")
# the keys that decide what is trained, in the order in which a recipe lists them
SEMANTIC = ("training.per_device_train_batch_size", "training.num_train_epochs", "training.max_steps", "training.learning_rate",
            "training.lr_scheduler_type", "training.min_lr", "training.warmup_steps", "training.weight_decay",
            "training.adam_beta1", "training.adam_beta2", "training.adam_epsilon", "training.max_grad_norm", "training.seed",
            "training.max_length", "training.excess_length_strategy", "data.validation_share", "data.validation_split",
            "training.assistant_only_loss", "training.eval_strategy", "tokenizer.path", "model.family",
            "model.num_hidden_layers", "model.num_attention_heads", "model.hidden_size", "model.dropout", "model.bias")
OF_LORA = ("lora.r", "lora.lora_alpha", "lora.lora_dropout", "lora.target_modules")
OF_FOUR_BITS = ("quantisation.bnb_4bit_quant_type", "quantisation.bnb_4bit_use_double_quant")
REQUIRES_RATE = ("axolotl", "torchtune")     # trainers that have no learning rate of their own


def convert(subject: Subject) -> Conversion:
    """Return the equivalent recipe. Raises WrongUse for a file that says how to launch a training, and not what is trained."""
    if subject.framework == "deepspeed" or (subject.settings and all(key.startswith("accelerate.") for key in
                                                                     subject.settings)):
        raise WrongUse(f"{subject.path} sets how a training is launched and distributed, not what is trained; convert the "
                       "training script or config that uses this file")
    tunes = is_fine_tuning(subject)
    data, missing = data_of(subject)
    accounts = [*_model(subject, tunes), *_method(subject, tunes), *_objective(subject, tunes), *data, *_batch(subject)]
    done = {account.key for account in accounts} | set(BATCH)
    accounts += [_one(subject, key, setting, tunes) for key, setting in subject.settings.items() if key not in done]
    accounts += _defaults(subject, tunes, accounts)
    if not any("data.source" in account.ours for account in accounts):
        accounts.append(Accounted("data.source", None, "default", "not in the file; write it here", {"data.source": NO_DATA}))
        missing.append("the file names no data: write data.source, a file, a folder or a hub id")
    accounts += [Accounted(key, setting, "unknown", f"{subject.framework} has no such key, so the key does nothing")
                 for key, setting in subject.unknown.items()]
    accounts += [Accounted(key, setting, "unread", "only running the file would tell; look it up and write it yourself")
                 for key, setting in subject.unread.items()]
    if tunes and subject.value("model.path") is None and subject.trainer_default("model.path") is None:
        missing.insert(0, "the file names no model: write model.path, a folder or a hub id")
    if subject.framework in REQUIRES_RATE and not any("learning_rate" in account.ours for account in accounts):
        missing.append(f"the file sets no learning rate, and {subject.framework} has none of its own: write learning_rate")
    return Conversion(subject, tuple(_agreed(_without_dropout(subject, accounts))), tuple(missing))


def is_fine_tuning(subject: Subject) -> bool:
    """Return whether a pretrained model is trained further, as the trainers of such models always do."""
    if subject.framework == "powertrain":
        return subject.value("model.path") is not None or subject.value("training.method") not in (None, "scratch")
    named = any(subject.value(key) is not None or key in subject.unread for key in ("model.path", "lora.r"))
    return named or subject.framework in METHODS


def _model(subject: Subject, tunes: bool) -> list[Accounted]:
    """Return the model's name, which a pretrained model always needs."""
    found = subject.settings.get("model.path")
    if found is not None and found.value is not None:
        return [Accounted("model.path", found, "translated", "", {"model.path": str(found.value)})]
    usual = subject.trainer_default("model.path")
    if not tunes:
        return []
    why = "the trainer's default" if usual else "not in the file; write it here"
    return [Accounted("model.path", found, "default", why, {"model.path": usual or NO_MODEL})]


def _method(subject: Subject, tunes: bool) -> list[Accounted]:
    """Return the method: adapters or all weights, and whether the base has 4 bits."""
    keys = ("training.method", "training.use_peft", "quantisation.load_in_4bit")
    said = {key: subject.settings[key] for key in keys if key in subject.settings}
    if not tunes:
        return [Accounted(key, setting, "no effect", "a new model is trained as a whole") for key, setting in said.items()
                if key != "training.method"]
    adapters, four = subject.has_adapters, bool(subject.in_force("quantisation.load_in_4bit"))
    method, named = "qlora" if adapters and four else "lora" if adapters else "full", subject.value("training.method")
    refused = {} if named in (None, *METHODS_HERE) else {"training.method": f"write one of {', '.join(METHODS_HERE)}"}
    method = named if named in METHODS_HERE else method
    if four and not adapters:
        refused["quantisation.load_in_4bit"] = "4-bit weights cannot be trained without adapters"
    accounts = [Accounted(key, setting, "not supported", refused[key]) if key in refused else
                Accounted(key, setting, "translated", "", {"method": method}) for key, setting in said.items()]
    if not any(account.ours for account in accounts):
        why = "adapters are set up" if adapters and subject.script is not None else \
            f"{subject.framework}'s default; not in the file"
        accounts.append(Accounted("training.method", None, "default", why, {"method": method}))
    return accounts


def _objective(subject: Subject, tunes: bool) -> list[Accounted]:
    """Return what is learned, by the keys that say it together."""
    names = {_name(key): setting for key, setting in subject.settings.items()
             if _name(key) in LEARNED and setting.value is not None}
    said = {name: setting.value for name, setting in sorted(names.items(), reverse=True)}      # stage before pref_loss
    if not said:
        return []
    try:
        ours, why = GROUPS["objective"](said, tunes)
    except WrongUse as error:
        why = error.why if isinstance(error, NotSupported) else str(error)
        return [Accounted(f"training.{name}", setting, "not supported", why) for name, setting in names.items()]
    return [Accounted(f"training.{name}", setting, "translated" if ours else "no effect", "" if ours else why, ours)
            for name, setting in names.items()]


def _batch(subject: Subject) -> list[Accounted]:
    """Return the batch of an optimizer step: micro-batch x accumulation x processes. The plan splits the batch."""
    micro_key, steps_key = BATCH
    whole = subject.settings.get("training.train_batch_size")
    micro, steps = subject.in_force(micro_key) or subject.value("loader.batch_size"), subject.in_force(steps_key) or 1
    said = {key: subject.settings[key] for key in (*BATCH, "loader.batch_size") if key in subject.settings}
    if whole is not None and is_count(whole.value):
        return [Accounted("training.train_batch_size", whole, "translated", "", {"train_batch_size": whole.value}),
                *(Accounted(key, setting, "planned", "the plan splits the batch",
                            pins=_split(micro) if key == micro_key else {}) for key, setting in said.items())]
    if not is_count(micro) or not is_count(steps):
        return [Accounted(key, setting, "not supported", f"{shown(setting.value)} is no number of examples; write "
                          "train_batch_size, the examples of an optimizer step") for key, setting in said.items()]
    processes = subject.value("accelerate.num_processes")
    processes = processes if is_count(processes) else 1
    times = f" x {processes} processes" if processes != 1 else ""
    why = f"{micro} x {steps} accumulated{times}, on each device; the plan splits it"
    ours = {"train_batch_size": micro * steps * processes}
    accounts = [Accounted(key, setting, "translated", "" if number else why, ours, _split(micro))
                for number, (key, setting) in enumerate(said.items())]
    return accounts or [Accounted(micro_key, None, "default", why, ours, _split(micro))]


def _split(micro: Any) -> dict[str, Any]:
    return {"techniques.micro_batch": {"examples": micro}} if is_count(micro) else {}


def _one(subject: Subject, key: str, setting: Setting, tunes: bool) -> Accounted:
    """Return the account of one key that is translated by itself."""
    if setting.value is None:
        return Accounted(key, setting, "no effect", "it sets nothing")
    section = key.partition(".")[0]
    if section == "lora" and not subject.has_adapters:
        return Accounted(key, setting, "no effect", "no adapters are trained")
    aside = ASIDE.get(key) or (_launched if section in LAUNCHERS else None)
    answer = aside(subject, key, setting.value) if aside is not None else None
    if answer is None:
        return _checked(_by_vocabulary(key, setting, tunes))
    return Accounted(key, setting, "no effect", answer) if isinstance(answer, str) else \
        _checked(Accounted(key, setting, "translated", answer[1], answer[0]))


def _by_vocabulary(key: str, setting: Setting, tunes: bool) -> Accounted:
    if key.startswith("techniques."):
        return Accounted(key, setting, "planned", "the pin is for the machine that it was made on", pins={key: setting.value})
    row = _row(key)
    if row is None:
        if setting.value in OFF:
            return Accounted(key, setting, "no effect", "it is off")
        own = is_ours(_name(key)) or key.startswith(("optimizer.", "objective."))
        return Accounted(key, setting, "translated", "", {_name(key): setting.value}) if own else \
            Accounted(key, setting, "not supported", f"a recipe has nothing like {_name(key)}")
    try:
        found = translate_row(row, setting.value, tunes)
    except WrongUse as error:
        return Accounted(key, setting, "not supported", error.why if isinstance(error, NotSupported) else str(error))
    ours = {name: value for name, value in found.ours.items() if value is not None}
    if not ours:
        return Accounted(key, setting, "planned" if row.fate == "planned" else "no effect", found.why or "a recipe's default")
    if all(name.startswith("techniques.") for name in ours):
        why = "its 8-bit moments approximate AdamW's to save memory; without the pin they have 32 bits" \
            if "techniques.eight_bit_adamw" in ours else "it changes the speed of the run, and not what is learned"
        return Accounted(key, setting, "planned", why, pins=_nested(ours))
    return Accounted(key, setting, "translated", found.why, ours)


def _row(key: str) -> Row | None:
    """Return the vocabulary's row of one of the audit's names."""
    row = by_audit_name().get(key) or find(_name(key))
    return row or next((row for name, row in by_audit_name().items() if name.endswith("*") and key.startswith(name[:-1])), None)


def _name(key: str) -> str:
    """Return a recipe's name of a key that the audit puts into the section `training`."""
    return key.removeprefix("training.")


def _nested(pins: Mapping[str, Any]) -> dict[str, Any]:
    """Return pins as a recipe has them: techniques.loader.workers is a setting of techniques.loader."""
    nested: dict[str, Any] = {}
    for name, value in pins.items():
        section, technique, *setting = name.split(".")
        nested[f"{section}.{technique}"] = {setting[0]: value} if setting else value
    return nested


def _launched(subject: Subject, key: str, value: Any) -> Aside:
    if key == "accelerate.mixed_precision":
        return None
    if key == "accelerate.gradient_accumulation_steps":
        return "it is part of train_batch_size" if BATCH[1] in subject.settings else \
            "no `with accelerator.accumulate(model)` uses it, so each batch is an optimizer step"
    if key == "accelerate.num_processes" and value != 1:
        return {}, f"the batches of all its processes are one step's batch here; --processes {value} shares it among as many"
    return "a recipe does not say how a run is spread: `powertrain train --processes N` does (docs/many-devices.md)"


def _interval(subject: Subject, key: str, value: Any) -> Aside:
    """Return why an interval in steps has no effect, if the strategy of evaluations or checkpoints is not "steps"."""
    what = "eval" if "eval" in key else "save"
    strategy = subject.value(f"training.{what}_strategy") or subject.value(f"training.{what}s_per_epoch")
    if what == "eval" and strategy is None and subject.framework in ("transformers", "trl", "llama-factory"):
        return "eval_strategy is not set, and without it transformers never evaluates"
    return None if strategy in (None, "steps") else f"{shown(strategy)} decides when, and not steps"


def _learned(subject: Subject, key: str, value: Any) -> Aside:
    """Return why one of TRL's two masks has no effect, if the other one says whose words are learned."""
    other = next(mask for mask in MASKS if mask != key)
    return f"{_name(other)} says whose words are learned" if value is False and subject.value(other) is True else None


def _tokenizer(subject: Subject, key: str, value: Any) -> Aside:
    path = subject.value("model.path")
    own = value == path or (path is None and subject.framework in METHODS)
    return "the model's own tokenizer is used" if own else ({"data.tokenizer": str(value)}, "")


def _remote_code(subject: Subject, key: str, value: Any) -> Aside:
    if value is True and len(str(subject.value("model.revision") or "")) == 40:
        return {"model.trust_remote_code": True}, ""
    return ("a model's own Python runs only from a commit that is named, and most models need none; if this one does, write "
            "model.trust_remote_code with the commit as model.revision")


def _floor(subject: Subject, key: str, value: Any) -> Aside:
    """Return the schedule's lowest learning rate as a share of the learning rate."""
    rate = subject.in_force("training.learning_rate")
    if not all(isinstance(number, (int, float)) and number > 0 for number in (rate, value)):
        return None
    return {"min_lr_rate": round(value / rate, 6)}, f"{value:g} of {rate:g}"


ASIDE: Mapping[str, Callable[[Subject, str, Any], Aside]] = {
    "training.eval_steps": _interval, "training.save_steps": _interval,
    "training.save_total_limit": lambda subject, key, value: None if is_count(value) else
    "it sets no limit, and the newest checkpoints and the best one are kept",
    "training.max_steps": lambda subject, key, value: "num_train_epochs decides the length" if value in (-1, 0) else None,
    MASKS[0]: _learned, MASKS[1]: _learned, "tokenizer.path": _tokenizer,
    "model.trust_remote_code": _remote_code, "training.min_lr": _floor,
    "model.provider": lambda subject, key, value: "the model's architecture decides who computes it; model.provider=unsloth "
                                                  "takes Unsloth where it is installed",
    "training.lr_decay_iters": lambda subject, key, value: "the schedule ends at the run's last step anyway"
    if value == subject.in_force("training.max_steps") else None,
}


def _checked(account: Accounted) -> Accounted:
    """Return the account, marked as not supported if a recipe cannot have its value."""
    nested: dict[str, Any] = {"method": "lora", "model": {"path": "any"}}
    for key, value in account.ours.items():
        if not key.startswith("techniques."):
            put(nested, key, value)
    try:
        Recipe.model_validate(nested)
    except ValidationError as error:
        problem = error.errors()[0]
        message = problem["ctx"]["error"] if problem["type"] == "value_error" else str(problem["msg"]).removeprefix("Input ")
        why = f"a recipe cannot have {shown(problem['input'])}: it {message}"
        return replace(account, fate="not supported", ours={}, why=why)
    return account


def _defaults(subject: Subject, tunes: bool, accounts: Sequence[Accounted]) -> list[Accounted]:
    """Return the trainer's own defaults for keys that the file leaves out, where they decide what is trained."""
    written = {key for account in accounts for key in account.ours}
    done = {account.key for account in accounts if account.ours} | {BATCH[0]}
    method = next((account.ours["method"] for account in accounts if "method" in account.ours), "scratch")
    wanted = [*SEMANTIC, *(OF_LORA if method in ("lora", "qlora") else ()), *(OF_FOUR_BITS if method == "qlora" else ())]
    found = []
    for key in wanted:
        value = None if key in done or key in subject.unread else subject.trainer_default(key)
        if value is None:
            continue
        answer = _one(subject, key, Setting(value, Place(str(subject.path)), ""), tunes)
        # of warmup_ratio and warmup_steps one is enough
        ours = {name: item for name, item in answer.ours.items()
                if name not in written and not (name.startswith("warmup") and written & {"warmup_steps", "warmup_ratio"})}
        if ours:
            why = f"{subject.framework}'s default; not in the file" if subject.value(key) is None else \
                f"{subject.framework}'s default, because the file's value is not supported"
            found.append(Accounted(key, None, "default", why, ours))
    return found


def _without_dropout(subject: Subject, accounts: Sequence[Accounted]) -> Iterable[Accounted]:
    """Yield the accounts. TRL's trainers that compare answers, which others use too, turn dropout off unless told not to."""
    compares = any("objective.name" in account.ours for account in accounts)
    is_off = compares and subject.framework != "powertrain" and subject.value("training.disable_dropout") is not False
    for account in accounts:
        drops = {name for name in DROPOUT if is_off and account.ours.get(name)}
        yield replace(account, ours={**account.ours, **dict.fromkeys(drops, 0.0)},
                      why="TRL turns dropout off where answers are compared") if drops else account


def _agreed(accounts: Iterable[Accounted]) -> list[Accounted]:
    """Return the accounts. If two give one key different values, the second is marked as not supported."""
    values: dict[str, Any] = {}
    agreed = []
    for account in accounts:
        rival = next((key for key, value in account.ours.items() if key in values and values[key] != value), None)
        if rival is not None:
            account = replace(account, fate="not supported", ours={},
                              why=f"another key says {rival}: {shown(values[rival])}, and only one can hold")
        values.update(account.ours)
        agreed.append(account)
    return agreed
