"""From what a form says to the words of `powertrain train`: recipe keys alone, and paths inside the page's folders alone."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.recipe import Recipe, Resolved, flat, quoted, resolve, shipped_recipes
from powertrain.records import WrongUse
from powertrain.web.places import NotThere, Places

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
CORPORA = ("stdlib", "shakespeare", "docstrings")
NOT_PATHS = {"data.tokenizer": ("bpe", "char", "byte"), "data.chat_template": ("plain", "chatml", "raw")}
OF_A_FILE = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".md", ".parquet", ".arrow", ".yaml")
LONGEST, MOST_LINES = 4000, 200              # characters of a value, lines of further settings
WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Setting:
    key: str
    label: str
    help: str
    choices: tuple[tuple[str, str], ...] = ()            # value and words
    kind: str = "text"                       # or "number": what a keyboard on a phone shows


WHAT = (
    Setting("method", "Method", "LoRA trains small matrices beside a frozen model. QLoRA also keeps that model in 4 bits.", (
        ("", "LoRA for a trained model, else from scratch"), ("lora", "LoRA"), ("qlora", "QLoRA"), ("full", "all weights"),
        ("scratch", "from scratch"))),
    Setting("model.path", "Model", "A folder, a hub id such as Qwen/Qwen2.5-0.5B, or a run such as runs/NAME. Empty: a new "
                                   "model, trained from scratch."),
    Setting("model.task", "Task", "What the model is to do with your rows.", (
        ("", "what the model was made for"), ("causal", "write text, or chat"), ("seq2seq", "turn one text into another: "
                                                                                       "summaries, translations"),
        ("span", "find the answer in a text"))),
    Setting("data.source", "Data", "A file, a folder, a hub id, or a corpus: stdlib, shakespeare, docstrings. Rows may be "
                                   "JSONL, CSV or Parquet; text may be anything."),
    Setting("data.format", "Format", "How a row is read, such as messages or alpaca. Empty: found by looking at the rows."))
HOW = (
    Setting("train_time_s", "Time, seconds", "The run gets as many steps as fit into this time. Empty: the recipe says.",
            kind="number"),
    Setting("num_train_epochs", "Epochs", "How often each example is seen: once, if nothing says otherwise.", kind="number"),
    Setting("max_steps", "Steps", "The number of updates, in place of epochs.", kind="number"),
    Setting("train_batch_size", "Batch", "Examples in one update. It is split where the memory needs it, with the same result.",
            kind="number"),
    Setting("learning_rate", "Learning rate", "Empty: the recipe's, or the method's: 2e-4 for LoRA, 2e-5 for all weights.",
            kind="number"),
    Setting("data.max_length", "Longest example, tokens", "Of a trained model's rows. Longer ones are cut or dropped.",
            kind="number"),
    Setting("data.block", "Block, tokens", "Of text from scratch: how much the model sees at once.", kind="number"),
    Setting("lora.r", "LoRA rank", "Width of the trained matrices. More learns more and takes more memory.", kind="number"),
    Setting("eval_steps", "Evaluate every, steps", "Loss on text that is held out. Also '1 epoch'; 0 for never."),
    Setting("save_steps", "Save every, steps", "A checkpoint, from which a killed run goes on; auto: every 10 minutes."),
    Setting("mirror", "Mirror", "Where checkpoints are copied too, such as s3://bucket/prefix or file:///folder."))
SETTINGS = (*WHAT, *HOW)


@dataclass(frozen=True)
class Asked:
    """A run that somebody has asked for."""

    words: tuple[str, ...]                   # a shipped recipe's name, if any, then key=value
    resolved: Resolved
    may_download: bool                       # the model or the data come from the hub, which a plan does not load

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe


def asked(values: Mapping[str, Any], places: Places) -> Asked:
    """Return the run that a form asks for. Raises WrongUse for an unknown key, or a path outside the page's folders."""
    recipe, like = _text(values, "recipe"), _text(values, "like")
    if recipe and recipe not in shipped_recipes():
        raise WrongUse(f"there is no shipped recipe {recipe[:60]!r}; choose one from the list")
    first = [recipe] if recipe else [places.shown(places.run(like) / "recipe.yaml")] if like else []
    words = [f"{one.key}={_value(_text(values, one.key))}" for one in SETTINGS if _text(values, one.key)]
    name = _text(values, "name")
    words += [f"name={quoted(name)}"] if name else []
    words += _further(_text(values, "more"))
    resolved = resolve(first[0] if first else None, words)
    check(resolved.recipe, places, own=bool(like))
    sources = (resolved.recipe.model.path or "", *resolved.recipe.data.sources)
    return Asked((*first, *words), resolved, any(is_on_hub(source, places) for source in sources))


