"""Low precision: FP32 masters, sums and means in FP32, loss scales, windows that are skipped."""

import itertools
import logging
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from offload import Offload
from ranks import assert_same_everywhere, run_ranks
from stage1 import ZeroStage1
from stage2 import ZeroStage2
from stage3 import ZeroStage3

STAGES = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}
LOW = [torch.bfloat16, torch.float16]
SGD1 = {"lr": 1.0, "weight_decay": 0.0}


@pytest.fixture(params=list(STAGES))
def stage(request):
    return request.param


def places(stage, folder):
    """Every place where state can live, as arguments: {name: {...}}."""
    nvme = Offload("nvme", nvme_path=str(folder), sub_group_size=64, buffer_count=2)
    found = {
        "device": {},
        "cpu": {"offload_optimizer": Offload("cpu", sub_group_size=64)},
        "cpu, sums on device": {"offload_optimizer": Offload("cpu", accumulate_on="device")},
        "nvme": {"offload_optimizer": nvme},
    }
    if stage == 3:
        found["nvme, parameters too"] = {"offload_optimizer": nvme, "offload_param": nvme}
    return found


class Dot(nn.Module):
    """loss = sum(p * x) over the parameters named: the gradient is x, whatever p is."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))

    def forward(self, **x):
        return sum((getattr(self, name).float() * value).sum() for name, value in x.items())


def short_numbers(generator, shape):
    """Values of five bits: sums of a few of them are exact in FP32, in any order."""
    return torch.randint(-16, 17, shape, generator=generator) / 8


def draw(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (5,), "b": (3, 37), "c": (), "d": (1,)}
    weights = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
    windows = [
        [
            [{n: short_numbers(generator, s) for n, s in shapes.items()} for _rank in range(2)]
            for _call in range(calls)
        ]
        for calls in (2, 1, 3)
    ]
    return weights, windows


def trained_with_masters(weights, windows, optimizer_class, **options):
    """The truth: FP32 copies, FP32 means over ranks of sums over calls, a plain optimizer."""
    masters = {n: nn.Parameter(w.float().clone()) for n, w in weights.items()}
    optimizer = optimizer_class(masters.values(), **options)
    for window in windows:
        for name, master in masters.items():
            master.grad = sum(rank[name] for call in window for rank in call) / len(window[0])
        optimizer.step()
    state = {n: optimizer.state[m] for n, m in masters.items()}
    return {n: m.detach() for n, m in masters.items()}, state


def run_windows(zero, model, windows, rank):
    for window in windows:
        for call in window:
            zero.backward(model(**call[rank]))
        zero.step()
        assert zero.was_step_applied()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_low_precision_trains_as_fp32_masters_do(stage, dtype, tmp_path):
    options = {"lr": 0.01, "weight_decay": 0.1}

    def work(rank, world):
        weights, windows = draw(dtype)
        wanted, state = trained_with_masters(weights, windows, torch.optim.AdamW, **options)
        for where, place in places(stage, tmp_path).items():
            model = Dot(**weights)
            zero = STAGES[stage](
                model,
                torch.optim.AdamW,
                managed_gradient_accumulation=False,
                reduce_bucket_size=100,
                **options,
                **place,
            )
            run_windows(zero, model, windows, rank)
            saved, full = zero.state_dict(), zero.model_state_dict()
            for name, master in wanted.items():
                assert torch.equal(saved["master"][name], master), (where, name)
                assert full[name].dtype == dtype, where
                assert torch.equal(full[name], master.to(dtype)), (where, name)
                for kind in ("exp_avg", "exp_avg_sq"):
                    same = torch.equal(saved["state"][name][kind], state[name][kind])
                    assert same, (where, name, kind)
            zero.close()

    run_ranks(work, 2)


def network(dtype):
    torch.manual_seed(3)
    layers = [nn.Linear(7, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 5)]
    return nn.Sequential(*layers).to(dtype)


def local_gradients(model, batches):
    """{name: [gradient of each batch]} of a plain model, in its own precision."""
    found = {name: [] for name, _ in model.named_parameters()}
    for x in batches:
        model.zero_grad()
        model(x).float().square().sum().backward()
        for name, p in model.named_parameters():
            found[name].append(p.grad.clone())
    return found


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_windows_gradient_is_the_fp32_mean_of_what_the_model_computes(stage, dtype, world):
    """A model's own rounding is its own; nothing may be rounded on the way to the masters."""

    def work(rank, world):
        torch.manual_seed(rank)
        batches = [torch.randn(4, 7).to(dtype) for _ in range(3)]
        plain = network(dtype)
        wanted = {
            n: sum(g.double() for g in gs) for n, gs in local_gradients(plain, batches).items()
        }
        for mean in wanted.values():
            dist.all_reduce(mean.div_(world))
        model = network(dtype)
        zero = STAGES[stage](
            model,
            torch.optim.SGD,
            managed_gradient_accumulation=False,
            reduce_bucket_size=64,
            **SGD1,
        )
        before = zero.state_dict()["master"]
        for x in batches:
            zero.backward(model(x).float().square().sum())
        zero.step()
        after = zero.state_dict()["master"]
        for name, mean in wanted.items():
            moved = before[name].double() - after[name].double()
            # The subtraction from the master rounds too: half a unit of the master's last place.
            room = 1e-6 * mean.norm() + before[name].norm() * 2**-23 + after[name].norm() * 2**-23
            assert (moved - mean).norm() <= room, name
        norm = math.sqrt(sum(float(mean.square().sum()) for mean in wanted.values()))
        assert zero.global_grad_norm == pytest.approx(norm, rel=1e-6)

    run_ranks(work, world)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_reduced_in_its_own_precision_a_gradient_has_the_bits_of_ddp(stage, dtype):
    def work(rank, world):
        ddp = DistributedDataParallel(network(dtype))
        model = network(dtype)
        zero = STAGES[stage](
            model,
            torch.optim.SGD,
            reduce_dtype=dtype,
            grad_accum_dtype=dtype,
            reduce_bucket_size=64,
            **SGD1,
        )
        before = zero.state_dict()["master"]
        x = torch.randn(4, 7).to(dtype)
        ddp(x).float().square().sum().backward()
        zero.backward(model(x).float().square().sum())
        zero.step()
        after = zero.state_dict()["master"]
        for name, p in ddp.module.named_parameters():
            assert torch.equal(after[name], before[name] - p.grad.float()), name

    run_ranks(work, 2)


