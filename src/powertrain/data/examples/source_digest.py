"""Whether a source is still what it was: a digest that changes with its content.

Files up to 64 MiB are read whole. Of larger ones the length, the time of the last change and samples from beginning to end
are taken, so that opening a 2 GB store takes no longer than opening a small one; a copy with a new time counts as changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from powertrain.data.corpora import CORPORA
from powertrain.data.reading import named_files
from powertrain.data.rows.folders import data_suffix, folder_files
from powertrain.data.rows.reading import ROW_SETS, read_rows
from powertrain.records import WrongUse

READ_WHOLE_BYTES = 64 << 20
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
PIECE_BYTES = 1 << 20


def digest_source(source: str, *, cache: Path, split: str | None, text_field: str, most: int | None) -> str:
    """sha256 (hex) of what `read_rows` would read. A source that is no file is read row by row."""
    digest = hashlib.sha256()
    path = Path(source).expanduser()
    if source in CORPORA or source in ROW_SETS or (not path.exists() and _is_no_path(path)):
        for row in read_rows(source, cache=cache, split=split, text_field=text_field, most=most):
            digest.update(repr(row).encode(errors="surrogatepass"))
    else:
        for file in _source_files(path, source, split):
            digest.update(f"{file}\0{digest_file(file)}\0".encode(errors="surrogatepass"))
    return digest.hexdigest()


def digest_file(path: Path) -> str:
    """sha256 (hex) of a file's content, or of its length, time and samples if it is large."""
    digest = hashlib.sha256()
    try:
        stat = path.stat()
        with path.open("rb") as file:
            if stat.st_size <= READ_WHOLE_BYTES:
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
                return digest.hexdigest()
            digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
            for sample in range(SAMPLES):
                file.seek((stat.st_size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    return digest.hexdigest()


def _is_no_path(path: Path) -> bool:
    return data_suffix(path) is None and not any(character in str(path) for character in "*?[")


def _source_files(path: Path, source: str, split: str | None) -> Sequence[Path]:
    return folder_files(path, split) if path.is_dir() else named_files(source)
