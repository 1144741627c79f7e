"""A well-tuned plain PyTorch loop: bf16 autocast, fused AdamW, exact accumulation, checkpoints that can be resumed from."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

EVERY, ACCUMULATE = 200, 4


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    total, count = torch.zeros((), device=device), 0
    for tokens in loader:
        total += loss_of(model, tokens.to(device))
        count += tokens[:, 1:].numel()
    model.train()
    return total.item() / count


def train(model: nn.Module, data: Dataset, held_out: Dataset, epochs: int = 2) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2, pin_memory=device.type == "cuda",
                        persistent_workers=True, drop_last=True)
    validation = DataLoader(held_out, batch_size=32)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    steps = epochs * (len(loader) // ACCUMULATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = 0
    for epoch in range(epochs):
        for index, tokens in enumerate(loader):
            tokens = tokens.to(device, non_blocking=True)
            loss = loss_of(model, tokens) / (tokens[:, 1:].numel() * ACCUMULATE)
            loss.backward()
            if (index + 1) % ACCUMULATE:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % EVERY == 0:
                print(epoch, step, evaluate(model, validation, device))
                save(model, optimizer, schedule, step)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: object, step: int) -> None:
    folder = Path("checkpoints") / f"step-{step:06d}"
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "step": step,
                "rng": torch.get_rng_state()}, folder / "state.pt")
