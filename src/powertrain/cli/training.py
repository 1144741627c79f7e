"""`powertrain train`, `powertrain plan` and `powertrain facts`."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli import output as screen
from powertrain.cli.continuing import go_back_to, run_to_continue
from powertrain.cli.options import Alert, Gpus, Json, Machine, Processes, Words, cache_folder, say, tell, uncollected
from powertrain.cli.streams import OutputGone
from powertrain.cli.tracking import begin_following, say_missing
from powertrain.cli.watching import Watcher, print_result
from powertrain.launch.alerts import checked
from powertrain.records import Hardware, RunFailed, WrongUse, to_plain
from powertrain.records.event_log import read_events
from powertrain.records.json_files import read_json, write_json
from powertrain.records.phases import Phase, Tell, nobody
from powertrain.report import plan as plan_report
from powertrain.report.plan_choices import choice_rows
from powertrain.tracking.table import check_installed

if TYPE_CHECKING:
    from powertrain.launch.alerts import Alert as RunAlert
    from powertrain.launch.group import Place
    from powertrain.recipe import Recipe, Resolved
    from powertrain.run.folder import RunFolder
    from powertrain.run.part import Part
    from powertrain.run.prepare import Prepared
    from powertrain.training.ranks import Ranks

Say = Callable[[str], None]
BASE_TIME_S = 40             # of training a base that a recipe names and nobody has trained yet


def train(words: Words = None,
          output: Annotated[Path | None, typer.Option(help="Folder of this run (default: runs/NAME-DATE).")] = None,
          resume: Annotated[str | None, typer.Option(metavar="RUN", help="Continue the run in this folder, or one from its "
                                                     "mirror, such as s3://bucket/prefix/RUN.")] = None,
          from_step: Annotated[int | None, typer.Option(min=0, help="With --resume: the step to go on from, one of those that "
                                                        "`powertrain checkpoints list` shows; later checkpoints are set aside.")
                               ] = None,
          goes_on: Annotated[bool, typer.Option("--continue", help="Continue the run in the folder of --output, or "
                                                                   "start it there.")] = False,
          processes: Processes = 1,
          gpus: Gpus = None,
          dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and train nothing.")] = False,
          alert: Alert = None, as_json: Json = False,
          quiet: Annotated[bool, typer.Option("--quiet", help="Print only the result.")] = False) -> int:
    """Train a model. Without a recipe, train the embedded recipe.

    Exit code: 0 done, 1 failed, 2 unusable recipe, 3 trained but not all saved, 75 stopped and saved.
    """
    words, processes = words or [], _with_gpus(processes, gpus)
    alert = os.environ.pop("POWERTRAIN_ALERT", None) if alert is None else alert         # what this one starts tells nobody
    told = None if alert is None else checked(alert)
    hears: Tell = _print_phase if as_json else nobody if quiet else tell
    words, output, folder = run_to_continue(words, output, resume, from_step, goes_on=goes_on)
    if dry_run:
        _print_plan(_prepared_run(words, folder, output, nobody if quiet else tell, processes, dry_run=True), as_json=as_json)
        return 0
    place = _place(processes)
    if place is None and processes > 1:
        return _start_processes(words, folder, output, processes, from_step, as_json=as_json, quiet=quiet, alert=told)

    with uncollected():
        from powertrain.launch.group import joined_group
        from powertrain.run.folder import is_complete
        from powertrain.run.session import exit_code, run  # torch is loaded from here on

    warn: Say = say
    if place is not None and place.rank > 0:
        hears, warn = nobody, lambda text: None
    prepare = partial(_prepared_run, words, folder, output, hears, place.world if place else 1,
                      here=place.local_world if place else None, warn=warn)
    with joined_group(place, prepare) as (ranks, prepared):
        if folder is not None and is_complete(folder, read_events(folder.events)):
            if ranks.is_writer:
                say(f"{folder.path} is finished: there is nothing left to train")
                print_result(folder.path, prepared, as_json=as_json)
            return 0
        with Watcher(as_json=as_json, quiet=quiet or not ranks.is_writer, alert=told if ranks.is_writer else None) as watcher:
            if folder is not None and from_step is not None:
                go_back_to(folder, from_step)            # not before what may refuse the run
            with _part(folder, prepared, ranks, watcher) as part:
                part.beside = followers = begin_following(part, prepared.recipe.report_to if ranks.is_writer else [])
                run(part)
            code = exit_code(part)
        if ranks.is_writer:
            print_result(part.folder.path, part.prepared, as_json=as_json)
            say_missing(followers, part.folder.path, as_json=as_json)
        return code


def _print_phase(phase: Phase) -> None:
    with contextlib.suppress(OutputGone):      # who reads no further ends no run
        screen.print_event(phase)


def _with_gpus(processes: int, gpus: int | None) -> int:
    """Return the number of processes, where `gpus` may name it. Raises WrongUse where there are no GPUs."""
    from powertrain.facts.hardware import read_hardware

    if gpus is None:
        return processes
    if processes > 1:
        raise WrongUse(f"--gpus {gpus} and --processes {processes} both say how many processes there are; leave one out")
    if (here := read_hardware(cache_folder(), measure=False)).device != "cuda":
        raise WrongUse(f"--gpus {gpus} needs as many CUDA GPUs, and torch sees none here ({here.name}); use --processes {gpus} "
                       "for processes on the cores of a CPU")
    return gpus


def _place(processes: int) -> Place | None:
    """Return this process's place among those that somebody has started; None if it was started alone."""
    from powertrain.launch.group import TORCH_SAYS, end_with_parent, place_of
    from powertrain.launch.slurm import as_torchrun

    os.environ.update(as_torchrun(os.environ))
    place = place_of(os.environ)
    if place is not None and processes > 1:
        raise WrongUse(f"this is process {place.rank} of {place.world} that another program has started: leave "
                       f"--processes {processes} out")
    if place is not None:
        end_with_parent(os.environ)
    os.environ.setdefault(TORCH_SAYS, "ERROR")           # before torch is loaded
    return place


