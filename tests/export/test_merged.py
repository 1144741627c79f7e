"""Merging: what transformers and peft make of the files, and that nothing different is ever written."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapted_models import make_base, with_adapter
from powertrain.data.example import Example
from powertrain.data.examples.tokenizer import ExampleTokenizer
from powertrain.export import merged as merging
from powertrain.export.merged import Agreement, all_scores, compare_scores, export_adapter, export_merged
from powertrain.models.bridge.loading import load_bridged
from powertrain.models.decoder import Decoder
from powertrain.models.kernels.quantised import quantise_base
from powertrain.records import RunFailed, WrongUse
from powertrain.use.opening import open_model

IDS = torch.arange(20, 50)
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")      # peft asks it


def theirs(folder: Path, adapter: Path | None = None, **asked: Any) -> torch.Tensor:
    """The logits of transformers, with peft's adapter if there is one."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **asked)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(IDS[None]).logits[0]
    return logits


def ours(model: Decoder) -> torch.Tensor:
    return next(merging_scores(model))


def merging_scores(model: Any) -> Iterator[torch.Tensor]:
    return all_scores(model, [Example(IDS.numpy(), IDS.numpy())])


@pytest.mark.parametrize(("family", "asked"), [
    ("llama", {}), ("gpt2", {}), ("gpt_neox", {}), ("qwen3", {"use_rslora": True}), ("phi3", {}), ("gemma", {"use_dora": True}),
])
def test_adapter_and_merged_model_give_equal_logits_in_peft_and_transformers(
        family: str, asked: dict[str, Any], saved_base: Callable[..., Path], saved_adapter: Callable[..., Path],
        tokenizer: ExampleTokenizer, examples: list[Example], tmp_path: Path) -> None:
    base = saved_base(family)
    adapter = saved_adapter(base, with_adapter(make_base(family), **asked))
    opened = open_model(str(adapter))
    assert (opened.found.adapter, opened.found.base) == (adapter, str(base))
    expected = theirs(base, adapter)
    torch.testing.assert_close(ours(opened.model), expected, rtol=0, atol=1e-4)
    assert (theirs(base) - expected).abs().max() > 0.1                     # or the adapter did nothing

    report = export_merged(opened.model, tmp_path / "merged", opened.tokenizer, examples, dtype="float32", base_dtype="float32")
    assert report.agreement is not None
    assert report.agreement.difference < 1e-4 < report.effect
    torch.testing.assert_close(theirs(tmp_path / "merged"), expected, rtol=0, atol=1e-4)


def test_a_qlora_adapter_merges_into_the_unquantised_base(
        saved_base: Callable[..., Path], saved_adapter: Callable[..., Path], examples: list[Example], tmp_path: Path) -> None:
    base, quantised = saved_base("llama"), make_base("llama")
    quantise_base(quantised, type="nf4", double=True)
    adapter = saved_adapter(base, with_adapter(quantised))
    opened = open_model(str(adapter))
    export_merged(opened.model, tmp_path / "merged", opened.tokenizer, examples, dtype="float32", base_dtype="float32")
    found = theirs(tmp_path / "merged")
    torch.testing.assert_close(found, theirs(base, adapter), rtol=0, atol=1e-4)
    assert (found - ours(quantised)).abs().max() > 1e-2                    # what 4 bits round away is not merged in
    with pytest.raises(WrongUse, match="unquantised"):
        export_merged(quantised, tmp_path / "other", opened.tokenizer, examples, dtype="float32", base_dtype="float32")


