"""Taking rows out of data: unreadable, empty and cut ones, other languages, exact and near duplicates.

The rows that are left go to a new file, as they are. Each row that was taken out goes to a record beside it, with the reason
and where it came from. Nothing is changed in place.

Near duplicates are found by MinHash (Broder 1997): a text is the set of its runs of words, two texts are alike if they share
`near` of all their runs (Jaccard), and that share is estimated from 128 hashes. Texts are compared where a band of their hashes
is equal, and the bands are chosen so that a pair just at the threshold is found with a probability of 95 % or more. Of texts
that are alike the first is kept. The signatures of all kept rows are in memory, about 1 KB for each.
"""

import hashlib
import json
import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from powertrain.data.rows.reading import read_rows
from powertrain.data.rows.row import BadRow, Conversation, Empty, Pair, Preference, Rating, Rejected, Row, Sample, Text, Tie
from powertrain.data.rows.schemas import ANSWERS, Schema, find_schema
from powertrain.data.rows.writing import check_output, write_rows
from powertrain.records import WrongUse
from powertrain.records.errors import did_you_mean
from powertrain.records.json_files import draft_of

LOOKED_AT = 64               # rows, to find out what they mean
# the tasks of models that might learn from the rows, and what they would learn from
READERS = (("causal", ANSWERS), ("seq2seq", ANSWERS), ("span", ANSWERS), ("causal", "preference"), ("causal", "rating"))
HASHES, FOUND_SHARE = 128, 0.95
BANDS = (64, 32, 16, 8, 4)   # of HASHES; the fewest that find FOUND_SHARE of the pairs at the threshold
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")          # scripts without spaces: each character
GOES_ON = ",([{"             # a text that ends so, or in a letter of a script with capitals, ends within a sentence
# a last line that ends without a full stop by nature: an item, a heading, a row of a table, a line of quotes
LINE_OF_LIST = re.compile(r"^\s*([-*+•#|>]|\d+[.)])")
FENCE = "```"
RECORD = ".removed.jsonl"
REASONS = ("unreadable", "empty", "tie", "cut", "language", "duplicate", "near duplicate")


@dataclass(frozen=True)
class Rules:
    """What is taken out. None leaves a check off."""

    column: str | None = None                # the text that is looked at; default: all of a row's meaning
    languages: tuple[str, ...] = ()          # ISO 639-1; none: any
    language_from: float = 0.8               # the probability from which another language counts
    near: float | None = 0.8                 # share of common runs of words
    run_words: int = 5
    unfinished_from: int | None = 200        # characters of an answer, from which it counts as cut if no sentence ends it
    exact: bool = True


@dataclass(frozen=True)
class Removed:
    origin: str
    kind: str                                # one of REASONS
    reason: str
    of: str | None = None                    # a duplicate: the row that was kept
    similarity: float | None = None


@dataclass(frozen=True)
class Cleaned:
    rows: int
    kept: int
    removed: Mapping[str, int]               # kind -> rows
    record: Path
    said: str
    examples: tuple[Removed, ...]            # the first of each kind


def clean(source: str, out: Path, rules: Rules, *, cache: Path, name: str | None = None,
          columns: Mapping[str, str] | None = None, split: str | None = None) -> Cleaned:
    """Write the rows of `source` that pass as `out`, and the others as a record beside it.

    Raises WrongUse for rules that cannot be used, files that cannot be written, and if no row would be left.
    """
    record = out.with_name(out.name + RECORD)
    _check_rules(rules)
    check_output(out, [source], split)
    if record.exists():
        raise WrongUse(f"{record} exists already; name another new file, or remove it first")

    def everything() -> Iterator[Row | Rejected]:
        return read_rows(source, cache=cache, split=split)

    checks = Checks(rules, _reading(everything, rules, name, columns or {}, source))
    with TemporaryFile("w+", encoding="utf-8", newline="\n") as told:
        found = _judge(everything(), checks, told)
        if len(found.removed) == found.rows:
            kind, most = max(found.counts.items(), key=lambda item: item[1])
            raise WrongUse(f"no row of {source} would be left: {most:,} of {found.rows:,} are {kind}, the first "
                           f"{found.firsts[kind].origin}; loosen the rules")
        kept = write_rows(out, lambda: (row for number, row in enumerate(everything())
                                        if number not in found.removed and isinstance(row, Row)))
        totals = {kind: found.counts[kind] for kind in REASONS if found.counts[kind]}
        about = {"event": "cleaned", "source": source, "output": str(out), "rows": found.rows, "kept": kept, "removed": totals,
                 "rules": asdict(rules)}
        told.seek(0)
        with draft_of(record) as draft, draft.open("w", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(about, ensure_ascii=False) + "\n")
            shutil.copyfileobj(told, file)
    return Cleaned(found.rows, kept, totals, record, checks.reading.said, tuple(found.firsts[kind] for kind in totals))


