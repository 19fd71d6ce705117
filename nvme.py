"""Move tensors between memory and files, asynchronously: read, write, wait.

    disk = Disk("/mnt/nvme")                     one folder of this run, removed at the end
    file = disk.file("momentum", buffer.nbytes)  the space is claimed now, not at the first write
    transfer = file.write(buffer, offset=0)      returns at once
    transfer.wait()                              all bytes have moved, or OSError says why not

What can go wrong with a disk is an OSError that says what happened, where, and what to do. With
`checksum=True` that includes bytes that come back other than they were written.

How a transfer flows. Nothing is copied: a thread hands the kernel the tensor's own address.

    file.write(tensor, offset)                              threads, at most `threads`
          |                                                +--> pwritev(piece 0) --+
          +--> Transfer --> queue [T1 T2 T3] --> T1 in ----+--> pwritev(piece 1) --+--> T1.wait()
                  |                            pieces      +--> pwritev(piece 2) --+
                  +-- after: older transfers of the same place, which must end first
                  +-- direct: past the page cache (O_DIRECT) if offset, length and address are
                      multiples of BLOCK and the file system can, else an ordinary descriptor

Where DeepSpeed has it: `AsyncIOHandle` of csrc/aio, compiled and on libaio (`async_pread`,
`async_pwrite`, `wait`; `block_size` is our piece, `intra_op_parallelism` our threads,
`new_cpu_locked_tensor` our `empty`), and deepspeed/runtime/swap_tensor (`swap_in_tensors`,
`swap_out_tensors`, `SwapBufferPool`), which names files and aligns buffers. There one `wait()` is
for all that was begun and the caller keeps reads behind writes; here each transfer has its own,
and the order is kept. Left out: io_uring, GPUDirect Storage, files that outlive the run.

Read `_Pool` for who moves what and when, `Transfer._step` for the one place that does I/O.
"""

import contextlib
import errno
import fcntl
import os
import re
import signal
import tempfile
import threading
import weakref
import zlib

import torch

BLOCK = 4096  # bytes; O_DIRECT wants addresses, offsets and lengths in whole blocks of the device
PIECE = 8 << 20  # bytes per system call: reaches the disk's rate, yet several share a transfer

_NAME = re.compile(r"zero-nvme-[a-z0-9_]{8}\.run")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

_ROOM = "free some space there, or choose a folder with room"
_RIGHTS = "choose a folder that you may write to"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _ROOM),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _RIGHTS),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.ENOENT), "choose a path that is a folder"),
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or use more ranks",
    errno.EIO: "what is on this disk is not to be trusted: choose another, load the last state",
    errno.ETIMEDOUT: "look whether the disk still answers",
}


def _advised(number, reason):
    return f"{reason}; {_ADVICE[number]}" if number in _ADVICE else reason


def empty(nbytes):
    """A 1-D uint8 CPU tensor fit for O_DIRECT: starts on a block, `nbytes` rounded up."""
    nbytes += -nbytes % BLOCK
    raw = torch.empty(nbytes + BLOCK, dtype=torch.uint8)
    return raw.narrow(0, -raw.data_ptr() % BLOCK, nbytes)


