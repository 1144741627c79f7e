"""For each rule on a whole program or on how it is launched: a script where it fires, and its near miss."""

from __future__ import annotations

from code_cases import ARGUMENTS, HEAD, HF, PARALLEL, PLAIN, loop

LORA = "from peft import LoraConfig, get_peft_model\n"
SFT = ("config = LoraConfig(r=8)\n"
       "SFTTrainer(model=model, args=SFTConfig('out'), peft_config=config, train_dataset=rows).train()\n")
TUNED = LORA + HF + "model = get_peft_model(model, LoraConfig(r=8))\n"
OWN_LOSS = ("class Weighted(Trainer):\n    def compute_loss(self, model, inputs, return_outputs=False{more}):\n"
            "        return model(**inputs).loss\n")
TEMPLATE = ("from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('meta-llama/Llama-3.2-1B')\n"
            "def encode_row(row):\n    text = tokenizer.apply_chat_template(row['messages'], tokenize=False)\n"
            "    return tokenizer(text{more})\nrows = rows.map(encode_row)\n")
SPREAD = ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '{devices}'\nlocal_rank = int(os.environ.get('LOCAL_RANK', 0))\n"
          "torch.cuda.set_device(local_rank)\n")
SHARDED = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nmodel = FSDP(model)\n"
GATHERED = (HF + ARGUMENTS + "trainer = Trainer(model, args, train_dataset=rows)\ntrainer.train()\n"
            "state = trainer.accelerator.get_state_dict(trainer.deepspeed)\n"
            "trainer.model.save_pretrained('out', state_dict=state)\n")
WARMED = ("args = TrainingArguments('out', warmup_steps=10, lr_scheduler_type='{schedule}')\n"
          "Trainer(model, args).train()\n")
ON_GPU = "model = model.to('cuda')\n"

