"""Rules on what is handed on: weights to files, tokens to a model as its labels, and batches to an accumulation."""

import ast
import re

from powertrain.audit.commands import project_files, text_of
from powertrain.audit.origins import origins
from powertrain.audit.rules.base import Findings, code_rule_once, found
from powertrain.audit.rules.data import TIMES
from powertrain.audit.rules.labels import CAUSAL, ends_before_the_last, given_to, starts_at_the_second
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import argument, every, gives_name, is_backward, is_constant, last_name, names_in, owner_of

WITH_DECODER = ("Seq2SeqLM.from_pretrained", "ForConditionalGeneration.from_pretrained", "DecoderModel.from_pretrained")
STARTED = ("decoder_start_token", "_shift_right", "shift_tokens_right", "bart", "Bart", "BART")
FETCHING = ("next", "get", "load", "iter", "sample", "fetch", "generate", "stream", "start", "data")     # of what gives batches
KEEPING = ("contiguous", "clone", "to", "long", "squeeze", "detach", "cuda")     # give the same numbers


@code_rule_once
def merged_base_lost(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Adapters are merged into the model, and only those that are trained on top of it are saved."""
    merges = list(script.calls(".merge_and_unload"))
    asked = any("isinstance" in script.words(test.test) for end in merges for test in script.conditions(end))
    if not merges or asked or script.says("pretrained_merged", "merged_16bit", "gguf", "hub_merged") or any(
            text_of(file).count("PeftModel.from_pretrained") > 1 for file in project_files(script)
            if file != script.path.resolve() and file.suffix in (".py", ".ipynb")):      # which may put one upon the other
        return
    saves = [getattr(call.func, "value", call) for call in script.calls(".save_pretrained", ".push_to_hub")]
    for call in script.every(ast.Call):
        name, given = last_name(call.func), argument(call, "model", 0)
        adapted = name == "get_peft_model" or (name.endswith("Trainer") and not is_constant(
            argument(call, "peft_config") or ast.Constant(None), None))
        if adapted and given is not None and {*merges} <= {*origins(script, given)} and not any(
                end in merges for owner in saves for end in origins(script, owner)):
            off = script.unused & {around for end in merges for around in script.ancestors(end)}     # unless it is asked for
            yield found("moderate" if off else "critical", call, merges[0])


@code_rule_once
def answers_beside_prompts(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The labels are another text than the tokens at the same places, and the model has no decoder that would write it."""
    for node in script.nodes if script.has_made(*CAUSAL) and not script.has_made(*WITH_DECODER) else ():
        parts = dict(given_to(node))
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        inputs = target.value if isinstance(target, ast.Subscript) else parts.get("input_ids")
        read, told = _tokenised(script, inputs), _tokenised(script, parts.get("labels"))
        if inputs is not None and read and told and ast.unparse(read.args[0]) != ast.unparse(told.args[0]) and not any(
                isinstance(each.ctx, ast.Store) and "'input_ids'" in ast.unparse(each) and names_in(each) & names_in(inputs)
                for each in every(ast.Subscript, script.function(node) or script.tree)):
            yield found("critical", node, read, told)


def _tokenised(script: Script, node: ast.expr | None, deep: int = 4) -> ast.Call | None:
    """Return the one call of a tokenizer that gives `x`, `x["input_ids"]` or `x.input_ids.clone()`."""
    while isinstance(node, ast.Call | ast.Subscript | ast.Attribute):
        if isinstance(node, ast.Call) and node.args and "tokenizer" in last_name(node.func).lower():
            return node
        node = node.func if isinstance(node, ast.Call) else node.value
    ends = origins(script, node) if isinstance(node, ast.Name) and deep else []
    return _tokenised(script, ends[0], deep - 1) if len(ends) == 1 and ends[0] is not node else None


@code_rule_once
def first_target_left_out(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """T5 is given its targets as what it reads and writes, and the first of them is never one to write."""
    for call in script.every(ast.Call) if script.says("t5", "T5") and not script.says(*STARTED) else ():
        read, told = argument(call, "decoder_input_ids"), argument(call, "labels")
        cut = [] if read is None or told is None else [
            next(filter(test, every(ast.Subscript, end)), None) for part, test in (
                (read, ends_before_the_last), (told, starts_at_the_second)) for end in origins(script, part)]
        if len({ast.unparse(each.value) if each is not None else "" for each in cut} - {""}) == 1 and None not in cut:
            yield found("critical", call, *cut)


@code_rule_once
def ignored_labels_gathered(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The scores of tokens are taken by labels that hold -100, which is no token."""
    for call in script.calls(".gather", "torch.gather"):
        index, function = argument(call, "index", 2 if script.name(call) == "torch.gather" else 1), script.function(call)
        tokens = owner_of(index) if isinstance(index, ast.Call) and last_name(index.func) == "unsqueeze" else index
        name = tokens.id if isinstance(tokens, ast.Name) and function is not None else ""
        asked = next((each for each in every(ast.Compare, function or call) if ast.unparse(each) in (
            f"{name} != -100", f"{name} == -100")), None)
        changed = any(isinstance(each.ctx, ast.Store) and last_name(each.value) == name for each in every(
            ast.Subscript, function or call)) or any(last_name(each.func) not in KEEPING for node in every(
                ast.Assign, function or call) if gives_name(node, name) for each in every(ast.Call, node.value))
        if asked is not None and not changed:
            yield found("critical", call, asked, name=name)


@code_rule_once
def micro_batch_repeated(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients are accumulated over one and the same batch, again and again."""
    counts = (loop for loop in script.every(ast.For) if re.match(r"range\(.*accum", ast.unparse(loop.iter)))
    for loop in counts if "bench" not in str(script.path).lower() else ():
        inner = [*ast.walk(ast.Module(loop.body, [])), loop.target]
        first = next((node.lineno for node in inner if is_backward(node) and isinstance(node, ast.Call)), 0)
        stored = {node.id for node in inner if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        passes = [call for node in inner if isinstance(node, ast.Assign) and node.lineno < first for call in every(
            ast.Call, node.value) if isinstance(call.func, ast.Name) and script.called(call) is None]
        given = [names_in(item) for call in passes[:1] for item in (*call.args, *(each.value for each in call.keywords))]
        if given and all(given) and not stored & set().union(*given) and not any(
                word in last_name(node).lower() for node in inner for word in FETCHING):
            yield found("moderate" if subject.number(TIMES) in (0, 1) else "critical", loop.iter, passes[0])
