"""Rules on the code that a script brings itself: its own network, its reward, and the files that it resumes from."""

import ast
import re

from powertrain.audit.commands import project_files, text_of
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found
from powertrain.audit.rules.data import PASS, TIMES
from powertrain.audit.rules.labels import ends_before_the_last, given_to, is_masked, starts_at_the_second
from powertrain.audit.rules.learning import trains_it
from powertrain.audit.rules.names import of_unsloth, since
from powertrain.audit.rules.refusals import is_launched
from powertrain.audit.script import Script
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.audit.syntax import argument, every, hides_arguments, last_name, owner_of, reads_of

CAUSAL = ("tril", "triu", "causal", "attn_mask", "src_mask", "subsequent_mask", "look_ahead", "block_mask")
ENCODERS = ("torch.nn.Transformer", "torch.nn.TransformerEncoder", "torch.nn.TransformerDecoder")
WEIGHTED = ("Linear", "Embedding", "Conv1d", "Conv2d", "LayerNorm")
MADE_ON_THE_CPU = ("torch.tensor", "torch.zeros", "torch.ones", "torch.randn", "torch.rand", "torch.randint", "torch.arange",
                   "torch.full", "torch.stack", "torch.cat", "torch.from_numpy")
PAIRED = ("_j", "_k", "_chosen", "_rejected", "_w", "_l", "_a", "_b", "_pos", "_neg", "_0", "_1")   # no model's own arguments
LISTING = ("glob", "iglob", "listdir", "rglob", "scandir", "iterdir")
PLACED = ("checkpoint", "ckpt")
TRAINING = {"train", "step"}
GROUPS = {"GRPOConfig": 8, "RLOOConfig": 2}  # completions for each prompt, where the config does not say
TARGETS = ("target_ids", "labels", "label_ids", "lm_labels")


