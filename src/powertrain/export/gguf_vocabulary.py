"""A tokenizer as llama.cpp has it: tokens with their kinds, merges or scores, and how text is parted before.

llama.cpp has two ways to make tokens of text, and knows the second one's ways to part text by name only:

  llama   SentencePiece's: white space becomes a block character, characters are merged by the score of the token that
          results, and what is in no token falls back to bytes. The scores are the merges' ranks.
  gpt2    byte-level BPE: text is parted by a regular expression, bytes are merged by rank.

What a file will do is computed here from the file's own values and compared with the tokenizer on SAMPLES; where ids
differ nothing is written.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from powertrain.models.model import SavedTokenizer
from powertrain.records import WrongUse

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6         # gguf.TokenType
BLOCK = "\u2581"                             # SentencePiece's white space

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"     # GPT-2's, built into ByteLevel
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS = r"\p{N}"
# each way to part text that we know of -> llama.cpp's name for it
PARTINGS: dict[tuple[str, ...], str] = {
    (WORDS,): "gpt-2", (DIGITS, WORDS): "smollm", (_LLAMA3,): "llama-bpe",
    (_LLAMA3.replace("{1,3}", ""),): "qwen2"}
GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")     # marks what is trained; llama.cpp does not know it
IGNORES_MERGES = ("llama-bpe",)              # a part that is a token as a whole is that token

SAMPLES = (
    "Hello, world!", "The quick brown fox doesn't jump over 12345 lazy dogs; it can't.", " leading and  two  spaces ",
    "def f(x):\n    return x ** 2  # naïve\n\n\tprint(f(3.14))\n", "Größe, café, señor, Ærø", "Привет, как дела?",
    "你好世界。今天是2024年", "こんにちは世界", "مرحبا بالعالم", "नमस्ते दुनिया", "👩‍💻 emoji 🎉!", "a", "1 000 000",
    "HTTP/2 == x_1; y+=1\r\n", "What's 15% of $1,200.50?", "\n", "e\u0301 is é in two parts")


@dataclass(frozen=True)
class Vocabulary:
    model: str                               # "llama" or "gpt2"
    pre: str
    tokens: tuple[str, ...]                  # as many as the embedding has rows
    kinds: tuple[int, ...]
    merges: tuple[str, ...]                  # of gpt2
    scores: tuple[float, ...]                # of llama
    special: Mapping[str, int]               # "bos", "eos", "unknown", "padding", "eot" -> id
    add_bos: bool                            # what the tokenizer does without a chat template
    add_space_prefix: bool
    chat_template: str | None
    notes: tuple[str, ...] = ()

    def metadata(self) -> dict[str, Any]:
        """llama.cpp's keys."""
        prefix = "tokenizer.ggml."
        found: dict[str, Any] = {
            f"{prefix}model": self.model, f"{prefix}pre": self.pre, f"{prefix}tokens": list(self.tokens),
            f"{prefix}token_type": list(self.kinds), f"{prefix}add_bos_token": self.add_bos,
            f"{prefix}add_eos_token": False}
        found |= {f"{prefix}{name}_token_id": token for name, token in self.special.items()}
        if self.model == "llama":
            found |= {f"{prefix}scores": list(self.scores), f"{prefix}add_space_prefix": self.add_space_prefix}
        else:
            found[f"{prefix}merges"] = list(self.merges)
        return found | ({"tokenizer.chat_template": self.chat_template} if self.chat_template else {})


def read_vocabulary(tokenizer: SavedTokenizer, rows: int, *, stops: Collection[int] = (),
                    chat_template: str | None = None) -> Vocabulary:
    """The vocabulary of a tokenizer for an embedding of `rows`, whose turns end at `stops`.

    Raises WrongUse where llama.cpp would give other ids.
    """
    library = getattr(tokenizer, "library", None)
    chat_template = None if chat_template is None else GENERATION.sub("", chat_template)
    if library is None:
        kind = getattr(tokenizer, "kind", "such a")
        raise no_vocabulary(f"has no {kind} tokenizer, only merges of bytes or of characters; train with "
                            "data.tokenizer=bpe for that, or")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        described = {name: _read(Path(folder) / name) for name in (
            "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")}
    settings = described["special_tokens_map.json"] | described["tokenizer_config.json"]
    model = json.loads(library.to_str()) | {"settings": settings}
    if model["model"].get("type") != "BPE":
        raise no_vocabulary(f"has no tokenizer of the kind {model['model'].get('type')}, and this model's is one;")
    tokens, kinds = token_list(model, rows)
    special = special_ids(library, settings, stops)
    add_bos = puts_in_front(tokenizer, library, special.get("bos"))
    build = _sentencepiece if is_sentencepiece(model) else _byte_level
    found = build(model, tokens, kinds, special, add_bos, chat_template)
    refuse_other_ids(found, library)
    return found


