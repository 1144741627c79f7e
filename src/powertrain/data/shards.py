"""One machine's share of the work of tokenising, and what that machine leaves behind for the join in joining.py.

    <cache>/shards/<key>/3-of-16/  meta.json          which stores, of which recipe and content, and the sha256 of each file
                                   0/, 1/, ...        one folder for each store of the recipe
                                     *.bin            the pieces of each of the store's files, end to end
                                     pieces.jsonl     a line for each piece: its bytes in each file, and what its writer told

Every machine cuts the data into the same pieces, and tokenises those that fall to its shard: of 16 shards, the third has the
pieces 2, 18, 34 and so on. A piece is small, so shards of uneven files are about equally large. What needs all of the data (the
content's digest, a split of a text, a tokenizer made from a text) every machine finds out for itself.
"""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, TypeVar

from powertrain.data.publishing import is_whole, key_of, publish
from powertrain.records import WrongUse

T = TypeVar("T")
Piece = tuple[Mapping[str, bytes], Mapping[str, Any]]        # content by the name of its file, and what its writer told

PIECES = "pieces.jsonl"
MOST_SHARDS = 4096


@dataclass(frozen=True)
class Shard:
    """Share `number`, counted from 1, of `of` equal ones."""

    number: int
    of: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the shard that a user wrote as 3/16. Raises WrongUse."""
        found = re.fullmatch(r"(\d{1,9})/([1-9]\d{0,8})", text.strip())
        if not found:
            raise WrongUse(f"--shard={text} is no share of the data; use NUMBER/SHARDS, such as --shard 3/16 on the third of "
                           "16 machines")
        number, of = int(found[1]), int(found[2])
        if not 1 <= number <= of <= MOST_SHARDS:
            raise WrongUse(f"--shard={text} does not exist: shards are numbered from 1/{of} to {of}/{of}, and there are at "
                           f"most {MOST_SHARDS:,}; use one of these")
        return cls(number, of)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def own(self, pieces: Iterable[T]) -> Iterator[T]:
        """Yield those of all pieces that fall to this shard."""
        return itertools.islice(pieces, self.number - 1, None, self.of)


class PieceWriter:
    """The pieces of one store that fall to a shard, appended to files in `folder` as they are."""

    def __init__(self, folder: Path, names: Iterable[str]):
        self.folder = folder
        self.files = {name: (folder / f"{name}.bin").open("wb") for name in names}
        self.told = (folder / PIECES).open("w", encoding="utf-8")
        self.counts: Counter[str] = Counter()

    def close(self) -> None:
        for file in (*self.files.values(), self.told):
            file.close()

    def append(self, files: Mapping[str, bytes], told: Mapping[str, Any]) -> None:
        for name, content in files.items():
            self.files[name].write(content)
        json.dump({"bytes": {name: len(content) for name, content in files.items()}, "told": told}, self.told)
        self.told.write("\n")
        self.counts["pieces"] += 1
        self.counts["rows"] += told.get("counts", {}).get("rows", 0)


def read_pieces(folder: Path) -> Generator[Piece]:
    """Yield the pieces that a PieceWriter wrote into `folder`, one at a time."""
    with ExitStack() as stack:
        files = {path.stem: stack.enter_context(path.open("rb")) for path in folder.glob("*.bin")}
        for line in stack.enter_context((folder / PIECES).open(encoding="utf-8")):
            piece = json.loads(line)
            yield {name: files[name].read(size_bytes) for name, size_bytes in piece["bytes"].items()}, piece["told"]


@dataclass(frozen=True)
class ShardedStore:
    """A store that several machines tokenise: where it goes, all that decides its content, and how its pieces are written.

    `write` writes a shard's pieces and returns what else the join needs, which is the same on every machine.
    """

    folder: str                              # in the cache: "examples/KEY" or "tokens/KEY"
    key: Mapping[str, Any]
    names: Sequence[str]                     # of its files, without .bin
    write: Callable[[PieceWriter, Shard], Mapping[str, Any]]


def publish_shard(stores: Sequence[ShardedStore], shard: Shard, recipe: Mapping[str, Any], cache: Path) -> Path:
    """Return the folder of one shard of all stores, written now unless the cache has it. `recipe` explains differences."""
    made_by = {package: version(package) for package in ("powertrain", "tokenizers")}

    def build(folder: Path) -> dict[str, Any]:
        found = []
        for number, store in enumerate(stores):
            (folder / str(number)).mkdir()
            with closing(PieceWriter(folder / str(number), store.names)) as writer:
                about = store.write(writer, shard)
            found.append({"folder": store.folder, "key": store.key, **about})
        meta = {"shard": shard.number, "of": shard.of, "made_by": made_by, "recipe": recipe, "stores": found,
                "sha256": {path.relative_to(folder).as_posix(): sha256_of(path)
                           for path in sorted(folder.rglob("*")) if path.is_file()}}
        return {**meta, "digest": key_of(meta)}

    key = key_of([made_by, [store.folder for store in stores]])
    folder = cache / "shards" / key / f"{shard.number}-of-{shard.of}"
    if not is_whole(folder):
        publish(folder, build)
    return folder


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
