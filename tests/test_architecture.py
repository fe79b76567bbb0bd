"""Which module may import which: every file stands on those above it, and optional packages load where they are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mixnorm

ROOT = Path(mixnorm.__file__).parent
ORDER = [
    "ops.reference",
    "ops.reference_fit",
    "ops.differentiable",
    "ops.compiled_kernels",
    "ops.compiled",
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
    "ops.triton.__init__",
    "ops.backend",
    "ops.library",
    "ops.distributed",
    "gmm",
    "populations",
    "fisher",
    "functional",
    "history",
    "layers",
    "convert",
    "distill",
    "ops.prepare",
    "demo",
    "__init__",
    "models.conv_norm",
    "models.relu_max_pool_kernel",
    "models.relu_max_pool",
    "models.cifar_cnn",
    "models.densenet",
    "models.dcgan",
    "models.digits_cnn",
    "models.inception_v3",
    "models.__init__",
    "data.dataset",
    "data.safe_pickle",
    "data.download",
    "data.cifar",
    "data.digits",
    "data.resident_kernel",
    "data.resident",
    "data.__init__",
    "bench.cases",
    "bench.table",
    "bench.scikit_learn",
    "bench.steps",
    "bench.traffic",
    "bench.errors",
    "bench.measure",
    "bench.cpu_memory",
    "bench.run",
    "bench.goals",
    "bench.display",
    "bench.plots",
    "experiments.config",
    "experiments.records",
    "experiments.forms",
    "experiments.catalog",
    "experiments.fused_rmsprop",
    "experiments.schedule",
    "experiments.team",
    "experiments.source",
    "experiments.streams",
    "experiments.checkpoint",
    "experiments.lock",
    "experiments.signals",
    "experiments.events",
    "experiments.progress",
    "experiments.step",
    "experiments.watch",
    "experiments.mixtures",
    "experiments.shared_norm",
    "experiments.training",
    "experiments.epochs",
    "experiments.train",
    "experiments.inspection",
    "experiments.build",
    "experiments.frechet",
    "experiments.features",
    "experiments.samples",
    "experiments.gan",
    "experiments.modes",
    "experiments.settings",
    "experiments.work",
    "experiments.processes",
    "experiments.ray_engine",
    "experiments.suite",
    "reports.table",
    "reports.groups",
    "reports.comparison",
    "reports.tables",
    "reports.claims",
    "reports.details",
    "reports.cost",
    "reports.inference",
    "reports.panels",
    "reports.figures",
    "reports.inspection",
    "reports.gan",
    "reports.modes",
    "reports.content",
    "reports.markdown",
    "reports.document",
    "reports.html",
    "reports.__init__",
    "cli.common",
    "cli.engines",
    "cli.bench",
    "cli.results",
    "cli.generators",
    "cli.options",
    "cli.runs",
    "cli.experiments",
    "cli.__init__",
    "__main__",
]
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
EMPTY = {"ops.__init__", "bench.__init__", "experiments.__init__"}  # a docstring each
CHOSEN = {"ops.compiled", "ops.triton.__init__", "ops.library"}  # what the dispatch chooses from, when it runs
MODULES = sorted(FILES.keys() - EMPTY)


def imports(module):
    """(name, whether at the top level of the file) of everything that a module imports, with full names."""
    tree = ast.parse(FILES[module].read_text())
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
    """The modules of this package that a module imports; ``from mixnorm.gmm import X`` is an import of ``gmm``."""
    for name, at_top in imports(module):
        if name.split(".")[0] == "mixnorm":
            inside = name.removeprefix("mixnorm").removeprefix(".")
            names = (inside, inside.rpartition(".")[0])
            target = next((m for n in names for m in (n, f"{n}.__init__") if m in FILES), "__init__")
            yield target, at_top


def test_every_module_has_a_place():
    assert set(MODULES) == set(ORDER)
    assert not any(imports(package) for package in EMPTY)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_upward(module):
    above = set(ORDER[: ORDER.index(module)])
    if module == "ops.backend":  # a compiled model calls the registered operators, and they the dispatch
        above.add("ops.library")
    assert {target for target, _ in own_imports(module)} <= above


@pytest.mark.parametrize("chosen", sorted(CHOSEN))
def test_only_the_backend_imports_what_it_chooses_from_and_only_when_it_runs(chosen):
    assert {(m, at_top) for m in MODULES for target, at_top in own_imports(m) if target == chosen} == {
        ("ops.backend", False)
    }


def test_only_the_backend_and_the_kernels_themselves_import_the_kernels():
    inside = {module for module in MODULES if module.startswith("ops.triton.")}
    users = {module for module in MODULES for target, _ in own_imports(module) if target in inside}
    assert users - inside == {"ops.backend"}


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("models.")])
def test_models_stand_on_torch_alone(module):
    outside = {name.split(".")[0] for name, _ in imports(module)} - sys.stdlib_module_names
    assert outside <= {"torch", "mixnorm"} | ({"triton"} if module.endswith("_kernel") else set())
    assert all(target.startswith("models.") for target, _ in own_imports(module))


@pytest.mark.parametrize(
    ("package", "where"),
    [
        ("numba", {"ops.compiled", "ops.compiled_kernels"}),
        (
            "triton",
            {module for module in MODULES if module.startswith("ops.triton.")}
            | {"data.resident_kernel", "models.relu_max_pool_kernel", "experiments.fused_rmsprop"},
        ),
        ("matplotlib", {"demo", "bench.plots", "reports.figures", "reports.gan", "reports.inspection", "reports.modes"}),
        ("sklearn", {"bench.scikit_learn", "data.digits"}),
        ("typer", {"cli.common"}),
        ("ray", {"experiments.ray_engine"}),
        (
            "rich",
            {"bench.display", "reports.table", "experiments.progress"}
            | {f"cli.{name}" for name in ("experiments", "generators", "results", "runs")},
        ),
    ],
)
def test_optional_packages_are_imported_in_few_places(package, where):
    assert {module for module in MODULES for name, _ in imports(module) if name.split(".")[0] == package} <= where


@pytest.mark.parametrize("module", ["bench.plots", "bench.scikit_learn"])
def test_what_needs_an_optional_package_is_imported_when_it_runs(module):
    assert not any(at_top for user in MODULES for target, at_top in own_imports(user) if target == module)


def test_import_loads_no_optional_package():
    """Beyond what torch loads on its own, which in some versions is triton."""
    optional = ("numba", "triton", "matplotlib", "sklearn", "transformers", "typer", "rich", "ray")
    code = (
        "import sys, torch; before = set(sys.modules); import mixnorm, mixnorm_lab.bench.run;"
        f"print([n for n in {optional} if n in sys.modules.keys() - before])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