@contextlib.contextmanager
def _part(folder: RunFolder | None, prepared: Prepared, ranks: Ranks, watcher: Watcher) -> Iterator[Part]:
    """Yield this process's part of a new run, or of the run in `folder`."""
    from powertrain.launch.shared_folder import check_shared
    from powertrain.run.folder import RUNS, stored_recipe
    from powertrain.run.part import continued_run, new_run
    from powertrain.run.prepare import agreed
    from powertrain.use.generation import write_sample

    if ranks.world > 1:
        check_shared(ranks, folder.path if folder else Path(prepared.recipe.output_dir or RUNS))
    prepared = agreed(ranks, prepared)
    watcher.introduce(prepared, stored=stored_recipe(folder) if folder else None)
    if folder is not None:                   # a new run tells its folder by an event
        watcher.begin_alerts(str(folder.path))
    with (new_run(prepared, watcher.take, write_sample, ranks) if folder is None else
          continued_run(folder, prepared, watcher.take, write_sample, ranks)) as part:
        yield part


def _start_processes(words: Sequence[str], folder: RunFolder | None, output: Path | None, processes: int,
                     from_step: int | None, *, as_json: bool, quiet: bool, alert: RunAlert | None) -> int:
    """Train in several processes on this machine; what can be refused before they start is."""
    from powertrain.facts.hardware import read_hardware, shared_by
    from powertrain.launch.local import train_in_processes
    from powertrain.run.folder import continued, create
    from powertrain.run.prepare import check_batch

    recipe = (_resolved(words, output) if folder is None else continued(folder, [*words])).recipe
    shared_by(read_hardware(cache_folder()), processes, processes)
    check_batch(recipe, processes)
    options = [option for option, asked in (("--json", as_json), ("--quiet", quiet)) if asked]
    if folder is None:
        train_missing_base(recipe, tell)
        folder = create(recipe)
    elif from_step is not None:
        go_back_to(folder, from_step)
    watcher = Watcher(as_json=as_json, quiet=quiet, alert=alert)
    watcher.begin_alerts(str(folder.path))
    return train_in_processes(words, options, folder.path, processes, say)


