"""Every command of docs/elsewhere.md is run, in its order: exports, the server with OpenAI's package, and pushes to a hub."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

import test_readme
from driver import run_cli
from hub_server import TOKEN, running_hub

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "elsewhere.md").read_text(encoding="utf-8")
KEY = "a-key-of-the-page-s-test"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


LINES = [line for block in blocks("sh") for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("elsewhere")
    tuned = ["train", "docstrings", *test_readme.QUICK_TUNING, "--output", "runs/docstrings"]
    for words in ([word for word in test_readme.BASE if word != "data.max_chars=4000"], tuned):
        code, _, err = run_cli(words, cache, path)
        assert code == 0, err
    return path


def test_the_page_shows_each_command() -> None:
    assert [line.split()[1] for line in LINES] == ["export"] * 4 + ["serve"] + ["push"] * 2


def test_models_are_exported_served_and_pushed(cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in LINES[:4]:
        code, out, err = run_cli(shlex.split(line)[1:], cache, folder)
        assert code == 0, f"{line}\n{err}"
        assert "Opens" in out
    assert "FROM ./gguf-F16.gguf" in (folder / "out" / "gguf" / "Modelfile").read_text()
    answer = served(shlex.split(LINES[4])[1:], cache, folder, blocks("python")[0])
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.endswith("\n")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with running_hub() as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        for line in LINES[5:]:
            done = subprocess.run([sys.executable, "-m", "powertrain", *shlex.split(line)[1:], "--json"], cwd=folder, text=True,
                                  capture_output=True, check=False, env={**os.environ, **environment})
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            assert TOKEN not in done.stdout + done.stderr
            assert json.loads(done.stdout)["private"] is True
        tuned, merged = hub.repositories["me/docstrings"], hub.repositories["me/docstrings-merged"]
    card = tuned.files["README.md"].decode()
    assert "base_model: ORG/BASE" in card
    assert "## Plan" in card
    assert str(folder) not in card
    assert json.loads(tuned.files["adapter_config.json"])["base_model_name_or_path"] == "ORG/BASE"
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(merged.files)


def served(words: list[str], cache: Path, folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run the page's program against its server, at a port that is free."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    environment = {**os.environ, "POWERTRAIN_SERVE_TOKEN": KEY, "POWERTRAIN_CACHE": str(cache)}
    server = subprocess.Popen([sys.executable, "-m", "powertrain", *words, "--port", port, "--json"], cwd=folder, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    try:
        assert server.stdout is not None
        told = json.loads(server.stdout.readline())
        assert told["url"] == f"http://127.0.0.1:{port}/v1"
        assert KEY not in str(told)
        return subprocess.run([sys.executable, "-c", program.replace("8791", port)], text=True, capture_output=True,
                              check=False, env=environment, timeout=120)
    finally:
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=60)
        assert "the server has ended" in err
        assert "Traceback" not in err
        assert server.returncode == 0
