"""Bad inputs, made from the grammar of what Powertrain reads: words, recipes, rows, model folders, templates, scripts, runs.

A case is a command in a folder of its own, beside `world`, which has text.txt, rows.jsonl, a tiny model in `chat` and a
finished run in `run`. `files` are written first: bytes, or a copy of something of the world, or a FIFO. Names tell the kind.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bad_texts import (
    ADAPTERS,
    CHATTED,
    CONFIG_FILES,
    CONFIG_YAMLS,
    CORPORA,
    INDEXES,
    JSONS,
    LINES,
    OBJECTS,
    RECIPE_BYTES,
    SCRIPT_BYTES,
    SCRIPTS,
    SHEETS,
    TEMPLATES,
    TOKENIZER_CONFIGS,
    TOKENIZERS,
    WEIGHTS,
    YAMLS,
)

FIFO = "a FIFO"
WORLD = "../world"
TEXT, ROWS, CHAT, RUN = (f"{WORLD}/{name}" for name in ("text.txt", "rows.jsonl", "chat", "run"))
SCRATCH = (f"data={TEXT}", "data.tokenizer=char", "data.block=16", "model.layers=1", "model.width=32", "model.heads=2",
           "train_batch_size=4", "max_steps=2", "sample.tokens=0", "techniques.threads=off")


@dataclass(frozen=True)
class BadInput:
    name: str
    words: tuple[str, ...]
    files: Mapping[str, bytes | str | Path] = field(default_factory=dict)    # a Path: a copy of it; FIFO: a named pipe
    stdin: bytes = b""
    codes: tuple[int, ...] = (0, 1, 2)       # with which the command may end
    slow: bool = False                       # left out of the suite's fast part


def bad_inputs() -> list[BadInput]:
    """Return every case."""
    found = [*_words(), *_options(), *_recipes(), *_rows(), *_texts(), *_configs(), *_tokenizers(), *_weights(), *_templates(),
             *_scripts(), *_audited_configs(), *_runs(), *_chats()]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    return found


COMMANDS: tuple[tuple[str, ...], ...] = (
    ("generate", "nothing"), ("generate", TEXT), ("evaluate", "."), ("export", "/dev/null", "--to", "gguf"),
    ("runs", "show", "nothing"), ("runs", "compare", RUN, RUN), ("report", "/"), ("audit", "/dev/zero"),
    ("audit", "/proc/self/mem"), ("train", "/dev/zero"), ("train", "/proc/self/mem"), ("plan", f"data={RUN}"),
    ("plan", "data=/dev/zero"), ("plan", "data=/proc/self/mem"), ("plan", "model.path=/dev/null"), ("nothing",),
    ("train", "--resume", ""), ("train", "--resume", TEXT), ("bench", "--budget", "9" * 5000), ("data", "join", "nothing"),
    ("runs", "list", TEXT), ("diagnose", "--budget", "x"), ("generate", CHAT, "--base", "nothing"),
    ("evaluate", RUN, "--data", "nothing"), ("train", "--output", TEXT, *SCRATCH),
    ("train", "--output", "/proc/nothing", *SCRATCH), ("train", "--output", "x" * 300, *SCRATCH),
    ("train", *SCRATCH, "name=" + "x" * 300), ("train", *SCRATCH, "name=../../x"), ("train", "x" * 5000),
    ("plan", "a" * 5000 + "=1"), ("plan", "=1"), ("plan", "a.b.c.d.e=1"), ("plan", "model.model.layers=1"),
)

TUNED: tuple[tuple[str, ...], ...] = (
    ("data.columns={text: 3}",), ("data.columns={nothing: text}",), ("data.format=nothing",), ("data.split=train[:x]",),
    ("data.max_length=1",), ("data.max_length=1000000000000",), ("data.max_length=1" + "0" * 25,), ("data.weights=[1,2,3]",),
    ("data.weights=[.inf]",), ("data.weights=[1e300]",), ("data.max_examples=1" + "0" * 25,),
    ("data.validation_share=0.999999",), ("data.text_field=",), ("data.end_token=nothing",), ("data.end_token=",),
    ("lora.r=1000000000",), ("lora.alpha=1e300",), ("lora.target_modules=nothing",), ("lora.target_modules=(",),
    ("lora.target_modules=[]",), ("lora.r=1" + "0" * 25,), ("train_batch_size=1" + "0" * 25,), ("model.revision=x",),
    ("model.adapter=nothing",), ("techniques.packing.tokens=1" + "0" * 25,),
)


# ------------------------------------------------------------------------------------------------ words and options

SIZES = ("0", "-1", "1", "500", "1000000", "1000000000000", "1" + "0" * 25, "1" + "0" * 400, "9" * 5000, ".nan", ".inf",
        "1e400",
         "1.5", "''", "null", "true", "[]", "{}", "[1,[2]]", "!!int foo", "!!bool foo", "!!python/object:os.system x",
         "2001-13-45", "0x_", "0b_", "0o_", "1_", "12:30:45", "[" * 2000, "&a [*a]", "*a", "\udcff", "~", "<<: 3")
KEYS = ("train_batch_size", "learning_rate", "seed", "max_steps", "num_train_epochs", "train_time_s", "model.layers",
        "model.width", "model.heads", "model.vocabulary", "model.context", "model.mlp_width", "data.block", "data.stride",
        "data.vocabulary", "data.max_chars", "data.validation_share", "warmup_steps", "eval_steps", "save_steps",
        "sample.tokens", "sample.prompt", "name", "description", "output_dir", "objective", "optimizer", "techniques",
        "techniques.threads.threads", "techniques.micro_batch.examples", "techniques.packing", "data", "data.tokenizer",
        "data.text_field", "model.family", "method", "model", "lora", "lora.r", "data.columns", "corrections")
LARGE = ("0", "-1", "500", "1000000", "1000000000000", "1" + "0" * 25, "1" + "0" * 400, "9" * 5000)
SIZE_KEYS = ("train_batch_size", "seed", "max_steps", "num_train_epochs", "model.layers", "model.width", "model.heads",
             "model.kv_heads", "model.vocabulary", "model.context", "model.mlp_width", "data.block", "data.stride",
             "data.vocabulary", "data.max_chars", "warmup_steps", "eval_steps", "save_steps", "save_total_limit",
             "logging_steps", "max_eval_samples", "sample.tokens", "sample.top_k", "techniques.threads.threads",
             "techniques.micro_batch.examples", "techniques.micro_batch.tokens", "techniques.loader.workers",
             "techniques.packing.tokens", "techniques.chunked_cross_entropy.tokens", "learning_rate", "train_time_s",
             "objective.label_smoothing", "optimizer.name")


def _words() -> Iterator[BadInput]:
    """Yield words of a recipe: each key with odd values, of which every fourth is in the fast part."""
    for number, (key, value) in enumerate(itertools.product(KEYS, SIZES)):
        if number % 3 == 0:
            rest = [word for word in SCRATCH if not word.startswith(f"{key}=")]
            yield BadInput(f"word {key}={value[:20]!r} {number}", ("plan", *rest, f"{key}={value}"), slow=number % 12 != 0)
    for key, value in itertools.product(SIZE_KEYS, LARGE):
        rest = [word for word in SCRATCH if not word.startswith(f"{key}=")]
        slow = not (value in LARGE[3:6] and key.startswith(("model", "train_batch", "techniques.threads", "data.block")))
        yield BadInput(f"size {key}={value[:8]}({len(value)})", ("plan", *rest, f"{key}={value}"), slow=slow)
    for family in ("gpt2", "gpt_neox", "gemma"):
        yield BadInput(f"size {family} width", ("plan", *SCRATCH[:3], f"model.family={family}", "model.width=" + "1" +
        "0" * 20))
    for batch in ("1" + "0" * 25, "1000000000000"):
        yield BadInput(f"train batch {len(batch)}", ("train", *SCRATCH[:-4], f"train_batch_size={batch}", "max_steps=1"))
    for threads in ("500", "1000000000000", "100000"):
        yield BadInput(f"train threads {threads}", ("train", *SCRATCH[:-1], f"techniques.threads.threads={threads}"))


def _options() -> Iterator[BadInput]:
    """Yield options out of their range."""
    large = ("-1", "1" + "0" * 18, "1" + "0" * 23, "9" * 5000, "nan", "x", "")
    for option in ("--seed", "--tokens", "--temperature", "--top-k", "--top-p"):
        for value in large:
            if (option, value) != ("--tokens", large[1]) and (option, value) != ("--tokens", large[2]):
                yield BadInput(f"generate {option} {value[:6]}({len(value)})",
                               ("generate", RUN, "--prompt", "line", *(("--tokens", "3") if option != "--tokens" else ()),
                                option, value), slow=value in ("x", "-1", ""))
    for value in ("nan", "inf", "1e308", "1e-308"):
        yield BadInput(f"generate temperature {value}", ("generate", RUN, "--tokens", "3", "--temperature", value))
    for prompt in ("", "\udcff", "x" * 100_000, "日本語", "\x1b[2J"):
        yield BadInput(f"generate prompt {prompt[:3]!r}", ("generate", RUN, "--tokens", "3", "--prompt", prompt))
    for value in ("0/3", "4/3", "1/0", "-1/3", "1/" + "9" * 30, "x", "1/2/3", "9" * 5000 + "/" + "9" * 5000):
        yield BadInput(f"shard {value[:8]}", ("data", "prepare", *SCRATCH, "--shard", value))
    for value in ("99999", "1" + "0" * 23, "9" * 5000):
        yield BadInput(f"example {value[:6]}({len(value)})", ("data", "show", f"model.path={CHAT}", f"data={ROWS}",
                                                              "--index", value))
    for value in ("0x8xh100", "8x" + "9" * 30 + "xh100", "1000000000x8xh100", "8xnothing", "x", "8x8x8x8", "9" * 4500 +
        "xh100"):
        yield BadInput(f"machine {value[:12]}({len(value)})", ("plan", *SCRATCH, "--machine", value))
    for value in ("0", "1000000", "9" * 25):
        yield BadInput(f"processes {value[:8]}", ("plan", *SCRATCH, "--processes", value))
    for words in COMMANDS:
        yield BadInput("command " + " ".join(word[:12] for word in words[:3]) + f" {len(' '.join(words))}", words)


# ------------------------------------------------------------------------------------------------ recipes



def _recipes() -> Iterator[BadInput]:
    for name, text in YAMLS.items():
        yield BadInput(f"recipe {name}", ("plan", "recipe.yaml", *SCRATCH[:1]),
                       {"recipe.yaml": text.encode("utf-8", "surrogatepass")})
    for name, content in RECIPE_BYTES.items():
        yield BadInput(f"recipe {name}", ("plan", "recipe.yaml"), {"recipe.yaml": content})
    yield BadInput("recipe FIFO", ("plan", "recipe.yaml"), {"recipe.yaml": FIFO})
    yield BadInput("recipe FIFO in audit", ("audit", "recipe.yaml"), {"recipe.yaml": FIFO})
    for name in ("bomb in data", "merge bomb", "mapping bomb", "bomb alone", "deep lists", "closed deep lists",
        "long base 60", "list in itself",
                 "table in itself", "date", "int tag", "long number", "small bomb"):
        yield BadInput(f"audited recipe {name}", ("audit", "recipe.yaml"), {"recipe.yaml": YAMLS[name].encode()},
                       codes=(0, 1, 2, 4, 5))


# ------------------------------------------------------------------------------------------------ data



def _rows() -> Iterator[BadInput]:
    for name, content in LINES.items():
        yield BadInput(f"rows {name}", ("data", "check", f"model.path={CHAT}", "data=rows.jsonl"), {"rows.jsonl": content})
    for ending in (".json", ".csv", ".tsv", ".parquet", ".arrow", ".jsonl.gz", ".csv.gz", ".txt", ".md"):
        for name in ("empty", "nul", "cut", "deep", "gzip", "half a pair"):
            yield BadInput(f"rows {ending} {name}", ("data", "check", f"model.path={CHAT}", f"data=rows{ending}"),
                           {f"rows{ending}": LINES[name]}, slow=ending in (".tsv", ".csv.gz", ".md"))
        yield BadInput(f"rows {ending} FIFO", ("data", "check", f"model.path={CHAT}", f"data=rows{ending}"),
        {f"rows{ending}": FIFO})
    for name, content in OBJECTS.items():
        yield BadInput(f"JSON {name}", ("data", "check", f"model.path={CHAT}", "data=rows.json"), {"rows.json": content})
    for name, content in SHEETS.items():
        yield BadInput(f"CSV {name}", ("data", "check", f"model.path={CHAT}", "data=rows.csv"), {"rows.csv": content})
    for words in TUNED:
        yield BadInput(f"tuning {words[0][:40]}", ("plan", f"model.path={CHAT}", f"data={ROWS}", *words))


def _texts() -> Iterator[BadInput]:
    for name, content in CORPORA.items():
        for tokenizer in ("char", "byte", "bpe"):
            yield BadInput(f"text {name} {tokenizer}", ("plan", "data=text.txt", f"data.tokenizer={tokenizer}", *SCRATCH[2:
        ]), {"text.txt": content},
                           slow=tokenizer == "byte")
    for ending in (".jsonl", ".json", ".csv", ".parquet"):
        for name in ("cut", "deep", "empty", "nul", "number"):
            yield BadInput(f"corpus {ending} {name}", ("plan", f"data=rows{ending}", *SCRATCH[1:]), {f"rows{ending}": LINES[
        name]}, slow=ending == ".csv")
    yield BadInput("text FIFO", ("plan", "data=text.txt", *SCRATCH[1:]), {"text.txt": FIFO})
    yield BadInput("folder with a FIFO", ("plan", "data=folder", *SCRATCH[1:]), {"folder/text.txt": FIFO, "folder/a.txt":
        b"hello " * 100})


# ------------------------------------------------------------------------------------------------ model folders

ODD: tuple[Any, ...] = (None, True, 0, -1, 1, 1.5, 10**9, 10**20, 10**300, float("nan"), float("inf"), 1e300, "", "x",
        "\ud800", [], [1], {}, {"a": 1})
SETTINGS = ("model_type", "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "intermediate_size",
            "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
        "hidden_act", "head_dim",
            "tie_word_embeddings", "torch_dtype", "dtype", "eos_token_id", "bos_token_id", "sliding_window",
        "quantization_config", "layer_types",
            "auto_map", "attention_bias", "mlp_bias", "initializer_range", "text_config")
TUNING = ("plan", "model.path=model", f"data={ROWS}", "data.max_length=64")
MODEL: Mapping[str, Path] = {"model": Path("chat")}


def _configs() -> Iterator[BadInput]:
    """Yield a model's config.json with odd values; "config" in `files` are changes of the world's own."""
    for number, (key, value) in enumerate(itertools.product(SETTINGS, ODD)):
        if number % 2 == 0:
            changed = json.dumps({key: value}).encode()
            yield BadInput(f"config {key}={str(value)[:12]!r} {number}", TUNING, {**MODEL, "model/config.json+": changed},
        slow=number % 14 != 0)
    for name, content in CONFIG_FILES.items():
        yield BadInput(f"config.json {name}", TUNING, {**MODEL, "model/config.json": content})
    yield BadInput("config.json FIFO", TUNING, {**MODEL, "model/config.json": FIFO})
    yield BadInput("config.json FIFO generate", ("generate", "model", "--tokens", "2"), {**MODEL, "model/config.json": FIFO})
    yield BadInput("config.json folder", TUNING, {**MODEL, "model/config.json": b"", "model/config.json/x": b""})
    yield BadInput("generation_config.json FIFO", ("chat", "model", "--message", "x", "--tokens", "2"), {**MODEL,
        "model/generation_config.json": FIFO})
    yield BadInput("generation_config.json list", ("chat", "model", "--message", "x", "--tokens", "2"), {**MODEL,
        "model/generation_config.json": b"[1]"})
    for name, content in ADAPTERS.items():
        yield BadInput(f"adapter {name}", ("generate", "adapter", "--base", CHAT, "--tokens", "2"),
                       {"adapter/adapter_config.json": content}, slow=True)
    yield BadInput("adapter FIFO", ("generate", "adapter", "--base", CHAT, "--tokens", "2"), {"adapter/adapter_config.json":
        FIFO})
    yield BadInput("adapter weights FIFO", ("generate", "adapter", "--base", CHAT, "--tokens", "2"),
                   {"adapter/adapter_config.json":
        b'{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}', "adapter/adapter_model.safetensors":
        FIFO})


def _tokenizers() -> Iterator[BadInput]:
    checked = ("data", "check", "model.path=model", f"data={ROWS}")
    for name, content in TOKENIZERS.items():
        yield BadInput(f"tokenizer.json {name}", checked, {**MODEL, "model/tokenizer.json": content})
    for name, content in TOKENIZER_CONFIGS.items():
        yield BadInput(f"tokenizer_config {name}", checked, {**MODEL, "model/tokenizer_config.json":
        FIFO if name == "FIFO" else content})
    for name in ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json"):
        yield BadInput(f"{name} FIFO", checked, {**MODEL, f"model/{name}": FIFO})
    yield BadInput("chat_template.jinja latin", checked, {**MODEL, "model/chat_template.jinja": "ä".encode("latin-1")})
    yield BadInput("regex without end", ("data", "check", "model.path=model", "data=rows.jsonl"), {**MODEL, "rows.jsonl":
        json.dumps({"text": "a" * 40 + "!"}).encode() * 3, "model/tokenizer.json": json.dumps(
        {"version": "1.0", "added_tokens": [{"id": 1, "content": "<|im_end|>", "special": True, "single_word": False,
        "lstrip": False, "rstrip": False, "normalized": False}], "pre_tokenizer": {"type": "Split", "pattern": {"Regex":
        "(a+)+$"}, "behavior": "Isolated", "invert": False},
         "model": {"type": "BPE", "vocab": {"a": 0, "!": 2}, "merges": []}}).encode()})


def _weights() -> Iterator[BadInput]:
    for name, content in WEIGHTS.items():
        yield BadInput(f"weights {name}", ("generate", "model", "--tokens", "2"), {**MODEL, "model/model.safetensors": content})
    for command in (("generate", "model", "--tokens", "2"), TUNING):
        yield BadInput(f"weights FIFO {command[0]}", command, {**MODEL, "model/model.safetensors": FIFO})
    for name, content in INDEXES.items():
        yield BadInput(f"index {name}", ("generate", "model", "--tokens", "2"), {**MODEL, "model/model.safetensors": "gone",
        "model/model.safetensors.index.json": content})
    yield BadInput("index FIFO", ("generate", "model", "--tokens", "2"), {**MODEL, "model/model.safetensors": "gone",
        "model/model.safetensors.index.json": FIFO})


# ------------------------------------------------------------------------------------------------ templates



# templates that are ended after seconds of the processor's time; "loops" is in the fast part
ENDLESS = ("loop of the limit", "silent loop", "loop over text", "lipsum", "lipsum loop", "cycle", "macro twice", "slice",
           "batch", "tojson", "grow number", "shift", "power", "join", "indent", "wide format", "wide format map")


def _templates() -> Iterator[BadInput]:
    for name, text in TEMPLATES.items():
        yield BadInput(f"template {name}", ("data", "check", f"model.path={CHAT}", f"data={ROWS}",
        "data.chat_template=template.jinja"), {"template.jinja": text.encode()},
                       slow=name in ENDLESS)
    for name in ("missing name", "number and text", "missing index", "loop of the limit", "deep brackets", "macro in itself",
        "raise lines", "times", "power", "zero", "unclosed"):
        yield BadInput(f"chat template {name}", ("chat", "model", "--message", "hello", "--tokens", "2"), {**MODEL,
        "model/chat_template.jinja": TEMPLATES[name].encode()})
    yield BadInput("template large", ("data", "check", f"model.path={CHAT}", f"data={ROWS}",
        "data.chat_template=template.jinja"), {"template.jinja": b"x" * (20 << 20)})
    yield BadInput("template FIFO", ("data", "check", f"model.path={CHAT}", f"data={ROWS}",
        "data.chat_template=template.jinja"), {"template.jinja": FIFO})
    yield BadInput("template folder", ("data", "check", f"model.path={CHAT}", f"data={ROWS}", "data.chat_template=."))


# ------------------------------------------------------------------------------------------------ audits



def _scripts() -> Iterator[BadInput]:
    audit = (0, 1, 2, 4, 5)
    for name, text in SCRIPTS.items():
        yield BadInput(f"script {name}", ("audit", "train.py"), {"train.py": text.encode()}, codes=audit)
    for name, content in SCRIPT_BYTES.items():
        yield BadInput(f"script {name} bytes", ("audit", "train.py"), {"train.py": content}, codes=audit)
    yield BadInput("script FIFO", ("audit", "train.py"), {"train.py": FIFO}, codes=audit)
    yield BadInput("folder with a FIFO audited", ("audit", "folder"), {"folder/train.py": FIFO, "folder/a.yaml":
        b"learning_rate: 1e-4"}, codes=audit)


def _audited_configs() -> Iterator[BadInput]:
    audit = (0, 1, 2, 4, 5)
    for name, content in JSONS.items():
        yield BadInput(f"audited JSON {name}", ("audit", "config.json"), {"config.json": content}, codes=audit)
    for name, text in CONFIG_YAMLS.items():
        yield BadInput(f"audited YAML {name}", ("audit", "config.yaml"), {"config.yaml": text.encode()}, codes=audit)
        yield BadInput(f"converted YAML {name}", ("audit", "config.yaml", "--convert", "--output", "recipe.yaml"),
                       {"config.yaml": text.encode()}, codes=audit, slow=True)


# ------------------------------------------------------------------------------------------------ runs and chats

OF_RUN = ("recipe.yaml", "origins.json", "facts.json", "plan.json", "events.jsonl", "model/config.json",
        "model/tokenizer.json", "model/model.safetensors", "checkpoints")
DAMAGES: Mapping[str, bytes | str] = {"gone": "gone", "empty": b"", "garbage": b"\xff\0garbage", "list": b"[1]\n", "table":
        b"{}\n", "half": "half", "FIFO": FIFO}
READERS: tuple[tuple[str, ...], ...] = (("runs", "list", "."), ("runs", "show", "run"), ("runs", "compare", "run", RUN), (
        "report", "run"), ("train", "--resume", "run"), ("diagnose", "run"), ("generate", "run", "--tokens", "2"), (
        "evaluate", "run"))


def _runs() -> Iterator[BadInput]:
    for number, (file, (damage, content), words) in enumerate(itertools.product(OF_RUN, DAMAGES.items(), READERS)):
        if file == "checkpoints" and damage not in ("gone", "empty"):
            continue
        fast = damage in ("gone", "FIFO", "half") and words[0] in ("train", "report", "runs") and number % 2 == 0
        yield BadInput(f"run {file} {damage} {' '.join(words[:2])}", words, {"run": Path("run"), f"run/{file}": content},
        codes=(0, 1, 2, 4, 5), slow=not fast)


def _chats() -> Iterator[BadInput]:
    for name, content in CHATTED.items():
        yield BadInput(f"chat {name}", ("chat", CHAT, "--tokens", "2"), stdin=content)
    for message in ("", "\udcff", "x" * 100_000, "<|im_end|>" * 500):
        yield BadInput(f"message {message[:3]!r}{len(message)}", ("chat", CHAT, "--tokens", "2", "--message", message))
    yield BadInput("system too long", ("chat", CHAT, "--tokens", "2", "--message", "a", "--system", "x" * 100_000))
