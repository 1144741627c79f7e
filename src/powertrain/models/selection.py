"""Which weights of a model are trained, and how fast each learns: patterns over their names. No torch.

Names are those of models/decoder.py, as `powertrain facts` lists them, or Hugging Face's names of the same weights. A pattern
is a glob: * stands for any text, dots too. Where q, k and v (or gate and up) are one weight here, a pattern has to match all.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from powertrain.records import WrongUse
from powertrain.records.errors import did_you_mean

if TYPE_CHECKING:
    from powertrain.models.config import ModelConfig

BLOCK = re.compile(r"blocks\.(\d+)\.")
EMBEDDINGS = ("embedding.", "position_embedding.")
BRIDGED = "library."                         # in front of the names of a model behind the bridge
SHOWN = 12                                   # names in an error
Names = Mapping[str, tuple[str, ...]]        # name -> other names of the same weight, or of its parts


@dataclass(frozen=True)
class Selection:
    """The recipe's `weights`: what is frozen, and the factor of each weight's learning rate."""

    freeze: tuple[str, ...] = ()             # patterns
    learning_rates: Mapping[str, float] = field(default_factory=dict)    # pattern -> factor; the last one that matches holds
    layer_decay: float = 1.0                 # a block's factor over that of the block above it

    @property
    def is_plain(self) -> bool:
        """Return whether all weights are trained alike."""
        return not self.freeze and not self.learning_rates and self.layer_decay == 1.0

    def frozen(self, names: Names) -> tuple[str, ...]:
        """Return which of the weights are frozen. Raises WrongUse for a pattern that matches none, and where all are."""
        found = {name for pattern in self.freeze for name in _matched(pattern, names, "weights.freeze")}
        if found and found == set(names):
            raise WrongUse(f"weights.freeze={list(self.freeze)} freezes all {len(names):,} weights, so nothing would be "
                           "trained; name fewer", keys=("weights.freeze",))
        return tuple(name for name in names if name in found)

    def factors(self, names: Names, layers: int) -> dict[str, float]:
        """Return the factor of each weight's learning rate. `names`: of the weights that are trained.

        The head and the last norm have 1, the block below them the decay, and so on down to the embeddings.
        Raises WrongUse for a pattern that matches none of them.
        """
        if self.layer_decay != 1.0 and not layers:
            raise WrongUse(f"weights.layer_decay={self.layer_decay:g} goes by the block that a weight is in, and another "
                           "library computes this model; name its weights with weights.learning_rates",
                           keys=("weights.layer_decay",), cure=("weights.layer_decay=1",))
        found = {name: self.layer_decay ** _depth(name, layers) if self.layer_decay != 1.0 else 1.0 for name in names}
        own: dict[str, float] = {}
        for pattern, factor in self.learning_rates.items():
            own |= dict.fromkeys(_matched(pattern, names, "weights.learning_rates"), factor)
        return {name: factor * own.get(name, 1.0) for name, factor in found.items()}


ALIKE = Selection()                          # all weights are trained, all alike


def other_names(config: "ModelConfig", names: Iterable[str]) -> Names:
    """Return the decoder's weights with Hugging Face's names of each, or of its parts."""
    from powertrain.models.huggingface.families import map_weights

    theirs = {row.ours: row.theirs for row in map_weights(config)}
    return {name: theirs.get(name, ()) for name in names}


def all_names(shapes: Mapping[str, tuple[int, ...]], layers: int, adapted: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every weight of a decoder, from those outside the blocks and those of one block."""
    found: dict[str, tuple[int, ...]] = {name: shape for name, shape in shapes.items() if not name.startswith("blocks.")}
    for layer in range(layers):
        found |= {BLOCK.sub(f"blocks.{layer}.", name): shape for name, shape in shapes.items() if name.startswith("blocks.")
                  and (".adapters." not in name or layer in adapted)}
    return found


def selected(selection: Selection, sizes: Mapping[str, int], names: Names, layers: int
             ) -> tuple[tuple[str, ...], tuple[tuple[float, int], ...]]:
    """Return the weights that are frozen, and factors of the learning rate with how many numbers have each.

    `sizes` and `names` are of the weights that may be trained.
    """
    if selection.is_plain:
        return (), ()
    frozen = selection.frozen(names)
    counts: dict[float, int] = {}
    for name, factor in selection.factors({name: names[name] for name in names if name not in frozen}, layers).items():
        counts[factor] = counts.get(factor, 0) + sizes[name]
    return frozen, tuple(sorted(counts.items(), reverse=True)) if set(counts) != {1.0} else ()


def _depth(name: str, layers: int) -> int:
    """Return how many blocks lie above a weight, itself included; 0 for those after the last block."""
    if (block := BLOCK.match(name)) is not None:
        return layers - int(block[1])
    return layers + 1 if name.startswith(EMBEDDINGS) else 0


def _matched(pattern: str, names: Names, key: str) -> list[str]:
    """Return the weights that a pattern matches. Raises WrongUse where there are none, and for a part of a weight."""
    found, parts = [], dict[str, str]()
    for name, others in names.items():
        hits = [other for other in others if fnmatchcase(other, pattern)]
        if fnmatchcase(name, pattern) or (others and len(hits) == len(others)):
            found.append(name)
        elif hits:
            parts[hits[0]] = name
    if parts:
        part, name = next(iter(parts.items()))
        rest = ", ".join(other for other in names[name] if other != part)
        raise WrongUse(f"{key} has {pattern!r}, which matches {part}, and that is a part of the weight {name} together with "
                       f"{rest}; name all of them, or {name}", keys=(key,))
    if not found:
        leaves = sorted({BLOCK.sub("blocks.*.", name) for name in names})
        shown = ", ".join(leaves[:SHOWN]) + (f" and {len(leaves) - SHOWN} more" if len(leaves) > SHOWN else "")
        raise WrongUse(f"{key} has {pattern!r}, which matches no trained weight; their names are {shown}"
                       f"{did_you_mean(pattern, leaves, likeness=0.6)}", keys=(key,))
    return found