def test_mixed_dtypes_keep_their_dtype_and_their_precision(stage, tmp_path):
    """FP32 parameters beside bf16 ones are not rounded to bf16; buffers are not touched."""

    def work(rank, world):
        for where, place in places(stage, tmp_path).items():
            ones = torch.ones(3)
            model = Dot(a=ones.bfloat16(), b=ones, c=ones.half(), f=ones.half() * 3)
            model.f.requires_grad_(False)
            model.register_buffer("buffer", torch.full((2,), 0.1001))
            zero = STAGES[stage](
                model, torch.optim.SGD, gradient_accumulation_steps=2, lr=0.001, **place
            )
            for _ in range(2):
                zero.backward(model(a=ones, b=ones, c=ones))
                zero.step()
            full, master = zero.model_state_dict(), zero.state_dict()["master"]
            wanted = torch.full((3,), 1 - 0.001)
            assert all(torch.equal(master[n], wanted) for n in "abc"), where
            types = {"a": torch.bfloat16, "b": torch.float32, "c": torch.float16}
            for name, dtype in types.items():
                assert full[name].dtype == dtype, (where, name)
                assert torch.equal(full[name], wanted.to(dtype)), (where, name)
            assert torch.equal(full["f"], ones.half() * 3), where
            assert torch.equal(full["buffer"], torch.full((2,), 0.1001)), where
            zero.close()

    run_ranks(work, 2)


