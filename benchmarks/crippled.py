"""Recipes that are crippled on purpose, put through `powertrain diagnose`'s own code: it has to name what was planted first,
and the cure that it proposes has to give at least half of the gain that it predicts.

    python benchmarks/crippled.py --study NAME                     less than ten minutes on two cores
    python benchmarks/crippled.py --study NAME --only one-thread wrong-dtype

Most of it is planted by words of the recipe. Two things a recipe cannot do, and planted techniques do them:

  slow_source     batches come from somewhere slow: making one waits, as for a disk or a network
  naive_compile   the MLP of the blocks is compiled for the very tokens of a pass, and compiled anew for others

Cures of steps are measured as everything is: two arms in turns, A B B A. What is between the steps, or happens once, is
measured by whole runs in turns. The result goes to studies/NAME; the exit code is 1 where a cause was not found, or a cure
gave less than half of what was predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor

from powertrain import planner
from powertrain.cli.options import cache_folder, say
from powertrain.data.example import Example
from powertrain.evidence import studies
from powertrain.evidence.clock import Arena, Pace
from powertrain.models.adapters.files import save_model
from powertrain.recipe import resolve_words
from powertrain.records import Batch, Refusal, to_plain
from powertrain.records.event_log import read_events
from powertrain.records.events import End, Evaluated, ModelSaved, Saved
from powertrain.records.evidence import Arm, ArmRun, Comparison, Study
from powertrain.records.plan import Why
from powertrain.run.prepare import prepare
from powertrain.techniques.base import Exactness, PlannedRun, Technique
from powertrain.training.setup import Setup

HALF = 0.5                   # of the gain that is predicted: what a cure has to give at least
PACE = Pace(window_s=0.5, pairs=5, most_pairs=6, warm_up_s=6.0)
RUN_PAIRS = 2
QUIET = ["train_time_s=null", "sample.tokens=0", "eval_steps=0", "save_steps=0"]
TEXT = ["default", "data.max_chars=400000", "max_steps=400", *QUIET]
ROWS = ["method=lora", "data.chat_template=plain", "data.train_on=all", "train_batch_size=16", "sample.tokens=0",
        "eval_steps=0", "save_steps=0", "data.validation_share=0.02"]


@dataclass(frozen=True)
class Case:
    """One planted cause."""

    name: str
    bound: str                               # what the verdict has to name first
    words: tuple[str, ...]
    by_runs: bool = False                    # its cure acts on what is between the steps, or happens once
    rows: bool = False                       # it needs a pretrained model and examples of unequal lengths


CASES = (
    Case("starved-loader", "data", (*TEXT, "techniques.slow_source.seconds=0.15")),
    Case("tiny-micro-batch", "host overhead", (*TEXT, "data.block=64", "train_batch_size=32",
                                               "techniques.micro_batch.examples=1")),
    Case("padding-heavy", "padding", (*ROWS, "train_batch_size=8", "max_steps=400", "techniques.packing=off",
                                      "techniques.length_grouping=off", "techniques.fused_blocks=off"), rows=True),
    Case("evaluation-every-step", "evaluation", (*TEXT, "max_steps=24", "eval_steps=1"), by_runs=True),
    Case("checkpoint-every-step", "checkpointing", (*TEXT, "max_steps=24", "save_steps=1"), by_runs=True),
    Case("wrong-dtype", "compute", (*TEXT, "model.width=384", "techniques.bf16=off")),
    Case("one-thread", "too few threads", (*TEXT, "model.width=384", "techniques.threads.threads=1")),
    Case("needless-checkpointing", "memory capacity", (*TEXT, "model.width=384",
                                                       "techniques.activation_checkpointing=on")),
    Case("compile-changing-shapes", "recompilation", (*ROWS, "train_batch_size=4", "max_steps=40", "data.long_examples=drop",
                                                      "data.max_length=120", "techniques.packing=off",
                                                      "techniques.micro_batch.examples=4", "techniques.fused_blocks=off",
                                                      "techniques.frozen_backward=off", "techniques.naive_compile=on"),
         by_runs=True, rows=True),
)


class Planted(Technique):
    """Nobody proposes it; it is there when it is asked for by name."""

    exactness = Exactness.BITWISE
    source = "this project's benchmarks"
    does = "slows the run on purpose"

    @classmethod
    def propose(cls, run: PlannedRun) -> Refusal:
        return cls.refuse(Why.WOULD_NOT_PAY, "it cripples a run on purpose", cls())

    def confirm(self, setup: Setup) -> None:
        """It is in force by what it does."""


@dataclass(frozen=True)
class SlowSource(Planted):
    """Making a batch waits for so long, as for a slow disk or a network."""

    seconds: float = 0.05

    name = "slow_source"
    touches = frozenset({"collate"})

    def apply(self, setup: Setup) -> Setup:
        return replace(setup, collate=partial(_slowly, setup.collate, self.seconds))


@dataclass(frozen=True)
class NaiveCompile(Planted):
    """The MLP of every block is compiled for the very tokens of its pass, and anew for others, with torch's limit raised.

    It is traced and differentiated as always, and no code is generated: that alone would take minutes.
    """

    limit: int = 16                          # kinds of input, of which torch compiles 8 if nothing is said

    name = "naive_compile"
    touches = frozenset({"run_block"})
    slots = frozenset({"blocks"})

    def apply(self, setup: Setup) -> Setup:
        torch._dynamo.config.recompile_limit = self.limit

        def transform(block: Any, x: Tensor) -> Tensor:
            return x + block.transform(block.mlp_norm(x))

        compiled = torch.compile(transform, dynamic=False, backend="aot_eager")

        def run_block(block: Any, index: int, x: Tensor, rotary: Any, lengths: tuple[int, ...], attention: Any) -> Tensor:
            return compiled(block, x + block.attend(block.attention_norm(x), rotary, lengths, attention))

        return replace(setup, run_block=run_block)


def _slowly(collate: Any, seconds: float, examples: Sequence[Example]) -> Batch:
    time.sleep(seconds)
    return collate(examples)


for _planted in (SlowSource, NaiveCompile):
    if _planted.name not in planner.BY_NAME:             # an arm's process imports this both as a module and as what was run
        planner.BY_NAME[_planted.name] = _planted  # type: ignore[index]


# ------------------------------------------------------------------------------------------------ one case


def judged(case: Case, words: tuple[str, ...], scratch: Path, budget_s: float) -> tuple[dict[str, Any], Measured | None]:
    """What diagnose says of it, and what its cure gives."""
    said = asked("--diagnose", str(budget_s), *words)
    causes, failed = said["causes"], said["failed"]
    if not causes:
        return {"name": case.name, "planted": case.bound, "words": told(words), "failed": failed, "holds": False}, None
    first = causes[0]
    found: Measured | None = None
    cured = (*words, *first["cure"]["words"])
    if first["name"] == case.bound and first["cure"]["words"]:
        found = by_runs(words, cured, scratch) if case.by_runs else by_steps(case, words, cured)
    measured = None if found is None else found.speed
    holds = measured is not None and measured - 1 >= HALF * (first["predicted"] - 1)
    return {"name": case.name, "planted": case.bound, "words": told(words), "named": first["name"],
            "share": first["share"], "bound": first["bound"], "predicted": first["predicted"], "basis": first["basis"],
            "cure": first["cure"]["words"], "evidence": [one["what"] for one in first["evidence"]], "measured": measured,
            "interval": None if found is None else found.interval, "by_runs": case.by_runs,
            "ratio": None if measured is None or first["predicted"] <= 1 else (measured - 1) / (first["predicted"] - 1),
            "others": [{key: one[key] for key in ("name", "share", "predicted")} for one in causes[1:4]], "holds": holds}, found


@dataclass(frozen=True)
class Measured:
    speed: float                             # cured over crippled
    interval: tuple[float, float] | None = None
    comparison: Comparison | None = None
    arms: tuple[Arm, ...] = ()
    runs: tuple[ArmRun, ...] = ()


def by_steps(case: Case, words: tuple[str, ...], cured: tuple[str, ...]) -> Measured:
    arms = Arm(f"{case.name}: crippled", words), Arm(f"{case.name}: cured", cured)
    with Arena(cache_folder(), preload=["crippled"]) as arena:
        found, first, second = arena.compare(*arms, PACE)
        plans = [replace(arm, plan=arena.plans[arm.name], words=tuple(told(arm.words))) for arm in arms]
    assert found.speed is not None, found.because
    return Measured(found.speed.median, (found.speed.low, found.speed.high), found, tuple(plans), (first, second))


def by_runs(words: tuple[str, ...], cured: tuple[str, ...], scratch: Path) -> Measured:
    """Whole runs in turns, A B B A; the time of their loops, without what follows every run's last step."""
    taken: dict[tuple[str, ...], list[float]] = {words: [], cured: []}
    for pair in range(RUN_PAIRS):
        for arm in (words, cured) if pair % 2 == 0 else (cured, words):
            folder = Path(tempfile.mkdtemp(dir=scratch)) / "run"
            subprocess.run([sys.executable, __file__, "--train", *arm, "--output", str(folder), "--quiet"], check=True,
                           capture_output=True, env=environment())
            taken[arm].append(loop_s(folder))
    ratios = sorted(slow / fast for slow, fast in zip(taken[words], taken[cured], strict=True))
    return Measured(statistics.median(ratios), (ratios[0], ratios[-1]))


