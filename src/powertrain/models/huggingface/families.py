"""How Hugging Face writes each family: the fields of `config.json` and the names of weights (families.yaml). Loads no torch.


A config is written as plain JSON, so that saving needs no transformers; every field is written that transformers would
otherwise fill with the size of a published model. Rotary fields are written twice, as transformers 5 reads them
(`rope_parameters`) and as transformers 4 and most other readers do (`rope_theta`, `rope_scaling`).
Reading raises WrongUse for what the decoder cannot compute: a model that loads gives the same logits.

Each row of `map_weights` pairs one of our tensors with one or more of theirs, which are stacked along the first dimension to
make ours. `transposed`: GPT-2 stores linears as (in, out). `interleaved`: GPT-NeoX stores q, k and v of one head after the
other, where ours has all q, then all k, then all v.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from powertrain.models.config import FAMILIES, ROTARY_BASE, TABLES, ModelConfig, RotaryScaling
from powertrain.records import WrongUse

Json = dict[str, Any]

HF_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}
OUR_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
                   "silu": "silu", "swish": "silu"}
BIASED = {"norm_bias": ("attention_norm", "mlp_norm", "norm"), "qkv_bias": ("qkv",), "output_bias": ("attention_out",),
          "mlp_bias": ("mlp_in", "mlp_out")}

# The only values that the decoder computes, of fields that change the logits.
COMPUTED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
            "use_bidirectional_attention": False}
CLASSIFIER, REWARD_HEAD = "ForSequenceClassification", "score.weight"        # of one label: a reward model
NEEDED = ("vocabulary", "layers", "width", "heads", "mlp_width", "context")
SHARES_HEAD = ("gpt_neox", "phi3")           # families that rotate a part of the head also where nothing is scaled
THROUGH = "train it through transformers: model.provider=transformers"


@dataclass(frozen=True)
class Format:
    """How Hugging Face writes a family; families.yaml says what each field is."""

    architecture: str
    fields: Mapping[str, str]
    defaults: Mapping[str, Any]
    names: Mapping[str, str]
    prefix: str = "model."
    layouts: Mapping[str, str] = field(default_factory=dict)


SCALING_FIELDS: dict[str, dict[str, str]] = TABLES["scalings"]           # kind -> field of config.json -> of RotaryScaling
FORMATS: dict[str, Format] = {family: Format(**row["format"]) for family, row in TABLES["families"].items()}

# ------------------------------------------------------------------------------------------------ weights


@dataclass(frozen=True)
class Row:
    """One of our tensors and its counterparts. `sizes`: rows of each counterpart, where there are several."""

    ours: str
    theirs: tuple[str, ...]
    layout: str = "same"                 # or "transposed" or "interleaved"
    sizes: tuple[int, ...] = ()


def map_weights(config: ModelConfig) -> tuple[Row, ...]:
    """Return every weight of the family as Hugging Face has it, the embedding first.

    GPT-2 always has biases: a decoder without them is saved with zeros.
    """
    form, rows = FORMATS[config.family], []
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    sizes = {"qkv": (queries, keys, keys), "mlp_in": (config.mlp_width, config.mlp_width)}
    biased = {part for name, parts in BIASED.items() if getattr(config, name) or config.family == "gpt2" for part in parts}

    def add(part: str, ours: str, begin: str) -> None:
        theirs = [begin + name for name in form.names[part].split()]
        for kind in ("weight", "bias") if part in biased else ("weight",):
            rows.append(Row(f"{ours}.{kind}", tuple(f"{name}.{kind}" for name in theirs), form.layouts.get(part, "same"),
                            sizes[part] if len(theirs) > 1 else ()))

    add("embedding", "embedding", form.prefix)
    if config.positions == "learned":
        add("position_embedding", "position_embedding", form.prefix)
    for i in range(config.layers):
        for part in ("attention_norm", "qkv", "attention_out", "mlp_norm", "mlp_in", "mlp_out",
                     *(("q_norm", "k_norm") if config.qk_norm else ())):
            add(part, f"blocks.{i}.{part}", f"{form.prefix}{form.names['blocks']}.{i}.")
    add("norm", "norm", form.prefix)
    if config.rewards:
        rows.append(Row("head.weight", (REWARD_HEAD,)))
    elif not config.tied_head:
        add("head", "head", "")
    return tuple(rows)


# ------------------------------------------------------------------------------------------------ config.json


def to_hf_config(config: ModelConfig) -> Json:
    """Return what `config.json` holds."""
    form, values = FORMATS[config.family], vars(config) | {"activation": HF_ACTIVATIONS[config.activation]}
    written = {theirs: values[ours] for theirs, ours in form.fields.items()}
    if config.family in ("qwen2", "qwen3"):
        written["use_sliding_window"] = False
    if config.family == "phi3":
        scaling = config.rotary_scaling
        written["original_max_position_embeddings"] = scaling.original_context if scaling else config.context
    if config.positions == "rotary":
        written |= rotary_fields(config)
    architecture = form.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + CLASSIFIER if config.rewards \
        else form.architecture
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if config.rewards else {}
    return {"architectures": [architecture], "model_type": config.family, **written, **token_fields(config), **labels,
            "pad_token_id": None, "initializer_range": 0.02, "use_cache": True, "dtype": "float32"}


def token_fields(config: ModelConfig) -> Json:
    """Return the ids that begin and end a text, as config.json and generation_config.json both say them."""
    first = config.end_of_text if config.begin_of_text is None else config.begin_of_text
    ends = [token for token in (config.end_of_text, *config.other_ends) if token is not None]
    return {"bos_token_id": first, "eos_token_id": ends if len(ends) > 1 else config.end_of_text}


def from_hf_config(given: Mapping[str, Any], dropout: float = 0.0) -> ModelConfig:
    """Return the config that computes what this `config.json` describes. Dropout belongs to training: the caller gives it.

    Raises WrongUse for a model_type that is not supported, a missing field, and what the decoder does not compute.
    """
    family = given.get("model_type")
    if family not in FAMILIES:
        raise WrongUse(f"the folder holds a model of type {family!r}", advice=f"the decoder loads {', '.join(FAMILIES)}, and "
                       "the rest trains through transformers: model.provider=transformers")
    row, fields, hf = FAMILIES[family], FORMATS[family].fields, {**FORMATS[family].defaults, **given}
    refuse_unsupported(hf)
    read = {ours: hf[theirs] for theirs, ours in fields.items() if hf.get(theirs) is not None}
    for theirs, ours in fields.items():
        if ours in NEEDED and ours not in read and theirs != "n_inner":
            raise WrongUse(f"config.json has no {theirs!r}, which a {family} model needs",
                           advice="the folder may be incomplete")
    width, heads = read["width"], read["heads"]
    defaults = row.settings(width) | {"kv_heads": heads, "head_width": width // heads, "mlp_width": 4 * width}
    if "attention_bias" in fields:
        read["output_bias"] = read.setdefault("qkv_bias", row.qkv_bias)
    base, share, scaling = read_rotary(hf, row.rotary_share)
    begins, ends = token_ids(hf, "bos_token_id"), token_ids(hf, "eos_token_id")
    if rewards := is_classifier(given):
        labels = len(hf.get("id2label") or (0, 1))           # transformers' default is 2
        if labels != 1:
            raise WrongUse(f"config.json describes a classifier of {labels} labels, and a reward model has one",
                           advice="give the model that it was made from")
        read["tied_head"] = False
    return ModelConfig(**defaults | read | {
        "family": family, "dropout": dropout, "activation": read_activation(hf), "rotary_base": base, "rotary_share": share,
        "rotary_scaling": scaling, "begin_of_text": begins[0] if begins and begins[:1] != ends[:1] else None,
        "end_of_text": ends[0] if ends else None, "other_ends": tuple(ends[1:]), "rewards": rewards})


def is_classifier(given: Mapping[str, Any]) -> bool:
    """Return whether this `config.json` is of a model whose head scores whole texts."""
    return any(str(name).endswith(CLASSIFIER) for name in given.get("architectures") or ())


def refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Raise WrongUse for a field whose value changes the logits in a way that the decoder does not compute."""
    if stored := hf.get("quantization_config"):
        how = stored.get("quant_method") or "in some way"
        raise WrongUse(f"the 'quantization_config' in config.json says that the weights are quantised ({how}), and "
                       "only unquantised weights can be read",
                       advice="give the unquantised base, with method=qlora for 4 bits")
    for name, value in COMPUTED.items():
        if bool(hf.get(name, value)) is not value:
            raise WrongUse(f"config.json has {name!r} = {hf[name]}, and the decoder computes {value} only", advice=THROUGH)
    sliding = "sliding_attention" in (hf.get("layer_types") or ())
    switched = hf.get("use_sliding_window") and hf.get("max_window_layers", 28) < hf.get("num_hidden_layers", 0)
    if hf["model_type"] in ("qwen2", "qwen3") and (sliding or switched):
        raise WrongUse("config.json has a sliding window in some layers and not in others, which the decoder does not "
                       "compute", advice=THROUGH)


