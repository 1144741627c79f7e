"""Rules on data loaders: workers, prefetching, pinned memory, order, and threads."""

from __future__ import annotations

import ast

from powertrain.audit.code_editing import with_argument, with_line
from powertrain.audit.editing import removed, set_to
from powertrain.audit.resolved import is_on, is_unread, number, processes, seen
from powertrain.audit.rules.base import STARTS, Findings, found, of_script
from powertrain.audit.script import Loop, Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records.findings import UNMEASURED, Expected, rule

WORKERS = ("training.dataloader_num_workers", "loader.num_workers")
LASTING = {"training.dataloader_num_workers": "training.dataloader_persistent_workers",
           "loader.num_workers": "loader.persistent_workers"}
PREFETCH = {"training.dataloader_num_workers": "training.dataloader_prefetch_factor",
            "loader.num_workers": "loader.prefetch_factor"}
TOKENIZERS, THREADS = "environment.TOKENIZERS_PARALLELISM", ("environment.OMP_NUM_THREADS", "environment.MKL_NUM_THREADS")
CLAIMS = "study: 2026-11-21_claims"
ORDERED_OTHERWISE = ("sampler", "batch_sampler")
DRAWS = ("IterableDataset", "shuffle", "streaming", "randint", "randperm", "random")
SAMPLERS = ("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler")


@rule("documentation: torch.utils.data.DataLoader; TrainingArguments._validate_args")
def loader_needs_workers(subject: Subject, where: Circumstances) -> Findings:
    """The loader shall prefetch or keep its workers, but it has no workers."""
    for workers in WORKERS:
        asked = [key for key in (PREFETCH[workers], LASTING[workers]) if subject.on(key)]
        if asked and number(subject, workers) == 0:
            names = " and ".join(key.partition(".")[2] for key in asked)
            yield found("critical", f"The loader raises on {names}: this loader has no worker processes",
                        seen(subject, workers), *(subject.settings[key] for key in asked), expected=STARTS,
                        cure=f"Remove {names}, or give the loader workers if it waits for data",
                        edits=tuple(edit for key in asked for edit in removed(subject, key)), words=("techniques.loader=on",))


