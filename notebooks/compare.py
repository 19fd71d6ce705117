"""Every stage, offload and mode beside plain DDP, on the same data. This is what `make demo` runs.

    torchrun --nproc-per-node 2 notebooks/compare.py      two ranks; a minute on two cores
    python notebooks/compare.py --quick                   one process, few steps

Shows a table, writes DIR/compare.json and DIR/compare.png, and ends with one line that says whether
the promises hold here. The exit status is 1 if one of them is broken:

    managed = unmanaged      bit for bit, for every stage and offload
    cpu = nvme = none        bit for bit, for every stage (with a GPU: cpu = nvme)
    stage 1 = DDP            bit for bit, for one rank and two
    stages 2 and 3 = DDP     up to the rounding of another order of addition: TOLERANCE
    memory and traffic       what the formulas in `demo.py` say

Read first: `configurations` (what runs), then `broken_promises` (what is required).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from notebooks import demo
from stage1 import ZeroStage1
from stage2 import ZeroStage2
from stage3 import ZeroStage3

STAGES = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}
NETWORK = ("reduce_scatter", "all_gather", "all_reduce", "control")
COPIES, DISK = ("device_to_host", "host_to_device"), ("nvme_read", "nvme_write")

# How far parameters may end from DDP's, as a share of how far training moved them, and losses as a
# share of themselves. FP32 rounds to 6e-8 of a weight, and in a few steps a weight moves by a few
# percent of itself, so one rounding is about 1e-6 of the way. A mistake is larger: gradients summed
# instead of averaged, which Adam hides but for its eps, give 4e-4.
TOLERANCE = 1e-5
BLOCKS = 1.02  # on NVMe, rows of a bucket (here 400 kB and more) are rounded up to blocks of 4 KiB


def configurations(options):
    """The command line of every run, as `demo.arguments` gives it."""
    where = [(stage, home, "none") for stage in STAGES for home in ("none", "cpu", "nvme")]
    where += [(3, home, home) for home in ("cpu", "nvme")]
    for (stage, home, weights), mode in itertools.product(where, ("managed", "unmanaged")):
        args = demo.arguments(stage, ["--mode", mode, "--offload", home])
        args.offload_param, args.nvme_path = weights, options.nvme_path
        args.steps, args.micro_batches = options.steps, options.micro_batches
        args.device, args.seed = options.device, options.seed
        yield args


def label(config):
    """What is compared, without the mode, such as "stage 3, nvme + params"."""
    if config["stage"] == 0:
        return "plain DDP"
    params = " + params" if config["offload_param"] != "none" else ""
    return f"stage {config['stage']}, {config['offload']}{params}"


# ---- what runs -----------------------------------------------------------------------------------


class Plain:
    """DDP and the plain optimizer, behind the calls that `demo.train` makes."""

    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.model = demo.Transformer().to(args.device)
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **demo.ADAMW)
        self.micro_batches, self.calls = args.micro_batches, 0

    def __call__(self, x, y):
        self.calls += 1
        last = self.calls % self.micro_batches == 0
        with contextlib.nullcontext() if last else self.ddp.no_sync():
            return self.ddp(x, y)

    def backward(self, loss):
        """The caller has divided the loss by the number of micro-batches."""
        loss.backward()
        return loss.detach()

    def step(self):
        """Gradients are views of DDP's buckets, which it keeps: they stay, and count as memory."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def memory(self):
        """Live bytes, by the names of `demo.run`."""
        params = list(self.model.parameters())
        state = [t for s in self.optimizer.state.values() for k, t in s.items() if k != "step"]
        kinds = {"params": params, "grads": [p.grad for p in params], "optimizer": state}
        return {f"device {kind}": sum(t.nbytes for t in ts) for kind, ts in kinds.items()}


def run_plain(args):
    """What `demo.run` returns, for DDP; its traffic, which it does not count, by formula."""
    plain = Plain(args)
    losses, seconds = demo.train(plain, plain, args, lambda text: None)
    params = {n: p.detach().cpu() for n, p in plain.model.named_parameters()}
    values = {"P": sum(p.numel() for p in params.values()), "N": dist.get_world_size()}
    values |= {"e": 4, "m": args.micro_batches}
    memory = {"device params": "P*e", "device grads": "P*e", "device optimizer": "8*P"}
    sent = {"all_reduce": 8 * values["P"] * (values["N"] - 1) / values["N"]}
    return {
        "config": {**vars(args), "stage": 0, "mode": ""},
        "values": values,
        "losses": losses,
        "memory": demo.compare(memory, plain.memory(), values),
        "traffic": demo.compare({"all_reduce": "2*P*e*(N-1)/N"}, sent, values),
        "seconds": statistics.median(seconds),
        "fingerprint": demo.fingerprint(params),
        "from_ddp": 0.0,
        "loss_from_ddp": 0.0,
    }, params


