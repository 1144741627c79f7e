"""Models behind the bridge write and point, learn what can be checked, and are counted without being loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from library_models import (
    ALL,
    BY_TASK,
    CONFIGS,
    CONTEXT,
    LORA,
    VOCABULARY,
    assert_close,
    draw,
    make_batch,
    train_until,
)

from powertrain.data.example import Example, collate
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.bridge.loading import bridged_facts
from powertrain.models.bridge.model import BridgedModel, best_span
from powertrain.records import Batch, Source, WrongUse
from powertrain.training.loop import backward
from powertrain.training.optimizers import plain_adamw
from powertrain.training.setup import Precision, plain_setup
from powertrain.use.generation import Sampling, generate_ids, open_feed

# ------------------------------------------------------------------------------------------------ using


def write(model: BridgedModel, prompt: list[int], tokens: int) -> list[int]:
    """The likeliest tokens, through use/generation.py."""
    return list(generate_ids(*open_feed(model, prompt), Sampling(tokens, temperature=0)))


@pytest.mark.parametrize("name", [*BY_TASK["causal"], *BY_TASK["seq2seq"]])
def test_greedy_tokens_are_those_of_reading_everything_again(name: str, load: Callable[..., BridgedModel]) -> None:
    """With the library's cache and without it, and as the library itself generates them."""
    task, model = CONFIGS[name][0], load(name)
    prompt = draw(6, 4).tolist()
    model.train()
    before = torch.get_rng_state()
    written = write(model, prompt, 8)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
    read = [model.network.config.decoder_start_token_id] if task == "seq2seq" else list(prompt)
    for token in written:
        tokens = torch.tensor(read)
        source = Source(torch.tensor(prompt), (len(prompt),)) if task == "seq2seq" else None
        batch = Batch(tokens, tokens, torch.arange(len(read)), (len(read),), 0, source=source)
        assert token == int(model.hidden(batch)[-1].argmax())
        read.append(token)
    assert len(written) == 8


