"""Rules on the length of a run: learning rate, warm-up, schedules, and intervals of evaluation, logging and checkpoints."""

from __future__ import annotations

import ast
import math

from powertrain.audit.code_editing import with_line, without
from powertrain.audit.editing import added, set_to
from powertrain.audit.reckoning import at_most, evaluation_share, reckonable, tokens_per_step
from powertrain.audit.resolved import TRAINERS, first_set, interval_steps, method, number, run_steps, seen, value, warmup_steps
from powertrain.audit.rules.base import STARTS, Findings, found, of_script
from powertrain.audit.script import Script
from powertrain.audit.steps import SCHEDULERS, Step, outermost, training_steps
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records.findings import UNMEASURED, Edit, Evidence, Expected, Severity, rule

RATE = "training.learning_rate"
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
    how, rate = method(subject), number(subject, RATE)
    optim = str(subject.value("training.optim") or "adamw").lower()
    if how is None or not rate or not any(name in optim for name in ADAM):
        return
    low, high = FULL if how == "full" else ADAPTERS
    if low <= rate <= high:
        return
    if how == "full":
        follows = "training hardly moves the weights" if rate < low else "the model soon loses what it had learned"
    else:
        follows = "adapters start at zero and hardly move" if rate < low else "the loss diverges easily"
    usual = USUAL_RATE[how]
    edits = set_to(subject, RATE, usual) or (added(subject, BESIDE, "learning_rate", usual) if RATE not in subject.settings
                                             else ())
    yield found("moderate", f"The learning rate is {rate:g} for {'all weights' if how == 'full' else 'adapters'}, where about "
                f"{usual:g} is usual: {follows}", seen(subject, RATE), cure=f"Start from {usual:g}", edits=edits,
                words=(f"learning_rate={usual:g}",),
                title=f"a learning rate that does not fit {'full tuning' if how == 'full' else 'LoRA'}")


@rule("fact: the learning rate rises from 0 to the one that is set during the warm-up")
def warmup_beyond_run(subject: Subject, where: Circumstances) -> Findings:
    """The warm-up takes up most of the run."""
    steps = run_steps(subject, where)
    warming = warmup_steps(subject, steps)
    if steps is None or warming is None or warming <= MOST_WARMUP * steps:
        return
    usual, whole = max(1, round(USUAL_WARMUP * steps)), warming >= steps
    yield found("critical" if whole else "moderate", f"{warming:g} of {steps} steps are warm-up" + (
                ", so the learning rate never reaches the value that is set" if whole else ""),
                first_set(subject, ("training.warmup_ratio", "training.warmup_steps")),
                subject.settings.get("training.max_steps"), cure=f"Warm up for about {usual} steps",
                edits=set_to(subject, "training.warmup_steps", usual), words=(f"warmup_steps={usual}",))


@rule("features: X11 (share = cost / (cost + interval x step))")
def intervals_cost(subject: Subject, where: Circumstances) -> Findings:
    """Evaluation or checkpoints come so often that they take a good part of the run."""
    steps, facts = run_steps(subject, where), reckonable(where)
    evaluating, saving = interval_steps(subject, "eval", steps), interval_steps(subject, "save", steps)
    tokens = tokens_per_step(subject, facts) if facts else None
    share = evaluation_share(facts, tokens, evaluating) if facts and tokens and evaluating else None
    says: list[str] = []
    asked: list[Evidence] = []
    expected, cure = UNMEASURED, "Evaluate and save at intervals that cost at most 2 % of the run"
    edits: tuple[Edit, ...] = ()
    words: tuple[str, ...] = ()
    if share is not None and evaluating is not None and facts is not None and share > BUDGET:
        every = math.ceil(evaluating * share / (1 - share) * (1 - BUDGET) / BUDGET)
        says.append(f"reading {facts.data.validation_tokens:,} held-out tokens every {evaluating:g} steps is {share:.0%} of "
                    f"all "
                    f"matrix products; every {every} steps it would be {BUDGET:.0%}")
        expected = at_most(share, "the products of evaluations")
        cure, edits, words = (f"Evaluate every {every} steps, or on fewer examples",
                              set_to(subject, "training.eval_steps", every), (f"eval_steps={every}",))
    elif share is None and evaluating == 1:
        says.append("held-out data is read after every step")
    if says:
        asked.append(seen(subject, "training.eval_steps"))
    if saving == 1:
        says.append("a checkpoint is written after every step")
        if not asked:
            cure, words = "Save as often as you can afford to lose the work since", ("save_steps=500",)
            expected = Expected("the seconds of a checkpoint, each step", "none")
        asked.append(seen(subject, "training.save_steps"))
    if says:
        text = "; ".join(says)
        severity: Severity = "low" if saving != 1 and share is not None and share < MUCH else "moderate"
        yield found(severity, text[0].upper() + text[1:], *asked, expected=expected, cure=cure, edits=edits, words=words)


