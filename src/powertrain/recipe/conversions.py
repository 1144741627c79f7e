"""Values of other trainers' keys as values of a recipe's, one function a conversion; vocabulary.md says which key needs which.

A conversion takes a value and returns the recipe's keys, with a reason where there is more to say. It raises NotSupported
where a recipe has no counterpart. `sole` conversions are of one key; those of groups.py are of several keys together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from powertrain.records import WrongUse

Renamed = dict[str, Any]                         # the recipe's dotted key -> value
Answer = tuple[Renamed, str]                     # with a reason, or ""
Conversion = Callable[[Any], Answer]

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant",
             "cosine_with_min_lr": "cosine"}
_PLAIN, _FUSED = {"techniques.fused_adamw": "off"}, {"techniques.fused_adamw": "on"}
_PAGED, _EIGHT_BITS = {"techniques.paged_adamw": "on"}, {"techniques.eight_bit_adamw": "on"}
OPTIMIZERS: Mapping[str, Renamed] = {            # of several makers, by its name in lower case
    "adamw": _PLAIN, "adamw_torch": _PLAIN, "adamw_hf": _PLAIN, "adamw_torch_fused": _FUSED, "adamw_apex_fused": _FUSED,
    "paged_adamw": _PAGED, "paged_adamw_32bit": _PAGED, "pagedadamw": _PAGED, "pagedadamw32bit": _PAGED,
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "adamw8bit"), _EIGHT_BITS),
    "paged_adamw_8bit": {"optimizer.name": "paged_adamw_8bit"}, "pagedadamw8bit": {"optimizer.name": "paged_adamw_8bit"},
    "lion_32bit": {"optimizer.name": "lion"}, "lion": {"optimizer.name": "lion"}, "lion_8bit": {"optimizer.name": "lion_8bit"},
    "sgd": {"optimizer.name": "sgd", "optimizer.momentum": 0.0}, "muon": {"optimizer.name": "muon"},
    "adafactor": {"optimizer.name": "adafactor", "optimizer.least_rms": 1.0},
}
WHY_OPTIMIZERS = {
    "adafactor": "with least_rms 1 the rate is not scaled by each weight's size, as in Hugging Face's Trainer",
    "sgd": "Hugging Face's sgd has no momentum",
}
# names of the table of optimizers (training/optimizers.py), which other makers have too
OUR_OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "lion", "lion_8bit", "sgd", "muon", "adafactor")
TASKS = {
    **dict.fromkeys(("text-generation", "causal_lm", "causal"), "causal"),
    **dict.fromkeys(("seq_2_seq_lm", "seq2seq", "text2text-generation"), "seq2seq"),
    **dict.fromkeys(("extractive-question-answering", "question-answering", "question_ans", "span"), "span"),
}
TEMPLATES = ("plain", "chatml", "raw")           # the chat templates that ship


class NotSupported(WrongUse):
    """A key has a value that a recipe has no counterpart for; going on without it would train something else."""

    def __init__(self, key: str, value: Any, why: str):
        super().__init__(f"{key}={value!r} is not supported: {why}", keys=(key,))
        self.key, self.value, self.why = key, value, why


def _optimizer(value: Any) -> Answer:
    name = str(value).lower().rpartition(".")[2]
    if name not in OPTIMIZERS:
        raise NotSupported("optim", value, f"use one of {', '.join(OPTIMIZERS)}")
    return dict(OPTIMIZERS[name]), WHY_OPTIMIZERS.get(name, "")


def _optimizer_name(value: Any) -> Answer:
    """The recipe's own key: only names that others alone have are converted."""
    foreign = isinstance(value, str) and value in OPTIMIZERS and value not in OUR_OPTIMIZERS
    return _optimizer(value) if foreign else ({"optimizer.name": value}, "")


def _switched_optimizer(name: str) -> Conversion:
    """Switches of their own for an optimizer: Hugging Face's `adafactor`, LLaMA-Factory's `use_muon`."""
    return lambda value: (dict(OPTIMIZERS[name]), WHY_OPTIMIZERS.get(name, "")) if value is True else ({}, "it is off")


def _mixed_precision(value: Any) -> Answer:
    if value in ("no", "fp32", False, None):
        return {"techniques.bf16": "off", "techniques.fp16": "off"}, ""
    if value not in ("bf16", "fp16"):
        raise NotSupported("mixed_precision", value, "use bf16, fp16 or no")
    return {f"techniques.{value}": "on"}, ""


def _no_checkpointing(value: Any) -> Answer:
    return ({"techniques.activation_checkpointing": "off"}, "") if value is True else ({}, "the plan decides about it")


def _warmup(value: Any) -> Answer:
    if isinstance(value, float) and 0 < value < 1:
        return {"warmup_ratio": value}, "a number below 1 is a share of the run"
    return {"warmup_steps": _whole(value)}, ""


