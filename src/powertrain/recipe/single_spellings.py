"""Spellings whose value changes with their name, one function each: value -> (our keys, why, where there is more to say)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from powertrain.recipe.spelling_tables import NO_EFFECT, PREFERENCE

Answer = tuple[dict[str, Any], str]
Single = Callable[[Any], Answer]

OPTIMIZERS: Mapping[str, dict[str, Any]] = {
    "adamw_torch": {"techniques.fused_adamw": "off"}, "adamw_torch_fused": {"techniques.fused_adamw": "on"},
    "paged_adamw": {"techniques.paged_adamw": "on"}, "paged_adamw_32bit": {"techniques.paged_adamw": "on"},
    "adamw_8bit": {"techniques.eight_bit_adamw": "on"}, "adamw_bnb_8bit": {"techniques.eight_bit_adamw": "on"},
    "paged_adamw_8bit": {"techniques.eight_bit_adamw": "on"},
}
TASKS = {
    "text-generation": "causal", "causal_lm": "causal", "causal": "causal", "seq_2_seq_lm": "seq2seq", "seq2seq": "seq2seq",
    "text2text-generation": "seq2seq", "extractive-question-answering": "span", "question-answering": "span",
    "question_ans": "span", "span": "span",
}
TEMPLATES = ("plain", "chatml", "raw")           # those that ship


def _optimizer(value: Any) -> Answer:
    if value not in OPTIMIZERS:
        raise ValueError(f"optim={value!r} is not available; the optimizer is AdamW, with or without one fused kernel, with "
                         f"32 or 8 bits (optim is one of {', '.join(OPTIMIZERS)})")
    paged = "the moments have 8 bits, and are not paged besides" if value == "paged_adamw_8bit" else ""
    return dict(OPTIMIZERS[value]), paged


def _mixed_precision(value: Any) -> Answer:
    if value in ("no", "fp32", False, None):
        return {"techniques.bf16": "off", "techniques.fp16": "off"}, ""
    return {f"techniques.{value}": "on"}, ""


def _warmup(value: Any) -> Answer:
    """transformers 5: a share of the run if it is below 1."""
    if isinstance(value, float) and 0 < value < 1:
        return {"warmup_ratio": value}, "below 1 it is a share of the run"
    return {"warmup_steps": int(value) if isinstance(value, float) and value.is_integer() else value}, ""


def _schedule(value: Any) -> Answer:
    return {"lr_scheduler_type": "constant" if value == "constant_with_warmup" else value}, ""


def _steps(ours: str) -> Single:
    """An interval in steps; Hugging Face also takes a share of the run, which says something else for each length."""
    def read(value: Any) -> Answer:
        if isinstance(value, float) and 0 < value < 1:
            raise ValueError(f"{ours}={value} is a share of the run; write a number of steps, or epochs such as '0.5 epochs'")
        return {ours: value}, ""
    return read


def _in_epochs(ours: str) -> Single:
    """Document 003 counts these intervals in epochs."""
    return lambda value: ({ours: f"{value} epochs" if isinstance(value, (int, float)) and value else value}, "")


def _targets(value: Any) -> Answer:
    """Linears with adapters: LLaMA-Factory writes `all`, or names with commas; PEFT a list or `all-linear`."""
    if value is None or value == "all":
        return ({"lora.target_modules": "all-linear"} if value else {}), "" if value else "the default is all-linear"
    if isinstance(value, str) and value != "all-linear":
        names = [name.strip() for name in value.split(",") if name.strip()]
        return {"lora.target_modules": names}, ""
    return {"lora.target_modules": value}, ""


def _all_linear(value: Any) -> Answer:
    return {"lora.target_modules": "all-linear"} if value else {}, "" if value else "lora.target_modules names the linears"


def _source(value: Any) -> Answer:
    """One source or several: LLaMA-Factory separates them with commas, Axolotl lists tables."""
    if isinstance(value, str):
        names = [name.strip() for name in value.split(",") if name.strip()]
        return {"data.source": names if len(names) > 1 else value}, ""
    if not isinstance(value, list) or not value:
        raise ValueError(f"dataset={value!r} names no data; write data.source: a path, a hub id, or a list of them")
    parts = [_part(part) for part in value]
    splits = {split for _, split in parts if split is not None}
    if len(splits) > 1:
        raise ValueError(f"the datasets have different splits ({', '.join(sorted(splits))}); one data.split serves all, so "
                         "write the files of each split as sources")
    sources = [source for source, _ in parts]
    renamed: dict[str, Any] = {"data.source": sources if len(sources) > 1 else sources[0]}
    typed = any(isinstance(part, dict) and "type" in part for part in value)
    why = "how the rows are read is found by looking at them; name it with data.format" if typed else ""
    return renamed | ({"data.split": splits.pop()} if splits else {}), why


def _part(part: Any) -> tuple[str, str | None]:
    """(source, split) of one entry of Axolotl's `datasets`."""
    if isinstance(part, str):
        return part, None
    if not isinstance(part, dict) or not isinstance(part.get("path"), str):
        raise ValueError(f"datasets has an entry without a path: {part!r}; write data.source: a path, a hub id, or a list")
    unknown = set(part) - {"path", "type", "ds_type", "data_files", "split"}
    if unknown:
        raise ValueError(f"datasets: {', '.join(sorted(map(str, unknown)))} of {part['path']} has no counterpart here; name "
                         "the columns with data.columns and the format with data.format")
    return str(part.get("data_files") or part["path"]), part.get("split")


