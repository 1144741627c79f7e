"""GGUF files: what llama.cpp will find in them, read by the gguf package, and by llama.cpp where it is installed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from adapted_models import ROWS, make_base
from powertrain.data.examples.tokenizer import ExampleTokenizer
from powertrain.export.gguf import all_tensors, as_stored, check_settings, check_tensors, export_gguf, is_rounded
from powertrain.models.config import FAMILIES, RotaryScaling
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.folder import to_hf_weights
from powertrain.records import RunFailed, WrongUse

LLAMA3 = RotaryScaling("llama3", 8.0, 32, slow_turns=1.0, fast_turns=4.0)
YARN = RotaryScaling("yarn", 4.0, 32, 1.3, slow_turns=1.0, fast_turns=32.0)
LONGROPE = RotaryScaling("longrope", 2.0, 32, 1.19, short_factors=tuple(1.0 + i / 8 for i in range(8)),
                         long_factors=tuple(1.0 + i for i in range(8)))


def scaled(model: Decoder, scaling: RotaryScaling) -> Decoder:
    model.config = replace(model.config, rotary_scaling=scaling)
    return model


def export(model: Decoder, tokenizer: ExampleTokenizer, folder: Path, **asked: Any) -> gguf.GGUFReader:
    report = export_gguf(model, folder, tokenizer, name="tiny", **asked)
    assert report.file.parent == folder
    return gguf.GGUFReader(report.file)


def tensors(reader: gguf.GGUFReader) -> dict[str, np.ndarray[Any, Any]]:
    """Name -> values, in numpy's order of dimensions."""
    return {t.name: gguf.dequantize(t.data, t.tensor_type).reshape(tuple(int(n) for n in reversed(t.shape)))
            for t in reader.tensors}


