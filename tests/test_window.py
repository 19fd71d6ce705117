"""Windows and their boundary: who ends one, what belongs to it, and what it must leave alone."""

import itertools
import math

import pytest
import torch
from torch import nn

from models import (
    SGD,
    AdamW,
    Dot,
    Heads,
    Odd,
    assert_same,
    build,
    copied,
    named,
    on_all_tiers,
    param_groups,
    recording,
    rows,
)
from ranks import all_raise, run_ranks

UNMANAGED = {"managed_gradient_accumulation": False}
MOMENTUM = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
ADAM = {"lr": 0.05, "weight_decay": 0.1}
OPTIMIZERS = [(SGD, MOMENTUM), (AdamW, ADAM)]


@pytest.fixture
def everywhere(tmp_path):
    """Runs body(make, rank) on two ranks, for every stage and tier."""

    def run(body, world=2, **choice):
        return run_ranks(on_all_tiers(body, tmp_path, **choice), world)

    return run


def value(model, zero):
    """The weights of a Dot, which must all be the same, as one number."""
    weights = zero.model_state_dict()["w"]
    assert (weights == weights[0]).all(), weights
    return weights[0].item()


def x(number):
    return torch.full((5,), float(number))


def odd(seed=0):
    torch.manual_seed(seed)
    return Odd()


def loss_of(model, rank, index):
    return model(rows(rank, index)).square().mean()


def both_modes(make, *args, **options):
    """Yields (mode, zero, model), managed and then unmanaged, over equal models."""
    for managed in (True, False):
        model = odd()
        zero = make(
            model,
            *args,
            param_groups=param_groups(model),
            managed_gradient_accumulation=managed,
            **options,
        )
        yield ("managed" if managed else "unmanaged"), zero, model


# Counting


def run_windows(zero, model, rank, windows, managed):
    """Windows of so many backward calls each; the state after each of them."""
    states, index = [], itertools.count()
    for calls in windows:
        for call in range(1, calls + 1):
            if managed:
                zero.set_gradient_accumulation_boundary(call == calls)
            zero.backward(loss_of(model, rank, next(index)), scale_wrt_gas=False)
            if managed:
                zero.step()
        if not managed:
            zero.step()
        states.append((zero.state_dict(), zero.global_grad_norm, zero.global_steps))
    return states


