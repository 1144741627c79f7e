"""One optimizer step as a plan carries it out: what the arithmetic of work and memory needs to know, and how much is padding.

How much of a padded batch is padding, and how much fills a packed pass up, is estimated from the quantiles of the lengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from powertrain.records import ADAMW, Hardware, OptimizerFacts
from powertrain.shapes import QUANTILES, fused_attention

SHARES = (np.arange(256) + 0.5) / 256        # at these the distribution of lengths is integrated


def lengths_at(quantiles: Mapping[str, int], shares: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the tokens that each share (0..1) of the documents does not exceed, on straight lines between known quantiles."""
    known = sorted((QUANTILES[name], tokens) for name, tokens in quantiles.items() if name in QUANTILES)
    if not known:
        raise ValueError("no quantile of the lengths is known")
    return np.interp(shares, [share for share, _ in known], [tokens for _, tokens in known])


def mean_length(quantiles: Mapping[str, int]) -> float:
    """Return the mean of the lengths on those straight lines."""
    return float(lengths_at(quantiles, SHARES).mean())


def longest_of(quantiles: Mapping[str, int], documents: int) -> float:
    """Return the expected length of the longest of `documents` drawn at random."""
    # the largest of n uniform draws is u with probability n u^(n-1) du: its n-th power is uniform
    return float(lengths_at(quantiles, SHARES ** (1 / documents)).mean())


def padding_share(quantiles: Mapping[str, int], documents: int, *, grouped_from: int | None = None) -> float:
    """Return the share of slots that padding takes (0..1) if each pass has `documents`, all as long as its longest.

    With `grouped_from`, a step of so many documents is sorted by length before it is cut into passes: the k-th shortest
    of n is then about as long as the quantile k / (n + 1).
    """
    if grouped_from is None:
        slots = longest_of(quantiles, documents)
        return max(0.0, 1 - mean_length(quantiles) / slots) if slots else 0.0
    lengths = lengths_at(quantiles, np.arange(1, grouped_from + 1) / (grouped_from + 1))
    parts = [lengths[first:first + documents] for first in range(0, grouped_from, documents)]
    slots = sum(len(part) * float(part[-1]) for part in parts)
    return max(0.0, 1 - float(lengths.sum()) / slots) if slots else 0.0


HOPPER = (9, 0)                              # compute capability
HOPPER_WORKSPACE = 32 << 20                  # source: getChosenWorkspaceSize in torch's CublasHandlePool.cpp
CUBLAS_WORKSPACE = (2 * 4096 + 8 * 16) << 10     # ":4096:2:16:8", its default on older GPUs


