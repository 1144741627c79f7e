"""Rules on methods that a project writes for a library's class: whether the present release calls them, and how."""

import ast
import re
from collections.abc import Iterator, Mapping

from powertrain.audit.installed import in_force
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found, known
from powertrain.audit.rules.calls import own_class
from powertrain.audit.rules.elsewhere import plain
from powertrain.audit.rules.names import EVALUATING, of_unsloth, since
from powertrain.audit.scopes import is_tried, run_nodes
from powertrain.audit.script import Script
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.audit.syntax import Node, every, inside, last_name, owner_of, reads_of

SAVING = "training.save_strategy"
CALLED: Mapping[str, str] = known("called_by_trainer")
BY_LIGHTNING: Mapping[str, str] = known("called_by_lightning")
TO_SAVE: Mapping[str, str] = known("called_to_save")
TO_EVALUATE: Mapping[str, str] = known("called_to_evaluate")
NEVER_CALLED: Mapping[str, str] = known("never_called")
OF_EVENTS = ("args, state, control, model=model, processing_class=tokenizer, optimizer=optimizer, lr_scheduler=scheduler, "
             "train_dataloader=loader, eval_dataloader=loader")
MORE = {"on_log": ", logs=logs", "on_evaluate": ", metrics=metrics", "on_predict": ", metrics=metrics"}
REFUSED = ("training_epoch_end", "validation_epoch_end", "test_epoch_end")       # of pytorch_lightning 2
FINISHING = ("post_init", "all_tied_weights_keys", "def init_weights", "def tie_weights", "def from_pretrained")
OLDER = "tokenizer"                          # what callbacks were given under this name is processing_class


