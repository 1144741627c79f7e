"""Rows with tools: their spellings, what a template writes of them, and which tokens are learned."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from example_folders import CHATML, GENERATION, chat_folder, examples_of, json_lines
from powertrain.data.examples.check import pieces_of
from powertrain.data.examples.encoding import ConversationEncoder
from powertrain.data.examples.templates import SHIPPED, find_template
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.data.rows.row import BadRow, Conversation, Message, Row, ToolCall
from powertrain.data.rows.schemas import find_schema
from powertrain.records import WrongUse

TOOL = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
AS_TEXT = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
MESSAGES = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "hot", "name": "weather", "tool_call_id": "call00001"},
            {"role": "assistant", "content": "it is hot"}]
OPENAI = {"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [AS_TEXT]}, *MESSAGES[2:]], "tools": [TOOL],
          "parallel_tool_calls": False}
CALLED = ToolCall("weather", {"city": "Paris"}, "call00001")
BARE = ToolCall("weather", {"city": "Paris"})
ASKED, HOT = Message("user", "what is it?"), Message("assistant", "it is hot")
RESULT = Message("tool", "hot", name="weather", tool_call_id="call00001")
WANTED = Conversation((ASKED, Message("assistant", "", (CALLED,), is_null=True), RESULT, HOT), (TOOL,))
SHORT = Conversation((ASKED, Message("assistant", "", (BARE,), is_null=True), Message("tool", "hot"), HOT), (TOOL,))

SHARED = [{"from": "human", "value": "what is it?"},
          {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
          {"from": "observation", "value": "hot"}, {"from": "gpt", "value": "it is hot"}]
# as Qwen 2.5 and Hermes write them: tool results are a user's turn, several share one
QWEN = ("{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>"
        "\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != "
        "'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% elif m.tool_calls %}<|im_start|>assistant{% if m.content %}\n{{ m.content }}{% endif %}"
        "{% for c in m.tool_calls %}{{ '\n<tool_call>\n{\"name\": \"' }}{{ c.function.name }}\", \"arguments\": "
        "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
MARKED = ("{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
          "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
          "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>"
          "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# as DeepSeek's templates: arguments are texts, and a null content tells a call from an answer
TEXTS = ("{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
         "{{ 'call ' + c.function.name + ' ' + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
         "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}{% if tools %}{% endif %}")


def read(row, task="causal"):
    return find_schema([Row(row, "x:1")], name=None, columns={}, task=task)[0].read(row)


@pytest.mark.parametrize(("row", "wanted"), [
    ({"messages": MESSAGES, "tools": [TOOL]}, WANTED),
    (OPENAI, WANTED),
    ({"messages": MESSAGES, "tools": json.dumps([TOOL["function"]])}, WANTED),
    ({"messages": [MESSAGES[0], {"role": "assistant", "content": None, "function_call": AS_TEXT["function"]},
                   {"role": "function", "name": "weather", "content": "hot"}, MESSAGES[3]], "functions": [TOOL["function"]]},
     Conversation((*SHORT.messages[:2], Message("tool", "hot", name="weather"), HOT), (TOOL,))),
    ({"conversations": SHARED, "tools": json.dumps([TOOL])}, SHORT),
    ({"conversations": [SHARED[0], {"from": "gpt", "value": "wait"}, *SHARED[1:]], "tools": [TOOL]},
     Conversation((ASKED, Message("assistant", "wait", (BARE,)), Message("tool", "hot"), HOT), (TOOL,))),
    ({"conversations": [*SHARED[:2], SHARED[1], *SHARED[2:]], "tools": [TOOL]},
     Conversation((ASKED, Message("assistant", "", (BARE, BARE), is_null=True), Message("tool", "hot"), HOT), (TOOL,))),
    ({"id": 0, "query": "what is it?", "answers": json.dumps([{"name": "weather", "arguments": {"city": "Paris"}}]),
      "tools": json.dumps([TOOL["function"]])}, Conversation(SHORT.messages[:2], (TOOL,))),
    # Hermes and ToolACE: calls are text, and the system text holds the tools
    ({"system": "call weather(city)", "tools": json.dumps([TOOL]),
      "conversations": [SHARED[0], {"from": "gpt", "value": "<tool_call>x</tool_call>"}, {"from": "tool", "value": "hot"},
                        SHARED[3]]},
     Conversation((Message("system", "call weather(city)"), ASKED, Message("assistant", "<tool_call>x</tool_call>"),
                   Message("tool", "hot"), HOT))),
    ({"messages": [MESSAGES[0], MESSAGES[3]], "tools": []}, Conversation((ASKED, HOT)))])
def test_every_spelling_of_tools_and_calls_means_the_same(row, wanted):
    assert read(row) == wanted


@pytest.mark.parametrize(("changed", "reason"), [
    ({"tools": [{"type": "function", "function": {"name": "time"}}]},
     r"turn 2 calls 'weather', .*none of the row's tools \(time\)"),
    ({"tools": "[{"}, r"tools is text that is no JSON"),
    ({"tools": [3]}, "tool 1 of 'tools' has no name"),
    ({"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
     "a call without a name"),
    ({"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": "[1]"}]}]},
     "the arguments of weather in turn 2 of 'messages' are a list, not an object"),
    ({"messages": [MESSAGES[0], {"role": "assistant", "content": None}]}, "turn 2 of 'messages' has no content")])
def test_a_row_whose_tools_cannot_be_learned_is_bad_with_its_reason(changed, reason):
    schema, _ = find_schema([Row(OPENAI, "x:1")], name=None, columns={}, task="causal")
    with pytest.raises(BadRow, match=reason):
        schema.read({**OPENAI, **changed})


def test_an_encoder_decoder_learns_no_tools():
    with pytest.raises(WrongUse, match="it has tools, and an encoder-decoder model learns texts only"):
        read({"messages": MESSAGES[:2], "tools": [TOOL]}, "seq2seq")


# ------------------------------------------------------------------------------------------------ templates


def template_of(folder, wanted=None):
    return find_template(open_example_tokenizer(folder), wanted)


@pytest.mark.parametrize("text", [QWEN, MARKED, SHIPPED["plain"], SHIPPED["chatml"]])
@pytest.mark.parametrize("turns", [2, 3, 4])
@pytest.mark.parametrize("asks", [False, True])
def test_tools_calls_and_results_are_rendered_as_transformers_does(tmp_path, text, turns, asks):
    folder = chat_folder(tmp_path / "t", text)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        MESSAGES[:turns], tools=[TOOL], tokenize=False, add_generation_prompt=asks)
    assert template_of(folder).render(WANTED.messages[:turns], asks, WANTED.tools) == theirs
    assert "weather" in theirs


def test_where_the_template_marks_generation_the_mask_is_that_of_transformers(tmp_path):
    folder = chat_folder(tmp_path / "t", MARKED)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        MESSAGES, tools=[TOOL], return_dict=True, return_assistant_tokens_mask=True)
    tokenizer = open_example_tokenizer(folder)
    (row,) = ConversationEncoder(tokenizer, 500, template=find_template(tokenizer, None)).encode([WANTED])
    (example,) = row.examples
    mask = np.zeros(len(theirs["input_ids"]), int)
    for start, stop in example.trained:
        mask[start:stop] = 1
    assert example.ids.tolist() == theirs["input_ids"][:len(example.ids)]
    assert mask.tolist() == theirs["assistant_masks"]
    assert 0 < mask.sum() < len(mask)


@pytest.mark.parametrize("text", [QWEN, MARKED, SHIPPED["plain"], SHIPPED["chatml"]])
def test_calls_and_answers_are_learned_with_their_end_and_results_are_not(tmp_path, text):
    marked = template_of(chat_folder(tmp_path / "t", text)).marked(WANTED.messages, "assistant", WANTED.tools)
    first, last = (marked.text[start:stop] for start, stop in marked.trained)
    assert "weather" in first
    assert "Paris" in first
    assert first.endswith("<|im_end|>")
    assert last == "it is hot<|im_end|>"
    assert "hot" not in first


def test_a_template_that_rewrites_earlier_turns_trains_every_turn_behind_the_last_question(tmp_path):
    thoughtful = QWEN.replace("<|im_start|>assistant{% if", "<|im_start|>assistant{% if loop.index0 > ns.last %}<think>"
                              "{% endif %}{% if")
    question = [Message("user", "and now?"), *WANTED.messages[1:]]
    rewriting = ("{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
                 "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}") + thoughtful
    template = template_of(chat_folder(tmp_path / "t", rewriting))
    marked = template.marked([*WANTED.messages, *question], "assistant", WANTED.tools)
    assert marked.rewritten
    texts = [marked.text[start:stop] for start, stop in marked.trained]
    assert texts[-1] == "it is hot<|im_end|>"
    assert texts[-2].endswith("</tool_call><|im_end|>")


def test_the_header_of_a_turn_of_calls_is_not_learned_though_the_calls_begin_otherwise_than_an_answer(tmp_path):
    other = QWEN.replace("'\n<tool_call>\n", "'<tool_call>\n")
    template = template_of(chat_folder(tmp_path / "t", other))
    marked = template.marked(WANTED.messages, "assistant", WANTED.tools)
    start, stop = marked.trained[0]
    assert marked.text[start:stop].startswith("<tool_call>")


def test_arguments_are_texts_for_a_template_that_takes_no_objects(tmp_path):
    template = template_of(chat_folder(tmp_path / "t", TEXTS))
    assert 'call weather {"city": "Paris"}<|im_end|>' in template.render(WANTED.messages)


@pytest.mark.parametrize(("text", "tools", "reason"), [
    (CHATML, (TOOL,), "leaves out the row's tools"), (GENERATION, (TOOL,), "leaves out the row's tools"),
    (CHATML, (), "leaves out calls of tools")])
def test_a_template_that_leaves_out_tools_or_calls_is_refused_for_such_rows(tmp_path, text, tools, reason):
    template = template_of(chat_folder(tmp_path / "t", text))
    with pytest.raises(BadRow, match=f"{reason}; use the template of a model that calls tools.*data.chat_template=plain"):
        template.marked(WANTED.messages, "assistant", tools)
    assert template.render([ASKED, HOT]).count("<|im_end|>") == 2


def test_the_store_keeps_tool_rows_apart_and_shows_what_is_learned(tmp_path):
    folder = chat_folder(tmp_path / "model", QWEN)
    other = {**OPENAI, "messages": [OPENAI["messages"][0], {"role": "assistant", "tool_calls": [
        {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]}, *MESSAGES[2:]]}
    rows = json_lines(tmp_path / "rows.jsonl", [OPENAI, other, {**OPENAI, "tools": "[{"}])
    store = examples_of(rows, tokenizer_folder=folder, cache=tmp_path / "cache", max_length=2000, validation_share=0)
    assert store.counts["good"] == 2
    assert store.counts["bad"] == 1
    first, second = store.column("digest")
    assert first != second                   # their texts are equal, their calls are not
    shown = "".join(f"[[{piece.text}]]" if piece.trained else piece.text for piece in pieces_of(store, 0))
    assert '[[<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>]]' in shown
    assert "<tool_response>\nhot\n</tool_response>" in shown
    assert "[[it is hot<|im_end|>]]" in shown
