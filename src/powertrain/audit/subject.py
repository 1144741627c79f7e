"""What an audit knows of a script or config, its settings and its code, and of where it would run.

Keys are those of transformers 5 and TRL, in sections, whatever the file itself calls them:

    training.*   TrainingArguments, SFTConfig, the `training:` of a config: training.per_device_train_batch_size,
                 training.gradient_accumulation_steps, training.bf16, training.activation_checkpointing, training.optim,
                 training.torch_compile, training.packing, training.max_length, training.eval_steps, training.warmup_steps
    lora.*       peft's LoraConfig: lora.r, lora.lora_alpha, lora.target_modules, lora.use_dora
    quantisation.*  BitsAndBytesConfig: quantisation.load_in_4bit, quantisation.bnb_4bit_compute_dtype
    model.*      from_pretrained: model.path, model.dtype, model.attn_implementation, model.device_map, model.use_cache
    tokenizer.*  tokenizer.pad_token ("eos_token" where the script sets them equal), tokenizer.path
    data.*       data.source, data.format, data.padding, data.split, data.validation_share
    loader.*     a DataLoader of the script's own: loader.num_workers, loader.pin_memory, loader.prefetch_factor, loader.shuffle
    optimizer.*  of the script's own: optimizer.name ("AdamW"), optimizer.fused, optimizer.lr
    deepspeed.*, accelerate.*, fsdp.*   their files' keys, as they are
    environment.*   variables that the script or its launcher sets: environment.OMP_NUM_THREADS

A key that is absent was not set; what the framework then does is known to `defaults.py`. Unknown is not absent: what is set
to something that cannot be read without running the file is in `Subject.unread`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from powertrain.audit.script import Script
from powertrain.records import DataFacts, Facts, Hardware, ModelFacts, Software
from powertrain.records.findings import Evidence, Place

Framework = Literal["trl", "transformers", "accelerate", "pytorch", "powertrain", "axolotl", "llama-factory", "modelforge",
                    "lora-trainer", "character-transformer", "torchtune", "nanogpt", "deepspeed", "unknown"]


@dataclass(frozen=True)
class Setting:
    """One value, where it is set, and how the file itself spells it."""

    value: Any
    place: Place
    spelled: str                             # "fp16=True", "per_device_train_batch_size: 4"

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.spelled, self.place)


@dataclass(frozen=True)
class Subject:
    """A script or config, as far as it can be read without running it."""

    path: Path
    framework: Framework
    settings: Mapping[str, Setting]
    unread: Mapping[str, Setting] = field(default_factory=dict)      # set, to what only running the file would tell
    unknown: Mapping[str, Setting] = field(default_factory=dict)     # keys of a config that its trainer does not have
    script: Script | None = None             # its code, if it is one

    def value(self, key: str) -> Any:
        """What is set for `key`; None where nothing is, or where it cannot be read."""
        setting = self.settings.get(key)
        return None if setting is None else setting.value

    def on(self, key: str) -> bool:
        """Whether `key` is set to something that switches it on."""
        return self.value(key) not in (None, False, 0, "", "no", "none", "off", "false", "False")


@dataclass(frozen=True)
class Circumstances:
    """Where the subject would run: this machine and, where its files lie here, its data and model."""

    facts: Facts | None = None               # None: its data and model are not known
    machine: Hardware | None = None          # where only that is known
    installed: Software | None = None
    not_looked_at: str = ""                  # why its data and model are not known

    @property
    def hardware(self) -> Hardware | None:
        return self.facts.hardware if self.facts else self.machine

    @property
    def software(self) -> Software | None:
        return self.facts.software if self.facts else self.installed

    @property
    def model(self) -> ModelFacts | None:
        return self.facts.model if self.facts else None

    @property
    def data(self) -> DataFacts | None:
        return self.facts.data if self.facts else None

    def version(self, part: str) -> tuple[int, ...] | None:
        """Of an installed part, as numbers; None where it is not known or not installed."""
        text = self.software.versions.get(part) if self.software else None
        numbers = (text or "").split("+")[0].split(".")
        return tuple(int(number) for number in numbers if number.isdigit()) or None
