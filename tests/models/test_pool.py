"""The pool of CPU memory: each test in a process of its own, because a pool is installed for good."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import ctypes, torch
from powertrain.models.kernels import build, pool
pool.install()
assert pool.is_installed()
def counts():
    found = (ctypes.c_int64 * 3)()
    build.load(build.POOL).counts(found)
    return dict(zip(("held", "kept", "most"), found))
MIB = 1 << 20
"""
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no mmap")


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_block_that_is_given_back_serves_the_next_request_of_about_its_size() -> None:
    run("""
first = torch.empty(10 * MIB, dtype=torch.uint8)
place = first.data_ptr()
assert counts() == {"held": 10 * MIB, "kept": 0, "most": 10 * MIB}
del first
assert counts() == {"held": 0, "kept": 10 * MIB, "most": 10 * MIB}
again = torch.empty(10 * MIB - 5, dtype=torch.uint8)
assert again.data_ptr() == place and counts()["held"] == 10 * MIB
half = torch.empty(5 * MIB, dtype=torch.uint8)           # for which ten are too many
assert half.data_ptr() != place and counts()["held"] == 15 * MIB
""")


def test_it_keeps_a_quarter_and_256_mib_more_than_was_held_at_most() -> None:
    run("""
made = 0
for size in (128, 160, 192, 224, 256, 320, 384, 448, 512):
    block = torch.empty(size * MIB, dtype=torch.uint8)
    made += size * MIB
    assert counts()["held"] + counts()["kept"] <= 1.25 * counts()["most"] + 256 * MIB
    del block
assert 256 * MIB < counts()["kept"] < made
pool.empty()
assert counts()["kept"] == 0
""")


def test_what_was_made_before_and_small_blocks_are_freed_as_ever() -> None:
    code = """
import torch
before = [torch.zeros(3 << 20), torch.zeros(10)]
""" + BEGIN + """
small = [torch.empty(count) for count in range(1, 5000)]
shared = torch.zeros(MIB).share_memory_()
del before, small, shared
kept = torch.ones(2 * MIB)
resized = torch.empty(0).resize_(3 * MIB).fill_(2)
assert kept.sum() == 2 * MIB and resized.sum() == 6 * MIB and torch.empty(0).numel() == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_take_and_give_back_at_once() -> None:
    run("""
import threading
def work(seed):
    sizes = torch.randint(1 << 16, 1 << 22, (300,), generator=torch.Generator().manual_seed(seed)).tolist()
    held = []
    for number, size in enumerate(sizes):
        block = torch.full((size,), number % 100, dtype=torch.uint8)
        held.append((block, number % 100))
        if len(held) > 5:
            old, value = held.pop(0)
            assert (old == value).all()
threads = [threading.Thread(target=work, args=[seed]) for seed in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert counts()["held"] == 0, counts()
""")


def test_a_process_that_is_forked_meanwhile_takes_memory_too() -> None:
    run("""
import os, threading
over = threading.Event()
def take():
    while not over.is_set():
        torch.empty(MIB, dtype=torch.uint8)
threads = [threading.Thread(target=take) for _ in range(2)]
for thread in threads: thread.start()
for _ in range(200):
    child = os.fork()
    if child == 0:
        torch.empty(2 * MIB, dtype=torch.uint8)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
over.set()
""")


def test_memory_that_is_not_there_is_torchs_own_error_and_profilers_see_blocks() -> None:
    run("""
from powertrain.training.memory import MemoryLedger, is_out_of_memory
try:
    torch.empty(1 << 60, dtype=torch.uint8)
except RuntimeError as error:
    assert is_out_of_memory(error) and "DefaultCPUAllocator" in str(error), error
else:
    raise SystemExit("an exbibyte")
with MemoryLedger(torch.device("cpu"), 0) as ledger:
    one = torch.empty(7 * MIB, dtype=torch.uint8)
    del one
    two = torch.empty(5 * MIB, dtype=torch.uint8)
assert ledger.peak_bytes == 7 * MIB, ledger.peak_bytes
""")
