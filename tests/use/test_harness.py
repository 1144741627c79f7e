"""Tasks of lm-eval: our own decoder, and a model behind the bridge, give the numbers of lm-eval's backend for transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from powertrain.records import WrongUse
from powertrain.use import harness
from powertrain.use.harness import run_tasks
from powertrain.use.harness_model import HarnessModel
from powertrain.use.opening import open_model

Cli = Callable[..., tuple[int, str, str]]
CLOSE = 1e-4                 # sums of log-shares of tens of tokens, in fp32 by other kernels
WORDS = ["the cat sat", "on the mat", "and looked at", "a red bird", "in the old tree", "near the river"]
SPEC = {"doc_to_text": "{{question}}", "num_fewshot": 0, "test_split": "train"}
TASKS = {
    "tiny_choice": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "answer",
                    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
    "tiny_written": {"output_type": "generate_until", "doc_to_target": "{{written}}",
                     "metric_list": [{"metric": "exact_match"}],
                     "generation_kwargs": {"until": ["e"], "max_gen_toks": 6}},
    "tiny_text": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                  "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]},
}


@pytest.fixture(scope="module", autouse=True)
def datasets_here(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import datasets

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture
def tasks_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    rows = [{"question": WORDS[i % 6], "choices": [f" {word}" for word in WORDS[i % 3:i % 3 + 3]], "answer": i % 3,
             "written": WORDS[i % 6][:3], "text": " ".join(WORDS[i % 6:] + WORDS) * (1 + i % 4)} for i in range(7)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(folder / "rows.jsonl")}}
        told = {"task": name, **data, **SPEC, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(told))
    return folder


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


PAIRS = [("the cat", " sat"), ("the cat ", "sat on"), ("", "the old tree"), (" ".join(WORDS * 6), " near the river"),
         ("a", "b"), ("the old " * 40, " ".join(["", *WORDS]))]
TEXTS = [("the cat",), (" ".join(WORDS * 9),), ("x",)]


@pytest.mark.parametrize("provider", ["native", "transformers"])
def test_the_model_answers_as_lm_evals_backend_for_transformers(base_folder: Path, provider: str) -> None:
    config = json.loads((base_folder / "config.json").read_text())           # transformers' default end is another token
    (base_folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0, "bos_token_id": 0}))
    ours = HarnessModel(open_model(str(base_folder), provider=provider))
    theirs = HFLM(str(base_folder), device="cpu", batch_size=2, dtype="float32")
    assert (ours.max_length, ours.eot_token_id, ours.prefix_token_id) == (
        theirs.max_length, theirs.eot_token_id, theirs.prefix_token_id)
    for found, expected in zip(ours.loglikelihood(asked("loglikelihood", *PAIRS)),
                               theirs.loglikelihood(asked("loglikelihood", *PAIRS)), strict=True):
        assert found[0] == pytest.approx(expected[0], abs=CLOSE)
        assert found[1] == expected[1]
    rolled, expected_sums = (one.loglikelihood_rolling(asked("loglikelihood_rolling", *TEXTS)) for one in (ours, theirs))
    assert rolled == pytest.approx(expected_sums, abs=CLOSE)
    settings = [{"until": ["e"], "max_gen_toks": 8, "do_sample": False}, {"max_gen_toks": 20},
                {"until": "t", "max_gen_toks": 5}]
    wanted = [(text, one) for text in (" ".join(WORDS), " ".join(WORDS * 9), "q") for one in settings]
    assert ours.generate_until(asked("generate_until", *wanted)) == theirs.generate_until(asked("generate_until", *wanted))


def test_local_tasks_have_the_results_of_lm_evals_own_backend(base_folder: Path, tasks_folder: Path) -> None:
    found = run_tasks(open_model(str(base_folder)), list(TASKS), folder=tasks_folder)
    manager = TaskManager(include_path=str(tasks_folder), include_defaults=False)
    expected = simple_evaluate(HFLM(str(base_folder), device="cpu", batch_size=3, dtype="float32"), tasks=list(TASKS),
                               task_manager=manager, log_samples=False)
    assert {(one.task, one.metric) for one in found} == {
        ("tiny_choice", "acc"), ("tiny_choice", "acc_norm"), ("tiny_written", "exact_match"), ("tiny_text", "word_perplexity"),
        ("tiny_text", "bits_per_byte")}
    for one in found:
        assert one.value == pytest.approx(expected["results"][one.task][f"{one.metric},{one.filter}"], rel=CLOSE)
        assert (one.examples, one.shots) == (7, 0)
        stated = expected["results"][one.task][f"{one.metric}_stderr,{one.filter}"]
        assert one.error == (pytest.approx(stated, rel=1e-2, abs=1e-6) if isinstance(stated, float) else None)


def test_the_command_runs_local_tasks_of_a_run(cli: Cli, base_folder: Path, tasks_folder: Path) -> None:
    code, out, err = cli("evaluate", str(base_folder), "--tasks", "tiny_choice,tiny_text", "--tasks-folder", str(tasks_folder),
                         "--limit", "5", "--json")
    assert code == 0, err
    told = [json.loads(line) for line in out.splitlines()]
    assert {(one["event"], one["task"], one["examples"]) for one in told} == {
        ("task", "tiny_choice", 5), ("task", "tiny_text", 5)}
    code, out, err = cli("evaluate", str(base_folder), "--tasks", str(tasks_folder / "tiny_choice.yaml"))
    assert code == 0, err
    assert "acc " in out
    assert "7 examples, 0 shots" in out


def test_the_task_of_the_documentation_runs_as_written(cli: Cli, base_folder: Path, tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    (task,) = re.findall(r"```yaml\n(# tasks/capitals\.yaml\n.*?)```", page, re.DOTALL)
    (row,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"powertrain (evaluate runs/small --tasks .*)", page)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "capitals.yaml").write_text(task)
    (tmp_path / "tasks" / "capitals.jsonl").write_text(row)
    code, out, err = cli(*command.replace("runs/small", str(base_folder)).split())
    assert code == 0, err
    assert "capitals" in out
    assert "(1 example, 0 shots)" in out


# ------------------------------------------------------------------------------------------------ bad input


def test_a_task_that_runs_python_is_refused_unless_allowed(base_folder: Path, tasks_folder: Path) -> None:
    (tasks_folder / "helpers.py").write_text("def text(doc):\n    return doc['question']\n")
    path = tasks_folder / "tiny_choice.yaml"
    plain = path.read_text()
    path.write_text(plain.replace("'{{question}}'", "!function helpers.text"))
    assert "!function" in path.read_text()
    opened = open_model(str(base_folder))
    with pytest.raises(WrongUse, match=r"tiny_choice\.yaml has lm-eval run Python .*!function.* --trust-task-code"):
        run_tasks(opened, ["tiny_choice"], folder=tasks_folder)
    assert run_tasks(opened, ["tiny_choice"], folder=tasks_folder, trusts_code=True, limit=2)


TOUCHES = "{{ cycler.__init__.__globals__.os.system('touch %s') }}"


@pytest.mark.parametrize(("change", "said"), [
    (lambda text, at: "include: ../beside\n" + text, "beside has lm-eval run Python"),
    (lambda text, at: text.replace("'{{question}}'", "!<!function> evil.run"), "has lm-eval run Python"),
    (lambda text, at: text.replace("metric: acc_norm", f"metric: {at / 'evil.py'}"), r"has the metric '.*evil\.py'.* a script"),
    (lambda text, at: text.replace("metric: acc_norm", "metric: acc\n  hf_evaluate: true"), "has the metric 'evaluate/acc'"),
    (lambda text, at: text.replace("{{question}}", TOUCHES.replace("'", "''") % (at / "ran")), "could not be run .*unsafe"),
], ids=["include", "tag", "metric", "evaluate", "template"])
def test_no_other_way_leads_to_code_that_was_not_allowed(change: Callable[[str, Path], str], said: str, base_folder: Path,
                                                        tasks_folder: Path, tmp_path: Path) -> None:
    evil = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef run(doc): return 'x'\n"
    for folder in (tmp_path, tasks_folder):
        (folder / "evil.py").write_text(evil)
    (tmp_path / "beside").write_text("process_docs: !function evil.run\n")
    task = tasks_folder / "tiny_choice.yaml"
    before = task.read_text()
    task.write_text(change(before, tmp_path))
    assert task.read_text() != before
    for names, folder in ((["tiny_choice"], tasks_folder), ([str(task)], None)):
        with pytest.raises(WrongUse, match=said):
            run_tasks(open_model(str(base_folder)), names, folder=folder)
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_evaluated_is_refused(base_folder: Path, tasks_folder: Path, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_model(str(base_folder))
    empty = tmp_path / "empty"
    empty.mkdir()
    for names, folder, said in (
            (["tiny_choise"], tasks_folder, "no task 'tiny_choise', and .* did you mean tiny_choice"),
            (["tiny_choice"], empty, "holds no YAML file"), (["tiny_choice"], tmp_path / "none", "is no folder"),
            (["none.yaml"], None, r"there is no task file none\.yaml")):
        with pytest.raises(WrongUse, match=said):
            run_tasks(opened, names, folder=folder)
    broken = tasks_folder / "tiny_text.yaml"
    broken.write_text(broken.read_text().replace("rows.jsonl", "gone.jsonl"))
    with pytest.raises(WrongUse, match=r"tiny_text could not be run .* names local data"):
        run_tasks(opened, ["tiny_text"], folder=tasks_folder)
    long = tasks_folder / "tiny_written.yaml"
    long.write_text(long.read_text().replace("max_gen_toks: 6", "max_gen_toks: 600"))
    with pytest.raises(WrongUse, match="answers of 600 tokens, and the model reads 96 in all"):
        run_tasks(opened, ["tiny_written"], folder=tasks_folder)
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    with pytest.raises(WrongUse, match=r'not installed here; pip install "powertrain\[lm-eval\]"'):
        run_tasks(opened, ["tiny_choice"], folder=tasks_folder)


@pytest.mark.parametrize(("words", "said"), [
    (["--tasks", "a", "--metric", "exact"], "leave --metric out"), (["--tasks", "a", "--data", "b"], "leave --data out"),
    (["--shots", "1"], "--shots belongs to --tasks"), (["--tasks", ","], "names no task")], ids=lambda value: str(value)[:20])
def test_options_that_do_not_go_together_are_refused(cli: Cli, base_folder: Path, words: list[str], said: str) -> None:
    code, _, err = cli("evaluate", str(base_folder), *words)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
