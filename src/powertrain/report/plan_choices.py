"""What the recipe chooses besides model, data and length, as rows of a plan: frozen weights, rates, the average, the end."""

from collections.abc import Mapping
from typing import Any

from powertrain.records import ModelFacts
from powertrain.report.words import count, counted, memory

Row = tuple[str, str]
FP32 = 4
SHOWN_RATES = 6


def choice_rows(recipe: Mapping[str, Any], model: ModelFacts) -> list[Row]:
    """Return a row for each choice that the recipe makes; none for a recipe that makes none."""
    return [row for row in (_frozen(recipe, model), _rates(model), _average(recipe, model), _end(recipe), _best(recipe)) if row]


def _frozen(recipe: Mapping[str, Any], model: ModelFacts) -> Row | None:
    if not model.frozen:
        return None
    frozen = model.parameters - model.trainable
    patterns = ", ".join(recipe["weights"]["freeze"])
    return "Frozen", (f"{counted(len(model.frozen), 'weight')} ({patterns}) with {frozen:,} of the {model.parameters:,} "
                      f"parameters; {model.trainable:,} ({model.trainable / model.parameters:.2%}) are trained")


def _rates(model: ModelFacts) -> Row | None:
    if not model.rates:
        return None
    shown = [f"x {factor:.3g} for {count(parameters)}" for factor, parameters in model.rates]
    if len(shown) > SHOWN_RATES:
        shown = [*shown[:SHOWN_RATES - 1], f"and {len(shown) - SHOWN_RATES} more", shown[-1]]
    return "Rates", f"learning_rate {', '.join(shown)} of the trained parameters"


def _average(recipe: Mapping[str, Any], model: ModelFacts) -> Row | None:
    decay = recipe.get("ema", {}).get("decay")
    if decay is None:
        return None
    return "Average", (f"of the weights over about {1 / (1 - decay):,.0f} steps (ema.decay={decay:g}), evaluated and written "
                       f"as the model; {memory(FP32 * model.trainable)} beside the optimizer's state")


def _end(recipe: Mapping[str, Any]) -> Row | None:
    patience, threshold = recipe.get("early_stopping_patience"), recipe.get("early_stopping_threshold", 0.0)
    if patience is None:
        return None
    least = f" by more than {threshold:g}" if threshold else ""
    return "Ends", (f"at its last step, or after {counted(patience, 'evaluation')} in a row that did not lower the held-out "
                    f"loss{least}")


def _best(recipe: Mapping[str, Any]) -> Row | None:
    if not recipe.get("load_best_model_at_end"):
        return None
    return "Model is", "the checkpoint with the lowest held-out loss, which is saved at every evaluation that lowers it"
