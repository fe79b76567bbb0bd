"""Statistics over a process group: many ranks are as one process on the concatenated batch."""

import os

import distributed_helpers as helpers
import distributed_networks as networks
import pytest
import torch
from distributed_helpers import CASES, CHANNELS, ON_GPU
from distributed_networks import DATA_PARALLEL, SHARDED
from layer_helpers import assert_same
from torch import nn

import mixnorm
from mixnorm.ops.distributed import HEADER

RANKS = 4


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """What each of four gloo ranks found."""
    base = tmp_path_factory.getbasetemp()
    return helpers.launch_once(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


def assert_near(found, expected, tolerance=1e-5):
    """Within the tolerance of the largest value."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    if found.dtype == torch.bfloat16:  # a number in the middle of two may go to either
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=torch.finfo(found.dtype).eps, equal_nan=True)
        assert (found != expected).float().mean() < 0.01
        return
    torch.testing.assert_close(found, expected, atol=tolerance * scale, rtol=0, equal_nan=True)


def assert_as_one(case, parts, expected, tolerance):
    """The ranks' outputs and gradients are parts of one process's; those of γ and β add up to its; the history is its."""
    for name in ("y", "grad"):
        for found, whole in zip(zip(*(part[name] for part in parts), strict=True), expected[name], strict=True):
            assert_near(torch.cat([part.cpu() for part in found]), whole.cpu(), tolerance)
    for i, whole in enumerate(expected["parameters"]):
        assert_near(sum(part["parameters"][i].cpu() for part in parts), whole.cpu(), tolerance)
    for part in parts:
        assert part["state"].keys() == expected["state"].keys()
        for name, value in part["state"].items():
            assert torch.equal(value.nan_to_num().cpu(), parts[0]["state"][name].nan_to_num().cpu())
            assert_near(value.cpu(), expected["state"][name].cpu(), tolerance)


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_as_one_process(ranks, name):
    case = CASES[name]
    parts = [found[name] for found in ranks[: len(case.sizes)]]
    expected = helpers.run(case)
    tolerance = 1e-12 if case.dtype == torch.float64 else 1e-5
    assert_as_one(case, parts, expected, tolerance)
    assert torch.equal(parts[0]["random"], expected["random"])  # the generator went on by as much
    for part in parts:
        assert torch.equal(part["evaluated"], parts[0]["evaluated"])
        assert_near(part["evaluated"], expected["evaluated"], tolerance)
        assert case.seeds_differ or torch.equal(part["random"], expected["random"])


def test_every_case_has_more_than_one_component_in_use(ranks):
    """Otherwise the equality above would say little."""
    for name, case in CASES.items():
        if name == "few":  # points, which get one component
            continue
        if case.options.get("num_components", 3) > 1 and "history_weights" in ranks[0][name]["state"] and sum(case.sizes):
            assert ((ranks[0][name]["state"]["history_weights"][..., -1, :] > 0).sum(-1) > 1).any(), name


def test_collectives_and_bytes_of_a_step(ranks):
    channels, components, sample, numbers = 16, 3, 128, 5056  # the state of a CPU's generator; a GPU's has 16
    mixture = components * (1 + 2 * channels)
    for found in ranks:
        traffic = found["traffic"]
        assert traffic["forward"] == [
            ("all_to_all_single", 8 * RANKS * HEADER + numbers),  # headers, and the first rank's random state
            ("reduce", 4 * sample * channels),
            ("broadcast", 4 * mixture),
            ("all_reduce", 8 * mixture),  # the sums of the M-step, in fp64
        ]
        assert traffic["warm"] == traffic["forward"]
        assert traffic["backward"] == [("all_reduce", 4 * 2 * components * channels)]


def test_evaluation_other_populations_and_one_process_send_nothing(ranks):
    assert [(found["traffic"]["silent"], found["traffic"]["alone"]) for found in ranks] == [([], [])] * RANKS


@pytest.fixture(scope="module")
def one_process():
    """The network of one process after training, and its evaluation."""

    def trained(accumulate):
        model = networks.network()
        networks.train(model, slice(None), scale=1, accumulate=accumulate)
        return networks.state_and_evaluation(model, model.state_dict())

    return {accumulate: trained(accumulate) for accumulate in (False, True)}


@pytest.mark.parametrize("mode", [*DATA_PARALLEL, *(mode for mode in SHARDED if "bfloat16" not in mode)])
def test_a_network_trains_as_in_one_process(ranks, one_process, mode):
    """Under DistributedDataParallel (buffers broadcast or not, unused parameters, accumulation) and both kinds of FSDP."""
    initial = networks.network().state_dict()
    expected = one_process[mode == "accumulate"]
    found = [rank["sharded" if mode in SHARDED else "data parallel"][mode] for rank in ranks]
    assert found[0]["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        states = [rank["state"][name] for rank in found]
        assert all(torch.equal(state, states[0]) for state in states)
        assert_near(states[0], value)
        assert torch.equal(value, initial[name]) == name.startswith("spare")
    for rank in found:
        assert_near(rank["evaluated"], expected["evaluated"])


@pytest.mark.parametrize("mode", [mode for mode in SHARDED if "bfloat16" in mode])
def test_a_sharded_network_in_mixed_precision(ranks, mode):
    """All ranks have the same state, in fp32, and a network of one process evaluates with it."""
    initial, found = networks.network().state_dict(), [rank["sharded"][mode] for rank in ranks]
    for name, value in found[0]["state"].items():
        assert value.dtype == initial[name].dtype
        assert value.isfinite().all()
        assert all(torch.equal(rank["state"][name], value) for rank in found)
        assert torch.equal(value, initial[name]) == name.startswith("spare")
    again = networks.network()
    again.load_state_dict(found[0]["state"])
    assert_near(found[0]["evaluated"], networks.state_and_evaluation(again, {})["evaluated"], 2**-6)


@pytest.mark.parametrize("inference", ["ensemble", "pooled"])
def test_the_first_ranks_buffers_are_broadcast(ranks, inference):
    """A history of its own on every rank, two of its five slots filled, becomes the first rank's."""
    layer = networks.history_layer(inference)
    for step in range(2):
        layer(networks.history_batch(0, step))
    evaluated = layer.eval()(networks.history_batch(0, 9)).detach()
    found = [rank["broadcast buffers"][inference] for rank in ranks]
    assert not torch.equal(found[1]["own"], found[0]["own"])
    for rank in found:
        assert int((rank["state"]["history_weights"].sum(-1) > 0).sum()) == 2
        assert_same(rank["state"], dict(layer.state_dict()))
        assert torch.equal(rank["evaluated"], evaluated)


def test_recalibrate_with_more_batches_on_some_ranks(ranks):
    """As one process with the batches of each round together; a norm of the rank's own sees its own batches alone."""
    layer = networks.WithView().norm
    torch.manual_seed(1)
    rounds = [[r for r in range(RANKS) if networks.BATCHES[r] > i] for i in range(max(networks.BATCHES))]
    mixnorm.recalibrate(
        layer, [torch.cat([networks.recalibration_batch(r, i) for r in there]) for i, there in enumerate(rounds)]
    )
    for rank, found in enumerate(rank["recalibrated"] for rank in ranks):
        for name, expected in layer.state_dict().items():
            assert_near(found["state"][f"norm.{name}"], expected)
        assert found["state"]["batch_norm.num_batches_tracked"] == networks.BATCHES[rank]
        assert found["hooks"] == 0
        assert found["error"].startswith("batches is empty" if rank == 2 else "batches is empty on another rank")
        assert found["kept"]


def test_what_cannot_be_done_is_an_error_on_every_rank(ranks):
    for found in ranks:
        assert "expected more than 1 value per channel" in found["errors"]["single point"]
        assert "once_differentiable" in found["errors"]["twice"]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("frozen", "the ranks are at different layers, this one at MixtureNorm2d 'body.{layer}'"),
        ("option", "num_components is {components} on rank {rank}, but not on rank {others}"),
        ("gradient", "a gradient of the input is {gradient} on rank {rank}, but not on rank {others}"),
        ("step", "the step is '{step}' on rank {rank}, but not on rank {others}"),
    ],
)
def test_every_rank_hears_of_a_disagreement(ranks, what, sentence):
    for rank, found in enumerate(ranks):
        other = rank == 2
        words = {"layer": 4 if other else 1, "components": 2 + other, "gradient": not other, "rank": rank}
        step = "recalibrate" if other else "a forward pass in training"
        assert sentence.format(**words, step=step, others="0, 1, 3" if other else "2") in found["disagreements"][what]
        assert "on all" in found["disagreements"][what]


