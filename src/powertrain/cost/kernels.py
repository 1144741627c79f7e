"""The attention kernels of models/kernels/attention.py, bmm.py and ragged/, with sizes in place of tensors; see operators.py.

Legend: T tokens, H heads, K kv heads, D head width, N documents of a group, all of length L.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from powertrain.cost.operators import batched, convert, copied, dropout, join, operator, unary, view
from powertrain.cost.replay import Block, Tape, Value
from powertrain.cost.workload import Workload
from powertrain.shapes import FP32, Chunk, Tile, gpu_attention, plan_chunks

KEYS_AT_ONCE = 512                           # of torch's flash attention on a CPU, and by the length: the rows at once
ROWS_AT_ONCE = ((768, 256), (192, 64), (0, 32))
SEED = 8                                     # bytes
LAST_TILES = 3                               # that are replayed: keys only grow, and the last tile may have fewer rows


@dataclass(frozen=True)
class Shape:
    """The arguments of a kernel besides q, k and v."""

    heads: int
    kv_heads: int
    head_width: int
    lengths: tuple[int, ...]                 # of the documents
    window: int | None
    dropout: float
    threads: int = 1
    fused: tuple[str, ...] = ("flash", "efficient")      # torch's fused kernels on the device, see shapes.fused_attention

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def repeats(self) -> int:
        return self.heads // self.kv_heads


Attend = Callable[[Tape, Value, Value, Value, Shape, int, int], Value]       # of so many documents, of this length


def over_groups(tape: Tape, q: Value, k: Value, v: Value, shape: Shape, attend: Attend) -> Value:
    """Call `attend` on each group of equally long documents, in the order of their lengths."""
    ordered = sorted(length for length in shape.lengths if length)
    in_order = tuple(ordered) == shape.lengths
    if not in_order:
        q, k, v = unary(tape, q), unary(tape, k), unary(tape, v)     # their rows in another order
    outputs = []
    for length in dict.fromkeys(ordered):
        documents = ordered.count(length)
        rows = documents * length
        own, shared = rows * shape.heads * shape.head_width, rows * shape.kv_heads * shape.head_width
        outputs.append(attend(tape, view(tape, q, own), view(tape, k, shared), view(tape, v, shared), shape, documents, length))
    out = join(tape, outputs)
    del outputs
    return out if in_order else unary(tape, out)


def math_attention(tape: Tape, q: Value, k: Value, v: Value, shape: Shape) -> Value:
    """Make the attention weights of all pairs, in fp32."""
    return convert(tape, over_groups(tape, q, k, v, shape, _attend_plainly), q.item)


def _attend_plainly(tape: Tape, q: Value, k: Value, v: Value, shape: Shape, documents: int, length: int) -> Value:
    pairs = documents * shape.heads * length * length
    # each kv head as often as it serves, laid out anew either way
    k, v = (convert(tape, operator(tape, (x,), x.count * shape.repeats, x.item), FP32) for x in (k, v))
    wide = convert(tape, view(tape, q), FP32)
    product = batched(tape, copied(tape, wide) if documents > 1 else wide, k, pairs)
    del wide
    scores = unary(tape, product)
    del product
    hidden = _mask(tape, length, 1, shape.window)
    masked = operator(tape, (scores,), scores.count, scores.item, saves=(hidden,))
    weights = unary(tape, masked, saves_result=True)
    del masked
    dropped = dropout(tape, weights, shape.dropout)
    mixed = batched(tape, dropped, v, q.count)
    del dropped, scores, weights, hidden
    return copied(tape, view(tape, mixed))


def _mask(tape: Tape, length: int, item: int, window: int | None) -> Block:
    """Make a mask (L, L), by way of one or two others."""
    made = tape.new(length * length)
    seen = tape.new(length * length)
    if window is not None:
        made, seen = seen, tape.new(length * length)
    del made
    out = tape.new(length * length * item)
    del seen
    return out


def sdpa_attention(tape: Tape, q: Value, k: Value, v: Value, shape: Shape) -> Value:
    """Run torch's attention: a fused kernel, or its plain one, on a CPU with dropout and where a GPU has no fused kernel."""
    return over_groups(tape, q, k, v, shape, _attend_by_torch)


def varlen_attention(tape: Tape, q: Value, k: Value, v: Value, shape: Shape) -> Value:
    """Run FlashAttention over documents of any lengths, which needs no mask for a window."""
    return over_groups(tape, q, k, v, replace(shape, window=None), _attend_fused)


def _attend_by_torch(tape: Tape, q: Value, k: Value, v: Value, shape: Shape, documents: int, length: int) -> Value:
    masked = shape.window is not None and shape.window < length
    if tape.is_cuda:
        kernel = gpu_attention(shape.fused, q.item, shape.head_width, masked=masked)
    else:
        kernel = "math" if shape.dropout or not shape.fused else "flash"
    if kernel == "math":
        return _attend_in_fp32(tape, q, k, v, shape, documents, length)
    if kernel == "efficient" and shape.repeats > 1:
        k, v = (operator(tape, (x,), x.count * shape.repeats, x.item) for x in (k, v))
        shape = replace(shape, kv_heads=shape.heads)
    return _attend_fused(tape, q, k, v, shape, documents, length)


