"""The rows of a dataset on the Hugging Face hub, through `datasets`.

It downloads once into its own cache and memory-maps the rows from there; without a network, what that cache has is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from powertrain.data.rows.row import Rejected, Row
from powertrain.data.rows.splits import choose_split
from powertrain.data.rows.table_files import BATCH_ROWS, optional_part, table_rows
from powertrain.records import WrongUse

HUB_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<config>[\w.+-]+))?")
# what nobody calls a dataset, but many a file
FILE_NAME = re.compile(r".*\.(txt|md|rst|py|html?|xml|ya?ml|log|pdf|docx?|xlsx?|zip|gz|xz|zst|tar|"
                       r"jsonl?|ndjson|csv|tsv|parquet|arrow|feather)", re.IGNORECASE)
SLICED = re.compile(r"[\[+]")                # "train[:10%]" and "train+test" are the hub library's own language


def is_hub_id(source: str) -> bool:
    """Whether `source` has the form of a dataset's name there, org/name or org/name:config, and not that of a file's."""
    return HUB_ID.fullmatch(source) is not None and FILE_NAME.fullmatch(source) is None


def hub_rows(source: str, split: str | None, *, hint: str = "") -> Iterator[Row | Rejected]:
    """The rows of one part. `hint` is said where there is no such dataset, before the cure.

    Raises WrongUse if the dataset does not exist, or is not in the cache and the hub cannot be reached.
    """
    found = HUB_ID.fullmatch(source)
    assert found is not None                 # the caller has asked is_hub_id
    datasets = optional_part("datasets", f"data.source={source} is a dataset of the hub, and reading it")
    asked = split if split and SLICED.search(split) else None
    try:
        loaded = datasets.load_dataset(found["name"], found["config"], split=asked)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise WrongUse(f"data.source={source}: the hub has no such dataset, or it is not yours to read{hint}; check the name, "
                       "and log in with `hf auth login` if it is private or gated") from error
    except ConnectionError as error:
        raise WrongUse(f"data.source={source}: neither a path nor a dataset in the cache of `datasets`, and the hub cannot "
                       f"be reached ({_first_line(error)}){hint}; load it once with a network, or give a path") from error
    except (ValueError, RuntimeError, OSError) as error:
        raise WrongUse(f"data.source={source} cannot be loaded: {_first_line(error)}{_config_cure(source, error)}") from error
    part = str(asked)
    if asked is None:
        part = choose_split(f"data.source={source}", list(loaded), split)
        loaded = loaded[part]
    return _rows(loaded, f"{source}[{part}]")


def _rows(dataset: Any, origin: str) -> Iterator[Row | Rejected]:
    # as Arrow: pictures and sounds stay encoded, since nobody looks at them
    yield from table_rows(dataset.with_format("arrow").iter(batch_size=BATCH_ROWS), origin)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _config_cure(source: str, error: Exception) -> str:
    text = str(error)
    if "onfig" not in text or ":" in source:
        return "; check data.source and data.split"
    listed = re.search(r"\[[^\]]*\]", text.replace("\n", " "))
    return f"; name one of its configurations{' ' + listed.group() if listed else ''} as {source}:CONFIG"
