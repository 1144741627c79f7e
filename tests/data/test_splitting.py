import itertools
import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from powertrain.data.documents import Document, Texts
from powertrain.data.order import epoch_order
from powertrain.data.splitting import ENOUGH_DOCUMENTS, line_cuts, runs_of
from powertrain.data.splitting import split_documents as split_measured
from powertrain.records import WrongUse

REAL_SHAKESPEARE = Path("/work/shared/data/tinyshakespeare.txt")


class Side(NamedTuple):
    train: list[Document]
    validation: list[Document]


class Given(Texts):
    """Texts that are there already, in pieces as large as asked."""

    def __init__(self, documents: list[Document]):
        super().__init__("given", Path())
        object.__setattr__(self, "documents", documents)

    def __iter__(self):
        return iter(self.documents)


def split_documents(documents: list[Document], share: float, kind: str, seed: int) -> Side:
    """Return the documents of both sides, one for each run of text."""
    texts, found, text = Given(documents), Side([], []), ""
    split = split_measured(texts, texts.measured(), share, kind, seed)
    origins = (document.origin for number, document in enumerate(documents) for _ in split.runs(number))
    for validates, piece, is_last in runs_of(texts, split):
        text += piece
        if is_last:
            found[validates].append(Document(text, next(origins)))
            text = ""
    assert not text
    return found


def documents(*contents: str) -> list[Document]:
    return [Document(content, str(number)) for number, content in enumerate(contents)]


def many(count: int, length: int = 50) -> list[Document]:
    return documents(*(f"{number:03d}" + "x" * (length - 3) for number in range(count)))


def characters(side) -> int:
    return sum(len(document.text) for document in side)


LINES = "".join(f"line {number} of the text\n" for number in range(2000))


# -------------------------------------------------------------------------------- seeded, whole documents


@pytest.mark.parametrize("count", [ENOUGH_DOCUMENTS, 21, 123, 1000])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.5, 0.9])
def test_whole_documents_are_drawn_to_the_share(count, share):
    source = many(count)
    split = split_documents(source, share, "seeded", 42)
    assert sorted(split.train + split.validation, key=lambda document: document.text) == source
    assert abs(characters(split.validation) / characters(source) - share) <= 0.5 / count + 1e-9


def test_both_sides_keep_the_order_of_the_source():
    split = split_documents(many(123), 0.3, "seeded", 42)
    for side in (split.train, split.validation):
        assert [document.text for document in side] == sorted(document.text for document in side)


def test_identical_documents_are_on_the_same_side():
    source = [document for document in many(30) for _ in range(3)]
    split = split_documents(source, 0.3, "seeded", 42)
    sides = {document.text for document in split.train}, {document.text for document in split.validation}
    assert not sides[0] & sides[1]
    assert set(Counter(document.text for document in split.train + split.validation).values()) == {3}


def test_copies_count_towards_the_share():
    source = [document for document in many(40) for _ in range(1 + 9 * (int(document.text[:3]) < 20))]
    for seed in range(5):
        validation = split_documents(source, 0.25, "seeded", seed).validation
        assert abs(characters(validation) / characters(source) - 0.25) <= 0.03


def test_the_draw_is_not_the_order_of_an_epoch():
    split = split_documents(many(123), 0.1, "seeded", 42)
    first = {many(123)[number] for number in epoch_order(42, 0, 123)[:len(split.validation)]}
    assert first != set(split.validation)


def test_the_seed_decides_and_nothing_else():
    draws = [split_documents(many(123), 0.1, "seeded", seed).validation for seed in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_a_document_far_longer_than_the_share_is_not_held_out():
    source = [*many(40), Document("y" * 20_000, "long")]
    for seed in range(10):
        validation = split_documents(source, 0.05, "seeded", seed).validation
        assert 0 < characters(validation) < 0.1 * characters(source)


def test_a_share_smaller_than_any_document_holds_out_the_shortest():
    source = [*many(ENOUGH_DOCUMENTS), Document("short", "short")]
    assert split_documents(source, 1e-6, "seeded", 42).validation == [Document("short", "short")]


# -------------------------------------------------------------------------------- seeded, spans of text


def test_one_text_is_cut_at_line_ends_in_about_a_hundred_spans():
    split = split_documents(documents(LINES), 0.1, "seeded", 42)
    assert abs(characters(split.validation) / len(LINES) - 0.1) < 0.01
    assert all(document.text.endswith("\n") for document in split.train + split.validation)
    assert 2 <= len(split.validation) <= 12  # about 10 spans, of which neighbours are one run


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(st.text(st.sampled_from("ab\n"), min_size=3, max_size=400),
                         min_size=1, max_size=5, unique=True),
       share=st.sampled_from([0.01, 0.1, 0.5]), seed=st.integers(0, 2**63 - 1))
def test_runs_of_a_cut_text_are_all_of_it_and_overlap_nowhere(contents, share, seed):
    assume(not "".join(contents).isspace())
    split = split_documents(documents(*contents), share, "seeded", seed)
    for number, content in enumerate(contents):
        runs = {side: [run.text for run in getattr(split, side) if run.origin == str(number)]
                for side in ("train", "validation")}
        assert interleaves(content, runs["train"], runs["validation"])


