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
# rule -> (a script where it fires, its near miss)
RUNNING_CASES: dict[str, tuple[str, str]] = {
    "arguments_not_taken": (HEAD + "from peft import LoraConfig\nLoraConfig(r=8, rank=8)\n" + ARGUMENTS,
                            HEAD + "from peft import LoraConfig\nLoraConfig(r=8, lora_alpha=8)\n" + ARGUMENTS),
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
    "optimizer_of_earlier_weights": (loop(*PLAIN, before=LORA + HF + TUNED + WRAPPED),
                                     loop(*PLAIN, before=LORA + HF + WRAPPED + TUNED)),
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
    "one_process_waits": (loop(*PLAIN, before=PARALLEL, after=FIRST.format(waits="        ")),
                          loop(*PLAIN, before=PARALLEL, after=FIRST.format(waits="    "))),
    "rows_of_unequal_length": (
        HEAD + HF + TOKENIZER + TRAINED.format(more=""),
        HEAD + HF + TOKENIZER + TRAINED.format(more=", data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)")),
}
