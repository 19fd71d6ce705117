"""State that moves: saved by one run, it goes on in a run of another kind, or in plain PyTorch.

The first tests save under every stage, rank count and offload, and load under others, with a model
that has one parameter of every awkward kind. The rest take one promise of the state each.
"""

import io
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import HOMES, SGD, AdamW, Dot, Odd, assert_same, build, copied, on_all_tiers, rows
from models import param_groups as two_groups
from ranks import all_raise, alone, assert_same_everywhere, run_ranks


def through_a_file(state):
    """`state` as it comes back from disk; only tensors, numbers and strings can come back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def on_each_tier(body, folder):
    """body(make, rank) for every stage and every tier once; the matrix has all their pairs."""
    each = zip((1, 2, 3), HOMES, strict=True)
    works = [on_all_tiers(body, folder, (stage,), (home,)) for stage, home in each]
    return lambda rank, world: [work(rank, world) for work in works]


# ---- every saver, every loader -------------------------------------------------------------------


class Times(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, h):
        return self.w * h


class Zoo(nn.Module):
    """One parameter of every awkward kind.

    The gradient is w times the mean of positive numbers, so no addition cancels and no element's
    relative error is large: Adam, which divides by the gradient's size, would make it a large step.
    """

    def __init__(self):
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))
        self.number = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.first = Times(nn.Parameter(torch.randn(11)))
        self.second = Times(self.first.w)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))
        self.sometimes = nn.Parameter(torch.randn(3))
        self.coarse = nn.Parameter(torch.randn(9).bfloat16())
        self.register_buffer("shift", torch.randn(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("exact", 2.0 ** torch.arange(-4, 5))

    def forward(self, x, index):
        self.seen += 1
        squares = [self.matrix, self.vector, self.number, self.empty]
        squares += [self.sometimes] if index % 2 == 0 else []
        energy = sum(w.square().sum() for w in squares) + self.frozen.sum() + self.shift.sum()
        energy = energy + self.second(self.first(torch.ones(11))).sum()
        # bf16 gradients: powers of two, which every number of ranks rounds alike.
        return (x * energy / 2).mean() + (self.coarse.float() * self.exact).sum()


OPTIMIZERS = {
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
}
KINDS = list(itertools.product((1, 2, 3), HOMES))
WORLDS = (1, 2, 3)


def interleaved(model):
    """Every other parameter, the frozen one too, in a group of its own."""
    params = list(model.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.03, "weight_decay": 0.0}]


def optimizer_of(saver):
    """The matrix has half of its savers with either optimizer: all kinds with both."""
    stage, home, world = saver
    return ("AdamW", "SGD")[(stage + HOMES.index(home) + world) % 2]


def make(stage, home, folder, optimizer):
    kind, options = OPTIMIZERS[optimizer]
    options = {**options, "loss_scale": "dynamic", "initial_loss_scale": 8.0}
    options |= {"loss_scale_window": 2, "reduce_bucket_size": 32}
    model, settings = Zoo(), {"sub_group_size": 10} if home != "none" else {}
    groups = interleaved(model)
    return model, build(
        stage, model, folder, kind, home, settings=settings, param_groups=groups, **options
    )


def steps(model, zero, rank, world, indices):
    """A window for each index. The batch of six is the same however many ranks share it."""
    for index in indices:
        x = torch.rand(6, generator=torch.Generator().manual_seed(index)) + 0.5
        x[3] = torch.inf if index == 1 else x[3]  # this window is skipped, and the scale halves
        zero.backward(model(x.view(world, -1)[rank], index))
        zero.step()


def save_and_go_on(rank, world, folder):
    """For every kind what it saves after three windows, and what it has come to after six."""
    found = {}
    for stage, home in KINDS:
        saver = stage, home, world
        model, zero = make(stage, home, folder, optimizer_of(saver))
        with zero:
            steps(model, zero, rank, world, range(3))
            saved = zero.state_dict(), zero.model_state_dict()
            steps(model, zero, rank, world, range(3, 6))
            found[saver] = saved, (zero.state_dict(), zero.model_state_dict())
    return found


@pytest.fixture(scope="module")
def savers(tmp_path_factory):
    """{(stage, home, ranks): (what it saved, what it came to without a stop)}."""
    folder, found = tmp_path_factory.mktemp("savers"), {}
    for world in WORLDS:
        every = assert_same_everywhere(run_ranks(save_and_go_on, world, folder))
        found |= through_a_file(every)
    return found


def pairs():
    """(saver, loader): every stage and offload with every other, and among them every saver, every
    loader and every pair of rank counts equally often."""
    for (i, saver), (j, loader) in itertools.product(enumerate(KINDS), repeat=2):
        a = (i + j + i // 3) % 3
        yield (*saver, WORLDS[a]), (*loader, WORLDS[(a + i // 3 + j // 3) % 3])


def test_the_pairs_cover_what_they_say():
    chosen = list(pairs())
    savers, loaders = zip(*chosen, strict=True)
    assert len({(saver[:2], loader[:2]) for saver, loader in chosen}) == 81
    assert {savers.count(s) for s in savers} == {loaders.count(s) for s in loaders} == {3}
    assert len(set(savers)) == len(set(loaders)) == 27
    ranks = [(saver[2], loader[2]) for saver, loader in chosen]
    assert {ranks.count(pair) for pair in ranks} == {9} and len(set(ranks)) == 9
    for name in OPTIMIZERS:
        some = [pair for pair in chosen if optimizer_of(pair[0]) == name]
        assert len({s[:2] for s, _ in some}) == len({other[:2] for _, other in some}) == 9


@pytest.mark.parametrize("world", WORLDS)
def test_what_any_kind_saves_goes_on_in_any_other(savers, world, tmp_path):
    """Bitwise where the rank count is the same, else to 1e-6; and right after loading it is what
    was saved, to the last bit."""

    def work(rank, world):
        for saver, loader in pairs():
            if loader[2] != world:
                continue
            (state, weights), uninterrupted = savers[saver]
            model, zero = make(*loader[:2], tmp_path, optimizer_of(saver))
            what = f"saved by {saver}, loaded by {loader}"
            with zero:
                zero.load_model_state_dict(weights if rank == 0 else {})
                zero.load_state_dict(state if rank == 0 else {})
                loaded = zero.state_dict(), zero.model_state_dict()
                assert_same((state, weights), loaded, f"{what}, right after")
                steps(model, zero, rank, world, range(3, 6))
                now = zero.state_dict(), zero.model_state_dict()
            if saver[2] == world:
                assert_same(uninterrupted, now, what)
            else:
                assert_near(uninterrupted, now, what)

    run_ranks(work, world)
    assert not list(tmp_path.iterdir())


def assert_near(one, other, what):
    """Requires the same keys and numbers, and tensors within 1e-6 of each other's length."""
    assert type(one) is type(other), what
    if isinstance(one, dict):
        assert list(one) == list(other), what
        for key in one:
            assert_near(one[key], other[key], f"{what}: {key}")
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            assert_near(a, b, what)
    elif torch.is_tensor(one):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), what
        one, other = one.double(), other.double()
        # A bf16 weight is rounded from its master, which is compared as well.
        limit = 2**-8 if what.endswith("coarse") and "master" not in what else 1e-6
        assert (one - other).norm() <= limit * one.norm(), f"{what}: {one} and {other}"
    else:
        assert one == other, f"{what}: {one} and {other}"


