"""Rules on data, heads and predictions that do not fit what a trainer makes of them."""

import ast

from powertrain.audit.installed import in_force
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found, known
from powertrain.audit.rules.columns import mapped, read_of_rows
from powertrain.audit.rules.labels import tokenises
from powertrain.audit.rules.names import of_unsloth
from powertrain.audit.rules.refusals import SCORING, is_base
from powertrain.audit.rules.trl import trainer_of_trl
from powertrain.audit.scopes import is_tried
from powertrain.audit.script import Script
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.audit.syntax import argument, every, hides_arguments, is_constant, last_name

OF_TORCH = ("torch.utils.data.random_split", "torch.utils.data.Subset", "torch.utils.data.TensorDataset",
            "torch.utils.data.DataLoader", "torch.utils.data.ConcatDataset")
SPLITS = "all splits of the data, in a DatasetDict"
RENAMING = (".remove_columns", ".select_columns", ".rename_column", ".rename_columns", ".add_column", ".from_dict")
# columns that each trainer reads, where it does not find others that do as well
NEEDED: dict[str, tuple[str, ...]] = {
    "SFTTrainer": (), "DPOTrainer": ("chosen", "rejected"), "RewardTrainer": ("chosen", "rejected"),
    "KTOTrainer": ("completion", "label"), "GRPOTrainer": ("prompt",), "RLOOTrainer": ("prompt",)}
BEGINS = tuple(known("begins"))
TAKING = ("PeftModel", "get_peft_model", "load_state_dict", "load_adapter", "load_model")