class Disk:
    """One run's own folder below `path` and the bounded pool of threads that moves its bytes.

    Files live as long as the disk; its folder goes at `close()`, when the disk is collected, or at
    exit. The lock on the folder ends with the process, however that ends: a killed run's folder is
    known by its free lock, and the next run removes it. (Machines that share `path` must share its
    locks too.)
    """

    def __init__(self, path, threads=4, piece=PIECE, direct=True, checksum=False, limit=None):
        """`piece`: bytes per system call; `direct`: use O_DIRECT; `checksum`: a read fails if its
        bytes are not those that were written; `limit`: seconds without a byte moved after which
        `wait` gives up. OSError without a folder."""
        if threads < 1 or piece < BLOCK or piece % BLOCK:
            raise ValueError(f"needs a thread and whole blocks, not {threads=}, {piece=}")
        root = os.path.abspath(path)
        try:
            self.path, folder = _claim_folder(root)
        except OSError as error:
            reason = f"cannot make a folder here: {error.strerror}"
            raise OSError(error.errno, _advised(error.errno, reason), root) from error
        self._direct = getattr(os, "O_DIRECT", 0) if direct else 0
        self._pool = _Pool(self.path, folder, threads, piece, checksum, limit)
        _handle_sigterm()
        self._finalizer = weakref.finalize(self, self._pool.close)

    @property
    def nbytes(self):
        """Bytes claimed by the open files."""
        return sum(file.nbytes for file in self._pool.files)

    def file(self, name, nbytes):
        """Make a file and claim all its `nbytes`; OSError says what it needs and what is free."""
        if os.path.basename(name) != name or nbytes < 0:
            raise ValueError(f"needs a plain name and a size, not {name!r} and {nbytes}")
        pool, flags, fds = self._pool, os.O_RDWR | os.O_NOFOLLOW, []
        with pool.cond:
            pool.check_open()
            try:
                new = flags | os.O_CREAT | os.O_EXCL
                fds.append(os.open(name, new, 0o600, dir_fd=pool.folder))
                _claim_space(fds[0], nbytes)
                fds.append(_open_direct(name, flags, self._direct, pool.folder))
            except OSError as error:
                if fds:  # else it is not ours to remove
                    os.close(fds[0])
                    os.unlink(name, dir_fd=pool.folder)
                disk = os.statvfs(pool.folder)
                free = disk.f_bavail * disk.f_frsize
                reason = f"needs {nbytes} bytes, {free} are free: {error.strerror}"
                reason, path = _advised(error.errno, reason), os.path.join(self.path, name)
                raise OSError(error.errno, reason, path) from error
            pool.fds += [fd for fd in fds if fd is not None]
            pool.files.append(File(pool, name, nbytes, *fds))
            return pool.files[-1]

    def close(self):
        """Wait for what is in flight, end the threads, remove files and folder; again is fine."""
        self._pool.close()
        self._finalizer.detach()


class File:
    """A file of fixed size, made by `Disk.file`; keep the disk, its files end with it.

    Offsets are in bytes; any contiguous CPU tensor goes to any offset. Whole blocks (from `empty`,
    in a file whose size is rounded up likewise) are fastest: only they pass by the page cache.
    A write waits for older reads and writes of the same place, a read for older writes. What does
    not fit into the file raises ValueError at once.
    """

    def __init__(self, pool, name, nbytes, fd, direct):
        self.name, self.nbytes, self.path = name, nbytes, os.path.join(pool.path, name)
        self._pool, self._fd, self._direct = pool, fd, direct
        self._live = []  # unfinished transfers, oldest first
        self._lost = []  # (start, stop, failure) of failed writes: neither old nor new bytes there
        self._sums = {}  # start -> (stop, CRC-32) of written places, if asked for

    def read(self, tensor, offset):
        """Start to fill `tensor` with the bytes from `offset` on; leave it alone till `wait()`."""
        return self._pool.submit(Transfer(self, False, tensor, offset))

    def write(self, tensor, offset):
        """Start to write the bytes of `tensor` at `offset`; do not change it till `wait()`."""
        return self._pool.submit(Transfer(self, True, tensor, offset))

    def _check(self, transfer):
        size = os.fstat(self._fd).st_size
        if size < self.nbytes:  # a write would restore the size and leave zeros where data were
            raise OSError(errno.EIO, f"the file was cut to {size} of {self.nbytes} bytes")
        for start, stop, (number, reason) in [] if transfer.write else self._lost:
            if start < transfer.stop and transfer.start < stop:
                raise OSError(number, f"a write of bytes {start} to {stop} had failed: {reason}")

    def _written(self, write):
        # Lost are what this write did not cover of the losses before it, and its own if it failed.
        lost = [(write.start, write.stop, write.failure)] if write.failure else []
        for start, stop, why in self._lost:
            lost += [(start, min(stop, write.start), why), (max(start, write.stop), stop, why)]
        self._lost = [entry for entry in lost if entry[0] < entry[1]]
        if write.sum is not None:
            for start, (stop, _) in [*self._sums.items()]:
                if start < write.stop and write.start < stop:
                    del self._sums[start]
            if not write.failure:
                self._sums[write.start] = write.stop, write.sum


