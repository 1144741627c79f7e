"""Chat templates: a conversation as one text, and which characters of it are to be learned.

A template is Jinja, run by transformers' own sandbox, so that a text is what apply_chat_template gives. The trained places are
found by the template's {% generation %} marks, else by rendering the conversation up to each of the assistant's turns: a turn
begins where the prompt that asks for it ends.

Most templates write a message's words as they are and decide everything else by its role and place. Its syntax tree shows
whether a template does so: contents may only be written, alone or in a sum of texts. Then two conversations with the same roles
differ in nothing but their contents. The fixed texts between the contents are found once for each order of roles, by rendering
marks in place of the contents, and further conversations are written without Jinja.

Conversations with tools are rendered by transformers' sandbox. A template that leaves out tools, or calls of tools, is refused
for rows that have some: the model would learn answers whose reason it cannot see, or lose what it has to learn.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from powertrain.data.examples.shapes import MARK, MARKS, plainly_rendered, writes_contents_only
from powertrain.data.examples.shipped import SHIPPED
from powertrain.data.examples.tokenizer import ExampleTokenizer, Place
from powertrain.data.examples.trial import MOST_BYTES, TRIAL_S, ends
from powertrain.data.rows.row import BadRow, Message, ToolCall
from powertrain.data.tokenizers import CONFIG, TEMPLATE_FILE
from powertrain.records import WrongUse
from powertrain.records.errors import first_line
from powertrain.records.json_files import read_json

MOST_SHAPES = 10_000         # orders of roles that are remembered
TOOL_CURE = "use the template of a model that calls tools, with data.chat_template=FILE, or data.chat_template=plain"
GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
QUESTION = [Message("user", "x")]            # any conversation without an answer
# of a trial: enough messages that loops within loops over them take long
TRIED = [Message("system", "x"), *[Message(role, "x") for _ in range(4) for role in ("user", "assistant")]]
# of another trial: whether a template writes a tool, and a call of it. Mistral's templates want ids of nine letters
TOOL = {"type": "function", "function": {"name": "zqtool", "description": "x",
                                         "parameters": {"type": "object", "properties": {}}}}
CALLING = [*QUESTION, Message("assistant", "", (ToolCall("zqtool", {"x": "y"}, "zqtool001"),), is_null=True)]
LONGEST_TEMPLATE_CHARS = 1 << 20             # the longest that are known have some 20,000
Tools = Sequence[Mapping[str, Any]]


class Marked(NamedTuple):
    text: str
    trained: list[Place]
    rewritten: bool                          # the template rewrites some earlier turns, which are not trained


Shape = list[str | int]                      # text, number of a message, text, ..., text
Border = tuple[int, int]                     # a part of a shape, and a character of that text


@dataclass(frozen=True)
class ChatTemplate:
    name: str                                # "plain", "chatml", "raw", "the tokenizer's", or a file
    text: str                                # Jinja
    because: str
    tokens: Mapping[str, str] = field(default_factory=dict)      # bos_token, eos_token, ...: what it may write
    special: tuple[str, ...] = ()            # tokens that may end a turn

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Tools = ()) -> str:
        """Return the conversation as the model reads it. Raises BadRow with the template's reason if it refuses."""
        if not self._has_shape(messages, tools):
            return self._rendered(messages, tools, add_generation_prompt=add_generation_prompt)[0]
        return "".join(_filled(self._shape([message.role for message in messages], add_generation_prompt), messages))

    def marked(self, messages: Sequence[Message], train_on: str, tools: Tools = ()) -> Marked:
        """Return the conversation's text, and the places of it that are trained."""
        if train_on == "all":
            text = self.render(messages, tools=tools)
            return Marked(text, [(0, len(text))], False)
        has_shape = self._has_shape(messages, tools)
        if has_shape and self._asks and (found := self._by_shapes(messages)) is not None:
            return found
        if GENERATION.search(self.text):
            text, places = self._rendered(messages, tools, return_assistant_tokens_mask=True)
            return Marked(text, [(start, self._with_end(text, stop)) for start, stop in places], False)
        return self._by_prefixes(messages, tools)

    def _has_shape(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Return whether the conversation differs from others of its roles by nothing but contents.

        Raises BadRow if the template would leave out tools or calls.
        """
        if not tools and all(message.is_plain for message in messages):
            return self.has_shapes
        if tools and not self._writes_tools:
            raise BadRow(f"the chat template ({self.name}) leaves out the row's tools; {TOOL_CURE}")
        if any(message.tool_calls for message in messages) and not self._writes_calls:
            raise BadRow(f"the chat template ({self.name}) leaves out calls of tools; {TOOL_CURE}")
        return False

    @cached_property
    def _writes_tools(self) -> bool:
        if "tools" not in self.text:
            return False
        with suppress(BadRow):
            return "zqtool" in self._rendered(QUESTION, [TOOL])[0]
        return True                          # a template that refuses the trial says why for each row

    @cached_property
    def _writes_calls(self) -> bool:
        if "tool_calls" not in self.text:
            return False
        with suppress(BadRow):
            return "zqtool" in self._rendered(CALLING)[0]
        return True

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """Return whether the template wants the arguments of a call as JSON text: it refuses objects, and not texts."""
        found: list[bool] = []
        for as_text in (False, True):
            try:
                self._rendered(CALLING, [TOOL], as_text=as_text)
                found.append(True)
            except BadRow:
                found.append(False)
        return found == [False, True]

    def turn_end(self) -> str | None:
        """Return the special token that this template writes behind a turn of the assistant, None if it writes none."""
        answer = "zq"
        try:
            text = self.render([*QUESTION, Message("assistant", answer)])
        except BadRow:
            return None
        behind = text[text.rfind(answer) + len(answer):].strip()
        return next((token for token in self.special if behind.startswith(token)), None)

    def call_end(self) -> str | None:
        """Return the special token that this template writes behind a turn of calls (Llama 3 has one), None if it has none."""
        try:
            text = self.render(CALLING, tools=[TOOL]).rstrip()
        except BadRow:
            return None
        return next((token for token in self.special if text.endswith(token)), None)

    @cached_property
    def has_shapes(self) -> bool:
        """Return whether the template writes contents as they are, so that it is rendered without transformers."""
        return writes_contents_only(self.text)

    @cached_property
    def _shapes(self) -> dict[tuple[object, ...], Shape]:
        return {}

    def _shape(self, roles: Sequence[str], asks: bool) -> Shape:
        """Return the fixed texts of conversations with these roles, and the numbers of the messages between them."""
        key = (asks, *roles)
        if key not in self._shapes:
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            marked = [Message(role, MARK.format(number)) for number, role in enumerate(roles)]
            with self._refusals():
                text = plainly_rendered(self.text, marked, {**self.tokens, "add_generation_prompt": asks})
            self._shapes[key] = [int(part) if place % 2 else part for place, part in enumerate(MARKS.split(text))]
        return self._shapes[key]

    @cached_property
    def _turns(self) -> dict[tuple[str, ...], list[tuple[Border, Border]] | None]:
        return {}

    def _by_shapes(self, messages: Sequence[Message]) -> Marked | None:
        """Mark as `_by_prefixes` does, by the shape of each beginning; None where the template rewrites a beginning."""
        roles = tuple([message.role for message in messages])
        whole = self._shape(roles, False)
        if roles not in self._turns:
            if len(self._turns) >= MOST_SHAPES:
                self._turns.clear()
            found = [(_border(self._shape(roles[:number], True), whole), _border(self._shape(roles[:number + 1], False), whole))
                     for number, role in enumerate(roles) if role == "assistant"]
            turns = [(start, stop) for start, stop in found if start and stop]
            self._turns[roles] = turns if len(turns) == len(found) else None
        known = self._turns[roles]
        if known is None:
            return None
        parts = _filled(whole, messages)
        text, begins = "".join(parts), list(accumulate(map(len, parts), initial=0))
        places = [(begins[start[0]] + start[1], begins[stop[0]] + stop[1]) for start, stop in known]
        if any(stop < start for start, stop in places):
            return None
        return Marked(text, [(start, self._without_rest(text, start, stop)) for start, stop in places], False)

    @cached_property
    def _asks(self) -> bool:
        """Return whether add_generation_prompt makes a difference."""
        return self.attempt(QUESTION, add_generation_prompt=True) != self.attempt(QUESTION)

    def _rendered(self, messages: Sequence[Message], tools: Tools = (), *, as_text: bool | None = None,
                  **options: Any) -> tuple[str, list[Place]]:
        from transformers.utils.chat_template_utils import render_jinja_template  # 0.7 s: not before it is needed

        chat = [message.plain() for message in messages]
        calls = [call["function"] for message in chat for call in message.get("tool_calls", ())]
        if calls and (self._takes_text_arguments if as_text is None else as_text):
            for call in calls:
                call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
        given: dict[str, Any] = {**self.tokens, **options}
        places: Any
        with self._refusals():
            # declared to return a text, it returns a list of them, and a list of places for each
            (text,), places = render_jinja_template(  # type: ignore[str-unpack]
                [chat], tools=[dict(tool) for tool in tools] or None, chat_template=self.text, **given)
        return text, places[0] if places else []

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raise BadRow for whatever a template raises: it is a program."""
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            raise BadRow(f"the chat template ({self.name}) refuses the conversation: {first_line(error)}") from error

    def _by_prefixes(self, messages: Sequence[Message], tools: Tools) -> Marked:
        text = self.render(messages, tools=tools)
        turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
        found = [place for number in turns if (place := self._turn(text, messages, number, tools)) is not None]
        if not found:
            raise BadRow(f"the chat template ({self.name}) rewrites what was said before, so that the assistant's words "
                         "cannot be told from the prompt; use another with data.chat_template=FILE, or data.train_on=all")
        return Marked(text, found, len(found) < len(turns))

    def _turn(self, text: str, messages: Sequence[Message], number: int, tools: Tools) -> Place | None:
        """Return where the assistant's turn `number` stands in `text`, with what ends it; None if the rendering of the
        conversation up to there is not how `text` begins."""
        start = self._start(text, messages[:number], messages[number].content, tools)
        stop = len(text)
        if number + 1 < len(messages):
            so_far = self.attempt(messages[:number + 1], tools=tools)
            stop = len(so_far) if so_far is not None and text.startswith(so_far) else -1
        return None if start is None or stop < start else (start, self._without_rest(text, start, stop))

    def _start(self, text: str, before: Sequence[Message], content: str, tools: Tools) -> int | None:
        asked = self.attempt(before, add_generation_prompt=True, tools=tools) if self._asks else None
        if asked is not None and text.startswith(asked):
            return len(asked)
        unasked = self.attempt(before, tools=tools)
        beginning = unasked if unasked is not None else ""
        if not text.startswith(beginning) or (unasked is None and before):
            return None
        if asked is not None and not content.strip():    # calls alone: the header of the turn is what both texts begin with
            alike = takewhile(lambda both: both[0] == both[1], zip(asked, text, strict=False))
            return max(len(beginning), sum(1 for _ in alike))
        # the template takes no notice of add_generation_prompt: the turn begins where the words do, unless only white
        # space is before them, which the model itself has to write
        at = text.find(content.strip(), len(beginning))
        return None if at < 0 else at if text[len(beginning):at].strip() else len(beginning)

    def attempt(self, messages: Sequence[Message], add_generation_prompt: bool = False, tools: Tools = ()) -> str | None:
        """Render as `render` does; return None where the template refuses the conversation."""
        try:
            return self.render(messages, add_generation_prompt, tools)
        except BadRow:
            return None

    def _without_rest(self, text: str, start: int, stop: int) -> int:
        """Return `stop`, less the white space behind the special token that ends the turn: generation ends before it."""
        kept = len(text[start:stop].rstrip()) + start
        return kept if text.endswith(self.special, start, kept) else stop

    def _with_end(self, text: str, stop: int) -> int:
        """Return `stop`, plus the special token that follows: a model that never learns this token never stops.

        Where a special token stands before `stop`, it is the end, and what follows begins the next turn.
        """
        if text.endswith(self.special, 0, stop):
            return stop
        return stop + max((len(token) for token in self.special if text.startswith(token, stop)), default=0)


def _filled(shape: Shape, messages: Sequence[Message]) -> list[str]:
    return [part if isinstance(part, str) else messages[part].content for part in shape]


def _border(beginning: Shape, whole: Shape) -> Border | None:
    """Return where in `whole` its `beginning` ends; None where `whole` begins otherwise."""
    last, text = len(beginning) - 1, str(beginning[-1])
    begins = last < len(whole) and beginning[:last] == whole[:last] and str(whole[last]).startswith(text)
    return (last, len(text)) if begins else None


def find_template(tokenizer: ExampleTokenizer, wanted: str | None, *, texts: bool = False) -> ChatTemplate:
    """Return the template `wanted` (a file, or a shipped one's name), else the tokenizer's own, else `plain`.

    `texts`: the rows are prompts and completions as texts, for which the template is `raw`, as in TRL.
    Raises WrongUse if the template is missing, broken, or needs tokens that the tokenizer does not have.
    """
    name, text, because = _chosen(wanted, own_templates(tokenizer.files), texts)
    missing = [token for token in CHATML_TOKENS if token not in tokenizer.added_texts]
    if name == "chatml" and missing:
        raise WrongUse(f"data.chat_template=chatml needs {' and '.join(missing)} in the vocabulary, and the tokenizer has "
                       "no such tokens; use data.chat_template=plain, which needs no new tokens")
    template = ChatTemplate(name, text, because, dict(tokenizer.named),
                            tuple(token for token in tokenizer.added_texts if token.strip()))
    _check(template)
    before = tokenizer.before
    asked = None if before is None else template.attempt(QUESTION, add_generation_prompt=True)
    if asked is None or asked.startswith(str(before)):
        return template
    return replace(template, text="{{ " + json.dumps(before, ensure_ascii=False) + " }}" + template.text,
                   because=f"{because}; {before} is put in front, as the tokenizer does with any text")


def own_templates(files: Sequence[Path]) -> dict[str, str]:
    """Return the templates among a tokenizer's files, by name; the usual one is called "default"."""
    by_name = {file.name: file for file in files}
    found: dict[str, str] = {}
    if CONFIG in by_name:
        stored = read_json(by_name[CONFIG]).get("chat_template")
        if isinstance(stored, str):
            found["default"] = stored
        elif isinstance(stored, list):
            found |= {str(entry["name"]): str(entry["template"]) for entry in stored
                      if isinstance(entry, dict) and {"name", "template"} <= entry.keys()}
    if TEMPLATE_FILE in by_name:
        try:
            found["default"] = by_name[TEMPLATE_FILE].read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUse(f"{by_name[TEMPLATE_FILE]} cannot be read: {error}; copy or download it again") from error
    return found


def _chosen(wanted: str | None, own: Mapping[str, str], texts: bool) -> tuple[str, str, str]:
    """Return the name, the Jinja text, and the reason."""
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
    raise WrongUse(f"data.chat_template={wanted} is neither a file nor a shipped template; use a file, or one of "
                   f"{', '.join([*SHIPPED, *own])}")


def _check(template: ChatTemplate) -> None:
    """Raise WrongUse if the template is no valid Jinja, too large, or does not end."""
    from jinja2 import TemplateSyntaxError

    cure = "mend it, or use data.chat_template=plain"
    if len(template.text) > LONGEST_TEMPLATE_CHARS:
        raise WrongUse(f"the chat template {template.name} has {len(template.text):,} characters, and "
                       f"{LONGEST_TEMPLATE_CHARS:,} are the most; {cure}")
    if not template.has_shapes:
        import transformers.utils.chat_template_utils  # noqa: F401 - here, and not within the time of the trial
    if not ends(lambda: (template.attempt(TRIED), template.attempt(QUESTION, add_generation_prompt=True),
                         template.has_shapes or template.attempt(CALLING, tools=[TOOL]))):
        raise WrongUse(f"the chat template {template.name} does not write {len(TRIED)} short messages within {TRIAL_S:g} s and "
                       f"{MOST_BYTES >> 20:,} MiB; {cure}")
    try:
        template.render(QUESTION)
    except BadRow as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            line = error.__cause__.lineno
            raise WrongUse(f"the chat template {template.name} is broken at line {line}: {error.__cause__.message}; {cure}"
                           ) from None
        if isinstance(error.__cause__, RecursionError | SyntaxError):    # SyntaxError: of the Python that Jinja makes of it
            raise WrongUse(f"the chat template {template.name} nests too deep for Python to run it; {cure}") from None
