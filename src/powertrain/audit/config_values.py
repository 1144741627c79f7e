"""Values of configs whose meaning is more than their key: what they say in the audit's names (the vocabulary's `name()`)."""

from collections.abc import Callable, Mapping
from typing import Any

from powertrain.recipe.conversions import listed
from powertrain.recipe.vocabulary import find

Told = tuple[str, Any]                       # (key of the audit, value)
Read = Callable[[str, Any], list[Told]]      # of the file's key and its value

PEFT, FOUR_BITS, TARGETS = "training.use_peft", "quantisation.load_in_4bit", "lora.target_modules"
ANSWERS, KERNEL = "training.assistant_only_loss", "model.attn_implementation"
HALF = {"bfloat16": "bf16", "float16": "fp16", "bf16": "bf16", "fp16": "fp16"}
KERNELS = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "disabled": "eager", "auto": None}
SWITCHED_KERNELS = {"flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
                    "xformers_attention": "xformers", "flex_attention": "flex_attention",
                    "use_flash_attention": "flash_attention_2"}
OPTIMIZER_PINS = {"fused_adamw": ("adamw_torch_fused", "adamw_torch"), "eight_bit_adamw": ("adamw_8bit", None),
                  "paged_adamw": ("paged_adamw_32bit", None)}
TORCHTUNE_DATA = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
TORCHTUNE_TARGETS = {"output_proj": "o_proj"}
TORCHTUNE_MLP = ["gate_proj", "up_proj", "down_proj"]


def switched(value: Any) -> Any:
    """Return a pin as the switch that other trainers have: True for on, False for off."""
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


def _sampling(key: str, value: Any) -> list[Told]:
    switch = switched(value)
    named = ("group_by_length" if switch else "random") if isinstance(switch, bool) else switch
    return [("training.train_sampling_strategy", named)]


def _recipe_method(key: str, value: Any) -> list[Told]:
    told: list[Told] = [("training.method", value)]
    if value in ("lora", "qlora", "full"):
        told.append((PEFT, value != "full"))
    return told + ([(FOUR_BITS, value == "qlora")] if value != "scratch" else [])


def _comma_list(key: str, value: Any) -> list[Told]:
    parts = listed(value) if isinstance(value, str) else value
    return [("data.source", parts[0] if isinstance(parts, list) and len(parts) == 1 else parts)]


def _dataset_mixer(key: str, value: Any) -> list[Told]:
    """The alignment handbook's datasets by name, each with the share of its rows that is used."""
    whole = isinstance(value, dict) and all(share == 1 for share in value.values())
    names = list(value) if whole else []
    return [("data.source", names[0] if len(names) == 1 else names) if names else ("training.dataset_mixture", value)]


def _plugins(key: str, value: Any) -> list[Told]:
    names = [str(name) for name in (value if isinstance(value, list) else [value]) if name]
    others = [name for name in names if "liger" not in name.lower()]
    told: list[Told] = [("training.use_liger_kernel", True)] if len(others) < len(names) else []
    return told + ([("training.plugins", others)] if others or not told else [])


def _axolotl_datasets(key: str, value: Any) -> list[Told]:
    """Several tables, each with a path; the values of a single table stand alone."""
    tables = [part if isinstance(part, dict) else {"path": part} for part in (value if isinstance(value, list) else [value])]
    tables = [table for table in tables if table.get("path") is not None]
    if not tables:
        return [("data.source", None)]
    sources = [table.get("data_files") or table["path"] for table in tables]
    told: list[Told] = [("data.source", sources[0] if len(sources) == 1 else sources)]
    called = {"type": "format", "split": "split", "name": "config"}
    for part in dict.fromkeys(part for table in tables for part in table if part not in ("path", "data_files", "ds_type")):
        each = [table.get(part) for table in tables]
        told.append((f"data.{called.get(part, part)}", each[0] if len(set(map(str, each))) == 1 else each))
    return told


