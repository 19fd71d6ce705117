"""What a rank holds and moves, to the byte: memory() and traffic beside the formulas of the papers,
and memory() beside the tensors that are really alive.

P elements of parameters, padded to a multiple of N ranks bucket by bucket; S = P/N of them are this
rank's. The model has one parameter in every layer, so with the smallest buckets each parameter is a
bucket and with large ones the whole model is, in all stages alike: nothing else decides on padding.
"""

import functools
import gc
import itertools
import time

import pytest
import torch
from torch import nn

from models import HOMES, STAGES, AdamW, build
from ranks import run_ranks

BLOCK = 4096  # bytes: a row in a file takes whole blocks
EMPTY = {
    tier: dict.fromkeys(("params", "grads", "optimizer"), 0) for tier in ("device", "host", "nvme")
}
WIDTHS = [7, 13, 11, 5, 3]  # layers of 91, 143, 55 and 15 elements


class Layer(nn.Module):
    def __init__(self, inside, outside, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outside, inside, dtype=dtype) / inside)
        self.probe = lambda y: y  # called in forward, while the layer is in use

    def forward(self, x):
        return self.probe(x @ self.weight.t())


class Stack(nn.Module):
    def __init__(self, widths=WIDTHS, dtype=torch.float32):
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.Sequential(*(Layer(a, b, dtype) for a, b in pairs))

    def forward(self, x):
        return self.layers(x.to(next(self.parameters()).dtype)).square().mean()


