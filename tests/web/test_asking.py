"""Quick questions: the newest on a topic is answered, and a process that hangs or dies costs one question."""

import asyncio
import os
import sys

import pytest

from powertrain.records import WrongUse
from powertrain.web.asking import Answer, Asking, Superseded

# answers each line with its words; waits at `slow`, and ends at `die`
PROGRAM = """
import json, os, sys, time
for line in sys.stdin:
    words = json.loads(line)
    if words[0] == "die":
        os._exit(1)
    time.sleep(float(words[1]) if words[0] == "slow" else 0)
    print(json.dumps({"code": 0, "lines": [json.dumps({"event": "said", "words": words, "pid": os.getpid()})]}), flush=True)
"""


def asked(root, work, patience_s=0.3):
    """Run `work` with a process for questions, which is ended afterwards."""
    async def run():
        asking = Asking(root, os.environ, (sys.executable, "-c", PROGRAM), patience_s)
        try:
            return await work(asking)
        finally:
            process = asking._process
            asking.end()
            if process is not None:
                await process.wait()

    return asyncio.run(run())


async def said(asking, words, topic=""):
    return (await asking.ask(words, topic)).event("said")


def test_one_process_answers_all(tmp_path):
    async def work(asking):
        return [await said(asking, ["plan", "a"]), *await asyncio.gather(*(said(asking, ["facts", str(n)]) for n in range(5)))]

    answers = asked(tmp_path, work)
    assert [answer["words"] for answer in answers] == [["plan", "a"], *(["facts", str(n)] for n in range(5))]
    assert len({answer["pid"] for answer in answers}) == 1


def test_the_newest_question_on_a_topic_is_answered(tmp_path):
    async def work(asking):
        first = asyncio.create_task(said(asking, ["slow", "0.5", "0"], "plan"))
        await asyncio.sleep(0.1)
        later = (said(asking, ["slow", "0.1", str(n)], "plan") for n in range(1, 4))
        return await asyncio.gather(first, *later, return_exceptions=True)

    first, *waited, last = asked(tmp_path, work, patience_s=30)
    assert first["words"][2] == "0"
    assert all(isinstance(one, Superseded) for one in waited)
    assert last["words"][2] == "3"


def test_an_older_question_that_takes_long_gives_way(tmp_path):
    async def work(asking):
        old = asyncio.create_task(said(asking, ["slow", "60"], "plan"))
        await asyncio.sleep(0.2)
        new = await said(asking, ["plan", "new"], "plan")
        return new, await asyncio.gather(old, return_exceptions=True)

    new, (old,) = asked(tmp_path, work)
    assert new["words"] == ["plan", "new"]
    assert isinstance(old, WrongUse)


def test_a_question_on_something_else_is_waited_for(tmp_path):
    async def work(asking):
        other = asyncio.create_task(said(asking, ["slow", "1"]))
        await asyncio.sleep(0.2)
        return await said(asking, ["plan"], "plan"), await other

    plan, other = asked(tmp_path, work)
    assert other["words"] == ["slow", "1"]
    assert plan["pid"] == other["pid"]


def test_a_process_that_dies_costs_one_question(tmp_path):
    async def work(asking):
        with pytest.raises(WrongUse, match="ask again"):
            await said(asking, ["die"])
        return await said(asking, ["plan"])

    assert asked(tmp_path, work)["words"] == ["plan"]


def test_a_question_that_nobody_waits_for_any_more_answers_no_other(tmp_path):
    async def work(asking):
        gone = asyncio.create_task(said(asking, ["slow", "0.5", "gone"]))
        await asyncio.sleep(0.2)
        gone.cancel()
        return await said(asking, ["plan"])

    assert asked(tmp_path, work)["words"] == ["plan"]


def test_a_problem_of_a_form_names_no_command_line():
    problem = "max_steps is -5; use 1 or more"
    assert Answer(2, ({"event": "error", "message": f"command line: {problem}"},)).problem == problem
    assert Answer(2, ({"event": "error", "message": problem},)).problem == problem
