"""Rules on optimizers and gradients: which update is used, and whether gradients reach it as they should."""

from __future__ import annotations

import ast

from powertrain.audit.code_editing import with_argument, with_line, with_text, without
from powertrain.audit.editing import set_to
from powertrain.audit.reckoning import at_most, reckonable
from powertrain.audit.resolved import is_unread, method, number, products_dtype
from powertrain.audit.rules.base import STARTS, Findings, found, of_script
from powertrain.audit.script import Script
from powertrain.audit.steps import Step, StepCall, training_steps
from powertrain.audit.subject import Circumstances, Subject
from powertrain.cost.work import step_work
from powertrain.records.findings import UNMEASURED, Edit, Expected, rule

OPTIM, CLIPPING, FUSED = "training.optim", "training.max_grad_norm", "adamw_torch_fused"
REMOVED = ("adamw_hf", "adamw_apex_fused")
SINCE = (5,)                                 # transformers
ZEROED_BY_OTHERS = (".backward_step", "deepspeed.initialize", "lightning.Fabric", "lightning.fabric.Fabric")


@rule("technique: fused_adamw; features: F4 (without it torch uses foreach, which is no Python loop either)")
def optimizer_not_fused(subject: Subject, where: Circumstances) -> Findings:
    """AdamW runs in many small kernels, although torch has a fused one."""
    own = subject.settings.get("optimizer.name")
    if subject.value(OPTIM) == "adamw_torch":
        asked, cure, edits = subject.settings[OPTIM], f'Use optim="{FUSED}"', set_to(subject, OPTIM, FUSED)
    elif own is not None and str(own.value).rpartition(".")[2].lower() in ("adam", "adamw"):
        if subject.on("optimizer.fused") or is_unread(subject, "optimizer.fused"):
            return
        script = subject.script
        call = script.sections.get("optimizer") if script is not None else None
        edits = with_argument(script, call, "fused", "True") if script is not None and call is not None else ()
        asked, cure = own, "Pass fused=True to AdamW"
    else:
        return
    little = ". Adapters have few weights to update" if method(subject) in ("lora", "qlora") else ""
    yield found("low", "The update takes several kernels instead of one, and torch's foreach version needs one more copy of "
                f"the trained weights at its peak{little}", asked, expected=_bound(subject, where), cure=cure, edits=edits,
                words=("techniques.fused_adamw=on",))


def _bound(subject: Subject, where: Circumstances) -> Expected:
    """Return Amdahl's bound from the optimizer's part of the bytes that a step moves."""
    facts = reckonable(where)
    if facts is None:
        return UNMEASURED
    work = step_work(facts.model, [[facts.data.block] * facts.data.train_batch_size], products_dtype(subject) or "fp32")
    share = work.optimizer_bytes / (work.optimizer_bytes + work.gemm_bytes + work.elementwise_bytes)
    return at_most(share, "the optimizer's part of the bytes that a step moves")


@rule("documentation: OptimizerNames (transformers 5.23)")
def optimizer_removed(subject: Subject, where: Circumstances) -> Findings:
    """The run asks for an optimizer that its trainer no longer has."""
    version = where.version("transformers")
    if subject.value(OPTIM) in REMOVED and (version is None or version >= SINCE):
        yield found("critical", f"transformers 5 raises on optim={subject.value(OPTIM)!r}", subject.settings[OPTIM],
                    expected=STARTS, cure=f"Use {FUSED}", edits=set_to(subject, OPTIM, FUSED),
                    words=("techniques.fused_adamw=on",))


@rule("features: F25 (clipping is about steadiness and costs hardly any time)")
def clipping_off(subject: Subject, where: Circumstances) -> Findings:
    """Gradient clipping is switched off."""
    if CLIPPING in subject.settings and number(subject, CLIPPING) == 0:
        yield found("low", "One unusual batch may undo many steps" + (", in fp16 more easily" if products_dtype(subject) ==
                    "fp16" else ""), subject.settings[CLIPPING], cure="Clip at a norm of 1",
                    edits=set_to(subject, CLIPPING, 1.0), words=("max_grad_norm=1.0",))


