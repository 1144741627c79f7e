"""Which files a source names: a file, a glob or a folder; and which part is read where a source comes in parts.

In a folder, a file is passed over if it is hidden (a leading dot), in a run's folder, empty, or binary by git's rule (a NUL
byte in the first 8000 bytes). A folder that `datasets` saved lists its files itself. In any other folder the files are sorted
by name. Files whose name or folder says train, valid or test are parts, and one part is read: train by default. Rows in two
formats are refused, because they are most often the same rows twice. A mixture of rows and texts is refused too, except for
the files that describe a dataset: README, LICENSE and their like.
"""

import difflib
import glob
import hashlib
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath

from powertrain.records import WrongUse, several
from powertrain.records.errors import did_you_mean
from powertrain.records.json_files import read_json

CORPORA = ("stdlib", "shakespeare")          # named sources of text: data/documents.py
SNIFFED_BYTES = 8000                         # git: buffer_is_binary looks at the first 8000 bytes
READ_WHOLE_BYTES = 64 << 20                  # of files, to know them again
SAMPLES, SAMPLE_BYTES = 64, 1 << 16          # of larger ones, and at least two of each


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn a file that cannot be opened, read or unpacked into WrongUse with its name."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise WrongUse(f"{path} cannot be read: {reason}; change its permissions, mend it or leave it out") from error


def named_files(source: str) -> list[Path]:
    """Return the files that `source` names, sorted. Raises WrongUse if there is none."""
    path = Path(source).expanduser()
    if path.is_dir():
        return text_files(path)
    if path.is_file():
        return [path]
    if glob.has_magic(str(path)):
        matches = (Path(match) for match in glob.glob(str(path), recursive=True))
        files = sorted((match for match in matches if match.is_file()), key=Path.as_posix)
        if not files:
            raise WrongUse(f"no file matches {source}; quote the pattern and check it with ls")
        return files
    if path.exists():
        raise WrongUse(f"{source} is neither a file nor a folder; write its content to a file first")
    raise WrongUse(f"{source}: there is no such file or folder{similar(path)}")


def similar(path: Path) -> str:
    """Return the end of a message that there is no such path: a path that may have been meant, or where to look."""
    return nearest(path) or f"; give a path from {os.getcwd()}, or a corpus: {', '.join(CORPORA)}"


def nearest(path: Path) -> str:
    """Return the end of a message that there is no such path: a path that may have been meant, or nothing."""
    try:
        neighbours = os.listdir(path.parent)
    except OSError:
        neighbours = []
    near = difflib.get_close_matches(path.name, neighbours, n=1)
    if near:
        return f"; did you mean {path.parent / near[0]}?"
    corpus = difflib.get_close_matches(path.name, CORPORA, n=1)
    return f"; did you mean the corpus {corpus[0]}?" if corpus else ""


def text_files(folder: Path) -> list[Path]:
    """Return the text files in `folder`, recursively, sorted by relative path; links to folders are not followed."""
    files = [path for path in visible_files(folder) if looks_like_text(path)]
    if not files:
        raise WrongUse(f"{folder} has no text files: all are hidden, empty or binary; "
                       "give a folder with text")
    return files


def visible_files(folder: Path) -> list[Path]:
    """Return the files in `folder` that are not hidden, recursively, sorted by relative path. Raises WrongUse."""
    def refuse(error: OSError) -> None:
        raise WrongUse(f"{error.filename} cannot be read: {error.strerror}; "
                       f"change its permissions or name the files with a glob, such as '{folder}/*.txt'")

    files = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and not is_run(Path(parent, name))]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(filter(Path.is_file, files), key=lambda path: path.relative_to(folder).as_posix())


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run of Powertrain's: with data=. the next run would read what the last one wrote."""
    return all((folder / name).exists() for name in ("recipe.yaml", "plan.json", "checkpoints"))


def looks_like_text(path: Path) -> bool:
    """Return whether a file is text by git's rule. An empty file is none."""
    with readable(path), path.open("rb") as file:
        head = file.read(SNIFFED_BYTES)
    return bool(head) and b"\0" not in head


