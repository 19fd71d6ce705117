"""Disks that fill, break, lie or sleep under one rank: every rank raises within the limit, the
message says what, where and what to do, weights in memory are those before the step, close() works,
and nothing stays behind. Faults that are none to the caller change no bit."""

import contextlib
import errno
import os
import resource
import time

import pytest
import torch

import nvme
from faults import (
    LIMIT,
    ON_DISK,
    backward,
    broken,
    can_mount,
    fails,
    flip_byte,
    interrupted,
    make,
    mount,
    own_file,
    raised_by,
    settled,
    short,
    slow,
    train,
    trained,
    values,
)
from models import Odd, assert_same
from offload import RanksDisagree
from ranks import run_ranks

BAD = 1  # the rank whose disk fails
fine = contextlib.nullcontext


def on_ranks(work):
    """Two ranks that wait for each other for LIMIT seconds; what they return."""
    return run_ranks(work, 2, timeout=3 * LIMIT, group_limit=LIMIT)


def heard(error, rank, *words):
    """Requires the failing rank's own OSError, and on the others an error that quotes it."""
    assert isinstance(error, OSError if rank == BAD else RanksDisagree), repr(error)
    for word in words:
        assert word in str(error), f"{word!r} is not in: {error}"
    assert rank == BAD or f"rank {BAD}: " in str(error), error


# --- at construction ---


