"""Keys whose conversion needs more than their own value, or whose names recipes do not read; and the names that they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from powertrain.audit.subject import Subject
from powertrain.audit.trainer_defaults import METHODS
from powertrain.recipe.resolve import known_keys
from powertrain.recipe.spelling_tables import OFF

KNOWN = frozenset(known_keys())


@dataclass(frozen=True)
class Answer:
    """What becomes of a key, and why."""

    fate: Literal["translated", "planned", "no effect", "not supported"]
    why: str = ""
    ours: Mapping[str, Any] = field(default_factory=dict)
    pins: Mapping[str, Any] = field(default_factory=dict)


Aside = Callable[[Subject, Any], Answer | None]      # None: it is read like any other key

# the vocabulary's key -> the spelling that recipes read (recipe/spellings.py)
SPELLED: Mapping[str, str] = {
    "lora.r": "lora_r", "lora.lora_alpha": "lora_alpha", "lora.lora_dropout": "lora_dropout", "lora.bias": "lora_bias",
    "lora.target_modules": "lora_target_modules", "quantisation.bits": "quantization_bit",
    "quantisation.bnb_4bit_use_double_quant": "bnb_4bit_use_double_quant", "model.dtype": "dtype", "model.type": "model_type",
    "tokenizer.type": "tokenizer_type", "data.validation_share": "val_set_size", "data.streaming": "streaming",
    "model.attn_implementation": "attn_implementation", "model.device_map": "device_map", "model.use_cache": "use_cache",
    "data.max_examples": "max_samples", "data.dataset_dir": "dataset_dir", "loader.batch_size": "per_device_train_batch_size",
    "loader.num_workers": "dataloader_num_workers", "loader.pin_memory": "dataloader_pin_memory",
    "loader.prefetch_factor": "dataloader_prefetch_factor", "loader.drop_last": "dataloader_drop_last",
    "loader.persistent_workers": "dataloader_persistent_workers", "optimizer.lr": "learning_rate",
    "optimizer.weight_decay": "weight_decay", "optimizer.eps": "adam_epsilon", "environment.device": "device",
    "training.run_name": "name",
}
_LAUNCH = "a run is one process on one device: there is nothing to spread"
_DIFFUSION = "diffusion over characters is not available; the decoder here predicts the next character"
_CLOUD = "a run reads files of this machine and writes its own folder"
WHY: Mapping[str, str] = {                   # not supported, by key or section
    "noise": _DIFFUSION, "sampling": _DIFFUSION, "model.cond_dim": _DIFFUSION, "data.bucket_name": _CLOUD,
    "data.bucket_path": _CLOUD, "data.tokenized_file_pattern": "tokens are made from text here: name the text with data.source",
    "data.max_files": "name the files themselves with data.source", "training.background_upload": _CLOUD,
    "data.test_split": "held-out examples of a split of their own are a file: name it with data.validation_source",
    "training.skip_completed": "one recipe is one run", "lora.target_linear": "lora.target_modules names the linears",
    "training.excess_length_strategy": "write data.long_examples: cut or drop",
}


def spelled(key: str) -> str:
    """The key as recipes read it."""
    if key in SPELLED:
        return SPELLED[key]
    section, _, rest = key.partition(".")
    return key if key in KNOWN or section not in ("training", "lora", "quantisation", "tokenizer", "loader", "optimizer",
                                                  "model", "data") else rest


def is_ours(key: str) -> bool:
    return key in KNOWN or key.startswith("techniques.")


def why_not_here(key: str) -> str:
    return WHY.get(key) or WHY.get(key.partition(".")[0]) or "there is nothing like it here"


def of_section(subject: Subject, key: str, value: Any) -> Answer | None:
    """Keys whose section decides: launchers, variables, what a script's own optimizer is."""
    section, _, rest = key.partition(".")
    if section in ("deepspeed", "accelerate", "fsdp"):
        return _launched(rest, value)
    if section == "techniques":
        return Answer("planned", "the pin is for the machine that it was made on", pins={key: value})
    if section == "environment" and key != "environment.device":
        known = rest == "OMP_NUM_THREADS" and str(value).isdigit()
        return Answer("planned", "the plan sets the threads by the cores that are there",
                      pins={"techniques.threads": {"threads": int(value)}}) if known else \
            Answer("no effect", "a recipe sets no variables; set them where the run is started")
    if section in ("noise", "sampling"):
        return Answer("not supported", _DIFFUSION)
    return Answer("no effect", "it is off anyway") if key in WHY and value in OFF else \
        Answer("not supported", WHY[key]) if key in WHY else None


