import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from example_folders import chat_folder, examples_of, json_lines, seq2seq_folder, span_folder
from powertrain.data import order
from powertrain.data.examples import epoch, making, sides
from powertrain.data.examples.sides import held_out, weighted
from powertrain.data.order import epoch_order
from powertrain.data.publishing import is_whole
from powertrain.data.rows import folders
from powertrain.records import IGNORE, WrongUse

ROWS = [{"question": f"what is {number} ?", "answer": f"it is {number} " + "cat " * (number % 7)} for number in range(40)]


@pytest.fixture
def rows(tmp_path):
    return json_lines(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    return chat_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def opened(tmp_path, chat):
    """Opens sources with a chat tokenizer, in this test's cache."""
    def opens(*sources, **changed):
        options = {"max_length": 100, "validation_share": 0.0, "seed": 3, "tokenizer_folder": chat, "cache": tmp_path / "cache"}
        return examples_of(*sources, **{**options, **changed})
    return opens


@pytest.fixture
def no_building(monkeypatch):
    def forbid():
        def refuse(*arguments, **named):
            raise AssertionError("it was built again")
        monkeypatch.setattr(making, "write_rows", refuse)
    return forbid


def texts(store, examples):
    return [store.tokenizer.decode(example.inputs) for example in examples]


def test_targets_follow_inputs_and_only_answers_are_targets(opened, rows):
    store = opened(rows)
    assert len(store.training) == 40
    for number, example in enumerate(store.training):
        assert len(example.inputs) == len(example.targets) == example.tokens == store.lengths[number]
        learned = example.targets != IGNORE
        assert (example.targets[:-1][learned[:-1]] == example.inputs[1:][learned[:-1]]).all()
        assert learned.sum() == store.trained[number]
        assert store.tokenizer.decode(example.targets[learned]) == ROWS[number]["answer"] + "<|im_end|>"
        assert store.tokenizer.decode(example.inputs[~learned[:]]).startswith("<|im_start|>user\n")
    assert store.origins(7) == f"{rows}:8"
    assert (store.kind, store.schema) == ("conversation", "question_answer")


def test_examples_are_a_sequence_with_slices_and_ends(opened, rows):
    training = opened(rows).training
    assert training[-1].inputs.tolist() == training[39].inputs.tolist() == training[38:][1].inputs.tolist()
    with pytest.raises(IndexError):
        training[40]


def test_a_second_opening_reads_what_the_first_wrote_and_so_does_another_split_seed_or_weight(opened, rows, no_building):
    first = opened(rows)
    no_building()
    again = opened(rows, validation_share=0.3, seed=9, weights=[2.0])
    assert again.folder == first.folder
    assert is_whole(first.folder)
    assert again.epoch.digest == first.epoch.digest
    assert texts(first, first.training[:3]) == texts(again, [again.example(i) for i in range(3)])


@pytest.mark.parametrize("changed", [
    {"max_length": 99}, {"long_examples": "drop"}, {"train_on": "all"}, {"chat_template": "plain"}, {"end_token": "<pad>"},
    {"max_examples": 30}, {"columns": {"question": "answer", "answer": "question"}}])
def test_what_decides_the_content_makes_another_store(opened, rows, changed):
    assert opened(rows).folder != opened(rows, **changed).folder


def test_a_changed_file_and_a_changed_tokenizer_are_seen(opened, rows, tmp_path):
    first = opened(rows)
    stamp = rows.stat()
    rows.write_text(rows.read_text().replace("it is 7 ", "it is 8 "))
    os.utime(rows, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))     # same size, same time: the content decides
    second = opened(rows)
    assert second.folder != first.folder
    folder = chat_folder(tmp_path / "other", pad_token="<|endoftext|>")
    assert opened(rows, tokenizer_folder=folder).folder != second.folder


def test_a_damaged_store_is_built_again(opened, rows):
    store = opened(rows)
    (store.folder / "tokens.bin").write_bytes(b"half")
    assert len(opened(rows).training[3].inputs) == store.lengths[3]


