"""Cases 39-46: parameters that are empty, tiny, tied, frozen, unused, or in groups of their own."""

import warnings

import pytest
import torch

from cases import PARAMS, Dot, Mode, Scale, agrees, expect


class WithEmpty(torch.nn.Module):
    """a, and last a Linear(4, 0) that takes part in the loss."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(3))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors is a no-op")
            self.empty = torch.nn.Linear(4, 0)

    def forward(self, x):
        return (self.a * x).sum() + self.empty(torch.ones(4)).sum()


@pytest.mark.parametrize("world", [1, 2])
def test_an_empty_parameter_keeps_its_shape_and_breaks_nothing(world):
    """In two steps, and through save and load (case 39)."""

    def train(run):
        zero = run.build(WithEmpty(), torch.optim.SGD, momentum=0.0)
        run.window({"x": 1})
        saved = zero.state_dict(), zero.model_state_dict()
        zero.close()
        zero = run.build(WithEmpty())
        zero.load_state_dict(saved[0])
        zero.load_model_state_dict(saved[1])
        run.window({"x": 1})
        weights = run.weights()
        shapes = tuple(tuple(w.shape) for w in weights.values())
        return weights["a"], shapes, tuple(run.masters()["empty.weight"].shape)

    expect(train, world, (-2, ((3,), (0, 4), (0,)), (0, 4)), modes=PARAMS)


def test_an_empty_parameter_counts_its_steps_as_any_other():
    """It lies in no rank's slice, and yet has the state that plain PyTorch gives it (case 39)."""

    def train(run):
        run.build(WithEmpty(), torch.optim.Adam)
        run.window({"x": 1})
        run.window({"x": 1})
        return {name: float(run.state(name)["step"]) for name in run.weights()}

    wanted = {"a": 2.0, "empty.weight": 2.0, "empty.bias": 2.0}
    expect(train, 2, wanted, modes=[Mode(stage, "none", False) for stage in (1, 2, 3)])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_0_dim_parameter_stays_one(world):
    """Loss = 3 * s; also through save and load (case 40)."""

    def train(run):
        zero = run.build(Scale(2.0))
        run.window({"x": 3})
        first = run.weights()["w"], run.weights()["w"].shape
        saved = zero.state_dict(), zero.model_state_dict()
        zero.close()
        zero = run.build(Scale(0.0))
        zero.load_state_dict(saved[0])
        zero.load_model_state_dict(saved[1])
        return *first, run.weights()["w"], run.weights()["w"].shape, saved[0]["master"]["w"].shape

    shape = torch.Size([])
    expect(train, world, (-1, shape, -1, shape, shape))


def test_fewer_elements_than_ranks():
    """A bias of one in a group of its own and a weight of three, on four ranks (case 41)."""

    def train(run):
        model = Dot(bias=1, weight=3)
        zero = run.build(model, param_groups=[{"params": [p]} for p in model.parameters()])
        norms = []
        for _ in range(2):
            run.window({"bias": float(run.rank), "weight": float(run.rank)})
            norms.append(zero.global_grad_norm)
        return run.weights(), *norms

    expect(train, 4, ({"bias": -3, "weight": -3}, 3.0, 3.0), rel=1e-6, modes=PARAMS)


def test_groups_that_are_all_frozen_or_empty():
    """[frozen], [], [a] (case 42)."""

    def train(run):
        model = Dot(f=torch.ones(3), a=3)
        model.f.requires_grad_(False)
        groups = [{"params": params} for params in ([model.f], [], [model.a])]
        zero = run.build(model, param_groups=groups)
        run.window({"f": 1, "a": 1})
        return run.weights(), len(zero.param_groups), zero.global_grad_norm

    expect(train, 2, ({"f": 1, "a": -1}, 3, 3**0.5), rel=1e-6)


def test_a_model_with_nothing_to_train_is_left_alone_or_refused():
    """A step that does nothing, or an error that says so (case 42)."""

    def train(run):
        model = Dot(f=torch.ones(3))
        model.f.requires_grad_(False)
        try:
            zero = run.build(model)
        except ValueError as error:
            return "refused" if "train" in str(error) else str(error)
        loss = run.model(f=1).item()
        run.step()
        unchanged = agrees(run.weights(), {"f": 1})
        return (loss, unchanged, zero.was_step_applied(), zero.state_dict()["state"])

    expect(train, 2, (3.0, True, False, {}))


def test_a_parameter_frozen_later_stays_where_it_is():
    """Neither momentum nor decay move it (case 43)."""

    def train(run):
        run.build(Dot(a=3, b=3), momentum=0.9, weight_decay=0.1)
        run.window({"a": 1, "b": 1})
        run.model.a.requires_grad_(False)
        run.window({"a": 1, "b": 1})
        return run.weights()["a"]

    expect(train, 2, -1)


