"""Models of transformers and peft behind `Model`: the flat batch laid out in padded rows, their scores laid flat again.

Padding stands behind each document, under an attention mask, and no row of scores is taken from it. Encoder-decoders get
the decoder's inputs as they are in the batch and no labels, so nothing is shifted here: the data room did it once.

`Reader` and `Writer` give the scores of what follows a prompt, by the library's cache of keys and values where a model has
one; without it the whole document is read again for each token. Drawing tokens is use/generation.py's.

Legend: B documents, L tokens of the longest, T tokens of the flat batch, V classes.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powertrain.models.bridge.adapters import save_adapter_files
from powertrain.models.huggingface.folder import disk_errors
from powertrain.models.kernels.attention import Attention, math_attention
from powertrain.models.model import Model, RunBlock, SavedTokenizer, evaluating, sent
from powertrain.records import Batch, WrongUse

LONGEST_ANSWER = 30                          # tokens; transformers' examples/pytorch/question-answering
POSITION_TABLE = re.compile(r"(^|\.)(wpe|(?!rel)\w*positions?(_embed\w*)?)$")     # names of tables of absolute positions


class Layout:
    """Where the T tokens of documents laid end to end lie in rows of L."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        self.lengths, longest = lengths, max(lengths)
        rows = [torch.arange(length) + row * longest for row, length in enumerate(lengths)]
        self.places = sent(torch.cat(rows), device)      # (T,) int64, in the flattened (B, L)

    def put(self, flat: Tensor, filler: int) -> Tensor:
        """Return `flat` (T,) as padded rows (B, L), with `filler` behind each document."""
        padded = flat.new_full((len(self.lengths) * max(self.lengths),), filler)
        return padded.index_copy(0, self.places, flat).view(len(self.lengths), -1)

    def mask(self) -> Tensor:
        """Return the attention mask (B, L) int64: 1 at tokens, 0 at padding."""
        return self.put(torch.ones_like(self.places), 0)

    def take(self, padded: Tensor) -> Tensor:
        """Return the rows of the tokens (T, V) from `padded` (B, L, V)."""
        flat = padded.flatten(0, 1)
        return flat if len(flat) == len(self.places) else flat.index_select(0, self.places)


