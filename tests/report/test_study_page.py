"""The page of each kind of study, and of those that were written before there were kinds."""

from __future__ import annotations

import json
from pathlib import Path

import made_studies
import pytest
from test_run_page import EVIL, check_safe, figures

from powertrain.records import WrongUse
from powertrain.report import formats, study_page
from powertrain.report.formats import as_json

OLDER = sorted(path for path in (Path(__file__).parents[2] / "studies").glob("*/evidence.json")
               if "kind" not in json.loads(path.read_text(encoding="utf-8")))


def page_of(kind: str, **changes):
    return study_page.page(made_studies.KINDS[kind]() | changes, f"studies/{kind}", "made by a test")


def figure(page, key):
    return next(figure for figure in figures(page) if figure.key == key)


@pytest.mark.parametrize("kind", made_studies.KINDS)
def test_every_kind_has_a_page_in_three_forms(kind):
    page = page_of(kind)
    text = formats.html(page)
    check_safe(text)
    assert figures(page)
    plain = json.dumps(as_json(page), allow_nan=False)
    for one in figures(page):
        assert formats.escaped(one.title) in formats.markdown(page)
        assert json.dumps(one.title) in plain
    method = " ".join(str(cell) for block in page.sections[-1].blocks for row in getattr(block, "rows", ()) for cell in row)
    assert "AMD EPYC" in method
    assert "2.13.0" in method
    assert f"powertrain {kind} default" in text


def test_a_study_of_some_axes_of_growth_has_their_tables_alone():
    axes = made_studies.growth()["findings"]["axes"]
    page = page_of("growth", findings={"axes": {"rows of text": axes["rows of text"]}})
    assert page.verdict == "How time and memory grow with the rows of text."
    assert next(section.title for section in page.sections) == "Rows of text"


def test_the_ladder_multiplies_up_and_goes_back_where_a_technique_harms():
    ladder = figure(page_of("ablation"), "ladder")
    rows = ladder.drawings[0].rows
    assert [row.label for row in rows] == ["no technique", "+ threads", "+ bf16 and fused_adamw", "+ slowing",
                                           "full plan, measured directly"]
    bars = [segment for row in rows for segment in row.segments]
    assert [round(bar.end, 4) for bar in bars] == [1.25, 2.0, 1.84]
    assert bars[-1].end < bars[-1].start
    assert "harmful" in rows[3].says
    assert rows[-1].points[0].value == 1.83


def test_each_technique_left_out_has_its_interval_its_bound_and_its_word():
    rows = figure(page_of("ablation"), "left-out").drawings[0].rows
    assert [(row.label, row.says) for row in rows] == [("threads", "faster"), ("bf16", "faster"), ("slowing", "harmful")]
    assert rows[0].segments[0].end == 1.8
    assert (rows[0].points[0].low, rows[0].points[0].high) == pytest.approx((1.1858, 1.2342))


def test_the_noise_of_the_machine_is_drawn_behind_the_intervals():
    band, = figure(page_of("ablation"), "left-out").drawings[0].bands
    assert (band.low, band.high) == pytest.approx((0.988, 1.012))
    without = page_of("ablation", noise_floor=None)
    assert not figure(without, "left-out").drawings[0].bands


def test_every_single_pair_behind_an_interval_is_there():
    study = made_studies.ablation()
    windows = figure(page_of("ablation"), "windows")
    assert len(windows.tables[0].rows) == made_studies.PAIRS * len(study["comparisons"])


def test_the_same_two_arms_compared_twice_keep_their_own_runs():
    first, again = made_studies.compared("off", "on", 1.3, "faster"), made_studies.compared("off", "on", 1.1, "faster")
    windows = figure(study_page.page(made_studies.study("comparison", [first, again], {}), "studies/x", ""), "windows")
    means = [sum(point.value for point in row.points[:-1]) / made_studies.PAIRS for row in windows.drawings[0].rows]
    assert means == pytest.approx([1.3, 1.1], rel=0.02)


def test_a_comparison_whose_runs_are_not_kept_has_no_pairs_and_keeps_its_interval():
    study = made_studies.comparison()
    page = study_page.page(study | {"runs": []}, "studies/x", "")
    assert figure(page, "comparisons").drawings[0].rows[0].points[0].value == 1.31
    assert "Left out: paired windows" in formats.html(page)


def test_losses_that_are_equal_in_both_arms_are_said_to_be_equal():
    study = made_studies.comparison()
    for run in study["runs"]:
        run["losses"] = [3.0, 2.0]
    assert "same loss" in figure(study_page.page(study, "studies/x", ""), "parity").title
    assert "at most 0.0059" in figure(page_of("comparison"), "parity").title


def test_a_study_with_losses_that_are_not_finite_has_gaps():
    study = made_studies.comparison()
    study["runs"][1]["losses"][4] = None
    check_safe(formats.html(study_page.page(study, "studies/x", "")))


def test_claims_that_failed_and_those_that_cannot_be_tried_are_all_there():
    page = page_of("claims")
    text = formats.html(page)
    assert "1 claim, in the tables below" in text
    for claim in made_studies.claims()["findings"]["claims"]:
        assert f">{claim['id']}<" in text
    assert "this machine has no CUDA device" in text
    drawn = [row for one in figures(page) if one.key.startswith("claims-") for row in one.drawings[0].rows]
    assert sorted(row.says for row in drawn) == ["better", "confirmed", "harmful", "inconclusive", "no effect",
                                                 "smaller than claimed"]
    assert len([one for one in figures(page) if one.key.startswith("claims-")]) == 2
    assert page.numbers[0].value == "2 of 5"


