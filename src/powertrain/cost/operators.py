"""The operators of a step as eager PyTorch computes them: what each makes, saves, and makes in the backward pass.

Each takes a tape and values and returns a value. A view has the block of what it views. Where PyTorch runs several operators
(RMS norm on a CPU), so does this file. A backward function may hold sizes and no blocks but those that it is given: a block
that it held would count as memory.
"""

from collections.abc import Callable, Sequence

from powertrain.cost.replay import COPIES, Block, Gradients, Saved, Tape, Value
from powertrain.shapes import FP8, FP32

BOOL = 1
INT32 = 4


def operator(tape: Tape, inputs: tuple[Value, ...], count: int, item: int, *, saves: Saved = (), block: Block | None = None,
             works: Callable[[], object] | None = None) -> Value:
    """Return the result of one operator: `count` elements of `item` bytes, in `block` or else a new one.

    In the backward pass each input that needs a gradient gets a new tensor of its own size, and then `works` is run.
    """
    sizes = [None if value.node is None else value.nbytes for value in inputs]

    def back(saved: Saved, gradients: Gradients) -> Gradients:
        made = [None if nbytes is None else tape.new(nbytes) for nbytes in sizes]
        if works is not None:
            works()
        return made

    node = tape.node(inputs, saves, back)
    return Value(tape.new(count * item) if block is None else block, count, item, node)


def unary(tape: Tape, x: Value, *, saves_input: bool = False, saves_result: bool = False) -> Value:
    """Apply a function to each element."""
    if not saves_result:
        return operator(tape, (x,), x.count, x.item, saves=(x.block,) if saves_input else ())
    out = tape.new(x.nbytes)                 # made first, since it is saved
    return operator(tape, (x,), x.count, x.item, saves=(out,), block=out)


def multiply(tape: Tape, a: Value, b: Value) -> Value:
    """Return a * b, the smaller of them repeated. Each is saved for the gradient of the other."""
    return _combined(tape, a, b, (b.block if a.node else None, a.block if b.node else None), is_sum=False)


def add(tape: Tape, a: Value, b: Value) -> Value:
    """Return a + b, the smaller of them repeated. Operands of another type are converted first, and so are their gradients."""
    return _combined(tape, a, b, (), is_sum=True)


def _combined(tape: Tape, a: Value, b: Value, saves: Saved, *, is_sum: bool) -> Value:
    """Return a sum or a product in the wider of two types; a single number does not widen."""
    count = max(a.count, b.count)
    item = max(value.item for value in (a, b) if value.count > 1 or count == 1)
    sizes = [(value.node is not None, value.count, value.item) for value in (a, b)]

    def back(saved: Saved, gradients: Gradients) -> Gradients:
        return [_summed(tape, gradients[0] if is_sum else tape.new(count * item), own, count, item, own_item)
                if needed else None for needed, own, own_item in sizes]

    node = tape.node((a, b), saves, back)
    converted = [tape.new(value.count * item) for value in (a, b) if is_sum and value.item != item]
    out = Value(tape.new(count * item), count, item, node)
    del converted
    return out


def _summed(tape: Tape, gradient: Block | None, own: int, count: int, item: int, own_item: int) -> Block:
    """Turn a gradient of `count` elements into that of an operand with `own` elements, in the operand's type."""
    assert gradient is not None
    if own < count:
        gradient = tape.new(own * item)
    return tape.new(own * own_item) if own_item != item else gradient


def convert(tape: Tape, x: Value, item: int) -> Value:
    """Return x in another type; x itself if it has that type."""
    return x if x.item == item else operator(tape, (x,), x.count, item)


def cast_weight(tape: Tape, weight: Value, item: int) -> Value:
    """Convert a weight as autocast does, which keeps the copy of a trained weight until its context ends, or makes it anew."""
    if weight.item == item:
        return weight
    if weight.node is not None and id(weight.node) in tape.casts:
        return tape.casts[id(weight.node)]
    with tape.having(component=COPIES):
        cast = convert(tape, weight, item)
    if weight.node is not None and tape.keeps_casts:
        tape.casts[id(weight.node)] = cast
    return cast


def linear(tape: Tape, x: Value, weight: Value, bias: Value | None, inputs: int) -> Value:
    """Multiply x (T, inputs) by a matrix of the same type."""
    rows, item = x.count // inputs, x.item
    outputs = weight.count // inputs
    needs_x, needs_weight = x.node is not None, weight.node is not None
    needs_bias = bias is not None and bias.node is not None
    sizes = (x.nbytes, weight.nbytes)

    def back(saved: Saved, gradients: Gradients) -> Gradients:
        made: Gradients = [tape.new(outputs * item)] if needs_bias else []
        matrix = tape.new(sizes[1]) if needs_weight else None
        if matrix is not None:
            matrix.is_viewed = True          # it is made transposed, and turned
        return [tape.new(sizes[0]) if needs_x else None, matrix, *made]

    read = (x, weight) if bias is None or not needs_bias else (x, weight, bias)
    node = tape.node(read, (x.block if needs_weight else None, weight.block if needs_x else None), back)
    return Value(tape.new(rows * outputs * item), rows * outputs, item, node)


def rms_norm(tape: Tape, x: Value, weight: Value, width: int) -> Value:
    """Normalise: one operator on a GPU, on a CPU those of x * rsqrt(mean(x^2) + epsilon) * weight."""
    if tape.is_cuda:
        return layer_norm(tape, x, weight, None, width, statistics=1)
    rows, nbytes = x.count // width, x.nbytes

    def back_of_square(saved: Saved, gradients: Gradients) -> Gradients:
        power, product = tape.new(nbytes), tape.new(nbytes)
        out = tape.new(nbytes)
        del power, product
        return [out]

    squared = tape.node((x,), (x.block,), back_of_square)
    square = Value(tape.new(nbytes), x.count, FP32, squared)
    mean = operator(tape, (square,), rows, FP32)
    del square
    shifted = unary(tape, mean)
    root = unary(tape, shifted, saves_result=True)
    del mean, shifted
    normalised = multiply(tape, x, root)
    del root
    return multiply(tape, normalised, weight)


