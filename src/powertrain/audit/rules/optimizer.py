"""Rules on the update of the weights: gradients, optimizer, learning rate, schedule, and the intervals of a run."""

import ast
import math
from dataclasses import replace

from powertrain.audit.edits import Edits, indent, indented, moved, set_to, with_argument, with_line, with_text
from powertrain.audit.rules.base import Findings, at_most, code_rule, code_rule_once, found, reckonable, rule
from powertrain.audit.script import Script
from powertrain.audit.steps import SCHEDULERS, Step, never_accumulates, outermost, training_steps
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, argument, hides_arguments, last_name, names_in, owner_of
from powertrain.cost.work import forward_flops, step_work, training_flops
from powertrain.records import Facts
from powertrain.records.findings import UNMEASURED, Expected, Severity

OPTIM, CLIPPING, FUSED = "training.optim", "training.max_grad_norm", "adamw_torch_fused"
ACCELERATED = "accelerate.gradient_accumulation_steps"       # whose backward divides by them
REMOVED = ("adamw_hf", "adamw_apex_fused")
SINCE = (5,)                                 # transformers
ZEROED_BY_OTHERS = (".backward_step", "deepspeed.initialize", "lightning.Fabric", "lightning.fabric.Fabric")
RATE, BEST = "training.learning_rate", "training.load_best_model_at_end"
STEPS, LOGGING, SAVING, EVALUATING = ("training.max_steps", "training.logging_steps", "training.save_steps",
                                      "training.eval_steps")
ADAM = ("adam", "ademamix", "lion")          # names of optimizers whose step is about the learning rate itself
ADAPTERS = (4e-5, 2e-2)      # around TRL's and PEFT's 1e-4 .. 2e-4: a rate below is one of full tuning
FULL = (1e-7, 3e-4)          # around 1e-5 .. 5e-5
USUAL_RATE = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5}
BESIDE = ("training.per_device_train_batch_size", "training.num_train_epochs", "training.output_dir")
REWARDING = tuple(f"{name}Trainer" for name in ("GRPO", "PPO", "RLOO", "OnlineDPO", "DPO", "KTO", "ORPO", "CPO", "Reward"))
FEWEST, SHORT_RUN = 10, 200  # steps of a run: of which intervals say anything, below which each line of the log is wanted
MOST_WARMUP, USUAL_WARMUP = 0.5, 0.03        # of the run
BUDGET = 0.02                # of the run's time, for what is not training
MUCH = 0.05                  # of it; less is within what equal runs differ by
NEVER = {"eval": "nothing is evaluated", "logging": "no loss is logged", "save": "nothing is saved"}
AT_END = (5,)                # transformers, which evaluates once more when a run ends
LENGTHS = ("num_training_steps", "T_max", "total_steps", "total_iters")     # arguments that say how long a schedule is


@rule
def optimizer_not_fused(subject: Subject, where: Circumstances) -> Findings:
    """AdamW runs in many small kernels, although torch has a fused one."""
    own, script = subject.settings.get("optimizer.name"), subject.script
    if subject.value(OPTIM) == "adamw_torch":
        asked, case, edits = OPTIM, "", set_to(subject, OPTIM, FUSED)
    elif own is not None and str(own.value).rpartition(".")[2].lower() in ("adam", "adamw"):
        if subject.on("optimizer.fused") or subject.is_unread("optimizer.fused"):
            return
        call = script.sections.get("optimizer") if script is not None else None
        edits = with_argument(script, call, "fused", "True") if script is not None and call is not None else ()
        asked, case = "optimizer.name", "own"
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


@rule
def optimizer_removed(subject: Subject, where: Circumstances) -> Findings:
    """The run asks for an optimizer that its trainer no longer has."""
    if subject.value(OPTIM) in REMOVED and (where.version("transformers") or SINCE) >= SINCE:
        yield found("critical", OPTIM, edits=set_to(subject, OPTIM, FUSED), asked=subject.value(OPTIM))


@rule
def clipping_off(subject: Subject, where: Circumstances) -> Findings:
    """Gradient clipping is switched off."""
    if CLIPPING in subject.settings and subject.number(CLIPPING) == 0:
        yield found("low", CLIPPING, edits=set_to(subject, CLIPPING, 1.0), fp16=subject.products_dtype == "fp16")


