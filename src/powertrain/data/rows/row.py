"""Rows (of JSONL, CSV, a table or a text file) before a format is known; and samples, which are rows read by their format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    fields: dict[str, Any]                   # column -> value, as JSON knows values
    origin: str                              # "train.jsonl:17", "train.parquet row 17", "org/name[train] row 17"; from 1


@dataclass(frozen=True)
class Rejected:
    """A row that could not be read at all."""

    origin: str
    reason: str


class BadRow(ValueError):
    """A row that does not fit its format. The message is the reason, without the origin."""


class Empty(BadRow):
    """A row whose prompt, answer or text is empty."""


class Tie(BadRow):
    """A pair whose answers are equal."""


def fault(value: Any) -> str | None:
    """Return why a value cannot be trained on in any format: NUL, or half of a surrogate pair. None if it can."""
    if isinstance(value, str):
        return _text_fault(value)
    if isinstance(value, Mapping):
        return next((found for key, inner in value.items() if (found := fault(key) or fault(inner))), None)
    if isinstance(value, list | tuple):
        return next((found for inner in value if (found := fault(inner))), None)
    return None


def checked(fields: dict[str, Any], origin: str) -> Row | Rejected:
    """Return the row, or its rejection where a value has a fault."""
    reason = fault(fields)
    return Rejected(origin, reason) if reason else Row(fields, origin)


def _text_fault(text: str) -> str | None:
    if (at := text.find("\0")) >= 0:
        return f"NUL at character {at} of a text; mend or remove the row"
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        return f"the lone surrogate {half} at character {error.start} of a text; mend or remove the row"
    return None


# ------------------------------------------------------------------------------------------------ meaning


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, which an assistant's turn makes."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the call as chat templates take it."""
        given = {} if self.id is None else {"id": self.id}
        return {**given, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Message:
    role: str                                # "system", "user", "assistant" or "tool"
    content: str
    tool_calls: tuple[ToolCall, ...] = ()    # of an assistant's turn
    name: str | None = None                  # of a tool turn: the tool that answers
    tool_call_id: str | None = None          # and the call that it answers
    is_null: bool = False                    # the row has null in place of an empty content, and a template may ask for that

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates take it."""
        found: dict[str, Any] = {"role": self.role, "content": None if self.is_null else self.content}
        if self.tool_calls:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        more = {"name": self.name, "tool_call_id": self.tool_call_id}
        return found | {key: value for key, value in more.items() if value is not None}

    @property
    def is_plain(self) -> bool:
        """Return whether the message has nothing but its role and content."""
        return not (self.tool_calls or self.is_null) and self.name is None and self.tool_call_id is None


@dataclass(frozen=True)
class Conversation:
    """Turns in order: a system text or none, then user and assistant by turns; at least one is the assistant's."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()            # that the assistant may call, as chat templates take them


@dataclass(frozen=True)
class Pair:
    """The text that an encoder reads, and the text that a decoder should write."""

    source: str
    target: str


@dataclass(frozen=True)
class Span:
    """A question about a context; every answer is a piece of it: context[start:start + len(answer)] == answer.

    None at all: the context does not answer the question.
    """

    question: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]                  # characters


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, each as a whole conversation: the chosen one is preferred to the rejected one."""

    chosen: Conversation
    rejected: Conversation
    shared: int                              # messages at the beginning of both: the prompt
    margin: float = 0.0                      # by how much the chosen one is better, as a reward model is to say


@dataclass(frozen=True)
class Rating:
    """A conversation whose answer is desirable or not."""

    conversation: Conversation
    shared: int                              # messages at the beginning that are the prompt
    desirable: bool


Sample = Conversation | Pair | Span | Text | Preference | Rating