@pytest.mark.parametrize("saver", [(1, "none", 2), (2, "cpu", 2)], ids=optimizer_of)
def test_counts_groups_and_scale_are_in_the_saved_state(savers, saver):
    """What the matrix moves about is there in the first place."""
    (state, _), (last, _) = savers[saver]
    assert [state[k] for k in ("global_steps", "skipped_steps", "loss_scale")] == [2, 1, 4.0]
    names = alone(lambda rank, world: [name for name, _ in Zoo().named_parameters()])
    assert [group["params"] for group in state["param_groups"]] == [names[::2], names[1::2]]
    assert [group["lr"] for group in state["param_groups"]] == [0.01, 0.03]
    assert sorted(state["master"]) == sorted({*names} - {"frozen"})
    assert sorted(state["state"]) == sorted({*names} - {"frozen", "unused"})
    assert {(t.dtype, t.device.type) for t in state["master"].values()} == {(torch.float32, "cpu")}
    if optimizer_of(saver) == "AdamW":
        counted = {name: float(entry["step"]) for name, entry in state["state"].items()}
        assert counted == dict.fromkeys(counted, 2.0)
        assert [float(last["state"][n]["step"]) for n in ("sometimes", "number")] == [3.0, 5.0]


ELEMENTWISE = {
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adadelta": {},
    "Adam": {"amsgrad": True},
    "Adamax": {},
    "ASGD": {"t0": 1},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}


