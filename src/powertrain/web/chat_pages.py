"""Chat: a tuned model beside its base, with the same prompt and seed."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from powertrain.records import WrongUse
from powertrain.records.json_files import read_json
from powertrain.run.folder import RunFolder, recipe_of
from powertrain.web.places import NotThere, Places, children
from powertrain.web.settings import HUB_ID
from powertrain.web.site import fields, shown, site_of

MOST_TOKENS, LONGEST_MESSAGE = 2048, 100_000
ANY_PROMPT = "Hello! What can you do?"
FUNCTION = 'def mean(values):\n    return sum(values) / len(values)'        # what the docstrings recipe's rows ask about


def model_of(places: Places, model: str) -> tuple[str, int]:
    """Return a model as a command takes it, and the bytes of its files. Raises WrongUse for one outside the page's folders."""
    if model.startswith("runs/"):
        path = places.run(model.removeprefix("runs/"))
        if not (path / "model").is_dir():
            raise NotThere(f"{model} has no finished model yet; wait until it ends, or resume it")
    elif HUB_ID.fullmatch(model) and not (places.root / model).exists():
        return model, 0
    else:
        path = places.inside(model)
        if not path.is_dir():
            raise NotThere(f"there is no folder {model[:100]}; name a run or a model's folder")
    size = sum(file.stat().st_size for file in path.glob("**/*.safetensors") if "checkpoints" not in file.parts)
    return f"./{places.shown(path)}" if not Path(places.shown(path)).is_absolute() else str(path), size


def base_of(places: Places, model: str) -> str:
    """Return the model that a run was tuned from; "" where it was trained from scratch, or its base is not here."""
    if not model.startswith("runs/"):
        return ""
    folder = RunFolder(places.run(model.removeprefix("runs/")))
    try:
        base = str(read_json(folder.facts).get("model", {}).get("path") or "").removesuffix("/model")
        return model_of(places, base)[0].removeprefix("./") if base else ""
    except (WrongUse, OSError, AttributeError):          # it was moved, or the facts are damaged
        return ""


def first_prompt(places: Places, model: str) -> str:
    if not model.startswith("runs/"):
        return ANY_PROMPT
    try:
        recipe = recipe_of(RunFolder(places.run(model.removeprefix("runs/"))))
    except (WrongUse, OSError):
        return ANY_PROMPT
    return FUNCTION if "docstrings" in recipe.data.sources else recipe.sample.prompt or ANY_PROMPT


def show(request: Request) -> Response:
    site, model = site_of(request), request.query_params.get("model", "")
    models = [f"runs/{run.name}" for run in children(site.places.runs, ("model",))]
    if not model:
        return shown(request, "chat.html", title="Chat", model="", base="", prompt="", models=models)
    model_of(site.places, model)
    return shown(request, "chat.html", title="Chat", model=model, base=base_of(site.places, model), models=models,
                 prompt=first_prompt(site.places, model))


async def ask(request: Request) -> Response:
    """Stream a model's answer: lines with a piece, then the prompt and the speed, or a problem."""
    site, asked = site_of(request), await fields(request)
    words, size = model_of(site.places, str(asked.get("model", "")))
    message = asked.get("message")
    if not isinstance(message, str) or not message.strip() or len(message) > LONGEST_MESSAGE:
        raise WrongUse(f"a message has 1 to {LONGEST_MESSAGE:,} characters")
    sampling = {"tokens": int(_number(asked, "tokens", 1, MOST_TOKENS)), "seed": int(_number(asked, "seed", 0, 2**53)),
                "temperature": _number(asked, "temperature", 0, 10)}

    async def lines() -> AsyncIterator[str]:
        pieces, began = 0, 0.0
        try:
            async for line in site.talks.ask(words, size, {"message": message, **sampling}):
                kind = line.get("event")
                if kind == "piece":
                    began = began or time.monotonic()
                    pieces += 1
                    yield json.dumps({"piece": line["text"]}) + "\n"
                elif kind == "answer":
                    took = time.monotonic() - began
                    speed = f"{(pieces - 1) / took:.0f} pieces a second" if pieces > 1 and took else ""
                    yield json.dumps({"prompt": line.get("prompt", ""), "done": True, "speed": speed}) + "\n"
                elif kind == "error":
                    yield json.dumps({"problem": line["message"]}) + "\n"
        except WrongUse as error:
            yield json.dumps({"problem": str(error)}) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _number(asked: dict[str, object], name: str, least: float, most: float) -> float:
    try:
        value = float(str(asked.get(name, "")))
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise WrongUse(f"{name} is a number from {least:g} to {most:g}")
    return value


async def reset(request: Request) -> Response:
    site = site_of(request)
    words, _ = model_of(site.places, str((await fields(request)).get("model", "")))
    site.talks.forget(words)
    return JSONResponse({})


ROUTES = [Route("/chat", show), Route("/chat/ask", ask, methods=["POST"]), Route("/chat/reset", reset, methods=["POST"])]