def test_of_many_examples_the_epoch_is_found_once_and_is_what_few_would_have(opened, rows, monkeypatch, tmp_path):
    other = {"validation_share": 0.3, "seed": 9, "weights": [2.0]}
    found = [opened(rows), opened(rows, **other)]
    monkeypatch.setattr(epoch, "SORTED_MOST", 10)
    first = [opened(rows), opened(rows, **other)]
    monkeypatch.setattr(epoch, "_find", None)        # it is not found again
    for few, many, again in zip(found, first, [opened(rows), opened(rows, **other)], strict=True):
        for name, value in vars(few.epoch).items():
            np.testing.assert_array_equal(getattr(many.epoch, name), value)
            np.testing.assert_array_equal(getattr(again.epoch, name), value)
        assert texts(few, few.training[:5]) == texts(again, again.training[:5])
    assert len(found[0].training) != len(found[1].training)
    (next(tmp_path.rglob("epochs/*/training.bin"))).write_bytes(b"half")
    with pytest.raises(TypeError, match="NoneType"):         # damaged, it would be found again
        opened(rows), opened(rows, **other)


def test_an_epoch_that_cannot_be_kept_is_found_at_each_start(opened, rows, monkeypatch):
    known = opened(rows)
    monkeypatch.setattr(epoch, "SORTED_MOST", 10)
    (known.folder.parent.parent / "epochs").write_text("no folder")
    assert opened(rows).epoch.training.tolist() == known.epoch.training.tolist()


def test_a_folder_appears_only_when_it_is_whole(opened, rows, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt
    with monkeypatch.context() as patched:
        patched.setattr(making, "write_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            opened(rows)
    assert not list((Path(opened(rows).folder).parent).glob(".building*"))


def test_no_prompt_is_on_both_sides_and_the_share_is_met(opened, tmp_path):
    repeated = [{"question": f"what is {number % 30} ?", "answer": f"it is {number}"} for number in range(100)]
    store = opened(json_lines(tmp_path / "repeated.jsonl", repeated), validation_share=0.2)
    held = store.column("prompt")[store.in_validation]
    assert not set(held.tolist()) & set(store.column("prompt")[~store.in_validation].tolist())
    assert abs(len(store.validation) - 20) <= 1
    assert len(store.training) + len(store.validation) == 100
    other = opened(tmp_path / "repeated.jsonl", validation_share=0.2, seed=4)
    assert (other.in_validation != store.in_validation).any()


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5, 0.9])
def test_a_share_of_distinct_prompts_is_met_to_the_example(share):
    prompts = np.arange(123, dtype=np.uint64)
    assert held_out(prompts, share, 1).sum() == pytest.approx(share * 123, abs=0.5)


def test_nothing_more_is_looked_at_where_no_prompt_is_small_enough(monkeypatch):
    drawn, find = [], order.in_seeded_order
    monkeypatch.setattr(order, "in_seeded_order", lambda *given: (drawn.append(unit) or unit for unit in find(*given)))
    assert held_out(np.arange(1000, dtype=np.uint64).repeat(2), 0.0505, 1).sum() == 100
    assert len(drawn) < 100


@pytest.mark.parametrize("different", [400, 10**9])
def test_the_split_is_that_of_all_prompts_at_once_and_takes_little_memory(different, monkeypatch):
    monkeypatch.setattr(sides, "AT_ONCE", 1000)
    monkeypatch.setattr(order, "DRAWN_AT_ONCE", 1000)
    prompts = np.random.default_rng(0).integers(0, different, 20_000).astype(np.uint64)
    distinct, group, counts = np.unique(prompts, return_inverse=True, return_counts=True)
    missing, drawn = 0.1 * len(prompts), np.zeros(len(distinct), np.bool_)
    for unit in order.seeded_order(1, order.SPLIT_STREAM, len(distinct)).tolist():
        if missing >= 0.5 and counts[unit] < 2 * missing:
            drawn[unit] = True
            missing -= counts[unit]
    tracemalloc.start()
    found = held_out(prompts, 0.1, 1)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tolist() == drawn[group].tolist()
    assert taken < 30 * len(prompts) + 200_000


def test_at_least_one_prompt_is_on_each_side_and_a_single_one_cannot_be_split():
    assert held_out(np.array([1, 2], np.uint64), 0.01, 1).sum() == 1
    assert held_out(np.array([1, 2], np.uint64), 0.99, 1).sum() == 1
    with pytest.raises(WrongUse, match="same prompt"):
        held_out(np.array([1, 1], np.uint64), 0.5, 1)


