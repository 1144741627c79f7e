"""Chat: a tuned model beside its base, with the same prompt and seed."""

import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from powertrain.records import WrongUse
from powertrain.run.folder import RunFolder, recipe_of
from powertrain.web.chatting import Model
from powertrain.web.places import NotThere, Places, children
from powertrain.web.settings import is_on_hub
from powertrain.web.site import fields, shown, site_of

MOST_TOKENS, LONGEST_MESSAGE = 2048, 100_000
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
ANY_PROMPT = "Hello! What can you do?"
FUNCTION = 'def mean(values):\n    return sum(values) / len(values)'        # what the docstrings recipe's rows ask about


def model_of(places: Places, name: str) -> Model:
    """Return the model that a user named. Raises WrongUse for one outside the page's folders."""
    if name.startswith("runs/"):
        path = places.run(name.removeprefix("runs/"))
        if not (path / "model").is_dir():
            raise NotThere(f"{name} has no finished model yet; wait until it ends, or resume it")
    elif is_on_hub(name, places):
        return Model(name)
    else:
        path = places.inside(name)
        if not name or not path.is_dir():
            raise NotThere(f"there is no folder {name[:100]!r}; name a run or a model's folder")
    weights = [file.stat() for file in _weights(places, path)]
    return Model(places.command(path), sum(one.st_size for one in weights),
                 max((one.st_mtime_ns for one in weights), default=0))


def _weights(places: Places, path: Path) -> list[Path]:
    """Return the files of a model's weights, and of the model that its adapter is for."""
    folder = path / "model" if (path / "model").is_dir() else path
    files = list(folder.glob("*.safetensors"))
    try:
        base = Path(str(places.json(folder / "adapter_config.json")["base_model_name_or_path"]))
    except (WrongUse, OSError, KeyError):                # it has no adapter
        return files
    return [*files, *base.glob("*.safetensors")]


def base_of(places: Places, model: str) -> str:
    """Return the model that a run was tuned from; "" where it was trained from scratch, or its base is not here."""
    if not model.startswith("runs/"):
        return ""
    folder = RunFolder(places.run(model.removeprefix("runs/")))
    try:
        base = Path(str(places.json(folder.facts).get("model", {}).get("path") or ""))
        if base.name == "model" and base.parent.parent == places.runs:
            base = base.parent
        return model_of(places, places.shown(base)).name.removeprefix("./") if base.name else ""
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
    if not model:
        places = site.places
        models = [f"{folder.name}/{one.name}" for folder, having in ((places.runs, ("model",)), (places.exports, WEIGHTS))
                  for one in children(folder, having)]
        return shown(request, "chat.html", title="Chat", model="", models=models)
    model_of(site.places, model)
    return shown(request, "chat.html", title="Chat", model=model, base=base_of(site.places, model),
                 prompt=first_prompt(site.places, model))


async def ask(request: Request) -> Response:
    """Stream a model's answer: lines with a piece, then the prompt and the speed, or a problem."""
    site, asked = site_of(request), await fields(request)
    model = model_of(site.places, str(asked.get("model", "")))
    message = asked.get("message")
    if not isinstance(message, str) or not message.strip() or len(message) > LONGEST_MESSAGE:
        raise WrongUse(f"a message has 1 to {LONGEST_MESSAGE:,} characters")
    told = {"message": message.encode(errors="replace").decode(), "tokens": int(_number(asked, "tokens", 1, MOST_TOKENS)),
            "seed": int(_number(asked, "seed", 0, 2**53)), "temperature": _number(asked, "temperature", 0, 10)}
    conversation, turn = str(asked.get("conversation", ""))[:80], int(_number({"turn": 0, **asked}, "turn", 0, 10**6))

    async def lines() -> AsyncIterator[str]:
        pieces, began = 0, 0.0
        try:
            async with contextlib.aclosing(site.talks.ask(model, told, conversation, turn)) as answer:
                async for line in answer:
                    if line.get("event") == "piece":
                        began = began or time.monotonic()
                        pieces += 1
                    yield json.dumps(_told(line, pieces, began)) + "\n"
        except WrongUse as error:
            yield json.dumps({"problem": str(error)}) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _told(line: Mapping[str, Any], pieces: int, began: float) -> dict[str, object]:
    """Return a line of a model's process as the page reads it."""
    kind = line.get("event")
    if kind == "piece":
        return {"piece": line["text"]}
    if kind == "answer":
        took = time.monotonic() - began
        return {"done": True, "prompt": line.get("prompt", ""),
                "speed": f"{(pieces - 1) / took:.0f} pieces a second" if pieces > 1 and took else ""}
    if kind == "forgotten":
        return {"notice": "The model does not know what was said above: its process was started anew, or another tab used it."}
    return {"problem": line["message"]} if kind == "error" else {}


def _number(asked: dict[str, object], name: str, least: float, most: float) -> float:
    try:
        value = float(str(asked.get(name, "")))
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise WrongUse(f"{name} is a number from {least:g} to {most:g}")
    return value


ROUTES = [Route("/chat", show), Route("/chat/ask", ask, methods=["POST"])]
