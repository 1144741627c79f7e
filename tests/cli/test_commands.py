"""The commands as a person uses them, with good input and bad: one sentence, the right exit code, nothing lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from driver import TINY, run_cli

Cli = Callable[..., tuple[int, str, str]]


def assert_refused(found: tuple[int, str, str], says: str, code: int = 2) -> None:
    assert found[0] == code, found
    message = [line for line in found[2].splitlines() if line.startswith("powertrain: ")]
    assert len(message) == 1, found[2]
    assert says in message[0]
    assert "Traceback" not in found[2]


def test_help_loads_no_torch() -> None:
    """That is what keeps it quick; how quick is a benchmark's business."""
    code = "import sys, powertrain.cli; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    found = subprocess.run([sys.executable, "-m", "powertrain", "--help"], capture_output=True, text=True, check=True)
    assert all(command in found.stdout for command in ("train", "plan", "facts", "generate", "evaluate", "runs"))


class TestBadData:
    def test_missing(self, cli: Cli) -> None:
        assert_refused(cli("train", "data=nowhere.txt"), "nowhere.txt")

    def test_empty(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "empty.txt").touch()
        assert_refused(cli("train", "data=empty.txt"), "empty")

    def test_binary(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "data.bin").write_bytes(b"\x7fELF\0\0\x01\xff")
        assert_refused(cli("train", "data=data.bin"), "data.bin")

    def test_a_line_that_is_not_json(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n{"text": "torn\n')
        assert_refused(cli("train", "data=rows.jsonl"), "rows.jsonl:2")

    def test_a_line_that_lacks_the_field(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n{"txt": "hm"}\n')
        assert_refused(cli("train", "data=rows.jsonl"), "rows.jsonl:2")

    def test_a_block_longer_than_the_data(self, cli: Cli, tiny: list[str]) -> None:
        assert_refused(cli("train", *tiny, "data.block=5000"), "data.block=")


class TestBadRecipe:
    @pytest.mark.parametrize(("word", "says"), [
        ("learnin_rate=1", "did you mean learning_rate?"), ("learning_rate=fast", 'learning_rate is "fast"'),
        ("techniques.bf61=on", "did you mean bf16?"), ("techniques.tf32=on", "cannot be"),
        ("model.heads=5", "heads"), ("model.family=lama", "llama"), ("data.tokenizer=chars", "did you mean char"),
        ("model.context=8", "shorter than data.block"), ("model.vocabulary=3", "smaller than the tokenizer"),
        ("sample.prompt=€", "sample.prompt"),
    ])
    def test_a_value_that_cannot_be(self, cli: Cli, tiny: list[str], word: str, says: str, tmp_path: Path) -> None:
        key = word.partition("=")[0]
        found = cli("train", *[w for w in tiny if not w.startswith(f"{key}=")], word, "--output", "run")
        assert_refused(found, says)
        assert not (tmp_path / "run" / "events.jsonl").exists()

    def test_an_unknown_recipe(self, cli: Cli) -> None:
        assert_refused(cli("train", "char-shakspeare"), "did you mean char-shakespeare")

    def test_a_mistyped_option(self, cli: Cli) -> None:
        assert_refused(cli("train", "--dryrun"), "--dryrun")

    def test_as_json_the_error_is_an_object(self, cli: Cli) -> None:
        code, out, _ = cli("train", "learnin_rate=1", "--json")
        assert code == 2
        assert json.loads(out)["exit_code"] == 2


class TestBadOutput:
    def test_a_folder_with_another_run(self, cli: Cli, tiny: list[str], tmp_path: Path) -> None:
        assert cli("train", *tiny, "max_steps=1", "--output", "run", "--quiet")[0] == 0
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
        assert_refused(cli("train", *tiny, "--output", "run"), "already holds a run")
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before

    def test_a_folder_with_other_things(self, cli: Cli, tiny: list[str], tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").touch()
        assert_refused(cli("train", *tiny, "--output", "mine"), "not empty")

    def test_a_file(self, cli: Cli, tiny: list[str], tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert_refused(cli("train", *tiny, "--output", "file"), "is a file")

    def test_it_is_refused_before_anything_is_read(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert_refused(cli("train", "data=nowhere.txt", "--output", "file"), "is a file")

    def test_where_nothing_can_be_written(self, cli: Cli, tiny: list[str]) -> None:
        assert_refused(cli("train", *tiny, "--output", "/proc/run"), "cannot be written")

    def test_a_cache_that_cannot_be_written(self, tiny: list[str], tmp_path: Path) -> None:
        found = run_cli(["train", *tiny, "--output", "run"], Path("/proc/cache"), tmp_path)
        assert_refused(found, "/proc/cache")


class TestResume:
    def test_what_is_no_run(self, cli: Cli, tmp_path: Path) -> None:
        assert_refused(cli("train", "--resume", "nowhere"), "does not exist")
        (tmp_path / "empty").mkdir()
        assert_refused(cli("train", "--resume", "empty"), "holds no run")
        assert_refused(cli("train", "--resume", "empty", "--output", "other"), "leave --output out")
        (tmp_path / "notes.md").touch()
        assert_refused(cli("train", "--resume", "notes.md"), "is a file, and a run is a folder")


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in runs/one, and the text it learned."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)))
    code, _, err = run_cli(["train", "data=text.txt", *TINY, "--output", "runs/one"], cache, folder)
    assert code == 0, err
    return folder


class TestCommands:
    def test_plan_shows_every_technique_the_memory_and_the_time(self, cli: Cli, tiny: list[str]) -> None:
        from powertrain.techniques import CATALOGUE

        code, out, _ = cli("plan", *tiny)
        assert code == 0
        assert all(f"  {technique.name}" in out for technique in CATALOGUE)
        shown = ("Expected", "Floor", "Memory", "Known from", "learning_rate: 0.003", "# command line", "# default")
        assert all(word in out for word in shown)

    def test_plan_and_dry_run_start_nothing(self, cli: Cli, tiny: list[str], tmp_path: Path) -> None:
        code, out, _ = cli("train", *tiny, "--dry-run", "--json", "--output", "run")
        assert code == 0
        assert json.loads(out)["total_steps"] == 11
        assert not (tmp_path / "run").exists()

    def test_notes_say_what_was_translated(self, cli: Cli, tiny: list[str]) -> None:
        assert "lr is called learning_rate here" in cli("plan", *[w for w in tiny if "learning_rate" not in w], "lr=1e-4")[1]

    def test_facts_shows_machine_software_model_and_data(self, cli: Cli, tiny: list[str]) -> None:
        code, out, _ = cli("facts", *tiny)
        assert code == 0
        assert all(word in out for word in ("cores", "instructions", "measured fp32", "torch", "not usable", "parameters",
                                            "FLOPs per token", "sha256", "tokens per document"))

    def test_json_events_are_one_object_a_line(self, cli: Cli, tiny: list[str]) -> None:
        code, out, _ = cli("train", *tiny, "--json", "--output", "run")
        assert code == 0
        events = [json.loads(line) for line in out.splitlines()]
        assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, 12))
        assert events[-1]["event"] == "result"

    def test_quiet_prints_only_the_result(self, cli: Cli, tiny: list[str]) -> None:
        code, out, err = cli("train", *tiny, "--quiet", "--output", "run")
        assert code == 0
        assert err == ""
        assert "gzip -9 needs" in out
        assert "the plan expected" in out
        assert "powertrain generate run" in out

    def test_generate_continues_a_prompt_the_same_for_one_seed(self, cli: Cli, trained: Path) -> None:
        first = cli("generate", "runs/one", "--prompt", "line", "--tokens", "20", "--seed", "3", folder=trained)
        assert first[0] == 0
        assert first[1].startswith("line")
        assert cli("generate", "runs/one", "--prompt", "line", "--tokens", "20", "--seed", "3", folder=trained) == first
        assert cli("generate", "runs/one/model", "--prompt", "line", "--tokens", "20", "--seed", "3", folder=trained) == first

    def test_generate_refuses_what_it_cannot_read(self, cli: Cli, trained: Path) -> None:
        assert_refused(cli("generate", "runs/one", "--prompt", "€", folder=trained), "€")
        assert_refused(cli("generate", "nowhere", folder=trained), "does not exist")
        (trained / "other").mkdir()
        assert_refused(cli("generate", "other", folder=trained), "neither a run nor a model")

    def test_evaluate_gives_the_runs_own_figure_again(self, cli: Cli, trained: Path) -> None:
        code, out, _ = cli("evaluate", "runs/one", "--json", folder=trained)
        assert code == 0
        lines = [json.loads(line) for line in (trained / "runs/one/events.jsonl").read_text().splitlines()]
        last = [line for line in lines if line["event"] == "evaluation"][-1]
        assert json.loads(out)["loss"] == pytest.approx(last["loss"], rel=1e-6)

    def test_evaluate_reads_any_text(self, cli: Cli, trained: Path) -> None:
        code, out, _ = cli("evaluate", "runs/one/model", "--data", "text.txt", "--json", folder=trained)
        assert code == 0
        assert json.loads(out)["bits_per_byte"] > 0
        assert_refused(cli("evaluate", "runs/one/model", folder=trained), "--data PATH")

    def test_runs_list_and_show(self, cli: Cli, trained: Path) -> None:
        code, out, _ = cli("runs", "list", folder=trained)
        assert code == 0
        assert "runs/one" in out
        assert "finished" in out
        assert "11/11" in out
        code, out, _ = cli("runs", "show", "runs/one", folder=trained)
        assert code == 0
        assert all(word in out for word in ("Plan", "bf16", "Held-out", "Speed"))
        assert_refused(cli("runs", "show", "runs/two", folder=trained), "does not exist")
        assert_refused(cli("runs", "list", "elsewhere", folder=trained), "no runs in elsewhere")

    def test_a_closed_pipe_is_no_failure(self, tiny: list[str], cache: Path, tmp_path: Path) -> None:
        command = f"{sys.executable} -m powertrain runs list --help | true; echo ${{PIPESTATUS[0]}}"
        found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert "Traceback" not in found.stderr


def test_loss_that_is_not_finite_stops_the_run_with_the_cure(cli: Cli, tiny: list[str], tmp_path: Path) -> None:
    words = [w for w in tiny if "learning_rate" not in w]
    found = cli("train", *words, "learning_rate=1e30", "max_grad_norm=0", "--output", "run")
    assert_refused(found, "not finite", code=1)
    lines = (tmp_path / "run" / "events.jsonl").read_text()
    assert "NaN" not in lines
    error = json.loads(lines.splitlines()[-1])["error"]
    assert (error["kind"], error["loss"] in ("nan", "inf")) == ("loss_not_finite", True)


def test_a_run_whose_held_out_loss_is_not_finite_in_the_end_fails_and_writes_no_model(cli: Cli, tmp_path: Path) -> None:
    """The weights may be finite, and each step that is not may have been taken back."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    words = ["data=text.txt", "data.tokenizer=char", "data.block=16", "model.family=gpt2", "model.layers=1", "model.width=16",
             "model.heads=2", "train_time_s=null", "max_steps=6", "eval_steps=0", "save_steps=2", "sample.tokens=0",
             "learning_rate=1e8", "max_grad_norm=0", "on_nan=rewind", "techniques.threads=off"]
    found = cli("train", *words, "--output", "run")
    assert_refused(found, "held-out loss after step 6 is not finite", code=1)
    assert not (tmp_path / "run" / "model").exists()


def test_the_embedded_recipe_trains_on_text_without_the_characters_of_its_own_prompt(
        cli: Cli, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "verse.txt").write_text("to be or not to be that is the question\n" * 40)
    words = [word for word in tiny if not word.startswith(("data=", "sample.prompt", "max_steps"))]
    code, out, err = cli("train", "data=verse.txt", *words, "data.tokenizer=char", "max_steps=2", "--output", "run")
    assert code == 0, err
    assert "Sample" in out


def test_a_run_of_a_given_time_gets_its_steps_from_a_probe(cli: Cli, tiny: list[str], tmp_path: Path) -> None:
    words = [w for w in tiny if not w.startswith(("max_steps", "train_time_s"))]
    code, _, err = cli("train", *words, "train_time_s=0.5", "--output", "run")
    assert code == 0, err
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "# planner: 0.5 s at" in recipe
    assert "train_time_s: null" in recipe


@pytest.mark.parametrize(("recipe", "words"), [
    ("default", []), ("docstrings", ["model.path=runs/one", "data=pairs.jsonl", "data.long_examples=cut", "data.end_token=s",
                    "data.chat_template=raw"]),
    ("char-shakespeare-cpu", ["model.layers=1", "model.width=32"])])
def test_a_run_begins_with_at_most_20_lines(cli: Cli, trained: Path, recipe: str, words: list[str], tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    rows = (json.dumps({"prompt": f"line {n % 7}{n % 3}{n % 5}", "completion": " says"}) for n in range(60))
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    tiny = [word for word in TINY if not word.startswith(("model.", "data.tokenizer"))]
    code, _, err = cli("train", recipe, "data=text.txt", *tiny, *words, "max_steps=1", "data.block=8", "--output", "run")
    assert code == 0, err
    lines = err.splitlines()
    beginning = lines[:next(place for place, line in enumerate(lines) if line.startswith("step 1/1"))]
    assert len(beginning) <= 20, err
    titles = [title for line in beginning if (title := line.partition(" ")[0]) and title != "..."]
    assert [title for title in titles if title != "Notes"] == ["Recipe", "Machine", "Data", "Model", "Run", "On", "Off",
                                                                "Expected", "Files"]
