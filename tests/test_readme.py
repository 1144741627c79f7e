"""Every command that the README and the documentation show is run, in its order and in one folder, as a reader would.

The tables in the pages are those that the studies give, and every link and every file that a page names exists.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver import run_cli
from powertrain.records import to_plain
from powertrain.records.evidence import Comparison, Interval, Parity, Study

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
WITH_COMMANDS = ("README.md", "docs/usage.md", "docs/tracking.md", "docs/proof.md")  # in the order in which a reader meets them
WITH_TABLES = ("README.md", "docs/results.md", "docs/techniques.md", "docs/claims.md", "docs/audit.md", "docs/diagnosis.md",
               "docs/ARCHITECTURE.md")
# appended to commands that train: the same on a model that takes a second. What only plans is run as it is written
QUICK = ["model.layers=1", "model.width=32", "model.heads=2", "train_batch_size=4", "max_steps=2", "data.max_chars=4000",
         "sample.prompt=", "sample.tokens=2", "techniques.threads=off", "data.block=16"]
# the same for a command that tunes a trained model: the model is BASE's
BASE = ["train", "default", *QUICK[:-1], "data.block=200", "data.max_chars=60000", "--output", "runs/base"]
MEASURING = ("bench", "ablate", "tune")       # besides `claims run`
QUICK_TUNING = ["model.path=runs/base", "train_batch_size=4", "max_steps=2", "data.max_examples=40", "data.long_examples=drop",
                "techniques.threads=off"]


def commands(*pages: str) -> list[str]:
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")]


def quick(words: list[str]) -> list[str]:
    """The words with those of QUICK that do not stand in them already; a resumed run keeps its own.

    What measures gets hardly any time: it has tests of its own, and here it only has to say what it did not reach.
    """
    if words[0] in MEASURING or words[:2] == ["claims", "run"]:
        place = words.index("--budget") if "--budget" in words else len(words)
        words = [*words[:place], "--budget", "1s", *words[place + 2:]]
    if words[0] not in ("train", *MEASURING) or "--resume" in words or "--dry-run" in words:
        return words
    given = {word.partition("=")[0] for word in words}
    added = [word for word in (QUICK_TUNING if "docstrings" in words else QUICK) if word.partition("=")[0] not in given]
    return [*[word for word in words if not word.startswith("train_time_s")], *added]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader")
    shutil.copy(ROOT / "README.md", path)
    return path


def test_it_is_short_and_opens_with_the_two_commands() -> None:
    assert len(README.splitlines()) <= 150
    assert commands("README.md")[:2] == ["make demo", "make test"]
    assert README.index("make demo") < 60


def test_every_powertrain_command_works_in_its_order(cache: Path, folder: Path) -> None:
    lines = [line for line in commands(*WITH_COMMANDS) if line.startswith("powertrain ")]
    assert len(lines) >= 28
    code, _, err = run_cli([word for word in BASE if word != "data.max_chars=4000"], cache, folder)
    assert code == 0, err
    for line in lines:
        words = quick(shlex.split(line)[1:])
        code, out, err = run_cli(words, cache, folder)
        assert code == 0, f"{line}\n{err}"
        assert out, line


def environment() -> Iterator[tuple[str, str]]:
    """The Makefile's variables that stand for this test's interpreter, where everything is installed already."""
    yield "BIN", str(Path(sys.executable).parent)
    yield "STAMP", str(ROOT / "pyproject.toml")


def make(target: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`make TARGET` in this checkout; the tests that it runs take no processes besides those that run already."""
    given = [f"{key}={value}" for key, value in (*environment(), ("JOBS", "0"), *variables.items())]
    return subprocess.run(["make", "-C", str(ROOT), target, *given], capture_output=True, text=True, check=False,
                          env={**os.environ, "POWERTRAIN_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"})