def _whole(value: Any) -> Any:
    """Return 500 for 500.0; anything else stays as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _schedule(value: Any) -> Answer:
    if not isinstance(value, str) or value not in SCHEDULES:
        raise NotSupported("lr_scheduler_type", value, "use 'cosine', 'linear' or 'constant'")
    return {"lr_scheduler_type": SCHEDULES[value]}, ""


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


def _max_steps(value: Any) -> Answer:
    """Hugging Face writes -1 for a run whose length num_train_epochs decides."""
    return {"max_steps": None if value == -1 else value}, ""


def _steps(ours: str) -> Conversion:
    def convert(value: Any) -> Answer:
        if isinstance(value, float) and 0 < value < 1:
            raise NotSupported(ours, value, "a share of the run has no counterpart; write a number of steps, or '0.5 epochs'")
        return {ours: _whole(value)}, ""
    return convert


def _in_epochs(ours: str) -> Conversion:
    """Some trainers' files count these intervals in epochs."""
    return lambda value: ({ours: f"{value} epochs" if isinstance(value, (int, float)) and value else value}, "")


def _targets(value: Any) -> Answer:
    """LLaMA-Factory writes `all`, or names with commas; PEFT a list or `all-linear`."""
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


def _all_linear(value: Any) -> Answer:
    return {"lora.target_modules": "all-linear"} if value else {}, "" if value else "lora.target_modules names the layers"


def _source(value: Any) -> Answer:
    """LLaMA-Factory separates sources with commas; Axolotl lists tables."""
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


def _held_out(value: Any) -> Answer:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1:
        raise NotSupported("val_size", value, "data.validation_share is a share below 1; write the share, or name the held-out "
                           "rows with data.validation_source")
    return {"data.validation_share": value}, ""


def _task(value: Any) -> Answer:
    if value is None:
        return {"model.task": None}, ""
    word = str(value).lower()
    if word in ("summarization", "summarisation"):
        return {}, "the model's config.json tells what it computes"
    if word not in TASKS:
        raise NotSupported("task", value, "write model.task: causal, seq2seq or span")
    return {"model.task": TASKS[word]}, ""


def _provider(value: Any) -> Answer:
    if str(value).lower() in ("huggingface", "hf"):
        return {}, "a Hugging Face model trains in the native decoder if it has the architecture, and otherwise in transformers"
    return {"model.provider": value}, ""


def _unsloth(value: Any) -> Answer:
    return ({"model.provider": "unsloth"}, "") if value else ({}, "the model's architecture decides who computes it")


def _template(value: Any) -> Answer:
    if value in (None, "tokenizer_default"):
        return {}, "the tokenizer's own chat template is the default"
    if value in TEMPLATES or (isinstance(value, str) and "{" not in value and (
            "/" in value or value.endswith((".jinja", ".jinja2")))):
        return {"data.chat_template": value}, ""
    return {}, ("the tokenizer's own chat template is used; name another template's file with data.chat_template, and look at "
                "the result with `powertrain data show`")


def _long_examples(value: Any) -> Answer:
    if value not in ("drop", "truncate"):
        raise NotSupported("excess_length_strategy", value, "write data.long_examples: cut or drop")
    return {"data.long_examples": {"drop": "drop", "truncate": "cut"}[value]}, ""


def _roles(value: Any) -> Answer:
    roles = value if isinstance(value, list) else [value]
    if not all(role in ("assistant", "gpt", "model") for role in roles):
        raise NotSupported("roles_to_train", value, "write data.train_on: assistant or all")
    return {"data.train_on": "assistant"}, ""


def _plugins(value: Any) -> Answer:
    """Axolotl's plugins for kernels compute the same as before."""
    names = [str(name) for name in (value if isinstance(value, list) else [value]) if name]
    foreign = [name for name in names if not any(word in name.lower() for word in ("liger", "cut_cross_entropy"))]
    if foreign:
        raise NotSupported("plugins", value, f"the plugin {foreign[0]} is not available; take it out")
    return {}, "the plan chooses the kernels; `powertrain plan` lists them with their reasons"


def _model(value: Any) -> Answer:
    return {"model.path" if isinstance(value, str) else "model": value}, ""


CONVERSIONS: Mapping[str, Conversion] = {
    "eval_epochs": _in_epochs("eval_steps"), "save_epochs": _in_epochs("save_steps"), "eval_steps": _steps("eval_steps"),
    "save_steps": _steps("save_steps"), "logging_steps": _steps("logging_steps"), "max_steps": _max_steps, "warmup": _warmup,
    "schedule": _schedule, "schedule_options": _schedule_options, "betas": _betas, "optimizer": _optimizer,
    "optimizer name": _optimizer_name, "adafactor": _switched_optimizer("adafactor"), "muon": _switched_optimizer("muon"),
    "mixed_precision": _mixed_precision, "no_checkpointing": _no_checkpointing, "model": _model, "provider": _provider,
    "unsloth": _unsloth, "task": _task, "targets": _targets, "all_linear": _all_linear, "source": _source,
    "held_out": _held_out, "template": _template, "long_examples": _long_examples, "roles": _roles, "plugins": _plugins,
}
