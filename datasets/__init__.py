"""Measurements, importers and the GPU catalog: what the forecasts are fitted to and checked against."""
