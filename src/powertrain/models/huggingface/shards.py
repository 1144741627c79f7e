"""safetensors files: written whole, and read tensor by tensor without filling memory, several files as one.

The files are mapped: a tensor that is read is a view of its file, and the pages that were looked at stay in memory as
long as the mapping does. So the mappings are dropped every few megabytes; opening a file again takes less than a
millisecond, and a tensor that is still in use keeps its own mapping.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from powertrain.records import WrongUse

RELEASE_BYTES = 8 << 20      # read from the mappings before they are dropped: little beside any model worth the care
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}    # by safetensors' names


class Shards:
    """The tensors of some files by their names. Raises WrongUse for files that are missing or damaged."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.opened: dict[Path, Any] = {}
        self.read_bytes = 0
        self.files = {name: file for file in files for name in self.open(file).keys()}  # noqa: SIM118

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def open(self, file: Path) -> Any:
        """The file, mapped."""
        if file not in self.opened:
            if not file.exists():
                raise WrongUse(f"there is no {file}, which the folder's index names; the download may be incomplete")
            try:
                self.opened[file] = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise WrongUse(f"{file} is damaged ({error}); copy or download it again") from error
        return self.opened[file]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.open(self.files[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Raises WrongUse for what is not a floating-point number of training, such as 8-bit ones."""
        stored = self.open(self.files[name]).get_slice(name).get_dtype()
        if stored not in DTYPES:
            raise WrongUse(f"{name} is stored as {stored}, and weights are read as {', '.join(DTYPES)} only; give the "
                           f"unquantised model that it was made from")
        return DTYPES[stored]

    def read(self, name: str) -> Tensor:
        """A view of the file: to be looked at, or copied, at once."""
        tensor_bytes = math.prod(self.shape(name)) * self.dtype(name).itemsize
        if self.read_bytes + tensor_bytes > RELEASE_BYTES:
            self.opened, self.read_bytes = {}, 0
        self.read_bytes += tensor_bytes
        tensor: Tensor = self.open(self.files[name]).get_tensor(name)
        return tensor


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """safetensors' file of `tensors`. Raises OSError where the disk refuses."""
    with disk_errors(path):
        save_file(tensors, path, metadata=metadata)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raises OSError where the disk refuses; safetensors has its own error for that."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code), str(path)) from None
