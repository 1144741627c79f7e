"""Rules on a script's own training loop: what it waits for, its evaluation, and what stands outside of it."""

import ast
from itertools import takewhile

from powertrain.audit.edits import Edits, block_of, indent, indented, moved, set_to, with_line, with_text, without
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found, rule
from powertrain.audit.rules.memory import KEEPS_CHECKPOINTS_DTYPE, loaded_dtype
from powertrain.audit.rules.optimizer import ACCELERATED
from powertrain.audit.rules.processes import RANKED
from powertrain.audit.script import Script
from powertrain.audit.steps import Step, StepCall, interval, is_without_gradients, step_code, training_steps
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, Loop, argument, every, last_name, names_in, owner_of
from powertrain.cost.precision import bf16_pays

ANOMALIES = ("torch.autograd.set_detect_anomaly", "torch.autograd.anomaly_mode.set_detect_anomaly",
             "torch.autograd.detect_anomaly")
MOVING = ("to", "cuda", "prepare", "initialize", "setup", "setup_module", "set_device", "set_default_device", "device")
WAITING = (".item", ".tolist", ".numpy")
EMPTYING = ("torch.cuda.empty_cache", "torch.mps.empty_cache", "torch.xpu.empty_cache", ".empty_cache")
WITH_DROPOUT = ("bert", "gpt2", "t5-", "bart", "electra", "deberta", "pegasus", "facebook/opt")      # of published models
LAYERS = ("Linear", "Sequential", "Embedding", "LSTM", "GRU", "Transformer", "TransformerEncoder")   # a network by themselves
KEEPING = ("save", "checkpoint", "valid", "eval")            # in the names of functions that evaluate or save
BENCHMARK, DETERMINISTIC, DETERMINISM = "training.cudnn_benchmark", "training.cudnn_deterministic", "training.full_determinism"


def _taken_out(script: Script, *nodes: ast.AST) -> Edits:
    """Return the edits that take whole expressions out, such as `torch.cuda.synchronize()`."""
    return without(script, *nodes) if all(isinstance(script.statement(node), ast.Expr) for node in nodes) else ()