def run_all(options, say, only=lambda args: True):
    """The results of DDP and of every configuration, or `only` some, each with its distance from
    DDP."""
    lines = [args for args in configurations(options) if only(args)]
    torch.manual_seed(options.seed)
    start = dict(demo.Transformer().named_parameters())
    plain = argparse.Namespace(**{**vars(lines[0]), "mode": "unmanaged"})  # the loop divides
    result, truth = run_plain(plain)
    results, way = [result], distance(truth, start)
    say(f"[ 1 of {len(lines) + 1}] {progress(result)}")
    for i, args in enumerate(lines, start=2):
        result, params = demo.run(STAGES[args.stage], args, lambda text: None)
        result["from_ddp"] = distance(params, truth) / way
        pairs = zip(result["losses"], results[0]["losses"], strict=True)
        result["loss_from_ddp"] = max(abs(a - b) / b for a, b in pairs)
        results.append(result)
        say(f"[{i:2} of {len(lines) + 1}] {progress(result)}")
    return results


def progress(result):
    """One line, as soon as it is known."""
    name = f"{label(result['config'])} {result['config']['mode']}"
    hashed = result["fingerprint"][:8]
    return f"{name:<34} loss {result['losses'][-1]:.4f}  {result['seconds']:.3f} s a step  {hashed}"


@torch.no_grad()
def distance(params, others):
    """Norm of the difference of two {name: tensor}, over the names in the first."""
    squares = [(params[n].double() - others[n].double()).square().sum() for n in params]
    return float(sum(squares)) ** 0.5


# ---- what is required ----------------------------------------------------------------------------


def same(results, key):
    """{key(config): whether all results with this key have one fingerprint}."""
    prints = {}
    for result in results:
        prints.setdefault(key(result["config"]), set()).add(result["fingerprint"])
    return {k: len(found) == 1 for k, found in prints.items()}


def across_tiers(config):
    """Names what must be equal on all tiers. A GPU's own update rounds otherwise than a CPU's."""
    alone = config["device"] == "cuda" and config["offload"] == "none"
    return f"stage {config['stage']}, {config['mode']}{', not offloaded' if alone else ''}"


def broken_promises(results):
    """One line for each promise that does not hold; results[0] is DDP."""
    ddp, ours = results[0], results[1:]
    broken = [f"{k}: managed and unmanaged differ" for k, ok in same(ours, label).items() if not ok]
    broken += [f"{k}: tiers differ" for k, ok in same(ours, across_tiers).items() if not ok]
    for result in ours:
        config = result["config"]
        name = f"{label(config)}, {config['mode']}"
        update_like_ddp = config["device"] == "cpu" or config["offload"] == "none"
        bitwise = config["stage"] == 1 and result["values"]["N"] <= 2 and update_like_ddp
        if bitwise and result["fingerprint"] != ddp["fingerprint"]:
            broken.append(f"{name}: not bitwise equal to DDP")
        for what in ("from_ddp", "loss_from_ddp"):
            if not result[what] <= TOLERANCE:  # NaN is not
                broken.append(f"{name}: {what} is {result[what]:.1e}, more than {TOLERANCE:.0e}")
        for kind, row in {**result["memory"], **result["traffic"]}.items():
            if kind != "control" and not as_formula(kind, row):
                expected = f"{row['formula']} = {row['value']:,.0f}" if row["formula"] else "none"
                broken.append(f"{name}: {kind} is {row['measured']:,.0f} bytes, not {expected}")
    return broken


def as_formula(kind, row):
    """Whether a row of `demo.compare` is in order; what has no formula must not be there."""
    value = row["value"] or 0
    low = value / 2 if row["formula"].startswith("<=") else value  # all units are gathered once
    high = value * BLOCKS if kind.startswith("nvme") else value
    return low <= row["measured"] <= high


def verdict(results, broken):
    """The last line."""
    ours = results[1:]
    pairs, tiers = same(ours, label).values(), same(ours, across_tiers).values()
    equal = "cpu = nvme" if ours[0]["config"]["device"] == "cuda" else "none = cpu = nvme"
    far = max(result["from_ddp"] for result in ours)
    return (
        f"{f'BROKEN ({len(broken)} promises)' if broken else 'OK'}: {len(ours)} configurations; "
        f"managed = unmanaged bitwise in {sum(pairs)} of {len(pairs)}; {equal} bitwise in "
        f"{sum(tiers)} of {len(tiers)}; largest relative difference from DDP {far:.1e}"
    )


# ---- what is shown -------------------------------------------------------------------------------


def megabytes(rows, names):
    """The sum of some measured rows, in units of 10^6 bytes; a name may be the start of one."""
    return sum(row["measured"] for name, row in rows.items() if name.startswith(names)) / 1e6


