"""unsloth's FastLanguageModel behind the bridge: its kernels and its loading, our data, loss, optimizer and checkpoints.

It needs a CUDA GPU and could not be run where this was written: the calls follow its documentation, and tests check the
arguments only. Its models give scores as long as no labels are handed in, and none are. It decides on the dtype of what is
frozen (bf16 or fp16) and on activation checkpointing, so no technique of ours takes part in that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from powertrain.models.adapters.targets import AdapterConfig
from powertrain.records import WrongUse

# What unsloth has kernels for; its "all-linear".
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CHECKPOINTING = "unsloth"                    # activations to the host's memory: its default


def load_unsloth(folder: Path, *, method: str, adapters: AdapterConfig | None, quantisation: tuple[str, bool] | None,
                 dropout: float, adapter_folder: Path | None, max_length: int, code: Mapping[str, Any],
                 fast: Any = None) -> nn.Module:
    """The model on the GPU, with new adapters or with those of `adapter_folder`. `fast` stands in for FastLanguageModel.

    Raises WrongUse if it is not installed, and for what it does not do.
    """
    _refuse(adapters, quantisation, dropout, method)
    fast = fast or _find_unsloth()
    opened = adapter_folder if method != "full" and adapter_folder is not None else folder
    model, _ = fast.from_pretrained(
        model_name=str(opened), max_seq_length=max_length, dtype=None, load_in_4bit=method == "qlora",
        full_finetuning=method == "full", use_gradient_checkpointing=CHECKPOINTING, local_files_only=True,
        trust_remote_code=code["trust_remote_code"])
    if method != "full" and adapter_folder is None and adapters is not None:
        targets = adapters.target_modules
        model = fast.get_peft_model(
            model, r=adapters.r, lora_alpha=adapters.alpha, lora_dropout=adapters.dropout, bias="none",
            target_modules=ALL_LINEAR if targets == "all-linear" else [targets] if isinstance(targets, str) else list(targets),
            use_rslora=adapters.use_rslora, use_gradient_checkpointing=CHECKPOINTING,
            random_state=int(torch.randint(2**31, ())))          # it seeds anew: from the recipe's seed, not its own
    network: nn.Module = model
    return network


def _find_unsloth() -> Any:
    try:
        from unsloth import FastLanguageModel
    except (ImportError, NotImplementedError) as error:
        raise WrongUse(f"model.provider=unsloth was asked for, and it cannot be imported here ({error}); pip install unsloth "
                       "beside a CUDA GPU, or leave model.provider out") from error
    return FastLanguageModel


def _refuse(adapters: AdapterConfig | None, quantisation: tuple[str, bool] | None, dropout: float, method: str) -> None:
    """Raises WrongUse for settings that unsloth would pass over."""
    cure = "use model.provider=transformers for it"
    if adapters is not None and adapters.kind != "lora":
        raise WrongUse(f"lora.kind={adapters.kind} was asked for, which only the native decoder computes; leave model.provider "
                       "out, or use lora.kind=lora")
    if adapters is not None and adapters.use_dora:
        raise WrongUse(f"lora.use_dora=true was asked for, and unsloth's kernels compute LoRA and rsLoRA; {cure}")
    if method == "qlora" and quantisation not in (None, ("nf4", True)):
        raise WrongUse(f"quantisation {quantisation} was asked for, and unsloth quantises to nf4 with double scales; {cure}")
    if dropout:
        raise WrongUse(f"model.dropout={dropout:g} was asked for, and unsloth's kernels drop nothing; use model.dropout=0, or "
                       "model.provider=transformers")
