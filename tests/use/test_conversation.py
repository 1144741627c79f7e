"""Conversations: the exact prompt, what is remembered, and what goes when the context is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from powertrain.data.rows.row import Message
from powertrain.records import WrongUse
from powertrain.use.conversation import Conversation
from powertrain.use.generation import Sampling
from powertrain.use.opening import OpenedModel, open_model


@pytest.fixture
def opened(base_folder: Path) -> OpenedModel:
    return open_model(str(base_folder))


def say(conversation: Conversation, words: str) -> str:
    prompt, pieces = conversation.ask(words)
    answer = "".join(pieces)
    assert conversation.messages[-1] == Message("assistant", answer.strip())
    assert prompt.text.endswith("<|im_start|>assistant\n")
    return prompt.text


def test_a_prompt_is_the_template_over_all_that_was_said(opened: OpenedModel) -> None:
    conversation = Conversation(opened, Sampling(4, temperature=0), "Be short.")
    first = say(conversation, "hello")
    assert first == ("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    answer = conversation.messages[-1].content
    second = say(conversation, "and ?")
    assert second == f"{first}{answer}<|im_end|>\n<|im_start|>user\nand ?<|im_end|>\n<|im_start|>assistant\n"
    conversation.forget()
    assert say(conversation, "hello") == first


def test_answers_are_the_same_whether_the_last_turn_is_remembered_or_read_again(opened: OpenedModel) -> None:
    first, second = (Conversation(opened, Sampling(6, temperature=0)) for _ in range(2))
    for words in ("the cat", "sat on", "the mat"):
        say(first, words)
        second._feed = None                  # forgets its cache, not what was said
        say(second, words)
    assert first.messages == second.messages


def test_the_oldest_exchanges_go_when_the_context_is_full(opened: OpenedModel) -> None:
    conversation = Conversation(opened, Sampling(8, temperature=0), "Be short.")
    dropped = []
    for number in range(7):
        prompt, pieces = conversation.ask(f"the cat sat on mat {number}")
        "".join(pieces)
        dropped.append(prompt.dropped)
        assert len(prompt.ids) + 8 <= 96
        assert prompt.text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n")
        assert prompt.text.endswith(f"mat {number}<|im_end|>\n<|im_start|>assistant\n")
    assert dropped[0] == 0
    assert dropped == sorted(dropped)
    assert dropped[-1] > 0
    assert all(count % 2 == 0 for count in dropped)
    assert len(conversation.messages) == 14                 # they are left out of the prompt, not forgotten


def test_a_message_longer_than_the_context_is_refused_and_not_remembered(opened: OpenedModel) -> None:
    conversation = Conversation(opened, Sampling(8))
    with pytest.raises(WrongUse, match=r"the model reads 96"):
        conversation.ask("cat " * 200)
    assert not conversation.messages


def test_an_answer_that_is_stopped_is_what_was_said(opened: OpenedModel) -> None:
    conversation = Conversation(opened, Sampling(50, temperature=0))
    _, pieces = conversation.ask("hello")
    first = next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert conversation.messages[-1] == Message("assistant", first.strip())


def test_a_template_that_refuses_is_said_in_its_own_words(base_folder: Path) -> None:
    (base_folder / "chat_template.jinja").write_text(
        "{{ raise_exception('no system role here') if messages[0]['role'] == 'system' else 'x' }}")
    with pytest.raises(WrongUse, match="no system role here"):
        Conversation(open_model(str(base_folder)), Sampling(8), "Be short.").ask("hello")
