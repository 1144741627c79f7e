"""Chat templates: a conversation as one text, and which characters of it are to be learned.

A template is Jinja, run by transformers' own sandbox, so that a text is what apply_chat_template gives. What is trained
is found by the template's {% generation %} marks, else by rendering the conversation up to each of the assistant's turns:
a turn begins where the prompt that asks for it ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from powertrain.data.examples.shapes import Layout, find_layout, plainly_rendered, writes_contents_only
from powertrain.data.examples.tokenizer import ExampleTokenizer, Place
from powertrain.data.rows.row import BadRow, Message
from powertrain.data.tokenizers import CONFIG, TEMPLATE_FILE
from powertrain.records import WrongUse
from powertrain.records.json_files import read_json

MOST_LAYOUTS = 1000          # orders of roles that are remembered
GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
MARKED = ("<|im_start|>", "<|im_end|>")      # what chatml needs in the vocabulary

# expressions, not template text: what stands between Jinja's blocks would lose its line ends
SHIPPED: Mapping[str, str] = {
    "plain": "{% for message in messages %}"
             "{{ '### ' + (message['role'] | capitalize) + ':\\n' + message['content'] }}"
             "{{ (eos_token if message['role'] == 'assistant' else '') + '\\n\\n' }}"
             "{% endfor %}{{ '### Assistant:\\n' if add_generation_prompt else '' }}",
    "chatml": "{% for message in messages %}"
              "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
              "{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}",
    "raw": "{% for message in messages %}"
           "{{ message['content'] + (eos_token if message['role'] == 'assistant' else '') }}{% endfor %}",
}


class Marked(NamedTuple):
    text: str
    trained: list[Place]
    only_last: bool                          # the template rewrites earlier turns: only the last one is trained


@dataclass(frozen=True)
class ChatTemplate:
    name: str                                # "plain", "chatml", "raw", "the tokenizer's", or a file
    text: str                                # Jinja
    because: str
    tokens: Mapping[str, str] = field(default_factory=dict)      # bos_token, eos_token, ...: what it may write
    special: tuple[str, ...] = ()            # tokens that may end a turn

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as the model reads it. Raises BadRow with the template's reason if it refuses."""
        return self._rendered(messages, add_generation_prompt=add_generation_prompt)[0]

    def marked(self, messages: Sequence[Message], train_on: str) -> Marked:
        if self._has_shapes and (found := self._by_layout(messages, all=train_on == "all")) is not None:
            return found
        if train_on == "all":
            text = self.render(messages)
            return Marked(text, [(0, len(text))], False)
        if GENERATION.search(self.text):
            text, places = self._rendered(messages, return_assistant_tokens_mask=True)
            return Marked(text, [(start, self._with_end(text, stop)) for start, stop in places], False)
        return self._by_prefixes(messages)

    def turn_end(self) -> str | None:
        """The special token that this template writes behind a turn of the assistant, None if it writes none."""
        answer = "zq"
        try:
            text = self.render([Message("user", "x"), Message("assistant", answer)])
        except BadRow:
            return None
        behind = text[text.rfind(answer) + len(answer):].strip()
        return next((token for token in self.special if behind.startswith(token)), None)

    @cached_property
    def _has_shapes(self) -> bool:
        return writes_contents_only(self.text)

    @cached_property
    def _layouts(self) -> dict[tuple[bool, tuple[str, ...]], Layout | None]:
        return {}

    def _by_layout(self, messages: Sequence[Message], *, all: bool) -> Marked | None:
        """The same without Jinja, where a conversation with these roles has been laid out before; None where that cannot be."""
        roles = tuple([message.role for message in messages])
        if (all, roles) not in self._layouts:
            if len(self._layouts) >= MOST_LAYOUTS:
                return None
            self._layouts[all, roles] = find_layout(self.render, roles, turns=not all) if all or self._asks else None
        layout = self._layouts[all, roles]
        if layout is None:
            return None
        text = layout.whole.written(messages)
        if all:
            return Marked(text, [(0, len(text))], False)
        places = [(before.length(messages), len(text) if behind is None else behind.length(messages))
                  for before, behind in layout.turns]
        if any(stop < start for start, stop in places):
            return None
        return Marked(text, [(start, self._without_rest(text, start, stop)) for start, stop in places], False)

    @cached_property
    def _asks(self) -> bool:
        """Whether add_generation_prompt makes a difference."""
        question = [Message("user", "x")]
        return self._attempt(question, add_generation_prompt=True) != self._attempt(question)

    def _rendered(self, messages: Sequence[Message], **options: Any) -> tuple[str, list[Place]]:
        if self._has_shapes:
            return plainly_rendered(self.text, messages, {**self.tokens, **options}), []
        from transformers.utils.chat_template_utils import render_jinja_template  # 0.7 s: not before it is needed

        chat = [{"role": message.role, "content": message.content} for message in messages]
        given: dict[str, Any] = {**self.tokens, **options}
        places: Any
        try:
            # declared to return a text, it returns a list of them, and a list of places for each
            (text,), places = render_jinja_template([chat], chat_template=self.text, **given)  # type: ignore[str-unpack]
        except Exception as error:  # a template is a program: it raises what it likes
            raise BadRow(f"the chat template ({self.name}) refuses the conversation: {_first_line(error)}") from error
        return text, places[0] if places else []

    def _by_prefixes(self, messages: Sequence[Message]) -> Marked:
        text = self.render(messages)
        turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
        places = [self._turn(text, messages, number) for number in turns]
        found = [place for place in places if place is not None]
        if len(found) == len(turns):
            return Marked(text, found, False)
        last = self._turn(text, messages, turns[-1]) if turns[-1] == len(messages) - 1 else None
        if last is None:
            raise BadRow(f"the chat template ({self.name}) rewrites what was said before, so that the assistant's words "
                         "cannot be told from the prompt; use another with data.chat_template=FILE, or data.train_on=all")
        return Marked(text, [last], True)

    def _turn(self, text: str, messages: Sequence[Message], number: int) -> Place | None:
        """Where the assistant's turn `number` stands in `text`, with what ends it; None if the rendering of the
        conversation up to there is not how `text` begins."""
        start = self._start(text, messages[:number], messages[number].content)
        stop = len(text)
        if number + 1 < len(messages):
            so_far = self._attempt(messages[:number + 1])
            stop = len(so_far) if so_far is not None and text.startswith(so_far) else -1
        return None if start is None or stop < start else (start, self._without_rest(text, start, stop))

    def _start(self, text: str, before: Sequence[Message], content: str) -> int | None:
        asked = self._attempt(before, add_generation_prompt=True) if self._asks else None
        if asked is not None and text.startswith(asked):
            return len(asked)
        unasked = self._attempt(before)
        beginning = unasked if unasked is not None else ""
        if not text.startswith(beginning) or (unasked is None and before):
            return None
        # the template takes no notice of add_generation_prompt: the turn begins where the words do, unless only white
        # space is before them, which the model itself has to write
        at = text.find(content.strip(), len(beginning))
        return None if at < 0 else at if text[len(beginning):at].strip() else len(beginning)

    def _attempt(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str | None:
        try:
            return self.render(messages, add_generation_prompt)
        except BadRow:
            return None

    def _without_rest(self, text: str, start: int, stop: int) -> int:
        """`stop`, less the white space behind the special token that ends the turn: nothing is written after that."""
        kept = len(text[start:stop].rstrip()) + start
        return kept if text.endswith(self.special, start, kept) else stop

    def _with_end(self, text: str, stop: int) -> int:
        """`stop`, plus the special token that follows: a model that never learns it never stops."""
        return stop + max((len(token) for token in self.special if text.startswith(token, stop)), default=0)


def find_template(tokenizer: ExampleTokenizer, wanted: str | None, *, texts: bool = False) -> ChatTemplate:
    """Return the template `wanted` (a file, or a shipped one's name), else the tokenizer's own, else `plain`.

    `texts`: the rows are prompts and completions as texts, for which the template is `raw`, as in TRL.
    Raises WrongUse if the template is missing, broken, or needs tokens that the tokenizer does not have.
    """
    own = own_templates(tokenizer.files)
    name, text, because = _chosen(wanted, own, texts)
    if name == "chatml":
        _check_chatml(tokenizer)
    template = ChatTemplate(name, text, because, dict(tokenizer.named),
                            tuple(token for token in tokenizer.added_texts if token.strip()))
    _check(template)
    return _with_beginning(template, tokenizer.before)


def own_templates(files: Sequence[Path]) -> dict[str, str]:
    """The templates among a tokenizer's files, by name; the usual one is called "default"."""
    by_name = {file.name: file for file in files}
    found: dict[str, str] = {}
    if CONFIG in by_name:
        stored = read_json(by_name[CONFIG]).get("chat_template")
        if isinstance(stored, str):
            found["default"] = stored
        elif isinstance(stored, list):
            found |= {str(entry["name"]): str(entry["template"]) for entry in stored}
    if TEMPLATE_FILE in by_name:
        found["default"] = by_name[TEMPLATE_FILE].read_text(encoding="utf-8")
    return found


def _chosen(wanted: str | None, own: Mapping[str, str], texts: bool) -> tuple[str, str, str]:
    """(name, Jinja, why)."""
    if wanted is None:
        if texts:
            return "raw", SHIPPED["raw"], "prompts and completions are texts already: no template, only the end token"
        if "default" in own or len(own) == 1:
            return "the tokenizer's", own.get("default") or next(iter(own.values())), "the tokenizer has one"
        return "plain", SHIPPED["plain"], "the tokenizer has none, and plain needs no new tokens"
    path = Path(wanted).expanduser()
    if path.is_file():
        try:
            return wanted, path.read_text(encoding="utf-8"), "data.chat_template"
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUse(f"data.chat_template={wanted} cannot be read: {error}") from error
    if wanted in own:
        return f"the tokenizer's {wanted}", own[wanted], "data.chat_template"
    if wanted in SHIPPED:
        return wanted, SHIPPED[wanted], "data.chat_template"
    raise WrongUse(f"data.chat_template={wanted} is neither a file nor a template that ships; use a file, or one of "
                   f"{', '.join([*SHIPPED, *own])}")


def _check_chatml(tokenizer: ExampleTokenizer) -> None:
    missing = [token for token in MARKED if token not in tokenizer.added_texts]
    if missing:
        raise WrongUse(f"data.chat_template=chatml needs {' and '.join(missing)} in the vocabulary, and this tokenizer has "
                       "them not as tokens; use data.chat_template=plain, which needs no new tokens")


def _check(template: ChatTemplate) -> None:
    """Raises WrongUse if the template is no Jinja at all."""
    from jinja2 import TemplateSyntaxError

    try:
        template.render([Message("user", "x")])
    except BadRow as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            line = error.__cause__.lineno
            raise WrongUse(f"the chat template {template.name} is broken at line {line}: {error.__cause__.message}; mend it, "
                           "or use data.chat_template=plain") from None


def _with_beginning(template: ChatTemplate, before: str | None) -> ChatTemplate:
    """The template with the beginning of sequence that the tokenizer puts in front of a text, unless it writes that itself."""
    if before is None:
        return template
    try:
        text = template.render([Message("user", "x")], add_generation_prompt=True)
    except BadRow:
        return template
    if text.startswith(before):
        return template
    return replace(template, text="{{ " + json.dumps(before, ensure_ascii=False) + " }}" + template.text,
                   because=f"{template.because}; {before} is put in front, as the tokenizer does with any text")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
