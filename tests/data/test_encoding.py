from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from example_folders import CHATML, FORGETFUL, chat_folder, seq2seq_folder, span_folder
from powertrain.data.examples.encoding import (
    ConversationEncoder,
    PairEncoder,
    SpanEncoder,
    TextEncoder,
    check_length,
    prompt_of,
)
from powertrain.data.examples.templates import find_template
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.data.rows.row import Conversation, Message, Pair, Span, Text
from powertrain.data.table_tokenizers import ByteTokenizer, CharTokenizer
from powertrain.records import WrongUse

ROOMY = 10_000               # tokens


def conversation(*contents):
    return Conversation(tuple(Message(role, content) for role, content in
                              zip(["user", "assistant"] * len(contents), contents, strict=False)))


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {"chat": chat_folder(root / "chat"), "bos": chat_folder(root / "bos", adds_bos=True),
            "t5": seq2seq_folder(root / "t5"), "bert": span_folder(root / "bert"),
            "pad is end": chat_folder(root / "same", pad_token="<|im_end|>"),
            "forgetful": chat_folder(root / "forgetful", FORGETFUL)}


def encoder_for(folder, wanted=None, max_length=ROOMY, train_on="assistant"):
    tokenizer = open_example_tokenizer(folder)
    return ConversationEncoder(tokenizer, max_length, False, find_template(tokenizer, wanted), train_on)


def learned(encoder, row):
    (example,) = row.examples
    return [encoder.tokenizer.decode(example.ids[start:stop]) for start, stop in example.trained]


@pytest.mark.parametrize("which", ["chat", "bos", "pad is end"])
@pytest.mark.parametrize("wanted", [None, "plain", "raw"])
def test_each_answer_is_trained_with_its_end_token_and_nothing_else_is(folders, which, wanted):
    encoder = encoder_for(folders[which], wanted)
    (row,) = encoder.encode([conversation("what is it?", "a cat", "and that?", "a hat \n")])
    assert learned(encoder, row) == ["a cat<|im_end|>", "a hat \n<|im_end|>"]
    assert row.examples[0].ids[-1] == encoder.tokenizer.end_of_text == 2


def test_ids_are_those_of_transformers_up_to_the_last_trained_token(folders):
    encoder = encoder_for(folders["chat"])
    sample = conversation("what is the sum?", "three\n\n")
    (row,) = encoder.encode([sample])
    theirs = AutoTokenizer.from_pretrained(folders["chat"]).apply_chat_template(
        [{"role": message.role, "content": message.content} for message in sample.messages])["input_ids"]
    assert row.examples[0].ids.tolist() == theirs[:-1]         # the line end behind <|im_end|>
    assert (row.tokens, row.untrained_end) == (len(theirs), 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=2, max_size=6))
def test_trained_tokens_spell_the_answers_whatever_the_text(folders, contents):
    encoder = encoder_for(folders["chat"])
    contents = [content.replace("\0", "") for content in contents[:len(contents) // 2 * 2]]
    (row,) = encoder.encode([conversation(*contents)])
    assert learned(encoder, row) == [f"{answer}<|im_end|>" for answer in contents[1::2]] or row.boundary


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), st.text(" \nab", max_size=6),
       st.sampled_from(["plain", "raw"]))
def test_a_boundary_is_noted_exactly_where_the_prompt_alone_has_other_tokens(folders, asked, answer, wanted):
    encoder = encoder_for(folders["bos"], wanted)
    sample = conversation(asked, answer)
    (row,) = encoder.encode([sample])
    marked = encoder.template.marked(sample.messages, "assistant")
    text, ((start, _),) = marked.text, marked.trained
    encoding = encoder.tokenizer.library.encode_batch([text], add_special_tokens=False)[0]
    before = [token for token, (first, _) in zip(encoding.ids, encoding.offsets, strict=True) if first < start]
    assert row.boundary == (before != encoder.tokenizer.encode(text[:start]).tolist())


def test_a_token_that_begins_in_the_prompt_is_not_trained_though_it_ends_in_the_answer(folders):
    encoder = encoder_for(folders["chat"], "raw")
    assert len(encoder.tokenizer.encode("\n\n")) == 1
    across, clean = encoder.encode([conversation("world\n", "\n"), conversation("world", "\n\n")])
    assert (learned(encoder, across), across.boundary) == (["<|im_end|>"], True)
    assert (learned(encoder, clean), clean.boundary) == (["\n\n<|im_end|>"], False)


def test_without_an_assistant_no_token_is_trained_and_the_row_says_so(folders):
    row, = encoder_for(folders["chat"]).encode([Conversation((Message("user", "hello"),))])
    assert (row.refused, row.examples) == ("untrained", [])
    row, = encoder_for(folders["chat"], train_on="all").encode([Conversation((Message("user", "hello"),))])
    assert row.examples[0].trained == ((1, len(row.examples[0].ids)),)