@contextlib.contextmanager
def quota(nbytes):
    """Writes of this process past `nbytes` of any file fail."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


@contextlib.contextmanager
def mounted(path, options):
    assert mount(path, options)
    yield


@contextlib.contextmanager
def instead(path, put):
    path.rmdir()
    put(path)
    yield


AT_FIRST = {
    "full": (
        lambda path: mounted(path, "size=8k"),
        ("No space left", "8192 are free", "choose a folder with room", "optimizer.bin"),
    ),
    "read-only": (
        lambda path: mounted(path, "ro"),
        ("Read-only file system", "choose a folder that you may write to"),
    ),
    "a file": (
        lambda path: instead(path, lambda path: path.write_text("precious")),
        ("Not a directory", "choose a path that is a folder"),
    ),
    "a dangling link": (
        lambda path: instead(path, lambda path: path.symlink_to("nowhere")),
        ("cannot make a folder here", "choose a path that is a folder"),
    ),
    "file size": (lambda path: quota(2**16), ("File too large", "raise the limit on file sizes")),
    "quota": (
        lambda path: broken(os, "posix_fallocate", fails(errno.EDQUOT)),
        ("quota exceeded", "choose a folder with room", "optimizer.bin"),
    ),
}


@pytest.mark.parametrize(("stage", "weights"), ON_DISK)
@pytest.mark.parametrize("what", AT_FIRST)
def test_a_disk_that_fails_at_construction_fails_on_every_rank(what, stage, weights, tmp_path):
    """And leaves the model plain: with another folder it trains as one that never failed."""
    if what in ("full", "read-only") and not can_mount():
        pytest.skip("only root on Linux can mount a tmpfs")
    prepare, words = AT_FIRST[what]

    def work(rank, world):
        folder = tmp_path / str(rank)
        folder.mkdir()
        plain = trained(stage, tmp_path / "good", rank, 2, weights=weights)
        torch.manual_seed(0)
        model = Odd()
        before = values(model)
        with prepare(folder) if rank == BAD else fine():
            error = raised_by(lambda: make(stage, folder, weights=weights, model=model))
        heard(error, rank, *words, str(tmp_path / str(BAD)))
        del error
        assert_same(values(model), before, "the model after a failed construction")
        assert not settled()
        zero, _ = make(stage, tmp_path / "good", weights=weights, model=model)
        train(zero, model, rank, 2)
        zero.close()
        assert_same(values(model), plain, "trained after the failure")

    on_ranks(work)
    assert os.listdir(tmp_path / "good") == []


def test_a_folder_that_is_missing_is_made(tmp_path):
    on_ranks(lambda rank, world: trained(2, tmp_path / "not" / "there", rank, 1) and None)
    assert os.listdir(tmp_path / "not" / "there") == []


@pytest.mark.skipif(not can_mount(), reason="only root on Linux can mount a tmpfs")
@pytest.mark.parametrize(("stage", "weights"), ON_DISK)
def test_a_disk_that_fills_up_later_is_no_fault(stage, weights, tmp_path):
    """The space is claimed: a neighbour takes the last byte of a small disk, and training goes on
    to the same bits."""

    def work(rank, world):
        folder = tmp_path / str(rank)
        folder.mkdir()
        plain = trained(stage, tmp_path / "plain", rank, 2, weights=weights)
        assert mount(folder, "size=2m")
        zero, model = make(stage, folder, weights=weights)
        with open(folder / "neighbour", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(folder).f_bavail == 0
        train(zero, model, rank, 2)
        zero.close()
        assert_same(values(model), plain, "with a full disk")

    on_ranks(work)


# --- in a step ---


def cut(zero, name):
    path = own_file(zero, name)
    os.truncate(path, os.path.getsize(path) - 1)


def empty(zero, name):
    os.truncate(own_file(zero, name), 0)


def flip(zero, name):
    """In every slice: some are padding only, and some have been read ahead."""
    groups = [group for part in zero.tier.partitions for group in part.groups]
    slices = groups if name == "optimizer.bin" else [bucket.home for bucket in zero.every]
    for one in slices:
        flip_byte(own_file(zero, name), one.offset + 1)


LATER = {
    "cut by a byte": (cut, None, ("the file was cut to", "load the last state")),
    "emptied": (empty, None, ("the file was cut to 0", "load the last state")),
    "a byte flipped": (flip, None, ("are not those that were written", "load the last state")),
    "full": (None, ("pwritev", errno.ENOSPC), ("No space left", "choose a folder with room")),
    "EDQUOT": (None, ("pwritev", errno.EDQUOT), ("quota exceeded", "free some space")),
    "EIO, write": (None, ("pwritev", errno.EIO), ("Input/output error", "load the last state")),
    "EIO, read": (None, ("preadv", errno.EIO), ("Input/output error", "load the last state")),
}


@contextlib.contextmanager
def spoilt(what, zero, name="optimizer.bin", after=0):
    """One of LATER, from here on or while it lasts."""
    spoil, call, _ = LATER[what]
    if spoil:
        spoil(zero, name)
    with broken(os, call[0], fails(call[1], after)) if call else fine():
        yield


def close_torn(zero, rank):
    """close() after weights on disk may be those of two steps: it says so, and raises on all ranks
    if some are lost."""
    with pytest.warns(UserWarning, match="weights.bin failed: .* weights of two steps"):
        try:
            zero.close()
        except (OSError, RanksDisagree) as error:
            heard(error, rank, "weights.bin", "had failed")


@pytest.mark.parametrize(("stage", "weights"), ON_DISK)
@pytest.mark.parametrize("what", LATER)
def test_a_disk_that_fails_in_a_step_fails_on_every_rank(what, stage, weights, tmp_path):
    def work(rank, world):
        zero, model = make(stage, tmp_path, weights=weights, settings={"checksum": True})
        train(zero, model, rank, 2)
        before = zero.model_state_dict()
        backward(zero, model, rank, 2)
        with spoilt(what, zero, after=3) if rank == BAD else fine():
            error = raised_by(zero.step)
        heard(error, rank, "optimizer.bin", *LATER[what][2])
        del error
        for call in zero.step, zero.state_dict, lambda: backward(zero, model, rank, 2):
            again = raised_by(call)
            assert "cannot go on" in str(again) and "load the last state" in str(again)
        del again
        if weights == "none":
            zero.close()
            assert_same(values(model), {n: before[n] for n in values(model)}, "weights")
        else:
            close_torn(zero, rank)
        assert not settled()

    on_ranks(work)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("what", ["cut by a byte", "emptied", "a byte flipped", "EIO, read"])
def test_a_disk_that_loses_the_weights_of_stage_3_fails_in_the_forward_of_all(what, tmp_path):
    """Broken for a while, it is asked again; what is lost is lost, and close() says so too."""

    def work(rank, world):
        zero, model = make(3, tmp_path, weights="nvme", settings={"checksum": True})
        train(zero, model, rank, 2)
        before = zero.model_state_dict()
        with spoilt(what, zero, "weights.bin") if rank == BAD else fine():
            error = raised_by(lambda: backward(zero, model, rank))
        heard(error, rank, "weights.bin", *LATER[what][2])
        del error
        zero.zero_grad()
        if what == "EIO, read":
            backward(zero, model, rank)
            zero.zero_grad()
            zero.close()
            assert_same(values(model), {n: before[n] for n in values(model)}, "weights")
        else:
            heard(raised_by(zero.close), rank, "weights.bin")
        assert not settled()

    on_ranks(work)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_disk_that_refuses_the_gradients_refuses_them_on_every_rank(stage, tmp_path):
    """With the sums on the device they are written at the boundary: nothing else has happened yet,
    so zero_grad() is enough to go on."""

    def work(rank, world):
        settings = {"accumulate_on": "device"}
        plain = trained(stage, tmp_path, rank, 3, settings=settings)
        zero, model = make(stage, tmp_path, settings=settings)
        train(zero, model, rank, 2)
        with spoilt("EIO, write", zero) if rank == BAD else fine():
            error = raised_by(lambda: backward(zero, model, rank, 2))
        heard(error, rank, "optimizer.bin", "Input/output error")
        zero.zero_grad()
        train(zero, model, rank, 1, first=2)
        zero.close()
        assert_same(values(model), plain, "weights")

    on_ranks(work)


@pytest.mark.parametrize(("stage", "weights"), ON_DISK)
def test_a_disk_that_fails_while_state_is_saved_or_loaded_fails_on_every_rank(
    stage, weights, tmp_path
):
    def work(rank, world):
        zero, model = make(stage, tmp_path, weights=weights)
        train(zero, model, rank, 2)
        saved, whole = zero.state_dict(), zero.model_state_dict()
        with spoilt("EIO, read", zero) if rank == BAD else fine():
            heard(raised_by(zero.state_dict), rank, "optimizer.bin")
        assert_same(zero.state_dict(), saved, "a second attempt")  # nothing is lost
        zero.close()
        for load, what in (("load_state_dict", saved), ("load_model_state_dict", whole)):
            zero, model = make(stage, tmp_path, weights=weights)
            with spoilt("EIO, write", zero) if rank == BAD else fine():
                heard(raised_by(lambda: getattr(zero, load)(what)), rank, ".bin")  # noqa: B023
            assert "failed half way" in str(raised_by(zero.state_dict))
            if weights == "none":
                zero.close()
            else:
                close_torn(zero, rank)
        assert not settled()

    on_ranks(work)
    assert os.listdir(tmp_path) == []


# --- what is not a fault to the caller, and what is one only if asked for ---

HARMLESS = {
    "short": [("preadv", short), ("pwritev", short)],
    "EINTR": [("preadv", interrupted()), ("pwritev", interrupted())],
    "slow": [("preadv", slow(0.003)), ("pwritev", slow(0.003))],
}


@pytest.mark.parametrize(("stage", "weights"), ON_DISK)
@pytest.mark.parametrize("what", HARMLESS)
def test_short_interrupted_and_slow_transfers_change_no_bit(what, stage, weights, tmp_path):
    def work(rank, world):
        settings = {"sub_group_size": 64, "checksum": True}
        plain = trained(stage, tmp_path, rank, 2, weights=weights, settings=settings)
        with contextlib.ExitStack() as stack:
            for name, outcome in HARMLESS[what] if rank == BAD else ():
                stack.enter_context(broken(os, name, outcome))
            found = trained(stage, tmp_path, rank, 2, weights=weights, settings=settings)
        assert_same(found, plain, what)

    on_ranks(work)


def test_a_disk_that_hangs_is_given_up_at_the_groups_limit_on_every_rank(tmp_path):
    """Not a slow one, where bytes move: here a call does not come back while anybody waits."""

    def work(rank, world):
        zero, model = make(2, tmp_path)
        before = zero.model_state_dict()
        backward(zero, model, rank)
        start = time.monotonic()
        with broken(os, "preadv", slow(5)) if rank == BAD else fine():
            error = raised_by(zero.step, within=4)
        assert time.monotonic() - start > 1
        if rank == BAD:
            assert isinstance(error, OSError) or "imed out" in str(error), error
        del error
        zero.close()  # the thread that hangs removes the folder when it comes back
        assert_same(values(model), {n: before[n] for n in values(model)}, "weights")
        deadline = time.monotonic() + 6
        while settled() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not settled()
        os._exit(7)  # a group in which an operation failed is not taken down in good order

    run_ranks(work, 2, timeout=30, group_limit=1.5, expect_exit={0: 7, 1: 7})
    assert os.listdir(tmp_path) == []


def test_a_flipped_byte_is_found_only_if_asked_for(tmp_path):
    """Without `checksum=True` nobody compares: the next step computes with it."""

    def work(rank, world):
        for checksum in (False, True):
            zero, model = make(2, tmp_path, settings={"checksum": checksum})
            train(zero, model, rank, 1)
            saved = zero.state_dict()
            if rank == BAD:
                flip(zero, "optimizer.bin")
            if checksum:
                heard(raised_by(zero.state_dict), rank, "not those that were written")
            else:
                with pytest.raises(AssertionError):
                    assert_same(zero.state_dict(), saved, "the state")
            zero.close()

    on_ranks(work)


def test_a_checksum_knows_every_byte_of_what_was_written(tmp_path):
    """In pieces, at odd places, over older ones; what was never written has none."""
    with contextlib.closing(nvme.Disk(tmp_path, piece=4096, checksum=True)) as disk:
        file = disk.file("w", 50_000)
        for start, length in ((0, 20_000), (30_001, 9_999), (8_192, 4_096)):
            file.write(torch.randint(256, (length,), dtype=torch.uint8), start).wait()
        whole = torch.empty(50_000, dtype=torch.uint8)
        file.read(whole, 0).wait()
        for place, known in ((8_192, True), (12_287, True), (30_001, True), (39_999, True)):
            flip_byte(file.path, place)
            with pytest.raises(OSError, match=r"w'$") as caught:
                file.read(whole, 0).wait()
            assert known and caught.value.errno == errno.EIO
            flip_byte(file.path, place)
        for place in (25_000, 45_000):
            flip_byte(file.path, place)
        file.read(whole, 0).wait()
