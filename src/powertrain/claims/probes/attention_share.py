"""What attention is of a step: of its time, timed alone beside the whole step, and of its arithmetic, counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from powertrain.claims.probes.attention_kernels import one_pass
from powertrain.claims.probes.known_models import known_facts
from powertrain.claims.probes.probe import REPEATS, Context, Measured, Rounds, by_turns, medians, seconds_of
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import Training, open_training
from powertrain.cost.work import forward_flops, mean_keys
from powertrain.evidence.stats import interval
from powertrain.records import ModelFacts

PHI3_LENGTHS = (256, 2048)


def measure(context: Context, *, words: Sequence[str], steps: int = 4, repeats: int = REPEATS) -> Measured:
    """Attention's share of the time of a step of this recipe, by its own plan's kernel.

    It is the kernel's alone: the products before and after it are not attention's. Detail: `flops_share` of the same step, and
    of Phi-3-mini at lengths of 256 and 2048.
    """
    rounds, flops_share = apart(_rounds, words, context.cache, context.deadline, steps, repeats)
    names = ("attention of a step", "whole step")
    phi3 = {f"phi3_flops_share_{length}": attention_flops_share(known_facts("phi-3-mini"), [length]) for length in PHI3_LENGTHS}
    return Measured(interval([values[0] / values[1] for values in rounds]), "of the time", *names,
                    {"seconds": medians(rounds, names), "flops_share": flops_share, **phi3})


def _rounds(words: Sequence[str], cache: Path, deadline: float, steps: int, repeats: int) -> tuple[Rounds, float]:
    training = open_training(words, cache)
    model = training.prepared.facts.model
    batches = training.setup.prepare(training.state.step)
    passes = [one_pass(training.setup.attention, batch.lengths, model.heads, model.kv_heads, model.head_width,
                       training.setup.precision.compute_dtype, training.setup.device) for batch in batches]

    def attention_s() -> float:
        return model.layers * sum(seconds_of(work, training.setup.device, steps) for work in passes)

    attention_s()                            # once, for what it allocates
    share = attention_flops_share(model, [length for batch in batches for length in batch.lengths])
    return by_turns([attention_s, lambda: _step_s(training, steps)], deadline, repeats), share


def _step_s(training: Training, steps: int) -> float:
    return training.step_s(steps)


def attention_flops_share(model: ModelFacts, lengths: Sequence[int]) -> float:
    """Scores and weighted sums, of all products of a forward pass over documents of these lengths (causal)."""
    attention = 4.0 * mean_keys(lengths, model.window) * model.heads * model.head_width * model.layers * sum(lengths)
    return attention / forward_flops(model, lengths)
