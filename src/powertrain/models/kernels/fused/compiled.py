"""Parts of a block as compiled code that is right for any number of tokens: data of changing lengths compiles nothing anew.

CompiledPart compiles at its first call. torch.compile keeps that machine code for later processes too, but to find out which
code it needs it has to follow the function again, in every process. StoredPart compiles ahead instead, once on a machine:
later processes load a library and trace nothing. A library is named by what the code depends on: the source of the parts,
the block's configuration, the layout of what it is called with, the processor, its threads and torch's version. Beside it
lies what it gives and its sum: a file that is damaged, or half there, is not loaded but compiled anew.

Libraries are made by `python -m powertrain.models.kernels.fused.compiled`, which reads jobs from stdin: in processes of their
own, because torch's ahead-of-time compiler is loaded for it, and because several can work at a time.

Legend: T is the number of rows of the first argument, the one size that may differ from call to call.
"""

import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from powertrain.machine import NotOwn, check_own, compilers_at_once, one_at_a_time, own_folder
from powertrain.models.config import ModelConfig
from powertrain.models.kernels.build import processor
from powertrain.models.kernels.compiler_caches import own_compiler_caches
from powertrain.models.kernels.fused import parts as part_types
from powertrain.models.kernels.fused.parts import EnterWeights, LeaveWeights, Linear, Parts
from powertrain.records import WrongUse

MADE_BY = ("compiled.py", "in_place.py", "parts.py")      # sources that the code depends on
FEWEST_ROWS = 2                              # one row is a kind of its own to a compiler
MOST_ROWS = 2**24
LONGEST_S = 300.0                            # of compiling
ROWS = "T"
Loaded = Callable[[list[Tensor]], Any]       # machine code of one function


@dataclass(frozen=True)
class CompiledPart:
    """`function`, compiled at its first call for its weights' shapes and any number of rows."""

    function: Callable[..., Any]
    met: set[tuple[Any, ...]] = field(default_factory=set, init=False, compare=False)    # kinds of calls, each compiled once

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        own_compiler_caches()
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


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether torch holds compiled code for what it was asked to compile; it falls back to eager without a word."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_fn

    return bool(_debug_get_cache_entry_list(innermost_fn(function).__code__))


def _kind(argument: Any) -> Any:
    """Return what of an argument decides which code it needs: of a tensor only that it is one, of a tuple that of its parts."""
    if isinstance(argument, tuple):
        return tuple(map(_kind, argument))
    return Tensor if isinstance(argument, Tensor) else argument


def _mark_rows(argument: Any, rows: int) -> None:
    """Tell the compiler which sizes are the number of tokens."""
    if isinstance(argument, Tensor):
        if argument.dim() and len(argument) == rows:
            torch._dynamo.maybe_mark_dynamic(argument, 0)
    elif isinstance(argument, tuple) and not isinstance(argument, EnterWeights | LeaveWeights):
        for part in argument:
            _mark_rows(part, rows)


# ------------------------------------------------------------------------------------------------ calls as values


@dataclass(frozen=True)
class Call:
    """What the code of a function depends on in a call of it."""

    structure: str                           # JSON of the arguments, each tensor as its number
    layout: tuple[tuple[Any, ...], ...]      # of each tensor: its dtype, its sizes, its strides


def describe(arguments: tuple[Any, ...], rows: int) -> tuple[Call, list[Tensor]] | None:
    """Return a call's kind and its tensors; None for fewer than FEWEST_ROWS, another device, changing strides, or 8 bits."""
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
    """Return a nest of named tuples as JSON values, with each tensor as its number."""
    if isinstance(value, Tensor):
        count[0] += 1
        return count[0] - 1
    if isinstance(value, tuple):
        return {"of": type(value).__name__, "parts": [structure_of(part, count) for part in value]}
    return {"dtype": str(value).removeprefix("torch.")} if isinstance(value, torch.dtype) else value


