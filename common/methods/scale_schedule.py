"""Scale schedule.

What. Shortens the training, and with it the decay of the learning rate and its milestones, by a factor; the
warm-up keeps its length.
Effect on quality. Costs accuracy, which other methods must buy back.
Effect on time. The number of steps times `ratio`: 90 -> 28 epochs at 0.32.
Relieves. Everything: number of steps.
When not. Alone, unless the recipe exceeds its target.
Use. With the data: `num_epochs = scale_length(num_epochs, 0.32)  # before the schedule is built on it`.
Source. MosaicML Composer 0.7, scale_schedule_ratio (its warm-up is not scaled either).
Unlike Composer. The ratio is required here, 1.0 by default there.
"""

from pydantic import Field

from common.config.schema import RunConfig, Strict
from common.training.method import Method


def scale_length(num_epochs: int, ratio: float) -> int:
    """Return a number of epochs, or of steps, times `ratio`, rounded down."""
    return int(round(num_epochs * ratio, 9))  # 90 * 0.7 is 62.99999999999999


def scale_duration(duration: str, ratio: float) -> str:
    """Return a duration such as `90ep` times `ratio`, rounded down to whole units."""
    return f"{scale_length(int(duration[:-2]), ratio)}{duration[-2:]}"


class ScaleSchedule(Method):
    is_configured_first = True

    class Config(Strict):
        ratio: float = Field(gt=0, description="new length over old length; published: 0.32 for ResNet-50")

    def configure(self, config: RunConfig) -> RunConfig:
        def scaled(duration: str) -> str:
            return scale_duration(duration, self.settings.ratio)

        schedule = config.schedule.model_dump()
        schedule["milestones"] = [scaled(milestone) for milestone in schedule["milestones"]]
        schedule["decay"] = schedule["decay"] and scaled(schedule["decay"])
        changed = config.replaced(max_duration=scaled(config.max_duration), schedule=schedule)
        if changed.max_duration == config.max_duration:
            self.refuse(f"max_duration stays {config.max_duration}")
        return changed
