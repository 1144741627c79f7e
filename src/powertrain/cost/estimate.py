"""What a plan expects of a run before any step: time, work and memory from facts alone.

The floor is the time that no software beats at the measured peaks. The expectation starts from the ideal step, the sum of its
parts at those peaks (products, bytes between them, operator calls, random numbers), and divides it by the share of the ideal
that such work reaches: in finished runs on this very machine, or else in a study of this kind of device, which is kept in
efficiencies.json.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from powertrain.cost.collectives import Collectives, Division, collectives_of, sends_of
from powertrain.cost.fitting import largest_pass, link_of, waited_s
from powertrain.cost.memory import peak_memory
from powertrain.cost.pipeline import bubble
from powertrain.cost.sharing import Sharing, sharing_of
from powertrain.cost.weights import as_decoder, as_held, checkpoint_bytes, lowest_layer, tensor_part
from powertrain.cost.work import Work, forward_flops, recompute_flops, step_work, training_flops
from powertrain.cost.workload import Workload, lengths_at
from powertrain.records import REACHED, REACHED_SHARE, Estimate, Hardware, ModelFacts, UnknownFact
from powertrain.shapes import DTYPE_BYTES, EIGHT_BIT

COMPUTE = "compute"
BANDWIDTH = "memory bandwidth"
CALLS = "operator calls"

OPERATOR_S = {"cpu": 10e-6, "cuda": 5e-6}    # guess: one operator call or kernel launch of eager PyTorch
DROPOUT_ELEMENT_S = {"cpu": 5e-9}            # guess: one random number and its use, forward and backward; on a GPU it hides
MOVED_SHARE = {"cpu": 0.5}                   # guess: of the bytes between products; caches keep the rest. A GPU moves them all
LARGE_TOKENS = 1024                          # of a pass: from here on, products count as large ...
LARGE_WIDTH = 256                            # ... if the model is also this wide. guess: until a study says otherwise
# by device, the parts without which torch.compile makes no code there (facts/software.py says what is missing)
COMPILER_PARTS: Mapping[str, tuple[str, ...]] = {"cpu": ("c++ compiler", "python headers"), "cuda": ("triton",)}
TABLE = Path(__file__).with_name("efficiencies.json")
NARROWEST = 0.1                              # an interval reaches at least so far to either side: no run repeats exactly
FUSED_SHARE = 1 / 3                          # guess: chains of about three elementwise operators become one
BRIDGED_SHARE = 0.5                          # guess: modules of other libraries start more operators, and fuse no projections


def estimate(model: ModelFacts, workload: Workload, hardware: Hardware, steps: int) -> Estimate:
    """Return the expectation for `steps` optimizer steps of `workload`.

    Where several processes share a step, its time and memory are those of one of them, and work and peak those of all.

    Raises UnknownFact if `hardware` has no measured peak for the workload's dtype, or no measured bandwidth, and for a
    model whose shape is not known well enough.
    """
    processes, step = hardware.processes, workload
    groups = processes // step.tensor_degree
    waiting = bubble(step.stages, step.micro_batches)
    passing = step if step.stages > 1 else step.shared_by(groups)        # what goes through one process
    workload = step.shared_by(groups)
    work = workload_work(tensor_part(model, workload.tensor_degree), workload)
    floor_s, bound_by = step_floor(work, hardware)
    expect = expected_efficiency(model, workload, hardware)
    (low_s, high_s), copies = expected_step_s(work, hardware, expect), ""
    if "offload" in workload.saved.values():
        (low_wait_s, high_wait_s), copies = _waits(model, workload, hardware, expect)
        low_s, high_s = low_s + low_wait_s, high_s + high_wait_s
    if waiting:
        low_s, high_s, copies = low_s / (1 - waiting), high_s / (1 - waiting), f"{copies}; waits between stages: formula"
    shared = Sharing((low_s, high_s))
    if processes > 1:
        alone = dataclasses.replace(step, shards=1, replicas=1, sharded_stage=0, tensor_degree=1, stages=1)
        shared = sharing_of(_exchanged(model, passing, hardware), hardware, own_s=(low_s, high_s), waiting=waiting,
                            alone_s=expected_step_s(workload_work(model, alone), hardware, expect),
                            hides=workload.shards > 1 and hardware.device == "cuda", longest_part=longest_part(work, hardware))
    of_decoder = "" if model.provider == "native" else ", as our decoder of the same shape would take"
    coarse = f", products in {workload.base_dtype} at that of {workload.dtype}: they may be faster" \
        if workload.base_dtype in EIGHT_BIT else ""
    return Estimate(
        step_s=shared.step_s, floor_s=floor_s, bound_by=bound_by,
        flops_per_step=processes * work.flops, flops_per_token=work.flops_per_token,
        dtype=work.dtype, peak_flops_per_s=processes * hardware.peak(work.dtype), tokens_per_step=step.tokens, steps=steps,
        memory_bytes=peak_memory(model, passing), copied_bytes=checkpoint_bytes(model, step.optimizer),
        padding_share=workload.padding_share,
        largest_pass=largest_pass(model, workload, hardware.free_memory_bytes),
        bytes_per_step=processes * (work.gemm_bytes + work.optimizer_bytes),
        basis=f"expected time: {expect.basis}{copies}{shared.basis}; floor: formulas with the {hardware.basis} peaks{coarse}; "
              f"memory: formulas{of_decoder}",
        step_basis=expect.basis, peak_basis=hardware.basis,
        efficiency=shared.efficiency, held_back_by=shared.held_back_by, exchanges=shared.exchanges,
    )


def _exchanged(model: ModelFacts, workload: Workload, hardware: Hardware) -> tuple[Collectives, ...]:
    """Return what the processes of a run exchange in one step."""
    if workload.stages > 1:
        return (sends_of(model, workload.micro_batches, workload.pass_slots),)
    passes = _slot_lengths(workload)
    return collectives_of(model, division_of(workload, hardware), len(passes), tokens=sum(map(sum, passes)),
                          item_bytes=DTYPE_BYTES[workload.dtype])


def division_of(workload: Workload, hardware: Hardware) -> Division:
    """Return how the processes of a run share its step, where they do not divide it in stages."""
    return Division(hardware.processes, workload.sharded_stage, hardware.processes // workload.shards, workload.tensor_degree)


def _waits(model: ModelFacts, workload: Workload, hardware: Hardware, expect: "Efficiency") -> tuple[tuple[float, float], str]:
    """Return the seconds that a step waits for copies to the host, low and high, and the basis of the two.

    Beside a computation that reaches less of the peak a copy hides longer: each end of the interval has the wait of its share.
    """
    link = link_of(hardware, workload.dtype)
    if isinstance(link, str):
        return (0.0, 0.0), f"; waiting for copies to the host is not in it, because {link}"
    blocks, peak = min(workload.saved_blocks, model.layers - lowest_layer(model)), hardware.peak(workload.dtype)
    low_s, high_s = (blocks * sum(waited_s(model, workload.saved, lengths, dataclasses.replace(link, flops_per_s=share * peak))
                                  for lengths in _slot_lengths(workload)) for share in (expect.high, expect.low))
    return (low_s, high_s), "; copies to the host: formulas with its measured link"


def expected_efficiency(model: ModelFacts, workload: Workload, hardware: Hardware) -> "Efficiency":
    """Return the share of the ideal step that this work is expected to reach here."""
    kind = kind_of_work(model, workload)
    found = efficiency(hardware, workload.dtype, size_class(workload.pass_slots, model.width), kind)
    if hardware.basis != "measured":
        found = Efficiency(REACHED_SHARE * found.low, found.high, f"{found.basis}; guess: {REACHED}")
    if model.provider == "native" or kind in hardware.speeds:
        return found
    return Efficiency(BRIDGED_SHARE * found.low, found.high, f"{found.basis}; guess: {model.provider} may take twice as long")


def kind_of_work(model: ModelFacts, workload: Workload) -> str:
    """Return the kind of work: runs of one kind reach about the same share of the ideal step."""
    trained = model.method if model.adapter_parameters else "full"
    passes = "packed" if workload.packed_tokens is not None else "padded" if workload.lengths else "blocks"
    size = f"width {_rounded(model.width, 2)}+, {_rounded(workload.pass_slots, 4)}+ tokens a pass"
    marks = {"compiled": workload.compiled, "fused blocks": workload.fused_blocks,
             "checkpointed": bool(workload.checkpoint_every), "offloaded": "offload" in workload.saved.values(),
             "dropout": bool(model.dropout), "replayed": workload.replayed,
             "plain attention": workload.attention_saves_scores, "chunked loss": workload.loss_chunk_rows is not None}
    return ", ".join([model.provider, trained, workload.dtype, size, passes, *(name for name, on in marks.items() if on)])


def _rounded(value: int, base: int) -> int:
    """Return the largest power of `base` up to `value`."""
    return int(base ** math.floor(math.log(max(1, value), base) + 1e-9))


def workload_work(model: ModelFacts, workload: Workload) -> Work:
    """Return the work of one optimizer step of `workload`: what its tokens need, and on top what is computed for padding.

    Raises UnknownFact for a model of another library whose shape is not known, or whose halves read different tokens.
    """
    if model.provider != "native" and model.task == "seq2seq":
        raise UnknownFact(f"the two halves of {model.family} read different tokens, and how many each reads is not known")
    if model.provider != "native" and not min(model.width, model.heads, model.head_width, model.mlp_width,
                                              model.matmul_parameters):
        raise UnknownFact(f"the shape of {model.family} is not known well enough to count what {model.provider} does in a step")
    model = as_held(as_decoder(model), workload.base_dtype)
    real, slots = _real_lengths(workload), _slot_lengths(workload)
    reaching = workload.head_share * (1.0 if workload.loss_chunk_rows is None else 1 - workload.padding_share)
    keeps_attention = workload.checkpoint_keeps_attention and not model.dropout and not workload.attention_saves_scores
    work = step_work(model, slots, workload.dtype, checkpoint_every=workload.checkpoint_every,
                     checkpoint_keeps_attention=keeps_attention, head_share=reaching, optimizer=workload.optimizer)
    needed = training_flops(model, real, workload.head_share, passes=len(slots))
    if workload.reference_in_step:           # another forward pass, without a gradient
        work, needed = (dataclasses.replace(work, flops=work.flops + forward_flops(model, [n for part in slots for n in part],
                                                                                   reaching)),
                        needed + forward_flops(model, real, workload.head_share))
    again = recompute_flops(model, sum(map(sum, slots)), workload.saved, workload.saved_blocks)
    work = dataclasses.replace(work, tokens=workload.tokens, flops=needed, padding_flops=max(0.0, work.flops - needed),
                               recompute_flops=work.recompute_flops + again,
                               optimizer_bytes=work.optimizer_bytes / workload.shards)
    if not (workload.compiled or workload.fused_blocks):
        return work
    # the same mathematics with the operators between products fused, so that about a third of their bytes move
    return dataclasses.replace(work, elementwise_bytes=work.elementwise_bytes * FUSED_SHARE,
                               operators=round(work.operators * FUSED_SHARE))


def _real_lengths(workload: Workload) -> list[int]:
    """Return the tokens of each example of a step: all of one length, or spread as their quantiles say."""
    if not workload.lengths:
        return [workload.block] * workload.examples
    if workload.answers > 1:                 # the documents of an example, of about one length
        each = dataclasses.replace(workload, answers=1)
        return [max(1, round(length / workload.answers)) for length in _real_lengths(each) for _ in range(workload.answers)]
    drawn = lengths_at(workload.lengths, (np.arange(workload.examples) + 0.5) / workload.examples)
    return [max(1, round(length)) for length in workload.tokens / drawn.sum() * drawn]


def _slot_lengths(workload: Workload) -> list[list[int]]:
    """Return the slots of the documents in each pass of a step, with padding, or with the fill of a packed pass."""
    if workload.packed_tokens is not None:
        passes = -(-workload.tokens // workload.packed_tokens)
        documents = _real_lengths(workload)
        filled = round(workload.tokens * workload.padding_share / (1 - workload.padding_share) / passes)
        dealt = [documents[first::passes] for first in range(passes)]
        return [part + ([filled] if filled else []) for part in dealt if part]
    padded = round(workload.block / (1 - workload.padding_share))
    full, rest = divmod(workload.examples, workload.micro_batch)
    return [[padded] * size for size in [workload.micro_batch] * full + ([rest] if rest else [])]


# ------------------------------------------------------------------------------------------------ seconds of a step


@dataclass(frozen=True)
class Efficiency:
    """The share of the ideal step's speed that such work reaches, from the worst case to the best."""

    low: float
    high: float
    basis: str


