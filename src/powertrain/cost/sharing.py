"""What several processes gain: the time of their shared step beside that of one process, and what takes most of it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from powertrain.cost.collectives import Collectives, exchanged_s, is_within_node
from powertrain.records import Hardware, UnknownFact

Interval = tuple[float, float]               # low, high
UNEVEN, WAITING = "shares of unequal size", "waits between stages"
BETWEEN_NODES, BETWEEN_PROCESSES = "exchanges between nodes", "exchanges between processes"
MIB = 2**20


@dataclass(frozen=True)
class Sharing:
    """A step that several processes share."""

    step_s: Interval
    basis: str = ""                          # of the time of the exchanges, as a clause
    exchanges: str = ""                      # of one step, counted
    efficiency: Interval | None = None       # the step's time on one process, over that of all processes; None: not known
    held_back_by: str = ""                   # what takes most of the step


def sharing_of(found: Sequence[Collectives], hardware: Hardware, *, own_s: Interval, alone_s: Interval, waiting: float,
               hides: bool, longest_part: str) -> Sharing:
    """Return what `hardware.processes` make of a step in which they exchange what was `found`.

    `own_s`: the time of the process with the most to compute, of which it waits the share `waiting` for other stages;
    `alone_s`: that of the whole step on one process; `hides`: exchanges run ahead of their use, so at best they take no time of
    their own; `longest_part` names what takes most of the computation.
    """
    counted = _counted(found)
    try:
        (low_s, high_s), basis = exchanged_s(found, hardware)
    except UnknownFact as unknown:
        return Sharing(own_s, f"; the time of exchanges is not in it, because {unknown}", counted)
    if hides:
        low_s = max(0.0, low_s - own_s[0])
    ideal_s = tuple(seconds / hardware.processes for seconds in alone_s)
    slow, fast = ideal_s[0] / (own_s[0] + high_s), ideal_s[1] / (own_s[1] + low_s)
    crossing = any(not is_within_node(one, hardware) for one in found)
    computed_s = (1 - waiting) * sum(own_s)
    parts = {longest_part: min(sum(ideal_s), computed_s), UNEVEN: computed_s - sum(ideal_s), WAITING: waiting * sum(own_s),
             BETWEEN_NODES if crossing else BETWEEN_PROCESSES: low_s + high_s}
    efficiency = min(1.0, slow, fast), min(1.0, max(slow, fast))
    return Sharing((own_s[0] + low_s, own_s[1] + high_s), f"; {basis}", counted, efficiency,
                   max(parts, key=lambda name: parts[name]))


def _counted(found: Iterable[Collectives]) -> str:
    """Return '33 all-gathers, 17 reduce-scatters: 1,024 MiB'."""
    counts: Counter[str] = Counter()
    for one in found:
        counts[one.kind.replace("_", "-")] += one.count
    words = [f"{count:,} {kind}{'s' * (count != 1)}" for kind, count in counts.items()]
    return f"{', '.join(words)}: {sum(one.total_bytes for one in found) / MIB:,.0f} MiB"
