"""MixUp.

What. Trains on the weighted mean of each image and its neighbour in the batch, and of their labels. Each step
draws one weight from Beta(alpha, alpha).
Effect on quality. Published: a gain in long trainings only (alpha 0.2 in the study's recipes of 135 epochs,
0.25 in those of 270, none in the recipe below 60).
Effect on time. One more pass over the batch.
Relieves. Nothing: it buys accuracy that long trainings can use.
When not. Short trainings, which do not overfit.
Use. Each batch: `images, labels = mix_up(images, labels, num_classes=1000)`.
Source. Zhang et al. 2018, https://arxiv.org/abs/1710.09412; MosaicML Composer 0.7, algorithms/mixup;
torchvision.transforms.v2.MixUp.
Unlike Composer. Same default (0.2). The second image is the neighbour in the batch, there a random one of the
batch; the weight w may exceed one half, there it is the smaller of w and 1 - w. Mixing losses instead of
labels, off by default there, is left out.
"""

from dataclasses import replace

from pydantic import Field
from torch import Tensor, nn
from torchvision.transforms import v2

from common.config.schema import Strict
from common.training.method import Batch, Method, Progress


def mix_up(
    images: Tensor, labels: Tensor, *, num_classes: int | None, alpha: float = 0.2
) -> tuple[Tensor, Tensor]:
    """Return mixed images and their labels as probabilities (batch, num_classes) float32.

    `labels` are indices (batch,) int64, or probabilities already. The neighbour of a sample is the one before
    it. The weight comes from torch's random numbers on the CPU.
    """
    mixed: tuple[Tensor, Tensor] = v2.MixUp(alpha=alpha, num_classes=num_classes)(images, labels)
    return mixed


class Mixup(Method):
    """Mixes training batches; each micro-batch within itself, all with the weight of the step.

    Raises UserError for a model without a linear layer, whose outputs are the classes.
    """

    mix = staticmethod(mix_up)
    num_classes: int | None = None

    class Config(Strict):
        alpha: float = Field(
            default=0.2, gt=0, description="of the Beta distribution; larger: nearer to equal shares"
        )

    def model(self, model: nn.Module) -> nn.Module:
        widths = [layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear)]
        if not widths:
            self.refuse("no linear layer in this model")
        self.num_classes = widths[-1]
        return model

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        if progress is None:
            return batch
        with progress.randomness(self.name):
            settings = {"num_classes": self.num_classes, "alpha": self.settings.alpha}
            images, labels = self.mix(batch.inputs["x"], batch.targets["labels"], **settings)
        return replace(batch, inputs=batch.inputs | {"x": images}, targets=batch.targets | {"labels": labels})
