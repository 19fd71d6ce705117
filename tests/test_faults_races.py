"""Copies, transfers and collectives that complete late and out of order, and threads that are held
up at random, must not change a bit; and 500 steps must not hold more of anything than 50."""

import contextlib
import gc
import os
import random
import sys
import time
import weakref
from collections import deque
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import nvme
import offload
from cases import storages
from faults import EVERYWHERE, backward, make, say, times, train
from models import assert_same
from ranks import run_ranks

dice = random.Random()


def nap():
    """Up to 2 ms, often none at all."""
    if dice.random() < 0.3:
        time.sleep(dice.random() * 0.002)


# --- the shim ---
#
# Where real hardware may have done nothing yet, this does nothing yet, and what is on its way reads
# as NaN: a reader that does not wait gets NaN, a writer that does not wait changes what arrives.


def late_transfers():
    """Transfers of nvme.py begin and end at random; a read's target is NaN until its end."""
    read, take, move, end = (
        nvme.File.read, nvme._Pool._take, nvme.Transfer.move, nvme._Pool._end
    )  # fmt: skip

    def late_read(file, tensor, offset):
        tensor.view(torch.uint8).fill_(255)
        return read(file, tensor, offset)

    def late(real):
        def call(*args):
            nap()
            result = real(*args)
            nap()
            return result

        return call

    nvme.File.read, nvme._Pool._take = late_read, late(take)
    nvme.Transfer.move, nvme._Pool._end = late(move), late(end)


def late_collectives(ranks):
    """Both collectives are issued at random moments and their results appear when waited for."""
    reduce_scatter, all_gather = ranks.reduce_scatter, ranks.all_gather

    def late_reduce_scatter(full):
        nap()
        given, wait = full.clone(), reduce_scatter(full)

        def arrive():
            nap()
            mine = wait()
            assert torch.equal(full, given), "changed while it was being reduced"
            full.fill_(torch.nan)
            return mine

        return arrive

    def late_all_gather(full):
        nap()
        hidden, mine = full.clone(), full.view(ranks.world, -1)[ranks.rank].clone()
        wait = all_gather(hidden)
        full.fill_(torch.nan)
        full.view(ranks.world, -1)[ranks.rank] = mine  # its own slice may be read meanwhile

        def arrive():
            nap()
            wait()
            full.copy_(hidden)

        return arrive

    ranks.reduce_scatter, ranks.all_gather = late_reduce_scatter, late_all_gather


class Later(TorchFunctionMode):
    """A stream of a GPU that is not there: a copy in it is done when its event is waited for."""

    def __init__(self):
        self.queue, self.count = deque(), 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        with torch._C.DisableTorchFunction():
            target.fill_(torch.nan)
        self.count += 1
        self.queue.append((self.count, target, source))
        return target

    def wait_stream(self, other):
        pass

    def record_event(self):
        return Event(self, self.count)


class Event:
    def __init__(self, stream, count):
        self.stream, self.count = stream, count

    def synchronize(self):
        queue = self.stream.queue
        while queue and queue[0][0] <= self.count:
            _, target, source = queue.popleft()
            with torch._C.DisableTorchFunction():
                target.copy_(source)


def pretend_a_gpu():
    """Every tensor is on it but those in memory that offload.py or nvme.py made for the host; what
    offload.py made is page-locked."""
    host, pinned, init = set(), set(), offload.Lanes.__init__

    def note(tensor, *kinds):
        storage = tensor.untyped_storage()
        for kind in kinds:
            kind.add(storage.data_ptr())
            weakref.finalize(storage, kind.discard, storage.data_ptr())
        return tensor

    def new_init(lanes, device, pin):
        init(lanes, device, pin)
        lanes.stream = Later()

    make_host, make_empty = offload.Lanes.host, nvme.empty
    offload.Lanes.__init__ = new_init
    offload.Lanes.host = lambda *args: note(make_host(*args), host, pinned)
    nvme.empty = lambda nbytes: note(make_empty(nbytes), host)
    torch.Tensor.is_cuda = property(lambda t: t.untyped_storage().data_ptr() not in host)
    torch.Tensor.is_pinned = lambda t, *_: t.untyped_storage().data_ptr() in pinned
    torch.Tensor.record_stream = lambda *_: None
    torch.cuda.current_stream = lambda *_: None
    torch.cuda.stream = lambda stream: stream
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # a broadcast asks for it


ACCUMULATE = [(s, home, w, "host") for s, home, w in EVERYWHERE]
ACCUMULATE += [(s, home, "none", "device") for s in (1, 2, 3) for home in ("cpu", "nvme")]
ACCUMULATE += [(3, "nvme", "nvme", "device")]


