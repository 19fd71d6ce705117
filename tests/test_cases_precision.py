"""Cases 28-33: 16-bit parameters with FP32 masters, and gradients that are not finite."""

import logging

import pytest
import torch

from cases import SUMS, Dot, expect

INF, NAN = float("inf"), float("nan")


def test_all_ranks_skip_a_window_that_overflows_in_one_ranks_slice():
    """The scale halves everywhere, a scheduler that asks waits, the next one counts (case 28)."""

    def train(run):
        model = Dot(torch.float16, p=8, q=8)
        zero = run.build(model, loss_scale="dynamic", initial_loss_scale=4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(zero, lambda epoch: 1.0)
        seen = []
        for xs in ({"p": 1, "q": INF}, {"p": 1, "q": 1}):
            run.window(xs)
            if zero.was_step_applied():
                scheduler.step()
            counts = zero.loss_scale, zero.skipped_steps, zero.global_steps, scheduler.last_epoch
            seen.append((run.weights(), *counts))
        return tuple(seen)

    skipped = {"p": 0, "q": 0}, 2.0, 1, 0, 0
    applied = {"p": -1, "q": -1}, 2.0, 1, 1, 1
    expect(train, 2, (skipped, applied))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}), (torch.optim.Adam, {"lr": 0.1})],
)
def test_a_window_that_is_not_finite_changes_no_bit_of_weights_and_state(optimizer, options):
    """First or in between: all is as if it had never been, and nothing has grown (case 29)."""

    def train(run, windows):
        model = Dot(a=5, b=3)
        groups = [{"params": [model.a]}, {"params": [model.b]}]
        zero = run.build(model, optimizer, param_groups=groups, **options)
        sizes = []
        for b in windows:
            run.window({"a": 1, "b": b})
            sizes.append(zero.memory())
        state = zero.state_dict()
        return run.weights(), state["master"], state["state"], zero.skipped_steps, sizes

    def both(run):
        clean, dirty = train(run, [1.0, 1.0]), train(run, [NAN, 1.0, NAN, 1.0])
        steps = {name: state.get("step") for name, state in dirty[2].items()}
        grown = len({str(size) for size in clean[4] + dirty[4]}) > 1
        return same_bits(clean[:3], dirty[:3]), steps, dirty[3], grown

    step = 2.0 if optimizer is torch.optim.Adam else None
    expect(both, 2, (True, {"a": step, "b": step}, 2, False), modes=SUMS)


def same_bits(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(same_bits, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, record):
        self.seen.append(record.getMessage())


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_bf16_skips_too_and_says_so_once(bad):
    """One element of one window: the counter, was_step_applied() and a log line tell (case 30)."""

    def train(run):
        lines = Lines()
        logging.getLogger("zero").addHandler(lines)
        zero = run.build(Dot(torch.bfloat16, w=7), torch.optim.Adam, lr=0.5)
        run.window({"w": [1.0] * 6 + [bad]})
        skipped = zero.was_step_applied(), zero.skipped_steps, run.weights(), run.masters()
        run.window({"w": 1})
        logging.getLogger("zero").removeHandler(lines)
        told = [line for line in lines.seen if "skip" in line]
        # One line for the whole run, not for each rank.
        same = len(told) == len(lines.seen) == (1 if run.rank == 0 else 0)
        return *skipped, zero.was_step_applied(), zero.skipped_steps, run.weights(), same

    zeros, moved = {"w": 0}, {"w": -0.5}
    expect(train, 2, (False, 1, zeros, zeros, True, 1, moved, True))


@pytest.mark.parametrize("world", [1, 2])
def test_small_gradients_after_large_ones_are_not_lost_in_bf16(world):
    """-256 would be the sum in bf16, where 256 + 1 is 256 (case 31)."""

    def train(run):
        run.build(Dot(torch.bfloat16, w=4))
        run.window({"w": 256}, *({"w": 1} for _ in range(8)))
        return run.masters(), run.weights()

    expect(train, world, ({"w": -264}, {"w": -264}), modes=SUMS)


def test_bf16_and_fp32_in_one_group_keep_their_dtypes():
    """An FP32 parameter is updated in FP32, a buffer is left alone (case 32)."""

    class Mixed(Dot):
        def __init__(self):
            one = torch.ones(3)
            super().__init__(a=one.bfloat16(), b=one)
            self.register_buffer("c", torch.tensor(0.1001))

    def train(run):
        run.build(Mixed(), lr=0.001)
        run.window({"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.5})
        weights = run.weights()
        dtypes = tuple(t.dtype for t in (*weights.values(), run.model.c))
        return weights, run.masters(), run.model.c, dtypes

    exact = (torch.tensor(1.0) - 0.001).item()
    dtypes = torch.bfloat16, torch.float32, torch.float32
    wanted = {"a": 1, "b": exact}, {"a": exact, "b": exact}, torch.tensor(0.1001), dtypes
    expect(train, 2, wanted)


def test_a_plain_backward_that_would_leave_out_the_scale_is_an_error():
    """At the backward, on every rank; zero_grad() and `zero.scale` are the way on (case 33)."""

    def train(run):
        zero = run.build(Dot(torch.float16, w=4), loss_scale=1024)
        x = 1 if run.rank == 0 else 3
        with pytest.raises(RuntimeError, match=r"scale"):
            run.model(w=x).backward()
        run.zero_grad()
        untouched = run.weights()
        if run.managed:
            zero.set_gradient_accumulation_boundary(True)
        zero.scale(run.model(w=x)).backward()
        zero.step()
        return untouched, run.weights(), zero.global_grad_norm

    expect(train, 2, ({"w": 0}, {"w": -2}, 4.0), rel=1e-6)
