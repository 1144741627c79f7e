"""Rules on a network that the script builds itself, and on the weights that it keeps of it."""

import ast

from powertrain.audit.rules.base import Findings, code_rule, found
from powertrain.audit.script import FunctionNode, Loop, Script, argument, last_name
from powertrain.audit.subject import Circumstances, Subject

TRAINED = ("Linear", "Bilinear", "Embedding", "Conv1d", "Conv2d", "LSTM", "GRU", "MultiheadAttention",
           "TransformerEncoderLayer", "TransformerDecoderLayer", "TransformerEncoder")
SHARED = ("share", "albert", "universal")    # in names of networks whose layers are one layer on purpose
TINY = 1e-3                  # of what a mask puts in: far from the large negative number that a softmax takes for nothing
COPYING = ("deepcopy", "copy", "clone", "cpu")
MOVING = ("to", "cuda", "half", "bfloat16", "float", "prepare", "initialize", "setup", "setup_module", "to_empty", "xla_device",
          "set_default_device", "set_default_tensor_type", "dispatch_model", "load_checkpoint_and_dispatch")
SEQUENCE_FIRST = {"MultiheadAttention": 9, "TransformerEncoderLayer": 6, "TransformerDecoderLayer": 6, "Transformer": 9}
TURNING = ("transpose", "swapaxes", "swapdims", "permute", "t", "T", "rearrange", "einsum", "batchify")
LEFT = ("save", "checkpoint", "ckpt", "dump", "export", "upload", "push_to_hub", "persist", "write")


