"""For each rule on what trainers refuse and on what does not fit them: a script where it fires, and its near miss."""

from __future__ import annotations

from code_cases import ARGUMENTS, HEAD, HF, TOKENIZER

ROWS = "rows = [{'text': 'Once'}]\n"
LORA = "from peft import LoraConfig\nconfig = LoraConfig(r=8, target_modules={targets})\n"
MORE = "from transformers import (AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, Seq2SeqTrainer,\n" \
       "                          Seq2SeqTrainingArguments)\n"


def trained(kind: str, args: str = "", given: str = "", before: str = "") -> str:
    """A script that trains with a trainer of TRL, or the plain one, with these arguments and gifts."""
    config = {"": "TrainingArguments", "Seq2Seq": "Seq2SeqTrainingArguments"}.get(kind, f"{kind}Config")
    library = "trl.experimental.orpo" if kind == "ORPO" else "trl.experimental.gkd" if kind == "GKD" else "trl"
    imported = MORE + ("" if kind in ("", "Seq2Seq") else f"from {library} import {kind}Config, {kind}Trainer\n")
    model = "" if "model_init=" in given or "model=" in given else "model=model, "
    return (f"{HEAD}{imported}{HF}{before}args = {config}('out', {args})\n"
            f"{kind}Trainer({model}args=args, train_dataset=rows, {given}).train()\n")


LORA_HEAD, LORA_ALL = LORA.format(targets="['q_proj', 'lm_head']"), LORA.format(targets="['q_proj', 'v_proj']")
STREAM = "from datasets import load_dataset\nrows = load_dataset('someone/rows', split='train', streaming=True)\n"
TEXTS = "rows = rows.map(lambda row: {'text': row['story']})\n"
DECODES = "def told(scored):\n    return {'said': len(tokenizer.batch_decode(scored[0]))}\n"
SCORES = "SequenceClassification"
SCORER = MORE + f"model = AutoModelFor{SCORES}.from_pretrained('gpt2', num_labels=2)\n"
ONE_LABEL = "AutoModelForCausalLM.from_pretrained('gpt2', num_labels=1)\n"
FORMATS = "def told(row):\n    return row['story']\n"
BEST = ("eval_strategy='epoch', save_strategy='epoch', load_best_model_at_end=True, metric_for_best_model='eval_loss', "
        "greater_is_better={greater}")
