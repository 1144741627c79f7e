"""What this GPU can do and how much of it training gets: `make bench-gpu`, a few minutes, one table.

    python benchmarks/gpu.py [--models 0.6B 1.7B 4B 8B] [--minutes 1] [--no-ladder] [--study NAME] [--tiny]

First the limits: matrix products and attention kernels. Then LoRA (r 16 on all linears) on random weights of Qwen3's
shapes, 16,384 tokens a step in rows of 2,048 (batch 2 x 4), for transformers + peft eager and compiled, and for Powertrain
as a ladder, each rung with one technique more: tokens/s, share of the measured products by exact FLOPs, peak memory and
what was predicted, first and last loss. Arms are processes; each peer takes turns with ours. `--tiny` does all of it with
toy shapes on whatever device there is: to see that it works.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peer import Peer

from powertrain.cli.options import cache_folder, say
from powertrain.cost.work import step_work
from powertrain.data.order import step_examples
from powertrain.evidence import studies
from powertrain.evidence.clock import CannotRun, Pace, Track, interleave
from powertrain.evidence.worker import ArmProcess, Order
from powertrain.recipe import Recipe
from powertrain.records import Facts
from powertrain.records.evidence import Arm, ArmRun, Comparison, Study

ROW, ROWS, BATCH, STEPS = 2048, 8, 2, 200


@dataclass(frozen=True)
class Shape:
    """A Qwen3 model's, as its config.json has them."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    tied: bool
    head_width: int = 128
    vocabulary: int = 151_936


SHAPES = {"0.6B": Shape(28, 1024, 16, 8, 3072, True), "1.7B": Shape(28, 2048, 16, 8, 6144, True),
          "4B": Shape(36, 2560, 32, 8, 9728, True), "8B": Shape(36, 4096, 32, 8, 12288, False)}
TINY = {"tiny": Shape(2, 64, 2, 1, 128, True, 32, 512)}
TARGETS = {"0.6B": 110_000, "1.7B": 58_000, "4B": 29_000, "8B": 17_500}      # tokens/s in bf16 on an H200: performance.md 1.1
# each rung has what those below it have: words that turn off what is above
LADDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("bf16", ("bf16",)), ("+ frozen base", ("frozen_base",)), ("+ fused AdamW", ("fused_adamw",)),
    ("+ attention kernel", ("attention_kernel",)), ("+ chunked loss", ("chunked_cross_entropy",)),
    ("the plan", ("fused_blocks",)))


def main() -> None:
    options = parse()
    folder, began = studies.new_folder("bench-gpu", options.study), time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        raise SystemExit("there is no CUDA device here; --tiny tries the benchmark itself on whatever there is")
    limits = {"products": dict(products(device, tiny=options.tiny)), "attention": dict(attention(device, tiny=options.tiny))}
    print(json.dumps(limits, indent=1), flush=True)
    rows: list[dict[str, Any]] = []
    facts: Facts | None = None
    runs: list[ArmRun] = []
    comparisons: list[Comparison] = []
    for name, shape in (TINY if options.tiny else {name: SHAPES[name] for name in options.models}).items():
        with tempfile.TemporaryDirectory(prefix="powertrain-gpu-") as scratch:
            found, of_this = model_rows(name, shape, Path(scratch), device, options, runs, comparisons)
            rows, facts = rows + found, of_this or facts
            print(table(rows), flush=True)
    if facts is None:
        raise SystemExit("no arm could run, so there is nothing to store")
    studies.save(folder, Study(
        name=folder.name, kind="gpu", what="LoRA at Qwen3 shapes on one GPU", runs=tuple(runs), comparisons=tuple(comparisons),
        findings={"limits": limits, "rows": rows}, seconds=time.monotonic() - began, **studies.describe(facts)), facts)
    print(f"stored in {folder}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--minutes", type=float, default=1.0, help="for each comparison, at most")
    parser.add_argument("--no-ladder", action="store_true", help="measure the plan only, and not what leads to it")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--study", help="folder in studies/")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------ limits


def products(device: str, *, tiny: bool) -> Iterator[tuple[str, float]]:
    """Shape of a product -> TFLOP/s in bf16."""
    sizes = [(8192, 8192, 8192), (16384, 4096, 4096), (16384, 24576, 4096), (4096, 4096, 16)]
    for m, n, k in [(64, 64, 64)] if tiny else sizes:
        a, b = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((m, k), (k, n)))
        yield f"{m} x {n} x {k}", 2 * m * n * k / median_s(lambda a=a, b=b: a @ b, device) / 1e12


