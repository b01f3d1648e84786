"""The re-identification model: one backbone for all modalities, slimming, two features with a head each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from seps.data.images import View
from seps.data.records import written_beside
from seps.encoders import build_image_encoder
from seps.modalities import RGB_NIR_TIR, MultiModalSlimmer, Slimmed, reidentification
from seps.recipe import Recipe
from seps.slimming import unit
from seps.tokens import Tokens

Kind = Literal["original", "slimmed"]
Features = Literal["both", "original", "slimmed"]
KINDS: dict[Features, tuple[Kind, ...]] = {
    "both": ("original", "slimmed"),
    "original": ("original",),
    "slimmed": ("slimmed",),
}
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class ReIdConfig:
    """What a re-identification model is made of.

    identities: of the training data, one class each; cameras: the numbers of those that get an embedding of
    their own, none for no camera embedding; global_local: whether the mean patch enters a global feature;
    features: what describes a sighting when it is compared.
    """

    image_encoder: Mapping[str, Any] = field(default_factory=lambda: {"kind": "light", "size": [128, 64]})
    channels: int = 512
    identities: int = 1
    cameras: tuple[int, ...] = ()
    modalities: tuple[str, ...] = RGB_NIR_TIR
    recipe: Recipe = field(default_factory=reidentification)
    global_local: bool = False
    features: Features = "both"

    def __post_init__(self) -> None:
        if self.features not in KINDS:
            raise ValueError(f"features: expected {', '.join(KINDS)}, found {self.features!r}")
        if self.identities < 1 or self.channels < 5:
            raise ValueError(
                "identities, channels: expected at least 1 and 5, "
                f"found {self.identities} and {self.channels}"
            )

    @classmethod
    def read(cls, path: Path) -> ReIdConfig:
        """The configuration in a JSON file."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values["recipe"] = Recipe(**values["recipe"])
            for name in ("cameras", "modalities"):
                values[name] = tuple(values[name])
            return cls(**values)
        except OSError as error:
            raise ValueError(f"{path}: expected a model's configuration, found {error.strerror}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}: not the configuration of a re-identification model ({error})"
            ) from None


@dataclass(frozen=True)
class Encoded:
    """One modality behind the backbone: patches (B,N,C) and the global feature (B,C)."""

    patches: Tokens
    global_feature: Tensor


@dataclass(frozen=True)
class Description:
    """What describes B sightings, the modalities one after the other, zero where one is absent.

    original, slimmed (B,MC) for M modalities; slim: how each modality was slimmed.
    """

    original: Tensor
    slimmed: Tensor
    slim: Mapping[str, Slimmed]

    @property
    def presence(self) -> Tensor:
        """Which modalities each sighting has. -> (B,M) boolean"""
        return torch.stack([each.present for each in self.slim.values()], 1)


class AttentionPool(nn.Module):
    """The global feature of an encoder without CLS: a learned mean of its patches, plain at the start.

    The plain mean of patches points to the background, and as an anchor it would keep just that.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = nn.Linear(channels, 1, bias=False)
        nn.init.zeros_(self.attention.weight)

    def forward(self, patches: Tokens) -> Tensor:
        """(B,N,C) -> (B,C)"""
        weights = self.attention(patches.features).softmax(1)
        return (weights * patches.features).sum(1)


class GlobalLocal(nn.Module):
    """A global feature that has seen the mean patch too: QuickGELU(Linear(LayerNorm([global, mean])))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * channels)
        self.reduce = nn.Linear(2 * channels, channels)

    def forward(self, global_feature: Tensor, patches: Tokens) -> Tensor:
        """(B,C), (B,N,C) -> (B,C)"""
        reduced = self.reduce(self.norm(torch.cat([global_feature, patches.mean()], 1)))
        return reduced * torch.sigmoid(1.702 * reduced)


