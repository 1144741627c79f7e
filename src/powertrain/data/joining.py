"""The join: the shards that several machines made become the stores that one machine would have made, byte for byte.

The pieces of a store are appended in the order of the data, one in memory at a time, by the writer that one machine appends
its own pieces with. Before that, every shard is held against the first one, and its files against their sha256: shards are
copied between machines, and a store of mixed or damaged shards would look like any other.
"""

import itertools
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from powertrain.data import store
from powertrain.data.examples import making
from powertrain.data.examples.part import PartWriter
from powertrain.data.publishing import META, is_whole, key_of, publish, read_meta
from powertrain.data.shards import PIECES, Piece, Shard, read_pieces, sha256_of
from powertrain.records import WrongUse, several

FORMATS = {"tokens": store.FORMAT, "examples": making.FORMAT}
TOKENIZER = "tokenizer"                      # a folder of each shard of a text
ALSO_TIMES = "large files count as changed if their time is another, so copy them with their times: cp -p, rsync -t"


@dataclass(frozen=True)
class ShardFolder:
    """One shard on disk, and its meta.json."""

    path: Path
    meta: Mapping[str, Any]

    @property
    def shard(self) -> Shard:
        return Shard(self.meta["shard"], self.meta["of"])

    @property
    def same_everywhere(self) -> dict[str, Any]:
        """Return what all shards of the same data agree on."""
        made = {name: digest for name, digest in self.meta["sha256"].items() if f"/{TOKENIZER}/" in name}
        return {"of": self.meta["of"], "stores": self.meta["stores"], "made_by": self.meta["made_by"], TOKENIZER: made}


def join_shards(folders: Sequence[Path], cache: Path) -> list[Path]:
    """Return the stores that all shards in `folders` make together, published in `cache` unless they are there already.

    Each folder is a shard or holds shards. Raises WrongUse if a shard is missing, there twice, of other data, or damaged.
    """
    shards = sorted((shard for folder in folders for shard in _found(folder)), key=lambda shard: shard.shard.number)
    if not shards:
        raise WrongUse(f"there is no shard in {', '.join(map(str, folders))}; name the folders that `powertrain data prepare "
                       "--shard` printed, or a folder that holds them")
    for shard in shards[1:]:
        if shard.same_everywhere != shards[0].same_everywhere:
            raise WrongUse(f"{shard.path} and {shards[0].path} are not shards of the same data: "
                           f"{_difference(shard, shards[0])}; leave one of them out, or prepare it again with the same recipe, "
                           "files and versions")
    _refuse_incomplete(shards)
    for shard in shards:
        _refuse_damaged(shard)
    joined = []
    for number, made in enumerate(shards[0].meta["stores"]):
        parts, folder = [shard.path / str(number) for shard in shards], cache / made["folder"]
        if not is_whole(folder):
            publish(folder, partial(_build, parts=parts, about=made["meta"]))
        joined.append(folder)
    return joined


def _build(folder: Path, parts: Sequence[Path], about: Mapping[str, Any]) -> dict[str, Any]:
    """Write all but meta.json of a store into `folder`, and return its content."""
    of_text = parts[0] / TOKENIZER
    writer = store.TokenWriter(folder) if of_text.is_dir() else PartWriter(folder, about["vocabulary"])
    with closing(writer):
        for files, told in _in_order(parts):
            writer.append(files, told)
    if of_text.is_dir():
        shutil.copytree(of_text, folder / TOKENIZER)
    return writer.meta(about)


def _in_order(parts: Sequence[Path]) -> Iterator[Piece]:
    """Yield the pieces of all shards in the order of the data: one of each shard in turn, until there are no more."""
    with ExitStack() as stack:
        turns = [stack.enter_context(closing(read_pieces(part))) for part in parts]
        for turn in itertools.cycle(turns):
            piece = next(turn, None)
            if piece is None:
                break
            yield piece
        for part, turn in zip(parts, turns, strict=True):
            if next(turn, None) is not None:
                raise WrongUse(f"{part.parent} has more pieces than the shards beside it, so the data changed while they were "
                               "prepared; prepare all of them again")


# ------------------------------------------------------------------------------------------------ what is found and refused