def no_vocabulary(because: str) -> WrongUse:
    return WrongUse(f"this model's tokenizer cannot be in a GGUF file: llama.cpp {because} use --to merged")


def _read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def token_list(model: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """The token of each row of the embedding and its kind; rows without one are unused."""
    tokens, kinds = [f"[PAD{row}]" for row in range(rows)], [UNUSED] * rows
    highest = max([*model["model"]["vocab"].values(), *(added["id"] for added in model["added_tokens"])])
    if highest >= rows:
        raise WrongUse(f"the tokenizer has a token {highest} and the embedding {rows} rows; use the tokenizer that the model "
                       "was trained with")
    unknown = model["model"].get("unk_token")
    for text, token in model["model"]["vocab"].items():
        byte = model["model"].get("byte_fallback") and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        tokens[token], kinds[token] = text, BYTE if byte else UNKNOWN if text == unknown else NORMAL
    for added in model["added_tokens"]:
        kind = CONTROL if added["special"] else USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], UNKNOWN if added["content"] == unknown else kind
    return tokens, kinds


def special_ids(library: Any, settings: Mapping[str, Any], stops: Collection[int]) -> dict[str, int]:
    """The ids that llama.cpp gives a meaning to. `eot` is what ends a turn where that is not the end of text."""
    found = {}
    for ours, theirs in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        given = settings.get(theirs)
        text = given.get("content") if isinstance(given, dict) else given
        token = library.token_to_id(text) if isinstance(text, str) else None
        if token is not None:
            found[ours] = int(token)
    others = sorted(set(stops) - {found.get("eos")})
    if "eos" not in found and others:
        found["eos"] = others.pop(0)
    if "bos" not in found and "eos" in found:
        found["bos"] = found["eos"]          # as GPT-2 has it; without one llama.cpp takes a fixed id
    return found | ({"eot": others[0]} if others else {})


def puts_in_front(tokenizer: SavedTokenizer, library: Any, bos: int | None) -> bool:
    """Whether the tokenizer begins any text with the beginning of sequence."""
    if hasattr(tokenizer, "before"):         # an ExampleTokenizer, which has asked the settings too
        return tokenizer.before is not None
    ids = library.encode("a", add_special_tokens=True).ids
    return len(ids) > 1 and ids[0] == bos


def is_sentencepiece(model: Mapping[str, Any]) -> bool:
    """Whether white space is SentencePiece's block."""
    return BLOCK in json.dumps([model.get("normalizer"), model.get("pre_tokenizer")], ensure_ascii=False)


def _sentencepiece(model: Mapping[str, Any], tokens: list[str], kinds: list[int], special: Mapping[str, int], add_bos: bool,
                   chat_template: str | None) -> Vocabulary:
    if not model["model"].get("byte_fallback"):
        raise no_vocabulary("falls back to bytes where a character is in no token, and this tokenizer does not;")
    pairs = merge_pairs(model)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(pairs):
        ranks.setdefault(left + right, rank)
    refuse_half_merged(pairs, {token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL})
    scores = tuple(-float(ranks.get(token, len(ranks) + 1)) for token in tokens)
    normalised = json.dumps([model.get("normalizer"), model.get("pre_tokenizer")])
    prefix = "Prepend" in normalised or '"first"' in normalised or '"always"' in normalised
    notes = ("llama.cpp puts a space before text behind a special token too, and this tokenizer only at the beginning: prompts "
             "of a chat template may have other tokens there",) if '"first"' in normalised else ()
    return Vocabulary("llama", "default", tuple(tokens), tuple(kinds), (), scores, special, add_bos, prefix, chat_template,
                      notes)


def refuse_half_merged(pairs: Sequence[tuple[str, str]], words: Collection[str]) -> None:
    """Raises WrongUse unless each token is made of any two that it consists of, and all these merges follow each other.

    That is what scores can say. transformers converts SentencePiece's own models so; a BPE that was trained otherwise is not.
    """
    merged, done, last = set(pairs), set[str](), ""
    for left, right in pairs:
        token = left + right
        if token == last or token not in words:
            continue
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        missing = next((split for split in splits if split[0] in words and split[1] in words and split not in merged), None)
        if missing is not None or token in done:
            how = f"of {missing[0]!r} and {missing[1]!r} too" if missing else "at one score"
            raise no_vocabulary(f"makes {token!r} {how}, and this tokenizer does not;")
        done.add(token)
        last = token


