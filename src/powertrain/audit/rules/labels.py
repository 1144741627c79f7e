"""Rules on labels: what the loss compares, and which tokens it counts."""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from powertrain.audit.edits import Edits, removed, with_text
from powertrain.audit.installed import in_force
from powertrain.audit.origins import is_led_to_by, origins
from powertrain.audit.reading_calls import WITHOUT_PADDING
from powertrain.audit.rules.base import Findings, at_most, code_rule, code_rule_once, found, rule
from powertrain.audit.scopes import is_tried, run_nodes
from powertrain.audit.script import Script
from powertrain.audit.steps import is_without_gradients
from powertrain.audit.subject import Circumstances, Subject
from powertrain.audit.syntax import argument, every, gives_name, is_true, last_name, names_in
from powertrain.audit.values import Made

MODELS = ("from_pretrained", "from_config", "ForCausalLM", "LMHeadModel")
CAUSAL = ("CausalLM.from_pretrained", "CausalLM.from_config", "LMHeadModel.from_pretrained", "ForCausalLM", "LMHeadModel")
LABELS = ("labels", "label", "targets", "target", "target_ids", "y")
ENDED = ("eos_token", "eos_token_id", "apply_chat_template", "<|endoftext|>", "</s>", "<|im_end|>", "<|eot_id|>")
COLLATORS = ("transformers.DataCollatorForLanguageModeling", "transformers.data.data_collator.DataCollatorForLanguageModeling")
PADDING_ALWAYS = ("DataCollatorForLanguageModeling", "DataCollatorWithPadding", "DataCollatorForSeq2Seq")
OLD_TRAINER = ("tokenizer", "max_seq_length", "packing")     # arguments of SFTTrainer that TRL had while it used that collator
REPLACING = (".where", ".masked_fill", ".masked_fill_")
TO_THE_LONGEST = (True, "longest")           # of a batch: one example alone is not padded
OF_LIBRARIES = ("transformers.", "torch.nn.")
OLD_NAMES = ("masked_lm_labels", "lm_labels")
LEFT_OUT = ("ignore_index", "IGNORE", "loss_mask")           # names by which a script takes tokens out of the labels
OWN_LABELS = (".DataCollatorForLanguageModeling", ".DataCollatorForCompletionOnlyLM", ".SFTTrainer")     # made by themselves
PADDING, PAD, PROMPT_LOSS = "data.padding", "tokenizer.pad_token", "training.assistant_only_loss"
ASKED = {"axolotl": "train_on_inputs", "llama-factory": "train_on_prompt"}       # how their configs ask for it
PROMPTS = frozenset({"dialogue", "problem", "instruction", "prompt", "question", "query", "document", "article", "context"})
ANSWERS = frozenset({"solution", "output", "response", "answer", "answers", "completion", "summary", "target", "chosen"})
MASKING = ("CompletionOnly", "completion_only_loss", "assistant_only_loss", "train_on_responses_only")
SMOOTHING = "training.label_smoothing_factor"
FORWARD = 1 / 4              # of a step that has one forward pass more: forward, forward, and backward for two


def is_loss(script: Script, call: ast.Call) -> bool:
    """Return whether a call is torch's cross entropy: its function, or an object that computes it."""
    return script.name(call).endswith(".cross_entropy") or script.is_made_by(call.func, "nn.CrossEntropyLoss")


def tokenises(script: Script) -> bool:
    """Return whether a pretrained tokenizer is called."""
    return any(script.is_made_by(call.func, "Tokenizer.from_pretrained") for call in script.every(ast.Call))


def is_masked(script: Script) -> bool:
    """Return whether the code that training reaches puts -100, which the loss ignores, into labels."""
    return script.says(*LEFT_OUT) or any(_is_minus_100(node) and "metric" not in getattr(script.function(node), "name", "")
                                         for node in script.nodes)


