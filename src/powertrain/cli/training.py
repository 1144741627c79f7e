"""`powertrain train`, `powertrain plan` and `powertrain facts`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain import planner
from powertrain.cli import output
from powertrain.cli.environment import cache_folder, resident_bytes, say
from powertrain.recipe import flat, quoted, resolve_words
from powertrain.records import RunFailed, WrongUse, to_plain
from powertrain.records.event_log import read_events, to_line
from powertrain.records.events import Evaluated, Event, RunWarning, Start, Step
from powertrain.records.json_files import read_json
from powertrain.records.origins import COMMAND_LINE, Origin, Stored
from powertrain.records.timeline import last_of
from powertrain.report import plan as plan_report
from powertrain.report.figures import perplexity
from powertrain.report.live import Live, Pace, said
from powertrain.report.overview import overview_rows
from powertrain.report.result import result_rows, sample_rows
from powertrain.run.fits import needed_bytes, room_bytes, savings_of
from powertrain.run.folder import RUNS, RunFolder, check_free, continued, existing, is_complete, missing_base, stored_recipe
from powertrain.run.material import refuse_downloads
from powertrain.run.prepare import Prepared, prepare, with_stored_plan

if TYPE_CHECKING:
    from rich.live import Live as RichLive


MOST_VALUES = 8              # of the command line, in the first line of a run
BASE_TIME_S = 40             # of training a base that a recipe names and nobody has trained yet


def show_plan(words: Sequence[str], *, as_json: bool) -> None:
    resolved = resolve_words(words)
    refuse_downloads(resolved.recipe, cache_folder())
    _print_plan(prepare(resolved, cache_folder(), say), as_json=as_json)


def show_facts(words: Sequence[str], *, as_json: bool, measure: bool) -> None:
    from powertrain.facts import hardware

    if measure:
        say("measuring the machine")
        hardware.measure_again(cache_folder())
    prepared = prepare(resolve_words(words), cache_folder(), say)
    if as_json:
        output.print_json({"event": "facts", **to_plain(prepared.facts), "providers": dict(prepared.material.providers)})
        return
    per_token = prepared.plan.estimate
    rows = plan_report.facts_rows(prepared.facts)
    rows += [(f"provider {name}", "can compute the model" if why_not is None else "cannot compute the model", why_not or "")
             for name, why_not in prepared.material.providers.items()]
    if per_token is not None:
        rows.append(("FLOPs per token", f"{per_token.flops_per_token:,.0f}", "forward and backward, causal attention exact"))
    output.print_rows(rows)


def train(words: list[str], *, output: Path | None, resume: Path | None, dry_run: bool, as_json: bool,
          quiet: bool) -> int:
    """Train a run, new or continued, and print its result; return the exit code."""
    tell = _quiet if quiet else say
    folder = None if resume is None else _existing(resume, words, output)
    prepared = _prepared(words, output, dry_run=dry_run, say=tell) if folder is None else _continued(folder, words, tell)
    if dry_run:
        _print_plan(prepared, as_json=as_json)
        return 0
    if folder is not None and is_complete(folder, read_events(folder.events) if folder.events.is_file() else []):
        tell(f"{folder.path} is finished: there is nothing left to train")
        _print_result(folder.path, prepared, as_json=as_json)
        return 0
    from powertrain.run.part import continued_run, new_run  # torch is loaded from here on
    from powertrain.run.session import exit_code, run
    from powertrain.use.sampling import write_sample

    with Watcher(as_json=as_json, quiet=quiet) as watcher:
        watcher.introduce(prepared, stored=stored_recipe(folder) if folder else None)
        with (new_run(prepared, watcher.take, write_sample) if folder is None else
              continued_run(folder, prepared, watcher.take, write_sample)) as part:
            run(part)
        code = exit_code(part)
    _print_result(part.folder.path, prepared, as_json=as_json)
    return code


def _prepared(words: list[str], output: Path | None, *, dry_run: bool, say: Callable[[str], None]) -> Prepared:
    """Prepare a new run; before that, train the base that it names and nobody has trained."""
    resolved = resolve_words([*words, *([f"output_dir={quoted(str(output))}"] if output else [])])
    if not dry_run and resolved.recipe.output_dir:
        check_free(Path(resolved.recipe.output_dir))         # now, and not after an hour of reading
    if not dry_run and (base := missing_base(resolved.recipe)) is not None:
        train_base(base, say)
    if dry_run:
        refuse_downloads(resolved.recipe, cache_folder())
    return prepare(resolved, cache_folder(), say)


def _existing(path: Path, words: list[str], output: Path | None) -> RunFolder:
    """Return the folder of a run to continue. Raises WrongUse where the command asks for another run."""
    if output is not None:
        raise WrongUse(f"--resume {path} continues in the run's own folder; leave --output out")
    if words and "=" not in words[0]:
        raise WrongUse(f"--resume {path} continues with the run's own recipe; leave {words[0]!r} out")
    return existing(path)


def _continued(folder: RunFolder, words: list[str], say: Callable[[str], None]) -> Prepared:
    """Prepare the continuation of a run, by the run's own recipe and plan."""
    if folder.events.is_file():
        read_events(folder.events)           # a damaged line is refused before the training
    return with_stored_plan(prepare(continued(folder, words), cache_folder(), say), read_json(folder.plan))