def test_weights_repeat_and_thin_out_without_copies(opened, rows, tmp_path):
    other = json_lines(tmp_path / "other.jsonl", [{"question": "x" * number, "answer": "yes"} for number in range(1, 11)])
    store = opened(rows, other, weights=[0.5, 2.5])
    indices = store.epoch.training
    assert len(store.lengths) == 50
    assert np.bincount(np.bincount(indices[indices < 40], minlength=40)).tolist() == [20, 20]
    assert sorted(np.bincount(indices[indices >= 40] - 40, minlength=10).tolist()) == [2] * 5 + [3] * 5
    assert store.training[len(store.training) - 1].inputs.tolist() == store.example(int(indices[-1])).inputs.tolist()
    assert store.origins(40) == f"{other}:1"
    assert weighted([np.arange(10)], [0.5], 1).tolist() != weighted([np.arange(10)], [0.5], 2).tolist()


def test_one_weight_for_two_sources_is_refused(opened, rows):
    with pytest.raises(WrongUse, match=r"data.weights has 1 numbers for 2 sources"):
        opened(rows, rows, weights=[1.0])


def test_a_validation_source_is_held_out_whole(opened, rows, tmp_path):
    other = json_lines(tmp_path / "held.jsonl", [{"messages": [{"role": "user", "content": "hello"},
                                                               {"role": "assistant", "content": "yes"}]}])
    store = opened(rows, validation_source=str(other), validation_share=0.5)
    assert (len(store.training), len(store.validation)) == (40, 1)
    assert texts(store, store.validation)[0].startswith("<|im_start|>user\nhello")


def test_sources_of_two_kinds_do_not_mix(opened, rows, tmp_path):
    (tmp_path / "text.txt").write_text("hello world")
    with pytest.raises(WrongUse, match=r"a conversation per row and .*text.txt a text"):
        opened(rows, tmp_path / "text.txt")


def test_bad_and_untrained_rows_are_left_out_counted_and_named(opened, tmp_path):
    path = json_lines(tmp_path / "bad.jsonl",
                      [ROWS[0], "{nonsense", {"question": "x"}, ROWS[1], {"question": "", "answer": "y"}])
    store = opened(path)
    assert [(problem.kind, problem.origin) for problem in store.problems] == [("bad", f"{path}:{line}") for line in (2, 3, 5)]
    assert (store.counts["rows"], store.counts["bad"], len(store.training)) == (5, 3, 2)
    assert any("3 of 5 rows are bad" in sentence for sentence in store.said)
    assert store.origins(1) == f"{path}:4"


def test_many_examples_that_are_too_long_need_a_choice(opened, rows, tmp_path, no_building):
    with pytest.raises(WrongUse, match=r"(?s)\d+ of 40 examples .* longer than data.max_length=20 .*long_examples=cut loses "
                                       r"\d+ tokens.*long_examples=drop"):
        opened(rows, max_length=20)
    no_building()
    cut = opened(rows, max_length=20, long_examples="cut")        # what was built is used
    assert max(cut.lengths) == 20
    assert cut.counts["cut"] == cut.counts["too_long"] > 4
    lost = sum(len(cut.tokenizer.encode(row["answer"])) + 1 for row in ROWS) - int(cut.trained.sum())
    assert cut.counts["tokens_lost"] == lost


def test_prompts_that_leave_no_room_for_an_answer_are_refused_with_both_cures(opened, rows):
    with pytest.raises(WrongUse, match=r"nothing trained is left; raise data.max_length; if the model cannot read longer"):
        opened(rows, max_length=4)


def test_few_examples_that_are_too_long_are_cut_or_dropped(opened, tmp_path):
    path = json_lines(tmp_path / "few.jsonl", [*ROWS[:20], {"question": "hello", "answer": "cat " * 500}])
    cut, dropped = opened(path), opened(path, long_examples="drop")
    assert (cut.counts["cut"], len(cut.training)) == (1, 21)
    assert (dropped.counts["dropped"], len(dropped.training)) == (1, 20)


def test_all_labels_masked_is_refused_with_the_cure(opened, tmp_path):
    silent = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}{% generation %}{% endgeneration %}"
    folder = chat_folder(tmp_path / "silent", silent)
    path = json_lines(tmp_path / "rows.jsonl", ROWS[:3])
    with pytest.raises(WrongUse, match=r"all labels are masked: .*rows.jsonl:1.*data.train_on=all"):
        opened(path, tokenizer_folder=folder)


