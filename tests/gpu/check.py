"""What can behave differently on a GPU, checked on one: `python tests/gpu/check.py`.

Runs twice: one process with NCCL, then two ranks that share the GPU with Gloo. Prints one line
for each configuration, the allocator's figures beside the formula, and ends with a verdict; exit
status 1 if a promise is broken. Without a GPU it says so and ends with status 2.

- managed and unmanaged, host and NVMe, sums on host and on device: bitwise equal
- stage 1 in one process: bitwise equal to the plain optimizer
- a gradient that is still being computed when step() is called is never read too early (50 runs)
- page-locked memory is exactly what was asked for; pageable memory gives the same numbers
"""

import argparse
import datetime
import gc
import hashlib
import json
import os
import subprocess
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
MIB = 2**20


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(seed, width=512, depth=6, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(width) for _ in range(depth))).to("cuda", dtype)


def batch(rank, index, width=512, dtype=torch.float32):
    draw = torch.Generator().manual_seed(1000 * rank + index)
    return torch.randn(8, width, generator=draw).to("cuda", dtype)


def fingerprint(tensors):
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()[:12]


def train(stage, managed, dtype=torch.float32, steps=4, windows=2, **options):
    """One short training; returns fingerprint, allocator figures and memory()."""
    rank = dist.get_rank()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    model = build(rank, dtype=dtype)
    zero = STAGES[stage](
        model,
        torch.optim.AdamW,
        managed_gradient_accumulation=managed,
        gradient_accumulation_steps=windows,
        reduce_bucket_size=2_200_000,
        lr=1e-3,
        **options,
    )
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for step in range(steps):
        for micro in range(windows):
            loss = model(batch(rank, step * windows + micro, dtype=dtype)).float().square().mean()
            zero.backward(loss if managed else loss / windows)
            if managed:
                zero.step()
        if not managed:
            zero.step()
        assert zero.was_step_applied()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    held = torch.cuda.memory_allocated() - base
    result = {
        "print": fingerprint(zero.state_dict()["master"]),
        "held": held,
        "peak": torch.cuda.max_memory_allocated() - base,
        "memory": zero.memory(),
        "seconds": seconds,
        "norm": zero.global_grad_norm,
    }
    zero.close()
    return result


