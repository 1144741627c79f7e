"""Subjects and circumstances for audit rules, made by hand: a file of one setting a line, machines, data and models."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Framework, Setting, Subject
from powertrain.facts.model import model_facts
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.records import DataFacts, Facts, Hardware, ModelFacts, Software
from powertrain.records.findings import Place

GIB = 1 << 30
UNKNOWN = Circumstances()
SHORT = {"min": 20, "p10": 60, "p50": 160, "p90": 420, "max": 900}         # tokens of examples, as instruction data has them


def script(path: Path, framework: Framework = "trl", *, unread: tuple[str, ...] = (), unknown: dict[str, Any] | None = None,
           comments: dict[str, str] | None = None, spelled: dict[str, str] | None = None, **settings: Any) -> Subject:
    """A script that sets `training__bf16=True` and so on, each in a line of its own of one call."""
    names = {key.replace("__", ".", 1): value for key, value in settings.items()}
    lines, placed = ["args = Arguments("], {}
    for key, value in names.items():
        name = (spelled or {}).get(key, key.partition(".")[2])
        comment = f"    # {comments[key]}" if comments and key in comments else ""
        shown = repr(value).replace("'", '"')
        lines.append(f"    {name}={shown},{comment}")
        placed[key] = Setting(value, Place(str(path), len(lines)), f"{name}={shown}")
    text = "\n".join([*lines, ")", ""])
    path.write_text(text, encoding="utf-8")
    open_ = {key: Setting(None, Place(str(path), 1), f"{key}=…") for key in unread}
    strange = {key: Setting(value, Place(str(path), 1), f"{key}={value!r}") for key, value in (unknown or {}).items()}
    return Subject(path, framework, placed, open_, strange, Script(path, text, ast.parse(text), {}))


def config(path: Path, framework: Framework, *, unknown: dict[str, Any] | None = None, **settings: Any) -> Subject:
    """A YAML file of the same."""
    subject = script(path, framework, unknown=unknown, **settings)
    placed, lines = {}, []
    for key, setting in subject.settings.items():
        word = {True: "true", False: "false", None: "null"}.get(setting.value, setting.value) \
            if isinstance(setting.value, bool | None) else setting.value
        lines.append(f"{key.partition('.')[2]}: {word}")
        placed[key] = Setting(setting.value, Place(str(path), len(lines)), lines[-1])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return replace(subject, settings=placed, script=None)


# ------------------------------------------------------------------------------------------------ circumstances


def gpu(name: str = "NVIDIA H100", capability: tuple[int, int] = (9, 0), gib: float = 80, devices: int = 1) -> Hardware:
    peaks = {"fp32": 5e13, "fp16": 7e14} | ({"bf16": 7e14} if capability >= (8, 0) else {})
    return Hardware(name, "cuda", 8, int(gib * GIB), int(gib * GIB), compute_capability=capability, devices=devices,
                    peak_flops_per_s=peaks, bandwidth_bytes_per_s=3e12)


def cpu(cores: int = 2, *, has_bf16: bool = True) -> Hardware:
    units = ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if has_bf16 else ("avx2",)
    return Hardware("AMD EPYC", "cpu", cores, 24 * GIB, 20 * GIB, instructions=units, peak_flops_per_s={
        "fp32": 3.5e11, "bf16": 2.8e12} if has_bf16 else {"fp32": 3.5e11}, bandwidth_bytes_per_s=3e10)


def software(transformers: str = "5.23.0", *, missing: dict[str, str] | None = None) -> Software:
    return Software({"torch": "2.13.0", "transformers": transformers, "trl": "1.16.0"}, missing or {})


def examples(count: int = 5000, **changes: Any) -> DataFacts:
    held_out = count // 20
    facts = DataFacts("data.jsonl", "0" * 64, count, count * 800, count * 800, "bpe", 32000, count * 210, held_out * 210,
                      held_out * 800, block=210, stride=210, examples=count, train_batch_size=64, length_quantiles=SHORT,
                      kind="conversation", max_length=900)
    return replace(facts, **changes)


def blocks(count: int = 5000) -> DataFacts:
    return examples(count, kind="blocks", length_quantiles={}, max_length=0, block=256, stride=256)


@cache
def model(*, method: str = "lora", frozen_dtype: str = "bf16", layers: int = 6, width: int = 512) -> ModelFacts:
    config_ = make_config("llama", vocabulary=32000, layers=layers, width=width, heads=8, context=2048)[0]
    if method == "full":
        return model_facts(config_, method="full", path="here")
    return model_facts(config_, method=method, path="here", adapters=AdapterConfig(), frozen_dtype=frozen_dtype,
                       unquantised_dtype="bf16" if frozen_dtype == "nf4" else "")


def here(hardware: Hardware, data: DataFacts | None = None, model_: ModelFacts | None = None,
         software_: Software | None = None) -> Circumstances:
    """A run of that data and model on that machine, or the machine alone."""
    installed = software_ or software()
    if data is None and model_ is None:
        return Circumstances(hardware, installed)
    return Circumstances(hardware, installed, Facts(hardware, installed, model_ or model(), data or examples()))