def test_a_decoder_goes_on_beyond_its_context_and_a_target_ends_at_its_own(load: Callable[..., BridgedModel]) -> None:
    assert len(write(load("opt"), draw(CONTEXT + 5, 1).tolist(), 30)) == 30
    assert len(write(load("bart"), draw(5, 1).tolist(), 60)) == CONTEXT
    with pytest.raises(WrongUse, match=r"the prompt has 41 tokens.*reads 40"):
        write(load("bart"), draw(CONTEXT + 1, 1).tolist(), 2)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_the_best_span_lies_in_the_context(most: int, load: Callable[..., BridgedModel]) -> None:
    model = load("bert")
    for length in (12, 9, 20, 17, 15):
        batch, context = make_batch("span", (length,)), range(length // 2, length)
        first, last, score = best_span(model, batch, (context.start, context.stop), most_tokens=most)
        start, end = model.eval().hidden(batch).log_softmax(-1).detach()
        pairs = {(i, j): float(start[i] + end[j]) for i in context for j in range(i, min(i + most, length))}
        assert (first, last) == max(pairs, key=lambda pair: pairs[pair])
        assert score == pytest.approx(pairs[first, last], abs=1e-5)


# ------------------------------------------------------------------------------------------------ learning


def test_a_t5_learns_to_copy_its_source(load: Callable[..., BridgedModel]) -> None:
    model, lengths = load("t5"), (3, 2, 4)
    sources = draw(sum(lengths), 5)
    end = torch.tensor([1])
    wanted = [torch.cat((part, end)) for part in sources.split(lengths)]
    inputs = [torch.cat((torch.tensor([0]), target[:-1])) for target in wanted]
    longer = tuple(length + 1 for length in lengths)
    batch = Batch(torch.cat(inputs), torch.cat(wanted), torch.cat([torch.arange(length) for length in longer]), longer,
                  sum(longer), source=Source(sources, lengths))
    assert train_until(model, batch, 150, 1e-2) < 0.1
    for part in sources.split(lengths):
        assert write(model, part.tolist(), len(part) + 1) == [*part.tolist(), 1]


@pytest.mark.parametrize("name", ["t5", "bart", "bert", "opt"])
def test_how_a_step_is_split_changes_no_gradient(name: str, load: Callable[..., BridgedModel]) -> None:
    """The trainer's own setup, loss and backward pass, on examples of uneven lengths."""
    parts = [make_batch(CONFIGS[name][0], (length,), seed=length) for length in (5, 12, 3, 9)]
    examples = [Example(part.tokens.numpy(), part.targets.numpy(), None if part.source is None else part.source.tokens.numpy(),
                        None if part.segments is None else part.segments.numpy()) for part in parts]
    gradients = []
    for micro_batch in (4, 1, 3):
        model = load(name)
        setup = replace(plain_setup(model, examples, collate, train_batch_size=4, seed=0,
                                    optimizer=plain_adamw(1e-3, (0.9, 0.99), 1e-8)), micro_batch=micro_batch)
        assert setup.product_dtype() == torch.float32
        passes = setup.prepare(0)
        trained = sum(batch.trained_tokens for batch in passes)
        assert trained == sum(part.trained_tokens for part in parts)
        backward(setup, torch.amp.GradScaler("cpu", enabled=False), passes, trained)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        half = replace(setup, precision=Precision(torch.bfloat16))
        losses = [sum(float(arm.batch_loss(batch).detach()) for batch in passes) / trained for arm in (setup, half)]
        assert losses[0] == pytest.approx(losses[1], rel=0.05)
    for other in gradients[1:]:
        assert_close(other, gradients[0])


def test_a_head_for_spans_learns_to_point(load: Callable[..., BridgedModel]) -> None:
    model, batch = load("bert", "lora", adapters=AdapterConfig(r=8, alpha=16)), make_batch("span", (12, 9, 16))
    assert train_until(model, batch, 120, 2e-2) < 0.1
    assert model.eval().hidden(batch).argmax(-1).tolist() == batch.targets.tolist()


# ------------------------------------------------------------------------------------------------ facts


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_facts_count_what_is_loaded_without_loading_it(name: str, method: str, folders: Callable[[str], Path],
                                                       load: Callable[..., BridgedModel]) -> None:
    adapters = LORA if method == "lora" else None
    folder, before = folders(name), torch.get_rng_state()
    facts = bridged_facts(folder, task=CONFIGS[name][0], method=method, adapters=adapters)
    assert torch.equal(before, torch.get_rng_state())
    model = load(name, method, adapters=adapters)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert facts.trainable == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    plain = load(name)
    outside = ("lm_head", "qa_outputs", "embed")
    matrices = sum(parameter.numel() for key, parameter in plain.named_parameters()
                   if parameter.dim() == 2 and not any(part in key for part in (*outside, "shared", "wte", "wpe", "bias")))
    assert facts.matmul_parameters == matrices
    layers = 4 if CONFIGS[name][0] == "seq2seq" else 2
    assert (facts.layers, facts.width, facts.vocabulary, facts.provider) == (layers, 16, VOCABULARY, "transformers")
    assert facts.heads * facts.head_width == 16
    assert facts.adapted_layers == (tuple(range(layers)) if method == "lora" else ())
    assert facts.adapter_parameters == facts.parameters - sum(parameter.numel() for parameter in plain.parameters())
    assert facts.head_parameters == (32 if facts.task == "span" else VOCABULARY * 16)


def test_facts_say_what_an_adapter_and_four_bits_are(folders: Callable[[str], Path], load: Callable[..., BridgedModel],
                                                     tmp_path: Path) -> None:
    load("t5", "lora", adapters=AdapterConfig(r=2, target_modules=r"decoder\.block\.1.*\.q")).save(tmp_path)
    facts = bridged_facts(folders("t5"), task="seq2seq", method="qlora", adapter_folder=tmp_path, quantisation=("fp4", False))
    assert (facts.adapted_layers, facts.frozen_dtype, facts.method) == ((3,), "fp4", "qlora")
    assert facts.trainable == facts.adapter_parameters == 2 * 2 * (2 * 16)
