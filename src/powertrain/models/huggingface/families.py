"""A family's Hugging Face `config.json`, written from a `ModelConfig` and read back.

Written as plain JSON, so that saving needs no transformers; every field is written that transformers would otherwise
fill with the size of a published model. Rotary fields are written twice, as transformers 5 reads them
(`rope_parameters`) and as transformers 4 and most other readers do (`rope_theta`, `rope_scaling`).
Reading raises WrongUse for what the decoder cannot compute: a model that loads gives the same logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from powertrain.models.config import FAMILIES, ModelConfig
from powertrain.models.huggingface.rotary_fields import read_rotary, rotary_fields
from powertrain.records import WrongUse

Json = dict[str, Any]

ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM",
                 "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "phi3": "Phi3ForCausalLM", "gemma": "GemmaForCausalLM"}
HF_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}
OUR_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
                   "silu": "silu", "swish": "silu"}

# What each model_type says when config.json leaves it out: transformers does not write every default.
HF_DEFAULTS: dict[str, Json] = {
    "gpt2": {"n_positions": 1024, "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
             "tie_word_embeddings": True},
    "gpt_neox": {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "attention_bias": True, "use_parallel_residual": True,
                 "max_position_embeddings": 2048, "rotary_pct": 0.25, "rotary_emb_base": 10_000.0},
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {"rms_norm_eps": 1e-6, "max_position_embeddings": 131_072, "sliding_window": 4096,
                "num_key_value_heads": 8},
    "qwen2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "num_key_value_heads": 32},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "head_dim": 128, "num_key_value_heads": 32},
    "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    "gemma": {"rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "head_dim": 256, "num_key_value_heads": 16,
              "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
}

# Fields that change the logits in ways that the decoder does not compute, unless they are as named here, or off.
MUST_BE: dict[str, Any] = {"scale_attn_weights": True}
MUST_BE_OFF = ("scale_attn_by_inverse_layer_idx", "add_cross_attention", "use_bidirectional_attention")
BIASED_BY_NAME = ("gpt_neox", "llama", "qwen3", "gemma")     # families that read `attention_bias`
THROUGH = "train it through transformers: model.provider=transformers"


def to_hf_config(config: ModelConfig) -> Json:
    """What `config.json` holds."""
    shared = {"architectures": [ARCHITECTURES[config.family]], "model_type": config.family,
              "vocab_size": config.vocabulary, "tie_word_embeddings": config.tied_head, **token_fields(config),
              "pad_token_id": None, "initializer_range": 0.02, "use_cache": True, "dtype": "float32"}
    if config.family == "gpt2":
        return shared | gpt2_fields(config)
    return shared | size_fields(config) | (neox_fields(config) if config.family == "gpt_neox" else llama_fields(config))


def token_fields(config: ModelConfig) -> Json:
    """The ids that begin and end a text, as config.json and generation_config.json both say them."""
    first = config.end_of_text if config.begin_of_text is None else config.begin_of_text
    ends = [token for token in (config.end_of_text, *config.other_ends) if token is not None]
    return {"bos_token_id": first, "eos_token_id": ends if len(ends) > 1 else config.end_of_text}


def gpt2_fields(config: ModelConfig) -> Json:
    return {"n_positions": config.context, "n_embd": config.width, "n_layer": config.layers, "n_head": config.heads,
            "n_inner": config.mlp_width, "activation_function": HF_ACTIVATIONS[config.activation],
            "layer_norm_epsilon": config.norm_epsilon, "resid_pdrop": config.dropout, "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout}


def size_fields(config: ModelConfig) -> Json:
    """What all families but gpt2 call by the same name."""
    return {"hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
            "intermediate_size": config.mlp_width, "max_position_embeddings": config.context,
            "hidden_act": HF_ACTIVATIONS[config.activation], "attention_dropout": config.dropout,
            **rotary_fields(config)}


def neox_fields(config: ModelConfig) -> Json:
    return {"layer_norm_eps": config.norm_epsilon, "attention_bias": config.qkv_bias, "hidden_dropout": config.dropout,
            "use_parallel_residual": config.parallel_residual, "rotary_pct": config.rotary_share,
            "rotary_emb_base": config.rotary_base}


def llama_fields(config: ModelConfig) -> Json:
    """What llama and the families after it call by the same name, and what each adds."""
    fields: Json = {"num_key_value_heads": config.kv_heads, "head_dim": config.head_width,
                    "rms_norm_eps": config.norm_epsilon}
    if config.family in ("llama", "qwen3", "gemma"):
        fields["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        fields["mlp_bias"] = config.mlp_bias
    if config.family in ("mistral", "phi3"):
        fields["sliding_window"] = config.window
    if config.family in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = False
    if config.family == "phi3":
        scaling = config.rotary_scaling
        fields |= {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout,
                   "original_max_position_embeddings": scaling.original_context if scaling else config.context,
                   "partial_rotary_factor": config.rotary_share}
    return fields


def from_hf_config(given: Mapping[str, Any], dropout: float = 0.0) -> ModelConfig:
    """The config that computes what this `config.json` describes. Dropout belongs to training, so the caller gives it.

    Raises WrongUse for a model_type that is not supported, a missing field, and what the decoder does not compute.
    """
    family = given.get("model_type")
    if family not in FAMILIES:
        raise WrongUse(f"the folder holds a model of type {family!r}; the decoder loads {', '.join(FAMILIES)}, and the "
                       f"rest trains through transformers: model.provider=transformers")
    hf = HF_DEFAULTS[family] | dict(given)
    refuse_unsupported(hf)
    row, names = FAMILIES[family], SIZE_NAMES["gpt2" if family == "gpt2" else "others"]
    sizes: dict[str, Any] = {ours: need(hf, theirs) for ours, theirs in names.items()}
    width, heads = sizes["width"], sizes["heads"]
    bias = {name: hf.get("attention_bias", False) for name in ("qkv_bias", "output_bias")}
    if family not in BIASED_BY_NAME:
        bias = {"qkv_bias": row.qkv_bias, "output_bias": row.output_bias}
    epsilon = next(hf[name] for name in ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps") if name in hf)
    base, share, scaling = read_rotary(hf, row.rotary_share)
    first, end, other_ends = read_special_tokens(hf)
    return ModelConfig(
        family=family, **sizes, kv_heads=hf.get("num_key_value_heads") or heads,
        head_width=hf.get("head_dim") or width // heads,
        mlp_width=hf.get("n_inner") or 4 * width if family == "gpt2" else need(hf, "intermediate_size"),
        dropout=dropout, norm=row.norm, norm_epsilon=epsilon, norm_bias=row.norm == "layer",
        norm_offset=row.norm_offset, positions=row.positions, rotary_base=base, rotary_share=share,
        activation=read_activation(hf),
        gated_mlp=row.gated_mlp, **bias, mlp_bias=row.mlp_bias or (family == "llama" and hf.get("mlp_bias", False)),
        qk_norm=row.qk_norm,
        parallel_residual=row.parallel_residual and hf["use_parallel_residual"],
        tied_head=hf.get("tie_word_embeddings", row.tied_head),
        embedding_scale=math.sqrt(width) if row.scaled_embedding else 1.0,
        window=hf.get("sliding_window") if row.may_slide else None, end_of_text=end, begin_of_text=first,
        other_ends=other_ends, rotary_scaling=scaling)


SIZE_NAMES = {
    "gpt2": {"vocabulary": "vocab_size", "layers": "n_layer", "width": "n_embd", "heads": "n_head",
             "context": "n_positions"},
    "others": {"vocabulary": "vocab_size", "layers": "num_hidden_layers", "width": "hidden_size",
               "heads": "num_attention_heads", "context": "max_position_embeddings"},
}


def need(hf: Mapping[str, Any], name: str) -> Any:
    """`hf[name]`. Raises WrongUse where config.json does not have it."""
    if hf.get(name) is None:
        raise WrongUse(f"config.json has no {name!r}, which a {hf['model_type']} model needs; the folder may be "
                       f"incomplete")
    return hf[name]


def refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Raises WrongUse for a field whose value changes the logits in a way that the decoder does not compute."""
    if stored := hf.get("quantization_config"):
        how = stored.get("quant_method") or "in some way"
        raise WrongUse(f"config.json says by its 'quantization_config' that the weights are quantised ({how}), and they are "
                       f"read unquantised only; give the base that they were made from, with method=qlora for 4 bits")
    for name in MUST_BE_OFF:
        if hf.get(name):
            raise WrongUse(f"config.json sets {name!r}, which the decoder does not compute; {THROUGH}")
    for name, value in MUST_BE.items():
        if hf.get(name, value) != value:
            raise WrongUse(f"config.json has {name!r} = {hf[name]}, and the decoder computes {value} only; {THROUGH}")
    sliding = "sliding_attention" in (hf.get("layer_types") or ())
    switched = hf.get("use_sliding_window") and hf.get("max_window_layers", 28) < hf.get("num_hidden_layers", 0)
    if hf["model_type"] in ("qwen2", "qwen3") and (sliding or switched):
        raise WrongUse(f"config.json has a sliding window in some layers and not in others, which the decoder does not "
                       f"compute; {THROUGH}")


