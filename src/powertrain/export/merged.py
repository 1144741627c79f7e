"""Base and adapter as one plain model, which anything that opens Hugging Face folders opens.

The adapter is merged into the base as it was published, never into a 4-bit copy of it: what rounding to 4 bits took away
would be gone for good. Nothing is written unless the merged model, as it will be stored, says what base + adapter say on the
given examples; what was written is opened again and must be it.

Models behind the bridge are merged by peft, written as transformers' own files, and checked in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from powertrain.data.example import Example
from powertrain.data.publishing import check_output, new_folder
from powertrain.export.check import LOST_SHARE, UNSEEN, Agreement, all_scores, compare, compare_scores, is_rounding, shortened
from powertrain.models.adapters.attached import has_adapters, merged, plain_state
from powertrain.models.bridge.loading import load_bridged
from powertrain.models.bridge.model import BridgedModel, merge_bridged
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.folder import load_folder, save_folder
from powertrain.models.model import SavedTokenizer
from powertrain.records import RunFailed, WrongUse

Opened = TypeVar("Opened", bound=torch.nn.Module)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MergeReport:
    folder: Path
    dtype: str
    agreement: Agreement | None              # None: there was nothing to merge, and the weights are the model's own
    effect: float                            # nats a token: what the adapter changes of the base's predictions


def export_merged(model: Decoder, folder: Path, tokenizer: SavedTokenizer, examples: Sequence[Example], *, dtype: str,
                  base_dtype: str) -> MergeReport:
    """Writes `folder` as a plain model in `dtype`; `model` is base + adapter in fp32, unquantised, or a plain model.

    `base_dtype` is what the base's files hold. Raises WrongUse for adapters that are no matrices and an output that is
    taken, RunFailed where the result would say something else than base + adapter, and if the disk refuses.
    """
    check_output(folder)
    plain, agreement, effect = merge_checked(model, examples, dtype=dtype, base_dtype=base_dtype)
    with new_folder(folder) as building:
        save_folder(as_stored(plain, DTYPES[dtype], keep=True), building, tokenizer)
        opened = refuse_other_folder(partial(load_folder, building), plain)
        if opened.config != plain.config:
            raise _not_the_same("its config")
    return MergeReport(folder, dtype, agreement, effect)


def merge_checked(model: Decoder, examples: Sequence[Example], *, dtype: str,
                  base_dtype: str) -> tuple[Decoder, Agreement | None, float]:
    """Return the merged model, in fp32 with what `dtype` keeps; its distance from base + adapter; what the adapter changes.

    Raises as `export_merged` does, before anything is written.
    """
    if not has_adapters(model):
        return as_stored(model, DTYPES[dtype]), None, 0.0
    checked = shortened(examples)
    plain = as_stored(merged(model), torch.float32)
    agreement = compare(model, plain, checked)
    refuse_difference(agreement)
    effect = compare(model, as_stored(model, torch.float32), checked).divergence
    if dtype != "float32":
        plain = as_stored(plain, DTYPES[dtype])
        agreement = compare(model, plain, checked)
        refuse_loss(agreement, effect, dtype, base_dtype)
    return plain, agreement, effect


def as_stored(model: Decoder, dtype: torch.dtype, *, keep: bool = False) -> Decoder:
    """A decoder with what `dtype` keeps of `model`'s weights, not its adapters: in fp32 to compute with, or (`keep`) in it."""
    with torch.device("meta"):
        rounded = Decoder(model.config)
    state = {name: tensor.detach().to(dtype) if keep else tensor.detach().to(dtype).float()
             for name, tensor in plain_state(model).items()}
    rounded.load_state_dict(state, assign=True)
    return rounded.eval()


def refuse_difference(found: Agreement) -> None:
    """Raises RunFailed if the merged model, in fp32, does not say what base + adapter say."""
    if not is_rounding(found, torch.float32):
        raise RunFailed(f"the merged model would not say what base + adapter say ({found}), so nothing was written; keep the "
                        "adapter (--to adapter), and report it")


def refuse_loss(found: Agreement, effect: float, dtype: str, base_dtype: str) -> None:
    """Raises RunFailed if a right merge in `dtype` moves predictions by too much, or takes back what the adapter learned."""
    if not is_rounding(found, DTYPES[dtype]):
        raise RunFailed(f"the merged model in {dtype} would not say what base + adapter say ({found}), so nothing was written; "
                        "use --dtype float32, or keep the adapter (--to adapter)")
    lost = found.divergence > UNSEEN and found.divergence > LOST_SHARE * effect
    if dtype == base_dtype and lost:         # the base itself is rounded by nothing, so all of it is the adapter's
        raise RunFailed(f"{dtype} is too coarse for what this adapter learned: it moves the base's predictions by {effect:.1e} "
                        f"nats a token, and merging loses {found.divergence:.1e} of that to rounding, so nothing was written; "
                        "use --dtype float32, or keep the adapter (--to adapter)")


def refuse_other_folder(load: Callable[[], Opened], expected: torch.nn.Module) -> Opened:
    """Return the model that was written. Raises RunFailed unless it opens, on the CPU, with the weights of `expected`."""
    try:
        opened = load()
    except WrongUse as error:
        raise RunFailed(f"the merged model was written and cannot be opened again: {error}; it was removed") from error
    found = opened.state_dict()
    wrong = [name for name, tensor in expected.state_dict().items()
             if name not in found or not torch.equal(found[name].float(), tensor.float().cpu())]
    if wrong:
        raise _not_the_same(f"{len(wrong)} weights such as {wrong[0]}")
    return opened


def _not_the_same(what: str) -> RunFailed:
    return RunFailed(f"the merged model was written, opened again and is not the same ({what}); it was removed. Try again, "
                     "and report it if it stays so")


# ------------------------------------------------------------------------------------------------ models behind the bridge


def export_merged_bridge(model: BridgedModel, folder: Path, tokenizer: SavedTokenizer, examples: Sequence[Example], *,
                         dtype: str, base_dtype: str) -> MergeReport:
    """Writes `folder`; see merged.export_merged. The model is used up: it is merged in place."""
    check_output(folder)
    agreement, effect = None, 0.0
    if model.has_adapters:
        checked = shortened(examples)
        with_adapter = list(all_scores(model, checked))
        with model.library.disable_adapter():  # type: ignore[operator]
            effect = compare_scores(with_adapter, all_scores(model, checked)).divergence
        model = merge_bridged(model)
        agreement = compare_scores(with_adapter, all_scores(model, checked))
        refuse_difference(agreement)
        if dtype != "float32":
            _round(model, DTYPES[dtype])
            agreement = compare_scores(with_adapter, all_scores(model, checked))
            refuse_loss(agreement, effect, dtype, base_dtype)
    with new_folder(folder) as building:
        model.network.to(DTYPES[dtype])
        model.save(building, tokenizer)
        refuse_other_folder(lambda: load_bridged(building, task=model.task, method="full").network, model.network)
    return MergeReport(folder, dtype, agreement, effect)


def _round(model: BridgedModel, dtype: torch.dtype) -> None:
    """Round all weights of `model` to `dtype`, in the dtype that they have."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
