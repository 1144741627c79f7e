"""What a key and its value say in the audit's names, as a trainer's config or a script spells them.

recipe/vocabulary.md has the audit's name of every key, and what single values say. Here are the readers of lists and tables.
"""

from collections.abc import Callable, Mapping
from typing import Any

from powertrain.recipe.conversions import by_value, listed
from powertrain.recipe.vocabulary import find, values

Told = tuple[str, Any]                       # (key of the audit, value)

PEFT, FOUR_BITS, TARGETS = "training.use_peft", "quantisation.load_in_4bit", "lora.target_modules"
TORCHTUNE_DATA = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
TORCHTUNE_TARGETS = {"output_proj": "o_proj"}
TORCHTUNE_MLP = ["gate_proj", "up_proj", "down_proj"]
TORCHTUNE_LORA = {"lora_rank": "lora.r", "lora_alpha": "lora.lora_alpha", "lora_dropout": "lora.lora_dropout",
                  "use_dora": "lora.use_dora"}


def _comma_list(value: Any) -> list[Told]:
    parts = listed(value) if isinstance(value, str) else value
    return [("data.source", parts[0] if isinstance(parts, list) and len(parts) == 1 else parts)]


def _dataset_mixer(value: Any) -> list[Told]:
    """Return the alignment handbook's datasets as sources, or the mixture as it stands if it uses a part of their rows."""
    whole = isinstance(value, dict) and all(share == 1 for share in value.values())
    names = list(value) if whole else []
    return [("data.source", names[0] if len(names) == 1 else names) if names else ("training.dataset_mixture", value)]


def _plugins(value: Any) -> list[Told]:
    names = [str(name) for name in (value if isinstance(value, list) else [value]) if name]
    others = [name for name in names if "liger" not in name.lower()]
    told: list[Told] = [("training.use_liger_kernel", True)] if len(others) < len(names) else []
    return told + ([("training.plugins", others)] if others or not told else [])


def _axolotl_datasets(value: Any) -> list[Told]:
    """Return the settings of Axolotl's dataset tables: one value for a key on which all tables agree, else a list."""
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


def _enabled_datasets(value: Any) -> list[Told]:
    """Return the enabled datasets of document 003's table of datasets by name."""
    tables = [table for table in (value.values() if isinstance(value, dict) else []) if isinstance(table, dict)]
    on = [table for table in tables if table.get("enabled", True) and table.get("path")]
    if not on:
        return [("data.source", None)]
    told: list[Told] = [("data.source", on[0]["path"] if len(on) == 1 else [table["path"] for table in on])]
    limits = [table.get("max_chars") for table in on]
    return told + ([("data.max_chars", limits[0] if len(set(map(str, limits))) == 1 else limits)] if any(limits) else [])