def test_every_elementwise_optimizer_goes_on_from_its_state(tmp_path):
    """Each keeps numbers of its own beside the step count, such as NAdam's mu_product."""

    def train(model, zero, rank, indices):
        for index in indices:
            zero.backward(model(rows(rank, index)).square().mean())
            zero.step()

    cut = {"sub_group_size": 50}  # a parameter in several pieces, each with numbers of its own

    def work(rank, world):
        for name, options in ELEMENTWISE.items():
            kind, options = getattr(torch.optim, name), {"lr": 0.01, **options}
            model = Odd()
            zero = build(1, model, tmp_path, kind, **options)
            train(model, zero, rank, range(3))
            saved, weights = through_a_file((zero.state_dict(), zero.model_state_dict()))
            train(model, zero, rank, range(3, 6))
            other = Odd()
            resumed = build(3, other, tmp_path, kind, "nvme", settings=cut, **options)
            resumed.load_model_state_dict(weights)
            resumed.load_state_dict(saved)
            train(other, resumed, rank, range(3, 6))
            assert_same(zero.state_dict(), resumed.state_dict(), name)
            resumed.close()

    run_ranks(work, 2)


@pytest.mark.parametrize(
    ("kind", "option"), [(AdamW, {"amsgrad": True}), (torch.optim.RMSprop, {"momentum": 0.9})]
)
def test_groups_may_keep_different_state(kind, option, tmp_path):
    """A parameter without max_exp_avg_sq is no error if its group has no amsgrad."""

    def body(make, rank):
        def fresh():
            model = Odd()
            groups = two_groups(model)
            groups[0] |= option
            return model, make(model, kind, param_groups=groups)

        def train(model, zero, indices):
            for i in indices:
                zero.backward(model(rows(rank, i)).square().mean())
                zero.step()

        model, zero = fresh()
        train(model, zero, range(2))
        saved, weights = through_a_file((zero.state_dict(), zero.model_state_dict()))
        train(model, zero, range(2, 4))
        other, resumed = fresh()
        resumed.load_model_state_dict(weights)
        resumed.load_state_dict(saved)
        train(other, resumed, range(2, 4))
        assert_same(zero.state_dict(), resumed.state_dict(), "resumed")

    run_ranks(on_each_tier(body, tmp_path), 2)


# ---- files ---------------------------------------------------------------------------------------


def trained(make, rank, model=None, optimizer=AdamW, windows=2, **options):
    """A small model after two windows, and its optimizer."""
    model = Odd() if model is None else model
    zero = make(model, optimizer, **options)
    dtype = next(model.parameters()).dtype
    for index in range(windows):
        zero.backward(model(rows(rank, index).to(dtype)).square().mean())
        zero.step()
    return model, zero