@rule("fact: an interval longer than the run never comes round")
def intervals_never_fire(subject: Subject, where: Circumstances) -> Findings:
    """Evaluation, logging or checkpoints are set at intervals longer than the run."""
    steps = run_steps(subject, where)
    intervals = {what: interval_steps(subject, what, steps) for what in NEVER} if steps is not None else {}
    never = [what for what, every in intervals.items() if every is not None and steps is not None and every > steps
             and (what != "save" or "training.save_steps" in subject.settings)]
    if never and steps is not None:
        tenth = max(1, steps // 10)
        says = "; ".join(f"{NEVER[what]} ({what}_steps={intervals[what]:g})" for what in never)
        yield found("low" if never ==["save"] else "moderate", f"The run has {steps} steps: {says}",
                    *(seen(subject, f"training.{what}_steps") for what in never), subject.settings.get("training.max_steps"),
                    cure=f"Choose intervals below {steps} steps: a tenth of the run is {tenth}",
                    words=tuple(f"{what}_steps={tenth}" for what in never))


@rule("features: F16 (reading the loss waits for the device), X11", gives_way_to=("item_each_step",))
def logging_each_step(subject: Subject, where: Circumstances) -> Findings:
    """The loss is logged at every step."""
    key, steps = "training.logging_steps", run_steps(subject, where)
    if key in subject.settings and interval_steps(subject, "logging", steps) == 1 and (steps or SHORT_RUN + 1) > SHORT_RUN:
        yield found("low",
                    "A GPU runs ahead of Python until Python reads the loss; read at every step, each waits for the other",
                    subject.settings[key], cure="Log every 10 steps", edits=set_to(subject, key, 10),
                    words=("logging_steps=10",),
                    expected=Expected("on a CPU nothing that could be measured (claim 003-14)", "study: 2026-11-21_claims"))


@rule("documentation: TrainingArguments._validate_args")
def best_checkpoint_intervals(subject: Subject, where: Circumstances) -> Findings:
    """The best checkpoint is wanted, but checkpoints are saved when there is no score."""
    if subject.framework not in TRAINERS or not subject.on("training.load_best_model_at_end"):
        return
    asked = subject.settings["training.load_best_model_at_end"]
    evaluating, saving = value(subject, "training.eval_strategy"), value(subject, "training.save_strategy")
    if None in (evaluating, saving) or saving == "best":
        return
    if evaluating != saving:
        yield found("critical", f"The trainer evaluates by {evaluating!r} and saves by {saving!r}; it raises, because the "
                    "checkpoints would have no score", asked, seen(subject, "training.eval_strategy"),
                    seen(subject, "training.save_strategy"), expected=STARTS, cure=f"Set eval_strategy={saving!r}",
                    edits=set_to(subject, "training.eval_strategy", saving),
                    title="load_best_model_at_end without matching strategies")
        return
    every, kept = interval_steps(subject, "eval", None), interval_steps(subject, "save", None)
    if every and kept and kept % every:
        multiple = -(-kept // every) * every
        yield found("critical", f"Checkpoints come every {kept:g} steps and scores every {every:g}: with "
                    "load_best_model_at_end the trainer raises", asked, seen(subject, "training.eval_steps"),
                    seen(subject, "training.save_steps"), expected=STARTS, cure=f"Save every {multiple:g} steps",
                    edits=set_to(subject, "training.save_steps", int(multiple)),
                    title="save_steps is no multiple of eval_steps")


# ------------------------------------------------------------------------------------------------ a script's own schedule


def made_for(script: Script, step: Step) -> ast.Call | None:
    """Return the call that makes the schedule which a step advances; None where there is no such call or several."""
    names = {script.words(call.owner) for call in step.scheduler_steps if call.owner is not None}
    made = [node.value for node in script.nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            and script.name(node.value).endswith(SCHEDULERS)
            and any(script.words(target) in names for target in node.targets)]
    return made[0] if len(made) == 1 else None


def length_of(script: Script, made: ast.Call) -> ast.expr | None:
    """Return the expression of a schedule's length, where its call has one."""
    named = next((item.value for item in made.keywords if item.arg in LENGTHS), None)
    last = script.name(made).rpartition(".")[2]
    place = 2 if "_schedule" in last else 1 if last.startswith("CosineAnnealingLR") else len(made.args)
    return named if named is not None or len(made.args) <= place else made.args[place]


def counts_batches(script: Script, length: ast.AST) -> bool:
    """Whether a length comes from the number of batches of a loader."""
    return any(isinstance(node, ast.Call) and script.name(node) == "len" for node in script.behind(length))


@rule("documentation: torch.optim.lr_scheduler (one scheduler step for each optimizer step)")
@of_script
def scheduler_each_micro_batch(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The learning-rate schedule advances at every micro-batch instead of every optimizer step."""
    for step in training_steps(script):
        accumulation = step.accumulation
        if accumulation is None or step.accumulates_by_accelerate:
            continue
        early = next((call for call in step.scheduler_steps if accumulation.at_each_pass(call)), None)
        made = made_for(script, step)
        length = length_of(script, made) if made is not None else None
        every, stepped = ast.unparse(accumulation.every), accumulation.step
        divided = length is not None and any(isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Div))
                                             and ast.unparse(node.right) == every for node in script.behind(length))
        if early is None or (length is not None and counts_batches(script, length) and not divided):
            continue                                     # a schedule as long as all micro-batches is right
        edits = (*without(script, script.statement(early.node)),
                 *with_line(script, script.statement(stepped.node), script.words(early.node), after=True))
        yield found("critical" if divided else "moderate", f"The optimizer steps every {every} micro-batches, the schedule at "
                    f"each: it ends {every} times too early, and the rest of the run trains at the final learning rate",
                    script.evidence(early.node), script.evidence(stepped.node), accuracy="low",
                    cure="Step the schedule where the optimizer steps", edits=edits if len(edits) == 2 else ())


@rule("documentation: torch.optim.lr_scheduler (T_max and num_training_steps count calls of scheduler.step)")
@of_script
def schedule_in_other_units(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The schedule's length counts epochs and its steps are batches, or the other way round."""
    for step in training_steps(script):
        around = outermost(script, step.node) if not isinstance(step.node, (ast.FunctionDef,
                                                                            ast.AsyncFunctionDef)) else step.node
        inside = [call for call in step.scheduler_steps if call.each_pass]
        outside = [call for call in Step(script, around).scheduler_steps if call.every_step] if around is not step.node else []
        made = made_for(script, step if inside else Step(script, around))
        length = length_of(script, made) if made is not None else None
        epochs = around.iter.args[-1] if isinstance(around, ast.For) and isinstance(around.iter,
                                                                                    ast.Call) and around.iter.args else None
        if made is None or length is None or epochs is None or around is step.node:
            continue
        by_epochs = ast.unparse(length) == ast.unparse(epochs)
        if inside and by_epochs:
            how, says = inside[0], ("The schedule is as long as the number of epochs, and steps after every batch: it has "
                                    "ended, or begins to rise again, within the first epoch")
        elif outside and not inside and counts_batches(script, length) and not by_epochs:
            how, says = outside[0], ("The schedule is as long as all batches of the run, and steps once an epoch: the learning "
                                     "rate hardly leaves its beginning, which with a warm-up is near 0")
        else:
            continue
        yield found("critical", says, script.evidence(made), script.evidence(how.node), accuracy="low",
                    cure="Give the schedule a length in the steps that it takes: batches if it steps after each batch, epochs "
                    "if it steps after each epoch")


@rule("features: F17; documentation: accelerate/scheduler.py (a prepared scheduler steps num_processes times a step)")
@of_script
def scheduler_each_process(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Accelerate steps a prepared schedule once for every process, and its length does not count processes."""
    if subject.framework != "accelerate" or script.says("step_scheduler_with_optimizer", "split_batches"):
        return
    devices = where.hardware.devices if where.hardware is not None else 0
    for call in script.calls(".prepare"):
        for given in call.args:
            made = next((value for value in script.assigned(given) if isinstance(value, ast.Call)
                         and script.name(value).endswith(SCHEDULERS)), None)
            length = length_of(script, made) if made is not None else None
            if made is None or length is None or any(
                    "num_processes" in ast.unparse(node) or "world_size" in ast.unparse(node).lower()
                    for node in script.behind(length) if isinstance(node, (ast.Name, ast.Attribute))):
                continue
            if _counted_before(script, length, call):
                continue                                 # in all processes together it has as many batches
            severity: Severity = "low" if devices == 1 else "critical" if devices > 1 or counts_batches(script,
                                                                                                        length) else "moderate"
            yield found(severity, f"accelerator.prepare makes {script.words(given)} step once for each process at every "
                        "optimizer step, and its length does not count processes: on N processes the schedule ends after 1/N "
                        "of the run" + ("; this machine has one device" if devices == 1 else ""), script.evidence(made),
                        script.evidence(call), accuracy="low",
                        cure="Do not prepare the schedule, or multiply its length and warm-up by accelerator.num_processes")
            return


def _counted_before(script: Script, length: ast.AST, prepare: ast.Call) -> bool:
    """Whether a length is that of a loader which is prepared later, and so counts the batches of all processes."""
    prepared = {given.id for given in prepare.args if isinstance(given, ast.Name)}
    return any(isinstance(node, ast.Call) and script.name(node.func) == "len" and node.lineno < prepare.lineno and any(
        isinstance(item, ast.Name) and item.id in prepared for item in node.args) for node in script.behind(length))
