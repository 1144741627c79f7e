"""Jobs outlive the page, one that uses the device runs at a time, and a process is never taken for another one."""

import json
import os
import re
import signal
import sys
import time

import psutil
import pytest

from powertrain.records import WrongUse
from powertrain.web.jobs import Job, Jobs
from powertrain.web.jobs_pages import outcome, tone
from powertrain.web.places import NotThere
from powertrain.web.sessions import Sessions

# stands for `powertrain`: says that it has begun, ends well at SIGTERM with 75, and else when a file `go` is there
PROGRAM = """
import os, signal, sys, time
print("began", *sys.argv[1:], flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
while not os.path.exists("go"):
    time.sleep(0.02)
print("done", flush=True)
"""
WAIT_S = 20.0


@pytest.fixture
def open_jobs(root, ending):
    opened = []

    def open_them(folder=None, sign=lambda text: ""):
        opened.append(Jobs(folder or root / "jobs", root, dict(os.environ), (sys.executable, "-c", PROGRAM), sign))
        return opened[-1]

    yield open_them
    for jobs in opened:
        ending(jobs)


def wait_for(jobs, job, state="ended", says=""):
    until = time.time() + WAIT_S
    while time.time() < until:
        jobs.look()
        if jobs.get(job.id).state == state and says in jobs.output(job):
            return jobs.get(job.id)
        time.sleep(0.02)
    raise AssertionError(f"{jobs.get(job.id)}: {jobs.output(job)}")


def test_a_job_runs_and_leaves_its_output_and_code(open_jobs, root):
    jobs = open_jobs()
    job = jobs.ask("Train it", ["train", "a=b c", "--output", "runs/x"], "runs/x")
    assert wait_for(jobs, job, "running", "began").pid
    (root / "go").touch()
    ended = wait_for(jobs, job)
    assert (ended.code, jobs.output(job)) == (0, "began train a=b c --output runs/x\ndone\n")
    assert jobs.of_run("runs/x") == ended
    assert ended.command == "powertrain train 'a=b c' --output runs/x"


def test_one_that_uses_the_device_runs_at_a_time_in_the_order_of_the_queue(open_jobs, root):
    jobs = open_jobs()
    first, second, third = (jobs.ask(name, ["train", name]) for name in "abc")
    light = jobs.ask("look", ["audit", "x.py"])
    assert [jobs.get(job.id).state for job in (first, second, third, light)] == ["running", "waiting", "waiting", "running"]
    jobs.move(third.id, up=True)
    jobs.move(third.id, up=True)             # it is the first of those that wait, and stays
    assert [job.title for job in jobs.all() if job.state == "waiting"] == ["c", "b"]
    wait_for(jobs, first, "running", "began")
    jobs.stop(first.id, now=False)
    assert wait_for(jobs, first).code == 75
    assert (jobs.get(third.id).state, jobs.get(second.id).state) == ("running", "waiting")
    jobs.stop(second.id, now=False)          # taken out
    jobs.stop(third.id, now=True)
    assert wait_for(jobs, third).code == -signal.SIGKILL
    jobs.look()
    assert (jobs.get(second.id).state, jobs.get(second.id).began) == ("ended", 0.0)


def test_the_same_question_twice_is_one_job(open_jobs, root):
    jobs = open_jobs()
    first = jobs.ask("a", ["train", "x=1", "--output", "runs/a-1"], "runs/a-1")
    assert jobs.ask("a", ["train", "x=1", "--output", "runs/a-2"], "runs/a-2").id == first.id
    assert jobs.ask("a", ["train", "x=2", "--output", "runs/a-3"], "runs/a-3").id != first.id
    (root / "go").touch()
    wait_for(jobs, first)
    assert jobs.ask("a", ["train", "x=1", "--output", "runs/a-4"], "runs/a-4").id != first.id       # asked again, later


def test_another_server_takes_running_and_waiting_jobs_back(open_jobs, root):
    before = open_jobs()
    running, waiting = before.ask("a", ["train", "a"]), before.ask("b", ["train", "b"])
    began = wait_for(before, running, "running", "began")
    before.close()                           # as a kill does, which the processes do not notice
    after = open_jobs()
    after.look()
    assert after.get(running.id) == began
    assert after.get(waiting.id).state == "waiting"
    (root / "go").touch()
    before._children[running.id].wait(WAIT_S)            # here its parent lives, and has to take note
    assert wait_for(after, running).code is None         # nobody waited for it
    assert wait_for(after, waiting).code == 0


