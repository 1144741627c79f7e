"""The Modelfile beside a GGUF file: its Go template renders what the tokenizer's chat template renders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from example_folders import CHATML, INST, chat_folder
from powertrain.data.examples.templates import SHIPPED, find_template
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.data.rows.row import Message
from powertrain.export.modelfile import Render, find_turns, write_modelfile

LLAMA3 = ("{% for m in messages %}{% set c = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim "
          "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
GEMMA = ("{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
         "{% for m in messages %}{% if m['role'] == 'assistant' %}{% set r = 'model' %}{% else %}{% set r = m['role'] %}"
         "{% endif %}{{ '<start_of_turn>' + r + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}")
QWEN = ("{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n"
        "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
PHI3 = ("{% for m in messages %}{% if m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] + '<|end|>\n' }}"
        "{% elif m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}"
        "{% elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}")
COUNTING = "{% for m in messages %}{{ loop.index }} {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
SHOUTING = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | upper }}\n{% endfor %}"
EXPRESSIBLE = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "qwen": QWEN, "phi3": PHI3, "llama2": INST,
               "plain": SHIPPED["plain"], "raw": SHIPPED["raw"]}
TALKS = ("user", "user assistant user", "system user", "system user assistant user assistant user")


def rendering(folder: Path, template: str) -> Render:
    found = find_template(open_example_tokenizer(chat_folder(folder, template)), None)
    return lambda messages: found.render(messages, add_generation_prompt=True)


def go(template: str, messages: list[Message]) -> str:
    """Run a template as Go's text/template and Ollama do, as far as Modelfiles of ours use it: range, if, else if, fields."""
    tokens = re.split(r"({{ [^}]* }})", template)
    system = "\n\n".join(message.content for message in messages if message.role == "system")

    def run(place: int, message: Message | None, *, writes: bool) -> tuple[str, int]:
        """Run from a token to the `end` or `else` that belongs to it."""
        out = ""
        while place < len(tokens):
            token, place = tokens[place], place + 1
            action = token[3:-3].strip() if token.startswith("{{") else None
            if action is None:
                out += token if writes else ""
            elif action == ".Content":
                out += message.content if writes and message else ""
            elif action == "range .Messages":
                bodies = [run(place, one, writes=writes) for one in messages]
                out, place = out + "".join(text for text, _ in bodies), bodies[0][1] + 1
            elif action.startswith("if "):
                is_done = False
                while True:
                    condition = action.removeprefix("else ").removeprefix("if ")
                    asked = re.fullmatch(r'eq \.Role "(\w+)"', condition)
                    holds = not system if condition == "not .System" else bool(asked and message and message.role == asked[1])
                    text, place = run(place, message, writes=writes and holds and not is_done)
                    out, is_done = out + text, is_done or holds
                    action = tokens[place][3:-3].strip()
                    place += 1
                    if action == "end":
                        break
            else:
                assert action == "end" or action.startswith("else if "), action
                return out, place - 1
        return out, place

    text, place = run(0, None, writes=True)
    assert place == len(tokens)
    return text


def template_in(modelfile: str) -> str:
    found = re.search(r'^TEMPLATE """(.*?)"""$', modelfile, re.MULTILINE | re.DOTALL)
    assert found, modelfile
    return found[1]


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_the_go_template_renders_what_the_chat_template_renders(name: str, tmp_path: Path) -> None:
    render = rendering(tmp_path, EXPRESSIBLE[name])
    text, _ = write_modelfile("tiny.gguf", render, stops=[], context=64)
    for roles in TALKS:
        messages = [Message(role, f"{role} says {{ {number} }} & \"so\"\non.") for number, role in enumerate(roles.split())]
        if name in ("gemma", "llama2") and roles.startswith("system"):       # these refuse a system text
            assert "knows no system text" in text
        else:
            assert go(template_in(text), messages) == render(messages), roles


@pytest.mark.parametrize("template", [COUNTING, SHOUTING, CHATML.replace("<|im_start|>", '"""'),
                                      CHATML.replace("<|im_start|>", "{{ '{{' }}")],
                         ids=["counting", "shouting", "quotes", "braces"])
def test_a_template_that_go_cannot_say_is_left_out_and_said(template: str, tmp_path: Path) -> None:
    render = rendering(tmp_path, template)
    assert find_turns(render) is None
    text, said = write_modelfile("tiny.gguf", render, stops=[], context=64)
    assert "TEMPLATE \"" not in text
    assert "TEMPLATE is left out" in said
    assert text.startswith(f"# {said}\nFROM ./tiny.gguf\n")


def test_a_model_without_a_chat_template_continues_its_prompt() -> None:
    text, said = write_modelfile("tiny.gguf", None, stops=["<|endoftext|>"], context=128)
    assert text == (f"# {said}\nFROM ./tiny.gguf\nTEMPLATE \"\"\"{{{{ .Prompt }}}}\"\"\"\nPARAMETER stop \"<|endoftext|>\"\n"
                    "PARAMETER temperature 0.7\nPARAMETER repeat_penalty 1\nPARAMETER num_ctx 128\n")
    assert "num_ctx 8192" in write_modelfile("tiny.gguf", None, stops=[], context=131_072)[0]


def test_a_token_that_llama_cpp_writes_by_itself_is_not_written_twice(tmp_path: Path) -> None:
    render = rendering(tmp_path, LLAMA3)
    alone = template_in(write_modelfile("tiny.gguf", render, stops=[], context=64)[0])
    shared = template_in(write_modelfile("tiny.gguf", render, stops=[], context=64, begin_token="<|endoftext|>")[0])
    assert "<|endoftext|>" in alone
    assert "<|endoftext|>" not in shared
    asked = [Message("user", "Hello")]
    assert "<|endoftext|>" + go(shared, asked) == go(alone, asked) == render(asked)