@dataclass(frozen=True)
class Workload:
    """One optimizer step. The planner starts with a plain one, and each technique of a plan changes it (`Technique.reckon`)."""

    examples: int                            # per optimizer step
    block: int                               # tokens of an example; their mean where they differ
    micro_batch: int                         # examples per forward pass
    dtype: str = "fp32"                      # of the matrix products
    checkpoint_every: int = 0                # blocks; 0 = nothing is recomputed
    checkpoint_keeps_attention: bool = False # what attention gave is not recomputed, if there is no dropout
    loss_chunk_rows: int | None = None       # None = all logits at once
    loss_in_place: bool = False              # such a loss's gradient takes the place of the logits
    loss_has_terms: bool = False             # label smoothing or z-loss is added to cross-entropy
    reference_in_step: bool = False          # a frozen reference's forward pass, by a copy of the trained weights
    answers: int = 1                         # documents of an example: of a pair two
    spread: float = 1.0                      # tokens that attention sees over those of the pass: prompts may stand there once
    attention_saves_scores: bool = True      # False where attention recomputes its weights in the backward pass
    kernel: str = ""                         # of attention, by its name in kernels/attention.py; "" = see attention_kernel
    compiled: bool = False
    fused_blocks: bool = False               # they are run by functions written by hand
    adds_in_place: bool = False              # what adapters add goes to the product that is there
    one_call: bool = False                   # all work of such a block's pass is one function
    whole_pass: bool = False                 # such blocks, and what is before and behind them, are one function
    saved: Mapping[str, str] = field(default_factory=dict, hash=False)   # of such blocks: tensor -> "recompute" or "offload"
    saved_blocks: int = 0                    # the lowest so many of those that have a backward pass
    trained_share: float = 1.0               # of the tokens: those that are targets
    base_dtype: str | None = None            # what frozen matrices of the blocks are held in; None = as their files have them
    whole_blocks: int = 0                    # of a 4-bit base, made whole in the products' type once
    optimizer: OptimizerFacts = ADAMW
    lengths: Mapping[str, int] = field(default_factory=dict, hash=False)     # quantiles of tokens; empty: examples have `block`
    grouped: bool = False                    # a step's examples are sorted by length before they are cut into passes
    packed_tokens: int | None = None         # of a pass, at most, where examples lie end to end; None = padded passes
    fill_multiple: int = 1                   # a packed pass is filled up to a multiple of so many tokens
    fused_optimizer: bool = False            # the update makes no temporary tensors
    flat_parameters: bool = False            # gradients stand in a buffer of their own all the time
    documents: tuple[tuple[int, ...], ...] = ()      # the lengths in each pass of a step, where they are known
    device: str = "cpu"                      # torch device type
    threads: int = 1                         # of a CPU
    fused_attention: tuple[str, ...] = ("flash", "efficient")    # torch's fused attention kernels on the device
    replayed: bool = False                   # passes are recorded once and replayed: all have one shape
    shards: int = 1                          # processes that each weight is divided among
    replicas: int = 1                        # groups of processes, each of which holds the whole model
    sharded_stage: int = 0                   # of ZeRO: 1 divides the optimizer's state, 2 gradients too, 3 weights too
    tensor_degree: int = 1                   # processes that the matrices of each block are divided among
    stages: int = 1                          # processes that each have some blocks, and compute them for every pass
    library_workspace_bytes: int = 0         # what a GPU's matrix library takes from torch's allocator

    def shared_by(self, processes: int) -> Self:
        """Return the part of the step that falls to one of several processes, the one with the most examples."""
        return self if processes == 1 else replace(self, examples=-(-self.examples // processes), documents=())

    @property
    def packs(self) -> bool:
        """Return whether examples lie end to end without padding."""
        return self.packed_tokens is not None

    @property
    def head_share(self) -> float:
        """Return the share of the tokens that reach the head: a loss in chunks leaves out those that train nothing."""
        return 1.0 if self.loss_chunk_rows is None else self.trained_share

    @property
    def tokens(self) -> int:
        """Return the tokens of a step, without padding."""
        return self.examples * self.block

    @property
    def micro_batches(self) -> int:
        return -(-self.examples // self.micro_batch)

    @property
    def padding_share(self) -> float:
        """Return the share of a step's slots (0..1) that is expected to be padding, or to fill packed passes up."""
        if self.packed_tokens is not None:
            # a pass lacks any number of tokens from 0 to `fill_multiple` - 1, each as likely
            filled = -(-self.tokens // self.packed_tokens) * (self.fill_multiple - 1) / 2
            return filled / (self.tokens + filled)
        if not self.lengths:
            return 0.0
        return padding_share(self.lengths, self.micro_batch, grouped_from=self.examples if self.grouped else None)

    @property
    def pass_slots(self) -> int:
        """Return the slots of a usual pass, padding included."""
        tokens = self.micro_batch * self.block if self.packed_tokens is None else min(self.packed_tokens, self.tokens)
        return round(min(tokens, self.tokens) / (1 - self.padding_share))

    @property
    def longest(self) -> int:
        """Return the tokens of the longest example."""
        return max(self.lengths.get("max", 0), self.block)

    @property
    def fullest_pass_tokens(self) -> int:
        """Return the slots of the largest pass that can come: padded to the longest example, or packed and filled up."""
        if self.packed_tokens is None:
            return min(self.micro_batch, self.examples) * self.longest
        most = max(self.longest, min(self.packed_tokens, self.examples * self.longest))
        return -(-most // self.fill_multiple) * self.fill_multiple

    @property
    def attention_kernel(self) -> str:
        """Return the attention kernel; if none is named, "math" where scores are saved, else "sdpa"."""
        return self.kernel or ("math" if self.attention_saves_scores else "sdpa")

    @property
    def passes(self) -> tuple[tuple[int, ...], ...]:
        """Return the document lengths of each pass: as given, or as many of the fullest as the step has passes."""
        if self.documents:
            return self.documents
        whole, rest = divmod(self.fullest_pass_tokens, self.longest)
        return ((self.longest,) * whole + ((rest,) if rest else ()),) * self.micro_batches


def attention_of(hardware: Hardware) -> tuple[str, ...]:
    """Return the fused kernels of torch's attention on this hardware; see shapes.fused_attention."""
    return fused_attention(hardware.device, hardware.compute_capability, hardware.architecture)


def library_workspace_bytes(hardware: Hardware) -> int:
    """Return the workspaces of cuBLAS, which torch takes from its own allocator for each thread that multiplies.

    There are two: the host's, and autograd's for the backward pass. On an H100 the default recipe's step took 33 MiB more than
    was predicted with one (docs/gpu.md).
    """
    if hardware.device != "cuda":
        return 0
    return 2 * (HOPPER_WORKSPACE if (hardware.compute_capability or (0, 0)) >= HOPPER else CUBLAS_WORKSPACE)
