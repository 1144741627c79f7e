"""`powertrain ui` listens on this machine alone unless somebody asks for more, and says why where it cannot."""

import contextlib
import http.client
import json
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from browser import Served, Visitor, chromium, wait_until
from runs_written import write_run

from powertrain.cli import page
from powertrain.cli.listening import serve_at
from powertrain.records import WrongUse
from powertrain.web.app import make_site


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


def test_a_folder_that_is_a_link_to_elsewhere_needs_to_be_allowed(root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (root / "runs").symlink_to(tmp_path / "elsewhere")
    limits = {"most_upload_bytes": 1000, "has_hub_token": False}
    with pytest.raises(WrongUse, match="--allow"):
        make_site(root, [], tmp_path / "cache", {}, **limits)
    make_site(root, [tmp_path / "elsewhere"], tmp_path / "cache", {}, **limits).jobs.close()


def test_there_is_no_way_to_leave_the_link_out(root, capsys):
    from powertrain.cli import main

    sys.argv, words = ["powertrain", "ui", "--no-auth"], sys.argv
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = words
    assert ended.value.code == 2


def asked(served, path="/jobs", context=None, **headers):
    """Return the status of an answer to a request with these headers, in place of those of a browser."""
    host = served.at.partition("://")[2]
    line = http.client.HTTPSConnection(host, served.port, timeout=20, context=context) if context else \
        http.client.HTTPConnection(host, served.port, timeout=20)
    try:
        line.putrequest("GET", path, skip_host="host" in headers)
        for name, values in headers.items():
            for value in [values] if isinstance(values, str) else values:
                line.putheader(name.replace("_", "-"), value)
        line.endheaders()
        return line.getresponse().status
    finally:
        line.close()


def test_no_proxys_header_is_believed(monkeypatch):
    ran = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: ran.append(server.config))
    with socket.socket() as unused:
        serve_at(None, unused, None, None, most=1, lifespan=False)
    assert not ran[0].proxy_headers


def test_it_listens_at_this_machine_alone_and_no_header_names_another(tmp_path):
    (tmp_path / "project").mkdir()
    served = Served(tmp_path / "project", tmp_path / "cache")
    own = f"127.0.0.1:{served.port}"
    try:
        assert {one.laddr.ip for one in psutil.Process(served.process.pid).net_connections()
                if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        assert asked(served) == 401          # whoever has no cookie
        assert asked(served, host=own, x_forwarded_host="evil.test", x_forwarded_proto="https", forwarded="host=evil") == 401
        assert asked(served, host="evil.test", x_forwarded_host=own, forwarded=f"host={own}") == 421
        assert asked(served, host=(own, "evil.test")) in (400, 421)
        assert asked(served, host=(own, own)) in (400, 421)
        assert asked(served, host="") in (400, 421)
        assert asked(served, path="http://evil.test/jobs", host="evil.test") == 421
    finally:
        served.end()


def test_connections_that_say_nothing_keep_nobody_out(tmp_path):
    (tmp_path / "project").mkdir()
    served = Served(tmp_path / "project", tmp_path / "cache")
    with contextlib.ExitStack() as silent:
        try:
            for _ in range(120):
                silent.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            assert asked(served) == 503
            wait_until(lambda: asked(served) == 401, 30.0)
        finally:
            served.end()


def test_over_tls_the_cookie_stays_encrypted_and_the_same_is_refused(tmp_path):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=page", "-addext",
                    "subjectAltName=IP:127.0.0.2", "-keyout", key, "-out", certificate], check=True, capture_output=True)
    write_run(tmp_path / "project" / "runs" / "one", 30)
    served = Served(tmp_path / "project", tmp_path / "cache", "--host", "127.0.0.2", "--allow-remote", "--certificate",
                    str(certificate), "--key", str(key), at="https://127.0.0.2")
    own, trusting = f"127.0.0.2:{served.port}", ssl.create_default_context(cafile=certificate)
    try:
        printed = Path(served.log.name).read_text()
        assert f"other machines can reach {own}" in printed
        assert "unencrypted" not in printed
        assert asked(served, context=trusting) == 401
        assert asked(served, context=trusting, host="evil.test", x_forwarded_host=own) == 421
        assert asked(served, context=trusting, origin=f"http://{own}") == 403            # the same place, but in the clear
        with pytest.raises((http.client.HTTPException, OSError)):
            asked(served)                    # in the clear
        with chromium() as browser:
            visitor = Visitor(browser, served, ignore_https_errors=True)
            (cookie,) = visitor.context.cookies()
            assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")
            found = visitor.go("/runs/one")
            assert found.locator("[data-field=step]").first.text_content() == "30"
            found = visitor.go("/new?recipe=default")
            found.get_by_label("Data", exact=True).fill("none.txt")
            wait_until(lambda: "none.txt" in found.locator("#plan").text_content())      # a change, from its own origin
            assert not visitor.complaints
            assert not visitor.violations()
            visitor.context.close()
    finally:
        served.end()


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
