"""nvme.py: every byte arrives, in order; what cannot arrive is said; nothing stays behind."""

import contextlib
import ctypes
import errno
import gc
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy
import pytest
import torch

import nvme

BLOCK = nvme.BLOCK
fork = multiprocessing.get_context("fork")


@pytest.fixture
def disk(tmp_path):
    with contextlib.closing(nvme.Disk(tmp_path, threads=3, piece=BLOCK)) as disk:
        yield disk


def refuse_direct_open(monkeypatch):
    real, direct = os.open, getattr(os, "O_DIRECT", 0)

    def fake(path, flags, *args, **kwargs):
        if direct and flags & direct:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", fake)


def refuse_direct_transfer(monkeypatch):
    for name in "preadv", "pwritev":

        def before(fd):
            if is_direct(fd):
                raise OSError(errno.EINVAL, "not this way")

        call_first(monkeypatch, name, before)


def no_preadv(monkeypatch):
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(os, "pwritev")


def call_first(monkeypatch, name, before):
    """Lets before(fd) run ahead of each call of os.`name`."""
    real = getattr(os, name)

    def fake(fd, buffers, offset):
        before(fd)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, name, fake)


def is_direct(fd):
    return bool(nvme.fcntl.fcntl(fd, nvme.fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


@pytest.fixture(
    params=[lambda _: None, refuse_direct_open, refuse_direct_transfer, no_preadv],
    ids=["direct", "refuse-open", "refuse-transfer", "no-preadv"],
)
def way(request, monkeypatch):
    """The ways by which bytes reach the file; the first is the fastest that this system has."""
    request.param(monkeypatch)


def slow(monkeypatch, name):
    """Holds each call of os.`name` until `gate` is set; `begun` counts them."""
    gate, begun, real = threading.Event(), [], getattr(os, name)

    def fake(fd, buffers, offset):
        begun.append(offset)
        assert gate.wait(10)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, name, fake)
    return gate, begun


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def aligned(values):
    tensor = nvme.empty(values.nbytes)[: values.nbytes].view(values.dtype)
    return tensor.copy_(values)


def blocks(count, value):
    return nvme.empty(count * BLOCK).fill_(value)


# --- bytes ---


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 1028])
def test_empty_starts_on_a_block_and_is_whole_blocks(nbytes):
    tensor = nvme.empty(nbytes)
    assert tensor.dtype == torch.uint8 and tensor.dim() == 1
    assert len(tensor) == -(-nbytes // BLOCK) * BLOCK
    assert tensor.data_ptr() % BLOCK == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("numel", [0, 1, 257, 1024, 5000])
def test_round_trip(disk, way, dtype, numel):
    values = torch.arange(numel).to(dtype)
    file = disk.file("w", values.nbytes)
    assert os.path.getsize(file.path) == file.nbytes == disk.nbytes == values.nbytes
    shifted = torch.cat([values[:1], values])[-numel:] if numel else values
    for source in values, aligned(values), shifted:
        back = torch.full_like(values, 7)
        file.write(torch.zeros_like(values), 0).wait()
        file.write(source, 0)
        file.read(back, 0).wait()
        assert torch.equal(back, values)
    assert Path(file.path).read_bytes() == values.view(torch.uint8).numpy().tobytes()


def test_scalars_shapes_and_parameters(disk):
    file = disk.file("w", 64)
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    file.write(weight, 0).wait()
    file.write(torch.tensor(9.0), 24).wait()
    back, scalar = torch.empty(3, 2), torch.tensor(0.0)
    file.read(back, 0).wait()
    file.read(scalar, 24).wait()
    assert torch.equal(back.flatten(), weight.detach().flatten()) and scalar == 9


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
def test_whole_blocks_pass_by_the_page_cache_and_nothing_else_does(disk, monkeypatch):
    calls = []
    call_first(monkeypatch, "pwritev", lambda fd: calls.append(is_direct(fd)))
    file = disk.file("w", 4 * BLOCK)
    if file._direct is None:
        pytest.skip("the temporary folder's file system has no O_DIRECT")
    file.write(blocks(3, 1), BLOCK).wait()
    assert calls == [True] * 3
    calls.clear()
    for tensor, offset in (blocks(1, 1), 1), (blocks(1, 1)[1:], 0), (blocks(2, 1)[1:-4095], 0):
        file.write(tensor, offset).wait()
    assert calls == [False] * 3
    calls.clear()
    with contextlib.closing(nvme.Disk(disk.path, direct=False)) as other:
        other.file("w", BLOCK).write(blocks(1, 1), 0).wait()
    assert calls == [False]


@pytest.mark.parametrize("seed", range(3))
def test_overlapping_transfers_act_as_if_one_after_another(disk, way, monkeypatch, seed):
    dice = random.Random(seed)
    for name in ("preadv", "pwritev") if hasattr(os, "preadv") else ():
        call_first(monkeypatch, name, lambda fd: time.sleep(dice.random() * 3e-4))
    size = 6 * BLOCK + 100
    file, model, reads = disk.file("w", size), numpy.zeros(size, numpy.uint8), []
    file.write(torch.zeros(size, dtype=torch.uint8), 0)
    for count in range(150):
        if dice.random() < 0.5:  # whole blocks and odd ones mixed: both descriptors of the file
            start, length = dice.randrange(5) * BLOCK, dice.randint(1, 2) * BLOCK
        else:
            start = dice.randrange(size)
            length = dice.randint(0, min(size - start, 3 * BLOCK))
        tensor = nvme.empty(length)[:length].fill_(count % 251)
        if dice.random() < 0.5:
            file.write(tensor, start)
            model[start : start + length] = count % 251
        else:
            reads.append((file.read(tensor, start), tensor, model[start : start + length].copy()))
    for transfer, tensor, expected in reads:
        transfer.wait()
        assert transfer.done() and numpy.array_equal(tensor.numpy(), expected)


def test_neighbours_on_one_page_through_both_descriptors(disk):
    # The odd write brings pages into the cache; they must not hide the direct one beside it.
    file = disk.file("w", 8 * BLOCK)
    for value in range(1, 60):
        back = blocks(8, 0)
        file.write(blocks(8, value)[:100], 3 * BLOCK + 50)
        file.write(blocks(3, value), 0)
        file.write(blocks(4, value), 4 * BLOCK)
        file.write(blocks(1, value)[1:], 3 * BLOCK + 1)
        file.read(back[1:], 1).wait()
        assert back[1 : 3 * BLOCK].eq(value).all() and back[3 * BLOCK + 1 :].eq(value).all()


# --- order ---


def test_a_read_waits_for_the_write_of_its_place_and_others_pass(disk, monkeypatch):
    file = disk.file("w", 4 * BLOCK)
    file.write(blocks(4, 1), 0).wait()
    gate, begun = slow(monkeypatch, "pwritev")
    write = file.write(blocks(1, 2), BLOCK)
    same, other = nvme.empty(2 * BLOCK), nvme.empty(BLOCK)
    behind = file.read(same, BLOCK)
    for place in (0, 2, 3):  # nobody's place, also right before and behind it: goes ahead
        until(file.read(other, place * BLOCK).done)
        assert other.eq(1).all() and begun == [BLOCK]
    assert not write.done() and not behind.done()
    gate.set()
    behind.wait()
    assert write.done() and same[:BLOCK].eq(2).all() and same[BLOCK:].eq(1).all()


def test_a_write_waits_for_the_read_and_the_write_of_its_place(disk, monkeypatch):
    file = disk.file("w", BLOCK)
    file.write(blocks(1, 1), 0).wait()
    gate, begun = slow(monkeypatch, "preadv")
    old, new = nvme.empty(BLOCK), nvme.empty(BLOCK)
    file.read(old, 0)
    writes = [file.write(blocks(1, value), 0) for value in (2, 3)]
    until(lambda: begun)
    time.sleep(0.02)
    assert not any(write.done() for write in writes)
    gate.set()
    file.read(new, 0).wait()
    assert old.eq(1).all() and new.eq(3).all()


def test_the_two_descriptors_of_a_file_are_used_in_turn(disk, monkeypatch):
    file = disk.file("w", 8 * BLOCK)
    if file._direct is None:
        pytest.skip("the temporary folder's file system has no O_DIRECT")
    gate, begun = slow(monkeypatch, "pwritev")
    direct, odd = file.write(blocks(1, 1), 0), file.write(blocks(1, 2)[1:], 2 * BLOCK)
    again = file.write(blocks(1, 3), 4 * BLOCK)  # with the first, but not with the odd one
    until(lambda: begun)
    time.sleep(0.02)
    assert begun == [0]
    gate.set()
    for transfer in direct, odd, again:
        transfer.wait()
    assert begun == [0, 2 * BLOCK, 4 * BLOCK]


def test_more_waiting_transfers_than_threads_do_not_lock_up(tmp_path):
    with contextlib.closing(nvme.Disk(tmp_path, threads=1, piece=BLOCK)) as disk:
        file = disk.file("w", 4 * BLOCK)
        last = [file.write(blocks(4, value), 0) for value in range(50)][-1]
        back = nvme.empty(4 * BLOCK)
        file.read(back, 0).wait()
        assert last.done() and back.eq(49).all()


def test_the_pool_is_bounded_and_its_threads_share_one_transfer(disk, monkeypatch):
    gate, begun = slow(monkeypatch, "pwritev")
    file = disk.file("w", 8 * BLOCK)
    transfers = [file.write(blocks(8, 1), 0), file.write(blocks(1, 2), 0)]
    until(lambda: len(begun) == 3)
    time.sleep(0.02)
    names = [thread.name for thread in threading.enumerate()]
    assert sorted(begun) == [0, BLOCK, 2 * BLOCK] and names.count("nvme") == 3
    gate.set()
    for transfer in transfers:
        transfer.wait()


def test_the_memory_lives_until_the_transfer_ends_and_no_longer(disk, monkeypatch):
    gate, begun = slow(monkeypatch, "pwritev")
    source = numpy.full(2 * BLOCK, 5, numpy.uint8)
    alive = weakref.ref(source)
    file = disk.file("w", 2 * BLOCK)
    transfer = file.write(torch.from_numpy(source), 0)
    del source
    until(lambda: len(begun) == 2)
    gc.collect()
    assert alive() is not None
    gate.set()
    transfer.wait()
    until(lambda: alive() is None)
    back = nvme.empty(2 * BLOCK)
    file.read(back, 0).wait()
    assert back.eq(5).all()


# --- transfers that go wrong ---


def flaky(monkeypatch, name, *outcomes):
    """The next calls of os.`name`: an int moves so many bytes at most, an exception is raised."""
    left, real = list(outcomes), getattr(os, name)

    def fake(fd, buffers, offset):
        outcome = left.pop(0) if left else None
        if isinstance(outcome, BaseException):
            raise outcome
        return real(fd, [buffers[0][:outcome]], offset)

    monkeypatch.setattr(os, name, fake)
    return left


@pytest.mark.parametrize("direct", [True, False])
def test_short_transfers_go_on_and_interrupted_ones_again(tmp_path, monkeypatch, direct):
    with contextlib.closing(nvme.Disk(tmp_path, 1, 4 * BLOCK, direct)) as disk:
        values = torch.randint(256, (8 * BLOCK,), dtype=torch.uint8)
        file, back = disk.file("w", 8 * BLOCK), nvme.empty(8 * BLOCK)
        had_direct = bool(file._direct)
        for name in "pwritev", "preadv":
            left = flaky(monkeypatch, name, InterruptedError(), BLOCK, InterruptedError(), BLOCK)
            file.write(aligned(values), 0).wait()
            file.read(back, 0).wait()
            assert torch.equal(back, values) and not left
            monkeypatch.undo()
        # A short count in mid-block, as a signal or a full disk can leave it.
        monkeypatch.setattr(nvme.Transfer, "_call", short_once(nvme.Transfer._call, 1000))
        file.write(aligned(values.flip(0)), 0).wait()
        monkeypatch.setattr(nvme.Transfer, "_call", short_once(nvme.Transfer._call, 1000))
        file.read(back, 0).wait()
        assert torch.equal(back, values.flip(0))
        assert bool(file._direct) == had_direct  # not given up for it


def short_once(real, count):
    done = []

    def fake(transfer, fd, view, place):
        if done:
            return real(transfer, fd, view, place)
        done.append(place)
        ordinary = transfer.file._fd  # O_DIRECT moves no thousand bytes
        return real(transfer, ordinary, view[:count], place)

    return fake


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EINVAL])
@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_an_error_names_file_operation_offset_and_bytes(tmp_path, monkeypatch, name, number):
    with contextlib.closing(nvme.Disk(tmp_path, 1, BLOCK, direct=False)) as disk:
        file = disk.file("momentum", 8 * BLOCK)
        file.write(blocks(8, 1), 0).wait()
        left = flaky(monkeypatch, name, None, OSError(number, os.strerror(number)))
        transfer = (file.write if name == "pwritev" else file.read)(blocks(4, 2), 2 * BLOCK)
        for _ in range(2):  # said again to who asks again
            with pytest.raises(OSError, match=os.strerror(number)) as caught:
                transfer.wait()
            assert caught.value.errno == number and caught.value.filename == file.path
            operation = "write" if name == "pwritev" else "read"
            text = f"{operation} of {4 * BLOCK} bytes at {2 * BLOCK} ended after {BLOCK} bytes"
            assert text in str(caught.value)
        assert transfer.done() and not left
        file.write(blocks(8, 3), 0).wait()  # and the next ones work
        file.read(back := nvme.empty(8 * BLOCK), 0).wait()
        assert back.eq(3).all()


