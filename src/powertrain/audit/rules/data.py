"""Rules on examples and batches: padding, packing, cut examples, the arithmetic of a step, and their loaders."""

import ast
import re
from collections.abc import Iterator

from powertrain.audit.edits import lines_of, removed, set_to, with_argument, with_line
from powertrain.audit.rules.base import Findings, at_most, code_rule, code_rule_once, found, rule
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Setting, Subject
from powertrain.audit.syntax import argument, every, last_name, names_in
from powertrain.cost.workload import SHARES, lengths_at, padding_share
from powertrain.records.findings import UNMEASURED, Evidence, Place
from powertrain.shapes import QUANTILES

PACKING, STRATEGY, GROUPING = "training.packing", "training.packing_strategy", "training.train_sampling_strategy"
PASS, TIMES, LONGEST, PADDING = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps",
                                 "training.max_length", "data.padding")
NEAT, ATTENTION, KEPT = "training.neat_packing", "model.attn_implementation", "training.remove_unused_columns"
CAN_PACK = ("trl", "axolotl", "llama-factory", "modelforge", "lora-trainer")
BESIDE = (LONGEST, PASS, "training.learning_rate", "training.output_dir")
SEPARATING = ("flash_attention_2", "flash_attention_3", "sdpa", "flex_attention", "xformers")      # axolotl's kernels
WORTH_PACKING, WORTH_PADDING = 0.1, 0.02     # of the slots; less is within what machines vary by
FEW = 0.01                                   # share of the examples that may be cut
SAID = re.compile(r"effective batch(?: size)?\D*?(?P<sum>[\d\s=x*×·]+)", re.IGNORECASE)      # noqa: RUF001
NEAR = 2                     # lines around the setting in which a comment is about it
APART = ("position_ids", "cu_seqlens", "cu_seq_lens", "seq_lens", "document_mask", "doc_ids", "flex_attention", "seq_idx",
         "varlen", "packed_sequence_mask")
CHAINING = ("itertools.chain", "itertools.chain.from_iterable")
PROMPTED = ("instruction", "question", "messages", "prompt", "apply_chat_template")
DRAWING = ("__getitem__", "collate", "collate_fn", "collate_batch", "__iter__", "data_collator")
METHODS = ("encode", "encode_plus", "batch_encode_plus", "__call__", "tokenize")
WORKERS = ("training.dataloader_num_workers", "loader.num_workers")
LASTING = {WORKERS[0]: "training.dataloader_persistent_workers", WORKERS[1]: "loader.persistent_workers"}
PREFETCH = {WORKERS[0]: "training.dataloader_prefetch_factor", WORKERS[1]: "loader.prefetch_factor"}
PINNING = ("training.dataloader_pin_memory", "loader.pin_memory")
TOKENIZERS, THREADS = "environment.TOKENIZERS_PARALLELISM", ("environment.OMP_NUM_THREADS", "environment.MKL_NUM_THREADS")
STREAMING = "data.streaming"
ORDERED_OTHERWISE = ("sampler", "batch_sampler")
DRAWS = ("IterableDataset", "shuffle", "streaming", "randint", "randperm", "random")
OF_OTHER_ROWS = re.compile("(?<![a-z])(eval(uation)?|val(id|idation)?|test|dev)(?![a-z])")
SAMPLERS = ("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler")


@rule
def packing_off(subject: Subject, where: Circumstances) -> Findings:
    """Short examples are padded to the longest of their batch, although the trainer can pack."""
    if subject.framework not in CAN_PACK or subject.is_unread(PACKING) or subject.is_on(PACKING):
        return
    if subject.is_on("training.padding_free") or subject.effective(GROUPING) == "group_by_length":
        return                               # there is little padding left
    each, data = subject.examples_per_pass, where.data
    share = padding_share(data.length_quantiles, each) if data is not None and data.length_quantiles and each else None
    if (data is not None and data.kind == "blocks") or (share is not None and share < WORTH_PACKING) or each == 1:
        return
    yield found("low" if share is None else "moderate", PACKING, PASS, each=each, share=share,
                case="" if share is None else "known", expected=at_most(share, "the share of padding") if share else None,
                edits=set_to(subject, PACKING, True, "packing", BESIDE))


