"""What kind of value each field of config.json has: a damaged or hostile file may have another. Loads no torch."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from powertrain.records import WrongUse

SHOWN_CHARS = 40             # of a wrong value
LARGEST_TOKEN = 2**31
LARGEST_RANK = 2**16         # of an adapter, whose matrices are made before they are filled


def _is_token(value: Any) -> bool:
    return type(value) is int and -1 <= value < LARGEST_TOKEN


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e30 < value < 1e30


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError, RecursionError, OverflowError):
        return False
    return isinstance(value, str)


KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("text", lambda value: isinstance(value, str)),
    "table": ("a table", lambda value: isinstance(value, Mapping)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "texts": ("a list of texts", _are_texts),
    "number": ("a finite number", _is_number),
    "numbers": ("a list of finite numbers", lambda value: isinstance(value, list) and all(map(_is_number, value))),
    "rank": (f"a whole number from 1 to {LARGEST_RANK:,}", lambda value: type(value) is int and 1 <= value <= LARGEST_RANK),
    "modules": ("names of modules, or a regular expression", lambda value: _is_pattern(value) or _are_texts(value)),
    "token": ("a token's number", _is_token),
    "tokens": ("a token's number, or a list of them",
               lambda value: _is_token(value) or (isinstance(value, list) and all(map(_is_token, value))))}
# of every model
FIELDS: Mapping[str, str] = {
    "model_type": "text", "architectures": "texts", "auto_map": "table", "quantization_config": "table", "text_config": "table",
    "eos_token_id": "tokens", "bos_token_id": "tokens", "pad_token_id": "token", "decoder_start_token_id": "token",
    "is_encoder_decoder": "flag", "is_decoder": "flag"}
# of the families that the decoder computes: there a count is a number, not a list of one for each layer
OF_FAMILIES: Mapping[str, str] = {
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor", "rms_norm_eps", "layer_norm_eps",
                     "layer_norm_epsilon", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads",
                     "n_head", "num_key_value_heads", "intermediate_size", "n_inner", "vocab_size", "max_position_embeddings",
                     "n_positions", "head_dim", "max_window_layers", "sliding_window", "original_max_position_embeddings",
                     "initializer_range"), "number"),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "use_parallel_residual",
                     "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"), "flag"),
    **dict.fromkeys(("hidden_act", "activation_function"), "text"), "layer_types": "texts",
    "rope_scaling": "table", "rope_parameters": "table"}
OF_ROTARY: Mapping[str, str] = {             # of rope_scaling and rope_parameters
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor", "beta_fast",
                     "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings"),
                    "number"), "rope_type": "text", "type": "text", "short_factor": "numbers", "long_factor": "numbers"}
OF_ADAPTERS: Mapping[str, str] = {
    "peft_type": "text", "task_type": "text", "base_model_name_or_path": "text", "r": "rank", "lora_alpha": "number",
    "lora_dropout": "number", "target_modules": "modules", "exclude_modules": "modules", "sigma": "number",
    "regularisation": "number"}


def check_kinds(config: dict[str, Any], file: Path, fields: Mapping[str, str] = FIELDS) -> dict[str, Any]:
    """Return `config` as it is. Raises WrongUse for a field of another kind than it has in every model."""
    for name, kind in fields.items():
        said, fits = KINDS[kind]
        if (value := config.get(name)) is not None and not fits(value):
            raise WrongUse(f"{file} has {name!r} = {str(value)[:SHOWN_CHARS]!r}, which should be {said}",
                           advice="copy or download the file again")
    return config
