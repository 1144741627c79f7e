"""The calls that configure training, and which settings their arguments are."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from powertrain.audit.calling import Followed, Written
from powertrain.audit.known_calls import unwrapped
from powertrain.audit.script import Setting
from powertrain.audit.values import ClassValue, Made, Reference, Unread
from powertrain.recipe.vocabulary import find

Found = tuple[str, Setting]
ADAPTERS = ("LoraConfig", "AdaLoraConfig", "LoHaConfig", "LoKrConfig", "VeraConfig")
SCHEDULERS = {"get_cosine_schedule_with_warmup": "cosine", "get_linear_schedule_with_warmup": "linear",
              "get_constant_schedule_with_warmup": "constant_with_warmup", "get_constant_schedule": "constant",
              "CosineAnnealingLR": "cosine", "CosineAnnealingWarmRestarts": "cosine_with_restarts", "OneCycleLR": "one_cycle",
              "StepLR": "step", "ExponentialLR": "exponential", "LinearLR": "linear",
              "ReduceLROnPlateau": "reduce_lr_on_plateau", "get_polynomial_decay_schedule_with_warmup": "polynomial"}
CHECKPOINTS = ("gradient_checkpointing_enable", "activation_checkpointing_enable", "prepare_model_for_kbit_training")
# of calls of a section, the positional arguments that are settings
POSITIONAL = {"model": [(0, "model.path")], "tokenizer": [(0, "tokenizer.path")], "training": [(0, "training.output_dir")],
              "data": [(0, "data.source"), (1, "data.config")], "optimizer": [(1, "optimizer.lr")],
              "loader": [(1, "loader.batch_size")]}
# of Unsloth's calls, the arguments that other libraries have elsewhere
OF_UNSLOTH = {"model.max_seq_length": "training.max_length",
              "lora.use_gradient_checkpointing": "training.activation_checkpointing"}
# what TRL's trainers learn besides answers, and the arguments of their configs that say how; CPO's simpo is SimPO
OBJECTIVES = {"DPOTrainer": "dpo", "KTOTrainer": "kto", "ORPOTrainer": "orpo", "RewardTrainer": "reward", "CPOTrainer": "cpo"}
OF_OBJECTIVES = ("beta", "loss_type", "label_smoothing", "discopop_tau", "rpo_alpha", "desirable_weight", "undesirable_weight",
                 "cpo_alpha", "simpo_gamma", "center_rewards_coefficient")
OF_CPO = {"beta": 0.1, "cpo_alpha": 1.0}     # where they are not set; SimPO's own are others
HELD_OUT_BY_DEFAULT = 0.25                   # of train_test_split, where neither size is given
SPECIAL_TOKENS = ("eos_token", "eos_token_id", "unk_token", "unk_token_id", "bos_token", "bos_token_id", "mask_token",
                  "sep_token")
WITHOUT_PADDING = ("gpt2", "distilgpt2", "openai-community/gpt2", "EleutherAI/gpt-", "EleutherAI/pythia", "meta-llama/",
                   "huggyllama/", "mistralai/Mistral-7B", "tiiuae/falcon")       # published tokenizers without a padding token
UNIMPORTED = ("TrainingArguments", "Seq2SeqTrainingArguments", "Trainer", "Seq2SeqTrainer")     # of transformers alone
TRAINERS = ("transformers.", "trl.", "unsloth.", "peft.", "optimum.", "sentence_transformers.")
HELD_OUT = ("val", "eval", "test", "dev", "valid")
OF_THE_CONFIG = ("packing", "max_seq_length", "dataset_text_field", "dataset_num_proc", "neftune_noise_alpha", "eval_packing")
FP32_PRECISION = {"torch.backends.cuda.matmul.allow_tf32": "training.tf32",
                  "torch.backends.cudnn.benchmark": "training.cudnn_benchmark",
                  "torch.backends.cudnn.deterministic": "training.cudnn_deterministic"}


def is_of_a_library(made: Made) -> bool:
    """Return whether a call is of a training library, not of the script's own package or class."""
    return made.name.startswith(TRAINERS) or ("." not in made.name and made.local is None)