def loop_s(run: Path) -> float:
    events = read_events(run / "events.jsonl")
    end = next(event for event in reversed(events) if isinstance(event, End))
    final_s = sum(event.seconds for event in events if (isinstance(event, Evaluated) and event.final) or (
        isinstance(event, Saved) and event.step == end.step) or isinstance(event, ModelSaved))
    return end.seconds - final_s


def asked(mode: str, *arguments: str) -> Mapping[str, Any]:
    """What this script says in a process of its own: settings such as threads hold for a whole process."""
    done = subprocess.run([sys.executable, __file__, mode, *arguments], capture_output=True, text=True, env=environment(),
                          check=False)
    if done.returncode != 0:
        raise SystemExit(f"{mode} {' '.join(arguments)} failed:\n{done.stderr}")
    sys.stderr.write(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, str]:
    """So that nothing is compiled faster because it was compiled before."""
    here = str(Path(__file__).parent)
    return {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}


def diagnosed(budget_s: float, words: Sequence[str]) -> None:
    from powertrain.diagnosis.diagnose import diagnose, prepare_for_diagnosis

    prepared, refused = prepare_for_diagnosis(resolve_words(words), cache_folder(), say)
    found = diagnose(words, prepared, refused, cache=cache_folder(), budget_s=budget_s, say=say, preload=["crippled"])
    print(json.dumps({"causes": to_plain(found.causes), "failed": found.failed}))


