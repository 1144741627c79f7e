"""Every page in a real browser: nothing that came in as text runs, axe finds nothing, and it fits a phone, light and dark."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import Served, Visitor, chromium, wait_until
from playwright.sync_api import Browser
from runs_written import line_of, write_run

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202e [a](javascript:alert(4)) javascript:alert(5)"
NAMES = ("<img src=x onerror=alert(3)>", "two \"quotes\" & <b>", "plain")
PAGES = ("/", "/new", "/new?recipe=docstrings", "/new?like=plain", "/runs", "/runs/plain",
         "/runs/%3Cimg%20src=x%20onerror=alert(3)%3E", "/runs/plain?x=time&log=yes&smooth=none&chart=loss",
         "/compare?run=plain&run=two%20%22quotes%22%20%26%20%3Cb%3E", "/chat",
         "/runs/plain/report", "/chat?model=runs/plain", "/models", "/data", "/audit", "/audit?file=train.py", "/studies",
         "/studies/2026-11-21_ablation-docstrings", "/claims", "/measure", "/system", "/jobs", "/jobs/20261121-120000-abcdef",
         "/nothing")
STUDIES = Path(__file__).resolve().parents[2] / "studies"
JOB = {"id": "", "title": EVIL, "words": ["train", f"name={EVIL}"], "run": "runs/plain", "state": "ended", "asked": 1.7e9,
       "began": 1.7e9, "ended": 1.7e9, "code": 1}
REACHABLE = """[...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex]')].filter(
  one => !one.disabled && one.type !== 'hidden' && one.tabIndex >= 0 && one.checkVisibility({visibilityProperty: true}))"""
NAMED = "one => [one.tagName, one.id, one.getAttribute('href'), one.textContent].join(' ').slice(0, 200)"
WHOLE = ("/", "/runs", "/runs/plain", "/jobs", "/claims", "/studies", "/system")         # tables fold, and do not scroll
CUT = """[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth + 1).map(
  one => one.textContent.trim().slice(0, 60))"""
LATE = "/Looking at|appears here/.test(document.body.innerText)"            # parts that come after the page
PICTURES = os.environ.get("PAGE_PICTURES")   # a folder: for docs/page.md, and to look at each page
OF_THE_DOCS = {"new": "/new", "run": "/runs/first", "compare": "/compare?run=first&run=second"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pages") / "project"
    for name in NAMES:
        run = write_run(folder / "runs" / name, 40)
        lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
        made = [{"event": "sample", "time": 1.7e9, "step": 20, "text": EVIL}, {"event": "warning", "time": 1.7e9, "step": 20,
                "message": EVIL}, {"event": "note", "time": 1.7e9, "step": 20, "message": "\x1b]52;c;AAAA\x07" + EVIL}]
        (run / "events.jsonl").write_text("".join([*lines[:-1], *(json.dumps(one) + "\n" for one in made), lines[-1]]))
        (run / "model").mkdir()
    (folder / "runs" / "link").symlink_to("/etc")
    shutil.copytree(STUDIES / "2026-11-21_ablation-docstrings", folder / "studies" / "2026-11-21_ablation-docstrings")
    (folder / "train.py").write_text(f"from transformers import Trainer, TrainingArguments  # {EVIL}\nargs = TrainingArguments("
                                     f"output_dir='''{EVIL}''', per_device_train_batch_size=1)\nTrainer(args=args).train()\n")
    (folder / "jobs").mkdir()
    (folder / "jobs" / "20261121-120000-abcdef.json").write_text(json.dumps(JOB))
    (folder / "jobs" / "20261121-120000-abcdef.out").write_text("\x1b]52;c;AAAA\x07" + EVIL)
    found = Served(folder, tmp_path_factory.mktemp("page-cache"))
    yield found
    found.end()


@pytest.mark.parametrize("width", [1280, 375])
def test_pages_are_inert_accessible_and_fit(browser: Browser, served: Served, width: int) -> None:
    visitor, wrong = Visitor(browser, served, viewport={"width": width, "height": 900}), []
    for path in PAGES:
        page = visitor.go(path)
        page.wait_for_timeout(300)
        wait_until(lambda: not page.evaluate(LATE))      # noqa: B023
        if (wide := page.evaluate("document.documentElement.scrollWidth")) > width:
            wrong.append(f"{path}: {wide} px wide")
        if width == 375 and path in WHOLE and (cut := page.evaluate(CUT)):
            wrong.append(f"{path}: a table is cut: {cut}")
        if page.locator("h1").count() != 1 or page.locator("img, iframe, script:not([src])").count():
            wrong.append(f"{path}: {page.locator('h1').count()} titles, or something that is not the page's")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found = Axe().run(page).response["violations"]
            wrong += [f"{path} ({scheme}): {one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]
            if PICTURES and "?" not in path.removeprefix("/compare?"):
                name = path.strip("/").partition("?")[0].replace("/", "-") or "home"
                page.screenshot(path=Path(PICTURES) / f"{name}-{scheme}-{width}.png", full_page=True)
        wrong += [f"{path}: {one}" for one in visitor.violations()]
    wrong += [one for one in visitor.complaints if "404" not in one]         # /nothing is not there
    visitor.context.close()
    assert not wrong


def test_the_entrance_is_accessible_and_says_what_to_do(browser: Browser, served: Served) -> None:
    visitor = Visitor(browser, served, viewport={"width": 375, "height": 900})
    page = visitor.go("/enter#t=used-before")
    page.get_by_text("open the newest one that powertrain ui printed").wait_for()        # the command is code
    assert page.locator("#problem code").text_content() == "powertrain ui"
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert not Axe().run(page).response["violations"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    visitor.context.close()


@pytest.mark.skipif(not PICTURES, reason="PAGE_PICTURES names no folder for pictures")
def test_pictures_of_the_docs(browser: Browser, served: Served) -> None:
    for name, rate, fall in (("first", 3e-3, 60), ("second", 1e-3, 100)):
        run = write_run(served.folder / "runs" / name, 400, fall=fall)
        (run / "recipe.yaml").write_text(f"name: {name}\nlearning_rate: {rate}\n")
        (run / "model").mkdir()
    visitor = Visitor(browser, served, viewport={"width": 1280, "height": 1120})
    for name, path in OF_THE_DOCS.items():
        page = visitor.go(path)
        if name == "new":
            page.locator("#plan dl").wait_for()
        page.screenshot(path=Path(PICTURES) / f"page-{name}.png")
    visitor.context.close()


def test_scripts_that_others_wrote_do_not_run(browser: Browser, served: Served) -> None:
    visitor, asked = Visitor(browser, served), []
    visitor.page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    page = visitor.go("/runs/plain")
    assert EVIL.replace("\u202e", "?") in page.locator("#rest").text_content()      # a mark that turns text around
    assert "\x1b" not in page.locator("#log").text_content()
    page = visitor.go("/audit")
    page.get_by_label("Or its text").fill(f"from transformers import Trainer  # {EVIL}\nx = '''{EVIL}'''\n")
    page.get_by_role("button", name="Audit").click()
    page.wait_for_url("**/audit?file=*")
    assert page.locator("h1").count() == 1
    assert not asked
    assert not visitor.violations()
    visitor.context.close()


def test_a_spike_of_one_step_is_seen(browser: Browser, served: Served) -> None:
    write_run(served.folder / "runs" / "spiky", 100_000, spike=9_001)
    visitor = Visitor(browser, served)
    page = visitor.go("/runs/spiky")
    heights = page.locator("#loss path.faint").evaluate_all("paths => paths.map(one => one.getBoundingClientRect().height)")
    assert max(heights) > 100                 # the curve itself is nearly level below a spike of 40 nats
    page = visitor.go("/runs/spiky?from=8990&to=9010")
    assert "9,001" in page.locator("#loss details").first.text_content() or "9001" in page.locator(
        "#loss details").first.text_content()
    assert psutil.Process(served.process.pid).memory_info().rss <= 120e6
    visitor.context.close()


def test_pointing_at_a_curve_tells_its_step_and_dragging_shows_that_range(browser: Browser, served: Served) -> None:
    visitor = Visitor(browser, served)
    page = visitor.go("/runs/plain?smooth=none")
    page.locator("#loss svg").scroll_into_view_if_needed()
    box = page.locator("#loss svg").bounding_box()
    start, end, low, high = map(float, page.locator("#loss svg").get_attribute("data-x").split()[:4])
    scale = box["width"] / float(page.locator("#loss svg").get_attribute("viewBox").split()[2])

    def place(step: float) -> float:
        return box["x"] + scale * (start + (step - low) / (high - low) * (end - start))

    page.mouse.move(place(30), box["y"] + 60)
    page.get_by_text("step 30: loss").wait_for()
    said = page.locator("#curves [data-pointed]").text_content()
    assert f"loss {json.loads(line_of(30))['loss']:.4f}" in said
    assert page.locator("#curves line.crosshair").count() == page.locator("#curves svg[data-x]").count() > 3
    page.mouse.move(place(10), box["y"] + 60)
    page.mouse.down()
    page.mouse.move(place(20), box["y"] + 60)
    page.mouse.up()
    page.wait_for_url("**/runs/plain?*from=*")
    _, _, low, high = map(float, page.locator("#loss svg").get_attribute("data-x").split()[:4])
    assert abs(low - 10) < 0.5
    assert abs(high - 20) < 0.5
    assert not visitor.violations()
    visitor.context.close()


def test_a_script_can_be_dropped(browser: Browser, served: Served) -> None:
    visitor = Visitor(browser, served)
    page = visitor.go("/audit")
    dropped = page.evaluate_handle("""() => {
      const data = new DataTransfer();
      data.items.add(new File(["learning_rate: 1\\n"], "axolotl.yaml"));
      return data; }""")
    page.get_by_label("Or its text").dispatch_event("drop", {"dataTransfer": dropped})
    wait_until(lambda: page.get_by_label("Or its text").input_value() == "learning_rate: 1\n")
    page.get_by_role("button", name="Audit").click()
    page.wait_for_url("**/audit?file=uploads%2Fscript-*.yaml")
    visitor.context.close()


def test_a_keyboard_reaches_everything(browser: Browser, served: Served) -> None:
    visitor, missed = Visitor(browser, served), dict[str, object]()
    for path in (path for path in PAGES if "?" not in path or path.startswith("/compare")):
        page = visitor.go(path)
        page.wait_for_timeout(300)
        page.evaluate("window.reached = new Set()")
        for _ in range(page.evaluate(f"{REACHABLE}.length") + 5):
            page.keyboard.press("Tab")
            page.evaluate(f"reached.add(({NAMED})(document.activeElement))")
        if found := page.evaluate(f"{REACHABLE}.map({NAMED}).filter(name => !reached.has(name))"):
            missed[path] = found
    visitor.context.close()
    assert not missed
