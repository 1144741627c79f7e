"""From a recipe file and `key=value` words to one typed recipe in which every value has its origin."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError

from powertrain.recipe import spellings
from powertrain.recipe.plain_yaml import Yaml
from powertrain.recipe.schema import COMPARING, COMPARING_RATES, METHOD_DEFAULTS, SECTIONS, Recipe, known_keys
from powertrain.records import WrongUse, origins
from powertrain.records.errors import did_you_mean
from powertrain.records.origins import Origin
from powertrain.records.redaction import holds_a_secret, redacted

DEFAULT = "default"
SHORT = {"data": "source", "optimizer": "name", "objective": "name"}      # `data=PATH` is short for `data.source=PATH`
# what YAML reads as the end of a line, as nothing or not at all, where it stands in a text as it is
UNREAD_BY_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff\ud800-\udfff]")
CURES: Mapping[str, str] = {                 # pydantic's kind of error -> what to write instead
    "greater_than": "use a number greater than {gt}", "greater_than_equal": "use {ge} or more",
    "less_than": "use a number less than {lt}", "less_than_equal": "use {le} or less", "literal_error": "use {expected}",
    "int_type": "use a whole number", "float_type": "use a number", "bool_type": "use true or false",
    "string_type": "use text", "list_type": "use a list, such as [a, b]", "finite_number": "use a finite number"}
DATA_FILES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md")
LONGEST_SHOWN = 100          # characters of a value, in an error
LARGEST_FILE_BYTES = 1 << 20  # a recipe is a page of text


@dataclass(frozen=True)
class Resolved:
    """A recipe and, for each dotted key, where its value comes from: default, a file, the command line, the planner."""

    recipe: Recipe
    origins: Mapping[str, Origin]
    notes: tuple[str, ...] = ()              # what was translated from another trainer's spelling

    def is_open(self, key: str) -> bool:
        """Return whether the user has given no value for the key: it has a default."""
        return self.origin(key).is_default

    def origin(self, key: str) -> Origin:
        """Return where the value of a dotted key comes from."""
        return self.origins.get(key, origins.DEFAULT)

    def with_planned(self, values: Mapping[str, tuple[Any, str]]) -> Self:
        """Return the recipe with values that the user left open: dotted key -> (value, reason)."""
        plain = self.recipe.model_dump()
        for key, (value, _) in values.items():
            put(plain, key, value)
        planned = {key: Origin("planner", reason=reason) for key, (_, reason) in values.items()}
        return dataclasses.replace(self, recipe=Recipe.model_validate(plain), origins={**self.origins, **planned})

    def to_yaml(self) -> str:
        """Return the recipe as YAML that reads back to itself, with each value's origin as a comment."""
        return "\n".join(yaml_lines(flat(self.recipe.model_dump()), lambda key: str(self.origin(key)))) + "\n"


def yaml_lines(values: Iterable[tuple[str, Any]], comment: Callable[[str], str]) -> Iterator[str]:
    """Yield a recipe's lines for its dotted keys, those of a section in one piece, each with its comment if it has one."""
    opened = ""
    for key, value in values:
        section, _, leaf = key.rpartition(".")
        if section and section != opened:
            yield f"{section}:"
        opened = section
        text, said = f"{'  ' if section else ''}{leaf}: {quoted(value)}", comment(key)
        yield f"{text:<44}  # {said}" if said else text


def quoted(value: Any) -> str:
    """Return the value as JSON that YAML reads as the same value."""
    return UNREAD_BY_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values, with tables opened; the pins of each technique stay one value."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not prefix:
            yield from flat(value, f"{name}.")
        else:
            yield name, value


def shipped_recipes() -> dict[str, str]:
    """Return the recipes that come with the package: name -> YAML text."""
    folder = resources.files("powertrain") / "recipes"
    return {Path(entry.name).stem: entry.read_text(encoding="utf-8")
            for entry in sorted(folder.iterdir(), key=lambda entry: entry.name) if entry.name.endswith(".yaml")}