def train_base(recipe: str, say: Callable[[str], None]) -> None:
    """The run that `model.path=recipe:NAME` asks for, in a process of its own, because settings hold for a whole process."""
    say(f"no finished run of the recipe {recipe} is in {RUNS}/: training it first, in about {BASE_TIME_S} s")
    done = subprocess.run([sys.executable, "-m", "powertrain", "train", recipe, f"train_time_s={BASE_TIME_S}", "--quiet"],
                          stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise RunFailed(f"the recipe {recipe}, whose model is needed, did not finish; run `powertrain train {recipe}` to see "
                        "why")


def prepare_words(words: Sequence[str]) -> Prepared:
    """Return a recipe with its plan. A base model that the recipe names and nobody has trained is trained first."""
    resolved = resolve_words(words)
    if (base := missing_base(resolved.recipe)) is not None:
        train_base(base, say)
    return prepare(resolved, cache_folder(), say)


def _quiet(text: str) -> None:
    """--quiet: nothing before the result."""


def _print_plan(prepared: Prepared, *, as_json: bool) -> None:
    if as_json:
        output.print_json({"event": "plan", "recipe": prepared.recipe.model_dump(),
                           "origins": {key: origin.to_json() for key, origin in prepared.resolved.origins.items()},
                           "notes": prepared.resolved.notes, "total_steps": prepared.total_steps,
                           "facts": to_plain(prepared.facts), "plan": planner.to_json(prepared.plan),
                           "memory": _memory(prepared)})
        return
    output.print_rows([("Recipe", line) for line in prepared.resolved.to_yaml().splitlines()])
    _print_whole_plan(prepared)
    found = _memory(prepared)
    savings = [(saving["words"], saving["bytes"], saving["enough"]) for saving in found["savings"]]
    output.print_rows(plan_report.fitting_rows(found["needed_bytes"], found["room_bytes"], savings))


def _memory(prepared: Prepared) -> dict[str, Any]:
    """What a step needs and has, and where that is not enough every change that would save some."""
    needed, room = needed_bytes(prepared.facts, prepared.plan), room_bytes(prepared.facts)
    return {"needed_bytes": needed, "room_bytes": room,
            "savings": [to_plain(saving) for saving in savings_of(prepared)] if needed > room else []}


def _print_whole_plan(prepared: Prepared) -> None:
    facts = prepared.facts
    why_provider = prepared.resolved.origin("model.provider").reason
    output.print_rows([*[("Note", note) for note in prepared.resolved.notes],
                       *[("Corrected", text) for text in prepared.recipe.corrections],
                       plan_report.machine_row(facts.hardware), plan_report.data_row(facts.data),
                       plan_report.model_row(facts.model, why_provider),
                       *[("Seen", text) for text in prepared.material.said],
                       plan_report.run_row(prepared.recipe.model_dump(), facts.data, prepared.total_steps)])
    output.print_rows([("Plan", *row) for row in plan_report.plan_rows(prepared.plan)],
                      styles=("bold", "bold", "cyan"))
    output.print_rows(plan_report.expected_rows(prepared.plan.estimate, facts.hardware, facts.model))


class Watcher:
    """Shows a run's events as they come: JSON lines, a live line in a terminal, or a plain line every few seconds."""

    def __init__(self, *, as_json: bool, quiet: bool):
        self.as_json, self.quiet = as_json, quiet
        self.live, self.pace = Live(resident_bytes), Pace(output.PLAIN_LINE_EVERY_S)
        self.console = output.console(stderr=True)
        self.screen: RichLive | None = None

    def __enter__(self) -> Watcher:
        if self.console.is_terminal and not self.quiet and not self.as_json:
            from rich.live import Live as RichLive

            self.screen = RichLive(console=self.console, transient=True, refresh_per_second=4)
        return self

    def __exit__(self, *error: object) -> None:
        if self.screen is not None:
            self.screen.stop()

    def introduce(self, prepared: Prepared, stored: Stored | None = None) -> None:
        """Print the beginning of a run. `stored` is the recipe of a run that continues."""
        if self.quiet or self.as_json:
            return
        resolved = prepared.resolved
        remarks = [*resolved.notes, *prepared.recipe.corrections, *prepared.material.said]
        output.print_rows(overview_rows(prepared.recipe.model_dump(), prepared.facts, prepared.plan, prepared.total_steps,
                                        asked=_asked(prepared, stored), remarks=remarks), stderr=True)

    def take(self, event: Event) -> None:
        self.live.take(event)
        if self.as_json:
            output.print_json(to_line(event))
        elif not self.quiet or isinstance(event, RunWarning):
            self._show(event)

    def _show(self, event: Event) -> None:
        if isinstance(event, Step):
            self._step()
        elif (text := said(event)) is not None:
            self.console.print(text, style="yellow" if isinstance(event, RunWarning) else None, soft_wrap=True)
        if isinstance(event, Start) and self.screen is not None:
            self.screen.start()

    def _step(self) -> None:
        if self.screen is not None:
            self.screen.update(self.live.line())
        elif self.pace.due():
            self.console.print(self.live.line(), soft_wrap=True)


def _asked(prepared: Prepared, stored: Stored | None) -> str:
    """Return the recipe's name with the values of the command line; of a run that continues, also what changes now."""
    resolved = prepared.resolved
    now = {key: value for key, value in flat(resolved.recipe.model_dump()) if resolved.origin(key) == COMMAND_LINE}
    if stored is None:
        return _with_values(resolved.origins.values(), now)
    first = {key: value for key, (value, origin) in stored.items() if origin == COMMAND_LINE}
    return _with_values([origin for _, origin in stored.values()], first) + (f"; now {_listed(now)}" if now else "")


def _with_values(origins: Iterable[Origin], values: Mapping[str, Any]) -> str:
    name = next((origin.name for origin in origins if origin.kind in ("recipe", "file")), "")
    return " with ".join(part for part in (name, _listed(values)) if part)


def _listed(values: Mapping[str, Any]) -> str:
    shown = [f"{key}={quoted(value)}" for key, value in values.items()]
    return ", ".join(shown if len(shown) <= MOST_VALUES else [*shown[:MOST_VALUES], f"and {len(shown) - MOST_VALUES} more"])


def _print_result(folder: Path, prepared: Prepared, *, as_json: bool) -> None:
    events = read_events(folder / "events.jsonl")
    gzip_bits = prepared.material.gzip_bits_per_byte
    if as_json:
        evaluation = last_of(Evaluated, events)
        output.print_json({"event": "result", "folder": str(folder), "gzip_bits_per_byte": gzip_bits,
                           "perplexity": perplexity(evaluation.loss) if evaluation else None,
                           "evaluation": to_line(evaluation) if evaluation else None})
        return
    output.print_rows(sample_rows(events))
    output.print_rows(result_rows(events, str(folder), gzip_bits))
