"""Loss and gradients of TRL's preference trainers, step by step, on batches that are given. For TRL's interpreter.

    python preference_losses.py REQUEST.json ANSWER.npz

The request has the model's folder, a list of batches, and the settings of one trainer; see ../dpo_parity.py, which makes it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TRAINERS = {"dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer), "orpo": (ORPOConfig, ORPOTrainer),
            "simpo": (CPOConfig, CPOTrainer), "reward": (RewardConfig, RewardTrainer)}
END = 256                    # the tokenizer's end, which no document has
PAIR = {"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"]}
RATED = {"prompt": ["a", "b"], "completion": ["c", "d"], "label": [True, False]}


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    name, batches = request["objective"], request["batches"]
    trainer = made(request["model"], name, request["settings"], len(batches[0]["first"]))
    weights = dict(trainer.model.named_parameters())
    optimizer = torch.optim.AdamW(weights.values(), lr=request["learning_rate"], betas=(0.9, 0.999), weight_decay=0.0)
    found: dict[str, Any] = {"losses": []}
    for step, batch in enumerate(batches):
        inputs = {"dpo": paired, "kto": rated, "reward": scored}.get(name, sided)(batch)
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        found["losses"].append(float(loss))
        found |= {f"{step}.{key}": weight.grad.numpy().copy() for key, weight in weights.items()}
        optimizer.step()
        optimizer.zero_grad()
    np.savez(sys.argv[2], **found)


def made(folder: str, name: str, settings: dict[str, Any], batch: int) -> Any:
    config, trainer = TRAINERS[name]
    arguments = config(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
                       per_device_train_batch_size=batch, **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    kind = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32)
    more = {"ref_model": AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)} if name in ("dpo", "kto") else {}
    return trainer(model=model, args=arguments, train_dataset=Dataset.from_dict(RATED if name == "kto" else PAIR),
                   processing_class=tokenizer, **more)


def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def laid(documents: list[dict[str, Any]], prefix: str = "") -> dict[str, torch.Tensor]:
    """Ids, attention mask and completion mask of documents given by their ids and the place where the answer starts."""
    ids = [document["ids"] for document in documents]
    mask = [[0] * document["answer"] + [1] * (len(document["ids"]) - document["answer"]) for document in documents]
    return {f"{prefix}input_ids": padded(ids, 0), f"{prefix}attention_mask": padded([[1] * len(row) for row in ids], 0),
            f"{prefix}completion_mask": padded(mask, 0)}


def paired(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return laid(batch["first"] + batch["second"])


def scored(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Both documents of each pair; the filler is the padding token, by which transformers finds a document's last token."""
    ids = [document["ids"] for document in batch["first"] + batch["second"]]
    margins = {"margin": torch.tensor(batch["margin"])} if any(batch["margin"]) else {}
    return {"input_ids": padded(ids, END), "attention_mask": padded([[1] * len(row) for row in ids], 0), **margins}


def rated(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {**laid(batch["first"]), **laid(batch["second"], "KL_"), "label": torch.tensor(batch["desirable"])}


def sided(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for side, documents in (("chosen", batch["first"]), ("rejected", batch["second"])):
        one = laid(documents)
        labels = torch.where(one["completion_mask"] == 1, one["input_ids"], -100)
        found |= {f"{side}_input_ids": one["input_ids"], f"{side}_attention_mask": one["attention_mask"],
                  f"{side}_labels": labels}
    return found


if __name__ == "__main__":
    main()