@code_rule
def same_layer_repeated(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The layers of the network are one layer, taken several times."""
    if script.says(*SHARED):
        return
    for call in script.calls("torch.nn.ModuleList", "torch.nn.Sequential"):
        for given in call.args[:1]:
            listed = given.value if isinstance(given, ast.Starred) else given
            if (once := _made_once(listed)) is not None:
                yield found("critical", call, once if once is not listed else None)
                return


def _made_once(listed: ast.expr) -> ast.expr | None:
    """Return what `[layer] * 6` and `[layer for _ in range(6)]` repeat without making it anew; None for anything else."""
    if isinstance(listed, ast.BinOp) and isinstance(listed.op, ast.Mult):
        one = listed.left if isinstance(listed.left, ast.List) else listed.right
        return one.elts[0] if isinstance(one, ast.List) and len(one.elts) == 1 else None
    if isinstance(listed, ast.ListComp | ast.GeneratorExp) and isinstance(listed.elt, ast.Name):
        taken = {node.id for each in listed.generators for node in ast.walk(each.target) if isinstance(node, ast.Name)}
        return None if listed.elt.id in taken else listed.elt
    return None


@code_rule
def layer_made_in_pass(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A layer with weights is made anew in every forward pass."""
    for call in script.nodes:
        function = script.function(call)
        if function is None or function.name != "forward" or not isinstance(call, ast.Call):
            continue
        of_network = script.parents[function]
        is_made = script.name(call).startswith("torch.nn.") and last_name(call.func) in TRAINED
        lasts = any(isinstance(around, ast.If | FunctionNode) and around is not function for around in _up_to(
            script, call, function))         # made once, where there is none yet
        if is_made and not lasts and isinstance(of_network, ast.ClassDef) and of_network.bases:
            yield found("critical", call, name=last_name(call.func))
            return


def _up_to(script: Script, node: ast.AST, outer: ast.AST) -> list[ast.AST]:
    around = list(script.ancestors(node))
    return around[:around.index(outer)]


@code_rule
def masked_with_nothing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A mask puts a number near zero into the scores of attention, where it means a large negative one."""
    for call in script.calls(".masked_fill", ".masked_fill_"):
        value, function = argument(call, "value", 1), script.function(call)
        number = value.value if isinstance(value, ast.Constant) else None
        if not isinstance(number, float) or not 0 < number < TINY or function is None:
            continue
        softmax = next((node for node in ast.walk(function) if isinstance(node, ast.Call) and node.lineno >= call.lineno
                        and "softmax" in last_name(node.func).lower()), None)
        if softmax is not None:
            yield found("critical", call, softmax, number=number)
            return


@code_rule
def attention_across_batch(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """torch's attention takes the batch's examples for the places of a sequence."""
    turned = any(last_name(node.func if isinstance(node, ast.Call) else node) in TURNING for node in ast.walk(script.tree)
                 if isinstance(node, ast.Call | ast.Attribute))
    loaded = next((call for call in script.nodes if isinstance(call, ast.Call) and last_name(call.func) == "DataLoader"), None)
    if turned or loaded is None or not script.training_loops or not script.says("Embedding") or script.has_call(
            ".pad_sequence"):
        return
    for call in script.nodes:
        place = SEQUENCE_FIRST.get(last_name(call.func)) if isinstance(call, ast.Call) and script.name(call).startswith(
            "torch.nn.") else None
        if place is not None and isinstance(call, ast.Call) and argument(call, "batch_first", place) is None and all(
                item.arg for item in call.keywords):
            yield found("critical", call, loaded, name=last_name(call.func))
            return


@code_rule
def best_weights_shared(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The best weights are kept as state_dict() gives them, which go on being trained."""
    for node in script.nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        taken = node.value if isinstance(node, ast.Assign) else None
        loops = script.loops(node)
        kept = target is not None and isinstance(taken, ast.Call) and last_name(taken.func) == "state_dict" and not taken.args
        of_object = isinstance(target, ast.Attribute) and "best" in target.attr
        if not kept or target is None or not (of_object or (isinstance(target, ast.Name) and loops)):
            continue
        loaded = next((call for call in script.calls(".load_state_dict") if call.args and ast.unparse(call.args[0]).rpartition(
            ".")[2] == ast.unparse(target).rpartition(".")[2] and (of_object or _comes_after(script, call, loops[-1]))), None)
        if loaded is not None and not script.says("FullStateDictConfig", "get_model_state_dict"):
            yield found("critical", node, loaded, name=ast.unparse(target))
            return


def _comes_after(script: Script, node: ast.AST, loop: Loop) -> bool:
    """Return whether code of a loop's function stands behind the loop."""
    return script.function(node) is script.function(loop) and getattr(node, "lineno", 0) > (loop.end_lineno or 0)


@code_rule
def model_left_behind(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The batches are moved to the GPU, and the model never is."""
    if where.on_cpu or not script.says("cuda"):
        return
    moves = [call for call in ast.walk(script.tree) if isinstance(call, ast.Call) and last_name(call.func) in MOVING]
    for loop in script.training_loops:
        function = script.function(loop)
        moved = next((call for call in moves if script.is_within(call, loop) and call.args
                      and last_name(call.func) in ("to", "cuda")), None)
        for call in ast.walk(loop) if moved is not None else ():
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            made = [node for node in ast.walk(function or script.tree) if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == call.func.id for target in node.targets)
                and script.function(node) is function]
            if made and all(_makes_network(script, node.value) for node in made) and not any(
                    _is_about(each, call.func.id, node) for each in moves for node in made):
                yield found("critical", made[0], moved, name=call.func.id)
                return


def _makes_network(script: Script, value: ast.expr) -> bool:
    """Return whether a value is an object of a network of the project that does not move itself."""
    kind = script.classes.get(last_name(value.func)) if isinstance(value, ast.Call) else None
    if kind is None or any(item.arg and "device" in item.arg for item in getattr(value, "keywords", ())):
        return False
    inner = {last_name(node.func) for node in ast.walk(kind) if isinstance(node, ast.Call)}
    return any(each.name == "forward" for each in script.methods(kind)) and not inner & {"to", "cuda"} and "device" not in {
        last_name(node) for node in ast.walk(kind)}


def _is_about(call: ast.Call, name: str, made: ast.Assign) -> bool:
    """Return whether a call may move an object: it is a method of its, gets it, or is of everything."""
    about = last_name(call.func) in ("set_default_device", "set_default_tensor_type")
    return about or any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(call)) or any(
        node is call for node in ast.walk(made))


@code_rule
def never_saved(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script trains a model, and saves it nowhere."""
    loop = next(iter(script.training_loops), None)
    if loop is None or subject.framework != "pytorch" or script.says(*LEFT) or script.module(loop) is not None:
        return
    begins = script.function(loop) is None or "__main__" in script.own_text
    if begins and script.has_call(".step"):
        yield found("moderate", loop.iter if isinstance(loop, ast.For) else loop.test if isinstance(loop, ast.While) else loop)
