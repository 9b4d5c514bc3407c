"""Sweeps: many hypothetical machines × workloads, in chunks over all devices and processes, into one Parquet file."""
