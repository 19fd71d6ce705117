"""What the README says is true: its Python runs, and its tables, commands and names are the code's.

Every ```python block runs, on one rank and two, in the order of the page and in one namespace, each
with a fresh `model`; what a reader has at hand (`model`, `loss_fn`, `batches`, `windows`, `plain`)
is made here. Blocks of other languages are to be read.
"""

import ast
import gc
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models import STAGES, assert_same
from notebooks import compare, demo
from offload import Offload
from ranks import assert_same_everywhere, run_ranks

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)
MANAGED, UNMANAGED, FINALIZED = (
    next(i for i, block in enumerate(BLOCKS) if word in block)
    for word in ("accumulation_steps=4", "# always the boundary", "finalize_gradient")
)
MOVED = next(i for i, block in enumerate(BLOCKS) if "def rename" in block)


def section(title):
    """The text below a heading, up to the next one."""
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def make_batches(rank, first, count):
    draw = torch.Generator().manual_seed(1000 * rank + first)
    pairs = [torch.randn(4, 8, generator=draw).split((5, 3), dim=1) for _ in range(count)]
    return [(x.contiguous(), y) for x, y in pairs]


def train_ddp(model, optimizer, batches):
    ddp = DistributedDataParallel(model)
    for x, y in batches:
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    del ddp
    gc.collect()  # with its hooks


def at_hand(rank, moves=False):
    """What a block starts from: a model and eight micro-batches; one that moves state, from a DDP
    script after three steps."""
    model, batches = make_model(), make_batches(rank, 3, 8)
    names = {"torch": torch, "model": model, "loss_fn": nn.functional.mse_loss}
    names |= {"batches": batches, "windows": [batches[:4], batches[4:]]}
    if moves:
        names["plain"] = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train_ddp(model, names["plain"], make_batches(rank, 0, 3))
    return names


def run_blocks(rank, folder, chosen=None, stage=2):
    """The namespace that they leave, and for each block what `zero` held then: the weights. Of
    blocks that are not chosen only the imports run; `stage` takes the place of stage 2."""
    names, held = {}, []
    for number, block in enumerate(BLOCKS):
        block = re.sub(r"(ZeroS|s)tage2", rf"\1tage{stage}", block)
        if chosen is not None and number not in chosen:
            exec("\n".join(re.findall(r"^from .* import .*", block, re.MULTILINE)), names)
            continue
        names.update(at_hand(rank, moves=number == MOVED))
        block = block.replace("/mnt/nvme", str(folder))
        exec(compile(block, f"README.md, python block {number}", "exec"), names)
        if (zero := names.get("zero")) is not None:
            with zero:
                held.append(zero.model_state_dict())
    return names, held


@pytest.mark.parametrize("world", [1, 2])
def test_every_python_block_runs(world, tmp_path):
    def work(rank, world):
        return run_blocks(rank, tmp_path)[1]

    start = make_model().state_dict()
    held = assert_same_everywhere(run_ranks(work, world))
    assert len(held) == len(BLOCKS) > 5, "a block without a `zero`"
    assert all(set(weights) == set(start) for weights in held)


@pytest.mark.parametrize("stage", STAGES)
def test_managed_unmanaged_and_finalized_blocks_train_to_the_same_bits(stage, tmp_path):
    def work(rank, world):
        chosen = (MANAGED, UNMANAGED, FINALIZED)
        return [make_model().state_dict(), *run_blocks(rank, tmp_path, chosen, stage)[1]]

    start, managed, unmanaged, finalized = run_ranks(work, 2)[0]
    assert_same(managed, unmanaged, "managed and unmanaged")
    assert_same(managed, finalized, "managed and finalized early")
    assert all(not torch.equal(start[n], managed[n]) for n in start), "nothing was trained"


@pytest.mark.parametrize("stage", STAGES)
def test_state_moves_out_of_a_ddp_script_and_back(stage, tmp_path):
    def work(rank, world):
        names, _ = run_blocks(rank, tmp_path, (MOVED,), stage)
        model, plain = names["model"], names["plain"]
        train_ddp(model, plain, make_batches(rank, 11, 3))
        moved = {n: t.clone() for n, t in model.state_dict().items()}

        model = make_model()
        plain_all = torch.optim.AdamW(model.parameters(), lr=1e-3)
        parts = [make_batches(rank, *part) for part in ((0, 3), (3, 8), (11, 3))]
        train_ddp(model, plain_all, sum(parts, []))
        steps = [float(s["step"]) for o in (plain, plain_all) for s in o.state.values()]
        return moved, model.state_dict(), set(steps)

    moved, truth, steps = assert_same_everywhere(run_ranks(work, 2))
    assert steps == {14.0}
    for name, value in truth.items():
        torch.testing.assert_close(moved[name], value, rtol=1e-6, atol=1e-7)


