"""Powertrain's own recipes: what they say, under the names of the shared vocabulary."""

from __future__ import annotations

from typing import Any

from powertrain.audit.configs.format import Format, Read, Told, names
from powertrain.audit.configs.marked import Marked
from powertrain.audit.configs.vocabulary import in_section, strategy
from powertrain.recipe import spellings
from powertrain.recipe.resolve import known_keys

RENAMED = {
    "lora.r": "lora.r", "lora.alpha": "lora.lora_alpha", "lora.dropout": "lora.lora_dropout",
    "quantisation.type": "quantisation.bnb_4bit_quant_type", "quantisation.double": "quantisation.bnb_4bit_use_double_quant",
    "data.max_length": "training.max_length", "data.chat_template": "tokenizer.chat_template",
    "data.end_token": "tokenizer.eos_token", "data.tokenizer": "tokenizer.path", "data.block": "training.max_length",
    "model.layers": "model.num_hidden_layers", "model.width": "model.hidden_size", "model.heads": "model.num_attention_heads",
    "model.kv_heads": "model.num_key_value_heads", "model.mlp_width": "model.intermediate_size",
    "model.context": "model.max_position_embeddings", "model.vocabulary": "model.vocab_size", "name": "training.run_name",
    "warmup_ratio": "training.warmup_steps",
    "techniques.bf16": "training.bf16", "techniques.fp16": "training.fp16", "techniques.tf32": "training.tf32",
    "techniques.activation_checkpointing": "training.activation_checkpointing",
    "techniques.torch_compile": "training.torch_compile", "techniques.packing": "training.packing",
    "techniques.loader.workers": "training.dataloader_num_workers",
    "techniques.loader.pinned": "training.dataloader_pin_memory",
    "techniques.loader.ahead": "training.dataloader_prefetch_factor",
    "techniques.threads.threads": "environment.OMP_NUM_THREADS",
    "techniques.micro_batch.examples": "training.per_device_train_batch_size",
}
OPTIMIZERS = {"fused_adamw": ("adamw_torch_fused", "adamw_torch"), "eight_bit_adamw": ("adamw_8bit", None),
              "paged_adamw": ("paged_adamw_32bit", None)}


def switched(value: Any) -> Any:
    """A pin as the switch that other trainers have: on is true, off is false."""
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


def _method(value: Any) -> list[Told]:
    told: list[Told] = [("training.method", value)]
    if value in ("lora", "qlora", "full"):
        told.append(("training.use_peft", value != "full"))
    return told + ([("quantisation.load_in_4bit", value == "qlora")] if value != "scratch" else [])


def _optimizer(name: str) -> Read:
    on, off = OPTIMIZERS[name]
    return lambda value: ("training.optim", on) if switched(value) is True else ("training.optim", off) \
        if off and switched(value) is False else (f"techniques.{name}", value)


def _renamed_switch(key: str) -> Read:
    return lambda value: (RENAMED[key], switched(value))


def _train_on(value: Any) -> Told:
    return "training.assistant_only_loss", {"assistant": True, "all": False}.get(value, value)


def _grouping(value: Any) -> Told:
    return "training.train_sampling_strategy", strategy(switched(value))


def _text(section: str) -> Read:
    """`data: PATH` and `model: PATH` are short for their main key."""
    return lambda value: (section, value)


READ: dict[str, Read] = {
    "method": _method, "data.train_on": _train_on, "techniques.length_grouping": _grouping, "data": _text("data.source"),
    "model": _text("model.path"), **{f"techniques.{name}": _optimizer(name) for name in OPTIMIZERS},
    **{key: _renamed_switch(key) for key in RENAMED if key.startswith("techniques.") and key.count(".") == 1},
}


class _Recipe(Format):
    """A recipe also has the keys of other trainers, wherever its room of spellings knows them."""

    def points(self, found: Marked) -> tuple[int, float]:
        """Without a key of its own a file of foreign keys is another trainer's."""
        points, share = super().points(found)
        return (points, share) if points else (0, 0.0)

    def has(self, key: str) -> bool:
        return super().has(key) or spellings.is_known(key)

    def has_top(self, key: str) -> bool:
        return super().has_top(key) or spellings.is_known(key)

    def tell(self, key: str, value: Marked) -> list[Told]:
        ours = key in self.known or key.startswith("techniques.")
        if ours and key not in self.read and key not in self.renamed:
            return [(key if "." in key else f"training.{key}", value.value)]
        return super().tell(key, value) if ours or key in self.read else [(in_section(key.rpartition(".")[2]), value.value)]


def _is_recipe(found: Marked) -> bool:
    """DeepSpeed has a train_batch_size too, and tables where a recipe has none; documents 000 and 003 have `training:`."""
    tables = any(isinstance(found.value.get(key), dict) for key in ("fp16", "bf16", "optimizer", "scheduler", "training",
                                                                    "zero_optimization", "noise", "sampling", "datasets"))
    return not tables and "zero_optimization" not in found.inner


POWERTRAIN = _Recipe(
    name="a Powertrain recipe", framework="powertrain",
    own=names("""techniques method train_batch_size corrections train_time_s memory_check sample quantisation data model
        max_eval_samples min_lr_rate description"""),
    known=frozenset(known_keys()) | names("techniques.* techniques data model"), renamed=RENAMED, read=READ,
    whole=names("data.columns"), wants=_is_recipe)
