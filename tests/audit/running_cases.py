"""For each rule on what ends a run or keeps it from learning: a script where it fires, and its near miss."""

from __future__ import annotations

from code_cases import ARGUMENTS, HEAD, HF, MADE, MAPPED, PARALLEL, PLAIN, TOKENIZER, loop

CALLED = "\ndef train(rate, steps=3):\n    loss = model(rate).mean()\n    loss.backward()\n    return loss, steps\n"
PARSED = ("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--batch-size', type=int)\n{more}"
          "args = parser.parse_args()\nprint(args.{name})\n" + ARGUMENTS.replace("args =", "told ="))
NETWORK = ("class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.head = nn.Linear(8, 8)\n\n"
           "    def forward(self, x):\n        return self.{name}(x)\nmodel = Net()\n")
HELPER = "def sizes():\n    steps = 8\n    return {returned}\n"
LORA = "from peft import LoraConfig, get_peft_model\n"
TUNED = "optimizer = torch.optim.AdamW(model.parameters())\n"
WRAPPED = "model = get_peft_model(model, LoraConfig(r=8))\n"
FROZEN = "for weight in model.parameters():\n    weight.requires_grad = False\n"
STOPPED = ("from transformers import EarlyStoppingCallback\nargs = TrainingArguments('out', eval_strategy='epoch'{more})\n"
           "Trainer(model, args, train_dataset=rows, eval_dataset=rows, callbacks=[EarlyStoppingCallback()]).train()\n")
TRAINED = ARGUMENTS + MAPPED + "Trainer(model=model, args=args, train_dataset=rows{more}).train()\n"
FIRST = "    if dist.get_rank() == 0:\n        print(loss)\n{waits}dist.barrier()\n"
ADDED = HEAD + HF + TOKENIZER + "tokenizer.add_special_tokens({'pad_token': '[PAD]'})\n"
SPREAD = "model = AutoModelForCausalLM.from_pretrained('gpt2', device_map={where})\nTrainer(model, args).train()\n"
OF_ONE_LAYER = "model = nn.Linear(8, 8)\n"
LOADED = "model = AutoModelForCausalLM.from_pretrained('gpt2', dtype={dtype})\n"
TALKED = "ids = tokenizer.apply_chat_template(talk, return_tensors='pt'{more})\nprint(model.generate(input_ids=ids))\n"
SIZED = ("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--size', default=8{more})\n"
         "told = parser.parse_args()\nprint(told.size * 2)\n")
LOGGED = ("def train():\n    if dist.get_rank() == 0:\n        writer = open('log')\n{more}    loss = model(data).mean()\n"
          "    loss.backward()\n    print(writer)\n")
QUANTISED = ("from peft import LoraConfig\nfrom transformers import BitsAndBytesConfig\n"
             "bits = BitsAndBytesConfig(load_in_4bit=True)\n"
             "model = AutoModelForCausalLM.from_pretrained('gpt2', quantization_config=bits)\n"
             "SFTTrainer(model, args=SFTConfig('out', {precision}=True), peft_config=LoraConfig(), train_dataset=rows)\n")
CHOSEN = ("import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--kind')\ntold = parser.parse_args()\n"
          "if told.kind == 'a':\n    width = 8\nelif told.kind == 'b':\n    width = 16\nelse:\n    {other}\n"
          "print(width)\n" + ARGUMENTS)
ENGINE = ("import deepspeed\nsettings = {{'train_batch_size': 8, 'zero_optimization': {{'stage': {stage}}}}}\n"
          "engine, *_ = deepspeed.initialize(model=model, config=settings)\nengine.backward(engine(data))\n")