def _byte_level(model: Mapping[str, Any], tokens: list[str], kinds: list[int], special: Mapping[str, int], add_bos: bool,
                chat_template: str | None) -> Vocabulary:
    pairs = merge_pairs(model)
    if not pairs:
        raise no_vocabulary("needs merges of bytes, and this byte tokenizer has none;")
    parting = find_parting(model.get("pre_tokenizer"))
    pre = PARTINGS.get(parting) if parting else None
    if pre is None:
        raise no_vocabulary("knows ways to part text by name, and has none for this one: "
                            f"{json.dumps(model.get('pre_tokenizer'))};")
    notes: tuple[str, ...] = ()
    if model.get("normalizer") is not None:
        notes = (f"llama.cpp does not normalise text before it makes tokens, and this tokenizer does "
                 f"({model['normalizer'].get('type')}): for text in decomposed letters ids may differ",)
    return Vocabulary("gpt2", pre, tuple(tokens), tuple(kinds), tuple(" ".join(pair) for pair in pairs), (), special, add_bos,
                      False, chat_template, notes)


def merge_pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is merged, in order; older files write a pair as one string."""
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["model"]["merges"]]
    return [(left, right) for left, right in pairs]


def find_parting(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """The regular expressions that part text, one after the other; None for a way that is none of these."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    found: list[str] = []
    for step in steps:
        kind = step.get("type") if step else None
        if kind == "Split" and step["behavior"] == "Isolated" and not step.get("invert"):
            found.append(step["pattern"].get("Regex", ""))
        elif kind == "Digits" and step["individual_digits"]:
            found.append(DIGITS)
        elif kind == "ByteLevel" and not step["add_prefix_space"]:
            found += [WORDS] if step.get("use_regex", True) else []
        else:
            return None
    return tuple(found)


def refuse_other_ids(vocabulary: Vocabulary, library: Any) -> None:
    """Raises WrongUse for a sample that llama.cpp would encode otherwise than the tokenizer."""
    encode = sentencepiece_ids if vocabulary.model == "llama" else byte_level_encoder(vocabulary)
    for sample in SAMPLES:
        if vocabulary.model == "gpt2" and vocabulary.notes and sample == SAMPLES[-1]:
            continue                         # decomposed letters, which the note is about
        expected = library.encode(sample, add_special_tokens=False).ids
        found = encode(vocabulary, sample)
        if found != expected:
            raise no_vocabulary(f"would read {sample!r} as the tokens {found[:8]} and not {expected[:8]};")


def byte_level_encoder(vocabulary: Vocabulary) -> Any:
    """What llama.cpp's gpt2 tokenizer does, by the `tokenizers` library from the values of the file alone."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    words = {token: row for row, token in enumerate(vocabulary.tokens) if vocabulary.kinds[row] == NORMAL}
    merges: Any = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    rebuilt = Tokenizer(models.BPE(words, merges, ignore_merges=vocabulary.pre in IGNORES_MERGES))
    parting = next(parting for parting, name in PARTINGS.items() if name == vocabulary.pre)
    rebuilt.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in parting),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return lambda _, text: rebuilt.encode(text, add_special_tokens=False).ids


def sentencepiece_ids(vocabulary: Vocabulary, text: str) -> list[int]:
    """What llama.cpp's llama tokenizer does: neighbours are merged, best score first, then leftmost; the rest are bytes."""
    rows = {token: row for row, token in enumerate(vocabulary.tokens)}
    text = (" " + text if vocabulary.add_space_prefix else text).replace(" ", BLOCK)
    pieces = list(text)
    while True:
        pairs = [(vocabulary.scores[rows[left + right]], -place) for place, (left, right) in enumerate(pairwise(pieces))
                 if left + right in rows]
        if not pairs:
            break
        place = -max(pairs)[1]
        pieces[place:place + 2] = [pieces[place] + pieces[place + 1]]
    return [row for piece in pieces for row in _rows_of(piece, rows)]


def _rows_of(piece: str, rows: Mapping[str, int]) -> Sequence[int]:
    if piece in rows:
        return [rows[piece]]
    return [rows[f"<0x{byte:02X}>"] for byte in piece.encode()]