def section_of(made: Made) -> str:
    """Return the vocabulary's section for a call's arguments; "" for a call that configures nothing."""
    last, owner = made.last, made.name.rpartition(".")[0].rpartition(".")[2]
    if (last.endswith("TrainingArguments") and is_of_a_library(made)) or (
            last.endswith("Config") and made.name.startswith(("trl.", "unsloth."))):
        return "training" if last != "ModelConfig" else ""
    if (last in ADAPTERS and is_of_a_library(made)) or (last == "get_peft_model" and owner == "FastLanguageModel"):
        return "lora"
    if last == "BitsAndBytesConfig":
        return "quantisation"
    if last == "from_pretrained":
        named = owner.lower()
        if "tokenizer" in named or "processor" in named:
            return "tokenizer"
        return "" if "config" in named or "peft" in named else "model"
    if last == "from_config" and owner.startswith("Auto"):
        return "model"
    if last == "DataLoader" and made.name.startswith("torch"):
        return "loader"
    if made.name.startswith(("torch.optim.", "bitsandbytes.optim.", "transformers.optimization.")) and last[:1].isupper():
        return "optimizer" if "lr_scheduler" not in made.name else ""
    if last == "Accelerator":
        return "accelerate"
    return "data" if last in ("load_dataset", "load_from_disk") else ""


@dataclass(frozen=True, eq=False)
class Training:
    """What a script trains with: its trainers, the arguments and the model that they are given, and under which conditions."""

    followed: Followed

    @cached_property
    def trainers(self) -> list[Made]:
        return [made for made in self.followed.calls if is_trainer(made)]

    @cached_property
    def arguments(self) -> Made | None:
        """Return the arguments of the Trainer; None if there is no Trainer, or two with different arguments."""
        given = [args for trainer in self.trainers if isinstance(args := trainer.argument(1, "args"), Made)]
        return given[0] if given and all(args is given[0] for args in given) else None

    @cached_property
    def model(self) -> Made | None:
        """Return the call that loads the model of a Trainer or an optimizer; None where that is not known."""
        given = [trainer.argument(0, "model") for trainer in self.trainers]
        weights = [made.argument(0, "params") for made in self.followed.calls if section_of(made) == "optimizer"]
        given = given or [made.owner for made in weights if isinstance(made, Made) and made.name.endswith(".parameters")]
        loaded = [next(reversed([*unwrapped(made)]), None) for made in given]
        first = loaded[0] if loaded else None
        known = isinstance(first, Made) and section_of(first) == "model" and all(made is first for made in loaded)
        return first if known else None

    @cached_property
    def conditions(self) -> frozenset[str]:
        """Return the conditions under which the script trains at all; other settings under them are not in doubt."""
        loops = [self.followed.doubts.get(loop, ()) for loop in self.followed.script.training_loops]
        return frozenset(doubt for doubts in (*(made.doubts for made in self.trainers), *loops) for doubt in doubts)

    @cached_property
    def sections(self) -> dict[str, Made]:
        """Return for each section the call that sets it; of several calls, the one that a Trainer is given."""
        found: dict[str, Made] = {}
        for made in self.followed.calls:
            section = section_of(made)
            if section and not (section == "loader" and is_held_out(made, self.followed)):
                found.setdefault(section, made)
        trainer = next((made for made in self.trainers if is_plain_trainer(made)), None)
        picked = {"training": self.arguments, "model": self.model, "trainer": trainer}
        return found | {name: made for name, made in picked.items() if made is not None}

    def leaves_out(self, made: Made, section: str) -> bool:
        """Return whether a call sets up something that is not trained: another model, other arguments, held-out data."""
        if section == "training":
            return self.arguments is not None and made is not self.arguments
        if section == "loader":
            return is_held_out(made, self.followed)
        if self.model is None or section not in ("model", "quantisation"):
            return False
        config = self.model.named.get("quantization_config")
        if section == "model" or config is None:
            return made is not self.model and not (section == "quantisation" and self.model.open)
        return isinstance(config.value, Made) and config.value is not made

    def in_doubt(self, doubts: tuple[str, ...], found: Iterable[Found]) -> Iterator[Found]:
        """Yield settings as they are where training has them for certain, else as unread, with the condition."""
        open_ = [doubt for doubt in doubts if doubt not in self.conditions]
        for key, setting in found:
            perhaps = Unread(f"only if {open_[-1]}", setting.value) if open_ else setting.value
            yield key, Setting(perhaps, setting.place, setting.spelled)