def table(results):
    """One line per result."""
    groups = f"{'MB held on rank 0':^24}{'MB moved per step':^24}{'seconds':>9}"
    columns = ("device", "host", "nvme", "network", "copies", "disk", "a step")
    names = "".join(f"{name:>8}" for name in columns)
    lines = [
        f"{'':36}{'final':>6}{'':10}{groups}",
        f"{'configuration':<36}{'loss':>6}{'hash':>10}{names}",
    ]
    for r in results:
        held = [megabytes(r["memory"], tier) for tier in ("device", "host", "nvme")]
        moved = [megabytes(r["traffic"], kinds) for kinds in (NETWORK, COPIES, DISK)]
        numbers = "".join(f"{n:8.2f}" if n else f"{'-':>8}" for n in held + moved)
        name = f"{label(r['config']):<24}{r['config']['mode']}"
        hashed = r["fingerprint"][:8]
        lines.append(f"{name:<36}{r['losses'][-1]:6.4f}{hashed:>10}{numbers}{r['seconds']:8.3f}")
    return "\n".join(lines)


SHADES = ("#1f3b5c", "#6f9fd0", "#d6e4f2")  # dark, middle, light: they differ without colour, too


def chart(results):
    """A figure: memory by tier, traffic by road, and seconds, of every configuration."""
    from matplotlib.figure import Figure  # takes a second, and only rank 0 draws

    shown = [r for r in results if r["config"]["mode"] != "unmanaged"]  # the others hold the same
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    memory, traffic, seconds = figure.subplots(1, 3, sharey=True)
    values = results[0]["values"]
    figure.suptitle(
        f"{values['P']:,} parameters in FP32, AdamW; ranks: {values['N']}, "
        f"micro-batches per step: {values['m']}"
    )
    roads = {"network": NETWORK, "device - host": COPIES, "disk": DISK}
    stack(memory, shown, "memory", {"device": "device", "host memory": "host", "NVMe": "nvme"})
    stack(traffic, shown, "traffic", roads)
    for mode, shift, shade in (("", 0, 1), ("managed", -0.2, 0), ("unmanaged", 0.2, 2)):
        bars = [r["seconds"] for r in results if r["config"]["mode"] == mode]
        rows = [len(shown) - len(bars) + i + shift if mode else 0 for i in range(len(bars))]
        style = {"label": mode or "DDP", "color": SHADES[shade], "edgecolor": "black", "lw": 0.6}
        seconds.barh(rows, bars, 0.4, **style)
    memory.set(title="held on rank 0 after a step", xlabel="MB", yticks=range(len(shown)))
    memory.set_yticklabels([label(r["config"]) for r in shown])
    memory.invert_yaxis()
    traffic.set(title="moved by rank 0 in a step", xlabel="MB")
    seconds.set(title="a step takes", xlabel="seconds (median)")
    below = {"ncols": 3, "frameon": False, "handlelength": 1.2, "columnspacing": 1}
    for axis in (memory, traffic, seconds):
        axis.set_xlim(0, 1.05 * axis.dataLim.x1)
        axis.legend(loc="upper center", bbox_to_anchor=(0.45, -0.12), **below)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def stack(axis, results, what, parts):
    """One bar per result, of the parts {label: names of rows} beside each other."""
    left = [0.0] * len(results)
    for shade, (part, kinds) in zip(SHADES, parts.items(), strict=True):
        width = [megabytes(r[what], kinds) for r in results]
        style = {"label": part, "color": shade, "edgecolor": "black", "lw": 0.6}
        axis.barh(range(len(results)), width, left=left, **style)
        left = [a + b for a, b in zip(left, width, strict=True)]


def parse(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Compare every stage, offload and mode with plain DDP on the same data, and "
        "check what this project promises. Exit status 1 if a promise is broken.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Two ranks: torchrun --nproc-per-node 2 notebooks/compare.py",
    )
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="optimizer steps each")
    parser.add_argument("--micro-batches", type=int, default=2, metavar="N", help="per step")
    parser.add_argument("--quick", action="store_true", help="two steps each")
    parser.add_argument("--out", type=Path, default="runs", metavar="DIR", help="for the files")
    parser.add_argument("--nvme-path", metavar="DIR", help="disk to use; None: a temporary folder")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="for the model")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data")
    options = parser.parse_args(argv)
    options.steps = 2 if options.quick else options.steps
    return options


def main(argv=None):
    """Run, show, judge; returns the exit status, the same on every rank."""
    options = parse(argv)
    say = demo.connect(options.device)
    begin = time.perf_counter()
    results = run_all(options, say)
    failed = torch.zeros(1, device=options.device)
    if dist.get_rank() == 0:
        broken = broken_promises(results)
        failed += len(broken)
        options.out.mkdir(parents=True, exist_ok=True)
        document = {"broken": broken, "verdict": verdict(results, broken), "results": results}
        (options.out / "compare.json").write_text(json.dumps(document, indent=1) + "\n")
        chart(results).savefig(options.out / "compare.png", dpi=120)
        say(f"\n{table(results)}\n")
        say(f"MB = 10^6 bytes. Numbers and chart: {options.out}/compare.json, compare.png")
        say("\n".join([f"{time.perf_counter() - begin:.0f} seconds in all", *broken]))
        say(document["verdict"])
    dist.broadcast(failed, 0)
    dist.destroy_process_group()
    return int(failed.item() > 0)


if __name__ == "__main__":
    sys.exit(main())
