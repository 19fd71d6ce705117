"""Cases 47-53: ranks that start, run, count or fail differently, and a rank that is alone."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist

from cases import MODES, PARAMS, UNMANAGED, Chain, Dot, Mode, Run, agrees, expect, results
from offload import RanksDisagree
from ranks import all_raise, run_ranks

REDUCE_ON_BACKWARD = [mode for mode in UNMANAGED if mode.stage > 1]


def test_the_norm_is_that_of_the_whole_gradient():
    """3, 4 or 3.5 would be one rank's or the mean of both; padding is no part of it (case 47)."""

    def train(run):
        zero = run.build(Dot(w=3), gradient_clipping=1.0)
        run.window({"w": [3.0, 0.0, 4.0]})
        return zero.global_grad_norm, run.weights()

    expect(train, 2, (5.0, {"w": [-0.6, 0, -0.8]}), rel=1e-6)


def test_padding_stays_zero():
    """Ten steps of Adam: it never enters the norm, no state has a fourth element (case 47)."""

    def train(run):
        zero = run.build(Dot(w=3), torch.optim.Adam, lr=0.1, eps=0.0, weight_decay=0.1)
        norms = []
        for _ in range(10):
            run.window({"w": [3.0, 1.0, 4.0]}, {"w": 0})
            norms.append(zero.global_grad_norm)
        last = zero.buckets[-1].part.read() if run.rank == 1 else {}
        pads = tuple(row[-1].item() for row in last.values())
        shapes = {tuple(t.shape) for t in (*run.masters().values(), run.state("w")["exp_avg"])}
        return norms[0], max(norms) == min(norms), set(pads) <= {0.0}, shapes

    expect(train, 2, (26**0.5, True, True, {(3,)}), rel=1e-6)


class Seeded(Dot):
    def __init__(self, value):
        super().__init__(w=torch.full((5,), value))
        self.register_buffer("c", torch.full((2,), value))


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_starts_from_the_first_ones_values(world):
    """Weights, buffers and masters, whatever each was initialised with (case 48)."""

    def train(run):
        run.build(Seeded(run.rank + 1.0))
        start = run.weights(), run.masters(), run.model.c.clone()
        run.window({"w": 1})
        return *start, run.weights()

    ones = {"w": 1}
    expect(train, world, (ones, ones, 1, {"w": 0}), modes=PARAMS)


class Experts(torch.nn.Module):
    """Uses one of two, each a module of its own."""

    def __init__(self):
        super().__init__()
        self.e0, self.e1 = Dot(w=4), Dot(w=4)

    def forward(self, expert, x):
        return getattr(self, f"e{expert}")(w=x)


def use_experts(run, **options):
    run.build(Experts(), **options)
    seen = []
    for window in range(2):
        run.window({"expert": (run.rank + window) % 2, "x": 2})
        seen.append((*run.weights().values(),))
    return tuple(seen)


def test_ranks_that_use_other_experts_train_all_of_them():
    """Stage 3 with one unit around the experts, by size or by leaf_modules (case 49)."""

    def train(run):
        leaf = {"leaf_modules": (Experts,), "reduce_bucket_size": 4} if run.mode.stage == 3 else {}
        return use_experts(run), use_experts(run, **leaf)

    expect(train, 2, (((-1, -1), (-2, -2)),) * 2)


def test_ranks_that_gather_other_experts_end_right_or_in_an_error():
    """Stage 3 with a unit for each expert and no leaf_modules: within 30 s (case 49)."""

    def train(run):
        try:
            return use_experts(run, reduce_bucket_size=4)
        except RanksDisagree as error:
            return "error" if "rank 0" in str(error) and "rank 1" in str(error) else str(error)

    for mode in (Mode(3, "none", True), Mode(3, "none", False)):
        values = [value for *_, value in results(train, 2, modes=[mode], timeout=30)]
        assert values == ["error"] * 2 or agrees(tuple(values), (((-1, -1), (-2, -2)),) * 2), values


