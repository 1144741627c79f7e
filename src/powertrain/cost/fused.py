"""A hand-written block (models/kernels/fused) with sizes in place of tensors: its two halves and their backward passes.

All the work between two products is one loop, so there are no temporary tensors but the operands and results of products. Read
it beside models/kernels/fused/parts.py and block.py; replay.py has the rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from powertrain.cost.forward import Part, Tables
from powertrain.cost.kernels import Shape, attend
from powertrain.cost.replay import COPIES, WORKSPACE, Block, Gradients, Leaf, Saved, Value
from powertrain.cost.weights import Linear, is_scaled, linears
from powertrain.shapes import FP32, one_call_bytes, one_call_saved

Blocks = tuple[Block, ...]
Kept = tuple[tuple[str, Block], ...]         # kind of tensor -> the tensor that the backward pass needs


@dataclass(frozen=True)
class FusedPart(Part):
    """A hand-written block in one pass of `rows` tokens."""

    rows: int
    saving: Mapping[str, str]                # kind of tensor -> what is done instead of keeping it: "recompute" or "offload"
    coming: list[Block] = field(default_factory=list)        # from the host for the block below, while this one computes

    @property
    def item(self) -> int:
        return self.facts.item

    def part(self, name: str) -> Linear:
        return next(part for part in linears(self.facts.model) if part.name == name)

    def ranks(self, name: str) -> int:
        """Return the sum of the ranks of the adapters on a linear of this block."""
        return sum(adapter.rank for adapter in self.part(name).adapters) if self.adapters_of(name) else 0

    def new(self, columns: int, item: int | None = None) -> Block:
        return self.tape.new(self.rows * columns * (item or self.item))

    def turned_bytes(self, tables: Tables | None) -> int:
        """Return the bytes of the queries and keys that rotary positions turn."""
        model = self.facts.model
        return self.rows * (model.heads + model.kv_heads) * model.head_width * self.item if tables is not None else 0

    def copies(self) -> Blocks:
        """Make the block's trained weights in the products' type, adapters joined."""
        if self.facts.is_frozen:
            counts = [(part.inputs + part.outputs) * self.ranks(part.name) for part in linears(self.facts.model)]
        else:
            counts = [value.count for name, value in self.weights.items() if "norm" not in name and self.item != FP32]
        with self.tape.having(component=COPIES):
            return tuple(self.tape.new(count * self.item) for count in counts if count)

    def product(self, name: str, *, backward: bool = False) -> tuple[Block, Block | None]:
        """Make a linear's result, or with `backward` the gradient of its input; and the ranks of its adapters beside it."""
        part, ranks = self.part(name), self.ranks(name)
        read, made = (part.outputs, part.inputs) if backward else (part.inputs, part.outputs)
        if is_scaled(self.facts.model, name, self.facts.workload.device):
            codes = self.new(read, 1)
            sums = self.new(made, FP32)
            del codes
            kept = self.new(ranks) if ranks else None
            y = self.new(made)               # the adapters' sum, and then the result in its place
            del sums
            return y, kept
        dranks = self.new(ranks) if ranks and backward else None
        y = self.new(made)
        if not ranks:
            return y, None
        kept = dranks or self.new(ranks)
        added = y if self.facts.workload.adds_in_place else self.new(made)           # as in_place.plus_product adds
        return added, kept

    def weight_gradients(self, name: str) -> dict[str, Block]:
        """Make weight -> gradient, by way of the products' type; "a" is the gradient of all adapters' A, "b" that of all B."""
        part, ranks, made = self.part(name), self.ranks(name), {}
        if not self.facts.is_frozen:
            made[f"{name}.weight"] = self._widened(part.weights)
            if f"{name}.bias" in self.weights:
                made[f"{name}.bias"] = self.tape.new(part.outputs * FP32)
        if ranks:
            made[f"{name} a"] = self._widened(part.inputs * ranks)
            made[f"{name} b"] = self.tape.new(part.outputs * ranks * self.item)
        return made

    def _widened(self, count: int) -> Block:
        product = self.tape.new(count * self.item)
        return product if self.item == FP32 else self.tape.new(count * FP32)

    def run_block(self, x: Value, tables: Tables | None, shape: Shape) -> Value:
        """Run one block on the residual x (T, width) fp32."""
        tape, model = self.tape, self.facts.model
        trained = {name: value for name, value in self.weights.items() if value.node is not None}
        records = x.node is not None or bool(trained)
        copies = self.copies()
        heads, entered = self._enter(tables)
        inside = [Value(heads, self.rows * count * model.head_width, self.item, Leaf(WORKSPACE) if records else None)
                  for count in (model.heads, model.kv_heads, model.kv_heads)]
        mixed = attend(tape, inside[0], inside[1], inside[2], shape, self.facts.workload)
        assert mixed.block is not None
        out, left = self._leave()
        if not records:
            return Value(out, x.count, FP32)
        held: list[Blocks] = [copies, entered, (heads, mixed.block), left]
        entering: Kept = (("normalised", entered[0]), ("heads", heads))
        leaving: Kept = (("normalised", left[0]), ("mixed", mixed.block), ("inner", left[2]))
        for kind, block in (*leaving, *entering):
            if kind in self.saving:
                block.put_away()
        names, needs_x = list(trained), x.node is not None

        def back(saved: Saved, gradients: Gradients) -> Gradients:
            made, dx = self._backward(held, entering, leaving, inside, mixed, tables, needs_x=needs_x)
            return [dx, *self._of_weights(names, made)]

        node = tape.node((x, *trained.values()), (), back)
        return Value(out, x.count, FP32, node)

    def _enter(self, tables: Tables | None) -> tuple[Block, Blocks]:
        """Make queries, keys and values; return them and the tensors that are kept besides."""
        width = self.facts.model.width
        rate, h, n = self.new(1, FP32), self.new(width), self.new(width)
        y, ranks = self.product("qkv")
        del h
        heads = self.new(self.part("qkv").outputs)
        self.tape.scratch(self.turned_bytes(tables))
        raw = y if self.facts.has("blocks.0.q_norm.weight") else None
        return heads, _those((n, rate, ranks, raw))

    def _leave(self) -> tuple[Block, Blocks]:
        """Make the next residual; return it and the tensors that are kept."""
        model = self.facts.model
        o, out_ranks = self.product("attention_out")
        rate, h, n = self.new(1, FP32), self.new(model.width), self.new(model.width)
        inner, in_ranks = self.product("mlp_in")
        del h
        act = self.new(model.mlp_width)
        y, down_ranks = self.product("mlp_out")
        del act
        out = self.new(model.width, FP32)
        del o, y
        return out, _those((n, rate, inner, out_ranks, in_ranks, down_ranks))

    def _backward(self, held: list[Blocks], entering: Kept, leaving: Kept, inside: list[Value], mixed: Value,
                  tables: Tables | None, *, needs_x: bool) -> tuple[dict[str, Block], Block | None]:
        """Return (the gradients of weights, that of x). The tensors of `held` are let go from its end.

        `entering`, `leaving`: the tensors of each half of the block that may be put away, in the order of their return.
        """
        width, whole = self.facts.model.width, not self.facts.is_frozen
        made: dict[str, Block] = {}
        self._bring_back(leaving)
        dy = self.new(width)
        da, dranks = self.product("mlp_out", backward=True)
        act, dinner = self.new(self.facts.model.mlp_width), self.new(self.part("mlp_in").outputs)
        del da
        made |= self.weight_gradients("mlp_out")
        del dy, act
        dh, dranks = self.product("mlp_in", backward=True)
        made |= self.weight_gradients("mlp_in")
        del dinner, dranks
        dbetween, do = self.new(width, FP32), self.new(width)
        del dh
        dmixed, dranks = self.product("attention_out", backward=True)
        made |= self.weight_gradients("attention_out")
        del do, dranks
        held.pop()
        if not (needs_x or whole or self.ranks("qkv")):
            held.clear()
            self.coming.clear()
            return made, None
        self._bring_back(entering)
        self.tape.backward(mixed, dmixed)
        held.pop()
        dheads = [value.node.gradient for value in inside if isinstance(value.node, Leaf)]
        turned = self.tape.new(self.turned_bytes(tables))
        dy = self.new(self.part("qkv").outputs)
        del turned
        dx = None
        if needs_x or whole:
            dh, dranks = self.product("qkv", backward=True)
            dx = self.new(width, FP32) if needs_x else None
            del dh
        else:
            dranks = self.new(self.ranks("qkv"))
        made |= self.weight_gradients("qkv")
        del dy, dranks, dheads, dbetween, dmixed
        held.clear()
        self.coming.clear()
        return made, dx

    def _bring_back(self, half: Kept) -> None:
        """Bring the tensors of one half back, recomputed or from the host."""
        for kind, block in half:
            action = self.saving.get(kind)
            if action == "offload":
                self.coming.append(self.tape.new(block.away))
            made = self._recomputed(kind) if action == "recompute" else None
            if kind == "inner":
                made = None                  # kept from here on, and not copied
            block.bring_back()
            del made

    def _recomputed(self, kind: str) -> Block:
        """Make a kind of tensor again; the tensors on the way to it are let go."""
        h = self.new(self.facts.model.width)
        y, ranks = self.product("mlp_in" if kind == "inner" else "qkv")
        del h, ranks
        return y if kind == "inner" else self.new(self.part("qkv").outputs)

    def _of_weights(self, names: list[str], made: dict[str, Block]) -> Gradients:
        """Return the gradients in the order of the weights. Those of A are rows of one tensor; those of B are copied."""
        found: Gradients = []
        for name in names:
            linear, _, adapter = name.partition(".adapters.")
            if adapter and name.endswith(".A"):
                found.append(made.pop(f"{linear} a", None) or self.tape.new(0))
            else:
                found.append(made.pop(name, None) or self.tape.new(self.weights[name].nbytes))
        return found


@dataclass(frozen=True)
class OneCallPart(Part):
    """A block whose pass is one function; see models/kernels/block."""

    def run_block(self, x: Value, tables: Tables | None, shape: Shape) -> Value:
        """Run one block on the residual x (T, width) fp32."""
        tape, model = self.tape, self.facts.model
        rows, item = x.count // model.width, self.facts.item
        numbers, statistics = one_call_saved(model, rows)
        forward, backward = one_call_bytes(model, rows, item)
        out = tape.new(x.count * FP32)
        saved = [tape.new(numbers * item), tape.new(statistics * FP32)]
        tape.scratch(forward)

        def back(_: Saved, gradients: Gradients) -> Gradients:
            made: Gradients = [tape.new(x.count * FP32), *(tape.new(weight.nbytes) for weight in self.weights.values())]
            tape.scratch(backward)
            saved.clear()
            return made

        return Value(out, x.count, FP32, tape.node((x, *self.weights.values()), (), back))


def _those(blocks: Sequence[Block | None]) -> Blocks:
    """Return the blocks that there are."""
    return tuple(block for block in blocks if block is not None)
