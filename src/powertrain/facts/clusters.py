"""Machines that are not here, for `powertrain plan --machine 64x8xh100`: nodes x devices of a node x kind, or a file of facts.

A file is what `powertrain facts --output` wrote on the other machine, or the facts.json of a run there.

clusters.csv holds what manufacturers publish: memory in GB, and the bandwidth of one GPU in GB/s one way, to the others of its
node (NVLink, PCIe) and to other nodes (its share of the node's network cards), both for the system of the column
`published_for`. Rates of products and memory are those of datasheets.csv. A figure that is not published is absent, as a Mac's
rates of products are. `cpu` is the CPU of this machine, with its measured figures.

A GPU of 80 GB has 85.5e9 bytes or 85.9e9, never 80e9: `memory_mib` is what nvidia-smi or ROCm shows on such a GPU, and
`memory_link` the page with that output. Where no page was found, memory_gb counts in powers of ten. Of a Mac it is the share
of the memory that macOS lets a GPU use, three quarters, as the page shows of another Mac. `of_a_node` is how many such GPUs
the system has.
"""

import csv
import json
import re
from collections.abc import Mapping
from functools import cache as cached
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from pydantic import TypeAdapter

from powertrain.facts.hardware import datasheet, read_hardware, shared_by
from powertrain.facts.model import hardware_from_json
from powertrain.facts.software import read_software
from powertrain.records import NETWORK, NODE, Hardware, PeerLink, Software, WrongUse
from powertrain.records.json_files import read_json

ALL = "all"                  # the kind that stands for each of them
FORM = re.compile(r"(?:(?P<nodes>[1-9]\d{0,5})x)?(?:(?P<devices>[1-9]\d{0,5})x)?(?P<kind>[a-z][a-z0-9-]*)")
SHOWN = 100                  # characters of --machine that an error repeats
MOST, MOST_BYTES = 10**6, 1 << 50            # of devices and the like, and of memory: more is damage
DEVICES = ("cpu", "cuda", "mps")
UNPUBLISHED_S = 0.0          # the latency of a message: it is left out, and the plan says so


def machine_of(words: str, cache: Path) -> Hardware:
    """Return the hardware that words such as 64x8xh100, 8xh100 and 4xcpu name, as each of its processes has it.

    Raises WrongUse for words of another form and for a kind without a row.
    """
    match = FORM.fullmatch(words.lower())
    known, words = ", ".join((*kinds(), "cpu")), words[:SHOWN]
    if match is None:
        raise WrongUse(f"--machine {words} is not NODESxDEVICESxKIND or a facts.json; use for "
                       f"example 64x8xh100 or 8xh100 (kinds: {known})")
    nodes, devices, kind = int(match["nodes"] or 1), int(match["devices"] or 0), match["kind"]
    if not devices:                          # of 8xh100 the first number is matched as nodes
        nodes, devices = 1, nodes
    if kind == "cpu":
        here = read_hardware(cache)
        if here.device == "cpu" and devices > here.cores:
            raise WrongUse(f"--machine {words}: {devices} processes are more than the {here.cores} cores of this machine; "
                           f"use at most --machine {here.cores}xcpu")
        return shared_by(here, nodes * devices, devices)
    if kind == ALL:
        raise WrongUse(f"--machine {words} is for `powertrain plan`; name one kind here: {known}")
    if (found := kind_of(kind)) is None:
        raise WrongUse(f"--machine {words}: no figures are known for {kind[:SHOWN]}; known kinds are {known}")
    if _is_mac(found) and nodes * devices > 1:
        raise WrongUse(f"--machine {words}: a Mac has one GPU, and Powertrain trains on one Mac; use {found}")
    row = _rows()[found]
    if row["of_a_node"] and devices > (most := int(row["of_a_node"])):
        raise WrongUse(f"--machine {words}: a {row['published_for']} has {most} such GPUs; use {nodes * -(-devices // most)}x"
                       f"{most}x{found}")
    return _published(row, nodes, devices)


def machines_of(words: str, cache: Path) -> Mapping[str, Hardware]:
    """Return each known kind of machine by its words, where --machine is "all", "8xall" or "2x8xall"; else nothing."""
    if (match := FORM.fullmatch(words.lower())) is None or match["kind"] != ALL:
        return {}
    number = words.lower().removesuffix(ALL)
    return {kind: machine_of(number + kind, cache) for kind in kinds() if not (number and _is_mac(kind))}


def _is_mac(kind: str) -> bool:
    return _rows()[kind]["name"].startswith("Apple")


def kind_of(spelling: str) -> str | None:
    """Return the kind that is spelt so: rtx-4090, RTX4090 and h100-80gb are."""
    spellings = {_squashed(known): kind for kind, row in _rows().items() for known in (kind, f"{kind}-{row['memory_gb']}gb")}
    return spellings.get(_squashed(spelling.lower()))


