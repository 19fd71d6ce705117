"""How fast and how large, beside DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed.

    make bench                    everything, about a quarter of an hour on two cores
    make bench BENCH="--steps 4 --only stage1 stage3"

Each line of the table is a ratio of two contenders that took turns in one run, and the limit that
it must keep. Losses of all contenders of a run must be equal. Ends with one line of all ratios and
exit code 1 if one of them is missed. A peer that cannot be had is skipped, and that is said.

    limit            of what                                     where it is from
    stage 1   1.00   plain DDP                                   the same bytes are sent
    stage 2   0.80   DeepSpeed's stage 2
    stage 3   0.80   FSDP2, and DeepSpeed's stage 3
    cpu       1.05   the same stage without offload              without a GPU nothing moves
    nvme      1.15   the slower of disk and step without NVMe    they run side by side
    unmanaged 1.05   managed                                     stages 2 and 3 lose no overlap
    memory    1.00   the leanest peer of the stage
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import arena
import torch

sys.path.insert(0, str(arena.ROOT))

import nvme

RUNS = {  # name -> {key: a command line of contender.py}
    "stage1": {
        "DDP": "ddp",
        "ZeroRedundancyOptimizer": "zero_redundancy",
        "DeepSpeed 1": "deepspeed --stage 1",
        "stage 1": "ours --stage 1",
        "stage 1 unmanaged": "ours --stage 1 --mode unmanaged",
        "stage 1 cpu": "ours --stage 1 --offload cpu",
    },
    "stage2": {
        "DeepSpeed 2": "deepspeed --stage 2",
        "stage 2": "ours --stage 2",
        "stage 2 unmanaged": "ours --stage 2 --mode unmanaged",
        "stage 2 cpu": "ours --stage 2 --offload cpu",
    },
    "stage3": {
        "FSDP2": "fsdp2",
        "FSDP2, reducing once": "fsdp2 --last",
        "DeepSpeed 3": "deepspeed --stage 3",
        "stage 3": "ours --stage 3",
        "stage 3 unmanaged": "ours --stage 3 --mode unmanaged",
        "stage 3 cpu": "ours --stage 3 --offload cpu",
    },
    "nvme": {
        "stage 1": "ours --stage 1",
        "stage 1 nvme": "ours --stage 1 --offload nvme",
        "stage 2": "ours --stage 2",
        "stage 2 nvme": "ours --stage 2 --offload nvme",
        "stage 3": "ours --stage 3",
        "stage 3 nvme": "ours --stage 3 --offload nvme",
        "DeepSpeed 3 nvme": "deepspeed --stage 3 --offload nvme",
    },
}
LIMITS = {  # run -> [(ours, of what, limit of the ratio of seconds)]
    "stage1": [
        ("stage 1", "DDP", 1.0),
        ("stage 1 cpu", "stage 1", 1.05),
    ],
    "stage2": [
        ("stage 2", "DeepSpeed 2", 0.8),
        ("stage 2 unmanaged", "stage 2", 1.05),
        ("stage 2 cpu", "stage 2", 1.05),
    ],
    "stage3": [
        ("stage 3", "FSDP2", 0.8),
        ("stage 3", "DeepSpeed 3", 0.8),
        ("stage 3 unmanaged", "stage 3", 1.05),
        ("stage 3 cpu", "stage 3", 1.05),
    ],
    "nvme": [("stage 3 nvme", "DeepSpeed 3 nvme", 1.0)],
}


def can_run_deepspeed():
    """None, or why DeepSpeed is left out."""
    if importlib.util.find_spec("deepspeed") is None:
        return "it is not installed (requirements-deepspeed.txt)"
    return None


class Report:
    """Prints as it goes; remembers ratios for the last line and whether one was missed."""

    def __init__(self):
        self.ratios, self.missed = [], []

    def judge(self, what, value, limit, unit="x"):
        """One ratio and its limit."""
        good = value <= limit
        self.ratios.append(f"{what} {value:.2f}")
        if not good:
            self.missed.append(what)
        print(
            f"  {what:<44} {value:6.3f} {unit}   at most {limit:.2f}   {'' if good else 'MISSED'}"
        )

    def end(self):
        """The closing line; the exit code."""
        print("\nratios: " + ", ".join(self.ratios))
        print("missed: " + ", ".join(self.missed) if self.missed else "none missed")
        return 1 if self.missed else 0


def show(run):
    """Seconds, ratio to the first, memory and loss of each contender of one run."""
    first = next(iter(run.values()))
    print(
        f"  {'':<28}{'s/step':>8}{'ratio':>8}{'MiB peak':>10}{'read':>8}{'written':>9}{'loss':>11}"
    )
    for key, c in run.items():
        moved = [sum(r[way] for r in c.report) / 2**20 for way in ("read", "written")]
        print(
            f"  {key:<28}{c.median:8.3f}{arena.ratio(c, first):8.3f}{c.peak:10.0f}"
            f"{moved[0]:8.0f}{moved[1]:9.0f}{c.losses[-1]:11.6f}"
        )


def check_losses(run):
    """The work must have been the same."""
    for turn in zip(*(c.losses for c in run.values()), strict=True):
        spread = max(turn) - min(turn)
        if spread > 2e-3 * abs(statistics.mean(turn)):
            raise SystemExit(f"losses differ by {spread:.2e}: {dict(zip(run, turn, strict=True))}")


def judge_memory(report, name, run):
    """Peak memory against the leanest peer that did the same."""
    peers = {k: c.peak for k, c in run.items() if not k.startswith("stage")}
    key = {"stage1": "stage 1", "stage2": "stage 2", "stage3": "stage 3"}.get(name)
    if key and peers:
        leanest = min(peers, key=peers.get)
        report.judge(f"{key} peak / {leanest}", run[key].peak / peers[leanest], 1.0)


def disk_rates(folder, nbytes=2**28):
    """(read, write) in bytes per second: one stream past the page cache, in pieces of 8 MiB."""
    buffer = nvme.empty(2**23)
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0)
    path = os.path.join(folder, "rate.bin")
    file, rates = os.open(path, flags, 0o600), []
    try:
        os.posix_fallocate(file, 0, nbytes)
        for move in (os.pwritev, os.preadv, os.pwritev, os.preadv):
            start = time.perf_counter()
            for at in range(0, nbytes, buffer.nbytes):
                move(file, [memoryview(buffer.numpy())], at)
            rates.append(nbytes / (time.perf_counter() - start))
    finally:
        os.close(file)
        os.unlink(path)
    return max(rates[1::2]), max(rates[::2])


def judge_nvme(report, run, rates):
    """Time with NVMe over the slower of the disk alone and the step without it."""
    print(f"  sequential O_DIRECT: read {rates[0] / 1e9:.2f} GB/s, write {rates[1] / 1e9:.2f} GB/s")
    for stage in (1, 2, 3):
        ours, plain = run[f"stage {stage} nvme"], run[f"stage {stage}"]
        moved = [sum(r["traffic"][f"nvme_{w}"] for r in ours.report) for w in ("read", "write")]
        disk = moved[0] / rates[0] + moved[1] / rates[1]
        print(f"  stage {stage}: {sum(moved) / 1e6:.0f} MB a step, {disk:.3f} s of disk")
        report.judge(
            f"stage {stage} nvme / slower of both", ours.median / max(disk, plain.median), 1.15
        )


def fixed_cost(report):
    """Milliseconds a rank and step for a model of one parameter, and what an import takes."""
    size = '{"layers": 0, "width": 1, "heads": 1, "length": 1, "rows": 1, "micro_batches": 1}'
    run = arena.compete({"ours": "ours --stage 1", "ddp": "ddp"}, size, 200)
    plain = arena.compete({"alone": "ddp"}, size, 200, ranks=1)["alone"].median
    report.judge("fixed cost, stage 1", 1000 * (run["ours"].median - plain), 2.0, "ms")
    times = {"torch": [], "stage3": []}
    for _ in range(5):
        for name, taken in times.items():
            start = time.perf_counter()
            code = f"import torch, torch.distributed, {name}"
            subprocess.run([sys.executable, "-c", code], cwd=arena.ROOT, check=True)
            taken.append(time.perf_counter() - start)
    extra = statistics.median(times["stage3"]) - statistics.median(times["torch"])
    report.judge("import stage3, over torch", extra, 0.1, "s")


def scaling(folder):
    """Seconds per step against parameters, micro-batches and ranks, as a picture with lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    base = {"layers": 4, "width": 256, "heads": 4, "length": 64, "rows": 1, "micro_batches": 1}
    sweeps = {
        "parameters": [
            {**base, "layers": n, "width": w} for n, w in ((2, 192), (6, 256), (6, 512), (16, 512))
        ],
        "micro-batches": [{**base, "micro_batches": m} for m in (1, 2, 4, 8, 16)],
        "ranks": [base] * 4,
    }
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for axis, (what, sizes) in zip(axes, sweeps.items(), strict=True):
        lines = {}
        for n, size in enumerate(sizes, 1):
            x = {"ranks": n, "micro-batches": size["micro_batches"]}.get(what, count(size))
            text = str(size).replace("'", '"')
            every = {f"stage {s}": f"ours --stage {s}" for s in (1, 2, 3)}
            run = arena.compete(every, text, 5, ranks=n if what == "ranks" else 2)
            for key, contender in run.items():
                lines.setdefault(key, []).append((x, contender.median))
                print(f"  {what} {x:>9} {key}: {contender.median:.3f} s")
        for (key, points), mark in zip(lines.items(), "osd", strict=True):
            axis.plot(*zip(*points, strict=True), marker=mark, label=key)
        axis.set(xlabel=what, ylabel="seconds per step", ylim=(0, None), xlim=(0, None))
        axis.legend()
    figure.savefig(Path(folder) / "scaling.png", dpi=110)
    print(f"  the picture: {Path(folder) / 'scaling.png'}")


