"""The page of a run: what it says, that it says the same in three forms, and that nothing in it is live."""

from __future__ import annotations

import itertools
import json
import math
import re
from html.parser import HTMLParser

import pytest
from made_runs import BEGAN, FACTS, PLAN, files, shared_run, start, step, typed, whole_run

from powertrain.records import WrongUse
from powertrain.records.origins import COMMAND_LINE
from powertrain.report import formats, run_page
from powertrain.report.formats import as_json
from powertrain.report.page import Figure, Page
from powertrain.report.result import Live, result_rows
from powertrain.report.words import said

EVIL = '</text><script>alert(1)</script><img src=x onerror=alert(1)> "\' & ]]> `x` | [a](javascript:alert(1))'
VOID = {"meta", "br", "img", "link", "input"}


def figures(page: Page) -> list[Figure]:
    return [block for section in page.sections for block in section.blocks if isinstance(block, Figure)]


class Reader(HTMLParser):
    """Notes the elements, checks that they close, and finds what could load or run something."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.live: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name.startswith("on") or (name in ("src", "href", "data", "action", "xlink:href") and not
                                         str(value).startswith("#")) or name == "srcdoc":
                self.live.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_safe(text: str) -> Reader:
    reader = Reader(text)
    assert reader.open == []
    assert not reader.live
    assert not reader.seen & {"script", "img", "link", "iframe", "object", "embed", "base", "form"}
    assert not re.search(r"url\(|@import|https?://|\bnan\b|infinity", text, re.IGNORECASE)
    assert len(reader.ids) == len(set(reader.ids))
    return reader


def test_the_page_has_every_figure_of_a_finished_run():
    page = run_page.page(files(whole_run()))
    assert [figure.key for figure in figures(page)] == ["loss", "signals", "step-time", "throughput", "prediction", "roofline",
                                                        "tokens", "memory"]
    assert len(page.numbers) == 3
    assert page.tone == "good"
    check_safe(formats.html(page))


def test_each_figure_has_title_caption_description_and_its_numbers_on_the_page():
    page = run_page.page(files(whole_run()))
    text = formats.html(page)
    for figure in figures(page):
        assert figure.title
        assert figure.caption
        assert f"{figure.key}" in text
        cells = {said(cell) for table in figure.tables for row in table.rows for cell in row}
        assert not [cell for cell in cells if f">{cell.replace('&', '&amp;')}<" not in text]
    assert text.count("<desc") == text.count("<svg") == text.count('role="img"')
    assert text.count("<details>") == sum(len(figure.tables) for figure in figures(page))


def test_markdown_and_json_say_what_the_page_says():
    page = run_page.page(files(whole_run()))
    plain, text = json.loads(json.dumps(as_json(page), allow_nan=False)), formats.markdown(page)
    assert (plain["verdict"], plain["cautions"]) == (page.verdict, list(page.cautions))
    assert formats.escaped(page.verdict) in text
    told = [block for section in plain["sections"] for block in section["blocks"] if "figure" in block]
    for figure, block in zip(figures(page), told, strict=True):
        assert block["title"] == figure.title
        assert formats.escaped(figure.title) in text
        for table in figure.tables:
            assert all(f"| {formats.escaped(said(cell))} |" in text for cell in table.rows[-1])
        assert [table["rows"] for table in block["tables"]] == [[list(row) for row in table.rows] for table in figure.tables]
    total = next(block for block in told if block["figure"] == "step-time")["tables"][0]["rows"]
    assert sum(row[1] for row in total[:-1]) == pytest.approx(total[-1][1])
    assert sum(row[2] for row in total[:-1]) == pytest.approx(100)


def test_the_drawn_parts_of_the_wall_time_fill_their_bar():
    step_time = next(figure for figure in figures(run_page.page(files(whole_run()))) if figure.key == "step-time")
    segments = step_time.drawings[0].rows[0].segments
    assert segments[0].start == 0
    assert segments[-1].end == pytest.approx(100)
    assert all(one.end == pytest.approx(two.start) for one, two in itertools.pairwise(segments))
    assert (segments[-1].label, segments[-1].hatched) == ("other", True)


def test_text_from_outside_stays_text():
    events = whole_run()
    events[0]["name"] = EVIL
    events[22]["text"] = EVIL
    plan = json.loads(json.dumps(PLAN))
    plan["steps"][0]["because"] = EVIL
    facts = FACTS | {"hardware": FACTS["hardware"] | {"name": EVIL}}
    page = run_page.page(files(events, plan=plan, facts=facts, recipe={"name": (EVIL, COMMAND_LINE)}, folder=EVIL))
    check_safe(formats.html(page))
    text = formats.markdown(page)
    outside = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "<" not in outside.replace("<br>", "")
    assert not re.search(r"(?<!\\)\]\(", outside)


def test_a_command_between_backticks_is_set_as_code():
    warned = [*whole_run()[:-1], {"event": "warning", "time": BEGAN, "message": "go on by `powertrain train --resume <a>`"},
              whole_run()[-1]]
    text = formats.html(run_page.page(files(warned)))
    assert "go on by <code>powertrain train --resume &lt;a&gt;</code>" in text
    check_safe(text)


def test_losses_and_norms_that_are_not_finite_are_gaps_and_are_told():
    events = whole_run()
    events[3]["grad_norm"] = math.inf
    events[5]["loss"] = math.nan
    page = run_page.page(files(events))
    assert any("not finite" in caution for caution in page.cautions)
    check_safe(formats.html(page))
    rows = as_json(page)["sections"][0]["blocks"][0]["tables"][0]["rows"]
    assert rows[4][3] is None
    json.dumps(as_json(page), allow_nan=False)


@pytest.mark.parametrize("events", [
    [start(BEGAN)], [start(BEGAN), step(1, BEGAN + 1)], whole_run()[:17], whole_run(1),
    [*whole_run()[:5], {"event": "end", "time": BEGAN + 9, "reason": "failed", "step": 4, "message": EVIL, "seconds": 1.0}],
    [*whole_run()[:5], {"event": "end", "time": BEGAN + 9, "reason": "stopped (SIGINT)", "step": 4, "seconds": 1.0}]],
    ids=["no step", "one step", "killed", "whole with one step", "failed", "stopped"])
def test_unfinished_and_short_runs_have_a_readable_page(events):
    page = run_page.page(files(events))
    check_safe(formats.html(page))
    assert formats.markdown(page)
    json.dumps(as_json(page), allow_nan=False)
    finished = (events[-1].get("reason") == "finished")
    assert (page.tone == "good") == finished
    assert finished == ("not finished" not in " ".join(page.cautions) and "failed" not in " ".join(page.cautions))


def test_what_is_not_known_is_left_out_and_a_line_says_why():
    events = [{key: value for key, value in event.items() if key not in ("parts", "padding_tokens")} | (
        {"estimate": None} if event["event"] == "start" else {}) for event in whole_run() if event["event"] != "memory"]
    page = run_page.page(files(events, plan={}, facts={}))
    text = formats.html(page)
    assert "Left out: roofline" in text
    assert "Left out: padding" in text
    assert "Left out: expected against measured speed" in text
    check_safe(text)


def test_a_run_without_an_event_is_refused_with_its_cure():
    with pytest.raises(WrongUse, match="--resume runs/a"):
        run_page.page(files([]))


def test_the_page_is_for_light_dark_paper_and_narrow_screens():
    text = formats.html(run_page.page(files(whole_run())))
    style = text[text.index("<style>"):text.index("</style>")]
    assert "prefers-color-scheme:dark" in style
    assert "@media print" in style
    assert "max-width:640px" in style
    whole = [set(re.findall(r"--(\w+):#", part)) for part in re.findall(r":root\{([^}]*)\}", style)]
    light, dark = whole[0], whole[1]
    assert light == dark
    assert set(re.findall(r"var\(--(\w+)\)", style)) <= light
    used = {name for classes in re.findall(r'class="([^"]*)"', text) for name in classes.split() if re.match(r"[fs]-", name)}
    assert used <= set(re.findall(r"\.([fs]-\w+)\{", style))
    assert 'content="default-src \'none\'' in text.replace("&#x27;", "'")


def test_a_fact_that_is_guessed_and_what_the_run_did_not_meet_are_cautions():
    slow = run_page.page(files(whole_run(step_s=0.9)))
    assert any("outside the interval" in caution for caution in slow.cautions)
    assert any("a guessed gain" in caution for caution in run_page.page(files(whole_run())).cautions)


def test_the_prediction_of_memory_stands_beside_what_was_allocated():
    memory = next(figure for figure in figures(run_page.page(files(whole_run()))) if figure.key == "memory")
    assert [row.label for row in memory.drawings[0].rows] == ["predicted", "measured, allocated", "process peak"]
    assert "3.0% too low" in memory.title
    assert "for step 2, whose memory was measured" in memory.caption
    assert "The fullest possible passes take 96 MiB" in memory.caption


def test_several_processes_have_their_communication_waiting_and_balance() -> None:
    facts = FACTS | {"hardware": FACTS["hardware"] | {"processes": 2}}
    page = run_page.page(files(shared_run(), facts=facts))
    (figure,) = [one for one in figures(page) if one.key == "processes"]
    assert figure.title == ("Communication took 12% of the steps' time, and waiting for the slowest process 6%; the process "
                            "with the most tokens had 1.25 times the mean")
    assert figure.tables[0].rows[3] == (4, 0.12, 0.06, 1.25)
    (time,) = [one for one in figures(page) if one.key == "step-time"]
    parts = {row[0]: row[2] for row in time.tables[0].rows}
    assert parts["communication"] == pytest.approx(18, abs=8)            # of the wall time, which has evaluations too
    (roofline,) = [one for one in figures(page) if one.key == "roofline"]
    assert roofline.tables[0].rows[0][1] == 2 * FACTS["hardware"]["peak_flops_per_s"]["fp32"]
    check_safe(formats.html(page))
    assert "processes" not in [one.key for one in figures(run_page.page(files(whole_run())))]


def test_the_live_line_and_the_result_tell_communication_and_balance_of_several_processes() -> None:
    for made, told in ((shared_run(), True), (whole_run(), False)):
        live = Live(lambda: 1 << 30)
        for event in typed(made):
            live.take(event)
        assert ("12% communication, imbalance 1.25" in live.line()) is told
        rows = dict(result_rows(typed(made), "runs/a", None))
        assert rows.get("Processes", "").startswith("2: communication took 12% of the steps' time") is told
