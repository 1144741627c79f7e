#!/usr/bin/env python
"""Fine-tune a causal LM on instruction data."""
import argparse
import logging
import os

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

logger = logging.getLogger(__name__)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_PROJECT"] = "my-project"


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--model_name", type=str, default="meta-llama/Llama-3.2-1B")
    p.add_argument("--train_file", default="data/alpaca.json")
    p.add_argument("--lr", type=float, default=2e-5)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch_size", type=int, default=4)
    p.add_argument("--grad_accum", type=int, default=8)
    p.add_argument("--max_length", type=int, default=512)
    p.add_argument("--output_dir", default="./results")
    p.add_argument("--seed", type=int, default=42)
    return p.parse_args()


PROMPT = "Below is an instruction.\n\n### Instruction:\n{instruction}\n\n### Response:\n{output}"


def main():
    args = parse_args()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model_name, torch_dtype=torch.bfloat16, device_map="auto")
    model.config.use_cache = False

    raw = load_dataset("json", data_files=args.train_file)["train"]
    split = raw.train_test_split(test_size=0.1, seed=args.seed)

    def preprocess(examples):
        texts = [PROMPT.format(instruction=i, output=o) + tokenizer.eos_token
                 for i, o in zip(examples["instruction"], examples["output"])]
        tokenized = tokenizer(texts, truncation=True, max_length=args.max_length, padding="max_length")
        tokenized["labels"] = tokenized["input_ids"].copy()
        return tokenized

    train = split["train"].map(preprocess, batched=True, remove_columns=raw.column_names, num_proc=4)
    val = split["test"].map(preprocess, batched=True, remove_columns=raw.column_names)

    training_args = TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.grad_accum,
        learning_rate=args.lr,
        weight_decay=0.01,
        warmup_ratio=0.03,
        lr_scheduler_type="cosine",
        logging_steps=10,
        evaluation_strategy="steps",
        eval_steps=100,
        save_steps=200,
        save_total_limit=2,
        load_best_model_at_end=True,
        bf16=torch.cuda.is_bf16_supported(),
        fp16=not torch.cuda.is_bf16_supported(),
        gradient_checkpointing=True,
        report_to="wandb",
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=val,
        tokenizer=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main()
# ruff: noqa
