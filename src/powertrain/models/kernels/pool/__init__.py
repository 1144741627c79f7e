"""A pool of the memory that torch takes on a CPU: kernel.cpp says how it works. A process installs it once, and for good."""

from powertrain.models.kernels import build

_installed = False


def install() -> None:
    """Let torch take its memory from the pool from now on. Raises build.CannotBuild."""
    global _installed
    build.load(build.POOL).install()
    _installed = True


def is_installed() -> bool:
    """Return whether torch takes its memory from the pool."""
    return _installed and bool(build.load(build.POOL).is_installed())


def empty() -> None:
    """Give back what the pool keeps and no tensor holds."""
    if _installed:
        build.load(build.POOL).empty()
