"""A person with a browser: runs go on while the page dies, and what is shown is what events.jsonl says."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Served, Visitor, chromium, wait_until
from playwright.sync_api import Browser
from runs_written import line_of, write_run

from powertrain.records.event_log import read_all_events, read_events
from powertrain.records.events import Resume, Step

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 400
STEPS = 400
TINY = ["data.source=text.txt", "data.tokenizer=char", "data.block=32", "model.layers=1", "model.width=32", "model.heads=2",
        f"max_steps={STEPS}", "train_batch_size=8", "save_steps=50", "eval_steps=100", "logging_steps=1", "sample.tokens=0"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def served(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    found = Served(folder, tmp_path_factory.getbasetemp() / "page-cache")
    yield found
    found.end()


@pytest.fixture
def visitor(browser: Browser, served: Served) -> Iterator[Visitor]:
    found = Visitor(browser, served)
    yield found
    found.context.close()


def start(visitor: Visitor, words: list[str] = TINY, name: str = "tiny") -> Path:
    """Start a run by the form, and return its folder."""
    page = visitor.go("/new?recipe=default")
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("More settings").fill("\n".join(words))
    page.get_by_role("button", name="Start").click()
    page.wait_for_url(re.compile(r"/(runs|jobs)/"))
    return wait_until(lambda: next((path.parent for path in visitor.served.folder.glob(f"runs/{name}*/recipe.yaml")), None))


def steps_of(run: Path) -> list[int]:
    return [event.step for event in read_all_events(run / "events.jsonl") if isinstance(event, Step)]


def trainer(run: Path) -> int:
    return int(wait_until(lambda: (run / ".lock").read_text()).split()[0])


def reached(run: Path, step: int) -> bool:
    return bool((run / "events.jsonl").exists() and (found := steps_of(run)) and found[-1] >= step)


def test_the_server_dies_and_the_same_process_trains_on(visitor, served):
    run = start(visitor, [*TINY[:-6], "max_steps=1000000", *TINY[-5:]])
    page = visitor.go(f"/runs/{run.name}")
    wait_until(lambda: reached(run, 20))
    before, other = trainer(run), visitor.new_page()
    other.goto(f"{served.address}/jobs")
    served.kill()
    for tab in (page, other):
        tab.get_by_text("has heard nothing").wait_for(timeout=20_000)
    seen = steps_of(run)[-1]
    wait_until(lambda: reached(run, seen + 20))          # nobody serves, and it trains
    served.start()
    wait_until(lambda: int(page.locator("[data-field=step]").first.text_content().replace(",", "")) > seen + 20)
    for tab in (page, other):
        tab.locator("#stale").wait_for(state="hidden")
    assert trainer(run) == before
    page.get_by_role("button", name="Finish the step and save").click()
    page.get_by_text("stopped", exact=False).first.wait_for()
    assert steps_of(run) == list(range(1, len(steps_of(run)) + 1))
    page = visitor.go(f"/runs/{run.name}")
    assert int(page.locator("[data-field=step]").first.text_content().replace(",", "")) == steps_of(run)[-1]


def test_the_trainer_dies_and_resume_ends_with_the_same_bytes(visitor, served, tmp_path):
    whole = start(visitor, name="whole")
    wait_until(lambda: (whole / "model" / "model.safetensors").exists())
    wait_until(lambda: "finished" in (whole / "events.jsonl").read_text())
    killed = start(visitor, name="killed")
    page = visitor.go(f"/runs/{killed.name}")
    wait_until(lambda: reached(killed, 120))
    os.kill(trainer(killed), signal.SIGKILL)
    at = time.monotonic()
    page.get_by_text("killed", exact=True).first.wait_for()
    assert time.monotonic() - at < 2.0
    saved = max(int(path.name.split("-")[1]) for path in (killed / "checkpoints").glob("step-*"))
    page = visitor.go(f"/runs/{killed.name}")
    page.get_by_role("button", name=f"Resume from step {saved}").click()
    wait_until(lambda: (killed / "model" / "model.safetensors").exists())
    assert (killed / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    resumed = next(event for event in read_all_events(killed / "events.jsonl") if isinstance(event, Resume))
    assert resumed.step == saved


def test_a_browser_opened_again_shows_the_numbers_of_the_events(visitor, served):
    run = start(visitor, [*TINY, "max_steps=28"])        # the last two losses differ in what is shown
    visitor.page.close()
    wait_until(lambda: "finished" in (run / "events.jsonl").read_text() if (run / "events.jsonl").exists() else False)
    visitor.page = visitor.new_page()
    page = visitor.go(f"/runs/{run.name}")
    steps = [event for event in read_events(run / "events.jsonl") if isinstance(event, Step)]
    assert page.locator("[data-field=step]").first.text_content() == f"{steps[-1].step:,}"
    assert page.locator("[data-field=loss]").first.text_content() == f"{steps[-1].loss:.4f}"
    assert not visitor.complaints


def test_parts_of_one_address_are_fetched_together(visitor, served):
    write_run(served.folder / "runs" / "one", 30)
    page, asked = visitor.go("/runs/one"), list[str]()
    page.locator("#curves svg").first.wait_for()
    page.on("request", lambda request: asked.append(request.url.partition("?")[0].removeprefix(served.address)))
    page.evaluate("refreshAll()")
    page.wait_for_timeout(1000)              # in which others would be asked for
    assert asked.count("/runs/one") == 1
    assert page.locator("#curves svg").count()


def test_a_press_counts_while_the_page_is_told_of_news(visitor, served):
    run = write_run(served.folder / "runs" / "one", 30, ended=False)
    page = visitor.go("/runs/one")
    page.get_by_role("link", name="Duplicate with changes").hover()
    page.mouse.down()
    with open(run / "events.jsonl", "a", encoding="utf-8") as log:
        log.write(line_of(31))
    page.evaluate("refresh(document.getElementById('head'))")
    assert page.locator("#head [data-field=step]").text_content() == "31"
    page.mouse.up()
    page.wait_for_url("**/new?like=one")


def test_two_tabs_that_press_start_make_one_run(visitor, served):
    tabs, words = [visitor.page, visitor.new_page(), visitor.new_page()], [*TINY[:-6], "max_steps=1000000", *TINY[-5:]]

    def fill(tab):
        tab.goto(served.address + "/new?recipe=default")
        tab.get_by_label("Name", exact=True).fill("twice")
        tab.get_by_label("More settings").fill("\n".join(words))

    for tab in tabs:
        fill(tab)
    for tab in tabs:
        tab.get_by_role("button", name="Start").click()
    fill(tabs[2])                            # loaded anew while it starts, and pressed again
    tabs[2].get_by_role("button", name="Start").click()
    for tab in tabs:
        tab.wait_for_url(re.compile(r"/(runs|jobs)/"))
    time.sleep(2)
    assert len(list((served.folder / "jobs").glob("*.json"))) == 1
    assert len(list((served.folder / "runs").iterdir())) == 1


@pytest.mark.parametrize("hand", ["mouse", "keyboard"])
def test_from_an_empty_folder_to_the_first_answer(browser, tmp_path, tmp_path_factory, hand):
    folder = tmp_path / "empty"
    folder.mkdir()
    served = Served(folder, tmp_path_factory.getbasetemp() / "page-cache")
    visitor = Visitor(browser, served)
    visitor.context.set_default_timeout(400_000)
    page, uses = visitor.page, []

    def use(role, name):
        uses.append(name)
        found = page.get_by_role(role, name=name)
        found.wait_for()
        if hand == "mouse":
            found.click()
            return
        for _ in range(60):                  # as somebody without a mouse gets there
            page.keyboard.press("Tab")
            if found.evaluate("one => one === document.activeElement"):
                page.keyboard.press("Enter")
                return
        raise AssertionError(f"no Tab leads to {name}")

    try:
        use("button", "Try it")
        use("link", "Chat with it")
        use("button", "Ask")
        page.get_by_text("The exact prompt").nth(1).wait_for()           # the tuned model and its base have answered
        answers = page.locator(".bubble span").all_text_contents()
        assert len(answers) == 4
        assert all(answers)
        assert uses == ["Try it", "Chat with it", "Ask"]
        assert not visitor.complaints
        assert not visitor.violations()
    finally:
        visitor.context.close()
        served.end()
