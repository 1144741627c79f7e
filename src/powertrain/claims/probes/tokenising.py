"""Tokenising in parallel or not: rows a second of the tokenizers library, as TOKENIZERS_PARALLELISM says.

The library reads the variable once, so each turn is a process of its own; its start is not timed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

from powertrain.claims.probes.probe import REPEATS, Context, Measured, by_turns, medians, ratio
from powertrain.records import RunFailed

CODE = """
import os, sys
os.putenv("TOKENIZERS_PARALLELISM", sys.argv[1])
import json, time
from tokenizers import Tokenizer
tokenizer, rows = Tokenizer.from_file(sys.argv[2]), json.load(open(sys.argv[3], encoding="utf-8"))
tokenizer.encode_batch(rows[:100])
began = time.perf_counter()
tokenizer.encode_batch(rows)
print(time.perf_counter() - began)
"""
CHARACTERS, ROW = 3_000_000, 1_000
NAMES = ("TOKENIZERS_PARALLELISM=false", "TOKENIZERS_PARALLELISM=true")


def measure(context: Context, *, repeats: int = REPEATS) -> Measured:
    """True over false: times as fast."""
    tokenizer, rows = _material(context.folder)

    def seconds(parallel: str) -> float:
        done = subprocess.run([sys.executable, "-c", CODE, parallel, str(tokenizer), str(rows)], capture_output=True, text=True,
                              check=False)
        if done.returncode != 0:
            raise RunFailed(f"tokenising failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
        return float(done.stdout)

    rounds = by_turns([lambda: seconds("false"), lambda: seconds("true")], context.deadline, repeats)
    return Measured(ratio(rounds, 0, 1), "times as fast", *NAMES, {"seconds": medians(rounds, NAMES), "characters": CHARACTERS})


def _material(folder: Path) -> tuple[Path, Path]:
    """A BPE of 2048 tokens, and rows of Python's standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = ""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_text(encoding="utf-8", errors="ignore")
        if len(text) > CHARACTERS:
            break
    rows = [text[at:at + ROW] for at in range(0, min(len(text), CHARACTERS), ROW)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(rows[:300], trainers.BpeTrainer(vocab_size=2048, show_progress=False))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder / "tokenizer.json", folder / "rows.json"
