"""Answers to a file of prompts: each a line of a new file, and none computed twice, however often the work is broken off.

A prompt is a row's text, or its turns; in a file of plain text each line is one. An answer is written when it is done, with the
number of its row, so the lines are sorted only at the end. Beside the answers, OUT.batch.json says with what they were made: a
later call goes on only with the same prompts, model and settings. A last line that a kill left unfinished is cut off and made
again.

What is drawn for a row depends on the seed and the row's number, so it is the same whatever was done before.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from powertrain.data.order import pass_seed
from powertrain.data.rows.folders import data_suffix, digests_of, readable
from powertrain.data.rows.formats import turns_of
from powertrain.data.rows.reading import read_rows
from powertrain.data.rows.row import BadRow, Message, Rejected, Row
from powertrain.data.rows.tools import tools_of
from powertrain.records import WrongUse
from powertrain.records.json_files import read_json, replace_file, write_json
from powertrain.records.locks import got_lock
from powertrain.use.generation import Sampling, stream
from powertrain.use.opening import OpenedModel, refuse_no_writer
from powertrain.use.together import Done, Job, answer_jobs

RECORD = ".batch.json"
TURNS = "messages"


@dataclass(frozen=True)
class Asking:
    """How the rows of a file are asked."""

    sampling: Sampling
    column: str = "prompt"                   # of a row's text; a row with `messages` has its turns there
    template: bool = False                   # a text is a user's message; turns always are in the template
    system: str | None = None
    at_once: int = 8


@dataclass(frozen=True)
class Prompt:
    number: int                              # of the row, from 1
    shown: Mapping[str, Any]                 # the row's prompt, as it stands in the file
    ids: tuple[int, ...]
    in_template: bool


@dataclass(frozen=True)
class Answered:
    rows: int
    before: int                              # that were there already
    stopped: int                             # answers that the model ended itself


def answer_file(opened: OpenedModel, path: Path, out: Path, asking: Asking, *, cache: Path,
                say: Callable[[str], None] = lambda _: None) -> Answered:
    """Answer every prompt of `path` into `out`, or go on where an earlier call was broken off.

    Raises WrongUse, before anything is computed, for a row without a prompt or with one that is too long, and for an `out` that
    something else has written.
    """
    refuse_no_writer(opened, opened.found.path)
    rows = sum(1 for _ in prompts_in(opened, path, asking, cache))
    with _writing(out, _settings(opened, path, asking)) as (file, done):
        before = len(done)
        if before:
            say(f"{before:,} of {rows:,} answers are in {out} already{'; the others follow' if before < rows else ''}")
        shown: dict[int, Prompt] = {}

        def jobs() -> Iterator[Job]:
            for prompt in prompts_in(opened, path, asking, cache):
                if prompt.number not in done:
                    shown[prompt.number] = prompt
                    seed = pass_seed(asking.sampling.seed, prompt.number, 0)
                    stops = opened.turn_stops if prompt.in_template else opened.stops
                    yield Job(prompt.number, prompt.ids, replace(asking.sampling, seed=seed), stops)

        for answer in answer_jobs(opened.model, jobs(), asking.at_once):
            file.write(_line(opened, shown.pop(answer.number), answer))
            file.flush()
    return Answered(rows, before, _sorted(out))


def _line(opened: OpenedModel, prompt: Prompt, answer: Done) -> str:
    before = prompt.ids[-1:] if opened.task == "causal" else ()
    text = "".join(opened.answer_pieces(prompt.ids, iter(answer.ids)) if prompt.in_template else
                   stream(opened.tokenizer, before, iter(answer.ids), opened.stops))
    return json.dumps({"row": prompt.number, **prompt.shown, "answer": text, "tokens": len(answer.ids),
                       "finish": "stop" if answer.stopped else "length"}, ensure_ascii=False) + "\n"


# ------------------------------------------------------------------------------------------------ prompts


def prompts_in(opened: OpenedModel, path: Path, asking: Asking, cache: Path) -> Iterator[Prompt]:
    """Yield the prompts of a file. Raises WrongUse for a row without one, and for one that the model cannot read."""
    for number, row in enumerate(_rows(path, asking.column, cache), 1):
        if isinstance(row, Rejected):
            raise WrongUse(f"{row.origin}: {row.reason}")
        try:
            prompt = _prompt(opened, number, row, asking)
        except BadRow as error:
            raise WrongUse(f"{row.origin}: {error}") from error
        if opened.task == "causal" and opened.context is not None and len(prompt.ids) >= opened.context:
            raise WrongUse(f"{row.origin}: the prompt has {len(prompt.ids):,} tokens, and the model reads {opened.context:,} "
                           "of prompt and answer; shorten it")
        yield prompt


def _rows(path: Path, column: str, cache: Path) -> Iterator[Row | Rejected]:
    if not path.is_file():
        raise WrongUse(f"{path}: there is no such file of prompts")
    if data_suffix(path) is not None:
        yield from read_rows(str(path), cache=cache)
        return
    with readable(path), path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Row({column: line.rstrip("\r\n")}, f"{path}:{number}")


def _prompt(opened: OpenedModel, number: int, row: Row, asking: Asking) -> Prompt:
    value = row.fields.get(TURNS)
    if value is not None:
        turns = turns_of(value, TURNS)
        if turns and turns[-1].role == "assistant":
            raise BadRow("its last turn is the assistant's, so nothing is asked; end with the user's or a tool's turn")
        tools = tools_of(row.fields["tools"], "tools") if row.fields.get("tools") is not None else ()
        return Prompt(number, {TURNS: value}, tuple(opened.conversation_ids(_begun(asking, turns), tools)[1]), True)
    text = row.fields.get(asking.column)
    if not isinstance(text, str) or not text.strip():
        there = ", ".join(row.fields) or "nothing"
        raise BadRow(f"no text in the column {asking.column!r}, and no {TURNS}; it has: {there}; name another with --column")
    in_template = asking.template and opened.task == "causal"
    if in_template:
        ids = opened.conversation_ids(_begun(asking, [Message("user", text)]))[1]
    else:
        end = opened.tokenizer.end_of_text
        ids = opened.prompt_ids(text) or [0 if end is None else end]
    return Prompt(number, {asking.column: text}, tuple(ids), in_template)


def _begun(asking: Asking, turns: list[Message]) -> list[Message]:
    has_system = bool(turns) and turns[0].role == "system"
    return [Message("system", asking.system), *turns] if asking.system and not has_system else turns


# ------------------------------------------------------------------------------------------------ the file of answers


def _settings(opened: OpenedModel, path: Path, asking: Asking) -> dict[str, Any]:
    """Return all that decides the answers, and not how fast they are computed."""
    told = asdict(asking)
    del told["at_once"]
    return {"prompts": digests_of([path])[0], "model": str(opened.found.path.resolve()), "base": opened.found.base, **told}


@contextmanager
def _writing(out: Path, settings: Mapping[str, Any]) -> Iterator[tuple[TextIO, set[int]]]:
    """Give the open file of answers, and the numbers of its rows. Raises WrongUse if it was made with other settings."""
    record = out.with_name(out.name + RECORD)
    if not out.parent.is_dir():
        raise WrongUse(f"there is no folder {out.parent} to write {out.name} into; make it first")
    if out.exists() and not record.is_file():
        raise WrongUse(f"{out} exists already, and no earlier call of this command made it; name a new file")
    if record.is_file():
        known = read_json(record)
        differ = [key for key, value in settings.items() if known.get(key) != value]
        if out.exists() and differ:
            raise WrongUse(f"{out} has answers that were made with other {' and '.join(differ)}; name a new file, or give what "
                           "they were made with")
    write_json(record, settings)
    with out.open("a+", encoding="utf-8", newline="\n") as file:
        if got_lock(file) is False:
            raise WrongUse(f"another process is writing {out}; wait for it")
        yield file, _done(out, file)


def _done(out: Path, file: TextIO) -> set[int]:
    """Return the numbers of the rows that have answers, and cut off a last line that has no end."""
    content = out.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        file.truncate(whole)
    return {int(json.loads(line)["row"]) for line in content[:whole].splitlines()}


def _sorted(out: Path) -> int:
    """Bring the answers into the order of the rows. Return how many the model ended itself."""
    lines = [(json.loads(line), line) for line in out.read_bytes().split(b"\n") if line]
    lines.sort(key=lambda answer: int(answer[0]["row"]))
    replace_file(out, b"".join(line + b"\n" for _, line in lines))
    return sum(answer["finish"] == "stop" for answer, _ in lines)
