"""Ranks that do different things: right where the rules allow it, else one error on every rank that
says who did what, and the way on. Never a hang: every test here has to end long before the group's
own limit would end it."""

import os
import time

import pytest
import torch
from torch import nn

from models import STAGES
from offload import RanksDisagree
from ranks import all_raise, assert_same_everywhere, run_ranks

SOON = 10  # seconds


@pytest.fixture(params=list(STAGES))
def stage(request):
    return request.param


class Times(nn.Module):
    """The gradient is x, whatever the weight is."""

    def __init__(self, size=5):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return (self.w * x).sum()


class Branches(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.branches = nn.ModuleList(Times() for _ in range(count))

    def forward(self, x, order):
        return sum(self.branches[i](x) for i in order)


def sgd(stage, model, **options):
    """Every branch is a bucket, and in stage 3 a unit, of its own."""
    options = {"lr": 1.0, "weight_decay": 0.0, "reduce_bucket_size": 5, **options}
    options.setdefault("managed_gradient_accumulation", False)
    return STAGES[stage](model, torch.optim.SGD, **options)


def full(value):
    return torch.full((5,), float(value))


def values(zero):
    """The first element of every branch; all elements are equal, and so are all ranks."""
    weights = list(zero.model_state_dict().values())
    assert all(torch.equal(w, w[0].expand(w.shape)) for w in weights)
    return [w[0].item() for w in weights]


def agreed(work, world, **options):
    return assert_same_everywhere(run_ranks(work, world, timeout=SOON, **options))


# Branches


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("managed", [True, False])
def test_a_branch_may_run_on_one_rank_only(stage, managed):
    """What a rank did not use counts as zero in the mean; what nobody used does not move."""

    def work(rank, world):
        model = Branches(4)
        zero = sgd(stage, model, momentum=0.5, managed_gradient_accumulation=managed)
        zero.backward(model(full(2 + rank), [0, 1] if rank == 0 else [2, 1]))
        zero.step()
        first = values(zero)
        zero.backward(model(full(2), [1]))
        zero.step()
        return first, values(zero)

    assert agreed(work, 2) == ([-1.0, -2.5, -1.5, 0.0], [-1.0, -5.75, -1.5, 0.0])


@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_may_use_nothing_at_all(stage):
    """Its loss has no parameter of ours in it; it still takes part in every reduction."""

    def work(rank, world):
        model = Branches()
        zero = sgd(stage, model)
        nothing = torch.ones((), requires_grad=True) * 1
        zero.backward(nothing if rank == 1 else model(full(4), [0, 1, 2]))
        zero.step()
        return values(zero), zero.global_grad_norm

    found, norm = agreed(work, 2)
    assert found == [-2.0] * 3
    assert norm == pytest.approx(2 * 15**0.5, rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("lacks", [0, 5, 9])
def test_one_rank_may_be_many_buckets_ahead_of_one_that_lacks_a_branch(stage, lacks):
    """Whoever waits for a reduction must not keep the other from coming to it."""

    def work(rank, world):
        model = Branches(10)
        zero = sgd(stage, model, managed_gradient_accumulation=True)
        for late in range(world):
            order = [i for i in range(10) if rank != late or i != lacks]
            zero.backward(model(full(2), order))
            zero.step()
        return values(zero)

    wanted = [-2.0 if i == lacks else -4.0 for i in range(10)]
    assert agreed(work, 2) == wanted


class ManyExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.choice, self.after = Row(), Pair(), Row()

    def forward(self, x, experts):
        return self.after(self.choice(self.before(x), experts)).sum()


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Plus() for _ in range(6)))

    def forward(self, x):
        return self.layers(x)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Plus() for _ in range(2))

    def forward(self, x, experts):
        return sum(self.experts[i](x) for i in experts) / len(experts)