def test_any_exception_in_a_thread_reaches_who_waits(disk, monkeypatch):
    flaky(monkeypatch, "pwritev", MemoryError("no room"))
    with pytest.raises(OSError, match=r"write of 5 bytes at 3 ended after 0 .*no room"):
        disk.file("w", 8).write(torch.zeros(5, dtype=torch.uint8), 3).wait()


def test_a_failed_write_makes_later_reads_of_its_place_fail(disk, monkeypatch):
    file, back = disk.file("w", 6 * BLOCK), nvme.empty(BLOCK)
    file.write(blocks(6, 1), 0).wait()
    gate = threading.Event()

    def broken(fd, buffers, offset):
        gate.wait(10)
        raise OSError(errno.EIO, "the disk is broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", broken)
        write = file.write(blocks(4, 2), BLOCK)
        queued = file.read(back, 2 * BLOCK)
        gate.set()
        for transfer in write, queued, file.read(back, BLOCK), file.read(back, 4 * BLOCK):
            with pytest.raises(OSError, match="the disk is broken") as caught:
                transfer.wait()
            assert caught.value.errno == errno.EIO
    for place in 0, 5:  # its neighbours are as they were
        file.read(back, place * BLOCK).wait()
        assert back.eq(1).all()
    file.write(blocks(1, 3), 2 * BLOCK).wait()  # a good write heals its own place only
    file.read(back, 2 * BLOCK).wait()
    assert back.eq(3).all()
    for place in 1, 3, 4:
        with pytest.raises(OSError, match="the disk is broken"):
            file.read(back, place * BLOCK).wait()
    file.write(blocks(6, 4), 0).wait()
    file.read(blocks(6, 0), 0).wait()


