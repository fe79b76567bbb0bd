"""A griffe extension that makes Markdown of what the docstrings have from Sphinx: equations, and names of functions."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe

_EQUATION = re.compile(r"^( *)\.\. math::\n((?:\1 +.*\n?|\n)+)", re.MULTILINE)
_DEFAULT = re.compile(r'\s+Default: (?:``[^`\n]+``|"[^"\n]*"|[\d.e-]+)$', re.MULTILINE)  # what the signature says as well
_NAME = re.compile(r":(?:func|class|meth):`(\w+)`")

_OTHER_LAYERS = {"mixnorm.layers.MixtureNorm1d", "mixnorm.layers.MixtureNorm3d"}


class Docstrings(griffe.Extension):
    """Rewrites docstrings before they are parsed. The layers share their options, so one of them tells them all."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = _DEFAULT.sub("", _EQUATION.sub(_display, obj.docstring.value))
            if obj.path in _OTHER_LAYERS:
                before, _, after = text.partition("\nArgs:\n")
                shape = after.partition("\nShape:\n")[2]
                text = f"{before}\nThe options are those of :class:`MixtureNorm2d`.\n\nShape:\n{shape}"
            text = text.replace("\nExample:\n", "\nExamples:\n")  # a section that griffe knows
            obj.docstring.value = _NAME.sub(lambda found: f"[`{found[1]}`][{obj.module.path}.{found[1]}]", text)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """A default that is a constant's name becomes the constant's value."""
        for function in _functions(pkg):
            for parameter in function.parameters:
                if isinstance(parameter.default, griffe.ExprName) and parameter.default.name.isupper():
                    constant = loader.modules_collection[parameter.default.canonical_path]
                    parameter.default = str(getattr(constant, "value", constant))


def _functions(module: griffe.Object) -> Iterator[griffe.Function]:
    for member in module.members.values():
        if isinstance(member, griffe.Function):
            yield member
        elif not member.is_alias:
            yield from _functions(member)


def _display(found: re.Match[str]) -> str:
    """A displayed equation, indented as the directive was."""
    equation = textwrap.dedent(found[2]).strip()
    return textwrap.indent(f"$$\n{equation}\n$$\n\n", found[1])
