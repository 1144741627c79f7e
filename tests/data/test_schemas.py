import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.data.rows.formats import FORMATS, JOIN, SUMMARISE
from powertrain.data.rows.row import BadRow, Conversation, Message, Pair, Row, Span, Text
from powertrain.data.rows.schemas import find_schema
from powertrain.records import WrongUse

TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "text", "text": "v"}]},
         {"role": "assistant", "content": "a"}]
SHARED = [{"from": "system", "value": "s"}, {"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]
SQUAD = {"id": "1", "title": "T", "context": "It is here.", "question": "Where?",
         "answers": {"text": ["here", "is here"], "answer_start": [6, 3]}}
ASKED = Conversation((Message("user", "u"), Message("assistant", "a")))
ASKED_WITH_SYSTEM = Conversation((Message("system", "s"), *ASKED.messages))
UNANSWERABLE = Span("Where?", "It is here.", (), ())
PLACED = Span("Where?", "It is here.", ("here", "is here"), (6, 3))

# a row, the format found in it, and what it means to a model of the right kind
EXAMPLES = [
    ({"messages": TURNS}, "messages", ASKED_WITH_SYSTEM),
    ({"messages": TURNS, "prompt": "u", "completion": "a", "id": 1}, "messages", ASKED_WITH_SYSTEM),
    ({"messages": PARTS}, "messages", Conversation((Message("user", "uv"), Message("assistant", "a")))),
    ({"messages": {"role": ["user", "assistant"], "content": ["u", "a"]}}, "messages", ASKED),
    ({"messages": [{**turn, "tool_calls": None} for turn in TURNS]}, "messages", ASKED_WITH_SYSTEM),
    ({"conversations": SHARED, "id": "x"}, "sharegpt", ASKED_WITH_SYSTEM),
    ({"conversations": SHARED[1:], "system": "s"}, "sharegpt", ASKED_WITH_SYSTEM),
    ({"conversations": TURNS}, "sharegpt", ASKED_WITH_SYSTEM),
    ({"instruction": "u", "input": "", "output": "a"}, "alpaca", ASKED),
    ({"instruction": "u", "input": None, "output": "a", "text": "u a"}, "alpaca", ASKED),
    ({"instruction": "u", "output": "a"}, "alpaca", ASKED),
    ({"instruction": "do", "input": "this", "output": "a"}, "alpaca",
     Conversation((Message("user", "do\n\nthis"), Message("assistant", "a")))),
    ({"instruction": "do", "context": "this", "response": "a", "category": "c"}, "alpaca",
     Conversation((Message("user", "do\n\nthis"), Message("assistant", "a")))),
    ({"input": TURNS[:2], "output": "a"}, "input_messages", ASKED_WITH_SYSTEM),
    ({"prompt": "u", "completion": "a"}, "prompt_completion", ASKED),
    ({"prompt": TURNS[:2], "completion": TURNS[2:]}, "prompt_completion", ASKED_WITH_SYSTEM),
    ({"question": "u", "answer": "a", "level": 3}, "question_answer", ASKED),
    (SQUAD, "context_question_answers", PLACED),
    ({**SQUAD, "answers": [{"text": "here", "answer_start": 6}, {"text": "is here", "answer_start": 3}]},
     "context_question_answers", PLACED),
    ({"context": "It is here.", "question": "Where?", "answer": "here"}, "context_question_answers",
     Span("Where?", "It is here.", ("here",), (6,))),
    ({**SQUAD, "answers": {"text": [], "answer_start": []}}, "context_question_answers", UNANSWERABLE),
    ({**SQUAD, "answers": ""}, "context_question_answers", UNANSWERABLE),
    ({"document": "d", "summary": "s"}, "document_summary", Pair("d", "s")),
    ({"article": "d", "highlights": "s", "id": "1"}, "document_summary", Pair("d", "s")),
    ({"text": "d", "summary": "s"}, "document_summary", Pair("d", "s")),
    ({"input": "d", "output": "s"}, "input_output", Pair("d", "s")),
    ({"text": "t", "url": "u"}, "text", Text("t")),
]
TASKS = {"conversation": "causal", "pair": "seq2seq", "span": "span", "text": "causal"}


def task_of(name: str) -> str:
    return TASKS[next(known.kind for known in FORMATS if known.name == name)]


def rows(*fields) -> list[Row]:
    return [Row(row, f"train.jsonl:{i}") for i, row in enumerate(fields, 1)]


def find(*fields, name=None, columns=None, task="causal"):
    return find_schema(rows(*fields), name=name, columns=columns or {}, task=task)


def read(fields, **options):
    return find(fields, **options)[0].read(fields)


def refusal(*fields, **options) -> str:
    with pytest.raises(WrongUse) as caught:
        find(*fields, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def badness(schema, fields) -> str:
    with pytest.raises(BadRow) as caught:
        schema.read(fields)
    return str(caught.value)


# -------------------------------------------------------------------------------- what is found


@pytest.mark.parametrize(("fields", "name", "sample"), EXAMPLES)
def test_a_format_is_found_by_its_columns_and_read(fields, name, sample):
    schema, said = find(fields, task=task_of(name))
    assert schema.name == name
    assert schema.read(fields) == sample
    assert f"rows are {name} (found by looking at 1 row)" in said


@pytest.mark.parametrize(("fields", "name", "sample"), EXAMPLES)
def test_a_format_that_is_named_reads_the_same(fields, name, sample):
    schema, said = find(fields, name=name, task=task_of(name))
    assert schema.read(fields) == sample
    assert f"rows are {name} (as data.format says)" in said


def test_what_was_found_is_said_with_the_columns_that_are_used_and_not_used():
    assert find({"article": "d", "highlights": "s", "id": "1"}, task="seq2seq")[1] == (
        "rows are document_summary (found by looking at 1 row), read as sequence-to-sequence data from document = article, "
        "summary = highlights; not used: id")


def test_the_format_that_fits_all_rows_wins_over_one_that_fits_some():
    schema, said = find({"question": "q", "answer": "a", "context": "a"}, {"question": "q", "answer": "a", "context": None})
    assert schema.name == "question_answer"
    assert "not used: context" in said


def test_some_bad_first_rows_do_not_hide_the_format():
    good = {"question": "q", "answer": "a"}
    schema, said = find({"question": "q"}, good, good, {"question": "q", "answer": ""})
    assert schema.name == "question_answer"
    assert "2 of these rows do not fit" in said
    with pytest.raises(WrongUse, match="match no known format"):
        find({"question": "q"}, good)


def test_optional_columns_may_be_there_in_some_rows_only():
    schema, _ = find({"instruction": "u", "output": "a"}, {"instruction": "u", "input": "x", "output": "a"})
    assert schema.read({"instruction": "u", "input": "x", "output": "a"}).messages[0].content == "u\n\nx"


@pytest.mark.parametrize("spelling", ["question/answer", "Question_Answer", "question-answer", "qa"])
def test_a_format_may_be_spelt_as_its_columns(spelling):
    assert find({"question": "u", "answer": "a"}, name=spelling)[0].name == "question_answer"


def test_columns_map_ours_to_the_data_s():
    fields = {"frage": "u", "antwort": "a", "text": "t"}
    both = {"question": "frage", "answer": "antwort"}
    assert read(fields, columns=both) == ASKED
    assert read(fields, name="question_answer", columns=both) == ASKED
    assert read({"frage": "u", "answer": "a"}, columns={"question": "frage"}) == ASKED
    assert read({"question": "q", "answer": "a", "body": "b"}, columns={"text": "body"}) == Text("b")


def test_a_mapped_column_is_read_even_where_ours_exists_too():
    assert read({"question": "x", "question_en": "u", "answer": "a"}, columns={"question": "question_en"}) == ASKED


# -------------------------------------------------------------------------------- what is refused


def test_columns_that_match_nothing_are_shown_with_the_accepted_formats():
    message = refusal({"foo": "a", "bar": 1, "baz": [1]})
    assert message.startswith("train.jsonl:1: the columns foo, bar (a number), baz (a list) match no known format. The ")
    assert all(known.name in message for known in FORMATS)


def test_values_of_the_wrong_kind_match_nothing():
    assert "columns question, answer (a number) match no known format" in refusal({"question": "q", "answer": 42})


@pytest.mark.parametrize(("chosen", "cure"), [
    ("good", "data.format=prompt_completion data.columns={completion: chosen}"),
    (TURNS, "data.format=messages data.columns={messages: chosen}")])
def test_preference_data_are_refused_with_a_cure_that_works(chosen, cure):
    fields = {"prompt": "u", "chosen": chosen, "rejected": chosen, "messages": TURNS}
    message = refusal(fields)
    assert "preference data" in message
    assert cure in message
    name, columns = cure.split()[0].partition("=")[2], cure.partition("{")[2].rstrip("}").split(": ")
    assert isinstance(read(fields, name=name, columns=dict([columns])), Conversation)
    assert isinstance(read(fields, columns=dict([columns])), Conversation)


def test_an_unknown_format_is_refused_with_the_nearest():
    assert "did you mean messages?" in refusal({"text": "t"}, name="mesages")


def test_a_named_format_without_its_columns_is_refused_with_those_there_are():
    message = refusal({"frage": "u", "answer": "a"}, name="question_answer")
    assert "data.format=question_answer needs question, and there are only: frage, answer" in message
    assert "data.columns={question: frage}" in message


def test_columns_that_no_format_or_no_row_has_are_refused():
    assert "'quesion', which no format has" in refusal({"a": "b"}, columns={"quesion": "a"})
    assert "did you mean question?" in refusal({"a": "b"}, columns={"quesion": "a"})
    assert "no column 'frag', which data.columns names for question; there are: frage; did you mean frage?" in \
        refusal({"frage": "b"}, columns={"question": "frag"})
    assert "data.format=text has only text" in refusal({"text": "b"}, name="text", columns={"question": "text"})


def test_a_format_that_no_row_can_be_read_as_is_refused_with_the_reason():
    message = refusal({"context": "c", "question": "q", "answer": "elsewhere"}, task="span")
    assert "none of the first 1 rows can be read as context_question_answers" in message
    assert "the answer 'elsewhere' is not found in the context" in message


# -------------------------------------------------------------------------------- which model


@pytest.mark.parametrize(("fields", "what"), [
    ({"document": "d", "summary": "s"}, "sequence-to-sequence data"),
    ({"input": "d", "output": "s"}, "sequence-to-sequence data"),
    (SQUAD, "extractive question-answering data")])
def test_a_decoder_refuses_data_for_other_models_and_names_the_format_that_it_can_learn(fields, what):
    message = refusal(fields)
    assert f"are {what}, and this model is a decoder; use " in message
    name = message.partition("data.format=")[2].split()[0]
    assert find(fields, name=name)[0].kind == "conversation"


def test_a_named_pair_or_span_is_a_prompt_and_its_answer_for_a_decoder():
    def asked(prompt, answer):
        return Conversation((Message("user", prompt), Message("assistant", answer)))

    assert read({"document": "d", "summary": "s"}, name="document_summary") == asked(f"{SUMMARISE}{JOIN}d", "s")
    assert read({"input": "d", "output": "s"}, name="input_output") == asked("d", "s")
    assert read(SQUAD, name="squad") == asked("It is here.\n\nWhere?", "here")
    assert read({**SQUAD, "answers": "not in it"}, name="squad") == asked("It is here.\n\nWhere?", "not in it")


def test_an_encoder_decoder_reads_one_exchange_as_a_pair():
    for fields in ({"question": "u", "answer": "a"}, {"prompt": "u", "completion": "a"}, {"messages": TURNS[1:]}):
        schema, said = find(fields, task="seq2seq")
        assert (schema.kind, schema.read(fields)) == ("pair", Pair("u", "a"))
        assert "read as sequence-to-sequence data" in said
    assert read({"messages": TURNS}, task="seq2seq") == Pair("s\n\nu", "a")
    assert read(SQUAD, name="squad", task="seq2seq") == Pair("It is here.\n\nWhere?", "here")


def test_an_encoder_decoder_refuses_conversations_of_several_exchanges():
    several = {"messages": TURNS + TURNS[1:]}
    assert "4 turns, and an encoder-decoder model learns from one user's and one assistant's; use a decoder" in \
        refusal(several, task="seq2seq")
    schema, said = find({"messages": TURNS}, several, task="seq2seq")
    assert "1 of these rows do not fit" in said
    assert badness(schema, several["messages"] and several).startswith("4 turns")


@pytest.mark.parametrize(("fields", "task", "sentence"), [
    ({"text": "t"}, "seq2seq", "plain text teaches a decoder, and this is an encoder-decoder model"),
    (SQUAD, "seq2seq", "extractive question-answering data, and this model is an encoder-decoder; use a question"),
    ({"text": "t"}, "span", "text are plain text, and a question-answering head learns from context, question and answers"),
    ({"question": "q", "answer": "a"}, "span", "question and answer are conversations, and a question-answering head"),
    ({"input": "q", "output": "a"}, "span", "are sequence-to-sequence data, and a question-answering head"),
])
def test_data_that_a_model_cannot_learn_from_are_refused(fields, task, sentence):
    assert sentence in refusal(fields, task=task)


# -------------------------------------------------------------------------------- bad rows


def turns(*roles: str) -> dict:
    return {"messages": [{"role": role, "content": role} for role in roles]}


@pytest.mark.parametrize(("fields", "reason"), [
    ({}, "no column 'messages'; it has: nothing"),
    ({"text": "a"}, "no column 'messages'; it has: text"),
    ({"messages": None}, "the column 'messages' is null"),
    ({"messages": "hello"}, "'messages' is a string, not a list of turns"),
    ({"messages": []}, "no assistant turn"),
    ({"messages": ["hello"]}, "turn 1 of 'messages' is a string, not an object"),
    ({"messages": [{"content": "a"}]}, "turn 1 of 'messages' has no role; it has: content"),
    ({"messages": [{"role": "narrator", "content": "a"}]}, "turn 1 of 'messages' has the role 'narrator'; known are system"),
    ({"messages": [{"role": 3, "content": "a"}]}, "turn 1 of 'messages' has the role 3"),
    ({"messages": [{"role": "user"}]}, "turn 1 of 'messages' has no content"),
    ({"messages": [TURNS[1], {"role": "assistant", "content": None, "tool_calls": []}]}, "turn 2 of 'messages' has no content"),
    ({"messages": [{"role": "user", "content": 3}]}, "'content of turn 1' is a number, not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'content of turn 1' has a part of the type"),
    ({"messages": [{"role": "user", "content": " \n"}, TURNS[2]]}, "empty prompt (turn 1)"),
    ({"messages": [TURNS[1], {"role": "assistant", "content": ""}]}, "empty answer (turn 2)"),
    (turns("user"), "no assistant turn: nothing to learn from"),
    (turns("system", "user"), "no assistant turn"),
    (turns("assistant", "user"), "turn 1 is an assistant turn at the beginning; user and assistant must alternate"),
    (turns("user", "user", "assistant"), "turn 2 is a user turn after another user's"),
    (turns("user", "assistant", "assistant"), "turn 3 is an assistant turn after another assistant's"),
    (turns("user", "tool", "assistant"), "turn 2 is a tool turn after a user turn"),
    (turns("user", "assistant", "system"), "turn 3 is a system turn; it can only stand first"),
])
def test_a_row_that_is_no_conversation_is_bad(fields, reason):
    schema, _ = find({"messages": TURNS})
    assert badness(schema, fields).startswith(reason)


@pytest.mark.parametrize("roles", [("user", "assistant"), ("system", "user", "assistant", "user"),
                                   ("user", "assistant", "tool", "tool", "assistant", "user", "assistant")])
def test_turns_that_alternate_are_read(roles):
    assert [message.role for message in read(turns(*roles)).messages] == list(roles)


def test_a_blank_system_text_is_left_out():
    assert read({"messages": [{"role": "system", "content": ""}, *TURNS[1:]]}) == ASKED
    assert read({"instruction": "u", "output": "a", "system": " "}) == ASKED


@pytest.mark.parametrize(("fields", "reason"), [
    ({"instruction": "", "input": " ", "output": "a"}, "empty prompt"),
    ({"instruction": "u", "input": "", "output": ""}, "empty answer"),
    ({"instruction": "u", "input": 3, "output": "a"}, "'input' is a number, not text"),
    ({"instruction": "u", "input": ""}, "no column 'output'; it has: instruction, input"),
])
def test_a_row_that_is_no_instruction_is_bad(fields, reason):
    schema, _ = find({"instruction": "u", "input": "i", "output": "a"})
    assert badness(schema, fields).startswith(reason)


@pytest.mark.parametrize(("fields", "reason"), [
    ({"input": "a", "output": " "}, "empty output"), ({"input": "", "output": "a"}, "empty input")])
def test_a_row_that_is_no_pair_is_bad(fields, reason):
    schema, _ = find({"input": "i", "output": "a"}, task="seq2seq")
    assert badness(schema, fields) == reason


def test_a_blank_text_is_bad():
    assert badness(find({"text": "a"})[0], {"text": "\n"}) == "empty text"


@pytest.mark.parametrize(("changes", "reason"), [
    ({"question": " "}, "empty question"),
    ({"context": ""}, "empty context"),
    ({"answers": "nowhere"}, "the answer 'nowhere' is not found in the context"),
    ({"answers": {"text": ["here"], "answer_start": [3]}}, "the answer 'here' is not at character 3 of the context, but at 6"),
    ({"answers": {"text": ["here"], "answer_start": [-5]}}, "the answer 'here' is not at character -5"),
    ({"answers": {"text": ["here"], "answer_start": [6, 7]}}, "'answers' needs as many answer_start as text"),
    ({"answers": {"text": [3], "answer_start": [6]}}, "'answers' holds a number as text"),
    ({"answers": [{"text": "here", "answer_start": "6"}]}, "'answers' holds a string as answer_start"),
    ({"answers": [{"start": 6}]}, "'answers' holds null as text"),
    ({"answers": {"answer": "here"}}, "'answers' needs as many answer_start as text"),
    ({"answers": None}, "the column 'answers' is null"),
])
def test_a_row_that_is_no_span_is_bad(changes, reason):
    schema, _ = find(SQUAD, task="span")
    assert badness(schema, {**SQUAD, **changes}).startswith(reason)


def test_an_unanswerable_question_teaches_a_decoder_nothing():
    schema, _ = find(SQUAD, name="squad")
    assert badness(schema, {**SQUAD, "answers": []}).startswith("empty answer")


# -------------------------------------------------------------------------------- properties


words = st.sampled_from(["", " ", "a", "here", "\n"])
keys = st.sampled_from(["role", "content", "from", "value", "type", "text", "answer_start"])
junk = st.recursive(st.none() | st.booleans() | st.integers(-1, 9) | words,
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        keys, inner, max_size=3), max_leaves=6)
roles = st.sampled_from(["system", "user", "assistant", "tool", "human", "gpt"])
turn = st.fixed_dictionaries({"role": roles, "content": words})


@given(st.data())
def test_no_row_whatever_it_holds_raises_anything_but_badrow(data):
    fields, name, sample = data.draw(st.sampled_from(EXAMPLES).filter(lambda example: example[2] != UNANSWERABLE))
    schema, _ = find(fields, name=name, task=data.draw(st.sampled_from([task_of(name), "causal"])))
    row = {column: data.draw(junk | st.just(fields[column])) for column in fields}
    with contextlib.suppress(BadRow):
        assert type(schema.read(row)) in (type(sample), Conversation)


@given(st.lists(turn, max_size=6))
def test_a_conversation_that_is_read_alternates_and_teaches_something(messages):
    schema, _ = find({"messages": TURNS})
    try:
        found = schema.read({"messages": messages}).messages
    except BadRow:
        return
    spoken = [message.role for message in found if message.role in ("user", "assistant")]
    assert "system" not in [message.role for message in found[1:]]
    assert spoken[:2] == ["user", "assistant"]
    assert all(message.content.strip() for message in found if message.role != "tool")
    assert all(a.role != b.role or a.role == "tool" for a, b in itertools.pairwise(found))


answer = st.tuples(st.text("ab", max_size=3), st.none() | st.integers(-2, 12))


@given(st.text("ab ", min_size=1, max_size=12), st.lists(answer, max_size=3))
def test_every_answer_of_a_span_that_is_read_stands_in_the_context(context, answers):
    schema, _ = find(SQUAD, task="span")
    listed = [{"text": text, "answer_start": start} for text, start in answers]
    try:
        span = schema.read({"context": context, "question": "q", "answers": listed})
    except BadRow:
        return
    assert list(span.answers) == [text for text, _ in answers if text]
    assert all(context[start:start + len(text)] == text for text, start in zip(span.answers, span.starts, strict=True))