def read_activation(hf: Mapping[str, Any]) -> str:
    """Return our name for the activation. Raises WrongUse for one the decoder does not have."""
    name = hf.get("activation_function") or hf.get("hidden_act") or "silu"
    if hf["model_type"] == "gemma" and name == "gelu":
        return "gelu_tanh"      # the first Gemma folders say "gelu" and mean the approximation; transformers agrees
    if name not in OUR_ACTIVATIONS:
        raise WrongUse(f"config.json has the activation {name!r}, and the decoder has {', '.join(OUR_ACTIVATIONS)}; "
                       f"{THROUGH}")
    return OUR_ACTIVATIONS[name]


def token_ids(hf: Mapping[str, Any], name: str) -> list[int]:
    """Return the ids of one field, which may hold none, one or a list, without those outside the vocabulary."""
    given = hf.get(name)
    ids = given if isinstance(given, list) else [given]
    return [token for token in ids if token is not None and 0 <= token < hf["vocab_size"]]


# ------------------------------------------------------------------------------------------------ rotary positions


def rotary_fields(config: ModelConfig) -> Json:
    """Return the fields for transformers 5 (`rope_parameters`), and for transformers 4 and most other readers."""
    scaling = config.rotary_scaling
    scaled: Json = {"rope_type": "default"}
    if scaling is not None:
        values = {theirs: getattr(scaling, ours) for theirs, ours in SCALING_FIELDS[scaling.kind].items()}
        scaled = {"rope_type": scaling.kind} | {name: list(value) if isinstance(value, tuple) else value
                                                for name, value in values.items()}
    rope = scaled | {"rope_theta": config.rotary_base, "partial_rotary_factor": config.rotary_share}
    return {"rope_parameters": rope, "rope_theta": config.rotary_base} | ({} if scaling is None else {"rope_scaling": scaled})


