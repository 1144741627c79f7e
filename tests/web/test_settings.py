"""What a form may start: recipe keys alone, and files inside the page's folders alone."""

import json

import pytest
from runs_written import write_run

from powertrain.records import WrongUse
from powertrain.web import new_run_pages
from powertrain.web.places import NotThere, Places
from powertrain.web.settings import asked


@pytest.fixture
def places(root):
    (root / "data.jsonl").write_text('{"text": "a"}\n')
    (root / "out").symlink_to("/etc")
    return Places(root)


def test_a_form_becomes_words(places):
    found = asked({"recipe": "default", "name": "mine", "data.source": "data.jsonl", "max_steps": "7", "learning_rate": "1e-3",
                   "model.task": "", "more": "seed=3\n# a remark\n\ntechniques.packing=off"}, places)
    assert found.words == ("default", 'data.source="data.jsonl"', "max_steps=7", "learning_rate=1e-3", 'name="mine"', "seed=3",
                           "techniques.packing=off")
    assert (found.recipe.max_steps, found.recipe.seed, found.recipe.data.source) == (7, 3, "data.jsonl")


HOSTILE = ["; rm -rf /", "$(id)", "`id`", "--help", "-x", "a\nb", "a' b", 'a" b', "&& id", "| id", "\\", "../x y", "%2e%2e"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_value_is_one_word_whatever_it_holds(places, text):
    for key in ("data.format", "eval_steps", "name", "model.task"):
        try:
            words = asked({key: text, "model.path": "", "recipe": "default"}, places).words
        except WrongUse:
            continue                         # refused by the recipe
        assert len(words) == 2
        assert json.loads(words[1].partition("=")[2]) == text.strip()
        assert not words[1].startswith("-")


@pytest.mark.parametrize("line", ["--json", "-x", "output_dir", "=1", "a b=1", "--output=x", "seed", "$(id)=1", "train"])
def test_further_settings_are_keys_with_values(places, line):
    with pytest.raises(WrongUse):
        asked({"recipe": "default", "more": line}, places)


@pytest.mark.parametrize("more", ["model.trust_remote_code=true\nmodel.revision=" + "a" * 40, "output_dir=/tmp/x",
                                  "output_dir=runs/../../x"])
def test_what_only_a_terminal_may_ask_for(places, more):
    with pytest.raises(WrongUse):
        asked({"model.path": "org/model", "more": more}, places)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "out/passwd", "~/x", "./../..", "data/../../x", "/etc/*.conf", "out/*",
                                  "../*.jsonl", "a\0b", "/proc/self/environ"])
@pytest.mark.parametrize("key", ["data.source", "model.path", "data.validation_source", "model.adapter", "data.tokenizer",
                                 "data.chat_template", "mirror"])
def test_no_path_leads_out(places, path, key):
    values = {"recipe": "default"} if key in ("data.source", "data.tokenizer", "mirror") else {"model.path": "org/model"}
    value = f"file://{path}" if key == "mirror" else path
    with pytest.raises(WrongUse):
        asked({**values, **({"more": f"{key}={json.dumps(value)}"} if key not in ("data.source", "model.path", "mirror") else {
            key: value})}, places)


def test_a_list_of_sources_is_looked_at_one_by_one(places):
    assert asked({"recipe": "default", "more": "data.source=[data.jsonl, stdlib]"}, places).recipe.data.sources
    with pytest.raises(WrongUse, match="outside"):
        asked({"recipe": "default", "more": "data.source=[data.jsonl, /etc/passwd]"}, places)


def test_another_folder_may_be_allowed(places, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(WrongUse, match="--allow"):
        asked({"recipe": "default", "data.source": str(other)}, places)
    assert asked({"recipe": "default", "data.source": str(other)}, Places(places.root, (other,)))


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../runs", "a\\b", "\0", ".hidden", "link", "nothing", "a" * 300,
                                  "%2e%2e"])
def test_a_run_is_a_folder_of_its_own(places, name):
    write_run(places.runs / "there", 3)
    (places.runs / "link").symlink_to(places.runs / "there")
    assert places.run("there")
    with pytest.raises(NotThere):
        places.run(name)


@pytest.mark.parametrize("values", [{"recipe": "/etc/passwd"}, {"recipe": "data.jsonl"}, {"like": "../x"}, {"max_steps": ["1"]},
                                    {"recipe": "default", "nothing.such": "1", "more": "nothing.such=1"},
                                    {"name": "a/b", "recipe": "default"}, {"more": "a=" + "x" * 5000}])
def test_what_is_no_form_of_this_page_is_refused(places, values):
    with pytest.raises(WrongUse):
        asked(values, places)


