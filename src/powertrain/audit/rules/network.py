"""Rules on a network that the script builds itself, and on the weights that it keeps of it."""

import ast
from itertools import takewhile

from powertrain.audit.commands import commands
from powertrain.audit.origins import is_led_to_by
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found
from powertrain.audit.scopes import is_tried
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, Loop, argument, every, gives_name, last_name, names_in, owner_of, reads_of
from powertrain.records.findings import Severity

TRAINED = ("Linear", "Bilinear", "Embedding", "Conv1d", "Conv2d", "LSTM", "GRU", "MultiheadAttention",
           "TransformerEncoderLayer", "TransformerDecoderLayer", "TransformerEncoder")
SHARED = ("share", "albert", "universal")    # in names of networks whose layers are one layer on purpose
TINY = 1e-3                  # of what a mask puts in: far from the large negative number that a softmax takes for nothing
MOVING = ("to", "cuda", "half", "bfloat16", "float", "prepare", "initialize", "setup", "setup_module", "to_empty", "xla_device",
          "set_default_device", "set_default_tensor_type", "dispatch_model", "load_checkpoint_and_dispatch")
SEQUENCE_FIRST = {"MultiheadAttention": 9, "TransformerEncoderLayer": 6, "TransformerDecoderLayer": 6, "Transformer": 9}
TURNING = ("transpose", "swapaxes", "swapdims", "permute", "t", "T", "rearrange", "einsum", "batchify")
HEADED = ("ForSequenceClassification.from_pretrained", "ForTokenClassification.from_pretrained")
OF_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")           # task types whose new head peft trains and saves
WEIGHING = ("att", "wei", "prob", "score")           # in names of what weighs the values
ORDERING = ("transpose", "swap", "permute", "rearrange", "einsum")
WITHOUT_GRADIENTS = ("torch.no_grad", "torch.inference_mode")
QUERIES = ("q", "k", "xq", "xk", "query", "key")       # arguments of a layer that always have gradients
OF_DATA = ("numpy.save", "json.dump", "json.dumps", "matplotlib.pyplot.savefig")        # calls that write no weights
LEFT = ("save", "ckpt", "dump", "export", "upload", "push_to_hub", "Checkpoint", "log_model", "artifact")


