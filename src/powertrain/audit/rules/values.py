"""Rules on where values go: what is None, is loaded for nothing, is asked of the wrong object, or is left out of examples."""

import ast
from typing import Any

from powertrain.audit.commands import commands, has_deepspeed
from powertrain.audit.installed import defined, in_force, members
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found
from powertrain.audit.rules.labels import CAUSAL, ends_before_the_last, is_loss, starts_at_the_second
from powertrain.audit.rules.processes import PARALLEL
from powertrain.audit.scopes import KNOWN, bound_by, bound_names, is_tried, trees_of
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import (
    FunctionNode,
    argument,
    every,
    inside,
    last_name,
    names_in,
    parameters_of,
    reads_of,
    targets_of,
)
from powertrain.records.findings import Severity

OTHER_HEADS = ("ForSequenceClassification.from_pretrained", "ForConditionalGeneration.from_pretrained",
               "AutoModelForSeq2SeqLM.from_pretrained", "ForMaskedLM.from_pretrained")
NEEDED = ("lora.r", "lora.lora_alpha")       # numbers that a library reckons with: None ends the run
FROM_ENVIRONMENT = ("os.environ.get", "os.getenv")
ALONE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
LOADING = ("torch.load", "safetensors.torch.load_file")
# what DistributedDataParallel has itself, or takes from torch.nn.Module
OF_ANY_MODULE = frozenset({
    "train", "eval", "parameters", "named_parameters", "modules", "named_modules", "children", "named_children", "buffers",
    "named_buffers", "state_dict", "load_state_dict", "to", "cuda", "cpu", "half", "float", "double", "bfloat16", "zero_grad",
    "requires_grad_", "apply", "forward", "compile", "no_sync", "join", "module", "type", "get_submodule", "get_parameter",
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_buffer", "add_module",
    "register_comm_hook", "share_memory", "extra_repr", "training", "get_buffer", "set_extra_state"})
GIVEN_A_WRAPPER = ("compute_loss", "training_step", "prediction_step")           # of a Trainer, with the model as argument
TOKENISING = ("tokenizer", "tok", "encode", "encode_plus", "batch_encode_plus", "apply_chat_template")
EMPTY_ROWS = ("wikitext", "Salesforce/wikitext")             # published data in which many rows have no text at all
PLACES = ("step", "global_step", "iter", "iter_num", "iteration", "batch_idx", "batch", "current_step")
SKIPPING = ("skip", "islice")


