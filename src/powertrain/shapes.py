"""The arithmetic of shapes that models/ computes with and cost/ predicts from: one home for both. Loads no torch.

  linears   the four matrices of a block
  tiles     how attention by batched products (models/kernels/bmm.py) cuts the documents of a pass up
  storage   bytes of a number, and of a frozen weight in 4 or 8 bits
  lengths   the quantiles by which the lengths of examples are described
  gpu       which kernel torch's scaled_dot_product_attention takes on a GPU

Legend: N documents of a chunk, L tokens of a filled document.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

# ------------------------------------------------------------------------------------------------ linears


class BlockSizes(Protocol):
    """The sizes of a block, as ModelConfig and ModelFacts have them."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_width(self) -> int: ...
    @property
    def mlp_width(self) -> int: ...
    @property
    def gated_mlp(self) -> bool: ...


def linear_shapes(block: BlockSizes) -> dict[str, tuple[int, int]]:
    """Return name -> (outputs, inputs) of the linears of a block, in the order of their use (q, k, v are one)."""
    queries, keys = block.heads * block.head_width, block.kv_heads * block.head_width
    inner = block.mlp_width * (2 if block.gated_mlp else 1)
    return {"qkv": (queries + 2 * keys, block.width), "attention_out": (block.width, queries),
            "mlp_in": (inner, block.width), "mlp_out": (block.width, block.mlp_width)}


# ------------------------------------------------------------------------------------------------ a block in one call

TOKEN_STEP = 32              # memory for tokens has a multiple of so many rows, as in models/kernels/ragged/attention.h
ALIGNED = 64                 # bytes: pieces of memory begin at a multiple


