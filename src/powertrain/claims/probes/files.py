"""Probes of files: compressing a checkpoint, saving it, and loading a model."""

from __future__ import annotations

import gc
import gzip
import importlib
import lzma
import os
import shutil
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from powertrain.claims.probes.probe import (
    REPEATS,
    Context,
    Measured,
    Rounds,
    apart,
    by_turns,
    exactly,
    medians,
    one_of,
    open_training,
    ratio,
    seconds_of,
)
from powertrain.evidence.stats import interval
from powertrain.records import WrongUse
from powertrain.training.checkpoint import save_checkpoint

# ------------------------------------------------------------------------------------------------ compression
# A real checkpoint, compressed: how many bytes are left, and how long writing it then takes.

Compress = Callable[[bytes], bytes]
COMPRESSION_METRICS = ("saved_share", "speed")


def compression(context: Context, *, words: Sequence[str], a: str = "none", b: str = "gzip", metric: str = "saved_share",
                steps: int = 20, most_bytes: int = 8 << 20, repeats: int = REPEATS) -> Measured:
    """Compare two compressions: "saved_share" of arm a's bytes that arm b saves, or arm b's "speed" of writing over arm a's.

    Methods: none, gzip, zlib (its fastest level), lzma, and zstd where a library for it is installed. A larger checkpoint is
    cut to `most_bytes`, weights and moments alike.
    """
    one_of("metric", metric, COMPRESSION_METRICS)
    known = methods()
    for name, method in (("a", a), ("b", b)):
        one_of(name, method, tuple(known))
    whole, sizes, rounds = apart(_compression_rounds, words, context.cache, context.deadline, context.folder, (a, b), steps,
                                 most_bytes, repeats)
    rest = dict(zip((a, b), sizes, strict=True))
    detail = {"checkpoint_bytes": whole, "bytes": rest, "seconds": medians(rounds, (a, b)),
              "times_slower": vars(ratio(rounds, 1, 0)), "saved_share": 1 - rest[b] / rest[a],
              "bytes_per_s": rest[a] / medians(rounds, (a, b))[b]}
    if metric == "speed":
        return Measured(ratio(rounds, 0, 1), "times as fast", a, b, detail)
    return Measured(exactly(1 - rest[b] / rest[a]), "of the bytes", a, b, detail)


def methods() -> Mapping[str, Compress]:
    """Return the compression methods that are installed."""
    found: dict[str, Compress] = {"none": bytes, "gzip": partial(gzip.compress, compresslevel=6),
                                  "zlib": partial(zlib.compress, level=1), "lzma": partial(lzma.compress, preset=0)}
    for module in ("compression.zstd", "zstandard"):     # Python's own from 3.14 on, and the library
        try:
            library: Any = importlib.import_module(module)
        except ImportError:
            continue
        found.setdefault("zstd", library.compress)
    return found


def _compression_rounds(words: Sequence[str], cache: Path, deadline: float, folder: Path, names: tuple[str, str], steps: int,
                        most_bytes: int, repeats: int) -> tuple[int, list[int], Rounds]:
    """Return the bytes of the checkpoint, the bytes that each method leaves, and the seconds of each."""
    training = open_training(words, cache, warm_up=steps)
    content = _checkpoint(training.state, folder / "compression")
    sample, known = b"".join(_cut(part, most_bytes / sum(map(len, content))) for part in content), methods()

    def write(name: str) -> None:
        with open(folder / f"compressed.{name}", "wb") as file:
            file.write(known[name](sample))
            file.flush()
            os.fsync(file.fileno())

    arms = [lambda n=name: seconds_of(lambda: write(n), torch.device("cpu")) for name in names]
    rounds = by_turns(arms, deadline, repeats)
    return sum(map(len, content)), [(folder / f"compressed.{name}").stat().st_size for name in names], rounds


