"""Proof that the tests teach: plants faults in the source and requires the suite to fail for each.

    python tests/mutations.py                each fault in a copy of the project: `make mutations`
    python tests/mutations.py --first        with only those test files that should see it first
    python tests/mutations.py --list         what would be planted
    python tests/mutations.py -k give        only those whose name has "give" in it
    python tests/mutations.py --part 2/8     only every eighth, from the second on
    python tests/mutations.py --mistakes     only the ten of notebooks/mistakes.py, each against
                                             the one test that is named there; nothing is copied

There are the ten mistakes, and mechanical ones made from the syntax tree: an operator swapped, a
comparison flipped, a statement dropped, a number off by one, and so on. Which nodes get one is
drawn by a hash of a name such as `stage3.py:ZeroStage3._vote:compare:2` (the second comparison in
that function), so the draw follows the code as it changes, and an edit elsewhere leaves it as it
is. What stands in all stage files between the marks is changed in all of them: else the test that
compares these blocks would see every fault, and nothing would be known of the others.

Status 1 if one survives: then a test is missing, or the fault is none, and goes to EQUIVALENT with
the reason. A run that takes longer than LIMIT has failed too: no test may hang.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # as conftest.py does: before torch, for ranks that are forked

import argparse
import ast
import contextlib
import functools
import hashlib
import json
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# Once here, and not in every forked run: this is most of a short run's time.
import pytest
import torch._dynamo  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "tests")]
sys.path.append(str(ROOT / "notebooks"))

from mistakes import MISTAKES, STAGES, planted, sources  # noqa: E402

SIDE_BY_SIDE = 2
LIMIT = 900  # seconds for the whole suite on one faulty copy; --first: a third of it

# How many are drawn where. "shared": what stands in all stage files.
QUOTA = {"shared": 14, "stage1.py": 3, "stage2.py": 1, "stage3.py": 15, "offload.py": 16}
QUOTA |= {"nvme.py": 11}

# Not to be drawn: what no test on a machine without a GPU can reach, and texts.
OUT_OF_REACH = {
    "Lanes": "copies between a GPU and the host: tests/gpu/check.py runs them",
    "optimizer_options": "chooses the fused kernel for a GPU's state",
    "_forget_in_child": "what it closes shows only in a process that lives longer than the suite",
}

# Faults that are none: {name: why nothing that is promised changes}.
EQUIVALENT = {}

# Files in which a fault should be seen first. The others follow, in the order of the alphabet.
SEES_FIRST = {
    "stage1.py": "window cases_accumulation cases_ranks disagree",
    "stage2.py": "window cases_accumulation cases_ranks disagree",
    "shared": "window cases_accumulation cases_ranks disagree cases_params precision",
    "stage3.py": "cases_stage3 models disagree memory_traffic window",
    "offload.py": "window cases_offload cases_nvme cases_state cases_params state equal",
    "nvme.py": "nvme cases_nvme",
}

# Those would see any fault by the text alone, or look at no source at all.
LEFT_OUT = ("test_notebooks.py", "test_mutations.py", "test_harness.py")


# ---- what is planted -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    name: str
    where: str  # "shared" or a file
    what: str  # the change in a line
    texts: dict  # {file: its whole faulty text}


def the_ten():
    """The ten mistakes as faults."""
    for name, m in MISTAKES.items():
        where = "shared" if m.files == STAGES else m.files[0]
        yield Fault(name, where, "; ".join(f"{a!r} -> {b!r}" for a, b in m.edits), sources(name))


_PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)]
_PAIRS += [(ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub)]
SWAPS = dict(_PAIRS) | {b: a for a, b in _PAIRS}
SWAPS |= {ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add}
OTHERS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def faults_of(node):
    """[(kind, text to stand in the place of the node)]."""
    made = []

    def with_one(kind, field, value):
        made.append((kind, _text(type(node)(**{**dict(ast.iter_fields(node)), field: value}))))

    match node:
        case ast.Compare(ops=[op, *rest]):
            with_one("compare", "ops", [SWAPS[type(op)](), *rest])
        case ast.BoolOp():
            with_one("logic", "op", SWAPS[type(node.op)]())
        case ast.BinOp() | ast.AugAssign() if type(node.op) in SWAPS:
            with_one("arithmetic", "op", SWAPS[type(node.op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            made.append(("sign", _text(node.operand)))
        case ast.If() | ast.IfExp():
            made.append(("branch", node.test))  # only the test is replaced
        case ast.Name(id=name) if name in OTHERS:
            made.append(("minmax", OTHERS[name]))
        case ast.Attribute(attr=name) if name in OTHERS:
            with_one("minmax", "attr", OTHERS[name])
        case ast.Constant(value=bool()):
            made.append(("flag", str(not node.value)))
        case ast.Constant(value=int()):
            made.append(("number", str(node.value + 1)))
        case ast.Slice(lower=lower, upper=upper):
            for bound in ("lower", "upper") if lower and upper else ():
                with_one("slice", bound, None)
            if bool(lower) != bool(upper):
                made.append(("slice", ":"))
    if isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        made.append(("drop", "pass"))
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
        made.append(("drop", "pass"))
    return made


def _text(node):
    text = ast.unparse(ast.fix_missing_locations(node))
    return text if isinstance(node, (ast.stmt, ast.Slice)) else f"({text})"


def nodes_of(function):
    """The nodes of a function in the order of the text, without messages and annotations."""

    def inside(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Raise, ast.JoinedStr, ast.FunctionDef, ast.arguments)):
                continue
            if isinstance(node, ast.FunctionDef) and child in node.decorator_list:
                continue
            yield child
            yield from inside(child)

    return inside(function)


def functions_of(tree, prefix=""):
    """[(qualified name, its node)], nested ones too."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            name = prefix + node.name
            if isinstance(node, ast.FunctionDef):
                yield name, node
            yield from functions_of(node, name + ".")
        elif isinstance(node, ast.With):
            yield from functions_of(node, prefix)


