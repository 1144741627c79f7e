"""Files of other people as text and as syntax, with limits on their size and depth."""

import ast
import re
import warnings
from pathlib import Path

from powertrain.records import WrongUse

MAGIC = re.compile(r"^([ \t]*)[!%][^\n]*$", re.MULTILINE)            # a notebook's `!pip install`, `%matplotlib inline`
MOST_UNPARSED = 50           # broken lines of a script; with more, it is another language or an older Python
NO_HEADER = "if True:"                       # stands for a broken `else:`, above lines that can be read
LACKS_BODY = re.compile(r"expected an indented block after .* on line (\d+)")
LARGEST_BYTES = 1 << 20                      # a config is a page of text, and of a script every value is followed


def read_text(path: Path, what: str) -> str:
    """Return the text of a script or config. Raises WrongUse if it is too large, is no text, or cannot be read."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise WrongUse(f"{path} has {path.stat().st_size:,} bytes; a {what} has at most {LARGEST_BYTES:,}: is it data?")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WrongUse(f"{path} is not UTF-8 text (byte {error.start}); an audit reads scripts and configs") from None
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror or error}") from None


def parsed(text: str) -> ast.Module:
    """Return the syntax of a script, in which a notebook's magics (`!pip install`) do nothing. Raises SyntaxError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                  # of the script's own escapes
        try:
            return ast.parse(text.removeprefix("\ufeff"))
        except SyntaxError:
            return ast.parse(MAGIC.sub(r"\1pass", text))


def parsed_in_part(text: str) -> tuple[ast.Module, str]:
    """Return the syntax of a script as far as Python can parse it, and the lines that are not in it.

    A line that Python cannot parse is mended where its fault is plain, and left out where that does not help. Raises the first
    SyntaxError where too many lines are broken.
    """
    lines = text.split("\n")
    broken: dict[int, str] = {}
    moved: dict[int, int] = {}               # line -> how far it was moved to the left
    first: SyntaxError | None = None
    for _ in range(MOST_UNPARSED):
        try:
            tree = _moved_back(parsed("\n".join(lines)), moved)
            return tree, "".join(f"{line}\n" for at, line in broken.items() if lines[at].strip() in ("", NO_HEADER))
        except SyntaxError as error:
            first = first or error
            header = LACKS_BODY.match(error.msg)
            at = int(header[1] if header else error.lineno or 1) - 1
            if at >= len(lines):             # Python also ends a line at a carriage return
                break
            above = next((each for each in reversed(lines[:at]) if each.strip()), "")
            before, lines[at] = lines[at], "" if at in broken else _mended(lines[at], above, error)
            if error.msg == "unexpected indent":
                moved[at + 1] = len(before) - len(lines[at])
            broken.setdefault(at, before)
    raise first or SyntaxError("no line of it can be parsed")


def _mended(line: str, above: str, error: SyntaxError) -> str:
    """Return what is read in place of a line that Python cannot parse; columns stay where they are."""
    said, at, end = error.msg, error.offset or 1, line.rstrip()
    if said == "unexpected indent":
        return above[:len(above) - len(above.lstrip())] + line.lstrip()
    if said == "expected ':'":
        return f"{end}:"
    if said.startswith("unmatched"):
        return f"{line[:at - 1]} {line[at:]}"
    if said.endswith("was never closed") and not end.endswith(("(", "[", "{", ",")):
        return end + {"(": ")", "[": "]", "{": "}"}[said[1]]
    return re.sub(r"\S.*", NO_HEADER, line, count=1) if end.endswith(":") else ""


def _moved_back(tree: ast.Module, moved: dict[int, int]) -> ast.Module:
    """Return the syntax with the columns of lines that were moved to the left as the text has them."""
    for node in ast.walk(tree):
        for line, column in (("lineno", "col_offset"), ("end_lineno", "end_col_offset")):
            if by := moved.get(getattr(node, line, 0)):
                setattr(node, column, getattr(node, column) + by)
    return tree


def imports(tree: ast.Module) -> dict[str, str]:
    """Return what each name in a script is imported from, wherever the import stands."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            for name in node.names:
                head = name.name if name.asname or origin else name.name.partition(".")[0]
                found[name.asname or head] = f"{origin}{head}"
    return found
