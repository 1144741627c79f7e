"""A block of kernels/fused in sizes: what its two halves and their backward passes make, in the order of the compiled code.

Between two products everything is one loop, so no temporary tensors are there but the products' operands and results. Read
it beside models/kernels/fused/parts.py and block.py; see replay.py for the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from powertrain.cost.forward import StepFacts, Tables, Weights
from powertrain.cost.kernels import KERNELS, Shape
from powertrain.cost.replay import COPIES, WORKSPACE, Block, Gradients, Leaf, Saved, Tape, Value
from powertrain.cost.weights import Linear, has_frozen_base, is_scaled, linears
from powertrain.shapes import FP32

Blocks = tuple[Block, ...]
NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Sizes:
    """Bytes of a pass's tensors."""

    tape: Tape
    facts: StepFacts
    weights: Weights
    rows: int

    @property
    def item(self) -> int:
        return self.facts.item

    def part(self, name: str) -> Linear:
        return next(part for part in linears(self.facts.model) if part.name == name)

    def ranks(self, name: str) -> int:
        """Of the adapters on a linear of this block, together."""
        there = any(weight.startswith(f"{name}.adapters.") for weight in self.weights.values)
        return sum(adapter.rank for adapter in self.part(name).adapters) if there else 0

    def new(self, columns: int, item: int | None = None) -> Block:
        return self.tape.new(self.rows * columns * (item or self.item))

    def copies(self) -> Blocks:
        """The block's trained weights in the products' type, adapters joined."""
        with self.tape.counting_as(COPIES):
            if has_frozen_base(self.facts.model):
                joined = [(part.inputs + part.outputs) * self.ranks(part.name) for part in linears(self.facts.model)]
                return tuple(self.tape.new(count * self.item) for count in joined if count)
            if self.item == FP32:
                return ()
            return tuple(self.tape.new(value.count * self.item) for name, value in self.weights.values.items()
                         if "norm" not in name)

    def product(self, name: str) -> tuple[Block, Blocks]:
        """A linear's result, and the ranks that are kept."""
        outputs, ranks = self.part(name).outputs, self.ranks(name)
        if self.is_scaled(name):
            return self._scaled(self.part(name).inputs, outputs, ranks)
        y = self.new(outputs)
        if not ranks:
            return y, ()
        kept = self.new(ranks)
        added = self.new(outputs)
        return added, (kept,)

    def product_back(self, name: str) -> tuple[Block, Block | None]:
        """The gradients of a linear's input and of its ranks."""
        inputs, ranks = self.part(name).inputs, self.ranks(name)
        if self.is_scaled(name):
            dx, made = self._scaled(self.part(name).outputs, inputs, ranks)
            return dx, made[0] if made else None
        dranks = self.new(ranks) if ranks else None
        dx = self.new(inputs)
        if dranks is None:
            return dx, None
        added = self.new(inputs)
        return added, dranks

    def is_scaled(self, name: str) -> bool:
        return is_scaled(self.facts.model, name, self.facts.workload.device)

    def _scaled(self, read: int, made: int, ranks: int) -> tuple[Block, Blocks]:
        """A product in 8 bits of `read` columns that makes `made`, and the ranks of its adapters."""
        codes = self.new(read, 1)
        sums = self.new(made, FP32)
        del codes
        kept = (self.new(ranks),) if ranks else ()
        y = self.new(made)                   # what adapters add, and then the result in its place
        del sums
        return y, kept

    def weight_gradients(self, name: str) -> dict[str, Block]:
        """Weight -> its gradient, made by way of the products' type; "a" is that of all adapters' A, "b" that of all B."""
        part, ranks, made = self.part(name), self.ranks(name), {}
        if not has_frozen_base(self.facts.model):
            made[f"{name}.weight"] = self._widened(part.weights)
            if f"{name}.bias" in self.weights.values:
                made[f"{name}.bias"] = self.tape.new(part.outputs * FP32)
        if ranks:
            made[f"{name} a"] = self._widened(part.inputs * ranks)
            made[f"{name} b"] = self.tape.new(part.outputs * ranks * self.item)
        return made

    def _widened(self, count: int) -> Block:
        product = self.tape.new(count * self.item)
        return product if self.item == FP32 else self.tape.new(count * FP32)


