"""The link between the processes of a run: measured as a run begins, and kept for the plans of later ones.

It is measured by sums like those of gradients, so what a plan expects of these is the time of the same work. It lies in the
cache folder, in `links/<fingerprint>.json`, by the number of processes and machines. What cannot be read is measured again.
"""

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from powertrain.cost.collectives import WHOLE
from powertrain.facts.measure import seconds_of
from powertrain.records import Hardware, PeerLink
from powertrain.records.json_files import write_json
from powertrain.shapes import BUCKET_BYTES, FP32

if TYPE_CHECKING:
    from powertrain.training.ranks import Ranks

SUMS = 5                                     # of which the fastest counts: the others waited for a process that came late


def links_file(cache: Path, fingerprint: str) -> Path:
    return cache / "links" / f"{fingerprint}.json"


def with_links(hardware: Hardware, cache: Path) -> Hardware:
    """Return the machine with the link that a run of as many processes on as many machines has measured."""
    file = links_file(cache, hardware.fingerprint)
    with suppress(OSError, ValueError, KeyError, TypeError):
        link = PeerLink(**json.loads(file.read_text(encoding="utf-8"))[_place(hardware)])
        sources = {**hardware.sources, "links": f"measured by an earlier run, {file}"}
        return replace(hardware, links={WHOLE: link}, sources=sources)
    return hardware


def keep_link(cache: Path, hardware: Hardware, link: PeerLink) -> None:
    """Write the link beside those of other numbers of processes. A cache that cannot be written is no error."""
    file = links_file(cache, hardware.fingerprint)
    kept = {}
    with suppress(OSError, ValueError, TypeError):
        kept = dict(json.loads(file.read_text(encoding="utf-8")))
    with suppress(OSError):
        write_json(file, {**kept, _place(hardware): asdict(link)})


def measure_link(ranks: "Ranks", device: str) -> PeerLink:
    """Measure latency and bandwidth of the sums of a tensor over all processes, in less than a second. All of them take part.

    The two are those with which `Collectives.seconds` gives the measured times of one number and of a whole bucket.
    """
    import torch

    from powertrain.training.ranks import GroupRanks

    everyone = GroupRanks(ranks.rank, ranks.world)

    def fastest_s(numbers: int) -> float:
        tensor = torch.zeros(numbers, device=device)
        return min(seconds_of(lambda: everyone.sum([tensor]), device) for _ in range(SUMS))

    one_s, bucket_s = fastest_s(1), fastest_s(BUCKET_BYTES // FP32)
    messages = 2 * (ranks.world - 1)
    return PeerLink(one_s / messages, messages * BUCKET_BYTES / ranks.world / max(bucket_s - one_s, 1e-9))


def _place(hardware: Hardware) -> str:
    return f"{hardware.processes} processes on {hardware.nodes} machines"