def built(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the nest that `structure_of` described, with `tensors` in their places."""
    if isinstance(structure, bool) or structure is None:
        return structure
    if isinstance(structure, int):
        return tensors[structure]
    if "dtype" in structure:
        return getattr(torch, structure["dtype"])
    parts = [built(part, tensors) for part in structure["parts"]]
    return tuple(parts) if structure["of"] == "tuple" else getattr(part_types, structure["of"])(*parts)


# ------------------------------------------------------------------------------------------------ libraries


@dataclass(frozen=True)
class StoredPart(CompiledPart):
    """A method of Parts that is loaded from `folder`, where an earlier process has compiled it for calls of this kind.

    Until `settle`, what is not there is noted and computed by the plain function; afterwards a new kind is compiled as by
    CompiledPart.
    """

    folder: Path = Path()
    kept: dict[Call, Loaded | None] = field(default_factory=dict, init=False, compare=False)
    wanted: dict[Call, dict[str, Any]] = field(default_factory=dict, init=False, compare=False)       # the jobs
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
        self.kept[call] = load(Path(job["path"]))
        if self.kept[call] is None and not self.settled:
            self.wanted[call] = job
        return self.kept[call]


def settle(functions: Iterable[Any], *, ahead: bool) -> bool:
    """Compile what StoredParts among the functions have noted into libraries, if `ahead`; else let the next call compile it.

    Return whether there was anything: who ran them runs them again.
    """
    parts = [part for part in functions if isinstance(part, StoredPart)]
    jobs = [job for part in parts for job in part.wanted.values()]
    if jobs and ahead:
        with one_at_a_time(Path(jobs[0]["path"]).parent):        # another process of the run may have compiled the same
            left = [job for job in jobs if load(Path(job["path"])) is None]
            make(left, processes=min(len(left), compilers_at_once()))
    for part in parts:
        part.kept.update({call: load(Path(job["path"])) for call, job in part.wanted.items() if ahead})
        part.wanted.clear()
        part.settled.append(True)
    return bool(jobs)


def tokens_to_divide(width: int) -> int:
    """Return from how many tokens of the first call on compiled loops are divided among threads: later calls run the same code.

    Source: decide_parallel_depth of Inductor's C++ back end, whose least piece of a thread is cpp.min_chunk_size elements.
    """
    from torch._inductor import config

    return -(-2 * torch.get_num_threads() * config.cpp.min_chunk_size // width)


def job_for(config: ModelConfig, function: str, call: Call, rows: int, folder: Path) -> dict[str, Any]:
    """Return a job, as JSON, to compile a method of Parts for a kind of call. By `rows` the compiler judges what to divide."""
    config = dataclasses.replace(config, rotary_scaling=None)        # tables are arguments
    told = "\n".join((_sources(), torch.__version__, str(torch.get_num_threads()), processor(), repr(config), function,
                      call.structure, repr(call.layout)))
    path = folder / f"{function}-{hashlib.sha256(told.encode()).hexdigest()[:24]}.so"
    layout = [[str(dtype).removeprefix("torch."), sizes, strides] for dtype, sizes, strides in call.layout]
    return {"config": dataclasses.asdict(config), "function": function, "structure": call.structure, "layout": layout,
            "rows": rows, "path": str(path)}


@functools.cache
def _sources() -> str:
    return "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in MADE_BY)


def load(path: Path) -> Loaded | None:
    """Return the function that an earlier process has compiled; None where the library is missing, damaged or does not load.

    Raises WrongUse where another user may have made it.
    """
    if not path.is_file():
        return None
    try:
        own_folder(path.parent)
        for file in (path, path.with_suffix(".json")):
            check_own(file)
        told = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if hashlib.sha256(path.read_bytes()).hexdigest() != told["sha256"]:
            return None
        gives = told["gives"]                # the structure of its result
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
    except NotOwn as error:
        raise WrongUse(f"{error}; name a cache folder of your own with POWERTRAIN_CACHE, or compile nothing ahead with "
                       "techniques.fused_blocks=off", cure=("techniques.fused_blocks=off",)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return None
    return lambda tensors: built(gives, runner.run(tensors))


def make(jobs: Sequence[Mapping[str, Any]], processes: int) -> None:
    """Compile the jobs in processes of their own; `load` tells which of them came to something."""
    started = []
    for share in filter(None, (jobs[i::processes] for i in range(processes))):
        child = subprocess.Popen([sys.executable, "-m", "powertrain.models.kernels.fused.compiled"], stdin=subprocess.PIPE,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
        started.append((child, json.dumps({"threads": torch.get_num_threads(), "jobs": share})))
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


# ------------------------------------------------------------------------------------------------ making a library


class Flat(nn.Module):
    """A function of tensors alone, as the compiler wants it."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = getattr(Parts(ModelConfig(**job["config"])), job["function"])
        self.structure = json.loads(job["structure"])

    def call(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the function gives, in its own structure."""
        return self.function(*built(self.structure, tensors))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(value for value in tree_leaves(self.call(tensors)) if isinstance(value, Tensor))


def compile_one(job: Mapping[str, Any]) -> None:
    """Write the library, then the file beside it with the structure of its result and the sum of its bytes.

    Which vector instructions there are is taken from the processor's word: to see each compiled and loaded takes as long as
    a function does, and a compiler that does not know them ends with no library, which `load` sees.
    """
    import torch._inductor

    flat, rows, path = Flat(job), job["rows"], Path(job["path"])
    tensors = tuple(torch.empty_strided([rows if size == ROWS else size for size in sizes], strides,
                                        dtype=getattr(torch, dtype)).zero_() for dtype, sizes, strides in job["layout"])
    size = torch.export.Dim("T", min=FEWEST_ROWS, max=MOST_ROWS)
    shapes = tuple({0: size} if sizes[:1] == [ROWS] else None for _, sizes, _ in job["layout"])
    own_folder(path.parent)
    own_compiler_caches()
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        gives = structure_of(flat.call(tensors), [0])
        program = torch.export.export(flat, tensors, dynamic_shapes=(shapes,), strict=False)
        made = Path(torch._inductor.aot_compile(program.module(), tensors, options={  # type: ignore[arg-type]
            "aot_inductor.output_path": str(Path(folder) / path.name), "aot_inductor.compile_wrapper_opt_level": "O0",
            "aot_inductor.precompile_headers": False, "cpp.vec_isa_ok": True}))
        aside = Path(folder) / "told.json"
        told = {"sha256": hashlib.sha256(made.read_bytes()).hexdigest(), "gives": gives}
        aside.write_text(json.dumps(told), encoding="utf-8")
        os.replace(made, path)
        os.replace(aside, path.with_suffix(".json"))


if __name__ == "__main__":
    work = json.load(sys.stdin)
    torch.set_num_threads(work["threads"])
    for one in work["jobs"]:
        compile_one(one)
