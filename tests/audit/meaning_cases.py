"""For each rule on what code means, and on what processes do together: a script where it fires, and its near miss."""

from __future__ import annotations

from code_cases import ARGUMENTS, HEAD, HF, PARALLEL, PLAIN, loop

ARGPARSE = "import argparse\nparser = argparse.ArgumentParser()\n{more}args = parser.parse_args()\n"
SHARDED = ARGPARSE.format(more="parser.add_argument('--shard', action='store_true')\n")
STREAM = ("from torch.utils.data import IterableDataset\nclass Rows(IterableDataset):\n    def __init__(self, file{told}):\n"
          "        self.file = file\n\n    def __iter__(self):\n        yield from open(self.file)\n\n{more}"
          "loader = DataLoader(Rows('rows.txt'{given}), batch_size=8)\n")
MASKED = ("loss = F.cross_entropy(model(batch[0]), batch[1]{more})", "loss = (loss * mask).sum() / mask.sum()", *PLAIN[1:])
SPLIT = ("from datasets import load_dataset\nrows = load_dataset('json', data_files='rows.jsonl', split='train')\n"
         "rows = rows.train_test_split(test_size=0.1).shuffle(seed=1)\nheld = rows['{part}']\n" + ARGUMENTS
         + "Trainer(model, args, eval_dataset=held).train()\n")
INSIDE = ("def main():\n    args = TrainingArguments('out')\n    trainer = Trainer(model, args, train_dataset=rows)\n"
          "    trainer.train()\n")
CHANCES = ("scores = model(ids).logits{part}", "chances = F.log_softmax(scores, dim=-1)",
           "chosen = chances.gather(-1, {tokens}.unsqueeze(-1))", "loss = -chosen.mean()", *PLAIN[1:])
OWN_STEP = ("class Own(Trainer):\n    def training_step(self, model, inputs, num_items_in_batch=None):\n"
            "        loss = self.compute_loss(model, inputs)\n{more}        return loss.detach()\n")
SEEN = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '{device}'\n"
ASKED = ("from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('{path}')\n{then}"
         "def render(row):\n    return {{'text': tokenizer.apply_chat_template(row['messages'], tokenize=False)}}\n"
         "rows = rows.map(render)\n" + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n")
LOGGED = SHARDED + "import wandb\nif args.shard:\n    wandb.init()\n"
# rule -> (a script where it fires, its near miss)
MEANING_CASES: dict[str, tuple[str, str]] = {
    "chat_template_missing": (HEAD + HF + ASKED.format(path="meta-llama/Llama-3.1-8B", then=""),
                              HEAD + HF + ASKED.format(path="meta-llama/Llama-3.1-8B-Instruct", then="")),
    "forward_past_wrapper": (loop("loss = model.module(batch).mean()", *PLAIN[1:], before=PARALLEL),
                             loop(*PLAIN, "with torch.no_grad():", "    model.module(batch)", before=PARALLEL)),
    "same_batches": (loop(*PLAIN, before=STREAM.format(told="", given="", more="") + PARALLEL),
                     loop(*PLAIN, before=STREAM.format(told=", rank", given=", dist.get_rank()", more="") + PARALLEL)),
    "group_never_begun": (
        loop(*PLAIN, before=SHARDED + "if args.shard:\n    dist.init_process_group('nccl')\ndist.barrier()\n"),
        loop(*PLAIN, before=SHARDED + "if args.shard:\n    dist.init_process_group('nccl')\n    dist.barrier()\n")),
    "processes_leave_alone": (
        loop(*PLAIN, "if loss.item() < 0.1:", "    break", before=PARALLEL),
        loop(*PLAIN, "dist.all_reduce(loss)", "if loss.item() < 0.1:", "    break", before=PARALLEL)),
    "mask_without_effect": (loop(*(line.format(more="") for line in MASKED)),
                            loop(*(line.format(more=", reduction='none'") for line in MASKED))),
    "split_not_there": (HEAD + HF + SPLIT.format(part="validation"), HEAD + HF + SPLIT.format(part="test")),
    "length_of_stream": (loop(*PLAIN, "print(len(loader))", before=STREAM.format(told="", given="", more="")),
                         loop(*PLAIN, "print(len(loader))", before=STREAM.format(
                             told="", given="", more="    def __len__(self):\n        return 100\n\n"))),
    "left_unwritten": (HEAD + HF + ARGUMENTS + "rows = ...\nTrainer(model, args, train_dataset=rows).train()\n",
                       HEAD + HF + ARGUMENTS + "rows = ...\nrows = load()\nTrainer(model, args, train_dataset=rows).train()\n"),
    "training_never_called": (HEAD + HF + INSIDE, HEAD + HF + INSIDE + "main()\n"),
    "chances_of_next_token": (loop("ids = batch['input_ids']", *(line.format(part="", tokens="ids") for line in CHANCES)),
                              loop("ids = batch['input_ids']", *(
                                  line.format(part="[:, :-1]", tokens="ids[:, 1:]") for line in CHANCES))),
    "never_backward": (HEAD + HF + OWN_STEP.format(more="") + ARGUMENTS + "Own(model, args, train_dataset=rows).train()\n",
                       HEAD + HF + OWN_STEP.format(more="        self.accelerator.backward(loss)\n") + ARGUMENTS
                       + "Own(model, args, train_dataset=rows).train()\n"),
    "gpu_fixed": (loop(*PLAIN, before=SEEN.format(device=3)), loop(*PLAIN, before=SEEN.format(device=0))),
    "left_as_loaded": (loop(*PLAIN, before=HF), loop("model.train()", *PLAIN, before=HF)),
}
