"""`powertrain audit`: its reports agree, its exit code follows severity, and --apply writes a mended copy."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from powertrain.cli import auditing
from powertrain.cli.auditing import audit_files
from powertrain.records import WrongUse

BAD = """import torch
from rows import loader, losses
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for epoch in range(3):
    for batch in loader:
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        torch.cuda.empty_cache()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "last.pt")
"""
GOOD = BAD.replace("torch.cuda.empty_cache()", "optimizer.zero_grad()")
# two findings want the same argument: one renames it, the other leaves it out
ONE_LINE_TWICE = """from trl import SFTConfig, SFTTrainer
args = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=1,
    gradient_accumulation_steps=8,
    group_by_length=True,
    fp16=True, bf16=True, optim="adamw_torch",
)
SFTTrainer(model="Qwen/Qwen3-0.6B", args=args).train()
"""


def run(path: Path, *, apply: bool = False, destination: Path | None = None, **reports: Any) -> int:
    return audit_files(path, **reports, apply=apply, destination=destination, elsewhere=True)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(BAD, encoding="utf-8")
    return path


def test_all_reports_name_the_same_findings(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(script, as_json=True, sarif=tmp_path / "a.sarif", markdown=tmp_path / "a.md")
    found = json.loads(capsys.readouterr().out)
    rules = [finding["rule"] for finding in found["findings"]]
    assert rules[:2] == ["gradients_not_zeroed", "cache_emptied_in_loop"]
    assert (found["severity"], found["exit_code"]) == ("critical", 5)
    results = json.loads((tmp_path / "a.sarif").read_text())["runs"][0]["results"]
    assert [result["ruleId"] for result in results] == rules
    text = (tmp_path / "a.md").read_text()
    assert "### CRITICAL #1: Gradients are not set back before the next step, so they add up" in text
    assert "+         optimizer.zero_grad(set_to_none=True)" in text


@pytest.mark.parametrize(("line", "code"), [("torch.cuda.empty_cache()", 5), ("optimizer.zero_grad()", 0),
                                            ("optimizer.zero_grad(); losses.append(loss)", 4)])
def test_the_exit_code_follows_the_worst_finding(line: str, code: int, script: Path) -> None:
    script.write_text(BAD.replace("torch.cuda.empty_cache()", line), encoding="utf-8")
    assert run(script) == code


def test_the_patched_copy_parses_and_has_its_causes_taken_away(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(script, apply=True)
    copy = script.with_name("train.patched.py")
    ast.parse(copy.read_text())
    assert script.read_text() == BAD
    assert run(copy) == 0
    assert "+        optimizer.zero_grad(set_to_none=True)" in capsys.readouterr().out


def test_of_two_fixes_of_one_argument_one_is_made_and_the_other_named(
        script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(ONE_LINE_TWICE, encoding="utf-8")
    run(script, apply=True, destination=script.with_name("mended.py"))
    text = script.with_name("mended.py").read_text()
    assert 'train_sampling_strategy="group_by_length",' in text
    assert 'fp16=False, bf16=True, optim="adamw_torch_fused",' in text, "three findings change this one line"
    said = capsys.readouterr().out
    assert "Left out  length_grouping_without_effect: another fix changes the same place" in said
    assert "By hand   micro_batch_small" in said


def test_what_only_changes_the_training_a_little_is_left_to_its_owner(
        script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ONE_LINE_TWICE.replace("args = ", "from peft import LoraConfig\nlora = LoraConfig(r=8, lora_alpha=16, "
                                             "lora_dropout=0.1)\nargs = ")
    script.write_text(text, encoding="utf-8")
    run(script, apply=True)
    assert "lora_dropout=0.1" in script.with_name("train.patched.py").read_text()
    assert "Left out  lora_dropout_cost: the fix changes what is learned" in capsys.readouterr().out


def test_a_patched_copy_is_not_written_over_a_file(script: Path) -> None:
    run(script, apply=True)
    with pytest.raises(WrongUse, match="is there already"):
        run(script, apply=True)


def test_a_folder_is_audited_file_by_file_and_what_trains_nothing_is_named(
        script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.with_name("good.py").write_text(GOOD, encoding="utf-8")
    script.with_name("shapes.py").write_text("WIDTH = 3\n", encoding="utf-8")
    script.with_name("package.json").write_text('{"name": "x"}', encoding="utf-8")
    assert run(script.parent) == 5
    said = capsys.readouterr()
    assert said.out.count("(script: pytorch)") == 2
    assert "in 2 files" in said.out
    assert "package.json" in said.err
    assert "shapes.py: neither a training script" in said.err


@pytest.mark.parametrize(("name", "content", "says"), [
    ("notes.txt", b"x", "neither a script"), ("absent.py", None, "does not exist"), ("empty.py", b"", "trains nothing"),
    ("empty.yaml", b"", "sets nothing"), ("empty.json", b"{}", "sets nothing"),
    ("nothing.py", b"import torch\nx = 1\n", "trains nothing"), ("binary.py", b"\x9d\x00\xff", "is not UTF-8 text"),
    ("binary.yaml", b"\x9d\x00\xff", "is not UTF-8 text"),
    ("two.py", b'import os\n' + b'print "loss"\n' * 60, "two.py:2 is not Python"),
    ("nothing", "folder", "no training script or config in")])
def test_what_cannot_be_audited_is_refused_in_one_sentence(name: str, content: bytes | str | None, says: str,
                                                           tmp_path: Path) -> None:
    if content == "folder":
        (tmp_path / name).mkdir()
    elif isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(WrongUse, match=says) as error:
        run(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_report_never_overwrites_what_it_is_about(script: Path) -> None:
    with pytest.raises(WrongUse, match="is the audited file"):
        run(script, markdown=script)
    assert script.read_text() == BAD


def test_only_one_report_has_stdout(script: Path) -> None:
    with pytest.raises(WrongUse, match="can write to stdout"):
        run(script, markdown=Path("-"), sarif=Path("-"))


def test_the_markdown_goes_from_environment_to_next_action(script: Path, tmp_path: Path) -> None:
    script.write_text(ONE_LINE_TWICE, encoding="utf-8")
    run(script, markdown=tmp_path / "a.md")
    text = (tmp_path / "a.md").read_text()
    order = ["- **Machine**", "## Critical findings", "**Current status**", "**Why it matters here**", "**Expected effect**",
             "**Risk**", "**Fix**", "## Low findings", "## Plan", "### Phase 1.", "## Testing", "**Phase 1", "**Monitoring**",
             "powertrain diagnose RUN", "## What could not be determined", "## Conclusion", "**Next action**"]
    places = [text.find(words) for words in order]
    assert -1 not in places, order[places.index(-1)]
    assert places == sorted(places)


def test_a_script_that_trains_nothing_is_not_converted(tmp_path: Path) -> None:
    path = tmp_path / "answer.py"
    path.write_text("from transformers import pipeline\nprint(pipeline('text-generation')('Hello'))\n", encoding="utf-8")
    with pytest.raises(WrongUse, match="trains nothing: it makes no Trainer"):
        auditing.audit(path, to_recipe=True)
