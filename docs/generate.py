"""Write the pages that are read off the code: run by the documentation build, kept out of the repository."""

import sys
from itertools import groupby
from pathlib import Path

from torch import nn

from gradbatch.rules import registry

INTRODUCTION = """# Supported layers

Layers with a rule, read off the registry when this page was built; all others are read off the autograd graph, and
are just as right ([concepts](concepts.md)). A layer is matched by its exact type: a subclass is one of the others until
it has [a rule of its own](adding-a-layer.md). Samples may lie on any axis that the layer treats as rows, also flattened
together with positions.

Lazy modules are supported once they are materialised. BatchNorm is supported in eval mode; in train mode it makes
samples depend on each other and is refused. [Torch's module database](module-database.md) shows what comes out for each
of torch's own layers.
"""


def write(folder: Path) -> None:
    """Write every generated page into ``folder``."""
    (folder / "supported-layers.md").write_text(supported_layers())


def supported_layers() -> str:
    """A table for each file of rules, a row for each rule."""
    page = [INTRODUCTION]
    taught = sorted(registry.taught_types(), key=lambda kind: (family(kind), kind.__name__))
    for module, kinds in groupby(taught, key=family):
        title = first_sentence(sys.modules[module].__doc__)
        page += [f"## {title}", "", "| layers | per-sample gradients |", "| --- | --- |"]
        layers: dict[str, list[str]] = {}
        for kind in kinds:
            layers.setdefault(first_sentence(rule(kind).function.__doc__), []).append(f"`{kind.__name__}`")
        page += [f"| {', '.join(names)} | {sentence} |" for sentence, names in layers.items()]
        page.append("")
    return "\n".join(page)


def family(kind: type[nn.Module]) -> str:
    return rule(kind).function.__module__


def rule(kind: type[nn.Module]) -> registry.LayerRule:
    # The registry is asked about modules; one without attributes of its own is module enough.
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    found = registry.rule_for(module.eval())
    assert found is not None, f"{kind.__name__}: its forward was replaced after its rule was registered"
    return found


def first_sentence(docstring: str | None) -> str:
    """First line of a docstring, in Markdown: one backtick where reStructuredText has two."""
    return (docstring or "").strip().partition("\n")[0].rstrip(".").replace("``", "`")