class BridgedModel(Model):
    """A model of transformers, or one with PEFT's adapters on it. Its `hidden` gives scores already."""

    def __init__(self, library: nn.Module, *, task: str, base: str = "") -> None:
        super().__init__()
        self.library, self.task, self.base = library, task, base
        forward = inspect.signature(self.network.forward).parameters
        self.takes = frozenset(name for name, parameter in forward.items() if parameter.kind is not parameter.VAR_KEYWORD)
        self.takes_more = len(self.takes) < len(forward)
        # tokens that can be read or written, and of a source; None where positions have no end
        self.context = position_reach(self.network, lambda name: task != "seq2seq" or "encoder." not in name)
        self.source_context = position_reach(self.network, lambda name: "encoder." in name) if task == "seq2seq" else None

    @property
    def network(self) -> Any:
        """Return transformers' model, with the adapters in it if it has some."""
        return self.library.get_base_model() if self.has_adapters else self.library  # type: ignore[operator]

    @property
    def input_embeddings(self) -> list[nn.Module]:
        named = self.network.get_input_embeddings()
        return [module for module in self.network.modules() if module is named or (
            isinstance(module, nn.Embedding) and module.weight is named.weight)]

    @property
    def has_adapters(self) -> bool:
        return hasattr(self.library, "peft_config")

    def hidden(self, batch: Batch, *, attention: Attention = math_attention,
               run_block: RunBlock | None = None) -> Tensor:
        """Return the scores (R, classes). Raises WrongUse for a document that is longer than the model's positions reach."""
        del attention, run_block             # the library has its own kernels and blocks
        for lengths, reach in ((batch.lengths, self.context),
                               (batch.source.lengths if batch.source else (0,), self.source_context)):
            if reach is not None and max(lengths) > reach:
                raise WrongUse(f"a document of {max(lengths)} tokens is longer than the {reach} positions of this "
                               f"{self.network.config.model_type} model; use data.max_length={reach} or less")
        layout = Layout(batch.lengths, batch.tokens.device)
        if self.task == "span":
            return self._spans(batch, layout)
        inputs = self._targets(batch, layout) if self.task == "seq2seq" else self._tokens(batch, layout)
        if "use_cache" in self.takes or self.takes_more:
            inputs["use_cache"] = False
        return layout.take(self.network(**inputs).logits)

    def _tokens(self, batch: Batch, layout: Layout) -> dict[str, Any]:
        given = {"input_ids": layout.put(batch.tokens, self._filler), "attention_mask": layout.mask()}
        return given if "attention_mask" in self.takes else {"input_ids": given["input_ids"]}

    def _targets(self, batch: Batch, layout: Layout) -> dict[str, Any]:
        if batch.source is None:
            raise WrongUse("an encoder-decoder learns from pairs of a source and a target, and these examples have no source; "
                           "use a decoder for them, or data with two columns such as document and summary")
        source = Layout(batch.source.lengths, batch.tokens.device)
        return {"input_ids": source.put(batch.source.tokens, self._filler), "attention_mask": source.mask(),
                "decoder_input_ids": layout.put(batch.tokens, self._filler), "decoder_attention_mask": layout.mask()}

    def _spans(self, batch: Batch, layout: Layout) -> Tensor:
        """Return (2B, L): each document's scores for the answer's first token, then for its last; -inf where padded."""
        inputs = self._tokens(batch, layout)
        types = getattr(self.network.config, "type_vocab_size", 2)
        if batch.segments is not None and "token_type_ids" in self.takes and types > 1:
            inputs["token_type_ids"] = layout.put(batch.segments, 0)
        found = self.network(**inputs)
        scores = torch.stack((found.start_logits, found.end_logits), dim=1)          # (B, 2, L)
        return scores.masked_fill(layout.mask()[:, None] == 0, -torch.inf).flatten(0, 1)

    @property
    def _filler(self) -> int:
        """Return the padding token, which some models leave out when they count positions, or 0, which is masked as well."""
        given = getattr(self.network.config, "pad_token_id", None)
        return given if isinstance(given, int) and given >= 0 else 0

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `hidden` (R, classes) unchanged: the scores are computed already."""
        return hidden

    def save(self, folder: Path, tokenizer: SavedTokenizer | None = None) -> None:
        """Write the whole model as transformers does, or the adapters as PEFT does; safetensors. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.has_adapters:
            save_adapter_files(self.library, folder, base=self.base)
        else:
            with quietly(), disk_errors(folder):
                self.network.save_pretrained(folder)
            for path in folder.glob("*.safetensors"):    # the library's own permissions are 0600
                path.chmod((folder / "config.json").stat().st_mode)
        if tokenizer is not None:
            tokenizer.save(folder)


def merge_bridged(model: BridgedModel) -> BridgedModel:
    """Return a model without adapters that computes the same. The given model is used up.

    Raises WrongUse for a 4-bit base, whose weights cannot take the change up: load the unquantised one.
    """
    if getattr(model.network, "is_loaded_in_4bit", False):
        raise WrongUse("an adapter cannot be merged into a base in 4 bits, because rounding would erase the adapter; load the "
                       "unquantised base with the adapter, and merge that")
    if not model.has_adapters:
        raise WrongUse("the model has no adapter to merge; export it as it is")
    library: Any = model.library
    return BridgedModel(library.merge_and_unload(), task=model.task, base=model.base)