def filled_up(tokens: int) -> int:
    """Return the rows that memory for so many tokens has."""
    return -(-tokens // TOKEN_STEP) * TOKEN_STEP


def one_call_saved(block: BlockSizes, tokens: int) -> tuple[int, int]:
    """Return how many numbers of the products' type, and of fp32, the backward pass of models/kernels/block reads."""
    (heads, _), (_, mixed), (inner, _), _ = linear_shapes(block).values()
    return filled_up(tokens) * (2 * block.width + heads + mixed + inner), tokens * (2 + block.heads)


def one_call_bytes(block: BlockSizes, tokens: int, item: int) -> tuple[int, int]:
    """Return the bytes that the forward and the backward pass of models/kernels/block work in; `item`: of a number."""
    shapes, rows = linear_shapes(block).values(), filled_up(tokens)
    (heads, width), (_, mixed), (inner, _), (_, mlp) = shapes
    forward = _pieces(item, rows * width, rows * mlp) + max(_pieces(item, made * read, made * read) for made, read in shapes)
    products = max(max(_pieces(item, made * read), _gradient_bytes(rows, made, read, item) + _pieces(FP32, made))
                   for made, read in shapes)
    return forward, products + _pieces(FP32, tokens * width) + _pieces(
        item, *(rows * columns for columns in (width, mlp, mlp, inner, width, mixed, heads)))


def whole_pass_bytes(block: BlockSizes, vocabulary: int, tokens: int, item: int) -> tuple[int, int, int]:
    """Return the bytes that a model's whole pass keeps beside what its blocks save, and that each half of it works in."""
    rows, width = filled_up(tokens), block.width
    classes = -(-vocabulary * item // FP32) * FP32 // item       # of 2-byte numbers an even count
    padded = _pieces(FP32, classes * width) if classes != vocabulary else 0
    kept = _pieces(FP32, tokens * width, tokens) + _pieces(item, rows * width, rows * width, rows * classes) + padded
    forward, backward = one_call_bytes(block, tokens, item)
    return (kept, max(forward, _pieces(item, classes * width, classes * width), _pieces(FP32, tokens)),
            max(backward, _pieces(item, rows * width) + max(
                _pieces(item, classes * width), padded + _gradient_bytes(rows, classes, width, item))))


def _gradient_bytes(rows: int, made: int, read: int, item: int) -> int:
    """Return the bytes that a matrix's gradient is made in."""
    return _pieces(item, rows * filled_up(made), rows * made, rows * read)


def _pieces(item: int, *counts: int) -> int:
    return sum(-(-count * item // ALIGNED) * ALIGNED for count in counts)


# ------------------------------------------------------------------------------------------------ tiles

TILE_BYTES = 3 << 19          # of scores: 1.5 MiB, within the 2 x 1 MiB of L2 where it was chosen, by one noisy sweep
TILE_ROWS = {4: 64, 2: 128}   # by bytes per element: shorter tiles save more masked work, longer ones make better GEMMs
# Documents of unequal lengths are filled up to a multiple of this, so that similar ones are one product. In bf16 each new
# shape of product is compiled by oneDNN first, and few shapes matter more than few zeros; fp32 gains little. Chosen by one
# sweep over 1, 8, 16, 32 and 64 with 4,096 tokens in documents of 10-60, 40-150 and 40-500, new lengths in each pass
FILL_TO = {4: 8, 2: 32}


@dataclass(frozen=True)
class Tile:
    """Rows `first:last` of the documents of a chunk, with the keys `start:last` that any of them sees."""

    first: int
    last: int
    start: int
    masked: int          # how many of the last keys are hidden from some row

    @property
    def rows(self) -> int:
        return self.last - self.first

    @property
    def keys(self) -> int:
        return self.last - self.start


@dataclass(frozen=True)
class Chunk:
    """Documents of similar length that are computed together, each filled up to `length` with zeros behind its end."""

    starts: tuple[int, ...]      # first token of each document
    lengths: tuple[int, ...]
    length: int
    tiles: tuple[Tile, ...]

    @property
    def span(self) -> slice | None:
        """The tokens as one slice, when the documents lie end to end and none is filled up."""
        ends = range(self.starts[0], self.starts[0] + len(self.starts) * self.length, self.length)
        whole = self.starts == tuple(ends) and min(self.lengths) == self.length
        return slice(ends.start, ends.stop) if whole else None

    @property
    def documents(self) -> int:
        return len(self.starts)

    @property
    def weights(self) -> int:
        """Attention weights of one head of all documents, over all tiles."""
        return self.documents * sum(tile.rows * tile.keys for tile in self.tiles)


@lru_cache(maxsize=256)
def plan_chunks(lengths: tuple[int, ...], heads: int, window: int | None, element_bytes: int) -> tuple[Chunk, ...]:
    """Return the documents in chunks of similar length; a chunk has as many as keep a tile's scores in the cache."""
    starts = tuple(itertools.accumulate(lengths, initial=0))
    ragged = len(set(lengths)) > 1
    step = FILL_TO[element_bytes] if ragged else 1
    ordered = sorted((document for document, length in enumerate(lengths) if length), key=lambda d: lengths[d])
    chunks = []
    for steps, group in itertools.groupby(ordered, key=lambda document: -(-lengths[document] // step)):
        documents, length = list(group), steps * step
        rows = min(length, TILE_ROWS[element_bytes])
        tiles = tuple(plan_tiles(length, rows, window))
        together = max(1, TILE_BYTES // (heads * rows * length * element_bytes))
        for first in range(0, len(documents), together):
            part = documents[first:first + together]
            chunks.append(Chunk(tuple(starts[d] for d in part), tuple(lengths[d] for d in part), length, tiles))
    return tuple(chunks)


def plan_tiles(length: int, rows: int, window: int | None) -> Iterator[Tile]:
    """Yield the tiles of one document, from its first row to its last."""
    for first in range(0, length, rows):
        last = min(first + rows, length)
        start = 0 if window is None else max(0, first - window + 1)
        slides = window is not None and last > window
        yield Tile(first, last, start, last - start if slides else last - first)


def count_weights(chunks: Sequence[Chunk], heads: int) -> int:
    """Return how many attention weights all tiles have."""
    return heads * sum(chunk.weights for chunk in chunks)


# ------------------------------------------------------------------------------------------------ storage

FP32 = 4
BUCKET_BYTES = 25 << 20      # of gradients that are summed by one call, as in torch's DistributedDataParallel
DTYPE_BYTES = {"fp32": FP32, "tf32": FP32, "bf16": 2, "fp16": 2}     # of a number in matrix products, and of frozen weights
FOUR_BIT = ("nf4", "fp4")
QUANTISED_BLOCK, QUANTISED_SCALES = 64, 256  # weights with one scale, and scales with one scale of their own
# 4 bits a weight, 8 a scale, and fp32 for each scale of scales: 4.127 bits. Source: Dettmers et al. 2023 (QLoRA), section 3
FOUR_BIT_BYTES = 0.5 + 1 / QUANTISED_BLOCK + FP32 / (QUANTISED_BLOCK * QUANTISED_SCALES)
INT8, FP8 = "int8", "fp8"
EIGHT_BIT = (INT8, FP8)                      # a byte a weight, and an fp32 scale for each row of a matrix
EIGHT_BIT_MULTIPLE = {INT8: 8, FP8: 16}      # of both sizes of a matrix, which CUDA's 8-bit products ask for


def takes_eight_bits(outputs: int, inputs: int, stored: str, device: str) -> bool:
    """Return whether the 8-bit products of a device take a matrix of these sizes."""
    return device != "cuda" or inputs % EIGHT_BIT_MULTIPLE[stored] == 0 == outputs % EIGHT_BIT_MULTIPLE[stored]


# ------------------------------------------------------------------------------------------------ lengths

QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}    # keys of DataFacts.length_quantiles


def length_quantiles(lengths: Any, quantiles: dict[str, float] | None = None) -> dict[str, int]:
    """Return quantile -> tokens, each one of the `lengths` (a sequence of numbers, or an array)."""
    import numpy as np

    return {name: int(np.quantile(lengths, share, method="nearest")) for name, share in (quantiles or QUANTILES).items()}


def quantiles_of_counts(counts: Any) -> dict[str, int]:
    """Return what `length_quantiles` does, of the number of examples that have each number of tokens, from 0 to the most."""
    import numpy as np

    ends = np.cumsum(counts)
    places = {name: np.rint(share * (ends[-1] - 1)) for name, share in QUANTILES.items()}
    return {name: int(np.searchsorted(ends, place, side="right")) for name, place in places.items()}


# ------------------------------------------------------------------------------------------------ gpu

FLASH_SINCE = (8, 0)          # compute capability
AMD_FUSED = ("gfx90a", "gfx942", "gfx950")       # others are experimental in torch, and off
FLASH_WIDTH = 256             # of a head, at most
EFFICIENT_MULTIPLE = {2: 8, 4: 4}                # by bytes of a number: what the head's width is a multiple of


def fused_attention(device: str, capability: tuple[int, int] | None, architecture: str) -> tuple[str, ...]:
    """Return the fused kernels of torch's scaled_dot_product_attention on a device: "flash", "efficient", both or none.

    `architecture` is an AMD GPU's, such as "gfx942". Source: check_flash_attention_hardware_support and
    check_mem_efficient_hardware_support in torch's cuda/sdp_utils.cpp; on MPS and in training, sdpa is its "math" branch.
    """
    if device == "cpu":
        return ("flash",)
    if device != "cuda":
        return ()
    if architecture:
        return ("flash", "efficient") if architecture in AMD_FUSED else ()
    return ("flash", "efficient") if capability is not None and capability >= FLASH_SINCE else ("efficient",)


def gpu_attention(fused: Sequence[str], nbytes: int, head_width: int, *, masked: bool) -> str:
    """Return which of a GPU's fused kernels takes numbers of so many bytes, or "math", which stores the weights of all pairs.

    The efficient kernel of torch 2.11 to 2.13 needs as many heads of keys and values as of queries.
    Source: can_use_flash_attention and can_use_mem_efficient_attention in torch's cuda/sdp_utils.cpp.
    """
    if "flash" in fused and nbytes == 2 and not masked and head_width <= FLASH_WIDTH:
        return "flash"
    return "efficient" if "efficient" in fused and not head_width % EFFICIENT_MULTIPLE.get(nbytes, head_width + 1) else "math"