def count(size):
    """Parameters of a model of this size."""
    import work

    with torch.device("meta"):
        return sum(p.numel() for p in work.build(size).parameters())


def parse():
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = [*RUNS, "fixed", "scaling"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="parts to run")
    parser.add_argument("--size", default="big", help="small or big (default)")
    parser.add_argument("--steps", type=int, default=12, help="turns, each a step of everyone")
    parser.add_argument("--folder", default="runs", help="on the disk to measure; default runs/")
    return parser.parse_args()


def main():
    """Every part that is asked for."""
    args, report, why = parse(), Report(), can_run_deepspeed()
    os.makedirs(args.folder, exist_ok=True)
    arena.unlock()
    if why:
        print(f"DeepSpeed is skipped: {why}")
    for name, lines in RUNS.items():
        if name not in args.only:
            continue
        lines = {k: line for k, line in lines.items() if not (why and k.startswith("DeepSpeed"))}
        print(f"\n{name}, {args.size}, two ranks, {args.steps} turns")
        run = arena.compete(lines, args.size, args.steps, folder=os.path.abspath(args.folder))
        show(run)
        check_losses(run)
        for ours, of, limit in LIMITS[name]:
            if of in run:
                report.judge(f"{ours} / {of}", arena.ratio(run[ours], run[of]), limit)
        judge_memory(report, name, run)
        if name == "nvme":
            with tempfile.TemporaryDirectory(dir=args.folder) as place:
                judge_nvme(report, run, disk_rates(place))
    if "fixed" in args.only:
        print("\nfixed cost")
        fixed_cost(report)
    if "scaling" in args.only:
        print("\nscaling")
        scaling(args.folder)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