class NeckedHead(nn.Module):
    """BNNeck and a classifier without bias; absent modalities take no part in the statistics."""

    def __init__(self, modalities: int, channels: int, identities: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(channels) for _ in range(modalities)])
        for norm in self._norms():
            norm.bias.requires_grad_(False)
        self.classifier = nn.Linear(modalities * channels, identities, bias=False)
        nn.init.normal_(self.classifier.weight, std=0.001)

    def forward(self, features: Tensor, presence: Tensor) -> Tensor:
        """Logits of the identities. features (B,MC), presence (B,M) -> (B,identities)"""
        return self.classifier(self.normalise(features, presence))

    def _norms(self) -> list[nn.BatchNorm1d]:
        return [cast(nn.BatchNorm1d, norm) for norm in self.norms]

    def normalise(self, features: Tensor, presence: Tensor) -> Tensor:
        """The features behind the neck, zero where a modality is absent. -> (B,MC)"""
        parts = []
        for norm, part, here in zip(
            self._norms(), features.chunk(len(self.norms), 1), presence.unbind(1), strict=True
        ):
            result = torch.zeros_like(part)
            if self.training and int(here.sum()) > 1:
                result[here] = norm(part[here])
            else:  # a single sample has no statistics of its own
                kept = functional.batch_norm(
                    part, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
                )
                result = kept.masked_fill(~here.unsqueeze(1), 0)
            parts.append(result)
        return torch.cat(parts, 1)


