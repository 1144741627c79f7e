"""What this GPU can do and how much of it training gets: `make bench-gpu`, a few minutes, one table.

    python benchmarks/gpu.py [--models 0.6B 1.7B 4B 8B] [--minutes 1] [--no-ladder] [--limit 15]
                             [--study NAME] [--tiny]

First the limits: matrix products and attention kernels. Then LoRA (r 16 on all linears) on random weights of Qwen3's
shapes, 16,384 tokens a step in rows of 2,048 (batch 2 x 4), for transformers + peft eager and compiled, and for Powertrain
as a ladder, each rung with one technique more: tokens/s, share of the measured products by exact FLOPs, peak memory and
what was predicted, first and last loss. Arms are processes; each peer takes turns with ours. `--tiny` does all of it with
toy shapes on whatever device there is: to see that it works.

Each case is a process with a time limit (`--limit`, in minutes), see apart.py: one that fails, hangs or is killed is a line
with its reason, and Ctrl-C keeps what was measured. The study is written after each case, with the table; the exit code is 1
if a case failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
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
from apart import DONE, Case, Outcome, outcomes, tell
from peer import Peer
from pydantic import TypeAdapter

from powertrain.cli.options import cache_folder
from powertrain.cost.work import step_work
from powertrain.data.order import step_examples
from powertrain.evidence import studies
from powertrain.evidence.clock import Pace, Track, interleave
from powertrain.evidence.worker import ArmProcess, Order
from powertrain.facts.hardware import read_hardware, read_processor
from powertrain.facts.software import read_software
from powertrain.recipe import Recipe
from powertrain.records import Facts, Hardware, Software, WrongUse, to_plain
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
PLAN = "the plan"
# each rung has what those below it have: words that turn off what is above
LADDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("bf16", ("bf16",)), ("+ frozen base", ("frozen_base",)), ("+ fused AdamW", ("fused_adamw",)),
    ("+ attention kernel", ("attention_kernel",)), ("+ chunked loss", ("chunked_cross_entropy",)),
    (PLAN, ("fused_blocks",)))
PEERS = {"transformers + peft, eager": False, "transformers + peft, compiled": True}      # -> whether it is compiled


def main() -> None:
    options = parse()
    if options.case:
        measure(options)
        return
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here: `powertrain facts` says why; --tiny tries the benchmark itself on "
                         "whatever there is")
    try:
        folder, began = studies.new_folder("bench-gpu", options.study), time.monotonic()
    except WrongUse as error:
        raise SystemExit(str(error)) from None
    found: list[Outcome] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)    # as Ctrl-C
    with tempfile.TemporaryDirectory(prefix="powertrain-gpu-") as scratch:
        cases = cases_of(options, Path(scratch))
        for outcome in outcomes(cases, 60 * options.limit, Path(scratch)):
            found.append(outcome)
            shown = keep(folder, found, time.monotonic() - began)
            print(f"{len(found)}/{len(cases)} {outcome.case}: {outcome.status} {outcome.reason}", file=sys.stderr, flush=True)
            if outcome.case.endswith(" end"):
                shutil.rmtree(Path(scratch, outcome.case.removesuffix(" end")), ignore_errors=True)
    print(f"{shown}\nstored in {folder}: send back this folder")
    raise SystemExit(0 if all(outcome.status == DONE for outcome in found) else 1)


def cases_of(options: argparse.Namespace, scratch: Path) -> list[Case]:
    """The cases in their order: the machine, its limits, and for each model its weights, the rungs and the peers."""
    def case(name: str, needs: str = "") -> Case:
        words = ["--case", name, "--scratch", str(scratch), "--minutes", str(options.minutes), *["--tiny"] * options.tiny]
        return Case(name, (sys.executable, str(Path(__file__).resolve()), *words, "--results"), needs)

    found = [case("machine"), case("products"), case("attention")]
    for model in TINY if options.tiny else options.models:
        found.append(case(f"{model} weights"))
        found += [case(f"{model} {part}", f"{model} weights") for part in (*rungs(every=not options.no_ladder), *PEERS)]
        found.append(case(f"{model} end"))
    return found


def measure(options: argparse.Namespace) -> None:
    """Run one case, in this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, _, part = options.case.partition(" ")
    if options.case == "machine":
        hardware = read_hardware(cache_folder())
        tell(options.results, facts={"hardware": to_plain(hardware), "software": to_plain(read_software(hardware))})
    elif options.case in ("products", "attention"):
        for name, figure in (products if options.case == "products" else attention)(device, tiny=options.tiny):
            tell(options.results, limit=[options.case, name, figure])
    elif part != "end":
        shape, scratch = (TINY if options.tiny else SHAPES)[model], options.scratch / model
        scratch.mkdir(exist_ok=True)
        row = 64 if options.tiny else ROW
        if part == "weights":
            write_model(shape, scratch, device)
            write_rows(shape, row, scratch / "rows.jsonl", scratch / "rows.npy")
        elif part in PEERS:
            measure_peer(model, part, scratch, device, row, options)
        else:
            measure_rung(model, part, scratch, row, options)


