"""For each rule on a script's own network, on what is kept of it and on its labels: a script where it fires, its near miss."""

from __future__ import annotations

from code_cases import ARGUMENTS, HEAD, HF, PLAIN, TOKENIZER, loop

REPEATED = ("class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        layer = nn.Linear(8, 8)\n"
            "        self.layers = nn.ModuleList({layers})\n\n    def forward(self, x):\n        return self.layers[0](x)\n"
            "model = Net()\n")
MADE_ANEW = ("class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
             "        self.head = nn.Linear(8, 8)\n\n    def forward(self, x):\n        return {layer}(self.head(x))\n"
             "model = Net()\n")
MASKED = ("class Net(nn.Module):\n    def forward(self, x, mask):\n"
          "        scores = (x @ x.transpose(-2, -1)).masked_fill(mask, {value})\n"
          "        return F.softmax(scores, dim=-1) @ x\nmodel = Net()\n")
ACROSS = ("from torch.utils.data import DataLoader\nloader = DataLoader(rows, batch_size=8)\n"
          "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
          "        self.embedding = nn.Embedding(100, 8)\n        self.attention = nn.MultiheadAttention(8, 2{more})\n\n"
          "    def forward(self, x):\n        x = self.embedding(x)\n        return self.attention(x, x, x)[0]\n"
          "model = Net()\n")
ATTENDING = ("class Net(nn.Module):\n    def forward(self, q, k, v):\n"
             "        y = F.scaled_dot_product_attention(q, k, v)\n        return {out}\nmodel = Net()\n")
SHAPED = ("class Net(nn.Module):\n    def forward(self, x):\n        B, T, C = x.shape\n"
          "        q = self.q(x).view(B, T, 4, C // 4){turned}\n        k = self.k(x).view(B, T, 4, C // 4){turned}\n"
          "        return F.scaled_dot_product_attention(q, k, k, is_causal=True)\nmodel = Net()\n")
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
ON_DEVICE = ("loss = net(batch.to(device)).mean()", *PLAIN[1:])
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
    "same_layer_repeated": (loop(*PLAIN, before=REPEATED.format(layers="[layer for _ in range(6)]")),
                            loop(*PLAIN, before=REPEATED.format(layers="[nn.Linear(8, 8) for _ in range(6)]"))),
    "layer_made_in_pass": (loop(*PLAIN, before=MADE_ANEW.format(layer="nn.Linear(8, 8)")),
                           loop(*PLAIN, before=MADE_ANEW.format(layer="nn.Softmax(dim=-1)"))),
    "masked_with_nothing": (loop(*PLAIN, before=MASKED.format(value="1e-9")), loop(*PLAIN, before=MASKED.format(value="-1e9"))),
    "attention_across_batch": (loop(*PLAIN, before=ACROSS.format(more="")),
                               loop(*PLAIN, before=ACROSS.format(more=", batch_first=True"))),
    "attention_thrown_away": (loop(*PLAIN, before=ATTENDING.format(out="v")), loop(*PLAIN, before=ATTENDING.format(out="y"))),
    "attention_across_heads": (loop(*PLAIN, before=SHAPED.format(turned="")),
                               loop(*PLAIN, before=SHAPED.format(turned=".transpose(1, 2)"))),
    "gradient_stopped": (loop(*PLAIN, before=TURNED.format(product="x")),
                         loop(*PLAIN, before=TURNED.format(product="positions"))),
    "adapters_never_applied": (HEAD + LORA + HF + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n",
                               HEAD + LORA + HF + ARGUMENTS + "model = get_peft_model(model, lora)\n"
                               "Trainer(model, args, train_dataset=rows).train()\n"),
    "new_head_frozen": (HEAD + HEADED.format(more=""), HEAD + HEADED.format(more=", task_type='SEQ_CLS'")),
    "best_weights_shared": (loop(*PLAIN, after=KEPT.format(state="model.state_dict()")),
                            loop(*PLAIN, after=KEPT.format(state="copy.deepcopy(model.state_dict())"))),
    "model_left_behind": (loop(*ON_DEVICE, before=OWN.format(moved="")),
                          loop(*ON_DEVICE, before=OWN.format(moved=".to(device)"))),
    "never_saved": (loop(*PLAIN), loop(*PLAIN, after="\ntorch.save(model.state_dict(), 'last.pt')\n")),
    "labels_made_anew": (HEAD + HF + TOKENIZER + ARGUMENTS + COLLATED.format(mlm="False"),
                         HEAD + HF + TOKENIZER + ARGUMENTS + COLLATED.format(mlm="True")),
    "resumes_from_nothing": (HEAD + HF + RESUMED.format(last="True"), HEAD + HF + RESUMED.format(last="found")),
    "option_split_into_letters": (HEAD + LISTED.format(more="type=list") + ARGUMENTS,
                                  HEAD + LISTED.format(more="nargs='+'") + ARGUMENTS),
}