@rule("technique: loader; features: X2 (how long a step waits for data decides, not a rule of thumb)")
def workers_beyond_cores(subject: Subject, where: Circumstances) -> Findings:
    """The loader has more worker processes than there are cores."""
    hardware = where.hardware
    for key in WORKERS if hardware is not None else ():
        assert hardware is not None
        workers, on_cpu = int(number(subject, key) or 0) * processes(subject), hardware.device == "cpu"
        if key in subject.settings and workers > hardware.cores:
            yield found("moderate", f"{workers} workers share {hardware.cores} cores" + (
                        " with the training itself, which runs on them" if on_cpu else ""), subject.settings[key],
                        expected=Expected("less waiting: study 2026-11-21_claims, 004-03 and 003-15, found workers harmful on "
                        "2 cores", CLAIMS) if on_cpu else UNMEASURED, words=("techniques.loader=off",) if on_cpu else (),
                        cure="Start with 0 workers if data is tokenised before training, and add workers while the step "
                        "waits", edits=set_to(subject, key, 0 if on_cpu else hardware.cores // processes(subject)))


@rule("technique: loader; features: X2 (0 is often best where data is tokenised beforehand)",
      gives_way_to=("workers_beyond_cores",))
def workers_for_ready_data(subject: Subject, where: Circumstances) -> Findings:
    """Worker processes only hand over rows that are ready."""
    key = WORKERS[0]
    if subject.framework == "trl" and key in subject.settings and (number(subject, key) or 0) >= 1 \
            and not is_on(subject, "data.streaming"):
        yield found("low", "SFTTrainer tokenises before training. Workers only put rows together, and each is a process with "
                    "a copy of the dataset's handle and a start at every epoch", subject.settings[key],
                    expected=Expected("no effect that could be measured (claim 002-03)", CLAIMS), edits=set_to(subject, key, 0),
                    cure="Measure first (`powertrain diagnose`): keep 0 while a step waits less than 2 % for data")


@rule("documentation: torch.utils.data.DataLoader (persistent_workers)",
      gives_way_to=("workers_for_ready_data", "workers_beyond_cores"))
def workers_start_each_epoch(subject: Subject, where: Circumstances) -> Findings:
    """The loader starts its workers again for every epoch."""
    epochs = number(subject, "training.num_train_epochs")
    for workers, lasting in LASTING.items():
        if workers in subject.settings and (number(subject, workers) or 0) >= 1 and not is_unread(subject, lasting) \
                and not subject.on(lasting) and (epochs or 1) > 1 and (number(subject, "training.max_steps") or -1) < 0:
            written = f"{lasting.partition('.')[2]}{'=True' if subject.script else ': true'}"
            yield found("low", f"{epochs:g} epochs start their worker processes {epochs:g} times, and each imports what the "
                        "dataset needs", subject.settings[workers], subject.settings.get("training.num_train_epochs"),
                        expected=UNMEASURED, cure=f"Let them live: {written}", edits=set_to(subject, lasting, True))


@rule("technique: loader; features: X2")
def streaming_without_workers(subject: Subject, where: Circumstances) -> Findings:
    """The training process itself reads and tokenises streamed data."""
    if is_on(subject, "data.streaming") and number(subject, WORKERS[0]) == 0:
        yield found("moderate", "A streamed dataset is read, decoded and tokenised when its batch is drawn. Without workers "
                    "the device waits for all of that in every step", subject.settings["data.streaming"],
                    seen(subject, WORKERS[0]), expected=UNMEASURED,
                    cure="Tokenise once and keep the result, or give the loader workers", edits=set_to(subject, WORKERS[0], 2),
                    words=("techniques.loader=on",))


@rule("technique: loader; features: X8 (it helps copies to a CUDA device, and is Trainer's default)")
def pinned_memory(subject: Subject, where: Circumstances) -> Findings:
    """Memory is pinned without a GPU, or not pinned with one."""
    device = where.hardware.device if where.hardware else None
    for key in ("training.dataloader_pin_memory", "loader.pin_memory"):
        asked = subject.settings.get(key)
        if asked is None or device is None:
            continue
        if asked.value is True and device != "cuda":
            yield found("low", f"Pinning speeds up copies to a GPU; on {device} torch warns and pins nothing", asked,
                        expected=Expected("none", "none"), cure="Remove it", edits=removed(subject, key),
                        title="pinned memory without a CUDA device")
        elif asked.value is False and device == "cuda":
            yield found("low", "Copies from pageable memory cannot overlap with computing; a batch of token ids is small, so "
                        "little is lost", asked, expected=UNMEASURED, cure="Pin them", edits=set_to(subject, key, True),
                        words=("techniques.loader=on",), title="batches are not pinned")


@rule("features: F21 (it lets one tokenizer use threads; it starts no loader workers)")
def tokenizers_parallelism(subject: Subject, where: Circumstances) -> Findings:
    """TOKENIZERS_PARALLELISM is forced on in a run with loader workers."""
    forced = str(subject.value(TOKENIZERS)).lower() in ("true", "1", "on", "yes")
    workers = next((subject.settings[key] for key in WORKERS if key in subject.settings and number(subject, key)), None)
    if TOKENIZERS in subject.settings and forced and workers is not None:
        yield found("low",
                    "The library switches threads off after a fork; true keeps them on, and forked loader workers may hang",
                    subject.settings[TOKENIZERS], workers, expected=UNMEASURED,
                    cure="Leave it unset: the tokenizer uses threads before the fork, and none after it")


@rule("technique: threads; features: F21 (physical cores divided by processes)")
def threads_fixed(subject: Subject, where: Circumstances) -> Findings:
    """The number of threads is fixed, and is not that of this machine."""
    hardware = where.hardware
    for key in THREADS:
        asked = subject.settings.get(key)
        if asked is None or hardware is None or not str(asked.value).isdigit():
            continue
        threads, fair = int(str(asked.value)), max(1, hardware.cores // processes(subject))
        on_cpu, many = hardware.device == "cpu", threads > fair
        if many or (threads < fair and on_cpu):
            yield found("moderate" if on_cpu else "low", f"Each process has {threads} threads and {fair} cores: " + (
                        "threads wait for each other at the end of every operator" if many else "the other cores are idle"),
                        asked, expected=Expected("too many were harmful in study 2026-11-21_claims (001-10-threads)", CLAIMS) if
                        many and on_cpu else UNMEASURED, cure=f"Leave it unset, or set {key.partition('.')[2]}={fair}",
                        words=(f"techniques.threads.threads={fair}",), title=f"too {'many' if many else 'few'} threads")
            return


@rule("documentation: torch.utils.data.DataLoader (shuffle=False is the default)")
@of_script
def loader_not_shuffled(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """Training examples come in the order of the file in every epoch."""
    calls = [call for loop in script.training_loops for call in _loaders(script, loop)]
    if len(calls) != 1 or _draws(script):
        return
    call = calls[0]
    if len(call.args) > 2 or any(item.arg is None or item.arg in ORDERED_OTHERWISE for item in call.keywords):
        return
    shuffle = next((item.value for item in call.keywords if item.arg == "shuffle"), None)
    if shuffle is None or (isinstance(shuffle, ast.Constant) and not shuffle.value):
        yield found("moderate", "Every epoch goes through the examples in the order of the file: batches of neighbours are "
                    "alike, and the last examples count most", script.evidence(call), accuracy="low", cure="Pass "
                    "shuffle=True", edits=with_argument(script, call, "shuffle", "True"))


def _draws(script: Script) -> bool:
    """Whether something besides the loader's own argument may put the examples into a random order."""
    names = {str(getattr(node, "id", getattr(node, "attr", ""))) for node in script.nodes}
    names |= {"streaming" for node in script.nodes if isinstance(node, ast.keyword) and node.arg == "streaming"}
    return any(word in name for name in names for word in DRAWS)


def _loaders(script: Script, loop: Loop) -> list[ast.Call]:
    """Return the DataLoaders that a training loop goes over."""
    names = {item.id for item in ast.walk(loop.iter) if isinstance(item, ast.Name)} if not isinstance(loop,
                                                                                                      ast.While) else set()
    return [value for name in names for value in script.assigned(ast.Name(name)) if isinstance(value, ast.Call)
            and script.name(value.func) == "torch.utils.data.DataLoader"]


@rule("documentation: torch.utils.data.distributed.DistributedSampler (set_epoch at the beginning of each epoch)")
@of_script
def sampler_without_epoch(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A DistributedSampler draws the same order in every epoch."""
    call = next(script.calls(*SAMPLERS), None)
    if call is None or script.has_call(".set_epoch") or not script.training_loops or any(
            item.arg == "shuffle" and isinstance(item.value, ast.Constant) and not item.value.value for item in call.keywords):
        return
    statement = script.statement(call)
    name = script.words(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    epochs = [loop for loop in script.loops(script.training_loops[0]) if isinstance(loop, ast.For) and isinstance(loop.target,
                                                                                                                  ast.Name)]
    edits = with_line(script, epochs[0].body[0], f"{name}.set_epoch({script.words(epochs[0].target)})") if (
        name and epochs and script.function(epochs[0]) is script.function(call)) else ()
    yield found("moderate", "The sampler draws its order from its seed and the epoch's number, and nothing tells it the "
                "number", script.evidence(call), accuracy="low",
                cure="Call sampler.set_epoch(epoch) at the beginning of each epoch", edits=edits)
