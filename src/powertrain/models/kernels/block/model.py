"""The pass of a whole small decoder, with its loss and its gradients, as two calls of our own kernel; see kernel.cpp."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from powertrain.models.decoder import Block, Decoder, rotary_tables
from powertrain.models.kernels.block.whole import OneCall, Pair, Weights, addresses, call, norm_of
from powertrain.models.kernels.ragged.attention import check, documents_of
from powertrain.models.kernels.rows.parts import ADDRESS, INTEGER, NormOf
from powertrain.records import Batch, WrongUse
from powertrain.shapes import one_call_saved, whole_pass_bytes


class Ends(ctypes.Structure):
    """As kernel.cpp declares it."""

    _fields_ = [*((name, ADDRESS) for name in ("tokens", "positions", "targets", "embedding", "places", "head", "d_embedding",
                                               "d_places", "d_head")),
                ("norm", NormOf), ("d_norm", Pair), *((name, INTEGER) for name in ("vocabulary", "context", "layers")),
                ("embedding_scale", ctypes.c_float), ("loss_scale", ctypes.c_float)]


class WholePass:
    """A decoder's passes, each as one call forward and one backward. Raises WrongUse for a model that the kernel does not have.

    All weights must be trained, in fp32 and on the CPU.
    """

    def __init__(self, model: Decoder):
        self.model, self.parameters = model, tuple(model.parameters())
        self.blocks = tuple(OneCall(block) for block in model.blocks if isinstance(block, Block))
        if model.config.rewards or len(self.blocks) < model.config.layers or not all(
                x.requires_grad and x.dtype is torch.float32 and x.is_contiguous() for x in self.parameters):
            raise WrongUse("a pass cannot be one call: not all that it has is a decoder's of tokens, trained in fp32")
        numbers = {id(x): number for number, x in enumerate(self.parameters)}

        def of(*tensors: Tensor | None) -> tuple[int, ...]:
            return tuple(-1 if x is None else numbers[id(x)] for x in tensors)

        self.of_blocks = tuple(number for block in self.blocks for module in block.modules
                               for number in of(module.weight, module.bias))     # as the kernel's Gradients
        places = None if model.position_embedding is None else model.position_embedding.weight
        self.tables = (model.embedding.weight, places, model.head_weight)
        self.of_tables, self.of_norm = of(*self.tables), of(model.norm.weight, model.norm.bias)
        self.added_to = {number for number in self.of_tables[:2] if number != self.of_tables[2]}

    def weights(self) -> tuple[Any, NormOf, list[Tensor]]:
        """Return where the weights of blocks and last norm lie, and what must not be freed as long as they are read."""
        found, scales = zip(*(block.weights() for block in self.blocks), strict=True)
        norm, scale = norm_of(self.model.norm, self.model.config)
        return (Weights * len(found))(*found), norm, [scale, *(scale for of_block in scales for scale in of_block)]


class Forward:
    """A pass whose loss is computed. Its gradients are to be those of the summed loss times `loss_scale`."""

    def __init__(self, whole: WholePass, batch: Batch, dtype: torch.dtype, loss_scale: float):
        config, tokens = whole.model.config, len(batch.tokens)
        check("cpu", dtype, config.head_width)
        whole.model.check_lengths(batch)
        kept, forward, self._backward_bytes = whole_pass_bytes(config, config.vocabulary, tokens, dtype.itemsize)
        numbers, statistics = one_call_saved(config, tokens)
        with torch.no_grad():
            tables, (weights, norm, scales) = rotary_tables(config, batch), whole.weights()
            adds = any(x.grad is not None for x in whole.parameters)
            self._gradients = [x.grad if x.grad is not None else
                               torch.zeros_like(x) if adds or number in whole.added_to else torch.empty_like(x)
                               for number, x in enumerate(whole.parameters)]
        lie_at = [*addresses(*self._gradients), None]            # the last: of a bias that there is not
        read = [x.contiguous() for x in (batch.tokens, batch.positions, batch.targets)]
        ends = Ends(*addresses(*read, *whole.tables), *(lie_at[number] for number in whole.of_tables), norm,
                    Pair(*(lie_at[number] for number in whole.of_norm)), config.vocabulary, config.context, config.layers,
                    config.embedding_scale, loss_scale)
        documents = documents_of(batch.lengths)
        shape, gradients = whole.blocks[0].shape(tokens, tables, documents, adds=adds), [lie_at[of] for of in whole.of_blocks]
        saved = (torch.empty(config.layers * numbers, dtype=dtype), torch.empty(config.layers * statistics),
                 torch.empty(kept, dtype=torch.uint8), kept)
        self._begun, self._to = (dtype, shape, ends, weights), (ADDRESS * len(gradients))(*gradients)
        self._parameters, loss = whole.parameters, ctypes.c_double()
        self._held = saved, (tables, documents, read, scales)    # the latter: what is pointed to
        call("model_forward", *self._begun, ctypes.byref(loss), *saved, torch.empty(forward, dtype=torch.uint8), forward)
        self.loss: float = loss.value        # summed over the targets

    def backward(self) -> None:
        """Add the gradients to `.grad`, and free what the pass has held."""
        saved, pointed_to = self._held
        del self._held
        call("model_backward", *self._begun, self._to, *saved, torch.empty(self._backward_bytes, dtype=torch.uint8),
             self._backward_bytes)
        del pointed_to
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        del self._gradients
