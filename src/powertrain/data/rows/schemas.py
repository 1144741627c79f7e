"""The meaning of rows, found by looking at the first rows, and the sentence that states it.

A format fits a row that has its columns with values of the right kind. The format that fits most of the first rows is taken,
if these are more than half; the other rows are bad rows. Among formats that fit equally many, the most specific is taken.

The model's task decides how a row is read: a decoder (causal) takes conversations and texts, an encoder-decoder (seq2seq)
pairs and conversations of one exchange, a question-answering head (span) questions with their places in a context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.data.rows.files import FIELDS_NAMED, json_kind
from powertrain.data.rows.formats import ALSO_CALLED, FORMATS, Format, Kind, SeveralTurns, single_exchange
from powertrain.data.rows.formats import BY_NAME as OF_ANSWERS
from powertrain.data.rows.preferences import PREFERENCE_FORMATS
from powertrain.data.rows.row import BadRow, Conversation, Row, Sample
from powertrain.records import WrongUse, several
from powertrain.records.errors import did_you_mean

COMPARED: Mapping[str, tuple[Kind, ...]] = {
    "preference": ("preference",), "comparison": ("comparison", "preference"), "rating": ("rating", "preference")}
DECODERS = ("causal", "reward")              # tasks of models that read a prompt and its answer as one document
NEEDED = {"preference": "prompt, chosen and rejected", "comparison": "prompt, chosen and rejected",
          "rating": "prompt, completion and label, or prompt, chosen and rejected"}
FITTING_SHARE = 0.5                          # of the first rows: a format that fits no more than these is not theirs
PREFERENCES = ("chosen", "rejected")
BY_NAME: Mapping[str, Format] = {**OF_ANSWERS, **{known.name: known for known in PREFERENCE_FORMATS}}
ANSWERS = "answers"                          # what most objectives learn from; the others from a key of COMPARED
KINDS: Mapping[Kind, str] = {"conversation": "conversations", "text": "plain text", "pair": "sequence-to-sequence data",
                             "span": "extractive question-answering data", "preference": "pairs of answers",
                             "comparison": "pairs of answers",
                             "rating": "rated answers"}


@dataclass(frozen=True)
class Schema:
    """The format, kind and columns by which the rows of one source are read."""

    name: str                                # of the format
    kind: Kind                               # of what `read` gives
    columns: Mapping[str, str]               # our column -> the data's; an optional one that the data lack is absent

    def to_json(self) -> list[Any]:
        return [self.name, self.kind, dict(self.columns)]

    def read(self, fields: Mapping[str, Any]) -> Sample:
        """Return the meaning of a row. Raises BadRow if the row does not fit."""
        known = BY_NAME[self.name]
        values = {ours: fields[theirs] for ours, theirs in self.columns.items() if fields.get(theirs) is not None}
        for column in known.columns:
            if column.name not in values and not column.optional:
                theirs = self.columns[column.name]
                raise BadRow(f"the column {theirs!r} is null" if theirs in fields else
                             f"no column {theirs!r}; it has: {_named(list(fields))}")
        sample = known.read(values, as_prompt=known.kind != self.kind)
        return single_exchange(sample) if self.kind == "pair" and isinstance(sample, Conversation) else sample


def find_schema(rows: Sequence[Row], *, name: str | None, columns: Mapping[str, str], task: str,
                learns: str = ANSWERS) -> tuple[Schema, str]:
    """Return how to read the data of which `rows` are the first, for a model that does `task`; and a sentence that states it.

    `learns`: "answers", or a key of COMPARED; ratings are made of pairs too. `name` forces a format;
    `columns` maps our columns to the data's, and only formats that have them all are considered.
    Raises WrongUse if nothing fits, or `task` cannot learn from it; the message has the columns and the cure.
    """
    if not rows:
        raise WrongUse("there is no row to look at; give a source with rows")
    _check_columns(rows, columns)
    if name is not None:
        plain = name.strip().lower().replace("/", "_").replace("-", "_").replace(" ", "_")
        named = BY_NAME.get(ALSO_CALLED.get(plain, plain))
        if named is None:
            raise WrongUse(f"data.format={name} is not known; it is one of {', '.join(BY_NAME)}"
                           f"{did_you_mean(plain, [*BY_NAME, *ALSO_CALLED])}")
        known = named
        taken = _taken(rows, known, columns)
        _check_taken(rows, known, taken, columns)
    else:
        known, taken = _detected(rows, columns, learns)
    kind = _kind_for(known, " and ".join(taken.values()), task, learns, named=name is not None, origin=rows[0].origin)
    schema = Schema(known.name, kind, taken)
    bad = [reason for row in rows if (reason := _fault(row, schema))]
    if len(bad) == len(rows):
        cure = "use a decoder, or rows of one question and one answer" if isinstance(bad[0], SeveralTurns) else \
            "mend the data, or choose another data.format"
        raise WrongUse(f"{rows[0].origin}: none of the first {len(rows)} rows can be read as {schema.name}; the first "
                       f"fails because of: {bad[0]}; {cure}")
    return schema, _said(rows, schema, len(bad), found=name is None)


def _fault(row: Row, schema: Schema) -> BadRow | None:
    try:
        schema.read(row.fields)
    except BadRow as error:
        return error
    return None


# ------------------------------------------------------------------------------------------------ which format


def _check_columns(rows: Sequence[Row], columns: Mapping[str, str]) -> None:
    ours = sorted({column.name for known in BY_NAME.values() for column in known.columns})
    for wanted, theirs in columns.items():
        if wanted not in ours:
            raise WrongUse(f"data.columns names {wanted!r}, which no format has; known are {', '.join(ours)}"
                           f"{did_you_mean(wanted, ours)}")
        if not any(theirs in row.fields for row in rows):
            raise WrongUse(f"{rows[0].origin}: no column {theirs!r}, which data.columns names for {wanted}; "
                           f"there are: {_shown(rows)}{did_you_mean(theirs, _found_columns(rows))}")


def _taken(rows: Sequence[Row], known: Format, columns: Mapping[str, str]) -> dict[str, str]:
    """Return our column -> the data's, as far as the data have it: by `columns`, else the one of its names that fits best."""
    taken: dict[str, str] = {}
    for column in known.columns:
        names = [columns[column.name]] if column.name in columns else [column.name, *column.also]
        there = [theirs for theirs in names if any(row.fields.get(theirs) is not None for row in rows)]
        if there:
            taken[column.name] = max(there, key=lambda theirs: sum(column.fits(row.fields.get(theirs)) for row in rows))
    return taken


