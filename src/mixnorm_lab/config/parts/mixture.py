"""Which batch norms of a run's model become mixture norms, and the options of these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mixnorm_lab.config.fields import Option, setting

ALL_LAYERS = ("*",)
RECOMMENDED_LAYERS = ("recommended",)  # those that mixnorm.convert takes by itself


@dataclass(frozen=True)
class Mixture:
    """The choice of batch norms that become mixture norms, and the options of these.

    Args:
        layers: the paper's layer names ("conv3", "inc2/0") for the models of the paper, and names or globs of modules as
            :func:`mixnorm.convert` takes them ("conv3.norm", "features.*"). When the model is built, a name that
            ``models.last_norms`` knows for that model becomes module names; any other goes to ``convert`` as it is.
            "recommended" alone is all but those that ``convert`` leaves out by itself.
        options: of :class:`mixnorm.MixtureNorm2d`: num_components, em_iters, activation, ...; with "@" and layers behind its
            name, with "+" between several, an option is for these alone. "form" is that of ``convert``, "paper" by default.
    """

    layers: tuple[str, ...] = field(
        metadata=setting(
            Option(
                "--layers",
                "The batch norms to replace: the paper's layer names, globs of modules, or recommended; with commas.",
                kind=str,
                read=lambda text: tuple(layer.strip() for layer in text.split(",")),
            ),
            label="layers",
            text=lambda mixture: ", ".join(mixture.layers),
        )
    )
    options: dict[str, Any] = field(
        default_factory=dict,
        metadata=setting(
            Option(
                "--components -k",
                "K, the number of components of a mixture.",
                minimum=1,
                kind=int,
                key="num_components",
                generators=True,
            ),
            Option(
                "--em-iters",
                "EM iterations, the paper's EM iter.",
                minimum=0,
                kind=int,
                key="em_iters",
                generators=True,
            ),
            Option(
                "--option -o",
                "Any other option of MixtureNorm2d, such as inference=mixture.",
                kind=list[str],
                read=lambda texts: dict(map(assignment, texts)),
            ),
        ),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "options", dict(self.options))

    @property
    def for_convert(self) -> dict[str, Any]:
        """The options as :func:`mixnorm.convert` takes them."""
        return {"form": "paper", **self.options}


def assignment(text: str, where: str = "--option") -> tuple[str, Any]:
    """ "inference=mixture" as a name and a value; ``where`` it stands is for the sentence about one that is neither."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{where} {text} says no value: write it as name=value, such as inference=mixture")
    words: dict[str, Any] = {"none": None, "true": True, "false": False}
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, words.get(value.lower(), value)
