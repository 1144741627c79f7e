"""For each rule on a whole program or on how it is launched: a script where it fires, and its near miss."""

from __future__ import annotations

from code_cases import ACCUMULATED, ARGUMENTS, HEAD, HF, MAPPED, PARALLEL, PLAIN, STEP, TOKENIZER, loop

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
MAPPED_EARLY = ("rows = load_rows()\ndef told(row):\n    return {{'text': name + row['text']}}\n{first}rows = rows.map(told)\n"
                "name = 'Once'\n" + HF + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n")
FROM_CHECKPOINTS = (HF + ARGUMENTS + "trainer = Trainer(model, args, train_dataset=rows)\ntrainer.train()\n{saved}"
                    "again = AutoModelForCausalLM.from_pretrained('out')\n")
WARMED = ("args = TrainingArguments('out', warmup_steps=10, lr_scheduler_type='{schedule}')\n"
          "Trainer(model, args).train()\n")
ON_GPU = "model = model.to('cuda')\n"
RANKED = ("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--rank', type=int{more})\n"
          "args = parser.parse_args()\n" + TUNED.replace("r=8", "r=args.rank") + ARGUMENTS.replace("args =", "told =")
          + "Trainer(model, told, train_dataset=rows).train()\n")
DEVICE = "import os\nrank = os.environ.get('LOCAL_RANK'{more})\nmodel = model.to('cuda:' + str(rank))\n"
ROWS = "from datasets import load_dataset\nrows = load_dataset('json', data_files='rows.jsonl')['train']\n"
SAME = "from torch.utils.data import TensorDataset\ndata = TensorDataset(ids, {second})\n"
COMPARED = ("loss = F.cross_entropy(model(batch[0]).view(-1, 256), batch[1].view(-1))", *PLAIN[1:])
HOOK = ("class Own(Trainer):\n    def compute_loss(self, model, inputs, **kwargs):\n"
        "        return super().compute_loss(model, inputs, **kwargs) + {model}.own_loss()\n")
PAIRS = ("def told():\n    sizes = {{}}\n    sizes['model'] = 8\n    for name, size in {sizes}:\n        print(name, size)\n"
         "told()\n")
SCORED = ("args = TrainingArguments('out', eval_strategy='epoch', save_strategy='epoch', load_best_model_at_end=True,\n"
          "                         metric_for_best_model='accuracy')\n")
SAVED_WITH = ("\n    class Config:\n        width = 8\n    config = Config()\n"
              "    torch.save({{'model': model.state_dict(), 'config': {object}}}, 'last.pt')\n"
              "    state = torch.load('last.pt')\n    model.load_state_dict(state['model'])\n")
LOADED = "def resume():\n    state = torch.load('model.pt', weights_only=True)\n{rest}resume()\n"
SIZED = ("def train(batch_size=128, micro_batch_size=4):\n    print(micro_batch_size)\n"
         "    args = TrainingArguments('out', per_device_train_batch_size={each})\n    Trainer(model, args).train()\ntrain()\n")
ALPACA = ("from datasets import load_dataset\nrows = load_dataset('tatsu-lab/alpaca')['train']\ndef told(row):\n"
          "    return tokenizer(row['instruction'] + {more}row['output'])\nrows = rows.map(told)\n")
WIKITEXT = ("from datasets import load_dataset\nrows = load_dataset('wikitext', 'wikitext-2-raw-v1')['train']\n{more}"
            "args = TrainingArguments('out', per_device_train_batch_size=1)\n" + MAPPED
            + "Trainer(model, args, train_dataset=rows, data_collator=collator).train()\n")
SYNCED = "model.require_backward_grad_sync = {of} == 4 - 1"
RESUMED = ("state = torch.load('run.pt', weights_only=True)\nfirst = state['step']\n"
           "torch.save({{'model': model.state_dict(), 'step': 5{more}}}, 'run.pt')\n"
           "batches = skip_batches(loader, first)\n")
ATTENTION = ("class Attention(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
             "        self.query = nn.Linear(8, 8)\n        self.key = nn.Linear(8, 8)\n\n    def forward(self, x):\n"
             "        scores = self.{first}(x) @ self.key(x).transpose(-2, -1){mask}\n"
             "        return F.softmax(scores, dim=-1) @ x\nmodel = Attention()\ntargets = ids[:, 1:]\n")
MASK = "\n        scores = scores.masked_fill(torch.tril(torch.ones(8, 8)) == 0, float('-inf'))"
GRPO = ("from trl import GRPOConfig, GRPOTrainer\ndef near(completions, **kwargs):\n"
        "    return [{sign}abs(20 - len(text)) for text in completions]\n"
        "args = GRPOConfig('out', per_device_train_batch_size={each})\n"
        "GRPOTrainer(model='gpt2', reward_funcs=near, args=args, train_dataset=rows).train()\n")
OWN_PAIRS = ("args = TrainingArguments('out'{more})\nclass Pairs(Trainer):\n"
             "    def compute_loss(self, model, inputs, **kwargs):\n"
             "        return model(inputs['input_ids_j'])[0] - model(inputs['input_ids_k'])[0]\nPairs(model, args).train()\n")
SORTED = ("import glob\ndef last_checkpoint():\n    return sorted(glob.glob('out/*.pt'){key})[-1]\n"
          "def keep(step):\n    torch.save(model.state_dict(), f'out/model_{step}.pt')\nlast_checkpoint()\nkeep(5)\n")
TARGETED = ("from transformers import T5ForConditionalGeneration\n"
            "model = T5ForConditionalGeneration.from_pretrained('t5-base')\n" + TOKENIZER
            + "read = tokenizer(text, padding='max_length')\n"
            "target_ids = read['input_ids']\n{mask}batches = [(ids, target_ids)]\n")

ADAPTED = ("from peft import PeftModel\nmodel = PeftModel.from_pretrained(model, 'out'{more})\n"
           "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n")
PROGRAM_CASES: dict[str, tuple[str, str]] = {
    "undefined_names": (loop(*PLAIN, "size = wanted_size", before="data = []\n"),
                        loop(*PLAIN, "size = wanted_size", before="data, wanted_size = [], 4\n")),
    "own_objects_refused": (loop(*PLAIN, after=SAVED_WITH.format(object="config")),
                            loop(*PLAIN, after=SAVED_WITH.format(object="vars(config)"))),
    "reports_to_none": (HEAD + HF + "args = TrainingArguments('out', report_to=None)\nTrainer(model, args).train()\n",
                        HEAD + HF + "args = TrainingArguments('out', report_to='none')\nTrainer(model, args).train()\n"),
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
        HEAD + HF.replace("'gpt2'", "'own/model', trust_remote_code=True") + ARGUMENTS + "Trainer(model, args).train()\n",
        HEAD + HF.replace("'gpt2'", f"'own/model', trust_remote_code=True, revision='{'a' * 40}'") + ARGUMENTS
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
    "needed_but_none": (HEAD + RANKED.format(more=""), HEAD + RANKED.format(more=", default=8")),
    "device_of_no_rank": (loop(*PLAIN, before=DEVICE.format(more="")), loop(*PLAIN, before=DEVICE.format(more=", '0'"))),
    "rows_not_tokenised": (HEAD + HF + ROWS + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n",
                           HEAD + HF + ROWS + MAPPED + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n"),
    "targets_are_inputs": (loop(*COMPARED, before=SAME.format(second="ids")),
                           loop(*COMPARED, before=SAME.format(second="following"))),
    "method_of_wrapped_model": (
        HEAD + HF + ARGUMENTS + HOOK.format(model="model") + "Own(model, args).train()\n",
        HEAD + HF + ARGUMENTS + HOOK.format(model="self.accelerator.unwrap_model(model)") + "Own(model, args).train()\n"),
    "pairs_of_a_dict": (loop(*PLAIN, before=PAIRS.format(sizes="sizes")),
                        loop(*PLAIN, before=PAIRS.format(sizes="sizes.items()"))),
    "loaded_and_unused": (loop(*PLAIN, before=LOADED.format(rest="")),
                          loop(*PLAIN, before=LOADED.format(rest="    model.load_state_dict(state)\n"))),
    "micro_batch_ignored": (HEAD + HF + SIZED.format(each="batch_size"), HEAD + HF + SIZED.format(each="micro_batch_size")),
    "column_left_out": (HEAD + HF + TOKENIZER + ALPACA.format(more="") + ARGUMENTS
                        + "Trainer(model, args, train_dataset=rows)\n",
                        HEAD + HF + TOKENIZER + ALPACA.format(more="row['input'] + ") + ARGUMENTS
                        + "Trainer(model, args, train_dataset=rows)\n"),
    "empty_rows": (HEAD + HF + TOKENIZER + WIKITEXT.format(more=""),
                   HEAD + HF + TOKENIZER + WIKITEXT.format(more="rows = rows.filter(lambda row: row['text'])\n")),
    "wrapper_that_is_none": (
        HEAD + HF + ARGUMENTS + "trainer = Trainer(model, args)\ntrainer.train()\nkeep(trainer.deepspeed)\n",
        HEAD + HF + ARGUMENTS + "trainer = Trainer(model, args)\ntrainer.train()\nif trainer.deepspeed:\n"
        "    keep(trainer.deepspeed)\n"),
    "gradients_never_exchanged": (
        loop(SYNCED.format(of="first"), *ACCUMULATED, *STEP, before=PARALLEL + "first = 0\n"),
        loop(SYNCED.format(of="i % 4"), *ACCUMULATED, *STEP, before=PARALLEL + "first = 0\n")),
    "resume_counts_batches": (loop(*PLAIN, before=RESUMED.format(more="")),
                              loop(*PLAIN, before=RESUMED.format(more=", 'batch_size': 8"))),
    "attention_unmasked": (loop(*PLAIN, before=ATTENTION.format(first="query", mask="")),
                           loop(*PLAIN, before=ATTENTION.format(first="query", mask=MASK))),
    "layer_never_used": (loop(*PLAIN, before=ATTENTION.format(first="key", mask=MASK)),
                         loop(*PLAIN, before=ATTENTION.format(first="query", mask=MASK))),
    "moved_and_lost": (loop(*PLAIN, before="ids = torch.zeros(1, 1)\nids.to('cuda')\n"),
                       loop(*PLAIN, before="ids = torch.zeros(1, 1)\nids = ids.to('cuda')\n")),
    "groups_of_completions": (HEAD + GRPO.format(sign="-", each=1), HEAD + GRPO.format(sign="-", each=16)),
    "reward_without_answers": (HEAD + GRPO.format(sign="-", each=8).replace("completions", "responses"),
                               HEAD + GRPO.format(sign="-", each=8)),
    "adapters_frozen": (loop(*PLAIN, before=ADAPTED.format(more="")), loop(*PLAIN, before=ADAPTED.format(
        more=", is_trainable=True"))),
    "rate_left_out": (HEAD + HF + "optimizer = torch.optim.AdamW(model.parameters())\nmodel(rows).loss.backward()\n",
                      HEAD + HF + "optimizer = torch.optim.AdamW(model.parameters(), 2e-5)\nmodel(rows).loss.backward()\n"),
    "operands_refused": (HEAD + ARGUMENTS + "epochs = 3\nname = 'model-' + epochs\n",
                         HEAD + ARGUMENTS + "epochs = 3\nname = 'model-' + str(epochs)\n"),
    "columns_removed": (HEAD + HF + OWN_PAIRS.format(more=""),
                        HEAD + HF + OWN_PAIRS.format(more=", remove_unused_columns=False")),
    "adapter_file_renamed": (
        HEAD + TUNED + ARGUMENTS + "name = os.path.join('out', 'adapter_model.bin')\nstate = torch.load(name)\n"
        "model.load_state_dict(state)\nTrainer(model, args).train()\n",
        HEAD + TUNED + ARGUMENTS + "name = os.path.join('out', 'pytorch_model.bin')\nstate = torch.load(name)\n"
        "model.load_state_dict(state)\nTrainer(model, args).train()\n"),
    "sorted_as_text": (loop(*PLAIN, before=SORTED.replace("{key}", "")),
                       loop(*PLAIN, before=SORTED.replace("{key}", ", key=os.path.getmtime"))),
    "nothing_trains": (HEAD + HF + ARGUMENTS, HEAD + HF + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n"),
    "padded_targets_trained": (
        loop("loss = model(ids, labels=target_ids).loss", *PLAIN[1:], before=TARGETED.format(mask="")),
        loop("loss = model(ids, labels=target_ids).loss", *PLAIN[1:],
             before=TARGETED.format(mask="target_ids[target_ids == 0] = -100\n"))),
    "sharded_weights_overwritten": (HEAD + GATHERED + "trainer.model.save_pretrained('out')\n",
                                    HEAD + GATHERED + "trainer.model.save_pretrained('other')\n"),
    "run_before_given": (HEAD + MAPPED_EARLY.format(first=""), HEAD + MAPPED_EARLY.format(first="name = 'Twice'\n")),
    "loaded_but_never_saved": (HEAD + FROM_CHECKPOINTS.format(saved=""),
                               HEAD + FROM_CHECKPOINTS.format(saved="trainer.save_model()\n")),
}
