"""Probes of single operations: attention, matrix products and the optimizer's update, alone and as a share of a step."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from powertrain.claims.probes.memory import known_facts
from powertrain.claims.probes.probe import (
    REPEATS,
    Context,
    Measured,
    Rounds,
    Training,
    apart,
    by_turns,
    enough_times,
    fastest_device,
    medians,
    one_of,
    open_training,
    ratio,
    seconds_of,
)
from powertrain.cost.work import forward_flops, mean_keys
from powertrain.evidence.stats import interval
from powertrain.models.kernels.attention import (
    Attention,
    bmm_attention,
    over_groups,
    sdpa_attention,
    varlen_attention,
    visible,
)
from powertrain.records import ModelFacts, WrongUse
from powertrain.training.ledger import MemoryLedger
from powertrain.training.setup import Setup

# ------------------------------------------------------------------------------------------------ attention_kernels
# Attention alone, forward and backward, by two kernels: no products around it, no model.

def eager_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                    window: int | None, scale: float) -> Tensor:
    """Compute attention as transformers' `eager`: all scores in memory, products in the input's dtype, softmax in fp32."""
    del layer, dropout

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible(q.shape[2], window, q.device), float("-inf"))
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v

    return over_groups(q, k, v, lengths, attend)


KERNELS: Mapping[str, Attention] = {
    "eager": eager_attention, "sdpa": sdpa_attention, "bmm": bmm_attention, "varlen": varlen_attention}


def attention_kernels(context: Context, *, a: str = "eager", b: str = "sdpa", length: int = 256, documents: int = 4,
                      heads: int = 6, head_width: int = 64, repeats: int = REPEATS) -> Measured:
    """Return the speed of kernel b over kernel a: eager, sdpa, bmm (CPU), varlen (FlashAttention).

    Both compute in fp32 on a CPU, else in bf16.
    """
    for name, kernel in (("a", a), ("b", b)):
        one_of(name, kernel, tuple(KERNELS))
    shape = (length, documents, heads, head_width)
    rounds = apart(_kernel_rounds, context.deadline, (a, b), shape, repeats)
    return Measured(ratio(rounds, 0, 1), "times as fast", a, b,
                    {"seconds": medians(rounds, (a, b)), "length": length, "documents": documents, "heads": heads,
                     "head_width": head_width})


def _kernel_rounds(deadline: float, kernels: tuple[str, str], shape: tuple[int, int, int, int], repeats: int) -> Rounds:
    device = fastest_device()
    length, documents, heads, width = shape
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    passes = [one_pass(KERNELS[kernel], (length,) * documents, heads, heads, width, dtype, device) for kernel in kernels]
    times = [enough_times(work, device) for work in passes]
    return by_turns([lambda w=work, n=count: seconds_of(w, device, n)     # type: ignore[misc]
                     for work, count in zip(passes, times, strict=True)], deadline, repeats)


def one_pass(kernel: Attention, lengths: tuple[int, ...], heads: int, kv_heads: int, width: int, dtype: torch.dtype,
             device: torch.device) -> Callable[[], None]:
    """Return a function that computes attention over random documents of these lengths, forward and backward."""
    q, k, v = (torch.randn(sum(lengths), count, width, device=device, dtype=dtype, requires_grad=True)
               for count in (heads, kv_heads, kv_heads))
    gradient = torch.randn_like(q)

    def work() -> None:
        out = kernel(q, k, v, lengths, layer=0, dropout=0.0, window=None, scale=width ** -0.5)
        torch.autograd.backward(out, gradient)
        q.grad = k.grad = v.grad = None

    return work


# ------------------------------------------------------------------------------------------------ attention_memory
# How attention's memory grows with the length of a document: the exponent, from the real peaks of a pass.

def attention_memory(context: Context, *, a: str = "eager", b: str = "sdpa", lengths: Sequence[int] = (256, 512, 1024, 2048),
                     heads: int = 4, head_width: int = 64) -> Measured:
    """Return the exponent p of kernel b, whose bytes grow as length^p between `lengths`; 1 is linear, 2 quadratic.

    One document, forward and backward; what is counted is over what stood before. Detail: `exponent_a`, and the bytes.
    """
    for name, kernel in (("a", a), ("b", b)):
        one_of(name, kernel, tuple(KERNELS))
    found = {kernel: apart(_attention_peaks, kernel, lengths, heads, head_width) for kernel in (a, b)}
    exponents = {kernel: exponents_of(peaks) for kernel, peaks in found.items()}
    return Measured(interval(exponents[b]), "as an exponent of the length", a, b,
                    {"exponent_a": vars(interval(exponents[a])),
                     "peak_bytes": {kernel: {str(length): peak for length, peak in peaks.items()}
                                    for kernel, peaks in found.items()}})


def _attention_peaks(kernel: str, lengths: Sequence[int], heads: int, width: int) -> dict[int, int]:
    device = fastest_device()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    found = {}
    for length in lengths:
        work = one_pass(KERNELS[kernel], (length,), heads, heads, width, dtype, device)
        work()                               # once, for what a library keeps
        with MemoryLedger(device, standing=0) as ledger:
            work()
        found[length] = ledger.peak_bytes
    return found


def exponents_of(peaks: Mapping[int, float]) -> list[float]:
    """Return the slope of log bytes over log length, from each length to the next."""
    points = sorted(peaks.items())
    return [math.log(after / before) / math.log(longer / shorter)
            for (shorter, before), (longer, after) in itertools.pairwise(points)]


# ------------------------------------------------------------------------------------------------ attention_share
# What attention is of a step: of its time, timed alone beside the whole step, and of its arithmetic, counted.

PHI3_LENGTHS = (256, 2048)


def attention_share(context: Context, *, words: Sequence[str], steps: int = 4, repeats: int = REPEATS) -> Measured:
    """Return attention's share of the time of a step of this recipe, with the kernel of its plan.

    It is the kernel's alone: the products before and after it are not attention's. Detail: `flops_share` of the same step, and
    of Phi-3-mini at lengths of 256 and 2048.
    """
    rounds, flops_share = apart(_share_rounds, words, context.cache, context.deadline, steps, repeats)
    names = ("attention of a step", "whole step")
    phi3 = {f"phi3_flops_share_{length}": attention_flops_share(known_facts("phi-3-mini"), [length]) for length in PHI3_LENGTHS}
    return Measured(interval([values[0] / values[1] for values in rounds]), "of the time", *names,
                    {"seconds": medians(rounds, names), "flops_share": flops_share, **phi3})


def _share_rounds(words: Sequence[str], cache: Path, deadline: float, steps: int, repeats: int) -> tuple[Rounds, float]:
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
    """Return the share of scores and weighted sums in all products of a causal forward pass over documents of these lengths."""
    attention = 4.0 * mean_keys(lengths, model.window) * model.heads * model.head_width * model.layers * sum(lengths)
    return attention / forward_flops(model, lengths)


# ------------------------------------------------------------------------------------------------ matmul
# One square matrix product in two number formats: what the hardware's units give, without any model.

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def matmul(context: Context, *, a: str = "fp32", b: str = "tf32", edge: int = 4096, repeats: int = REPEATS) -> Measured:
    """Return the speed of dtype b over dtype a: fp32, tf32 (CUDA), bf16 or fp16. Detail: TFLOP/s of both."""
    for name, dtype in (("a", a), ("b", b)):
        one_of(name, dtype, tuple(DTYPES))
    rounds = apart(_product_rounds, context.deadline, (a, b), edge, repeats)
    speeds = {name: 2e-12 * edge**3 / seconds for name, seconds in medians(rounds, (a, b)).items()}
    return Measured(ratio(rounds, 0, 1), "times as fast", a, b, {"tflops_per_s": speeds, "edge": edge})


def _product_rounds(deadline: float, dtypes: tuple[str, str], edge: int, repeats: int) -> Rounds:
    device = fastest_device()
    if "tf32" in dtypes and device.type != "cuda":
        raise WrongUse(f"tf32 products are made by NVIDIA's tensor cores, and this machine trains on {device.type}")
    arms = [_product(dtype, edge, device) for dtype in dtypes]
    times = [enough_times(work, device) for work in arms]
    return by_turns([lambda w=work, n=count: seconds_of(w, device, n)     # type: ignore[misc]
                     for work, count in zip(arms, times, strict=True)], deadline, repeats)


def _product(dtype: str, edge: int, device: torch.device) -> Callable[[], object]:
    x, w = (torch.randn(edge, edge, device=device).to(DTYPES[dtype]) for _ in range(2))

    def work() -> torch.Tensor:
        if device.type == "cuda":
            torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
        return x @ w

    return work


# ------------------------------------------------------------------------------------------------ optimizer_step
# AdamW's step alone, as torch carries it out: one tensor after another, several at a time, or all in one kernel.

WAYS: Mapping[str, Mapping[str, bool]] = {
    "loop": {"foreach": False, "fused": False}, "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True}}


def optimizer_step(context: Context, *, words: Sequence[str], a: str = "foreach", b: str = "fused", steps: int = 4,
                   repeats: int = REPEATS) -> Measured:
    """Return the speed of update b over update a (loop, foreach or fused) on the trained weights of the recipe.

    Detail: `share`, what arm a is of a whole step, of which `steps` are timed beside it, and `at_most`, how many times as fast
    the whole step could then become if the update took no time at all.
    """
    for name, way in (("a", a), ("b", b)):
        one_of(name, way, tuple(WAYS))
    rounds = apart(_update_rounds, words, context.cache, context.deadline, (a, b), steps, repeats)
    share = statistics.median(values[0] / values[2] for values in rounds)
    return Measured(ratio(rounds, 0, 1), "times as fast", a, b,
                    {"seconds": medians(rounds, (a, b, "whole step")), "share": share, "at_most": 1 / (1 - min(share, 0.99))})


def _update_rounds(words: Sequence[str], cache: Path, deadline: float, ways: tuple[str, str], steps: int,
                   repeats: int) -> Rounds:
    training = open_training(words, cache)
    device = training.setup.device
    updates = [_updates(training.setup, way) for way in ways]
    times = [enough_times(update.step, device) for update in updates]
    arms = [lambda u=update, n=count: seconds_of(u.step, device, n)
            for update, count in zip(updates, times, strict=True)]
    return by_turns([*arms, lambda: training.step_s(steps)], deadline, repeats)


def _updates(setup: Setup, way: str) -> torch.optim.AdamW:
    """Return an optimizer of weights like the recipe's, with gradients and a tiny learning rate."""
    weights = [torch.nn.Parameter(weight.detach().clone()) for weight in setup.model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return torch.optim.AdamW(weights, lr=1e-9, **WAYS[way])  # type: ignore[arg-type]
