"""For each rule on a script's own network, on what is kept of it and on its labels: a script where it fires, its near miss."""

from __future__ import annotations

from code_cases import ARGUMENTS, HEAD, HF, PLAIN, loop

MASKED = ("class Net(nn.Module):\n    def forward(self, x, mask):\n"
          "        scores = (x @ x.transpose(-2, -1)).masked_fill(mask, {value})\n"
          "        return F.softmax(scores, dim=-1) @ x\nmodel = Net()\n")
TURNED = ("class Rotary(nn.Module):\n    @torch.no_grad()\n    def forward(self, x, positions):\n"
          "        return {product} * self.table\nmodel = nn.Sequential(Rotary())\n")
LORA = "from peft import LoraConfig, get_peft_model\nlora = LoraConfig(r=8)\n"
HEADED = ("from peft import LoraConfig, get_peft_model\nfrom transformers import AutoModelForSequenceClassification\n"
          "model = AutoModelForSequenceClassification.from_pretrained('bert-base-uncased')\n"
          "model = get_peft_model(model, LoraConfig(r=8{more}))\n" + ARGUMENTS
          + "Trainer(model, args, train_dataset=rows).train()\n")
KEPT = "\n    if loss < 1:\n        best = {state}\nmodel.load_state_dict(best)\n"
OWN = ("class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.head = nn.Linear(8, 8)\n\n"
       "    def forward(self, x):\n        return self.head(x)\n\ndevice = torch.device('cuda')\nnet = Net(){moved}\n")
COLLATED = ("from transformers import DataCollatorForLanguageModeling\n"
            "collator = DataCollatorForLanguageModeling(tokenizer, mlm={mlm})\n"
            "def encode_row(row):\n    ids = tokenizer(row['text'])['input_ids']\n    labels = [-100] * 8 + ids[8:]\n"
            "    return {{'input_ids': ids, 'labels': labels}}\nrows = rows.map(encode_row)\n"
            "Trainer(model, args, train_dataset=rows, data_collator=collator).train()\n")
RESUMED = (ARGUMENTS + "trainer = Trainer(model=model, args=args, train_dataset=rows)\n"
           "trainer.train(resume_from_checkpoint={last})\n")
LISTED = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--modules', {more})\n"
# rule -> (a script where it fires, its near miss)
NETWORK_CASES: dict[str, tuple[str, str]] = {
    "gradient_stopped": (loop(*PLAIN, before=TURNED.format(product="x")),
                         loop(*PLAIN, before=TURNED.format(product="positions"))),
    "adapters_never_applied": (HEAD + LORA + HF + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n",
                               HEAD + LORA + HF + ARGUMENTS + "model = get_peft_model(model, lora)\n"
                               "Trainer(model, args, train_dataset=rows).train()\n"),
    "new_head_frozen": (HEAD + HEADED.format(more=""), HEAD + HEADED.format(more=", task_type='SEQ_CLS'")),
    "best_weights_shared": (loop(*PLAIN, after=KEPT.format(state="model.state_dict()")),
                            loop(*PLAIN, after=KEPT.format(state="copy.deepcopy(model.state_dict())"))),
    "never_saved": (loop(*PLAIN), loop(*PLAIN, after="\ntorch.save(model.state_dict(), 'last.pt')\n")),
    "resumes_from_nothing": (HEAD + HF + RESUMED.format(last="True"), HEAD + HF + RESUMED.format(last="found")),
}