def run_fused_block(tape: Tape, facts: StepFacts, weights: Weights, x: Value, tables: Tables | None, shape: Shape,
                    saving: Mapping[str, str] = NOTHING) -> Value:
    """One block on the residual x (T, width) fp32. `saving`: what it does not keep, as in models/kernels/fused/saving.py."""
    model = facts.model
    sizes = Sizes(tape, facts, weights, x.count // model.width)
    trained = [value for value in weights.values.values() if value.node is not None]
    records = tape.recording and (x.node is not None or bool(trained))
    copies = sizes.copies()
    heads, entered = _enter(sizes, tables)
    inside = [Value(heads, sizes.rows * count * model.head_width, facts.item, Leaf(WORKSPACE) if records else None)
              for count in (model.heads, model.kv_heads, model.kv_heads)]
    mixed = KERNELS[facts.workload.attention_kernel](tape, inside[0], inside[1], inside[2], shape)
    assert mixed.block is not None
    out, left = _leave(sizes)
    if not records:
        return Value(out, x.count, FP32)
    held: list[Blocks] = [copies, entered, (heads, mixed.block), left]
    light = Light(sizes, saving, (("normalised", left[0]), ("mixed", mixed.block), ("inner", left[2])),
                  (("normalised", entered[0]), ("heads", heads)))
    light.put_away()
    names = [name for name, value in weights.values.items() if value.node is not None]
    needs_x = x.node is not None

    def back(saved: Saved, gradients: Gradients) -> Gradients:
        made, dx = _backward(sizes, held, inside, mixed, tables, light, needs_x=needs_x)
        return [dx, *_of_weights(sizes, names, made)]

    node = tape.node((x, *trained), (), back)
    return Value(out, x.count, FP32, node)


@dataclass(frozen=True)
class Light:
    """What a block puts away, in the order in which it comes back: before one half's backward pass, and the other's."""

    sizes: Sizes
    saving: Mapping[str, str]                # kind -> "recompute" or "offload"
    left: tuple[tuple[str, Block], ...]
    entered: tuple[tuple[str, Block], ...]
    coming: list[Block] = field(default_factory=list)        # of the block below, while this one computes

    def put_away(self) -> None:
        for kind, block in (*self.left, *self.entered):
            if kind in self.saving:
                block.put_away()

    def bring(self, half: tuple[tuple[str, Block], ...]) -> None:
        for kind, block in half:
            action = self.saving.get(kind)
            if action == "offload":
                self.coming.append(self.sizes.tape.new(block.away))
            made = self._recomputed(kind) if action == "recompute" else None
            if kind == "inner":
                made = None                  # it is what is kept from here on, and not copied
            block.bring_back()
            del made

    def _recomputed(self, kind: str) -> Block:
        """A kind of tensor, made again; what comes by in between is let go."""
        sizes = self.sizes
        h = sizes.new(sizes.facts.model.width)
        y, ranks = sizes.product("mlp_in" if kind == "inner" else "qkv")
        del h, ranks
        return y if kind == "inner" else sizes.new(sizes.part("qkv").outputs)


def _enter(sizes: Sizes, tables: Tables | None) -> tuple[Block, Blocks]:
    """Queries, keys and values; and what is kept besides."""
    model = sizes.facts.model
    rate, h, n = sizes.new(1, FP32), sizes.new(model.width), sizes.new(model.width)
    y, ranks = sizes.product("qkv")
    del h
    heads = sizes.new(sizes.part("qkv").outputs)
    turned = sizes.new((model.heads + model.kv_heads) * model.head_width) if tables is not None else None
    del turned
    raw = (y,) if sizes.facts.has("blocks.0.q_norm.weight") else ()
    return heads, (n, rate, *ranks, *raw)


def _leave(sizes: Sizes) -> tuple[Block, Blocks]:
    """The next residual, and what is kept."""
    model = sizes.facts.model
    o, out_ranks = sizes.product("attention_out")
    rate, h, n = sizes.new(1, FP32), sizes.new(model.width), sizes.new(model.width)
    inner, in_ranks = sizes.product("mlp_in")
    del h
    act = sizes.new(model.mlp_width)
    y, down_ranks = sizes.product("mlp_out")
    del act
    out = sizes.new(model.width, FP32)
    del o, y
    return out, (n, rate, inner, *out_ranks, *in_ranks, *down_ranks)


def _backward(sizes: Sizes, held: list[Blocks], inside: list[Value], mixed: Value, tables: Tables | None,
              light: Light, *, needs_x: bool) -> tuple[dict[str, Block], Block | None]:
    """(the gradients of weights, that of x). `held` is let go from its end."""
    model = sizes.facts.model
    whole = not has_frozen_base(model)
    made: dict[str, Block] = {}
    light.bring(light.left)
    dy = sizes.new(model.width)
    da, dranks = sizes.product_back("mlp_out")
    act, dinner = sizes.new(model.mlp_width), sizes.new(sizes.part("mlp_in").outputs)
    del da
    made |= sizes.weight_gradients("mlp_out")
    del dy, act
    dh, dranks = sizes.product_back("mlp_in")
    made |= sizes.weight_gradients("mlp_in")
    del dinner, dranks
    dbetween, do = sizes.new(model.width, FP32), sizes.new(model.width)
    del dh
    dmixed, dranks = sizes.product_back("attention_out")
    made |= sizes.weight_gradients("attention_out")
    del do, dranks
    held.pop()
    if not (needs_x or whole or sizes.ranks("qkv")):
        held.clear()
        light.coming.clear()
        return made, None
    light.bring(light.entered)
    sizes.tape.backward(mixed, dmixed)
    held.pop()
    dheads = [value.node.gradient for value in inside if isinstance(value.node, Leaf)]
    turned = sizes.new((model.heads + model.kv_heads) * model.head_width) if tables is not None else None
    dy = sizes.new(sizes.part("qkv").outputs)
    del turned
    dx = None
    if needs_x or whole:
        dh, dranks = sizes.product_back("qkv")
        dx = sizes.new(model.width, FP32) if needs_x else None
        del dh
    else:
        dranks = sizes.new(sizes.ranks("qkv"))
    made |= sizes.weight_gradients("qkv")
    del dy, dranks, dheads, dbetween, dmixed
    held.clear()
    light.coming.clear()
    return made, dx


def _of_weights(sizes: Sizes, names: list[str], made: dict[str, Block]) -> Gradients:
    """In the order of the weights. Each A's gradient is some rows of what was made; B's, a row's part, is copied."""
    found: Gradients = []
    for name in names:
        linear, _, rest = name.partition(".adapters.")
        if not rest:
            found.append(made.pop(name) if name in made else sizes.tape.new(sizes.weights[name].nbytes))
        elif name.endswith(".A"):
            found.append(made.pop(f"{linear} a", None) or sizes.tape.new(0))
        else:
            found.append(sizes.tape.new(sizes.weights[name].nbytes))
    return found
