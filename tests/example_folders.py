"""Tokenizer folders and data files that the tests of examples share: small, made here, each of one family's manners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from powertrain.data.examples.store import ExampleStore, open_examples
from powertrain.recipe.schema import DataRecipe

# as /work/shared/benchmarks/make_model.py writes it
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# Llama 2's: no header before an answer, and add_generation_prompt changes nothing
INST = ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% elif m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}"
        "{% else %}{{ raise_exception('no system role here') }}{% endif %}{% endfor %}")
# Qwen 3's habit: an answer that is not the last one loses its thoughts
FORGETFUL = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
             "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] }}<|im_end|>\n"
             "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
GENERATION = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
              "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>")
WORDS = ["user assistant system the cat sat on the mat", "what is the sum of one and two ?", "it is three", "hello world \n\n",
         "### User: ### Assistant: answer the question", "paris is the capital of france"] * 3


def examples_of(*sources: Path | str, **options: Any) -> ExampleStore:
    """The examples of `sources`; `options` are keys of the recipe's data section and arguments of open_examples."""
    of_data = {name: options.pop(name) for name in list(options) if name in DataRecipe.model_fields}
    return open_examples(DataRecipe(source=[str(source) for source in sources], **of_data), **options)


def chat_folder(folder: Path, template: str | None = CHATML, *, special: tuple[str, ...] = SPECIAL, adds_bos: bool = False,
                **config: object) -> Path:
    """A byte-level BPE with special tokens, as make_model.py makes it."""
    bpe = _trained(special)
    if adds_bos:
        bpe.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], 0)])
    given = {"bos_token": special[0], "eos_token": "<|im_end|>", "pad_token": "<pad>", **config}
    return _saved(folder, bpe, given, template)


def seq2seq_folder(folder: Path) -> Path:
    """T5's manners: an end behind every text, nothing before it."""
    bpe = _trained(("<pad>", "</s>"))
    bpe.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return _saved(folder, bpe, {"eos_token": "</s>", "pad_token": "<pad>"}, None)


def span_folder(folder: Path) -> Path:
    """BERT's manners: words, [CLS] first, [SEP] behind each of two texts."""
    words = sorted({word for line in WORDS for word in line.split()})
    rows = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words, *map(str, range(300))]
    vocabulary = {word: number for number, word in enumerate(rows)}
    bert = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    bert.normalizer = normalizers.BertNormalizer()
    bert.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bert.decoder = decoders.WordPiece()
    bert.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return _saved(folder, bert, {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "eos_token": "[SEP]"}, None)


def _trained(special: tuple[str, ...]) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=list(special),
                                                       show_progress=False))
    return bpe


def _saved(folder: Path, tokenizer: Tokenizer, config: dict[str, object], template: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def json_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
