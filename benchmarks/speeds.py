"""How fast runs of several shapes are here, against what their plans expect; fills cost/efficiencies.json.

    python benchmarks/speeds.py --study cpu-speed                      about a quarter of an hour on two cores
    python benchmarks/speeds.py --study try --seconds 1 --repeats 1 --only 1 12 --keep-table

Each shape is trained in fresh processes, all shapes once and then all of them again, so that a slow quarter of an hour
does not fall on one shape alone. Models with adapters stand on random weights: --model names a folder of some, else two
are made. The study goes to studies/<date>_<name> in the current directory; the table in the package is written anew from
its rows, and tests hold every row within what that table expects of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from efficiencies import fill_table, lies_within, speed_row, with_tables

from powertrain.cli.options import cache_folder
from powertrain.cost.estimate import TABLE
from powertrain.evidence.studies import describe, new_folder, save
from powertrain.models.adapters.files import save_model
from powertrain.planner import make_plan
from powertrain.recipe import resolve_words
from powertrain.records.event_log import read_events
from powertrain.records.events import Step
from powertrain.records.evidence import Study
from powertrain.run.prepare import Prepared, prepare

# nothing but training, in eager PyTorch
QUIET = ["eval_steps=0", "save_steps=0", "sample.tokens=0", "max_eval_samples=1", "techniques.torch_compile=off",
         "logging_steps=1000"]
TEXT = ["default", "data.max_chars=600000", "data.validation_share=0.01", "train_time_s=null"]
CHAR = ["char-shakespeare-cpu", "data.source=stdlib", "data.max_chars=200000", "data.validation_share=0.01"]
ROWS = ["data.source=docstrings", "data.max_examples=400", "data.chat_template=plain", "data.validation_share=0.02",
        "train_batch_size=16"]
FP32, BF16 = "techniques.bf16=off", "techniques.bf16=on"
LEAST_STEPS, MOST_STEPS = 14, 400
MODELS: dict[str, dict[str, Any]] = {"small": {"layers": 4, "width": 256, "heads": 4},
                                     "large": {"layers": 12, "width": 768, "heads": 12}}


def shapes(folders: dict[str, Path]) -> list[list[str]]:
    """The words of each shape: two sizes of width and pass, both dtypes, long and short blocks, dropout, adapters."""
    small, large = (["method=lora", f"model.path={folders[name]}", *ROWS] for name in ("small", "large"))
    return [
        [*CHAR, FP32], [*CHAR, BF16], [*CHAR, "model.dropout=0.2", FP32],
        [*TEXT, FP32], [*TEXT, BF16], [*TEXT, "data.block=64", "train_batch_size=8", FP32],
        [*TEXT, "model.width=384", "model.layers=6", FP32], [*TEXT, "model.width=384", "model.layers=6", BF16],
        [*TEXT, "model.width=512", "data.block=1024", "train_batch_size=4", FP32],
        [*TEXT, "model.width=512", "data.block=1024", "train_batch_size=4", BF16],
        [*TEXT, "model.width=384", "model.layers=6", "model.dropout=0.1", FP32],
        [*small, FP32], [*small, BF16], [*large, FP32], [*large, BF16],
    ]


def main() -> None:
    options, began = parse(), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        every = shapes(folders_of(options.model, Path(scratch)))
        wanted = [[*every[number - 1], *options.words] for number in options.only or range(1, len(every) + 1)]
        prepared = [planned(words) for words in wanted]
        runs: list[list[list[float]]] = [[] for _ in wanted]
        for repeat in range(options.repeats):
            for number, words in enumerate(wanted):
                steps = steps_for(prepared[number], options.seconds)
                runs[number].append(step_seconds([*words, *QUIET, f"max_steps={steps}"], Path(scratch) / f"{repeat}-{number}"))
                print(f"{' '.join(words)}: {sorted(runs[number][-1])[steps // 2]:.4g} s a step", file=sys.stderr, flush=True)
        rows = [speed_row(told(words), one, found) for words, one, found in zip(wanted, prepared, runs, strict=True)]
    folder = new_folder(options.study)
    before = json.loads(TABLE.read_text(encoding="utf-8"))
    rows = with_tables(rows, before, folder.name)
    save(folder, study_of(rows, prepared[0], time.monotonic() - began), prepared[0].facts)
    if not options.keep_table:
        TABLE.write_text(as_table(fill_table(rows, before, folder.name)), encoding="utf-8")
    report(rows)
    print(folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="for every shape, such as techniques.threads=off")
    parser.add_argument("--study", default="cpu-speed", help="the end of the folder's name in studies/")
    parser.add_argument("--model", type=Path, help="a folder with a pretrained model, for the larger of those with adapters")
    parser.add_argument("--seconds", type=float, default=15.0, help="of training in each process")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="+", help="these of the shapes, from 1")
    parser.add_argument("--keep-table", action="store_true", help="leave efficiencies.json as it is")
    return parser.parse_args()


def folders_of(given: Path | None, scratch: Path) -> dict[str, Path]:
    """Models of random weights that read bytes, and the given one for the larger."""
    import torch

    from powertrain.data.table_tokenizers import ByteTokenizer
    from powertrain.models.config import make_config
    from powertrain.models.decoder import Decoder

    folders = {}
    for name, shape in MODELS.items():
        if name == "large" and given is not None:
            folders[name] = given
            continue
        torch.manual_seed(0)
        config, _ = make_config("llama", vocabulary=257, context=2048, end_of_text=256, tied_head=True, **shape)
        folders[name] = scratch / f"random-{name}"
        save_model(Decoder(config), folders[name], ByteTokenizer())
    return folders


def planned(words: Sequence[str]) -> Prepared:
    """The run as its process will plan it, with an expectation that knows nothing of runs that finished here."""
    found = prepare(resolve_words([*words, *QUIET, f"max_steps={MOST_STEPS}"]), cache_folder(), lambda text: None)
    facts = replace(found.facts, hardware=replace(found.facts.hardware, speeds={}))
    return replace(found, facts=facts, plan=make_plan(facts, found.recipe, MOST_STEPS))


def steps_for(prepared: Prepared, seconds: float) -> int:
    assert prepared.plan.estimate is not None
    return min(MOST_STEPS, max(LEAST_STEPS, round(2 * seconds / sum(prepared.plan.estimate.step_s))))


def step_seconds(words: Sequence[str], folder: Path) -> list[float]:
    """Seconds of each step of a run in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "powertrain", "train", *words, "--output", str(folder), "--quiet"],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"powertrain train {' '.join(words)} failed:\n{done.stderr}")
    return [event.seconds for event in read_events(folder / "events.jsonl") if isinstance(event, Step)]


def told(words: Sequence[str]) -> list[str]:
    """The words without the paths of this machine."""
    return [f"model.path={Path(word.partition('=')[2]).name}" if word.startswith("model.path=") else word for word in words]


def study_of(rows: list[dict[str, Any]], prepared: Prepared, seconds: float) -> Study:
    return Study(name="", kind="speed", what="seconds of a step of several shapes of run, against what their plans expect",
                 findings={"rows": rows}, seconds=seconds, **describe(prepared.facts))


def as_table(table: dict[str, Any]) -> str:
    """JSON with a row a line."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in table["rows"])
    return f'{{\n "study": {json.dumps(table["study"])},\n "rows": [\n{rows}\n ]\n}}\n'


def report(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        marks = [f"{name} {pair[0]:.4g} to {pair[1]:.4g}{'' if lies_within(row, pair) else ' MISSED'}"
                 for name, pair in (("before", row["before_s"]), ("from the others", row["from_others_s"])) if pair]
        print(f"{row['measured_s']['median']:.4g} s: {'; '.join(marks)} | {' '.join(row['recipe'])}")


if __name__ == "__main__":
    main()
