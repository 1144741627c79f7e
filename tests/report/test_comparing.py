"""Two runs beside each other: what differs is named, what cannot be compared is said, one run is no evidence of speed."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from powertrain.records.event_log import from_line
from powertrain.records.events import Event, Step
from powertrain.records.origins import COMMAND_LINE, DEFAULT, Origin
from powertrain.records.timeline import read
from powertrain.report.comparing import ABSENT, comparison_rows, difference, equal_losses, sentences
from powertrain.report.result import step_time_row
from powertrain.report.run_page import RunFiles

FACTS: dict[str, Any] = {
    "hardware": {"name": "A CPU", "device": "cpu", "cores": 2, "memory_bytes": 1 << 34, "free_memory_bytes": 5,
                 "fingerprint": "f"},
    "software": {"versions": {"torch": "2.13.0", "python": "3.11"}, "missing": {}},
    "model": {"family": "llama", "layers": 2, "width": 32, "parameters": 1000, "trainable": 1000, "path": "",
              "method": "scratch"},
    "data": {"source": "stdlib", "digest": "0" * 64, "tokenizer": "bpe", "vocabulary": 50, "train_tokens": 900, "block": 16,
             "stride": 16, "examples": 56, "train_batch_size": 4}}
PLAN: dict[str, Any] = {"steps": [{"technique": "bf16", "settings": {}, "because": "it has the units"},
                                  {"technique": "micro_batch", "settings": {"examples": 4}, "because": "caches"}],
                        "refused": [{"technique": "loader", "because": "would take a core"}]}
RECIPE = {"learning_rate": (1e-3, DEFAULT), "seed": (42, DEFAULT), "train_batch_size": (4, Origin("recipe", "x")),
          "techniques": ({}, DEFAULT), "output_dir": ("runs/a", COMMAND_LINE)}


def events(losses: list[float], *, tokens: int = 100, seconds: float = 0.5, end: bool = True) -> list[Event]:
    shares = {"data": 0.1, "copy": 0.0, "forward": 0.3, "backward": 0.4, "optimizer": 0.2}
    parts = {part: share * seconds for part, share in shares.items()}
    found: list[dict[str, Any]] = [{"event": "start", "name": "x", "total_steps": len(losses)}]
    found += [{"event": "step", "step": number, "loss": loss, "tokens": tokens, "real_tokens": tokens, "seconds": seconds,
               "learning_rate": 1e-3, "grad_norm": 1.0, "parts": parts} for number, loss in enumerate(losses, 1)]
    found.append({"event": "evaluation", "step": len(losses), "loss": losses[-1], "tokens": 9, "seconds": 1.0})
    if end:
        found.append({"event": "end", "reason": "finished", "step": len(losses), "seconds": 1.5 + seconds * len(losses),
                      "peak_memory_bytes": 1 << 20})
    return [from_line({**event, "time": 1000.0 + (0 if event["event"] == "start" else 1.5 + seconds * len(losses))})
            for event in found]


def run(path: str = "runs/a", **changes: Any) -> RunFiles:
    return replace(RunFiles(path, RECIPE, FACTS, PLAN, read(events([3.0, 2.0, 1.0, 0.5]))), **changes)


def with_fact(part: str, **changes: Any) -> dict[str, Any]:
    facts = copy.deepcopy(FACTS)
    facts[part].update(changes)
    return facts


def text_of(found: Any) -> str:
    return "\n".join("  ".join(row) for row in [*comparison_rows(found), *sentences(found)])


def test_equal_runs_differ_in_nothing_and_it_says_so() -> None:
    found = difference(run(), run("runs/b", recipe=RECIPE | {"output_dir": ("runs/b", COMMAND_LINE)}))
    assert found.recipe == found.plan == found.facts == ()
    assert found.comparable
    assert "the same examples in the same order" in found.because
    assert [text for title, text in sentences(found) if title in ("Recipe", "Plan", "Facts")] == [
        "no difference in any key", "no difference in any technique or setting",
        "no difference in machine, versions, data or model"]


def test_only_changed_keys_are_shown_with_their_origins() -> None:
    other = {**RECIPE, "learning_rate": (2e-3, COMMAND_LINE), "new_key": (1, DEFAULT),
             "techniques.bf16": ("off", Origin("file", "x"))}
    del other["techniques"]
    found = difference(run(), run("runs/b", recipe=other))
    assert [(change.name, change.a, change.b, change.why_b) for change in found.recipe] == [
        ("learning_rate", 1e-3, 2e-3, "command line"), ("new_key", ABSENT, 1, "default"),
        ("techniques.bf16", "(not pinned)", "off", "file x")]
    assert "0.002  (command line)" in text_of(found)
    assert "the recipes differ in learning_rate and new_key, and the losses show what that does" in found.because


def test_plans_show_techniques_on_in_one_only_and_other_settings() -> None:
    other = {"steps": [PLAN["steps"][1] | {"settings": {"examples": 2}}, {"technique": "loader", "settings": {"workers": 1},
                                                                         "because": "pinned"}],
             "refused": [{"technique": "bf16", "because": "switched off"}]}
    found = difference(run(), run("runs/b", plan=other))
    assert [(change.name, change.a, change.b, change.why_a, change.why_b) for change in found.plan] == [
        ("bf16", {}, "off", "it has the units", "switched off"),
        ("micro_batch", {"examples": 4}, {"examples": 2}, "", ""),
        ("loader", "off", {"workers": 1}, "would take a core", "pinned")]
    assert "bf16 is on in A: it has the units; off in B: switched off" in text_of(found)


def test_another_reason_alone_is_no_difference() -> None:
    other = {**PLAN, "refused": [{"technique": "loader", "because": "would take another core"}]}
    assert difference(run(), run("runs/b", plan=other)).plan == ()


@pytest.mark.parametrize(("part", "changes", "says"), [
    ("data", {"digest": "1" * 64}, "the data (text or rows)"), ("data", {"train_batch_size": 8}, "the batch (4 and 8 examples"),
    ("model", {"layers": 3, "parameters": 2000}, "the model (layers, parameters)")])
def test_other_data_batch_or_model_cannot_be_compared(part: str, changes: dict[str, Any], says: str) -> None:
    found = difference(run(), run("runs/b", facts=with_fact(part, **changes)))
    assert not found.comparable
    assert says in found.because
    assert "the two runs did not do the same work" in found.speed


def test_free_memory_is_no_difference_and_another_machine_is_one() -> None:
    assert difference(run(), run("runs/b", facts=with_fact("hardware", free_memory_bytes=6))).facts == ()
    found = difference(run(), run("runs/b", facts=with_fact("hardware", cores=4)))
    assert [change.name for change in found.facts] == ["hardware: cores"]
    assert "made under different conditions (hardware: cores)" in found.speed
    assert found.comparable                  # what they learned still is


def test_one_run_each_is_no_evidence_of_speed_and_the_command_that_measures_is_named() -> None:
    off = {"steps": PLAN["steps"][1:], "refused": [{"technique": "bf16", "because": "switched off"}]}
    found = difference(run(plan=off), run("runs/b", history=read(events([3.0, 2.0, 1.0, 0.5], seconds=0.25))))
    assert "2.00 times as fast" in found.speed
    assert "one run of each is no proof" in found.speed
    assert "`powertrain ablate runs/b/recipe.yaml --technique bf16`" in found.speed      # where it is on


def test_losses_are_compared_after_equal_steps() -> None:
    found = list(equal_losses(read(events([4.0, 3.0, 2.0, 1.0])).steps, read(events([4.5, 3.5])).steps))
    assert [(at.steps, at.tokens, at.a, at.b) for at in found] == [(1, None, 4.0, 4.5), (2, None, 3.5, 4.0)]


def test_losses_are_compared_after_equal_tokens_where_a_step_has_others() -> None:
    found = list(equal_losses(read(events([4.0, 3.0, 2.0, 1.0], tokens=100)).steps,
                              read(events([4.0, 2.0], tokens=200)).steps))
    assert [(at.tokens, at.a, at.b) for at in found if at.tokens] == [(200, 3.5, 4.0), (300, 3.0, 4.0), (400, 2.5, 3.0)]


def test_a_run_without_an_end_or_without_files_is_described() -> None:
    found = difference(run(history=read(events([3.0], end=False))), run("runs/b", facts={}, plan={}, history=read([]),
                                                                        missing=("runs/b has no facts.json",)))
    assert not found.comparable
    assert "is missing" in found.because
    text = text_of(found)
    assert "running or killed at step 1 of 1" in text
    assert "killed before its first step" in text
    assert "runs/b has no facts.json" in text


def test_the_time_of_a_run_is_shown_by_part() -> None:
    found = difference(run(history=read(events([3.0, 2.0]))), run("runs/b"))
    assert found.results[0].wall_s == pytest.approx(2.5)
    assert sum(found.results[0].parts.values()) == pytest.approx(2.5)
    assert ("", "evaluation", "1 s, 40.0%", "1 s, 28.6%") in comparison_rows(found)
    assert next(row for row in comparison_rows(found) if row[0] == "Time")[1] == "data wait"


def test_the_step_time_is_said_in_one_row() -> None:
    assert step_time_row(events([3.0, 2.0])) == (
        "Step time", "data wait 10.0%, forward 30.0%, backward 40.0%, optimizer 20.0%")
    old = [replace(event, parts={}) if isinstance(event, Step) else event for event in events([3.0])]
    assert "not recorded" in step_time_row(old)[1]
    assert step_time_row([]) == ("Step time", "no step was recorded")
