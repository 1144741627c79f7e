"""The values that cross a border between rooms or are written to disk: frozen, plain, JSON-ready.

Those of measurements are in evidence.py, what audits and diagnoses find in findings.py, a plan's in plan.py, the others here.

Nothing here loads torch: report, cli --help and the web page read these records without it.
Units are in the names: `_s` seconds, `_bytes`, `_tokens`; a share is 0..1. What is unknown is absent (None, or a
missing key), never a guess.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from powertrain.records.errors import NotApplied, NotDurable, RunFailed, UnknownFact, UserError, WrongUse
from powertrain.records.plan import Effect, Estimate, Plan, Proposal, Refusal, Why

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# of other files of this room, which all rooms take from here
__all__ = ["Effect", "Estimate", "NotApplied", "NotDurable", "Plan", "Proposal", "Refusal", "RunFailed", "UnknownFact",
           "UserError", "Why", "WrongUse"]
REACHED_SHARE = 0.6          # guess: of a published rate that a device reaches, at least
REACHED = f"a device reaches {REACHED_SHARE:.0%} to 100% of its published rates"
IGNORE = -100  # target of a slot that trains nothing (the convention of torch and transformers)


# ------------------------------------------------------------------------------------------------ facts


@dataclass(frozen=True)
class Reached:
    """What finished runs of one kind of work reached of the ideal step's speed (cost/estimate.py): 10 %, median, 90 %."""

    low: float
    median: float
    high: float
    runs: int


NODE, NETWORK = "node", "network"


@dataclass(frozen=True)
class PeerLink:
    """The link between processes of a run, measured or published."""

    latency_s: float                         # of one message
    bandwidth_bytes_per_s: float             # one way


@dataclass(frozen=True)
class IdleGpu:
    """A GPU of this machine that torch does not use."""

    name: str
    # "no_cuda_build", "no_rocm_build", "old_driver", "no_library", "hidden" or "unknown"
    cause: str
    because: str
    cure: str


@dataclass(frozen=True)
class Hardware:
    """The machine, as far as it is known. `sources` says for each field where its value comes from."""

    name: str                                # "AMD EPYC 9R45", "NVIDIA H200"
    device: str                              # torch device type: "cpu", "cuda", "mps"
    cores: int                               # physical cores this process may use; 0: not known
    memory_bytes: int                        # of the device (for the CPU: of the machine or its control group)
    free_memory_bytes: int
    instructions: tuple[str, ...] = ()       # of the CPU: "avx2", "avx512f", "avx512_bf16", "amx_bf16", ...
    compute_capability: tuple[int, int] | None = None     # of an NVIDIA GPU
    devices: int = 1                         # how many such devices there are
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)       # measured GEMM, by "fp32", "bf16", "fp16"
    datasheet_flops_per_s: Mapping[str, float] = field(default_factory=dict)  # dense
    bandwidth_bytes_per_s: float | None = None            # measured copy, bytes read + bytes written
    host_link_bytes_per_s: float | None = None            # measured, of a GPU: its host's pinned memory, the slower way
    host_free_memory_bytes: int | None = None             # of a GPU's host
    default_threads: int | None = None       # that torch uses on this machine if nobody sets a number
    fingerprint: str = ""                    # changes when a measurement made here no longer holds
    sources: Mapping[str, str] = field(default_factory=dict)
    speeds: Mapping[str, Reached] = field(default_factory=dict)  # by kind of work, of the runs that have finished here
    processes: int = 1                       # that share the run; the figures above are what one of them has
    architecture: str = ""                   # of an AMD GPU: "gfx942"; it has no compute capability
    nodes: int = 1                           # machines that the processes run on
    # measured between "processes", "shards", "replicas" or "parts"; or of one device, within its NODE and to others (NETWORK)
    links: Mapping[str, PeerLink] = field(default_factory=dict)
    idle_gpu: IdleGpu | None = None          # where the device is the CPU
    basis: str = "measured"                  # of peaks, bandwidth and links; "published" of a machine that is not here

    def peak(self, dtype: str) -> float:
        """Return the dense FLOP/s of `dtype`, as `basis` says. Raises UnknownFact where they are not known."""
        if dtype not in self.peak_flops_per_s and self.basis != "measured":
            raise UnknownFact(f"no {self.basis} {dtype} rate for {self.name}")
        if dtype not in self.peak_flops_per_s:
            raise UnknownFact(f"no measured {dtype} GEMM peak for {self.name}; `powertrain facts --measure` measures it")
        return self.peak_flops_per_s[dtype]

    def speed_up(self, efficiency: float) -> float:
        """Return how much faster all processes are than one, which has a device, or all cores of a machine."""
        return efficiency * (self.nodes if self.device == "cpu" else self.processes)