@pytest.mark.parametrize("what", ["evaluation", "backward"])
def test_a_rank_that_does_not_come(ranks, what):
    """Those who wait say so, and why, before and after the group's timeout."""
    for found in (rank["silence"][what] for rank in ranks[:3]):
        assert found["error"].startswith(
            "MixtureNorm2d(2) could not reach the other ranks: all ranks must run the same layers"
        )
        assert "has waited 0.2 s for the other ranks, and still waits: all ranks must run" in found["warnings"][0]


def test_copies_share_the_group_and_pickles_leave_it_out(ranks):
    assert all(found["copies"]["world"] == ["world"] * 4 for found in ranks)
    for found in (ranks[0]["copies"], ranks[1]["copies"]):
        assert found["shared"]
        assert found["pickled"] is None
        assert "mixnorm.synchronize" in found["warning"]
        assert not any("group" in name for name in found["state"])
    for found in (ranks[2]["copies"], ranks[3]["copies"]):
        assert "not in process_group" in found["outside"]


def test_synchronize_changes_mixture_norms_alone():
    model = mixnorm.convert(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm1d(3)), "0")
    assert mixnorm.synchronize(model) is model
    assert model[0].process_group == "world"
    assert type(model[1]) is nn.BatchNorm1d
    assert "process_group='world'" in repr(model[0])
    with pytest.raises(ValueError, match="no mixture norm"):
        mixnorm.synchronize(nn.Sequential(nn.BatchNorm2d(3)))
    with pytest.raises(ValueError, match="process_group='wrold'"):
        mixnorm.synchronize(model, "wrold")


def test_a_process_alone_is_not_changed():
    def train(group):
        layer = mixnorm.MixtureNorm2d(CHANNELS, process_group=group)
        torch.manual_seed(0)
        x = torch.randn(4, CHANNELS, 3, 3, requires_grad=True)
        layer(x).square().sum().backward()
        return x.grad, layer(x[:0]).shape, layer.history_means

    plain, synchronized = train(None), train("world")
    assert torch.equal(plain[0], synchronized[0])
    assert plain[1] == synchronized[1]
    assert torch.equal(plain[2], synchronized[2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_gpus_are_as_one(backend, tmp_path):
    """Two ranks, which may share a GPU only with gloo."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    found = helpers.launch(tmp_path, 2, backend, ON_GPU, "cuda")
    for name in ON_GPU:
        case = CASES[name]
        tolerance = 1e-10 if case.dtype == torch.float64 else 1e-4  # the fit adds up in any order
        assert_as_one(case, [part[name] for part in found], helpers.run(case, device="cuda"), tolerance)