@pytest.mark.parametrize("optimizer, numbers", OPTIMIZERS)
def test_unmanaged_windows_of_any_length_are_managed_ones_with_a_manual_boundary(
    everywhere, optimizer, numbers
):
    windows = [2, 5, 3, 1]

    def body(make, rank):
        seen, options = [], {"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}
        for mode, zero, model in both_modes(make, optimizer, **numbers, **options):
            seen.append(run_windows(zero, model, rank, windows, mode == "managed"))
        assert_same(*seen, "managed and unmanaged")
        assert [steps for _, _, steps in seen[0]] == [1, 2, 3, 4]

    everywhere(body)


def test_a_window_is_the_mean_over_ranks_of_the_sum_over_calls(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, **UNMANAGED)
        for calls, wanted in (([1, 2, 3], -33.0), ([4], -33.0 - 22.0), ([5, 6], -55.0 - 60.5)):
            for number in calls:
                zero.backward(model(x(number * (10 if rank else 1))))
            zero.step()
            assert value(model, zero) == wanted, calls

    everywhere(body)


def test_managed_mode_divides_by_the_number_of_micro_steps_and_ends_every_last_one(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, gradient_accumulation_steps=4)
        for number, wanted in zip([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, -2.5] * 2, strict=True):
            wanted -= 2.5 * (number > 4) + 4 * (number == 8)
            assert zero.is_gradient_accumulation_boundary() == (number in (4, 8))
            assert zero.micro_steps == (number - 1) % 4
            zero.backward(model(x(number)))
            zero.step()
            assert value(model, zero) == wanted, f"after {number}"
            assert zero.was_step_applied() == (number in (4, 8))
        assert (zero.global_steps, zero.skipped_steps, zero.micro_steps) == (2, 0, 0)

    everywhere(body, homes=["none", "nvme"])


def test_several_backward_calls_in_one_micro_step_add_up(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, gradient_accumulation_steps=4)
        for done, numbers in enumerate(([1], [2, 3], [4], [5, 6, 7])):
            assert zero.micro_steps == done
            for number in numbers:  # each call carries a quarter
                zero.backward(model(x(number)))
            zero.step()
        assert value(model, zero) == -7.0
        zero.backward(model(x(1)))
        zero.step()
        assert zero.micro_steps == 1, "the second window began anew"

    everywhere(body, homes=["none", "nvme"])


def test_several_backward_calls_on_one_graph_add_up(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, **UNMANAGED)
        loss = model(x(1))
        zero.backward(loss, retain_graph=True)
        zero.backward(2 * loss)
        zero.step()
        assert value(model, zero) == -3.0

    everywhere(body, homes=["none", "nvme"])


def test_micro_steps_counts_steps_when_managed_and_backward_calls_when_not(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, **UNMANAGED)
        for calls in range(3):
            assert zero.micro_steps == calls
            zero.backward(model(x(1)))
        zero.step()
        assert zero.micro_steps == 0
        zero.backward(model(x(1)))
        zero.zero_grad()
        assert zero.micro_steps == 0

    everywhere(body, homes=["none"])


def test_step_changes_nothing_off_the_boundary(everywhere):
    def body(make, rank):
        model = odd()
        zero = make(model, AdamW, gradient_accumulation_steps=3, **ADAM)
        before = zero.model_state_dict()
        for call in range(2):
            zero.backward(loss_of(model, rank, call))
            zero.step()
            assert_same(dict(before), dict(zero.model_state_dict()), "weights")
            assert not zero.was_step_applied()
            assert zero.global_steps == zero.skipped_steps == 0

    everywhere(body, homes=["none", "nvme"])


def test_a_manual_boundary_rules_until_the_window_closes_and_then_the_counter(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, gradient_accumulation_steps=4)
        zero.set_gradient_accumulation_boundary(True)  # after one of four: a quarter of it
        assert zero.is_gradient_accumulation_boundary()
        zero.backward(model(x(4)))
        zero.step()
        assert value(model, zero) == -1.0
        assert not zero.is_gradient_accumulation_boundary()
        zero.set_gradient_accumulation_boundary(False)  # six of four
        for _ in range(5):
            zero.backward(model(x(4)))
            zero.step()
            assert value(model, zero) == -1.0
        zero.set_gradient_accumulation_boundary(True)
        zero.backward(model(x(4)))
        zero.step()
        assert value(model, zero) == -7.0
        for call in range(4):  # the counter again
            assert zero.is_gradient_accumulation_boundary() == (call == 3)
            zero.backward(model(x(4)))
            zero.step()
        assert value(model, zero) == -11.0

    everywhere(body)


def test_zero_grad_ends_a_manual_boundary_too(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, gradient_accumulation_steps=4)
        zero.set_gradient_accumulation_boundary(True)
        zero.zero_grad()
        assert not zero.is_gradient_accumulation_boundary()

    everywhere(body, homes=["none"])


class Spy(SGD):
    """Asks the Zero optimizer whether this is the boundary, from inside the update."""

    zero, heard = None, None

    def step(self, closure=None):
        if Spy.zero is not None:
            Spy.heard.append(Spy.zero.is_gradient_accumulation_boundary())
        return super().step(closure)


def test_the_boundary_is_true_only_while_step_runs_when_unmanaged(everywhere):
    def body(make, rank):
        model, Spy.zero, Spy.heard = Dot(), None, []
        zero = Spy.zero = make(model, Spy, lr=1.0, **UNMANAGED)
        assert not zero.is_gradient_accumulation_boundary()
        zero.backward(model(x(1)))
        zero.finalize_gradient_accumulation_boundary()
        assert not zero.is_gradient_accumulation_boundary()
        zero.step()
        assert not zero.is_gradient_accumulation_boundary()
        assert Spy.heard
        assert all(Spy.heard)
        Spy.zero = None

    everywhere(body, homes=["none", "nvme"])


# Parameters without a gradient


def plain_heads(world, optimizer, numbers, windows):
    """The model that the plain optimizer makes of the same windows."""
    model = heads()
    plain = optimizer(model.parameters(), **numbers)
    for index, head in enumerate(windows):
        for rank in range(world):
            (model(rows(rank, index, 5), head).square().mean() / world).backward()
        plain.step()
        plain.zero_grad()
    return model


def heads():
    torch.manual_seed(0)
    return Heads()


def of_head(state, head):
    """What a state_dict() says of the parameters of one head."""
    state = {kind: state[kind] for kind in ("state", "master")}
    return {k: {n: v for n, v in of.items() if f".{head}." in n} for k, of in state.items()}


@pytest.mark.parametrize("optimizer, numbers", OPTIMIZERS)
def test_an_idle_head_moves_by_nothing(everywhere, optimizer, numbers):
    windows = "abaab"

    def body(make, rank):
        truth = named(plain_heads(2, optimizer, numbers, windows))
        for managed, size in ((True, 1), (False, 10**6)):
            model = heads()
            options = {"managed_gradient_accumulation": managed, "reduce_bucket_size": size}
            zero = make(model, optimizer, **numbers, **options)
            last, seen = zero.state_dict(), set()
            for index, head in enumerate(windows):
                zero.backward(model(rows(rank, index, 5), head).square().mean())
                zero.step()
                idle, now = "b" if head == "a" else "a", zero.state_dict()
                assert_same(of_head(last, idle), of_head(now, idle), f"idle head {idle}")
                name = f"heads.{head}.weight"
                assert not torch.equal(last["master"][name], now["master"][name])
                last, seen = now, seen | {head}
                have = {n.split(".")[1] for n in now["state"] if "heads" in n}
                assert have == seen, "a head has state from its first gradient on"
            for name, wanted in truth.items():
                far = (last["master"][name] - wanted).norm()
                assert far <= 1e-5 * wanted.norm(), f"{name} is off by {far}"

    everywhere(body)


def test_an_idle_head_counts_no_step(everywhere):
    def body(make, rank):
        model = heads()
        zero = make(model, AdamW, **ADAM, **UNMANAGED)
        for index, head in enumerate("aabaa"):
            zero.backward(model(rows(rank, index, 5), head).square().mean())
            zero.step()
        steps = {n: s["step"] for n, s in zero.state_dict()["state"].items()}
        assert {n: steps[n] for n in steps if n.endswith("weight")} == {
            "body.weight": 5,
            "heads.a.weight": 4,
            "heads.b.weight": 1,
        }

    everywhere(body)


def test_a_head_that_one_rank_alone_used_moves_on_all(everywhere):
    def body(make, rank):
        model, start = heads(), copied(named(heads()))
        zero = make(model, lr=1.0, weight_decay=0.1, **UNMANAGED)
        zero.backward(model(rows(0, 0, 5), "b" if rank else "a").square().mean())
        zero.step()
        state = zero.state_dict()
        moved = {n for n in start if not torch.equal(start[n], state["master"][n])}
        assert moved == set(start), "both heads, with half of the gradient each"

    everywhere(body, stages=[1, 2])  # stage 3 wants the same units on all ranks


def test_sums_of_an_earlier_window_never_come_back(everywhere):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, a, b):
            loss = (self.a * a).sum()
            return loss + (self.b * b).sum() if b else loss

    def body(make, rank):
        model = Two()
        zero = make(model, lr=1.0, **UNMANAGED)
        for a, b, wanted in ((1, 10, (-1, -10)), (2, 0, (-3, -10)), (1, 5, (-4, -15))):
            zero.backward(model(a, b))
            zero.step()
            weights = zero.model_state_dict()
            assert tuple(weights[n][0].item() for n in "ab") == wanted
            assert zero.global_grad_norm == pytest.approx(math.sqrt(3 * (a * a + b * b)))

    everywhere(body)