# of a condition of the tables: (trainer, arguments, what the trainer is given, before it), and the same of its near miss
Case = tuple[str, str, str, str]
REFUSED: list[tuple[Case, Case]] = [
    (("", "learning_rate='2e-5'", "", ""), ("", "learning_rate=2e-5", "", "")),
    (("", BEST.format(greater=True), "", ""), ("", BEST.format(greater=False), "", "")),
    (("", "logging_steps=0", "", ""), ("", "logging_steps=0, logging_strategy='epoch'", "", "")),
    (("", "logging_steps=2.5", "", ""), ("", "logging_steps=0.25", "", "")),
    (("", "eval_strategy='steps', eval_steps=2.5", "", ""), ("", "eval_steps=2.5", "", "")),
    (("", "save_steps=2.5", "", ""), ("", "save_steps=2.0", "", "")),
    (("", "eval_strategy='epochs'", "", ""), ("", "eval_strategy='epoch'", "", "")),
    (("", "save_strategy=False", "", ""), ("", "save_strategy='no'", "", "")),
    (("", "logging_strategy='step'", "", ""), ("", "logging_strategy='steps'", "", "")),
    (("", "hub_strategy='all'", "", ""), ("", "hub_strategy='end'", "", "")),
    (("", "optim='adam'", "", ""), ("", "optim='adafactor'", "", "")),
    (("", "lr_scheduler_type='cosine_annealing'", "", ""), ("", "lr_scheduler_type='cosine'", "", "")),
    (("", "report_to=['wandb', 'tensor_board']", "", ""), ("", "report_to=['wandb', 'tensorboard']", "", "")),
    (("", "lr_scheduler_type='reduce_lr_on_plateau'", "", ""),
     ("", "lr_scheduler_type='reduce_lr_on_plateau', eval_strategy='epoch'", "", "")),
    (("", "warmup_steps=-1", "", ""), ("", "warmup_steps=0", "", "")),
    (("", "dataloader_prefetch_factor=2", "", ""), ("", "dataloader_prefetch_factor=2, dataloader_num_workers=2", "", "")),
    (("", "dataloader_persistent_workers=True", "", ""),
     ("", "dataloader_persistent_workers=True, dataloader_num_workers=2", "", "")),
    (("", "save_strategy='best'", "", ""), ("", "save_strategy='best', metric_for_best_model='loss'", "", "")),
    (("", "gradient_accumulation_steps=0", "", ""), ("", "gradient_accumulation_steps=1", "", "")),
    (("", "fp16_full_eval=True, bf16_full_eval=True", "", ""), ("", "bf16_full_eval=True", "", "")),
    (("", "fsdp='full_shard', deepspeed='zero.json'", "", ""), ("", "fsdp='full_shard'", "", "")),
    (("", "save_only_model=True, load_best_model_at_end=True, deepspeed='zero.json'", "", ""),
     ("", "save_only_model=True, load_best_model_at_end=True", "", "")),
    (("", "", "model=model, model_init=lambda: model", ""), ("", "", "model_init=lambda: model", "")),
    (("", "", "model_init=lambda: model, optimizers=[optimizer, None]", ""), ("", "", "optimizers=[optimizer, None]", "")),
    (("", "predict_with_generate=True", "compute_metrics=told", DECODES),
     ("", "predict_with_generate=True", "compute_metrics=told", FORMATS)),
    (("Reward", "", "", ""), ("Reward", "", "model='gpt2'", "")),
    (("Reward", "", "", SCORER), ("Reward", "", "", SCORER.replace("num_labels=2", "num_labels=1"))),
    (("Reward", "", "", f"model = {ONE_LABEL}"), ("Reward", "", "", f"model = {ONE_LABEL.replace('CausalLM', SCORES)}")),
    (("", "", "", STREAM), ("", "max_steps=100", "", STREAM)),
    (("SFT", "packing=True", "data_collator=lambda rows: rows", ""),
     ("SFT", "packing=True, packing_strategy='wrapped'", "data_collator=lambda rows: rows", "")),
    (("SFT", "packing=True, max_length=None", "", ""), ("SFT", "packing=True", "", "")),
    (("SFT", "completion_only_loss=True", "formatting_func=told", FORMATS), ("SFT", "", "formatting_func=told", FORMATS)),
    (("SFT", "dataset_text_field='story'", "formatting_func=told", FORMATS),
     ("SFT", "dataset_text_field='text'", "formatting_func=told", FORMATS)),
    (("SFT", "assistant_only_loss=True", "", TEXTS),
     ("SFT", "assistant_only_loss=True", "", TEXTS.replace("text", "messages"))),
    (("SFT", "loss_type='mse'", "", ""), ("SFT", "loss_type='dft'", "", "")),
    (("SFT", "", "peft_config=config", LORA_HEAD), ("SFT", "", "peft_config=config", LORA_ALL)),
    (("DPO", "", "", LORA_HEAD + "from peft import get_peft_model\nmodel = get_peft_model(model, config)\n"),
     ("DPO", "", "", LORA_HEAD)),
    (("DPO", "loss_type='kto_pair'", "", ""), ("DPO", "loss_type='hinge'", "", "")),
    (("DPO", "loss_type='exo_pair', label_smoothing=0", "", ""),
     ("DPO", "loss_type='exo_pair', label_smoothing=0.001", "", "")),
    (("DPO", "", "quantization_config=BitsAndBytesConfig(load_in_4bit=True)", ""),
     ("DPO", "", "model='gpt2', quantization_config=BitsAndBytesConfig(load_in_4bit=True)", "")),
    (("DPO", "sync_ref_model=True", "peft_config=config", LORA_ALL), ("DPO", "sync_ref_model=True", "", LORA_ALL)),
    (("DPO", "precompute_ref_log_probs=True, max_steps=100", "", STREAM), ("DPO", "max_steps=100", "", STREAM)),
    (("KTO", "loss_type='bco'", "", ""), ("KTO", "loss_type='kto'", "", "")),
    (("KTO", "train_sampling_strategy='random'", "", ""), ("KTO", "train_sampling_strategy='sequential'", "", "")),
    (("GRPO", "generation_batch_size=16, num_generations=6", "reward_funcs='x/y'", ""),
     ("GRPO", "generation_batch_size=16", "reward_funcs='x/y'", "")),
    (("GRPO", "generation_batch_size=8, per_device_train_batch_size=3", "reward_funcs='x/y'", ""),
     ("GRPO", "generation_batch_size=8, per_device_train_batch_size=4", "reward_funcs='x/y'", "")),
    (("GRPO", "generation_batch_size=8, steps_per_generation=1", "reward_funcs='x/y'", ""),
     ("GRPO", "steps_per_generation=1", "reward_funcs='x/y'", "")),
    (("GRPO", "num_generations=1", "reward_funcs='x/y'", ""), ("GRPO", "num_generations=2", "reward_funcs='x/y'", "")),
    (("GRPO", "auto_find_batch_size=True", "reward_funcs='x/y'", ""), ("GRPO", "", "reward_funcs='x/y'", "")),
    (("GRPO", "log_completions_hub_repo='x/y'", "reward_funcs='x/y'", ""),
     ("GRPO", "log_completions_hub_repo='x/y', log_completions=True", "reward_funcs='x/y'", "")),
    (("GRPO", "sync_ref_model=True", "reward_funcs='x/y'", ""),
     ("GRPO", "sync_ref_model=True, beta=0.1", "reward_funcs='x/y'", "")),
    (("GRPO", "temperature=0", "reward_funcs='x/y'", ""), ("GRPO", "temperature=0.5", "reward_funcs='x/y'", "")),
    (("GRPO", "reward_weights=[1.0, 0.5]", "reward_funcs='x/y'", ""),
     ("GRPO", "reward_weights=[1.0]", "reward_funcs='x/y'", "")),
    (("GRPO", "loss_type='ppo'", "reward_funcs='x/y'", ""), ("GRPO", "loss_type='grpo'", "reward_funcs='x/y'", "")),
    (("GRPO", "scale_rewards='std'", "reward_funcs='x/y'", ""), ("GRPO", "scale_rewards=False", "reward_funcs='x/y'", "")),
    (("GRPO", "importance_sampling_level='word'", "reward_funcs='x/y'", ""),
     ("GRPO", "importance_sampling_level='sequence'", "reward_funcs='x/y'", "")),
    (("ORPO", "model_init_kwargs={'dtype': 'bfloat16'}", "", ""),
     ("ORPO", "model_init_kwargs={'dtype': 'bfloat16'}", "model='gpt2'", "")),
    (("GKD", "lmbda=2", "", ""), ("GKD", "lmbda=0.5", "", "")),
    (("GRPO", "eval_strategy='epoch', num_generations=6", "reward_funcs='x/y'", ""),
     ("GRPO", "num_generations=6", "reward_funcs='x/y'", "")),
    (("GRPO", "steps_per_generation=3, num_generations=16", "reward_funcs='x/y'", ""),
     ("GRPO", "steps_per_generation=2, num_generations=16", "reward_funcs='x/y'", "")),
    (("SFT", "", "", MORE + "model = AutoModelForSeq2SeqLM.from_pretrained('t5-small')\n"), ("SFT", "", "", MORE)),
    (("SFT", "completion_only_loss=True", "", TEXTS),
     ("SFT", "completion_only_loss=True", "", TEXTS.replace("'text'", "'prompt': '', 'completion'"))),
    (("SFT", "model_init_kwargs={'dtype': 'bfloat16'}", "", ""),
     ("SFT", "model_init_kwargs={'dtype': 'bfloat16'}", "model='gpt2'", "")),
    (("", "resume_from_checkpoint='out/checkpoint-500'", "", ""), ("", "", "", ""))]

