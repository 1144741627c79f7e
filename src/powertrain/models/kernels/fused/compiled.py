"""Parts of a block as compiled code that is right for any number of tokens: data of changing lengths compiles nothing anew."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powertrain.machine import compilers_at_once
from powertrain.models.kernels.fused.library import Call, Job, Loaded, describe, job_for, load, make
from powertrain.models.kernels.fused.values import EnterWeights, LeaveWeights


@dataclass(frozen=True)
class CompiledPart:
    """`function`, compiled at its first call for its weights' shapes and any number of rows."""

    function: Callable[..., Any]
    met: set[tuple[Any, ...]] = field(default_factory=set, init=False, compare=False)    # kinds of calls, each compiled once

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        return torch.compile(self.function, dynamic=None)    # not before it is needed: torch imports its compiler for it

    def __call__(self, first: Tensor, *rest: Any) -> Any:
        kind = (first.requires_grad, first.dtype, torch.is_inference_mode_enabled(), *map(_kind, rest))
        if kind not in self.met:
            for argument in (first, *rest):
                _mark_rows(argument, len(first))
            self.met.add(kind)
        return self.compiled(first, *rest)

    @property
    def is_compiled(self) -> bool:
        return "compiled" in self.__dict__ and is_compiled(self.compiled)


@dataclass(frozen=True)
class StoredPart(CompiledPart):
    """A method of Parts that is loaded from `folder`, where an earlier process has compiled it for calls of this kind.

    Until `settle`, what is not there is noted and computed by the plain function; afterwards a new kind is compiled as by
    CompiledPart.
    """

    folder: Path = Path()
    kept: dict[Call, Loaded | None] = field(default_factory=dict, init=False, compare=False)
    wanted: dict[Call, Job] = field(default_factory=dict, init=False, compare=False)
    settled: list[bool] = field(default_factory=list, init=False, compare=False)

    def __call__(self, first: Tensor, *rest: Any) -> Any:
        described = describe((first, *rest), len(first))
        if described is None:
            return super().__call__(first, *rest)
        call, tensors = described
        loaded = self.kept[call] if call in self.kept else self._look_for(call, len(first))
        if loaded is not None:
            return loaded(tensors)
        return super().__call__(first, *rest) if self.settled else self.function(first, *rest)

    @property
    def is_compiled(self) -> bool:
        return any(loaded is not None for loaded in self.kept.values()) or super().is_compiled

    def _look_for(self, call: Call, rows: int) -> Loaded | None:
        parts, name = self.function.__self__, self.function.__name__  # type: ignore[attr-defined]
        job = job_for(parts.config, name, call, rows, self.folder)
        self.kept[call] = load(job.path)
        if self.kept[call] is None and not self.settled:
            self.wanted[call] = job
        return self.kept[call]


def settle(functions: Iterable[Any], *, ahead: bool) -> bool:
    """What StoredParts among the functions have noted is compiled `ahead` into libraries, or at the next call for this run.

    Whether there was anything: who ran them runs them again.
    """
    parts = [part for part in functions if isinstance(part, StoredPart)]
    jobs = [job for part in parts for job in part.wanted.values()]
    if jobs and ahead:
        make(jobs, processes=min(len(jobs), compilers_at_once()))
    for part in parts:
        part.kept.update({call: load(job.path) for call, job in part.wanted.items() if ahead})
        part.wanted.clear()
        part.settled.append(True)
    return bool(jobs)


def tokens_to_divide(width: int) -> int:
    """Tokens of the first call from which on the compiled loops are divided among the threads: later calls run the same code.

    Source: decide_parallel_depth of Inductor's C++ back end, whose least piece of a thread is cpp.min_chunk_size elements.
    """
    from torch._inductor import config

    return -(-2 * torch.get_num_threads() * config.cpp.min_chunk_size // width)


def is_compiled(function: Callable[..., Any]) -> bool:
    """Whether torch holds compiled code for what it was asked to compile; it falls back to eager without a word."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_fn

    return bool(_debug_get_cache_entry_list(innermost_fn(function).__code__))


def _kind(argument: Any) -> Any:
    """What of an argument makes for other code."""
    if isinstance(argument, tuple):
        return tuple(map(_kind, argument))
    return Tensor if isinstance(argument, Tensor) else argument


def _mark_rows(argument: Any, rows: int) -> None:
    """Tells the compiler which sizes are the number of tokens."""
    if isinstance(argument, Tensor):
        if argument.dim() and len(argument) == rows:
            torch._dynamo.maybe_mark_dynamic(argument, 0)
    elif isinstance(argument, tuple) and not isinstance(argument, EnterWeights | LeaveWeights):
        for part in argument:
            _mark_rows(part, rows)
