"""Rules on optimizers and gradients: which update is used, and whether gradients reach it as they should."""

from __future__ import annotations

import ast

from powertrain.audit.edits import moved, set_to, with_argument, with_line, with_text
from powertrain.audit.reckoning import at_most, reckonable
from powertrain.audit.rules.base import Findings, code_rule, found, rule
from powertrain.audit.script import Script, last_name
from powertrain.audit.steps import Step, StepCall, training_steps
from powertrain.audit.subject import Circumstances, Subject
from powertrain.cost.work import step_work
from powertrain.records.findings import UNMEASURED, Expected

OPTIM, CLIPPING, FUSED = "training.optim", "training.max_grad_norm", "adamw_torch_fused"
REMOVED = ("adamw_hf", "adamw_apex_fused")
SINCE = (5,)                                 # transformers
ZEROED_BY_OTHERS = (".backward_step", "deepspeed.initialize", "lightning.Fabric", "lightning.fabric.Fabric")


@rule("technique: fused_adamw; features: F4 (without it torch uses foreach, which is no Python loop either)")
def optimizer_not_fused(subject: Subject, where: Circumstances) -> Findings:
    """AdamW runs in many small kernels, although torch has a fused one."""
    own, script = subject.settings.get("optimizer.name"), subject.script
    if subject.value(OPTIM) == "adamw_torch":
        asked, case, edits = subject.settings[OPTIM], "", set_to(subject, OPTIM, FUSED)
    elif own is not None and str(own.value).rpartition(".")[2].lower() in ("adam", "adamw"):
        if subject.on("optimizer.fused") or subject.is_unread("optimizer.fused"):
            return
        call = script.sections.get("optimizer") if script is not None else None
        edits = with_argument(script, call, "fused", "True") if script is not None and call is not None else ()
        asked, case = own, "own"
    else:
        return
    yield found("low", asked, edits=edits, expected=_bound(subject, where), case=case,
                adapters=subject.method in ("lora", "qlora"))


def _bound(subject: Subject, where: Circumstances) -> Expected:
    """Return Amdahl's bound from the optimizer's part of the bytes that a step moves."""
    facts = reckonable(where)
    if facts is None:
        return UNMEASURED
    work = step_work(facts.model, [[facts.data.block] * facts.data.train_batch_size], subject.products_dtype or "fp32")
    share = work.optimizer_bytes / (work.optimizer_bytes + work.gemm_bytes + work.elementwise_bytes)
    return at_most(share, "the optimizer's part of the bytes that a step moves")


@rule("documentation: OptimizerNames (transformers 5.23)")
def optimizer_removed(subject: Subject, where: Circumstances) -> Findings:
    """The run asks for an optimizer that its trainer no longer has."""
    if subject.value(OPTIM) in REMOVED and (where.version("transformers") or SINCE) >= SINCE:
        yield found("critical", subject.settings[OPTIM], edits=set_to(subject, OPTIM, FUSED), asked=subject.value(OPTIM))


@rule("features: F25 (clipping is about steadiness and costs hardly any time)")
def clipping_off(subject: Subject, where: Circumstances) -> Findings:
    """Gradient clipping is switched off."""
    if CLIPPING in subject.settings and subject.number(CLIPPING) == 0:
        yield found("low", subject.settings[CLIPPING], edits=set_to(subject, CLIPPING, 1.0),
                    fp16=subject.products_dtype == "fp16")


