"""Rules on several processes and devices, and on the checkpoints that they write."""

import ast
import re
from collections.abc import Collection
from pathlib import Path

from powertrain.audit.commands import project_files, text_of
from powertrain.audit.edits import set_to, with_argument, with_import, with_text
from powertrain.audit.origins import origins
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found, rule
from powertrain.audit.rules.names import UNSLOTH
from powertrain.audit.scopes import bound_names, is_tried
from powertrain.audit.script import Script
from powertrain.audit.steps import outermost, training_steps
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import (
    FunctionNode,
    argument,
    every,
    hides_arguments,
    is_constant,
    is_true,
    last_name,
    names_in,
    owner_of,
    parameters_of,
)
from powertrain.records.findings import Severity

SPLITTING = ("auto", "balanced", "balanced_low_0", "sequential")
PARALLEL = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
HELD_BACK = (".no_sync", ".accumulate", ".set_requires_gradient_sync")
UNUSED = "training.ddp_find_unused_parameters"
FIRST_GPU = ("cuda:0", 0, "cuda", {"": 0}, {"": "cuda:0"})
WITH_SEVERAL = "started with torchrun on several GPUs"
RANKED = ("rank", "main_process", "master", "process_index", "is_world_process_zero")
WHOLE = (".save_state", ".save_checkpoint", "save_checkpoint", "torch.distributed.checkpoint.save")      # everything, or more
PARTS = {"the schedule": ("sched",), "the scaler": ("scaler",), "the place in the run": ("epoch", "step", "iter")}
SAVES = ("torch.save", "safetensors.torch.save_file")
LIMIT = "training.save_total_limit"
OF_NUMPY = ("mean", "average", "median", "exp", "sum", "std", "sqrt", "min", "max", "float32", "float64", "array", "get_state",
            "nanmean", "log", "round", "percentile")
SAFE_SINCE = (2, 6)          # torch: weights_only became the default


