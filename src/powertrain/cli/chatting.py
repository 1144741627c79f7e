"""`powertrain chat`: messages from stdin, answers to stdout as they are written, everything else to stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from powertrain.cli import output
from powertrain.cli.environment import say
from powertrain.cli.options import Base, Json, Model, Provider, Seed, System, Temperature, TopK, TopP
from powertrain.cli.using import write_pieces
from powertrain.records import WrongUse
from powertrain.report.result import printable

if TYPE_CHECKING:
    from powertrain.use.conversation import Conversation, Prompt

COMMANDS = {"/reset": "forget what was said", "/history": "show what was said", "/system TEXT": "another system text",
            "/exit": "end, as the end of input does", "/help": "this"}


def chat(model: Model,
         message: Annotated[str | None, typer.Option(help="Answer this message and exit.")] = None,
         system: System = None,
         tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 512,
         temperature: Temperature = 0.7, top_k: TopK = None, top_p: TopP = None, seed: Seed = 0,
         show_prompt: Annotated[bool, typer.Option("--show-prompt", help="Print the exact prompt of each answer.")] = False,
         base: Base = None, provider: Provider = None, as_json: Json = False) -> None:
    """Chat with a trained model in the terminal. Type /help for more."""
    from powertrain.use.conversation import Conversation
    from powertrain.use.generation import Sampling
    from powertrain.use.opening import open_model

    sampling = Sampling(tokens, temperature, top_k, top_p, seed)
    opened = open_model(model, base=base, provider=provider, say=say)
    if opened.task == "span":
        raise WrongUse(f"{model} marks answers within a text and writes no text; measure it with `powertrain evaluate {model} "
                       "--metric auto --data FILE`")
    chatting = Chat(Conversation(opened, sampling, system), show_prompt=show_prompt, as_json=as_json)
    if message is not None:
        chatting.answer(message)
        return
    chatting.introduce()
    chatting.listen(sys.stdin)


class Chat:
    """A conversation at a terminal, or with a program that writes lines and reads lines."""

    def __init__(self, conversation: Conversation, *, show_prompt: bool, as_json: bool) -> None:
        self.conversation, self.show_prompt, self.as_json = conversation, show_prompt, as_json
        self.dropped = 0

    def introduce(self) -> None:
        opened = self.conversation.opened
        if opened.task == "causal":
            say(f"chat template: {opened.template.name} ({opened.template.because})")
        else:
            say("an encoder-decoder answers each message by itself and remembers none")
        say(f"{', '.join(COMMANDS)}; Ctrl-C stops an answer")

    def listen(self, lines: TextIO) -> None:
        """Answer until the lines end, or /exit."""
        while line := self._read(lines):
            words = line.strip()
            if words in ("/exit", "/quit"):
                return
            if words.startswith("/"):
                self.obey(words)
            elif words:
                self._answer_or_say_why(words)

    def _read(self, lines: TextIO) -> str:
        if lines.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            return lines.readline()
        except KeyboardInterrupt:            # at the prompt it ends the conversation
            print(file=sys.stderr)
            return ""

    def _answer_or_say_why(self, words: str) -> None:
        """Answer a message; a refusal is printed and does not end the conversation."""
        try:
            self.answer(words)
        except WrongUse as error:
            if self.as_json:
                output.print_json({"event": "error", "message": str(error)})
            say(str(error))

    def answer(self, words: str) -> None:
        prompt, pieces = self.conversation.ask(words)
        self._tell(prompt)
        if self.as_json:
            text = "".join(pieces)
            told = {"prompt": prompt.text} if self.show_prompt else {}
            output.print_json({"event": "answer", "message": words, "text": text.strip(), "dropped": prompt.dropped, **told})
            return
        try:
            write_pieces(pieces)
        except KeyboardInterrupt:            # what was written so far is what was said
            print(file=sys.stderr)
        finally:
            pieces.close()  # type: ignore[attr-defined]

    def _tell(self, prompt: Prompt) -> None:
        if self.show_prompt and not self.as_json:
            print(printable(prompt.text), file=sys.stderr, flush=True)
        if prompt.dropped > self.dropped:
            say(f"the context is full: the {prompt.dropped} oldest messages are left out from here on (/reset begins anew)")
        self.dropped = prompt.dropped

    def obey(self, words: str) -> None:
        """Carry out a line that begins with a slash."""
        command, _, rest = words.partition(" ")
        if command == "/reset":
            self.conversation.forget()
            self.dropped = 0
            say("forgotten")
        elif command == "/system":
            self.conversation.system = rest.strip() or None
            say(f"the system text is now: {rest.strip()}" if rest.strip() else "there is no system text now")
        elif command == "/history":
            self._show_history()
        else:
            unknown = "" if command == "/help" else f"there is no {command}; "
            say(unknown + "; ".join(f"{name}: {meaning}" for name, meaning in COMMANDS.items()))

    def _show_history(self) -> None:
        system = self.conversation.system
        said = [*([("system", system)] if system else []),
                *((message.role, message.content) for message in self.conversation.messages)]
        if self.as_json:
            output.print_json({"event": "history", "messages": [{"role": role, "content": text} for role, text in said]})
            return
        for role, text in said:
            print(f"{role}: {printable(text)}")
