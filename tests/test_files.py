"""The stage files: what they have in common is the same text, and the rest is the lesson."""

import importlib
import inspect
import logging
import re
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from models import STAGES, Dot, build
from ranks import alone

ROOT = Path(__file__).parent.parent
FILES = {stage: ROOT / f"stage{stage}.py" for stage in STAGES}
BEGIN, END = re.compile(r" *# --- same in every stage: (.+) ---"), re.compile(r" *# --- end ---")


def blocks(text):
    """[(name, text)] of what stands between the marks, with the class's name left out."""
    found, name = [], None
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        begins, ends = BEGIN.fullmatch(line.rstrip("\n")), END.fullmatch(line.rstrip("\n"))
        assert not (begins and name), f"line {number}: {name!r} has no end"
        assert not (ends and not name), f"line {number}: an end without a beginning"
        assert begins or ends or "# ---" not in line, f"line {number} is no mark: {line}"
        if begins:
            name = begins[1]
            found.append((name, ""))
        elif ends:
            name = None
        elif name:
            found[-1] = (name, found[-1][1] + re.sub(r"\bZeroStage[123]\b", "ZeroStageN", line))
    assert name is None, f"{name!r} has no end"
    return found


@pytest.fixture(scope="module")
def shared():
    return {stage: blocks(path.read_text()) for stage, path in FILES.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_blocks_have_the_same_names_in_the_same_order(shared, stage):
    names = [name for name, _ in shared[2]]
    assert [name for name, _ in shared[stage]] == names
    assert len(set(names)) == len(names) > 3


@pytest.mark.parametrize("stage", [1, 3])
def test_the_blocks_are_the_same_byte_for_byte(shared, stage):
    for (name, one), (_, other) in zip(shared[2], shared[stage], strict=True):
        assert other == one, f"stage{stage}.py and stage2.py differ in {name!r}"


def test_the_blocks_are_a_good_part_of_the_file(shared):
    for stage, path in FILES.items():
        lines = sum(text.count("\n") for _, text in shared[stage])
        assert lines > 0.3 * path.read_text().count("\n"), f"{path.name}: only {lines} lines"


def public(cls):
    """{name: its signature or kind}, in the order of the text; an override stands where the
    member that it refines does."""
    members = {}
    for base in reversed(cls.__mro__):
        if not issubclass(torch.optim.Optimizer, base):  # torch's own are the same anyway
            members.update(vars(base))
    shown = [n for n in members if not n.startswith("_") or n in ("__init__", "__enter__")]
    return {n: describe(members[n]) for n in shown}


def describe(member):
    return str(inspect.signature(member)) if callable(member) else type(member).__name__


@pytest.mark.parametrize("stage", [1, 3])
def test_public_members_are_the_same_in_name_order_and_signature(stage):
    assert list(public(STAGES[stage]).items()) == list(public(STAGES[2]).items())


MEMBERS = [
    "backward",
    "scale",
    "step",
    "zero_grad",
    "is_gradient_accumulation_boundary",
    "global_steps",
    "close",
    "set_gradient_accumulation_boundary",
    "finalize_gradient_accumulation_boundary",
    "was_step_applied",
    "traffic",
    "skipped_steps",
    "micro_steps",
    "global_grad_norm",
    "loss_scale",
    "param_groups",
    "add_param_group",
    "state_dict",
    "memory",
    "load_state_dict",
    "model_state_dict",
    "load_model_state_dict",
    "gathered",
    "__enter__",
    "__exit__",
]


@pytest.mark.parametrize("stage", STAGES)
def test_every_promised_member_is_there(stage, tmp_path):
    def work(rank, world):
        with build(stage, Dot(), tmp_path) as zero:
            return [name for name in MEMBERS if not hasattr(zero, name)]

    assert alone(work) == []


PARAMETERS = [
    "model",
    "optimizer_class",
    "param_groups",
    "managed_gradient_accumulation",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "loss_scale",
    "initial_loss_scale",
    "loss_scale_window",
    "reduce_bucket_size",
    "reduce_dtype",
    "grad_accum_dtype",
    "overlap_comm",
    "offload_optimizer",
    "offload_param",
    "leaf_modules",
    "process_group",
]


@pytest.mark.parametrize("stage", STAGES)
def test_the_arguments_are_those_of_the_design_in_any_stage(stage):
    parameters = inspect.signature(STAGES[stage]).parameters
    assert [n for n in parameters if n not in ("self", "options")] == PARAMETERS
    assert inspect.signature(STAGES[stage]) == inspect.signature(STAGES[2])


def world_state(folder):
    """What an import could have changed."""
    return {
        "files": sorted(folder.rglob("*")),
        "threads": threading.enumerate(),
        "group": dist.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
        "draws": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "handlers": (logging.root.handlers[:], logging.getLogger("zero").handlers[:]),
    }


@pytest.mark.parametrize("name", ["stage1", "stage2", "stage3", "offload", "nvme"])
def test_an_import_has_no_effect_but_the_names(name, tmp_path, monkeypatch):
    for module in ("stage1", "stage2", "stage3", "offload", "nvme"):
        monkeypatch.delitem(sys.modules, module, raising=False)  # all of it anew, then put back
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = world_state(tmp_path)
    importlib.import_module(name)
    assert world_state(tmp_path) == before