def _checkpoint(state: Any, folder: Path) -> list[bytes]:
    """Return the content of the checkpoint's two large files."""
    saved = save_checkpoint(folder, state)
    content = [(saved.folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]
    shutil.rmtree(folder)
    return content


def _cut(content: bytes, share: float) -> bytes:
    return content if share >= 1 else content[:round(share * len(content))]


# ------------------------------------------------------------------------------------------------ saving
# How long saving keeps a run from training: real checkpoints, timed, times how often each arm writes one.

PER_STEPS = 1000                                   # steps


def saving(context: Context, *, words: Sequence[str], a: int = 50, b: int = 500, steps: int = 4,
           repeats: int = REPEATS) -> Measured:
    """Return the share by which saving every b steps blocks less than every a steps (checkpoints synced, with sha256).

    Detail: seconds blocked per 1000 steps, and their share of the wall time of both arms.
    """
    rounds = apart(_saving_rounds, words, context.cache, context.deadline, context.folder / "saving", steps, repeats)
    less = [1 - blocked_s(values[1], b) / blocked_s(values[0], a) for values in rounds]
    save_s = statistics.median(seconds for values in rounds for seconds in values[:2])
    step_s = statistics.median(values[2] for values in rounds)
    names = (f"saved every {a} steps", f"saved every {b} steps")
    detail = {"save_s": save_s, "step_s": step_s}
    for name, every in zip(("a", "b"), (a, b), strict=True):
        blocked = blocked_s(save_s, every)
        detail |= {f"blocked_s_{name}": blocked, f"blocked_share_{name}": blocked / (blocked + PER_STEPS * step_s)}
    return Measured(interval(less), "less time blocked", *names, detail)


def blocked_s(save_s: float, every: int) -> float:
    """Return the seconds blocked per 1000 steps."""
    return save_s * PER_STEPS / every


def _saving_rounds(words: Sequence[str], cache: Path, deadline: float, folder: Path, steps: int, repeats: int) -> Rounds:
    """Return the seconds of a save of each arm, and of a step."""
    training = open_training(words, cache)

    def save_s() -> float:
        training.advance(1)                  # each checkpoint is of a step of its own
        seconds = seconds_of(lambda: save_checkpoint(folder, training.state), training.setup.device)
        shutil.rmtree(folder)
        return seconds

    save_s()
    return by_turns([save_s, save_s, lambda: training.step_s(steps)], deadline, repeats)


# ------------------------------------------------------------------------------------------------ loading
# Loading a model through transformers with and without options that a trainer passes: seconds, and memory on the way.
#
# A small Llama is written once and read by turns in one process. What is drawn from the disk's cache is so for both.

SMALL_LLAMA: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
                         "vocab_size": 8192}
PEAK, STATUS, RESET = "VmHWM:", Path("/proc/self/status"), Path("/proc/self/clear_refs")
LOAD_METRICS = ("seconds", "memory")


def loading(context: Context, *, a: Mapping[str, Any], b: Mapping[str, Any], repeats: int = REPEATS,
            metric: str = "seconds") -> Measured:
    """Compare two sets of options of from_pretrained by their "seconds" or their peak "memory"."""
    one_of("metric", metric, LOAD_METRICS)
    rounds, model_bytes = apart(_load_rounds, context.folder, context.deadline, a, b, repeats, metric)
    names = (_options_name(a), _options_name(b))
    detail = {metric: medians(rounds, names), "model_bytes": model_bytes}
    if metric == "memory":
        return Measured(ratio(rounds, 1, 0), "times the memory", *names, detail)
    return Measured(ratio(rounds, 0, 1), "times as fast", *names, detail)


def _load_rounds(folder: Path, deadline: float, a: Mapping[str, Any], b: Mapping[str, Any], repeats: int,
                 metric: str) -> tuple[Rounds, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SMALL_LLAMA))
    model_bytes = sum(value.numel() * value.element_size() for value in model.parameters())
    model.save_pretrained(folder / "model")
    del model

    def load(options: Mapping[str, Any]) -> None:
        loaded = LlamaForCausalLM.from_pretrained(folder / "model", **options)
        sum(value.sum().item() for value in loaded.parameters())     # pages that are only mapped are not loaded yet

    take = _peak_bytes if metric == "memory" else lambda work: seconds_of(work, torch.device("cpu"))
    for options in (a, b):
        load(options)
    return by_turns([lambda o=o: take(lambda: load(o)) for o in (a, b)], deadline, repeats), model_bytes  # type: ignore[misc]


def _options_name(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items()) or "as it is"


def _peak_bytes(work: Callable[[], None]) -> float:
    """Return how far the resident memory of the process rose at most while `work` ran."""
    gc.collect()
    try:
        RESET.write_text("5")                # Linux, proc(5): the high-water mark becomes what is resident now
    except OSError:
        raise WrongUse(f"the peak of resident memory is read off {STATUS}, which only Linux has") from None
    before = _high_water_bytes()
    work()
    return max(1.0, _high_water_bytes() - before)


def _high_water_bytes() -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(PEAK))
    return 1024.0 * int(line.split()[1])
