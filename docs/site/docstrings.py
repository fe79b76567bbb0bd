"""A griffe extension that makes Markdown of what the docstrings have from Sphinx: equations, and names of functions."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe

_DEFAULT = re.compile(r'\s+Default: (?:``[^`\n]+``|"[^"\n]*"|[\d.e-]+)$', re.MULTILINE)  # what the signature says as well
_DOCUMENT = re.compile(r"\bdocs/(\w+\.md)")
_EQUATION = re.compile(r"^( *)\.\. math::\n((?:\1 +.*\n?|\n)+)", re.MULTILINE)
_NAME = re.compile(r":(?:func|class|meth):`(?:mixnorm\.)?(\w+)`")
_OTHER_LAYERS = {"mixnorm.layers.MixtureNorm1d", "mixnorm.layers.MixtureNorm3d"}


class Docstrings(griffe.Extension):
    """Rewrites docstrings before they are parsed, and gives defaults that are the name of a constant their value."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        objects = list(_objects(pkg))
        places = {each.name: each.path for each in reversed(objects) if not each.is_module and each.parent.is_module}
        for each in objects:
            if each.docstring:
                text = _rewritten(each.docstring.value, each.path in _OTHER_LAYERS)
                each.docstring.value = _NAME.sub(lambda found: _link(found[1], places), text)
            for parameter in each.parameters if each.is_function else ():
                if isinstance(parameter.default, griffe.ExprName) and parameter.default.name.isupper():
                    constant = loader.modules_collection[parameter.default.canonical_path]
                    parameter.default = str(getattr(constant, "value", constant))


def _objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    yield parent
    for member in parent.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _rewritten(text: str, is_other_layer: bool) -> str:
    text = _DOCUMENT.sub(r"[\1](../\1)", _DEFAULT.sub("", _EQUATION.sub(_display, text)))
    if is_other_layer:  # the layers share their options, so one of them tells them all
        before, _, after = text.partition("\nArgs:\n")
        shape = after.partition("\nShape:\n")[2]
        text = f"{before}\nThe options are those of :class:`MixtureNorm2d`.\n\nShape:\n{shape}"
    return text.replace("\nExample:\n", "\nExamples:\n")  # a section that griffe knows


def _display(found: re.Match[str]) -> str:
    """A displayed equation, indented as the directive was."""
    equation = textwrap.dedent(found[2]).strip()
    return textwrap.indent(f"$$\n{equation}\n$$\n\n", found[1])


def _link(name: str, places: dict[str, str]) -> str:
    return f"[`{name}`][{places[name]}]" if name in places else f"`{name}`"
