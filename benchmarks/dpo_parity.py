"""Step by step the same losses and gradients as TRL's preference trainers: on the same batches, in fp32, from the same weights.

    python benchmarks/dpo_parity.py --study NAME [--steps 4] [--peers .peers/bin/python]

A small Llama with random weights learns from random pairs. Each side updates its own copy by AdamW, so a difference grows.
The objectives are those of training/preferences.py and training/rewards.py with several losses and settings. The largest
differences of losses and of gradients (over the largest of the step) go to studies/NAME/evidence.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nanogpt import machine, store

from powertrain.data.example import Compared, Example, collate
from powertrain.data.table_tokenizers import ByteTokenizer
from powertrain.models.adapters.files import save_model
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder, give_reward_head
from powertrain.models.huggingface.folder import load_folder
from powertrain.models.kernels.attention import sdpa_attention
from powertrain.records import IGNORE
from powertrain.training.comparing import Comparing
from powertrain.training.optimizers import plain_adamw
from powertrain.training.preferences import Dpo, Kto, Orpo, Simpo
from powertrain.training.rewards import Reward
from powertrain.training.setup import Setup, plain_setup

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "peers" / "preference_losses.py"
BATCH, RATE, VOCABULARY = 8, 1e-3, 257
ALLOWED = 1e-4
CASES: dict[str, tuple[Comparing, dict[str, Any]]] = {
    **{f"dpo {name}": (Dpo(loss_type=name), {"loss_type": [name]}) for name in (
        "sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop", "sigmoid_norm")},
    "dpo robust": (Dpo(loss_type="robust", label_smoothing=0.1), {"loss_type": ["robust"], "label_smoothing": 0.1}),
    "dpo exo_pair": (Dpo(loss_type="exo_pair", label_smoothing=1e-3), {"loss_type": ["exo_pair"], "label_smoothing": 1e-3}),
    "dpo with rpo_alpha": (Dpo(beta=0.3, rpo_alpha=0.5), {"beta": 0.3, "loss_type": ["sigmoid", "sft"],
                                                         "loss_weights": [1.0, 0.5]}),
    "orpo": (Orpo(beta=0.2), {"beta": 0.2}),
    "simpo": (Simpo(beta=2.0, simpo_gamma=1.0), {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0}),
    "simpo with cpo_alpha": (Simpo(cpo_alpha=0.5), {"loss_type": "simpo", "cpo_alpha": 0.5}),
    "kto": (Kto(), {}), "kto weighted": (Kto(desirable_weight=1.4, undesirable_weight=0.6),
                                         {"desirable_weight": 1.4, "undesirable_weight": 0.6}),
    "kto apo_zero_unpaired": (Kto(loss_type="apo_zero_unpaired"), {"loss_type": "apo_zero_unpaired"}),
    "reward": (Reward(), {}), "reward with margins": (Reward(), {}),
    "reward centred": (Reward(center_rewards_coefficient=0.05), {"center_rewards_coefficient": 0.05}),
}


def main() -> None:
    options = parse()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder, scorer = Path(scratch) / "model", Path(scratch) / "scorer"
        torch.manual_seed(0)
        config, _ = make_config("llama", vocabulary=VOCABULARY, layers=2, width=64, heads=4, context=128, end_of_text=256,
                                tied_head=False)
        model = Decoder(config)
        save_model(model, folder, ByteTokenizer())
        give_reward_head(model)
        save_model(model, scorer, ByteTokenizer())
        for name, (objective, settings) in CASES.items():
            if options.cases and name.split()[0] not in options.cases:
                continue
            found[name] = difference(objective, settings, scorer if isinstance(objective, Reward) else folder, Path(scratch),
                                     options, margins="margins" in name)
            print(name, found[name], flush=True)
    largest = max(max(values.values()) for values in found.values())
    store(options.study, {"what": "loss and gradients of each step, against TRL's trainers in fp32", "machine": machine(),
                          "steps": options.steps, "pairs_a_step": BATCH, "allowed": ALLOWED, "largest_difference": largest,
                          "differences": found, "arms": {}})
    if largest > ALLOWED:
        raise SystemExit(f"the largest difference is {largest:.2g}, and {ALLOWED:g} is allowed")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="of dpo, orpo, simpo, kto, reward; default: all")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers" / "bin" / "python", help="an interpreter that has TRL")
    parser.add_argument("--study", required=True, help="folder in studies/")
    return parser.parse_args()


def difference(objective: Comparing, settings: dict[str, Any], folder: Path, scratch: Path,
               options: argparse.Namespace, *, margins: bool) -> dict[str, float]:
    """Return the largest difference of a step's loss, and that of its gradients over the step's largest gradient."""
    draw = np.random.default_rng(7)
    steps = [[drawn(draw, objective.rows, margins=margins) for _ in range(BATCH)] for _ in range(options.steps)]
    request, answer = scratch / "request.json", scratch / "answer.npz"
    request.write_text(json.dumps({"model": str(folder), "objective": objective.name, "settings": settings,
                                   "learning_rate": RATE, "batches": [told(examples) for examples in steps]}))
    subprocess.run([options.peers, SCRIPT, request, answer], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    theirs = np.load(answer)
    losses, gradients = zip(*ours(objective, steps, folder), strict=True)
    names = to_theirs(gradients[0], "score.weight" if isinstance(objective, Reward) else "lm_head.weight")
    apart = []
    for step, own in enumerate(gradients):
        expected = {name: np.concatenate([theirs[f"{step}.{part}"] for part in parts]) for name, parts in names.items()}
        scale = max(float(np.abs(value).max()) for value in expected.values())
        apart.append(max(float(np.abs(own[name].numpy() - value).max()) for name, value in expected.items()) / scale)
    return {"loss": float(np.abs(np.array(losses) - theirs["losses"]).max()), "gradient": max(apart)}


def drawn(draw: np.random.Generator, rows: str, *, margins: bool) -> Compared:
    prompt = draw.integers(0, 256, int(draw.integers(2, 12)))
    first, second = (document(prompt, draw.integers(0, 256, int(draw.integers(3, 20)))) for _ in range(2))
    if rows == "rating":
        return Compared(first.inputs, first.targets, documents=(first, second), desirable=bool(draw.integers(0, 2)))
    if rows == "comparison":
        first, second = scored(first), scored(second)
    return Compared(np.concatenate([first.inputs, second.inputs]), np.concatenate([first.targets, second.targets]),
                    documents=(first, second), shared=len(prompt) - 1, margin=float(draw.uniform(-1, 1)) if margins else 0.0)


def document(prompt: np.ndarray[Any, Any], answer: np.ndarray[Any, Any]) -> Example:
    ids = np.concatenate([prompt, answer])
    targets = ids[1:].copy()
    targets[:len(prompt) - 1] = IGNORE
    return Example(ids[:-1], targets)


def scored(one: Example) -> Example:
    """The document with its last token as an input, whose row is scored."""
    ids = np.append(one.inputs, one.targets[-1])
    return Example(ids, np.append(np.full(len(ids) - 1, IGNORE), ids[-1]))


def told(examples: list[Compared]) -> dict[str, Any]:
    """A batch as the other side reads it: ids, and where the answer starts."""
    def plain(one: Example) -> dict[str, Any]:
        more = [int(one.targets[-1])] if (one.targets != IGNORE).sum() > 1 else []       # else the last input is scored
        return {"ids": [*one.inputs.tolist(), *more], "answer": int((one.targets != IGNORE).argmax()) + 1}

    first, second = ([plain(example.documents[side]) for example in examples] for side in (0, 1))
    return {"first": first, "second": second, "desirable": [example.desirable for example in examples],
            "margin": [example.margin for example in examples]}


def ours(objective: Comparing, steps: list[list[Compared]], folder: Path) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """The loss and the gradients of each step, of our loop's own parts, with prompts shared where the objective has pairs."""
    model = load_folder(folder, dtype=torch.float32).train()
    shares = replace(objective, shares_prompts=objective.rows != "rating")
    setup: Setup = replace(plain_setup(model, steps[0], collate, train_batch_size=BATCH, seed=0, optimizer=plain_adamw(
        RATE, (0.9, 0.999), 1e-8), objective=shares.for_model(model)), attention=sdpa_attention, micro_batch=BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.999), weight_decay=0.0)
    found = []
    for examples in steps:
        loss = sum(setup.batch_loss(batch) for batch in setup.settled(setup.passes(examples))) / BATCH
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters()
                                    if weight.grad is not None}))
        optimizer.step()
        optimizer.zero_grad()
    return found


def to_theirs(names: dict[str, torch.Tensor], head: str) -> dict[str, list[str]]:
    """Our weights' names -> theirs, in a Llama; a fused projection is several of theirs, one below the other."""
    parts = {"attention_norm.weight": ["input_layernorm"], "mlp_norm.weight": ["post_attention_layernorm"],
             "qkv.weight": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
             "attention_out.weight": ["self_attn.o_proj"], "mlp_in.weight": ["mlp.gate_proj", "mlp.up_proj"],
             "mlp_out.weight": ["mlp.down_proj"]}
    outside = {"embedding.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"],
               "head.weight": [head]}
    found = {}
    for name in names:
        if name in outside:
            found[name] = outside[name]
        else:
            _, layer, rest = name.split(".", 2)
            found[name] = [f"model.layers.{layer}.{part}.weight" for part in parts[rest]]
    return found


if __name__ == "__main__":
    main()