def interleaves(content: str, one: list[str], other: list[str]) -> bool:
    """Whether `content` is the runs of both sides taken in turn."""
    if not content:
        return not one and not other
    return any(first and content.startswith(first[0]) and interleaves(content[len(first[0]):], second, first[1:])
               for first, second in ((one, other), (other, one)))


def test_a_text_without_line_ends_is_cut_all_the_same():
    split = split_documents(documents("x" * 1234), 0.1, "seeded", 42)
    assert 110 <= characters(split.validation) <= 135
    assert characters(split.train) + characters(split.validation) == 1234


@given(text=st.text(st.sampled_from("ab\n"), max_size=200), span=st.integers(1, 50), size=st.integers(1, 60))
def test_the_pieces_in_which_a_text_comes_do_not_move_its_cuts(text, span, size):
    pieces = [text[at:at + size] for at in range(0, len(text), size)]
    found = [cut for cut in line_cuts(pieces, span) if cut < len(text)]
    assert found == [cut for cut in line_cuts([text], span) if cut < len(text)]
    for cut, after in itertools.pairwise([*found, len(text)]):
        assert text[cut - 1] == "\n" or "\n" not in text[max(0, cut - 1):min(cut + span, len(text))] or cut >= after


def test_a_document_that_changes_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    for changed in (LINES + "more", LINES[:-9]):
        path.write_text(LINES)
        texts = Texts(str(path), tmp_path)
        split = split_measured(texts, texts.measured(), 0.1, "seeded", 42)
        path.write_text(changed)
        with pytest.raises(WrongUse, match="changed while it was read"):
            list(runs_of(texts, split))


@pytest.mark.parametrize(("share", "kind"), [(0, "seeded"), (0.1, "seeded"), (0.1, "tail")])
def test_documents_that_come_or_go_while_they_are_read_are_refused(tmp_path, share, kind):
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": f"row {number} of the text"}) + "\n" for number in range(31)]
    for changed in (rows, rows[:12]):
        path.write_text("".join(rows[:30]))
        texts = Texts(str(path), tmp_path)
        split = split_measured(texts, texts.measured(), share, kind, 42)
        path.write_text("".join(changed))
        with pytest.raises(WrongUse, match="changed while it was read"):
            list(runs_of(texts, split))


def test_copies_of_a_few_texts_are_cut_and_drawn_alike():
    split = split_documents(documents(LINES, LINES, LINES), 0.1, "seeded", 42)
    runs = Counter(document.text for document in split.validation)
    assert set(runs.values()) == {3}
    assert not set(runs) & {document.text for document in split.train}


# -------------------------------------------------------------------------------- tail, nothing, and refusals


def test_the_tail_is_the_end_of_the_text_and_cuts_the_document_at_the_border():
    split = split_documents(documents("abcde", "fghij", "klmno"), 0.5, "tail", 0)
    assert split.train == [Document("abcde", "0"), Document("fg", "1")]
    assert split.validation == [Document("hij", "1"), Document("klmno", "2")]


@pytest.mark.parametrize("length", [2, 3, 10, 123, 1001])
def test_the_tail_is_cut_where_nanogpt_cuts(length):
    text = "".join(chr(97 + i % 26) for i in range(length))
    split = split_documents(documents(text), 0.1, "tail", 0)
    assert split.train[0].text == text[:int(length * 0.9)]
    assert split.validation[0].text == text[int(length * 0.9):]


@pytest.mark.skipif(not REAL_SHAKESPEARE.exists(), reason="the real text is not on this machine")
def test_shakespeare_is_split_as_in_nanogpt():
    split = split_documents(documents(REAL_SHAKESPEARE.read_text(encoding="utf-8")), 0.1, "tail", 0)
    assert (characters(split.train), characters(split.validation)) == (1_003_854, 111_540)


@pytest.mark.parametrize("kind", ["seeded", "tail"])
def test_share_zero_holds_out_nothing(kind):
    split = split_documents(documents("a", "b"), 0, kind, 42)
    assert (split.train, split.validation) == (documents("a", "b"), [])


@pytest.mark.parametrize(("kind", "side"), [("seeded", "training"), ("tail", "training")])
def test_a_text_too_short_to_split_is_refused(kind, side):
    with pytest.raises(WrongUse, match=f"data.validation_share=0.1 of 1 characters leaves no {side} text; "
                                       "give more text, or set data.validation_share=0"):
        split_documents(documents("a"), 0.1, kind, 42)


@pytest.mark.parametrize("share", [-0.1, 1.0, 10])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(WrongUse, match=f"data.validation_share={share:g} is not a share"):
        split_documents(documents("abc"), share, "tail", 42)


def test_a_text_that_is_gone_before_it_is_cut_is_refused():
    texts = Given(documents(LINES))
    measured = texts.measured()
    with pytest.raises(WrongUse, match="the text changed while it was read"):
        split_measured(Given([]), measured, 0.1, "seeded", 42)
