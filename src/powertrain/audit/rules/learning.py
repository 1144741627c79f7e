"""Rules on what keeps a run from learning or from going on: lost weights, losses without a graph, one process alone."""

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from powertrain.audit.command_lines import settings_of
from powertrain.audit.commands import shown, started_lines
from powertrain.audit.configs import read_marked
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found, rule
from powertrain.audit.rules.labels import CAUSAL, is_copied, is_loss, tokenises
from powertrain.audit.rules.paths import starts
from powertrain.audit.rules.starting import configs_of
from powertrain.audit.scopes import is_tried, own_tree
from powertrain.audit.script import Script
from powertrain.audit.steps import OPTIMIZERS
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.audit.syntax import argument, every, gives_name, inside, is_backward, is_constant, last_name, owner_of
from powertrain.audit.values import Unread
from powertrain.records import WrongUse
from powertrain.records.findings import Evidence, Place

METRIC = "training.metric_for_best_model"
SHAPING = ("view", "reshape", "permute", "transpose", "flatten", "contiguous", "float", "squeeze", "unsqueeze", "to", "mT")
WITHOUT_GRAPH = ("item", "detach", "tolist", "numpy")
WITHOUT_GRADIENTS = ("torch.no_grad", "torch.inference_mode")
OF_ADAPTERS = ("print_trainable_parameters", "merge_and_unload")
KEPT = ("to", "cuda", "prepare_model_for_kbit_training", "compile", "half", "bfloat16", "float", "eval", "train")
# published models whose table of embeddings has not one row more than their tokenizer has tokens
TIGHT = ("gpt2", "distilgpt2", "openai-community/gpt2", "EleutherAI/gpt-neo-1", "EleutherAI/gpt-neo-2", "meta-llama/",
         "huggyllama/", "mistralai/Mistral-7B", "NousResearch/Llama-2", "TinyLlama/", "decapoda-research/")
OLD_TOKENS = ("<unk>", "</s>", "<s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|finetune_right_pad_id|>")
# by which something else steps
STEPPING = ("deepspeed", "post_accumulate", "fused_backward", "engine", "manual_backward", "functional_optim",
            "configure_optimizers")
STEPS = ("step", "_step", "train_step", "update")
BLOCKS = ("block_size", "group_texts", "chunk", "concatenate", "pad_sequence", "max_length")


def _in_function(script: Script, function: ast.AST | None) -> Iterator[ast.AST]:
    """Yield the nodes of a function's own code, or of the script outside of its functions."""
    yield from inside(function if function is not None else own_tree(script))


def _given(script: Script, name: str, function: ast.AST | None) -> list[ast.Assign]:
    """Return the assignments to a plain name in a function's own code."""
    return [node for node in _in_function(script, function) if isinstance(node, ast.Assign) and gives_name(node, name)]


def _root(node: ast.AST) -> ast.AST:
    """Return what a chain of views begins with: `probs` of `probs.view(-1, 10)[:, 1:]`."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SHAPING:
            node = node.func.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return node


def _is_softmax(script: Script, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ((last_name(node.func) == "softmax" and not _made_by(script, node.func, "LogSoftmax"))
                                           or _made_by(script, node.func, "nn.Softmax"))


def _made_by(script: Script, node: ast.AST, ending: str) -> bool:
    return any(isinstance(value, ast.Call) and script.name(value).endswith(ending) for value in script.assigned(node))


@code_rule_once
def probabilities_as_logits(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The loss takes the softmax of what has been through a softmax already."""
    for call in script.every(ast.Call):
        if not call.args or not is_loss(script, call):
            continue
        first, function = _root(call.args[0]), script.function(call)
        given = [_root(node.value) for node in _given(script, first.id, function)] if isinstance(first, ast.Name) else [first]
        given = [end for node in given for end in (_returned(script, node) or [node])]
        if given and all(_is_softmax(script, node) for node in given):
            yield found("critical", call, given[0])


