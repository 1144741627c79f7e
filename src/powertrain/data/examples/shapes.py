"""Which chat templates write contents as they are: these are rendered once for each order of roles, without transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from typing import TYPE_CHECKING

from powertrain.data.rows.row import Message

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node

MESSAGES, CONTENT = "messages", "content"
MARK, MARKS = "\ue000{}\ue001", re.compile("\ue000(\\d+)\ue001")         # of private use: in no template
# what a template may be made of; a macro, a call, a filter or an assignment might do anything with a content
HARMLESS = ("Template", "Output", "TemplateData", "For", "If", "CondExpr", "Compare", "Operand", "Const", "Name", "Getitem",
            "Getattr", "Add", "Concat", "And", "Or", "Not", "Filter", "Test")
FILTERS = ("capitalize", "upper", "lower", "title", "trim")
TOOLS, CALLS = "tools", "tool_calls"         # conversations that have any are rendered by transformers
PLACES = ("first", "last", "index", "index0", "revindex", "revindex0", "length")      # of a loop: the rest gives messages


def writes_contents_only(template: str) -> bool:
    """Return whether a content is written as it is, and decides nothing, wherever a Jinja template reads one.

    Looked at is what the template does with conversations that have neither tools nor calls of tools.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if MARK[0] in template:
        return False
    try:
        tree = ImmutableSandboxedEnvironment().parse(template)
        names = {loop.target.name for loop in tree.find_all(nodes.For) if isinstance(loop.target, nodes.Name)}
        return MESSAGES not in names and _is_harmless(tree, names, written=False)
    except (TemplateError, RecursionError):  # broken, with tags that only transformers knows, or nested deep
        return False


def plainly_rendered(template: str, messages: Sequence[Message], given: Mapping[str, object]) -> str:
    """Render as transformers does; a template that `writes_contents_only` needs nothing that transformers adds.

    Importing transformers takes half a second, and most runs need it for nothing else.
    """
    return _compiled(template).render(messages=[{"role": message.role, "content": message.content} for message in messages],
                                      tools=None, documents=None, **given)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)


def _is_harmless(node: Node, names: Set[str], *, written: bool) -> bool:
    """Return whether this part of a template neither decides by a content nor changes one.

    `names` stand for a message; `written`: this node's value is written, or summed and then written.
    """
    from jinja2 import nodes

    if not isinstance(node, tuple(getattr(nodes, name) for name in HARMLESS)) or _is_message(node, names):
        return False
    if isinstance(node, nodes.For):
        over_messages = isinstance(node.target, nodes.Name) and getattr(node.iter, "name", None) == MESSAGES
        return (over_messages and node.test is None and not node.recursive
                and all(_is_harmless(inner, names, written=False) for inner in (*node.body, *node.else_)))
    if isinstance(node, nodes.If) and _asks_for_tools(node.test, names):
        return all(_is_harmless(inner, names, written=False) for inner in (*node.elif_, *node.else_))
    if isinstance(node, nodes.Getitem | nodes.Getattr):
        key = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
        if _is_message(node.node, names):
            return isinstance(key, str) and (written or key != CONTENT)
        if getattr(node.node, "name", None) == "loop":
            return key in PLACES
    if isinstance(node, nodes.Name):
        return node.name not in (MESSAGES, "loop")
    if isinstance(node, nodes.Filter) and node.name not in FILTERS:
        return False
    goes_on = isinstance(node, nodes.Output) or (written and isinstance(node, nodes.Add | nodes.Concat))
    return all(_is_harmless(inner, names, written=goes_on) for inner in node.iter_child_nodes())


def _asks_for_tools(test: Node, names: Set[str]) -> bool:
    """Return whether a test is `tools` or `message.tool_calls` alone, which a conversation without tools does not pass."""
    from jinja2 import nodes

    if isinstance(test, nodes.Name):
        return test.name == TOOLS
    if isinstance(test, nodes.Getitem | nodes.Getattr) and _is_message(test.node, names):
        return (test.attr if isinstance(test, nodes.Getattr) else getattr(test.arg, "value", None)) == CALLS
    return False


def _is_message(node: Node, names: Set[str]) -> bool:
    """Return whether a node is a loop's message, or a message by its number."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getitem):
        return getattr(node.node, "name", None) == MESSAGES and isinstance(getattr(node.arg, "value", None), int)
    return isinstance(node, nodes.Name) and node.name in names