def digests_of(paths: Sequence[Path]) -> list[str]:
    """Return the sha256 (hex) of each file's content, or of its length, the time of its last change and samples of it.

    The latter where all files together are large: to open them takes no longer then; a copy with a new time counts as changed.
    """
    samples = max(2, SAMPLES // len(paths)) if size_of(paths) > READ_WHOLE_BYTES else 0
    return [_digest_of(path, samples) for path in paths]


def size_of(paths: Sequence[Path]) -> int:
    """Return the bytes of all files together."""
    size_bytes = 0
    for path in paths:
        with readable(path):
            size_bytes += path.stat().st_size
    return size_bytes


def _digest_of(path: Path, samples: int) -> str:
    with readable(path), path.open("rb") as file:
        if not samples:
            return hashlib.file_digest(file, "sha256").hexdigest()
        stat = path.stat()
        digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
        for sample in range(samples):
            file.seek(max(0, stat.st_size - SAMPLE_BYTES) * sample // (samples - 1))
            digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()


# ------------------------------------------------------------------------------------------------ parts

TRAIN = "train"
# a word in a file's or folder's name -> the part it holds, as the hub's own loader reads them
WORDS = {"train": TRAIN, "training": TRAIN, "valid": "validation", "validation": "validation", "val": "validation",
         "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test"}


def choose_split(where: str, names: Sequence[str], wanted: str | None) -> str:
    """Return the one of `names` that `wanted` means: train if it is None, or the only one there is. Raises WrongUse."""
    if wanted is None and len(names) == 1:
        return names[0]
    meant = wanted or TRAIN
    if meant in names:
        return meant
    for name in names:
        if WORDS.get(name) == WORDS.get(meant, meant):
            return name
    cure = did_you_mean(meant, names, key="data.split", otherwise="name one with data.split=NAME")
    raise WrongUse(f"{where} has no part {meant!r}; it has: {', '.join(names)}{cure}")


def named_split(path: PurePath) -> str | None:
    """Return the part that a file's own name says it holds, else the nearest folder's: "data/train-00000-of-00002.parquet"."""
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in WORDS:
                return WORDS[word]
    return None


# ------------------------------------------------------------------------------------------------ folders of rows

LINES, SHEETS, OBJECTS, TABLES = (".jsonl", ".ndjson"), (".csv", ".tsv"), (".json",), (".parquet", ".arrow", ".feather")
SAVE_AGAIN = "save the dataset again"
PACKED = ".gz"
DESCRIPTIONS = ("readme", "license", "licence", "citation", "changelog", "notice", "copying", "datasheet")
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "croissant.json", "metadata.json")


def data_suffix(path: Path) -> str | None:
    """Return the suffix that makes a file rows, such as ".jsonl" or ".csv.gz"; None for a text."""
    name = path.name.lower()
    inner = name.removesuffix(PACKED)
    packed = PACKED if inner != name else ""
    suffixes = (*LINES, *SHEETS, *OBJECTS) if packed else (*LINES, *SHEETS, *OBJECTS, *TABLES)
    return next((f"{suffix}{packed}" for suffix in suffixes if inner.endswith(suffix)), None)


def folder_files(folder: Path, split: str | None) -> list[Path]:
    """Return the files to read, in order. Raises WrongUse if there is none, or it is not clear which."""
    if (folder / "dataset_dict.json").is_file():
        parts = read_json(folder / "dataset_dict.json", SAVE_AGAIN).get("splits")
        if not isinstance(parts, list) or not parts:
            raise WrongUse(f"{folder} is a saved dataset, and its dataset_dict.json lists no splits; save it again")
        return _saved_files(folder / choose_split(str(folder), [str(part) for part in parts], split))
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _saved_files(folder)
    return _found_files(folder, split)


def _saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of one part that `datasets` saved."""
    listed = read_json(folder / "state.json", SAVE_AGAIN).get("_data_files")
    names = [str(entry.get("filename")) for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise WrongUse(f"{folder} is a saved dataset without its data: {', '.join(missing) or 'state.json lists no file'}; "
                       "save it again")
    return [folder / name for name in names]


def _found_files(folder: Path, split: str | None) -> list[Path]:
    files = [path for path in visible_files(folder) if path.stat().st_size]
    rows = [path for path in files if data_suffix(path) and path.name.lower() not in METADATA]
    others = [path for path in files if not data_suffix(path) and path.stem.lower() not in DESCRIPTIONS]
    texts = [path for path in others if looks_like_text(path)]
    # .json beside texts is a setting of the program whose sources these are
    if not rows or (texts and {data_suffix(path) for path in rows} == set(OBJECTS)):
        return text_files(folder)
    kinds = sorted({str(data_suffix(path)) for path in rows})
    cure = f"name the ones you mean with a glob, such as '{folder}/**/*{kinds[0]}'"
    if texts:
        raise WrongUse(f"{folder} mixes {several(len(rows), 'file')} of rows ({', '.join(kinds)}) and "
                       f"{several(len(texts), 'text')} (such as {texts[0].name}); {cure}")
    if len(kinds) > 1:
        raise WrongUse(f"{folder} holds rows as {' and '.join(kinds)}, which may be the same rows twice; {cure}")
    return _of_split(folder, rows, split)


def _of_split(folder: Path, files: Sequence[Path], split: str | None) -> list[Path]:
    """Return the files of one part. A file that names no part counts as training data."""
    parts: dict[str, list[Path]] = {}
    for path in files:
        parts.setdefault(named_split(path.relative_to(folder)) or TRAIN, []).append(path)
    if split is not None and split not in WORDS:
        named = [path for path in files if path.name.startswith((f"{split}.", f"{split}-")) or path.parent.name == split]
        if named:
            return named
    return parts[choose_split(str(folder), list(parts), split)]
