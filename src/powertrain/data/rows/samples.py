"""What a row means: a conversation, a pair, a span or a text, whatever its columns were called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    role: str                                # "system", "user", "assistant" or "tool"
    content: str


@dataclass(frozen=True)
class Conversation:
    """Turns in order: a system text or none, then user and assistant by turns; at least one is the assistant's."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Pair:
    """What an encoder reads and what a decoder is to write."""

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


Sample = Conversation | Pair | Span | Text
