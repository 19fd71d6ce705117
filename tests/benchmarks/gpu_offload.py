"""Optimizer offload on one GPU beside its floor: `python tests/benchmarks/gpu_offload.py`.

One process, NCCL, a bf16 model of --layers square layers of --width. The floor of a step is the
largest of three times, each measured here by itself: the FP32 gradient coming down, the fused AdamW
on the host, the new weights going up. Prints milliseconds, medians of --steps, and ratios.
"""

import argparse
import datetime
import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from offload import Lanes, Offload
from stage1 import ZeroStage1
from stage2 import ZeroStage2
from stage3 import ZeroStage3

STAGES = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}


def build(args):
    torch.manual_seed(0)
    with torch.device("cuda"):
        layers = [nn.Linear(args.width, args.width, bias=False, dtype=torch.bfloat16)
                  for _ in range(args.layers)]  # fmt: skip
    return nn.Sequential(*layers)


def timed(fn, repeat=5):
    """Median seconds of fn(), the GPU waited for."""
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def floor(numel):
    """Seconds for gradient down, update and weights up, in pieces of one bucket."""
    piece = min(numel, 2**26)
    lanes = Lanes(torch.device("cuda"), pin=True)
    host, half = lanes.host(piece, torch.float32), lanes.host(piece, torch.bfloat16)
    device, low = torch.zeros(piece, device="cuda"), torch.zeros(piece, device="cuda").bfloat16()
    down = timed(lambda: host.copy_(device, non_blocking=True))
    up = timed(lambda: low.copy_(half, non_blocking=True))
    param = nn.Parameter(torch.zeros(piece))
    param.grad = torch.ones(piece)
    update = timed(torch.optim.AdamW([param], fused=True).step)
    return {n: t * numel / piece for n, t in (("down", down), ("update", update), ("up", up))}


def run(args, stage, offload, backwards, **options):
    """Median seconds of (all backwards, step), peak GiB on the device."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build(args)
    zero = STAGES[stage](
        model,
        torch.optim.AdamW,
        managed_gradient_accumulation=False,
        offload_optimizer=offload,
        reduce_bucket_size=args.bucket,
        lr=1e-4,
        **options,
    )
    x = torch.randn(args.batch, args.width, device="cuda", dtype=torch.bfloat16)
    parts = {"backward": [], "step": []}
    for _ in range(args.steps + 2):
        torch.cuda.synchronize()
        a = time.perf_counter()
        for _ in range(backwards):
            zero.backward(model(x).float().square().mean())
        torch.cuda.synchronize()
        b = time.perf_counter()
        zero.step()
        torch.cuda.synchronize()
        parts["backward"].append(b - a)
        parts["step"].append(time.perf_counter() - b)
    peak = torch.cuda.max_memory_allocated() / 2**30
    formula = sum(zero.memory()["device"].values()) / 2**30
    zero.close()
    return *(statistics.median(times[2:]) for times in parts.values()), peak, formula


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--bucket", type=int, default=2**26)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--nvme", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    numel = args.layers * args.width**2
    times = floor(numel)
    print(f"{numel / 1e6:.0f}M parameters, bf16, {torch.get_num_threads()} threads")
    print("floor: " + ", ".join(f"{n} {t * 1e3:.0f} ms" for n, t in times.items()), flush=True)
    print("stage  tier  sums    backwards  backward ms  step ms  of floor  peak GiB  formula GiB")
    with tempfile.TemporaryDirectory() as folder:
        for stage in STAGES:
            for tier in ["none", "cpu"] + ["nvme"] * args.nvme:
                for sums in ("host", "device") if tier != "none" else ("device",):
                    for backwards in (1, 4, 16) if stage == 2 and tier == "cpu" else (1,):
                        offload = None
                        if tier != "none":
                            offload = Offload(tier, nvme_path=folder, accumulate_on=sums)
                        back, step, peak, formula = run(args, stage, offload, backwards)
                        print(
                            f"{stage:5}  {tier:4}  {sums:6}  {backwards:9}  {back * 1e3:11.0f}"
                            f"  {step * 1e3:7.0f}  {step / max(times.values()):8.2f}"
                            f"  {peak:8.2f}  {formula:11.2f}",
                            flush=True,
                        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
