"""Step by step the same loss as transformers + peft: LoRA on the same batches, from the same adapter, in the same order.

    python benchmarks/peft_parity.py MODEL DATA [KEY=VALUE ...] --steps 30 --arms packed unpacked bf16 --study NAME

MODEL is a Hugging Face folder (shared/benchmarks/make_model.py makes one of 115.6 M parameters), DATA a file of
conversations or questions. The reference runs transformers' own model with peft's adapter, fp32, on padded batches of the
same examples, loss summed over trained tokens and divided by those of the step; its bf16 twin under torch.autocast tells
how much of a bf16 difference is bf16's own noise. The result goes to studies/NAME/evidence.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from nanogpt import machine, store
from peft import PeftModel
from transformers import AutoModelForCausalLM

from powertrain.cli.options import cache_folder
from powertrain.data.order import step_examples
from powertrain.models.adapters.files import save_model
from powertrain.recipe import resolve
from powertrain.records import IGNORE
from powertrain.run.prepare import Prepared, build_setup, prepare, schedule_of
from powertrain.training.loop import new_state, train
from powertrain.training.schedule import Schedule

ARMS = {"packed": ["techniques.bf16=off"],
        "unpacked": ["techniques.bf16=off", "techniques.packing=off"],
        "bf16": ["techniques.bf16=on"]}


def main() -> None:
    options = parse()
    words = [f"model.path={options.model}", f"data.source={options.data}", f"max_steps={options.steps}", *options.words]
    losses: dict[str, list[float]] = {}
    techniques: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        adapter = Path(scratch) / "adapter"
        for arm in options.arms:
            prepared = prepare(resolve(None, [*words, *ARMS[arm]]), cache_folder(), print)
            techniques[arm] = [step.technique.name for step in prepared.plan.steps]
            losses[arm] = powertrain(prepared, adapter)
            show(arm, losses[arm])
        precisions = ["fp32", "bf16"] if "bf16" in options.arms else ["fp32"]
        for precision in precisions:
            losses[f"peft {precision}"] = list(reference(prepared, adapter, bf16=precision == "bf16"))
            show(f"peft {precision}", losses[f"peft {precision}"])
    apart = {arm: max(abs(a - b) for a, b in zip(found, losses["peft fp32"], strict=True)) for arm, found in losses.items()}
    store(options.study, {"what": "loss of each step, against transformers + peft in fp32", "machine": machine(),
                          "words": options.words, "steps": options.steps, "model": Path(options.model).name,
                          "data": Path(options.data).name, "techniques": techniques,
                          "largest_difference": {arm: round(value, 7) for arm, value in apart.items()},
                          "arms": {arm: [{"losses": found, "step_s": []}] for arm, found in losses.items()}})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--study", required=True, help="folder in studies/")
    return parser.parse_args()


def powertrain(prepared: Prepared, adapter: Path) -> list[float]:
    """The losses of a run; the adapter it starts from is left in the folder `adapter`."""
    setup = build_setup(prepared)
    save_model(setup.model, adapter)
    state = new_state(setup, prepared.recipe.weight_decay)
    return [result.loss.item() for result in train(setup, state, schedule(prepared), prepared.recipe.max_grad_norm)]


def reference(prepared: Prepared, adapter: Path, *, bf16: bool) -> Iterator[float]:
    """The same run by transformers and peft: one padded batch after the other."""
    recipe, examples = prepared.recipe, prepared.material.training
    base = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=torch.float32, attn_implementation="sdpa")
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, betas=(recipe.adam_beta1, recipe.adam_beta2),
                                  eps=recipe.adam_epsilon, weight_decay=recipe.weight_decay)
    rates = schedule(prepared)
    for step in range(prepared.total_steps):
        chosen = [examples[int(i)] for i in step_examples(recipe.seed, step, recipe.train_batch_size, len(examples))]
        tokens = sum(int((example.targets != IGNORE).sum()) for example in chosen)
        total = 0.0
        for first in range(0, len(chosen), 4):
            inputs, mask, targets = padded(chosen[first:first + 4])
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                logits = model(input_ids=inputs, attention_mask=mask).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, recipe.max_grad_norm)
        optimizer.param_groups[0]["lr"] = rates.at(step)
        optimizer.step()
        optimizer.zero_grad()
        yield total


def padded(examples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(N, L) tokens, mask and targets, padded on the right."""
    longest = max(len(example.inputs) for example in examples)
    inputs, mask = torch.zeros(len(examples), longest, dtype=torch.long), torch.zeros(len(examples), longest, dtype=torch.long)
    targets = torch.full((len(examples), longest), IGNORE)
    for row, example in enumerate(examples):
        count = len(example.inputs)
        inputs[row, :count], mask[row, :count] = torch.from_numpy(example.inputs), 1
        targets[row, :count] = torch.from_numpy(example.targets)
    return inputs, mask, targets


def schedule(prepared: Prepared) -> Schedule:
    return schedule_of(prepared.recipe, prepared.total_steps)


def show(arm: str, losses: list[float]) -> None:
    print(f"{arm}: {losses[0]:.5f} -> {losses[-1]:.5f}", flush=True)


if __name__ == "__main__":
    main()