@dataclass(frozen=True)
class Place:
    """Where a fault could be: `new` for the characters from `start` to `end` of a file."""

    name: str
    start: int
    end: int
    new: str

    @property
    def file(self):
        return self.name.split(":")[0]

    @property
    def function(self):
        return self.name.split(":")[1]

    @property
    def kind(self):
        return self.name.split(":")[2]


def places(file):
    """All that could be planted in a file."""
    text = text_of(file)
    begins = [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def span(node):
        if not hasattr(node, "lineno"):  # some Pythons do not say where a slice is
            node = ast.copy_location(ast.Pass(), node)
        return (
            begins[node.lineno - 1] + node.col_offset,
            begins[node.end_lineno - 1] + node.end_col_offset,
        )

    assert text.isascii(), f"{file}: columns are bytes, so it has to be ASCII"
    for name, function in functions_of(ast.parse(text)):
        count = Counter()
        if any(part in OUT_OF_REACH for part in name.split(".")):
            continue
        for node in nodes_of(function):
            for kind, new in faults_of(node):
                count[kind] += 1
                if kind == "branch":
                    node, new = new, f"not ({ast.unparse(new)})"
                yield Place(f"{file}:{name}:{kind}:{count[kind]}", *span(node), new)


@functools.cache
def text_of(file):
    """A file of the project."""
    return (ROOT / file).read_text()


@functools.cache
def blocks(file):
    """[(start, end)] of what stands between the marks, the same in every stage."""
    mark = re.compile(r"# --- same in every stage: .*? ---\n(.*?)# --- end ---", re.DOTALL)
    return [match.span(1) for match in mark.finditer(text_of(file))] if file in STAGES else []


def block_of(place):
    """The number of the block that a place is in, or None."""
    spans = enumerate(blocks(place.file))
    return next((i for i, (a, b) in spans if a <= place.start and place.end <= b), None)


def planted_at(place):
    """{file: text} of a mechanical fault."""
    texts, number = {}, block_of(place)
    for file in (place.file,) if number is None else STAGES:
        shift = 0 if number is None else blocks(file)[number][0] - blocks(place.file)[number][0]
        text, start, end = text_of(file), place.start + shift, place.end + shift
        assert text[start:end] == text_of(place.file)[place.start : place.end]
        texts[file] = text[:start] + place.new + text[end:]
        compile(texts[file], file, "exec")
    return texts


def mechanical():
    """The drawn ones. Kinds take turns, and no function gets more than two."""
    every = [place for file in (*STAGES, "offload.py", "nvme.py") for place in places(file)]
    every.sort(key=lambda place: hashlib.sha256(place.name.encode()).digest())
    pools = {where: [] for where in QUOTA}
    for place in every:
        if block_of(place) is None:
            pools[place.file].append(place)
        elif place.file == "stage2.py":  # one stage speaks for all three
            pools["shared"].append(place)
    for where, pool in pools.items():
        kinds, functions = Counter(), Counter()
        for _ in range(QUOTA[where]):
            free = [p for p in pool if functions[p.function] < 2]
            place = min(free, key=lambda p: kinds[p.kind])  # the first of the rarest kind
            pool.remove(place)
            kinds[place.kind] += 1
            functions[place.function] += 1
            old = " ".join(text_of(place.file)[place.start : place.end].split())
            yield Fault(place.name, where, f"{old} -> {place.new}", planted_at(place))


# ---- runs of the suite ---------------------------------------------------------------------------


def forked(arguments, folder, log, around=None):
    """Run pytest in a forked child, in a process group of its own; returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        os.setsid()
        with open(log, "w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.chdir(folder)
        os.environ["COLUMNS"] = "250"  # pytest shortens messages to this
        sys.path.remove(str(ROOT / "notebooks"))
        sys.dont_write_bytecode = True
        options = ["-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
        if around is None:
            sys.modules.pop("mistakes")
            code = pytest.main([*options, "--rootdir", str(folder), *arguments])
        else:
            with planted(around):
                code = pytest.main([*options, "--rootdir", str(folder), *arguments])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))


def ended(child, began, limit):
    """Its exit status, None while it runs; "hang" if it ran too long and had to be killed."""
    done, status = os.waitpid(child, os.WNOHANG)
    if not done and time.monotonic() - began < limit:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # ranks of it that still run, too
    if not done:
        os.waitpid(child, 0)
        return "hang"
    return os.waitstatus_to_exitcode(status)


def said(log):
    """(test that failed, what it said), from pytest's output."""
    text = log.read_text(errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - (.*))?$", text, re.MULTILINE)
    if failed:
        return failed[0]
    lines = [line for line in text.splitlines() if line.strip()]
    return "", lines[-1] if lines else "no output"


def order(where, first_only):
    """Test files for a fault, those first that should see it."""
    first = [f"tests/test_{name}.py" for name in SEES_FIRST[where].split()]
    every = sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py"))
    rest = [file for file in every if Path(file).name not in LEFT_OUT and file not in first]
    return first if first_only else first + rest


def copy_of_project(folder, texts):
    """The project with faulty texts, without what git ignores."""
    ignore = shutil.ignore_patterns(".*", "__pycache__", "runs", "*.ipynb")
    shutil.copytree(ROOT, folder, ignore=ignore)
    for extra in (".ci", ".gitignore"):
        path = ROOT / extra
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / extra)
    for file, text in texts.items():
        (folder / file).write_text(text)