@dataclass
class Judged:
    """What the checks said of all rows."""

    rows: int = 0
    removed: set[int] = field(default_factory=set)       # numbers of rows, from 0
    counts: Counter[str] = field(default_factory=Counter)
    firsts: dict[str, Removed] = field(default_factory=dict)


def _judge(rows: Iterable[Row | Rejected], checks: "Checks", told: IO[str]) -> Judged:
    """Look at every row; write those that are taken out to `told`, a line each."""
    found = Judged()
    for number, row in enumerate(rows):
        found.rows += 1
        removed = checks.look(row)
        if removed is not None:
            found.removed.add(number)
            found.counts[removed.kind] += 1
            found.firsts.setdefault(removed.kind, removed)
            known = {key: value for key, value in asdict(removed).items() if value is not None}
            fields = {"row": row.fields} if isinstance(row, Row) else {}
            told.write(json.dumps(known | fields, ensure_ascii=False, default=str) + "\n")      # str: of dates, as a table has
    return found


def _check_rules(rules: Rules) -> None:
    if rules.near is not None and not 0 < rules.near <= 1:
        raise WrongUse(f"--near {rules.near:g} is no share of common runs; use a number above 0 and at most 1, such as 0.8, or "
                       "--no-near")
    if not 0 <= rules.language_from <= 1:
        raise WrongUse(f"--language-from {rules.language_from:g} is no probability; use a number from 0 to 1")


# ------------------------------------------------------------------------------------------------ what a row says


@dataclass(frozen=True)
class Reading:
    """How a row's texts are found."""

    schema: Schema | None                    # None: by column, or all text of the row
    column: str | None
    said: str

    def texts(self, row: Row) -> tuple[str, str]:
        """Return all text of a row, and the answer in it ("" where none is told apart). Raises BadRow or Empty."""
        if self.column is not None:
            return _blank_refused(_all_text(row.fields.get(self.column)), f"the column {self.column!r} is empty"), ""
        if self.schema is None:
            return _blank_refused(_all_text(row.fields), "all its columns are empty"), ""
        sample = self.schema.read(row.fields)
        if isinstance(sample, Preference) and sample.chosen == sample.rejected:
            raise Tie("its chosen and its rejected answer are equal")
        return _said_in(sample), _answer_in(sample)


def _reading(everything: Callable[[], Iterator[Row | Rejected]], rules: Rules, name: str | None, columns: Mapping[str, str],
             source: str) -> Reading:
    first = [row for row, _ in zip(everything(), range(LOOKED_AT), strict=False) if isinstance(row, Row)]
    if rules.column is not None:
        there = dict.fromkeys(key for row in first for key in row.fields)
        if rules.column not in there:
            raise WrongUse(f"{source} has no column {rules.column!r}; there are {', '.join(there)}"
                           f"{did_you_mean(rules.column, there)}")
        return Reading(None, rules.column, f"rows are judged by their column {rules.column!r}")
    refused: WrongUse | None = None
    for task, learns in READERS:
        try:
            schema, said = find_schema(first, name=name, columns=columns, task=task, learns=learns)
        except WrongUse as error:
            refused = refused or error
            continue
        return Reading(schema, None, said)
    if refused is not None and (name is not None or columns or not first):
        raise refused
    return Reading(None, None, "rows are of no format for training, and are judged by all their text")


def _blank_refused(text: str, reason: str) -> str:
    if not text.strip():
        raise Empty(reason)
    return text


def _all_text(value: Any) -> str:
    """Return the texts within a value, a line each."""
    if isinstance(value, str):
        return value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return "\n".join(filter(None, map(_all_text, inner)))


def _said_in(sample: Sample) -> str:
    if isinstance(sample, Conversation):
        calls = (json.dumps([call.name, call.arguments]) for turn in sample.messages for call in turn.tool_calls)
        return "\n".join([*(turn.content for turn in sample.messages), *calls])
    if isinstance(sample, Preference):
        return "\n".join([_said_in(sample.chosen), *(turn.content for turn in sample.rejected.messages[sample.shared:])])
    if isinstance(sample, Rating):
        return _said_in(sample.conversation)
    return sample.text if isinstance(sample, Text) else _all_text(asdict(sample))


def _answer_in(sample: Sample) -> str:
    if isinstance(sample, Preference | Rating):
        return _answer_in(sample.chosen if isinstance(sample, Preference) else sample.conversation)
    if isinstance(sample, Conversation):
        return next((turn.content for turn in reversed(sample.messages) if turn.role == "assistant"), "")
    return sample.target if isinstance(sample, Pair) else ""


# ------------------------------------------------------------------------------------------------ the checks


