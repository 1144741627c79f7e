"""What a run saves, as others open it: transformers' own classes give the same ids and the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from powertrain.data.tokenizers import make_tokenizer
from powertrain.models.config import FAMILIES, make_config
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.folder import save_folder
from powertrain.records import Batch

TEXT = "def f(x):\n    return  x + 1  # naïve\n"


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_opens_model_and_tokenizer_of_every_family(family: str, kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = make_tokenizer(kind, [TEXT * 20, TEXT[::-1] * 20], 300 if kind == "bpe" else None, several=True)
    torch.manual_seed(0)
    config, _ = make_config(family, vocabulary=tokenizer.vocabulary, layers=2, width=48, heads=3, context=128)
    model = Decoder(config).eval()
    save_folder(model, tmp_path, tokenizer)

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode(TEXT).astype("int64")
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == ids.tolist()
    assert theirs.decode(ids.tolist()) == TEXT
    tokens = torch.from_numpy(ids)
    batch = Batch(tokens, tokens, torch.arange(len(tokens)), (len(tokens),), len(tokens))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(batch), opened(tokens[None]).logits[0], rtol=0, atol=1e-5)
