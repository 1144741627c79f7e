"""Rules on examples and batches: padding, packing, cut examples, and the arithmetic of a step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from powertrain.audit.editing import added, removed, set_to
from powertrain.audit.reckoning import at_most
from powertrain.audit.resolved import examples_per_pass, examples_per_step, is_on, is_unread, number, seen, value
from powertrain.audit.rules.base import STARTS, Findings, found, of_script
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Setting, Subject
from powertrain.cost.workload import length_at, padding_share
from powertrain.records import DataFacts
from powertrain.records.findings import UNMEASURED, Cure, Evidence, Expected, Place, rule
from powertrain.shapes import QUANTILES

PACKING, STRATEGY, GROUPING = "training.packing", "training.packing_strategy", "training.train_sampling_strategy"
PASS, TIMES, LONGEST, PADDING = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps",
                                 "training.max_length", "data.padding")
CAN_PACK = ("trl", "axolotl", "llama-factory", "modelforge", "lora-trainer")
BESIDE = (LONGEST, PASS, "training.learning_rate", "training.output_dir")
SEPARATING = ("flash_attention_2", "flash_attention_3", "sdpa", "flex_attention", "xformers")      # axolotl's kernels
WORTH_PACKING, WORTH_PADDING = 0.1, 0.02     # of the slots; less is within what machines vary by
FEW, POINTS = 0.01, 200                      # share of the examples that may be cut; points at which lengths are compared
SAID = re.compile(r"effective batch(?: size)?\D*?(?P<sum>[\d\s=x*×·]+)", re.IGNORECASE)      # noqa: RUF001
NEAR = 2                     # lines around the setting in which a comment is about it
APART = ("position_ids", "cu_seqlens", "cu_seq_lens", "seq_lens", "document_mask", "doc_ids", "flex_attention", "seq_idx",
         "varlen", "packed_sequence_mask")
PROMPTED = ("instruction", "question", "messages", "prompt", "apply_chat_template")
DRAWING = ("__getitem__", "collate", "collate_fn", "collate_batch", "__iter__", "data_collator")
METHODS = ("encode", "encode_plus", "batch_encode_plus", "__call__", "tokenize")
PACKED = ("techniques.packing=on",)


@rule("technique: packing; features: F11 (packed with positions that restart, examples do not see each other)",
      gives_way_to=("padding_to_max_length",))
def packing_off(subject: Subject, where: Circumstances) -> Findings:
    """Short examples are padded to the longest of their batch, although the trainer can pack."""
    if subject.framework not in CAN_PACK or is_unread(subject, PACKING) or is_on(subject, PACKING):
        return
    if is_on(subject, "training.padding_free") or value(subject, GROUPING) == "group_by_length":
        return                               # there is little padding left
    each, data = examples_per_pass(subject), where.data
    known = data is not None and bool(data.length_quantiles)
    share = padding_share(data.length_quantiles, each) if data is not None and known and each else None
    if (data is not None and data.kind == "blocks") or (share is not None and share < WORTH_PACKING) or each == 1:
        return
    why = "Each batch is padded to its longest example; how much padding that is depends on lengths that are not known here"
    if share is not None:
        why = f"Padded to the longest of {each}, {share:.0%} of the slots are padding, by the lengths of the examples"
    edits = set_to(subject, PACKING, True) if PACKING in subject.settings else added(subject, BESIDE, "packing", True)
    yield found("low" if share is None else "moderate", why, seen(subject, PACKING), seen(subject, PASS),
                expected=at_most(share, "the share of padding") if share else UNMEASURED, breaking="low", accuracy="low",
                cure="Pack examples. A step then has more of them, so accumulate less to keep the batch", edits=edits,
                words=PACKED)


@rule("technique: packing; features: F11 (naive concatenation leaks across examples)")
def packing_leaks(subject: Subject, where: Circumstances) -> Findings:
    """Examples are packed in a way in which tokens attend to other examples."""
    unsure = (STRATEGY, "training.neat_packing", "model.attn_implementation")
    if not is_on(subject, PACKING) or any(is_unread(subject, key) for key in unsure):
        return
    leak: Evidence | None = None
    if subject.value(STRATEGY) == "wrapped":
        leak, cure = subject.settings[STRATEGY].evidence, Cure('Use packing_strategy="bfd"', set_to(subject, STRATEGY, "bfd"))
    elif subject.framework == "llama-factory" and not is_on(subject, "training.neat_packing"):
        leak, cure = (Evidence("neat_packing is not on, which keeps packed examples apart"),
                      Cure("Set neat_packing: true", set_to(subject, "training.neat_packing", True)))
    elif subject.framework == "axolotl" and subject.value("model.attn_implementation") not in SEPARATING:
        leak, cure = (Evidence("no attention is set that keeps packed examples apart"),
                      Cure("Set flash_attention: true or sdp_attention: true"))
    if leak is not None:
        yield found("moderate", "A token attends to the examples that lie before its own in the pack, and examples are cut "
                    "where a pack ends: the model is trained on contexts that do not exist", subject.settings[PACKING], leak,
                    breaking="low", cure=cure.says, edits=cure.edits, words=PACKED)


@rule("documentation: SFTTrainer (TRL 1.16)")
def padding_free_unbounded(subject: Subject, where: Circumstances) -> Findings:
    """padding_free is on without packing, so nothing enforces max_length."""
    if subject.framework == "trl" and subject.on("training.padding_free") and not is_on(subject, PACKING) \
            and value(subject, LONGEST) is not None and not is_unread(subject, PACKING):
        yield found("critical", "TRL raises \"When padding_free=True without packing, max_length is not enforced\"",
                    subject.settings["training.padding_free"], seen(subject, LONGEST), expected=STARTS,
                    cure="Set packing=True, which is padding-free by itself", edits=set_to(subject, PACKING, True),
                    words=PACKED)


@rule("technique: packing; features: F10 (a collator pads to the longest of the batch unless it is told otherwise)")
def padding_to_max_length(subject: Subject, where: Circumstances) -> Findings:
    """Every example is padded to the longest length that is allowed."""
    if subject.value(PADDING) != "max_length" or subject.on(PACKING):
        return
    longest, data = number(subject, LONGEST), where.data
    share = 1 - data.block / longest if data and longest and data.kind != "blocks" and data.block < longest else None
    if (data is not None and data.kind == "blocks") or (share is not None and share < WORTH_PADDING):
        return                               # all have that length anyway
    here = f": {share:.0%} of the slots, for examples of {data.block} tokens on average" if share and data else ""
    yield found("moderate", "Padding takes as much work as text and teaches nothing" + here, subject.settings[PADDING],
                subject.settings.get(LONGEST), expected=at_most(share, "the share of padding") if share else UNMEASURED,
                cure="Let the collator pad to the longest of each batch, or pack",
                edits=set_to(subject, PADDING, True) if _sees_a_batch(subject) else (), words=PACKED)


def _sees_a_batch(subject: Subject) -> bool:
    """Whether the padding code has a batch before it; rows that are tokenised one by one have no longest one."""
    script, line = subject.script, subject.settings[PADDING].place.line
    if script is None:
        return True
    collating = {script.words(keyword.value) for call in script.nodes if isinstance(call, ast.Call)
                 for keyword in call.keywords if keyword.arg in ("collate_fn", "data_collator")}
    return any(node.lineno <= line <= (node.end_lineno or line) for name, node in script.functions.items() if name in collating)


@rule("technique: length_grouping; features: X1")
def length_grouping_without_effect(subject: Subject, where: Circumstances) -> Findings:
    """Examples are grouped by length where that saves no padding."""
    if subject.value(GROUPING) != "group_by_length":
        return
    data = where.data
    reason, because = next(((reason, key) for holds, reason, key in (
        (is_on(subject, PACKING), "packed examples have no padding", PACKING),
        (value(subject, PADDING) == "max_length", "all examples are padded to max_length", PADDING),
        (examples_per_pass(subject) == 1, "a pass has one example, so none is padded", PASS),
        (data is not None and data.kind == "blocks", "all examples have one length", ""),
    ) if holds), ("", ""))
    if reason:
        yield found("low", f"It saves padding where the examples of a batch differ in length; here {reason}. It costs a scan "
                    "of all lengths and makes the order less random", subject.settings[GROUPING], subject.settings.get(because),
                    expected=Expected("as fast, and a random order", "none"), cure="Remove it",
                    edits=removed(subject, GROUPING), words=("techniques.length_grouping=off",))


@rule("documentation: SFTConfig (max_length is 1024 where it is not set); features: section 5, weakness 9")
def max_length_cuts(subject: Subject, where: Circumstances) -> Findings:
    """max_length cuts the ends of examples off."""
    limit, data = number(subject, LONGEST), where.data
    if limit is None or data is None or data.kind == "blocks" or not set(data.length_quantiles) & set(QUANTILES):
        return
    cut, longest = _cut_share(data, limit), max(data.length_quantiles.get("max", 0), data.max_length)
    if cut >= FEW:
        yield found("moderate", f"About {cut:.0%} of the examples have more than {limit:g} tokens (the longest {longest:,}). "
                    "They lose their end: the answer, and the sign that it is finished", seen(subject, LONGEST),
                    cure=f"Raise max_length to {longest:,}, or drop the longer examples",
                    words=(f"data.max_length={longest}",))


def _cut_share(data: DataFacts, limit: float) -> float:
    """Return the share of the examples that are longer, on straight lines between the known quantiles."""
    return sum(length_at(data.length_quantiles, (point + 0.5) / POINTS) > limit for point in range(POINTS)) / POINTS


@rule("features: F12 (3 x 3 does not keep 8), X7")
def batch_arithmetic(subject: Subject, where: Circumstances) -> Findings:
    """The effective batch is another than the comment beside it says."""
    batch = examples_per_step(subject)
    settings = [subject.settings[key] for key in (TIMES, PASS) if key in subject.settings]
    said = next((said for setting in settings for said in _said(subject, setting)), None) if batch is not None else None
    if said is not None and said[0] != batch:
        yield found("moderate", f"Examples per pass times accumulation give {batch} a step, and the comment says {said[0]}: "
                    f"losses and learning rates tuned for {said[0]} do not carry over", said[1], *settings,
                    cure=f"Choose two factors of {said[0]}, or correct the comment", words=(f"train_batch_size={said[0]}",))


def _said(subject: Subject, setting: Setting) -> Iterator[tuple[int, Evidence]]:
    """Yield the effective batch that comments near a setting speak of."""
    lines = _text(subject, setting).splitlines()
    for index in range(max(0, setting.place.line - 1 - NEAR), min(len(lines), setting.place.line + NEAR)):
        comment = lines[index].partition("#")[2]
        match = SAID.search(comment)
        numbers = re.findall(r"\d+", match["sum"]) if match else []
        if numbers:
            yield int(numbers[-1]), Evidence(f"# {comment.strip()}", Place(setting.place.file, index + 1))


def _text(subject: Subject, setting: Setting) -> str:
    if not setting.place.line:
        return ""
    if subject.script is not None:
        return subject.script.text
    try:
        return Path(setting.place.file).read_text(encoding="utf-8")
    except OSError:
        return ""


@rule("fact: an epoch has at most as many examples as the data")
def batch_beyond_data(subject: Subject, where: Circumstances) -> Findings:
    """A step takes more examples than there are."""
    batch, data = examples_per_step(subject), where.data
    if batch is None or data is None or batch <= data.examples:
        return
    dropped = is_on(subject, "training.dataloader_drop_last") or is_on(subject, "loader.drop_last")
    yield found("critical" if dropped else "moderate", f"A step takes {batch} examples, and the data has {data.examples}: " + (
                "the incomplete batch is dropped, and nothing is left to train on" if dropped else
                "each epoch is one step, of fewer examples"), seen(subject, PASS), seen(subject, TIMES),
                cure="Take fewer examples a step", words=(f"train_batch_size={max(1, data.examples // 10)}",))


@rule("features: F13 (it has nothing to do with speed)")
def columns_kept(subject: Subject, where: Circumstances) -> Findings:
    """remove_unused_columns is off, which saves no time."""
    key = "training.remove_unused_columns"
    if subject.value(key) is False:
        yield found("low", "Columns that the model does not read go to the collator, which may fail on them; removing them "
                    "happens once, before training", subject.settings[key],
                    expected=Expected("no effect that could be measured (claim 000-06)", "study: 2026-11-21_claims-2"),
                    cure="Remove this setting, unless your own collator needs the columns", edits=removed(subject, key))


@rule("technique: packing; features: F11 (naive concatenation leaks across examples, trl #1230)",
      gives_way_to=("packing_leaks",))
@of_script
def documents_concatenated(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Documents are joined and cut into blocks, and nothing keeps them apart."""
    if script.says(*APART):
        return
    for function in script.functions.values():
        inner = list(ast.walk(function)) if script.is_reached(function) else []
        joined = next((node for node in inner if _joins(script, node)), None)
        if joined is not None and any(_cuts(node) for node in inner):
            yield found("moderate" if script.says(*PROMPTED) else "low", "Token lists are joined and cut into blocks, and "
                        "nothing marks where a document ends. A token attends to documents that lie before its own, and "
                        "documents are cut in two", script.evidence(joined), breaking="low", accuracy="low",
                        difficulty="medium", words=PACKED, cure="Pack whole examples, and restart positions and attention at "
                        "each (in TRL packing=True with packing_strategy=\"bfd\")")
            return


