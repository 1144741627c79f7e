"""Values of other trainers' keys as values of a recipe's. vocabulary.md says which key needs which conversion.

A conversion is a function here, or rows in the vocabulary's table of values. It takes the value of one key and returns the
recipe's keys, with a reason where there is more to say. It raises NotSupported where a recipe has no counterpart. GROUPS are
the conversions of several keys together.
"""

from collections.abc import Callable, Mapping
from typing import Any

from powertrain.recipe.schema import TRACKERS
from powertrain.recipe.vocabulary import values
from powertrain.records import WrongUse

Renamed = dict[str, Any]                         # the recipe's dotted key -> value
Answer = tuple[Renamed, str]                     # with a reason, or ""
Conversion = Callable[[Any], Answer]
Said = Mapping[str, Any]                         # the keys of one group that were set

OTHER_TRACKERS = ("azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "neptune", "swanlab")
TEMPLATES = ("plain", "chatml", "raw")           # the chat templates that ship


class NotSupported(WrongUse):
    """A key has a value that a recipe has no counterpart for; going on without it would train something else."""

    def __init__(self, key: str, value: Any, why: str):
        super().__init__(f"{key}={value!r} is not supported: {why}", keys=(key,))
        self.key, self.value, self.why = key, value, why


def by_value(name: str, key: str, value: Any) -> Answer:
    """Return what the rows `name` of the vocabulary's tables of values say about this value of a key."""
    table, word = values()[name], "none" if value in ("", []) else str(value).lower()
    found = table.get(optimizer_word(value) if name == "optimizer" else word) or table["*"]
    if found.ours is None:
        raise NotSupported(key, value, found.why)
    return {ours: value if meant == "=" else meant for ours, meant in found.ours.items()}, found.why


def optimizer_word(value: Any) -> str:
    """Return an optimizer's word in the table of values: "adamw" of torch.optim.AdamW."""
    return str(value).lower().rpartition(".")[2]


def _warmup(value: Any) -> Answer:
    if isinstance(value, float) and 0 < value < 1:
        return {"warmup_ratio": value}, "a number below 1 is a share of the run"
    return {"warmup_steps": _whole(value)}, ""


def _whole(value: Any) -> Any:
    """Return 500 for 500.0; anything else stays as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _schedule_options(value: Any) -> Answer:
    if isinstance(value, dict) and set(value) == {"min_lr_rate"}:
        return {"min_lr_rate": value["min_lr_rate"]}, ""
    if not value:
        return {}, "it sets nothing"
    raise NotSupported("lr_scheduler_kwargs", value, "a schedule's only option is min_lr_rate, its end as a share of its start")


def _betas(value: Any) -> Answer:
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(beta, (int, float)) for beta in value):
        return {"adam_beta1": float(value[0]), "adam_beta2": float(value[1])}, ""
    raise NotSupported("betas", value, "write adam_beta1 and adam_beta2, two numbers")


def _steps(ours: str) -> Conversion:
    def convert(value: Any) -> Answer:
        if isinstance(value, float) and 0 < value < 1:
            raise NotSupported(ours, value, "a share of the run has no counterpart; write a number of steps, or '0.5 epochs'")
        return {ours: _whole(value)}, ""
    return convert


def _in_epochs(ours: str) -> Conversion:
    """Return a conversion of an interval that some trainers' files count in epochs."""
    return lambda value: ({ours: f"{value} epochs" if isinstance(value, (int, float)) and value else value}, "")


def _targets(value: Any) -> Answer:
    """Return the target modules. LLaMA-Factory writes `all`, or names with commas; PEFT a list or `all-linear`."""
    if value is None or value == "all":
        return ({"lora.target_modules": "all-linear"} if value else {}), "" if value else "the default is all-linear"
    if isinstance(value, str) and set(value) & set("\\[]()|*+^$"):
        raise NotSupported("target_modules", value, "expressions over names are not read; name the linear layers")
    if isinstance(value, str) and value != "all-linear":
        return {"lora.target_modules": listed(value)}, ""
    return {"lora.target_modules": value}, ""


def listed(value: str) -> list[str]:
    """Return the names of a list that is written with commas."""
    return [name.strip() for name in value.split(",") if name.strip()]


def _source(value: Any) -> Answer:
    """Return the data sources. LLaMA-Factory separates sources with commas; Axolotl lists tables."""
    if isinstance(value, str):
        names = listed(value)
        return {"data.source": names if len(names) > 1 else value}, ""
    if not isinstance(value, list) or not value:
        raise NotSupported("dataset", value, "write data.source: a path, a hub id, or a list of them")
    parts = [_part(part) for part in value]
    splits = {split for _, split in parts if split is not None}
    if len(splits) > 1:
        raise NotSupported("datasets", value, f"one data.split serves all sources, and these have {len(splits)} "
                           f"({', '.join(sorted(splits))}); write the files of each split as sources")
    sources = [source for source, _ in parts]
    renamed: Renamed = {"data.source": sources if len(sources) > 1 else sources[0]}
    typed = any(isinstance(part, dict) and "type" in part for part in value)
    why = "the rows show their format; name it with data.format" if typed else ""
    return renamed | ({"data.split": splits.pop()} if splits else {}), why


def _part(part: Any) -> tuple[str, str | None]:
    """Return the source and the split of one entry of Axolotl's `datasets`."""
    if isinstance(part, str):
        return part, None
    if not isinstance(part, dict) or not isinstance(part.get("path"), str):
        raise NotSupported("datasets", part, "an entry has no path; write data.source: a path, a hub id, or a list of them")
    unknown = sorted(map(str, set(part) - {"path", "type", "ds_type", "data_files", "split"}))
    if unknown:
        raise NotSupported("datasets", part, f"{', '.join(unknown)} of {part['path']} has no counterpart; name the columns "
                           "with data.columns and the format with data.format")
    split = part.get("split")
    return str(part.get("data_files") or part["path"]), None if split is None else str(split)


def _loraplus(value: Any) -> Answer:
    """Return the rate of the adapters' second matrices. Source: Hayou et al. 2024, arXiv:2402.12354 (LoRA+)."""
    if not value:
        return {}, "it is off"
    return {"weights.learning_rates": {"*.B": value}}, "the second matrix of each adapter learns faster by this factor"


def _held_out(value: Any) -> Answer:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1:
        raise NotSupported("val_size", value, "data.validation_share is a share below 1; write the share, or name the held-out "
                           "rows with data.validation_source")
    return {"data.validation_share": value}, ""


def _template(value: Any) -> Answer:
    if value in (None, "tokenizer_default"):
        return {}, "the tokenizer's own chat template is the default"
    if value in TEMPLATES or (isinstance(value, str) and "{" not in value and (
            "/" in value or value.endswith((".jinja", ".jinja2")))):
        return {"data.chat_template": value}, ""
    return {}, ("the tokenizer's own chat template is used; name another template's file with data.chat_template, and look at "
                "the result with `powertrain data show`")


def _roles(value: Any) -> Answer:
    roles = value if isinstance(value, list) else [value]
    if not all(role in ("assistant", "gpt", "model") for role in roles):
        raise NotSupported("roles_to_train", value, "write data.train_on: assistant or all")
    return {"data.train_on": "assistant"}, ""


def _plugins(value: Any) -> Answer:
    """Accept Axolotl's plugins for kernels, which compute the same as before, and refuse other plugins."""
    names = [str(name) for name in (value if isinstance(value, list) else [value]) if name]
    foreign = [name for name in names if not any(word in name.lower() for word in ("liger", "cut_cross_entropy"))]
    if foreign:
        raise NotSupported("plugins", value, f"the plugin {foreign[0]} is not available; take it out")
    return {}, "the plan chooses the kernels; `powertrain plan` lists them with their reasons"


def _loss_type(value: Any) -> Answer:
    """Return DPO's loss. Axolotl's list of several would be a sum of them."""
    names = value if isinstance(value, list) else [value]
    if len(names) != 1:
        raise NotSupported("dpo_loss_type", value, "one loss is minimised; write objective.loss_type, and objective.rpo_alpha "
                           "for the weight of a loss named sft")
    return {"objective.loss_type": names[0]}, ""


def _model(value: Any) -> Answer:
    return {"model.path" if isinstance(value, str) else "model": value}, ""


def _trackers(value: Any) -> Answer:
    """Return the trackers without those of transformers that are not here. A name that nobody knows is left to the schema."""
    names = listed(value) if isinstance(value, str) else value
    if not isinstance(names, list):
        return {"report_to": names}, ""
    kept = [name for name in names if name not in (*OTHER_TRACKERS, "all", "none")]
    if names == ["none"] or kept or not names:
        return {"report_to": kept}, ""
    return {}, f"there are {', '.join(TRACKERS)}; name one, such as report_to: [wandb]. Every run writes events.jsonl"


CONVERSIONS: Mapping[str, Conversion] = {        # besides those of the table of values
    "eval_epochs": _in_epochs("eval_steps"), "save_epochs": _in_epochs("save_steps"), "eval_steps": _steps("eval_steps"),
    "save_steps": _steps("save_steps"), "logging_steps": _steps("logging_steps"), "warmup": _warmup,
    "schedule_options": _schedule_options, "betas": _betas, "model": _model, "targets": _targets, "source": _source,
    "loraplus": _loraplus, "held_out": _held_out, "loss_type": _loss_type, "template": _template, "roles": _roles,
    "plugins": _plugins,
    "trackers": _trackers,
}


# ------------------------------------------------------------------------------------------------ groups
# Keys that mean something only together: a micro-batch and its accumulation, an adapter and its 4 bits.
#
# Each function takes the keys of its group that were set, as they were spelled, and whether a pretrained model is trained. It
# returns the recipe's keys and a note, and raises WrongUse for values that contradict each other or have no counterpart.

def shown(values: Said) -> str:
    return ", ".join(f"{key}: {value}" for key, value in values.items()) or "nothing (it is the default)"


def _written(said: Said, renamed: Renamed) -> Answer:
    return renamed, f"{shown(said)} is written {shown(renamed)} here"


def _agreed(said: Said) -> Any:
    """Return the one value that is set, or None. Raises WrongUse if there are several."""
    values = [value for value in said.values() if value is not None]
    if any(value != values[0] for value in values):
        raise WrongUse(f"{shown(said)} are the same setting with different values; keep one of them", keys=tuple(said))
    return values[0] if values else None


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number of 1 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _batch(said: Said, tunes: bool) -> Answer:
    """Return the batch: micro-batch times accumulation steps; the planner decides how the batch is split."""
    for key, value in said.items():
        if value == "auto":
            raise NotSupported(key, value, "it leaves the batch open; write train_batch_size, the examples of a step")
    micro = _agreed({key: value for key, value in said.items() if key != "gradient_accumulation_steps"})
    steps = said.get("gradient_accumulation_steps")
    if set(said) == {"batch_size"}:
        return {"train_batch_size": micro}, "batch_size is called train_batch_size here"
    if micro is None:
        raise WrongUse(f"gradient_accumulation_steps={steps} splits a batch, and no per_device_train_batch_size is set to "
                       "multiply; write train_batch_size, the examples of an optimizer step", keys=tuple(said))
    if not is_count(micro) or not (steps is None or is_count(steps)):
        raise WrongUse(f"{shown(said)}: these must be whole numbers of 1 or more; write train_batch_size, the examples of an "
                       "optimizer step", keys=tuple(said))
    spelled = next(key for key in said if key != "gradient_accumulation_steps")
    size = micro * (1 if steps is None else steps)
    product = f"{spelled} = {micro}" if steps is None else f"{spelled} x gradient_accumulation_steps = {micro} x {steps}"
    return {"train_batch_size": size}, f"{product} is train_batch_size: {size} here; the plan splits it"


def _length(said: Said, tunes: bool) -> Answer:
    """Return the tokens of an example of a pretrained model, or of a block of text to train on from scratch."""
    ours, tokens = "data.max_length" if tunes else "data.block", _agreed(said)
    if tokens is None:
        return {}, f"{shown(said)} has no effect here: without a number, {ours} has its default"
    return {ours: tokens}, f"{', '.join(said)} is called {ours} here"


def _method(said: Said, tunes: bool) -> Answer:
    """Return the method: adapters or full training, and whether the base has 4 bits."""
    meanings = {key: by_value(key, key, value)[0] for key, value in said.items()}
    kinds = {key: found["method"] for key, found in meanings.items() if "method" in found}
    four_bits = {key: found["four_bits"] for key, found in meanings.items() if "four_bits" in found}
    wanted = set(kinds.values())
    if "full" in wanted and (len(wanted) > 1 or any(four_bits.values())):
        reason = "4-bit weights cannot be trained in full" if len(wanted) == 1 else "these are different methods"
        raise WrongUse(f"{shown(said)}: {reason}; write method: full, lora or qlora", keys=tuple(said))
    if len(set(four_bits.values())) > 1 or ("qlora" in wanted and False in four_bits.values()):
        raise WrongUse(f"{shown(said)}: these contradict each other about 4 bits; write method: lora or qlora",
                       keys=tuple(said))
    objective = {key: value for found in meanings.values() for key, value in found.items() if key.startswith("objective.")}
    if any(four_bits.values()) or "qlora" in wanted:
        return _written(said, {"method": "qlora", **objective})
    return _written(said, {**({"method": wanted.pop()} if wanted else {}), **objective})


def _objective(said: Said, tunes: bool) -> Answer:
    """Return what is learned: by Axolotl's rl or reward_model, or LLaMA-Factory's stage, of which pref_loss names the loss."""
    named = {key: by_value(key, key, value)[0] for key, value in said.items() if key != "pref_loss"}
    ours = {key: value for found in named.values() for key, value in found.items()}
    if "pref_loss" in said and ours.get("objective.name") == "dpo":
        ours |= by_value("pref_loss", "pref_loss", said["pref_loss"])[0]
    if ours:
        return _written(said, ours)
    return {}, f"{shown(said)} has no effect here: the data decide what is learned"


def _masking(said: Said, tunes: bool) -> Answer:
    """Return whose words are learned: the assistant's, or all."""
    answers = {key: value is not (key in ("train_on_inputs", "train_on_prompt")) for key, value in said.items()
               if value is not None}           # True: only the assistant's
    either = ("completion_only_loss", "assistant_only_loss")     # TRL: for pairs, and for conversations
    if any(answers.get(key) for key in either):
        answers = {key: answer for key, answer in answers.items() if answer or key not in either}
    if len(set(answers.values())) > 1:
        raise WrongUse(f"{shown(said)}: these contradict each other about what is trained on; write data.train_on: "
                       "assistant or all", keys=tuple(said))
    if not answers:
        return _written(said, {})
    return _written(said, {"data.train_on": "assistant" if any(answers.values()) else "all"})


def _packing(said: Said, tunes: bool) -> Answer:
    if not tunes:
        return {}, f"{', '.join(said)} has no effect here: text is cut into full blocks, so there is nothing to pack"
    if any(value is True for value in said.values()):
        return _written(said, {"techniques.packing": "on"})
    off = any(said.get(key) is False for key in ("packing", "sample_packing"))
    return _written(said, {"techniques.packing": "off"} if off else {})


def _grouping(said: Said, tunes: bool) -> Answer:
    if not tunes:
        return {}, f"{', '.join(said)} has no effect here: all blocks have the same length, so there is nothing to group"
    pin = "techniques.length_grouping"
    wanted = _agreed({key: by_value(key, key, value)[0].get(pin) for key, value in said.items()})
    return _written(said, {pin: wanted} if wanted else {})


def _interval(ours: str, per_epoch: str) -> Callable[[Said, bool], Answer]:
    """Return a conversion of Hugging Face's strategies and Axolotl's times per epoch to steps or epochs."""
    def convert(said: Said, tunes: bool) -> Answer:
        wanted: list[int | str] = []
        for key, value in said.items():
            if key == per_epoch and isinstance(value, (int, float)):
                wanted.append(f"{1 / value:.6g} epochs" if value else 0)
            elif value in ("epoch", "no", False) and key != per_epoch:
                wanted.append("1 epochs" if value == "epoch" else 0)
            elif value is not None and (value != "steps" or key == per_epoch):
                raise NotSupported(key, value, f"write {ours}: a number of steps, '2 epochs', or 0 for never")
        if len(set(wanted)) > 1:
            raise WrongUse(f"{shown(said)} contradict each other; write {ours}: a number of steps, '2 epochs', or 0 for never",
                           keys=tuple(said))
        return _written(said, {ours: wanted[0]} if wanted else {})
    return convert


def _switched_trackers(said: Said, tunes: bool) -> Answer:
    """Return the trackers that Axolotl and nanoGPT switch on one by one."""
    on = [key.removeprefix("use_").removesuffix("_log") for key, value in said.items() if value]
    return _written(said, {"report_to": on} if on else {})


GROUPS: Mapping[str, Callable[[Said, bool], Answer]] = {
    "batch": _batch, "method": _method, "objective": _objective, "length": _length, "masking": _masking,
    "packing": _packing, "grouping": _grouping,
    "evaluation": _interval("eval_steps", "evals_per_epoch"), "saving": _interval("save_steps", "saves_per_epoch"),
    "trackers": _switched_trackers,
}
