"""What a recipe needs from the network and this machine does not have yet: a corpus, a dataset or a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from powertrain.data.documents import SHAKESPEARE, corpus_file
from powertrain.recipe import Recipe
from powertrain.records import WrongUse
from powertrain.run.folder import NEWEST


class NotFetched(WrongUse):
    """A plan was asked for, and the recipe needs `downloads` that are not on this machine. A plan downloads nothing."""

    def __init__(self, downloads: tuple[str, ...], keys: tuple[str, ...]):
        missing = " and ".join(downloads)
        super().__init__(f"a plan downloads nothing, and this machine does not have {missing} yet; `powertrain data prepare` "
                         "with the same words downloads this, and so does `powertrain train`", keys=keys)
        self.downloads = downloads


def refuse_downloads(recipe: Recipe, cache: Path) -> None:
    """Raises NotFetched if a run of the recipe would have to download something first."""
    missing = dict(_missing(recipe, cache))
    if missing:
        raise NotFetched(tuple(missing.values()), tuple(missing))


def _missing(recipe: Recipe, cache: Path) -> Iterator[tuple[str, str]]:
    """Yield the recipe's key and what it names, for each download."""
    sources = [recipe.data.source] if isinstance(recipe.data.source, str) else recipe.data.source
    if recipe.method == "scratch":
        if "shakespeare" in sources and not corpus_file(SHAKESPEARE, cache).is_file():
            yield "data.source", "the text shakespeare"
        return
    path = recipe.model.path or ""
    if path and not path.startswith(NEWEST) and not Path(path).expanduser().exists():
        from powertrain.models.huggingface.hub import HUB_ID, find_cached, missing_files

        if HUB_ID.fullmatch(path):
            cached = find_cached(path, recipe.model.revision)
            if cached is None or missing_files(cached):
                yield "model.path", f"the model {path}"
    for source in sources:
        if not Path(source).expanduser().exists() and _is_new_dataset(source):
            yield "data.source", f"the dataset {source}"


def _is_new_dataset(source: str) -> bool:
    """Whether `source` names a dataset of the hub that the library's cache does not have."""
    from powertrain.data.rows.tables import is_hub_id

    if not is_hub_id(source):
        return False
    try:
        from datasets.config import HF_DATASETS_CACHE
    except ImportError:
        return False                         # reading the data says what is missing
    return not (Path(HF_DATASETS_CACHE) / source.partition(":")[0].replace("/", "___")).is_dir()
