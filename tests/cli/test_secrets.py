"""No secret reaches an output, a file of a run, or the list of processes: some are planted, and looked for everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from powertrain.records.event_log import EventLog
from powertrain.records.events import End
from powertrain.records.redaction import MARK, holds_a_secret, redacted

Cli = Callable[..., tuple[int, str, str]]

NEVER = "planted" + "Secret0123456789"       # in each of them, so that one search finds all
SECRETS = {
    "Hugging Face": f"hf_{NEVER}abcdefgh", "GitHub": f"ghp_{NEVER}abcdefgh", "AWS": "AKIAPLANTEDSECRET012",
    "OpenAI": f"sk-{NEVER}",
    "userinfo": f"https://me:{NEVER}@example.test/data.jsonl", "token for a user": f"https://{NEVER}@example.test/x",
    "query": f"https://example.test/data.jsonl?token={NEVER}", "signature": f"s3://b/k?x=1&X-Amz-Signature={NEVER}",
    "a variable": f"WANDB_API_KEY={NEVER}", "JSON": json.dumps({"HF_TOKEN": NEVER}), "header": f"Authorization: Bearer {NEVER}",
    "JSON web token": f"eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.{NEVER}"}
FINE = ("Qwen/Qwen2.5-0.5B", "https://example.test/a?page=2&token_count=3", "me@example.test", "data/key=value.txt",
        "hf_model", "tokens/s: 1,234,567", "sk-learn", "~/.cache/huggingface/token", "HF_TOKEN is not set")


@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS)
def test_a_secret_is_taken_out_of_a_text(text: str) -> None:
    for told in (redacted(text), redacted(f"cannot read {text}, and neither {text!r}"), redacted(json.dumps({"x": text}))):
        assert NEVER not in told
        assert SECRETS["AWS"] not in told
        assert MARK in told
    json.loads(redacted(json.dumps({"x": text})))


@pytest.mark.parametrize("text", FINE)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text
    assert not holds_a_secret(text)


def test_a_long_text_takes_no_long_time() -> None:
    began = time.process_time()
    for text in ("://" * 200_000, "?token" * 100_000, "eyJ" * 200_000, "://" + "a" * 10**6, "hf_" * 200_000):
        redacted(text)
    assert time.process_time() - began < 10


def test_events_are_written_without_secrets(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(End(reason="failed", message=f"could not ask {SECRETS['userinfo']}"))
    log.flush()
    assert log.failure is None
    assert NEVER not in (tmp_path / "events.jsonl").read_text()
    assert json.loads((tmp_path / "events.jsonl").read_text())["message"].startswith("could not ask https://[")


@pytest.mark.parametrize("command", [("train", "--output", "run"), ("plan",), ("facts",), ("diagnose",)],
                         ids=lambda words: str(words[0]))
@pytest.mark.parametrize("word", [f"data={SECRETS['userinfo']}", f"data={SECRETS['query']}",
                                  f"model.path={SECRETS['token for a user']}", f"name={SECRETS['Hugging Face']}",
                                  f"description={SECRETS['a variable']}", f"hub_token={SECRETS['Hugging Face']}"])
def test_a_word_with_a_secret_is_refused_and_not_shown(cli: Cli, tmp_path: Path, command: tuple[str, ...], word: str) -> None:
    code, out, err = cli(*command, word)
    assert code == 2, err
    assert NEVER not in out + err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_an_audit_shows_no_secret_of_a_script(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        f"from huggingface_hub import login\nlogin('{SECRETS['Hugging Face']}')\n"
        "from transformers import Trainer, TrainingArguments\n"
        f"args = TrainingArguments(output_dir='x', num_train_epochs=3, hub_token='{SECRETS['Hugging Face']}', fp16=True)\n"
        "Trainer(model=model, args=args, train_dataset=rows).train()\n")
    for words in ((), ("--json",), ("--sarif", "x.sarif", "--markdown", "x.md"), ("--sarif", "-")):
        code, out, err = cli("audit", "train.py", *words)
        assert code in (0, 4, 5), err
        assert NEVER not in out + err
    assert NEVER not in (tmp_path / "x.sarif").read_text() + (tmp_path / "x.md").read_text()


def command_lines(marker: str) -> list[str]:
    """Return the command lines and nothing else of all processes of this machine that name the marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in found if marker in line]


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="lists processes by /proc, as Linux has it")
def test_a_token_of_the_environment_is_in_no_file_output_or_list_of_processes(tiny: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "POWERTRAIN_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1",
                   **dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"), NEVER)}
    told, seen = "", []
    for words in (["train", *tiny, "--output", "run", "--quiet"], ["report", "run"], ["runs", "show", "run", "--json"],
                  ["facts", *tiny, "--output", "facts.json"], ["facts", "--share", *tiny], ["plan", "model.path=some/model"]):
        process = subprocess.Popen([sys.executable, "-m", "powertrain", *words], cwd=tmp_path, env=environment, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        while process.poll() is None and (words[0] == "train"):
            seen += command_lines("powertrain")
            time.sleep(0.2)
        told += process.communicate()[0]
        assert process.returncode == (2 if words[0] == "plan" else 0), told
    assert seen
    assert not [line for line in seen if NEVER in line]
    assert NEVER not in told
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"recipe.yaml", "events.jsonl", "facts.json", "plan.json"} <= {path.name for path in written}
    assert not [path for path in written if NEVER.encode() in path.read_bytes()]
