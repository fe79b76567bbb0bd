"""A new process that trains a model for a step: what it takes until then. Started by :mod:`mixnorm_lab.bench.whole.start`.

``python -m mixnorm_lab.bench.whole.first_step JSON`` prints a line for each figure as it comes: its name and its seconds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main(job: dict[str, Any]) -> None:
    """
    Args:
        job: "began", when the process was started (``time.time()``); "device", "model", "shape" of the images, "bf16",
            "compile"; "mixture", options of mixture norms or None; and their "form".
    """
    import torch

    from mixnorm_lab.bench.whole import models

    device = torch.device(job["device"])
    images = torch.randn(job["shape"], device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(models.num_classes(job["model"]), job["shape"][:1], device=device)

    def new_model() -> torch.nn.Module:
        model = models.build(job["model"], tuple(job["shape"][1:]))
        if job["mixture"] is not None:
            models.with_mixture_norms(model, job["model"], job["form"], **job["mixture"])
        return model

    def seconds(torch_compile: bool) -> float:
        step = models.training(new_model(), images, labels, bf16=job["bf16"], torch_compile=torch_compile)
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    tell("first-step", seconds(torch_compile=False))
    tell("with-import", time.time() - job["began"])
    if job["compile"]:
        tell("compile", seconds(torch_compile=True))


def tell(figure: str, seconds: float) -> None:
    print(figure, seconds, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
