"""LoRA with transformers and peft in a plain loop: what a careful user writes without a framework, bf16, packed rows.

    python peft_lora.py '{"model": FOLDER, "rows": FILE.npy, "batch": 2, "accumulation": 4, "compile": false, "device": "cuda"}'

rows is (rows, tokens) of token ids. Every token is trained; attention sees the whole row, which is the least work for it.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from steps import Steps
from transformers import AutoModelForCausalLM


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    device = torch.device(options["device"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16).to(device)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0, fused=True)
    run = torch.compile(model, dynamic=False) if options["compile"] else model
    rows = torch.from_numpy(np.load(options["rows"]).astype(np.int64))
    batches = itertools.cycle(rows.split(options["batch"]))
    steps = Steps()
    steps.begin()
    while True:
        total = torch.zeros((), device=device)
        for batch in itertools.islice(batches, options["accumulation"]):
            tokens = batch.to(device)
            loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss / options["accumulation"]
            loss.backward()
            total += loss.detach()
            steps.count(trained=tokens.numel() - len(tokens), real=tokens.numel(), padding=0)
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps.done(float(total), float(norm), torch.cuda.max_memory_allocated() if device.type == "cuda" else None)


if __name__ == "__main__":
    main()
