"""Rules on a project as one program: names that do not exist, arguments that are missing, data that nothing reads or saves."""

import ast
import re
import sys
import warnings
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from powertrain.audit.origins import is_led_to_by
from powertrain.audit.project import HIGHEST
from powertrain.audit.rules.base import OF_DATABRICKS, Findings, code_rule, code_rule_once, found, known, rule
from powertrain.audit.rules.calls import only_if, passed
from powertrain.audit.rules.names import since
from powertrain.audit.scopes import (
    bound_names,
    is_annotation,
    is_open,
    is_tried,
    names_of,
    only_added_to,
    own_tree,
    run_nodes,
)
from powertrain.audit.script import Script
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, argument, every, hides_arguments, is_constant, last_name, owner_of, targets_of
from powertrain.records.findings import Evidence, Place

MAKING_NAMES = (*(f"run_line_magic('{name}" for name in ("run'", "load", "store'")), "pylab", OF_DATABRICKS)      # of notebooks
# first parts of imports that a project uses for its own modules
OWN_NAMES = frozenset({"utils", "util", "src", "data", "models", "model", "config", "configs", "common", "helpers", "lib",
                       "core", "dataset", "modules", "scripts", "arguments", "constants", "prompts"})
SEARCHED = ("sys.path", "addsitedir", "PYTHONPATH", "chdir")         # in a project that has modules elsewhere
GONE_ARGUMENTS = {name: (said.partition(": ")[0].split(), said.partition(": ")[2])
                  for name, said in known("gone_call_arguments").items()}
OTHER_LOADERS = ("Tokenizer.from_pretrained", "Config.from_pretrained", "Processor.from_pretrained")      # which pass over it
SAVING = (".save_model", ".save_pretrained", ".push_to_hub", ".save_state", "torch.save", ".save_lora", ".save",
          ".merge_and_unload", ".save_file", ".save_checkpoint", ".export")
HELD_OUT, PARTS = ("val", "eval", "test"), ("model", "tokenizer")
PROCESSES = ("world_size", "num_processes", "n_gpu", "num_gpus", "ranks")    # in names of the number of processes
OF_PYTHON_3_12 = re.compile(r"\b[rR]?[fF][\"']|^\s*type \w+|^\s*(async def|def|class) \w+\[")       # and of later releases
FOLDERS = ("model", "models", "checkpoint", "checkpoints", "ckpt", "output", "outputs", "results", "saved", "weights")
NATIVE = tuple(known("native"))


