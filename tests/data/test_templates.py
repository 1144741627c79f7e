import json
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from example_folders import CHATML, FORGETFUL, GENERATION, INST, chat_folder
from powertrain.data.examples.templates import find_template
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.data.rows.row import BadRow, Message
from powertrain.data.table_tokenizers import ByteTokenizer
from powertrain.data.tokenizers import BytePairTokenizer
from powertrain.records import WrongUse

ASKED = [Message("user", "what is it?"), Message("assistant", "  a cat\n")]
TWICE = [Message("system", "be short"), Message("user", "one?"), Message("assistant", "two"), Message("user", "three?"),
         Message("assistant", "four")]


def template_of(folder, wanted, **options):
    return find_template(open_example_tokenizer(folder), wanted, **options)


def trained(template, messages, train_on="assistant"):
    marked = template.marked(messages, train_on)
    return [marked.text[start:stop] for start, stop in marked.trained]


def as_dicts(messages):
    return [{"role": message.role, "content": message.content} for message in messages]


@pytest.fixture
def folder(tmp_path):
    return chat_folder(tmp_path / "tokenizer")


def test_the_tokenizers_own_template_renders_what_transformers_renders(folder):
    template = template_of(folder, None)
    theirs = AutoTokenizer.from_pretrained(folder)
    for prompt in (False, True):
        assert template.render(TWICE, prompt) == theirs.apply_chat_template(as_dicts(TWICE), tokenize=False,
                                                                            add_generation_prompt=prompt)


def test_every_turn_of_the_assistant_is_trained_with_its_end_and_not_the_line_end_behind_it(folder):
    assert trained(template_of(folder, None), TWICE) == ["two<|im_end|>", "four<|im_end|>"]
    assert trained(template_of(folder, None), ASKED) == ["  a cat\n<|im_end|>"]


def test_all_trains_the_whole_text(folder):
    template = template_of(folder, None)
    assert trained(template, TWICE, "all") == [template.render(TWICE)]


def test_a_template_without_a_generation_prompt_trains_from_the_end_of_the_question(tmp_path):
    template = template_of(chat_folder(tmp_path / "inst", INST), None)
    assert trained(template, TWICE[1:]) == [" two<|im_end|>", " four<|im_end|>"]


def test_a_header_that_add_generation_prompt_does_not_write_is_not_trained(tmp_path):
    headed = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    assert trained(template_of(chat_folder(tmp_path / "headed", headed), None), TWICE) == ["two<|im_end|>", "four<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_trains_the_last_one_and_says_so(tmp_path):
    template = template_of(chat_folder(tmp_path / "forgetful", FORGETFUL), None)
    marked = template.marked(TWICE, "assistant")
    assert marked.rewritten
    assert trained(template, TWICE) == ["<think></think>four<|im_end|>"]
    assert not template.marked(ASKED, "assistant").rewritten


def test_generation_marks_decide_and_the_end_of_the_turn_is_trained_though_they_leave_it_out(tmp_path):
    template = template_of(chat_folder(tmp_path / "marks", GENERATION), None)
    assert trained(template, TWICE) == ["two<|im_end|>", "four<|im_end|>"]


def test_what_a_template_refuses_is_a_bad_row_with_its_reason(tmp_path):
    template = template_of(chat_folder(tmp_path / "inst", INST), None)
    with pytest.raises(BadRow, match="no system role here"):
        template.marked(TWICE, "assistant")


def test_a_broken_template_is_refused_with_its_line(tmp_path):
    with pytest.raises(WrongUse, match=r"broken at line 2"):
        template_of(chat_folder(tmp_path / "broken", "{{ 'a' }}\n{% for %}"), None)


def test_a_template_cannot_reach_python_through_the_messages(tmp_path):
    template = template_of(chat_folder(tmp_path / "evil", "{{ messages.__class__.__mro__ }}"), "plain")
    assert template.name == "plain"
    evil = template_of(chat_folder(tmp_path / "evil2", "{{ messages[0].__class__.__mro__[1].__subclasses__() }}"), None)
    with pytest.raises(BadRow, match="unsafe"):
        evil.render(ASKED)


@pytest.mark.parametrize(("own", "wanted", "texts", "name"), [
    (CHATML, None, False, "the tokenizer's"), (None, None, False, "plain"), (CHATML, "plain", False, "plain"),
    (CHATML, None, True, "raw"), (None, "chatml", True, "chatml")])
def test_the_users_template_wins_over_the_tokenizers_and_that_over_a_shipped_one(tmp_path, own, wanted, texts, name):
    assert template_of(chat_folder(tmp_path / "t", own), wanted, texts=texts).name == name


def test_a_template_from_a_file_and_one_from_a_list_of_named_ones(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}mine {{ m['content'] }}{{ eos_token }}{% endfor %}")
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "tools {{ messages | length }}"}]
    folder = chat_folder(tmp_path / "named", None, chat_template=named)
    assert template_of(folder, str(file)).render(ASKED[:1]) == "mine what is it?<|im_end|>"
    assert template_of(folder, None).render(ASKED) == template_of(chat_folder(tmp_path / "one"), None).render(ASKED)
    assert template_of(folder, "tool_use").render(ASKED) == "tools 2"
    with pytest.raises(WrongUse, match=r"neither a file nor a shipped template.*plain, chatml, raw, default, tool_use"):
        template_of(folder, "vicuna")