def _attend_fused(tape: Tape, q: Value, k: Value, v: Value, shape: Shape, documents: int, length: int) -> Value:
    seen = mask = None
    if shape.window is not None and shape.window < length:
        seen = _mask(tape, length, 1, shape.window)
        mask = tape.new(length * length * q.item)
    nbytes = q.nbytes
    scratch = partial(_flash_scratch, shape, documents, length, q.item, is_cuda=tape.is_cuda)

    def make() -> tuple[Block, Block]:
        out, sums = tape.new(nbytes), tape.new(documents * shape.heads * length * FP32)
        tape.scratch(scratch(backward=False))
        return out, sums

    out, sums = tape.keep(make)
    saves = (q.block, k.block, v.block, out, sums) if mask is None else (q.block, k.block, v.block, mask, out, sums)
    result = operator(tape, (q, k, v), q.count, q.item, saves=saves, block=out,
                      works=lambda: tape.scratch(scratch(backward=True)))
    del seen
    return result


def _flash_scratch(shape: Shape, documents: int, length: int, item: int, *, backward: bool, is_cuda: bool) -> int:
    """Return the bytes that the kernel works in.

    On a CPU each thread has scores, their maxima and sums, and a piece of the result. On a GPU the backward pass sums the
    queries' gradient in fp32, has a number a row, and gradients of keys and values for every query head.
    """
    if is_cuda:
        rows = documents * length * shape.heads
        repeated = 2 * item * rows * shape.head_width if shape.repeats > 1 else 0
        return FP32 * rows * (shape.head_width + 1) + repeated if backward else 0
    rows = min(length, next(rows for least, rows in ROWS_AT_ONCE if length >= least))
    keys = min(length, KEYS_AT_ONCE)
    if backward:
        numbers, halves = 2 * rows * keys, 2 * rows * keys
    else:
        numbers, halves = rows * keys + 2 * rows + rows * shape.head_width, rows * keys
    return shape.threads * (FP32 * numbers + (item * halves if item < FP32 else 0))


def _attend_in_fp32(tape: Tape, q: Value, k: Value, v: Value, shape: Shape, documents: int, length: int) -> Value:
    """Run torch's plain attention, which is in fp32 whatever the type of q."""
    item, pairs = q.item, documents * shape.heads * length * length
    wide_q, wide_k, wide_v = (convert(tape, view(tape, x), FP32) for x in (q, k, v))
    if shape.repeats > 1:
        wide_k, wide_v = (operator(tape, (x,), x.count * shape.repeats, FP32) for x in (wide_k, wide_v))
    scaled_q = unary(tape, wide_q)
    mask = _mask(tape, length, FP32, shape.window)
    scaled_k = unary(tape, wide_k)
    scores = batched(tape, copied(tape, scaled_q), copied(tape, scaled_k), pairs)
    del scaled_k
    weights = unary(tape, scores, saves_result=True)
    tape.scratch(pairs)                      # which weights are hidden
    del scores
    dropped = dropout(tape, weights, shape.dropout)
    if item < FP32:
        weights = convert(tape, weights, item)               # its second result, which nobody uses
    mixed = batched(tape, dropped, copied(tape, wide_v), q.count)
    del scaled_q, mask, dropped, wide_q, wide_k, wide_v
    out = view(tape, convert(tape, mixed, item))
    del mixed, weights
    return copied(tape, out)


# ------------------------------------------------------------------------------------------------ tiles


def bmm_attention(tape: Tape, q: Value, k: Value, v: Value, shape: Shape) -> Value:
    """Run batched products over tiles: one operator, which saves q, k, v and which weights were not dropped."""
    nbytes, item = q.nbytes, q.item
    chunks = plan_chunks(shape.lengths, shape.heads, shape.window, item)
    kept_bytes = sum(chunk.weights for chunk in chunks) * shape.heads if shape.dropout else 0     # a byte a weight

    def make() -> tuple[Block, Block]:
        out = tape.new(nbytes)
        tape.scratch(2 * kept_bytes)         # 16 random bits for each weight
        kept = tape.new(kept_bytes)
        Tiles(tape, shape, item).run(chunks, Tiles.forward)
        if shape.dropout:
            out = tape.new(nbytes)           # divided by the share that is left
        return out, kept

    out, kept = tape.keep(make)
    return operator(tape, (q, k, v), q.count, item, saves=(q.block, k.block, v.block, kept), block=out,
                    works=lambda: Tiles(tape, shape, item).run(chunks, Tiles.backward))


