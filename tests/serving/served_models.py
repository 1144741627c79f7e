"""The values that the tests of serving share."""

from __future__ import annotations

from dataclasses import dataclass

import openai

from powertrain.serving.engine import Engine

TOKEN = "a-token-of-the-tests"
CONTEXT = 96


@dataclass
class Served:
    engine: Engine
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = TOKEN) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)
