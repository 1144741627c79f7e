"""ONNX: one graph of the decoder with a key/value cache, for ONNX Runtime and programs built on it.

Inputs and outputs have the names that Optimum and transformers.js look for. B examples of T new tokens, after P tokens that the
cache holds (0 at the beginning), may be any numbers; padding is 0 in the mask, at the left or at the right.

  input_ids (B, T) int64, attention_mask (B, P + T) int64, past_key_values.LAYER.key and .value (B, K, P, D) fp32
  -> logits (B, T, V) fp32, present.LAYER.key and .value (B, K, P + T, D) fp32

The graph is the decoder itself, traced by torch.export with another attention kernel. ONNX Runtime opens the written file, and
its logits are compared with the decoder's: each example whole, in two parts by way of the cache, and padded beside another.

Legend: T tokens, V vocabulary, H heads, K kv heads, D head width.
"""

import contextlib
import importlib.util
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from powertrain.data.example import Example
from powertrain.data.publishing import new_folder
from powertrain.export.merged import FP32_DIFFERENCE, Agreement, all_scores, compare_scores, shortened
from powertrain.models.config import ModelConfig
from powertrain.models.decoder import Decoder, rotary_tables
from powertrain.models.huggingface.folder import save_description
from powertrain.models.model import SavedTokenizer
from powertrain.records import Batch, RunFailed, WrongUse

FILE = "model.onnx"
NEEDED = ("onnx", "onnxscript", "onnxruntime")
PARTS = ("key", "value")
LARGEST_FILE_BYTES = 1 << 30                 # a graph's file ends at 2 GiB; larger weights get a file beside it


class Graph(nn.Module):
    """The decoder on rows of tokens, with a cache that is handed in and out."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        """Return logits (B, T, V), and the keys and values of all layers with those of these tokens behind."""
        rows, new = input_ids.shape
        everything = attention_mask.shape[1]                                           # P + T
        positions = (attention_mask.cumsum(1) - 1).clamp_min(0)[:, everything - new:]  # padding takes no position
        places = torch.arange(everything, device=input_ids.device)
        own = places[everything - new:, None]                                          # (T, 1)
        seen = places <= own
        if self.decoder.config.window:
            seen = seen & (places > own - self.decoder.config.window)
        seen = seen & (attention_mask[:, None, None] > 0)                              # (B, 1, T, P + T)
        present: list[Tensor] = []

        def attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, layer: int, dropout: float,
                      window: int | None, scale: float) -> Tensor:
            del lengths, dropout, window
            q, k, v = (x.reshape(rows, new, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q, k, v))
            k, v = torch.cat((past[2 * layer], k), 2), torch.cat((past[2 * layer + 1], v), 2)
            present.extend((k, v))
            shared = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
            scores = (q @ k.transpose(2, 3) * scale).masked_fill(~seen, torch.finfo(torch.float32).min)
            return (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(rows * new, q.shape[1], q.shape[3])

        tokens = input_ids.reshape(-1)
        batch = Batch(tokens, tokens, positions.reshape(-1), (), 0)
        x, rotary = self.decoder.embed(batch), rotary_tables(self.decoder.config, batch)
        for block in self.decoder.blocks:
            x = block(x, rotary, (), attention)
        logits = self.decoder.logits(self.decoder.norm(x)).reshape(rows, new, -1)
        return (logits, *present)


@dataclass(frozen=True)
class OnnxReport:
    file: Path
    file_bytes: int                          # with the weights beside it, if they are in a file of their own
    agreement: Agreement                     # of ONNX Runtime's logits with ours


def export_onnx(model: Decoder, folder: Path, tokenizer: SavedTokenizer, examples: Sequence[Example]) -> OnnxReport:
    """Write `folder`/model.onnx with config and tokenizer; `model` is plain and in fp32.

    Raises WrongUse where a package is missing or the graph cannot express the model, and RunFailed for an operator that ONNX
    has not, where ONNX Runtime computes something else, and if the disk refuses.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise WrongUse(f"ONNX files need {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
                       f"pip install {' '.join(missing)}")
    if model.config.positions_change_at is not None:
        raise WrongUse(f"this {model.config.family} model turns its positions otherwise beyond "
                       f"{model.config.positions_change_at:,} tokens (longrope), which one ONNX graph cannot do; use --to "
                       "merged or --to gguf")
    model = model.cpu().eval()
    with new_folder(folder) as building:
        write_graph(model, building / FILE)
        agreement = check_graph(building / FILE, model, shortened(examples))
        save_description(model, building, tokenizer)
        size_bytes = sum(file.stat().st_size for file in building.glob(f"{FILE}*"))
    return OnnxReport(folder / FILE, size_bytes, agreement)


def names(config: ModelConfig, prefix: str) -> list[str]:
    return [f"{prefix}.{layer}.{part}" for layer in range(config.layers) for part in PARTS]


