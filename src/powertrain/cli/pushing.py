"""`powertrain push`: a run, a model or an adapter to the Hugging Face hub."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli import output as screen
from powertrain.cli.options import Json, say
from powertrain.records import WrongUse, several
from powertrain.report.words import memory

if TYPE_CHECKING:
    from powertrain.export.push import Place, Upload


def push(model: Annotated[Path, typer.Argument(show_default=False, help="Folder of a run, a model or an adapter.")],
         name: Annotated[str, typer.Argument(show_default=False, help="Name on the hub: OWNER/NAME, or NAME of your own.")],
         public: Annotated[bool, typer.Option("--public", help="Let everybody read it (default: private).")] = False,
         overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that has this name.")] = False,
         base: Annotated[str | None, typer.Option(help="For an adapter: the hub id of its base model.")] = None,
         yes: Annotated[bool, typer.Option("--yes", help="Push without asking, in a script.")] = False,
         as_json: Json = False) -> None:
    """Upload a model to the Hugging Face hub, with a model card.

    It shows what would be sent, and asks. A push that was cut off continues when it is run again.
    """
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    from powertrain.export import push as pushing

    if not yes and not sys.stdin.isatty():
        raise WrongUse("nobody can be asked here, so nothing was pushed; add --yes if it may be pushed unasked")
    run, folder = _folder(model)
    say(f"checking the files in {folder}")
    upload = pushing.read_upload(folder, base=base)
    place = pushing.find_place(name)
    if run is not None:
        card = _card(place.repository, run, folder, pushing.base_in(upload))
        upload = pushing.Upload({**upload.files, pushing.CARD: card.encode()}, upload.left_out)
    if pushing.check_place(place, upload, public=public, overwrite=overwrite):
        say(f"{place.repository} has all of these files already")
    else:
        screen.print_rows(_rows(place, upload, public=public, has_card=run is not None), stderr=True)
        if not yes and not typer.confirm(f"Push to {place.repository}?", err=True):
            raise WrongUse("nothing was pushed")
        if not sys.stderr.isatty():
            disable_progress_bars()
        pushing.push(place, upload, public=public, message=f"Push {folder.parent.name if run else folder.name}")
    screen.tell({"event": "push", "repository": place.repository, "url": place.address, "private": not public,
                 "files": list(upload.files), "bytes": upload.size_bytes},
                [("Pushed", place.address), ("Opens", f"powertrain chat {place.repository}")], as_json=as_json)


def _folder(model: Path) -> tuple[Path | None, Path]:
    """Return the run, if it is one, and the folder of its model. Raises WrongUse where there is no model."""
    from powertrain.models.huggingface.hub import CONFIG, is_adapter

    run = model if (model / "recipe.yaml").is_file() else None
    folder = model / "model" if (model / "model").is_dir() else model
    if not folder.is_dir():
        raise WrongUse(f"{model} does not exist; name the folder of a run or a model (`powertrain runs list` shows the runs)")
    if not is_adapter(folder) and not (folder / CONFIG).is_file():
        if run is not None:
            raise WrongUse(f"the run {model} has no model yet; finish it by `powertrain train --resume {model}`")
        raise WrongUse(f"{model} holds neither a run nor a model in Hugging Face's format ({CONFIG} is missing); "
                       "`powertrain export RUN --to merged` writes one")
    return run, folder


def _card(repository: str, run: Path, folder: Path, base: str) -> str:
    from powertrain.cli.reporting import read_run
    from powertrain.models.bridge.adapters import NATIVE_ONLY
    from powertrain.models.huggingface.hub import ADAPTER_CONFIG, CONFIG
    from powertrain.records.redaction import redacted
    from powertrain.records.version import VERSION
    from powertrain.report.card import model_card

    is_ours = base and json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("peft_type") == NATIVE_ONLY
    tokenizer_is_known = (folder / "tokenizer_config.json").is_file() or not (folder / CONFIG).is_file()
    opens_in = ("powertrain" if is_ours else "peft") if base else "transformers" if tokenizer_is_known else "powertrain"
    return redacted(model_card(repository, read_run(run), base=base, opens_in=opens_in, version=VERSION))


def _rows(place: "Place", upload: "Upload", *, public: bool, has_card: bool) -> list[tuple[str, str]]:
    state = "a new repository" if not place.exists else "an empty repository" if place.is_empty else "REPLACES the model there"
    card = "README.md, made from the run's recipe, data, results and plan" if has_card else \
        "the folder's README.md" if "README.md" in upload.files else "none: only a run has what a card is made from"
    readers = "PUBLIC" if public else "private"
    return [("To", f"{place.repository}, {state}, {readers}"),
            ("Files", f"{several(len(upload.files), 'file')}, {memory(upload.size_bytes)}: {', '.join(upload.files)}"),
            ("Card", card), *([("Left out", ", ".join(upload.left_out))] if upload.left_out else [])]
