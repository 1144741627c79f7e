"""The keys of a recipe. Names are Hugging Face's where one exists; a value of None is left to the planner."""

import os
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from powertrain.records import WrongUse
from powertrain.records.addresses import check_address
from powertrain.records.errors import did_you_mean

EPOCHS = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*epochs?\s*$")

# far above every run, and far below what the arithmetic of sizes and times can hold
LARGEST_NUMBER = 2**31 - 1
LARGEST_BATCH = 2**24        # examples of a step, whose numbers are one list
LARGEST_REAL = 1e9
SHARES_TOLERANCE = 1e-3      # 0.333, 0.333, 0.333 are meant as thirds
LONGEST_NAME = 100           # characters: the name is a part of a folder's

Pin = Literal["on", "off"] | dict[str, Any]


def _word_for_switch(value: Any) -> Any:
    """Return the words on or off for a pin, which YAML 1.1 reads as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _below_home(value: Any) -> Any:
    """Return a path with ~ expanded: no shell expands `output_dir=~/runs/one`."""
    return os.path.expanduser(value) if isinstance(value, str) else value


def _check_source(value: Any) -> Any:
    """Refuse an empty source: `data=$UNSET` in a script would be the path '', which is the whole current folder."""
    if value == "" or (isinstance(value, list) and "" in value):
        raise ValueError("the value is empty; give a file, a folder (. for this one), a hub id or a corpus")
    return value


def _check_interval(value: Any) -> Any:
    if isinstance(value, str) and not EPOCHS.match(value):
        raise ValueError(f"{value!r} is not an interval; give a number of steps, or epochs such as '5 epochs'")
    return value


def _check_name(value: str) -> str:
    """Refuse a name that would lead out of the folder of all runs: the name begins the name of the run's own."""
    if "/" in value or "\\" in value or not value.isprintable() or value.startswith(".") or len(value) > LONGEST_NAME:
        raise ValueError(f"{value[:LONGEST_NAME]!r} cannot begin a folder's name; use up to {LONGEST_NAME} printable "
                         "characters without / and \\, and no dot in front")
    return value


def _check_save_interval(value: Any) -> Any:
    try:
        return value if value == AUTO else _check_interval(value)
    except ValueError as error:
        raise ValueError(f"{error}, or {AUTO}") from None


