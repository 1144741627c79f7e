"""A diagnosis in words, from plain values that a test makes."""

from __future__ import annotations

from typing import Any

from powertrain.records import to_plain
from powertrain.records.findings import Cure, Evidence, Expected, Finding
from powertrain.report.rows import diagnosis_rows, finding_rows, forecast_rows, summary_row, verdict_rows


def cause(name: str, *, predicted: float = 1.0, words: tuple[str, ...] = (), basis: str = "none",
          bound: float = 2.0) -> dict[str, Any]:
    return {"name": name, "share": 0.5, "bound": bound, "evidence": [{"what": f"{name} was seen", "place": None}],
            "cure": {"says": f"cure {name}", "edits": [], "words": list(words)}, "predicted": predicted, "basis": basis,
            "tried": basis.startswith("measured")}


def forecast(**changes: Any) -> dict[str, Any]:
    return {"steps": 1000, "step_s": {"median": 0.1, "low": 0.09, "high": 0.11}, "parts": {"start-up": 3.0, "steps": 100.0},
            "seconds": {"median": 103.0, "low": 93.0, "high": 113.0}, "tokens_per_s": 20480.0, "cost": None,
            "energy_kwh": None} | changes


def finding(severity: Any, speed: tuple[float, float] | None = None) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(Finding(
        "rule", severity, f"a {severity} title", "why it matters", "fact: a test", (Evidence("key=1"),),
        Expected("at most 2 times as fast", "formula: x", speed), Cure("change it", words=("key=2",))))
    return plain


def text(rows: Any) -> str:
    return "\n".join("  ".join(row) for row in rows)


def test_the_first_cause_is_the_verdict_with_its_cure_and_gain() -> None:
    rows = verdict_rows([cause("padding", predicted=1.8, words=("techniques.packing=on",), basis="measured: a few steps")])
    assert rows == [("Verdict", "this run is bound by padding: 50% of its time"), ("Seen", "padding was seen"),
                    ("Cure", "cure padding (techniques.packing=on)"),
                    ("Gain", "1.80 times as fast is predicted (measured: a few steps); at most 2.00 times if this cause "
                             "took no time")]


def test_a_cure_that_helps_beyond_its_cause_is_not_held_to_the_bound() -> None:
    said = text(verdict_rows([cause("padding", predicted=2.4, words=("x=1",))]))
    assert "at most" not in said
    assert "the change helps elsewhere too" in said


def test_where_nothing_helps_no_gain_is_promised() -> None:
    assert "no known change makes" in text(verdict_rows([cause("compute")]))


def test_further_causes_stand_behind_the_verdict_with_what_they_would_give() -> None:
    rows = verdict_rows([cause("data", predicted=1.5, words=("a=1",)), cause("padding", predicted=1.2, words=("b=1",)),
                         cause("compute", words=("c=1",), basis="measured: no faster"), cause("logging")])
    also = [said for title, said in rows[4:]]
    assert [title for title, _ in rows[4:]] == ["Also", "", ""]
    assert also[0].endswith("cure padding (b=1): 1.20 times as fast")
    assert also[1].endswith("c=1 was tried and did not help")
    assert also[2].endswith("logging was seen")


def test_the_forecast_is_an_interval_with_its_parts() -> None:
    rows = forecast_rows(forecast())
    assert rows == [("Time", "93 to 113 s for the whole run of 1,000 steps (100 ms each, 20,480 tokens/s): start-up 3 s, steps "
                             "100 s")]
    priced = forecast_rows(forecast(cost={"median": 1.0, "low": 0.9, "high": 1.1}, energy_kwh=0.25))
    assert [title for title, _ in priced] == ["Time", "Cost", "Energy"]
    assert "0.9 to 1.1" in priced[1][1]


def test_what_is_well_takes_one_line_and_what_is_not_says_why_and_how() -> None:
    bad, good = finding_rows([finding("critical", (1.0, 2.0)), finding("good")])
    assert bad == ("critical", "a critical title",
                   "why it matters (key=1); change it: key=2 [at most 2 times as fast; formula: x]")
    assert good == ("good", "a good title", "key=1")
    assert "[" not in finding_rows([finding("moderate")])[0][2]  # no effect on speed is claimed


def test_findings_are_counted_by_severity() -> None:
    assert summary_row([finding("low"), finding("low"), finding("good")]) == (
        "Checks", "0 critical, 0 moderate, 2 low, 1 good")


def test_a_run_that_cannot_be_probed_says_why_and_has_no_verdict() -> None:
    rows = diagnosis_rows({"environment": {"machine": "A CPU"}, "failed": "out of memory", "causes": [], "forecast": None})
    assert rows == [("Machine", "A CPU"), ("Probe", "the run cannot start: out of memory")]


def test_every_row_has_two_cells() -> None:
    found = {"environment": {"machine": "A CPU"}, "failed": None, "causes": [cause("data", predicted=1.5, words=("a=1",))],
             "forecast": forecast()}
    assert {len(row) for row in diagnosis_rows(found)} == {2}