def efficiency(hardware: Hardware, dtype: str, size: str, kind: str = "") -> Efficiency:
    """Return what to expect of this machine, with its basis: its own runs of the same kind of work, else the table."""
    seen = hardware.speeds.get(kind)
    if seen is not None:
        low, high = min(seen.low, seen.median * (1 - NARROWEST)), max(seen.high, seen.median * (1 + NARROWEST))
        return Efficiency(low, high, f"{seen.runs} run{'s' if seen.runs > 1 else ''} on this machine")
    rows = _table()
    keys = ((hardware.device, dtype, size), (hardware.device, "any", size), ("cuda", "any", size))
    row = next(rows[key] for key in keys if key in rows)
    return Efficiency(row["low"], row["high"], row["basis"])


@cache
def _table() -> Mapping[tuple[str, str, str], Any]:
    return {(row["device"], row["dtype"], row["size"]): row
            for row in json.loads(TABLE.read_text(encoding="utf-8"))["rows"]}


def size_class(pass_tokens: int, width: int) -> str:
    """Return "large" if products fill the device, else "small"."""
    return "large" if pass_tokens >= LARGE_TOKENS and width >= LARGE_WIDTH else "small"


def step_floor(work: Work, hardware: Hardware) -> tuple[float, str]:
    """Return the seconds of one step if nothing but the slower of compute and memory limits it, and which of the two that is.

    Compute: the model's FLOPs at the measured GEMM peak. Memory: the operands of the matrix products and the
    optimizer's state, at the copy bandwidth; what fusion can avoid is not counted. A model small enough to stay in a
    CPU's caches can beat the memory side. Raises UnknownFact if `hardware` has no peak for the work's dtype, or no
    bandwidth.
    Source: Williams et al. 2009 (roofline).
    """
    compute_s = work.flops / hardware.peak(work.dtype)
    memory_s = (work.gemm_bytes + work.optimizer_bytes) / _bandwidth(hardware)
    return (compute_s, COMPUTE) if compute_s >= memory_s else (memory_s, BANDWIDTH)


