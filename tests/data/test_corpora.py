import hashlib
import sysconfig
import urllib.error
from pathlib import Path

import pytest

from powertrain.data import documents as corpora
from powertrain.data.documents import SHAKESPEARE, Download, downloaded, read_documents, standard_library
from powertrain.records import WrongUse

REAL_SHAKESPEARE = Path("/work/shared/data/tinyshakespeare.txt")
CONTENT = b"First Citizen:\nSpeak.\n"


@pytest.fixture
def served(tmp_path):
    """A download whose address is a file here."""
    (tmp_path / "served.txt").write_bytes(CONTENT)
    return Download((tmp_path / "served.txt").as_uri(), hashlib.sha256(CONTENT).hexdigest(), "kept.txt")


def test_the_standard_library_is_read_without_a_download(tmp_path):
    documents = read_documents("stdlib", cache=tmp_path, max_chars=300_000)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    assert sum(len(document.text) for document in documents) == 300_000
    assert len(documents) > 3
    paths = [Path(document.origin).relative_to(stdlib) for document in documents]
    assert paths == sorted(paths, key=Path.as_posix)
    assert list(tmp_path.iterdir()) == []


def test_the_standard_library_leaves_out_tests_packages_and_what_is_not_utf8(tmp_path):
    for name in ("b.py", "a/c.py", "test/t.py", "a/tests/t.py", "site-packages/p.py", "idlelib/i.py", "empty.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.py" else name)
    (tmp_path / "latin.py").write_bytes(b"\xe9")
    (tmp_path / "data.txt").write_text("no")
    assert [document.text for document in standard_library(tmp_path)] == ["a/c.py", "b.py"]


def test_a_library_without_sources_is_refused(tmp_path):
    with pytest.raises(WrongUse, match=f"no .py file in {tmp_path}"):
        list(standard_library(tmp_path))


def test_a_download_is_kept_and_not_fetched_again(tmp_path, served):
    assert downloaded(served, tmp_path / "cache") == CONTENT
    (tmp_path / "served.txt").unlink()
    assert downloaded(served, tmp_path / "cache") == CONTENT
    assert [path.name for path in (tmp_path / "cache" / "corpora").iterdir()] == ["kept.txt"]


def test_a_damaged_copy_is_fetched_again(tmp_path, served):
    downloaded(served, tmp_path)
    (tmp_path / "corpora" / "kept.txt").write_bytes(b"cut")
    assert downloaded(served, tmp_path) == CONTENT
    assert (tmp_path / "corpora" / "kept.txt").read_bytes() == CONTENT


def test_a_download_with_another_checksum_is_refused_and_not_kept(tmp_path, served):
    (tmp_path / "served.txt").write_bytes(b"something else")
    with pytest.raises(WrongUse, match=f"sent 14 bytes with sha256 .*, not {served.sha256}"):
        downloaded(served, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_offline_names_the_address_and_the_cure(tmp_path, monkeypatch):
    def offline(address, timeout):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(corpora.urllib.request, "urlopen", offline)
    with pytest.raises(WrongUse) as caught:
        read_documents("shakespeare", cache=tmp_path)
    assert SHAKESPEARE.address in str(caught.value)
    assert "Name or service not known; download it yourself and pass data.source=PATH" in str(caught.value)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, served):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(WrongUse, match=f"the cache folder {tmp_path / 'cache' / 'corpora'} cannot be written"):
        downloaded(served, tmp_path / "cache")


@pytest.mark.skipif(not REAL_SHAKESPEARE.exists(), reason="the real text is not on this machine")
def test_shakespeare_is_recognised_by_its_checksum(tmp_path):
    kept = tmp_path / "corpora" / SHAKESPEARE.file
    kept.parent.mkdir()
    kept.write_bytes(REAL_SHAKESPEARE.read_bytes())
    (document,) = read_documents("shakespeare", cache=tmp_path)
    assert len(document.text) == 1_115_394