def _launched(key: str, value: Any) -> Answer:
    if key == "mixed_precision":
        pins: dict[str, Any] = {"techniques.bf16": "off", "techniques.fp16": "off"} if value in ("no", False, None) else \
            {f"techniques.{value}": "on"} if value in ("bf16", "fp16") else {}
        return Answer("planned", "the plan chooses the type of the products", pins=pins)
    if key == "num_processes" and value not in (None, 1):
        return Answer("translated", "its processes' batches are one step's batch here")
    return Answer("no effect", _LAUNCH)


# ------------------------------------------------------------------------------------------------ one key each


def _evaluation(subject: Subject, value: Any) -> Answer:
    """transformers evaluates at steps only where eval_strategy says so."""
    strategy = subject.value("training.eval_strategy") or subject.value("training.evals_per_epoch")
    if strategy is None and subject.framework in ("transformers", "trl", "llama-factory"):
        return Answer("no effect", "eval_strategy is not set, and without it transformers never evaluates")
    return _steps("eval_steps", strategy, value)


def _saving(subject: Subject, value: Any) -> Answer:
    return _steps("save_steps", subject.value("training.save_strategy") or subject.value("training.saves_per_epoch"), value)


def _steps(ours: str, strategy: Any, value: Any) -> Answer:
    if strategy not in (None, "steps"):
        return Answer("no effect", f"{strategy!r} decides when, and not steps")
    if isinstance(value, float) and 0 < value < 1:
        return Answer("not supported", f"{value} is a share of the run; write {ours}: a number of steps, or '0.5 epochs'")
    return Answer("translated", ours={ours: int(value) if isinstance(value, float) else value})


def _limit(subject: Subject, value: Any) -> Answer:
    if not isinstance(value, int) or value < 1:
        return Answer("no effect", "it sets no limit, and the newest checkpoints and the best one are kept")
    return Answer("translated", ours={"save_total_limit": value})


def _schedule(subject: Subject, value: Any) -> Answer:
    if value == "cosine_with_min_lr":
        return Answer("translated", ours={"lr_scheduler_type": "cosine"})
    plain = "constant" if value == "constant_with_warmup" else value
    if plain not in ("cosine", "linear", "constant"):
        return Answer("not supported", f"the schedule {value!r} is not available; choose cosine, linear or constant")
    return Answer("translated", ours={"lr_scheduler_type": plain})


def _schedule_options(subject: Subject, value: Any) -> Answer:
    if isinstance(value, dict) and set(value) == {"min_lr_rate"}:
        return Answer("translated", ours={"min_lr_rate": value["min_lr_rate"]})
    return Answer("no effect", "it is empty") if not value else \
        Answer("not supported", "of a schedule's options min_lr_rate, its end as a share of the start, is available")


def _optimizer(subject: Subject, value: Any) -> Answer:
    """AdamW of several makers is AdamW, and how its step is computed is the plan's business."""
    name = str(value).lower().rpartition(".")[2]
    rounded = {"adamw_torch": {"techniques.fused_adamw": "off"}, "adamw": {"techniques.fused_adamw": "off"},
               "adamw_hf": {"techniques.fused_adamw": "off"}, "adamw_torch_fused": {"techniques.fused_adamw": "on"},
               "adamw_apex_fused": {"techniques.fused_adamw": "on"}, "paged_adamw": {"techniques.paged_adamw": "on"},
               "paged_adamw_32bit": {"techniques.paged_adamw": "on"}}
    if name in rounded:
        return Answer("planned", "it is AdamW, and the plan chooses how its step is computed", pins=rounded[name])
    if name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw8bit"):
        return Answer("planned", "its moments of 8 bits approximate AdamW's to save memory; without the pin they have 32",
                      pins={"techniques.eight_bit_adamw": "on"})
    return Answer("not supported", f"the optimizer {value!r} is not available; it is AdamW here")


def _betas(subject: Subject, value: Any) -> Answer:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return Answer("translated", ours={"adam_beta1": float(value[0]), "adam_beta2": float(value[1])})
    return Answer("not supported", f"{value!r} are not two numbers; write adam_beta1 and adam_beta2")


def _fused(subject: Subject, value: Any) -> Answer:
    return Answer("planned", "the plan chooses how AdamW's step is computed",
                  pins={"techniques.fused_adamw": "on" if value is True else "off"})


def _loss_on(subject: Subject, value: Any) -> Answer:
    if value is False and subject.value("training.completion_only_loss") is True:
        return Answer("no effect", "completion_only_loss says whose words are learned")
    return Answer("translated", ours={"data.train_on": "assistant" if value else "all"})


def _completion(subject: Subject, value: Any) -> Answer:
    if value is False and subject.value("training.assistant_only_loss") is True:
        return Answer("no effect", "assistant_only_loss says whose words are learned")
    return Answer("translated", ours={"data.train_on": "assistant" if value else "all"})