def test_fp64_parameters_are_refused_or_trained_in_fp64(stage):
    """An FP32 master behind an FP64 weight would round it without a word."""

    def work(rank, world):
        weight = torch.full((4,), 1.0, dtype=torch.float64)
        model = Dot(w=weight)
        try:
            zero = STAGES[stage](model, torch.optim.SGD, lr=1.0, weight_decay=0.0)
        except ValueError as error:
            assert "w" in str(error) and "float64" in str(error)
            return
        zero.backward((lambda m: sum((p * 1e-12).sum() for p in m.parameters()))(model))
        zero.step()
        assert torch.equal(zero.model_state_dict()["w"], weight - 1e-12)

    run_ranks(work, 2)


# Each: dtype, the gradients of one window's calls on every rank alike, and the update by SGD lr=1.
SUMS = {
    "bf16, small after large": (torch.bfloat16, [256.0] + [1.0] * 8, -264.0),
    "bf16, small before large": (torch.bfloat16, [1.0] * 8 + [256.0], -264.0),
    "fp16, small after large": (torch.float16, [2048.0] + [1.0] * 8, -2056.0),
    "fp16, more than fp16 can hold": (torch.float16, [60000.0] * 8, -480000.0),
    "fp16, cancelling": (torch.float16, [60000.0, 60000.0, -60000.0, -60000.0, 0.5], -0.5),
}


def test_windows_are_summed_in_fp32(stage, tmp_path):
    def work(rank, world):
        found = places(stage, tmp_path).items()
        for (case, (dtype, calls, wanted)), (where, place) in itertools.product(
            SUMS.items(), found
        ):
            if case != "bf16, small after large" and where not in ("device", "cpu"):
                continue  # one case looks at every place
            model = Dot(w=torch.zeros(5, dtype=dtype))
            zero = STAGES[stage](
                model, torch.optim.SGD, managed_gradient_accumulation=False, **SGD1, **place
            )
            for value in calls:
                zero.backward(model(w=torch.full((5,), value)))
            zero.step()
            assert zero.state_dict()["master"]["w"].tolist() == [wanted] * 5, (case, where)
            zero.close()

    run_ranks(work, 2)


# What every rank has as gradient: the largest and the smallest numbers of each precision.
EXTREMES = {
    "fp16 largest": (torch.float16, 65504.0),
    "fp16 smallest": (torch.float16, 2.0**-24),
    "bf16 largest": (torch.bfloat16, torch.finfo(torch.bfloat16).max),
    "bf16 smallest": (torch.bfloat16, 2.0**-133),
    "fp32 largest": (torch.float32, torch.finfo(torch.float32).max),
    "fp32 smallest normal": (torch.float32, torch.finfo(torch.float32).tiny),
}


@pytest.mark.parametrize("world", [2, 4])
def test_a_mean_over_ranks_neither_overflows_nor_loses_the_smallest(stage, world, tmp_path):
    def work(rank, world):
        found = places(stage, tmp_path).items()
        for (name, (dtype, value)), (where, place) in itertools.product(EXTREMES.items(), found):
            if where != "device" and (world > 2 or dtype != torch.float16):
                continue
            model = Dot(w=torch.zeros(5, dtype=dtype))
            zero = STAGES[stage](model, torch.optim.SGD, **SGD1, **place)
            zero.backward(model(w=torch.full((5,), value)))
            zero.step()
            assert zero.was_step_applied(), (name, where)
            master = zero.state_dict()["master"]["w"]
            assert master.tolist() == [-value] * 5, (name, where)
            norm = value * math.sqrt(5)
            assert zero.global_grad_norm == pytest.approx(norm, rel=1e-6), (name, where)
            zero.close()

    run_ranks(work, world)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_finite_mean_does_not_overflow_in_a_low_reduce_dtype_either(stage, dtype):
    """60000 on both ranks is a sum that FP16 cannot hold, and a mean that it can."""

    def work(rank, world):
        largest = torch.finfo(dtype).max
        for accum in (torch.float32, dtype):
            model = Dot(w=torch.zeros(6, dtype=dtype))
            zero = STAGES[stage](
                model, torch.optim.SGD, reduce_dtype=dtype, grad_accum_dtype=accum, **SGD1
            )
            zero.backward(model(w=torch.full((6,), largest)))
            zero.step()
            assert zero.state_dict()["master"]["w"].tolist() == [-largest] * 6, accum

    run_ranks(work, 2)


