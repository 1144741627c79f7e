"""Powertrain against its peers: `make bench`, or `python benchmarks/bench.py [CASE ...] [--minutes 10]`.

Each peer runs in a virtual environment of its own (.peers/, made at the first run) and takes optimizer steps in turns with
ours, A B B A, as arms do everywhere (evidence/clock.py); the arm that waits is stopped. Then the peer takes the same steps
alone. Both are done again while there is time. A case begins on an idle machine only, and a peer that was slower beside us
than alone is marked (conditions.py). A case gives a study in studies/, from which `table.py` makes the README's table: speeds,
their ratio with its interval, the losses of both sides step by step, the share of this machine's measured matrix products that
our arm reaches, and where the rest of its time goes. SHARED has benchmarks/make_model.py and the data; nanoGPT is a peer where
--nanogpt names a checkout of it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cases import CASES, Case, Materials, PeerArm
from conditions import Conditions, InTurns, conditions, refuse_busy_machine, repeat
from growth import measure_models, measure_rows, measure_runs
from nanogpt import prepare_nanogpt
from page_cost import measure as measure_page
from peer import Peer
from preparing import measure as measure_preparing
from saving import measure as measure_saving
from starting import measure as measure_starting
from writing import measure as measure_writing

from powertrain.cli.options import cache_folder, say
from powertrain.cost.work import step_work
from powertrain.evidence import studies
from powertrain.evidence.clock import LEAST_PAIRS, Arena, CannotRun, Pace, Track, interleave, judge
from powertrain.evidence.stats import MARGIN, noise_floor
from powertrain.evidence.worker import ArmProcess, Order
from powertrain.facts.machine_watch import MachineWatch, Meanwhile
from powertrain.records import Facts
from powertrain.records.evidence import Arm, ArmRun, Comparison, Study, Window

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"
REQUIREMENTS = ROOT / "benchmarks" / "peers" / "requirements.txt"
OURS = "powertrain"
# cases that take no steps by turns
OTHERS = {"prepare": measure_preparing, "start": measure_starting, "saving": measure_saving, "writing": measure_writing,
          "growth": measure_models, "growth-rows": measure_rows, "growth-runs": measure_runs}
PAGE = "page"                # the case that needs neither peers nor materials
# A step of a peer can take most of a minute. What comes first after a pause is not timed, because page faults can slow it down.
PACE = Pace(window_s=2.0, pairs=5, most_pairs=12, warm_up_s=10.0, lead_in_s=1.0, least_lead_in=1)


def main() -> None:
    options = parse()
    if not options.cases or PAGE in options.cases:
        if not options.busy:
            refuse_busy_machine()
        with tempfile.TemporaryDirectory(prefix="powertrain-bench-") as scratch:
            measure_page(Path(scratch), cache_folder())
    if options.cases == [PAGE]:
        return
    chosen = [case for case in CASES if not options.cases or case.name in options.cases]
    python = peers_python()
    for case in chosen:
        if not options.busy:
            refuse_busy_machine()
        with tempfile.TemporaryDirectory(prefix="powertrain-bench-") as scratch:
            materials = gather(options, Path(scratch))
            try:
                run_case(case, materials, python, options)
            except CannotRun as error:
                say(f"{case.name}: {error}\n{error.details}")
    for name, measure in OTHERS.items():
        if not options.cases or name in options.cases:
            if not options.busy:
                refuse_busy_machine()
            with tempfile.TemporaryDirectory(prefix="powertrain-bench-") as scratch:
                measure(gather(options, Path(scratch)), python)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join([*(case.name for case in CASES), *OTHERS, PAGE])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {names}; default: all")
    parser.add_argument("--minutes", type=float, default=10.0,
                        help="for each case, shared by its peers; each peer gets a round of five windows in any case")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder with benchmarks/ and data/")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without it the character models are left out")
    parser.add_argument("--words", nargs="+", default=[], metavar="KEY=VALUE", help="more of them for our arm")
    parser.add_argument("--busy", action="store_true", help="measure although other processes compute; the study is marked")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------ what is needed


def peers_python() -> Path:
    """The interpreter of the peers, in an environment of their own."""
    python = PEERS / "bin" / "python"
    stamp = PEERS / ".installed"
    if not stamp.exists() or stamp.stat().st_mtime < REQUIREMENTS.stat().st_mtime:
        say("installing the peers into .peers/ (once)")
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--requirement", str(REQUIREMENTS)], check=True)
        stamp.touch()
    return python


def gather(options: argparse.Namespace, folder: Path) -> Materials:
    data, model = options.shared / "data", cache_folder() / "benchmarks" / "llama-115m"
    gsm8k, shakespeare = data / "gsm8k_train.jsonl", data / "tinyshakespeare.txt"
    for needed in (gsm8k, shakespeare):
        if not needed.exists():
            raise SystemExit(f"{needed} is missing; name the folder that has it in data/ with --shared")
    if not (model / "config.json").exists():
        say("making the model of 115.6 M parameters (once)")
        subprocess.run([sys.executable, str(options.shared / "benchmarks" / "make_model.py"), str(model), "--text", str(gsm8k)],
                       check=True, stdout=subprocess.DEVNULL)
    nanogpt = options.nanogpt
    if nanogpt is not None:
        nanogpt = prepare_nanogpt(nanogpt, shakespeare, str(PEERS / "bin" / "python"), folder / "nanogpt")
    return Materials(folder, model, gsm8k, shakespeare, nanogpt, cache_folder())


# ------------------------------------------------------------------------------------------------ one case


def run_case(case: Case, materials: Materials, python: Path, options: argparse.Namespace) -> None:
    folder, began = studies.new_folder(f"bench-{case.name}"), time.monotonic()
    peers = case.peers(materials)
    if not peers:
        say(f"{case.name}: left out, there is no checkout of nanoGPT (--nanogpt)")
        return
    ours = Arm(OURS, (*case.words(materials), *options.words))
    each_s = 60 * options.minutes / (len(peers) + 1)
    with Arena(materials.cache) as arena:
        say(f"{case.name}: ours against itself")
        control, _, _ = arena.control(ours, PACE, deadline=time.monotonic() + each_s)
        profile = arena.profile(ours)
        facts, plan = arena.facts, arena.plans[OURS]
    assert facts is not None
    comparisons: list[Comparison] = [control]
    runs: list[ArmRun] = []
    under: list[Conditions] = []
    for peer in peers:
        say(f"{case.name}: against {peer.name}")
        comparison, theirs, mine, found = against(ours, peer, python, materials, each_s)
        say(f"{case.name}: {comparison.because} than {peer.name}; the peer makes {found.beside_tokens_per_s:,.0f} tokens/s "
            f"beside us and {found.alone_tokens_per_s:,.0f} alone" + "".join(f"; NOT CLEAN: {why}" for why in found.unclean))
        under.append(found)
        comparisons.append(comparison)
        runs += [theirs, mine]
    study = Study(name=folder.name, kind="peers", what=case.what, arms=(Arm(OURS, ours.words, plan),), runs=tuple(runs),
                  comparisons=tuple(comparisons), noise_floor=noise_floor(control), seconds=time.monotonic() - began,
                  findings={"case": case.name, "losses": list(map(apart, runs[::2], runs[1::2])),
                            "products_share": products_share(facts, runs[1]),
                            "conditions": [one.plain() for one in under], "profile": dict(profile.classes)},
                  **studies.describe(facts))
    studies.save(folder, study, facts)
    print(f"{case.name}: " + shown(study.findings))
    print(f"{case.name}: " + "; ".join(f"{found.speed.median:.2f} times {peer.name} ({found.speed.low:.2f} to "
                                       f"{found.speed.high:.2f})" for found, peer in zip(comparisons[1:], peers, strict=True)
                                       if found.speed is not None) + f" ({folder})")


def against(ours: Arm, peer: PeerArm, python: Path, materials: Materials, budget_s: float
            ) -> tuple[Comparison, ArmRun, ArmRun, Conditions]:
    """Measure our arm against the peer's, in as many rounds as fit the budget, and at least one.

    The speed of a machine that others share drifts within a minute; rounds see the peer alone and beside us under the same
    drift.
    """
    ends, rounds, took_s = time.monotonic() + budget_s, list[Round](), 0.0
    while not rounds or time.monotonic() + took_s < ends:
        began = time.monotonic()
        rounds.append(one_round(ours, peer, python, materials))
        took_s = time.monotonic() - began
    first = rounds[0]
    a, b = joined([one.theirs for one in rounds]), joined([one.mine for one in rounds])
    found, _, _ = judge(*first.tracks, a, b, MARGIN)
    return found, a, b, conditions(peer.name, [window for one in rounds for window in one.alone], a.windows,
                                   [seen for one in rounds for seen in one.watched])


@dataclass(frozen=True)
class Round:
    """Both arms in turns, each in a fresh process, and then the peer alone over the same steps in another one."""

    tracks: tuple[Track, Track]
    theirs: ArmRun
    mine: ArmRun
    alone: Sequence[Window]
    watched: tuple[Meanwhile, Meanwhile]


def one_round(ours: Arm, peer: PeerArm, python: Path, materials: Materials) -> Round:
    order = Order(ours, str(materials.cache), str(Path.cwd()), tempfile.mkdtemp(dir=materials.folder))
    options = (peer.name, python, peer.script, dict(peer.options), materials.folder)
    with MachineWatch() as together, Peer(*options) as theirs, InTurns(theirs) as first, ArmProcess(order) as mine, \
            InTurns(mine) as second:
        tracks = Track(first), Track(second)
        _, a, b = interleave(*tracks, replace(PACE, most_pairs=LEAST_PAIRS))
    with MachineWatch() as alone, Peer(*options) as theirs:
        windows = repeat(theirs, a)
    return Round(tracks, a, b, windows, (together.seen, alone.seen))


def joined(runs: Sequence[ArmRun]) -> ArmRun:
    """The first run with the windows of all."""
    return replace(runs[0], windows=tuple(window for run in runs for window in run.windows))


def apart(theirs: ArmRun, ours: ArmRun) -> Mapping[str, Any]:
    """Their losses and ours, step by step."""
    steps = min(len(theirs.losses), len(ours.losses))
    found = [b - a for a, b in zip(theirs.losses[:steps], ours.losses[:steps], strict=True)]
    return {"peer": theirs.arm, "steps": steps, "first": found[0], "mean": statistics.mean(found),
            "mean_absolute": statistics.mean(map(abs, found)), "largest": max(map(abs, found))}


def shown(findings: Mapping[str, Any]) -> str:
    """The share of the products' limit, where a step's time goes, and how far apart the losses are."""
    classes = findings["profile"]
    parts = ", ".join(f"{name} {seconds / sum(classes.values()):.0%}" for name, seconds in
                      sorted(classes.items(), key=lambda item: -item[1]) if seconds >= 0.01 * sum(classes.values()))
    losses = "; ".join(f"losses {one['mean_absolute']:.1e} from those of {one['peer']} over {one['steps']} steps, "
                       f"{one['largest']:.1e} at most" for one in findings["losses"])
    return f"{findings['products_share']:.0%} of the measured products; time: {parts}; {losses}"


def products_share(facts: Facts, run: ArmRun) -> float:
    """Exact FLOPs a second of our arm over what this machine's matrix products were measured at."""
    dtype = "bf16" if "bf16" in run.techniques else "fp32"
    work = step_work(facts.model, [typical_step(facts)], dtype)
    tokens_per_s = statistics.median(window.tokens_per_s for window in run.windows)
    return work.flops / facts.data.block / facts.data.train_batch_size * tokens_per_s / facts.hardware.peak(dtype)


def typical_step(facts: Facts) -> Sequence[int]:
    return [facts.data.block] * facts.data.train_batch_size


if __name__ == "__main__":
    main()