@rule
def packing_leaks(subject: Subject, where: Circumstances) -> Findings:
    """Examples are packed in a way in which tokens attend to other examples."""
    if not subject.is_on(PACKING) or any(subject.is_unread(key) for key in (STRATEGY, NEAT, ATTENTION)):
        return
    packed = subject.settings.get(PACKING)
    if subject.value(STRATEGY) == "wrapped":
        yield found("moderate", packed, STRATEGY, edits=set_to(subject, STRATEGY, "bfd"))
    elif subject.framework == "llama-factory" and not subject.is_on(NEAT):
        yield found("moderate", packed, Evidence("neat_packing is not on, which keeps packed examples apart"),
                    edits=set_to(subject, NEAT, True), case="llama-factory")
    elif subject.framework == "axolotl" and subject.value(ATTENTION) not in SEPARATING:
        yield found("moderate", packed, Evidence("no attention is set that keeps packed examples apart"), case="axolotl")


@rule
def padding_free_unbounded(subject: Subject, where: Circumstances) -> Findings:
    """padding_free is on without packing, so nothing enforces max_length."""
    if subject.framework == "trl" and subject.on("training.padding_free") and not subject.is_on(PACKING) \
            and subject.effective(LONGEST) is not None and not subject.is_unread(PACKING):
        yield found("critical", "training.padding_free", LONGEST, edits=set_to(subject, PACKING, True))


@rule
def padding_to_max_length(subject: Subject, where: Circumstances) -> Findings:
    """Every example is padded to the longest length that is allowed."""
    of_pairs = subject.framework == "axolotl" and subject.value("training.rl") is not None      # TRL pads these by batch
    if subject.value(PADDING) != "max_length" or subject.on(PACKING) or of_pairs:
        return
    longest, data = subject.number(LONGEST), where.data
    share = 1 - data.block / longest if data and longest and data.kind != "blocks" and data.block < longest else None
    if (data is not None and data.kind == "blocks") or (share is not None and share < WORTH_PADDING):
        return                               # all have that length anyway
    if subject.script is not None and _is_for_inference(subject.script, subject.settings[PADDING].place.line):
        return
    yield found("moderate", PADDING, subject.settings.get(LONGEST), share=share,
                tokens=data.block if data else None, expected=at_most(share, "the share of padding") if share else None,
                edits=set_to(subject, PADDING, True) if _sees_a_batch(subject) else ())


def _is_for_inference(script: Script, line: int) -> bool:
    """Return whether the function around a line computes without gradients."""
    around = [function for function in script.functions.values() if function.lineno <= line <= (function.end_lineno or 0)]
    asked = [node for function in around for node in (*function.decorator_list, *(
        item.context_expr for each in every(ast.With, function) for item in each.items))]
    return any(last_name(getattr(node, "func", node)) in ("no_grad", "inference_mode") for node in asked)


def _sees_a_batch(subject: Subject) -> bool:
    """Return whether the padding code sees a whole batch; code that tokenises row by row has no longest row."""
    script, line = subject.script, subject.settings[PADDING].place.line
    if script is None:
        return True
    collating = {script.words(given.value) for given in script.every(ast.keyword)
                 if given.arg in ("collate_fn", "data_collator")}
    return any(node.lineno <= line <= (node.end_lineno or line) for name, node in script.functions.items() if name in collating)


@rule
def length_grouping_without_effect(subject: Subject, where: Circumstances) -> Findings:
    """Examples are grouped by length where that saves no padding."""
    if subject.value(GROUPING) != "group_by_length":
        return
    reason, because = next(((reason, key) for holds, reason, key in (
        (subject.is_on(PACKING), "packed examples have no padding", PACKING),
        (subject.effective(PADDING) == "max_length", "all examples are padded to max_length", PADDING),
        (subject.examples_per_pass == 1, "a pass has one example, so none is padded", PASS),
        (where.data is not None and where.data.kind == "blocks", "all examples have one length", ""),
    ) if holds), ("", ""))
    if reason:
        yield found("low", GROUPING, subject.settings.get(because), edits=removed(subject, GROUPING), reason=reason)


@rule
def max_length_cuts(subject: Subject, where: Circumstances) -> Findings:
    """max_length cuts the ends of examples off."""
    limit, data = subject.number(LONGEST), where.data
    if limit is None or data is None or data.kind == "blocks" or not set(data.length_quantiles) & set(QUANTILES):
        return
    # on straight lines between the known quantiles
    cut = float((lengths_at(data.length_quantiles, SHARES) > limit).mean())
    if cut >= FEW:
        longest = max(data.length_quantiles.get("max", 0), data.max_length)
        yield found("moderate", LONGEST, cut=cut, limit=limit, longest=longest)


@rule
def batch_arithmetic(subject: Subject, where: Circumstances) -> Findings:
    """The effective batch is another than the comment beside it says."""
    batch = subject.examples_per_step
    settings = [subject.settings[key] for key in (TIMES, PASS) if key in subject.settings]
    said = next((said for setting in settings for said in _said(subject, setting)), None) if batch is not None else None
    if said is not None and said[0] != batch:
        yield found("moderate", said[1], *settings, batch=batch, said=said[0])


