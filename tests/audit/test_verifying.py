"""The original's way as a plan: what is rendered, what is refused, what is said. tests/cli runs both arms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import config_examples
import pytest

from adapted_models import make_base
from example_folders import chat_folder
from powertrain.audit import verify as verifying
from powertrain.audit.audit import read_subject
from powertrain.audit.configs import read_config
from powertrain.audit.convert import convert
from powertrain.audit.subject import Subject
from powertrain.audit.verify import ORIGINAL, OURS, differences, original_pins, refuse_what_is_missing, render
from powertrain.cli.auditing import verified_rows
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.models.huggingface.folder import save_folder
from powertrain.recipe import resolve
from powertrain.records import Facts, WrongUse
from powertrain.records.evidence import Comparison, Interval, Parity


def subject(folder: Path, name: str) -> Subject:
    path = folder / name
    path.write_text(config_examples.ALL[name][0], encoding="utf-8")
    return read_config(path)


@pytest.fixture
def fine_tuning(facts: Facts) -> Facts:
    """A batch of examples of unequal lengths, beside adapters."""
    lengths = {"min": 4, "p10": 6, "p50": 9, "p90": 12, "max": 16}
    model = replace(facts.model, method="lora", adapter_parameters=100, adapted_layers=(0, 1), trainable=100)
    return replace(facts, model=model, data=replace(facts.data, kind="conversation", length_quantiles=lengths, max_length=16))


def test_the_original_s_own_way_becomes_pins(tmp_path: Path, fine_tuning: Facts) -> None:
    pins = original_pins(subject(tmp_path, "llama3_qlora_sft.yaml"), fine_tuning)
    assert pins["micro_batch"] == {"examples": 2}, "neat_packing is off: it is packing that packs"
    assert pins["fp16"] == "on"
    assert pins["paged_adamw"] == "on"
    assert pins["activation_checkpointing"] == {"every": 1, "keep_attention": False}, "LLaMA-Factory's default"
    assert pins["attention_kernel"] == {"kernel": "sdpa"}, "flash kernels are not for this machine"
    assert not {"fused_adamw", "chunked_cross_entropy", "torch_compile", "length_grouping", "loader", "packing"} & set(pins)


def test_fp16_that_is_asked_for_turns_trl_s_bf16_off(tmp_path: Path, fine_tuning: Facts) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trl import SFTConfig\nargs = SFTConfig('out', fp16=True)\n", encoding="utf-8")
    pins = original_pins(read_subject(script), fine_tuning)
    assert pins["fp16"] == "on"
    assert pins.get("bf16") != "on"


def test_an_attention_that_nobody_has_is_the_default(tmp_path: Path, fine_tuning: Facts) -> None:
    script = tmp_path / "train.py"
    script.write_text("from transformers import AutoModelForCausalLM\nfrom trl import SFTConfig\nargs = SFTConfig('out')\n"
                      "model = AutoModelForCausalLM.from_pretrained('x', attn_implementation=['eager'])\n", encoding="utf-8")
    assert original_pins(read_subject(script), fine_tuning)["attention_kernel"] == {"kernel": "sdpa"}


def test_packed_rows_of_the_original_are_as_long_as_it_has_them(tmp_path: Path, fine_tuning: Facts) -> None:
    pins = original_pins(subject(tmp_path, "lora.yml"), fine_tuning)
    assert pins["packing"] == {"tokens": 3 * 64, "multiple": 1}
    assert "micro_batch" not in pins


def test_a_trainer_s_defaults_are_rendered_too(tmp_path: Path, fine_tuning: Facts) -> None:
    pins = original_pins(subject(tmp_path, "sft.yaml"), fine_tuning)
    assert pins["fused_adamw"] == "on", "the default of transformers 5"
    assert pins["activation_checkpointing"] == {"every": 1, "keep_attention": False}, "TRL's default"


def test_the_rendering_has_nothing_that_the_original_lacks(tmp_path: Path, fine_tuning: Facts) -> None:
    recipe = resolve(None, ["train_batch_size=14", "max_steps=3"]).recipe
    found = render(subject(tmp_path, "llama3_lora_sft.yaml"), fine_tuning, recipe, 3)
    assert {step.technique.name for step in found.plan.steps} <= set(found.pins)
    assert found.pins["micro_batch"] == {"examples": 1}


def test_what_cannot_be_rendered_here_is_left_out_with_its_reason(tmp_path: Path, fine_tuning: Facts) -> None:
    recipe = resolve(None, ["train_batch_size=14", "max_steps=3"]).recipe
    found = render(subject(tmp_path, "llama3_qlora_sft.yaml"), fine_tuning, recipe, 3)
    assert fine_tuning.hardware.device == "cpu"
    assert any(text.startswith("fp16: ") and "cannot be" in text for text in found.left_out)
    assert "fp16" not in found.pins


def test_what_has_no_technique_here_is_said(tmp_path: Path) -> None:
    said = " ".join(differences(subject(tmp_path, "qlora-fsdp.yaml")))
    assert "padding to max_length" in said
    assert "spreading over devices" in said


# ------------------------------------------------------------------------------------------------ what is missing


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tokenizer = open_example_tokenizer(chat_folder(tmp_path / "tokenizer"))
    save_folder(make_base("llama", vocabulary=330, context=96), tmp_path / "base", tokenizer)
    rows = [{"instruction": "what is the sum of " + "one and " * (i % 5) + "two ?", "output": f"it is {i}"} for i in range(24)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("old", "said"), [("data.jsonl", "its data ./no.jsonl are not here"),
                                           ("base", "its model ./no.jsonl is not here")])
def test_the_file_that_is_missing_is_named(old: str, said: str, beside: Path) -> None:
    (beside / "config.yaml").write_text(config_examples.LORA_TRAINER.replace(f": {old}\n", ": ./no.jsonl\n"))
    with pytest.raises(WrongUse, match="cannot be verified") as error:
        refuse_what_is_missing(convert(read_config(beside / "config.yaml")))
    assert said in str(error.value)


def test_a_file_that_names_no_model_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="names no model"):
        refuse_what_is_missing(convert(subject(tmp_path, "training_args.json")))


def test_the_sentence_has_the_interval(tmp_path: Path, fine_tuning: Facts) -> None:
    recipe = resolve(None, ["train_batch_size=14", "max_steps=3"]).recipe
    rendering = render(subject(tmp_path, "sft.yaml"), fine_tuning, recipe, 3)
    comparison = Comparison(ORIGINAL, OURS, Interval(1.5, 1.4, 1.6), 6, "faster", "", (10.0, 15.0), (9, 8))
    found = verifying.Verified(rendering, rendering.plan, (), comparison, None)
    assert found.sentence() == "1.50 times as fast as the original's way (1.40 to 1.60)"
    assert "no difference" in replace(found, comparison=None).sentence()


def test_the_answer_has_speed_memory_losses_and_what_differs(tmp_path: Path, fine_tuning: Facts) -> None:
    recipe = resolve(None, ["train_batch_size=14", "max_steps=3"]).recipe
    rendering = render(subject(tmp_path, "sft.yaml"), fine_tuning, recipe, 3)
    comparison = Comparison(ORIGINAL, OURS, Interval(1.5, 1.4, 1.6), 6, "faster", "", (1000.0, 1500.0), (9 << 20, 8 << 20))
    parity = Parity("ROUNDING", False, "losses 0.2 apart", 4, 0.2, 0.2)
    found = verifying.Verified(rendering, rendering.plan, ("it has no padding",), comparison, parity)
    rows = dict(verified_rows(found))
    assert rows["Speed"] == "1.50 times as fast as the original's way (1.40 to 1.60), over 6 pairs of windows"
    assert rows["Tokens/s"] == "1,500 against 1,000"
    assert rows["Memory"] == "8 MiB against 9 MiB at the peak"
    assert rows["Same losses"] == "NO: losses 0.2 apart"
    assert rows["Differs"] == "it has no padding"
