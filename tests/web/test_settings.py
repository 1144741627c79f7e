"""What a form may start: recipe keys alone, and files inside the page's folders alone."""

import json
import os
import socket
import sys

import pytest
from runs_written import write_run

from powertrain.recipe import Recipe, flat, resolve
from powertrain.records import WrongUse
from powertrain.web import new_run_pages
from powertrain.web.places import NotThere, Places, opened
from powertrain.web.settings import SETTINGS, asked


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


# keys that hold text which names no file
WORDS = ("name", "description", "corrections", "method", "model.revision", "model.provider", "model.task", "model.family",
         "model.activation", "lora.kind", "lora.target_modules", "quantisation.type", "data.format", "data.split",
         "data.long_examples", "data.train_on", "data.end_token", "data.text_field", "data.validation_split",
         "objective.name", "optimizer.name", "lr_scheduler_type", "weights.freeze", "on_nan", "on_spike", "on_disk_full",
         "mirror_compress", "report_to", "project", "sample.prompt", "memory_check")


def test_every_key_that_may_name_a_file_is_looked_at(places):
    asks = [key for key, default in flat(Recipe().model_dump()) if default is None or isinstance(default, str | list)]
    accepted = []
    for key in asks:
        try:
            asked({"model.path": "org/model", "more": f"{key}=/etc/passwd"}, places)
        except WrongUse:
            continue                         # it is no text, or the path leads out
        accepted.append(key)
    assert not set(accepted) - set(WORDS)
    assert {"data.source", "data.validation_source", "model.adapter", "data.tokenizer", "data.chat_template"} <= set(asks)


ADDRESSED = ("data.validation_source", "data.tokenizer", "data.chat_template", "model.adapter")


@pytest.fixture
def calls(monkeypatch):
    """Return the hosts that this process asks, and the sockets. Nothing gets through."""
    made = []

    def note(host, *_, **__):
        made.append(host)
        raise OSError("this test has no network")

    monkeypatch.setattr(socket, "getaddrinfo", note)
    monkeypatch.setattr(socket.socket, "connect", note)
    return made


@pytest.mark.parametrize("address", ["http://169.254.169.254/latest/meta-data", "https://127.0.0.1:1/rows.jsonl",
                                     "HTTP://localhost/x", "file:///etc/passwd", "s3://bucket/rows.jsonl", "hf://datasets/a/b",
                                     "//169.254.169.254/latest", "169.254.169.254:80/x", "org/../../x", "../../org/model"])
def test_nothing_but_hub_ids_is_fetched(page, calls, address):
    (page.site.places.root / "text.txt").write_text("some words. " * 500)
    base = {"data.source": "text.txt", "max_steps": "2"}
    for key in ("data.source", "model.path", *(ADDRESSED if "://" in address else ())):        # else a path that is not there
        change = {key: address} if key in ("data.source", "model.path") else {
            "model.path": "org/model", "more": f"{key}={json.dumps(address)}"}
        assert "data-refused" in page.post("/plan", base | change).text, key
        assert page.post("/new", base | change).status in (400, 404), key
    assert page.get(f"/chat?model={address}").status in (400, 404)
    assert page.post("/chat/ask", {"model": address, "message": "hello"}).status in (400, 404)
    assert page.get(f"/data?model.path=org/model&data.source={address}").status == 200
    page.get(f"/audit?file={address}")
    assert set(calls) <= {"huggingface.co"}              # for org/model
    assert page.site.jobs.all() == []


def test_a_plan_asks_no_mirror(page, calls):
    (page.site.places.root / "text.txt").write_text("some words. " * 500)
    for mirror in ("s3://bucket/x", "sftp://169.254.169.254/x"):
        page.post("/plan", {"data.source": "text.txt", "mirror": mirror, "max_steps": "2", "more": "data.tokenizer=char"})
    assert not calls


@pytest.mark.parametrize("what", ["file", "folder", "folder above"])
def test_a_link_that_comes_between_looking_and_opening_is_not_followed(places, tmp_path, monkeypatch, what):
    outside = tmp_path / "outside" / "one"
    outside.mkdir(parents=True)
    (outside / "facts.json").write_text('{"secret": 1}')
    folder = write_run(places.runs / "one", 3)
    (folder / "facts.json").write_text('{"secret": 0}')
    assert places.json(folder / "facts.json") == {"secret": 0}
    looked = places.inside

    def swapped(self, path):
        found = looked(path)
        place, to = {"file": (folder / "facts.json", outside / "facts.json"), "folder": (folder, outside),
                     "folder above": (places.runs, outside.parent)}[what]
        place.rename(tmp_path / "gone")
        place.symlink_to(to)
        return found

    monkeypatch.setattr(Places, "inside", swapped)
    with pytest.raises(WrongUse):
        places.json(folder / "facts.json")
    (tmp_path / "link").symlink_to(outside / "facts.json")
    with pytest.raises(OSError, match="link"):           # what has no named folder
        opened(tmp_path / "link")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such pipes")
@pytest.mark.parametrize("file", ["events.jsonl", "facts.json", "plan.json", "recipe.yaml", "origins.json"])
def test_a_pipe_among_the_files_of_a_run_holds_nothing_up(page, root, file):
    one, _ = (write_run(root / "runs" / name, 3) for name in ("one", "two"))
    (one / file).unlink(missing_ok=True)
    os.mkfifo(one / file)
    for path in ("/runs/one", "/runs", "/", "/compare?run=one&run=two", "/models", "/new?like=one"):
        assert page.get(path).status in (200, 400), path


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


def test_the_help_tells_what_an_empty_rate_means():
    told = next(one.help for one in SETTINGS if one.key == "learning_rate")
    of_model = {rate: resolve(None, ["model=org/name", f"method={method}", "data=rows.jsonl"]).recipe.learning_rate
                for method, rate in (("lora", "2e-4 for LoRA"), ("full", "2e-5 for all weights"))}
    assert of_model == {words: float(words.split()[0]) for words in of_model if words in told}
    assert "scratch" not in told             # there the recipe says, also the one that is taken where none is chosen
    assert resolve(None, ["data=text.txt"]).recipe.name == "default"