def setting(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_tensors_of_its_architecture(family: str, tokenizer: ExampleTokenizer, tmp_path: Path) -> None:
    model = make_base(family)
    reader = export(model, tokenizer, tmp_path / "out", dtype="float32")
    name = {"mistral": "llama", "gpt_neox": "gptneox"}.get(family, family)
    assert setting(reader, "general.architecture") == name
    kind = next(kind for kind, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    allowed = {gguf.TENSOR_NAMES[tensor].format(bid=layer) for tensor in gguf.MODEL_TENSORS[kind] for layer in range(2)}
    found = tensors(reader)
    assert {tensor.rpartition(".")[0] for tensor in found} <= allowed
    assert found["token_embd.weight"].shape == (ROWS, 64)
    assert sum(value.size for value in found.values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_neighbouring_rotation_of_the_file_is_our_rotation_of_halves(family: str, tokenizer: ExampleTokenizer,
                                                                     tmp_path: Path) -> None:
    """What llama.cpp's graph computes of the file's q and k, written here as it is there: pairs of neighbours."""
    model = make_base(family, kv_heads=2)
    found, config = tensors(export(model, tokenizer, tmp_path / "out", dtype="float32")), model.config
    theirs = to_hf_weights(config, model.state_dict())
    x, width = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32), config.head_width
    positions = np.array([3.0, 11.0])[:, None, None]
    angles = positions / config.rotary_base ** (np.arange(0, width, 2) / width)            # (2, 1, width / 2)

    def heads(weight: Any) -> Any:
        return (x @ np.asarray(weight).T).reshape(2, -1, width)

    def neighbours(y: Any) -> Any:
        even, odd = y[..., 0::2], y[..., 1::2]
        return np.stack((even * np.cos(angles) - odd * np.sin(angles), even * np.sin(angles) + odd * np.cos(angles)), -1)

    def halves(y: Any) -> Any:
        left, right = np.split(y, 2, axis=-1)
        return np.stack((left * np.cos(angles) - right * np.sin(angles), right * np.cos(angles) + left * np.sin(angles)), -1)

    for name, ours in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        turned = neighbours(heads(found[f"blk.1.{name}.weight"]))
        np.testing.assert_allclose(turned, halves(heads(theirs[f"model.layers.1.self_attn.{ours}.weight"])), atol=1e-5)
    assert np.array_equal(found["blk.1.attn_v.weight"], theirs["model.layers.1.self_attn.v_proj.weight"].detach().numpy())


def test_other_families_lie_as_hugging_face_has_them(tokenizer: ExampleTokenizer, tmp_path: Path) -> None:
    qwen = make_base("qwen2", kv_heads=2)
    found = tensors(export(qwen, tokenizer, tmp_path / "qwen", dtype="float32"))
    theirs = to_hf_weights(qwen.config, qwen.state_dict())
    for name, ours in (("attn_q.weight", "self_attn.q_proj.weight"), ("attn_k.bias", "self_attn.k_proj.bias"),
                       ("ffn_gate.weight", "mlp.gate_proj.weight"), ("ffn_down.weight", "mlp.down_proj.weight")):
        assert np.array_equal(found[f"blk.0.{name}"], theirs[f"model.layers.0.{ours}"].detach().numpy())
    gpt2 = make_base("gpt2", bias=False)
    found = tensors(export(gpt2, tokenizer, tmp_path / "gpt2", dtype="float32"))
    theirs = to_hf_weights(gpt2.config, gpt2.state_dict())
    assert np.array_equal(found["blk.0.attn_qkv.weight"], theirs["transformer.h.0.attn.c_attn.weight"].detach().numpy().T)
    assert not found["blk.0.attn_qkv.bias"].any()
    neox = make_base("gpt_neox")
    qkv = tensors(export(neox, tokenizer, tmp_path / "neox", dtype="float32"))["blk.0.attn_qkv.weight"]
    interleaved = to_hf_weights(neox.config, neox.state_dict())["gpt_neox.layers.0.attention.query_key_value.weight"]
    assert np.array_equal(qkv, interleaved.detach().reshape(2, 3, 32, 64).transpose(0, 1).reshape(192, 64).numpy())
    gemma = make_base("gemma")
    norm = tensors(export(gemma, tokenizer, tmp_path / "gemma", dtype="float32"))["output_norm.weight"]
    assert np.array_equal(norm, gemma.norm.weight.detach().numpy() + 1)


def test_settings_say_what_the_graph_needs(tokenizer: ExampleTokenizer, tmp_path: Path) -> None:
    model = make_base("llama", kv_heads=2, head_width=32)
    reader = export(model, tokenizer, tmp_path / "out", dtype="bfloat16", stops=[0, 5],
                    chat_template="a{% generation %}b{% endgeneration %}")
    expected = {
        "general.name": "tiny", "general.file_type": 32, "llama.context_length": 64, "llama.embedding_length": 64,
        "llama.block_count": 2, "llama.feed_forward_length": model.config.mlp_width, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.attention.key_length": 32, "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 10_000.0, "llama.vocab_size": ROWS, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "ab"}
    assert {key: setting(reader, key) for key in expected} == expected
    assert setting(reader, "llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-5)
    words = setting(reader, "tokenizer.ggml.tokens")
    assert len(words) == ROWS
    assert words[:300] == [tokenizer.library.id_to_token(token) for token in range(300)]
    assert setting(reader, "tokenizer.ggml.token_type")[0] == gguf.TokenType.CONTROL
    assert setting(reader, "tokenizer.ggml.token_type")[-1] == gguf.TokenType.UNUSED


@pytest.mark.parametrize(("family", "scaling", "expected"), [
    ("llama", RotaryScaling("linear", 4.0), {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    ("qwen2", YARN, {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 32}),
    ("phi3", LONGROPE, {"rope.scaling.original_context_length": 32}),
])
def test_scaled_positions_are_settings(family: str, scaling: RotaryScaling, expected: dict[str, Any],
                                       tokenizer: ExampleTokenizer, tmp_path: Path) -> None:
    reader = export(scaled(make_base(family), scaling), tokenizer, tmp_path / "out", dtype="float32")
    assert {key: setting(reader, f"{family}.{key}") for key in expected} == expected
    assert ("rope_factors_long.weight" in tensors(reader)) == (scaling is LONGROPE)


def test_llama3_positions_are_a_tensor_of_factors(tokenizer: ExampleTokenizer, tmp_path: Path) -> None:
    from powertrain.models.decoder import inverse_frequencies

    model = scaled(make_base("llama"), LLAMA3)
    factors = tensors(export(model, tokenizer, tmp_path / "out", dtype="float32"))["rope_freqs.weight"]
    plain = 10_000.0 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(plain / factors, inverse_frequencies(model.config).numpy(), rtol=1e-5)
    assert factors[0] == 1
    assert factors[-1] == 8


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16"), ("q8_0", "Q8_0")])
def test_weights_are_rounded_and_vectors_are_not(dtype: str, kind: str, tokenizer: ExampleTokenizer, tmp_path: Path) -> None:
    model = make_base("qwen3", mlp_width=80)                # 80: no multiple of q8_0's blocks
    reader = export(model, tokenizer, tmp_path / "out", dtype=dtype)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.attn_q.weight"] == kind
    assert kinds["blk.0.attn_q_norm.weight"] == kinds["output_norm.weight"] == "F32"
    assert kinds["blk.0.ffn_down.weight"] == ("F16" if dtype == "q8_0" else kind)
    found, exact = tensors(reader)["blk.0.attn_v.weight"], dict(all_tensors(model))["blk.0.attn_v.weight"].numpy()
    assert np.abs(found - exact).max() <= {"F32": 0, "F16": 5e-4, "BF16": 4e-3, "Q8_0": 1e-2}[kind] * np.abs(exact).max()


class TestOpenedAgain:
    """A file that was changed after it was written is not passed off as the model."""

    @pytest.fixture
    def model(self) -> Decoder:
        return make_base("llama")

    @pytest.fixture
    def file(self, model: Decoder, tokenizer: ExampleTokenizer, tmp_path: Path) -> Path:
        return export_gguf(model, tmp_path / "out", tokenizer, name="tiny", dtype="float16").file

    def check(self, file: Path, model: Decoder, dtype: str = "float16") -> int:
        expected = ((name, tensor.numpy(), *as_stored(name, tensor, dtype)) for name, tensor in all_tensors(model))
        return check_tensors(file, expected)

    def test_what_was_written_is_right(self, file: Path, model: Decoder) -> None:
        assert self.check(file, model) == 21

    def test_a_flipped_bit_is_found(self, file: Path, model: Decoder) -> None:
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
        with pytest.raises(RunFailed, match="differs from the one that was written"):
            self.check(file, model)

    def test_another_model_is_found(self, file: Path, model: Decoder) -> None:
        with torch.no_grad():
            model.blocks[0].qkv.weight[0, 0] += 1e-2  # type: ignore[index, union-attr, operator]
        with pytest.raises(RunFailed, match="attn_q"):
            self.check(file, model)
        with pytest.raises(RunFailed, match="differs from the one that was written"):
            self.check(file, make_base("llama", tied_head=True))

    def test_another_setting_is_found(self, file: Path) -> None:
        right = {"llama.block_count": 2, "llama.rope.freq_base": 10_000.0, "general.name": "tiny"}
        check_settings(file, right)
        for changed in ({"llama.block_count": 3}, {"llama.rope.freq_base": 9_999.0}, {"general.name": "x"}, {"missing": 1}):
            with pytest.raises(RunFailed, match=next(iter(changed))):
                check_settings(file, right | changed)

    @pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
    def test_rounding_is_told_from_error(self, kind: str) -> None:
        draws = np.random.default_rng(0)
        values = (draws.standard_normal((8, 64)) * 10.0 ** draws.integers(-9, 3, (8, 1))).astype(np.float32)
        number = gguf.GGMLQuantizationType[kind]
        stored = gguf.dequantize(gguf.quantize(values, number), number).copy()
        assert is_rounded(values, stored, kind)
        stored[3, 5] += np.abs(values[3]).max() / 50
        assert not is_rounded(values, stored, kind)

    def test_nothing_is_left_of_a_file_that_is_not_right(self, model: Decoder, tokenizer: ExampleTokenizer, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
        from powertrain.export import gguf as writing

        original = writing.write_file

        def torn(file: Path, *rest: Any) -> None:
            original(file, *rest)
            content = bytearray(file.read_bytes())
            content[-100] ^= 1
            file.write_bytes(content)

        monkeypatch.setattr(writing, "write_file", torn)
        with pytest.raises(RunFailed, match="it was removed"):
            export_gguf(model, tmp_path / "out", tokenizer, name="tiny")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("family", "asked", "says"), [
    ("llama", {"activation": "gelu"}, "computes its llama models with silu"),
    ("gpt2", {"activation": "gelu"}, "computes its gpt2 models with gelu_tanh"),
    ("gemma", {"tied_head": False}, "ties the head"),
])
def test_what_llama_cpp_cannot_compute_is_refused(family: str, asked: dict[str, Any], says: str, tokenizer: ExampleTokenizer,
                                                  tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=says):
        export_gguf(make_base(family, **asked), tmp_path / "out", tokenizer, name="tiny")
    with pytest.raises(WrongUse, match="by llama3"):
        export_gguf(scaled(make_base("qwen2"), LLAMA3), tmp_path / "out", tokenizer, name="tiny")
    assert not list(tmp_path.iterdir())


def test_a_window_becomes_the_context_and_is_said(tokenizer: ExampleTokenizer, tmp_path: Path) -> None:
    report = export_gguf(make_base("mistral", window=24), tmp_path / "out", tokenizer, name="tiny")
    assert "24 tokens" in report.notes[0]
    assert setting(gguf.GGUFReader(report.file), "llama.context_length") == 24


def test_a_weight_that_float16_cannot_hold_is_refused(tokenizer: ExampleTokenizer, tmp_path: Path) -> None:
    model = make_base("llama")
    with torch.no_grad():
        model.embedding.weight[3, 3] = 1e5
    with pytest.raises(WrongUse, match=r"1e\+05.*bfloat16"):
        export_gguf(model, tmp_path / "out", tokenizer, name="tiny", dtype="float16")
    export_gguf(model, tmp_path / "out", tokenizer, name="tiny", dtype="bfloat16")


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same(family: str, tokenizer: ExampleTokenizer, tmp_path: Path) -> None:
    text = tokenizer.encode("The quick brown fox is 12 years old.\n").tolist()
    report = export_gguf(make_base(family), tmp_path / "out", tokenizer, name="tiny", dtype="float32", text=text)
    assert report.llama_cpp.startswith("llama.cpp opens it")
