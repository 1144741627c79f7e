"""A new run: the plan that stands beside its form, and what is started; and data as a model would see them."""

import html
import json
import re
import shlex

import pytest
from runs_written import write_run

from example_folders import chat_folder

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 100
TINY = "data.tokenizer=char\nmodel.width=32\nmodel.heads=2\nmax_steps=20\nsample.tokens=0"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 330, "hidden_size": 64,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128,
          "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}


@pytest.fixture
def form(root):
    (root / "text.txt").write_text(TEXT)
    return {"data.source": "text.txt", "data.block": "32", "train_batch_size": "8", "more": TINY + "\nmodel.layers=1"}


def test_the_plan_says_what_the_run_would_be_and_why(page, form):
    answer = page.post("/plan", form)
    assert answer.status == 200
    assert 'data-refused' not in answer.text
    names = re.findall(r"<dt>([^<]+)</dt>", answer.text)
    assert {"Machine", "Data", "Model", "Run", "Memory"} <= set(names)
    assert re.search(r'<figure id="memory"', answer.text)
    yes, no = (re.findall(rf'>{word}</span> <strong>(\w+)</strong>[^:<]*: ([^<]+)', answer.text) for word in ("yes", "no"))
    assert len(yes) > 2
    assert len(no) > 5
    assert all(len(because) > 10 for _, because in (*yes, *no))          # each with its reason
    command = shlex.split(html.unescape(re.search(r'id="command">([^<]+)<', answer.text)[1]))
    assert command[:2] == ["powertrain", "train"]
    assert ["plan", *command[2:]] == page.site.asking.asked[-1]


@pytest.mark.parametrize("source", ["text.txt", "uploads/text.txt"])         # the second one looks like a hub id
def test_a_run_that_does_not_fit_names_a_cure_and_is_not_started(page, root, form, source):
    (root / "uploads").mkdir()
    (root / "uploads" / "text.txt").write_text(TEXT)
    form |= {"data.source": source, "train_batch_size": "4096", "data.block": "1024",
             "more": "data.tokenizer=char\nmodel.width=16384\nmodel.heads=128\nmodel.layers=96\nmax_steps=20"}
    text = page.post("/plan", form).text
    assert 'data-refused="yes"' in text
    problem = re.search(r'class="problem">(.*?)</p>', text)[1]
    assert re.search(r"This run needs [\d.,]+ .iB, and [\d.]+ .iB are free\. It would fit with ", problem)
    answer = page.post("/new", form)
    assert answer.status == 400
    assert answer.json()["problem"].startswith("This run needs")
    assert page.site.jobs.all() == []


def test_a_run_that_fits_is_started_as_it_was_planned(page, form):
    answer = page.post("/new", form)
    assert answer.status == 200
    (job,) = page.site.jobs.all()
    at = job.words.index("--output")
    assert job.words[:at] == ("train", *page.site.asking.asked[-1][1:])
    assert job.words[at + 1] == job.run
    assert re.fullmatch(r"runs/\w+-\d{8}-\d{6}", job.run)


def test_a_run_that_makes_its_base_first_may_be_started_before_it_has_a_plan(page):
    text = page.post("/plan", {"recipe": "docstrings"}).text
    assert "no finished run of the recipe default" in text
    assert "You may start it" in text
    assert 'class="problem">' not in text
    assert "data-refused" not in text


@pytest.mark.parametrize(("change", "says"), [
    ({"data.source": "/etc/passwd"}, "outside this page"), ({"data.source": "../secret"}, "outside this page"),
    ({"more": "no.such.key=1"}, "no.such.key"), ({"more": "; rm -rf /"}, "is no setting"),
    ({"data.source": "none.txt"}, "none.txt"),
    ({"train_batch_size": "-3"}, "train_batch_size"), ({"more": "model.trust_remote_code=true"}, "runs no code"),
    ({"recipe": "../x"}, "no shipped recipe"), ({"like": "../x"}, "there is no run")])
def test_a_mistake_is_one_sentence_beside_the_form_and_starts_nothing(page, form, change, says):
    text = page.post("/plan", {**form, **change}).text
    assert 'data-refused="yes"' in text
    assert says in re.search(r'class="problem">(.*?)</p>', text, re.DOTALL)[1]
    assert page.post("/new", {**form, **change}).status in (400, 404)
    assert page.site.jobs.all() == []


def test_home_says_what_runs_and_how_recent_runs_stand(client, root):
    write_run(root / "runs" / "ended", 30)
    write_run(root / "runs" / "broken off", 10, ended=False)
    (root / "runs" / "not begun").mkdir()
    (root / "runs" / "not begun" / ".lock").touch()
    text = client.get("/").text
    rows = re.findall(r'<tr><td><a href="/runs/([^"]+)".*?>(finished|killed)</span>.*?>([^<]+)</td>.*?>([^<]+)</td></tr>', text)
    assert sorted(rows) == [("broken%20off", "killed", "10 of 10", "2.5000"), ("ended", "finished", "30 of 30", "2.5000"),
                            ("not%20begun", "killed", "0", "-")]


@pytest.fixture
def rows(root):
    folder = chat_folder(root / "model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    lines = [json.dumps({"question": f"what is {number} ?", "answer": "it is " + "so " * number}) for number in range(60)]
    (root / "rows.jsonl").write_text("\n".join([*lines, "{broken <script>", lines[3]]) + "\n")
    return "/data?data.source=rows.jsonl&model.path=model&data.max_length=32"


def test_data_are_shown_as_the_model_sees_them(page, rows):
    text = page.get(rows).text
    assert "question" in text.partition("<h2>The first examples</h2>")[0]            # the format, with its columns
    assert re.search(r"[\d,]+ examples to train on, [\d,]+ held out", text)
    examples = text.partition("<h2>The first examples</h2>")[2]
    assert examples.count('class="codetitle"') == 4
    assert re.search(r'<mark class="trained">[^<]*it is', examples)
    assert "rows.jsonl:1" in examples
    assert re.search(r"rows\.jsonl:61</td>", text)           # the bad row, by file and line
    assert re.search(r"duplicate", text)
    assert re.search(r">cut", text)
    assert '<figure id="lengths"' in text
    assert "Padding" in text
    assert "<script>" not in text.replace('<script src="/static', "")


def test_the_plan_says_which_format_and_columns_were_found(page, rows, form):
    text = page.post("/plan", {"data.source": "rows.jsonl", "model.path": "model", "max_steps": "5"}).text
    seen = page.get(rows).text.partition("</form>")[2].partition("<li>")[2].partition("</li>")[0]
    assert "question" in seen
    assert seen[:40] in text
