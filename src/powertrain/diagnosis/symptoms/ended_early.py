"""A run that is not finished and does not train: failed, stopped or killed."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.diagnosis.run_record import RunRecord
from powertrain.diagnosis.symptoms.base import Symptom, several
from powertrain.records.findings import Cure, Finding, Severity

NEARLY_FULL = 0.9            # of the memory that was free: with that expected, the system is likely to have killed it


class EndedEarly(Symptom):
    name = "ended_early"
    rests_on = "fact: the run's end event, or its absence, and its lock"
    gives_way_to = frozenset({"not_finite", "out_of_memory"})

    @classmethod
    def find(cls, run: RunRecord) -> Iterator[Finding]:
        go_on = Cure(f"go on from its last checkpoint: `powertrain train --resume {run.folder}`")
        severity: Severity
        if run.state == "failed":
            severity, title, why = "critical", "the run failed", run.said_at_end or "it wrote no reason"
        elif run.state == "stopped":
            severity, title = "low", f"the run was {(run.history.ends or {})['reason']}"
            why = "it was asked to, and saved its work; the learning rate's schedule was not run to its end"
        elif run.state == "killed":
            severity, title = "moderate", "the run's process is gone, and wrote no end"
            why = _killed(run)
        else:
            return
        yield cls.found(severity, f"{title}, at step {run.last_step:,} of {run.total_steps:,}", why, _evidence(run), go_on,
                        expected=f"the {several(run.total_steps - run.last_step, 'step')} that are left")


def _evidence(run: RunRecord) -> list[str]:
    saved = [happened.after_step for happened in run.history.of("checkpoint")]
    lost = run.last_step - (saved[-1] if saved else 0)
    return [f"the last checkpoint is of step {saved[-1]:,}" if saved else "there is no checkpoint",
            f"{several(lost, 'step')} would be done again" if lost else "no step is lost"]


def _killed(run: RunRecord) -> str:
    free = (run.facts.get("hardware") or {}).get("free_memory_bytes")
    needed = sum((run.estimate or {}).get("memory_bytes", {}).values())
    if free and needed > NEARLY_FULL * free:
        return (f"killed, most likely by the system for its memory: {needed / 2**20:,.0f} MiB were predicted, of "
                f"{free / 2**20:,.0f} MiB that were free")
    return ("it was killed from outside (kill -9, the system when memory runs out, a machine that went down), which no run can "
            "note")