def test_the_chosen_candidate_is_marked_and_every_round_is_drawn():
    rows = figure(page_of("tuning"), "candidates").drawings[0].rows
    assert [row.says for row in rows] == ["chosen, 2 rounds", "1 round"]
    assert len(rows[0].points) == 2
    assert "Not reached within the budget: without threads." in page_of("tuning").cautions
    stays = made_studies.tuning()
    stays["findings"] |= {"chosen": {}, "total": None}
    assert "untuned plan stays" in study_page.page(stays, "studies/x", "").verdict


def test_an_assertion_that_does_not_hold_is_the_verdict_of_a_bench():
    page = page_of("bench")
    assert page.tone == "bad"
    assert "1 of 2 assertions do not hold: memory grows with the examples" in page.verdict


def test_predictions_are_shown_with_their_errors():
    assert "1 of 2 measured step times" in page_of("speed").verdict
    rows = figure(page_of("memory"), "memory").drawings[0].rows
    assert [row.says for row in rows] == ["+0.2%", "+0.1%", "+0.5%", "+0.1%"]
    assert rows[0].points[0].value == 100


def test_a_planted_cause_that_was_not_named_first_is_said_and_counted():
    page = page_of("diagnosis")
    assert page.tone == "bad"
    assert "first in 3 of 5 crippled recipes, and in 2 of them" in page.verdict
    assert {"padded: host overhead was named, and padding was planted", "wild: the loss is not finite"} <= set(page.cautions)
    assert any("Whole runs in turns measured evaluating" in caution for caution in page.cautions)


def test_a_cure_that_gave_less_than_half_of_its_promise_is_drawn_as_such():
    rows = figure(page_of("diagnosis"), "gains").drawings[0].rows
    assert [(row.label, row.says) for row in rows] == [("starved", "holds"), ("one-thread", "less than half"),
                                                       ("evaluating", "holds")]
    assert (rows[0].segments[0].end, rows[0].points[0].value) == (1.6, 1.5)


def test_rows_prepared_are_shown_for_each_kind_and_memory_that_grows_is_said():
    page = page_of("prepare")
    assert page.verdict == ("Rows of conversation and text are prepared 2.50 and 3.50 times as fast as by datasets.map, to the "
                            "same trained tokens.")
    (drawing,) = figure(page, "prepare").drawings
    assert [(row.label, row.points[0].value) for row in drawing.rows] == [("conversation", 2.5), ("text", 3.5)]
    assert not any("memory grew" in caution for caution in page.cautions)
    grown = made_studies.prepare()["findings"]
    grown["text"] = {**grown["text"], "resident_bytes": 200 << 20}
    assert page_of("prepare", findings=grown).cautions[0] == (
        "With rows of text, memory grew from 119 MiB to 200 MiB with the number of rows.")


def test_a_start_is_drawn_stage_by_stage_beside_the_peers():
    page = page_of("start")
    assert page.verdict == "The first step is done 7 s (warm) and 21 s (cold) after the command; the peer's after 19 s."
    (drawing,) = figure(page, "start").drawings
    assert [(segment.label, segment.start, segment.end) for segment in drawing.rows[0].segments] == [
        ("planned", 0.0, 2.0), ("in force", 2.0, 5.0), ("first step done", 5.0, 7.0)]
    assert [row.label for row in drawing.rows] == ["warm", "cold", "peer"]


def test_writers_are_shown_beside_ours():
    page = page_of("writing")
    assert page.verdict == "120 tokens/s are written, which is 3.00 times transformers and 1.20 times llama.cpp."
    (drawing,) = figure(page, "writing").drawings
    assert [(row.label, row.says) for row in drawing.rows] == [("ours", "120"), ("transformers", "40"), ("llama.cpp", "100")]


def test_text_of_a_study_from_outside_stays_text():
    study = made_studies.ablation() | {"what": EVIL, "command": EVIL}
    study["findings"]["techniques"][0] |= {"name": EVIL, "why": EVIL, "because": EVIL}
    study["machine"]["name"] = EVIL
    check_safe(formats.html(study_page.page(study, EVIL, "")))


def test_what_makes_a_measurement_suspect_is_said():
    study = made_studies.ablation()
    study["machine"]["load"], study["commit"] = 3.5, "43bc34a120a1+"
    study["comparisons"][0]["verdict"] = "faster"
    cautions = " ".join(study_page.page(study, "studies/x", "").cautions)
    assert "not even between two equal runs" in cautions
    assert "not idle" in cautions
    assert "changes on top of commit 43bc34a120a1" in cautions


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.parent.name)
def test_older_studies_have_a_readable_page(path):
    page = study_page.page(json.loads(path.read_text(encoding="utf-8")), str(path.parent), "")
    check_safe(formats.html(page))
    assert figures(page)
    compares_alone = "dpo-parity" in path.parent.name
    assert (page.sections[0].title == "Differences") == compares_alone
    assert any("older form" in caution for caution in page.cautions) != compares_alone
    assert ("is allowed" in page.verdict) == compares_alone


@pytest.mark.parametrize(("study", "words"), [
    ({"hello": 1}, "neither a kind nor arms"), ({"kind": "seance"}, "does not know"),
    ({"kind": "ablation", "what": "x"}, "KeyError"), ({"arms": {"a": [{"losses": "?"}]}, "what": "x"}, "no study")])
def test_what_is_no_study_is_refused_in_one_sentence(study, words):
    with pytest.raises(WrongUse, match=words):
        study_page.page(study, "studies/x", "")