def layer_norm(tape: Tape, x: Value, weight: Value, bias: Value | None, width: int, *, statistics: int = 2) -> Value:
    """Normalise by one operator, which saves its input and `statistics` numbers a row: means and deviations."""
    kept = [tape.new(x.count // width * FP32) for _ in range(statistics)]
    read = (x, weight) if bias is None else (x, weight, bias)
    return operator(tape, read, x.count, FP32, saves=(x.block, *kept), block=tape.new(x.nbytes))


def dropout(tape: Tape, x: Value, share: float) -> Value:
    """Drop elements. The mask is saved, and x is not; it has the type of x on a CPU, and is a byte an element on a GPU."""
    if not share:
        return x
    mask = tape.new(x.count * BOOL if tape.is_cuda else x.nbytes)
    return operator(tape, (x,), x.count, x.item, saves=(mask,))


def split(tape: Tape, x: Value, counts: Sequence[int]) -> list[Value]:
    """Return views of x, whose gradients are joined into one of x."""
    nbytes, item = x.nbytes, x.item

    def back(saved: Saved, gradients: Gradients) -> Gradients:
        there = [gradient is not None for gradient in gradients] + [False] * (len(counts) - len(gradients))
        missing = [tape.new(count * item) for found, count in zip(there, counts, strict=True) if not found]
        out = tape.new(nbytes)
        del missing
        return [out]

    node = tape.node((x,), (), back)
    return [Value(x.block, count, item, node, slot) for slot, count in enumerate(counts)]


def view(tape: Tape, x: Value, count: int | None = None) -> Value:
    """Return a view of x, or of `count` elements of x. Its gradient is a new tensor of the size of x."""
    return operator(tape, (x,), x.count if count is None else count, x.item, block=x.block)


def join(tape: Tape, values: Sequence[Value]) -> Value:
    """Lay values end to end. Their gradients are views of the result's."""
    if len(values) == 1:
        return values[0]
    needed = [value.node is not None for value in values]
    node = tape.node(tuple(values), (), lambda saved, gradients: [gradients[0] if need else None for need in needed])
    count, item = sum(value.count for value in values), max(value.item for value in values)
    return Value(tape.new(count * item), count, item, node)


def copied(tape: Tape, x: Value) -> Value:
    """Lay x out anew. Its gradient is a view of the result's."""
    node = tape.node((x,), (), lambda saved, gradients: gradients)
    return Value(tape.new(x.nbytes), x.count, x.item, node)


def batched(tape: Tape, a: Value, b: Value, count: int) -> Value:
    """Return a batched product with `count` elements."""
    saves = (b.block if a.node else None, a.block if b.node else None)
    return operator(tape, (a, b), count, a.item, saves=saves)


def rotate(tape: Tape, x: Value, tables: tuple[Value, Value], heads: int, head_width: int) -> Value:
    """Apply rotary positions to the first dimensions of each head, in fp32."""
    cosines, sines = tables
    rows = x.count // (heads * head_width)
    width = cosines.count // rows
    whole = width == head_width
    part = x if whole else view(tape, x, rows * heads * width)
    turned = convert(tape, part, FP32)
    del part
    left, right = split(tape, turned, (turned.count // 2,) * 2)
    by_cosines = multiply(tape, turned, cosines)
    other = unary(tape, right)
    joined = join(tape, (other, left))
    del other
    by_sines = multiply(tape, joined, sines)
    del joined
    out = add(tape, by_cosines, by_sines)
    del by_cosines, by_sines
    out = convert(tape, out, x.item)
    return out if whole else join(tape, (out, view(tape, x, x.count - out.count)))


# ------------------------------------------------------------------------------------------------ 8 bits


def scaled_linear(tape: Tape, x: Value, shape: tuple[int, int], stored: str, item: int) -> Value:
    """Multiply x (rows, in) by a matrix of `shape` (out, in) held as `stored`, as models/kernels/frozen.py does."""
    (outputs, inputs), rows, given = shape, x.count // shape[1], x.item

    def back(saved: Saved, gradients: Gradients) -> Gradients:
        scaled = tape.new(rows * outputs * FP32)
        codes = _codes(tape, rows * outputs, FP32)
        del scaled
        return [_scaled_product(tape, rows * inputs, codes, stored, given, turned=outputs * inputs)]

    node = tape.node((x,), (), back)
    codes = _codes(tape, x.count, given)
    return Value(_scaled_product(tape, rows * outputs, codes, stored, item), rows * outputs, item, node)


def _codes(tape: Tape, count: int, item: int) -> Block:
    """Round `count` numbers of `item` bytes to codes."""
    tape.scratch(count * item)               # their magnitudes
    wide = tape.new(count * FP32)
    codes = tape.new(count)
    del wide
    return codes


def _scaled_product(tape: Tape, count: int, codes: Block, stored: str, item: int, *, turned: int = 0) -> Block:
    """Return `count` sums of products of `codes`, as numbers of `item` bytes. `turned`: the size of a matrix copied first."""
    if stored == FP8:
        matrix = tape.new(turned) if turned else None
        sums = tape.new(count * 2)
        del matrix, codes
        return sums if item == 2 else tape.new(count * item)
    whole = tape.new(count * INT32)
    sums = tape.new(count * FP32)
    del whole, codes
    return sums if item == FP32 else tape.new(count * item)