@code_rule
def clip_without_effect(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients are clipped before they exist or after the optimizer has used them."""
    for step in training_steps(script):
        clips, passes, steps = step.clipping, step.backward, step.optimizer_steps
        works = any(call.order < clip.order < later.order for clip in clips for call in passes for later in steps)
        if clips and passes and steps and not works:
            statement = script.statement(clips[0].node)
            edits = moved(script, statement, steps[0].node, script.words(statement)) if isinstance(statement, ast.Expr) else ()
            early = clips[0].order < min(call.order for call in passes)
            yield found("critical", clips[0].node, steps[0].node, edits=edits,
                        when="before backward() has made them" if early else "after the optimizer has used them")


@code_rule_once
def gradients_not_zeroed(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients are not set back before the next step, so they add up."""
    zeroes = [node for node in script.every(ast.Attribute)
              if node.attr == "zero_grad" or (node.attr == "grad" and isinstance(node.ctx, ast.Store))]
    for step in training_steps(script) if not script.has_call(*ZEROED_BY_OTHERS) else ():
        before = set(script.loops(step.node)) if isinstance(step.node, ast.For) else set()
        chosen = names_in(step.node.target) if isinstance(step.node, ast.For) else set()
        if zeroes and not all(step.node not in script.loops(node) and before & {*script.loops(node)} for node in zeroes):
            continue                                     # each is in an outer loop alone
        own = [call for call in step.optimizer_steps if call.owner is not None and not _is_a_wrapper(script, call.owner)]
        seldom = bool(zeroes and own) and (any(not call.every_step for call in own) or bool(chosen & names_in(own[-1].node)))
        if step.backward and own and not seldom:
            last, owner = own[-1].node, own[-1].owner or own[-1].node
            zeroed = script.words(last.args[0] if step.is_scaler(owner) and last.args else owner)
            since = f"the call in line {script.place(zeroes[0]).line}" if zeroes else "the beginning"
            yield found("critical", last, *zeroes[:1], since=since, edits=with_line(
                script, last, f"{zeroed}.zero_grad(set_to_none=True)", after=True))


def _is_a_wrapper(script: Script, owner: ast.AST) -> bool:
    """Return whether an optimizer's class is the script's or an unknown package's, so that its step may zero gradients."""
    made = script.kinds.get(last_name(owner), frozenset())
    return bool(made) and all(name.rpartition(".")[2][:1].isupper() for name in made) and not any(
        name.startswith(("torch.", "bitsandbytes.", "transformers.")) for name in made)


@code_rule_once
def rate_left_out(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A pretrained model is trained whole, at the rate that torch's Adam has where none is set."""
    for call in script.calls("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.adamw.AdamW"):
        first = argument(call, "params", 0)
        model = owner_of(first) if isinstance(first, ast.Call) and last_name(first.func) == "parameters" else None
        made = script.kinds.get(last_name(model), frozenset()) if model is not None else frozenset()
        loaded = bool(made) and all(kind.startswith("transformers.") and "from_pretrained" in kind for kind in made)
        given = argument(call, "lr", 1) is not None or hides_arguments(call) or script.says("param_groups", "OneCycleLR")
        if loaded and not given and not subject.has_adapters and not script.says("requires_grad", "PeftModel", "lora"):
            yield found("critical", call)


@code_rule
def accumulation_never_begun(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Accelerate is told to accumulate gradients, and the loop never does."""
    times, batch = int(subject.number(ACCELERATED) or 1), subject.examples_per_step
    if times > 1 and never_accumulates(script):
        step = training_steps(script)[0]
        owner = step.backward[0].owner or step.node
        divided = script.is_made_by(owner, "Accelerator")
        yield found("moderate", ACCELERATED, step.backward[0].node, step.optimizer_steps[0].node, times=times, divided=divided,
                    batch=batch, meant=batch and batch * times, edits=_accumulated(script, step, owner) if divided else ())


def _accumulated(script: Script, step: Step, accelerator: ast.AST) -> Edits:
    """Return the edit that puts the loop's body under `accelerator.accumulate`, where the prepared model has one name."""
    prepared = {given.id for call in script.calls(".prepare") for given in call.args if isinstance(given, ast.Name)}
    models = prepared & {script.words(call.node.func) for call in step.calls}
    inner, deeper = indent(script, step.node.body[0]), len(indent(script, step.node))
    if len(models) != 1 or len(inner) <= deeper or not script.is_within(accelerator, step.node):
        return ()
    return tuple(replace(edit, text=f"{inner}with {script.words(accelerator)}.accumulate({models.pop()}):\n{edit.text}")
                 for edit in indented(script, step.node.body, inner[deeper:]))


@code_rule
def accumulation_not_divided(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients of several micro-batches are summed where their mean was meant."""
    for step in training_steps(script):
        accumulation = step.accumulation
        # a division of a loss by the number of passes or by tokens, or of the gradients afterwards
        divides = any((isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.Mult))) or
                      (isinstance(node, ast.Call) and script.name(node).endswith((".div_", ".div", ".mul_")))
                      for node in script.reached(*step.node.body))
        if accumulation is None or step.accumulates_by_accelerate or divides or (subject.number(ACCELERATED) or 1) > 1:
            continue
        passed, every = step.backward[0].node, script.words(accumulation.every)
        edits = with_text(script, passed.func.value, f"({script.words(passed.func.value)} / {every})") if (
            isinstance(passed.func, ast.Attribute) and isinstance(passed.func.value, ast.Name) and not passed.args) else ()
        yield found("moderate", passed, accumulation.step.node, edits=edits, every=every)


@code_rule
def mean_of_means(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Micro-batches of unequal token counts have equal weight in a step."""
    padded = subject.value("data.padding") not in (None, False, "max_length", "do_not_pad")
    for step in training_steps(script) if padded and not script.says("num_items", "n_tokens") else ():
        every = ast.unparse(step.accumulation.every) if step.accumulation is not None else None
        divided = next((node for node in script.reached(*step.node.body)
                        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Div)
                        and ast.unparse(node.right if isinstance(node, ast.BinOp) else node.value) == every), None)
        if divided is not None:
            yield found("low", divided, subject.settings.get("data.padding"))


@rule
def learning_rate_unfit(subject: Subject, where: Circumstances) -> Findings:
    """The learning rate is one of another method: of full tuning with LoRA, or of LoRA with full tuning."""
    how, rate = subject.method, subject.number(RATE)
    optim = str(subject.value("training.optim") or "adamw").lower()
    if how is None or not rate or not any(name in optim for name in ADAM) or _trains_prompts(subject):
        return
    low, high = FULL if how == "full" else ADAPTERS
    if not (low <= rate or _is_of_preferences(subject)) or rate > high:
        usual = USUAL_RATE[how]
        yield found("low" if rate < low else "moderate", RATE, rate=rate, usual=usual,
                    edits=set_to(subject, RATE, usual, "learning_rate", BESIDE),
                    case=f"{'full' if how == 'full' else 'adapters'}, too {'low' if rate < low else 'high'}")


def _trains_prompts(subject: Subject) -> bool:
    """Return whether prompts or prefixes are learned, whose rates are far higher, or Unsloth has its own default."""
    own = ("PrefixTuningConfig", "PromptTuningConfig", *(() if RATE in subject.settings else ("unsloth",)))
    return subject.script is not None and subject.script.says(*own)


def _is_of_preferences(subject: Subject) -> bool:
    """Return whether answers are compared or rewarded, at rates of a tenth and less."""
    return subject.value("objective.name") is not None or subject.trainer.endswith(REWARDING) or \
        subject.value("training.stage") in ("dpo", "kto", "ppo", "rm")


@rule
def warmup_beyond_run(subject: Subject, where: Circumstances) -> Findings:
    """The warm-up takes up most of the run."""
    steps = subject.run_steps(where.data)
    warming = subject.warmup_steps(steps)
    if steps is not None and warming is not None and warming > MOST_WARMUP * steps:
        usual = max(1, round(USUAL_WARMUP * steps))
        yield found("critical" if warming >= steps else "moderate", subject.first_set(
            ("training.warmup_ratio", "training.warmup_steps")), subject.settings.get(STEPS), warming=warming, steps=steps,
            usual=usual, whole=warming >= steps, edits=set_to(subject, "training.warmup_steps", usual))


@rule
def intervals_cost(subject: Subject, where: Circumstances) -> Findings:
    """Evaluation or checkpoints come so often that they take a good part of the run."""
    steps, facts = subject.run_steps(where.data), reckonable(where)
    if steps is not None and steps < FEWEST:
        return
    evaluating, saves = subject.interval_steps("eval", steps), subject.interval_steps("save", steps) == 1
    tokens = _tokens_per_step(subject, facts) if facts else None
    share = _evaluation_share(facts, tokens, evaluating) if facts and tokens and evaluating else None
    saved = SAVING if saves else None
    if share is not None and evaluating is not None and facts is not None and share > BUDGET:
        every = math.ceil(evaluating * share / (1 - share) * (1 - BUDGET) / BUDGET)
        severity: Severity = "low" if not saves and share < MUCH else "moderate"
        yield found(severity, EVALUATING, saved, edits=set_to(subject, EVALUATING, every), saves=saves,
                    expected=at_most(share, "the products of evaluations"), case="reckoned", share=share, every=every,
                    evaluating=evaluating, tokens=facts.data.validation_tokens, budget=BUDGET)
    elif share is None and evaluating == 1:
        yield found("moderate", EVALUATING, saved, saves=saves)
    elif saves:
        yield found("moderate", saved, case="saves")


def _evaluation_share(facts: Facts, step_tokens: float, every: float) -> float:
    """Return the share of the run's products that go into reading the held-out tokens once each `every` steps."""
    block = facts.data.block
    reading = forward_flops(facts.model, [block]) * facts.data.validation_tokens / block
    return reading / (reading + every * training_flops(facts.model, [block]) * step_tokens / block)


def _tokens_per_step(subject: Subject, facts: Facts) -> float | None:
    """Return the tokens of an optimizer step; packed, an example of the batch is a row of max_length tokens."""
    examples, longest = subject.examples_per_step, subject.number("training.max_length")
    if examples is None:
        return None
    return examples * (longest if longest and subject.is_on("training.packing") else facts.data.block)


@rule
def intervals_never_fire(subject: Subject, where: Circumstances) -> Findings:
    """Evaluation, logging or checkpoints are set at intervals longer than the run."""
    steps = subject.run_steps(where.data)
    intervals = {what: subject.interval_steps(what, steps) for what in NEVER} if steps is not None else {}
    never = [what for what, every in intervals.items() if every is not None and steps is not None and every > steps
             and (what != "save" or SAVING in subject.settings)]
    if never and steps is not None:
        new = subject.framework in TRAINERS and (where.version("transformers") or (0,)) >= AT_END
        tenth, ends = max(1, steps // 10), ("save", "eval") if new else ("save",)
        says = [f"{NEVER[what]}{' before its end' * (what in ends)} ({what}_steps={intervals[what]:g})" for what in never]
        yield found("low" if {*never} <= {*ends} else "moderate", *(f"training.{what}_steps" for what in never),
                    subject.settings.get(STEPS), steps=steps, tenth=tenth, never="; ".join(says),
                    words=" ".join(f"{what}_steps={tenth}" for what in never))


@rule
def logging_each_step(subject: Subject, where: Circumstances) -> Findings:
    """The loss is logged at every step."""
    steps = subject.run_steps(where.data)
    if LOGGING in subject.settings and subject.interval_steps("logging", steps) == 1 and (steps or SHORT_RUN + 1) > SHORT_RUN:
        yield found("low", LOGGING, edits=set_to(subject, LOGGING, 10), case="cpu" if where.on_cpu else "")


@rule
def best_checkpoint_intervals(subject: Subject, where: Circumstances) -> Findings:
    """The best checkpoint is wanted, but checkpoints are saved when there is no score."""
    if subject.framework not in TRAINERS or not subject.on(BEST):
        return
    evaluating, saving = subject.effective("training.eval_strategy"), subject.effective("training.save_strategy")
    if None in (evaluating, saving) or saving == "best":
        return
    every, kept = subject.interval_steps("eval", None), subject.interval_steps("save", None)
    if evaluating != saving:
        yield found("critical", BEST, "training.eval_strategy", "training.save_strategy", case="strategies",
                    edits=set_to(subject, "training.eval_strategy", saving), evaluating=evaluating, saving=saving)
    elif every and kept and kept % every:
        multiple = -(-kept // every) * every
        yield found("critical", BEST, EVALUATING, SAVING, edits=set_to(subject, SAVING, int(multiple)), kept=kept, every=every,
                    multiple=multiple)


def made_for(script: Script, step: Step) -> ast.Call | None:
    """Return the call that makes the schedule which a step advances; None where there is no such call or several."""
    names = {script.words(call.owner) for call in step.scheduler_steps if call.owner is not None}
    made = [node.value for node in script.every(ast.Assign) if isinstance(node.value, ast.Call) and script.name(
        node.value).endswith(SCHEDULERS) and any(script.words(target) in names for target in node.targets)]
    return made[0] if len(made) == 1 else None


def length_of(script: Script, made: ast.Call | None) -> ast.expr | None:
    """Return the expression of a schedule's length, where its call has one."""
    if made is None:
        return None
    named = next((item.value for item in made.keywords if item.arg in LENGTHS), None)
    last = script.name(made).rpartition(".")[2]
    place = 2 if "_schedule" in last else 1 if last.startswith("CosineAnnealingLR") else len(made.args)
    return named if named is not None or len(made.args) <= place else made.args[place]


def counts_batches(script: Script, length: ast.AST) -> bool:
    """Return whether a length comes from the number of batches of a loader."""
    return any(isinstance(node, ast.Call) and script.name(node) == "len" for node in script.behind(length))


@code_rule
def scheduler_each_micro_batch(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The learning-rate schedule advances at every micro-batch instead of every optimizer step."""
    for step in training_steps(script):
        accumulation = step.accumulation
        if accumulation is None or step.accumulates_by_accelerate:
            continue
        early = next((call.node for call in step.scheduler_steps if accumulation.at_each_pass(call)), None)
        length = length_of(script, made_for(script, step))
        every, stepped = ast.unparse(accumulation.every), accumulation.step.node
        divided = length is not None and any(isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Div))
                                             and ast.unparse(node.right) == every for node in script.behind(length))
        # a schedule as long as all micro-batches is right
        if early is not None and (length is None or divided or not counts_batches(script, length)):
            edits = moved(script, early, stepped, script.words(early), after=True)
            yield found("critical" if divided else "moderate", early, stepped, edits=edits, every=every)


@code_rule
def schedule_in_other_units(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The schedule's length counts epochs and its steps are batches, or the other way round."""
    for step in training_steps(script):
        around = outermost(script, step.node) if not isinstance(step.node, FunctionNode) else step.node
        over = around.iter if isinstance(around, ast.For) else None
        epochs = over.args[-1] if isinstance(over, ast.Call) and over.args else None
        inside = [call for call in step.scheduler_steps if call.each_pass]
        outside = [call for call in Step(script, around).scheduler_steps if call.every_step] if around is not step.node else []
        made = made_for(script, step if inside else Step(script, around))
        length = length_of(script, made)
        if made is None or length is None or epochs is None or around is step.node:
            continue
        by_epochs = ast.unparse(length) == ast.unparse(epochs)
        if inside and by_epochs:
            yield found("critical", made, inside[0].node)
        elif outside and not inside and counts_batches(script, length) and not by_epochs:
            yield found("critical", made, outside[0].node, case="each epoch")


@code_rule_once
def scheduler_each_process(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Accelerate steps a prepared schedule once for every process, and its length does not count processes."""
    if subject.framework != "accelerate" or script.says("step_scheduler_with_optimizer", "split_batches"):
        return
    devices = where.devices or 0
    for prepare, given in ((call, given) for call in script.calls(".prepare") for given in call.args):
        made = next((value for value in script.assigned(given) if isinstance(value, ast.Call)
                     and script.name(value).endswith(SCHEDULERS)), None)
        length = length_of(script, made)
        if made is None or length is None:
            continue
        words = [ast.unparse(node) for node in script.behind(length) if isinstance(node, (ast.Name, ast.Attribute))]
        counts_processes = any("num_processes" in word or "world_size" in word.lower() for word in words)
        # a loader that is prepared later has as many batches as all processes together
        if counts_processes or _counted_before(script, length, prepare):
            continue
        certain = devices > 1 or counts_batches(script, length)
        yield found("low" if devices == 1 else "critical" if certain else "moderate", made, prepare,
                    schedule=script.words(given), one=devices == 1)


def _counted_before(script: Script, length: ast.AST, prepare: ast.Call) -> bool:
    """Return whether a length is that of a loader before `prepare`, or of its data: these count for all processes."""
    prepared = {given.id for given in prepare.args if isinstance(given, ast.Name)}
    prepared |= {item.id for given in prepare.args for made in script.assigned(given) if isinstance(made, ast.Call)
                 and script.name(made).endswith("DataLoader") for item in made.args[:1] if isinstance(item, ast.Name)}
    return any(isinstance(node, ast.Call) and script.name(node.func) == "len" and node.lineno < prepare.lineno and any(
        isinstance(item, ast.Name) and item.id in prepared for item in node.args) for node in script.behind(length))
