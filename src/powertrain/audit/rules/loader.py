"""Rules on data loaders: workers, prefetching, pinned memory, order, and threads."""

from __future__ import annotations

import ast

from powertrain.audit.edits import removed, set_to, with_argument, with_line
from powertrain.audit.rules.base import Findings, code_rule, found, rule
from powertrain.audit.script import Loop, Script, argument
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records.findings import UNMEASURED

WORKERS = ("training.dataloader_num_workers", "loader.num_workers")
LASTING = {"training.dataloader_num_workers": "training.dataloader_persistent_workers",
           "loader.num_workers": "loader.persistent_workers"}
PREFETCH = {"training.dataloader_num_workers": "training.dataloader_prefetch_factor",
            "loader.num_workers": "loader.prefetch_factor"}
PINNING = ("training.dataloader_pin_memory", "loader.pin_memory")
TOKENIZERS, THREADS = "environment.TOKENIZERS_PARALLELISM", ("environment.OMP_NUM_THREADS", "environment.MKL_NUM_THREADS")
STREAMING = "data.streaming"
ORDERED_OTHERWISE = ("sampler", "batch_sampler")
DRAWS = ("IterableDataset", "shuffle", "streaming", "randint", "randperm", "random")
SAMPLERS = ("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler")


@rule("documentation: torch.utils.data.DataLoader; TrainingArguments._validate_args")
def loader_needs_workers(subject: Subject, where: Circumstances) -> Findings:
    """The loader shall prefetch or keep its workers, but it has no workers."""
    for workers in WORKERS:
        asked = [key for key in (PREFETCH[workers], LASTING[workers]) if subject.on(key)]
        if asked and subject.number(workers) == 0:
            yield found("critical", subject.seen(workers), *(subject.settings[key] for key in asked),
                        edits=tuple(edit for key in asked for edit in removed(subject, key)),
                        names=" and ".join(key.partition(".")[2] for key in asked))