@dataclass(frozen=True)
class OnMachine:
    """A run as it is planned for a kind of machine that is not here."""

    kind: str
    hardware: Hardware
    words: str | None                        # that make it fit: "" as it is asked for, "method=lora"; None: none do
    estimate: Estimate | None                # with these words; None where the machine's rates are not known
    needed_bytes: int | None                 # by one of its processes
    why_not: str = ""                        # it cannot be planned there
    price_per_hour: float | None = None      # of one device
    is_tight: bool = False                   # it needs more than a plan may count on, and no more than is free

    @property
    def cost(self) -> tuple[float, float] | None:
        """Return what the run costs, low and high, in the unit of the price; None where price or time is not known."""
        if self.price_per_hour is None or self.estimate is None:
            return None
        low, high = (self.price_per_hour * self.hardware.processes * step_s * self.estimate.steps / 3600
                     for step_s in self.estimate.step_s)
        return low, high


@dataclass(frozen=True)
class Software:
    """What is installed, and why the rest is not usable here."""

    versions: Mapping[str, str]              # part -> version
    missing: Mapping[str, str]               # part -> the reason why it is not usable here

    def release(self, part: str) -> tuple[int, ...]:
        """Return the numbers of a part's version, such as (2, 13, 0) for "2.13.0+cpu"; () where the part is not here."""
        return tuple(map(int, re.findall(r"\d+", self.versions.get(part, "").partition("+")[0])))


@dataclass(frozen=True)
class ModelFacts:
    """The decoder that the recipe asks for, counted without building it."""

    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    gated_mlp: bool
    vocabulary: int
    context: int
    dropout: float
    tied_head: bool
    parameters: int
    trainable: int
    matmul_parameters: int                   # in the blocks' linear layers: 2 FLOPs per token each, forward
    head_parameters: int                     # classes x width: multiplied by, tied or not
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)  # weight -> shape: one block, and outside
    provider: str = "native"                 # who computes it: "native" (our decoder), "transformers" or "unsloth"
    task: str = "causal"                     # "causal", "seq2seq", "span" or "reward"
    path: str = ""                           # of pretrained weights; "" = drawn here
    digest: str = ""                         # of a base that is not trained itself; "" = unknown; see digest_weights
    method: str = "scratch"                  # "scratch", "full", "lora" or "qlora"
    adapter_parameters: int = 0              # of `parameters`; with them only these are trained
    adapted_layers: tuple[int, ...] = ()     # blocks that have adapters
    adapter_dropout: float = 0.0             # of each adapter's input
    unquantised_dtype: str = ""              # of the frozen weights beside 4-bit ones; "" = frozen_dtype
    frozen_dtype: str = "fp32"               # of the weights that are not trained, as they are stored: fp32, bf16, fp16, nf4
    window: int | None = None                # tokens a token sees, itself included; None = its whole document
    parallel_residual: bool = False          # attention and MLP read the same residual (gpt_neox)
    rotary_width: int | None = None          # of a head's dimensions, that are rotated; None = all, or positions are learned
    frozen: tuple[str, ...] = ()             # weights that the recipe leaves as they are, where no adapters do
    rates: tuple[tuple[float, int], ...] = ()    # factor of the learning rate, and how many numbers learn so; () = all alike

    @property
    def classes(self) -> int:
        """Return how many scores the head gives a row: one for each token, or one reward."""
        return 1 if self.task == "reward" else self.vocabulary


@dataclass(frozen=True)
class DataFacts:
    """What is trained on. An example is one block of `block` predicted tokens, or a conversation, pair, span or text.

    Where examples differ in length (`kind` is not "blocks"), `block` is their mean, rounded up.
    """

    source: str
    digest: str                              # sha256 of the documents
    documents: int
    characters: int
    text_bytes: int                          # UTF-8
    tokenizer: str                           # "char", "byte", "bpe", or a folder
    vocabulary: int
    train_tokens: int
    validation_tokens: int
    validation_bytes: int                    # UTF-8 bytes of the validation text
    block: int
    stride: int
    examples: int                            # training blocks in one epoch
    train_batch_size: int                    # examples per optimizer step: semantics, never traded for speed
    length_quantiles: Mapping[str, int] = field(default_factory=dict)  # tokens per document: min, p10, p50, p90, max
    kind: str = "blocks"                     # "blocks" of one length, or "conversation", "pair", "span", "text"
    max_length: int = 0                      # tokens of the longest example; 0 = block
    trained_share: float = 1.0               # of the tokens: those that are targets
    cut_examples: int = 0                    # that were longer than the recipe's max_length
    shared_share: float = 0.0                # of the tokens of pairs of answers: prompts that stand there a second time

    @property
    def of_one_length(self) -> bool:
        """Return whether all examples have the same number of tokens."""
        shortest, longest = (self.length_quantiles.get(name) for name in ("min", "max"))
        return self.kind == "blocks" or (shortest is not None and shortest == longest)

    @property
    def redundancy(self) -> float:
        """Return how often one epoch visits each token: block / stride."""
        return self.block / self.stride


@dataclass(frozen=True)
class OptimizerFacts:
    """What the recipe's optimizer keeps of each trained weight between steps, and what its plain update works in.

    Hidden matrices are those of the model's blocks, adapters included. The default is AdamW with fp32 moments.
    """

    name: str = "adamw"
    hidden_bytes: float = 8.0                # per weight of a hidden matrix
    outside_bytes: float = 8.0               # per weight of embeddings and head
    vector_bytes: float = 8.0                # per weight of norms and biases
    line_bytes: float = 0.0                  # of any matrix, for each of its rows and columns
    average_bytes: float = 0.0               # per weight: the moving average of the weights, where the recipe asks for one
    update_tensors: int = 2                  # fp32 tensors of a weight's size; 0: the update works in place
    orthogonalising_rounds: int = 0          # of each hidden matrix in an update; see cost/weights.py