def _fits(row: Row, known: Format, taken: Mapping[str, str]) -> bool:
    values = ((column, row.fields.get(taken[column.name]) if column.name in taken else None) for column in known.columns)
    return all(column.optional if value is None else column.fits(value) for column, value in values)


def _detected(rows: Sequence[Row], columns: Mapping[str, str], learns: str) -> tuple[Format, dict[str, str]]:
    pairs = sum(all(name in row.fields for name in PREFERENCES) for row in rows)
    if learns == ANSWERS and not columns and pairs > len(rows) * FITTING_SHARE:
        of_turns = isinstance(rows[0].fields.get("chosen"), list)
        cure = "data.format=messages data.columns={messages: chosen}" if of_turns else \
            "data.format=prompt_completion data.columns={completion: chosen}"
        raise WrongUse(f"{rows[0].origin}: rows with chosen and rejected are preference data; to learn which answer is better "
                       f"use objective=dpo (or orpo, simpo, kto, reward); to learn from the chosen answers alone, use '{cure}'")
    best: tuple[Format, dict[str, str]] | None = None
    most = int(len(rows) * FITTING_SHARE)
    formats = FORMATS if learns == ANSWERS else [known for known in PREFERENCE_FORMATS if known.kind in COMPARED[learns]]
    for known in formats:
        if not columns.keys() <= {column.name for column in known.columns}:
            continue
        taken = _taken(rows, known, columns)
        fitting = sum(_fits(row, known, taken) for row in rows)
        if fitting > most:
            best, most = (known, taken), fitting
    if best is None:
        mapped = f" with {', '.join(f'{ours} in {theirs}' for ours, theirs in columns.items())}" if columns else ""
        if learns != ANSWERS:
            raise WrongUse(f"{rows[0].origin}: the columns {_shown(rows)} are no {KINDS[formats[0].kind]}{mapped}, from which "
                           f"this objective learns; it needs rows with {NEEDED[learns]}; name other columns: "
                           "data.columns={chosen: better, rejected: worse}")
        raise WrongUse(f"{rows[0].origin}: the columns {_shown(rows)} match no known format{mapped}. The formats are "
                       f"{', '.join(known.name for known in FORMATS)} (docs/fine-tuning.md). Name the format and its columns: "
                       "data.format=question_answer 'data.columns={question: title, answer: body}'")
    return best