def is_plain_trainer(made: Made) -> bool:
    """Return whether a Trainer takes the library's own arguments."""
    return made.local is None or (_passes_on(made.local) and any(
        name.startswith(TRAINERS) for name in made.local.foreign_bases))


def _passes_on(kind: ClassValue) -> bool:
    """Return whether a class has no `__init__` of its own, or one that gives its `**kwargs` to the class above."""
    own = kind.methods.get("__init__")
    return own is None or (own.node.args.kwarg is not None and any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "__init__"
        and any(item.arg is None for item in node.keywords) for node in ast.walk(own.node)))


def is_trainer(made: Made) -> bool:
    if made.local is not None:
        return any(name.endswith("Trainer") for name in (made.last, *made.local.foreign_bases))
    return made.last.endswith("Trainer") and (
        made.name.startswith(("transformers.", "trl.", "unsloth.")) or made.name in UNIMPORTED)


def unknown_arguments(followed: Followed) -> Iterator[Found]:
    """Yield the arguments that TrainingArguments and SFTConfig do not have in any version."""
    for made in followed.calls:
        trainer = {"TrainingArguments": "transformers", "SFTConfig": "trl"}.get(made.last)
        if trainer is not None and made.local is None and made.name.startswith(("transformers.", "trl.")):
            yield from ((f"training.{name}", setting) for name, setting in made.named.items()
                        if find(name, trainer) is None and name not in made.perhaps)


def is_tokenising(made: Made) -> bool:
    """Return whether a call is `tokenizer(text, …)`, by its name or because a tokenizer was loaded there."""
    words = made.name.lower()
    if words == "functools.partial" and isinstance(made.node, ast.Call) and made.node.args:      # with arguments for later
        words = ast.unparse(made.node.args[0]).lower()
    last = words.removesuffix("()").rpartition(".")[2]
    named = last in ("tokenizer", "tok") or (last in ("batch_encode_plus", "encode_plus") and "tok" in words)
    return named or ("tokenizer" in words and words.endswith("from_pretrained()"))


def is_held_out(made: Made, followed: Followed) -> bool:
    """Return whether a loader is for evaluation, by its own name or its dataset's."""
    words = [name for name, values in followed.variables.items() if made in values]
    first = made.node.args[0] if isinstance(made.node, ast.Call) and made.node.args else None
    words += [first.id] if isinstance(first, ast.Name) else []
    return any(word.lower().startswith(HELD_OUT) or any(f"_{part}" in word.lower() for part in HELD_OUT) for word in words)


def settings_of_call(made: Made, training: Training) -> Iterator[Found]:
    section, followed = section_of(made), training.followed
    if not followed.script.is_reached(made.node) or training.leaves_out(made, section):
        return
    certain = section in ("training", "data", "tokenizer", "loader", "optimizer", "accelerate")
    if section:
        yield from training.in_doubt(() if certain else made.doubts, _arguments(section, made, followed))
    yield from training.in_doubt(() if certain or is_trainer(made) else made.doubts, _special(made, followed))


def _arguments(section: str, made: Made, followed: Followed) -> Iterator[Found]:
    for name, setting in made.named.items():
        if isinstance(setting.value, Made) and section in ("model", "tokenizer"):
            continue                                     # quantization_config=…: its own section
        key = f"{section}.{name}"
        if section == "training" and name in OF_OBJECTIVES and f"{made.last.removesuffix('Config')}Trainer" in OBJECTIVES:
            value = setting.value[0] if isinstance(setting.value, list) and len(setting.value) == 1 else setting.value
            if value != "simpo":                         # it is the trainer's objective
                yield f"objective.{name}", Setting(value, setting.place, setting.spelled)
        elif "FastLanguageModel" in made.name and key in OF_UNSLOTH:
            yield OF_UNSLOTH[key], Setting(True, setting.place, setting.spelled) if setting.value == "unsloth" else setting
        else:
            yield key, setting
    if made.open and section in ("training", "model", "lora", "optimizer", "loader"):
        yield f"{section}.*", Setting(Unread(made.open), followed.script.place(made.node), f"**{made.open.lstrip('*')}")
    if section == "optimizer":
        yield "optimizer.name", followed.script.setting(made.node, made.last)
    if section == "loader" and "batch_size" in made.named:
        yield "training.per_device_train_batch_size", made.named["batch_size"]
        return
    for position, key in POSITIONAL.get(section, ()):
        if position < len(made.positional):
            yield key, followed.script.setting(made.node, made.positional[position])


