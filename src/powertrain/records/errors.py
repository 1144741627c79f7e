"""Errors that a user can mend. Each is one sentence for people, and typed fields for code.

Code never reads the sentence. An error that another part must recognise is a subclass with its own fields, and makes its
sentence from them; `kind` is then the name of that class in snake case.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar


class UserError(ValueError):
    """Something the user can mend. The message says what was asked, the numbers, and the cure; no traceback.

    `keys` are the recipe keys it is about, `cure` the recipe words that would mend it ("techniques.packing=off").
    """

    exit_code: ClassVar[int] = 2             # of the command that ends by it

    def __init__(self, message: str, *, keys: tuple[str, ...] = (), cure: tuple[str, ...] = ()):
        super().__init__(message)
        self.keys, self.cure = keys, cure

    @property
    def kind(self) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    def fields(self) -> dict[str, Any]:
        """Return what `--json` and the `end` event of a run carry beside the sentence."""
        return {"kind": self.kind, **{name: value for name, value in vars(self).items() if not name.startswith("_") and value}}


class WrongUse(UserError):
    """The command, the recipe or the data cannot be used as given; nothing was started."""


class RunFailed(UserError):
    """The run had begun and cannot go on (disk, memory, loss not finite)."""

    exit_code = 1


class NotDurable(RunFailed):
    """The model is trained to the end, and something that was promised is not on the disk."""

    exit_code = 3


class UnknownFact(LookupError):
    """A fact that the arithmetic needs is not known for this machine."""
