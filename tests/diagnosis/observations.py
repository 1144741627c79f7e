"""Runs as they were seen, in plain numbers: one that nothing holds back, from which tests make others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from powertrain.diagnosis.observed import Observed, Remedy
from powertrain.records.findings import Cure

STEP_S = 0.1
# 0.07 s of products at the measured peak, 0.01 s of traffic: well tuned
GOOD = Observed(step_s=(STEP_S,) * 20,
                parts={"data": 0.0005, "copy": 0.0, "forward": 0.03, "backward": 0.06, "optimizer": 0.0095},
                steps=1000, dtype="bf16", flops=7e10, peak_flops_per_s={"bf16": 1e12, "fp32": 2.5e11},
                moved_bytes=2e8, bandwidth_bytes_per_s=2e10, real_tokens=2048.0, threads=2, cores=2)


def seen(**changes: Any) -> Observed:
    return replace(GOOD, **changes)


def tried(against: str, words: str, speed: float) -> Remedy:
    return Remedy(against, Cure(f"use {words}", words=(words,)), speed=speed, basis="measured: a few steps")


def reckoned(against: str, words: str, kept: float) -> Remedy:
    return Remedy(against, Cure(f"use {words}", words=(words,)), kept=kept, basis="formula: of a test")