def machine_and_software(words: str, cache: Path) -> tuple[Hardware, Software]:
    """Return the machine that --machine names, and its software: that of the file, or what is installed here.

    Raises WrongUse for words of another form, a kind without a row, and a file that holds no facts.
    """
    if not words.endswith(".json"):
        hardware = machine_of(words, cache)
        return hardware, read_software(hardware)
    writes = "`powertrain facts --output facts.json` writes such a file on the other machine"
    path, words = Path(words), words[:SHOWN]
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise WrongUse(f"--machine {words} cannot be read: {error.strerror}; {writes}") from None
    if not S_ISREG(mode):
        raise WrongUse(f"--machine {words} is a {'folder' if S_ISDIR(mode) else 'pipe, a socket or a device'}; {writes}")
    try:
        found = read_json(path)
        for form, data in ((Hardware, found["hardware"]), (Software, found["software"])):
            TypeAdapter(form).validate_json(json.dumps(data), strict=True)       # its types, as fields are annotated
        return _sensible(hardware_from_json(found["hardware"])), Software(**found["software"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WrongUse(f"--machine {words} holds no facts of this version of powertrain; {writes}") from None


def _sensible(hardware: Hardware) -> Hardware:
    """Return the hardware of a file. Raises ValueError or TypeError where a figure cannot be one."""
    ranges = {"cores": (0, MOST), "devices": (1, MOST), "nodes": (1, MOST), "processes": (1, MOST),
              "memory_bytes": (1, MOST_BYTES), "free_memory_bytes": (0, MOST_BYTES)}
    links = hardware.bandwidth_bytes_per_s, hardware.host_link_bytes_per_s
    rates = [*hardware.peak_flops_per_s.values(), *(rate for rate in links if rate is not None)]
    if not all(low <= getattr(hardware, name) <= high for name, (low, high) in ranges.items()):
        raise ValueError("a figure is negative, or larger than any machine's")
    if not all(0 < rate < float("inf") for rate in rates) or hardware.device not in DEVICES:
        raise ValueError("a rate is 0, or the device is none of torch's that a run can use")
    return hardware


def _squashed(kind: str) -> str:
    return kind.replace("-", "")


def _published(row: Mapping[str, str], nodes: int, devices: int) -> Hardware:
    sheet = datasheet(row["name"])
    assert sheet is not None                 # tests/facts/test_known_machines.py looks each row up
    memory_bytes = int(row["memory_mib"]) << 20 if row["memory_mib"] else int(float(row["memory_gb"]) * 1e9)
    capability = row["compute_capability"]
    major, minor = map(int, (capability or "0.0").split("."))
    links = {among: PeerLink(UNPUBLISHED_S, float(row[column]) * 1e9)
             for among, column in ((NODE, "node_gb_per_s"), (NETWORK, "network_gb_per_s")) if row[column]}
    published = f"published, not measured: {sheet.link}"
    system = f"published for {row['published_for']}, not measured: {row['link']}" if row["published_for"] else published
    device = "mps" if _is_mac(row["kind"]) else "cuda"
    rates = published if sheet.flops_per_s else "not published"
    return Hardware(row["name"], device, cores=0, memory_bytes=memory_bytes, free_memory_bytes=memory_bytes,
                    compute_capability=(major, minor) if capability else None, architecture=row["architecture"],
                    devices=devices, nodes=nodes, processes=nodes * devices, links=links,
                    peak_flops_per_s=dict(sheet.flops_per_s), datasheet_flops_per_s=dict(sheet.flops_per_s),
                    bandwidth_bytes_per_s=sheet.bandwidth_bytes_per_s, basis="published", sources={
                        "peak_flops_per_s": rates, "bandwidth_bytes_per_s": published, "links": system,
                        "memory_bytes": _shown(row) if row["memory_link"] else system})


def _shown(row: Mapping[str, str]) -> str:
    """Return what the memory of a kind is known from, where a public output shows it."""
    by = "three quarters of the largest memory, which macOS lets a GPU use, as a public output of Metal shows of another Mac" \
        if _is_mac(row["kind"]) else "as a public output of nvidia-smi or ROCm shows"
    return f"{by}: {row['memory_link']}"


def kinds() -> tuple[str, ...]:
    """Return the kinds of devices whose figures are known."""
    return tuple(_rows())


@cached
def _rows() -> Mapping[str, Mapping[str, str]]:
    with Path(__file__).with_name("clusters.csv").open(encoding="utf-8", newline="") as file:
        return {row["kind"]: row for row in csv.DictReader(file)}
