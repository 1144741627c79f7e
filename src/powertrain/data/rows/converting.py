"""From one shape of rows to another, with the same meaning: what a model learns from a row is compared before and after.

A shape that has no place for something that a row holds (a second exchange, tools) is refused, by the row and what would be
lost. Columns that have no part in the meaning, such as an id, are kept as they are.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from powertrain.data.rows.reading import read_rows
from powertrain.data.rows.row import BadRow, Conversation, Message, Preference, Rating, Rejected, Row, Sample, Text
from powertrain.data.rows.schemas import ANSWERS, BY_NAME, COMPARED, Schema, find_schema
from powertrain.data.rows.writing import TABLES, Rows, check_output, write_rows
from powertrain.records import WrongUse
from powertrain.records.errors import did_you_mean

LOOKED_AT = 64               # rows, to find out what they mean
SHARED_ROLES = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}

Fields = dict[str, Any]


@dataclass(frozen=True)
class Converted:
    rows: int
    read_as: str                             # a sentence: the format of the source
    kept: tuple[str, ...]                    # columns that went along


def convert(source: str, out: Path, *, cache: Path, shape: str | None = None, name: str | None = None,
            columns: Mapping[str, str] | None = None, drop: Sequence[str] = (), split: str | None = None) -> Converted:
    """Write the rows of `source` as `out`, in `shape` if one is named. Raises WrongUse where something would be lost."""
    if shape is not None and shape not in SHAPES:
        raise WrongUse(f"there is no shape {shape!r}; use one of {', '.join(SHAPES)}{did_you_mean(shape, SHAPES)}")
    check_output(out, [source], split)

    def plain() -> Iterator[Row]:
        for row in read_rows(source, cache=cache, split=split):
            if isinstance(row, Rejected):
                raise WrongUse(f"{row.origin}: {row.reason}; `powertrain data clean` takes such rows out")
            yield Row({key: value for key, value in row.fields.items() if key not in drop}, row.origin)

    first = [row for row, _ in zip(plain(), range(LOOKED_AT), strict=False)]
    if missing := [column for column in drop if not any(column in row.fields for row in
                                                        read_rows(source, cache=cache, split=split, most=LOOKED_AT)
                                                        if isinstance(row, Row))]:
        raise WrongUse(f"{source} has no column {missing[0]!r} to leave out; there are {', '.join(first[0].fields)}")
    if shape is None:
        return Converted(write_rows(out, plain), "rows are kept as they are", tuple(first[0].fields))
    reader = reader_of(first, name, columns or {}, shape)
    check_collisions(first, reader, shape)
    tabular = out.suffix.lower() in TABLES
    return Converted(write_rows(out, _shaped(plain, reader, shape, tabular), _same(reader, shape)), reader.said, reader.kept)


# ------------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Reader:
    """How the rows of a source are read."""

    schema: Schema
    used: tuple[str, ...]                    # columns that have a part in the meaning
    kept: tuple[str, ...]                    # the others of the first rows
    said: str


def reader_of(rows: Sequence[Row], name: str | None, columns: Mapping[str, str], shape: str) -> Reader:
    """Return how to read rows, of which `rows` are the first, to write them in `shape`. Raises WrongUse if no format fits."""
    schema, said = find_schema(rows, name=name, columns=columns, task="causal", learns=shape if shape in COMPARED else ANSWERS)
    used = tuple(schema.columns.values())
    everything = dict.fromkeys(key for row in rows for key in row.fields)
    return Reader(schema, used, tuple(key for key in everything if key not in used), said)


def check_collisions(rows: Sequence[Row], reader: Reader, shape: str) -> None:
    """Raise WrongUse if a column that goes along has the name of one that the shape writes."""
    both = [key for key in reader.kept if key in SHAPES[shape][1]]
    if both:
        raise WrongUse(f"{rows[0].origin}: the column {both[0]!r} has no part in the rows' meaning, and {shape} writes a "
                       f"column of that name; leave it out with --drop {both[0]}")


def _shaped(rows: Rows, reader: Reader, shape: str, tabular: bool) -> Rows:
    write, _ = SHAPES[shape]

    def shaped() -> Iterator[Row]:
        for row in rows():
            try:
                meaning = reader.schema.read(row.fields)
                fields = write(meaning, tabular)
                again = _read_as(shape, fields)
            except BadRow as error:
                raise WrongUse(f"{row.origin}: {error}") from error
            if again != _without_null(meaning):
                raise WrongUse(f"{row.origin}: as {shape} the row would mean something else; use another --shape")
            others = {key: value for key, value in row.fields.items() if key not in reader.used}
            yield Row({**others, **fields}, row.origin)

    return shaped


def _same(reader: Reader, shape: str) -> Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]:
    """Return how a written row is compared with what is read back: by meaning, and the other columns by value."""
    written = SHAPES[shape][1]

    def same(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
        if _read_as(shape, wanted) != _read_as(shape, found):
            return str(written[0])
        return next((key for key in wanted if key not in written and (wanted[key] or None) != (found.get(key) or None)), None)

    return same


def _read_as(shape: str, fields: Mapping[str, Any]) -> Sample:
    known = BY_NAME[shape]
    columns = {column.name: column.name for column in known.columns if fields.get(column.name) is not None}
    return _without_null(Schema(shape, known.kind, columns).read(fields))


def _without_null(meaning: Sample) -> Sample:
    """Return the meaning without the difference of null and an empty text in a turn of calls."""
    if isinstance(meaning, Conversation):
        return replace(meaning, messages=tuple(replace(message, is_null=False) for message in meaning.messages))
    return meaning


# ------------------------------------------------------------------------------------------------ writing


def _conversation(meaning: Sample, shape: str) -> Conversation:
    if isinstance(meaning, Conversation):
        return meaning
    what = "a text, which has no turns" if isinstance(meaning, Text) else "no conversation"
    raise BadRow(f"the row is {what}; it cannot be written as {shape}")


def _messages(meaning: Sample, tabular: bool) -> Fields:
    found = _conversation(meaning, "messages")
    tools: Fields = {"tools": _as_json([*found.tools]) if tabular else [*found.tools]} if found.tools else {}
    return {"messages": [_turn(message, tabular) for message in found.messages], **tools}


def _turn(message: Message, tabular: bool) -> Fields:
    """Return a turn as `messages` holds it. In a table arguments are JSON text, as in OpenAI's files."""
    turn = message.plain()
    if not tabular or "tool_calls" not in turn:
        return turn
    calls = [{**call, "function": {**call["function"], "arguments": _as_json(call["function"]["arguments"])}}
             for call in turn["tool_calls"]]
    return {**turn, "tool_calls": calls}


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _sharegpt(meaning: Sample, tabular: bool) -> Fields:
    found = _conversation(meaning, "sharegpt")
    turns: list[Fields] = []
    for message in found.messages:
        if message.name is not None or message.tool_call_id is not None or any(call.id for call in message.tool_calls):
            raise BadRow("sharegpt has no place for a tool_call_id, or for the name of the tool that answers; use messages")
        if message.content or not message.tool_calls:
            turns.append({"from": SHARED_ROLES[message.role], "value": message.content})
        for call in message.tool_calls:
            turns.append({"from": "function_call", "value": _as_json({"name": call.name, "arguments": call.arguments})})
    return {"conversations": turns, **({"tools": _as_json([*found.tools])} if found.tools else {})}