def test_an_fp16_mean_over_three_ranks_is_finite_too(stage):
    def work(rank, world):
        model = Dot(w=torch.zeros(7, dtype=torch.float16))
        zero = STAGES[stage](
            model,
            torch.optim.SGD,
            reduce_dtype=torch.float16,
            grad_accum_dtype=torch.float16,
            **SGD1,
        )
        zero.backward(model(w=torch.full((7,), 60000.0)))
        zero.step()
        assert zero.was_step_applied()
        assert zero.state_dict()["master"]["w"].tolist() == pytest.approx([-60000.0] * 7, rel=2e-3)

    run_ranks(work, 3)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_every_reduce_and_accumulate_dtype_gives_its_own_precision(stage, tmp_path):
    """Also: 2-byte traffic is half of 4-byte traffic, wherever the state lives."""

    def work(rank, world):
        weights, windows = draw(torch.float32)
        wanted, _ = trained_with_masters(weights, windows, torch.optim.SGD, lr=0.1)
        sent = {}
        for reduce, accum in itertools.product(DTYPES, DTYPES):
            for where in ("device", "cpu", "cpu, sums on device"):
                place = places(stage, tmp_path)[where]
                model = Dot(**weights)
                zero = STAGES[stage](
                    model,
                    torch.optim.SGD,
                    managed_gradient_accumulation=False,
                    reduce_dtype=reduce,
                    grad_accum_dtype=accum,
                    lr=0.1,
                    weight_decay=0.0,
                    **place,
                )
                run_windows(zero, model, windows, rank)
                master = zero.state_dict()["master"]
                coarse = max(torch.finfo(reduce).eps, torch.finfo(accum).eps)
                for name in wanted:
                    # Sums of up to 6 values below 2, six roundings, three steps of 0.1.
                    room = 3 * 0.1 * 12 * 6 * coarse / 2
                    assert torch.allclose(master[name], wanted[name], rtol=0, atol=room), (
                        where, reduce, accum, name,
                    )  # fmt: skip
                sent.setdefault(reduce, set()).add(zero.traffic["reduce_scatter"])
                zero.close()
        (full,), (bf16,), (fp16,) = (sent[dtype] for dtype in DTYPES)
        assert full == 2 * bf16 == 2 * fp16

    run_ranks(work, 2)


# Loss scales


def test_a_static_scale_saves_gradients_that_fp16_would_lose(stage, tmp_path):
    """The gradient 2**-30 is zero in FP16; times 2**12 it is not, and FP32 brings it back."""

    def work(rank, world):
        for where, place in places(stage, tmp_path).items():
            model = Dot(w=torch.zeros(5, dtype=torch.float16))
            zero = STAGES[stage](model, torch.optim.SGD, loss_scale=2.0**12, **SGD1, **place)
            loss = zero.backward(model(w=torch.full((5,), 2.0**-30)) + 3)
            assert loss.item() == 3, "the loss that comes back carries no loss scale"
            zero.step()
            assert zero.state_dict()["master"]["w"].tolist() == [-(2.0**-30)] * 5, where
            assert zero.global_grad_norm == pytest.approx(2.0**-30 * math.sqrt(5), rel=1e-6)
            assert zero.loss_scale == 2.0**12
            zero.close()

    run_ranks(work, 2)


def test_scale_then_backward_is_the_same_as_backward(stage):
    def work(rank, world):
        results = []
        for by_hand in (False, True):
            model = network(torch.float16)
            zero = STAGES[stage](
                model, managed_gradient_accumulation=False, loss_scale=64.0, lr=0.01
            )
            for seed in range(3):
                torch.manual_seed(10 * seed + rank)
                loss = model(torch.randn(4, 7).half()).float().mean()
                if by_hand:
                    zero.scale(loss).backward()
                else:
                    zero.backward(loss)
                zero.step()
            results.append(zero.state_dict())
        assert_same_everywhere(results)

    run_ranks(work, 2)


