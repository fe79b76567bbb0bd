"""Which module may import which: the library in one order, the laboratory room by room, optional packages in few places."""

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mixnorm
import mixnorm_lab

# The library: a module imports those before it. A new one gets its place here.
LIBRARY = [
    "ops.reference",
    "ops.fit",
    "ops.kernels",
    "ops.choose",
    "ops.autograd",
    "ops.numba.telling",
    "ops.numba.threads",
    "ops.numba.lanes",
    "ops.numba.points",
    "ops.numba.em",
    "ops.numba.fit",
    "ops.numba.transform",
    "ops.numba.gradient",
    "ops.numba.evaluation",
    "ops.numba.queue",
    "ops.numba",
    "ops.triton.launch",
    "ops.triton.tiles",
    "ops.triton.components",
    "ops.triton.em",
    "ops.triton.queue",
    "ops.triton.statistics",
    "ops.triton.transform",
    "ops.triton.gradient",
    "ops.triton.evaluation",
    "ops.triton.fit_kernel",
    "ops.triton.fit",
    "ops.triton",
    "ops.library",
    "ops.distributed",
    "gmm",
    "populations",
    "fisher",
    "functional",
    "options",
    "history",
    "ahead",
    "mixture_norm",
    "layers",
    "lazy",
    "select",
    "freeze",
    "recalibrate",
    "convert",
    "distill",
    "prepare",
    "integrations.description",
    "integrations.transformers",
    "integrations.watch",
    "integrations.lightning",
]
# The choice loads what it chooses when it is asked, and so do the operators what they call.
UPWARD = {("ops.choose", name) for name in ("ops.numba", "ops.triton", "ops.library")}
CHOSEN = {"ops.numba", "ops.triton", "ops.library"}

# The laboratory: a room, and the rooms before it that it uses. Inside a room modules import each other without a circle.
ROOMS = {
    "internals": "",
    "demo": "",
    "tables": "",
    "models": "",
    "own": "",
    "data": "own",
    "config": "models data",
    "tasks": "own data config",
    "norms": "internals config",
    "storage": "config",
    "inspect": "internals storage",
    "reports": "tables config storage inspect",
    "bench": "internals tables models config norms storage",
    "training": "internals models own data config tasks norms storage",
    "generators": "models data config storage training",
    "launch": "own data config storage training generators",
    "comparison": "tables models own data config tasks storage inspect reports training launch",
    "cli": "internals data config storage reports bench generators launch comparison",
}
REPORTS = ["model", "tables", "plots", "render"]  # the rooms of the reports, each of which uses those before it
PUBLIC = {
    "mixnorm": {*mixnorm.__all__, "__version__"},
    "mixnorm.functional": {"mixture_inference", "mixture_normalize"},
    "mixnorm.gmm": {"GaussianMixture", "fit_mixture", "kmeans_plus_plus"},
    "mixnorm.fisher": {"gaussian_fisher_vector", "mixture_fisher_vector"},
}


def modules(package):
    """The files of a package by their names in it, ``""`` for that of the package itself."""
    root = Path(package.__file__).parent
    names = {path: path.relative_to(root).with_suffix("").parts for path in root.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}


FILES = {"mixnorm": modules(mixnorm), "mixnorm_lab": modules(mixnorm_lab)}
PATHS = {f"{package}.{name}".rstrip("."): path for package, files in FILES.items() for name, path in files.items()}
LAB = sorted(name for name in PATHS if name.startswith("mixnorm_lab."))
MAIN = "mixnorm.__main__"


@functools.cache
def imports(module):
    """(name, whether at the top level of the file) of everything that a module imports, with full names."""
    tree = ast.parse(PATHS[module].read_text())
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(name, id(node) not in lazy) for name in names]
    return found


def own_imports(module):
    """The modules of both packages that a module imports; ``from mixnorm.gmm import X`` is an import of ``mixnorm.gmm``."""
    for name, at_top in imports(module):
        if name.split(".")[0] in FILES:
            yield next(found for found in (name, name.rpartition(".")[0]) if found in PATHS), at_top


