"""A well-tuned full fine-tuning with transformers' Trainer."""

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def main():
    tokenizer = AutoTokenizer.from_pretrained("EleutherAI/pythia-160m")
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    model = AutoModelForCausalLM.from_pretrained("EleutherAI/pythia-160m", dtype="float32")
    model.resize_token_embeddings(len(tokenizer))
    data = load_dataset("text", data_files="text.txt", split="train").train_test_split(test_size=0.05, seed=1)
    data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=1024), batched=True,
                    remove_columns=["text"])
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=3,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=5e-5,
        warmup_steps=100,
        weight_decay=0.01,
        bf16=True,
        train_sampling_strategy="group_by_length",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        logging_steps=20,
        report_to="none",
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model=model, args=args, train_dataset=data["train"], eval_dataset=data["test"], data_collator=collator,
                      processing_class=tokenizer)
    trainer.train()


if __name__ == "__main__":
    main()
