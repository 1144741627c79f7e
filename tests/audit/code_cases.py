"""For each rule on code: a script where it fires, and its near miss, which differs in that only.

A case is the lines that matter; HEAD and the loop around them are the same for all.
"""

from __future__ import annotations

HEAD = """import gc
import os
from itertools import chain
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments
from transformers import get_cosine_schedule_with_warmup
from accelerate import Accelerator
from trl import SFTConfig, SFTTrainer
"""
MADE = """
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
loader = DataLoader(data, batch_size=8, shuffle=True)
"""


def loop(*body: str, before: str = "", after: str = "") -> str:
    """A training loop of these lines, over epochs."""
    lines = "\n".join(f"        {line}" for line in body)
    return f"{HEAD}{MADE}{before}\nfor epoch in range(3):\n    for i, batch in enumerate(loader):\n{lines}\n{after}"


PLAIN = ("loss = model(batch).mean()", "loss.backward()", "optimizer.step()", "optimizer.zero_grad()")
ACCUMULATED = ("loss = model(batch).mean() / 4", "loss.backward()")
STEP = ("if (i + 1) % 4 == 0:", "    optimizer.step()", "    optimizer.zero_grad()")
SCALED = ("with torch.autocast('cuda', dtype=torch.float16):", "    loss = model(batch).mean()",
          "scaler.scale(loss).backward()")
SCALER = "scaler = torch.amp.GradScaler('cuda')\n"
HF = "model = AutoModelForCausalLM.from_pretrained('gpt2')\n"
EVALUATE = "\ndef evaluate():\n    model.eval()\n    for batch in held_out:\n        total = model(batch)\n"
PARALLEL = "dist.init_process_group('nccl')\nmodel = DistributedDataParallel(model)\n"
TOKENIZER = "tokenizer = AutoTokenizer.from_pretrained('gpt2')\n"
PADDED = (TOKENIZER + "tokenizer.add_special_tokens({{'pad_token': '[PAD]'}})\ndef tokenise(row):\n"
          "    ids = tokenizer(row['text'], padding='max_length', max_length=64)\n    ids['labels'] = {labels}\n"
          "    return ids\n")
ARGUMENTS = "args = TrainingArguments(output_dir='out')\n"
MAPPED = "rows = rows.map(lambda row: tokenizer(row['text'], truncation=True))\n"
COLLATOR = ("collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)\nTrainer(model, args, "
            "data_collator=collator).train()\n")
ACCELERATED = ("accelerator = Accelerator()\nmodel = nn.Linear(8, 8)\noptimizer = torch.optim.AdamW(model.parameters())\n"
               "scheduler = get_cosine_schedule_with_warmup(optimizer, 10, {steps})\n"
               "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)\n"
               "for batch in loader:\n    accelerator.backward(model(batch).mean())\n    optimizer.step()\n    "
               "scheduler.step()\n"
               "    optimizer.zero_grad()\n")
GROUP = ("def group(examples):\n    joined = {{k: sum(examples[k], []) for k in examples}}\n    total = "
"len(joined['input_ids'])\n"
         "    return {{k: [t[i:i + 128] for i in range(0, total, 128)] for k, t in joined.items()}}{more}\n")

