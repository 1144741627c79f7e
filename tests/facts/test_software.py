"""What is installed, and why the rest is not usable."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import platform
import shutil
import sys
import sysconfig
import tomllib
import types
from pathlib import Path

import numpy
import pytest
import torch

from powertrain import __version__
from powertrain.facts.software import PARTS, read_software


def only(monkeypatch, *installed):
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name: types.SimpleNamespace() if name in installed else None)


def gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)


def test_each_part_is_either_usable_or_has_a_reason():
    software = read_software()
    expected = {*PARTS} | {"powertrain", "python", "c++ compiler", "c compiler", "python headers"}
    assert set(software.versions) | set(software.missing) == expected
    assert not set(software.versions) & set(software.missing)
    assert all(software.missing.values())


def test_versions_are_those_installed():
    versions = read_software().versions
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == torch.__version__
    assert versions["numpy"] == numpy.__version__


def test_a_checkout_that_nobody_has_installed_has_an_unknown_version(monkeypatch):
    def version(name):
        if name == "powertrain":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert read_software().versions["powertrain"] == "unknown"


def test_the_version_is_the_one_that_is_published():
    """A build reads the version where pyproject.toml says; an installation keeps it, so one of an older version fails here."""
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, name = project["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    assert "version" in project["project"]["dynamic"]
    assert getattr(importlib.import_module(module), name) == __version__
    assert read_software().versions["powertrain"] == __version__


def test_no_part_is_imported_to_find_out(monkeypatch):
    for name in ("transformers", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)          # an import would now fail
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace())
    assert "transformers" in read_software().versions


def test_a_part_that_is_not_installed_says_how_to_install_it(monkeypatch):
    only(monkeypatch)
    assert read_software().missing["bitsandbytes"] == "not installed (pip install bitsandbytes)"


def test_without_a_gpu_the_reason_is_the_gpu_and_not_the_installation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    only(monkeypatch, "triton")
    missing = read_software().missing
    assert missing["flash_attn"] == "needs a CUDA GPU; torch sees none here"
    assert missing["triton"].endswith("(it is installed)")


def test_an_old_gpu_is_told_apart_from_a_missing_package(monkeypatch):
    gpu(monkeypatch, (7, 5))
    only(monkeypatch, "flash_attn", "unsloth")
    software = read_software()
    assert software.missing["flash_attn"] == "needs compute capability 8.0 or more; this GPU has 7.5"
    assert software.missing["liger_kernel"] == "not installed (pip install liger-kernel)"
    assert software.versions["unsloth"] == "unknown"           # importable, without metadata


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt install g++" in read_software().missing["c++ compiler"]


def with_triton(monkeypatch, tmp_path, *, headers=True, **commands):
    """Plant an L4, an installed Triton, these commands on the PATH, and Python's headers."""
    gpu(monkeypatch, (8, 9))
    only(monkeypatch, "triton", "unsloth")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", commands.get)
    if headers:
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))


def test_with_a_c_compiler_and_headers_triton_is_usable(monkeypatch, tmp_path):
    with_triton(monkeypatch, tmp_path, clang="/usr/bin/clang")
    software = read_software()
    assert {"triton", "unsloth"} <= set(software.versions)
    assert software.versions["c compiler"] == "/usr/bin/clang"


def test_without_a_c_compiler_triton_is_not_usable_on_a_gpu(monkeypatch, tmp_path):
    with_triton(monkeypatch, tmp_path)
    missing = read_software().missing
    assert missing["triton"] == missing["unsloth"] == missing["c compiler"] == (
        "Triton needs a C compiler, and there is no gcc or clang on the PATH (apt install build-essential)")


def test_triton_calls_the_compiler_that_cc_names(monkeypatch, tmp_path):
    with_triton(monkeypatch, tmp_path, gcc="/usr/bin/gcc")
    monkeypatch.setenv("CC", "icx")
    assert "there is no CC=icx" in read_software().missing["triton"]


def test_without_pythons_headers_triton_is_not_usable_on_a_gpu(monkeypatch, tmp_path):
    with_triton(monkeypatch, tmp_path, headers=False, gcc="/usr/bin/gcc")
    assert read_software().missing["triton"] == (
        f"Triton needs Python.h, which is not in {tmp_path} (apt install python3-dev)")


def test_headers_are_looked_for_where_triton_looks():
    """Its own rule, read from its source: on Debian the scheme of local packages names another folder."""
    pytest.importorskip("triton")
    from triton.runtime import build

    source = inspect.getsource(build)
    assert "scheme == 'posix_local'" in source
    assert "scheme = 'posix_prefix'" in source
    assert 'os.environ.get("CC")' in source
    assert "gcc if gcc is not None else clang" in source


def test_the_compiler_is_found_on_the_path_only(monkeypatch):
    monkeypatch.setenv("CXX", "/opt/other/c++")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang++" if name == "clang++" else None)
    assert read_software().versions["c++ compiler"] == "/usr/bin/clang++"
