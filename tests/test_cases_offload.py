"""Cases 8-13: sums and state that live on the host, and copies that take their time."""

import contextlib

import pytest
import torch

import offload
from cases import BOTH, MANAGED, OFFLOADED, SUMS, Dot, agrees, expect

OFFLOADED_SUMS = [mode for mode in SUMS if mode.offload != "none"]


@pytest.mark.parametrize("world", [1, 2])
def test_windows_add_up_on_the_host_whatever_their_lengths(world):
    """Neither overwritten nor counted off by one from the second window on (case 8)."""

    def train(run):
        run.build(Dot(w=4))
        after = []
        for xs in ((1, 2, 3), (4,), (5, 6)):
            run.window(*({"w": x} for x in xs))
            after.append(run.weights())
        return tuple(after)

    expect(train, world, ({"w": -6}, {"w": -10}, {"w": -21}), modes=OFFLOADED_SUMS)


@pytest.mark.parametrize("world", [1, 2])
def test_managed_windows_add_up_on_the_host(world):
    """By the counter alone, twice in a row (case 8)."""

    def train(run):
        zero = run.build(Dot(w=4), gradient_accumulation_steps=4)
        after = []
        for x in range(1, 9):
            zero.backward(run.model(w=x))
            zero.step()
            after.append(run.weights())
        return tuple(after)

    wanted = tuple({"w": w} for w in (0, 0, 0, -2.5, -2.5, -2.5, -2.5, -9))
    managed = [mode for mode in MANAGED if mode.offload != "none"]
    expect(train, world, wanted, modes=managed)


@pytest.mark.parametrize(
    ("optimizer", "options", "state"),
    [
        (torch.optim.SGD, {}, {}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.5}, {"momentum_buffer": 1}),
        (
            torch.optim.Adam,
            {"lr": 1.0, "eps": 0.0},
            {"step": 1.0, "exp_avg": 0.1, "exp_avg_sq": 0.001},
        ),
    ],
)
def test_a_step_without_a_gradient_is_no_update(optimizer, options, state):
    """At the very start and after a real one; no momentum, decay or step count moves (case 9)."""

    def train(run):
        zero = run.build(Dot(w=4), optimizer, **options)
        seen = []
        for xs in ([], [{"w": 1}], []):
            run.window(*xs) if xs else run.step()
            seen.append((run.weights(), zero.was_step_applied(), zero.global_steps))
        return *seen, zero.global_grad_norm, run.state("w")

    wanted = ({"w": 0}, False, 0), ({"w": -1}, True, 1), ({"w": -1}, False, 1), 0.0, state
    expect(train, 2, wanted, rel=1e-6)


def test_a_parameter_without_a_gradient_has_no_part_in_the_norm_and_does_not_move():
    """b is exactly the other rank's slice; decay would move it too (case 10)."""
    start = torch.tensor([0.1234567, -7.654321])

    def train(run):
        model = Dot(a=2, b=start)
        zero = run.build(model, gradient_clipping=1.0, weight_decay=0.1)
        run.window({"a": [3.0, 4.0]})
        after = run.weights()
        return zero.global_grad_norm, after["a"], torch.equal(after["b"], start)

    expect(train, 2, (5.0, [-0.6, -0.8], True), rel=1e-6)


def test_gradients_of_an_earlier_window_never_come_back():
    """Idle in a window means untouched in it, and out of its norm (case 11)."""

    def train(run):
        zero = run.build(Dot(a=(), b=()))
        seen = []
        for xs in ({"a": 1, "b": 10}, {"a": 2}, {"b": 5}):
            run.window(xs)
            seen.append((run.weights(), zero.global_grad_norm))
        return tuple(seen)

    wanted = (
        ({"a": -1, "b": -10}, 101**0.5),
        ({"a": -3, "b": -10}, 2.0),
        ({"a": -3, "b": -15}, 5.0),
    )
    expect(train, 2, wanted, rel=1e-6, modes=SUMS)


# A device whose copies to the host arrive late, for machines without one