ADAMW = OptimizerFacts()


@dataclass(frozen=True)
class Facts:
    hardware: Hardware
    software: Software
    model: ModelFacts
    data: DataFacts
    optimizer: OptimizerFacts = ADAMW
    loss_has_terms: bool = False             # the objective adds label smoothing or z-loss to cross-entropy
    has_reference: bool = False              # the objective compares the model with a frozen reference


# ------------------------------------------------------------------------------------------------ training


class Movable:
    """A dataclass with tensors."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Return the same with its tensors on the device, those of the values in it too."""
        moved = {name: part.to(device, non_blocking=non_blocking) for name, part in vars(self).items() if hasattr(part, "to")}
        return dataclasses.replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True)
class Source(Movable):
    """What the encoder of an encoder-decoder reads: one document for each document of the batch. S = sum of `lengths`."""

    tokens: Tensor                           # (S,) int64
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Layout(Movable):
    """What of a batch differs from pass to pass, as tensors of a constant shape: for passes that are recorded and replayed."""

    ends: Tensor                             # (D + 1,) int32: 0 and where each document ends; then empty ones, which end at T
    rows: Tensor                             # (R,) int64, each token once: those that have a target, then others


@dataclass(frozen=True)
class SharedPrompts(Movable):
    """How attention sees a batch in which the prompt of each pair stands once, before its chosen answer.

    E tokens are what the two whole documents of each pair have: `spread` lays the batch's T tokens out as these, with the
    prompt twice, and `kept` says where each token of the batch is found among them.
    """

    spread: Tensor                           # (E,) int64, places in the batch
    kept: Tensor                             # (T,) int64, places among the E tokens
    lengths: tuple[int, ...]                 # of the whole documents


@dataclass(frozen=True)
class Comparison(Movable):
    """What objectives that compare answers know of a batch besides its tokens. N targets, D documents, without padding."""

    examples: int                            # pairs, or rated answers
    document: Tensor                         # (N,) int64: the document of each target, in order
    is_answer: Tensor                        # (N,) bool: the target belongs to an answer, not to a prompt
    answer_tokens: Tensor                    # (D,) fp32: targets of each document's answer
    nll_weight: float                        # the step's examples over its chosen targets: turns their sum into their mean
    reference: Tensor | None = None          # (D,) fp32: the reference's log-probability of each document's answer
    desirable: Tensor | None = None          # (D,) bool, of rated answers
    good_weight: float = 0.0                 # the step's rated answers over the desirable ones among them; 0: there are none
    bad_weight: float = 0.0                  # and over the others
    others: Batch | None = None              # prompts with answers of other prompts, to estimate a KL divergence by
    others_reference: Tensor | None = None   # (D,) fp32, of `others`
    kl: Tensor | None = None                 # () fp32: that estimate, over the whole step
    margins: Tensor | None = None            # (D / 2,) fp32: by how much each pair's chosen answer is to win, where rows say it
    shared: SharedPrompts | None = None      # where the prompt of a pair is computed once


@dataclass(frozen=True)
class Batch(Movable):
    """One forward pass: documents laid end to end. T = the sum of `lengths`.

    The model gives R rows of scores, and `targets` holds what each row should say. For a language model R = T: each
    token's row says the token that follows it. For a span head R = 2 a document: the places, within the document, of the
    answer's first and last token.
    """

    tokens: Tensor                           # (T,) int64
    targets: Tensor                          # (R,) int64, IGNORE where nothing is trained
    positions: Tensor                        # (T,) int64, restarting at 0 in each document
    lengths: tuple[int, ...]                 # tokens of each document; a token attends within its own
    trained_tokens: int                      # targets that are not IGNORE, counted on the host so that nobody has to sync
    padding_tokens: int = 0                  # of T: behind the documents' ends, to make them equally long
    source: Source | None = None             # encoder-decoders: then `tokens` are what the decoder reads
    segments: Tensor | None = None           # (T,) int64: 0 in a pair's first text, 1 in its second (BERT)
    layout: Layout | None = None             # where passes are replayed, and this one has the shape for it
    place: int = 0                           # among the passes of its step, of all processes
    comparison: Comparison | None = None     # of answers, where the objective compares them

    @property
    def real_tokens(self) -> int:
        return sum(self.lengths) - self.padding_tokens + (sum(self.source.lengths) if self.source else 0)


def several(number: int, noun: str) -> str:
    """Return "1 step" or "1,200 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def to_plain(value: Any, leaf: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return `value` as JSON holds it: dataclasses become objects, tuples lists, mappings objects with string keys.

    `leaf` turns each value that is none of these into what JSON holds of it.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name), leaf) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, leaf) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(item, leaf) for item in value]
    return leaf(value)