@code_rule("documentation: torch.nn.utils.clip_grad_norm_ (changes .grad in place: after backward, before the step)")
def clip_without_effect(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients are clipped before they exist or after the optimizer has used them."""
    for step in training_steps(script):
        clips, passes, steps = step.clipping, step.backward, step.optimizer_steps
        works = any(call.order < clip.order < later.order for clip in clips for call in passes for later in steps)
        if clips and passes and steps and not works:
            statement = script.statement(clips[0].node)
            edits = moved(script, statement, script.statement(steps[0].node), script.words(statement)) if isinstance(
                statement, ast.Expr) else ()
            early = clips[0].order < min(call.order for call in passes)
            yield found("critical", script.evidence(clips[0].node), script.evidence(steps[0].node), edits=edits,
                        when="before backward() has made them" if early else "after the optimizer has used them")


@code_rule("documentation: torch.optim.Optimizer.zero_grad; fact: accumulation adds in .grad until the optimizer's step")
def gradients_cleared_early(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients are set to zero before the optimizer has used them."""
    for step in training_steps(script):
        accumulation = None if step.accumulates_by_accelerate else step.accumulation
        each = [call.node for call in step.zeroing if accumulation is not None and accumulation.at_each_pass(call)]
        if accumulation is not None and each:
            stepped = accumulation.step.node
            yield found("critical", script.evidence(each[0]), script.evidence(stepped), case="at each pass",
                        every=script.words(accumulation.every), edits=moved(script, script.statement(each[0]),
                        script.statement(stepped), script.words(each[0]), after=True))
        elif accumulation is None and step.optimizer_steps and (between := _zeroed_between(step)) is not None:
            yield found("critical", script.evidence(between.node), script.evidence(step.optimizer_steps[0].node))


def _zeroed_between(step: Step) -> StepCall | None:
    """Return a zeroing after the last backward pass and before the first optimizer step, all of them unconditional."""
    passed = max((call.order for call in step.backward if call.each_pass), default=None)
    stepped = min((call.order for call in step.optimizer_steps if call.each_pass), default=None)
    if passed is None or stepped is None or any(not call.each_pass for call in step.backward):
        return None
    return next((call for call in step.zeroing if call.each_pass and passed < call.order < stepped), None)


@code_rule("documentation: torch.Tensor.backward (accumulates into .grad)")
def gradients_not_zeroed(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Nothing sets the gradients back, so they add up over the whole run."""
    names = {node.attr for node in script.nodes if isinstance(node, ast.Attribute) and (
        node.attr == "zero_grad" or (node.attr == "grad" and isinstance(node.ctx, ast.Store)))}
    if names or script.has_call(*ZEROED_BY_OTHERS):
        return
    for step in training_steps(script):
        own = [call for call in step.optimizer_steps if call.owner is not None and not _is_a_wrapper(script, call.owner)]
        if step.backward and own:
            last, owner = own[-1].node, own[-1].owner or own[-1].node
            zeroed = script.words(last.args[0] if step.is_scaler(owner) and last.args else owner)
            yield found("critical", script.evidence(last), edits=with_line(
                script, script.statement(last), f"{zeroed}.zero_grad(set_to_none=True)", after=True))
            return


def _is_a_wrapper(script: Script, owner: ast.AST) -> bool:
    """Whether an optimizer is of a class that is not known, of the script itself or a package: its step may zero gradients."""
    made = script.kinds.get(last_name(owner), frozenset())
    return bool(made) and all(name.rpartition(".")[2][:1].isupper() for name in made) and not any(
        name.startswith(("torch.", "bitsandbytes.", "transformers.")) for name in made)


@code_rule("fact: backward() sums over micro-batches, and the loss of each is a mean of its own")
def accumulation_not_divided(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients of several micro-batches are summed where their mean was meant."""
    for step in training_steps(script):
        accumulation = step.accumulation
        if accumulation is None or step.accumulates_by_accelerate or _divides(step):
            continue
        passed, every = step.backward[0].node, script.words(accumulation.every)
        edits = with_text(script, passed.func.value, f"({script.words(passed.func.value)} / {every})") if (
            isinstance(passed.func, ast.Attribute) and isinstance(passed.func.value, ast.Name) and not passed.args) else ()
        yield found("moderate", script.evidence(passed), script.evidence(accumulation.step.node), edits=edits, every=every)


def _divides(step: Step) -> bool:
    """Whether a step divides anything: a loss by the number of passes or by tokens, or the gradients afterwards."""
    return any((isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.Mult))) or
               (isinstance(node, ast.Call) and step.script.name(node).endswith((".div_", ".div", ".mul_")))
               for node in step.script.reached_from(step.node.body))


@code_rule("features: F28 (equal batches train equally only if the loss counts tokens); documentation: transformers #34191",
           gives_way_to=("accumulation_not_divided",))
def mean_of_means(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Micro-batches of unequal token counts have equal weight in a step."""
    padded = subject.value("data.padding") not in (None, False, "max_length", "do_not_pad")
    for step in training_steps(script) if padded and not script.says("num_items", "n_tokens") else ():
        every = ast.unparse(step.accumulation.every) if step.accumulation is not None else None
        divided = next((node for node in script.reached_from(step.node.body)
                        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Div)
                        and ast.unparse(node.right if isinstance(node, ast.BinOp) else node.value) == every), None)
        if divided is not None:
            yield found("low", script.evidence(divided), subject.settings.get("data.padding"))
