"""For each rule on what TRL's trainers, models and rows do not fit: a script where it fires, and its near miss."""

from __future__ import annotations

from code_cases import ARGUMENTS, HEAD, HF, TOKENIZER

GRPO = ("from trl import GRPOConfig, GRPOTrainer\ndef near(completions{more}):\n"
        "    return [len(text) for text in completions]\n"
        "GRPOTrainer(model='gpt2', reward_funcs=[near], args=GRPOConfig('out'), train_dataset=rows).train()\n")
DPO = ("from trl import DPOConfig, DPOTrainer\n" + HF + "reference = {reference}\n"
       "DPOTrainer(model=model, ref_model=reference, args=DPOConfig('out'), train_dataset=rows).train()\n")
PLAIN_ARGUMENTS = ("from trl import DPOTrainer, SFTTrainer\n" + HF + ARGUMENTS
                   + "{trainer}(model=model, args=args, train_dataset=rows).train()\n")
BARE = ("from transformers import AutoModel\nmodel = AutoModel.from_pretrained('gpt2'{more})\n" + ARGUMENTS
        + "Trainer(model, args, train_dataset=rows).train()\n")
TAKEN = "from datasets import load_dataset\nrows = load_dataset('{name}', split='{split}')\n" + HF + ARGUMENTS + (
    "Trainer(model, args, train_dataset=rows).train()\n")
ASKED = (HF + TOKENIZER + ARGUMENTS + "trainer = Trainer(model, args, train_dataset=rows)\ntrainer.train()\n"
         "inputs = tokenizer('Once', return_tensors='pt'){moved}\nprint(model.generate(**inputs))\n")
SUMMARISED = ("from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments\n"
              "model = AutoModelForSeq2SeqLM.from_pretrained('t5-small')\n"
              "args = Seq2SeqTrainingArguments('out', eval_strategy='epoch', predict_with_generate=True{more})\n"
              "Seq2SeqTrainer(model, args, train_dataset=rows, eval_dataset=rows).train()\n")
SCORED = ("import evaluate\nrouge = evaluate.load('rouge')\ndef told(found):\n    scores = rouge.compute(predictions=found)\n"
          "    return {{name: value{part} for name, value in scores.items()}}\n" + HF + ARGUMENTS
          + "Trainer(model, args, train_dataset=rows, compute_metrics=told).train()\n")
SFT = "SFTTrainer(model=model, args=SFTConfig('out'{args}), train_dataset=rows{more}).train()\n"
FORMATTED = ("def told(row):\n    texts = [f'{{one}} {{two}}' for one, two in zip(row['ask'], row['say'])]\n"
             "    return {given}\n")
PAIRED = ("from trl import RewardConfig, RewardTrainer\nrows = rows.map(lambda row: {{'input_ids_chosen': "
          "tokenizer(row['chosen'])['input_ids']}}{more})\n" + HF
          + "RewardTrainer(model=model, args=RewardConfig('out'), train_dataset=rows).train()\n")
TEMPLATED = ("from trl import maybe_apply_chat_template\nrows = rows.map(maybe_apply_chat_template, "
             "fn_kwargs={{'{name}': tokenizer}})\n" + HF + SFT.format(args="", more=""))
ASKED_FOR = "from transformers import pipeline\n" + HF + ARGUMENTS + (
    "Trainer(model, args, train_dataset=rows).train()\nprint(pipeline('{task}', model='out'))\n")
SPLIT = "import nltk\nnltk.download('{name}')\nwords = nltk.word_tokenize(text)\n" + HF + ARGUMENTS + (
    "Trainer(model, args, train_dataset=rows).train()\n")
KTO = ("from trl import KTOConfig, KTOTrainer\n" + HF + "args = KTOConfig('out', per_device_train_batch_size={size})\n"
       "KTOTrainer(model=model, args=args, train_dataset=rows).train()\n")

TRL_CASES: dict[str, tuple[str, str]] = {
    "rewards_refuse_arguments": (HEAD + GRPO.format(more=""), HEAD + GRPO.format(more=", **kwargs")),
    "reference_is_model": (HEAD + DPO.format(reference="model"), HEAD + DPO.format(reference=HF.partition("= ")[2].strip())),
    "plain_arguments": (HEAD + PLAIN_ARGUMENTS.format(trainer="DPOTrainer"),
                        HEAD + PLAIN_ARGUMENTS.format(trainer="SFTTrainer")),
    "model_without_head": (HEAD + BARE.format(more=""), HEAD + BARE.format(more=", trust_remote_code=True")),
    "owner_missing": (HEAD + TAKEN.format(name="imdb", split="train"),
                      HEAD + TAKEN.format(name="stanfordnlp/imdb", split="train")),
    "one_class_taken": (HEAD + TAKEN.format(name="stanfordnlp/imdb", split="train[:2000]"),
                        HEAD + TAKEN.format(name="stanfordnlp/imdb", split="train[:1000]+train[-1000:]")),
    "inputs_left_on_cpu": (HEAD + ASKED.format(moved=""), HEAD + ASKED.format(moved=".to(model.device)")),
    "generations_cut": (HEAD + SUMMARISED.format(more=""), HEAD + SUMMARISED.format(more=", generation_max_length=128")),
    "scores_of_older_release": (HEAD + SCORED.format(part=".mid.fmeasure"), HEAD + SCORED.format(part="")),
    "formatting_gives_many": (
        HEAD + FORMATTED.format(given="texts") + HF + SFT.format(args="", more=", formatting_func=told"),
        HEAD + FORMATTED.format(given="texts[0]") + HF + SFT.format(args="", more=", formatting_func=told")),
    "collator_leaves_labels": (
        HEAD + HF + SFT.format(args="", more=", data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)"),
        HEAD + HF + SFT.format(args=", per_device_train_batch_size=1",
                               more=", data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)")),
    "pairs_of_older_trainer": (HEAD + PAIRED.format(more=", remove_columns=rows.column_names"), HEAD + PAIRED.format(more="")),
    "template_without_tokenizer": (HEAD + TEMPLATED.format(name="tokenizer"), HEAD + TEMPLATED.format(name="processing_class")),
    "task_gone": (HEAD + ASKED_FOR.format(task="summarization"), HEAD + ASKED_FOR.format(task="text-generation")),
    "sentences_not_split": (HEAD + SPLIT.format(name="punkt"), HEAD + SPLIT.format(name="punkt_tab")),
    "kto_of_one_example": (HEAD + KTO.format(size=1), HEAD + KTO.format(size=2)),
    "data_with_script": (HEAD + TAKEN.format(name="csebuetnlp/xlsum", split="train"),
                         HEAD + TAKEN.format(name="someone/xlsum", split="train")),
    "colab_only": ("from google.colab import drive\n" + HEAD + HF + ARGUMENTS,
                   "try:\n    from google.colab import drive\nexcept ImportError:\n    drive = None\n" + HEAD + HF + ARGUMENTS),
}
