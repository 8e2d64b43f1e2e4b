"""What is timed is right before it is fast, on every kind of model."""

import copy

import pytest
import torch
from torch import Tensor, nn

from benchmarks.cases import CASES, Batch, Case
from benchmarks.contestants import OURS, PEERS, PLAIN
from benchmarks.contestants.base import Contestant, Refused, Step, disagreement, per_sample_attribute
from benchmarks.measure import start
from benchmarks.models.images import InvertedResidual, ResidualBlock, VisionTransformer
from benchmarks.models.sequences import EmbeddingClassifier, LSTMClassifier
from benchmarks.models.transformers import GPT
from benchmarks.quantities import CLIP, FROM_GRADS, QUANTITIES, Answer

CPU = torch.device("cpu")


def head(*layers: nn.Module, channels: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


TINY = {
    "residual": Case("", lambda _: head(ResidualBlock(8, 16, 2, groups=4), channels=16), (8, 6, 6), 3),
    "inverted": Case("", lambda _: head(InvertedResidual(8, 8, 1, 2), channels=8), (8, 5, 5), 3),
    "vit": Case("", lambda _: VisionTransformer(12, 1, 3, 4), (3, 8, 8), 3),
    "gpt": Case("", lambda t: GPT(t, 8, 1, 11), (5,), 3, vocabulary=11, every_position=True),
    "lstm": Case("", lambda _: LSTMClassifier(4, 6), (5, 4), 3),
    "embedding": Case("", lambda _: EmbeddingClassifier(13, 4), (5,), 3, vocabulary=13),
}


def one_by_one(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The gradient of each loss, by a backward pass of its own."""
    parameters = dict(model.named_parameters())
    losses = batch.losses(model)
    rows = [torch.autograd.grad(loss, [*parameters.values()], retain_graph=True) for loss in losses]
    return {
        name: torch.stack(column) for name, column in zip(parameters, zip(*rows, strict=True), strict=True)
    }


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("case", TINY)
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of attention, sample by sample
@pytest.mark.parametrize("contestant", [OURS, PEERS["vmap"]], ids=lambda contestant: contestant.name)
def test_what_needs_no_other_package_gives_the_right_answer(
    contestant: Contestant, case: str, quantity: str
) -> None:
    if case == "lstm" and contestant is not OURS:
        pytest.skip("vmap has no rule for LSTM kernels in float64")
    model, batch = TINY[case].build(CPU)
    model.double()
    if batch.inputs.is_floating_point():
        batch = Batch(batch.inputs.double(), batch.labels)
    step = contestant.prepare(copy.deepcopy(model), batch, quantity)
    for _ in range(contestant.warm_up):
        answer = step()
    expected = FROM_GRADS[quantity](one_by_one(model, batch))
    assert answer.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(answer[name], values, msg=lambda text, name=name: f"{name}: {text}")


def test_a_clipped_sum_is_the_sum_of_gradients_no_longer_than_the_bound() -> None:
    model, batch = TINY["embedding"].build(CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that some are longer
    grads = one_by_one(model, batch)
    lengths = torch.cat([g.flatten(1) for g in grads.values()], 1).norm(dim=1)
    assert lengths.max() > CLIP
    answer = OURS.prepare(model, batch, "clipped sum")()
    for name, g in grads.items():
        clipped = [one * min(1.0, CLIP / float(length)) for one, length in zip(g, lengths, strict=True)]
        torch.testing.assert_close(answer[name], torch.stack(clipped).sum(0))


@pytest.mark.parametrize("case", CASES)
def test_every_model_takes_its_batch_and_gives_one_loss_a_sample(case: str) -> None:
    model, batch = CASES[case].build(CPU, samples=2)
    with torch.no_grad():
        assert batch.losses(model).shape == (2,)


class Told(Contestant):
    """Answers what it is told to."""

    name, offers = "told", frozenset(QUANTITIES)

    def __init__(self, answer: Answer | Exception) -> None:
        self.answer = answer

    def prepare(self, model: nn.Module, batch: object, quantity: str) -> Step:
        def step() -> Answer:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

        return step


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"total": torch.tensor([1.0, 2.0])}, ""),
        ({"total": torch.tensor([1.0, 2.2])}, "wrong by 8.9e-02"),
        ({"total": torch.tensor([1.0, float("nan")])}, "wrong by nan"),
        ({"total": torch.tensor([1.0])}, "wrong by inf"),
        ({"weight": torch.tensor([1.0, 2.0])}, "wrong by inf"),
        (Refused("nothing for 2 of 3 parameters"), "refused: nothing for 2 of 3 parameters"),
        (ValueError("in two\n  lines"), "refused: ValueError: in two lines"),
        (ModuleNotFoundError("no", name="opacus"), "not installed (opacus)"),
    ],
)
def test_what_a_contestant_gets_wrong_or_refuses_is_said(answer: Answer | Exception, said: str) -> None:
    reference = {"total": torch.tensor([1.0, 2.0])}
    contestant = Told(answer)
    step, _, heard, _ = start(contestant, lambda c: c.prepare(nn.Identity(), None, ""), reference)
    assert heard == said
    assert (step is None) == (not said.startswith("wrong") and said != "")


def test_a_gradient_that_is_zero_but_for_rounding_is_no_disagreement() -> None:
    reference = {"weight": torch.tensor([3.0, 4.0]), "key_bias": torch.tensor([1e-9])}
    assert disagreement({"weight": reference["weight"], "key_bias": torch.tensor([-2e-9])}, reference) < 1e-5


def test_parameters_that_a_peer_left_out_are_named() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad_sample = torch.zeros(3, 1, 2)  # type: ignore[assignment]
    with pytest.raises(Refused, match="nothing for 1 of 2 parameters, such as bias"):
        per_sample_attribute(model, "grad_sample")
    assert not hasattr(model.weight, "grad_sample")


def test_the_plain_step_leaves_the_gradient_of_one_step() -> None:
    model, batch = TINY["embedding"].build(CPU)
    step = PLAIN.prepare(model, batch, "")
    step()
    first = model.head.weight.grad.clone()
    step()
    assert torch.equal(model.head.weight.grad, first)
