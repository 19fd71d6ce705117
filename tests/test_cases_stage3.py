"""Cases 21-27: weights that are only there while somebody computes with them. In all stages, since
what is right does not depend on where the weights are."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cases import PARAMS, UNMANAGED, Chain, Dot, Mode, Scale, agrees, expect, results
from ranks import alone


class SharedAndCheckpointed(torch.nn.Module):
    """y = w * (w * x), one module used twice, a checkpoint around each use."""

    def __init__(self, reentrant):
        super().__init__()
        self.scale, self.reentrant = Scale(2.0), reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.scale, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_shared_module_in_checkpoints_is_reduced_once_with_both_uses(reentrant):
    """Gradients 4 and 12, mean 8 (case 21)."""

    def train(run):
        run.build(SharedAndCheckpointed(reentrant), lr=0.1)
        x = torch.tensor(1.0 if run.rank == 0 else 3.0, requires_grad=True)
        run.window({"x": x})
        return run.weights(), run.zero.global_grad_norm

    expect(train, 2, ({"scale.w": 1.2}, 8.0), rel=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_plain_backward_through_checkpoints_is_one_backward(reentrant):
    """Though a reentrant checkpoint runs backward calls of its own inside (case 21)."""

    def train(run):
        zero = run.build(SharedAndCheckpointed(reentrant), lr=0.1)
        calls = []
        for _ in range(2):
            run.model(torch.tensor(1.0 if run.rank == 0 else 3.0, requires_grad=True)).backward()
            calls.append(zero.micro_steps)
        zero.step()
        return run.weights(), zero.global_grad_norm, *calls

    expect(train, 2, ({"scale.w": 0.4}, 16.0, 1, 2), rel=1e-6, modes=UNMANAGED)


class FrozenInCheckpoint(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(2.0))
        self.s = torch.nn.Parameter(torch.tensor(3.0), requires_grad=False)

    def forward(self, x):
        return checkpoint(lambda x: self.w * (self.s * x), x, use_reentrant=False)


class FrozenChildInCheckpoint(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.outer, self.inner = Scale(2.0), Scale(3.0)
        self.inner.w.requires_grad_(False)

    def forward(self, x):
        return checkpoint(lambda x: self.outer(self.inner(x)), x, use_reentrant=False)


@pytest.mark.parametrize("model", [FrozenInCheckpoint, FrozenChildInCheckpoint])
def test_the_recomputation_of_a_checkpoint_gets_frozen_weights_too(model):
    """And lets go of all of them after the backward (case 22)."""

    def train(run):
        zero = run.build(model(), lr=0.1, reduce_bucket_size=1)
        at_rest = zero.memory()["device"]["params"]
        seen = []
        for _ in range(2):
            run.backward(x=torch.tensor(1.0))
            released = zero.memory()["device"]["params"] == at_rest
            run.step()
            seen.append((*run.weights().values(), released))
        return tuple(seen)

    expect(train, 2, ((1.7, 3, True), (1.4, 3, True)), rel=1e-6, modes=PARAMS)


class ParentUsesChildsWeight(torch.nn.Module):
    """The child, a unit of its own where the bucket is small, is never called."""

    def __init__(self):
        super().__init__()
        self.child = Dot(weight=torch.tensor([1.0, 2.0, 3.0]))
        self.own = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.child.weight * x + 0 * self.own.sum()


@pytest.mark.parametrize("bucket", [3, 2**22])
def test_a_childs_weight_used_by_its_parent_has_its_value(bucket):
    """Not that of a placeholder whose shape broadcasts (case 23)."""

    def train(run):
        run.build(ParentUsesChildsWeight(), reduce_bucket_size=bucket)
        out = run.model(torch.ones(3))
        seen = out.detach().clone()
        run.backward(out.sum())
        run.step()
        return seen, run.weights()["child.weight"]

    expect(train, 2, ([1, 2, 3], [0, 1, 2]), modes=PARAMS)


def test_forwards_without_gradient_between_backward_calls_disturb_nothing():
    """Nor do eval mode, and a backward in it; everything is let go of afterwards (case 24)."""

    def train(run):
        zero = run.build(Dot(w=4), reduce_bucket_size=1)
        at_rest = zero.memory()["device"]["params"]
        busy_window(run)
        return run.weights(), zero.memory()["device"]["params"] == at_rest

    expect(train, 2, ({"w": -3}, True), modes=PARAMS)


def busy_window(run):
    run.backward(w=1)
    with torch.no_grad():
        for _ in range(5):
            run.model(w=1)
    run.model.eval()
    run.backward(w=2)
    run.model.train()
    with torch.inference_mode():
        run.model(w=1)
    run.step()


GROWING = Mode(1, "none", False), Mode(2, "nvme", False), Mode(3, "cpu", False, "cpu")


@pytest.mark.parametrize("mode", GROWING, ids=str)
def test_no_book_keeping_grows_with_the_number_of_windows(mode):
    """Measured as the summed length of all containers that came into being (case 24)."""

    def entries():
        gc.collect()
        kinds = dict, list, set, tuple
        return sum(len(each) for each in gc.get_objects() if isinstance(each, kinds))

    def train(run):
        run.build(Dot(w=4), reduce_bucket_size=1)
        counts = []
        for _ in range(3):
            for _ in range(20):
                busy_window(run)
            counts.append(entries())
        return counts[2] - counts[1]

    for _, rank, growth in results(train, 2, modes=[mode]):
        assert growth < 10, f"rank {rank} keeps {growth} more entries after 20 windows more"


@pytest.mark.parametrize("drop", [False, True])
def test_a_graph_can_be_used_for_a_second_backward(drop):
    """Its weights are there again; zero_grad() in between drops the first only (case 25)."""

    def train(run):
        run.build(Chain(), lr=0.1)
        y = run.model()
        twice = 2 * y
        run.backward(y, retain_graph=True)
        if drop:
            run.zero_grad()
        run.backward(twice)
        run.step()
        return (*run.weights().values(),)

    expect(train, 2, (1.4, 2.6) if drop else (1.1, 2.4), rel=1e-6)


def test_a_graph_can_be_used_twice_by_plain_backward_calls():
    """No scaling is due, so `loss.backward()` is as good (case 25)."""

    def train(run):
        zero = run.build(Chain(), lr=0.1)
        y = run.model()
        twice = 2 * y
        y.backward(retain_graph=True)
        twice.backward()
        zero.step()
        return (*run.weights().values(),)

    expect(train, 2, (1.1, 2.4), rel=1e-6, modes=UNMANAGED)


def test_edits_by_the_owner_reach_all_ranks_and_the_masters():
    """The others' edits do not count (case 26)."""

    def train(run):
        zero = run.build(Dot(w=torch.arange(1.0, 6)))
        with zero.gathered(modifier_rank=0), torch.no_grad():
            run.model.w.fill_(10 if run.rank == 0 else 20)
        edited = run.weights(), run.masters()
        run.window({"w": 1})
        return *edited, run.weights()

    expect(train, 2, ({"w": 10}, {"w": 10}, {"w": 9}), modes=PARAMS)


