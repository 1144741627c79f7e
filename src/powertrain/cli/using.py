"""`powertrain generate`, `chat` and `evaluate`: what a trained model writes, and how well it does."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from powertrain.cli import output
from powertrain.cli.options import Base, Json, Model, Provider, Seed, System, Temperature, TopK, TopP, cache_folder, say, tell
from powertrain.records import RunFailed, WrongUse, several, to_plain
from powertrain.report.result import printable, quality
from powertrain.report.words import perplexity

if TYPE_CHECKING:
    from powertrain.use.batch import Asking
    from powertrain.use.conversation import Conversation, Prompt
    from powertrain.use.opening import OpenedModel
    from powertrain.use.questions import Answers, Questions

SHOWN_ANSWERS = 3
MOST_QUESTIONS = 200
SHOWN_CHARACTERS = 160
COMMANDS = {"/reset": "start a new conversation", "/history": "show the conversation", "/system TEXT": "set the system text",
            "/exit": "end the chat", "/help": "show these commands"}


def generate(model: Model, prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
             tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to write.")] = 200,
             temperature: Temperature = 0.8, top_k: TopK = None, top_p: TopP = None, seed: Seed = 0,
             template: Annotated[bool, typer.Option("--template", help="Treat the prompt as a user's message: apply the "
                                                    "chat template and print only the answer.")] = False,
             system: System = None,
             show_prompt: Annotated[bool, typer.Option("--show-prompt", help="Print the exact prompt first.")] = False,
             batch: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help=(
                 "Answer every prompt of this file: rows of JSONL with `prompt` or `messages`, or lines of text."))] = None,
             out: Annotated[Path | None, typer.Option("--output", metavar="FILE", show_default=False, help=(
                 "With --batch: the JSONL file of the answers. A call that was broken off goes on there."))] = None,
             column: Annotated[str, typer.Option(help="With --batch: the column of the prompts.")] = "prompt",
             at_once: Annotated[int, typer.Option("--batch-size", min=1, help=(
                 "With --batch: number of answers that are computed together."))] = 8,
             base: Base = None, provider: Provider = None, as_json: Json = False) -> None:
    """Write text with a trained model."""
    from powertrain.use.batch import Asking
    from powertrain.use.conversation import Conversation, continuation
    from powertrain.use.generation import Sampling
    from powertrain.use.opening import open_model, refuse_no_writer

    sampling = Sampling(tokens, temperature, top_k, top_p, seed)
    if system is not None and not template:
        raise WrongUse("--system belongs to a conversation; add --template to treat the prompt as a user's message")
    if (batch is None) != (out is None) or (batch is not None and (prompt or show_prompt)):
        raise WrongUse("a file of prompts needs both --batch FILE and --output FILE, and neither --prompt nor --show-prompt")
    opened = open_model(model, base=base, writes=True, provider=provider, say=say)
    refuse_no_writer(opened, model)
    if batch is not None and out is not None:
        _answer_file(opened, batch, out, Asking(sampling, column, template, system, at_once), as_json=as_json)
        return
    if template:
        asked, pieces = Conversation(opened, sampling, system).ask(prompt)
        shown = asked.text
    else:
        shown, pieces = prompt, continuation(opened, prompt, sampling)
    # an encoder-decoder answers its prompt; everything else goes on writing it
    echoed = shown if show_prompt or not (template or opened.task == "seq2seq") else ""
    if as_json:
        output.print_json({"event": "sample", "prompt": shown, "text": "".join(pieces)})
        return
    write_pieces(pieces, echoed)


def _answer_file(opened: OpenedModel, batch: Path, out: Path, asking: Asking, *, as_json: bool) -> None:
    from powertrain.use.batch import answer_file

    found = answer_file(opened, batch, out, asking, cache=cache_folder(), say=say)
    by_itself = f"{found.stopped:,} ended by the model, {found.rows - found.stopped:,} at the most tokens"
    output.tell({"event": "answered", "output": str(out), **to_plain(found)},
                [("Answers", f"{found.rows:,} in {out}: {found.rows - found.before:,} now and {found.before:,} before; "
                             f"{by_itself}")], as_json=as_json)


def write_pieces(pieces: Iterator[str], first: str = "") -> None:
    """Write pieces to stdout as they come, and a line end."""
    sys.stdout.write(first)
    for piece in pieces:
        sys.stdout.write(printable(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


# ------------------------------------------------------------------------------------------------ chat


def chat(model: Model,
         message: Annotated[str | None, typer.Option(help="Answer this message and exit.")] = None,
         system: System = None,
         tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 512,
         temperature: Temperature = 0.7, top_k: TopK = None, top_p: TopP = None, seed: Seed = 0,
         show_prompt: Annotated[bool, typer.Option("--show-prompt", help="Print the exact prompt of each answer.")] = False,
         base: Base = None, provider: Provider = None, as_json: Json = False) -> None:
    """Chat with a trained model in the terminal. Type /help for more.

    With --json, each piece of an answer is a line, and a line of input may be {"message": "TEXT"}, where TEXT has line ends;
    "tokens", "temperature" and "seed" beside it hold from then on, and "reset": true begins a new conversation.
    """
    from powertrain.use.conversation import Conversation
    from powertrain.use.generation import Sampling
    from powertrain.use.opening import open_model, refuse_no_writer

    sampling = Sampling(tokens, temperature, top_k, top_p, seed)
    opened = open_model(model, base=base, writes=True, provider=provider, say=say)
    refuse_no_writer(opened, model)
    chatting = Chat(Conversation(opened, sampling, system), show_prompt=show_prompt, as_json=as_json)
    if message is not None:
        chatting.answer(message)
        return
    chatting.introduce()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")          # bytes that are no text are refused, not the conversation
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
            say("an encoder-decoder answers each message by itself, without the earlier messages")
        say(f"{', '.join(COMMANDS)}; Ctrl-C stops an answer")

    def listen(self, lines: TextIO) -> None:
        """Answer until the lines end, or /exit."""
        while line := self._read(lines):
            words, message = line.strip(), self._message_in(line)
            if words in ("/exit", "/quit"):
                return
            if words.startswith("/"):
                self.obey(words)
            elif message.strip():
                try:
                    self.answer(message)
                except WrongUse as error:    # a refusal does not end the conversation
                    if self.as_json:
                        output.print_json({"event": "error", "message": str(error)})
                    say(str(error))

    def _message_in(self, line: str) -> str:
        """Return the message of a line: the line itself, or with --json the text of the object that it may be."""
        with contextlib.suppress(ValueError, RecursionError):
            told = json.loads(line) if self.as_json and line.lstrip().startswith("{") else None
            if isinstance(told, dict) and isinstance(told.get("message"), str):
                self._sample_as(told)
                if told.get("reset") is True:
                    self.obey("/reset")
                return str(told["message"])
        return line.strip()

    def _sample_as(self, told: Mapping[str, Any]) -> None:
        """Draw the next answers as a message asks. What is no such number changes nothing."""
        kinds: Mapping[str, tuple[type, ...]] = {"tokens": (int,), "temperature": (int, float), "seed": (int,)}
        asked = {name: told[name] for name, kind in kinds.items() if isinstance(told.get(name), kind) and told[name] >= 0}
        if asked.get("tokens", 1) > 0:
            self.conversation.sampling = replace(self.conversation.sampling, **asked)

    def _read(self, lines: TextIO) -> str:
        if lines.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            return lines.readline()
        except KeyboardInterrupt:            # at the prompt it ends the conversation
            print(file=sys.stderr)
            return ""

    def answer(self, words: str) -> None:
        prompt, pieces = self.conversation.ask(words)
        self._tell(prompt)
        written: list[str] = []
        try:
            if self.as_json:
                for piece in pieces:
                    written.append(piece)
                    output.print_json({"event": "piece", "text": piece})
            else:
                write_pieces(pieces)
        except KeyboardInterrupt:            # what was written so far is what was said
            print(file=sys.stderr)
        finally:
            pieces.close()  # type: ignore[attr-defined]
        if self.as_json:
            told = {"prompt": prompt.text} if self.show_prompt else {}
            output.print_json({"event": "answer", "message": words, "text": "".join(written).strip(),
                               "dropped": prompt.dropped, **told})

    def _tell(self, prompt: Prompt) -> None:
        if self.show_prompt and not self.as_json:
            print(printable(prompt.text), file=sys.stderr, flush=True)
        if prompt.dropped > self.dropped:
            say(f"the context is full: the {prompt.dropped} oldest messages are left out from here on (/reset starts anew)")
        self.dropped = prompt.dropped

    def obey(self, words: str) -> None:
        """Carry out a line that begins with a slash."""
        command, _, rest = words.partition(" ")
        if command == "/reset":
            self.conversation.forget()
            self.dropped = 0
            say("a new conversation begins")
        elif command == "/system":
            self.conversation.system = rest.strip() or None
            say(f"the system text is now: {rest.strip()}" if rest.strip() else "there is no system text now")
        elif command == "/history":
            self._show_history()
        else:
            unknown = "" if command == "/help" else f"there is no command {command}; "
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


# ------------------------------------------------------------------------------------------------ evaluate


def evaluate(model: Model,
             data: Annotated[str | None, typer.Option(help="File of text or rows to evaluate on (default: the "
                                                      "run's held-out data).")] = None,
             metric: Annotated[str | None, typer.Option(help="Ask the questions in the data and score the answers by exact, "
                                                        "f1, rouge, gsm8k or auto.")] = None,
             limit: Annotated[int | None, typer.Option(min=1, help="With --metric: maximum number of questions (default: 200). "
                                                       "With --tasks: of examples of each task (default: all).")] = None,
             tokens: Annotated[int, typer.Option(min=1, help="With --metric: maximum number of tokens of an answer.")] = 256,
             tasks: Annotated[str | None, typer.Option(metavar="NAME[,NAME]", help="Run these tasks of lm-eval, by name or by "
                                                       "the path of a task's YAML file.")] = None,
             tasks_folder: Annotated[Path | None, typer.Option(help="With --tasks: a folder of tasks' YAML files.")] = None,
             shots: Annotated[int | None, typer.Option(min=0, help="With --tasks: solved examples in front of each question "
                                                       "(default: as the task says).")] = None,
             trust: Annotated[bool, typer.Option("--trust-task-code", help="With --tasks: run Python that lies beside the "
                                                 "tasks' files.")] = False,
             template: Annotated[bool, typer.Option("--template", help="With --tasks: write each question by the model's chat "
                                                    "template.")] = False,
             base: Base = None, provider: Provider = None, as_json: Json = False) -> None:
    """Measure a model's loss, its answers, or its results on tasks.

    For text the result includes bits per byte. --metric asks questions and scores the answers. --tasks runs lm-eval.
    """
    from powertrain.use.metrics import check_metric
    from powertrain.use.opening import open_model

    check_metric(metric)
    if tasks is not None:
        if metric is not None or data is not None:
            other = "--metric" if metric is not None else "--data"
            raise WrongUse(f"--tasks brings its own data and metrics; leave {other} out")
        _show_tasks(model, tasks, folder=tasks_folder, limit=limit, shots=shots, trusts_code=trust, templated=template,
                    base=base, provider=provider, as_json=as_json)
        return
    for given, option in ((tasks_folder, "--tasks-folder"), (shots, "--shots"), (trust or None, "--trust-task-code"),
                          (template or None, "--template")):
        if given is not None:
            raise WrongUse(f"{option} belongs to --tasks; name the tasks, such as --tasks lambada_openai")
    opened = open_model(model, base=base, writes=metric is not None, provider=provider, say=say)
    if metric is None:
        _show_loss(opened, data, as_json=as_json)
    else:
        _show_answers(opened, data, metric, limit=limit or MOST_QUESTIONS, tokens=tokens, as_json=as_json)


def _show_tasks(model: str, names: str, *, folder: Path | None, limit: int | None, shots: int | None, trusts_code: bool,
                templated: bool, base: str | None, provider: str | None, as_json: bool) -> None:
    """Run tasks, whose names are separated by commas, and print a row or an object for each metric."""
    from powertrain.use.harness import check_harness, run_tasks
    from powertrain.use.opening import open_model

    asked = [name.strip() for name in names.split(",") if name.strip()]
    if not asked:
        raise WrongUse("--tasks names no task; name one, such as --tasks lambada_openai, or a task's YAML file")
    check_harness()
    opened = open_model(model, base=base, provider=provider, say=say)
    say(f"running {several(len(asked), 'task')}: {', '.join(asked)}")
    found = run_tasks(opened, asked, folder=folder, limit=limit, shots=shots, trusts_code=trusts_code, templated=templated)
    if as_json:
        output.print_json(*({"event": "task", **to_plain(one)} for one in found))
        return
    output.print_rows([(one.task, f"{one.metric.replace('_', ' ')} {one.value:.4g}"
                        + (f" +- {one.error:.2g}" if one.error is not None else "")
                        + f" ({several(one.examples, 'example')}, {several(one.shots, 'shot')}"
                        + (f", filter {one.filter}" if one.filter != "none" else "") + ")") for one in found])


def _show_loss(opened: OpenedModel, data: str | None, *, as_json: bool) -> None:
    from powertrain.use.scoring import score, score_source

    found, gzip_bits = score(opened, cache_folder(), tell) if data is None else score_source(opened, data, cache_folder(), tell)
    if not math.isfinite(found.loss):
        raise RunFailed(f"the loss is {found.loss}: the model has weights that are not finite, or too large ones; use an "
                        "earlier checkpoint, or train with on_nan=skip")
    output.tell({"event": "evaluation", "gzip_bits_per_byte": gzip_bits,
                 "perplexity": None if found.metrics else perplexity(found.loss), "metrics": dict(found.metrics),
                 **{name: getattr(found, name) for name in ("loss", "tokens", "bits_per_byte", "seconds")}},
                [("Held-out" if data is None else "Data", quality(found, gzip_bits))], as_json=as_json)


def _show_answers(opened: OpenedModel, data: str | None, metric: str, *, limit: int, tokens: int, as_json: bool) -> None:
    from powertrain.use.questions import ask_all

    questions = _questions(opened, data, limit)
    say(f"asking {len(questions.items):,} questions")
    found = ask_all(opened, questions, metric, tokens=tokens, say=say)
    if not as_json:
        output.print_rows(_answer_rows(questions, found))
        return
    output.print_json(*({"event": "answer", **to_plain(answer)} for answer in found.answers))
    output.print_json({"event": "answers", "metric": found.metric, "because": found.because, "questions": len(found.answers),
                       "skipped": questions.skipped, "seconds": found.seconds, **found.figures})


def _questions(opened: OpenedModel, data: str | None, limit: int) -> Questions:
    from powertrain.use.questions import held_out_questions, questions_in
    from powertrain.use.scoring import held_out_examples, run_recipe

    if data is not None:
        return questions_in(opened, data, most=limit, cache=cache_folder())
    recipe, run = run_recipe(opened)
    if recipe.method == "scratch":
        raise WrongUse(f"the run {run} was trained on text without questions; give rows with answers by --data FILE, "
                       "or leave out --metric to measure the loss")
    return held_out_questions(opened, held_out_examples(opened, recipe, cache_folder(), tell), most=limit)


def _answer_rows(questions: Questions, found: Answers) -> list[tuple[str, str]]:
    figures = ", ".join(f"{name.replace('_', ' ')} {value:.1%}" for name, value in found.figures.items())
    rows = [("Data", questions.said), ("Metric", f"{found.metric} ({found.because})"),
            ("Answers", f"{figures}, over {len(found.answers):,} questions")]
    if questions.skipped:
        rows.append(("Skipped", f"{questions.skipped:,} bad rows; `powertrain data check` shows them"))
    for answer in found.answers[:SHOWN_ANSWERS]:
        rows += [("Asked", _short(answer.question)), ("  answer", _short(answer.answer)),
                 ("  right", " | ".join(_short(text) for text in answer.references[:2]) or "(no answer)")]
    return rows


def _short(text: str) -> str:
    """Return the end of the text on one line: a question stands at the end."""
    line = " ".join(printable(text).split())
    return line if len(line) <= SHOWN_CHARACTERS else f"... {line[-SHOWN_CHARACTERS:]}"
