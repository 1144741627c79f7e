"""Other trainers' keys as a recipe's, each noted: nothing is renamed in silence.

A key that can have no effect here says why, and one that cannot be ignored without training something else is an error.
vocabulary.md has the keys.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from powertrain.recipe import vocabulary
from powertrain.recipe.conversions import CONVERSIONS, GROUPS, NotSupported, Renamed, by_value, shown
from powertrain.recipe.schema import SECTIONS, LoraRecipe, Recipe
from powertrain.recipe.vocabulary import Fate, Row, find
from powertrain.records import WrongUse

FOREIGN_SECTIONS = ("training", "train", "trainer", "logging")      # tables whose keys stand at our top level
OFF: tuple[Any, ...] = (None, False, 0, "", "no", "none", "off", [])


@dataclass(frozen=True)
class Translated:
    """What a key is in a recipe, and why."""

    ours: Renamed
    why: str = ""
    fate: Fate = "converted"


def translate(values: Mapping[str, Any], tunes: bool) -> tuple[Renamed, list[str]]:
    """Return the recipe's dotted keys, and a note for every key that was translated. Unknown keys stay as they are.

    `tunes`: whether the whole recipe trains a pretrained model, which decides what a sequence length is of.
    Raises WrongUse if two spellings disagree about one key, or a value has no counterpart.
    """
    ours: Renamed = {}
    notes: list[str] = []
    groups: dict[str, Renamed] = {}              # group -> its keys, as they were spelled
    for key, value in _opened(values):
        row = _row(key)
        if row is not None and row.fate == "together":
            _put(groups.setdefault(row.here, {}), row.key, value, key)
            continue
        found = Translated({key: value}) if row is None else translate_row(row, value)
        for name, item in found.ours.items():
            _put(ours, name, item, key)
        notes += [note] if (note := _note(key, value, found)) else []
    for group, said in groups.items():
        renamed, note = GROUPS[group](said, tunes)
        for name, item in renamed.items():
            _put(ours, name, item, " x ".join(said) if group == "batch" else ", ".join(said))
        notes.append(note)
    return ours, notes


def _row(key: str) -> Row | None:
    """Return the row by which a key is translated, itself or without `model.` and `data.`; None if it stays as it is."""
    row, plain = find(key), _plain(key)
    if is_ours(key):
        return row if row is not None and row.fate in ("converted", "only") else None
    if row is None and plain != key and (row := find(plain)) is not None:
        stays = row.fate in ("together", "converted", "only") or row.here.startswith(key.removesuffix(plain))
        return row if stays else None
    return row


def translate_row(row: Row, value: Any, tunes: bool = True) -> Translated:
    """Return what becomes of a key by itself. Raises NotSupported, or WrongUse for a value that its group cannot have."""
    if row.fate == "together":
        ours, _ = GROUPS[row.here]({row.key: value}, tunes)
        return Translated(ours, "" if ours else "this is a recipe's default")
    if row.fate == "converted":
        in_table = row.here in vocabulary.values()
        return Translated(*(by_value(row.here, row.key, value) if in_table else CONVERSIONS[row.here](value)))
    if row.fate == "only":
        if value is not None and str(value) not in row.here.split(", "):
            raise NotSupported(row.key, value, f"{row.why}; leave it out")
        return Translated({}, why=row.why)
    if row.fate in ("renamed", "same"):          # LLaMA-Factory's and Unsloth's files name keys that they leave open
        return Translated({}, "it sets nothing") if value is None or value == [] else \
            Translated({row.here: value}, fate="renamed")
    if row.fate == "refused":
        if any(value == off and isinstance(value, type(off)) for off in OFF):
            return Translated({}, "it is off")
        raise NotSupported(row.key, value, row.why)
    return _pinned(row, value) if row.fate == "planned" and row.here else Translated({}, row.why, row.fate)


def _pinned(row: Row, value: Any) -> Translated:
    """Return the pin of the technique that a key decides about."""
    technique, _, setting = row.here.removeprefix("techniques.").partition(".")
    if value in ("auto", None):
        return Translated({}, f"the plan decides about techniques.{technique}")
    if setting:
        return Translated({row.here: int(value) if isinstance(value, str) and value.isdecimal() else value}, fate="renamed")
    if value in ("unsloth", "offload", "offload_disk"):      # checkpointing with offloaded inputs
        value = True
    if not isinstance(value, bool):
        raise NotSupported(row.key, value, f"write techniques.{technique}: on or off")
    return Translated({row.here: "on" if value else "off"})


def _note(key: str, value: Any, found: Translated) -> str | None:
    if found.ours == {key: value}:
        return None
    if not found.ours:                           # a key may hold a token: its value is only said where it matters
        said = f"{key}: {value}" if found.fate in ("converted", "planned") else key
        return f"{said} has no effect here: {found.why}"
    if found.fate == "renamed":
        return f"{key} is called {next(iter(found.ours))} here"
    return f"{key}: {value} is written {shown(found.ours)} here{f'; {found.why}' if found.why else ''}"


def fine_tunes(values: Mapping[str, Any]) -> bool:
    """Return whether these values name a pretrained model, or a way to train one."""
    for key, value in _opened(values):
        row = find(_plain(key))
        named = key == "model.path" or (row is not None and row.here == "model.path" and not is_ours(key))
        if (named and value is not None) or (key == "model" and isinstance(value, str)) or (
                key == "method" and value not in (None, "scratch")) or (row is not None and row.here == "method"
                                                                        and row.fate == "together"):
            return True
    return False


def _opened(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys without another trainer's section: `training.batch_size` and `lora.batch_size` are `batch_size`."""
    for key, value in values.items():
        section, _, rest = key.partition(".")
        foreign = section == "lora" and rest not in LoraRecipe.model_fields and (
            rest in Recipe.model_fields or find(rest) is not None)
        yield (rest if rest and (section in FOREIGN_SECTIONS or foreign) else key), value


def is_known(key: str) -> bool:
    """Return whether a recipe takes this key, as another trainer spells it."""
    section, _, rest = key.partition(".")
    return find(key) is not None or find(_plain(key)) is not None or (
        section in FOREIGN_SECTIONS and bool(rest) and is_known(rest))


def _plain(key: str) -> str:
    return key.removeprefix("model.").removeprefix("data.")


def is_ours(key: str) -> bool:
    """Return whether the recipe itself has this key."""
    section, _, leaf = key.partition(".")
    return section in SECTIONS and leaf in SECTIONS[section].model_fields if leaf else section in Recipe.model_fields


def _put(ours: Renamed, name: str, value: Any, spelled: str) -> None:
    if name in ours and ours[name] != value:
        raise WrongUse(f"{spelled}={value} and an earlier {name}={ours[name]} are the same setting; keep one of them",
                       keys=(name,))
    ours[name] = value
