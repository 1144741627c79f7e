"""Parts of a block compiled ahead for any number of tokens, once on a machine: later processes load them and trace nothing.

torch.compile keeps its machine code too, but to find out which code it needs it has to follow the function again, in
every process. A library here is named by what the code depends on: the source of the parts, the block's configuration, the
layout of what it is called with, the processor, its threads and torch's version. Beside it lies what it gives and its sum:
a file that is damaged, or half there, is not loaded but compiled anew.

Legend: T is the number of rows of the first argument, the one size that may differ from call to call.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powertrain.models.config import ModelConfig
from powertrain.models.kernels.fused import values
from powertrain.models.kernels.fused.values import EnterWeights, LeaveWeights, Linear
from powertrain.models.kernels.ragged.build import processor

MADE_BY = ("library.py", "making.py", "parts.py", "values.py")   # sources that the code depends on
FEWEST_ROWS = 2                              # one row is a kind of its own to a compiler
LONGEST_S = 300.0                            # of compiling
ROWS = "T"
Layout = tuple[tuple[Any, ...], ...]         # of each tensor: its dtype, its sizes, its strides


@dataclass(frozen=True)
class Call:
    """What the code of a function depends on in a call of it."""

    structure: str                           # JSON of the arguments, each tensor as its number
    layout: Layout


@dataclass(frozen=True)
class Job:
    """One function to be compiled, for one kind of call."""

    config: ModelConfig
    function: str                            # a method of Parts
    call: Call
    rows: int                                # for which the compiler judges what to divide among threads
    path: Path


@dataclass(frozen=True)
class Loaded:
    """Machine code of one function."""

    run: Callable[[list[Tensor]], list[Tensor]]
    gives: Any                               # the structure of its result

    def __call__(self, tensors: list[Tensor]) -> Any:
        return built(self.gives, self.run(tensors))


# ------------------------------------------------------------------------------------------------ calls as values


def describe(arguments: tuple[Any, ...], rows: int) -> tuple[Call, list[Tensor]] | None:
    """The kind of a call, and its tensors. None for one that has no fixed layout, or whose products are not plain ones."""
    tensors: list[Tensor] = []
    layout: list[tuple[Any, ...]] = []
    if rows < FEWEST_ROWS or not _describe(arguments, rows, tensors, layout):
        return None
    return Call(json.dumps(structure_of(arguments, [0])), tuple(layout)), tensors


def _describe(argument: Any, rows: int | None, tensors: list[Tensor], layout: list[tuple[Any, ...]]) -> bool:
    if isinstance(argument, Tensor):
        sizes: tuple[Any, ...] = tuple(argument.shape)
        strides = argument.stride()
        if argument.device.type != "cpu":
            return False
        if sizes and sizes[0] == rows:
            if strides[0] < max(strides):
                return False                 # its other strides change with the number of rows
            sizes = (ROWS, *sizes[1:])
        tensors.append(argument)
        layout.append((argument.dtype, sizes, strides))
        return True
    if isinstance(argument, tuple):
        if isinstance(argument, Linear) and argument.scales is not None:
            return False
        of = None if isinstance(argument, EnterWeights | LeaveWeights) else rows
        return all(_describe(part, of, tensors, layout) for part in argument)
    return True


def structure_of(value: Any, count: list[int]) -> Any:
    """A nest of named tuples as JSON, with each tensor as its number."""
    if isinstance(value, Tensor):
        count[0] += 1
        return count[0] - 1
    if isinstance(value, tuple):
        return {"of": type(value).__name__, "parts": [structure_of(part, count) for part in value]}
    return {"dtype": str(value).removeprefix("torch.")} if isinstance(value, torch.dtype) else value


def built(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """The nest again."""
    if isinstance(structure, bool) or structure is None:
        return structure
    if isinstance(structure, int):
        return tensors[structure]
    if "dtype" in structure:
        return getattr(torch, structure["dtype"])
    parts = [built(part, tensors) for part in structure["parts"]]
    return tuple(parts) if structure["of"] == "tuple" else getattr(values, structure["of"])(*parts)


# ------------------------------------------------------------------------------------------------ files


def job_for(config: ModelConfig, function: str, call: Call, rows: int, folder: Path) -> Job:
    config = dataclasses.replace(config, rotary_scaling=None)        # tables are arguments
    told = "\n".join((_sources(), torch.__version__, str(torch.get_num_threads()), processor(), repr(config), function,
                      call.structure, repr(call.layout)))
    return Job(config, function, call, rows, folder / f"{function}-{hashlib.sha256(told.encode()).hexdigest()[:24]}.so")


@functools.cache
def _sources() -> str:
    return "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in MADE_BY)


def load(path: Path) -> Loaded | None:
    """What an earlier process has compiled; None where there is nothing whole."""
    try:
        told = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if hashlib.sha256(path.read_bytes()).hexdigest() != told["sha256"]:
            return None
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return None
    return Loaded(runner.run, told["gives"])


def make(jobs: Sequence[Job], processes: int) -> None:
    """Compiles, in processes of their own; which of them came to something, `load` tells."""
    started = []
    for share in filter(None, (jobs[i::processes] for i in range(processes))):
        told = json.dumps({"threads": torch.get_num_threads(), "jobs": [_to_plain(job) for job in share]})
        child = subprocess.Popen([sys.executable, "-m", "powertrain.models.kernels.fused.making"], stdin=subprocess.PIPE,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
        started.append((child, told))
    for child, told in started:
        assert child.stdin is not None
        try:
            child.stdin.write(told)
            child.stdin.close()
        except OSError:
            continue                         # it has ended already
    for child, _ in started:
        try:
            child.wait(LONGEST_S)
        except BaseException as error:
            for other, _ in started:
                other.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise


def _to_plain(job: Job) -> dict[str, Any]:
    layout = [[str(dtype).removeprefix("torch."), sizes, strides] for dtype, sizes, strides in job.call.layout]
    return {"config": dataclasses.asdict(job.config), "function": job.function, "structure": job.call.structure,
            "layout": layout, "rows": job.rows, "path": str(job.path)}
