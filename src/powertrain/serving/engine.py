"""One model that answers one request at a time, in a thread of its own; further requests wait in a queue.

A request whose reader has gone is given up before its next token, and never begun where it still waits. What two prompts begin
with, as the turns of a conversation do, is read once.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from powertrain.data.rows.row import BadRow
from powertrain.serving.asking import Asked, Refused
from powertrain.use.generation import Feed, Sampling, generate_ids, open_feed, stream
from powertrain.use.opening import OpenedModel

MOST_WAITING = 32            # requests, besides the one that is answered
TOKENS_WITHOUT_END = 512     # of an answer, where neither the request nor a context limits it


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    sampling: Sampling


@dataclass(frozen=True)
class Ended:
    """The end of an answer: why it ended, and how many tokens were drawn."""

    reason: Literal["stop", "length"]
    tokens: int


@dataclass
class Drawn:
    """Counts the ids of an answer as they are drawn, and stops at a cancelled request."""

    ids: Iterator[int]
    ends: Collection[int]                    # ids that end the answer
    cancelled: threading.Event
    tokens: int = 0
    is_ended: bool = False

    def __iter__(self) -> Iterator[int]:
        for token in self.ids:
            if self.cancelled.is_set():
                return
            self.tokens += 1
            self.is_ended = token in self.ends
            yield token


@dataclass
class Stopping:
    """Yields a text's pieces up to the first of some stop texts. What may be the beginning of one is held back."""

    stops: tuple[str, ...]
    is_stopped: bool = False

    def pieces(self, given: Iterator[str]) -> Iterator[str]:
        held = ""
        for piece in given:
            held += piece
            places = [place for stop in self.stops if (place := held.find(stop)) >= 0]
            if places:
                self.is_stopped = True
                held = held[:min(places)]
                break
            kept = max((length for stop in self.stops for length in range(1, len(stop)) if held.endswith(stop[:length])),
                       default=0)
            if told := held[:len(held) - kept]:
                yield told
            held = held[len(held) - kept:]
        if held:
            yield held


@dataclass(eq=False)
class Engine:
    opened: OpenedModel
    name: str                                # as clients ask for it
    temperature: float                       # of requests that name none
    waiting: int = 0                         # requests that are answered or wait
    _feed: Feed | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="generation"))

    def read(self, asked: Asked) -> Prompt:
        """Return the tokens of the prompt, and how to go on. Raises Refused for a prompt that leaves no room for an answer."""
        ids, context = self._ids(asked), self.opened.context
        is_decoder = self.opened.task == "causal"
        if context is not None and len(ids) + is_decoder > context:
            raise Refused(f"the prompt has {len(ids):,} tokens, and the model reads {context:,}"
                          f"{' with its answer' if is_decoder else ''}; shorten it",
                          param="messages" if asked.is_chat else "prompt", code="context_length_exceeded")
        room = context - len(ids) if is_decoder and context is not None else None
        tokens = min((most for most in (asked.tokens, room) if most is not None), default=TOKENS_WITHOUT_END)
        temperature = self.temperature if asked.temperature is None else asked.temperature
        top_p = None if asked.top_p is None else max(asked.top_p, 1e-9)      # 0 keeps the likeliest token
        return Prompt(ids, Sampling(tokens, temperature, asked.top_k, top_p, asked.seed))

    def _ids(self, asked: Asked) -> list[int]:
        opened = self.opened
        if not asked.is_chat:
            end = opened.tokenizer.end_of_text
            return opened.prompt_ids(asked.prompt) or [0 if end is None else end]
        if opened.task != "causal":          # an encoder-decoder answers the last message by itself
            return opened.prompt_ids(asked.messages[-1].content)
        try:
            return opened.conversation_ids(asked.messages)[1]
        except BadRow as error:
            raise Refused(str(error), param="messages", code="invalid_value") from error

    def refuse_if_full(self) -> None:
        """Raise Refused where too many requests wait."""
        if self.waiting > MOST_WAITING:
            raise Refused(f"{MOST_WAITING} requests wait already; send it again later", code="rate_limit_exceeded", status=429)

    async def answer(self, asked: Asked, prompt: Prompt) -> AsyncGenerator[str | Ended, None]:
        """Yield the pieces of the answer as they are written, then its end.

        Raises RunFailed where the model's weights give no answer.
        """
        loop, cancelled = asyncio.get_running_loop(), threading.Event()
        written: asyncio.Queue[str | Ended | None] = asyncio.Queue()

        def work() -> None:
            for piece in () if cancelled.is_set() else self._write(asked, prompt, cancelled):
                loop.call_soon_threadsafe(written.put_nowait, piece)

        def end() -> None:
            self.waiting -= 1
            written.put_nowait(None)

        def end_from_thread(_: Future[None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(end)

        self.waiting += 1
        working = self._thread.submit(work)
        working.add_done_callback(end_from_thread)
        try:
            while (piece := await written.get()) is not None:
                yield piece
            working.result()                 # raises what went wrong
        finally:
            cancelled.set()
            working.cancel()                 # if it waits still

    def _write(self, asked: Asked, prompt: Prompt, cancelled: threading.Event) -> Iterator[str | Ended]:
        opened = self.opened
        as_chat = asked.is_chat and opened.task == "causal"
        tokenizer = opened.chat_tokenizer if as_chat else opened.tokenizer
        stops = opened.turn_stops if as_chat else opened.stops
        ends = stops if tokenizer.end_of_text is None else stops | {tokenizer.end_of_text}
        feed, self._feed = self._feed, None                  # kept only if the answer goes well
        feed, ids = open_feed(opened.model, prompt.ids, feed)
        drawn, stopping = Drawn(generate_ids(feed, ids, prompt.sampling), ends, cancelled), Stopping(asked.stops)
        before = ids[-1:] if opened.task == "causal" else []
        yield from stopping.pieces(stream(tokenizer, before, iter(drawn), stops))
        self._feed = feed
        yield Ended("stop" if drawn.is_ended or stopping.is_stopped else "length", drawn.tokens)

    def close(self) -> None:
        """End the thread after the token that is being drawn; what waits is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)
