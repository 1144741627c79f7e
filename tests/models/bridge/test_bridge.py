"""The bridge: transformers' own losses from flat batches, no contamination, and folders that others load."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from library_models import (
    ALL,
    BY_TASK,
    CONFIGS,
    CONTEXT,
    LENGTHS,
    SOURCES,
    TOLERANCE,
    VOCABULARY,
    Tokenizer,
    assert_close,
    draw,
    make_batch,
    our_loss,
    padded,
    rows_of,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.bridge.loading import bridged_facts, load_bridged
from powertrain.models.bridge.model import BridgedModel
from powertrain.models.huggingface.providers import AUTO_CLASSES
from powertrain.records import IGNORE, Batch, Source, WrongUse

FP32_INSIDE = ("bloom", "gpt_neo")       # whose attention computes in fp32, whatever the model is in
COMMIT = "0123456789abcdef0123456789abcdef01234567"

# ------------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize("name", BY_TASK["seq2seq"])
def test_an_encoder_decoder_has_the_librarys_own_loss(name: str, load: Callable[..., BridgedModel]) -> None:
    """transformers shifts the labels to the right itself; the batch holds them shifted already."""
    model, batch = load(name), make_batch("seq2seq")
    assert batch.source is not None
    labels = padded(batch.targets.where(batch.targets != IGNORE, draw(len(batch.targets), 9)), batch.lengths, IGNORE)
    start = model.network.config.decoder_start_token_id
    shifted = [torch.cat((torch.tensor([start]), row[:length - 1])) for row, length in zip(labels, batch.lengths, strict=True)]
    batch = Batch(torch.cat(shifted), torch.cat([row[:length] for row, length in zip(labels, batch.lengths, strict=True)]),
                  batch.positions, batch.lengths, sum(batch.lengths), source=batch.source)
    theirs = model.network(input_ids=padded(batch.source.tokens, SOURCES, 0),
                           attention_mask=padded(torch.ones_like(batch.source.tokens), SOURCES, 0), labels=labels).loss
    torch.testing.assert_close(our_loss(model, batch), theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", BY_TASK["causal"])
def test_a_decoder_has_the_librarys_own_loss(name: str, load: Callable[..., BridgedModel]) -> None:
    """transformers shifts the labels to the left itself; the batch's targets are the tokens that follow."""
    model, lengths = load(name), (5, 2, 23)
    batch = make_batch("causal", lengths)
    follows = torch.cat([torch.cat((tokens[1:], torch.tensor([IGNORE]))) for tokens in batch.tokens.split(lengths)])
    batch = Batch(batch.tokens, follows, batch.positions, lengths, int((follows != IGNORE).sum()))
    theirs = model.network(input_ids=padded(batch.tokens, lengths, 0), labels=padded(batch.tokens, lengths, IGNORE),
                           attention_mask=padded(torch.ones_like(batch.tokens), lengths, 0)).loss
    torch.testing.assert_close(our_loss(model, batch), theirs, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", BY_TASK["span"])
def test_a_model_for_spans_has_the_librarys_own_loss(name: str, load: Callable[..., BridgedModel]) -> None:
    model, lengths = load(name), (5, 9, 23)
    batch = make_batch("span", lengths)
    assert batch.segments is not None
    # all documents as long as the longest: the library's loss takes its mean over padded places too
    inputs = {"input_ids": padded(batch.tokens, lengths, model.network.config.pad_token_id),
              "attention_mask": padded(torch.ones_like(batch.tokens), lengths, 0)}
    if name == "bert":
        inputs["token_type_ids"] = padded(batch.segments, lengths, 0)
    found = model.network(**inputs)
    hidden = inputs["attention_mask"] == 0
    starts, ends = (scores.masked_fill(hidden, -torch.inf) for scores in (found.start_logits, found.end_logits))
    theirs = (F.cross_entropy(starts, batch.targets[::2]) + F.cross_entropy(ends, batch.targets[1::2])) / 2
    torch.testing.assert_close(our_loss(model, batch), theirs, atol=TOLERANCE, rtol=TOLERANCE)
    same = make_batch("span", (9, 9))
    inputs = {"input_ids": same.tokens.view(2, 9)}
    if name == "bert":
        assert same.segments is not None
        inputs["token_type_ids"] = same.segments.view(2, 9)
    whole = model.network(**inputs, start_positions=same.targets[::2], end_positions=same.targets[1::2]).loss
    torch.testing.assert_close(our_loss(model, same), whole, atol=TOLERANCE, rtol=TOLERANCE)


# ------------------------------------------------------------------------------------------------ padding


@pytest.mark.parametrize("name", ALL)
def test_a_document_scores_the_same_alone(name: str, load: Callable[..., BridgedModel]) -> None:
    """In fp64, where rounding cannot hide a difference: a T5 amplifies that of fp32 a hundredfold."""
    task, model = CONFIGS[name][0], load(name).double()
    batch = make_batch(task)
    together = model.hidden(batch)
    for document, length in enumerate(batch.lengths):
        part = slice(sum(batch.lengths[:document]), sum(batch.lengths[:document + 1]))
        source = None
        if batch.source is not None:
            read = batch.source.tokens.split(batch.source.lengths)[document]
            source = Source(read, (len(read),))
        alone = Batch(batch.tokens[part], batch.targets, batch.positions[part], (length,), 0, source=source,
                      segments=None if batch.segments is None else batch.segments[part])
        rows = together[rows_of(batch, document, task)]
        if task == "span":
            assert torch.isneginf(rows[:, length:]).all()
            rows = rows[:, :length]
        assert_close(rows, model.hidden(alone), rounding=1e-6 if name in FP32_INSIDE else 1e-12)


@pytest.mark.parametrize("name", ALL)
def test_no_document_moves_another_ones_rows_or_gradients(name: str, load: Callable[..., BridgedModel]) -> None:
    task, model = CONFIGS[name][0], load(name)
    first, second = make_batch(task), make_batch(task)
    middle = slice(0, LENGTHS[0])
    second.tokens[middle] = draw(LENGTHS[0], 77)
    if second.source is not None:
        second.source.tokens[:SOURCES[0]] = draw(SOURCES[0], 78)
    before, after = model.hidden(first), model.hidden(second)
    mine = rows_of(first, 0, task)
    others = slice(mine.stop, None)
    assert not torch.equal(before[mine], after[mine])
    assert torch.equal(before[others], after[others])
    embedded: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == VOCABULARY:
            module.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    scores = model.hidden(first)
    gradients = torch.autograd.grad(scores[mine].masked_fill(torch.isneginf(scores[mine]), 0).sum(), embedded)
    assert len(gradients) == (2 if task == "seq2seq" else 1)
    assert all(bool(gradient[0].any()) for gradient in gradients)
    assert all(float(gradient[1:].abs().max()) == 0 for gradient in gradients)


def test_segments_reach_a_model_that_has_them_and_no_other(load: Callable[..., BridgedModel]) -> None:
    for name, moves in (("bert", True), ("roberta", False), ("distilbert", False)):
        model, batch = load(name), make_batch("span")
        plain = Batch(batch.tokens, batch.targets, batch.positions, batch.lengths, 0)
        assert torch.equal(model.hidden(batch), model.hidden(plain)) != moves


def test_a_document_beyond_the_positions_is_refused(load: Callable[..., BridgedModel]) -> None:
    for name in ("bert", "roberta", "opt", "gpt_neo", "bart"):
        task, model = CONFIGS[name][0], load(name)
        assert model.context == CONTEXT
        model.hidden(make_batch(task, (CONTEXT,)))
        with pytest.raises(WrongUse, match=f"{CONTEXT + 1} tokens is longer than the {CONTEXT}.*max_length={CONTEXT}"):
            model.hidden(make_batch(task, (CONTEXT + 1,)))
    assert [load(name).context for name in ("t5", "bloom", "falcon")] == [None] * 3
    bart = load("bart")
    pair = make_batch("seq2seq", (3,))
    long = Batch(pair.tokens, pair.targets, pair.positions, (3,), 3, source=Source(draw(50, 0), (50,)))
    with pytest.raises(WrongUse, match="50 tokens is longer than the 40"):
        bart.hidden(long)


def test_pairs_are_asked_of_an_encoder_decoder(load: Callable[..., BridgedModel]) -> None:
    with pytest.raises(WrongUse, match="no source"):
        load("t5").hidden(make_batch("causal"))


# ------------------------------------------------------------------------------------------------ loading


@pytest.mark.parametrize("name", ALL)
def test_everything_trains_in_full_and_dropout_is_the_recipes(name: str, load: Callable[..., BridgedModel]) -> None:
    model, batch = load(name), make_batch(CONFIGS[name][0], (5, 3, 9))
    model.train()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.hidden(batch), model.hidden(batch))
    our_loss(model, batch).backward()
    assert all(parameter.requires_grad and parameter.grad is not None for parameter in model.parameters())
    dropping = load(name, dropout=0.4)
    assert dropping.training
    assert not torch.equal(dropping.hidden(batch), dropping.hidden(batch))
    assert {module.p for module in dropping.modules() if isinstance(module, torch.nn.Dropout)} <= {0.4}


