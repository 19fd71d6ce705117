"""Optimizer offload on one GPU beside its floor: `python tests/benchmarks/gpu_offload.py`.

One process, NCCL, a bf16 model of --layers square layers of --width. The floor of a step is the
largest of three times, each measured here by itself: the FP32 gradient coming down, the fused AdamW
on the host, the new weights going up. Prints milliseconds, medians of --steps, and ratios. Where
DeepSpeed can be imported, its ZeRO-Offload takes turns with ours on the same model and data.
"""

import argparse
import datetime
import gc
import importlib.util
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


def ours(args, stage, offload):
    """(what takes backward(loss) and step(), the model)."""
    model = build(args)
    zero = STAGES[stage](
        model,
        torch.optim.AdamW,
        managed_gradient_accumulation=False,
        offload_optimizer=offload,
        reduce_bucket_size=args.bucket,
        lr=1e-4,
    )
    return zero, model


def theirs(args, stage, backwards):
    """DeepSpeed's ZeRO-Offload: pinned memory, its own CPU Adam, copies beside backward."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": backwards,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "reduce_bucket_size": args.bucket,
            "overlap_comm": True,
        },
    }
    engine, *_ = deepspeed.initialize(model=build(args), config=config, dist_init_required=False)
    return engine, engine


def window(zero, model, x, backwards):
    """(seconds of all backwards, of the step, the last loss)."""
    torch.cuda.synchronize()
    a = time.perf_counter()
    for k in range(backwards):
        loss = model(x).float().square().mean()
        zero.backward(loss)
        if zero is model and k < backwards - 1:
            zero.step()  # DeepSpeed counts calls: only the last is a step
    torch.cuda.synchronize()
    b = time.perf_counter()
    zero.step()
    torch.cuda.synchronize()
    return b - a, time.perf_counter() - b, loss.item()


def data(args):
    return torch.randn(args.batch, args.width, device="cuda", dtype=torch.bfloat16)


def run(args, stage, offload, backwards):
    """Median seconds of (all backwards, step), peak and formula in GiB on the device."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    zero, model = ours(args, stage, offload)
    x = data(args)
    times = [window(zero, model, x, backwards)[:2] for _ in range(args.steps + 2)][2:]
    peak = torch.cuda.max_memory_allocated() / 2**30
    formula = sum(zero.memory()["device"].values()) / 2**30
    zero.close()
    return *(statistics.median(part) for part in zip(*times, strict=True)), peak, formula


def beside(args, stage, backwards):
    """Ours and DeepSpeed's in turns; prints medians of a window, their ratio, and the losses."""
    gc.collect()
    torch.cuda.empty_cache()
    x = data(args)
    zero, model = ours(args, stage, Offload("cpu"))
    sides = {"ours": (zero, model), "DeepSpeed": theirs(args, stage, backwards)}
    found = {name: [] for name in sides}
    for _ in range(args.steps + 2):
        for name, (runner, net) in sides.items():
            found[name].append(window(runner, net, x, backwards))
    total = {}
    for name, windows in found.items():
        back, step, _ = (statistics.median(part) for part in zip(*windows[2:], strict=True))
        total[name] = back + step
        losses = " ".join(f"{loss:.5f}" for *_, loss in windows[:4])
        print(f"stage {stage}, {backwards:2} backwards, {name:9}: backward {back * 1e3:6.0f} ms, "
              f"step {step * 1e3:6.0f} ms; losses {losses}")  # fmt: skip
    print(f"  ours is {total['ours'] / total['DeepSpeed']:.2f} of DeepSpeed's", flush=True)
    zero.close()
    sides["DeepSpeed"][0].destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--bucket", type=int, default=2**26)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--nvme", action="store_true")
    parser.add_argument("--only-beside", action="store_true", help="only ours beside DeepSpeed's")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    numel = args.layers * args.width**2
    times = floor(numel)
    print(f"{numel / 1e6:.0f}M parameters, bf16, {torch.get_num_threads()} threads")
    print("floor: " + ", ".join(f"{n} {t * 1e3:.0f} ms" for n, t in times.items()), flush=True)
    if importlib.util.find_spec("deepspeed"):
        for stage, backwards in ((2, 1), (2, 4), (3, 1)):
            beside(args, stage, backwards)
    else:
        print("DeepSpeed is not installed: no comparison with it")
    if not args.only_beside:
        matrix(args, max(times.values()))
    dist.destroy_process_group()


def matrix(args, bound):
    """Every stage and tier by itself; `bound`: the floor's largest time, seconds."""
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
                            f"  {step * 1e3:7.0f}  {step / bound:8.2f}"
                            f"  {peak:8.2f}  {formula:11.2f}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
