"""Generators on a GPU: a captured step is the step that it was captured from, and an interrupted run goes on."""

import dataclasses

import pytest
import torch
from gan_helpers import GAN, MIXTURE, config, dataset, run
from run_helpers import Interrupt

from mixnorm_lab.data import Resident
from mixnorm_lab.generators.build import make_networks
from mixnorm_lab.generators.gan import GanStep
from mixnorm_lab.generators.streams import Beside
from mixnorm_lab.training.optimizers import build_optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_a_captured_step_is_the_same_step():
    """Updates before and after the capture, against the same ones that are run as they are and on one stream."""
    device = torch.device("cuda")
    source = Resident(dataset(), 8, device=device, augment=False, signed=True)
    curves = []
    for captured in (True, False):
        networks = [network.to(device) for network in make_networks(config(mixture=None))]
        both = tuple(build_optimizer(network.parameters(), config().optimizer, device) for network in networks)
        step = GanStep(*networks, both, source, 8, 4, device=device)
        if not captured:
            step._beside = Beside(torch.device("cpu"))
        source.start_epoch(0, 0)
        torch.manual_seed(3)
        for _ in range(8):
            if captured:
                step()
            else:
                step.update()
        assert (step._graph is not None) == captured
        curves.append(step.curve)
    torch.testing.assert_close(curves[0], curves[1], atol=1e-3, rtol=1e-3)


def test_a_run_on_a_gpu(tmp_path):
    mixture = dataclasses.replace(MIXTURE, options={"num_components": 3, "em_iters": 2})
    long = config(mixture=mixture, channels_last=True, gan=dataclasses.replace(GAN, updates=12))
    with pytest.raises(KeyboardInterrupt):
        run(long, tmp_path, device="cuda", progress=Interrupt(epoch=2))
    record = run(long, tmp_path, device="cuda")
    assert record.finished
    assert record.epochs[-1]["distance"] > 0
    assert record.epochs[-1]["steps"] == 48
