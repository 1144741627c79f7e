"""nanoGPT's train.py, run as it is, one step at a time. For an interpreter with torch and numpy.

    python train_nanogpt.py '{"checkout": FOLDER, "arm": "shipped" or "bf16", "words": [...], "tokens": TOKENS_OF_A_STEP}'

Its line for each iteration is what tells that a step is done. The arm bf16 lets autocast act on the CPU too, which its
source turns off there; nothing else is changed. Run it in a copy of the checkout whose data is prepared.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from steps import Steps

ITERATION = re.compile(r"iter (\d+): loss ([\d.]+)")
CPU_HAS_NO_AUTOCAST = "nullcontext() if device_type == 'cpu' else "
FIXED = ["config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--log_interval=1", "--eval_interval=1000000",
         "--eval_iters=1", "--max_iters=1000000", "--warmup_iters=0", "--decay_lr=False"]


def main() -> None:
    options = json.loads(sys.argv[1])
    os.chdir(options["checkout"])
    source = Path("train.py").read_text(encoding="utf-8")
    words = [*FIXED, *options["words"]]
    if options["arm"] == "bf16":
        assert CPU_HAS_NO_AUTOCAST in source
        source, words = source.replace(CPU_HAS_NO_AUTOCAST, ""), [*words, "--dtype=bfloat16"]
    steps, begun = Steps(), False

    def told(*values: Any, **_: Any) -> None:
        nonlocal begun
        if found := ITERATION.match(str(values[0]) if values else ""):
            if begun:
                steps.count(trained=options["tokens"], real=options["tokens"], padding=0)
                steps.done(float(found[2]), 1.0)         # it tells no norm
            else:
                begun = True
                steps.begin()                # its first iteration is over when it is first heard of

    builtins.print = told
    sys.argv = ["train.py", *words]
    sys.path.insert(0, os.getcwd())
    exec(compile(source, "train.py", "exec"), {"__name__": "__main__", "__file__": "train.py"})


if __name__ == "__main__":
    main()
