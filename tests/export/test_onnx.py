"""ONNX files: ONNX Runtime computes the decoder's logits for every family, whatever the batch, the length and the cache."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from adapted_models import make_base
from powertrain.data.example import Example
from powertrain.data.examples.tokenizer import ExampleTokenizer
from powertrain.export import onnx as exporting
from powertrain.export.onnx import check_graph, export_onnx
from powertrain.models.config import FAMILIES, RotaryScaling
from powertrain.models.decoder import Decoder
from powertrain.records import IGNORE, Batch, RunFailed, WrongUse
from powertrain.records.json_files import read_json

# one layer each, for tracing takes seconds; each layer has a cache of its own, which the llama's two layers show
ASKED: dict[str, dict[str, Any]] = {"llama": {"layers": 2, "kv_heads": 2, "head_width": 32}, "mistral": {"window": 5}}


def texts(*lengths: int) -> list[Example]:
    draws = np.random.default_rng(0)
    return [Example(ids, ids) for ids in (draws.integers(0, 300, length).astype(np.int64) for length in lengths)]


def ours(model: Decoder, ids: Any) -> Any:
    tokens = torch.tensor(ids)
    with torch.no_grad():
        return model(Batch(tokens, torch.full_like(tokens, IGNORE), torch.arange(len(ids)), (len(ids),), 0)).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_onnx_runtime_computes_the_same(family: str, tokenizer: ExampleTokenizer, tmp_path: Path) -> None:
    model = make_base(family, **{"layers": 1} | ASKED.get(family, {}))
    report = export_onnx(model, tmp_path / "out", tokenizer, texts(1, 9))
    assert report.agreement.difference < 1e-4
    assert read_json(tmp_path / "out" / "config.json")["model_type"] == model.config.family
    session, config = onnxruntime.InferenceSession(str(report.file)), model.config
    inputs = [one.name for one in session.get_inputs()]
    assert inputs[:4] == ["input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value"]
    first, second = (example.inputs for example in texts(13, 4))
    cache: list[Any] = [np.zeros((2, config.kv_heads, 0, config.head_width), np.float32)] * 2 * config.layers
    mask = np.ones((2, 0), np.int64)
    logits: list[Any] = []
    for begin, end in ((0, 3), (3, 4), (4, 13)):             # three calls: the second row is padded at the left
        ids = np.stack((first, np.concatenate((np.zeros(9, np.int64), second))))[:, begin:end]
        mask = np.concatenate((mask, np.stack((np.ones(end - begin), np.arange(begin, end) >= 9)).astype(np.int64)), 1)
        found, *cache = session.run(None, dict(zip(inputs, (ids, mask, *cache), strict=True)))
        logits.append(found)
    together = np.concatenate(logits, 1)
    np.testing.assert_allclose(together[0], ours(model, first), atol=2e-4)
    np.testing.assert_allclose(together[1, 9:], ours(model, second), atol=2e-4)


def test_another_model_s_graph_is_found_and_nothing_is_left(tokenizer: ExampleTokenizer, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_base("llama", layers=1)
    export_onnx(model, tmp_path / "right", tokenizer, texts(7))
    other = make_base("llama", layers=1)
    with torch.no_grad():
        other.blocks[0].mlp_out.weight[0, 0] += 0.5  # type: ignore[index, union-attr, operator]
    with pytest.raises(RunFailed, match="ONNX Runtime's scores differ from the model's"):
        check_graph(tmp_path / "right" / "model.onnx", other, texts(7))
    original = exporting.write_graph
    monkeypatch.setattr(exporting, "write_graph", lambda _, file: original(other, file))
    with pytest.raises(RunFailed, match="it was removed"):
        export_onnx(model, tmp_path / "wrong", tokenizer, texts(7))
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    with pytest.raises(RunFailed, match="ONNX Runtime cannot open it"):
        check_graph(tmp_path / "broken.onnx", model, texts(7))
    assert {path.name for path in tmp_path.iterdir()} == {"right", "broken.onnx"}


def test_an_operator_that_onnx_has_not_is_named(tokenizer: ExampleTokenizer, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.models.decoder.activate", lambda x, _: torch.special.bessel_j0(x))
    with pytest.raises(RunFailed, match=r"operator of this llama model \(.*bessel_j0.*use --to merged or --to gguf") as caught:
        export_onnx(make_base("llama", layers=1), tmp_path / "out", tokenizer, texts(7))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_positions_that_change_with_the_length_are_refused(tokenizer: ExampleTokenizer, tmp_path: Path) -> None:
    model = make_base("phi3")
    factors = tuple(1.0 + i for i in range(8))
    model.config = replace(model.config, rotary_scaling=RotaryScaling("longrope", 2.0, 32, 1.19, short_factors=factors,
                                                                      long_factors=factors))
    with pytest.raises(WrongUse, match="this phi3 model turns its positions otherwise beyond 32 tokens"):
        export_onnx(model, tmp_path / "out", tokenizer, texts(7))


def test_a_package_that_is_missing_is_named(tokenizer: ExampleTokenizer, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    with pytest.raises(WrongUse, match="ONNX files need onnxruntime, which is not installed; pip install onnxruntime"):
        export_onnx(make_base("llama"), tmp_path / "out", tokenizer, texts(7))
