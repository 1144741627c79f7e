"""One optimizer step as a plan carries it out: what the arithmetic of work and memory needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Starts plain; each technique of a plan returns it changed (`Technique.reckon`)."""

    examples: int                            # per optimizer step
    block: int                               # tokens of an example
    micro_batch: int                         # examples per forward pass
    dtype: str = "fp32"                      # of the matrix products
    checkpoint_every: int = 0                # blocks; 0 = nothing is recomputed
    loss_chunk_rows: int | None = None       # None = all logits at once
    attention_saves_scores: bool = True      # False where attention recomputes its weights in the backward pass
    compiled: bool = False
    trained_share: float = 1.0               # of the tokens: those that are targets
    base_dtype: str | None = None            # what frozen matrices of the blocks are held in; None = as their files have them
    moment_bytes: float = 8.0                # of the optimizer's state per trained weight: two fp32 moments

    @property
    def head_share(self) -> float:
        """The tokens that reach the head: a loss in chunks leaves out those that train nothing."""
        return 1.0 if self.loss_chunk_rows is None else self.trained_share

    @property
    def tokens(self) -> int:
        return self.examples * self.block

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch * self.block

    @property
    def micro_batches(self) -> int:
        return -(-self.examples // self.micro_batch)
