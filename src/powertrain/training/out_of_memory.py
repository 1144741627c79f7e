"""Memory that runs out: how it is recognised, and how all processes of a run learn of it.

A forward or backward pass that runs out leaves weights and optimizer as they were; an optimizer's update does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from powertrain.training.ranks import Ranks

# how torch's allocators, oneDNN and C++ say on a CPU that there is no memory; on a GPU the error is torch.OutOfMemoryError
SAID = ("can't allocate memory", "not enough memory", "bad_alloc", "bad allocation", "cannot allocate memory",
        "could not create a memory")


class PassTooLarge(Exception):
    """A pass ran out of memory, in this process or in another one of the run; `said` is the allocator's message."""

    def __init__(self, said: str):
        super().__init__(f"a pass ran out of memory ({said})")
        self.said = said


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that an allocation failed."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, PassTooLarge)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in SAID)


def said_by(error: BaseException) -> str:
    """Return the error's message in one line, without the place in torch's sources."""
    if isinstance(error, PassTooLarge):
        return error.said
    return str(error).partition("\n")[0].rpartition("err == 0. ")[2].rstrip(". ") or type(error).__name__


@contextlib.contextmanager
def passes(ranks: Ranks) -> Iterator[None]:
    """Run this process's passes inside; where memory runs out in one process, raise PassTooLarge in all of them."""
    said = None
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = said_by(error)
    if (found := ranks.first(said)) is not None:
        raise PassTooLarge(found)
