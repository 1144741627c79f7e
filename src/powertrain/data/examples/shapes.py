"""Chat templates that only put contents between fixed texts, rendered without Jinja: once for each order of roles.

Most templates write a message's words as they are and decide everything else by its role and place. Whether one does is read
off its syntax tree: contents may only be written, alone or in a sum of texts. Then two conversations with the same roles differ
in nothing but their contents, and the fixed texts between them are found by rendering marks in their place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from powertrain.data.rows.row import BadRow, Message

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node

MESSAGES, CONTENT = "messages", "content"
MARK, MARKS = "\ue000{}\ue001", re.compile("\ue000(\\d+)\ue001")         # of private use: in no template
# what a template may be made of; a macro, a call, a filter or an assignment might do anything with a content
HARMLESS = ("Template", "Output", "TemplateData", "For", "If", "CondExpr", "Compare", "Operand", "Const", "Name", "Getitem",
            "Getattr", "Add", "Concat", "And", "Or", "Not", "Filter", "Test")
FILTERS = ("capitalize", "upper", "lower", "title", "trim")
PLACES = ("first", "last", "index", "index0", "revindex", "revindex0", "length")      # of a loop: the rest gives messages

Render = Callable[[Sequence[Message], bool], str]        # messages, whether to ask for the assistant's turn


@dataclass(frozen=True)
class Shape:
    """How conversations of one order of roles are written: text, content, text, ..., text."""

    texts: tuple[str, ...]
    contents: tuple[int, ...]                # the message that stands behind each text but the last

    def written(self, messages: Sequence[Message]) -> str:
        parts = [self.texts[0]]
        for text, number in zip(self.texts[1:], self.contents, strict=True):
            parts += (messages[number].content, text)
        return "".join(parts)

    @cached_property
    def fixed_length(self) -> int:
        return sum(map(len, self.texts))

    def length(self, messages: Sequence[Message]) -> int:
        return self.fixed_length + sum([len(messages[number].content) for number in self.contents])

    def begins(self, longer: Shape) -> bool:
        """Whether a conversation of the shape `longer` begins with this, whatever the contents."""
        count = len(self.contents)
        return (self.contents == longer.contents[:count] and self.texts[:-1] == longer.texts[:count]
                and longer.texts[count].startswith(self.texts[-1]))


@dataclass(frozen=True)
class Layout:
    """The shape of a conversation, and those of what comes before and with each of the assistant's turns.

    The last turn's second one is None: it goes on to the end.
    """

    whole: Shape
    turns: tuple[tuple[Shape, Shape | None], ...]


def find_layout(render: Render, roles: Sequence[str], *, turns: bool) -> Layout | None:
    """The layout of a template that `writes_contents_only`; None where it refuses the conversation or a beginning of it, or
    a beginning is not how the whole begins. `turns`: whether those of the assistant are asked for.
    """
    whole = find_shape(render, roles)
    if whole is None:
        return None
    found: list[tuple[Shape, Shape | None]] = []
    for number in [number for number, role in enumerate(roles) if turns and role == "assistant"]:
        before = find_shape(render, roles[:number], asks=True)
        last = number + 1 == len(roles)
        behind = None if last else find_shape(render, roles[:number + 1])
        if before is None or not before.begins(whole) or not (last or (behind is not None and behind.begins(whole))):
            return None
        found.append((before, behind))
    return Layout(whole, tuple(found))


def find_shape(render: Render, roles: Sequence[str], *, asks: bool = False) -> Shape | None:
    """None where the template refuses such a conversation."""
    try:
        marked = render([Message(role, MARK.format(number)) for number, role in enumerate(roles)], asks)
    except BadRow:
        return None
    parts = MARKS.split(marked)
    return Shape(tuple(parts[::2]), tuple(map(int, parts[1::2])))


# ------------------------------------------------------------------------------------------------ whether there are shapes


def writes_contents_only(template: str) -> bool:
    """Whether a content is written as it is, and decides nothing, wherever a Jinja template reads one."""
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if MARK[0] in template:
        return False
    try:
        tree = ImmutableSandboxedEnvironment().parse(template)
    except TemplateError:                    # broken, or with tags that only transformers knows
        return False
    names = {loop.target.name for loop in tree.find_all(nodes.For) if isinstance(loop.target, nodes.Name)}
    return MESSAGES not in names and _is_harmless(tree, names, written=False)


def plainly_rendered(template: str, messages: Sequence[Message], given: Mapping[str, object]) -> str:
    """What transformers renders of a template that `writes_contents_only`: such a one needs nothing that transformers adds.

    To import transformers takes half a second, which most runs need for nothing else.
    """
    return _compiled(template).render(messages=[{"role": message.role, "content": message.content} for message in messages],
                                      **given)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)


def _is_harmless(node: Node, names: Set[str], *, written: bool) -> bool:
    """Whether this part of a template neither decides by a content nor changes one.

    `names` are those that stand for a message; `written`: what this node gives is written, or summed and then written.
    """
    from jinja2 import nodes

    if not isinstance(node, tuple(getattr(nodes, name) for name in HARMLESS)) or _is_message(node, names):
        return False
    if isinstance(node, nodes.For):
        over_messages = isinstance(node.target, nodes.Name) and getattr(node.iter, "name", None) == MESSAGES
        return (over_messages and node.test is None and not node.recursive
                and all(_is_harmless(inner, names, written=False) for inner in (*node.body, *node.else_)))
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


def _is_message(node: Node, names: Set[str]) -> bool:
    """A loop's message, or one by its number."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getitem):
        return getattr(node.node, "name", None) == MESSAGES and isinstance(getattr(node.arg, "value", None), int)
    return isinstance(node, nodes.Name) and node.name in names