# rule -> (a script where it fires, its near miss)
RUNNING_CASES: dict[str, tuple[str, str]] = {
    "arguments_not_taken": (HEAD + "from peft import LoraConfig\nLoraConfig(r=8, rank=8)\n" + ARGUMENTS,
                            HEAD + "from peft import LoraConfig\nLoraConfig(r=8, lora_alpha=8)\n" + ARGUMENTS),
    "arguments_lacking": (HEAD + HF + "accelerator = Accelerator()\nloss = model(batch).loss\naccelerator.backward()\n",
                          HEAD + HF + "accelerator = Accelerator()\nloss = model(batch).loss\naccelerator.backward(loss)\n"),
    "chat_template_gives_a_dictionary": (HEAD + HF + TOKENIZER + TALKED.format(more="") + ARGUMENTS,
                                         HEAD + HF + TOKENIZER + TALKED.format(more=", return_dict=False") + ARGUMENTS),
    "refused_by_python": (HEAD + ARGUMENTS.replace("'out'", "'out', output_dir='there'"), HEAD + ARGUMENTS),
    "modules_missing": ("from utils.prompter import Prompter\n" + HEAD + ARGUMENTS,
                        "try:\n    from utils.prompter import Prompter\nexcept ImportError:\n    pass\n" + HEAD + ARGUMENTS),
    "option_always_true": (HEAD + PARSED.format(name="batch_size", more="parser.add_argument('--packed', type=bool)\n"),
                           HEAD + PARSED.format(name="batch_size", more="parser.add_argument('--packed', type=str)\n")),
    "rank_as_device": (loop(*PLAIN, before=PARALLEL + "torch.cuda.set_device(dist.get_rank())\n"),
                       loop(*PLAIN, before=PARALLEL + "torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())\n")),
    "given_in_some_cases": (HEAD + CHOSEN.format(other="print('kind?')"), HEAD + CHOSEN.format(other="raise ValueError(told)")),
    "engine_refused": (HEAD + MADE + ENGINE.format(stage=2), HEAD + MADE + ENGINE.format(stage=3)),
    "scaler_refuses_bf16": (HEAD + QUANTISED.format(precision="fp16"), HEAD + QUANTISED.format(precision="bf16")),
    "trainer_never_trains": (HEAD + HF + ARGUMENTS + "if __name__ == '__main__':\n    trainer = Trainer(model, args)\n",
                             HEAD + HF + ARGUMENTS + "trainer = Trainer(model, args)\n"),
    "device_map_in_processes": (HEAD + ARGUMENTS + SPREAD.format(where="'auto'"),
                                HEAD + ARGUMENTS + SPREAD.format(where="None")),
    "names_out_of_reach": (
        HEAD + "def first():\n    width = 8\n    return width\ndef second():\n    return first() * width\n" + ARGUMENTS
        + "second()\n",
        HEAD + "def first():\n    width = 8\n    return [width for _ in range(3)]\ndef second(width):\n    def inner():\n"
        "        return width\n    return inner\n" + ARGUMENTS + "second(8)\n"),
    "used_before_given": (loop(*PLAIN, before="print(total)\ntotal = 0\n"),
                          loop("if i:", "    print(total)", *PLAIN, "total = loss.item()")),
    "options_missing": (HEAD + PARSED.format(name="batchsize", more=""), HEAD + PARSED.format(name="batch_size", more="")),
    "arguments_refused": (HEAD + MADE + CALLED + "train(1, step=3)\n", HEAD + MADE + CALLED + "train(1, steps=3)\n"),
    "unpacked_wrongly": (HEAD + ARGUMENTS + HELPER.format(returned="steps, 8, 9") + "one, two = sizes()\n",
                         HEAD + ARGUMENTS + HELPER.format(returned="steps, 8") + "one, two = sizes()\n"),
    "attributes_missing": (loop(*PLAIN, before=NETWORK.format(name="haed")), loop(*PLAIN, before=NETWORK.format(name="head"))),
    "probabilities_as_logits": (
        loop("guess = F.softmax(model(batch), dim=-1)", "loss = F.cross_entropy(guess.view(-1, 8), batch)", *PLAIN[1:]),
        loop("guess = F.log_softmax(model(batch), dim=-1)", "loss = F.cross_entropy(guess.view(-1, 8), batch)", *PLAIN[1:])),
    "loss_without_graph": (loop("loss = torch.tensor(model(batch).mean())", *PLAIN[1:]), loop(*PLAIN)),
    "never_stepped": (loop(*PLAIN[:2], "scheduler.step()"), loop(*PLAIN)),
    "everything_frozen": (loop(*PLAIN, before=HF + FROZEN + TUNED),
                          loop(*PLAIN, before=HF + FROZEN + "model.lm_head = nn.Linear(8, 8)\n" + TUNED)),
    "adapters_asked_of_base": (HEAD + LORA + HF + "model.print_trainable_parameters()\n" + ARGUMENTS,
                               HEAD + LORA + HF + WRAPPED + "model.print_trainable_parameters()\n" + ARGUMENTS),
    "tokens_beyond_embeddings": (ADDED + ARGUMENTS, ADDED + "model.resize_token_embeddings(len(tokenizer))\n" + ARGUMENTS),
    "stopping_without_score": (HEAD + STOPPED.format(more=""), HEAD + STOPPED.format(more=", load_best_model_at_end=True")),
    "adam_in_fp16": (loop(*PLAIN).replace(OF_ONE_LAYER, LOADED.format(dtype="torch.float16")),
                     loop(*PLAIN).replace(OF_ONE_LAYER, LOADED.format(dtype="torch.float16")).replace("lr=3e-4", "eps=1e-6")),
    "one_process_waits": (loop(*PLAIN, before=PARALLEL, after=FIRST.format(waits="        ")),
                          loop(*PLAIN, before=PARALLEL, after=FIRST.format(waits="    "))),
    "rows_of_unequal_length": (
        HEAD + HF + TOKENIZER + TRAINED.format(more=""),
        HEAD + HF + TOKENIZER + TRAINED.format(more=", data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)")),
}