class OnDevice(torch.Tensor):
    """Says that it is on a GPU; a non-blocking copy from it lands when its event is waited for."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            target, source = args
            target.fill_(torch.nan)
            LateStream.queued.append(lambda: target.copy_(source.as_subclass(torch.Tensor)))
            return target
        return super().__torch_function__(func, types, args, kwargs)

    def record_stream(self, stream):
        """Memory is not given away here while a copy waits: the copy holds it."""


class LateStream:
    """Carries nothing out before somebody waits: for an event, in order, or for all of it."""

    queued: list = []

    def wait_stream(self, other):
        if other is not self:
            LateStream.finish(len(LateStream.queued))

    def record_event(self):
        return LateEvent(len(LateStream.queued))

    @staticmethod
    def finish(count):
        for copy in LateStream.queued[:count]:
            if copy is not None:
                copy()
        LateStream.queued[:count] = [None] * count


class LateEvent:
    def __init__(self, count):
        self.count = count

    def synchronize(self):
        LateStream.finish(self.count)


@contextlib.contextmanager
def late_copies():
    """Gradients come out of the reduction on a device that is late; Lanes has a stream to it."""
    LateStream.queued = []
    compute = LateStream()
    compute.wait_stream = lambda other: None  # the GPU waits, the host does not
    with pytest.MonkeyPatch.context() as patch:
        init, reduce = offload.Lanes.__init__, offload.Ranks.reduce_scatter

        def with_stream(lanes, *args):
            init(lanes, *args)
            lanes.stream = LateStream()
            lanes.stream.wait_stream = lambda other: None  # the copy starts after the computation

        def on_device(ranks, full):
            wait = reduce(ranks, full)
            return lambda: wait().as_subclass(OnDevice)

        patch.setattr(offload.Lanes, "__init__", with_stream)
        patch.setattr(offload.Ranks, "reduce_scatter", on_device)
        patch.setattr(torch.cuda, "current_stream", lambda *args: compute)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        yield


def test_a_copy_to_the_host_is_waited_for_before_it_is_read():
    """Read too early, it is NaN here; buckets are smaller than the model (case 12)."""

    def train(run):
        with late_copies():
            run.build(Dot(a=64, b=64, c=64), reduce_bucket_size=64)
            xs = {"a": 1, "b": 2, "c": 3}
            run.window(xs)
            first = run.weights()
            run.window(xs, xs, xs)
            second = run.weights()
            run.zero.close()
            return first, second, len(LateStream.queued) > 0

    wanted = {"a": -1, "b": -2, "c": -3}, {"a": -4, "b": -8, "c": -12}, True
    # Sums that stay on the device go to a file by way of one small buffer, with ordinary copies.
    modes = [mode for mode in OFFLOADED_SUMS if (mode.offload, mode.sums) != ("nvme", "device")]
    expect(train, 2, wanted, modes=modes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pin", BOTH)
def test_a_host_buffer_is_as_large_as_asked_for(dtype, pin):
    """65 MiB and a bit, which a power of two would nearly double (case 13)."""
    lanes = offload.Lanes(torch.device("cpu"), pin)
    numel = 65 * 2**18 + 3
    held = lanes.host(numel, dtype).untyped_storage().nbytes()
    assert held == numel * dtype.itemsize


def test_host_memory_is_what_the_state_needs_and_pageable_memory_gives_the_same_numbers():
    """Master, two moments, and in stages 2 and 3 an open window's sum: FP32 slices (case 13)."""

    def train(run, pin_memory):
        model, settings = Dot(torch.bfloat16, a=5001, b=3), {"pin_memory": pin_memory}
        zero = run.build(model, torch.optim.Adam, settings, lr=0.1)
        run.backward(a=1, b=2)
        held = zero.memory()["host"]
        run.step()
        return run.weights(), held["optimizer"], held["grads"] if run.mode.stage > 1 else None

    def both(run):
        pinned, pageable = train(run, True), train(run, False)
        return pinned[1:], agrees(pageable, pinned)

    piece = 4 * 2502  # bytes of a rank's slice: half of 5004 elements
    cpu = [mode for mode in OFFLOADED if mode.offload == "cpu"]
    for sums, modes in (
        (None, [mode for mode in cpu if mode.stage == 1]),
        (piece, [mode for mode in cpu if mode.stage > 1]),
    ):
        expect(both, 2, ((3 * piece, sums), True), modes=modes)
