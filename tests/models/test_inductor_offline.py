"""What torch.compile writes for a GPU from the hand-written blocks' functions becomes machine code, in few kernels.

Rows of 4,096 in bf16, for an H100; no GPU is needed. Results are not computed: test_fused_blocks.py compares them on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).with_name("inductor_cases.py")
# all that stands between two products of matrices is one kernel, or two where a mean over the rows is needed as well
MOST_KERNELS = {"enter of llama, lora": 4, "leave of llama, lora": 3, "leave_back of llama, lora": 7,
                "enter_back of llama, lora": 5, "leave_back of gpt2, full": 9}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Any]]:
    """Function -> what became of it; in a process of its own, where torch takes the machine for one with a GPU."""
    pytest.importorskip("triton", reason="Triton is not installed, which compiles this: pip install triton")
    caches = tmp_path_factory.mktemp("caches")
    environment = os.environ | {"TRITON_CACHE_DIR": str(caches / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
                                "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(CASES)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Mapping[str, Mapping[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("function", MOST_KERNELS)
def test_a_part_of_a_block_becomes_few_kernels_without_spills(compiled: Mapping[str, Mapping[str, Any]], function: str) -> None:
    stacks, called = compiled[function]["stacks"], compiled[function]["called"]
    assert 0 < len(stacks) <= MOST_KERNELS[function]
    assert not any(stacks)
    assert called == []
