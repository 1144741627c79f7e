"""The list of runs and several runs beside each other say what the runs' files say."""

import json
import re

import pytest
from runs_written import write_run

from powertrain.web import runs_pages


@pytest.fixture
def runs(root):
    folder = root / "runs"
    write_run(folder / "older", 30, began=1.6e9)
    write_run(folder / "newer", 20, began=1.7e9)
    write_run(folder / "broken off", 10, ended=False, began=1.65e9)
    (folder / "older" / "recipe.yaml").write_text("name: made\nmodel:\n  layers: 2\nseed: 1\n")
    (folder / "newer" / "recipe.yaml").write_text("name: made\nmodel:\n  layers: 4\nseed: 1\n")
    return folder


def names(answer):
    return re.findall(r'<td><a href="/runs/([^"]+)"', answer.text)


def test_runs_are_listed_the_newest_first_with_their_state(client, runs):
    answer = client.get("/runs")
    assert answer.status == 200
    assert names(answer) == ["newer", "broken%20off", "older"]
    assert "20 of 20" in answer.text
    assert "killed" in answer.text
    assert "finished (2)" in answer.text
    assert "2.5000" in answer.text           # the held-out loss
    assert "data-live" not in answer.text    # all is read


@pytest.mark.parametrize(("query", "expected"), [
    ("q=OLD", ["older"]), ("state=killed", ["broken%20off"]), ("state=finished&q=new", ["newer"]), ("q=nothing", []),
    ("state=nonsense", ["newer", "broken%20off", "older"]), ("page=99", ["newer", "broken%20off", "older"]),
    ("page=-1", ["newer", "broken%20off", "older"]), ("page=x", ["newer", "broken%20off", "older"])])
def test_the_server_filters(client, runs, query, expected):
    assert names(client.get(f"/runs?{query}")) == expected


def test_a_long_list_has_pages(client, runs, monkeypatch):
    monkeypatch.setattr(runs_pages, "ROWS", 2)
    first, second = client.get("/runs"), client.get("/runs?page=2")
    assert names(first) + names(second) == ["newer", "broken%20off", "older"]
    assert 'href="/runs?page=2"' in first.text
    assert "page 2 of 2" in second.text


def test_a_list_shows_what_is_read_and_says_how_much(client, runs, monkeypatch):
    monkeypatch.setattr(runs_pages, "INDEXED_S", -1.0)
    first = client.get("/runs")
    assert "Reading 1 of 3 runs" in first.text
    assert 'data-live="/runs?' in first.text
    assert len(names(first)) == 1
    client.get("/runs")
    assert len(names(client.get("/runs"))) == 3


def test_a_damaged_line_is_said_in_the_list(client, runs):
    with open(runs / "older" / "events.jsonl", "a") as log:
        log.write("{no json\n")
    answer = client.get("/runs")
    assert "damaged and left out" in answer.text
    assert len(names(answer)) == 3


def test_names_are_inert(client, runs):
    (runs / "newer").rename(runs / "<img src=x onerror=alert(1)>")
    for path in ("/runs", "/runs?q=%3Cimg", "/compare?run=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E&run=older"):
        answer = client.get(path)
        assert answer.status == 200
        assert "<img" not in answer.text
        assert "&lt;img" in answer.text


def test_the_differing_settings_come_first_and_only_they(client, runs):
    text = client.get("/compare?run=older&run=newer").text
    assert "model.layers" in text
    assert ">seed<" not in text
    assert text.index("What was set differently") < text.index("<svg") < text.index("What they came to")
    assert "30 of 30" in text
    assert "20 of 20" in text
    assert "2.5000 at step 20" in text


def test_techniques_that_differ_are_named_with_their_settings(client, runs):
    for name, steps in (("older", []), ("newer", [{"technique": "packing", "settings": {"tokens": 64}, "because": "x"}])):
        (runs / name / "plan.json").write_text(json.dumps({"steps": steps, "refused": []}))
    text = client.get("/compare?run=older&run=newer").text
    assert "What the plans do differently" in text
    assert "on (tokens=64)" in text


def test_every_run_has_a_curve(client, runs):
    text = client.get("/compare?run=older&run=newer&run=broken%20off&x=tokens").text
    loss = text.partition('<figure id="loss"')[2].partition("</figure>")[0]
    assert len(re.findall(r'class="s-(?:blue|orange|green) line', loss.partition("</svg>")[0])) >= 3
    assert "trained tokens" in loss


def test_too_many_or_unknown_runs_are_refused_and_few_are_explained(client, runs):
    assert client.get("/compare?" + "&".join(f"run=r{number}" for number in range(9))).status == 400
    assert client.get("/compare?run=older&run=..%2Folder").status == 404
    assert "Choose two runs" in client.get("/compare").text
    assert "Choose two runs" in client.get("/compare?run=older").text


