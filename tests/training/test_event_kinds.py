"""Every kind of event: written and read back, with its schema, its sentence, and as older and later versions wrote it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest

from powertrain.records import errors
from powertrain.records.event_log import from_line, to_line
from powertrain.records.events import (
    KINDS,
    CheckpointFailed,
    CheckpointNotDeleted,
    CheckpointRejected,
    Compiling,
    End,
    Evaluated,
    Event,
    EventsWaiting,
    LittleDisk,
    Note,
    OutOfMemory,
    Phase,
    Resume,
    Rewound,
    RunWarning,
    SavedAtOnce,
    SaveInterval,
    SaveWaits,
    Start,
    Step,
    TimingSteps,
    Tokenising,
    Unknown,
    UpdateSkipped,
)

MIB = 1 << 20
VALUES: dict[str, Any] = {"str": "x", "str | None": "x", "int": 3, "int | None": 3, "float": 2.5, "float | None": 2.5,
                          "bool": True, "tuple[str, ...]": ("a", "b"), "tuple[int, ...]": (3, 4), "Mapping[str, Any]": {"a": 1},
                          "Mapping[str, Any] | None": {"a": 1},
                          "Mapping[str, float]": {"a": 0.5}, "Mapping[str, int]": {"a": 1},
                          "Mapping[str, Mapping[str, float]]": {"a": {"b": 0.5}}}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_reads_back_as_what_was_written(kind: type[Event]) -> None:
    event = kind(**{field.name: VALUES[spelled(field.type)] for field in dataclasses.fields(kind)})
    assert from_line(to_line(event)) == event


def spelled(annotation: Any) -> str:
    """The annotation as the source has it."""
    return inspect.formatannotation(annotation).replace("collections.abc.", "").replace("typing.", "")


def test_the_schema_in_docs_is_that_of_the_classes() -> None:
    root = Path(__file__).parents[2]
    made = runpy.run_path(str(root / "benchmarks" / "events_schema.py"))["text"]()
    assert (root / "docs" / "events.schema.json").read_text(encoding="utf-8") == made, "out of date: run `make schema`"


def test_what_is_unknown_is_absent_from_the_line() -> None:
    assert "bits_per_byte" not in to_line(Evaluated(loss=1.0, tokens=3))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_texts_in_json_and_numbers_again_when_read(number: float) -> None:
    event = Step(step=1, loss=2.0, tokens=8, real_tokens=9, seconds=0.1, learning_rate=1e-3, grad_norm=number,
                 metrics={"z_loss": number})
    line = json.dumps(to_line(event), allow_nan=False)
    read = from_line(json.loads(line))
    assert isinstance(read, Step)
    assert [read.grad_norm, read.metrics["z_loss"]] == pytest.approx([number, number], nan_ok=True)


def test_fields_and_kinds_of_a_later_version_are_kept() -> None:
    step = {"event": "step", "time": 5.0, "step": 3, "loss": 1.0, "tokens": 2, "real_tokens": 2, "seconds": 0.1,
            "learning_rate": 1e-3, "grad_norm": 0.5, "temperature_c": 71}
    later = [step, {"event": "alarm", "time": 6.0, "step": 3, "level": "red"},
             {"event": "warning", "about": "overheated", "time": 7.0, "step": 4, "celsius": 99}]
    read = [from_line(line) for line in later]
    assert isinstance(read[0], Step)
    assert read[0].more == {"temperature_c": 71}
    assert isinstance(read[1], Unknown)
    assert type(read[2]) is RunWarning
    assert "'celsius': 99" in read[2].sentence
    assert [to_line(event) | line for event, line in zip(read, later, strict=True)] == [to_line(event) for event in read]


# ------------------------------------------------------------------------------- version 1, as runs of that time wrote it

OLD_WARNING = {"event": "warning", "time": 9.0, "message": "the disk has 5 MiB free, and 2 kept checkpoints take 9 MiB"}
OOM = ("step 1,101 ran out of memory (DefaultCPUAllocator: can't allocate memory): it is taken again in passes of at most "
       "2,048 tokens instead of 4,096, at the same batch of 16; plan.json says so, and a continuation starts with it")


@pytest.mark.parametrize(("line", "event"), [
    ({"event": "start", "time": 1.0, "name": "default", "method": "scratch", "total_steps": 9, "train_batch_size": 4,
      "block": 16, "parameters": 99, "device": "cpu", "techniques": ["bf16"], "estimate": None},
     Start(time=1.0, name="default", method="scratch", total_steps=9, train_batch_size=4, block=16, parameters=99,
           techniques=("bf16",))),
    ({"event": "resume", "time": 1.0, "step": 4, "rejected": ["step-000008: model.safetensors is damaged"], "total_steps": 9},
     Resume(time=1.0, step=4, rejected=("step-000008: model.safetensors is damaged",), total_steps=9)),
    ({"event": "step", "time": 1.0, "step": 1, "loss": 2.0, "tokens": 8, "real_tokens": 9, "seconds": 0.1,
      "learning_rate": 1e-3, "grad_norm": float("inf")},
     Step(time=1.0, step=1, loss=2.0, tokens=8, real_tokens=9, seconds=0.1, learning_rate=1e-3, grad_norm=float("inf"))),
    ({"event": "end", "time": 2.0, "reason": "stopped (SIGINT)", "step": 3, "seconds": 1.5},
     End(time=2.0, reason="stopped", signal="SIGINT", step=3, seconds=1.5)),
    ({"event": "end", "time": 2.0, "reason": "failed", "step": 3, "message": "the loss of step 4 is not finite (nan); the"},
     End(time=2.0, reason="failed", step=3, message="the loss of step 4 is not finite (nan); the",
         error={"kind": "loss_not_finite", "step": 4, "loss": "nan"})),
    ({"event": "end", "time": 2.0, "reason": "failed", "step": 3,
      "message": "after step 3 12 weights are not finite, a.b the first"},
     End(time=2.0, reason="failed", step=3, message="after step 3 12 weights are not finite, a.b the first",
         error={"kind": "weights_not_finite", "step": 3, "weights": 12, "first": "a.b"})),
    ({"event": "warning", "time": 3.0, "step": 1100, "message": OOM},
     OutOfMemory(time=3.0, step=1100, before_tokens=4096, after_tokens=2048, train_batch_size=16,
                 said="DefaultCPUAllocator: can't allocate memory")),
    ({"event": "warning", "time": 3.0, "message": "step 8 could not be saved: File too large; training goes on and the next "
                                                  "save tries again. Free some space"},
     CheckpointFailed(time=3.0, step=8, why="File too large")),
    ({"event": "warning", "time": 3.0, "message": "passed over checkpoint step-000008: model.safetensors is damaged: 5 bytes"},
     CheckpointRejected(time=3.0, name="step-000008", why="model.safetensors is damaged: 5 bytes")),
    (OLD_WARNING, RunWarning(time=9.0, message=str(OLD_WARNING["message"]))),
    ({"event": "note", "time": 3.0, "message": "int8_base: 8 matrices"}, Note(time=3.0, message="int8_base: 8 matrices")),
], ids=lambda value: value.get("event") if isinstance(value, dict) else "")
def test_a_line_of_version_1_is_an_event_of_today(line: dict[str, Any], event: Event) -> None:
    assert from_line(line) == event


# ---------------------------------------------------------------------------------------- the sentences, asserted here only


@pytest.mark.parametrize(("event", "sentence"), [
    (OutOfMemory(step=100, before_tokens=4096, after_tokens=2048, train_batch_size=16, said="no room"),
     "step 101 ran out of memory (no room). It is repeated in passes of at most 2,048 tokens instead of 4,096, with the same "
     "batch of 16 examples. plan.json now holds the smaller passes"),
    (CheckpointFailed(step=8, why="File too large", folder="run/checkpoints", free_bytes=5 * MIB, needed_bytes=9 * MIB),
     "the checkpoint of step 8 could not be saved: File too large. Training goes on; the next save tries again. Free some disk "
     "space: 5 MiB are left, a checkpoint takes 9 MiB"),
    (CheckpointFailed(step=8, why="Permission denied", folder="run/checkpoints", last=True),
     "the checkpoint of step 8 could not be saved: Permission denied. The final model is still to be written. Make "
     "run/checkpoints writable again"),
    (CheckpointNotDeleted(step=4, why="I/O error", folder="run/checkpoints"),
     "step 4 is saved, but an older checkpoint could not be deleted: I/O error. run/checkpoints takes more disk space than "
     "planned"),
    (CheckpointRejected(name="step-000008", why="it is damaged"), "the checkpoint step-000008 was not used: it is damaged"),
    (LittleDisk(free_bytes=5 * MIB, needed_bytes=40 * MIB, checkpoints=2),
     "the disk has 5 MiB free, but 2 kept checkpoints, the best one, a new one and the final model take 40 MiB. Free some "
     "space, or use save_total_limit=1"),
    (SaveWaits(step=8, free_bytes=300, needed_bytes=90 << 10, frees={"runs/old/checkpoints": 3 << 30, "cache": 5 * MIB}),
     "the checkpoint of step 8 waits for disk space: 300 bytes are free, and it takes 90 KiB. Training goes on, and saves as "
     "soon as there is room. What might be deleted: runs/old/checkpoints (3 GiB), cache (5 MiB)"),
    (SavedAtOnce(step=8, free_bytes=5 * MIB, needed_bytes=9 << 30),
     "checkpoints are written while the training waits: a copy of what they hold takes 9 GiB of memory, and 5 MiB are free "
     "beside what a step takes"),
    (SaveInterval(step=60, steps=500, step_s=1.2, saving_s=0.25, save_every_s=600),
     "save_steps=auto saves every 500 steps: the training waited 0.25 s for the first checkpoint, and about 600 s of training "
     "lie between two"),
    (UpdateSkipped(step=1007, loss=math.nan, grad_norm=math.inf, examples=tuple(range(10)), in_row=2, most=5),
     "step 1,007 changed no weight: its loss or gradient norm is not finite (loss nan, norm inf; training examples 0, 1, 2, 3, "
     "4, 5, 6, 7 and 2 more). It is number 2 in a row, and max_skipped_steps=5"),
    (UpdateSkipped(step=7, loss=4.0, grad_norm=30.0, spike=True, examples=(3, 4), most=5),
     "step 7 changed no weight: its loss or gradient norm is far above that of the steps before it (loss 4, norm 30; training "
     "examples 3, 4). It is number 1 in a row, and max_skipped_steps=5"),
    (Rewound(step=500, bad_step=1007, in_row=6, examples=(3, 4), passed_over=507, rewinds=1, most=3),
     "the updates of 6 steps in a row, up to step 1,007, were not made, so the run went back to its checkpoint of step 500 "
     "(rewind 1 of 3). It goes on with the examples after those of step 1,007"),
    (EventsWaiting(why="No space left on device"),
     "events.jsonl cannot be written (No space left on device). Training goes on; the events are kept in memory until the file "
     "can be written"),
    (TimingSteps(seconds=90), "timing a few steps, to choose how many fit into 90 s"),
    (Tokenising(source="a.jsonl"), "tokenising a.jsonl"),
    (Tokenising(source="a.jsonl", rows=4096, rows_per_s=1024.4), "a.jsonl: 4,096 rows tokenised, 1,024 rows/s"),
    (Compiling(techniques=("attention_kernel", "fused_blocks")),
     "compiling code for attention_kernel, fused_blocks, or taking it from the cache"),
], ids=lambda value: type(value).__name__ if isinstance(value, Event) else "")
def test_sentences_are_made_from_the_fields(event: RunWarning | Note | Phase, sentence: str) -> None:
    assert event.sentence == sentence


@pytest.mark.parametrize(("code", "cure"), [
    ("ENOSPC", "Free some disk space: 5 MiB are left, a checkpoint takes 72 KiB"), ("EDQUOT", "quota"), ("EFBIG", "ulimit -f"),
    ("EIO", "dmesg"), ("EROFS", "read-only"), ("EACCES", "chmod"), ("EPERM", "chmod"), ("ENOENT", "writable again")])
def test_each_error_of_the_disk_has_a_cure_of_its_own(code: str, cure: str) -> None:
    full = {"free_bytes": 5 * MIB, "needed_bytes": 72 << 10} if code in ("ENOSPC", "EDQUOT", "EFBIG") else {}
    failed = CheckpointFailed(step=8, why="as the system says it", code=code, folder="run/checkpoints", **full)
    assert cure in failed.cure
    assert failed.cure in failed.sentence
    assert not full or "a checkpoint takes 72 KiB" in failed.cure


@pytest.mark.parametrize(("error", "fields", "says"), [
    (errors.LossNotFinite(4, float("nan")), {"kind": "loss_not_finite", "step": 4, "loss": "nan"},
     "the loss of step 4 is not finite (nan)"),
    (errors.WeightsNotFinite(4, 12, "a.b"), {"kind": "weights_not_finite", "step": 4, "weights": 12, "first": "a.b"},
     "after step 4, 12 weight tensors are not finite, the first is a.b"),
    (errors.GradientNotFinite(4, math.inf, (3, 4)), {"kind": "gradient_not_finite", "step": 4, "norm": "inf",
                                                     "examples": (3, 4)},
     "the gradient norm of step 4 is not finite (inf), with the training examples 3, 4"),
    (errors.TooManyBadSteps(9, 6, "max_skipped_steps=5 allows no more", (3, 4)),
     {"kind": "too_many_bad_steps", "step": 9, "in_row": 6, "examples": (3, 4)},
     "the updates of 6 steps in a row, up to step 9, were not made, because a loss or gradient norm is not finite or a spike, "
     "and max_skipped_steps=5 allows no more"),
    (errors.DoesNotFit(1, "no room", 4096, "train less"), {"kind": "does_not_fit", "step": 1, "said": "no room",
                                                          "pass_tokens": 4096},
     "step 1 does not fit the memory (no room), and its largest pass, of 4,096 tokens, cannot be halved; train less"),
    (errors.DoesNotFit(1, "no room", 4096, "train less", updating=True), {"updating": True},
     "the optimizer's update of step 1 ran out of memory (no room)"),
], ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "")
def test_errors_of_a_run_carry_their_numbers(error: errors.UserError, fields: dict[str, Any], says: str) -> None:
    assert error.fields().items() >= fields.items()
    assert says in str(error)
