"""Rules on the length of a run: learning rate, warm-up, schedules, and intervals of evaluation, logging and checkpoints."""

from __future__ import annotations

import ast
import math

from powertrain.audit.edits import added, moved, set_to
from powertrain.audit.reckoning import at_most, evaluation_share, reckonable, tokens_per_step
from powertrain.audit.rules.base import Findings, code_rule, found, rule
from powertrain.audit.script import FunctionNode, Script
from powertrain.audit.steps import SCHEDULERS, Step, outermost, training_steps
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.records.findings import Severity

RATE, BEST = "training.learning_rate", "training.load_best_model_at_end"
STEPS, LOGGING, SAVING, EVALUATING = ("training.max_steps", "training.logging_steps", "training.save_steps",
                                      "training.eval_steps")
ADAM = ("adam", "ademamix", "lion")          # names of optimizers whose step is about the learning rate itself
ADAPTERS = (4e-5, 2e-2)      # around TRL's and PEFT's 1e-4 .. 2e-4: a rate below is one of full tuning
FULL = (1e-7, 3e-4)          # around 1e-5 .. 5e-5
USUAL_RATE = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5}
BESIDE = ("training.per_device_train_batch_size", "training.num_train_epochs", "training.output_dir")
MOST_WARMUP, USUAL_WARMUP = 0.5, 0.03        # of the run
BUDGET = 0.02                # of the run's time, for what is not training
MUCH = 0.05                  # of it; less is within what equal runs differ by
SHORT_RUN = 200              # steps, below which each line of the log is wanted
NEVER = {"eval": "it is never evaluated", "logging": "no loss is logged", "save": "nothing is saved before its end"}
LENGTHS = ("num_training_steps", "T_max", "total_steps", "total_iters")     # arguments that say how long a schedule is


@rule("documentation: TRL (LoRA needs about 10 times the learning rate of full tuning)")
def learning_rate_unfit(subject: Subject, where: Circumstances) -> Findings:
    """The learning rate is one of another method: of full tuning with LoRA, or of LoRA with full tuning."""
    how, rate = subject.method, subject.number(RATE)
    optim = str(subject.value("training.optim") or "adamw").lower()
    if how is None or not rate or not any(name in optim for name in ADAM):
        return
    low, high = FULL if how == "full" else ADAPTERS
    if not low <= rate <= high:
        usual = USUAL_RATE[how]
        edits = set_to(subject, RATE, usual) if RATE in subject.settings else added(subject, BESIDE, "learning_rate", usual)
        yield found("moderate", subject.seen(RATE), edits=edits, rate=rate, usual=usual,
                    case=f"{'full' if how == 'full' else 'adapters'}, too {'low' if rate < low else 'high'}")


@rule("fact: the learning rate rises from 0 to the one that is set during the warm-up")
def warmup_beyond_run(subject: Subject, where: Circumstances) -> Findings:
    """The warm-up takes up most of the run."""
    steps = subject.run_steps(where.data)
    warming = subject.warmup_steps(steps)
    if steps is not None and warming is not None and warming > MOST_WARMUP * steps:
        usual = max(1, round(USUAL_WARMUP * steps))
        yield found("critical" if warming >= steps else "moderate", subject.first_set(
            ("training.warmup_ratio", "training.warmup_steps")), subject.settings.get(STEPS), warming=warming, steps=steps,
            usual=usual, whole=warming >= steps, edits=set_to(subject, "training.warmup_steps", usual))


@rule("features: X11 (share = cost / (cost + interval x step))")
def intervals_cost(subject: Subject, where: Circumstances) -> Findings:
    """Evaluation or checkpoints come so often that they take a good part of the run."""
    steps, facts = subject.run_steps(where.data), reckonable(where)
    evaluating, saves = subject.interval_steps("eval", steps), subject.interval_steps("save", steps) == 1
    tokens = tokens_per_step(subject, facts) if facts else None
    share = evaluation_share(facts, tokens, evaluating) if facts and tokens and evaluating else None
    saved = subject.seen(SAVING) if saves else None
    if share is not None and evaluating is not None and facts is not None and share > BUDGET:
        every = math.ceil(evaluating * share / (1 - share) * (1 - BUDGET) / BUDGET)
        severity: Severity = "low" if not saves and share < MUCH else "moderate"
        yield found(severity, subject.seen(EVALUATING), saved, edits=set_to(subject, EVALUATING, every), saves=saves,
                    expected=at_most(share, "the products of evaluations"), case="reckoned", share=share, every=every,
                    evaluating=evaluating, tokens=facts.data.validation_tokens, budget=BUDGET)
    elif share is None and evaluating == 1:
        yield found("moderate", subject.seen(EVALUATING), saved, saves=saves)
    elif saves:
        yield found("moderate", saved, case="saves")