# The finalizer


def test_an_early_finalizer_changes_nothing_however_often_it_is_called(everywhere):
    def body(make, rank):
        states = []
        for calls in (0, 1, 3):
            model = odd()
            zero = make(model, AdamW, gradient_clipping=0.3, **ADAM, **UNMANAGED)
            for step in range(2):
                zero.backward(loss_of(model, rank, step))
                for _ in range(calls):
                    zero.finalize_gradient_accumulation_boundary()
                zero.step()
            states.append((zero.state_dict(), zero.global_grad_norm))
        for state in states[1:]:
            assert_same(states[0], state, "without and with an early finalizer")

    everywhere(body, homes=["none", "nvme"])


def test_an_early_finalizer_tells_the_norm_so_that_the_window_can_be_dropped(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, momentum=0.9, weight_decay=0.1, **UNMANAGED)
        zero.backward(model(x(1000)))
        zero.finalize_gradient_accumulation_boundary()
        assert zero.global_grad_norm == pytest.approx(1000 * math.sqrt(5))
        zero.zero_grad()
        zero.step()
        assert value(model, zero) == 0.0
        assert zero.state_dict()["state"] == {}
        zero.backward(model(x(1)))
        zero.step()
        assert value(model, zero) == -1.0
        assert zero.state_dict()["state"]["w"]["momentum_buffer"].tolist() == [1.0] * 5

    everywhere(body)


