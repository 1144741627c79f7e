"""Generation: what the cache gives, what the stream gives out, and what is left untouched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from powertrain.generation import Feed, TextStream, choose, generate, generate_ids
from powertrain.models.config import make_config
from powertrain.models.decoder import Decoder
from powertrain.records import Batch, WrongUse

CONTEXT = 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(family: str, **asked: Any) -> Decoder:
    """A tiny decoder over bytes whose greedy text is not one letter over and over."""
    torch.manual_seed(0)
    settings = {"vocabulary": 257, "layers": 2, "width": 32, "heads": 4, "context": CONTEXT} | asked
    model = Decoder(make_config(family, **settings)[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.6)
    return model


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def __init__(self, end_of_text: int | None = None) -> None:
        self.end_of_text = end_of_text

    def encode(self, text: str) -> Sequence[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token % 256 for token in ids).decode(errors="replace")


def greedy_without_cache(model: Decoder, prompt: list[int], tokens: int) -> list[int]:
    """The definition: each time the whole document again, cut to its last half whenever it outgrows the context."""
    ids, first = list(prompt), max(0, len(prompt) - CONTEXT)
    for _ in range(tokens):
        if len(ids) - first > CONTEXT:
            first = len(ids) - CONTEXT // 2
        read = torch.tensor(ids[first:])
        batch = Batch(read, read, torch.arange(len(read)), (len(read),), 0)
        ids.append(int(model(batch)[-1].argmax()))
    return ids[len(prompt):]


@pytest.mark.parametrize(("family", "asked"), [("gpt2", {}), ("llama", {"kv_heads": 2}), ("gemma", {"kv_heads": 1}),
                                               ("mistral", {"window": 5}), ("gpt_neox", {"width": 64})])
@pytest.mark.parametrize("prompt", [[7], [1, 2, 3, 4, 5], list(range(CONTEXT)), list(range(40))])
def test_the_cache_gives_the_tokens_of_the_whole_document(family: str, asked: dict[str, Any],
                                                          prompt: list[int]) -> None:
    model = make_model(family, **asked).eval()
    tokens = 3 * CONTEXT                                    # past the end of the context more than twice
    expected = greedy_without_cache(model, prompt, tokens)
    assert len(set(expected)) > 1                           # or any fault would go unseen
    assert list(generate_ids(model, prompt, tokens=tokens, temperature=0)) == expected


def test_generation_leaves_training_as_it_was() -> None:
    model = make_model("gpt2", dropout=0.5).train()
    before = torch.get_rng_state()
    for _ in generate(model, Bytes(), "ab", tokens=5):
        assert model.training
    assert model.training
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_generation_keeps_no_graph() -> None:
    assert not Feed(make_model("llama"), nullcontext)([1, 2]).requires_grad


def test_the_seed_decides_the_text() -> None:
    write = partial(generate, make_model("llama"), Bytes(), "ab", tokens=30)
    assert "".join(write(seed=1)) == "".join(write(seed=1))
    assert "".join(write(seed=1)) != "".join(write(seed=2))


@pytest.mark.parametrize(("end_of_text", "start"), [(256, 256), (None, 0)])
def test_an_empty_prompt_starts_a_document(end_of_text: int | None, start: int) -> None:
    model = make_model("llama")
    text = "".join(generate(model, Bytes(end_of_text), "", tokens=6, temperature=0))
    assert text == Bytes().decode(list(generate_ids(model, [start], tokens=6, temperature=0)))


def test_text_ends_at_end_of_text() -> None:
    model = make_model("llama")
    ids = list(generate_ids(model, [9], tokens=20, temperature=0))
    end = next(token for token in ids if token != ids[0])
    text = "".join(generate(model, Bytes(end), "\t", tokens=20, temperature=0))
    assert text == Bytes().decode(ids[:ids.index(end)])


def test_a_character_split_over_tokens_comes_whole() -> None:
    stream = TextStream(Bytes(), [])
    pieces = [stream.add(byte) for byte in "aé€😀b".encode()]
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]
    assert stream.rest() == ""


def test_bytes_that_are_no_character_come_in_the_end() -> None:
    stream = TextStream(Bytes(), [])
    assert [stream.add(byte) for byte in (0xE2, 0x82)] == ["", ""]
    assert stream.rest() == "\ufffd"
    assert "".join(stream.add(0xFF) for _ in range(9)) != ""       # never held back for ever


def test_a_piece_keeps_the_space_that_depends_on_the_token_before() -> None:
    class Words:
        end_of_text = None

        def encode(self, text: str) -> Sequence[int]:
            return [int(word) for word in text.split()]

        def decode(self, ids: Sequence[int]) -> str:
            return " ".join(str(token) for token in ids)

    stream = TextStream(Words(), [7])
    assert [stream.add(token) for token in (1, 22, 3)] == [" 1", " 22", " 3"]


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.tensor([0.5, 0.2, 0.25, 0.05]).log()
    draws = torch.Generator().manual_seed(0)
    pick = partial(choose, logits, temperature=1.0, draws=draws)
    assert {pick(top_k=None, top_p=None) for _ in range(300)} == {0, 1, 2, 3}
    assert {pick(top_k=2, top_p=None) for _ in range(300)} == {0, 2}
    assert {pick(top_k=None, top_p=0.7) for _ in range(300)} == {0, 2}
    assert {pick(top_k=None, top_p=1e-9) for _ in range(300)} == {0}
    assert {choose(logits, temperature=1e-3, top_k=None, top_p=None, draws=draws) for _ in range(50)} == {0}


def test_a_precision_context_is_used_for_each_forward_pass() -> None:
    seen = []

    def precision() -> Any:
        seen.append(1)
        return torch.autocast("cpu", dtype=torch.bfloat16)

    assert len(list(generate_ids(make_model("llama", kv_heads=2), [1], tokens=7, precision=precision))) == 7
    assert len(seen) == 7


@pytest.mark.parametrize(("asked", "message"), [
    ({"tokens": 0}, "0 tokens"), ({"tokens": 1, "temperature": -1}, "temperature is -1"),
    ({"tokens": 1, "top_k": 0}, "top_k is 0"), ({"tokens": 1, "top_p": 0.0}, "top_p is 0.0"),
])
def test_numbers_out_of_range_are_refused_before_anything_runs(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        generate(make_model("gpt2"), Bytes(), "a", **asked)
