"""Files of prompts: the answers of one at a time, each once, however often the work is broken off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generation import CONTEXT, make_model

from example_folders import json_lines
from powertrain.records import WrongUse
from powertrain.use import batch, together
from powertrain.use.batch import Asking, answer_file
from powertrain.use.conversation import Conversation
from powertrain.use.generation import Sampling, generate_ids, open_feed
from powertrain.use.opening import OpenedModel, open_model
from powertrain.use.together import Job, answer_jobs

GREEDY = Sampling(7, temperature=0)
ASKING = Asking(GREEDY, template=True)


def alone(model: Any, job: Job) -> list[int]:
    ids: list[int] = []
    feed, prompt = open_feed(model, job.ids)
    for token in generate_ids(feed, prompt, job.sampling):
        if token in job.stops:
            break
        ids.append(token)
    return ids


@pytest.mark.parametrize(("family", "asked"), [
    ("gpt2", {}), ("llama", {"kv_heads": 2}), ("gemma", {"kv_heads": 1}), ("mistral", {"kv_heads": 2, "window": 5})])
@pytest.mark.parametrize("at_once", [1, 3, 8])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_answers_together_are_those_of_one_at_a_time(family: str, asked: dict[str, Any], at_once: int, by_kernel: bool) -> None:
    model = make_model(family, **asked).requires_grad_(not by_kernel)
    prompts = [(7,), (1, 2, 3), tuple(range(9)), (200, 100), (5,) * 8, tuple(range(30, 34)), (250,)]
    stops = frozenset(alone(model, Job(0, prompts[1], GREEDY, frozenset()))[3:4])       # some end early, and free their slots
    jobs = [Job(number, ids, GREEDY, stops) for number, ids in enumerate(prompts)]
    jobs.append(Job(len(jobs), tuple(range(CONTEXT - 2)), GREEDY, frozenset()))        # it outgrows the context
    found = {done.number: done for done in answer_jobs(model, jobs, at_once)}
    assert sorted(found) == list(range(len(jobs)))
    for job in jobs:
        assert list(found[job.number].ids) == alone(model, job), job
        assert found[job.number].stopped == (len(found[job.number].ids) < GREEDY.tokens)
    assert any(done.stopped for done in found.values())


def test_a_longer_document_than_there_is_room_for_at_first_keeps_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "FIRST_ROOM", 2)
    model = make_model("llama")
    jobs = [Job(number, tuple(range(number, number + 5)), GREEDY, frozenset()) for number in range(3)]
    found = {done.number: list(done.ids) for done in answer_jobs(model, jobs, 2)}
    assert found == {job.number: alone(model, job) for job in jobs}


def test_what_is_drawn_depends_on_the_seed_of_the_job_alone() -> None:
    model = make_model("llama")
    jobs = [Job(number, (1, 2), Sampling(6, 1.0, seed=number), frozenset()) for number in range(4)]
    found = [{done.number: done.ids for done in answer_jobs(model, jobs, at_once)} for at_once in (1, 4)]
    assert found[0] == found[1]
    assert len(set(found[0].values())) > 1


# ------------------------------------------------------------------------------------------------ files


@pytest.fixture
def opened(base_folder: Path) -> OpenedModel:
    found = open_model(str(base_folder))
    with torch.no_grad():
        torch.manual_seed(0)
        for parameter in found.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return found


def answers_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def asked(opened: OpenedModel, path: Path, out: Path, asking: Asking = ASKING) -> Any:
    return answer_file(opened, path, out, asking, cache=path.parent)


def test_every_row_has_the_answer_that_chat_gives(opened: OpenedModel, tmp_path: Path) -> None:
    texts = ["what is it?", "the cat sat on the mat", "one and two"]
    rows: list[object] = [{"prompt": text, "id": number} for number, text in enumerate(texts)]
    rows.append({"messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": texts[0]}]})
    path, out = json_lines(tmp_path / "rows.jsonl", rows), tmp_path / "answers.jsonl"
    found = asked(opened, path, out)
    answers = answers_in(out)
    assert (found.rows, found.before) == (4, 0)
    assert [answer["row"] for answer in answers] == [1, 2, 3, 4]
    wanted = ["".join(Conversation(opened, GREEDY, system).ask(text)[1])
              for text, system in [*((text, None) for text in texts), (texts[0], "be short")]]
    assert [answer["answer"] for answer in answers] == wanted
    assert [answer.get("prompt") for answer in answers] == [*texts, None]
    assert answers[3]["messages"][0]["content"] == "be short"
    assert len(set(wanted)) > 1


def test_lines_of_text_are_prompts_to_go_on_from(opened: OpenedModel, tmp_path: Path) -> None:
    path, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    path.write_text("the cat\n\nparis is\n")
    asked(opened, path, out, Asking(GREEDY))
    assert [answer["prompt"] for answer in answers_in(out)] == ["the cat", "paris is"]


class Killed(Exception):
    pass


def test_a_killed_call_goes_on_and_computes_no_row_twice(opened: OpenedModel, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [{"prompt": f"the sum of {n} and two?"} for n in range(9)])
    whole, out = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    drawing = replace(ASKING, sampling=Sampling(6, 1.0, seed=3))
    asked(opened, path, whole, drawing)
    computed: list[int] = []

    def recorded(model: Any, jobs: Any, at_once: int) -> Any:
        for done in answer_jobs(model, jobs, at_once):
            if len(computed) == 4:
                raise Killed
            computed.append(done.number)
            yield done

    monkeypatch.setattr(batch, "answer_jobs", recorded)
    with pytest.raises(Killed):
        asked(opened, path, out, drawing)
    with out.open("a") as file:
        file.write('{"row": 9, "prompt": "cut in the mid')        # as a kill may leave it
    monkeypatch.setattr(batch, "answer_jobs", answer_jobs)
    found = asked(opened, path, out, replace(drawing, at_once=2))
    assert (found.rows, found.before) == (9, 4)
    assert out.read_text() == whole.read_text()
    again = asked(opened, path, out, drawing)
    assert again.before == 9
    assert out.read_text() == whole.read_text()


@pytest.mark.parametrize(("rows", "asking", "says"), [
    ([{"prompt": "a"}, {"text": "b"}], ASKING,
     r"rows.jsonl:2: no text in the column 'prompt'.*it has: text; name another with --column"),
    ([{"prompt": "a"}, "{nonsense"], ASKING, r"rows.jsonl:2: not JSON"),
    ([{"prompt": "the cat " * 90}], ASKING, r"rows.jsonl:1: the prompt has [\d,]+ tokens, and the model reads 96"),
    ([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], ASKING,
     "its last turn is the assistant's"),
    ([], ASKING, "is empty")])
def test_rows_that_cannot_be_asked_are_named_before_anything_is_computed(
        opened: OpenedModel, tmp_path: Path, rows: Sequence[Any], asking: Asking, says: str) -> None:
    path = json_lines(tmp_path / "rows.jsonl", list(rows))
    with pytest.raises(WrongUse, match=says):
        asked(opened, path, tmp_path / "answers.jsonl", asking)
    assert not list(tmp_path.glob("answers*"))


def test_files_of_others_and_of_other_settings_are_not_touched(opened: OpenedModel, tmp_path: Path) -> None:
    path, out = json_lines(tmp_path / "rows.jsonl", [{"prompt": "a"}]), tmp_path / "answers.jsonl"
    out.write_text("mine\n")
    with pytest.raises(WrongUse, match="exists already, and no earlier call of this command made it"):
        asked(opened, path, out)
    out.unlink()
    asked(opened, path, out)
    with pytest.raises(WrongUse, match="were made with other sampling; name a new file"):
        asked(opened, path, out, replace(ASKING, sampling=Sampling(8, temperature=0)))
    json_lines(path, [{"prompt": "b"}])
    with pytest.raises(WrongUse, match="were made with other prompts"):
        asked(opened, path, out)
    with pytest.raises(WrongUse, match="there is no such file of prompts"):
        asked(opened, tmp_path / "none.jsonl", tmp_path / "x.jsonl")