def test_distributed_checkpoint_takes_it_and_gives_it_back(tmp_path):
    """Into the state of an optimizer that has stepped, as it is for torch's own, and as a file for
    torch.load that needs no other state to load into."""

    def work(rank, world):
        def make(stage, home):
            return trained(
                lambda model, *args, **options: build(
                    stage, model, tmp_path / "disk", *args, home=home, **options
                ),
                rank,
            )[1]

        for stage, home in ((1, "none"), (3, "nvme")):
            zero, path = make(stage, home), tmp_path / f"saved{stage}"
            saved = zero.state_dict()
            dcp.save({"zero": saved, "model": zero.model_state_dict()}, checkpoint_id=path)
            other = make(2, "cpu")
            target = {"zero": other.state_dict()}
            dcp.load(target, checkpoint_id=path)
            assert_same(saved, target["zero"], "dcp.load")
            if rank == 0:
                dcp_to_torch_save(path, tmp_path / "one.pt")
            dist.barrier()
            whole = torch.load(tmp_path / "one.pt", weights_only=True)
            other.load_state_dict(whole["zero"])
            assert_same(saved, other.state_dict(), "one file")
            zero.close()
            other.close()

    run_ranks(work, 2)


def test_no_entry_is_a_view_of_something_larger(tmp_path):
    """torch.save of one entry would write all of the buffer that it is cut from."""

    def body(make, rank):
        _, zero = trained(make, rank)
        for tensor in tree_leaves((zero.state_dict(), zero.model_state_dict())):
            if torch.is_tensor(tensor):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes

    run_ranks(on_each_tier(body, tmp_path), 2)


def test_a_state_is_a_copy_on_the_way_out_and_on_the_way_in(tmp_path):
    """Training on changes neither what was handed out nor what was loaded from."""

    def body(make, rank):
        model, zero = trained(make, rank)
        given = zero.state_dict(), zero.model_state_dict()
        before = through_a_file(given)
        other = Odd()
        loaded = make(other, AdamW)
        loaded.load_model_state_dict(given[1])
        loaded.load_state_dict(given[0])
        for net, optimizer in ((model, zero), (other, loaded)):
            optimizer.param_groups[0]["lr"] *= 2
            optimizer.backward(net(rows(rank, 5)).square().mean())
            optimizer.step()
        assert_same(before, given, "what was handed out and in")

    run_ranks(on_each_tier(body, tmp_path), 2)


def test_with_rank0_only_no_other_rank_has_or_needs_it(tmp_path):
    def body(make, rank):
        _, zero = trained(make, rank)
        whole, mine = zero.state_dict(), zero.state_dict(rank0_only=True)
        assert_same(whole if rank == 0 else {}, mine, "rank0_only")
        other = make(Odd(), AdamW)
        other.load_state_dict(mine)
        assert_same(whole, other.state_dict(), "loaded from rank 0")

    run_ranks(on_each_tier(body, tmp_path), 3)


def test_a_state_without_master_leaves_the_weights(tmp_path):
    def body(make, rank):
        saved = trained(make, rank)[1].state_dict()
        other = make(Odd(), AdamW)
        before = other.model_state_dict()
        other.load_state_dict({k: v for k, v in saved.items() if k != "master"})
        assert_same(before, other.model_state_dict(), "weights")
        assert_same(saved["state"], other.state_dict()["state"], "state")

    run_ranks(on_each_tier(body, tmp_path), 2)


def test_state_moves_between_precisions(tmp_path):
    """FP32 masters go over exactly; what the model computes with is their rounding."""

    def body(make, rank):
        _, low = trained(make, rank, Odd().bfloat16())
        saved = low.state_dict()
        assert any((t != t.bfloat16()).any() for t in saved["master"].values())
        full = make(Odd(), AdamW)
        full.load_state_dict(saved)
        weights = full.model_state_dict()
        assert_same(saved["master"], {n: weights[n] for n in saved["master"]}, "FP32 weights")
        back = make(Odd().bfloat16(), AdamW)
        back.load_state_dict(full.state_dict())
        assert_same(saved, back.state_dict(), "there and back")
        weights, rounded = back.model_state_dict(), low.model_state_dict()
        trainable = saved["master"]
        assert_same({n: rounded[n] for n in trainable}, {n: weights[n] for n in trainable}, "bf16")

    run_ranks(on_each_tier(body, tmp_path), 2)


# ---- the model alone -----------------------------------------------------------------------------


