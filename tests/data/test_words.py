"""Texts encoded by their words, and conversations laid out by their roles: always what the library and Jinja give."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from example_folders import CHATML, FORGETFUL, GENERATION, INST, WORDS, chat_folder
from powertrain.data.examples import templates
from powertrain.data.examples import words as words_module
from powertrain.data.examples.encoding import ConversationEncoder, TextEncoder
from powertrain.data.examples.templates import SHIPPED, find_template, plainly_rendered, writes_contents_only
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.data.examples.words import spelled_out, words_of
from powertrain.data.rows.row import Conversation, Message, Text

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_end|>>"]
AWKWARD = ["", " ",
           "  ", "a  b", "a \n b", "\n\n", "it's I'LL don't", "don\u2019t", "x<|im_end|>y", "!<|im_end|>",
           "<|im_end|>>", "<|im_start", "caf\xe9 na\xefve", "e\u0301", "12345 \xb2\xbd \u2167",
           "\u4e00\u4e8c \u4f60\u597d", "\U0001f600\U0001f44d\U0001f3fd", "\u0130\u0131\u017f", "a\xa0b\u2003c\u3000d",
           "\x1c\x1d\x85", "tab\tand\r\nline\rend", "word word word", "\u202e\u200b\u200d",
           "\u0432\u0435\u0442\u0435\u0440 \u03b1\u03b2\u03b3", "1,000,000.00", "### User:\n", "\ufeffbom",
           "\u0e01\u0e33"]


def tokenizer_of(kind):
    library = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
    library.pre_tokenizer = level if kind == "gpt2" else pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), level])
    if kind == "qwen":
        library.normalizer = normalizers.NFC()
    library.train_from_iterator(WORDS + AWKWARD, trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return library


LIBRARIES = {kind: tokenizer_of(kind) for kind in ("gpt2", "llama3", "qwen")}


def is_equal(library, text):
    (pieces,) = words_of(library).encode([text])
    return pieces is None or pieces.ids.tolist() == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize("text", AWKWARD)
def test_an_awkward_text_has_the_ids_that_the_library_gives(kind, text):
    assert is_equal(LIBRARIES[kind], text)
    assert is_equal(LIBRARIES[kind], f"{text} x {text}\n{text}")


@pytest.mark.parametrize("kind", LIBRARIES)
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60) | st.text("a1 '\n\tsS<|>im_end\u00e9\u00a0", max_size=40))
def test_any_text_has_the_ids_that_the_library_gives(kind, text):
    assert is_equal(LIBRARIES[kind], text)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_every_known_character_is_cut_as_the_library_cuts_it(kind):
    library = LIBRARIES[kind]
    words = words_of(library)
    for character in words_module._alphabet(kind == "qwen"):
        text = f"a{character}1{character}{character} {character}!{character}\n"
        ((found, _),) = [words._words(text)]
        cut = [text[start:stop] for _, (start, stop) in library.pre_tokenizer.pre_tokenize_str(text)]
        assert found == cut, f"U+{ord(character):04X}"


def test_plain_text_goes_by_words_and_doubtful_text_by_the_library():
    words = words_of(LIBRARIES["gpt2"])
    found = words.encode(["plain words, caf\u00e9", "e\u0301", "\u0e01"])
    assert [pieces is None for pieces in found] == [False, True, True]


@pytest.mark.parametrize("change", [
    lambda library: setattr(library, "normalizer", normalizers.Lowercase()),
    lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    lambda library: setattr(library, "pre_tokenizer", pre_tokenizers.Whitespace()),
    lambda library: library.enable_truncation(5),
    lambda library: setattr(library.model, "dropout", 0.1),
    lambda library: setattr(library, "encode_special_tokens", True)])
def test_a_tokenizer_of_another_kind_is_left_to_the_library(change):
    library = tokenizer_of("gpt2")
    assert words_of(library) is not None
    change(library)
    assert words_of(library) is None


@pytest.mark.parametrize("pattern", [r"\p{Lu}+", r"\w+", r"^a", r"a$", r"[a[bc]]", r"\d", r"a.b", r"(?<=a)b", r"\p{N}{1,3}+"])
def test_a_pattern_that_python_might_read_otherwise_is_not_taken(pattern):
    assert spelled_out(pattern, words_module._classes(128, False)) is None


def test_a_difference_on_the_first_texts_ends_this_way_for_good(monkeypatch):
    monkeypatch.setattr(words_module, "GPT2", r"\p{L}+|[^\p{L}]+")
    words = words_of(LIBRARIES["gpt2"])
    assert words.encode(["the cat's mat", "the cat"]) == [None, None]
    assert words.encode(["the"]) == [None]


def test_what_is_remembered_does_not_grow_with_the_text(monkeypatch):
    monkeypatch.setattr(words_module, "MOST_REMEMBERED", 1000)
    words = words_of(LIBRARIES["gpt2"])
    for number in range(50):
        texts = [f"n{number}x{other} {other * number}" for other in range(20)]
        for text, pieces in zip(texts, words.encode(texts), strict=True):
            assert pieces.ids.tolist() == LIBRARIES["gpt2"].encode(text).ids
        assert words.remembered < 1000 + sum(map(len, texts))


# ------------------------------------------------------------------------------------------------ whole rows


def rows_of(folder, *, by_words, template=None, train_on="assistant", samples=(), max_length=10_000):
    tokenizer = open_example_tokenizer(folder)
    chat = find_template(tokenizer, template)
    if not by_words:
        tokenizer.__dict__["words"] = None
        chat.__dict__["_has_shapes"] = False
    return ConversationEncoder(tokenizer, max_length, template=chat, train_on=train_on).encode(samples)


def told(rows):
    return [([(example.ids.tolist(), example.trained) for example in row.examples],
             {**vars(row), "examples": None}) for row in rows]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    return {name: chat_folder(root / name, template) for name, template in
            {"chatml": CHATML, "inst": INST, "forgetful": FORGETFUL, "generation": GENERATION, "none": None}.items()}


@pytest.mark.parametrize("which", ["chatml", "inst", "forgetful", "generation", "none"])
@pytest.mark.parametrize("train_on", ["assistant", "all"])
@settings(max_examples=40, deadline=None)
@given(contents=st.lists(st.sampled_from([*AWKWARD[1:], " leading", "trailing ", "\nline", "the cat"]), min_size=2, max_size=6))
def test_ids_masks_and_counts_are_those_of_the_plain_path(folders, which, train_on, contents):
    samples = [Conversation(tuple(Message(role, content) for role, content in
                                  zip(["user", "assistant"] * 3, contents[first:], strict=False))) for first in (0, 1)]
    samples = [sample for sample in samples if len(sample.messages) > 1]
    system = replace(samples[0], messages=(Message("system", "be brief"), *samples[0].messages))
    found = [told(rows_of(folders[which], by_words=by_words, train_on=train_on, samples=[*samples, system, *samples]))
             for by_words in (True, False)]
    assert found[0] == found[1]


def test_rows_that_are_cut_are_cut_alike(folders):
    samples = [Conversation((Message("user", "what is it? " * n), Message("assistant", "the cat " * n))) for n in range(1, 9)]
    found = [told(rows_of(folders["chatml"], by_words=by_words, samples=samples, max_length=30)) for by_words in (True, False)]
    assert found[0] == found[1]


def test_texts_have_the_examples_of_the_plain_path(folders):
    samples, found = [Text(text) for text in AWKWARD], []
    for by_words in (True, False):
        tokenizer = open_example_tokenizer(folders["chatml"])
        if not by_words:
            tokenizer.__dict__["words"] = None
        found.append(told(TextEncoder(tokenizer, 7).encode(samples)))
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------------ templates


@pytest.mark.parametrize("template", [*SHIPPED.values(), CHATML, FORGETFUL])
@pytest.mark.parametrize("asks", [False, True])
def test_a_template_that_only_writes_contents_is_rendered_as_transformers_does(template, asks):
    from transformers.utils.chat_template_utils import render_jinja_template

    assert writes_contents_only(template)
    messages = [Message("system", "{{ x }}"), Message("user", " <a> \n"), Message("assistant", "'\"\\ {% x %}")]
    chat = [{"role": message.role, "content": message.content} for message in messages]
    given_tokens = {"eos_token": "<e>", "bos_token": "<b>", "add_generation_prompt": asks}
    (wanted,), _ = render_jinja_template([chat], chat_template=template, **given_tokens)
    assert plainly_rendered(template, messages, given_tokens) == wanted


@pytest.mark.parametrize("body", [
    "{{ m }}", "{{ m['content'] | trim }}", "{% if m['content'] == 'x' %}a{% endif %}", "{% set c = m.content %}{{ c }}",
    "{{ loop.previtem.content }}", "{{ m[x] }}", "{{ m.content * 2 }}", "{% for c in m.content %}{{ c }}{% endfor %}",
    "{{ 'a' if m.content else 'b' }}", "{{ ('a' ~ m.content) == 'b' }}", "{{ m.content[:3] }}", "{{ m.content.strip() }}",
    "{{ messages | length }}", "{{ messages }}", "{{ m['content'] is string }}", "{{ messages[0] }}", "{{ messages[i].role }}"])
def test_a_template_that_looks_at_a_content_has_no_shape(body):
    assert not writes_contents_only("{% for m in messages %}" + body + "{% endfor %}")


def test_a_row_is_rendered_by_jinja_once_for_each_order_of_roles(folders, monkeypatch):
    tokenizer = open_example_tokenizer(folders["chatml"])
    template = find_template(tokenizer, None)
    encoder = ConversationEncoder(tokenizer, 100, template=template)
    samples = [Conversation((Message("user", json.dumps(n)), Message("assistant", "yes"))) for n in range(5)]
    (first, *_) = encoder.encode(samples[:1])
    monkeypatch.setattr(templates, "plainly_rendered", lambda *_, **__: pytest.fail("rendered again"))
    assert all(np.array_equal(row.examples[0].ids[-2:], first.examples[0].ids[-2:]) for row in encoder.encode(samples))


def test_where_offsets_leave_a_space_out_the_mask_is_the_librarys(tmp_path):
    """ByteLevel's own post-processor trims spaces off the offsets, so that a token may begin behind where its word does."""
    written = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    folder = chat_folder(tmp_path / "trimmed", written + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.post_processor = processors.ByteLevel(trim_offsets=True)
    saved.save(str(folder / "tokenizer.json"))
    samples = [Conversation((Message("user", "the cat"), Message("assistant", said)))
               for said in (" the", "  the", "the", "\n the")]
    found = [told(rows_of(folder, by_words=by_words, samples=samples)) for by_words in (True, False)]
    assert found[0] == found[1]
