"""What an audit knows of a script or config, its settings and its code, and of where it would run.

Keys are those of transformers 5 and TRL, in sections, whatever the file itself calls them:

    training.*      TrainingArguments, SFTConfig, the `training:` of a config: training.per_device_train_batch_size
    lora.*, quantisation.*, model.*   the arguments of LoraConfig, of BitsAndBytesConfig and of from_pretrained
    tokenizer.*     tokenizer.path, tokenizer.pad_token ("eos_token" where the script sets them equal)
    data.*          data.source, data.format, data.padding, data.split, data.validation_share
    loader.*, optimizer.*   of a script's own DataLoader and optimizer: loader.num_workers, optimizer.name ("AdamW")
    deepspeed.*, accelerate.*, fsdp.*   their files' keys, as they are
    environment.*   variables that the script or its launcher sets: environment.OMP_NUM_THREADS

A key that is absent was not set; what the framework then does stands in `defaults.yaml`. Unknown is not absent: what is set
to something that cannot be read without running the file is in `Subject.unread`.
"""

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from powertrain.audit.script import Script, Setting
from powertrain.audit.syntax import last_name
from powertrain.records import DataFacts, Facts, Hardware, ModelFacts, Software
from powertrain.records.findings import Evidence, Place

__all__ = ["METHODS", "TRAINERS", "Circumstances", "Framework", "Setting", "Subject", "dtype_named"]

# trainers of pretrained models, and how they train them where the config does not say
METHODS: Mapping[str, str] = {"transformers": "full", "trl": "full", "axolotl": "full", "llama-factory": "lora",
                              "llama-factory-v1": "full", "modelforge": "lora", "lora-trainer": "lora", "torchtune": "full"}
Shown = str | Setting | Evidence | ast.AST | None            # what a rule saw: a key, a setting, words, or code
Framework = Literal["trl", "transformers", "accelerate", "pytorch", "powertrain", "axolotl", "llama-factory",
                    "llama-factory-v1", "modelforge", "lora-trainer", "character-transformer", "torchtune", "nanogpt",
                    "deepspeed", "unknown"]
TRAINERS = ("trl", "transformers")           # frameworks whose arguments are those of transformers' Trainer
PLAIN_LOOPS = ("pytorch", "character-transformer")           # frameworks that accumulate only where a file says so
OF_LIBRARIES = ("lora.", "quantisation.", "loader.")         # a trainer with configs has its own defaults for these
OFF = (None, False, 0, "", "no", "none", "off", "false", "False")
DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
          "fp32": "fp32", "float32": "fp32", "float": "fp32", "no": "fp32"}
COMPILING = ("training.torch_compile", "training.torch_compile_mode", "training.torch_compile_backend")


_FILE: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    (resources.files("powertrain") / "audit" / "defaults.yaml").read_text(encoding="utf-8"))
OWN_DEFAULTS: Mapping[str, Mapping[str, Any]] = _FILE["trainers"]        # of trainers that are not the libraries' own


def _libraries(*beginnings: str) -> dict[str, Any]:
    """Return the defaults of the libraries whose source begins so; of two, the later one's."""
    return {key: value for begins in beginnings for source, rows in _FILE["libraries"].items()
            if source.startswith(begins) for key, (value, _line) in rows.items()}


_ALWAYS = ("peft", "transformers 5.23, utils/quantization", "torch")
_LIBRARIES = _libraries(*_ALWAYS)
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "transformers": _libraries(*_ALWAYS, "transformers 5.23, training_args"),
    "trl": _libraries(*_ALWAYS, "transformers 5.23, training_args", "TRL"), "accelerate": _libraries(*_ALWAYS, "Accelerate")}


def default_of(framework: str, key: str) -> Any:
    """Return a library's value for a key that is not set, or the trainer's for its own arguments; None if none is known."""
    return DEFAULTS.get(framework, _LIBRARIES).get(key)


@dataclass(frozen=True)
class Circumstances:
    """Where the subject would run: this machine or another one, and its data and model where their files lie here."""

    hardware: Hardware | None = None
    software: Software | None = None
    facts: Facts | None = None               # also of its data and model; None where these are not known
    not_looked_at: str = ""                  # why its data and model are not known
    other: str = ""                          # of another machine: where its figures come from, or why it is not known

    @property
    def model(self) -> ModelFacts | None:
        return self.facts.model if self.facts else None

    @property
    def data(self) -> DataFacts | None:
        return self.facts.data if self.facts else None

    @property
    def devices(self) -> int | None:
        """Return the number of devices, of all nodes together; None where the machine is not known."""
        return self.hardware.devices * self.hardware.nodes if self.hardware is not None else None

    @property
    def has_one_device(self) -> bool:
        """Return whether the machine is known and has no second device."""
        return self.devices is not None and self.devices <= 1

    @property
    def on_cpu(self) -> bool:
        """Return whether the machine is known to have no GPU."""
        return self.hardware is not None and self.hardware.device == "cpu"

    @property
    def cores(self) -> int | None:
        """Return the number of cores; None where it is not known, as of machines whose figures are published."""
        return self.hardware.cores or None if self.hardware is not None else None

    def version(self, part: str) -> tuple[int, ...] | None:
        """Return the version of an installed part as numbers; None where it is not known or not installed."""
        text = self.software.versions.get(part) if self.software else None
        numbers = (text or "").split("+")[0].split(".")
        return tuple(int(number) for number in numbers if number.isdigit()) or None


