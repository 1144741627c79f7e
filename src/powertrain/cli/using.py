"""`powertrain generate` and `powertrain evaluate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli import output
from powertrain.cli.environment import cache_folder, say
from powertrain.cli.options import Base, Json, Model, Provider, Seed, System, Temperature, TopK, TopP
from powertrain.records import WrongUse, to_plain

if TYPE_CHECKING:
    from powertrain.use.generation import Sampling
    from powertrain.use.opening import OpenedModel
    from powertrain.use.questions import Answers, Questions

SHOWN_ANSWERS = 3
SHOWN_CHARACTERS = 160


def generate(model: Model, prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
             tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to write.")] = 200,
             temperature: Temperature = 0.8, top_k: TopK = None, top_p: TopP = None, seed: Seed = 0,
             template: Annotated[bool, typer.Option("--template", help="Treat the prompt as a user's message: apply the "
                                                    "chat template and print only the answer.")] = False,
             system: System = None,
             show_prompt: Annotated[bool, typer.Option("--show-prompt", help="Print the exact prompt first.")] = False,
             base: Base = None, provider: Provider = None, as_json: Json = False) -> None:
    """Write text with a trained model."""
    from powertrain.use.conversation import Conversation
    from powertrain.use.generation import Sampling
    from powertrain.use.opening import open_model

    sampling = Sampling(tokens, temperature, top_k, top_p, seed)
    if system is not None and not template:
        raise WrongUse("--system belongs to a conversation; add --template to treat the prompt as a user's message")
    opened = open_model(model, base=base, provider=provider, say=say)
    if template:
        asked, pieces = Conversation(opened, sampling, system).ask(prompt)
        shown = asked.text
    else:
        shown, pieces = _continuation(opened, prompt, sampling)
    # an encoder-decoder answers its prompt; everything else goes on writing it
    echoed = shown if show_prompt or not (template or opened.task == "seq2seq") else ""
    if as_json:
        output.print_json({"event": "sample", "prompt": shown, "text": "".join(pieces)})
        return
    write_pieces(pieces, echoed)


def _continuation(opened: OpenedModel, prompt: str, sampling: Sampling) -> tuple[str, Iterator[str]]:
    """Return the prompt, and the pieces of text that the model writes after it."""
    from powertrain.use.generation import generate_ids, open_feed, stream

    ids = opened.prompt_ids(prompt)
    end = opened.tokenizer.end_of_text
    feed, fed = open_feed(opened.model, ids or [0 if end is None else end])
    before = ids[-1:] if opened.task == "causal" else []
    return prompt, stream(opened.tokenizer, before, generate_ids(feed, fed, sampling), opened.stops)


def write_pieces(pieces: Iterator[str], first: str = "") -> str:
    """Write pieces to stdout as they come, and a line end; return the text."""
    from powertrain.report.result import printable

    sys.stdout.write(first)
    written = []
    for piece in pieces:
        written.append(piece)
        sys.stdout.write(printable(piece))
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return "".join(written)


def evaluate(model: Model,
             data: Annotated[str | None, typer.Option(help="File of text or rows to evaluate on (default: the "
                                                      "run's held-out data).")] = None,
             metric: Annotated[str | None, typer.Option(help="Ask the questions in the data and score the answers by exact, "
                                                        "f1, rouge, gsm8k or auto.")] = None,
             limit: Annotated[int, typer.Option(min=1, help="With --metric: maximum number of questions.")] = 200,
             tokens: Annotated[int, typer.Option(min=1, help="With --metric: maximum number of tokens of an answer.")] = 256,
             base: Base = None, provider: Provider = None, as_json: Json = False) -> None:
    """Measure a model's loss, or the quality of its answers.

    For text the result includes bits per byte. --metric asks questions and scores the answers.
    """
    from powertrain.use.metrics import check_metric
    from powertrain.use.opening import open_model

    check_metric(metric)
    opened = open_model(model, base=base, provider=provider, say=say)
    if metric is None:
        _show_loss(opened, data, as_json=as_json)
    else:
        _show_answers(opened, data, metric, limit=limit, tokens=tokens, as_json=as_json)


def _show_loss(opened: OpenedModel, data: str | None, *, as_json: bool) -> None:
    from powertrain.report.figures import perplexity
    from powertrain.report.result import quality
    from powertrain.use.scoring import score, score_source

    found, gzip_bits = score(opened, cache_folder(), say) if data is None else score_source(opened, data, cache_folder(), say)
    if as_json:
        output.print_json({"event": "evaluation", "gzip_bits_per_byte": gzip_bits, "perplexity": perplexity(found.loss),
                           **{name: getattr(found, name) for name in ("loss", "tokens", "bits_per_byte", "seconds")}})
    else:
        output.print_rows([("Held-out" if data is None else "Data", quality(found, gzip_bits))])


def _show_answers(opened: OpenedModel, data: str | None, metric: str, *, limit: int, tokens: int, as_json: bool) -> None:
    from powertrain.use.questions import ask_all

    questions = _questions(opened, data, limit)
    say(f"asking {len(questions.items):,} questions")
    found = ask_all(opened, questions, metric, tokens=tokens, say=say)
    if not as_json:
        output.print_rows(_answer_rows(questions, found))
        return
    for answer in found.answers:
        output.print_json({"event": "answer", **to_plain(answer)})
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
    return held_out_questions(opened, held_out_examples(opened, recipe, cache_folder(), say), most=limit)


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
    from powertrain.report.result import printable

    line = " ".join(printable(text).split())
    return line if len(line) <= SHOWN_CHARACTERS else f"... {line[-SHOWN_CHARACTERS:]}"
