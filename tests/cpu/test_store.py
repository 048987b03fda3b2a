"""The store of code on disk: what it trusts, what it refuses, and that a call never fails because of it."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from convgrad import memory, store

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")


@pytest.fixture
def place(tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "cache"
    monkeypatch.setenv("CONVGRAD_CACHE_DIR", str(folder))
    for name in ("CONVGRAD_CACHE", "CONVGRAD_CACHE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(store, "_said", set())
    monkeypatch.setattr(memory, "_said", set())
    return folder


def key(number):
    return hashlib.sha256(b"%d" % number).digest()


def path(folder, number):
    return folder / f"{key(number).hex()}.o"


def names(folder):
    """What is in the folder, but for the tally of what was stored."""
    return sorted(name for name in os.listdir(folder) if not name.startswith("tally-"))


def test_tests_have_a_folder_of_their_own():
    assert store.folder() is not None
    assert store.folder().name.startswith("convgrad-tests-")


def test_content_comes_back(place):
    assert store.get(key(1)) is None
    store.put(key(1), b"one" * 1000)
    store.put(key(2), b"")
    assert (store.get(key(1)), store.get(key(2)), store.get(key(3))) == (b"one" * 1000, b"", None)
    store.put(key(1), b"uno")
    assert store.get(key(1)) == b"uno"
    assert names(place) == sorted(path(place, number).name for number in (1, 2))


@posix
def test_folder_and_files_are_private(place):
    old = os.umask(0)
    try:
        store.put(key(1), b"one")
    finally:
        os.umask(old)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(path(place, 1).stat().st_mode) == 0o600


@pytest.mark.parametrize("word", ["off", "OFF", "0", "no"])
def test_it_can_be_turned_off(place, monkeypatch, word):
    store.put(key(1), b"one")
    monkeypatch.setenv("CONVGRAD_CACHE", word)
    store.put(key(2), b"two")
    assert store.get(key(1)) is None
    assert len(names(place)) == 1


def damage(name):
    """Ways to spoil a file."""
    ways = {
        "empty": lambda data: b"",
        "short": lambda data: data[:20],
        "header only": lambda data: data[: store.HEADER],
        "cut": lambda data: data[:-1],
        "longer": lambda data: data + b"\0",
        "garbage": lambda data: os.urandom(len(data)),
        "first byte": lambda data: bytes([data[0] ^ 1]) + data[1:],
        "key": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
        "checksum": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
        "last byte": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        "bare content": lambda data: data[store.HEADER :],
    }
    return ways[name] if name else list(ways)


@pytest.mark.parametrize("way", damage(""))
def test_damaged_files_are_ignored_and_rewritten(place, way):
    content = os.urandom(500)
    store.put(key(1), content)
    path(place, 1).write_bytes(damage(way)(path(place, 1).read_bytes()))
    assert store.get(key(1)) is None
    store.put(key(1), content)
    assert store.get(key(1)) == content


def test_a_valid_file_under_another_name_is_ignored(place):
    store.put(key(1), b"one")
    os.replace(path(place, 1), path(place, 2))
    assert store.get(key(2)) is None


@posix
@pytest.mark.parametrize("kind", ["link", "loop", "fifo", "folder", "group", "world", "foreign"])
def test_files_that_may_not_be_ours_are_ignored(place, kind, monkeypatch, tmp_path):
    store.put(key(1), b"one")
    file = path(place, 1)
    if kind in ("link", "loop", "fifo", "folder"):
        os.replace(file, tmp_path / "elsewhere")
        {
            "link": lambda: file.symlink_to(tmp_path / "elsewhere"),
            "loop": lambda: file.symlink_to(file),
            "fifo": lambda: os.mkfifo(file, 0o600),
            "folder": file.mkdir,
        }[kind]()
    elif kind in ("group", "world"):
        file.chmod(0o620 if kind == "group" else 0o602)
    elif os.geteuid() == 0:
        os.chown(file, 12345, -1)
    else:
        really = os.fstat
        monkeypatch.setattr(os, "fstat", lambda fd: stranger(really(fd)))
    assert store.get(key(1)) is None
    monkeypatch.undo()
    monkeypatch.setenv("CONVGRAD_CACHE_DIR", str(place))
    # Only a folder in the way cannot be replaced; there is then no cache for this key, and no trouble.
    with pytest.warns(UserWarning, match="Is a directory") if kind == "folder" else nullcontext():
        store.put(key(1), b"one")
    assert store.get(key(1)) == (None if kind == "folder" else b"one")
    assert [name for name in os.listdir(place) if name.endswith(".tmp")] == []


def stranger(facts):
    """The facts of a regular file, with another owner."""
    if not stat.S_ISREG(facts.st_mode):
        return facts
    values = list(facts)
    values[4] = 12345
    return os.stat_result(values)


REASONS = {
    "group": "others may write it",
    "world": "others may write it",
    "foreign": "it belongs to another user",
    "link": "it is a symbolic link, which could be turned elsewhere; name the folder that it leads to",
    "file": "it is not a folder",
}


@posix
@pytest.mark.parametrize("kind", REASONS)
def test_folders_that_may_not_be_ours_are_left_alone_and_warned_of_once(place, kind, monkeypatch, tmp_path):
    store.put(key(1), b"one")
    if kind in ("group", "world"):
        place.chmod(0o770 if kind == "group" else 0o707)
    elif kind == "foreign":
        if os.geteuid() == 0:
            os.chown(place, 12345, -1)
        else:
            owner = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    else:
        os.replace(place, tmp_path / "elsewhere")
        if kind == "link":
            place.symlink_to(tmp_path / "elsewhere")
        else:
            place.write_text("a file")
    before = sorted(os.listdir(place)) if kind != "file" else None
    assert store.get(key(1)) is None
    with pytest.warns(UserWarning, match="CONVGRAD_CACHE_DIR") as caught:
        _ = [store.put(key(number), b"two") for number in (2, 3)]
    told = f"CONVGRAD_CACHE_DIR={place} cannot be used: {REASONS[kind]}. Code is generated anew in every process"
    assert [str(warning.message).split(";")[0] for warning in caught] == [told.split(";")[0]]
    assert "CONVGRAD_CACHE=off" in str(caught[0].message)
    assert caught[0].filename == __file__, "it is told at the line that called convgrad"
    assert (sorted(os.listdir(place)) if kind != "file" else None) == before


@posix
def test_a_folder_that_cannot_be_written_means_no_cache(place, monkeypatch):
    store.put(key(1), b"one")
    if os.geteuid() == 0:
        # Root may write anywhere, so the system's answer is put in its mouth.
        really = os.open

        def refuse(name, flags, *args, **kwargs):
            if flags & os.O_CREAT:
                raise PermissionError(13, "Permission denied")
            return really(name, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
    else:
        place.chmod(0o500)
    with pytest.warns(UserWarning, match=rf"CONVGRAD_CACHE_DIR={place} cannot be used: Permission denied\. "):
        store.put(key(2), b"two")
    assert (store.get(key(1)), store.get(key(2))) == (b"one", None)
    place.chmod(0o700)


@posix
def test_a_full_disk_leaves_nothing_behind(place):
    # A limit on the size of files stands for the disk: a write stops in the middle, as on a full one.
    text = f"""
