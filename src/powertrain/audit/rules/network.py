"""Rules on a network that the script builds itself, and on the weights that it keeps of it."""

import ast

from powertrain.audit.commands import commands
from powertrain.audit.origins import is_led_to_by
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, Loop, argument, every, last_name, owner_of, reads_of
from powertrain.records.findings import Severity

SHARED = ("share", "albert", "universal")    # in names of networks whose layers are one layer on purpose
TINY = 1e-3                  # of what a mask puts in: far from the large negative number that a softmax takes for nothing
MOVING = ("to", "cuda", "half", "bfloat16", "float", "prepare", "initialize", "setup", "setup_module", "to_empty", "xla_device",
          "set_default_device", "set_default_tensor_type", "dispatch_model", "load_checkpoint_and_dispatch")
HEADED = ("ForSequenceClassification.from_pretrained", "ForTokenClassification.from_pretrained")
OF_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")           # task types whose new head peft trains and saves
WITHOUT_GRADIENTS = ("torch.no_grad", "torch.inference_mode")
QUERIES = ("q", "k", "xq", "xk", "query", "key")       # arguments of a layer that always have gradients
OF_DATA = ("numpy.save", "json.dump", "json.dumps", "matplotlib.pyplot.savefig")        # calls that write no weights
LEFT = ("save", "ckpt", "dump", "export", "upload", "push_to_hub", "Checkpoint", "log_model", "artifact")


def _is_softmax(call: ast.Call) -> bool:
    """Return whether a call is `softmax(x)`, `x.softmax(-1)` or `nn.Softmax(-1)(x)`."""
    return "softmax" in last_name(call.func.func if isinstance(call.func, ast.Call) else call.func).lower()


@code_rule_once
def gradient_stopped(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A layer works without gradients on what the network computes, so nothing below it learns by it."""
    named = {last_name(node) for node in script.nodes if isinstance(node, ast.Name | ast.Attribute)}
    for kind in every(ast.ClassDef, script.tree) if script.training_loops or "trainer" in script.sections else ():
        forward = next((item for item in kind.body if isinstance(item, FunctionNode) and item.name == "forward"), None)
        if forward is None or kind.name not in named:
            continue
        stops = [each for each in forward.decorator_list if script.name(each) in WITHOUT_GRADIENTS]
        rotates = any(word in kind.name.lower() for word in ("rope", "rotary"))
        given = [item.arg for item in forward.args.args if item.arg in (*QUERIES, *(("x",) if rotates else ()))]
        used = next((node for node in every(ast.BinOp, forward) for side in (node.left, node.right)
                     if isinstance(side, ast.Name) and side.id in given), None)
        if stops and used is not None:
            yield found("critical", stops[0], used, name=kind.name)


@code_rule_once
def adapters_never_applied(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A configuration of adapters is made, and nothing takes it."""
    for call in script.calls("peft.LoraConfig") if not script.says("locals", "globals") else ():
        node = script.parents[call]
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if isinstance(target, ast.Name) and not isinstance(script.parents[node], ast.ClassDef) and not reads_of(
                target.id, script.tree) and script.module(node) is None:
            yield found("critical", node, name=target.id)


@code_rule_once
def new_head_frozen(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The model gets a new head, and the adapters leave it frozen as it was drawn."""
    headed = [call for call in script.every(ast.Call) if script.name(call).endswith(HEADED)]
    if not headed or script.says("requires_grad", "classifier", "score", "modules_to_save"):
        return
    for call in script.calls("peft.LoraConfig"):
        kind = argument(call, "task_type", 0)
        known = kind is None or isinstance(kind, ast.Constant) or (isinstance(kind, ast.Attribute) and last_name(
            kind.value) == "TaskType")
        set_later = any(node.attr == "task_type" and isinstance(node.ctx, ast.Store) for node in script.every(ast.Attribute))
        if known and not set_later and all(item.arg for item in call.keywords) and not any(
                word in script.words(kind or call.func) for word in OF_HEADS):
            yield found("critical", call, headed[0])


@code_rule_once
def best_weights_shared(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The best weights are kept as state_dict() gives them, which go on being trained."""
    for taken in script.calls(".state_dict"):
        node, owner = script.parents[taken], owner_of(taken)
        if owner is None or taken.args or not isinstance(node, ast.Assign) or len(node.targets) > 1 or every(ast.Call, owner):
            continue                         # copied first
        target, loops = node.targets[0], script.loops(node)
        best = "best" in last_name(target) or (isinstance(target, ast.Name) and bool(script.conditions(node)))
        others = [value for value in script.assigned(target) if value is not taken and not isinstance(value, ast.Constant)]
        if not best or others or not (isinstance(target, ast.Attribute) or loops):
            continue
        loaded = next((call for call in script.calls(".load_state_dict") if call.args and last_name(call.args[0]) == last_name(
            target) and ast.unparse(getattr(call.func, "value", call)) == ast.unparse(owner) and (
            isinstance(target, ast.Attribute) or _comes_after(script, call, loops[-1]))), None)
        if loaded is not None and not script.says("FullStateDictConfig", "get_model_state_dict"):
            yield found("critical", node, loaded, name=ast.unparse(target))


def _comes_after(script: Script, node: ast.AST, loop: Loop) -> bool:
    """Return whether code of a loop's function stands behind the loop."""
    return script.function(node) is script.function(loop) and getattr(node, "lineno", 0) > (loop.end_lineno or 0)


@code_rule
def never_saved(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script trains a model, and saves it nowhere."""
    loop = next(iter(script.training_loops), None)
    saves = [call for call in script.every(ast.Call) if _leaves(script, call)]
    # what is off may be asked for by a command, and with it the training
    if loop is None or "trainer" in script.sections or any(not is_led_to_by(script, call, script.unused) for call in saves) or (
            saves and (is_led_to_by(script, loop, script.unused) or any(command.words for command in commands(script)))):
        return
    begins = script.function(loop) is None or "__main__" in script.own_text
    measures = "bench" in str(script.path.resolve()).lower()         # of such a run only the times are wanted
    severity: Severity = "moderate" if script.path.suffix == ".ipynb" else "critical"       # a notebook still has the model
    if begins and not measures and script.has_call(".step"):
        yield found(severity, loop.iter if isinstance(loop, ast.For) else loop.test if isinstance(loop, ast.While) else loop,
                    *saves[:1], case="asked" if saves else "")


def _leaves(script: Script, call: ast.Call) -> bool:
    """Return whether a call may leave weights behind: its name says so, or it opens a file to write bytes."""
    name, last = script.name(call) or last_name(call.func), last_name(call.func)
    given = (*call.args, *(item.value for item in call.keywords))
    writes = last == "open" and any(isinstance(item, ast.Constant) and item.value == "wb" for item in given) and not any(
        word in getattr(script.function(call), "name", "") for word in ("download", "fetch"))
    return writes or "store" in last or (any(word in name for word in LEFT) and name not in OF_DATA and last != "savefig")


def is_number(bound: ast.expr | None) -> bool:
    """Return whether a slice begins or ends at a number but 0, such as 1 or -1: what is not written may be the whole length."""
    value = bound.operand if isinstance(bound, ast.UnaryOp) else bound
    return isinstance(value, ast.Constant) and isinstance(value.value, int) and value.value != 0