def users(target):
    return {(module, at_top) for module in PATHS for used, at_top in own_imports(module) if used == target}


def room(module):
    return module.split(".")[1]


def empty(files):
    """Packages with nothing but a docstring."""
    return {name for name, path in files.items() if path.name == "__init__.py" and not ast.parse(path.read_text()).body[1:]}


# --- the library ------------------------------------------------------------------------------------------------------


def test_every_module_of_the_library_has_a_place():
    assert FILES["mixnorm"].keys() - empty(FILES["mixnorm"]) - {"", "__main__"} == set(LIBRARY)


@pytest.mark.parametrize("module", LIBRARY)
def test_the_library_imports_nothing_upward(module):
    above = {f"mixnorm.{name}" for name in LIBRARY[: LIBRARY.index(module)]}
    above |= {f"mixnorm.{target}" for user, target in UPWARD if user == module}
    assert {target for target, _ in own_imports(f"mixnorm.{module}")} <= above


def test_the_library_does_without_the_laboratory():
    """But for the command, which is the laboratory's, and loads it when it runs."""
    found = {(m, at_top) for m in PATHS for target, at_top in own_imports(m) if target.startswith("mixnorm_lab")}
    assert {(module, at_top) for module, at_top in found if module not in [*LAB, "mixnorm_lab"]} == {(MAIN, False)}


@pytest.mark.parametrize("chosen", sorted(CHOSEN))
def test_what_is_chosen_from_is_imported_by_the_choice_and_the_operators_alone_and_only_when_they_run(chosen):
    allowed = {("mixnorm.ops.choose", False), ("mixnorm.ops.library", False)}
    assert users(f"mixnorm.{chosen}") <= allowed


def test_only_the_choice_and_the_kernels_themselves_import_the_kernels():
    inside = {module for module in PATHS if module.startswith("mixnorm.ops.triton")}
    assert {user for module in inside for user, _ in users(module)} - inside == {"mixnorm.ops.choose", "mixnorm.ops.library"}


# --- the laboratory ---------------------------------------------------------------------------------------------------


def test_every_module_of_the_laboratory_is_in_a_room_and_no_room_is_crowded():
    assert {room(module) for module in LAB} == set(ROOMS)
    for folder in {path.parent for path in FILES["mixnorm_lab"].values()}:
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 12


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_uses_the_rooms_that_it_names_which_come_before_it(name):
    assert set(ROOMS[name].split()) <= set(list(ROOMS)[: list(ROOMS).index(name)])
    inside = [module for module in LAB if room(module) == name]
    used = {target for module in inside for target, _ in own_imports(module) if target in LAB}
    assert {room(target) for target in used} - {name} == set(ROOMS[name].split())


def test_the_rooms_of_the_reports_use_those_before_them():
    for number, name in enumerate(REPORTS):
        inside = [module for module in LAB if module.startswith(f"mixnorm_lab.reports.{name}.")]
        used = {target for module in inside for target, _ in own_imports(module) if ".reports." in target}
        assert {target.split(".")[2] for target in used} <= set(REPORTS[: number + 1])


def test_no_modules_of_the_laboratory_import_each_other_in_a_circle():
    order = TopologicalSorter({module: {target for target, _ in own_imports(module)} - {module} for module in LAB})
    assert set(order.static_order()) >= set(LAB)  # a circle has no order, which is an error


@pytest.mark.parametrize("module", LAB)
def test_the_laboratory_uses_public_names_of_the_library(module):
    if module == "mixnorm_lab.internals":  # which lists the others
        return
    for name, _ in imports(module):
        if name.split(".")[0] == "mixnorm":
            owner, _, what = name.rpartition(".")
            assert name == "mixnorm" or what in PUBLIC[owner]