def _component(value: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of the function that builds a part, and its arguments."""
    table = value if isinstance(value, dict) else {}
    name = str(table.get("_component_", "")).rpartition(".")[2]
    return name, {key: each for key, each in table.items() if key != "_component_"}


def _named(said: Mapping[str, Any], section: str, names: Mapping[str, str]) -> list[Told]:
    """Return a part's arguments by the audit's names, those without one in a section."""
    return [(names.get(part, f"{section}.{part}"), each) for part, each in said.items()]


def _torchtune_model(value: Any) -> list[Told]:
    """Return the adapter settings of a builder such as `lora_llama3_2_1b`; other torchtune builders train in full."""
    name, said = _component(value)
    if not name.startswith(("lora_", "qlora_", "dora_", "qdora_")):
        return [(PEFT, False), *_named(said, "training.model", {})]
    modules = said.pop("lora_attn_modules", None) or []
    modules = [TORCHTUNE_TARGETS.get(str(module), module) for module in modules] if isinstance(modules, list) else [modules]
    modules += TORCHTUNE_MLP if said.pop("apply_lora_to_mlp", False) else []
    modules += ["lm_head"] if said.pop("apply_lora_to_output", False) else []
    dora: list[Told] = [("lora.use_dora", True)] if name.startswith(("dora_", "qdora_")) else []
    return [(PEFT, True), (FOUR_BITS, name.startswith("q")), (TARGETS, modules), *dora,
            *_named(said, "training.model", TORCHTUNE_LORA)]


def _torchtune_dataset(value: Any) -> list[Told]:
    name, said = _component(value)
    if name not in TORCHTUNE_DATA and "source" not in said:
        return [("data.source", None), ("data.builder", name or value)]
    learns_prompts = said.pop("train_on_input", name in TORCHTUNE_DATA)      # alpaca's builders learn prompts too
    column, style = said.pop("conversation_column", None), said.pop("conversation_style", None)
    turns: list[Told] = [] if column is None and style is None else [
        ("data.format", "chat_template"), ("data.field_messages", column or "conversations"),
        *([("data.message_property_mappings", {"role": "from", "content": "value"})] if style == "sharegpt" else [])]
    return [("data.source", said.pop("source", None) or TORCHTUNE_DATA[name]), *turns,
            ("training.assistant_only_loss", not learns_prompts),
            *_named(said, "data", {"packed": "training.packing", "max_seq_len": "training.max_length"})]


def _torchtune_optimizer(value: Any) -> list[Told]:
    name, said = _component(value)
    fused = said.pop("fused", None)
    called = {"lr": "training.learning_rate", "eps": "training.adam_epsilon", "betas": "optimizer.betas"}
    return [("training.optim", "adamw_torch_fused" if name == "AdamW" and fused is True else name or value),
            *_named(said, "training", called)]


def _torchtune_schedule(value: Any) -> list[Told]:
    name, said = _component(value)
    kind = "cosine" if name == "get_cosine_schedule_with_warmup" else name or value
    return [("training.lr_scheduler_type", kind), *_named(said, "training", {"num_warmup_steps": "training.warmup_steps"})]


# the vocabulary's readers of lists and tables; of single values its table of values says what they are in the audit's names
READERS: Mapping[str, Callable[[Any], list[Told]]] = {
    "targets()": lambda value: [(TARGETS, "all-linear" if value == "all" else
                                 listed(value) if isinstance(value, str) else value)],
    "comma_list()": _comma_list, "dataset_mixer()": _dataset_mixer, "plugins()": _plugins,
    "axolotl_datasets()": _axolotl_datasets, "enabled_datasets()": _enabled_datasets,
    "torchtune_model()": _torchtune_model, "torchtune_dataset()": _torchtune_dataset,
    "torchtune_tokenizer()": lambda value: [("training.tokenizer", _component(value)[1].get("path")),
                                            ("training.max_length", _component(value)[1].get("max_seq_len"))],
    "torchtune_checkpointer()": lambda value: [("model.path", _component(value)[1].get("checkpoint_dir"))],
    "torchtune_optimizer()": _torchtune_optimizer, "torchtune_schedule()": _torchtune_schedule,
    "torchtune_loss()": lambda value: [("training.loss" if "crossentropy" in _component(value)[0].lower() else
                                        "training.loss_type", _component(value)[0] or value)],
}


def told(key: str, value: Any, trainer: str | None) -> list[Told]:
    """Return what a key of a file says, as this trainer or as anybody spells it."""
    row = find(key, trainer)
    if row is None:
        return [(f"training.{key}", value)]
    if row.audit in READERS:
        return READERS[row.audit](value)
    if row.audit in values():
        return list(by_value(row.audit, key, value)[0].items())
    return [(row.audit[:-1] + key.removeprefix(row.key[:-1]) if row.audit.endswith("*") else row.audit, value)]


def vocabulary(key: str, value: Any) -> Told:
    """Return the key of subject.py and its value, for an argument as a script spells it: `training.group_by_length`."""
    section, _, leaf = key.partition(".")
    if leaf == "pretrained_model_name_or_path":
        return f"{section}.path", value
    if key == "model.use_flash_attention_2":
        return "model.attn_implementation", "flash_attention_2" if value else "sdpa"
    said = told(leaf, value, "trl")[0] if section in ("training", "model") else (key, value)
    return said if said[0].startswith(f"{section}.") else (key, value)