@code_rule
def needed_but_none(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A number that has to be there is None unless the command line gives it."""
    for key in NEEDED:
        setting = subject.settings.get(key)
        if setting is not None and setting.value is None:
            yield found("critical", setting, name=key.rpartition(".")[2])


@code_rule_once
def run_before_given(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A function is run above the line that gives a value to a name that it reads."""
    everywhere = {name for node in every(ast.Global, script.tree) for name in node.names} | KNOWN
    for tree in trees_of(script) if not script.says("streaming") else ():            # whose map runs later
        own = {node.name: node for node in tree.body if isinstance(node, FunctionNode) and not node.decorator_list}
        given: dict[str, Any] = {}
        for node in inside(tree):
            stores = isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
            for name in (node.id,) if isinstance(node, ast.Name) and stores else bound_by(node):
                given[name] = min(given.get(name, node), node, key=lambda each: each.lineno)
        for call in (node for node in inside(tree, (FunctionNode, ast.ClassDef, ast.Lambda, ast.GeneratorExp))
                     if isinstance(node, ast.Call) and not script.loops(node)):
            mapped = isinstance(call.func, ast.Attribute) and call.func.attr in ("map", "filter") and bool(call.args)
            function = own.get(last_name(call.args[0] if mapped else call.func)) if mapped or isinstance(
                call.func, ast.Name) else None
            if function is None or _may_stop(function) or is_tried(script, call):
                continue
            local = parameters_of(function) | bound_names(ast.Module(function.body, []))
            for node in inside(function):
                later = given.get(node.id) if isinstance(node, ast.Name) and node.id not in local | everywhere else None
                if later is not None and later.lineno > call.lineno and not script.conditions(node) and not is_tried(
                        script, node) and isinstance(node, ast.Name):
                    yield found("critical", node, call, later, name=node.id)


def _may_stop(function: FunctionNode) -> bool:
    """Return whether a function may end before its last line, runs later than it is called, or decides as it goes."""
    return any(isinstance(node, ast.Yield | ast.YieldFrom | ast.BoolOp | ast.For) or (isinstance(node, ast.If) and any(
        isinstance(each, ast.Return | ast.Raise) for each in node.body)) for node in inside(function))


@code_rule_once
def device_of_no_rank(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The name of the device is put together from a rank that is not set, and becomes cuda:None."""
    if script.launch:                                    # torchrun sets it
        return
    for node in script.nodes:
        parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)] if isinstance(
            node, ast.JoinedStr) else [node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else []
        if not parts or not script.words(node).lstrip("f").strip("\"'").startswith("cuda:"):
            continue
        asked = [call for part in parts for call in script.behind(part) if _asks_environment(script, call)]
        if asked and not script.conditions(node) and not any(
                isinstance(around, ast.IfExp) for around in script.ancestors(node)):
            yield found("critical", node, asked[0])


def _asks_environment(script: Script, node: ast.AST) -> bool:
    """Return whether a node is `os.environ.get("LOCAL_RANK")`, which is None where nothing launched the script."""
    return isinstance(node, ast.Call) and script.name(node) in FROM_ENVIRONMENT and len(node.args) == 1 and not node.keywords \
        and isinstance(node.args[0], ast.Constant) and node.args[0].value in ALONE and not isinstance(
            script.parents.get(node), ast.BoolOp)


@code_rule
def rows_not_tokenised(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A Trainer gets rows of text, and nothing tokenises them."""
    trainer = script.sections.get("trainer")
    if trainer is None or subject.framework != "transformers" or any(item.arg is None for item in trainer.keywords):
        return
    model, collator = argument(trainer, "model", 0), argument(trainer, "data_collator", 2)
    loaded = script.has_call("datasets.load_dataset", "datasets.Dataset.from_list", "datasets.Dataset.from_json",
                             "datasets.Dataset.from_dict") and not script.has_call("datasets.load_from_disk")
    unread = model is not None and collator is None and not script.says("input_ids", "__getitem__")
    if script.has_made(*CAUSAL, *OTHER_HEADS) and loaded and unread and not any(
            _may_tokenise(script, call) for call in script.every(ast.Call)):
        yield found("critical", trainer)


def _may_tokenise(script: Script, call: ast.Call) -> bool:
    """Return whether a call makes tokens of text, or maps rows by a function that is not here."""
    name, mapped = last_name(call.func).lower(), call.args[0] if call.args else None
    if name == "map" and not isinstance(mapped, ast.Lambda):
        return mapped is None or last_name(mapped) not in script.functions
    return script.is_made_by(call.func, "Tokenizer.from_pretrained") or name in TOKENISING or (
        "tokeni" in name and not name.startswith(("load", "get", "create", "build", "make", "setup")))


@code_rule
def targets_are_inputs(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The loss asks the model for the tokens that it was given, at the same places."""
    loss = next((call for call in script.every(ast.Call) if len(call.args) > 1 and is_loss(script, call)), None)
    pair = next((call for call in script.every(ast.Call) if len(call.args) == 2 and last_name(call.func) == "TensorDataset"
                 and ast.unparse(call.args[0]) == ast.unparse(call.args[1])), None)
    if loss is None or pair is None or script.says("mask_token", "MaskedLM", "autoencoder", "AutoEncoder"):
        return
    near = ast.walk(script.function(loss) or script.tree)
    if not any(starts_at_the_second(node) or ends_before_the_last(node) for node in near):
        yield found("critical", pair, loss)


@code_rule_once
def method_of_wrapped_model(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A method of the model is called on the wrapper of several processes, which does not have it."""
    severity: Severity = "low" if where.has_one_device else "critical"
    if (started := commands(script)) and all(has_deepspeed(script, command) for command in started):
        return                                           # whose engine passes on what it does not have
    wrappings = list(script.calls(*PARALLEL, ".prepare", "torch.nn.DataParallel"))
    own = members(defined("torch.nn.parallel", "DistributedDataParallel")) if in_force("torch", where) else None
    for node in script.every(ast.Attribute):
        owner = node.value
        if not isinstance(owner, ast.Name) or not isinstance(node.ctx, ast.Load) or node.attr in OF_ANY_MODULE | (own or set()):
            continue
        around = script.parents[node]
        call = around if isinstance(around, ast.Call) and around.func is node else None
        on_tpu = any("TPU" in script.words(test.test) for test in script.conditions(node))          # with another wrapper
        if on_tpu or (call is None and (own is None or is_tried(script, node))):
            continue                                     # what is no method may be anything that torch gives its wrapper
        function = script.function(node)
        wrapping = _given_wrapped(script, function, owner) or _wrapped_before(script, wrappings, node, owner)
        if wrapping is not None and not _unwraps(function or script.tree, owner):
            yield found(severity, call or node, wrapping, method=node.attr, name=owner.id)


def _given_wrapped(script: Script, function: FunctionNode | None, owner: ast.Name) -> ast.AST | None:
    """Return the argument by which a Trainer gives its own method the model, wrapped where there are several processes."""
    kind = script.parents.get(function) if function is not None else None
    if function is None or function.name not in GIVEN_A_WRAPPER or not isinstance(kind, ast.ClassDef) or not any(
            script.name(base).endswith("Trainer") for base in kind.bases):
        return None
    given = [*function.args.posonlyargs, *function.args.args][1:2]
    return given[0] if given and given[0].arg == owner.id else None


def _wrapped_before(script: Script, wrappings: list[ast.Call], call: ast.AST, owner: ast.Name) -> ast.Call | None:
    """Return the call that wrapped a model of this name, above and in the same function."""
    line = getattr(call, "lineno", 0)
    return next((node for node in wrappings if node.lineno < line and isinstance(script.parents[node], ast.Assign)
                 and owner.id in _takes_the_wrapped(node, script.parents[node])
                 and script.function(node) is script.function(call) and script.module(node) is script.module(call)), None)


def _takes_the_wrapped(call: ast.Call, statement: ast.AST) -> set[str]:
    """Return the names of wrapped models: what `DDP(model)` is assigned to, and of `prepare(model, ...)` the models alone."""
    targets = [inner for target in getattr(statement, "targets", ()) for inner in (
        target.elts if isinstance(target, ast.Tuple) else [target])]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if "model" in name} if last_name(call.func) == "prepare" else names


def _unwraps(within: ast.AST, owner: ast.Name) -> bool:
    """Return whether the code up to here takes the model out of its wrapper, or asks whether it is in one."""
    return any((isinstance(node, ast.Attribute) and node.attr == "module" and getattr(node.value, "id", "") == owner.id)
               or (isinstance(node, ast.Call) and (last_name(node.func) == "hasattr" or "unwrap" in last_name(node.func)))
               for node in ast.walk(within) if getattr(node, "lineno", 0) <= owner.lineno)


@code_rule
def pairs_of_a_dict(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A loop takes pairs from a dict, which gives its keys alone."""
    for loop in script.every(ast.For):
        function = script.function(loop)
        if not isinstance(loop.target, ast.Tuple) or not isinstance(loop.iter, ast.Name) or function is None:
            continue
        name = loop.iter.id
        stored = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AnnAssign)
                  and any(ast.unparse(target) == name for target in targets_of(node))]
        tables = [node.value for node in stored if isinstance(node.value, ast.Dict)]
        keys = [node.slice for node in every(ast.Subscript, function) if isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == name]
        pairs = any(isinstance(key, ast.Tuple) for key in (*keys, *(key for table in tables for key in table.keys)))
        if stored and len(tables) == len(stored) and not pairs:
            yield found("critical", loop.iter, stored[0], name=name)


@code_rule
def loaded_and_unused(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Weights are loaded, and nothing takes them."""
    for call in script.calls(*LOADING):
        statement, function = script.parents.get(call), script.function(call)
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not isinstance(
                statement.targets[0], ast.Name) or function is None:
            continue
        name = statement.targets[0].id
        if not reads_of(name, function) and not any(isinstance(node, ast.Global | ast.Nonlocal) and name in node.names
                                                    for node in ast.walk(function)):
            yield found("critical", call, name=name)


@code_rule
def micro_batch_ignored(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The size of a pass is asked for and never used, so each pass takes the whole batch."""
    each = next((item.value for item in script.every(ast.keyword) if item.arg == "per_device_train_batch_size"), None)
    if each is None or "micro" in script.words(each):
        return
    for function in (node for node in script.nodes if isinstance(node, FunctionNode)):
        for item in (*function.args.args, *function.args.kwonlyargs):
            reads = [node for node in every(ast.Name, function) if node.id == item.arg and not any(
                isinstance(around, ast.Call) and last_name(around.func) in ("print", "info", "log")
                for around in script.ancestors(node))]
            if "micro_batch" in item.arg and not reads:
                yield found("critical", each, item, name=item.arg, taken=script.words(each))


@code_rule
def empty_rows(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Many rows of the data are empty, and each becomes a pass of no token."""
    source, trainer = subject.settings.get("data.source"), script.sections.get("trainer")
    if source is None or trainer is None or subject.framework != "transformers" or source.value not in EMPTY_ROWS:
        return
    joined = script.says("block_size", "concatenate", "group_texts", "strip") or script.has_call(".filter")
    padded = subject.value("data.padding") == "max_length"
    if not joined and not padded:
        alone = subject.examples_per_pass == 1 or subject.is_unread("training.per_device_train_batch_size")
        yield found("critical" if alone else "moderate", source, data=str(source.value))


@code_rule_once
def wrapper_that_is_none(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """DeepSpeed's wrapper of the model is taken where DeepSpeed may not run."""
    if subject.value("training.deepspeed") is not None or script.has_call("deepspeed.initialize"):
        return
    for node in script.every(ast.Attribute):
        if node.attr != "deepspeed" or last_name(node.value) not in ("trainer", "self"):
            continue
        tests = [around.test for around in script.ancestors(node) if isinstance(around, ast.If | ast.IfExp)]
        if isinstance(script.parents[node], ast.Call) and not any("deepspeed" in script.words(test) for test in tests):
            yield found("critical", script.parents[node])


@code_rule
def gradients_never_exchanged(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """DDP is told by a test that never changes whether to exchange gradients."""
    for node in script.every(ast.Assign):
        loop = next(iter(script.loops(node)), None)
        if loop is None or last_name(node.targets[0]) != "require_backward_grad_sync":
            continue
        changing = {item.id for item in inside(loop) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)}
        read = names_in(node.value)
        if isinstance(node.value, ast.Compare) and read and not read & changing:
            yield found("critical", node, test=script.words(node.value))


@code_rule_once
def resume_counts_batches(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A resumed run skips the batches that were trained, whatever their size was."""
    loader = script.sections.get("loader")
    saved = {str(key.value) for node in script.every(ast.Dict) for key in node.keys if isinstance(key, ast.Constant)}
    if loader is None or any(word in key for key in saved for word in ("batch_size", "config", "args")) or any(
            "seen" in key and word in key for key in saved for word in ("step", "iter", "batch")):
        return
    for node in script.nodes:
        place = _place_read(node)
        if place is None or not script.has_call("torch.load", ".load_checkpoint", "load_checkpoint"):
            continue
        names = {ast.unparse(target) for target in getattr(script.statement(node), "targets", ())}
        skips = next((call for call in script.every(ast.Call) if any(
            word in last_name(call.func).lower() for word in SKIPPING) and names & _named_behind(script, call)), None)
        if names and skips is not None and "step" in place:
            yield found("moderate", skips, node)


def _named_behind(script: Script, call: ast.Call) -> set[str]:
    """Return the names that the arguments of a call come from."""
    given = script.behind(*call.args, *(keyword.value for keyword in call.keywords))
    return {node.id for node in given if isinstance(node, ast.Name)}


def _place_read(node: ast.AST) -> str | None:
    """Return the key of `checkpoint["step"]` or `checkpoint.get("step", 0)`; None for anything else."""
    key = node.slice if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) else \
        node.args[0] if isinstance(node, ast.Call) and last_name(node.func) == "get" and node.args else None
    return str(key.value) if isinstance(key, ast.Constant) and key.value in PLACES else None