@pytest.mark.parametrize("left", [4 * BLOCK - 1, 0])
def test_a_file_that_was_cut_is_an_error_for_reads_and_writes(disk, left):
    file = disk.file("w", 4 * BLOCK)
    file.write(blocks(4, 1), 0).wait()
    os.truncate(file.path, left)
    for transfer in file.read(blocks(1, 0), 3 * BLOCK), file.write(blocks(1, 2), 0):
        with pytest.raises(OSError, match=f"cut to {left} of {4 * BLOCK} bytes") as caught:
            transfer.wait()
        assert caught.value.filename == file.path


def test_the_end_of_the_file_is_an_error_and_no_endless_loop(disk, monkeypatch):
    monkeypatch.setattr(nvme.File, "_check", lambda file, transfer: None)
    file = disk.file("w", 4 * BLOCK)
    os.truncate(file.path, 3 * BLOCK + 10)
    with pytest.raises(OSError, match="end of file"):
        file.read(blocks(4, 0), 0).wait()


def test_what_cannot_be_moved_is_refused_at_once(disk):
    file = disk.file("w", 100)
    for offset in -1, 1, 1000:
        with pytest.raises(ValueError, match=r"w: bytes .* are outside its 100 bytes"):
            file.write(torch.zeros(25), offset)
        with pytest.raises(ValueError, match="outside"):
            file.read(torch.zeros(25), offset)
    for tensor in torch.zeros(5, 5).t()[1:], torch.zeros(5, device="meta"):
        with pytest.raises(ValueError, match="only contiguous CPU tensors"):
            file.write(tensor, 0)
    for name, nbytes in ("../w", 1), ("a/b", 1), ("x", -1):
        with pytest.raises(ValueError, match="plain name"):
            disk.file(name, nbytes)
    for bad in {"threads": 0}, {"piece": 0}, {"piece": BLOCK + 1}:
        with pytest.raises(ValueError, match="whole blocks"):
            nvme.Disk(disk.path, **bad)


