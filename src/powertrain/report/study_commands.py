"""The pages of studies of whole commands: rows prepared, the first step, text written, saves, growth, and an open page."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from powertrain.report import study as studies
from powertrain.report.chart import Point, Row, stacked
from powertrain.report.page import Findings, Number, Section, Table
from powertrain.report.study import Study
from powertrain.report.words import count, duration, listed, memory

MOST_LOST = 0.02             # of the time, that saves every 100 s may take
MOST_SLOWED = 0.005          # of a step, beside an open page
MOST_ORDERING_S = 0.01       # of a step, among any number of examples
MOST_READING_S = 2.0         # of a million steps
FLAT = 1.1                   # times the memory that fewer rows took: no more than this is flat
STAGE_COLOURS = ("blue", "orange", "green", "purple")


def prepare(study: Study) -> Findings:
    """Read a study of preparing data (rows of a file to token ids on disk) against datasets.map."""
    found = [{"kind": kind, **one} for kind, one in study["findings"].items()]
    numbers = tuple(Number(f"{one['ratio']['median']:.2f} times", f"as fast with rows of {one['kind']}",
                           f"{one['ratio']['low']:.2f} to {one['ratio']['high']:.2f}, {one['rows_per_s']:,.0f} rows/s")
                    for one in found)
    ratios = listed([f"{one['ratio']['median']:.2f}" for one in found])
    kinds = listed([one["kind"] for one in found])
    verdict = f"Rows of {kinds} are prepared {ratios} times as fast as by datasets.map, to the same trained tokens."
    growing = tuple(f"With rows of {one['kind']}, memory grew from {memory(one['resident_bytes_of_fewer'])} to "
                    f"{memory(one['resident_bytes'])} with the number of rows." for one in found
                    if one["resident_bytes"] > FLAT * one["resident_bytes_of_fewer"])
    rows = [Row(one["kind"], (), (*studies.interval_point(one["ratio"], "blue", "from the file on"), *studies.interval_point(
        one["ratio_to_map_alone"], "grey", "less the peer's loading of the file", "ring")), f"{one['ratio']['median']:.2f}")
        for one in found]
    tone = "good" if min(one["ratio"]["low"] for one in found) > 1 else "bad"
    return Findings(verdict, tone, numbers, growing, (
        Section("Against datasets.map", (
            studies.chart("prepare", verdict, rows, studies.table("prepare", found)), studies.table("each side", found))),
        Section("Memory", (studies.table("prepared memory", found),))))


def start(study: Study) -> Findings:
    """Read a study of the seconds from the command to the first step, with warm and with empty caches."""
    findings = study["findings"]
    seconds: Mapping[str, Mapping[str, float]] = findings["to_first_step"]
    after = listed([f"{duration(found['median'])} ({kind})" for kind, found in seconds.items() if kind != "peer"])
    theirs = f"; the peer's after {duration(seconds['peer']['median'])}" if "peer" in seconds else ""
    verdict = f"The first step is done {after} after the command{theirs}."
    numbers = tuple(Number(duration(found["median"]), f"to the first step, {kind}",
                           f"{duration(found['low'])} to {duration(found['high'])}") for kind, found in seconds.items())
    medians: Mapping[str, Mapping[str, float]] = findings["medians"]
    stages = {kind: {name: end - before for (name, end), before in zip(stamps.items(), (0.0, *stamps.values()), strict=False)}
              for kind, stamps in medians.items()}
    rows = [Row(kind, stacked(stages.get(kind, {}), 1.0, STAGE_COLOURS),
                studies.interval_point(seconds[kind], "ink", "first step done"), duration(seconds[kind]["median"]))
            for kind in dict.fromkeys((*medians, *seconds))]
    runs = [(kind, run) for kind, some in (*findings["runs"].items(), ("peer", findings.get("peer_runs") or []))
            for run in some]
    return Findings(verdict, "open", numbers, (), (
        Section("Where the time goes", (studies.chart("start", verdict, rows, _stamps(list(medians.items()))),)),
        Section("Every run", (_stamps(runs, "Seconds after the command"),))))


def _stamps(found: Sequence[tuple[str, Mapping[str, float]]], title: str = "") -> Table:
    """Return when each stage was over, one row for each of `found`."""
    stages = list(dict.fromkeys(name for _, stamps in found for name in stamps))
    return Table(("caches", *(f"{name} (s)" for name in stages)),
                 tuple((kind, *(stamps.get(name) for name in stages)) for kind, stamps in found), title)


def writing(study: Study) -> Findings:
    """Read a study of how fast text is written and questions are answered, against other programs."""
    writers, answers = study["findings"]["writers"], study["findings"]["answers"]
    ours, peers = writers["ours"], {name: one for name, one in writers.items() if name != "ours"}
    against = listed([f"{one['ratio']['median']:.2f} times {name}" for name, one in peers.items()])
    verdict = f"{ours['tokens_per_s']['median']:.0f} tokens/s are written, which is {against}."
    rows = [Row(name, (), studies.interval_point(one["tokens_per_s"], "blue" if name == "ours" else "grey"),
                f"{one['tokens_per_s']['median']:.0f}") for name, one in writers.items()]
    found = [{"name": name, **one} for name, one in writers.items()]
    ratio = answers["ratio"]
    return Findings(verdict, "good" if min(one["ratio"]["low"] for one in peers.values()) > 1 else "bad", (
        Number(f"{ours['first_s']['median']:.3f} s", "to the first token", ""),
        Number(f"{ratio['median']:.1f} times", "as many answers a second as one at a time by torch",
               f"{ratio['low']:.1f} to {ratio['high']:.1f}, {answers['answers_per_s']:.2f} a second"),
        Number(f"{answers['same_answers']} of {answers['questions']}", "answers the same to the last token", "")), (), (
        Section("Against other programs", (studies.chart("writing", verdict, rows, studies.table("writing", found)),)),))


def saving(study: Study) -> Findings:
    """Read a study of what saves and uploads cost the training beside them."""
    found = study["findings"]
    upload, lost = found["beside_an_upload"], found["lost_share"]
    beside = "there were too few steps beside an upload" if upload is None else (
        f"a step beside an upload takes {upload['median']:.3f} times ({upload['low']:.3f} to {upload['high']:.3f}) as long as "
        "one beside nothing")
    often = f", with one every {found['between_s']:g} s" if "between_s" in found else ""
    verdict = f"{found['saves']} saves of {memory(found['bytes'])} lost {lost:.1%} of the training's time{often}; {beside}."
    rows = [(number, ratio) for number, ratio in enumerate(found["ratios"], 1)]
    numbers = () if upload is None else (
        Number(f"{upload['median'] - 1:+.2%}", "a step beside an upload",
               f"{upload['low'] - 1:+.2%} to {upload['high'] - 1:+.2%}"),)
    return Findings(verdict, "good" if lost < MOST_LOST and (upload is None or upload["low"] < 1 + MOST_LOST / 2) else "bad", (
        Number(f"{lost:.2%}", "of the time lost to saves", f"{found['waited_share']:.2%} of it waiting"),
        *numbers, Number(duration(found["step_s"]["median"]), "a step beside nothing", "")), (), (
        Section("Each pair of windows", (Table(("pair", "step time beside an upload over without it"), tuple(rows)),)),))


def growth(study: Study) -> Findings:
    """Read a study of how time and memory grow, along several axes."""
    axes: Mapping[str, Sequence[Mapping[str, Any]]] = study["findings"]["axes"]
    order, log = axes.get("examples of an epoch", ()), axes.get("steps of a log", ())
    slowest_s = max((max(one["step_s"], one["first_s"]) for one in order), default=0.0)
    read_s = log[-1]["first_s"] if log else 0.0
    verdict = f"Among {count(order[-1]['at'])} examples a step finds its own in {duration(slowest_s)} at most, and a log of " \
              f"{count(log[-1]['at'])} steps is read in {duration(read_s)}." if order and log else \
              f"How time and memory grow with the {', the '.join(axes)}."
    shares = [Row(f"{axis}: {count(row['at'])}", (), (Point(share, "blue"),), f"{share:.0%}")
              for axis, rows in axes.items() for row in rows if (share := row.get("share_of_products"))]
    sections = [Section("Of the machine's limit", (studies.chart("growth", verdict, shares),))] if shares else []
    for axis, rows in axes.items():
        found = [name for name in GROWING if any(name in row for row in rows)]
        refused = [(str(row["at"]), row["refused"]) for row in rows if "refused" in row]
        sections.append(Section(axis[0].upper() + axis[1:], (Table((axis, *(GROWING[name][0] for name in found)), tuple(
            (count(row["at"]), *(GROWING[name][1](row[name]) if name in row else None for name in found)) for row in rows)),
            *((Table((axis, "refused"), tuple(refused)),) if refused else ()))))
    good = slowest_s < MOST_ORDERING_S and read_s < MOST_READING_S
    return Findings(verdict, "good" if good else "bad", (), (), tuple(sections))


def _interval(found: Mapping[str, float]) -> str:
    return f"{count(found['median'])} ({count(found['low'])} to {count(found['high'])})"


GROWING: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "parameters": ("parameters", count), "tokens_per_s": ("tokens/s (95 %)", _interval),
    "share_of_products": ("of the measured products", "{:.0%}".format),
    "resident_bytes": ("most resident", memory), "reopened_bytes": ("with warm caches", memory),
    "own_bytes": ("of it not of files", memory), "predicted_bytes": ("predicted, without Python and torch", memory),
    "rows_per_s": ("rows/s prepared", count), "bytes_per_s": ("of the file, a second", memory),
    "start_s": ("to the first step, warm", duration), "first_start_s": ("with new rows", duration),
    "newest_s": ("the newest found and checked", duration), "listed_s": ("all listed", duration), "bytes": ("the file", memory),
    "first_s": ("the first time", duration), "step_s": ("each time after", duration), "again_s": ("read again", duration),
    "allocated_bytes": ("allocated", memory)}


def page(study: Study) -> Findings:
    """Read a study of the page: how fast it opens, and what it costs a training beside it."""
    found = study["findings"]
    cost, held = found["beside_a_page"], found["server_bytes"]
    good = found["run_cold_s"] <= 1.5 and found["run_warm_s"] <= 0.3 and found["list_warm_s"] <= 0.3 and \
        found["list_cold_s"] <= 5 and held <= 120e6 and cost["low"] <= 1 + MOST_SLOWED
    verdict = (f"A step beside an open page takes {cost['median']:.4f} times ({cost['low']:.4f} to {cost['high']:.4f}) as "
               f"long; {found['steps']:,} steps open in {found['run_cold_s']:.2f} s, and again in {found['run_warm_s']:.2f} s.")
    rows = tuple((number, ratio) for number, ratio in enumerate(found["ratios"], 1))
    return Findings(verdict, "good" if good else "bad", (
        Number(f"{found['list_warm_s']:.2f} s", f"a list of {found['runs']:,} runs",
               f"{found['list_cold_s']:.1f} s when they are read for the first time"),
        Number(memory(held), "resident, the server", f"{found['server_cpu_share']:.2%} of a core while a run is shown")), (), (
        Section("Each pair of windows", (Table(("pair", "step time beside the page over without it"), rows),)),))