def _found(folder: Path) -> list[ShardFolder]:
    """Return the shard that is `folder`, or those that it holds."""
    if not folder.is_dir():
        raise WrongUse(f"{folder}: there is no such folder; name the folders that `powertrain data prepare --shard` printed")
    if (folder / META).is_file():
        return [_opened(folder)]
    return [_opened(inner) for inner in sorted(folder.iterdir()) if inner.is_dir() and not inner.name.startswith(".")]


def _opened(folder: Path) -> ShardFolder:
    try:
        meta = read_meta(folder)
        content = {name: value for name, value in meta.items() if name not in ("digest", "files", "sum")}
        stores = [(made["folder"], f"{made['folder'].partition('/')[0]}/{key_of(made['key'])}") for made in meta["stores"]]
        whole = meta["digest"] == key_of(content) and all(
            name == expected and re.match("(examples|tokens)/", name) for name, expected in stores)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise _damaged(folder, META)
    if any(made["key"].get("format") != FORMATS[made["folder"].partition("/")[0]] for made in meta["stores"]):
        raise WrongUse(f"{folder} was prepared by another version of Powertrain; prepare that shard again")
    return ShardFolder(folder, meta)


def _refuse_incomplete(shards: Sequence[ShardFolder]) -> None:
    """Raise WrongUse if a shard is missing or there twice. They are sorted by number."""
    for earlier, later in itertools.pairwise(shards):
        if earlier.shard == later.shard:
            raise WrongUse(f"shard {later.shard} is there twice, as {earlier.path} and {later.path}; leave one of them out")
    of = shards[0].shard.of
    missing = sorted(set(range(1, of + 1)) - {shard.shard.number for shard in shards})
    if missing:
        named = ", ".join(f"{number}/{of}" for number in missing)
        raise WrongUse(f"{several(len(missing), 'shard')} of {of} missing: {named}; prepare with the same recipe and --shard "
                       f"{missing[0]}/{of}, or name the folder of a machine that did")


def _refuse_damaged(shard: ShardFolder) -> None:
    """Raise WrongUse if a file of the shard is not what was written."""
    sums = shard.meta["sha256"]
    needed = {f"{number}/{PIECES}" for number in range(len(shard.meta["stores"]))}
    for name in sorted(needed | set(sums)):
        try:
            whole = sha256_of(shard.path / name) == sums.get(name)
        except OSError:
            whole = False
        if not whole:
            raise _damaged(shard.path, name)


def _damaged(folder: Path, name: str) -> WrongUse:
    return WrongUse(f"{folder} is no whole shard: {name} is missing or not what was written; copy the folder again, or remove "
                    "it and prepare that shard again")


def _difference(shard: ShardFolder, first: ShardFolder) -> str:
    """Return the first thing that two shards do not agree on."""
    one, other = shard.same_everywhere, first.same_everywhere
    if one["of"] != other["of"]:
        return f"one is of {one['of']} shards, the other of {other['of']}"
    if one["stores"] != other["stores"]:
        recipes = [made.meta["recipe"] for made in (shard, first)]
        if changed := next((key for key in recipes[0] if recipes[0][key] != recipes[1].get(key)), None):
            name = changed if changed == "seed" else f"data.{changed}"
            return f"{name} is {json.dumps(recipes[0][changed])} in one and {json.dumps(recipes[1].get(changed))} in the other"
        for own, theirs in zip(one["stores"], other["stores"], strict=False):
            if _content(own["key"]) != _content(theirs["key"]):
                return f"the content of {', '.join(_sources(recipes[0]))} is not the same ({ALSO_TIMES})"
        return "tokenizer, chat template or model are not the same"
    if one["made_by"] != other["made_by"]:
        versions = [", ".join(f"{name} {version}" for name, version in found["made_by"].items()) for found in (one, other)]
        return f"one was made by {versions[0]}, the other by {versions[1]}"
    return "the tokenizer that each made from the text is not the same"


def _content(key: Mapping[str, Any]) -> Any:
    """Return the digest of the content in the key of a store."""
    return key["texts"] if "texts" in key else key["rows"]["digest"]


def _sources(recipe: Mapping[str, Any]) -> list[str]:
    source = recipe["source"]
    return [source] if isinstance(source, str) else list(source)
