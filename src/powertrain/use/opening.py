"""Opening a trained model: a run, a model's folder or hub id, or an adapter on its base, with tokenizer and template."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from powertrain.data.examples.templates import ChatTemplate, Tools, find_template, own_templates
from powertrain.data.examples.tokenizer import ExampleTokenizer, open_example_tokenizer
from powertrain.data.rows.row import Message
from powertrain.data.table_tokenizers import marked_kind, utf8
from powertrain.data.tokenizers import KINDS, load_tokenizer, named_tokens
from powertrain.facts.software import read_software
from powertrain.models.adapters.attached import freeze
from powertrain.models.adapters.files import load_adapter, read_adapter_config
from powertrain.models.bridge.loading import load_bridged
from powertrain.models.bridge.model import BridgedModel
from powertrain.models.decoder import Decoder
from powertrain.models.huggingface.folder import load_folder
from powertrain.models.huggingface.hub import ADAPTER_CONFIG, CONFIG, HUB_ID, TOKENIZERS, find_model, read_model_json
from powertrain.models.huggingface.providers import REWARD, Choice, choose_provider
from powertrain.models.model import Model
from powertrain.recipe import Recipe
from powertrain.records import WrongUse
from powertrain.run.folder import NEWEST, RunFolder, newest_run, recipe_of
from powertrain.run.material import TextTokenizer
from powertrain.training.setup import fastest_device
from powertrain.use.decode import why_no_step
from powertrain.use.generation import stream

TASKS = {"CAUSAL_LM": "causal", "SEQ_2_SEQ_LM": "seq2seq", "QUESTION_ANS": "span",
         "SEQ_CLS": "reward"}       # PEFT's names


@dataclass(frozen=True)
class Found:
    """The files of a run, a model or an adapter; nothing is loaded yet."""

    path: Path                               # as named, or where the hub's files are
    run: Path | None                         # the run, if it is one
    folder: Path                             # config.json and the weights: of the base, if there is an adapter
    adapter: Path | None
    base: str                                # the base that the adapter names, or that was named instead

    @property
    def tokenizer_folder(self) -> Path:
        """Return the adapter's folder if it has its own tokenizer, as an adapter trained here has; else the base's."""
        has_own = self.adapter is not None and any((self.adapter / name).is_file() for name in TOKENIZERS)
        return self.adapter if has_own and self.adapter is not None else self.folder

    @property
    def recipe(self) -> Recipe | None:
        return recipe_of(RunFolder(self.run)) if self.run else None


@dataclass(frozen=True, eq=False)
class OpenedModel:
    found: Found
    model: Model                             # evaluating, in fp32 unless asked otherwise
    choice: Choice                           # the decoder or library that computes it, and its task
    tokenizer: TextTokenizer

    @property
    def task(self) -> str:
        return self.choice.task

    @cached_property
    def context(self) -> int | None:
        """Return the most tokens of prompt and answer together; None where positions have no end."""
        if isinstance(self.model, Decoder):
            return self.model.config.context
        assert isinstance(self.model, BridgedModel), type(self.model)
        if self.model.context is not None or self.task != "causal":
            return self.model.context
        trained = getattr(self.model.network.config, "max_position_embeddings", None)    # rotary: further, but untrained
        return None if trained is None else int(trained)

    @cached_property
    def has_template(self) -> bool:
        """Return whether the tokenizer has a chat template of its own."""
        return isinstance(self.tokenizer, ExampleTokenizer) and bool(own_templates(self.tokenizer.files))

    @cached_property
    def chat_tokenizer(self) -> ExampleTokenizer:
        """Return the tokenizer that reads a template's special tokens as such."""
        if isinstance(self.tokenizer, ExampleTokenizer):
            return self.tokenizer
        return open_example_tokenizer(self.found.tokenizer_folder)

    @cached_property
    def template(self) -> ChatTemplate:
        """Return the tokenizer's chat template, or a plain one. Raises WrongUse for a broken one."""
        return find_template(self.chat_tokenizer, None)

    @cached_property
    def stops(self) -> frozenset[int]:
        """Return the tokens that end a text: the end of text, and all in config.json and generation_config.json."""
        ends = {self.tokenizer.end_of_text}
        for name in (CONFIG, "generation_config.json"):
            file = self.found.folder / name
            given = read_model_json(file).get("eos_token_id") if file.is_file() else None
            ends.update(given if isinstance(given, list) else [given])
        return frozenset(int(end) for end in ends if end is not None)

    @cached_property
    def turn_stops(self) -> frozenset[int]:
        """Return the tokens that end a turn of the assistant."""
        ends = (self.template.turn_end(), self.template.call_end())
        tokens = [self.chat_tokenizer.library.token_to_id(end) for end in ends if end is not None]
        return self.stops | {int(token) for token in tokens if token is not None}

    @property
    def stored_dtype(self) -> str:
        """Return the dtype of the base's files by torch's name, from config.json."""
        return stored_dtype(self.found.folder)

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of a text to continue or of a source to answer, in the tokenizer's frame. They may be none."""
        ids = [int(token) for token in self.tokenizer.encode(text)]
        if not isinstance(self.tokenizer, ExampleTokenizer):
            return ids
        before, behind = self.tokenizer.frame
        before = () if before and tuple(ids[:len(before)]) == before else before
        return [*before, *ids, *behind] if self.task == "seq2seq" else [*before, *ids]

    def conversation_ids(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[str, list[int]]:
        """Return the exact text that asks the assistant for its next turn, and its tokens."""
        text = self.template.render(messages, add_generation_prompt=True, tools=tools)
        utf8(text)                           # refuses what is no character, as a terminal may send it
        return text, list(self.chat_tokenizer.library.encode(text, add_special_tokens=False).ids)

    def answer_pieces(self, prompt: Sequence[int], drawn: Iterator[int]) -> Iterator[str]:
        """Yield the text of the ids `drawn` after `prompt`, up to the end of the turn."""
        if self.task == "causal":
            return stream(self.chat_tokenizer, prompt[-1:], drawn, self.turn_stops)
        return stream(self.tokenizer, [], drawn, self.stops)


def open_model(path: str, *, base: str | None = None, provider: str | None = None, revision: str | None = None,
               writes: bool = False, say: Callable[[str], None] = lambda _: None) -> OpenedModel:
    """Load the model at `path` on the GPU if there is one; `base` is the present place of an adapter's base.

    A QLoRA run opens on its base as it was published, not in 4 bits, and in fp32. A model that `writes` text is frozen; on a
    CPU its weights in bf16 stay so where the decode step reads them: that is half of what has to be read for a token. Its
    prompts are then read with products in bf16, if the processor has them.
    Raises WrongUse for files that are missing, incomplete, or do not belong together.
    """
    if provider not in (None, "native", "transformers"):
        raise WrongUse(f"--provider {provider} does not open models; use native or transformers, or leave it out")
    found = find_parts(path, base=base, revision=revision)
    choice = choose(found, provider)
    if found.adapter is not None:
        recipe = found.recipe
        unquantised = ", which here is not in 4 bits as it was in training" if recipe and recipe.method == "qlora" else ""
        say(f"putting the adapter {found.adapter} on {found.base}{unquantised}")
    on_cpu = fastest_device().type == "cpu"
    model = load_parts(found, choice, keeps_bf16=writes and on_cpu).to(fastest_device()).eval()
    if writes:
        model.requires_grad_(False)          # a model that trains has no decode step
    if writes and on_cpu and isinstance(model, Decoder) and choice.task == "causal" and (why := why_no_step(model)):
        say(f"torch computes the tokens, and more slowly: {why}")
        model.float()                        # once, and not for every token
    return OpenedModel(found, model, choice, open_tokenizer(found.tokenizer_folder))


def stored_dtype(folder: Path) -> str:
    """Return the dtype of a model's files by torch's name, from config.json."""
    config = read_model_json(folder / CONFIG)
    said = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return said if said in ("bfloat16", "float16") else "float32"


def refuse_no_writer(opened: OpenedModel, path: str | Path) -> None:
    """Raise WrongUse for a model that writes no text."""
    if opened.task == "span":
        raise WrongUse(f"{path} marks answers within a text and writes no text; measure it with `powertrain evaluate {path} "
                       "--metric auto --data FILE`")
    if opened.task == REWARD:
        raise WrongUse(f"{path} is a reward model, which scores answers and writes none; measure it with `powertrain evaluate "
                       f"{path} --data PAIRS`, or name the model that it was made from")


def find_parts(path: str, *, base: str | None = None, revision: str | None = None) -> Found:
    """Return the files at `path`. Raises WrongUse where a part is missing."""
    named = newest_run(path.removeprefix(NEWEST)) if path.startswith(NEWEST) else Path(path).expanduser()
    if not named.exists() and (not HUB_ID.fullmatch(path) or named.parent.is_dir()):
        raise WrongUse(f"{path} does not exist; `powertrain runs list` shows the runs")
    named = named if named.exists() else find_model(path, revision=revision)
    run = named if (named / "recipe.yaml").is_file() else None
    folder = named / "model" if (named / "model").is_dir() else named
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
        name, base_folder = find_base_of(folder, base)
        return Found(named, run, base_folder, folder, name)
    if base is not None:
        raise WrongUse(f"--base {base} is for an adapter, and {path} is a whole model; leave --base out")
    if not (folder / CONFIG).is_file():
        if run is not None:
            raise WrongUse(f"the run {path} has no model yet; finish it by `powertrain train --resume {path}`")
        raise WrongUse(f"{path} holds neither a run nor a model (config.json is missing)")
    return Found(named, run, folder, None, "")


def find_base_of(adapter: Path, given: str | None) -> tuple[str, Path]:
    """Return the base's name and its folder. Raises WrongUse if there is no such folder."""
    config = read_model_json(adapter / ADAPTER_CONFIG)
    name = given or config.get("base_model_name_or_path")
    if not name:
        raise WrongUse(f"the adapter {adapter} does not name its base; name it with --base PATH")
    try:
        folder = find_model(str(name), revision=None if given else config.get("revision"))
    except WrongUse as error:
        belongs = f"--base {given} was given for the adapter" if given else f"it belongs on {name}, which is not there any more"
        raise WrongUse(f"the adapter {adapter} cannot be opened: {belongs} ({error.reason}); name the folder of its base with "
                       "--base PATH") from error
    folder = folder / "model" if (folder / "model").is_dir() else folder
    if not (folder / CONFIG).is_file():
        raise WrongUse(f"the base {name} of the adapter {adapter} holds no model (config.json is missing); name the folder of "
                       "its base with --base PATH")
    return str(name), folder


def choose(found: Found, provider: str | None) -> Choice:
    """Choose what computes the model: the same as in the run, else Powertrain's decoder if it has the architecture."""
    recipe, config = found.recipe, read_model_json(found.folder / CONFIG)
    wanted = provider or (recipe.model.provider if recipe else None)
    task: str | None = recipe.model.task if recipe else None
    if found.adapter is not None:
        task = task or TASKS.get(str(read_model_json(found.adapter / ADAPTER_CONFIG).get("task_type")))
        wanted = wanted or ("transformers" if is_for_peft_only(found.adapter) else None)
    if wanted == "unsloth":                  # is for training only; its files open natively or in transformers
        wanted = None
    return choose_provider(config, wanted, task, read_software())


def is_for_peft_only(adapter: Path) -> bool:
    """Return whether the adapter is of a kind that Powertrain's decoder does not have, and peft may."""
    try:
        read_adapter_config(adapter)
    except WrongUse:
        return True
    return False


def load_parts(found: Found, choice: Choice, *, keeps_bf16: bool) -> Model:
    if choice.provider == "native":
        keeps_bf16 = keeps_bf16 and stored_dtype(found.folder) == "bfloat16"
        decoder = load_folder(found.folder, dtype=None if keeps_bf16 else torch.float32, rewards=choice.task == REWARD)
        decoder.base = found.base or str(found.folder)
        if keeps_bf16:
            freeze(decoder)                  # products in fp32, whatever the weights are stored in
        if found.adapter is not None:
            load_adapter(decoder, found.adapter)
        return decoder
    recipe: Any = found.recipe
    method = "lora" if found.adapter else "full"
    return load_bridged(found.folder, task=choice.task, method=method, adapter_folder=found.adapter,
                        trust_remote_code=bool(recipe and recipe.model.trust_remote_code),
                        revision=recipe.model.revision if recipe else None, base=found.base or None)


def open_tokenizer(folder: Path) -> TextTokenizer:
    """Open the tokenizer of a model: its own if it was trained here, else one with the special tokens of conversations."""
    if marked_kind(folder) in KINDS or "eos_token" not in named_tokens(folder):
        return load_tokenizer(folder)
    return open_example_tokenizer(folder)
