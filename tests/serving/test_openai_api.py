"""`powertrain serve`'s answers, asked for by OpenAI's own Python package and by plain HTTP."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

import openai
import pytest
from served_models import TOKEN, Served

from powertrain.data.rows.row import Message
from powertrain.serving.engine import Engine
from powertrain.use.conversation import Conversation
from powertrain.use.generation import DecoderFeed, Sampling, generate_ids, open_feed

HELLO: list[Any] = [{"role": "user", "content": "the cat sat"}]


def post(served: Served, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body),
                       {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def told(engine: Engine, tokens: int, seed: int = 0, temperature: float = 0.0) -> str:
    """What `powertrain chat` would answer."""
    _, pieces = Conversation(engine.opened, Sampling(tokens, temperature, seed=seed)).ask("the cat sat")
    return "".join(pieces)


class TestWithOpenAIsPackage:
    def test_the_model_is_listed(self, served: Served) -> None:
        assert [model.id for model in served.client().models.list()] == ["tuned"]
        assert served.client().models.retrieve("tuned").owned_by == "powertrain"
        with pytest.raises(openai.NotFoundError, match="'other' is not served here; ask for 'tuned'"):
            served.client().models.retrieve("other")

    def test_an_answer_is_that_of_the_chat_command_and_its_tokens_are_counted(self, served: Served) -> None:
        found = served.client().chat.completions.create(model="tuned", messages=HELLO, max_tokens=8)
        assert found.choices[0].message.content == told(served.engine, 8)
        assert found.choices[0].finish_reason == "length"
        read = served.engine.opened.conversation_ids([Message("user", "the cat sat")])[1]
        assert found.usage is not None
        assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (
            len(read), 8, len(read) + 8)

    def test_a_stream_has_the_same_text_and_ends_with_its_usage(self, served: Served) -> None:
        parts = list(served.client().chat.completions.create(model="tuned", messages=HELLO, max_completion_tokens=8,
                                                              stream=True, stream_options={"include_usage": True}))
        assert parts[0].choices[0].delta.role == "assistant"
        assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == told(served.engine, 8)
        assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 2) + ["length"]
        assert parts[-1].choices == []
        assert parts[-1].usage is not None
        assert parts[-1].usage.completion_tokens == 8

    def test_a_seed_repeats_a_text_and_another_seed_does_not(self, served: Served) -> None:
        def ask(**sampled: Any) -> str | None:
            found = served.client().chat.completions.create(model="tuned", messages=HELLO, max_tokens=12, **sampled)
            return found.choices[0].message.content

        assert ask(temperature=1.5, seed=3) == ask(temperature=1.5, seed=3) == told(served.engine, 12, 3, 1.5)
        assert ask(temperature=1.5, seed=3) != ask(temperature=1.5, seed=4)
        assert ask(temperature=1.5, seed=4, top_p=0.0) == ask(temperature=0)        # the likeliest token alone is left

    def test_a_stop_text_ends_an_answer_and_is_not_part_of_it(self, served: Served) -> None:
        whole = told(served.engine, 12)
        stop = whole[5:8]
        for streamed in (False, True):
            found: Any = served.client().chat.completions.create(model="tuned", messages=HELLO, max_tokens=12,
                                                                 stop=["never", stop], stream=streamed)
            choices = [part.choices[0] for part in found] if streamed else [found.choices[0]]
            text = "".join(choice.delta.content or "" for choice in choices) if streamed else choices[0].message.content
            assert text == whole[:whole.index(stop)]
            assert choices[-1].finish_reason == "stop"

    def test_a_token_that_ends_the_turn_ends_an_answer(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        opened = served.engine.opened
        whole, read = told(served.engine, 12), opened.conversation_ids([Message("user", "the cat sat")])[1]
        fourth = list(generate_ids(open_feed(opened.model, read)[0], read, Sampling(4, 0.0)))[-1]
        monkeypatch.setitem(opened.__dict__, "turn_stops", opened.turn_stops | {fourth})
        found = served.client().chat.completions.create(model="tuned", messages=HELLO, max_tokens=12)
        text = found.choices[0].message.content
        assert text is not None
        assert whole.startswith(text)
        assert len(text) < len(whole)
        assert found.choices[0].finish_reason == "stop"

    def test_a_system_text_and_parts_of_text_are_read(self, served: Served) -> None:
        parts = [{"type": "text", "text": "the cat "}, {"type": "text", "text": "sat"}]
        messages: list[Any] = [{"role": "developer", "content": "hello"}, {"role": "user", "content": parts}]
        found = served.client().chat.completions.create(model="tuned", messages=messages, max_tokens=8)
        said = Conversation(served.engine.opened, Sampling(8, 0.0), "hello").ask("the cat sat")[1]
        assert found.choices[0].message.content == "".join(said)

    def test_a_text_is_continued(self, served: Served) -> None:
        found = served.client().completions.create(model="tuned", prompt="the cat", max_tokens=6, temperature=0)
        streamed = list(served.client().completions.create(model="tuned", prompt="the cat", max_tokens=6, stream=True))
        assert found.choices[0].text
        assert "".join(part.choices[0].text for part in streamed) == found.choices[0].text
        assert streamed[-1].choices[0].finish_reason == "length"

    def test_without_a_limit_an_answer_may_fill_the_context_and_no_more(self, served: Served) -> None:
        found = served.client().chat.completions.create(model="tuned", messages=HELLO, max_tokens=10_000)
        assert found.usage is not None
        assert found.usage.total_tokens == 96 or found.choices[0].finish_reason == "stop"

    def test_a_wrong_token_is_refused_as_openai_does(self, served: Served) -> None:
        with pytest.raises(openai.AuthenticationError) as caught:
            served.client("another-token-of-tests").models.list()
        assert caught.value.code == "invalid_api_key"
        assert TOKEN not in str(caught.value)

    def test_weights_that_are_not_finite_are_said_also_in_a_stream(self, served: Served) -> None:
        weight: Any = served.engine.opened.model.norm.weight
        before = weight.data.clone()
        weight.data.fill_(float("nan"))
        try:
            with pytest.raises(openai.InternalServerError, match="NaN or infinite"):
                served.client().chat.completions.create(model="tuned", messages=HELLO, max_tokens=4)
            with pytest.raises(openai.APIError, match="NaN or infinite"):
                list(served.client().chat.completions.create(model="tuned", messages=HELLO, max_tokens=4, stream=True))
        finally:
            weight.data.copy_(before)
        assert served.client().chat.completions.create(model="tuned", messages=HELLO, max_tokens=4).choices


@pytest.mark.parametrize(("changed", "param", "says"), [
    ({"model": "gpt-5"}, "model", "ask for 'tuned'"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hello"}, "messages", "a list"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "one of system"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "reads text only"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "a text"),
    ({"messages": [{"role": "user", "content": "a\0b"}]}, None, "NUL at character 1"),
    ({"messages": [{"role": "user", "content": "cat " * 200}]}, "messages", "shorten it"),
    ({"temperature": 3}, "temperature", "from 0 to 2"), ({"temperature": "hot"}, "temperature", "a number"),
    ({"temperature": True}, "temperature", "a number"), ({"top_p": -0.1}, "top_p", "from 0 to 1"),
    ({"max_tokens": 0}, "max_tokens", "whole number from 1"), ({"max_tokens": 2.5}, "max_tokens", "whole number"),
    ({"stop": ["a"] * 5}, "stop", "at most 4"), ({"stop": [""]}, "stop", "1 to 1,000"), ({"stop": 7}, "stop", "a text"),
    ({"stream": "yes"}, "stream", "true or false"), ({"stream_options": 1}, "stream_options", "an object"),
    ({"seed": -1}, "seed", "from 0"), ({"n": 2}, "n", "n is not supported"),
    ({"tools": [{}]}, "tools", "tools is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"), ({"typo": 1}, "typo", "leave it out"),
])
def test_a_request_that_cannot_be_carried_out_names_the_field(changed: dict[str, Any], param: str | None, says: str,
                                                              served: Served) -> None:
    status, found = post(served, {"model": "tuned", "messages": HELLO, "max_tokens": 2} | changed)
    assert status == (404 if param == "model" else 400)
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["param"] == param
    assert says in found["error"]["message"]
    assert "\n" not in found["error"]["message"]


def test_fields_that_change_nothing_are_taken(served: Served) -> None:
    status, found = post(served, {"model": "tuned", "messages": HELLO, "max_tokens": 2, "n": 1, "user": "me", "stop": None,
                                  "frequency_penalty": 0, "logit_bias": {}, "tools": [], "top_k": 5})
    assert (status, found["object"]) == (200, "chat.completion")


@pytest.mark.parametrize(("body", "status", "says"), [
    (b"{", 400, "not JSON"), (b"[1]", 400, "JSON object"), (b"\xff", 400, "not JSON"), (b" " * (5 << 20), 413, "shorten it"),
    (b"[" * 100_000, 400, "not JSON")])
def test_a_body_that_is_no_request_is_refused(body: bytes, status: int, says: str, served: Served) -> None:
    found, answer = post(served, body)
    assert found == status
    assert says in answer["error"]["message"]


def test_other_addresses_methods_and_hosts_are_refused(served: Served) -> None:
    assert post(served, {}, "/v1/embeddings")[0] == 404
    assert post(served, {}, "/v1/models")[0] == 405
    assert post(served, {}, Host="evil.example:80")[0] == 421
    assert post(served, {}, Authorization="")[0] == post(served, {}, Authorization=f"Basic {TOKEN}")[0] == 401
    assert post(served, {"model": "tuned", "messages": HELLO, "max_tokens": 1}, Host=f"localhost:{served.port}")[0] == 200


# ------------------------------------------------------------------------------------------------ the queue


def wait_for(done: Any) -> None:
    until = time.monotonic() + 120
    while not done():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


@pytest.fixture
def held(served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine's model waits before each token until it is let go."""
    go = threading.Event()
    tokens: list[int] = []
    original = DecoderFeed.read

    def slow(*given: Any, **named: Any) -> Any:
        tokens.append(1)
        assert go.wait(120)
        return original(*given, **named)

    monkeypatch.setattr(DecoderFeed, "read", slow)
    yield go, tokens
    go.set()
    wait_for(lambda: served.engine.waiting == 0)