def _is_minus_100(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and getattr(node.operand, "value", 0) == 100


def given_to(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) of `labels = ids`, `x["labels"] = ids` and `{"labels": ids}`."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        key = target.slice.value if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) else \
            getattr(target, "id", "")
        yield str(key), node.value
    elif isinstance(node, ast.Dict):
        yield from ((str(key.value), value) for key, value in zip(node.keys, node.values, strict=True)
                    if isinstance(key, ast.Constant))


def is_copied(script: Script, node: ast.AST) -> bool:
    """Return whether a node makes the labels a copy of the tokens that the model reads."""
    return any(name == "labels" and "input_ids" in script.words(value) and "[1:" not in script.words(value)
               for name, value in given_to(node))


def _slices(node: ast.AST) -> list[ast.expr]:
    """Return what stands in the brackets of `x[...]`, by dimension."""
    if not isinstance(node, ast.Subscript):
        return []
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def starts_at_the_second(node: ast.AST) -> bool:
    """Return whether a node is `x[1:]`, `x[:, 1:]` or `x[i + 1:i + n + 1]`."""
    last = next(reversed(_slices(node)), None)
    lower = last.lower if isinstance(last, ast.Slice) else None
    if isinstance(lower, ast.BinOp) and isinstance(lower.op, ast.Add):
        return getattr(lower.right, "value", None) == 1 and isinstance(last, ast.Slice) and last.upper is not None
    return isinstance(lower, ast.Constant) and lower.value == 1


def ends_before_the_last(node: ast.AST) -> bool:
    """Return whether a node is `x[:-1]`, `x[:, :-1]` or `x[..., :-1, :]`."""
    return any(isinstance(item, ast.Slice) and item.upper is not None and ast.unparse(item.upper) == "-1"
               for item in _slices(node))


@code_rule
def labels_shifted_twice(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The data shifts the labels by one token, and the model shifts them again."""
    shifted = next((node for node in run_nodes(script) if _shifts_labels(script, node) and "metric" not in getattr(
        script.function(node), "name", "")), None)
    again = _shifts_too(script, subject.framework) if shifted is not None else None
    if shifted is not None and again is not None:
        yield found("critical" if isinstance(again, ast.Call) else "low", shifted, again,
                    edits=_unshifted(script, shifted))


def _shifts_labels(script: Script, node: ast.AST) -> bool:
    """Return whether a node gives labels without their first token, and no logits without their last beside them."""
    wanted = ("labels",) if isinstance(node, ast.Dict) else LABELS
    if not any(name in wanted and any(map(starts_at_the_second, ast.walk(value))) for name, value in given_to(node)):
        return False
    return not any("logits" in script.words(other) and ends_before_the_last(other)
                   for other in every(ast.Subscript, script.function(node) or script.tree))


def _shifts_too(script: Script, framework: str) -> ast.AST | None:
    """Return what shifts the labels again: a model of transformers that is given labels, or logits shortened by hand."""
    for call in script.every(ast.Call):
        if script.is_made_by(call.func, *MODELS) and any(
                item.arg == "labels" or (item.arg is None and "batch" in script.words(item.value)) for item in call.keywords):
            return call
    trainer = script.sections.get("trainer")
    given = argument(trainer, "model", 0) if trainer is not None else None
    if framework == "transformers" and given is not None and script.is_made_by(given, *MODELS) \
            and not script.says("compute_loss"):
        return trainer
    return next((node for node in script.nodes if ends_before_the_last(node) and "logits" in script.words(node)
                 and any(starts_at_the_second(other) and any(label in script.words(other) for label in ("labels", "targets"))
                         for other in ast.walk(script.function(node) or script.tree))), None)


def _unshifted(script: Script, shifted: ast.AST) -> Edits:
    """Return the edits of `{"input_ids": ids[:-1], "labels": ids[1:]}` to the same tokens in both."""
    edits: Edits = ()
    for value in shifted.values if isinstance(shifted, ast.Dict) else ():
        part = next((item for item in ast.walk(value) if starts_at_the_second(item) or ends_before_the_last(item)), None)
        if isinstance(part, ast.Subscript) and not isinstance(part.slice, ast.Tuple):
            edits += with_text(script, part, script.words(part.value))
    return edits


@code_rule_once
def labels_not_shifted(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script's own loss compares logits with the tokens that the model has just read."""
    for call in script.every(ast.Call):
        if len(call.args) < 2 or not is_loss(script, call):
            continue
        logits, labels = (script.behind(item) for item in call.args[:2])
        from_model = any(isinstance(node, ast.Call) and script.is_made_by(node.func, *CAUSAL) for node in logits) and any(
            isinstance(node, ast.Attribute) and node.attr == "logits" for node in logits)
        tokens = any(getattr(node, "value", getattr(node, "id", "")) == "input_ids" for node in labels)
        if from_model and tokens and not any(isinstance(node, ast.Slice) for node in (*logits, *labels)):
            yield found("critical", call)


@code_rule
def pad_is_end(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The end-of-text token is the padding token, and the loss ignores the padding token."""
    masks = _masking(script, where) if subject.value(PAD) == "eos_token" else None
    if masks is not None:
        pad = subject.settings[PAD]
        ended = _has_ends(script, pad.place.line)
        yield found("critical" if ended else "low", pad, masks, unsure=not ended)


def _has_ends(script: Script, padded: int) -> bool:
    """Return whether the code puts an end into its examples, not only where it makes the end its padding token."""
    for node in script.nodes:
        words = getattr(node, "attr", getattr(node, "value", ""))
        if isinstance(words, str) and any(end in words for end in ENDED) and getattr(node, "lineno", 0) != padded:
            around = script.parents.get(node)
            compared = isinstance(around, (ast.Compare, ast.keyword)) or (isinstance(around, ast.Assign) and any(
                isinstance(target, ast.Attribute) for target in around.targets))
            if not compared:
                return True
    return False


def _masking(script: Script, where: Circumstances) -> ast.AST | None:
    """Return what keeps padding out of the loss by its token: a collator, TRL while it used that, or the script itself."""
    collators = [call for call in script.calls(*COLLATORS) if getattr(argument(call, "mlm", 1), "value", None) is False]
    trainers = [call for call in script.calls("trl.SFTTrainer") if not in_force("trl", where) and any(
        item.arg in OLD_TRAINER for item in call.keywords)]
    own = (node for node in script.nodes if _ignores_padding(script, node))
    return next(chain(collators, trainers, own), None)


def _ignores_padding(script: Script, node: ast.AST) -> bool:
    """Return whether a node is `labels[labels == pad] = -100`, `where(ids == pad, -100, ids)` or such a conditional."""
    if isinstance(node, ast.Assign):
        test, put = next((target.slice for target in node.targets if isinstance(target, ast.Subscript)), None), node.value
    elif isinstance(node, ast.IfExp):
        test, put = node.test, node.body
    elif isinstance(node, ast.Call) and script.name(node).endswith(REPLACING) and len(node.args) > 1:
        test, put = node.args[0], node.args[1]
    else:
        return False
    compares = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and "pad" in ast.unparse(test)
    return compares and _is_minus_100(put)


@code_rule
def padding_trained(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The labels are a copy of padded tokens, so the loss counts padding like text."""
    padding = subject.settings.get(PADDING)
    copied = [node for node in script.nodes if is_copied(script, node) or _gives(script, node)]
    if padding is None and subject.is_unread(PADDING):       # several tokenisers, of which one pads what is copied
        copied = [node for node in copied if _padding_of(script, node)]
        padding = next((script.setting(item, "max_length") for node in copied if (item := _padding_of(script, node))), None)
    if padding is None or not copied or padding.value not in (*TO_THE_LONGEST, "max_length"):
        return
    alone = padding.value in TO_THE_LONGEST and subject.examples_per_pass == 1
    if not alone and not is_masked(script) and not script.has_call(*OWN_LABELS):
        mostly = padding.value == "max_length"
        yield found("critical" if mostly else "moderate", copied[0], padding, ends=subject.value(PAD) == "eos_token")


def _padding_of(script: Script, node: ast.AST) -> ast.keyword | None:
    """Return `padding="max_length"` of the call that gives the tokens of which the labels are a copy."""
    return next((one for key, value in given_to(node) if key == "labels" for name in every(ast.Name, value) for end in origins(
        script, name) if isinstance(end, ast.Call) for one in end.keywords if ast.unparse(one) == "padding='max_length'"), None)


def _gives(script: Script, node: ast.AST) -> bool:
    """Return whether a node is `model(input_ids, labels=input_ids)`: the same tokens as input and as labels."""
    if not isinstance(node, ast.Call) or not script.is_made_by(node.func, *MODELS):
        return False
    named = {keyword.arg: script.words(keyword.value) for keyword in node.keywords if keyword.arg}
    tokens = named.get("input_ids") or (script.words(node.args[0]) if node.args else "")
    labels = named.get("labels", "").removesuffix(".clone()")
    return bool(tokens) and (labels == tokens or _is_of_one_source(script, node, labels, tokens))


def _is_of_one_source(script: Script, node: ast.AST, *names: str) -> bool:
    """Return whether the function around a node gives two names the same value: `ids = batch[0]` and `labels = batch[0]`."""
    around = every(ast.Assign, script.function(node) or script.tree)
    given = [[script.words(each.value) for each in around if gives_name(each, name)] for name in names]
    return all(given) and len({value for values in given for value in values}) == 1


@code_rule_once
def pad_token_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The script pads with a tokenizer that has no padding token."""
    collating = [replace(made, owner=made.argument(0, "tokenizer"), named={"padding": script.setting(made.node, True)})
                 for made in subject.calls if made.last in PADDING_ALWAYS and "padding" not in made.named]
    of_one_length = script.says("TextDataset", "__getitem__")            # tensors are put together without the tokenizer
    for made in (*subject.calls, *(collating if subject.trainer and not of_one_length else ())):
        path, asked = path_of_tokenizer(made.owner), made.named.get("padding")
        if asked is not None and asked.value in (*TO_THE_LONGEST, "max_length") and path.startswith(WITHOUT_PADDING) and not (
                script.path.parent / path).exists() and lacks(script, subject, made, "pad_token", "trl."):
            yield found("critical", asked, script.evidence(made.owner.node), path=path)


def path_of_tokenizer(value: Any) -> str:
    """Return what a tokenizer is loaded from; "" where that is not known, and for anything else."""
    path = value.argument(0, "pretrained_model_name_or_path") if isinstance(value, Made) and value.name.endswith(
        ("Tokenizer.from_pretrained", "TokenizerFast.from_pretrained")) else None
    return path if isinstance(path, str) else ""


def lacks(script: Script, subject: Subject, made: Made, part: str, *giving: str) -> bool:
    """Return whether a method of a tokenizer surely runs, and nothing gives the tokenizer a part that it needs.

    A function of another package may, unless it is a class (but for those of packages in `giving`) or one of Python's own.
    """
    owner = made.owner
    adds = any(each.owner is owner and each.last.startswith("add_") for each in subject.calls)
    taking = (each for each in subject.calls if any(given is owner for given in (
        *each.positional, *(item.value for item in each.named.values()))))
    unsure = adds or made.doubts or made.open or owner.open or is_tried(script, made.node)
    return not unsure and script.is_reached(made.node) and not is_led_to_by(script, made.node, script.unused) and not any(
        part in name for name in (*owner.named, *owner.attributes)) and all(
        not each.name.startswith(("unsloth", *giving)) and (each.last[:1].isupper() or hasattr(builtins, each.last))
        for each in taking)


@code_rule_once
def masked_collator(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A collator for masked language modelling serves a model that predicts the next token."""
    causal = script.has_made(*CAUSAL)
    for call in script.calls(*COLLATORS) if causal and not script.says("MaskedLM", "mask_token") else ():
        if is_true(argument(call, "mlm", 1)) and all(keyword.arg for keyword in call.keywords):
            yield found("critical", call)


@code_rule
def labels_missing(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A Trainer gets examples without labels, and no collator that makes them."""
    trainer, pads = script.sections.get("trainer"), ("DataCollatorWithPadding", "DataCollatorForSeq2Seq")
    if trainer is None or subject.framework != "transformers" or any(item.arg is None for item in trainer.keywords):
        return
    model, collator = argument(trainer, "model", 0), argument(trainer, "data_collator", 2)
    makes_none = collator is None or script.is_made_by(collator, *pads) or (
        isinstance(collator, ast.Call) and script.name(collator).endswith(pads))
    if model is not None and script.is_made_by(model, *CAUSAL) and makes_none and tokenises(script) and not script.says(
            "label", "compute_loss", "input_ids") and script.has_call(".map"):
        yield found("critical", trainer)


@code_rule_once
def labels_by_old_name(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """The labels have a name that models no longer know, and no loss is computed."""
    own = {item.arg for item in every(ast.arg, script.tree)}             # of models of the project, which may take them
    for call in script.every(ast.Call) if in_force("transformers", where) else ():
        item = next((each for each in call.keywords if each.arg in OLD_NAMES and each.arg not in own), None)
        kinds = script.kinds.get(last_name(call.func), frozenset())
        of_theirs = not kinds or any("from_pretrained" in kind or kind.startswith(OF_LIBRARIES) for kind in kinds)
        if item is not None and last_name(call.func) == "model" and of_theirs:
            yield found("critical", item, name=str(item.arg))


@rule
def prompts_trained(subject: Subject, where: Circumstances) -> Findings:
    """The labels are a copy of prompt and answer, so the loss counts prompts like answers."""
    script = subject.script
    if script is None:
        plain_text = subject.value("training.stage") == "pt" or "completion" in str(subject.value("data.format"))
        if subject.framework in ASKED and subject.value(PROMPT_LOSS) is False and not plain_text:
            yield found("moderate", PROMPT_LOSS, edits=removed(subject, PROMPT_LOSS), case="config",
                        key=ASKED[subject.framework])
        return
    if is_masked(script) or script.says(*MASKING):
        return
    trained = [node for node in script.nodes if not is_without_gradients(script, node)]
    copied: ast.AST | None = next((node for node in trained if is_copied(script, node)), None)
    joined = next((node for node in trained if _joins(node)), None)
    joined = joined or next((call for call in script.calls(".apply_chat_template") if subject.framework == "trl"
                             and getattr(argument(call, "add_generation_prompt"), "value", False) is not True), None)
    if copied is None and subject.framework == "trl" and subject.trainer.endswith("SFTTrainer"):
        copied = script.sections.get("training")
    if copied is not None and joined is not None:
        yield found("moderate", joined, copied)


def _joins(node: ast.AST) -> bool:
    """Return whether an expression joins a prompt and an answer into one text."""
    formats = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format"
    if not formats and not isinstance(node, (ast.JoinedStr, ast.BinOp)):
        return False
    names = {str(item.slice.value) for item in every(ast.Subscript, node) if isinstance(item.slice, ast.Constant)}
    names |= names_in(node) | {item.arg for item in every(ast.keyword, node) if item.arg}
    names |= {name.removesuffix("s") for name in names}
    return bool(names & PROMPTS) and bool(names & ANSWERS) and not {"prompt", "completion"} <= names     # TRL tells them apart


@rule
def label_smoothing_cost(subject: Subject, where: Circumstances) -> Findings:
    """Label smoothing in SFTTrainer costs another forward pass."""
    if subject.framework == "trl" and subject.number(SMOOTHING):
        yield found("moderate", SMOOTHING, edits=removed(subject, SMOOTHING), expected=at_most(
                    FORWARD, "one forward pass of two beside a backward pass of two forward ones"))
