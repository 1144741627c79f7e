"""What a run works on, its data and its model: all that differs between training from scratch and from trained weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from powertrain.data.example import Example
from powertrain.recipe import Resolved
from powertrain.records import Batch, DataFacts, ModelFacts

if TYPE_CHECKING:
    from powertrain.models.model import Model


class TextTokenizer(Protocol):
    """What a run needs of a tokenizer: to write samples, and to save it beside the model."""

    @property
    def end_of_text(self) -> int | None: ...

    def encode(self, text: str) -> Any: ...

    def save(self, folder: Path) -> Any: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Material:
    resolved: Resolved                       # the recipe, its open values derived from model and data
    model: ModelFacts
    data: DataFacts
    training: Sequence[Example]              # one epoch, in the order of the store
    held_out: Sequence[Example]              # may be empty
    collate: Callable[[Sequence[Example]], Batch]        # the plain one, without any technique
    tokenizer: TextTokenizer
    build: Callable[[], Model]               # on the CPU, with what is trained in fp32; draws numbers: seed first
    tokens_per_byte: float | None = None     # of the held-out text; None where bytes are no measure
    gzip_bits_per_byte: float | None = None  # of the held-out text at gzip's level 9
    providers: Mapping[str, str | None] = field(default_factory=dict)    # of a pretrained model: why each cannot compute it
    as_prompt: Callable[[str], str] = str    # a user's words as the model is to read them
    said: tuple[str, ...] = ()               # what was found by looking at model and data