def _check_trackers(value: Any) -> Any:
    """Return the names of trackers as a list: one name and none are written without brackets, too."""
    names = [] if value in (None, "", "none") else [value] if isinstance(value, str) else value
    for name in names if isinstance(names, list) else ():
        if name not in TRACKERS:
            raise ValueError(f"there is no tracker {str(name)[:LONGEST_NAME]!r}{did_you_mean(str(name), TRACKERS)}; use "
                             f"{', '.join(TRACKERS)}, or leave report_to out")
    return list(dict.fromkeys(names)) if isinstance(names, list) else names


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")     # see tracking/
OWN_TOKENIZERS = ("bpe", "char", "byte")     # made for training from scratch; a pretrained model has its own
AUTO = "auto"                                # of save_steps: see save_every_s
Interval = Annotated[int | str, BeforeValidator(_check_interval)]  # optimizer steps, or "5 epochs"; 0 = never
Source = Annotated[str | list[str], BeforeValidator(_check_source)]
Place = Annotated[str | None, BeforeValidator(_below_home)]        # a path, or what is called like one
Name = Annotated[str, AfterValidator(_check_name)]
Positive = Annotated[int, Field(ge=1, le=LARGEST_NUMBER)]
Share = Annotated[float, Field(ge=0, lt=1)]
Real = Annotated[float, Field(gt=0, le=LARGEST_REAL)]
Weight = Annotated[float, Field(gt=0, le=1000)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def check_shares(shares: Sequence[float], sources: Sequence[str], name: str) -> None:
    """Raise WrongUse unless each source has a share above 0 and all sum to 1. `name`: the key or option that gives them."""
    if len(shares) != len(sources):
        raise WrongUse(f"{name} has {len(shares)} numbers for {len(sources)} sources; give one for each")
    wrong = next((share for share in shares if not 0 < share <= 1), None)
    if wrong is not None:
        raise WrongUse(f"{name} has {wrong:g}, and a share of the tokens is above 0 and at most 1; leave a source out to have "
                       "nothing of it")
    if abs(sum(shares) - 1) > SHARES_TOLERANCE:
        asked = ", ".join(f"{share / sum(shares):.4g}" for share in shares)
        raise WrongUse(f"{name} sum to {sum(shares):g}, and shares of the tokens sum to 1; in this proportion they are {asked}")


class ModelRecipe(Strict):
    """A pretrained model at `path`, or without one a decoder built from scratch, whose open sizes are derived."""

    path: Place = None                           # a Hugging Face folder or hub id, a run's folder, or recipe:NAME
    revision: str | None = None                  # of a hub id: a branch, a tag, or best a full commit hash
    provider: Literal["native", "transformers", "unsloth"] | None = None     # who computes it; default: native if it can
    task: Literal["causal", "seq2seq", "span", "reward"] | None = None       # default: what its config.json says
    adapter: Place = None                        # a PEFT adapter for it, to train further
    trust_remote_code: bool = False              # run Python that comes with the model; needs a commit hash as revision

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
    """What to train on. `data=PATH` on the command line is short for `data.source=PATH`.

    From scratch it is text in blocks (the keys from `block` on). A pretrained model learns from examples: conversations,
    pairs, questions with answers, or texts, one per row of the source.
    """

    source: Source = "stdlib"                    # file, folder, glob, hub id, or a corpus: stdlib, shakespeare, docstrings
    weights: list[Weight] | None = None          # how often an epoch sees each source's examples; default: once
    shares: list[float] | None = None            # of an epoch's tokens, by source: an epoch has the first source once
    format: str | None = None                    # how a row is read: messages, alpaca, ...; default: found by looking
    columns: dict[str, str] = {}                 # the format's column -> the data's: {question: frage}
    split: str | None = None                     # of a hub or Arrow dataset; default: train
    validation_source: str | None = None         # held-out examples of their own; default: validation_share of the source
    max_examples: Positive | None = None         # the first of each source
    max_length: Positive | None = None           # tokens of an example; default: the model's context, at most 2048
    long_examples: Literal["cut", "drop"] | None = None          # beyond max_length; default: cut, if they are few
    train_on: Literal["assistant", "all"] = "assistant"          # whose words are learned
    chat_template: str | None = None             # a file, or plain, chatml or raw; default: the tokenizer's, else plain
    end_token: str | None = None                 # that ends a turn or text; default: the one that the tokenizer names

    text_field: str = "text"                     # of JSONL rows that hold text
    max_chars: Positive | None = None
    tokenizer: str = "bpe"                       # char, byte, bpe, or a Hugging Face tokenizer folder
    vocabulary: Positive | None = None           # of a bpe tokenizer trained here
    block: Positive = 256                        # predicted tokens of an example
    stride: Positive | None = None               # tokens between the starts of two examples; default: block
    validation_share: Share = 0.1
    validation_split: Literal["seeded", "tail"] = "seeded"
    order: Literal["keyed", "sorted"] = "keyed"  # of an epoch of many examples; sorted: as runs had it before this key

    @property
    def sources(self) -> list[str]:
        """Return `source` as a list."""
        return [self.source] if isinstance(self.source, str) else self.source


class LoraRecipe(Strict):
    """Adapters: small trained matrices beside frozen ones. Names as in PEFT."""

    kind: Literal["lora", "lslora"] = "lora"     # lslora: with a learned Fourier function between A and B
    r: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    dropout: Share = 0.0
    target_modules: str | list[str] = "all-linear"   # or names, such as [q_proj, v_proj]
    use_rslora: bool = False                     # scale by alpha / sqrt(r) instead of alpha / r
    use_dora: bool = False                       # magnitudes apart from directions
    sigma: Annotated[float, Field(gt=0)] = 1.0   # lslora: the function sees tanh(z / sigma)
    regularisation: Annotated[float, Field(ge=0)] = 0.01     # lslora: pull of the function towards the identity


class QuantisationRecipe(Strict):
    """The frozen base of `method: qlora`: 4 bits a weight, as bitsandbytes stores them."""

    type: Literal["nf4", "fp4"] = "nf4"
    double: bool = True                          # the blocks' scales are quantised too: 0.37 bits a weight less


class SampleRecipe(Strict):
    """The text written at every evaluation, to look at."""

    prompt: str = ""
    tokens: Annotated[int, Field(ge=0, le=LARGEST_NUMBER)] = 160    # 0 = none
    temperature: Annotated[float, Field(ge=0)] = 0.8
    top_k: Positive | None = None


class Chosen(Strict):
    """A name, and settings of what it names: those are checked by the table that has the name (Table)."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, bool | int | float | str] = Field(init=False)

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that the recipe gives."""
        return dict(self.__pydantic_extra__ or {})


class OptimizerRecipe(Chosen):
    """What updates the weights: see training/optimizers.py. `optimizer=NAME` is short for `optimizer.name=NAME`."""

    name: str = "adamw"


class ObjectiveRecipe(Chosen):
    """What is minimised: see training/objectives.py. `objective=NAME` is short for `objective.name=NAME`."""

    name: str = "next_token"                     # or dpo, orpo, simpo, kto, reward; each has settings of its own


class AverageRecipe(Strict):
    """An exponential moving average of the trained weights: see training/averages.py."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None     # null: none; 0.999 averages over about 1,000 steps


class WeightsRecipe(Strict):
    """Which weights are trained, and how fast each learns: globs over their names, which `powertrain facts` lists."""

    freeze: list[str] = []                       # these stay as they are: [embedding.*, "blocks.[0-3].*"]; not with adapters
    learning_rates: dict[str, Annotated[float, Field(gt=0)]] = {}        # factors on learning_rate: {"head.*": 0.1}
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0       # a block's factor over that of the block above it


class Recipe(Strict):
    """One training run. `train_batch_size` is examples per optimizer step, however they are split."""

    name: Name = "run"
    description: str = ""
    corrections: list[str] = []                  # against the document that a shipped recipe comes from, and why
    method: Literal["scratch", "full", "lora", "qlora"] = "scratch"      # with model.path: lora
    model: ModelRecipe = ModelRecipe()
    lora: LoraRecipe = LoraRecipe()
    quantisation: QuantisationRecipe = QuantisationRecipe()
    data: DataRecipe = DataRecipe()
    output_dir: Place = None                     # default: runs/<name>-<date>

    train_batch_size: Annotated[int, Field(ge=1, le=LARGEST_BATCH)] = 32
    num_train_epochs: Real = 1.0
    max_steps: Positive | None = None            # overrides num_train_epochs
    train_time_s: Real | None = None             # as many steps as fit, by a short probe; sets max_steps

    objective: ObjectiveRecipe = ObjectiveRecipe()
    optimizer: OptimizerRecipe = OptimizerRecipe()
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    min_lr_rate: Annotated[float, Field(ge=0, le=1)] = 0.0   # the schedule's end, as a share of learning_rate
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    warmup_steps: Annotated[int, Field(ge=0, le=LARGEST_NUMBER)] | None = None  # overrides warmup_ratio
    weight_decay: Annotated[float, Field(ge=0)] = 0.1        # of matrices; norms and biases never decay
    adam_beta1: Share = 0.9                      # of adamw and lion
    adam_beta2: Share = 0.95
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8       # of adamw
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0       # 0 = no clipping
    ema: AverageRecipe = AverageRecipe()         # what is evaluated and written as the model
    weights: WeightsRecipe = WeightsRecipe()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42

    # skip: no update where loss or gradient norm is not finite; rewind: back to a checkpoint after too many of them in a row
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    on_spike: Annotated[Literal["off", "skip", "rewind"], BeforeValidator(_word_for_switch)] = "off"     # as on_nan
    max_skipped_steps: Annotated[int, Field(ge=0, le=LARGEST_NUMBER)] = 5       # in a row, before the run stops or rewinds
    max_rewinds: Annotated[int, Field(ge=0, le=LARGEST_NUMBER)] = 3             # before the run stops

    eval_steps: Interval = 250
    max_eval_samples: Positive | None = 64       # blocks read by evaluations during the run; the last one reads all
    early_stopping_patience: Positive | None = None      # evaluations in a row that do not lower the loss: then the run ends
    early_stopping_threshold: Annotated[float, Field(ge=0)] = 0.0        # nats: lower by no more than this is not lower
    load_best_model_at_end: bool = False         # the model is that of the checkpoint with the lowest held-out loss
    save_steps: Annotated[int | str, BeforeValidator(_check_save_interval)] = 500        # or "auto": every save_every_s
    # of save_steps=auto: seconds of training that a kill may cost; more where saves would take more than 1 % of the time
    save_every_s: Annotated[float, Field(gt=0)] = 600.0
    save_total_limit: Positive = 2               # newest checkpoints kept, besides the best
    on_disk_full: Literal["wait", "stop"] = "wait"           # for room on the disk, while the training goes on
    # where checkpoints and the final model are uploaded beside the training: s3://bucket/prefix, gs://, az://, hf://, sftp://
    # or file:///folder
    mirror: Annotated[str, AfterValidator(check_address)] | None = None
    mirror_keep: Positive = 3                    # newest checkpoints kept there, besides the best
    mirror_keep_every: Annotated[int, Field(ge=0, le=LARGEST_NUMBER)] = 0    # and those of each multiple of so many steps
    mirror_material: bool = True                 # data and base model too, where they are files of this machine
    mirror_compress: Literal["text", "all", "none"] = "text"     # by zstd; weights hardly get smaller
    mirror_frees_disk: bool = False              # delete older checkpoints here once they are verified there
    logging_steps: Positive = 10
    report_to: Annotated[list[str], BeforeValidator(_check_trackers)] = []   # trackers that follow the run: [wandb, mlflow]
    project: Name | None = None                  # of the run in them; default: what their own variables say, else powertrain
    sample: SampleRecipe = SampleRecipe()

    memory_check: Annotated[Literal["on", "off"], BeforeValidator(_word_for_switch)] = "on"  # off: train what may not fit

    techniques: dict[str, Annotated[Pin, BeforeValidator(_word_for_switch)]] = {}  # on, off, or settings

    def steps(self, examples: int) -> int:
        """Return the optimizer steps of a run over so many examples, where no time is given."""
        return self.max_steps or max(1, int(self.num_train_epochs * examples / self.train_batch_size))

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.method == "scratch" and self.model.path is not None:
            raise ValueError(f"method=scratch draws new weights, and model.path={self.model.path} names trained ones; use "
                             "method=lora, qlora or full, or leave model.path out")
        if self.method != "scratch" and self.model.path is None:
            raise ValueError(f"method={self.method} needs trained weights; name them with model.path=FOLDER, or use "
                             "method=scratch")
        if self.max_steps is not None and self.train_time_s is not None:
            raise ValueError(f"max_steps={self.max_steps} and train_time_s={self.train_time_s:g} both set the length of "
                             "the run; keep one and set the other to null")
        return self


SECTIONS: dict[str, type[BaseModel]] = {         # the tables of a recipe
    key: info.annotation for key, info in Recipe.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)}


def known_keys() -> list[str]:
    """Return every dotted key that a recipe may have; techniques are checked by the planner, which knows them."""
    return [name for key in Recipe.model_fields for name in (
        [f"{key}.{leaf}" for leaf in SECTIONS[key].model_fields] if key in SECTIONS else [key])]


# what a recipe that names a pretrained model starts from, where its default differs from that of training from scratch
PRETRAINED_DEFAULTS: dict[str, Any] = {
    "train_batch_size": 16, "weight_decay": 0.0, "adam_beta2": 0.999, "warmup_ratio": 0.03, "sample.tokens": 0,
    "data.validation_share": 0.05,
}
METHOD_DEFAULTS: dict[str, dict[str, Any]] = {   # learning rates: TRL's and PEFT's recommendations
    "scratch": {}, "full": {**PRETRAINED_DEFAULTS, "learning_rate": 2e-5},
    "lora": {**PRETRAINED_DEFAULTS, "learning_rate": 2e-4}, "qlora": {**PRETRAINED_DEFAULTS, "learning_rate": 2e-4},
}

# of objectives that compare answers: DPO's in TRL, and ten times as much with adapters, as its documentation recommends
COMPARING = ("dpo", "orpo", "simpo", "kto")
COMPARING_RATES = {"full": 1e-6, "lora": 1e-5, "qlora": 1e-5}


def in_steps(interval: int | str, steps_per_epoch: float) -> int:
    """Return the optimizer steps of an interval given in steps or epochs (at least 1).

    Return 0 for never, and for auto, whose interval a run chooses: see run/saving.py.
    """
    if interval == AUTO:
        return 0
    if isinstance(interval, int):
        return max(0, interval)
    found = EPOCHS.match(interval)
    assert found, interval
    epochs = float(found.group(1))
    return max(1, round(epochs * steps_per_epoch)) if epochs else 0
