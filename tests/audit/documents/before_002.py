"""train_lslora.py as document 002 found it."""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer


def train(model_name, dataset_path, output_dir, max_steps, batch_size, max_seq_length):
    bnb_config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )
    model = AutoModelForCausalLM.from_pretrained(
        model_name,
        quantization_config=bnb_config,
        device_map="auto",
        trust_remote_code=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    tokenizer.pad_token = tokenizer.eos_token
    model = prepare_model_for_kbit_training(model)
    peft_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(model, peft_config)
    dataset = load_dataset("json", data_files=dataset_path, split="train")
    training_args = SFTConfig(
        output_dir=output_dir,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=4,
        learning_rate=2e-4,
        logging_steps=10,
        max_steps=max_steps,
        save_strategy="steps",
        save_steps=100,
        fp16=False,
        bf16=True,
        optim="adamw_torch",
        report_to="wandb",
        ddp_find_unused_parameters=False,
        max_length=max_seq_length,
        dataset_text_field="text",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    SFTTrainer(model=model, args=training_args, train_dataset=dataset, processing_class=tokenizer).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name", default="microsoft/Phi-3-mini-4k-instruct")
    parser.add_argument("--dataset_path", default="dataset/commonsense_5k.json")
    parser.add_argument("--output_dir", default="output/phase1_test")
    parser.add_argument("--max_steps", type=int, default=500)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--max_seq_length", type=int, default=2048)
    options = parser.parse_args()
    train(options.model_name, options.dataset_path, options.output_dir, options.max_steps, options.batch_size,
          options.max_seq_length)