@code_rule
def item_each_step(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The loop waits for the device at every step, to read a number."""
    moves = any(last_name(call.func) in MOVING for call in script.every(ast.Call))
    alone = where.on_cpu or (subject.framework == "pytorch" and not moves)
    for step in step_code(script):
        waits = [call for call in step.named(*WAITING) if call.each_pass or _is_of_one_process(script, call)]
        waits += [call for call in step.named("float") if call.each_pass and len(call.node.args) == 1
                  and "loss" in getattr(call.node.args[0], "id", "")]
        if waits:
            yield found("low", *(call.node for call in waits[:4]), call=script.words(waits[0].node), edits=tuple(
                edit for call in waits for edit in _kept_on_device(script, call.node)), alone=alone)


def loads_weights(script: Script) -> bool:
    """Return whether a pretrained model is loaded: its steps are long, and it may have dropout."""
    return any("okenizer" not in script.name(call) for call in script.calls(".from_pretrained"))


def _has_many_passes(step: Step, waits: list[StepCall]) -> bool:
    """Return whether a step loops over micro-batches, and waits once for all of them."""
    return any(call.micro for call in step.backward) and not any(call.micro for call in waits)


def _is_of_one_process(script: Script, call: StepCall) -> bool:
    """Return whether a call happens at every step, in one of the processes: `if rank == 0: print(loss.item())`."""
    tests = [script.words(condition.test).lower() for condition in call.conditions]
    return bool(tests) and not call.inner_loop and all(
        any(word in test for word in RANKED) and "%" not in test for test in tests)


@code_rule
def loop_in_fp32(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script's own loop computes in fp32 on a GPU."""
    if subject.framework != "pytorch" or where.on_cpu or (where.hardware is not None and not bf16_pays(where.hardware)):
        return
    step = next(iter(training_steps(script)), None)
    moved = next((call for call in script.every(ast.Call) if last_name(call.func) in ("to", "cuda")
                  and "cpu" not in script.words(call)), None)
    older = loads_weights(script) and (where.version("transformers") or (0,)) < KEEPS_CHECKPOINTS_DTYPE      # loads fp32
    tf32 = subject.value("training.tf32") or script.says("allow_tf32", "set_float32_matmul_precision")
    if step is not None and step.backward and moved is not None and not tf32 and not script.says(
            "autocast", "float16", "bf16", "fp16", "half", "GradScaler", "MixedPrecision", "deepspeed", "fabric") and (
            (dtype := loaded_dtype(subject, where)[0]) == "fp32" or (dtype is None and (_makes_network(script) or older))):
        yield found("moderate", step.backward[0].node, moved)


def _makes_network(script: Script) -> bool:
    """Return whether the weights are made here, in fp32, and none are loaded."""
    networks = {name for name, kind in script.classes.items() if any(last_name(base) == "Module" for base in kind.bases)}
    made = any(last_name(call.func) in (*networks, *LAYERS, "from_config") for call in script.every(ast.Call))
    return made and script.says("cuda") and not loads_weights(script)


@code_rule_once
def norms_decayed(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Weight decay pulls the gains of norms and the biases to zero, like weights."""
    decay = subject.in_force("optimizer.weight_decay")
    for call in script.calls("torch.optim.AdamW", "torch.optim.adamw.AdamW"):
        first = argument(call, "params", 0)
        whole = isinstance(first, ast.Call) and last_name(first.func) == "parameters"
        if whole and script.training_loops and not subject.has_adapters and isinstance(decay, (int, float)) and decay > 0 and \
                not script.says("get_peft_model", "lora") and not script.has_call(".bfloat16", ".half"):   # which lose it
            yield found("low", call, decay=decay)


def _kept_on_device(script: Script, node: ast.Call) -> Edits:
    """Return `total += loss.item()` as `total += loss.detach()`; elsewhere a number may be needed."""
    if isinstance(script.parents[node], ast.AugAssign) and isinstance(node.func, ast.Attribute) and not node.args:
        return with_text(script, node, f"{script.words(node.func.value)}.detach()")
    return ()


@code_rule
def synchronised_each_step(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The loop synchronises the device at every step, as for a measurement."""
    for step in step_code(script):
        waits = [call for call in step.named("torch.cuda.synchronize", "torch.mps.synchronize") if call.each_pass]
        nodes = [call.node for call in waits]
        if waits:
            yield found("low" if _has_many_passes(step, waits) else "moderate", *nodes, edits=_taken_out(script, *nodes))


@code_rule
def cache_emptied_in_loop(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The loop empties the allocator's cache or collects garbage."""
    calls = [call for step in step_code(script) for call in step.named(*EMPTYING) if not _leaves_after(script, call.node)
             and not any(_leaves_after(script, each.node) for each in step.calls
                         if script.called(each.node) is script.function(call.node) is not None)
             and not any(isinstance(around, ast.ExceptHandler) for around in script.ancestors(call.node))]
    # a snippet whose loop is somewhere else has an `if` that counts steps
    nodes = [call.node for call in calls] or [node for node in script.calls(*EMPTYING) if any(
        interval(condition.test) is not None and "step" in script.words(condition.test).lower()
        for condition in script.conditions(node))]
    if nodes:
        often = any(all(interval(condition.test) is None for condition in call.conditions) for call in calls)
        short = often and not script.has_call(".generate")
        yield found("moderate" if short else "low", *nodes[:4], when="at every step" if often else "in the loop",
                    edits=_taken_out(script, *nodes))


def _leaves_after(script: Script, node: ast.AST) -> bool:
    """Return whether the statements behind a node's own leave the loop."""
    for statement in (node, *takewhile(lambda each: not isinstance(each, Loop | FunctionNode), script.ancestors(node))):
        bodies = [body for name in ("body", "orelse", "finalbody") if statement in (
            body := getattr(script.parents[statement], name, None) or []) and isinstance(body, list)]
        after = [each for body in bodies for each in body[body.index(statement):]]
        if any(isinstance(each, ast.Break | ast.Return | ast.Raise) for each in after):
            return True
    return False


@code_rule_once
def anomaly_detection_on(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Autograd's search for the origin of NaN is on."""
    for call in script.calls(*ANOMALIES):
        given = argument(call, "mode", 0)
        off = given is not None and not (isinstance(given, ast.Constant) and given.value)
        if not off and not script.conditions(call):
            yield found("moderate", call, edits=_taken_out(script, call))


@rule
def determinism_forced(subject: Subject, where: Circumstances) -> Findings:
    """All kernels are the deterministic, slower ones."""
    if subject.value(DETERMINISM) is True:
        yield found("low", DETERMINISM, edits=set_to(subject, DETERMINISM, False))


@code_rule
def cudnn_benchmark(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """cuDNN searches for the fastest convolution in a model without convolutions."""
    if subject.value(BENCHMARK) is not True or script.says("Conv", "conv"):
        return
    setting, forced = subject.settings[BENCHMARK], subject.value(DETERMINISTIC) is True
    statement = next((node for node in script.every(ast.Assign) if node.lineno == setting.place.line
                      and "benchmark" in script.words(node)), None)
    yield found("low", setting, DETERMINISTIC if forced else None, forced=forced,
                edits=without(script, statement) if statement is not None else ())


@code_rule
def gradients_cleared_early(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients are set to zero before the optimizer has used them."""
    for step in training_steps(script):
        accumulation = None if step.accumulates_by_accelerate else step.accumulation
        zeroes, unread = step.methods("zero_grad"), subject.is_unread(ACCELERATED)
        each = [call.node for call in zeroes if accumulation is not None and accumulation.at_each_pass(call)]
        early = [call.node for call in zeroes if step.accumulates_by_accelerate and call.each_pass
                 and call.order < step.backward[0].order and set(call.context) & set(step.backward[0].context)]
        if early and (unread or (subject.number(ACCELERATED) or 1) > 1):
            yield found("critical", early[0], step.backward[0].node, case="by accelerate",
                        only="several batches are accumulated" if unread else "")
        elif accumulation is not None and each:
            stepped = accumulation.step.node
            yield found("critical", each[0], stepped, case="at each pass", every=script.words(accumulation.every),
                        edits=moved(script, each[0], stepped, script.words(each[0]), after=True))
        elif accumulation is None and step.optimizer_steps and (between := _zeroed_between(step)) is not None:
            yield found("critical", between.node, step.optimizer_steps[0].node)


def _zeroed_between(step: Step) -> StepCall | None:
    """Return a zeroing after the last backward pass and before the first optimizer step, all of them unconditional."""
    passed = max((call.order for call in step.backward if call.each_pass), default=None)
    stepped = min((call.order for call in step.optimizer_steps if call.each_pass), default=None)
    if passed is None or stepped is None or any(not call.each_pass for call in step.backward):
        return None
    return next((call for call in step.methods("zero_grad") if call.each_pass and passed < call.order < stepped), None)


@code_rule_once
def evaluation_keeps_gradients(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The evaluation stores activations that only a backward pass needs."""
    for call in script.calls(".eval") if not script.has_call("torch.set_grad_enabled") else ():
        loop = _evaluation_after(script, call) if not call.args and not call.keywords else None
        if loop is None or _is_without_gradients(script, loop):
            continue
        function = script.function(loop)
        edits = with_line(script, function, "@torch.inference_mode()") if (
            function is not None and not any(script.is_within(other, function) for other in script.training_loops)
            and script.imported.get("torch") == "torch") else ()
        yield found("moderate", call, loop.iter if isinstance(loop, ast.For) else loop, edits=edits)


def _evaluation_after(script: Script, call: ast.Call) -> Loop | None:
    """Return the loop without a backward pass, and with a call of the model, that follows `eval()` in its function."""
    owner = script.words(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    loops = [node for node in ast.walk(script.function(call) or script.tree) if isinstance(node, Loop)]
    return next((loop for loop in loops if loop.lineno > call.lineno
                 and any(script.words(item.func) == owner for item in every(ast.Call, loop))
                 and not any(item.attr == "backward" for item in every(ast.Attribute, loop))), None)


def _is_without_gradients(script: Script, loop: Loop) -> bool:
    callers = [caller for item in script.ancestors(loop) if isinstance(item, FunctionNode) for caller in script.callers(item)]
    return any(is_without_gradients(script, node) for node in (*ast.walk(loop), *callers))


@code_rule_once
def evaluation_mode_left_on(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The loop calls model.eval() and never model.train(), so dropout stays off."""
    for step in training_steps(script):
        for around in _around(script, step):
            switched = _switches(script, around, "eval")
            if not switched or _switches(script, around, "train"):
                continue
            owner = owner_of(switched[0]) or switched[0]
            made = {kind.removesuffix("()") for kind in script.kinds.get(last_name(owner), ()) if not kind.startswith("torch.")}
            own = made <= set(script.classes) if made else not loads_weights(script)
            if script.classes and own and not script.says("ropout", "BatchNorm"):
                continue                                 # a network without any
            model = script.words(owner) if owner is not switched[0] else "model"
            elsewhere = script.function(switched[0]) is not script.function(around) or around is step.node
            edits = () if elsewhere else with_line(script, around.body[0], f"{model}.train()")
            yield found("moderate", switched[0], edits=edits)


@code_rule_once
def left_as_loaded(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A pretrained model is trained as it was loaded, which is without dropout."""
    path = str(subject.value("model.path") or "").lower()
    loads = [call for call in script.calls(".from_pretrained") if script.name(call).startswith("transformers.")
             and not any(word in script.name(call) for word in ("okenizer", "Config", "Processor", "FeatureExtractor"))]
    trains = any(isinstance(node, ast.Attribute) and node.attr == "train" for node in ast.walk(script.tree))
    if len(loads) != 1 or trains or not any(word in path for word in WITH_DROPOUT) or script.says(
            "deepspeed", "get_peft_model", "dropout") or not script.training_loops or "trainer" in script.sections:
        return
    yield found("moderate", loads[0], script.training_loops[0], path=path)


def _around(script: Script, step: Step) -> list[Loop]:
    """Return a step's loop, the loops around it, and those around the calls of the function that it stands in."""
    inner = [step.node, *script.loops(step.node)] if isinstance(step.node, Loop) else []
    outer = [loop for caller in script.callers(script.function(step.node)) for loop in script.loops(caller)]
    return list(dict.fromkeys([*inner, *outer]))


def _switches(script: Script, loop: Loop, name: str) -> list[ast.Call]:
    """Return the calls of `.eval()`, or of `.train()` with or without an argument, that the loop reaches."""
    return [node for node in script.reached(*loop.body)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
            and len(node.args) <= (name == "train") and not node.keywords]


@code_rule
def outside_the_epoch_loop(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Evaluation or checkpoints use the epoch's number but stand after the loop over epochs."""
    for loop in script.every(ast.For):
        # a loop by a counter, around the training loop or around a call of the function that has it
        if not isinstance(loop.target, ast.Name) or not any(
                inner in script.training_loops for inner in script.reached(*loop.body)):
            continue
        block = block_of(script, loop)
        after = block[block.index(loop) + 1:]
        late = [node for node in after if _belongs_inside(script, node, loop.target.id)]
        if not late:
            continue
        between = after[after.index(late[0]):after.index(late[-1]) + 1]
        deeper = indent(script, loop.body[0])[len(indent(script, late[0])):]
        yield found("critical", *(node.test if isinstance(node, ast.If) else node for node in late), loop.target,
                    edits=indented(script, between, deeper), counter=script.words(loop.target),
                    lines=" and ".join(f"line {node.lineno}" for node in late[:3]), use="uses" if len(late) == 1 else "use")


def _belongs_inside(script: Script, node: ast.stmt, counter: str) -> bool:
    """Return whether a statement after the loop over epochs evaluates or saves at every so many epochs."""
    keeps = any(isinstance(item, ast.Call) and script.name(item.func) != ".eval"
                and any(word in script.name(item.func).rpartition(".")[2].lower() for word in KEEPING)
                for item in script.reached(node))
    return keeps and any(interval(item.test) is not None and counter in names_in(item.test) for item in every(ast.If, node))
