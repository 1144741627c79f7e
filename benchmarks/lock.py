"""The lock file: every package that `make install` would install on this platform, with its version and the sum of its file.

    python benchmarks/lock.py write REPORT [LOCK]     from `pip install --dry-run --report REPORT` (`make lock`)
    python benchmarks/lock.py check [LOCK]            what needs no network: sums, versions, packages, licences
    python benchmarks/lock.py audit REPORT            what `pip-audit --format json` found (`make audit-deps`)

constraints.txt holds the versions that are chosen; the lock follows from it and is never changed by hand. Its sums are those
of one platform (the line `# for:`): on another one constraints.txt is what is installed by.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCK, CONSTRAINTS = ROOT / "requirements.lock", ROOT / "constraints.txt"
OURS = "powertrain"
WITH_PYTHON = {"pip", "setuptools"}          # of every environment; make install takes the newest pip
LINE = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>\S+) --hash=sha256:(?P<sum>[0-9a-f]{64})")


def normal(name: str) -> str:
    """Return a package's name as an index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def this_platform() -> str:
    return f"{platform.system()} {platform.machine()}, Python {sys.version_info.major}.{sys.version_info.minor}"


def locked(text: str) -> dict[str, str]:
    """Return the version of each package of a lock. Raises SystemExit for a line that is no pinned package with its sum."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    if wrong := [line for line in lines if not LINE.fullmatch(line)]:
        raise SystemExit(f"the lock has lines without a version and a sum: {wrong[0]}; make lock writes it anew")
    found = [match for line in lines if (match := LINE.fullmatch(line))]
    return {normal(match["name"]): match["version"] for match in found}


def written(report: Mapping[str, Any]) -> str:
    """Return the lock of what pip would install."""
    lines = [f"# for: {this_platform()}", "# made by `make lock` from constraints.txt; not changed by hand"]
    for item in sorted(report["install"], key=lambda item: normal(item["metadata"]["name"])):
        if (name := normal(item["metadata"]["name"])) != OURS:
            lines.append(f"{name}=={item['metadata']['version']} --hash=sha256:"
                         f"{item['download_info']['archive_info']['hashes']['sha256']}")
    return "\n".join(lines) + "\n"


def constrained() -> dict[str, str]:
    """Return the versions that constraints.txt chooses."""
    pairs = (line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line and not line.startswith("#"))
    return {normal(name): version for name, version in pairs}


def not_chosen(lock: Mapping[str, str]) -> list[str]:
    """Return a sentence for each package that the lock has in another version than constraints.txt, or not at all."""
    return [f"constraints.txt has {name} {version}, and the lock {lock.get(name, 'lacks it')}; make lock writes the lock anew"
            for name, version in constrained().items() if lock.get(name, "").partition("+")[0] != version]


def wrong_with(lock: Mapping[str, str], installed: Mapping[str, str], licences: Mapping[str, str]) -> list[str]:
    """Return a sentence for each thing that is wrong with an environment, by its packages' versions and licences."""
    return [*(f"{name} {version} is locked and not installed" for name, version in lock.items() if name not in installed),
            *(f"{name} is {found}, and {lock[name]} is locked" for name, found in installed.items()
              if lock.get(name, found) != found),
            *(f"{name} {found} is installed and not locked" for name, found in installed.items()
              if name not in lock and name not in WITH_PYTHON and name != OURS),
            *(f"{name} names no licence" for name in lock if name in installed and not licences.get(name))]


def installed_here() -> tuple[dict[str, str], dict[str, str]]:
    """Return version and licence of every package of this environment."""
    found = {normal(one.metadata["Name"]): one for one in importlib.metadata.distributions()}
    return {name: one.version for name, one in found.items()}, {name: licence_of(one) for name, one in found.items()}


def licence_of(one: importlib.metadata.Distribution) -> str:
    told = one.metadata
    named = [told.get("License-Expression"), told.get("License"),
             *(line for line in told.get_all("Classifier") or () if line.startswith("License ::")),
             *(str(file) for file in one.files or () if re.match(r"(LICEN[CS]E|COPYING)", file.name, re.IGNORECASE))]
    return next((name for name in named if name), "")


def not_audited(found: Mapping[str, Any]) -> list[str]:
    """Return the packages that pip-audit passed over: it calls that no vulnerability."""
    return [f"{one['name']}: {one['skip_reason']}" for one in found["dependencies"] if "skip_reason" in one]


def vulnerable(found: Mapping[str, Any]) -> list[str]:
    return [f"{one['name']} {one['version']}: {bug['id']}, mended in {', '.join(bug['fix_versions']) or 'no version'}"
            for one in found["dependencies"] for bug in one.get("vulns", ())]


def told(wrong: Iterable[str], good: str) -> int:
    """Print what is wrong, else what is good; return the exit code."""
    wrong = list(wrong)
    print("\n".join(wrong) or good)
    return 1 if wrong else 0


def audit(report: Path) -> int:
    """Say which packages have known vulnerabilities, and of which nothing is known because no service answered."""
    try:
        found = json.loads(report.read_text())
    except (OSError, ValueError):
        print("the vulnerability service could not be reached, so no package was looked up; run it again with a network")
        return 0
    passed_over = not_audited(found)
    if len(passed_over) == len(found["dependencies"]):
        print("no vulnerability service answered for any package, so none was looked up; run it again with a network")
        return 0
    return told(vulnerable(found), f"no known vulnerability in {len(found['dependencies']) - len(passed_over)} packages"
                + (f"; not looked up: {'; '.join(passed_over)}" if passed_over else ""))


def main(what: str, *files: str) -> int:
    given = [Path(file) for file in files]
    if what == "write":
        (given[1] if len(given) > 1 else LOCK).write_text(written(json.loads(given[0].read_text())))
        return 0
    if what == "audit":
        return audit(given[0])
    text = (given[0] if given else LOCK).read_text()
    lock = locked(text)
    if f"# for: {this_platform()}" not in text.splitlines():
        print(f"the lock is not for {this_platform()}: nothing was compared with what is installed")
        return 0
    return told([*not_chosen(lock), *wrong_with(lock, *installed_here())],
                f"the {len(lock)} packages of the lock are installed in their versions, with licences, and none beside them")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
