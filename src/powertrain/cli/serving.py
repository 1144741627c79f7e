"""`powertrain serve`: a trained model behind the OpenAI API, for the tools that people have."""

import contextlib
import os
import re
import secrets
from pathlib import Path
from typing import Annotated

import typer

from powertrain.cli import output as screen
from powertrain.cli.listening import LOOPBACK, check_address, listen_at, names_of, serve_at
from powertrain.cli.options import Base, Json, Model, Provider, say
from powertrain.records import WrongUse

PORT = 8791
TOKEN = "POWERTRAIN_SERVE_TOKEN"
FIT_TOKEN = re.compile(r"[\x21-\x7e]{16,256}")           # what a header can carry, and nobody guesses


def serve(model: Model,
          port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = PORT,
          host: Annotated[str, typer.Option(help="Address of this machine to listen at.")] = "127.0.0.1",
          name: Annotated[str | None, typer.Option(help="The model's name for clients (default: its folder's).")] = None,
          temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="Temperature of requests that name none.")] = 0.7,
          allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Let --host name an address that other machines "
                                                                            "reach.")] = False,
          certificate: Annotated[Path | None, typer.Option(help="TLS certificate, for --allow-remote.")] = None,
          key: Annotated[Path | None, typer.Option(help="The certificate's private key.")] = None,
          base: Base = None, provider: Provider = None, as_json: Json = False) -> None:
    """Serve a trained model to programs that speak the OpenAI API.

    It prints the address and the token (API key). POWERTRAIN_SERVE_TOKEN sets the token, which then stays the same.
    """
    from powertrain.serving.app import make_app
    from powertrain.serving.engine import Engine
    from powertrain.use.opening import open_model, refuse_no_writer

    check_address(host, port, certificate, key, allow_remote=allow_remote, what="the model")
    token = _token()
    with contextlib.closing(listen_at(host, port)) as listener:          # a port that is taken is said before a model is loaded
        opened = open_model(model, base=base, writes=True, provider=provider, say=say)
        refuse_no_writer(opened, model)
        if opened.task == "causal":
            try:
                say(f"chat template: {opened.template.name} ({opened.template.because})")
            except WrongUse as error:        # a model of characters, for example, still continues texts
                say(f"only /v1/completions can be asked: {error}")
        if host not in LOOPBACK:
            say(f"WARNING: other machines can reach {host}:{port}"
                + ("" if certificate else ", and without --certificate the token and all texts are sent unencrypted"))
        engine = Engine(opened, name or opened.found.path.resolve().name, temperature)
        with contextlib.closing(engine):
            hosts = names_of(host, port)
            address = f"{'https' if certificate else 'http'}://{hosts[-1]}/v1"
            is_given = TOKEN in os.environ                       # and not shown: the user has it
            screen.tell({"event": "serving", "model": engine.name, "url": address, "token": None if is_given else token},
                        [("Model", engine.name), ("Base URL", address),
                         ("API key", f"the one in {TOKEN}" if is_given else token), ("", "Ctrl-C ends the server")],
                        as_json=as_json)
            serve_at(make_app(engine, hosts, token), listener, certificate, key, most=200, lifespan=False)
    say("the server has ended")


def _token() -> str:
    """Return the token of the environment, or a new one. Raises WrongUse for one that is too short or no header's text."""
    given = os.environ.get(TOKEN)
    if given is not None and not FIT_TOKEN.fullmatch(given):
        raise WrongUse(f"{TOKEN} must have 16 to 256 visible ASCII characters; set another one, or unset it to get a new one")
    return given or secrets.token_urlsafe(24)
