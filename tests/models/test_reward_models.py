"""Reward models are transformers' sequence classifiers with one label, and PEFT's adapters with a head: equal scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.data.example import Example, collate
from powertrain.models.adapters.attached import add_adapters, merged
from powertrain.models.adapters.files import load_adapter, save_adapter
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import FAMILIES
from powertrain.models.decoder import Decoder, give_reward_head
from powertrain.models.huggingface.folder import load_folder, save_folder
from powertrain.models.huggingface.hub import read_model_json
from powertrain.models.huggingface.providers import REWARD, find_task
from powertrain.records import Batch, WrongUse
from powertrain.records.json_files import write_json

MakeModel, MakeBatch = Callable[..., Decoder], Callable[..., Batch]
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")      # peft asks it
LENGTHS = (5, 1, 33)
TOLERANCE = 2e-5             # fp32, scores around 1: only the order of sums differs


def classifier(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)


def last_scores(model: Decoder, batch: Batch) -> Tensor:
    """Our score of each document at its last token (D, 1)."""
    with torch.no_grad():
        scores = model.logits(model.hidden(batch))
    assert scores.shape == (sum(batch.lengths), 1)
    return scores[torch.tensor(batch.lengths).cumsum(0) - 1]


def their_scores(model: Any, batch: Batch) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(tokens[None]).logits for tokens in batch.tokens.split(batch.lengths)])


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_opens_a_reward_model_with_equal_scores(family: str, tmp_path: Path, tiny_model: MakeModel,
                                                             flat_batch: MakeBatch) -> None:
    model, batch = tiny_model(family), flat_batch(LENGTHS)
    give_reward_head(model)
    save_folder(model.eval(), tmp_path)
    theirs = classifier(tmp_path)
    assert type(theirs).__name__.endswith("ForSequenceClassification")
    torch.testing.assert_close(their_scores(theirs, batch), last_scores(model, batch), atol=TOLERANCE, rtol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_folder(tmp_path / "theirs")
    assert find_task(read_model_json(tmp_path / "theirs" / "config.json")) == REWARD
    torch.testing.assert_close(last_scores(again.eval(), batch), last_scores(model, batch), atol=TOLERANCE, rtol=1e-5)


def test_a_decoder_gets_a_new_head_and_a_reward_model_keeps_its_own(tmp_path: Path, tiny_model: MakeModel) -> None:
    save_folder(tiny_model("llama"), tmp_path / "base")
    torch.manual_seed(3)
    first = load_folder(tmp_path / "base", dtype=torch.bfloat16, rewards=True)
    assert first.head_weight.shape == (1, 48)
    assert first.head_weight.dtype is torch.float32
    save_folder(first.float(), tmp_path / "scorer")
    assert torch.equal(load_folder(tmp_path / "scorer", rewards=True).head_weight, first.head_weight)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_opens_the_adapter_and_its_head_and_we_open_peft_s(family: str, tmp_path: Path, tiny_model: MakeModel,
                                                                flat_batch: MakeBatch) -> None:
    import peft

    base, batch = tiny_model(family), flat_batch(LENGTHS)
    save_folder(base, tmp_path / "base")
    model = load_folder(tmp_path / "base", rewards=True)
    add_adapters(model, AdapterConfig(r=4, alpha=8))
    assert [name for name, weight in model.named_parameters() if weight.requires_grad and ".adapters." not in name] == [
        "head.weight"]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.3)
    ours = last_scores(model.eval(), batch)
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(classifier(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(their_scores(theirs, batch), ours, atol=TOLERANCE, rtol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_folder(tmp_path / "base", rewards=True)
    load_adapter(again, tmp_path / "theirs")
    torch.testing.assert_close(last_scores(again.eval(), batch), ours, atol=TOLERANCE, rtol=1e-5)
    torch.testing.assert_close(last_scores(merged(again), batch), ours, atol=TOLERANCE, rtol=1e-5)


def test_an_adapter_of_a_reward_model_is_none_for_a_model_that_writes(tmp_path: Path, tiny_model: MakeModel) -> None:
    save_folder(tiny_model("llama"), tmp_path / "base")
    model = load_folder(tmp_path / "base", rewards=True)
    add_adapters(model, AdapterConfig(r=4, alpha=8))
    save_adapter(model, tmp_path / "adapter", base="base")
    with pytest.raises(WrongUse, match="reward model"):
        load_adapter(load_folder(tmp_path / "base"), tmp_path / "adapter")


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path, tiny_model: MakeModel) -> None:
    model = tiny_model("llama")
    give_reward_head(model)
    save_folder(model, tmp_path)
    write_json(tmp_path / "config.json", read_model_json(tmp_path / "config.json") | {"id2label": {"0": "a", "1": "b"}})
    with pytest.raises(WrongUse, match="classifier of 2 labels, and a reward model has one"):
        load_folder(tmp_path)


def test_padding_is_named_only_where_no_text_ends_in_it(tmp_path: Path, tiny_model: MakeModel) -> None:
    class Tokenizer:
        def __init__(self, pad: str) -> None:
            self.pad = pad

        def save(self, folder: Path) -> None:
            write_json(folder / "tokenizer_config.json", {"pad_token": self.pad})
            added = [{"id": 7, "content": "<end>"}, {"id": 9, "content": "<pad>"}]
            write_json(folder / "tokenizer.json", {"added_tokens": added})

    model = tiny_model("llama", end_of_text=7)
    give_reward_head(model)
    for pad, expected in (("<pad>", 9), ("<end>", None)):
        save_folder(model, tmp_path / pad, Tokenizer(pad))
        assert read_model_json(tmp_path / pad / "config.json")["pad_token_id"] == expected
    documents = [torch.tensor([3, 9 + 1, 7]), torch.tensor([4, 7])]
    batch = collate([Example(ids.numpy(), ids.numpy()) for ids in documents])
    padded = torch.tensor([[3, 10, 7], [4, 7, 9]])
    with torch.no_grad():
        theirs = classifier(tmp_path / "<pad>")(padded, attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0]])).logits
    torch.testing.assert_close(theirs, last_scores(model.eval(), batch), atol=TOLERANCE, rtol=1e-5)
