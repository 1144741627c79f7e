"""Two plans of Powertrain against each other: the same recipe with different `key=value` words, in one interleaved run.

    python benchmarks/arms.py RECIPE --a techniques.torch_compile=off --b techniques.torch_compile=on --study NAME

Words after RECIPE go to both arms. They are measured as everything is (evidence/clock.py: a process for each, A B B A), A
against itself as well, and the result goes to studies/NAME/.
"""

from __future__ import annotations

import argparse
import time

from powertrain.cli.options import cache_folder, say
from powertrain.evidence import studies
from powertrain.evidence.clock import Arena, Pace
from powertrain.evidence.stats import MARGIN, noise_floor
from powertrain.records.evidence import Arm, Study


def main() -> None:
    options = parse()
    folder, began = studies.new_folder("comparison", options.study), time.monotonic()
    pace = Pace(window_s=options.window, pairs=options.pairs)
    a, b = (Arm(" ".join(more), (options.recipe, *options.words, *more)) for more in (options.a, options.b))
    with Arena(cache_folder()) as arena:
        say(f"{a.name} against itself")
        control, *first = arena.control(a, pace)
        floor = noise_floor(control)
        say(f"{control.because}; {b.name} against {a.name}")
        comparison, *second = arena.compare(a, b, pace, margin=max(MARGIN, floor))
        assert arena.facts is not None
        study = Study(name=folder.name, kind="comparison", what=f"{options.recipe}: {b.name} against {a.name}",
                      arms=tuple(Arm(arm.name, arm.words, arena.plans[arm.name]) for arm in (a, b)),
                      runs=(*first, *second), comparisons=(comparison, control), noise_floor=floor,
                      seconds=time.monotonic() - began, **studies.describe(arena.facts))
        studies.save(folder, study, arena.facts)
    print(f"{b.name} against {a.name}: {comparison.verdict}, {comparison.because} ({folder})")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--a", nargs="+", required=True)
    parser.add_argument("--b", nargs="+", required=True)
    parser.add_argument("--pairs", type=int, default=Pace().pairs, help="of windows, at least")
    parser.add_argument("--window", type=float, default=Pace().window_s, help="seconds of a window")
    parser.add_argument("--study", required=True, help="folder in studies/")
    return parser.parse_args()


if __name__ == "__main__":
    main()
