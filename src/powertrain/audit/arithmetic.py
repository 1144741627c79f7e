"""Python's operators and functions that an audit computes for known values, where the result is small.

A script may say 9 ** 9 ** 9, or double a text forty times: such values are not known.
"""

import operator
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "Div": operator.truediv, "FloorDiv": operator.floordiv,
    "Mod": operator.mod, "Pow": operator.pow, "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le,
    "Gt": operator.gt, "GtE": operator.ge, "Is": operator.is_, "IsNot": operator.is_not,
    "In": lambda a, b: a in b, "NotIn": lambda a, b: a not in b}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "len": len, "min": min, "max": max, "abs": abs, "round": round,
    "sum": sum, "list": list, "tuple": tuple, "sorted": sorted,
    "os.path.join": posixpath.join, "os.path.basename": posixpath.basename, "os.path.dirname": posixpath.dirname,
    "pathlib.Path": lambda *parts: posixpath.join(*parts) if parts else "."}
TEXT_METHODS = frozenset({"lower", "upper", "strip", "lstrip", "rstrip", "split", "replace", "startswith", "endswith", "format",
                          "join", "removesuffix", "removeprefix", "title", "capitalize"})
MOST = 10_000                                # of a number's bits or a text's characters: a script may say 10 ** 10 ** 10
WRONG = (ArithmeticError, TypeError, ValueError, LookupError, AttributeError)   # the script's own mistake, or our ignorance


def apply_operator(name: str, a: Any, b: Any) -> Any:
    """Apply an operator. Raises what Python raises, and OverflowError where the result would be needlessly large."""
    large = name in ("Pow", "Mult") and any(isinstance(value, (int, float)) and abs(value) > MOST ** 4 for value in (a, b))
    length = len(a) if isinstance(a, Sequence) else len(b) if isinstance(b, Sequence) else 0
    times = next((value for value in (a, b) if isinstance(value, int)), 1) if name == "Mult" else 2
    if large or (name == "Pow" and isinstance(b, (int, float)) and abs(b) > 64) or length * times > MOST:
        raise OverflowError
    return OPERATORS[name](a, b)
