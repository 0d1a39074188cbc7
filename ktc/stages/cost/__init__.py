"""What a plan costs in time on its host: predicted from the captured graphs and the host's rates."""

from ktc.stages.cost.predict import predict
from ktc.stages.cost.types import Prediction, Use
from ktc.stages.cost.work import Work, work_of

__all__ = ["Prediction", "Use", "Work", "predict", "work_of"]
