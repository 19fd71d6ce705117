"""Keeps the notebooks true: cuts their exercises out of the product's files and runs them.

    python notebooks/build.py                all: blanks and solutions afresh, run, outputs written
    python notebooks/build.py 02_stage2      only this one
    python notebooks/build.py --blanks       blanks and solutions only; runs nothing

A cell with the metadata {"exercise": NAME} holds a blank, the one with {"check": NAME} its check
(exercises.py says what is cut). A run puts the blank in first and requires the check to refuse it,
then the solution, and requires the check to take it. The file keeps the blank, and no output of
these two cells. A run fails on any error, on anything on stderr (a warning, say), and on outputs
that name this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import os
import re
import socket
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE)]

import course  # noqa: E402
from exercises import EXERCISES, cut  # noqa: E402

SLOWEST = 120  # seconds for one cell


class Broken(Exception):
    """A notebook that does not do what it should."""


def notebooks(names=()):
    """The notebooks' paths, in order."""
    paths = sorted(HERE.glob("[0-9][0-9]_*.ipynb"))
    unknown = set(names) - {path.stem for path in paths}
    if unknown:
        raise Broken(f"no notebook {', '.join(sorted(unknown))} in {HERE.name}/")
    return [path for path in paths if not names or path.stem in names]


# ---- blanks and solutions ------------------------------------------------------------------------


def cell_of(name, code):
    """The source of an exercise's cell."""
    return f"%%exercise {name}\n{code}"


def digest(source):
    """To know a blank from one that a reader has filled in."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def refresh(nb, where, force=False):
    """Put the blanks of today's code into a notebook; whether anything changed."""
    changed = False
    for cell in nb.cells:
        name = cell.metadata.get("exercise")
        if name is None:
            continue
        if name not in EXERCISES:
            raise Broken(f"{where}: exercises.py has no exercise {name!r}")
        source, old = cell_of(name, cut(EXERCISES[name])[1]), cell.metadata.get("blank")
        if not force and old and cell.source != source and digest(cell.source) != old:
            raise Broken(
                f"{where}: exercise {name!r} has been filled in, and this would overwrite it; "
                f"keep your answer elsewhere, then build with --force"
            )
        changed |= cell.source != source
        cell.source, cell.metadata["blank"] = source, digest(source)
    return changed


def solutions():
    """{file name: text} of notebooks/solutions/."""
    pages = {}
    for ex in EXERCISES.values():
        whole, _, left_out = cut(ex)
        page = pages.setdefault(f"{ex.notebook}.md", [f"# Solutions to {ex.notebook}"])
        what = "mended in" if ex.mistake else "that were cut out of"
        page.append(
            f"`{ex.name}`: the lines {what} `{ex.function}` in `{ex.file}`\n\n"
            f"```python\n{left_out}\n```\n\n{ex.why}\n\nThe whole cell:\n\n"
            f"```python\n{cell_of(ex.name, whole)}\n```"
        )
    return {name: "\n\n".join(page) + "\n" for name, page in pages.items()}


def write_solutions():
    """Write what `solutions` says."""
    (HERE / "solutions").mkdir(exist_ok=True)
    for name, text in solutions().items():
        (HERE / "solutions" / name).write_text(text)


# ---- running -------------------------------------------------------------------------------------


