"""int8 base: frozen weights as whole numbers of 8 bits, multiplied as such."""

from dataclasses import dataclass

from powertrain.techniques.base import InEightBits


@dataclass(frozen=True)
class Int8Base(InEightBits):
    """Both products with a frozen matrix, forward and for the gradient of its input, are made of int8 numbers.

    Each row of a weight and each token of an activation or gradient has a scale of its own, and sums are exact in int32.
    CPUs with VNNI or AMX and NVIDIA's tensor cores make two to four times as many of these products as of bf16 ones, and a
    weight takes one byte. Adapters, norms, embedding and head stay as they are, and so do matrices whose products would lose
    too much, which is measured on the first examples. This changes results slightly, so only a recipe turns it on.
    """

    name = "int8_base"
    does = "stores and multiplies the frozen weights in 8-bit integers"
    needs_whole_weights = True
    stored = "int8"
    units = "fast int8 units (VNNI or AMX of a CPU, or tensor cores since Turing)"
    of_amd = "no one has tried 8-bit products on an AMD GPU here"
    rounded = "8-bit weights and inputs"
    source = "Dettmers et al. 2022, arXiv:2208.07339 (LLM.int8); Wortsman et al. 2023, arXiv:2304.13013 (SwitchBack)"