def position_reach(network: nn.Module, counts: Callable[[str], bool]) -> int | None:
    """Return how many tokens the tables of absolute positions reach whose name `counts` accepts; None without such a table."""
    reaches = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding) and POSITION_TABLE.search(name) and counts(name):
            # rows that no token uses: OPT's and BART's tables start at an offset, RoBERTa's behind the padding token
            offset = getattr(module, "offset", None)
            skipped = int(offset) if isinstance(offset, int) else 0 if module.padding_idx is None else module.padding_idx + 1
            reaches.append(module.num_embeddings - skipped)
    return min(reaches, default=None)


@contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers' progress bars and notes: what matters in them is checked here and raised as an error."""
    from transformers.utils import logging as library_logging

    logging: Any = library_logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# ------------------------------------------------------------------------------------------------ use


class Reader:
    """A decoder that is fed a document in pieces and tells the scores of what comes next.

    The caller puts the model in evaluation, turns gradients off, and stays within the model's context.
    """

    def __init__(self, model: BridgedModel) -> None:
        self.model, self.network = model, model.network
        self.device = next(model.parameters()).device
        self.ids: list[int] = []
        self.cache: Any = None

    def __call__(self, fresh: Sequence[int]) -> Tensor:
        """Return the scores (V,) fp32 of the token that follows `fresh`, the document's next tokens."""
        self.ids += fresh
        read = self.ids if self.cache is None else list(fresh)
        found = self.network(**self.inputs(torch.tensor([read], device=self.device)))
        self.cache = getattr(found, "past_key_values", None) if "past_key_values" in self.model.takes else None
        scores: Tensor = found.logits[0, -1].float()
        return scores

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        takes = self.model.takes
        given: dict[str, Any] = {"input_ids": tokens}
        if "past_key_values" in takes:
            given["past_key_values"] = self.cache
        if "use_cache" in takes or self.model.takes_more:
            given["use_cache"] = "past_key_values" in takes
        if "attention_mask" in takes:
            given["attention_mask"] = torch.ones(1, len(self.ids), dtype=torch.int64, device=self.device)
        return given


class Writer(Reader):
    """The decoder of an encoder-decoder; its encoder reads the source once. Raises WrongUse for one beyond its positions."""

    def __init__(self, model: BridgedModel, source: Sequence[int]) -> None:
        super().__init__(model)
        if model.source_context is not None and len(source) > model.source_context:
            raise WrongUse(f"the prompt has {len(source)} tokens, and the encoder of this {self.network.config.model_type} "
                           f"reads {model.source_context}; shorten it")
        self.source = torch.tensor([list(source)], device=self.device)
        self.read: Any = None

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        mask = torch.ones_like(self.source)
        if self.read is None:
            self.read = self.network.get_encoder()(input_ids=self.source, attention_mask=mask)
        return {"encoder_outputs": self.read, "attention_mask": mask, "decoder_input_ids": tokens,
                "past_key_values": self.cache, "use_cache": True}


def best_span(model: BridgedModel, batch: Batch, context: tuple[int, int], *,
              most_tokens: int = LONGEST_ANSWER) -> tuple[int, int, float]:
    """Return the likeliest answer in a document: its first token, its last token, and its log-probability (nats).

    `context` is the first token of the context and the first one behind it. The probability is over all places of the
    document, so that of several windows of one context the likeliest may be taken. Raises WrongUse for a model of another task.
    """
    if model.task != "span":
        raise WrongUse(f"this model is for {model.task}, which marks no answer in a text; use a model for spans")
    assert len(batch.lengths) == 1, f"{len(batch.lengths)} documents"
    first, stop = context
    with evaluating(model), torch.no_grad():
        starts, ends = model.hidden(batch).float().log_softmax(-1).cpu()[:, first:stop]              # (2, L)
    allowed = torch.ones(stop - first, stop - first).triu().tril(most_tokens - 1) > 0
    pairs = (starts[:, None] + ends[None]).masked_fill(~allowed, -torch.inf)
    start, end = divmod(int(pairs.argmax()), stop - first)
    return first + start, first + end, float(pairs[start, end])
