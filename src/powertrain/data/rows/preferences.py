"""Rows that say which answer is better: pairs of a chosen and a rejected answer, and answers that are rated by themselves.

The prompt has a column of its own, or is implicit: then it is how both answers begin. Answers are texts, turns, or one turn.
Names and meanings are TRL's (its page "Dataset formats"); LLaMA-Factory's names of the columns are known too.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from powertrain.data.rows.files import json_kind
from powertrain.data.rows.formats import TOOLS, Column, Format, Values, conversation, is_blank, turns_of
from powertrain.data.rows.row import BadRow, Conversation, Message, Preference, Rating
from powertrain.data.rows.tools import tools_of

RATINGS = {"true": True, "false": False, "1": True, "0": False, "good": True, "bad": False, "desirable": True,
           "undesirable": False}


class PairFormat(Format):
    """Rows with prompt, chosen and rejected, or with chosen and rejected whose common beginning is the prompt."""

    def read(self, values: Values, *, as_prompt: bool) -> Preference:
        del as_prompt
        if "prompt" in values:
            prompt = _prompt(values)
            sides = [_whole(prompt, _answer(values[name], name), name) for name in ("chosen", "rejected")]
        else:
            sides = _without_prompt(values)
        chosen, rejected = (conversation(side, _tools(values)) for side in sides)
        shared = _shared([chosen.messages, rejected.messages])
        for name, side in (("chosen", chosen), ("rejected", rejected)):
            _check_ends(side, shared, name)
        return Preference(chosen, rejected, shared, _margin(values))


class RatingFormat(Format):
    """Rows with prompt, completion and label: true where the completion is desirable."""

    def read(self, values: Values, *, as_prompt: bool) -> Rating:
        del as_prompt
        desirable = _rating(values["label"])
        answer = _answer(values["completion"], "completion")
        found = conversation(_whole(_prompt(values), answer, "completion") if "prompt" in values else answer, _tools(values))
        last = max((place for place, turn in enumerate(found.messages) if turn.role != "assistant"), default=-1) + 1
        shared = min(last, len(found.messages) - len(answer)) if "prompt" in values else last
        _check_ends(found, shared, "completion")
        return Rating(found, shared, desirable)


def _margin(values: Values) -> float:
    margin = values.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise BadRow(f"margin is {json_kind(margin)}, and a number says by how much the chosen answer is better")
    return float(margin)


def _prompt(values: Values) -> list[Message]:
    prompt = values["prompt"]
    turns = [Message("user", prompt)] if isinstance(prompt, str) else turns_of(prompt, "prompt")
    system = values.get("system")
    if isinstance(system, str) and not is_blank(system):
        turns = [Message("system", system), *turns]
    return turns


def _tools(values: Values) -> tuple[Mapping[str, Any], ...]:
    return tools_of(values["tools"], "tools") if "tools" in values else ()


def _answer(value: Any, column: str) -> list[Message]:
    """Return the turns of an answer: of a text, of a list of turns, or of one turn."""
    if isinstance(value, str):
        return [Message("assistant", value)]
    if isinstance(value, dict) and ("role" in value or "from" in value):
        value = [value]
    return turns_of(value, column)


def _whole(prompt: Sequence[Message], answer: Sequence[Message], column: str) -> list[Message]:
    """Return prompt and answer as one conversation. An answer may repeat the prompt, as in some data sets."""
    if answer and answer[0].role in ("system", "user"):
        asked = [turn for turn in prompt if turn.role == "user"]
        if asked and asked[-1] not in answer:
            raise BadRow(f"{column!r} begins with a turn of the {answer[0].role} and does not repeat the prompt; give the "
                         "answer alone")
        return list(answer)
    return [*prompt, *answer]


def _without_prompt(values: Values) -> list[list[Message]]:
    """Return both sides of a row without a prompt: their common beginning is the prompt."""
    chosen, rejected = values["chosen"], values["rejected"]
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        return [_answer(chosen, "chosen"), _answer(rejected, "rejected")]
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if 0 < shared < min(len(chosen), len(rejected)) and chosen[shared - 1] == " ":
        shared -= 1                          # the space belongs to the answers, as in TRL
    if is_blank(chosen[:shared]):
        raise BadRow("there is no prompt: chosen and rejected have no common beginning, and no column is the prompt")
    return [[Message("user", chosen[:shared]), Message("assistant", side[shared:])] for side in (chosen, rejected)]


def _shared(sides: Sequence[Sequence[Message]]) -> int:
    """Return how many turns both sides begin with, at most up to the last turn that is not the assistant's."""
    first, second = sides
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    while same and first[same - 1].role == "assistant":      # an answer that both sides have, such as of equal sides
        same -= 1
    return same


def _check_ends(found: Conversation, shared: int, column: str) -> None:
    rest = found.messages[shared:]
    if not shared:
        raise BadRow("there is no prompt: chosen and rejected begin with different turns")
    if not rest or rest[-1].role != "assistant":
        raise BadRow(f"{column!r} does not end with an answer of the assistant")


def _rating(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = RATINGS.get(str(value).strip().lower()) if isinstance(value, str | int) else None
    if known is None:
        shown = repr(value) if isinstance(value, str | int | float) else json_kind(value)
        raise BadRow(f"'label' is {shown}; use true where the completion is desirable, false where it is not")
    return known


def _column(name: str, *also: str, optional: bool = False, holds: Any = "answer") -> Column:
    return Column(name, holds, also, optional)


PROMPT = ("question", "instruction", "messages", "conversations", "input")
SYSTEM = _column("system", "system_prompt", optional=True, holds="text")
CHOSEN = _column("chosen", "chosen_response", "response_chosen", "preferred", "accepted")
REJECTED = _column("rejected", "rejected_response", "response_rejected", "dispreferred", "non_preferred")
OF_PAIRS = (_column("prompt", *PROMPT, optional=True), CHOSEN, REJECTED, SYSTEM, TOOLS)
PREFERENCE_FORMATS: tuple[Format, ...] = (
    PairFormat("comparison", "comparison", (*OF_PAIRS, _column("margin", optional=True, holds="number"))),
    PairFormat("preference", "preference", OF_PAIRS),
    RatingFormat("rating", "rating", (_column("prompt", *PROMPT, optional=True),
                                      _column("completion", "response", "output", "answer"),
                                      _column("label", "kto_tag", "desirable", holds="rating"), SYSTEM, TOOLS)),
)
