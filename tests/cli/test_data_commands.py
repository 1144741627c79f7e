import json
from pathlib import Path

import pytest

from example_folders import chat_folder, json_lines
from powertrain.cli import data
from powertrain.records import WrongUse

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 330, "hidden_size": 32,
          "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
          "max_position_embeddings": 64,
          "rms_norm_eps": 1e-6, "hidden_act": "silu"}


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A recipe on a model folder without weights: looking at data needs none."""
    monkeypatch.setenv("POWERTRAIN_CACHE", str(tmp_path / "cache"))
    folder = chat_folder(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rows = [{"question": f"what is {number} ?", "answer": f"it is {number}"} for number in range(20)]
    path = json_lines(tmp_path / "rows.jsonl", [*rows, "{nonsense", rows[3]])
    return [f"model.path={folder}", "method=lora", f"data={path}", "train_batch_size=4"]


def test_check_reports_with_file_and_line(words, capsys):
    data.check(words, as_json=False)
    out = capsys.readouterr().out
    assert "rows.jsonl:21: " in out
    assert "rows.jsonl:22: repeats " in out
    assert "grouped by length, padded, 4 examples a batch" in out


def test_check_as_json_is_one_object_with_every_figure(words, capsys):
    data.check(words, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["event"] == "data"
    assert found["totals"] == {"bad": 1, "duplicate": 1}
    assert found["counts"]["rows"] == 22
    assert set(found["padding_shares"]) == {"as drawn, padded", "grouped by length, padded", "packed end to end"}


def test_show_marks_what_is_trained(words, capsys):
    data.show(words, index=2, as_json=False)
    out = capsys.readouterr().out
    assert "rows.jsonl:3" in out
    assert "<|im_start|>user\nwhat is 2 ?<|im_end|>\n<|im_start|>assistant\n[[it is 2<|im_end|>]]\n" in out
    data.show(words, index=2, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["inputs"]) == len(shown["targets"]) == shown["tokens"]
    with pytest.raises(WrongUse, match=r"no example 21: there are 21; use --index 0 to 20"):
        data.show(words, index=21, as_json=False)


def test_prepare_builds_what_the_others_use(words, capsys):
    data.prepare(words, as_json=True)
    captured = capsys.readouterr()
    prepared = json.loads(captured.out)
    assert "tokenising" in captured.err
    assert prepared["examples"] == 21
    assert all(Path(folder, "tokens.bin").is_file() for folder in prepared["folders"])
    data.prepare(words, as_json=False)
    captured = capsys.readouterr()
    assert "tokenising" not in captured.err
    assert prepared["folders"][0] in captured.out


@pytest.mark.parametrize("from_scratch", [False, True])
def test_shards_of_machines_with_caches_of_their_own_are_joined_to_what_training_opens(
        words, tmp_path, monkeypatch, capsys, from_scratch):
    if from_scratch:
        rows = json_lines(tmp_path / "texts.jsonl", [{"text": f"the cat {number}\n"} for number in range(30)])
        words = [f"data={rows}", "data.tokenizer=char", "data.block=16"]
    data.prepare(words, as_json=True)
    (alone,) = json.loads(capsys.readouterr().out)["folders"]
    made = []
    for machine in ("1", "2"):
        monkeypatch.setenv("POWERTRAIN_CACHE", str(tmp_path / machine))
        data.prepare(words, shard=f"{machine}/2", as_json=True)
        told = json.loads(capsys.readouterr().out)
        assert (told["event"], told["shard"], told["of"]) == ("prepared_shard", int(machine), 2)
        made += map(Path, told["folders"])
    data.join(made, as_json=True)
    (joined,) = json.loads(capsys.readouterr().out)["folders"]
    assert Path(joined) == tmp_path / "2" / Path(alone).relative_to(tmp_path / "cache")
    assert [path.read_bytes() for path in sorted(Path(joined).glob("*.*"))] == \
        [path.read_bytes() for path in sorted(Path(alone).glob("*.*"))]
    data.prepare(words, as_json=False)
    captured = capsys.readouterr()
    assert "tokenising" not in captured.err  # training opens what was joined
    assert joined in captured.out


def test_many_rows_that_are_too_long_are_looked_at_and_training_asks_what_becomes_of_them(words, capsys):
    short = [*words, "data.max_length=13"]
    data.check(short, as_json=False)
    out = capsys.readouterr().out
    assert "rows too long, cut" in out
    (asked,) = [line for line in out.splitlines() if line.startswith("Decide")]
    assert "longer than data.max_length=13" in asked
    assert "data.long_examples=drop leaves them out" in asked
    data.show(short, index=2, as_json=False)
    assert "rows.jsonl:3" in capsys.readouterr().out
    with pytest.raises(WrongUse, match="raise it if the model can read more, or choose what to do with them"):
        data.prepare(short, as_json=False)
    data.check([*short, "data.long_examples=cut"], as_json=False)
    assert "Decide" not in capsys.readouterr().out
