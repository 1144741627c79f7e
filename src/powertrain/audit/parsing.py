"""Files of other people as text and as syntax, with limits on their size and depth."""

import ast
import json
import re
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import dedent

from powertrain.audit.scopes import KNOWN, bound_names
from powertrain.records import WrongUse

MAGIC = re.compile(r"^([ \t]*)[!%][^\n]*$", re.MULTILINE)            # a notebook's `!pip install`, `%matplotlib inline`
MOST_UNPARSED = 50           # broken lines of a script; with more, it is another language or an older Python
FEWEST_TRIES, MOST_TRIED_BYTES = 5, 1 << 22  # of parsing a script again
OF_STARS = ("transformers", "trl", "peft", "datasets", "accelerate", "torch")        # libraries that are taken whole
NO_HEADER = "if True:"                       # stands for a broken `else:`, above lines that can be read
LACKS_BODY = re.compile(r"expected an indented block after .* on line (\d+)")
# of a notebook: cells that are no Python, and what stands for IPython's syntax in the others
OTHER_CELL = re.compile(r"(\s*(#[^\n]*)?\n)*\s*%%(bash|sh|script|html|javascript|js|latex|svg|sql|R|perl|ruby|writefile|file|"
                        r"markdown|cmd|!)\b")
MAGICS = tuple((re.compile(pattern, re.MULTILINE), instead) for pattern, instead in (
    (r"^([ \t]*)%(?:time|timeit|prun)[ \t]+(?=[A-Za-z_])", r"\1"), (r"^([ \t]*[\w, ]+=[ \t]*)[!%](?:[^\n]*\\\n)*[^\n]*",
                                                                r"\1get_ipython()"),
    (r"^%%capture[ \t]+(?:-\S+[ \t]+)*(\w+)[ \t]*$", r"\1 = get_ipython()"),
    (r"^([ \t]*)%(run|store|load|pylab)\b[^\n]*", r"\1pass  # run_line_magic('\2', which may give names"),
    (r"^([ \t]*)(?:[!%?]|pip3? |conda )(?:[^\n]*\\\n)*[^\n]*", r"\1pass"), (r"^([ \t]*)[\w.]+\?{1,2}[ \t]*$", r"\1pass"),
    (r"([:;])[ \t]*![^\n]*$", r"\1 pass")))
CELL = re.compile(r'\s*"cell_type":\s*"(\w+)"')
LARGEST_NOTEBOOK_BYTES = 1 << 26             # with its pictures
LARGEST_BYTES = 1 << 20                      # a config is a page of text, and of a script every value is followed


def read_text(path: Path, what: str, most_bytes: int = LARGEST_BYTES) -> str:
    """Return the text of a script or config. Raises WrongUse if it is too large, is no text, or cannot be read."""
    try:
        if path.stat().st_size > most_bytes:
            raise WrongUse(f"{path} has {path.stat().st_size:,} bytes; a {what} has at most {most_bytes:,}: is it data?")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WrongUse(f"{path} is not UTF-8 text (byte {error.start}); an audit reads scripts and configs") from None
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror or error}") from None