@pytest.mark.parametrize(("stage", "leaf"), [(1, ()), (2, ()), (3, (Pair,))])
@pytest.mark.parametrize("small", [True, False], ids=["own buckets", "a larger one"])
def test_experts_deep_in_a_model_hold_nobody_up(stage, leaf, small):
    """Rank 0 uses both experts, rank 1 one of them; layers before and after are many."""

    def work(rank, world):
        model = ManyExperts()
        bucket = 5 if small else 12
        zero = sgd(stage, model, leaf_modules=leaf, reduce_bucket_size=bucket)
        for window in range(2):
            zero.backward(model(full(0), [0, 1] if (rank + window) % 2 == 0 else [1]))
            zero.step()
        return values(zero)

    assert agreed(work, 2) == [-2.0] * 6 + [-0.5, -1.5] + [-2.0] * 6


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_may_be_ready_in_another_order_on_every_rank(stage, world):
    """Bitwise the same as in one order, with overlap too."""

    def work(rank, world):
        results = []
        for orders in ([[0, 1, 2, 3]] * 3, [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]]):
            model = Branches(4)
            zero = sgd(stage, model, managed_gradient_accumulation=True)
            torch.manual_seed(rank)
            for _ in range(3):
                zero.backward(model(torch.randn(5), orders[rank]))
                zero.step()
            results.append(zero.model_state_dict())
        return assert_same_everywhere(results)

    agreed(work, world)


class Experts(nn.Module):
    """Whoever is chosen multiplies; `shared` follows."""

    def __init__(self):
        super().__init__()
        self.choice, self.shared = Choice(), Times()

    def forward(self, x, expert):
        return self.choice(x, expert) + self.shared(x)


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Times() for _ in range(3))

    def forward(self, x, expert):
        return self.experts[expert](x)


def swap_experts(rank, zero, model):
    """Two windows; in the second each rank takes the other's expert. Nobody takes the third."""
    for window in range(2):
        zero.backward(model(full(2), (rank + window) % 2))
        zero.step()
    return values(zero)


@pytest.mark.parametrize(("stage", "leaf"), [(1, ()), (2, ()), (3, (Choice,))])
def test_ranks_may_use_other_experts_in_stage_3_named_as_a_leaf(stage, leaf):
    def work(rank, world):
        model = Experts()
        zero = sgd(stage, model, leaf_modules=leaf)
        return swap_experts(rank, zero, model)

    assert agreed(work, 2) == [-2.0, -2.0, 0.0, -4.0]


def test_stage_3_is_right_or_an_error_where_experts_are_no_leaf():
    def work(rank, world):
        model = Experts()
        zero = sgd(3, model)
        start = time.monotonic()
        try:
            return swap_experts(rank, zero, model)
        except RuntimeError as error:
            assert time.monotonic() - start < SOON
            assert "rank 0" in str(error) and "rank 1" in str(error)
            return None

    assert agreed(work, 2) in ([-2.0, -2.0, 0.0, -4.0], None)


def test_stage_3_is_right_or_an_error_where_one_rank_skips_a_module():
    """Also: after the error zero_grad() is enough."""

    def work(rank, world):
        model = Branches()
        zero = sgd(3, model)
        try:
            zero.backward(model(full(2), [0, 1, 2] if rank == 0 else [0, 2]))
            zero.step()
            wanted = [-2.0, -1.0, -2.0]
        except RuntimeError as error:
            assert "rank 0" in str(error) and "rank 1" in str(error)
            wanted = [0.0] * 3
        zero.zero_grad()
        assert values(zero) == wanted
        zero.backward(model(full(1), [0, 1, 2]))
        zero.step()
        assert values(zero) == [w - 1 for w in wanted]

    run_ranks(work, 2, timeout=SOON)


# Models that differ

DIFFERENT = {
    "order": lambda rank: nn.ModuleDict({n: Times() for n in ("ab" if rank else "ba")}),
    "names": lambda rank: nn.ModuleDict({n: Times() for n in ("ab" if rank else "ac")}),
    "shapes": lambda rank: nn.ModuleDict({"a": Times(5 + rank)}),
    "transposed": lambda rank: nn.Linear(3 + rank, 4 - rank, bias=False),
    "dtypes": lambda rank: Times().to([torch.float32, torch.bfloat16][rank]),
    "frozen": lambda rank: Times().requires_grad_(not rank),
    "one parameter more": lambda rank: Branches(2 + rank),
}


