"""Case `prepare`: rows from a file to token ids and masks on disk, by `powertrain data prepare` and by datasets.map.

Each run is a fresh process with fresh caches; what it imports is not timed, all from the file to what a trainer reads is. Runs
go by turns, A B B A, and the peer does the work as fast as it can: in batches, in one process or in two, whichever was faster
(in one, the tokenizer works on all cores; in two, on one each). Ours takes as many as it finds cores for.
What comes out has to be the same: the number of tokens, and every id that is trained, in order. The library `tokenizers` is
timed on the same texts alone, in as many processes as ours: no preparation that encodes every text by it can be faster.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cases import Materials
from conditions import marked

from powertrain.cli.options import say
from powertrain.evidence import studies
from powertrain.evidence.stats import interval
from powertrain.facts.hardware import read_hardware
from powertrain.facts.machine_watch import MachineWatch
from powertrain.facts.software import read_software
from powertrain.records import to_plain
from powertrain.records.evidence import Interval, Study

ROWS, FEWER_ROWS = 40_000, 10_000            # the second to see whether memory grows with the first
PAIRS = 5
NUMBER = re.compile(r"\d+")
KINDS = ("conversation", "text")
PEERS = Path(__file__).resolve().parent / "peers" / "prepare_datasets.py"
OURS = Path(__file__).resolve().parent / "prepare_once.py"


def measure(materials: Materials, python: Path) -> None:
    """Measures both kinds of rows, prints what came out and stores the study."""
    folder, began = studies.new_folder("bench-prepare"), time.monotonic()
    with MachineWatch() as watch:
        found = {kind: compared(kind, materials, python) for kind in KINDS}
    hardware, software = read_hardware(materials.cache), read_software()
    described = studies.circumstances(hardware, software)
    facts = {"hardware": to_plain(hardware), "software": to_plain(software)}
    what = "rows per second from JSONL to token ids and masks on disk, against datasets.map with the same tokenizer"
    study = Study(name=folder.name, kind="prepare", what=what, seconds=time.monotonic() - began, findings=found,
                  **{**described, "machine": marked(described["machine"], watch.seen)})
    studies.save(folder, study, facts)
    for kind, one in found.items():
        ratio = one["ratio"]
        print(f"prepare, {kind}: {one['rows_per_s']:,.0f} rows/s, {ratio['median']:.2f} times datasets.map "
              f"({ratio['low']:.2f} to {ratio['high']:.2f}) of {one['peer_rows_per_s']:,.0f}; the library tokenizers alone "
              f"takes {one['tokenizer_share']['median']:.2f} times as long as ours; resident "
              f"{one['resident_bytes'] / 2**20:,.0f} MiB, with {FEWER_ROWS:,} rows "
              f"{one['resident_bytes_of_fewer'] / 2**20:,.0f}; the peer's {one['peer_resident_bytes'] / 2**20:,.0f} ({folder})")


def compared(kind: str, materials: Materials, python: Path) -> dict[str, Any]:
    """Our rows a second against the peer's, by turns; raises AssertionError where they do not come to the same."""
    rows, fewer = (write_rows(materials, kind, count) for count in (ROWS, FEWER_ROWS))
    asked = {"rows": str(rows), "kind": kind, "tokenizer": str(materials.llama), "template": with_marks(materials.llama)}
    tried = {processes: peer(python, {**asked, "processes": processes}) for processes in (None, 2)}
    processes = min(tried, key=lambda number: tried[number]["seconds"])
    chosen = {**asked, "processes": processes}
    ours: list[Mapping[str, Any]] = []
    theirs: list[Mapping[str, Any]] = []
    alone_s: list[float] = []                # the tokenizer's library
    for pair in range(PAIRS):
        for side in ("ours", "theirs") if pair % 2 else ("theirs", "ours"):
            (ours if side == "ours" else theirs).append(once(asked) if side == "ours" else peer(python, chosen))
        alone_s.append(once({**asked, "only": "tokenizer"})["seconds"])
        say(f"prepare, {kind}: {ours[-1]['seconds']:.2f} s, the peer {theirs[-1]['seconds']:.2f} s")
    for name in ("rows", "trained_tokens", "digest"):
        assert ours[0][name] == theirs[0][name], f"{kind}: {name} is {ours[0][name]} here and {theirs[0][name]} there"
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True)]
    of_the_tokenizer = [seconds / one["seconds"] for one, seconds in zip(ours, alone_s, strict=True)]
    return {"rows": ROWS, "ratio": plain(interval(ratios)), "tokenizer_share": plain(interval(of_the_tokenizer)),
            "ratio_to_map_alone": plain(interval([b["map_s"] / a["seconds"] for a, b in zip(ours, theirs, strict=True)])),
            "rows_per_s": ROWS / interval([one["seconds"] for one in ours]).median,
            "peer_rows_per_s": ROWS / interval([one["seconds"] for one in theirs]).median, "peer_processes": processes or 1,
            "processes": ours[0]["processes"],
            "resident_bytes": max(one["resident_bytes"] for one in ours),
            "resident_bytes_of_fewer": once({**asked, "rows": str(fewer)})["resident_bytes"],
            "peer_resident_bytes": max(one["resident_bytes"] for one in theirs),
            "seconds": [one["seconds"] for one in ours], "peer_seconds": [one["seconds"] for one in theirs],
            "trained_tokens": ours[0]["trained_tokens"], "digest": ours[0]["digest"]}


def once(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    return _told([sys.executable, str(OURS), json.dumps(asked)])


def peer(python: Path, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    return _told([str(python), str(PEERS), json.dumps(asked)])


def _told(command: Sequence[str]) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory(prefix="powertrain-prepare-") as scratch:
        ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=scratch)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command[:2])} failed:\n{ended.stderr}")
    found: Mapping[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def plain(found: Interval) -> dict[str, float]:
    return {"median": found.median, "low": found.low, "high": found.high}


def write_rows(materials: Materials, kind: str, count: int) -> Path:
    """GSM8K as often as it takes, with other numbers each time, so that no two rows are the same."""
    path = materials.folder / f"{kind}-{count}.jsonl"
    if not path.exists():
        rows = [json.loads(line) for line in materials.gsm8k.read_text(encoding="utf-8").splitlines()]
        with path.open("w", encoding="utf-8") as file:
            for number in range(count):
                more, row = number // len(rows), rows[number % len(rows)]
                asked, said = (_other_numbers(row[name], more) for name in ("question", "answer"))
                made: Any = {"text": f"{asked}\n{said}"} if kind == "text" else \
                    {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
                file.write(json.dumps(made) + "\n")
    return path


def _other_numbers(text: str, more: int) -> str:
    return NUMBER.sub(lambda found: str(int(found[0]) + more), text) if more else text


def with_marks(tokenizer: Path) -> str:
    """The tokenizer's template with the marks by which transformers tells the assistant's words from the others."""
    text = (tokenizer / "chat_template.jinja").read_text(encoding="utf-8")
    content = "{{ m['content'] }}<|im_end|>"
    assert text.count(content) == 1, "another template than make_model.py writes"
    return text.replace(content, "{% if m['role'] == 'assistant' %}{% generation %}" + content + "{% endgeneration %}{% else %}"
                                 + content + "{% endif %}")