@code_rule_once
def same_layer_repeated(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The layers of the network are one layer, taken several times."""
    if script.says(*SHARED):
        return
    for call in script.calls("torch.nn.ModuleList", "torch.nn.Sequential"):
        for given in call.args[:1]:
            listed = given.value if isinstance(given, ast.Starred) else given
            once = _made_once(listed)
            if once is not None and _may_have_weights(script, once):
                yield found("critical", call, once if once is not listed else None)


def _made_once(listed: ast.expr) -> ast.expr | None:
    """Return what `[layer] * 6` and `[layer for _ in range(6)]` repeat without making it anew; None for anything else."""
    if isinstance(listed, ast.BinOp) and isinstance(listed.op, ast.Mult):
        one = listed.left if isinstance(listed.left, ast.List) else listed.right
        return one.elts[0] if isinstance(one, ast.List) and len(one.elts) == 1 else None
    if isinstance(listed, ast.ListComp | ast.GeneratorExp) and isinstance(listed.elt, ast.Name):
        taken = {node.id for each in listed.generators for inner in (each.target, *each.ifs)
                 for node in every(ast.Name, inner) if isinstance(node.ctx, ast.Store)}
        return None if listed.elt.id in taken else listed.elt
    return None


def _may_have_weights(script: Script, layer: ast.expr) -> bool:
    """Return whether a layer is one of torch's with weights, one of the project's, or not known by its name alone."""
    made = script.assigned(layer) if isinstance(layer, ast.Name) else [layer]
    return all(isinstance(each, ast.Call) and (last_name(each.func) in (*TRAINED, *script.classes)) for each in made)


@code_rule_once
def layer_made_in_pass(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A layer with weights is made anew in every forward pass."""
    for call in script.every(ast.Call):
        function = script.function(call)
        if function is None or function.name != "forward":
            continue
        of_network = script.parents[function]
        is_made = script.name(call).startswith("torch.nn.") and last_name(call.func) in TRAINED
        within = takewhile(lambda around: not isinstance(around, FunctionNode), script.ancestors(call))
        # made once, where there is none yet
        lasts = any(isinstance(around, ast.If | ast.IfExp | ast.BoolOp | ast.Try) for around in within)
        if is_made and not lasts and isinstance(of_network, ast.ClassDef) and of_network.bases:
            yield found("critical", call, name=last_name(call.func))


@code_rule_once
def masked_with_nothing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A mask puts a number near zero into the scores of attention, where it means a large negative one."""
    for call in script.calls(".masked_fill", ".masked_fill_"):
        value, function = argument(call, "value", 1), script.function(call)
        number = value.value if isinstance(value, ast.Constant) else None
        if not isinstance(number, float) or not 0 < number < TINY or function is None:
            continue
        statement, owner = script.statement(call), getattr(call.func, "value", call)
        held = statement.targets[0] if isinstance(statement, ast.Assign) else owner
        softmax = next((node for node in every(ast.Call, function) if _is_softmax(node) and any(
            inner is call or (ast.unparse(inner) == ast.unparse(held) and node.lineno > call.lineno)
            for given in (*node.args[:1], owner_of(node)) if given is not None for inner in ast.walk(given))), None)
        if softmax is not None:
            yield found("critical", call, softmax, number=number)


def _is_softmax(call: ast.Call) -> bool:
    """Return whether a call is `softmax(x)`, `x.softmax(-1)` or `nn.Softmax(-1)(x)`."""
    return "softmax" in last_name(call.func.func if isinstance(call.func, ast.Call) else call.func).lower()


@code_rule_once
def attention_across_batch(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """torch's attention takes the batch's examples for the places of a sequence."""
    turned = any(last_name(node.func if isinstance(node, ast.Call) else node) in TURNING for node in ast.walk(script.tree)
                 if isinstance(node, ast.Call | ast.Attribute))
    loaded = next((call for call in script.every(ast.Call) if last_name(call.func) == "DataLoader"), None)
    given = loaded is None or argument(loaded, "collate_fn") is not None
    if turned or given or not script.training_loops or not script.says("Embedding") or script.has_call(".pad_sequence"):
        return
    for call in script.every(ast.Call):
        place = SEQUENCE_FIRST.get(last_name(call.func)) if script.name(call).startswith("torch.nn.") else None
        if place is not None and argument(call, "batch_first", place) is None and all(item.arg for item in call.keywords):
            yield found("critical", call, loaded, name=last_name(call.func))


@code_rule_once
def attention_across_heads(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """torch's attention gets the heads where it takes the places of a sequence."""
    for call in script.calls("torch.nn.functional.scaled_dot_product_attention"):
        function, given = script.function(call), [item for item in call.args[:2] if isinstance(item, ast.Name)]
        if function is None or len(given) < 2:
            continue
        values = [node.value for name in given for node in every(ast.Assign, function) if gives_name(node, name.id)]
        views = [value for value in values if isinstance(value, ast.Call) and last_name(value.func) in ("view", "reshape")
                 and len(value.args) == 4 and is_length(value.args[1]) and is_heads(value.args[2])]
        stored = [node for node in every(ast.Name, function) if node.id in {name.id for name in given}
                  and isinstance(node.ctx, ast.Store)]
        plain = len(stored) == len(values) and "transpose_(" not in script.words(function)
        if plain and len(views) >= len(given) and all(value in views or _keeps_order(script, value) for value in values):
            yield found("critical", call, views[0])


def _keeps_order(script: Script, value: ast.expr) -> bool:
    """Return whether a value is a call of a layer that surely leaves the order of dimensions: torch's, or one seen here."""
    kinds = [script.name(made) for made in script.assigned(value.func)] if isinstance(value, ast.Call) else []
    own = [script.words(script.classes[kind]) for kind in kinds if kind in script.classes]
    return bool(kinds) and not any(word in text for text in own for word in ORDERING) and all(
        kind in script.classes or kind.startswith("torch.nn.") for kind in kinds)


def is_length(node: ast.expr) -> bool:
    """Return whether a name is that of the length of a sequence."""
    return last_name(node).lower() in ("l", "t", "s", "seq", "seq_len", "seqlen", "seq_length", "length")


def is_heads(node: ast.expr) -> bool:
    """Return whether a number is that of heads, as far as its name says."""
    return isinstance(node, ast.Constant) or "head" in last_name(node).lower() or last_name(node) in ("H", "h", "nh")


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
def attention_thrown_away(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A forward pass computes attention, and nothing reads the result."""
    for node in script.every(ast.Assign):
        function, target = script.function(node), node.targets[0]
        if function is None or function.name != "forward" or len(node.targets) > 1 or not isinstance(target, ast.Name):
            continue
        attends = any(last_name(call.func) == "scaled_dot_product_attention" for call in every(ast.Call, node.value)) or (
            isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.MatMult)
            and last_name(node.value.left).startswith(WEIGHING) and "scaled_dot_product" not in script.words(function))
        if attends and "locals" not in script.words(function) and not reads_of(target.id, function):
            yield found("critical", node, name=target.id)


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


@code_rule_once
def model_left_behind(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The batches are moved to the GPU, and the model never is."""
    if where.on_cpu or not script.says("cuda"):
        return
    moves = [call for call in every(ast.Call, script.tree) if last_name(call.func) in MOVING]
    for loop in script.training_loops:
        function = script.function(loop)
        moved = next((call for call in moves if script.is_within(call, loop) and call.args
                      and last_name(call.func) in ("to", "cuda")), None)
        for call in every(ast.Call, loop) if moved is not None else ():
            if not isinstance(call.func, ast.Name):
                continue
            made = [node for node in every(ast.Assign, function or script.tree)
                    if gives_name(node, call.func.id) and script.function(node) is function]
            if made and all(_stays_on_the_cpu(script, node) for node in made) and not any(
                    _is_about(each, call.func.id, node) for each in moves for node in made) and not _is_handed_on(
                        script, call.func.id, loop):
                yield found("critical", made[0], moved, name=call.func.id)


def _is_handed_on(script: Script, name: str, loop: Loop) -> bool:
    """Return whether outside of the loop a name is an argument of a call, or one of several in a list: that may move it."""
    return any(isinstance(script.parents[node], ast.Call | ast.keyword | ast.Tuple | ast.List) and node is not getattr(
        script.parents[node], "func", None) and not script.is_within(node, loop) for node in reads_of(name, script.tree))


def _stays_on_the_cpu(script: Script, made: ast.Assign) -> bool:
    """Return whether a network of the project, with weights, is made that does not move itself, outside of `with device:`."""
    value = made.value
    kind = script.classes.get(last_name(value.func)) if isinstance(value, ast.Call) else None
    if kind is None or not isinstance(value, ast.Call) or any(item.arg and "device" in item.arg for item in value.keywords):
        return False
    inner = {last_name(call.func) for call in every(ast.Call, kind)}
    moves = inner & {"to", "cuda"} or "device" in {last_name(node) for node in ast.walk(kind)} or any(
        isinstance(around, ast.With) and "device" in script.words(around.items[0]) for around in script.ancestors(made))
    return not moves and bool(inner & {*TRAINED, "Parameter", *script.classes}) and any(
        each.name == "forward" for each in script.methods(kind))


def _is_about(call: ast.Call, name: str, made: ast.Assign) -> bool:
    """Return whether a call may move an object: it is a method of its, gets it, or is of everything."""
    return last_name(call.func).startswith("set_default_") or call in ast.walk(made) or name in names_in(call)


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


@code_rule_once
def view_of_a_slice(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A tensor that was cut in its second dimension or a later one is given another shape by `view`."""
    for call in script.calls(".view"):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else call
        flat = call.args and isinstance(call.args[0], ast.UnaryOp) and ast.unparse(call.args[0]) == "-1"
        values = script.assigned(owner) if isinstance(owner, ast.Name) else [owner]
        if flat and values and all(map(is_cut_inside, values)) and not is_tried(script, call):
            yield found("critical", call, values[0] if values[0] is not owner else None)


def is_cut_inside(value: ast.AST) -> bool:
    """Return whether an expression takes a part of a dimension behind the first: x[:, 1:] or x[..., :-1, :]."""
    if not isinstance(value, ast.Subscript) or not isinstance(value.slice, ast.Tuple):
        return False
    first, *rest = value.slice.elts
    whole = isinstance(first, ast.Slice) and first.lower is first.upper is first.step is None
    of_all = isinstance(first, ast.Constant) and first.value is ...
    cut = any(isinstance(item, ast.Slice) and (is_number(item.lower) or is_number(item.upper)) for item in rest)
    return (whole or of_all) and cut and all(isinstance(item, ast.Slice) for item in rest)


def is_number(bound: ast.expr | None) -> bool:
    """Return whether a slice begins or ends at a number but 0, such as 1 or -1: what is not written may be the whole length."""
    value = bound.operand if isinstance(bound, ast.UnaryOp) else bound
    return isinstance(value, ast.Constant) and isinstance(value.value, int) and value.value != 0
