"""Python's operators and functions that an audit computes for known values, where the result is small.

A script may say 9 ** 9 ** 9, or double a text forty times: such values are not known.
"""

import operator
import posixpath
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
    "os.path.abspath": lambda path: whole(path), "os.path.realpath": lambda path: whole(path),
    "pathlib.Path": lambda *parts: posixpath.join(*parts) if parts else "."}
# of paths, which are kept as text: what their attributes and methods give
OF_PATHS: Mapping[str, Callable[[str], Any]] = {
    "parent": lambda path: posixpath.dirname(path) or ".", "stem": lambda path: Path(path).stem,
    "suffix": lambda path: Path(path).suffix, "parents": lambda path: list(map(str, Path(path).parents))}
PATH_METHODS: Mapping[str, Callable[..., Any]] = {
    "resolve": lambda path: whole(path), "absolute": lambda path: whole(path), "expanduser": str, "as_posix": str,
    "joinpath": posixpath.join, "with_suffix": lambda path, end: str(Path(path).with_suffix(end))}
TEXT_METHODS = frozenset({"lower", "upper", "strip", "lstrip", "rstrip", "split", "replace", "startswith", "endswith", "format",
                          "join", "removesuffix", "removeprefix", "title", "capitalize"})
MOST = 10_000                                # of a number's bits or a text's characters: a script may say 10 ** 10 ** 10
WRONG = (ArithmeticError, TypeError, ValueError, LookupError, AttributeError)   # the script's own mistake, or our ignorance


def whole(path: str) -> str:
    """Return the path of a file that is there, such as the script's own, from the root; another one as it is."""
    return str(Path(path).resolve()) if Path(path).is_file() else path


def apply_operator(name: str, a: Any, b: Any) -> Any:
    """Apply an operator. Raises what Python raises, and OverflowError where the result would be needlessly large."""
    large = name in ("Pow", "Mult") and any(isinstance(value, (int, float)) and abs(value) > MOST ** 4 for value in (a, b))
    length = len(a) if isinstance(a, Sequence) else len(b) if isinstance(b, Sequence) else 0
    times = next((value for value in (a, b) if isinstance(value, int)), 1) if name == "Mult" else 2
    if large or (name == "Pow" and isinstance(b, (int, float)) and abs(b) > 64) or length * times > MOST:
        raise OverflowError
    return OPERATORS[name](a, b)
