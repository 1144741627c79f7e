"""Models: what runs have trained, chatting with it, exporting, measuring, pushing and deleting it."""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from powertrain.records import WrongUse
from powertrain.report.words import memory
from powertrain.run.folder import RunFolder, locked
from powertrain.web.chat_pages import base_of, model_of
from powertrain.web.places import NotThere, child, children, size_of
from powertrain.web.settings import HUB_ID
from powertrain.web.site import Site, fields, shown, site_of

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
PLAIN_DTYPES = ("float32", "bfloat16", "float16")
FORMATS = {"merged": ("a Hugging Face folder, with the adapters added in", PLAIN_DTYPES),
           "adapter": ("PEFT files, for use beside the base", ()),
           "gguf": ("one file for llama.cpp, from the families that powertrain computes itself", (*PLAIN_DTYPES, "q8_0")),
           "onnx": ("a graph for ONNX Runtime, from the families that powertrain computes itself", ("float32",))}
FOR_OTHERS = ("*.gguf", "*.onnx")            # exports that powertrain itself does not open
EXACT = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "q8_0": "q8_0, 8 bits, for gguf only"}


def show(request: Request) -> Response:
    site, places = site_of(request), site_of(request).places
    runs = [(f"runs/{run.name}", _has_adapter(run / "model"), memory(size_of(run / "model")))
            for run in children(places.runs, ("model",))]
    exports = [(f"exports/{one.name}", memory(size_of(one)), not any(any(one.glob(name)) for name in FOR_OTHERS),
                _has_adapter(one))
               for one in children(places.exports)]
    return shown(request, "models.html", title="Models", runs=runs[::-1], exports=exports, formats=FORMATS, dtypes=EXACT,
                 token=site.has_hub_token)


def _has_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


async def export(request: Request) -> Response:
    """Start writing a model for other programs."""
    site, given = site_of(request), await fields(request)
    name, to, dtype = (str(given.get(key, "")) for key in ("model", "to", "dtype"))
    if to not in FORMATS:
        raise WrongUse(f"a model is exported as one of {', '.join(FORMATS)}")
    _, dtypes = FORMATS[to]
    if dtype and dtype not in dtypes:
        raise WrongUse(f"{dtype[:20]} is not possible for {to}; use {', '.join(dtypes)}, or leave it open" if dtypes else
                       "an adapter keeps the numbers in which it was trained; leave them open")
    model = model_of(site.places, name)
    if to == "adapter" and not any(map(_has_adapter, (path := site.places.inside(name), path / "model"))):
        raise WrongUse(f"{name} has no adapter: the whole model was trained; export it as merged")
    output = f"exports/{Path(model.name).name}-{to}{'-' + dtype if dtype else ''}"
    if os.path.lexists(site.places.root / output):
        raise WrongUse(f"{output} is there already; delete it first, or choose another format")
    site.places.made(site.places.exports)
    job = site.jobs.ask(f"Export {name} as {to}", ["export", model.name, "--to", to, "--output", output,
                                                   *(["--dtype", dtype] if dtype else [])])
    return JSONResponse({"go": f"/jobs/{job.id}"})


async def push(request: Request) -> Response:
    """Start sending a model to the hub, once somebody has agreed to the sentence that says what is sent and who may read it."""
    site, given = site_of(request), await fields(request)
    model, name, base = (str(given.get(key, "")).strip() for key in ("model", "name", "base"))
    public, overwrite = (given.get(key) is True for key in ("public", "overwrite"))
    if not HUB_NAME.fullmatch(name):
        raise WrongUse("a name on the hub is OWNER/NAME, or NAME of your own, of letters, digits, '-', '_' and '.'")
    if base and not HUB_ID.fullmatch(base):
        raise WrongUse(f"{base[:100]!r} is no hub id; name the adapter's base as the hub does, such as Qwen/Qwen2.5-0.5B")
    if model.partition("/")[0] not in ("runs", "exports"):
        raise WrongUse("the page pushes runs and exports only; push other folders with `powertrain push` in a terminal")
    if not site.has_hub_token:
        raise WrongUse("no hub token is set; set one with `hf auth login` in a terminal, and start the page again")
    words = ["push", model_of(site.places, model).name, name, "--yes", *(["--public"] if public else []),
             *(["--overwrite"] if overwrite else []), *(["--base", base] if base else [])]
    ask = f"Send {model} to the Hugging Face hub as {name}? " + (
        "Everybody may read it." if public else "It is private: only you, or the organisation that owns it, can read it.") + (
        " It replaces a model that has this name." if overwrite else "")
    if given.get("sure") != ask:
        return JSONResponse({"ask": ask})
    return JSONResponse({"go": f"/jobs/{site.jobs.ask(f'Push {model} to {name}', words).id}"})


async def evaluate(request: Request) -> Response:
    site, name = site_of(request), str((await fields(request)).get("model", ""))
    job = site.jobs.ask(f"Evaluate {name}", ["evaluate", model_of(site.places, name).name])
    return JSONResponse({"go": f"/jobs/{job.id}"})


async def delete(request: Request) -> Response:
    """Delete a run or an export with all its files."""
    site, what = site_of(request), str((await fields(request)).get("what", ""))
    path = await asyncio.to_thread(_deletable, site, what)
    await site.talks.forget(site.places.command(path))
    await asyncio.to_thread(_delete, path)
    return JSONResponse({"refresh": True})


def _deletable(site: Site, what: str) -> Path:
    """Return the folder of a run or an export that nothing needs. Raises WrongUse."""
    kind, _, name = what.partition("/")
    if kind not in ("runs", "exports"):
        raise WrongUse("the page deletes runs and exports only; delete other files in a terminal")
    if (site.places.root / kind).is_symlink():
        raise WrongUse(f"{kind}/ is a link, behind which the page deletes nothing; delete {name[:100]!r} in a terminal")
    path = child(site.places.root / kind, name, kind[:-1])
    named = re.compile(rf"(^|[/='\"]){re.escape(what)}($|[/'\"])")
    for job in site.jobs.all():
        if job.state != "ended" and (job.run == what or any(named.search(word) for word in job.words)):
            raise WrongUse(f"the job {job.title!r} uses {what}; stop it first, or wait until it ends")
    if kind == "runs":
        if not any((path / file).exists() for file in ("recipe.yaml", "model", "checkpoints", "events.jsonl")):
            raise NotThere(f"{what} is no run; delete it in a terminal")
        users = [run.name for run in children(site.places.runs, ("recipe.yaml",)) if run != path
                 and base_of(site.places, f"runs/{run.name}") == what]
        if users:
            raise WrongUse(f"{what} is the base of {', '.join(users[:5])}; delete those first, or export them as merged and "
                           "delete them then")
    return path


def _delete(path: Path) -> None:
    """Delete a folder, at once for whoever looks. Raises WrongUse for a run in which a process trains."""
    doomed = path.with_name(f".{path.name}.{secrets.token_hex(3)}.deleted")
    try:
        with locked(RunFolder(path)) if path.parent.name == "runs" else contextlib.nullcontext():
            path.rename(doomed)
            shutil.rmtree(doomed)
    except OSError as error:
        rest = doomed if doomed.exists() else path
        raise WrongUse(f"{rest} cannot be deleted ({error.strerror or error}); delete it in a terminal") from None


ROUTES = [Route("/models", show), Route("/models/export", export, methods=["POST"]),
          Route("/models/push", push, methods=["POST"]),
          Route("/models/evaluate", evaluate, methods=["POST"]), Route("/models/delete", delete, methods=["POST"])]
