"""A run on a thousand ranks, from one process: what every rank would hold and send.

    python notebooks/scale.py           the table of the ZeRO paper: 7.5 billion parameters

A model on the meta device has shapes and no values. torch's fake process group has as many ranks as
one likes, of which this process is one, and moves nothing. With these two a real Zero object goes
through a whole window, and what it reports is what it would be with memory and a network, to the
byte. Left out: activations, what libraries keep for themselves, and time.

Read first: `one_window`.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from notebooks.demo import Transformer
from stage1 import ZeroStage1
from stage2 import ZeroStage2
from stage3 import ZeroStage3

STAGES = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}
SIZES = {
    "7.5B": {"width": 6144, "heads": 48, "layers": 16, "length": 1024, "symbols": 20_000},
    "70B": {"width": 8192, "heads": 64, "layers": 86, "length": 4096, "symbols": 32_000},
}
# The paper counts gradients as they come, in 2 bytes; here they are summed in FP32 by default.
PAPER = {"reduce_dtype": torch.bfloat16, "grad_accum_dtype": torch.bfloat16}
# Ranks -> GB on each of them for plain data parallelism and stages 1 to 3: the paper's table 1. Its
# figure 1 has the same for 64 ranks, and 1.9.
PUBLISHED = {64: (120, 31.4, 16.6, 1.88), 1024: (120, 30.1, 15.1, 0.12)}


@contextlib.contextmanager
def fake_group(world, rank=0):
    """This process as one of `world` ranks of which there are no others."""
    dist.init_process_group("fake", rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def model_of(size):
    """A transformer in bf16 on the meta device, by its name in SIZES."""
    with torch.device("meta"):
        return Transformer(**SIZES[size]).bfloat16()


def window(stage, world, size="7.5B", rank=0, backwards=1, **options):
    """What `rank` of `world` holds and sends: `one_window` with the model of a size in SIZES."""
    with fake_group(world, rank):
        return one_window(stage, model_of(size), backwards, **options)


def one_window(stage, model, backwards=1, **options):
    """One window of a real optimizer, with its step. `options` are those of the stage.

    Returns {"P": parameters, "padded": the same with padding, "held": `memory()` before the step,
    when all there is is there, "peak": most bytes on the device at the arrival of a gradient,
    "sent": `traffic` of the window}.
    """
    largest = max(p.numel() for p in model.parameters())  # one bucket has to hold it anyway
    options = {"reduce_bucket_size": largest, **options}
    zero = STAGES[stage](model, managed_gradient_accumulation=False, lr=1e-4, **options)
    zero.traffic.clear()  # of the construction
    peak = 0

    def look(_):
        nonlocal peak
        peak = max(peak, sum(zero.memory()["device"].values()))

    hooks = [p.register_post_accumulate_grad_hook(look) for p in model.parameters()]
    x = torch.zeros(1, 16, dtype=torch.long, device=zero.device)
    with zero:
        for _ in range(backwards):
            zero.backward(model(x, x) / backwards)
        held = zero.memory()
        zero.step()
        sent = {kind: n for kind, n in zero.traffic.items() if n}
        padded = sum(bucket.numel for bucket in zero.buckets)
    for hook in hooks:
        hook.remove()
    P = sum(p.numel() for p in model.parameters())
    return {"P": P, "padded": padded, "held": held, "peak": peak, "sent": sent}


def table():
    """[(ranks, stage, GB in the paper, run)]. Stage 0 is plain data parallelism, which holds on
    every rank what stage 1 holds on a single one."""
    rows, plain = [], window(1, 1, **PAPER)
    for world, published in PUBLISHED.items():
        runs = [plain, *(window(stage, world, **PAPER) for stage in STAGES)]
        rows += zip([world] * 4, range(4), published, runs, strict=True)
    return rows


def on_device(run):
    """Bytes on the device of what a window holds."""
    return sum(run["held"]["device"].values())


def main():
    print(f"{'ranks':>5}{'stage':>7}{'paper, GB':>11}{'here, GB':>10}")
    for world, stage, paper, run in table():
        print(f"{world:5}{stage or 'plain':>7}{paper:>11}{on_device(run) / 1e9:>10.2f}")


if __name__ == "__main__":
    main()