def test_a_server_that_dies_while_it_starts_a_job_starts_it_once(open_jobs, root, monkeypatch):
    jobs = open_jobs()

    def dies(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("powertrain.web.jobs.psutil.Process", dies)          # the process has begun, and nobody knows it
    with pytest.raises(KeyboardInterrupt):
        jobs.ask("a", ["train", "a", "--output", "runs/a"], "runs/a")
    monkeypatch.undo()
    jobs.close()
    after = open_jobs()
    after.look()
    assert [job.state for job in after.all()] == ["ended"]
    (root / "go").touch()                    # which ends it
    for child in jobs._children.values():
        child.wait(WAIT_S)


def test_a_process_with_the_same_number_is_another_one(open_jobs, root):
    jobs = open_jobs()
    job = jobs.ask("a", ["train", "a"])
    process = psutil.Process(wait_for(jobs, job, "running", "began").pid)
    jobs.close()
    path = root / "jobs" / f"{job.id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "process_began": process.create_time() - 500.0}))
    after = open_jobs()
    after.stop(job.id, now=True)             # must not end what is another process by now
    after.look()
    assert after.get(job.id).state == "ended"
    assert process.is_running()


def test_a_second_server_is_refused_with_the_address_of_the_first(open_jobs, root):
    open_jobs().name_address("http://127.0.0.1:8790")
    with pytest.raises(WrongUse, match=r"already runs.*http://127.0.0.1:8790"):
        open_jobs()


def test_a_damaged_file_loses_that_job_only(open_jobs, root):
    jobs = open_jobs()
    job = jobs.ask("a", ["audit", "a"])
    jobs.close()
    (root / "jobs" / "broken.json").write_text('{"id": ')
    (root / "jobs" / "strange.json").write_text('{"id": "strange", "colour": 1}')
    assert [found.id for found in open_jobs().all()] == [job.id]


def test_a_job_that_came_with_the_folder_is_not_started(open_jobs, root, tmp_path):
    ours, others = (Sessions(tmp_path / name, str(root)).sign for name in ("ours", "others"))
    jobs = open_jobs(sign=others)
    first, second = (jobs.ask(name, ["train", name]) for name in "ab")           # the second one waits
    wait_for(jobs, first, "running", "began")
    jobs.stop(first.id, now=True)
    jobs.close()
    jobs._children[first.id].wait(WAIT_S)
    here = open_jobs(sign=ours)
    here.look()
    assert here.get(second.id).state == "ended"
    assert here.output(second) == ""
    here.close()
    (root / "jobs" / f"{second.id}.json").write_text(json.dumps({"id": second.id, "title": "b", "words": ["train", "b"]}))
    assert open_jobs(sign=ours).get(second.id).state == "ended"


def test_only_so_many_jobs_wait(open_jobs, root, monkeypatch):
    monkeypatch.setattr("powertrain.web.jobs.MOST_WAITING", 2)
    jobs = open_jobs()
    for name in "abc":
        jobs.ask(name, ["train", name])      # one runs, two wait
    with pytest.raises(WrongUse, match="2 jobs wait already"):
        jobs.ask("d", ["train", "d"])


def test_no_secret_of_the_output_is_shown(open_jobs, root):
    jobs = open_jobs()
    token = "hf_" + "a" * 34
    job = jobs.ask("a", ["train", token])
    wait_for(jobs, job, "running", "began")
    assert token not in jobs.output(job)


def test_an_unknown_job(open_jobs):
    jobs = open_jobs()
    for name in ("x", "../x", "", "\0"):
        with pytest.raises(NotThere):
            jobs.get(name)


def test_pages_show_jobs_and_change_them(client):
    client.site.jobs.program = (sys.executable, "-c", PROGRAM)
    job = client.site.jobs.ask("<script>alert(1)</script>", ["train", "<b>=1"])
    second = client.site.jobs.ask("second", ["train", "2"])
    for path in ("/jobs", f"/jobs/{job.id}"):
        page = client.get(path)
        assert page.status == 200
        assert "<script>alert" not in page.text
        assert "&lt;script&gt;alert" in page.text
    assert client.get("/jobs/nothing").status == 404
    assert client.post(f"/jobs/{second.id}/move", {"where": "up"}).json() == {"refresh": True}
    for wrong in ({"where": "out"}, {}, {"where": ["up"]}):
        assert "problem" in client.post(f"/jobs/{second.id}/move", wrong).json()
    assert client.post(f"/jobs/{second.id}/stop", {"how": "well"}).json() == {"refresh": True}
    assert "It was taken out of the queue before it began." in client.get(f"/jobs/{second.id}").text
    assert client.post(f"/jobs/{job.id}/stop", {"how": "now"}).status == 200
    wait_for(client.site.jobs, job)
    assert "It was ended at once; nothing after its last save is kept." in client.get(f"/jobs/{job.id}").text
    assert re.search(r'class="word bad wraps">was ended at once', client.get("/jobs").text)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 75, 130, -9, -15, None])
def test_how_a_job_stands_is_the_rest_of_a_sentence(code):
    job = Job("x", "Train x", ("train",), state="ended", began=1.0, code=code)
    assert outcome(job).split()[0] in ("is", "has", "was", "ended")
    assert tone(job) == ("good" if code in (0, 4, 5, 75) else "bad")