def find_recipe(name: str) -> tuple[str, Origin]:
    """Return (text, origin) of a recipe file, or of a shipped recipe by its name. Raises WrongUse if there is neither."""
    path = Path(name)
    if path.suffix.lower() in DATA_FILES:
        raise WrongUse(f"{name} is no recipe; write data={name} to train on it")
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUse(f"the recipe {name} cannot be read: {error}") from None
        if len(text) > LARGEST_FILE_BYTES:
            raise WrongUse(f"{name} has {len(text):,} characters; a recipe has at most {LARGEST_FILE_BYTES:,}. To "
                           f"train on this file, use data={name}")
        return text, Origin("file", name)
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name], Origin("recipe", name)
    otherwise = (f"write {name}=VALUE to set this key" if name in known_keys() else
                 f"the shipped recipes are {', '.join(shipped)}")
    hint = did_you_mean(name, shipped, otherwise=otherwise)
    raise WrongUse(f"there is no recipe file {name!r}, and no shipped recipe has this name{hint}")


def resolve(name: str | None = None, overrides: Sequence[str] = ()) -> Resolved:
    """Apply default values, then the recipe's, then `key=value` words. Raises WrongUse with the key, the file and the cure."""
    words = _parse_words(overrides)
    # the embedded recipe trains from scratch: words that name a pretrained model are a recipe of their own
    text, origin = ("", origins.COMMAND_LINE) if name is None and spellings.fine_tunes(words) else find_recipe(name or DEFAULT)
    written = dict(flat(read_yaml(text, str(origin))))
    _refuse_secrets({**written, **words})
    tunes = spellings.fine_tunes(words) or spellings.fine_tunes(written)
    from_file, file_notes = _translated(written, tunes, str(origin))
    spoken, word_notes = _translated(words, tunes, "command line")
    own_data = from_file.get("data.source", Recipe().data.source)
    if origin.kind == "recipe" and spoken.get("data.source", own_data) != own_data:
        from_file.pop("sample.prompt", None)     # a shipped recipe's prompt is a piece of its own corpus
    values = {**from_file, **spoken}
    if "techniques" in spoken and spoken["techniques"] is None:
        values["techniques"] = {}
    _drop_rivals(values, spoken)
    _check_keys(values, {**dict.fromkeys(from_file, str(origin)), **dict.fromkeys(spoken, "command line")})
    of_method = _method_defaults(values)
    values = {**of_method, **values}
    nested: dict[str, Any] = {}
    for key, value in values.items():
        put(nested, key, value)
    try:
        recipe = Recipe.model_validate(nested)
    except ValidationError as error:
        raise WrongUse(_in_one_sentence(error, from_file, spoken, str(origin))) from None
    found = {key: origins.COMMAND_LINE if _names(key, spoken) else origin if _names(key, from_file) else
             Origin("method default", recipe.method) if key in of_method else origins.DEFAULT
             for key, _ in flat(recipe.model_dump())}
    return Resolved(recipe, found, tuple(file_notes + word_notes))


def resolve_words(words: Sequence[str]) -> Resolved:
    """Resolve the recipe named first, if any, with the `key=value` words after it."""
    first_is_recipe = bool(words) and "=" not in words[0] and not words[0].startswith("--")
    return resolve(words[0], words[1:]) if first_is_recipe else resolve(None, words)


def _method_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that depend on the method, which is lora if only a pretrained model is named."""
    method = values.get("method", "scratch" if values.get("model.path") is None else "lora")
    if method == "scratch":
        return {}
    compares = values.get("objective.name") in COMPARING and str(method) in COMPARING_RATES
    rate = {"learning_rate": COMPARING_RATES[str(method)]} if compares else {}
    return {"method": method, **METHOD_DEFAULTS.get(str(method), {}), **rate}


def _names(key: str, given: Mapping[str, Any]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for name in given)


def read_yaml(text: str, origin: str) -> dict[str, Any]:
    """Return the keys of a recipe as they stand in its file. Raises WrongUse if the text is no recipe."""
    try:
        values = yaml.load(text, Yaml)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", error)
        raise WrongUse(f"{origin}{line} is not YAML that a recipe may have: {problem}") from None
    except RecursionError:
        raise WrongUse(f"{origin} nests its values too deep to be read") from None
    except (ValueError, LookupError) as error:               # `!!int word`, `!!bool maybe`, a number of 5,000 digits
        raise WrongUse(f"{origin} has a value that does not fit its tag or is too long: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise WrongUse(f"{origin} is not a recipe: the file holds a {type(values).__name__} instead of keys with values")
    return {key: {SHORT[key]: value} if key in SHORT and isinstance(value, (str, list)) else value
            for key, value in values.items()}


def _parse_words(words: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` words; the value is read as YAML, so 0, false and '' keep their types."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals or not key:
            raise WrongUse(f"{word!r} is not key=value; write for example learning_rate=3e-4 or model.layers=4")
        value = _value(text)
        values[f"{key}.{SHORT[key]}" if key in SHORT and isinstance(value, (str, list)) else key] = value
    known = known_keys()                     # such as data.columns, whose value is a table
    return {name: item for key, value in values.items()
            for name, item in ([(key, value)] if "." in key and key in known else flat({key: value}))}


def _value(text: str) -> Any:
    """Return the value of a word, read as YAML, but without comments and tags: a # or ! is meant as it stands."""
    if not text.strip():
        return ""
    if text == "!" or (re.search(r"(^|\s)#", text) and not text.lstrip().startswith(("'", '"', "[", "{"))):
        return text
    try:
        return yaml.load(text, Yaml)
    except (yaml.YAMLError, ValueError, LookupError, RecursionError):
        return text


