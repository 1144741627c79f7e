"""Machine code is loaded only from folders that this user alone may write, and no link in a folder leads a write elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from powertrain.machine import NotOwn, check_own, one_at_a_time, own_folder
from powertrain.models.kernels import build
from powertrain.models.kernels.compiler_caches import own_compiler_caches
from powertrain.models.kernels.fused.compiled import CompiledPart, load
from powertrain.records import WrongUse
from powertrain.run.checkpoints import prune
from powertrain.run.folder import RunFolder, check_whole, is_being_written, locked

SOMEBODY = 54321             # a user who is not there


def another_user(patch: pytest.MonkeyPatch) -> None:
    """Make this process another user's, to whom all files here are foreign."""
    mine = os.geteuid()
    patch.setattr(os, "geteuid", lambda: mine + SOMEBODY)


def library_in(folder: Path) -> Path:
    """What a stranger would leave: a library with a matching sum beside it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / "enter-0123.so"
    path.write_bytes(b"\x7fELF and code")
    told = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "gives": 0}
    path.with_suffix(".json").write_text(json.dumps(told))
    return path


def test_a_folder_for_code_is_made_for_its_user_alone(tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "cache" / "code")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)                      # as earlier versions made it
    assert own_folder(folder).stat().st_mode & 0o777 == 0o700


def test_a_library_of_another_user_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library_in(tmp_path / "code")
    loaded: list[str] = []
    monkeypatch.setattr("torch._C._aoti.AOTIModelContainerRunnerCpu", lambda name, _: loaded.append(name))
    assert load(path) is not None            # one's own is
    another_user(monkeypatch)
    with pytest.raises(WrongUse, match=r"belongs to user .*POWERTRAIN_CACHE"):
        load(path)
    assert loaded == [str(path)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away; the test above needs no such right")
@pytest.mark.parametrize("given_away", ["code", "code/enter-0123.so", "code/enter-0123.json", ""])
def test_whatever_belongs_to_another_user_is_refused(tmp_path: Path, given_away: str) -> None:
    path = library_in(tmp_path / "code")
    os.chown(tmp_path / given_away, SOMEBODY, SOMEBODY)
    with pytest.raises(WrongUse, match=f"belongs to user {SOMEBODY}"):
        load(path)


def test_a_cache_that_everybody_may_write_holds_no_code(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(NotOwn, match="every user may write"):
        own_folder(cache / "code")
    cache.chmod(0o1777)                      # as /tmp: there nobody renames what is another's
    own_folder(cache / "code")


def test_a_folder_further_up_that_everybody_may_write_holds_no_code(tmp_path: Path) -> None:
    """There another user can put another cache in the place of this one, between the look and the loading."""
    shared = tmp_path / "shared"
    (shared / "cache").mkdir(parents=True)
    shared.chmod(0o777)
    with pytest.raises(NotOwn, match=f"every user may write in {shared}"):
        own_folder(shared / "cache" / "code")


@pytest.mark.parametrize("variable", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_the_compilers_caches_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    own_compiler_caches()
    assert (tmp_path / variable).stat().st_mode & 0o777 == 0o700
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / variable).rmdir()
    (tmp_path / variable).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WrongUse, match=f"{variable} is a link.*techniques.torch_compile=off"):
        own_compiler_caches()


def test_nothing_is_compiled_where_the_compilers_cache_is_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is a name in /tmp that anybody can guess and make first."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    another_user(monkeypatch)
    part = CompiledPart(torch.sin)
    with pytest.raises(WrongUse, match="belongs to user"):
        part(torch.ones(4))
    assert not part.is_compiled


def test_a_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    """In a shared folder somebody else may have made the lock, leading to a file of this user."""
    (tmp_path / "thesis").write_text("years of work")
    (tmp_path / ".lock").symlink_to(tmp_path / "thesis")
    with one_at_a_time(tmp_path):
        pass
    with pytest.raises(OSError, match="symbolic links"), locked(RunFolder(tmp_path)):
        pass
    assert is_being_written(RunFolder(tmp_path)) is None
    assert (tmp_path / "thesis").read_text() == "years of work"


def test_a_pipe_for_a_lock_does_not_stop_the_list_of_runs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    assert is_being_written(RunFolder(tmp_path)) is not True


@pytest.mark.parametrize("name", ["checkpoints", "events.jsonl", "model"])
def test_a_run_with_a_link_is_neither_continued_nor_pruned(tmp_path: Path, name: str) -> None:
    """Its checkpoints may lead to those of another run, and saving deletes older ones."""
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(tmp_path)
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    for use in (lambda: check_whole(RunFolder(run)), lambda: prune(str(run), 1)):
        with pytest.raises(WrongUse, match=f"has links for {name}"):
            use()
    assert (tmp_path / "checkpoints" / "step-000001").is_dir()


def test_a_link_or_a_file_that_everybody_may_write_is_no_code(tmp_path: Path) -> None:
    path = library_in(tmp_path / "code")
    link = path.with_name("link.so")
    link.symlink_to(path)
    with pytest.raises(NotOwn, match="is a link"):
        check_own(link)
    path.chmod(0o666)
    with pytest.raises(NotOwn, match="every user may write it"):
        check_own(path)


def test_a_kernel_that_somebody_else_compiled_is_a_reason_not_to_use_it(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tmp_path / "kernels" / "kernel.so"
    kernel.parent.mkdir()
    kernel.write_bytes(b"code")
    monkeypatch.setattr(build, "_library", lambda source: kernel)
    another_user(monkeypatch)
    with pytest.raises(build.CannotBuild, match="belongs to user"):
        build.load.__wrapped__(build.RAGGED)


def test_a_kernel_that_was_changed_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tmp_path / "kernels" / "kernel.so"
    compiled: list[Path] = []
    monkeypatch.setattr(build, "_library", lambda source: kernel)
    monkeypatch.setattr(build.subprocess, "run", lambda words, **_: compiled.append(Path(words[words.index("-o") + 1])) or (
        compiled[-1].write_bytes(b"code"), subprocess.CompletedProcess(words, 0))[1])
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: Path(path).read_bytes())
    assert (build.load.__wrapped__(build.RAGGED), build.load.__wrapped__(build.RAGGED), len(compiled)) == (b"code", b"code", 1)
    for damage in (lambda: kernel.write_bytes(b"cOde"), lambda: kernel.with_suffix(".sha256").unlink(),
                   lambda: kernel.with_suffix(".sha256").write_bytes(b"")):
        damage()
        before = len(compiled)
        assert (build.load.__wrapped__(build.RAGGED), len(compiled)) == (b"code", before + 1)