def plan(words: Words = None, processes: Processes = 1, gpus: Gpus = None, machine: Machine = None,
         prices: Annotated[list[str] | None, typer.Option("--price-per-hour", metavar="KIND=PRICE", help=(
             "For --machine all: price of an hour of one device, such as h100=2.5 (may be repeated), or 2.5 for every kind."))
             ] = None,
         as_json: Json = False) -> None:
    """Show the recipe, the plan, and the expected time and memory.

    Nothing is trained. Every technique is listed as on or off, with the reason.

    --machine all compares the known kinds of GPUs, --machine 8xall machines with eight of them.
    """
    from powertrain.facts.clusters import machines_of

    processes = _with_gpus(processes, gpus)
    if machine is not None and processes > 1 and not machine.endswith(".json"):
        raise WrongUse("--machine says how many processes there are; leave --processes out")
    if machine is not None and (machines := machines_of(machine, cache_folder())):
        _print_machines(words or [], machines, _prices(prices or []), as_json=as_json)
        return
    if prices:
        raise WrongUse("--price-per-hour is for the table of --machine all")
    prepared = _prepared_run(words or [], None, None, tell, processes, dry_run=True, machine=machine)
    _print_plan(prepared, as_json=as_json)
    if machine is not None and prepared.facts.hardware.processes > 1:
        _print_rehearsal(prepared, as_json=as_json)


def _prices(words: Sequence[str]) -> Mapping[str, float]:
    """Return the price of each kind of device that words such as h100=2.5 name; "" is every other kind, which 2.5 names."""
    from powertrain.facts.clusters import kind_of, kinds

    found: dict[str, float] = {}
    for word in words:
        name, _, price = word.rpartition("=")
        kind = kind_of(name) if name else ""
        if kind is None or not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", price):
            raise WrongUse(f"--price-per-hour {word[:40]} is not KIND=PRICE; use for example h100=2.5, or 2.5 for every kind "
                           f"(kinds: {', '.join(kinds())})")
        if kind in found:
            raise WrongUse(f"--price-per-hour has two prices for {kind or 'every kind'}: {found[kind]:g} and {price}; "
                           "leave one out")
        found[kind] = float(price)
    return found


def _print_machines(words: Sequence[str], machines: Mapping[str, Hardware], prices: Mapping[str, float], *, as_json: bool
                    ) -> None:
    """Print the run on each kind of machine: whether it fits, and with which change, its time and cost."""
    from powertrain.run.fits import on_machines

    first = next(iter(machines.values()))
    of_first = f"{first.nodes}x{first.devices}x{next(iter(machines))}"
    prepared = _prepared_run(words, None, None, tell, 1, dry_run=True, machine=of_first)
    found = [replace(one, price_per_hour=prices.get(one.kind, prices.get(""))) for one in on_machines(prepared, machines)]
    if as_json:
        screen.print_json(*({"event": "machine", **to_plain(one), "cost": one.cost} for one in found))
        return
    facts = prepared.facts
    screen.print_rows([plan_report.data_row(facts.data), plan_report.model_row(facts.model),
                       plan_report.run_row(prepared.recipe.model_dump(), facts.data, prepared.total_steps)])
    screen.print_rows([plan_report.MACHINE_COLUMNS, *map(plan_report.on_machine_row, found)])
    screen.print_rows([("Known from", text) for text in plan_report.known_from(found)])


