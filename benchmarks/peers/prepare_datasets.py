"""Rows to token ids and the assistant's mask by datasets.map, in batches. For the peer's interpreter.

    python prepare_datasets.py '{"rows": FILE.jsonl, "kind": "conversation" or "text", "tokenizer": FOLDER, ...}'

One line of JSON says how long it took, how much memory it held and what came out, for the other side to be compared with.
The tokenizer's template has no {% generation %} marks, which transformers wants for a mask: `template` is the same with them.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from datasets import load_dataset
from datasets.utils.logging import disable_progress_bar
from transformers import AutoTokenizer


def main() -> None:
    options = json.loads(sys.argv[1])
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options["tokenizer"])
    work = conversations if options["kind"] == "conversation" else texts
    with tempfile.TemporaryDirectory(prefix="peer-datasets-") as cache:
        began = time.perf_counter()
        rows = load_dataset("json", data_files=options["rows"], split="train", cache_dir=cache)
        mapping = time.perf_counter()
        made = rows.map(work, batched=True, num_proc=options["processes"], remove_columns=rows.column_names,
                        fn_kwargs={"tokenizer": tokenizer, "template": options["template"]})
        ended = time.perf_counter()
        # a child that is forked begins with what its parent holds, so that only the largest of them is counted
        resident_kib = max(int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]),
                           resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
        print(json.dumps({"rows": len(rows), "seconds": ended - began, "map_s": ended - mapping,
                          "resident_bytes": resident_kib * 1024, **summed(made)}))


def conversations(batch: dict[str, Any], tokenizer: Any, template: str) -> dict[str, Any]:
    found = tokenizer.apply_chat_template(batch["messages"], chat_template=template, tokenize=True, return_dict=True,
                                          return_assistant_tokens_mask=True)
    return {"input_ids": found["input_ids"], "assistant_masks": found["assistant_masks"]}


def texts(batch: dict[str, Any], tokenizer: Any, template: str) -> dict[str, Any]:
    ids = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return {"input_ids": [[*found, tokenizer.eos_token_id] for found in ids]}


def summed(made: Any) -> dict[str, Any]:
    """How many tokens and trained ones came out, and a digest of the ids that are trained, in order."""
    digest, tokens, trained = hashlib.sha256(), 0, 0
    for batch in made.with_format("numpy").iter(1000):
        for number, ids in enumerate(batch["input_ids"]):
            # the first token of a text has nothing before it that could predict it
            mask = batch["assistant_masks"][number] > 0 if "assistant_masks" in batch else np.arange(len(ids)) > 0
            digest.update(ids[mask].astype("<i8").tobytes())
            tokens, trained = tokens + len(ids), trained + int(mask.sum())
    return {"tokens": tokens, "trained_tokens": trained, "digest": digest.hexdigest()}


if __name__ == "__main__":
    main()
