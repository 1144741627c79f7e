"""Rules on the code that a script brings itself: its own network, its reward, and the files that it resumes from."""

import ast

from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found
from powertrain.audit.rules.labels import given_to, is_masked, starts_at_the_second
from powertrain.audit.rules.names import since
from powertrain.audit.script import Script
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.audit.syntax import argument, last_name
from powertrain.records.findings import Severity

CAUSAL = ("tril", "triu", "causal", "attn_mask", "src_mask", "subsequent_mask", "look_ahead", "block_mask")
WEIGHTED = ("Linear", "Embedding", "Conv1d", "Conv2d", "LayerNorm")
MADE_ON_THE_CPU = ("torch.tensor", "torch.zeros", "torch.ones", "torch.randn", "torch.rand", "torch.randint", "torch.arange",
                   "torch.full", "torch.stack", "torch.cat", "torch.from_numpy")
PAIRED = ("_j", "_k", "_chosen", "_rejected", "_w", "_l", "_a", "_b", "_pos", "_neg", "_0", "_1")   # no model's own arguments
LISTING = ("glob", "iglob", "listdir", "rglob", "scandir", "iterdir")
PLACED = ("checkpoint", "ckpt")
TRAINING = {"train", "step"}
TARGETS = ("target_ids", "labels", "label_ids", "lm_labels")


