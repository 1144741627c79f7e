"""Rules on what TRL's trainers are given, and on models and rows that do not fit a trainer."""

import ast
import re
from pathlib import Path

from powertrain.audit.edits import with_text
from powertrain.audit.installed import in_force
from powertrain.audit.known_calls import WRAPPED
from powertrain.audit.rules.base import Findings, code_rule, code_rule_once, found, known, rule
from powertrain.audit.rules.memory import PASS
from powertrain.audit.rules.names import of_unsloth, since
from powertrain.audit.rules.network import MOVING
from powertrain.audit.scopes import is_tried, means
from powertrain.audit.script import Script
from powertrain.audit.subject import TRAINERS, Circumstances, Subject
from powertrain.audit.syntax import FunctionNode, argument, every, gives_name, hides_arguments, is_constant, last_name, owner_of
from powertrain.records.findings import Edit

REWARDED = ("GRPOTrainer", "RLOOTrainer")
# whose arguments have to be their own; SFTTrainer converts plain ones
OWN_CONFIGS = ("DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer")
REFERRED = ("DPOTrainer", "KTOTrainer")
BARE = tuple(f"transformers.{name}.from_pretrained" for name in (
    "AutoModel", "BertModel", "RobertaModel", "DistilBertModel", "GPT2Model", "T5Model", "LlamaModel", "MistralModel"))
OWNED = known("owners")
PADS_TOKENS_ONLY = ("transformers.DataCollatorForLanguageModeling", "transformers.DataCollatorWithPadding")
ONE_LENGTH = re.compile(r"""["']max_length["']|skip_prepare_dataset|\bblock_size|group_texts""")       # rows may be as long
TEXT_FIELD = "training.dataset_text_field"
SCRIPTED, SORTED, SIZES = known("made_by_script"), known("sorted_by_class"), known("published_sizes")


def trainer_of_trl(script: Script, subject: Subject, *kinds: str) -> ast.Call | None:
    """Return the call that makes the trainer, if it is one of these of TRL."""
    return script.sections.get("trainer") if subject.trainer.startswith("trl.") and subject.trainer.endswith(kinds) else None


