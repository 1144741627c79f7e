"""What a selection of weights means for a model: which of its parameters are frozen, and the factor of each one's rate."""

from torch import nn

from powertrain.models.decoder import Decoder
from powertrain.models.selection import BRIDGED, Names, Selection, other_names


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the model's weights by the names that patterns match."""
    return {name.removeprefix(BRIDGED): parameter for name, parameter in model.named_parameters()}


def freeze(model: nn.Module, selection: Selection) -> None:
    """Leave the weights that the selection freezes without a gradient. Raises WrongUse as `Selection.frozen`."""
    if selection.freeze:
        weights = named(model)
        for name in selection.frozen(_names(model, weights)):
            weights[name].requires_grad_(False)


def factors_of(model: nn.Module, selection: Selection) -> dict[nn.Parameter, float]:
    """Return the factor of the learning rate of each trained weight."""
    weights = {name: weight for name, weight in named(model).items() if weight.requires_grad}
    layers = model.config.layers if isinstance(model, Decoder) else 0
    factors = selection.factors(_names(model, weights), layers)
    return {weight: factors[name] for name, weight in weights.items()}


def _names(model: nn.Module, weights: dict[str, nn.Parameter]) -> Names:
    return other_names(model.config, weights) if isinstance(model, Decoder) else dict.fromkeys(weights, ())