def notebook_code(path: Path) -> str:
    """Return the code of a notebook, each line at the place that it has in the file, where Jupyter has written it.

    Magics do nothing, and cells in other languages are left out. Raises WrongUse if it cannot be read or is no notebook.
    """
    text = read_text(path, "notebook", LARGEST_NOTEBOOK_BYTES)
    try:
        notebook = json.loads(text)
        cells = ["".join(cell.get("source") or "") for cell in notebook["cells"] if cell["cell_type"] == "code"]
        about = notebook.get("metadata") or {}
        languages = [(about.get(part) or {}).get(key) for part, key in (("kernelspec", "language"), ("language_info", "name"))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WrongUse(f"{path} is no notebook of nbformat 4 that can be read; open it in Jupyter and save it again") from None
    language = str(next(filter(None, languages), "python"))
    if "python" not in language.lower():
        raise WrongUse(f"{path} is a notebook in {language[:40]}; an audit reads Python")
    if (size := sum(map(len, cells))) > LARGEST_BYTES:
        raise WrongUse(f"{path} has {size:,} bytes of code; a script has at most {LARGEST_BYTES:,}: is it data?")
    first = _first_lines(text)
    if [cell for _, cell in first if cell] != [cell for cell in cells if cell]:
        first = [(0, cell) for cell in cells]            # it is not written as Jupyter does
    lines: list[str] = []
    for number, cell in first:
        lines += [""] * (number - len(lines)) + ["# %%"]
        lines += [] if OTHER_CELL.match(cell) else _without_magics(cell).split("\n")
    return "\n".join(lines) + "\n"


def _first_lines(text: str) -> list[tuple[int, str]]:
    """Return (line above its code, from 0; code) of each cell with code; nothing where lines of code share one of the file."""
    cells: list[tuple[int, str]] = []
    kind, is_source = "", False
    for number, line in enumerate(text.split("\n")):
        if found := CELL.match(line):
            kind, is_source = found[1], False
        elif line.strip() == '"source": [' and kind == "code":
            is_source = True
            cells.append((number, ""))
        elif is_source and line.strip().startswith('"'):
            try:
                code = str(json.loads(line.strip().removesuffix(",")))
            except ValueError:                           # two strings in one line
                return []
            if "\n" in code[:-1]:
                return []
            cells[-1] = (cells[-1][0], cells[-1][1] + code)
        else:
            is_source = False
    return cells


def _without_magics(cell: str) -> str:
    """Return a cell's code with as many lines, in which IPython's own syntax does nothing; blank if it cannot be read."""
    plain = cell
    for pattern, instead in MAGICS:
        plain = pattern.sub(partial(_in_place_of, instead), plain)
    for text in (cell, plain, dedent(plain)):
        with suppress(SyntaxError, ValueError, MemoryError, RecursionError):
            parsed_alone(text)
            return text
    return "\n" * cell.count("\n")


def _in_place_of(instead: str, found: re.Match[str]) -> str:
    """Return what stands for a magic, with as many lines."""
    return found.expand(instead) + "\n" * found[0].count("\n")


def parsed_alone(text: str) -> ast.Module:
    """Return the syntax of a text as it is. Raises SyntaxError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                  # of the text's own escapes
        return ast.parse(text.removeprefix("\ufeff"))


def parsed(text: str) -> ast.Module:
    """Return the syntax of a script, in which a notebook's magics (`!pip install`) do nothing. Raises SyntaxError."""
    try:
        return parsed_alone(text)
    except SyntaxError:
        return parsed_alone(MAGIC.sub(r"\1pass", text))


def parsed_in_part(text: str) -> tuple[ast.Module, str]:
    """Return the syntax of a script as far as Python can parse it, and the lines that are not in it.

    A line that Python cannot parse is mended where its fault is plain, and left out where that does not help. Raises the first
    SyntaxError where too many lines are broken.
    """
    lines = text.split("\n")
    broken: dict[int, str] = {}
    moved: dict[int, int] = {}               # line -> how far it was moved to the left
    first: SyntaxError | None = None
    for _ in range(min(MOST_UNPARSED, max(FEWEST_TRIES, MOST_TRIED_BYTES // (len(text) + 1)))):
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
    """Return what each name in a script is imported from, wherever the import stands.

    What `from library import *` alone may give counts as imported from there.
    """
    found: dict[str, str] = {}
    whole = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    if len(whole) == 1 and str(whole[0].module).partition(".")[0] in OF_STARS and not whole[0].level:
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - bound_names(tree) - KNOWN
        found = {name: f"{whole[0].module}.{name}" for name in sorted(names) if not name.startswith("_")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
            for name in node.names:
                head = name.name if name.asname or origin else name.name.partition(".")[0]
                found[name.asname or head] = f"{origin}{head}"
    return found
