"""A page that is really served, and a real browser that looks at it."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

INSTALL = ("these tests drive Debian's Chromium, which is not on this machine; install it with `apt-get install chromium`, "
           "or name another one in CHROMIUM")
WAIT_S = 60.0
VIOLATIONS = """document.addEventListener('securitypolicyviolation', e => {
  (window.violations ||= []).push(`${e.violatedDirective} ${e.blockedURI} ${e.sample}`)})"""


@contextmanager
def chromium() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""
    assert Path(path).is_file(), INSTALL
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[
            "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--no-first-run"])
        yield browser
        browser.close()


class Served:
    """`powertrain ui` in a process of its own. It may be killed and started again at the same address."""

    def __init__(self, folder: Path, cache: Path, *words: str, at: str = "http://127.0.0.1"):
        self.folder, self.cache, self.port, self.words, self.at = folder, cache, _free_port(), words, at
        self.process: subprocess.Popen[str] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"{self.at}:{self.port}"

    def start(self) -> None:
        log = self.folder.parent / f"{self.folder.name}.log"
        self.log = open(log, "a+", encoding="utf-8")  # noqa: SIM115
        begin = self.log.seek(0, os.SEEK_END)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "powertrain", "ui", "--port", str(self.port), *self.words], cwd=self.folder, text=True,
            stdout=self.log, stderr=subprocess.STDOUT, env={**os.environ, "POWERTRAIN_CACHE": str(self.cache)})

        def found() -> str | None:
            self.log.seek(begin)
            printed = re.search(r"Open (\S+)", self.log.read())
            assert self.process is not None
            assert self.process.poll() is None, log.read_text()
            return printed[1] if printed else None

        wait_until(found)

    @property
    def link(self) -> str:
        """Return the newest link: each works once."""
        return re.findall(r"Open (\S+)", Path(self.log.name).read_text())[-1]

    def kill(self) -> None:
        """End the server as a power failure would; what it started goes on."""
        assert self.process
        self.process.kill()
        self.process.wait()
        self.log.close()

    def end(self) -> None:
        """End the server and all that it started."""
        if self.process and self.process.poll() is None:
            self.kill()
        for path in (self.folder / "jobs").glob("*.json"):
            job = json.loads(path.read_text())
            if job["state"] == "running":
                with suppress(ProcessLookupError):
                    os.killpg(job["pid"], signal.SIGKILL)


class Visitor:
    """A browser that has used the link, and what it complains about."""

    def __init__(self, browser: Browser, served: Served, **settings: Any):
        self.served = served
        self.context: BrowserContext = browser.new_context(**settings)
        self.context.set_default_timeout(WAIT_S * 1000)
        self.context.add_init_script(VIOLATIONS)
        self.complaints: list[str] = []
        self.page = self.new_page()
        self.page.goto(served.link)
        self.page.wait_for_url(f"{served.address}/", timeout=15_000)

    def new_page(self) -> Page:
        page = self.context.new_page()
        page.on("console", lambda message: self.complaints.append(message.text)
                if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.complaints.append(f"foreign request {request.url}")
                if not request.url.startswith((self.served.address, "data:")) else None)
        return page

    def go(self, path: str) -> Page:
        self.page.goto(self.served.address + path)
        return self.page

    def violations(self) -> list[str]:
        found: list[str] = self.page.evaluate("window.violations || []")
        return found


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def wait_until(ask: Callable[[], Any], seconds: float = WAIT_S) -> Any:
    """Return what `ask` returns as soon as it is something."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := ask():
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing came of it within {seconds:g} s")
