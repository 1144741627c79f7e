"""The example store: sources tokenised once into examples, memory-mapped ever after.

    <cache>/examples/<key>/  one source's part, see part.py

The key is a digest of all that decides what is stored: the source's content, the tokenizer, the template, the lengths. Split,
seed and weights are not in it; they are applied to the numbers of the examples, see epoch.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from powertrain.data.example import Compared, Example, StoredExamples
from powertrain.data.examples.encoders import ENCODERS
from powertrain.data.examples.encoding import check_length
from powertrain.data.examples.epoch import Epoch, lengths_of, open_epoch
from powertrain.data.examples.making import Reading, Work, make_part, sharded_part
from powertrain.data.examples.part import Part
from powertrain.data.examples.scores import ReferenceScores
from powertrain.data.examples.sides import joined
from powertrain.data.examples.templates import ChatTemplate, find_template, own_templates
from powertrain.data.examples.tokenizer import ExampleTokenizer, open_example_tokenizer
from powertrain.data.rows.row import Message
from powertrain.data.rows.schemas import ANSWERS
from powertrain.data.shards import Shard, publish_shard
from powertrain.recipe.schema import DataRecipe, check_shares
from powertrain.records import WrongUse
from powertrain.records.findings import Problem
from powertrain.records.phases import Tell, nobody

# ------------------------------------------------------------------------------------------------ the store

WITH_TEMPLATE = ("conversation", "preference", "comparison", "rating")
FEW_TOO_LONG = 0.1                           # a larger share is cut only if that was asked for


@dataclass(frozen=True, eq=False)
class Examples(StoredExamples):
    """Some of a store's examples, in an order."""

    store: "ExampleStore"
    indices: npt.NDArray[np.integer[Any]]    # of stored examples; one may occur several times

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Example:
        return self.store.example(int(self.indices[index]))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens (examples,) that the model reads of each."""
        return lengths_of(self.store.parts, self.indices)


@dataclass(frozen=True, eq=False)
class ExampleStore:
    """N stored examples: those of the sources one after the other, then those of the validation source."""

    parts: tuple[Part, ...]
    sources: tuple[str, ...]                 # of `parts`
    kind: str                                # of samples: rows/formats.py
    schema: str                              # of the first source
    said: tuple[str, ...]                    # sentences about formats, template and rows that are left out
    template: ChatTemplate | None
    tokenizer: ExampleTokenizer              # saved, it has the template that the examples were made with
    max_length: int
    decoder_start: int | None
    epoch: Epoch
    scores: ReferenceScores = field(default_factory=ReferenceScores)     # of compared answers, where a run has them

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def folder(self) -> Path:
        return self.parts[0].folder

    @cached_property
    def training(self) -> Examples:
        return Examples(self, self.epoch.training)

    @cached_property
    def validation(self) -> Examples:
        return Examples(self, self.epoch.validation)

    @cached_property
    def in_validation(self) -> npt.NDArray[np.bool_]:
        """Return whether each example (N,) validates."""
        found = np.zeros(len(self), np.bool_)
        found[self.epoch.validation] = True
        return found

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens (N,) that the model reads of each example, an encoder's included."""
        return lengths_of(self.parts, np.arange(len(self)))

    @cached_property
    def source_lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens (N,) that an encoder reads of each example."""
        return np.concatenate([part.source_lengths for part in self.parts])

    @cached_property
    def trained(self) -> npt.NDArray[np.int64]:
        """Return the number of targets (N,) of each example."""
        return self.column("trained_tokens").astype(np.int64)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Return rows, bad, untrained, cut, dropped, too_long, tokens_lost, untrained_end, boundary, rewritten, examples, ...

        The counts are of the whole store; `longest` is the tokens of its longest row.
        """
        total: Counter[str] = Counter()
        for part in self.parts:
            total.update({name: count for name, count in part.counts.items() if name != "longest"})
        return {**total, "longest": max(part.counts.get("longest", 0) for part in self.parts)}

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return the first rows of each kind of problem, source by source."""
        return tuple(problem for part in self.parts for problem in part.problems)

    def example(self, index: int) -> Example:
        part, within = self.place(index)
        example = part.example(within, self.decoder_start, self.max_length)
        if not isinstance(example, Compared):
            return example
        return replace(example, reference=self.scores.of(index))

    def origins(self, index: int) -> str:
        """Return the file and line that example `index` comes from."""
        part, within = self.place(index)
        return part.origin(within)

    def rows(self) -> npt.NDArray[np.int64]:
        """Return the number of the row (N,) that each example comes from; a long text gives several."""
        return np.concatenate([part.records["row"] + sum(earlier.counts.get("good", 0) for earlier in self.parts[:number])
                               for number, part in enumerate(self.parts)])

    def as_prompt(self, words: str) -> str:
        """Return a user's words as the model reads them: in the template, up to the beginning of the answer."""
        return words if self.template is None else self.template.render([Message("user", words)], add_generation_prompt=True)

    def place(self, index: int) -> tuple[Part, int]:
        """Return the part that holds example `index`, and its number in the part."""
        within = index
        for part in self.parts:
            if 0 <= within < len(part):
                return part, within
            within -= len(part)
        raise IndexError(f"example {index} of {len(self)}")

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column (N,) of part.RECORD: "prompt" and "digest" are equal for examples of equal prompts and rows."""
        return joined([part.records[name] for part in self.parts])


@dataclass(frozen=True, eq=False)
class Found:
    """A recipe's sources, looked at: how each is read and turned into examples. Nothing is tokenised yet."""

    names: tuple[str, ...]                   # of the sources; that of the validation source comes last
    reading: Reading
    works: tuple[Work, ...]
    said: tuple[str, ...]                    # how the rows of each source are read
    tokenizer: ExampleTokenizer
    template: ChatTemplate | None

    @property
    def makings(self) -> list[tuple[str, Reading, Work, str]]:
        """Return the arguments of `make_part` for each source."""
        return [(name, self.reading, work, said) for name, work, said in zip(self.names, self.works, self.said, strict=True)]