@pytest.mark.parametrize("managed", [True, False])
def test_a_plain_backward_raises_where_a_loss_scale_is_due(stage, managed):
    def work(rank, world):
        model = Dot(w=torch.zeros(5, dtype=torch.float16))
        zero = STAGES[stage](
            model,
            torch.optim.SGD,
            managed_gradient_accumulation=managed,
            loss_scale=1024.0,
            **SGD1,
        )
        x = torch.full((5,), [1.0, 3.0][rank])
        with pytest.raises(RuntimeError, match="1024"):
            model(w=x).backward()
        zero.zero_grad()
        zero.backward(model(w=x))
        zero.step()
        assert zero.model_state_dict()["w"].tolist() == [-2.0] * 5

    run_ranks(work, 2)


def test_a_loss_scaled_before_the_scale_changed_is_not_unscaled_with_another(stage):
    """zero.scale(loss) before step(), its backward after: right, or an error, never half of it."""

    def work(rank, world):
        model = Dot(w=torch.zeros(4))
        zero = STAGES[stage](
            model,
            torch.optim.SGD,
            managed_gradient_accumulation=False,
            loss_scale="dynamic",
            initial_loss_scale=4.0,
            loss_scale_window=1,
            **SGD1,
        )
        early = zero.scale(model(w=torch.ones(4)))
        zero.backward(model(w=torch.ones(4)))
        zero.step()
        assert zero.loss_scale == 8.0
        try:
            early.backward()
            zero.step()
        except RuntimeError as error:
            assert "scale" in str(error)
        else:
            assert zero.model_state_dict()["w"].tolist() == [-2.0] * 4

    run_ranks(work, 2)


def test_a_scaled_backward_that_reaches_nothing_does_not_excuse_the_next_plain_one(stage):
    def work(rank, world):
        model = Dot(w=torch.zeros(4))
        zero = STAGES[stage](
            model, torch.optim.SGD, managed_gradient_accumulation=False, loss_scale=8.0, **SGD1
        )
        zero.scale(torch.ones((), requires_grad=True) * 2).backward()
        with pytest.raises(RuntimeError, match="8"):
            model(w=torch.ones(4)).backward()

    run_ranks(work, 2)


