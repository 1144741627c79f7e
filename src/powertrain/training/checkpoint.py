"""Checkpoints that are whole or absent.

A checkpoint is written into a temporary folder, each file synced, its manifest with sha256 last; one rename publishes
it. So a kill at any instant leaves the one before. Only safetensors and JSON: nothing in it can run code.

Where processes divide the weights, each writes its part into files of its own, syncs and hashes them, and the first process
writes the manifest with all of them (format 2). A file says which rows or columns it holds, so any number of processes reads
what any number has written, however they divide the weights. Where a process holds some rows of each projection of a fused
matrix, the rows of q, k and v are tensors of their own. torch.distributed.checkpoint's writer for safetensors does not sync,
gives the same state other bytes each time, and loads without an error where a shard is missing.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from powertrain.data.publishing import sync
from powertrain.models.kernels.slabs import SLAB_BYTES, Slabs, pinned
from powertrain.records import WrongUse
from powertrain.records.checkpoints import ABOUT, FILES, FORMAT, MANIFEST, PLACES, SHARDED_FORMAT, files_of, shard_name
from powertrain.records.errors import WeightsNotFinite
from powertrain.records.json_files import read_json
from powertrain.training.guard import Guard
from powertrain.training.in_thread import InThread
from powertrain.training.loop import State
from powertrain.training.pipeline import held_elsewhere
from powertrain.training.ranks import ALONE, Ranks
from powertrain.training.sharded import Cut, cut_of, divided_as, is_divided, own_part, whole_shape
from powertrain.training.stored import Held, Stored, as_safetensors, write_file

T = TypeVar("T")
Parts = Mapping[str, tuple[Tensor, Cut | None]]      # name -> what this process has of a tensor
Files = dict[str, Iterable[bytes | memoryview]]          # name -> content


def save_checkpoint(folder: Path, state: State, ranks: Ranks = ALONE) -> Path:
    """Publish the state as `folder`/step-NNNNNN; return that path. Every process of the run calls this.

    Raises OSError (of the disk) and WeightsNotFinite, in all processes.
    """
    return Save(folder, state, ranks, beside=False).finish()


class Save:
    """A checkpoint on its way to the disk. Every process of the run makes it, and calls its methods, after the same step.

    With `beside` the state is copied into host memory first, and a thread of each process writes the copy beside the training:
    at a lower priority, and hashing, writing and syncing hold no lock that training needs. The thread exchanges nothing
    with other processes. It publishes the checkpoint of a run of one process; several processes exchange their entries and
    publish in `finish`.
    Raises WeightsNotFinite and OSError in all processes.
    """

    def __init__(self, folder: Path, state: State, ranks: Ranks = ALONE, *, beside: bool = True,
                 about: Mapping[str, Any] | None = None) -> None:
        refuse_broken(state, ranks)
        self.step, self._ranks = state.step, ranks
        self.path = folder / f"step-{state.step:06d}"
        self._temporary = Path(ranks.agree(str(folder / f".tmp-{state.step:06d}-{os.getpid()}")))
        self._published = ranks.agree(self.path.exists())        # the same step of the same run: the same bytes
        self._failed: BaseException | None = None
        self._entries: dict[str, Any] = {}
        self._write: Callable[[], None] | None = None
        self.writing: InThread | None = None
        self.pinned_bytes = 0                # of the copy: torch keeps them for the next one
        self._copying: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if self._published:
            return
        try:
            if_writer(ranks, partial(self._temporary.mkdir, parents=True))
            self._stage(state, beside, about)
        except BaseException:
            self._clear()
            raise

    def _stage(self, state: State, beside: bool, about: Mapping[str, Any] | None) -> None:
        """Take what this process writes, and with `beside` copy it and let a thread write it."""
        on_gpu = beside and any(parameter.is_cuda for parameter in state.model.parameters())
        if on_gpu:
            timed = partial(torch.cuda.Event, enable_timing=True)
            self._copying = timed(), timed()
            self._copying[0].record()
        slabs = slabs_for(state)
        files = _staged(state, self._ranks, partial(_copy, slabs) if beside else _as_it_is)
        self.pinned_bytes = slabs.slabs * slabs.slab_bytes
        if about is not None and FILES[2] in files:
            files[ABOUT] = [json.dumps(about, indent=1).encode()]
        if self._copying:
            self._copying[1].record()
        self._failed = OSError(errno.ENOMEM, "there was no memory to write it")      # until it is written
        write = partial(self._write_files, files)
        if beside:
            self.writing = InThread(write)   # which alone holds the copy, until the copy is written
        else:
            self._write = write

    def _write_files(self, files: Files) -> None:
        try:
            if self._copying:
                self._copying[1].synchronize()
            self._entries = {name: write_file(self._temporary / name, parts) for name, parts in files.items()}
            if self._ranks.world == 1:
                self._publish(self._entries)
            self._failed = None
        except BaseException as error:       # told by `finish`, in the thread of the training
            self._failed = error

    def _publish(self, files: Mapping[str, Any]) -> None:
        _rename(self._temporary, self.path, self.step, files)
        self._published = True

    def is_written(self) -> bool:
        """Return whether no process has a thread that still writes, so that `finish` waits for none. All ask together."""
        return not self._ranks.total(int(self.writing is not None and self.writing.is_running))[0]

    @property
    def copying_s(self) -> float:
        """Return the seconds that a GPU was busy with the copy, once the checkpoint is written."""
        return self._copying[0].elapsed_time(self._copying[1]) / 1e3 if self._copying else 0.0

    def finish(self) -> Path:
        """Return the path once the checkpoint is published. Raises the first OSError of any process in all of them."""
        try:
            on_all(self._ranks, self.wait)
            if not self._ranks.agree(self._published):
                files = {name: entry for of_process in self._ranks.each(self._entries) for name, entry in of_process.items()}
                if_writer(self._ranks, partial(self._publish, files))
        except BaseException:
            self._clear()
            raise
        return self.path

    def _clear(self) -> None:
        if self._ranks.is_writer:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def wait(self) -> None:
        """Return once the files of this process are written. Raises what has failed."""
        if self._write is not None:
            self._write()
            self._write = None
        if self.writing is not None:
            self.writing.finish()
        if self._failed is not None:
            raise self._failed


def refuse_broken(state: State, ranks: Ranks) -> None:
    """Raise WeightsNotFinite in all processes where a trained weight of one of them is not finite."""
    parts = {name: own_part(parameter) for name, parameter in _trained(state).items()}
    extremes = {name: torch.stack(torch.aminmax(part.detach())).isfinite().all()
                for name, part in parts.items() if part.numel()}
    finite = torch.stack([*extremes.values()]).tolist() if extremes else []      # one wait for the device
    broken = [name for name, is_finite in zip(extremes, finite, strict=True) if not is_finite]
    if (found := ranks.first(broken or None)) is not None:
        raise WeightsNotFinite(state.step, len(found), found[0])


def slabs_for(state: State) -> Slabs:
    """Return slabs for a copy of a GPU's tensors, each at most as large as all weights: for small models they are small."""
    held_bytes = sum(own_part(parameter).nbytes for parameter in _trained(state).values())
    return Slabs(pinned, min(SLAB_BYTES, 1 << max(20, held_bytes.bit_length() - 1)))