def test_only_a_head_for_spans_may_be_new(folders: Callable[[str], Path], load: Callable[..., BridgedModel],
                                          tmp_path: Path) -> None:
    first, same, other = load("bert"), load("bert"), load("bert", seed=1)
    head = [dict(model.named_parameters())["library.qa_outputs.weight"] for model in (first, same, other)]
    assert torch.equal(head[0], head[1])
    assert not torch.equal(head[0], head[2])
    assert [parameter.equal(dict(other.named_parameters())[name]) for name, parameter in first.named_parameters()
            if "qa_outputs" not in name].count(False) == 0
    for change, message in ((lambda w: w.pop("model.decoder.layers.1.fc1.weight"), "lacks 1 weights.*fc1"),
                            (lambda w: w.update(extra=torch.ones(2)), "no place for 1 weights.*extra"),
                            (lambda w: w.update({"model.decoder.layers.0.fc1.bias": torch.ones(7)}),
                             r"fc1.bias is \(7,\).*makes it \(32,\)")):
        weights = load_file(folders("opt") / "model.safetensors")
        change(weights)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((folders("opt") / "config.json").read_text())
        with pytest.raises(WrongUse, match=message):
            load_bridged(tmp_path, task="causal", method="full")


def test_missing_damaged_and_pickled_files_are_one_sentence(folders: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match=r"no .*config\.json"):
        load_bridged(tmp_path, task="causal", method="full")
    (tmp_path / "config.json").write_text((folders("opt") / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(WrongUse, match="never loaded"):
        load_bridged(tmp_path, task="causal", method="full")
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(WrongUse, match="damaged"):
        load_bridged(tmp_path, task="causal", method="full")


def test_an_encoder_is_no_decoder(folders: Callable[[str], Path]) -> None:
    with pytest.raises(WrongUse, match="sees the tokens that it is to predict"):
        load_bridged(folders("bert"), task="causal", method="full")


def test_a_quantised_base_does_not_train_in_full(folders: Callable[[str], Path], tmp_path: Path) -> None:
    config = json.loads((folders("opt") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(WrongUse, match=r"quantised already \(gptq\); use method=lora"):
        load_bridged(tmp_path, task="causal", method="full")


@pytest.fixture
def with_code(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A folder whose config asks for Python of its own: OPT under another name, which leaves a mark where it ran."""
    folder = tmp_path / "with_code"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((folders("opt") / "model.safetensors").read_bytes())
    config = json.loads((folders("opt") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own_opt", "auto_map": {
        "AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}))
    (folder / "own.py").write_text(
        "from transformers import OPTConfig, OPTForCausalLM\n"
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "class OwnConfig(OPTConfig):\n    model_type = 'own_opt'\n"
        "class OwnModel(OPTForCausalLM):\n    config_class = OwnConfig\n")
    return folder


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_code_that_comes_with_a_model_runs_only_if_allowed_and_pinned(with_code: Path, monkeypatch: pytest.MonkeyPatch,
                                                                      tmp_path: Path) -> None:
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for call in (load_bridged, bridged_facts):
        with pytest.raises(WrongUse, match=r"its own Python \(own\.OwnConfig, own\.OwnModel\).*trust_remote_code=true"):
            call(with_code, task="causal", method="full")
        for revision in (None, "main", COMMIT[:12], COMMIT.upper()):
            with pytest.raises(WrongUse, match=r"own\.OwnModel.*name the commit by all its 40"):
                call(with_code, task="causal", method="full", trust_remote_code=True, revision=revision)
    assert not (tmp_path / "ran").exists()
    model = load_bridged(with_code, task="causal", method="full", trust_remote_code=True, revision=COMMIT)
    assert (tmp_path / "ran").exists()
    assert type(model.network).__name__ == "OwnModel"
    facts = bridged_facts(with_code, task="causal", method="full", trust_remote_code=True, revision=COMMIT)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_code_of_another_repository_is_refused(with_code: Path) -> None:
    config = json.loads((with_code / "config.json").read_text())
    config["auto_map"]["AutoModelForCausalLM"] = "other/place--own.OwnModel"
    (with_code / "config.json").write_text(json.dumps(config))
    with pytest.raises(WrongUse, match=r"other/place--own\.OwnModel.*does not pin"):
        load_bridged(with_code, task="causal", method="full", trust_remote_code=True, revision=COMMIT)


# ------------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("name", ALL)
def test_a_saved_model_gives_equal_scores_here_and_in_transformers(name: str, load: Callable[..., BridgedModel],
                                                                   tmp_path: Path) -> None:
    task, model = CONFIGS[name][0], load(name)
    batch = make_batch(task)
    model.save(tmp_path, Tokenizer())
    assert (tmp_path / "tokenizer.json").exists()
    assert (tmp_path / "model.safetensors").exists()
    again = load_bridged(tmp_path, task=task, method="full")
    assert torch.equal(again.hidden(batch), model.hidden(batch))
    theirs, notes = getattr(transformers, AUTO_CLASSES[task]).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(notes.values())
    torch.testing.assert_close(BridgedModel(theirs.eval(), task=task).hidden(batch), model.eval().hidden(batch))


def test_a_full_disk_is_an_oserror(load: Callable[..., BridgedModel], tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)       # the write fails instead of killing the process
    for name, options in (("t5", {}), ("t5", {"method": "lora", "adapters": AdapterConfig(r=16)})):
        model = load(name, **options)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                model.save(tmp_path / str(len(options)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)