@rule("documentation: torch.nn.utils.clip_grad_norm_ (changes .grad in place: after backward, before the step)")
@of_script
def clip_without_effect(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients are clipped before they exist or after the optimizer has used them."""
    for step in training_steps(script):
        clips, stepped = step.clipping, step.optimizer_steps
        if not clips or not stepped or not step.backward:
            continue
        if any(call.order < clip.order < later.order for clip in clips for call in step.backward for later in stepped):
            continue
        early = clips[0].order < min(call.order for call in step.backward)
        yield found("critical", "The gradients are clipped " + ("before backward() has made them" if early else
                    "after the optimizer has used them") + ": a spike of the loss goes straight into the weights",
                    script.evidence(clips[0].node), script.evidence(stepped[0].node), accuracy="low",
                    cure="Clip between backward() and the optimizer's step", edits=_moved(script, clips[0], stepped[0]))


def _moved(script: Script, clip: StepCall, stepped: StepCall) -> tuple[Edit, ...]:
    statement, target = script.statement(clip.node), script.statement(stepped.node)
    if not isinstance(statement, ast.Expr):
        return ()
    edits = (*without(script, statement), *with_line(script, target, script.words(statement)))
    return edits if len(edits) == 2 else ()


@rule("documentation: torch.optim.Optimizer.zero_grad; fact: accumulation adds in .grad until the optimizer's step")
@of_script
def gradients_cleared_early(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients are set to zero before the optimizer has used them."""
    for step in training_steps(script):
        accumulation = None if step.accumulates_by_accelerate else step.accumulation
        each = [call for call in step.zeroing if accumulation is not None and accumulation.at_each_pass(call)]
        if accumulation is not None and each:
            stepped, every = accumulation.step, script.words(accumulation.every)
            edits = (*without(script, script.statement(each[0].node)),
                     *with_line(script, script.statement(stepped.node), script.words(each[0].node), after=True))
            yield found("critical", f"The optimizer steps every {every} micro-batches, but the gradients are zeroed at each. "
                        "All but the last micro-batch are computed for nothing", script.evidence(each[0].node),
                        script.evidence(stepped.node), breaking="low",
                        cure="Zero the gradients right after the optimizer's step, under the same condition",
                        edits=edits if len(edits) == 2 else (), title="gradients are zeroed at every micro-batch")
        elif accumulation is None and step.optimizer_steps and (between := _zeroed_between(step)) is not None:
            yield found("critical", "The gradients are zeroed between backward() and the optimizer's step: nothing is "
                        "trained", script.evidence(between.node), script.evidence(step.optimizer_steps[0].node), breaking="low",
                        cure="Zero the gradients before backward(), or after the optimizer's step",
                        title="gradients are zeroed before they are used")


def _zeroed_between(step: Step) -> StepCall | None:
    """Return a zeroing after the last backward pass and before the first optimizer step, all of them unconditional."""
    passed = max((call.order for call in step.backward if call.each_pass), default=None)
    stepped = min((call.order for call in step.optimizer_steps if call.each_pass), default=None)
    if passed is None or stepped is None or any(not call.each_pass for call in step.backward):
        return None
    return next((call for call in step.zeroing if call.each_pass and passed < call.order < stepped), None)


@rule("documentation: torch.Tensor.backward (accumulates into .grad)")
@of_script
def gradients_not_zeroed(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Nothing sets the gradients back, so they add up over the whole run."""
    names = {node.attr for node in script.nodes if isinstance(node, ast.Attribute) and (
        node.attr == "zero_grad" or (node.attr == "grad" and isinstance(node.ctx, ast.Store)))}
    if names or script.has_call(*ZEROED_BY_OTHERS):
        return
    for step in training_steps(script):
        own = [call for call in step.optimizer_steps if call.owner is not None and not _is_a_wrapper(script, call.owner)]
        if step.backward and own:
            last = own[-1]
            line = "{}.zero_grad(set_to_none=True)"
            owner = script.words(last.node.args[0] if step.is_scaler(last.owner or last.node) and last.node.args
                                 else last.owner or last.node)
            yield found("critical", "backward() adds to the gradients that are there, so every step moves by the sum of all "
                        "gradients since the beginning", script.evidence(last.node), breaking="low",
                        cure="Zero the gradients after each optimizer step",
                        edits=with_line(script, script.statement(last.node), line.format(owner), after=True))
            return


def _is_a_wrapper(script: Script, owner: ast.AST) -> bool:
    """Whether an optimizer is of a class that is not known, of the script itself or a package: its step may zero gradients."""
    last = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    made = script.kinds.get(last, frozenset())
    return bool(made) and all(name.rpartition(".")[2][:1].isupper() for name in made) and not any(
        name.startswith(("torch.", "bitsandbytes.", "transformers.")) for name in made)


@rule("fact: backward() sums over micro-batches, and the loss of each is a mean of its own")
@of_script
def accumulation_not_divided(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients of several micro-batches are summed where their mean was meant."""
    for step in training_steps(script):
        accumulation = step.accumulation
        if accumulation is None or step.accumulates_by_accelerate or _divides(step):
            continue
        passed, every = step.backward[0].node, script.words(accumulation.every)
        edits = with_text(script, passed.func.value, f"({script.words(passed.func.value)} / {every})") if (
            isinstance(passed.func, ast.Attribute) and isinstance(passed.func.value, ast.Name) and not passed.args) else ()
        yield found("moderate", f"The gradient of a step is the sum over {every} micro-batches: {every} times as large as the "
                    "mean. Clipping cuts it more often than was meant, and SGD's step is as many times too long",
                    script.evidence(passed), script.evidence(accumulation.step.node), accuracy="low",
                    cure=f"Divide the loss by {every} before backward()", edits=edits)


def _divides(step: Step) -> bool:
    """Whether a step divides anything: a loss by the number of passes or by tokens, or the gradients afterwards."""
    return any((isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.Mult))) or
               (isinstance(node, ast.Call) and step.script.name(node).endswith((".div_", ".div", ".mul_")))
               for statement in step.node.body for node in (statement, *step.script.reached(statement)))


@rule("features: F28 (equal batches train equally only if the loss counts tokens); documentation: transformers #34191",
      gives_way_to=("accumulation_not_divided",))
@of_script
def mean_of_means(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Micro-batches of unequal token counts have equal weight in a step."""
    padded = subject.value("data.padding") not in (None, False, "max_length", "do_not_pad")
    for step in training_steps(script) if padded else ():
        accumulation = step.accumulation
        if accumulation is None or script.says("num_items", "n_tokens"):
            continue
        every = ast.unparse(accumulation.every)
        divided = next((node for statement in step.node.body for node in (statement, *script.reached(statement))
                        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Div)
                        and ast.unparse(node.right if isinstance(node, ast.BinOp) else node.value) == every), None)
        if divided is not None:
            yield found("low", "Each micro-batch's loss is the mean over its own tokens, and the step is the mean of those "
                        "means. A token of a short example weighs more than one of a long example, and another split of the "
                        "same batch trains differently", script.evidence(divided), subject.settings.get("data.padding"),
                        accuracy="low", difficulty="medium",
                        cure="Sum the losses of the tokens, and divide by the trained tokens of the whole step")
