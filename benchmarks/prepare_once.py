"""One preparation of rows by Powertrain, in a process of its own: seconds, memory, and what came out, as a line of JSON.

    python prepare_once.py '{"rows": FILE.jsonl, "tokenizer": FOLDER, ...}'

With "only": "tokenizer" it times the library `tokenizers` alone: on the texts of the same rows, which were read before, in as
many processes.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from powertrain.data.examples.making import further_processes
from powertrain.data.examples.store import ExampleStore, open_examples
from powertrain.recipe import DataRecipe
from powertrain.records import IGNORE

AT_ONCE = 1000               # texts given to the tokenizer


def main() -> None:
    options = json.loads(sys.argv[1])
    if options.get("only") == "tokenizer":
        print(json.dumps({"seconds": tokenizer_s(Path(options["rows"]), Path(options["tokenizer"]) / "tokenizer.json")}))
        return
    with tempfile.TemporaryDirectory(prefix="powertrain-prepare-") as cache:
        began = time.perf_counter()
        store = open_examples(DataRecipe(source=options["rows"], max_length=2048, validation_share=0.0),
                              tokenizer_folder=Path(options["tokenizer"]), cache=Path(cache))
        seconds = time.perf_counter() - began
        further = further_processes([Path(options["rows"])])
        # of the further ones, of which only the largest is told, each is taken to be as large
        kib = resident_kib() + further * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        print(json.dumps({"rows": store.counts["rows"], "seconds": seconds, "resident_bytes": kib * 1024,
                          "processes": 1 + further,
                          "tokens": int(store.lengths.sum()), "trained_tokens": int(store.trained.sum()),
                          "digest": digest(store)}))


def tokenizer_s(rows: Path, tokenizer: Path) -> float:
    """Seconds of the slowest of the processes that share the rows' texts out."""
    texts = ["\n".join(_texts(json.loads(line))) for line in rows.read_text(encoding="utf-8").splitlines()]
    processes = 1 + further_processes([rows])
    context = multiprocessing.get_context("fork")
    with context.Pool(processes) as pool:
        return max(pool.starmap(_encoding_s, [(texts[part::processes], tokenizer) for part in range(processes)], chunksize=1))


def _texts(row: Mapping[str, Any]) -> list[str]:
    return [row["text"]] if "text" in row else [message["content"] for message in row["messages"]]


def _encoding_s(texts: Sequence[str], tokenizer: Path) -> float:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"       # the other core has a process of its own
    loaded = Tokenizer.from_file(str(tokenizer))
    began = time.perf_counter()
    for first in range(0, len(texts), AT_ONCE):
        loaded.encode_batch_fast(texts[first:first + AT_ONCE], add_special_tokens=False)
    return time.perf_counter() - began


def resident_kib(process: int | str = "self", field: str = "VmHWM") -> int:
    """The most of a process since it began; getrusage counts who started it, too. RssAnon: now, without mapped files."""
    return int(Path(f"/proc/{process}/status").read_text(encoding="ascii").partition(f"{field}:")[2].split()[0])


def digest(store: ExampleStore) -> str:
    """Of the ids that are trained, in order."""
    found = hashlib.sha256()
    for index in range(len(store.lengths)):
        targets = store.example(index).targets
        found.update(targets[targets != IGNORE].astype("<i8").tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