def test_an_exported_adapter_is_the_adapter(saved_base: Callable[..., Path], saved_adapter: Callable[..., Path],
                                            tokenizer: ExampleTokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base = saved_base("llama")
    adapter = saved_adapter(base, with_adapter(make_base("llama")))
    assert export_adapter(adapter, tmp_path / "out", tokenizer, base=str(base)) == 28
    assert torch.equal(theirs(base, tmp_path / "out"), theirs(base, adapter))
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<user>x<|endoftext|>"
    with pytest.raises(WrongUse, match="use --to merged"):
        export_adapter(base, tmp_path / "none", tokenizer, base=str(base))


def test_a_merged_model_carries_tokenizer_and_template(tokenizer: ExampleTokenizer, examples: list[Example],
                                                       tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = with_adapter(make_base("qwen2"))
    export_merged(model, tmp_path / "out", tokenizer, examples, dtype="bfloat16", base_dtype="float32")
    opened = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert opened("The quick fox")["input_ids"] == tokenizer.encode("The quick fox").tolist()
    assert opened.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<user>x<|endoftext|>"
    assert open_model(str(tmp_path / "out")).stored_dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_tampered_merge_is_refused(dtype: str, tokenizer: ExampleTokenizer, examples: list[Example], tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the adapter had been scaled wrongly in one layer."""
    original = merging.merged

    def tampered(model: Decoder) -> Decoder:
        plain = original(model)
        with torch.no_grad():
            plain.blocks[1].mlp_out.weight.mul_(1.1)  # type: ignore[union-attr]
        return plain

    monkeypatch.setattr(merging, "merged", tampered)
    model = with_adapter(make_base("llama"))
    with pytest.raises(RunFailed, match="nothing was written"):
        export_merged(model, tmp_path / "out", tokenizer, examples, dtype=dtype, base_dtype="float32")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_what_was_merged_is_removed(tokenizer: ExampleTokenizer, examples: list[Example], tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the disk had flipped a bit."""
    original = merging.save_folder

    def flipped(model: Decoder, folder: Path, *rest: Any) -> None:
        original(model, folder, *rest)
        weights = folder / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-3] ^= 1
        weights.write_bytes(content)

    monkeypatch.setattr(merging, "save_folder", flipped)
    with pytest.raises(RunFailed, match="is not the same"):
        export_merged(with_adapter(make_base("llama")), tmp_path / "out", tokenizer, examples, dtype="float32",
                      base_dtype="float32")
    assert not list(tmp_path.iterdir())


def test_what_half_precision_would_round_away_is_not_lost_in_silence(tokenizer: ExampleTokenizer, examples: list[Example],
                                                                     tmp_path: Path) -> None:
    """An adapter whose changes are smaller than the last bit of the base's bf16 weights."""
    weak = with_adapter(make_base("llama").to(torch.bfloat16).float(), strength=0.004)
    with pytest.raises(RunFailed, match=r"too coarse.*--dtype float32"):
        export_merged(weak, tmp_path / "out", tokenizer, examples, dtype="bfloat16", base_dtype="bfloat16")
    report = export_merged(weak, tmp_path / "out", tokenizer, examples, dtype="float32", base_dtype="bfloat16")
    assert report.agreement is not None
    assert report.agreement.difference < 1e-4


def test_a_function_between_a_and_b_cannot_be_merged(tokenizer: ExampleTokenizer, examples: list[Example],
                                                     tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="LS-LoRA"):
        export_merged(with_adapter(make_base("llama"), kind="lslora"), tmp_path / "out", tokenizer, examples, dtype="float32",
                      base_dtype="float32")


def test_a_model_without_an_adapter_is_written_as_it_is(tokenizer: ExampleTokenizer, examples: list[Example],
                                                        tmp_path: Path) -> None:
    model = make_base("llama")
    report = export_merged(model, tmp_path / "out", tokenizer, examples, dtype="float32", base_dtype="float32")
    assert report.agreement is None
    torch.testing.assert_close(theirs(tmp_path / "out"), ours(model), rtol=0, atol=1e-5)


def test_a_merged_encoder_decoder_says_what_its_adapter_says(tmp_path: Path, tokenizer: ExampleTokenizer) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    network = T5ForConditionalGeneration(T5Config(vocab_size=320, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
                                                  decoder_start_token_id=0, pad_token_id=0))
    network.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(network, LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules=["q", "v"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    adapted.save_pretrained(tmp_path / "adapter")
    model = load_bridged(tmp_path / "base", task="seq2seq", method="lora", adapter_folder=tmp_path / "adapter")
    read, source = np.array([0, 5, 6, 7]), np.arange(20, 30)
    report = export_merged(model, tmp_path / "out", tokenizer, [Example(read, read, source=source)], dtype="float32",
                           base_dtype="float32")
    assert report.agreement is not None
    assert report.agreement.difference < 1e-4 < report.effect
    inputs = {"input_ids": torch.from_numpy(source)[None], "decoder_input_ids": torch.from_numpy(read)[None]}
    opened = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    expected = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base"), str(tmp_path / "adapter"))
    with torch.no_grad():
        torch.testing.assert_close(opened(**inputs).logits, expected.eval()(**inputs).logits, rtol=0, atol=1e-5)


class TestComparing:
    def test_equal_models_agree_in_everything(self, examples: list[Example]) -> None:
        model = make_base("llama")
        assert compare_scores(all_scores(model, examples), all_scores(model, examples)) == Agreement(100, 0.0, 0.0, 1.0)

    def test_a_score_that_is_not_a_number_never_agrees(self, examples: list[Example]) -> None:
        broken = make_base("llama")
        with torch.no_grad():
            broken.blocks[0].mlp_out.weight[0, 0] = torch.nan  # type: ignore[index, union-attr]
        found = compare_scores(all_scores(make_base("llama"), examples), all_scores(broken, examples))
        with pytest.raises(RunFailed, match="nothing was written"):
            merging.refuse_difference(found)
        for dtype in ("bfloat16", "float16"):
            with pytest.raises(RunFailed, match=f"in {dtype} would not predict the same"):
                merging.refuse_loss(found, 1.0, dtype, "float32")

    def test_the_divergence_is_in_nats_a_token(self) -> None:
        even, uneven = torch.zeros(3, 2), torch.tensor([[0.0, torch.log(torch.tensor(3.0))]] * 3)      # 1/2, 1/2 and 1/4, 3/4
        found = compare_scores([even], [uneven])
        assert found.divergence == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))


@contextmanager
def full_disk() -> Iterator[None]:
    """The system refuses to write more than a few kilobytes into one file."""
    import resource

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tokenizer: ExampleTokenizer, examples: list[Example],
                                                        tmp_path: Path) -> None:
    model = make_base("llama")
    with full_disk(), pytest.raises(RunFailed, match=r"cannot be written.*free space"):
        export_merged(model, tmp_path / "out", tokenizer, examples, dtype="float32", base_dtype="float32")
    assert not list(tmp_path.iterdir())


def test_what_is_there_already_is_not_touched(tokenizer: ExampleTokenizer, examples: list[Example], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for name, says in (("full", "is not empty"), ("file", "is a file")):
        with pytest.raises(WrongUse, match=says):
            export_merged(make_base("llama"), tmp_path / name, tokenizer, examples, dtype="float32", base_dtype="float32")
    (tmp_path / "empty").mkdir()
    export_merged(make_base("llama"), tmp_path / "empty", tokenizer, examples, dtype="float32", base_dtype="float32")
    assert (tmp_path / "empty" / "config.json").is_file()
