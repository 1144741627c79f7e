"""A family's Hugging Face `config.json`, written from a `ModelConfig` and read back.

Written as plain JSON, so that saving needs no transformers; every field is written that transformers would otherwise
fill with the size of a published model. Rotary fields are written twice, as transformers 5 reads them
(`rope_parameters`) and as transformers 4 and most other readers do (`rope_theta`, `rope_scaling`).
Reading raises WrongUse for what the decoder cannot compute: a model that loads gives the same logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from powertrain.models.config import FAMILIES, SCALINGS, ModelConfig, RotaryScaling
from powertrain.models.huggingface.names import CONFIG, GENERATION, SHARDS, WEIGHTS
from powertrain.records import WrongUse
from powertrain.records.json_files import read_json

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
SHARES_HEAD = ("gpt_neox", "phi3")           # families that rotate a part of the head also where nothing is scaled
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


# ------------------------------------------------------------------------------------------------ rotary positions


def rotary_fields(config: ModelConfig) -> Json:
    """The fields for transformers 5 (`rope_parameters`), and for transformers 4 and most other readers."""
    scaling = config.rotary_scaling
    scaled = {"rope_type": "default"} if scaling is None else scaling_fields(scaling)
    rope = scaled | {"rope_theta": config.rotary_base, "partial_rotary_factor": config.rotary_share}
    return {"rope_parameters": rope, "rope_theta": config.rotary_base} | ({} if scaling is None else {"rope_scaling": scaled})


def scaling_fields(scaling: RotaryScaling) -> Json:
    """What each kind names, with nothing left for the reader to derive."""
    fields: Json = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return fields
    fields["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        return fields | {"low_freq_factor": scaling.slow_turns, "high_freq_factor": scaling.fast_turns}
    fields["attention_factor"] = scaling.attention_factor
    if scaling.kind == "yarn":
        return fields | {"beta_slow": scaling.slow_turns, "beta_fast": scaling.fast_turns,
                         "truncate": scaling.whole_dimensions}
    return fields | {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}


def read_rotary(hf: Mapping[str, Any], share: float) -> tuple[float, float, RotaryScaling | None]:
    """Base, share of the head, and scaling. Raises WrongUse for a scaling that the decoder does not compute."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise WrongUse("config.json has other rotary positions in some layers than in others, which the decoder does not "
                       "compute; train it through transformers: model.provider=transformers")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if hf["model_type"] == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"                    # what the first Phi-3 folders called it; transformers agrees
    if kind not in ("default", *SCALINGS):
        raise WrongUse(f"config.json scales its rotary positions by {kind!r}, and the decoder computes "
                       f"{', '.join(SCALINGS)} only; train it through transformers: model.provider=transformers")
    base = first_of(rope.get("rope_theta"), hf.get("rope_theta"), hf.get("rotary_emb_base"), 10_000.0)
    if hf["model_type"] in SHARES_HEAD or kind != "default":
        share = first_of(rope.get("partial_rotary_factor"), hf.get("partial_rotary_factor"), hf.get("rotary_pct"), share)
    try:
        scaling = None if kind == "default" else read_scaling(kind, rope, hf)
    except KeyError as error:
        raise WrongUse(f"config.json scales its rotary positions by {kind!r} without {error}, which that needs; the folder "
                       f"may be incomplete") from None
    return float(base), float(share), scaling


def read_scaling(kind: str, rope: Mapping[str, Any], hf: Mapping[str, Any]) -> RotaryScaling:
    """The scaling that transformers computes from `rope`. Raises KeyError for a field that it needs."""
    if kind == "linear":
        return RotaryScaling(kind, float(rope["factor"]))
    context = int(hf["max_position_embeddings"])
    # outside `rope` (where Phi-3 has it) it counts more than inside
    original = int(first_of(hf.get("original_max_position_embeddings"), rope.get("original_max_position_embeddings"), context))
    factor = float(rope["factor"] if kind == "llama3" else first_of(rope.get("factor"), context / original))
    if kind == "llama3":
        return RotaryScaling(kind, factor, original, slow_turns=float(rope["low_freq_factor"]),
                             fast_turns=float(rope["high_freq_factor"]))
    sharper = rope.get("attention_factor")
    if kind == "yarn":
        return RotaryScaling(kind, factor, original, yarn_sharpening(factor, rope) if sharper is None else float(sharper),
                             slow_turns=float(rope.get("beta_slow") or 1), fast_turns=float(rope.get("beta_fast") or 32),
                             whole_dimensions=bool(rope.get("truncate", True)))
    if sharper is None:
        sharper = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RotaryScaling(kind, factor, original, float(sharper), short_factors=tuple(map(float, rope["short_factor"])),
                         long_factors=tuple(map(float, rope["long_factor"])))


def yarn_sharpening(factor: float, rope: Mapping[str, Any]) -> float:
    """What cosines and sines are multiplied by where the config does not say: Peng et al. 2023, section 3.4."""

    def sharpening(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    return sharpening(over) / sharpening(under) if over and under else sharpening(1)


def first_of(*values: Any) -> Any:
    """The first that is not None."""
    return next(value for value in values if value is not None)


# ------------------------------------------------------------------------------------------------ files


def read_config(folder: Path, dropout: float = 0.0) -> ModelConfig:
    """Return the config of a Hugging Face folder. Raises WrongUse if it is missing, or not one that the decoder computes.

    The tokens that end an answer are also read from generation_config.json, which is where chat models name them all.
    """
    config = from_hf_config(read_model_json(folder / CONFIG), dropout)
    if not (folder / GENERATION).exists():
        return config
    ends = token_ids(read_model_json(folder / GENERATION) | {"vocab_size": config.vocabulary}, "eos_token_id")
    known = (config.end_of_text, *config.other_ends)
    added = tuple(token for token in dict.fromkeys(ends) if token not in known)
    return replace(config, other_ends=config.other_ends + added) if config.end_of_text is not None else config


def read_model_json(file: Path) -> Json:
    """Return the JSON object in a file of a model's folder. Raises WrongUse if the file is missing or holds none."""
    if file.exists():
        return read_json(file, "copy or download it again")
    if file.name == CONFIG and (file.parent / "adapter_config.json").exists():
        raise WrongUse(f"{file.parent} holds an adapter, not a model; give it as model.adapter, and its base as model.path")
    raise WrongUse(f"there is no {file}; a model's folder holds {CONFIG} and {WEIGHTS}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the folder's weights, there or not. Raises WrongUse if there are none to name."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / SHARDS).exists():
        pickled = any(folder.glob("pytorch_model*.bin"))
        cure = (f"it has pickled weights, which are never loaded: save the model anew as {WEIGHTS}" if pickled
                else "check the path")
        raise WrongUse(f"{folder} has neither {WEIGHTS} nor {SHARDS}; {cure}")
    where = read_model_json(folder / SHARDS).get("weight_map")
    if not isinstance(where, dict):
        raise WrongUse(f"{folder / SHARDS} does not say which file holds which weight; copy or download it again")
    return [folder / name for name in sorted({Path(str(file)).name for file in where.values()})]