def _check_taken(rows: Sequence[Row], known: Format, taken: Mapping[str, str], columns: Mapping[str, str]) -> None:
    names = [column.name for column in known.columns]
    if foreign := [ours for ours in columns if ours not in names]:
        raise WrongUse(f"data.columns names {foreign[0]!r}, and data.format={known.name} has only {', '.join(names)}")
    lacking = [column.name for column in known.columns if not column.optional and column.name not in taken]
    if lacking:
        example = f"{{{lacking[0]}: {next(iter(_found_columns(rows)), 'NAME')}}}"
        raise WrongUse(f"{rows[0].origin}: data.format={known.name} needs {' and '.join(lacking)}, and there are only: "
                       f"{_shown(rows)}; say which column it is, such as 'data.columns={example}'")


# ------------------------------------------------------------------------------------------------ for which model


def _kind_for(known: Format, columns: str, task: str, learns: str, *, named: bool, origin: str) -> Kind:
    """Return the kind of sample as which a model that does `task` reads `known`. Raises WrongUse if it cannot learn from it."""
    if (learns != ANSWERS or known.kind in COMPARED) and known.kind not in COMPARED.get(learns, ()):
        cure = f"name the format of such rows, or use another objective than one that learns from {KINDS[_kind(learns)]}" \
            if learns != ANSWERS else f"use objective={'kto' if known.kind == 'rating' else 'dpo'}"
        raise WrongUse(f"{origin}: data.format={known.name} holds {KINDS[known.kind]}; {cure}")
    if known.kind in COMPARED:
        if task not in DECODERS:
            raise WrongUse(f"{origin}: preferences train a decoder, and this model is "
                           f"{'an encoder-decoder' if task == 'seq2seq' else 'a question-answering head'}; use a decoder")
        return _kind(learns)
    if task == "span" and known.kind != "span":
        raise WrongUse(f"{origin}: rows with {columns} are {KINDS[known.kind]}, and a question-answering head learns "
                       "from context, question and answers; use such data, or another model.task")
    if task == "seq2seq" and known.kind == "text":
        raise WrongUse(f"{origin}: plain text teaches a decoder, and this is an encoder-decoder model, which learns from "
                       'pairs; use rows such as {"input", "output"}, or a decoder')
    if task == "span" or known.kind == "text":
        return known.kind
    if not (named or known.kind == "conversation" or (known.kind == "pair" and task == "seq2seq")):
        able = "an encoder-decoder model (T5, BART)" if known.kind == "pair" else "a question-answering head (model.task=span)"
        raise WrongUse(f"{origin}: rows with {columns} are {KINDS[known.kind]}, and this model is "
                       f"{'an encoder-decoder' if task == 'seq2seq' else 'a decoder'}; use {able}, or "
                       f"data.format={known.name} to train it as a prompt and its answer")
    return "pair" if task == "seq2seq" else "conversation"


def _kind(learns: str) -> Kind:
    return "rating" if learns == "rating" else "comparison" if learns == "comparison" else "preference"


# ------------------------------------------------------------------------------------------------ the sentence


def _said(rows: Sequence[Row], schema: Schema, bad: int, *, found: bool) -> str:
    used = ", ".join(theirs if ours == theirs else f"{ours} = {theirs}" for ours, theirs in schema.columns.items())
    unused = [theirs for theirs in _found_columns(rows) if theirs not in schema.columns.values()]
    looked = f"found by looking at {several(len(rows), 'row')}" if found else "as data.format says"
    return (f"rows are {schema.name} ({looked}), read as {KINDS[schema.kind]} from {used}"
            + (f"; not used: {_named(unused)}" if unused else "")
            + (f"; {bad} of these rows do not fit" if bad else ""))


def _found_columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.fields))


def _shown(rows: Sequence[Row]) -> str:
    """Return the columns, each that is not text with its kind: "question, answer (a number)"."""
    shown = []
    for name in _found_columns(rows):
        value = next((row.fields[name] for row in rows if row.fields.get(name) is not None), None)
        shown.append(name if isinstance(value, str) else f"{name} ({json_kind(value)})")
    return _named(shown) if shown else "none"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - FIELDS_NAMED} more" if len(names) > FIELDS_NAMED else ""
    return ", ".join(names[:FIELDS_NAMED]) + more or "nothing"