def find_sources(data: DataRecipe, *, tokenizer_folder: Path, cache: Path, task: str, learns: str = ANSWERS) -> Found:
    """Return what a recipe's sources are. It needs data.max_length. Raises WrongUse if one of them cannot be used."""
    if data.weights is not None and len(data.weights) != len(data.sources):
        raise WrongUse(f"data.weights has {len(data.weights)} numbers for {len(data.sources)} sources; give one for each")
    if data.shares is not None:
        check_shares(data.shares, data.sources, "data.shares")
        if data.weights is not None:
            raise WrongUse("data.weights and data.shares both say how much an epoch has of each source; keep one of them")
    assert data.max_length is not None
    if learns != ANSWERS and data.train_on != "assistant":
        raise WrongUse(f"data.train_on={data.train_on} trains prompts too, and answers are compared without them; leave it out")
    reading = Reading(data, task, cache, learns)
    names = (*data.sources, *([data.validation_source] if data.validation_source else []))
    found = [reading.look(source) for source in names]
    kind = found[0][0].kind
    for source, (schema, _, _) in zip(names, found, strict=True):
        if schema.kind != kind:
            raise WrongUse(f"{names[0]} holds a {kind} per row and {source} a {schema.kind}, which do not mix in "
                           "one run; train on one of them, or bring both to one format with data.format")
    tokenizer = open_example_tokenizer(tokenizer_folder, data.end_token, task=task)
    texts = all(is_text for _, _, is_text in found)
    template = find_template(tokenizer, data.chat_template, texts=texts) if kind in WITH_TEMPLATE else None
    check_length(kind, data.max_length, tokenizer)
    encoder = ENCODERS[kind](tokenizer, data.max_length, data.long_examples == "drop", template, data.train_on)
    return Found(names, reading, tuple(Work(schema, encoder) for schema, _, _ in found), tuple(said for _, said, _ in found),
                 tokenizer, template)


def shard_examples(data: DataRecipe, shard: Shard, *, tokenizer_folder: Path, cache: Path, task: str = "causal",
                   learns: str = ANSWERS, tell: Tell = nobody) -> Path:
    """Return the folder of one shard of a recipe's examples, for `join_shards`. Raises WrongUse as `find_sources` does."""
    found = find_sources(data, tokenizer_folder=tokenizer_folder, cache=cache, task=task, learns=learns)
    return publish_shard([sharded_part(*making, tell) for making in found.makings], shard, data.model_dump(mode="json"), cache)


