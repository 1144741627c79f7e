"""Pairs of answers and rated answers to token ids: what objectives that compare answers learn from.

A pair is stored as its two documents end to end, the chosen one first. Only the assistant's turns behind the prompt are
trained; in a pair the prompt is the turns that both sides begin with.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from powertrain.data.examples.encoding import ConversationEncoder, Encoded, EncodedRow
from powertrain.data.examples.templates import Marked
from powertrain.data.examples.tokenizer import Place
from powertrain.data.examples.words import Ids
from powertrain.data.rows.row import BadRow, Conversation, Preference, Rating

SIDES = ("chosen", "rejected")


class ComparedEncoder(ConversationEncoder):
    """Encodes conversations of which only the answers behind the prompt are trained."""

    def sides(self, conversations: Sequence[tuple[Conversation, int]]) -> list[EncodedRow]:
        """Return the row of each conversation, given with the number of its turns that are the prompt."""
        rows = [EncodedRow() for _ in conversations]
        marked: dict[int, Marked] = {}
        for number, (conversation, shared) in enumerate(conversations):
            try:
                marked[number] = self._behind(conversation, shared)
            except BadRow as error:
                rows[number].refused, rows[number].reason = "bad", str(error)
        for number, (found, places) in zip(marked, self._placed(list(marked.values())), strict=True):
            row = rows[number]
            if isinstance(found, str):
                row.refused, row.reason = "bad", found
                continue
            row.rewritten = marked[number].rewritten
            self._cut(row, found.ids, places)
        return rows

    def _behind(self, conversation: Conversation, shared: int) -> Marked:
        """Return the conversation's text, with the assistant's turns behind the prompt as the trained places."""
        assert self.template is not None
        marked = self.template.marked(conversation.messages, "assistant", conversation.tools)
        answers = sum(message.role == "assistant" for message in conversation.messages[shared:])
        if marked.rewritten and answers > 1:     # the places that are left may be of the prompt
            raise BadRow(f"the chat template rewrites turns before the last one, and the answer has {answers} turns; end it "
                         "with its first turn")
        return marked._replace(trained=marked.trained[-answers:])


class PreferenceEncoder(ComparedEncoder):
    """Makes one example of a pair: `answer` of the stored example is the ids of its chosen document, and the shared inputs."""

    def encode(self, samples: Sequence[Any]) -> list[EncodedRow]:
        sides = self.sides([(side, sample.shared) for sample in samples for side in (sample.chosen, sample.rejected)])
        return [_paired(chosen, rejected, sample.margin, self.max_length)
                for sample, chosen, rejected in zip(samples, sides[::2], sides[1::2], strict=True)]


class ScoredEncoder(PreferenceEncoder):
    """Makes one example of a pair whose documents are read to their last token, which a reward model scores.

    So what a chat template writes behind an answer is kept, and the place of the last token is the one that is trained.
    """

    def _cut(self, row: EncodedRow, ids: Ids, trained: Sequence[Place]) -> None:
        row.tokens, kept = len(ids), min(len(ids), self.max_length)
        row.lost, row.too_long = len(ids) - kept, kept < len(ids)
        if row.lost and self.drop:
            row.refused, row.reason = "long", f"{len(ids)} tokens, beyond max_length={self.max_length}"
        elif not trained or kept <= trained[0][0]:
            row.refused, row.reason = "untrained", "nothing of its answer is left" if row.lost else "its answer has no token"
        else:
            row.examples = [Encoded(ids[:kept], ((kept - 1, kept),))]


class RatingEncoder(ComparedEncoder):
    """Makes one example of a rated answer, and two of a pair: `answer` is 1 for a desirable one, and where it starts."""

    def encode(self, samples: Sequence[Any]) -> list[EncodedRow]:
        each = [_ratings(sample) for sample in samples]
        found = iter(self.sides([(rating.conversation, rating.shared) for ratings in each for rating in ratings]))
        return [_joined([(next(found), rating.desirable) for rating in ratings]) for ratings in each]


def _ratings(sample: Rating | Preference) -> list[Rating]:
    if isinstance(sample, Rating):
        return [sample]
    return [Rating(sample.chosen, sample.shared, True), Rating(sample.rejected, sample.shared, False)]


def _refused(sides: Sequence[EncodedRow], row: EncodedRow) -> bool:
    """Add up what the sides of a row lost; return whether the row is refused because one of its sides is."""
    row.tokens = sum(side.tokens for side in sides)
    row.lost, row.too_long = sum(side.lost for side in sides), any(side.too_long for side in sides)
    row.untrained_end, row.rewritten = sum(side.untrained_end for side in sides), any(side.rewritten for side in sides)
    for name, side in zip(SIDES, sides, strict=False):
        if side.refused:
            row.refused, row.reason = side.refused, f"{name}: {side.reason}" if len(sides) > 1 else side.reason
            return True
    return False


def _paired(chosen: EncodedRow, rejected: EncodedRow, margin: float, max_length: int) -> EncodedRow:
    row = EncodedRow()
    if _refused((chosen, rejected), row):
        return row
    (first,), (second,) = chosen.examples, rejected.examples
    if np.array_equal(first.ids, second.ids):
        cut = f" within data.max_length={max_length}" if row.lost else ""
        row.refused, row.reason = "tie", f"its chosen and its rejected answer are equal{cut}"
        return row
    length = min(len(first.ids), len(second.ids))
    differ = np.flatnonzero(first.ids[:length] != second.ids[:length])
    # an input row is shared if both documents have it and it predicts no answer
    shared = min(int(differ[0]) if len(differ) else length, first.trained[0][0] - 1, second.trained[0][0] - 1)
    behind = len(first.ids)
    trained = (*first.trained, *((start + behind, stop + behind) for start, stop in second.trained))
    row.examples = [Encoded(np.concatenate([first.ids, second.ids]), trained, answer=(behind, shared),
                            margin=margin)]
    return row


def _joined(sides: Sequence[tuple[EncodedRow, bool]]) -> EncodedRow:
    row = EncodedRow()
    if _refused([side for side, _ in sides], row):
        return row
    row.examples = [replace(example, answer=(int(desirable), example.trained[0][0]))
                    for side, desirable in sides for example in side.examples]
    return row