@code_rule_once
def refused_by_python(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Python refuses the file."""
    texts = [(script.own_text, str(script.path)), *((module.text, str(module.path)) for module in script.modules)]
    for text, path in texts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")          # of the script's own escapes
                compile(text.removeprefix("\ufeff"), path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            words = next(iter(text.split("\n")[line - 1:]), "").strip()
            newer = str(error).startswith("f-string") or OF_PYTHON_3_12.search(words)
            if not newer or sys.version_info >= (3, 12) or isinstance(error, IndentationError):
                yield found("critical", Evidence(words, Place(path, line)), said=getattr(error, "msg", str(error)))


@code_rule
def undefined_names(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The code uses a name that nothing gives a value."""
    for tree in (own_tree(script), *(module.tree for module in script.modules)):
        bound = names_of(script, tree)
        if any(magic in script.text for magic in MAKING_NAMES):
            continue
        inside = set(ast.walk(tree))
        reached = script.nodes if tree is own_tree(script) else run_nodes(script)
        added, guards = set(only_added_to(tree)), re.compile(r"version|PY2|is_\w+_available")
        lost = [node for node in reached if isinstance(node, ast.Name)
                and (node in added or (bound is not None and node.id not in bound)) and node in inside
                and not is_tried(script, node) and not is_annotation(script, node) and node.id not in script.unparsed
                and not any(guards.search(script.words(test.test)) for test in script.conditions(node))]
        if lost:
            yield found("critical", *{node.id: node for node in reversed(lost)}.values(), names=", ".join(dict.fromkeys(
                node.id for node in lost)))


@code_rule
def names_not_in_module(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """An import names something that the project's module does not have."""
    trees = {module.file: module.tree for module in script.modules}
    bound = {tree: bound_names(tree) for tree in trees.values() if not is_open(tree)}
    for node in every(ast.ImportFrom, script.tree):
        if is_tried(script, node):
            continue
        tree = trees.get(script.project.get((node, ""), script.path))
        names = bound.get(tree) if tree is not None else None
        if names is None or "__getattr__" in names:
            continue
        missing = [item.name for item in node.names if item.name != "*" and item.name not in names
                   and (node, item.name) not in script.project and item.name not in script.unparsed]
        if missing and script.is_reached(node):
            like = next((name for name in sorted(names) if missing[0] in name or name in missing[0]), None)
            yield found("critical", node, names=", ".join(missing), module=node.module, like=like)


@code_rule
def modules_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A module of the project is imported, and is not there."""
    root = script.root
    if root is None:
        return
    own, searched = script.path.resolve(), any(word in script.text for word in SEARCHED)
    # of a package that other imports have found, all is there or nowhere
    tried = {top for (node, _), file in script.project.items() if is_tried(script, node) for top in file.parents}
    whole = {top.name: top for file in script.project.values() for top in {*file.parents} - tried
             if top.is_relative_to(root) and (top / "__init__.py").exists() and not (top.parent / "__init__.py").exists()}
    packages = [file.parent for name in ("setup.py", "pyproject.toml") for file in (*root.glob(name), *root.glob(f"*/{name}"))]
    # a script may be started from any folder above it, and packages of the project may be installed
    above = [*own.parents[:HIGHEST], root / "src", *packages, *(folder / "src" for folder in packages)]
    lost: dict[str, ast.AST] = {}
    for node in script.nodes:
        asked = [(item.name, 0) for item in node.names] if isinstance(node, ast.Import) else [
            (node.module or "", node.level)] if isinstance(node, ast.ImportFrom) else []
        for name, level in asked:
            first, module = name.partition(".")[0], script.module(node)
            here = (module.file if module is not None else own).parent
            bases = [here, *above] if not level else [Path(here, *[".."] * (level - 1)).resolve()]
            known = level or first in OWN_NAMES or any((base / first).is_dir() for base in bases)
            elsewhere = not level and (first in sys.stdlib_module_names or is_installed(first))
            if not name or not known or elsewhere or is_tried(script, node) or (searched and (level or first not in whole)):
                continue
            bases = [whole[first].parent] if searched else bases
            if not any(_is_there(base, name.split(".")) for base in bases):
                lost["." * level + name] = node
    if lost:
        yield found("critical", *lost.values(), names=", ".join(lost))


def is_installed(name: str) -> bool:
    """Return whether a package of this name is installed here, and may be there."""
    with suppress(ImportError, ValueError):
        spec = find_spec(name)
        places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec is not None else []
        return any("-packages" in place for place in places)             # not a folder that this process was started in
    return False


def _is_there(base: Path, parts: list[str]) -> bool:
    """Return whether a dotted name may be a module below a folder: a file, compiled or not, or a folder."""
    path = base.joinpath(*parts)
    return path.is_dir() or any(path.parent.glob(f"{parts[-1]}.*"))


@code_rule
def missing_arguments(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A call of the project's own function lacks an argument that the function has to have."""
    defined = Counter(node.name for node in ast.walk(script.tree) if isinstance(node, FunctionNode | ast.ClassDef))
    for call in script.every(ast.Call):
        function = script.called(call)
        if function is None or function.decorator_list or defined[function.name] > 1 or hides_arguments(call):
            continue
        owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if owner != "self" and not set(script.classes) >= script.kinds.get(owner, set()):
            continue                         # elsewhere the name holds what a library has made
        spec = function.args
        names = [item.arg for item in (*spec.posonlyargs, *spec.args)]
        method = isinstance(script.parents.get(function), ast.ClassDef)
        if method != isinstance(call.func, ast.Attribute) or (method and names[:1] != ["self"]):
            continue
        names = names[1:] if method else names
        required = names[:len(names) - len(spec.defaults)]
        required += [item.arg for item, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is None]
        given = {*names[:len(call.args)], *(item.arg for item in call.keywords)}
        lacks = [name for name in required if name not in given]
        if lacks:
            yield found("critical", call, names=", ".join(lacks), function=function.name)


@code_rule
def removed_call_arguments(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A call has an argument that the libraries no longer take."""
    gone = [(item, name) for call in script.every(ast.Call) for item, name in passed(script, call)
            if name in GONE_ARGUMENTS and last_name(call.func) in GONE_ARGUMENTS[name][0]
            and "unsloth" not in script.name(call).lower() and not _is_said_of_weights(subject, item)
            and not script.name(call).endswith(OTHER_LOADERS) and not (isinstance(item, ast.Constant) and any(
                re.search("version.*<", script.words(around.test)) for around in script.conditions(item)))
            and (last_name(call.func) != "create_model_card" or subject.trainer.startswith("trl."))]
    own = {item.arg for item in every(ast.arg, script.tree)}
    theirs = any(name.startswith("transformers.") for name in script.all_imported)
    for case in ("", "model"):
        mine = {item: name for item, name in gone if (GONE_ARGUMENTS[name][0] == ["model"]) == bool(case)
                and (not case or (theirs and name not in own))}
        says = ", ".join(dict.fromkeys(f"{name} (now {GONE_ARGUMENTS[name][1]})" for name in mine.values()))
        yield from [found(since(where), *mine, names=says, case=case, only=only_if(script, [*mine]))] if mine else []


def _is_said_of_weights(subject: Subject, item: object) -> bool:
    """Return whether quantised_without_adapters says of this argument that the run ends."""
    adapts = subject.has_adapters or subject.framework not in TRAINERS or (
        subject.script is not None and subject.script.says("get_peft_model"))
    return isinstance(item, ast.keyword) and str(item.arg).startswith("load_in_") and getattr(
        item.value, "value", None) is True and not adapts


@code_rule
def loss_of_an_older_trainer(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A Trainer's own compute_loss does not take the number of items in the batch, which transformers passes."""
    for node in script.every(ast.FunctionDef):
        owner = script.parents.get(node)
        if node.name == "compute_loss" and isinstance(owner, ast.ClassDef) and any(
                script.name(base).endswith("Trainer") for base in owner.bases):
            names = {item.arg for item in (*node.args.args, *node.args.kwonlyargs)}
            if node.args.kwarg is None and node.args.vararg is None and "num_items_in_batch" not in names:
                yield found(since(where), script.evidence(node.args))


@code_rule
def adapters_twice(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The trainer is told to add adapters to a model that has them already."""
    trainer = script.sections.get("trainer")
    if trainer is None or not script.name(trainer).startswith("trl."):
        return
    model, config = argument(trainer, "model", 0), argument(trainer, "peft_config")
    if model is None or config is None or is_constant(config, None):
        return
    given = [value for value in script.assigned(config) if not is_constant(value, None)]
    for value in script.assigned(model):
        if isinstance(value, ast.Call) and last_name(value.func) == "get_peft_model":
            around = script.conditions(value)
            if not around or (given and all(script.conditions(each)[:1] == around[:1] for each in given)):
                yield found("critical", config, value, only=f"{script.words(around[0].test)} holds" if around else "")


@code_rule
def evaluation_on_training_data(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The evaluation reads the data that is trained."""
    trainer = script.sections.get("trainer")
    train, held = (argument(trainer, name) if trainer is not None else None for name in ("train_dataset", "eval_dataset"))
    if train is not None and held is not None and script.words(train) == script.words(held):
        yield found("moderate", held, train)
        return
    said = {target.id: node for node in script.every(ast.Assign) for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Subscript)}
    for name, node in said.items():
        other = said.get(name.replace("eval", "train").replace("val", "train").replace("test", "train"))
        same = other is not None and other is not node and ast.unparse(other.value) == ast.unparse(node.value)
        if same and name.startswith(HELD_OUT):
            yield found("moderate", node, other)


@code_rule
def evaluation_unused(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The trainer is given evaluation data and never evaluates."""
    trainer, key = script.sections.get("trainer"), "training.eval_strategy"
    if trainer is None or subject.framework not in TRAINERS or "training" not in script.sections:
        return
    held, opened = argument(trainer, "eval_dataset", 4), any(item.arg is None for item in script.sections["training"].keywords)
    empty = held is None or isinstance(held, ast.IfExp) or is_constant(held, None)
    if not empty and not opened and subject.value(key) is None and not subject.is_unread(key) and not script.has_call(
            ".evaluate", ".predict") and not script.says("evaluation_strategy", "do_eval", "eval_strategy"):
        yield found("moderate", held, key)


@code_rule
def adapter_never_saved(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The trained adapters are left in the folder of the last checkpoint."""
    strategy = subject.value("training.save_strategy")
    if "trainer" not in script.sections or not (subject.has_adapters or strategy == "no") or subject.on("training.push_to_hub"):
        return
    saves = any(not is_led_to_by(script, call, script.unused) for call in script.calls(*SAVING))
    last = next((call for call in script.every(ast.Call) if last_name(call.func) == "train"
                 and isinstance(script.parents[call], ast.Expr | ast.Assign)), None)
    if last is not None and not saves and strategy in (None, "no") and subject.value("training.save_steps") is None:
        yield found("critical" if strategy == "no" else "low", last, case="lost" if strategy == "no" else "")


@code_rule_once
def loaded_but_never_saved(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A model is loaded from the folder of the run's checkpoints, where nothing has saved one."""
    made = script.sections.get("training")
    folder = subject.value("training.output_dir")
    saves = any(word in last_name(call.func) for call in script.every(ast.Call) for word in ("save", "push", "copy", "move"))
    if made is None or subject.framework not in TRAINERS or not isinstance(folder, str) or saves or subject.on(
            "training.push_to_hub") or (script.path.parent / folder / "config.json").exists():
        return
    for loaded in subject.calls:
        path, call = loaded.get("model") or loaded.argument(0, "pretrained_model_name_or_path"), loaded.node
        here = isinstance(path, str) and "checkpoint" not in path and Path(folder) in (Path(path), *Path(path).parents)
        if here and isinstance(call, ast.Call) and loaded.last in ("from_pretrained", "pipeline") and (
                "okenizer" not in loaded.name) and call.lineno > made.lineno and not script.conditions(call) and argument(
                call, "subfolder") is None and not is_tried(script, call) and not (script.path.parent / str(path)).exists():
            yield found("critical", call, made, folder=path)


@code_rule
def base_saved(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The base model is saved in place of its trained adapters."""
    wrapped = {last_name(call.args[0]): call for call in script.calls("peft.get_peft_model") if call.args}
    for call in script.calls(".save_pretrained"):
        owner = owner_of(call)
        wrapping = wrapped.get(owner.id) if isinstance(owner, ast.Name) else None
        if not isinstance(owner, ast.Name) or wrapping is None or call.lineno <= wrapping.lineno:
            continue
        if not any(isinstance(value, ast.Call) and last_name(value.func) in ("get_peft_model", "merge_and_unload", "unload")
                   for value in script.assigned(owner)):
            yield found("critical", call, wrapping, name=owner.id)


@code_rule
def loss_by_other_count(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A loss is averaged over the batches of the other data."""
    for node in script.every(ast.BinOp):
        count = node.right
        if not isinstance(node.op, ast.Div) or not isinstance(count, ast.Call) or last_name(count.func) != "len" \
                or not count.args:
            continue
        total, batches = last_name(node.left).lower(), script.words(count.args[0]).lower()
        held_by_train = total.startswith(HELD_OUT) and "train" in batches and not any(word in batches for word in HELD_OUT)
        train_by_held = "train" in total and any(word in batches for word in HELD_OUT) and "train" not in batches
        if held_by_train or train_by_held:
            yield found("moderate", node)


@rule
def remote_code_unpinned(subject: Subject, where: Circumstances) -> Findings:
    """The model's own Python code runs, of whatever commit is the newest."""
    pinned = any(len(str(subject.value(f"{part}.revision") or "")) == 40 for part in PARTS)
    keys = [f"{part}.trust_remote_code" for part in PARTS if subject.value(f"{part}.trust_remote_code") is True
            and not _is_local(subject.value(f"{part}.path"))]
    asking = [call for call in subject.script.calls(".from_pretrained") if argument(call, "trust_remote_code") is not None] \
        if subject.script is not None else []
    # a class of the library itself, by its name, takes no other code
    named = bool(asking) and all(last_name(owner_of(call) or call)[:4] not in ("Auto", "Fast") for call in asking)
    revision = any(subject.is_unread(f"{part}.revision") for part in PARTS)
    native = str(path := subject.value("model.path") or "").startswith(NATIVE)
    if keys and not pinned and not revision and not named:       # of a model that is not known, most have no code of their own
        yield found("low" if native or not path else "moderate", *keys, case="native" if native else "")


def _is_local(path: object) -> bool:
    """Return whether a path is of a folder, not of the hub."""
    return isinstance(path, str) and (path.startswith((".", "/", "~")) or path.count("/") != 1
                                      or path.partition("/")[0] in FOLDERS)


@rule
def warmup_without_effect(subject: Subject, where: Circumstances) -> Findings:
    """A warm-up is set, and the schedule has none."""
    key = next((key for key in ("training.warmup_steps", "training.warmup_ratio") if subject.on(key)), None)
    if subject.framework in TRAINERS and key is not None and subject.value("training.lr_scheduler_type") == "constant":
        yield found("moderate", "training.lr_scheduler_type", key)


def _factors(node: ast.expr) -> list[ast.expr]:
    """Return the factors of a product: a, b and c of `a * b * c`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    return [node]


@code_rule
def accumulation_to_nothing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The accumulation is divided by the number of processes, and becomes 0 where there are more of them."""
    guarded = any(isinstance(node, ast.Assert) and "%" in script.words(node) and any(
        word in script.words(node).lower() for word in ("accum", "batch", *PROCESSES)) for node in script.nodes)
    for node in script.nodes if not guarded else ():
        if not isinstance(node, ast.Assign | ast.AugAssign) or not any(
                "accum" in last_name(target).lower() for target in targets_of(node)):
            continue
        value, operator = node.value, getattr(node, "op", None)
        by = value.right if isinstance(value, ast.BinOp) and isinstance(value.op, ast.FloorDiv) else \
            value if isinstance(operator, ast.FloorDiv) else None            # x = all // by, or x //= by
        if by is not None and any(word in last_name(part).lower() for part in _factors(by) for word in PROCESSES):
            yield found("moderate", node, by=script.words(by))
