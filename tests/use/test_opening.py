"""Opening runs, models and adapters, and the sentences for what cannot be opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adapted_models import make_base, with_adapter
from example_folders import seq2seq_folder
from powertrain.data.rows.row import Message
from powertrain.data.tokenizers import load_tokenizer
from powertrain.models.adapters.attached import has_adapters
from powertrain.models.adapters.files import save_model
from powertrain.models.bridge.model import BridgedModel
from powertrain.models.decoder import Decoder
from powertrain.records import WrongUse
from powertrain.use.opening import open_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")      # peft asks it


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_folder_is_a_model_with_its_template_and_its_ends(base_folder: Path) -> None:
    edit(base_folder / "generation_config.json", eos_token_id=[0, 7])
    opened = open_model(str(base_folder))
    assert (opened.found.base, opened.task, opened.choice.provider) == ("", "causal", "native")
    assert (opened.found.run, opened.found.adapter) == (None, None)
    assert isinstance(opened.model, Decoder)
    assert not opened.model.training
    assert opened.context == 96
    assert opened.has_template
    end = opened.chat_tokenizer.library.token_to_id("<|im_end|>")
    assert opened.stops == {0, 7, end}
    text, ids = opened.conversation_ids([Message("user", "hello")])
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(end) == 1
    assert opened.chat_tokenizer.decode(ids) == text


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_an_adapter_opens_on_the_base_that_it_names(adapter_folder: Callable[..., Path], base_folder: Path,
                                                    with_tokenizer: bool) -> None:
    folder = adapter_folder(with_tokenizer=with_tokenizer)
    opened = open_model(str(folder))
    assert (opened.found.adapter, opened.found.base) == (folder, str(base_folder))
    assert has_adapters(opened.model)
    assert opened.found.tokenizer_folder == (folder if with_tokenizer else base_folder)
    assert opened.has_template


def test_a_base_that_moved_is_named_anew(adapter_folder: Callable[..., Path], base_folder: Path, tmp_path: Path) -> None:
    folder = adapter_folder()
    base_folder.rename(tmp_path / "elsewhere")
    with pytest.raises(WrongUse, match=r"belongs on .*base, which is not there any more .*--base PATH"):
        open_model(str(folder))
    assert open_model(str(folder), base=str(tmp_path / "elsewhere")).found.base == str(tmp_path / "elsewhere")
    with pytest.raises(WrongUse, match=r"--base .*nowhere was given"):
        open_model(str(folder), base=str(tmp_path / "nowhere"))


def test_an_adapter_for_another_base_says_what_differs(adapter_folder: Callable[..., Path], tmp_path: Path) -> None:
    save_model(make_base("llama", vocabulary=330, width=32), tmp_path / "other", load_tokenizer(adapter_folder()))
    with pytest.raises(WrongUse, match=r"belongs to another base: its model.layers.0.*is \d+ x \d+"):
        open_model(str(tmp_path / "adapter"), base=str(tmp_path / "other"))
    with pytest.raises(WrongUse, match="leave --base out"):
        open_model(str(tmp_path / "other"), base=str(tmp_path / "other"))


def test_an_adapter_that_names_no_base_asks_for_one(adapter_folder: Callable[..., Path]) -> None:
    folder = adapter_folder()
    edit(folder / "adapter_config.json", base_model_name_or_path=None)
    with pytest.raises(WrongUse, match="does not name its base"):
        open_model(str(folder))


def test_what_is_nothing_of_the_kind_is_said(tmp_path: Path, base_folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, says in ((tmp_path / "empty", "neither a run nor a model"), (tmp_path / "nowhere", "does not exist")):
        with pytest.raises(WrongUse, match=says):
            open_model(str(path))
    with pytest.raises(WrongUse, match="--provider unsloth does not open models"):
        open_model(str(base_folder), provider="unsloth")


def test_an_adapter_that_only_peft_has_goes_over_the_bridge(base_folder: Path, tmp_path: Path) -> None:
    from peft import IA3Config, get_peft_model
    from transformers import AutoModelForCausalLM

    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base_folder), IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]))
    adapted.save_pretrained(tmp_path / "ia3")
    opened = open_model(str(tmp_path / "ia3"), base=str(base_folder))
    assert isinstance(opened.model, BridgedModel)
    assert opened.choice.provider == "transformers"


def test_native_and_bridge_read_an_adapter_alike(adapter_folder: Callable[..., Path]) -> None:
    from powertrain.data.example import Example
    from powertrain.export.merged import all_scores, compare_scores

    folder = str(adapter_folder())
    native, bridged = open_model(folder), open_model(folder, provider="transformers")
    examples = [Example(torch.arange(30).numpy(), torch.arange(30).numpy())]
    assert compare_scores(all_scores(native.model, examples), all_scores(bridged.model, examples)).difference < 1e-4


def test_an_encoder_decoder_frames_its_source(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    seq2seq_folder(tmp_path)
    T5ForConditionalGeneration(T5Config(vocab_size=330, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
                                        decoder_start_token_id=0)).save_pretrained(tmp_path)
    opened = open_model(str(tmp_path))
    assert opened.task == "seq2seq"
    assert opened.context is None
    assert opened.prompt_ids("the cat")[-1] == 1            # </s> behind, as its tokenizer puts it


def test_a_prompt_begins_as_any_text_of_the_tokenizer_does(base_folder: Path) -> None:
    edit(base_folder / "tokenizer_config.json", add_bos_token=True)
    opened = open_model(str(base_folder))
    assert opened.prompt_ids("hello")[:1] == [0]
    assert opened.prompt_ids("hello").count(0) == 1
    assert opened.prompt_ids("<|endoftext|>hello").count(0) == 1           # no second one


def test_an_ls_lora_adapter_opens_and_computes_its_function(base_folder: Path, tmp_path: Path) -> None:
    from powertrain.models.adapters.files import save_adapter

    model = with_adapter(make_base("llama", vocabulary=330, context=96), kind="lslora")
    save_adapter(model, tmp_path / "adapter", base=str(base_folder))
    shutil.copy(base_folder / "tokenizer.json", tmp_path / "adapter")
    opened = open_model(str(tmp_path / "adapter"))
    assert isinstance(opened.model, Decoder)
    assert has_adapters(opened.model)
