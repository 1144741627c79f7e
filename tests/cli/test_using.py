"""generate, chat, evaluate and export, as a person uses them, with a run that was fine-tuned and its base."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import T5Config, T5ForConditionalGeneration

from driver import run_cli
from example_folders import json_lines
from powertrain.cli import exporting, using
from powertrain.data.table_tokenizers import ByteTokenizer

Cli = Callable[..., tuple[int, str, str]]
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
SAMPLING: dict[str, Any] = {"tokens": 12, "temperature": 0.0, "top_k": None, "top_p": None, "seed": 0}
BASE = ["data=text.txt", "model.family=llama", "model.layers=2", "model.width=64", "model.heads=2", "model.context=128",
        "data.block=64", "data.tokenizer=bpe", "data.vocabulary=320", "max_steps=3", "sample.tokens=0",
        "techniques.threads=off"]
TUNED = ["model.path=runs/base", "data=sums.jsonl", "method=lora", "lora.r=2", "max_steps=3", "learning_rate=1e-2",
         "train_batch_size=4", "sample.tokens=0", "techniques.threads=off", "data.validation_share=0.2"]


@pytest.fixture(scope="module")
def runs(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base in runs/base, and an adapter for it in runs/tuned."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("".join(f"the sum of {i % 10} and {i % 7} is {i % 10 + i % 7}.\n" for i in range(300)))
    json_lines(folder / "sums.jsonl", [{"question": f"{i} + {j}?", "answer": f"It is {i + j}.\n#### {i + j}"}
                                       for i in range(5) for j in range(4)])
    for words in (["train", *BASE, "--output", "runs/base"], ["train", *TUNED, "--output", "runs/tuned"]):
        code, _, err = run_cli(words, cache, folder)
        assert code == 0, err
    return folder


@pytest.fixture
def here(runs: Path, cache: Path, monkeypatch: Patch) -> Path:
    """Commands called in this process, in that folder: quicker, and with a scripted stdin."""
    monkeypatch.chdir(runs)
    monkeypatch.setenv("POWERTRAIN_CACHE", str(cache))
    return runs


class TestGenerate:
    def test_a_templated_prompt_is_shown_exactly_or_not_at_all(self, here: Path, capsys: Captured) -> None:
        prompt = "### User:\n1 + 2?\n\n### Assistant:\n"
        using.generate("runs/tuned", "1 + 2?", **SAMPLING, as_json=False, template=True)
        answer = capsys.readouterr().out
        using.generate("runs/tuned", "1 + 2?", **SAMPLING, as_json=False, template=True, show_prompt=True)
        assert capsys.readouterr().out == prompt + answer
        using.generate("runs/tuned", "1 + 2?", **SAMPLING, as_json=True, template=True)
        found = json.loads(capsys.readouterr().out)
        assert found["prompt"] == prompt
        assert found["text"] == answer.removesuffix("\n")

    def test_base_adapter_and_merged_model_are_named_alike(self, here: Path, capsys: Captured,
                                                           tmp_path: Path) -> None:
        exporting.export("runs/tuned", to="merged", output=tmp_path / "merged", dtype=None, base=None, provider=None,
                         as_json=True)
        assert json.loads(capsys.readouterr().out)["agreement"]["difference"] < 1e-4
        texts = {}
        for path in ("runs/base", "runs/tuned", "runs/tuned/model", str(tmp_path / "merged")):
            using.generate(path, "the sum", **SAMPLING, as_json=False)
            texts[path] = capsys.readouterr().out
            assert texts[path].startswith("the sum")
        assert texts["runs/tuned"] == texts["runs/tuned/model"] == texts[str(tmp_path / "merged")]
        assert texts["runs/base"] != texts["runs/tuned"]

    def test_a_system_text_needs_a_conversation(self, cli: Cli, runs: Path) -> None:
        code, _, err = cli("generate", "runs/tuned", "--prompt", "a", "--system", "b", folder=runs)
        assert code == 2
        assert "add --template" in err


class TestChat:
    def chat(self, monkeypatch: Patch, lines: str, path: str = "runs/tuned", **asked: Any) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        given = {"base": None, "provider": None, "system": None, "message": None, "show_prompt": False, "as_json": False}
        using.chat(path, **(SAMPLING | given | asked))

    def test_a_scripted_conversation(self, here: Path, monkeypatch: Patch, capsys: Captured) -> None:
        self.chat(monkeypatch, "1 + 2?\n\n  /history\n/system Be short.\n3 + 1?\n/reset\n/history\n/nonsense\n/exit\n9 + 9?\n",
                  as_json=True, show_prompt=True)
        out, err = capsys.readouterr()
        told = [json.loads(line) for line in out.splitlines()]
        first, history, second, empty = (one for one in told if one["event"] != "piece")
        assert "".join(one["text"] for one in told[:told.index(first)]).strip() == first["text"]
        assert (first["event"], first["message"], first["dropped"]) == ("answer", "1 + 2?", 0)
        assert first["prompt"] == "### User:\n1 + 2?\n\n### Assistant:\n"
        assert history["messages"] == [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": first["text"]}]
        assert second["prompt"].startswith(f"### System:\nBe short.\n\n### User:\n1 + 2?\n\n### Assistant:\n{first['text']}")
        assert second["prompt"].endswith("### User:\n3 + 1?\n\n### Assistant:\n")
        assert empty["messages"] == [{"role": "system", "content": "Be short."}]
        assert "there is no command /nonsense" in err
        assert "chat template" in err

    def test_the_end_of_input_ends_it(self, here: Path, monkeypatch: Patch, capsys: Captured) -> None:
        self.chat(monkeypatch, "1 + 2?\n/history\n2 + 2?", show_prompt=True)
        out, err = capsys.readouterr()
        assert "user: 1 + 2?\nassistant: " in out
        assert err.count("### Assistant:") == 3              # a prompt, then one with the answer before
        assert err.count("2 + 2?") == 1                      # a last line without a line end is a message too

    def test_one_message_gets_one_answer_and_the_same_for_one_seed(self, here: Path, monkeypatch: Patch,
                                                                   capsys: Captured) -> None:
        answers = []
        for seed in (1, 1, 2):
            self.chat(monkeypatch, "not read\n", message="1 + 2?", temperature=1.5, top_p=0.95, seed=seed)
            answers.append(capsys.readouterr().out)
        assert answers[0] == answers[1] != answers[2]

    def test_what_one_message_cannot_have_does_not_end_it(self, here: Path, monkeypatch: Patch,
                                                          capsys: Captured) -> None:
        self.chat(monkeypatch, f"{'1 + 2? ' * 200}\n1 + 2?\n", as_json=True)
        failed, *_, answered = (json.loads(line) for line in capsys.readouterr().out.splitlines())
        assert "the model reads 128" in failed["message"]
        assert answered["event"] == "answer"

    def test_a_full_context_is_said(self, here: Path, monkeypatch: Patch, capsys: Captured) -> None:
        self.chat(monkeypatch, "1 + 2? and 3 + 4? and 2 + 2?\n" * 6, as_json=True)
        out, err = capsys.readouterr()
        assert json.loads(out.splitlines()[-1])["dropped"] > 0
        assert "the context is full" in err

    def test_through_the_command_line(self, cli: Cli, runs: Path) -> None:
        code, out, err = cli("chat", "runs/tuned", "--message", "1 + 2?", "--temperature", "0", "--tokens", "5", "--json",
                             folder=runs)
        assert code == 0, err
        assert json.loads(out.splitlines()[-1])["message"] == "1 + 2?"

    def test_a_program_sends_messages_of_many_lines(self, here: Path, monkeypatch: Patch, capsys: Captured) -> None:
        lines = [json.dumps({"message": "/reset\n1 + 2?"}), '{"message": 3}', "{no JSON", json.dumps({"message": " "})]
        self.chat(monkeypatch, "\n".join(lines), as_json=True, tokens=2)
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        said = [one["message"] for one in told if one["event"] == "answer"]
        assert said == ["/reset\n1 + 2?", '{"message": 3}', "{no JSON"]

    def test_a_message_says_how_it_is_answered(self, here: Path, monkeypatch: Patch, capsys: Captured) -> None:
        anew = {"message": "1 + 2?", "reset": True}
        asked = [anew, {"message": "1 + 2?", "tokens": 2}, anew, {**anew, "tokens": 12, "temperature": 3.0, "seed": 1}, anew,
                 {**anew, "seed": 2}, {**anew, "tokens": 0, "temperature": -1, "seed": "x"}]
        self.chat(monkeypatch, "\n".join(map(json.dumps, asked)), as_json=True, show_prompt=True)
        told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        first, second, third, hot, again, other, kept = (one for one in told if one["event"] == "answer")
        assert second["prompt"].startswith(first["prompt"] + first["text"])
        assert third["prompt"] == first["prompt"]            # nothing of what was said before
        assert len(third["text"]) < len(first["text"])       # of two tokens, which hold from then on
        assert hot["text"] == again["text"] != other["text"] == kept["text"]


class TestEvaluate:
    def test_a_fine_tuned_runs_own_figure_comes_out_again(self, here: Path, capsys: Captured) -> None:
        using.evaluate("runs/tuned", None, as_json=True)
        found = json.loads(capsys.readouterr().out)
        lines = [json.loads(line) for line in (here / "runs/tuned/events.jsonl").read_text().splitlines()]
        last = [line for line in lines if line["event"] == "evaluation"][-1]
        assert found["tokens"] == last["tokens"]
        assert found["loss"] == pytest.approx(last["loss"], rel=1e-2)          # bf16 there may sum in another order
        assert found["perplexity"] == pytest.approx(2.718281828 ** found["loss"])

    def test_rows_are_measured_by_their_answers_and_text_as_text(self, here: Path, capsys: Captured) -> None:
        tokens = {}
        for path in ("runs/tuned", "runs/tuned/model", "runs/base/model"):
            for data in ("sums.jsonl", "text.txt"):
                if path == "runs/tuned" and data == "text.txt":
                    continue
                using.evaluate(path, data, as_json=True)
                tokens[path, data] = json.loads(capsys.readouterr().out)["tokens"]
        assert tokens["runs/tuned", "sums.jsonl"] == tokens["runs/tuned/model", "sums.jsonl"]
        assert tokens["runs/tuned/model", "text.txt"] == tokens["runs/base/model", "text.txt"]

    def test_answers_are_scored_by_what_they_call_for(self, here: Path, capsys: Captured) -> None:
        using.evaluate("runs/tuned", None, as_json=True, metric="auto", limit=3, tokens=8)
        *answers, summary = (json.loads(line) for line in capsys.readouterr().out.splitlines())
        assert (summary["metric"], summary["questions"], len(answers)) == ("gsm8k", 3, 3)
        assert summary["accuracy"] == sum(answer["scores"]["accuracy"] for answer in answers) / 3
        using.evaluate("runs/tuned/model", "sums.jsonl", as_json=False, metric="f1", limit=2, tokens=4)
        out = capsys.readouterr().out
        assert all(word in out for word in ("exact match", "f1", "over 2 questions", "0 + 0?", "#### 0"))

    @pytest.mark.parametrize(("words", "says"), [
        (["runs/tuned", "--metric", "bleu"], "there is no metric 'bleu'"),
        (["runs/base", "--metric", "auto"], "trained on text without questions"),
        (["runs/tuned/model"], "--data PATH"), (["runs/tuned/model", "--metric", "f1"], "--data PATH"),
    ])
    def test_what_cannot_be_measured_is_said(self, cli: Cli, runs: Path, words: list[str], says: str) -> None:
        code, _, err = cli("evaluate", *words, folder=runs)
        assert code == 2
        assert says in err


class TestExport:
    @pytest.mark.parametrize(("to", "files"), [
        ("adapter", {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.json"}),
        ("merged", {"config.json", "model.safetensors", "chat_template.jinja", "tokenizer.json"}),
        ("gguf", {"out-F16.gguf", "Modelfile"}),
    ])
    def test_each_format_is_whole_and_says_so(self, to: str, files: set[str], here: Path, tmp_path: Path,
                                              capsys: Captured) -> None:
        exporting.export("runs/tuned", to=to, output=tmp_path / "out", dtype=None, base=None, provider=None, as_json=False)
        assert files <= {file.name for file in (tmp_path / "out").iterdir()}
        out = capsys.readouterr().out
        assert out.startswith("Export")
        assert "Opens" in out

    def test_an_adapter_that_peft_does_not_have_is_not_said_to_open_there(self, here: Path, tmp_path: Path,
                                                                          capsys: Captured) -> None:
        shutil.copytree(here / "runs/tuned/model", tmp_path / "ours")
        config = tmp_path / "ours" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"peft_type": "LSLORA"}))
        exporting.export(str(tmp_path / "ours"), to="adapter", output=tmp_path / "out", dtype=None, base=None, provider=None,
                         as_json=False)
        out = capsys.readouterr().out
        assert "PeftModel" not in out
        assert f"powertrain chat {tmp_path / 'out'}" in out

    def test_a_gguf_file_has_the_template_that_was_trained(self, here: Path, tmp_path: Path, capsys: Captured) -> None:
        import gguf

        exporting.export("runs/tuned", to="gguf", output=tmp_path / "out", dtype="q8_0", base=None, provider=None, as_json=True)
        report = json.loads(capsys.readouterr().out)
        field = gguf.GGUFReader(report["file"]).get_field("tokenizer.chat_template")
        assert field is not None
        assert field.contents() == (here / "runs/tuned/model/chat_template.jinja").read_text()
        assert report["agreement"]["difference"] < 1e-4
        assert report["effect"] > 0
        modelfile = (tmp_path / "out" / "Modelfile").read_text()
        assert 'TEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}### System:' in modelfile

    @pytest.mark.parametrize(("words", "says"), [
        (["runs/tuned", "--to", "zip", "--output", "out"], "--to zip is not a format; use adapter, merged, gguf, onnx"),
        (["runs/tuned", "--to", "onnx", "--output", "out", "--dtype", "bf16"], "use float32"),
        (["runs/tuned", "--to", "merged", "--output", "runs"], "is not empty"),
        (["runs/tuned", "--to", "merged", "--output", "out", "--dtype", "q8_0"], "use float32, bfloat16, float16"),
        (["runs/tuned", "--to", "adapter", "--output", "out", "--dtype", "bf16"], "leave --dtype out"),
        (["runs/base", "--to", "adapter", "--output", "out"], "use --to merged"),
        (["nowhere", "--to", "merged", "--output", "out"], "does not exist"),
    ])
    def test_what_cannot_be_exported_is_said_and_leaves_nothing(self, cli: Cli, runs: Path, words: list[str],
                                                                says: str) -> None:
        before = {path for path in runs.iterdir() if not path.name.startswith(".std")}
        code, _, err = cli("export", *words, folder=runs)
        assert code == 2
        assert says in err
        assert "Traceback" not in err
        assert {path for path in runs.iterdir() if not path.name.startswith(".std")} == before


def test_an_encoder_decoder_prints_its_answer_and_not_the_prompt(cli: Cli, tmp_path: Path) -> None:
    T5ForConditionalGeneration(T5Config(vocab_size=257, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
                                        decoder_start_token_id=0, eos_token_id=256)).save_pretrained(tmp_path / "t5")
    ByteTokenizer().save(tmp_path / "t5")
    code, out, err = cli("generate", "t5", "--prompt", "a secret", "--tokens", "3", "--temperature", "0")
    assert code == 0, err
    assert "secret" not in out
    assert "secret" in cli("generate", "t5", "--prompt", "a secret", "--tokens", "3", "--show-prompt")[1]
    code, _, err = cli("export", "t5", "--to", "onnx", "--output", "out")
    assert code == 2
    assert "t5 is computed by transformers, and ONNX files can be made only from the native decoder's families" in err
