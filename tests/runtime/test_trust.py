"""Nothing is loaded from where others could have put it."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest

from cute_kernels.runtime import KernelCache, aot, store
from cute_kernels.runtime.aot import BundleError, open_bundle
from cute_kernels.runtime.trust import distrust
from tests.runtime.conftest import ARCH
from tests.runtime.tiny import tiny_specs

SPEC = tiny_specs(1)[0]
PYTESTS = Path(tempfile.gettempdir())
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def test_what_is_the_users_alone_is_trusted(tmp_path: Path):
    """Below /tmp too, where everybody may write and the sticky bit keeps others' hands off."""
    file = tmp_path / "kernel.so"
    file.write_bytes(b"")
    for mode in (0o700, 0o755, 0o750):
        tmp_path.chmod(mode)
        file.chmod(mode)
        assert distrust(tmp_path) is None and distrust(file) is None
    tmp_path.chmod(0o1777)
    file.chmod(0o644)
    assert distrust(file) is None and "everybody (mode 1777)" in str(distrust(tmp_path))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_everybody_can_write_is_not(tmp_path: Path, depth: int):
    """The file, its directory, or one above that."""
    (tmp_path / "a").mkdir(mode=0o755)
    file = tmp_path / "a" / "kernel.so"
    file.write_bytes(b"")
    place = (file, *file.parents)[depth]
    place.chmod(0o777)
    assert distrust(file) == f"{place.resolve()} can be written by everybody (mode 0777)"


def test_a_link_is_judged_by_where_it_leads(tmp_path: Path):
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    assert "everybody" in str(distrust(tmp_path / "link"))


@as_root
def test_groups_and_users_that_are_others_are_not(tmp_path: Path):
    tmp_path.chmod(0o775)
    assert distrust(tmp_path) is None  # the user's own group
    os.chown(tmp_path, 0, 12345)
    assert "group 12345 (mode 0775)" in str(distrust(tmp_path))
    tmp_path.chmod(0o755)
    assert distrust(tmp_path) is None
    os.chown(tmp_path, 12345, 0)
    assert "belongs to user 12345" in str(distrust(tmp_path))


def test_a_cache_that_others_can_write_is_not_used(warm_directory: Path, tmp_path: Path):
    shutil.copytree(warm_directory, tmp_path / "cache")
    assert KernelCache(tmp_path / "cache").load_from(SPEC, ARCH)[1] == "disk"
    (tmp_path / "cache").chmod(0o777)
    before = sorted((tmp_path / "cache").rglob("*"))
    cache = KernelCache(tmp_path / "cache")
    with pytest.warns(RuntimeWarning, match=r"cache .* is not used, as others could put code there: .*mode 0777"):
        assert cache.load_from(SPEC, ARCH)[1] == "compiled"
    assert cache.load_from(SPEC, ARCH)[1] == "memory"
    assert sorted((tmp_path / "cache").rglob("*")) == before


def test_an_entry_that_others_can_write_is_made_anew(warm_directory: Path, tmp_path: Path):
    shutil.copytree(warm_directory, tmp_path / "cache")
    folder = store.DiskStore(tmp_path / "cache").folder(store.key_of(SPEC, ARCH))
    (folder / "kernel.o").chmod(0o666)
    with pytest.warns(RuntimeWarning, match="damaged kernel cache entry .* can be written by everybody"):
        assert KernelCache(tmp_path / "cache").load_from(SPEC, ARCH)[1] == "compiled"


def test_what_a_cache_makes_is_its_users_alone_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        KernelCache(tmp_path / "cache").load(SPEC, ARCH)
    finally:
        os.umask(before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KernelCache(tmp_path / "cache").load_from(SPEC, ARCH)[1] == "disk"


def test_a_bundle_that_others_can_write_is_refused(tmp_path: Path):
    manifest = {"format": aot.FORMAT, "library": {"name": "bundle.so", "sha256": ""}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "bundle.so").write_bytes(b"")
    (tmp_path / "bundle.so").chmod(0o666)
    with pytest.raises(BundleError, match=r"is not loaded, as others could put code there: .*bundle.so can be written"):
        open_bundle(tmp_path)


def found_by(user: int) -> str:
    """Which cache directory a process of a user has, and why it is not used."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            place = store.default_directory()
            os.write(write, f"{place} {store.DiskStore(place).refusal}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read) as file:
        return file.read()


def scratch_is(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the temporary directory be ``place`` until the test ends."""
    monkeypatch.setattr(store.tempfile, "tempdir", str(place))


@as_root
@pytest.mark.parametrize("home", ["none", "read-only", "another's", "of a cache"])
def test_a_user_whom_nobody_knows_has_a_cache(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A container's: a number without an entry in the list of users, with a home that it cannot write."""
    user = 54321
    with pytest.raises(KeyError):
        pwd.getpwuid(user)
    place = tmp_path / "home"
    place.mkdir(mode=0o700 if home == "another's" else 0o755)
    (place / (".cache/cute_kernels" if home == "of a cache" else ".")).mkdir(parents=True, exist_ok=True)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch").chmod(0o1777)
    for above in (tmp_path, *tmp_path.parents):  # pytest's: two, and one more of a process of several
        if above.is_relative_to(PYTESTS) and above != PYTESTS:
            above.chmod(above.stat().st_mode | 0o111)
    scratch_is(tmp_path / "scratch", monkeypatch)
    monkeypatch.delenv(store.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.delenv("HOME") if home == "none" else monkeypatch.setenv("HOME", str(place))
    want = place / ".cache/cute_kernels" if home == "of a cache" else tmp_path / "scratch" / f"cute_kernels-{user}"
    assert found_by(user) == f"{want} None"


def test_what_another_user_put_at_a_caches_place_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(store.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store.default_directory() == tmp_path / "home" / ".cache" / "cute_kernels"
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    scratch_is(tmp_path, monkeypatch)
    place = store.default_directory()
    assert place == tmp_path / f"cute_kernels-{os.geteuid()}"
    place.mkdir()
    place.chmod(0o777)
    assert "everybody" in str(store.DiskStore(place).refusal)