def refused(construct, match):
    """Requires construct(stage, rank) to raise in every stage, on every rank, soon."""

    def work(rank, world):
        for stage in STAGES:
            with pytest.raises(ValueError, match=match):
                construct(stage, rank)

    run_ranks(work, 2, timeout=SOON)


@pytest.mark.parametrize("what", list(DIFFERENT))
def test_models_that_differ_are_an_error_on_all(what):
    refused(lambda stage, rank: sgd(stage, DIFFERENT[what](rank)), "differ.*rank 0 has.*rank 1 has")


def test_other_param_groups_on_other_ranks_are_an_error_on_all():
    def construct(stage, rank):
        model = Branches(2)
        one, two = model.branches
        groups = [{"params": one.parameters()}, {"params": two.parameters()}]
        sgd(stage, model, param_groups=groups if rank == 0 else groups[::-1])

    refused(construct, "differ.*rank 0 has.*rank 1 has")


ARGUMENTS = {
    "bucket size": lambda rank: {"reduce_bucket_size": 5 + 20 * rank},
    "reduce dtype": lambda rank: {"reduce_dtype": [torch.float32, torch.bfloat16][rank]},
    "mode": lambda rank: {"managed_gradient_accumulation": bool(rank)},
    "window": lambda rank: {
        "managed_gradient_accumulation": True,
        "gradient_accumulation_steps": 1 + rank,
    },
    "loss scale": lambda rank: {"loss_scale": 1.0 + rank},
    "clipping": lambda rank: {"gradient_clipping": 1.0 + rank},
}


@pytest.mark.parametrize("what", list(ARGUMENTS))
def test_other_arguments_on_other_ranks_are_an_error_on_all(what):
    """Else: a hang, or other weights here and there."""
    refused(lambda stage, rank: sgd(stage, Branches(2), **ARGUMENTS[what](rank)), "rank 0.*rank 1")


def test_a_refusal_on_one_rank_is_an_error_on_all():
    """Rank 1's model shares memory without a tie, and only rank 1 can see it."""

    def construct(stage, rank):
        model = Branches(2)
        if rank == 1:
            model.branches[1].w = nn.Parameter(model.branches[0].w.data)
        sgd(stage, model)

    refused(construct, "rank 1.*share memory")


# Other calls on other ranks


@pytest.mark.parametrize(("mine", "others"), [(3, 2), (2, 3), (1, 0), (0, 1)])
def test_stage_1_does_not_care_who_calls_backward_how_often(mine, others):
    """It reduces at the step: the mean of the ranks' sums."""

    def work(rank, world):
        model = Branches()
        zero = sgd(1, model)
        for _ in range(mine if rank == 0 else others):
            zero.backward(model(full(2), [0, 1, 2]))
        zero.step()
        return values(zero)

    assert agreed(work, 2) == [-float(mine + others)] * 3


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("mine", "others"), [(3, 2), (1, 2), (1, 0)])
def test_other_counts_of_backward_are_an_error_on_all_that_says_who_did_what(stage, mine, others):
    def work(rank, world):
        model = Branches()
        zero = sgd(stage, model)
        losses = [model(full(2), [0, 1, 2]) for _ in range(3)]  # forwards are no disagreement
        for _ in range(mine if rank == 0 else others):
            zero.backward(losses.pop())
        zero.step()

    late, early = (0, 1) if mine > others else (1, 0)
    for message in all_raise(work, 2, RanksDisagree, "ranks", within=SOON):
        assert f"rank {late}: backward" in message, message
        assert f"rank {early}: " in message.replace(f"rank {early}: backward", ""), message


