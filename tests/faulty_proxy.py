"""A proxy before an S3 server or a hub that delays, cuts, corrupts and refuses."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EVER = 10**9
NOT_PASSED_ON = {"transfer-encoding", "connection", "content-length", "expect"}


@dataclass
class Fault:
    """What the proxy does to requests of a method (all where it is empty) whose path holds `key`, so many times."""

    kind: str                                # status, delay, cut_request, cut_answer, corrupt_request, corrupt_answer
    number: int = 0                          # the status, the milliseconds, or the byte
    method: str = ""
    key: str = ""
    times: int = EVER


@dataclass
class Proxy:
    """A proxy before a server."""

    url: str
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)        # method and path of each request
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fault_for(self, method: str, path: str) -> Fault:
        with self._lock:
            self.seen.append((method, path))
            for fault in self.faults:
                if fault.times and fault.method in ("", method) and fault.key in path:
                    fault.times -= 1
                    return fault
        return Fault("none")


@contextlib.contextmanager
def proxy_before(server: str) -> Iterator[Proxy]:
    """Yield a proxy before a server, host:port."""
    proxy = Proxy("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True       # else the content of an answer waits 40 ms for the ACK of its head

        def handle_any(self) -> None:
            fault, length = proxy.fault_for(self.command, self.path), int(self.headers.get("Content-Length") or 0)
            if fault.kind == "cut_request":
                self.rfile.read(min(fault.number, length))
                return self.cut()
            body = bytearray(self.rfile.read(length))
            if fault.kind == "delay":
                time.sleep(fault.number / 1e3)
            if fault.kind == "corrupt_request" and body:
                body[fault.number % len(body)] ^= 1
            if fault.kind == "status":
                return self.answer(fault.number, [], b"")
            ahead = http.client.HTTPConnection(server, timeout=30)
            ahead.request(self.command, self.path, bytes(body),
                          {name: value for name, value in self.headers.items() if name.lower() not in NOT_PASSED_ON})
            found = ahead.getresponse()
            content, headers = bytearray(found.read()), found.getheaders()
            ahead.close()
            if fault.kind == "corrupt_answer" and content:
                content[fault.number % len(content)] ^= 1
            if self.command == "HEAD":
                return self.answer(found.status, headers, b"", found.getheader("Content-Length", "0"))
            if fault.kind == "cut_answer":
                self.answer(found.status, headers, bytes(content[:fault.number]), str(len(content)))
                return self.cut()
            return self.answer(found.status, headers, bytes(content))

        def answer(self, status: int, headers: list[tuple[str, str]], content: bytes, length: str = "") -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in NOT_PASSED_ON:
                    self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def cut(self) -> None:
            self.close_connection = True

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass                             # a client that has gone

    http_server = Server(("127.0.0.1", 0), Handler)
    proxy.url = f"http://127.0.0.1:{http_server.server_address[1]}"
    thread = threading.Thread(target=http_server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        http_server.shutdown()
        http_server.server_close()
        thread.join()
