"""A conversation with a model: its messages, and the exact prompt that asks for the next answer.

A conversation that is longer than the context loses its oldest exchanges, never its system text; the prompt says how many.
Encoder-decoders answer each message by itself: they were trained on pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from powertrain.data.rows.row import BadRow, Message
from powertrain.records import WrongUse
from powertrain.use.generation import Feed, Sampling, generate_ids, open_feed, stream
from powertrain.use.opening import OpenedModel

ANSWER_SHARE = 4             # a quarter of the context at most is kept free for the answer


@dataclass(frozen=True)
class Prompt:
    text: str                                # exactly as the model reads it
    ids: list[int]
    dropped: int                             # messages left out because the context is full


@dataclass
class Conversation:
    opened: OpenedModel
    sampling: Sampling
    system: str | None = None
    messages: list[Message] = field(default_factory=list)      # without the system text
    _feed: Feed | None = None

    def forget(self) -> None:
        self.messages.clear()

    def ask(self, words: str) -> tuple[Prompt, Iterator[str]]:
        """Return the prompt of a user's message, and the pieces of the answer, which is remembered as far as it was read.

        Raises WrongUse for a message that leaves no room for an answer, and for a model that writes no text.
        """
        self.messages.append(Message("user", words))
        try:
            prompt = self._prompt()
            self._feed, ids = open_feed(self.opened.model, prompt.ids, self._feed)
        except WrongUse:
            self.messages.pop()
            raise
        drawn = generate_ids(self._feed, ids, self.sampling)
        return prompt, self._remembered(self.opened.answer_pieces(prompt.ids, drawn))

    def _remembered(self, pieces: Iterator[str]) -> Iterator[str]:
        answer: list[str] = []
        try:
            for piece in pieces:
                answer.append(piece)
                yield piece
        finally:                             # also of an answer that was stopped
            self.messages.append(Message("assistant", "".join(answer).strip()))

    def _prompt(self) -> Prompt:
        if self.opened.task != "causal":     # an encoder-decoder answers this message by itself
            return Prompt(self.messages[-1].content, self.opened.prompt_ids(self.messages[-1].content), 0)
        context, dropped = self.opened.context, 0
        while True:
            text, ids = self._rendered(self.messages[dropped:])
            if context is None or len(ids) + min(self.sampling.tokens, context // ANSWER_SHARE) <= context:
                return Prompt(text, ids, dropped)
            if dropped + 2 >= len(self.messages):
                if len(ids) < context:       # the last message alone: a shorter answer is better than none
                    return Prompt(text, ids, dropped)
                raise WrongUse(f"the message has {len(ids):,} tokens with its template, and the model reads {context:,}; "
                               "shorten it")
            dropped += 2                     # a question and its answer

    def _rendered(self, messages: list[Message]) -> tuple[str, list[int]]:
        begun = [Message("system", self.system)] if self.system else []
        try:
            return self.opened.conversation_ids([*begun, *messages])
        except BadRow as error:
            raise WrongUse(str(error)) from error


def continuation(opened: OpenedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Return the pieces of text that the model writes after a prompt."""
    ids, end = opened.prompt_ids(prompt), opened.tokenizer.end_of_text
    feed, fed = open_feed(opened.model, ids or [0 if end is None else end])
    before = ids[-1:] if opened.task == "causal" else []
    return stream(opened.tokenizer, before, generate_ids(feed, fed, sampling), opened.stops)