@pytest.mark.parametrize("key", ["model.path", "data.source"])
@pytest.mark.parametrize("name", ["runs/none", "uploads/none.jsonl", "exports/none", "my/rows.csv", "my/rows.JSONL"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(places, key, name):
    with pytest.raises(NotThere, match="hub id such as"):
        asked({**({"recipe": "default"} if key == "data.source" else {}), key: name}, places)


def test_what_lies_here_is_no_download(places):
    for name in ("org/rows.jsonl", "uploads/rows.jsonl", "org/model"):
        (places.root / name).parent.mkdir(exist_ok=True)
        (places.root / name).touch()
        assert not asked({"recipe": "default", "data.source": name}, places).may_download
    assert asked({"recipe": "default", "data.source": "org/data"}, places).may_download
    assert asked({"model.path": "Qwen/Qwen2.5-0.5B"}, places).may_download


def test_uploads_get_names_of_our_own(client, root):
    found = client.put("/uploads/..%2f..%2fevil%00.jsonl", b"{}\n")
    assert found.status in (200, 400, 404)
    for name in ("my rows.jsonl", "-rf.jsonl", "%3Cscript%3E.csv"):
        path = client.put(f"/uploads/{name}", b"a,b\n").json()["path"]
        assert (root / path).parent == root / "uploads"
        assert (root / path).read_bytes() == b"a,b\n"
        assert not {" ", "<", "/"} & set((root / path).name)
        assert not (root / path).name.startswith("-")
    for name in ("x.pkl", "x.bin", "x.pt", "x.zip", "x", "x.jsonl.exe"):
        assert client.put(f"/uploads/{name}", b"x").status == 400
    assert client.put("/uploads/large.jsonl", b"x" * 10_000_001).status == 413
    assert not list((root / "uploads").glob(".*"))


def test_only_runs_and_exports_are_deleted(client, root):
    run = write_run(root / "runs" / "one", 3)
    (root / "keep").mkdir()
    (root / "runs" / "link").symlink_to(root / "keep")
    for what in ("keep", "runs", "runs/", "runs/..", "runs/../keep", "/etc", "runs/link", "jobs/x", "", "exports/../keep"):
        assert client.post("/models/delete", {"what": what}).status in (400, 404)
    assert (root / "keep").is_dir()
    assert run.is_dir()
    assert client.post("/models/delete", {"what": "runs/one"}).json() == {"refresh": True}
    assert not run.exists()


SECRET = "held-elsewhere"


@pytest.mark.parametrize("file", ["recipe.yaml", "facts.json", "plan.json", "events.jsonl"])
def test_no_page_shows_a_file_through_a_link_that_leads_out(page, root, tmp_path, file):
    (tmp_path / "outside").write_text(json.dumps({"name": SECRET, "seed": SECRET, "text": SECRET}) + "\n")
    one, _ = (write_run(root / "runs" / name, 3) for name in ("one", "two"))
    (one / file).unlink(missing_ok=True)
    (one / file).symlink_to(tmp_path / "outside")
    for path in ("/runs/one", "/compare?run=one&run=two", "/new?like=one", "/runs/one/report", "/runs/one/causes", "/runs", "/",
                 "/models"):
        assert SECRET not in page.get(path).text, path
    assert page.get("/runs/one").status == 400
    (one / file).unlink()
    (one / file).symlink_to(root / "runs" / "two" / "recipe.yaml")           # of the page's own folder
    assert page.get("/runs/one").status == 200


def test_no_page_shows_a_study_through_a_link_that_leads_out(page, root, tmp_path):
    (tmp_path / "outside").write_text(json.dumps({"kind": SECRET, "what": SECRET}))
    (root / "studies" / "one").mkdir(parents=True)
    (root / "studies" / "one" / "evidence.json").symlink_to(tmp_path / "outside")
    for path in ("/studies", "/studies/one"):
        assert SECRET not in page.get(path).text
    assert "a link to a file outside" in page.get("/studies").text


def test_uploads_are_few_and_leave_room(client, root, monkeypatch):
    assert client.put("/uploads/a.csv", b"a\n").status == 200
    monkeypatch.setattr(new_run_pages, "MOST_UPLOADS", 1)
    assert "were uploaded" in client.put("/uploads/b.csv", b"a\n").json()["problem"]
    monkeypatch.undo()
    monkeypatch.setattr(new_run_pages, "FREE_BYTES", 1 << 60)
    assert "no room" in client.put("/uploads/b.csv", b"a\n").json()["problem"]
    assert len(list((root / "uploads").iterdir())) == 1
