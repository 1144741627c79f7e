"""Prints what a tracker holds of a run, by its own files and readers: `python read_back.py TRACKER RUN`.

One JSON object: `curves` (name -> [[step, value, time], ...] in order), `kinds` of artefacts, `samples`. In a process of its
own, because these libraries read their variables when they are imported.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Curves = dict[str, list[tuple[int, float, float]]]
BLOCK, HEAD = 32768, 7       # of the log that W&B writes, whose form is LevelDB's


def tensorboard(run: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tracking" / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    tags = found.Tags()
    curves = {tag: [(one.step, one.value, one.wall_time) for one in found.Scalars(tag)] for tag in tags["scalars"]}
    texts = [tag.removesuffix("/text_summary") for tag in tags["tensors"]]
    samples = [one.tensor_proto.string_val[0].decode() for one in found.Tensors("sample/text_summary")] \
        if "sample" in texts else []
    return {"curves": curves, "kinds": [text.partition("/")[0] for text in texts if "/" in text], "samples": samples}


def mlflow(run: Path) -> dict[str, Any]:
    from mlflow import MlflowClient

    client, ident = MlflowClient(), _id(run)
    experiments = [one.experiment_id for one in client.search_experiments()]
    (there,) = client.search_runs(experiments, f"tags.`powertrain.id` = '{ident}'")     # one, however often it was followed
    number = there.info.run_id
    curves = {name: [(one.step, one.value, one.timestamp / 1000) for one in client.get_metric_history(number, name)]
              for name in there.data.metrics}
    return {"curves": curves, "kinds": [one.path for one in client.list_artifacts(number) if one.path != "samples"],
            "samples": [one.path for one in client.list_artifacts(number, "samples")], "status": there.info.status,
            "parameters": there.data.params}


def trackio(run: Path) -> dict[str, Any]:
    import datetime

    from trackio.sqlite_storage import SQLiteStorage

    curves, samples = defaultdict(list), []
    for row in SQLiteStorage.get_logs("powertrain", run.name):
        step, time = row.pop("step"), datetime.datetime.fromisoformat(row.pop("timestamp")).timestamp()
        for name, value in row.items():
            if isinstance(value, dict):
                samples.append(value["_value"])
            else:
                curves[name].append((step, float(value), time))
    return {"curves": curves, "samples": samples, "kinds": [one["type"] for one in SQLiteStorage.get_artifacts("powertrain")]}


def wandb(run: Path) -> dict[str, Any]:
    from wandb.proto import wandb_internal_pb2

    curves, samples, kinds = defaultdict(list), [], []
    (file,) = (run / "tracking" / "wandb").glob("offline-run-*/*.wandb")     # one, however often it was followed
    for data in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        row = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
        for name, value in row.items():
            if name == "sample/path":
                samples.append((file.parent / "files" / value).read_text())
            elif not name.startswith(("_", "sample/")) and name != "step":
                curves[name].append((row["step"], float(value), row["_timestamp"]))
        for made in (record.artifact, record.request.log_artifact.artifact):
            kinds += [made.type] * bool(made.type)
    return {"curves": curves, "samples": samples, "kinds": kinds}


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log of LevelDB's form: blocks of parts, each with its length and whether it is the last one."""
    place, whole = HEAD, b""
    while place + HEAD <= len(data):
        if BLOCK - place % BLOCK < HEAD:
            place += BLOCK - place % BLOCK
            continue
        length, kind = int.from_bytes(data[place + 4:place + 6], "little"), data[place + 6]
        whole += data[place + HEAD:place + HEAD + length]
        place += HEAD + length
        if kind in (1, 4):                   # whole, or the last part
            yield whole
            whole = b""


def _id(run: Path) -> str:
    import hashlib

    with open(run / "events.jsonl", "rb") as file:
        return hashlib.sha256(file.readline()).hexdigest()[:16]


if __name__ == "__main__":
    answer = globals()[sys.argv[1]](Path(sys.argv[2]))
    answer["curves"] = {name: [(step, str(value) if not math.isfinite(value) else value, time) for step, value, time in points]
                        for name, points in answer["curves"].items()}
    print(json.dumps(answer))
