"""The keys of a configuration of this benchmark."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from common.config.schema import DataConfig, Fraction, RunConfig, Strict
from common.errors import UserError
from image_classification import closed

Decoder = Literal["auto", "threads", "dali", "nvjpeg"]
Where = Literal["device", "host"]
SizePx = Annotated[int, Field(ge=32)]


class ModelConfig(Strict):
    """A torchvision ResNet by name, with initial weights drawn as MosaicML or the MLPerf reference does."""

    name: Literal["resnet18", "resnet50", "resnet101"]
    num_classes: int = Field(gt=1)
    initial_weights: Literal["mosaic", "reference"] = "mosaic"


class ImageDataConfig(DataConfig):
    """Sizes in pixels; `min_crop_area` is the smallest part of an image that a training crop shows."""

    train_crop_px: SizePx
    crop_px_by_epoch: list[SizePx]  # empty: train_crop_px in every epoch
    evaluation_resize_px: SizePx  # the shorter side
    evaluation_crop_px: SizePx
    min_crop_area: float = Field(gt=0, le=1)
    flip_probability: Fraction
    alternates_flips: bool = False  # set by alternating_flip: each image is mirrored in every other epoch
    loader: Literal["workers", "dali", "resident"]
    num_workers: int = Field(ge=1)  # decoding processes or threads
    stored_px: SizePx  # loader resident: images are held squashed to this size ...
    stored_px_if_it_fits: SizePx | None = None  # ... or to this one, where memory is known to hold it ...
    stored_on: Where  # ... on the GPU, or in memory of the host
    encoded_px: SizePx | None = None  # the shorter side of training images that preparation encodes again
    decoder: Decoder = "auto"  # loader resident: auto is DALI on a GPU where it is installed, else threads

    @model_validator(mode="after")
    def check_flip_probability(self) -> Self:
        if self.alternates_flips and self.flip_probability != 0.5:
            raise ValueError("alternates_flips needs a flip_probability of 0.5")
        return self

    @model_validator(mode="after")
    def check_evaluation_px(self) -> Self:
        if self.evaluation_crop_px > self.evaluation_resize_px:
            raise ValueError("evaluation_crop_px must be at most evaluation_resize_px")
        return self

    @model_validator(mode="after")
    def check_stored_px(self) -> Self:
        if self.stored_px_if_it_fits is not None and self.stored_px_if_it_fits <= self.stored_px:
            raise ValueError("stored_px_if_it_fits must be larger than stored_px, or null")
        return self

    @property
    def crop_sizes_px(self) -> list[int]:
        """The sizes of training crops, each once, in the order of the epochs."""
        return list(dict.fromkeys(self.crop_px_by_epoch)) or [self.train_crop_px]

    def crop_px(self, epoch: int) -> int:
        """Return the size of the training crops of an epoch, from 0; the last size stays."""
        sizes = self.crop_px_by_epoch or [self.train_crop_px]
        return sizes[min(epoch, len(sizes) - 1)]


class Config(RunConfig):
    model: ModelConfig
    data: ImageDataConfig
    closed_rules: ClassVar = closed.RULES

    def check_origins(self, origins: Mapping[tuple[str, ...], str]) -> None:
        """Refuse a `stored_px` set by hand that the configuration's `stored_px_if_it_fits` may replace."""
        by_hand, larger = (origins.get(("data", key), "") for key in ("stored_px", "stored_px_if_it_fits"))
        suite = f"{self.benchmark}/"
        if self.data.stored_px_if_it_fits and not by_hand.startswith(suite) and larger.startswith(suite):
            raise UserError(
                f"data.stored_px_if_it_fits={self.data.stored_px_if_it_fits} would replace it where it fits",
                where=f"{by_hand}: data.stored_px",
                hint="set data.stored_px_if_it_fits=null, too",
            )

    @property
    def prepared_hint(self) -> str:
        """The command that prepares the data, with the size of images that are encoded again."""
        size = self.data.encoded_px
        return super().prepared_hint + (f" --set data.encoded_px={size}" if size else "")

    def prepared_with(self) -> dict[str, Any]:
        """Add the size of images that are encoded again; None: all stay as they came."""
        return super().prepared_with() | {"data.encoded_px": self.data.encoded_px}
