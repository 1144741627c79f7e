"""Turns as data sets write them, read into a conversation that a chat template can render.

Both spellings of a turn are known, {"role", "content"} and {"from", "value"}, and so are the names that each role goes by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from powertrain.data.reading import json_kind
from powertrain.data.rows.row import BadRow
from powertrain.data.rows.samples import Conversation, Message, Pair

JOIN = "\n\n"                                # between an instruction and its input, a context and its question
ROLE_NAMES = {"system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user",
              "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
              "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool"}
SPELLINGS = (("role", "content"), ("from", "value"))
# a turn -> the turns it may follow; None is the beginning, behind the system's text
FOLLOWS: Mapping[str, tuple[str | None, ...]] = {
    "user": (None, "assistant"), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}


class SeveralTurns(BadRow):
    """A conversation of several exchanges, where one was needed."""


def text_of(value: Any, column: str) -> str:
    """A text, or the texts of a list of parts such as {"type": "text", "text": ...}. Raises BadRow for anything else."""
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
    """The messages of a list of turns, in order, as they are. Raises BadRow if it is not one."""
    if isinstance(value, Mapping) and value and all(isinstance(inner, list) for inner in value.values()):
        # `datasets` turns a list of objects into an object of lists
        value = [dict(zip(value, inner, strict=False)) for inner in zip(*value.values(), strict=False)]
    if not isinstance(value, list):
        raise BadRow(f"{column!r} is {json_kind(value)}, not a list of turns")
    return [_message(turn, number, column) for number, turn in enumerate(value, 1)]


def _message(turn: Any, number: int, column: str) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRow(f"turn {number} of {column!r} is {json_kind(turn)}, not an object with role and content")
    role_key, content_key = next((keys for keys in SPELLINGS if keys[0] in turn), SPELLINGS[0])
    role = turn.get(role_key)
    if role is None:
        raise BadRow(f"turn {number} of {column!r} has no role; it has: {', '.join(map(str, turn)) or 'nothing'}")
    known = ROLE_NAMES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        raise BadRow(f"turn {number} of {column!r} has the role {role!r}; known are {', '.join(ROLE_NAMES)}")
    content = turn.get(content_key)
    if content is None:
        calls = "; tool calls are not read" if turn.get("tool_calls") else ""
        raise BadRow(f"turn {number} of {column!r} has no {content_key}{calls}")
    return Message(known, text_of(content, f"{content_key} of turn {number}"))


def is_blank(text: str) -> bool:
    return not text or text.isspace()


def conversation(messages: Iterable[Message]) -> Conversation:
    """Checks that there is something to learn and that the turns alternate; a blank system text is left out.

    Raises BadRow for an empty prompt or answer, no assistant's turn, or turns that cannot follow each other.
    """
    turns = list(messages)
    if turns and turns[0].role == "system" and is_blank(turns[0].content):
        del turns[0]
    before: str | None = None
    for number, turn in enumerate(turns, 1):
        if turn.role == "system":
            if number > 1:
                raise BadRow(f"turn {number} is a system turn; it can only stand first")
            continue
        if before not in FOLLOWS[turn.role]:
            raise BadRow(f"turn {number} is {_named(turn.role)} {_placed(turn.role, before)}; user and assistant must "
                         "alternate, beginning with the user")
        if is_blank(turn.content) and turn.role != "tool":
            raise BadRow(f"empty {'answer' if turn.role == 'assistant' else 'prompt'} (turn {number})")
        before = turn.role
    if not any(turn.role == "assistant" for turn in turns):
        raise BadRow("no assistant turn: nothing to learn from")
    return Conversation(tuple(turns))


def _named(role: str) -> str:
    return f"{'an' if role == 'assistant' else 'a'} {role} turn"


def _placed(role: str, before: str | None) -> str:
    return "at the beginning" if before is None else f"after another {role}'s" if before == role else f"after {_named(before)}"


def prompt_and_answer(prompt: str, answer: str) -> Conversation:
    """One user's and one assistant's turn."""
    return conversation([Message("user", prompt), Message("assistant", answer)])


def single_exchange(found: Conversation) -> Pair:
    """A conversation of one question and one answer as a pair, a system text before the question.

    Raises SeveralTurns if it has more: an encoder reads one text, and a decoder writes one.
    """
    turns: Sequence[Message] = found.messages
    lead = [turn.content for turn in turns if turn.role == "system"]
    rest = [turn for turn in turns if turn.role != "system"]
    if [turn.role for turn in rest] != ["user", "assistant"]:
        raise SeveralTurns(f"{len(rest)} turns, and an encoder-decoder model learns from one user's and one assistant's")
    return Pair(JOIN.join([*lead, rest[0].content]), rest[1].content)