def keep(folder: Path, found: Sequence[Outcome], seconds: float) -> str:
    """Store the study and its table, with whatever the cases have measured, over that of fewer cases; return the table."""
    told = [one for outcome in found for one in outcome.measured]
    limits: dict[str, dict[str, Any]] = {}
    for kind, name, figure in (one["limit"] for one in told if "limit" in one):
        limits.setdefault(kind, {})[name] = figure
    rows = [one["row"] for one in told if "row" in one]
    # those of an arm hold the model too; where not even the machine could be read, its processor can
    facts = next((one["facts"] for one in reversed(told) if "facts" in one), None)
    hardware = read_processor() if facts is None else Hardware(**facts["hardware"])
    software = read_software(hardware) if facts is None else Software(**facts["software"])
    failures = [{"case": one.case, "status": one.status, "reason": one.reason, "last_lines": list(one.last_lines)}
                for one in found if one.status != DONE]
    study = Study(
        name=folder.name, kind="gpu", what="LoRA at Qwen3 shapes on one GPU", seconds=seconds,
        runs=tuple(TypeAdapter(ArmRun).validate_python(run) for one in told for run in one.get("runs", ())),
        comparisons=tuple(TypeAdapter(Comparison).validate_python(one["comparison"]) for one in told if "comparison" in one),
        findings={"limits": limits, "rows": rows, "failures": failures}, **studies.circumstances(hardware, software))
    studies.save(folder, study, facts or {"hardware": hardware, "software": software}, over=True)
    shown = "\n".join([*limit_lines(limits), table(rows), *failure_lines(failures)])
    (folder / "table.txt").write_text(shown + "\n", encoding="utf-8")
    return shown


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--minutes", type=float, default=1.0, help="for each comparison, at most")
    parser.add_argument("--no-ladder", action="store_true", help="measure the plan only, and not what leads to it")
    parser.add_argument("--limit", type=float, default=15.0, help="minutes, for each case, at most")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--study", help="folder in studies/")
    for name, kind in (("case", str), ("scratch", Path), ("results", Path)):     # of the process of one case
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
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


def words_for(scratch: Path, row: int) -> tuple[str, ...]:
    return ("method=lora", f"model.path={scratch / 'model'}", f"data.source={scratch / 'rows.jsonl'}", "data.format=text",
            "data.train_on=all", f"data.max_length={row}", "data.validation_share=0", f"train_batch_size={ROWS}",
            "learning_rate=2e-4", "weight_decay=0", "max_steps=2000", "logging_steps=1000000", "save_steps=0", "eval_steps=0")


def order_of(rung: str, scratch: Path, row: int) -> Order:
    off = [f"techniques.{technique}=off" for technique in rungs(every=True)[rung]]
    return Order(Arm(f"powertrain, {rung}", (*words_for(scratch, row), *off)), str(cache_folder()), str(scratch),
                 tempfile.mkdtemp(dir=scratch))


def measure_peer(model: str, part: str, scratch: Path, device: str, row: int, options: argparse.Namespace) -> None:
    """The peer's row, and its comparison with our plan, which takes turns with the peer."""
    settings = {"model": str(scratch / "model"), "rows": str(scratch / "rows.npy"), "batch": BATCH,
                "accumulation": ROWS // BATCH, "compile": PEERS[part], "device": device}
    with Peer(part, Path(sys.executable), "peft_lora.py", settings, scratch) as theirs, \
            ArmProcess(order_of(PLAN, scratch, row)) as ours:
        deadline = time.monotonic() + 60 * options.minutes
        comparison, a, b = interleave(Track(theirs), Track(ours), Pace(pairs=5, most_pairs=8, warm_up_s=20.0),
                                      deadline=deadline)
        facts = ours.ready.facts
        tell(options.results, row=figures(model, a, facts, row), comparison=to_plain(comparison),
             runs=[to_plain(a), to_plain(b)])


def measure_rung(model: str, rung: str, scratch: Path, row: int, options: argparse.Namespace) -> None:
    with ArmProcess(order_of(rung, scratch, row)) as process:
        track, facts = Track(process), process.ready.facts
        tell(options.results, facts=to_plain(facts))
        track.first_step()
        track.warm_up.append(track.take(2))
        track.windows += [track.take(2) for _ in range(5)]
        run = track.run()
        tell(options.results, row=figures(model, run, facts, row) | {"predicted": process.ready.needed_bytes},
             runs=[to_plain(run)])


def rungs(*, every: bool) -> dict[str, list[str]]:
    """Rung -> what is off on it."""
    all_of = [technique for _, techniques in LADDER for technique in techniques]
    found, on = {}, 0
    for name, techniques in LADDER:
        on += len(techniques)
        found[name] = all_of[on:]
    return found if every else {PLAN: found[PLAN]}


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


def limit_lines(limits: Mapping[str, Mapping[str, float | str]]) -> list[str]:
    return [f"{kind:10} {name:28} {f'{figure:,.1f} TFLOP/s' if isinstance(figure, float) else figure}"
            for kind, figures in limits.items() for name, figure in figures.items()]


def failure_lines(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{one['case']:40} {one['status']}: {one['reason']}" for one in failures]


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