def test_make_demo_trains_and_shows_the_plan_and_the_samples(tmp_path: Path) -> None:
    words = " ".join([*QUICK, "--output", str(tmp_path / "run")])
    found = make("demo", tmp_path, WORDS=words)
    assert found.returncode == 0, found.stderr
    assert all(word in found.stdout for word in ("Sample", "bits per byte", "gzip -9 needs", "the plan expected"))
    assert all(word in found.stderr for word in ("Machine", "On  ", "Off  ", "Expected"))
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_make_test_runs_the_tests(tmp_path: Path) -> None:
    found = make("test", tmp_path, TESTS="tests/training/test_schedule.py")
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"\d+ passed", found.stdout)


def test_the_recipes_in_the_table_are_those_that_ship() -> None:
    from powertrain.recipe import shipped_recipes

    table = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert named == set(shipped_recipes())


@pytest.fixture(scope="module")
def table() -> Any:
    """benchmarks/table.py, which writes the tables."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import table

    return table


@pytest.mark.parametrize("page", WITH_TABLES)
def test_the_tables_of_a_page_are_what_the_studies_say(table: Any, page: str) -> None:
    assert (ROOT / page).read_text(encoding="utf-8") == table.made()[page], "run `python benchmarks/table.py`"


class TestTables:
    """What `python benchmarks/table.py` makes of studies, in a folder of made-up ones."""

    @pytest.fixture
    def house(self, tmp_path: Path) -> Path:
        (tmp_path / "docs").mkdir()
        for page in WITH_TABLES:
            shutil.copy(ROOT / page, tmp_path / page)
        return tmp_path

    def store(self, house: Path, kind: str, date: str, findings: dict[str, Any], **changes: Any) -> str:
        study = Study(f"{date}_{kind}-{len(list(house.rglob('evidence.json')))}", kind, "what", date, f"powertrain {kind}",
                      "abc", {"name": "A CPU", "device": "cpu", "cores": 2, **changes}, {"torch": "2.13.0"}, noise_floor=0.012,
                      comparisons=(Comparison("none", "all", Interval(2.5, 2.4, 2.6), 6, "faster", "", (1, 2.5), (5, 4)),),
                      findings=findings)
        folder = house / "studies" / study.name
        folder.mkdir(parents=True)
        (folder / "evidence.json").write_text(json.dumps(to_plain(study)))
        return study.name

    def ablation(self, recipe: list[str], *speeds: float | None, **of_all: Any) -> dict[str, Any]:
        """Techniques t0, t1, ... with these speeds."""
        parity = Parity("ROUNDING", True, "within 1e-3", 4, 2e-5, 1e-4)
        return {"recipe": recipe, "total": 0, "techniques": [
            {"name": f"t{number}", "settings": {"chunk": 4}, "exactness": "ROUNDING", "because": "", "acts_on": ["loss"],
             "bound": 1.5, "ladder": None, "left_out": None,
             "speed": None if speed is None else {"median": speed, "low": speed - 0.01, "high": speed + 0.01},
             "memory_bytes": -(1 << 20), "parity": to_plain(parity), "verdict": "faster", "why": "a | b", **of_all}
            for number, speed in enumerate(speeds)]}

    def claim(self, verdict: str, median: float | None) -> dict[str, Any]:
        return {"id": "000-03", "verdict": verdict, "because": "so it was",
                "measured": None if median is None else {"median": median, "low": median, "high": median}}

    def test_without_studies_they_say_so_in_one_line(self, table: Any, house: Path) -> None:
        for page, text in table.made(house).items():
            assert page in ("docs/audit.md", "docs/ARCHITECTURE.md") or "is stored in `studies/` yet: `" in text, page

    def test_a_technique_is_shown_with_its_newest_study(self, table: Any, house: Path) -> None:
        self.store(house, "ablation", "2026-12-01", self.ablation(["docstrings"], 1.31, None))
        newest = self.store(house, "ablation", "2026-12-02", self.ablation(["docstrings"], 1.42, None))
        page = table.made(house)["docs/results.md"]
        rows = [line for line in page.splitlines() if line.startswith(("| `t0`", "| `t1`"))]
        rest = f"-1 MiB | yes: losses 2.0e-05 apart | faster | `studies/{newest}` |"
        assert rows == [f"| `t0` | `docstrings` | 1.42 (1.41 to 1.43) | {rest}", f"| `t1` | `docstrings` | not timed | {rest}"]

    def test_preparing_and_starting_have_rows_of_their_own(self, table: Any, house: Path) -> None:
        ratio = {"median": 2.5, "low": 2.4, "high": 2.6}
        one = {"ratio": ratio, "rows_per_s": 20000.0, "peer_rows_per_s": 8000.0, "peer_processes": 2}
        seconds = {name: {"median": found, "low": found - 1, "high": found + 1}
                   for name, found in {"warm": 7.0, "cold": 20.0, "peer": 14.0}.items()}
        self.store(house, "prepare", "2026-12-01", {"text": {**one, "rows_per_s": 1.0}})
        prepared = self.store(house, "prepare", "2026-12-02", {"text": one}, unclean=[])
        started = self.store(house, "start", "2026-12-02", {"to_first_step": seconds}, name="Another CPU", unclean=[])
        page = table.made(house)["docs/results.md"]
        rows = [line for line in page.splitlines() if "| TRL |" in line or "datasets.map" in line]
        assert rows == [
            "| data preparation, rows of text, to the same trained tokens | datasets.map in batches, the faster of 1 and 2 "
            f"processes (2) | 8,000 rows/s | 20,000 rows/s | 2.50 (2.40 to 2.60) | `studies/{prepared}` |",
            f"| from the command to the first step of LoRA, warm caches | TRL | 14.0 s | 7.0 (6.0 to 8.0) s | 2.00 | "
            f"`studies/{started}` |",
            f"| from the command to the first step of LoRA, cold caches | TRL | 14.0 s | 20.0 (19.0 to 21.0) s | 0.70 | "
            f"`studies/{started}` |"]
        assert "On: A CPU, 2 cores; Another CPU, 2 cores." in page

    def test_writing_has_a_row_for_each_program(self, table: Any, house: Path) -> None:
        def speed(median: float) -> dict[str, Any]:
            return {"tokens_per_s": {"median": median}, "ratio": {"median": 120 / median, "low": 1.0, "high": 9.0}}

        stored = self.store(house, "writing", "2026-12-02", {
            "writers": {"ours": speed(120.0), "before": speed(20.0), "transformers": speed(40.0)},
            "answers": {"answers_per_s": 4.0, "ratio": {"median": 16.0, "low": 15.0, "high": 17.0}}}, unclean=[])
        rows = [line for line in table.made(house)["docs/results.md"].splitlines() if f"`studies/{stored}`" in line]
        assert rows == [
            "| text written by `generate`, Llama of 115.6 M parameters in bf16 | transformers | 40 tokens/s | 120 tokens/s | "
            f"3.00 (1.00 to 9.00) | `studies/{stored}` |",
            "| questions answered by `evaluate --metric` | one at a time by torch's operators, in fp32 | 0.25 a second | "
            f"4.00 a second | 16.00 (15.00 to 17.00) | `studies/{stored}` |"]

    def test_a_busy_machine_gives_no_ratio(self, table: Any, house: Path) -> None:
        one = {"ratio": {"median": 2.5, "low": 2.4, "high": 2.6}, "rows_per_s": 2.0, "peer_rows_per_s": 8.0,
               "peer_processes": 2}
        self.store(house, "prepare", "2026-12-01", {"text": one}, unclean=["others used 30%"])
        assert "| not clean: others used 30% |" in table.made(house)["docs/results.md"]
        self.store(house, "prepare", "2026-12-02", {"text": one})        # from before the machine was watched
        assert "| not clean: the load of the machine was not recorded |" in table.made(house)["docs/results.md"]

    @pytest.mark.parametrize(("unclean", "slower", "others", "ratio"), [
        ([], 0.04, 0.0, "2.50 (2.40 to 2.60)"),
        (["TRL is slower beside us"], 0.4, 0.0, "2.00 (the peer alone; beside ours it was 40% slower)"),
        (["TRL is slower beside us", "others used 30%"], 0.4, 0.3, "not clean: TRL is slower beside us; others used 30%"),
        (None, 0.0, 0.0, "not clean: the peer was not measured alone")])
    def test_a_slowed_peer_is_compared_alone_and_a_busy_machine_gives_no_ratio(
            self, table: Any, house: Path, unclean: list[str] | None, slower: float, others: float, ratio: str) -> None:
        losses = [{"peer": "TRL", "mean_absolute": 1e-4, "steps": 8}]
        findings = {"case": "lora", "losses": losses, "products_share": 0.4}
        if unclean is not None:
            findings["conditions"] = [{"peer": "TRL", "alone_tokens_per_s": 325.0, "beside_tokens_per_s": 300.0,
                                       "unclean": unclean, "slower": slower, "others_share": others, "stolen_share": 0.0}]
        name = self.store(house, "peers", "2026-12-01", findings)
        path = house / "studies" / name / "evidence.json"
        study = json.loads(path.read_text())
        window = {"seconds": 10.0, "real_tokens": 3000}
        study["runs"] = [{"arm": "TRL", "windows": [window]}, {"arm": "powertrain", "windows": [window, window]}]
        study["comparisons"] *= 2                # the first is ours against itself
        study["comparisons"][1]["tokens_per_s"] = [300.0, 650.0]
        path.write_text(json.dumps(study))
        row = next(line for line in table.made(house)["docs/results.md"].splitlines() if "| TRL |" in line)
        alone = "325" if unclean is not None else ""
        assert f"| what | TRL | {alone} | {ratio} |" in table.made(house)["README.md"]
        assert row == f"| what | TRL | {alone} | 300 | 300 | {ratio} | 0.0001 over 8 steps | 40% | `studies/{name}` |"

    def test_recipes_and_machines_keep_their_own_studies(self, table: Any, house: Path) -> None:
        self.store(house, "ablation", "2026-12-01", self.ablation(["default"], 1.1))
        self.store(house, "ablation", "2026-12-02", self.ablation(["docstrings"], 1.2))
        self.store(house, "ablation", "2026-12-03", self.ablation(["docstrings"], 1.3), name="A GPU", device="cuda")
        page = table.made(house)["docs/techniques.md"]
        assert re.findall(r"^### (.*)", page, re.MULTILINE) == [
            "`default` on A CPU, 2 cores", "`docstrings` on A CPU, 2 cores", "`docstrings` on A GPU"]
        assert "| `t0` (chunk=4) | rounding | 1.50 |" in page
        assert "a \\| b" in page             # a bar in a cell does not open another one
        assert "equal arms differ here by up to 1.2%. The whole plan is 2.50 (2.40 to 2.60) times as fast" in page

    def test_training_that_is_not_the_same_is_loud(self, table: Any, house: Path) -> None:
        parity = Parity("BITWISE", False, "", 4, 3e-2, 0.1)
        self.store(house, "ablation", "2026-12-01", self.ablation([], 1.1, parity=to_plain(parity), memory_bytes=None))
        page = table.made(house)["docs/results.md"]
        assert "| `default` | 1.10 (1.09 to 1.11) | not measured | NO: losses 3.0e-02 apart |" in page

    def test_every_claim_has_a_row_measured_or_not(self, table: Any, house: Path) -> None:
        from powertrain.claims.claim import catalogue

        study = self.store(house, "claims", "2026-12-01", {"claims": [self.claim("no effect", 1.001)]})
        page = table.made(house)["docs/claims.md"]
        rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if re.match(r"\| \d{3}-", line)]
        assert sorted(rows) == sorted(claim.id for claim in catalogue().claims)
        assert f"| 1.001 times as fast | **no effect** | so it was | `studies/{study}` |" in page
        assert page.count("not measured yet |") == len(rows) - 1
        headings = re.findall(r"^## (\d{3}):", page, re.MULTILINE)
        assert headings == sorted(headings)

    def test_a_machine_that_cannot_decide_hides_no_measurement(self, table: Any, house: Path) -> None:
        self.store(house, "claims", "2026-12-01", {"claims": [self.claim("not applicable here", None)]})
        self.store(house, "claims", "2026-12-02", {"claims": [self.claim("confirmed", 1.1)]})
        self.store(house, "claims", "2026-12-03", {"claims": [self.claim("not applicable here", None)]})
        assert "| **confirmed** |" in table.made(house)["docs/claims.md"]
        self.store(house, "claims", "2026-12-04", {"claims": [self.claim("harmful", 0.9)]})
        assert "| **harmful** |" in table.made(house)["docs/claims.md"]

    def test_the_newest_study_of_crippled_recipes_is_shown_with_what_failed(self, table: Any, house: Path) -> None:
        case = {"name": "starved", "planted": "data", "named": "data", "share": 0.4, "predicted": 1.6, "measured": 1.5,
                "cure": ["techniques.loader.workers=2"], "holds": True}
        wrong = case | {"name": "padded", "planted": "padding", "measured": None, "holds": False}
        self.store(house, "diagnosis", "2026-12-01", {"cases": [case]})
        newest = self.store(house, "diagnosis", "2026-12-02", {"cases": [case, wrong]})
        page = table.made(house)["docs/diagnosis.md"]
        assert "| starved | data | 40% | 1.60 times as fast | 1.50 times as fast | `techniques.loader.workers=2` |" in page
        assert "| padded | data, instead of padding | 40% | 1.60 times as fast | not measured |" in page
        assert "1 of 2 hold: the planted cause was named first" in page
        assert f"`studies/{newest}`" in page

    def test_a_page_without_its_marks_is_refused(self, table: Any, house: Path) -> None:
        (house / "README.md").write_text("# Nothing\n")
        with pytest.raises(ValueError, match=r"README\.md lacks the marks <!-- results -->"):
            table.made(house)


def test_the_formats_in_the_table_are_those_that_are_read() -> None:
    from powertrain.data.rows.formats import FORMATS

    page = (ROOT / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    assert {line.split("`")[1] for line in page.partition("## Methods")[0].splitlines() if line.startswith("| `")} == {
        known.name for known in FORMATS}


def test_every_bound_of_a_verdict_has_its_words() -> None:
    from powertrain.diagnosis.observed import Bound

    page = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8").partition("## What a run can be bound by")[2]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.partition("## ")[0].splitlines() if line.startswith("| ")]
    assert {name for row in rows for name in row.split(", ")} == {"bound", *tuple(Bound)}


def test_every_room_stands_in_the_tree_of_the_architecture() -> None:
    tree = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("```")[2].partition("```")[0]
    rooms = [path for path in (ROOT / "src" / "powertrain").iterdir() if path.name[0] not in "_." and path.suffix != ".typed"]
    assert not [path.name for path in rooms if f"  {path.name}{'/' * path.is_dir()} " not in tree]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and the site give to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower())) for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_named_in_the_pages_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = []
    for link in re.findall(r"\]\(([^)]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            missing.append(link)
    rooms = "|".join(path.name for path in (ROOT / "src" / "powertrain").iterdir() if path.is_dir())
    paths = re.findall(rf"`((?:src|tests|docs|benchmarks|studies|{rooms})/[\w./-]+)`", text)
    missing += [path for path in paths if not ((ROOT / path).exists() or (ROOT / "src/powertrain" / path).exists())]
    assert not missing


def test_make_docs_builds_the_site_without_a_broken_link_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    words = ["build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, "-m", "mkdocs", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES[1:]:
        html = (tmp_path / "site" / Path(page).with_suffix(".html").name).read_text(encoding="utf-8")
        assert not re.findall(r"<(?:link|script|img)[^>]+(?:href|src)=.?https?://[^>]*", html), page


def test_the_picture_is_one_small_file_for_light_and_dark_pages() -> None:
    picture = (ROOT / "docs" / "run.svg").read_text(encoding="utf-8")
    assert len(picture) < 40_000
    assert "prefers-color-scheme:dark" in picture
    assert "<script" not in picture
    assert not re.search(r"(?:href|src)=|url\(", picture)
