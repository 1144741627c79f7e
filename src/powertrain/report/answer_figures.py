"""The figure of objectives that compare answers: how often the chosen one wins, and by what reward."""

from powertrain.records.events import Evaluated
from powertrain.records.timeline import History
from powertrain.report.chart import Axis, Plot, Series
from powertrain.report.page import Figure, Table
from powertrain.report.words import ACCURACY

REWARDS = {"rewards_chosen": ("chosen", "green"), "rewards_rejected": ("rejected", "red"),
           "rewards_margins": ("margin", "blue")}        # metric -> name and colour of its line


def rewards(history: History) -> Figure | None:
    """Plot accuracy and rewards of each step and of the held-out answers; None for a run that compares no answers."""
    steps = [step for step in history.steps if ACCURACY in step.metrics]
    if not steps:
        return None
    held_out = tuple((float(one.after_step), one.event.metrics[ACCURACY]) for one in history.of(Evaluated)
                     if ACCURACY in one.event.metrics)
    accuracy = Plot(Axis("step"), Axis("share judged right", low=0.0, high=1.0), (
        Series("each step", tuple((float(step.step), step.metrics[ACCURACY]) for step in steps), "blue", "faint"),
        *((Series("held out", held_out, "red", "circle"),) if held_out else ())), "Accuracy", height=170)
    of_answers = Plot(Axis("step"), Axis("reward"), tuple(
        Series(name, tuple((float(step.step), step.metrics[key]) for step in steps), colour)
        for key, (name, colour) in REWARDS.items()), "Rewards", height=170)
    last = held_out[-1][1] if held_out else steps[-1].metrics[ACCURACY]
    names = tuple(steps[-1].metrics)
    table = Table(("step", *names), tuple((step.step, *(step.metrics.get(name) for name in names)) for step in steps))
    return Figure("answers", f"{last:.1%} of the {'held-out answers' if held_out else 'answers of the last step'} are judged "
                  "right at the end", (accuracy, of_answers),
                  "A pair is judged right if its chosen answer has the higher reward, a rated answer if its reward lies on the "
                  "side that its label says.", (table,), beside=True)
