"""What every request must have before the page looks at it, and what every answer carries.

The rules and their tests: docs/page.md, "What keeps others out".
"""

import asyncio
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from powertrain.web.sessions import Sessions

COOKIE = "powertrain"
OPEN_PATHS = ("/enter", "/static/")          # for who has no cookie yet
MOST_JSON_BYTES = 1 << 20
SILENCE_S = 20.0             # a body that sends nothing for so long is given up
ANSWERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
                               "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin"}
HEADERS = [(name.lower().encode(), value.encode()) for name, value in ANSWERS.items()]


class Guard:
    """Refuses a request that another site, another user or another program may have sent."""

    def __init__(self, app: ASGIApp, sessions: Sessions, hosts: Iterable[str], *, encrypted: bool, most_upload_bytes: int):
        self.app, self.sessions, self.hosts = app, sessions, frozenset(hosts)
        self.scheme = "https" if encrypted else "http"
        self.most_upload_bytes = most_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS]
                if not any(name.lower() == b"cache-control" for name, _ in message["headers"]):
                    message["headers"].append((b"cache-control", b"no-store"))
            await send(message)

        refused = self._refusal(scope, headers := Headers(scope=scope))
        if refused is not None:
            await refused(scope, receive, send_guarded)
            return
        most = self.most_upload_bytes if scope["method"] == "PUT" else MOST_JSON_BYTES
        if scope["method"] in ("POST", "PUT"):
            receive = _limited(receive, most, headers.get("content-length", ""))
        await self.app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the answer to a request that may go no further; None for one that may."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return PlainTextResponse("This is not the page's address; open the link that `powertrain ui` printed.", 421)
        own = f"{self.scheme}://{hosts[0]}"
        origins, change = headers.getlist("origin"), scope["method"] in ("POST", "PUT")
        if any(origin != own for origin in origins) or headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return PlainTextResponse("Another site sent this request; type the page's address into the browser instead.", 403)
        if scope["method"] not in ("GET", "HEAD", "POST", "PUT"):
            return PlainTextResponse("The page has no such method.", 405)
        if change and len(origins) != 1:
            return PlainTextResponse("A change needs the header Origin with the page's own address.", 403)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if change and kind != ("application/json" if scope["method"] == "POST" else "application/octet-stream"):
            return PlainTextResponse("A change is sent as application/json, a file as application/octet-stream.", 415)
        if not scope["path"].startswith(OPEN_PATHS) and not self.sessions.is_good(_cookie(headers)):
            return PlainTextResponse("Open the link that `powertrain ui` printed in the terminal: this browser has not used it "
                                     "yet, or longer than a month ago.", 401)
        return None


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _limited(receive: Receive, most_bytes: int, told_bytes: str) -> Receive:
    """Return a receiver of a body that ends with 413 where it is larger, and with 408 where it stops coming."""
    taken, over = 0, False

    async def receive_some() -> Message:
        nonlocal taken, over
        if over:                             # what comes now is that the client has gone: it may take long
            return await receive()
        if told_bytes.isdecimal() and int(told_bytes) > most_bytes:
            raise HTTPException(413, f"This is larger than the page takes ({most_bytes:,} bytes).")
        try:
            message = await asyncio.wait_for(receive(), SILENCE_S)
        except TimeoutError:
            raise HTTPException(408, f"Nothing came for {SILENCE_S:.0f} seconds; send it again.") from None
        taken += len(message.get("body", b""))
        over = not message.get("more_body", False)
        if taken > most_bytes:
            raise HTTPException(413, f"This is larger than the page takes ({most_bytes:,} bytes).")
        return message

    return receive_some
