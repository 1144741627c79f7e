"""Document 000's snippets, in the order in which its lora_trainer.py and training_visualizer.py have them."""

import gc

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Visualizer(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        # Reduced frequency from every step to every 10 steps
        if step % 10 == 0:
            torch.cuda.empty_cache()
            gc.collect()


def main(dataset):
    model = AutoModelForCausalLM.from_pretrained(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        low_cpu_mem_usage=True,
        use_cache=False,
        attn_implementation="flash_attention_2",
    )
    model = torch.compile(model, mode="reduce-overhead")
    args = SFTConfig(
        output_dir="outputs",
        num_train_epochs=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=2e-4,
        gradient_checkpointing=True,
        optim="adamw_torch_fused",
        dataloader_num_workers=0,
        dataloader_pin_memory=True,
        remove_unused_columns=False,
        group_by_length=False,
        gradient_accumulation_kwargs={"use_cpu_offload": True},
        deepspeed="ds_config_zero2.json",
        save_total_limit=1,
    )
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    trainer = SFTTrainer(model=model, args=args, train_dataset=dataset, peft_config=lora, callbacks=[Visualizer()])
    trainer.train()
