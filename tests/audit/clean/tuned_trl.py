"""A well-tuned LoRA run with TRL 1.16: nothing in it should be called critical or moderate."""

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B", dtype="bfloat16", attn_implementation="sdpa")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-1.7B")
data = load_dataset("json", data_files="data.jsonl", split="train").train_test_split(test_size=0.05, seed=42)
args = SFTConfig(
    output_dir="out",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=2e-4,
    lr_scheduler_type="cosine",
    warmup_steps=0.03,
    max_length=2048,
    packing=True,
    packing_strategy="bfd",
    gradient_checkpointing=False,
    bf16=True,
    optim="adamw_torch_fused",
    eval_strategy="steps",
    eval_steps=200,
    save_steps=200,
    save_total_limit=2,
    load_best_model_at_end=True,
    logging_steps=10,
)
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = SFTTrainer(model=model, args=args, train_dataset=data["train"], eval_dataset=data["test"], peft_config=lora,
                     processing_class=tokenizer)
trainer.train()
trainer.save_model("out/final")