# --- space ---


def claimed(path):
    return os.stat(path).st_blocks * 512


def test_space_is_claimed_at_once_with_real_blocks(disk, monkeypatch):
    assert claimed(disk.file("a", 100 * BLOCK).path) >= 100 * BLOCK
    for number in errno.ENOTSUP, errno.EINVAL:

        def unsupported(fd, offset, nbytes, number=number):
            raise OSError(number, "unsupported")

        monkeypatch.setattr(os, "posix_fallocate", unsupported)
        file = disk.file(f"b{number}", (3 << 20) + 5)
        assert os.path.getsize(file.path) == (3 << 20) + 5 <= claimed(file.path)
    monkeypatch.delattr(os, "posix_fallocate")
    assert claimed(disk.file("c", 100 * BLOCK).path) >= 100 * BLOCK


def assert_no_room(disk, nbytes, number):
    before = os.listdir("/dev/fd")
    with pytest.raises(OSError, match=rf"needs {nbytes} bytes, \d+ are free") as caught:
        disk.file("big", nbytes)
    assert caught.value.errno == number
    assert caught.value.filename == os.path.join(disk.path, "big")
    assert os.strerror(number) in str(caught.value)
    assert os.listdir(disk.path) == [] and disk.nbytes == 0
    assert len(os.listdir("/dev/fd")) == len(before)


