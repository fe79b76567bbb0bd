"""The commands whose records, checkpoints and reports of version 0.1 are in ``fixtures/v0_1/lab``, and how they are run.

Each runs in a process of its own, as a user would call it: nothing here depends on where the code is.
"""

import json
import os
import subprocess
import sys

MODULE = "small_model.py"
CPU = ["--batch-size", "256", "--device", "cpu", "--out", "out", "--json"]
# Runs that were interrupted: one of the model for digits, and one of a user's own model with as much state as there is.
RUNS = {
    "digits": ["train", "--layers", "conv2", "--epochs", "4", *CPU, "-o", "backend=reference"],
    "own-model": [
        *("train", "--model", "small_model:build", "--data", "digits", "--layers", "*", "--epochs", "4", *CPU),
        *("-o", "inference=pooled", "-o", "max_samples=64", "-o", "history=4", "--average", "0.9", "--recalibrate", "2"),
    ],
}
# The folders that those commands give to their runs.
FOLDERS = {
    "digits": "out/digits-cnn/digits/mixture-norm/seed-0",
    "own-model": "out/small_model:build/digits/mixture-norm/seed-0",
}
# Comparisons that were finished, and are reported on.
COMPARISONS = {
    "compare": ["compare", "--seeds", "2", "--epochs", "4", *CPU, "-o", "backend=reference"],
    "ring": ["compare", "--task", "gan", "--data", "ring", "--seeds", "1", "--epochs", "1", "--out", "out", "--json"],
}


# The command ``mixnorm``, with the one thing that is not as it was on purpose put back.
AS_VERSION_0_1 = (
    "import runpy, version_helpers; version_helpers.fit_to_the_sample_of_version_0_1(); "
    "runpy.run_module('mixnorm', run_name='__main__', alter_sys=True)"
)


def start(*arguments, cwd):
    """A process with the command and one thread. Modules that are in ``cwd`` come before those that are installed."""
    paths = [str(cwd), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", AS_VERSION_0_1, *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process, limit=300, code=0):
    """What a process wrote on stdout; it ends with the code within ``limit`` seconds."""
    try:
        out, errors = process.communicate(timeout=limit)
    finally:
        process.kill()
    assert process.returncode == code, errors
    return out


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def measured(path):
    """The epochs of a record as they count after all resumptions, without the time that they took."""
    epochs = {}
    for line in lines(path):
        if line["kind"] == "epoch":
            epochs[line["epoch"]] = {k: v for k, v in line.items() if k not in ("crc", "busy") and "seconds" not in k}
    return [epochs[number] for number in sorted(epochs)]


def report(folder):
    """What ``mixnorm report`` says of a folder's records: its JSON without paths, and the tables of its page.

    It draws no pictures, as where matplotlib is not installed: those take longer than all the rest.
    """
    missing = 'raise ModuleNotFoundError("there is no matplotlib", name="matplotlib")\n'
    (folder.parent / "matplotlib.py").write_text(missing)
    told = json.loads(ended(start("report", folder.name, "--json", cwd=folder.parent)))
    page = (folder / "report.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith(("|", "### "))]
    return {"answers": told["answers"], "tables": told["tables"], "page": lines}
