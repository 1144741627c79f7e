"""One preparation of rows by Powertrain, in a process of its own: seconds, memory, and what came out, as a line of JSON.

    python prepare_once.py '{"rows": FILE.jsonl, "tokenizer": FOLDER, ...}'
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from powertrain.data.examples.making import further_processes
from powertrain.data.examples.store import ExampleStore, open_examples
from powertrain.recipe import DataRecipe
from powertrain.records import IGNORE


def main() -> None:
    options = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="powertrain-prepare-") as cache:
        began = time.perf_counter()
        store = open_examples(DataRecipe(source=options["rows"], max_length=2048, validation_share=0.0),
                              tokenizer_folder=Path(options["tokenizer"]), cache=Path(cache))
        seconds = time.perf_counter() - began
        further = further_processes([Path(options["rows"])])
        # of the further ones, of which only the largest is told, each is taken to be as large
        resident_kib = most_resident_kib() + further * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        print(json.dumps({"rows": store.counts["rows"], "seconds": seconds, "resident_bytes": resident_kib * 1024,
                          "processes": 1 + further,
                          "tokens": int(store.lengths.sum()), "trained_tokens": int(store.trained.sum()),
                          "digest": digest(store)}))


def most_resident_kib() -> int:
    """Of this process since it began; what getrusage tells counts who started it, too."""
    return int(Path("/proc/self/status").read_text(encoding="ascii").partition("VmHWM:")[2].split()[0])


def digest(store: ExampleStore) -> str:
    """Of the ids that are trained, in order."""
    found = hashlib.sha256()
    for index in range(len(store.lengths)):
        targets = store.example(index).targets
        found.update(targets[targets != IGNORE].astype("<i8").tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
