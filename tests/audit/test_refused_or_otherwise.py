"""Rules on what libraries refuse, or do otherwise than is thought: each fires there, and not in its near miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_cases import ARGUMENTS, HEAD, HF, TOKENIZER
from refusal_cases import DECODED, MORE
from test_library_rules import said
from trl_cases import SPLIT

TRAINED = HF + ARGUMENTS + "Trainer(model, args, train_dataset=rows).train()\n"
LLAMA = "meta-llama/Llama-3.1-8B"
OF_LLAMA, TRAINED_LLAMA = TOKENIZER.replace("gpt2", LLAMA), TRAINED.replace("gpt2", LLAMA)
PIECES = ("def tokenise(row):\n    asked = tokenizer(row['asked'])\n"
          "    answer = tokenizer(row['answer']{more})\n"
          "    return {{'input_ids': asked['input_ids'] + answer['input_ids']}}\nrows = rows.map(tokenise)\n")
ENCODED = "def tokenise(row):\n    return [1] + tokenizer.encode(row['asked']) + tokenizer.encode(row['answer'])[1:]\n" \
          "rows = rows.map(tokenise)\n"
BUILT = "def build():\n    return [start] + tokenizer('user').input_ids + tokenizer(text).input_ids\n{mark}build()\n"
MARK = "header = tokenizer.get_vocab()['<|start_header_id|>']\n"
ZEROED = ("accelerator = Accelerator(gradient_accumulation_steps={times})\n"
          "model, optimizer = accelerator.prepare(model, optimizer)\n"
          "for batch in loader:\n    with accelerator.accumulate(model):\n{lines}")
FIRST = "        optimizer.zero_grad()\n        accelerator.backward(model(batch).loss)\n        optimizer.step()\n"
LAST = "        accelerator.backward(model(batch).loss)\n        optimizer.step()\n        optimizer.zero_grad()\n"
T5 = "from transformers import T5Model, T5ForConditionalGeneration\nt5 = {kind}.from_pretrained('t5-small')\n"
UNFETCHED = SPLIT.replace("nltk.download('{name}')\n", "")
SHORT = DECODED.replace(", generation_max_length=64", "")


@pytest.mark.parametrize(("rule", "text", "fires"), [
    ("begins_twice", OF_LLAMA + PIECES.format(more="") + TRAINED_LLAMA, True),
    ("begins_twice", OF_LLAMA + PIECES.format(more=", add_special_tokens=False") + TRAINED_LLAMA, False),
    ("begins_twice", TOKENIZER + PIECES.format(more="") + TRAINED, False),
    ("begins_twice", OF_LLAMA + ENCODED + TRAINED_LLAMA, False),
    ("begins_twice", OF_LLAMA + ENCODED.replace("[1:]", "") + TRAINED_LLAMA, True),
    ("begins_twice", TOKENIZER + BUILT.format(mark=MARK) + TRAINED, True),
    ("begins_twice", TOKENIZER + BUILT.format(mark="") + TRAINED, False),
    ("gradients_cleared_early", ZEROED.format(times=4, lines=FIRST), True),
    ("gradients_cleared_early", ZEROED.format(times="read()", lines=FIRST), True),
    ("gradients_cleared_early", ZEROED.format(times=1, lines=FIRST), False),
    ("gradients_cleared_early", ZEROED.format(times=4, lines=LAST), False),
    ("sentences_not_split", UNFETCHED, True),
    ("sentences_not_split", UNFETCHED + "nltk.download('all')\n", False),
    ("ignored_labels_decoded", TOKENIZER + SHORT.format(changed="pass"), True),
    ("ignored_labels_decoded", TOKENIZER + SHORT.format(changed="pass").replace("t5-small", "someone/t5-tuned"), False),
    ("arguments_lacking", T5.format(kind="T5Model") + "t5(input_ids=rows, attention_mask=rows)\n" + TRAINED, True),
    ("arguments_lacking", T5.format(kind="T5Model") + "t5(input_ids=rows, labels=rows)\n" + TRAINED, True),
    ("arguments_lacking", T5.format(kind="T5Model") + "t5(input_ids=rows, decoder_input_ids=rows)\n" + TRAINED, False),
    ("arguments_lacking", T5.format(kind="T5Model") + "t5(**rows)\n" + TRAINED, False),
    ("arguments_lacking", T5.format(kind="T5ForConditionalGeneration") + "t5(rows)\n" + TRAINED, True),
    ("arguments_lacking", T5.format(kind="T5ForConditionalGeneration") + "t5(input_ids=rows, labels=rows)\n" + TRAINED, False),
    ("removed_imports", "torch.nn.function.relu(rows)\n" + TRAINED, True),
    ("removed_imports", "torch.nn.functional.relu(rows)\n" + TRAINED, False),
    ("removed_imports", "import datetime\ndatetime.now()\n" + TRAINED, True),
    ("removed_imports", "import datetime\ndatetime.datetime.now()\n" + TRAINED, False),
    ("removed_imports", "import datetime\nfrom datetime import datetime\ndatetime.now()\n" + TRAINED, False),
    ("removed_imports", "from datetime import datetime\ndatetime.datetime.now()\n" + TRAINED, True),
    ("model_not_published", TRAINED.replace("gpt2", "qwen2.5-coder:7b-instruct"), True),
    ("model_not_published", TRAINED.replace("gpt2", "C:/models/gpt2"), False),
    ("model_not_published", TRAINED.replace("gpt2", "s3://models/gpt2"), False),
])
def test_it_fires_where_the_library_refuses_or_does_otherwise(rule: str, text: str, fires: bool, tmp_path: Path) -> None:
    assert len(said(rule, HEAD + MORE + text, tmp_path)) == fires


def test_what_the_projects_texts_tell_to_fetch_is_there(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("python -m nltk.downloader punkt_tab\n", encoding="utf-8")
    assert said("sentences_not_split", HEAD + UNFETCHED, tmp_path) == []
