"""Files of other people as text and as syntax, with limits on their size and depth."""

import ast
import re
import warnings
from pathlib import Path

from powertrain.records import WrongUse

MAGIC = re.compile(r"^([ \t]*)[!%][^\n]*$", re.MULTILINE)            # a notebook's `!pip install`, `%matplotlib inline`
MOST_UNPARSED = 50           # lines that are left out of a script; with more, it is another language or an older Python
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
    """Return the syntax of a script without the lines that Python cannot parse, and these lines.

    A line too far to the right is read where the one above stands, and a broken `else:` becomes `if True:`. Raises the first
    SyntaxError where too many lines would be left out.
    """
    lines = text.split("\n")
    left_out: dict[int, str] = {}
    first: SyntaxError | None = None
    for _ in range(MOST_UNPARSED):
        try:
            return parsed("\n".join(lines)), "\n".join(left_out.values())
        except SyntaxError as error:
            first = first or error
            header = LACKS_BODY.match(error.msg)
            at = int(header[1] if header else error.lineno or 1) - 1
            if not 0 <= at < len(lines):
                break
            is_new, line = at not in left_out, lines[at]
            left_out.setdefault(at, line)
            above = next((each for each in reversed(lines[:at]) if each.strip()), "")
            if is_new and error.msg == "unexpected indent":
                lines[at] = above[:len(above) - len(above.lstrip())] + line.lstrip()
            else:
                lines[at] = re.sub(r"\S.*", "if True:", line, count=1) if is_new and line.rstrip().endswith(":") else ""
    raise first or SyntaxError("no line of it can be parsed")


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