def _translated(values: Mapping[str, Any], tunes: bool, origin: str) -> tuple[dict[str, Any], list[str]]:
    try:
        ours, notes = spellings.translate(values, tunes)
    except WrongUse as error:
        raise WrongUse(f"{origin}: {error}", keys=error.keys, cure=error.cure) from None
    return ours, [f"{origin}: {note}" for note in notes]


def _drop_rivals(values: dict[str, Any], spoken: Mapping[str, Any]) -> None:
    """Remove a value of the file if the command line sets the same thing by another key."""
    for one, other in (("max_steps", "train_time_s"), ("train_time_s", "max_steps"),
                       ("num_train_epochs", "max_steps"), ("num_train_epochs", "train_time_s"),
                       ("warmup_ratio", "warmup_steps"), ("data.tokenizer", "data.vocabulary")):
        if spoken.get(one) is not None and other not in spoken:
            values.pop(other, None)


def put(nested: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of nested tables; a table joins the table that is there."""
    *sections, leaf = key.split(".")
    for section in sections:
        if not isinstance(nested.get(section), dict):
            nested[section] = {}
        nested = nested[section]
    nested[leaf] = {**nested[leaf], **value} if isinstance(value, dict) and isinstance(nested.get(leaf), dict) else value


def _refuse_secrets(values: Mapping[str, Any]) -> None:
    """Raise WrongUse for a value with a token or password: a recipe is in run folders, reports and the lists of processes."""
    for key, value in values.items():
        if holds_a_secret(str(value)):
            raise WrongUse(f"{redacted(key)} holds a token or a password, and a run writes its recipe to files; "
                           "take it out, and log in with `hf auth login` or the variable that the service documents")


def _check_keys(values: Mapping[str, Any], places: Mapping[str, str]) -> None:
    known = known_keys()
    for key, value in values.items():
        if key in known or key.startswith(("techniques.", "optimizer.", "objective.")) or (key in SECTIONS and value == {}):
            continue
        if key in SECTIONS:
            raise WrongUse(f"{places[key]}: {key} is a table, not a value; write {key}.KEY=VALUE, where KEY is one of "
                           f"{', '.join(SECTIONS[key].model_fields)}")
        same_leaf = next((name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]), None)
        hint = did_you_mean(key, known, likeness=0.5, otherwise=f"did you mean {same_leaf}?" if same_leaf else
                            "`powertrain plan` prints every key with its value")
        raise WrongUse(f"{places[key]}: there is no key {key!r}{hint}")


def _in_one_sentence(error: ValidationError, from_file: Mapping[str, Any], spoken: Mapping[str, Any], origin: str) -> str:
    problem = error.errors()[0]
    parts = [str(part) for part in problem["loc"] if not str(part).startswith(("function-", "literal[", "dict["))]
    key = ".".join(part for part in parts if part not in {"int", "str", "float", "bool"})
    where = "command line" if _names(key, spoken) else origin if _names(key, from_file) else "recipe"
    if problem["type"] == "value_error":     # of one of our own checks
        return f"{where}: {key}{': ' if key else ''}{problem['ctx']['error']}"
    cure = CURES[problem["type"]].format(**problem.get("ctx", {})) if problem["type"] in CURES else problem["msg"]
    given = quoted(problem["input"])
    return f"{where}: {key} is {given if len(given) <= LONGEST_SHOWN else given[:LONGEST_SHOWN] + '...'}; {cure}"