def _special(made: Made, followed: Followed) -> Iterator[Found]:
    """Yield settings that a call makes: `torch.compile(model)`, `model.gradient_checkpointing_enable()`."""
    last = made.last

    def said(value: Any) -> Setting:
        return followed.script.setting(made.node, value)

    if last in CHECKPOINTS:
        yield "training.activation_checkpointing", made.named.get("use_gradient_checkpointing", said(True))
    elif made.name == "torch.compile" or made.name.endswith("().compile"):
        yield "training.torch_compile", said(True)
        yield from _named(made, "training.torch_compile_{}", "mode")
    elif last in ("clip_grad_norm_", "clip_grad_norm"):
        position = 0 if last == "clip_grad_norm" and len(made.positional) == 1 else 1
        yield "training.max_grad_norm", said(made.argument(position, "max_norm"))
    elif last in SCHEDULERS:
        yield "training.lr_scheduler_type", said(SCHEDULERS[last])
        if last.startswith("get_") and made.argument(1, "num_warmup_steps") is not None:
            yield "training.warmup_steps", made.named.get("num_warmup_steps", said(made.argument(1, "num_warmup_steps")))
    elif last == "get_scheduler":
        yield "training.lr_scheduler_type", made.named.get("name", said(made.argument(0, "name")))
        yield from _named(made, "training.warmup_steps", "num_warmup_steps")
    elif last == "set_float32_matmul_precision" and made.positional:
        yield "training.tf32", said(made.positional[0] in ("high", "medium"))
    elif last in ("autocast", "autocast_mode"):
        yield from _autocast(made, said)
    elif is_trainer(made):
        yield from _objective(made, said)
        yield from _named(made, "training.{}", *OF_THE_CONFIG)
        yield from ((f"trainer.{name}", entry) for name, entry in made.named.items()
                    if name in ("data_collator", "compute_metrics", "callbacks") and not isinstance(entry.value, Made))
        if "tokenizer" in made.named and made.local is None:
            entry = made.named["tokenizer"]
            yield "trainer.tokenizer", Setting(entry.spelled.partition("=")[2], entry.place, entry.spelled)
        if isinstance(made.argument(0, "model"), str):       # TRL loads it
            yield "model.path", made.named.get("model", said(made.argument(0, "model")))
        if isinstance(made.argument(1, "args"), Unread):
            yield "training.*", said(made.argument(1, "args"))
    elif last == "Accelerator":
        precision = made.named.get("mixed_precision")
        asked = precision.value if precision is not None else None
        for name in ("bf16", "fp16"):
            if precision is not None and asked is not None and (asked == name or not isinstance(asked, str)):
                yield f"training.{name}", Setting(True, precision.place, precision.spelled) if asked == name else precision
        yield from _named(made, "training.{}", "gradient_accumulation_steps")
    elif last == "train_test_split":
        yield from _held_out(made, said)
    elif is_tokenising(made):
        yield from _named(made, "data.{}", "padding", "truncation")
        # TRL cuts by its own max_length, whatever the script tokenises besides
        if "truncation" in made.named and not any(other.name.startswith("trl.") for other in followed.calls):
            yield from _named(made, "training.{}", "max_length")
    if last == "from_pretrained":                        # before BitsAndBytesConfig, and Unsloth's
        yield from _named(made, "quantisation.{}", "load_in_4bit", "load_in_8bit")


