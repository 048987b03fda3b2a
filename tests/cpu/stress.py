"""The long version of the tests of compiler, cache and team, run by hand: python tests/cpu/stress.py [seconds]."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import test_threads
from test_threads import KERNELS, NAMES, check_mark, go

from convgrad.cpu.compile import jit
from convgrad.cpu.threads import team as teams
from convgrad.cpu.threads import team_ir

NUMBER = "define i64 @value() nounwind {\n  ret i64 %d\n}\n"


def check_rounds(buffer, most):
    """One run of `rounds`, by at most so many threads."""
    n = sum(1 for value in buffer[1000::8] if value)
    assert 1 <= n <= most
    assert list(buffer[1000 : 1000 + 8 * n : 8]) == [n * 300 * 301 // 2] * n


def check_number(number):
    """Compile and run a function of its own."""
    module = jit.load(NUMBER % number, *jit.host())
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(module.address("value"))() == number


def call_often(kernels, team, until, seed, done):
    """Random calls, each checked, until the time is up."""
    dice = random.Random(seed)
    while time.monotonic() < until:
        count = dice.choice((1, 2, 2, 2, 3, 4, 8, 20))
        kind = dice.random()
        if kind < 0.05:
            check_number(dice.randrange(1 << 40))
        elif kind < 0.6:
            check_mark(go(team, kernels["mark"], count), count)
        else:
            check_rounds(go(team, kernels["rounds"], count), count)
        if kind > 0.98:
            time.sleep(dice.random() * 0.003)
        done[0] += 1


def crowd(seconds, futex):
    """Eight Python threads for a while, and forks all the time; every child works with two threads too."""
    module = jit.load(KERNELS, *jit.host())
    kernels = {name: module.address(name) for name in NAMES}
    if futex:
        team = teams.entry()
    else:
        team, teams._reset = teams.build(team_ir.source(jit.host()[0], futex=False))
    until = time.monotonic() + seconds
    done, wrong = [0], []

    def work(seed, until, done):
        try:
            call_often(kernels, team, until, seed, done)
        except BaseException:
            wrong.append(traceback.format_exc())

    crowd = [threading.Thread(target=work, args=(seed, until, done)) for seed in range(8)]
    for thread in crowd:
        thread.start()
    forks = 0
    while time.monotonic() < until:
        time.sleep(0.05)
        child = os.fork()
        if child == 0:
            # A child that hangs is ended by the alarm, and found out by its status.
            signal.alarm(30)
            soon = time.monotonic() + 0.05
            pair = [threading.Thread(target=work, args=(seed, soon, [0])) for seed in (-1, -2)]
            for thread in pair:
                thread.start()
            for thread in pair:
                thread.join()
            os._exit(1 if wrong else 0)
        status = os.waitpid(child, 0)[1]
        if status:
            wrong.append(f"a child ended with {status}")
        forks += 1
    for thread in crowd:
        thread.join()
    assert not wrong, wrong[0]
    print(
        f"crowd, {'futex' if futex else 'condition'}: {done[0]} calls on 8 threads, {forks} forks, all right",
        flush=True,
    )


def leave(times):
    """Processes that end while the team works."""
    for turn in range(times):
        busy = turn % 2 == 0
        code, out, error, seconds = test_threads.script(
            "mark(4)\n" + ("gate, thread = stay(3)\n" if busy else "mark(8)\n") + "print('end', flush=True)"
        )
        assert (code, out) == (0, "end\n"), (code, error)
        assert seconds < 20
    print(f"exit: {times} processes ended, half of them while busy", flush=True)


LOAD = """
import ctypes, os, sys, time
from convgrad import store
from convgrad.cpu.compile import jit
if "no space" in sys.argv:
    import errno
    class Full:
        def __init__(self, fd, *args, **kwargs): os.close(fd)
        def __enter__(self): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        def __exit__(self, *error): pass
    reading = open
    store.open = lambda fd, mode, **kwargs: Full(fd) if "w" in mode else reading(fd, mode, **kwargs)
count = 0
real = jit._compile
def compiled(*args):
    global count
    count += 1
    return real(*args)
