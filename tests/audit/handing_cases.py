"""For each rule on what is handed on to files, models and adapters: a script where it fires, and its near miss."""

from __future__ import annotations

from code_cases import ARGUMENTS, HEAD, HF, PLAIN, TOKENIZER, loop

MERGED = (HEAD + "from peft import LoraConfig, PeftModel, get_peft_model\n" + HF
          + "model = PeftModel.from_pretrained(model, 'sft').merge_and_unload()\n{more}"
          "model = get_peft_model(model, LoraConfig(r=8))\n" + ARGUMENTS
          + "trainer = Trainer(model, args, train_dataset=rows)\ntrainer.train()\ntrainer.save_model('out')\n")
BESIDE = (HEAD + HF + TOKENIZER + "def tokenise(row):\n    read = tokenizer(row['question'])\n"
          "    told = tokenizer(row['answer'])\n{more}    read['labels'] = told['input_ids']\n    return read\n" + ARGUMENTS
          + "Trainer(model, args, train_dataset=rows.map(tokenise)).train()\n")
DECODED = ("y = batch['target']", "read = y[:, :-1].contiguous()", "told = y[:, {first}:].clone()",
           "loss = model(input_ids=batch['ids'], decoder_input_ids=read, labels=told).loss", *PLAIN[1:])
T5 = "from transformers import T5ForConditionalGeneration\nmodel = T5ForConditionalGeneration.from_pretrained('t5-small')\n"
GATHERED = ("def chances(logits, labels):\n    labels = labels[:, 1:].clone()\n    counts = labels != -100\n{more}"
            "    chosen = logits[:, :-1].log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)\n"
            "    return (chosen * counts).sum(-1)\n")
CHOSEN = ("loss = -chances(model(batch['ids']), batch['labels']).mean()", *PLAIN[1:])
ROUNDS = ("x = batch['x']", "for k in range(accumulation):", "    loss = model({given}).mean() / accumulation",
          "    loss.backward()", *PLAIN[2:])
# rule -> (a script where it fires, its near miss)
HANDING_CASES: dict[str, tuple[str, str]] = {
    "merged_base_lost": (MERGED.format(more=""), MERGED.format(more="model.save_pretrained('merged')\n")),
    "answers_beside_prompts": (BESIDE.format(more=""), BESIDE.format(
        more="    read['input_ids'] = read['input_ids'] + told['input_ids']\n")),
    "first_target_left_out": (loop(*(line.format(first=1) for line in DECODED), before=T5),
                              loop(*(line.format(first="") for line in DECODED), before=T5)),
    "ignored_labels_gathered": (loop(*CHOSEN, before=GATHERED.format(more="")),
                                loop(*CHOSEN, before=GATHERED.format(more="    labels[labels == -100] = 0\n"))),
    "micro_batch_repeated": (loop(*(line.format(given="x") for line in ROUNDS)),
                             loop(*(line.format(given="x[k]") for line in ROUNDS))),
}