@code_rule
def rows_of_other_kind(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A trainer of TRL gets data that are no data set of the datasets library."""
    of_trl, trainer = trainer_of_trl(script, subject, *NEEDED), script.sections.get("trainer")
    data = argument(trainer, "train_dataset") if trainer is not None else None
    if data is None or subject.framework not in TRAINERS or of_unsloth(script) or not in_force("trl", where) or is_tried(
            script, data):
        return
    here = [node for node in script.every(ast.Assign) if script.module(node) is script.module(data)]
    given = script.assigned(data) or [node.value for node in here if any(
        isinstance(target, ast.Tuple) and ast.unparse(data) in map(ast.unparse, target.elts) for target in node.targets)]
    kinds = [_kind(script, value) for value in given or [data]]
    if of_trl is None and kinds != [SPLITS]:             # transformers' own trainer takes any rows
        return
    if all(kinds) and not any(script.conditions(value) for value in given):
        yield found("critical", data, *given[-1:], kind=kinds[-1])


def _kind(script: Script, value: ast.expr) -> str:
    """Return what a value is, where it is rows of another kind; "" where it is not known."""
    if isinstance(value, ast.List | ast.ListComp):
        return "a list"
    if not isinstance(value, ast.Call):
        return ""
    name, own = script.name(value), script.classes.get(last_name(value.func))
    if name in OF_TORCH:
        return f"what {name} gives"
    if own is not None and any(script.name(base) in ("torch.utils.data.Dataset", "torch.utils.data.IterableDataset")
                               for base in own.bases):
        return f"{own.name}, a data set of torch"
    local = name == "datasets.load_dataset" and not hides_arguments(value) and argument(value, "split", 4) is None
    return SPLITS if local else ""


@code_rule_once
def columns_unfit(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The rows have other columns than the trainer reads."""
    trainer, kind = trainer_of_trl(script, subject, *NEEDED), subject.trainer.rpartition(".")[2]
    texts = {node.value for node in script.every(ast.Constant) if isinstance(node.value, str)}
    if trainer is None or of_unsloth(script) or not in_force("trl", where) or script.has_call(*RENAMING) or is_tried(
            script, trainer) or texts & {"input_ids", "skip_prepare_dataset"} or tokenises(script):
        return
    maps = [call for call in script.calls(".map") if not hides_arguments(call)]
    data = argument(trainer, "train_dataset")
    mine = [call for call in maps if data is not None and call in script.behind(data)]
    own = _columns_of(script, mine[-1]) if mine and len(mine) == len(maps) == 1 else None
    only = own is not None and "column_names" in ast.unparse(argument(mine[-1], "remove_columns") or mine[-1].func)
    given = argument(trainer, "formatting_func")
    maker = script.functions.get(last_name(given)) if given is not None else None
    read = [] if any(argument(call, "remove_columns") for call in maps) else read_of_rows(
        [*mapped(script, *maps), *([maker] if maker is not None else [])])
    asked = next((node for name, node in read if name == "prompt" and not script.conditions(node)
                  and not is_tried(script, node)), None)
    if kind == "SFTTrainer" and "completion" not in texts and (asked or (own and "prompt" in own)):
        yield found("critical", asked or mine[-1], trainer)
    field = str(subject.value("training.dataset_text_field") or "text")
    needed = NEEDED[kind] if kind != "SFTTrainer" or given is not None else (field,)
    also = {"messages", "conversations", "prompt", "chosen", "images"} if kind in ("SFTTrainer", "KTOTrainer") else set()
    lost = [name for name in needed if own is not None and name not in own]
    if only and own is not None and lost and not own & also:
        yield found("critical", mine[-1], trainer, case="lost", lost=", ".join(lost), has=", ".join(sorted(own)))


def _columns_of(script: Script, call: ast.Call) -> set[str] | None:
    """Return the columns that the function of a `map` gives; None where they are not known."""
    function = next(iter(mapped(script, call)), None)
    body = function.body if isinstance(function, ast.Lambda) else None
    given = [body] if body is not None else [node.value for node in every(ast.Return, function)] if function else []
    keys = [getattr(key, "value", None) for value in given if isinstance(value, ast.Dict) for key in value.keys]
    known = given and all(isinstance(value, ast.Dict) for value in given) and all(isinstance(key, str) for key in keys)
    return {str(key) for key in keys} if known else None


@code_rule_once
def scores_at_random(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Rewards come from a head that is drawn at random and never trained."""
    taken = {ast.unparse(node) for call in script.every(ast.Call) if last_name(call.func) in TAKING or any(
        word in script.name(call) for word in ("PeftModel",)) for node in call.args}
    trained = {ast.unparse(given) for call in script.every(ast.Call) if last_name(call.func).endswith("Trainer")
               if (given := argument(call, "model", 0)) is not None}
    for node in script.every(ast.Assign):
        call = node.value
        while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cuda", "eval"):
            call = call.func.value
        name = ast.unparse(node.targets[0])
        if not isinstance(call, ast.Call) or not script.name(call).endswith(SCORING) or "reward" not in name.lower():
            continue
        path = argument(call, "pretrained_model_name_or_path", 0)
        said = [value.value for value in [path, *(script.assigned(path) if path is not None else [])]
                if isinstance(value, ast.Constant)]
        changed = name in taken | trained or any(f"{name}.{end}" in script.text for end in (
            "parameters", "train(", "load_state_dict", "load_adapter", "score"))
        if said and all(map(is_base, said)) and not changed and not script.conditions(node):
            yield found("critical", node, path=said[0])


@code_rule_once
def ignored_labels_decoded(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Generated tokens are decoded with the -100 in them that fills up shorter batches."""
    path, trainer = str(subject.value("model.path") or "").lower(), script.sections.get("trainer")
    # by default a T5 gives one token more than the 20 up to which batches are filled with the padding token
    longer = is_base(path) or subject.value("training.generation_max_length") or any(
        argument(call, "max_length") is not None for call in script.calls(".evaluate", ".predict"))
    if trainer is None or not subject.on("training.predict_with_generate") or not longer or "t5" not in path:
        return
    for call in script.calls(".batch_decode"):
        function, given = script.function(call), call.args[0] if call.args else None
        if function is None or not isinstance(given, ast.Name):
            continue
        stores = [node for node in every(ast.Name, function) if node.id == given.id and isinstance(node.ctx, ast.Store)]
        unpacks = [node for node in stores if isinstance(around := script.parents[node], ast.Tuple) and around.elts[0] is node
                   and isinstance(script.parents[around], ast.Assign)]
        others = [node for node in stores if node not in unpacks and not _takes_first(script.parents[node])]
        changed = any(isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == given.id
                      for node in every(ast.Subscript, function))
        if unpacks and not others and not changed:
            yield found("critical", call, unpacks[0], name=given.id)


def _takes_first(node: ast.AST) -> bool:
    """Return whether a node is `preds = preds[0]`."""
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript) and isinstance(node.value.slice, ast.Constant)


@code_rule_once
def begins_twice(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The tokenizer puts a beginning-of-text token where there is one already, or in the midst of the text."""
    path = subject.value("tokenizer.path") or subject.value("model.path")
    of_these = isinstance(path, str) and path.startswith(BEGINS)
    if not of_these and not script.says("<|start_header_id|>"):
        return
    for call in script.every(ast.Call) if of_these else ():
        if last_name(call.func) in ("tokenizer", "tok", "encode") and call.args and not any(
                item.arg in ("add_special_tokens", None) for item in call.keywords):
            template = next((node for node in script.behind(call.args[0]) if isinstance(node, ast.Call)
                             and last_name(node.func) == "apply_chat_template"), None)
            if template is not None and is_constant(argument(template, "tokenize"), False):
                yield found("critical", call, template, path=path)
    for node in script.every(ast.BinOp) if not script.says("add_bos_token") else ():
        parts, whole = [node.right], node.left
        while isinstance(whole, ast.BinOp):
            parts, whole = [whole.right, *parts], whole.left
        begun = [part for part in (whole, *parts) if _is_begun(script, part)]
        if isinstance(node.op, ast.Add) and not isinstance(script.parents[node], ast.BinOp) and len(begun) > 1:
            yield found("critical", node, begun[1], path=path if of_these else "The tokenizer of Llama 3", case="in pieces")
            return


def _is_begun(script: Script, part: ast.expr) -> bool:
    """Return whether an expression is the tokens of a text of its own, behind the token that begins one."""
    of_text = (isinstance(part, ast.Attribute) and part.attr == "input_ids") or (
        isinstance(part, ast.Subscript) and getattr(part.slice, "value", "") == "input_ids")
    made = part.value if of_text and isinstance(part, ast.Attribute | ast.Subscript) else part
    if isinstance(made, ast.Name):
        own = [value for value in script.assigned(made) if script.function(value) is script.function(part)]
        return bool(own) and all(_tokenises(value, whole=of_text) if of_text else not isinstance(value, ast.Name)
                                 and _is_begun(script, value) for value in own)
    return _tokenises(made, whole=of_text)


def _tokenises(node: ast.AST, *, whole: bool) -> bool:
    """Return whether a call tokenises a text with all that its model puts around it; `whole`: with the attention mask."""
    return isinstance(node, ast.Call) and bool(node.args) and last_name(node.func) in (
        ("tokenizer", "tok") if whole else ("encode",)) and not any(
        item.arg in ("add_special_tokens", None) for item in node.keywords)