PROGRAM_CASES: dict[str, tuple[str, str]] = {
    "undefined_names": (loop(*PLAIN, "size = wanted_size", before="data = []\n"),
                        loop(*PLAIN, "size = wanted_size", before="data, wanted_size = [], 4\n")),
    "missing_arguments": (loop("loss = one(batch)", *PLAIN[1:],
                               before="def one(batch, scale):\n    return model(batch).mean() * scale\n"),
                          loop("loss = one(batch)", *PLAIN[1:],
                               before="def one(batch, scale=1):\n    return model(batch).mean() * scale\n")),
    "removed_call_arguments": (
        HEAD + HF.replace("'gpt2'", "'gpt2', use_flash_attention_2=True") + ARGUMENTS + "Trainer(model, args).train()\n",
        HEAD + HF.replace("'gpt2'", "'gpt2', attn_implementation='sdpa'") + ARGUMENTS + "Trainer(model, args).train()\n"),
    "loss_of_an_older_trainer": (HEAD + HF + ARGUMENTS + OWN_LOSS.format(more="") + "Weighted(model, args).train()\n",
                                 HEAD + HF + ARGUMENTS + OWN_LOSS.format(more=", **kwargs")
                                 + "Weighted(model, args).train()\n"),
    "adapters_twice": (HEAD + TUNED + SFT, HEAD + LORA + HF + SFT),
    "evaluation_on_training_data": (
        HEAD + HF + ARGUMENTS + "Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows).train()\n",
        HEAD + HF + ARGUMENTS + "Trainer(model=model, args=args, train_dataset=rows, eval_dataset=other).train()\n"),
    "evaluation_unused": (
        HEAD + HF + ARGUMENTS + "Trainer(model=model, args=args, train_dataset=rows, eval_dataset=other).train()\n",
        HEAD + HF + ARGUMENTS + "trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=other)\n"
        "trainer.train()\ntrainer.evaluate()\n"),
    "adapter_never_saved": (
        HEAD + TUNED + ARGUMENTS + "trainer = Trainer(model=model, args=args, train_dataset=rows)\ntrainer.train()\n",
        HEAD + TUNED + ARGUMENTS + "trainer = Trainer(model=model, args=args, train_dataset=rows)\ntrainer.train()\n"
        "trainer.save_model()\n"),
    "base_saved": (
        HEAD + LORA + HF + ARGUMENTS + "tuned = get_peft_model(model, LoraConfig(r=8))\nTrainer(tuned, args).train()\n"
        "model.save_pretrained('out')\n",
        HEAD + LORA + HF + ARGUMENTS + "tuned = get_peft_model(model, LoraConfig(r=8))\nTrainer(tuned, args).train()\n"
        "tuned.save_pretrained('out')\n"),
    "loss_by_other_count": (loop(*PLAIN, after="\neval_loss = 1.0\nprint(eval_loss / len(train_loader))\n"),
                            loop(*PLAIN, after="\neval_loss = 1.0\nprint(eval_loss / len(eval_loader))\n")),
    "remote_code_unpinned": (
        HEAD + HF.replace("'gpt2'", "'gpt2', trust_remote_code=True") + ARGUMENTS + "Trainer(model, args).train()\n",
        HEAD + HF.replace("'gpt2'", f"'gpt2', trust_remote_code=True, revision='{'a' * 40}'") + ARGUMENTS
        + "Trainer(model, args).train()\n"),
    "begins_twice": (HEAD + HF + ARGUMENTS + TEMPLATE.format(more="") + "Trainer(model, args, train_dataset=rows).train()\n",
                     HEAD + HF + ARGUMENTS + TEMPLATE.format(more=", add_special_tokens=False")
                     + "Trainer(model, args, train_dataset=rows).train()\n"),
    "warmup_without_effect": (
        HEAD + HF + WARMED.format(schedule="constant"), HEAD + HF + WARMED.format(schedule="linear")),
    "accumulation_to_nothing": (
        HEAD + HF + "world_size = int(os.environ['WORLD_SIZE'])\naccumulation = 4 // world_size\n"
        "args = TrainingArguments('out', gradient_accumulation_steps=accumulation)\nTrainer(model, args).train()\n",
        HEAD + HF + "world_size = int(os.environ['WORLD_SIZE'])\naccumulation = max(1, 4 // world_size)\n"
        "args = TrainingArguments('out', gradient_accumulation_steps=accumulation)\nTrainer(model, args).train()\n"),
    "loop_in_fp32": (loop(*PLAIN, before=ON_GPU),
                     loop("with torch.autocast('cuda', dtype=torch.bfloat16):", "    loss = model(batch).mean()", *PLAIN[1:],
                          before=ON_GPU)),
    "norms_decayed": (loop(*PLAIN).replace("lr=3e-4", "lr=3e-4, weight_decay=0.1"),
                      loop(*PLAIN).replace("lr=3e-4", "lr=3e-4, weight_decay=0.0")),
    "sampler_without_group": (loop(*PLAIN, before="sampler = DistributedSampler(data)\n"),
                              loop(*PLAIN, before="dist.init_process_group('nccl')\nsampler = DistributedSampler(data)\n")),
    "devices_hidden": (loop(*PLAIN, before=SPREAD.format(devices="0")), loop(*PLAIN, before=SPREAD.format(devices="0,1"))),
    "sampler_missing": (loop(*PLAIN, before=PARALLEL),
                        loop(*PLAIN, before=PARALLEL + "loader = DataLoader(data, batch_size=8, "
                                                       "sampler=DistributedSampler(data))\n")),
    "sharded_clipping": (
        loop(*PLAIN[:2], "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", *PLAIN[2:], before=SHARDED),
        loop(*PLAIN[:2], "model.clip_grad_norm_(1.0)", *PLAIN[2:], before=SHARDED)),
    "sharded_weights_overwritten": (HEAD + GATHERED + "trainer.model.save_pretrained('out')\n",
                                    HEAD + GATHERED + "trainer.model.save_pretrained('other')\n"),
}