def test_rows_that_are_all_refused_by_the_template_are_refused_with_its_reason(opened, tmp_path, rows):
    folder = chat_folder(tmp_path / "never", "{{ raise_exception('never') }}")
    with pytest.raises(WrongUse, match=r"all 40 rows .* are bad.*never"):
        opened(rows, tokenizer_folder=folder)


def test_prompts_and_completions_that_are_texts_get_no_template(opened, tmp_path):
    path = json_lines(tmp_path / "strings.jsonl", [{"prompt": "2 + 2 =", "completion": " 4"}])
    store = opened(path)
    assert store.template.name == "raw"
    assert store.tokenizer.decode(store.training[0].inputs) == "2 + 2 = 4"
    turns = [{"prompt": [{"role": "user", "content": "2 + 2"}], "completion": [{"role": "assistant", "content": "4"}]}]
    assert opened(json_lines(tmp_path / "turns.jsonl", turns)).template.name == "the tokenizer's"


def test_long_texts_lose_nothing_and_stay_on_one_side(opened, tmp_path):
    path = json_lines(tmp_path / "texts.jsonl", [{"text": f"the cat {number} " * 40} for number in range(10)])
    store = opened(path, max_length=16, validation_share=0.3)
    assert store.kind == "text"
    assert store.template is None
    sides = {}
    for index, row in enumerate(store.rows().tolist()):
        sides.setdefault(row, set()).add(bool(store.in_validation[index]))
    assert len(sides) == 10
    assert all(len(side) == 1 for side in sides.values())
    whole = store.tokenizer.encode("the cat 0 " * 40).tolist()
    pieces = [store.example(index) for index, row in enumerate(store.rows().tolist()) if row == 0]
    assert [token for piece in pieces for token in piece.targets.tolist()] == [*whole[1:], store.tokenizer.end_of_text]


def test_a_pair_starts_its_decoder_and_reads_its_source(opened, tmp_path):
    folder = seq2seq_folder(tmp_path / "t5")
    path = json_lines(tmp_path / "pairs.jsonl", [{"document": "hello world", "summary": "hello"}] * 2 + [
        {"document": "the cat", "summary": "cat"}])
    store = opened(path, tokenizer_folder=folder, task="seq2seq", decoder_start=0)
    theirs = AutoTokenizer.from_pretrained(folder)
    example = store.training[0]
    assert example.source.tolist() == theirs("hello world")["input_ids"]
    assert example.targets.tolist() == theirs("hello")["input_ids"]
    assert example.inputs.tolist() == [0, *theirs("hello")["input_ids"][:-1]]
    assert store.lengths[0] == example.tokens
    assert store.training[2].source.tolist() == theirs("the cat")["input_ids"]


def test_a_span_has_the_places_of_its_answer_and_segments(opened, tmp_path):
    row = {"question": "what ?", "context": "paris is the capital", "answers": {"text": ["capital"], "answer_start": [13]}}
    path = json_lines(tmp_path / "spans.jsonl", [row, row])
    store = opened(path, tokenizer_folder=span_folder(tmp_path / "bert"), task="span")
    example = store.training[1]
    first, last = example.targets.tolist()
    assert first == last
    assert store.tokenizer.decode(example.inputs[first:last + 1]) == "capital"
    assert example.segments.tolist() == [0] * 4 + [1] * (len(example.inputs) - 4)
    assert (store.trained[1], store.lengths[1]) == (2, len(example.inputs))


def test_the_saved_tokenizer_carries_the_template_that_was_trained(opened, rows, tmp_path, chat):
    for wanted in (None, "plain"):
        store = opened(rows, chat_template=wanted)
        store.tokenizer.save(tmp_path / str(wanted))
        theirs = AutoTokenizer.from_pretrained(tmp_path / str(wanted))
        ids = theirs.apply_chat_template([{"role": "user", "content": ROWS[2]["question"]},
                                          {"role": "assistant", "content": ROWS[2]["answer"]}])["input_ids"]
        example = store.training[2]
        assert [*example.inputs.tolist(), example.targets[-1]] == ids[:len(example.inputs) + 1]
        assert store.as_prompt("hi") == theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False,
                                                                   add_generation_prompt=True)
    assert (tmp_path / "None" / "chat_template.jinja").read_text() == (chat / "chat_template.jinja").read_text()