@pytest.mark.parametrize(
    ("stage", "managed"), [(1, True), (2, True), (2, False), (3, True), (3, False)]
)
def test_a_step_against_a_backward_is_an_error_on_all_and_zero_grad_the_way_on(stage, managed):
    """Only stage 1 sends nothing in an unmanaged backward, and has nothing to disagree about."""

    def work(rank, world):
        model = Branches()
        zero = sgd(stage, model, managed_gradient_accumulation=managed)
        losses = [model(full(2), [0, 1, 2]) for _ in range(2)]
        zero.backward(losses.pop())
        with pytest.raises(RanksDisagree, match="rank 0: .*rank 1: backward"):
            zero.step() if rank == 0 else zero.backward(losses.pop())
        zero.zero_grad()
        assert values(zero) == [0.0] * 3
        zero.backward(model(full(1), [0, 1, 2]))
        zero.step()
        assert values(zero) == [-1.0] * 3

    run_ranks(work, 2, timeout=SOON)


def test_a_step_against_a_forward_is_an_error_on_all_in_stage_3():
    def work(rank, world):
        model = Branches()
        zero = sgd(3, model)
        zero.backward(model(full(2), [0, 1, 2]))
        if rank == 0:
            zero.step()
        else:
            model(full(2), [0, 1, 2])

    for message in all_raise(work, 2, RanksDisagree, "ranks", within=SOON):
        assert "rank 0: " in message and "rank 1: " in message and "gather" in message


def test_a_forward_more_on_one_rank_is_an_error_on_all_in_stage_3():
    """A loop of 3 against a loop of 2 without gradients, and then everybody steps."""

    def work(rank, world):
        model = Branches()
        zero = sgd(3, model)
        with torch.no_grad():
            for _ in range(3 - rank):
                model(full(1), [0, 1, 2])
        zero.backward(model(full(1), [0, 1, 2]))
        zero.step()

    all_raise(work, 2, RanksDisagree, "rank 0: .*rank 1: ", within=SOON)


@pytest.mark.parametrize("stage", [1, 2])
def test_forwards_on_one_rank_only_are_nobodys_business(stage):
    def work(rank, world):
        model = Branches()
        zero = sgd(stage, model)
        with torch.no_grad():
            for _ in range(3 - rank):
                model(full(1), [0, 1, 2])
        zero.backward(model(full(1), [0, 1, 2]))
        zero.step()
        return values(zero)

    assert agreed(work, 2) == [-1.0] * 3


def read_gathered(zero):
    with zero.gathered():
        pass


COLLECTIVE = {
    "state_dict": lambda zero: zero.state_dict(),
    "model_state_dict": lambda zero: zero.model_state_dict(),
    "gathered": read_gathered,
    "step": lambda zero: zero.step(),
}


@pytest.mark.parametrize("call", list(COLLECTIVE))
def test_a_collective_call_on_one_rank_against_a_backward_is_an_error_on_all(call):
    def work(rank, world):
        for stage in (2, 3):
            model = Branches()
            zero = sgd(stage, model)
            loss = model(full(1), [0, 1, 2])
            with pytest.raises(RanksDisagree, match=r"rank 0: .*rank 1: backward"):
                COLLECTIVE[call](zero) if rank == 0 else zero.backward(loss)

    run_ranks(work, 2, timeout=SOON)


@pytest.mark.parametrize("load", ["load_state_dict", "load_model_state_dict"])
def test_a_rank_with_an_error_of_its_own_that_also_does_something_else_hangs_nobody(load):
    """What rank 0 loads does not fit, so it raises; the others run a backward meanwhile."""

    def work(rank, world):
        for stage in (2, 3):
            model = Branches()
            zero = sgd(stage, model)
            loss = model(full(1), [0, 1, 2])
            with pytest.raises((RuntimeError, ValueError)):
                getattr(zero, load)({}) if rank == 0 else zero.backward(loss)

    run_ranks(work, 2, timeout=SOON)