def test_state_moves_where_groups_list_their_parameters_in_another_order(tmp_path):
    """Equal shapes, so that a mix-up would pass every check of shapes."""

    def work(rank, world):
        names, _ = run_blocks(rank, tmp_path, (MOVED,))
        model = nn.ModuleDict({n: nn.Linear(3, 3, bias=False) for n in "abc"})
        a, b, c = model.parameters()
        plain = torch.optim.AdamW([{"params": [c, a]}, {"params": [b], "lr": 0.5}])
        for number, p in enumerate((a, b, c), start=1):
            p.grad = torch.full_like(p, float(number))
        plain.step()
        name_of = {id(p): n for n, p in model.named_parameters()}
        order = dict(enumerate(name_of[id(p)] for g in plain.param_groups for p in g["params"]))
        groups = [{"params": [a, c]}, {"params": [b]}]
        with STAGES[2](model, param_groups=groups) as zero:
            zero.load_state_dict(names["rename"](plain.state_dict(), order))
            saved = zero.state_dict()
        back = torch.optim.AdamW([{"params": [c, a]}, {"params": [b]}])
        back.load_state_dict(names["rename"](saved, {n: i for i, n in order.items()}))
        found = {n: saved["state"][n]["exp_avg"].mean().item() for n in saved["state"]}
        again = [back.state[p]["exp_avg"].mean().item() for p in (a, b, c)]
        return found, again, [group["lr"] for group in back.param_groups]

    found, again, rates = run_ranks(work, 2)[0]
    expected = [0.1, 0.2, 0.3]
    assert [found[f"{n}.weight"] for n in "abc"] == pytest.approx(expected)
    assert again == pytest.approx(expected)
    assert rates == [1e-3, 0.5]


# ---- tables, commands and names ------------------------------------------------------------------


def test_the_tables_name_every_argument_with_its_default_and_every_member():
    text, table = section("Arguments").split("| member | meaning |")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) ?\|", text, re.MULTILINE))
    parameters = inspect.signature(STAGES[3]).parameters
    named = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    missing = [p.name for p in named if f"`{p.name}`" not in text]
    assert not missing, f"not in the table of arguments: {missing}"
    assert not rows.keys() - parameters.keys()
    numbers = {"2^16": 2**16, "2^22": 2**22, "FP32": torch.float32, "AdamW": torch.optim.AdamW}
    for name, cell in rows.items():
        cell = cell.strip("`")
        if cell and cell not in ("all parameters", "where possible", "the world"):
            default = numbers[cell] if cell in numbers else ast.literal_eval(cell)
            assert parameters[name].default == default, name
    with_defaults = {"initial_loss_scale": "(2^16)", "loss_scale_window": "(1000)"}
    for name, cell in with_defaults.items():
        assert f"`{name}` {cell}" in text
        assert parameters[name].default == numbers.get(cell.strip("()"), 1000)

    cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    members = set(re.findall(r"`(?:with \.\.\. as )?(\w+)", " ".join(cells)))
    known = {n for c in STAGES.values() for n in dir(c)} | set(inspect.getsource(STAGES[1]).split())
    own = {"traffic", "global_steps", "skipped_steps", "global_grad_norm", "loss_scale", "zero"}
    assert members - own <= known, f"no such member: {members - own - known}"
    base = set(dir(torch.optim.Optimizer))
    public = {n for n, v in inspect.getmembers(STAGES[3]) if callable(v) or type(v) is property}
    public = {n for n in public if not n.startswith("_") and n not in base}
    assert public <= members, f"not in the table of members: {public - members}"


def test_every_setting_of_offload_is_explained():
    missing = [f.name for f in fields(Offload) if f.name not in TEXT and f.name != "device"]
    assert not missing


def test_commands_exist_and_their_options_parse():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= set(re.findall(r"`make ([a-z-]+)", TEXT)) <= targets
    shell = " ".join(re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))
    lines = re.sub(r"#.*", "", shell).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(torchrun [^`]*)`", PROSE)
    calls = [found for line in lines for found in re.findall(r"stage([123])\.py(.*)", line)]
    assert len(calls) >= 5
    for stage, options in calls:
        demo.arguments(int(stage), options.split())


def test_every_path_and_method_that_is_named_exists():
    names = re.findall(r"`([^`\n]+)`", PROSE)
    files = {n for n in names if re.fullmatch(r"[\w/]+\.(py|md)|[a-z]+/", n)}
    assert len(files) > 8
    for name in files:
        places = [ROOT / folder / name for folder in ("", "notebooks", "tests")]
        assert any(place.exists() for place in places), name
    for name in re.findall(r"`(0\d_\w+)`", PROSE):
        assert (ROOT / "notebooks" / f"{name}.ipynb").exists(), name
    code = "".join(p.read_text() for p in ROOT.glob("*.py"))
    reading = section("How to read the code")
    methods = set(re.findall(r"`(?:[A-Z]\w+\.)?(_?[a-z][a-z_]*)`", reading))
    assert len(methods) > 15
    unknown = [name for name in methods if f"def {name}(" not in code]
    assert not unknown, f"no such method: {unknown}"


def test_every_requirement_has_its_reason():
    text = section("Dependencies")
    for path in ROOT.glob("requirements*.txt"):
        for name in re.findall(r"^([\w-]+)==", path.read_text(), re.MULTILINE):
            assert f"`{name}`" in text, f"{name} of {path.name} is not explained"


def test_the_demos_output_has_todays_columns_and_configurations():
    for line in compare.table([]).splitlines():
        assert line in TEXT
    for args in compare.configurations(compare.parse([])):
        name = f"{compare.label(vars(args)):<24}{args.mode}"
        assert re.search(rf"^{re.escape(name)} +\d\.\d{{4}} ", TEXT, re.MULTILINE), name
