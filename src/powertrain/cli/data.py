"""`powertrain data check`, `show`, `prepare` and `join`: what a recipe's data are, before anything trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli import curating, output
from powertrain.cli.grouping import group
from powertrain.cli.options import Json, Words, cache_folder, tell
from powertrain.records import WrongUse, to_plain
from powertrain.records.findings import Piece
from powertrain.report.result import printable
from powertrain.report.rows import check_rows, marked, totals
from powertrain.report.words import labelled

if TYPE_CHECKING:
    from powertrain.data.examples.store import ExampleStore
    from powertrain.recipe import Recipe

SEVERAL = {"encoder": " reads", "decoder": " writes", "chosen": "", "rejected": ""}      # of an example in several parts
TRAINED_STYLE = "bold green"


def check(words: Words = None, as_json: Json = False) -> None:
    """Report bad rows, duplicates, cut rows and padding."""
    from powertrain.data.examples.check import check_examples

    recipe, store, asked = _looked_at(words or [])
    found = check_examples(store, train_batch_size=recipe.train_batch_size, seed=recipe.seed)
    output.tell({"event": "data", **to_plain(found), "totals": totals(found), "trained_share": found.trained_share,
                 "undecided": asked},
                [*check_rows(found), *([("Decide", f"before training: {asked}")] if asked else [])], as_json=as_json)


def show(words: Words = None, index: Annotated[int, typer.Option(min=0, help="Number of the example, from 0.")] = 0,
         as_json: Json = False) -> None:
    """Show one example as the model sees it, trained tokens marked."""
    from powertrain.data.examples.check import pieces_of

    _, store, _ = _looked_at(words or [])
    examples = len(store)
    if not 0 <= index < examples:
        raise WrongUse(f"there is no example {index}: there are {examples:,}; use --index 0 to {examples - 1}")
    example, side = store.example(index), "validation" if store.in_validation[index] else "training"
    pieces = pieces_of(store, index)
    tokens, trained = int(store.lengths[index]), int(store.trained[index])
    if as_json:
        output.print_json({
            "event": "example", "index": index, "origin": store.origins(index), "side": side, "tokens": tokens,
            "trained_tokens": trained, "pieces": to_plain(pieces), "inputs": example.inputs.tolist(),
            "targets": example.targets.tolist(), "source": None if example.source is None else example.source.tolist(),
            "segments": None if example.segments is None else example.segments.tolist()})
        return
    how = "in colour" if output.console().is_terminal else "in [[ ]]"
    output.print_rows([("Example", f"{index:,} of {examples:,}, {store.origins(index)}, {side}"),
                       ("Tokens", f"{tokens:,}, and {trained:,} targets (shown {how})")])
    _print_pieces(pieces)


def prepare(words: Words = None,
            shard: Annotated[str | None, typer.Option(metavar="NUMBER/SHARDS", help=(
                "Tokenise only this share of the data, such as 3/16 on the third of 16 machines; "
                "`powertrain data join` makes one store of all."))] = None,
            as_json: Json = False) -> None:
    """Tokenise the data once into the cache."""
    from powertrain.recipe import resolve_words
    from powertrain.run.material import open_recipe_examples

    recipe = resolve_words(words or []).recipe
    if shard is not None:
        _prepare_shard(recipe, shard, as_json=as_json)
        return
    if recipe.method == "scratch":
        _prepare_text(recipe, as_json=as_json)
        return
    store = open_recipe_examples(recipe, cache_folder(), tell)
    figures = {"examples": len(store), "training_examples": len(store.training),
               "validation_examples": len(store.validation), "tokens": int(store.lengths.sum()),
               "trained_tokens": int(store.trained.sum())}
    folders = [str(part.folder) for part in store.parts]
    output.tell({"event": "prepared", "folders": folders, "said": list(store.said), "counts": dict(store.counts), **figures}, [
        *labelled("Data", store.said),
        ("Stored", f"{figures['examples']:,} examples, {figures['tokens']:,} tokens, {figures['trained_tokens']:,} of them "
                   f"trained; {figures['validation_examples']:,} examples held out"),
        *labelled("Files", folders)], as_json=as_json)


def join(folders: Annotated[list[Path], typer.Argument(
             metavar="FOLDER...", show_default=False,
             help="Shards made by `powertrain data prepare --shard`, or a folder that holds them.")],
         as_json: Json = False) -> None:
    """Make one store of the shards that machines prepared."""
    from powertrain.data.joining import join_shards

    stores = [str(store) for store in join_shards(folders, cache_folder())]
    output.tell({"event": "joined", "folders": stores},
                [*labelled("Files", stores), ("Next", "train with the same recipe and files; the shards can be removed")],
                as_json=as_json)


def _prepare_shard(recipe: Recipe, text: str, *, as_json: bool) -> None:
    """Tokenise one machine's share of a recipe's data."""
    from powertrain.data.shards import Shard
    from powertrain.run.material import prepare_shard

    shard = Shard.read(text)
    folder = prepare_shard(recipe, shard, cache_folder(), tell)
    output.tell({"event": "prepared_shard", "shard": shard.number, "of": shard.of, "folders": [str(folder)]},
                [("Shard", str(shard)), ("Files", str(folder)),
                 ("Next", f"bring all {shard.of} shards to one machine, then: powertrain data join {folder.parent}")],
                as_json=as_json)


def _prepare_text(recipe: Recipe, *, as_json: bool) -> None:
    """Tokenise the text that a recipe trains on from scratch."""
    from powertrain.data.store import open_store

    store = open_store(recipe.data, seed=recipe.seed, cache=cache_folder())
    tokens, held_out = len(store.train), len(store.validation)
    output.tell({"event": "prepared", "folders": [str(store.folder)], "tokens": tokens + held_out, "training_tokens": tokens,
                 "validation_tokens": held_out},
                [("Stored", f"{tokens:,} tokens to train on and {held_out:,} held out"), ("Files", str(store.folder))],
                as_json=as_json)


def _looked_at(words: Sequence[str]) -> tuple[Recipe, ExampleStore, str | None]:
    """Return recipe, examples, and what training would ask first of many examples that are too long; here they are cut."""
    from powertrain.data.examples.store import undecided
    from powertrain.recipe import resolve_words
    from powertrain.run.material import open_recipe_examples

    recipe = resolve_words(words).recipe
    data = recipe.data
    if data.long_examples is not None:
        return recipe, open_recipe_examples(recipe, cache_folder(), tell), None
    looking = recipe.model_copy(update={"data": data.model_copy(update={"long_examples": "cut"})})
    store = open_recipe_examples(looking, cache_folder(), tell)
    return recipe, store, undecided(store.parts, store.sources, store.max_length)


def _print_pieces(pieces: Sequence[Piece]) -> None:
    from rich.text import Text

    out = output.console()
    several = len({piece.reader for piece in pieces}) > 1
    for reader, text in marked(pieces):
        if several:
            out.print(f"--- {reader}{SEVERAL[reader]}")
        if out.is_terminal:
            own = [piece for piece in pieces if piece.reader == reader]
            out.print(Text.assemble(*((printable(piece.text), TRAINED_STYLE if piece.trained else "") for piece in own)),
                      soft_wrap=True)
        else:
            out.file.write(printable(text) + "\n")
            out.file.flush()


commands = group("Check, show, clean, convert, mix and prepare data.", {
    "check": check, "show": show, "clean": curating.clean, "convert": curating.convert, "mix": curating.mix,
    "prepare": prepare, "join": join})
