"""Tiny random models of transformers, and batches for them, that the tests of the bridge share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.bridge.model import BridgedModel
from powertrain.records import IGNORE, Batch, Source

VOCABULARY, CONTEXT = 61, 40
LENGTHS, SOURCES = (5, 1, 23), (7, 31, 2)
TOLERANCE = 1e-6                             # fp32: one sum over the same numbers in another order
LORA = AdapterConfig(r=4, alpha=8)

t = transformers
CONFIGS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {   # name -> task, config class, sizes
    "t5": ("seq2seq", t.T5Config, {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4,
                                   "decoder_start_token_id": 0}),
    "t5-gated": ("seq2seq", t.T5Config, {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4,
                                         "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
                                         "tie_word_embeddings": False}),
    "bart": ("seq2seq", t.BartConfig, {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
                                       "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
                                       "max_position_embeddings": CONTEXT}),
    "bert": ("span", t.BertConfig, {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                                    "intermediate_size": 32, "max_position_embeddings": CONTEXT}),
    "roberta": ("span", t.RobertaConfig, {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                                          "intermediate_size": 32, "max_position_embeddings": CONTEXT + 2,
                                          "pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("span", t.DistilBertConfig, {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32,
                                                "max_position_embeddings": CONTEXT}),
    "opt": ("causal", t.OPTConfig, {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32,
                                    "word_embed_proj_dim": 16, "max_position_embeddings": CONTEXT}),
    "bloom": ("causal", t.BloomConfig, {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "falcon": ("causal", t.FalconConfig, {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}),
    "gpt_neo": ("causal", t.GPTNeoConfig, {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 4,
                                           "attention_types": [[["global", "local"], 1]],
                                           "max_position_embeddings": CONTEXT}),
}
BY_TASK = {task: [name for name, row in CONFIGS.items() if row[0] == task] for task in ("causal", "seq2seq", "span")}
ALL = list(CONFIGS)


def draw(count: int, seed: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def make_batch(task: str, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Batch:
    """Random documents, some of whose targets train nothing."""
    tokens = draw(sum(lengths), seed)
    positions = torch.cat([torch.arange(length) for length in lengths])
    if task == "span":
        targets = torch.tensor([[length // 2, length - 1] for length in lengths]).flatten()
        segments = torch.cat([(torch.arange(length) >= length // 2).long() for length in lengths])
        return Batch(tokens, targets, positions, lengths, len(targets), segments=segments)
    targets = draw(sum(lengths), seed + 1)
    targets[::3] = IGNORE
    source = None
    if task == "seq2seq":
        read = SOURCES[:len(lengths)]
        source = Source(draw(sum(read), seed + 2), read)
    return Batch(tokens, targets, positions, lengths, int((targets != IGNORE).sum()), source=source)


def our_loss(model: BridgedModel, batch: Batch) -> Tensor:
    """As training/setup.py has it."""
    scores = model.logits(model.hidden(batch)).float()
    return F.cross_entropy(scores, batch.targets, ignore_index=IGNORE, reduction="sum") / batch.trained_tokens


def padded(flat: Tensor, lengths: tuple[int, ...], filler: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(flat.split(lengths)), batch_first=True, padding_value=filler)


def finite(scores: Tensor) -> Tensor:
    """Scores without those of padded places."""
    return scores[~torch.isneginf(scores)]


def assert_close(found: Tensor, expected: Tensor, rounding: float = TOLERANCE) -> None:
    """Rounding errors are in proportion to the largest of the scores that they come from."""
    torch.testing.assert_close(found, expected, atol=rounding * max(1.0, float(expected.detach().abs().max())), rtol=0)


def rows_of(batch: Batch, document: int, task: str) -> slice:
    if task == "span":
        return slice(2 * document, 2 * document + 2)
    begin = sum(batch.lengths[:document])
    return slice(begin, begin + batch.lengths[document])


def train_until(model: BridgedModel, batch: Batch, steps: int, rate: float) -> float:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()
    for _ in range(steps):
        loss = our_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(our_loss(model, batch).detach())


class Tokenizer:
    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