class Plan:
    """The formulas, for one configuration."""

    def __init__(self, stage, world, home, weights="none", each=True, size=4, where="host"):
        sizes = [a * b for a, b in itertools.pairwise(WIDTHS)]
        sizes = sizes if each else [sum(sizes)]
        self.stage, self.world, self.home, self.weights = stage, world, home, weights
        self.size, self.where = size, where
        self.slices = [-(-n // world) for n in sizes]
        self.S = sum(self.slices)
        self.P = self.S * world
        self.row = self.blocks(4)  # bytes of one FP32 row of all slices, in a file

    def blocks(self, size):
        return sum(-(-n * size // BLOCK) * BLOCK for n in self.slices)

    @property
    def rows(self):
        """FP32 numbers per element: two moments, and a master unless the weights are one."""
        own = self.size == 4 and self.home == self.weights != "nvme"
        return 2 if own else 3

    def memory(self, grads=None):
        """grads: None, "full" or "slice", what is there of them."""
        tier = {"none": "device", "cpu": "host", "nvme": "nvme"}
        held = {name: dict(kinds) for name, kinds in EMPTY.items()}
        slices = self.blocks(self.size) if self.weights == "nvme" else self.size * self.S
        whole = self.stage < 3
        held[tier[self.weights]]["params"] = self.size * self.P if whole else slices
        state = 3 * self.row if self.home == "nvme" else self.rows * 4 * self.S
        held[tier[self.home]]["optimizer"] = state
        on_host = self.home != "none" and self.where == "host"
        if self.home == "nvme" and not on_host:
            held["nvme"]["grads"] = self.row  # room for the window's sum, claimed from the start
        if grads == "full":
            held["device"]["grads"] = 4 * self.P
        elif grads == "slice":
            held["host" if on_host else "device"]["grads"] = 4 * self.S
        return held

    def between_backwards(self):
        return self.memory("full" if self.stage == 1 else "slice")

    def traffic(self, calls, gathers):
        """Bytes of a window; `gathers`: how many times stage 3 has gathered all parameters."""
        reduces = 1 if self.stage == 1 else calls
        ring, down = self.P * (self.world - 1) // self.world, 4 * self.S
        moved = {
            "reduce_scatter": reduces * 4 * ring,
            "all_gather": int(gathers * self.size * ring),
        }
        on_disk, lands = self.home == "nvme", self.where == "device"
        if self.home == "none":
            down = 0 if self.weights == "none" else self.size * self.S  # new weights, to their tier
        elif not lands:
            down *= reduces
        moved["device_to_host"] = down
        up = gathers if self.weights != "none" else self.home != "none"
        moved["host_to_device"] = int(up * self.size * self.S)
        moved["nvme_read"] = (3 + lands) * self.row * on_disk
        moved["nvme_write"] = (3 + lands) * self.row * on_disk
        moved["nvme_write"] += self.size * self.S * (self.weights == "nvme")
        return moved


def plans(world):
    """Every stage, tier, place of sums, size of buckets and precision; for other numbers of ranks
    than two, where only padding differs, every third."""
    found = []
    for stage, home, each in itertools.product(STAGES, HOMES, (True, False)):
        found.append(Plan(stage, world, home, each=each))
        if home != "none":
            found.append(Plan(stage, world, home, each=each, where="device"))
    for stage, home in itertools.product(STAGES, HOMES):
        found.append(Plan(stage, world, home, size=2))
    for weights, home in itertools.product(("cpu", "nvme"), HOMES):
        found.append(Plan(3, world, home, weights, each=False))
        found.append(Plan(3, world, home, weights, where="device"))
        found.append(Plan(3, world, home, weights, size=2))
    return found if world == 2 else found[world % 2 :: 3]


def new(plan, folder, **options):
    """A model and its optimizer as the plan says."""
    model = Stack(dtype=torch.float32 if plan.size == 4 else torch.bfloat16)
    settings = {"accumulate_on": plan.where}
    size = 1 if plan.slices[1:] else 10**6
    options = {"managed_gradient_accumulation": False, "reduce_bucket_size": size, **options}
    zero = build(plan.stage, model, folder, AdamW, plan.home, plan.weights, settings, **options)
    return model, zero


def batch():
    return torch.randn(4, WIDTHS[0])


def for_each_plan(body, plans, world):
    """Runs body(plan) on `world` ranks for each plan; a failure says which."""

    def work(rank, world):
        for plan in plans:
            try:
                body(plan)
            except AssertionError as error:
                raise AssertionError(f"{vars(plan)}: {error}") from error

    run_ranks(work, world)


def differences(measured, wanted):
    """{what: (measured, wanted)} where two dicts of numbers differ."""
    names = wanted.keys() | measured.keys()
    pairs = {n: (measured.get(n, 0), wanted.get(n, 0)) for n in names}
    return {n: pair for n, pair in pairs.items() if pair[0] != pair[1]}


def flat(held):
    return {f"{tier} {kind}": n for tier, kinds in held.items() for kind, n in kinds.items()}


def assert_holds(zero, wanted, when):
    wrong = differences(flat(zero.memory()), flat(wanted))
    assert not wrong, f"{when}, measured and wanted bytes: {wrong}"


WINDOWS = (1, 4, 1)  # backward calls


@pytest.mark.parametrize("world", [1, 2, 3])
def test_memory_is_the_formula_at_every_moment_of_a_window(world, tmp_path):
    def body(plan):
        model, zero = new(plan, tmp_path)
        with zero:
            assert_holds(zero, plan.memory(), "after construction")
            for calls in WINDOWS:
                for call in range(calls):
                    zero.backward(model(batch()))
                    assert_holds(zero, plan.between_backwards(), f"after backward {call}")
                    assert all(p.grad is None for p in model.parameters())
                if calls > 1:
                    zero.finalize_gradient_accumulation_boundary()
                    assert_holds(zero, plan.memory("slice"), "after the finalizer")
                zero.step()
                assert_holds(zero, plan.memory(), f"after a window of {calls}")
            zero.backward(model(batch()))
            zero.zero_grad()
            assert_holds(zero, plan.memory(), "after zero_grad")

    for_each_plan(body, plans(world), world)


def moved_by(zero, run):
    """What run() moves; the ranks' votes have no formula."""
    before = zero.traffic.copy()
    run()
    moved = {kind: zero.traffic[kind] - before[kind] for kind in zero.traffic}
    moved.pop("control", None)
    return moved


@pytest.mark.parametrize("world", [1, 2, 3])
def test_traffic_of_a_window_is_the_formula(world, tmp_path):
    def body(plan):
        model, zero = new(plan, tmp_path)

        def window(calls):
            for _ in range(calls):
                zero.backward(model(batch()))
            zero.step()

        with zero:
            for step, calls in enumerate(WINDOWS):
                check_traffic(plan, moved_by(zero, lambda calls=calls: window(calls)), calls, step)

    for_each_plan(body, plans(world), world)


def check_traffic(plan, moved, calls, step):
    ring, slices = plan.P * plan.size * (plan.world - 1) // plan.world, plan.size * plan.S
    gathers = 1
    if plan.stage == 3:  # for a forward, and for a backward where that needs the values
        gathers = moved["all_gather"] / ring if ring else moved["host_to_device"] / slices
        if ring or plan.weights != "none":
            assert calls <= gathers <= 2 * calls, f"{gathers} gathers for {calls} backward calls"
    wanted = plan.traffic(calls, gathers)
    if plan.weights == "nvme":  # weights are read once a gather, and at most once too far ahead
        least = wanted["nvme_read"] + int(gathers * slices)
        most = least + plan.blocks(plan.size)
        assert least <= moved["nvme_read"] <= most, f"{least} <= {moved['nvme_read']} <= {most}"
        wanted["nvme_read"] = moved["nvme_read"]
    wrong = differences(moved, wanted)
    assert not wrong, f"step {step}, moved and wanted bytes: {wrong}"


def test_managed_and_unmanaged_windows_move_the_same(tmp_path):
    def body(plan):
        seen = []
        for managed in (True, False):
            options = {"gradient_accumulation_steps": 3} if managed else {}
            model, zero = new(plan, tmp_path, managed_gradient_accumulation=managed, **options)
            with zero:
                for call in range(6):
                    zero.backward(model(batch()))
                    if managed or call % 3 == 2:
                        zero.step()
                seen.append({kind: n for kind, n in zero.traffic.items() if kind != "control"})
        assert seen[0] == seen[1]

    places = itertools.product(STAGES, (("none", "host"), ("cpu", "device"), ("nvme", "host")))
    for_each_plan(body, [Plan(stage, 2, home, where=where) for stage, (home, where) in places], 2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_construction_sends_rank_0s_weights_and_nothing_else(world, tmp_path):
    def body(plan):
        _, zero = new(plan, tmp_path)
        with zero:
            sent = {k: n for k, n in zero.traffic.items() if "host" not in k and "nvme" not in k}
            sent.pop("control", None)
        assert not differences(sent, {"broadcast": plan.P * plan.size * (world - 1) // world})

    plans = [Plan(stage, world, "none", each=each) for stage in STAGES for each in (True, False)]
    for_each_plan(body, plans, world)


def test_a_forward_for_evaluation_moves_parameters_once_in_stage_3_and_never_else(tmp_path):
    def body(plan):
        model, zero = new(plan, tmp_path)
        with zero, torch.no_grad():
            moved = moved_by(zero, lambda: model(batch()))
            gathered = plan.P * plan.size * (plan.world - 1) // plan.world
            assert not differences(moved, {"all_gather": gathered if plan.stage == 3 else 0})
            assert_holds(zero, plan.memory(), "after a forward")

    pairs = itertools.product(STAGES, (True, False))
    for_each_plan(body, [Plan(stage, 2, "none", each=each) for stage, each in pairs], 2)


# What is alive, by the garbage collector's word


def only_new():
    """From here on the garbage collector knows new objects alone: those before are not ours."""
    gc.collect()
    gc.freeze()


def living(but=()):
    """Bytes of every storage behind the new tensors; `but` are tensors to leave out."""
    gc.collect()
    left_out, found = {t.untyped_storage().data_ptr() for t in but}, {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(n for place, n in found.items() if place not in left_out)


def alive_for(wanted, but, seconds=2.0):
    """living(), once it is `wanted` or the time is up: a thread of gloo's lets go of a finished
    operation's tensors a moment after the wait for it has returned."""
    end = time.monotonic() + seconds
    while (alive := living(but)) not in wanted and time.monotonic() < end:
        time.sleep(0.01)
    return alive


def test_memory_counts_the_tensors_that_are_really_alive(tmp_path):
    def body(plan):
        only_new()
        model, zero = new(plan, tmp_path)
        x = batch()
        numbers = 64 * len(plan.slices)  # step counts and placeholders of released parameters

        def check(when):
            held = flat(zero.memory())
            counted = sum(n for name, n in held.items() if "nvme" not in name)
            alive = alive_for(range(counted, counted + numbers), [x])
            assert counted <= alive < counted + numbers, f"{when}: {alive} alive, {counted} told"

        with zero:
            check("after construction")
            for _ in range(2):
                zero.backward(model(x))
                check("after a backward")
            zero.finalize_gradient_accumulation_boundary()
            check("after the finalizer")
            zero.step()
            check("after a step")

    for_each_plan(body, plans(2)[::2], 2)


LAYERS, UNIT = 12, 4 * 16 * 16  # bytes of a layer


def watch(model, look):
    """Two lists to which look() is added in every layer's forward, and before its backward."""
    forward, backward = [], []

    def probe(y):
        forward.append(look())
        if y.requires_grad:
            y.register_hook(lambda grad: backward.append(look()))
        return y

    for layer in model.layers:
        layer.probe = probe
    return forward, backward


def deep(stage, folder, home="none", depth=LAYERS, **options):
    """A model in which every layer is a bucket."""
    model = Stack([16] * (depth + 1))
    return model, build(stage, model, folder, AdamW, home, reduce_bucket_size=1, **options)


@pytest.mark.parametrize("overlap", [True, False])
def test_stage_3_holds_the_unit_in_use_and_the_next_one_while_it_computes(overlap, tmp_path):
    def work(rank, world):
        for weights in HOMES:
            model, zero = deep(3, tmp_path, weights=weights, overlap_comm=overlap)
            slices = LAYERS * UNIT // world * (weights == "none")
            with zero:

                def look(zero=zero, slices=slices):
                    return (zero.memory()["device"]["params"] - slices) / UNIT

                held = watch(model, look)
                for _ in range(3):  # from the second on the order is known and units come ahead
                    zero.backward(model(torch.randn(4, 16)))
                    zero.step()
            for units in held:
                assert len(units) == 3 * LAYERS
                assert max(units) <= 2, f"slices in {weights}: {units}"
            assert min(held[0]) == 1, "the unit in use is whole in its forward"

    run_ranks(work, 2)


def test_stage_3_holds_slices_alone_between_forward_and_backward(tmp_path):
    def work(rank, world):
        for weights in HOMES:
            model, zero = deep(3, tmp_path, weights=weights)
            slices = LAYERS * UNIT // world * (weights == "none")
            with zero:
                for _ in range(3):
                    assert zero.memory()["device"]["params"] == slices
                    loss = model(torch.randn(4, 16))
                    assert zero.memory()["device"]["params"] == slices
                    zero.backward(loss)
                    assert zero.memory()["device"]["params"] == slices
                    zero.step()

    run_ranks(work, 2)


@pytest.mark.parametrize("overlap", [True, False])
def test_full_gradients_live_bucket_by_bucket_in_stages_2_and_3(overlap, tmp_path):
    def work(rank, world):
        for stage, home in itertools.product((2, 3), ("none", "cpu")):
            model, zero = deep(stage, tmp_path, home, overlap_comm=overlap)
            slices = LAYERS * UNIT // world * (home == "none")
            with zero:
                _, held = watch(model, lambda zero=zero: zero.memory()["device"]["grads"])
                for _ in range(2):
                    zero.backward(model(torch.randn(4, 16)))
                    assert zero.memory()["device"]["grads"] == slices
            full = [(n - slices) / UNIT for n in held]
            assert max(full) <= 2, f"stage {stage}, {home}: {full} full gradients"

    run_ranks(work, 2)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_gradients_under_way_are_few(overlap, tmp_path):
    # Also those that are being reduced, which memory() may leave out: by what is really alive,
    # with a batch so small that it does not count.
    def work(rank, world):
        limit = 24 * UNIT // 2
        for stage in (2, 3):
            model, zero = deep(stage, tmp_path, depth=24, overlap_comm=overlap)
            with zero:
                zero.backward(model(torch.randn(1, 16)))  # makes what stays
                only_new()
                look = functools.partial(alive_for, range(limit), list(model.parameters()), 0.3)
                _, held = watch(model, look)
                zero.backward(model(torch.randn(1, 16)))
            assert len(held) == 24
            assert 0 < max(held) < limit, f"stage {stage}: {max(held)} bytes of {24 * UNIT}"

    run_ranks(work, 2)
