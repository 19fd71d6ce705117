"""Cases 1-7: what a window of several backward calls adds up to, and who ends it."""

import pytest
import torch

from cases import MANAGED, MODES, SUMS, UNMANAGED, Dot, Mode, expect, live_storages


def test_the_step_gets_the_sum_of_all_backward_calls_not_the_last_one():
    """-16.5 would be the last one only, -66 the sum over ranks instead of the mean (case 1)."""

    def train(run):
        run.build(Dot(w=4))
        factor = 1 if run.rank == 0 else 10
        run.window(*({"w": factor * i} for i in (1, 2, 3)))
        first = run.weights()
        run.window({"w": 4 if run.rank == 0 else 8})  # one call alone: nothing is left over
        return first, run.weights()

    expect(train, 2, ({"w": -33}, {"w": -39}), modes=SUMS)


def test_a_managed_window_is_the_mean_over_its_micro_steps():
    """The same by the counter alone, which divides by A (case 1)."""

    def train(run):
        zero = run.build(Dot(w=4), gradient_accumulation_steps=3)
        for i in (1, 2, 3):
            zero.backward(run.model(w=i if run.rank == 0 else 10 * i))
            zero.step()
        return run.weights()

    expect(train, 2, {"w": -11}, rel=1e-6, modes=MANAGED)


def test_a_reduced_gradient_is_not_reduced_again_and_leaves_nothing_behind():
    """p lies in one rank's slice and q in the other's; stages 2 and 3 keep a slice (case 2)."""

    def train(run):
        run.build(Dot(p=1000, q=1000))
        kept = []
        for _ in range(3):
            run.backward(p=1, q=1)
            kept.append(run.model.p.grad is run.model.q.grad is None)
            held = run.zero.memory()
            kept.append(held["device"]["grads"] + held["host"]["grads"])
        run.step()
        return run.weights(), *kept

    kept = (True, 4000) * 3
    expect(train, 2, ({"p": -3, "q": -3}, *kept), modes=[m for m in MODES if m.stage > 1])


@pytest.mark.parametrize("stage", [2, 3])
def test_no_full_size_gradient_is_alive_between_backward_calls(stage):
    """As the garbage collector sees it: the whole parameters of stage 2, else slices (case 2)."""

    def train(run):
        run.build(Dot(p=1000, q=1000))
        full = []
        for _ in range(3):
            run.backward(p=1, q=1)
            full.append(live_storages(8000, [8000] if stage == 2 else []))
        return tuple(full)

    wanted = ([8000] if stage == 2 else [],) * 3
    expect(train, 2, wanted, modes=[Mode(stage, "none", False)])


