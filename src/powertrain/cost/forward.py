"""A step of models/decoder.py with sizes in place of tensors: embedding, blocks with their adapters; loss.py has the rest.

Line for line what the decoder does, with the same things in variables, so that the same things are alive: read the two
beside each other. See replay.py and operators.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from powertrain.cost.kernels import KERNELS, Shape
from powertrain.cost.operators import (
    add,
    cast_weight,
    convert,
    dropout,
    join,
    layer_norm,
    linear,
    multiply,
    rms_norm,
    rotate,
    scaled_linear,
    split,
    take,
    unary,
)
from powertrain.cost.replay import COPIES, Block, Gradients, Leaf, Saved, Tape, Value
from powertrain.cost.weights import (
    Adapter,
    Linear,
    adapter_dropout,
    has_frozen_base,
    is_scaled,
    linears,
    matrix_bytes,
    other_bytes,
)
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts
from powertrain.shapes import DTYPE_BYTES, EIGHT_BIT, FOUR_BIT, FP32

Tables = tuple[Value, Value]


@dataclass(frozen=True)
class StepFacts:
    """What the forward pass needs to know, taken from the model and the workload once."""

    model: ModelFacts
    workload: Workload
    item: int = field(init=False)            # of products

    def __post_init__(self) -> None:
        object.__setattr__(self, "item", DTYPE_BYTES[self.workload.dtype])

    @property
    def is_autocast(self) -> bool:
        return self.item != FP32

    def has(self, name: str) -> bool:
        return name in self.model.shapes

    def decays(self, name: str) -> bool:
        """Whether weight decay pulls on it, and the optimizer so comes to it first: matrices do."""
        return name.endswith((".A", ".B")) or (name.endswith("weight") and "norm" not in name)


class Weights:
    """The weights of one block, or of what is outside of them, by name; trained ones with a place for their gradient."""

    def __init__(self, facts: StepFacts, prefix: str, *, adapted: bool = False) -> None:
        self.values: dict[str, Value] = {}
        frozen = has_frozen_base(facts.model)
        for name, shape in facts.model.shapes.items():
            if name.startswith("blocks.0.") != bool(prefix) and ".adapters." not in name:
                continue
            short = name.split(".", 2)[2] if prefix else name
            is_adapter = ".adapters." in name
            if is_adapter and not (prefix and adapted):
                continue
            trained = is_adapter or not frozen
            item = FP32 if trained else int(other_bytes(facts.model))
            leaf = Leaf(stands=facts.workload.flat_parameters) if trained else None
            self.values[short] = Value(None, math.prod(shape), item, leaf)

    def get(self, name: str) -> Value | None:
        return self.values.get(name)

    def __getitem__(self, name: str) -> Value:
        return self.values[name]


# ------------------------------------------------------------------------------------------------ parts


def norm(tape: Tape, facts: StepFacts, weights: Weights, name: str, x: Value, width: int, *, rms: bool) -> Value:
    """In fp32, in the type of x."""
    wide = convert(tape, x, FP32)
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    out = rms_norm(tape, wide, weight, width) if rms else layer_norm(tape, wide, weight, bias, width)
    del wide
    return convert(tape, out, x.item)


def is_rms(model: ModelFacts) -> bool:
    """Layer norm has a bias, or the model is the one family with learned positions (gpt2)."""
    return not ("blocks.0.attention_norm.bias" in model.shapes or "position_embedding.weight" in model.shapes)


def project(tape: Tape, facts: StepFacts, weights: Weights, part: Linear, x: Value) -> Value:
    """One linear of a block with its adapters, if it has some here."""
    if not has_frozen_base(facts.model):
        return _trained_linear(tape, facts, weights, part, x)
    if not (part.adapters and any(name.startswith(f"{part.name}.adapters.") for name in weights.values)):
        return _frozen_linear(tape, facts, part, x)
    x = convert(tape, x, facts.item if facts.is_autocast else x.item)
    names = [name.split(".")[2] for name in weights.values if name.startswith(f"{part.name}.adapters.") and name.endswith(".A")]
    changes = [_change(tape, facts, weights, part, adapter, name, x)
               for name, adapter in zip(names, part.adapters, strict=True)]
    y = _frozen_linear(tape, facts, part, x)
    rows = x.count // part.inputs
    rest = part.outputs - sum(adapter.outputs for adapter in part.adapters)
    pieces = []
    for adapter, (added, factor) in zip(part.adapters, changes, strict=True):
        pieces.append(_changed(tape, facts, part, take(tape, y, rows * adapter.outputs), added, factor))
        if rest:
            pieces.append(take(tape, y, rows * rest))
            rest = 0
    return join(tape, pieces)


def _trained_linear(tape: Tape, facts: StepFacts, weights: Weights, part: Linear, x: Value) -> Value:
    weight, bias = weights[f"{part.name}.weight"], weights.get(f"{part.name}.bias")
    if facts.is_autocast:
        weight = cast_weight(tape, weight, facts.item)
        x = convert(tape, x, facts.item)
        bias = None if bias is None else cast_weight(tape, bias, facts.item)
    return linear(tape, x, weight, bias, part.inputs)


def _frozen_linear(tape: Tape, facts: StepFacts, part: Linear, x: Value) -> Value:
    """Its weight is made in the type of the product on every use, and saved only where it is stored in it."""
    item = facts.item if facts.is_autocast else x.item
    if is_scaled(facts.model, part.name, facts.workload.device):
        return scaled_linear(tape, x, (part.outputs, part.inputs), facts.model.frozen_dtype, item)
    weight = Value(None, part.weights, item)
    if facts.model.frozen_dtype in EIGHT_BIT or matrix_bytes(facts.model) == item:
        return linear(tape, convert(tape, x, item), weight, None, part.inputs)
    rows, given = x.count // part.inputs, x.item
    inputs = x.count

    def back(saved: Saved, gradients: Gradients) -> Gradients:
        matrix = tape.shared.pop(part.name, None) or _matrix(tape, facts, part, item)
        out = tape.new(inputs * item)
        del matrix
        return [out if given == item else tape.new(inputs * given)]

    node = tape.node((x,), (), back)
    converted = tape.new(inputs * item) if given != item else None
    matrix = _matrix(tape, facts, part, item)
    if tape.again and node is not None and facts.model.frozen_dtype in FOUR_BIT:
        tape.shared[part.name] = matrix      # what was made of 4 bits serves the gradient that follows
    out = Value(tape.new(rows * part.outputs * item), rows * part.outputs, item, node)
    del converted, matrix
    return out


def _matrix(tape: Tape, facts: StepFacts, part: Linear, item: int) -> Block:
    """The frozen weight in a product's type. In 4 bits it is unpacked module by module, into one if they are several."""
    with tape.counting_as(COPIES):
        if facts.workload.whole_blocks >= facts.model.layers and item == facts.item:
            return tape.new(0)               # where only some blocks are kept, the fullest moment is in one that is not
        whole = tape.new(part.weights * item)
        if facts.model.frozen_dtype in FOUR_BIT and len(modules := _modules(facts.model, part)) > 1:
            for outputs in modules:
                unpacked = tape.new(outputs * part.inputs * item)
                del unpacked
        return whole