def open_examples(data: DataRecipe, *, tokenizer_folder: Path, cache: Path, seed: int = 42, task: str = "causal",
                  decoder_start: int | None = None, learns: str = ANSWERS, tell: Tell = nobody) -> ExampleStore:
    """Return the examples of a recipe's sources, built into `cache` if they are not there yet. It needs data.max_length.

    Raises WrongUse if a source, the tokenizer or the template cannot be used, too many examples are too long, or nothing
    in them would be trained.
    """
    max_length, validation_source = data.max_length, data.validation_source
    assert max_length is not None
    assert task != "seq2seq" or decoder_start is not None
    found = find_sources(data, tokenizer_folder=tokenizer_folder, cache=cache, task=task, learns=learns)
    everything, tokenizer, template = found.names, found.tokenizer, found.template
    parts = [make_part(*making, tell) for making in found.makings]
    for part, source in zip(parts, everything, strict=True):
        if len(part) == 0:
            raise _nothing_left(part, source, max_length)
    if data.long_examples is None and (sentence := undecided(parts, everything, max_length)):
        raise WrongUse(sentence)
    epoch = open_epoch(parts, data, tokenizer.digest, seed=seed, cache=cache)
    said = _said(parts, everything, template, tokenizer)
    if epoch.in_both:
        said += (f"warning: {epoch.in_both:,} prompts of {validation_source} are trained on too; `powertrain data check` names "
                 "them",)
    own = own_templates(tokenizer.files).get("default")
    saved = tokenizer if template is None or template.text == own else replace(tokenizer, template=template.text)
    said += (epoch.said,) if epoch.said else ()
    return ExampleStore(tuple(parts), everything, parts[0].kind, parts[0].schema, said, template, saved, max_length,
                        decoder_start, epoch)


# ------------------------------------------------------------------------------------------------ what is said and refused


def refuse_no_training(store: ExampleStore) -> None:
    """Raise WrongUse if an epoch has no example."""
    if len(store.training):
        return
    count, sources = len(store), ", ".join(store.sources)
    if len(store.validation) == count:
        raise WrongUse(f"all {count:,} examples of {sources} are held out, and none is left to train on; lower "
                       "data.validation_share, or name more data")
    raise WrongUse(f"data.weights is so small that an epoch has none of the {count:,} examples of {sources}; raise it, or name "
                   "more data")


def _said(parts: Sequence[Part], sources: Sequence[str], template: ChatTemplate | None,
          tokenizer: ExampleTokenizer) -> tuple[str, ...]:
    said = [part.said for part in parts]
    if template is not None:
        said.append(f"chat template: {template.name} ({template.because})")
        end = template.turn_end()
        if end is None:
            said.append("warning: the chat template writes no special token behind an answer, so that the model does not learn "
                        "to stop; data.chat_template=plain does")
        elif end != tokenizer.end:
            said.append(f"warning: the chat template ends a turn with {end}, and the tokenizer's end token is {tokenizer.end}, "
                        f"at which other programs stop; use 'data.end_token={end}'")
    for part, source in zip(parts, sources, strict=True):
        said += [f"{source}: {sentence}" for sentence in _left_out(part.counts)]
    return tuple(said)


def _left_out(counts: Mapping[str, int]) -> list[str]:
    sentences = {
        "bad": "{} rows are bad and left out", "untrained": "{} rows have no trained token and are left out",
        "tie": "{} pairs have equal answers and are left out",
        "dropped": "{} rows are too long and left out", "cut": "{} rows are too long and cut",
        "rewritten": "of {} conversations some turns are not trained: the chat template rewrites them later",
        "boundary": "{} prompts have other tokens alone than before their answer"}
    return [sentence.format(f"{counts[name]:,} of {counts['rows']:,}") for name, sentence in sentences.items()
            if counts.get(name)]


def undecided(parts: Sequence[Part], sources: Sequence[str], max_length: int) -> str | None:
    """Return what the user must decide first: a source has many too long examples, and data.long_examples is not set."""
    for part, source in zip(parts, sources, strict=True):
        too_long, rows = part.counts.get("too_long", 0), part.counts["good"]
        if too_long > FEW_TOO_LONG * rows:
            return (f"{too_long:,} of {rows:,} examples of {source} are longer than data.max_length={max_length} (the longest "
                    f"has {part.counts['longest']:,} tokens); raise it if the model can read more, or choose what to do with "
                    f"them: data.long_examples=cut loses {part.counts['tokens_lost']:,} tokens, data.long_examples=drop leaves "
                    "them out")
    return None


def _nothing_left(part: Part, source: str, max_length: int) -> WrongUse:
    counts, first = part.counts, part.problems[0]
    if counts.get("bad", 0) == counts["rows"]:
        return WrongUse(f"all {counts['rows']:,} rows of {source} are bad, the first of them, {first.origin}: {first.reason}")
    if counts.get("too_long"):
        return WrongUse(f"no row of {source} has anything to train on within data.max_length={max_length}: "
                        f"{first.origin}: {first.reason}; raise data.max_length; if the model cannot read longer examples, "
                        "use a model with a longer context")
    return WrongUse(f"all labels are masked: no row of {source} has a token that is trained ({first.origin}: {first.reason}); "
                    "use data.train_on=all, or another data.chat_template if this one gives the assistant no words")
