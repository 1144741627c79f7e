"""A Modelfile beside a GGUF file: from it `ollama create` makes a model that chats with this model's own template.

Ollama renders a conversation by a template of Go over the messages, not by the tokenizer's Jinja. Most chat templates only put
fixed texts around each message. These texts are found by rendering conversations with marks in place of the contents, and are
written as a Go template; a template that does more than that (looks at contents, moves the system text into a user's message)
is not translated, and the file says so.

  DEFAULT{{ range .Messages }}{{ if eq .Role "user" }}BEFORE{{ .Content }}BEHIND{{ end }}...{{ end }}ASKS

Source: Ollama's docs/modelfile.md, docs/template.md, and template/template.go, which gives a template .System and .Messages.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from powertrain.data.rows.row import BadRow, Message

Render = Callable[[Sequence[Message]], str]      # messages -> the exact text that asks for the next answer
MARK, MARKS = "zq{}qz", re.compile(r"zq\d+qz")
TEMPERATURE = 0.7                            # as `powertrain chat`
LARGEST_CONTEXT = 8192                       # Ollama sets the memory of the whole context aside when it loads a model
TRIED = ("user", "user assistant user", "user assistant user assistant user", "system user", "system user assistant user",
         "system user assistant user assistant user")
NO_GO = ("{{", "}}", '"""')                  # would end or begin something else in the file


@dataclass(frozen=True)
class Turns:
    """A chat template as fixed texts."""

    default: str                             # begins a conversation without a system text
    around: Mapping[str, tuple[str, str]]    # role -> what stands before and behind a content
    asks: str                                # behind the last message

    def render(self, messages: Sequence[Message]) -> str:
        begins = "" if messages[0].role == "system" else self.default
        return begins + "".join(message.content.join(self.around[message.role]) for message in messages) + self.asks

    def as_go(self) -> str:
        """Return the template as Go's text/template reads it."""
        default = f"{{{{ if not .System }}}}{self.default}{{{{ end }}}}" if self.default else ""
        branches = "".join(f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{behind}'
                           for number, (role, (before, behind)) in enumerate(self.around.items()))
        return f"{default}{{{{ range .Messages }}}}{branches}{{{{ end }}}}{{{{ end }}}}{self.asks}"


def find_turns(render: Render, begin_token: str = "") -> Turns | None:
    """Return the fixed texts of a chat template; None where it does more than put texts around contents.

    `begin_token` is one that llama.cpp writes by itself before any text, and is left out. A template that refuses system texts
    gives turns without that role.
    """
    def fixed(roles: str) -> list[str]:
        messages = [Message(role, MARK.format(number)) for number, role in enumerate(roles.split())]
        text = render(messages).removeprefix(begin_token)
        parts = MARKS.split(text)
        return parts if MARKS.findall(text) == [message.content for message in messages] else []

    try:
        alone, longer = fixed("user"), fixed("user assistant user")
    except BadRow:
        return None
    try:
        told = fixed("system user")
    except BadRow:
        told = None
    if not alone or not longer or told == []:
        return None
    befores = [alone[0], longer[2], *([told[1]] if told else [])]
    user = _common_end(befores)
    answered = longer[2].removesuffix(user)                  # behind an answer
    ends = answered if alone[1].startswith(answered) and longer[1].startswith(answered) else ""
    around = {"user": (user, ends), "assistant": (longer[1].removeprefix(ends), answered)}
    if told:
        around = {"system": (told[0], told[1].removesuffix(user)), **around}
    found = Turns(alone[0].removesuffix(user), around, alone[1].removeprefix(ends))
    return found if _is_right(found, render, begin_token) else None


def _common_end(texts: Sequence[str]) -> str:
    shortest = min(texts, key=len)
    return next(shortest[cut:] for cut in range(len(shortest) + 1) if all(text.endswith(shortest[cut:]) for text in texts))


def _is_right(turns: Turns, render: Render, begin_token: str) -> bool:
    """Return whether the turns render several conversations as the chat template does, and fit into a Modelfile."""
    texts = [turns.default, turns.asks, *(text for pair in turns.around.values() for text in pair)]
    if any(sign in text for sign in NO_GO for text in texts) or turns.asks.endswith('"'):
        return False
    for roles in TRIED:
        if "system" in roles and "system" not in turns.around:
            continue
        messages = [Message(role, f"{role} {number}: what, {{x}}?\nYes.") for number, role in enumerate(roles.split())]
        if turns.render(messages) != render(messages).removeprefix(begin_token):
            return False
    return True


def write_modelfile(gguf_name: str, render: Render | None, *, stops: Iterable[str], context: int,
                    begin_token: str = "") -> tuple[str, str]:
    """Return the text of a Modelfile, and in a sentence how it renders conversations. `render` None: no chat template."""
    turns = None if render is None else find_turns(render, begin_token)
    if render is None:
        template, said = ['TEMPLATE """{{ .Prompt }}"""'], "the model has no chat template: a prompt is continued as it is"
    elif turns is None:
        template, said = [], ("the chat template does more than a Go template can say, so TEMPLATE is left out: Ollama guesses "
                              "one from the GGUF file; compare it with `powertrain chat --show-prompt`, or use llama.cpp")
    else:
        template, said = [f'TEMPLATE """{turns.as_go()}"""'], "TEMPLATE renders conversations as the chat template does"
        if "system" not in turns.around:
            said += "; the template knows no system text, so SYSTEM has no effect"
    parameters = [*(f'PARAMETER stop "{stop}"' for stop in sorted(set(stops)) if not re.search(r'["\n]', stop)),
                  f"PARAMETER temperature {TEMPERATURE}", "PARAMETER repeat_penalty 1",
                  f"PARAMETER num_ctx {min(context, LARGEST_CONTEXT)}"]
    return "\n".join([f"# {said}", f"FROM ./{gguf_name}", *template, *parameters, ""]), said
