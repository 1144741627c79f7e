"""Generation: what the cache gives, what the stream gives out, and what is left untouched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from powertrain.models.bridge.model import BridgedModel
from powertrain.models.config import RotaryScaling, make_config
from powertrain.models.decoder import Decoder
from powertrain.models.kernels.attention import math_attention
from powertrain.records import Batch, RunFailed, WrongUse
from powertrain.use.decode import find_step
from powertrain.use.generation import DecoderFeed, Sampling, attend_after, choose, generate, generate_ids, open_feed, stream

CONTEXT = 16


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
@pytest.mark.parametrize("by_kernel", [True, False])
def test_the_cache_gives_the_tokens_of_the_whole_document(family: str, asked: dict[str, Any], prompt: list[int],
                                                          by_kernel: bool) -> None:
    model = make_model(family, **asked).eval().requires_grad_(not by_kernel)
    assert (find_step(model) is not None) == by_kernel
    tokens = 3 * CONTEXT                                    # past the end of the context more than twice
    expected = greedy_without_cache(model, prompt, tokens)
    assert len(set(expected)) > 1                           # or any fault would go unseen
    assert list(generate_ids(DecoderFeed(model), prompt, Sampling(tokens, temperature=0))) == expected


def test_generation_leaves_training_as_it_was() -> None:
    model = make_model("gpt2", dropout=0.5).train()
    before = torch.get_rng_state()
    for _ in generate(model, Bytes(), "ab", Sampling(5)):
        assert model.training
    assert model.training
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_generation_keeps_no_graph() -> None:
    assert not DecoderFeed(make_model("llama"))([1, 2]).requires_grad


def test_the_seed_decides_the_text() -> None:
    write = partial(generate, make_model("llama"), Bytes(), "ab")
    assert "".join(write(Sampling(30, seed=1))) == "".join(write(Sampling(30, seed=1)))
    assert "".join(write(Sampling(30, seed=1))) != "".join(write(Sampling(30, seed=2)))


@pytest.mark.parametrize(("end_of_text", "start"), [(256, 256), (None, 0)])
def test_an_empty_prompt_starts_a_document(end_of_text: int | None, start: int) -> None:
    model = make_model("llama")
    text = "".join(generate(model, Bytes(end_of_text), "", Sampling(6, temperature=0)))
    assert text == Bytes().decode(list(generate_ids(DecoderFeed(model), [start], Sampling(6, temperature=0))))


def test_text_ends_at_end_of_text() -> None:
    model = make_model("llama")
    ids = list(generate_ids(DecoderFeed(model), [9], Sampling(20, temperature=0)))
    end = next(token for token in ids if token != ids[0])
    text = "".join(generate(model, Bytes(end), "\t", Sampling(20, temperature=0)))
    assert text == Bytes().decode(ids[:ids.index(end)])


def test_a_character_split_over_tokens_comes_whole() -> None:
    fed: list[int] = []

    def drawn() -> Iterator[int]:
        for byte in "aé€😀b".encode():
            fed.append(byte)
            yield byte

    assert [(piece, len(fed)) for piece in stream(Bytes(), [], drawn())] == [
        ("a", 1), ("é", 3), ("€", 6), ("😀", 10), ("b", 11)]


def test_bytes_that_are_no_character_come_in_the_end() -> None:
    assert list(stream(Bytes(), [], iter((0xE2, 0x82)))) == ["\ufffd"]
    assert next(stream(Bytes(), [], itertools.repeat(0xFF))) != ""       # never held back for ever


def test_a_piece_keeps_the_space_that_depends_on_the_token_before() -> None:
    class Words:
        end_of_text = None

        def encode(self, text: str) -> Sequence[int]:
            return [int(word) for word in text.split()]

        def decode(self, ids: Sequence[int]) -> str:
            return " ".join(str(token) for token in ids)

    assert list(stream(Words(), [7], iter((1, 22, 3)))) == [" 1", " 22", " 3"]


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.tensor([0.5, 0.2, 0.25, 0.05]).log()
    draws = torch.Generator().manual_seed(0)

    def pick(**asked: Any) -> int:
        return choose(logits, Sampling(1, **{"temperature": 1.0, **asked}), draws)

    assert {pick() for _ in range(300)} == {0, 1, 2, 3}
    assert {pick(top_k=2) for _ in range(300)} == {0, 2}
    assert {pick(top_p=0.7) for _ in range(300)} == {0, 2}
    assert {pick(top_p=1e-9) for _ in range(300)} == {0}
    assert {pick(temperature=1e-3) for _ in range(50)} == {0}


@pytest.mark.parametrize(("asked", "message"), [
    ({"tokens": 0}, "0 tokens"), ({"tokens": 1, "temperature": -1}, "temperature is -1"),
    ({"tokens": 1, "top_k": 0}, "top_k is 0"), ({"tokens": 1, "top_p": 0.0}, "top_p is 0.0"),
])
def test_numbers_out_of_range_are_refused_before_anything_runs(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        Sampling(**asked)


@pytest.mark.parametrize(("family", "asked"), [("gpt2", {}), ("llama", {"kv_heads": 2}), ("mistral", {"window": 5})])
@pytest.mark.parametrize("pieces", [[3, 1, 5, 1], [1, 4, 4], [9], [2, 7], [200, 1, 150, 250, 1]])     # the cache grows
@pytest.mark.parametrize("by_kernel", [True, False])
def test_pieces_give_the_logits_of_the_whole(family: str, asked: dict[str, Any], pieces: list[int], by_kernel: bool) -> None:
    model = make_model(family, context=700, **asked).eval().requires_grad_(not by_kernel)
    ids, feed, first = [20 + place % 200 for place in range(sum(pieces))], DecoderFeed(model), 0
    for piece in pieces:
        found = feed(ids[first:first + piece])
        first += piece
        read = torch.tensor(ids[:first])
        expected = model(Batch(read, read, torch.arange(first), (first,), 0))[-1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_prompt_is_read_from_where_it_differs_from_the_last_one(by_kernel: bool) -> None:
    model = make_model("llama", context=600).requires_grad_(not by_kernel)
    feed, before = DecoderFeed(model), list(range(250)) * 2
    feed(before)
    again = [*before[:400], 7, 8]
    assert feed.begin(again) == [7, 8]                      # or the test would show nothing
    torch.testing.assert_close(feed([7, 8]), DecoderFeed(model)(again), rtol=1e-4, atol=1e-4)
    assert feed.begin(again) == [8]                         # something must be fed, to have logits
    torch.testing.assert_close(feed([8]), DecoderFeed(model)(again), rtol=1e-4, atol=1e-4)


def test_positions_that_change_with_the_length_are_turned_anew() -> None:
    scaling = RotaryScaling("longrope", 2.0, 8, 1.1, short_factors=(1.0,) * 4, long_factors=(3.0, 2.0, 4.0, 2.5))
    model = make_model("phi3").requires_grad_(False)
    model.config = replace(model.config, rotary_scaling=scaling)
    feed, ids = DecoderFeed(model), list(range(30, 44))
    for end in range(1, 15):
        read = torch.tensor(ids[:end])
        expected = model(Batch(read, read, torch.arange(end), (end,), 0))[-1]
        torch.testing.assert_close(feed(ids[end - 1:end]), expected, rtol=1e-4, atol=1e-4)
    assert feed.begin(ids[:5]) == ids[:5]                   # short again: the keys in the cache are a long document's


def test_late_queries_see_a_window_of_what_is_before_them() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 4, 6), torch.randn(9, 2, 6), torch.randn(9, 2, 6)
    for window in (None, 3):
        whole = math_attention(q, k, v, (9,), layer=0, dropout=0.0, window=window, scale=0.4)
        torch.testing.assert_close(attend_after(q[5:], k, v, window, 0.4), whole[5:], rtol=1e-4, atol=1e-5)


def test_text_ends_at_every_token_that_ends_a_turn() -> None:
    model = make_model("llama")
    ids = list(generate_ids(DecoderFeed(model), [9], Sampling(20, temperature=0)))
    stop = next(token for token in ids if token != ids[0])
    text = "".join(stream(Bytes(), [9], iter(ids), stops={stop, 300}))
    assert text == Bytes().decode(ids[:ids.index(stop)])


def test_a_library_decoder_writes_what_it_writes_itself() -> None:
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    torch.manual_seed(0)
    library = GPTBigCodeForCausalLM(GPTBigCodeConfig(
        vocab_size=257, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=None, pad_token_id=0,
        initializer_range=0.9)).eval()
    feed, ids = open_feed(BridgedModel(library, task="causal").eval(), [3, 4, 5])
    assert feed.context == 32
    found = list(generate_ids(feed, ids, Sampling(20, temperature=0)))
    expected = library.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=20, do_sample=False)
    assert found == expected[0, 3:].tolist()
    assert len(set(found)) > 1
    assert len(list(generate_ids(feed, [3, 4, 9], Sampling(50, temperature=0)))) == 50      # another prompt, past the context


def test_an_encoder_decoder_answers_its_source() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    library = T5ForConditionalGeneration(T5Config(vocab_size=257, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                                                  decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)).eval()
    with torch.no_grad():
        for parameter in library.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model, source = BridgedModel(library, task="seq2seq").eval(), [30, 31, 32, 33]
    feed, ids = open_feed(model, source)
    found = list(generate_ids(feed, ids, Sampling(12, temperature=0)))
    expected = library.generate(torch.tensor([source]), max_new_tokens=12, do_sample=False)[0, 1:].tolist()
    assert found[:len(expected)] == expected
    assert found != list(generate_ids(*open_feed(model, [50, 51]), Sampling(12, temperature=0)))


def test_a_span_head_writes_nothing() -> None:
    from transformers import BertConfig, BertForQuestionAnswering

    head = BertForQuestionAnswering(BertConfig(vocab_size=257, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                                               intermediate_size=8))
    with pytest.raises(WrongUse, match="writes no text"):
        generate(BridgedModel(head, task="span"), Bytes(), "a", Sampling(1))


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 3}, {"top_p": 0.5}])
def test_a_model_whose_scores_are_no_numbers_is_said_to_be_broken(asked: dict[str, Any]) -> None:
    logits = torch.zeros(10)
    logits[4] = torch.nan
    with pytest.raises(RunFailed, match="weights are broken"):
        choose(logits, Sampling(1, **asked), torch.Generator())


def test_a_token_that_cannot_be_is_no_fault_of_the_others() -> None:
    logits = torch.full((10,), -torch.inf)
    logits[4] = 0.0
    for temperature in (0.0, 0.8):
        assert choose(logits, Sampling(1, temperature), torch.Generator()) == 4