class Transfer:
    """One read or write on its way; keeps the tensor's memory alive until it has ended."""

    def __init__(self, file, write, tensor, offset):
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{file.path}: only contiguous CPU tensors can be read or written")
        self.file, self.write, self.nbytes = file, write, tensor.nbytes
        self.start, self.stop = offset, offset + tensor.nbytes  # in the file
        if self.start < 0 or self.stop > file.nbytes:
            where = f"bytes {self.start} to {self.stop} are outside its {file.nbytes} bytes"
            raise ValueError(f"{file.path}: {where}")
        self.view = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
        aligned = not (offset | tensor.data_ptr() | tensor.nbytes) % BLOCK
        self.direct = aligned and file._direct is not None
        self.after = []  # unfinished transfers that must end before this one starts
        self.given = self.moved = 0  # bytes given to threads, bytes moved
        self.busy = 0  # pieces in threads' hands
        self.failure = None  # (errno, reason); an exception's traceback would keep buffers alive
        self.sum = None  # CRC-32 of what was written, if asked for
        self.ended = False

    def done(self):
        """Whether it has ended, well or not; never blocks."""
        return self.ended

    def wait(self):
        """Return when all bytes have moved; OSError names file, operation, offset, bytes."""
        pool, path, failure = self.file._pool, self.file.path, None
        with pool.cond:
            while not self.ended and not failure:
                if pool.folder is None:
                    raise RuntimeError(f"{path}: a forked child cannot wait for its parent")
                before = pool.moved
                if not pool.cond.wait(pool.limit) and pool.moved == before and not self.ended:
                    failure = errno.ETIMEDOUT, f"nothing has moved for {pool.limit:g} s"
        if failure := failure or self.failure:
            number, reason = failure
            what = f"{'write' if self.write else 'read'} of {self.nbytes} bytes at {self.start}"
            what = f"{what} ended after {self.moved} bytes: {_advised(number, reason)}"
            raise OSError(number, what, path)

    def conflicts(self, other):
        """Whether the two must not be in work at once."""
        # The two descriptors of a file agree only if used in turn: before direct I/O the kernel
        # writes cached pages back and drops them, and one page can hold bytes of both. So besides
        # overlap, direct and ordinary transfers of one file keep apart, unless both read.
        overlap = self.start < other.stop and other.start < self.stop
        return (self.write or other.write) and (overlap or self.direct != other.direct)

    def move(self, at, stop):
        """Move one piece, bytes `at` to `stop`; returns (bytes moved, failure or None)."""
        start, failure = at, None
        try:
            self.file._check(self)
            while at < stop:  # a short transfer is no error: go on where it ended
                at += self._step(at, stop)
        except OSError as error:
            failure = error.errno or errno.EIO, error.strerror or str(error)
        except BaseException as error:  # not lost with the thread: who waits must hear of it
            failure = errno.EIO, repr(error)
        return at - start, failure

    def check(self):
        """After the last byte: note the checksum of a write, compare those in a read's place."""
        pool, file = self.file._pool, self.file
        if not pool.checksum or self.failure:
            return
        if self.write:
            self.sum = zlib.crc32(self.view)
            return
        with pool.cond:  # no write changes these while this read is under way
            places = [(a, b, wanted) for a, (b, wanted) in file._sums.items()]
        for a, b, wanted in places:
            inside = self.start <= a and b <= self.stop
            if inside and zlib.crc32(self.view[a - self.start : b - self.start]) != wanted:
                self.failure = errno.EIO, f"bytes {a} to {b} are not those that were written"

    def _step(self, at, stop):
        file, place, direct = self.file, self.start + at, self.file._direct
        if not self.direct or (place | stop - at) % BLOCK:  # the latter: after a short transfer
            direct = None
        try:
            moved = self._call(file._fd if direct is None else direct, self.view[at:stop], place)
        except InterruptedError:
            return 0
        except OSError as error:
            if direct is None or error.errno != errno.EINVAL:
                raise
            file._direct = None  # some file systems open with O_DIRECT and then refuse
            return 0
        if moved == 0:
            raise OSError(errno.EIO, "end of file")
        return moved

    def _call(self, fd, view, place):
        if hasattr(os, "preadv"):
            return (os.pwritev if self.write else os.preadv)(fd, [view], place)
        with self.file._pool.cond, open(fd, "r+b", buffering=0, closefd=False) as file:
            file.seek(place)  # a descriptor has one position: one thread at a time
            return file.write(view) if self.write else file.readinto(view)