@rule("technique: loader; features: X2 (how long a step waits for data decides, not a rule of thumb)")
def workers_beyond_cores(subject: Subject, where: Circumstances) -> Findings:
    """The loader has more worker processes than there are cores."""
    for key in WORKERS if where.hardware is not None else ():
        assert where.hardware is not None
        cores, on_cpu = where.hardware.cores, where.hardware.device == "cpu"
        workers = int(subject.number(key) or 0) * subject.processes
        if key in subject.settings and workers > cores:
            yield found("moderate", subject.settings[key], case="cpu" if on_cpu else "", workers=workers, cores=cores,
                        edits=set_to(subject, key, 0 if on_cpu else cores // subject.processes))


@rule("technique: loader; features: X2 (0 is often best where data is tokenised beforehand)",
      gives_way_to=("workers_beyond_cores",))
def workers_for_ready_data(subject: Subject, where: Circumstances) -> Findings:
    """Worker processes only hand over rows that are ready."""
    key = WORKERS[0]
    if subject.framework == "trl" and key in subject.settings and (subject.number(key) or 0) >= 1 \
            and not subject.is_on(STREAMING):
        yield found("low", subject.settings[key], edits=set_to(subject, key, 0))


@rule("documentation: torch.utils.data.DataLoader (persistent_workers)",
      gives_way_to=("workers_for_ready_data", "workers_beyond_cores"))
def workers_start_each_epoch(subject: Subject, where: Circumstances) -> Findings:
    """The loader starts its workers again for every epoch."""
    epochs = subject.number("training.num_train_epochs")
    for workers, lasting in LASTING.items():
        if workers in subject.settings and (subject.number(workers) or 0) >= 1 and not subject.is_unread(lasting) \
                and not subject.on(lasting) and (epochs or 1) > 1 and (subject.number("training.max_steps") or -1) < 0:
            yield found("low", subject.settings[workers], subject.settings.get("training.num_train_epochs"),
                        edits=set_to(subject, lasting, True), epochs=epochs,
                        written=f"{lasting.partition('.')[2]}{'=True' if subject.script else ': true'}")


@rule("technique: loader; features: X2")
def streaming_without_workers(subject: Subject, where: Circumstances) -> Findings:
    """The training process itself reads and tokenises streamed data."""
    if subject.is_on(STREAMING) and subject.number(WORKERS[0]) == 0:
        yield found("moderate", subject.settings[STREAMING], subject.seen(WORKERS[0]), edits=set_to(subject, WORKERS[0], 2))


@rule("technique: loader; features: X8 (it helps copies to a CUDA device, and is Trainer's default)")
def pinned_memory(subject: Subject, where: Circumstances) -> Findings:
    """Memory is pinned without a GPU, or not pinned with one."""
    for key in PINNING if where.hardware is not None else ():
        device = where.hardware.device if where.hardware else ""
        if subject.value(key) is True and device != "cuda":
            yield found("low", subject.settings[key], edits=removed(subject, key), case="for nothing", device=device)
        elif subject.value(key) is False and device == "cuda":
            yield found("low", subject.settings[key], edits=set_to(subject, key, True))


@rule("features: F21 (it lets one tokenizer use threads; it starts no loader workers)")
def tokenizers_parallelism(subject: Subject, where: Circumstances) -> Findings:
    """TOKENIZERS_PARALLELISM is forced on in a run with loader workers."""
    forced = str(subject.value(TOKENIZERS)).lower() in ("true", "1", "on", "yes")
    workers = next((subject.settings[key] for key in WORKERS if key in subject.settings and subject.number(key)), None)
    if forced and workers is not None:
        yield found("low", subject.settings[TOKENIZERS], workers)


@rule("technique: threads; features: F21 (physical cores divided by processes)")
def threads_fixed(subject: Subject, where: Circumstances) -> Findings:
    """The number of threads is fixed, and is not that of this machine."""
    hardware = where.hardware
    for key in THREADS if hardware is not None else ():
        asked = str(subject.value(key))
        if hardware is None or not asked.isdigit():
            continue
        threads, fair, on_cpu = int(asked), max(1, hardware.cores // subject.processes), hardware.device == "cpu"
        if threads > fair or (threads < fair and on_cpu):
            yield found("moderate" if on_cpu else "low", subject.settings[key], case="many" if threads > fair else "",
                        expected=None if threads > fair and on_cpu else UNMEASURED, threads=threads, fair=fair,
                        name=key.partition(".")[2])
        return


@code_rule("documentation: torch.utils.data.DataLoader (shuffle=False is the default)")
def loader_not_shuffled(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Training examples come in the order of the file in every epoch."""
    calls = [call for loop in script.training_loops for call in _loaders(script, loop)]
    if len(calls) != 1 or _draws(script):
        return
    call = calls[0]
    if len(call.args) > 2 or any(item.arg is None or item.arg in ORDERED_OTHERWISE for item in call.keywords):
        return
    shuffle = argument(call, "shuffle")
    if shuffle is None or (isinstance(shuffle, ast.Constant) and not shuffle.value):
        yield found("moderate", script.evidence(call), edits=with_argument(script, call, "shuffle", "True"))


def _draws(script: Script) -> bool:
    """Whether something besides the loader's own argument may put the examples into a random order."""
    names = {str(getattr(node, "id", getattr(node, "attr", ""))) for node in script.nodes}
    names |= {"streaming" for node in script.nodes if isinstance(node, ast.keyword) and node.arg == "streaming"}
    return any(word in name for name in names for word in DRAWS)


def _loaders(script: Script, loop: Loop) -> list[ast.Call]:
    """Return the DataLoaders that a training loop goes over."""
    over = ast.walk(loop.iter) if not isinstance(loop, ast.While) else ()
    return [value for name in {item.id for item in over if isinstance(item, ast.Name)}
            for value in script.assigned(ast.Name(name)) if isinstance(value, ast.Call)
            and script.name(value.func) == "torch.utils.data.DataLoader"]


@code_rule("documentation: torch.utils.data.distributed.DistributedSampler (set_epoch at the beginning of each epoch)")
def sampler_without_epoch(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A DistributedSampler draws the same order in every epoch."""
    call = next(script.calls(*SAMPLERS), None)
    shuffle = argument(call, "shuffle") if call is not None else None
    if call is None or script.has_call(".set_epoch") or not script.training_loops or (
            isinstance(shuffle, ast.Constant) and not shuffle.value):
        return
    statement = script.statement(call)
    name = script.words(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    epochs = next((loop for loop in script.loops(script.training_loops[0]) if isinstance(loop, ast.For)
                   and isinstance(loop.target, ast.Name)), None)
    edits = with_line(script, epochs.body[0], f"{name}.set_epoch({script.words(epochs.target)})") if (
        name and epochs is not None and script.function(epochs) is script.function(call)) else ()
    yield found("moderate", script.evidence(call), edits=edits)
