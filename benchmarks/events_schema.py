"""The JSON schema of a line of events.jsonl, made from the classes of records/events.py.

    python benchmarks/events_schema.py > docs/events.schema.json        (`make schema`)
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from powertrain.records.events import KINDS, VERSION, Event

ABOUT = ("One event of a powertrain run, as a line of events.jsonl or of `powertrain train --json` holds it. A follower passes "
         "over kinds and fields that it does not know. What is unknown is absent.")
# JSON has no numbers that are not finite: they are texts
NUMBER = {"type": ["number", "string"], "pattern": "^(nan|-?inf)$"}


def schema() -> dict[str, Any]:
    """Return the schema of one line: any of the kinds."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "powertrain event", "description": ABOUT,
            "version": VERSION, "anyOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in KINDS],
            "$defs": {kind.__name__: _kind(kind) for kind in KINDS}}


def _kind(kind: type[Event]) -> dict[str, Any]:
    found = json.loads(json.dumps(TypeAdapter(kind).json_schema()), object_hook=_with_every_number)
    about = getattr(kind, "about", None)
    named = {"event": {"const": kind.kind}, **({"about": {"const": about}} if about else {})}
    fields = {name: {key: value for key, value in field.items() if key != "title"}
              for name, field in found["properties"].items() if name != "more"}
    return {"description": found["description"], "type": "object", "properties": {**named, **fields},
            "required": ["event", "time", *(["about"] if about else []), *found.get("required", ())]}


def _with_every_number(found: dict[str, Any]) -> dict[str, Any]:
    return found | NUMBER if found.get("type") == "number" else found


def text() -> str:
    """Return the schema as docs/events.schema.json holds it."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    print(text(), end="")