def ideal_step_s(work: Work, hardware: Hardware) -> float:
    """Return the seconds of one step of eager PyTorch if each of its parts runs at the measured peaks. Never below the floor.

    Products, recomputed and padded ones too; bytes between products; operator calls, which a GPU's host starts while
    the device works. Raises UnknownFact as step_floor does.
    """
    parts = _ideal_parts(work, hardware)
    calls_s = parts.pop(CALLS)
    ideal_s = sum(parts.values()) + calls_s if hardware.device == "cpu" else max(sum(parts.values()), calls_s)
    return max(ideal_s, step_floor(work, hardware)[0])


def longest_part(work: Work, hardware: Hardware) -> str:
    """Return what takes most of an ideal step: products, memory traffic, operator calls or random numbers."""
    parts = _ideal_parts(work, hardware)
    return max(parts, key=lambda name: parts[name])


def _ideal_parts(work: Work, hardware: Hardware) -> dict[str, float]:
    """Return the seconds of each part of a step at the peaks."""
    device = "cpu" if hardware.device == "cpu" else "cuda"
    moved = work.optimizer_bytes + MOVED_SHARE.get(device, 1.0) * work.elementwise_bytes
    return {COMPUTE: work.hardware_flops / hardware.peak(work.dtype), BANDWIDTH: moved / _bandwidth(hardware),
            "random numbers": work.dropout_elements * DROPOUT_ELEMENT_S.get(device, 0.0),
            CALLS: work.operators * OPERATOR_S[device]}


def expected_step_s(work: Work, hardware: Hardware, expect: Efficiency) -> tuple[float, float]:
    """Return the seconds that one step is expected to take in eager PyTorch, low and high. Never below the floor.

    Raises UnknownFact as step_floor does.
    """
    ideal_s, (floor_s, _) = ideal_step_s(work, hardware), step_floor(work, hardware)
    return max(ideal_s / expect.high, floor_s), max(ideal_s / expect.low, floor_s)


def _bandwidth(hardware: Hardware) -> float:
    if hardware.bandwidth_bytes_per_s is None:
        raise UnknownFact(f"no measured bandwidth for {hardware.name}; `powertrain facts --measure` measures it")
    return hardware.bandwidth_bytes_per_s