def _joins(script: Script, node: ast.AST) -> bool:
    """Whether a node is `sum(lists, [])` or `chain(*lists)`."""
    name = script.name(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or name == "sum":
        return isinstance(node, ast.Call) and len(node.args) == 2 and isinstance(node.args[1], ast.List)
    return name in ("itertools.chain", "itertools.chain.from_iterable") and bool(node.args)


def _cuts(node: ast.AST) -> bool:
    """Whether a node is the range of `x[i : i + block] for i in range(0, total, block)`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range" and len(node.args) == 3


@rule("technique: the token store (examples are tokenised once); features: 2.2 (pre-tokenised data)")
@of_script
def tokenised_each_epoch(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Text is tokenised again whenever it is drawn."""
    for name in DRAWING if not script.says("IterableDataset") else ():
        function = script.functions.get(name)
        call = next((node for node in ast.walk(function) if isinstance(node, ast.Call) and _tokenises(node)),
                    None) if function is not None else None
        if call is not None and script.is_reached(call):
            yield found("low", f"{name} tokenises the examples that it is asked for. Each epoch does the same work again, on "
                        "the processor that also prepares the steps", script.evidence(call), expected=UNMEASURED,
                        cure="Tokenise once before training (`dataset.map`), and keep token lists")
            return


def _tokenises(node: ast.Call) -> bool:
    words = ast.unparse(node.func).split(".")
    named = words[-1] if words[-1] not in METHODS else words[-2] if len(words) > 1 else ""
    return named in ("tokenizer", "tok", "enc") and words[-1] not in ("pad", "decode")
