"""A real checkpoint, compressed: how many bytes are left, and how long writing it then takes."""

from __future__ import annotations

import gzip
import importlib
import lzma
import os
import shutil
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
    by_turns,
    exactly,
    medians,
    one_of,
    ratio,
    seconds_of,
)
from powertrain.claims.probes.process import apart
from powertrain.claims.probes.training import open_training
from powertrain.training.checkpoint import save_checkpoint

Compress = Callable[[bytes], bytes]
METRICS = ("saved_share", "speed")


def measure(context: Context, *, words: Sequence[str], a: str = "none", b: str = "gzip", metric: str = "saved_share",
            steps: int = 20, most_bytes: int = 8 << 20, repeats: int = REPEATS) -> Measured:
    """metric "saved_share": of arm a's bytes, what arm b saves; "speed": arm b's writing over arm a's, times as fast.

    Methods: none, gzip, zlib (its fastest level), lzma, and zstd where a library for it is installed. A larger checkpoint is
    cut to `most_bytes`, weights and moments alike.
    """
    one_of("metric", metric, METRICS)
    known = methods()
    for name, method in (("a", a), ("b", b)):
        one_of(name, method, tuple(known))
    whole, sizes, rounds = apart(_rounds, words, context.cache, context.deadline, context.folder, (a, b), steps, most_bytes,
                                 repeats)
    rest = dict(zip((a, b), sizes, strict=True))
    detail = {"checkpoint_bytes": whole, "bytes": rest, "seconds": medians(rounds, (a, b)),
              "times_slower": vars(ratio(rounds, 1, 0)), "saved_share": 1 - rest[b] / rest[a],
              "bytes_per_s": rest[a] / medians(rounds, (a, b))[b]}
    if metric == "speed":
        return Measured(ratio(rounds, 0, 1), "times as fast", a, b, detail)
    return Measured(exactly(1 - rest[b] / rest[a]), "of the bytes", a, b, detail)


def methods() -> Mapping[str, Compress]:
    """What can be had here."""
    found: dict[str, Compress] = {"none": bytes, "gzip": partial(gzip.compress, compresslevel=6),
                                  "zlib": partial(zlib.compress, level=1), "lzma": partial(lzma.compress, preset=0)}
    for module in ("compression.zstd", "zstandard"):     # Python's own from 3.14 on, and the library
        try:
            library: Any = importlib.import_module(module)
        except ImportError:
            continue
        found.setdefault("zstd", library.compress)
    return found


def _rounds(words: Sequence[str], cache: Path, deadline: float, folder: Path, names: tuple[str, str], steps: int,
            most_bytes: int, repeats: int) -> tuple[int, list[int], Rounds]:
    """(bytes of the checkpoint, bytes left by each method, seconds of each)."""
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
    """The content of its two large files."""
    saved = save_checkpoint(folder, state)
    content = [(saved.folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]
    shutil.rmtree(folder)
    return content


def _cut(content: bytes, share: float) -> bytes:
    return content if share >= 1 else content[:round(share * len(content))]