def test_a_template_that_refuses_one_row_spoils_no_other(folders, tmp_path):
    picky = "{% if 'bad' in messages[0]['content'] %}{{ raise_exception('not that') }}{% endif %}" + CHATML
    encoder = encoder_for(chat_folder(tmp_path / "picky", picky))
    first, second, third = encoder.encode([conversation("good", "yes"), conversation("bad", "no"), conversation("fine", "yes")])
    assert (second.refused, second.examples) == ("bad", [])
    assert "not that" in second.reason
    assert learned(encoder, first) == learned(encoder, third) == ["yes<|im_end|>"]


def test_what_the_tokenizer_cannot_encode_is_one_bad_row(tmp_path):
    CharTokenizer.of_texts(["### User:\n\n### Assistant:\nabc"], with_end_of_text=True).save(tmp_path / "char")
    encoder = encoder_for(tmp_path / "char")
    good, bad = encoder.encode([conversation("a", "bc"), conversation("x", "b")])
    assert learned(encoder, good) == ["bc<|endoftext|>"]
    assert bad.refused == "bad"
    assert "cannot encode" in bad.reason


def test_rewritten_history_is_noted(folders):
    row, = encoder_for(folders["forgetful"]).encode([conversation("a", "b", "c", "d")])
    assert row.rewritten
    assert len(row.examples[0].trained) == 1


@pytest.mark.parametrize("over", [0, 1, 5])
def test_what_is_longer_than_the_limit_is_cut_at_its_end_and_counted(folders, over):
    sample = conversation("hello world", "the cat sat on the mat")
    whole = encoder_for(folders["chat"]).encode([sample])[0].examples[0].ids
    encoder = encoder_for(folders["chat"], max_length=len(whole) - 1 - over)
    (row,) = encoder.encode([sample])
    assert row.examples[0].ids.tolist() == whole[:len(whole) - over].tolist()
    assert (row.lost, row.too_long) == (over, over > 0)
    (dropped,) = replace(encoder, drop=True).encode([sample])
    assert dropped.refused == ("long" if over else "")


def test_a_prompt_that_fills_the_limit_leaves_nothing_to_train(folders):
    (row,) = encoder_for(folders["chat"], max_length=8).encode([conversation("hello world " * 9, "yes")])
    assert (row.refused, row.too_long, row.examples) == ("untrained", True, [])
    assert "max_length=8" in row.reason


@pytest.mark.parametrize(("which", "before"), [("chat", []), ("bos", [0])])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 1000])
def test_a_text_is_cut_into_examples_that_predict_each_token_once_and_its_end(folders, which, before, length):
    tokenizer = open_example_tokenizer(folders[which])
    text = "the cat sat on the mat, hello"
    (row,) = TextEncoder(tokenizer, length).encode([Text(text)])
    whole = [*before, *tokenizer.encode(text).tolist(), 2]
    assert [example.ids[0] for example in row.examples] == whole[:-1:length]
    assert [token for example in row.examples for token in example.ids[1:].tolist()] == whole[1:]
    assert all(example.trained == ((1, len(example.ids)),) and len(example.ids) <= length + 1 for example in row.examples)
    assert row.lost == 0


def test_a_text_that_begins_with_the_beginning_of_sequence_gets_no_second_one(folders):
    tokenizer = open_example_tokenizer(folders["bos"])
    plain, begun = TextEncoder(tokenizer, ROOMY).encode([Text("hello"), Text("<|endoftext|>hello")])
    assert plain.examples[0].ids.tolist() == begun.examples[0].ids.tolist()


def test_a_pair_is_framed_as_transformers_frames_it(folders):
    tokenizer, theirs = open_example_tokenizer(folders["t5"]), AutoTokenizer.from_pretrained(folders["t5"])
    (row,) = PairEncoder(tokenizer, ROOMY).encode([Pair("what is it?", "a cat")])
    (example,) = row.examples
    assert example.source.tolist() == theirs("what is it?")["input_ids"]
    assert example.ids.tolist() == theirs("a cat")["input_ids"]
    assert example.trained == ((0, len(example.ids)),)


def test_a_pair_whose_tokenizer_adds_nothing_still_ends(folders):
    (row,) = PairEncoder(open_example_tokenizer(folders["bos"]), ROOMY).encode([Pair("a", "b")])
    assert row.examples[0].ids[-1] == 2
    assert row.examples[0].ids[0] == row.examples[0].source[0] == 0


def test_a_source_that_is_cut_keeps_its_frame_and_a_target_that_is_cut_has_no_end(folders):
    tokenizer = open_example_tokenizer(folders["t5"])
    source, target = tokenizer.encode("hello world hello world"), tokenizer.encode("the cat sat on the mat")
    (row,) = PairEncoder(tokenizer, 5).encode([Pair("hello world hello world", "the cat sat on the mat")])
    (example,) = row.examples
    assert len(example.source) == len(example.ids) == 5
    assert example.source[-1] == tokenizer.end_of_text
    assert example.ids.tolist() == target[:5].tolist()
    assert row.lost == len(source) - 4 + len(target) - 4


