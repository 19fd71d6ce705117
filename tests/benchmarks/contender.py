"""One rank of one contender: builds it, then does a step whenever it is told to.

`bench.py` starts this once per rank, says "step" or "end" on standard input and reads a line of
JSON from standard output for each, so several contenders can take turns, step by step.
"""

import argparse
import contextlib
import json
import os
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it when it is imported

import torch
import torch.distributed as dist
import work
from torch.nn.parallel import DistributedDataParallel as DDP


def accumulate(model, data, count, quiet):
    """One window of a plain model; `quiet(last)` is a context without reduction but at the end."""
    total = 0.0
    for i in range(count):
        with quiet(i == count - 1):
            loss = model(*data.next())
            (loss / count).backward()
        total += loss.detach()
    return total / count


def ddp(args, size, data, sharded=False):
    """DistributedDataParallel with fused Adam, alone or with ZeroRedundancyOptimizer: stage 1."""
    model = DDP(work.build(size), gradient_as_bucket_view=True)
    if sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, fused=True, **work.ADAM
        )
    else:
        optimizer = torch.optim.Adam(model.parameters(), fused=True, **work.ADAM)

    def step():
        mean = accumulate(
            model, data, size["micro_batches"],
            lambda last: contextlib.nullcontext() if last else model.no_sync(),
        )  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return step


def zero_redundancy(args, size, data):
    """DDP with ZeroRedundancyOptimizer."""
    return ddp(args, size, data, sharded=True)


def fsdp2(args, size, data):
    """`fully_shard` around each block and the root. --last: reduce on the last micro-batch only."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = work.build(size)
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if args.offload == "cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for module in (*model.blocks, model):
        fully_shard(module, reshard_after_forward=True, **options)
    optimizer = torch.optim.Adam(model.parameters(), fused=True, **work.ADAM)

    @contextlib.contextmanager
    def quiet(last):
        model.set_requires_gradient_sync(last or not args.last)
        yield

    def step():
        mean = accumulate(model, data, size["micro_batches"], quiet)
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return step


def deepspeed(args, size, data):
    """DeepSpeed's own stages 1 to 3; they take "nvme" everywhere and obey it in stage 3."""
    import deepspeed

    zero = {"stage": args.stage}
    if args.offload != "none":
        zero["offload_optimizer"] = {"device": args.offload}
    if args.offload == "nvme":
        zero["offload_optimizer"] |= {"nvme_path": args.folder}
        zero["sub_group_size"] = 2_000_000
    adam = {**work.ADAM, "weight_decay": 0.0, "adam_w_mode": False}
    config = {
        "train_micro_batch_size_per_gpu": size["rows"],
        "gradient_accumulation_steps": size["micro_batches"],
        "managed_gradient_accumulation": args.mode == "managed",
        "optimizer": {"type": "Adam", "params": adam},
        "zero_optimization": zero,
        "gradient_clipping": 0.0,  # its default is to clip at 1
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "aio": {"block_size": 2**20, "queue_depth": 8, "overlap_events": True},
    }
    model = work.build(size)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[*model.parameters()], config=config
    )

    def step():
        total = 0.0
        for _ in range(size["micro_batches"]):
            loss = engine(*data.next())
            engine.backward(loss)  # divides by gradient_accumulation_steps
            if args.mode == "managed":
                engine.step()  # acts on the boundary only
            total += loss.detach()
        if args.mode == "unmanaged":
            engine.step()
        assert engine.was_step_applied()
        return total / size["micro_batches"]

    return step


def ours(args, size, data):
    """This project's stages."""
    from offload import Offload

    zero_class = getattr(__import__(f"stage{args.stage}"), f"ZeroStage{args.stage}")
    home = None
    if args.offload != "none":
        home = Offload(args.offload, args.folder, sub_group_size=2_000_000)
    model, count = work.build(size), size["micro_batches"]
    managed = args.mode == "managed"
    zero = zero_class(
        model, torch.optim.Adam, fused=True, offload_optimizer=home,
        managed_gradient_accumulation=managed,
        gradient_accumulation_steps=count if managed else 1, **work.ADAM,
    )  # fmt: skip

    def step():
        total = 0.0
        for _ in range(count):
            loss = model(*data.next())
            if managed:
                zero.backward(loss)
                zero.step()
            else:
                zero.backward(loss / count)
            total += loss.detach()
        if not managed:
            zero.step()
        assert zero.was_step_applied()
        return total / count

    step.traffic = zero.traffic
    return step


WHO = {f.__name__: f for f in (ddp, zero_redundancy, fsdp2, deepspeed, ours)}


def parse():
    """The arguments with which `bench.py` starts this."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("who", choices=WHO)
    parser.add_argument("--size", default="big", help="a name in work.SIZES, or such a dict")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--offload", default="none", choices=["none", "cpu", "nvme"])
    parser.add_argument("--mode", default="managed", choices=["managed", "unmanaged"])
    parser.add_argument("--last", action="store_true")
    parser.add_argument("--folder", help="where NVMe files go")
    return parser.parse_args()


def main():
    """Build, warm up, then obey."""
    args, wire = parse(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = work.SIZES.get(args.size) or json.loads(args.size)
    step = WHO[args.who](args, size, work.Data(size, dist.get_rank()))

    def say(**what):
        print(json.dumps(what), file=wire, flush=True)

    for _ in range(3):
        loss = step()
    work.forget_peak()
    read, written = work.disk_bytes()
    say(ready=True)
    count, traffic = 0, dict(getattr(step, "traffic", {}))
    for command in sys.stdin:
        if command.strip() == "end":
            break
        start = time.perf_counter()
        loss = step()
        say(seconds=time.perf_counter() - start, loss=float(loss))
        count += 1
    now = work.disk_bytes()
    say(
        peak=work.resident("VmHWM"), resident=work.resident(),
        read=(now[0] - read) / max(count, 1), written=(now[1] - written) / max(count, 1),
        traffic={
            k: (v - traffic.get(k, 0)) / max(count, 1)
            for k, v in dict(getattr(step, "traffic", {})).items()
        },
    )  # fmt: skip
    os._exit(0)  # a contender's own end is not what is measured


if __name__ == "__main__":
    main()