import resource
from convgrad import store
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
store.put({key(1)!r}, b"small")
store.put({key(2)!r}, b"large" * 1000)
assert store.get({key(1)!r}) == b"small" and store.get({key(2)!r}) is None
print("good")
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.stdout == "good\n", done.stderr
    assert names(place) == [path(place, 1).name]


@pytest.mark.parametrize(
    "setting", ["/proc/no/such/place", "/dev/null", "/dev/null/x", "nul\0byte", "x" * 5000, "\ud800", ""]
)
def test_strange_folders_raise_nothing(monkeypatch, setting, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    values = {**os.environ, "CONVGRAD_CACHE_DIR": setting}
    monkeypatch.setattr(os, "environ", values)
    monkeypatch.setattr(memory, "_said", set())
    with pytest.warns(UserWarning, match="CONVGRAD_CACHE_DIR=.* cannot be used: ") if setting else nullcontext():
        store.put(key(1), b"one")
    assert store.get(key(1)) == (b"one" if setting == "" else None)


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.delenv("CONVGRAD_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.folder() == tmp_path / "xdg" / "convgrad"
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert store.folder() == tmp_path / ".cache" / "convgrad"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert store.folder() == tmp_path / "Library/Caches/convgrad"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert store.folder() == tmp_path / "local" / "convgrad"
    monkeypatch.delenv("LOCALAPPDATA")
    assert store.folder() is None
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os.path, "expanduser", lambda name: name)
    assert store.folder() is None
    store.put(key(1), b"one")
    assert store.get(key(1)) is None
    monkeypatch.setenv("CONVGRAD_CACHE_DIR", "here")
    assert store.folder() == Path.cwd() / "here"


def age(file, seconds):
    then = time.time() - seconds
    os.utime(file, (then, then))


def test_what_was_not_used_for_longest_goes_first(place, monkeypatch):
    for number in range(8):
        store.put(key(number), b"x" * 4000)
        age(path(place, number), 100_000 - 1000 * number)
    age(path(place, 7), 50)
    (place / "notes.txt").write_text("not ours")
    # A hit on the oldest file makes it the youngest.
    assert store.get(key(0)) == b"x" * 4000
    assert time.time() - path(place, 0).stat().st_mtime < 100
    monkeypatch.setenv("CONVGRAD_CACHE_SIZE", "24K")
    store.put(key(9), b"y" * 4000)
    # 7/8 of 24 KiB is room for five blocks of 4 KiB.
    left = {number for number in range(10) if path(place, number).exists()}
    assert {0, 7, 9} <= left <= {0, 5, 6, 7, 9}
    assert 1 not in left
    assert (place / "notes.txt").exists()


def test_a_hit_within_the_hour_writes_nothing(place):
    store.put(key(1), b"one")
    age(path(place, 1), 1000)
    before = path(place, 1).stat().st_mtime_ns
    assert store.get(key(1)) == b"one"
    assert path(place, 1).stat().st_mtime_ns == before


def test_an_old_file_is_read_where_nothing_can_be_written(place, monkeypatch):
    def refuse(fd):
        asked.append(fd)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    asked: list[int] = []
    store.put(key(1), b"one")
    age(path(place, 1), 10_000)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "supports_fd", {refuse})
    assert store.get(key(1)) == b"one"
    assert asked