class Extra(nn.Module):
    """Has state that is no tensor, as torch's modules may."""

    def __init__(self, note):
        super().__init__()
        self.w, self.note = nn.Parameter(torch.randn(3)), note

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]

    def forward(self, h):
        return h * self.w


class Whole(nn.Module):
    """Tied, frozen, 0-dim and empty parameters, buffers that are saved and one that is not."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.odd, self.norm = Odd(), nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 3, bias=False)
        self.again = nn.Linear(3, 3, bias=False)
        self.again.weight = self.out.weight
        self.empty = nn.Parameter(torch.randn(2, 0))
        self.register_buffer("scratch", torch.randn(4), persistent=False)
        self.to(dtype)

    def forward(self, x):
        return self.again(self.out(self.norm(self.odd(x)))) + self.empty.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_state_dict_is_what_the_plain_model_would_give(dtype, tmp_path):
    """The same keys in the same order, dtypes and values, and it loads with strict=True."""

    def body(make, rank):
        model, zero = trained(make, rank, Whole(dtype))
        weights = through_a_file(zero.model_state_dict())
        assert_same(weights, zero.model_state_dict(), "what the ranks and calls have")
        zero.close()
        plain = {name: t.clone() for name, t in model.state_dict().items()}
        assert_same(plain, weights, "the plain model's own")
        other = Whole(dtype)
        other.load_state_dict(weights, strict=True)
        assert_same(plain, dict(other.state_dict()), "loaded")
        x = rows(0, 9).to(dtype)
        assert_same(model(x), other(x), "output")

    run_ranks(on_each_tier(body, tmp_path), 2)


def test_extra_state_of_modules_moves_too(tmp_path):
    def body(make, rank):
        weights = through_a_file(make(Extra("kept"), SGD, lr=1.0).model_state_dict())
        other = Extra("other")
        other.load_state_dict(weights, strict=True)
        assert other.note == "kept"
        model = Extra("other")
        make(model, SGD, lr=1.0).load_model_state_dict(weights if rank == 0 else {})
        assert model.note == "kept"

    run_ranks(on_all_tiers(body, tmp_path, homes=("none",)), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_weights_alone_refreshes_the_masters_and_leaves_the_rest(dtype, tmp_path):
    """The next step starts from them: an old master would jump back."""

    def body(make, rank):
        model, zero = trained(make, rank, Odd().to(dtype))
        before = zero.state_dict()
        torch.manual_seed(5)
        given = copied(Odd().to(dtype).state_dict())
        zero.load_model_state_dict(given if rank == 0 else {})
        assert_same(given, zero.model_state_dict(), "weights")
        after = zero.state_dict()
        wanted = {name: given[name].float() for name in before["master"]}
        assert_same(wanted, after["master"], "masters")
        assert_same({**before, "master": wanted}, after, "the rest")
        zero.backward(model(rows(rank, 5).to(dtype)).square().mean())
        zero.step()
        for name, value in zero.state_dict()["master"].items():
            moved = (value - wanted[name]).abs().max()
            assert 0 < moved < 0.01, f"{name} jumped by {moved}"  # lr is 0.001

    run_ranks(on_each_tier(body, tmp_path), 2)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("managed", [True, False])
def test_in_the_middle_of_a_window_it_says_how_many_calls_would_be_lost(managed, tmp_path):
    """And loses none: the window goes on to its end, where saving is allowed."""

    def body(make, rank):
        options = {"gradient_accumulation_steps": 4} if managed else {}
        model = Dot()
        zero = make(model, SGD, lr=1.0, managed_gradient_accumulation=managed, **options)
        for calls in range(1, 5):
            zero.backward(model(torch.ones(5)), scale_wrt_gas=False)
            zero.step() if managed and calls < 4 else None
            with pytest.raises(RuntimeError, match=rf"would lose {calls} backward call"):
                zero.state_dict(rank0_only=calls % 2 == 0)
        zero.finalize_gradient_accumulation_boundary()
        with pytest.raises(RuntimeError, match="would lose 4 backward call"):
            zero.state_dict()
        zero.step()
        assert zero.state_dict()["master"]["w"].tolist() == [-4.0] * 5

    run_ranks(on_each_tier(body, tmp_path), 2)


def test_if_only_one_rank_is_in_the_middle_of_a_window_all_raise():
    """Stage 1, where counts may differ before the boundary: nobody waits for who has raised."""

    def work(rank, world):
        zero = build(1, model := Dot(), None, lr=1.0, managed_gradient_accumulation=False)
        if rank == 0:
            zero.backward(model(torch.ones(5)))
        zero.state_dict()

    all_raise(work, 2, RuntimeError, r"state_dict.*would lose 1 backward call", within=5)


def break_it(state):
    """Many faults at once, and for each what the error has to name."""
    entries, master = state["state"], state["master"]
    del master["b.bias"]
    master["c.bias"] = torch.zeros(4)
    master["scale"] = [1.0]
    master["nowhere"] = torch.zeros(2)
    entries["a.weight"]["exp_avg"] = torch.zeros(7, 13)
    del entries["a.bias"]["exp_avg_sq"]
    del entries["c.weight"]["step"]
    entries["b.weight"]["max_exp_avg_sq"] = torch.zeros(11, 13)
    entries["elsewhere"] = {**entries["scale"]}
    state["param_groups"][0]["params"].append("foreign")
    return [
        "master of b.bias is missing", r"master of c.bias is \(4,\), not \(3,\)", "master of scale",
        "nowhere", r"exp_avg of a.weight is \(7, 13\), not \(13, 7\)",
        "exp_avg_sq of a.bias is missing", "step of c.weight", "max_exp_avg_sq of b.weight",
        "elsewhere", "foreign",
    ]  # fmt: skip


def refuses(rank, call, patterns):
    """Requires call() to raise one error that matches all the patterns; the first rank's is a
    ValueError, the others hear of it."""
    with pytest.raises(ValueError if rank == 0 else RuntimeError) as caught:
        call()
    for pattern in patterns:
        assert caught.match(pattern)


def test_one_error_lists_every_wrong_entry_and_nothing_is_changed(tmp_path):
    def body(make, rank):
        model, zero = trained(make, rank)
        before = zero.state_dict(), zero.model_state_dict()
        bad = zero.state_dict()
        bad["global_steps"], bad["param_groups"][0]["lr"] = 77, 7.0
        patterns = break_it(bad)
        refuses(rank, lambda: zero.load_state_dict(bad if rank == 0 else {}), patterns)
        assert_same(before, (zero.state_dict(), zero.model_state_dict()), "after the error")
        zero.backward(model(rows(rank, 5)).square().mean())
        zero.step()
        assert zero.was_step_applied()

    run_ranks(on_each_tier(body, tmp_path), 2)


WRONG = [
    (lambda s: s.clear(), "state.*param_groups"),
    (lambda s: s.pop("param_groups"), "param_groups"),
    (lambda s: s["param_groups"].append({**s["param_groups"][0], "params": []}), "groups"),
    (lambda s: s["param_groups"][0].pop("params"), "params"),
    (lambda s: s["param_groups"][0].update(params=[0, 1, 2]), "groups"),
    (lambda s: s["state"].update(scale=torch.zeros(3)), "scale"),
    (lambda s: s["state"]["scale"].update(exp_avg="text"), "exp_avg of scale"),
    (lambda s: s["state"]["scale"].update(exp_avg=None), "exp_avg of scale"),
    (lambda s: s["state"]["scale"].update(step=torch.zeros(3)), "step of scale"),
    (lambda s: s["state"]["scale"].update(step="text"), "step of scale"),
    (lambda s: s["master"].update(scale=None), "master of scale"),
    (lambda s: s["master"].update(scale=1.0), "master of scale"),
    (lambda s: s.update(master=[]), "master"),
    (lambda s: s.update(loss_scale="text"), "loss_scale"),
]


def test_every_kind_of_wrong_entry_is_refused():
    def work(rank, world):
        _, zero = trained(lambda model, *args: build(2, model, None, *args), rank)
        before = zero.state_dict()
        for number, (spoil, pattern) in enumerate(WRONG):
            bad = zero.state_dict()
            spoil(bad)
            refuses(rank, lambda bad=bad: zero.load_state_dict(bad if rank == 0 else {}), [pattern])
            assert_same(before, zero.state_dict(), f"after error {number}")

    run_ranks(work, 2)


def test_wrong_weights_are_listed_in_one_error_and_nothing_is_changed(tmp_path):
    def body(make, rank):
        _, zero = trained(make, rank)
        before = zero.state_dict(), zero.model_state_dict()
        bad = {name: torch.full_like(t, 7.0) for name, t in before[1].items()}
        del bad["shift"], bad["a.weight"]
        bad["b.bias"], bad["frozen"], bad["nowhere"] = (
            torch.zeros(3),
            torch.zeros(()),
            torch.ones(1),
        )
        bad["scale"] = "text"
        patterns = [
            "shift is missing", "a.weight is missing", "nowhere is not in the model", "scale",
            r"b.bias is \(3,\), not \(11,\)", r"frozen is \(\), not \(3,\)",
        ]  # fmt: skip
        refuses(rank, lambda: zero.load_model_state_dict(bad if rank == 0 else {}), patterns)
        assert_same(before, (zero.state_dict(), zero.model_state_dict()), "after the error")

    run_ranks(on_each_tier(body, tmp_path), 2)


# ---- plain PyTorch, both ways --------------------------------------------------------------------


def by_name(model, state_dict):
    """A torch optimizer's state, whose keys are positions, for ours, whose keys are names."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for p in model.parameters()]
    state = {order[i]: entry for i, entry in state_dict["state"].items()}
    groups = [{**g, "params": [order[i] for i in g["params"]]} for g in state_dict["param_groups"]]
    return {"state": state, "param_groups": groups}