def told(words: Sequence[str]) -> list[str]:
    """The words without the paths of this machine."""
    return [f"{word.partition('=')[0]}={Path(word.partition('=')[2]).name}" if word.startswith(("model.path=", "data.source=/"))
            else word for word in words]


def material(scratch: Path) -> tuple[str, ...]:
    """A small model of random weights that reads bytes, and rows of very unequal lengths."""
    from powertrain.data.table_tokenizers import ByteTokenizer
    from powertrain.models.config import make_config
    from powertrain.models.decoder import Decoder

    torch.manual_seed(0)
    config, _ = make_config("llama", vocabulary=257, context=2048, end_of_text=256, tied_head=True, layers=4, width=256,
                            heads=4)
    save_model(Decoder(config), scratch / "random-small", ByteTokenizer())
    draw, rows = random.Random(0), scratch / "unequal.jsonl"
    with open(rows, "w", encoding="utf-8") as file:
        for number in range(800):
            letters = draw.randint(350, 500) if number % 8 == 0 else draw.randint(20, 80)
            answer = "".join(draw.choice("abcdefgh ") for _ in range(letters))
            file.write(json.dumps({"prompt": f"Write {number}.", "completion": answer}) + "\n")
    return (f"model.path={scratch / 'random-small'}", f"data.source={rows}")


def main() -> int:
    options, began, cache = parse(), time.monotonic(), cache_folder()
    folder = studies.new_folder("crippled", options.study)
    rows: list[dict[str, Any]] = []
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        unequal = material(scratch)
        for case in CASES:
            if options.only and case.name not in options.only:
                continue
            case_began = time.monotonic()
            row, measured = judged(case, (*case.words, *(unequal if case.rows else ())), scratch, options.budget)
            rows.append({**row, "seconds": time.monotonic() - case_began})
            found += [measured] if measured is not None and measured.comparison is not None else []
            print(shown(row), flush=True)
    facts = prepare(resolve_words(TEXT), cache, say).facts
    studies.save(folder, Study(
        name=folder.name, kind="diagnosis", what="crippled recipes: what diagnose names first, and what its cures give",
        arms=tuple(arm for one in found for arm in one.arms), runs=tuple(run for one in found for run in one.runs),
        comparisons=tuple(one.comparison for one in found if one.comparison is not None), findings={"cases": rows},
        seconds=time.monotonic() - began, **studies.describe(facts)), facts)
    return 0 if all(row["holds"] for row in rows) else 1


def shown(row: Mapping[str, Any]) -> str:
    verdict = "holds" if row["holds"] else "FAILS"
    if "named" not in row:
        return f"{verdict}  {row['name']}: {row['failed']}"
    gain = "the cure was not measured" if row["measured"] is None else f"measured {row['measured']:.2f}"
    return (f"{verdict}  {row['name']}: named {row['named']} (planted {row['planted']}), {row['share']:.0%}; predicted "
            f"{row['predicted']:.2f}, {gain} with {' '.join(row['cure'])}; then "
            + ", ".join(f"{one['name']} {one['predicted']:.2f}" for one in row["others"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", required=True, help="folder in studies/")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="these of them")
    parser.add_argument("--budget", type=float, default=25.0, help="seconds of each diagnosis")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--diagnose"]:
        diagnosed(float(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:2] == ["--train"]:
        from powertrain.cli import main as powertrain

        sys.argv[1] = "train"
        powertrain()
    else:
        sys.exit(main())
