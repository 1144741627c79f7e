"""Hugging Face folders: base and adapter merged into one plain model, or the adapter alone as PEFT has it.

The adapter is merged into the base as it was published, never into a 4-bit copy, because the precision that rounding to 4 bits
takes away would be lost for good. Nothing is written unless the merged model, rounded as it will be stored, predicts the same
as base + adapter on the given examples. The written files are opened again and compared with the weights in memory.

In fp32 a merge only sums in another order, so scores must agree to rounding. A merge stored in half precision is checked
in fp32 first and then rounded. Rounding changes every weight, so the check is how far the model's predictions moved: the
Kullback-Leibler divergence in nats a token, the unit of the loss.

Models behind the bridge are merged by peft, written as transformers' own files, and checked in the same way.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from powertrain.data.example import Example, collate
from powertrain.data.publishing import check_output, new_folder
from powertrain.models.adapters.attached import has_adapters, merged, plain_state
from powertrain.models.bridge.loading import load_bridged
from powertrain.models.bridge.model import BridgedModel, merge_bridged
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.folder import Shards, load_folder, save_folder
from powertrain.models.huggingface.hub import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from powertrain.models.model import Model, SavedTokenizer
from powertrain.records import RunFailed, WrongUse
from powertrain.records.json_files import read_json, write_json

Opened = TypeVar("Opened", bound=torch.nn.Module)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Largest difference of a score as a share of the largest score of its row: fp32 rounds to 6e-8, sums of some thousand
# terms in another order and a few dozen layers lose three digits of that.
FP32_DIFFERENCE = 1e-4
# Nats a token. bf16 rounds a weight by up to 1/256 of it and moves a trained model's loss in the third digit; 0.02 is less
# than two seeds of one fine-tuning differ. The divergence grows with the square of the error, and fp16 rounds 8 times finer.
HALF_DIVERGENCE = {"bfloat16": 0.02, "float16": 0.02 / 64}
UNSEEN = 1e-6                                # nats: a change that nobody sees, whatever it is compared with
LOST_SHARE = 0.25                            # of the adapter's own effect on the predictions
CHECKED_EXAMPLES, CHECKED_TOKENS = 8, 256    # of each at most


@dataclass(frozen=True)
class Agreement:
    """How far the scores of two models are apart."""

    rows: int
    difference: float                        # the largest of a row, as a share of the row's largest score
    divergence: float                        # nats, mean over rows
    same_first: float                        # share of rows whose best choice is the same

    def __str__(self) -> str:
        return (f"scores differ by at most {self.difference:.1e}, predictions by {self.divergence:.1e} nats a token, and "
                f"{self.same_first:.1%} of the first choices are the same, over {self.rows:,} tokens")


@dataclass(frozen=True)
class MergeReport:
    folder: Path
    dtype: str
    agreement: Agreement | None              # None: there was nothing to merge, and the weights are the model's own
    effect: float                            # nats a token: how far the adapter moves the base's predictions


def export_merged(model: Model, folder: Path, tokenizer: SavedTokenizer, examples: Sequence[Example], *, dtype: str,
                  base_dtype: str) -> MergeReport:
    """Write `folder` as a plain model in `dtype`; `model` is base + adapter in fp32, unquantised, or a plain model.

    A model behind the bridge is merged in place. `base_dtype` is the type in the base's files. Raises WrongUse for adapters
    that are no matrices and an output that is taken, RunFailed where the result would predict something else than base +
    adapter, and if the disk refuses.
    """
    check_output(folder)
    plain, agreement, effect = merge_checked(model, examples, dtype=dtype, base_dtype=base_dtype)
    with new_folder(folder) as building:
        if isinstance(plain, BridgedModel):
            plain.network.to(DTYPES[dtype])
            plain.save(building, tokenizer)
            refuse_other_folder(lambda: load_bridged(building, task=plain.task, method="full").network, plain.network)
        else:
            save_folder(as_stored(plain, DTYPES[dtype], keep=True), building, tokenizer)
            if refuse_other_folder(lambda: load_folder(building), plain).config != plain.config:
                raise _not_the_same("its config")
    return MergeReport(folder, dtype, agreement, effect)


def merge_checked(model: Any, examples: Sequence[Example], *, dtype: str,
                  base_dtype: str) -> tuple[Any, Agreement | None, float]:
    """Return the merged model, rounded to `dtype`; its agreement with base + adapter; and the adapter's effect.

    A Decoder gives a new Decoder in fp32, a BridgedModel is used up and gives another one.

    Raises as `export_merged` does, before anything is written.
    """
    bridged = isinstance(model, BridgedModel)
    if not (model.has_adapters if bridged else has_adapters(model)):
        return model if bridged else as_stored(model, DTYPES[dtype]), None, 0.0
    checked = shortened(examples)
    plain: Any = model if bridged else as_stored(merged(model), torch.float32)
    with_adapter = list(all_scores(model, checked))
    with model.library.disable_adapter() if bridged else nullcontext():
        base = all_scores(model if bridged else as_stored(model, torch.float32), checked)
        effect = compare_scores(with_adapter, base).divergence
    if bridged:                              # only now: merging uses the model up
        plain = merge_bridged(model)
    agreement = compare_scores(with_adapter, all_scores(plain, checked))
    refuse_difference(agreement)
    if dtype != "float32":
        plain = _rounded_in_place(plain, DTYPES[dtype]) if bridged else as_stored(plain, DTYPES[dtype])
        agreement = compare_scores(with_adapter, all_scores(plain, checked))
        refuse_loss(agreement, effect, dtype, base_dtype)
    return plain, agreement, effect


def as_stored(model: Decoder, dtype: torch.dtype, *, keep: bool = False) -> Decoder:
    """Return a decoder with `model`'s weights, not its adapters, rounded to `dtype`; held in fp32, or with `keep` in it."""
    with torch.device("meta"):
        rounded = Decoder(model.config)
    state = {name: tensor.detach().to(dtype) if keep else tensor.detach().to(dtype).float()
             for name, tensor in plain_state(model).items()}
    rounded.load_state_dict(state, assign=True)
    return rounded.eval()


