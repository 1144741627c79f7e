"""The OpenAI API over HTTP for one model: its addresses, who may ask, streamed answers, and errors as OpenAI's.

Every request needs the token and a Host that names this server. No answer allows another site to read it (CORS), so that a page
of elsewhere in a browser cannot ask.
Source: the API reference of platform.openai.com (models, chat completions, completions, streaming, error codes).
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from powertrain.records import RunFailed, WrongUse
from powertrain.serving.asking import Asked, Refused, read_request
from powertrain.serving.engine import Ended, Engine

MOST_BODY_BYTES = 4 << 20
SILENCE_S = 20.0             # a body that sends nothing for so long is given up
KINDS = {401: "invalid_request_error", 429: "rate_limit_error", 500: "server_error"}
SECURE = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


def make_app(engine: Engine, hosts: Iterable[str], token: str) -> ASGIApp:
    """Return the API as an ASGI application that answers to these hosts, and to whoever has the token."""
    routes = [Route("/v1/models", list_models), Route("/v1/models/{name:path}", show_model),
              Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/completions", complete, methods=["POST"])]
    app = Starlette(routes=routes, exception_handlers={
        WrongUse: refuse, RunFailed: refuse, HTTPException: refuse, ClientDisconnect: nobody, Exception: confess})
    app.state.engine, app.state.began = engine, int(time.time())
    return Guard(app, hosts, token)


class Guard:
    """Refuses a request for another host's name, or without the token."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str], token: str):
        self.app, self.hosts, self.expected = app, frozenset(hosts), f"bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := self._refusal(Headers(scope=scope))) is not None:
            await refused(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refusal(self, headers: Headers) -> Response | None:
        hosts, (kind, _, token) = headers.getlist("host"), headers.get("authorization", "").partition(" ")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return problem(421, "this is not the server's address; use the one that `powertrain serve` printed")
        if not hmac.compare_digest(f"{kind.lower()} {token.strip()}".encode(), self.expected):
            refused = problem(401, "the token is missing or wrong; give the one that `powertrain serve` printed as the API key "
                                   "(Authorization: Bearer TOKEN)", code="invalid_api_key")
            refused.headers["WWW-Authenticate"] = "Bearer"
            return refused
        return None


# ------------------------------------------------------------------------------------------------ models


def list_models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_model(request)]}, headers=SECURE)


def show_model(request: Request) -> Response:
    if request.path_params["name"] != request.app.state.engine.name:
        raise Refused(f"the model {request.path_params['name'][:100]!r} is not served here; ask for "
                      f"{request.app.state.engine.name!r}", param="model", code="model_not_found", status=404)
    return JSONResponse(_model(request), headers=SECURE)


def _model(request: Request) -> dict[str, Any]:
    state = request.app.state
    return {"id": state.engine.name, "object": "model", "created": state.began, "owned_by": "powertrain"}


# ------------------------------------------------------------------------------------------------ answers


async def chat(request: Request) -> Response:
    return await _answered(request, is_chat=True)


async def complete(request: Request) -> Response:
    return await _answered(request, is_chat=False)


async def _answered(request: Request, *, is_chat: bool) -> Response:
    engine: Engine = request.app.state.engine
    asked = read_request(await _body(request), model=engine.name, is_chat=is_chat)
    engine.refuse_if_full()
    answer = Answer(engine, asked)
    if asked.is_streamed:
        return StreamingResponse(answer.events(), media_type="text/event-stream", headers=SECURE)
    whole, gone = asyncio.create_task(answer.whole()), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(whole.result(), headers=SECURE) if whole.done() else nobody(request, ClientDisconnect())
    finally:
        whole.cancel()                       # nobody waits for the answer any more
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> Any:
    """Return the request's JSON. Raises HTTPException for a body that is too large, too slow, or no JSON."""
    body = bytearray()
    pieces = request.stream()
    while True:
        try:
            body += await asyncio.wait_for(anext(pieces), SILENCE_S)
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise HTTPException(408, f"nothing came for {SILENCE_S:.0f} seconds; send the request again") from None
        if len(body) > MOST_BODY_BYTES:
            raise HTTPException(413, f"the request is larger than {MOST_BODY_BYTES:,} bytes; shorten it")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON; send a JSON object in UTF-8") from None