@code_rule
def attention_unmasked(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script's own attention lets each place see the tokens that it is to predict."""
    if not script.training_loops or script.says(*CAUSAL):
        return
    ahead = next(filter(starts_at_the_second, script.every(ast.Subscript)), None)
    scores = next((call for call in script.every(ast.Call) if last_name(call.func) == "softmax"
                   and _is_of_scores(script, call)), None)
    if ahead is not None and scores is not None:
        yield found("critical", scores, ahead)
        return
    layers = {name for call in script.calls(*ENCODERS) for target in getattr(script.parents[call], "targets", ())
              if (name := script.words(target)).startswith("self.")}
    before = {ast.unparse(node.value) for node in script.every(ast.Subscript) if ends_before_the_last(node) or (
        isinstance(node.slice, ast.Slice) and node.slice.lower is not None and not starts_at_the_second(node))}
    both = next((node for node in script.every(ast.Subscript) if starts_at_the_second(node)
                 and ast.unparse(node.value) in before), None)
    for call in script.every(ast.Call) if both is not None else ():
        if script.words(call.func) in layers and len(call.args) < 3 and not any("causal" in str(item.arg) or str(item.arg) in (
                "mask", "tgt_mask", "src_mask", "None") for item in call.keywords):
            yield found("critical", call, both)
            return


def _is_of_scores(script: Script, call: ast.Call) -> bool:
    """Return whether a softmax is of the products of queries and keys, in the network's own `forward`."""
    function = script.function(call)
    return function is not None and function.name == "forward" and any(
        last_name(node.func) == "transpose" and {"-2", "-1"} <= {ast.unparse(item) for item in node.args}
        for node in every(ast.Call, function))


@code_rule_once
def layer_never_used(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The network makes a layer with weights, and nothing uses it."""
    if not script.training_loops or script.says("getattr", "named_children", "_modules"):
        return
    read = {node.attr for node in script.every(ast.Attribute) if isinstance(node.ctx, ast.Load)}
    for node in script.every(ast.Assign):
        target, call = node.targets[0], node.value
        made = len(node.targets) == 1 and isinstance(call, ast.Call) and script.name(call).startswith(
            "torch.nn.") and last_name(call.func) in WEIGHTED
        if made and isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self" and target.attr not in read:
            yield found("moderate", node, name=target.attr)


@code_rule_once
def moved_and_lost(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A tensor is moved to the device, and the result is thrown away."""
    for call in script.calls(".to", ".cuda"):
        owner = owner_of(call)
        lost = isinstance(script.parents[call], ast.Expr)
        if lost and isinstance(owner, ast.Name) and any(
                isinstance(value, ast.Call) and script.name(value) in MADE_ON_THE_CPU for value in script.assigned(owner)):
            yield found("low" if where.on_cpu else "critical", call, name=owner.id)


@code_rule
def groups_of_completions(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A step's completions do not make whole groups, which the trainer refuses."""
    call = script.sections.get("training")
    if call is None or last_name(call.func) not in GROUPS or hides_arguments(call) or of_unsloth(script):
        return
    if any(argument(call, name) is not None for name in ("generation_batch_size", "steps_per_generation")):
        return
    each, times = subject.number(PASS), subject.number(TIMES)
    asked = subject.settings.get("training.num_generations")
    size = asked.value if asked is not None else None if subject.is_unread("training.num_generations") else GROUPS[
        last_name(call.func)]
    if each and times and isinstance(size, int) and size > 0 and each * times % size:
        launched = is_launched(script)
        # some number of processes makes up for it
        yield found("moderate" if launched else "critical", PASS, asked, completions=int(each * times), size=size,
                    only="" if launched else "started as one process")


@code_rule
def reward_without_answers(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The reward function does not take the answers by the name that the trainer gives them."""
    rewards = next((given for call in script.every(ast.Call) if last_name(call.func).endswith("GRPOTrainer")
                    and (given := argument(call, "reward_funcs", 1)) is not None), None)
    if rewards is None:
        return
    made = {node for call in every(ast.Call, rewards) for node in ast.walk(call)}        # which is not looked at
    names = {last_name(node) for node in ast.walk(rewards) if node not in made}
    for name in sorted(names & set(script.functions)):
        spec = script.functions[name].args
        asked = {item.arg for item in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)} - {"self"}
        if asked and not asked & {"completions", "completion", "completion_ids"} and spec.vararg is None and \
                not script.functions[name].decorator_list:
            yield found("critical", *spec.args[-1:], asked=", ".join(sorted(asked)), name=name)


@code_rule_once
def adapters_frozen(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Trained adapters are loaded to be trained on, and are loaded frozen."""
    frees = script.says("set_adapter", "load_adapter", "add_adapter", "merge_and_unload", "requires_grad_") or any(
        node.attr == "requires_grad" and isinstance(node.ctx, ast.Store) for node in script.every(ast.Attribute))
    for call in script.calls("peft.PeftModel.from_pretrained", "peft.AutoPeftModelForCausalLM.from_pretrained"):
        target = next(iter(getattr(script.parents[call], "targets", ())), None)
        name, around = ast.unparse(target or call), script.function(call)
        later = [each for each in script.every(ast.Call) if each.lineno > call.lineno and script.function(each) is around]
        taken = min((each for each in later if trains_it(script, each, name)), key=lambda each: each.lineno, default=None)
        if target is None or taken is None or frees or hides_arguments(call) or argument(call, "is_trainable", 3) is not None:
            continue
        handed = [node for node in script.nodes if call.lineno < getattr(node, "lineno", 0) < taken.lineno
                  and isinstance(node, ast.expr) and ast.unparse(node) == name and script.function(node) is around and (
                      isinstance(getattr(node, "ctx", 0), ast.Store)
                      or isinstance(script.parents[node], ast.Call | ast.keyword))]
        runs = not last_name(taken.func).endswith("Trainer") or any(
            "rainer" in script.words(each.func) for each in script.calls(".train"))
        if runs and not handed and argument(taken, "peft_config") is None:
            yield found("critical", call, taken)


@code_rule
def columns_removed(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The trainer takes columns away that the script's own loss reads."""
    if subject.value("training.remove_unused_columns") is False or subject.is_unread("training.remove_unused_columns"):
        return
    for function in script.every(ast.FunctionDef):
        kind = script.parents.get(function)
        if function.name != "compute_loss" or not isinstance(kind, ast.ClassDef) or not any(
                script.name(base) == "transformers.Trainer" for base in kind.bases):
            continue
        own = {node: node.slice.value for node in every(ast.Subscript, function) if ast.unparse(node.value) == "inputs"
               and isinstance(node.slice, ast.Constant) and str(node.slice.value).endswith(PAIRED)}
        if own and not script.says("_remove_unused_columns", "remove_unused_columns", "_set_signature_columns"):
            yield found("critical", next(iter(own)), columns=", ".join(dict.fromkeys(map(str, own.values()))))


@code_rule
def adapter_file_renamed(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A run resumes from the adapter file of an older peft, which none writes any more."""
    names = [node for node in script.every(ast.Constant) if node.value == "adapter_model.bin"]
    written = any(node in script.behind(*call.args[1:2]) for call in script.calls("torch.save") for node in names)
    if names and script.has_call("torch.load") and not script.says("adapter_model.safetensors") and not written:
        yield found(since(where), names[0])


@code_rule_once
def sorted_as_text(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Checkpoints are put in the order of their names, in which 10000 comes before 5000."""
    for call in script.calls("sorted"):
        if not call.args or argument(call, "key") is not None:
            continue
        function = script.function(call)
        around = " ".join([getattr(function, "name", ""), script.words(script.statement(call))]).lower()
        listed = any(isinstance(node, ast.Call) and last_name(node.func) in LISTING for node in script.behind(call.args[0]))
        numbered = any(map(_is_of_a_step, script.every(ast.JoinedStr)))
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
    trainers = any("Trainer" in last_name(call.func) for call in every(ast.Call, script.tree))
    if name and not reads_of(name, script.tree) and not trainers and not script.has_call(".train"):
        yield found("critical", made)


@code_rule
def trainer_never_trains(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A trainer is made, and nothing asks it to train."""
    made = script.sections.get("trainer")
    if made is None or script.module(made) is not None or subject.framework not in TRAINERS:
        return
    others = [text_of(file) for file in project_files(script) if file.suffix in (".py", ".ipynb")
              and file != script.path.resolve()]
    taken = re.compile(rf"\b(from|import)\s[^\n]*\b{re.escape(script.path.stem)}\b")
    if "__main__" not in script.own_text and (not others or script.path.suffix != ".py" or any(map(taken.search, others))):
        return                               # another file may import it
    statement = script.parents[made]
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    trains = any(TRAINING & {*last_name(call.func).lower().split("_")}       # PPO's trainer of older releases has step
                 for call in every(ast.Call, script.tree) if last_name(call.func) != "train_test_split")
    if not isinstance(target, ast.Name) or trains:
        return
    uses = [node for node in every(ast.Name, script.tree) if node.id == target.id and not isinstance(node.ctx, ast.Del)]
    if all(node is target or isinstance(script.parents[node], ast.Attribute) for node in uses):
        yield found("critical", made)


@code_rule_once
def padded_targets_trained(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The targets are padded to one length, and the loss counts their padding."""
    if is_masked(script):
        return
    given = [item.value for item in script.every(ast.keyword) if item.arg == "labels"]
    named = {text for value in given for text in TARGETS if text in script.words(value)}
    named |= {"labels"} if "trainer" in script.sections else set()
    seq2seq = any(made.endswith("ForConditionalGeneration.from_pretrained") or "Seq2Seq" in made
                  for kinds in script.kinds.values() for made in kinds)
    for node in script.every(ast.Assign):
        for name, value in given_to(node):
            source = next((inner for inner in script.behind(value) if isinstance(inner, ast.Call) and any(
                item.arg == "padding" and getattr(item.value, "value", "") == "max_length" for item in inner.keywords)), None)
            if name in named and "input_ids" in script.words(value) and source is not None and seq2seq:
                yield found("critical", node, source)
