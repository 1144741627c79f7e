"""Causal attention as batched matrix products over tiles that stay in the CPU's cache.

Two things make it faster than scores for whole documents. Work: a tile of query rows meets only the keys up to its
last row, so close to half of the products and exponentials are never made. Traffic: the scores of one tile (a few
documents x their heads x some rows) are used up before they leave the cache, and the backward pass makes them again
rather than reading them from memory. The trade: one more product per tile in the backward pass, and half-precision
scores are rounded to their dtype before the softmax (which sums in fp32), as in every unfused attention.

Documents of similar length are one product: the shorter are filled up with zeros behind their end. Nothing sees what
comes later, so no real token sees a zero, and the zeros' gradients are zero and dropped.

It is one operator to torch.compile and to checkpointing: neither looks inside.
Legend: T tokens, H heads, K kv heads, G = H / K, D head width, L tokens of a (filled) document, N documents of a chunk.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from powertrain.shapes import Chunk, Tile, count_weights, plan_chunks


@lru_cache(maxsize=64)
def hidden_scores(rows: int, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return (rows, keys): 0 where a row sees a key, -inf where it does not; the last row sits on the last key."""
    with torch.inference_mode(False):
        gap = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)    # how far the key lies back
        hidden = (gap < 0) if window is None else (gap < 0) | (gap >= window)
        return torch.zeros(rows, keys, dtype=dtype).masked_fill_(hidden, float("-inf"))


def take(flat: Tensor, chunk: Chunk) -> Tensor:
    """Return the chunk's documents (N, L, ...) of `flat` (T, ...), zeros behind their ends: a view if they lie end to end."""
    if chunk.span is not None:
        return torch.unflatten(flat[chunk.span], 0, (len(chunk.starts), chunk.length))
    documents = torch.empty((len(chunk.starts), chunk.length, *flat.shape[1:]), dtype=flat.dtype)
    for document, start, length in zip(documents, chunk.starts, chunk.lengths, strict=True):
        document[:length] = flat[start:start + length]
        document[length:] = 0
    return documents


def put(flat: Tensor, chunk: Chunk, documents: Tensor) -> None:
    """Write `documents`, of shape (N, L, ...), into `flat`: the reverse of `take`."""
    if chunk.span is not None:
        torch.unflatten(flat[chunk.span], 0, (len(chunk.starts), chunk.length)).copy_(documents)
        return
    for document, start, length in zip(documents, chunk.starts, chunk.lengths, strict=True):
        flat[start:start + length] = document[:length]


def head_first(documents: Tensor) -> Tensor:
    """Return `documents` (N, L, K, D) as (N K, L, D), contiguous, as a batched product wants it."""
    return documents.transpose(1, 2).flatten(0, 1).contiguous()