class ReIdModel(nn.Module):
    """Pictures of aligned modalities in, one unit vector a sighting out."""

    def __init__(self, config: ReIdConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = build_image_encoder(config.image_encoder, config.channels)
        count, channels = len(config.modalities), config.channels
        self.cameras = nn.Embedding(len(config.cameras), channels) if config.cameras else None
        if self.cameras is not None:
            nn.init.normal_(self.cameras.weight, std=0.02)
        own_cls = self.encoder.body.has_cls
        self.pools = nn.ModuleDict(
            {} if own_cls else {name: AttentionPool(channels) for name in config.modalities}
        )
        self.reductions = nn.ModuleDict(
            {name: GlobalLocal(channels) for name in config.modalities} if config.global_local else {}
        )
        self.slimmer = MultiModalSlimmer(config.modalities, config.recipe, self.encoder.patches, channels)
        self.original_head = NeckedHead(count, channels, config.identities)
        self.slimmed_head = NeckedHead(count, channels, config.identities)

    @property
    def view(self) -> View:
        """How pictures become pixels."""
        return self.encoder.view

    def forward(
        self,
        pixels: Mapping[str, Tensor],
        present: Mapping[str, Tensor] | None = None,
        cameras: Tensor | None = None,
    ) -> Tensor:
        """The unit vector that describes every sighting; see `encode` and `compare`."""
        return self.compare(self.describe(self.encode(pixels, cameras), present))

    def encode(self, pixels: Mapping[str, Tensor], cameras: Tensor | None = None) -> dict[str, Encoded]:
        """Patches and global feature of every modality given, in one run of the backbone.

        pixels (B,3,H,W) each; cameras (B,): the numbers of the cameras, for their embedding; a camera that
        has none adds nothing.
        """
        if not pixels:
            raise ValueError(f"pixels: expected some of {', '.join(self.config.modalities)}, found none")
        for name in pixels:
            if name not in self.config.modalities:
                known = ", ".join(self.config.modalities)
                raise ValueError(f"pixels: expected {known}, found {name!r}")
        names, count = list(pixels), len(next(iter(pixels.values())))
        if any(len(each) != count for each in pixels.values()):
            found = {name: len(each) for name, each in pixels.items()}
            raise ValueError(f"pixels: expected equally many of every modality, found {found}")
        tokens = self.encoder(torch.cat(list(pixels.values())))
        shift = self._camera_shift(cameras, count)
        result = {}
        for place, name in enumerate(names):
            rows = slice(place * count, (place + 1) * count)
            patches, cls = tokens.features[rows], None if tokens.cls is None else tokens.cls[rows]
            if shift is not None:
                patches = patches + shift.unsqueeze(1)
                cls = None if cls is None else cls + shift
            own = Tokens(patches)
            feature = self.pools[name](own) if cls is None else cls
            if name in self.reductions:
                feature = self.reductions[name](feature, own)
            result[name] = Encoded(own, feature)
        return result

    def _camera_shift(self, cameras: Tensor | None, count: int) -> Tensor | None:
        """What a sighting's camera adds to all its tokens. -> (B,C)"""
        if self.cameras is None or cameras is None:
            return None
        if cameras.shape != (count,):
            raise ValueError(f"cameras: expected {count} numbers, found shape {tuple(cameras.shape)}")
        known = torch.tensor(self.config.cameras, device=cameras.device)
        match = (cameras.unsqueeze(1) == known).to(self.cameras.weight.dtype)
        return match @ self.cameras.weight

    def describe(
        self, encoded: Mapping[str, Encoded], present: Mapping[str, Tensor] | None = None
    ) -> Description:
        """The original and the slimmed feature of every sighting.

        present (B,) boolean says of which sightings a modality is there, of all if it has no entry; one left
        out of `encoded` is absent everywhere.
        """
        slim = self.slimmer.inspect(
            {name: each.patches for name, each in encoded.items()},
            {name: each.global_feature for name, each in encoded.items()},
            present,
        )
        any_slim = next(iter(slim.values()))
        nothing = torch.zeros_like(any_slim.feature)
        nowhere = replace(
            any_slim, tokens=torch.zeros_like(any_slim.tokens), present=torch.zeros_like(any_slim.present)
        )
        whole = {name: slim.get(name, nowhere) for name in self.config.modalities}
        original = [
            encoded[name].global_feature.to(nothing.dtype).masked_fill(~each.present.unsqueeze(1), 0)
            if name in encoded
            else nothing
            for name, each in whole.items()
        ]
        return Description(
            torch.cat(original, 1), torch.cat([each.feature for each in whole.values()], 1), whole
        )

    def head(self, kind: Kind) -> NeckedHead:
        """The head of one of the two features."""
        return self.original_head if kind == "original" else self.slimmed_head

    def logits(self, description: Description, kind: Kind) -> Tensor:
        """Logits of the identities from one of the two features. -> (B,identities)"""
        feature = description.original if kind == "original" else description.slimmed
        return self.head(kind)(feature, description.presence)

    def compare(self, description: Description, features: Features | None = None) -> Tensor:
        """The unit vector that sightings are compared by; the parts of "both" weigh alike. -> (B,F)"""
        chosen = features or self.config.features
        if chosen not in KINDS:
            raise ValueError(f"features: expected {', '.join(KINDS)}, found {chosen!r}")
        presence = description.presence
        given = {"original": description.original, "slimmed": description.slimmed}
        parts = [unit(self.head(kind).normalise(given[kind], presence)) for kind in KINDS[chosen]]
        return unit(torch.cat(parts, 1))

    def save(self, folder: PathLike[str] | str) -> None:
        """Write configuration and weights into a folder."""
        from safetensors.torch import save

        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        config = replace(self.config, image_encoder=self.encoder.spec)
        weights = {name: value.contiguous() for name, value in self.state_dict().items()}
        with written_beside(place / WEIGHTS, "wb") as file:
            file.write(save(weights, metadata={"format": "pt"}))
        with written_beside(place / CONFIG) as file:
            json.dump(asdict(config), file, indent=2)


def load(folder: PathLike[str] | str) -> ReIdModel:
    """The model that `ReIdModel.save` wrote, in evaluation mode."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    place = Path(folder)
    if not place.is_dir():
        raise ValueError(f"{place}: there is no such folder of a model")
    model = ReIdModel(ReIdConfig.read(place / CONFIG))
    try:
        model.load_state_dict(load_file(place / WEIGHTS))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise ValueError(f"{place / WEIGHTS}: not the weights of this model ({reason})") from None
    return model.eval()


def class_of(identities: Sequence[int]) -> dict[int, int]:
    """The class of each identity: their order."""
    return {identity: place for place, identity in enumerate(sorted(set(identities)))}