def _said(subject: Subject, setting: Setting) -> Iterator[tuple[int, Evidence]]:
    """Yield the effective batch that comments near a setting speak of."""
    lines = lines_of(subject, setting.place.file) if setting.place.line else []
    for index in range(max(0, setting.place.line - 1 - NEAR), min(len(lines), setting.place.line + NEAR)):
        comment = lines[index].partition("#")[2]
        match = SAID.search(comment)
        numbers = re.findall(r"\d+", match["sum"]) if match else []
        if numbers:
            yield int(numbers[-1]), Evidence(f"# {comment.strip()}", Place(setting.place.file, index + 1))


@rule
def batch_beyond_data(subject: Subject, where: Circumstances) -> Findings:
    """A step takes more examples than there are."""
    batch, data = subject.examples_per_step, where.data
    if batch is not None and data is not None and batch > data.examples:
        dropped = subject.is_on("training.dataloader_drop_last") or subject.is_on("loader.drop_last")
        yield found("critical" if dropped else "moderate", PASS, TIMES, batch=batch, examples=data.examples,
                    fewer=max(1, data.examples // 10), dropped=dropped, kept=not dropped)


@rule
def columns_kept(subject: Subject, where: Circumstances) -> Findings:
    """remove_unused_columns is off, which saves no time."""
    if subject.value(KEPT) is False:
        yield found("low", KEPT, edits=removed(subject, KEPT))


@code_rule_once
def documents_concatenated(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Documents are joined and cut into blocks, and nothing keeps them apart."""
    for function in script.functions.values() if not script.says(*APART) else ():
        calls = [call for call in every(ast.Call, function) if call.args] if script.is_reached(function) else []
        # `sum(lists, [])` or `chain(*lists)`
        joined = next((call for call in calls if script.name(call) in CHAINING or (
            script.name(call) == "sum" and len(call.args) == 2 and isinstance(call.args[1], ast.List))), None)
        # the range of `x[i : i + block] for i in range(0, total, block)`
        cuts = any(script.name(call) == "range" and len(call.args) == 3 for call in calls)
        if joined is not None and cuts and "eos" not in script.words(function):
            yield found("moderate" if script.says(*PROMPTED) else "low", joined)


@code_rule_once
def tokenised_each_epoch(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Text is tokenised again whenever it is drawn."""
    for name in DRAWING if not script.says("IterableDataset") else ():
        inner = every(ast.Call, script.functions[name]) if name in script.functions else ()
        call = next(filter(_tokenises, inner), None)
        if call is not None and script.is_reached(call):
            yield found("low", call, name=name)


def _tokenises(node: ast.Call) -> bool:
    words = ast.unparse(node.func).split(".")
    named = words[-1] if words[-1] not in METHODS else words[-2] if len(words) > 1 else ""
    return named in ("tokenizer", "tok", "enc") and words[-1] not in ("pad", "decode")


@rule
def loader_needs_workers(subject: Subject, where: Circumstances) -> Findings:
    """The loader shall prefetch or keep its workers, but it has no workers."""
    for workers in WORKERS:
        asked = [key for key in (PREFETCH[workers], LASTING[workers]) if subject.on(key)]
        if asked and subject.number(workers) == 0:
            yield found("critical", workers, *asked, names=" and ".join(key.partition(".")[2] for key in asked),
                        edits=tuple(edit for key in asked for edit in removed(subject, key)))


@rule
def workers_beyond_cores(subject: Subject, where: Circumstances) -> Findings:
    """The loader has more worker processes than there are cores."""
    cores, on_cpu = where.cores, where.on_cpu
    for key in WORKERS:
        workers = int(subject.number(key) or 0) * subject.processes
        if key in subject.settings and cores is not None and workers > cores:
            yield found("moderate", key, case="cpu" if on_cpu else "", workers=workers, cores=cores,
                        edits=set_to(subject, key, 0 if on_cpu else cores // subject.processes))


@rule
def workers_for_ready_data(subject: Subject, where: Circumstances) -> Findings:
    """Worker processes only hand over rows that are ready."""
    key = WORKERS[0]
    if subject.framework == "trl" and key in subject.settings and (subject.number(key) or 0) >= 1 \
            and not subject.is_on(STREAMING):
        yield found("low", key, edits=set_to(subject, key, 0))


@rule
def workers_start_each_epoch(subject: Subject, where: Circumstances) -> Findings:
    """The loader starts its workers again for every epoch."""
    epochs = subject.number("training.num_train_epochs")
    for workers, lasting in LASTING.items():
        if workers in subject.settings and (subject.number(workers) or 0) >= 1 and not subject.is_unread(lasting) \
                and not subject.on(lasting) and (epochs or 1) > 1 and (subject.number("training.max_steps") or -1) < 0:
            yield found("low", workers, subject.settings.get("training.num_train_epochs"), epochs=epochs,
                        edits=set_to(subject, lasting, True),
                        written=f"{lasting.partition('.')[2]}{'=True' if subject.script else ': true'}")


@rule
def streaming_without_workers(subject: Subject, where: Circumstances) -> Findings:
    """The training process itself reads and tokenises streamed data."""
    if subject.is_on(STREAMING) and subject.number(WORKERS[0]) == 0:
        yield found("moderate", STREAMING, WORKERS[0], edits=set_to(subject, WORKERS[0], 2))


@rule
def pinned_memory(subject: Subject, where: Circumstances) -> Findings:
    """Memory is pinned without a GPU, or not pinned with one."""
    for key in PINNING if where.hardware is not None else ():
        device = where.hardware.device if where.hardware else ""
        if subject.value(key) is True and device != "cuda":
            yield found("low", key, edits=removed(subject, key), case="for nothing", device=device)
        elif subject.value(key) is False and device == "cuda":
            yield found("low", key, edits=set_to(subject, key, True))


@rule
def tokenizers_parallelism(subject: Subject, where: Circumstances) -> Findings:
    """TOKENIZERS_PARALLELISM is forced on in a run with loader workers."""
    forced = str(subject.value(TOKENIZERS)).lower() in ("true", "1", "on", "yes")
    workers = next((key for key in WORKERS if key in subject.settings and subject.number(key)), None)
    if forced and workers is not None:
        yield found("low", TOKENIZERS, workers)


@rule
def threads_fixed(subject: Subject, where: Circumstances) -> Findings:
    """The number of threads is fixed, and is not that of this machine."""
    cores, on_cpu = where.cores, where.on_cpu
    for key in THREADS:
        asked = str(subject.value(key))
        if cores is None or not asked.isdigit():
            continue
        threads, fair = int(asked), max(1, cores // subject.processes)
        if threads > fair or (threads < fair and on_cpu):
            yield found("moderate" if on_cpu else "low", key, case="many" if threads > fair else "", threads=threads, fair=fair,
                        expected=None if threads > fair and on_cpu else UNMEASURED, name=key.partition(".")[2])
        return


@code_rule
def loader_not_shuffled(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Training examples come in the order of the file in every epoch."""
    calls = [value for loop in script.training_loops if not isinstance(loop, ast.While) for name in names_in(loop.iter)
             for value in script.assigned(ast.Name(name)) if isinstance(value, ast.Call)
             and script.name(value) == "torch.utils.data.DataLoader"]
    if len(calls) != 1 or _draws(script):
        return
    call = calls[0]
    if len(call.args) > 2 or any(item.arg in (*ORDERED_OTHERWISE, None) for item in call.keywords):
        return
    shuffle = argument(call, "shuffle")
    if shuffle is None or (isinstance(shuffle, ast.Constant) and not shuffle.value):
        yield found("moderate", call, edits=with_argument(script, call, "shuffle", "True"))


def _draws(script: Script) -> bool:
    """Return whether something besides the loader's own argument may put the examples into a random order."""
    names = {str(getattr(node, "id", getattr(node, "attr", ""))) for node in script.nodes}
    names |= {"streaming" for item in script.every(ast.keyword) if item.arg == "streaming"}
    return any(word in name for name in names for word in DRAWS)


@code_rule
def sampler_without_epoch(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A DistributedSampler draws the same order in every epoch."""
    call = next((call for call in script.calls(*SAMPLERS) if not OF_OTHER_ROWS.search(script.words(script.statement(call)))),
                None)
    shuffle = argument(call, "shuffle") if call is not None else None
    if call is None or ".set_epoch(" in script.text or not script.training_loops or (
            isinstance(shuffle, ast.Constant) and not shuffle.value) or subject.value("training.num_train_epochs") == 1:
        return
    loop = script.training_loops[0]
    if isinstance(loop, ast.For) and not script.loops(loop) and not any(
            script.loops(caller) for caller in script.callers(script.function(loop))):
        return                               # the data are read once
    statement = script.statement(call)
    name = script.words(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    epochs = next((around for around in script.loops(loop) if isinstance(around, ast.For)
                   and isinstance(around.target, ast.Name)), None)
    edits = with_line(script, epochs.body[0], f"{name}.set_epoch({script.words(epochs.target)})") if (
        name and epochs is not None and script.function(epochs) is script.function(call)) else ()
    yield found("moderate", call, edits=edits)
