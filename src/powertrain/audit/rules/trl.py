"""Rules on what TRL's trainers are given, and on models and rows that do not fit a trainer."""

import ast

from powertrain.audit.edits import with_text
from powertrain.audit.installed import in_force
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found, known
from powertrain.audit.rules.names import since
from powertrain.audit.scopes import is_tried, means
from powertrain.audit.script import Script
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, argument, every, last_name, owner_of
from powertrain.records.findings import Edit

REWARDED = ("GRPOTrainer", "RLOOTrainer")
# whose arguments have to be their own; SFTTrainer converts plain ones
OWN_CONFIGS = ("DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")
REFERRED = ("DPOTrainer", "KTOTrainer")
BARE = tuple(f"transformers.{name}.from_pretrained" for name in (
    "AutoModel", "BertModel", "RobertaModel", "DistilBertModel", "GPT2Model", "T5Model", "LlamaModel", "MistralModel"))
OWNED = known("owners")
SORTED = known("sorted_by_class")
ON_THE_DEVICE = ("to", "cuda", "pipeline", "set_default_device", "dispatch_model")


@code_rule_once
def rewards_refuse_arguments(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The trainer calls a reward function with more arguments than it takes."""
    trainer = script.sections.get("trainer")
    if trainer is None or not subject.trainer.startswith("trl.") or not subject.trainer.endswith(REWARDED) \
            or not in_force("trl", where):
        return
    given = argument(trainer, "reward_funcs", 1)
    values = script.assigned(given) if isinstance(given, ast.Name) and given.id not in script.functions else [given]
    for item in (each for value in values for each in (value.elts if isinstance(value, ast.List | ast.Tuple) else [value])):
        function = script.functions.get(item.id) if isinstance(item, ast.Name) else None
        if isinstance(item, ast.Name) and function is not None and means(script, item, function) \
                and function.args.kwarg is None and not function.decorator_list:
            yield found("critical", item, script.evidence(function.args), name=function.name)


@code_rule
def reference_is_model(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The reference is the very model that is trained."""
    trainer = script.sections.get("trainer")
    if trainer is None or not subject.trainer.startswith("trl.") or not subject.trainer.endswith(REFERRED):
        return
    model, reference = argument(trainer, "model", 0), argument(trainer, "ref_model", 1)
    if isinstance(model, ast.Name) and isinstance(reference, ast.Name):
        given = [reference] if reference.id == model.id else script.assigned(reference)
        if given and all(isinstance(each, ast.Name) and each.id == model.id for each in given):
            yield found("critical", reference, given[0] if given[0] is not reference else None)


@code_rule
def plain_arguments(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A trainer of TRL gets the arguments of transformers, which lack what it reads."""
    trainer, made = script.sections.get("trainer"), script.sections.get("training")
    if trainer is None or made is None or not subject.trainer.startswith("trl.") or not in_force("trl", where):
        return
    if subject.trainer.endswith(OWN_CONFIGS) and script.name(made).endswith(("transformers.TrainingArguments",
                                                                             "training_args.TrainingArguments")):
        yield found("critical", made, trainer, config=last_name(trainer.func).replace("Trainer", "Config"))


@code_rule_once
def model_without_head(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A model is loaded without the head that the training needs."""
    trainer = script.sections.get("trainer")
    asked = [argument(trainer, "model", 0)] if trainer is not None and subject.framework in TRAINERS \
        and not script.says("compute_loss") else []
    asked += [owner_of(call) for call in script.calls(".generate")]
    for node in asked:
        made = script.assigned(node) if isinstance(node, ast.Name) else []
        loads = [call for call in made if isinstance(call, ast.Call) and script.name(call) in BARE
                 and argument(call, "trust_remote_code") is None]        # whose own code may add a head
        if loads and len(loads) == len([each for each in made if not _adds_adapters(each)]):
            yield found("critical", loads[0], node, name=script.name(loads[0]).split(".")[1])


def _adds_adapters(value: ast.AST) -> bool:
    return isinstance(value, ast.Call) and last_name(value.func) in ("get_peft_model", "prepare_model_for_kbit_training", "to")


@code_rule
def owner_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A data set of the hub is asked for without its owner."""
    edits: list[Edit] = []
    lost: list[ast.expr] = []
    for call in script.calls("datasets.load_dataset"):
        name = argument(call, "path", 0)
        for given in [name, *script.assigned(name)] if name is not None else []:
            said = given.value if isinstance(given, ast.Constant) else None
            if said in OWNED and not is_tried(script, call) and not (script.path.parent / str(said)).exists():
                lost.append(given)
                edits += with_text(script, given, f'"{OWNED[str(said)]}"')
    if lost:
        said_names = dict.fromkeys(str(each.value) for each in lost if isinstance(each, ast.Constant))
        names = ", ".join(f"{name} (now {OWNED[name]})" for name in said_names)
        yield found(since(where), *lost, edits=tuple(edits), names=names)


@code_rule_once
def one_class_taken(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The first rows are taken of data that is sorted by class, so the examples are all of one class."""
    for call in script.calls("datasets.load_dataset"):
        name = argument(call, "path", 0)
        if not isinstance(name, ast.Constant) or name.value not in SORTED:
            continue
        split = argument(call, "split", 5)
        if isinstance(split, ast.Constant) and "[:" in str(split.value) and "+" not in str(split.value):
            yield found("critical", split, name=name.value)
        elif not script.has_call(".shuffle", ".train_test_split", "random.sample"):
            for select in script.calls(".select"):
                rows = select.args[0] if select.args else None
                if isinstance(rows, ast.Call) and last_name(rows.func) == "range" and len(rows.args) == 1 and call in (
                        script.behind(owner_of(select) or select)):
                    yield found("critical", select, call, name=name.value)


@code_rule_once
def inputs_left_on_cpu(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The trainer has put the model on the GPU, and what the model is asked afterwards stays on the CPU."""
    if subject.framework not in TRAINERS or where.on_cpu or script.has_call(".cpu") or script.says("unsloth", "use_cpu"):
        return
    trains = [call for call in script.calls(".train") if not call.args and "train" in last_name(owner_of(call) or call)]
    last = max((call.lineno for call in trains if script.function(call) is None), default=0)
    for call in script.calls(".generate") if last else ():
        owner, home = owner_of(call), script.function(call)
        made_anew = owner is None or any(value.lineno > last for value in script.assigned(owner))
        given = next(iter(call.args), None) or argument(call, "input_ids") or next(
            (item.value for item in call.keywords if item.arg is None), None)
        if made_anew or given is None or (home is None and call.lineno < last) or not _is_the_trained(script, owner):
            continue
        behind = [node for node in script.behind(given) if script.function(node) in (home, None)]
        calls = [node for node in behind if isinstance(node, ast.Call)]
        encodes = next((node for node in calls if argument(node, "return_tensors") is not None), None)
        moved = any(last_name(node.func) in ON_THE_DEVICE for node in calls)
        if encodes is not None and not moved and (home is None or _is_called_after(script, home, last)):
            yield found("critical", call, encodes, only="there is a GPU")


def _is_the_trained(script: Script, owner: ast.expr | None) -> bool:
    """Return whether a name stands for the model that the trainer was given, or is the trainer's own."""
    trainer = script.sections.get("trainer")
    model = argument(trainer, "model", 0) if trainer is not None else None
    if isinstance(owner, ast.Attribute):
        return owner.attr == "model" and last_name(owner.value) == "trainer"
    return isinstance(owner, ast.Name) and isinstance(model, ast.Name) and owner.id == model.id


def _is_called_after(script: Script, function: FunctionNode, line: int) -> bool:
    """Return whether a function is called at the top of the file, and only below a line."""
    calls = [call for call in every(ast.Call, script.tree) if script.called(call) is function]
    return bool(calls) and all(script.function(call) is None and call.lineno > line for call in calls)


@code_rule
def generations_cut(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The evaluation generates at most 20 tokens, the default of T5, and scores these."""
    made, path = script.sections.get("training"), str(subject.value("model.path") or "").lower()
    asked = argument(made, "predict_with_generate") if made is not None else None
    lengths = ("generation_max_length", "max_length", "max_new_tokens", "generation_config", "gen_kwargs")
    told = any(item.arg in lengths for call in script.calls(".evaluate", ".predict", "transformers.Seq2SeqTrainingArguments")
               for item in call.keywords)
    evaluates = subject.value("training.eval_strategy") not in (None, "no") or script.has_call(".evaluate", ".predict")
    if isinstance(asked, ast.Constant) and asked.value is True and "t5" in path and evaluates and not told \
            and not any(item.arg is None for item in (made.keywords if made is not None else ())) \
            and not script.says("generation_config", "generation_max_length"):
        yield found("moderate", asked)


@code_rule_once
def scores_of_older_release(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """ROUGE's scores are asked for parts that they had before they became plain numbers."""
    rouge = any(isinstance(item, ast.Constant) and item.value == "rouge" for call in script.calls("evaluate.load")
                for item in call.args)
    for node in script.every(ast.Attribute) if rouge else ():
        if node.attr in ("fmeasure", "recall", "precision") and last_name(node.value) == "mid":
            yield found("critical", node)