def _returned(script: Script, node: ast.AST) -> list[ast.AST]:
    """Return what the `forward` of the script's own network gives, where a node calls it."""
    kinds = script.kinds.get(last_name(node.func), frozenset()) if isinstance(node, ast.Call) else frozenset()
    if len(kinds) != 1:
        return []
    kind = next((each for each in every(ast.ClassDef, script.tree) if each.name in kinds), None)
    body = kind.body if kind is not None else []
    forward = next((item for item in body if isinstance(item, ast.FunctionDef) and item.name == "forward"), None)
    if forward is None:
        return []
    ends = [node.value for node in inside(forward) if isinstance(node, ast.Return) and node.value is not None]
    found_: list[ast.AST] = []
    for end in map(_root, ends):
        made = _given(script, end.id, forward) if isinstance(end, ast.Name) else []
        found_.append(_root(made[-1].value) if made and not script.conditions(made[-1]) else end)
    return found_


@code_rule_once
def loss_without_graph(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """backward() begins at a number that has no graph, so no weight gets a gradient."""
    for call in filter(is_backward, script.every(ast.Call)):
        node = call.args[0] if call.args else owner_of(call)
        if isinstance(node, ast.Call) and last_name(node.func) == "scale" and node.args:
            node = node.args[0]
        if not isinstance(node, ast.Name):
            continue
        function = script.function(call)
        adds = any(isinstance(each, ast.AugAssign) and last_name(each.target) == node.id
                   for each in _in_function(script, function))
        made = [each for each in _given(script, node.id, function) if script.module(each) is script.module(call)]
        lost = [each for each in made if _is_without_graph(script, each)]
        if made and len(lost) == len(made) and not adds:
            yield found("critical", call, lost[-1], name=node.id)


def _is_without_graph(script: Script, made: ast.Assign) -> bool:
    """Return whether a value has no graph: `loss.item()`, `torch.tensor(loss)`, or anything reckoned in `torch.no_grad()`."""
    call = made.value
    if isinstance(call, ast.Call) and (script.name(call) == "torch.tensor" or (
            isinstance(call.func, ast.Attribute) and call.func.attr in WITHOUT_GRAPH)):
        return True
    return any(isinstance(around, ast.With) and any(
        script.name(item.context_expr) in WITHOUT_GRADIENTS for item in around.items) for around in script.ancestors(made))


@code_rule
def never_stepped(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Gradients are computed, and no optimizer step follows."""
    made = next((call for call in script.every(ast.Call) if script.name(call).endswith(OPTIMIZERS)), None)
    if made is None or not script.training_loops or "trainer" in script.sections or script.says(*STEPPING):
        return
    steps = [node for node in script.every(ast.Attribute) if node.attr in STEPS and not any(
        word in script.words(node.value).lower() for word in ("sched", "prof", "bar", "env", "tqdm"))]
    if not steps and not any("step" in last_name(call.func).lower() and "sched" not in script.words(call.func).lower()
                             for call in script.every(ast.Call)):
        loop = script.training_loops[0]
        yield found("critical", made, loop.test if isinstance(loop, ast.While) else loop.iter)


@code_rule_once
def everything_frozen(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """All weights of the model are frozen, and it is trained."""
    if script.says("get_peft_model", "peft_config", "PeftModel", "add_adapter", "Prompt", "lora", "LoRA"):
        return
    stores = [node for node in script.every(ast.Assign) if any(
        isinstance(target, ast.Attribute) and target.attr == "requires_grad" for target in node.targets)]
    frees = any(not is_constant(node.value, False) for node in stores) or any(
        not (call.args and getattr(call.args[0], "value", None) is False) for call in script.calls(".requires_grad_"))
    for node in stores if not frees else ():
        loop = script.parents.get(node)
        over = loop.iter if isinstance(loop, ast.For) else None
        owner = owner_of(over) if isinstance(over, ast.Call) and last_name(over.func) == "parameters" else None
        if not isinstance(owner, ast.Name) or script.conditions(node):
            continue
        name, function = owner.id, script.function(node)
        changed = any(isinstance(each.ctx, ast.Store) and ast.unparse(each).startswith(f"{name}.")
                      for each in script.every(ast.Attribute)) or any(
            each.lineno > node.lineno for each in _given(script, name, function))
        trained = any(trains_it(script, each, name) and script.function(each) is function for each in script.every(ast.Call))
        if trained and not changed:
            yield found("critical", node, over, name=name)


def trains_it(script: Script, call: ast.Call, name: str) -> bool:
    """Return whether a call makes an optimizer of a model's parameters alone, or a Trainer of the model."""
    if script.name(call).endswith(OPTIMIZERS):
        first = argument(call, "params", 0)
        return first is not None and ast.unparse(first) in (f"{name}.parameters()", f"list({name}.parameters())")
    given = argument(call, "model", 0) if last_name(call.func).endswith("Trainer") else None
    return given is not None and ast.unparse(given) == name


@code_rule_once
def adapters_asked_of_base(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A model without adapters is asked for what only a model with adapters has."""
    for call in script.every(ast.Call):
        owner = owner_of(call) if last_name(call.func) in OF_ADAPTERS else None
        if not isinstance(owner, ast.Name) or is_tried(script, call):
            continue
        made = {node: script.name(node.value).removesuffix(".to").removesuffix(".cuda").removesuffix("()")
                if isinstance(node.value, ast.Call) else "" for node in _given(script, owner.id, script.function(call))}
        bases = [node for node, name in made.items() if name.startswith("transformers.") and name.endswith("from_pretrained")]
        others = [node for node, name in made.items() if node not in bases and name.rpartition(".")[2] not in KEPT]
        tests = {script.words(test.test) for test in script.conditions(call)}
        wraps = [node for node in others if made[node].rpartition(".")[2] == "get_peft_model"]
        loose = [node for node in wraps if _condition(script, node) not in (*tests, None)]
        if bases and len(loose) == len(others) and not any("hasattr" in test or "isinstance" in test for test in tests):
            off = all(any(around in script.unused for around in (node, *script.ancestors(node))) for node in loose)
            yield found("critical" if off else "moderate", call, bases[0], method=last_name(call.func),
                        when=f", unless {_condition(script, loose[0])}" if loose else "")


def _condition(script: Script, node: ast.AST) -> str | None:
    """Return the test of the one `if` around a statement that has no `else`; None where there is another way."""
    tests = script.conditions(node)
    return script.words(tests[0].test) if len(tests) == 1 and not tests[0].orelse else None


@code_rule_once
def tokens_beyond_embeddings(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A token is added to the tokenizer, and the model has no embedding for it."""
    path = subject.value("model.path") or subject.value("tokenizer.path")
    if not isinstance(path, str) or not path.startswith(TIGHT) or "Llama-3" in path or script.says(
            "resize_", "clone_chat_template", "setup_chat_format", "smart_tokenizer"):
        return
    for call in script.calls(".add_special_tokens", ".add_tokens") if script.has_made(*CAUSAL) else ():
        parts = [part for item in call.args[:1] for part in (item.values if isinstance(item, ast.Dict) else [item])]
        new = [node.value for part in parts for node in every(ast.Constant, part)
               if isinstance(node.value, str) and node.value not in OLD_TOKENS]
        if new and isinstance(call.func, ast.Attribute) and not script.conditions(call):
            yield found("critical", call, token=new[0], path=path)


@code_rule
def stopping_without_score(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Early stopping is asked for without what it looks at."""
    call = next(script.calls("transformers.EarlyStoppingCallback", "transformers.trainer_callback.EarlyStoppingCallback"), None)
    if call is None or subject.framework not in TRAINERS or "training" not in script.sections or script.conditions(call):
        return
    keys = (METRIC, "training.load_best_model_at_end", "training.eval_strategy")
    if any(subject.is_unread(key) for key in keys):
        return
    evaluates = subject.value(keys[2]) not in (None, False, "no")
    scored = subject.value(keys[0]) is not None or subject.on(keys[1])
    if not evaluates or not scored:
        yield found("critical", call, keys[2] if not evaluates else keys[0], lacks="an eval_strategy" if not evaluates else
                    "metric_for_best_model or load_best_model_at_end")


@code_rule
def rows_of_unequal_length(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Rows of different lengths go into one batch, and nothing pads them."""
    trainer = script.sections.get("trainer")
    if trainer is None or subject.framework != "transformers" or not script.name(trainer).startswith("transformers.") or any(
            item.arg is None for item in trainer.keywords) or len(trainer.args) > 2 or not script.has_call(".map"):
        return
    if argument(trainer, "data_collator") is not None:
        return
    padded = any(item.arg == "padding" for item in script.every(ast.keyword))
    if padded or subject.examples_per_pass in (None, 1) or script.has_call(".pad") or script.says(*BLOCKS[:-1]):
        return
    helped = argument(trainer, "processing_class") is not None or argument(trainer, "tokenizer") is not None
    labels = next((node for node in script.nodes if is_copied(script, node)), None)
    if tokenises(script) and (not helped or labels is not None):
        yield found("critical", trainer, labels, pads=helped)


@rule
def resumes_from_nothing(subject: Subject, where: Circumstances) -> Findings:
    """The training is always told to resume, also where there is no checkpoint yet."""
    script, key = subject.script, "training.resume_from_checkpoint"
    said = subject.value(key)
    if script is None and subject.framework in ("llama-factory", "axolotl") and (
            (said is True and subject.framework == "llama-factory") or _is_of_other_run(said)):
        yield found("critical", key)
    if script is not None and script.command is not None and script.shell is not None:
        for name in ("resume_from_checkpoint", "checkpoint_dir"):
            given = settings_of(script.command).get(name)
            path = str(given.value) if given is not None else ""
            others = [each for each in started_lines(script) if f"--{name}" not in each.words and any(
                Path(word).as_posix() == Path(path).parent.as_posix() for word in each.words)]          # which may make it
            if given and re.fullmatch(r"(?![/~$]).*checkpoint-\d+/?", path) and not others and not any(
                    (folder / path).exists() for folder in starts(script.path, script)):
                yield found("critical", given.evidence, case="named", path=path)
    resumes = script is not None and script.command is not None and any("resume" in word for word in script.command.words)
    if script is None or "trainer" not in script.sections or resumes:
        return
    trained = [made for made in subject.calls if made.last == "train" and not made.doubts and not is_tried(script, made.node)]
    for made in trained:
        value = made.get("resume_from_checkpoint")
        if value is True or _is_of_other_run(value):
            command = script.command
            yield found("critical", made.node, Evidence(" ".join(command.words), command.place) if command else None)
            return
    if any(isinstance(made.get("resume_from_checkpoint"), Unread) for made in trained) and script.says(
            "resume_from_checkpoint"):
        for file, sure in configs_of(script):
            with suppress(WrongUse):
                said = read_marked(file).inner.get("resume_from_checkpoint")
                if sure and said is not None and (said.value is True or _is_of_other_run(said.value)):
                    yield found("critical", Evidence(f"resume_from_checkpoint: {said.value}", Place(
                        shown(script, file.resolve()), said.line)), trained[0].node)
                    return


def _is_of_other_run(value: Any) -> bool:
    """Return whether a checkpoint is named by an absolute path of some person's machine, and is not there."""
    return isinstance(value, str) and re.match(r"/(home|Users)/|[A-Z]:[\\/]", value) is not None and not Path(value).exists()