def _as_it_is(tensor: Tensor) -> Held:
    return Held(tensor.dtype, tensor.shape, [tensor.contiguous()])


def _copy(slabs: Slabs, tensor: Tensor) -> Held:
    """Return a copy in host memory. That of a CUDA tensor is complete when its stream has come so far.

    The copy is made in the stream of the training, so that the next update comes after it without any wait of the host.
    """
    if tensor.is_cuda:
        return Held(tensor.dtype, tensor.shape, slabs.copy(tensor))
    return _as_it_is(tensor.to("cpu", copy=True, memory_format=torch.contiguous_format))


def on_all(ranks: Ranks, do: Callable[[], T]) -> T:
    """Return what `do` returns here, once all processes have done it. Raises the first OSError of any of them in all."""
    refused: OSError | None = None
    try:
        result = do()
    except OSError as error:
        refused = error
    if (found := ranks.first(refused)) is not None:
        raise found
    return result


def if_writer(ranks: Ranks, do: Callable[[], object]) -> None:
    """Let the first process do something, and the others wait for it; see `on_all`."""
    on_all(ranks, do if ranks.is_writer else lambda: None)


def _staged(state: State, ranks: Ranks, take: Callable[[Tensor], Held]) -> Files:
    """Return the content of the files that this process writes, by name. `take` holds a tensor as it is, or copies it."""
    weights, moments = _tensors(state)       # in all processes, because some engines gather moments
    if ranks.shard is None:
        return {}
    shard, shards = ranks.shard
    model, optimizer, counters = FILES
    assert shards > 1 or not any(map(is_divided, state.model.parameters())), "the ranks are not those of the divided setup"
    files: Files = {}
    for name, tensors in ((model, weights), (optimizer, moments)):
        held: dict[str, Held] = {}
        places: dict[str, tuple[str, int, int]] = {}
        for tensor, (value, cut) in tensors.items():
            if cut is None:
                held |= {tensor: take(own_part(value))} if shard == 0 or ranks.in_stages else {}
                continue
            pieces = torch.split(own_part(value), cut.lengths, cut.dimension)
            for number, ((first, _), piece) in enumerate(zip(cut.ranges, pieces, strict=True)):
                key = tensor if len(pieces) == 1 else f"{tensor}.{number}"
                if piece.numel():
                    held[key], places[key] = take(piece), (tensor, cut.dimension, first)
        metadata = {PLACES: json.dumps(places)} if shards > 1 else None
        files[shard_name(name, shard, shards)] = as_safetensors(held, metadata)
    if shard == 0:
        plain = {"step": state.step, "trained_tokens": state.trained_tokens, "clipped_steps": int(state.clipped_steps),
                 "evaluations": state.evaluations, "scaler": state.scaler.state_dict(),
                 **({"guard": state.guard.stored()} if state.guard else {})}
        files[counters] = [json.dumps(plain, indent=1).encode()]
    return files