def test_a_backward_after_the_finalizer_opens_the_window_again(everywhere):
    def body(make, rank):
        for where in ("host", "device"):
            model = Dot()
            settings = {"accumulate_on": where}
            zero = make(model, lr=1.0, settings=settings, **UNMANAGED)
            zero.backward(model(x(3)))
            zero.finalize_gradient_accumulation_boundary()
            zero.backward(model(x(4)))
            zero.finalize_gradient_accumulation_boundary()
            assert zero.global_grad_norm == pytest.approx(7 * math.sqrt(5))
            zero.backward(model(x(5)))
            zero.step()
            assert zero.global_grad_norm == pytest.approx(12 * math.sqrt(5))
            assert value(model, zero) == -12.0

    everywhere(body)


def test_a_finalizer_that_came_too_early_leaves_out_no_parameter_that_came_after(everywhere):
    def body(make, rank):
        model, start = heads(), copied(named(heads()))
        zero = make(model, lr=1.0, **UNMANAGED)
        zero.backward(model(rows(rank, 0, 5), "a").square().mean())
        zero.finalize_gradient_accumulation_boundary()
        zero.backward(model(rows(rank, 1, 5), "b").square().mean())
        zero.step()
        after = zero.model_state_dict()
        assert not any(torch.equal(start[n], after[n]) for n in start)

    everywhere(body)


def test_managed_boundary_work_is_done_when_the_last_backward_returns(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, gradient_accumulation_steps=2)
        zero.backward(model(x(2)))
        zero.step()
        assert zero.global_grad_norm == 0.0
        zero.backward(model(x(4)))
        assert zero.global_grad_norm == pytest.approx(3 * math.sqrt(5))
        zero.finalize_gradient_accumulation_boundary()  # allowed at the boundary, and idempotent
        zero.step()
        assert value(model, zero) == -3.0

    everywhere(body)


def test_a_managed_window_that_is_finalized_can_be_added_to_or_dropped(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0)
        zero.backward(model(x(2)))
        zero.backward(model(x(4)))
        zero.step()
        assert value(model, zero) == -6.0
        zero.backward(model(x(9)))
        zero.zero_grad()
        zero.backward(model(x(1)))
        zero.step()
        assert value(model, zero) == -7.0

    everywhere(body, homes=["none", "cpu"])


def test_the_finalizer_of_an_empty_window_is_no_error(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, **UNMANAGED)
        zero.finalize_gradient_accumulation_boundary()
        assert zero.global_grad_norm == 0.0
        zero.backward(model(x(1)))
        zero.step()
        assert value(model, zero) == -1.0

    everywhere(body, homes=["none", "nvme"])


# The wrong call in the wrong mode


