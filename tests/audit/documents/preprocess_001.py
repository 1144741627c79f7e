"""Document 001's snippets: its environment, tokenising beforehand, and compilation."""

import os

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

os.environ["TOKENIZERS_PARALLELISM"] = "true"
os.environ["OMP_NUM_THREADS"] = "8"          # Use 8 CPU cores

dataset = load_dataset("json", data_files="data.jsonl")
tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-3.1-8B")


def tokenize_function(examples):
    return tokenizer(examples["text"], truncation=True, max_length=2048)


tokenized_dataset = dataset.map(tokenize_function, batched=True)
tokenized_dataset.save_to_disk("preprocessed_dataset")
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", load_in_4bit=True)
model = torch.compile(model, mode="max-autotune")
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    bf16=True,
    tf32=True,
    learning_rate=2e-4,
    dataloader_num_workers=4,
)
Trainer(model=model, args=args, train_dataset=tokenized_dataset["train"]).train()
