"""TensorBoard: one event file in the run's own folder, tracking/tensorboard, without TensorFlow and without torch.

The file's length is noted with the position in events.jsonl. What a killed process wrote after that is cut off, so that no
point stands there twice. Where a run went back to a checkpoint, the file says so, and TensorBoard drops the points after it.
"""

from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
from tensorboard.summary.writer.record_writer import RecordWriter

from powertrain.records.json_files import sync
from powertrain.tracking.tracker import Artefact, Followed, Row, Tracker

FIRST = Event(file_version="brain.Event:2")


class Opened(Tracker):
    def __init__(self, run: Followed, kept: Mapping[str, Any], rows: int) -> None:
        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self.place, self._path, self._time = str(folder), folder / f"events.out.tfevents.{run.id}", 0.0
        noted, there = kept.get("bytes"), self._path.stat().st_size if self._path.is_file() else 0
        known = isinstance(noted, int) and 0 < noted <= there
        self._file = open(self._path, "r+b" if known else "wb")  # noqa: SIM115 - closed by close
        self._records = RecordWriter(self._file)
        if known:
            self._file.truncate(noted)
            self._file.seek(0, 2)
            self.rows = rows
        else:
            self._write(FIRST)

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())

    def row(self, row: Row) -> None:
        self._time = row.time
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        self._write(Event(wall_time=row.time, step=row.step, summary=Summary(
            value=[*values, *([_text("sample", row.text)] if row.text else [])])))

    def artefact(self, artefact: Artefact) -> None:
        self._write(Event(wall_time=self._time, step=0, summary=Summary(
            value=[_text(f"{artefact.kind}/{artefact.name}", artefact.text)])))

    def again(self, step: int, time: float) -> None:
        self._write(Event(wall_time=time, step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def commit(self) -> Mapping[str, Any]:
        self._records.flush()
        sync(self._path)
        return {"bytes": self._path.stat().st_size}

    def end(self, state: str) -> None:
        """TensorBoard knows no end."""

    def close(self) -> None:
        self._file.close()


def _text(tag: str, text: str) -> Summary.Value:
    """Return a text for TensorBoard's text page, which reads Markdown: indented, each line stays as it is."""
    shown = "\n".join(f"    {line}" for line in text.splitlines())
    about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(
        plugin_name="text", content=TextPluginData(version=0).SerializeToString()))
    tensor = TensorProto(dtype=DT_STRING, string_val=[shown.encode()],
                         tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]))
    return Summary.Value(tag=f"{tag}/text_summary", metadata=about, tensor=tensor)
