"""Configs of any trainer as subjects: which format a file has is seen by its keys, and the reason is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from powertrain.audit.configs.formats import DEEPSPEED, FORMATS, TRANSFORMERS, TRL, Format
from powertrain.audit.literal_files import Marked, read_assigned, read_marked
from powertrain.audit.subject import Subject
from powertrain.records import WrongUse

LEAST_KNOWN = 0.5                            # share of a file's keys that its trainer has; below, it is another one's file

__all__ = ["FORMATS", "Format", "read_config", "recognise", "why_recognised"]


def read_config(path: Path) -> Subject:
    """The settings of a config file, each with its line. Raises WrongUse where it is no config, or cannot be told whose."""
    found = _read(path)
    subject = recognise(found, path)[0].subject(path, found)
    return _with_deepspeed(subject, path)


def why_recognised(path: Path) -> str:
    """What the file was taken for, and by what: one sentence."""
    config, why = recognise(_read(path), path)
    return f"{config.name}: {why}"


def recognise(found: Marked, path: Path) -> tuple[Format, str]:
    """The format that has most of the file's keys and, of equals, the one that more of them give away; and why."""
    if not found.inner:
        raise WrongUse(f"{path} sets nothing: a config has keys with values")
    ranked = sorted(FORMATS, key=lambda config: (config.points(found)[1], config.points(found)[0]), reverse=True)
    best, (points, share) = ranked[0], ranked[0].points(found)
    equal = [config for config in ranked if config.points(found) == (points, share)]
    if share < LEAST_KNOWN:
        raise WrongUse(f"{path} is no config that is known here: of its keys ({_listed(list(found.inner))}) {best.name} has "
                       f"most, and that is {share:.0%}; known are {', '.join(config.name for config in FORMATS)}")
    if points == 0 and (plain := [config for config in equal if config in (TRANSFORMERS, TRL)]):
        return plain[0], "all of its keys are Hugging Face's, and none is another trainer's alone" if share == 1 else \
            f"{share:.0%} of its keys are Hugging Face's, and none is another trainer's alone"
    if len(equal) > 1 and not {config.name for config in equal} <= {TRANSFORMERS.name, TRL.name}:
        raise WrongUse(f"{path} may be {' or '.join(config.name for config in equal)}: its keys "
                       f"({_listed(list(found.inner))}) fit them equally; {_deciding(equal)} would decide it")
    given_away = [key for key in found.inner if key in best.own]
    return best, f"{_listed(given_away)} {'is' if len(given_away) == 1 else 'are'} among its keys" if given_away else \
        f"it has {share:.0%} of the file's keys, more than any other"


def _read(path: Path) -> Marked:
    return read_assigned(path) if path.suffix == ".py" else read_marked(path)


def _listed(keys: Sequence[str], most: int = 4) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def _deciding(configs: Sequence[Format]) -> str:
    return "; ".join(f"{sorted(config.own)[0]} ({config.name})" for config in configs)


def _with_deepspeed(subject: Subject, path: Path) -> Subject:
    """The subject with the keys of the DeepSpeed file that it names, where that lies beside it."""
    named = subject.value("training.deepspeed")
    if not isinstance(named, str):
        return subject
    file = path.parent / named
    if not file.is_file():
        return subject
    theirs = DEEPSPEED.subject(file, read_marked(file))
    return dataclasses.replace(subject, settings={**theirs.settings, **subject.settings},
                               unknown={**theirs.unknown, **subject.unknown})
