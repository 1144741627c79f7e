"""trackio: its file of this machine, or the Space or server that TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names.

Each row has a name of its own, made from the run's id and the row's number, and trackio takes a name once. Its public `log`
draws a new name at each call, so rows go in by the function that `log` itself ends in.
"""

import datetime
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from trackio import Artifact, Markdown
from trackio.remote_client import RemoteClient
from trackio.run import Run
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import TRACKIO_DIR, parse_trackio_server_url, resolve_space_id_and_server_url

from powertrain.tracking.tracker import Artefact, Followed, Row, Tracker


class Opened(Tracker):
    def __init__(self, run: Followed, kept: Mapping[str, Any], rows: int) -> None:
        self._project, self._name, self._id = str(run.project), run.name, run.id
        self._settings, self._rows = {key: _plain(value) for key, value in run.settings.items()}, list[Row]()
        space, server = resolve_space_id_and_server_url(None, None)
        url, token = parse_trackio_server_url(server) if server else (None, None)
        self.place = f"{space or url or TRACKIO_DIR} (project {run.project})"
        self._client, self._token = None, get_token() if space else None
        if (remote := space or url) is not None:
            self._client = RemoteClient(remote, hf_token=self._token, write_token=token, verbose=False)
        self._run = Run(url=remote, project=self._project, client=self._client, name=run.name, run_id=run.id, space_id=space,
                        server_base_url=url, write_token=token, existing_runs=[], config=self._settings)
        self.rows = rows

    def row(self, row: Row) -> None:
        self._rows.append(row)

    def artefact(self, artefact: Artefact) -> None:
        made = Artifact(f"{self._name}-{artefact.kind}", type=artefact.kind)
        with tempfile.TemporaryDirectory(prefix="powertrain-") as folder:
            file = Path(folder) / artefact.name
            file.write_text(artefact.text, encoding="utf-8")
            made.add_file(file, name=artefact.name)
            self._run.log_artifact(made)

    def commit(self) -> Mapping[str, Any]:
        rows = self._rows
        if not rows:
            return {}
        values = [{**row.values, **({"sample": Markdown(row.text)._to_dict()} if row.text else {})} for row in rows]
        names, steps = [f"{self._id}-{row.number}" for row in rows], [row.step for row in rows]
        if self._client is None:
            SQLiteStorage.bulk_log(
                self._project, self._name, values, steps=steps, log_ids=names, run_id=self._id, config=self._settings,
                timestamps=[datetime.datetime.fromtimestamp(row.time, datetime.UTC).isoformat() for row in rows])
        else:                                # which stamps them with its own time
            logs = [{"project": self._project, "run": self._name, "run_id": self._id, "metrics": found, "step": step,
                     "log_id": name, "config": self._settings} for found, step, name in zip(values, steps, names, strict=True)]
            self._client.predict(api_name="/bulk_log", logs=logs, hf_token=self._token)
        rows.clear()
        return {}

    def end(self, state: str) -> None:
        self._run.finish()

    def close(self) -> None:
        self._run.finish()


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