@code_rule
def method_of_older_release(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A method is written for an older release of the class that it belongs to."""
    if not in_force("transformers", where):
        return
    used = {node.id for node in run_nodes(script) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for kind in every(ast.ClassDef, script.tree):
        above = _library_class(script, kind)
        derived = {each.name for each in script.classes.values() if kind.name in map(ast.unparse, each.bases)}
        if not above or not used & {kind.name, *derived}:
            continue
        for item in kind.body:
            if isinstance(item, ast.FunctionDef) and not item.decorator_list:
                for case, node, says in _wrong(script, subject, item, above):
                    yield found(since(where), node, case=case, name=item.name, kind=above.rpartition(".")[2], says=says)


@code_rule_once
def model_never_finished(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A model of the project's own does not call post_init(), without which transformers 5 neither makes nor loads it."""
    for call, lineage in _own_models(script, where):
        early = next((node for node in _in_making(lineage, ast.Call) if ast.unparse(node.func) == "self.init_weights"
                      and not script.conditions(node)), None)
        loads = last_name(call.func) == "from_pretrained"
        if (early is not None or loads) and not any(word in ast.unparse(kind) for kind in lineage for word in FINISHING):
            yield found("critical", early or lineage[0].bases[0], call, name=lineage[0].name,
                        when="as it is made, in init_weights()" if early is not None else "after its weights are loaded")


@code_rule_once
def tied_weights_undeclared(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A model of the project's own has one weight in two layers and does not say so: transformers refuses to save it."""
    trains = "trainer" in script.sections and subject.framework in TRAINERS and subject.value(SAVING) not in ("no", False)
    saves = next((call for call in script.calls(".save_pretrained") if not any(
        word in script.words(call.func).lower() for word in ("tok", "processor", "config"))), None)
    for _, lineage in _own_models(script, where) if (trains or saves is not None) and not script.says("peft") else ():
        for node in _in_making(lineage, ast.Assign):
            tied = re.fullmatch(r"self\.[\w.]+\.weight = self\.[\w.]+\.weight", ast.unparse(node))
            if tied and not script.conditions(node) and not any("_tied_weights_keys" in ast.unparse(kind) for kind in lineage):
                yield found("critical", node, saves or script.sections["trainer"], name=lineage[0].name)


def _own_models(script: Script, where: Circumstances) -> Iterator[tuple[ast.Call, list[ast.ClassDef]]]:
    """Yield (what makes or loads it, its class and those above) of the project's models that derive from PreTrainedModel."""
    asked = [call for call in run_nodes(script) if isinstance(call, ast.Call)] if in_force("transformers", where) else []
    registered = [call.args[1] for call in asked if script.name(call).startswith("transformers.AutoModel")
                  and last_name(call.func) == "register" and len(call.args) == 2]
    for call in asked:
        named = owner_of(call) if last_name(call.func) == "from_pretrained" else call.func
        if named is not None and last_name(named).startswith("AutoModel") and len(set(map(last_name, registered))) == 1:
            named = registered[0]
        own = own_class(script, named) if named is not None else None
        lineage = _of_models(script, own) if own is not None and not is_tried(script, call) else []
        yield from [(call, lineage)] if lineage else []


def _in_making(lineage: list[ast.ClassDef], kind: type[Node]) -> list[Node]:
    """Return the nodes of one type in the `__init__` of a class and of those above it."""
    return [node for each in lineage for item in each.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"
            for node in every(kind, item)]


def _of_models(script: Script, kind: ast.ClassDef) -> list[ast.ClassDef]:
    """Return an own class of models and those that it derives from, up to a PreTrainedModel; empty for any other."""
    bases = [base for base in kind.bases if not last_name(base).endswith("Mixin")]
    own = own_class(script, bases[0]) if len(bases) == 1 else None
    if own is not None and own is not kind:
        above = _of_models(script, own)
        return [kind, *above] if above else []
    of_them = len(bases) == 1 and re.match(r"transformers\.(?!.*\b(TF|Flax)).*PreTrainedModel$", script.name(bases[0]))
    return [kind] if of_them else []


def _library_class(script: Script, kind: ast.ClassDef, seen: tuple[ast.ClassDef, ...] = ()) -> str:
    """Return the dotted name of the one class of a library that an own class derives from; "" for any other."""
    if len(kind.bases) != 1:
        return ""
    base = own_class(script, kind.bases[0])
    if base is not None and base is not kind and base not in seen:
        return _library_class(script, base, (*seen, kind))
    name = plain(script.name(kind.bases[0]))
    if name.startswith("trl.") and of_unsloth(script):
        return ""
    return name if name.startswith(("transformers.", "trl.", "pytorch_lightning.")) else ""


def _wrong(script: Script, subject: Subject, item: ast.FunctionDef, above: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield (case, where, what) of a method that the class above calls in another way, or never."""
    name, spec = item.name, item.args
    if above in ("pytorch_lightning.LightningModule", "pytorch_lightning.LightningDataModule"):
        checked = name != "test_epoch_end" or script.has_call(".test")
        yield from [("refused", spec, "")] if name in REFUSED and checked and above.endswith("LightningModule") else []
        yield from [("", item, lost)] if name in BY_LIGHTNING and (lost := _unfit(spec, BY_LIGHTNING[name])) else []
    elif above == "transformers.TrainerCallback" and name.startswith("on_"):
        lost = _unfit(spec, OF_EVENTS + MORE.get(name, ""))
        yield from [("", item, lost)] if lost else _of_tokenizer(item)
    elif above.endswith("Trainer") and name in NEVER_CALLED.get(above, "").split():
        if not any(node.attr == name for node in every(ast.Attribute, script.tree)
                   if not script.is_within(node, item)):
            yield "never", item, ""
    elif above.endswith("Trainer"):
        saves = subject.value(SAVING) not in ("no", False)
        evaluates = subject.value(EVALUATING) not in (None, "no", False) or script.has_call(".evaluate")
        call = CALLED.get(name, TO_SAVE.get(name) if saves else None) or (TO_EVALUATE.get(name) if evaluates else None)
        lost = _unfit(spec, call) if call is not None else ""
        if lost:
            yield "", item, lost


def _unfit(spec: ast.arguments, call: str) -> str:
    """Return why a method does not take a call, or ""."""
    asked = ast.parse(f"called({call})", mode="eval").body
    assert isinstance(asked, ast.Call)
    names = [item.arg for item in (*spec.posonlyargs, *spec.args)][1:]
    alone = {item.arg: default for item, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)}
    if len(asked.args) > len(names) and spec.vararg is None:
        return f"it gets {', '.join(map(ast.unparse, asked.args))}, and takes {', '.join(names) or 'nothing'}"
    given = {*names[:len(asked.args)], *(str(item.arg) for item in asked.keywords)}
    more = [str(item.arg) for item in asked.keywords if item.arg not in names and item.arg not in alone]
    if more and spec.kwarg is None:
        return f"it gets {', '.join(more[:3])}{' and more' if len(more) > 3 else ''}, and does not take that"
    needed = [*names[:len(names) - len(spec.defaults)], *(name for name, default in alone.items() if default is None)]
    lacking = [name for name in needed if name not in given]
    return f"it needs {', '.join(lacking)}, and does not get that" if lacking else ""


def _of_tokenizer(item: ast.FunctionDef) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield where a callback uses the tokenizer under its old name, without looking whether it is there."""
    rest = item.args.kwarg.arg if item.args.kwarg is not None else ""
    for node in every(ast.Subscript, item):
        if rest and ast.unparse(node) == f"{rest}['{OLDER}']" and isinstance(node.ctx, ast.Load) and f"'{OLDER}' in {rest}" \
                not in ast.unparse(item):
            yield "tokenizer", node, "it is looked up by a name that is not there: a KeyError"
            return
    taken = {each.arg for each in (*item.args.args, *item.args.kwonlyargs)}
    reads = reads_of(OLDER, item) if OLDER in taken else []
    tests = (node for node in inside(item) if isinstance(node, ast.If | ast.IfExp | ast.BoolOp | ast.Try))
    asks = any(OLDER in ast.unparse(node) for node in tests)
    stored = any(node.id == OLDER and isinstance(node.ctx, ast.Store) for node in every(ast.Name, item))
    used: list[tuple[ast.AST, ast.AST]] = [(node, node.value) for node in every(ast.Attribute, item)]
    used += [(node, node.func) for node in every(ast.Call, item)]
    use = next((node for node, owner in used if owner in reads), None)
    if use is not None and not asks and not stored:
        yield "tokenizer", use, "it is None"
