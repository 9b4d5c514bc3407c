"""Fitting predictors to measurements: data, splits, the fitting loop, recipes."""