def by_position(model, state_dict):
    """Our state for a torch optimizer."""
    order = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    state = {order[name]: entry for name, entry in state_dict["state"].items()}
    groups = [{**g, "params": [order[n] for n in g["params"]]} for g in state_dict["param_groups"]]
    return {"state": state, "param_groups": groups}


def plain_ddp(weights=None):
    """DDP with AdamW in one group, its default, and the model inside."""
    model = Odd()
    if weights:
        model.load_state_dict(weights, strict=True)
    ddp = DistributedDataParallel(model)
    return ddp, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train_ddp(ddp, optimizer, rank, indices):
    for i in indices:
        optimizer.zero_grad()
        ddp(rows(rank, i)).square().mean().backward()
        optimizer.step()


def train_zero(model, zero, rank, indices):
    for i in indices:
        zero.backward(model(rows(rank, i)).square().mean())
        zero.step()


def compare_with_ddp(stage, ddp, weights, what):
    """Stage 1 has DDP's bits; the others may add in another order."""
    plain = ddp.module.state_dict()
    if stage == 1:
        return assert_same({**plain}, {**weights}, what)
    for name, value in plain.items():
        assert (value - weights[name]).norm() <= 1e-6 * value.norm(), f"{what}: {name}"
    return None


CONVERSIONS = {
    "by hand": (
        lambda ddp, optimizer: by_name(ddp.module, optimizer.state_dict()),
        lambda ddp, optimizer, state: optimizer.load_state_dict(by_position(ddp.module, state)),
    ),
    "torch's": (get_optimizer_state_dict, set_optimizer_state_dict),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_state_moves_in_from_a_ddp_script_and_out_to_one(conversion, tmp_path):
    """Three windows there, three here, three there, as if all nine had been there."""
    move_in, move_out = CONVERSIONS[conversion]

    def body(make, rank):
        model = Odd()
        ddp, optimizer = plain_ddp()
        train_ddp(ddp, optimizer, rank, range(3))
        zero = make(model, AdamW, lr=0.7)  # the lr that comes with the state counts
        zero.load_model_state_dict(ddp.module.state_dict())
        zero.load_state_dict(move_in(ddp, optimizer))
        train_zero(model, zero, rank, range(3, 6))
        train_ddp(ddp, optimizer, rank, range(3, 6))
        stage = int(type(zero).__name__[-1])
        compare_with_ddp(stage, ddp, zero.model_state_dict(), "moved in")
        other, optimizer_there = plain_ddp(zero.model_state_dict())
        move_out(other, optimizer_there, zero.state_dict())
        train_ddp(other, optimizer_there, rank, range(6, 9))
        train_ddp(ddp, optimizer, rank, range(6, 9))
        compare_with_ddp(stage, ddp, other.module.state_dict(), "moved out")

    run_ranks(on_each_tier(body, tmp_path), 2)


# ---- memory --------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """The most bytes of tensor memory alive at once, of what was made since it was entered."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self._meet((args, kwargs), new=False)  # made before, or met already
        result = function(*args, **(kwargs or {}))
        self._meet(result, new=True)
        return result

    def _meet(self, tensors, new):
        for tensor in tree_leaves(tensors):
            storage = tensor.untyped_storage() if torch.is_tensor(tensor) else None
            if storage is not None and storage._cdata not in self.known:
                nbytes = storage.nbytes() * new
                self.known.add(storage._cdata)
                self.live += nbytes
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._part, storage._cdata, nbytes)

    def _part(self, key, nbytes):
        self.known.discard(key)
        self.live -= nbytes


