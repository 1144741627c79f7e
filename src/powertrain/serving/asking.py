"""What a client of the OpenAI API asks for: its JSON, checked, as a value.

A field that would change the answer and is not supported is refused by name, never dropped. Fields that only label a request
are accepted and not read.
Source: the API reference of platform.openai.com, chat completions and completions.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from powertrain.data.rows.row import Message, fault
from powertrain.records import WrongUse

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MOST_STOPS, LONGEST_STOP = 4, 1000
LARGEST_SEED = 2**63 - 1
SAMPLED = frozenset({"model", "stream", "stream_options", "stop", "max_tokens", "temperature", "top_p", "top_k", "seed"})
READ = {True: SAMPLED | {"messages", "max_completion_tokens"}, False: SAMPLED | {"prompt"}}      # chat, completion
LABELS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
# fields that may be sent with the value that changes nothing
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "logprobs": (False,),
    "echo": (False,), "suffix": ("",), "tools": ([],), "functions": ([],), "tool_choice": ("none",), "function_call": ("none",),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "parallel_tool_calls": (True, False)}


class Refused(WrongUse):
    """A request that is not carried out: the HTTP status, and the parts of OpenAI's error object besides the message."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True)
class Asked:
    messages: tuple[Message, ...]            # of a chat; empty for a completion
    prompt: str                              # of a completion
    tokens: int | None                       # at most; None: as many as the context has room for
    temperature: float | None                # None: the server's own
    top_p: float | None
    top_k: int | None
    seed: int
    stops: tuple[str, ...]
    is_streamed: bool
    counts_tokens: bool                      # a stream ends with its usage

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)


def read_request(body: Any, *, model: str, is_chat: bool) -> Asked:
    """Return what a request's JSON asks of the model `model`. Raises Refused where it cannot be carried out as asked."""
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object; send one with Content-Type application/json")
    given = {name: value for name, value in body.items() if value is not None}
    if reason := fault(given):
        raise Refused(f"the request holds {reason}")
    _refuse_unsupported(given, is_chat)
    if given.get("model") != model:
        raise Refused(f"the model {given.get('model')!r} is not served here; ask for {model!r}", param="model",
                      code="model_not_found", status=404)
    most = given.get("max_completion_tokens", given.get("max_tokens", None if is_chat else 16))      # OpenAI's own default
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise _wrong("stream_options", "an object, such as {\"include_usage\": true}")
    return Asked(_messages(given.get("messages")) if is_chat else (), "" if is_chat else _prompt(given.get("prompt", "")),
                 None if most is None else int(_number("max_tokens", most, 1, 10**9, whole=True)),
                 _optional(given, "temperature", 0, 2), _optional(given, "top_p", 0, 1),
                 None if "top_k" not in given else int(_number("top_k", given["top_k"], 1, 10**9, whole=True)),
                 int(_number("seed", given.get("seed", secrets.randbits(31)), 0, LARGEST_SEED, whole=True)),
                 _stops(given.get("stop", [])), _flag(given, "stream"), _flag(options, "include_usage"))


def _refuse_unsupported(given: Mapping[str, Any], is_chat: bool) -> None:
    for name, value in given.items():
        if name in READ[is_chat] | LABELS or value in WITHOUT_EFFECT.get(name, ()):
            continue
        known = " (only the value that changes nothing is)" if name in WITHOUT_EFFECT else ""
        raise Refused(f"{name[:60]} is not supported here{known}; leave it out", param=name[:60], code="unsupported_parameter")


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise _wrong("messages", 'a list with at least one message, such as [{"role": "user", "content": "Hello"}]')
    return tuple(_message(f"messages[{number}]", message) for number, message in enumerate(given))


def _message(name: str, given: Any) -> Message:
    if not isinstance(given, dict):
        raise _wrong(name, 'an object, such as {"role": "user", "content": "Hello"}')
    role = ROLES.get(str(given.get("role")))
    if role is None:
        raise _wrong(f"{name}.role", f"one of {', '.join(ROLES)}")
    if given.get("tool_calls"):
        raise Refused(f"{name} calls tools, which are not supported here; leave tool_calls out", param=f"{name}.tool_calls",
                      code="unsupported_parameter")
    content = given.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) and part.get("type") == "text"
                                              and isinstance(part.get("text"), str) for part in parts):
        raise _wrong(f"{name}.content", "a text, or a list of parts of type text: this model reads text only")
    return Message(role, "".join(part["text"] for part in parts))


def _prompt(given: Any) -> str:
    texts = given if isinstance(given, list) else [given]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise _wrong("prompt", "one text; send several prompts as several requests")
    return str(texts[0])


def _stops(given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or len(texts) > MOST_STOPS or not all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP
                                                                         for text in texts):
        raise _wrong("stop", f"a text, or a list of at most {MOST_STOPS}, each of 1 to {LONGEST_STOP:,} characters")
    return tuple(texts)


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name) or False
    if not isinstance(value, bool):
        raise _wrong(name, "true or false")
    return value


def _optional(given: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    return None if name not in given else _number(name, given[name], least, most)


def _number(name: str, given: Any, least: float, most: float, *, whole: bool = False) -> float:
    kinds = (int,) if whole else (int, float)
    if isinstance(given, bool) or not isinstance(given, kinds) or not math.isfinite(given) or not least <= given <= most:
        raise _wrong(name, f"{'a whole number' if whole else 'a number'} from {least:g} to {most:g}")
    return given


def _wrong(name: str, wanted: str) -> Refused:
    return Refused(f"{name} must be {wanted}", param=name, code="invalid_value")
