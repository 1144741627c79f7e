"""What one step of a script's own training loop does, in order: backward, clip, step, zero, and under which conditions.

The calls of the script's functions are followed, so a loop that says `train_step(batch)` is read like one that spells it out.
A loop inside the step (an evaluation, a generation) is not part of every step, and is marked as such.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from powertrain.audit.script import DEEPEST_HELPER, Script
from powertrain.audit.syntax import DEFINITIONS, FunctionNode, Loop, every, is_backward, is_called, last_name, owner_of

WITHOUT_GRADIENTS = ("torch.no_grad", "torch.inference_mode", "torch.set_grad_enabled", "torch.autograd.no_grad")

# of calls that make one, the ends of their dotted names
OPTIMIZERS = ("optim.AdamW", "optim.Adam", "optim.SGD", "optim.Adagrad", "optim.RMSprop", "optim.NAdam", "optim.RAdam",
              "optim.Adafactor", "optim.Lion", "optim.LAMB", "optim.Muon", "optimization.Adafactor",
              "AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit", "Adam8bit", "ZeroRedundancyOptimizer")
SCHEDULERS = ("LR", "_schedule", "_schedule_with_warmup", "get_scheduler", "WarmRestarts", "ReduceLROnPlateau",
              "_hard_restarts_schedule_with_warmup", "SequentialLR", "LambdaLR")
STEP_HOOKS = ("on_step_end", "on_step_begin", "on_substep_end", "on_log", "training_step", "compute_loss", "on_train_batch_end",
              "on_before_optimizer_step")     # of transformers' callbacks and Trainer, and of Lightning: called at every step


@dataclass(frozen=True)
class _Around:
    """What a call of a step stands in."""

    conditions: tuple[ast.If, ...] = ()      # all under which it happens, those of the functions between included
    inner_loop: bool = False                 # in a further loop within the step, such as an evaluation
    micro: bool = False                      # in a loop over the micro-batches of the step
    context: tuple[ast.With, ...] = ()       # `with` blocks around it


@dataclass(frozen=True, eq=False, kw_only=True)
class StepCall(_Around):
    """A call that a step reaches."""

    node: ast.Call
    order: int                               # among the calls of the step, as they happen

    @property
    def every_step(self) -> bool:
        return self.each_pass and not self.micro

    @property
    def each_pass(self) -> bool:
        """Return whether the call happens at least once for every optimizer step."""
        return not self.conditions and not self.inner_loop

    @property
    def method(self) -> str:
        return last_name(self.node.func) if self.owner is not None else ""

    @property
    def owner(self) -> ast.expr | None:
        return owner_of(self.node)


@dataclass(frozen=True)
class Accumulation:
    """One optimizer step for several backward passes."""

    step: StepCall
    every: ast.expr                          # N of `if (i + 1) % N == 0:`, or of a loop over `range(N)` micro-batches
    by_loop: bool

    def at_each_pass(self, call: StepCall) -> bool:
        """Return whether a call happens with every micro-batch, and so more often than the optimizer steps."""
        return call.each_pass and (call.micro or not self.by_loop)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a training loop, or of a hook that a trainer calls at every step."""

    script: Script
    node: Loop | FunctionNode

    @cached_property
    def calls(self) -> tuple[StepCall, ...]:
        walk = _Walk(self.script, around=frozenset(self.script.ancestors(self.node)))
        return tuple(call for statement in self.node.body for call in walk.visit(statement, _Around()))

    def named(self, *names: str) -> list[StepCall]:
        return [call for call in self.calls if is_called(self.script.name(call.node.func), names)]

    def methods(self, *names: str) -> list[StepCall]:
        return [call for call in self.calls if call.method in names]

    @property
    def backward(self) -> list[StepCall]:
        return self.methods("backward")

    @property
    def optimizer_steps(self) -> list[StepCall]:
        """Return the calls `optimizer.step()` and `scaler.step(optimizer)`."""
        return [call for call in self.methods("step") if call.owner is not None and (
            self._is(call.owner, OPTIMIZERS, "opt") or self.is_scaler(call.owner))]

    @property
    def scheduler_steps(self) -> list[StepCall]:
        return [call for call in self.methods("step") if call.owner is not None
                and self._is(call.owner, SCHEDULERS, "sched") and not self._is(call.owner, OPTIMIZERS, "opt")]

    @property
    def clipping(self) -> list[StepCall]:
        clips = ("clip_grad_norm_", "clip_grad_value_")
        return [call for call in self.calls if self.script.name(call.node.func).endswith(clips)]

    def is_scaler(self, node: ast.AST) -> bool:
        return self._is(node, ("GradScaler",), "scaler")

    def _is(self, node: ast.AST, made_by: tuple[str, ...], word: str) -> bool:
        """Return whether a variable came from one of these calls, or has the word in its name."""
        return word in last_name(node).lower() or self.script.is_made_by(node, *made_by)

    @property
    def accumulation(self) -> Accumulation | None:
        """Return the optimizer step that several passes share: after every N-th of them, or after a loop over N."""
        for call in self.optimizer_steps:
            for condition in call.conditions:
                every = interval(condition.test)
                if every is not None:
                    return Accumulation(call, every, by_loop=False)
        micro = next((loop for call in self.backward if call.micro for loop in self.script.loops(call.node)
                      if loop is not self.node), None)
        counted = micro.iter if isinstance(micro, ast.For) else None
        alone = next((call for call in self.optimizer_steps if not call.micro), None)
        if alone is not None and isinstance(counted, ast.Call) and self.script.name(counted) in ("range", "tqdm.trange"):
            return Accumulation(alone, counted.args[-1], by_loop=True) if len(counted.args) == 1 else None
        return None

    @property
    def accumulates_by_accelerate(self) -> bool:
        """Return whether a pass runs in `with accelerator.accumulate(model)`, where prepared optimizers skip by themselves."""
        return any(self.script.name(item.context_expr).endswith(".accumulate") for call in self.backward
                   for block in call.context for item in block.items)

    @property
    def updates_each_pass(self) -> bool:
        """Return whether the optimizer surely steps after each backward pass of a loop that uses accelerate.

        `if accelerator.sync_gradients:` holds at each pass where nothing calls `accelerator.accumulate`.
        """
        conditions = [condition for call in self.optimizer_steps for condition in call.conditions]
        return bool(self.backward and self.optimizer_steps) and not any(call.micro for call in self.calls) and all(
            last_name(condition.test) == "sync_gradients" for condition in conditions)


