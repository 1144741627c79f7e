"""Mutations of the JSON files of a model's folder, each decided by its seed alone."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
DEEP = 20_000
LONG = 1 << 20
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64, 10**20, 10**400, -10**20, 0.0, 0.5,
    -1.5, 1e300, -1e300, 1e-300, float("nan"), float("inf"), -float("inf"), "", " ", "x", "0", "llama", "t5", "\ud800",
    "\0", "../../etc/passwd", "é" * 300, "x" * LONG, "(", "(a+)+$", "(?:(?:a*)*)*b", "[" * 1000, [], [[]], [0], [None], ["x"],
    [1e300], list(range(3000)), {}, {"a": 1}, {"type": "Split"}, {"Regex": "(a|aa)+$"}, {"String": ""}, "BPE", "Unigram",
    "WordPiece", "WordLevel", "Sequence", "ByteLevel", "Metaspace", "Precompiled", "linear", "yarn", "longrope", "llama3",
    "float64", "gelu", "silu")
WORDS = ("type", "model", "vocab", "merges", "unk_token", "dropout", "byte_fallback", "continuing_subword_prefix",
         "end_of_word_suffix", "max_input_chars_per_word", "ignore_merges", "pattern", "behavior", "invert", "pretokenizers",
         "normalizers", "decoders", "single", "pair", "special_tokens", "ids", "tokens", "truncation", "padding",
         "rope_scaling", "rope_parameters", "quantization_config", "auto_map", "head_dim", "layer_types", "sliding_window",
         "text_config", "num_key_value_heads", "tie_word_embeddings", "chat_template", "added_tokens_decoder", "eos_token",
         "tokenizer_class")
# pieces of tokenizer.json whose regular expressions or sizes take for ever in a careless library
PIECES: tuple[tuple[str, Any], ...] = (
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(?:x+x+)+y"}, "behavior": "Removed", "invert": True}),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(.*)*[^ ]$"}, "behavior": "Isolated", "invert": False}),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False}),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": "(\\w+\\s?)+$"}, "content": "a" * 1000}),
    ("normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100_000}),
    ("normalizer", {"type": "Prepend", "prepend": "x" * LONG}),
    ("normalizer", {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": "."}, "content": "." * 99}] * 9}),
    ("decoder", {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}),
    ("post_processor", {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}),
    ("padding", {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                 "pad_token": "x"}),
    ("truncation", {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}),
    ("added_tokens", [{"id": 2**32 - 1, "content": "<|im_end|>", "single_word": False, "lstrip": False, "rstrip": False,
                       "normalized": False, "special": True}]),
    ("added_tokens", [{"id": 0, "content": "", "single_word": True, "lstrip": True, "rstrip": True, "normalized": True,
                       "special": True}]),
    ("model", {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a c"]}),
    ("model", {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}),
    ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 2.0}),
    ("model", {"type": "Unigram", "unk_id": 9, "vocab": [["a", float("-1e300")]]}),
    ("model", {"type": "Unigram", "unk_id": None, "vocab": []}),
    ("model", {"type": "WordLevel", "vocab": {}, "unk_token": "x"}),
    ("model", {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "nothing", "continuing_subword_prefix": "##",
               "max_input_chars_per_word": 10**9}))


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each value of a tree but its root; of a long list or table, to the first and last few."""
    if isinstance(value, (dict, list)):
        inside = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in inside if len(inside) < 60 else [*inside[:5], *inside[-5:]]:
            yield (*at, key)
            yield from places(value[key], (*at, key))


def mutated(name: str, content: bytes, seed: int) -> bytes:
    """Return another content of the file: one to three mutations of its values, or of its bytes."""
    draw = random.Random(f"{name}{seed}")
    if draw.random() < 0.15:
        return _bytes_changed(content, draw)
    value = json.loads(content)
    if name == "tokenizer.json" and draw.random() < 0.25:
        value |= copy.deepcopy(dict(draw.sample(PIECES, draw.choice((1, 1, 2)))))
    twice: tuple[str, Any] | None = None
    for _ in range(draw.choice((1, 1, 2, 3))):
        way = draw.choice(list(places(value)))
        holder = value
        for key in way[:-1]:
            holder = holder[key]
        how = draw.random()
        if how < 0.55:
            holder[way[-1]] = _odd(draw)
        elif how < 0.7:
            del holder[way[-1]]
        elif how < 0.85:
            value[draw.choice(WORDS)] = _odd(draw)
        elif how < 0.95 and isinstance(holder[way[-1]], (int, float)):
            holder[way[-1]] *= draw.choice((-1, 0, 2, 3, 1000, 10**9, 0.5, 1e30))
        else:
            twice = str(way[0]), _odd(draw)
        if not value:
            break
    text = json.dumps(value)
    if twice:
        text = f"{text[:-1]}, {json.dumps(twice[0])}: {json.dumps(twice[1])}}}" if value else text
    if draw.random() < 0.03:
        text = '{"x": ' + draw.choice(("[", '{"a": ')) * DEEP + text
    return text.encode("utf-8", "surrogatepass")


def _odd(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(ODD))               # a later mutation may change what is in it


def _bytes_changed(content: bytes, draw: random.Random) -> bytes:
    found = bytearray(content)
    how = draw.random()
    if how < 0.3:
        return bytes(found[:draw.randrange(len(found))])
    for _ in range(draw.choice((1, 3, 20))):
        at = draw.randrange(len(found))
        if how < 0.7:
            found[at] ^= 1 << draw.randrange(8)
        else:
            found[at:at + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
    return bytes(found)
