"""Pictures: roofline, elasticities, sweeps, Pareto fronts, and self-contained HTML reports. Needs the extra `plot`."""
