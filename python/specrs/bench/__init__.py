"""Measuring: servers from outside, engines from inside, sweeps over both, and pictures of them. Forecasts nothing."""