@code_rule_once
def rewards_refuse_arguments(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The trainer calls a reward function with more arguments than it takes."""
    trainer = trainer_of_trl(script, subject, *REWARDED)
    if trainer is None or not in_force("trl", where):
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
    trainer = trainer_of_trl(script, subject, *REFERRED)
    if trainer is None:
        return
    model, reference = argument(trainer, "model", 0), argument(trainer, "ref_model", 1)
    if isinstance(model, ast.Name) and isinstance(reference, ast.Name):
        given = [reference] if reference.id == model.id else script.assigned(reference)
        if given and all(isinstance(each, ast.Name) and each.id == model.id for each in given):
            yield found("critical", reference, given[0] if given[0] is not reference else None)


@code_rule
def plain_arguments(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A trainer of TRL gets the arguments of transformers, which lack what it reads."""
    generates = subject.trainer in ("transformers.Seq2SeqTrainer", "transformers.trainer_seq2seq.Seq2SeqTrainer")
    trainer, made = trainer_of_trl(script, subject, *OWN_CONFIGS), script.sections.get("training")
    trainer = script.sections["trainer"] if generates else trainer
    plain = made is not None and script.name(made).startswith("transformers.") and last_name(made.func) == "TrainingArguments"
    if trainer is not None and plain and in_force("transformers" if generates else "trl", where):
        yield found("critical", made, trainer, config="transformers.Seq2SeqTrainingArguments" if generates else
                    f"trl.{last_name(trainer.func).replace('Trainer', 'Config')}")


@code_rule
def kto_of_one_example(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """KTO is asked to estimate its divergence from batches of one example."""
    made = script.sections.get("training")
    loss = argument(made, "loss_type") if made is not None else None
    alone = subject.examples_per_pass == 1 and PASS in subject.settings
    if trainer_of_trl(script, subject, "KTOTrainer") is not None and alone and loss is None and not script.says(
            "apo_zero_unpaired") and made is not None and not hides_arguments(made) and in_force("trl", where):
        yield found("critical", PASS)


@code_rule_once
def pairs_of_older_trainer(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Pairs are tokenised into columns of an older RewardTrainer, and the texts are taken out."""
    trainer = trainer_of_trl(script, subject, "RewardTrainer")
    named = next((node for node in script.every(ast.Constant) if node.value == "input_ids_chosen" and isinstance(
        script.parents[node], ast.Dict | ast.Subscript)), None) if not script.says("chosen_ids") else None
    by_map: list[ast.AST] = [item for call in script.calls(".map") for item in call.keywords if item.arg == "remove_columns"]
    by_name = (call for call in script.calls(".remove_columns") if "'chosen'" in ast.unparse(call))
    removed = next(iter((*by_map, *by_name)), None)
    if trainer is not None and named is not None and removed is not None and in_force("trl", where):
        yield found("critical", named, removed)


@code_rule_once
def template_without_tokenizer(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """TRL's apply_chat_template gets the tokenizer by the name that it had."""
    for call in script.calls(".map"):
        given = argument(call, "fn_kwargs")
        keys = [key.value for key in given.keys if isinstance(key, ast.Constant)] if isinstance(given, ast.Dict) else []
        renamed = "tokenizer" in keys and "processing_class" not in keys and in_force("trl", where)
        if renamed and call.args and script.name(call.args[0]).startswith("trl.") and last_name(
                call.args[0]).endswith("apply_chat_template"):
            yield found("critical", call)


@code_rule
def formatting_gives_many(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The formatting function gives a list, and the trainer asks it for the text of one example."""
    trainer = trainer_of_trl(script, subject, "SFTTrainer")
    given = argument(trainer, "formatting_func") if trainer is not None else None
    called = given.body if isinstance(given, ast.Lambda) else given
    called = called.func if isinstance(called, ast.Call) else called
    name = script.name(called) if isinstance(called, ast.Name) else ""       # it may be imported under another one
    function = script.functions.get(name.rpartition(".")[2]) if name else None
    texts = {node.value for node in script.every(ast.Constant) if isinstance(node.value, str)}
    kept = texts & {"skip_prepare_dataset", "input_ids", "messages"} or subject.value(TEXT_FIELD) not in (None, "text")
    if given is None or function is None or kept or of_unsloth(script) or not in_force("trl", where):
        return
    returned = [node.value for node in every(ast.Return, function) if script.function(node) is function]
    if returned and all(value is not None and _is_list(script, value, function) for value in returned):
        yield found("critical", given, returned[0], name=function.name)


def _is_list(script: Script, value: ast.expr, function: FunctionNode) -> bool:
    """Return whether a value is surely a list, or a name of the function that only ever holds one."""
    if isinstance(value, ast.Name):
        held = [node.value for node in every(ast.Assign, function) if gives_name(node, value.id)]
        stored = [node for node in every(ast.Name, function)
                  if node.id == value.id and isinstance(node.ctx, ast.Store)]
        return len(stored) == len(held) > 0 and all(
            not isinstance(each, ast.Name) and _is_list(script, each, function) for each in held)
    made = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "list"
    return made or isinstance(value, ast.List | ast.ListComp)


@code_rule
def collator_leaves_labels(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The collator pads the tokens, and leaves the labels that the trainer has made as long as they are."""
    trainer = trainer_of_trl(script, subject, "SFTTrainer")
    given = argument(trainer, "data_collator", 2) if trainer is not None else None
    values = [given, *script.assigned(given)] if given is not None else []
    made = next((each for each in values if isinstance(each, ast.Call) and (
        script.name(each) in PADS_TOKENS_ONLY or _pads_as_above(script, each))), None)
    same_length = subject.examples_per_pass == 1 or subject.on("training.packing") or ONE_LENGTH.search(script.text)
    if made is not None and not same_length and not of_unsloth(script) and in_force("trl", where):
        yield found("critical", made, trainer, name=last_name(made.func))


def _pads_as_above(script: Script, call: ast.Call) -> bool:
    """Return whether a collator of the project's own pads as the one of transformers that it derives from."""
    own = script.classes.get(last_name(call.func))
    derived = own is not None and any(script.name(base) in PADS_TOKENS_ONLY for base in own.bases)
    pads = "super()." in ast.unparse(own) if own is not None else False
    return derived and pads and own is not None and not any(
        isinstance(node, ast.Constant) and node.value == "labels" and isinstance(script.parents.get(node), ast.Call)
        for node in ast.walk(own))                       # example.pop("labels")


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
        others = [each for each in made if each not in loads and not _gives_it_back(each)]
        if loads and not others:
            yield found("critical", loads[0], node, name=script.name(loads[0]).split(".")[1])


def _gives_it_back(value: ast.AST) -> bool:
    """Return whether a call gives back the model that it was given, or was called on."""
    return isinstance(value, ast.Call) and last_name(value.func) in (*WRAPPED, "to", "cuda")


@code_rule
def owner_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A data set of the hub is named without its owner."""
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


@rule
def model_not_published(subject: Subject, where: Circumstances) -> Findings:
    """The hub has no model of this name."""
    path = subject.value("model.path")
    family = next((each for each in SIZES if str(path).startswith(each)), "")
    if re.fullmatch(r"(?!hf\.co)[\w.-]{2,}(/[\w.-]+)?:[\w.-]+", str(path)) and not Path(str(path)).exists():
        yield found("critical", "model.path", case="tag", path=str(path))
    size = re.match(r"\d+(\.\d+)?[BM](?![\w.])", str(path)[len(family):], re.IGNORECASE)
    if family and size and size[0].upper() not in SIZES[family].split() and not Path(str(path)).exists():
        yield found("critical", "model.path", family=family, size=size[0], sizes=", ".join(SIZES[family].split()))


@code_rule_once
def data_with_script(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A data set of the hub is made by a script of its own, which datasets no longer runs."""
    for call in script.calls("datasets.load_dataset"):
        name = argument(call, "path", 0) if argument(call, "revision") is None else None
        for given in [name, *script.assigned(name)] if name is not None else []:
            said = str(given.value) if isinstance(given, ast.Constant) and not is_tried(script, call) else ""
            here = script.path.parent / said
            local = said.endswith(".py") or (said and (here / f"{here.name}.py").is_file())
            if local or (said in SCRIPTED and not here.exists()):
                yield found(since(where), given, name=said)
    source = subject.settings.get("data.source")         # which an option may name
    if source is not None and str(source.value).endswith(".py") and script.has_call("datasets.load_dataset"):
        yield found(since(where), source, name=source.value)


@code_rule_once
def one_class_taken(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The first rows are taken of data that is sorted by class, so the examples are all of one class."""
    for call in script.calls("datasets.load_dataset"):
        name = argument(call, "path", 0)
        if not isinstance(name, ast.Constant) or name.value not in SORTED:
            continue
        split = argument(call, "split", 4)
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
    """The trainer has put the model on the GPU, and the tokens for a later generate() stay on the CPU."""
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
        moved = any(last_name(node.func) in MOVING for node in calls)
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
    asking = list(script.calls(".evaluate", ".predict"))
    told = script.says("generation_config", "generation_max_length") or any(
        item.arg in ("max_length", "max_new_tokens", None) for call in asking for item in call.keywords)
    evaluates = asking or subject.value("training.eval_strategy") not in (None, "no")
    if made is not None and asked is not None and is_constant(asked, True) and "t5" in path and evaluates and not told \
            and not hides_arguments(made):
        yield found("moderate", asked)


@code_rule_once
def scores_of_older_release(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """ROUGE's scores are plain numbers now, and the code asks them for the parts that they had."""
    rouge = any(isinstance(item, ast.Constant) and item.value == "rouge" for call in script.calls("evaluate.load")
                for item in call.args)
    for node in script.every(ast.Attribute) if rouge else ():
        if node.attr in ("fmeasure", "recall", "precision") and last_name(node.value) == "mid":
            yield found("critical", node)
