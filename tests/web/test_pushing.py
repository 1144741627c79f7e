"""A push that is asked for in the page: by a real browser, with the real command, to a hub on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Served, Visitor, chromium
from playwright.sync_api import Browser
from runs_written import write_run

from adapted_models import make_base
from example_folders import chat_folder
from hub_server import TOKEN, Hub, running_hub
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.models.huggingface.folder import save_folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as hub:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
                            "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture
def served(hub: Hub, tmp_path: Path) -> Iterator[Served]:
    folder = tmp_path / "project"
    run = write_run(folder / "runs" / "one", 4)
    save_folder(make_base("llama", vocabulary=330), run / "model", open_example_tokenizer(chat_folder(tmp_path / "words")))
    found = Served(folder, tmp_path / "cache")
    yield found
    found.end()


def test_a_push_asks_is_private_and_shows_no_token(browser: Browser, hub: Hub, served: Served) -> None:
    visitor = Visitor(browser, served)
    page, seen = visitor.go("/models"), []
    page.get_by_text("Push to the hub").click()
    page.get_by_label("Name on the hub").fill("me/one")
    for answer in ("No", "Yes"):
        page.get_by_role("button", name="Push").click()
        asks = page.get_by_role("dialog")
        asks.get_by_text("Send runs/one to the Hugging Face hub as me/one?").wait_for()
        assert "private" in asks.text_content()
        assert not hub.asked
        seen.append(page.content())
        asks.get_by_role("button", name=answer).click()
    page.wait_for_url("**/jobs/*")
    page.get_by_text("It is done.").wait_for()
    assert hub.repositories["me/one"].is_private
    assert "model.safetensors" in hub.repositories["me/one"].files
    for path in ("", "/models", "/system", "/jobs"):
        seen.append((visitor.go(path) if path else page).content())
    written = [file.read_bytes() for file in served.folder.parent.rglob("*") if file.is_file()]
    assert not any(TOKEN in text for text in seen)
    assert not any(TOKEN.encode() in content for content in written)
    assert not visitor.complaints
    visitor.context.close()