def facts(words: Words = None, as_json: Json = False,
          measure: Annotated[bool, typer.Option("--measure", help="Measure the machine's speed again.")] = False,
          machine: Machine = None,
          output: Annotated[Path | None, typer.Option(help="Write the facts to this file too, for --machine.")] = None,
          share: Annotated[bool, typer.Option("--share", help="Leave out names of the machine and user, paths and serial "
                                                              "numbers, to paste the facts into an issue.")] = False) -> None:
    """Show what is known about machine, software, model and data.

    Each fact is shown with its source.
    """
    from powertrain.facts import hardware
    from powertrain.facts.clusters import machine_and_software
    from powertrain.recipe import resolve_words
    from powertrain.records.sharing import LEFT_OUT, shareable
    from powertrain.run.prepare import prepare

    if output is not None and output.exists() and not output.is_file():
        what = f"folder; name a file, such as {output / 'facts.json'}" if output.is_dir() else \
            "pipe, a socket or a device; name a file, such as facts.json"
        raise WrongUse(f"--output {output} is a {what}")
    if output is not None and not output.parent.is_dir():
        raise WrongUse(f"--output {output}: there is no folder {output.parent}; make it first")
    if measure:
        say("measuring the machine")
        hardware.forget_peaks(cache_folder())
    resolved = resolve_words(words or [])
    if machine is not None and not resolved.origin("train_batch_size").is_users:         # the machine is asked for, not a run
        devices = machine_and_software(machine, cache_folder())[0].processes
        batch = max(devices, resolved.recipe.train_batch_size)
        resolved = resolved.with_planned({"train_batch_size": (batch, f"{devices} devices need an example each")})
    prepared = prepare(resolved, cache_folder(), tell, machine=machine, warn=say)
    hidden = shareable if share else to_plain
    if output is not None:
        write_json(output, hidden(to_plain(prepared.facts)))
    rows = plan_report.facts_rows(prepared.facts)
    rows += [(f"provider {name}", "can compute the model" if why_not is None else "cannot compute the model", why_not or "")
             for name, why_not in prepared.material.providers.items()]
    if (estimate := prepared.plan.estimate) is not None:
        rows.append(("FLOPs per token", f"{estimate.flops_per_token:,.0f}", "forward and backward, causal attention exact"))
    if share:
        say(f"left out: {LEFT_OUT}")
    screen.tell(hidden({"event": "facts", **to_plain(prepared.facts), "providers": dict(prepared.material.providers)}),
                hidden(rows), as_json=as_json)


def _resolved(words: Sequence[str], output: Path | None) -> Resolved:
    from powertrain.recipe import quoted, resolve_words
    from powertrain.run.folder import check_free

    resolved = resolve_words([*words, *([f"output_dir={quoted(str(output))}"] if output else [])])
    check_installed(resolved.recipe.report_to)
    if resolved.recipe.output_dir:
        check_free(Path(resolved.recipe.output_dir))         # now, and not after an hour of reading
    return resolved


def _prepared_run(words: Sequence[str], folder: RunFolder | None, output: Path | None, told: Tell, processes: int, *,
                  here: int | None = None, dry_run: bool = False, machine: str | None = None, warn: Say = say
                  ) -> Prepared:
    """Prepare a new run, after the base that it names and nobody has trained; or the run in `folder`, to continue it."""
    from powertrain import planner
    from powertrain.recipe import resolve_words
    from powertrain.run.folder import check_same_material, continued
    from powertrain.run.material import refuse_downloads
    from powertrain.run.prepare import prepare, with_stored_plan

    if folder is not None:
        resolved = continued(folder, [*words])
        check_installed(resolved.recipe.report_to)
        as_begun = resolved.recipe.techniques == continued(folder, []).recipe.techniques
        if processes == 1 and as_begun:      # it may have been started by several
            resolved = replace(resolved, recipe=planner.without_shares(resolved.recipe))
        prepared = prepare(resolved, cache_folder(), told, processes=processes, here=here, warn=warn)
        check_same_material(folder, prepared.facts.data.digest, prepared.facts.model.digest)
        stored = planner.from_json(read_json(folder.plan))
        if not as_begun or planner.processes_of(stored) != processes:
            return prepared
        return with_stored_plan(prepared, stored, read_json(folder.facts, having="hardware")["hardware"], warn)
    if dry_run:
        resolved = resolve_words(words)
        refuse_downloads(resolved.recipe, cache_folder())
    else:
        resolved = _resolved(words, output)
        train_missing_base(resolved.recipe, told)
    return prepare(resolved, cache_folder(), told, processes=processes, here=here, machine=machine, warn=warn)