def _precision(name: str) -> Aside:
    return lambda subject, value: Answer("planned", "the plan chooses the type of the products", pins={} if value == "auto" else
                                         {f"techniques.{name}": "on" if value is True else "off"})


def _sampling(subject: Subject, value: Any) -> Answer:
    if value not in ("group_by_length", "random", True, False):
        return Answer("not supported", f"{value!r} is not available; the order is random, or groups lengths within a step")
    return Answer("planned", "the plan groups lengths where that saves padding, within a step, so that learning is the same",
                  pins={"techniques.length_grouping": "on" if value in ("group_by_length", True) else "off"})


def _packing(subject: Subject, value: Any) -> Answer:
    return Answer("planned", "the plan packs where that saves padding; each example attends to itself alone",
                  pins={"techniques.packing": "on" if value is True else "off"})


def _held_out_seed(subject: Subject, value: Any) -> Answer:
    return Answer("no effect", "as many examples are held out, and which ones follows from the recipe's seed")


def _held_out_shuffled(subject: Subject, value: Any) -> Answer:
    if value is True:
        return Answer("no effect", "examples that are held out are drawn from the seed")
    return Answer("not supported", "held-out examples are drawn from the seed, and not taken from the end; write the end "
                  "into a file of its own and name it with data.validation_source")


def _tokenizer(subject: Subject, value: Any) -> Answer:
    if value == subject.value("model.path") or (subject.value("model.path") is None and subject.framework in METHODS):
        return Answer("no effect", "the model's own tokenizer is used")
    return Answer("translated", ours={"data.tokenizer": str(value)})


def _shuffled(subject: Subject, value: Any) -> Answer:
    if value is True:
        return Answer("no effect", "each epoch visits every example once, in an order drawn from the seed")
    return Answer("not supported", "examples come in an order drawn from the seed, and not as the data have them")


def _padding(subject: Subject, value: Any) -> Answer:
    return Answer("no effect", "padding trains nothing; how much there is follows from the batching that the plan chooses")


def _warmup(subject: Subject, value: Any) -> Answer:
    if isinstance(value, float) and 0 < value < 1:
        return Answer("translated", ours={"warmup_ratio": value})
    if isinstance(value, (int, float)) and float(value).is_integer():
        return Answer("translated", ours={"warmup_steps": int(value)})
    return Answer("not supported", f"{value!r} is no number of steps, and no share of the run below 1")


def _all_epochs(subject: Subject, value: Any) -> Answer:
    if value in (-1, 0):
        return Answer("no effect", "it leaves the length to num_train_epochs")
    return Answer("translated", ours={"max_steps": value})


def _remote_code(subject: Subject, value: Any) -> Answer:
    revision = str(subject.value("model.revision") or "")
    if value and len(revision) == 40:
        return Answer("translated", ours={"model.trust_remote_code": True})
    return Answer("no effect", "a model's own Python runs only from a commit that is named, and most models need none; if this "
                  "one does, write model.trust_remote_code with the commit as model.revision")


def _provider(subject: Subject, value: Any) -> Answer:
    return Answer("planned", "who computes the model follows from its architecture; model.provider=unsloth takes Unsloth where "
                  "it is installed")


def _truncation(subject: Subject, value: Any) -> Answer:
    cut = "what is longer than data.max_length is cut anyway"
    return Answer("no effect" if value else "not supported", cut if value else f"{cut}; set data.max_length to the longest")


ASIDE: Mapping[str, Aside] = {
    "model.trust_remote_code": _remote_code, "model.provider": _provider,
    "training.eval_steps": _evaluation, "training.save_steps": _saving, "training.save_total_limit": _limit,
    "training.lr_scheduler_type": _schedule, "training.lr_scheduler_kwargs": _schedule_options, "training.optim": _optimizer,
    "optimizer.name": _optimizer, "optimizer.betas": _betas, "optimizer.fused": _fused,
    "training.assistant_only_loss": _loss_on, "training.completion_only_loss": _completion,
    "training.bf16": _precision("bf16"), "training.fp16": _precision("fp16"), "training.tf32": _precision("tf32"),
    "training.train_sampling_strategy": _sampling, "training.packing": _packing, "tokenizer.path": _tokenizer,
    "data.padding": _padding, "data.truncation": _truncation, "loader.shuffle": _shuffled,
    "trainer.tokenizer": lambda subject, value: Answer("no effect", "the model's own tokenizer is used"),
    "data.validation_seed": _held_out_seed, "data.validation_shuffle": _held_out_shuffled,
    "training.warmup_steps": _warmup, "training.max_steps": _all_epochs,
}