TOLD = "accelerator = Accelerator(gradient_accumulation_steps=4)\nmodel, optimizer = accelerator.prepare(model, optimizer)\n"
BACKWARD = ("loss = model(batch).mean()", "accelerator.backward(loss)", *PLAIN[2:])
# rule -> (a script where it fires, its near miss)
CASES: dict[str, tuple[str, str]] = {
    "item_each_step": (loop(*PLAIN, "total += loss.item()"), loop(*PLAIN, "if i % 50 == 0:", "    print(loss.item())")),
    "cache_emptied_in_loop": (loop(*PLAIN, "torch.cuda.empty_cache()"), loop(*PLAIN, before="torch.cuda.empty_cache()\n")),
    "synchronised_each_step": (loop(*PLAIN, "torch.cuda.synchronize()"),
                               loop(*PLAIN, "if i % 100 == 0:", "    torch.cuda.synchronize()")),
    "losses_kept_with_graph": (loop(*PLAIN, "losses.append(loss)"), loop(*PLAIN, "losses.append(loss.detach())")),
    "gradients_not_zeroed": (loop("loss = model(batch).mean()", "loss.backward()", "optimizer.step()"), loop(*PLAIN)),
    "gradients_cleared_early": (loop(*PLAIN[:2], "optimizer.zero_grad()", "optimizer.step()"),
                                loop("optimizer.zero_grad()", *PLAIN[:3])),
    "accumulation_not_divided": (loop("loss = model(batch).mean()", "loss.backward()", *STEP), loop(*ACCUMULATED, *STEP)),
    "accumulation_never_begun": (loop(*BACKWARD, before=TOLD), loop("with accelerator.accumulate(model):", *(
        f"    {line}" for line in BACKWARD), before=TOLD)),
    "mean_of_means": (loop("ids = tokenizer(batch, padding=True)", *ACCUMULATED, *STEP, before=TOKENIZER),
                      loop("ids = tokenizer(batch)", *ACCUMULATED, *STEP, before=TOKENIZER)),
    "scheduler_each_micro_batch": (loop(*ACCUMULATED, *STEP, "scheduler.step()"),
                                   loop(*ACCUMULATED, *STEP, "    scheduler.step()")),
    "scheduler_each_process": (HEAD + ACCELERATED.format(steps="1000"),
                               HEAD + ACCELERATED.format(steps="1000 * accelerator.num_processes")),
    "clip_before_unscale": (
        loop(*SCALED, "nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "scaler.step(optimizer)", "scaler.update()",
             "optimizer.zero_grad()", before=SCALER),
        loop(*SCALED, "scaler.unscale_(optimizer)", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
             "scaler.step(optimizer)", "scaler.update()", "optimizer.zero_grad()", before=SCALER)),
    "clip_without_effect": (
        loop("loss = model(batch).mean()", "loss.backward()", "optimizer.step()",
             "nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "optimizer.zero_grad()"),
        loop("loss = model(batch).mean()", "loss.backward()", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
             "optimizer.step()", "optimizer.zero_grad()")),
    "scaler_half_used": (loop(*SCALED, "scaler.step(optimizer)", "optimizer.zero_grad()", before=SCALER),
                         loop(*SCALED, "scaler.step(optimizer)", "scaler.update()", "optimizer.zero_grad()", before=SCALER)),
    "fp16_without_scaler": (
        loop("with torch.autocast('cuda', dtype=torch.float16):", "    loss = model(batch).mean()", *PLAIN[1:]),
        loop("with torch.autocast('cuda', dtype=torch.bfloat16):", "    loss = model(batch).mean()", *PLAIN[1:])),
    "labels_shifted_twice": (
        HEAD + HF + "class Tokens(Dataset):\n    def __getitem__(self, i):\n        return {'input_ids': self.x[i][:-1], "
        "'labels': self.x[i][1:]}\nloader = DataLoader(Tokens())\nfor batch in loader:\n    loss = model(**batch).loss\n"
        "    loss.backward()\n",
        HEAD + "model = MyModel()\nclass Tokens(Dataset):\n    def __getitem__(self, i):\n        return {'input_ids': "
        "self.x[i][:-1], 'labels': self.x[i][1:]}\nloader = DataLoader(Tokens())\nfor batch in loader:\n"
        "    logits = model(batch['input_ids'])\n"
        "    F.cross_entropy(logits.flatten(0, 1), batch['labels'].flatten()).backward()\n"),
    "pad_is_end": (HEAD + TOKENIZER + "tokenizer.pad_token = tokenizer.eos_token\n" + COLLATOR,
                   HEAD + TOKENIZER + "tokenizer.pad_token = '<pad>'\n" + COLLATOR),
    "padding_trained": (HEAD + PADDED.format(labels="ids['input_ids'].copy()"),
                        HEAD + PADDED.format(labels="[t if t != pad else -100 for t in ids['input_ids']]")),
    "device_map_auto": (HEAD + ARGUMENTS + "model = AutoModelForCausalLM.from_pretrained('gpt2', device_map='auto')\n",
                        HEAD + ARGUMENTS + "model = AutoModelForCausalLM.from_pretrained('gpt2', device_map={'': 0})\n"),
    "outside_the_epoch_loop": (
        loop(*PLAIN, after="\nif (epoch + 1) % 5 == 0:\n    torch.save(model.state_dict(), f'{epoch}.pt')\n"),
        loop(*PLAIN, after="\n    if (epoch + 1) % 5 == 0:\n        torch.save(model.state_dict(), f'{epoch}.pt')\n"
                           "torch.save(model.state_dict(), 'final.pt')\n")),
    "data_parallel": (loop(*PLAIN, before="model = nn.DataParallel(model)\n"),
                      loop(*PLAIN, before="model = DistributedDataParallel(model)\n")),
    "checkpoint_cannot_resume": (
        loop(*PLAIN, after="\n    torch.save(model.state_dict(), 'last.pt')\n"),
        loop(*PLAIN, after="\n    torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'scheduler': "
                           "scheduler.state_dict(), 'epoch': epoch}, 'last.pt')\n")),
    "pickle_loaded": (HEAD + "state = torch.load('model.pt', weights_only=False)\n",
                      HEAD + "state = torch.load('model.pt', weights_only=True)\n"),
    "evaluation_mode_left_on": (
        loop(*PLAIN, before=f"{EVALUATE}model.train()\n".replace("    for", "    with torch.no_grad():\n      for").replace(
            "        total", "          total"), after="\n    evaluate()\n"),
        loop(*PLAIN, before=f"{EVALUATE}model.train()\n".replace("    for", "    with torch.no_grad():\n      for").replace(
            "        total", "          total"), after="\n    evaluate()\n    model.train()\n")),
    "evaluation_keeps_gradients": (HEAD + MADE + EVALUATE, HEAD + MADE + EVALUATE.replace("\ndef", "\n@torch.no_grad()\ndef")),
    "prompts_trained": (
        HEAD + "def tokenise(row):\n    ids = tokenizer(f\"{row['instruction']} {row['output']}\")\n"
        "    ids['labels'] = ids['input_ids'].copy()\n    return ids\n",
        HEAD + "def tokenise(row):\n    ids = tokenizer(f\"{row['instruction']} {row['output']}\")\n    n = len(tokenizer("
        "row['instruction'])['input_ids'])\n    ids['labels'] = [-100] * n + ids['input_ids'][n:]\n    return ids\n"),
    "documents_concatenated": (HEAD + GROUP.format(more=""), HEAD + GROUP.format(more=" | {'position_ids': restarted}")),
    "loader_not_shuffled": (loop(*PLAIN).replace(", shuffle=True", ""), loop(*PLAIN)),
    "cudnn_benchmark": (loop(*PLAIN, before="torch.backends.cudnn.benchmark = True\n"),
                        loop(*PLAIN, before="torch.backends.cudnn.benchmark = True\nfront = nn.Conv2d(3, 8, 3)\n")),
    "anomaly_detection_on": (loop(*PLAIN, before="torch.autograd.set_detect_anomaly(True)\n"),
                             loop(*PLAIN, before="if debug:\n    torch.autograd.set_detect_anomaly(True)\n")),
    "sampler_without_epoch": (
        loop(*PLAIN, before="sampler = DistributedSampler(data)\nloader = DataLoader(data, sampler=sampler)\n"),
        loop("sampler.set_epoch(epoch)", *PLAIN,
             before="sampler = DistributedSampler(data)\nloader = DataLoader(data, sampler=sampler)\n")),
    "micro_batches_synchronised": (
        loop(*ACCUMULATED, *STEP, before=PARALLEL),
        loop("with model.no_sync() if (i + 1) % 4 else nullcontext():", "    loss = model(batch).mean() / 4", "    "
        "loss.backward()",
             *STEP, before=PARALLEL)),
    "tokenised_each_epoch": (
        HEAD + "class Texts(Dataset):\n    def __getitem__(self, i):\n        return self.tokenizer(self.texts[i])\n",
        HEAD + "class Texts(Dataset):\n    def __init__(self, texts, tokenizer):\n        self.ids = [tokenizer(t) for t in "
        "texts]\n"
        "    def __getitem__(self, i):\n        return self.ids[i]\n"),
    "compiled_names_saved": (loop(*PLAIN, before="model = torch.compile(model)\n",
                                  after="\ntorch.save(model.state_dict(), 'final.pt')\n"),
                             loop(*PLAIN, before="model.compile()\n", after="\ntorch.save(model.state_dict(), 'final.pt')\n")),
    "labels_not_shifted": (
        HEAD + HF + "for batch in loader:\n    logits = model(batch['input_ids']).logits\n"
        "    F.cross_entropy(logits.view(-1, 50257), batch['input_ids'].view(-1)).backward()\n",
        HEAD + HF + "for batch in loader:\n    logits = model(batch['input_ids']).logits[:, :-1]\n"
        "    F.cross_entropy(logits.reshape(-1, 50257), batch['input_ids'][:, 1:].reshape(-1)).backward()\n"),
    "masked_collator": (HEAD + HF + TOKENIZER + ARGUMENTS + COLLATOR.replace(", mlm=False", ""),
                        HEAD + HF + TOKENIZER + ARGUMENTS + COLLATOR),
    "labels_missing": (
        HEAD + HF + TOKENIZER + ARGUMENTS + MAPPED + "Trainer(model=model, args=args, train_dataset=rows).train()\n",
        HEAD + HF + TOKENIZER + ARGUMENTS + MAPPED + "Trainer(model=model, args=args, train_dataset=rows, "
        "data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)).train()\n"),
    "pad_token_missing": (HEAD + TOKENIZER + "batch = tokenizer(texts, padding=True)\n",
                          HEAD + TOKENIZER.replace("gpt2", "bert-base-cased") + "batch = tokenizer(texts, padding=True)\n"),
    "evaluation_without_data": (
        HEAD + "args = TrainingArguments('out', eval_strategy='epoch')\nTrainer(model, args, train_dataset=rows).train()\n",
        HEAD + "args = TrainingArguments('out', eval_strategy='epoch')\nTrainer(model, args, train_dataset=rows, "
        "eval_dataset=held_out).train()\n"),
    "wrong_arguments": (
        loop("with torch.cuda.amp.autocast(device_type='cuda', dtype=torch.bfloat16):", f"    {PLAIN[0]}", *PLAIN[1:]),
        loop("with torch.autocast(device_type='cuda', dtype=torch.bfloat16):", "    loss = model(batch).mean()", *PLAIN[1:])),
    "removed_imports": (loop(*PLAIN, before="from transformers import AdamW\n"), loop(*PLAIN)),
    "schedule_in_other_units": (
        loop(*PLAIN, "scheduler.step()").replace("LambdaLR(optimizer, lambda step: 1.0)", "CosineAnnealingLR(optimizer, 3)"),
        loop(*PLAIN, "scheduler.step()").replace("LambdaLR(optimizer, lambda step: 1.0)",
                                                 "CosineAnnealingLR(optimizer, 3 * len(loader))")),
    "saved_by_every_process": (
        loop(*PLAIN, before=PARALLEL, after="\ntorch.save(model.state_dict(), 'final.pt')\n"),
        loop(*PLAIN, before=PARALLEL, after="\nif dist.get_rank() == 0:\n    torch.save(model.state_dict(), 'final.pt')\n")),
}
