"""YAML as recipes and configs use it: plain values, whose number is known before any of them is made.

Aliases let a page of YAML stand for more values than a memory holds, or for a value that is a part of itself. So the tree is
counted first. Loads no torch.
"""

import re
from typing import Any, ClassVar

import yaml

MOST_VALUES = 100_000        # of a file with its aliases written out: far above any recipe
LONGEST_NUMBER = 100         # characters; Python itself refuses to write numbers of more than 4,300 digits
KEPT = ("null", "bool", "int", "float", "str", "seq", "map")     # what JSON has too: no bytes, no dates, no sets
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
DATE = "tag:yaml.org,2002:timestamp"
WITHIN_ITSELF = 0            # the count of a value whose parts are being counted


class Yaml(yaml.SafeLoader):
    """Reads JSON's kinds of values, with YAML 1.2's numbers: `1e-3` is a float, which PyYAML (1.1) reads as text.

    A date is text, and any other tag is an error, as are more than MOST_VALUES values.
    """

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: how for tag, how in yaml.SafeLoader.yaml_constructors.items() if tag is None or tag.rpartition(":")[2] in KEPT}
    yaml_implicit_resolvers = {  # noqa: RUF012 - as its base class has it
        first: [(tag, form) for tag, form in known if tag != DATE]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()}

    def construct_document(self, node: yaml.Node) -> Any:
        """Return the value of a document that is small enough."""
        count_values(node, {})
        return super().construct_document(node)


Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)$"), list("-+0123456789."))


def count_values(node: yaml.Node, counted: dict[int, int]) -> int:
    """Return how many values a node stands for. Raises yaml.YAMLError where they are too many, too long or without end."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag in NUMBERS and len(node.value) > LONGEST_NUMBER:
            raise _refused(node, f"a number of {len(node.value):,} characters, where {LONGEST_NUMBER} are the most")
        return 1
    if id(node) not in counted:
        counted[id(node)] = WITHIN_ITSELF
        if isinstance(node, yaml.MappingNode):
            refuse_twice(node)
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        counted[id(node)] = 1 + sum(count_values(part, counted) for part in parts)
    if counted[id(node)] == WITHIN_ITSELF:
        raise _refused(node, "an alias stands within the value that it names")
    if counted[id(node)] > MOST_VALUES:
        raise _refused(node, f"more than {MOST_VALUES:,} values, with its aliases written out")
    return counted[id(node)]


def refuse_twice(node: yaml.MappingNode) -> None:
    """Raise yaml.YAMLError for a table with a key twice: of two values one would be dropped in silence."""
    names: set[str] = set()
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        if key.value in names:
            raise _refused(key, f"{key.value[:LONGEST_NUMBER]} stands there twice")
        names.add(key.value)


def _refused(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
