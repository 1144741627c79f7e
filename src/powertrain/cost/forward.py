"""The forward pass of models/decoder.py with sizes in place of tensors: embedding, blocks, adapters; step.py has the loss.

It follows the decoder line by line and holds the same tensors in variables, so that the same tensors are alive at the same
time. Read the two files beside each other. See replay.py and operators.py for what a line does.
"""

import math
from dataclasses import dataclass

from powertrain.cost import operators as ops
from powertrain.cost import weights
from powertrain.cost.kernels import Shape, attend
from powertrain.cost.replay import COPIES, Block, Gradients, Leaf, Saved, Tape, Value
from powertrain.cost.weights import Adapter, Linear
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts
from powertrain.shapes import DTYPE_BYTES, EIGHT_BIT, FOUR_BIT, FP32

Tables = tuple[Value, Value]                 # cosines and sines of the positions
Weights = dict[str, Value]                   # by name; trained ones with a place for their gradient


@dataclass(frozen=True)
class StepFacts:
    """The model and the workload of a replayed step."""

    model: ModelFacts
    workload: Workload

    @property
    def item(self) -> int:
        """Return the bytes of a number in the products."""
        return DTYPE_BYTES[self.workload.dtype]

    @property
    def is_autocast(self) -> bool:
        return self.item != FP32

    @property
    def is_frozen(self) -> bool:
        return weights.has_frozen_base(self.model)

    @property
    def is_rms(self) -> bool:
        """Return whether norms are RMS norms: layer norms have a bias, except in gpt2 without biases (learned positions)."""
        return not (self.has("blocks.0.attention_norm.bias") or self.learns_positions)

    @property
    def learns_positions(self) -> bool:
        """Return whether positions have an embedding, which in a pipeline is on the first stage."""
        return self.has("position_embedding.weight") or self.model.rotary_width == 0

    def has(self, name: str) -> bool:
        return name in self.model.shapes

    def weights_outside(self) -> Weights:
        """Return the weights that are in no block."""
        return {name: self._weight(name, shape, frozen=name in self.model.frozen)
                for name, shape in self.model.shapes.items() if not name.startswith("blocks.")}

    def weights_of_block(self, *, adapted: bool, frozen: frozenset[str] = frozenset()) -> Weights:
        """Return the weights of one block, by their names in the block. `frozen`: those that the recipe leaves as they are."""
        return {name.split(".", 2)[2]: self._weight(name, shape, frozen=name.split(".", 2)[2] in frozen)
                for name, shape in self.model.shapes.items()
                if (adapted if ".adapters." in name else name.startswith("blocks.0."))}

    def _weight(self, name: str, shape: tuple[int, ...], *, frozen: bool) -> Value:
        if self.is_frozen and ".adapters." not in name:
            return Value(None, math.prod(shape), int(weights.other_bytes(self.model)))
        if frozen:
            return Value(None, math.prod(shape), FP32)
        return Value(None, math.prod(shape), FP32, Leaf(stands=self.workload.flat_parameters))