def _objective(made: Made, said: Any) -> Iterator[Found]:
    """Yield what one of TRL's trainers, or a class of the script's that derives from one, learns besides answers."""
    bases = made.local.foreign_bases if made.local is not None else []
    known = next((OBJECTIVES[last] for name in (made.name, *bases) if (last := name.rpartition(".")[2]) in OBJECTIVES), None)
    if known is None:
        return
    args = made.argument(1, "args")
    if known == "cpo" and isinstance(args, Made) and args.get("loss_type") == "simpo":
        known = "simpo"
        yield from ((f"objective.{name}", said(value)) for name, value in OF_CPO.items() if name not in args.named)
    yield "training.rl" if known == "cpo" else "objective.name", said(known)
    yield from _named(made, "objective.{}", "beta", "loss_type", "label_smoothing")      # as TRL had them before its configs


def _named(made: Made, key: str, *names: str) -> Iterator[Found]:
    """Yield those of these arguments that a call has; `{}` in the key stands for the argument's name."""
    yield from ((key.format(name), made.named[name]) for name in names if name in made.named)


def _autocast(made: Made, said: Any) -> Iterator[Found]:
    dtype = made.argument(1, "dtype")
    if "ccelerator" in made.name:            # which computes in what it was made with
        return
    if made.get("enabled") is False or (isinstance(dtype, Reference) and dtype.name.endswith(("float32", "torch.float"))):
        return
    if isinstance(dtype, Reference):
        yield f"training.{'bf16' if dtype.name.endswith('bfloat16') else 'fp16'}", said(True)
    elif isinstance(dtype, Unread):
        yield "training.bf16", said(dtype)
        yield "training.fp16", said(dtype)
    else:
        device = made.argument(0, "device_type")
        yield ("training.bf16" if device == "cpu" else "training.fp16"), said(True)      # torch's defaults per device


def _held_out(made: Made, said: Any) -> Iterator[Found]:
    """Yield the settings of `rows.train_test_split(test_size=0.1, seed=1)`, of datasets or scikit-learn."""
    place = 0 if made.owner is not None else len(made.positional)        # scikit-learn's positional arguments are the data
    share, kept = made.argument(place, "test_size"), made.argument(place + 1, "train_size")
    if share is None and made.open:
        share = Unread(made.open)
    if share is None:
        share = 1 - kept if isinstance(kept, float) else kept if kept is not None else HELD_OUT_BY_DEFAULT
    yield "data.validation_share", made.named.get("test_size", said(share))
    yield from _named(made, "data.validation_seed", "seed", "random_state")
    yield from _named(made, "data.validation_shuffle", "shuffle")


def settings_written(training: Training) -> Iterator[Found]:
    """Yield settings that are assigned: `tokenizer.pad_token = tokenizer.eos_token`, `os.environ["X"] = "1"`."""
    followed = training.followed
    for written in followed.written:
        if followed.script.is_reached(written.node):
            doubts = () if _is_without_padding(written) else written.doubts
            yield from training.in_doubt(doubts, _attribute_written(written, followed))
    for written in followed.items:
        if isinstance(written.owner, Reference) and written.owner.name == "os.environ" and written.name:
            yield f"environment.{written.name}", written.setting


def _attribute_written(written: Written, followed: Followed) -> Iterator[Found]:
    node, setting = written.node, written.setting
    if written.name in ("pad_token", "pad_token_id"):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        of_config = target is not None and "config" in followed.script.words(target)
        if isinstance(node.value, ast.Attribute) and node.value.attr in SPECIAL_TOKENS:
            yield "tokenizer.pad_token", Setting(node.value.attr.removesuffix("_id"), setting.place, setting.spelled)
        elif written.name == "pad_token" and not of_config:
            yield "tokenizer.pad_token", setting
    elif written.name == "use_cache":
        yield "model.use_cache", setting
    elif isinstance(written.owner, Reference):
        key = FP32_PRECISION.get(f"{written.owner.name}.{written.name}")
        if key is not None:
            yield key, setting


def _is_without_padding(written: Written) -> bool:
    """Return whether `if tokenizer.pad_token is None:` is sure to hold: this published tokenizer has no padding token."""
    path = written.owner.argument(0, "pretrained_model_name_or_path") if isinstance(written.owner, Made) else None
    guard = written.doubts[0] if len(written.doubts) == 1 else ""
    return isinstance(path, str) and path.startswith(WITHOUT_PADDING) and "pad_token" in guard