def test_the_boundary_setter_has_no_meaning_when_unmanaged(everywhere):
    def body(make, rank):
        states = []
        for wrong in (False, True):
            model = odd()
            zero = make(model, **MOMENTUM, **UNMANAGED)
            for step in range(2):
                for flag in (True, False) if wrong else ():
                    with pytest.raises(RuntimeError, match="set_gradient_acc.*step()") as caught:
                        zero.set_gradient_accumulation_boundary(flag)
                    assert "boundary" in str(caught.value)
                    assert not zero.is_gradient_accumulation_boundary()
                zero.backward(loss_of(model, rank, step))
                zero.step()
            states.append(zero.state_dict())
        assert_same(*states, "without and with a wrong call")

    everywhere(body, homes=["none", "nvme"])


def test_the_finalizer_raises_off_the_boundary_and_changes_nothing(everywhere):
    def body(make, rank):
        states = []
        for wrong in (False, True):
            model = odd()
            zero = make(model, gradient_accumulation_steps=3, **MOMENTUM)
            for call in range(6):
                if wrong and call % 3 < 2:
                    with pytest.raises(RuntimeError, match="boundary"):
                        zero.finalize_gradient_accumulation_boundary()
                zero.backward(loss_of(model, rank, call))
                if wrong and call % 3 < 2:
                    with pytest.raises(RuntimeError, match="boundary"):
                        zero.finalize_gradient_accumulation_boundary()
                zero.step()
            states.append((zero.state_dict(), zero.global_grad_norm))
        assert_same(*states, "without and with a wrong call")

    everywhere(body, homes=["none", "nvme"])


def test_stage_1_refuses_to_overlap_with_a_backward_that_it_does_not_know_to_be_the_last(tmp_path):
    def work(rank, world):
        build(1, Dot(), tmp_path, overlap_comm=True, **UNMANAGED)

    for message in all_raise(work, 2, ValueError, "overlap_comm"):
        assert "managed_gradient_accumulation" in message
        assert "last" in message


def test_a_state_dict_in_mid_window_raises_instead_of_losing_sums(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, **UNMANAGED)
        zero.backward(model(x(1)))
        with pytest.raises(RuntimeError, match="window"):
            zero.state_dict()
        zero.step()
        assert zero.state_dict()["master"]["w"].tolist() == [-1.0] * 5

    everywhere(body, homes=["none", "cpu"])


# Windows without a gradient, and windows that are dropped


@pytest.mark.parametrize("optimizer, numbers", OPTIMIZERS)
def test_a_step_without_a_gradient_is_no_update(everywhere, optimizer, numbers):
    def body(make, rank):
        for mode, zero, model in both_modes(make, optimizer, **numbers):
            for full in (False, True):
                if full:
                    zero.backward(loss_of(model, rank, 0))
                    zero.step()
                before = zero.state_dict()
                for _ in range(2):
                    zero.zero_grad()
                    zero.step()
                    assert not zero.was_step_applied(), mode
                    assert zero.global_grad_norm == 0.0, mode
                    assert (zero.global_steps, zero.skipped_steps) == (int(full), 0), mode
                assert_same(before, zero.state_dict(), f"{mode}, before and after empty windows")

    everywhere(body)


def test_zero_grad_drops_the_window_wherever_its_sums_live(everywhere):
    def body(make, rank):
        for where in ("host", "device"):
            model = Dot()
            zero = make(model, lr=1.0, settings={"accumulate_on": where}, **UNMANAGED)
            for set_to_none in (True, False):
                zero.backward(model(x(5)))
                zero.backward(model(x(7)))
                zero.zero_grad(set_to_none=set_to_none)
                assert model.w.grad is None or not model.w.grad.any()
                zero.backward(model(x(2)))
                zero.step()
                zero.zero_grad()  # right after a step there is nothing to drop
            assert value(model, zero) == -4.0

    everywhere(body)


def test_zero_grad_warns_once_in_the_middle_of_a_managed_window(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, gradient_accumulation_steps=2)
        zero.zero_grad()  # nothing to lose yet, and warnings are errors here
        zero.backward(model(x(5)))
        zero.step()
        with pytest.warns(UserWarning, match="managed window"):
            zero.zero_grad()
        zero.backward(model(x(2)))
        zero.step()
        zero.zero_grad()  # has warned before
        assert value(model, zero) == 0.0
        for number in (2, 4):
            zero.backward(model(x(number)))
            zero.step()
        zero.zero_grad()
        assert value(model, zero) == -3.0

    everywhere(body, homes=["none"])