def test_a_template_whose_turns_end_otherwise_than_the_tokenizer_says_is_pointed_out(opened, rows, tmp_path):
    folder = chat_folder(tmp_path / "base", eos_token="<|endoftext|>")
    said = opened(rows, tokenizer_folder=folder).said
    assert any("ends a turn with <|im_end|>" in sentence and "data.end_token=<|im_end|>" in sentence for sentence in said)
    assert not any("warning" in sentence for sentence in opened(rows).said)


def test_progress_is_said_now_and_then(opened, rows, monkeypatch):
    from powertrain.data.examples import part as writer
    monkeypatch.setattr(writer, "SAY_EVERY_S", 0.0)
    monkeypatch.setattr(writer, "BATCH_ROWS", 10)
    heard = []
    opened(rows, tell=heard.append)
    assert heard[0].sentence == f"tokenising {rows}"
    assert any("rows tokenised" in phase.sentence and "rows/s" in phase.sentence and phase.rows for phase in heard)


def test_batches_do_not_change_what_is_stored(opened, rows, monkeypatch, tmp_path):
    from powertrain.data.examples import part as writer
    whole = opened(rows)
    monkeypatch.setattr(writer, "BATCH_ROWS", 3)
    parts = opened(rows, cache=tmp_path / "other")
    for name in ("examples.bin", "tokens.bin", "trained.bin"):
        assert (whole.folder / name).read_bytes() == (parts.folder / name).read_bytes()


PREPARE = """
import re, sys
from pathlib import Path
from powertrain.data.examples import part as writer
from powertrain.data.examples.store import open_examples
from powertrain.recipe import DataRecipe
writer.BATCH_CHARS = 50_000
store = open_examples(DataRecipe(source=sys.argv[1], max_length=2048, validation_share=0.05), seed=1,
                      tokenizer_folder=Path(sys.argv[2]), cache=Path(sys.argv[3]))
order = range(0, len(store.training), 7)
assert sum(store.training[i].tokens for i in order) > 0
assert "torch" not in sys.modules
# not ru_maxrss, which begins with what the parent process held when it forked
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak of a process's memory is read from Linux")
def test_memory_does_not_grow_with_the_data_and_torch_is_not_loaded(tmp_path, chat):
    used = []
    for copies in (1, 8):
        path = tmp_path / f"{copies}.jsonl"
        json_lines(path, [{"question": f"what is {number} ? " + "hello world " * 40, "answer": "the cat sat " * 40}
                          for number in range(400 * copies)])
        words = [sys.executable, "-c", PREPARE, str(path), str(chat), str(tmp_path / "cache")]
        used.append(int(subprocess.run(words, capture_output=True, text=True, check=True).stdout))
    # MiB; small batches, so that what is held of all rows shows: their ids and texts alone would be 9
    assert used[1] < used[0] + 6


def test_reading_starts_nowhere_but_at_the_examples_asked_for(opened, rows):
    store = opened(rows)
    order = epoch_order(1, 0, len(store.training))
    assert sorted(texts(store, [store.training[int(i)] for i in order])) == sorted(texts(store, store.training))


def test_a_large_file_is_known_by_length_time_and_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "READ_WHOLE_BYTES", 10_000)
    monkeypatch.setattr(folders, "SAMPLE_BYTES", 100)
    path = tmp_path / "large.jsonl"
    path.write_bytes(b"x" * 50_000)
    stamp = path.stat()

    def digest(content, time_ns=stamp.st_mtime_ns):
        path.write_bytes(content)
        os.utime(path, ns=(time_ns, time_ns))
        return folders.digests_of([path])[0]

    first = digest(b"x" * 50_000)
    assert digest(b"x" * 50_000) == first
    changed = [digest(b"x" * 50_001), digest(b"x" * 49_999 + b"y"), digest(b"y" + b"x" * 49_999),
               digest(b"x" * 50_000, stamp.st_mtime_ns + 1)]
    assert len({first, *changed}) == 5
    many = [json_lines(tmp_path / f"{number}.jsonl", [{"text": "x" * 200}]) for number in range(60)]     # together as large
    before = folders.digests_of(many)
    os.utime(many[7], ns=(1, 1))
    pairs = zip(before, folders.digests_of(many), strict=True)
    assert [number for number, (one, other) in enumerate(pairs) if one != other] == [7]
