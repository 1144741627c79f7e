"""`powertrain ui` listens on this machine alone unless somebody asks for more, and says why where it cannot."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from powertrain.cli import page
from powertrain.records import WrongUse


@pytest.mark.parametrize(("words", "says"), [
    ({"host": "0.0.0.0"}, "every address"), ({"host": "::"}, "every address"), ({"host": ""}, "every address"),
    ({"host": "0.0.0.0", "allow_remote": True}, "every address"), ({"host": "192.0.2.1"}, "ssh -L"),
    ({"certificate": __file__}, "belong together"), ({"certificate": "/no/such", "key": __file__}, "does not exist")])
def test_it_refuses_with_a_cure(root, words, says):
    given = {name: Path(value) if name in ("certificate", "key") else value for name, value in words.items()}
    with pytest.raises(WrongUse, match=says):
        page.ui(**{"port": 8790, **given})


def test_a_port_that_is_taken_is_named(root):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(WrongUse, match="--port"):
            page.ui(port=other.getsockname()[1])


def test_what_only_looks_is_answered_and_nothing_else(root):
    asked = [["facts", "no-such-recipe"], ["train", "default"], ["claims", "list"]]
    done = subprocess.run([sys.executable, "-m", "powertrain", "answer"], capture_output=True, text=True, check=True,
                          input="".join(json.dumps(one) + "\n" for one in asked))
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["code"] for answer in answers] == [2, 2, 0]
    assert "no-such-recipe" in answers[0]["lines"][0]
    assert "more than look" in answers[1]["lines"][0]
    assert len(answers[2]["lines"]) > 20
    assert "Traceback" not in done.stderr