def windows(stage, folder, rank, shim=False, **where):
    """A few windows of one to three backwards, two of them dropped; the whole state at the end."""
    zero, model = make(stage, folder, managed_gradient_accumulation=False, **where)
    if shim:
        late_collectives(zero.ranks)
    for window in range(times(4, 6)):
        for call in range(1 + window % 3):
            if shim:
                nap()
            backward(zero, model, rank, 10 * window + call)
        if window == 2:
            zero.zero_grad()
        else:
            zero.step()
    state, whole = zero.state_dict(), zero.model_state_dict()
    zero.close()
    return state["state"], state["master"], whole


@pytest.mark.parametrize("gpu", [False, True], ids=["", "pretended GPU"])
@pytest.mark.parametrize(("stage", "home", "weights", "sums"), ACCUMULATE)
def test_late_copies_transfers_and_collectives_change_no_bit(
    stage, home, weights, sums, gpu, tmp_path
):
    if gpu and (home == "none" or weights == "nvme"):
        pytest.skip("nothing is copied between device and host by its lanes")
    where = {"home": home, "weights": weights}
    if home != "none":
        where["settings"] = {"accumulate_on": sums}

    def work(rank, world):
        if stage == 3 and gpu:
            where["weights"] = "none"
        plain = windows(stage, tmp_path, rank, **where)
        if gpu:
            pretend_a_gpu()
        late_transfers()
        sys.setswitchinterval(1e-5)
        for repeat in range(times(1, 200)):
            dice.seed(1000 * rank + repeat)
            found = windows(stage, tmp_path, rank, shim=True, **where)
            for one, other, what in zip(found, plain, ("state", "masters", "model"), strict=True):
                assert_same(one, other, f"{what}, repeat {repeat}")
        return repeat + 1

    counts = run_ranks(work, 2, timeout=times(60, 900))
    say(f"late: stage {stage}, state {home}, weights {weights}, sums on {sums}"
        f"{', pretended GPU' * gpu}: {counts[0]} repeats, same bits")  # fmt: skip


def test_the_shim_catches_who_does_not_wait(tmp_path, monkeypatch):
    """Each wait taken out is noticed, or the test above means nothing."""

    def forget(what):
        if what == "events going down":
            offload.Lanes.wait_for = lambda *_: None
            offload.Lanes.settle = lambda *_: None
        elif what == "reads":
            wait = nvme.Transfer.wait
            nvme.Transfer.wait = lambda transfer: wait(transfer) if transfer.write else None
        elif what == "gathers":
            offload.Ranks.all_gather = lambda *_: lambda: None
        elif what == "buffers still being written":
            nvme.Transfer.done = lambda transfer: True
            wait = nvme.Transfer.wait
            nvme.Transfer.wait = lambda transfer: None if transfer.write else wait(transfer)

    def work(rank, world, what):
        gpu = what.startswith("events")
        where = {"home": "cpu" if gpu else "nvme"}
        plain = windows(2, tmp_path, rank, **where)
        if gpu:
            pretend_a_gpu()
        late_transfers()
        forget(what)
        for repeat in range(5):
            dice.seed(repeat)
            with contextlib.suppress(AssertionError, RuntimeError, ValueError):
                assert_same(windows(2, tmp_path, rank, shim=True, **where), plain, what)
                continue
            return True
        return False

    for what in ("events going down", "reads", "gathers", "buffers still being written"):
        assert all(run_ranks(work, 2, what)), f"not noticed: {what}"


# --- leaks ---


def held(least=1):
    """What this process holds: tensor bytes, descriptors, threads, resident bytes."""
    gc.collect()
    return {
        "tensors": sum(storages(least)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
    }


@pytest.mark.parametrize(("stage", "home", "weights"), EVERYWHERE)
@pytest.mark.parametrize("managed", [True, False])
def test_steps_do_not_pile_anything_up(stage, home, weights, managed, tmp_path):
    steps = times(60, 500)

    def work(rank, world):
        gc.freeze()
        zero, model = make(
            stage, tmp_path, home=home, weights=weights, managed_gradient_accumulation=managed
        )
        train(zero, model, rank, steps // 10)
        first = held()
        train(zero, model, rank, steps - steps // 10)
        deadline = time.monotonic() + 2
        while True:  # a pool's threads end a moment after their last transfer
            last = held()
            same = all(last[what] <= first[what] for what in ("tensors", "descriptors", "threads"))
            if same or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        zero.close()
        return first, last

    for first, last in run_ranks(work, 2, timeout=times(60, 300)):
        for what in ("tensors", "descriptors", "threads"):
            assert last[what] <= first[what], f"{what}: {first[what]} became {last[what]}"
        grown = last["resident"] - first["resident"]
        assert grown <= 2**21, f"resident memory grew by {grown} bytes in {steps} steps"
    say(f"leaks: stage {stage}, state {home}, weights {weights}, managed {managed}: {steps} steps, "
        f"{last['tensors']} tensor bytes, {last['descriptors']} descriptors, {last['threads']} "
        f"threads; resident {grown / 2**10:+.0f} KiB")  # fmt: skip
