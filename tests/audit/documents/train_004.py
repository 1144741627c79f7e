"""Document 004's train.py: its loader, its loop, and what it calls less overhead."""

import torch
import torch.backends.cudnn as cudnn
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

cudnn.benchmark = True
cudnn.deterministic = False


def train(dataset, max_steps: int = 25000, logging_steps: int = 10, save_steps: int = 500):
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=8)
    model = AutoModelForCausalLM.from_config("gpt-neox")
    loader = DataLoader(dataset=dataset, batch_size=4, shuffle=True, num_workers=4, pin_memory=True, drop_last=True,
                        prefetch_factor=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.1, eps=1e-8)
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 10, max_steps)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    running = 0.0
    for step, batch in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        lr_scheduler.step()
        running += loss.detach().float().item()
        if step % save_steps == 0:
            accelerator.save_state("checkpoints")
