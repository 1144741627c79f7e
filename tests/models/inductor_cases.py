"""Inductor's code for a GPU of the hand-written blocks' functions, compiled to machine code: prints one JSON object.

Run by test_inductor_offline.py in a process of its own: what torch asks of a GPU is answered here for an H100, on any machine.
Prints function -> the bytes of a thread's stack in each of its Triton kernels (registers that did not fit), and the operators
that Inductor does not compile but calls.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from test_triton_compiled import spilled
from test_triton_launches import NoDriver
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from triton.compiler import ASTSource

from powertrain.models.adapters.attached import add_adapters
from powertrain.models.adapters.targets import AdapterConfig
from powertrain.models.config import make_config
from powertrain.models.decoder import Block, Decoder
from powertrain.models.kernels.attention import math_attention
from powertrain.models.kernels.fused.block import Functions, HandWritten
from powertrain.models.kernels.fused.parts import Parts
from powertrain.records import Batch

H100 = SimpleNamespace(name="H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
                       max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=80 << 30, gcnArchName="",
                       shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20)
TOKENS, WIDTH = 512, 4096
CALLED = re.compile(r"^ +(?:\w+ = )?torch\.ops\.aten\.(\w+)", re.MULTILINE)       # not in the comments above kernels
# the second has layer norms, dropout, GELU and gradients of all weights
CASES = {("llama", "lora"): ("enter", "leave", "leave_back", "enter_back"), ("gpt2", "full"): ("leave_back",)}


class Generated(Exception):
    """Inductor has written the code, which would be loaded next."""


def as_on_a_gpu() -> Iterator[Any]:
    """Patches under which torch takes this machine for one with an H100."""
    for name, answer in {"is_available": True, "_lazy_init": None, "device_count": 1, "current_device": 0,
                         "get_device_capability": (9, 0), "get_device_properties": H100, "is_bf16_supported": True,
                         "set_rng_state": None, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "synchronize": None,
                         "_exchange_device": 0, "_maybe_exchange_device": 0}.items():
        yield mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name, answer in {"is_available": True, "device_count": 1, "current_device": 0, "get_compute_capability": 90,
                         "get_device_properties": H100}.items():
        yield mock.patch.object(CudaInterface, name, staticmethod(lambda *_, answer=answer: answer))
    yield mock.patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: H100))
    yield mock.patch.object(CudaInterface.Worker, "current_device", staticmethod(lambda: 0))
    yield mock.patch.object(torch.version, "cuda", "13.0")
    yield mock.patch.object(triton.runtime.driver, "_active", NoDriver())
    yield mock.patch.object(triton_helpers, "set_driver_to_gpu")
    yield mock.patch.object(GraphLowering, "compile_to_module", generate)
    yield config.patch(force_disable_caches=True, compile_threads=1)


def generate(graph: GraphLowering) -> None:
    raise Generated(graph.codegen()[0].value)


def calls_of_a_step(family: str, method: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each function with the arguments that it gets in a step in bf16, last call first."""
    heads = {"kv_heads": 1} if family != "gpt2" else {}
    model = Decoder(make_config(family, vocabulary=50, layers=2, width=WIDTH, heads=32, context=1024, dropout=0.1, **heads)[0])
    if method == "lora":
        add_adapters(model, AdapterConfig(r=4))
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[function.__name__] = function, arguments
            return function(*arguments)
        return call

    hand = [HandWritten(block, Functions.of(Parts(model.config), noting)) for block in model.blocks if isinstance(block, Block)]
    tokens = torch.randint(0, 50, (TOKENS,))
    batch = Batch(tokens, tokens, torch.arange(TOKENS), (TOKENS,), TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch, attention=math_attention, run_block=lambda _, index, *rest: hand[index](*rest))
    logits.float().mean().backward()
    return calls


def code_for(function: Callable[..., Any], arguments: tuple[Any, ...], fake: FakeTensorMode) -> str:
    """Return the Python module that Inductor writes for a call, with its tensors on a GPU."""
    leaves, structure = tree_flatten(arguments)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def flat(*tensors: Tensor) -> list[Tensor]:
        given = dict(zip(places, tensors, strict=True))
        result = function(*tree_unflatten([given.get(place, leaf) for place, leaf in enumerate(leaves)], structure))
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    here = [leaves[place].detach() for place in places]
    # make_fx does not say that it traces for a compiler
    with torch.no_grad(), mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        graph = make_fx(flat, decomposition_table=select_decomp_table(), tracing_mode="fake")(*here)
        for node in graph.graph.nodes:       # slices in Python need a build for CUDA, operators on fake tensors do not
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        graph.recompile()
        with fake:
            tensors = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda:0") for one in here]
        FakeTensorProp(graph, fake).propagate_dont_convert_inputs(*tensors)
    try:
        compile_fx_inner(graph, tensors)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, Generated):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return str(cause)
    raise AssertionError("Inductor wrote no code")


def kernels_of(code: str, folder: Path) -> dict[str, int]:
    """Return the Triton kernels in the code, compiled for an H100: name -> bytes of a thread's stack."""
    found = {}
    for name, source in re.findall(r"async_compile\.triton\('([^']+)', '''(.*?)''', device_str", code, re.DOTALL):
        path = folder / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tuner = getattr(module, name)
        chosen, meta = tuner.configs[0], tuner.triton_meta
        constants = {**meta.get("constants", {}), **chosen.kwargs}
        signature = {key: "constexpr" if key in constants else kind for key, kind in meta["signature"].items()}
        signature |= dict.fromkeys(constants, "constexpr")
        binary = triton.compile(ASTSource(tuner.fn, signature, constants, meta["configs"][0]),
                                target=NoDriver().get_current_target(), options={"num_warps": chosen.num_warps})
        found[name] = spilled(binary, folder)
    return found


def main() -> None:
    with FakeTensorMode() as fake:
        cases = {case: calls_of_a_step(*case) for case in CASES}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for patch in as_on_a_gpu():
            stack.enter_context(patch)
        found = {}
        for case, names in CASES.items():
            for name in names:
                code = code_for(*cases[case][name], fake)
                found[f"{name} of {', '.join(case)}"] = {"stacks": list(kernels_of(code, Path(folder)).values()),
                                                         "called": sorted(set(re.findall(CALLED, code)))}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
