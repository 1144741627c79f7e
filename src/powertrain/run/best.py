"""The weights of the best checkpoint in place of those of the last step, where the recipe asks for them."""

from pathlib import Path

from powertrain.records import events
from powertrain.records.checkpoints import by_loss, checkpoints_in, what_is_wrong
from powertrain.run.part import Part
from powertrain.training.checkpoint import load_checkpoint

Found = tuple[int, Path | None, list[tuple[str, str]]]      # step, its checkpoint, and those that are not whole, with why


def take_best(part: Part) -> None:
    """Put the weights with the lowest held-out loss into the model, which the run then ends with. All processes call this.

    Where these are the last step's nothing is loaded. The counters stay those of the last step.
    """
    state = part.state
    step, path, rejected = part.ranks.agree(_find(part) if part.ranks.is_writer else (state.step, None, []))
    for name, why in rejected:
        part.emit(events.CheckpointRejected(step=state.step, name=name, why=why))
    evaluations = dict(state.evaluations)
    if path is not None:
        counters = state.step, state.trained_tokens, int(state.clipped_steps)
        load_checkpoint(path, state)
        state.step, state.trained_tokens, state.evaluations = *counters[:2], evaluations
        state.clipped_steps.fill_(counters[2])
    part.weights_step = step
    part.emit(events.BestModel(step=state.step, best_step=step, best_loss=evaluations.get(step, float("nan")),
                               loss=evaluations.get(state.step, float("nan")), evaluations=len(evaluations)))


def _find(part: Part) -> Found:
    """Return the best step of which the weights are there: in a whole checkpoint, or in the model."""
    published, own = checkpoints_in(part.folder.checkpoints), part.state.step
    rejected: list[tuple[str, str]] = []
    for step in by_loss({*published, own}, part.state.evaluations):
        if step == own:
            break
        if (why := what_is_wrong(published[step])) is None:
            return step, published[step], rejected
        rejected.append((published[step].name, why))
    return own, None, rejected
