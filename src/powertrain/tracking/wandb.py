"""Weights & Biases, online, offline or on a server of one's own: whatever `wandb login` and its variables say.

The run's id is made from the run, and a row's number is W&B's step, so that a second follower continues where W&B is. What a
process wrote offline is replaced by the next one, which writes all of the run. Nothing of the machine, its user or their code
is sent: each of the settings below turns something off.
"""

import html
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from powertrain.tracking.tracker import Artefact, Followed, Row, Tracker

ANSWER_S = 30.0              # that the server has when a run is opened
QUIET: Mapping[str, Any] = {
    "console": "off", "disable_git": True, "disable_code": True, "save_code": False, "silent": True, "symlink": False,
    "x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True, "x_save_requirements": False,
    "init_timeout": ANSWER_S}
STEP = "step"                # the optimizer step, the axis of every curve


class Opened(Tracker):
    def __init__(self, run: Followed, kept: Mapping[str, Any], rows: int) -> None:
        self._name = run.name
        self._run = wandb.init(project=run.project, id=run.id, name=run.name, job_type=run.kind, resume="allow",
                               dir=str(run.folder), config=dict(run.settings), settings=wandb.Settings(**QUIET))
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        here = Path(self._run.dir).parent
        self.place = str(here) if self._run.offline else str(self._run.url)
        self.rows = 0 if self._run.offline else int(self._run.step)
        if self._run.offline:
            for earlier in here.parent.glob(f"offline-run-*-{run.id}"):
                if earlier.resolve() != here.resolve():
                    shutil.rmtree(earlier, ignore_errors=True)

    def row(self, row: Row) -> None:
        text = {"sample": wandb.Html(f"<pre>{html.escape(row.text)}</pre>", inject=False)} if row.text else {}
        self._run.log({STEP: row.step, "_timestamp": row.time, **row.values, **text}, step=row.number)

    def artefact(self, artefact: Artefact) -> None:
        """Take a file. W&B makes no new version of one whose bytes it has."""
        made = wandb.Artifact(f"{self._name}-{artefact.kind}", type=artefact.kind)
        with made.new_file(artefact.name) as file:
            file.write(artefact.text)
        self._run.log_artifact(made)

    def commit(self) -> Mapping[str, Any]:
        """W&B's own process has the rows; when a run is opened again, the server says how many it has."""
        return {}

    def end(self, state: str) -> None:
        self._run.finish(exit_code=0 if state in ("finished", "stopped") else 1)

    def close(self) -> None:
        self._run.finish(exit_code=1)        # after `end` this does nothing
