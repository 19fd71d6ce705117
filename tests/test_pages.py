"""The course's pages for those who read on and for those who teach are true of today's files.

MAP.md: what it names exists, here and in PyTorch, and in DeepSpeed's source where that is installed
(it is read, not imported); and no block, class or public method of a stage file is left out.
TEACHING.md: every notebook with its minutes, cuts that fit their time, sections that exist, and an
answer to every prediction.
"""

import ast
import contextlib
import importlib
import importlib.util
import json
import re
import warnings
from pathlib import Path

import pytest
import torch

import nvme
import offload
from models import STAGES
from test_files import FILES, blocks, public

ROOT = Path(__file__).resolve().parent.parent
MAP = (ROOT / "notebooks/MAP.md").read_text()
TITLES = ["here", "what it does", "DeepSpeed", "PyTorch"]
SHORT = {"fsdp2": "torch.distributed.fsdp._fully_shard"}


def sections(text):
    """{title: its text}."""
    return dict(part.split("\n", 1) for part in text.split("\n## ")[1:])


def cells(text, column):
    """The cells of a column in all tables of four columns."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    rows = [row for row in rows if len(row) == len(TITLES) and not set(row[0]) <= {"-"}]
    return [row[TITLES.index(column)] for row in rows if row != TITLES]


def names(text, column):
    """What stands between backquotes there, but for arguments."""
    found = [n for cell in cells(text, column) for n in re.findall(r"`([^`]+)`", cell)]
    return [n for n in found if "." in n or column == "here"]


def resolve(name, owners):
    """The object of a dotted name that one of `owners` has."""
    for owner in owners:
        try:
            for part in name.split("."):
                owner = getattr(owner, part)
            return owner
        except AttributeError:
            pass
    raise AssertionError(f"MAP.md names {name}, which is not there")


def imported(name):
    """The object of a dotted name in a package."""
    first, *rest = name.split(".")
    parts = [*SHORT.get(first, first).split("."), *rest]
    for end in range(len(parts), 0, -1):
        with warnings.catch_warnings():  # some of torch's modules warn of torch's others
            warnings.simplefilter("ignore")
            with contextlib.suppress(ModuleNotFoundError, AssertionError):
                owner = importlib.import_module(".".join(parts[:end]))
                return resolve(".".join(parts[end:]), [owner])
    raise AssertionError(f"MAP.md names {name}, which torch {torch.__version__} has not")


@pytest.mark.parametrize("name", names(MAP, "here"))
def test_our_side_exists(name):
    owners = [importlib.import_module(path.stem) for path in FILES.values()]
    own = {"offload": offload, "nvme": nvme}
    first, _, rest = name.partition(".")
    if first in own:
        assert resolve(rest, [own[first]]) is not None
    else:
        assert resolve(name, [*STAGES.values(), *owners]) is not None


@pytest.mark.parametrize("name", sorted({*names(MAP, "PyTorch")}))
def test_pytorchs_side_exists(name):
    assert imported(name) is not None


def test_every_block_is_a_section_and_in_order():
    titles, blocks_ = list(sections(MAP)), [n for n, _ in blocks(FILES[3].read_text())]
    assert [title for title in titles if title in blocks_] == blocks_


def test_no_class_and_no_public_method_is_left_out():
    named = {part for name in names(MAP, "here") for part in name.split(".")}
    reports = {"global_steps", "traffic", "param_groups"}  # plain values, and __init__ and the like
    for stage, path in FILES.items():
        classes = {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)}
        members = {n for n in public(STAGES[stage]) if not n.startswith("__")} - reports
        left = (classes | members) - named - {f"ZeroStage{stage}", "reduces_in_hooks"}
        assert not left, f"MAP.md says nothing of {sorted(left)} in {path.name}"


def test_deepspeeds_side_exists():
    spec = importlib.util.find_spec("deepspeed")
    if spec is None:
        pytest.skip("DeepSpeed is not installed")
    root, table = Path(spec.origin).parent, dict(re.findall(r"\| `(\w+)` \| `(\S+\.py)` \|", MAP))
    version = re.search(r"version (\S+):", MAP)[1]
    if f"version='{version}'" not in (root / "git_version_info_installed.py").read_text():
        pytest.skip(f"another DeepSpeed than {version} is installed")
    inside = {}
    for short, file in table.items():
        nodes = ast.walk(ast.parse((root / file).read_text()))
        kinds = (ast.FunctionDef, ast.ClassDef)
        inside[short] = {node.name for node in nodes if isinstance(node, kinds)}
    found = names(MAP, "DeepSpeed")
    assert len(found) > 80
    missing = [n for n in found if n.split(".")[1] not in inside.get(n.split(".")[0], ())]
    assert not missing
    assert {n.split(".")[0] for n in found} == set(table), "a file in the table is not used"


# ---- TEACHING.md ---------------------------------------------------------------------------------

TEACHING = (ROOT / "notebooks/TEACHING.md").read_text()
COURSE = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def prose(path):
    """All text of a notebook."""
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def rows_of(title):
    """The rows of the table below a heading of TEACHING.md, without its head."""
    text = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEACHING, re.M | re.S)[1]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[2:]]


def test_the_teacher_sees_every_notebook_with_its_minutes():
    minutes = {p.stem: re.search(r"\*\*Time:\*\* (\d+) minutes", prose(p))[1] for p in COURSE}
    assert len(COURSE) == 10
    assert {row[0].strip("`"): row[1] for row in rows_of("Order")} == minutes


@pytest.mark.parametrize(("title", "most"), [("One hour", 60), ("Three hours", 180)])
def test_a_cut_fits_its_time_and_cites_what_there_is(title, most):
    rows = rows_of(title)
    assert most - 10 <= sum(int(minutes) for minutes, _ in rows) <= most
    for _, what in rows:
        named = re.findall(r"`(\d\d_\w+)`", what)
        assert set(named) <= {path.stem for path in COURSE}
        for section in re.findall(r'"([^"]+)"', what):
            assert section in parts(ROOT / f"notebooks/{named[0]}.ipynb")


def parts(path):
    """{heading without its number: the text below it} of a notebook."""
    found = re.split(r"^## (?:\d+\. )?(.+)$", prose(path), flags=re.M)
    return dict(zip(found[1::2], found[2::2], strict=True))


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_the_teacher_has_an_answer_to_every_prediction_and_exercise(path):
    text = re.search(rf"^### {path.stem}\n(.*?)(?=^##|\Z)", TEACHING, re.M | re.S)[1]
    rows = re.findall(r'^\| "(.+?)" \| (.+?) \| (.+) \|$', text, re.M)
    named, there = [row[0] for row in rows], parts(path)
    assert [title for title in there if title in named] == named, "not there, or in another order"
    asked = [title for title, below in there.items() if "**Predict" in below]
    assert set(asked) | ({"Exercise"} & {*there}) <= set(named)
    cells = json.loads(path.read_text())["cells"]
    exercises = {c["metadata"]["exercise"] for c in cells if "exercise" in c["metadata"]}
    told = {row[1].strip("`") for row in rows if row[0] == "Exercise"}
    assert path.stem == "07_break_it" or exercises == told


def test_what_the_teacher_page_links_to_and_cites_exists():
    for link in re.findall(r"\]\((.+?)\)", TEACHING):
        assert (ROOT / "notebooks" / link.split("#")[0]).exists(), link
    assert set(re.findall(r"`(\d\d_\w+)`", TEACHING)) == {path.stem for path in COURSE}
    short = set(re.findall(r"`(\d\d)`", TEACHING))
    assert short <= {path.stem[:2] for path in COURSE}
    titles = {title for path in COURSE for title in parts(path)}
    for title in re.findall(r'section "(.+?)"', TEACHING):
        assert title in titles