def _rounded_in_place(model: BridgedModel, dtype: torch.dtype) -> BridgedModel:
    with torch.no_grad():                    # each weight keeps its dtype, and is rounded to the values that `dtype` has
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
    return model


def refuse_difference(found: Agreement) -> None:
    """Raise RunFailed if the merged model, in fp32, does not predict the same as base + adapter."""
    if not found.difference <= FP32_DIFFERENCE:              # so that NaN is refused, too
        raise RunFailed(f"the merged model would not predict the same as base + adapter ({found}), so nothing was "
                        "written; keep the adapter (--to adapter), and report this as a bug")


def refuse_loss(found: Agreement, effect: float, dtype: str, base_dtype: str) -> None:
    """Raise RunFailed if rounding to `dtype` moves predictions by too much, or undoes what the adapter learned."""
    if not found.divergence <= HALF_DIVERGENCE[dtype]:
        raise RunFailed(f"the merged model in {dtype} would not predict the same as base + adapter ({found}), so nothing "
                        "was written; use --dtype float32, or keep the adapter (--to adapter)")
    lost = found.divergence > UNSEEN and found.divergence > LOST_SHARE * effect
    if dtype == base_dtype and lost:         # the base itself is rounded by nothing, so all of it is the adapter's
        raise RunFailed(f"{dtype} is too coarse for this adapter: the adapter moves the base's predictions by {effect:.1e} "
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


# ------------------------------------------------------------------------------------------------ whether two models agree


def compare_scores(reference: Iterable[Tensor], candidate: Iterable[Tensor]) -> Agreement:
    """Compare scores (R, classes) fp32 of the same examples, one tensor each."""
    differences, divergences, same, rows = [0.0], 0.0, 0, 0
    for expected, found in zip(reference, candidate, strict=True):
        # one reward may be near 0, and is a share of the example's largest
        largest = expected.abs().amax(dim=-1) if expected.shape[-1] > 1 else expected.abs().amax()
        largest = largest.clamp_min(torch.finfo(torch.float32).tiny)
        differences.append(float(((expected - found).abs().amax(dim=-1) / largest).max()))
        logs = F.log_softmax(expected.double(), -1)
        divergences += float((logs.exp() * (logs - F.log_softmax(found.double(), -1))).sum())
        same += int((expected.argmax(-1) == found.argmax(-1)).sum())
        rows += len(expected)
    assert rows, "nothing to compare"
    worst = float(torch.tensor(differences).max())       # where a score is NaN both stay NaN, which max() would drop
    divergence = divergences / rows
    return Agreement(rows, worst, 0.0 if divergence < 0 else divergence, same / rows)


def all_scores(model: Model, examples: Sequence[Example]) -> Iterator[Tensor]:
    """Yield the scores of each example, (R, classes) fp32 on the CPU."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    try:
        for example in examples:
            batch = collate([example]).to(device)
            with torch.no_grad():            # left before the yield, which would keep the caller in this mode
                scores = model.logits(model.hidden(batch)).float().cpu()
            yield scores
    finally:
        model.train(was_training)


def shortened(examples: Sequence[Example]) -> list[Example]:
    """Return the first few examples, and of decoders' examples the beginning: enough to see a difference."""
    return [example if example.source is not None or example.segments is not None or len(example.targets) != len(example.inputs)
            else Example(example.inputs[:CHECKED_TOKENS], example.targets[:CHECKED_TOKENS])
            for example in list(examples[:CHECKED_EXAMPLES])]


# ------------------------------------------------------------------------------------------------ the adapter alone


def export_adapter(source: Path, folder: Path, tokenizer: SavedTokenizer, *, base: str) -> int:
    """Write the adapter in `source` to `folder`, for the base `base`; return how many tensors it has.

    Raises WrongUse if there is none or the output is taken, RunFailed if the disk refuses.
    """
    if not (source / ADAPTER_CONFIG).is_file() or not (source / ADAPTER_WEIGHTS).is_file():
        raise WrongUse(f"{source} holds no adapter: the whole model was trained; use --to merged")
    with new_folder(folder) as building:
        tokenizer.save(building)
        write_json(building / ADAPTER_CONFIG, read_json(source / ADAPTER_CONFIG) | {"base_model_name_or_path": base})
        (building / ADAPTER_WEIGHTS).write_bytes((source / ADAPTER_WEIGHTS).read_bytes())
        before, after = Shards([source / ADAPTER_WEIGHTS]), Shards([building / ADAPTER_WEIGHTS])
        wrong = [name for name in before if name not in set(after) or not before.read(name).equal(after.read(name))]
        if wrong:
            raise RunFailed(f"the adapter was copied, opened again and is not the same ({wrong[0]}); it was removed. Try again")
        return len(list(before))
