"""The facts of a model of transformers, counted on a copy without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from powertrain.models.bridge.model import position_reach
from powertrain.records import ModelFacts

# What models call the same thing in config.json, the most common name first.
WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "encoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HEAD_WIDTH = ("head_dim", "d_kv")
MLP_WIDTH = ("intermediate_size", "d_ff", "ffn_dim", "decoder_ffn_dim", "n_inner", "hidden_dim", "d_inner", "dff")
CONTEXT = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")


@dataclass(frozen=True)
class Counted:
    """A model without adapters, counted."""

    sizes: Mapping[str, Any]                 # fields of ModelFacts
    blocks: tuple[str, ...]                  # module names, encoder and decoder, in order
    parameters: int

    def facts(self, network: nn.Module, *, method: str, provider: str, dropout: float, path: str,
              frozen_dtype: str) -> ModelFacts:
        """Of the same model as it will be trained, perhaps with adapters on it."""
        trainable = {name: p.numel() for name, p in network.named_parameters() if p.requires_grad}
        total = sum(p.numel() for p in network.parameters())
        adapted = {index for index, block in enumerate(self.blocks) for name in trainable if f".{block}." in f".{name}"}
        return ModelFacts(**self.sizes, dropout=dropout, parameters=total, trainable=sum(trainable.values()),
                          provider=provider, path=path, method=method, frozen_dtype=frozen_dtype,
                          adapter_parameters=total - self.parameters,
                          adapted_layers=tuple(sorted(adapted)) if total > self.parameters else ())


def count_model(network: Any, task: str) -> Counted:
    """The sizes of a model without adapters; 0 where its config has no name for one that the weights do not tell."""
    config, embedding, output = network.config, network.get_input_embeddings(), network.get_output_embeddings()
    width, heads = _read(config, WIDTH), _read(config, HEADS)
    blocks = find_blocks(network)
    linears = {name: module for name, module in network.named_modules() if _is_linear(module) and _inside(name, blocks)}
    sizes = {
        "family": str(config.model_type), "task": task, "layers": max(1, len(blocks)), "width": width, "heads": heads,
        "kv_heads": _read(config, KV_HEADS) or heads,
        "head_width": _read(config, HEAD_WIDTH) or (width // heads if heads else 0),
        "mlp_width": _read(config, MLP_WIDTH) or 4 * width,
        "gated_mlp": bool(getattr(config, "is_gated_act", False)) or any("gate_proj" in name for name in linears),
        "vocabulary": embedding.num_embeddings,
        "context": position_reach(network, lambda name: True) or _read(config, CONTEXT),
        "tied_head": output is not None and output.weight is embedding.weight,
        "matmul_parameters": sum(linear.weight.numel() for linear in linears.values()),
        "head_parameters": 2 * width if task == "span" else embedding.num_embeddings * embedding.embedding_dim,
        "shapes": {name: tuple(parameter.shape) for name, parameter in network.named_parameters()
                   if not _inside(name, blocks) or _inside(name, blocks[-1:])},
    }
    return Counted(sizes, tuple(blocks), sum(parameter.numel() for parameter in network.parameters()))


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (nn.Linear, Conv1D))


def _inside(name: str, blocks: Sequence[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def find_blocks(network: nn.Module) -> list[str]:
    """The names of the layers: what the outermost lists of modules hold."""
    lists = [name for name, module in network.named_modules() if isinstance(module, nn.ModuleList)
             and any(_is_linear(part) for part in module.modules())]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists if other != name)]
    return [f"{name}.{index}" for name in outermost for index, _ in network.get_submodule(name).named_children()]


def _read(config: Any, names: tuple[str, ...]) -> int:
    """The first of these fields that is a number above 0, of the model or of its part for text; 0 without one."""
    for holder in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
        for name in names:
            if isinstance(value := getattr(holder, name, None), int) and not isinstance(value, bool) and value > 0:
                return value
    return 0
