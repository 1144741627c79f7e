"""`powertrain facts --share`: what an issue may show."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from powertrain.records.sharing import MARK, shareable

Cli = Callable[..., tuple[int, str, str]]
PRIVATE = ("/home/ann/secret/rows.jsonl", "~/rows.jsonl", "C:\\Users\\ann\\rows.jsonl",
           "GPU-12345678-90ab-cdef-1234-567890abcdef",
           "00:1a:2b:3c:4d:5e", "10.1.2.3", "serial number: 0324718", "hf_plantedSecret0123456789")
PUBLIC = ("NVIDIA H100 80GB HBM3", "2.13.0+cpu", "AMD EPYC 9R45", "5.1 TFLOP/s", "1,234,567", "tokens/s", "Qwen/Qwen2.5-0.5B",
          "byte", "x86_64", "570.86.15")


@pytest.mark.parametrize("text", PRIVATE)
def test_what_names_a_machine_a_user_or_a_file_is_left_out(text: str) -> None:
    found = shareable({"a": [f"measured with {text}, here"], text: text})
    assert text not in json.dumps(found, ensure_ascii=False).replace("\\\\", "\\")
    assert found["a"][0].startswith("measured with [")
    assert found["a"][0].endswith(", here")


@pytest.mark.parametrize("text", PUBLIC)
def test_what_an_issue_needs_stays(text: str) -> None:
    assert shareable(text) == text
    assert shareable((1, 2.5, None, True)) == (1, 2.5, None, True)


def test_names_of_machine_user_and_home_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "ann-laptop.lan")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(Path, "home", lambda: Path("/data/people/ann"))
    assert shareable("Ann on ann-laptop, /data/people/ann and annual") == f"{MARK} on {MARK}, {MARK} and annual"


def test_the_command_shares_no_path_and_says_what_it_left_out(cli: Cli, tiny: list[str], tmp_path: Path) -> None:
    for words in ((), ("--json", "--output", "facts.json")):
        code, out, err = cli("facts", "--share", *tiny, *words)
        assert code == 0, err
        assert "left out: names of this machine" in err
        assert str(tmp_path.parent.parent) not in out
        assert "cores" in out
    shared = json.loads((tmp_path / "facts.json").read_text())
    assert shared["hardware"]["fingerprint"] == shared["data"]["digest"] == shared["data"]["source"] == MARK
    assert shared["hardware"]["cores"] >= 0