class Twice(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.m = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
        torch.nn.init.zeros_(self.m.weight)

    def forward(self, x):
        return sum(self.m(torch.full((1,), float(each), dtype=self.m.weight.dtype)) for each in x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world", "first", "second"), [(1, -5, -15), (2, -27.5, -82.5)])
def test_a_module_used_twice_is_reduced_after_its_last_use(dtype, world, first, second):
    """Both uses of m count, in a window of one backward call and in one of two (case 3)."""

    def train(run):
        run.build(Twice(dtype))
        x = (2, 3) if run.rank == 0 else (20, 30)
        run.window({"x": x})
        one = run.weights()
        run.window({"x": x}, {"x": x})
        return one, run.weights()

    expect(train, world, ({"m.weight": first}, {"m.weight": second}))


def test_unmanaged_the_boundary_cannot_be_set_and_the_attempt_changes_nothing():
    """The error says what the boundary is instead (case 4)."""

    def train(run):
        zero = run.build(Dot(w=4))
        for flag in (True, False):
            with pytest.raises(RuntimeError, match=r"set_gradient_accumulation_boundary.*step\(\)"):
                zero.set_gradient_accumulation_boundary(flag)
        before = zero.is_gradient_accumulation_boundary()
        run.window({"w": 1})
        return before, run.weights(), zero.is_gradient_accumulation_boundary()

    expect(train, 2, (False, {"w": -1}, False), modes=UNMANAGED)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_the_window_wherever_its_sums_live(set_to_none):
    """In the middle, after the boundary's work, after a step, and before an empty one (case 5)."""

    def train(run):
        zero = run.build(Dot(w=4))
        run.backward(w=5)
        run.zero_grad(set_to_none=set_to_none)
        pending = zero.micro_steps
        run.backward(w=2)
        run.step()
        one = run.weights()
        zero.zero_grad(set_to_none=set_to_none)
        run.step()
        two = run.weights()
        run.backward(w=7)
        if run.managed:
            zero.set_gradient_accumulation_boundary(True)
        zero.finalize_gradient_accumulation_boundary()  # the sums have gone down by now
        run.zero_grad(set_to_none=set_to_none)
        run.step()
        return pending, one, two, run.weights()

    expect(train, 2, (0, {"w": -2}, {"w": -2}, {"w": -2}), modes=SUMS)


def test_the_models_own_zero_grad_means_the_same_in_every_stage():
    """The sums are the optimizer's, not p.grad, so it leaves them alone: in all modes (case 5)."""

    def train(run):
        run.build(Dot(w=4))
        run.backward(w=5)
        run.model.zero_grad()
        run.backward(w=2)
        run.step()
        return run.weights()

    expect(train, 2, {"w": -7})


def test_a_managed_window_goes_on_over_the_end_of_an_epoch():
    """Two of four micro-steps change nothing and stay pending; four give their mean (case 6)."""

    def train(run):
        zero = run.build(Dot(w=4), gradient_accumulation_steps=4)
        for x in (2, 4):
            zero.backward(run.model(w=x))
            zero.step()
        half = run.weights(), zero.micro_steps, zero.was_step_applied()
        for x in (6, 8):
            zero.backward(run.model(w=x))
            zero.step()
        return *half, run.weights(), zero.micro_steps, zero.was_step_applied()

    expect(train, 2, ({"w": 0}, 2, False, {"w": -5}, 0, True), modes=MANAGED)


def test_an_unmanaged_window_is_as_long_as_it_is():
    """The caller's own division counts, no other (case 6)."""

    def train(run):
        zero = run.build(Dot(w=4))
        for x in (2, 4):
            zero.backward(run.model(w=x) / 2)
        pending = zero.micro_steps
        zero.step()
        return pending, run.weights(), zero.micro_steps

    expect(train, 2, (2, {"w": -3}, 0), modes=UNMANAGED)


@pytest.mark.parametrize("when", ["before the last backward", "after it"])
def test_a_managed_window_that_is_ended_early_keeps_the_divisor(when):
    """Its losses were divided by A as they came; finalizing off the boundary raises (case 6)."""

    def train(run):
        zero = run.build(Dot(w=4), gradient_accumulation_steps=4)
        zero.backward(run.model(w=2))
        with pytest.raises(RuntimeError, match="boundary"):
            zero.finalize_gradient_accumulation_boundary()
        zero.step()
        if when == "before the last backward":
            zero.set_gradient_accumulation_boundary(True)
        zero.backward(run.model(w=4))
        zero.set_gradient_accumulation_boundary(True)
        zero.finalize_gradient_accumulation_boundary()
        norm = zero.global_grad_norm
        zero.step()
        return norm, run.weights(), zero.is_gradient_accumulation_boundary()

    expect(train, 2, (3.0, {"w": -1.5}, False), rel=1e-6, modes=MANAGED)


class CountingAdam(torch.optim.Adam):
    steps = 0

    def step(self, closure=None):
        CountingAdam.steps += 1
        return super().step(closure)


def test_norm_clipping_and_optimizer_run_once_a_window():
    """Four backward calls are to the optimizer what one with their sum is (case 7)."""

    def train(run, *calls):
        zero = run.build(Dot(w=4), CountingAdam, lr=0.1, gradient_clipping=1e9)
        CountingAdam.steps = 0
        run.window(*({"w": x} for x in calls))
        steps = CountingAdam.steps
        return run.weights(), run.state("w"), zero.global_grad_norm, steps

    def both(run):
        four, one = train(run, 1, 2, 3, 4), train(run, 10)
        same = agree_to_the_bit(four[0], one[0]) and agree_to_the_bit(four[1], one[1])
        return (*four, same and four[2:] == one[2:])

    state = {"step": 1.0, "exp_avg": 1.0, "exp_avg_sq": 0.1}
    expect(both, 2, ({"w": -0.1}, state, 20.0, 1, True), rel=1e-6)


def agree_to_the_bit(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k] for k in a
    )
