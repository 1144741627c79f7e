"""How rotary positions are written in `config.json`, and read from it as transformers 5 reads it. See rotary.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from powertrain.models.config import SCALINGS, ModelConfig, RotaryScaling
from powertrain.records import WrongUse

Json = dict[str, Any]
SHARES_HEAD = ("gpt_neox", "phi3")           # families that rotate a part of the head also where nothing is scaled


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
