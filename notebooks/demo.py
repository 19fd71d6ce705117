"""What a stage file does when it is run: train a small transformer, then report and hash.

    python stage1.py                                    one process
    torchrun --nproc-per-node 2 stage3.py --mode unmanaged --offload nvme --offload-param nvme
    torchrun --nproc-per-node 2 stage3.py --save run.pt --resume run.pt      until it is through

The text is the source of Python's standard library, so there is nothing to download. At the end
memory and traffic stand beside their formulas, and a hash of the parameters, by which runs of
different modes and offloads can be compared to the last bit.

Read first: `train`, the loop in both modes, then `formulas`.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import offload

ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


class Transformer(nn.Module):
    """Predicts the next byte of a text: 0.9 million parameters, 0.8 of them in four blocks."""

    def __init__(self, width=128, heads=4, layers=4, length=64, symbols=256):
        super().__init__()
        self.byte, self.place = nn.Embedding(symbols, width), nn.Embedding(length, width)
        # No biases: softmax ignores that of the keys, so its gradient is nothing but rounding error
        # and Adam makes full steps of it; two ways of adding up would soon be far apart.
        shape = {"d_model": width, "nhead": heads, "dim_feedforward": 4 * width, "dropout": 0.0}
        kind = {"activation": "gelu", "batch_first": True, "norm_first": True, "bias": False}
        blocks = (nn.TransformerEncoderLayer(**shape, **kind) for _ in range(layers))
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)

    def forward(self, x, y):  # both (rows, length); gives the mean loss
        h = self.byte(x) + self.place(torch.arange(x.shape[1], device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], h.device, h.dtype)
        for block in self.blocks:
            h = block(h, mask, is_causal=True)  # (rows, length, width)
        logits = self.head(self.norm(h)).flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), y.flatten())


@functools.cache
def read_text(size=2_000_000):
    """The first bytes of the standard library's source: a text that every machine has."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:size]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(text, generator, rows=8, length=64):
    """Bytes from random places, and for each the byte that follows: two (rows, length)."""
    starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
    pieces = text[starts + torch.arange(length + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]


def build(zero_class, args, folder):
    """The model and its optimizer."""
    torch.manual_seed(args.seed)
    model = Transformer().to(args.device, getattr(torch, args.dtype))
    disk = offload.Offload("nvme", args.nvme_path or folder)
    home = {"none": None, "cpu": offload.Offload("cpu"), "nvme": disk}
    managed = args.mode == "managed"
    return model, zero_class(
        model,
        managed_gradient_accumulation=managed,
        gradient_accumulation_steps=args.micro_batches if managed else 1,
        loss_scale="dynamic" if args.dtype == "float16" else 1.0,
        reduce_bucket_size=2**18,  # a block each: the small model shall have several buckets
        offload_optimizer=home[args.offload],
        offload_param=home[args.offload_param],
        **ADAMW,
    )


def train(zero, model, args, say, losses=(), drawn=0):
    """Go on after the steps of which `losses` are known, and after `drawn` batches on each rank.

    Returns two lists with an item per step: mean loss over micro-batches and ranks, seconds.
    """
    draw = torch.Generator().manual_seed(1009 * args.seed + dist.get_rank())  # its own data
    text, losses, seconds = read_text(), [*losses], []
    for _ in range(drawn):
        batch(text, draw)
    for step in range(len(losses) + 1, args.steps + 1):
        begin, total = time.perf_counter(), torch.zeros((), device=args.device)
        for _ in range(args.micro_batches):
            loss = model(*(t.to(args.device) for t in batch(text, draw)))
            if args.mode == "managed":  # zero divides by m, and counts: every m-th step() is one
                total += zero.backward(loss)
                zero.step()
            else:  # zero knows of no m: the caller divides, and says where the window ends
                total += zero.backward(loss / args.micro_batches)
        if args.mode == "unmanaged":
            zero.step()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())  # waits for the GPU, and so the clock
        seconds.append(time.perf_counter() - begin)
        if step == 1 or step % max(1, args.steps // 10) == 0:
            say(f"step {step:4} of {args.steps}   loss {losses[-1]:.4f}   {seconds[-1]:.3f} s")
        drawn += args.micro_batches
        if args.save and (step % args.save_every == 0 or step == args.steps):
            save(zero, args.save, losses, drawn)
    return losses, seconds


def save(zero, path, losses, drawn):
    """Keep all that it takes to go on. Written beside and renamed into place: a kill in the middle
    leaves the old file. A model with frozen parameters or buffers needs model_state_dict() too."""
    counted = zero.traffic.copy()
    state = zero.state_dict(rank0_only=True)
    if state:
        beside = f"{path}.new"
        with open(beside, "wb") as file:
            torch.save({"optimizer": state, "losses": losses, "drawn": drawn}, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before it has the name
        os.replace(beside, path)
    zero.traffic.clear()
    zero.traffic.update(counted)  # what is reported is the steps' own


def resume(zero, path, say):
    """Go on where `save` was, if there is such a file. Returns its losses and drawn batches."""
    saved = {}
    if dist.get_rank() == 0 and os.path.exists(path):
        saved = torch.load(path, weights_only=True)
    known = [{k: saved[k] for k in saved if k != "optimizer"}]
    dist.broadcast_object_list(known)
    if not known[0]:
        say(f"no {path} yet: starting at step 1")
        return [], 0
    zero.load_state_dict(saved.get("optimizer", {}))  # only rank 0 has it, the others get slices
    say(f"going on after step {len(known[0]['losses'])} of {path}")
    return known[0]["losses"], known[0]["drawn"]


def formulas(args):
    """What a rank holds after a step, and what it moves in one, as expressions in P parameters
    (padded), N ranks, e bytes of a weight, m backward calls.

    `<=`: gathered for each forward and each backward that needs weights (an embedding's does not).
    """
    tiers = {"none": "device", "cpu": "host", "nvme": "nvme"}
    home, weights, stage = tiers[args.offload], tiers[args.offload_param], args.stage
    # Adam's two moments and an FP32 master; FP32 weights in the same memory are their own master.
    state = "8*P/N" if args.dtype == "float32" and home == weights != "nvme" else "12*P/N"
    sums, gathers = ("4*P", "") if stage == 1 else ("m*4*P", "<= 2*m*" if stage == 3 else "")
    # Fresh weights cross if they live on one side, device or host, and are updated on the other.
    crosses = "0" if (home == "device") == (weights == "device") else "P*e/N"
    moved = {
        "reduce_scatter": f"{sums}*(N-1)/N",
        "all_gather": f"{gathers}P*e*(N-1)/N",
        "device_to_host": f"{sums}/N" if home != "device" else crosses,
        "host_to_device": f"{gathers}P*e/N" if weights != "device" else crosses,
    }
    for name, params in (("nvme_read", f"{gathers}P*e/N"), ("nvme_write", "P*e/N")):
        terms = [params] * (weights == "nvme") + [state] * (home == "nvme")
        moved[name] = "+".join(terms) or "0"
    # No gradients, but for page-locked memory that awaits the next window's sums from a GPU.
    pinned = "4*P/N" if args.device == "cuda" and home != "device" else "0"
    held = {f"{weights} params": "P*e/N" if stage == 3 else "P*e", f"{home} optimizer": state}
    return {**held, "host grads": pinned}, moved


def compare(expected, measured, values):
    """{name: its formula, the formula's value, the measured one}, for what is not zero."""
    rows = {}
    for name in dict.fromkeys([*expected, *measured]):
        formula, found = expected.get(name, ""), measured.get(name, 0)
        value = eval(formula.removeprefix("<= "), values.copy()) if formula else None
        if value or found:
            rows[name] = {"formula": formula, "value": value, "measured": found}
    return rows


def run(zero_class, args, say):
    """Train as `args` say. Returns the numbers to report and, on rank 0, {name: FP32 tensor}."""
    with tempfile.TemporaryDirectory(prefix="zero-demo-") as folder:
        model, zero = build(zero_class, args, folder)
        with zero:
            known = resume(zero, args.resume, say) if args.resume else ([], 0)
            before = zero.traffic.copy()
            losses, seconds = train(zero, model, args, say, *known)
            moved = zero.traffic - before  # in the steps of this run, which may be none
            moved = {kind: n / max(1, len(seconds)) for kind, n in moved.items()}
            held = {f"{t} {k}": n for t, kinds in zero.memory().items() for k, n in kinds.items()}
            padded = sum(bucket.numel for bucket in zero.buckets)
            params = zero.state_dict(rank0_only=True).get("master", {})
    size = getattr(torch, args.dtype).itemsize
    values = {"P": padded, "N": dist.get_world_size(), "e": size, "m": args.micro_batches}
    memory, traffic = formulas(args)
    return {
        "config": vars(args),
        "values": values,
        "losses": losses,
        "memory": compare(memory, held, values),
        "traffic": compare(traffic, moved, values),
        "seconds": statistics.median(seconds or [0.0]),
        "skipped": zero.skipped_steps,
        "fingerprint": fingerprint(params),
    }, params


def fingerprint(params):
    """A hash of {name: FP32 tensor}, in name order: equal only if every bit is."""
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(params[name].numpy().tobytes())
    return digest.hexdigest()


def report(result, say):
    """Formula, measured value and ratio, side by side."""
    P, N, e, m = result["values"].values()
    say(f"\nP = {P:,} parameters, padded; N = {N} ranks; e = {e} bytes a weight; m = {m} backwards")
    for what, title in (("memory", "bytes on rank 0"), ("traffic", "bytes moved per step")):
        if not result[what]:
            continue  # one process without offload moves nothing
        say(f"\n{title:<20}{'formula':>24}{'':14}{'measured':>14}{'ratio':>8}")
        for name, row in result[what].items():
            value = f"{row['value']:,.0f}" if row["value"] else ""
            ratio = f"{row['measured'] / row['value']:.3f}" if row["value"] else ""
            say(f"{name:<20}{row['formula']:>24}{value:>14}{row['measured']:>14,.0f}{ratio:>8}")
    say(f"\nseconds per step: {result['seconds']:.3f} (median), skipped: {result['skipped']}")
    say(f"fingerprint: {result['fingerprint']}")


def arguments(stage, argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Train a small transformer on the source text of Python's standard library "
        f"with ZeRO stage {stage}, and hold memory and traffic against the formulas.",
        epilog=f"Several ranks: torchrun --nproc-per-node 2 stage{stage}.py [options]",
    )
    tiers, cuda = ["none", "cpu", "nvme"], torch.cuda.is_available()
    for option, default, choices, text in (
        ("mode", "managed", ["managed", "unmanaged"], "who ends a window: a count, or step()"),
        ("offload", "none", tiers, "where FP32 state lives and is updated"),
        ("offload-param", "none", tiers, "where slices of parameters live; stage 3"),
        ("nvme-path", None, None, "folder on the disk to offload to; None: a temporary one"),
        ("steps", 50, None, "optimizer steps"),
        ("micro-batches", 4, None, "backward calls per step"),
        ("dtype", "float32", ["float32", "bfloat16", "float16"], "of the weights"),
        ("device", "cuda" if cuda else "cpu", ["cpu", "cuda"], "where the model computes"),
        ("seed", 0, None, "of weights and data"),
        ("save", None, None, "file to keep the run in, to go on from it"),
        ("save-every", 10, None, "steps from one save to the next; the last step is saved too"),
        ("resume", None, None, "file to go on from, if it is there; any stage, ranks, offload"),
        ("json", None, None, "file to write the numbers to"),
    ):
        how = {"choices": choices} if choices else {"metavar": "PATH"}
        how = {"type": int, "metavar": "N"} if isinstance(default, int) else how
        parser.add_argument(f"--{option}", default=default, help=text, **how)
    args = parser.parse_args(argv, argparse.Namespace(stage=stage))
    if args.offload_param != "none" and stage != 3:
        parser.error(f"--offload-param needs stage 3: stage {stage} keeps all parameters whole")
    counts = args.steps, args.micro_batches, args.save_every
    if min(counts) < 1 or (args.device == "cuda" and not cuda):
        parser.error("--steps, --micro-batches, --save-every start at 1; cuda needs a GPU")
    return args


def connect(device):
    """Join the group that a launcher describes, or be a group of one. Returns rank 0's `print`."""
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 0
    if device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % gpus)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    # NCCL wants a GPU for every rank; with Gloo ranks can share one.
    dist.init_process_group("nccl" if gpus >= ranks else "gloo", **alone)
    return functools.partial(print, flush=True) if dist.get_rank() == 0 else lambda text: None


def main(zero_class):
    """Train, report, and hash the parameters."""
    args = arguments(int(zero_class.__name__[-1]))
    say = connect(args.device)
    result, _ = run(zero_class, args, say)
    report(result, say)
    if args.json and dist.get_rank() == 0:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()