@dataclass
class _Walk:
    """Walks statements in the order in which they happen, into the script's functions."""

    script: Script
    order: int = 0
    around: frozenset[ast.AST] = frozenset()             # the functions that the step itself stands in: no step calls them
    entered: list[FunctionNode] = field(default_factory=list)

    def visit(self, node: ast.AST, around: _Around) -> Iterator[StepCall]:
        if isinstance(node, DEFINITIONS):
            return
        if isinstance(node, ast.If):
            yield from self.visit(node.test, around)
            for statement in (*node.body, *node.orelse):
                yield from self.visit(statement, replace(around, conditions=(*around.conditions, node)))
            return
        if isinstance(node, Loop):
            passes = any(is_backward(inner) for inner in self.script.reached(node))
            around = replace(around, micro=True) if passes else replace(around, inner_loop=True)
        if isinstance(node, ast.With):
            around = replace(around, context=(*around.context, node))
        for child in ast.iter_child_nodes(node):
            yield from self.visit(child, around)
        if isinstance(node, ast.Call):
            self.order += 1
            yield StepCall(node=node, order=self.order, **vars(around))
            function = self.script.called(node)
            if function is not None and function not in {*self.entered, *self.around} and len(self.entered) < DEEPEST_HELPER:
                self.entered.append(function)
                for statement in function.body:
                    yield from self.visit(statement, around)
                self.entered.pop()


def interval(test: ast.expr) -> ast.expr | None:
    """Return N of a test that is true every N steps: `step % N == 0`, `(i + 1) % N == 0 or last`, `not step % N`."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant):
            return node.right
    return None


def training_steps(script: Script) -> list[Step]:
    """Return the steps of the script's own loops: of each the innermost loop with a backward pass and the optimizer's step."""
    found: dict[ast.AST, Step] = {}
    for loop in script.training_loops:
        around = [Step(script, outer) for outer in (loop, *script.loops(loop))]
        step = next((step for step in around if any(not call.micro and not call.inner_loop for call in step.optimizer_steps)),
                    around[0])
        found.setdefault(step.node, step)
    return list(found.values())


def never_accumulates(script: Script) -> bool:
    """Return whether the gradient_accumulation_steps of an Accelerator hold back no update: nothing enters `accumulate`."""
    steps = [] if script.says("accumulate", "_do_sync", "set_sync_gradients", "DeepSpeed") else training_steps(script)
    return bool(steps) and all(step.updates_each_pass for step in steps)


def step_code(script: Script) -> list[Step]:
    """Return the steps of the script's loops, and the hooks that a trainer calls at every step."""
    hooks = [node for node in script.nodes if isinstance(node, FunctionNode) and node.name in STEP_HOOKS]
    return [*training_steps(script), *(Step(script, hook) for hook in hooks)]


def outermost(script: Script, loop: Loop) -> Loop:
    """Return the loop over epochs around a training loop, even if a function called from it has the training loop."""
    around = script.loops(loop)
    if around:
        return around[-1]
    function = script.function(loop)
    for node in ast.walk(script.tree) if function is not None else ():
        if isinstance(node, Loop) and any(script.called(call) is function for call in every(ast.Call, node)):
            return node
    return loop


def is_without_gradients(script: Script, node: ast.AST) -> bool:
    """Return whether a node is, or stands in, a block or function that keeps no gradients."""
    around = [node, *script.ancestors(node)]
    used = [item.context_expr for block in around if isinstance(block, ast.With) for item in block.items]
    used += [decorator for function in around if isinstance(function, FunctionNode) for decorator in function.decorator_list]
    return any(script.name(item) in WITHOUT_GRADIENTS for item in used)