class Answer:
    """One answer, whole or as a stream of events."""

    def __init__(self, engine: Engine, asked: Asked):
        self.engine, self.asked, self.prompt = engine, asked, engine.read(asked)
        kind = "chat.completion" if asked.is_chat else "text_completion"
        self.head = {"id": f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}", "object": kind,
                     "created": int(time.time()), "model": engine.name}

    async def whole(self) -> dict[str, Any]:
        pieces: list[str] = []
        end = Ended("length", 0)
        async with contextlib.aclosing(self.engine.answer(self.asked, self.prompt)) as parts:
            async for part in parts:
                if isinstance(part, Ended):
                    end = part
                else:
                    pieces.append(part)
        text = "".join(pieces)
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.asked.is_chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": end.reason}
        return {**self.head, "choices": [choice], "usage": self._usage(end)}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events, as OpenAI's clients read them; an error on the way is an event too."""
        usage = {"usage": None} if self.asked.counts_tokens else {}
        head = {**self.head, **usage, **({"object": "chat.completion.chunk"} if self.asked.is_chat else {})}
        end = Ended("length", 0)
        try:
            if self.asked.is_chat:
                yield _event({**head, "choices": [_chunk({"delta": {"role": "assistant", "content": ""}})]})
            async with contextlib.aclosing(self.engine.answer(self.asked, self.prompt)) as parts:
                async for part in parts:
                    end = part if isinstance(part, Ended) else end
                    yield _event({**head, "choices": [self._choice(part)]})
            if self.asked.counts_tokens:
                yield _event({**head, "choices": [], "usage": self._usage(end)})
        except (WrongUse, RunFailed) as error:
            yield _event(_told(error))
        yield b"data: [DONE]\n\n"

    def _choice(self, part: str | Ended) -> dict[str, Any]:
        text, reason = ("", part.reason) if isinstance(part, Ended) else (part, None)
        if not self.asked.is_chat:
            return _chunk({"text": text}, reason)
        return _chunk({"delta": {} if isinstance(part, Ended) else {"content": text}}, reason)

    def _usage(self, end: Ended) -> dict[str, int]:
        read = len(self.prompt.ids)
        return {"prompt_tokens": read, "completion_tokens": end.tokens, "total_tokens": read + end.tokens}


def _chunk(said: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


# ------------------------------------------------------------------------------------------------ errors


def problem(status: int, message: str, *, param: str | None = None, code: str | None = None) -> JSONResponse:
    """Return OpenAI's error object as an answer."""
    error = {"message": message, "type": KINDS.get(status, "invalid_request_error"), "param": param, "code": code}
    headers = {**SECURE, **({"Retry-After": "5"} if status == 429 else {})}
    return JSONResponse({"error": error}, status, headers=headers)


def _told(error: Exception) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(bytes(_as_problem(error).body))
    return told


def _as_problem(error: Exception) -> JSONResponse:
    if isinstance(error, Refused):
        return problem(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, HTTPException):
        known = {404: "there is no such address; the API has /v1/models, /v1/chat/completions and /v1/completions",
                 405: "this address has no such method; GET /v1/models, and POST the others"}
        return problem(error.status_code, known.get(error.status_code, str(error.detail)))
    if isinstance(error, WrongUse):
        return problem(400, str(error))
    return problem(500, str(error), code="model_failed")


def refuse(request: Request, error: Exception) -> Response:
    """Answer a request that is understood and not carried out, with the reason."""
    del request
    return _as_problem(error)


def nobody(request: Request, error: Exception) -> Response:
    """Answer a client that has gone: nobody reads it."""
    del request, error
    return Response(status_code=499)


def confess(request: Request, error: Exception) -> Response:
    """Answer a request at which the server itself went wrong; the terminal has the details."""
    del request, error
    return problem(500, "the server went wrong here, which is a fault in powertrain; the terminal of `powertrain serve` has "
                        "the details", code="internal_error")
