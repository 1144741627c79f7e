"""What a decoder is made of, as one value, and how the parts nobody named are derived.

Eight families differ in norms, positions, MLP and biases only, so each is a row of families.yaml and the decoder reads the
resulting `ModelConfig`; no code branches on a family's name except where Hugging Face folders are read and written.
Loads no torch.
"""

import difflib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from powertrain.records import WrongUse

EVEN_QUARTERS = 8      # a head of so many dimensions, or a multiple, can be rotated in every family: gpt_neox rotates a quarter
HEAD_WIDTH = 64        # of GPT-2, GPT-NeoX and the small Llamas; kernels are tuned for 64 and 128
# the most of each count: ten times the largest models that are published, so that a wrong number is refused before anything
# is computed from it
MOST = {"layers": 4096, "width": 2**18, "heads": 2**14, "kv_heads": 2**14, "head_width": 2**14, "mlp_width": 2**21,
        "vocabulary": 2**25, "context": 2**31, "window": 2**31}
ASPECT = 64            # width / layers of GPT-2 small (768 / 12) and of nanochat
ACTIVATIONS = ("gelu", "gelu_tanh", "silu")
SHOWN_CHARS = 40       # of a wrong value, in an error
ROTARY_BASE = 10_000.0  # Su et al. 2021
SCALINGS = ("linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary positions are stretched beyond the context that a model was first trained on; see decoder.py."""

    kind: str                                # one of SCALINGS
    factor: float                            # by how much
    original_context: int = 0                # tokens; 0 for linear, which does not ask
    attention_factor: float = 1.0            # cosines and sines are multiplied by it (yarn, longrope)
    slow_turns: float = 1.0                  # dimensions that turn less often in the original context are stretched fully
    fast_turns: float = 1.0                  # and those that turn more often not at all (llama3, yarn)
    whole_dimensions: bool = True            # yarn: the dimensions between are counted in whole ones
    short_factors: tuple[float, ...] = ()    # longrope: of each pair of dimensions, in documents up to original_context
    long_factors: tuple[float, ...] = ()     # and in longer ones

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise WrongUse(f"there is no rotary scaling {self.kind!r}; use one of {', '.join(SCALINGS)}")
        if self.factor <= 0 or (self.kind != "linear" and self.original_context < 1):
            raise WrongUse(f"rotary positions cannot be scaled {self.factor:g} times from {self.original_context} tokens; "
                           f"both must be above 0")
        if self.kind == "llama3" and self.fast_turns <= self.slow_turns:
            raise WrongUse(f"llama3 scaling lies between its low frequency factor and its high one, and {self.slow_turns:g} "
                           f"is not below {self.fast_turns:g}; check the model's config.json")


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. Raises WrongUse for numbers that cannot make one."""

    family: str
    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int                     # each serves heads / kv_heads query heads
    head_width: int
    mlp_width: int
    context: int                      # tokens of the longest document it is made for
    dropout: float                    # of embeddings, attention weights and both residual branches, while training
    norm: str                         # "layer" or "rms"
    norm_epsilon: float
    norm_bias: bool
    norm_offset: bool                 # the norm multiplies by 1 + weight (gemma)
    positions: str                    # "learned" or "rotary"
    rotary_base: float
    rotary_share: float               # share of the head that is rotated, from its start
    activation: str                   # one of ACTIVATIONS; "gelu" is the exact one
    gated_mlp: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool                     # an RMS norm over each head of q and k (qwen3)
    parallel_residual: bool           # attention and MLP read the same x (gpt_neox)
    tied_head: bool                   # the head is the embedding
    embedding_scale: float            # the embedding is multiplied by this (gemma: sqrt(width))
    window: int | None = None         # tokens a token sees, itself included; None = its whole document
    end_of_text: int | None = None    # token id
    begin_of_text: int | None = None  # token id, where it is not end_of_text
    other_ends: tuple[int, ...] = ()  # further token ids that end an answer
    rotary_scaling: RotaryScaling | None = None
    rewards: bool = False             # the head gives one score in place of the tokens' logits

    @property
    def classes(self) -> int:
        """Return how many scores the head gives a token's row."""
        return 1 if self.rewards else self.vocabulary

    @property
    def positions_change_at(self) -> int | None:
        """Return the length in tokens beyond which all rotary positions of a document change (longrope), or None.

        Keys remembered from before that are of no use after it.
        """
        scaling = self.rotary_scaling
        return scaling.original_context if scaling is not None and scaling.kind == "longrope" else None

    @property
    def rotary_width(self) -> int:
        """Return how many of a head's dimensions are rotated; 0 with learned positions."""
        return int(self.head_width * self.rotary_share) if self.positions == "rotary" else 0

    def __post_init__(self) -> None:
        check_numbers(self)
        check_heads(self)
        check_family(self)


@dataclass(frozen=True)
class Family:
    """What the models of a family have in common, and what its Hugging Face format leaves open."""

    norm: str = "rms"
    norm_epsilon: float = 1e-6
    norm_offset: bool = False
    positions: str = "rotary"
    rotary_share: float = 1.0
    activation: str = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    parallel_residual: bool = False
    tied_head: bool = False
    scaled_embedding: bool = False
    grouped_heads: bool = True        # kv_heads may be fewer than heads
    free_head_width: bool = False     # head_width may differ from width / heads
    may_slide: bool = False           # a sliding window can be expressed
    may_drop_biases: bool = False

    def settings(self, width: int) -> dict[str, Any]:
        """Return the fields of a ModelConfig that the family fixes, or fills in where a model does not name them."""
        shared = {name: value for name, value in vars(self).items() if name in ModelConfig.__dataclass_fields__}
        scale = math.sqrt(width) if self.scaled_embedding else 1.0
        return shared | {"norm_bias": self.norm == "layer", "embedding_scale": scale}


TABLES = yaml.safe_load(Path(__file__).with_name("families.yaml").read_text(encoding="utf-8"))
FAMILIES: dict[str, Family] = {name: Family(**row["decoder"]) for name, row in TABLES["families"].items()}


def find_family(name: str) -> Family:
    """Return the family's row of `FAMILIES`. Raises WrongUse, with the nearest name, for an unknown family."""
    if name in FAMILIES:
        return FAMILIES[name]
    near = difflib.get_close_matches(name.lower().replace("-", "_"), FAMILIES, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise WrongUse(f"there is no model family {name!r}{hint}; the families are {', '.join(FAMILIES)}")


def check_numbers(config: ModelConfig) -> None:
    """Raise WrongUse for a number outside its range."""
    refuse_counts(**{name: getattr(config, name) for name in MOST})
    if not 0 <= config.dropout < 1:
        raise WrongUse(f"dropout is {config.dropout}; it is the share that is dropped, from 0 to below 1")
    if not 0 < config.rotary_share <= 1 or config.rotary_base <= 0 or not 0 <= config.norm_epsilon < 1:
        raise WrongUse(f"rotary positions with the base {config.rotary_base:g} in {config.rotary_share:g} of a head, and norms "
                       f"with {config.norm_epsilon:g}, cannot be computed; check the model's config.json")
    if config.activation not in ACTIVATIONS:
        raise WrongUse(f"there is no activation {config.activation!r}; use one of {', '.join(ACTIVATIONS)}")
    if config.end_of_text is not None and not 0 <= config.end_of_text < config.vocabulary:
        raise WrongUse(f"end_of_text is token {config.end_of_text}, but the vocabulary has {config.vocabulary} tokens, "
                       f"0 to {config.vocabulary - 1}")


def refuse_counts(**counts: int | None) -> None:
    """Raise WrongUse for what is no whole number from 1 to MOST, by its name; None passes."""
    for name, count in counts.items():
        if count is None:
            continue
        if type(count) is not int or count > MOST[name]:
            raise WrongUse(f"{name} is {str(count)[:SHOWN_CHARS]}; use a whole number, {MOST[name]:,} or less")
        if count < 1:
            raise WrongUse(f"{name} is {count}; use 1 or more")


def check_heads(config: ModelConfig) -> None:
    """Raise WrongUse where the heads do not fit the width, each other, or the rotation."""
    if config.heads % config.kv_heads:
        raise WrongUse(f"{config.heads} heads do not share {config.kv_heads} kv_heads evenly; "
                       f"use {nearest_divisors(config.heads, config.kv_heads)} kv_heads")
    if config.positions == "rotary" and (config.rotary_width % 2 or config.rotary_width < 2):
        share = "" if config.rotary_share == 1 else f" ({config.rotary_share:g} of a head of {config.head_width})"
        raise WrongUse(f"{config.family} rotates pairs of dimensions, and {config.rotary_width} dimensions a head{share} "
                       f"cannot be paired; use for example model.width={HEAD_WIDTH * config.heads} model.heads={config.heads}")
    scaling = config.rotary_scaling
    if scaling is None or scaling.kind != "longrope":
        return
    for factors in (scaling.short_factors, scaling.long_factors):
        if len(factors) != config.rotary_width // 2:
            raise WrongUse(f"longrope scaling has {len(factors)} factors for {config.rotary_width // 2} pairs of rotated "
                           f"dimensions; check the model's config.json")


def check_family(config: ModelConfig) -> None:
    """Raise WrongUse for what the family's Hugging Face format cannot say."""
    name, family = config.family, find_family(config.family)
    if not family.grouped_heads and config.kv_heads != config.heads:
        raise WrongUse(f"{name} cannot have {config.kv_heads} kv_heads for {config.heads} heads: each of its heads has "
                       f"its own keys and values; leave kv_heads out, or use llama")
    if (not family.free_head_width or name == "llama") and config.width % config.heads:
        raise no_fit(config.width, config.heads)
    if not family.free_head_width and config.head_width * config.heads != config.width:
        raise WrongUse(f"{name} cannot have {config.heads} heads of {config.head_width} in a width of {config.width}; "
                       f"leave head_width out, or use llama")
    if config.window is not None and not family.may_slide:
        raise WrongUse(f"{name} has no sliding window, and {config.window} tokens were asked for; leave window out, or "
                       f"use mistral")
    if config.rotary_scaling is not None and (config.positions != "rotary" or (
            name == "phi3" and config.rotary_scaling.kind != "longrope")):
        raise WrongUse(f"{name} cannot have {config.rotary_scaling.kind} scaling of its positions; leave it out, or use llama")


def no_fit(width: int, heads: int) -> WrongUse:
    """Return the error for a width that the heads do not divide."""
    fitting = math.ceil(width / heads / EVEN_QUARTERS) * EVEN_QUARTERS * heads
    return WrongUse(f"{heads} heads do not divide a width of {width}: {width % heads} dimensions are left over; use "
                    f"{nearest_divisors(width, heads)} heads, or a width of {fitting}")


def nearest_divisors(number: int, near: int) -> str:
    """Return the divisors of `number` just below and just above `near`, as "6 or 8"."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < near][-1:]
    above = [d for d in divisors if d > near][:1]
    return " or ".join(str(d) for d in below + above)


def make_config(family: str, *, vocabulary: int, layers: int | None = None, width: int | None = None,
                heads: int | None = None, kv_heads: int | None = None, mlp_width: int | None = None,
                context: int | None = None, dropout: float = 0.0, activation: str | None = None,
                bias: bool | None = None, tied_head: bool | None = None, head_width: int | None = None,
                window: int | None = None, end_of_text: int | None = None) -> tuple[ModelConfig, dict[str, str]]:
    """Return the config for the named values, and by field the reason for each value that was derived.

    Raises WrongUse for an unknown family, impossible numbers, and what the family cannot express.
    """
    row, reasons = find_family(family), dict[str, str]()

    def take(field: str, asked: Any, derived: Any, reason: str) -> Any:
        """Return `asked`, or where that is None `derived`, and note the reason."""
        if asked is None:
            reasons[field] = reason
        return derived if asked is None else asked

    refuse_counts(layers=layers, width=width, heads=heads, head_width=head_width, mlp_width=mlp_width, vocabulary=vocabulary)
    by_width = (6, "6: no depth and no width were asked for") if width is None else \
        (max(1, round(width / ASPECT)), f"width / {ASPECT}, as GPT-2 small has it")
    layers = take("layers", layers, *by_width)
    width = take("width", width, ASPECT * layers, f"{ASPECT} x layers, as GPT-2 small has it")
    heads = take("heads", heads, *derive_heads(width, head_width))
    if head_width is None and width % heads:
        raise no_fit(width, heads)
    if bias is False and not row.may_drop_biases:
        raise WrongUse(f"{family} fixes which of its layers have a bias; leave bias out, or use gpt2")
    asked = {
        "kv_heads": take("kv_heads", kv_heads, heads, "one for each head"),
        "head_width": take("head_width", head_width, width // heads, "width / heads"),
        "mlp_width": take("mlp_width", mlp_width, *derive_mlp_width(width, row.gated_mlp)),
        "context": take("context", context, 256, "256 tokens: nothing longer was asked for"),
        "activation": take("activation", activation, row.activation, f"{family}'s activation"),
        "tied_head": take("tied_head", tied_head, row.tied_head, f"{family}'s default")}
    biases = {} if bias is not False else dict.fromkeys(("norm_bias", "qkv_bias", "output_bias", "mlp_bias"), False)
    return ModelConfig(family=family, vocabulary=vocabulary, layers=layers, width=width, heads=heads, dropout=dropout,
                       window=window, end_of_text=end_of_text, rotary_base=ROTARY_BASE,
                       **row.settings(width) | asked | biases), reasons


def derive_heads(width: int, head_width: int | None) -> tuple[int, str]:
    """Return the number of heads and the reason. Heads are 64 wide, or have the nearest even width that divides `width`."""
    if head_width is not None:
        return max(1, width // head_width), "width / head_width"
    if width % HEAD_WIDTH == 0:
        return width // HEAD_WIDTH, f"width / {HEAD_WIDTH}"
    even = [d for d in range(1, width + 1) if width % d == 0 and (width // d) % 2 == 0] or [1]
    heads = min(even, key=lambda count: abs(math.log(width / count / HEAD_WIDTH)))
    return heads, f"heads of {width // heads}: the nearest to {HEAD_WIDTH} that divides a width of {width}"


def derive_mlp_width(width: int, gated: bool) -> tuple[int, str]:
    """Return the MLP's width and the reason: 4 x width; for a gated MLP (three matrices, not two) 2/3 of that, rounded up.

    Source: Shazeer 2020 (GLU variants), section 3; rounded so that matrix products fill their tiles.
    """
    if not gated:
        return 4 * width, "4 x width"
    multiple = 64 if width >= 256 else 32
    return math.ceil(8 * width / 3 / multiple) * multiple, f"8/3 x width, rounded up to a multiple of {multiple}"
