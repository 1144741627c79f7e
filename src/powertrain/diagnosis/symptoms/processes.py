"""Symptoms of several processes: what their exchange takes, uneven shares of a step, and a process that is slow by itself."""

from collections.abc import Iterator

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.wording import told
from powertrain.records.events import Straggler
from powertrain.records.findings import Finding, rule
from powertrain.records.timeline import Sharing, sharing

LEAST_TIMED = 10             # steps: fewer say little
WORTH_SHARE = 0.1            # of the steps' time: a smaller share is the price of several processes
SERIOUS_SHARE = 0.3
UNEVEN = 1.1                 # times the mean process's tokens, from which a process has too many
PASSES = (("packing", "tokens"), ("micro_batch", "examples"))    # techniques that say how large a pass is, and their settings


def _shared(run: RunRecord) -> Sharing | None:
    return sharing(run.steady_steps) if len(run.steady_steps) >= LEAST_TIMED else None


@rule("fact: the times of the run's steps on each process")
def communication(run: RunRecord) -> Iterator[Finding]:
    """The exchange between the processes takes a large share of the steps."""
    found, step_s, processes = _shared(run), run.step_s, run.history.start.processes
    if found is None or step_s is None or (share := found.communication_share) < WORTH_SHARE:
        return
    summed_bytes = run.numbers.get("data_parallel", {}).get("summed_bytes", 0)
    yield told("communication.slow", severity="moderate" if share > SERIOUS_SHARE else "low", share=share, step_s=step_s,
               communication_s=share * step_s, processes=processes, fewer=processes - 1, summed_bytes=summed_bytes,
               what=f"the sum of {summed_bytes / 2**20:,.0f} MiB of gradients" if summed_bytes else "the exchange",
               larger=2 * run.recipe.train_batch_size, most=1 / (1 - share))


@rule("fact: the tokens and times of the run's steps on each process", gives_way_to=("straggler",))
def imbalance(run: RunRecord) -> Iterator[Finding]:
    """Processes wait for the slowest one, because it computes more tokens or because the same tokens take longer."""
    found = _shared(run)
    if found is None or (waiting := found.waiting_share) < WORTH_SHARE:
        return
    words = _smaller_passes(run)
    case = "in_turn" if found.token_imbalance < UNEVEN else "passes" if words else "smallest_passes"
    yield told(f"imbalance.{case}", severity="moderate" if waiting > SERIOUS_SHARE else "low", times=found.token_imbalance,
               waiting=waiting, word=words, larger=2 * run.recipe.train_batch_size, most=1 / (1 - waiting))


def _smaller_passes(run: RunRecord) -> str:
    """Return the word that halves the passes; "" where a pass is a single example already."""
    for name, setting in PASSES:
        if (now := run.techniques.get(name, {}).get(setting, 1)) > 1:
            return f"techniques.{name}.{setting}={now // 2}"
    return ""


@rule("fact: each process's own time of the run's steps")
def straggler(run: RunRecord) -> Iterator[Finding]:
    """One process takes longer for its passes than the others, and not because it computes more tokens."""
    named = {happened.event.rank: happened.event for happened in run.history.of(Straggler)}
    for event in named.values():
        step_s = max(run.step_s or 0.0, event.own_s)
        yield told(f"straggler.{'data' if event.part == 'data' else 'computing'}", rank=event.rank, host=event.host,
                   part=event.part, own_s=event.own_s, usual_s=event.usual_s, step=event.step,
                   times=event.own_s / event.usual_s, most=step_s / (step_s - event.own_s + event.usual_s))
