"""Compiles kernels in C++ for this machine, each once; the libraries and their sums are kept in the user's cache folder."""

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from powertrain.machine import COMPILERS, NotOwn, check_own, cpp_compiler, one_at_a_time, own_folder
from powertrain.records.json_files import replace_file

HERE = Path(__file__).parent
RAGGED, DECODE, ROWS, BLOCK, POOL = (HERE / name / "kernel.cpp" for name in ("ragged", "decode", "rows", "block", "pool"))
SHARED = tuple(HERE / name for name in ("numbers.h", "ragged/attention.h", "rows/rows.h", "block/block.h"))
X86 = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
WHOLE_VECTORS = "--param=vect-max-peeling-for-alignment=0"     # no single numbers before the first aligned one
FLAGS = ("-std=c++20", "-O3", "-march=native", *X86, WHOLE_VECTORS, "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
         "-fno-strict-aliasing", "-shared", "-fPIC")
CPU = Path("/proc/cpuinfo")


class CannotBuild(Exception):
    """The message says why, in one sentence."""


@functools.cache
def load(source: Path) -> ctypes.CDLL:
    """Return a kernel as a library. Raise CannotBuild where there is no compiler, it fails, or what it made does not load."""
    path = _library(source)
    try:
        own_folder(path.parent)
        with one_at_a_time(path.parent, f".{path.stem}.lock"):     # processes of one run come here at the same time
            if not path.exists() or not _is_whole(path):
                _compile(source, path)
        check_own(path)
        return ctypes.CDLL(str(path))
    except NotOwn as error:
        raise CannotBuild(f"{error}; remove it, or have it given to you") from None
    except OSError as error:
        raise CannotBuild(f"the compiled kernel does not load ({error}); remove {path}, so that it is compiled again") from None


def _is_whole(path: Path) -> bool:
    """Return whether the library is the one that was compiled: a power failure or a bad disk may have changed it."""
    check_own(path)
    with suppress(FileNotFoundError):
        return path.with_suffix(".sha256").read_bytes() == _sum(path)
    return False


def _sum(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def is_built(source: Path) -> bool:
    """Return whether an earlier process has compiled the kernel."""
    return _library(source).exists()


@functools.cache
def processor() -> str:
    """Return what machine code depends on: the architecture, then the instructions that there are."""
    flags = next((line for line in CPU.read_text(encoding="utf-8").splitlines() if line.startswith(("flags", "Features"))),
                 "") if CPU.exists() else platform.processor()
    return f"{platform.machine()}\n{flags}"


@functools.cache
def _library(source: Path) -> Path:
    """Return the library's path, named by all it depends on: a home directory may be shared by machines of different kinds."""
    texts = (file.read_text(encoding="utf-8") for file in (source, *SHARED))
    told = "\n".join((*texts, importlib.metadata.version("torch"), processor(), *FLAGS))
    name = f"{source.parent.name}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    return Path.home() / ".cache" / "powertrain" / "kernels" / name


def _compile(source: Path, path: Path) -> None:
    compiler, found = cpp_compiler(), importlib.util.find_spec("torch")      # which does not load torch
    torch = Path(found.origin).parent  # type: ignore[union-attr, arg-type]
    if compiler is None:
        raise CannotBuild(f"none of {', '.join(COMPILERS)} is on the PATH")
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            told = subprocess.run([compiler, str(source), *FLAGS, f"-I{HERE}", f"-I{torch / 'include'}", "-o", str(made),
                                   f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"], capture_output=True, text=True, check=False)
            if told.returncode:
                because = next((line for line in told.stderr.splitlines() if "error" in line), "it said nothing")
                raise CannotBuild(f"{compiler} failed: {because}")
            made_sum = _sum(made)
            os.replace(made, path)           # processes that compile at the same time both leave a whole file
            replace_file(path.with_suffix(".sha256"), made_sum)
    except OSError as error:
        raise CannotBuild(f"{path.parent} cannot be written: {error}") from None