def attention(device: str, *, tiny: bool) -> Iterator[tuple[str, float | str]]:
    """Kernel and length -> TFLOP/s, forward and backward, causal, of 16,384 tokens, 32 heads of 128."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads, width, tokens = (2, 32, 256) if tiny else (32, 128, 16384)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        for length in (128,) if tiny else (2048, 8192):
            q, k, v, dy = (torch.randn(tokens // length, heads, length, width, device=device, dtype=torch.bfloat16,
                                       requires_grad=True) for _ in range(4))

            def run(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, dy: torch.Tensor = dy) -> None:
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                torch.autograd.grad(out, (q, k, v), dy)

            name, flops = f"{backend.name.lower()} {length}", 3 * 2 * tokens * length * heads * width
            try:
                with sdpa_kernel(backend):
                    yield name, flops / median_s(run, device) / 1e12
            except RuntimeError as error:
                yield name, str(error).splitlines()[0]


def median_s(run: Callable[[], Any], device: str, times: int = 20) -> float:
    taken = []
    for attempt in range(times + 3):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if attempt >= 3:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


# ------------------------------------------------------------------------------------------------ models


def model_rows(name: str, shape: Shape, scratch: Path, device: str, options: argparse.Namespace, runs: list[ArmRun],
               comparisons: list[Comparison]) -> tuple[list[dict[str, Any]], Facts | None]:
    """One row of the table for each arm that can run; None where none of ours can."""
    say(f"Qwen3 {name}: random weights")
    model, data, packed = write_model(shape, scratch, device), scratch / "rows.jsonl", scratch / "rows.npy"
    row = 64 if options.tiny else ROW
    write_rows(shape, row, data, packed)
    words = ["method=lora", f"model.path={model}", f"data.source={data}", "data.format=text", "data.train_on=all",
             f"data.max_length={row}", "data.validation_share=0", f"train_batch_size={ROWS}", "learning_rate=2e-4",
             "weight_decay=0", "max_steps=2000", "logging_steps=1000000", "save_steps=0", "eval_steps=0"]
    pace = Pace(pairs=5, most_pairs=8, warm_up_s=20.0)
    found: list[dict[str, Any]] = []
    order = {}
    for rung, off in rungs(every=not options.no_ladder):
        arm = Arm(f"powertrain, {rung}", (*words, *(f"techniques.{technique}=off" for technique in off)))
        order[rung] = Order(arm, str(cache_folder()), str(scratch), tempfile.mkdtemp(dir=scratch))
    facts: Facts | None = None
    for compiled in (False, True):
        shown = "transformers + peft, " + ("compiled" if compiled else "eager")
        settings = {"model": str(model), "rows": str(packed), "batch": BATCH, "accumulation": ROWS // BATCH,
                    "compile": compiled, "device": device}
        try:
            with Peer(shown, Path(sys.executable), "peft_lora.py", settings, scratch) as theirs, \
                    ArmProcess(order["the plan"]) as ours:
                facts = ours.ready.facts
                deadline = time.monotonic() + 60 * options.minutes
                comparison, a, b = interleave(Track(theirs), Track(ours), pace, deadline=deadline)
                needed = ours.ready.needed_bytes
        except CannotRun as error:
            say(f"{shown}: {error}")
            continue
        runs += [a, b]
        comparisons.append(comparison)
        found.append(figures(name, a, facts, row))
        if not any(one["arm"] == b.arm for one in found):
            found.append(figures(name, b, facts, row) | {"predicted": needed})
    for rung in [rung for rung in order if rung != "the plan"]:
        try:
            with ArmProcess(order[rung]) as process:
                track = Track(process)
                facts = process.ready.facts
                track.first_step()
                track.warm_up.append(track.take(2))
                track.windows += [track.take(2) for _ in range(5)]
                runs.append(track.run())
                found.append(figures(name, runs[-1], facts, row) | {"predicted": process.ready.needed_bytes})
        except CannotRun as error:
            say(f"{rung}: {error}")
    shutil.rmtree(model)
    return found, facts


def rungs(*, every: bool) -> list[tuple[str, list[str]]]:
    """Rung -> what is off on it."""
    all_of = [technique for _, techniques in LADDER for technique in techniques]
    found, on = [], 0
    for name, techniques in LADDER:
        on += len(techniques)
        found.append((name, all_of[on:]))
    return found if every else found[-1:]


def figures(model: str, run: ArmRun, facts: Facts, row: int) -> dict[str, Any]:
    tokens_per_s = statistics.median(window.tokens_per_s for window in run.windows)
    flops = step_work(facts.model, [[row] * ROWS], "bf16").flops_per_token
    peak = facts.hardware.peak("bf16")
    return {"model": model, "arm": run.arm, "tokens_per_s": tokens_per_s, "share": tokens_per_s * flops / peak,
            "peak_bytes": run.peak_memory_bytes, "losses": [run.losses[0], run.losses[-1]], "target": TARGETS.get(model)}


def write_model(shape: Shape, scratch: Path, device: str) -> Path:
    """A Hugging Face folder of random bf16 weights, made on the device, with a tokenizer of a word for each number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = scratch / "model"
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=shape.vocabulary, hidden_size=shape.width, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_width,
            intermediate_size=shape.mlp_width, tie_word_embeddings=shape.tied, max_position_embeddings=4096))
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    # a special token is found inside of any word that has its letters, so none of them is a number
    special = {"unk_token": "<unknown>", "eos_token": "<end>", "pad_token": "<padding>"}
    names = [*special.values(), *map(str, range(len(special), shape.vocabulary))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=special["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


def write_rows(shape: Shape, row: int, data: Path, packed: Path) -> None:
    """The same random rows as text for us and, in the order in which we read them, as numbers for the peers."""
    rows = np.random.default_rng(0).integers(3, min(shape.vocabulary, 20_000), (STEPS * ROWS, row))
    ours = [int(i) for step in range(STEPS) for i in step_examples(Recipe().seed, step, ROWS, len(rows))]
    np.save(packed, rows[ours].astype(np.int32))
    data.write_text("".join(json.dumps({"text": " ".join(map(str, numbers))}) + "\n" for numbers in rows), encoding="utf-8")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'model':6} {'arm':34} {'tokens/s':>10} {'of products':>11} {'peak GiB':>9} {'predicted':>9} {'loss':>15} "
             f"{'target':>8}"]
    for one in rows:
        predicted = f"{one['predicted'] / 2**30:.2f}" if "predicted" in one else ""
        losses = " to ".join(f"{loss:.3f}" for loss in one["losses"])
        target = f"{one['target']:,}" if one["target"] else ""
        lines.append(f"{one['model']:6} {one['arm']:34} {one['tokens_per_s']:10,.0f} {one['share']:11.0%} "
                     f"{one['peak_bytes'] / 2**30:9.2f} {predicted:>9} {losses:>15} {target:>8}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
