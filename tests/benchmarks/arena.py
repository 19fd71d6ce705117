"""Let contenders take turns: every one does a step, then every one does the next, and so on.

On a shared machine the seconds of one minute do not compare with those of the next. Neighbouring
steps do, so a ratio here is the median of the ratios of neighbours.
"""

import contextlib
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COMPILED = Path(sys.prefix) / "deepspeed-ops"  # what DeepSpeed compiles, kept for the next run


def unlock():
    """Take the locks off what a killed run was compiling: who finds one waits for it for ever."""
    for lock in COMPILED.glob("*/lock"):
        lock.unlink()


class Contender:
    """All ranks of one contender, in processes of their own. Raises RuntimeError if one ends."""

    def __init__(self, line, size, ranks, folder):
        self.line, self.seconds, self.losses = line, [], []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        path = os.pathsep.join([str(ROOT), str(HERE)])
        shared = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks), "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore",
            "TORCH_EXTENSIONS_DIR": str(COMPILED),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }  # fmt: skip
        words = [str(HERE / "contender.py"), *shlex.split(line), "--size", size, "--folder", folder]
        self.ranks, self.open = [], contextlib.ExitStack()
        self.errors = [
            self.open.enter_context(f) for f in map(tempfile.TemporaryFile, ["w+"] * ranks)
        ]
        for rank in range(ranks):
            self.ranks.append(
                subprocess.Popen(
                    [sys.executable, *words], text=True, stdin=subprocess.PIPE, cwd=folder,
                    stdout=subprocess.PIPE, stderr=self.errors[rank],
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )  # fmt: skip
        self.hear()  # built and warm

    def hear(self):
        """What each rank says next."""
        lines = [rank.stdout.readline() for rank in self.ranks]
        for line, errors in zip(lines, self.errors, strict=True):
            if not line:
                errors.seek(0)
                raise RuntimeError(f"{self.line}: {errors.read()[-2000:]}")
        return [json.loads(line) for line in lines]

    def tell(self, word):
        """Tell all ranks to do something; returns what each says to it."""
        for rank in self.ranks:
            print(word, file=rank.stdin, flush=True)
        return self.hear()

    def step(self):
        """One optimizer step, as long as the slowest rank takes for it."""
        told = self.tell("step")
        self.seconds.append(max(t["seconds"] for t in told))
        self.losses.append(statistics.mean(t["loss"] for t in told))

    def end(self):
        """End it; keeps the report of every rank."""
        self.report = self.tell("end")
        self.stop()

    def stop(self):
        """Leave no process behind."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            rank.stdin.close()
            rank.stdout.close()
        self.open.close()

    @property
    def median(self):
        """Seconds for a step."""
        return statistics.median(self.seconds)

    @property
    def peak(self):
        """MiB resident at most, on the rank with most."""
        return max(r["peak"] for r in self.report)


def compete(lines, size, steps, ranks=2, folder=None):
    """Run contenders, {key: command line of contender.py}, in turns; returns {key: Contender}."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as place:
        running = {}
        try:
            for key, line in lines.items():
                running[key] = Contender(line, size, ranks, place)
            for turn in range(steps):
                # Each goes first as often as any other: who comes after whom shall not count.
                keys = [*running]
                cut = turn % len(keys)
                for key in keys[cut:] + keys[:cut]:
                    running[key].step()
            for contender in running.values():
                contender.end()
        finally:
            for contender in running.values():
                contender.stop()
    return running


def ratio(a, b):
    """Median over turns of a's seconds over b's."""
    return statistics.median(x / y for x, y in zip(a.seconds, b.seconds, strict=True))