def grad_scaler(good, initial, interval):
    """The scale after each window as torch.amp.GradScaler moves it; `good`: which are finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=interval)
    p = nn.Parameter(torch.zeros(1))
    optimizer, scales = torch.optim.SGD([p], lr=0.0), []
    for finite in good:
        (scaler.scale((p * (1.0 if finite else math.inf)).sum())).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_a_dynamic_scale_moves_as_torchs_own(stage, interval):
    """Overflow comes on one rank only, in one call of the window only; all ranks act alike."""
    good = [True, True, False, True, False, False, True, True, True, True, True, False, True]

    def work(rank, world):
        wanted = grad_scaler(good, 2.0**10, interval)
        model = Dot(p=torch.zeros(3, dtype=torch.float16), q=torch.zeros(4))
        zero = STAGES[stage](
            model,
            torch.optim.SGD,
            managed_gradient_accumulation=False,
            loss_scale="dynamic",
            initial_loss_scale=2.0**10,
            loss_scale_window=interval,
            **SGD1,
        )
        scales, norms = [], []
        for i, finite in enumerate(good):
            for call in range(2):
                bad = not finite and rank == i % 2 and call == i % 2
                x = math.inf if bad else 1.0
                zero.backward(model(p=torch.ones(3), q=torch.full((4,), x)))
            zero.step()
            assert zero.was_step_applied() == finite
            scales.append(zero.loss_scale)
            norms.append(zero.global_grad_norm)
        assert scales == wanted
        assert zero.global_steps == sum(good) and zero.skipped_steps == len(good) - sum(good)
        finite_norms = [norm for norm, finite in zip(norms, good, strict=True) if finite]
        assert finite_norms == pytest.approx([2 * math.sqrt(7)] * sum(good), rel=1e-6)
        full = zero.model_state_dict()
        assert full["p"].tolist() == [-2.0 * sum(good)] * 3
        assert full["q"].tolist() == [-2.0 * sum(good)] * 4

    run_ranks(work, 2)


@pytest.mark.parametrize("initial", [4.0, 1.0, 0.5])
def test_an_overflow_never_raises_the_scale(stage, initial):
    def work(rank, world):
        model = Dot(w=torch.zeros(3))
        zero = STAGES[stage](
            model, torch.optim.SGD, loss_scale="dynamic", initial_loss_scale=initial, **SGD1
        )
        for _ in range(5):
            before = zero.loss_scale
            zero.backward(model(w=torch.full((3,), math.inf)))
            zero.step()
            assert zero.loss_scale <= before

    run_ranks(work, 2)


def test_clipping_uses_the_unscaled_norm_of_its_own_window(stage):
    """The scale doubles after every window; [3, 0, 4] is clipped from 5 to 1 each time."""

    def work(rank, world):
        model = Dot(w=torch.zeros(3))
        zero = STAGES[stage](
            model,
            torch.optim.SGD,
            gradient_clipping=1.0,
            loss_scale="dynamic",
            initial_loss_scale=8.0,
            loss_scale_window=1,
            **SGD1,
        )
        for count in range(1, 4):
            zero.backward(model(w=torch.tensor([3.0, 0.0, 4.0])))
            zero.step()
            assert zero.loss_scale == 8.0 * 2**count
            assert zero.global_grad_norm == pytest.approx(5.0, rel=1e-6)
            wanted = [-0.6 * count, 0.0, -0.8 * count]
            assert zero.model_state_dict()["w"].tolist() == pytest.approx(wanted, rel=1e-6)

    run_ranks(work, 2)


# Skipped windows

# What is bad in a window of two calls over two ranks: (rank, call, value).
BAD = {
    "NaN everywhere": [(r, c, math.nan) for r in range(2) for c in range(2)],
    "inf once on rank 0": [(0, 0, math.inf)],
    "inf once on rank 1": [(1, 1, math.inf)],
    "NaN once on rank 1": [(1, 0, math.nan)],
    "inf on rank 0, -inf on rank 1": [(0, 1, math.inf), (1, 1, -math.inf)],
}


def bits(state):
    """Every tensor as its bytes, so that equal means equal to the last bit."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), state.shape, state.contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(state, dict):
        return {k: bits(v) for k, v in state.items()}
    return [bits(v) for v in state] if isinstance(state, (list, tuple)) else state


@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [(torch.float32, "AdamW"), (torch.bfloat16, "AdamW"), (torch.float16, "SGD")],
    ids=str,
)
def test_a_skipped_window_touches_no_bit(stage, dtype, optimizer, tmp_path):
    """Of two groups one element of the second is bad. Later windows are as if it never was."""
    options = {"AdamW": {"lr": 0.1}, "SGD": {"lr": 0.1, "momentum": 0.9}}[optimizer]

    def window(zero, model, rank, bad=()):
        for call in range(2):
            x = {"p": torch.ones(5), "q": torch.ones(3)}
            for _, _, value in [b for b in bad if b[:2] == (rank, call)]:
                x["q"][1] = value
            zero.backward(model(**x))
        zero.step()

    def run(rank, place, bads):
        model = Dot(p=torch.ones(5).to(dtype), q=torch.ones(3).to(dtype))
        groups = [{"params": [model.p]}, {"params": [model.q], "lr": 0.05}]
        zero = STAGES[stage](
            model,
            getattr(torch.optim, optimizer),
            groups,
            managed_gradient_accumulation=False,
            **options,
            **place,
        )
        held = None
        for i in range(3):
            for bad in bads[i::2] if i < 2 else []:  # without state yet, and with it
                before = bits((zero.state_dict(), zero.model_state_dict()))
                skipped = zero.skipped_steps
                window(zero, model, rank, bad)
                assert not zero.was_step_applied() and zero.skipped_steps == skipped + 1
                after = zero.state_dict()
                after["skipped_steps"] = skipped  # the only thing that may move
                assert bits((after, zero.model_state_dict())) == before
            window(zero, model, rank)
            assert zero.was_step_applied()
            held = held or zero.memory()
            assert zero.memory() == held, "memory grew"
        result = zero.state_dict()
        del result["skipped_steps"]
        result = bits((result, zero.model_state_dict()))
        zero.close()
        return result

    def work(rank, world):
        for where, place in places(stage, tmp_path).items():
            if dtype == torch.float32 or where in ("device", "nvme"):
                assert run(rank, place, list(BAD.values())) == run(rank, place, []), where

    run_ranks(work, 2)