@rule("fact: an interval longer than the run never comes round")
def intervals_never_fire(subject: Subject, where: Circumstances) -> Findings:
    """Evaluation, logging or checkpoints are set at intervals longer than the run."""
    steps = subject.run_steps(where.data)
    intervals = {what: subject.interval_steps(what, steps) for what in NEVER} if steps is not None else {}
    never = [what for what, every in intervals.items() if every is not None and steps is not None and every > steps
             and (what != "save" or SAVING in subject.settings)]
    if never and steps is not None:
        tenth = max(1, steps // 10)
        yield found("low" if never == ["save"] else "moderate", *(subject.seen(f"training.{what}_steps") for what in never),
                    subject.settings.get(STEPS), steps=steps, tenth=tenth,
                    never="; ".join(f"{NEVER[what]} ({what}_steps={intervals[what]:g})" for what in never),
                    words=" ".join(f"{what}_steps={tenth}" for what in never))


@rule("features: F16 (reading the loss waits for the device), X11", gives_way_to=("item_each_step",))
def logging_each_step(subject: Subject, where: Circumstances) -> Findings:
    """The loss is logged at every step."""
    steps = subject.run_steps(where.data)
    if LOGGING in subject.settings and subject.interval_steps("logging", steps) == 1 and (steps or SHORT_RUN + 1) > SHORT_RUN:
        yield found("low", subject.settings[LOGGING], edits=set_to(subject, LOGGING, 10))


@rule("documentation: TrainingArguments._validate_args")
def best_checkpoint_intervals(subject: Subject, where: Circumstances) -> Findings:
    """The best checkpoint is wanted, but checkpoints are saved when there is no score."""
    if subject.framework not in TRAINERS or not subject.on(BEST):
        return
    evaluating, saving = subject.effective("training.eval_strategy"), subject.effective("training.save_strategy")
    if None in (evaluating, saving) or saving == "best":
        return
    every, kept = subject.interval_steps("eval", None), subject.interval_steps("save", None)
    if evaluating != saving:
        yield found("critical", subject.settings[BEST], subject.seen("training.eval_strategy"),
                    subject.seen("training.save_strategy"), edits=set_to(subject, "training.eval_strategy", saving),
                    case="strategies", evaluating=evaluating, saving=saving)
    elif every and kept and kept % every:
        multiple = -(-kept // every) * every
        yield found("critical", subject.settings[BEST], subject.seen(EVALUATING), subject.seen(SAVING),
                    edits=set_to(subject, SAVING, int(multiple)), kept=kept, every=every, multiple=multiple)


# ------------------------------------------------------------------------------------------------ a script's own schedule


def made_for(script: Script, step: Step) -> ast.Call | None:
    """Return the call that makes the schedule which a step advances; None where there is no such call or several."""
    names = {script.words(call.owner) for call in step.scheduler_steps if call.owner is not None}
    made = [node.value for node in script.nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            and script.name(node.value).endswith(SCHEDULERS)
            and any(script.words(target) in names for target in node.targets)]
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
    """Whether a length comes from the number of batches of a loader."""
    return any(isinstance(node, ast.Call) and script.name(node) == "len" for node in script.behind(length))


@code_rule("documentation: torch.optim.lr_scheduler (one scheduler step for each optimizer step)")
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
            edits = moved(script, script.statement(early), script.statement(stepped), script.words(early), after=True)
            yield found("critical" if divided else "moderate", script.evidence(early), script.evidence(stepped), edits=edits,
                        every=every)


@code_rule("documentation: torch.optim.lr_scheduler (T_max and num_training_steps count calls of scheduler.step)")
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
            yield found("critical", script.evidence(made), script.evidence(inside[0].node))
        elif outside and not inside and counts_batches(script, length) and not by_epochs:
            yield found("critical", script.evidence(made), script.evidence(outside[0].node), case="each epoch")


@code_rule("features: F17; documentation: accelerate/scheduler.py (a prepared scheduler steps num_processes times a step)")
def scheduler_each_process(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Accelerate steps a prepared schedule once for every process, and its length does not count processes."""
    if subject.framework != "accelerate" or script.says("step_scheduler_with_optimizer", "split_batches"):
        return
    devices = where.hardware.devices if where.hardware is not None else 0
    for prepare, given in [(call, given) for call in script.calls(".prepare") for given in call.args]:
        made = next((value for value in script.assigned(given) if isinstance(value, ast.Call)
                     and script.name(value).endswith(SCHEDULERS)), None)
        length = length_of(script, made)
        # a loader that is prepared later has as many batches as all processes together
        if made is None or length is None or _counts_processes(script, length) or _counted_before(script, length, prepare):
            continue
        certain = devices > 1 or counts_batches(script, length)
        yield found("low" if devices == 1 else "critical" if certain else "moderate", script.evidence(made),
                    script.evidence(prepare), schedule=script.words(given), one=devices == 1)
        return


def _counts_processes(script: Script, length: ast.AST) -> bool:
    names = [ast.unparse(node) for node in script.behind(length) if isinstance(node, (ast.Name, ast.Attribute))]
    return any("num_processes" in name or "world_size" in name.lower() for name in names)


def _counted_before(script: Script, length: ast.AST, prepare: ast.Call) -> bool:
    """Whether a length is that of a loader which is prepared later, and so counts the batches of all processes."""
    prepared = {given.id for given in prepare.args if isinstance(given, ast.Name)}
    return any(isinstance(node, ast.Call) and script.name(node.func) == "len" and node.lineno < prepare.lineno and any(
        isinstance(item, ast.Name) and item.id in prepared for item in node.args) for node in script.behind(length))
