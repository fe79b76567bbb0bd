"""What `mixnorm.distill` costs in accuracy and saves in time: a trained model on its test images, before and after.

    python benchmarks/distill.py RUN [--folder OFFICIAL_FILES] [--onnx]

RUN is the folder of a run with its checkpoint, as `mixnorm train` and `mixnorm reproduce` leave it. With --onnx both models
are also exported, and the size of the file and onnxruntime's time are told. One thread of the CPU, in fp32.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from pathlib import Path

import torch

import mixnorm
from mixnorm.mixture_norm import _MixtureNorm
from mixnorm_lab.config.run_config import RunConfig
from mixnorm_lab.storage import checkpoint
from mixnorm_lab.training import build
from mixnorm_lab.training.classifier import evaluate

BATCH, REPEATS = 256, 12


def milliseconds(functions):
    """The fastest of several calls of each, taken in turns: what else runs on the machine only adds to it."""
    samples = {name: [] for name in functions}
    for _ in range(REPEATS):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: min(values) for name, values in samples.items()}


def norm_inputs(model, images):
    """Every mixture norm with what it gets."""
    found = []
    hooks = [
        norm.register_forward_pre_hook(lambda norm, inputs: found.append((norm, inputs[0])))
        for norm in model.modules()
        if isinstance(norm, _MixtureNorm)
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    return found


def in_onnxruntime(model, images):
    """A call of the exported model, the size of its file in kB, and how far its logits are off, of the largest."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        shapes = ({0: torch.export.Dim("n")},)
        torch.onnx.export(model, (images[:2],), dynamo=True, dynamic_shapes=shapes, verbose=False).save(file)
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        size = file.stat().st_size / 1e3
    feed = {session.get_inputs()[0].name: images.numpy()}
    expected = model(images)
    difference = ((torch.from_numpy(session.run(None, feed)[0]) - expected).abs().max() / expected.abs().max()).item()
    return lambda: session.run(None, feed), size, difference


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--folder", type=Path, help="of the data's official files")
    parser.add_argument("--onnx", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    state = checkpoint.read(arguments.run)
    if state is None:
        parser.error(f"there is no checkpoint in {arguments.run}")
    config, device = RunConfig.from_json(state["config"]), torch.device("cpu")
    model, source = build.prepare(config, device, arguments.folder)
    model.load_state_dict(state["model"])
    model.eval()
    print(f"{config.name}, epoch {state['epoch']}, torch {torch.__version__}, one thread, {BATCH} images at a time")
    images = next(iter(source.test_batches(BATCH)))[0].contiguous()
    calls = {}
    for name, subject in (("history", model), ("distilled", mixnorm.distill(copy.deepcopy(model)))):
        found = evaluate(subject, source.test_batches(BATCH), device=device, bf16=False)
        print(f"{name}: accuracy {100 * (1 - found.error):.2f}%, loss {found.loss:.4f}")
        pairs = norm_inputs(subject, images)
        calls[f"{name}: mixture norms"] = lambda pairs=pairs: [norm(x) for norm, x in pairs]
        calls[f"{name}: model"] = lambda subject=subject: subject(images)
        if arguments.onnx:
            calls[f"{name}: onnxruntime"], size, difference = in_onnxruntime(subject, images)
            print(f"{name}: ONNX file of {size:.0f} kB, logits off by {difference:.0e} of the largest")
    for name, value in milliseconds(calls).items():
        print(f"{name} {value:.1f} ms")


if __name__ == "__main__":
    main()