def _exchange(meaning: Sample, shape: str) -> tuple[Fields, str, str]:
    """Return a row's system text (as a field, or none), question and answer. Raises BadRow if it has more."""
    found = _conversation(meaning, shape)
    rest = [message for message in found.messages if message.role != "system"]
    if found.tools or any(message.tool_calls for message in rest):
        raise BadRow(f"{shape} has no place for tools; use messages or sharegpt")
    if [message.role for message in rest] != ["user", "assistant"]:
        raise BadRow(f"{shape} holds one question and one answer, and the row has {len(rest)} turns; use messages or sharegpt")
    system: Fields = {} if len(rest) == len(found.messages) else {"system": found.messages[0].content}
    return system, rest[0].content, rest[1].content


def _alpaca(meaning: Sample, tabular: bool) -> Fields:
    system, question, answer = _exchange(meaning, "alpaca")
    return {"instruction": question, "input": "", "output": answer, **system}


def _prompt_completion(meaning: Sample, tabular: bool) -> Fields:
    system, question, answer = _exchange(meaning, "prompt_completion")
    begun = [Message("system", system["system"])] if system else []
    return {"prompt": [message.plain() for message in [*begun, Message("user", question)]],
            "completion": [Message("assistant", answer).plain()]}


def _preference(meaning: Sample, tabular: bool) -> Fields:
    if not isinstance(meaning, Preference):
        raise BadRow("the row is no pair of answers")
    sides = {name: _messages(replace(side, messages=side.messages[meaning.shared:]), tabular)["messages"]
             for name, side in (("chosen", meaning.chosen), ("rejected", meaning.rejected))}
    begun = _messages(replace(meaning.chosen, messages=meaning.chosen.messages[:meaning.shared]), tabular)
    return {"prompt": begun.pop("messages"), **sides, **begun}


def _rating(meaning: Sample, tabular: bool) -> Fields:
    if not isinstance(meaning, Rating):
        raise BadRow("the row is a pair of answers, which are two ratings; write it as preference")
    found, shared = meaning.conversation, meaning.shared
    begun = _messages(replace(found, messages=found.messages[:shared]), tabular)
    answer = _messages(replace(found, messages=found.messages[shared:]), tabular)["messages"]
    return {"prompt": begun.pop("messages"), "completion": answer, "label": meaning.desirable, **begun}


def _text(meaning: Sample, tabular: bool) -> Fields:
    if not isinstance(meaning, Text):
        raise BadRow("the row has turns, which a text does not keep apart; use messages")
    return {"text": meaning.text}


Write = Callable[[Sample, bool], Fields]
SHAPES: Mapping[str, tuple[Write, tuple[str, ...]]] = {      # how a meaning is written, and as which columns
    "messages": (_messages, ("messages", "tools")),
    "sharegpt": (_sharegpt, ("conversations", "tools")),
    "alpaca": (_alpaca, ("instruction", "input", "output", "system")),
    "prompt_completion": (_prompt_completion, ("prompt", "completion")),
    "text": (_text, ("text",)),
    "preference": (_preference, ("prompt", "chosen", "rejected", "tools")),
    "rating": (_rating, ("prompt", "completion", "label", "tools")),
}
