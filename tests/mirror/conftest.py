"""An S3 server in a process of its own with a faulty proxy before it, a bucket in it, and the addresses of runs."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from made_sets import SECRET
from watched_runs import Started, weights

import driver
from driver import TINY, Fault
from faulty_proxy import Proxy, proxy_before
from powertrain.mirror.waiting import Settings

driver.PRELOADED += ["s3fs"]                 # a second less for each process that uses the store


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address, host:port, of an S3 server in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def proxy_of_all(server: str) -> Iterator[Proxy]:
    with proxy_before(server) as proxy:
        yield proxy


@pytest.fixture
def credentials(proxy_of_all: Proxy) -> dict[str, str]:
    """The environment of a process that may use the S3 server."""
    return {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": proxy_of_all.url, "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1"}


@pytest.fixture
def proxy(proxy_of_all: Proxy, credentials: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy without faults, and this process with credentials for it."""
    proxy_of_all.faults, proxy_of_all.seen = [], []
    for name, value in credentials.items():
        monkeypatch.setenv(name, value)
    yield proxy_of_all
    proxy_of_all.faults = []
    _forget_file_systems()


@pytest.fixture
def bucket(proxy: Proxy) -> str:
    """The address of a new bucket."""
    name = f"b{secrets.token_hex(6)}"
    with urllib.request.urlopen(urllib.request.Request(f"{proxy.url}/{name}", method="PUT", headers={
            "Authorization": "AWS4-HMAC-SHA256 Credential=somebody/20260101/us-east-1/s3/aws4_request"})):
        pass
    _forget_file_systems()
    return f"s3://{name}"


def _forget_file_systems() -> None:
    """fsspec keeps one file system for the same arguments, with its connections, whatever the environment says now."""
    for kind in (AbstractFileSystem, *AbstractFileSystem.__subclasses__()):
        kind.clear_instance_cache()
    if "s3fs" in sys.modules:
        sys.modules["s3fs"].S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["file", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run's address in a folder, and in the S3 server."""
    if request.param == "file":
        return f"file://{tmp_path}/store/run"
    return f"{request.getfixturevalue('bucket')}/runs/run"


@pytest.fixture
def settings(address: str) -> Settings:
    return Settings(address, "this-run")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture
def start(cache: Path, tmp_path: Path, credentials: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Starts `powertrain WORDS`, with credentials for the S3 server; a failed test leaves no run behind."""
    processes = []

    def started(*words: str, fault: Fault | None = None, folder: Path = tmp_path) -> Any:
        found = driver.start([str(word) for word in words], cache, folder, fault, credentials)
        processes.append(found[0])
        return found

    yield started
    for process in processes:
        process.kill()


@pytest.fixture
def powertrain(start: Callable[..., Any]) -> Started:
    """Runs `powertrain WORDS`: (exit code, stdout, stderr)."""

    def run(*words: str, **named: Any) -> tuple[int, str, str]:
        process, out, err = start(*words, **named)
        process.join(240)
        assert not process.is_alive(), err.read_text()
        return process.exitcode, out.read_text(), err.read_text()

    return run


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def unbroken(text: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("unbroken")
    code, _, err = driver.run_cli(["train", f"data={text}", *TINY, "--output", "run"], cache, folder)
    assert code == 0, err
    return weights(folder / "run")


@pytest.fixture
def words(text: Path) -> list[str]:
    return ["train", f"data={text}", *TINY, "--output", "run"]