jit._compile = compiled
time.sleep(max(0, float(sys.argv[1]) - time.time()))
for number in range(40):
    module = jit.load("define i64 @value() nounwind {\\n  ret i64 %d\\n}\\n" % number, *jit.host())
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(module.address("value"))() == number
print(count)
"""


def load(folder, processes=1, *words):
    """Load 40 modules in each of some processes that start together; how many each of them compiled."""
    begin = time.time() + (0.7 if processes > 1 else 0)
    command = [sys.executable, "-W", "error", "-c", LOAD, str(begin), *words]
    environment = {**os.environ, "CONVGRAD_CACHE_DIR": str(folder)}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    ends = [process.communicate(timeout=120) for process in running]
    assert all(process.returncode == 0 for process in running), ends
    assert all(error == "" for _, error in ends), ends
    return [int(out) for out, _ in ends]


def share(times):
    """Several processes on one cold cache."""
    for turn in range(times):
        with tempfile.TemporaryDirectory() as folder:
            counts = load(Path(folder) / "cache", 2 + turn % 3)
            assert all(0 <= count <= 40 for count in counts)
            assert load(Path(folder) / "cache") == [0]
            # One file for each module, and one that tells of the machine where that can be known again.
            assert sum(name.endswith(".o") for name in os.listdir(Path(folder) / "cache")) in (40, 41)
    print(f"cache: {times} times 2 to 4 processes on a cold cache", flush=True)


def spoil(folder, how):
    """Make every file of the folder unfit."""
    for file in folder.glob("*.o"):
        data = file.read_bytes()
        how(file, bytearray(data))


def flip(file, data):
    """One bit."""
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    file.write_bytes(data)


def mounted(folder, size):
    """A tiny file system of its own, or False where that is not possible."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    options = f"size={size},mode=700"
    return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=False).returncode == 0


def folders():
    """Folders that are no good: right results everywhere, and no code from a bad file."""
    ways = {
        "one bit changed": flip,
        "garbage": lambda file, data: file.write_bytes(os.urandom(len(data))),
        "cut": lambda file, data: file.write_bytes(data[: random.randrange(len(data))]),
        "empty": lambda file, data: file.write_bytes(b""),
        "open to all": lambda file, data: file.chmod(0o666),
    }
    if os.geteuid() == 0:
        ways["another user's files"] = lambda file, data: os.chown(file, 12345, 12345)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "cache"
        assert load(folder) == [40]
        assert load(folder) == [0]
        for name, way in ways.items():
            spoil(folder, way)
            assert load(folder) == [40], name
            assert load(folder) == [0], name
            print(f"cache: {name}: ignored and rewritten", flush=True)
        folder.chmod(0o777)
        assert load(folder) == [40]
        folder.chmod(0o700)
        if os.geteuid() == 0:
            os.chown(folder, 12345, 12345)
            assert load(folder) == [40]
            os.chown(folder, 0, 0)
            print("cache: another user's folder: left alone", flush=True)
        print("cache: a folder open to all: left alone", flush=True)
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        if mounted(folder, "64k"):
            try:
                counts = [load(folder)[0] for _ in range(3)]
                assert counts[0] == 40
                assert 0 < counts[1] < 40
                with contextlib.suppress(OSError), open(folder / "rest", "wb", buffering=0) as file:
                    while True:
                        file.write(b"x" * 512)
                assert load(folder)[0] == counts[2]
                assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
                subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
                assert load(folder)[0] == counts[2]
                print(f"cache: a full disk and then a read-only one: compiled {counts}", flush=True)
            finally:
                subprocess.run(["umount", str(folder)], check=True)
        else:
            assert load(folder, 1, "no space") == [40]
            assert os.listdir(folder) == []
            folder.chmod(0o500)
            assert load(folder) == [40]
            folder.chmod(0o700)
            print("cache: a full disk (told so) and a read-only folder: compiled", flush=True)


def main():
    """Everything, one after the other."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CONVGRAD_CACHE_DIR"] = str(Path(folder) / "cache")
        folders()
        share(10)
        leave(30)
        crowd(seconds, futex=True)
        crowd(seconds / 2, futex=False)


if __name__ == "__main__":
    main()
