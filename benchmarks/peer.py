"""A peer's trainer as an arm: a process of the peer's own interpreter that answers what an arm of ours answers."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from powertrain.evidence.worker import CannotRun, Taken
from powertrain.records.evidence import Arm, Window

SCRIPTS = Path(__file__).resolve().parent / "peers"


@dataclass(frozen=True)
class PeerReady:
    """What `evidence.clock` asks of an arm that is ready. A peer is prepared before it says so: nothing is timed."""

    apply_s: float = 0.0
    techniques: tuple[str, ...] = ()
    loss_scaling: bool = False


class Peer:
    """One of peers/*.py, waiting for its first step. Raises CannotRun, from its start on, when its process fails."""

    def __init__(self, name: str, python: Path, script: str, options: dict[str, Any], scratch: Path) -> None:
        self.arm, self.ready, self.first_step_s = Arm(name, tuple(_words(options))), PeerReady(), 0.0
        self._errors = (scratch / f"{name.replace(' ', '-')}.log").open("w+")
        self._peak = 0
        began = time.perf_counter()
        self._process = subprocess.Popen([str(python), str(SCRIPTS / script), json.dumps(options)], text=True, cwd=scratch,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)
        self._read()
        self.ready_s = time.perf_counter() - began

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, method: str, *arguments: Any) -> Any:
        if method == "peak":
            return self._peak
        assert method == "window"
        assert self._process.stdin
        untimed, steps = arguments
        try:
            self._process.stdin.write(json.dumps({"untimed": untimed, "steps": steps}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed() from None
        found = self._read()
        self._peak = found["peak_bytes"]
        window = Window(found["first_step"], found["steps"], found["seconds"], found["trained_tokens"], found["real_tokens"],
                        found["padding_tokens"], {})
        return Taken(window, tuple(found["losses"]), tuple(found["grad_norms"]))

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        found: dict[str, Any] = json.loads(line)
        return found

    def _failed(self) -> CannotRun:
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines() or ["it said nothing"]
        return CannotRun(f"{self.arm.name}: {said[-1]}", details="\n".join(said[-40:]))

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _words(options: dict[str, Any]) -> Sequence[str]:
    """As they are stored: of paths the last part, as no other machine has the rest."""
    return [f"{key}={Path(value).name if isinstance(value, str) and '/' in value else value}" for key, value in options.items()]
