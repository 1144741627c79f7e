"""Each kernel against the definition, and what no kernel may do: look ahead, or into another document."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from powertrain.models.kernels import bmm, build
from powertrain.models.kernels.attention import (
    Attention,
    bmm_attention,
    find_varlen,
    math_attention,
    ragged_attention,
    sdpa_attention,
    varlen_attention,
    varlen_over_ends,
)
from powertrain.records import WrongUse
from powertrain.shapes import plan_chunks

LENGTHS = [(1,), (5, 1, 123), (7, 7, 7), (130, 3, 130, 3, 64), (61, 62, 63, 64, 65), (1100, 33)]
FAST = [bmm_attention, ragged_attention, sdpa_attention]
KERNELS = [math_attention, *FAST]


def draw(tokens: int, heads: int = 6, kv_heads: int = 2, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the decoder has them: views of one fused projection."""
    torch.manual_seed(tokens)
    fused = torch.randn(tokens, heads + 2 * kv_heads, width)
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def run(kernel: Attention, inputs: tuple[Tensor, Tensor, Tensor], lengths: tuple[int, ...], **options: Any) -> Tensor:
    settings: dict[str, Any] = {"layer": 0, "dropout": 0.0, "window": None, "scale": 0.25}
    return kernel(*inputs, lengths, **(settings | options))


