"""One writer of text in a process of its own, for case `writing`: a line of JSON for each request, and one for each answer.

    python writer.py ours|before|transformers|llama.cpp '{"model": FOLDER-OR-FILE, "threads": 2, "dtype": "auto"}'

A request has prompts (token ids) and the number of tokens that follow each, the likeliest ones; the answer has those ids, the
seconds to the first token of one prompt and those of the others. `before` is our own path by torch's operators in fp32, one
prompt at a time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Write = Callable[[Sequence[int], int], tuple[list[int], float, float]]      # -> ids, seconds to the first, of the others


def main() -> None:
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    write = {"ours": ours, "before": before, "transformers": by_transformers, "llama.cpp": by_llama_cpp}[kind](options)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if len(asked["prompts"]) > 1:
            print(json.dumps(many(kind, options, asked)), flush=True)
            continue
        ids, first_s, others_s = write(asked["prompts"][0], asked["tokens"])
        print(json.dumps({"ids": [ids], "first_s": first_s, "others_s": others_s}), flush=True)


def ours(options: dict[str, Any]) -> Write:
    return _feeding(_opened(options, writes=True))


def before(options: dict[str, Any]) -> Write:
    model = _opened(options, writes=False)
    return _feeding(model.requires_grad_(True))                # a model that trains has no decode step


def _opened(options: dict[str, Any], *, writes: bool) -> Any:
    from powertrain.use.opening import open_model

    if "opened" not in options:
        options["opened"] = open_model(options["model"], writes=writes).model
    return options["opened"]


def _feeding(model: Any) -> Write:
    from powertrain.use.generation import DecoderFeed, Sampling, generate_ids

    def write(prompt: Sequence[int], tokens: int) -> tuple[list[int], float, float]:
        began = time.perf_counter()
        drawn = generate_ids(DecoderFeed(model), prompt, Sampling(tokens, temperature=0))
        ids = [next(drawn)]
        first = time.perf_counter()
        ids += drawn
        return ids, first - began, time.perf_counter() - first

    return write


def many(kind: str, options: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Answers to many prompts, as `evaluate --metric` asks for them."""
    from powertrain.use.generation import Sampling
    from powertrain.use.questions import AT_ONCE
    from powertrain.use.together import Job, answer_jobs

    began = time.perf_counter()
    jobs = [Job(number, tuple(ids), Sampling(asked["tokens"], temperature=0), frozenset())
            for number, ids in enumerate(asked["prompts"])]
    found = {done.number: list(done.ids) for done in answer_jobs(options["opened"], jobs, AT_ONCE if kind == "ours" else 1)}
    return {"ids": [found[number] for number in range(len(found))], "seconds": time.perf_counter() - began}


def by_transformers(options: dict[str, Any]) -> Write:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=options["dtype"]).eval()

    class Watch(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def write(prompt: Sequence[int], tokens: int) -> tuple[list[int], float, float]:
        watch, read = Watch(), torch.tensor([list(prompt)])
        began = time.perf_counter()
        found = model.generate(read, attention_mask=torch.ones_like(read), max_new_tokens=tokens, min_new_tokens=tokens,
                               do_sample=False, streamer=watch, pad_token_id=0)
        return found[0, len(prompt):].tolist(), watch.times[1] - began, watch.times[-1] - watch.times[1]

    return write


def by_llama_cpp(options: dict[str, Any]) -> Write:
    from llama_cpp import Llama

    model = Llama(options["model"], n_ctx=1024, n_threads=options["threads"], n_threads_batch=options["threads"], verbose=False)

    def write(prompt: Sequence[int], tokens: int) -> tuple[list[int], float, float]:
        model.reset()
        began = time.perf_counter()
        drawn = model.generate(list(prompt), temp=0.0, repeat_penalty=1.0)
        ids = [next(drawn)]
        first = time.perf_counter()
        ids += [next(drawn) for _ in range(tokens - 1)]
        return ids, first - began, time.perf_counter() - first

    return write


if __name__ == "__main__":
    main()
