"""Probes of single operations: attention, matrix products, the optimizer's update, and the same work on several devices."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from powertrain.claims.probes import probe
from powertrain.claims.probes.memory import known_facts
from powertrain.claims.probes.probe import Context, Measured
from powertrain.cost.work import forward_flops, mean_keys
from powertrain.evidence.stats import by_turns, interval
from powertrain.facts.measure import TORCH_DTYPES, seconds_of
from powertrain.models.kernels.attention import Attention, over_groups, sdpa_attention, varlen_attention, visible
from powertrain.records import ModelFacts, WrongUse
from powertrain.training.memory import MemoryLedger, standing_bytes
from powertrain.training.setup import Setup, fastest_device

# ------------------------------------------------------------------------------------------------ attention
# Attention alone, forward and backward, by two kernels, without the projections around it.

def eager_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                    window: int | None, scale: float) -> Tensor:
    """Compute attention as transformers' `eager`: all scores in memory, products in the input's dtype, softmax in fp32."""
    del layer, dropout

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible(q.shape[2], window, q.device), float("-inf"))
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v

    return over_groups(q, k, v, lengths, attend)


KERNELS: Mapping[str, Attention] = {"eager": eager_attention, "sdpa": sdpa_attention, "varlen": varlen_attention}


def attention_kernels(context: Context, *, a: str = "eager", b: str = "sdpa", length: int = 256, documents: int = 4,
                      heads: int = 6, head_width: int = 64) -> Measured:
    """Return the speed of kernel b over kernel a: eager, sdpa, or varlen (FlashAttention).

    Both compute in fp32 on a CPU, else in bf16.
    """
    device = fastest_device()
    arms = {name: probe.timed(one_pass(name, (length,) * documents, heads, head_width, device), device) for name in (a, b)}
    return probe.faster(by_turns(arms, context.deadline), length=length, documents=documents, heads=heads,
                        head_width=head_width)


def one_pass(kernel: str | Attention, lengths: tuple[int, ...], heads: int, width: int, device: torch.device, *,
             kv_heads: int | None = None, dtype: torch.dtype | None = None) -> Callable[[], None]:
    """Return a function that computes attention over random documents of these lengths, forward and backward."""
    attend = KERNELS[probe.one_of("kernel", kernel, tuple(KERNELS))] if isinstance(kernel, str) else kernel
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    q, k, v = (torch.randn(sum(lengths), count, width, device=device, dtype=dtype, requires_grad=True)
               for count in (heads, kv_heads or heads, kv_heads or heads))
    gradient = torch.randn_like(q)

    def work() -> None:
        out = attend(q, k, v, lengths, layer=0, dropout=0.0, window=None, scale=width ** -0.5)
        torch.autograd.backward(out, gradient)
        q.grad = k.grad = v.grad = None

    return work


def attention_memory(context: Context, *, a: str = "eager", b: str = "sdpa", lengths: Sequence[int] = (256, 512, 1024, 2048),
                     heads: int = 4, head_width: int = 64) -> Measured:
    """Return the exponent p of kernel b, whose bytes grow as length^p between `lengths`; 1 is linear, 2 quadratic.

    One document, forward and backward; the bytes are those allocated during the pass. Detail: `exponent_a`, and the bytes.
    """
    del context
    device = fastest_device()
    found = {kernel: {length: _peak_bytes(one_pass(kernel, (length,), heads, head_width, device), device) for length in lengths}
             for kernel in (a, b)}
    exponents = {kernel: interval(exponents_of(peaks)) for kernel, peaks in found.items()}
    bytes_by_length = {kernel: {str(length): peak for length, peak in peaks.items()} for kernel, peaks in found.items()}
    return Measured(exponents[b], "as an exponent of the length", a, b,
                    {"exponent_a": vars(exponents[a]), "peak_bytes": bytes_by_length})


def _peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    work()                                   # the first call also allocates what a library keeps
    with MemoryLedger(device, standing=0) as ledger:
        work()
    return ledger.peak_bytes


def exponents_of(peaks: Mapping[int, float]) -> list[float]:
    """Return the slope of log bytes over log length, from each length to the next."""
    return [math.log(after / before) / math.log(longer / shorter)
            for (shorter, before), (longer, after) in itertools.pairwise(sorted(peaks.items()))]


# ------------------------------------------------------------------------------------------------ attention_share
# The share of attention in a step: in its time, timed alone beside the whole step, and in its arithmetic, counted.

def attention_share(context: Context, *, words: Sequence[str], steps: int = 4) -> Measured:
    """Return attention's share of the time of a step of this recipe, with the kernel of its plan.

    Only the kernel is counted, without the projections before and after it. Detail: `flops_share` of the same step, and of
    Phi-3-mini at lengths of 256 and 2048.
    """
    training = probe.open_training(words, context.cache)
    model, setup = training.prepared.facts.model, training.setup
    batches = setup.prepare(training.state.step)
    passes = [one_pass(setup.attention, batch.lengths, model.heads, model.head_width, setup.device, kv_heads=model.kv_heads,
                       dtype=setup.precision.compute_dtype) for batch in batches]

    def attention_s() -> float:
        return model.layers * sum(seconds_of(work, setup.device.type, steps) for work in passes)

    attention_s()                            # the first call allocates
    share = attention_flops_share(model, [length for batch in batches for length in batch.lengths])
    phi3 = {f"phi3_flops_share_{length}": attention_flops_share(known_facts("phi-3-mini"), [length]) for length in (256, 2048)}
    a, b = "attention of a step", "whole step"
    arms: probe.Arms = {a: attention_s, b: partial(training.step_s, steps)}
    rounds = by_turns(arms, context.deadline)
    return Measured(probe.ratio(rounds, a, b), "of the time", a, b,
                    {"seconds": probe.medians(rounds), "flops_share": share, **phi3})


def attention_flops_share(model: ModelFacts, lengths: Sequence[int]) -> float:
    """Return the share of scores and weighted sums in all products of a causal forward pass over documents of these lengths."""
    attention = 4.0 * mean_keys(lengths, model.window) * model.heads * model.head_width * model.layers * sum(lengths)
    return attention / forward_flops(model, lengths)


# ------------------------------------------------------------------------------------------------ products and updates

def matmul(context: Context, *, a: str = "fp32", b: str = "tf32", edge: int = 4096) -> Measured:
    """Return the speed of one square matrix product in dtype b over dtype a: fp32, tf32 (CUDA) or bf16.

    Detail: TFLOP/s of both.
    """
    device = fastest_device()
    if "tf32" in (a, b) and device.type != "cuda":
        raise WrongUse(f"tf32 products are made by NVIDIA's tensor cores, and this machine trains on {device.type}")
    arms = {name: probe.timed(_product(name, edge, device), device) for name in (a, b)}
    rounds = by_turns(arms, context.deadline)
    speeds = {name: 2e-12 * edge**3 / seconds for name, seconds in probe.medians(rounds).items()}
    return Measured(probe.ratio(rounds, a, b), "times as fast", a, b, {"tflops_per_s": speeds, "edge": edge})


def _product(dtype: str, edge: int, device: torch.device) -> Callable[[], object]:
    x, w = (torch.randn(edge, edge, device=device).to(getattr(torch, TORCH_DTYPES[dtype])) for _ in range(2))

    def work() -> torch.Tensor:
        if device.type == "cuda":
            torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
        return x @ w

    return work


def optimizer_step(context: Context, *, words: Sequence[str], a: str = "foreach", b: str = "fused",
                   steps: int = 4) -> Measured:
    """Return the speed of AdamW's update b over update a (loop over tensors, foreach or fused) on the recipe's trained weights.

    Detail: `share`, the share of arm a in a whole step, of which `steps` are timed beside it, and `at_most`, how many times as
    fast the whole step could then become if the update took no time at all.
    """
    training = probe.open_training(words, context.cache)
    arms: probe.Arms = {name: probe.timed(_optimizer(training.setup, name).step, training.setup.device) for name in (a, b)}
    arms["whole step"] = partial(training.step_s, steps)
    rounds = by_turns(arms, context.deadline)
    share = probe.ratio(rounds, a, "whole step").median
    return probe.faster(rounds, share=share, at_most=1 / (1 - min(share, 0.99)))


def _optimizer(setup: Setup, way: str) -> torch.optim.AdamW:
    """Return an optimizer of weights like the recipe's, with gradients and a tiny learning rate; way "loop" is neither."""
    weights = [nn.Parameter(weight.detach().clone()) for weight in setup.model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return torch.optim.AdamW(weights, lr=1e-9, foreach=way == "foreach", fused=way == "fused")


# ------------------------------------------------------------------------------------------------ several devices

GPU_WIDTH, GPU_LAYERS, GPU_HEADS, GPU_ROWS, GPU_TOKENS = 1024, 8, 16, 32, 512
SHARD_WIDTH, SHARD_LAYERS, SHARD_ROWS = 512, 6, 256


def data_parallel(context: Context) -> Measured:
    """Return how many times as fast torch.nn.DataParallel trains a small transformer on two GPUs as on one of them."""
    if torch.cuda.device_count() < 2:
        raise WrongUse(f"two GPUs are compared with one, and torch sees {torch.cuda.device_count()} here")
    device = torch.device("cuda:0")
    arms = {name: probe.timed(_gpu_trainer(device, gpus), device)
            for name, gpus in (("one GPU", [0]), ("DataParallel over two", [0, 1]))}
    return probe.faster(by_turns(arms, context.deadline), "step_s")


def _gpu_trainer(device: torch.device, gpus: list[int]) -> Callable[[], None]:
    layer = nn.TransformerEncoderLayer(GPU_WIDTH, GPU_HEADS, 4 * GPU_WIDTH, dropout=0.0, batch_first=True)
    model = nn.DataParallel(nn.TransformerEncoder(layer, GPU_LAYERS, enable_nested_tensor=False).to(device), gpus)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = torch.randn(GPU_ROWS, GPU_TOKENS, GPU_WIDTH, device=device)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(rows).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharding(context: Context) -> Measured:
    """Return the speed of training with sharded optimizer states over plain data-parallel training, on one device.

    torch's ZeroRedundancyOptimizer shards the states, as DeepSpeed's ZeRO stage 1 does. With one process there is no other
    process to hold a shard; stage 2, which shards gradients too, keeps all of them just the same. Detail: `held_ratio`, the
    bytes held by sharded over plain training.
    """
    device = fastest_device()
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo",
                                   init_method=f"file://{context.folder / 'group'}", rank=0, world_size=1)
    try:
        trainers = {"data-parallel": _shard_trainer(device, False),
                    "data-parallel with sharded states": _shard_trainer(device, True)}
        rounds = by_turns({name: probe.timed(step, device) for name, (step, _) in trainers.items()}, context.deadline)
        held_bytes = {name: held() for name, (_, held) in trainers.items()}
    finally:
        distributed.destroy_process_group()
    plain, shards = held_bytes.values()
    return probe.faster(rounds, "step_s", held_bytes=held_bytes, held_ratio=shards / plain)


def _shard_trainer(device: torch.device, sharded: bool) -> tuple[Callable[[], None], Callable[[], int]]:
    """Return a function that takes one step, and one that counts the bytes of weights, gradients and states."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own deprecated parts when it is loaded

    torch.manual_seed(0)
    layers = [layer for _ in range(SHARD_LAYERS) for layer in (nn.Linear(SHARD_WIDTH, SHARD_WIDTH), nn.GELU())]
    plain = nn.Sequential(*layers).to(device)
    model = DistributedDataParallel(plain)
    optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3) if sharded \
        else torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randn(SHARD_ROWS, SHARD_WIDTH, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(rows).square().mean().backward()
        optimizer.step()

    def held() -> int:
        inner: Any = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
        return standing_bytes(plain, inner)

    return step, held