def test_stage_1_takes_other_numbers_of_backward_calls():
    """It reduces once, at the step: the mean of the sums (case 50)."""

    def train(run):
        run.build(Dot(w=4))
        for x in (1, 2, 3) if run.rank == 0 else (10, 20):
            run.backward(w=x)
        run.step()
        return run.weights()

    expect(train, 2, {"w": -18}, modes=[mode for mode in UNMANAGED if mode.stage == 1])


@pytest.mark.parametrize("mode", [m for m in REDUCE_ON_BACKWARD if m.offload != "cpu"], ids=str)
def test_other_numbers_of_backward_calls_are_an_error_on_both_ranks(mode, tmp_path):
    """It says who did what; no gradient is paired with the step's traffic (case 50)."""

    def train(rank, world):
        run = Run(mode, rank, world, str(tmp_path))
        run.build(Dot(w=4))
        for x in (1, 2, 3) if rank == 0 else (10, 20):
            run.backward(w=x)
        run.step()

    all_raise(train, 2, RanksDisagree, r"rank 0: .*(backward|gather).*; rank 1: .*(boundary|step)")


def test_other_numbers_of_forwards_without_gradient():
    """Stages 1 and 2 do not mind; in stage 3, which gathers, it is an error on both (case 50)."""

    def train(run):
        run.build(Dot(w=4))
        with torch.no_grad():
            for _ in range(3 if run.rank == 0 else 2):
                run.model(w=1)
        try:
            run.window({"w": 1})
            return run.weights()
        except RanksDisagree as error:
            return "error" if "rank 0" in str(error) and "rank 1" in str(error) else str(error)

    expect(train, 2, {"w": -1}, modes=[Mode(1, "none", False), Mode(2, "none", False)])
    for mode in (Mode(3, "none", False), Mode(3, "none", False, "nvme")):
        expect(train, 2, "error", modes=[mode], timeout=30)


# Collectives that take their time


class Late:
    """An operation that happens when it is waited for, and whose input nobody may touch before."""

    def __init__(self, start, inputs, outputs):
        self.start, self.inputs = start, inputs
        self.before = [tensor.clone() for tensor in inputs]
        for tensor in outputs:
            tensor.fill_(torch.nan)

    def wait(self):
        for tensor, before in zip(self.inputs, self.before, strict=True):
            assert torch.equal(tensor, before), "a buffer was written to while it was being sent"
        self.start()
        return True


