"""Case `writing`: tokens a second of `generate` against transformers and llama.cpp, and answers of `evaluate --metric`.

All write the likeliest tokens after the same prompts, by turns, on all cores, with one model whose weights are stored in
bf16: transformers in bf16, as it opens the model by itself, and in fp32; llama.cpp from the file that `powertrain export --to
gguf` writes. A writer that waits is stopped (SIGSTOP). Answers: the prompts of many questions, asked as `evaluate --metric`
does, and as it did before, one at a time by torch's operators in fp32. How many tokens are the same is counted: two tokens
that are nearly as likely may change places by rounding, and all that follows is then another text.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cases import Materials
from conditions import marked
from preparing import plain

from powertrain.cli.options import say
from powertrain.evidence import studies
from powertrain.evidence.stats import interval
from powertrain.facts.hardware import read_hardware
from powertrain.facts.machine_watch import MachineWatch
from powertrain.facts.software import read_software
from powertrain.records import to_plain
from powertrain.records.evidence import Study

ROUNDS, PROMPT, TOKENS = 7, 96, 128
QUESTIONS, ANSWER = 24, 96
QUESTION_ROUNDS = 3
WRITER = Path(__file__).with_name("writer.py")
LLAMA_CPP = "llama-cpp-python"               # compiled where it is installed, which takes minutes


class Writer:
    """A process that writes, stopped while it waits."""

    def __init__(self, python: str, kind: str, options: Mapping[str, Any]) -> None:
        told = json.dumps({**options, "threads": os.cpu_count()})
        self.process = subprocess.Popen([python, str(WRITER), kind, told], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._read()
        self.process.send_signal(signal.SIGSTOP)

    def write(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        found = self._read()
        self.process.send_signal(signal.SIGSTOP)
        return found

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self.process.args[1:3])} ended")  # type: ignore[index]
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def writer(python: str, kind: str, options: Mapping[str, Any]) -> Iterator[Writer]:
    found = Writer(python, kind, options)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()


def measure(materials: Materials, python: Path) -> None:
    """Measures writers by turns, prints their speeds and stores the study."""
    folder, began = studies.new_folder("bench-writing"), time.monotonic()
    ids = prompts_of(materials)
    model = {"model": str(materials.llama)}
    arms = {"ours": (sys.executable, "ours", model), "before": (sys.executable, "before", model),
            "transformers, bf16": (str(python), "transformers", {**model, "dtype": "bfloat16"}),
            "transformers, fp32": (str(python), "transformers", {**model, "dtype": "float32"})}
    if has_llama_cpp(python):
        arms["llama.cpp, bf16"] = (str(python), "llama.cpp", {"model": str(gguf_of(materials))})
    with MachineWatch() as watch, ExitStack() as stack:
        writers = {name: stack.enter_context(writer(*arm)) for name, arm in arms.items()}
        written = by_turns(writers, ids)
        answered = answers({name: writers[name] for name in ("ours", "before")}, ids)
    hardware, software = read_hardware(materials.cache), read_software()
    described = studies.circumstances(hardware, software)
    study = Study(name=folder.name, kind="writing", seconds=time.monotonic() - began,
                  what=f"generate: {TOKENS} tokens after a prompt of {PROMPT}, Llama of 115.6 M parameters stored in bf16",
                  **{**described, "machine": marked(described["machine"], watch.seen)},
                  findings={"writers": written, "answers": answered})
    studies.save(folder, study, {"hardware": to_plain(hardware), "software": to_plain(software)})
    for name, one in written.items():
        speed, first = one["tokens_per_s"]["median"], one["first_s"]["median"]
        print(f"writing: {name} {speed:.1f} tokens/s, the first after {first:.3f} s; ours {shown(one['ratio'])} times as fast, "
              f"{one['same_tokens']:.0%} the same tokens")
    print(f"answers: {answered['answers_per_s']:.2f} a second, {shown(answered['ratio'])} times as many as before; "
          f"{answered['same_answers']} of {QUESTIONS} the same to the last token ({folder})")


def by_turns(writers: Mapping[str, Writer], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Each writer after the other, in turns that go forth and back, and how much faster ours was in each round."""
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in writers}
    for one in writers.values():
        one.write([prompts[0]], 8)           # the first call of a process is no speed
    for number in range(ROUNDS):
        for name in sorted(writers, reverse=bool(number % 2)):
            told[name].append(writers[name].write([prompts[number]], TOKENS))
        speeds = {name: (TOKENS - 1) / some[-1]["others_s"] for name, some in told.items()}
        say("writing: " + ", ".join(f"{name} {speed:.1f} tokens/s" for name, speed in speeds.items()))
    found = {}
    for name, some in told.items():
        ratios = [theirs["others_s"] / ours["others_s"] for theirs, ours in zip(some, told["ours"], strict=True)]
        same = [sum(a == b for a, b in zip(theirs["ids"][0], ours["ids"][0], strict=True)) / TOKENS
                for theirs, ours in zip(some, told["ours"], strict=True)]
        found[name] = {"tokens_per_s": plain(interval([(TOKENS - 1) / one["others_s"] for one in some])),
                       "first_s": plain(interval([one["first_s"] for one in some])), "ratio": plain(interval(ratios)),
                       "same_tokens": statistics.fmean(same)}
    return found


