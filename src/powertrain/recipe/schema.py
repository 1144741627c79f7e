"""The keys of a recipe. Names are Hugging Face's where one exists; a value of None is left to the planner."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

EPOCHS = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*epochs?\s*$")

Pin = Literal["on", "off"] | dict[str, Any]


def _word_for_switch(value: Any) -> Any:
    """YAML 1.1 reads on and off as booleans; a pin means the words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _check_interval(value: Any) -> Any:
    if isinstance(value, str) and not EPOCHS.match(value):
        raise ValueError(f"{value!r} is neither a number of steps nor epochs such as '5 epochs'")
    return value


Interval = Annotated[int | str, BeforeValidator(_check_interval)]  # optimizer steps, or "5 epochs"; 0 = never
Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelRecipe(Strict):
    """The decoder, built from scratch. Only the family has a default; sizes left out are derived from those given."""

    family: str = "llama"
    layers: Positive = 6
    width: Positive = 384
    heads: Positive | None = None
    kv_heads: Positive | None = None
    mlp_width: Positive | None = None
    context: Positive | None = None              # the longest document the model can read; default: data.block
    vocabulary: Positive | None = None           # rows of the embedding; default: the tokenizer's
    dropout: Share = 0.0
    activation: Literal["gelu", "gelu_tanh", "silu"] | None = None
    bias: bool | None = None                     # gpt2 only: false leaves biases out of linears and norms
    tied_head: bool | None = None


class DataRecipe(Strict):
    """What to train on. `data=PATH` on the command line is short for `data.source=PATH`."""

    source: str = "stdlib"                       # file, folder, glob, JSONL, or a named corpus: stdlib, shakespeare
    text_field: str = "text"                     # of JSONL rows
    max_chars: Positive | None = None
    tokenizer: str = "bpe"                       # char, byte, bpe, or a Hugging Face tokenizer folder
    vocabulary: Positive | None = None           # of a bpe tokenizer trained here
    block: Positive = 256                        # predicted tokens of an example
    stride: Positive | None = None               # tokens between the starts of two examples; default: block
    validation_share: Share = 0.1
    validation_split: Literal["seeded", "tail"] = "seeded"


class SampleRecipe(Strict):
    """The text written at every evaluation, to look at."""

    prompt: str = ""
    tokens: Annotated[int, Field(ge=0)] = 160    # 0 = none
    temperature: Annotated[float, Field(ge=0)] = 0.8
    top_k: Positive | None = None


class Recipe(Strict):
    """One training run. `train_batch_size` is examples (blocks) per optimizer step, however they are split."""

    name: str = "run"
    description: str = ""
    corrections: list[str] = []                  # against the document that a shipped recipe comes from, and why
    method: Literal["scratch"] = "scratch"
    model: ModelRecipe = ModelRecipe()
    data: DataRecipe = DataRecipe()
    output_dir: str | None = None                # default: runs/<name>-<date>

    train_batch_size: Positive = 32
    num_train_epochs: Annotated[float, Field(gt=0)] = 1.0
    max_steps: Positive | None = None            # overrides num_train_epochs
    train_time_s: Annotated[float, Field(gt=0)] | None = None  # as many steps as fit, by a short probe; sets max_steps

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr_rate: Annotated[float, Field(ge=0, le=1)] = 0.0   # the schedule's end, as a share of learning_rate
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] | None = None  # overrides warmup_ratio
    weight_decay: Annotated[float, Field(ge=0)] = 0.1        # of matrices; norms and biases never decay
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.95
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0       # 0 = no clipping
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42

    eval_steps: Interval = 250
    max_eval_samples: Positive | None = 64       # blocks read by evaluations during the run; the last one reads all
    save_steps: Interval = 500
    save_total_limit: Positive = 2               # newest checkpoints kept, besides the best
    logging_steps: Positive = 10
    sample: SampleRecipe = SampleRecipe()

    techniques: dict[str, Annotated[Pin, BeforeValidator(_word_for_switch)]] = {}  # on, off, or settings

    @model_validator(mode="after")
    def _agree(self) -> Recipe:
        if self.max_steps is not None and self.train_time_s is not None:
            raise ValueError(f"max_steps={self.max_steps} and train_time_s={self.train_time_s:g} both set the length of "
                             "the run; keep one and set the other to null")
        return self


def in_steps(interval: int | str, steps_per_epoch: float) -> int:
    """Optimizer steps of an interval given in steps or epochs (at least 1), or 0 for never."""
    if isinstance(interval, int):
        return max(0, interval)
    found = EPOCHS.match(interval)
    assert found, interval
    return max(1, round(float(found.group(1)) * steps_per_epoch))