def _modules(model: ModelFacts, part: Linear) -> tuple[int, ...]:
    """The outputs of what is one linear here and several in the model's files, as its adapters show, or most models have it."""
    if sum(found := tuple(adapter.outputs for adapter in part.adapters)) == part.outputs:
        return found
    if part.name == "qkv" and is_rms(model):
        keys = model.kv_heads * model.head_width
        return (model.heads * model.head_width, keys, keys)
    return (model.mlp_width,) * 2 if part.name == "mlp_in" and model.gated_mlp else (part.outputs,)


# ------------------------------------------------------------------------------------------------ adapters


def _change(tape: Tape, facts: StepFacts, weights: Weights, part: Linear, adapter: Adapter, name: str,
            x: Value) -> tuple[Value, Value | None]:
    """What one adapter adds to its rows of the frozen product, and with DoRA what it multiplies them by."""
    def weight(kind: str) -> Value:
        return weights[f"{part.name}.adapters.{name}.{kind}"]

    share = adapter_dropout(facts.model)
    magnitude = weights.get(f"{part.name}.adapters.{name}.magnitude")
    factor = None if magnitude is None else _factor(tape, facts, part, adapter, magnitude)
    dropped = dropout(tape, x, share)
    inner = linear(tape, dropped, convert(tape, weight("A"), x.item), None, adapter.inputs)
    if f"{part.name}.adapters.{name}.log_sigma" in weights.values:
        inner = convert(tape, _phi(tape, convert(tape, inner, FP32), weight("a"), weight("log_sigma")), x.item)
    up = linear(tape, unary(tape, inner), convert(tape, weight("B"), x.item), None, adapter.rank)
    if factor is None:
        return up, None
    added = multiply(tape, factor, up)
    if not share:
        return added, factor
    product = _frozen_linear(tape, facts, Linear(part.name, part.inputs, adapter.outputs), dropped)
    return add(tape, added, multiply(tape, unary(tape, factor), product)), None


def _factor(tape: Tape, facts: StepFacts, part: Linear, adapter: Adapter, magnitude: Value) -> Value:
    """DoRA's magnitudes over the lengths of the rows of W + BA, which are no part of the backward pass."""
    rows = adapter.inputs * adapter.outputs * FP32
    matrix = None if matrix_bytes(facts.model) == FP32 else _matrix(tape, facts, part, FP32)
    with tape.without_gradient():
        product = tape.new(rows)
        scaled = tape.new(rows)
        del product
        merged = tape.new(rows)
        del scaled
        lengths = Value(tape.new(adapter.outputs * FP32), adapter.outputs, FP32)
        del merged
    del matrix
    nbytes = magnitude.nbytes
    node = tape.node((magnitude,), (lengths.block,), lambda saved, gradients: [tape.new(nbytes)])
    return Value(tape.new(nbytes), magnitude.count, FP32, node)