@contextlib.contextmanager
def late_collectives():
    exchange, send = dist.all_to_all_single, dist.broadcast

    def late_exchange(out, sent, async_op=False, **options):
        if not async_op:
            return exchange(out, sent, **options)
        return Late(lambda: exchange(out, sent, **options), [sent], [out])

    def late_send(tensor, async_op=False, **options):
        if not async_op:
            return send(tensor, **options)
        mine = dist.get_rank() == options["group_src"]
        inputs, outputs = ([tensor], []) if mine else ([], [tensor])
        return Late(lambda: send(tensor, **options), inputs, outputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", late_exchange)
        patch.setattr(dist, "broadcast", late_send)
        yield


def train_forty(run, **options):
    run.build(Dot(**dict.fromkeys(FORTY, 1000)), reduce_bucket_size=1500, **options)
    run.window({name: (1 if run.rank == 0 else 3) * float(i) for i, name in enumerate(FORTY)})
    return run.weights()


FORTY = {f"w{i}": -2 * i for i in range(40)}
OVERLAPPING = [m for m in MODES if m.offload == m.param == "none" and (m.stage > 1 or m.managed)]


def test_a_buffer_is_not_written_or_read_while_its_reduction_is_under_way():
    """With collectives that happen at wait(), so that reading too early reads NaN (case 51)."""

    def train(run):
        with late_collectives():
            return train_forty(run, overlap_comm=True)

    modes = [*OVERLAPPING, Mode(2, "cpu", False), Mode(2, "nvme", True), Mode(3, "nvme", False)]
    expect(train, 2, FORTY, modes=modes)


def test_overlap_gives_the_same_bits_in_every_run():
    """Twenty times from the same weights, and as without it (case 51)."""

    def train(run):
        off = train_forty(run, overlap_comm=False)
        seen = {agrees(train_forty(run, overlap_comm=True), off)}
        for _ in range(19):
            with run.zero.gathered(modifier_rank=0), torch.no_grad():
                for p in run.model.parameters():
                    p.zero_()
            run.window({name: (1 + 2 * run.rank) * float(i) for i, name in enumerate(FORTY)})
            seen.add(agrees(run.weights(), off))
        return off, seen

    modes = [mode for mode in OVERLAPPING if mode.stage == 1 or not mode.managed]
    expect(train, 2, (FORTY, {True}), modes=modes)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fail:
            raise ArithmeticError("on purpose")
        return grad, None


class Fragile(torch.nn.Module):
    """Two units, the backward of q's raises where `fail` says so."""

    def __init__(self):
        super().__init__()
        self.p, self.q = Dot(w=4), Dot(w=4)

    def forward(self, x, fail=False):
        return self.p(w=x) + Raises.apply(self.q(w=x), fail)


@pytest.mark.parametrize("good_before", [0, 2])
def test_after_an_exception_in_backward_zero_grad_is_enough_to_go_on(good_before):
    """All earlier work of the window is dropped, and nothing stays gathered (case 52)."""

    def train(run):
        zero = run.build(Fragile(), reduce_bucket_size=4, momentum=0.9)
        at_rest = zero.memory()["device"]["params"]
        for _ in range(good_before):
            run.backward(x=5)
        with pytest.raises(ArithmeticError, match="on purpose"):
            run.backward(x=7, fail=True)
        run.zero_grad()
        released = zero.memory()["device"]["params"] == at_rest
        run.window({"x": 1})
        return released, (*run.weights().values(),)

    expect(train, 2, (True, (-1, -1)))


@pytest.mark.parametrize("mode", [m for m in MODES if m.offload == m.param == "none"], ids=str)
def test_an_exception_in_one_ranks_backward_is_an_error_on_all(mode, tmp_path):
    """At the backward, or in stage 1, which reduces at the step, there; never a hang (case 52)."""

    def train(rank, world):
        run = Run(mode, rank, world, str(tmp_path))
        run.build(Fragile(), reduce_bucket_size=4)
        start = time.monotonic()
        if rank == 1:
            with pytest.raises(ArithmeticError, match="on purpose"):
                run.backward(x=1, fail=True)
        elif mode.stage == 1:
            run.backward(x=1)
        else:
            with pytest.raises(RanksDisagree, match="rank 1: .*on purpose"):
                run.backward(x=1)
        with pytest.raises(RuntimeError):
            run.step()
        assert time.monotonic() - start < 20
        run.zero_grad()
        run.window({"x": 1})  # and on it goes
        weights = run.weights()
        assert agrees((*weights.values(),), (-1, -1)), weights
        run.zero.close()

    run_ranks(train, 2, timeout=50)


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
]


def plain(optimizer, options, lengths):
    model = Chain()
    plain = optimizer(model.parameters(), **options)
    for length in lengths:
        for _ in range(length):
            model().backward()
        plain.step()
        plain.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_one_rank_alone_is_plain_pytorch_to_the_last_bit(optimizer, options):
    """Windows of 1, 2 and 3 backward calls, and one more step after save and load (case 53)."""

    def train(run):
        zero = run.build(Chain(), optimizer, **options)
        for length in (1, 2, 3):
            run.window(*[{}] * length)
        saved = zero.state_dict()
        before = run.weights()
        zero.close()
        zero = run.build(Chain(), optimizer, **options)
        zero.load_state_dict(saved)
        loaded = run.weights()
        run.window({})
        return (
            agrees(before, plain(optimizer, options, (1, 2, 3))),
            agrees(loaded, before),
            agrees(run.weights(), plain(optimizer, options, (1, 2, 3, 1))),
        )

    expect(train, 1, (True, True, True), modes=PARAMS)
