"""Re-identification in aligned modalities: data, model, training, measurement."""

from seps.reid.data import Dataset, FilePicture, Sighting, hold_out, read
from seps.reid.model import ReIdConfig, ReIdModel, load
from seps.reid.rendered import render_dataset

__all__ = [
    "Dataset",
    "FilePicture",
    "ReIdConfig",
    "ReIdModel",
    "Sighting",
    "hold_out",
    "load",
    "read",
    "render_dataset",
]