@dataclass(frozen=True)
class Part:
    """A block, or what is outside of the blocks, in one pass."""

    tape: Tape
    facts: StepFacts
    weights: Weights

    # -------------------------------------------------------------------------------------------- norms and linears

    def norm(self, name: str, x: Value, width: int, *, rms: bool) -> Value:
        """Normalise in fp32, and return the type of x."""
        wide = ops.convert(self.tape, x, FP32)
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        out = ops.rms_norm(self.tape, wide, weight, width) if rms else ops.layer_norm(self.tape, wide, weight, bias, width)
        del wide
        return ops.convert(self.tape, out, x.item)

    def adapters_of(self, linear: str) -> list[str]:
        """Return the names of the weights of a linear's adapters in this block."""
        return [name for name in self.weights if name.startswith(f"{linear}.adapters.")]

    def project(self, part: Linear, x: Value) -> Value:
        """Run one linear of a block with its adapters, if it has some in this block."""
        if not self.facts.is_frozen:
            return self._trained_linear(part, x)
        if not (own := self.adapters_of(part.name)):
            return self._frozen_linear(part, x)
        tape = self.tape
        x = ops.convert(tape, x, self.facts.item if self.facts.is_autocast else x.item)
        names = [name.split(".")[2] for name in own if name.endswith(".A")]
        changes = [self._change(part, adapter, name, x) for name, adapter in zip(names, part.adapters, strict=True)]
        y = self._frozen_linear(part, x)
        rows = x.count // part.inputs
        rest = part.outputs - sum(adapter.outputs for adapter in part.adapters)
        pieces = []
        for adapter, (added, factor) in zip(part.adapters, changes, strict=True):
            pieces.append(self._changed(part, ops.view(tape, y, rows * adapter.outputs), added, factor))
            if rest:
                pieces.append(ops.view(tape, y, rows * rest))
                rest = 0
        return ops.join(tape, pieces)

    def _trained_linear(self, part: Linear, x: Value) -> Value:
        weight, bias = self.weights[f"{part.name}.weight"], self.weights.get(f"{part.name}.bias")
        if self.facts.is_autocast:
            weight = ops.cast_weight(self.tape, weight, self.facts.item)
            x = ops.convert(self.tape, x, self.facts.item)
            bias = None if bias is None else ops.cast_weight(self.tape, bias, self.facts.item)
        return ops.linear(self.tape, x, weight, bias, part.inputs)

    def _frozen_linear(self, part: Linear, x: Value) -> Value:
        """Make the weight in the type of the product on every use; it is saved only if it is stored in that type."""
        tape, model = self.tape, self.facts.model
        item = self.facts.item if self.facts.is_autocast else x.item
        if weights.is_scaled(model, part.name, self.facts.workload.device):
            return ops.scaled_linear(tape, x, (part.outputs, part.inputs), model.frozen_dtype, item)
        if model.frozen_dtype in EIGHT_BIT or weights.matrix_bytes(model) == item:
            return ops.linear(tape, ops.convert(tape, x, item), Value(None, part.weights, item), None, part.inputs)
        rows, given, inputs = x.count // part.inputs, x.item, x.count

        def back(saved: Saved, gradients: Gradients) -> Gradients:
            matrix = tape.shared.pop(part.name, None) or self._matrix(part, item)
            out = tape.new(inputs * item)
            del matrix
            return [out if given == item else tape.new(inputs * given)]

        node = tape.node((x,), (), back)
        converted = tape.new(inputs * item) if given != item else None
        matrix = self._matrix(part, item)
        if tape.again and node is not None and model.frozen_dtype in FOUR_BIT:
            tape.shared[part.name] = matrix  # the matrix made of 4 bits serves the gradient that follows
        out = Value(tape.new(rows * part.outputs * item), rows * part.outputs, item, node)
        del converted, matrix
        return out

    def _matrix(self, part: Linear, item: int) -> Block:
        """Make the frozen weight in a product's type. Out of 4 bits, each module of a fused linear is unpacked apart."""
        tape, model = self.tape, self.facts.model
        with tape.having(component=COPIES):
            if self.facts.workload.whole_blocks >= model.layers and item == self.facts.item:
                return tape.new(0)           # where only some blocks are kept, the fullest moment is in one that is not
            whole = tape.new(part.weights * item)
            if model.frozen_dtype in FOUR_BIT and len(modules := self._modules(part)) > 1:
                for outputs in modules:
                    tape.scratch(outputs * part.inputs * item)
            return whole

    def _modules(self, part: Linear) -> tuple[int, ...]:
        """Return the outputs of the modules that are fused into one linear: as its adapters show, or as in most models."""
        model = self.facts.model
        if sum(found := tuple(adapter.outputs for adapter in part.adapters)) == part.outputs:
            return found
        if part.name == "qkv" and self.facts.is_rms:
            keys = model.kv_heads * model.head_width
            return (model.heads * model.head_width, keys, keys)
        return (model.mlp_width,) * 2 if part.name == "mlp_in" and model.gated_mlp else (part.outputs,)

    # -------------------------------------------------------------------------------------------- adapters

    def _change(self, part: Linear, adapter: Adapter, name: str, x: Value) -> tuple[Value, Value | None]:
        """Return what one adapter adds to its rows of the frozen product, and with DoRA the factor of those rows."""
        tape, share, prefix = self.tape, self.facts.model.adapter_dropout, f"{part.name}.adapters.{name}"
        magnitude = self.weights.get(f"{prefix}.magnitude")
        factor = None if magnitude is None else self._factor(part, adapter, magnitude)
        dropped = ops.dropout(tape, x, share)
        inner = ops.linear(tape, dropped, ops.convert(tape, self.weights[f"{prefix}.A"], x.item), None, adapter.inputs)
        if (log_sigma := self.weights.get(f"{prefix}.log_sigma")) is not None:
            wide = _phi(tape, ops.convert(tape, inner, FP32), self.weights[f"{prefix}.a"], log_sigma)
            inner = ops.convert(tape, wide, x.item)
            del wide
        b = self.weights[f"{prefix}.B"]
        up = ops.linear(tape, ops.unary(tape, inner), ops.convert(tape, b, x.item), None, adapter.rank)
        if factor is None:
            return up, None
        added = ops.multiply(tape, factor, up)
        if not share:
            return added, factor
        product = self._frozen_linear(Linear(part.name, part.inputs, adapter.outputs), dropped)
        return ops.add(tape, added, ops.multiply(tape, ops.unary(tape, factor), product)), None

    def _factor(self, part: Linear, adapter: Adapter, magnitude: Value) -> Value:
        """Return DoRA's magnitudes over the lengths of the rows of W + BA, which have no backward pass."""
        tape, rows = self.tape, adapter.inputs * adapter.outputs * FP32
        matrix = None if weights.matrix_bytes(self.facts.model) == FP32 else self._matrix(part, FP32)
        product = tape.new(rows)
        scaled = tape.new(rows)
        del product
        merged = tape.new(rows)
        del scaled
        lengths = tape.new(adapter.outputs * FP32)
        del merged, matrix
        return ops.operator(tape, (magnitude,), magnitude.count, FP32, saves=(lengths,))

    def _changed(self, part: Linear, y: Value, added: Value, factor: Value | None) -> Value:
        """Return an adapter's rows of the output, in the type of the frozen product."""
        tape, product = self.tape, y
        if factor is None:
            return ops.convert(tape, ops.add(tape, y, added), y.item)
        if self.facts.has(f"blocks.0.{part.name}.bias"):
            product = ops.add(tape, y, Value(None, factor.count, int(weights.other_bytes(self.facts.model))))
        turned = ops.multiply(tape, ops.unary(tape, factor), product)
        return ops.convert(tape, ops.add(tape, ops.add(tape, y, turned), added), y.item)

    # -------------------------------------------------------------------------------------------- the decoder

    def run_block(self, x: Value, tables: Tables | None, shape: Shape) -> Value:
        """Run one block on the residual x (T, width) fp32."""
        tape, model, rms = self.tape, self.facts.model, self.facts.is_rms
        parts = {part.name: part for part in weights.linears(model)}
        mixed = self._attend(parts, self.norm("attention_norm", x, model.width, rms=rms), tables, shape)
        if model.parallel_residual:
            both = ops.add(tape, x, mixed)
            return ops.add(tape, both, self._transform(parts, self.norm("mlp_norm", x, model.width, rms=rms)))
        x = ops.add(tape, x, mixed)
        return ops.add(tape, x, self._transform(parts, self.norm("mlp_norm", x, model.width, rms=rms)))

    def _attend(self, parts: dict[str, Linear], x: Value, tables: Tables | None, shape: Shape) -> Value:
        tape, model = self.tape, self.facts.model
        heads = self.project(parts["qkv"], x)
        sizes = [shape.tokens * count * model.head_width for count in (model.heads, model.kv_heads, model.kv_heads)]
        q, k, v = ops.split(tape, heads, sizes)
        if self.facts.has("blocks.0.q_norm.weight"):
            q, k = (self.norm(name, value, model.head_width, rms=True) for name, value in (("q_norm", q), ("k_norm", k)))
        if tables is not None:
            q, k = (ops.rotate(tape, value, tables, heads, model.head_width)
                    for value, heads in ((q, model.heads), (k, model.kv_heads)))
        mixed = attend(tape, q, k, v, shape, self.facts.workload)
        return ops.dropout(tape, self.project(parts["attention_out"], mixed), model.dropout)

    def _transform(self, parts: dict[str, Linear], x: Value) -> Value:
        tape, model = self.tape, self.facts.model
        inner = self.project(parts["mlp_in"], x)
        if model.gated_mlp:
            gate, up = ops.split(tape, inner, (inner.count // 2,) * 2)
            inner = ops.multiply(tape, ops.unary(tape, gate, saves_input=True), up)
        else:
            inner = ops.unary(tape, inner, saves_input=True)
        return ops.dropout(tape, self.project(parts["mlp_out"], inner), model.dropout)

    def embed(self, tokens: int) -> Value:
        """Return the first residual (T, width) fp32."""
        tape, width = self.tape, self.facts.model.width
        table, positions = self.weights["embedding.weight"], self.weights.get("position_embedding.weight")
        x = ops.convert(tape, ops.operator(tape, (table,), tokens * width, table.item), FP32)
        if positions is not None:
            x = ops.add(tape, x, ops.operator(tape, (positions,), tokens * width, positions.item))
        return ops.dropout(tape, x, self.facts.model.dropout)

    def rotary_tables(self, tokens: int) -> Tables | None:
        """Return the cosines and sines of the positions; None if the model has learned positions."""
        tape, model = self.tape, self.facts.model
        width = (0 if self.facts.learns_positions else model.head_width) if model.rotary_width is None else model.rotary_width
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


def _phi(tape: Tape, inner: Value, a: Value, log_sigma: Value) -> Value:
    """Return LS-LoRA's a0 + a1 x + a2 sin(pi x) + a3 cos(pi x) of x = tanh(inner / sigma)."""
    sigma = ops.unary(tape, log_sigma, saves_result=True)
    x = ops.unary(tape, ops.multiply(tape, inner, sigma), saves_result=True)
    coefficients = ops.split(tape, a, (1, 1, 1, 1))
    out = ops.add(tape, coefficients[0], ops.multiply(tape, coefficients[1], x))
    for coefficient in coefficients[2:]:
        wave = ops.unary(tape, ops.unary(tape, x), saves_input=True)
        out = ops.add(tape, out, ops.multiply(tape, coefficient, wave))
    return out