def test_zero_grad_does_not_warn_where_nobody_counts(everywhere):
    def body(make, rank):
        for options in (UNMANAGED, {}):
            model = Dot()
            zero = make(model, **options)
            zero.backward(model(x(5)))
            zero.zero_grad()
            zero.backward(model(x(5)))
            zero.step()
            zero.zero_grad()

    everywhere(body, homes=["none"])


def test_a_managed_loop_without_step_between_its_backward_calls_is_told_once(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, gradient_accumulation_steps=3)
        for _ in range(3):
            zero.backward(model(x(1)))
        with pytest.warns(UserWarning, match="managed_gradient_accumulation=False") as told:
            zero.step()
        assert "step()" in str(told[0].message)
        for _ in range(3):
            zero.backward(model(x(1)))
        zero.step()

    everywhere(body, homes=["none"])


def test_fewer_backward_calls_than_a_window_has_are_told_nothing(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, gradient_accumulation_steps=3)
        for calls in (2, 1, 2, 2):
            for _ in range(calls):
                zero.backward(model(x(1)))
            zero.step()

    everywhere(body, homes=["none"])


# step, backward and their arguments


def test_step_runs_a_closure_with_gradients_on_and_returns_its_loss(everywhere):
    def body(make, rank):
        for options in (UNMANAGED, {}):
            model = Dot()
            zero = make(model, lr=1.0, **options)

            def closure(model=model, zero=zero):
                zero.zero_grad()
                return zero.backward(model(x(2)) + 7)

            assert torch.is_tensor(loss := zero.step(closure))
            assert loss.item() == 7.0
            assert value(model, zero) == -2.0
            assert zero.was_step_applied()
            assert zero.step() is None

    everywhere(body, homes=["none", "cpu"])


def test_backward_returns_the_loss_as_the_window_sees_it(everywhere):
    def body(make, rank):
        model = Dot(start=1.0)
        zero = make(model, lr=1.0, gradient_accumulation_steps=4, loss_scale=8.0)
        for options, wanted in (({}, 2.5), ({"scale_wrt_gas": False}, 10.0)):
            loss = zero.backward(model(x(2)), **options)
            assert loss.item() == wanted
            assert not loss.requires_grad
            zero.step()

    everywhere(body, homes=["none"])


def test_backward_takes_a_gradient_for_a_loss_that_is_no_number(everywhere):
    class Product(Dot):
        def forward(self, x):
            return self.w * x

    def body(make, rank):
        model = Product()
        zero = make(model, lr=1.0, **UNMANAGED)
        zero.backward(model(x(2)), gradient=torch.full((5,), 3.0))
        zero.step()
        assert value(model, zero) == -6.0

    everywhere(body, homes=["none"])


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_scaling_by_a_loss_scale_comes_out_of_the_gradient_and_of_the_norm(everywhere, scale):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, loss_scale=scale, **UNMANAGED)
        zero.backward(model(x(1)))
        zero.scale(model(x(2))).backward()
        zero.step()
        assert zero.global_grad_norm == pytest.approx(3 * math.sqrt(5))
        assert value(model, zero) == -3.0

    everywhere(body)


def test_plain_backward_works_where_no_scaling_is_due(everywhere):
    def body(make, rank):
        for options in (UNMANAGED, {}):
            model = odd()
            zero = make(model, **MOMENTUM, **options)
            other = odd()
            truth = make(other, **MOMENTUM, **options)
            for step in range(2):
                for call in range(2):
                    loss_of(model, rank, 2 * step + call).backward()
                    truth.backward(loss_of(other, rank, 2 * step + call))
                zero.step()
                truth.step()
                assert_same(truth.state_dict(), zero.state_dict(), f"step {step}")

    everywhere(body, homes=["none", "nvme"])


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, {"loss_scale": 8.0, **UNMANAGED}]
)
def test_plain_backward_raises_where_it_would_leave_out_a_scale(everywhere, options):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, **options)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="backward"):
                model(x(100)).backward()
            zero.zero_grad()
        assert value(model, zero) == 0.0
        for number in (2, 4)[: options.get("gradient_accumulation_steps", 1)]:
            zero.backward(model(x(number)))
            zero.step()
        assert value(model, zero) == (-3.0 if "loss_scale" not in options else -2.0)

    everywhere(body, homes=["none"])