def is_on_hub(name: str, places: Places) -> bool:
    """Return whether a name is a hub id, and not a path. Raises WrongUse for a path of the page's own that is not there.

    A hub id looks like a path of two parts: one of the page's folders, or of a file, would be looked for on the hub in vain.
    """
    if not HUB_ID.fullmatch(name) or (places.root / name).exists():
        return False
    own = [folder.name for folder in (places.runs, places.uploads, places.exports)]
    if name.partition("/")[0] in own or name.lower().endswith(OF_A_FILE):
        raise NotThere(f"there is no {name} here; name a file or folder that is there, or a hub id such as Qwen/Qwen2.5-0.5B")
    return True


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key, "")
    if not isinstance(value, str) or len(value) > LONGEST or "\0" in value:
        raise WrongUse(f"{key} is not a text of at most {LONGEST:,} characters")
    return value.strip()


def _value(text: str) -> str:
    return text if NUMBER.fullmatch(text) else quoted(text)


def _further(text: str) -> list[str]:
    """Return the words of further settings, one a line."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if len(lines) > MOST_LINES:
        raise WrongUse(f"there are {len(lines):,} further settings; use at most {MOST_LINES}, or a recipe file")
    for line in lines:
        key = line.partition("=")[0]
        if "=" not in line or not re.fullmatch(r"[A-Za-z_][\w.-]*", key):
            raise WrongUse(f"{line[:60]!r} is no setting; write KEY=VALUE, such as seed=7, one on each line")
    return lines


def check(recipe: Recipe, places: Places, *, own: bool = False) -> None:
    """Raise WrongUse for what a page may not start: code that comes with a model, and files outside its folders.

    `own`: the recipe is that of a run here, whose output folder is replaced.
    """
    if recipe.model.trust_remote_code:
        raise WrongUse("the page runs no code that comes with a model; if you trust it, use `powertrain train` with "
                       "model.trust_remote_code=true in a terminal")
    if recipe.output_dir is not None and not own:
        raise WrongUse("the page chooses the folder of a run, in runs/; leave output_dir out")
    values: dict[str, Sequence[str | None]] = {
        "model.path": [recipe.model.path], "model.adapter": [recipe.model.adapter], "data.source": recipe.data.sources,
        "data.validation_source": [recipe.data.validation_source], "data.tokenizer": [recipe.data.tokenizer],
        "data.chat_template": [recipe.data.chat_template]}
    for key, paths in values.items():
        for path in paths:
            if path and path not in (*CORPORA, *NOT_PATHS.get(key, ())) and not path.startswith("recipe:"):
                _check_path(path, places)
    if recipe.mirror and recipe.mirror.startswith("file:"):
        places.inside(re.sub(r"^file:/*", "/", recipe.mirror))


def _check_path(path: str, places: Places) -> None:
    if "://" in path:
        raise WrongUse(f"{path[:80]} is an address, and the page fetches from the hub alone; download it, and name the file or "
                       "a hub id such as Qwen/Qwen2.5-0.5B")
    plain = path[:found.start()].rpartition("/")[0] or "." if (found := WILD.search(path)) else path
    if is_on_hub(path, places):
        return
    places.inside(plain)


def values_of(recipe: Recipe, keys: Sequence[str]) -> dict[str, str]:
    """Return what a form shows of a recipe: what differs from the default."""
    now, default = dict(flat(recipe.model_dump())), dict(flat(Recipe().model_dump()))
    return {key: "" if now.get(key) is None else ", ".join(now[key]) if isinstance(now[key], list) else str(now[key])
            for key in keys if now.get(key) != default.get(key)}
