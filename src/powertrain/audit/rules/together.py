"""Rules on what several processes do together: their passes, their batches, when they begin and when they stop."""

import ast

from powertrain.audit.origins import is_led_to_by, origins
from powertrain.audit.rules.base import Findings, code_rule_once, found
from powertrain.audit.rules.launching import COLLECTIVE, FSDP, GROUPS, is_of_the_first
from powertrain.audit.rules.processes import PARALLEL, WITH_SEVERAL
from powertrain.audit.scopes import is_tried
from powertrain.audit.script import Script
from powertrain.audit.steps import is_without_gradients, training_steps
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import argument, every, last_name, names_in

PARTS = ("module", "model", "forward", "transformer", "encoder", "decoder", "backbone", "base_model")  # called to pass forward
HANDING_ON = ("enumerate", "tqdm", "iter", "trange", "cycle", "islice", "DataLoader", "prepare", "prepare_data_loader")
RANKED = ("rank", "world", "shard", "replica", "process")
SHARING = (*RANKED, "split", "worker", "random", "shuffle", "partition", "sampler", "seed")
ACCELERATE = ("accelerate.Accelerator", "accelerate.PartialState")
# what is begun once, what else begins it, and what raises before
BEGUN = (("torch.distributed.init_process_group", (*GROUPS[1:], *ACCELERATE), (
             *PARALLEL, *(f"torch.distributed.{name}" for name in COLLECTIVE))),
         ("wandb.init", (".init_trackers", ".WandbLogger", *ACCELERATE), ("wandb.log", "wandb.watch")))
EXCHANGING = ("reduce", "gather", "broadcast", "should_stop", "check_trigger")


