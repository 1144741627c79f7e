"""Other trainers' names for the keys of a recipe, translated and noted.

The source documents, Hugging Face, nanoGPT, TRL, Axolotl, LLaMA-Factory and Unsloth call the same things by other names.
Each is accepted, turned into the recipe's own key, and said: nothing is renamed in silence, a key that can have no effect
here says why, and one whose neglect would give another model is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from powertrain.recipe.schema import LoraRecipe, Recipe
from powertrain.recipe.single_spellings import SINGLE
from powertrain.recipe.spelling_tables import (
    NO_EFFECT,
    NO_EFFECT_BEGINNING,
    OFF,
    REFUSED,
    SAME_VALUE,
    SECTIONS,
    TECHNIQUE_SETTING,
    TECHNIQUE_SWITCH,
    TOGETHER,
)
from powertrain.recipe.together_spellings import MEANINGS, Renamed, shown

MEANING = {key: meaning for meaning, keys in TOGETHER.items() for key in keys}


def translate(values: Mapping[str, Any], tunes: bool | None = None) -> tuple[Renamed, list[str]]:
    """(dotted keys with our names, one note per translated key). Keys it does not know pass through unchanged.

    `tunes`: whether the whole recipe trains a pretrained model, which decides what a sequence length is of; None: as far
    as `values` say. Raises ValueError where two spellings disagree about one key, or a value has no counterpart here.
    """
    ours: Renamed = {}
    notes: list[str] = []
    together: dict[str, Renamed] = {}            # meaning -> what was said of it, as it was spelled
    for key, value in _opened(values):
        meaning = MEANING.get(_plain(key)) if not _is_ours(key) else None
        if meaning is not None:
            _put(together.setdefault(meaning, {}), _plain(key), value, key)
            continue
        renamed, note = _translate_one(key, value)
        for name, item in renamed.items():
            _put(ours, name, item, key)
        notes += [note] if note else []
    tunes = fine_tunes(values) if tunes is None else tunes
    for meaning, said in together.items():
        renamed, note = MEANINGS[meaning](said, tunes)
        for name, item in renamed.items():
            _put(ours, name, item, " x ".join(said) if meaning == "batch" else ", ".join(said))
        notes.append(note)
    return ours, notes


def fine_tunes(values: Mapping[str, Any]) -> bool:
    """Whether these values name a pretrained model, or a way to train one."""
    return any(
        (SAME_VALUE.get(_plain(key), key) == "model.path" and value is not None)
        or (key == "model" and isinstance(value, str)) or (key == "method" and value not in (None, "scratch"))
        or MEANING.get(key) == "method" for key, value in _opened(values))


def clean(values: Mapping[str, Any]) -> Renamed:
    """Values that Hugging Face writes with a sign for "not set": `max_steps: -1`."""
    return {key: None if key == "max_steps" and value == -1 else value for key, value in values.items()}


def _opened(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`training.batch_size` of another trainer's file is `batch_size`, and so is `lora.batch_size` of document 000's."""
    for key, value in values.items():
        section, _, rest = key.partition(".")
        foreign = section == "lora" and rest not in LoraRecipe.model_fields and (
            rest in Recipe.model_fields or _is_known(rest))
        yield (rest if rest and (section in SECTIONS or foreign) else key), value


def is_known(key: str) -> bool:
    """Whether this key, as another trainer spells it, has a translation here or a reason why it has no effect."""
    section, _, rest = key.partition(".")
    return _is_known(key) or _is_known(_plain(key)) or (section in SECTIONS and bool(rest) and is_known(rest))


def _is_known(key: str) -> bool:
    tables: tuple[Mapping[str, Any], ...] = (
        SAME_VALUE, SINGLE, MEANING, TECHNIQUE_SETTING, TECHNIQUE_SWITCH, NO_EFFECT, REFUSED)
    return any(key in table for table in tables) or key.startswith(tuple(NO_EFFECT_BEGINNING))


def _plain(key: str) -> str:
    return key.removeprefix("model.").removeprefix("data.")


def _is_ours(key: str) -> bool:
    """Whether the recipe itself has this key."""
    section, _, leaf = key.partition(".")
    info = Recipe.model_fields.get(section)
    if info is None or not leaf:
        return info is not None
    kinds = [info.annotation, *get_args(info.annotation)]
    return any(isinstance(kind, type) and issubclass(kind, BaseModel) and leaf in kind.model_fields for kind in kinds)


def _translate_one(key: str, value: Any) -> tuple[Renamed, str | None]:
    if key in SINGLE or (not _is_ours(key) and _plain(key) in SINGLE):
        renamed, why = SINGLE[key if key in SINGLE else _plain(key)](value)
        if renamed == {key: value}:
            return renamed, None
        if not renamed and why:
            return {}, f"{key}: {value} has no effect here: {why}"
        return renamed, f"{key}: {value} is written {shown(renamed)} here{f'; {why}' if why else ''}"
    if _is_ours(key):
        return {key: value}, None
    return _translate_by_table(key, value)


def _translate_by_table(key: str, value: Any) -> tuple[Renamed, str | None]:
    plain = _plain(key)
    ours = SAME_VALUE.get(plain, key)
    if ours != key and (plain == key or ours.startswith(key.removesuffix(plain))):
        if value in (None, []):              # LLaMA-Factory's and Unsloth's files name keys that they leave open
            return {}, f"{key}: {value} has no effect here: it sets nothing"
        return {ours: value}, f"{key} is called {ours} here"
    if key in REFUSED:
        if value in OFF:
            return {}, f"{key}: {value} has no effect here: it is off anyway"
        raise ValueError(f"{key}={value!r} cannot be had here: {REFUSED[key]}")
    if key in TECHNIQUE_SETTING:
        technique, setting = TECHNIQUE_SETTING[key]
        return {f"techniques.{technique}.{setting}": value}, f"{key} is techniques.{technique}.{setting} here"
    if key in TECHNIQUE_SWITCH:
        return _switch(key, value)
    begins = next((start for start in NO_EFFECT_BEGINNING if key.startswith(start)), None)
    why = NO_EFFECT_BEGINNING[begins] if begins else NO_EFFECT.get(key)
    return ({key: value}, None) if why is None else ({}, f"{key} has no effect here: {why}")


def _switch(key: str, value: Any) -> tuple[Renamed, str | None]:
    technique = TECHNIQUE_SWITCH[key]
    if value in ("auto", None):
        return {}, f"{key}: {value} has no effect here: the plan decides about techniques.{technique}"
    if value == "unsloth":                   # its name for checkpointing with offloaded inputs
        value = True
    if not isinstance(value, bool):
        return {key: value}, None
    pin = {f"techniques.{technique}": "on" if value else "off"}
    return pin, f"{key}: {str(value).lower()} is written {shown(pin)} here"


def _put(ours: Renamed, name: str, value: Any, spelled: str) -> None:
    if name in ours and ours[name] != value:
        raise ValueError(f"{spelled}={value} and an earlier {name}={ours[name]} are the same setting; keep one of them")
    ours[name] = value
