"""All that decides what a row becomes, in words that another process can be told; and the work of one stretch of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from powertrain.data.examples.encoding import Encoder, Limit, TrainOn, make_encoder
from powertrain.data.examples.templates import ChatTemplate
from powertrain.data.examples.tokenizer import ExampleTokenizer, open_example_tokenizer
from powertrain.data.examples.writer import PartWriter, write_rows
from powertrain.data.rows.schemas import Schema, schema_of
from powertrain.data.rows.stretches import Stretch
from powertrain.records import WrongUse

TOLD = "told.json"                           # beside the files of a stretch, written last


@dataclass(frozen=True, eq=False)
class Work:
    schema: Schema
    tokenizer_folder: Path
    tokenizer: ExampleTokenizer
    template: ChatTemplate | None
    train_on: TrainOn
    limit: Limit

    @cached_property
    def encoder(self) -> Encoder[Any]:
        return make_encoder(self.schema.kind, self.tokenizer, self.template, self.train_on, self.limit)

    def write(self, folder: Path, stretch: Stretch) -> None:
        """The rows of `stretch` as the files of a part in `folder`, for `PartWriter.append`."""
        folder.mkdir()
        with PartWriter(folder, self.tokenizer.vocabulary, self.schema.kind) as writer:
            write_rows(writer, stretch.rows(), self.schema, self.encoder)
        (folder / TOLD).write_text(json.dumps(writer.told()), encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        return {"schema": [self.schema.name, self.schema.kind, dict(self.schema.columns)],
                "tokenizer": [str(self.tokenizer_folder), self.tokenizer.end, self.tokenizer.digest],
                "template": None if self.template is None else asdict(self.template),
                "train_on": self.train_on, "limit": asdict(self.limit)}


def work_from(told: Mapping[str, Any]) -> Work:
    """What `to_json` told. Raises WrongUse if the tokenizer's folder has changed since."""
    folder, end, digest = told["tokenizer"]
    tokenizer = open_example_tokenizer(Path(folder), end)
    if tokenizer.digest != digest:
        raise WrongUse(f"the tokenizer in {folder} changed while rows were tokenised with it; start again")
    template = None if told["template"] is None else \
        ChatTemplate(**{**told["template"], "special": tuple(told["template"]["special"])})
    return Work(schema_of(*told["schema"]), Path(folder), tokenizer, template, told["train_on"], Limit(**told["limit"]))
