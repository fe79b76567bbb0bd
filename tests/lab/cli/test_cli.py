"""Every command: its help, its JSON, what it says without a terminal, and what it answers to a mistake."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from cli_helpers import invoke, mistake, start
from typer.testing import CliRunner

import mixnorm
from mixnorm_lab.bench.cases import BENCHMARKS
from mixnorm_lab.cli import app
from mixnorm_lab.config import catalog
from mixnorm_lab.config.run_config import OPTIONS


def commands(group, path=()):
    """(path, command) of every command, those of groups as well."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_all_commands_are_there():
    names = {" ".join(path) for path in COMMANDS}
    own = {"compare", "train", "reproduce", "report", "inspect", "data"}
    assert names == own | {f"bench {name}" for name in ("all", "table", "plot", *BENCHMARKS)}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_of_its_own_options(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = invoke(*path, "--help").stdout
    examples = re.findall(r"mixnorm " + " ".join(path) + r"[^│\n]*", text.split("Example")[1])
    assert examples
    known = {option for parameter in COMMANDS[path].params for option in parameter.opts}
    for example in examples:
        assert set(re.findall(r"--[a-z-]+", example)) <= known


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_what_prints_a_table_prints_json_as_well(path):
    known = {option for parameter in COMMANDS[path].params for option in parameter.opts}
    assert ("--json" in known) == (path != ("bench", "plot"))  # which prints the names of files


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_can_show_where_an_error_arose(path):
    assert "--debug" in {option for parameter in COMMANDS[path].params for option in parameter.opts}


@pytest.mark.parametrize("command", ["compare", "train", "reproduce"])
def test_the_options_of_a_run_are_those_that_its_fields_state(command):
    known = {parameter.opts[0]: parameter for parameter in COMMANDS[command,].params}
    for option in OPTIONS.values():
        if command != "reproduce" or option.shared:
            parameter = known[option.flag]
            assert parameter.opts == option.flags.split()
            assert parameter.default == option.default
            assert parameter.help == option.help or (command, option.name) == ("train", "layers")


def test_python_m_mixnorm_without_a_terminal(tmp_path):
    process = start("reproduce", "--list", cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert all(len(line.rstrip()) <= 80 for line in out.splitlines())
    assert all(name in out for name in catalog.EXPERIMENTS)


def test_a_group_without_a_command_shows_its_help():
    for arguments in ([], ["bench"]):
        result = CliRunner().invoke(app, arguments, prog_name="mixnorm")
        assert "Usage:" in result.output
        assert "bench" in result.output
        assert "--help says what there is" not in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["frobnicate"], "mixnorm frobnicate is unknown: choose from compare, train, reproduce"),
        (["--frobnicate"], "No such option: --frobnicate; mixnorm --help says"),
        (["compare", "--seed", "3"], r"No such option: --seed .*--seeds.*; mixnorm compare --help says"),
        (["compare", "--lr"], "'--lr' requires an argument; mixnorm"),
        (["compare", "--epochs", "0"], "'--epochs'.*; mixnorm compare --help says"),
        (["compare", "--epochs", "few"], "'--epochs'.*; mixnorm compare --help says"),
        (["compare", "more"], "mixnorm compare --help says"),
        (["compare", "--lr", "-1"], "the learning rate is -1.0, but must be a number above 0"),
        (["compare", "--device", "tpu"], "--device tpu is unknown: choose from auto, cuda, cpu"),
        (["compare", "--data", "cfar10"], "data set 'cfar10' is unknown, but near cifar10"),
        (["compare", "--features", "fid"], "--features is for generators: add --task gan"),
        (["compare", "--task", "gan", "--data", "ring", "-j", "2"], "the ring takes no --jobs: leave that out"),
        (["compare", "--task", "gan", "--precision", "bf16"], "the grid comes with its own --precision: leave that out"),
        (["train", "-k", "5"], "^batch norm has no use for --components: leave that out, or add --layers for mixture"),
        (["train", "-o", "inference=mixture"], "^batch norm has no use for --option: leave that out, or add --layers"),
        (["train", "--norm", "batch", "--layers", "conv2"], "^--norm batch has no use for --layers: leave that out$"),
        (["train", "dcgan/cifar10/bn"], "bn trains a generator: mixnorm reproduce dcgan/cifar10/bn --features"),
        (["compare", "--data", "no/such/folder"], "there is no folder no/such/folder: name one"),
        (["compare", "--data", "."], "and no official files of CIFAR: put images into train/CLASS/"),
        (["compare", "--model", "digits-cn"], "there is no model 'digits-cn': use digits-cnn"),
        (["compare", "--model", "cifar-cnn"], "for images of 3 × 32 × 32, but digits has 1 × 8 × 8: choose another"),
        (["compare", "--layers", "conv9"], "'conv9' matches no batch norm: the model has 'conv1.norm', 'conv2.norm'"),
        (["compare", "--optimizer", "lion"], "--optimizer lion is unknown: choose from rmsprop, nesterov, adam, sgd, adamw"),
        (["compare", "--schedule", "step"], "--schedule step is unknown: choose from one-cycle, cosine, constant"),
        (["compare", "--precision", "fp16"], "--precision fp16 is unknown: choose from fp32, bf16"),
        (["compare", "-o", "foo=1"], "option 'foo' is unknown to mixture norm: choose from form, activation"),
        (["compare", "-o", "inference=magic"], "inference='magic'"),
        (["compare", "-o", "em_iters=few"], "em_iters='few' must be a whole number"),
        (["compare", "-o", "foo"], "--option foo says no value: write it as name=value"),
        (["compare", "--task", "gun"], "--task gun is unknown: choose from classify, gan"),
        (["compare", "--task", "gan", "--data", "rings"], "no generators of 'rings': choose grid, ring, cifar10"),
        (["compare", "--task", "gan", "--lr", "1"], "--task gan comes with its own --lr: leave that out"),
        (["compare", "--task", "gan", "--data", "cifar10"], "needs the weights of its feature network: --features names"),
        (["train", "cifar-cnn/cifar10/bn2"], "no experiment '.*bn2': the nearest are cifar-cnn/cifar10/bn-2"),
        (["train", "cifar-cnn/cifar10/mn-2", "--lr", "1"], r"comes with its own --lr: leave that out"),
        (["train", "cifar-cnn/cifar10/mn-2", "--data", "nowhere"], "does not exist.* or name a folder that has them with"),
        (["reproduce"], "which experiments.* mixnorm reproduce --list names them"),
        (["reproduce", "inception/*"], f"nearest are inception-v3/.*reproduce --list names all {len(catalog.EXPERIMENTS)}"),
        (["reproduce", "cifar-cnn/cifar10/bn-2", "--data", "nowhere"], "`mixnorm data cifar10` downloads"),
        (["report"], "^Missing argument 'DIR'; mixnorm report --help says what there is$"),
        (["train", "--subset", "5"], "^6 training images make no batch of 64: use a --batch-size of 6 at most, or a larger"),
        (["compare", "--batch-size", "5000"], "^1,438 training images make no batch of 5,000: use a .* of 1,438 at most$"),
        (["reproduce", "--list", "foo"], "^there is no experiment 'foo': mixnorm reproduce --list names all"),
        (["report", "nowhere"], "there is no folder nowhere: mixnorm compare or mixnorm reproduce makes one"),
        (["report", "."], "there are no runs in .: mixnorm compare or mixnorm reproduce trains some"),
        (["inspect", "nowhere"], "nowhere has no run: mixnorm compare"),
        (["data", "mnist"], "data set 'mnist' is unknown: choose from digits, cifar10, cifar100"),
        (["data", "digits", "--data", "."], "is read from no folder: leave --data out"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_with_the_remedy_and_leaves_nothing_behind(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIXNORM_CACHE", str(tmp_path / "cache"))
    assert re.search(sentence, mistake(*arguments))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["before", "behind"])
def test_debug_shows_where_a_mistake_arose(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["report", "."]
    debug = ["--debug", *arguments] if place == "before" else [*arguments, "--debug"]
    trace = invoke(*debug, code=2).stderr
    assert trace.startswith("Traceback")
    assert "reports/__init__.py" in trace
    assert trace.splitlines()[-1] == mistake(*arguments)  # the next command is without


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    monkeypatch.setattr("mixnorm_lab.training.build._datasets", {})
    assert mistake("compare") == "The data set digits needs scikit-learn: pip install scikit-learn"


def test_the_list_of_experiments():
    rows = json.loads(invoke("reproduce", "--list", "--json").stdout)
    assert [row["name"] for row in rows] == list(catalog.EXPERIMENTS)
    [row] = json.loads(invoke("reproduce", "--list", "--json", "cifar-cnn/cifar100/mn-8").stdout)
    assert row in rows
    assert row == {"name": "cifar-cnn/cifar100/mn-8", "epochs": 100, "layers": ["conv2", "conv3"], "paper_accuracy": 62.96}


def test_data(tmp_path):
    text = invoke("data", "digits").stdout
    assert re.search(r"training images +1,43\d\ntest images +3\d\d\nimage +1 × 8 × 8\nclasses +10\n", text)
    found = json.loads(invoke("data", "digits", "--json").stdout)
    assert found["train_images"] + found["test_images"] == 1797
    assert (found["image"], found["classes"], found["augment"]) == ([1, 8, 8], 10, False)


def test_benchmarks_print_json_alone_on_stdout():
    arguments = ["--quick", "--device", "cpu", "--backend", "reference", "--only", "fp32,K=1"]
    result = invoke("bench", "layer", *arguments, "--json")
    rows = json.loads(result.stdout)
    assert {row["variant"] for row in rows} == {"batch_norm", "reference"}
    assert "layer 64x64x16x16 fp32 cpu" in result.stderr


@pytest.mark.parametrize(
    "start",
    [
        "import runpy; runpy.run_module('mixnorm', run_name='__main__')",  # python -m mixnorm
        "from importlib.metadata import entry_points; [script] = entry_points(group='console_scripts', name='mixnorm');"
        "script.load()()",  # mixnorm
    ],
)
def test_without_typer_the_command_says_what_to_install(start):
    code = f"import sys; sys.modules['typer'] = None; {start}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == (
        "The command line needs typer and rich: install the extra, pip install '.[tools]' from a checkout of mixnorm\n"
    )


def test_the_version():
    assert invoke("--version").stdout == f"mixnorm {mixnorm.__version__}\n"


def test_a_warning_of_the_library_is_its_sentence_alone(tmp_path):
    """Not the file and the line that Python adds."""
    code = "import sys, warnings; sys.argv = ['mixnorm', '--version']; from mixnorm_lab.cli import main\n"
    code += "try: main()\nexcept SystemExit: warnings.warn('use larger batches')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "use larger batches\n"


def test_paragraphs_of_a_help_text_fill_the_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke("compare", "--help").stdout
    assert re.search(r"The same command goes on where\s+it", text)
    assert "in a folder. The same command goes on where it was" in " ".join(text.split())
    lines = [line.strip() for line in text.splitlines()]
    [first] = [line for line in lines if line.startswith("Trains both")]
    after = lines[lines.index(first) + 1]
    assert after.endswith("was interrupted.")  # two lines, none of them broken where the source was


@pytest.mark.parametrize("device", ["cpu:x", "cpu:", "cuda:x", "auto:1"])
def test_a_device_that_is_no_device(device):
    assert mistake("compare", "--device", device) == (
        f"--device {device} is unknown: write auto, cpu, cuda, or cuda:0 for the first GPU"
    )


def test_a_file_where_a_folder_belongs(tmp_path):
    file = tmp_path / "kept"
    file.write_text("")
    assert mistake("train", "--epochs", 1, "--out", file) == f"{file} is a file: name a folder for the runs"


def test_a_file_that_is_no_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("")
    assert mistake("compare", "--data", "notes.txt") == (
        "notes.txt is a file of no known kind: name a CSV or Parquet file, or a folder of images"
    )


def test_an_extra_is_installed_from_a_checkout_in_one_wording():
    sources = [path.read_text() for path in Path(mixnorm.__file__).parents[1].rglob("*.py")]
    assert not [text for text in sources if "mixnorm[" in text]
    sentences = re.findall(r"[^ ]* the extra,.*", "\n".join(sources))
    assert len(sentences) == 5
    for sentence in sentences:
        assert re.match(r"install the extra, pip install '\.\[[a-z]+\]' from a checkout", sentence)


def test_a_reader_that_wants_no_more_is_no_mistake():
    lines = (
        "from mixnorm_lab.cli.common import mistakes",
        "for _ in range(9999):",
        "    with mistakes():",
        "        print('x' * 99, flush=True)",
    )
    shell = f'{sys.executable} -c "{chr(10).join(lines)}" | head -n 1'
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "x" * 99
    assert "Broken pipe" not in done.stderr