def start(served: Served, *, stream: bool) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(
        {"model": "tuned", "messages": HELLO, "max_tokens": 50, "stream": stream, "seed": 1}),
        {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_nobody_reads_any_more_is_given_up(stream: bool, served: Served, held: Any,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    go, tokens = held
    left: list[int] = []
    answer = Engine.answer

    async def watched(*given: Any) -> Any:
        parts = answer(*given)
        try:
            async for part in parts:
                yield part
        finally:
            await parts.aclose()
            left.append(1)

    monkeypatch.setattr(Engine, "answer", watched)
    connection = start(served, stream=stream)
    wait_for(lambda: tokens)
    waiting = start(served, stream=stream)
    wait_for(lambda: served.engine.waiting == 2)
    waiting.close()
    wait_for(lambda: served.engine.waiting == 1)         # it was never begun
    connection.close()
    wait_for(lambda: len(left) == 2)         # the server sees the closed connection while the model computes
    go.set()
    wait_for(lambda: served.engine.waiting == 0)
    assert len(tokens) <= 2


def test_requests_are_answered_one_after_another(served: Served, held: Any) -> None:
    go, _ = held
    answers: list[str | None] = []

    def ask() -> None:
        found = served.client().chat.completions.create(model="tuned", messages=HELLO, max_tokens=6)
        answers.append(found.choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: served.engine.waiting == 3)
    go.set()
    for thread in threads:
        thread.join()
    assert answers == [told(served.engine, 6)] * 3


def test_too_many_requests_are_told_to_come_again(served: Served, held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.serving.engine.MOST_WAITING", 1)
    first, second = start(served, stream=False), start(served, stream=False)
    wait_for(lambda: served.engine.waiting == 2)
    with pytest.raises(openai.RateLimitError, match="1 requests wait already"):
        served.client().chat.completions.create(model="tuned", messages=HELLO)
    first.close()
    second.close()