def _phi(tape: Tape, inner: Value, a: Value, log_sigma: Value) -> Value:
    """a0 + a1 x + a2 sin(pi x) + a3 cos(pi x) of x = tanh(inner / sigma)."""
    sigma = unary(tape, log_sigma, saves_result=True)
    x = unary(tape, multiply(tape, inner, sigma), saves_result=True)
    coefficients = split(tape, a, (1, 1, 1, 1))
    out = add(tape, coefficients[0], multiply(tape, coefficients[1], x))
    for coefficient in coefficients[2:]:
        wave = unary(tape, unary(tape, x), saves_input=True)
        out = add(tape, out, multiply(tape, coefficient, wave))
    return out


def _changed(tape: Tape, facts: StepFacts, part: Linear, y: Value, added: Value, factor: Value | None) -> Value:
    """An adapter's rows of the output, in the type of the frozen product."""
    if factor is None:
        return convert(tape, add(tape, y, added), y.item)
    has_bias = facts.has(f"blocks.0.{part.name}.bias")
    product = add(tape, y, Value(None, y.count // (y.count // factor.count), int(other_bytes(facts.model)))) if has_bias else y
    turned = multiply(tape, unary(tape, factor), product)
    return convert(tape, add(tape, add(tape, y, turned), added), y.item)


# ------------------------------------------------------------------------------------------------ the decoder


def run_block(tape: Tape, facts: StepFacts, weights: Weights, x: Value, tables: Tables | None, shape: Shape) -> Value:
    """One block on the residual x (T, width) fp32."""
    model = facts.model
    parts = {part.name: part for part in linears(model)}
    rms = is_rms(model)
    mixed = _attend(tape, facts, weights, parts, norm(tape, facts, weights, "attention_norm", x, model.width, rms=rms),
                    tables, shape)
    if model.parallel_residual:
        both = add(tape, x, mixed)
        return add(tape, both, _transform(tape, facts, weights, parts,
                                          norm(tape, facts, weights, "mlp_norm", x, model.width, rms=rms)))
    x = add(tape, x, mixed)
    return add(tape, x, _transform(tape, facts, weights, parts,
                                   norm(tape, facts, weights, "mlp_norm", x, model.width, rms=rms)))


def _attend(tape: Tape, facts: StepFacts, weights: Weights, parts: dict[str, Linear], x: Value, tables: Tables | None,
            shape: Shape) -> Value:
    model = facts.model
    heads = project(tape, facts, weights, parts["qkv"], x)
    sizes = [shape.tokens * count * model.head_width for count in (model.heads, model.kv_heads, model.kv_heads)]
    q, k, v = split(tape, heads, sizes)
    if facts.has("blocks.0.q_norm.weight"):
        q, k = (norm(tape, facts, weights, name, value, model.head_width, rms=True)
                for name, value in (("q_norm", q), ("k_norm", k)))
    if tables is not None:
        q, k = rotate(tape, q, tables, model.heads, model.head_width), rotate(tape, k, tables, model.kv_heads, model.head_width)
    mixed = KERNELS[facts.workload.attention_kernel](tape, q, k, v, shape)
    return dropout(tape, project(tape, facts, weights, parts["attention_out"], mixed), model.dropout)


def _transform(tape: Tape, facts: StepFacts, weights: Weights, parts: dict[str, Linear], x: Value) -> Value:
    inner = project(tape, facts, weights, parts["mlp_in"], x)
    if facts.model.gated_mlp:
        gate, up = split(tape, inner, (inner.count // 2,) * 2)
        inner = multiply(tape, unary(tape, gate, saves_input=True), up)
    else:
        inner = unary(tape, inner, saves_input=True)
    return dropout(tape, project(tape, facts, weights, parts["mlp_out"], inner), facts.model.dropout)


def embed(tape: Tape, facts: StepFacts, outside: Weights, tokens: int) -> Value:
    """(T, width) fp32."""
    model = facts.model
    x = _look_up(tape, outside["embedding.weight"], tokens, model.width)
    x = convert(tape, x, FP32)
    if (table := outside.get("position_embedding.weight")) is not None:
        x = add(tape, x, _look_up(tape, table, tokens, model.width))
    return dropout(tape, x, model.dropout)


def _look_up(tape: Tape, table: Value, tokens: int, width: int) -> Value:
    nbytes = table.nbytes
    node = tape.node((table,), (), lambda saved, gradients: [tape.new(nbytes)])
    return Value(tape.new(tokens * width * table.item), tokens * width, table.item, node)


def rotary_tables(tape: Tape, facts: StepFacts, tokens: int) -> Tables | None:
    """Cosines and sines of the positions."""
    model = facts.model
    learned = facts.has("position_embedding.weight")
    width = (0 if learned else model.head_width) if model.rotary_width is None else model.rotary_width
    if not width:
        return None
    half = tape.new(tokens * width // 2 * FP32)
    angles = tape.new(tokens * width * FP32)
    del half
    made = []
    for _ in range(2):
        table = tape.new(tokens * width * FP32)
        made.append(Value(tape.new(tokens * width * FP32), tokens * width, FP32))
        del table
    del angles
    return made[0], made[1]
