"""Alternating flip.

What. Mirrors each image in every second epoch. Usually each epoch draws anew; here only the first one draws,
so that two epochs in a row show both sides of every image.
Effect on quality. Published: a gain on CIFAR-10 wherever mirroring helps; on ImageNet only with light crops
(Jordan 2024).
Effect on time. None.
Relieves. Nothing: it buys accuracy that fewer epochs could spend.
When not. Images whose meaning changes in a mirror, such as digits; to compare with the published runs.
Use. With the data: `dataset = alternate_flips(dataset)`. Each epoch: `dataset.epoch = epoch`.
Source. Jordan 2024, https://arxiv.org/abs/2404.00498.
Unlike Composer. Composer 0.7 has no such method.
"""

from typing import Any

import numpy as np
from torch.utils.data import Dataset

from common.config.schema import RunConfig
from common.training.method import Method
from image_classification.data.crops import alternating_flips


class AlternatingFlips(Dataset[Any]):
    """A data set of (image, label) that mirrors images as `epoch` says; images are (..., height, width)."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        image, label = self.dataset[number]
        is_mirrored = alternating_flips(np.array([number]), seed=self.seed, epoch=self.epoch)[0]
        return (image.flip(-1) if is_mirrored else image), label


def alternate_flips(dataset: Any, *, seed: int = 0) -> AlternatingFlips:
    """Return a data set of (image, label) that mirrors its images; set its `epoch` before each epoch.

    Persistent workers of a DataLoader do not see the change.
    """
    return AlternatingFlips(dataset, seed)


class AlternatingFlip(Method):
    """Sets `data.alternates_flips`; raises UserError unless `data.flip_probability` is 0.5."""

    def configure(self, config: RunConfig) -> RunConfig:
        data = config.model_dump()["data"]
        if (share := data["flip_probability"]) != 0.5:
            what = f"mirrors an image in half of the epochs, but data.flip_probability is {share:g}"
            self.refuse(what, hint="set it to 0.5 or leave the method out")
        return config.replaced(data=data | {"alternates_flips": True})