class _Pool:
    """Queue, threads and open files: what must live until the last byte has moved.

    It knows nothing of its `Disk`, so no thread keeps a forgotten disk alive. Threads start with
    work and end with an empty queue: an idle pool has none to hold up the exit or to miss in a
    forked child.
    """

    def __init__(self, path, folder, threads, piece, checksum, limit):
        self.path, self.folder, self.size, self.piece = path, folder, threads, piece
        self.checksum, self.limit, self.moved = checksum, limit, 0
        # Reentrant: the garbage collector may call close() in a thread that holds it.
        self.cond = threading.Condition(threading.RLock())
        self.queue, self.threads, self.files, self.fds = [], set(), [], []
        self.closed = False
        _pools.add(self)

    def check_open(self):
        if self.closed:
            raise ValueError(f"{self.path}: I/O on a closed Disk")

    def submit(self, transfer):
        with self.cond:
            self.check_open()
            if transfer.nbytes == 0:
                transfer.ended = True
                return transfer
            live = transfer.file._live
            transfer.after = [older for older in live if transfer.conflicts(older)]
            pieces = -(-transfer.nbytes // self.piece)
            for _ in range(min(pieces, self.size - len(self.threads))):
                thread = threading.Thread(target=self._work, name="nvme")
                thread.start()  # it waits for cond; if this raises, nothing is queued
                self.threads.add(thread)
            live.append(transfer)
            self.queue.append(transfer)  # whole: the pieces of a long one need no memory
            self.cond.notify_all()
        return transfer

    def _work(self):
        while piece := self._take():
            transfer, start, stop = piece
            if self._finish(transfer, *transfer.move(start, stop)):
                transfer.check()  # with the lock free: it takes as long as the transfer
                self._end(transfer)

    def _take(self):
        """The next piece to move, or None when the thread is to end."""
        with self.cond:
            while self.queue:
                # The oldest that waits for nobody. No deadlock: `after` holds older ones only, so
                # the oldest unfinished is always free to go, and no thread is tied to another.
                for transfer in self.queue:
                    if all(older.ended for older in transfer.after):
                        start, transfer.busy = transfer.given, transfer.busy + 1
                        transfer.given = min(start + self.piece, transfer.nbytes)
                        if transfer.given == transfer.nbytes:
                            self.queue.remove(transfer)
                        return transfer, start, transfer.given
                self.cond.wait()
            self.threads.discard(threading.current_thread())
            if self.closed and not self.threads:
                self._remove()
            return None

    def _finish(self, transfer, moved, failure):
        with self.cond:
            self.moved += moved
            transfer.busy -= 1
            transfer.moved += moved
            transfer.failure = transfer.failure or failure
            if transfer.failure and transfer in self.queue:  # no use in moving the rest
                self.queue.remove(transfer)
            return not transfer.busy and transfer not in self.queue

    def _end(self, transfer):
        with self.cond:
            if transfer.write:
                transfer.file._written(transfer)
            transfer.file._live.remove(transfer)
            transfer.view, transfer.after, transfer.ended = None, (), True
            self.cond.notify_all()

    def close(self):
        with self.cond:
            self.closed = True
            threads = list(self.threads)
        if threading.current_thread() in threads:
            return  # the garbage collector ran in one of our own: the last of them removes
        for thread in threads:
            thread.join(self.limit)
        if not any(thread.is_alive() for thread in threads):  # else the last of them removes
            self._remove()

    def _remove(self):
        with self.cond:
            folder, self.folder = self.folder, None
            fds, self.fds, self.files = self.fds, [], []
            if folder is None:
                return
            for fd in fds:
                os.close(fd)
            self.unlink(folder)
            os.close(folder)  # and with it the lock
        if not any(pool.folder is not None for pool in _pools):
            _forget_sigterm()

    def unlink(self, folder):
        """Remove the files and the folder, whoever has them open."""
        with contextlib.suppress(OSError):
            _empty_folder(folder)
            os.rmdir(self.path)


def _claim_space(fd, nbytes):
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    except (AttributeError, OSError) as error:
        unsupported = errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP
        if getattr(error, "errno", errno.ENOTSUP) not in unsupported:
            raise
        zeros, at = memoryview(bytes(1 << 20)), 0  # the portable way to real blocks
        while at < nbytes:
            at += os.pwrite(fd, zeros[: nbytes - at], at)


def _open_direct(name, flags, direct, folder):
    try:
        return os.open(name, flags | direct, dir_fd=folder) if direct else None
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this file system has no O_DIRECT
            raise
        return None


def _claim_folder(root):
    """Remove dead runs' folders from `root`, make a new one; its path and locked descriptor."""
    with contextlib.suppress(FileExistsError):  # a file? the next line has the better message
        os.makedirs(root, exist_ok=True)
    parent = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in filter(_NAME.fullmatch, os.listdir(parent)):
            with contextlib.suppress(OSError):  # a link, a file, or gone meanwhile
                _remove_if_dead(parent, name)
    finally:
        os.close(parent)
    while True:
        path = tempfile.mkdtemp(".run", "zero-nvme-", root)  # mode 0o700
        # Until it is locked it looks dead, and another start may remove it: then make another.
        with contextlib.suppress(FileNotFoundError):
            folder = os.open(path, _FOLDER)
            _lock(folder, fcntl.LOCK_EX)
            if os.path.exists(path):
                return path, folder
            os.close(folder)


def _remove_if_dead(parent, name):
    folder = os.open(name, _FOLDER, dir_fd=parent)
    try:
        mine = os.fstat(folder).st_uid == os.geteuid()
        if mine and _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            _empty_folder(folder)
            os.rmdir(name, dir_fd=parent)
    finally:
        os.close(folder)


def _empty_folder(folder):
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # a folder in it is not ours: all stays
            os.unlink(name, dir_fd=folder)  # a link is removed, not followed


def _lock(fd, how):
    """Whether the lock was got. A file system without locks says no: then nothing looks dead."""
    try:
        fcntl.flock(fd, how)
    except OSError:
        return False
    return True


_pools = weakref.WeakSet()


def _handle_sigterm():
    # It would end the process without a word to Python: clean up first, unless someone else
    # has a plan for it. (Python comes to it once it is out of a call such as a collective.)
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_at_sigterm)


def _forget_sigterm():
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGTERM) is _end_at_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_at_sigterm(number, frame):
    for pool in list(_pools):
        if pool.folder is not None:
            pool.unlink(pool.folder)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _forget_in_child():
    # A forked child has our descriptors but not our threads. Left open, they would keep the lock
    # of a killed run and the space of a closed one for as long as the child lives.
    for pool in list(_pools):
        pool.cond = threading.Condition(threading.RLock())  # a lost thread may hold the old one
        for fd in pool.fds if pool.folder is None else [*pool.fds, pool.folder]:
            os.close(fd)
        pool.folder, pool.closed = None, True
        pool.fds, pool.files, pool.threads = [], [], set()
    _forget_sigterm()


os.register_at_fork(after_in_child=_forget_in_child)
