"""Measurements of servers from outside and of engines from inside, sweeps over both, and charts of the results.
Forecasts nothing."""