@code_rule
def attention_unmasked(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script's own attention lets each place see the tokens that it is to predict."""
    if not script.training_loops or script.says(*CAUSAL):
        return
    ahead = next((node for node in script.nodes if isinstance(node, ast.Subscript) and starts_at_the_second(node)), None)
    scores = next((node for node in script.nodes if isinstance(node, ast.Call) and last_name(node.func) == "softmax" and (
        _is_of_scores(script, node))), None)
    if ahead is not None and scores is not None:
        yield found("critical", scores, ahead)


def _is_of_scores(script: Script, call: ast.Call) -> bool:
    """Return whether a softmax is of the products of queries and keys, in the network's own `forward`."""
    function = script.function(call)
    return function is not None and function.name == "forward" and any(
        isinstance(node, ast.Call) and last_name(node.func) == "transpose" and {"-2", "-1"} <= {
            ast.unparse(item) for item in node.args} for node in ast.walk(function))


@code_rule_once
def layer_never_used(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The network makes a layer with weights, and nothing uses it."""
    read = {node.attr for node in script.nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    for node in script.nodes if script.training_loops and not script.says("getattr", "named_children", "_modules") else ():
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        made = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and script.name(node.value).startswith(
            "torch.nn.") and last_name(node.value.func) in WEIGHTED
        if made and isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self" and target.attr not in read:
            yield found("moderate", node, name=target.attr)


@code_rule_once
def moved_and_lost(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A tensor is moved to the device, and the result is thrown away."""
    for node in script.nodes:
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        owner = call.func.value if call is not None and isinstance(call.func, ast.Attribute) and call.func.attr in (
            "to", "cuda") else None
        if isinstance(owner, ast.Name) and call is not None and any(
                isinstance(value, ast.Call) and script.name(value) in MADE_ON_THE_CPU for value in script.assigned(owner)):
            severity: Severity = "low" if where.on_cpu else "critical"
            yield found(severity, call, name=owner.id)


@code_rule
def reward_of_distance(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The reward is a distance itself, so the furthest answer gets the most."""
    trainer = script.sections.get("trainer")
    rewards = argument(trainer, "reward_funcs", 1) if trainer is not None else None
    names = {node.id for node in ast.walk(rewards) if isinstance(node, ast.Name)} if rewards is not None else set()
    for name in sorted(names & set(script.functions)):
        for node in ast.walk(script.functions[name]):
            given = node.value if isinstance(node, ast.Return) else None
            given = given.elt if isinstance(given, ast.ListComp) else given
            if isinstance(given, ast.Call) and last_name(given.func) == "abs" and isinstance(given.args[0], ast.BinOp) and \
                    isinstance(given.args[0].op, ast.Sub):
                yield found("critical", given, name=name)


@code_rule
def groups_of_completions(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A step's completions do not make whole groups, which the trainer refuses."""
    call = script.sections.get("training")
    if call is None or last_name(call.func) != "GRPOConfig" or any(item.arg is None for item in call.keywords):
        return
    if any(argument(call, name) is not None for name in ("generation_batch_size", "steps_per_generation")):
        return
    each, times = subject.number("training.per_device_train_batch_size"), subject.number(
        "training.gradient_accumulation_steps")
    asked = subject.settings.get("training.num_generations")
    size = asked.value if asked is not None else None if subject.is_unread("training.num_generations") else 8
    if each and times and isinstance(size, int) and size > 0 and each * times % size:
        yield found("moderate", "training.per_device_train_batch_size", asked,       # some number of processes makes up for it
                    completions=int(each * times), size=size)


@code_rule
def reward_without_answers(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The reward function does not take the answers by the name that the trainer gives them."""
    trainer = next((call for call in script.nodes if isinstance(call, ast.Call) and last_name(call.func).endswith(
        "GRPOTrainer") and argument(call, "reward_funcs", 1) is not None), None)
    rewards = argument(trainer, "reward_funcs", 1) if trainer is not None else None
    made = {node for call in ast.walk(rewards) if isinstance(call, ast.Call) for node in ast.walk(call)} if rewards else set()
    names = {last_name(node) for node in ast.walk(rewards) if isinstance(node, ast.Name | ast.Attribute) and node not in made} \
        if rewards else set()                # what a call makes is not looked at
    for name in sorted(names & set(script.functions)):
        spec = script.functions[name].args
        taken = {item.arg for item in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}
        asked = taken - {"self"}
        if asked and not asked & {"completions", "completion", "completion_ids"} and spec.vararg is None and \
                not script.functions[name].decorator_list:
            yield found("critical", *spec.args[-1:], asked=", ".join(sorted(asked)), name=name)


@code_rule_once
def adapters_frozen(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Trained adapters are loaded to be trained on, and are loaded frozen."""
    for call in script.calls("peft.PeftModel.from_pretrained", "peft.AutoPeftModelForCausalLM.from_pretrained"):
        given = argument(call, "is_trainable", 3)
        said = script.says("is_trainable", "requires_grad", "get_peft_model", "merge_and_unload", "add_adapter")
        evaluates = any(node.lineno > loop.lineno for loop in script.training_loops for node in [call]
                        if script.function(loop) is script.function(call))
        if given is None and not said and not evaluates and script.training_loops:
            yield found("critical", call)


@code_rule
def columns_removed(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The trainer takes columns away that the script's own loss reads."""
    if subject.value("training.remove_unused_columns") is False or subject.is_unread("training.remove_unused_columns"):
        return
    for function in script.nodes:
        kind = script.parents.get(function)
        if not isinstance(function, ast.FunctionDef) or function.name != "compute_loss" or not isinstance(
                kind, ast.ClassDef) or not any(script.name(base) == "transformers.Trainer" for base in kind.bases):
            continue
        read = [node for node in ast.walk(function) if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
                and ast.unparse(node.value) == "inputs" and isinstance(node.slice.value, str)]
        own = [node for node in read if str(getattr(node.slice, "value", "")).endswith(PAIRED)]
        if own and not script.says("_remove_unused_columns", "remove_unused_columns", "_set_signature_columns"):
            names = dict.fromkeys(str(getattr(node.slice, "value", "")) for node in own)
            yield found("critical", own[0], columns=", ".join(names))


@code_rule
def state_dict_patched(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The model's state_dict is replaced by one of the adapters, from which peft then takes the adapters again."""
    for node in script.nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Attribute) and target.attr == "state_dict" and any(
                last_name(inner) == "get_peft_model_state_dict" for inner in ast.walk(node.value)):
            saves = next(script.calls(".save_pretrained"), None)
            if saves is not None:
                yield found("critical", target, saves)


@code_rule
def adapter_file_renamed(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A run resumes from the adapter file of an older peft, which none writes any more."""
    names = [node for node in script.nodes if isinstance(node, ast.Constant) and node.value == "adapter_model.bin"]
    if names and script.has_call("torch.load") and not script.says("adapter_model.safetensors"):
        yield found(since(where), names[0])


@code_rule_once
def sorted_as_text(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Checkpoints are put in the order of their names, in which 10000 comes before 5000."""
    for call in script.nodes:
        if not isinstance(call, ast.Call) or script.name(call) != "sorted" or not call.args or any(
                item.arg == "key" for item in call.keywords):
            continue
        function = script.function(call)
        around = " ".join([getattr(function, "name", ""), script.words(script.statement(call))]).lower()
        listed = any(isinstance(node, ast.Call) and last_name(node.func) in LISTING for node in script.behind(call.args[0]))
        numbered = any(isinstance(node, ast.JoinedStr) and _is_of_a_step(node) for node in script.nodes)
        if listed and numbered and any(word in around for word in PLACED):
            yield found("critical", call)


def _is_of_a_step(node: ast.JoinedStr) -> bool:
    """Return whether a text has a step's number as it is, `f"model_{step}.pt"`, without zeros in front."""
    return any(isinstance(part, ast.FormattedValue) and part.format_spec is None and any(
        word in last_name(part.value).lower() for word in ("step", "iter")) for part in node.values) and any(
        isinstance(part, ast.Constant) and str(part.value).endswith((".pt", ".pth", ".bin", ".ckpt")) for part in node.values)


@code_rule
def nothing_trains(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The arguments of a training are made, and nothing trains with them."""
    made = script.sections.get("training")
    if made is None or subject.framework not in TRAINERS or script.training_loops or "trainer" in script.sections:
        return
    statement = script.statement(made)
    name = script.words(statement.targets[0]) if isinstance(statement, ast.Assign) and statement.value is made else ""
    uses = [node for node in ast.walk(script.tree) if isinstance(node, ast.Name) and node.id == name
            and isinstance(node.ctx, ast.Load)]
    trainers = any(isinstance(node, ast.Call) and "Trainer" in last_name(node.func) for node in ast.walk(script.tree))
    if name and not uses and not trainers and not script.has_call(".train"):
        yield found("critical", made)


@code_rule
def trainer_never_trains(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A trainer is made, and nothing asks it to train."""
    made = script.sections.get("trainer")
    if made is None or script.module(made) is not None or subject.framework not in TRAINERS:
        return
    if "__main__" not in script.own_text:                # another file may import it
        return
    statement = script.parents[made]
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    trains = any(isinstance(node, ast.Call) and TRAINING & {*last_name(node.func).lower().split("_")}
                 for node in ast.walk(script.tree))          # PPO's trainer of older releases has step
    if not isinstance(target, ast.Name) or trains:
        return
    uses = [node for node in ast.walk(script.tree) if isinstance(node, ast.Name) and node.id == target.id]
    if all(node is target or isinstance(script.parents[node], ast.Attribute) for node in uses):
        yield found("critical", made)


@code_rule_once
def padded_targets_trained(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The targets are padded to one length, and the loss counts their padding."""
    if is_masked(script):
        return
    given = [value for call in script.nodes if isinstance(call, ast.Call) and (value := argument(call, "labels")) is not None]
    named = {text for value in given for text in TARGETS if text in script.words(value)}
    named |= {"labels"} if "trainer" in script.sections else set()
    for node in script.nodes:
        for name, value in given_to(node) if isinstance(node, ast.Assign) else ():
            source = next((inner for inner in script.behind(value) if isinstance(inner, ast.Call) and any(
                item.arg == "padding" and getattr(item.value, "value", "") == "max_length" for item in inner.keywords)), None)
            seq2seq = any(made.endswith("ForConditionalGeneration.from_pretrained") or "Seq2Seq" in made
                          for kinds in script.kinds.values() for made in kinds)
            if name in named and "input_ids" in script.words(value) and source is not None and seq2seq:
                yield found("critical", node, source)