def answers(writers: Mapping[str, Writer], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Many questions as `evaluate --metric` asks them, now and before."""
    asked = prompts[ROUNDS:ROUNDS + QUESTIONS]
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in writers}
    for number in range(QUESTION_ROUNDS):
        for name in sorted(writers, reverse=bool(number % 2)):
            told[name].append(writers[name].write(asked, ANSWER))
        say("answers: " + ", ".join(f"{name} {some[-1]['seconds']:.1f} s" for name, some in told.items()))
    ours, before = told["ours"], told["before"]
    return {"questions": QUESTIONS, "tokens": ANSWER, "prompt_tokens": [len(ids) for ids in asked],
            "answers_per_s": QUESTIONS / statistics.median(one["seconds"] for one in ours),
            "ratio": plain(interval([b["seconds"] / a["seconds"] for a, b in zip(ours, before, strict=True)])),
            "same_answers": sum(a == b for a, b in zip(ours[0]["ids"], before[0]["ids"], strict=True))}


def prompts_of(materials: Materials) -> list[list[int]]:
    """Prompts to continue, PROMPT tokens each, and behind them the questions of GSM8K as they are."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(materials.llama / "tokenizer.json"))
    rows = [json.loads(line) for line in materials.gsm8k.read_text(encoding="utf-8").splitlines()[:ROUNDS + QUESTIONS]]
    whole = [tokenizer.encode(f"{row['question']}\n{row['answer']}" * 2).ids[:PROMPT] for row in rows[:ROUNDS]]
    template = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return [*whole, *(tokenizer.encode(template.format(**row)).ids for row in rows[ROUNDS:])]


def gguf_of(materials: Materials) -> Path:
    folder = materials.folder / "gguf"
    if not folder.exists():
        command = [sys.executable, "-m", "powertrain", "export", str(materials.llama), "--to", "gguf", "--output", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.gguf"))


def has_llama_cpp(python: Path) -> bool:
    """Whether llama.cpp is among the peers; it is compiled for this machine at the first call."""
    if subprocess.run([str(python), "-c", "import llama_cpp"], check=False, capture_output=True).returncode == 0:
        return True
    say(f"writing: compiling {LLAMA_CPP} (once)")
    ended = subprocess.run([str(python), "-m", "pip", "install", "--quiet", LLAMA_CPP], check=False, capture_output=True)
    if ended.returncode:
        say(f"writing: {LLAMA_CPP} could not be installed, so llama.cpp is left out")
    return ended.returncode == 0


def shown(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
