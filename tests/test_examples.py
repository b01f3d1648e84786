"""Every recipe file is one that its command takes."""

from pathlib import Path

import pytest

from seps.ablation import AblateOptions
from seps.cli import parse
from seps.options import TrainOptions, recipe_from

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_file_is_taken_by_the_command_it_names(path):
    said = path.read_text(encoding="utf-8")
    name = f"examples/{path.relative_to(EXAMPLES).as_posix()}"
    assert name in said
    if f"seps ablate {name}" in said:
        assert parse(AblateOptions, [str(path)]).grid
    else:
        options = parse(TrainOptions, [str(path), "--optim.lr", "3e-4"])
        assert options.optim.lr == 3e-4
        assert recipe_from(options.recipe)


def test_the_published_training_is_the_published_one():
    options = parse(TrainOptions, [str(EXAMPLES / "flickr30k_paper.yaml")])
    assert recipe_from(options.recipe).dense_side == "text"
    assert (options.optim.lr, options.optim.backbone_factor, options.optim.weight_decay) == (2e-4, 0.1, 1e-4)
    assert (options.optim.milestones, options.optim.decay, options.optim.clip) == ((9, 15, 20, 25), 0.3, 2.0)
    assert (options.run.epochs, options.objective.all_negatives_epochs) == (30, 1)
