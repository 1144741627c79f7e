import ast
import json
import textwrap

import pytest

from powertrain.data.documents import Document
from powertrain.data.rows import docstrings
from powertrain.data.rows.docstrings import LONGEST_DOCSTRING_LINES, LONGEST_SOURCE_LINES, docstring_rows, documented_functions
from powertrain.data.rows.reading import read_rows
from powertrain.data.rows.schemas import find_schema


def found(source: str) -> list[tuple[int, str, str]]:
    return list(documented_functions(Document(textwrap.dedent(source), "a.py")))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def rows(cache):
    return list(docstring_rows(cache))


# -------------------------------------------------------------------------------- one file


def test_a_function_is_shown_without_its_docstring_dedented_and_with_its_decorators():
    assert found('''
        class A:
            @property
            def size(self) -> int:
                """Return how many there are.

                    >>> A().size
                """

                return 3
    ''') == [(4, "@property\ndef size(self) -> int:\n    return 3", "Return how many there are.")]


def test_a_docstring_keeps_its_first_paragraph_cleaned():
    (row,) = found('''
        async def f():
            """
            Say one thing,
              and another.

            Not this.
            """
            await g()
    ''')
    assert row[2] == "Say one thing,\n  and another."


@pytest.mark.parametrize("function", [
    'def f(): return 3',
    'def f():\n    """Return three of them."""',
    'def f():\n    """Internal."""\n    return 3',
    'def f():\n    """Return the following things:"""\n    return 3',
    'def f():\n    """>>> call it like this"""\n    return 3',
    'def f():\n    """One\n    two\n    three\n    four lines."""\n    return 3',
    'def f(): "Return three of them."; return 3',
    'def f():\n    """Return three of them."""; return 3',
    'def f():\n    """Return three of them."""\n    "And a second text."\n    return 3',
    'def f():\n    """Return three of them."""\n' + "    g()\n" * LONGEST_SOURCE_LINES,
    'def f(:\n    """Return three of them."""\n    return 3',
])
def test_what_teaches_nothing_or_cannot_be_cut_out_is_left_out(function):
    assert found(function) == []


def test_a_string_that_dedenting_would_change_keeps_its_function_out():
    function = '    def f(self):\n        """Return a text of two lines."""\n        return """a\n        b"""\n'
    assert found(f"class A:\n{function}") == []


def test_a_function_after_a_form_feed_is_found_where_it_stands():
    source = 'x = 1\n\f\ndef f():\n    """Return the number one."""\n    return 1\n'
    assert list(documented_functions(Document(source, "a.py"))) == [(3, "def f():\n    return 1", "Return the number one.")]


# -------------------------------------------------------------------------------- the library


def test_the_library_gives_thousands_of_short_functions(rows):
    assert len(rows) > 2000
    assert len({row.fields["prompt"] for row in rows}) == len(rows)
    for row in rows:
        prompt, completion = row.fields["prompt"], row.fields["completion"]
        assert 2 <= prompt.count("\n") + 1 <= LONGEST_SOURCE_LINES
        assert completion.count("\n") < LONGEST_DOCSTRING_LINES
        assert prompt == prompt.strip("\n")
        assert completion == completion.strip()


def test_every_prompt_is_one_function_without_a_docstring(rows):
    for row in rows[::20]:
        (function,) = ast.parse(row.fields["prompt"]).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is None


def test_the_set_is_sorted_made_once_and_then_read_from_the_cache(rows, cache, monkeypatch):
    monkeypatch.setattr(docstrings, "_build", None)
    assert list(docstring_rows(cache)) == rows
    assert [row.origin.partition(":")[0] for row in rows] == sorted(row.origin.partition(":")[0] for row in rows)
    (folder,) = (cache / "corpora").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "rows.jsonl"]
    assert json.loads((folder / "meta.json").read_text())["rows"] == len(rows)


def test_a_damaged_copy_is_made_again(tmp_path, monkeypatch):
    library = tmp_path / "library"
    library.mkdir()
    (library / "a.py").write_text('def f():\n    """Return the number one."""\n    return 1\n')
    monkeypatch.setattr(docstrings.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    first = list(docstring_rows(tmp_path))
    (folder,) = (tmp_path / "corpora").iterdir()
    (folder / "rows.jsonl").write_text("cut")
    assert list(docstring_rows(tmp_path)) == first
    assert first[0].origin == "docstrings a.py:1"


def test_the_set_is_a_source_whose_format_is_found(rows, cache):
    found = list(read_rows("docstrings", cache=cache, most=3))
    assert found == rows[:3]
    assert find_schema(found, name=None, columns={}, task="causal")[0].name == "prompt_completion"
