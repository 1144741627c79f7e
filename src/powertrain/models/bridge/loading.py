"""The bridge: models that the native decoder does not have, loaded with transformers, peft and bitsandbytes.

What is trained is fp32, and so is what is frozen beside adapters, unless it is in 4 bits: many of these models cast their
activations to a weight's dtype. Nothing is fetched: a model comes from a folder (models/huggingface/hub.py finds or makes it).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.bridge.adapters import continue_adapter, put_adapters, wrap_saved
from powertrain.models.bridge.facts import count_model
from powertrain.models.bridge.model import BridgedModel
from powertrain.models.bridge.opening import open_empty, open_network, refuse_looking_ahead, refuse_quantised, remote_code
from powertrain.models.huggingface.hub import CONFIG, read_model_json
from powertrain.records import ModelFacts

NF4 = ("nf4", True)                          # 4-bit type, and whether its scales are quantised too


def load_bridged(folder: Path, *, task: str, method: str, adapters: AdapterConfig | None = None,
                 quantisation: tuple[str, bool] | None = None, dropout: float = 0.0, adapter_folder: Path | None = None,
                 trust_remote_code: bool = False, revision: str | None = None, provider: str = "transformers",
                 base: str | None = None, max_length: int = 2048) -> BridgedModel:
    """The model of a Hugging Face folder for `task`, to be trained by `method` ("full", "lora" or "qlora").

    `adapters` are new ones; `adapter_folder` holds some to go on with. `quantisation` is (type, double). `base` is what an
    adapter writes down as its base, by default the folder. A head that the folder lacks (spans) and new adapters are drawn
    with torch's global generator: seed it first. `max_length` is for unsloth.
    Raises WrongUse for what cannot be loaded or trained so, with the reason.
    """
    config = read_model_json(folder / CONFIG)
    code = remote_code(folder, config, trust_remote_code, revision)
    refuse_quantised(folder, config, method)
    if provider == "unsloth":
        from powertrain.models.bridge.unsloth import load_unsloth

        library = load_unsloth(folder, method=method, adapters=adapters, quantisation=quantisation, dropout=dropout,
                               adapter_folder=adapter_folder, max_length=max_length, code=code)
        return BridgedModel(library, task=task, base=base or str(folder))
    network: nn.Module = open_network(folder, task, dropout, (quantisation or NF4) if method == "qlora" else None, code)
    if task == "causal":
        refuse_looking_ahead(network, folder)
    if method != "full":
        network.requires_grad_(False)
        if adapter_folder is not None:
            network = continue_adapter(network, adapter_folder, task)
        elif adapters is not None:
            network = put_adapters(network, adapters, task)
    return BridgedModel(network, task=task, base=base or str(folder))


def bridged_facts(folder: Path, *, task: str, method: str, adapters: AdapterConfig | None = None,
                  provider: str = "transformers", quantisation: tuple[str, bool] | None = None,
                  adapter_folder: Path | None = None, dropout: float = 0.0, trust_remote_code: bool = False,
                  revision: str | None = None, path: str | None = None) -> ModelFacts:
    """The facts of what `load_bridged` would load, counted on torch's meta device: no weight is read or drawn.

    `path` is what the facts say of where it is, by default the folder.
    """
    config = read_model_json(folder / CONFIG)
    code = remote_code(folder, config, trust_remote_code, revision)
    refuse_quantised(folder, config, method)
    bare = open_empty(folder, task, dropout, code)
    network: nn.Module = bare
    counted = count_model(bare, task)        # before adapters wrap its modules
    if method != "full":
        bare.requires_grad_(False)
        with torch.device("meta"):
            if adapter_folder is not None:
                network = wrap_saved(bare, adapter_folder, task)
            elif adapters is not None:
                network = put_adapters(bare, adapters, task)
    return counted.facts(network, method=method, provider=provider, dropout=dropout, path=path or str(folder),
                         frozen_dtype=(quantisation or NF4)[0] if method == "qlora" else "fp32")