@pytest.mark.parametrize("file", ["recipe.yaml", "facts.json", "plan.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]", '{"steps": 3, "data": 4}'])
def test_damaged_files_are_said_or_left_out(client, runs, file, content):
    (runs / "older" / file).write_text(content)
    answer = client.get("/compare?run=older&run=newer")
    assert answer.status == 200
    assert "30 of 30" in answer.text


FACTS = {"hardware": {"name": "here", "cores": 2}, "software": {"versions": {}},
         "data": {"digest": "a", "block": 64, "train_batch_size": 8, "source": "/x/a.txt"},
         "model": {"family": "llama", "layers": 2, "path": "/x/model"}}
PACKED = {"steps": [{"technique": "packing", "settings": {"tokens": 64}, "because": "x"}], "refused": []}
PLAIN = {"steps": [], "refused": []}


@pytest.fixture
def arms(runs, root):
    """Two runs, and a study whose arms have their work and their plans."""
    study = root / "studies" / "2026-01-01_ablation-made"
    study.mkdir(parents=True)
    (root / "made.yaml").write_text("name: made\n")
    for name, plan in (("older", PLAIN), ("newer", PACKED)):
        (runs / name / "recipe.yaml").write_text("name: made\n")
        (runs / name / "facts.json").write_text(json.dumps(FACTS))
        (runs / name / "plan.json").write_text(json.dumps(plan))
    portable = {**FACTS, "data": {**FACTS["data"], "source": "a.txt"}, "model": {**FACTS["model"], "path": "model"}}
    (study / "facts.json").write_text(json.dumps(portable))
    (study / "plans.json").write_text(json.dumps({"without packing": PLAIN, "full plan": PACKED}))
    (study / "evidence.json").write_text(json.dumps({"kind": "ablation", "arms": [
        {"name": "without packing", "words": ["made.yaml"]}, {"name": "full plan", "words": ["made.yaml"]}], "comparisons": [
        {"a": "without packing", "b": "full plan", "verdict": "faster", "because": "1.310 times as fast (1.290 to 1.330)",
         "parity": {"because": "they agree"}}]}))
    return study


def test_runs_that_are_arms_of_a_study_show_its_evidence(client, arms):
    text = client.get("/compare?run=older&run=newer").text
    assert 'href="/studies/2026-01-01_ablation-made"' in text
    assert 'newer is the arm "full plan"' in text
    assert ("newer beside older (full plan beside without packing): faster, 1.310 times as fast (1.290 to 1.330); losses: they "
            "agree.") in text
    text = client.get("/compare?run=newer&run=older").text               # in any order
    assert "newer beside older (full plan beside without packing): faster" in text
    text = client.get("/compare?run=newer").text                         # one alone is told which arm it is
    assert "full plan" in text
    assert "beside" not in text.partition("What was measured of them")[2].partition("</ul>")[0]


@pytest.mark.parametrize("change", [
    lambda facts, plan: facts["hardware"].update(name="elsewhere"), lambda facts, plan: facts["data"].update(digest="b"),
    lambda facts, plan: facts["data"].update(train_batch_size=16), lambda facts, plan: facts["model"].update(layers=3),
    lambda facts, plan: plan["steps"][0]["settings"].update(tokens=128)])
def test_a_run_of_other_work_is_no_arm(client, arms, runs, change):
    facts, plan = json.loads(json.dumps(FACTS)), json.loads(json.dumps(PACKED))
    change(facts, plan)
    (runs / "newer" / "facts.json").write_text(json.dumps(facts))
    (runs / "newer" / "plan.json").write_text(json.dumps(plan))
    text = client.get("/compare?run=older&run=newer").text
    assert 'older is the arm "without packing".' in text
    assert "newer is the arm" not in text
    assert "faster" not in text


def test_a_run_with_another_optimizer_is_no_arm(client, arms, runs):
    (runs / "newer" / "recipe.yaml").write_text("name: made\noptimizer:\n  name: sgd\n")
    assert "newer is the arm" not in client.get("/compare?run=older&run=newer").text


@pytest.mark.parametrize("file", ["facts.json", "plans.json", "evidence.json"])
@pytest.mark.parametrize("content", ["", "[1]", '{"data": 1, "arms": 4, "comparisons": [1]}'])
def test_a_damaged_study_says_nothing(client, arms, file, content):
    (arms / file).write_text(content)
    answer = client.get("/compare?run=older&run=newer")
    assert answer.status == 200
    assert "What was measured of them" not in answer.text
