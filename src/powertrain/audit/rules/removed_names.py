"""Arguments by names that the trainer no longer has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from powertrain.audit.editing import BY_LENGTH, removed, renamed
from powertrain.audit.resolved import TRAINERS
from powertrain.audit.rules.base import Circumstances, Rule
from powertrain.audit.subject import Setting, Subject
from powertrain.records.findings import Cure, Edit, Expected, Finding, Severity

SINCE = (5,)                 # transformers; and TRL 1 with it
# old name -> new one, "" where there is none. Source: TrainingArguments and Trainer of transformers 5.23, TRL 1.16's SFTConfig
REMOVED: Mapping[str, str] = {
    "warmup_ratio": "warmup_steps", "evaluation_strategy": "eval_strategy", "max_seq_length": "max_length",
    "group_by_length": "train_sampling_strategy", "logging_dir": "", "save_safetensors": "", "overwrite_output_dir": "",
    "no_cuda": "use_cpu", "per_gpu_train_batch_size": "per_device_train_batch_size", "fp16_opt_level": "",
    "tokenizer": "processing_class",
    "fp16_backend": "", "half_precision_backend": "", "use_mps_device": "", "past_index": "", "jit_mode_eval": "",
}


class RemovedNames(Rule):
    name = "removed_names"
    rests_on = "features: 4.3; documentation: TrainingArguments (transformers 5.23), SFTConfig (TRL 1.16)"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        if subject.framework not in TRAINERS:
            return
        version = where.version("transformers")
        everything = {**subject.settings, **subject.unread, **subject.unknown}
        found = {key: (setting, name) for key, setting in everything.items() if (name := _name(setting)) in REMOVED
                 and key.startswith(("training.", "trainer."))}
        if not found:
            return
        severity: Severity = "moderate" if version is None else "critical" if version >= SINCE else "low"
        names = ", ".join(f"{name} (now {REMOVED[name]})" if REMOVED[name] else f"{name} (gone)" for _, name in found.values())
        edits = tuple(edit for key, (_, name) in found.items() for edit in _edits(subject, key, name))
        yield cls.found(severity, "arguments that transformers 5 and TRL 1 no longer have", f"{names}: there they end the "
                        "script with a TypeError before anything is loaded", *(setting for setting, _ in found.values()),
                        expected=Expected("the script starts", "none"), cure=Cure("Use the new names", edits))


def _name(setting: Setting) -> str:
    matched = re.match(r"[\"']?([A-Za-z_]\w*)[\"']?\s*[=:]", setting.spelled)
    return matched[1] if matched else ""


def _edits(subject: Subject, key: str, name: str) -> tuple[Edit, ...]:
    """A rename where the value means the same under the new name; what is gone is taken out."""
    if name == "group_by_length":
        grouped = subject.value(key) == BY_LENGTH
        return renamed(subject, key, REMOVED[name], BY_LENGTH) if grouped else removed(subject, key)
    if not REMOVED[name]:
        return removed(subject, key)
    return () if name == "no_cuda" else renamed(subject, key, REMOVED[name])
