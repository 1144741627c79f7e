"""How good written answers are: exact match and F1, ROUGE, and the number at the end of a calculation.

Every score is a share, 0..1, of one answer against its references, of which the best counts. No torch.

Sources: exact match and F1 as in SQuAD's evaluation (Rajpurkar et al. 2016); ROUGE as in Lin 2004, F-measure with
beta = 1; final numbers as in GSM8K (Cobbe et al. 2021), whose solutions end in `#### 42`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

Scores = dict[str, float]                    # name of a figure -> share

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
WORD = re.compile(r"[^\W_]+")                # letters and digits of any script; for ASCII the same as [a-z0-9]+

# A sign counts where no word, number or bracket stands before it: 7-5 is no -5. Commas belong to a number only where they
# part thousands: "1,000" is one number and "3,4" are two. A letter before it makes it part of a name: CO2.
NUMBER = re.compile(r"(?P<sign>(?<![\w).])[-\u2212])?\s?[$€£]?\s?(?<![A-Za-z_])"
                    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)")
ANSWER_MARK = "####"


def normalise(answer: str) -> str:
    """Lower case, without punctuation, articles and extra white space."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the normalised answer is one of the normalised references, else 0. No reference: "" is expected."""
    return float(normalise(answer) in {normalise(reference) for reference in references or ("",)})


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over normalised words, each counted as often as it occurs in both."""
    return max(_f1(normalise(answer).split(), normalise(reference).split()) for reference in references or ("",))


def rouge_n(answer: str, references: Sequence[str], order: int) -> float:
    """F-measure over runs of `order` words."""
    written = _runs(answer, order)
    return max(_f1(written, _runs(reference, order), empty=0.0) for reference in references or ("",))


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """F-measure over the longest common subsequence of words."""
    return max(_f_measure(_common_subsequence(words(answer), words(reference)), len(words(answer)), len(words(reference)))
               for reference in references or ("",))


def words(text: str) -> list[str]:
    """What ROUGE counts: lower-case runs of letters and digits. Not stemmed."""
    return WORD.findall(text.lower())


def final_number(text: str) -> Decimal | None:
    """The answer of a calculation: the last number on the line after the first `####`, or else the last number.

    Currency, percent signs and commas between thousands do not count: $1,200.50 is 1200.5 and 5% is 5. What follows the
    marked line is no part of the answer: a model that does not stop goes on with another question.
    """
    _, marked, after = text.partition(ANSWER_MARK)
    lines = after.strip().splitlines()
    if marked and lines and (numbers := _numbers(lines[0])):
        return numbers[-1]
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def number_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer's final number is that of a reference, else 0. No number matches nothing."""
    found = final_number(answer)
    return float(found is not None and any(final_number(reference) == found for reference in references))


@dataclass(frozen=True)
class Metric:
    """What `--metric` names: the figures that one answer gets."""

    name: str
    figures: Mapping[str, Callable[[str, Sequence[str]], float]]

    def score(self, answer: str, references: Sequence[str]) -> Scores:
        return {name: figure(answer, references) for name, figure in self.figures.items()}

    def mean(self, answers: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
        """The mean of each figure over answers and their references, of which there must be at least one."""
        each = [self.score(answer, expected) for answer, expected in zip(answers, references, strict=True)]
        assert each, "a mean needs an answer"
        return {name: sum(scores[name] for scores in each) / len(each) for name in self.figures}


METRICS: dict[str, Metric] = {metric.name: metric for metric in (
    Metric("exact", {"exact_match": exact_match}),
    Metric("f1", {"exact_match": exact_match, "f1": token_f1}),
    Metric("rouge", {"rouge1": lambda answer, references: rouge_n(answer, references, 1),
                     "rouge2": lambda answer, references: rouge_n(answer, references, 2), "rougeL": rouge_l}),
    Metric("gsm8k", {"accuracy": number_match}))}


def _f1(written: Sequence[object], expected: Sequence[object], *, empty: float = 1.0) -> float:
    """Over items counted as often as they occur; `empty` where neither side has any."""
    if not written and not expected:
        return empty
    return _f_measure(sum((Counter(written) & Counter(expected)).values()), len(written), len(expected))


def _f_measure(shared: int, written: int, expected: int) -> float:
    return 2 * shared / (written + expected) if shared else 0.0


def _runs(text: str, order: int) -> list[tuple[str, ...]]:
    found = words(text)
    return [tuple(found[start:start + order]) for start in range(len(found) - order + 1)]


def _common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """The length of the longest sequence of words that both have in this order; time len(left) x len(right)."""
    row = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for place, other in enumerate(right, start=1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return row[-1]


def _numbers(text: str) -> list[Decimal]:
    found = []
    for match in NUMBER.finditer(text):
        number = Decimal(match["digits"].replace(",", ""))
        found.append(-number if match["sign"] else number)
    return found
