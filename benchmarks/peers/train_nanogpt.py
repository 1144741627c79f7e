"""nanoGPT's train.py, run as it is, one step at a time. For an interpreter with torch and numpy.

    python train_nanogpt.py '{"checkout": FOLDER, "arm": "shipped" or "bf16", "words": [...], "weights": FOLDER,
                              "blocks": FILE.npy}'

Its line for each iteration is what tells that a step is done. So that both sides begin alike and read the same, its first
weights are those of a Hugging Face folder (gpt2), and its batches are (steps, batch, block + 1) of token ids. The arm bf16
lets autocast act on the CPU too, which its source turns off there; nothing else is changed. Run it in a copy of the checkout
whose data is prepared.
"""

from __future__ import annotations

import builtins
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from steps import Steps

ITERATION = re.compile(r"iter (\d+): loss ([\d.]+)")
CPU_HAS_NO_AUTOCAST = "nullcontext() if device_type == 'cpu' else "
A_BATCH, A_MODEL = "get_batch('train')", "model.to(device)"
TURNED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")    # Hugging Face has (in, out)
FIXED = ["config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--log_interval=1", "--eval_interval=1000000",
         "--eval_iters=1", "--max_iters=1000000", "--warmup_iters=0", "--decay_lr=False"]


def main() -> None:
    options = json.loads(sys.argv[1])
    os.chdir(options["checkout"])
    source = Path("train.py").read_text(encoding="utf-8")
    words = [*FIXED, *options["words"]]
    assert A_BATCH in source
    assert A_MODEL in source
    source = source.replace(A_BATCH, "next_batch()").replace(A_MODEL, f"begin_alike(model); {A_MODEL}", 1)
    all_blocks = np.load(options["blocks"], mmap_mode="r")
    blocks, tokens = itertools.cycle(all_blocks), all_blocks.shape[1] * (all_blocks.shape[2] - 1)
    if options["arm"] == "bf16":
        assert CPU_HAS_NO_AUTOCAST in source
        source, words = source.replace(CPU_HAS_NO_AUTOCAST, ""), [*words, "--dtype=bfloat16"]
    steps, begun = Steps(), False

    def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(next(blocks).astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def told(*values: Any, **_: Any) -> None:
        nonlocal begun
        if found := ITERATION.match(str(values[0]) if values else ""):
            if begun:
                steps.count(trained=tokens, real=tokens, padding=0)
                steps.done(float(found[2]), 1.0)         # it tells no norm
            else:
                begun = True
                steps.begin()                # its first iteration is over when it is first heard of
                steps.already(float(found[2]), 1.0)

    builtins.print = told
    sys.argv = ["train.py", *words]
    sys.path.insert(0, os.getcwd())
    exec(compile(source, "train.py", "exec"), {"__name__": "__main__", "__file__": "train.py", "next_batch": next_batch,
                                                "begin_alike": lambda model: begin_alike(model, Path(options["weights"]))})


def begin_alike(model: torch.nn.Module, folder: Path) -> None:
    """Gives nanoGPT's model the weights of the folder; every one of its own has to be there."""
    found = {name.removeprefix("transformer."): weight for name, weight in load_file(folder / "model.safetensors").items()}
    own = model.state_dict()
    for name, weight in own.items():
        plain = "wte.weight" if name == "lm_head.weight" else name.removeprefix("transformer.")
        given = found[plain].t() if plain.endswith(TURNED) else found[plain]
        assert given.shape == weight.shape, (name, given.shape, weight.shape)
        weight.copy_(given)


if __name__ == "__main__":
    main()