@pytest.mark.parametrize("module", [module for module in LAB if room(module) == "models"])
def test_models_stand_on_torch_alone(module):
    """But for those of other packages, which are imported by their names when a model is asked for."""
    outside = {name.split(".")[0] for name, _ in imports(module)} - sys.stdlib_module_names
    assert outside <= {"torch", "mixnorm_lab"} | ({"triton"} if module.endswith("_kernel") else set())


# --- optional packages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "where"),
    [
        ("numba", {module for module in PATHS if module.startswith("mixnorm.ops.numba")}),
        (
            "triton",
            {module for module in PATHS if module.startswith("mixnorm.ops.triton")}
            | {
                f"mixnorm_lab.{n}" for n in ("data.resident_kernel", "models.relu_max_pool_kernel", "training.fused_rmsprop")
            },
        ),
        (
            "matplotlib",
            {"mixnorm_lab.demo"}
            | {f"mixnorm_lab.bench.{name}" for name in ("plots", "plot_parts", "whole.pictures")}
            | {module for module in LAB if ".reports.plots." in module},
        ),
        ("sklearn", {"mixnorm_lab.bench.scikit_learn", "mixnorm_lab.data.digits"}),
        ("scipy", {"mixnorm_lab.reports.model.statistics"}),
        ("pooch", {"mixnorm_lab.data.download"}),
        ("PIL", {"mixnorm_lab.generators.samples", "mixnorm_lab.data.disk.pictures"}),
        ("pynvml", {"mixnorm_lab.storage.busy"}),
        ("typer", {"mixnorm_lab.cli.common"}),
        ("ray", {"mixnorm_lab.launch.ray_cluster"}),
        ("transformers", {"mixnorm.integrations.transformers"}),
        ("timm", set()),
        ("torchvision", set()),
        ("lightning", {"mixnorm.integrations.lightning"}),
        ("pytorch_lightning", {"mixnorm.integrations.lightning"}),
        ("datasets", {"mixnorm_lab.data.disk.saved_dataset"}),
        ("pyarrow", {"mixnorm_lab.data.disk.table"}),
        (
            "rich",
            {"mixnorm_lab.bench.display", "mixnorm_lab.tables", "mixnorm_lab.launch.display", "mixnorm_lab.launch.run_bars"}
            | {f"mixnorm_lab.cli.{name}" for name in ("experiments", "generators", "results", "runs")},
        ),
    ],
)
def test_optional_packages_are_imported_in_few_places(package, where):
    assert {module for module in PATHS for name, _ in imports(module) if name.split(".")[0] == package} <= where


@pytest.mark.parametrize("module", ["bench.plots", "bench.scikit_learn"])
def test_what_needs_an_optional_package_is_imported_when_it_runs(module):
    assert not any(at_top for _, at_top in users(f"mixnorm_lab.{module}"))


def test_import_loads_no_optional_package():
    """Beyond what torch loads on its own, which in some versions is triton."""
    optional = ("numba", "triton", "matplotlib", "sklearn", "transformers", "typer", "rich", "ray", "pooch", "PIL", "pynvml")
    optional += ("timm", "torchvision", "lightning", "pytorch_lightning", "datasets", "pandas", "pyarrow", "safetensors")
    code = (
        "import sys, torch; before = set(sys.modules); import mixnorm, mixnorm_lab.bench.run;"
        f"print([n for n in {optional} if n in sys.modules.keys() - before]);"
        "print([n for n in sys.modules if n.startswith('mixnorm.integrations')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["[]", "[]"]


def test_reports_read_records_alone():
    """Neither what trains nor torch is loaded: tables and pages are made where there are records, and nothing else."""
    code = "import sys, mixnorm_lab.reports; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name for name in result.stdout.split() if name.startswith("mixnorm_lab.")}
    assert {room(name) for name in loaded} == {"reports", *ROOMS["reports"].split()}
    assert not {"torch", "mixnorm"} & set(result.stdout.split())