def _enabled_datasets(key: str, value: Any) -> list[Told]:
    """The enabled ones of document 003's table of datasets by name."""
    tables = [table for table in (value.values() if isinstance(value, dict) else []) if isinstance(table, dict)]
    on = [table for table in tables if table.get("enabled", True) and table.get("path")]
    if not on:
        return [("data.source", None)]
    told: list[Told] = [("data.source", on[0]["path"] if len(on) == 1 else [table["path"] for table in on])]
    limits = [table.get("max_chars") for table in on]
    return told + ([("data.max_chars", limits[0] if len(set(map(str, limits))) == 1 else limits)] if any(limits) else [])


def _recipe_optimizer(key: str, value: Any) -> list[Told]:
    on, off = OPTIMIZER_PINS[key.partition(".")[2]]
    named = {True: on, False: off}.get(switched(value)) if isinstance(switched(value), bool) else None
    return [("training.optim", named) if named else (key, value)]


def _component(value: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of the function that builds a part, and its arguments."""
    table = value if isinstance(value, dict) else {}
    name = str(table.get("_component_", "")).rpartition(".")[2]
    return name, {key: each for key, each in table.items() if key != "_component_"}


def _torchtune_model(key: str, value: Any) -> list[Told]:
    """`lora_llama3_2_1b` with its ranks and modules; other builders train in full."""
    name, said = _component(value)
    if not name.startswith(("lora_", "qlora_", "dora_", "qdora_")):
        return [(PEFT, False), *((f"training.model.{part}", each) for part, each in said.items())]
    told: list[Told] = [(PEFT, True), (FOUR_BITS, name.startswith("q"))]
    modules = said.pop("lora_attn_modules", None) or []
    modules = [TORCHTUNE_TARGETS.get(str(module), module) for module in modules] if isinstance(modules, list) else [modules]
    modules += TORCHTUNE_MLP if said.pop("apply_lora_to_mlp", False) else []
    modules += ["lm_head"] if said.pop("apply_lora_to_output", False) else []
    names = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_dora": "use_dora"}
    told += [(TARGETS, modules), *([("lora.use_dora", True)] if name.startswith(("dora_", "qdora_")) else [])]
    return told + [(f"lora.{names[part]}" if part in names else f"training.model.{part}", each) for part, each in said.items()]


def _torchtune_dataset(key: str, value: Any) -> list[Told]:
    name, said = _component(value)
    if name not in TORCHTUNE_DATA and "source" not in said:
        return [("data.source", None), ("data.builder", name or value)]
    called = {"packed": "training.packing", "split": "data.split", "max_seq_len": "training.max_length"}
    learns_prompts = said.pop("train_on_input", name in TORCHTUNE_DATA)      # alpaca's builders learn prompts too
    return [("data.source", said.pop("source", None) or TORCHTUNE_DATA[name]),
            (ANSWERS, not learns_prompts),
            *((called.get(part, f"data.{part}"), each) for part, each in said.items())]


def _torchtune_optimizer(key: str, value: Any) -> list[Told]:
    name, said = _component(value)
    called = {"lr": "learning_rate", "eps": "adam_epsilon"}
    fused = said.pop("fused", None)
    return [("training.optim", "adamw_torch_fused" if name == "AdamW" and fused is True else name or value),
            *((f"training.{called.get(part, part)}" if part != "betas" else "optimizer.betas", each)
              for part, each in said.items())]


def _torchtune_schedule(key: str, value: Any) -> list[Told]:
    name, said = _component(value)
    kind = "cosine" if name == "get_cosine_schedule_with_warmup" else name or value
    return [("training.lr_scheduler_type", kind),
            *((f"training.{'warmup_steps' if part == 'num_warmup_steps' else part}", each) for part, each in said.items())]


# the vocabulary's readers: what a key of a file with this value says in the audit's names
READERS: Mapping[str, Read] = {
    # transformers 4's switch `group_by_length`, and a recipe's pin of length_grouping
    "sampling()": _sampling, "recipe_grouping()": _sampling,
    # Axolotl's `lora`, `qlora`, or nothing for training in full
    "adapter()": lambda key, value: [(PEFT, True), (FOUR_BITS, True)] if value == "qlora" else [
        (PEFT, bool(value)) if value in ("lora", None, "") else ("training.adapter", value)],
    "method()": lambda key, value: [(PEFT, value == "lora") if value in ("lora", "full") else
                                    ("training.finetuning_type", value)],
    "recipe_method()": _recipe_method,
    "bits()": lambda key, value: [(f"quantisation.load_in_{value}bit", True) if value in (4, 8) else
                                  ("quantisation.bits", value)],
    "all_linear()": lambda key, value: [(TARGETS, "all-linear") if value is True else ("lora.target_linear", value)],
    "targets()": lambda key, value: [(TARGETS, "all-linear" if value == "all" else
                                      listed(value) if isinstance(value, str) else value)],
    "comma_list()": _comma_list, "dataset_mixer()": _dataset_mixer,
    # LLaMA-Factory's pre-training learns every token
    "stage()": lambda key, value: [("training.stage", value), *([(ANSWERS, False)] if value == "pt" else [])],
    "answers_only()": lambda key, value: [(ANSWERS, not value if isinstance(value, bool) else None)],
    "train_on()": lambda key, value: [(ANSWERS, value == "assistant" if value in ("assistant", "all") else value)],
    "padding()": lambda key, value: [("data.padding", None if value is None else "max_length" if value else "longest")],
    "attention()": lambda key, value: [(KERNEL, KERNELS.get(value, value) if isinstance(value, str) else value)],
    "attention_switch()": lambda key, value: [(KERNEL, SWITCHED_KERNELS[key]) if value is True else (f"training.{key}", value)],
    "no_checkpointing()": lambda key, value: [("training.activation_checkpointing", False) if value is True else
                                              (f"training.{key}", value)],
    # `bfloat16: true` holds the whole model in that type, without autocast
    "whole_dtype()": lambda key, value: [("model.dtype", key) if value is True else (f"training.{key}", value)],
    "plugins()": _plugins, "axolotl_datasets()": _axolotl_datasets, "enabled_datasets()": _enabled_datasets,
    "recipe_optimizer()": _recipe_optimizer,
    # `dtype: bf16` of torchtune and nanoGPT
    "dtype()": lambda key, value: [(f"training.{HALF[str(value)]}", True) if str(value) in HALF else ("model.dtype", value)],
    # nanoGPT's learning rate falls as a cosine, or stays; its `init_from: gpt2-xl` names a pretrained model
    "decay()": lambda key, value: [("training.lr_scheduler_type", "cosine" if value else "constant")],
    "start()": lambda key, value: [("model.path" if str(value).startswith("gpt2") else f"training.{key}", value)],
    "torchtune_model()": _torchtune_model, "torchtune_dataset()": _torchtune_dataset,
    "torchtune_tokenizer()": lambda key, value: [("training.tokenizer", _component(value)[1].get("path")),
                                                 ("training.max_length", _component(value)[1].get("max_seq_len"))],
    "torchtune_checkpointer()": lambda key, value: [("model.path", _component(value)[1].get("checkpoint_dir"))],
    "torchtune_optimizer()": _torchtune_optimizer, "torchtune_schedule()": _torchtune_schedule,
    "torchtune_loss()": lambda key, value: [("training.loss" if "crossentropy" in _component(value)[0].lower() else
                                             "training.loss_type", _component(value)[0] or value)],
}


def vocabulary(key: str, value: Any) -> tuple[str, Any]:
    """Return the key of subject.py and its value, for an argument as a script spells it: `training.group_by_length`."""
    section, _, leaf = key.partition(".")
    if leaf == "pretrained_model_name_or_path":
        return f"{section}.path", value
    if key == "model.use_flash_attention_2":
        return KERNEL, "flash_attention_2" if value else "sdpa"
    row = find(leaf, "trl") if section in ("training", "model") else None
    if row is None:
        return key, value
    name, said = READERS[row.audit](leaf, value)[0] if row.audit in READERS else (row.audit, value)
    return (name, said) if name.startswith(f"{section}.") else (key, value)