def _held_out(value: Any) -> Answer:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 1:
        raise ValueError(f"{value} held-out rows were asked for, and data.validation_share is a share below 1; write "
                         "the share, or name the rows with data.validation_source")
    return {"data.validation_share": value}, ""


def _task(value: Any) -> Answer:
    if value is None:
        return {"model.task": None}, ""
    word = str(value).lower()
    if word in ("summarization", "summarisation"):
        return {}, "what the model computes is read off its config.json, and the columns say what is summarised"
    if word not in TASKS:
        raise ValueError(f"task={value!r} is not available; write model.task: causal, seq2seq or span")
    return {"model.task": TASKS[word]}, ""


def _provider(value: Any) -> Answer:
    if str(value).lower() in ("huggingface", "hf"):
        return {}, ("a Hugging Face model trains in the decoder here where it has the architecture, and through transformers "
                    "elsewhere")
    return {"model.provider": value}, ""


def _unsloth(value: Any) -> Answer:
    return ({"model.provider": "unsloth"}, "") if value else ({}, "model.provider is chosen by what the model needs")


def _template(value: Any) -> Answer:
    if value in (None, "tokenizer_default"):
        return {}, "the tokenizer's own chat template is the default"
    if value in TEMPLATES or (isinstance(value, str) and ("/" in value or value.endswith((".jinja", ".jinja2")))):
        return {"data.chat_template": value}, ""
    return {}, ("the tokenizer's own chat template is used; name another one's file with data.chat_template, and look at the "
                "result with `powertrain data show`")


def _only(name: str, fine: tuple[Any, ...], why: str, otherwise: str) -> Single:
    """A key that has no effect with the values that are `fine`, and is an error with others."""
    def read(value: Any) -> Answer:
        if value is None or value in fine:
            return {}, why
        raise ValueError(f"{name}={value!r} cannot be had here: {otherwise}")
    return read


def _roles(value: Any) -> Answer:
    roles = set(value) if isinstance(value, list) else {value}
    if not roles <= {"assistant", "gpt", "model"}:
        raise ValueError(f"roles_to_train={value!r} is not available; write data.train_on: assistant or all")
    return {"data.train_on": "assistant"}, ""


def _plugins(value: Any) -> Answer:
    foreign = [name for name in (value if isinstance(value, list) else [value]) if name and "liger" not in str(name).lower()]
    if foreign:
        raise ValueError(f"the plugin {foreign[0]} is not available; take it out of plugins")
    return {}, NO_EFFECT["use_liger_kernel"]


def _model(value: Any) -> Answer:
    return {"model.path" if isinstance(value, str) else "model": value}, ""


SINGLE: Mapping[str, Single] = {
    "eval_interval": _in_epochs("eval_steps"), "save_interval": _in_epochs("save_steps"),
    "eval_steps": _steps("eval_steps"), "save_steps": _steps("save_steps"), "logging_steps": _steps("logging_steps"),
    "warmup_steps": _warmup, "warmup": _warmup, "warmup_iters": _warmup, "num_warmup_steps": _warmup,
    "lr_scheduler_type": _schedule, "lr_scheduler": _schedule, "scheduler": _schedule,
    "mixed_precision": _mixed_precision, "optim": _optimizer, "optimizer": _optimizer,
    "model": _model, "provider": _provider, "model.provider": _provider, "use_unsloth": _unsloth,
    "task": _task, "task_type": _task, "model.task": _task,
    "lora.target_modules": _targets, "lora_target_modules": _targets, "target_modules": _targets, "lora_target": _targets,
    "lora_target_linear": _all_linear,
    "dataset": _source, "datasets": _source, "val_split": _held_out, "eval_split": _held_out, "val_set_size": _held_out,
    "val_size": _held_out, "split_dataset_ratio": _held_out, "test_size": _held_out,
    "template": _template, "chat_template": _template, "chat_template_path": _template, "roles_to_train": _roles,
    "plugins": _plugins,
    "stage": _only("stage", ("sft", "pt"), "what is learned follows from the data: conversations, pairs or text", PREFERENCE),
    "train_on_eos": _only("train_on_eos", ("turn", "all"), "the token that ends a learned turn is always learned",
                          "the token that ends a learned turn is always learned; leave it out"),
    "quantization_method": _only("quantization_method", ("bitsandbytes", "bnb", "bnb_4bit"), "4-bit bases are bitsandbytes'",
                                 "4-bit bases are bitsandbytes'; leave it out"),
    "lora_bias": _only("lora_bias", ("none", False), "no bias is trained beside adapters",
                       "no bias is trained beside adapters; leave it out"),
    "init_lora_weights": _only("init_lora_weights", (True, "default"), "adapters start at zero",
                               "adapters start at zero; leave it out"),
    "packing_strategy": _only("packing_strategy", ("bfd",), "packs are filled best-fit within the optimizer step",
                              "packs are filled best-fit and no example is cut for it, which would train something else; "
                              "leave it out"),
}