def test_a_skipped_window_leaves_one_line_in_the_log_of_one_rank(stage):
    def work(rank, world):
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("zero").addHandler(handler)
        model = Dot(w=torch.zeros(3, dtype=torch.bfloat16))
        zero = STAGES[stage](model, torch.optim.SGD, **SGD1)
        zero.backward(model(w=torch.full((3,), math.nan)))
        zero.step()
        return lines

    lines = [line for part in run_ranks(work, 2) for line in part]
    assert len(lines) == 1 and "skipped" in lines[0]


def test_no_rank_waits_where_the_bad_element_is_in_one_ranks_slice(stage, tmp_path):
    """Case of a check per shard: one rank sees inf in its slice, the others only finite numbers."""

    def work(rank, world):
        for where, place in places(stage, tmp_path).items():
            model = Dot(w=torch.zeros(8, dtype=torch.float16))
            zero = STAGES[stage](
                model,
                torch.optim.SGD,
                loss_scale="dynamic",
                initial_loss_scale=4.0,
                **SGD1,
                **place,
            )
            scheduler = torch.optim.lr_scheduler.LambdaLR(zero, lambda step: 1.0)
            for element in (0, 7):
                x = torch.ones(8)
                x[element] = math.inf
                before = zero.loss_scale
                zero.backward(model(w=x))
                zero.step()
                if zero.was_step_applied():
                    scheduler.step()
                assert zero.loss_scale == before / 2, where
                assert not math.isfinite(zero.global_grad_norm), where
            assert zero.model_state_dict()["w"].tolist() == [0.0] * 8, where
            zero.backward(model(w=torch.ones(8)))
            zero.step()
            assert zero.model_state_dict()["w"].tolist() == [-1.0] * 8, where
            assert scheduler.last_epoch == 0
            zero.close()

    run_ranks(work, 2)


def test_finite_gradients_whose_squares_overflow_are_no_reason_to_skip(stage, tmp_path):
    """1e30 squared is inf in FP32; the norm, and clipping with it, is finite all the same."""

    def work(rank, world):
        for where, place in places(stage, tmp_path).items():
            for size in (5, 5000):  # also longer than the norm's pieces
                model = Dot(w=torch.zeros(size))
                zero = STAGES[stage](model, torch.optim.SGD, gradient_clipping=1.0, **SGD1, **place)
                zero.backward(model(w=torch.full((size,), 1e30)))
                zero.step()
                norm = 1e30 * math.sqrt(size)
                assert zero.global_grad_norm == pytest.approx(norm, rel=1e-6), (where, size)
                moved = zero.model_state_dict()["w"]
                assert moved.norm().item() == pytest.approx(1.0, rel=1e-5), (where, size)
                zero.close()

    run_ranks(work, 2)


def test_tiny_gradients_have_a_norm_although_their_squares_vanish_in_fp32(stage):
    def work(rank, world):
        model = Dot(w=torch.zeros(5000))
        zero = STAGES[stage](model, torch.optim.SGD, **SGD1)
        zero.backward(model(w=torch.full((5000,), 1e-30)))
        zero.step()
        assert zero.global_grad_norm == pytest.approx(1e-30 * math.sqrt(5000), rel=1e-6)

    run_ranks(work, 2)
