"""As merged.py, for models behind the bridge: transformers' own files, merged by peft, checked in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from powertrain.data.example import Example
from powertrain.export.check import Agreement, all_scores, compare_scores, shortened
from powertrain.export.merged import DTYPES, MergeReport, refuse_difference, refuse_loss
from powertrain.export.output import check_output, new_folder
from powertrain.models.bridge.loading import load_bridged
from powertrain.models.bridge.model import BridgedModel, merge_bridged
from powertrain.models.model import SavedTokenizer
from powertrain.records import RunFailed, WrongUse


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
            agreement = _rounded(model, dtype, checked, with_adapter)
            refuse_loss(agreement, effect, dtype, base_dtype)
    with new_folder(folder) as building:
        model.network.to(DTYPES[dtype])
        model.save(building, tokenizer)
        _refuse_other_folder(building, model)
    return MergeReport(folder, dtype, agreement, effect)


def _rounded(model: BridgedModel, dtype: str, checked: Sequence[Example], expected: list[torch.Tensor]) -> Agreement:
    """The merged model against base + adapter, with the weights that `dtype` keeps."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(DTYPES[dtype]))
    return compare_scores(expected, all_scores(model, checked))


def _refuse_other_folder(folder: Path, model: BridgedModel) -> None:
    try:
        opened = load_bridged(folder, task=model.task, method="full").network.state_dict()
    except WrongUse as error:
        raise RunFailed(f"the merged model was written and cannot be opened again: {error}; it was removed") from error
    wrong = [name for name, tensor in model.network.state_dict().items()
             if name not in opened or not torch.equal(opened[name].float(), tensor.float().cpu())]
    if wrong:
        raise RunFailed(f"the merged model was written, opened again and is not the same ({len(wrong)} weights such as "
                        f"{wrong[0]}); it was removed. Try again, and report it if it stays so")