def test_a_parameter_unfrozen_later_is_never_left_out_in_silence():
    """The next window raises on every rank and names it; frozen again, all goes on (case 43)."""

    def train(run):
        model = Dot(a=3, b=3)
        model.b.requires_grad_(False)
        run.build(model)
        run.window({"a": 1, "b": 1})
        model.b.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"\bb\b.*frozen"):
            run.window({"a": 1, "b": 1})
        model.b.requires_grad_(False)
        run.zero_grad()
        kept = run.weights()
        model.a.grad = model.b.grad = None
        run.window({"a": 1, "b": 1})
        return kept, run.weights()

    expect(train, 2, ({"a": -1, "b": 0}, {"a": -2, "b": 0}), modes=PARAMS)


def test_groups_keep_their_options_and_can_be_added_later():
    """Given as a generator of groups; each rank partitions the new one too (case 44)."""

    def train(run):
        model = Dot(a=3, b=3, c=3)
        groups = ({"params": [p], "lr": lr} for p, lr in ((model.a, 1.0), (model.b, 0.1)))
        zero = run.build(model, param_groups=groups)
        run.window({"a": 1, "b": 1})
        first = run.weights()
        zero.add_param_group({"params": [model.c], "lr": 0.01})
        run.window({"a": 1, "b": 1, "c": 1})
        return first, run.weights(), len(zero.param_groups)

    wanted = {"a": -1, "b": -0.1, "c": 0}, {"a": -2, "b": -0.2, "c": -0.01}, 3
    expect(train, 2, wanted, rel=1e-6)


def test_parameters_given_as_a_generator_are_clipped_like_a_list():
    """And like what is taken when none are given (case 44)."""

    def train(run, params):
        model = Dot(a=3, b=3)
        options = {} if params is None else {"param_groups": params(model.parameters())}
        zero = run.build(model, gradient_clipping=1.0, **options)
        run.window({"a": [2.0, 0.0, 0.0], "b": [0.0, 0.0, 1.5]})
        return run.weights(), zero.global_grad_norm

    def all_ways(run):
        generator, as_list, none = (train(run, params) for params in (iter, list, None))
        return generator, agrees(as_list, generator), agrees(none, generator)

    weights = {"a": [-0.8, 0, 0], "b": [0, 0, -0.6]}
    expect(all_ways, 2, ((weights, 2.5), True, True), rel=1e-6)


class Tied(torch.nn.Module):
    """y = w * (w * x), with w in two modules."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Scale(2.0), Scale(0.0)
        self.second.w = self.first.w

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("bucket", [1, 2**22])
def test_a_tied_weight_is_one_weight(bucket):
    """In the gradient, in the norm, in the state, and in the model afterwards (case 45)."""

    def train(run):
        zero = run.build(Tied(), lr=0.1, momentum=0.9, reduce_bucket_size=bucket)
        run.window({"x": 1.0})
        state = zero.state_dict()
        entries = tuple(state["state"]), tuple(state["master"])
        weights = run.weights()
        zero.close()
        one = run.model.first.w is run.model.second.w
        return weights, zero.global_grad_norm, entries, one, run.model.second.w.item()

    names = ("first.w",), ("first.w",)
    wanted = {"first.w": 1.6}, 4.0, names, True, torch.tensor(1.6).item()
    expect(train, 2, wanted, rel=1e-6)


@pytest.mark.parametrize("same_group", [True, False])
def test_a_weight_listed_twice_is_refused(same_group):
    """On every rank (case 45)."""

    def train(run):
        model = Tied()
        w = model.first.w
        groups = [[w, model.second.w]] if same_group else [[w], [model.second.w]]
        with warnings.catch_warnings(), pytest.raises(ValueError, match=r"param|group|twice"):
            warnings.filterwarnings("ignore", ".*duplicate parameters")
            run.build(model, param_groups=[{"params": params} for params in groups])

    expect(train, 2, None)


def test_a_parameter_that_nobody_used_is_not_updated():
    """No gradient is none, not zeros: no momentum, no decay, in all modes alike (case 46)."""

    def train(run):
        run.build(Dot(a=3, b=3), momentum=0.9)
        run.window({"a": 1, "b": 10})
        run.window({"a": 1})
        sgd = run.weights()
        run.zero.close()
        run.build(Dot(a=3, b=torch.ones(3)), torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        for _ in range(3):
            run.window({"a": 1})
        return sgd, run.weights()["b"], run.state("b")

    expect(train, 2, ({"a": -2.9, "b": -10}, 1, {}), rel=1e-7)
