"""A Python training script -> what it sets, each with its line, without running it.

`following.py` gives every call of a library with its arguments; here those that configure training become settings. Where two
calls of a kind set different things and it is not known which of them trains, what differs is unread.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from powertrain.audit import known_calls, reading_calls, reading_loops
from powertrain.audit.config_values import vocabulary
from powertrain.audit.following import Followed, follow
from powertrain.audit.script import Script, imports, parsed
from powertrain.audit.subject import Framework, Setting, Subject
from powertrain.audit.values import Made, Unread, is_known, plain
from powertrain.records import WrongUse

Found = tuple[str, Setting]
LARGEST_BYTES = 2**20                        # as of configs; every value is followed, so that a table of numbers takes long
ASSIGNED = re.compile(r"[\w.\"'\[\]]+\s*=")


def read_script(path: Path, text: str | None = None) -> Subject:
    """Return the settings of a Python script, or of another text in its place. Raises WrongUse where it cannot be parsed."""
    script = parse(path) if text is None else replace(parse(path), text=text, tree=parsed(text), imported=imports(parsed(text)))
    followed = follow(script)
    kinds = {name: frozenset().union(*(known_calls.origins(made) for made in values))
             for name, values in followed.variables.items()}
    training = reading_calls.Training(followed)
    script = replace(script, kinds=kinds, sections={name: made.node for name, made in training.sections.items()
                                                    if isinstance(made.node, ast.Call)},
                     trained=frozenset().union(*(known_calls.origins(made) for trainer in training.trainers
                                                 if isinstance(made := trainer.argument(0, "model"), Made))))
    settings: dict[str, Setting] = {}
    unread: dict[str, Setting] = {}
    unknown = dict(reading_calls.unknown_arguments(followed))
    # what is in doubt comes last: it says nothing where the same is certain
    for key, setting in sorted(found_settings(training), key=lambda found: isinstance(found[1].value, Unread)):
        if key not in unknown:
            put(settings, unread, key, setting)
    return Subject(path, framework(followed), settings, unread, unknown, script)


def parse(path: Path) -> Script:
    if path.stat().st_size > LARGEST_BYTES:
        raise WrongUse(f"{path} has {path.stat().st_size:,} bytes; a script has at most {LARGEST_BYTES:,}: is it data?")
    try:
        text = path.read_text(encoding="utf-8-sig")
        tree = parsed(text)
    except UnicodeDecodeError as error:
        raise WrongUse(f"{path} is not UTF-8 text (byte {error.start}); an audit reads scripts and configs") from None
    except (MemoryError, RecursionError):                 # of the parser, which has a limit of its own
        raise WrongUse(f"{path} nests brackets or operators too deep for Python to parse; is it a program's output?") from None
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror or error}") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise WrongUse(f"{path}{f':{line}' if line else ''} is not Python that this interpreter can parse "
                       f"({getattr(error, 'msg', error)}); correct the syntax first") from None
    return Script(path, text, tree, imports(tree))


def put(settings: dict[str, Setting], unread: dict[str, Setting], key: str, setting: Setting) -> None:
    """Keeps a setting under its name of the vocabulary; one that contradicts an earlier one makes both unread."""
    perhaps = setting.value.perhaps if isinstance(setting.value, Unread) else None
    if perhaps is not None and is_known(perhaps):
        key, value = vocabulary(key, plain(perhaps))
        if key in settings and settings[key].value == value:
            return                                       # as it is set for certain elsewhere
    if not is_known(setting.value):
        because = setting.value.because if isinstance(setting.value, Unread) else setting.spelled
        spelled = setting.spelled if because in setting.spelled else f"{setting.spelled} ({because})"
        key, _ = vocabulary(key, None) if key in ("model.torch_dtype",) else (vocabulary(key, False)[0], None)
        settings.pop(key, None)
        unread.setdefault(key, Setting(None, setting.place, spelled))
        return
    key, value = vocabulary(key, plain(setting.value))
    before = settings.get(key)
    if key in unread:
        return
    if before is not None and before.value != value:
        del settings[key]
        unread[key] = Setting(None, setting.place, f"{before.spelled} in line {before.place.line}, or {setting.spelled}")
        return
    settings.setdefault(key, Setting(value, setting.place, shown(setting)))


def shown(setting: Setting) -> str:
    """How it is spelled, with the value where the spelling does not say it."""
    value, spelled = plain(setting.value), setting.spelled.replace("'", '"')
    literal = str(value) in setting.spelled or repr(value).replace("'", '"') in spelled
    if value is True and spelled.endswith(")") and not ASSIGNED.match(spelled):
        return setting.spelled               # `torch.compile(model)`: the call itself is what switches it on
    return setting.spelled if literal or isinstance(value, (dict, float)) else f"{setting.spelled} (is {value!r})"


def found_settings(training: reading_calls.Training) -> Iterator[Found]:
    for made in training.followed.calls:
        yield from reading_calls.settings_of_call(made, training)
    yield from reading_calls.settings_written(training)
    yield from reading_loops.settings_of_loops(training)


def framework(followed: Followed) -> Framework:
    """What trains: the trainer whose arguments are made, else the script's own loop, else what it imports."""
    imported = set(followed.script.imported.values())
    trainer = _trainer({made.name for made in followed.calls})
    if trainer is None and followed.script.training_loops:
        return "pytorch"
    bases = {name.split(".")[0] for name in imported}
    return trainer or _trainer(imported) or ("pytorch" if "torch" in bases else "transformers" if "transformers" in bases
                                             else "unknown")


def _trainer(used: set[str]) -> Framework | None:
    if any(name.startswith("trl.") for name in used):
        return "trl"
    if any(name.startswith("transformers.") and name.endswith(("Trainer", "TrainingArguments")) for name in used):
        return "transformers"
    return "accelerate" if any(name.startswith("accelerate.") and name.endswith("Accelerator") for name in used) else None
