"""A model card for the Hugging Face hub, from what a run's folder holds: recipe, data, results and plan. Markdown.

The same run gives the same card, so that a push that is repeated sends nothing new. Folders of this machine are left out of it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from powertrain.records import several
from powertrain.records.events import Evaluated
from powertrain.records.origins import asked_lines
from powertrain.report.result import quality
from powertrain.report.run_page import RunFiles
from powertrain.report.words import count, duration

FOLDER = re.compile(r"""(?<![\w./:-])(?:~|/|[A-Za-z]:\\)[^\s"'|,]*[/\\](?=[^/\\\s"'|,])""")        # of an absolute path
PIPELINES = {"causal": "text-generation", "seq2seq": "text2text-generation", "span": "question-answering",
             "reward": "text-classification"}
OPENS = {"causal": "AutoModelForCausalLM", "seq2seq": "AutoModelForSeq2SeqLM", "span": "AutoModelForQuestionAnswering",
         "reward": "AutoModelForSequenceClassification"}
METHODS = {"lora": "A LoRA adapter for", "qlora": "A LoRA adapter, trained on a 4-bit base (QLoRA), for",
           "full": "A fine-tuning of"}


def model_card(repository: str, files: RunFiles, *, base: str = "", opens_in: str | None = None, version: str) -> str:
    """Return the card of a run's model. `base` is the hub id of the model that an adapter belongs on.

    `opens_in` is the library, beside powertrain, that opens the files.
    """
    start, title = files.history.start, repository.rpartition("/")[2]
    head = {"library_name": opens_in, "base_model": base, "pipeline_tag": PIPELINES.get(start.task)}
    lines = ["---", *(f"{key}: {value}" for key, value in head.items() if value), "tags:", "- powertrain",
             *([f"- {start.method}"] if start.method else []), "---", "", f"# {title}", "", _summary(files, base, version), "",
             "## Use", "", *_use(repository, files, base, opens_in), ""]
    for name, body in (("Results", _results(files)), ("Data", _data(files.facts.get("data") or {})), ("Recipe", _recipe(files)),
                       ("Plan", _plan(files.plan))):
        lines += [f"## {name}", "", *body, ""]
    return without_folders("\n".join(lines))


def without_folders(text: str) -> str:
    """Return the text with absolute paths cut to their last part: nobody else has this machine's folders."""
    return FOLDER.sub("", text)


def _summary(files: RunFiles, base: str, version: str) -> str:
    model, start = files.facts.get("model") or {}, files.history.start
    parameters = start.parameters or model.get("parameters")
    sized = f" of {count(parameters)} parameters" if parameters else ""
    of = base or model.get("path") or ""
    if start.method in METHODS and of:
        return f"{METHODS[start.method]} {of}. Trained with powertrain {version}."
    return f"A {model.get('family') or 'language'} model{sized}. Trained with powertrain {version}."


def _use(repository: str, files: RunFiles, base: str, opens_in: str | None) -> Iterable[str]:
    tried = f"evaluate {repository} --data PAIRS" if files.history.start.task == "reward" else f"chat {repository}"
    yield from ("```bash", f"powertrain {tried}", "```")
    opens = OPENS.get(files.history.start.task, "AutoModel")
    if opens_in == "peft":
        yield from ("", "```python", "from peft import PeftModel", f"from transformers import {opens}", "",
                    f'model = PeftModel.from_pretrained({opens}.from_pretrained("{base}"), "{repository}")', "```")
    elif opens_in == "transformers":
        yield from ("", "```python", f"from transformers import {opens}", "",
                    f'model = {opens}.from_pretrained("{repository}")', "```")


def _table(rows: Iterable[tuple[str, ...]]) -> Iterable[str]:
    for number, row in enumerate(rows):
        yield "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) + " |"
        if not number:
            yield "|" + "---|" * len(row)


def _results(files: RunFiles) -> Iterable[str]:
    history = files.history
    evaluated = history.last(Evaluated)
    rows = [("", "")]
    if evaluated is not None:
        rows.append(("Held-out text", quality(evaluated, None)))
    if history.steps:
        rows += [("Training loss", f"{history.steps[0].loss:.4f} at step {history.steps[0].step:,}, "
                                   f"{history.steps[-1].loss:.4f} at step {history.steps[-1].step:,}"),
                 ("Trained", f"{several(history.steps[-1].step, 'step')} of {history.start.total_steps:,}, "
                             f"{count(sum(step.tokens for step in history.steps))} trained tokens, {duration(history.wall_s)}")]
    hardware = files.facts.get("hardware") or {}
    if hardware.get("name"):
        rows.append(("Machine", str(hardware["name"])))
    return _table(rows)


def _data(data: Mapping[str, Any]) -> Iterable[str]:
    if not data:
        return ["The run's folder says nothing about its data."]
    told = {"Source": data.get("source"), "sha256": data.get("digest") and f"`{data['digest']}`",
            "Training": f"{count(data.get('train_tokens', 0))} tokens, {count(data.get('examples', 0))} examples",
            "Held out": f"{count(data.get('validation_tokens', 0))} tokens", "Tokenizer": data.get("tokenizer")}
    return _table([("", ""), *((name, str(value)) for name, value in told.items() if value)])


def _recipe(files: RunFiles) -> Iterable[str]:
    return ["```yaml", *(line.partition("  # ")[0] for line in asked_lines(files.recipe, planned=False)), "```"]


def _plan(plan: Mapping[str, Any]) -> Iterable[str]:
    steps = plan.get("steps") or []
    if not steps:
        return ["No technique changed how this model was trained, or the run's folder has no plan."]
    rows = [(str(one["technique"]), json.dumps(one.get("settings") or {}), str(one["because"])) for one in steps]
    return _table([("Technique", "Settings", "Why"), *rows])
