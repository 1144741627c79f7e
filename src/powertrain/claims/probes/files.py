"""Probes of files: compressing a checkpoint, saving it, loading a model, and tokenising text."""

import gc
import gzip
import os
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from powertrain.claims.probes import probe
from powertrain.claims.probes.probe import Context, Measured
from powertrain.data.documents import read_documents
from powertrain.data.tokenizers import BytePairTokenizer
from powertrain.evidence.stats import by_turns, interval
from powertrain.facts.measure import seconds_of
from powertrain.records import WrongUse
from powertrain.training.checkpoint import save_checkpoint

COMPRESSIONS: Mapping[str, Callable[[bytes], bytes]] = {"none": bytes, "gzip": partial(gzip.compress, compresslevel=6)}
PER_STEPS = 1000                             # the steps over which the time of saving is counted
SMALL_LLAMA: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
                               "vocab_size": 8192}
PEAK, STATUS, RESET = "VmHWM:", Path("/proc/self/status"), Path("/proc/self/clear_refs")


def compression(context: Context, *, words: Sequence[str], a: str = "none", b: str = "gzip", steps: int = 20,
                most_bytes: int = 8 << 20) -> Measured:
    """Return the share of arm a's bytes that arm b saves of a real checkpoint; arms are none and gzip.

    A larger checkpoint is cut to `most_bytes`, weights and moments alike. Detail: `times_slower`, the seconds of writing with
    arm b over arm a.
    """
    training = probe.open_training(words, context.cache, warm_up=steps)
    saved = save_checkpoint(context.folder / "compression", training.state)
    content = [(saved / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]
    whole_bytes = sum(map(len, content))
    kept = min(1.0, most_bytes / whole_bytes)
    sample = b"".join(part[:round(kept * len(part))] for part in content)

    def write(name: str) -> None:
        with open(context.folder / f"compressed.{name}", "wb") as file:
            file.write(COMPRESSIONS[name](sample))
            file.flush()
            os.fsync(file.fileno())

    arms = {name: partial(seconds_of, partial(write, name), "cpu") for name in (a, b)}
    rounds = by_turns(arms, context.deadline)
    left = {name: (context.folder / f"compressed.{name}").stat().st_size for name in (a, b)}
    saved_share = 1 - left[b] / left[a]
    return Measured(probe.exactly(saved_share), "of the bytes", a, b,
                    {"checkpoint_bytes": whole_bytes, "bytes": left, "seconds": probe.medians(rounds),
                     "times_slower": vars(probe.ratio(rounds, b, a)), "saved_share": saved_share,
                     "bytes_per_s": left[a] / probe.medians(rounds)[b]})


def saving(context: Context, *, words: Sequence[str], a: int = 50, b: int = 500, steps: int = 4) -> Measured:
    """Return the share by which saving every b steps blocks training less than every a steps.

    The seconds of real checkpoints (synced, with sha256) are multiplied by how often each arm writes one. Detail: seconds
    blocked per 1000 steps, and their share of the wall time of both arms.
    """
    training, folder = probe.open_training(words, context.cache), context.folder / "saving"

    def save_s() -> float:
        training.advance(1)                  # each checkpoint is of a step of its own
        seconds = seconds_of(lambda: save_checkpoint(folder, training.state), training.setup.device.type)
        shutil.rmtree(folder)
        return seconds

    save_s()
    one, other = f"saved every {a} steps", f"saved every {b} steps"
    arms: probe.Arms = {one: save_s, other: save_s, "step": partial(training.step_s, steps)}
    rounds = by_turns(arms, context.deadline)
    less = [1 - blocked_s(often, b) / blocked_s(seldom, a)
            for seldom, often in zip(rounds[one], rounds[other], strict=True)]
    save, step_s = statistics.median([*rounds[one], *rounds[other]]), probe.medians(rounds)["step"]
    detail = {"save_s": save, "step_s": step_s}
    for name, every in (("a", a), ("b", b)):
        blocked = blocked_s(save, every)
        detail |= {f"blocked_s_{name}": blocked, f"blocked_share_{name}": blocked / (blocked + PER_STEPS * step_s)}
    return Measured(interval(less), "less time blocked", one, other, detail)


def blocked_s(save_s: float, every: int) -> float:
    """Return the seconds blocked per 1000 steps."""
    return save_s * PER_STEPS / every


# ------------------------------------------------------------------------------------------------ loading

def loading(context: Context, *, a: Mapping[str, Any], b: Mapping[str, Any], metric: str = "seconds") -> Measured:
    """Compare two sets of options of transformers' from_pretrained by their "seconds" or their peak "memory".

    A small Llama is written once and read by turns in one process. Both arms read the file from the disk's cache.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    probe.one_of("metric", metric, ("seconds", "memory"))
    model = LlamaForCausalLM(LlamaConfig(**SMALL_LLAMA))
    model_bytes = sum(value.numel() * value.element_size() for value in model.parameters())
    model.save_pretrained(context.folder / "model")
    del model

    def load(options: Mapping[str, Any]) -> None:
        loaded = LlamaForCausalLM.from_pretrained(context.folder / "model", **options)
        sum(value.sum().item() for value in loaded.parameters())     # pages that are only mapped are not loaded yet

    take = peak_bytes if metric == "memory" else partial(seconds_of, device="cpu")
    arms = {", ".join(f"{key}={value}" for key, value in options.items()) or "as it is": partial(take, partial(load, options))
            for options in (a, b)}
    for arm in arms.values():
        arm()
    rounds = by_turns(arms, context.deadline)
    if metric == "seconds":
        return probe.faster(rounds, model_bytes=model_bytes)
    one, other = arms
    return Measured(probe.ratio(rounds, other, one), "times the memory", one, other,
                    {"memory": probe.medians(rounds), "model_bytes": model_bytes})


def peak_bytes(work: Callable[[], object]) -> float:
    """Return the largest rise of the resident memory of the process while `work` ran."""
    gc.collect()
    try:
        RESET.write_text("5")                # Linux, proc(5): the high-water mark becomes the present resident memory
    except OSError:
        raise WrongUse(f"the peak of resident memory is read from {STATUS}, which only Linux has") from None
    before = _high_water_bytes()
    work()
    return max(1.0, _high_water_bytes() - before)


def _high_water_bytes() -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(PEAK))
    return 1024.0 * int(line.split()[1])


# ------------------------------------------------------------------------------------------------ tokenising

CHARACTERS, ROW = 3_000_000, 1_000
VOCABULARY, LEARNED_ROWS = 2048, 300         # of the BPE tokenizer, and the rows from which its merges are learned


def tokenising(context: Context) -> Measured:
    """Return how many times as fast the tokenizers library tokenises with TOKENIZERS_PARALLELISM=true as with false.

    The rows are of Python's standard library. The library reads the variable once, so each turn is a process of its own.
    """
    text = "".join(document.text for document in read_documents("stdlib", cache=context.cache, max_chars=CHARACTERS))
    rows = [text[at:at + ROW] for at in range(0, len(text), ROW)]
    tokenizer = BytePairTokenizer.trained(rows[:LEARNED_ROWS], VOCABULARY).library.to_str()
    arms = {f"TOKENIZERS_PARALLELISM={parallel}": partial(probe.apart, tokenising_s, tokenizer, rows, parallel)
            for parallel in ("false", "true")}
    return probe.faster(by_turns(arms, context.deadline), characters=len(text))


def tokenising_s(tokenizer: str, rows: list[str], parallel: str) -> float:
    """Return the seconds in which this process tokenises `rows`, after a hundred of them for warming up."""
    os.putenv("TOKENIZERS_PARALLELISM", parallel)
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(tokenizer)
    library.encode_batch(rows[:100])
    return seconds_of(lambda: library.encode_batch(rows), "cpu")
