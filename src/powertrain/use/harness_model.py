"""A trained model as lm-eval asks it: log-likelihoods of texts, and greedy or sampled continuations. It loads lm-eval.

Tokens, windows and cuts are those of lm-eval's own backend for transformers, so that both give the same numbers. Requests are
computed in flat passes, without padding: several documents end to end, each by itself.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from transformers import AutoTokenizer

from powertrain.models.kernels.attention import sdpa_attention
from powertrain.models.model import evaluating
from powertrain.records import IGNORE, Batch, WrongUse
from powertrain.run.material import DEFAULT_LENGTH
from powertrain.use.generation import Sampling, generate_ids, open_feed
from powertrain.use.opening import OpenedModel

PASS_TOKENS = 4096           # of the documents in one pass
ANSWER_TOKENS = 256          # of a continuation whose task sets no number
NEUTRAL = ("do_sample", "temperature", "top_k", "top_p", "until")        # settings of a continuation that are known here
Asked = tuple[list[int], list[int]]          # the tokens that are read, and those that follow them and are scored


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """An opened model that continues text."""

    def __init__(self, opened: OpenedModel) -> None:
        super().__init__()
        self.opened = opened
        self.tokenizer = AutoTokenizer.from_pretrained(opened.found.tokenizer_folder)
        self.max_length = opened.context or DEFAULT_LENGTH
        self._device = next(opened.model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        end = self.tokenizer.eos_token_id
        if end is None:
            raise WrongUse(f"the tokenizer in {self.opened.found.tokenizer_folder} names no end of text (eos_token), with "
                           "which lm-eval begins each text; use a tokenizer that has one")
        return int(end)

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        return str(self.opened.found.tokenizer_folder).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, with the special ones that its tokenizer adds, unless the text begins with them."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return [int(token) for token in self.tokenizer.encode(string, **given)]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the tokenizer's chat template writes it."""
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
                                                      continue_final_message=not add_generation_prompt))

    # ---------------------------------------------------------------------------------------- log-likelihoods

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        """Return for each request the log-likelihood of its continuation, and whether it is the likeliest one at each token."""
        asked = [self._cut(context, continuation) for _, context, continuation in requests]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(asked)
        with torch.no_grad(), evaluating(self.opened.model):
            for numbers in _passes(asked):
                for number, scored in zip(numbers, self._scores([asked[number] for number in numbers]), strict=True):
                    found[number] = scored
        return found

    def _cut(self, context: list[int], continuation: list[int]) -> Asked:
        """Return what is read, cut at its beginning where it is longer than the context, and what is scored after it."""
        if len(continuation) > self.max_length:
            raise WrongUse(f"a task has a continuation of {len(continuation):,} tokens, and the model reads "
                           f"{self.max_length:,}; leave that example out, or use a model with a longer context")
        read = (context + continuation)[-(self.max_length + 1):][:-1]
        return read, continuation

    def _scores(self, asked: Sequence[Asked]) -> Iterator[tuple[float, bool]]:
        """Yield what is asked of each document of one pass."""
        lengths = tuple(len(read) for read, _ in asked)
        tokens = torch.tensor([token for read, _ in asked for token in read], device=self._device)
        positions = torch.cat([torch.arange(length, device=self._device) for length in lengths])
        batch = Batch(tokens, torch.full_like(tokens, IGNORE), positions, lengths, 0)
        model = self.opened.model
        hidden = model.hidden(batch, attention=sdpa_attention)
        ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        for (_, end), (_, wanted) in zip(pairwise(ends), asked, strict=True):
            logits: Tensor = model.logits(hidden[end - len(wanted):end]).float()         # (tokens, V)
            targets = torch.tensor(wanted, device=self._device)
            shares = torch.log_softmax(logits, -1).gather(-1, targets[:, None])
            yield float(shares.sum()), bool((logits.argmax(-1) == targets).all())

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the context, each token predicted once."""
        found = []
        for text, in (request.args for request in requests):
            windows = get_rolling_token_windows(token_list=self.tok_encode(text), prefix_token=self.prefix_token_id,
                                                max_seq_len=self.max_length, context_len=1)
            asked = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(score for score, _ in self._loglikelihood_tokens(asked)))
        return found

    # ---------------------------------------------------------------------------------------- continuations

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to the end of text, one of the task's stops, or its length."""
        return [self._continued(*request.args) for request in requests]

    def _continued(self, context: str, given: dict[str, Any]) -> str:
        settings = normalize_gen_kwargs(given, ANSWER_TOKENS)
        tokens = settings.pop("max_gen_toks")
        stops = handle_stop_sequences(settings.get("until"), eos=self.tokenizer.decode(self.eot_token_id))
        if unknown := sorted(set(settings) - set(NEUTRAL)):
            raise WrongUse(f"the task's generation_kwargs has {', '.join(unknown)}, which the model cannot follow here; take "
                           "it out of the task's file")
        if tokens >= self.max_length:
            raise WrongUse(f"the task asks for answers of {tokens} tokens, and the model reads {self.max_length} in all; lower "
                           "max_gen_toks in the task's file")
        temperature = float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0
        sampling = Sampling(tokens, temperature, settings.get("top_k"), settings.get("top_p"))
        read = self.tok_encode(context)[-(self.max_length - tokens):]
        feed, fed = open_feed(self.opened.model, read)
        ids, ends = list[int](), self.opened.stops | {self.eot_token_id}
        for token in generate_ids(feed, fed, sampling):
            ids.append(token)
            if token in ends or any(stop and stop in self._text(ids) for stop in stops):
                break
        return str(postprocess_generated_text(self._text(ids), stop=stops, think_end_token=None))

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def _passes(asked: Sequence[Asked]) -> Iterator[list[int]]:
    """Yield the numbers of the requests of each pass, the longest first."""
    order = sorted(range(len(asked)), key=lambda number: -len(asked[number][0]))
    held: list[int] = []
    for number in order:
        if held and sum(len(asked[other][0]) for other in held) + len(asked[number][0]) > PASS_TOKENS:
            yield held
            held = []
        held.append(number)
    if held:
        yield held
