"""Models: what runs have trained, chatting with it, exporting, measuring and deleting it."""

import os
import shutil
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from powertrain.records import WrongUse
from powertrain.report.words import memory
from powertrain.run.folder import RunFolder, is_being_written
from powertrain.web.chat_pages import base_of, model_of
from powertrain.web.places import child, children
from powertrain.web.site import Site, fields, shown, site_of

FORMATS = {"merged": "one Hugging Face folder, adapters added in", "adapter": "PEFT files, for use beside the base",
           "gguf": "one file, for llama.cpp"}
DTYPES = ("", "float32", "bfloat16", "float16", "q8_0")


def show(request: Request) -> Response:
    site = site_of(request)
    runs = [(f"runs/{run.name}", memory(_size(run / "model"))) for run in children(site.places.runs, ("model",))]
    exports = [(f"exports/{one.name}", memory(_size(one))) for one in children(_exports(site), _any(_exports(site)))]
    return shown(request, "models.html", title="Models", runs=runs[::-1], exports=exports, formats=FORMATS, dtypes=DTYPES)


def _exports(site: Site) -> Path:
    return site.places.root / "exports"


def _any(folder: Path) -> list[str]:
    """Return the names of what lies in the folders of a folder."""
    return sorted({name for _, _, names in os.walk(folder) for name in names})


def _size(folder: Path) -> int:
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)) if folder.is_dir() else 0


async def export(request: Request) -> Response:
    """Start writing a model for other programs."""
    site, given = site_of(request), await fields(request)
    model, to, dtype = (str(given.get(key, "")) for key in ("model", "to", "dtype"))
    if to not in FORMATS or dtype not in DTYPES:
        raise WrongUse(f"a model is exported as one of {', '.join(FORMATS)}, its numbers as one of {', '.join(DTYPES[1:])}")
    words, _ = model_of(site.places, model)
    output = f"exports/{Path(words).name}-{to}{'-' + dtype if dtype else ''}"
    if (site.places.root / output).exists():
        raise WrongUse(f"{output} is there already; delete it first, or choose another format")
    _exports(site).mkdir(exist_ok=True)
    job = site.jobs.ask(f"Export {model} as {to}", ["export", words, "--to", to, "--output", output,
                                                    *(["--dtype", dtype] if dtype else [])])
    return JSONResponse({"go": f"/jobs/{job.id}"})


async def evaluate(request: Request) -> Response:
    site, model = site_of(request), str((await fields(request)).get("model", ""))
    words, _ = model_of(site.places, model)
    return JSONResponse({"go": f"/jobs/{site.jobs.ask(f'Evaluate {model}', ['evaluate', words]).id}"})


async def delete(request: Request) -> Response:
    """Delete a run or an export with all its files."""
    site, what = site_of(request), str((await fields(request)).get("what", ""))
    folder, _, name = what.partition("/")
    if folder not in ("runs", "exports"):
        raise WrongUse("the page deletes runs and exports only")
    path = child(site.places.root / folder, name, folder[:-1])
    if folder == "runs":
        if is_being_written(RunFolder(path)):
            raise WrongUse(f"a process trains in {what}; stop it first")
        users = [run.name for run in children(site.places.runs, ("recipe.yaml",)) if run != path
                 and base_of(site.places, f"runs/{run.name}") == what]
        if users:
            raise WrongUse(f"{what} is the base of {', '.join(users[:5])}; delete those first, or merge them by an export and "
                           "delete them then")
        site.talks.forget(f"./{what}")
    shutil.rmtree(path)
    return JSONResponse({"refresh": True})


ROUTES = [Route("/models", show), Route("/models/export", export, methods=["POST"]),
          Route("/models/evaluate", evaluate, methods=["POST"]), Route("/models/delete", delete, methods=["POST"])]