def test_edits_without_an_owner_raise_on_all_ranks_and_are_undone():
    """Also where one rank alone made them (case 26)."""

    def train(run):
        zero = run.build(Dot(w=torch.arange(1.0, 6)))
        with pytest.raises(RuntimeError, match="modifier_rank"), zero.gathered():
            run.model.w.data.mul_(2)
        with pytest.raises(RuntimeError), zero.gathered():
            if run.rank == 1:
                run.model.w.data.mul_(2)
        kept = run.weights(), run.masters()
        run.window({"w": 1})
        return *kept, run.weights()

    before = {"w": [1, 2, 3, 4, 5]}
    expect(train, 2, (before, before, {"w": [0, 1, 2, 3, 4]}), modes=PARAMS)


@pytest.mark.parametrize("edit", [False, True])
@pytest.mark.parametrize("modifier_rank", [None, 0])
def test_an_exception_inside_gathered_leaves_nothing_gathered_or_changed(modifier_rank, edit):
    """It comes out as itself, and training goes on (case 26)."""

    def train(run):
        zero = run.build(Dot(w=torch.arange(1.0, 6)))
        at_rest = zero.memory()["device"]["params"]
        with pytest.raises(KeyError, match="mine"), zero.gathered(modifier_rank):
            if edit:
                run.model.w.data.fill_(99)
            raise KeyError("mine")
        released = zero.memory()["device"]["params"] == at_rest
        kept = run.weights()
        run.window({"w": 1})
        return released, kept, run.weights()

    kept, after = {"w": [1, 2, 3, 4, 5]}, {"w": [0, 1, 2, 3, 4]}
    expect(train, 2, (True, kept, after), modes=PARAMS)


def plain_chain(rank, world):
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    return tuple(p.detach().clone() for p in model.parameters())


def test_a_compiled_model_trains_as_an_eager_one_or_is_refused():
    """Compiled before wrapping or after it; a refusal says that it is not supported (case 27)."""
    eager = tuple(w.item() for w in alone(plain_chain))

    def train(run):
        return compiled(run, before=True), compiled(run, before=False)

    modes = [Mode(stage, "none", False) for stage in (1, 2, 3)]
    wrong = [
        f"{mode}, rank {rank}, compiled {when} wrapping: {value}"
        for mode, rank, pair in results(train, 2, modes=modes, timeout=120)
        for when, value in zip(("before", "after"), pair, strict=True)
        if value != "refused" and not agrees(value, eager, 1e-6)
    ]
    assert not wrong, f"eager gives {eager}, but\n" + "\n".join(wrong)


def compiled(run, before):
    """The weights after three steps of a compiled chain, or how that was refused."""
    model = Chain()
    fast = torch.compile(model, backend="aot_eager")
    try:
        run.build(fast if before else model, lr=0.1)
        run.model = fast
        for _ in range(3):
            run.window({"x": torch.tensor(1.0)})
    except Exception as error:
        return "refused" if "not supported" in str(error) else f"{type(error).__name__}: {error}"
    with run.zero.gathered():
        return tuple(p.detach().clone() for p in model.parameters())
