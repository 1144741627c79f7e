"""Texts that end badly or not at all: recipes, lines of data, chat templates, scripts and configs, each by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

BOMB = "".join(f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10) if level else '1'}]\n" for level in range(12))
SMALL_BOMB = "".join(f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 8) if level else '1'}]\n" for level in range(6))
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{','.join([f'*a{level - 1}'] * 12)}], k{level}: 1}}\n" for level in range(1, 10))
YAMLS: Mapping[str, str] = {
    "empty": "", "null": "null", "list": "- 1\n- 2", "number": "3", "text": "hello", "tab": "model:\n\tlayers: 1",
    "bomb in data": BOMB + "data: {source: *a11}\n", "bomb in corrections": BOMB + "corrections: *a11\n",
    "small bomb": SMALL_BOMB + "name: *a5", "bomb alone": BOMB, "merge bomb": MERGE_BOMB,
    "bomb as a key": "? [[1,2],[3]]\n: 3\n",
    "mapping bomb": "".join(f"b{n}: &b{n} {{{', '.join(f'k{i}: *b{n - 1}' for i in range(9)) if n else 'x: 1'}}}\n"
        for n in range(10)),
    "techniques bomb": BOMB + "techniques: {threads: {threads: *a11}}",
    "columns bomb": BOMB + "data: {columns: {a: *a11}}", "itself": "&a name: *a", "list in itself": "name: &a [*a]",
    "table in itself": "model: &a\n  layers: *a\n", "techniques in itself": "techniques: &a\n  threads: *a\n",
    "deep lists": "name: " + "[" * 10_000, "closed deep lists": "name: " + "[" * 10_000 + "]" * 10_000,
    "deep tables": "{a: " * 10_000, "deep block": "".join("  " * level + "a:\n" for level in range(400)),
    "long number": "seed: " + "9" * 5000, "long hex": "seed: 0x" + "f" * 6000,
    "long float": "learning_rate: 0." + "1" * 5000, "long base 60": "seed: " + ":".join(["59"] * 3000),
    "int tag": "seed: !!int foo", "bool tag": "method: !!bool foo", "float tag": "learning_rate: !!float foo",
    "null tag": "seed: !!null foo", "date": "name: 2001-13-45", "time": "name: 2001-01-01 99:99:99",
    "date in a number": "seed: 2001-13-45", "hex": "seed: 0x_", "binary": "seed: 0b_", "octal": "seed: 0o_",
    "octal 8": "seed: 089", "binary tag": "name: !!binary '###'", "set": "data: !!set {a, b}",
    "omap": "data: !!omap [1, 2]", "pairs": "data: !!pairs [1]", "timestamp tag": "name: !!timestamp foo",
    "python": "name: !!python/object/apply:os.system [true]", "unknown tag": "name: !foo bar", "value tag": "name: =",
    "two documents": "seed: 1\n---\nseed: 2", "directive": "%YAML 9.9\n---\nseed: 1", "nul": "name: \x00",
    "control": "name: \x01", "half a pair": 'name: "\\ud800"', "byte order mark": "\ufeffseed: 1", "keys": "1: 2",
    "null key": "~: 2", "date key": "2001-01-01: 2", "twice": "seed: 1\nseed: 2", "unknown": "foo: 1",
    "section": "model: 3", "section list": "model: [1]", "techniques list": "techniques: [1]",
    "technique in a technique": "techniques: {threads: {threads: {threads: 1}}}",
    "techniques deep": "techniques: {threads: " + "{a: " * 200 + "1" + "}" * 201, "merge number": "<<: 3\nseed: 1",
    "anchor": "seed: *a", "quote": "name: 'a", "colon": "a: b: c",
    "date technique": "techniques: {threads: {threads: 2001-01-01}}", "columns number": "data: {columns: {1: 2}}",
    "source of numbers": "data: {source: [1, 2]}", "source of itself": "data: {source: &a [*a]}",
    "a line of a megabyte": "name: " + "x" * 1_000_000, "many keys": "".join(f"k{n}: 1\n" for n in range(40_000)),
    "large comment": "#" + "x" * (2 << 20), "block too large": "data: {source: stdlib, block: 1000000000000000}"}
LINES: Mapping[str, bytes] = {
    "empty": b"", "blank": b"\n\n\n", "nul": b"\0" * 100, "not JSON": b"hello\n", "list": b"[1]\n", "number": b"1\n",
    "cut": b'{"text": "a', "latin": '{"text": "ä"}\n'.encode("latin-1"), "half a pair": b'{"text": "\\ud800"}\n',
    "NUL": b'{"text": "\\u0000"}\n', "deep": b'{"text": ' + b"[" * 100_000 + b"\n",
    "closed deep": b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}\n", "long number": b'{"text": ' + b"9" * 5000 + b"}\n",
    "nan": b'{"text": NaN}\n', "1e999": b'{"text": 1e999}\n', "null": b'{"text": null}\n',
    "empty text": b'{"text": ""}\n' * 5, "space text": b'{"text": "   "}\n' * 5, "no key": b"{}\n",
    "twice": b'{"text": "a", "text": "b"}\n' * 5, "CRLF": b'{"text": "a"}\r\n' * 5, "mark": b'\xef\xbb\xbf{"text": "a"}\n',
    "messages text": b'{"messages": "a"}\n', "messages empty": b'{"messages": []}\n',
    "messages of numbers": b'{"messages": [1]}\n', "message without role": b'{"messages": [{"content": "a"}]}\n',
    "role number": b'{"messages": [{"role": 1, "content": "a"}]}\n',
    "role long": b'{"messages": [{"role": "' + b"x" * 100_000 + b'", "content": "a"}]}\n',
    "content table": b'{"messages": [{"role": "user", "content": {"a": 1}}]}\n',
    "content null": b'{"messages": [{"role": "user", "content": null}, {"role": "assistant", "content": null}]}\n',
    "only assistant": b'{"messages": [{"role": "assistant", "content": "a"}]}\n' * 9,
    "many messages": json.dumps({"messages": [{"role": ("user", "assistant")[n % 2], "content": "a"} for n in range(
        20_000)]}).encode() + b"\n",
    "many roles": b"".join(json.dumps({"messages": [{"role": f"r{n}", "content": "a"}, {"role": "assistant",
        "content": "b"}]}).encode() + b"\n" for n in range(300)),
    "mixed": b'{"text": "a"}\n{"messages": []}\n{"prompt": 1}\n', "prompt list": b'{"prompt": [1], "completion": [2]}\n',
    "question number": b'{"question": 1, "answer": 2}\n',
    "many keys": json.dumps({f"k{n}": n for n in range(50_000)}).encode() + b"\n",
    "long key": b'{"' + b"k" * 1_000_000 + b'": 1}\n', "escape": b'{"text": "\\x1b[2J\x1b]52;c;aGk=\x07"}\n',
    "gzip": b"\x1f\x8b\x08\x00garbage"}
M = "{% for m in messages %}"
TEMPLATES: Mapping[str, str] = {
    "missing name": "{{ nothing.at.all }}", "missing index": "{{ messages[99].content }}",
    "number and text": M + "{{ m.content + 1 }}{% endfor %}", "text and number": "{{ 1 + 'a' }}", "zero": "{{ 1 / 0 }}",
    "power": "{{ 9 ** 9 ** 9 }}", "shift": "{{ (1 * 10) ** 1000000000 }}", "times": "{{ 'a' * 10**12 }}",
    "times in steps": "{% set a = 'aaaaaaaaaa' %}{% set b = a * 100000 %}{{ b * 100000 }}",
    "list times": "{{ [0] * 10**11 }}", "loop": "{% for i in range(10**12) %}x{% endfor %}",
    "loop of the limit": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "silent loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops": "{% for a in range(9999) %}" * 5 + "x" + "{% endfor %}" * 5,
    "loop over text": "{% set a = 'x' * 100000 %}{% for i in a %}{% for j in a %}{% endfor %}{% endfor %}",
    "lipsum": "{{ lipsum(n=100000) }}", "lipsum loop": "{% for i in range(99999) %}{{ lipsum(n=20) }}{% endfor %}",
    "cycle": "{% set c = cycler(1, 2) %}{% for i in range(99999) %}{% for j in range(99999) %}{{ c.n"
        "ext() }}{% endfor %}{% endfor %}",
    "macro in itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro twice": "{% macro f(n) %}{{ f(n + 1) if n < 60 }}{{ f(n + 1) if n < 60 }}{% endmacro %}{{ f(0) }}",
    "recursive": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "deep lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "deep ifs": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "deep loops": "{% for i in [1] %}" * 200 + "x" + "{% endfor %}" * 200,
    "long sum": "{{ " + "+".join(["1"] * 20_000) + " }}", "nots": "{{ " + "not " * 20_000 + "1 }}",
    "unclosed": "{% for m in messages %}", "unopened": "{% endfor %}", "unknown tag": "{% nothing %}",
    "unknown filter": "{{ 1 | nothing }}", "unknown test": "{{ 1 is nothing }}", "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}", "extends": "{% extends 'x' %}",
    "attribute": "{{ ''.__class__.__mro__[1].__subclasses__() }}", "globals": "{{ raise_exception.__globals__ }}",
    "format": "{{ '{0.__class__}'.format(1) }}", "wide format": "{{ '%1000000000d' % 3 }}",
    "wide format map": "{{ '{:>10000000000}'.format(1) }}", "center": "{{ 'a' | center(10000000000) }}",
    "indent": "{{ ('a\n' * 99999) | indent(99999) }}", "ljust": "{{ 'a'.ljust(10000000000) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}", "join": "{{ range(99999) | join('x' * 99999) }}",
    "zfill": "{{ '1'.zfill(10000000000) }}", "expandtabs": "{{ '\t'.expandtabs(10000000000) }}",
    "batch": "{{ [1] | batch(1000000000, 1) | list }}", "slice": "{{ [1] | slice(1000000000) | list }}",
    "tojson": "{{ messages | tojson(indent=1000000000) }}", "round": "{{ 1.5 | round(10**9) }}",
    "sum": "{{ range(99999) | sum(start='a') }}",
    "grow": "{% set n = namespace(a='x') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a }}",
    "grow list": "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a }}",
    "grow number": "{% set n = namespace(a=9) %}{% for i in range(60) %}{% set n.a = n.a * n.a %}{% endfor %}{{ n.a }}",
    "raise": "{{ raise_exception('no') }}", "raise long": "{{ raise_exception('n' * 99999) }}",
    "raise lines": "{{ raise_exception('a\nTraceback') }}", "empty": "", "nothing": "{# #}", "nul": "{{ '\0' }}",
    "mark": "\ue0000\ue001", "long output": M + "{{ 'x' * 99999 * 50 }}{% endfor %}",
    "strftime": "{{ strftime_now('%' * 999) }}", "strftime long": "{{ strftime_now('%99999999999Y') }}",
    "generation": "{% generation %}{% generation %}{% endgeneration %}{% endgeneration %}",
    "generation open": "{% generation %}", "set messages": "{% set messages = [] %}{{ messages }}",
    "range": "{{ range(0, 10**30, 10**29) | list }}", "groupby": "{{ messages | groupby('nothing') }}",
    "sort": "{{ [1, 'a'] | sort }}", "attr": "{{ messages | map(attribute='a.b.c') | list }}",
    "int": "{{ ('9' * 9999) | int }}", "urlize": "{{ ('www.a' * 9999) | urlize }}", "xmlattr": "{{ {' ': 1} | xmlattr }}",
    "wordwrap": "{{ ('a' * 9999) | wordwrap(0) }}", "truncate": "{{ 'aaaa' | truncate(-9) }}",
    "striptags": "{{ ('<' * 99999) | striptags }}", "break": "{% break %}", "call": "{{ messages() }}",
    "none": "{{ none.a }}", "del": "{{ messages.clear() }}"}
TRAINS = "from transformers import TrainingArguments, Trainer\n"
SCRIPTS: Mapping[str, str] = {
    "empty": "", "loop": "n = 0\nwhile True:\n    n += 1\n" + TRAINS + "TrainingArguments('o', num_train_epochs=n)",
    "long loop": "n = 0\nfor i in range(10**12):\n    n += i\n" + TRAINS + "TrainingArguments('o', seed=n)",
    "loops": "n = []\nfor a in range(10**6):\n  for b in range(10**6):\n    n.append(a)\n" + TRAINS +
        "TrainingArguments('o', seed=len(n))",
    "power": TRAINS + "TrainingArguments('o', seed=9**9**9)", "shift": TRAINS + "TrainingArguments('o', seed=1 << 10**10)",
    "factorial": "import math\n" + TRAINS + "TrainingArguments('o', seed=math.factorial(10**7))",
    "times": TRAINS + "TrainingArguments('o' * 10**12)", "list times": TRAINS + "TrainingArguments('o', x=[0] * 10**11)",
    "format": TRAINS + "TrainingArguments('{:>10000000000}'.format(1))",
    "f-string": TRAINS + "TrainingArguments(f'{1:>10000000000}')",
    "percent": TRAINS + "TrainingArguments('%10000000000d' % 1)",
    "percent star": TRAINS + "TrainingArguments('%*d' % (10**10, 1))",
    "ljust": TRAINS + "TrainingArguments('a'.ljust(10**10))",
    "replace": TRAINS + "TrainingArguments('a' * 9999, run_name=('a' * 9999).replace('a', 'b' * 9999))",
    "join": TRAINS + "TrainingArguments(('b' * 9999).join(['a'] * 9999))",
    "join text": TRAINS + "a = ('a' * 9999).join('b' * 9999)\nb = a.join(a)\nc = b.join(b)\nTrainingArguments(c)",
    "grow": "a = 'x'\n" + "a = a + a\n" * 60 + TRAINS + "TrainingArguments(a)",
    "grow list": "a = [1]\n" + "a = a + a\n" * 60 + TRAINS + "TrainingArguments('o', x=a)",
    "grow nested": "a = [1]\n" + "a = [a, a]\n" * 60 + TRAINS + "TrainingArguments('o', seed=a)",
    "grow table": "a = {}\n" + "a = {'x': a, 'y': a}\n" * 60 + TRAINS + "TrainingArguments('o', seed=a)",
    "grow star": "a = [1]\n" + "a = [*a, *a]\n" * 40 + TRAINS + "TrainingArguments('o', seed=a)",
    "grow number": "a = 9\n" + "a = a * a\n" * 60 + TRAINS + "TrainingArguments('o', seed=a)",
    "grow f-string": "a = 'x'\n" + "a = f'{a}{a}'\n" * 60 + TRAINS + "TrainingArguments(a)",
    "grow augmented": "a = [1]\n" + "a += a\n" * 60 + TRAINS + "TrainingArguments('o', seed=a)",
    "list in itself": "a = []\na.append(a)\n" + TRAINS + "TrainingArguments('o', seed=a, x=len(a), y=str(a))",
    "table in itself": "a = {}\na['a'] = a\n" + TRAINS + "TrainingArguments('o', seed=a, **a)",
    "list set in itself": "a = [1]\na[0] = a\n" + TRAINS + "TrainingArguments('o', seed=a, x=a == a, y=str(a))",
    "class of itself": "class A(A): pass\n" + TRAINS + "TrainingArguments(A().x)",
    "classes of each other": "class A: pass\nclass B(A): pass\nA = B\nclass A(B): pass\nB = A\n" + TRAINS +
        "TrainingArguments(A().x)",
    "recursion": "def f(n):\n    return f(n + 1)\n" + TRAINS + "TrainingArguments('o', seed=f(0))",
    "recursion twice": "def f(n):\n    return f(n + 1) + f(n + 2)\n" + TRAINS + "TrainingArguments('o', seed=f(0))",
    "calls": "".join(f"def f{n}():\n    return f{n + 1}() + f{n + 1}()\n" for n in range(40)) + "def f40():\n    return 1\n"
        + TRAINS + "TrainingArguments('o', seed=f0())",
    "lambdas": "f0 = lambda: 1\n" + "".join(f"f{n} = lambda: f{n - 1}() + f{n - 1}()\n" for n in range(1, 40)) + TRAINS +
        "TrainingArguments('o', seed=f39())",
    "lambda in itself": "f = lambda: f()\n" + TRAINS + "TrainingArguments('o', seed=f())",
    "property": "class A:\n    @property\n    def x(self):\n        return self.x\n" + TRAINS +
        "TrainingArguments('o', seed=A().x)",
    "comprehension": TRAINS + "TrainingArguments('o', seed=[i for i in range(10**12)])",
    "sum of range": TRAINS + "TrainingArguments('o', seed=sum(range(10**12)))",
    "list of range": TRAINS + "TrainingArguments('o', seed=list(range(10**12)))",
    "int of digits": TRAINS + "TrainingArguments('o', seed=int('9' * 9999))",
    "digits": TRAINS + "TrainingArguments('o', seed=" + "9" * 5000 + ")",
    "hex digits": TRAINS + "TrainingArguments('o', seed=0x" + "f" * 9000 + ")",
    "str of a number": TRAINS + "TrainingArguments(str(0x" + "f" * 9000 + "))",
    "nan": TRAINS + "TrainingArguments('o', learning_rate=float('nan'), num_train_epochs=float('inf'), warmup_ratio=-1)",
    "huge": TRAINS + "TrainingArguments('o', per_device_train_batch_size=10**30, gradient_accumulati"
        "on_steps=10**30, learning_rate=1e300, max_steps=10**300)",
    "deep brackets": "x = " + "(" * 150 + "1" + ")" * 150, "deeper brackets": "x = " + "(" * 5000 + "1" + ")" * 5000,
    "deep lists": "x = " + "[" * 90 + "]" * 90, "long sum": "x = " + " + ".join(["1"] * 20_000),
    "long chain": "x = a" + ".b" * 20_000, "nots": "x = " + "not " * 5000 + "1", "minuses": "x = " + "-" * 5000 + "1",
    "deep ifs": "".join(" " * n + "if x:\n" for n in range(95)) + " " * 95 + "pass",
    "deep functions": "".join(" " * n + f"def f{n}():\n" for n in range(90)) + " " * 90 + "pass",
    "elifs": "if x == 0:\n    y = 0\n" + "".join(f"elif x == {n}:\n    y = {n}\n" for n in range(3000)) + TRAINS +
        "TrainingArguments('o', seed=y)",
    "branches": "".join(f"if x{n}:\n    a = {n}\nelse:\n    a = [a, {n}]\n" for n in range(60)) + TRAINS +
        "TrainingArguments('o', seed=a)",
    "nul": "x = '\\0'\n\0", "tab": "if x:\n\ty\n        z", "syntax": "def",
    "half a pair": "x = '\\ud800'\n" + TRAINS + "TrainingArguments('\\ud800')", "many lines": "x = 1\n" * 20_000,
    "star": TRAINS + "TrainingArguments(*x, **y)",
    "divide": TRAINS + "TrainingArguments('o', seed=1/0, warmup_ratio=1 % 0)",
    "training loop": "import torch\nfor e in range(10**9):\n    for b in loader:\n        loss = mod"
        "el(b)\n        loss.backward()\n        opt.step()\n",
    "import star": "from x import *\nfrom . import *\n" + TRAINS + "TrainingArguments(a)",
    "match": "match x:\n    case 1: pass\n    case _: y = 1\n",
    "walrus": TRAINS + "TrainingArguments((a := 'o'), seed=(b := a))",
    "unpack": "a, *b = 1\n(c, d), e = [1], 2\n" + TRAINS + "TrainingArguments(c)",
    "slice": TRAINS + "TrainingArguments('abc'[::0], seed='abc'[99], x=[1][10**30])",
    "compare": TRAINS + "TrainingArguments('o', seed=1 < 'a', x='a' in 3)",
    "config class": "class C:\n    lr = C.lr\n    x = x\n" + TRAINS + "TrainingArguments('o', learning_rate=C.lr)",
    "decorator": "@f\n@f()\nclass A:\n    @g\n    def h(self): pass\n" + TRAINS + "TrainingArguments(A().h())",
    "assignment in itself": "x = x\ny = y.y\nz = z[z]\n" + TRAINS + "TrainingArguments(x, y, z)"}
JSONS: Mapping[str, bytes] = {
    "empty": b"", "list": b"[]", "deep": b'{"a": ' * 50_000, "closed deep": b'{"a": ' * 900 + b"1" + b"}" * 900,
    "long number": b'{"train_batch_size": ' + b"9" * 5000 + b"}",
    "nan": b'{"learning_rate": NaN, "train_batch_size": Infinity}',
    "huge": b'{"train_micro_batch_size_per_gpu": 1e400, "zero_optimization": {"stage": 1e30}}',
    "half a pair": b'{"optim": "\\ud800", "learning_rate": 1}', "twice": b'{"learning_rate": 1, "learning_rate": 2}',
    "itself": b'{"deepspeed": "config.json", "learning_rate": 1, "output_dir": "x", "optim": "adamw_torch"}',
    "nul": bytes(20), "cut": b'{"learning_rate": 1'}
CONFIG_YAMLS: Mapping[str, str] = {
    "itself": "output_dir: x\nlearning_rate: 1e-4\noptim: adamw_torch\ndeepspeed: config.yaml\n",
    "alias of itself": "learning_rate: &a [*a]\noutput_dir: x\noptim: adamw_torch",
    "table of itself": "output_dir: &a\n  x: *a\nlearning_rate: 1e-4\n",
    "whole in itself": "&a\nlearning_rate: 1e-4\noutput_dir: *a\n",
    "interpolation": "a: ${b}\nb: ${a}\nlearning_rate: ${learning_rate}\n",
    "merge of itself": "&a\n<<: *a\nlearning_rate: 1\n",
    "datasets in themselves": "base_model: x\ndatasets: &a\n  - path: *a\n    type: alpaca\nsequence_len: 3\n",
    "datasets": "base_model: x\ndatasets: 3\nadapter: lora\nsequence_len: 1e400\nmicro_batch_size: -1\n",
    "odd": "learning_rate: [1]\noptim: {}\nbf16: 3\noutput_dir: null\nper_device_train_batch_size: 0\n",
    "dates": "learning_rate: 2001-13-45\noutput_dir: 2001-01-01\noptim: x",
    "time": "seed: 12:30:45\nlearning_rate: 1e-4\noutput_dir: x",
    "huge": "per_device_train_batch_size: 1" + "0" * 30 + "\ngradient_accumulation_steps: 1" + "0" * 30 +
        "\nlearning_rate: 1e300\noutput_dir: x",
    "long list": "lora_target_modules: [" + "a," * 50_000 + "]\nlearning_rate: 1e-4"}


def _header(header: Any, rest: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
RECIPE_BYTES: Mapping[str, bytes] = {
    "latin": "name: ä".encode("latin-1"), "utf-16": "seed: 1".encode("utf-16"), "zeros": bytes(5000),
}
OBJECTS: Mapping[str, bytes] = {
    "object": b'{"data": 3}', "two lists": b'{"a": [1], "b": [2]}', "list of lists": b"[[1],[2]]",
    "articles": b'{"data": [{"paragraphs": [{"qas": 3}]}]}',
    "articles of numbers": b'{"data": [{"paragraphs": [1, {"qas": [1, {}]}]}]}', "open list": b'[{"a": 1}',
    "comma": b'[{"a": 1},]', "rest": b'[{"a": 1}] x', "deep": b"[" * 100_000, "long number": b"[" + b"9" * 5000 + b"]",
}
SHEETS: Mapping[str, bytes] = {
    "quote": b'a,b\n"x,y\n', "twice": b"a,a\n1,2\n", "fields": b"text,b\n1\n", "latin": "text\nä\n".encode("latin-1"),
    "only header": b"text\n", "empty header": b",\n1,2\n", "NUL": b"text\na\0b\n", "lone return": b"text\ra\rb\r",
}
CORPORA: Mapping[str, bytes] = {
    "empty": b"", "one": b"a", "NUL": b"a\0b" * 100, "latin": "ä".encode("latin-1") * 100,
    "half a pair": b"\xed\xa0\x80" * 100, "spaces": b" " * 10_000, "line ends": b"\r\r\n" * 1000,
    "one character": b"a" * 10_000, "combining": ("e" + "\u0301" * 5000).encode(), "controls": bytes(range(1, 32)) * 50,
    "emoji": "👩‍👩‍👧".encode() * 500, "long word": b"x" * 50_000,
}
CONFIG_FILES: Mapping[str, bytes] = {
    "empty": b"", "list": b"[]", "cut": b'{"model_type": ', "deep": b'{"a": ' * 20_000, "nul": bytes(50),
    "latin": '{"a": "ä"}'.encode("latin-1"), "long number": b'{"vocab_size": ' + b"9" * 5000 + b"}", "no keys": b"{}",
    "only type": b'{"model_type": "llama"}', "large": b'{"a": "' + b"x" * (70 << 20) + b'"}',
}
ADAPTERS: Mapping[str, bytes] = {
    "empty": b"", "list": b"[]", "no base": b"{}",
    "r": b'{"peft_type": "LORA", "r": 1000000000, "lora_alpha": 1, "target_modules": ["q_proj"]}',
    "type": b'{"peft_type": 3}', "targets": b'{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": "("}',
}
TOKENIZERS: Mapping[str, bytes] = {
    "empty": b"", "list": b"[]", "cut": b'{"version": ', "no model": b'{"version": "1.0"}', "deep": b'{"a": ' * 20_000,
    "nul": bytes(50),
    "regex": json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Split",
        "pattern": {"Regex": "(a+)+("}, "behavior": "Isolated", "invert": False}, "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}).encode(),
    "id": json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": [
        ]}}).encode(),
    "large id": json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 10**20}, "merges": [
        ]}}).encode(),
    "merges": json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [
        "b c"]}}).encode(),
}
TOKENIZER_CONFIGS: Mapping[str, bytes] = {
    "empty": b"", "list": b"[]", "numbers": b'{"eos_token": 3, "bos_token": [1], "chat_template": 5}',
    "tokens": b'{"eos_token": {"content": 3}}', "templates": b'{"chat_template": [1]}',
    "named templates": b'{"chat_template": [{"name": "a"}]}', "end": b'{"eos_token": "nothing"}', "FIFO": b"",
}
WEIGHTS: Mapping[str, bytes] = {
    "empty": b"", "short": b"\1\2", "pickle": b"\x80\x04\x95\x00cos\nsystem\n", "zip": b"PK\3\4" + bytes(100),
    "header longer than the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "header of 2^63": (1 << 63).to_bytes(8, "little") + b"{}", "header list": _header([]),
    "header deep": _header(b'{"a": ' * 50_000), "no tensor": _header({}), "not JSON": _header(b"hello"),
    "offsets": _header({"a": {**TENSOR, "data_offsets": [0, 800]}}, bytes(8)),
    "negative": _header({"a": {**TENSOR, "data_offsets": [-8, 0]}}, bytes(8)),
    "overlap": _header({"a": TENSOR, "b": TENSOR}, bytes(8)),
    "shape": _header({"a": {**TENSOR, "shape": [10**18, 10**18]}}, bytes(8)),
    "negative shape": _header({"a": {**TENSOR, "shape": [-2]}}, bytes(8)),
    "dtype": _header({"a": {**TENSOR, "dtype": "X9"}}, bytes(8)),
    "shape text": _header({"a": {**TENSOR, "shape": "x"}}, bytes(8)), "other names": _header({"a": TENSOR}, bytes(8)),
}
INDEXES: Mapping[str, bytes] = {
    "empty": b"", "list": b"[]", "map": b'{"weight_map": 3}',
    "outside": b'{"weight_map": {"model.norm.weight": "../../../../etc/passwd"}}', "numbers": b'{"weight_map": {"a": 3}}',
    "missing": b'{"weight_map": {"a": "nothing.safetensors"}}',
}
SCRIPT_BYTES: Mapping[str, bytes] = {
    "latin": "x = 'ä'".encode("latin-1"), "utf-16": "x = 1".encode("utf-16"), "large": b"x = 1\n" * 500_000,
    "binary": bytes(range(256)) * 50,
}
CHATTED: Mapping[str, bytes] = {
    "not text": b"\xff\xfe\x80hello\n", "NUL": b"\0\n", "half": b"hello \xe2\x82",
    "commands": b"/nothing\n/system\n/history\n/reset\n/help\n/exit\n", "empty": b"", "long": b"x" * 60_000 + b"\n",
    "escape": b"\x1b]52;c;aGk=\x07\n", "half a pair": b"\xed\xa0\x80\n",
}
