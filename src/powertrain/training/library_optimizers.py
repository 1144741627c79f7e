"""AdamW as bitsandbytes has it: states in 8 bits, or in memory that a GPU pages out when it runs short."""

from __future__ import annotations

import logging
from typing import Any

import torch

from powertrain.records import WrongUse


def library_adamw(name: str) -> type[torch.optim.Optimizer]:
    """The class `name` of bitsandbytes.optim, with its step counts as tensors: checkpoints hold tensors.

    Raises WrongUse if bitsandbytes is not installed.
    """
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)       # it warns of a missing kernel for inference, which is not used here
    try:
        import bitsandbytes.optim
    except ImportError as error:
        raise WrongUse(f"{name} comes from bitsandbytes, which cannot be imported here ({error}); pip install "
                       "bitsandbytes, or set the technique to off") from error
    finally:
        logger.setLevel(level)
    library: Any = getattr(bitsandbytes.optim, name)

    class Counted(library):  # type: ignore[misc]
        def update_step(self, group: dict[str, Any], parameter: torch.Tensor, *index: int) -> None:
            state = self.state[parameter]
            state["step"] = int(state["step"])
            super().update_step(group, parameter, *index)
            state["step"] = torch.tensor(state["step"])

    return Counted