def test_the_measure_sees_what_lives_and_what_is_gone():
    def work(rank, world):
        before = torch.zeros(50_000)
        with Peak() as peak:
            before[5:].add_(1)
            a = torch.zeros(1000)
            view = a[10:20]
            del a
            b = view + torch.zeros(10)
            assert peak.live == 4040 and peak.peak == 4080
            del view
            assert peak.live == 40
            b.add_(torch.zeros(10_000).sum())
        assert peak.peak == 40_000 + 40 + 4

    alone(work)


def measured(call):
    """(what call() returns, bytes of memory that were needed beside it at the worst moment)."""
    with Peak() as peak:
        result = call()
    handed_out = {}
    for tensor in tree_leaves(result):
        if torch.is_tensor(tensor):
            handed_out[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return result, peak.peak - sum(handed_out.values())


LAYERS, WIDTH, WORLD = 16, 64, 2
BUCKET = 4 * WIDTH * WIDTH  # bytes of an FP32 row of one bucket
FULL = 12 * LAYERS * WIDTH * WIDTH  # of the whole FP32 state


def test_saving_and_loading_needs_no_second_copy_of_the_state(tmp_path):
    """A few rows of one bucket at a time beside what is handed out: with 16 buckets a fifth of the
    FP32 state, on any rank, stage and tier."""

    def body(make, rank):
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        zero = make(layers, AdamW, reduce_bucket_size=WIDTH * WIDTH)
        zero.backward(layers(torch.randn(3, WIDTH)).square().mean())
        zero.step()
        peaks = {}
        state, peaks["state_dict"] = measured(zero.state_dict)
        mine, peaks["rank0_only"] = measured(lambda: zero.state_dict(rank0_only=True))
        assert bool(mine) == (rank == 0)
        for name, given in (("load", state), ("load {}", state if rank == 0 else {})):
            _, peaks[name] = measured(lambda given=given: zero.load_state_dict(given))
        weights, peaks["model_state_dict"] = measured(zero.model_state_dict)
        given = weights if rank == 0 else {}
        _, peaks["load_model"] = measured(lambda: zero.load_model_state_dict(given))
        print(type(zero).__name__, zero.tier.name, f"rank {rank}", end=" ")
        print({name: f"{peak / FULL:.3f}" for name, peak in peaks.items()})
        for name, peak in peaks.items():
            assert peak <= 9 * BUCKET < FULL / 5, f"{name} on rank {rank}: {peak / FULL:.2f} FULL"
        assert rank == 0 or peaks["rank0_only"] <= 6 * BUCKET

    run_ranks(on_each_tier(body, tmp_path), WORLD)
