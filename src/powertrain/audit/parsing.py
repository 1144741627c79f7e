"""Files of other people as text and as syntax, with limits on their size and depth."""

import ast
import re
import warnings
from pathlib import Path

from powertrain.records import WrongUse

MAGIC = re.compile(r"^([ \t]*)[!%][^\n]*$", re.MULTILINE)            # a notebook's `!pip install`, `%matplotlib inline`
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