def mount_small_disk(path):
    """A disk of 64 KiB at `path`, for this process alone and gone with it; whether it worked."""
    clone_newns = 0x20000  # <sched.h>
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(clone_newns):
        return False
    alone = ["mount", "--make-rprivate", "/"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(path)]
    return all(not subprocess.run(run, capture_output=True).returncode for run in (alone, mount))


@pytest.mark.parametrize("fallocate", [True, False])
def test_a_full_disk_is_said_with_need_and_free(tmp_path, monkeypatch, fallocate):
    def child(pipe):
        if not mount_small_disk(tmp_path):
            pipe.send("no mount")
            return
        if not fallocate:
            monkeypatch.delattr(os, "posix_fallocate")
        with contextlib.closing(nvme.Disk(tmp_path)) as disk:
            assert_no_room(disk, 1 << 20, errno.ENOSPC)
            file, back = disk.file("fits", 8 * BLOCK), blocks(8, 0)  # and it can go on
            file.write(blocks(8, 1), 0)
            file.read(back, 0).wait()
            assert back.eq(1).all()
        pipe.send("done")

    result = in_child(child)
    if result == "no mount":
        pytest.skip("only root on Linux can mount a small disk")
    assert result == "done"
    assert os.listdir(tmp_path) == []


def test_a_limit_on_file_size_is_said_with_need_and_free(tmp_path):
    def child(pipe):
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, BLOCK))
        with contextlib.closing(nvme.Disk(tmp_path)) as disk:
            assert_no_room(disk, 65536 * 4, errno.EFBIG)
        pipe.send("done")

    assert in_child(child) == "done"


