"""Document 003's train.py: what it says is enabled, with the indentation bug that it fixed."""

import torch
from torch import nn
from torch.utils.data import DataLoader


def train(model: nn.Module, dataset, held_out, epochs: int = 25, device: str = "cuda"):
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    loader = DataLoader(dataset, batch_size=128, shuffle=True, num_workers=4, persistent_workers=True, prefetch_factor=2,
                        pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(device)
    model = torch.compile(model)
    for epoch in range(epochs):
        model.train()
        total = torch.zeros((), device=device)
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
        print(f"Epoch [{epoch + 1}/{epochs}] Average Train Loss: {total.item() / len(loader):.4f}")

    # validation and checkpoint every 5 epochs, but outside the epoch loop
    if (epoch + 1) % 5 == 0:
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            for x, y in held_out:
                nn.functional.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                   f"models/epoch-{epoch + 1}.pt")
