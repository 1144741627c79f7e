"""Rules on how a script is launched: what fails or differs with one process, or with several."""

import ast
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from powertrain.audit.commands import commands, shown, text_of
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found
from powertrain.audit.rules.data import SAMPLERS
from powertrain.audit.rules.processes import PARALLEL
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import (
    FunctionNode,
    argument,
    every,
    hides_arguments,
    inside,
    is_constant,
    last_name,
    names_in,
    owner_of,
)
from powertrain.records.findings import Evidence, Place

GROUPS = ("torch.distributed.init_process_group", ".init_distributed", "deepspeed.initialize")
FSDP = ("torch.distributed.fsdp.FullyShardedDataParallel",
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel")
SHARING = ("split_dataset_by_node", "deepspeed_io", "training_data", "IterableDataset")
COLLECTIVE = ("barrier", "all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "gather",
              "reduce", "all_gather_into_tensor", "gather_object", "monitored_barrier", "reduce_scatter")
RANKS = ("rank", "global_rank", "world_rank", "ddp_rank", "dist_rank", "process_rank", "process_index", "get_rank", "RANK")
OF_SHARDS = ("state_dict", "forward", "generate")        # what FSDP does together, besides the call of its model
CHANGING = ("update", "setdefault", "pop")   # methods of a table
OF_ENGINES = ("save_checkpoint", "save_16bit_model")     # of DeepSpeed
SHARDING = ("fsdp", "zero3", "zero_3", "zero-3", "z3.", "z3_", "stage3", "stage_3")         # in the commands of a project
FOR_EVERYONE = ("wait_for_everyone", "gather", "gather_for_metrics", "reduce")       # of accelerate
THE_FIRST = ("is_main_process", "master_process", "is_master_process", "is_master", "is_main", "is_rank_0", "is_rank_zero",
             "is_world_process_zero", "is_global_zero")
SCALERS = ("torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler")


@code_rule
def sampler_without_group(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A DistributedSampler is made, and no process group is begun."""
    call = next((call for call in script.calls(*SAMPLERS) if argument(call, "num_replicas", 1) is None
                 and not _asks_for_group(script, call)), None)
    begun = script.has_call(*GROUPS, ".PartialState", ".Accelerator", "accelerate.Accelerator", "accelerate.PartialState")
    if call is not None and not begun and script.training_loops:
        yield found("critical", call)


def _asks_for_group(script: Script, call: ast.Call) -> bool:
    """Return whether a condition around a call, or around the statement with it, says that there are several processes."""
    tests = [around.test for around in script.ancestors(call) if isinstance(around, ast.If | ast.IfExp)]
    words = " ".join(script.words(test).lower() for test in tests)
    return any(word in words for word in ("dist", "ddp", "rank", "world", "parallel", "multi"))


@code_rule
def devices_hidden(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script hides all GPUs but one, and gives each process a GPU of its own."""
    setting = subject.settings.get("environment.CUDA_VISIBLE_DEVICES")
    named = next((call for call in script.calls("torch.cuda.set_device", "torch.cuda.device") if call.args
                  and "rank" in " ".join(script.words(node).lower() for node in script.behind(call.args[0])[:20])), None)
    if setting is not None and str(setting.value).isdigit() and named is not None and script.launch:
        yield found("critical", setting, named, devices=str(setting.value))


@code_rule
def sampler_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Several processes train, and each draws its batches from all data."""
    wrapped = next(script.calls(*PARALLEL, "deepspeed.initialize", *FSDP), None)
    loader = script.sections.get("loader")
    shares = script.has_call(".prepare") or script.says(*SHARING)
    sampled = any("Sampler" in last_name(call.func) for call in script.every(ast.Call))
    if wrapped is None or loader is None or shares or sampled or not script.name(loader).startswith(
            "torch.") or is_constant(argument(loader, "batch_size", 1), None):
        return                                           # a loader or data of the project's own may share it out
    if argument(loader, "sampler", 3) is None and argument(loader, "batch_sampler", 4) is None and not any(
            item.arg is None for item in loader.keywords) and script.training_loops:
        yield found("critical", loader, wrapped)


@code_rule
def sharded_clipping(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients are sharded, and each process clips or scales its own part by itself."""
    wrapped = next((call for call in script.calls(*FSDP) if not script.unused & {*script.ancestors(call)}), None)
    if wrapped is None or not _may_be_asked_for(script, wrapped):
        return
    clips = [call for call in script.calls("torch.nn.utils.clip_grad_norm_") if script.training_loops]
    scalers = [call for call in script.calls(*SCALERS) if not is_constant(argument(call, "enabled"), False)]
    if clips or scalers:
        yield found("critical", *clips[:1], *scalers[:1], wrapped)


def _may_be_asked_for(script: Script, call: ast.Call) -> bool:
    """Return whether each option that the code around asks for, `getattr(args, "fsdp", False)`, is one that there is."""
    asked = [str(node.args[1].value) for around in script.ancestors(call) if isinstance(around, ast.If)
             for node in every(ast.Call, around.test) if last_name(node.func) == "getattr"
             and len(node.args) > 1 and isinstance(node.args[1], ast.Constant)]
    fields = {getattr(node.target, "id", "") for node in script.every(ast.AnnAssign)}
    return all(name in fields or script.says(f"--{name}") for name in asked)


@code_rule
def sharded_weights_overwritten(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Weights that were gathered for saving are overwritten by one process's part of them."""
    saves = [(call, owner) for call in script.calls(".save_pretrained") if (owner := owner_of(call)) is not None
             and not any(word in script.words(owner).lower() for word in ("tok", "process", "config"))]
    whole = next((call for call, _ in saves if argument(call, "state_dict") is not None), None)
    gathered = script.has_call(".get_state_dict", "._zero3_consolidated_16bit_state_dict")
    after = [call for call, owner in saves if whole is not None and argument(call, "state_dict") is None
             and call.lineno > whole.lineno and last_name(owner) in ("model", "trainer")
             and call.args and whole.args and script.words(call.args[0]) == script.words(whole.args[0])]
    if gathered and after and whole is not None:
        yield found("critical", after[-1], whole)


@code_rule_once
def one_process_waits(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """One process alone calls what all processes have to call together, and waits for ever."""
    together = _Together(script)
    others = any(("rank" in script.words(node.test).lower() or _is_of_others(script, node.test))
                 and not is_of_the_first(script, node.test)
                 and any(map(together.has, script.reached(node))) for node in script.every(ast.If))
    for test, alone, rest in _alone(script) if not others else ():
        call = next(filter(together.has, script.reached(*alone)), None)
        if call is not None and not any(map(together.has, script.reached(*rest))):
            yield found("critical", call, test, call=script.words(call)[:60])


def _alone(script: Script) -> Iterator[tuple[ast.expr, list[ast.stmt], list[ast.stmt]]]:
    """Yield each condition on the process's number, what the first process does by it, and what the others do."""
    for node in script.every(ast.If):
        if is_of_the_first(script, node.test):
            yield node.test, node.body, node.orelse
        elif _is_of_others(script, node.test) and isinstance(node.body[-1], ast.Return) and not node.orelse:
            body = getattr(script.parents[node], "body", [])
            if isinstance(script.parents[node], FunctionNode) and node in body:
                yield node.test, body[body.index(node) + 1:], node.body


def is_of_the_first(script: Script, test: ast.expr) -> bool:
    """Return whether a test holds in one process alone: `rank == 0`, `accelerator.is_main_process`, `master_process`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(is_of_the_first(script, each) for each in test.values)
    held = script.assigned(test) if isinstance(test, ast.Name) else []
    if held and all(_compares(script, value, ast.Eq) for value in held):
        return True                                      # master = rank == 0
    return _compares(script, test, ast.Eq) or last_name(test.func if isinstance(test, ast.Call) else test) in THE_FIRST


def _is_of_others(script: Script, test: ast.expr) -> bool:
    """Return whether a test holds in all processes but the first: `rank != 0`, `not is_main_process`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return is_of_the_first(script, test.operand)
    return _compares(script, test, ast.NotEq) or _compares(script, test, ast.Gt)


def _compares(script: Script, test: ast.expr, kind: type[ast.cmpop]) -> bool:
    """Return whether a test compares the process's number among all with 0."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], kind):
        return False
    number, other = test.left, test.comparators[0]
    if isinstance(number, ast.Call) and last_name(number.func) == "int" and number.args:
        number = number.args[0]                          # int(os.environ["RANK"])
    if isinstance(number, ast.Call) and number.args and not isinstance(number.args[0], ast.Constant):
        return False                                     # get_rank(group)
    named = [node.value for node in ast.walk(number) if isinstance(node, ast.Constant)]
    names = (*named, last_name(number.func if isinstance(number, ast.Call) else number))
    return any(name in RANKS for name in names) and isinstance(other, ast.Constant) and other.value == 0


class _Together:
    """The calls that all processes make together."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.sharded = {name: call for call in script.calls(*FSDP) for name in self._names(call)}
        # whose forward sends the buffers of the first process to all
        self.buffered = {name for call in script.calls(*PARALLEL) if script.says("register_buffer") and not is_constant(
            argument(call, "broadcast_buffers"), False) for name in self._names(call)}
        told = [word.lower() for command in commands(script) for word in (*command.starter, *command.words)]
        self.shards = any(part in word for word in told if word.endswith((".yaml", ".yml", ".json")) for part in SHARDING) \
            or "--use_fsdp" in told
        self.engines = {name for call in script.calls("deepspeed.initialize") for name in self._names(call)}

    def has(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or any(item.arg in ("group", "process_group") for item in node.keywords):
            return False
        name, last = self.script.name(node), last_name(node.func)
        if name.startswith(("torch.distributed.", "dist.")):
            return last == "summon_full_params" or (name.count(".") <= 2 and last in COLLECTIVE)
        if self.script.words(node.func) in self.buffered and "." in self.script.words(node.func):
            return True
        if isinstance(node.func, ast.Name):
            return self._is_sharded(node, last)
        if not isinstance(node.func, ast.Attribute):
            return False
        owner = self.script.words(node.func.value)
        if last == "save_model" and self.shards:         # the Trainer gathers the weights from all processes
            return self.script.is_made_by(node.func.value, "Trainer")
        return (last in FOR_EVERYONE and self.script.is_made_by(node.func.value, "Accelerator")) or (
            last in OF_SHARDS and self._is_sharded(node, owner)) or (last in OF_ENGINES and owner in self.engines)

    def _names(self, call: ast.Call) -> list[str]:
        """Return the variables that get the first of what a call gives back."""
        around = self.script.parents.get(call)
        targets = around.targets if isinstance(around, ast.Assign) else []
        firsts = [target.elts[:1] if isinstance(target, ast.Tuple) else [target] for target in targets]
        return [self.script.words(name) for first in firsts for name in first if isinstance(name, ast.Name | ast.Attribute)]

    def _is_sharded(self, node: ast.Call, name: str, seen: tuple[FunctionNode, ...] = ()) -> bool:
        """Return whether a name stands, where a call is made, for a model that FSDP holds by then."""
        wrapped, function = self.sharded.get(name), self.script.function(node)
        home = self.script.function(wrapped) if wrapped is not None else None
        if function is None or function is home:
            return wrapped is not None and function is home and wrapped.lineno < node.lineno
        arguments = [item.arg for item in (*function.args.posonlyargs, *function.args.args)]
        if name in arguments:
            place = arguments.index(name) - (arguments[0] == "self")
            passed = [(call, argument(call, name, place)) for call in self.script.callers(function)]
            return function not in seen and bool(passed) and all(isinstance(given, ast.Name) and self._is_sharded(
                call, given.id, (*seen, function)) for call, given in passed)
        own = {inner.id for inner in inside(function) if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load)}
        is_visible = "." in name or home is None or self.script.is_within(function, home)
        return wrapped is not None and name not in own and is_visible


@code_rule
def engine_refused(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """DeepSpeed's own function is given a config that it does not take."""
    for call in script.calls("deepspeed.initialize"):
        given, told = _engine_config(script, call)
        sharding = given.get("zero_optimization")
        stage = sharding.get("stage") if isinstance(sharding, dict) else None
        left = [name for name, value in _flat(given) if value == "auto" and not name.startswith("pipeline.")]
        if left and "autotuning" not in given:           # which fills them in
            yield found("critical", call, *told, case="auto", names=", ".join(left[:4]))
        elif stage in (1, 2) and "optimizer" not in given and len(call.args) < 3 and not hides_arguments(call) and (
                argument(call, "optimizer") is None):
            yield found("critical", call, *told, stage=stage)


def _engine_config(script: Script, call: ast.Call) -> tuple[Mapping[str, Any], list[Evidence]]:
    """Return the config that DeepSpeed is given, and where it stands; nothing where it is not known or is changed first."""
    given = argument(call, "config") or argument(call, "config_params")
    if isinstance(given, ast.Name):
        changed = any(given.id in names_in(node.value) and (not isinstance(node.ctx, ast.Load) or getattr(
            node, "attr", "") in CHANGING) for node in script.nodes if isinstance(node, ast.Subscript | ast.Attribute))
        handed = {other for other in script.every(ast.Call) if script.called(other) is not None
                  for item in (*other.args, *(each.value for each in other.keywords)) if last_name(item) == given.id}
        values = script.assigned(given)
        given = values[0] if len(values) == 1 and not changed and not handed else ast.Constant(None)
    if isinstance(given, ast.Dict):
        return _plain(given), [Evidence(script.words(given).splitlines()[0], script.place(given))]
    named = [(given.value, script.path.parent)] if isinstance(given, ast.Constant) and isinstance(given.value, str) else [
        (after, Path(command.place.file).parent) for command in commands(script) if given is None
        for before, after in pairwise(command.words) if before in ("--deepspeed_config", "--deepspeed-config")]
    for name, folder in named:
        for file in (folder / name, (script.root or folder) / name):
            with suppress(ValueError, RecursionError):
                read = json.loads(text_of(file) or "null")
                if isinstance(read, dict):
                    return read, [Evidence(name, Place(shown(script, file.resolve()), 1))]
    return {}, []


def _plain(table: ast.Dict) -> dict[str, Any]:
    """Return a table that the script writes; empty where it takes in another one, and None for values that are computed."""
    if any(key is None for key in table.keys):
        return {}
    return {str(getattr(key, "value", "")): _plain(value) if isinstance(value, ast.Dict) else getattr(value, "value", None)
            for key, value in zip(table.keys, table.values, strict=True)}


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
