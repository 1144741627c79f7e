"""Conversations: one process a model, which knows the messages of one visitor, and ends with the page."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from browser import wait_until
from runs_written import write_run

from powertrain.records import WrongUse
from powertrain.web import chatting
from powertrain.web.chat_pages import ANY_PROMPT, FUNCTION, first_prompt, model_of
from powertrain.web.chatting import Model, Talk, Talks
from powertrain.web.places import Places

# what `powertrain chat MODEL --json` prints, without a model: an answer is the number of messages that it remembers
FAKE = '''
import json, signal, sys, time
print(sys.argv[2:], file=open("started", "a"))
said = []
if "damaged" in sys.argv[2]:
    print(json.dumps({"event": "error", "message": "the file is damaged", "exit_code": 2}), flush=True)
    sys.exit(2)
for line in sys.stdin:
    told = json.loads(line)
    if told.get("reset"):
        said.clear()
    if told["message"] == "die":
        sys.exit(9)
    if told["message"] == "hang":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if told["message"] == "deaf":            # to the first interrupt
        signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.default_int_handler))
    said.append(told["message"])
    try:
        for number in range(100_000 if told["message"] in ("long", "hang", "deaf") else 2):
            print(json.dumps({"event": "piece", "text": f"{len(said)}"}) + "\\n", end="", flush=True)
            time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    print(json.dumps({"event": "answer", "message": told["message"], "text": "", "prompt": "|".join(said)}), flush=True)
'''
ONE, TWO, THREE = (Model(f"./runs/{name}") for name in ("one", "two", "three"))


@pytest.fixture
def talks(root: Path) -> Talks:
    (root / "fake.py").write_text(FAKE)
    return Talks(root, os.environ, (sys.executable, str(root / "fake.py")))


def together(talks: Talks, do: Callable[[], Awaitable[None]]) -> None:
    """Carry out what a page would within its life."""
    async def life() -> None:
        try:
            async with asyncio.timeout(60):
                await do()
        finally:
            await talks.tend(all_of_them=True)

    asyncio.run(life())


async def said(talks: Talks, model: Model, message: str, visit: str = "a", turn: int = 0) -> list[Any]:
    return [line async for line in talks.ask(model, {"message": message}, visit, turn)]


def started(root: Path) -> int:
    return len((root / "started").read_text().splitlines())


def warm(talks: Talks) -> list[Talk]:
    return list(talks._warm.values())


def test_messages_in_a_row_keep_their_context_and_their_process(talks: Talks, root: Path) -> None:
    async def do() -> None:
        first, second = [await said(talks, ONE, message, turn=turn) for turn, message in enumerate(["hello", "and then?"])]
        assert [line["event"] for line in first] == ["piece", "piece", "answer"]
        assert second[-1]["prompt"] == "hello|and then?"
        assert started(root) == 1

    together(talks, do)


def test_another_visit_begins_anew_and_the_first_one_is_told(talks: Talks) -> None:
    async def do() -> None:
        await said(talks, ONE, "a secret", "a")
        assert (await said(talks, ONE, "hello", "b"))[-1]["prompt"] == "hello"
        back = await said(talks, ONE, "still there?", "a", turn=1)
        assert back[0] == {"event": "forgotten"}
        assert back[-1]["prompt"] == "still there?"

    together(talks, do)


def test_a_second_message_waits_for_no_answer(talks: Talks, root: Path) -> None:
    async def do() -> None:
        answer = talks.ask(ONE, {"message": "long"}, "a", 0)
        await anext(answer)
        with pytest.raises(WrongUse, match="answers another message"):
            await said(talks, ONE, "hello", "b")
        await answer.aclose()
        one, two = await asyncio.gather(said(talks, TWO, "hello"), said(talks, TWO, "hello", "b"), return_exceptions=True)
        assert isinstance(two, WrongUse) or isinstance(one, WrongUse)
        assert started(root) == 2            # and not a process for each of the two messages

    together(talks, do)


@pytest.mark.parametrize("message", ["long", "deaf"])
def test_a_stopped_answer_ends_and_the_conversation_goes_on(
        talks: Talks, root: Path, monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    monkeypatch.setattr(chatting, "AGAIN_S", 0.5)

    async def do() -> None:
        answer = talks.ask(ONE, {"message": message}, "a", 0)
        await anext(answer)
        await answer.aclose()
        assert (await said(talks, ONE, "and now?", turn=1))[-1]["prompt"] == f"{message}|and now?"
        assert started(root) == 1

    together(talks, do)


def test_a_process_that_does_not_stop_is_ended(talks: Talks, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chatting, "STOP_S", 0.3)

    async def do() -> None:
        answer = talks.ask(ONE, {"message": "hang"}, "a", 0)
        await anext(answer)
        hanging = warm(talks)[0].process
        await answer.aclose()
        assert (await said(talks, ONE, "and now?", turn=1))[0] == {"event": "forgotten"}
        assert hanging.returncode == -signal.SIGKILL
        assert started(root) == 2

    together(talks, do)


def test_a_process_that_ends_is_said_and_started_anew(talks: Talks, root: Path) -> None:
    async def do() -> None:
        assert "process has ended" in (await said(talks, ONE, "die"))[-1]["message"]
        assert (await said(talks, ONE, "hello"))[-1]["event"] == "answer"
        assert (await said(talks, Model("damaged"), "hello"))[-1]["message"] == "the file is damaged"
        assert (await said(talks, Model("damaged"), "hello"))[-1]["message"] == "the file is damaged"      # not "has ended"

    together(talks, do)


def test_two_processes_stay_warm_and_none_for_long(talks: Talks, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def do() -> None:
        for model in (ONE, TWO, ONE, THREE):
            await said(talks, model, "hello")
        assert list(talks._warm) == [ONE.name, THREE.name]   # the one that was used longest ago has ended
        processes = [psutil.Process(talk.process.pid) for talk in warm(talks)]
        await talks.tend()
        assert len(warm(talks)) == 2
        monkeypatch.setattr(chatting, "IDLE_S", 0.0)
        await talks.tend()
        assert not warm(talks)
        assert not any(process.is_running() for process in processes)

    together(talks, do)


def test_weights_that_were_written_anew_are_read_anew(talks: Talks, root: Path) -> None:
    async def do() -> None:
        await said(talks, ONE, "hello")
        await said(talks, Model(ONE.name, changed_ns=1), "hello")
        assert started(root) == 2

    together(talks, do)


def test_a_model_that_does_not_fit_is_refused_with_one_that_is_loading(talks: Talks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chatting, "usable_memory", lambda: (16 * 2**30, 10 * 2**30, "a control group"))
    half, half_too = (Model(name, size_bytes=3 * 2**30) for name in ("half", "half too"))

    async def do() -> None:
        with pytest.raises(WrongUse, match=r"needs about 11 GiB, and 10 GiB are free; stop the training"):
            await said(talks, Model("whole", size_bytes=5 * 2**30), "hello")
        loading = await talks._talk(half)
        with pytest.raises(WrongUse, match=r"needs about 6\.6 GiB, and 3\.4 GiB are free"):
            await said(talks, half_too, "hello")
        loading.is_loaded = True             # and so no longer free
        assert (await said(talks, half_too, "hello"))[-1]["event"] == "answer"

    together(talks, do)


def test_the_process_ends_with_a_page_that_was_killed(root: Path) -> None:
    (root / "fake.py").write_text(FAKE)
    page = '''
import asyncio, os, sys
from pathlib import Path
from powertrain.web.chatting import Model, Talks
async def life():
    talks = Talks(Path("."), os.environ, (sys.executable, "fake.py"))
    async for _ in talks.ask(Model("./m"), {"message": "hello"}):
        pass
    print(talks._warm["./m"].process.pid, flush=True)
    async for _ in talks.ask(Model("./m"), {"message": sys.argv[1]}, "", 1):
        pass
    await asyncio.sleep(600)
asyncio.run(life())
'''
    for doing in ("hello", "long"):
        with subprocess.Popen([sys.executable, "-c", page, doing], cwd=root, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout
            process = psutil.Process(int(server.stdout.readline()))
            time.sleep(0.3)
            server.kill()
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, 10)  # noqa: B023


# ------------------------------------------------------------------------------------------------ the page


EVIL = "<script>alert(1)</script>"


class Scripted:
    """Talks whose model says what it is given."""

    def __init__(self, *lines: Any):
        self.lines, self.asked = lines, list[Any]()

    async def ask(self, *asked: Any) -> Any:
        self.asked.append(asked)
        for line in self.lines:
            if isinstance(line, Exception):
                raise line
            yield line


def asked(client: Any, talks: Scripted, **values: Any) -> Any:
    client.app.app.state.site = replace(client.site, talks=talks)
    return client.post("/chat/ask", {"model": "runs/one", "message": "hello", "tokens": "5", "temperature": "0.7", "seed": "0",
                                     "conversation": "a", "turn": 0, **values})


def finished(folder: Path, base: Path | None = None) -> Path:
    """Make a run with a finished model, of an adapter for `base` if one is given."""
    run = write_run(folder, 4)
    (run / "model").mkdir()
    (run / "model" / "model.safetensors").write_bytes(b"x" * 1000)
    if base is not None:
        (run / "model" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base / "model")}))
        facts = run / "facts.json"
        told = json.loads(facts.read_text()) if facts.exists() else {}
        facts.write_text(json.dumps({**told, "model": {**told.get("model", {}), "path": str(base / "model")}}))
    return run


def test_a_model_says_text_and_nothing_else(client: Any, root: Path) -> None:
    finished(root / "runs" / "one")
    talks = Scripted({"event": "forgotten"}, {"event": "piece", "text": EVIL}, {"event": "note"},
                     {"event": "answer", "prompt": EVIL})
    answer = asked(client, talks)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [list(line)[:1] for line in lines] == [["notice"], ["piece"], [], ["done"]]
    assert lines[1] == {"piece": EVIL}
    model, message, conversation, turn = talks.asked[0]
    assert (model.name, model.size_bytes) == ("./runs/one", 1000)
    assert message == {"message": "hello", "tokens": 5, "temperature": 0.7, "seed": 0}
    assert (conversation, turn) == ("a", 0)


def test_a_refusal_is_a_line(client: Any, root: Path) -> None:
    finished(root / "runs" / "one")
    for lines in ([{"event": "error", "message": "too long"}], [WrongUse("too long")]):
        assert json.loads(asked(client, Scripted(*lines)).text) == {"problem": "too long"}


@pytest.mark.parametrize("wrong", [
    {"message": ""}, {"message": " \n"}, {"message": 7}, {"message": "a" * 100_001}, {"tokens": 0}, {"tokens": 2049},
    {"tokens": "nan"}, {"temperature": -1}, {"temperature": "hot"}, {"seed": -1}, {"turn": "x"}, {"turn": -1}])
def test_what_no_model_is_asked(client: Any, root: Path, wrong: dict[str, Any]) -> None:
    finished(root / "runs" / "one")
    talks = Scripted({"event": "answer"})
    answer = asked(client, talks, **wrong)
    assert answer.status == 400
    assert answer.json()["problem"]
    assert not talks.asked


@pytest.mark.parametrize("name", [
    "", ".", "..", "runs/..", "runs/../../etc", "/etc", "~", "runs/link", "./runs/link", "runs/one/../link", "runs/unfinished",
    "runs/nothing", "a\0b", "\ud800", "runs/\ud800", "é" * 150, f"runs/{'é' * 150}", "a" * 5000, "-h", "--help", "file.txt",
    "loop"])
def test_models_outside_the_folders_are_refused(client: Any, root: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside" / "model").mkdir(parents=True)
    (root / "runs").mkdir()
    (root / "runs" / "link").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to("loop")
    (root / "file.txt").write_text("")
    (root / "runs" / "unfinished").mkdir()
    talks = Scripted({"event": "answer"})
    answer = asked(client, talks, model=name)
    if name == ".":                          # the page's own folder, in which a command finds no model
        assert [one[0].name for one in talks.asked] == ["./."]
        return
    assert answer.status in (400, 404), answer.text
    assert not talks.asked
    assert client.get("/chat?model=" + quote(name, errors="replace")).status in (200, 400, 404)


def test_names_become_no_options(root: Path, tmp_path: Path) -> None:
    for folder in (root / "-x", tmp_path / "other" / "-x"):
        folder.mkdir(parents=True)
    places = Places(root, (tmp_path / "other",))
    assert model_of(places, "-x").name == "./-x"
    assert model_of(places, str(tmp_path / "other" / "-x")).name == str(tmp_path / "other" / "-x")
    assert model_of(places, "Qwen/Qwen2.5-0.5B") == Model("Qwen/Qwen2.5-0.5B")


def test_a_tuned_model_stands_beside_its_base_and_takes_room_with_it(client: Any, root: Path) -> None:
    base = finished(root / "runs" / f"base {EVIL.replace('/', '')}")
    finished(root / "runs" / "tuned", base)
    assert model_of(Places(root), "runs/tuned").size_bytes == 2000
    found = client.get("/chat?model=runs/tuned").text
    assert found.count("data-model=") == 2
    assert "<script>" not in found
    shutil.rmtree(base)
    assert client.get("/chat?model=runs/tuned").text.count("data-model=") == 1
    listed = client.get("/chat").text
    assert "/chat?model=runs/tuned" in listed


def test_the_message_that_stands_there_fits_the_model(root: Path) -> None:
    run = finished(root / "runs" / "one")
    places = Places(root)
    assert first_prompt(places, "runs/one") == ANY_PROMPT
    (run / "recipe.yaml").write_text("sample: {prompt: 'Once upon'}\ndata: {source: text.txt}\n")
    assert first_prompt(places, "runs/one") == "Once upon"
    (run / "recipe.yaml").write_text("data: {source: docstrings}\n")
    assert first_prompt(places, "runs/one") == FUNCTION
    (run / "recipe.yaml").write_text("][")
    assert first_prompt(places, "runs/one") == ANY_PROMPT