CONTEXT = "hello world paris is the capital of france it is the mat"


def test_a_span_points_at_the_answers_tokens_and_segments_tell_the_texts_apart(folders):
    encoder = SpanEncoder(open_example_tokenizer(folders["bert"]), ROOMY)
    sample = Span("what is the capital of france ?", CONTEXT, ("the capital", "capital"),
                  (CONTEXT.index("the capital"), CONTEXT.index("capital")))
    (example,) = encoder.encode([sample])[0].examples
    first, last = example.answer
    theirs = AutoTokenizer.from_pretrained(encoder.tokenizer.files[0].parent)
    assert example.ids.tolist() == theirs(sample.question, sample.context)["input_ids"]
    assert encoder.tokenizer.decode(example.ids[first:last + 1]) == "the capital"
    assert example.segments[:first].tolist() == [0] * 9 + [1] * (first - 9)
    assert example.trained_tokens == 2


def test_a_long_context_gives_overlapping_windows_and_those_without_the_answer_point_at_the_first_token(folders):
    encoder = SpanEncoder(open_example_tokenizer(folders["bert"]), 24)
    words = [str(number) for number in range(60)]
    context = " ".join(words)
    (row,) = encoder.encode([Span("what is it ?", context, ("30 31",), (context.index("30 31"),))])
    seen = []
    for example in row.examples:
        first, last = example.answer
        text = encoder.tokenizer.decode(example.ids)
        assert len(example.ids) <= 24
        assert (first, last) == (0, 0) or encoder.tokenizer.decode(example.ids[first:last + 1]) == "30 31"
        assert ((first, last) != (0, 0)) == (" 30 31 " in text)
        seen += [word for word in text.split() if word.isdigit()]
    assert set(seen) == set(words)
    assert len(seen) > len(words)
    assert any(example.answer != (0, 0) for example in row.examples)


def test_a_window_that_holds_half_an_answer_points_at_the_first_token(folders):
    encoder = SpanEncoder(open_example_tokenizer(folders["bert"]), 24)
    context = " ".join(str(number) for number in range(60))
    answers = [f"{number} {number + 1}" for number in range(10, 50)]
    rows = encoder.encode([Span("what is it ?", context, (answer,), (context.index(answer),)) for answer in answers])
    halves = 0
    for answer, row in zip(answers, rows, strict=True):
        for example in row.examples:
            text = encoder.tokenizer.decode(example.ids)
            assert (example.answer != (0, 0)) == (f" {answer} " in text)
            halves += f" {answer} " not in text and any(f" {word} " in text for word in answer.split())
    assert halves > 0


def test_an_unanswerable_question_points_at_the_first_token(folders):
    encoder = SpanEncoder(open_example_tokenizer(folders["bert"]), ROOMY)
    (row,) = encoder.encode([Span("what ?", CONTEXT, (), ())])
    assert row.examples[0].answer == (0, 0)


def test_a_question_that_leaves_no_room_is_one_bad_row(folders):
    encoder = SpanEncoder(open_example_tokenizer(folders["bert"]), 16)
    long, short = encoder.encode([Span("what is it ? " * 9, CONTEXT, (), ()), Span("what ?", "hello world", (), ())])
    assert long.refused == "bad"
    assert "no room" in long.reason
    assert len(short.examples) == 1


def test_a_length_without_room_for_the_frame_is_refused(folders):
    with pytest.raises(WrongUse, match=r"max_length=3 leaves no room: the tokenizer puts 3 special tokens"):
        check_length("span", 3, open_example_tokenizer(folders["bert"]))


def test_the_prompt_is_what_comes_before_the_first_answer():
    asked = Message("user", "what? ")
    first = Conversation((Message("system", "s"), asked, Message("assistant", "one")))
    second = Conversation((Message("system", "s"), Message("user", "what?"), Message("assistant", "two"), asked))
    assert prompt_of(first) == prompt_of(second) != prompt_of(Conversation((asked, Message("assistant", "one"))))
    assert prompt_of(Pair("a ", "b")) == prompt_of(Pair("a", "c"))
    assert prompt_of(Span("q", "c", (), ())) != prompt_of(Span("q", "d", (), ()))


def test_ids_fit_the_type_that_stores_them(tmp_path):
    ByteTokenizer().save(tmp_path / "byte")
    encoder = encoder_for(tmp_path / "byte")
    (row,) = encoder.encode([conversation("ü", "日本 🙂")])
    assert learned(encoder, row) == ["日本 🙂<|endoftext|>"]
    assert np.max(row.examples[0].ids) == 256