PROMPTED = "rows = rows.map(lambda row: {{'text': row['prompt'] + row['answer']}}{more})\n"
DECODED = (MORE + "model = AutoModelForSeq2SeqLM.from_pretrained('t5-small')\ndef told(scored):\n    found, labels = scored\n"
           "    {changed}\n    return {{'said': len(tokenizer.batch_decode(found))}}\n"
           "args = Seq2SeqTrainingArguments('out', predict_with_generate=True, generation_max_length=64)\n"
           "Seq2SeqTrainer(model, args, train_dataset=rows, eval_dataset=rows, compute_metrics=told).train()\n")
REWARDED = MORE + ("reward_model = AutoModelForSequenceClassification.from_pretrained('{path}', num_labels=1)\n"
                   "def reward(prompts, completions, **kwargs):\n    return reward_model(completions).logits\n")

REFUSAL_CASES: dict[str, tuple[str, str]] = {
    "arguments_clash": (trained(*REFUSED[0][0]), trained(*REFUSED[0][1])),
    "rows_of_other_kind": (trained("SFT", before="train, rest = torch.utils.data.random_split(rows, [0.9, 0.1])\n").replace(
        "train_dataset=rows", "train_dataset=train"), trained("SFT")),
    "columns_unfit": (trained("SFT", before=PROMPTED.format(more="")),
                      trained("SFT", before=PROMPTED.format(more=", remove_columns=rows.column_names"))),
    "scores_at_random": (trained("GRPO", "", "reward_funcs=reward", REWARDED.format(path="gpt2")),
                         trained("GRPO", "", "reward_funcs=reward", REWARDED.format(path="someone/gpt2-reward"))),
    "ignored_labels_decoded": (HEAD + TOKENIZER + DECODED.format(changed="pass"),
                               HEAD + TOKENIZER + DECODED.format(changed="found = np.where(found != -100, found, 0)")),
    "keyword_twice": (HEAD + HF + "told = {'seed': 1}\n" + ARGUMENTS.replace(")", ", **told, seed=2)"),
                      HEAD + HF + "told = {'seed': 1}\n" + ARGUMENTS.replace(")", ", **told)")),
}