def write_graph(model: Decoder, file: Path) -> None:
    """Trace the decoder and write its graph. Raises RunFailed for an operator that ONNX does not have."""
    from torch.onnx import OnnxExporterError

    config, free = model.config, torch.export.Dim.DYNAMIC
    tokens, past = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, config.kv_heads, 4, config.head_width)
    rotary_tables(config, Batch(tokens[0], tokens[0], tokens[0], (), 0))     # remembers its frequencies before they are traced
    # tensors of their own: one that is given twice becomes one input
    given = (tokens, torch.ones(2, 7, dtype=torch.long), [past.clone() for _ in range(2 * config.layers)])
    sizes = ({0: free, 1: free}, {0: free, 1: free}, [{0: free, 2: free}] * 2 * config.layers)
    try:
        with warnings.catch_warnings(), _without_log("torch.onnx"), torch.no_grad():
            warnings.simplefilter("ignore")  # the exporter's own, about its parts
            program = torch.onnx.export(
                Graph(model), given, dynamo=True, verbose=False, dynamic_shapes=sizes,
                input_names=["input_ids", "attention_mask", *names(config, "past_key_values")],
                output_names=["logits", *names(config, "present")])
            assert program is not None
            weight_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
            program.save(file, external_data=weight_bytes > LARGEST_FILE_BYTES)
    except OnnxExporterError as error:
        operators = sorted(set(re.findall(r"aten\.\w+|(?<=op=')\w+\.\w+", _reasons(error))))
        named = f" ({', '.join(operators[:3])})" if operators else ""
        raise RunFailed(f"ONNX cannot express an operator of this {config.family} model{named}, so nothing was written; "
                        "install a newer torch and onnxscript, or use --to merged or --to gguf") from error


@contextlib.contextmanager
def _without_log(name: str) -> Iterator[None]:
    """Keep a library from printing what a user can do nothing about, such as packages that are not needed here."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _reasons(error: BaseException) -> str:
    """Return the messages of an error and of all that caused it."""
    return "\n".join([str(error), *([_reasons(error.__cause__)] if error.__cause__ is not None else [])])


# ------------------------------------------------------------------------------------------------ the check


Run = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64], Sequence[Any]], list[Any]]


def check_graph(file: Path, model: Decoder, examples: Sequence[Example]) -> Agreement:
    """Return how far ONNX Runtime's logits are from the decoder's. Raises RunFailed if further than fp32 rounds."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except Exception as error:               # its errors have no class of their own
        raise _wrong(f"ONNX Runtime cannot open it ({type(error).__name__})") from error
    config, inputs = model.config, [one.name for one in session.get_inputs()]

    def run(ids: npt.NDArray[np.int64], mask: npt.NDArray[np.int64], past: Sequence[Any]) -> list[Any]:
        return list(session.run(None, dict(zip(inputs, (ids, mask, *past), strict=True))))

    fit = max(1, config.context - 2)         # `padded` has two more tokens in a row
    texts = [example.inputs[:fit].astype(np.int64) for example in examples]
    empty = [np.zeros((1, config.kv_heads, 0, config.head_width), np.float32)] * 2 * config.layers
    expected = list(all_scores(model, [Example(text, text) for text in texts]))
    ways = {"": whole, " by way of the cache": in_two, " beside padding": padded}
    found = [compare_scores(expected, [torch.from_numpy(way(run, text, empty)) for text in texts]) for way in ways.values()]
    for how, agreement in zip(ways, found, strict=True):
        if not agreement.difference <= FP32_DIFFERENCE:      # so that NaN is refused, too
            raise _wrong(f"ONNX Runtime's scores{how} differ from the model's ({agreement})")
    return max(found, key=lambda one: one.difference)


def _wrong(because: str) -> RunFailed:
    return RunFailed(f"the ONNX file was written, opened again and is not right: {because}; it was removed. Report this as a "
                     "bug, and use --to merged meanwhile")


def whole(run: Run, text: npt.NDArray[np.int64], empty: Sequence[Any]) -> npt.NDArray[np.float32]:
    """Return the logits (T, V) of a text in one call."""
    return np.asarray(run(text[None], np.ones_like(text[None]), empty)[0][0])


def in_two(run: Run, text: npt.NDArray[np.int64], empty: Sequence[Any]) -> npt.NDArray[np.float32]:
    """Return the logits (T, V) of a text whose last token is read with the cache of the others."""
    if len(text) < 2:
        return whole(run, text, empty)
    first, *past = run(text[None, :-1], np.ones_like(text[None, :-1]), empty)
    last = run(text[None, -1:], np.ones_like(text[None]), past)[0]
    return np.concatenate((first[0], last[0]))


def padded(run: Run, text: npt.NDArray[np.int64], empty: Sequence[Any]) -> npt.NDArray[np.float32]:
    """Return the logits (T, V) of a text that stands beside a longer one, with padding before it."""
    rows = np.stack((np.concatenate((text[:1], text[:1], text)), np.concatenate(([0, 0], text))))
    mask = np.ones_like(rows)
    mask[1, :2] = 0
    return np.asarray(run(rows, mask, [np.repeat(one, 2, 0) for one in empty])[0][1, 2:])
