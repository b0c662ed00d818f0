"""Speed-ups chosen for a model of one's own: `from common.tune import optimize`."""

from common.study.tune_model import Tuned, optimize

__all__ = ["Tuned", "optimize"]