def group_rows(documents: Tensor, kv_heads: int, factor: float) -> Tensor:
    """Return `documents` (N, L, H, D) x factor as a copy (N K, G, L, D): the query heads that share a key lie side by side."""
    count, length, heads, width = documents.shape
    rows = torch.empty(count, heads, length, width, dtype=documents.dtype)
    torch.mul(documents.transpose(1, 2), factor, out=rows)
    return rows.view(count * kv_heads, heads // kv_heads, length, width)


def ungroup_rows(grouped: Tensor, count: int) -> Tensor:
    """Reverse `group_rows`, as a view: (N K, G, L, D) -> (N, L, H, D)."""
    return torch.unflatten(grouped, 0, (count, -1)).flatten(1, 2).transpose(1, 2)


def attention_weights(q: Tensor, k: Tensor, tile: Tile, window: int | None) -> Tensor:
    """Return the softmax over the keys, (N K, G rows, keys), of scaled queries (N K, G, L, D) and keys (N K, L, D)."""
    rows = q[:, :, tile.first:tile.last].flatten(1, 2)
    scores = torch.bmm(rows, k[:, tile.start:tile.last].transpose(1, 2))
    hidden = hidden_scores(tile.rows, tile.masked, window, q.dtype)
    torch.unflatten(scores, 1, (q.shape[1], -1))[..., -tile.masked:].add_(hidden)
    return torch.softmax(scores, -1)


def draw_kept(count: int, dropout: float, device: torch.device | str = "cpu") -> Tensor:
    """Draw (count,) bool, True with probability 1 - dropout, to the nearest 1/65536.

    Cuts each 64 random bits in four: `bernoulli_` spends a whole draw on each element.
    """
    bits = torch.empty(-(-count // 4), dtype=torch.int64, device=device).random_(-2**63, None).view(torch.int16)[:count]
    return bits >= round(dropout * 65536) - 32768


def as_numbers(kept: Tensor) -> Tensor:
    """Return bool as uint8, in the same memory: a product with uint8 is eight times as fast on a CPU."""
    return kept.view(torch.uint8)


def bmm_forward(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], dropout: float, window: int | None,
                scale: float) -> tuple[Tensor, Tensor]:
    """Return the mixed values (T, H, D) of q (T, H, D), k and v (T, K, D), and which weights dropout kept, as one flat row."""
    out = torch.empty(q.shape, dtype=q.dtype)
    chunks = plan_chunks(tuple(lengths), q.shape[1], window, q.element_size())
    kept = draw_kept(count_weights(chunks, q.shape[1]), dropout) if dropout else torch.empty(0, dtype=torch.bool)
    used = 0
    with torch.autocast("cpu", enabled=False):
        for chunk in chunks:
            queries = group_rows(take(q, chunk), k.shape[1], scale)
            keys, values = head_first(take(k, chunk)), head_first(take(v, chunk))
            mixed = torch.empty_like(queries)
            for tile in chunk.tiles:
                weights = attention_weights(queries, keys, tile, window)
                if dropout:
                    keep = as_numbers(kept[used:used + weights.numel()]).view(weights.shape)
                    used += weights.numel()
                    weights.mul_(keep)
                rows = torch.bmm(weights, values[:, tile.start:tile.last])
                mixed[:, :, tile.first:tile.last] = torch.unflatten(rows, 1, (queries.shape[1], -1))
            put(out, chunk, ungroup_rows(mixed, len(chunk.starts)))
        return (out.div_(1 - dropout) if dropout else out), kept


def bmm_backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, lengths: Sequence[int],
                 dropout: float, window: int | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. The weights are computed again, tile by tile."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    used = 0
    with torch.autocast("cpu", enabled=False):
        for chunk in plan_chunks(tuple(lengths), q.shape[1], window, q.element_size()):
            count = len(chunk.starts)
            queries = group_rows(take(q, chunk), k.shape[1], scale)
            keys, values = head_first(take(k, chunk)), head_first(take(v, chunk))
            outer = group_rows(take(gradient, chunk), k.shape[1], 1 / (1 - dropout))
            size = chunk.weights * q.shape[1] if dropout else 0
            parts = chunk_backward(outer, queries, keys, values, kept[used:used + size], chunk, window)
            used += size
            put(dq, chunk, ungroup_rows(parts[0].mul_(scale), count))
            put(dk, chunk, torch.unflatten(parts[1], 0, (count, -1)).transpose(1, 2))
            put(dv, chunk, torch.unflatten(parts[2], 0, (count, -1)).transpose(1, 2))
    return dq, dk, dv


def chunk_backward(outer: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, chunk: Chunk,
                   window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients in the layouts of `q` (scaled, grouped) and of `k` and `v`; the last two are summed in fp32."""
    dq, dk, dv = torch.empty_like(q), torch.zeros(k.shape), torch.zeros(v.shape)
    used = 0
    for tile in chunk.tiles:
        seen = slice(tile.start, tile.last)
        weights = attention_weights(q, k, tile, window)
        rows, queries = (x[:, :, tile.first:tile.last].flatten(1, 2) for x in (outer, q))
        dweights = torch.bmm(rows, v[:, seen].transpose(1, 2))
        thinned = weights
        if kept.numel():
            keep = as_numbers(kept[used:used + weights.numel()]).view(weights.shape)
            used += weights.numel()
            thinned = weights * keep
            dweights.mul_(keep)
        add_product(dv[:, seen], thinned.transpose(1, 2), rows)
        dscores = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
        dq[:, :, tile.first:tile.last] = torch.unflatten(torch.bmm(dscores, k[:, seen]), 1, (q.shape[1], -1))
        add_product(dk[:, seen], dscores.transpose(1, 2), queries)
    return dq, dk, dv


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right, batched, to `total`, which is fp32."""
    if left.dtype == total.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(torch.bmm(left, right))


def differentiable(name: str, forward: Any, backward: Any, results: Any, saved: slice = slice(None)) -> Any:
    """Return `forward` with `backward` as its gradient: an attention of q, k, v, and four more arguments without gradients.

    `backward` gets the gradient, q, k, v, and then those results of `forward` that `saved` selects. torch's compiler and what
    watches operators, as selective checkpointing does, get operators of this name; `results` tells their shapes. Everybody else
    gets a plain function, because calling an operator imports the compiler, which takes most of a second.
    """
    seeded = (torch.Tag.nondeterministic_seeded,)
    operator = torch.library.custom_op(f"powertrain::{name}", forward, mutates_args=(), tags=seeded)
    back = torch.library.custom_op(f"powertrain::{name}_backward", backward, mutates_args=())

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)     # of results that nobody differentiates
        q, k, v, *ctx.rest = inputs
        ctx.save_for_backward(q, k, v, *output[saved])

    def gradients(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        call = back if _are_watched() else backward
        return (*call(gradient, *ctx.saved_tensors, *ctx.rest), None, None, None, None)

    def gradient_shapes(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    operator.register_fake(results)
    operator.register_autograd(gradients, setup_context=remember)
    back.register_fake(gradient_shapes)
    called: Any = type(name, (torch.autograd.Function,), {
        "forward": staticmethod(forward), "setup_context": staticmethod(remember),
        "backward": staticmethod(once_differentiable(gradients))})

    def attend(*arguments: Any) -> Any:
        return operator(*arguments) if _are_watched() else called.apply(*arguments)

    return attend


def _are_watched() -> bool:
    """Return whether something sees each operator that is called now, and may run another one for it."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def _results(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], dropout: float, window: int | None,
             scale: float) -> tuple[Tensor, Tensor]:
    chunks = plan_chunks(tuple(lengths), q.shape[1], window, q.element_size())
    kept = q.new_empty(count_weights(chunks, q.shape[1]) if dropout else 0, dtype=torch.bool)
    return q.new_empty(q.shape), kept


attend = differentiable("bmm_attention", bmm_forward, bmm_backward, _results, saved=slice(1, None))