def test_the_size_is_bounded_all_the_time(place, monkeypatch):
    limit = 1 << 20
    monkeypatch.setenv("CONVGRAD_CACHE_SIZE", str(limit))
    largest = 0
    for number in range(400):
        store.put(key(number), b"x" * 6000)
        if number % 10 == 0 or number > 200:
            facts = [entry.stat() for entry in os.scandir(place)]
            largest = max(largest, sum(max(f.st_size, getattr(f, "st_blocks", 0) * 512) for f in facts))
        assert store.get(key(number)) is not None
    assert limit // 2 < largest <= limit


def test_what_does_not_fit_is_not_stored(place, monkeypatch):
    monkeypatch.setenv("CONVGRAD_CACHE_SIZE", "1000")
    store.put(key(1), b"x" * 1000)
    assert not place.exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", 256 << 20),
        ("1000", 1000),
        ("64K", 65536),
        ("2m", 2 << 20),
        ("1 GiB", 1 << 30),
        ("0", 0),
    ],
)
def test_sizes(monkeypatch, text, size):
    monkeypatch.setenv("CONVGRAD_CACHE_SIZE", text)
    assert store._limit() == size


def test_settings_that_mean_nothing_are_warned_of(place, monkeypatch):
    monkeypatch.setattr(memory, "_said", set())
    monkeypatch.setenv("CONVGRAD_CACHE_SIZE", "much")
    with pytest.warns(UserWarning, match=r"CONVGRAD_CACHE_SIZE=much must be a number of bytes.*; 256M is used"):
        assert store._limit() == 256 << 20
    monkeypatch.setenv("CONVGRAD_CACHE", "of")
    with pytest.warns(UserWarning, match="CONVGRAD_CACHE=of must be on or off; the cache stays on"):
        assert store.folder() == place