def test_of_three_ranks_the_message_says_what_each_did():
    def work(rank, world):
        model = Branches()
        zero = sgd(2, model)
        loss = model(full(1), [0, 1, 2])
        if rank == 0:
            zero.backward(loss)
        elif rank == 1:
            zero.step()
        else:
            zero.state_dict()

    messages = all_raise(work, 3, RanksDisagree, "ranks", within=SOON)
    assert len(set(messages)) == 1
    for rank, what in enumerate(("backward", "boundary|step", "state_dict")):
        assert any(f"rank {rank}: {w}" in messages[0] for w in what.split("|")), messages[0]


# Exceptions


class Bomb(torch.autograd.Function):
    """Raises in its backward, where it is armed."""

    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed:
            raise ArithmeticError("boom on purpose")
        return grad, None


class Fragile(nn.Module):
    """Three layers in a row, the first of which may raise in its backward or in its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Plus(), Plus(), Plus()

    def forward(self, x, backward=False, forward=False):
        x = Bomb.apply(self.first(x), backward)
        x = self.second(x)
        if forward:
            raise ArithmeticError("boom on purpose")
        return self.third(x).sum()


class Plus(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return x + self.w


def fail(zero, model, rank, who, plain):
    """A window's last backward, which raises on the ranks of `who`, and what all hear of it."""
    loss = model(full(0), backward=rank in who)
    with pytest.raises((ArithmeticError, RuntimeError)) as caught:
        loss.backward() if plain else zero.backward(loss)
    return str(caught.value)


WHO = pytest.mark.parametrize("who", [(0,), (1,), (0, 1)], ids=str)
# Where a backward talks to the other ranks, so that all hear when it fails on one.
TALKING = pytest.mark.parametrize(
    ("stage", "managed"), [(1, True), (2, True), (2, False), (3, False)]
)


@WHO
@TALKING
@pytest.mark.parametrize("good", [0, 2])
def test_after_an_exception_in_a_backward_zero_grad_is_enough(stage, managed, who, good):
    """All earlier work of the window is dropped, whoever failed; nothing of it stays in memory."""

    def work(rank, world):
        model = Fragile()
        zero = sgd(
            stage,
            model,
            managed_gradient_accumulation=managed,
            gradient_accumulation_steps=good + 1,
        )
        idle = zero.memory()
        for _ in range(good):
            zero.backward(model(full(0)))
            if managed:
                zero.step()
        message = fail(zero, model, rank, who, plain=False)
        assert "boom" in message or f"rank {who[0]}" in message, message
        with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
            zero.step()
        zero.zero_grad()
        assert values(zero) == [0.0] * 3
        assert zero.memory() == idle
        for _ in range(good + 1):
            zero.backward(model(full(0)))
            if managed:
                zero.step()
        zero.step()
        assert values(zero) == [-1.0 if managed else -1.0 - good] * 3

    run_ranks(work, 2, timeout=SOON)


@WHO
@TALKING
def test_after_an_exception_in_a_plain_backward_zero_grad_is_enough_too(stage, managed, who):
    """The rank that failed reports at its zero_grad(), for which the others wait."""

    def work(rank, world):
        model = Fragile()
        zero = sgd(stage, model, managed_gradient_accumulation=managed)
        for _ in range(2):
            fail(zero, model, rank, who, plain=True)
            zero.zero_grad()
        assert values(zero) == [0.0] * 3
        zero.backward(model(full(0)))
        zero.step()
        assert values(zero) == [-1.0] * 3

    run_ranks(work, 2, timeout=SOON)


def test_stage_1_goes_on_too_where_a_backward_tells_nobody(who=(0, 1)):
    """Unmanaged, its backward sends nothing: every rank calls zero_grad() by itself."""

    def work(rank, world):
        for plain in (False, True):
            model = Fragile()
            zero = sgd(1, model)
            zero.backward(model(full(0)))
            fail(zero, model, rank, who, plain)
            zero.zero_grad()
            zero.backward(model(full(0)))
            zero.step()
            assert values(zero) == [-1.0] * 3

    run_ranks(work, 2, timeout=SOON)