def read_rotary(hf: Mapping[str, Any], share: float) -> tuple[float, float, RotaryScaling | None]:
    """Return base, share of the head, and scaling. Raises WrongUse for a scaling that the decoder does not compute."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise WrongUse("config.json has different rotary positions in different layers, which the decoder does not "
                       "compute", advice=THROUGH)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if hf["model_type"] == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"                    # what the first Phi-3 folders called it; transformers agrees
    if kind not in ("default", *SCALING_FIELDS):
        raise WrongUse(f"config.json scales its rotary positions by {kind!r}, and the decoder computes "
                       f"{', '.join(SCALING_FIELDS)} only", advice=THROUGH)
    base = first_of(rope.get("rope_theta"), hf.get("rope_theta"), hf.get("rotary_emb_base"), ROTARY_BASE)
    if hf["model_type"] in SHARES_HEAD or kind != "default":
        share = first_of(rope.get("partial_rotary_factor"), hf.get("partial_rotary_factor"), hf.get("rotary_pct"), share)
    try:
        scaling = None if kind == "default" else read_scaling(kind, rope, hf)
    except KeyError as error:
        raise WrongUse(f"config.json scales its rotary positions by {kind!r} without {error}, which this scaling needs",
                       advice="the folder may be incomplete") from None
    except (ArithmeticError, TypeError) as error:
        raise WrongUse(f"config.json scales its rotary positions by {kind!r} with numbers that cannot be used ({error})",
                       advice="copy or download the file again") from None
    return float(base), float(share), scaling


def read_scaling(kind: str, rope: Mapping[str, Any], hf: Mapping[str, Any]) -> RotaryScaling:
    """Return the scaling that transformers computes from `rope`. Raises KeyError for a field that it needs."""
    given = {name: value for name, value in rope.items() if value is not None}
    if kind != "linear":
        context, name = hf["max_position_embeddings"], "original_max_position_embeddings"
        # outside `rope` (where Phi-3 has it) it counts more than inside
        given[name] = original = int(first_of(hf.get(name), given.get(name), context))
    if kind in ("yarn", "longrope"):
        factor = given.setdefault("factor", context / original)
        stretched = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        given.setdefault("attention_factor", yarn_sharpening(factor, rope) if kind == "yarn" else stretched)
    if kind == "yarn":
        given |= {"beta_slow": given.get("beta_slow") or 1, "beta_fast": given.get("beta_fast") or 32,
                  "truncate": bool(given.get("truncate", True))}
    read: Json = {ours: given[theirs] for theirs, ours in SCALING_FIELDS[kind].items()}
    return RotaryScaling(kind, **read | {name: tuple(map(float, value)) for name, value in read.items()
                                         if isinstance(value, list)})


def yarn_sharpening(factor: float, rope: Mapping[str, Any]) -> float:
    """Return what cosines and sines are multiplied by where the config does not say: Peng et al. 2023, section 3.4."""

    def sharpening(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    return sharpening(over) / sharpening(under) if over and under else sharpening(1)


def first_of(*values: Any) -> Any:
    """Return the first that is not None."""
    return next(value for value in values if value is not None)