def gradients(out: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    weights = torch.sin(torch.arange(out.numel(), dtype=torch.float32)).view(out.shape)
    return torch.autograd.grad((out * weights).sum(), inputs)


@pytest.mark.parametrize("window", [None, 1, 4, 70, 600])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kernel", FAST)
def test_a_kernel_gives_what_the_definition_gives(kernel: Attention, lengths: tuple[int, ...], kv_heads: int,
                                                  window: int | None) -> None:
    inputs = draw(sum(lengths), kv_heads=kv_heads)
    expected, got = (run(k, inputs, lengths, window=window) for k in (math_attention, kernel))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)     # fp32: sums in another order
    for mine, theirs in zip(gradients(got, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kernel", [bmm_attention, ragged_attention])
def test_a_kernel_of_ours_is_compiled_without_a_break(kernel: Attention) -> None:
    inputs = draw(16)
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(kernel, inputs, (5, 11)), run(kernel, inputs, (5, 11)))


def test_the_definition_is_softmax_over_what_came_before() -> None:
    q, k, v = (x.detach() for x in draw(5, heads=1, kv_heads=1))
    out = run(math_attention, (q, k, v), (5,), window=3)
    for token in range(5):
        seen = slice(max(0, token - 2), token + 1)
        weights = torch.softmax(q[token, 0] @ k[seen, 0].T * 0.25, -1)
        torch.testing.assert_close(out[token, 0], weights @ v[seen, 0])


@pytest.mark.parametrize("kernel", FAST)
def test_a_kernel_in_bf16_stays_near_fp32(kernel: Attention) -> None:
    lengths = (5, 1, 123)
    inputs = draw(sum(lengths))
    halves = tuple(x.detach().bfloat16().requires_grad_() for x in inputs)
    got, expected = run(kernel, halves, lengths), run(math_attention, inputs, lengths)
    assert got.dtype == torch.bfloat16
    # bf16 keeps 8 bits: inputs, scores and weights are each rounded by up to 2^-9 of values up to about 4
    torch.testing.assert_close(got.float(), expected, atol=0.04, rtol=0.04)
    for mine, theirs in zip(gradients(got, halves), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine.float(), theirs, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_do_not_see_other_documents(kernel: Attention) -> None:
    lengths, mine = (9, 130, 9, 1), slice(9, 139)
    inputs = draw(sum(lengths))
    changed = tuple(x.detach().clone() for x in inputs)
    for x in changed:
        x[:9] += 3
        x[139:] -= 3
        x.requires_grad_()
    before, after = run(kernel, inputs, lengths), run(kernel, changed, lengths)
    assert torch.equal(before[mine], after[mine])
    assert not torch.equal(before[:9], after[:9])
    for left, right in zip(gradients(before, inputs), gradients(after, changed), strict=True):
        assert torch.equal(left[mine], right[mine])


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_do_not_see_what_comes_later(kernel: Attention, window: int | None) -> None:
    lengths, token = (3, 150), 3 + 66
    inputs = draw(sum(lengths))
    out = run(kernel, inputs, lengths, window=window)
    first = 3 if window is None else token - window + 1
    for gradient in torch.autograd.grad(out[token].sum(), inputs)[1:]:
        assert not gradient[token + 1:].any()
        assert not gradient[:first].any()
        assert gradient[first:token + 1].flatten(1).any(1).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout_keeps_the_mean_and_the_gradient_of_what_it_computed(kernel: Attention) -> None:
    q, k, v = draw(40)
    torch.manual_seed(1)
    many = torch.stack([run(kernel, (q, k, v), (40,), dropout=0.3) for _ in range(600)]).mean(0)
    plain = run(kernel, (q, k, v), (40,))
    # the mean of 600 draws of a sum with deviation below 1.5: four standard errors
    torch.testing.assert_close(many, plain, atol=0.25, rtol=0)
    direction = torch.randn_like(v)
    torch.manual_seed(2)
    slope = (torch.autograd.grad(run(kernel, (q, k, v), (40,), dropout=0.3).sum(), v)[0] * direction).sum()
    torch.manual_seed(2)
    moved = run(kernel, (q, k, v + direction), (40,), dropout=0.3).sum()
    torch.manual_seed(2)
    start = run(kernel, (q, k, v), (40,), dropout=0.3).sum()
    torch.testing.assert_close(moved - start, slope, atol=1e-2, rtol=1e-3)   # out is linear in v


@pytest.mark.parametrize("kernel", [bmm_attention, ragged_attention])
@pytest.mark.parametrize("which", [0, 1])
def test_dropped_weights_are_differentiated_through(kernel: Attention, which: int) -> None:
    inputs = [x.detach().clone() for x in draw(70)]
    direction = torch.randn_like(inputs[which])

    def total(step: float) -> Tensor:
        torch.manual_seed(3)
        moved = [x + step * direction if i == which else x for i, x in enumerate(inputs)]
        return (run(kernel, tuple(moved), (70,), dropout=0.4).double() ** 2).sum()

    inputs[which].requires_grad_()
    slope = (torch.autograd.grad(total(0), inputs[which])[0] * direction).sum()
    measured = (total(1e-2) - total(-1e-2)) / 2e-2
    torch.testing.assert_close(slope.double(), measured, atol=1e-2, rtol=1e-2)   # fp32 central difference


def test_dropout_drops_the_share_that_was_asked_for() -> None:
    torch.manual_seed(0)
    kept = bmm.draw_kept(1_000_003, 0.2)
    assert kept.shape == (1_000_003,)
    assert abs(kept.float().mean() - 0.8) < 4 * (0.16 / 1e6) ** 0.5      # four standard errors


def test_bmm_leaves_its_inputs_as_they_are() -> None:
    inputs = tuple(x.detach().clone() for x in draw(3, heads=1, kv_heads=1))
    copies = tuple(x.clone() for x in inputs)
    run(bmm_attention, inputs, (1, 1, 1))
    assert all(torch.equal(x, y) for x, y in zip(inputs, copies, strict=True))


def test_equal_documents_are_computed_without_an_index() -> None:
    chunks = plan_chunks((64,) * 12, 4, None, 4)
    assert [chunk.span for chunk in chunks] == [slice(0, 768)]


def test_documents_of_similar_length_are_one_product() -> None:
    lengths = (100, 97, 40, 104, 39)
    chunks = plan_chunks(lengths, 4, None, 4)
    assert [(chunk.lengths, chunk.length) for chunk in chunks] == [((39, 40), 40), ((97, 100, 104), 104)]
    halves = plan_chunks(lengths, 4, None, 2)
    assert [(chunk.lengths, chunk.length) for chunk in halves] == [((39, 40), 64), ((97, 100, 104), 128)]


@pytest.mark.parametrize("kernel", [bmm_attention, ragged_attention])
@pytest.mark.parametrize("window", [None, 9])
def test_filling_up_costs_no_gradient_and_leaves_nothing_behind(kernel: Attention, window: int | None) -> None:
    """The zeros behind a document are no tokens: what they would give and get never shows, not even as a NaN."""
    lengths = (33, 7, 64, 2, 31)
    inputs = draw(sum(lengths))
    out = run(kernel, inputs, lengths, window=window)
    pieces, first = [], 0
    for length in lengths:
        alone = tuple(x.detach()[first:first + length].requires_grad_() for x in inputs)
        pieces.append(run(math_attention, alone, (length,), window=window))
        first += length
    torch.testing.assert_close(out, torch.cat(pieces), atol=1e-5, rtol=1e-5)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(out, inputs))


@pytest.mark.parametrize("kernel", [bmm_attention, ragged_attention])
def test_dropout_over_documents_of_unequal_lengths_keeps_the_mean(kernel: Attention) -> None:
    lengths = (40, 9, 33)
    inputs = tuple(x.detach() for x in draw(sum(lengths)))
    torch.manual_seed(1)
    many = torch.stack([run(kernel, inputs, lengths, dropout=0.3) for _ in range(400)]).mean(0)
    torch.testing.assert_close(many, run(kernel, inputs, lengths), atol=0.3, rtol=0)   # four standard errors


def dropped_by_ragged(tokens: int, heads: int, dropout: float) -> Tensor:
    """(heads, tokens, tokens) bool: which weights it drops, read off with a value of its own for each key."""
    q = torch.zeros(tokens, heads, tokens)   # all scores are equal, so that a row's weights are 1 / (row + 1) or 0
    v = torch.eye(tokens)[:, None].expand(tokens, heads, tokens).contiguous()
    out = run(ragged_attention, (q, q, v), (tokens,), dropout=dropout)
    return (out.transpose(0, 1) == 0) & torch.ones(tokens, tokens, dtype=torch.bool).tril()


def test_ragged_drops_the_share_that_was_asked_for_and_other_weights_each_time() -> None:
    torch.manual_seed(5)
    seen = 128 * 129 // 2
    first, second = dropped_by_ragged(128, 4, 0.2), dropped_by_ragged(128, 4, 0.2)
    for head in first:
        assert abs(head.sum() / seen - 0.2) < 4 * (0.16 / seen) ** 0.5           # four standard errors
    both = [(first & second).sum(), (first[0] & first[1]).sum() * 4, (first[:, 1:, :-1] & first[:, :-1, :-1]).sum()]
    # two draws, two heads and two rows next to each other have as many in common as chance gives them
    assert all(abs(common / (4 * seen) - 0.04) < 0.008 for common in both)


@pytest.mark.parametrize("tokens", [600, 1100])
def test_ragged_takes_the_keys_of_a_long_document_in_pieces(tokens: int) -> None:
    inputs = draw(tokens, heads=2, kv_heads=1)
    expected, got = (run(k, inputs, (tokens,)) for k in (math_attention, ragged_attention))
    for mine, theirs in zip((got, *gradients(got, inputs)), (expected, *gradients(expected, inputs)), strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize(("dtype", "width", "because"), [(torch.float16, 16, "fp32 and bf16"), (torch.bfloat16, 5, "even")])
def test_ragged_says_what_it_does_not_take(dtype: torch.dtype, width: int, because: str) -> None:
    q, k, v = draw(4, width=width)
    with pytest.raises(WrongUse, match=because):
        run(ragged_attention, (q.to(dtype), k.to(dtype), v.to(dtype)), (4,))


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "kernel.cpp"
    broken.write_text("int main( {")
    with pytest.raises(build.CannotBuild, match="error"):
        build._compile(broken, tmp_path / "made.so")
    assert list(tmp_path.iterdir()) == [broken]


def test_a_library_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernel.so").write_bytes(b"no library")
    (tmp_path / "kernel.sha256").write_text(hashlib.sha256(b"no library").hexdigest())
    monkeypatch.setattr(build, "_library", lambda source: tmp_path / "kernel.so")
    with pytest.raises(build.CannotBuild, match=r"remove .*kernel\.so"):
        build.load.__wrapped__(build.RAGGED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_varlen_says_where_it_can_run(dtype: torch.dtype) -> None:
    q, k, v = draw(4)
    with pytest.raises(WrongUse, match="CUDA"):
        run(varlen_attention, (q.to(dtype), k.to(dtype), v.to(dtype)), (4,))


def test_a_varlen_kernel_without_grouped_heads_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11: with it, examples of unequal length would end in a TypeError about `enable_gqa`."""
    from torch.nn.attention import varlen

    def of_torch_2_11(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
                      scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        raise AssertionError("not to be called")

    assert find_varlen() is varlen.varlen_attn
    monkeypatch.setattr(varlen, "varlen_attn", of_torch_2_11)
    assert find_varlen() is None
    q, ends = torch.ones(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(WrongUse, match=r"use sdpa, or torch 2\.12 or newer"):
        varlen_over_ends(q, q, q, ends, 4, None, 1.0)
