"""Draws method.png: an image and a caption on their way through the paper's recipe, computed by the package.

The image is made up: two objects on a background, each a direction in the feature space. The caption names
the first object, the dense text names both. The weights are untrained, so what is seen is what guidance does.
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from torch import Tensor

from seps import SlimHead, Tokens, paper
from seps.alignment import affinities
from seps.slimming import guidance, min_max

GRID, CHANNELS = 14, 64
THINGS = ListedColormap(["#d9d9d9", "#e07b39", "#3b7dd8"])
NAMES = ("image: s_im", "caption: s_st", "dense text: s_dt")
SHAPES = ("(B, 1, N), eq. 2", "(B, T, N), eq. 2", "(B, 1, N), eq. 2")
WORDS = ["a", "dog", "runs", "fast"]


def make_scene() -> tuple[Tokens, Tokens, Tokens, Tensor]:
    """Patches (1,N,C), caption (1,M,C), dense text (1,D,C) and which thing each patch shows (14,14)."""
    torch.manual_seed(4)
    background, first, second = torch.randn(3, CHANNELS)
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    truth = torch.zeros(GRID, GRID, dtype=torch.long)
    truth[(rows - 8) ** 2 + (columns - 4) ** 2 < 10] = 1
    truth[(rows - 4) ** 2 + (columns - 10) ** 2 < 8] = 2
    things = torch.stack([background, first, second])
    patches = things[truth.flatten()] + 0.9 * torch.randn(GRID * GRID, CHANNELS)
    caption = 0.7 * torch.randn(4, CHANNELS) + torch.tensor([0.0, 1.6, 0.6, 0.3]).unsqueeze(1) * first
    dense = 0.7 * torch.randn(12, CHANNELS) + torch.cat([first.expand(6, -1), second.expand(6, -1)])
    return Tokens(patches[None]), Tokens(caption[None]), Tokens(dense[None]), truth


def show(axes: Axes, values: Tensor, title: str, caption: str, colours: str | Colormap = "viridis") -> None:
    """One map with its title above and its shape below."""
    axes.imshow(values.detach().numpy(), cmap=colours, aspect="auto" if values.shape[0] != GRID else "equal")
    axes.set_title(title, fontsize=9.5, pad=5)
    axes.set_xlabel(caption, fontsize=8, color="#444444")
    axes.set_xticks([])
    axes.set_yticks([])


def main() -> None:
    """Compute every stage and write the picture beside this file."""
    images, texts, dense, truth = make_scene()
    head = SlimHead(paper(), GRID * GRID, CHANNELS).eval()
    with torch.no_grad():
        seen = head.inspect(images, texts, dense)
        signals = [
            min_max(guidance(images.features, each.mean().unsqueeze(1)))[0, 0].view(GRID, GRID)
            for each in (images, texts, dense)
        ]
        branch = seen.branches["sparse"]
        table = affinities(texts.features[0], seen.tokens["sparse"][0, 0])
    figure, grid = plt.subplots(2, 4, figsize=(11, 5.9), layout="constrained", facecolor="white")
    show(grid[0, 0], truth, "an image: dog and another thing", "V  (B, N, C), N = 196", THINGS)
    for axes, signal, name, shape in zip(grid[0, 1:], signals, NAMES, SHAPES, strict=True):
        show(axes, signal, f"guided by the {name}", shape)
    show(
        grid[1, 0],
        branch.saliency[0, 0].view(GRID, GRID),
        "mixed with the learned score: s",
        "(B, T, N), eq. 1 and 3",
    )
    kept = branch.kept[0, 0].view(GRID, GRID).float()
    show(
        grid[1, 1],
        kept,
        f"the decision: {int(kept.sum())} patches stay (white)",
        "d  (B, T, N), K = ceil(N * 0.5)",
        "Greys_r",
    )
    show(
        grid[1, 2],
        branch.aggregation[0, 0],
        "each row makes one token",
        f"weights (B, T, J, N), J = {head.slimmer.tokens}, eq. 4",
        "magma",
    )
    show(
        grid[1, 3],
        table,
        f"words meet tokens: S = {seen.scores.item():.2f}",
        "A  (B, T, M, J+1), last column residual, eq. 5",
        "coolwarm",
    )
    for row, word in enumerate(WORDS):  # inside, so that the columns of the figure stay in line
        grid[1, 3].text(0.2, row, word, fontsize=9, va="center", bbox={"fc": "white", "ec": "none", "pad": 2})
    path = Path(__file__).with_name("method.png")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