def test_a_name_in_use_is_refused_and_a_planted_link_not_followed(disk, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.symlink(victim, os.path.join(disk.path, "planted"))
    file = disk.file("used", BLOCK)
    for name in "planted", "used":
        with pytest.raises(FileExistsError, match=name):
            disk.file(name, BLOCK)
    assert os.path.exists(file.path)  # the first owner's
    disk.close()
    assert victim.read_text() == "precious"


# --- folders and processes ---


def in_child(function):
    """function(pipe) in a forked process; returns what it sends."""
    ours, theirs = fork.Pipe()
    child = fork.Process(target=function, args=(theirs,))
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(10) else "hangs"
    except EOFError:
        return "died"
    finally:
        child.join(10)


def open_inodes():
    inodes = set()
    for fd in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            inodes.add(os.fstat(int(fd)).st_ino)
    return inodes


@contextlib.contextmanager
def live_run(path):
    """Another process with an open Disk; yields its id and folder."""

    def run(pipe):
        disk = nvme.Disk(path)
        disk.file("w", BLOCK).write(blocks(1, 1), 0).wait()
        pipe.send(disk.path)
        pipe.recv()

    ours, theirs = fork.Pipe()
    child = fork.Process(target=run, args=(theirs,))
    child.start()
    try:
        assert ours.poll(10)
        yield child.pid, ours.recv()
    finally:
        child.kill()
        child.join()


def test_nothing_is_left_and_close_may_be_called_again(tmp_path):
    path = tmp_path / "made" / "too"
    before = os.listdir("/dev/fd")
    for _ in range(3):
        disk = nvme.Disk(path)
        file = disk.file("w", BLOCK)
        transfer = file.write(blocks(1, 1), 0)
        assert len(os.listdir(path)) == 1 and disk.nbytes == BLOCK
        disk.close()
        assert transfer.done() and os.listdir(path) == [] and disk.nbytes == 0
        assert not [thread for thread in threading.enumerate() if thread.name == "nvme"]
        disk.close()
        for use in (lambda: file.write(blocks(1, 1), 0), lambda: disk.file("v", 1)):  # noqa: B023
            with pytest.raises(ValueError, match="closed Disk"):
                use()
    assert len(os.listdir("/dev/fd")) == len(before)


def test_close_waits_for_what_is_in_flight_and_keeps_its_errors(tmp_path, monkeypatch):
    disk = nvme.Disk(tmp_path, threads=1, piece=BLOCK)
    flaky(monkeypatch, "pwritev", None, OSError(errno.EIO, "broken"))
    gate, begun = slow(monkeypatch, "pwritev")
    writes = [disk.file(name, BLOCK).write(blocks(1, 1), 0) for name in "ab"]
    until(lambda: begun)
    threading.Timer(0.02, gate.set).start()
    disk.close()
    assert all(write.done() for write in writes) and os.listdir(tmp_path) == []
    writes[0].wait()
    with pytest.raises(OSError, match="broken"):
        writes[1].wait()


def test_close_works_when_the_folder_is_gone(tmp_path):
    disk = nvme.Disk(tmp_path / "x")
    file = disk.file("w", BLOCK)
    os.unlink(file.path)
    os.rmdir(disk.path)
    os.rmdir(tmp_path / "x")
    file.write(blocks(1, 1), 0).wait()
    disk.close()


def test_a_forgotten_disk_is_removed(tmp_path, monkeypatch):
    nvme.Disk(tmp_path).file("w", BLOCK).nbytes  # noqa: B018
    gc.collect()
    assert os.listdir(tmp_path) == []
    # In a cycle it is the collector's, and that may run in one of its own threads.
    real, inside = os.pwritev, []

    def collecting(fd, buffers, offset):
        inside.append(gc.collect())
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", collecting)
    cycle = [nvme.Disk(tmp_path)]
    cycle.append(cycle)
    file, gate = cycle[0].file("w", BLOCK), threading.Event()
    monkeypatch.setattr(nvme.File, "_check", lambda *_: gate.wait(10))
    transfer = file.write(blocks(1, 1), 0)
    del cycle
    gate.set()
    transfer.wait()
    until(lambda: os.listdir(tmp_path) == [])
    assert inside


def test_exit_without_close_ends_and_removes(tmp_path):
    code = """if True:
        import nvme, sys, os, time
        real = os.pwritev
        def slow(*args):
            time.sleep(0.1)
            return real(*args)
        os.pwritev = slow
        disk = nvme.Disk(sys.argv[1], threads=1)
        disk.file("w", nvme.BLOCK).write(nvme.empty(nvme.BLOCK), 0)
        print(len(os.listdir(sys.argv[1])))
        sys.exit(3)
    """
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    root = Path(nvme.__file__).parent
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (3, "1\n", "")
    assert os.listdir(tmp_path) == []


def test_permissions_are_the_owners_only(disk):
    assert os.stat(disk.path).st_mode & 0o777 == 0o700
    assert os.stat(disk.file("w", 5).path).st_mode & 0o777 == 0o600


def test_a_killed_runs_folder_is_removed_a_live_ones_is_not(tmp_path):
    with live_run(tmp_path) as (pid, dead), live_run(tmp_path) as (_, living):
        with contextlib.closing(nvme.Disk(tmp_path)) as disk:
            assert os.path.exists(dead) and os.path.exists(living)
            os.kill(pid, signal.SIGKILL)
            until(lambda: not process_runs(pid))
            with contextlib.closing(nvme.Disk(tmp_path)) as other:
                folders = {os.path.join(tmp_path, name) for name in os.listdir(tmp_path)}
                assert folders == {living, disk.path, other.path}
                assert os.listdir(living) == ["w"]
        assert os.listdir(tmp_path) == [os.path.basename(living)]


def process_runs(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def test_names_that_are_not_ours_and_links_are_left_alone(tmp_path):
    home, path = tmp_path / "home", tmp_path / "nvme"
    (path / "zero-nvme-mine").mkdir(parents=True)
    (path / "zero-nvme-mine" / "thesis").write_text("precious")
    home.mkdir()
    (home / "thesis").write_text("precious")
    (path / "zero-nvme-abcdefgh.run").symlink_to(home)
    (path / "zero-nvme-ijklmnop.run").write_text("a file")
    strange = path / "zero-nvme-qrstuvwx.run"  # a folder in it: no run made this
    (strange / "deep").mkdir(parents=True)
    dead = path / "zero-nvme-yz012345.run"
    dead.mkdir()
    (dead / "link").symlink_to(home / "thesis")
    before = set(os.listdir(path))
    nvme.Disk(path).close()
    assert set(os.listdir(path)) == before - {dead.name}
    assert (home / "thesis").exists() and (strange / "deep").exists()
    assert (path / "zero-nvme-mine" / "thesis").exists()


def test_another_users_folder_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "zero-nvme-abcdefgh.run").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        nvme.Disk(tmp_path).close()
    assert os.listdir(tmp_path) == ["zero-nvme-abcdefgh.run"]
    nvme.Disk(tmp_path).close()
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_loses_no_folder(tmp_path, monkeypatch):
    def unsupported(fd, how):
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(nvme.fcntl, "flock", unsupported)
    first = nvme.Disk(tmp_path)
    second = nvme.Disk(tmp_path)
    assert os.path.exists(first.path) and os.path.exists(second.path)
    first.close()
    second.close()
    assert os.listdir(tmp_path) == []


def test_twenty_starts_at_once_keep_their_folders(tmp_path):
    def start(barrier, good):
        for _ in range(3):
            barrier.wait(20)
            disk = nvme.Disk(tmp_path)
            barrier.wait(20)  # all have started: whoever lost a folder lost it by now
            good.value += os.path.isdir(disk.path) and len(os.listdir(tmp_path)) == 20
            barrier.wait(20)
            disk.close()

    barrier, counts = fork.Barrier(20), [fork.Value("i", 0) for _ in range(20)]
    runs = [fork.Process(target=start, args=(barrier, count)) for count in counts]
    for run in runs:
        run.start()
    for run in runs:
        run.join(30)
    assert [count.value for count in counts] == [3] * 20
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("moment", ["before open", "before lock"])
def test_a_new_folder_taken_for_dead_is_made_again(tmp_path, monkeypatch, moment):
    module, name = (nvme.tempfile, "mkdtemp") if moment == "before open" else (nvme.fcntl, "flock")
    real = getattr(module, name)

    def fake(*args):
        monkeypatch.undo()
        result = real(*args) if moment == "before open" else None
        (new,) = os.listdir(tmp_path)
        nvme.Disk(tmp_path).close()  # another start sees a folder without a lock
        assert new not in os.listdir(tmp_path)
        return result or real(*args)

    monkeypatch.setattr(module, name, fake)
    with contextlib.closing(nvme.Disk(tmp_path)) as disk:
        assert os.path.exists(disk.file("w", 1).path)
    assert os.listdir(tmp_path) == []


def test_a_path_that_someone_else_has_locked_is_no_hang(disk):
    nvme.Disk(disk.path).close()


def test_a_forked_child_owns_nothing(tmp_path):
    disk = nvme.Disk(tmp_path)
    file = disk.file("w", BLOCK)
    ours = {os.stat(path).st_ino for path in (file.path, disk.path)}

    def child(pipe):
        with pytest.raises(ValueError, match="closed Disk"):
            file.write(blocks(1, 1), 0)
        disk.close()
        pipe.send(ours & open_inodes())

    assert ours <= open_inodes()
    assert in_child(child) == set()
    assert os.path.exists(file.path)
    file.write(blocks(1, 1), 0).wait()
    disk.close()
    assert os.listdir(tmp_path) == []


def test_a_path_that_cannot_hold_a_folder_is_said(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    before = os.listdir("/dev/fd")
    for name in "file", "file/below", "nowhere":
        with pytest.raises(OSError, match="cannot make a folder here") as caught:
            nvme.Disk(tmp_path / name)
        assert caught.value.filename == str(tmp_path / name)
    with pytest.raises(NotADirectoryError):
        nvme.Disk(tmp_path / "file")
    assert len(os.listdir("/dev/fd")) == len(before)


def test_a_read_only_folder_is_said(tmp_path):
    def child(pipe):
        if os.geteuid() == 0:  # root ignores modes: become nobody, in this child only
            os.chmod(tmp_path, 0o555)
            os.setuid(65534)
        try:
            nvme.Disk(".")
        except PermissionError as error:
            pipe.send((error.filename, "cannot make a folder here" in str(error)))

    tmp_path.chmod(0o555)
    here = os.getcwd()
    os.chdir(tmp_path)  # nobody may not enter the folders above it
    try:
        assert in_child(child) == (str(tmp_path), True)
    finally:
        os.chdir(here)
        tmp_path.chmod(0o700)
