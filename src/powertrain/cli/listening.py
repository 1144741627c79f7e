"""Where a server of this machine listens: the address, who reaches it, and the names that a request may call it by."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

from powertrain.records import WrongUse

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANYWHERE = ("0.0.0.0", "::", "")             # addresses of no machine: a browser's Host would never be one of them


def check_address(host: str, port: int, certificate: Path | None, key: Path | None, *, allow_remote: bool, what: str) -> None:
    """Raise WrongUse for an address that other machines reach unasked, and for half a pair of TLS files."""
    if host in ANYWHERE:
        raise WrongUse(f"--host {host!r} is every address of this machine; name the one that clients will use")
    if host not in LOOPBACK and not allow_remote:
        raise WrongUse(f"--host {host} lets other machines reach {what}; add --allow-remote if you want that, or use an SSH "
                       f"tunnel instead: ssh -L {port}:127.0.0.1:{port} THIS-MACHINE")
    if (certificate is None) != (key is None):
        raise WrongUse("--certificate and --key belong together; give both, or neither")
    for file in (certificate, key):
        if file is not None and not file.is_file():
            raise WrongUse(f"{file} does not exist")


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. Raises WrongUse where the port is taken or the address is not this machine's."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[:2], family=family, backlog=64)
    except OSError as error:
        raise WrongUse(f"{host}:{port} cannot be used ({error.strerror or error}); name another one with --port") from None


def names_of(host: str, port: int) -> list[str]:
    """Return the Host headers that mean this server; the last one is the address as it was named."""
    name = f"[{host}]" if ":" in host else host
    return [*dict.fromkeys(f"{one}:{port}" for one in ("127.0.0.1", "localhost", "[::1]") if one != name), f"{name}:{port}"]


def serve_at(app: Any, listener: socket.socket, certificate: Path | None, key: Path | None, *, most: int, lifespan: bool
             ) -> None:
    """Answer at the socket until an interrupt, for at most so many connections; no proxy's header is believed."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class ClosedWhenSilent(H11Protocol):
        """A connection that is closed where no request comes: silent ones would take the places of others."""

        def connection_made(self, transport: asyncio.Transport) -> None:         # type: ignore[override]
            super().connection_made(transport)
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    server = uvicorn.Server(uvicorn.Config(
        app, log_level="warning", server_header=False, limit_concurrency=most, timeout_graceful_shutdown=1,
        lifespan="on" if lifespan else "off", http=ClosedWhenSilent, ws="none", proxy_headers=False, ssl_certfile=certificate,
        ssl_keyfile=None if key is None else str(key)))
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
