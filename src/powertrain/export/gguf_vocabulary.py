"""A tokenizer as llama.cpp has it: tokens with their kinds, merges or scores, and the rule that splits text beforehand.

llama.cpp has two ways to make tokens of text, and knows the splitting rules of the second way by name only:

  llama   SentencePiece's: white space becomes a block character, characters are merged by the score of the token that
          results, and a character that is in no token falls back to bytes. The scores are the merges' ranks.
  gpt2    byte-level BPE: text is split by a regular expression, bytes are merged by rank.

The ids that llama.cpp will make are computed here from the file's own values, and compared with the tokenizer's on SAMPLES;
where ids differ nothing is written.
"""

import json
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from powertrain.data.examples.words import DIGITS, GPT2, find_parting
from powertrain.data.tokenizers import named_tokens
from powertrain.models.model import SavedTokenizer
from powertrain.records import WrongUse

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6         # gguf.TokenType
BLOCK = "\u2581"                             # SentencePiece's white space

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# each way to part text that we know of -> llama.cpp's name for it
PARTINGS: dict[tuple[str, ...], str] = {
    (GPT2,): "gpt-2", (DIGITS, GPT2): "smollm", (_LLAMA3,): "llama-bpe",
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
    tokens: list[str]                        # as many as the embedding has rows
    kinds: list[int]
    special: Mapping[str, int]               # "bos", "eos", "unknown", "padding", "eot" -> id
    add_bos: bool                            # before any text, without a chat template
    chat_template: str | None
    merges: tuple[str, ...] = ()             # of gpt2
    scores: tuple[float, ...] = ()           # of llama
    add_space_prefix: bool = False
    notes: tuple[str, ...] = ()

    def metadata(self) -> dict[str, Any]:
        """Return the settings under llama.cpp's keys."""
        prefix = "tokenizer.ggml."
        found: dict[str, Any] = {
            f"{prefix}model": self.model, f"{prefix}pre": self.pre, f"{prefix}tokens": self.tokens,
            f"{prefix}token_type": self.kinds, f"{prefix}add_bos_token": self.add_bos,
            f"{prefix}add_eos_token": False}
        found |= {f"{prefix}{name}_token_id": token for name, token in self.special.items()}
        if self.model == "llama":
            found |= {f"{prefix}scores": list(self.scores), f"{prefix}add_space_prefix": self.add_space_prefix}
        else:
            found[f"{prefix}merges"] = list(self.merges)
        return found | ({"tokenizer.chat_template": self.chat_template} if self.chat_template else {})


def read_vocabulary(tokenizer: SavedTokenizer, rows: int, *, stops: Collection[int] = (),
                    chat_template: str | None = None) -> Vocabulary:
    """Return the vocabulary of a tokenizer for an embedding of `rows`, whose turns end at `stops`.

    Raises WrongUse where llama.cpp would give other ids.
    """
    library = getattr(tokenizer, "library", None)
    if library is None:
        kind = getattr(tokenizer, "kind", "such a")
        raise no_vocabulary(f"has no {kind} tokenizer, only merges of bytes or of characters; train with "
                            "data.tokenizer=bpe for that, or")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        named = named_tokens(Path(folder))
    model = json.loads(library.to_str())
    if model["model"].get("type") != "BPE":
        raise no_vocabulary(f"has no tokenizer of the kind {model['model'].get('type')}, and this model's is one;")
    tokens, kinds = token_list(model, rows)
    special = special_ids(library, named, stops)
    plain = Vocabulary("", "", tokens, kinds, special, puts_in_front(tokenizer, library, special.get("bos")),
                       None if chat_template is None else GENERATION.sub("", chat_template))
    # SentencePiece writes white space as its block character
    rules = json.dumps([model.get("normalizer"), model.get("pre_tokenizer")], ensure_ascii=False)
    found = _sentencepiece(plain, model, rules) if BLOCK in rules else _byte_level(plain, model)
    refuse_other_ids(found, library)
    return found


def no_vocabulary(because: str) -> WrongUse:
    return WrongUse(f"this model's tokenizer cannot be in a GGUF file: llama.cpp {because} use --to merged")


def token_list(model: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return the token of each row of the embedding and its kind; rows without a token are unused."""
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


def special_ids(library: Any, named: Mapping[str, str], stops: Collection[int]) -> dict[str, int]:
    """Return the ids to which llama.cpp gives a meaning. `eot` ends a turn where that is not the end of text."""
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    found = {ours: int(token) for ours, theirs in roles.items()
             if theirs in named and (token := library.token_to_id(named[theirs])) is not None}
    others = sorted(set(stops) - {found.get("eos")})
    if "eos" not in found and others:
        found["eos"] = others.pop(0)
    if "bos" not in found and "eos" in found:
        found["bos"] = found["eos"]          # as GPT-2 has it; without one llama.cpp takes a fixed id
    return found | ({"eot": others[0]} if others else {})


def puts_in_front(tokenizer: SavedTokenizer, library: Any, bos: int | None) -> bool:
    """Return whether the tokenizer begins any text with the beginning of sequence."""
    if hasattr(tokenizer, "before"):         # an ExampleTokenizer, which has read the settings too
        return tokenizer.before is not None
    ids = library.encode("a", add_special_tokens=True).ids
    return len(ids) > 1 and ids[0] == bos


def _sentencepiece(plain: Vocabulary, model: Mapping[str, Any], rules: str) -> Vocabulary:
    if not model["model"].get("byte_fallback"):
        raise no_vocabulary("falls back to bytes where a character is in no token, and this tokenizer does not;")
    pairs = merge_pairs(model)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(pairs):
        ranks.setdefault(left + right, rank)
    refuse_half_merged(pairs, {token for token, kind in zip(plain.tokens, plain.kinds, strict=True) if kind == NORMAL})
    only_first = '"first"' in rules
    notes = ("llama.cpp puts a space before text behind a special token too, and this tokenizer only at the beginning: prompts "
             "of a chat template may have other tokens there",) if only_first else ()
    return replace(plain, model="llama", pre="default", notes=notes,
                   scores=tuple(-float(ranks.get(token, len(ranks) + 1)) for token in plain.tokens),
                   add_space_prefix=only_first or "Prepend" in rules or '"always"' in rules)


def refuse_half_merged(pairs: Sequence[tuple[str, str]], words: Collection[str]) -> None:
    """Raise WrongUse unless each token is made of any two that it consists of, and all these merges follow each other.

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


def _byte_level(plain: Vocabulary, model: Mapping[str, Any]) -> Vocabulary:
    pairs = merge_pairs(model)
    if not pairs:
        raise no_vocabulary("needs merges of bytes, and this byte tokenizer has none;")
    parting = find_parting(model.get("pre_tokenizer"))
    pre = PARTINGS.get(parting) if parting else None
    if pre is None:
        raise no_vocabulary("knows ways to part text by name, and has none for this one: "
                            f"{json.dumps(model.get('pre_tokenizer'))};")
    notes = () if model.get("normalizer") is None else (
        f"llama.cpp does not normalise text before it makes tokens, and this tokenizer does "
        f"({model['normalizer'].get('type')}): for text in decomposed letters ids may differ",)
    return replace(plain, model="gpt2", pre=pre, merges=tuple(" ".join(pair) for pair in pairs), notes=notes)


def merge_pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs that are merged, in order; older files write a pair as one string."""
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["model"]["merges"]]
    return [(left, right) for left, right in pairs]


def refuse_other_ids(vocabulary: Vocabulary, library: Any) -> None:
    """Raise WrongUse if llama.cpp would encode a sample otherwise than the tokenizer."""
    rebuilt = None if vocabulary.model == "llama" else byte_level_tokenizer(vocabulary)
    for sample in SAMPLES:
        if rebuilt is not None and vocabulary.notes and sample == SAMPLES[-1]:
            continue                         # decomposed letters, which the note is about
        expected = library.encode(sample, add_special_tokens=False).ids
        found = sentencepiece_ids(vocabulary, sample) if rebuilt is None else \
            rebuilt.encode(sample, add_special_tokens=False).ids
        if found != expected:
            raise no_vocabulary(f"would read {sample!r} as the tokens {found[:8]} and not {expected[:8]};")


def byte_level_tokenizer(vocabulary: Vocabulary) -> Any:
    """Return llama.cpp's gpt2 tokenizer, built with the `tokenizers` library from the values of the file alone."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    words = {token: row for row, token in enumerate(vocabulary.tokens) if vocabulary.kinds[row] == NORMAL}
    merges: Any = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    rebuilt = Tokenizer(models.BPE(words, merges, ignore_merges=vocabulary.pre in IGNORES_MERGES))
    parting = next(parting for parting, name in PARTINGS.items() if name == vocabulary.pre)
    rebuilt.pre_tokenizer = pre_tokenizers.Sequence([
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in parting),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return rebuilt


def sentencepiece_ids(vocabulary: Vocabulary, text: str) -> list[int]:
    """Encode as llama.cpp's llama tokenizer: neighbours are merged, best score first, then leftmost; the rest are bytes."""
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
    return [row for piece in pieces
            for row in ([rows[piece]] if piece in rows else [rows[f"<0x{byte:02X}>"] for byte in piece.encode()])]
