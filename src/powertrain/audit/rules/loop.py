"""Rules on a script's own training loop: what it waits for, its evaluation, and what stands outside of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from powertrain.audit.code_editing import block_of, indent, indented, with_line, with_text, without
from powertrain.audit.editing import set_to
from powertrain.audit.rules.base import Findings, found, of_script
from powertrain.audit.script import Loop, Script
from powertrain.audit.steps import Step, interval, is_rare, step_code, training_steps
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records.findings import UNMEASURED, Edit, Expected, rule

ANOMALIES = ("torch.autograd.set_detect_anomaly", "torch.autograd.anomaly_mode.set_detect_anomaly",
             "torch.autograd.detect_anomaly")
WAITING = (".item", ".tolist", ".numpy")
EMPTYING = ("torch.cuda.empty_cache", "torch.mps.empty_cache", "torch.xpu.empty_cache", "gc.collect", ".empty_cache")
WITHOUT_GRADIENTS = ("torch.no_grad", "torch.inference_mode", "torch.set_grad_enabled", "torch.autograd.no_grad")
KEEPING = ("save", "checkpoint", "valid", "eval")            # in the names of functions that evaluate or save
BENCHMARK, DETERMINISTIC = "training.cudnn_benchmark", "training.cudnn_deterministic"


def whole(statements: list[ast.stmt]) -> bool:
    return all(isinstance(statement, ast.Expr) for statement in statements)


@rule("features: F16 (`.item()` waits for the device); documentation: torch.Tensor.item")
@of_script
def item_each_step(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The loop waits for the device at every step, to read a number."""
    for step in step_code(script):
        waits = [call for call in step.named(*WAITING) if call.each_pass]
        waits += [call for call in step.named("float") if call.each_pass and _is_loss(call.node)]
        if not waits:
            continue
        alone = where.hardware is not None and where.hardware.device == "cpu"
        yield found("low" if alone else "moderate", f"{step.script.words(waits[0].node)} copies a number from the device. "
                    "Python waits until all queued work is done, and the device then has nothing queued" + (
                    "; a CPU has no queue, and little is lost" if alone else ""),
                    *(step.script.evidence(call.node) for call in waits[:4]), expected=UNMEASURED,
                    cure="Add losses up on the device (`total += loss.detach()`), and read them every so many steps",
                    edits=tuple(edit for call in waits for edit in _kept_on_device(step.script, call.node)))


def _is_loss(node: ast.Call) -> bool:
    return len(node.args) == 1 and isinstance(node.args[0], ast.Name) and "loss" in node.args[0].id


def _kept_on_device(script: Script, node: ast.Call) -> tuple[Edit, ...]:
    """`total += loss.item()` as `total += loss.detach()`; elsewhere a number may be needed."""
    if isinstance(script.parents[node], ast.AugAssign) and isinstance(node.func, ast.Attribute) and not node.args:
        return with_text(script, node, f"{script.words(node.func.value)}.detach()")
    return ()


