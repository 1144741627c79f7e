"""Metrics of written answers: exact match and F1, ROUGE, and the number at the end of a calculation.

Every score is a share, 0..1, of one answer against its references; the best reference counts. Loads no torch.

Sources: exact match and F1 as in SQuAD's evaluation (Rajpurkar et al. 2016); ROUGE as in Lin 2004, F-measure with
beta = 1; final numbers as in GSM8K (Cobbe et al. 2021), whose solutions end in `#### 42`.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from statistics import fmean

from powertrain.records import WrongUse

Scores = dict[str, float]                    # name of a figure -> share
Figure = Callable[[str, Sequence[str]], float]       # (answer, references) -> share

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
WORD = re.compile(r"[^\W_]+")                # letters and digits of any script; for ASCII the same as [a-z0-9]+

# A sign counts where no word, number or bracket stands before it: 7-5 is no -5. Commas belong to a number only where they
# part thousands: "1,000" is one number and "3,4" are two. A letter before it makes it part of a name: CO2.
NUMBER = re.compile(r"(?P<sign>(?<![\w).])[-\u2212])?\s?[$€£]?\s?(?<![A-Za-z_])"
                    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)")
ANSWER_MARK = "####"


def normalise(answer: str) -> str:
    """Return the answer in lower case, without punctuation, articles and extra white space."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the normalised answer is one of the normalised references, else 0. No reference: "" is expected."""
    return float(normalise(answer) in {normalise(reference) for reference in references or ("",)})


def token_f1(answer: str, references: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over normalised words, each counted as often as in both."""
    return max(_f1(normalise(answer).split(), normalise(reference).split()) for reference in references or ("",))


def rouge_n(answer: str, references: Sequence[str], order: int) -> float:
    """Return the F-measure over runs of `order` words."""
    written = _runs(answer, order)
    return max(_f1(written, _runs(reference, order), empty=0.0) for reference in references or ("",))


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """Return the F-measure over the longest common subsequence of words."""
    return max(_f_measure(_common_subsequence(words(answer), words(reference)), len(words(answer)), len(words(reference)))
               for reference in references or ("",))


def words(text: str) -> list[str]:
    """Return the words that ROUGE counts: lower-case runs of letters and digits, not stemmed."""
    return WORD.findall(text.lower())


def final_number(text: str) -> Decimal | None:
    """Return the answer of a calculation: the last number on the line after the first `####`, or else the last number.

    Currency, percent signs and commas between thousands do not count: $1,200.50 is 1200.5 and 5% is 5. Text after the marked
    line is not part of the answer: a model that does not stop continues with another question.
    """
    lines = text.partition(ANSWER_MARK)[2].strip().splitlines()
    numbers = _numbers(lines[0] if lines else "") or _numbers(text)
    return numbers[-1] if numbers else None


def number_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer's final number is that of a reference, else 0. An answer without a number matches nothing."""
    found = final_number(answer)
    return float(found is not None and any(final_number(reference) == found for reference in references))


METRICS: Mapping[str, Mapping[str, Figure]] = {       # metric, as `--metric` names it -> its figures
    "exact": {"exact_match": exact_match},
    "f1": {"exact_match": exact_match, "f1": token_f1},
    "rouge": {"rouge1": partial(rouge_n, order=1), "rouge2": partial(rouge_n, order=2), "rougeL": rouge_l},
    "gsm8k": {"accuracy": number_match},
}


def check_metric(name: str | None) -> None:
    """Raise WrongUse for a name that is no metric, before a model is loaded."""
    if name not in (None, "auto", *METRICS):
        raise WrongUse(f"there is no metric {name!r}; use auto, {', '.join(METRICS)}")


def score(metric: str, answer: str, references: Sequence[str]) -> Scores:
    """Return the figures that a metric gives one answer."""
    return {name: figure(answer, references) for name, figure in METRICS[metric].items()}


def mean(scores: Sequence[Scores]) -> Scores:
    """Return the mean of each figure over the answers, of which there must be at least one."""
    return {name: fmean(one[name] for one in scores) for name in scores[0]}


def _f1(written: Sequence[object], expected: Sequence[object], *, empty: float = 1.0) -> float:
    """Return the F-measure over items counted as often as they occur; `empty` where neither side has any."""
    if not written and not expected:
        return empty
    return _f_measure(sum((Counter(written) & Counter(expected)).values()), len(written), len(expected))


def _f_measure(shared: int, written: int, expected: int) -> float:
    return 2 * shared / (written + expected) if shared else 0.0


def _runs(text: str, order: int) -> list[tuple[str, ...]]:
    found = words(text)
    return [tuple(found[start:start + order]) for start in range(len(found) - order + 1)]


def _common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the length of the longest sequence of words that both have in this order; time len(left) x len(right)."""
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
