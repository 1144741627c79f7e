"""`powertrain facts` and `powertrain runs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from powertrain.cli import output
from powertrain.cli.diagnosing import worst_rows
from powertrain.cli.surroundings import cache_folder, say
from powertrain.recipe import resolve_words
from powertrain.records import WrongUse, to_plain
from powertrain.report.figures import count
from powertrain.report.parts import step_time_row
from powertrain.report.plan import facts_rows
from powertrain.report.result import result_rows, sample_rows


def show_facts(words: Sequence[str], *, as_json: bool, measure: bool) -> None:
    from powertrain.facts import hardware
    from powertrain.run.prepare import prepare

    if measure:
        say("measuring the machine")
        hardware.measure_again(cache_folder())
    prepared = prepare(resolve_words(words), cache_folder(), say)
    if as_json:
        output.print_json({"event": "facts", **to_plain(prepared.facts), "providers": dict(prepared.material.providers)})
        return
    per_token = prepared.plan.estimate
    rows = facts_rows(prepared.facts)
    rows += [(f"provider {name}", "can compute the model" if why_not is None else "cannot compute the model", why_not or "")
             for name, why_not in prepared.material.providers.items()]
    if per_token is not None:
        rows.append(("FLOPs per token", f"{per_token.flops_per_token:,.0f}", "forward and backward, causal attention exact"))
    output.print_rows(rows)


def list_runs(folder: Path, *, as_json: bool) -> None:
    from powertrain.run import folder as run_folder

    found = run_folder.list_runs(folder)
    if as_json:
        for run in found:
            output.print_json({"event": "run", **to_plain(run), "folder": str(run.folder)})
        return
    if not found:
        raise WrongUse(f"there are no runs in {folder}/; `powertrain train` makes one")
    header = ("folder", "started", "state", "steps", "loss", "bits/byte", "tokens/s")
    output.print_rows([header, *[
        (str(run.folder), run.started, run.state, f"{run.step:,}/{run.total_steps:,}",
         "" if run.loss is None else f"{run.loss:.4f}", "" if run.bits_per_byte is None else f"{run.bits_per_byte:.3f}",
         "" if run.tokens_per_s is None else count(run.tokens_per_s)) for run in found]])


def show_run(path: Path, *, as_json: bool) -> None:
    from powertrain.run import folder as run_folder
    from powertrain.training.events import read_events

    folder = run_folder.existing(path)
    events = read_events(folder.events) if folder.events.is_file() else []
    if as_json:
        output.print_json({"event": "run", **to_plain(run_folder.summarise(folder)), "folder": str(path)})
        return
    output.print_rows([("Recipe", line) for line in folder.recipe.read_text(encoding="utf-8").splitlines()
                       if "# default" not in line])
    plan = run_folder.read_json(folder.plan)
    output.print_rows([("Plan", "on", step["technique"], step["because"]) for step in plan["steps"]] +
                      [("Plan", "off", refusal["technique"], refusal["because"]) for refusal in plan["refused"]])
    output.print_rows(sample_rows(events))
    if rows := result_rows(events, str(path), None):
        place = 1 + next((number for number, (title, _) in enumerate(rows) if title == "Speed"), 0)
        output.print_rows([*rows[:place], step_time_row(events), *rows[place:]])
    else:
        run = run_folder.summarise(folder)
        output.print_rows([("State", f"{run.state}, at step {run.step:,} of {run.total_steps:,}"), step_time_row(events),
                           ("Go on", f"powertrain train --resume {path}")])
    if events:
        output.print_rows(worst_rows(path))
