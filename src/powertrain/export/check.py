"""Whether two models say the same: their scores for the same examples, compared.

In fp32 a merge only sums in another order, so scores must agree to rounding. A merge that is to be kept in half precision
is checked in fp32 first, and then rounded: every weight changes, and what counts is how far the model's predictions moved, the
Kullback-Leibler divergence, in nats a token, the same unit as the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.data.example import Example, collate
from powertrain.models.model import Model

# Largest difference of a score as a share of the largest score of its row: fp32 rounds to 6e-8, sums of some thousand
# terms in another order and a few dozen layers lose three digits of that.
FP32_DIFFERENCE = 1e-4
# Nats a token. bf16 rounds a weight by up to 1/256 of it and moves a trained model's loss in the third digit; 0.02 is less
# than two seeds of one fine-tuning differ. The divergence grows with the square of the error, and fp16 rounds 8 times finer.
HALF_DIVERGENCE = {torch.bfloat16: 0.02, torch.float16: 0.02 / 64}
UNSEEN = 1e-6                                # nats: a change that nobody sees, whatever it is compared with
LOST_SHARE = 0.25                            # of the adapter's own effect on the predictions
CHECKED_EXAMPLES, CHECKED_TOKENS = 8, 256    # of each at most


@dataclass(frozen=True)
class Agreement:
    """How far scores lie apart, over `rows` of them."""

    rows: int
    difference: float                        # the largest of a row, as a share of the row's largest score
    divergence: float                        # nats, mean over rows
    same_first: float                        # share of rows whose best choice is the same

    def __str__(self) -> str:
        return (f"scores differ by at most {self.difference:.1e}, predictions by {self.divergence:.1e} nats a token, and "
                f"{self.same_first:.1%} of the first choices are the same, over {self.rows:,} tokens")


def compare(reference: Model, candidate: Model, examples: Sequence[Example]) -> Agreement:
    """`candidate` against `reference` on some examples, each scored by itself."""
    return compare_scores(all_scores(reference, examples), all_scores(candidate, examples))


def compare_scores(reference: Iterable[Tensor], candidate: Iterable[Tensor]) -> Agreement:
    """Scores (R, classes) fp32 of the same examples, one tensor each."""
    differences, divergences, same, rows = [0.0], 0.0, 0, 0
    for expected, found in zip(reference, candidate, strict=True):
        largest = expected.abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        differences.append(float(((expected - found).abs().amax(dim=-1) / largest).max()))
        logs = F.log_softmax(expected.double(), -1)
        divergences += float((logs.exp() * (logs - F.log_softmax(found.double(), -1))).sum())
        same += int((expected.argmax(-1) == found.argmax(-1)).sum())
        rows += len(expected)
    assert rows, "nothing to compare"
    worst = float(torch.tensor(differences).max())       # where a score is NaN both stay NaN, which max() would drop
    divergence = divergences / rows
    return Agreement(rows, worst, 0.0 if divergence < 0 else divergence, same / rows)


def all_scores(model: Model, examples: Sequence[Example]) -> Iterator[Tensor]:
    """For each example (R, classes) fp32 on the CPU."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    try:
        for example in examples:
            batch = collate([example]).to(device)
            with torch.no_grad():            # left before the yield: whoever asks next computes in its own mode
                scores = model.logits(model.hidden(batch)).float().cpu()
            yield scores
    finally:
        model.train(was_training)


def is_rounding(found: Agreement, dtype: torch.dtype) -> bool:
    """Whether `found`, of a merged model in `dtype` against base + adapter, is what the dtype's rounding explains."""
    if dtype == torch.float32:
        return found.difference <= FP32_DIFFERENCE
    return found.divergence <= HALF_DIVERGENCE[dtype]


def shortened(examples: Sequence[Example]) -> list[Example]:
    """The first few examples, and of decoders' examples the beginning: enough to see a difference."""
    return [example if example.source is not None or example.segments is not None or len(example.targets) != len(example.inputs)
            else Example(example.inputs[:CHECKED_TOKENS], example.targets[:CHECKED_TOKENS])
            for example in list(examples[:CHECKED_EXAMPLES])]
