"""MLflow: a server, or a file of this machine, as MLFLOW_TRACKING_URI says. The small client mlflow-skinny is enough.

The run is found again by a tag with its id. A point that MLflow has, by its step and time, is not sent again: a file store
would hold it twice.
"""

from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunStatus
from mlflow.exceptions import MlflowException

from powertrain.tracking.tracker import Artefact, Followed, Row, Tracker

TAG = "powertrain.id"
MOST_METRICS, MOST_PARAMETERS, LONGEST_VALUE = 1000, 100, 500        # of one request, and characters of a parameter
STATES = {"finished": RunStatus.FINISHED, "stopped": RunStatus.KILLED, "killed": RunStatus.KILLED, "failed": RunStatus.FAILED}


class Opened(Tracker):
    def __init__(self, run: Followed, kept: Mapping[str, Any], rows: int) -> None:
        self._client, self.rows = MlflowClient(), rows
        experiment = _experiment(self._client, str(run.project))
        there = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        tags = {TAG: run.id, "powertrain.kind": run.kind}
        found = there[0] if there else self._client.create_run(experiment, run_name=run.name, tags=tags)
        if not there:
            self.rows = 0
        self._id, self._is_old = found.info.run_id, bool(there)
        self.place = f"{self._client.tracking_uri} (experiment {run.project}, run {self._id})"
        if there:
            self._client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))
        new = [Param(key, str(value)[:LONGEST_VALUE]) for key, value in run.settings.items() if key not in found.data.params]
        for first in range(0, len(new), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=new[first:first + MOST_PARAMETERS])
        self._metrics, self._texts = list[Metric](), dict[str, str]()
        self._known: dict[str, set[tuple[int, int]]] = {}            # step and time of what MLflow had, by curve

    def row(self, row: Row) -> None:
        time_ms = round(row.time * 1000)
        self._metrics += [Metric(name, value, time_ms, row.step) for name, value in row.values.items()
                          if (row.step, time_ms) not in self._there(name)]
        if row.text:
            self._texts[f"samples/step-{row.step:06d}.txt"] = row.text
        if len(self._metrics) >= MOST_METRICS:
            self._send()

    def _there(self, name: str) -> set[tuple[int, int]]:
        if self._is_old and name not in self._known:
            self._known[name] = {(metric.step, metric.timestamp) for metric in
                                 self._client.get_metric_history(self._id, name)}
        return self._known.get(name, set())

    def _send(self) -> None:
        while self._metrics:
            self._client.log_batch(self._id, metrics=self._metrics[:MOST_METRICS])
            del self._metrics[:MOST_METRICS]

    def artefact(self, artefact: Artefact) -> None:
        self._client.log_text(self._id, artefact.text, f"{artefact.kind}/{artefact.name}")

    def commit(self) -> Mapping[str, Any]:
        self._send()
        for path, text in self._texts.items():
            self._client.log_text(self._id, text, path)
        self._texts.clear()
        return {}

    def end(self, state: str) -> None:
        self._client.set_terminated(self._id, RunStatus.to_string(STATES[state]))


def _experiment(client: MlflowClient, name: str) -> str:
    """Return the id of an experiment; make it where there is none. Another process may make it meanwhile."""
    if (found := client.get_experiment_by_name(name)) is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:
            if (found := client.get_experiment_by_name(name)) is None:
                raise
    return str(found.experiment_id)
