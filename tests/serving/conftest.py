"""A tiny model that knows chatml, served on this machine by the real server, in a thread of the tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from served_models import CONTEXT, TOKEN, Served

from adapted_models import make_base
from example_folders import chat_folder
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.models.huggingface.folder import save_folder
from powertrain.serving.app import make_app
from powertrain.serving.engine import Engine
from powertrain.use.opening import open_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    tokenizer = open_example_tokenizer(chat_folder(folder / "tokenizer"))
    save_folder(make_base("llama", vocabulary=330, context=CONTEXT), folder / "tuned", tokenizer)
    return folder / "tuned"


@pytest.fixture(scope="module")
def served(model_folder: Path) -> Iterator[Served]:
    engine = Engine(open_model(str(model_folder)), "tuned", temperature=0.0)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    app = make_app(engine, [f"127.0.0.1:{port}", f"localhost:{port}"], TOKEN)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none", http="h11",
                                           timeout_graceful_shutdown=1))
    running = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    running.start()
    while not server.started:
        time.sleep(0.01)
    yield Served(engine, port)
    server.should_exit = True
    running.join(10)
    engine.close()
