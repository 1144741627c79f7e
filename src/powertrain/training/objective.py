"""What a run minimises: an objective says what an example is, its loss, what the loss is divided by, and its metrics.

The loop, checkpoints and techniques know no objective by name. To add one, write a class in a file of its own, name it in
objectives.py, and add a test. An objective may hold other models: one of preference pairs holds the frozen reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from powertrain.data.example import Example
from powertrain.recipe.tables import Setting
from powertrain.records import Batch, ModelFacts

if TYPE_CHECKING:
    from torch import Tensor

    from powertrain.models.kernels.losses import Loss
    from powertrain.models.model import Model
    from powertrain.training.ranks import Ranks

Kernels = Mapping[str, Any]                  # keywords of Model.hidden: attention and run_block, by the setup
Sums = dict[str, "Tensor"]                   # name -> () fp32, a sum over units; "loss" is minimised, the others are metrics


class Objective:
    """One thing to minimise. A subclass is a frozen dataclass; its fields are its settings in the recipe."""

    name: ClassVar[str]
    settings: ClassVar[Mapping[str, Setting]] = {}
    rows: ClassVar[str] = "answers"          # what it learns from: these, or a key of COMPARED in data/rows/schemas.py
    task: ClassVar[str | None] = None        # of the model, where it needs a head of its own; providers.py
    has_reference: ClassVar[bool] = False    # it compares the model with a frozen reference
    uses_loss: ClassVar[bool] = True         # False: `sums` computes its loss without the `loss` that it is given

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the names of the sums beside "loss"."""
        return ()

    @property
    def held_out_metrics(self) -> tuple[str, ...]:
        """Return the names of the sums that `held_out` gives beside "loss"."""
        return ()

    @property
    def has_terms(self) -> bool:
        """Return whether its loss adds terms to plain cross-entropy, as kernels/losses.py computes them."""
        return False

    @property
    def is_random(self) -> bool:
        """Return whether two passes over the same batch give different losses."""
        return False

    def why_not(self, model: ModelFacts) -> str | None:
        """Return why such a model cannot be trained by this objective, or None."""
        return None

    def for_model(self, model: Model) -> Objective:
        """Return the objective for a run that begins with this model: one with a reference model copies it here."""
        return self

    @property
    def held(self) -> Iterable[Tensor]:
        """Return the tensors that the objective holds from step to step, such as a reference's."""
        return ()

    def documents(self, example: Example) -> Sequence[Example]:
        """Return the documents of an example, which stay side by side in a batch."""
        return (example,)

    def totals(self, examples: Sequence[Example]) -> Any:
        """Return what `told` needs to know of all examples of a step."""
        return None

    def told(self, batch: Batch, examples: Sequence[Example], totals: Any) -> Batch:
        """Return the batch of these examples with what the objective needs to know of them besides their tokens."""
        return batch

    def settle(self, model: Model, batches: list[Batch], kernels: Kernels, loss: Loss, ranks: Ranks,
               spare: Callable[[], Batch]) -> list[Batch]:
        """Return this process's batches of a step, on the device, with what is computed over those of all processes before.

        A process with fewer batches than others may have to compute `spare`: see Ranks.abreast.
        """
        return batches

    def units(self, batch: Batch) -> int:
        """Return the units of a batch; the loss of a step is divided by all units of the step."""
        return batch.trained_tokens

    def sums(self, model: Model, batch: Batch, kernels: Kernels, loss: Loss) -> Sums:
        """Return the loss to minimise and the metrics, each summed over the batch's units."""
        raise NotImplementedError

    def held_out(self, model: Model, batch: Batch, kernels: Kernels, loss: Loss) -> Sums:
        """Return what evaluation reports of the batch: "loss" and perhaps metrics, each () fp32, summed over its units."""
        return {"loss": self.sums(model, batch, kernels, loss)["loss"]}