def test_plain_needs_only_the_end_token_and_raw_adds_nothing_else(folder):
    plain, raw = template_of(folder, "plain"), template_of(folder, "raw")
    assert plain.render(ASKED) == "### User:\nwhat is it?\n\n### Assistant:\n  a cat\n<|im_end|>\n\n"
    assert plain.render(ASKED[:1], True) == "### User:\nwhat is it?\n\n### Assistant:\n"
    assert trained(plain, TWICE) == ["two<|im_end|>", "four<|im_end|>"]
    assert raw.render(ASKED) == "what is it?  a cat\n<|im_end|>"
    assert trained(raw, ASKED) == ["  a cat\n<|im_end|>"]


def test_chatml_is_refused_where_its_tokens_are_missing(tmp_path):
    folder = chat_folder(tmp_path / "small", None, special=("<s>", "</s>"), eos_token="</s>", pad_token="</s>")
    with pytest.raises(WrongUse, match=r"<\|im_start\|> and <\|im_end\|>.*use data.chat_template=plain"):
        template_of(folder, "chatml")


def test_the_beginning_of_sequence_is_written_once(tmp_path):
    adding = chat_folder(tmp_path / "adding", CHATML, adds_bos=True)
    both = chat_folder(tmp_path / "both", INST, adds_bos=True)
    for folder, wanted in ((adding, None), (adding, "plain"), (adding, "raw"), (both, None)):
        assert template_of(folder, wanted).render(ASKED).count("<|endoftext|>") == 1
    assert "<|endoftext|>" not in template_of(chat_folder(tmp_path / "not"), None).render(ASKED)
    off = chat_folder(tmp_path / "off", CHATML, adds_bos=True, add_bos_token=False)
    assert "<|endoftext|>" not in template_of(off, None).render(ASKED)


def test_a_tokenizer_that_names_no_end_is_refused_until_one_is_named(tmp_path):
    folder = chat_folder(tmp_path / "endless", CHATML, eos_token=None)
    with pytest.raises(WrongUse, match=r"has no end token.*data\.end_token=.*<\|im_end\|>"):
        open_example_tokenizer(folder)
    assert open_example_tokenizer(folder, "<|im_end|>").end_of_text == 2
    with pytest.raises(WrongUse, match=r"data\.end_token=<\|imend\|> is not among.*<\|im_end\|>"):
        open_example_tokenizer(folder, "<|imend|>")


def own_byte(folder):
    ByteTokenizer().save(folder)


def own_bpe(folder):
    BytePairTokenizer.trained(["hello world, what is it? a cat", "### User: ### Assistant:"] * 5, 300).save(folder)


@pytest.mark.parametrize("wanted", [None, "plain", "raw", "chatml"])
@pytest.mark.parametrize("make", [chat_folder, lambda folder: chat_folder(folder, None, adds_bos=True), own_byte, own_bpe])
def test_what_is_saved_gives_transformers_the_same_text_and_ids(tmp_path, make, wanted):
    make(tmp_path / "made")
    tokenizer = open_example_tokenizer(tmp_path / "made")
    if wanted == "chatml" and "<|im_start|>" not in tokenizer.added_texts:
        pytest.skip("it has no such tokens")
    template = find_template(tokenizer, wanted)
    replace(tokenizer, template=template.text).save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for messages in (ASKED, TWICE):
        text = template.render(messages)
        assert theirs.apply_chat_template(as_dicts(messages), tokenize=False) == text
        assert theirs.apply_chat_template(as_dicts(messages))["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.eos_token_id == tokenizer.end_of_text
    again = open_example_tokenizer(tmp_path / "saved")
    assert find_template(again, None).render(TWICE) == template.render(TWICE)


@pytest.mark.parametrize("legacy", [False, True])
def test_another_end_token_is_saved_as_the_tokenizers_own(tmp_path, folder, legacy):
    if legacy:
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    tokenizer = open_example_tokenizer(folder, "<pad>")
    template = find_template(tokenizer, "plain")
    replace(tokenizer, template=template.text).save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (theirs.eos_token, theirs.pad_token) == ("<pad>", "<pad>")
    assert theirs.apply_chat_template(as_dicts(ASKED), tokenize=False) == template.render(ASKED)


@pytest.mark.parametrize("listed", [False, True])
def test_where_two_files_name_different_ends_transformers_is_followed(tmp_path, listed):
    added = {"2": {"content": "<|im_end|>", "special": True}, "3": {"content": "<pad>", "special": True}}
    folder = chat_folder(tmp_path / "two", **({"added_tokens_decoder": added} if listed else {}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<pad>"}))
    assert open_example_tokenizer(folder).end == AutoTokenizer.from_pretrained(folder).eos_token


def test_the_special_token_behind_a_turn_is_found(tmp_path, folder):
    assert template_of(folder, None).turn_end() == "<|im_end|>"
    endless = chat_folder(tmp_path / "endless", "{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    assert template_of(endless, None).turn_end() is None