def test_abandoned_files_go(place, monkeypatch):
    store.put(key(1), b"one")
    old, new = place / f"{'a' * 16}.tmp", place / f"{'b' * 16}.tmp"
    for file in (old, new):
        file.write_bytes(b"half")
    age(old, 10_000)
    monkeypatch.setenv("CONVGRAD_CACHE_SIZE", "1M")
    store.put(key(2), b"two")
    assert not old.exists()
    assert new.exists()
    assert store.get(key(1)) == b"one"


def test_storing_seldom_lists_the_folder(place, monkeypatch):
    looked = []
    really = os.scandir
    monkeypatch.setattr(os, "scandir", lambda where: looked.append(where) or really(where))
    monkeypatch.setenv("CONVGRAD_CACHE_SIZE", "16M")
    # Once at the start, and then after every sixteenth: 256 blocks.
    for number in range(600):
        store.put(key(number), b"small")
    assert len(looked) == 3
    # A new limit is looked after at once, and so is the old one when it comes back.
    for limit in ("8M", "16M"):
        monkeypatch.setenv("CONVGRAD_CACHE_SIZE", limit)
        store.put(key(0), b"small")
    assert len(looked) == 5
    assert [name for name in os.listdir(place) if name.startswith("tally")] == [f"tally-{16 << 20}"]


def test_without_a_tally_the_size_is_bounded_too(place, monkeypatch):
    monkeypatch.setenv("CONVGRAD_CACHE_SIZE", "64K")
    (place / "tally-65536").mkdir(parents=True)
    place.chmod(0o700)
    for number in range(40):
        store.put(key(number), b"small")
        assert store.get(key(number)) == b"small"
    assert len(names(place)) <= 16


def test_a_hit_never_lists_the_folder(place, monkeypatch):
    store.put(key(1), b"one")

    def refuse(*args):
        raise AssertionError("listed")

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, refuse)
    assert store.get(key(1)) == b"one"
    assert store.get(key(2)) is None


def test_trouble_with_a_folder_that_nobody_named_is_only_logged(place, monkeypatch, caplog, tmp_path):
    monkeypatch.delenv("CONVGRAD_CACHE_DIR")
    monkeypatch.setattr(store, "folder", lambda: place)
    place.parent.mkdir()
    place.write_text("in the way")
    with caplog.at_level(logging.DEBUG, logger="convgrad"):
        for number in range(5):
            assert store.get(key(number)) is None
            store.put(key(number), b"one")
    assert len(caplog.records) == 2
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


def test_calls_compute_where_the_folder_cannot_be_used(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    text = """
import numpy, convgrad
src, weights = numpy.ones((1, 5, 3)), numpy.ones((3, 3, 2))
for dilation in (1, 2):
    dst = convgrad.convolution(src, weights, strides=1, pads_begin=2, pads_end=2, dilations=dilation)
    assert dst.max() == 9, dst
"""
    environment = {**os.environ, "CONVGRAD_CACHE_DIR": str(blocked)}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UserWarning") == done.stderr.count("it is not a folder") == 1, done.stderr


@pytest.mark.slow
def test_many_writers_and_readers(place):
    def work(seed):
        for turn in range(200):
            number = (seed + turn) % 7
            found = store.get(key(number))
            assert found in (None, b"%d" % number * 2000)
            store.put(key(number), b"%d" % number * 2000)
            assert store.get(key(number)) == b"%d" % number * 2000

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(names(place)) == 7