@code_rule_once
def forward_past_wrapper(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The training calls the model inside of its wrapper, which then exchanges no gradients."""
    if not script.has_call(*PARALLEL, ".prepare") or script.says("deepspeed", "no_sync", "all_reduce_gradients") or (
            where.has_one_device):
        return
    for step in training_steps(script) if not _reduces_gradients(script) else ():
        calls = [call.node for call in step.calls if not call.inner_loop and not is_without_gradients(script, call.node)]
        for call in calls if step.backward else ():
            inner = _taken_out(script, call)
            if inner is not None and not any(script.words(each.func) == inner for each in calls):
                yield found("critical", call, step.backward[0].node, name=inner, only=WITH_SEVERAL)


def _taken_out(script: Script, call: ast.Call) -> str | None:
    """Return `model` of a pass through `model.module` or `accelerator.unwrap_model(model)`, also by another name for it."""
    node = call.func
    while isinstance(node, ast.Attribute) and node.attr in PARTS[1:]:
        node = node.value
    for each in origins(script, node):
        if isinstance(each, ast.Attribute) and each.attr == "module":
            return ast.unparse(each.value)
        if isinstance(each, ast.Call) and last_name(each.func) == "unwrap_model" and each.args:
            return ast.unparse(each.args[0])
    return None


def _reduces_gradients(script: Script) -> bool:
    return any("grad" in script.words(call) for call in script.every(ast.Call) if last_name(call.func).startswith("all_reduce"))


@code_rule_once
def same_batches(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Each process trains on the same batches, in the same order."""
    wrapped = next(script.calls(*PARALLEL, "deepspeed.initialize", *FSDP, ".prepare"), None)
    if wrapped is None or where.has_one_device:
        return
    prepared = last_name(wrapped.func) == "prepare"
    for loop in script.training_loops:
        read = origins_of_data(script, loop.iter) if isinstance(loop, ast.For) else []
        kinds = [script.classes.get(last_name(call.func)) for call in read]
        if read and all(kind is not None and "__iter__" in {each.name for each in script.methods(kind)} and not (
                prepared and any(script.name(base).startswith("torch.") for base in kind.bases)) for kind in kinds):
            told = " ".join(script.words(node) for node in (*kinds, *read) if node is not None).lower()
            handed = [node for call in read for item in (*call.args, *(each.value for each in call.keywords))
                      for node in script.behind(item)]
            told += " ".join(last_name(node) for node in handed).lower()
            if not any(word in told for word in SHARING):
                yield found("critical", loop.iter if isinstance(loop, ast.For) else loop, read[0], wrapped, only=WITH_SEVERAL)


def origins_of_data(script: Script, node: ast.expr, deep: int = 6) -> list[ast.Call]:
    """Return the calls that make what is iterated over, behind loaders and what else hands on; none where one is not known."""
    made: list[ast.Call] = []
    for end in origins(script, node) if deep else ():
        inner = end.value if isinstance(end, ast.Subscript) and isinstance(end.value, ast.Call) else end
        if not isinstance(inner, ast.Call):
            return []
        if last_name(inner.func) not in HANDING_ON:
            made.append(inner)
            continue
        place = getattr(end.slice, "value", 0) if isinstance(end, ast.Subscript) else 0
        given = argument(inner, "dataset", place if isinstance(place, int) else 0)
        deeper = origins_of_data(script, given, deep - 1) if given is not None else []
        if not deeper:
            return []
        made += deeper
    return made


@code_rule_once
def group_never_begun(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """What has to be begun first is used in every case, and only begun by an option that is off."""
    off = script.unused | script.dead
    for first, others, uses in BEGUN:
        begins = [call for call in every(ast.Call, script.tree) if script.name(call) == first]
        if not begins or script.has_call(*others) or (first == "wandb.init" and "trainer" in script.sections) or not all(
                is_led_to_by(script, call, off) for call in begins):
            continue
        for call in script.calls(*uses):
            if _always_runs(script, call, off):
                yield found("critical", call, begins[0], call=script.words(call)[:60], begun=first)


def _always_runs(script: Script, call: ast.Call, off: frozenset[ast.AST], deep: int = 3) -> bool:
    """Return whether a run surely comes to a call: under no condition, and in no function that may be left before."""
    function = script.function(call)
    around = [each for each in script.ancestors(call) if isinstance(each, ast.IfExp | ast.BoolOp | ast.Try | ast.Lambda)]
    tests = [test for test in script.conditions(call) if "__name__" not in script.words(test.test)]
    left = [each for each in every(ast.Return, function or ast.Module([], [])) if each.lineno < call.lineno]
    if around or tests or left or off & {*script.ancestors(call)}:
        return False
    if function is None:
        return script.module(call) is None
    started = [node for node in script.every(ast.Name) if node.id == function.name and script.module(function) is None
               and isinstance(script.parents[node], ast.Call) and script.function(node) is None]
    return any(isinstance(script.parents[node], ast.Call) for node in started) or (
        deep > 0 and any(_always_runs(script, each, off, deep - 1) for each in script.callers(function)))


@code_rule_once
def processes_leave_alone(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """One process leaves the training loop by itself, and the others wait for it."""
    if not script.has_call(*PARALLEL, "deepspeed.initialize", *FSDP, ".prepare") or where.has_one_device:
        return
    for node in script.every(ast.Break):
        loop = next(iter(script.loops(node)), None)
        if loop not in script.training_loops or loop is None or is_tried(script, node):
            continue
        exchanges = any(isinstance(each, ast.Call) and any(word in last_name(each.func) for word in EXCHANGING)
                        for each in script.reached(loop))
        for test in script.conditions(node):
            if not script.is_within(test, loop) or any(isinstance(each, ast.Break) for other in test.orelse
                                                       for each in ast.walk(other)):
                continue
            if is_of_the_first(script, test.test):
                yield found("critical", test.test, node, case="first", only=WITH_SEVERAL)
            elif not exchanges and _is_by_own_loss(test.test):
                yield found("critical", test.test, node, only=WITH_SEVERAL)


def _is_by_own_loss(test: ast.expr) -> bool:
    """Return whether a test asks whether the loss is below a bound: `loss.item() < 0.1`."""
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Lt | ast.LtE) and any(
        "loss" in name.lower() for name in names_in(test.left)) and not names_in(test.comparators[0]) & {"best_loss"}