def run(nb, where):
    """Run a notebook with its solutions in place; returns it with outputs and blanks."""
    plan = copy.deepcopy(nb)
    cells, tried, checks = [], [], {c.metadata.get("check"): c for c in plan.cells}
    for cell in plan.cells:
        if name := cell.metadata.get("exercise"):
            check = copy.deepcopy(checks[name])
            check.metadata["tags"] = ["raises-exception"]
            tried += [copy.deepcopy(cell), check]
            cells += tried[-2:]
            cell.source = cell_of(name, cut(EXERCISES[name])[0])
        cells.append(cell)
    for number, cell in enumerate([*tried, *plan.cells]):
        cell["id"] = f"cell-{number}"
    try:
        done = _execute(nbformat.from_dict({**plan, "cells": cells}))
    except CellExecutionError as error:
        raise Broken(f"{where}: {_plain(error)}") from None
    refused = {c.metadata.get("check"): c for c in done.cells if "tags" in c.metadata}
    for name, cell in refused.items():
        if name and not any(o.get("ename") == "NotYet" for o in cell.outputs):
            raise Broken(
                f"{where}: the check of {name!r} does not refuse the blank: {cell.outputs}"
            )
    done.cells = [c for c in done.cells if c.id not in {t.id for t in tried}]
    return _finish(nb, done, where)


def _execute(nb):
    # Through sockets in a folder of our own: no ports, and no kernel that warns of open ones.
    with tempfile.TemporaryDirectory(prefix="nb-") as folder:

        class Manager(AsyncKernelManager):
            def __init__(self, **options):
                super().__init__(**options, transport="ipc", ip=f"{folder}/k")
                self.connection_file = f"{folder}/kernel.json"

        client = NotebookClient(
            nb,
            kernel_manager_class=Manager,
            kernel_name="python3",
            timeout=SLOWEST,
            resources={"metadata": {"path": str(HERE)}},
            record_timing=False,
        )
        return client.execute()


def _finish(nb, done, where):
    count = 0
    for old, cell in zip(nb.cells, done.cells, strict=True):
        cell["id"], cell.source = old.id, old.source
        if cell.cell_type != "code":
            continue
        _inspect(cell, where)
        count += 1
        cell.execution_count = count
        if "exercise" in cell.metadata or "check" in cell.metadata:
            cell.outputs, cell.execution_count = [], None  # the reader's to fill
        for output in cell.outputs:
            output.pop("transient", None)
            if "execution_count" in output:
                output.execution_count = count
    done.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return done


def _inspect(cell, where):
    private = {str(ROOT), str(Path.home()), tempfile.gettempdir(), socket.gethostname()}
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stderr":
            raise Broken(f"{where}: a cell writes to stderr: {output.text}\n{cell.source}")
        data = [v for k, v in output.get("data", {}).items() if not k.startswith("image/")]
        text = "".join([output.get("text", ""), *map(str, data)])
        for word in private - {"/"}:
            if re.search(rf"(?<![\w/]){re.escape(word)}(?!\w)", text):
                raise Broken(f"{where}: an output names this machine ({word}):\n{text}")


def _plain(error):
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))


class Shared:
    """Ranks that all notebooks of a run take in turn, which saves each its start."""

    def __enter__(self):
        self.cluster = course.launch(2)
        os.environ["COURSE_CLUSTER"] = self.cluster.profile_dir + "/security/" + self._file()
        self.client = self.cluster.connect_client_sync()
        return self

    def _file(self):
        prefix = f"ipcontroller-{self.cluster.cluster_id}" if self.cluster.cluster_id else ""
        return f"{prefix or 'ipcontroller'}-client.json"

    def __exit__(self, *error):
        del os.environ["COURSE_CLUSTER"]
        course.halt(self.cluster, self.client)
        self.client.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="such as 02_stage2; default: all")
    parser.add_argument("--blanks", action="store_true", help="blanks and solutions only, no run")
    parser.add_argument("--force", action="store_true", help="overwrite answers in the notebooks")
    options = parser.parse_args()
    write_solutions()
    with contextlib.nullcontext() if options.blanks else Shared():
        for path in notebooks(options.names):
            began, nb = time.time(), nbformat.read(path, as_version=4)
            refresh(nb, path.name, options.force)
            if not options.blanks:
                nb = run(nb, path.name)
            nbformat.write(nb, path)
            print(f"{path.name}: {time.time() - began:.1f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (Broken, LookupError) as error:
        sys.exit(f"build.py: {error}")
