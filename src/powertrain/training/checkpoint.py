"""Checkpoints that are whole or absent.

A checkpoint is written into a temporary folder, each file synced, its manifest with sha256 last; one rename publishes
it. So a kill at any instant leaves the one before. Only safetensors and JSON: nothing in it can run code.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from powertrain.data.publishing import sync
from powertrain.models.huggingface.folder import save_tensors
from powertrain.records import WrongUse
from powertrain.records.errors import WeightsNotFinite
from powertrain.training.loop import State

FORMAT = 1
FOLDER = re.compile(r"step-(\d{6,})")
MANIFEST = "MANIFEST.json"
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
ONCE_WRITTEN = {"random.safetensors"}        # by earlier versions, before each pass had a seed of its own; it is not read


def save_checkpoint(folder: Path, state: State) -> Path:
    """Publish the state as `folder`/step-NNNNNN; return that path. Raises OSError (of the disk) and WeightsNotFinite."""
    broken = [name for name, parameter in _trained(state).items() if not bool(torch.isfinite(parameter).all())]
    if broken:
        raise WeightsNotFinite(state.step, len(broken), broken[0])
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{state.step:06d}"
    if final.exists():
        return final                         # the same step of the same run: the same bytes
    temporary = folder / f".tmp-{state.step:06d}-{os.getpid()}"
    temporary.mkdir()
    try:
        for name, tensors in _tensors(state).items():
            save_tensors(tensors, temporary / name)
        plain = {"step": state.step, "trained_tokens": state.trained_tokens, "clipped_steps": int(state.clipped_steps),
                 "evaluations": state.evaluations, "scaler": state.scaler.state_dict()}
        (temporary / "state.json").write_text(json.dumps(plain, indent=1))
        for name in FILES:
            sync(temporary / name)
        manifest = {"format": FORMAT, "step": state.step, "files": {name: _entry(temporary / name) for name in FILES}}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        sync(temporary / MANIFEST)
        sync(temporary)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(folder)
    return final


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[tuple[str, str]]]:
    """Return the newest checkpoint that verifies, and (name, reason) of each newer one that does not."""
    rejected: list[tuple[str, str]] = []
    for _, path in sorted(_published(folder).items(), reverse=True):
        reason = what_is_wrong(path)
        if reason is None:
            return path, rejected
        rejected.append((path.name, reason))
    return None, rejected


def what_is_wrong(path: Path) -> str | None:
    """Return the first thing that is wrong with a checkpoint; None for a whole one."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        written_format, files = manifest["format"], manifest["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing, so it was never finished"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    if written_format != FORMAT:
        return f"it has format {written_format}, and this version reads format {FORMAT}; upgrade powertrain"
    if set(files) - ONCE_WRITTEN != set(FILES):
        return f"{MANIFEST} lists {sorted(files)} where {sorted(FILES)} belong"
    for name in files:
        if not (path / name).is_file():
            return f"{name} is missing"
        if (found := _entry(path / name)) != files[name]:
            return f"{name} is damaged: {found['bytes']:,} bytes with sha256 {found['sha256'][:12]}, where " \
                   f"{files[name].get('bytes')} bytes with {str(files[name].get('sha256'))[:12]} were written"
    return None


def load_checkpoint(checkpoint: Path, state: State) -> None:
    """Put a verified checkpoint into `state`: weights, optimizer, loss scale and counters.

    Random generators are in none: what a pass draws depends on seed, step and pass.
    """
    weights, moments = (load_file(checkpoint / name) for name in FILES[:2])
    trained = _trained(state)
    if set(trained) != set(weights) or any(trained[name].shape != weights[name].shape for name in weights):
        raise WrongUse("the checkpoint holds another model than the recipe describes; resume with the run's own recipe")
    with torch.no_grad():
        for name, value in weights.items():
            trained[name].copy_(value)
    state.optimizer.restore({
        parameter: {key.removeprefix(f"{name}."): value for key, value in moments.items() if key.rpartition(".")[0] == name}
        for name, parameter in trained.items()})
    plain = json.loads((checkpoint / "state.json").read_text())
    state.step, state.trained_tokens = plain["step"], plain["trained_tokens"]
    state.evaluations = {int(step): loss for step, loss in plain["evaluations"].items()}
    state.clipped_steps.fill_(plain["clipped_steps"])
    if plain["scaler"]:
        state.scaler.load_state_dict(plain["scaler"])


def keep_only(folder: Path, *, newest: int, evaluations: Mapping[int, float]) -> None:
    """Delete all but the newest checkpoints and the one with the lowest held-out loss."""
    published = _published(folder)
    evaluated = [step for step in published if step in evaluations]
    kept = {*sorted(published)[-newest:], *sorted(evaluated, key=lambda step: evaluations[step])[:1]}
    for path in (path for step, path in sorted(published.items()) if step not in kept):
        (path / MANIFEST).unlink(missing_ok=True)    # first: half a deletion must not look like a checkpoint
        shutil.rmtree(path)


def clear_leftovers(folder: Path) -> None:
    """Remove the temporary folders of saves that were killed."""
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)


def _published(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    return {int(found.group(1)): path for path in folder.iterdir()
            if path.is_dir() and (found := FOLDER.fullmatch(path.name))}


def _tensors(state: State) -> dict[str, dict[str, Tensor]]:
    trained, by_weight = _trained(state), state.optimizer.moments()
    moments = {f"{name}.{key}": value.contiguous()
               for name, parameter in trained.items() for key, value in by_weight.get(parameter, {}).items()}
    weights = {name: parameter.detach().contiguous() for name, parameter in trained.items()}
    return dict(zip(FILES, (weights, moments), strict=False))


def _trained(state: State) -> dict[str, nn.Parameter]:
    """Return the weights that the run changes. Frozen weights are in the model's own folder, and are never written again."""
    return {name: parameter for name, parameter in state.model.named_parameters() if parameter.requires_grad}


def _entry(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}