def _rename(temporary: Path, final: Path, step: int, files: Mapping[str, Any]) -> None:
    """Write the manifest of all processes' files, and rename the folder."""
    shards = sum(name.startswith(FILES[0].partition(".")[0]) for name in files)
    written = {"format": FORMAT} if shards == 1 else {"format": SHARDED_FORMAT, "shards": shards}
    listed = [*files_of(shards), *([ABOUT] if ABOUT in files else [])]
    manifest = {**written, "step": step, "files": {name: files[name] for name in listed}}
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
    sync(temporary / MANIFEST)
    sync(temporary)
    os.rename(temporary, final)
    sync(final.parent)


def load_checkpoint(checkpoint: Path, state: State) -> None:
    """Put a verified checkpoint into `state`: weights, optimizer, loss scale and counters.

    Random generators are in none: what a pass draws depends on seed, step and pass.
    """
    shards = read_json(checkpoint / MANIFEST).get("shards", 1)
    weights, moments = (Stored([checkpoint / shard_name(name, shard, shards) for shard in range(shards)]) for name in FILES[:2])
    trained = _trained(state)
    if set(trained) | held_elsewhere(state.model) != set(weights.pieces) or any(
            whole_shape(trained[name]) != weights.shape(name) for name in trained):
        raise WrongUse("the checkpoint holds another model than the recipe describes; resume with the run's own recipe")
    keys: dict[str, list[str]] = {}
    for name in moments.pieces:
        weight, _, key = name.rpartition(".")
        keys.setdefault(weight, []).append(key)
    with torch.no_grad():
        for name, parameter in trained.items():
            own_part(parameter).copy_(weights.read(name, cut_of(parameter)))
    state.optimizer.restore({parameter: {key: _read_moment(moments, f"{name}.{key}", parameter) for key in keys.get(name, ())}
                             for name, parameter in trained.items()})
    _restore_counters(read_json(checkpoint / FILES[2]), state)


def _restore_counters(plain: Mapping[str, Any], state: State) -> None:
    try:
        state.step, state.trained_tokens = int(plain["step"]), int(plain["trained_tokens"])
        state.evaluations = {int(step): float(loss) for step, loss in plain["evaluations"].items()}
        state.clipped_steps.fill_(int(plain["clipped_steps"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise WrongUse(f"{FILES[2]} of the checkpoint does not hold a run's counters ({type(error).__name__}: {error}); the "
                       "checkpoint was changed by hand: restore a copy of it") from None
    if plain.get("scaler"):
        state.scaler.load_state_dict(plain["scaler"])
    if "guard" in plain:                     # a run that has rewound needs one, whatever it is to do from now on
        state.guard = state.guard or Guard.on(state.clipped_steps.device, spikes=False)
        state.guard.restore(plain["guard"])


def _read_moment(moments: Stored, name: str, parameter: nn.Parameter) -> Tensor:
    """Return what this process holds of one tensor of the optimizer's state: of one with the weight's shape, the same rows."""
    if moments.shape(name) != whole_shape(parameter):
        return moments.read(name)
    return divided_as(parameter, moments.read(name, cut_of(parameter)))


def _tensors(state: State) -> tuple[Parts, Parts]:
    """Return the weights that the run changes, and the optimizer's state, by name: each with the part that is here."""
    trained, by_weight = _trained(state), state.optimizer.moments()
    moments = {f"{name}.{key}": (value, cut_of(parameter) if value.shape == parameter.shape else None)
               for name, parameter in trained.items() for key, value in by_weight.get(parameter, {}).items()}
    return {name: (parameter.detach(), cut_of(parameter)) for name, parameter in trained.items()}, moments


def _trained(state: State) -> dict[str, nn.Parameter]:
    """Return the weights that the run changes. Frozen weights are in the model's own folder, and are never written again."""
    return {name: parameter for name, parameter in state.model.named_parameters() if parameter.requires_grad}