def train_missing_base(recipe: Recipe, told: Tell) -> None:
    """Train the base that `model.path=recipe:NAME` names, if nobody has: in another process, as settings hold for a process."""
    from powertrain.launch.group import without_place
    from powertrain.run.folder import missing_base

    if (base := missing_base(recipe)) is None:
        return
    told(Phase(message=f"no finished run of the recipe {base} is in runs/: training it first, in about {BASE_TIME_S} s"))
    done = subprocess.run([sys.executable, "-m", "powertrain", "train", base, f"train_time_s={BASE_TIME_S}", "--quiet"],
                          stdout=sys.stderr, check=False, env=without_place(os.environ))
    if done.returncode != 0:
        raise RunFailed(f"the recipe {base}, whose model is needed, did not finish; run `powertrain train {base}` to see why")


def prepare_words(words: Sequence[str]) -> Prepared:
    """Return a recipe with its plan. A base model that the recipe names and nobody has trained is trained first."""
    from powertrain.recipe import resolve_words
    from powertrain.run.prepare import prepare

    resolved = resolve_words(words)
    train_missing_base(resolved.recipe, tell)
    return prepare(resolved, cache_folder(), tell, warn=say)


def _print_plan(prepared: Prepared, *, as_json: bool) -> None:
    from powertrain import planner
    from powertrain.run.fits import needed_bytes, room_bytes, savings_of

    recipe, resolved, facts = prepared.recipe, prepared.resolved, prepared.facts
    needed, room = needed_bytes(facts, prepared.plan), room_bytes(facts)
    savings = savings_of(prepared) if needed > room else []
    if as_json:
        screen.print_json({"event": "plan", "recipe": recipe.model_dump(),
                           "origins": {key: origin.to_json() for key, origin in resolved.origins.items()},
                           "notes": resolved.notes, "seen": prepared.material.said,
                           "total_steps": prepared.total_steps, "facts": to_plain(facts),
                           "plan": planner.to_json(prepared.plan),
                           "memory": {"needed_bytes": needed, "room_bytes": room,
                                      "savings": [to_plain(saving) for saving in savings]}})
        return
    screen.print_rows([("Recipe", line) for line in resolved.to_yaml().splitlines()])
    elsewhere = "the machine is not here; its software counts as what is installed on this one"
    screen.print_rows([*[("Note", note) for note in [*resolved.notes, *[elsewhere] * (facts.hardware.basis != "measured")]],
                       *[("Corrected", text) for text in recipe.corrections],
                       plan_report.machine_row(facts.hardware), plan_report.data_row(facts.data),
                       plan_report.model_row(facts.model, resolved.origin("model.provider").reason),
                       *[("Seen", text) for text in prepared.material.said],
                       plan_report.run_row(recipe.model_dump(), facts.data, prepared.total_steps),
                       *choice_rows(recipe.model_dump(), facts.model)])
    screen.print_rows([("Plan", *row) for row in plan_report.plan_rows(prepared.plan)], styles=("bold", "bold", "cyan"))
    screen.print_rows(plan_report.expected_rows(prepared.plan.estimate, facts.hardware, facts.model))
    if prepared.plan.estimate is None and facts.model.provider == "native":
        screen.print_rows([plan_report.memory_row(needed, facts.hardware)])
    screen.print_rows(plan_report.fitting_rows(needed, room, [(one.words, one.bytes, one.enough) for one in savings]))


def _print_rehearsal(prepared: Prepared, *, as_json: bool) -> None:
    """Print whether torch makes the exchanges that the plan counts, in a group of as many processes."""
    say(f"counting the exchanges of {prepared.facts.hardware.processes:,} processes that torch's fake back end stands for")
    from powertrain.run.rehearsal import rehearse

    differences, why_not = rehearse(prepared)
    if as_json:
        screen.print_json({"event": "rehearsal", "not_counted_because": why_not, "differences": differences})
    else:
        screen.print_rows([plan_report.checked_row(differences, why_not, prepared.facts.hardware.processes)])