@rule("documentation: torch.cuda.synchronize (waits for all kernels in all streams)")
@of_script
def synchronised_each_step(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The loop synchronises the device at every step, as for a measurement."""
    for step in step_code(script):
        waits = [call for call in step.named("torch.cuda.synchronize", "torch.mps.synchronize") if call.each_pass]
        statements = [step.script.statement(call.node) for call in waits]
        if waits:
            yield found("moderate", "Python prepares no step while it waits, so the device is idle at the beginning of each. "
                        "A measurement needs this, training does not", *(step.script.evidence(call.node) for call in waits),
                        expected=UNMEASURED, cure="Synchronise only around what is timed",
                        edits=without(step.script, *statements) if whole(statements) else ())


@rule("features: X3 (empty_cache gives PyTorch no memory that it did not have); documentation: torch.cuda.empty_cache",
      gives_way_to=("cache_emptied",))
@of_script
def cache_emptied_in_loop(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The loop empties the allocator's cache or collects garbage."""
    calls = [call for step in step_code(script) for call in step.named(*EMPTYING)]
    often = any(not is_rare(call) for call in calls)
    nodes = [call.node for call in calls] or [node for node in script.calls(*EMPTYING) if _counts_steps(script, node)]
    statements = list(dict.fromkeys(script.statement(node) for node in nodes))
    if nodes:
        yield found("moderate" if often else "low", "This waits for the device and gives memory back that the next step asks "
                    "for again. Memory in use stays in use: it cures neither a leak nor an out-of-memory error",
                    *map(script.evidence, nodes[:4]), expected=UNMEASURED,
                    edits=without(script, *statements) if whole(statements) else (),
                    cure="Remove it; against fragmentation set PYTORCH_ALLOC_CONF=expandable_segments:True",
                    title="the allocator's cache is emptied " + ("at every step" if often else "in the loop"))


def _counts_steps(script: Script, node: ast.AST) -> bool:
    """Whether a node stands under an `if` that counts steps, in a snippet whose loop is somewhere else."""
    return any(interval(condition.test) is not None and "step" in script.words(condition.test).lower()
               for condition in script.conditions(node))


@rule("documentation: torch.autograd.detect_anomaly (\"should be enabled only for debugging\")")
@of_script
def anomaly_detection_on(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Autograd's search for the origin of NaN is on."""
    for call in script.calls(*ANOMALIES):
        given = call.args[0] if call.args else next((item.value for item in call.keywords if item.arg == "mode"), None)
        off = given is not None and not (isinstance(given, ast.Constant) and given.value)
        if off or script.conditions(call):
            continue
        statement = script.statement(call)
        yield found("moderate", "Autograd records a Python traceback for every operation of the forward pass and checks every "
                    "gradient for NaN, which waits for the device", script.evidence(call), expected=UNMEASURED,
                    cure="Use it for debugging only", edits=without(script, statement) if isinstance(statement, ast.Expr) else
                    ())
        return


@rule("documentation: TrainingArguments.full_determinism (\"negatively impacts performance, use only for debugging\")")
def determinism_forced(subject: Subject, where: Circumstances) -> Findings:
    """All kernels are the deterministic, slower ones."""
    key = "training.full_determinism"
    if subject.value(key) is True:
        yield found("low", "torch takes a slower kernel wherever the faster one adds in another order; a seed alone gives the "
                    "same data and weights", subject.settings[key], expected=UNMEASURED, cure="Use it for debugging only",
                    edits=set_to(subject, key, False))


@rule("features: F15; documentation: torch.backends.cudnn.benchmark (\"multiple convolution algorithms\")")
@of_script
def cudnn_benchmark(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """cuDNN searches for the fastest convolution in a model without convolutions."""
    setting = subject.settings.get(BENCHMARK)
    if setting is None or setting.value is not True or script.says("Conv", "conv"):
        return
    contrary = subject.settings.get(DETERMINISTIC)
    forced = contrary if contrary is not None and contrary.value is True else None
    statement = next((node for node in script.nodes if isinstance(node, ast.Assign) and node.lineno == setting.place.line
                      and "benchmark" in script.words(node)), None)
    yield found("low", "It chooses between algorithms for convolutions, and this script has none: attention and linear layers "
                "do not use it" + ("; deterministic=True forbids the choice anyway" if forced else ""), setting, forced,
                expected=Expected("nothing changes", "fact: there is no convolution"), cure="Remove it",
                edits=without(script, statement) if statement is not None else ())


# ------------------------------------------------------------------------------------------------ evaluation


@rule("documentation: torch.inference_mode; fact: without it every activation is kept until the loss is dropped")
@of_script
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
        yield found("moderate", "Without torch.no_grad() each batch's activations are stored as in training: the evaluation "
                    "takes as much memory, and time to write it", script.evidence(call),
                    script.evidence(loop.iter if isinstance(loop, ast.For) else loop), expected=UNMEASURED,
                    cure="Evaluate under torch.inference_mode()", edits=edits)
        return


def _evaluation_after(script: Script, call: ast.Call) -> Loop | None:
    """Return the loop without a backward pass, and with a call of the model, that follows `eval()` in its function."""
    owner = script.words(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    for node in ast.walk(script.function(call) or script.tree):
        inner = list(ast.walk(node)) if isinstance(node, Loop) and node.lineno > call.lineno else []
        if any(isinstance(item, ast.Call) and script.words(item.func) == owner for item in inner) and not any(
                isinstance(item, ast.Attribute) and item.attr == "backward" for item in inner):
            assert isinstance(node, Loop)
            return node
    return None


def _is_without_gradients(script: Script, loop: Loop) -> bool:
    functions = [item for item in script.ancestors(loop) if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
    blocks = [item for item in (*script.ancestors(loop), *ast.walk(loop)) if isinstance(item, ast.With)]
    for caller in script.nodes:
        if isinstance(caller, ast.Call) and script.called(caller) in functions:
            blocks += [item for item in script.ancestors(caller) if isinstance(item, ast.With)]
    used = [item.context_expr for block in blocks for item in block.items]
    return any(script.name(item) in WITHOUT_GRADIENTS for item in
               (*used, *(decorator for function in functions for decorator in function.decorator_list)))


@rule("documentation: torch.nn.Module.eval (holds until train() is called)")
@of_script
def evaluation_mode_left_on(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The loop calls model.eval() and never model.train(), so dropout stays off."""
    for step in training_steps(script):
        for around in _around(script, step):
            switched = _switches(script, around, "eval")
            if not switched or _switches(script, around, "train"):
                continue
            model = script.words(switched[0].func.value) if isinstance(switched[0].func, ast.Attribute) else "model"
            elsewhere = script.function(switched[0]) is not script.function(around) or around is step.node
            yield found("moderate", "eval() switches dropout off until train() is called, and the loop calls no train(): "
                        "regularisation ends with the first evaluation", script.evidence(switched[0]), accuracy="low",
                        cure="Call model.train() at the beginning of every epoch, and after an evaluation within one",
                        edits=() if elsewhere else with_line(script, around.body[0], f"{model}.train()"))
            return


def _around(script: Script, step: Step) -> list[Loop]:
    """Return a step's loop, the loops around it, and those around the calls of the function that it stands in."""
    found = [step.node, *script.loops(step.node)] if isinstance(step.node, Loop) else []
    function = script.function(step.node)
    for node in script.nodes:
        if function is not None and isinstance(node, ast.Call) and script.called(node) is function:
            found += [outer for outer in script.loops(node) if outer not in found]
    return found


def _switches(script: Script, loop: Loop, name: str) -> list[ast.Call]:
    """Return the calls of `.eval()`, or of `.train()` with or without an argument, that the loop reaches."""
    return [node for statement in loop.body for node in (statement, *script.reached(statement))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
            and len(node.args) <= (name == "train") and not node.keywords]


@rule("features: 1.3 (the indentation bug of document 003)")
@of_script
def outside_the_epoch_loop(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Evaluation or checkpoints use the epoch's number but stand after the loop over epochs."""
    for loop in _epoch_loops(script):
        block = block_of(script, loop)
        after = block[block.index(loop) + 1:]
        late = [node for node in after if _belongs_inside(script, node, loop)]
        if not late:
            continue
        between = after[after.index(late[0]):after.index(late[-1]) + 1]
        deeper = indent(script, loop.body[0])[len(indent(script, late[0])):]
        lines = " and ".join(f"line {node.lineno}" for node in late[:3])
        yield found("critical", f"{lines} {'uses' if len(late) == 1 else 'use'} {script.words(loop.target)} after its loop, "
                    "and so runs only once, at the end. A run that stops earlier has saved nothing, and nobody sees it "
                    "overfit", *(script.evidence(node.test if isinstance(node, ast.If) else node) for node in late),
                    script.evidence(loop.target), cure="Move these lines into the loop over epochs",
                    edits=indented(script, between, deeper))


def _epoch_loops(script: Script) -> Iterator[ast.For]:
    """Yield loops by a counter, around the training loop or around a call of the function that has it."""
    for node in script.nodes:
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and any(
                inner in script.training_loops for statement in node.body for inner in (statement, *script.reached(statement))):
            yield node


def _belongs_inside(script: Script, node: ast.stmt, loop: ast.For) -> bool:
    """Whether a statement evaluates or saves at every so many epochs, after their loop has ended."""
    counter = loop.target.id if isinstance(loop.target, ast.Name) else ""
    return _keeps(script, [node]) and any(
        isinstance(item, ast.If) and interval(item.test) is not None
        and any(isinstance(name, ast.Name) and name.id == counter for name in ast.walk(item.test)) for item in ast.walk(node))


def _keeps(script: Script, body: list[ast.stmt]) -> bool:
    return any(isinstance(item, ast.Call) and any(word in script.name(item.func).rpartition(".")[2].lower() for word in KEEPING)
               and script.name(item.func) != ".eval" for statement in body for item in (statement, *script.reached(statement)))