# Norms and clipping


class Tied(nn.Module):
    """Two names of one matrix, an odd vector, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(7, 7), nn.Linear(7, 7, bias=False)
        self.outside.weight = self.inside.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        return self.outside(torch.tanh(self.inside(x)))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", [Odd, Tied])
def test_the_norm_is_that_of_torch_before_clipping(everywhere, kind, world):
    def new():
        torch.manual_seed(0)
        return kind()

    def body(make, rank):
        plain = new()
        for other in range(world):
            (plain(rows(other, 0)).square().mean() / world).backward()
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
        assert wanted > 0.1, "clipping is due"
        model = new()
        options = {"gradient_clipping": 0.1, "reduce_bucket_size": 40, "lr": 1.0}
        zero = make(model, recording(SGD), **options, **UNMANAGED)
        zero.backward(model(rows(rank, 0)).square().mean())
        zero.finalize_gradient_accumulation_boundary()
        assert zero.global_grad_norm == pytest.approx(wanted, rel=1e-6)
        zero.step()
        assert zero.global_grad_norm == pytest.approx(wanted, rel=1e-6), "of the last window"
        for name, state in zero.state_dict()["state"].items():
            truth = plain.get_parameter(name).grad
            assert (state["given"] - truth).norm() <= 1e-6 * truth.norm(), name

    everywhere(body, world, homes=["none", "nvme"])


# Optimizer conventions


def test_a_learning_rate_scheduler_works_on_it_and_reaches_the_update(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, **UNMANAGED)
        assert isinstance(zero, torch.optim.Optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(zero, step_size=1, gamma=0.5)
        for wanted in (-8.0, -12.0, -14.0):
            zero.backward(model(x(8)))
            zero.step()
            scheduler.step()  # torch warns if it cannot see that the optimizer has stepped
            assert value(model, zero) == wanted
        assert zero.param_groups[0]["lr"] == 0.125

    everywhere(body)


def test_a_scheduler_of_momentum_reaches_the_update_too(everywhere):
    def body(make, rank):
        model = Dot()
        zero = make(model, lr=1.0, momentum=0.9, **UNMANAGED)
        scheduler = torch.optim.lr_scheduler.CyclicLR(
            zero, base_lr=1.0, max_lr=1.0, step_size_up=1, base_momentum=0.0, max_momentum=0.5
        )
        velocity = wanted = 0.0
        for _ in range(3):
            momentum = zero.param_groups[0]["momentum"]
            zero.backward(model(x(1)))
            zero.step()
            scheduler.step()
            velocity = velocity * momentum + 1.0
            wanted -= velocity
            assert value(model, zero) == wanted
        assert velocity > 1.0

    everywhere(body, homes=["none", "nvme"])


def test_a_change_in_one_param_group_reaches_that_group_alone(everywhere):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Dot(start=1.0), Dot(start=1.0)

        def forward(self, x):
            return self.a(x) + self.b(x)

    def body(make, rank):
        model = Pair()
        groups = [{"params": model.a.parameters()}, {"params": model.b.parameters(), "lr": 0.5}]
        zero = make(model, param_groups=groups, lr=1.0, **UNMANAGED)

        def step():
            zero.backward(model(x(1)))
            zero.step()
            weights = zero.model_state_dict()
            return weights["a.w"][0].item(), weights["b.w"][0].item()

        assert step() == (0.0, 0.5)
        zero.param_groups[0]["lr"] = 0.25
        assert step() == (-0.25, 0.0)
        zero.param_groups[1]["weight_decay"] = 2.0
        assert step() == (-0.5, -0.5)
        assert step() == (-0.75, -0.5)  # -0.5 - 0.5 * (1 + 2 * -0.5)

    everywhere(body, homes=["none", "nvme"])
