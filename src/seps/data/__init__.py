"""Data: readers of the layouts in use, the built-in scenes, augmentation of images and words, loading."""

from seps.data.images import View, augment_image, evaluate_image, open_image, to_image
from seps.data.layouts import read
from seps.data.loader import (
    Batch,
    Draw,
    EpochSampler,
    Held,
    caption_counts,
    evaluation_batches,
    training_batches,
)
from seps.data.records import Collection, Problem, Problems, Record, Source, divide
from seps.data.scenes import Scenes, Truth, read_truth, write
from seps.data.text import (
    Encoded,
    WordNoise,
    WordTokenizer,
    augment_encoded,
    augment_words,
    cap_words,
    split_words,
)

__all__ = [
    "Batch",
    "Collection",
    "Draw",
    "Encoded",
    "EpochSampler",
    "Held",
    "Problem",
    "Problems",
    "Record",
    "Scenes",
    "Source",
    "Truth",
    "View",
    "WordNoise",
    "WordTokenizer",
    "augment_encoded",
    "augment_image",
    "augment_words",
    "cap_words",
    "caption_counts",
    "divide",
    "evaluate_image",
    "evaluation_batches",
    "open_image",
    "read",
    "read_truth",
    "split_words",
    "to_image",
    "training_batches",
    "write",
]