@dataclass(frozen=True)
class Subject:
    """A script or config, as far as it can be read without running it.

    A question that only a run of the file could answer gives None, and a rule that meets None says nothing.
    """

    path: Path
    framework: Framework
    settings: Mapping[str, Setting]
    unread: Mapping[str, Setting] = field(default_factory=dict)      # set, to what only running the file would tell
    unknown: Mapping[str, Setting] = field(default_factory=dict)     # keys of a config that its trainer does not have
    script: Script | None = None             # its code, if it is one
    launch: str = ""                         # how it is started, where that matters: "started with torchrun"
    calls: tuple[Any, ...] = ()              # of a script: expressions.Made of all that it calls, in order
    others: "tuple[Subject, ...]" = ()       # the same script, started in other ways
    keys: Mapping[str, Any] = field(default_factory=dict)            # of a config: configs.Marked of each, as it spells them

    def value(self, key: str) -> Any:
        """Return the value that the file sets for `key`; None where it sets none, or none that can be read."""
        setting = self.settings.get(key)
        return None if setting is None else setting.value

    def on(self, key: str) -> bool:
        """Return whether the file sets `key` to something that switches it on."""
        return self.value(key) not in OFF

    def is_unread(self, key: str) -> bool:
        """Return whether `key` may be set to something that only a run would tell, itself or in a `**kwargs` of its section."""
        return key in self.unread or f"{key.partition('.')[0]}.*" in self.unread

    def effective(self, key: str) -> Any:
        """Return what is set for `key`, else the default of the framework's libraries, else None."""
        if key in self.settings:
            return self.settings[key].value
        if (self.script is None and key.startswith(OF_LIBRARIES)) or self.is_unread(key):
            return None
        made = self.script.sections.get("training") if self.script is not None else None
        plain = made is not None and last_name(made.func) == "TrainingArguments"     # of which TRL's trainers keep what is set
        return default_of("transformers" if plain and self.framework == "trl" else self.framework, key)

    @property
    def trainer(self) -> str:
        """Return the dotted name of the trainer that a script makes; "" where it makes none."""
        made = self.script.sections.get("trainer") if self.script is not None else None
        return self.script.name(made) if self.script is not None and made is not None else ""

    def trainer_default(self, key: str) -> Any:
        """Return what the subject's trainer does if `key` is not set; None if it does nothing, or it is not known."""
        learned = self.value("objective.name")
        framework: str = self.framework
        if framework == "trl" and (self.script is None or learned):
            framework = "trl-command" if self.script is None else "trl-reward" if learned == "reward" else "trl-preferences"
        own = OWN_DEFAULTS.get(framework, {})
        if key in own:
            return own[key]
        if framework == "character-transformer" and key == "training.max_length":
            return self.value("model.max_position_embeddings") or 256
        if framework == "llama-factory" and key == "lora.lora_alpha":
            rank = self.value("lora.r") or 8
            return 2 * rank if isinstance(rank, int) else None
        return default_of(str(own.get("base", framework)), key)

    def in_force(self, key: str) -> Any:
        """Return what the subject sets, or else its trainer's default."""
        found = self.value(key)
        return self.trainer_default(key) if found is None and not self.is_unread(key) else found

    def is_on(self, key: str) -> bool:
        """Return whether `key` is in effect, as it is set or by default."""
        return self.effective(key) not in (*OFF, "auto")

    def number(self, key: str) -> float | None:
        """Return the number in effect for `key`; None where it is none, or too large for anything."""
        found = self.effective(key)
        is_number = isinstance(found, (int, float)) and not isinstance(found, bool) and abs(found) < 1e18
        return float(found) if is_number else None

    def shown(self, seen: Shown) -> Setting | Evidence | None:
        """Return the evidence: a key's setting, or that it is left to the framework's default; code as the script spells it."""
        if isinstance(seen, ast.AST):
            return self.script.evidence(seen) if self.script is not None else None
        if not isinstance(seen, str):
            return seen
        default = self.effective(seen)
        rest = "" if default is None else f"; the default is {default!r}"
        return self.settings.get(seen) or Evidence(f"{seen.partition('.')[2]} is not set{rest}", Place(str(self.path)))

    def first_set(self, keys: Iterable[str]) -> Setting | None:
        return next((self.settings[key] for key in keys if key in self.settings), None)

    @property
    def has_adapters(self) -> bool:
        """Return whether adapters are trained. An `lora_r:` without a value, or beside `use_peft: false`, trains none."""
        said = self.value("training.use_peft")
        if said is not None:
            return bool(said)
        if self.framework == "llama-factory-v1":
            return any(key.startswith("lora.") for key in self.settings)
        if self.script is None and self.framework in METHODS:
            return METHODS[self.framework] == "lora"
        set_up = (key for key, setting in self.settings.items() if setting.value is not None)
        return any(key.startswith("lora.") for key in (*set_up, *self.unread))

    @property
    def is_four_bit(self) -> bool:
        return self.is_on("quantisation.load_in_4bit")

    @property
    def method(self) -> str | None:
        """Return "qlora", "lora" or "full"; None where nothing says that a trained model is tuned."""
        if self.has_adapters:
            return "qlora" if self.is_four_bit else "lora"
        configured = self.framework in METHODS and self.script is None
        tunes = (self.framework in TRAINERS or configured) and self.value("model.path") is not None
        return "full" if tunes and not self.is_four_bit else None

    @property
    def products_dtype(self) -> str | None:
        """Return the dtype that autocast computes matrix products in; None where it is not known."""
        for key, name in (("training.fp16", "fp16"), ("training.bf16", "bf16")):
            if (key not in self.settings and self.is_unread(key)) or self.effective(key) == "auto":
                return None
            if self.is_on(key):
                return name
        mixed = dtype_named(self.effective("accelerate.mixed_precision"))
        return mixed if mixed is not None else "fp32" if self.framework == "transformers" else None

    @property
    def weights_dtype(self) -> str | None:
        """Return the dtype that the model's weights are loaded in; None where it is not known."""
        return dtype_named(self.effective("model.dtype"))

    @property
    def processes(self) -> int:
        """Return the data-parallel processes that the file itself asks for; 1 where it does not say."""
        return int(self.number("accelerate.num_processes") or 1)

    @property
    def examples_per_pass(self) -> int | None:
        found = self.number("training.per_device_train_batch_size")
        return int(found) if found and found >= 1 else None

    @property
    def accumulation(self) -> int | None:
        """Return the passes of one optimizer step; None where they are not known."""
        key = "training.gradient_accumulation_steps"
        found = self.number(key)
        if found is None and self.framework in PLAIN_LOOPS and key not in self.settings and not self.is_unread(key):
            return 1
        return int(found) if found and found >= 1 else None

    @property
    def examples_per_step(self) -> int | None:
        each, times = self.examples_per_pass, self.accumulation
        return each * times * self.processes if each and times else None

    def run_steps(self, data: DataFacts | None) -> int | None:
        """Return the optimizer steps of the whole run; from epochs only where the data is known."""
        asked = self.number("training.max_steps")
        if asked and asked > 0:
            return int(asked)
        if self.is_unread("training.max_steps"):
            return None
        epochs, batch = self.number("training.num_train_epochs"), self.examples_per_step
        if not epochs or not batch or data is None or not data.examples or self.is_on("training.packing"):
            return None                      # packing makes fewer examples of them: how many is not known here
        return max(1, round(epochs * -(-data.examples // batch)))

    def warmup_steps(self, steps: int | None) -> float | None:
        """Return the warm-up of a run of `steps`, in steps; a number below 1 is a share of the run, as in transformers 5."""
        found = self.number("training.warmup_ratio") or self.number("training.warmup_steps")
        if found is None or found >= 1:
            return found
        return math.ceil(found * steps) if steps is not None else None

    def interval_steps(self, what: str, steps: int | None) -> float | None:
        """Return the steps between two evaluations, checkpoints or log lines (`what`: eval, save, logging), if counted."""
        strategy = self.effective(f"training.{what}_strategy")
        if strategy != "steps" and not (strategy is None and f"training.{what}_steps" in self.settings):
            return None                      # a trainer that knows no strategies goes by steps
        found = self.number(f"training.{what}_steps")
        if what == "eval" and not found:
            found = self.number("training.logging_steps")
        if found is None or found <= 0:
            return None
        if found >= 1:
            return found
        return None if steps is None else max(1.0, found * steps)

    def changes_lengths(self, data: DataFacts | None) -> bool | None:
        """Return whether batches come in different shapes: padded to their longest example. None where it cannot be told."""
        if self.effective("data.padding") == "max_length":
            return False
        if self.framework == "trl":
            return self.effective("training.packing_strategy") != "wrapped" or not self.is_on("training.packing")
        if self.effective("data.padding") in ("longest", True):
            return True
        return None if data is None else data.kind != "blocks"

    @property
    def compiles(self) -> Setting | None:
        """Return the setting or call that compiles the model; None if there is none."""
        return next((self.settings[key] for key in COMPILING if self.on(key)), None)


def dtype_named(found: Any) -> str | None:
    """Return "bf16", "fp16" or "fp32" for a type as files write it: torch.bfloat16, "float16", "fp16"."""
    return DTYPES.get(str(found).rpartition(".")[2]) if found is not None else None
