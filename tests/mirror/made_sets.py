"""Checkpoints of random bytes that verify, and how they come to wait for their upload."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from powertrain.mirror import waiting
from powertrain.records.checkpoints import ABOUT, FILES, MANIFEST, entry_of

SECRET = "a-secret-key-that-stands-in-no-file"


def made_checkpoint(run: Path, step: int, *, weights_bytes: int = 3000) -> Path:
    """A checkpoint that verifies, of random bytes."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    for name, size in ((FILES[0], weights_bytes), (FILES[1], weights_bytes // 2)):
        save_file({"weight": np.frombuffer(os.urandom(size), np.uint8)}, folder / name)
    (folder / FILES[2]).write_text(json.dumps({"step": step, "padding": "x" * 2000}))
    (folder / ABOUT).write_text(json.dumps({"step": step, "loss": 1 / step}))
    names = (*FILES, ABOUT)
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "files": {name: entry_of(folder / name) for name in names}}))
    return folder


def wait_with(run: Path, folder: Path, *, loss: float | None = None) -> None:
    """Let a checkpoint wait for its upload."""
    waiting.add(run, folder.name, {file.name: file for file in folder.iterdir()}, step=int(folder.name[5:]), held_out_loss=loss)