def read_activation(hf: Mapping[str, Any]) -> str:
    """Our name for the activation. Raises WrongUse for one the decoder does not have."""
    name = hf.get("activation_function") or hf.get("hidden_act") or "silu"
    if hf["model_type"] == "gemma" and name == "gelu":
        return "gelu_tanh"      # the first Gemma folders say "gelu" and mean the approximation; transformers agrees
    if name not in OUR_ACTIVATIONS:
        raise WrongUse(f"config.json has the activation {name!r}, and the decoder has {', '.join(OUR_ACTIVATIONS)}; "
                       f"{THROUGH}")
    return OUR_ACTIVATIONS[name]


def read_special_tokens(hf: Mapping[str, Any]) -> tuple[int | None, int | None, tuple[int, ...]]:
    """The ids that begin and end a text, and further ones that end it, as far as they lie in the vocabulary."""
    first, ends = token_ids(hf, "bos_token_id")[:1], token_ids(hf, "eos_token_id")
    return None if not first or first == ends[:1] else first[0], ends[0] if ends else None, tuple(ends[1:])


def token_ids(hf: Mapping[str, Any], name: str) -> list[int]:
    """The ids of one field, which may hold none, one or a list, without those outside the vocabulary."""
    given = hf.get(name)
    ids = given if isinstance(given, list) else [given]
    return [token for token in ids if token is not None and 0 <= token < hf["vocab_size"]]