@code_rule
def data_parallel(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """DataParallel copies the model to every GPU at every step."""
    call, alone = next(script.calls("torch.nn.DataParallel"), None), where.has_one_device
    if call is not None:
        yield found("low" if alone else "moderate", call, alone=alone)


@rule
def device_map_auto(subject: Subject, where: Circumstances) -> Findings:
    """device_map splits the model over all GPUs, of which one works at a time."""
    setting, script = subject.settings.get("model.device_map"), subject.script
    trains = any(key.startswith("training.") for key in (*subject.settings, *subject.unread)) or (
        script is not None and (script.training_loops or script.has_call(".train")))
    if setting is None or setting.value not in SPLITTING or not trains:
        return
    several = script is not None and script.has_call("torch.distributed.init_process_group", *PARALLEL)
    severity: Severity = "low" if where.has_one_device else "critical" if several else "moderate" if where.devices else "low"
    call = script.sections.get("model") if script is not None else None
    given = argument(call, "device_map") if call is not None else None
    edits = ((*with_text(script, given, '{"": int(os.environ.get("LOCAL_RANK", "0"))}'), *with_import(script, "os"))
             if script is not None and isinstance(given, ast.Constant) else ())
    yield found(severity, setting, edits=edits, asked=setting.value, several=several, one=where.has_one_device,
                devices=where.devices if not where.has_one_device else None)


@code_rule
def device_map_in_processes(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The model is loaded over all GPUs, or on the first one, by every process."""
    setting = subject.settings.get("model.device_map")
    if setting is None or where.devices or script.says(*UNSLOTH):        # which gives each process its own GPU
        return                                           # of a machine that is known, device_map_auto says it
    if not {"training", "trainer"} & set(script.sections) and not (script.training_loops and script.has_call(
            "accelerate.Accelerator")):
        return
    if script.launch is not None and "WORLD_SIZE" not in script.launch:
        return                                           # the same code is looked at as torchrun starts it
    of_process = script.says("local_rank", "LOCAL_RANK", "process_index", "PartialState") or (
        setting.value == "cuda" and script.says("HfArgumentParser", "TrlParser"))        # which gives a process its own GPU
    first, trainer = setting.value in FIRST_GPU and not of_process, script.sections.get("trainer")
    later = trainer is not None and setting.place.file == str(script.path) and setting.place.line > trainer.lineno
    if (setting.value in SPLITTING or first) and not later:          # later: a model that is tried out after the training
        yield found("critical", setting, case="first" if first else "", only=WITH_SEVERAL)


@code_rule
def micro_batches_synchronised(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Processes exchange gradients at every micro-batch of an accumulation."""
    if script.has_call(*HELD_BACK) or script.says("require_backward_grad_sync", "accumulate(", "no_sync"):
        return
    wrapped = next(script.calls(*PARALLEL), None) or (
        next(script.calls(".prepare"), None) if subject.framework == "accelerate" else None)
    step = next((step for step in training_steps(script) if step.accumulation is not None), None)
    accumulation = step.accumulation if step is not None else None
    if subject.value("training.gradient_accumulation_steps") == 1 or wrapped is None or step is None or accumulation is None:
        return
    if step.backward and 1 not in _defaults(script, accumulation.every):
        yield found("low" if where.has_one_device else "moderate", wrapped, step.backward[0].node,
                    every=script.words(accumulation.every))


def _defaults(script: Script, node: ast.AST) -> list[object]:
    """Return the defaults of the command line's options that a value comes from: 1 of `--accumulation` with `default=1`."""
    names = {inner.attr for inner in script.behind(node) if isinstance(inner, ast.Attribute)}
    calls = [call for call in script.calls(".add_argument") if any(
        isinstance(item, ast.Constant) and str(item.value).lstrip("-").replace("-", "_") in names for item in call.args)]
    return [given.value for call in calls if isinstance(given := argument(call, "default"), ast.Constant)]


@rule
def unused_parameters_searched(subject: Subject, where: Circumstances) -> Findings:
    """DDP searches for unused parameters in every step."""
    if subject.value(UNUSED) is True:
        alone = where.has_one_device
        yield found("low" if alone else "moderate", UNUSED, edits=set_to(subject, UNUSED, False), alone=alone)


def _leading_to(script: Script, call: ast.Call) -> list[ast.Call]:
    """Return a call, the calls of the function around it, and theirs."""
    found = [call]
    for each in found:
        if (function := script.function(each)) is not None:
            found += [caller for caller in script.callers(function) if caller not in found]
    return found


@code_rule_once
def saved_by_every_process(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Every process writes the same checkpoint."""
    if not script.has_call("torch.distributed.init_process_group"):
        return
    for call in script.calls(*SAVES):
        function = script.function(call)
        leading = _leading_to(script, call)
        tests = [condition.test for node in leading for condition in script.conditions(node)]
        tests += [value for test in tests for value in script.behind(test) if isinstance(value, ast.IfExp)]
        text = " ".join(script.words(node) for node in [call, *tests]).lower()
        if function is not None and every(ast.Return, function):
            text += script.words(function).lower()       # `if rank != 0: return` counts too
        hidden = any((isinstance(script.parents.get(each), ast.ClassDef) or script.module(each) is not None)
                     and not script.callers(each) for node in leading if (each := script.function(node)) is not None)
        if not hidden and not any(word in text for word in RANKED):
            yield found("moderate", call)


@code_rule_once
def checkpoint_cannot_resume(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Checkpoints lack the optimizer, the schedule or the place in the run."""
    if not script.training_loops or script.has_call(*WHOLE):
        return
    saves = [node for loop in script.training_loops for node in script.reached(*outermost(script, loop).body)
             if isinstance(node, ast.Call) and (script.name(node.func) in SAVES or (
                 isinstance(node.func, ast.Attribute) and node.func.attr == "save_pretrained"
                 and not any(word in script.words(node.func.value).lower() for word in ("tok", "processor", "config"))))]
    given = [call.args[0] if call.args else call for call in saves]
    given += [end for first in given for name in every(ast.Name, first) for end in origins(script, name)]
    given += [value.args[0] for first in given for value in script.assigned(first)
              if isinstance(value, ast.Call) and last_name(value.func) in ("asdict", "vars", "dict") and value.args]
    saved = " ".join(script.words(node) for first in given for node in (first, *script.assigned(first))).lower()
    if saves and "optim" not in saved:
        yield found("moderate", *saves[:3], case="weights")
    used = " ".join(name.lower() for name in script.kinds)
    missing = [what for what, words in PARTS.items() if not any(word in saved for word in words)
               and (what == "the place in the run" or any(word in used for word in words))]
    if saves and missing:
        yield found("low", *saves[:2], missing=", ".join(missing))


@code_rule_once
def compiled_names_saved(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Weights are saved under the names of the compiled model."""
    for call in script.calls(".state_dict") if "_orig_mod" not in script.text else ():
        owner = owner_of(call)
        if owner is not None and script.is_made_by(owner, "torch.compile"):
            kinds = script.kinds.get(last_name(owner), frozenset()) & set(script.classes)
            file = _loaded_plain(script, kinds) if script.has_call("torch.save") and _is_compiled(script) else None
            yield found("critical" if file else "low", call, file=file and file.name, kind=", ".join(sorted(kinds)))


def _is_compiled(script: Script) -> bool:
    """Return whether the run compiles, where no option asks it to."""
    return not any(script.unused & {*script.ancestors(call)} or any(
        "compile" in script.words(test.test) for test in script.conditions(call)) for call in script.calls("torch.compile"))


def _loaded_plain(script: Script, kinds: Collection[str]) -> Path | None:
    """Return another file of the project that loads weights into the same class, without compiling it or renaming them."""
    texts = {file: text_of(file) for file in project_files(script) if file.suffix == ".py" and file != script.path.resolve()}
    plain = (file for file, text in texts.items() if ".load_state_dict(" in text and "torch.load(" in text and not any(
        word in text for word in ("strict=False", "compile", "backward(")) and any(
        re.search(rf"\b{kind}\(", text) for kind in kinds))
    return None if any("_orig_mod" in text for text in texts.values()) else next(plain, None)


@rule
def one_checkpoint_kept(subject: Subject, where: Circumstances) -> Findings:
    """Only the newest checkpoint is kept."""
    if subject.value(LIMIT) == 1 and not subject.on("training.save_only_model"):
        yield found("low", LIMIT, edits=set_to(subject, LIMIT, 2), best=subject.on("training.load_best_model_at_end"))


@code_rule_once
def pickle_loaded(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """torch.load opens a file in a way that runs the code in it."""
    for call in script.calls("torch.load"):
        given, is_safe = argument(call, "weights_only"), (where.version("torch") or (0,)) >= SAFE_SINCE
        asked = is_constant(given, False)
        if asked or (given is None and not is_safe):
            edits = with_argument(script, call, "weights_only", "True")
            yield found("moderate" if asked else "low", call, old=not asked, edits=edits)


@code_rule_once
def own_objects_refused(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """torch.load takes tensors and plain values only, and the project saves an object of its own in the file."""
    loads = [call for call in script.calls("torch.load")
             if is_true(argument(call, "weights_only")) and not hides_arguments(call)]
    replaced = any(script.name(target) == "torch.load" for node in script.every(ast.Assign) for target in node.targets)
    if replaced or (where.version("torch") or SAFE_SINCE) < SAFE_SINCE or script.says("safe_globals", "NO_WEIGHTS_ONLY"):
        return
    for save in script.calls("torch.save"):
        saved = argument(save, "obj", 0)
        if saved is not None and _is_refused_whole(script, saved):
            load = next((call for call in loads if _is_same_file(script, save, call) and not is_tried(script, call)), None)
            if load is not None:
                yield found("critical", load, save, file=script.words(argument(save, "f", 1) or save),
                            object=script.words(saved))
        for table in [*origins(script, saved), *script.assigned(saved)] if saved is not None else []:
            if not isinstance(table, ast.Dict):
                continue
            load = next((call for call in loads if reads(script, call, table)), None)
            refused = [value for value in table.values if ((made := script.assigned(value)) and all(
                isinstance(one, ast.Call) and is_own_object(script, one) for one in made))
                or (load is not None and _is_of_numpy(script, value))]
            if load is not None and refused:
                yield found("critical", load, refused[0], file=script.words(argument(save, "f", 1) or save),
                            object=script.words(refused[0]))


def _is_same_file(script: Script, save: ast.Call, load: ast.Call) -> bool:
    """Return whether two calls name the same file, by no name that each of two functions gives a value of its own."""
    files = [argument(save, "f", 1), argument(load, "f", 0)]
    around = [script.function(call) for call in (save, load)]
    own = {name for function in around if function is not None for name in bound_names(function)}
    return len({script.words(file) for file in files if file is not None}) == 1 and (
        around[0] is around[1] or not any(names_in(file) & own for file in files if file is not None))


def _is_refused_whole(script: Script, saved: ast.expr) -> bool:
    """Return whether a name holds a model or another object of a class, or a list of such objects of the project."""
    made, function = script.assigned(saved) if isinstance(saved, ast.Name) else [], script.function(saved)
    made = [each for each in made if script.function(each) is function] or made
    made = [each for each in made if not (isinstance(each, ast.Call) and script.name(each) == "torch.load")]     # of a cache
    if function is not None and last_name(saved) in parameters_of(function):
        return False                                     # and may be anything
    return bool(made) and all(isinstance(call, ast.Call) and (
        last_name(call.func) == "from_pretrained" or last_name(call.func) in script.classes
        or _gives_own_objects(script, script.called(call))) for call in made)


def _gives_own_objects(script: Script, function: FunctionNode | None) -> bool:
    """Return whether a function gives back a list that it adds objects of the project to."""
    if function is None:
        return False
    names = {last_name(node.value) if node.value is not None else "" for node in every(ast.Return, function)}
    stored = [node.id for node in every(ast.Name, function) if isinstance(node.ctx, ast.Store) and node.id in names]
    return len(names) == len(stored) == 1 and any(
        isinstance(call.func, ast.Attribute) and call.func.attr == "append" and last_name(call.func.value) in names
        and call.args and isinstance(call.args[0], ast.Call) and is_own_object(script, call.args[0])
        for call in every(ast.Call, function))


def _is_of_numpy(script: Script, node: ast.expr) -> bool:
    """Return whether a value may be one of numpy's numbers, arrays or states, which torch.load refuses: np.mean(losses)."""
    for end in origins(script, node):
        if isinstance(end, ast.BinOp) and any(_is_of_numpy(script, each) for each in (end.left, end.right)):
            return True
        if isinstance(end, ast.Call) and script.name(end).startswith("numpy.") and last_name(end.func) in OF_NUMPY:
            return True
    return False


def reads(script: Script, load: ast.Call, table: ast.Dict) -> bool:
    """Return whether what is loaded is asked for a key that the table has."""
    keys = {key.value for key in table.keys if isinstance(key, ast.Constant)}
    around = script.parents.get(load)
    targets = {ast.unparse(target) for target in around.targets} if isinstance(around, ast.Assign) else set()
    return any(isinstance(node.slice, ast.Constant) and node.slice.value in keys and ast.unparse(node.value) in targets
               for node in script.every(ast.Subscript))


def is_own_object(script: Script, call: ast.Call) -> bool:
    """Return whether a call makes an object of a class of the project that is no module, or argparse's namespace."""
    kind = script.classes.get(last_name(call.func))
    of_torch = kind is not None and any(last_name(base) in ("Module", "NamedTuple", "dict", "Enum") for base in kind.bases)
    function = script.called(call)
    told = [call] if function is None else [node.value for node in every(ast.Return, function)]
    parsed = any(isinstance(one, ast.Call) and last_name(one.func) == "parse_args" for one in told)
    return (kind is not None and not of_torch) or parsed
