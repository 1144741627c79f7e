"""This machine's GPU with the methods of fake_cuda.FakeCuda: the same runs go on it, and there they have numbers."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch


class RealCuda:
    """Notes where the host waits for the GPU, but within `answering`.

    torch sees most such waits and not all: https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html.
    """

    counts = 0                               # what is read within `answering` is not counted

    def __init__(self) -> None:
        self.capability = torch.cuda.get_device_capability()
        self.launched: list[str] = []        # empty: Triton's kernels are not counted here
        self.waited: list[str] = []          # lines of the package

    @contextlib.contextmanager
    def answering(self) -> Iterator[list[str]]:
        """Let the host read the device. Yield a list that stays empty."""
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield []
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def __enter__(self) -> RealCuda:
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        warnings.showwarning = self._note
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def _note(self, message: Any, *others: Any) -> None:
        if "synchronizing" in str(message):
            ours = [frame for frame in traceback.extract_stack() if "/src/powertrain/" in frame.filename]
            self.waited.append(f"{ours[-1].filename}:{ours[-1].lineno}" if ours else str(message))
