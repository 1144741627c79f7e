"""The formats of rows that are known: the columns of each, and how their values are read.

A format's columns have our names; a column may have other names in well-known data sets, tried in order. FORMATS stands in
order of detection, the most specific first: a row that has the columns of two formats is read as the earlier one. Both
spellings of a turn are known, {"role", "content"} and {"from", "value"}, and so are other names of the roles.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from powertrain.data.rows.files import json_kind
from powertrain.data.rows.row import BadRow, Conversation, Empty, Message, Pair, Sample, Span, Text
from powertrain.data.rows.tools import calls_of, check_calls, tools_of, undescribed

MOST_TURNS = 1_000                           # of a conversation: its template is rendered up to each of them
JOIN = "\n\n"                                # between an instruction and its input, a context and its question
ROLE_NAMES = {"system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user",
              "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
              "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool", "tool_response": "tool",
              "function_response": "tool", "function_call": "assistant", "tool_call": "assistant"}
CALLS = ("function_call", "tool_call")       # roles of a turn whose text is a call
SPELLINGS = (("role", "content"), ("from", "value"))
# a turn -> the turns it may follow; None is the beginning, behind the system's text
FOLLOWS: Mapping[str, tuple[str | None, ...]] = {
    "user": (None, "assistant"), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}
A_TURN = {"user": "a user turn", "assistant": "an assistant turn", "tool": "a tool turn"}


class SeveralTurns(BadRow):
    """A conversation of several exchanges, where one was needed."""


def text_of(value: Any, column: str) -> str:
    """Return a text, or the texts of a list of parts such as {"type": "text", "text": ...}. Raises BadRow for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRow(f"{column!r} is {json_kind(value)}, not text")
    texts = []
    for part in value:
        kind = part.get("type", "text") if isinstance(part, Mapping) else json_kind(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise BadRow(f"{column!r} has a part of the type {kind!r}; only text is read")
        texts.append(part["text"])
    return "".join(texts)


def turns_of(value: Any, column: str) -> list[Message]:
    """Return the messages of a list of turns, in order, as they are. Raises BadRow if it is not one."""
    if isinstance(value, Mapping) and value and all(isinstance(inner, list) for inner in value.values()):
        # `datasets` turns a list of objects into an object of lists
        value = [dict(zip(value, inner, strict=False)) for inner in zip(*value.values(), strict=False)]
    if not isinstance(value, list):
        raise BadRow(f"{column!r} is {json_kind(value)}, not a list of turns")
    messages: list[Message] = []
    for number, turn in enumerate(value, 1):
        message = _message(turn, number, column)
        if message.is_null and not message.content and messages and _is_call(turn) and messages[-1].role == "assistant":
            before = messages.pop()          # an answer and its call, or several calls, are one turn of a template
            message = replace(before, tool_calls=before.tool_calls + message.tool_calls)
        messages.append(message)
    return messages


def _is_call(turn: Mapping[str, Any]) -> bool:
    return _role(turn) in CALLS


def _role(turn: Mapping[str, Any]) -> Any:
    role = next((turn[key] for key, _ in SPELLINGS if key in turn), None)
    return role.strip().lower() if isinstance(role, str) else role


def _message(turn: Any, number: int, column: str) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRow(f"turn {number} of {column!r} is {json_kind(turn)}, not an object with role and content")
    content_key = next((content for role, content in SPELLINGS if role in turn), SPELLINGS[0][1])
    role = _role(turn)
    if role is None:
        raise BadRow(f"turn {number} of {column!r} has no role; it has: {', '.join(map(str, turn)) or 'nothing'}")
    known = ROLE_NAMES.get(role) if isinstance(role, str) else None
    if known is None:
        raise BadRow(f"turn {number} of {column!r} has the role {role!r}; known are {', '.join(ROLE_NAMES)}")
    content, where = turn.get(content_key), f"turn {number} of {column!r}"
    if _is_call(turn):
        return Message("assistant", "", calls_of(content, where), is_null=True)
    calls = calls_of(turn.get("tool_calls") or turn.get("function_call"), where) if known == "assistant" else ()
    if content is None and not calls:
        raise BadRow(f"{where} has no {content_key}")
    if known == "tool" and isinstance(content, Mapping):
        content = json.dumps(content, ensure_ascii=False)        # a result that is no text
    text = "" if content is None else text_of(content, f"{content_key} of turn {number}")
    named = {key: str(turn[key]) for key in ("name", "tool_call_id") if known == "tool" and turn.get(key) is not None}
    return Message(known, text, calls, is_null=content is None, **named)


def is_blank(text: str) -> bool:
    return not text or text.isspace()


def conversation(messages: Iterable[Message], tools: tuple[Mapping[str, Any], ...] = ()) -> Conversation:
    """Check that there is something to learn and that the turns alternate; a blank system text is left out.

    Raises BadRow for an empty prompt or answer, no assistant's turn, turns that cannot follow each other, or a call of a tool
    that `tools` does not have.
    """
    turns = list(messages)
    if len(turns) > MOST_TURNS:
        raise BadRow(f"{len(turns):,} turns; a conversation has at most {MOST_TURNS:,}: divide it")
    if turns and turns[0].role == "system" and is_blank(turns[0].content):
        del turns[0]
    before: str | None = None
    for number, turn in enumerate(turns, 1):
        if turn.role == "system":
            if number > 1:
                raise BadRow(f"turn {number} is a system turn; it can only stand first")
            continue
        if before not in FOLLOWS[turn.role]:
            place = "at the beginning" if before is None else \
                f"after another {before}'s" if before == turn.role else f"after {A_TURN[before]}"
            raise BadRow(f"turn {number} is {A_TURN[turn.role]} {place}; user and assistant must alternate, "
                         "beginning with the user")
        if is_blank(turn.content) and turn.role != "tool" and not turn.tool_calls:
            raise Empty(f"empty {'answer' if turn.role == 'assistant' else 'prompt'} (turn {number})")
        before = turn.role
    if not any(turn.role == "assistant" for turn in turns):
        raise BadRow("no assistant turn: nothing to learn from")
    check_calls(turns, tools)
    system = turns[0].content if turns[0].role == "system" else ""
    return Conversation(tuple(turns), undescribed(tools, system))


def _exchange(prompt: str, answer: str) -> Conversation:
    return conversation([Message("user", prompt), Message("assistant", answer)])


def single_exchange(found: Conversation) -> Pair:
    """Return a conversation of one question and one answer as a pair, a system text before the question.

    Raises SeveralTurns if it has more: an encoder reads one text, and a decoder writes one.
    """
    turns: Sequence[Message] = found.messages
    lead = [turn.content for turn in turns if turn.role == "system"]
    rest = [turn for turn in turns if turn.role != "system"]
    if found.tools or any(turn.tool_calls for turn in rest):
        raise BadRow("it has tools, and an encoder-decoder model learns texts only")
    if [turn.role for turn in rest] != ["user", "assistant"]:
        raise SeveralTurns(f"{len(rest)} turns, and an encoder-decoder model learns from one user's and one assistant's")
    return Pair(JOIN.join([*lead, rest[0].content]), rest[1].content)


# ------------------------------------------------------------------------------------------------ formats

Kind = Literal["conversation", "pair", "span", "text", "preference", "rating", "comparison"]
Values = Mapping[str, Any]                   # our column -> value; optional ones are absent where they are null

SUMMARISE = "Summarise the following text."  # a user's words to a decoder, before the document


@dataclass(frozen=True)
class Column:
    name: str
    holds: Literal["text", "turns", "text or turns", "answers", "answer", "rating", "number", "tools", "calls"] = "text"
    also: tuple[str, ...] = ()               # its names in other data sets
    optional: bool = False

    def fits(self, value: Any) -> bool:
        """Return whether a value looks like one of this column; its content is checked when it is read."""
        if self.holds in ("answers", "tools", "calls"):
            return isinstance(value, str | list | Mapping)
        if self.holds == "number":
            return True                      # what is none is a bad row
        if self.holds == "rating":
            return isinstance(value, bool | int | str)
        if self.holds == "answer" and isinstance(value, Mapping) and ("role" in value or "from" in value):
            return True                      # one turn
        return (isinstance(value, str) and self.holds != "turns") or (self.holds != "text" and _are_turns(value))


def _are_turns(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(inner, list) for inner in value.values())
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


@dataclass(frozen=True)
class Format:
    name: str                                # the word for data.format
    kind: Kind
    columns: tuple[Column, ...]
    turns: tuple[tuple[str, ...], ...] = ()  # of a conversation: role and columns of its text; "" for a column of turns
    lead: str = ""                           # of a pair: what a decoder's prompt begins with

    def read(self, values: Values, *, as_prompt: bool) -> Sample:
        """Return the meaning of a row; a pair or span, if `as_prompt`, as a prompt and its answer. Raises BadRow."""
        if self.kind == "conversation":
            return self._conversation(values)
        if self.kind == "pair":
            source, target = (_text(values, column.name) for column in self.columns)
            return _exchange(JOIN.join(filter(None, [self.lead, source])), target) if as_prompt else Pair(source, target)
        return _span(values, as_prompt=as_prompt) if self.kind == "span" else Text(_text(values, "text"))

    def _conversation(self, values: Values) -> Conversation:
        holds = {column.name: column.holds for column in self.columns}
        messages: list[Message] = []
        for role, *names in self.turns:
            there = [name for name in names if name in values]
            if not there:
                continue
            kind, value = holds[there[0]], values[there[0]]
            if kind == "calls":
                messages.append(Message(role, "", calls_of(value, there[0]), is_null=True))
            elif kind == "turns" or (kind != "text" and not isinstance(value, str)):
                messages += turns_of(value, there[0])
            else:
                texts = [text_of(values[name], name) for name in there]
                messages.append(Message(role, JOIN.join(text for text in texts if not is_blank(text))))
        return conversation(messages, tools_of(values["tools"], "tools") if "tools" in values else ())


def _text(values: Values, column: str) -> str:
    text = text_of(values[column], column)
    if is_blank(text):
        raise Empty(f"empty {column}")
    return text


# ------------------------------------------------------------------------------------------------ spans


def _span(values: Values, *, as_prompt: bool) -> Span | Conversation:
    question, context = text_of(values["question"], "question"), text_of(values["context"], "context")
    if is_blank(question) or is_blank(context):
        raise Empty(f"empty {'question' if is_blank(question) else 'context'}")
    answers = _answers(values["answers"])
    if not as_prompt:
        return Span(question, context, tuple(text for text, _ in answers),
                    tuple(_start(text, start, context) for text, start in answers))
    if not answers:
        raise Empty("empty answer: the context does not answer the question, so there is nothing to write")
    return _exchange(JOIN.join([context, question]), answers[0][0])


def _answers(value: Any) -> list[tuple[str, int | None]]:
    """Return the answers that are not blank, each with the character where it starts, if the row says so.

    SQuAD's {"text": [...], "answer_start": [...]}, a list of {"text", "answer_start"}, a list of texts, or one text.
    """
    if isinstance(value, Mapping):
        texts, starts = value.get("text"), value.get("answer_start")
        texts = [texts] if isinstance(texts, str) else texts
        starts = [starts] if isinstance(starts, int) else starts or []
        if not isinstance(texts, list) or not isinstance(starts, list) or (starts and len(starts) != len(texts)):
            raise BadRow("'answers' needs as many answer_start as text")
        found = list(zip(texts, starts or [None] * len(texts), strict=True))
    elif isinstance(value, list):
        found = [(item.get("text"), item.get("answer_start")) if isinstance(item, Mapping) else (item, None) for item in value]
    else:
        found = [(value, None)]
    for text, start in found:
        if not isinstance(text, str):
            raise BadRow(f"'answers' holds {json_kind(text)} as text")
        if start is not None and type(start) is not int:
            raise BadRow(f"'answers' holds {json_kind(start)} as answer_start")
    return [(text, start) for text, start in found if not is_blank(text)]


def _start(text: str, start: int | None, context: str) -> int:
    short = repr(text if len(text) <= 40 else f"{text[:37]}...")
    first = context.find(text)
    if first < 0:
        raise BadRow(f"the answer {short} is not found in the context")
    if start is None:
        return first
    if start < 0 or context[start:start + len(text)] != text:
        raise BadRow(f"the answer {short} is not at character {start} of the context, but at {first}")
    return start


# ------------------------------------------------------------------------------------------------ the table

SYSTEM = Column("system", optional=True)
TOOLS = Column("tools", "tools", also=("functions",), optional=True)
FORMATS = (
    Format("messages", "conversation", (Column("messages", "turns"), SYSTEM, TOOLS), (("system", "system"), ("", "messages"))),
    Format("sharegpt", "conversation", (Column("conversations", "turns"), SYSTEM, TOOLS),
           (("system", "system"), ("", "conversations"))),
    Format("alpaca", "conversation", (Column("instruction"), Column("input", also=("context",), optional=True),
                                      Column("output", also=("response",)), SYSTEM),
           (("system", "system"), ("user", "instruction", "input"), ("assistant", "output"))),
    Format("xlam", "conversation", (Column("query"), Column("answers", "calls"), Column("tools", "tools")),
           (("user", "query"), ("assistant", "answers"))),
    Format("context_question_answers", "span", (Column("context"), Column("question"),
                                                Column("answers", "answers", also=("answer",)))),
    Format("prompt_completion", "conversation",
           (Column("prompt", "text or turns"), Column("completion", "text or turns", also=("response",)), TOOLS),
           (("user", "prompt"), ("assistant", "completion"))),
    Format("question_answer", "conversation", (Column("question"), Column("answer")),
           (("user", "question"), ("assistant", "answer"))),
    Format("input_messages", "conversation", (Column("input", "turns"), Column("output")),
           (("", "input"), ("assistant", "output"))),
    Format("document_summary", "pair", (Column("document", also=("article", "dialogue", "text")),
                                        Column("summary", also=("highlights",))), lead=SUMMARISE),
    Format("input_output", "pair", (Column("input", also=("source",)), Column("output", also=("target",)))),
    Format("text", "text", (Column("text"),)),
)
BY_NAME: Mapping[str, Format] = {known.name: known for known in FORMATS}
# other names for data.format: as data sets and other trainers call them
ALSO_CALLED = {"squad": "context_question_answers", "span": "context_question_answers", "qa": "question_answer",
               "instruction_input_output": "alpaca", "instruction_output": "alpaca", "chat": "messages", "chatml": "messages",
               "conversations": "sharegpt", "summary": "document_summary", "plain": "text", "completion": "text"}
