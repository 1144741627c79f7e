"""Parts of a block as compiled code that is right for any number of tokens: data of changing lengths compiles nothing anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from powertrain.models.fused.values import EnterWeights, LeaveWeights


@dataclass(frozen=True)
class CompiledPart:
    """`function`, compiled at its first call for its weights' shapes and any number of rows."""

    function: Callable[..., Any]
    compiled: Callable[..., Any] = field(init=False, compare=False)
    met: set[tuple[Any, ...]] = field(default_factory=set, init=False, compare=False)    # kinds of calls, each compiled once

    def __post_init__(self) -> None:
        object.__setattr__(self, "compiled", torch.compile(self.function, dynamic=None))

    def __call__(self, first: Tensor, *rest: Any) -> Any:
        kind = (first.requires_grad, first.dtype, torch.is_inference_mode_enabled(), *map(_kind, rest))
        if kind not in self.met:
            for argument in (first, *rest):
                _mark_rows(argument, len(first))
            self.met.add(kind)
        return self.compiled(first, *rest)

    @property
    def is_compiled(self) -> bool:
        return is_compiled(self.compiled)


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
