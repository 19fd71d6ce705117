"""The work that every contender does: one model, one text, one loop, in plain torch.

`small` is 3.3 million parameters with 4 micro-batches of 8 x 128 bytes: computing takes the time.
`big` is 38 million with 2 of 1 x 64: moving weights, gradients and state takes it.
"""

import functools
import re
import sysconfig
from pathlib import Path

import torch
from torch import nn

SIZES = {  # rows and micro_batches: on each rank, for a step
    "small": {"layers": 4, "width": 256, "heads": 4, "length": 128, "rows": 8, "micro_batches": 4},
    "big": {"layers": 12, "width": 512, "heads": 8, "length": 64, "rows": 1, "micro_batches": 2},
}
SEED, SYMBOLS = 1234, 256
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}


class Block(nn.Module):
    """Attention and a perceptron, with norms before them."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (rows, length, width)
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        mixed = nn.functional.scaled_dot_product_attention(
            *qkv.permute(2, 0, 3, 1, 4), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Predicts the next byte of a text; gives the mean loss."""

    def __init__(self, layers, width, heads, length):
        super().__init__()
        self.byte, self.place = nn.Embedding(SYMBOLS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x, y):  # both (rows, length)
        h = self.byte(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def build(size):
    """The model of one of SIZES, or of a dict like them; the same on every rank."""
    torch.manual_seed(SEED)
    return Model(*(size[key] for key in ("layers", "width", "heads", "length")))


@functools.cache
def read_text(nbytes=2_000_000):
    """The first bytes of the standard library's source."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:nbytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Data:
    """Batches (x, y), each (rows, length), from random places of the text; each rank its own."""

    def __init__(self, size, rank):
        self.rows, self.length, self.text = size["rows"], size["length"], read_text()
        self.draw = torch.Generator().manual_seed(SEED + 1 + rank)

    def next(self):
        """The next batch."""
        shape = (self.rows, 1)
        starts = torch.randint(len(self.text) - self.length, shape, generator=self.draw)
        pieces = self.text[starts + torch.arange(self.length + 1)].long()
        return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def resident(key="VmRSS"):
    """MiB of this process in memory now, or "VmHWM", the most since `forget_peak`. Linux only."""
    found = re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024


def forget_peak():
    """Let the peak begin anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def disk_bytes():
    """(bytes read, bytes written) that this process has caused on disks, page cache left out."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])
