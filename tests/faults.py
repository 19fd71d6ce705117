"""What the test_faults_*.py files share: disks that misbehave on one rank, small and read-only file
systems, and the counts of a quick run and of `make soak`.

The faults are real ones where a test can make them (a full tmpfs, a cut file, a killed process) and
else wrapped calls: `broken(os, "pwritev", ...)` lets the kernel's answer be another one.
"""

import contextlib
import ctypes
import errno
import gc
import os
import subprocess
import sys
import threading
import time

import torch

from models import AdamW, Odd, build, rows

SOAK = bool(os.environ.get("SOAK"))
LIMIT = 10  # seconds that a rank of these tests waits for another at most
BUCKET = 64  # elements: a handful of buckets, and as many units in stage 3

# (stage, where the weights' slices are), each with its optimizer state on NVMe.
ON_DISK = [(1, "none"), (2, "none"), (3, "none"), (3, "nvme")]
# (stage, where the optimizer's state is, where the weights' slices are).
EVERYWHERE = [(s, home, "none") for s in (1, 2, 3) for home in ("none", "cpu", "nvme")]
EVERYWHERE += [(3, "cpu", "cpu"), (3, "nvme", "nvme")]


def times(quick, soak):
    """How often: in the suite, and in `make soak`."""
    return soak if SOAK else quick


def say(text):
    """A line of `make soak`'s report, from a rank or from pytest's own process."""
    if SOAK:
        with open(os.environ["SOAK"], "a") as report:
            print(text, file=report)


def make(stage, folder, home="nvme", weights="none", settings=(), model=None, **options):
    """(optimizer, model) with several groups of state in several buckets."""
    if model is None:
        torch.manual_seed(0)
        model = Odd()
    settings = {"sub_group_size": 16, **dict(settings)} if home == "nvme" else dict(settings)
    options = {"lr": 0.01, "reduce_bucket_size": BUCKET, **options}
    return build(stage, model, folder, AdamW, home, weights, settings, **options), model


def backward(zero, model, rank, index=0):
    zero.backward(model(rows(rank, index)).square().mean())


def train(zero, model, rank, steps=1, first=0):
    """`steps` windows of one backward; raises if one is skipped."""
    for index in range(first, first + steps):
        backward(zero, model, rank, index)
        zero.step()
        assert zero.was_step_applied()


def trained(stage, folder, rank, steps, **where):
    """The whole model after so many steps and `close()`."""
    zero, model = make(stage, folder, **where)
    train(zero, model, rank, steps)
    zero.close()
    return values(model)


def values(model):
    """{name: a copy of the parameter} of a model that is whole."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def raised_by(call, within=LIMIT):
    """What `call` raises, which it has to within so many seconds, Ctrl-C too."""
    start = time.monotonic()
    try:
        call()
    except BaseException as error:
        seconds = time.monotonic() - start
        assert seconds <= within, f"raised only after {seconds:.1f} s"
        return error
    raise AssertionError("nothing was raised")


def threads_of_ours():
    """Names of the threads that nvme.py has started and that still live."""
    return [thread.name for thread in threading.enumerate() if thread.name == "nvme"]


def settled():
    """Whether this process has no thread and no file of ours, after a moment if need be."""
    gc.collect()
    deadline = time.monotonic() + 2
    while (left := threads_of_ours() + open_files()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def open_files():
    """Paths of open files and folders that are nvme.py's, also of those that are deleted."""
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in paths if "zero-nvme-" in path]


# --- calls that fail ---


@contextlib.contextmanager
def broken(module, name, outcome):
    """Replaces module.name(*args) by outcome(real, *args) for a while."""
    real = getattr(module, name)
    setattr(module, name, lambda *args, **more: outcome(real, *args, **more))
    try:
        yield
    finally:
        setattr(module, name, real)


def fails(number, after=0):
    """An outcome: an error from the (after + 1)-th call on."""
    calls = []

    def outcome(real, *args, **more):
        calls.append(args)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        return real(*args, **more)

    return outcome


def short(real, fd, buffers, offset):
    """An outcome: at most 1000 bytes are moved."""
    return real(fd, [buffers[0][:1000]], offset)


def interrupted():
    """An outcome: every other call ends with EINTR, moving nothing."""
    calls = []

    def outcome(real, *args):
        calls.append(args)
        if len(calls) % 2:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return real(*args)

    return outcome


def slow(seconds):
    """An outcome: the call takes so much longer."""

    def outcome(real, *args):
        time.sleep(seconds)
        return real(*args)

    return outcome


def own_file(zero, name="optimizer.bin"):
    """The path of this rank's file."""
    disk = zero.tier.disk if name == "optimizer.bin" else zero.weights.disk
    return os.path.join(disk.path, name)


def flip_byte(path, place):
    """One bit of one byte, written as another program would, past the page cache or not."""
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 16]))
        file.flush()
        os.fsync(file.fileno())


# --- file systems of one process ---


def mount(path, options):
    """Mounts a tmpfs at `path` for this process alone, and gone with it; whether that worked, which
    takes root's rights on Linux."""
    clone_newns = 0x20000  # <sched.h>
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(clone_newns):
        return False
    alone = ["mount", "--make-rprivate", "/"]
    tmpfs = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
    return all(not subprocess.run(run, capture_output=True).returncode for run in (alone, tmpfs))


def can_mount():
    """Whether `mount` works here, tried in a child."""
    if sys.platform != "linux":
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(not mount("/mnt", "size=64k"))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