def plain(steps=4, windows=2):
    model = build(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        for micro in range(windows):
            (model(batch(0, step * windows + micro)).square().mean() / windows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return fingerprint(dict(model.named_parameters()))


def equalities(folder, problems):
    """Every stage, offload and mode; collects broken promises in `problems`."""
    say = print if dist.get_rank() == 0 else lambda *_: None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        scale = {"loss_scale": "dynamic", "initial_loss_scale": 256.0}
        scale = scale if dtype == torch.float16 else {}
        for stage in STAGES:
            prints = {}
            for kind in (
                "none",
                "cpu",
                "nvme",
                "cpu-device",
                "nvme-device",
                "cpu+param",
                "nvme+param",
            ):
                if "param" in kind and stage < 3 or scale and "device" in kind:
                    continue
                where, _, how = kind.partition("-") if "-" in kind else kind.partition("+")
                there = {"sub_group_size": 1_000_000, "nvme_path": folder}
                there |= {"accumulate_on": "device"} if how == "device" else {}
                offload = None if where == "none" else Offload(where, **there)
                more = {"offload_param": Offload(where, nvme_path=folder)} if how == "param" else {}
                got = [
                    train(stage, managed, dtype, offload_optimizer=offload, **more, **scale)
                    for managed in (True, False)
                ]
                prints[kind] = got[0]["print"]
                if got[0]["print"] != got[1]["print"]:
                    problems.append(f"stage {stage} {kind} {dtype}: managed != unmanaged")
                device = got[0]["memory"]["device"]
                say(
                    f"stage {stage} {kind:12} {str(dtype)[6:]:9} {got[0]['print']} "
                    f"held {got[0]['held'] / MIB:7.1f} MiB formula "
                    f"{sum(device.values()) / MIB:7.1f} "
                    f"peak {got[0]['peak'] / MIB:7.1f}  {got[0]['seconds'] * 1e3:7.1f} ms/step"
                )
            host = {k: v for k, v in prints.items() if k != "none"}
            if len(set(host.values())) > 1:
                problems.append(f"stage {stage} {dtype}: tiers differ {host}")
            alone = stage == 1 and dtype == torch.float32 and dist.get_world_size() == 1
            if alone and prints["none"] != plain():
                problems.append("stage 1 != plain optimizer")


def early_reads(problems, runs=50):
    """A 64 MB weight whose gradient waits behind a long kernel; step() at once."""
    for accumulate_on in ("host", "device"):
        model = nn.Linear(4096, 4096, bias=False, device="cuda")
        nn.init.zeros_(model.weight)
        zero = ZeroStage2(
            model,
            torch.optim.SGD,
            managed_gradient_accumulation=False,
            offload_optimizer=Offload("cpu", accumulate_on=accumulate_on),
            lr=1.0,
        )
        ones = torch.ones(1, 4096, device="cuda")
        for run in range(1, runs + 1):
            torch.cuda._sleep(20_000_000)
            zero.backward(model(ones).sum())
            zero.step()
            if not (model.weight == -float(run)).all():
                problems.append(f"copy read early: run {run}, sums on {accumulate_on}")
                break
        zero.close()
    model = nn.ParameterList(
        [nn.Parameter(torch.zeros(4_000_000, device="cuda")) for _ in range(3)]
    )
    zero = ZeroStage2(
        model,
        torch.optim.SGD,
        managed_gradient_accumulation=False,
        offload_optimizer=Offload("cpu"),
        reduce_bucket_size=5_000_000,
        lr=1.0,
    )
    for run in range(1, 11):
        torch.cuda._sleep(20_000_000)
        zero.backward(sum((i + 1) * p.sum() for i, p in enumerate(model)))
        zero.step()
        for i, p in enumerate(model):
            if not (p == -float(run * (i + 1))).all():
                problems.append(f"bucket reused early: parameter {i}, run {run}")
    zero.close()


def locked(problems):
    """Page-locked memory to the byte."""
    for numel in (65 * MIB // 4, 1000, 257):
        lanes = Lanes(torch.device("cuda"), pin=True)
        tensor = lanes.host(numel, torch.float32)
        if not tensor.is_pinned() or tensor.untyped_storage().nbytes() > 1.15 * numel * 4:
            problems.append(f"{numel} elements: {tensor.untyped_storage().nbytes()} bytes locked")
    pageable = [
        train(2, True, offload_optimizer=Offload("cpu", pin_memory=pin))["print"]
        for pin in (True, False)
    ]
    if pageable[0] != pageable[1]:
        problems.append("pageable memory gives other numbers")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--folder")
    given = parser.parse_args()
    if given.rank is None:
        return launch()
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if given.world == 1 else "gloo",
        store=dist.FileStore(f"{given.folder}/store{given.world}", given.world),
        rank=given.rank,
        world_size=given.world,
        timeout=datetime.timedelta(seconds=60),
    )
    problems = []
    train(1, True)  # libraries take their workspaces: not ours to count
    equalities(given.folder, problems)
    early_reads(problems)
    locked(problems)
    dist.barrier()
    dist.destroy_process_group()
    Path(f"{given.folder}/problems{given.world}.{given.rank}").write_text(json.dumps(problems))
    return None


def launch():
    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        sys.exit(2)
    broken = 0
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            print(
                f"--- {world} rank(s) on one {torch.cuda.get_device_name()}, "
                f"torch {torch.__version__}"
            )
            command = [
                sys.executable,
                __file__,
                "--world",
                str(world),
                "--folder",
                folder,
                "--rank",
            ]
            env = os.environ | {"OMP_NUM_THREADS": "8"}
            ranks = [subprocess.Popen([*command, str(r)], env=env) for r in range(world)]
            for rank, process in enumerate(ranks):
                code = process.wait()
                found = Path(f"{folder}/problems{world}.{rank}")
                problems = (
                    json.loads(found.read_text()) if found.exists() else [f"exit code {code}"]
                )
                for problem in problems:
                    print(f"BROKEN rank {rank}: {problem}")
                broken += len(problems)
    print(f"verdict: {broken} broken promises")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
