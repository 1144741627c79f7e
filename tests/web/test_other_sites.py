"""What a page of another site can do in a browser that has the cookie: nothing, from another port of this address either."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import Served, Visitor, chromium
from runs_written import write_run

FETCHES = """async (address) => {
  const heard = [], asked = [["/runs", "GET", ""], ["/try", "POST", "text/plain"], ["/try", "POST", "application/json"],
                             ["/runs/one/stop", "POST", "text/plain"]];
  for (const mode of ["no-cors", "cors"]) for (const [path, method, type] of asked) {
    const sent = method === "GET" ? {} : {headers: {"content-type": type}, body: '{"how": "now"}'};
    try {
      const answer = await fetch(address + path, {method, mode, credentials: "include", ...sent});
      heard.push(answer.type === "opaque" ? "" : await answer.text());
    } catch { heard.push(""); }
  }
  return heard;
}"""


@pytest.fixture
def foreign() -> Iterator[str]:
    """Yield the address of a page with a form that is sent to the address behind its `?`."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (f'<form method="post" enctype="text/plain" action="{self.path.partition("?")[2]}/try">'
                    '<input name=\'{"a": "\' value=\'"}\'></form>').encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_another_site_reads_nothing_and_starts_nothing(foreign: str, tmp_path: Path) -> None:
    write_run(tmp_path / "project" / "runs" / "one", 3)
    served = Served(tmp_path / "project", tmp_path / "cache")
    try:
        with chromium() as browser:
            visitor = Visitor(browser, served)
            for address in (foreign, foreign.replace("127.0.0.1", "localhost")):         # the first one sends the cookie
                visitor.page.goto(f"http://{address}/?{served.address}")
                assert set(visitor.page.evaluate(FETCHES, served.address)) == {""}
                visitor.page.evaluate("document.forms[0].submit()")
                visitor.page.get_by_text("Another site sent this request").wait_for()
            answer = visitor.page.goto(served.address.replace("127.0.0.1", "evil.localhost") + "/runs")      # of this machine
            assert answer
            assert answer.status == 421
            assert visitor.go("/runs").get_by_role("link", name="one", exact=True).count() == 1     # its owner may go on
            visitor.context.close()
        assert not list((served.folder / "jobs").glob("*.json"))
        assert [run.name for run in (served.folder / "runs").iterdir()] == ["one"]
    finally:
        served.end()