class Checks:
    """The rules, and what the rows so far were."""

    def __init__(self, rules: Rules, reading: Reading) -> None:
        self.rules, self.reading = rules, reading
        self.seen: dict[bytes, str] = {}     # digest of a text -> the first row that has it
        self.language = language_of(rules.languages) if rules.languages else None
        self.alike = Alike(rules.near, rules.run_words) if rules.near is not None else None

    def look(self, row: Row | Rejected) -> Removed | None:
        """Return why a row is taken out, or None."""
        if isinstance(row, Rejected):
            return Removed(row.origin, "unreadable", row.reason)
        try:
            text, answer = self.reading.texts(row)
        except BadRow as error:
            kind = {Empty: "empty", Tie: "tie"}.get(type(error), "unreadable")
            return Removed(row.origin, kind, str(error))
        if self.rules.unfinished_from is not None and (sign := cut_sign(answer, self.rules.unfinished_from)):
            return Removed(row.origin, "cut", sign)
        return self._other_language(row, text) or self._repeated(row, text)

    def _other_language(self, row: Row, text: str) -> Removed | None:
        if self.language is None:
            return None
        found, probability = self.language(text)
        if found in self.rules.languages or probability < self.rules.language_from:
            return None
        return Removed(row.origin, "language", f"it is {found} with a probability of {probability:.2f}")

    def _repeated(self, row: Row, text: str) -> Removed | None:
        plain = " ".join(unicodedata.normalize("NFC", text).split())
        digest = hashlib.blake2b(plain.encode(errors="surrogatepass"), digest_size=16).digest()
        if self.rules.exact and (first := self.seen.setdefault(digest, row.origin)) != row.origin:
            return Removed(row.origin, "duplicate", f"repeats {first}", first)
        if self.alike is None or (found := self.alike.first_like(plain, row.origin)) is None:
            return None
        like, similarity = found
        return Removed(row.origin, "near duplicate", f"{similarity:.0%} of its runs of words are those of {like}", like,
                       round(similarity, 4))


def cut_sign(answer: str, unfinished_from: int) -> str | None:
    """Return why an answer looks cut off, or None: code that is not closed, or a long text that no sentence ends."""
    if answer.count(FENCE) % 2:
        return f"its answer opens a block of code with {FENCE} and does not close it"
    text = answer.rstrip()
    last = text.rpartition("\n")[2]
    goes_on = text[-1:].islower() or text[-1:].isupper() or text.endswith(tuple(GOES_ON))
    if len(text) < unfinished_from or not goes_on or LINE_OF_LIST.match(last):
        return None
    return f"its answer of {len(text):,} characters ends within a sentence: ...{last[-40:]}"


def language_of(wanted: Sequence[str]) -> Callable[[str], tuple[str, float]]:
    """Return what gives a text's language and its probability. Raises WrongUse for a language that it does not know."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise WrongUse(f"--language needs py3langid, which cannot be imported ({error}); pip install 'powertrain[clean]'"
                       ) from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    known = [str(label) for label in identifier.labels]
    for language in wanted:
        if language not in known:
            raise WrongUse(f"the language {language!r} is not known; use a code of two letters, one of "
                           f"{', '.join(sorted(known))}")

    def classify(text: str) -> tuple[str, float]:
        found, probability = identifier.classify(text)
        return str(found), float(probability)

    return classify


class Alike:
    """The signatures of the texts that were kept."""

    def __init__(self, near: float, run_words: int) -> None:
        try:
            from rensa import RMinHash, RMinHashLSH
        except ImportError as error:
            raise WrongUse(f"near duplicates need rensa, which cannot be imported ({error}); pip install 'powertrain[clean]', "
                           "or leave them in with --no-near") from error
        self.near, self.run_words, self.sketch = near, run_words, RMinHash
        self.index = RMinHashLSH(near, HASHES, bands_for(near))
        self.kept: list[tuple[str, Any]] = []

    def first_like(self, text: str, origin: str) -> tuple[str, float] | None:
        """Return the kept text that this one is most like, with their similarity; None, and keep it, if it is like none."""
        sketch = self.sketch(num_perm=HASHES, seed=1)
        sketch.update(runs_of(text, self.run_words))
        found = [(sketch.jaccard(self.kept[key][1]), -key) for key in self.index.query(sketch)]
        similarity, key = max(found, default=(0.0, 0))
        if similarity >= self.near:
            return self.kept[-key][0], similarity
        self.index.insert(len(self.kept), sketch)
        self.kept.append((origin, sketch))
        return None


def bands_for(near: float) -> int:
    """Return the fewest bands of the hashes by which FOUND_SHARE of the pairs at the threshold are compared."""
    return next((bands for bands in reversed(BANDS) if 1 - (1 - near ** (HASHES // bands)) ** bands >= FOUND_SHARE), BANDS[0])


def runs_of(text: str, words: int) -> list[str]:
    """Return the runs of so many words in lower case; a shorter text is one run."""
    found = WORD.findall(text.lower())
    return list({" ".join(found[start:start + words]) for start in range(max(1, len(found) - words + 1))})
