"""Run gradbatch on torch's own database of modules, and write down what came out: ``python -m docs.module_database``.

Every entry that has parameters and a batch becomes per-sample gradients that are right, or an error of gradbatch's that
names the layer. The page is kept in the repository, where a test keeps it true.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, module_db

import gradbatch
from tests import oracle

PAGE = Path(__file__).parent / "module-database.md"
TOLERANCE = 1e-10

INTRODUCTION = """---
orphan: true
---

# Torch's module database

What comes out for `torch.testing._internal.common_modules.module_db`, the database that torch tests its own modules
with, in train and in eval mode, in float64 (torch {version}; written by `python -m docs.module_database`). *Right*
means equal to `N` backward passes of one loss each, to a relative error of 1e-10. *Refused* means an error of
gradbatch's that names the layer. Nothing is wrong: {right} entries are right, {refused} refused; {skipped} have no
per-sample gradients to compare with, for the reasons given at the end.

| layer | right | refused | why |
| --- | ---: | ---: | --- |
"""
SKIPPED = """
## Left out

| reason | entries |
| --- | ---: |
"""


@dataclass(frozen=True)
class Outcome:
    """What came out for one entry.

    Args:
        layer: name of the module in the database.
        entry: what tells it from the module's other entries.
        kind: ``"right"``, ``"refused"``, ``"wrong"`` or ``"skipped"``.
        why: the error of a refusal or a wrong entry, the reason for leaving one out.
    """

    layer: str
    entry: str
    kind: str
    why: str = ""


class Skipped(Exception):
    """This entry has no per-sample gradients to check; says why."""


def outcomes(device: torch.device) -> Iterator[Outcome]:
    """Every entry of the database, in its order."""
    for info in module_db:
        for training in (True, False):
            inputs = info.module_inputs_func(
                info, device=device, dtype=torch.double, requires_grad=False, training=training
            )
            for number, entry in enumerate(inputs):
                mode = "train" if training else "eval"
                label = " ".join(filter(None, (str(number), entry.desc, mode)))
                try:
                    yield Outcome(info.name, label, *_run(info, entry, training, device))
                except Skipped as reason:
                    yield Outcome(info.name, label, "skipped", str(reason))


def _run(info: ModuleInfo, entry: Any, training: bool, device: torch.device) -> tuple[str, str]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the options of the entry
        module = info.module_cls(*entry.constructor_input.args, **entry.constructor_input.kwargs)
        module = module.to(device, torch.double).train(training)
        if not any(True for _ in module.parameters()):
            raise Skipped("no parameters")
        if "no_batch_dim" in entry.desc or _is_unbatched(module, entry.forward_input):
            raise Skipped("input without a batch axis")
        model = gradbatch.extend(module)
        output = model(*entry.forward_input.args, **entry.forward_input.kwargs)
    losses = _losses(output, _batch_axis(module))
    parameters = oracle.trainable(module)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gradbatch.SlowPathWarning)
            found = gradbatch.per_sample_grads(model, losses)
    except gradbatch.GradBatchError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    expected = oracle.one_hot_of(losses, parameters)
    error = max(oracle.relative_error(found[name], expected[name], per_sample=True) for name in parameters)
    return ("right", "") if error <= TOLERANCE else ("wrong", f"relative error {error:.3g}")


# Axes of a batched first input, where one axis less is a single sample. By name: not every torch has them all.
BATCHED = {
    "Linear": 2,
    "Bilinear": 2,
    "PReLU": 2,
    "RNNCellBase": 2,
    "RNNBase": 3,
    "MultiheadAttention": 3,
    "LinearCrossEntropyLoss": 2,
}


def _is_unbatched(module: nn.Module, forward: Any) -> bool:
    first = next(iter([*forward.args, *forward.kwargs.values()]))
    return any(first.dim() < BATCHED.get(kind.__name__, 0) for kind in type(module).__mro__)


def _batch_axis(module: nn.Module) -> int:
    """Recurrent and attention layers keep the samples on axis 1, if not told otherwise."""
    first = [part.batch_first for part in module.modules() if hasattr(part, "batch_first")]
    return 0 if all(first) else 1


def _losses(output: Any, batch_axis: int) -> Tensor:
    """A random projection of each sample's own output."""
    first: Tensor = output[0] if isinstance(output, tuple) else output
    if first.dim() <= batch_axis:
        raise Skipped("output without a batch axis (a loss that is reduced already)")
    return oracle.projection(first.movedim(batch_axis, 0), torch.randn_like(first.movedim(batch_axis, 0)))


def page(found: Iterable[Outcome]) -> str:
    """The page in Markdown."""
    kinds: dict[str, Counter[str]] = {}
    reasons: dict[str, dict[str, None]] = {}
    skipped: Counter[str] = Counter()
    for outcome in found:
        if outcome.kind == "skipped":
            skipped[outcome.why] += 1
            continue
        kinds.setdefault(outcome.layer, Counter())[outcome.kind] += 1
        if outcome.why:
            reasons.setdefault(outcome.layer, {})[_reason(outcome.why)] = None
    total = sum(kinds.values(), Counter())
    rows = [
        f"| `{layer}` | {count['right']} | {count['refused']} | {'; '.join(reasons.get(layer, ()))} |"
        for layer, count in kinds.items()
    ]
    introduction = INTRODUCTION.format(
        version=release(), right=total["right"], refused=total["refused"], skipped=skipped.total()
    )
    left_out = [f"| {reason} | {count} |" for reason, count in skipped.items()]
    return introduction + "\n".join(rows) + "\n" + SKIPPED + "\n".join(left_out) + "\n"


def _reason(refusal: str) -> str:
    """Of an error, its type and the sentence that says what is wrong, without what differs from entry to entry."""
    kind, _, message = refusal.partition(": ")
    sentence = re.sub(r".* explains that use: ", "", message).partition(". ")[0].strip()
    return f"`{kind}`: {sentence}"


def release() -> str:
    """Version of torch without its build."""
    return torch.__version__.partition("+")[0]


def described_release() -> str:
    """Version of torch that the page in the repository was made with."""
    match = re.search(r"torch (\d[\w.]*);", PAGE.read_text())
    return match[1] if match else ""


if __name__ == "__main__":
    PAGE.write_text(page(outcomes(torch.device("cpu"))))