def side_by_side(jobs, limit):
    """Run (name, start) jobs, start(log) -> process id; yields (name, status, log, seconds)."""
    waiting, running = list(jobs), {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        while waiting or running:
            while waiting and len(running) < SIDE_BY_SIDE:
                name, start = waiting.pop(0)
                log = Path(folder) / f"{len(waiting)}.log"
                running[start(log)] = name, log, time.monotonic()
            for child, (name, log, began) in list(running.items()):
                status = ended(child, began, limit)
                if status is not None:
                    del running[child]
                    yield name, status, log, time.monotonic() - began
            time.sleep(0.05)


def in_a_copy(name, texts, tests, folder):
    """A job that runs tests in a copy of the project with faulty texts."""

    def start(log):
        copy = Path(tempfile.mkdtemp(dir=folder)) / "copy"
        copy_of_project(copy, texts)
        return forked(tests, copy, log)

    return name, start


def passes_without_a_fault(first_only):
    """Whether the suite passes as it is: where it fails nothing is proven by a failure."""
    tests = order("shared", False)
    if first_only:
        tests = sorted({file for where in SEES_FIRST for file in order(where, True)})
    good = True
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        halves = [("one", tests[::2]), ("the other", tests[1::2])]
        jobs = [in_a_copy(f"{which} half", {}, half, folder) for which, half in halves]
        for name, status, log, seconds in side_by_side(jobs, LIMIT):
            print(f"{seconds:6.1f} s  no fault, {name} of the suite: {' '.join(said(log))}")
            good = good and status == 0
    return good


def against_the_suite(faults, first_only):
    """Print a line for each fault; returns the names of survivors."""
    faults, survivors = {fault.name: fault for fault in faults}, []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        jobs = [
            in_a_copy(f.name, f.texts, order(f.where, first_only), folder) for f in faults.values()
        ]
        for name, status, log, seconds in side_by_side(jobs, LIMIT / 3 if first_only else LIMIT):
            failed, words = ("a hang", "") if status == "hang" else said(log)
            if status == 0:
                survivors.append(name)
            caught = f"caught by {failed or words}" if status else f"SURVIVES {faults[name].what}"
            print(f"{seconds:6.1f} s  {name}: {caught}", flush=True)
    return survivors


def against_their_tests():
    """Yields (mistake, the test that failed, what it said) for each of the ten and its one test."""

    def job(name, test):
        return name, lambda log: forked([test], ROOT, log, name)

    jobs = [job(name, m.test) for name, m in MISTAKES.items()]
    for name, status, log, _ in side_by_side(jobs, 120):
        yield name, *(said(log) if status == 1 else ("", f"status {status}"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", action="store_true", help="only the files that should see it")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("-k", default="", help="only faults with this in their name")
    parser.add_argument("--part", default="1/1", help="I/N: only every N-th, from the I-th on")
    parser.add_argument("--mistakes", action="store_true", help="the ten, and one test for each")
    options = parser.parse_args()
    if options.mistakes:
        for line in against_their_tests():
            print(json.dumps(line), flush=True)
        return 0
    part, parts = map(int, options.part.split("/"))
    drawn = [f for f in (*the_ten(), *mechanical()) if options.k in f.name][part - 1 :: parts]
    faults = [fault for fault in drawn if fault.name not in EQUIVALENT]
    for fault in drawn if options.list else ():
        print(f"{fault.name}: {fault.what}")
    if options.list:
        return 0
    began = time.monotonic()
    whole = parts == 1 and not options.k
    if whole and not passes_without_a_fault(options.first):
        print("the suite fails without a fault in it: mend that first")
        return 1
    survivors = against_the_suite(faults, options.first)
    for fault in drawn:
        if fault.name in EQUIVALENT:
            print(f"no fault: {fault.name}: {EQUIVALENT[fault.name]}")
    print(
        f"{len(faults)} planted, {len(faults) - len(survivors)} caught, {len(survivors)} survived, "
        f"{len(drawn) - len(faults)} equivalent; {time.monotonic() - began:.0f} seconds"
    )
    for name in survivors:
        print(f"survived: {name}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
