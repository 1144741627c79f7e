"""Metrics against values worked out by hand from their definitions."""

from __future__ import annotations

from decimal import Decimal

import pytest

from powertrain.use.metrics import (
    exact_match,
    final_number,
    mean,
    normalise,
    number_match,
    rouge_l,
    rouge_n,
    score,
    token_f1,
)


@pytest.mark.parametrize(("text", "normal"), [
    ("The  Eiffel Tower.", "eiffel tower"), ("an apple, a pear", "apple pear"), ("theatre", "theatre"),
    ("U.S.A.", "usa"), ("A", ""), ("", ""), ("Zürich!", "zürich"),
])
def test_answers_are_normalised_as_squad_does(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(("answer", "references", "exact", "f1"), [
    ("the Eiffel Tower!", ["Eiffel tower"], 1, 1),
    ("Eiffel", ["Eiffel Tower"], 0, 2 / 3),                    # precision 1, recall 1/2
    ("in the city of Paris", ["Paris"], 0, 2 / 5),             # in city of paris: precision 1/4, recall 1
    ("Paris", ["London", "Paris, France", "paris"], 1, 1),     # the best reference counts
    ("blue blue", ["blue"], 0, 2 / 3),                         # one "blue" is shared, not two
    ("London", ["Paris"], 0, 0),
    ("", [], 1, 1), ("Paris", [], 0, 0),                       # a question without an answer
    ("the", ["a"], 1, 1),                                      # nothing is left of either
])
def test_exact_match_and_f1_are_different_measures(answer: str, references: list[str], exact: float, f1: float) -> None:
    assert exact_match(answer, references) == exact
    assert token_f1(answer, references) == pytest.approx(f1)


@pytest.mark.parametrize(("answer", "reference", "one", "two", "longest"), [
    # shared words: the cat on the mat (5 of 6 each); pairs: the-cat on-the the-mat (3 of 5); subsequence: the cat on the mat
    ("the cat sat on the mat", "the cat is on the mat", 5 / 6, 3 / 5, 5 / 6),
    # Lin 2004, section 3: "police killed the gunman" against "police kill the gunman" and "the gunman kill police"
    ("police kill the gunman", "police killed the gunman", 3 / 4, 1 / 3, 3 / 4),
    ("the gunman kill police", "police killed the gunman", 3 / 4, 1 / 3, 2 / 4),
    ("one two", "one two three four", 2 * 2 / 6, 2 * 1 / 4, 2 * 2 / 6),
    ("one", "one", 1, 0, 1),                                   # no pairs on either side: nothing to agree on
    ("", "one two", 0, 0, 0), ("one", "", 0, 0, 0), ("", "", 0, 0, 0),
    ("Don't stop_now", "don t stop now", 1, 1, 1),             # as rouge_score parts words
    ("für Äpfel", "für äpfel", 1, 1, 1),                       # other alphabets keep their letters
    ("a a a b", "a b", 2 * 2 / 6, 2 * 1 / 4, 2 * 2 / 6),       # shared: one a, one b
])
def test_rouge_is_an_f_measure(answer: str, reference: str, one: float, two: float, longest: float) -> None:
    assert rouge_n(answer, [reference], 1) == pytest.approx(one)
    assert rouge_n(answer, [reference], 2) == pytest.approx(two)
    assert rouge_l(answer, [reference]) == pytest.approx(longest)
    assert rouge_n(answer, ["nothing alike", reference], 1) == pytest.approx(one)


@pytest.mark.parametrize(("text", "number"), [
    ("6 * 7 = 42\n#### 42", "42"), ("2 + 2 = 5\n#### 4", "4"), ("#### 4\nand 9 more", "4"),
    ("#### 1,234", "1234"), ("#### -7", "-7"), ("####42", "42"), ("####\n 42", "42"), ("#### $1,200.50", "1200.5"),
    ("#### 5 + 3 = 8\nQuestion: 2 apples and 9 pears\n#### 11", "8"),     # it did not stop; the first answer counts
    ("#### unknown, but 3 remain", "3"), ("He has 4.\n#### none", "4"),
    ("The answer is 18.", "18"), ("so $18", "18"), ("it costs $1,234,567.", "1234567"), ("about 3.50 dollars", "3.5"),
    ("12 of them, 25%", "25"), (".5 of it", "0.5"), ("that leaves -3", "-3"), ("that leaves \u22123", "-3"), ("-$5", "-5"),
    ("7-5", "5"), ("10 - 4 = 6", "6"), ("(2)-3", "3"), ("pick 3,4", "4"), ("in 1999, 2000", "2000"),
    ("1,0000", "0000"), ("40 kg of CO2", "40"), ("3 kids, 42km", "42"), ("x = 3.14.", "3.14"),
])
def test_the_final_number_is_found(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "no number", "####", "CO2"])
def test_no_number_is_no_answer(text: str) -> None:
    assert final_number(text) is None
    assert number_match(text, [text]) == 0                     # and equals none, not even another one that is missing


def test_numbers_are_compared_as_numbers() -> None:
    assert number_match("It is $1,000.00", ["#### 1000"]) == 1
    assert number_match("It is 50%", ["#### 50"]) == 1
    assert number_match("#### 50.5", ["#### 50"]) == 0
    assert number_match("#### 5", ["#### 4", "#### 5"]) == 1


def test_means_are_over_examples() -> None:
    means = mean([score("f1", "Paris", ["Paris"]), score("f1", "Eiffel", ["Eiffel Tower"])])
    assert means == {"exact_match": 0.5, "f1": pytest.approx((1 + 2 / 3) / 2)}
    assert set(score("rouge", "a", ["b"])) == {"rouge1", "rouge2", "rougeL"}
    assert mean([score("gsm8k", "#### 1", ["#### 1"]), score("gsm8k", "2", ["#### 3"])]) == {"accuracy": 0.5}
