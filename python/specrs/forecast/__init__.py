"""Forecasts of speculation: TPOT and speed-up at every K, from a cost model and acceptance lengths. Serves nothing."""

from specrs.core import CostModel
from specrs.forecast.acceptance import GeometricAcceptance, lengths_beyond, lengths_from_shares, lengths_up_to
from specrs.forecast.compare import PassTimes, Reduction, pass_reductions, tpot_reductions, verification_growth
from specrs.forecast.forecast import Forecast, KForecast, forecast
from specrs.forecast.regression import LineFit
from specrs.forecast.sweeps import Departure, Prediction, Series, series

__all__ = [
    "CostModel",
    "Departure",
    "Forecast",
    "GeometricAcceptance",
    "KForecast",
    "LineFit",
    "PassTimes",
    "Prediction",
    "Reduction",
    "Series",
    "forecast",
    "lengths_beyond",
    "lengths_from_shares",
    "lengths_up_to",
    "pass_reductions",
    "series",
    "tpot_reductions",
    "verification_growth",
]