@dataclass
class Tiles:
    """The products of bmm.py. `held`: the tensors of the last chunk, whose places those of the next one take."""

    tape: Tape
    shape: Shape
    item: int
    held: dict[str, Block | None] = field(default_factory=dict)

    def run(self, chunks: tuple[Chunk, ...], run_chunk: "Callable[[Tiles, Chunk], None]") -> None:
        """Run one chunk after the other. Of equal neighbours two are enough: the second meets what the first still holds."""
        before: list[Chunk] = []
        for chunk in chunks:
            if before[-2:] != [chunk, chunk]:
                run_chunk(self, chunk)
                before.append(chunk)

    def rows(self, chunk: Chunk, rows: int, heads: int = 0, item: int = 0) -> Block:
        """Make so many rows of the chunk's documents, of all query heads or of `heads`."""
        return self.tape.new(chunk.documents * (heads or self.shape.heads) * rows * self.shape.head_width * (item or self.item))

    def scores(self, chunk: Chunk, tile: Tile) -> Block:
        return self.tape.new(chunk.documents * self.shape.heads * tile.rows * tile.keys * self.item)

    def grouped(self, chunk: Chunk, tile: Tile) -> Block | None:
        """Copy the tile's rows of the query heads that share a key, unless only one head does."""
        return None if self.shape.repeats == 1 else self.rows(chunk, tile.rows)

    def weights(self, chunk: Chunk, tile: Tile) -> Block:
        """Make the scores of a tile, then the weights from them."""
        grouped, scores = self.grouped(chunk, tile), self.scores(chunk, tile)
        out = self.scores(chunk, tile)
        del scores, grouped
        return out

    def inputs(self, chunk: Chunk, *names: str) -> None:
        """Make queries, keys, values (and the gradient) in the layout of the products, each in place of the last chunk's."""
        for name in names:
            heads = self.shape.kv_heads if name in ("k", "v") else self.shape.heads
            filled = self.rows(chunk, chunk.length, heads) if chunk.span is None else None
            self.held[name] = self.rows(chunk, chunk.length, heads)
            del filled

    def forward(self, chunk: Chunk) -> None:
        self.inputs(chunk, "q", "k", "v")
        self.held["mixed"] = self.rows(chunk, chunk.length)
        for tile in chunk.tiles[-LAST_TILES:]:
            self.held["weights"] = self.weights(chunk, tile)
            self.held["rows"] = self.rows(chunk, tile.rows)

    def backward(self, chunk: Chunk) -> None:
        self.inputs(chunk, "q", "k", "v", "dmixed")
        sums = {"dq": self.rows(chunk, chunk.length),
                **{name: self.rows(chunk, chunk.length, self.shape.kv_heads, FP32) for name in ("dk", "dv")}}
        last: dict[str, Block | None] = {}
        for tile in chunk.tiles[-LAST_TILES:]:
            last["weights"] = self.weights(chunk, tile)
            last["rows"] = self.grouped(chunk, tile)
            queries = self.grouped(chunk, tile)
            last["dweights"] = self.scores(chunk, tile)
            thinned = self.scores(chunk, tile) if self.shape.dropout else None
            self.add_product(chunk, tile)
            last["dscores"] = self.scores(chunk, tile)
            self.rows(chunk, tile.rows)      # given back at once
            self.add_product(chunk, tile)
            del thinned, queries
        self.held |= sums

    def add_product(self, chunk: Chunk, tile: Tile) -> None:
        """Add a product onto an fp32 sum; in half precision by way of the product."""
        if self.item < FP32:
            product = self.rows(chunk, tile.keys, self.shape.kv_heads)
            wide = self.rows(chunk, tile.keys, self.shape.kv_heads, FP32)
            del product, wide


def ragged_attention(tape: Tape, q: Value, k: Value, v: Value, shape: Shape) -> Value:
    """Run one operator, which saves q, k, v, its result, the log of each row's sum, and a seed. Its scratch is not torch's."""
    nbytes = q.nbytes

    def make() -> tuple[Block, Block, Block]:
        return tape.new(nbytes), tape.new(shape.tokens * shape.heads * FP32), tape.new(SEED)

    out, sums, seed = tape.keep(make)
    return operator(tape, (q, k, v), q.count, q.item, saves=(q.block, k.block, v.block, out, sums, seed), block=out)


KERNELS: dict[str, Callable[[Tape, Value, Value, Value, Shape], Value]] = {
    "math": math_attention, "bmm": bmm_attention, "ragged": ragged_attention, "sdpa": sdpa_attention,
    "varlen": varlen_attention}


def attend(tape: Tape, q: Value, k: Value, v: Value, shape: Shape, workload: Workload) -> Value:
    """Run the workload's kernel on a pass; where prompts stand once in it, on copies in which they stand before each answer."""
    kernel = KERNELS[workload.attention_kernel]
    if workload.spread == 1:
        return kernel(tape, q, k, v, shape)
    wide = replace(shape, lengths=tuple(round(length * workload.spread) for length in shape.lengths))
    q, k, v = (operator(tape, (x,), wide.tokens * heads * shape.head_width, x.item, saves=())
               for x, heads in ((q, shape.heads), (k, shape.kv_heads), (v, shape.kv_heads)))
    mixed = kernel(tape, q, k, v, wide)
    return operator(tape, (mixed,), shape.tokens * shape.heads * shape.head_width, mixed.item)
