"""Tools and calls of tools, from the spellings that data sets have to the one that chat templates take.

A template takes a call as {"type": "function", "function": {"name", "arguments"}} with the arguments as an object, and a tool
as {"type": "function", "function": {"name", "description", "parameters"}}. OpenAI's files spell arguments as JSON text. Other
data sets hold bare {"name", "arguments"}, lists of calls as JSON text (xLAM), and turns whose whole text is a call (ShareGPT's
function_call). A column of tools may be JSON text too: a table cannot hold objects of different shapes.
Sources: OpenAI's guide to fine-tuning with functions; transformers, "Tool use" in the docs of chat templates.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from powertrain.data.rows.files import FIELDS_NAMED, json_kind
from powertrain.data.rows.row import BadRow, Message, ToolCall

FUNCTION = "function"


def tools_of(value: Any, column: str) -> tuple[Mapping[str, Any], ...]:
    """Return a row's tools as templates take them; none for an empty list or text. Raises BadRow for anything else."""
    if isinstance(value, str) and not value.strip():
        return ()
    found = _from_json(value, column)
    listed = [found] if isinstance(found, Mapping) else found
    if not isinstance(listed, list):
        raise BadRow(f"{column!r} is {json_kind(found)}, not a list of tools")
    return tuple(_tool(_from_json(tool, column), number, column) for number, tool in enumerate(listed, 1))


def _tool(tool: Any, number: int, column: str) -> Mapping[str, Any]:
    wrapped = isinstance(tool, Mapping) and isinstance(tool.get(FUNCTION), Mapping)
    function = tool[FUNCTION] if wrapped else tool
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRow(f"tool {number} of {column!r} has no name")
    return tool if wrapped else {"type": FUNCTION, FUNCTION: tool}


def tool_names(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(tool[FUNCTION]["name"]) for tool in tools]


def calls_of(value: Any, where: str) -> tuple[ToolCall, ...]:
    """Return the calls in a list of them, one call, or the JSON text of either; none for null. Raises BadRow."""
    if value is None or value == "":
        return ()
    found = _from_json(value, where)
    return tuple(_call(call, where) for call in (found if isinstance(found, list) else [found]))


def _call(call: Any, where: str) -> ToolCall:
    call = _from_json(call, where)
    function = call.get(FUNCTION, call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow(f"{where} has a call without a name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _from_json(arguments or "{}", f"the arguments of {function['name']} in {where}")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise BadRow(f"the arguments of {function['name']} in {where} are {json_kind(arguments)}, not an object")
    given = call.get("id")
    return ToolCall(function["name"], arguments, str(given) if given is not None else None)


def check_calls(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise BadRow for a call of a tool that the row does not offer: the model would learn to invent tools."""
    names = tool_names(tools)
    for number, message in enumerate(messages, 1):
        for call in message.tool_calls:
            if names and call.name not in names:
                offered = ", ".join(names[:FIELDS_NAMED])
                raise BadRow(f"turn {number} calls {call.name!r}, which is none of the row's tools ({offered})")


def undescribed(tools: tuple[Mapping[str, Any], ...], system: str) -> tuple[Mapping[str, Any], ...]:
    """Return the tools that a template has to describe: none where the system text names every one of them already.

    The rows of Hermes and others hold their tools twice, in a column and in the system text.
    """
    return () if all(name in system for name in tool_names(tools)) else tools


def _from_json(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{where} is text that is no JSON ({error})") from error
