"""The decode step of our own kernel: the logits of the whole document, whatever the model is made of and stored in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_generation import make_model

from powertrain.models.adapters.attached import add_adapters, freeze
from powertrain.models.adapters.files import save_adapter
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import FAMILIES
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.folder import save_folder
from powertrain.models.kernels import build
from powertrain.records import Batch
from powertrain.use import decode
from powertrain.use.decode import DecodeStep, find_step, why_no_step
from powertrain.use.generation import CachedAttention, DecoderFeed
from powertrain.use.opening import open_model

MODELS: list[tuple[str, dict[str, Any]]] = [
    *((family, {"width": 64}) for family in FAMILIES), ("llama", {"kv_heads": 2}), ("mistral", {"window": 3}),
    ("gpt2", {"bias": False}),
    ("llama", {"width": 36, "heads": 2, "mlp_width": 27, "vocabulary": 261})]  # multiples of no vector's length


def whole(model: Decoder, ids: list[int]) -> torch.Tensor:
    read = torch.tensor(ids)
    return model(Batch(read, read, torch.arange(len(read)), (len(read),), 0))


@pytest.mark.parametrize(("family", "asked"), MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapted", [True, False])
def test_a_step_gives_the_logits_of_the_whole_document(family: str, asked: dict[str, Any], dtype: torch.dtype,
                                                       adapted: bool) -> None:
    model = make_model(family, context=64, **asked).eval().to(dtype)
    freeze(model)
    if adapted:
        add_adapters(model, AdapterConfig(r=3, alpha=4.0))
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith(".B"):
                torch.nn.init.normal_(parameter, std=0.3)
    model.requires_grad_(False)
    step, document, ids = find_step(model), CachedAttention(), [5, 250, 17, 17, 98, 3, 140]
    assert step is not None
    expected = whole(model, ids)
    for place, token in enumerate(ids):
        torch.testing.assert_close(step(model, [token], [document])[0], expected[place].float(), rtol=2e-4, atol=2e-4)
    assert document.tokens == len(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_has_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    model = make_model("qwen3", kv_heads=2, context=64, width=72, mlp_width=80).eval().to(dtype).requires_grad_(False)
    step = find_step(model)
    assert step is not None
    lone = {}
    for number in range(7):
        document = CachedAttention()
        lone[number] = [step(model, [10 * number + place], [document])[0] for place in range(9)]
    documents = [CachedAttention() for _ in lone]
    for number, document in enumerate(documents):                          # of different lengths
        for place in range(number):
            step(model, [10 * number + place], [document])
    found = step(model, [10 * number + number for number in lone], documents)
    assert all(torch.equal(found[number], lone[number][number]) for number in lone)


def test_a_model_that_the_kernel_does_not_take_is_left_to_torch() -> None:
    trains = make_model("llama")
    assert find_step(trains) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert find_step(make_model("llama").requires_grad_(False)) is None
    for adapter in (AdapterConfig(r=2, alpha=4.0, use_dora=True), AdapterConfig(r=2, alpha=4.0, kind="lslora")):
        model = make_model("llama")
        add_adapters(model, adapter)
        assert find_step(model.requires_grad_(False)) is None
        torch.testing.assert_close(DecoderFeed(model)([1, 2, 3]), whole(model, [1, 2, 3])[-1], rtol=1e-4, atol=1e-4)
    assert find_step(make_model("llama").half().requires_grad_(False)) is None


def test_weights_stay_as_they_are_stored_where_a_step_reads_them(base_folder: Path, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    stored = open_model(str(base_folder)).model.bfloat16()
    assert isinstance(stored, Decoder)
    save_folder(stored, tmp_path / "half")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "half" / file).write_bytes((base_folder / file).read_bytes())
    written, measured = (open_model(str(tmp_path / "half"), writes=writes) for writes in (True, False))
    assert isinstance(written.model, Decoder)
    assert isinstance(measured.model, Decoder)
    assert {parameter.dtype for parameter in written.model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in measured.model.parameters()} == {torch.float32}
    torch.testing.assert_close(DecoderFeed(written.model)([3]), whole(measured.model, [3])[-1])
    expected = whole(measured.model, [3, 4, 5, 6])
    torch.testing.assert_close(DecoderFeed(written.model)([3, 4, 5, 6]), expected[-1], rtol=0, atol=0.02)     # bf16's rounding
    torch.testing.assert_close(whole(written.model, [3, 4, 5, 6]), expected)

    def no_compiler(source: Path) -> None:
        raise build.CannotBuild("none of c++ is on the PATH")

    monkeypatch.setattr(decode, "load", no_compiler)
    said: list[str] = []
    without = open_model(str(tmp_path / "half"), writes=True, say=said.append).model
    assert said == ["torch computes the tokens, and more slowly: none of c++ is on the PATH"]
    assert isinstance(without, Decoder)
    assert {parameter.dtype for parameter in without.parameters()} == {torch.float32}
    assert find_step(without) is None
    torch.testing.assert_close(DecoderFeed(without)([3, 4, 5, 6]), expected[-1])


def test_a_step_is_made_anew_for_changed_weights() -> None:
    model = make_model("gemma").eval().to(torch.bfloat16).requires_grad_(False)
    freeze(model)
    assert torch.equal(*(DecodeStep(model)(model, [5], [CachedAttention()]) for _ in range(2)))
    before, ids = find_step(model), [5]
    with torch.no_grad():
        model.norm.weight.add_(1)
    after = find_step(model)
    assert after is not None
    assert after is not before
    torch.testing.assert_close(after(model, ids, [CachedAttention()]), whole(model, ids), rtol=2e-4, atol=2e-4)
    model.blocks[0].requires_grad_(True)
    assert find_step(model) is None
    assert why_no_step(model) == "the model trains"


def test_a_model_in_training_mode_drops_nothing() -> None:
    model = make_model("gpt2", dropout=0.5).train().requires_grad_(False)
    step = find_step(model)
    assert step is not None
    assert torch.equal(*(step(model, [5], [CachedAttention()]) for _ in range(2)))
    assert model.training


def test_an_adapter_that_the_kernel_does_not_take_is_computed_in_fp32(base_folder: Path, tmp_path: Path) -> None:
    stored = open_model(str(base_folder)).model.bfloat16()
    assert isinstance(stored, Decoder)
    save_folder(stored, tmp_path / "half")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "half" / file).write_bytes((base_folder / file).read_bytes())
    adapted = open_model(str(tmp_path / "half")).model
    assert isinstance(adapted, Decoder)
    add_adapters(adapted, AdapterConfig(r=2, alpha=4.0, use_dora=True))
    save_adapter(adapted, tmp_path / "adapter", base=str(tmp_path / "half"))
    said: list[str] = []
    opened = open_model(str(tmp_path / "adapter"), writes=True, say=said.append).model
    assert said[-1] == "torch computes the tokens, and more slowly: the kernel takes no adapters but LoRA's"
    assert {parameter.dtype for parameter in opened.parameters()} == {torch.float32}
