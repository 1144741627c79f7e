"""The design, checked: who may import whom, how long a file may grow, and what no file may contain."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "powertrain"
MAY_IMPORT: dict[str, set[str]] = {  # room -> rooms it may import, besides itself
    "__init__": {"api", "records"}, "api": {"records", "recipe", "run", "use"},
    "records": set(), "machine": set(), "shapes": set(), "recipe": {"records"},
    "cost": {"records", "shapes"},
    "models": {"records", "machine", "shapes"},
    "data": {"records", "machine", "shapes", "recipe"},
    "facts": {"records", "machine", "shapes", "recipe", "data", "models"},
    "training": {"records", "recipe", "data", "models", "shapes"},
    "techniques": {"records", "shapes", "recipe", "cost", "data", "models", "training"},
    "planner": {"records", "recipe", "cost", "techniques"},
    "export": {"records", "data", "models"},
    "report": {"records"},
    "mirror": {"records"}, "tracking": {"records"},
    "run": {"machine", "mirror", "records", "shapes", "recipe", "facts", "cost", "planner", "training", "data",
            "models"},
    "launch": {"records", "training"},
    "use": {"records", "recipe", "facts", "planner", "training", "run", "data", "models"},
    "serving": {"records", "data", "use"},
    "evidence": {"records", "recipe", "facts", "cost", "planner", "training", "run", "data", "models"},
    "claims": {"records", "shapes", "recipe", "facts", "cost", "planner", "training", "run", "use", "evidence", "data",
               "models"},
    "diagnosis": {"records", "machine", "recipe", "facts", "cost", "planner", "training", "run", "use", "evidence", "data"},
    "audit": {"records", "shapes", "machine", "recipe", "facts", "cost", "planner", "run", "evidence", "data"},
    "cli": {"records", "recipe", "facts", "planner", "training", "data", "models", "report", "run", "use",
            "serving", "export", "evidence", "claims", "cost", "diagnosis", "audit", "launch", "mirror", "tracking", "web"},
    "web": {"machine", "records", "recipe", "report", "run"},
    "__main__": {"cli"},
}
LONGEST_FILE, LONGEST_FUNCTION, MOST_LINES = 400, 60, 78_400
FORBIDDEN = re.compile(r"torch\.load|pickle\.|yaml\.load\((?!text, _?Yaml)|(?<!\.)\beval\(|\bexec\(|shell=True|os\.system"
                       r"|trust_remote_code=True")


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def code(path: Path) -> str:
    """A file's code without its texts and comments: the audit's rules name what they look for in other people's scripts."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.unparse(tree)


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(("powertrain", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path) for path in files()}


def imports(path: Path) -> set[str]:
    """Return the modules of this package that a file imports anywhere: within functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("powertrain"):
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                found.add(whole if whole in MODULES else node.module or "")
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("powertrain")}
    return found


def test_every_room_is_in_the_map() -> None:
    assert {room(path) for path in files()} <= set(MAY_IMPORT)


def test_imports_point_one_way() -> None:
    wrong = [f"{path.relative_to(ROOT)} imports {module}" for path in files() for module in imports(path)
             if (module.split(".")[1:] or ["__init__"])[0] not in MAY_IMPORT[room(path)] | {room(path)}]
    assert not wrong


def test_no_files_import_each_other_in_a_circle() -> None:
    arrows = {module_of(path): imports(path) & MODULES - {module_of(path)} for path in files()}
    TopologicalSorter(arrows).prepare()      # raises CycleError, which names the files


def test_the_source_stays_within_its_budget() -> None:
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files()) <= MOST_LINES


def test_techniques_do_not_know_each_other() -> None:
    wrong = [f"{path.name} imports {module}" for path in (ROOT / "techniques").glob("*.py") if path.stem != "__init__"
             for module in imports(path)
             if module.startswith("powertrain.techniques") and module != "powertrain.techniques.base"]
    assert not wrong


def test_training_names_no_technique() -> None:
    names = [path.stem for path in (ROOT / "techniques").glob("*.py") if path.stem not in ("__init__", "base")]
    wrong = [f"{path.name}: {name}" for path in (ROOT / "training").glob("*.py") for name in names
             if re.search(rf"techniques\.{name}|\b{name}\.py", path.read_text(encoding="utf-8"))]
    assert not wrong


def test_files_and_functions_stay_short() -> None:
    long = [f"{path.relative_to(ROOT)}: {lines}" for path in files()
            if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE]
    long += [f"{path.relative_to(ROOT)}:{node.name}" for path in files()
             for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > LONGEST_FUNCTION]
    assert not long


def test_every_module_says_what_it_is() -> None:
    assert not [path for path in files() if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]


def test_nothing_can_run_code_from_a_file() -> None:
    wrong = [f"{path.relative_to(ROOT)}: {found.group()}" for path in files()
             if (found := FORBIDDEN.search(code(path)))]
    assert not wrong


def test_no_generator_yields_within_a_mode_of_torch() -> None:
    """A mode entered in a generator stays on in its caller between two items, and for good if it is never finished."""
    wrong = [f"{path.relative_to(ROOT)}:{node.lineno}" for path in files()
             for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             if isinstance(node, ast.With) and "torch." in ast.unparse(node.items[0].context_expr)
             and any(isinstance(child, (ast.Yield, ast.YieldFrom)) for child in ast.walk(node))]
    assert not wrong


def test_environment_variables_are_read_in_cli_and_launch_only() -> None:
    """A launcher tells each process its place. machine.py looks at the limits of threads and devices."""
    wrong = [path.relative_to(ROOT) for path in files()
             if "os.environ" in code(path) and room(path) not in ("cli", "launch", "machine")]
    assert not wrong


@pytest.mark.parametrize("room_without_torch", [
    "powertrain.records", "powertrain.api", "powertrain.tracking.process",
    "powertrain.machine", "powertrain.report.plan", "powertrain.report.result",
    "powertrain.cost.estimate", "powertrain.recipe", "powertrain.cli", "powertrain.mirror.process", "powertrain.web.app"])
def test_rooms_that_need_no_torch_load_none(room_without_torch: str) -> None:
    code = f"import sys, {room_without_torch}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
