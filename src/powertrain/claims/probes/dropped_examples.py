"""drop_last: whether an epoch's last, shorter batch makes training less steady, and what leaving it out costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from powertrain.claims.probes.probe import REPEATS, Context, Measured, by_turns
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import Training, open_training
from powertrain.data.order import epoch_order
from powertrain.evidence.stats import interval
from powertrain.training.loop import backward


def measure(context: Context, *, words: Sequence[str], steps: int = 10, repeats: int = REPEATS) -> Measured:
    """The spread of the gradient's norm over an epoch without its short last batch, over that with it.

    Epochs of `steps` whole batches and one of half as many examples, each drawn anew. Detail: `dropped_share`, what drop_last
    leaves out of an epoch of the recipe's own data, and `dropped` examples of it. (Powertrain's epochs run end to end: no
    batch is short, and nothing is left out.)
    """
    spreads, dropped, examples = apart(_spreads, words, context.cache, context.deadline, steps, repeats)
    return Measured(interval([without / kept for kept, without in spreads]), "times the spread", "short batch kept",
                    "drop_last", {"dropped": dropped, "dropped_share": dropped / examples,
                                  "spread_kept": statistics.median(kept for kept, _ in spreads)})


def _spreads(words: Sequence[str], cache: Path, deadline: float, steps: int,
             repeats: int) -> tuple[list[tuple[float, float]], int, int]:
    training = open_training(words, cache, warm_up=20)
    examples, batch = len(training.setup.examples), training.setup.train_batch_size
    found: list[tuple[float, float]] = []

    def epoch() -> float:
        norms = _norms(training, len(found), steps)
        found.append((spread(norms), spread(norms[:-1])))
        return 0.0

    by_turns([epoch], deadline, repeats)
    return found, examples % batch, examples


def _norms(training: Training, epoch: int, steps: int) -> list[float]:
    """The gradient's norm of each batch of an epoch, the last one half as large; nothing is learned from them."""
    setup = training.setup
    order = epoch_order(setup.seed, epoch, len(setup.examples))
    batch, norms = setup.train_batch_size, []
    for step in range(steps + 1):
        chosen = [int(i) for i in order[step * batch:(step + 1) * batch]][:batch if step < steps else max(1, batch // 2)]
        passes = [part.to(setup.device) for part in setup.passes([setup.examples[i] for i in chosen or [0]])]
        backward(setup, training.state.scaler, passes, sum(part.trained_tokens for part in passes))
        gradients = [weight.grad for weight in setup.model.parameters() if weight.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        training.state.optimizer.zero_grad(set_to_none=True)
    return norms


def spread(norms: Sequence[float]) -> float:
    """Standard deviation over mean."""
    return statistics.pstdev(norms) / statistics.fmean(norms)
