"""`powertrain ui`: the page, and the process that answers its quick questions."""

import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from powertrain.cli import output as screen
from powertrain.cli.listening import LOOPBACK, check_address, listen_at, names_of, serve_at
from powertrain.cli.options import Json, cache_folder, say
from powertrain.records import WrongUse

PORT = 8790
MOST_UPLOAD_BYTES = 4 << 30
ASKED = ("plan", "facts", "data", "audit", "diagnose", "claims", "page")        # commands that only look


def ui(port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page.")] = PORT,
       host: Annotated[str, typer.Option(help="Address of this machine to listen at.")] = "127.0.0.1",
       allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Let --host name an address that other machines "
                                                                         "reach.")] = False,
       allow: Annotated[list[Path] | None, typer.Option(help="A folder besides this one whose files the page may read (may be "
                                                             "repeated).")] = None,
       certificate: Annotated[Path | None, typer.Option(help="TLS certificate, for --allow-remote.")] = None,
       key: Annotated[Path | None, typer.Option(help="The certificate's private key.")] = None) -> None:
    """Show the page: start, watch and use runs in a browser.

    It prints a link that works once. Runs go on when the page ends, and a new page finds them.
    """
    from huggingface_hub import get_token

    from powertrain.web.app import make_app, make_site

    check_address(host, port, certificate, key, allow_remote=allow_remote, what="the page")
    if host not in LOOPBACK:
        say(f"WARNING: other machines can reach {host}:{port}; the link below lets whoever has it run trainings here"
            + ("" if certificate else ", and without --certificate everything is sent unencrypted"))
    listener, hosts = listen_at(host, port), names_of(host, port)
    address = f"{'https' if certificate else 'http'}://{hosts[-1]}"
    site = make_site(Path.cwd(), [folder.resolve() for folder in allow or []], cache_folder() / "page", dict(os.environ),
                     most_upload_bytes=MOST_UPLOAD_BYTES, has_hub_token=bool(get_token()))

    def print_link() -> None:
        print(f"Open {address}/enter#t={site.sessions.token} (works once, for one browser; Ctrl-C ends the page)", flush=True)

    app = make_app(site, hosts, encrypted=certificate is not None, print_link=print_link)
    site.jobs.name_address(address)
    print_link()
    with contextlib.closing(site.jobs):
        serve_at(app, listener, certificate, key, most=100, lifespan=True)
    say("the page has ended; what it started goes on, and `powertrain ui` finds it again")


def page(folder: Annotated[Path, typer.Argument(help="Folder of a run or a study.")], as_json: Json = False) -> None:
    """Print the report of a run's or a study's folder as a part of a page."""
    from powertrain.cli.reporting import read_page
    from powertrain.report import formats

    html = formats.body(read_page(folder))
    screen.tell({"event": "page", "html": html}, [(html,)], as_json=as_json)


def answer() -> None:
    """Answer questions that change nothing, a line of JSON words each, in one process. For the page's own use."""
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = _reply(json.loads(line))
        print(json.dumps({"code": code, "lines": printed.getvalue().splitlines()}), flush=True)


def _reply(words: Sequence[str]) -> int:
    from powertrain.cli import app

    try:
        if words[0] not in ASKED:
            raise WrongUse(f"{words[0]} does more than look")
        return app([*words, "--json"], prog_name="powertrain", standalone_mode=False) or 0
    except KeyboardInterrupt:
        raise
    except BaseException as error:           # a panic of a library's Rust code is no Exception
        if (code := screen.explain(error, as_json=True)) is None:
            traceback.print_exc()
        return code or 1