@pytest.mark.parametrize("managed", [True, False])
def test_a_failed_plain_backward_never_becomes_part_of_a_step(stage, managed):
    """It left some of the gradients; a caller who goes on without zero_grad() gets an error."""

    def work(rank, world):
        model = Fragile()
        zero = sgd(stage, model, managed_gradient_accumulation=managed)
        fail(zero, model, rank, (0, 1), plain=True)
        with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
            zero.step()
        zero.zero_grad()
        assert values(zero) == [0.0] * 3

    run_ranks(work, 2, timeout=SOON)


def test_after_an_exception_in_a_forward_on_all_ranks_work_goes_on(stage):
    def work(rank, world):
        model = Fragile()
        zero = sgd(stage, model)
        idle = zero.memory()
        for _ in range(3):
            with pytest.raises(ArithmeticError):
                model(full(0), forward=True)
            assert zero.memory() == idle, "something stays gathered"
        zero.backward(model(full(0)))
        zero.step()
        return values(zero)

    assert agreed(work, 2) == [-1.0] * 3


@pytest.mark.parametrize("who", [0, 1])
def test_an_exception_in_a_forward_on_one_rank_hangs_nobody(stage, who):
    """It retries, and runs a window of its own against the other's: right, or an error."""

    def work(rank, world):
        model = Fragile()
        zero = sgd(stage, model)
        if rank == who:
            with pytest.raises(ArithmeticError):
                model(full(0), forward=True)
        try:
            zero.backward(model(full(0)))
            zero.step()
            assert values(zero) == [-1.0] * 3
        except RuntimeError as error:
            assert stage == 3, error  # elsewhere a forward is nobody's business

    run_ranks(work, 2, timeout=SOON)


def test_a_rank_that_dies_in_backward_does_not_keep_the_rest_waiting(stage):
    """Its connections close; nobody waits for the group's limit."""

    def work(rank, world):
        model = Fragile()
        zero = sgd(stage, model)
        if rank == 1:
            os._exit(7)
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            zero.backward(model(full(0)))
            zero.step()
        assert time.monotonic() - start < SOON
        os._exit(8)

    run_ranks(work, 2, timeout=SOON, expect_exit={0: 8, 1: 7})


def test_a_rank_that_sleeps_is_waited_for_no_longer_than_the_groups_limit(stage=2):
    def work(rank, world):
        model = Fragile()
        zero = sgd(stage, model)
        start = time.monotonic()
        if rank == 1:
            time.sleep(4)
            return
        with pytest.raises(RuntimeError):
            zero.backward(model(full(0)))
            zero.step()
        seconds = time.monotonic() - start
        assert 1 < seconds < 4, seconds
        raise Ended

    class Ended(Exception):
        pass

    with pytest.raises(AssertionError, match="Ended"):
        run_ranks(work, 2, timeout=SOON, group_limit=2)


@TALKING
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_one_ranks_backward_reaches_the_others_as_an_error(stage, managed, error):
    def work(rank, world):
        model = Fragile()
        zero = sgd(stage, model, managed_gradient_accumulation=managed)

        def hook(grad):
            if rank == 1:
                raise error("stop")

        model.first.w.register_hook(hook)
        with pytest.raises(error if rank == 1 else RuntimeError):
            zero.backward(model(full(0)))
        zero.zero_grad()
        assert values(zero) == [0.0] * 3

    run_ranks(work, 2, timeout=SOON)


@pytest.mark.parametrize("who", [(0,), (1,)], ids=str)
def test_an_edit_in_gathered_that_raises_on_one_rank_raises_on_all(stage, who):
    def work(rank, world):
        model = Branches()
        zero = sgd(stage, model)
        with pytest.raises((ArithmeticError, RuntimeError)), zero.gathered(modifier_rank=0):
            model.branches[0].w.fill_(7.0)
            if rank in who:
                raise ArithmeticError("boom on purpose")
        assert values(zero) == [0.0] * 3
        zero.backward(model(full(1), [0, 1, 2]))
        zero.step()
        assert values(zero) == [-1.0] * 3

    run_ranks(work, 2, timeout=SOON)
